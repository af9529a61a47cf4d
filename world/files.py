"""files.py: trees of files, on a disk that an agent may have filled with anything.

A tree in memory is a dictionary path -> text (world/tree.py). Here it is written to a folder, read
back, measured and handed to another user. The folder may hold what ordinary helpers stumble over:
two thousand folders in one another, named pipes, links to /etc, files that are all holes, a name
that is no UTF-8. Nothing here follows a link, waits for a pipe, or reads more than it was told to.

A failure of the machine (no room, no file number) is raised as MachineFailure: it must not look
like something the agent did.

The second half shows texts: `matches` is the search tool, `readable` shows bytes that are no text,
`printable` makes any text fit for a log, `unified` is a diff of two trees.

Left out: reading a repository as its owner wrote it, which is repositories/repo_files.py.
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
from world.machine import as_machine_failure, is_machine_failure
from world.task import Refusal


def walk(root):
    """Like os.walk, without recursion: an agent may nest two thousand folders, and os.walk of
    Python 3.11 calls itself for each."""
    left = [os.fspath(root)]
    while left:
        folder = left.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            # A folder that is closed to us counts as empty. Where no file number is left, that
            # would be wrong.
            if is_machine_failure(error):
                raise
            continue

        # Links to folders are listed among the names and not followed.
        folders, names = [], []
        for entry in entries:
            (folders if entry.is_dir(follow_symlinks=False) else names).append(entry.name)
        yield folder, folders, names
        left += [os.path.join(folder, name) for name in folders]


def give(root, uid):
    """Hands the tree to a user. Of a link the link itself changes hands, never what it points
    to."""
    for folder, folders, names in walk(root):
        for path in [folder, *(os.path.join(folder, name) for name in folders + names)]:
            try:
                os.chown(path, uid, uid, follow_symlinks=False)
            # only a command can make a path that is too long, and it belongs to its user already
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise


def census(root):
    """(bytes on disk, number of entries) under a directory. Entries are files, links and folders;
    what cannot be looked at does not count."""
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


# How a folder is opened on the way to a file, and how many names a path to a file may have.
DEEPEST = 100
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_inside(root, path, flags):
    """File descriptor of a regular file below a folder. No link is followed, at its end or on the
    way, and no pipe or device is waited for: an agent may have put one there at the last moment.
    With O_CREAT the folders on the way are made.

    FileNotFoundError where there is none, ToolError for anything else that cannot be opened or may
    lead out, MachineFailure where no file number or no room is left."""
    # What the path itself says: relative, never upwards, not too deep.
    parts = [part for part in path.split("/") if part not in ("", ".")]
    outside = os.path.isabs(path) or ".." in parts or "\0" in path
    if outside or not 0 < len(parts) <= DEEPEST:
        raise ToolError(f"bad path: {path[:80]!r}")

    # One folder after the other, each opened in the one before.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    folder = None
    try:
        with as_machine_failure(f"cannot open in {root}"):
            folder = os.open(root, FOLDER)
            for part in parts[:-1]:
                if flags & os.O_CREAT:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                above, folder = folder, os.open(part, FOLDER, dir_fd=folder)
                os.close(above)
            file = os.open(parts[-1], flags, 0o666, dir_fd=folder)
    except FileNotFoundError:
        raise
    except (OSError, UnicodeError):
        raise ToolError(f"bad path: {path[:80]!r}") from None
    finally:
        if folder is not None:
            os.close(folder)

    # Look at what was opened: between a look before and an opening it could be replaced.
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ToolError(f"not a file: {path[:80]}")
    return file


def read_file(root, path, most):
    """The text of a file that an agent may have written. Errors as of open_inside; ToolError also
    for more than `most` bytes."""
    with open(open_inside(root, path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ToolError(f"too large: {path[:80]}")
        # it may grow meanwhile, so the read has a bound
        return file.read(most + 1).decode("utf-8", "surrogateescape")


def write_file(root, path, text):
    """Writes a file in place, so that its mode stays. Errors as of open_inside."""
    try:
        data = text.encode("utf-8", "surrogateescape")
        with as_machine_failure(f"cannot write in {root}"):
            with open(open_inside(root, path, os.O_WRONLY | os.O_CREAT), "wb") as file:
                file.truncate()
                file.write(data)
    except (OSError, UnicodeError):
        raise ToolError(f"cannot write: {path[:80]!r}") from None


def largest_size(files):
    """The most bytes of an agent's file that are read: 1 MiB, or twice the task's largest file."""
    sizes = [len(text.encode("utf-8", "surrogateescape")) for text in files.values()]
    return max([1 << 20, *(2 * size for size in sizes)])


def tree_key(files, command=""):
    """A key under which what follows from a tree, or from a command in it, is remembered."""
    return hashlib.sha256(json.dumps([command, sorted(files.items())]).encode()).digest()


def write_tree(files, root):
    """Writes a tree into a folder. Refusal where a path leads out of it."""
    for path, text in files.items():
        place = Path(root) / path
        # The tree may come from a stranger's file of tasks.
        if os.path.isabs(path) or ".." in place.parts:
            raise Refusal(f"{path!r} leads out of its tree")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode("utf-8", "surrogateescape"))
        # Whatever the umask of the shell that this process was started from.
        place.chmod(0o644)


HITS = 20  # lines that a search shows


def matches(files, query):
    """The lines that hold the fixed string, as `path:line:text` like grep -n; HITS of them, and how
    many more there are."""
    if not query.strip():
        raise ToolError("empty query")
    found = []
    for path, text in sorted(files.items()):
        # Most files do not hold it and need not be split into lines.
        for number, line in enumerate(text.split("\n") if query in text else (), 1):
            if query in line:
                found.append(f"{path}:{number}:{line.strip()[:200]}")

    # Show the first ones, and how many more there are.
    shown = found[:HITS]
    if len(found) > HITS:
        shown.append(f"[{len(found) - HITS} more]")
    return "\n".join(shown) or "no matches"


def readable(text):
    """The text with the replacement character in place of bytes that are no text."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def printable(text, longest=200):
    """The last characters of a text of any origin, fit for any log: surrogates are replaced."""
    return text[-longest:].encode("utf-8", "replace").decode("utf-8")


def unified(before, after):
    """A unified diff of two trees."""
    written = []
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) == after.get(path):
            continue
        # A line ends at \n and nowhere else, so splitlines would cut too often.
        old = re.findall(r"[^\n]*\n|[^\n]+", before.get(path, ""))
        new = re.findall(r"[^\n]*\n|[^\n]+", after.get(path, ""))
        old_name = f"a/{path}" if path in before else "/dev/null"
        new_name = f"b/{path}" if path in after else "/dev/null"

        # A last line without a line end is marked as git marks it.
        for line in difflib.unified_diff(old, new, old_name, new_name):
            has_end = line.endswith("\n")
            written.append(line if has_end else f"{line}\n\\ No newline at end of file\n")
    return "".join(written)
