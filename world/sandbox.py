"""sandbox.py: runs a command that nobody trusts, in a folder, under limits.

The sandbox is bubblewrap: no network, a read-only system, a private /tmp, own processes, and limits
on time, memory, processes, file size, disk and output. Files of this machine that would give an
answer away are hidden. What a command finds does not depend on the shell that this process was
started from: ENVIRONMENT and LIMITS below are all that is set, and PASSED is all that is passed on.

A cage is used for many commands. Each command is a fork in it behind walls of its own, which takes
half the processor time of a new cage and a new Python. The program in the cage is
inside/sandbox_server.py. `Sandbox` orders a command from it, collects what it prints, and ends what
is left of it.

Without bubblewrap there is one warning, and only resource limits hold. They do not stop a command
from reading your files, writing where you may write, using the network, sending signals to your
processes, a fork bomb, filling the disk, and on macOS a process in a session of its own stays.
Neither disk nor memory counts what a command holds in files that have no name (deleted while open,
memfd).

An outcome that can depend on the files alone is remembered (world/memo.py).

    Sandbox().run("python tests.py", folder)         -> Result
    Sandbox().run_files(files, "python tests.py")    -> Result, in a fresh copy of a tree
"""

import codecs
import contextlib
import functools
import marshal
import os
import re
import select
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path

from world.files import census, give, tree_key, disk_usage, write_tree
from world.machine import (
    EXHAUSTED,
    MachineFailure,
    as_machine_failure,
    fresh_directory,
    is_machine_failure,
    program_inside,
    python_places,
    room_left,
    try_again,
)
from world.memo import is_function_of_files
from world.task import Result

# A line that is run without a shell: Python with plain words.
PLAIN = re.compile(r"python3?((?: [\w./=-]+)*)")

# The environment of every command: one hash seed and one time zone, since the order of a set must
# not decide a verdict. To it comes what PASSED names, without which a Python may not start (LD_...)
# or, with a network, pip not reach it.
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "TZ": "UTC",
    "PYTHONDONTWRITEBYTECODE": "1",
}
PASSED = ("LD_LIBRARY_PATH",)
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")

# The limits of every command are those of a new login, but for what a Sandbox sets itself; a hard
# limit that the shell has lowered stays where this user may not raise it. Time is limited on the
# wall, since processor time is counted over all threads. Signals, umask, session, user and host
# name are set by inside/sandbox_server.py. Niceness and processors are passed on.
LIMITS = dict(CORE=0, CPU=-1, DATA=-1, STACK=8 << 20, NOFILE=1024)

# Places of this machine that every cage shows, and those that it shows as well with a network.
SYSTEM = (
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/bin",
    "/sbin",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
)


NETWORK = (
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/ssl",
    "/etc/pki",
    "/etc/pip.conf",
    f"{sys.prefix}/pip.conf",
)


# The program in the cage, as text, since it is handed to the Python there.
SERVER = program_inside("sandbox_server.py")


def bwrap():
    """The first words of a cage's command line. Only root can do without a user namespace."""
    words = [
        shutil.which("bwrap"),
        "--unshare-ipc",
        "--unshare-pid",
        "--as-pid-1",
        "--unshare-uts",
        "--hostname",
        "localhost",
        "--unshare-cgroup-try",
        "--cap-add",
        "ALL",
    ]
    # Without rights of its own it needs a user namespace, in which it is root.
    if os.geteuid() != 0:
        words += ["--unshare-user", "--uid", "0", "--gid", "0"]
    return words


@functools.lru_cache(None)
def has_bwrap():
    """True if bubblewrap is installed and this kernel allows namespaces inside its cage; otherwise
    there is one warning."""
    # Try a cage, and inside it the walls that sandbox_server.py puts around each command.
    inner = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--mount-proc"]
    outer = [*bwrap(), "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc"]
    command = [*outer, *inner, "true"]
    if command[0] and try_again(lambda: tried_cage(command)):
        return True

    # Once per process, since the answer is cached.
    how = (
        "apt-get install bubblewrap"
        if sys.platform == "linux"
        else "it is Linux's own; in a Linux container there is one"
    )
    warnings.warn(
        "bubblewrap is not usable here: commands of agents run under resource limits only, with "
        f"network and your files in reach ({how})",
        stacklevel=3,
    )
    return False


