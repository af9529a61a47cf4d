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

Two kinds of codebases go through the same deletion (`delete_feature`) and the same gate
(`tests_lost`): small generated ones, the gym of the laptop-sized model (`make_task`), and any
Python repository with a pytest suite (`make_repository_task`, --repo). `Curriculum` selects levels
that are neither always won nor never, and opens harder ones.

What surrounds a task is in world/, each part in a file of its own: the sandbox, the workspace and
its tools, the judge, an expert that plays generated tasks competently but sloppily, the study of a
repository, the installation, and an audit that notices cheating.

Ours: the micro-world and its levels, the held-out split, the expert's flaws, the levels for
repositories, every audit rule. Left out: agents that delete features (the deletion is by ast),
other languages, building what is not Python, tests that a subclass inherits as hidden tests,
repositories over 5,000 files.

`python synth_tasks.py` shows a deletion, tests before, after and restored, an expert's episode, and
a cheat that wins nothing; `python synth_tasks.py --repo=PATH --n=50 --out=tasks.jsonl` makes tasks,
`--check=tasks.jsonl` verifies them again; `--autoinstall --repo=PATH` finds out what has to be
installed first."""

import argparse
import ast
import copy
import difflib
import hashlib
import os
import random
import re
import shlex
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path

from world import suite as suites
from world.audit import audit
from world.autoinstall import autoinstall
from world.copies import telltales, without_copies, without_test_copies
from world.expert import demonstrate, expert, play
from world.files import printable, unified
from world.hygiene import sources
from world.judge import judge, judge_repository, run_judgement, run_trusted
from world.machine import MachineFailure
from world.micro import NOUNS, OPS, REDUCTIONS, Function, draw_function
from world.purity import CHECK
from world.repository import definitions, methods, study
from world.run_suite import WORLDS, green_command, import_outcomes, run_suite
from world.sandbox import Sandbox, repository_sandbox, sandbox_for
from world.source import (
    find_test,
    is_text,
    package_root,
    parsed,
    remove_names,
    remove_statements,
    remove_tests,
    replace_bodies,
)
from world.task import Action, Refusal, Task
from world.task_file import instance, read_tasks
from world.tools import TOOLS
from world.tree import keep_modes, tree_meta
from world.twins import list_changes, lost_names, place_twins
from world.workspace import Workspace

# ---------------------------------------------------------------- deletion, of any codebase
# a feature that goes as a whole, signature and all; the other kinds leave a stub
GONE = dict(kind="gone", docstring=False)


def by_path(chosen):
    """path -> the nodes of these definitions in that file."""
    found = {}
    for one in chosen:
        found.setdefault(one.path, []).extend(one.nodes)
    return found


def stubbed(files, chosen, keep_docstring, body="raise NotImplementedError"):
    """The files with these bodies replaced; every other byte stays."""
    out = dict(files)
    for path, nodes in by_path(functions_of(chosen)).items():
        out[path] = replace_bodies(files[path], nodes, keep_docstring, body)
    return out


def functions_of(chosen):
    return [one for one in chosen if one.kind != "class"]


def removed(files, chosen):
    """The files without these definitions, and without their names in imports and __all__ of other
    sources."""
    out = dict(files)
    for path, nodes in by_path(chosen).items():
        out[path] = remove_statements(files[path], nodes)
    lost = {(one.path, one.name) for one in chosen}
    return remove_names(out, sources(out), lost) if lost else out


def dead_helpers(files, base, chosen, found):
    """Top-level functions that only the deleted code used: they would give the answer away."""
    lost = "\n".join(ast.unparse(node) for one in chosen for node in one.nodes)
    words = set(re.findall(r"\w+", lost))
    left = "\n".join(base[path] for path in base if path.endswith((".py", ".pyi")))
    paths = {one.path for one in chosen}
    count = lambda name, text: len(re.findall(rf"\b{name}\b", text))
    return [
        one
        for one in found
        if one.kind == "function"
        and one not in chosen
        and one.path in paths
        and one.name in words
        and count(one.name, left) == count(one.name, base[one.path]) == 1
    ]


def moved(files, chosen):
    """The same definitions at their lines in the changed files."""
    now = {(one.path, one.name): one for one in definitions(files, {one.path for one in chosen})}
    return [now[one.path, one.name] for one in chosen]


def delete_feature(files, chosen, dials, found):
    """(files without the feature, the dead helpers that went with it)."""
    if dials["kind"] != "gone":
        helpers = dead_helpers(files, stubbed(files, chosen, dials["docstring"]), chosen, found)
        left = removed(files, helpers)
        return stubbed(left, moved(left, chosen), dials["docstring"]), helpers
    base = removed(files, chosen)
    helpers = dead_helpers(files, base, chosen, found)
    base = removed(files, chosen + helpers) if helpers else base
    for path in telltales(base, {one.name for one in chosen + helpers}):
        del base[path]
    return base, helpers


def tests_lost(stable, outcomes, own):
    """The tests of a green suite that fail without a feature, or the reason why it makes no task:
    some test has to fail, and each that fails has to be one of the feature's `own`."""
    broken = {test for test in stable if outcomes.get(test) != "passed"}
    if not broken:
        return "no test fails"
    if broken - own:
        return "other tests fail"
    return broken


