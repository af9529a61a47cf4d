"""workspace.py: the folder that an agent works in.

A task's files are written to a private folder of the real disk. The methods `read`, `edit`, `lint`,
`search` and `run` are what the agent's tools do there (world/tools.py); they raise ToolError with a
text for the agent. `files()` is what the agent hands in.

A path is refused if it could lead out of the folder, also by a link that a command has made, and no
file is waited for (world/files.py, open_inside). What commands open and change is recorded for the
audit (world/recorder.py).

Where the machine has no room or process left, MachineFailure is raised. That is no answer to the
agent: the rollout is tried again.
"""

import contextlib
import os
import stat
from dataclasses import replace
from pathlib import Path

from world.edits import ToolError, edited
from world.files import (
    DEEPEST,
    largest_size,
    matches,
    read_file,
    readable,
    tree_key,
    walk,
    write_file,
    write_tree,
)
from world.lint import lint_changed
from world.machine import MachineFailure, as_machine_failure, fresh_directory
from world.memo import is_function_of_files
from world.recorder import Recorder
from world.sandbox import CutOutput, Sandbox


class Workspace:
    """A task's files in a real private directory, and the tools on it. They raise ToolError
    with a text for the agent. sandbox: for a repository's task what repositories.cage.sandbox_for
    gives; longest: the most bytes that `read` shows."""

    def __init__(self, task, sandbox=None, longest=16_000):
        self.task, self.sandbox = task, sandbox or Sandbox()
        self.longest = longest

        self.largest = largest_size(task.files)

        # Write the task's files; a folder that cannot be filled is removed again.
        self.directory = fresh_directory()
        self.root = Path(self.directory.name).resolve()
        try:
            with as_machine_failure(f"cannot write in {self.root}"):
                write_tree(task.files, self.root)
        except BaseException:
            self.close()
            raise
        self.recorder = Recorder(self.root, task.files, task.renamed)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.directory.cleanup()

    def text(self, path):
        """The text of a file. What is too large or no regular file is a ToolError."""
        return read_file(self.root, path, self.largest)

    def read(self, path):
        """The text of a file as the agent sees it; of a long one the beginning and the end."""
        try:
            text = readable(self.text(path))
        except FileNotFoundError:
            raise ToolError(f"no such file: {path[:80]}") from None
        self.recorder.note_read(path)
        shown = CutOutput(self.longest)
        shown.add(text.encode())
        return shown.text()

    def edit(self, path, old, new):
        """Replaces `old`, which must occur exactly once; an empty `old` appends, or creates the
        file."""
        try:
            text = self.text(path)
        except FileNotFoundError:
            text = None
        write_file(self.root, path, edited(text, path, old, new))
        self.recorder.note_edit(path)
        return "ok"

    def search(self, query):
        """The lines of all files that hold the query."""
        return readable(matches(self.files(), query))

    def lint(self):
        """What is wrong with the Python files that differ from the task's."""
        return readable(lint_changed(self.task.files, self.files()))

    def run(self, command):
        """The Result of a command; what it opened and changed is recorded. The Result is remembered
        by (files, command) where it can depend on nothing else and the command did not change the
        files. MachineFailure where the machine failed, not the command."""
        result = self.run_or_remember(command)
        self.recorder.seen.append(result.seen)
        return result

    def run_watched(self, command):
        """The Result of a command that is run now, with what the recorder saw of it."""

        def run():
            return self.sandbox.run(command, self.root)

        result, seen = self.recorder.watch(command, run)
        if not result.started:
            raise MachineFailure(result.output)
        return replace(result, seen=seen)

    def run_or_remember(self, command):
        """The Result of a command, run now or remembered."""
        with as_machine_failure(f"cannot look into {self.root}"):
            # A real repository's outcomes may depend on anything: its commands are always run.
            if "repo" in self.task.meta:
                return self.run_watched(command)

            # Nor is anything remembered where files() does not hold every file (one is too large,
            # bytecode, or one too many): such a file may differ from one time to the next.
            files, shape = self.files(), self.shape()
            number = sum(stat.S_ISREG(mode) for _, mode, _, _ in shape)
            if len(files) != number or not is_function_of_files(files, command):
                return self.run_watched(command)

            # The key holds all that the outcome depends on. A command that changed something is
            # run again the next time, since a remembered Result would change nothing.
            def run():
                return self.run_watched(command)

            def is_unchanged():
                return (self.files(), self.shape()) == (files, shape)

            # Rollouts of a group that ask for the same at once share one run.
            key = tree_key(files, repr((command, shape)))
            return self.sandbox.once(key, run, is_unchanged)

    def shape(self):
        """What files() does not tell of the tree: folders, links, modes and sizes."""
        # An entry is (path, mode, size, where a link points to).
        found = []
        for folder, folders, names in walk(self.root):
            for name in folders + names:
                place = os.path.join(folder, name)
                # What a command has removed or closed meanwhile is left out.
                with contextlib.suppress(OSError):
                    status = os.lstat(place)
                    is_link = stat.S_ISLNK(status.st_mode)
                    # The size of a folder says nothing about files: True stands in its place.
                    size = stat.S_ISDIR(status.st_mode) or status.st_size
                    target = is_link and os.readlink(place)
                    path = place[len(str(self.root)) :]
                    found.append((path, status.st_mode, size, target))
        return sorted(found)

    def files(self):
        """Every regular file of readable size, by path: what a submission consists of. If the tree
        is larger than the sandbox allows, the task's own files come first. It never waits for a
        file."""
        # The paths of all files, but for bytecode and very deep folders.
        paths, most, root = {}, self.sandbox.files, str(self.root)
        with as_machine_failure(f"cannot look into {self.root}"):
            for folder, _, names in walk(self.root):
                inside = folder[len(root) + 1 :]
                parts = inside.split("/")
                if len(parts) < DEEPEST and "__pycache__" not in parts:
                    for name in names:
                        path = stored = os.path.join(inside, name)
                        # A name of the repository's own is kept, UTF-8 or not.
                        if path not in self.task.files:
                            path = path.encode("utf-8", "replace").decode()
                        paths[path] = stored
                # A command that makes so many files is stopped by the sandbox. To list more of them
                # would only take time.
                if len(paths) > 20 * most:
                    break

        # Read them within a limit on the sum of their sizes: files that are all holes take no room
        # on the disk, so the limit on the disk does not stop them.
        found, left = {}, max(self.sandbox.disk, 4 * self.largest)
        for path in sorted(paths, key=lambda path: (path not in self.task.files, path)):
            if len(found) == most:
                break
            with contextlib.suppress(OSError, ToolError):  # closed by chmod, too large, or no file
                left -= os.lstat(os.path.join(root, paths[path])).st_size
                if left >= 0:
                    found[path] = self.text(paths[path])
        return dict(sorted(found.items()))
