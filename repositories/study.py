"""study.py: a real Python repository, studied before tasks are made of it.

`study` copies it, finds out how its suite is run, runs the suite several times in both directions
under several hash seeds and time zones, and traces which test runs which definition. It returns a
Repository: the files, the stable tests, and each definition with the tests that run it. A test that
fails, is slow, or passes only now and then cannot decide a verdict and is left out.

Where a repository cannot be used, a Refusal says why in one line: its suite does not pass, cannot
be collected, is too slow, or there is none.

Left out: languages other than Python, building what is not Python, hidden tests that a subclass
inherits, repositories of more than 5,000 files.
"""

import ast
import functools
import importlib.util
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from repositories import editable, suite as suites
from repositories.repo_files import (
    JUNK,
    MOST_BYTES,
    PROTECTED,
    copy_repository,
    importable,
    packages,
    sources,
)
from repositories.refusals import explain_error, missing_module, no_tests, suite_fails, too_slow
from repositories.run_suite import WORLDS, green_command, import_outcomes, run_suite
from world.sandbox import has_bwrap, hidden_place
from repositories.cage import repository_sandbox
from repositories.source import file_of_test, find_definitions, first_line, is_text, package_root
from world.untrusted import parsed
from world.task import Refusal


@dataclass
class Repository:
    """A copy of a repository, its stable tests, and its definitions with the tests that run
    them."""

    name: str
    files: dict
    stable: list
    definitions: list
    patience: float  # seconds for one run of the stable tests
    plan: object  # how its suite is run (repositories/suite.py)
    ignored: list  # test files that cannot be collected here
    # tests that fail, or pass now and then, with nothing deleted: a green command leaves them out
    left_out: list
    importable: list = field(default_factory=list)  # names of the modules that can be imported


@dataclass
class Definition:
    """A function, method or class of a repository, which may be deleted to make a task."""

    path: str
    name: str  # Class.method for a method
    kind: str  # function | method | class
    first: int  # first line, decorators included, from 1
    last: int
    node: object
    tests: set = field(default_factory=set)
    # every definition of this name in its scope, setters and overloads included; node is the last
    nodes: list = field(default_factory=list)
    early: bool = False  # runs while the package is imported: nothing works without it
    wanted: bool = False  # tests import it by name: they are not collected without it

    def size(self):
        """Its number of lines."""
        return self.last - self.first + 1


def definitions(files, paths=None):
    """[Definition] of the functions, classes and methods outside tests. Those of one name in one
    scope are one Definition, whose node is the last of them."""
    found = []
    for path in paths if paths is not None else sources(files):
        # A path that is not UTF-8 cannot be named in a task.
        if not is_text(path):
            continue
        for name, kind, nodes in find_definitions(files[path]):
            last = nodes[-1]
            found.append(
                Definition(path, name, kind, first_line(last), last.end_lineno, last, nodes=nodes)
            )
    return found


# Runs of a suite before a task is made of it: FEWEST_RUNS, and up to MOST_RUNS as long as all runs
# together have taken less than SECONDS_OF_RUNS.
FEWEST_RUNS, MOST_RUNS = 4, 8


SECONDS_OF_RUNS = 10.0


