"""Synthetic tasks: delete a feature from a codebase with tests, and ask for it back; the tests are
the reward.

Anything that has tests becomes a task whose solution is known to exist: remove code so that the
rest still works while the tests of one feature fail. What Cursor says
(https://cursor.com/blog/composer-2-5): features were deleted from codebases with many tests so that
they stay functional while specific testable features vanish; 25 times more synthetic tasks than for
Composer 2, harder ones both selected and created during the run; and the model found ways around: a
leftover type-checking cache gave away a deleted signature, compiled bytecode was decompiled.
Derived: a task is valid if

    tests(original) all pass
    tests(original - feature) fail in the feature's own tests and in no other

Two sorts of codebases go through the same deletion (`delete_feature`) and the same checks
(`tests_lost`): small generated ones, the gym of the laptop-sized model (`make_task`), and any
Python repository with a pytest suite (`make_repository_task`, --repo). Deletion is one of a range
of approaches (stated): from generated codebases come three kinds more, repair, rename and extend
(world/kinds/), asked for as people type (world/requests.py). `Curriculum` selects levels that are
neither always won nor never, and opens harder ones.

What surrounds a task is in world/, each part in a file of its own: the functions of generated
codebases (micro.py), an expert that plays them competently but sloppily, the sandbox, the workspace
and its tools, the judge. For repositories it is in repositories/: their study (study.py), how code
is cut out of a file (deletion.py), what makes a feature (features.py), what a task has to pass
(task_checks.py), the installation, and an audit that notices cheating.

Ours: the micro-world and its levels, the held-out split, the expert's flaws, the levels for
repositories, every audit rule. Left out: agents that delete features (the deletion is by ast),
other languages, building what is not Python, tests that a subclass inherits as hidden tests,
repositories over 5,000 files.

`python synth_tasks.py` shows one task of each kind as a diff, tests before, after and restored, an
expert's segment, and a cheat that wins nothing;
`python synth_tasks.py --repo=PATH --n=50 --out=tasks.jsonl` makes tasks,
`--check=tasks.jsonl` verifies them again; `--autoinstall --repo=PATH` finds out what has to be
installed first."""

import copy
import random
import re
import shlex
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from repositories.audit import audit
from repositories.autoinstall import autoinstall
from repositories.copies import telltales, without_copies, without_test_copies
from repositories.deletion import (
    definitions,
    find_again,
    find_dead_helpers,
    remove_definitions,
    stub_bodies,
)
from world.expert import expert, play, record_expert
from repositories.features import (
    REPO_LEVELS,
    draw_feature,
    feature_id,
    repository_prompt,
    why_no_feature,
)
from world.files import printable, unified
from repositories.task_checks import (
    check_collected,
    check_imports,
    check_original,
    check_trivial_bodies,
    failing_mutants,
    inherited_tests,
    judging_tests,
    without_tests,
)
from repositories.verdict import judge
from world.judge import run_trusted
from world.machine import MachineFailure
from world.kinds import KINDS
from world.micro import BENCH, NOUNS, TRAINING, draw_function, draw_inputs, trivial_body_passes
from world.memo import CHECK
from repositories.study import study
from repositories.run_suite import run_suite
from world.requests import draw_instruction, type_untidily, write_instruction
from world.sandbox import Sandbox
from repositories.cage import repository_sandbox, sandbox_for
from repositories.source import function_of_test
from world.task import Action, Discard, Refusal, Task
from repositories.task_file import instance, read_tasks
from repositories.task_flags import read_flags, refuse_unwritable
from world.tools import TOOLS
from world.workspace import Workspace


# ---------------------------------------------------------------- deletion, of any codebase
def delete_feature(files, chosen, dials, found):
    """Returns (files without the feature, helpers). The helpers are functions that only the feature
    used; they are deleted with it.

    files: path -> text; chosen: the definitions that make the feature; found: all definitions of
    the codebase; dials: GONE, or a row of REPO_LEVELS (not of LEVELS). Of kind "gone" the feature
    goes as a whole, signature and all; else a stub stays, with its docstring if
    dials["docstring"]."""
    if dials["kind"] != "gone":
        # Only the bodies are replaced. The names stay, so nothing that imports them breaks.
        stubs = stub_bodies(files, chosen, dials["docstring"])
        helpers = find_dead_helpers(files, stubs, chosen, found)
        rest = remove_definitions(files, helpers)
        # The helpers' lines are gone, so the definitions have moved in their files.
        return stub_bodies(rest, find_again(rest, chosen), dials["docstring"]), helpers

    # The definitions go, with their names in imports and in __all__.
    rest = remove_definitions(files, chosen)
    helpers = find_dead_helpers(files, rest, chosen, found)
    if helpers:
        rest = remove_definitions(files, chosen + helpers)

    # Any other file that still knows a deleted name goes, too: a cache, an index, bytecode.
    for path in telltales(rest, {one.name for one in chosen + helpers}):
        del rest[path]
    return rest, helpers


