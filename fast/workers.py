"""fast/workers.py: agents are sampled in processes beside the trainer.

The twin of rollout.InTurn, where one process samples, learns and samples again. Stated for
Composer (Technical Report, arXiv 2603.24477): generation workers beside the trainer; weights sent
every step as compressed deltas against the previous upload, a full one now and then, swapped in
mid-rollout, so that later tokens are fresher; off-policyness is kept small, not corrected. Ours:
files in a folder, exclusive or and zlib, and a bound on staleness (train.py's --staleness).

    trainer      Publisher.publish(version, weights)  ->  a file: 00000003.base, 00000004.delta
                 Workers.submit(tasks), Workers.collect(...)  ->  groups of rollouts
    processes    Generator: take the newest file between two decoding steps, play the agents

What it costs: with stale tokens the gradient is that of the current policy at an older one's
samples, and the k1 estimate of the KL is no longer unbiased.

Left out: workers on other machines, and feeding a sequence again under new weights (its cache keeps
the entries that the old ones left).
"""

import atexit
import contextlib
import hashlib
import multiprocessing
import os
import pkgutil
import queue
import signal
import sys
import tempfile
import threading
import zlib
from concurrent.futures import Future
from pathlib import Path

import torch

from fast.samplers import make_sampler, sampling_model
from rollout import sample_groups
from world.machine import owned_directory
from world.sandbox import Sandbox

# ---------------------------------------------------------------- weights on their way


def byte_planes(tensor):
    """The bits of a tensor -> uint8 (bytes per number, numbers). Byte i of all numbers lies
    together: high bytes hardly change between versions, and so compress well."""
    data = tensor.detach().cpu().flatten().view(torch.uint8)  # (numbers * bytes per number,)
    return data.reshape(tensor.numel(), tensor.element_size()).T


def encode_delta(old, new):
    """old, new {name: tensor}, of equal names, shapes and dtypes -> bytes: their exclusive or,
    compressed. It is zero where nothing changed, and a second exclusive or undoes it exactly,
    whatever the numbers are, zeros of either sign included."""
    parts = []
    for name in new:
        changed = byte_planes(old[name]) ^ byte_planes(new[name])
        parts.append(changed.numpy().tobytes())
    return zlib.compress(b"".join(parts), 1)


def apply_delta(old, delta):
    """old {name: tensor} and the bytes of encode_delta(old, new) -> new, bit for bit"""
    # The bytes belong to these weights only if there are as many.
    data = torch.frombuffer(bytearray(zlib.decompress(delta)), dtype=torch.uint8)
    size = sum(tensor.nbytes for tensor in old.values())
    if len(data) != size:
        raise ValueError(f"a delta of {len(data)} bytes for weights of {size}")

    # The tensors' planes stand one behind the other, in the order of the names.
    new, start = {}, 0
    for name, tensor in old.items():
        changed = data[start : start + tensor.nbytes]
        changed = changed.view(tensor.element_size(), tensor.numel())  # as byte_planes
        bits = (byte_planes(tensor) ^ changed).T.contiguous().flatten()  # (bytes,)
        new[name] = bits.view(tensor.dtype).view(tensor.shape)
        start += tensor.nbytes
    return new


def zeros(weights):
    """Zeros in the shapes of weights. A base is a delta against them, so it holds all bits."""
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}


def digest_weights(weights):
    """{name: tensor} -> 16 bytes, equal for equal weights: they show whether weights arrived as
    they were sent"""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in weights.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(byte_planes(tensor).numpy().tobytes())
    return digest.digest()


