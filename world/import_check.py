"""Runs inside the sandbox: which modules of a repository can be imported, and do they hold what
their `__all__` says?

Standard input is JSON: {"roots": folders to import from, "modules": names}. For each module one
JSON line, [name, outcome], is written to standard output as soon as it is known. The outcome is ""
if all is well, else the name of the exception or the names that are missing."""

import importlib
import json
import os
import sys

# Only we write to the real output; what the modules print goes nowhere.
order = json.load(sys.stdin)
output = os.dup(1)
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
os.dup2(0, 1)
os.dup2(0, 2)

# The repository comes last on the path, behind the standard library and the installed packages.
sys.path[:] = [path for path in sys.path if path]
sys.path += [os.path.abspath(root) for root in order["roots"]]

for name in order["modules"]:
    try:
        module = importlib.import_module(name)
        missing = [word for word in getattr(module, "__all__", ()) if not hasattr(module, word)]
        outcome = " ".join(map(str, missing))
    except BaseException as error:  # a script may leave by sys.exit
        outcome = type(error).__name__
    os.write(output, (json.dumps([name, outcome]) + "\n").encode())
os._exit(0)
