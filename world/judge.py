"""judge.py: does a submission solve its task?

The judge never believes a process in which the agent's code has run.

Generated tasks: the child (world/driver.py) is given calls and returns values, and the parent
compares them, types included, with what it alone knows. Printing, exiting early, or rewriting tests
can only lose.

pytest suites have to compare inside the child. They run on the repository's own files, with the
feature's files and new files of the submission (`submitted`). The tests that were broken are run
again and again, each time in a new process by the same order: as they are, and as mutants
(world/mutants.py), which differ in what they assert and must fail. Code that makes all tests pass,
replaces what compares, or returns values that equal everything passes the mutants as well and gives
itself away. Code that does so by chance, in a share p of the processes, is not caught with a
probability of p^2 (1 - p)^2, at most 1 in 16. Not covered: code that reads the bytecode or the
locals of the test that calls it, to tell a test from a mutant.

`run_trusted` says in this process what the sandbox would say, 20 times faster. It is for code that
was written here and for nothing else.
"""

import functools
import os
import sys
import types
from pathlib import Path

from world import suite as suites
from world.files import printable
from world.hygiene import JUNK, PROTECTED
from world.machine import MachineFailure
from world.mutants import lost_names, with_mutants
from world.purity import DRIVER
from world.run_suite import WORLDS, run_suite
from world.sandbox import sandbox_for
from world.source import function_of_test, module_name
from world.task import Result, Verdict
from world.tree import keep_modes, with_links
from world.untrusted import read_literal


@functools.lru_cache(4096)
def compiled(text, path):
    """The code object of a file. The same few files are run over and over, hence the cache."""
    # optimize=0: also under python -O a test is made of its asserts
    return compile(text, path, "exec", dont_inherit=True, optimize=0)


def run_trusted(files, command="python tests.py"):
    """What the sandbox would answer, in-process and 20 times faster. ONLY for code written here:
    nothing is contained."""
    if command != "python tests.py":
        raise ValueError(f"only the tests run in-process, not {command!r}")
    printed, modules = [], {}

    # What the tests find in place of the system: a sys, a print, an open and an import of our own.
    # The files are a dictionary, so nothing is written to a disk.
    def leave(code=0):
        raise SystemExit(code)

    # An import runs the file of that name, once. Besides `sys` no other module can be imported.
    def load(name, *_):
        if name not in modules:
            if f"{name}.py" not in files:
                raise ModuleNotFoundError(f"No module named {name!r}")
            code = compiled(files[f"{name}.py"], f"{name}.py")
            modules[name] = types.ModuleType(name)
            modules[name].__dict__["__builtins__"] = inner
            exec(code, modules[name].__dict__)
        return modules[name]

    # The builtins of every module: Python's own, with these replaced.
    modules["sys"] = system = types.SimpleNamespace(excepthook=None, exit=leave)
    inner = {**__builtins__} if isinstance(__builtins__, dict) else {**vars(__builtins__)}
    inner.update(
        print=lambda *words: printed.append(" ".join(map(str, words)) + "\n"),
        __import__=load,
        open=lambda path: types.SimpleNamespace(read=lambda: files[path]),
    )

    # Run the tests. The exit code is what they leave with, or 1 for an exception.
    code = 0
    main = {"__name__": "__main__", "__builtins__": inner}
    try:
        exec(compiled(files["tests.py"], "tests.py"), main)
    except SystemExit as leaving:
        code = int(leaving.code)
    except Exception as error:
        system.excepthook(type(error), error, None)
        code = 1
    return Result(code, "".join(printed))


def same_value(value, expected):
    """Whether a submission's value is the expected one, and so are the types at every depth.

    A test that compares by `==` does not accept a tuple for a list, and one that compares by `is`
    does not accept True for 1. The recursion goes only as deep as `expected`, so a submission
    cannot make it overflow."""
    if type(value) is not type(expected):
        return False

    # The types agree: compare what a container holds, place by place.
    if isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        # A look-up with the expected key finds the value's own key, which may be equal and yet of
        # another type: True where 1 is expected.
        own_key = {key: key for key in value}
        return value.keys() == expected.keys() and all(
            same_value(own_key[key], key) and same_value(value[key], expected[key])
            for key in expected
        )
    if isinstance(expected, float):
        return repr(value) == repr(expected)  # nan is itself, and -0.0 is not 0.0
    return value == expected


