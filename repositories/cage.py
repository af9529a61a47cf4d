"""cage.py: the sandbox that a task needs.

A generated task runs in a bare one (world/sandbox.py). The suite of a repository gets this Python's
packages and more time and memory, and sees no installed copy of the repository itself.
"""

import os
import sys

from repositories.copies import installed_copies
from repositories.editable import import_roots
from world.sandbox import Sandbox, has_bwrap


def repository_sandbox(files, time_limit=60.0):
    """A sandbox for the suite of a real repository: more time and memory, this Python's packages,
    and no installed copy of the repository itself. Nothing is remembered."""
    return Sandbox(
        time_limit,
        memory=4 << 30,
        output=16 << 20,
        processes=256,
        python=(sys.executable, "-B"),
        memo=False,
        hide=installed_copies(files),
        roots=import_roots(files),
    )


def sandbox_for(task, sandbox=None):
    """The sandbox a task needs: with this Python's packages (pytest) for a repository, else with
    the bare interpreter. The given one is taken where it fits."""
    if "repo" not in task.meta:
        return sandbox or Sandbox()
    has_packages = sandbox and "-S" not in sandbox.python
    return sandbox if has_packages else repository_sandbox(task.files)


# Process, mounts and options -> the audit's sandbox for them. It is kept, so that its servers are
# ready the next time.
AUDIT_SANDBOXES = {}


def audit_sandbox(task, mounts):
    """A sandbox for the audit, with {path in the cage: folder} mounted; None where there are no
    cages, since the audit runs nothing again outside one."""
    if not has_bwrap():
        return None
    sandbox = sandbox_for(task)
    key = os.getpid(), tuple(sorted(mounts.items())), sandbox.hide, sandbox.roots, sandbox.python
    sandbox = AUDIT_SANDBOXES.setdefault(key, sandbox)
    sandbox.mounts = dict(mounts)
    # the values of many calls are long
    sandbox.output = max(sandbox.output, 4 << 20)
    return sandbox