def tried_cage(command):
    """Whether this cage can be made. MachineFailure where there is no process, memory or file
    number left for it now: if that counted as False, a run would go on without any cage."""
    with as_machine_failure("no cage can be tried"):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    said = done.stderr.decode("utf-8", "replace")
    exhausted = any(os.strerror(number) in said for number in EXHAUSTED)
    if done.returncode and exhausted:
        raise MachineFailure(f"no cage can be tried: {said.strip()[:200]}")
    return done.returncode == 0


class CutOutput:
    """What a command prints, in at most `most` bytes. Of a longer output it keeps the beginning and
    the end, with a line between them that says how much is missing. The end is kept since the end
    of a test run says what failed."""

    def __init__(self, most):
        self.most, self.size = most, 0
        # bytes of the beginning, and of the end; 40 are for the line between them
        self.half = max(0, most - 40) // 2
        self.head, self.tail = bytearray(), bytearray()

    def add(self, chunk):
        """Takes the next bytes that the command has printed."""
        self.size += len(chunk)
        room = self.half - len(self.head)
        self.head += chunk[:room]
        self.tail += chunk[room:]
        # The tail may still turn out to be the rest of an output that fits as a whole.
        if len(self.tail) > 2 * self.most:
            del self.tail[: -self.most]

    def text(self):
        """What was printed, whole or with its middle cut out."""
        if self.size <= self.most:
            return (self.head + self.tail).decode("utf-8", "replace")

        # A character that the cut has split is left out: the decoder holds back the incomplete end
        # of the head, and bytes that begin with the bits 10 only continue a character.
        head = codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(self.head))
        tail = self.tail[len(self.tail) - self.half :]
        while tail and len(tail) > self.half - 4 and tail[0] & 0xC0 == 0x80:
            del tail[0]
        missing = self.size - len(self.head) - len(tail)
        return f"{head}\n[{missing} bytes cut]\n{tail.decode('utf-8', 'replace')}"


