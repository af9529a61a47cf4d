"""Runs a repository's pytest suite inside the sandbox and answers with the outcome of every test.

Nobody imports this file: run_suite (world/run_suite.py) gives its text to a Python in the sandbox,
whose working directory is the repository. The order is one JSON object on stdin, which is read
before any code of the repository runs:

    key        random; the answer has to carry it
    options    options of pytest, in front of our own
    config     pytest's configuration file, "" where there is none
    folder     where the authors start pytest, relative to the root
    paths      what to collect; [] leaves it to pytest
    only       node ids of the tests to run; null for all
    own        top-level names of the repository's packages
    borrowed   {module: [is a package, source]} of what pytest needs and the sandbox hides
    reverse, trace, brief, rewrite, trail: switches; limit: seconds for one test
    times      how many runs, each in a process of its own; each answers with a line

The answer is the last line of the output, JSON again. With `trail` a line is written as each test
starts, so that a suite that is killed has told how far it got.
"""

import importlib.util
import json
import os
import signal
import sys
import tempfile
import time

order = json.load(sys.stdin)
root = os.getcwd()

# Only we write to the real output. What anybody else prints goes to a file; it explains a suite
# that does not start.
answer_fd = os.dup(1)
printed = tempfile.TemporaryFile()
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
os.dup2(printed.fileno(), 1)
os.dup2(printed.fileno(), 2)


class BorrowedModules:
    """Imports pytest's own dependencies from the order.

    A repository may be one of them (pluggy, iniconfig, packaging). The sandbox then hides the
    installed copy, and the repository's own copy lacks the deleted feature. pytest needs a copy
    that works."""

    def find_spec(self, name, path=None, target=None):
        if name in order["borrowed"]:
            return importlib.util.spec_from_loader(
                name, self, is_package=order["borrowed"][name][0]
            )

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        is_package, source = order["borrowed"][module.__name__]
        # Some modules read their __file__, though no file is there.
        module.__file__ = (
            "/borrowed/"
            + module.__name__.replace(".", "/")
            + ("/__init__.py" if is_package else ".py")
        )
        exec(compile(source, f"<borrowed {module.__name__}>", "exec"), module.__dict__)


# Import pytest while the repository's folders are not on the path.
borrowed = BorrowedModules()
sys.meta_path.insert(0, borrowed)
sys.path[:] = [path for path in sys.path if path]
try:
    import pytest
except BaseException as error:
    os.write(answer_fd, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
    raise

# The repository's folders come behind the standard library, so that no file there takes the place
# of a module that we import late. They come before the installed packages, so that an installed
# copy of the repository is not tested in its place.
installed = [
    place
    for place, path in enumerate(sys.path)
    if "site-packages" in path or "dist-packages" in path
]
place = installed[0] if installed else len(sys.path)
sys.path[place:place] = [root, root + "/src"]


def inside(module):
    """Whether a module comes from the repository."""
    return str(getattr(module, "__file__", None) or "").startswith(root + "/")


def set_aside():
    """Takes modules that are named like the repository's own out of the table of modules.

    From then on the tests import the repository's modules. pytest keeps its own copies, since its
    modules refer to them already."""
    sys.meta_path.remove(borrowed)
    order["borrowed"].clear()  # it may be the original of what was deleted
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if top in order["own"] and top not in sys.stdlib_module_names and not inside(module):
            del sys.modules[name]


# By node id: outcome, seconds, code that ran (also under "import"), error; the tests that were run
# again. Then the tests that were collected, and the code that the running test has run so far.
outcomes, seconds, touched, errors, again = {}, {}, {}, {}, set()
collected, now = [], set()
# the tests that took too long; the running test and when it began
overrun, running, clock = set(), ["", 0.0], time.monotonic
# A test has several parts (setup, call, teardown): the worst one is its outcome.
SEVERITY = {"failed": 4, "error": 3, "xfail": 2, "skipped": 1, "passed": 0}


def trace(frame, event, argument):
    """Notes each piece of the repository's code that begins to run. It returns None, so that Python
    does not trace the lines inside."""
    code = frame.f_code
    if code.co_filename.startswith(root):
        place = code.co_filename[len(root) + 1 :] + ":" + str(code.co_firstlineno)
        now.add(place + ":" + code.co_name)


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
    named = [line for line in lines if line.startswith("fixture '")]
    return ((marked or named or lines or [""])[-1 if marked else 0])[:300]


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


class Plugin:
    """What we hear from pytest, written down; it also selects the tests and times each of them."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self):
        set_aside()

    def pytest_collectreport(self, report):
        if report.failed:
            errors[report.nodeid] = last_words(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        # Doctests and checks of style do not count as tests of a feature: they stand in files that
        # an agent may write.
        kept = [item for item in items if isinstance(item, pytest.Function)]
        if order["only"] is not None:
            only = set(order["only"])
            kept = [item for item in kept if item.nodeid in only]
        items[:] = kept[::-1] if order["reverse"] else kept

    def pytest_collection_finish(self, session):
        collected.extend(item.nodeid for item in session.items)
        touched["import"] = sorted(now)
        if order["trail"]:
            os.write(answer_fd, b"%d tests\n" % len(collected))

    def pytest_runtest_logstart(self, nodeid):
        if order["trail"]:
            os.write(
                answer_fd, b"> " + nodeid.encode("utf-8", "replace").replace(b"\n", b" ") + b"\n"
            )
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
        touched[nodeid] = sorted(now)

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


# Each run but the last is a fork, which answers for itself.
while order["times"] > 1 and (child := os.fork()):
    os.waitpid(child, 0)
    order["times"] -= 1

# Run the suite. No failure and no file that cannot be collected ends the run, unless the order says
# `brief`.
signal.signal(signal.SIGALRM, late)
arguments = [
    *order["options"],
    "-q",
    "--tb=no",
    "--maxfail=0",
    "-p",
    "no:randomly",
    "--continue-on-collection-errors",
]
arguments += [] if order["rewrite"] else ["--assert=plain"]
arguments += ["-x"] if order["brief"] else []
arguments += ["-c", os.path.join(root, order["config"])] if order["config"] else []
os.chdir(os.path.join(root, order["folder"]))
sys.settrace(trace if order["trace"] else None)
status = pytest.main([*arguments, "--rootdir", root, *order["paths"]], plugins=[Plugin()])
sys.settrace(None)

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
    collected=len(collected),
    status=int(status),
    said=said,
)
with os.fdopen(answer_fd, "wb") as pipe:
    pipe.write(b"\n" + json.dumps(answer).encode())
os._exit(0)
