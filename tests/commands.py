"""Commands as a user types them, started from a process that has torch imported (fork_server.py).

    run_command([sys.executable, "train.py", ...], cwd=folder, env=environment)

A test about the process itself starts a real one: flags of Python, hash seeds, the time or the
memory of an import, a missing package."""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

SERVER = Path(__file__).with_name("fork_server.py")
connection = None  # to the server, which is started with the first command


def start_server():
    """Starts the process that forks the commands. It ends when all who hold the connection have."""
    global connection
    if connection is None and sys.platform == "linux":
        connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Each command brings its environment: what torch reads of it while it is imported must not
        # be that of the tests.
        others = ("OMP_NUM_THREADS", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if name not in others}
        subprocess.Popen(
            [sys.executable, str(SERVER), str(other.fileno())],
            env={**environment, "CUDA_VISIBLE_DEVICES": ""},
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        other.close()


class Command:
    """A running command. Its output is collected all the time, so that it never waits for a
    reader: `stdout` and `stderr` are the text so far.

    words: as for subprocess, [sys.executable, ...]; file_limit: the bytes that a file may have"""

    def __init__(self, words, cwd=None, env=None, new_session=False, file_limit=None):
        start_server()
        assert words[0] == sys.executable, "a command begins with this Python"
        self.args, self.returncode = [str(word) for word in words], None
        request = dict(
            words=self.args[1:],
            cwd=str(cwd or os.getcwd()),
            env=dict(os.environ if env is None else env),
            new_session=new_session,
            file_limit=file_limit,
        )
        self.report, report = os.pipe()
        ends = [os.pipe(), os.pipe()]
        empty = os.open(os.devnull, os.O_RDONLY)
        theirs = [empty, ends[0][1], ends[1][1], report]
        self._start(request, theirs)
        for file in theirs:
            os.close(file)

        # One thread per stream reads it to its end.
        self.collected, self.readers = ([], []), []
        for (end, _), parts in zip(ends, self.collected):
            self.readers.append(threading.Thread(target=collect, args=(end, parts), daemon=True))
            self.readers[-1].start()

    def _start(self, request, files):
        socket.send_fds(connection, [json.dumps(request).encode()], files)
        self.pid = struct.unpack("i", os.read(self.report, 4))[0]

    stdout = property(lambda self: b"".join(self.collected[0]).decode())
    stderr = property(lambda self: b"".join(self.collected[1]).decode())

    def poll(self, seconds=0):
        """-> the exit code, negative for a signal; None while it runs, after so many seconds"""
        if self.returncode is None and select.select([self.report], [], [], seconds)[0]:
            status = struct.unpack("i", os.read(self.report, 4))[0]
            self.returncode = os.waitstatus_to_exitcode(status)
            os.close(self.report)
        return self.returncode

    def wait(self, timeout=120):
        """Returns the exit code when the command has ended and its output is complete. At the
        timeout the command is killed."""
        deadline = time.monotonic() + timeout
        if self.poll(timeout) is None:
            self.send_signal(signal.SIGKILL)
            self.poll(10)
            raise subprocess.TimeoutExpired(self.args, timeout, self.stdout, self.stderr)
        for reader in self.readers:
            reader.join(max(1, deadline - time.monotonic()))
        return self.returncode

    def wait_for(self, happened, timeout=120):
        """Returns when happened() is true, or when the command has ended."""
        deadline = time.monotonic() + timeout
        while not happened() and self.poll(0.01) is None:
            assert time.monotonic() < deadline, self.stderr
        return self

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def collect(file, parts):
    while part := os.read(file, 1 << 16):
        parts.append(part)
    os.close(file)


def run_command(words, cwd=None, env=None, timeout=300, check=False, file_limit=None):
    """As subprocess.run with captured text -> subprocess.CompletedProcess"""
    command = Command(words, cwd, env, file_limit=file_limit)
    code = command.wait(timeout)
    done = subprocess.CompletedProcess(command.args, code, command.stdout, command.stderr)
    assert not check or code == 0, f"{command.args} ended with {code}\n{done.stderr[-3000:]}"
    return done
