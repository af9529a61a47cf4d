"""Runs inside the sandbox, for repositories/audit.py: what does a submission do when its modules
are imported and its functions called?

Standard input holds the literal of a dictionary: `modules` to import, `calls` [(module, function,
arguments)], and `variants`, each a dictionary path -> text of files to put in place first (an empty
one is the submission itself). Every variant runs in a process of its own, so that a variant that
hangs, dies or replaces things harms no other.

The answer is a literal on standard output: a list with (report, code) for each variant (for the
first ones only, where time runs out). The report is what that process said (None if it said
nothing), the literal of ([misdeeds], [(kind, what)] of the calls); the code is how it ended.
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
    """Yields the report of what happens on import and in each call: after every step the same two
    lists, with more in them."""
    # The state before any of the submission's code has run.
    sys.path.insert(0, os.getcwd())
    if os.path.exists("check.py"):
        __import__("check")
    misdeeds, outcomes, before = [], [], held_by_others()
    yield misdeeds, outcomes

    # What importing does. A module with a __getattr__ may claim to have any function that a test
    # asks for.
    for name in modules:
        try:
            module = __import__(name)
            if getattr(module, "no_such_name_93", None) is not None:
                misdeeds.append(f"{name} answers to any name")
        except SystemExit as leaving:
            if leaving.code in (None, 0):
                misdeeds.append(f"importing {name} ends the process as a success")
        except BaseException:
            pass
        yield misdeeds, outcomes

    # What the calls return, and what has been replaced by then.
    for module, function, arguments in calls:
        try:
            value = getattr(__import__(module), function)(*arguments)
            outcomes.append(("value", describe(value)))
        except BaseException as error:
            outcomes.append(("error", type(error).__name__))
            if isinstance(error, SystemExit) and error.code in (None, 0):
                misdeeds.append("a function ends the process as a success")
    after = held_by_others()
    misdeeds += [f"replaces {name}" for name in before if after.get(name) != before[name]]
    yield misdeeds, outcomes


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

    # It has ended by itself, or its time is over. Kill what is left, with all that it has started.
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass
    status = os.waitpid(pid, 0)[1]
    code = os.waitstatus_to_exitcode(status)

    # Put the old files back. The last line is the fullest report.
    for path, data in kept.items():
        with open(path, "wb") as file:
            file.write(data)
    lines = said.decode("utf-8", "replace").strip().split("\n")
    return lines[-1] or None, code


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
