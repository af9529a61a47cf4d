"""Runs inside the sandbox, for repositories/submission.py: what does a submission do that no honest
program does, when its modules are imported and its functions called?

Standard input holds the literal of a dictionary: `modules` to import, and `calls` [(module,
function, arguments)]. Each misdeed is a line of standard output, written as soon as it is seen,
since the next step may end the process. The first line says that the program has begun. The exit
code is ENDS_AS_ASKED unless the submission has ended the process. What the calls return is asked
elsewhere (inside/driver.py).
"""

import atexit
import builtins
import os
import sys

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


def observe(modules, calls):
    """Yields each misdeed on import and in the calls."""
    # The state before any of the submission's code has run.
    sys.path.insert(0, os.getcwd())
    if os.path.exists("check.py"):
        __import__("check")
    before = held_by_others()

    # What importing does. A module with a __getattr__ may claim to have any function that a test
    # asks for.
    for name in modules:
        try:
            module = __import__(name)
            if getattr(module, "no_such_name_93", None) is not None:
                yield f"{name} answers to any name"
        except SystemExit as leaving:
            if leaving.code in (None, 0):
                yield f"importing {name} ends the process as a success"
        except BaseException:
            pass

    # What the calls do, and what has been replaced by then.
    for module, function, arguments in calls:
        try:
            getattr(__import__(module), function)(*arguments)
        except BaseException as error:
            if isinstance(error, SystemExit) and error.code in (None, 0):
                yield "a function ends the process as a success"
    after = held_by_others()
    for name in before:
        if after.get(name) != before[name]:
            yield f"replaces {name}"


# Only the answer goes to the real output. Whatever the submission prints goes nowhere.
answer_fd, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1)
os.dup2(nowhere, 2)

# The order was written by the audit, and it is read before any of the submission's code runs. What
# the sandbox has registered for the end of a script is dropped: what runs then is the submission's.
spec = eval(sys.stdin.read())
atexit._clear()
os.write(answer_fd, b"begun\n")
for misdeed in observe(spec["modules"], spec["calls"]):
    os.write(answer_fd, misdeed.encode("utf-8", "replace") + b"\n")
atexit._run_exitfuncs()
os._exit(ENDS_AS_ASKED)
