"""command/launch.py: the processes of a command, its lock, its signals.

On a CPU, `python train.py` starts further processes itself and becomes rank 0 of plain replicas;
under torchrun, on a GPU, or where --cp or --ep say so, it starts none. One command at a time may
work in a folder. A first Ctrl-C or SIGTERM ends a run after its step, with a checkpoint; where
there is nothing to save (before the first step, in an evaluation) it ends at once. What was started
ends with the command, whatever ended it.

It stands apart from train.py because the recipe is the same in one process and in many: what the
ranks tell each other is said in train.py and hsdp.py.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent import futures
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from command.checkpoints import SaveFailed
from command.flags import is_first_rank, usage_error
from command.hardware import device_of
from world.machine import MachineFailure, fcntl


@contextlib.contextmanager
def run_lock(folder):
    """A context in which no other run may work in the folder. Two runs would write over each
    other's checkpoints, so the second one is refused."""
    with open(Path(folder, ".lock"), "w") as file:
        # The first rank locks for all. The system lifts the lock when the file is closed, also
        # where a run was killed.
        if is_first_rank():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                usage_error(
                    f"--out={folder}: another train.py is at work there: wait for its end, or take "
                    "another"
                )
            except OSError:
                pass  # a file system without locks
        yield


def launch_local_ranks(argv, config, program):
    """Starts further processes on a CPU, once, with the same flags, and makes this one rank 0 of
    plain replicas. One process per core does more than one process with a thread per core: what a
    small model costs is mostly the start of small operations. Under torchrun, on a GPU, or with
    --cp or --ep it starts nothing. program: the words before the flags. -> config"""
    # PLAIN_REPLICAS: this process was started here, or has started the others for a stage before.
    launched = "PLAIN_REPLICAS" in os.environ
    cuda = device_of(config) == "cuda"
    if not launched and ("RANK" in os.environ or cuda or config.cp > 1 or config.ep > 1):
        return replace(config, processes=1)

    # No more processes than torch has threads. A process that was started here knows the number.
    n = int(os.environ.get("PLAIN_REPLICAS", min(config.processes, torch.get_num_threads())))
    if n < 2:
        return replace(config, processes=1)
    if config.dp_replicate not in (1, n):
        usage_error(
            f"--dp_replicate={config.dp_replicate}: the {n} processes that this command starts are "
            f"{n} copies; give --processes=1 under torchrun, or leave the flag away"
        )

    if not launched:
        # What torchrun would tell them: how many they are, and where rank 0 listens. Port 0 asks
        # the system for a free one.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        threads = str(torch.get_num_threads() // n)
        # On macOS the machine's own name may lead nowhere: gloo then needs the local interface.
        if sys.platform == "darwin":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0")
        os.environ.update(
            PLAIN_REPLICAS=str(n),
            WORLD_SIZE=str(n),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            OMP_NUM_THREADS=threads,
        )

        # The other ranks inherit the environment. This process becomes rank 0 in its own.
        for rank in range(1, n):
            process = subprocess.Popen(
                [*program, *argv],
                preexec_fn=tied_to_parent(),
                # Ctrl-C is for rank 0, which tells the others: one that is still importing would
                # end with a traceback.
                start_new_session=True,
                env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            child_processes.append(process)
        os.environ.update(RANK="0", LOCAL_RANK="0")
        torch.set_num_threads(int(threads))
    return replace(config, dp_replicate=n, processes=n)


child_processes = []  # started by launch_local_ranks
STOPPING = signal.SIGINT, signal.SIGTERM


class Stopped(BaseException):
    """A signal has ended the command. No SystemExit, which code that plays tasks may catch."""


@contextlib.contextmanager
def restored_process(end_stopped):
    """A context in which ranks are started and joined. Whatever ends it, the processes that were
    started are gone, and environment, signal handlers and number of threads are as before: a
    notebook calls main several times. end_stopped: ends the command where a signal has stopped it
    (stop_at_once), by the signal's number"""
    environment, threads = dict(os.environ), torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    joined_before, complete = dist.is_initialized(), False
    try:
        yield
        complete = True
        # A rank that is late still needs the store, which lives in rank 0: no rank ends before the
        # others.
        if dist.is_initialized():
            dist.barrier()
    except Stopped as stopped:
        end_stopped(*stopped.args)
    finally:
        # Threads of gloo that outlive the interpreter may end it with an abort. After a failure a
        # group on GPUs may wait for ranks that are gone; it ends with the process.
        ours = dist.is_initialized() and not joined_before
        if ours and (complete or not torch.cuda.is_initialized()):
            dist.destroy_process_group()
        end_children(ask=not complete)

        for name in os.environ.keys() - environment:
            del os.environ[name]
        os.environ.update(environment)
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def end_children(ask):
    """Waits until the processes that were started have ended, and kills those that do not. ask:
    they have work left, and are asked to end"""
    if ask:
        for process in child_processes:
            process.terminate()
    for process in child_processes:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    child_processes.clear()


def watch_ranks(meet):
    """What meet() returns, which waits until all ranks have met. MachineFailure where a process
    that was started ends before: by itself a rank waits for one that is gone, for all of its
    timeout. (torchrun looks after its ranks itself.)"""
    if not child_processes:
        return meet()

    # torch waits outside of Python, where it hears of no signal and no other process. So it waits
    # in a thread, and this one looks around.
    met = futures.Future()

    def wait():
        try:
            met.set_result(meet())
        except BaseException as error:
            met.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    while not futures.wait([met], timeout=0.05).done:
        check_ranks()
    return met.result()


def check_ranks():
    """MachineFailure where a process that was started has ended"""
    for rank, process in enumerate(child_processes, 1):
        code = process.poll()
        if code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise MachineFailure(f"rank {rank} {how} before it had joined the others")


def stop_at_once():
    """From now on Ctrl-C and SIGTERM end this process, and those it has started. For work that has
    nothing to save before its end."""

    def stop(number, frame):
        # A second signal must not interrupt this. The others end with the context that this leaves,
        # and remove their workspaces too.
        for either in STOPPING:
            signal.signal(either, signal.SIG_IGN)
        raise Stopped(number)

    for number in STOPPING:
        signal.signal(number, stop)


def stop_after_step(interrupted):
    """From now on a first Ctrl-C or SIGTERM ends a run after its step. A second one ends it at
    once. interrupted: a list, into which the signal's number is put; the loop looks into it between
    two steps"""

    def note_signal(number, frame):
        interrupted.append(number)
        # Back to the system's own handling: the same signal again ends the process.
        signal.signal(number, signal.SIG_DFL)
        if is_first_rank():
            print("stopping after this step; a second time stops at once", file=sys.stderr)

    for number in STOPPING:
        signal.signal(number, note_signal)


# In a sum over all ranks: more than all signals together.
LOG_FAILED = 10**9


def agree_to_stop(run, interrupted, problem):
    """Has any rank got a signal? A signal may reach one rank only, and only the first rank writes
    the log. One sum tells all ranks of both. problem: why the log could not be written, or an empty
    text; where it could not, every rank ends here"""
    code = run.sum(len(interrupted) + LOG_FAILED * bool(problem))
    if code >= LOG_FAILED:
        raise SaveFailed(problem)
    return code > 0


pool_function = None  # in a process of compute_on_cores: what it computes


def compute_on_cores(function, items, cores=None):
    """Yields function(item) of each item, in order. Where this process has four cores or more to
    itself, it forks as many processes for it: with them, edits and patches are as they are here.
    function must not touch a GPU. cores: None: those of the machine, shared by its ranks"""
    if cores is None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
        cores = len(os.sched_getaffinity(0)) // ranks if sys.platform == "linux" else 1
    items = list(items)
    if cores < 4 or len(items) < 100:
        yield from map(function, items)
        return

    def prepare():
        # Ctrl-C and SIGTERM are the parent's to handle; what it starts ends with it.
        global pool_function
        pool_function = function
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(signal.SIGKILL)
        torch.set_num_threads(1)

    with multiprocessing.get_context("fork").Pool(cores, prepare) as pool:
        yield from pool.imap(compute_one, items, chunksize=16)


def compute_one(item):
    return pool_function(item)


def die_with_parent(number):
    """This process gets the signal `number` when its parent ends. Linux alone can do that."""
    # prctl(PR_SET_PDEATHSIG, number)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(1, number)


def tied_to_parent(number=getattr(signal, "SIGKILL", 9)):
    """The preexec_fn of a process that must end when this one does. Otherwise, if this one is
    killed, whoever waits for it may wait for half an hour. Linux alone can do that. Elsewhere it is
    None: to run Python between fork and exec, beside threads, may hang."""
    return partial(die_with_parent, number) if sys.platform == "linux" else None
