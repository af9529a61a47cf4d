"""machine.py: what this project needs of the machine it runs on, and what it does when the machine
fails.

Three things live here, since everything above needs them and they need nothing from above:

1. The modules of a Unix system. Windows has neither `fcntl` nor `resource`; its user is told so in
   one line.
2. MachineFailure: a full disk, no process or file number left, a helper that was killed. Such a
   failure says nothing about the agent's work, so it must never look like a wrong answer.
3. Directories with an owner. A process that is killed cannot remove its directories. Each process
   therefore holds a lock file beside them. The next process that starts takes the locks whose
   owners are gone, and removes what they owned.

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


# What a folder holds that Python is installed in. A virtual environment may be a project's own
# folder, with checkouts, tests and tasks beside these.
INSTALLED = ("bin", "include", "lib", "lib64", "share", "pyvenv.cfg")


def python_places():
    """The places of this Python and its packages that are not below /usr. Those of a base Python
    and of an environment made from it are listed both, under every name that they have."""
    places = set()
    for prefix in {sys.prefix, *map(os.path.realpath, (sys.base_prefix, sys.prefix))}:
        if not f"{prefix}/".startswith("/usr/"):
            places |= {os.path.join(prefix, name) for name in INSTALLED}
    return sorted(places)


def shown_folders():
    """The folders of this machine in which a sandbox shows Python packages."""
    return "/usr", *python_places()


# ---------------------------------------------------------------- failures of the machine


class MachineFailure(Exception):
    """The machine could not do its part: no room, no process, no file number, a helper that died.
    It is no verdict on anybody's answer."""


# Error numbers of a full or exhausted machine. All other errors (a name that is too long, a file in
# the place of a folder) can be caused by the agent, and stay its own fault.
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
    """Whether the machine is the cause of this exception, and not the work that was done on it."""
    return (
        isinstance(error, (MachineFailure, MemoryError))
        or isinstance(error, OSError)
        and error.errno in EXHAUSTED
    )


@contextlib.contextmanager
def as_machine_failure(doing):
    """Turns an OSError of an exhausted machine into a MachineFailure that says what was being done
    (doing); other exceptions pass unchanged."""
    try:
        yield
    except OSError as error:
        if not is_machine_failure(error):
            raise
        raise MachineFailure(f"{doing}: {error.strerror or error}") from error


def program_inside(name):
    """The text of a program of inside/. It runs in the cage, which sees none of our files, so its
    text is given to the Python there; nobody imports it."""
    folder = Path(__file__).resolve().parent.parent / "inside"
    return (folder / name).read_text(encoding="utf-8")


def try_again(attempt):
    """The result of attempt(), called up to three times while it raises MachineFailure: a moment
    later there often is room again."""
    for seconds in WAITS:
        try:
            return attempt()
        except MachineFailure:
            time.sleep(seconds)
    return attempt()


def failures_line(lost, total):
    """The line of a log about rollouts that were lost to the machine: how many, of how many, and
    the most frequent cause. lost: the cause of each."""
    cause = Counter(lost).most_common(1)[0][0].split("\n")[0][:200]
    return (
        f"{len(lost)} of {total} rollouts were lost to this machine, twice each, "
        f"and count for nothing: {cause}"
    )


# ---------------------------------------------------------------- directories that have an owner

# The name of an owned directory: what it is for, its owner's number, a random end.
OWNED = re.compile(r"[a-z]+-([0-9a-f]{16})-\w+")
LOCK = re.compile(r"\.owner-([0-9a-f]{16})\.lock")
NEEDED = 32 << 20  # bytes free that make a place good for workspaces
owners = {}  # place -> (process id, owner's number, its open lock file)
claiming = threading.Lock()


class Directory(tempfile.TemporaryDirectory):
    """A temporary directory that is removed whatever it holds. What cannot be removed now (no
    process or no file number is left) is removed when a later run begins."""

    def cleanup(self):
        if self._finalizer.detach() or os.path.lexists(self.name):
            remove_tree(self.name)


