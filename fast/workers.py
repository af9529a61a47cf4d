"""workers: HEAD TO BE WRITTEN"""

from concurrent.futures import Future
from fast.model import accelerate
from pathlib import Path
from fast.sampler import Sampler
from world.sandbox import Sandbox
import atexit
import contextlib
import hashlib
import multiprocessing
import numpy as np
import os
import queue
import signal
import sys
import tempfile
import threading
import torch
import zlib
from world.machine import owned_directory
from rollout import rollouts


def generation_model(config, dtype, device="cpu"):
    """A model for sampling only: matrices in the compute dtype, what the trainer keeps in fp32 in
    fp32."""
    model = accelerate(config.build_model()).to(device).compute(dtype)
    for name, p in model.named_parameters():
        if not name.endswith(("norm.weight", "router.weight", "embed.weight")):
            p.data = p.data.to(dtype)
    return model.fuse_weights().eval()


def planes(tensor):
    """The bits of a tensor -> uint8 (bytes per number, numbers): high bytes hardly change, so they
    lie together when compressed."""
    return (
        tensor.detach()
        .cpu()
        .flatten()
        .view(torch.uint8)
        .reshape(tensor.numel(), tensor.element_size())
        .T
    )


def encode_delta(old, new):
    """{name: tensor} twice, of equal names, shapes and dtypes -> bytes: the bits that differ,
    compressed. An exclusive or is undone exactly whatever the numbers are, zeros of either sign
    included, and is zero where nothing changed."""
    return zlib.compress(
        b"".join((planes(old[name]) ^ planes(new[name])).numpy().tobytes() for name in new), 1
    )


def apply_delta(old, delta):
    """-> new, bit for bit as it was given to encode_delta(old, new)"""
    data, at, new = torch.frombuffer(bytearray(zlib.decompress(delta)), dtype=torch.uint8), 0, {}
    if len(data) != sum(tensor.nbytes for tensor in old.values()):
        raise ValueError(
            f"a delta of {len(data)} bytes for weights of {sum(tensor.nbytes for tensor in old.values())}"
        )
    for name, tensor in old.items():
        bits = planes(tensor) ^ data[at : at + tensor.nbytes].view(
            tensor.element_size(), tensor.numel()
        )
        new[name] = bits.T.contiguous().flatten().view(tensor.dtype).view(tensor.shape)
        at += tensor.nbytes
    return new


def zeros(weights):
    """What a base is encoded against: its delta then holds all bits."""
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}


def fingerprint(weights):
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in weights.items():
        digest.update(
            f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
            + planes(tensor).numpy().tobytes()
        )
    return digest.digest()


class Publisher:
    """The trainer's end: every version of the weights is a file in a folder, as what changed since
    the version before, or now and then, for a process that starts late, as a base. Numbers are
    rounded as the sampler holds them (bf16 matrices) before they are compared: more than 98 % of
    Cursor's bf16 weights are equal from step to step (stated), and here the log says how many.
    shared: other processes read the folder, each in its own time; else whoever reads it has read
    all but the newest."""

    def __init__(self, folder, config, dtype, every=20, shared=True):
        self.kinds = {
            name: tensor.dtype
            for name, tensor in generation_model(config, dtype).state_dict().items()
        }
        self.folder, self.every, self.shared, self.sent, self.count, self.base = (
            Path(folder),
            every,
            shared,
            None,
            0,
            0,
        )

    def publish(self, version, weights):
        """weights: {name: tensor} of any dtype; versions only rise -> what the step log says of the
        upload"""
        new = {
            name: weights[name].detach().to("cpu", kind, copy=True)
            for name, kind in self.kinds.items()
        }
        base = self.count % self.every == 0
        data = fingerprint(new) + encode_delta(zeros(new) if base else self.sent, new)
        (self.folder / "part").write_bytes(data)
        (self.folder / "part").replace(self.folder / f"{version:08d}.{'base' if base else 'delta'}")
        same = sum(int((self.sent[name] == t).sum()) for name, t in new.items()) if self.sent else 0
        if base or not self.shared:
            # the last base and what followed stay for whoever is reading them
            for path in self.folder.iterdir():
                path.unlink() if int(path.stem) < (self.base if self.shared else version) else None
            self.base = version if base else self.base
        self.sent, self.count = new, self.count + 1
        return {
            "sync_bytes": len(data),
            "sync_full": sum(t.nbytes for t in new.values()),
            "sync_same": same / sum(t.numel() for t in new.values()),
        }


def pending(folder, version):
    """Names of the uploads that lead from `version` (-1: none yet) to the newest, in order; a newer
    base makes the rest needless."""
    names = sorted(
        name for name in os.listdir(folder) if name != "part" and int(name[:8]) > version
    )
    bases = [i for i, name in enumerate(names) if name.endswith("base")]
    return names[bases[-1] :] if bases else names