class Publisher:
    """The trainer's end. Every version of the weights becomes a file in a folder: a delta, which
    holds what changed since the version before, or now and then a base, which holds all, for a
    process that starts late.

    Numbers are rounded as the sampler holds them (bf16 matrices) before they are compared. More
    than 98 % of Cursor's bf16 weights are equal from step to step (stated); here the log says how
    many are.

    every: one upload in so many is a base."""

    def __init__(self, folder, config, dtype, every=20):
        self.folder = Path(folder)
        self.every = every
        # The sampler's model says in which dtype each weight is held there.
        held = sampling_model(config, dtype).state_dict()
        self.dtypes = {name: tensor.dtype for name, tensor in held.items()}
        self.sent = None  # the weights of the last upload
        self.count = 0  # uploads
        self.base = 0  # version of the last base

    def publish(self, version, weights):
        """Writes one version of the weights {name: tensor}, of any dtype -> what the step log says
        of the upload. Versions only rise."""
        # Round as the sampler does, and copy: the trainer goes on changing its weights.
        new = {}
        for name, dtype in self.dtypes.items():
            new[name] = weights[name].detach().to("cpu", dtype, copy=True)

        is_base = self.count % self.every == 0
        data = digest_weights(new) + encode_delta(zeros(new) if is_base else self.sent, new)

        # Written under another name and then renamed: a reader sees the whole file or none of it.
        (self.folder / "part").write_bytes(data)
        kind = "base" if is_base else "delta"
        (self.folder / "part").replace(self.folder / f"{version:08d}.{kind}")
        if is_base:
            # The base before this one and what followed it remain, for processes that are late.
            for path in self.folder.iterdir():
                if int(path.stem) < self.base:
                    path.unlink()
            self.base = version

        # For the log: how many numbers are equal to those of the version before.
        same = 0
        if self.sent:
            same = sum(int((self.sent[name] == tensor).sum()) for name, tensor in new.items())
        self.sent = new
        self.count += 1
        return {
            "sync_bytes": len(data),
            "sync_full": sum(tensor.nbytes for tensor in new.values()),
            "sync_same": same / sum(tensor.numel() for tensor in new.values()),
        }


def pending_uploads(folder, version):
    """Names of the uploads that lead from `version` (-1: none yet) to the newest, in order. They
    begin with the last base among them, if there is one: it holds all weights."""
    names = []
    for name in sorted(os.listdir(folder)):
        if name != "part" and int(name[:8]) > version:
            names.append(name)
    bases = [i for i, name in enumerate(names) if name.endswith("base")]
    return names[bases[-1] :] if bases else names


# ---------------------------------------------------------------- processes that sample


class Generator:
    """Samples groups of rollouts with the newest weights in the folder: inside a generation
    process. options: arguments of make_sampler"""

    def __init__(
        self, folder, config, dtype, device, tokenizer, group, limits, compact=None, **options
    ):
        self.sampler = make_sampler(config, dtype, device, tokenizer, limits.window, **options)
        # The fast sampler asks for newer weights before every decoding step; it has none yet (-1).
        self.sampler.refresh = self.refresh
        self.sampler.version = -1
        self.folder = folder
        self.group = group
        self.limits = limits
        self.compact = compact
        self.sandbox = Sandbox()

    def refresh(self):
        """Loads all uploads that are newer than the model. Sequences under way go on with the new
        weights, and with the entries that old weights left in the cache (ours: feeding these
        sequences again would cost a prefill of everything)."""
        for name in pending_uploads(self.folder, self.sampler.version):
            # as publish writes it: 16 bytes of digest, then the delta
            data = Path(self.folder, name).read_bytes()
            sent_fingerprint, delta = data[:16], data[16:]

            # A base does not depend on what this model holds, a delta does.
            held = self.sampler.model.state_dict()
            new = apply_delta(zeros(held) if name.endswith("base") else held, delta)
            if digest_weights(new) != sent_fingerprint:
                raise ValueError(f"{name}: what arrived are not the trainer's weights")

            self.sampler.model.load_state_dict(new)
            self.sampler.version = int(name[:8])

    def __call__(self, tasks, numbers, seed):
        """-> a group of rollouts per task. numbers: of the tasks, from which their random numbers
        follow together with `seed`"""
        self.refresh()
        return sample_groups(
            self.sampler, tasks, self.group, seed, self.limits, self.sandbox, self.compact, numbers
        )


def exit_with_trainer(trainer):
    """Ends this process as soon as the trainer's end of a pipe is closed, even in the middle of a
    job, since nobody waits for its groups any more. What it leaves behind is removed when the next
    run begins."""
    # Nothing is ever sent, so this waits until the pipe is closed.
    with contextlib.suppress(EOFError, OSError):
        trainer.recv()
    os._exit(1)


def apply_patch(name):
    """Changes the recipe in this process as the trainer's was changed: name is an experiment's
    patch as module:function, "" for the plain recipe"""
    if name:
        pkgutil.resolve_name(name)()


def worker_main(pipe, trainer, settings, patch=""):
    """What a generation process runs: it takes jobs from a pipe and sends groups back, until the
    trainer is gone. trainer: the end of a pipe on which nothing is ever sent. patch: see
    apply_patch"""
    threading.Thread(target=exit_with_trainer, args=(trainer,), daemon=True).start()
    # Ctrl-C is the trainer's to handle. On SIGTERM Python ends in order: workspaces are removed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    torch.set_num_threads(1)

    # One job after the other, until the trainer's end of the pipe is closed.
    apply_patch(patch)
    generator = Generator(**settings)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(generator(*job))