def remove_tree(path):
    """Removes a directory -> whether it is gone. The standard library needs a level of recursion
    and an open file for each level of folders. Where these do not suffice, chmod and rm do it."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    for words in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        with contextlib.suppress(OSError):
            if os.path.lexists(path):
                subprocess.run([*words, path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return not os.path.lexists(path)


def owned_directory(purpose, place):
    """A private Directory in `place`. It is removed when it is let go of, or, if this process is
    killed, by the next one. purpose: lower-case letters, the first part of its name."""
    owner = claim_place(os.path.realpath(place))
    return Directory(prefix=f"{purpose}-{owner}-", dir=place, ignore_cleanup_errors=True)


def claim_place(place):
    """The number under which this process owns directories in `place`.

    The first call makes a lock file, whose lock the system releases when the process ends, however
    it ends. It also removes what dead processes have left."""
    with claiming:
        # Known already, unless this process is a fork of the one that has claimed the place.
        pid, owner, file = owners.get(place, (None, "", None))
        if pid == os.getpid():
            return owner

        # A fork has a copy of its parent's lock file, and an open copy would keep the lock.
        if file is not None:
            file.close()

        # A lock of its own, which is removed when the process ends by itself.
        owner, file = make_lock(place)
        owners[place] = os.getpid(), owner, file
        if file is not None:
            atexit.register(release_place, place, os.getpid())

        # Directories are made where there is room at that time (roomy_place), so what a dead
        # process has left may stand in any of these places.
        for one in dict.fromkeys(
            [place, *map(os.path.realpath, ("/dev/shm", tempfile.gettempdir()))]
        ):
            sweep(one)
        return owner


def make_lock(place):
    """-> (owner's number, locked file). The file is None where the file system knows no locks; then
    there is no lock file, and nobody sweeps what this owner has."""
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

        # Another process may have swept the file between its creation and the lock. Then its name
        # is gone, or is another file's, and a new number is drawn.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(file.fileno()).st_ino:
                return owner, file
        file.close()


def release_place(place, pid):
    """Removes the lock file when the process that claimed the place ends; a fork of it releases
    nothing."""
    if os.getpid() == pid and place in owners:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(place, f".owner-{owners.pop(place)[1]}.lock"))


def sweep(place):
    """Removes every directory in `place` whose owner is dead, which is so if its lock file can be
    locked. What a living process owns is locked and stays, also if the process is in another
    container that shares the place. What has no lock file stays as well."""
    try:
        names = os.listdir(place)
    except OSError:
        return

    # Every lock file but those of this process.
    own = {owner for _, owner, _ in owners.values()}
    for name in names:
        found = LOCK.fullmatch(name)
        if not found or found[1] in own:
            continue

        # A link, or a file of another user, is not ours to touch, and opening it must not wait.
        with (
            contextlib.suppress(OSError),
            open(os.open(Path(place, name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)) as file,
        ):
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                continue
            # If the owner lives, this raises an OSError, and the next name is looked at.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            owned = [
                os.path.join(place, other)
                for other in names
                if (match := OWNED.fullmatch(other)) and match[1] == found[1]
            ]
            # If one could not be removed, the lock file stays for the next process that sweeps. The
            # list makes sure that each is tried.
            if all([remove_tree(path) for path in owned if not os.path.islink(path)]):
                os.unlink(Path(place, name))


def room_left(place):
    """Bytes that may still be written in this place; 0 where no further file can be made or the
    place cannot be looked at."""
    with contextlib.suppress(OSError):
        status = os.statvfs(place)
        return status.f_bavail * status.f_frsize if status.f_favail or not status.f_files else 0
    return 0


def roomy_place():
    """Where workspaces stand: in memory if the system has such a place and it has room, else where
    temporary files go. If neither has enough room, the one that has more."""
    if os.access("/dev/shm", os.W_OK) and room_left("/dev/shm") >= NEEDED:
        return "/dev/shm"
    elsewhere = tempfile.gettempdir()
    if os.access("/dev/shm", os.W_OK) and room_left(elsewhere) < NEEDED:
        return max("/dev/shm", elsewhere, key=room_left)
    return elsewhere


def fresh_directory():
    """A private Directory for a workspace, deleted when left. MachineFailure where no place has
    room for it."""
    place = roomy_place()
    with as_machine_failure(f"no workspace can be made in {place}"):
        return owned_directory("task", place)