def study(repo, sandbox=None, time_limit=60.0, say=print):
    """The Repository in the folder `repo`: copies it, finds out how its suite is run, runs the
    suite in both directions with several hash seeds and time zones, and traces which test runs
    which definition. Raises a Refusal where no task can be made of it.

    time_limit: seconds for one run of the suite; say: is called with each line for the user."""
    # 1) Copy the files and find out how their suite is run.
    files = copy_repository(repo)
    refuse_unusable(repo, files)
    files.update(editable.metadata(files, repo))
    sandbox = sandbox or repository_sandbox(files, time_limit)
    first = find_plan(repo, files, sandbox)
    plan, name = first["plan"], Path(repo).resolve().name

    # 2) Keep the tests that pass in every run and are not too slow. A suite in which more tests
    # fail than pass is refused.
    runs = run_many_times(repo, files, sandbox, first, time_limit)
    found_out = sort_tests(first, runs)
    # a test behind a link to a folder stands in no file of the tree that could be changed
    found_out["stable"] = [node for node in found_out["stable"] if file_of_test(node) in files]
    if not found_out["stable"] or len(found_out["failing"]) > len(found_out["passing"]):
        raise Refusal(suite_fails(repo, files, first))

    # 3) Trace which test runs which definition, and time the stable tests alone. A test that needs
    # one that was left out fails now, and is left out as well.
    stable = found_out["stable"]
    traced = run_suite(files, sandbox, stable, trace=True, plan=plan)
    touched = traced.get("touched", {})
    start = time.perf_counter()
    again = run_suite(files, sandbox, stable, plan=plan)
    # a run that takes longer than this hangs
    patience = min(time_limit, 3 + 5 * (time.perf_counter() - start))
    for run in (again, traced):
        stable = [node for node in stable if run["outcomes"].get(node) == "passed"]
    if not stable:
        raise Refusal(
            f"{repo}: its tests pass together only, not without those that are slow or unstable"
        )

    # 4) Find a command that is green: it leaves out the files and tests that are red.
    ignored = sorted(where for where in first["errors"] if where in files)
    left_out = {*found_out["failing"], *found_out["red"]}
    command, ignored, left_out = green_command(files, plan, ignored, left_out, sandbox)
    if not command:
        raise Refusal(f"{repo}: no command is green with the original in place: {left_out}")

    # 5) Say what was found.
    found = definitions(files)
    note_tests(files, found, stable, touched)
    counts = count_tests(first, found_out, stable, ignored)
    number_run = sum(bool(one.tests) for one in found)
    say(
        f"{name}: {len(files)} files; {counts}; "
        f"{number_run} of {len(found)} definitions are run by a test"
    )
    for line in plan.said:
        say(f"{name}: {line}")
    for path in ignored[:3]:
        why = explain_error(path, first["errors"][path], files, packages(files), repo)
        say(f"{name}: not collected: {why}")

    # 6) Find out which modules can be imported: a deletion must not change that.
    ran = set()
    for places in touched.values():
        ran.update(place.rsplit(":", 2)[0] for place in places)
    imported = import_outcomes(files, sandbox, module_names(files, ran))
    modules = [module for module, outcome in imported.items() if outcome == ""]
    return Repository(name, files, stable, found, patience, plan, ignored, left_out, modules)


def refuse_unusable(repo, files):
    """Raises a Refusal where this Python cannot run the suite at all."""
    if importlib.util.find_spec("pytest") is None:
        raise Refusal("pytest is not installed for this Python: pip install pytest")
    for name in sorted(modules_of_pytest() & set(importable(files))):
        raise Refusal(
            f"{repo}: it is {name}, which pytest itself runs on: without a feature of it no test "
            "could be run: use another repository"
        )
    if has_bwrap() and hidden_place(sys.prefix):
        raise Refusal(
            f"this Python is in {sys.prefix}, and the sandbox shows nothing of "
            f"{hidden_place(sys.prefix)}: use a Python or a virtual environment elsewhere"
        )


@functools.lru_cache(1)
def modules_of_pytest():
    """Top-level names of what pytest imports, but for the standard library."""
    code = "import pytest, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    tops = {name.partition(".")[0] for name in done.stdout.split()}
    return tops - set(sys.stdlib_module_names) | {"pytest", "_pytest"}


