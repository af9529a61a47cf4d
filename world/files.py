"""files.py: trees of files on a disk that an agent may have filled with anything.

A tree in memory is a dictionary path -> text (world/tree.py). Here it is written to a folder, read
back, measured and handed to another user. The folder may hold what ordinary helpers stumble over:
two thousand folders in one another, named pipes, links to /etc, files that are all holes, a name
that is no UTF-8. Nothing here follows a link, waits for a pipe, or reads more than it was told to.

A failure of the machine (no room, no file number) is raised as MachineFailure: it must not look
like something the agent did.

The second half shows texts: `matches` is the search tool, `readable` shows bytes that are no text,
`printable` makes any text fit for a log, `unified` is a diff of two trees.

Left out: reading a repository as its owner wrote it, which is world/hygiene.py.
"""

import contextlib
import difflib
import errno
import hashlib
import json
import os
import re
import stat
from pathlib import Path

from world.edits import ToolError
from world.machine import MachineFailure, is_machine_failure
from world.task import Refusal
from world.tree import FileText, Link, write_links


def walk(root):
    """os.walk, which is recursive in Python 3.11: an agent may make two thousand folders, one in
    another."""
    left = [os.fspath(root)]
    while left:
        folder = left.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            # no file number is left: this folder is not empty
            if is_machine_failure(error):
                raise
            continue
        folders, names = [], []
        for entry in entries:
            (folders if entry.is_dir(follow_symlinks=False) else names).append(entry.name)
        yield folder, folders, names
        left += [os.path.join(folder, name) for name in folders]


def give(root, uid):
    """Hands the tree to a user; links themselves, never what they point to."""
    for folder, folders, names in walk(root):
        for path in [folder, *(os.path.join(folder, name) for name in folders + names)]:
            try:
                os.chown(path, uid, uid, follow_symlinks=False)
            # a path that is too long was made by a command, and is its user's already
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise


def census(root):
    """(bytes on disk, number of files, links and folders) under a directory; what cannot be looked
    at counts nothing."""
    total = number = 0
    with contextlib.suppress(OSError):
        for folder, folders, names in walk(root):
            number += len(folders) + len(names)
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total, number


def disk_usage(root):
    """Bytes on disk under a directory."""
    return census(root)[0]


def read_regular(place, most):
    """The bytes of a regular file of at most `most` bytes. ToolError for anything else: a pipe, a
    device or a link is not opened for waiting, however quickly it took the file's place."""
    # Opened first and looked at then: between a look and an opening it could be replaced.
    try:
        file = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if is_machine_failure(error):
            raise MachineFailure(f"cannot read in {place.parent}: {error.strerror}") from error
        raise ToolError(f"cannot read: {place.name[:80]}") from error
    with open(file, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ToolError(f"not a file: {place.name[:80]}")
        if status.st_size > most:
            raise ToolError(f"too large: {place.name[:80]}")
        return file.read(most + 1)


def write_regular(place, data):
    """Writes a regular file, in place, so that its mode stays; never a pipe or what a link leads
    to."""
    file = os.open(
        place, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
    )
    with open(file, "wb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ToolError(f"not a file: {place.name[:80]}")
        file.truncate()
        file.write(data)


def tree_key(files, command):
    return hashlib.sha256(json.dumps([command, sorted(files.items())]).encode()).digest()


def write_tree(files, root):
    for path, text in files.items():
        place = Path(root) / path
        # a file of tasks may come from a stranger
        if os.path.isabs(path) or ".." in place.parts:
            raise Refusal(f"{path!r} leads out of its tree")
        if isinstance(text, Link):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode("utf-8", "surrogateescape"))
        if isinstance(text, FileText):
            place.chmod(text.mode)
    outside = write_links(files, root)
    if outside:
        raise Refusal(f"the link {outside!r} leads out of its tree or cannot be made")


def matches(files, query, hits=20):
    """Lines holding the fixed string, as `path:line:text`, like grep -n."""
    if not query.strip():
        raise ToolError("empty query")
    found = []
    for path, text in sorted(files.items()):
        # most files do not hold it
        for number, line in enumerate(text.split("\n") if query in text else (), 1):
            if query in line:
                found.append(f"{path}:{number}:{line.strip()[:200]}")
    shown = found[:hits]
    if len(found) > hits:
        shown.append(f"[{len(found) - hits} more]")
    return "\n".join(shown) or "no matches"


def readable(text):
    """Bytes that are no text, shown as the replacement character."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def printable(text, longest=200):
    """The end of a text that came from anywhere, fit for any log: no surrogates."""
    return text[-longest:].encode("utf-8", "replace").decode("utf-8")


def unified(before, after):
    """A unified diff of two trees."""
    written = []
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) == after.get(path):
            continue
        # A line ends at \n and nowhere else.
        old = re.findall(r"[^\n]*\n|[^\n]+", before.get(path, ""))
        new = re.findall(r"[^\n]*\n|[^\n]+", after.get(path, ""))
        old_name = f"a/{path}" if path in before else "/dev/null"
        new_name = f"b/{path}" if path in after else "/dev/null"
        for line in difflib.unified_diff(old, new, old_name, new_name):
            has_end = line.endswith("\n")
            written.append(line if has_end else f"{line}\n\\ No newline at end of file\n")
    return "".join(written)