def tests_lost(stable, outcomes, own):
    """The set of tests that fail without a feature, or the reason (a string) why the deletion makes
    no task: some test has to fail, and each that fails has to be one of the feature's `own` tests.
    stable: the tests that pass with the feature; outcomes: test -> outcome without it."""
    broken = {test for test in stable if outcomes.get(test) != "passed"}
    if not broken:
        return "no test fails"
    if broken - own:
        return "other tests fail"
    return broken


# ---------------------------------------------------------------- generated codebases
# What a level is, where its row does not say otherwise.
#   kind         what is asked for: see world/kinds/
#   steps        least and most operations of a target
#   targets      number of functions that are deleted, spoiled or renamed
#   where        what states their specification: prompt, docs or tests
#   named        the prompt names the target
#   untidy       share of requests that are typed in a hurry
#   also         share of requests with a second instruction
#   lint         the tool lint may be offered
PLAIN = dict(kind="put_back", steps=(1, 2), targets=1, where="docs", named=True)
PLAIN.update(untidy=0.0, also=0.0, lint=False)
TYPED = dict(untidy=0.4, also=0.4, lint=True)
LEVELS = [
    dict(steps=(1, 1), where="prompt"),
    dict(where="docs"),
    dict(where="tests"),
    dict(steps=(1, 1), targets=2, named=False),
    dict(targets=2, named=False),
    dict(steps=(1, 1), targets=3, named=False),
    # 6 and 7 are harder: opened only where may_open has them (train.py), which the recipe has not
    dict(targets=4, named=False),
    dict(steps=(1, 1), targets=6, named=False),
    # from 8 on: other kinds, and requests as people type them
    dict(kind="repair", **TYPED),
    dict(kind="repair", targets=2, named=False, **TYPED),
    dict(kind="rename", **TYPED),
    dict(kind="extend", steps=(2, 2), **TYPED),
    dict(kind="extend", steps=(2, 2), targets=2, named=False, **TYPED),
    dict(untidy=1.0, also=0.5, lint=True),
    # from 14 on: the hardest of each kind
    dict(steps=(1, 1), targets=8, named=False),
    dict(kind="repair", targets=4, named=False, **TYPED),
    dict(kind="rename", targets=2, **TYPED),
    dict(kind="extend", steps=(2, 2), targets=4, named=False, **TYPED),
    # for demonstrations: each constant has to stand behind its own operation
    dict(steps=(2, 2)),
    dict(steps=(2, 2), targets=2, named=False),
]
LEVELS = [{**PLAIN, **row} for row in LEVELS]
# What the recipe trains on and evaluates.
DEFAULT_LEVELS = (0, 1, 2, 3, 4, 5, 8, 11, 13)
# From easy to hard: a curriculum that has mastered a level opens the next of its row.
LADDERS = [(0, 1, 2, 3, 4, 5, 6, 7, 14), (13,), (8, 9, 15), (10, 16), (11, 12, 17)]
# What the bench asks for: each kind, from one target to eight.
BENCH_LEVELS = (1, 4, 6, 7, 14, 13, 8, 9, 15, 10, 16, 11, 12, 17)


def describe_level(level):
    """A level in a few words, for tables."""
    row = LEVELS[level]
    words = [row["kind"].replace("_", " "), str(row["targets"])]
    if row["untidy"] == 1:
        words.append("untidy")
    elif row["kind"] == "put_back" and row["named"]:
        words.append(f"by {row['where']}")
    return " ".join(words)


# The deleted functions of a generated codebase go as a whole.
GONE = dict(kind="gone", docstring=False)


# train, and two that no training sees: heldout has other names and compositions; in bench one
# target in four has words of micro.BENCH, too
SPLITS = "train", "heldout", "bench"


def make_task(level, seed, split="train"):
    """The micro task of this level, seed and split: the same three always give the same task."""
    assert split in SPLITS, f"split is {', '.join(SPLITS)}, not {split}"
    assert 0 <= level < len(LEVELS), f"levels are 0 to {len(LEVELS) - 1}, not {level}"
    rng = random.Random(f"{split}/{level}/{seed}")
    while True:
        task = draw_task(rng, level, split)
        if task:
            task.instance_id = f"micro-{split}-{level}-{seed}"
            task.meta["split"] = split
            return task