class Sandbox:
    """Runs one command per call; threads may make any number of calls at once.

    `memory` (bytes) holds per process, `processes` per sandbox. `disk` (bytes) is checked ten times
    a second. root is exempt from the process limit, so as root every directory
    gets its own powerless user id. `hide` lists paths of this machine that a command must not see
    (installed copies of the package under study). `network` is for pip alone. `files` is how many
    files, folders and links a tree may have. `output` is how many bytes of what a command prints
    are kept; a longer output is cut and does not end the command, unless it prints without end.
    `roots` are the folders of a tree that are on Python's path, relative to it."""

    # a command that has printed more bytes (and more than four times `output`) is stopped
    FLOOD = 64 << 20
    # a tree of fewer bytes cannot be what has filled the disk
    LIGHT = 16 << 20
    # path in the cage -> folder of this machine: the audit's decoys
    mounts = {}

    def __init__(
        self,
        time_limit=10.0,
        memory=1 << 30,
        file_size=64 << 20,
        disk=256 << 20,
        output=16_000,
        processes=64,
        python=(os.path.realpath(sys.executable), "-S", "-B"),
        memo=True,
        hide=(),
        network=False,
        files=10_000,
        roots=("", "src"),
    ):
        self.time_limit, self.output, self.disk, self.files = time_limit, output, disk, files
        self.python, self.hide, self.network = tuple(python), tuple(hide), network
        self.roots = tuple(roots)
        self.limits = LIMITS | dict(AS=memory, FSIZE=file_size)
        # Counted in a cage only: elsewhere it would count all processes of the user.
        self.processes = processes
        # key of a run -> [lock, Result]; None: nothing is remembered
        self.memo = {} if memo else None
        # servers that wait for a command, and the process that started them
        self.idle, self.owner = [], os.getpid()

    def argv(self, command):
        """The words to execute for a command line. Python with plain words needs no shell, which
        saves starting one; in a shell a function of that name stands for the same Python."""
        plain = PLAIN.fullmatch(command)
        if plain:
            return [*self.python, *plain[1].split()]
        python = " ".join(map(shlex.quote, self.python))
        functions = "".join(f'{name}() {{ {python} "$@"; }}\n' for name in ("python", "python3"))
        return ["/bin/sh", "-c", functions + command]

    def cage(self):
        """The words in front of the server that put it into a cage of bubblewrap. The server sees
        the whole machine under /host and has all capabilities in the cage; its commands have
        neither."""
        # Namespaces of its own; the network only where it is asked for.
        words = bwrap()
        if not self.network:
            words.append("--unshare-net")

        # This Python, and the folders above it and above the network's settings. They are made
        # anew: `mktemp -d` makes a folder that is closed to other users.
        mounts, parents = python_places(), set()
        for path in (*NETWORK, *mounts):
            parents.update(str(parent) for parent in Path(path).parents)
        words += ["--tmpfs", "/etc"]
        for parent in sorted(parents - {"/"}):
            words += ["--perms", "0755", "--dir", parent]

        # The system, this Python and, with a network, its settings, all of them read-only.
        network = NETWORK if self.network else ()
        for path in (*SYSTEM, *mounts, *network):
            if path in SYSTEM and os.path.islink(path):
                words += ["--symlink", os.readlink(path), path]
            else:
                words += ["--ro-bind-try", path, path]

        # What must not be seen is covered by an empty folder or an empty file; then the audit's
        # decoys are mounted.
        for path in sorted(set(map(os.path.realpath, self.hide))):
            if os.path.isdir(path):
                words += ["--tmpfs", path]
            else:
                words += ["--ro-bind", "/dev/null", path]
        for path, folder in self.mounts.items():
            # unless something is mounted there or below already: a Python may live there
            if not any(word == path or word.startswith(path + "/") for word in words):
                words += ["--ro-bind", folder, path]

        # Places of its own. The server binds a command's folder from below /host to /work.
        words += ["--dir", "/tmp", "--dir", "/work", "--proc", "/proc"]
        words += ["--dev", "/dev", "--remount-ro", "/dev"]
        words += ["--bind", "/", "/host"]
        return [*words, "--remount-ro", "/"]

    def server(self):
        """An idle server, or a new one. A fork of this process does not use the servers of its
        parent: both would talk on the same line."""
        if self.owner != os.getpid():
            self.idle, self.owner = [], os.getpid()
        with contextlib.suppress(IndexError):
            return self.idle.pop()
        return Server(self.cage() if has_bwrap() else [], self.network)

    def order(self, words, root, stdin):
        """Orders a command -> (the server that runs it, our end of the pipe of its output)."""
        order = dict(
            words=words,
            stdin=stdin.encode("utf-8", "surrogateescape"),
            root=root,
            uid=self.user_for(root),
            disk=self.disk,
            limits=list(self.limits.items()),
            processes=self.processes,
            environment=self.environment(root),
        )
        text = marshal.dumps(order)

        # The form is that of sandbox_server.py: the length with the file descriptor, then the text.
        # The server has its own copy of the pipe's end; ours would keep the pipe open for ever.
        read_fd, write_fd = os.pipe()
        try:
            for may_try_again in (True, False):  # servers may have been killed
                server = self.server()
                try:
                    socket.send_fds(server.line, [len(text).to_bytes(4, "big")], [write_fd])
                    server.line.sendall(text)
                    return server, read_fd
                except ConnectionError:
                    self.idle.clear()
                    if not may_try_again:
                        raise
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)

    def user_for(self, root):
        """The user id that a command in this folder runs as, 0 for our own. If we are root, each
        folder is given to a powerless user of its own, and commands in it run as that user."""
        if not has_bwrap() or os.geteuid() != 0:
            return 0

        # The number is taken from the folder's inode.
        uid = 100_000 + os.stat(root).st_ino % 1_000_000
        try:
            give(root, uid)
            return uid
        # The root of a container without such a user is treated as any user.
        except OSError as error:
            if is_machine_failure(error):
                raise
            if Path("/proc/self/uid_map").read_text().split()[1:] == ["0", str(2**32 - 1)]:
                # This maps all user ids, so it is the machine's own root. It owns /proc/sys even
                # without any right, and no command may run as it.
                raise
            return 0

    def environment(self, root):
        """The environment of a command in this folder."""
        passed = PASSED + PROXIES * self.network
        environment = ENVIRONMENT | {
            name: os.environ[name] for name in passed if name in os.environ
        }

        # With -S there is a generated codebase, which needs no path. Its Python may be a fork of
        # the server (sandbox_server.py), which has read such variables already.
        if "-S" not in self.python:
            inside = "/work" if has_bwrap() else root
            folders = [f"{inside}/{path}".rstrip("/") for path in self.roots]
            environment["PYTHONPATH"] = ":".join(folders)

        # Without a network pip is told so: it would go on trying for a minute.
        return environment if self.network else environment | {"PIP_NO_INDEX": "1"}

    def run(self, command, root, stdin="", time_limit=None):
        """Result of `command` (a line, or a list of words) in directory `root`.

        Never raises, neither for what the command does nor for a failure of the machine. After such
        a failure the result's `started` is False."""
        # What cannot be run at all, which is the command's own fault.
        words = self.argv(command) if isinstance(command, str) else list(command)
        if os.path.islink(root) or not os.path.isdir(root):
            return Result(127, "no such directory")
        if any("\0" in word for word in words):
            return Result(127, "a command cannot hold a zero byte")

        # Start it. This may be tried again, since nothing of the command has run yet.
        def start():
            try:
                return self.order(words, os.path.realpath(root), stdin)
            except OSError as error:
                raise MachineFailure(f"cannot start: {error}") from error

        try:
            server, read_fd = try_again(start)
        except MachineFailure as failure:
            return Result(127, str(failure), started=False)

        # Read what it prints, until it ends or is stopped. stop() kills whatever is left of it. A
        # server without a proper answer is not used again.
        deadline = time.perf_counter() + (time_limit or self.time_limit)
        try:
            text, note = self.collect(server.line, read_fd, deadline, root)
        finally:
            os.close(read_fd)
            code = server.stop()
        if not code.lstrip("-").isdigit():
            return Result(127, f"cannot start: {code}", started=False)
        self.idle.append(server)

        # Now that nothing is written any more, weigh the tree: thousands of files can be made
        # between two looks.
        if not note:
            note = self.overfull(root)
            code = int(code) or bool(note)
        if note:
            text += f"\n[{note}]"

        # If the command failed, the disk is full and its own tree is small, then others have filled
        # the disk, and the failure is the machine's.
        if int(code) and not note and room_left(root) < 1 << 16 and disk_usage(root) < self.LIGHT:
            return Result(127, f"no room is left in {Path(root).parent}", started=False)
        return Result(int(code), text, note == "timed out", stopped=note)

    def collect(self, control, pipe, deadline, root):
        """(output, why the command was stopped or "") of a command, read until it ends or has to be
        stopped: at the deadline, at a flood of words, when the disk is full. An output that is too
        long is cut, and the command goes on."""
        output, note, weighed = CutOutput(self.output), "", time.perf_counter()
        while not note:
            # Ask whether it has ended before looking at the pipe: if it has, its last words are
            # in the pipe by now. Then the pipe is read to its end.
            wait = min(0.1, deadline - time.perf_counter())
            ended = ready(control, 0)
            chunk = None
            if (wait > 0 or ended) and ready(pipe, wait):
                chunk = os.read(pipe, 65536)
            output.add(chunk or b"")
            if chunk == b"" or (chunk is None and ended):
                break

            # Stop it for its time, its words or its tree, which is weighed ten times a second.
            if wait <= 0 and not ended:
                note = "timed out"
            elif output.size > max(self.FLOOD, 4 * self.output):
                note = "stopped: it printed without end"
            elif time.perf_counter() > weighed + 0.1:
                note = self.overfull(root)
                weighed = time.perf_counter()

        # A command may have closed its output and gone on: its end is waited for.
        if not note and not ready(control, max(0, deadline - time.perf_counter())):
            note = "timed out"
        return output.text(), note

    def overfull(self, root):
        """Why a tree is more than a command may make: "disk full" or "too many files"; else ""."""
        size, number = census(root)
        if size > self.disk:
            return "disk full"
        return "too many files" if number > self.files else ""

    def run_files(self, files, command, stdin=""):
        """Result of `command` in a fresh copy of `files`. Remembered where the outcome can only
        depend on (files, command, stdin)."""

        # One run in a folder of its own. After a failure of the machine it is tried again.
        def attempt():
            with fresh_directory() as root:
                try:
                    with as_machine_failure(f"cannot write in {root}"):
                        write_tree(files, root)
                except OSError as error:  # a file where another needs a folder
                    return Result(127, f"cannot write: {error}")
                result = self.run(command, root, stdin)
                if not result.started:
                    raise MachineFailure(result.output)
                return result

        # A failure of the machine that stays is a Result that has not started.
        def run():
            try:
                return try_again(attempt)
            except MachineFailure as failure:
                return Result(127, str(failure), started=False)

        # Not remembered where a time, a path or a random number may be in the output: it would be
        # another one the next time.
        if not is_function_of_files(files, command):
            return run()
        return self.once(tree_key(files, repr((command, stdin))), run)

    def once(self, key, run, repeatable=lambda: True):
        """The remembered Result of this key, or that of run(). Threads that ask for the same key at
        the same time wait for one run: the rollouts of a group often write the same.

        repeatable: asked after the run, whether the result may be remembered."""
        if self.memo is None:
            return run()

        # An entry is [lock] until there is a result, then [lock, result].
        entry = self.memo.setdefault(key, [threading.Lock()])
        lock = entry[0]
        with lock:
            if len(entry) == 1:
                result = run()
                # What a limit has stopped or a signal has ended depends on how fast the machine is,
                # and the next run may do better.
                by_itself = not result.stopped and 0 <= result.exit_code <= 128
                if not (by_itself or result.timed_out) or not result.started or not repeatable():
                    return result
                entry.append(result)
                # A time-out is told to those who wait for this run. Whoever asks later tries again.
                if result.timed_out:
                    del self.memo[key]
            return entry[1]