def run_many_times(repo, files, sandbox, first, time_limit):
    """[(world, answer)] of several runs of the suite; `first` is the answer of the first run.

    A test that passes now and then is not asked for. So every other run is in the opposite order,
    every two runs have another seed, and a quick suite is run more often."""
    # A quick suite gets as many runs as fit into SECONDS_OF_RUNS.
    runs, start = [(WORLDS[0], first)], time.perf_counter()
    while len(runs) < MOST_RUNS:
        if len(runs) >= FEWEST_RUNS and time.perf_counter() - start >= SECONDS_OF_RUNS:
            break

        # Every other run is in the opposite order. Two runs have one world, the next two the next.
        number = len(runs)
        world = WORLDS[number // 2 % len(WORLDS)]
        reverse = number % 2 == 1
        run = run_suite(
            files, sandbox, reverse=reverse, limit=False, plan=first["plan"], world=world
        )
        runs.append((world, run))
        if run.get("timed_out"):
            raise Refusal(too_slow(repo, run, time_limit))
    return runs


def sort_tests(first, runs):
    """The tests by how they did in all runs, as a dictionary of lists of node ids.

    passing: in every run; failing: in the first run; unstable: passed in the first run, though not
    in every one; red: unstable also within the first of WORLDS; slow and stable: the two parts of
    passing."""
    outcomes, answers = first["outcomes"], [run for _, run in runs]

    def always_passes(node, some_runs):
        return all(run["outcomes"].get(node) == "passed" for run in some_runs)

    # Tests that a plugin ran again within one run pass now and then, whatever their last outcome.
    changed_mind = set()
    for run in answers:
        changed_mind.update(run.get("again", ()))
    passing = [
        node for node in outcomes if always_passes(node, answers) and node not in changed_mind
    ]
    failing = [node for node, outcome in outcomes.items() if outcome in ("failed", "error")]
    passed_once = [node for node, outcome in outcomes.items() if outcome == "passed"]
    unstable = [node for node in passed_once if node not in set(passing)]

    # The agent's commands run with the first world's seed and time zone. A test that always passes
    # there does not make such a command red.
    here = [run for world, run in runs if world == WORLDS[0]]
    # Nor does one that fails in the opposite order, always and there alone (run_many_times).
    forward, backward = answers[::2], answers[1::2]
    by_order = set()
    for node in unstable:
        lost = all(run["outcomes"].get(node) != "passed" for run in backward)
        if lost and always_passes(node, forward):
            by_order.add(node)
    red = [node for node in unstable if node not in by_order and not always_passes(node, here)]

    # A test is slow if it takes more than 0.1 s and three times the median: each task runs the
    # stable tests several times.
    seconds = {}
    for node in passing:
        seconds[node] = min(run["seconds"].get(node, 0.0) for run in answers)
    bearable = max(0.1, 3 * sorted(seconds.values())[len(passing) // 2]) if passing else 0
    slow = [node for node in passing if seconds[node] > bearable]
    return dict(
        passing=passing,
        failing=failing,
        unstable=unstable,
        red=red,
        slow=slow,
        stable=sorted(set(passing) - set(slow)),
    )


def count_tests(first, found_out, stable, ignored):
    """How many tests there are of each sort, in words."""
    # Errors are counted among the failing tests; here they are told apart, and a file that cannot
    # be collected is one more.
    errors = sum(outcome == "error" for outcome in first["outcomes"].values())
    counts = dict(
        tests=len(first["outcomes"]),
        stable=len(stable),
        failing=len(found_out["failing"]) - errors,
        errors=errors + len(ignored),
        flaky=len(found_out["unstable"]),
        slow=len(found_out["slow"]),
    )
    return ", ".join(f"{number} {what}" for what, number in counts.items())


def note_tests(files, found, stable, touched):
    """Notes in each Definition which stable tests run it, whether it runs while the package is
    imported, and whether tests import it by name. touched: node id or "import" -> what it runs."""
    # A class is run where one of its methods is. The keys are those of the tracer
    # (inside/suite_runner.py): path, first line and name of a code object.
    wanted = imported_names(files)
    for one in found:
        parts = methods(one, found) if one.kind == "class" else [one]
        keys = set()
        for part in parts:
            keys.update(f"{part.path}:{first_line(node)}:{node.name}" for node in part.nodes)
        one.tests = {node for node in stable if keys & set(touched.get(node, ()))}
        one.early = bool(keys & set(touched.get("import", ())))
        one.wanted = one.name in wanted


def find_plan(repo, files, sandbox):
    """The answer of the first run, by the plan that makes most tests pass: pytest's own
    configuration, or what the authors' build files say. A Refusal tells why there is no such plan.

    Adds to `files` the extensions that a build has compiled, where the suite needs them."""
    # By pytest's own configuration.
    answer = run_suite(files, sandbox, limit=False)
    if answer.get("timed_out"):
        raise Refusal(too_slow(repo, answer, sandbox.time_limit))

    # Once more with what only a build writes, where the suite missed it.
    built = built_files(repo, files, answer)
    if built:
        files.update(built)
        answer = run_suite(files, sandbox, limit=False)
        line = f"taken as a build leaves it: {', '.join(sorted(built))}"
        answer["plan"] = replace(answer["plan"], said=[*answer["plan"].said, line])

    def passed(one):
        return sum(outcome == "passed" for outcome in one["outcomes"].values())

    # At least half of the tests pass, a file that cannot be collected counted as one that fails.
    def healthy(one):
        uncollected = sum("::" not in where for where in one["errors"])
        return passed(one) > 0 and 2 * passed(one) >= len(one["outcomes"]) + uncollected

    # Where much fails, try what the authors' build files say, until one plan is healthy.
    best, slow, plans = answer, None, suites.stated_plans(files)[:6]
    while plans and not healthy(best):
        plan, where = plans.pop(0)
        if plan == answer["plan"]:
            continue
        other = run_suite(files, sandbox, limit=False, plan=plan)
        slow = other if other.get("timed_out") else slow
        if passed(other) > passed(best):
            best = other
            best["plan"] = replace(plan, said=[*plan.said, f"its tests are run as by {where}"])
    if not best["outcomes"] and slow:
        raise Refusal(too_slow(repo, slow, sandbox.time_limit))
    if not best["outcomes"]:
        raise Refusal(no_tests(repo, files, answer))

    # A test or a conftest.py may read the message that pytest makes of a failed assertion. Where as
    # many tests pass without, the messages are not made.
    plain = replace(best["plan"], rewrite=False)
    if passed(run_suite(files, sandbox, limit=False, plan=plain)) >= passed(best):
        best["plan"] = plain
    return best


def built_files(repo, files, answer):
    """{path: text} of the extensions that were compiled in place, where a suite asked in vain for a
    module of the repository. None of them holds any Python that could be deleted."""
    own = set(importable(files))
    texts = [*answer["errors"].values(), answer["said"]]
    if not any(missing_module(text).partition(".")[0] in own for text in texts):
        return {}

    # copy_repository leaves them out as JUNK. One beside a Python source of its name is not taken:
    # it could hold that code.
    found = {}
    for place in sorted(Path(repo).rglob("*.so")):
        path = place.relative_to(repo).as_posix()
        folder = path.rpartition("/")[0] + "/"
        # shop/_fast.cpython-311.so would stand beside shop/_fast.py
        source = path.removesuffix(place.name) + place.name.partition(".")[0] + ".py"
        if JUNK.search(folder) or source in files or not place.is_file():
            continue
        if place.stat().st_size < MOST_BYTES:
            found[path] = place.read_bytes().decode("utf-8", "surrogateescape")
    return found


def module_names(files, ran):
    """Dotted names of the sources that are meant to be imported: those in a package, at the root or
    in src/, and those that a test runs (`ran`, paths). A script anywhere else may do anything when
    it is imported."""
    paths, names = set(sources(files)), set()
    for path in paths:
        folder = path.rpartition("/")[0]
        # Only what a package or a test would import.
        is_module = folder in ("", "src") or f"{folder}/__init__.py" in paths or path in ran
        if path.endswith("__main__.py") or not is_module:
            continue
        name = package_root(path, paths)[1]
        if all(part.isidentifier() for part in name.split(".")):
            names.add(name)
    return sorted(names)


def methods(one, found):
    """The Definitions among `found` that are methods of this class."""
    return [
        other for other in found if other.path == one.path and other.name.startswith(one.name + ".")
    ]


def imported_names(files):
    """Names that tests and configuration import by `from ... import name`."""
    names = set()
    for path, text in files.items():
        if path.endswith(".py") and PROTECTED.search(path):
            for node in ast.walk(parsed(text)):
                if isinstance(node, ast.ImportFrom):
                    names.update(alias.name for alias in node.names)
    return names
