"""run_suite.py: runs a repository's pytest suite in the sandbox and reads what comes back.

The program inside is world/suite_runner.py. It writes the outcomes of all tests as one line of
JSON. The line must carry a random key that is drawn here and that the child reads before any code
of the repository is imported. Code of the repository runs in that process all the same, so each
part of the answer is checked before it is used.

A suite is run by a Plan (world/suite.py): where it starts, what is collected, which options hold.
One run has one seed of Python's hashes and one time zone (WORLDS).

    run_suite         -> outcomes, seconds and touched code by node id
    green_command     -> a command line for the agent that is green with the original in place
    import_outcomes   -> which modules can be imported
"""

import contextlib
import functools
import importlib.util
import json
import os
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from world import suite as suites
from world.files import printable, write_tree
from world.hygiene import importable, sources
from world.machine import MachineFailure, fresh_directory
from world.source import ANSWER_ERRORS, module_name, package_root

# The program that runs a suite inside the sandbox. The sandbox sees none of our files, so the text
# of the program is given to the Python there.
SUITE = Path(__file__).with_name("suite_runner.py").read_text(encoding="utf-8")


# What pytest itself imports. Where the repository is one of these packages, the sandbox hides the
# installed copy, and pytest still needs it.
RUNNER_PACKAGES = (
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
    "exceptiongroup",
    "tomli",
    "colorama",
)


# (seed of Python's hashes, time zone): every command and every verdict uses the first; the others
# are used, too, when a task is verified.
WORLDS = (
    ("0", "UTC"),
    ("1", "EST5EDT"),
    ("2", "Asia/Kolkata" if os.path.exists("/usr/share/zoneinfo/Asia/Kolkata") else "IST-5:30"),
)


def run_suite(
    files,
    sandbox,
    only=None,
    reverse=False,
    trace=False,
    brief=False,
    limit=True,
    plan=None,
    world=WORLDS[0],
    trail=False,
    times=1,
):
    """What pytest says about these files: outcomes, seconds and touched code by node id. Of a suite
    that was stopped or answered nonsense, `outcomes` is {} and `stopped` says why.

    only: node ids of the tests to run; None for all. reverse: the opposite order. trace: note the
    code that each test runs. brief: stop at the first failure. limit: fail a test that takes a
    quarter of the time of all (a deletion often leaves an endless loop). world: the seed of hashes
    and the time zone. trail: note how far a suite got that was stopped. times: how many runs; what a
    test did not do in all of them is no outcome of it.

    `plan` (world/suite.py) is how the suite is run. Without one it is what the repository's
    configuration says, and what pytest refuses of that is left out. answer["plan"] is the plan that
    was used. Only where it says so are asserts rewritten: nobody reads their messages, and that
    would be half of the work."""
    # Run the suite until pytest refuses nothing more, each time without what it has refused. A plan
    # that was given is used as it is.
    given, plan = plan, plan or in_one_order(suites.configured_plan(files))
    for _ in range(6):
        answer = run_planned_suite(
            files, sandbox, plan, only, reverse, trace, brief, limit, world, trail, times
        )
        if given:
            break
        said, errors = answer.get("said", ""), answer.get("errors", {})
        other = suites.adapted(plan, files, said, errors)
        if other is None:
            break
        plan = other
    return {**answer, "plan": plan}


def in_one_order(plan):
    """The plan without pytest-randomly, where that is installed: it draws the order of the tests
    and the seed of each."""
    if importlib.util.find_spec("pytest_randomly") is None or "no:randomly" in plan.options:
        return plan
    line = "pytest-randomly is switched off: a verdict must not depend on an order that is drawn"
    return replace(plan, options=[*plan.options, "-p", "no:randomly"], said=[*plan.said, line])