class Server:
    """A process that runs one command at a time, in a cage of its own. It ends when this object is
    collected.

    cage: the words that start bubblewrap, put in front of its own command; [] for no cage."""

    # seconds to wait for an answer, which takes long only where a process does not die
    PATIENCE = 10.0

    def __init__(self, cage, network=False):
        self.line, far = socket.socketpair()
        # The text of the server, the last argument, is compiled by a short program in the cage, so
        # that what was parsed is freed before any command is forked.
        program = "import sys; exec(compile(sys.argv.pop(), 'server', 'exec'))"
        arguments = [str(far.fileno()), str(int(bool(cage))), str(int(network)), SERVER]
        # without -E, with which Python would ignore PYTHONHASHSEED
        python = [os.path.realpath(sys.executable), "-S", "-B", "-c", program]
        with far:
            process = subprocess.Popen(
                [*cage, *python, *arguments],
                env=ENVIRONMENT | {name: os.environ[name] for name in PASSED if name in os.environ},
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        weakref.finalize(self, close_server, self.line, process, os.getpid())

        # It sends one byte when it is ready.
        if not self.line.recv(1):
            raise OSError(process.communicate()[1].decode("utf-8", "replace").strip())

    def stop(self):
        """Kills whatever is left of the command -> its exit code as text, or other words if it
        could not be started or the server is gone."""
        # This byte asks for the end. If the command has ended by itself, it says that the answer
        # was heard.
        with contextlib.suppress(ConnectionError):
            self.line.send(b".")

        # Its answer is one line, and each piece of it may take PATIENCE seconds.
        text, more = b"", b"."
        with contextlib.suppress(ConnectionError):
            while more and not text.endswith(b"\n"):
                more = self.line.recv(4096) if ready(self.line, self.PATIENCE) else b""
                text += more
        if not text.endswith(b"\n"):
            return f"no answer {text!r}"
        return text.decode("utf-8", "replace").strip()


def close_server(line, process, pid):
    """Ends a server. In a fork of the process that started the server (pid), it only closes the
    fork's copy of the line."""
    # The server ends when its line does; one that does not is killed.
    if os.getpid() == pid:
        with contextlib.suppress(OSError):  # it was killed
            line.shutdown(socket.SHUT_RDWR)
        try:
            process.wait(Server.PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # These are this process's own copies.
    line.close()
    process.stderr.close()


def ready(file, seconds):
    """Whether there is something to read within so many seconds. By poll, since select cannot take
    a file descriptor above 1023."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(1000 * max(0, seconds)))


def hidden_place(place):
    """The folder that holds this place, if the sandbox puts a folder of its own there; else ""."""
    for top in ("/work", "/dev/shm"):
        if str(place).startswith(top + "/"):
            return top
    return ""
