"""machine.py: what this project asks of the machine it runs on, and what it does when the machine
fails.

Three things live here, since everything above needs them and they need nothing from above:

1. The modules of a Unix system. Windows has neither `fcntl` nor `resource`; it is told so in one
line. 2. MachineFailure: a full disk, no process or file number left, a helper that was killed. Such
a failure says nothing about
   the agent's work, so it must never look like a wrong answer.
3. Directories with an owner. A process that is killed cannot remove its directories. Each process
therefore holds a lock
   file beside them; the next process that starts takes the locks whose owners are gone, and removes
   what they owned.

Standard library only.
"""

import atexit
import contextlib
import errno
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

try:
    import fcntl
    import resource
except ModuleNotFoundError as missing:
    print(
        f"nanoComposer runs on Linux and macOS: this Python has no module {missing.name!r}. On "
        "Windows, install WSL (wsl --install) and run the same command inside it",
        file=sys.stderr,
    )
    sys.exit(2)


# ---------------------------------------------------------------- failures of the machine


class MachineFailure(Exception):
    """The machine could not do its part: no room, no process, no file number, a helper that died.
    Nobody's answer is wrong."""


# What a full or exhausted machine answers. Everything else (a name that is too long, a file in the
# place of a folder) can be made by the agent, and stays its own fault.
EXHAUSTED = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EIO,
    errno.EROFS,
}
WAITS = 0.2, 1.0  # seconds before the second and the third try


def is_machine_failure(error):
    """Whether this exception tells of the machine and not of the work that was done on it."""
    return (
        isinstance(error, (MachineFailure, MemoryError))
        or isinstance(error, OSError)
        and error.errno in EXHAUSTED
    )


@contextlib.contextmanager
def as_machine_failure(doing):
    """Turns an OSError of an exhausted machine into a MachineFailure that says what was being done;
    others pass unchanged."""
    try:
        yield
    except OSError as error:
        if not is_machine_failure(error):
            raise
        raise MachineFailure(f"{doing}: {error.strerror or error}") from error


def try_again(attempt):
    """attempt(), up to three times while it raises MachineFailure: much of what fails has room
    again a moment later."""
    for seconds in WAITS:
        try:
            return attempt()
        except MachineFailure:
            time.sleep(seconds)
    return attempt()


def failures_line(lost, total):
    """What a log says of chains that the machine failed: how many, of how many, and at what most of
    them."""
    cause = Counter(lost).most_common(1)[0][0].split("\n")[0][:200]
    return (
        f"{len(lost)} of {total} rollouts were lost to this machine, twice each, "
        f"and count for nothing: {cause}"
    )


# ---------------------------------------------------------------- directories that have an owner

# of a directory: what it is for, its owner, a random end
OWNED = re.compile(r"[a-z]+-([0-9a-f]{16})-\w+")
LOCK = re.compile(r"\.owner-([0-9a-f]{16})\.lock")
NEEDED = 32 << 20  # bytes free that make a place good for workspaces
owners = {}  # place -> (process id, owner's number, its open lock file)
claiming = threading.Lock()


class Directory(tempfile.TemporaryDirectory):
    """A temporary directory that goes whatever is in it. What cannot be removed now (no process or
    no file number is left) is removed when a later run begins."""

    def cleanup(self):
        if self._finalizer.detach() or os.path.lexists(self.name):
            remove_tree(self.name)


def remove_tree(path):
    """Removes a directory -> whether it is gone. The standard library needs a level of recursion
    and an open file for each folder in a folder; where that is not enough, two programs do it."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    for words in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        with contextlib.suppress(OSError):
            if os.path.lexists(path):
                subprocess.run([*words, path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return not os.path.lexists(path)


def owned_directory(purpose, place):
    """A private Directory in `place` that is removed when it is let go of, or, if this process is
    killed, by the next one. purpose: lower-case letters, the first part of its name."""
    owner = claim_place(os.path.realpath(place))
    return Directory(prefix=f"{purpose}-{owner}-", dir=place, ignore_cleanup_errors=True)


def claim_place(place):
    """The number under which this process owns directories in `place`. The first time, a lock file
    is made that the system lets go of when the process ends, however it ends, and what dead
    processes left is removed."""
    with claiming:
        pid, owner, file = owners.get(place, (None, "", None))
        if pid == os.getpid():
            return owner
        # of the process that this one is a fork of: its copy would keep the lock
        if file is not None:
            file.close()
        owner, file = make_lock(place)
        owners[place] = os.getpid(), owner, file
        if file is not None:
            atexit.register(release_place, place, os.getpid())
        # Which place has room changes: what a dead process left may stand in any of them.
        for one in dict.fromkeys(
            [place, *map(os.path.realpath, ("/dev/shm", tempfile.gettempdir()))]
        ):
            sweep(one)
        return owner


def make_lock(place):
    """-> (owner's number, locked file); the file is None where the file system knows no locks, and
    then nothing is swept."""
    while True:
        owner = secrets.token_hex(8)
        path = os.path.join(place, f".owner-{owner}.lock")
        file = open(path, "x")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            file.close()
            os.unlink(path)
            return owner, None
        # Another process may have swept the file between its creation and the lock.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(file.fileno()).st_ino:
                return owner, file
        file.close()


def release_place(place, pid):
    """At the end of the process that claimed it; a fork of it releases nothing."""
    if os.getpid() == pid and place in owners:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(place, f".owner-{owners.pop(place)[1]}.lock"))


def sweep(place):
    """Removes every directory in `place` whose owner is dead: whose lock file can be locked. What a
    living process owns, here or in another container that shares the place, is locked and stays; so
    does what has no lock file."""
    try:
        names = os.listdir(place)
    except OSError:
        return
    own = {owner for _, owner, _ in owners.values()}
    for name in names:
        found = LOCK.fullmatch(name)
        if not found or found[1] in own:
            continue
        # A link or a file of somebody else is not ours to touch, and opening it must not wait.
        with (
            contextlib.suppress(OSError),
            open(os.open(Path(place, name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)) as file,
        ):
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owned = [
                os.path.join(place, other)
                for other in names
                if (match := OWNED.fullmatch(other)) and match[1] == found[1]
            ]
            # What could not be removed keeps its lock file, for the next one that comes by.
            if all([remove_tree(path) for path in owned if not os.path.islink(path)]):
                os.unlink(Path(place, name))


def room_left(place):
    """Bytes that may still be written in this place, 0 where no further file can be made."""
    with contextlib.suppress(OSError):
        status = os.statvfs(place)
        return status.f_bavail * status.f_frsize if status.f_favail or not status.f_files else 0
    return 0


def roomy_place():
    """Where workspaces stand: in memory where the system has such a place and it has room, else
    where temporary files go."""
    if os.access("/dev/shm", os.W_OK) and room_left("/dev/shm") >= NEEDED:
        return "/dev/shm"
    elsewhere = tempfile.gettempdir()
    if os.access("/dev/shm", os.W_OK) and room_left(elsewhere) < NEEDED:
        return max("/dev/shm", elsewhere, key=room_left)
    return elsewhere


def fresh_directory():
    """Private, deleted when left. MachineFailure where no place has room for it."""
    place = roomy_place()
    with as_machine_failure(f"no workspace can be made in {place}"):
        return owned_directory("task", place)