class Generator:
    """Samples groups with the newest weights in the folder: the inside of a generation process, or,
    with no workers, of the trainer itself. `options` are the Sampler's."""

    def __init__(
        self, folder, config, dtype, device, tokenizer, group, limits, compact=None, **options
    ):
        self.sampler = Sampler(
            generation_model(config, dtype, device), tokenizer, window=limits.window, **options
        )
        self.sampler.refresh, self.sampler.version = self.refresh, -1
        self.folder, self.group, self.limits, self.compact, self.sandbox = (
            folder,
            group,
            limits,
            compact,
            Sandbox(),
        )

    def refresh(self):
        """Take what is new. Sequences under way go on with the new weights and the entries that old
        ones left in the cache (ours: feeding them again would cost a prefill of everything)."""
        for name in pending(self.folder, self.sampler.version):
            data, held = Path(self.folder, name).read_bytes(), self.sampler.model.state_dict()
            new = apply_delta(zeros(held) if name.endswith("base") else held, data[16:])
            if fingerprint(new) != data[:16]:
                raise ValueError(f"{name}: what arrived are not the trainer's weights")
            self.sampler.model.load_state_dict(new)
            self.sampler.version = int(name[:8])

    def __call__(self, tasks, numbers, seed):
        self.refresh()
        return rollouts(
            self.sampler, tasks, self.group, seed, self.limits, self.sandbox, self.compact, numbers
        )


def end_with(trainer):
    """Ends this process as soon as the other end of a pipe is closed, be it in the middle of a job:
    nobody waits for its groups. What it leaves behind is removed when the next run begins."""
    with contextlib.suppress(EOFError, OSError):
        trainer.recv()
    os._exit(1)


def work(pipe, trainer, settings):
    """The life of a generation process: jobs in, groups out, until the trainer is gone. trainer:
    the end of a pipe on which nothing is ever sent."""
    threading.Thread(target=end_with, args=(trainer,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    # and then the workspaces are removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    torch.set_num_threads(1)
    generator = Generator(**settings)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(generator(*job))


class Workers:
    """n generation processes, or with n = 0 the same in this one, when the result is asked for.
    Each process is tended by a thread here. They are forked from a server that has no threads of
    its own: forking a trainer can copy a held lock."""

    def __init__(self, n, settings):
        self.n, self.settings, self.jobs, self.restarts, self.processes = (
            n,
            settings,
            queue.SimpleQueue(),
            0,
            {},
        )
        # of each process, the pipe that ends with this one
        self.lives = {}
        self.generator, self.closed = None if n else Generator(**settings), False
        self.context = multiprocessing.get_context("forkserver") if n else None
        if n:
            self.context.set_forkserver_preload(["fast.workers"])
            # The folder of the server's socket, too, has to go when this process is killed. There
            # is no public way to say where.
            settings_of_process = getattr(multiprocessing.current_process(), "_config", {})
            if "tempdir" not in settings_of_process:
                self.sockets = owned_directory("sockets", tempfile.gettempdir())
                # the path of a socket has 104 bytes
                if len(self.sockets.name) < 70:
                    settings_of_process["tempdir"] = self.sockets.name
        for i in range(n):
            threading.Thread(target=self.tend, args=(i,), daemon=True).start()
        atexit.register(self.close)

    def submit(self, tasks, numbers, seed):
        """Deal the tasks to the processes -> [(future, job)], for collect"""
        share = max(1, self.n)
        dealt = [(Future(), (tasks[i::share], numbers[i::share], seed)) for i in range(share)]
        for one in dealt if self.n else ():
            self.jobs.put(one)
        return dealt

    def collect(self, dealt):
        """-> groups, in the order of the tasks"""
        parts = [future.result() if self.n else self.generator(*job) for future, job in dealt]
        return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]

    def start(self, i):
        pipe, theirs = self.context.Pipe()
        # our end goes when this process does
        watched, self.lives[i] = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=work, args=(theirs, watched, self.settings), daemon=True
        )
        process.start()
        self.processes[i] = process
        # or its death would not be the end of the pipe
        theirs.close(), watched.close()
        return pipe

    def tend(self, i):
        """One job at a time. A process that dies is replaced and its job begun again: the same
        prompts and the same draws, since a rollout is a function of (seed, task number, j) and of
        the weights."""
        pipe = None
        while True:
            future, job = self.jobs.get()
            for _ in range(3):
                try:
                    pipe = pipe or self.start(i)
                    pipe.send(job)
                    future.set_result(pipe.recv())
                    break
                except (EOFError, OSError):
                    if self.closed:
                        return
                    self.restarts, pipe = self.restarts + 1, None
                # what cannot be sent or read is no reason to wait for ever
                except Exception as error:
                    future.set_exception(error)
                    break
            else:
                future.set_exception(
                    RuntimeError(
                        "a generation process died three times on the same tasks; its own words are above"
                    )
                )

    def close(self):
        self.closed = True
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.join(5)


def staleness(groups, version):
    """-> for every sampled token, how many updates older than `version` the policy was that sampled
    it"""
    turns = [
        turn
        for group in groups
        for chain in group
        for turn in chain.turns
        if turn.role == "assistant"
    ]
    return version - np.concatenate([np.zeros(0, dtype=int), *(turn.versions for turn in turns)])