def draw_task(rng, level, split):
    """Draws a codebase and a deletion once -> the task, or None where a check refuses it."""
    dials = LEVELS[level]

    # Draw the modules, how many functions each holds, and which of the functions are the targets.
    if dials["named"] and dials["targets"] == 1:
        sizes = rng.sample([1, 2], 2)
    else:
        sizes = [2] * (dials["targets"] // 2 + 1)
    nouns = rng.sample(NOUNS, len(NOUNS))
    modules = [nouns.pop() for _ in sizes]
    slots = []  # the module of each function
    for module, size in zip(modules, sizes):
        slots += [module] * size
    chosen = sorted(rng.sample(range(len(slots)), dials["targets"]))

    functions, cases = draw_functions(rng, slots, chosen, dials["steps"], split, nouns)
    return begin_and_verify(rng, level, functions, cases, chosen)


def draw_functions(rng, slots, chosen, steps, split, nouns):
    """(functions, (visible inputs, hidden inputs) of each). slots: the module of each function;
    chosen: indices of the targets, which have `steps` operations; nouns: those that are left for
    names."""
    functions, cases = [], []
    for number, module in enumerate(slots):
        is_chosen = number in chosen
        length = steps if is_chosen else (1, 2)
        held_out = split != "train" and is_chosen
        # In the bench one target in four may need an operation that no training has.
        is_far = split == "bench" and is_chosen and rng.random() < 0.25
        words = BENCH if is_far else TRAINING
        noun = nouns.pop()
        # Draw each function until its visible tests cannot be passed without it.
        while True:
            function = draw_function(rng, module, noun, length, held_out, words)
            inputs = draw_inputs(function, rng)
            if inputs and not trivial_body_passes(function, inputs[0]):
                break
        functions.append(function)
        cases.append(inputs)
    return functions, cases


def begin_and_verify(rng, level, functions, cases, chosen):
    """The task: these functions as a codebase, in which something is to be done to the chosen ones.
    None where a check refuses it. cases: (visible inputs, hidden inputs) of each function; chosen:
    indices of functions."""
    dials = LEVELS[level]
    kind = KINDS[dials["kind"]]
    # The order of the tests in their file.
    order = rng.sample(range(len(functions)), len(functions))
    codebase = write_codebase(rng, dials, functions, cases, chosen, order)
    targets = [functions[number] for number in order if number in chosen]
    modules = sorted({function.module for function in functions})

    # What the agent is given. A feature is deleted in the same way as from any repository.
    def delete(original):
        names = {(f"{function.module}.py", function.name) for function in targets}
        found = definitions(original, [f"{module}.py" for module in modules])
        feature = [one for one in found if (one.path, one.name) in names]
        rest, _ = delete_feature(original, feature, GONE, found)
        return {path: text.rstrip("\n") + "\n" if text else "" for path, text in rest.items()}

    begun = kind.begin(codebase, targets, rng, delete)
    original, files = begun.done, begun.given

    # The checks: the suite is green, and what is given loses exactly the targets' tests. The tests
    # are those of the original, which the given ones may differ from.
    tests = {function.name: f"test_{function.name}" for function in functions}
    stable, own = list(tests.values()), [tests[function.name] for function in targets]
    if set(micro_outcomes(original, stable)[0].values()) != {"passed"}:
        return None
    outcomes, printed = micro_outcomes({**files, "tests.py": original["tests.py"]}, stable)
    if tests_lost(stable, outcomes, set(own)) != set(own):
        return None

    # The judge calls the targets with hidden inputs, and all functions with visible ones.
    hidden, visible = [], []
    for number in chosen:
        hidden += judged_cases(functions[number], cases[number][1])
    for number in order:
        visible += judged_cases(functions[number], cases[number][0])

    tools = draw_tools(rng, dials, kind.needs)
    red = printed if files["tests.py"] == original["tests.py"] else ""
    request, asked = micro_request(rng, dials, targets, begun.gone, red, modules)
    sources = sorted(path for path in files if path[:-3] in modules or path == "app.py")
    return Task(
        instance_id="",
        problem_statement=micro_prompt(request, tools, sources),
        files=files,
        solution={path: text for path, text in original.items() if files[path] != text},
        tools=tools,
        level=level,
        hidden=hidden + begun.cases,
        test_command="python tests.py",
        FAIL_TO_PASS=own,
        PASS_TO_PASS=[test for test in stable if test not in own],
        meta={
            "visible": visible,
            "targets": [asdict(function) for function in targets],
            "label": describe_level(level),
            "gone": begun.gone,
            "asked": asked,
        },
    )


def judged_cases(function, inputs):
    """[module, function, arguments, expected value] for each input."""
    return [[function.module, function.name, [xs], function.value(xs)] for xs in inputs]


def write_codebase(rng, dials, functions, cases, chosen, order):
    """{path: text} of modules, docs and tests. order: the order of the tests in their file."""
    # The modules, each with the code of its functions.
    modules = sorted({function.module for function in functions})
    files = {}
    for module in modules:
        code = [function.code() for function in functions if function.module == module]
        files[f"{module}.py"] = "\n\n".join(code)

    # The docs say what each function does; a deleted function is in them only if the level puts
    # its specification there.
    known = []
    for number, function in enumerate(functions):
        if number not in chosen or dials["where"] == "docs":
            known.append(f"{function.module}.{function.name}: {function.phrase()}\n")
    files["docs.md"] = "".join(rng.sample(known, len(known)))

    # One test for each function, of its visible inputs.
    tests = []
    for number in order:
        function = functions[number]
        said = f"  # {function.phrase()}" if dials["where"] == "tests" else ""
        lines = [f"def test_{function.name}():{said}\n"]
        for xs in cases[number][0]:
            call = f"{function.module}.{function.name}({xs})"
            lines.append(f"    assert {call} == {function.value(xs)}\n")
        tests.append("".join(lines))

    imports = "".join(f"import {module}\n" for module in ("check", *modules))
    files["tests.py"] = imports + "\n\n" + "\n\n".join(tests) + "\n\ncheck.run(globals())\n"
    files["check.py"] = CHECK
    return files


def micro_outcomes(files, tests):
    """({test: "passed" or "failed"} of a generated codebase, what its own suite prints)."""
    result = run_trusted(files)

    # check.py prints the name of each function that is missing or gives a wrong value, and then the
    # counts. Without the counts the suite itself broke, and every test has failed.
    if not re.search(r"^\d+ passed, \d+ failed$", result.output, re.M):
        return dict.fromkeys(tests, "failed"), result.output
    failed = {f"test_{name}" for name in re.findall(r"^\w+\.(\w+)[:(]", result.output, re.M)}
    outcomes = {test: "failed" if test in failed else "passed" for test in tests}
    return outcomes, result.output


def draw_tools(rng, dials, needs):
    """edit_file, run_command, what the kind of task needs, and a random subset of the others that
    leaves the task solvable. The tests can always be run: where they could not, feedback on a call
    to a missing run_command also taught a small policy not to test where it can."""
    tools = {"run_command", *needs}
    for tool, probability in (("read_file", 0.5), ("search_codebase", 0.8)):
        if rng.random() < probability:
            tools.add(tool)
    if dials["where"] != "prompt":
        tools.add("search_codebase")
    if dials["lint"] and rng.random() < 0.5:
        tools.add("lint")
    tools = ["edit_file", *sorted(tools)]
    return tuple(rng.sample(tools, len(tools)))


def micro_request(rng, dials, targets, old_names, red, modules):
    """(the request, what it asks for) of a generated task. old_names: of targets that are to be
    renamed; red: what the test run prints, "" where it is green."""
    kind, where = KINDS[dials["kind"]], dials["where"]
    names = [f"{target.module}.{target.name}" for target in targets]
    is_named = dials["named"]
    request = kind.unnamed
    if is_named:
        # One sentence for each target.
        olds = [[old] for old in old_names] or [[] for _ in targets]
        request = " ".join(kind.ask(target, where, *old) for target, old in zip(targets, olds))

    # As people type it, and with a second instruction.
    if dials["untidy"] and rng.random() < dials["untidy"]:
        request, is_named = type_untidily(rng, request, names, red, modules)
    also = None
    if dials["also"] and rng.random() < dials["also"]:
        also = draw_instruction(rng, is_named, targets, modules)
        request += f"\n{write_instruction(also)}"
    return request, dict(kind=dials["kind"], named=is_named, where=where, also=also)


def micro_prompt(request, tools, sources):
    """The prompt of a generated task: what is asked, the tools, the files."""
    return f"{request}\nTools: {' '.join(tools)}\nFiles: {' '.join(sources)} docs.md tests.py"


def example_texts(number, seed, levels=range(6)):
    """Demonstrations as plain texts, one per task: a tokenizer is trained on them."""
    texts = []
    for i in range(number):
        # An expert at work on a task of each level in turn.
        rng = random.Random(f"{seed}/text/{i}")
        task = make_task(levels[i % len(levels)], (seed << 24) + i)
        story, files = record_expert(task, rng)
        # All that a transcript can hold: the prompt, the files, thoughts, tool calls, outputs.
        parts = [task.problem_statement, *files.values()]
        for action, outputs in story:
            parts.append(action.text)
            for name, words in action.calls:
                parts += [name, *words]
            parts += outputs
        texts.append("\n".join(parts))
    return texts


# ---------------------------------------------------------------- the curriculum
class Curriculum:
    """Selects levels that are neither always solved nor never, and opens a harder one when the
    hardest is nearly mastered.

    Each level has a Beta posterior over its solve rate. It forgets, since the policy changes:
    `forget` is the fraction of a count that remains after eight rollouts, however they are grouped.
    A level is drawn with weight p (1 - p), where p is a sample of its posterior. That weight is the
    variance of a 0/1 reward, and a group without variance teaches nothing. With on=False all levels
    are drawn alike. Of a ladder of levels (LADDERS) a mastered one opens the next, if it is one of
    `may_open`. Tasks are made as they are drawn, never one twice, or come from a file with
    `sizes` (level -> number of tasks in it)."""

    def __init__(self, levels=range(6), seed=0, on=True, may_open=range(8), forget=0.9, sizes=None):
        self.levels = sorted(sizes or levels)
        self.on, self.forget, self.seed, self.sizes = on, forget, seed, sizes
        self.may_open = () if sizes else may_open  # a file has no harder ones to open
        self.counts = {level: [1.0, 1.0] for level in self.levels}  # won, lost
        self.drawn = 0
        self.taken = {level: 0 for level in sizes or ()}

    def next(self, rng):
        """The next task: (level, seed) of one to generate, or (level, index) of one of the file.
        Every task of the file comes once before any comes again."""
        self.drawn += 1
        if not self.sizes:
            return self.choose(rng, self.levels), self.task_number()
        # Rounds that each level has completed. A level that is a round ahead of another waits.
        rounds = {level: taken // self.sizes[level] for level, taken in self.taken.items()}
        fewest = min(rounds.values())
        level = self.choose(rng, [level for level in self.levels if rounds[level] == fewest])
        index = self.taken[level] % self.sizes[level]
        self.taken[level] += 1
        return level, index

    def task_number(self):
        """The seed of the next generated task. A run has a million of them; those of a run with the
        next seed begin beyond."""
        return self.seed * 1_000_003 + self.drawn % 10**6

    def choose(self, rng, levels):
        """A level, by the variance of its reward; the floor gives each a chance."""
        if not self.on:
            return rng.choice(levels)
        samples = [rng.betavariate(*self.counts[level]) for level in levels]
        return rng.choices(levels, [0.02 + p * (1 - p) for p in samples])[0]

    def update(self, level, solved, total):
        """Counts a group's outcome; opens the next level once the hardest one is nearly
        mastered."""
        won, lost = self.counts[level]
        # Forgetting goes by rollouts, not by groups. By groups, the counts of small groups would
        # never reach what opens a level, and large groups would remember more rollouts. What is
        # forgotten of the prior (1, 1) is added again, so that no level is ever given up.
        keep = self.forget ** (total / 8)
        self.counts[level] = [
            keep * won + solved + 1 - keep,
            keep * lost + total - solved + 1 - keep,
        ]
        # The hardest level of a ladder opens the next one when nearly all of about twenty rollouts
        # solved it.
        harder = self.next_on_ladder(level)
        if not self.on or harder not in self.may_open or harder in self.levels:
            return
        if sum(self.counts[level]) > 20 and self.rate(level) > 0.85:
            self.levels.append(harder)
            self.counts[harder] = [1.0, 1.0]

    def next_on_ladder(self, level):
        """The level behind the hardest one of its ladder that is open, where this is `level`; else
        None."""
        for ladder in LADDERS:
            if level in ladder:
                after = ladder[ladder.index(level) + 1 :]
                is_hardest = not any(other in self.levels for other in after)
                return after[0] if after and is_hardest else None

    def rate(self, level):
        """The mean of the posterior: the estimated solve rate."""
        won, lost = self.counts[level]
        return won / (won + lost)

    def state_dict(self):
        return {
            "levels": list(self.levels),
            "counts": {level: list(counts) for level, counts in self.counts.items()},
            "seed": self.seed,
            "drawn": self.drawn,
            "on": self.on,
            "taken": dict(self.taken),
        }

    def load_state_dict(self, state):
        self.levels = list(state["levels"])
        self.seed, self.drawn, self.on = state["seed"], state["drawn"], state["on"]
        self.counts = {int(level): list(counts) for level, counts in state["counts"].items()}
        self.taken = {int(level): taken for level, taken in state["taken"].items()}


# ---------------------------------------------------------------- tasks from real repositories
def make_repository_task(repository, chosen, level, rng, sandbox):
    """A verified Task, or the reason why there is none."""
    try:
        return delete_and_verify_in(repository, chosen, level, rng, sandbox)
    except Discard as reason:
        return str(reason)


def delete_and_verify_in(repository, chosen, level, rng, sandbox):
    """A verified Task of a repository; raises Discard where there is none. The steps are those of a
    generated codebase, with checks of what only real ones do."""
    dials, files, stable = REPO_LEVELS[level], repository.files, repository.stable

    # 1) Delete the feature, and what else holds its code.
    base, helpers = delete_feature(files, chosen, dials, repository.definitions)
    if base == files:
        raise Discard("nothing to delete")
    deleted_from = {path for path in files if path in base and base[path] != files[path]}
    base, copied = without_copies(files, base, chosen + helpers, dials["kind"] == "gone")
    if copied:
        raise Discard("its code stands elsewhere, too")

    # 2) The suite fails in the feature's own tests and in no other, and the rest still works.
    outcomes, broken = break_tests(repository, stable, base, chosen, sandbox)

    # 3) The tests that can judge: each can be hidden, and has changed copies that must fail.
    broken, unready, groups = judging_tests(files, broken, outcomes, deleted_from)
    patient = copy.copy(sandbox)  # the time a suite needs was measured for one run
    patient.time_limit *= 5
    names = [one.name for one in chosen]
    mutants = failing_mutants(files, groups, broken, names, rng, patient, repository.plan)
    groups = [group for group in groups if mutants[group]]
    if not groups:
        raise Discard("its tests cannot be told from changed ones")

    # 4) Half of them are hidden: they are the reward. The others stay where the agent sees them.
    hidden = sorted(rng.sample(groups, (len(groups) + 1) // 2))
    visible = without_tests(without_test_copies(files, base, hidden), hidden)
    inherited = inherited_tests(files, stable, groups)
    passed = [node for node in stable if outcomes.get(node) == "passed"]

    # A test that runs one of these test functions again (inherited in a subclass, imported) cannot
    # be hidden, so nothing is asked of it.
    solution, pristine = changed_files(files, base, visible)
    task = Task(
        instance_id=feature_id(repository, chosen, level),
        problem_statement=repository_prompt(chosen, set(groups) - set(hidden)),
        files=visible,
        solution=solution,
        tools=TOOLS,
        level=level,
        hidden=sorted(node for node in broken if function_of_test(node) in hidden),
        test_command="python -m pytest -q",
        FAIL_TO_PASS=sorted(broken - inherited),
        PASS_TO_PASS=sorted(set(passed) - inherited),
        meta={
            "repo": repository.name,
            "kind": dials["kind"],
            "hidden_groups": hidden,
            "pristine": pristine,
            # The agent knows the visible tests word for word: code that read one of them changed
            # would know in which run it is.
            "mutants": {group: mutants[group] for group in hidden},
            "names": names,
            "ERROR_TO_PASS": sorted(unready - inherited),
            "suite": repository.plan.to_meta(),
        },
    )

    # 5) A body that anybody could write does not solve it, and the original does.
    check_trivial_bodies(files, chosen, task, patient)
    return check_original(task, repository, patient)


def break_tests(repository, stable, base, chosen, sandbox):
    """(outcome of each stable test, the tests that fail) of a repository without a feature. Raises
    Discard where anything but the feature's own tests breaks."""
    answer = run_suite(base, sandbox, stable, plan=repository.plan)
    check_collected(repository, answer.get("errors", {}))
    own = set().union(*(one.tests for one in chosen))
    broken = tests_lost(stable, answer["outcomes"], own)
    if isinstance(broken, str):
        raise Discard(broken)
    check_imports(repository, base, sandbox)
    return answer["outcomes"], broken


def changed_files(files, base, visible):
    """Returns two dicts path -> original text: the files that the deletion changed, and the files
    from which hidden tests were taken out. Files that were left out because they give the answer
    away are in neither: the original, too, has to pass without them."""
    solution, pristine = {}, {}
    for path, text in files.items():
        if path in base and base[path] != text:
            solution[path] = text
        elif path in visible and visible[path] != text:
            pristine[path] = text
    return solution, pristine


# ---------------------------------------------------------------- real repositories: the commands
def draw_features(repository, levels, rng):
    """Yields features, as (level, definitions, a random generator of its own), until none is left.
    Each is of the level that has the fewest so far."""
    levels, drawn, taken = list(levels), Counter(), set()
    while levels:
        level = min(levels, key=lambda level: (drawn[level], level))
        chosen = draw_feature(repository, level, rng, taken)
        if chosen is None:
            levels.remove(level)
            continue
        drawn[level] += 1
        yield level, chosen, random.Random(rng.random())


def generate(repo, out, n=50, level=None, seed=0, jobs=2, time_limit=60.0):
    """Writes up to n verified tasks to the file `out`, each as one line as soon as it is verified.
    Returns (tasks, {reason: number of features discarded for it}, seconds)."""
    # Features are drawn from the study, which knows which test runs which definition.
    refuse_unwritable(out)
    repository = study(repo, None, time_limit)
    sandbox = repository_sandbox(repository.files, repository.patience)
    levels = range(len(REPO_LEVELS)) if level is None else [level]
    features = draw_features(repository, levels, random.Random(seed))
    tasks, reasons, start = [], Counter(), time.perf_counter()

    with ThreadPoolExecutor(jobs) as pool:

        def submit_next():
            """Hands the next feature to a worker. Returns a list of one future, empty if no feature
            is left."""
            feature = next(features, None)
            if feature is None:
                return []
            level, chosen, own_rng = feature
            words = (repository, chosen, level, own_rng, sandbox)
            return [pool.submit(make_repository_task, *words)]

        waiting = []
        try:
            # Twice as many features as there are workers, so that few of them ever wait.
            for _ in range(2 * jobs):
                waiting += submit_next()
            while waiting and len(tasks) < n:
                # In the order of the draw: how long a feature takes must not decide which tasks
                # there are. What is done makes room for the next feature.
                task = waiting.pop(0).result()
                if isinstance(task, str):
                    reasons[task] += 1
                else:
                    tasks.append(task)
                    # an older file of that name stays until the first task replaces it
                    with open(out, "a" if len(tasks) > 1 else "w") as file:
                        file.write(instance(task) + "\n")
                waiting += submit_next()
                discarded = sum(reasons.values())
                progress(f"{len(tasks)} of {n} tasks verified, {discarded} discarded", start)
        except KeyboardInterrupt:
            kept = f"{out} holds the {len(tasks)} tasks verified so far"
            print(f"\nstopped: {kept if tasks else 'nothing was written'}", file=sys.stderr)
            raise
        finally:
            # After enough tasks, or an error: features that no worker has begun are given up.
            for future in waiting:
                future.cancel()

    if not tasks:
        why = dict(reasons) or why_no_feature(repository, levels)
        raise Refusal(f"{repo}: no task could be verified: {why}")
    return tasks, reasons, time.perf_counter() - start


def progress(text, start):
    """Shows the progress on the terminal, in one line that is written over each time."""
    print(f"\r{text} ({time.perf_counter() - start:.0f} s)   ", end="", file=sys.stderr, flush=True)


def check(path, jobs=2, time_limit=60.0):
    """Verifies the tasks of a file again, by nothing but the file. A task holds if it is unsolved
    as it is given, and solved by its original. Returns (how many hold, how many there are)."""
    tasks, start = read_tasks(path), time.perf_counter()
    if not tasks:
        raise Refusal(f"{path}: holds no tasks: --check takes what --repo=PATH --out={path} wrote")

    def why_not(task):
        """Why a task does not hold, or ""."""
        sandbox = sandbox_for(task)
        sandbox.time_limit = time_limit
        # As it is given it must fail, and with the original in its place it must pass.
        if judge(task, task.files, sandbox).solved:
            return "it is solved as it is given"
        verdict = judge(task, {**task.files, **task.solution}, sandbox)
        if not verdict.solved:
            return f"its original does not solve it ({printable(verdict.reason)})"
        return ""

    # Threads are enough, since the work is done in the sandboxes' processes. The results come in
    # the order of the file.
    number_good = 0
    with ThreadPoolExecutor(jobs) as pool:
        for number, (task, why) in enumerate(zip(tasks, pool.map(why_not, tasks)), 1):
            number_good += not why
            progress(f"{number_good} of {number} hold", start)
            if why:
                print(f"\n{task.instance_id} does not hold: {why}", file=sys.stderr)
    return number_good, len(tasks)


# ---------------------------------------------------------------- demo
def demo():
    task, sandbox = make_task(3, 6), Sandbox()
    original = {**task.files, **task.solution}

    # One task of each kind: what is asked, and what solves it as a diff.
    for level in (3, 8, 10, 11):
        one = make_task(level, 6)
        request = one.problem_statement.partition("\nTools:")[0].replace("\n", " | ")
        print(f"---- {describe_level(level)}: {request}")
        print(unified(one.files, {**one.files, **one.solution}), end="")

    # The tests of the first one before, after and restored.
    for name, files in (("before", original), ("deleted", task.files), ("restored", original)):
        output = sandbox.run_files(files, task.test_command).output
        print(f"{name:9}", " | ".join(output.split("\n")))

    # The expert's segment, turn by turn.
    with Workspace(task, sandbox) as workspace:
        for action, outputs in play(expert(task, random.Random(0)), workspace):
            for (name, arguments), output in zip(action.calls, outputs):
                print(f"  {name}{arguments}"[:110], "->", output.replace("\n", " | ")[:80])
        print(" ", action.text, "->", judge(task, workspace.files(), sandbox))

    # A cheat that wins nothing, and two that the audit tells apart.
    cheat = {**task.files, "tests.py": "print('8 passed, 0 failed')\n", "check.py": ""}
    printed = sandbox.run_files(cheat, task.test_command).output.strip()
    reason = judge(task, cheat, sandbox).reason
    print("a cheat rewrites the tests:", printed, "->", reason)
    with_all_tools = replace(task, tools=TOOLS)
    for command in ("git status; rm -rf .mypy_cache; python tests.py", "strings -n 8 .m*/*"):
        story = [(Action("", [("run_command", (command,))]), [""])]
        found = audit(with_all_tools, story, {})
        said = [f"{finding.severity}, {finding.rule}" for finding in found]
        print(f"  audit, by facts: {command} ->", "; ".join(said) or "nothing")
    print(
        "The deleted functions failed their tests, the expert restored them, and rewriting the "
        "tests won nothing."
    )


# ---------------------------------------------------------------- command line
def list_counts(counts):
    """{name: number} -> text, such as `3 function, 1 gone`"""
    return ", ".join(f"{number} {name}" for name, number in counts.items()) or "none"


def main():
    # The commands that make no tasks: check a file, show the demo, install a repository.
    flags = read_flags()
    if flags.check is not None:
        good, total = check(flags.check, flags.jobs, flags.time_limit)
        print(f"\n{good} of {total} tasks hold")
        return int(good < total)
    if flags.repo is None:
        demo()
        return 0
    if flags.autoinstall:
        find_environment(flags)
        return 0

    # Tasks of a repository, and what became of the features that were tried.
    tasks, reasons, seconds = generate(
        flags.repo,
        flags.out,
        flags.n,
        flags.level,
        flags.seed,
        flags.jobs,
        flags.time_limit,
    )

    kinds = list_counts(Counter(task.meta["kind"] for task in tasks))
    lengths = sorted(len(task.problem_statement) for task in tasks)
    print(
        f"\n{len(tasks)} tasks in {flags.out}: {kinds}; discarded: {list_counts(reasons)}; "
        f"{len(tasks) / seconds * 60:.0f} tasks a minute; "
        f"median prompt {lengths[len(lengths) // 2]} characters"
    )
    return 0


def find_environment(flags):
    """Installs what --repo needs into an environment, and prints the command that makes tasks with
    it."""
    # Without --keep the environment stands beside the file of tasks.
    keep = flags.keep
    if not keep:
        name = f"{Path(flags.repo).resolve().name}-environment"
        keep = str(Path(flags.out).parent / name)
    autoinstall(flags.repo, flags.time_limit, flags.seed, keep=keep)
    # That command runs in the environment's own Python, with the flags that make tasks.
    words = [str(Path(keep).absolute() / "bin" / "python"), str(Path(__file__))]
    for name, value in vars(flags).items():
        if name not in ("autoinstall", "keep", "check") and value is not None:
            words.append(f"--{name}={value}")
    print(
        f"The environment works and is kept in {keep}. Tasks are made with it by\n"
        f"    {shlex.join(words)}"
    )


def main_or_one_line():
    """The exit code of main. An error of the user or of the machine is printed as one line, without
    a traceback."""
    try:
        return main()
    except Refusal as refusal:
        message = str(refusal)
    # a name that is too long, a file that is closed to us, a disk that is full
    except OSError as error:
        message = f"{error.filename or 'cannot write'}: {error.strerror or error}"
    except MachineFailure as failure:
        message = f"the machine failed, and no task is to blame: {failure}"
    except KeyboardInterrupt:
        return 130
    print(f"synth_tasks.py: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main_or_one_line())