# ---------------------------------------------------------------- generated codebases
# level -> number of steps, deletions, and where the specification is ("prompt", "docs", "tests");
# named: prompt names the target
LEVELS = [
    dict(steps=(1, 1), deletions=1, where="prompt", named=True),
    dict(steps=(1, 2), deletions=1, where="docs", named=True),
    dict(steps=(1, 2), deletions=1, where="tests", named=True),
    dict(steps=(1, 1), deletions=2, where="docs", named=False),
    dict(steps=(1, 2), deletions=2, where="docs", named=False),
    dict(steps=(1, 1), deletions=3, where="docs", named=False),
    # 6 and 7: made when 5 is won
    dict(steps=(1, 2), deletions=4, where="docs", named=False),
    dict(steps=(1, 1), deletions=6, where="docs", named=False),
]


def near_misses(function, rng):
    """The mistakes the tests have to see: a step forgotten, a constant off, another operation,
    another reduction."""
    for i, (op, k) in enumerate(function.steps):
        others = [
            [],
            [(op, k + 1)],
            [(op, k - 1)],
            [(rng.choice(list(OPS)), k)],
            [(op, rng.randint(2, 9))],
        ]
        for other in others:
            yield Function(
                "", "", function.steps[:i] + other + function.steps[i + 1 :], function.reduction
            )
    yield Function("", "", function.steps, rng.choice(list(REDUCTIONS)))


def draw_inputs(function, rng, number=10):
    """(visible inputs, hidden inputs) or None if no two inputs tell the function from its near
    misses."""
    inputs = [[rng.randint(0, 12) for _ in range(rng.randint(3, 4))] for _ in range(number)]
    right = [function.value(xs) for xs in inputs]
    if len({repr(value) for value in right}) < 4:
        return None  # almost constant: a trivial body would pass
    seen = [
        {i for i, xs in enumerate(inputs) if miss.value(xs) != right[i]}
        for miss in near_misses(function, rng)
    ]
    if not all(seen[0::5][: len(function.steps)]):
        return None  # a step that does nothing
    seen = [where for where in seen if where]  # the rest is equivalent on these inputs
    first = max(range(number), key=lambda i: sum(i in where for where in seen))
    second = max(
        range(number),
        key=lambda i: (i != first) + 9 * sum(i in where and first not in where for where in seen),
    )
    if sum(first in where or second in where for where in seen) < len(seen):
        return None
    return [inputs[first], inputs[second]], [
        xs for xs in inputs if xs not in (inputs[first], inputs[second])
    ][:6]


def trivial(function, inputs):
    """True if `return xs`, `return []`, `return 0` or any constant gives all these values."""
    values = [function.value(xs) for xs in inputs]
    return (
        values == inputs
        or all(value == values[0] for value in values)
        and len(values) > 1
        or values[0] in ([], 0)
    )


def make_task(level, seed, split="train"):
    """The micro task of this level, seed and split: the same three always give the same task."""
    assert split in ("train", "heldout"), f"split is train or heldout, not {split}"
    assert 0 <= level < len(LEVELS), f"levels are 0 to {len(LEVELS) - 1}, not {level}"
    rng = random.Random(f"{split}/{level}/{seed}")
    while True:
        task = try_task(rng, level, split)
        if task:
            task.instance_id = f"micro-{split}-{level}-{seed}"
            return task


