"""Runs a repository's pytest suite inside the sandbox and reports the outcome of every test.

Nobody imports this file: run_suite (repositories/run_suite.py) gives its text to a Python in the
sandbox, whose working directory is the repository. It is `python -m pytest` with one plugin more,
which writes down what pytest reports to it; nothing is read from the screen. The order is one JSON
object on stdin, which is read before any code of the repository runs:

    key         random; the answer has to carry it
    words       of pytest's command line
    only        node ids of the tests to run; null for all
    everything  also run what is no test function: doctests, checks of style
    limit       seconds for one test; 0 for no limit
    reverse, trace: switches
    times       how many runs of what was collected, each in a fork; each answers with a line

The answer is the last line of the output, JSON again. Before it a line is written as each test
starts, so that a suite that is killed has told how far it got.
"""

import os
import sys

# The folders of the repository are on the path, as an installation puts them there. They are taken
# off while we import our own modules, which a package of the repository may be named like.
root = os.getcwd()
whole_path = list(sys.path)
sys.path[:] = [path for path in whole_path if path and not f"{path}/".startswith(f"{root}/")]

import gc
import json
import signal
import tempfile
import threading
import time

# The first place on the path is the folder that Python is started in.
order = json.load(sys.stdin)
sys.path[:] = [path or os.getcwd() for path in whole_path]

# Only we write to the real output. What anybody else prints goes to a file; it explains a suite
# that does not start.
answer_fd = os.dup(1)
printed = tempfile.TemporaryFile()
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
os.dup2(printed.fileno(), 1)
os.dup2(printed.fileno(), 2)


def write_line(text):
    os.write(answer_fd, text.encode("utf-8", "replace").replace(b"\n", b" ") + b"\n")


try:
    import pytest
except BaseException as error:
    write_line(f"{type(error).__name__}: {error}")
    raise

# By node id: outcome, seconds, code that ran (also under "import"), error; the tests that were run
# again. Then the code that the running test has run so far.
outcomes, seconds, touched, errors, again = {}, {}, {}, {}, set()
now = set()
others = [0]  # how many collected tests were left out since they are no functions
# the tests that took too long; the running test and when it began
overrun, running, clock = set(), ["", 0.0], time.monotonic
# A test has several parts (setup, call, teardown): the worst one is its outcome.
SEVERITY = {"failed": 4, "error": 3, "xfail": 2, "skipped": 1, "passed": 0}

# file name of a code object -> its path in the repository, "" for any other file
paths, real_path = {}, os.path.realpath


def trace(frame, event, argument):
    """Notes each piece of the repository's code that begins to run. It returns None, so that Python
    does not trace the lines inside."""
    code = frame.f_code
    name = code.co_filename
    if name not in paths:
        # A module may have been imported by way of a link.
        place = real_path(name)
        inside = name.startswith("/") and place.startswith(root + "/")
        paths[name] = place[len(root) + 1 :] if inside else ""
    if paths[name]:
        now.add(f"{paths[name]}:{code.co_firstlineno}:{code.co_name}")


class Late(BaseException):
    """A test took too long. This is no Exception, since a test may catch all of those."""


def late(*_):
    # Note the failure first: it counts even if something catches the exception.
    overrun.add(running[0])
    raise Late


def last_words(report):
    """The line of a report that says best what went wrong."""
    crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
    text = crash.message if crash else str(getattr(report, "longrepr", ""))
    lines = [line.strip() for line in text.strip().split("\n") if line.strip()]
    # pytest shows an error of the collection as a traceback. Its lines with the error begin with E,
    # and the last of them says most.
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked[-1:] or lines or [""])[0][:300]


def part_of_outcome(report):
    """What one report says about the outcome of its test; None where it decides nothing."""
    # A failure counts in every part of a test; a pass counts only in the test itself (the "call").
    is_subtest = hasattr(report, "context")
    if report.outcome == "failed":
        return "failed" if report.when == "call" else "error"
    if is_subtest:
        return None  # a subtest that is skipped or expected to fail decides nothing
    if hasattr(report, "wasxfail"):
        return "xfail"
    if report.outcome == "skipped":
        return "skipped"
    return "passed" if report.when == "call" else None


