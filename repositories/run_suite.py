"""run_suite.py: runs a repository's pytest suite in the sandbox and reads what comes back.

The program inside is inside/suite_runner.py. It writes the outcomes of all tests as one line of
JSON. The line must carry a random key that is drawn here and that the child reads before any code
of the repository is imported. Code of the repository runs in that process all the same, so each
part of the answer is checked before it is used.

A suite is run by a Plan (repositories/suite.py): what is collected, which options hold. One run has
one seed of Python's hashes and one time zone (WORLDS).

    run_suite         -> outcomes, seconds and touched code by node id
    green_command     -> a command line for the agent that is green with the original in place
    working_imports   -> which modules can be imported
"""

import json
import os
import time
from collections import Counter

from repositories import suite as suites
from world.files import printable
from world.machine import MachineFailure, program_inside
from repositories.source import file_of_test, function_of_test

# The program that runs a suite inside the sandbox. It sees none of our files, so its text is given
# to the Python there.
SUITE = program_inside("suite_runner.py")


# (seed of Python's hashes, time zone): every command and every verdict uses the first; the others
# are used, too, when a task is verified.
WORLDS = (
    ("0", "UTC"),
    ("1", "EST5EDT"),
    ("2", "Asia/Kolkata" if os.path.exists("/usr/share/zoneinfo/Asia/Kolkata") else "IST-5:30"),
)


def run_suite(files, sandbox, only=None, reverse=False, plan=None, **options):
    """What pytest reports of a tree; see run_by_plan, whose options it takes.

    `plan` (repositories/suite.py) is how the suite is run. Without one it is what the repository's
    configuration says, and what pytest refuses of that is left out. answer["plan"] is the plan that
    was used."""

    def run(plan):
        def start(words, stdin):
            return sandbox.run_files(files, words, stdin)

        return {**run_by_plan(start, sandbox, plan, only, reverse, **options), "plan": plan}

    # A plan that was given is used as it is. Otherwise run the suite until pytest refuses nothing
    # more, each time without what it has refused.
    if plan:
        return run(plan)
    plan = suites.configured_plan(files)
    for _ in range(6):
        answer = run(plan)
        plan = suites.adapted(plan, files, answer["said"], answer["errors"])
        if plan is None:
            break
    return answer


def run_by_plan(
    start,
    sandbox,
    plan,
    only=None,
    reverse=False,
    trace=False,
    limit=True,
    world=WORLDS[0],
    everything=False,
    times=1,
):
    """What pytest reports of one run: outcomes, seconds and touched code by node id. Of a suite
    that was stopped or answered nonsense, `outcomes` is {} and `stopped` says why.

    start(words, stdin) runs a command where the suite stands -> its Result. only: node ids of the
    tests to run; None for all. reverse: the opposite order. trace: note the code that each test
    runs. limit: fail a test that takes a quarter of the time of
    all (a deletion often leaves an endless loop). world: the seed of hashes and the time zone.
    everything: also run what is no test function, as doctests. times: how many runs of what was
    imported and collected once; what a test did not do in all of them is no outcome of it."""
    # What is collected: the plan's own paths, or the files of the tests that are asked for.
    paths = plan.paths
    if only is not None:
        files = sorted(set(map(file_of_test, only)))
        # A bracket in a path is to pytest the beginning of a test's parameters.
        paths = plan.paths if any("[" in file for file in files) else files

    # Node ids begin at the root, whatever is collected. No failure and no file that cannot be
    # collected ends the run.
    # Assertions are not rewritten: what a failed one says is not read, and it takes half of a run.
    words = [*plan.options, "--tb=no", "--maxfail=0", "--continue-on-collection-errors"]
    words.append("--assert=plain")
    words += ["-c", plan.config] if plan.config else []
    words += ["--rootdir", ".", *paths]

    # The order for the runner (inside/suite_runner.py lists the fields).
    key = os.urandom(16).hex()
    order = dict(key=key, words=words, only=only, everything=everything)
    order |= dict(reverse=reverse, trace=trace, times=times, limit=sandbox.time_limit / 4 * limit)
    environment = ["env", f"PYTHONHASHSEED={world[0]}", f"TZ={world[1]}"]
    began = time.perf_counter()
    result = start([*environment, *sandbox.python, "-c", SUITE], json.dumps(order))
    if not result.started:
        raise MachineFailure(result.output)
    elapsed = time.perf_counter() - began

    # Each run answers with a line, and the last one with the last line of the output.
    answer = read_outcomes(result.output.rstrip("\n").rpartition("\n")[2], key)
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
    return {
        "outcomes": {},
        "errors": {},
        "stopped": "timed out" if timed_out else "the run ended without an answer",
        "timed_out": timed_out,
        "exit_code": result.exit_code,
        "trail": result.output.split("\n"),
        "said": "" if timed_out else printable(result.output, 4000),
    }