def number_of_parts(n, steps_at_once):
    """Into how many parts the tasks of a step are dealt, so that n processes have work"""
    return -(-n // steps_at_once)


class Workers:
    """The twin of rollout.InTurn: n generation processes sample while the trainer learns.

    A thread of the trainer supervises each process. The processes are forked from a server that has
    no threads of its own: forking the trainer could copy a lock that one of its threads holds.
    settings: the arguments of Generator. patch: see apply_patch. steps_at_once: how many steps are
    sampled at the same time. A step is dealt to as few processes as keep all of them busy: decoding
    64 rows takes less than twice as long as decoding 32."""

    def __init__(self, n, settings, patch="", steps_at_once=1):
        self.n = n
        self.parts = number_of_parts(n, steps_at_once)
        self.settings = settings
        self.patch = patch
        self.jobs = queue.SimpleQueue()
        self.restarts = 0  # of processes that died
        self.processes = {}
        self.lives = {}  # of each process, our end of the pipe that closes when this process ends
        self.closed = False

        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["fast.workers"])
        self.own_server_folder()

        # A process starts when its thread gets the first job.
        for i in range(n):
            threading.Thread(target=self.supervise_worker, args=(i,), daemon=True).start()
        atexit.register(self.close)

    def own_server_folder(self):
        """Puts the socket of the forking server into a folder that is removed even where this
        process is killed (see owned_directory). Python has no public way to choose its place."""
        settings = getattr(multiprocessing.current_process(), "_config", {})
        if "tempdir" not in settings:
            self.sockets = owned_directory("sockets", tempfile.gettempdir())
            # The path of a socket has 104 bytes at most, and a name below the folder is added.
            if len(self.sockets.name) < 70:
                settings["tempdir"] = self.sockets.name

    def submit(self, tasks, numbers, seed):
        """Deals the tasks into parts, in turns -> [(future, job)], for collect"""
        dealt, parts = [], self.parts
        for i in range(parts):
            dealt.append((Future(), (tasks[i::parts], numbers[i::parts], seed)))
            self.jobs.put(dealt[-1])
        return dealt

    def collect(self, dealt):
        """What submit returned -> groups of rollouts, in the order of the tasks, when all are
        there"""
        parts = [future.result() for future, _ in dealt]
        # The tasks were dealt in turns: task i went to part i % self.parts.
        total = sum(len(part) for part in parts)
        return [parts[i % len(parts)][i // len(parts)] for i in range(total)]

    def start(self, i):
        """Starts process number i -> our end of the pipe to it"""
        pipe, theirs = self.context.Pipe()
        # A second pipe tells the process when we are gone: our end is closed with this process.
        watched, self.lives[i] = self.context.Pipe(duplex=False)
        arguments = (theirs, watched, self.settings, self.patch)
        process = self.context.Process(target=worker_main, args=arguments, daemon=True)
        process.start()
        self.processes[i] = process

        # The process has its own copies of these ends. If ours stayed open, we would not notice its
        # death by the end of the pipe.
        theirs.close()
        watched.close()
        return pipe

    def supervise_worker(self, i):
        """What the thread of process number i runs: it hands the process one job at a time. A
        process that dies is replaced, and its job begins again, with the same prompts and the same
        draws: a rollout is a function of (seed, task number, j) and of the weights."""
        pipe = None
        while True:
            future, job = self.jobs.get()

            # Three tries: a job that kills its process each time must not hang the trainer.
            for _ in range(3):
                try:
                    pipe = pipe or self.start(i)
                    pipe.send(job)
                    future.set_result(pipe.recv())
                    break
                except (EOFError, OSError):
                    # The process died. While we close them all, that is intended.
                    if self.closed:
                        return
                    self.restarts += 1
                    pipe = None
                except Exception as error:
                    # A job that cannot be sent, or a result that cannot be read: whoever waits for
                    # it gets the error.
                    future.set_exception(error)
                    break
            else:
                message = (
                    "a generation process died three times on the same tasks; "
                    "its own words are above"
                )
                future.set_exception(RuntimeError(message))

    def close(self):
        """Ends all processes. At exit it is called anyway."""
        self.closed = True
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.join(5)
