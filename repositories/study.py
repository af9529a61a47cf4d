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
import importlib.util
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from repositories import editable, suite as suites
from repositories.repo_files import copy_repository
from repositories.refusals import explain_error, no_tests, suite_fails, too_slow
from repositories.run_suite import WORLDS, green_command, run_suite, working_imports
from world.sandbox import has_bwrap, hidden_place
from repositories.cage import repository_sandbox
from repositories.deletion import definitions, methods, sources
from repositories.source import file_of_test, first_line, package_root
from world.untrusted import parsed
from world.task import Refusal
from world.tree import PROTECTED


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
    importable: list  # names of the modules that can be imported


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
    number_of_files = len(files)  # without those that say to Python that it is installed
    files.update(editable.metadata(files, repo))
    sandbox = sandbox or repository_sandbox(files, time_limit)
    first = first_run(repo, files, sandbox)
    plan, name = first["plan"], Path(repo).resolve().name

    # 2) Keep the tests that pass in every run and are not too slow. A suite in which more tests
    # fail than pass is refused. A test that stands in no file of the tree is not kept.
    runs = run_many_times(repo, files, sandbox, first, time_limit)
    passing, slow, red = sort_tests(runs)
    stable = sorted(node for node in passing - slow if file_of_test(node) in files)
    kinds = Counter(first["outcomes"].values())
    if not stable or kinds["failed"] + kinds["error"] > len(passing):
        raise Refusal(suite_fails(repo, files, first))

    # 3) Trace which test runs which definition, with the stable tests alone. A test that needs one
    # that was left out fails now, and is left out as well.
    start = time.perf_counter()
    traced = run_suite(files, sandbox, stable, trace=True, plan=plan)
    touched = traced.get("touched", {})
    # a run that takes longer than this hangs
    patience = min(time_limit, 3 + 5 * (time.perf_counter() - start))
    if traced.get("timed_out"):
        raise Refusal(too_slow(repo, traced, time_limit))
    stable = [node for node in stable if traced["outcomes"].get(node) == "passed"]
    if not stable:
        raise Refusal(
            f"{repo}: its tests pass together only, not without those that are slow or unstable"
        )

    # 4) Find a command that is green: it leaves out the files and tests that are red.
    ignored = sorted(where for where in first["errors"] if where in files)
    command, ignored, left_out = green_command(files, plan, ignored, red, sandbox)
    if not command:
        raise Refusal(f"{repo}: no command is green with the original in place: {left_out}")

    # 5) Say what was found. A file that cannot be collected is one more error.
    found = definitions(files)
    note_tests(files, found, stable, touched)
    number_run = sum(bool(one.tests) for one in found)
    say(
        f"{name}: {number_of_files} files; {len(first['outcomes'])} tests, {len(stable)} stable, "
        f"{kinds['failed']} failing, {kinds['error'] + len(ignored)} errors, "
        f"{kinds['passed'] - len(passing)} flaky, {len(slow)} slow; "
        f"{number_run} of {len(found)} definitions are run by a test"
    )
    for line in plan.said:
        say(f"{name}: {line}")
    for path in ignored[:3]:
        why = explain_error(path, first["errors"][path], files, repo)
        say(f"{name}: not collected: {why}")

    # 6) Find out which modules can be imported: a deletion must not change that.
    ran = set()
    for places in touched.values():
        ran.update(place.rsplit(":", 2)[0] for place in places)
    modules = working_imports(files, sandbox, module_names(files, ran), plan)
    return Repository(name, files, stable, found, patience, plan, ignored, left_out, modules)


def refuse_unusable(repo, files):
    """Raises a Refusal where this Python cannot run the suite at all."""
    if importlib.util.find_spec("pytest") is None:
        raise Refusal("pytest is not installed for this Python: pip install pytest")
    for name in sorted(suites.RUNNERS):
        ends = f"{name}.py", f"{name}/__init__.py", f"src/{name}/__init__.py"
        if not files.keys() & set(ends):
            continue
        raise Refusal(
            f"{repo}: it is {name}, which pytest itself runs on: without a feature of it no test "
            "could be run: use another repository"
        )
    if has_bwrap() and hidden_place(sys.prefix):
        raise Refusal(
            f"this Python is in {sys.prefix}, and the sandbox shows nothing of "
            f"{hidden_place(sys.prefix)}: use a Python or a virtual environment elsewhere"
        )


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


def sort_tests(runs):
    """Sorts the tests by how they did in all runs [(world, answer)] -> three sets of node ids:
    those that always pass; of these the slow ones; those that are red in the first world now and
    then, in which the agent's commands run."""
    # Tests that a plugin ran again within one run pass now and then, whatever their last outcome.
    passing, red = set(runs[0][1]["outcomes"]), set()
    for world, run in runs:
        outcomes = run["outcomes"]
        passing = {node for node in passing if outcomes.get(node) == "passed"}
        passing -= set(run.get("again", ()))
        if world == WORLDS[0]:
            red |= {node for node in outcomes if outcomes[node] in ("failed", "error")}

    # One that fails in the opposite order, always and there alone, makes no such command red.
    def passes_in(node, some_runs):
        return [run["outcomes"].get(node) == "passed" for _, run in some_runs]

    forward, backward = runs[::2], runs[1::2]
    red -= {
        node for node in red if all(passes_in(node, forward)) and not any(passes_in(node, backward))
    }

    # A test is slow if it takes more than 0.1 s and three times the median: each task runs the
    # stable tests several times.
    seconds = {node: min(run["seconds"].get(node, 0.0) for _, run in runs) for node in passing}
    times = sorted(seconds.values()) or [0.0]
    bearable = max(0.1, 3 * times[len(times) // 2])
    return passing, {node for node in passing if seconds[node] > bearable}, red


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


def first_run(repo, files, sandbox):
    """The answer of the first run, by pytest's own configuration. A Refusal tells why there is
    none."""
    answer = run_suite(files, sandbox, limit=False)
    if answer.get("timed_out"):
        raise Refusal(too_slow(repo, answer, sandbox.time_limit))
    if not answer["outcomes"]:
        raise Refusal(no_tests(repo, files, answer))
    return answer


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


def imported_names(files):
    """Names that tests and configuration import by `from ... import name`."""
    names = set()
    for path, text in files.items():
        if path.endswith(".py") and PROTECTED.search(path):
            for node in ast.walk(parsed(text)):
                if isinstance(node, ast.ImportFrom):
                    names.update(alias.name for alias in node.names)
    return names
