"""A plugin of pytest: the tests run in two processes, file by file, with one report.

After the tests are collected, this process forks the workers. It hands out the files, the largest
first, to whoever is free, and reports what the workers tell as if it had run the tests itself: so
-x, -k, --lf, --durations, warnings and the exit code mean what they always mean. Both workers
inherit what was collected. One file is never cut, because its fixtures are shared by its tests."""

import os
import sys
import traceback
import warnings
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

import pytest

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
    started = {}
    try:
        for _ in range(workers):
            start_worker(session, files, started)
        report_all(session, files, order, list(started))
    finally:
        # A worker that was asked to stop ends after its test, and removes what it has made. All are
        # asked before one of them is waited for.
        for line in started:
            line.close()
        for pid in started.values():
            os.waitpid(pid, 0)
    return True


def start_worker(session, files, started):
    """started: {line to a worker: its process}, to which the new one is added"""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid:
        theirs.close()
        started[ours] = pid
        return

    # The child: whatever happens, it does not return into the loop of its parent. A line that stays
    # open here would never end for the worker that it leads to.
    for line in [ours, *started]:
        line.close()
    teller = Teller(theirs, session)
    try:
        run_files(session, files, teller)
    except (KeyboardInterrupt, pytest.exit.Exception):
        pass
    except BaseException:
        teller.send(error=traceback.format_exc())
    finally:
        os._exit(0)


class Teller:
    """A worker's end of the line, and a plugin that sends each report there"""

    def __init__(self, line, session):
        self.line, self.session = line, session

    def send(self, **message):
        # The other end is gone: this worker stops after its test.
        try:
            self.line.send(message)
        except OSError:
            self.session.shouldstop = "nobody listens"

    def ask_for_files(self):
        """Yields numbers of files, until there are none left or this worker has to stop."""
        while not self.session.shouldstop and not self.session.shouldfail:
            self.send(ask=True)
            try:
                number = self.line.recv()
            except (EOFError, OSError):
                return
            if number is None:
                return
            yield number

    def pytest_runtest_logstart(self, nodeid):
        self.send(start=nodeid)

    def pytest_runtest_logreport(self, report):
        config = self.session.config
        self.send(report=config.hook.pytest_report_to_serializable(config=config, report=report))

    def pytest_warning_recorded(self, warning_message, when, nodeid, location):
        # Those of the collection are known to the parent. Of others the class may be unknown there.
        if when == "runtest":
            place = [warning_message.filename, warning_message.lineno]
            words = [str(warning_message.message), warning_message.category.__name__]
            self.send(warning=[*words, *place], nodeid=nodeid, location=location)


def run_files(session, files, teller):
    """What a worker does: runs the tests of each file that it is given."""
    # What prints and what keeps the failures of the last run belongs to the parent. The files into
    # which output is captured are shared with it, so this worker opens its own.
    plugins = session.config.pluginmanager
    for name in ("terminalreporter", "lfplugin", "nfplugin"):
        plugins.unregister(name=name) if plugins.hasplugin(name) else None
    plugins.register(teller)
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()

    # One thread: threads that torch has in the parent are not in this process.
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)

    # pytest is told the next test, so that it takes down the fixtures which that one does not need.
    # After the last test of a file any other file will do.
    try:
        for number in teller.ask_for_files():
            tests = files[number]
            for test, following in zip(tests, [*tests[1:], files[number - 1][0]]):
                session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
                if session.shouldstop or session.shouldfail:
                    break
    finally:
        # Also after Ctrl-C: what fixtures have made or started does not stay behind.
        session._setupstate.teardown_exact(None)
    teller.send(done=True)


def report_all(session, files, order, lines):
    """What the parent does until the last worker is done. order: numbers of the files that are
    left; lines: to the workers"""
    hook, running, at_work = session.config.hook, dict.fromkeys(lines), set(lines)
    while at_work:
        for line in wait(at_work):
            try:
                message = line.recv()
                if "ask" in message:
                    line.send(order.pop(0) if order else None)
            except (EOFError, OSError):
                raise session.Interrupted(f"a worker ended in {running[line]}")
            if "start" in message:
                running[line] = message["start"]
            elif "report" in message:
                report_test(session, message["report"])
            elif "warning" in message:
                report_warning(hook, **message)
            elif "error" in message:
                raise RuntimeError(f"in {running[line]}:\n{message['error']}")
            elif "done" in message:
                at_work.discard(line)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def report_test(session, data):
    """Reports a phase of a test of a worker in this process."""
    hook = session.config.hook
    report = hook.pytest_report_from_serializable(config=session.config, data=data)
    hook.pytest_runtest_logreport(report=report)
    if report.when == "teardown":
        hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)


def report_warning(hook, warning, nodeid, location):
    """Reports a warning of a worker in this process, where pytest lists them at the end."""
    text, category, filename, line = warning
    message = warnings.WarningMessage(text, type(category, (Warning,), {}), filename, line)
    told = dict(warning_message=message, when="runtest", nodeid=nodeid, location=location)
    hook.pytest_warning_recorded.call_historic(kwargs=told)
