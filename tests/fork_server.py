"""A process that has torch imported and forks a command from itself: `python FILE ...`, `python -m
NAME ...` or `python -c CODE ...` without the three seconds that importing torch takes.

tests/commands.py starts it once for all tests and sends it requests. What a command may not share
with another is made new in the child: arguments, environment, folder, search path, `__main__`,
signals, threads, random numbers, files. Only modules from outside this project are imported
beforehand, so that a command in a copy of the tree imports that copy. No tensor is computed here: a
process that has threads must not fork."""

import atexit
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import struct
import sys
import threading
import types

PRELOADED = (
    "numpy",
    "tiktoken",
    "tqdm",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
)


def serve(connection):
    """Forks a child for each request. -> in the child: its request and its files 0, 1 and 2

    A request is JSON, and comes with four files: 0, 1 and 2 of the command, and a pipe for two
    numbers of four bytes: the id of the command's process, and later its status as waitpid tells
    it. Each request is answered alone, so several processes may send over one connection."""
    # Ctrl-C is for the tests. Nobody waits for the watchers below: the system removes them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, files, _, _ = socket.recv_fds(connection, 1 << 20, 4)
        # No test process is left.
        if not message:
            os._exit(0)

        # A watcher forks the command, so that this process never waits.
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            child = os.fork()
            if child == 0:
                connection.detach()
                return json.loads(message), files[:3]
            for file in files[:3]:
                os.close(file)
            os.write(files[3], struct.pack("i", child))
            os.write(files[3], struct.pack("i", os.waitpid(child, 0)[1]))
            os._exit(0)
        for file in files:
            os.close(file)


def become_fresh(request, files):
    """Gives this process what `python` would give a new one."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, 1024)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["new_session"]:
        os.setsid()
    if request["file_limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], request["file_limit"]))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])

    # As many threads as torch takes by itself, and random numbers of this process alone.
    import numpy
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    numpy.random.seed()
    torch.seed()


def run_words(words):
    """words: what stands behind `python`"""
    # The search path begins with the folder of the script, or with the folder of the command.
    first = {"-m": os.getcwd(), "-c": ""}.get(words[0], os.path.dirname(os.path.realpath(words[0])))
    given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [first, *given, *sys.path[1:]]
    importlib.invalidate_caches()

    # A module of its own, and not this one, is `__main__`.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy._run_module_as_main(words[1])
    elif words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = words
        main.__file__ = words[0]
        with open(words[0], "rb") as file:
            exec(compile(file.read(), words[0], "exec"), main.__dict__)


def run_to_the_end(words):
    """Runs the words and ends this process as Python does, except that nothing is taken apart: to
    free all modules takes half a second."""
    code = 0
    try:
        run_words(words)
    except SystemExit as end:
        code = end.code
        if not isinstance(code, (int, type(None))):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1

    # Threads, then what was registered for the end, then what stands in a buffer.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Whoever waits for this process must see that Ctrl-C ended it.
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    # What was imported is never garbage: a collection in a child need not copy its pages.
    gc.freeze()
    asked, standard = serve(socket.socket(fileno=int(sys.argv[1])))
    become_fresh(asked, standard)
    run_to_the_end(asked["words"])
