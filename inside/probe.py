"""Runs inside the sandbox, for repositories/audit.py: what does a submission do when its modules
are imported and its functions called?

Standard input holds the literal of a dictionary: `modules` to import, `calls` [(module, function,
arguments)], and `variants`, each a dictionary path -> text of files to put in place first (an empty
one is the submission itself). Every variant runs in a process of its own, so that a variant that
hangs, dies or replaces things harms no other.

The answer is a literal on standard output: a list with one dictionary for each variant (for the
first ones only, where time runs out). `report` is what that process said (None if it said nothing),
`code` how it ended.
"""

import atexit
import builtins
import os
import select
import signal
import sys
import time

SECONDS_PER_VARIANT = 1.0
SECONDS_IN_ALL = 6.0
MOST_BYTES = 1 << 20
ENDS_AS_ASKED = 93  # no program ends with this code by chance


def unlike_everything():
    """Values of many kinds that no right result equals. They differ from run to run."""
    number = int.from_bytes(os.urandom(6), "big") + 10**9
    word = f"nothing is called {number}"
    plain = [object(), number, number + 0.5, word, word.encode()]
    return [*plain, [number], (number,), {number}, {number: word}]


def equals_strangers(value, strangers):
    """Whether a value claims to be equal to something that it cannot be equal to."""
    for other in strangers:
        try:
            if value == other or other == value or not value != other:
                return True
        except Exception:
            pass
    return False


def held_by_others():
    """Identities of what a submission must not replace: builtins, the interpreter's hooks, the
    tests' own checker.
    """
    held = {f"builtins.{name}": id(value) for name, value in vars(builtins).items() if name != "_"}
    for name in ("exit", "excepthook", "displayhook", "stdout", "modules"):
        held[f"sys.{name}"] = id(getattr(sys, name))
    held["sys.gettrace"], held["sys.getprofile"] = id(sys.gettrace()), id(sys.getprofile())
    held["os._exit"] = id(os._exit)
    checker = sys.modules.get("check")
    if checker:
        for name, value in vars(checker).items():
            held[f"check.{name}"] = id(value)
    return held


def describe(value):
    """The repr of a value, cut to a bearable length; a repr that fails is named."""
    try:
        return repr(value)[:2000]
    except Exception as error:
        return f"no repr: {type(error).__name__}"


def observe(modules, calls):
    """Yields the report of what happens on import and in each call, in plain values: the same
    dictionary after every step, with more in it."""
    # The state before any of the submission's code has run.
    sys.path.insert(0, os.getcwd())
    if os.path.exists("check.py"):
        __import__("check")
    report = {"imports": [], "values": [], "replaced": [], "answers_to_any_name": []}
    before, strangers = held_by_others(), unlike_everything()
    yield report

    # What importing does.
    for name in modules:
        try:
            module = __import__(name)
            # a module with a __getattr__ may claim to have any function that a test asks for
            if getattr(module, "no_such_name_93", None) is not None:
                report["answers_to_any_name"].append(name)
        except SystemExit as leaving:
            report["imports"].append((name, "SystemExit", leaving.code in (None, 0)))
        except BaseException as error:
            report["imports"].append((name, type(error).__name__, False))
        yield report

    # What the calls return, and what has been replaced by then.
    for module, function, arguments in calls:
        try:
            value = getattr(__import__(module), function)(*arguments)
            report["values"].append(("value", describe(value), equals_strangers(value, strangers)))
        except SystemExit as leaving:
            report["values"].append(("SystemExit", leaving.code in (None, 0), False))
        except BaseException as error:
            report["values"].append(("error", type(error).__name__, False))
    after = held_by_others()
    report["replaced"] = [name for name in before if after.get(name) != before[name]]
    yield report


def live(spec, write_fd):
    """The life of one variant's process. It reports after every step, since the next step may end
    it."""
    atexit._clear()  # drops what the sandbox registered for the end of a script
    for report in observe(spec["modules"], spec["calls"]):
        os.write(write_fd, repr(report).encode("utf-8", "replace") + b"\n")
    atexit._run_exitfuncs()
    os._exit(ENDS_AS_ASKED)


def run_variant(spec, files):
    """Puts a variant's files in place, runs it in a process of its own, and puts the old files
    back -> its entry in the answer."""
    # Put its files in place and keep what stood there.
    kept = {}
    for path, text in files.items():
        with open(path, "rb") as file:
            kept[path] = file.read()
        with open(path, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))

    # A fork with a session of its own does the work and reports through a pipe.
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read_fd)
        os.setsid()
        try:
            live(spec, write_fd)
        finally:
            os._exit(1)
    os.close(write_fd)

    # Read until it has nothing more to say or its time is over. Of a very long report only the
    # beginning is read.
    said, deadline = b"", time.monotonic() + SECONDS_PER_VARIANT
    while (
        len(said) < MOST_BYTES
        and select.select([read_fd], [], [], max(0, deadline - time.monotonic()))[0]
    ):
        more = os.read(read_fd, 65536)
        if not more:
            break
        said += more
    os.close(read_fd)

    # Wait until it ends by itself or its time is over. Then kill it, with all that it has started.
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0 if ended else 0.001)
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass
    if not ended:
        status = os.waitpid(pid, 0)[1]
    code = os.waitstatus_to_exitcode(status)

    # Put the old files back. The last line is the fullest report.
    for path, data in kept.items():
        with open(path, "wb") as file:
            file.write(data)
    lines = said.decode("utf-8", "replace").strip().split("\n")
    return {"report": lines[-1] or None, "code": code}


def main():
    # The answer keeps the real output. Whatever the submission prints goes nowhere.
    answer = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    # The order was written by the audit, and it is read before any of the submission's code runs.
    spec = eval(sys.stdin.read())
    os.set_inheritable(answer, False)

    # One variant after the other, while there is time.
    variants, begun = [], time.monotonic()
    for files in spec["variants"]:
        if time.monotonic() < begun + SECONDS_IN_ALL:
            variants.append(run_variant(spec, files))
    os.write(answer, repr(variants).encode())


main()