def run_planned_suite(
    files, sandbox, plan, only, reverse, trace, brief, limit, world, trail, times
):
    """One run of a suite by a plan; see run_suite."""
    key = os.urandom(16).hex()

    # What is collected: the plan's own paths, or the files of the tests that are asked for. pytest
    # starts in the plan's folder, so their paths lead up from there.
    paths = plan.paths
    if only is not None:
        paths = sorted({node.split("::")[0] for node in only})
        if plan.folder:
            up = "/".join(".." for _ in Path(plan.folder).parts)
            paths = [f"{up}/{path}" for path in paths]

    # The order for the runner (world/suite_runner.py lists the fields).
    own = importable(files)
    order = dict(key=key, only=only, reverse=reverse, trace=trace, brief=brief, trail=trail)
    order |= dict(times=times)
    order |= {**plan.to_meta(), "paths": paths, "limit": sandbox.time_limit / 4 * limit}
    order |= dict(own=own, borrowed=borrowed_modules(tuple(own)))

    # Run it. PYTHONPATH would put the repository's files in front of the standard library, also for
    # the runner itself.
    environment = ["env", "-u", "PYTHONPATH", f"PYTHONHASHSEED={world[0]}", f"TZ={world[1]}"]
    words = [*environment, *sandbox.python, "-c", SUITE]
    start = time.perf_counter()
    result = sandbox.run_files(files, words, json.dumps(order))
    if not result.started:
        raise MachineFailure(result.output)
    elapsed = time.perf_counter() - start

    # Each run answers with a line, and the last one with the last line of the output.
    answer = read_outcomes(result.output.rpartition("\n")[2], key)
    if answer and times > 1:
        lines = [read_outcomes(line, key) for line in result.output.split("\n")]
        counted = Counter(pair for one in lines if one for pair in one["outcomes"].items())
        kept = {node: outcome for (node, outcome), n in counted.items() if n == times}
        answer["outcomes"] = kept
    if answer:
        return answer

    # Without an answer, say why. A suite that computes without a pause meets the limit on processor
    # time first: it is then killed by SIGKILL (9) or SIGXCPU (24).
    killed = result.exit_code in (128 + 9, 128 + 24) and elapsed > 0.9 * sandbox.time_limit
    timed_out = result.timed_out or killed
    why = "timed out" if timed_out else "the run ended without an answer"
    return {
        "outcomes": {},
        "stopped": why,
        "timed_out": timed_out,
        "started": result.started,
        "elapsed": elapsed,
        "exit_code": result.exit_code,
        "trail": result.output.split("\n"),
        "said": "" if timed_out else printable(result.output, 4000),
    }


@functools.lru_cache(8)
def borrowed_modules(own):
    """{module: [is a package, source]} of the modules that pytest imports and that are hidden from
    it, since the repository has the same top-level names (`own`)."""
    modules = {}
    for name in set(own) & set(RUNNER_PACKAGES):
        # The installed copy, where it is Python source: a single module, or a package.
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            continue
        place = Path(spec.origin)
        if place.name != "__init__.py":
            modules[name] = [False, place.read_text(encoding="utf-8")]
            continue

        # A package is lent with all that is in it.
        for file in sorted(place.parent.rglob("*.py")):
            dotted = module_name(file.relative_to(place.parent.parent).as_posix())
            is_package = file.name == "__init__.py"
            modules[dotted] = [is_package, file.read_text(encoding="utf-8")]
    return modules


LONGEST_NODE = 1000  # characters of a test's node id


def read_outcomes(text, key):
    """What a child answered about a suite; None if the text does not carry this key or holds no
    outcomes.

    Code of the repository ran in the child, so the form of every part is checked: outcomes are
    known words, each has its seconds as a number, touched code is a list of words."""
    # Our own answer carries the key and has three tables.
    try:
        answer = json.loads(text)
    except ANSWER_ERRORS:
        return None
    if type(answer) is not dict or answer.get("key") != key:
        return None
    outcomes, seconds, touched = (answer.get(name) for name in ("outcomes", "seconds", "touched"))
    if not all(type(part) is dict for part in (outcomes, seconds, touched)):
        return None

    # Unknown outcomes count as failures. A test whose node id is too long, or no text, is left out:
    # it could not be asked for.
    known = ("passed", "failed", "skipped", "xfail", "error")
    outcomes = {
        node: outcome if outcome in known else "failed"
        for node, outcome in outcomes.items()
        if printable(node, LONGEST_NODE) == node
    }

    # Seconds of each test, 0 where they make no sense; and the code that each test ran.
    times = dict.fromkeys(outcomes, 0.0)
    for node in outcomes:
        took = seconds.get(node)
        if type(took) in (int, float) and 0 <= took < 1e6:
            times[node] = float(took)
    touched_code = {}
    for node, places in touched.items():
        if type(places) is list:
            touched_code[node] = [place for place in places if type(place) is str]

    # What was said of errors and of the run as a whole, cut to lengths that a log can hold.
    said_of = {}
    errors = answer.get("errors")
    if type(errors) is dict:
        for where, text in errors.items():
            if type(text) is str:
                said_of[printable(where, 1000)] = printable(text, 400)
    again, status, said = answer.get("again"), answer.get("status"), answer.get("said")
    return {
        "outcomes": outcomes,
        "seconds": times,
        "touched": touched_code,
        "errors": said_of,
        "again": {node for node in again if type(node) is str} if type(again) is list else set(),
        "status": status if type(status) is int else 0,
        "said": printable(said, 8000) if type(said) is str else "",
    }