def read_values(text, number):
    """The values in a child's answer to `number` calls, each as a list: [value], or [] where the
    call returned none. None where the text is no such answer.

    The submission may have written the answer: whatever it holds, this returns and never raises."""
    # A literal and nothing else is read: nothing of it is run.
    answers = (read_literal(text) or [None])[0]
    if type(answers) is not list or len(answers) != number:
        return None

    # The driver writes [1, [value]] for a call that returned, and [0, why] for any other.
    values = []
    for answer in answers:
        is_pair = type(answer) is list and len(answer) == 2
        is_value = is_pair and answer[0] == 1 and type(answer[1]) is list and len(answer[1]) == 1
        values.append(answer[1] if is_value else [])
    return values


def judge(task, files, sandbox):
    """Verdict on a submission (path -> text). MachineFailure where the machine could not run it.

    The child is given calls and returns values, and the comparison is made here. Nothing in the
    child knows what is expected, so printing, exiting early, patching or rewriting tests can only
    lose."""
    if "repo" in task.meta:
        return judge_repository(task, files, sandbox_for(task, sandbox))

    # Call the submission's functions in a child. The tests that it brings are replaced by the
    # task's own. A case is [module, function, arguments, expected]: the last one stays here.
    restored = {**files, "tests.py": task.files["tests.py"], "check.py": task.files["check.py"]}
    cases = task.hidden + task.meta["visible"]
    calls = repr([case[:3] for case in cases])
    command = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", DRIVER]
    try:
        result = sandbox.run_files(restored, command, calls)
    except ValueError as error:  # a name or a text that no file can have
        return Verdict(False, 0, len(cases), f"cannot write: {printable(str(error))}")
    if not result.started:
        raise MachineFailure(result.output)

    # Without a well-formed answer no case counts as passed.
    values = read_values(result.output, len(cases))
    if values is None:
        why = "timed out" if result.timed_out else f"no values: {result.output[-200:]}"
        return Verdict(False, 0, len(cases), why)

    # Compare each value with the expected one; the first wrong case is the reason.
    wrong = []
    for value, case in zip(values, cases):
        if not value or not same_value(value[0], case[3]):
            wrong.append(case)
    why = ""
    if wrong:
        module, name, arguments, _ = wrong[0]
        why = f"{module}.{name}({arguments[0]}) is wrong"
    return Verdict(not wrong, len(cases) - len(wrong), len(wrong), why)


# Packages that run the tests: a submission must not bring a module of such a name.
RUNNERS = {"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"}


def submitted(task, files):
    """The part of a submission that is judged: the files that the feature lives in, and new files
    that take no other file's place.

    All other files are the repository's own. So a submission cannot empty a helper that only tests
    use, nor hide it behind a new module of its name. Nor can it take a name of the standard library
    or of a package that runs the tests."""
    # Files that the deletion changed may be rewritten freely.
    lives_in = set(task.solution)
    own = {path: text for path, text in files.items() if path in lives_in}

    # Names that are taken: by this Python, and by the repository's other modules. pytest puts the
    # folder of a test on the path, so a module beside the tests is imported by its bare name.
    taken = set(sys.stdlib_module_names) | RUNNERS
    others = [path for path in {**task.files, **task.meta["pristine"]} if path not in lives_in]
    modules = set()
    for path in others:
        if path.endswith(".py"):
            modules.add(module_name(path))
            if PROTECTED.search(path):
                modules.add(Path(path).stem)

    # New files: neither tests nor junk, and in the way of nothing. A file at the place of a folder,
    # or below the place of a file, would keep one of the repository's files from being written.
    known = {*lives_in, *task.files, *task.meta["pristine"]}
    for path, text in files.items():
        if path in known or PROTECTED.search(path) or JUNK.search(path):
            continue
        in_the_way = any(
            other.startswith(path + "/") or path.startswith(other + "/") for other in others
        )
        top = (Path(path.removeprefix("src/")).parts or [""])[0].removesuffix(".py")
        if not in_the_way and top not in taken and module_name(path) not in modules:
            own[path] = text
    return own


def required_tests(task):
    """The node ids that have to pass. Those that the deletion broke come first; ERROR_TO_PASS are
    those whose setup or teardown it broke."""
    return task.FAIL_TO_PASS + task.PASS_TO_PASS + task.meta.get("ERROR_TO_PASS", [])


