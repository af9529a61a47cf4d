"""Runs inside the sandbox: which modules of a repository can be imported, and do they hold what
their `__all__` says?

Standard input is a JSON list of their names. For each module one JSON line, [name, outcome], is
written to standard output as soon as it is known. The outcome is "" if all is well, else the name
of the exception or the names that are missing."""

import importlib
import json
import os
import sys

# Only we write to the real output; what the modules print goes nowhere.
names = json.load(sys.stdin)
output = os.dup(1)
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
os.dup2(0, 1)
os.dup2(0, 2)

for name in names:
    try:
        module = importlib.import_module(name)
        missing = [word for word in getattr(module, "__all__", ()) if not hasattr(module, word)]
        outcome = " ".join(map(str, missing))
    except BaseException as error:  # a script may leave by sys.exit
        outcome = type(error).__name__
    os.write(output, (json.dumps([name, outcome]) + "\n").encode())
os._exit(0)