def try_task(rng, level, split):
    """One draw of a codebase and a deletion; None where a gate refuses it."""
    dials = LEVELS[level]
    sizes = rng.sample([1, 2], 2) if dials["named"] else [2] * (dials["deletions"] // 2 + 1)
    nouns = rng.sample(NOUNS, len(NOUNS))
    modules = [nouns.pop() for _ in sizes]
    slots = [module for module, size in zip(modules, sizes) for _ in range(size)]
    chosen = set(rng.sample(range(len(slots)), dials["deletions"]))
    functions, cases = [], []
    for i, module in enumerate(slots):
        noun, function, inputs = nouns.pop(), None, None
        while inputs is None or trivial(function, inputs[0]):
            steps = dials["steps"] if i in chosen else (1, 2)
            function = draw_function(rng, module, noun, steps, split == "heldout" and i in chosen)
            inputs = draw_inputs(function, rng)
        functions.append(function)
        cases.append(inputs)
    return assemble(rng, level, functions, cases, sorted(chosen))


def assemble(rng, level, functions, cases, chosen):
    """Files, deletion, gates and prompt of one codebase."""
    dials, modules = LEVELS[level], sorted({function.module for function in functions})
    original = {
        f"{m}.py": "\n\n".join(f.code() for f in functions if f.module == m) for m in modules
    }
    order = rng.sample(range(len(functions)), len(functions))
    said = lambda f: f"  # {f.phrase()}" if dials["where"] == "tests" else ""
    tests = "\n\n".join(
        f"def test_{functions[i].name}():{said(functions[i])}\n"
        + "".join(
            f"    assert {functions[i].module}.{functions[i].name}({xs}) == {functions[i].value(xs)}\n"
            for xs in cases[i][0]
        )
        for i in order
    )
    known = [f for i, f in enumerate(functions) if i not in chosen or dials["where"] == "docs"]
    original["docs.md"] = "".join(
        f"{f.module}.{f.name}: {f.phrase()}\n" for f in rng.sample(known, len(known))
    )
    original["tests.py"] = (
        "".join(f"import {m}\n" for m in ("check", *modules))
        + f"\n\n{tests}\n\ncheck.run(globals())\n"
    )
    original["check.py"] = CHECK
    gone = [functions[i] for i in order if i in chosen]

    # Delete the feature as from any repository.
    found = definitions(original, [f"{module}.py" for module in modules])
    names = {(f"{f.module}.py", f.name) for f in gone}
    feature = [one for one in found if (one.path, one.name) in names]
    files, _ = delete_feature(original, feature, GONE, found)
    files = {path: text.rstrip("\n") + "\n" if text else "" for path, text in files.items()}

    # The gates: the suite is green, and it loses exactly the feature's tests.
    stable, own = [f"test_{f.name}" for f in functions], {f"test_{f.name}" for f in gone}
    if set(micro_outcomes(original, stable).values()) != {"passed"}:
        return None
    if tests_lost(stable, micro_outcomes(files, stable), own) != own:
        return None
    tools = draw_tools(rng, dials)
    case = lambda i, xs: [functions[i].module, functions[i].name, [xs], functions[i].value(xs)]
    return Task(
        "",
        micro_prompt(dials, gone, tools, modules),
        files,
        {path: text for path, text in original.items() if files[path] != text},
        tools,
        level,
        [case(i, xs) for i in chosen for xs in cases[i][1]],
        "python tests.py",
        [f"test_{f.name}" for f in gone],
        [f"test_{f.name}" for f in functions if f not in gone],
        {
            "visible": [case(i, xs) for i in order for xs in cases[i][0]],
            "targets": [asdict(f) for f in gone],
        },
    )


def micro_outcomes(files, tests):
    """{test: "passed" or "failed"} of a generated codebase, by what its own suite prints."""
    result = run_trusted(files)
    # check.py names each function that a test misses or finds wrong. A suite that breaks counts
    # none.
    if not re.search(r"^\d+ passed, \d+ failed$", result.output, re.M):
        return dict.fromkeys(tests, "failed")
    red = {f"test_{name}" for name in re.findall(r"^\w+\.(\w+)[:(]", result.output, re.M)}
    return {test: "failed" if test in red else "passed" for test in tests}


def draw_tools(rng, dials):
    """edit_file, and a random subset of the others that leaves the task solvable."""
    look, run = ["read_file", "search_codebase"], ["run_command"]
    tools = {tool for tool, p in zip(look, (0.5, 0.8)) if rng.random() < p}
    tools |= {tool for tool in run if rng.random() < 0.75 or not dials["named"]}
    if dials["where"] != "prompt":
        tools.add("search_codebase")
    tools = ["edit_file", *sorted(tools)]
    return tuple(rng.sample(tools, len(tools)))


def micro_prompt(dials, gone, tools, modules):
    if dials["named"]:
        where = {
            "prompt": f": {gone[0].phrase()}.",
            "docs": ". See docs.md.",
            "tests": ". See tests.py.",
        }[dials["where"]]
        ask = f"Put back `{gone[0].module}.{gone[0].name}`{where}"
    else:
        ask = "Some functions are missing. Find them and put them back."
    return f"{ask}\nTools: {' '.join(tools)}\nFiles: {' '.join(f'{m}.py' for m in modules)} docs.md tests.py"


def example_texts(number, seed):
    """What is said in demonstrations, as plain texts (a tokenizer is trained on them)."""
    texts = []
    for i in range(number):
        rng = random.Random(f"{seed}/text/{i}")
        task = make_task(i % 6, (seed << 24) + i)
        story, files = demonstrate(task, rng)
        said = [
            part
            for action, outputs in story
            for part in (action.text, *(w for n, a in action.calls for w in (n, *a)), *outputs)
        ]
        texts.append("\n".join([task.problem_statement, *files.values(), *said]))
    return texts


# ---------------------------------------------------------------- the curriculum
class Curriculum:
    """Selects levels that are neither always won nor never, and opens a harder one when the hardest
    is won.

    Per level a Beta posterior over the solve rate, with forgetting since the policy moves: `forget`
    is what remains of a count after eight rollouts, however they are grouped. A level is drawn with
    weight p (1 - p), p a sample of its posterior: the variance of its reward, which is what a group
    can learn from. Not `on`: a fixed mix of all levels alike. Tasks are made as they are drawn,
    never one twice, or come from a file with `sizes` (level -> number of tasks in it)."""

    def __init__(
        self,
        levels=range(6),
        seed=0,
        on=True,
        hardest=len(LEVELS) - 1,
        forget=0.9,
        sizes=None,
    ):
        self.levels, self.on, self.forget = sorted(sizes or levels), on, forget
        self.hardest = self.levels[-1] if sizes else hardest  # a file has no harder ones to open
        self.counts = {level: [1.0, 1.0] for level in self.levels}
        self.seed, self.drawn, self.sizes, self.taken = (
            seed,
            0,
            sizes,
            {level: 0 for level in sizes or ()},
        )

    def next(self, rng):
        """(level, seed), or (level, index) of a task of the file, each once before any comes
        again."""
        self.drawn += 1
        if not self.sizes:
            return self.choose(rng, self.levels), self.task_number()
        rounds = {level: taken // self.sizes[level] for level, taken in self.taken.items()}
        level = self.choose(
            rng, [level for level in self.levels if rounds[level] == min(rounds.values())]
        )
        self.taken[level] += 1
        return level, (self.taken[level] - 1) % self.sizes[level]

    def task_number(self):
        """Of a million for each run; the next run's begin beyond them."""
        return self.seed * 1_000_003 + self.drawn % 10**6

    def choose(self, rng, levels):
        if not self.on:
            return rng.choice(levels)
        samples = [rng.betavariate(*self.counts[level]) for level in levels]
        return rng.choices(levels, [0.02 + p * (1 - p) for p in samples])[0]

    def update(self, level, solved, total):
        """Counts a group's outcome; opens the next level once the hardest one is nearly
        mastered."""
        won, lost = self.counts[level]
        # By rollouts, not by groups: else the counts of small groups never reach what opens a
        # level, and those of large ones would remember for longer. The prior's share comes back, so
        # that no level is ever given up.
        keep = self.forget ** (total / 8)
        self.counts[level] = [
            keep * won + solved + 1 - keep,
            keep * lost + total - solved + 1 - keep,
        ]
        top = max(self.levels)
        if (
            self.on
            and level == top < self.hardest
            and sum(self.counts[top]) > 20
            and self.rate(top) > 0.85
        ):
            self.levels.append(top + 1)
            self.counts[top + 1] = [1.0, 1.0]

    def rate(self, level):
        won, lost = self.counts[level]
        return won / (won + lost)

    def state_dict(self):
        return {
            "levels": list(self.levels),
            "counts": {k: list(v) for k, v in self.counts.items()},
            "seed": self.seed,
            "drawn": self.drawn,
            "on": self.on,
            "taken": dict(self.taken),
        }

    def load_state_dict(self, state):
        self.levels, self.seed, self.drawn, self.on = (
            list(state["levels"]),
            state["seed"],
            state["drawn"],
            state["on"],
        )
        self.counts = {int(level): list(counts) for level, counts in state["counts"].items()}
        self.taken = {int(level): taken for level, taken in state["taken"].items()}


# ---------------------------------------------------------------- tasks from real repositories
REPO_LEVELS = [
    dict(kind="function", docstring=True),
    dict(kind="function", docstring=False),
    GONE,
    dict(kind="class", docstring=False),
    dict(kind="multi-file", docstring=False),
    dict(kind="module", docstring=False),
]


def draw_feature(repository, level, rng, taken):
    """Definitions that make one feature of this level, none of them drawn before; None when there
    is none left."""
    kind = REPO_LEVELS[level]["kind"]
    most = 0.6 * len(repository.stable)
    usable = [
        one
        for one in repository.definitions
        if 0 < len(one.tests) <= most
        and one.size() >= 3
        and not (one.wanted if kind == "gone" else one.early)
    ]
    for seed in rng.sample(usable, len(usable)):
        alike = sorted(
            (
                one
                for one in usable
                if one is not seed and one.kind != "class" and one.tests & seed.tests
            ),
            key=lambda one: -len(one.tests & seed.tests) / len(one.tests | seed.tests),
        )
        plain, near = seed.kind != "class", [one for one in alike if one.path != seed.path]
        chosen = {
            "function": [seed] if plain else [],
            "gone": [seed] if seed.kind != "method" else [],
            "class": [] if plain else [seed, *methods(seed, usable)],
            "multi-file": [seed] + near[: rng.randint(1, 3)] if plain else [],
            "module": [one for one in usable if one.path == seed.path and one.kind != "class"],
        }[kind]
        # no classes here: functions of one file that belong together
        if kind == "class" and not chosen:
            chosen = [seed] + [one for one in alike if one.path == seed.path][:2]
        key = frozenset((kind, one.path, one.name) for one in chosen)
        if (
            chosen
            and key not in taken
            and (len(chosen) > 1 or kind not in ("multi-file", "module", "class"))
        ):
            taken.add(key)
            return chosen
    return None


def hideable(text, node_id):
    """True if the test function is here and no other test calls it by name."""
    name = node_id.split("[")[0].split("::")[-1]
    return find_test(text, node_id) is not None and not re.search(rf"(?<!def )\b{name}\b", text)


def without_tests(files, groups):
    """The files without these test functions."""
    out = dict(files)
    for path in {group.split("::")[0] for group in groups}:
        own = [group for group in groups if group.split("::")[0] == path]
        out[path] = remove_tests(files[path], own)
    return out


def make_repository_task(repository, chosen, level, rng, sandbox, prompt="short"):
    """A verified Task, or the reason why there is none."""
    dials, files = REPO_LEVELS[level], repository.files
    touching = set().union(*(one.tests for one in chosen))
    base, helpers = delete_feature(files, chosen, dials, repository.definitions)
    if base == files:
        return "nothing to delete"
    deleted_from = {path for path in files if path in base and base[path] != files[path]}
    base, copied = without_copies(files, base, chosen + helpers, dials["kind"] == "gone")
    if copied:
        return "its code stands elsewhere, too"
    stable = repository.stable
    answer = run_suite(base, sandbox, stable, plan=repository.plan)
    outcomes = answer["outcomes"]
    if any(
        "::" not in where for where in answer.get("errors", {}) if where not in repository.ignored
    ):
        return "a test file cannot be collected without it"
    broken = tests_lost(stable, outcomes, touching)
    if isinstance(broken, str):
        return broken
    # The tests may not import every module; what could be imported before can be imported now.
    dropped = [path for path in files.keys() - base.keys() if path.endswith(".py")]
    left_out = {package_root(path, set(files))[1] for path in dropped}
    modules = [name for name in repository.importable if name not in left_out]
    imported = import_outcomes(base, sandbox, modules) if modules else {}
    if any(imported.get(name) != "" for name in modules):
        return "the package does not import without it"
    # A test whose setup or teardown broke has not failed: it must pass with the feature in place,
    # and is no test of it.
    unready = {node for node in broken if outcomes.get(node) != "failed"}
    broken -= unready
    # Tests in the file that the feature lives in are the agent's to edit, so they judge nothing; a
    # doctest may have gone with its docstring.
    broken = {node for node in broken if node.split("::")[0] not in deleted_from}
    if not broken:
        return (
            "its tests cannot be set up without it" if unready else "its tests are in its own file"
        )
    unready = {node for node in unready if node.split("::")[0] not in deleted_from}
    groups = sorted({node.split("[")[0] for node in broken})
    groups = [
        group for group in filter(is_text, groups) if hideable(files[group.split("::")[0]], group)
    ]
    groups = [group for group in groups if not any(node.split("[")[0] == group for node in unready)]
    if not groups:
        return "its tests cannot be hidden"
    names = [one.name for one in chosen]
    # the time that the suite needs was measured without copies of its tests
    patient = copy.copy(sandbox)
    patient.time_limit *= 2 + MOST_CHANGES
    changes = failing_changes(files, groups, broken, names, rng, patient, repository.plan)
    groups = [group for group in groups if changes[group]]
    if not groups:
        return "its tests cannot be told from changed ones"
    hidden = sorted(rng.sample(groups, (len(groups) + 1) // 2))
    judged = sorted(node for node in broken if node.split("[")[0] in hidden)
    inherited = {
        node
        for node in repository.stable
        for group in groups
        if node.split("[")[0] != group
        # the same test, run again by a subclass or in a file that imports it
        and node.split("[")[0].split("::")[-1] == group.split("::")[-1]
        and not find_test(files[node.split("::")[0]], node)
    }
    visible = keep_modes(without_tests(without_test_copies(files, base, hidden), hidden), files)
    # What was left out for what it gives away is in no tree: the original, too, has to pass without
    # it.
    solution = {path: text for path, text in files.items() if path in base and base[path] != text}
    pristine = {
        path: text
        for path, text in files.items()
        if path in visible and visible[path] != text and path not in solution
    }
    task = Task(
        feature_id(repository, chosen, level),
        repository_prompt(chosen, prompt, set(groups) - set(hidden)),
        visible,
        solution,
        TOOLS,
        level,
        judged,
        "python -m pytest -q",
        sorted(broken - inherited),
        sorted(node for node in stable if outcomes.get(node) == "passed" and node not in inherited),
        {
            "repo": repository.name,
            "kind": dials["kind"],
            "hidden_groups": hidden,
            "pristine": pristine,
            "twins": {group: changes[group] for group in groups},
            "names": names,
            "ERROR_TO_PASS": sorted(unready - inherited),
            "suite": repository.plan.to_meta(),
            "statistics": statistics_of(repository, chosen, helpers),
            **tree_meta(files),
        },
    )
    if dials["kind"] != "gone" and trivial_passes(files, chosen, task, sandbox):
        return "a trivial body passes"
    if universal_passes(files, chosen, task, patient):
        return "an object that equals everything passes"
    return verified(task, repository, patient)


def verified(task, repository, sandbox):
    """The task as its own original solves it: by the whole judgement, once in each of WORLDS, and
    by the command that it states, twice; or the reason why there is none. What the original cannot
    keep green is not asked for."""
    original = {**task.files, **task.solution}
    for world in WORLDS:
        # the world of every verdict in both directions, the others in one
        lost, loose, _ = run_judgement(task, original, sandbox, world, world == WORLDS[0])
        if loose or set(lost) - set(task.PASS_TO_PASS):
            return "the original does not pass again"
        if lost:
            # unstable, or at odds with the names of the hidden tests: no other task asks for it
            # either
            repository.stable = [node for node in repository.stable if node not in set(lost)]
            task = replace(
                task, PASS_TO_PASS=[node for node in task.PASS_TO_PASS if node not in set(lost)]
            )
            lost, loose, _ = run_judgement(task, original, sandbox, world, world == WORLDS[0])
            if lost or loose:
                return "the original does not pass again"
    command, _, left_out = green_command(
        original, repository.plan, repository.ignored, repository.left_out, sandbox
    )
    if not command or set(left_out) & set(task.FAIL_TO_PASS):
        return "its test command is not green with the original in place"
    return replace(task, test_command=command)


# An exception of every kind that tests ask for.
OMNIVOROUS = (
    "raise type('Any', (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ZeroDivisionError, IndexError), "
    "{{{{'__str__': lambda self: {text!r}}}}})()"
)


def raised_text(files, task):
    """All the text of the hidden tests: whatever message they ask for is in it."""
    nodes = [find_test(files[group.split("::")[0]], group) for group in task.meta["hidden_groups"]]
    words = [
        part.value
        for node in nodes
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    return " ".join(words).replace("{", "").replace("}", "")


def trivial_passes(files, chosen, task, sandbox):
    """True if `return None`, `return <first argument>` or an exception of every kind satisfies the
    hidden tests."""
    for body in ("return None", "return {first}", OMNIVOROUS.format(text=raised_text(files, task))):
        outcomes = run_suite(
            stubbed(files, chosen, False, body),
            sandbox,
            task.hidden,
            brief=True,
            plan=suites.plan_of_task(task.meta.get("suite")),
        )["outcomes"]
        if all(outcomes.get(node) == "passed" for node in task.hidden):
            return True
    return False


# twins of one test; copies of all tests that one run may have
MOST_CHANGES, MOST_TWINS = 3, 300


def failing_changes(files, groups, nodes, names, rng, sandbox, plan=None):
    """{test function: its changes (at most MOST_CHANGES) that fail for the original in every one of
    `nodes`}."""
    lost = lost_names(names)
    nodes = sorted(node for node in nodes if node.split("[")[0] in groups)
    most = max(1, min(MOST_CHANGES + 1, MOST_TWINS // len(nodes)))
    candidates = {}
    for group in groups:
        kinds = list_changes(find_test(files[group.split("::")[0]], group), lost)
        # other values tell more than other operators: they come first
        order = sorted(
            rng.sample(range(len(kinds)), len(kinds)), key=lambda number: kinds[number] != "value"
        )
        candidates[group] = order[:most]
    sites = {group: numbers for group, numbers in candidates.items() if numbers}
    tree, copies = place_twins(files, sites, rng, lost)
    twins = {
        (node, number): copies[node.split("[")[0]][place + 1] + node[len(node.split("[")[0]) :]
        for node in nodes
        for place, number in enumerate(candidates[node.split("[")[0]])
    }
    outcomes = (
        run_suite(tree, sandbox, sorted(twins.values()), plan=plan)["outcomes"] if twins else {}
    )
    failing = {key for key, twin in twins.items() if outcomes.get(twin) == "failed"}
    found = {}
    for group, numbers in candidates.items():
        own = [node for node in nodes if node.split("[")[0] == group]
        found[group] = [
            number for number in numbers if all((node, number) in failing for node in own)
        ][:MOST_CHANGES]
    return found


# An object that is true, equal, greater, and holds everything, and whose attributes, items, sums
# and results are such objects.
UNIVERSAL = (
    "return (lambda make: make(make))(lambda make: type('Any', (), {{**{{f'__{{name}}__': lambda *words: True for name in "
    "'eq ne lt le gt ge contains bool'.split()}}, **{{f'__{{name}}__': lambda *words, **named: make(make) for name in "
    "'getattr call getitem enter add radd sub rsub mul rmul truediv rtruediv floordiv mod pow and or xor neg abs "
    "round'.split()}}, '__hash__': lambda self: 1, '__exit__': lambda *words: False, '__int__': lambda self: 1, "
    "'__float__': lambda self: 1.0, '__len__': lambda self: 1, '__iter__': lambda self: iter([make(make)])}})())"
)


def universal_passes(files, chosen, task, sandbox):
    """True if the judge is content with a feature that returns an object which equals
    everything."""
    forged = stubbed(files, chosen, False, UNIVERSAL)
    submission = {**task.files, **{path: forged[path] for path in task.solution if path in forged}}
    return judge_repository(replace(task, PASS_TO_PASS=[]), submission, sandbox).solved


def feature_id(repository, chosen, level):
    mark = hashlib.sha256(
        repr(sorted((one.path, one.name) for one in chosen)).encode()
    ).hexdigest()[:8]
    return f"{repository.name}-{level}-{chosen[0].name}-{mark}"


def statistics_of(repository, chosen, helpers):
    """lines deleted, files touched, callers elsewhere, nesting depth of the deepest statement."""

    def depth(node):
        return max(
            [depth(child) + isinstance(child, ast.stmt) for child in ast.iter_child_nodes(node)],
            default=0,
        )

    names = {one.name.split(".")[-1] for one in chosen}
    paths = sources(repository.files)
    nodes = (node for path in paths for node in ast.walk(parsed(repository.files[path])))
    called = (
        getattr(node.func, "id", getattr(node.func, "attr", ""))
        for node in nodes
        if isinstance(node, ast.Call)
    )
    outer = [
        one
        for one in chosen + helpers
        if one.kind != "method" or not any(other.kind == "class" for other in chosen)
    ]
    return dict(
        lines=sum(one.size() for one in outer),
        files=len({one.path for one in chosen}),
        definitions=len(chosen + helpers),
        callers=sum(name in names for name in called),
        depth=max(depth(one.node) for one in chosen),
    )


def repository_prompt(chosen, style, some_visible):
    """Short and underspecified, or with signature and docstring."""
    places = [
        f"`{one.name}` in {one.path}" for one in chosen if one.kind != "class" or len(chosen) == 1
    ][:3]
    more = f" and {len(chosen) - 3} more" if len(functions_of(chosen)) > 3 else ""
    text = f"{', '.join(places)}{more} {'was' if len(places) == 1 else 'were'} lost. "
    text += "Put the feature back so that the rest of the code can use it."
    text += (
        " Some of its tests are still here; others will be run."
        if some_visible
        else " Its tests will be run."
    )
    if style == "full":
        for one in functions_of(chosen):
            arguments = ast.unparse(one.node.args)
            text += (
                f"\n\n{one.name}({arguments}) in {one.path}\n{ast.get_docstring(one.node) or ''}"
            )
    return text


# ---------------------------------------------------------------- real repositories: the commands
def generate(repo, out, n=50, level=None, seed=0, jobs=2, time_limit=60.0, prompt="short"):
    """Writes up to n verified tasks, one line each as soon as it is verified. Returns (tasks,
    reasons for the discarded)."""
    place = Path(out).resolve()
    if (
        not os.access(f"{place.parent}/", os.W_OK)
        or place.is_dir()
        or place.exists()
        and not os.access(place, os.W_OK)
    ):
        raise Refusal(f"{out}: cannot be written")
    repository, rng, taken, tasks, reasons = (
        study(repo, None, time_limit),
        random.Random(seed),
        set(),
        [],
        Counter(),
    )
    sandbox, start, spread = (
        repository_sandbox(repository.files, repository.patience),
        time.perf_counter(),
        Counter(),
    )
    levels = [level] if level is not None else list(range(len(REPO_LEVELS)))

    def submit():
        """Hands the next feature to a worker: of the level with the fewest tasks so far; None when
        all are drawn."""
        while levels:
            pick = min(levels, key=lambda level: (spread[level], level))
            chosen = draw_feature(repository, pick, rng, taken)
            if chosen:
                spread[pick] += 1
                own = random.Random(rng.random())
                return pool.submit(
                    make_repository_task, repository, chosen, pick, own, sandbox, prompt
                )
            levels.remove(pick)

    with ThreadPoolExecutor(jobs) as pool:
        waiting = {future for future in (submit() for _ in range(jobs + 1)) if future}
        try:
            while waiting and len(tasks) < n:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    task = future.result()
                    if isinstance(task, str):
                        reasons[task] += 1
                    elif len(tasks) < n:
                        tasks.append(task)
                        # what was there stays until there is a task
                        with open(out, "a" if len(tasks) > 1 else "w") as file:
                            file.write(instance(task, repository.files) + "\n")
                    waiting |= {submit()} - {None}
                progress(
                    f"{len(tasks)} of {n} tasks verified, {sum(reasons.values())} discarded", start
                )
        except KeyboardInterrupt:
            print(f"\nstopped: {out} holds the {len(tasks)} tasks verified so far", file=sys.stderr)
            raise
        finally:
            for future in waiting:
                future.cancel()
    if not tasks:
        raise Refusal(
            f"{repo}: no task could be verified: {dict(reasons) or 'no test runs a definition of three lines'}"
        )
    return tasks, reasons, time.perf_counter() - start


def progress(text, start):
    print(f"\r{text} ({time.perf_counter() - start:.0f} s)   ", end="", file=sys.stderr, flush=True)


def check(path, jobs=2, time_limit=60.0):
    """(number of tasks of a file that hold from the file alone: unsolved as given, solved by the
    original; number of tasks)."""
    tasks, start = read_tasks(path), time.perf_counter()
    if not tasks:
        raise Refusal(f"{path}: holds no tasks: --check takes what --repo=PATH --out={path} wrote")

    def holds(task):
        """Why a task does not hold, or ""."""
        sandbox = sandbox_for(task)
        sandbox.time_limit = time_limit
        if judge(task, task.files, sandbox).solved:
            return "it is solved as it is given"
        verdict = judge(task, {**task.files, **task.solution}, sandbox)
        return (
            ""
            if verdict.solved
            else f"its original does not solve it ({printable(verdict.reason)})"
        )

    good = []
    with ThreadPoolExecutor(jobs) as pool:
        for task, why in zip(tasks, pool.map(holds, tasks)):
            good.append(not why)
            progress(f"{sum(good)} of {len(good)} hold", start)
            if why:
                print(f"\n{task.instance_id} does not hold: {why}", file=sys.stderr)
    return sum(good), len(tasks)


# ---------------------------------------------------------------- demo
def demo():
    task, sandbox = make_task(3, 6), Sandbox()
    whole = {**task.files, **task.solution}
    for path in task.solution:
        print(unified({path: whole[path]}, {path: task.files[path]}), end="")
    for name, files in (
        ("before", whole),
        ("deleted", task.files),
        ("restored", {**task.files, **task.solution}),
    ):
        print(
            f"{name:9}", " | ".join(sandbox.run_files(files, task.test_command).output.split("\n"))
        )
    with Workspace(task, sandbox) as workspace:
        for action, outputs in play(task, expert(task, random.Random(0)), workspace):
            for (name, arguments), output in zip(action.calls, outputs):
                print(f"  {name}{arguments}"[:110], "->", output.replace("\n", " | ")[:80])
        print(" ", action.text, "->", judge(task, workspace.files(), sandbox))
    cheat = {**task.files, "tests.py": "print('8 passed, 0 failed')\n", "check.py": ""}
    print(
        "a cheat rewrites the tests:",
        sandbox.run_files(cheat, task.test_command).output.strip(),
        "->",
        judge(task, cheat, sandbox).reason,
    )
    tasks = replace(task, tools=TOOLS)
    for command in ("git status; rm -rf .mypy_cache; python tests.py", "strings -n 8 .m*/*"):
        found = audit(tasks, [(Action("", [("run_command", (command,))]), [""])], {})
        said = [
            f"{finding.severity}, {finding.rule}"
            for finding in found
            if finding.severity != "style"
        ]
        print(f"  audit, by facts: {command} ->", "; ".join(said) or "nothing")
    print(
        "The deleted functions failed their tests, the expert restored them, and rewriting the tests won nothing."
    )


# ---------------------------------------------------------------- command line
class Parser(argparse.ArgumentParser):
    def error(self, message):
        names = [name for action in self._actions for name in action.option_strings]
        wrong = re.findall(r"--[\w-]+", message)
        near = (
            difflib.get_close_matches(wrong[0], names, 1)
            if "unrecognized" in message and wrong
            else []
        )
        self.exit(2, f"synth_tasks.py: {message}{f' (did you mean {near[0]}?)' if near else ''}\n")


def arguments():
    parser = Parser(
        allow_abbrev=False,
        description="Feature-deletion tasks. Without flags: a ten-second demonstration.",
    )
    parser.add_argument("--repo", help="folder of a Python repository with a pytest suite")
    parser.add_argument("--out", default="tasks.jsonl")
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument(
        "--level", type=int, help=f"0 to {len(REPO_LEVELS) - 1}; all of them if not given"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--time_limit", type=float, default=60.0, help="seconds for one run of the suite"
    )
    parser.add_argument("--prompt", choices=("short", "full"), default="short")
    parser.add_argument(
        "--autoinstall",
        action="store_true",
        help="find an environment for --repo instead of making tasks",
    )
    parser.add_argument(
        "--keep",
        metavar="DIR",
        help="where --autoinstall keeps the environment (default: beside --out)",
    )
    parser.add_argument("--check", metavar="TASKS", help="verify every task of a file again")
    flags = parser.parse_args()
    for name, least in (("n", 1), ("jobs", 1), ("time_limit", 0.1)):
        if not least <= getattr(flags, name) <= 10**6:
            parser.error(f"--{name} must be at least {least} and at most a million")
    if flags.autoinstall and flags.repo is None:
        parser.error("--autoinstall needs --repo")
    if flags.keep is not None and not flags.autoinstall:
        parser.error("--keep belongs to --autoinstall")
    if flags.keep == "":
        parser.error("--keep needs a folder")
    if flags.level is not None and not 0 <= flags.level < len(REPO_LEVELS):
        parser.error(f"--level must be 0 to {len(REPO_LEVELS) - 1}")
    return flags


def main():
    flags = arguments()
    if flags.check is not None:
        good, total = check(flags.check, flags.jobs, flags.time_limit)
        print(f"\n{good} of {total} tasks hold")
        return int(good < total)
    if flags.repo is None:
        demo()
        return 0
    if flags.autoinstall:
        keep = flags.keep or str(
            Path(flags.out).parent / f"{Path(flags.repo).resolve().name}-environment"
        )
        autoinstall(flags.repo, flags.time_limit, flags.seed, keep=keep)
        words = [
            str(Path(keep).absolute() / "bin" / "python"),
            str(Path(__file__)),
            f"--repo={flags.repo}",
            f"--n={flags.n}",
            f"--out={flags.out}",
        ]
        print(
            f"The environment works and is kept in {keep}. Tasks are made with it by\n    {shlex.join(words)}"
        )
        return 0
    tasks, reasons, seconds = generate(
        flags.repo,
        flags.out,
        flags.n,
        flags.level,
        flags.seed,
        flags.jobs,
        flags.time_limit,
        flags.prompt,
    )
    kinds = Counter(task.meta["kind"] for task in tasks)
    lengths = sorted(len(task.problem_statement) for task in tasks)
    print(
        f"\n{len(tasks)} tasks in {flags.out}: {dict(kinds)}; discarded: {dict(reasons)}; "
        f"{len(tasks) / seconds * 60:.0f} tasks a minute; median prompt {(lengths or [0])[len(lengths) // 2]} characters"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refusal as refusal:
        sys.exit(print(f"synth_tasks.py: {refusal}", file=sys.stderr) or 2)
    # a name that is too long, a file that is closed to us, a disk that is full
    except OSError as error:
        sys.exit(
            print(
                f"synth_tasks.py: {error.filename or 'cannot write'}: {error.strerror}",
                file=sys.stderr,
            )
            or 2
        )
    except MachineFailure as failure:
        sys.exit(
            print(
                f"synth_tasks.py: the machine failed, and no task is to blame: {failure}",
                file=sys.stderr,
            )
            or 2
        )
    except KeyboardInterrupt:
        sys.exit(130)