def overlay(task, files):
    """The files that the judge runs: the repository's own ones with what was submitted."""
    # The repository's own files, the part of the submission that is judged, and, over both, the
    # original tests and configuration (`pristine`).
    base = {path: text for path, text in task.files.items() if path not in task.solution}
    tree = {**base, **submitted(task, files), **task.meta["pristine"]}

    # Links and modes are put back, since what an agent hands in is plain texts.
    original = {**task.files, **task.solution, **task.meta["pristine"]}
    return keep_modes(with_links(tree, task.files), original)


def mutated(task, tree, number):
    """The files with a mutant in the place of each test that has some; the mutants of a test take
    turns by this number."""
    mutants = {}
    for test, sites in task.meta["mutants"].items():
        if sites:
            mutants[test] = sites[number % len(sites)]
    return with_mutants(tree, mutants, lost_names(task.meta["names"]))


# How often a suite is run again if the only red tests are some that the deletion had left green:
# such a test may be flaky.
MORE_RUNS = 3


def judge_repository(task, files, sandbox):
    """pytest in a fresh copy; every expected node id must be collected and pass, and every mutant
    must fail.

    If the only red tests are some that were to stay green (PASS_TO_PASS), the whole suite is run
    again before they cost a submission: such a test may fail now and then, whatever was written."""
    # Up to MORE_RUNS further runs, until no test has been red in all of them.
    number, stays_green = len(required_tests(task)), set(task.PASS_TO_PASS)
    try:
        lost, loose, answer = run_judgement(task, files, sandbox)
        first = lost
        for _ in range(MORE_RUNS):
            if loose or not lost or set(lost) - stays_green:
                break
            again, loose, _ = run_judgement(task, files, sandbox)
            # Keep the tests that were red in every run so far. A test of the feature that is red
            # now is worse, and ends the loop.
            if set(again) - stays_green:
                lost = again
            else:
                lost = {node: outcome for node, outcome in lost.items() if node in again}
    except ValueError as error:  # a name or a text that no file can have
        return Verdict(False, 0, number, f"cannot write: {printable(str(error))}")

    # The verdict's numbers and reason are those of the first run.
    if lost:
        reasons = [f"{node}: {outcome}" for node, outcome in first.items()]
        why = answer.get("stopped") or (reasons or [""])[0]
        return Verdict(False, number - len(first), len(first), why)
    if loose:
        return Verdict(False, 0, number, "a test that must fail did not: the results are forged")
    return Verdict(True, number, 0)


ROUNDS = 2  # runs with mutants; a test has at most so many of them


def run_judgement(task, files, sandbox, world=WORLDS[0], whole=True):
    """One judgement: ({test that must pass and did not: its outcome}, the tests whose mutant did
    not fail, the suite's last answer).

    whole: whether more is run than the required tests once. The tests that the deletion broke are
    run again as they are, too, by the order that the mutants get. Otherwise code could forge in the
    first run only, which no run of mutants is like."""
    tree, required = overlay(task, files), required_tests(task)
    plan = suites.plan_of_task(task.meta.get("suite"))
    has_mutants = {test for test, sites in task.meta["mutants"].items() if sites}

    # First all required tests, then those that the deletion broke, in the opposite order: as they
    # are, and as mutants. The first run that shows anything wrong decides.
    broken = task.FAIL_TO_PASS
    runs = [(tree, required, False, False)]
    if whole:
        runs.append((tree, broken, True, False))
        for number in range(ROUNDS):
            runs.append((mutated(task, tree, number), broken, True, True))
    for tree, nodes, reverse, are_mutants in runs:
        answer = run_suite(tree, sandbox, sorted(nodes), reverse, plan=plan, world=world)

        # Beside mutants, the tests that have none say nothing: a mutant that failed may have left
        # anything behind.
        if are_mutants:
            nodes = [node for node in nodes if function_of_test(node) in has_mutants]
        right = "failed" if are_mutants else "passed"
        outcomes = {node: answer["outcomes"].get(node, "not collected") for node in nodes}
        wrong = {node: outcome for node, outcome in outcomes.items() if outcome != right}

        # Without an outcome, a mutant is lost like any other test: the run may have been stopped.
        lost = {node: outcome for node, outcome in wrong.items() if outcome == "not collected"}
        loose = [node for node in wrong if node not in lost] if are_mutants else []
        lost = lost if are_mutants else wrong
        if wrong:
            break
    return lost, loose, answer
