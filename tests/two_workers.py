"""A plugin of pytest: the tests run in two processes, file by file, with one report.

After the tests are collected, this process forks the workers. It hands out the files, the largest
first, to whoever is free, and reports what the workers tell as if it had run the tests itself: so
-x, -k, --durations and the exit code mean what they always mean. Both workers inherit what was
collected. One file is never cut, because its fixtures are shared by its tests."""

import json
import os
import select
import socket
import sys
import traceback
from itertools import groupby
from pathlib import Path

import commands


def pytest_addoption(parser):
    default = min(2, os.cpu_count() or 1)
    parser.addoption("--workers", type=int, default=default, help="processes that run tests")


def pytest_runtestloop(session):
    """Runs the tests in workers, where there are two files or more. -> True, or None: pytest then
    runs them itself"""
    options = session.config.option
    files = [list(tests) for _, tests in groupby(session.items, lambda item: item.path)]
    alone = options.collectonly or options.usepdb or options.capture == "no"
    workers = min(options.workers, len(files))
    if workers < 2 or alone or session.testsfailed or not hasattr(os, "fork"):
        return None

    # Shared by the workers: the folder of all temporary folders, and the process that forks.
    session.config._tmp_path_factory.getbasetemp()
    commands.start_server()
    sys.stdout.flush(), sys.stderr.flush()
    order = sorted(range(len(files)), key=lambda n: -Path(files[n][0].path).stat().st_size)
    started = [start_worker(session, files) for _ in range(workers)]
    try:
        report_all(session, files, order, [line for _, line in started])
    finally:
        for pid, line in started:
            line.close()
            # A worker that was asked to stop ends after its test, and removes what it has made.
            os.waitpid(pid, 0)
    return True


def start_worker(session, files):
    """-> (its process, the socket to it)"""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours

    # The child: whatever happens, it does not return into the loop of its parent.
    try:
        run_files(session, files, Teller(theirs, session))
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


class Teller:
    """A worker's end of the socket, and a plugin that sends each report there"""

    def __init__(self, line, session):
        self.line, self.session, self.answers = line, session, line.makefile()

    def send(self, **message):
        # The other end is gone: this worker stops after its test.
        try:
            self.line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.session.shouldstop = "nobody listens"

    def ask_for_files(self):
        """Yields numbers of files, until there are none left or this worker has to stop."""
        while True:
            self.send(ask=True)
            answer = "" if self.session.shouldstop else self.answers.readline()
            if not answer.strip():
                return
            yield int(answer)

    def pytest_runtest_logstart(self, nodeid):
        self.send(start=nodeid)

    def pytest_runtest_logreport(self, report):
        config = self.session.config
        self.send(report=config.hook.pytest_report_to_serializable(config=config, report=report))


def run_files(session, files, teller):
    """What a worker does: runs the tests of each file that it is given."""
    # What prints and what keeps the failures of the last run belongs to the parent. The files into
    # which output is captured are shared with it, so this worker opens its own.
    plugins = session.config.pluginmanager
    for name in ("terminalreporter", "lfplugin", "nfplugin", "junitxml"):
        plugins.unregister(name=name) if plugins.hasplugin(name) else None
    plugins.register(teller)
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()

    # One thread: threads that torch has in the parent are not in this process.
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)

    # pytest is told the test after each one, so that it knows which fixtures are needed no longer.
    tests = (test for number in teller.ask_for_files() for test in files[number])
    test = next(tests, None)
    while test is not None and not session.shouldstop and not session.shouldfail:
        following = next(tests, None)
        session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        test = following
    session._setupstate.teardown_exact(None)
    teller.send(done=True)


def report_all(session, files, order, lines):
    """What the parent does until the last worker is done. order: numbers of the files that are
    left; lines: the sockets of the workers"""
    hook, running, buffers = session.config.hook, dict.fromkeys(lines), dict.fromkeys(lines, b"")
    at_work = set(lines)
    while at_work:
        for line in select.select(list(at_work), [], [])[0]:
            # A message is a line of JSON.
            received = line.recv(1 << 20)
            *messages, buffers[line] = (buffers[line] + received).split(b"\n")
            if not received:
                raise session.Interrupted(f"a worker ended in {running[line]}")
            for message in map(json.loads, messages):
                if "start" in message:
                    running[line] = message["start"]
                elif "report" in message:
                    report = hook.pytest_report_from_serializable(
                        config=session.config, data=message["report"]
                    )
                    hook.pytest_runtest_logreport(report=report)
                    if report.when == "teardown":
                        hook.pytest_runtest_logfinish(
                            nodeid=report.nodeid, location=report.location
                        )
                elif "done" in message:
                    at_work.discard(line)
                else:
                    line.sendall(f"{order.pop(0) if order else ''}\n".encode())
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