LONGEST_COMMAND = 2000  # characters of a command with all that it leaves out


def green_command(files, plan, ignored, left_out, sandbox):
    """(the command line of a plan that is green for these files, the files it ignores, the tests it
    leaves out); (None, [], the reason) where there is none. A command counts as green after two
    runs in the agent's world.

    What fails in the original is left out by name, and so is what fails in the agent's world
    only."""
    left_out, ignored, reason = set(left_out), set(ignored), ""
    for _ in range(4):
        # Build the command and run it, twice if it is green.
        command = suites.test_command(plan, sorted(left_out), sorted(ignored))
        if len(command) > LONGEST_COMMAND:
            too_many = f"{len(left_out)} tests and {len(ignored)} files"
            return None, [], f"{too_many} would have to be left out"
        result = run_command_in(files, command, sandbox)
        if is_green(result):
            result = run_command_in(files, command, sandbox)
        if is_green(result):
            return command, sorted(ignored), sorted(left_out)

        # What pytest names as red in its summary is left out the next time: whole files, and single
        # tests. Where it names nothing new, a further try would be the same.
        reason = printable(result.output.strip().rpartition("\n")[2] or "no output", 200)
        red = re.findall(
            r"^(?:FAILED|ERROR|SUBFAILED\S*) (?:\[.*?\] |\(.*?\) )?(\S+?\.py)(::.*?)?(?: - .*)?$",
            result.output,
            re.M,
        )
        red_files = {path for path, node in red if not node}
        red_tests = {path + node for path, node in red if node}
        if red_tests <= left_out and red_files <= ignored:
            break
        left_out |= red_tests
        ignored |= red_files
    return None, [], reason


def whole_functions(nodes, known):
    """These node ids. Where every known case of a test function is among them, the id of the
    function stands for all."""
    left = {node.split("[")[0] for node in known if node not in nodes}
    return sorted({node if node.split("[")[0] in left else node.split("[")[0] for node in nodes})


def run_command_in(files, command, sandbox):
    """The Result of a command in a fresh copy of these files, as an agent would run it."""
    with fresh_directory() as root:
        write_tree(files, root)
        return sandbox.run(command, root)


def is_green(result):
    """Whether a Result is that of a suite in which tests ran and nothing failed."""
    return (
        result.exit_code == 0
        and not result.timed_out
        and bool(re.search(r"\b[1-9]\d* passed\b", result.output[-2000:]))
    )


def import_outcomes(files, sandbox, names):
    """{module: outcome} of importing these modules in one process. An outcome is "" where all is
    well, else the exception's name or the names that `__all__` lists and the module lacks. If one
    module ends the process, it and those after it have no outcome."""
    # The folders from which the modules can be imported.
    paths = set(sources(files))
    roots = {package_root(path, paths)[0] or "." for path in paths}
    order = dict(modules=names, roots=sorted(roots))

    # One process imports all of them and answers line by line, since any of them may end it.
    program = Path(__file__).with_name("import_check.py").read_text(encoding="utf-8")
    result = sandbox.run_files(files, [*sandbox.python, "-E", "-c", program], json.dumps(order))

    # A line that is not of this form is passed over: a module may print whatever it likes.
    outcomes = {}
    for line in result.output.split("\n"):
        with contextlib.suppress(*ANSWER_ERRORS):
            name, outcome = json.loads(line)
            outcomes[name] = outcome
    return outcomes