def repeat_from_here():
    """Each run but the last is a fork of this process, which goes on from here and answers for
    itself. Starting Python, importing and collecting take most of a short run, and all runs share
    them; no run sees what another one does."""
    gc.freeze()  # a search for garbage would write to memory that the forks share
    for _ in range(order["times"] - 1):
        child = os.fork()
        if not child:
            # Other random numbers than those of the process it comes from: Python sees to that for
            # its own generator, and not for numpy's.
            if "numpy.random" in sys.modules:
                sys.modules["numpy.random"].seed()
            return
        os.waitpid(child, 0)


class Reporter:
    """What we hear from pytest, written down; it also selects the tests and times each of them."""

    def pytest_collectreport(self, report):
        if report.failed:
            errors[report.nodeid] = last_words(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        # Doctests and checks of style do not count as tests of a feature: they stand in files that
        # an agent may write.
        kept = list(items)
        if not order["everything"]:
            kept = [item for item in items if isinstance(item, pytest.Function)]
        others[0] = len(items) - len(kept)
        if order["only"] is not None:
            only = set(order["only"])
            kept = [item for item in kept if item.nodeid in only]
        items[:] = kept[::-1] if order["reverse"] else kept

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session):
        touched["import"] = sorted(now.copy())
        write_line(f"{len(session.items)} tests")
        repeat_from_here()

    def pytest_runtest_logstart(self, nodeid):
        write_line(f"> {nodeid}")
        # The trace and the clock begin anew with each test.
        now.clear()
        sys.settrace(trace if order["trace"] else None)
        running[:] = nodeid, clock()
        if order["limit"]:  # the test before may have taken the signal for itself
            signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, order["limit"], order["limit"])

    def pytest_runtest_logfinish(self, nodeid):
        signal.setitimer(signal.ITIMER_REAL, 0)
        # the alarm may have been switched off: the clock tells as well
        if order["limit"] and clock() - running[1] > order["limit"]:
            overrun.add(nodeid)
        sys.settrace(None)
        touched[nodeid] = sorted(now.copy())

    def pytest_runtest_logreport(self, report):
        # Another outcome than these three comes from a plugin that repeats tests.
        node = report.nodeid
        if report.outcome not in ("passed", "failed", "skipped"):
            # rerun, retried: another attempt follows, and the last one counts
            outcomes.pop(node, None)
            again.add(node)
            return

        # Keep the worst outcome of all parts, the first error, and the sum of the seconds.
        seconds[node] = seconds.get(node, 0) + report.duration
        part = part_of_outcome(report)
        if part is None:
            return
        if part in ("failed", "error") and node not in errors:
            errors[node] = last_words(report)
        before = outcomes.get(node)
        if before is None or SEVERITY[part] > SEVERITY[before]:
            outcomes[node] = part

    def pytest_internalerror(self, excrepr):
        errors[""] = str(excrepr).strip().split("\n")[-1][:300]


# Run the suite. Code that runs in threads is traced as well.
if order["trace"]:
    threading.settrace(trace)
    sys.settrace(trace)
status = pytest.main(order["words"], plugins=[Reporter()])
sys.settrace(None)
threading.settrace(None)

# Answer. A test that took too long has failed, whatever it reported.
outcomes.update(dict.fromkeys(overrun & set(outcomes), "failed"))
said = ""
if int(status) not in (0, 1):  # pytest itself, or a conftest.py, could not go on
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    printed.seek(0)
    said = printed.read(1 << 20)[-8000:].decode("utf-8", "replace")
answer = dict(
    key=order["key"],
    outcomes=outcomes,
    seconds=seconds,
    touched=touched if order["trace"] else {},
    errors=dict(list(errors.items())[:2000]),
    again=sorted(again),
    others=others[0],
    status=int(status),
    said=said,
)
with os.fdopen(answer_fd, "wb") as pipe:
    pipe.write(b"\n" + json.dumps(answer).encode() + b"\n")
os._exit(0)