LONGEST_NODE = 1000  # characters of a test's node id


def read_outcomes(text, key):
    """What a child answered about a suite; None if the text does not carry this key or holds no
    outcomes.

    Code of the repository ran in the child, so the form of every part is checked: outcomes are
    known words, each has its seconds as a number, touched code is a list of words."""
    # Our own answer carries the key and has four tables.
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError, MemoryError):
        return None
    if type(answer) is not dict or answer.get("key") != key:
        return None
    names = "outcomes", "seconds", "touched", "errors"
    tables = [answer.get(name, {}) for name in names]
    if not all(type(table) is dict for table in tables):
        return None
    outcomes, seconds, touched, errors = tables

    # Unknown outcomes count as failures. A test whose node id is too long, or no text, is left out:
    # it could not be asked for. Seconds are 0 where they make no sense.
    known, found = ("passed", "failed", "skipped", "xfail", "error"), {}
    for node, outcome in outcomes.items():
        if printable(node, LONGEST_NODE) == node:
            found[node] = outcome if outcome in known else "failed"
            took = seconds.get(node)
            is_time = type(took) in (int, float) and 0 <= took < 1e6
            seconds[node] = float(took) if is_time else 0.0

    # The code that each test ran, and what was said of errors and of the run as a whole, cut to
    # lengths that a log can hold.
    def texts(value):
        return [text for text in value if type(text) is str] if type(value) is list else []

    return {
        "outcomes": found,
        "seconds": seconds,
        "touched": {node: texts(places) for node, places in touched.items()},
        "errors": {
            printable(at, 1000): printable(text, 400)
            for at, text in errors.items()
            if type(text) is str
        },
        "again": set(texts(answer.get("again"))),
        "status": answer.get("status"),
        "others": answer.get("others") if type(answer.get("others")) is int else 0,
        "said": printable("".join(texts([answer.get("said")])), 8000),
    }


LONGEST_COMMAND = 2000  # characters of a command with all that it leaves out


def green_command(files, plan, ignored, left_out, sandbox):
    """(the command line of a plan that is green for these files, the files it ignores, the test
    functions or files of tests it leaves out); (None, [], the reason) where there is none.

    What is red in the original is left out by name: test files, tests, doctests, checks of
    style."""
    left_out, ignored, reason = set(map(function_of_test, left_out)), set(ignored), ""
    for number in range(4):
        # What is red, as the reporter tells it. Doctests and checks of style count, too, since the
        # command runs them. At first nothing may have to be left out by name.
        if left_out or number:
            answer = run_suite(files, sandbox, limit=False, plan=plan, everything=True)
            outcomes = answer["outcomes"]
            left_out |= {node for node in outcomes if outcomes[node] in ("failed", "error")}
            left_out = set(map(function_of_test, left_out)) & set(map(function_of_test, outcomes))
            ignored |= {where for where in answer["errors"] if where in files}

        # The command without it, which is run as the agent will run it. Where there is too much to
        # name each test, it leaves out their files.
        command = suites.test_command(plan, left_out, ignored)
        if len(command) > LONGEST_COMMAND:
            left_out = set(map(file_of_test, left_out))
            command = suites.test_command(plan, left_out, ignored)
        if len(command) > LONGEST_COMMAND:
            number = len(left_out | ignored)
            return None, [], f"{number} files hold red tests: leave them out by --ignore in addopts"
        result = sandbox.run_files(files, command)
        if not result.started:
            raise MachineFailure(result.output)
        if is_green(result):
            return command, sorted(ignored), sorted(left_out)
        last = printable(result.output.strip().rpartition("\n")[2] or "no output", 200)
        reason = f"`{command}` ends with exit code {result.exit_code}: {last}"
    return None, [], reason


def is_green(result):
    """Whether a Result is that of a suite in which nothing failed: pytest's exit code is 0. It is
    another one where no test was run."""
    return result.exit_code == 0 and not result.timed_out


# A test file of ours: can each of these modules be imported, and does it hold what its `__all__`
# says?
IMPORT_TESTS = """
import importlib
import pytest

@pytest.mark.parametrize("name", {names})
def test_import(name):
    module = importlib.import_module(name)
    assert all(hasattr(module, word) for word in getattr(module, "__all__", ()))
"""


def working_imports(files, sandbox, names, plan):
    """Those of these modules that can be imported. If one of them ends the process, none can."""
    path = "test_import_of_every_module.py"
    nodes = [f"{path}::test_import[{name}]" for name in names]
    tree = {**files, path: IMPORT_TESTS.format(names=names)}
    outcomes = run_suite(tree, sandbox, nodes, plan=plan)["outcomes"] if names else {}
    return [name for name, node in zip(names, nodes) if outcomes.get(node) == "passed"]
