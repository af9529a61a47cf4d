"""hsdp.py: one model on many ranks, its weights cut twice: dense weights over narrow groups,
experts over a wide mesh.

Fully sharded data parallelism (FSDP) keeps a piece of every weight per rank and gathers a layer
just before it runs. Experts are most of the weights and need a wide cut to fit; the rest is small
and wants short trips inside a node. So the same ranks form two meshes, and since the two never meet
in one tensor, context parallelism (CP, a cut of the sequence, on the dense mesh) and expert
parallelism (EP, whole experts per rank, on the expert mesh) overlap on the same GPUs.

Stated by Cursor (cursor.com/blog/composer-2-5; Technical Report, arXiv 2603.24477): FSDP copies
with an all-reduce across them, dense weights in narrow groups, experts on a wider mesh; CP=2 with
EP=8 on 8 GPUs instead of 16; CP folded into the FSDP dimension, all-gather of the latents, zig-zag
chunks; 0.2 s per Muon step at 1T parameters. Ours: gradients are summed, never averaged;
checkpoints that appear by rename; the planner's hardware. Engine: PyTorch's DeviceMesh,
fully_shard, DTensor and DCP.

    dense mesh     (replicate, shard = dp_shard x cp)      W = replicate * shard
    expert mesh    (replicate', efsdp, ep)                 W = replicate' * efsdp * ep, over the same ranks
    loss           sum over ranks of  nll of my tokens / tokens of all ranks:  the gradients add up to one process's

Left out: overlap of the latents' gather with the query projection and of the token exchange with
the shared expert (their time is on the clock), random weights drawn in pieces (every rank draws the
model once; a published one is read in pieces).

Letters: W ranks, B batch, T time, C width of an entry, M rows (a token for one of its experts), D
model width, E experts, R rows.

    python hsdp.py                                            two grids on 8 ranks, bytes by layout, equality with one process
    python hsdp.py --plan --model=kimi-k2.5 --gpus=512        memory, bytes on the wire and optimizer step, three layouts
    python hsdp.py --plan --init_from=DIR --gpus=8            does a published checkpoint fit, and on what layout?
    torchrun --nnodes=64 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py --ep=8 --cp=2
"""

import argparse
import ctypes
import errno
import io
import json
import math
import os
import pickle
import shutil
import signal
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path, PurePath

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

# seconds a collective waits for a rank that is silent; one whose process ended is noticed at once
PATIENCE = 25
# renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ---------------------------------------------------------------- layout: arithmetic, shared with the planner


@dataclass(frozen=True)
class Layout:
    """How W ranks are cut, twice. Ranks are numbered row by row: neighbours in a mesh's last
    direction share a node."""

    world: int = 1
    cp: int = 1  # ranks that share one sequence
    ep: int = 1  # ranks that share one set of experts
    dp_replicate: int = 1  # copies of the dense weights
    expert_replicate: int = 1  # copies of the experts; 1 = the wide mesh, cut over all ranks

    def __post_init__(self):
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"{name}={size}: a mesh has at least one rank in every direction")
        for copies, other in (("dp_replicate", "cp"), ("expert_replicate", "ep")):
            if self.world % (getattr(self, copies) * getattr(self, other)):
                raise ValueError(
                    f"{copies}={getattr(self, copies)} x {other}={getattr(self, other)} does not divide "
                    f"the {self.world} ranks"
                )

    @property
    # dp_shard x cp, flattened: CP ranks hold different tokens of one loss, as all data ranks do
    def shard(self):
        return self.world // self.dp_replicate

    @property
    def efsdp(self):
        return self.world // (self.expert_replicate * self.ep)

    @property
    def data(self):  # different batches; the cp ranks of one group read the same batch
        return self.world // self.cp

    def check(self, shapes):
        """shapes: {name: shape}. Raises unless every expert stack (E, R, C) can be cut: E over ep,
        R over efsdp."""
        for name, (E, R, _) in ((n, s) for n, s in shapes.items() if is_expert(n)):
            if E % self.ep:
                raise ValueError(f"ep={self.ep} does not divide the {E} experts")
            if R % self.efsdp:
                raise ValueError(f"efsdp={self.efsdp} does not divide the {R} rows of {name}")


def is_expert(name):
    return ".experts." in name


@dataclass(frozen=True)
class Meshes:
    layout: Layout
    dense: DeviceMesh | None = None  # ([replicate,] shard)
    experts: DeviceMesh | None = None  # ([replicate,] efsdp [, ep])
    context: DeviceMesh | None = None  # (data, cp), where cp > 1

    @property
    def rank(self):
        return dist.get_rank() if self.dense is not None else 0

    @property
    def data_rank(self):  # which of layout.data batches this rank reads
        return self.rank // self.layout.cp


def make_meshes(
    world=1,
    cp=1,
    ep=1,
    dp_replicate=1,
    dp_shard=None,
    expert_replicate=1,
    device="cpu",
    seconds=PATIENCE,
):
    """Two meshes over the same ranks. Sizes that do not fit: ValueError on every rank, before any
    collective. world=1 needs no process group and makes no mesh. Give more seconds where a rank may
    be late for good reasons (compilation, long rollouts)."""
    layout = Layout(world, cp, ep, dp_replicate, expert_replicate)
    if dp_shard not in (None, layout.shard // cp):
        raise ValueError(
            f"dp_replicate={dp_replicate} x dp_shard={dp_shard} x cp={cp} is not the {world} ranks"
        )
    if world == 1:
        return Meshes(layout)
    ranks = dist.get_world_size() if dist.is_initialized() else 0
    if ranks != world:
        raise ValueError(f"world={world}, but the process group has {ranks} ranks")

    def mesh(keep, **sizes):  # a direction of one rank is no direction
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == keep}
        mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        # a new group forgets the default group's patience and takes half an hour
        for group in mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
        return mesh

    return Meshes(
        layout,
        mesh("shard", replicate=dp_replicate, shard=layout.shard),
        mesh("efsdp", replicate=expert_replicate, efsdp=layout.efsdp, ep=ep),
        mesh("cp", data=layout.data, cp=cp) if cp > 1 else None,
    )


# ---------------------------------------------------------------- context parallelism


def zigzag(length, cp, rank):
    """Positions of CP rank `rank` in a sequence: of 2*cp chunks, rank i takes i and 2*cp-1-i. Under
    a causal mask late chunks see more keys than early ones; the pair sees the same number on every
    rank."""
    if length % (2 * cp):
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut in 2 x cp={cp} equal chunks: pad it"
        )
    chunks = torch.arange(length).chunk(2 * cp)
    return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]))


def shard_sequence(t, meshes, dim=1):
    """This rank's part of t (B, T, ...), be it tokens, targets or masks: (B, T/cp, ...). cp=1: t
    itself."""
    cp = meshes.layout.cp
    return (
        t
        if cp == 1
        else t.index_select(dim, zigzag(t.shape[dim], cp, meshes.rank % cp).to(t.device))
    )


def positions(length, meshes, device="cpu"):
    """What model.forward wants as `positions`: (T/cp,), or None where the sequence is whole."""
    cp = meshes.layout.cp
    return None if cp == 1 else zigzag(length, cp, meshes.rank % cp).to(device)


class GatherSequence(torch.autograd.Function):
    """(B, T/cp, C) -> (B, T, C), rank by rank: the mask compares positions, so the order of the
    keys is free. Backward: every rank has used every entry, the gradients are summed on their way
    home."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group, n = group, group.size()
        # (cp*B, T/cp, C)
        parts = t.new_empty(n * t.shape[0], *t.shape[1:])
        all_gather(parts, t.contiguous(), group=group)
        return parts.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx, grad):
        parts = grad.unflatten(1, (ctx.group.size(), -1)).transpose(0, 1).flatten(0, 1).contiguous()
        mine = parts.new_empty(grad.shape[0], *parts.shape[1:])  # (B, T/cp, C)
        reduce_scatter(mine, parts, group=ctx.group)
        return mine, None


# ---------------------------------------------------------------- expert parallelism


class Exchange(torch.autograd.Function):
    """All-to-all of rows with uneven splits: send[r] rows go to rank r, receive[r] come from it.
    Backward: the way back."""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.way_back = (receive, send, group)
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.way_back), None, None, None


def dispatch(x, counts, run, group):
    """MoE.dispatch: x (M, D) sorted by global expert, counts (E,) -> each row through its expert,
    back in the same order. Rank r owns experts r*E/ep to (r+1)*E/ep, so rows sorted by expert are
    sorted by rank. A rank may get no row at all."""
    # (ep, E/ep) rows I send
    counts = counts.view(group.size(), -1)
    # (ep, E/ep) rows each rank sends me
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=group)
    # the one wait for the device
    send, receive = torch.stack((counts.sum(1), incoming.sum(1))).tolist()
    # by rank, then by expert
    rows = Exchange.apply(x, send, receive, group)
    expert = torch.arange(counts.numel(), device=x.device) % counts.shape[1]
    # by expert, then by rank
    order = expert.repeat_interleave(incoming.flatten()).argsort(stable=True)
    y = run(rows[order], incoming.sum(0))
    return Exchange.apply(y[order.argsort()], receive, send, group)


# ---------------------------------------------------------------- the model on the meshes


def parallelize(model, meshes, wire=None):
    """Cut `model` (equal on all ranks) over the meshes, in place, and return it. Parameters become
    DTensors, so make the optimizer afterwards. world=1 changes nothing.

    The caller's part: gradients are SUMMED over ranks, never averaged, so the loss of a rank is its
    share of the global mean:
        loss = nll_of_my_tokens.sum() / total(number_of_my_tokens);  loss.backward();  shown = total(loss.detach())
    That is one process's loss and gradient even when ranks hold different numbers of tokens
    (masks!), which an average of averages is not, and experts need no factor of their own. All
    ranks run equally many forwards and backwards per step: a rank with nothing to learn multiplies
    by zero.

    wire: dtype in which matrices are gathered. torch.bfloat16 when the model computes in it: same
    numbers, half the bytes. Norms, routers, embedding and head travel in fp32, and gradients are
    reduced in fp32."""
    if meshes.layout.world == 1:
        return model
    meshes.layout.check({n: p.shape for n, p in model.named_parameters()})
    same_weights(model)
    plain = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = replace(plain, param_dtype=wire)
    for block in [m for m in model.modules() if hasattr(m, "attn") and hasattr(m, "ffn")]:
        if meshes.layout.cp > 1:
            block.attn.gather = lambda t: GatherSequence.apply(t, meshes.context.get_group("cp"))
        if hasattr(block.ffn, "experts"):
            _cut_experts(block.ffn, meshes, policy)
        if wire:
            fully_shard(
                [m for n, m in block.named_modules() if n.endswith(("norm", "router"))],
                mesh=meshes.dense,
                mp_policy=plain,
            )
        fully_shard(block, mesh=meshes.dense, mp_policy=policy)
    fully_shard(model, mesh=meshes.dense, mp_policy=plain)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    return model


def _cut_experts(moe, meshes, policy):
    """Experts over ep (Shard(0): whole ones), then their rows over efsdp (Shard(1)): two cuts that
    never meet."""
    mesh = meshes.experts
    if meshes.layout.ep > 1:
        ep = mesh["ep"]
        for name, p in list(moe.experts.named_parameters()):
            mine = p.detach().chunk(ep.size())[ep.get_local_rank()].clone()
            moe.experts.register_parameter(
                name, torch.nn.Parameter(DTensor.from_local(mine, ep, [Shard(0)], run_check=False))
            )
        moe.dispatch = partial(dispatch, group=ep.get_group())
    fsdp = mesh[tuple(name for name in mesh.mesh_dim_names if name != "ep")]
    fully_shard(moe.experts, mesh=fsdp, shard_placement_fn=lambda p: Shard(1), mp_policy=policy)


def own_parts(model):
    """{name of a weight that is cut: a slice per dimension}, the stretch of the whole that this
    rank holds: what it has to read of a published checkpoint. The two cuts of an expert stack lie
    in different dimensions."""
    parts = {}
    for name, p in ((name, p) for name, p in model.named_parameters() if isinstance(p, DTensor)):
        part = [slice(0, n) for n in p.shape]
        for size, i, placement in zip(
            p.device_mesh.shape, p.device_mesh.get_coordinate(), p.placements
        ):
            if placement.is_shard():
                n = p.shape[placement.dim]
                part[placement.dim] = slice(*(min(n, j * -(-n // size)) for j in (i, i + 1)))
        parts[name] = tuple(part)
    return parts


def same_weights(model):
    """Every rank has built the model itself. With different seeds it would train on, each rank on
    its piece of another model. A model on the meta device has no weights yet."""
    if not dist.is_initialized() or next(model.parameters()).is_meta:
        return model
    low = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
    high = low.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN), dist.all_reduce(high, dist.ReduceOp.MAX)
    if high - low > 1e-6 * (1 + high.abs()):
        raise ValueError(
            "the ranks hold different weights: build the model with the same seed on every rank"
        )
    return model


# ---------------------------------------------------------------- what a step needs from all ranks


def connect(device="cpu", seconds=PATIENCE):
    """Join the ranks that torchrun started; without torchrun do nothing. -> (rank, world)"""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        if device == "cuda":
            check_cards()
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=seconds)
        )
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def check_cards():
    """Every process of a machine needs a GPU of its own. More processes than GPUs: ValueError on
    every rank, before any collective."""
    here, cards = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if here > cards:
        raise ValueError(
            f"{here} processes on a machine with {cards} GPU{'s' * (cards != 1)}: one each, so start "
            f"--nproc_per_node={cards}, or add --device=cpu"
        )


def die_with_parent(number):
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(1, number)


def tied_to_parent(number=getattr(signal, "SIGKILL", 9)):
    """The preexec_fn of a process that shall end when this one does: who waits for one that was
    killed would wait for half an hour. That is Linux's own. Elsewhere None, since running Python
    between fork and exec beside threads may hang."""
    return partial(die_with_parent, number) if sys.platform == "linux" else None


@contextmanager
def one_fate():
    """When a rank dies, the collectives of the others fail with a line about sockets. This says
    what happened instead."""
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized() or not any(
            sign in str(error) for sign in ("onnection", "imed out", "gloo", "NCCL")
        ):
            raise
        raise RuntimeError(
            f"rank {dist.get_rank()} of {dist.get_world_size()}: another rank died or stopped answering; "
            f"start again from the last checkpoint ({str(error).splitlines()[0][:100]})"
        ) from error


def total(t):
    """Sum of a tensor or number over all ranks: token counts, losses, the router's counts
    (balance(model, reduce=total)). CP ranks hold different tokens, so they count like any data
    rank."""
    t = torch.as_tensor(t).clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(t)
    return t


def keep_gradients_in_fp32(model):
    """The gradients of bf16 weights are kept in fp32 and add up there, over micro-batches: in bf16
    what is less than 1/256 of the sum so far would be lost. Call it once the parameters are in
    their place, before the first backward. fp32 weights: no change."""
    for p in model.parameters():
        if not p.requires_grad or p.dtype.itemsize >= 4:
            continue
        if not isinstance(p, DTensor):
            # autograd adds what comes in this dtype
            p.grad_dtype = torch.float32
            continue
        # FSDP sets the first gradient itself, in the weights' dtype, and adds the next ones to what
        # it finds there.
        p.grad_dtype = None  # any dtype may be set
        p.register_post_accumulate_grad_hook(_widen_gradient)


def _widen_gradient(p):
    if p.grad.dtype != torch.float32:
        p.grad = p.grad.float()


@torch.no_grad()
def sum_gradients(model):
    """Plain replicas (nothing is cut, every rank holds the whole model): all gradients in one
    all-reduce, once per step. Call it on all ranks before clip_grad_norm; parallelize() needs no
    such call."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        # One vector for all, and in fp32: the sum over the ranks is not rounded on its way.
        flat = torch.cat(
            [g.flatten().to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
        )
        dist.all_reduce(flat)
        for g, part in zip(grads, flat.split([g.numel() for g in grads])):
            g.copy_(part.view_as(g))


def clip_grad_norm(model, max_norm=math.inf):
    """Scale the gradient to at most max_norm; returns its norm before that, a 0-d tensor equal on
    all ranks. Both meshes in one all-reduce of one number: every shard adds its squares divided by
    its number of copies."""
    _release(model)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not grads:
        return torch.zeros(())
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    # All gradients at once: a few kernels instead of several for each of them.
    norms = torch.stack(torch._foreach_norm(local, 2, torch.float64))
    copies = torch.tensor([float(_copies(g)) for g in grads]).to(norms, non_blocking=True)
    square = (norms**2 / copies).sum()
    norm = (total(square) if any(isinstance(g, DTensor) for g in grads) else square).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    for dtype in {l.dtype for l in local}:
        torch._foreach_mul_([l for l in local if l.dtype == dtype], scale.to(dtype))
    return norm.float()


def _release(model):
    """A forward without backward (an evaluation) leaves embedding, norm and head gathered. What is
    gathered before an update would be used after it, so let go of it before weights change and
    before they are read."""
    if isinstance(model, FSDPModule):
        model.reshard()


def _copies(t):
    mesh = zip(t.device_mesh.shape, t.placements) if isinstance(t, DTensor) else ()
    return math.prod(size for size, placement in mesh if placement.is_replicate())


@torch.no_grad()
def full_state(model):
    """{name: whole plain tensor, a copy} on every rank, buffers included, for the generation
    weights: Model(config).load_state_dict(full_state(model)). All ranks must call it."""
    _release(model)
    return {
        n: t.full_tensor() if isinstance(t, DTensor) else t.detach().clone()
        for n, t in model.state_dict().items()
    }


# ---------------------------------------------------------------- checkpoints: from any layout to any layout


class SaveFailed(OSError):
    """A checkpoint or a log could not be written. The message is one line; what was saved before is
    whole."""


class DamagedCheckpoint(ValueError):
    """A checkpoint that is incomplete, damaged or not safe to read. The message is one line."""


def save(directory, model, optimizer=None, extra=None, more=None):
    """Write weights, optimizer state (by parameter name), `more` (named tensors, cut as the weights
    are: a teacher's) and `extra` (plain data, equal on all ranks: configuration, tokenizer, step)
    to a folder all ranks see. It takes its name, and the place of the one before, only when every
    file is complete. A full disk: SaveFailed on every rank, and the one before stays. Call it when
    router loads are zero, right after balance(): they are counts of one rank, and only one rank's
    are kept."""
    target, part, old = (Path(f"{directory}{end}") for end in ("", ".part", ".old"))
    rank = dist.get_rank() if dist.is_initialized() else 0
    with _one_fate_of_a_save(directory, part):
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
    with _one_fate_of_a_save(directory, part):
        # Without copies ahead: with them, the writer asks CUDA for a stream even where all tensors
        # are on the CPU.
        writer = dcp.FileSystemWriter(part, per_thread_copy_ahead=0)
        _dcp(dcp.save, _contents(model, optimizer) | (more or {}), storage_writer=writer)
    with _one_fate_of_a_save(directory, part):
        # Every rank reads again what it has written itself, so that the checksums take no longer
        # with more ranks.
        mine = {path.name: describe_file(path) for path in sorted(part.glob(f"__{rank}_*.distcp"))}
    manifest = {name: entry for entries in _from_all_ranks(mine) for name, entry in entries.items()}
    with _one_fate_of_a_save(directory, part):
        if rank == 0:
            # To memory first: torch's own writer says nothing of a full disk that a reader would
            # understand.
            data = io.BytesIO()
            torch.save(extra or {}, data)
            write_synced(part / "extra.pt", data.getbuffer())
            for path in part.iterdir():
                if path.name not in manifest:
                    manifest[path.name] = describe_file(path)
            write_synced(part / "manifest.json", json.dumps(manifest).encode())
            # two renames: between them the good one is .old, a name that load() knows
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            part.rename(target)
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _one_fate_of_a_save(directory, part):
    """One step of a save: it ends on every rank alike, with nothing or with SaveFailed, and then
    the space is given back."""
    problem = ""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        problem = explain_write_error(error)
    problems = [p for p in _from_all_ranks(problem) if p]
    if problems:
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise SaveFailed(
            f"{directory}: this checkpoint could not be saved: {problems[0]}; what was saved before is whole"
        )


def explain_write_error(error):
    """What went wrong while something was written, in one line. error: an OSError, or torch's with
    one rank's failure in it"""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip() or type(error).__name__
    # torch's zip writer turns whatever the disk said into a RuntimeError about positions.
    signs = "No space left", "PytorchStreamWriter", "inline_container"
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(
        sign in text for sign in signs
    ):
        return "the disk is full"
    return getattr(error, "strerror", None) or text.splitlines()[0][:200]


def describe_file(path):
    """-> {"bytes": size, "crc32": checksum in hexadecimal}"""
    size, checksum = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def write_synced(path, data):
    """Write bytes and wait until they are on the disk: a rename that outlives a power cut must not
    name an empty file."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def load(directory, model, optimizer=None, more=None):
    """Read a checkpoint into model, optimizer and `more`, in place, whatever the two layouts. ->
    extra. A folder that is missing, damaged or of another model: ValueError on every rank, before
    anything is loaded."""
    folder, manifest = _whole(directory)
    _check_sums(directory, folder, manifest)
    reader = CheckpointReader(folder, manifest)
    stored, tensors = reader.read_metadata().state_dict_metadata, _contents(model, optimizer) | (
        more or {}
    )
    for name in sorted(
        {n for n in stored if optimizer is not None or n.startswith("model.")} | tensors.keys()
    ):
        there = tuple(stored[name].size) if name in stored else "missing"
        here = tuple(tensors[name].shape) if name in tensors else "missing"
        if there != here:
            raise ValueError(
                f"{directory}: {name} is {there} there and {here} here: not one of this model and optimizer"
            )
    extra = peek(directory)
    try:
        _dcp(dcp.load, tensors, storage_reader=reader)
    # of an older version, without checksums
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise DamagedCheckpoint(
            f"{directory}: the weights cannot be read ({type(cause).__name__}): "
            f"the checkpoint is damaged"
        ) from None
    return extra


def exists(directory):
    """Is there a checkpoint? A save that ended between its two renames left the one before it as
    .old."""
    return Path(directory).exists() or Path(f"{directory}.old").exists()


def peek(directory):
    """The `extra` of a checkpoint: the configuration is in it, so that the model can be built
    before it is loaded."""
    folder, manifest = _whole(directory)
    try:
        _check_sum(directory, folder, "extra.pt", manifest)
        return torch.load(folder / "extra.pt", weights_only=True)
    except DamagedCheckpoint:
        raise
    # whatever unpickling damaged bytes may raise
    except Exception as error:
        raise DamagedCheckpoint(
            f"{directory}: extra.pt cannot be read ({type(error).__name__}): the checkpoint is damaged"
        ) from None


def _whole(directory):
    """-> the folder, and {file: {"bytes": size, "crc32": checksum}}; an older manifest has sizes
    alone and no checksums"""
    folder = Path(directory) if Path(directory).exists() else Path(f"{directory}.old")
    try:
        raw = json.loads((folder / "manifest.json").read_text())
        manifest = {
            name: entry if isinstance(entry, dict) else {"bytes": entry}
            for name, entry in raw.items()
        }
        assert manifest and all(type(entry["bytes"]) is int for entry in manifest.values())
    except (OSError, ValueError, AssertionError, AttributeError, KeyError, RecursionError):
        raise DamagedCheckpoint(
            f"{directory}: not a complete checkpoint (no readable manifest.json)"
        ) from None
    for name, entry in manifest.items():
        # Nothing outside the folder is part of a checkpoint, whatever a manifest says.
        if not name or name != Path(name).name or "\\" in name or "\0" in name or name == "..":
            raise DamagedCheckpoint(
                f"{directory}: manifest.json names {name!r}, which is no file of this folder: not to be trusted"
            )
        size, path = entry["bytes"], folder / name
        there = path.stat().st_size if path.is_file() else 0
        if there != size:
            raise DamagedCheckpoint(
                f"{directory}: {name} has {there} of {size} bytes: the checkpoint is damaged"
            )
    for name in (".metadata", "extra.pt"):
        if name not in manifest:
            raise DamagedCheckpoint(
                f"{directory}: manifest.json does not name {name}: not a complete checkpoint"
            )
    return folder, manifest


def _check_sum(directory, folder, name, manifest):
    if "crc32" in manifest[name] and describe_file(folder / name) != manifest[name]:
        raise DamagedCheckpoint(
            f"{directory}: {name} holds other bytes than were written (checksum): the checkpoint is damaged"
        )


def _check_sums(directory, folder, manifest):
    """Every byte of a checkpoint is as it was written, or DamagedCheckpoint on every rank. Each
    rank reads its share of the files."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    problem = ""
    try:
        for name in sorted(manifest)[rank::world]:
            _check_sum(directory, folder, name, manifest)
    except DamagedCheckpoint as error:
        problem = str(error)
    except OSError as error:
        problem = f"{directory}: cannot be read: {error.strerror}"
    problems = [p for p in _from_all_ranks(problem) if p]
    if problems:
        raise DamagedCheckpoint(problems[0])


class CheckpointReader(dcp.FileSystemReader):
    """torch's reader, which trusts .metadata: that is a pickle, and one that a stranger made can
    run any program. Here nothing but the classes that describe tensors can come out of it, and no
    file is read that the manifest does not name."""

    def __init__(self, folder, manifest):
        super().__init__(folder)
        self.folder, self.manifest = folder, manifest

    def read_metadata(self, *args, **kwargs):
        try:
            with open(self.folder / ".metadata", "rb") as file:
                metadata = MetadataUnpickler(file).load()
            self.check(metadata)
        except pickle.UnpicklingError as error:
            raise DamagedCheckpoint(
                f"{self.folder}: .metadata cannot be read ({error}): damaged, or not to be trusted"
            ) from None
        # whatever unpickling damaged bytes may raise
        except Exception as error:
            raise DamagedCheckpoint(
                f"{self.folder}: .metadata cannot be read ({type(error).__name__}): "
                f"the checkpoint is damaged"
            ) from None
        metadata.storage_meta = dcp.metadata.StorageMeta(load_id=self.load_id)
        return metadata

    def check(self, metadata):
        """It describes tensors, by name, in files of this checkpoint."""
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        for name, tensor in tensors.items():
            if type(name) is not str or type(tensor) is not dcp.metadata.TensorStorageMetadata:
                raise pickle.UnpicklingError("it describes something that is no tensor")
        for place in places.values():
            if place.relative_path not in self.manifest or getattr(
                place, "transform_descriptors", None
            ):
                raise pickle.UnpicklingError("it names a file that is not in manifest.json")


class MetadataUnpickler(pickle.Unpickler):
    """Makes what torch.distributed.checkpoint (2.11 to 2.13) writes into .metadata for tensors, and
    refuses all other names."""

    ALLOWED = {
        ("torch.distributed.checkpoint.metadata", name): getattr(dcp.metadata, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    }
    ALLOWED["torch.distributed.checkpoint.filesystem", "_StorageInfo"] = dcp.filesystem._StorageInfo
    ALLOWED["torch.serialization", "_get_layout"] = torch.serialization._get_layout
    ALLOWED["torch", "Size"] = torch.Size
    # The path under which it was saved, of any system and Python: read as a path without a disk
    # behind it.
    ALLOWED |= {
        (module, name): PurePath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    }

    def find_class(self, module, name):
        if (module, name) in self.ALLOWED:
            return self.ALLOWED[module, name]
        if (
            module == "torch"
            and "." not in name
            and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _contents(model, optimizer):
    """{name: tensor} of what this rank holds, DTensors where cut: weights, buffers, optimizer state
    by parameter name. The state must be there before the first step, as muon.py makes it: loading
    fills tensors in place, each in its layout."""
    _release(model)
    tensors = {f"model.{n}": t.detach() for n, t in model.state_dict().items()}
    for name, p in model.named_parameters() if optimizer is not None else ():
        tensors |= {f"optimizer.{name}/{key}": t for key, t in optimizer.state[p].items()}
    return tensors


def _dcp(verb, tensors, **where):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        verb(tensors, no_dist=not dist.is_initialized(), **where)


def _from_all_ranks(item):
    """The items of all ranks, on every rank; also what makes them wait for each other."""
    if not dist.is_initialized():
        return [item]
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


# ---------------------------------------------------------------- planner: what a step costs, from shapes alone

# fields of moe.ModelConfig: the published ones from their config.json, the others as train.py's
# scales
MODELS = {
    "kimi-k2.5": dict(
        vocab=163840,
        dim=7168,
        layers=61,
        heads=64,
        q_lora=1536,
        kv_lora=512,
        qk_nope=128,
        qk_rope=64,
        v_dim=128,
        dense_ffn=18432,
        experts=384,
        active=8,
        expert_ffn=2048,
    ),
    "moonlight": dict(
        vocab=163840,
        dim=2048,
        layers=27,
        heads=16,
        kv_lora=512,
        qk_nope=128,
        qk_rope=64,
        v_dim=128,
        dense_ffn=11264,
        experts=64,
        active=6,
        shared=2,
        expert_ffn=1408,
    ),
    "gpu": dict(
        vocab=8192,
        dim=640,
        layers=10,
        heads=10,
        kv_lora=256,
        qk_nope=64,
        qk_rope=32,
        v_dim=64,
        dense_ffn=2048,
        experts=8,
        expert_ffn=512,
    ),
    "laptop": dict(vocab=1024),
}


@dataclass(frozen=True)
class Hardware:
    """tflops, share and hbm were measured on one H100 of 80 GB (torch 2.11, 2026-11-26): a product
    of two 8192 x 8192 matrices, the products of Newton-Schulz at 359M parameters (45 % at 67M), a
    copy. link and net are data sheets' figures, not measured."""

    node: int = 8  # GPUs that share the fast link
    memory: float = 80  # GB per GPU
    tflops: float = 736  # dense bf16
    share: float = 0.83  # of it that Newton-Schulz reaches
    hbm: float = 2950  # GB/s, read and written
    link: float = 450  # GB/s per GPU inside a node
    net: float = 50  # GB/s per GPU between nodes


@dataclass(frozen=True)
class Step:
    tokens: int = 8192  # per GPU
    weight: int = 2  # bytes per number on the wire: matrices
    act: int = 2  # activations and their gradients
    unit: int = 2  # Muon's units
    # bytes per number of weights as they are kept (2: train.py --weights=bfloat16)
    kept: int = 4


def is_muon(name, shape):
    return len(shape) > 1 and not name.startswith(("embed", "head")) and ".router." not in name


def layer_of(name):
    return name.split(".")[1] if name.startswith("layers.") else "root"


def gathered(name, shape, layout):
    """Numbers of one parameter when FSDP has gathered it: padded in the direction it cuts; experts:
    those of one ep rank."""
    if is_expert(name):
        return math.prod(shape) // layout.ep
    return -(-shape[0] // layout.shard) * layout.shard * math.prod(shape[1:])


def held(name, shape, layout):
    return gathered(name, shape, layout) / (layout.efsdp if is_expert(name) else layout.shard)


def wire_bytes(name, step):
    """Per number, all gathers of one step: the root once (it stays), a layer for the forward and
    for the backward."""
    whole = layer_of(name) == "root"
    return (
        step.kept
        if whole
        else 2 * (step.kept if name.endswith(("norm.weight", "router.weight")) else step.weight)
    )


def traffic(config, shapes, layout, step):
    """[(collective, what, bytes one rank receives per step, ranks that a group spans)]. A ring
    passes (n-1)/n of what it gathers or scatters, an all-reduce does both. Tokens: there and back,
    twice; (ep-1)/ep of the rows live elsewhere."""
    rows, ring, W = [], lambda n: (n - 1) / n, layout.world
    for what, n, copies, span in (
        ("dense", layout.shard, layout.dp_replicate, layout.shard),
        ("experts", layout.efsdp, layout.expert_replicate, layout.efsdp * layout.ep),
    ):
        mine = {
            name: gathered(name, s, layout)
            for name, s in shapes.items()
            if is_expert(name) == (what == "experts")
        }
        weights, gradients = sum(
            wire_bytes(name, step) * size for name, size in mine.items()
        ), 4 * sum(mine.values())
        rows += [
            ("all-gather", f"{what} weights", ring(n) * weights, span),
            ("reduce-scatter", f"{what} gradients", ring(n) * gradients, span),
            ("all-reduce", f"{what} gradients of copies", 2 * ring(copies) * gradients / n, W),
        ]
    entry = config.entry_width
    latents, moe = (
        layout.cp - 1
    ) * config.layers * step.tokens * entry * step.act, config.layers - config.dense_layers
    tokens = (
        moe
        * ring(layout.ep)
        * (4 * step.tokens * config.active * config.dim * step.act + 8 * config.experts)
    )
    return rows + [
        ("all-gather", "latents (cp)", latents, layout.cp),
        ("reduce-scatter", "latents (cp)", latents, layout.cp),
        ("all-to-all", "tokens (ep)", tokens, layout.ep),
        ("all-to-all", "Muon units", step.unit * muon_numbers(shapes, layout) / W, W),
    ]


def muon_numbers(shapes, layout):
    """Numbers that all ranks together receive for Muon. A unit cut over ranks travels to one owner,
    who answers its k copies; the owner has k/W of it already, on average. A unit that is whole on a
    rank stays, and only its other copies hear of it."""
    numbers = 0
    for name, shape in ((n, s) for n, s in shapes.items() if is_muon(n, s)):
        k, cut = (
            (layout.expert_replicate, layout.efsdp)
            if is_expert(name)
            else (layout.dp_replicate, layout.shard if len(shape) == 2 else 1)
        )
        numbers += math.prod(shape) * (k - 1 if cut == 1 else 1 + k - 2 * k / layout.world)
    return numbers


def optimizer_step(shapes, layout, step, hardware):
    """Seconds per GPU of one Muon step: Newton-Schulz (five times X X^T, its square, one product
    with X), units on the wire, and reading weight, gradient, momentum, unit and writing weight,
    momentum, unit."""
    flops = 0
    for m, n, stack in (
        (*sorted(s[-2:]), math.prod(s[:-2])) for name, s in shapes.items() if is_muon(name, s)
    ):
        flops += 5 * stack * (4 * m * m * n + 2 * m**3)
    speed = hardware.link if layout.world <= hardware.node else hardware.net
    return {
        "Newton-Schulz": flops / layout.world / (hardware.tflops * 1e12 * hardware.share),
        "units on the wire": step.unit
        * muon_numbers(shapes, layout)
        / layout.world
        / (speed * 1e9),
        "elementwise": 24
        * sum(held(n, s, layout) for n, s in shapes.items())
        / (hardware.hbm * 1e9),
    }


def memory(config, shapes, layout, step, recompute=False):
    """{kind: bytes on one GPU}. Optimizer state is fp32. Gathered: the root and one layer with
    their gradients, and the next layer."""
    kinds, layers, c = Counter(), Counter(), config
    for name, shape in shapes.items():
        what, size = "expert" if is_expert(name) else "dense", held(name, shape, layout)
        kinds[f"{what} weights"] += step.kept * size
        # in fp32: see keep_gradients_in_fp32
        kinds[f"{what} gradients"] += 4 * size
        kinds[f"{what} optimizer"] += (4 if is_muon(name, shape) else 8) * size
        layers[layer_of(name)] += gathered(name, shape, layout)
    if layout.world > 1:
        kinds["gathered for now"] = 2 * step.kept * layers.pop("root") + (
            4 + 3 * step.weight
        ) * max(layers.values())
    heads = c.heads * (
        (c.qk_nope + c.qk_rope) + c.v_dim + layout.cp * (c.qk_nope + c.qk_rope + c.v_dim)
    )
    layer = lambda ffn: 4 * c.dim + step.act * (2 * c.dim + heads + ffn)
    dense, moe = layer(2 * c.dim + 4 * c.dense_ffn), layer(
        (c.active + c.shared) * (2 * c.dim + 4 * c.expert_ffn)
    )
    each = [dense] * c.dense_layers + [moe] * (c.layers - c.dense_layers)
    # fast.cpu_kernels.TargetLogprobs: a stretch of rows at a time
    scores = 8 * min(step.tokens * c.vocab, 1 << 26)
    kinds["activations (estimate)"] = (
        step.tokens * ((max if recompute else sum)(each) + 4 * c.dim * c.layers) + scores
    )
    return kinds


def largest_micro_batch(config, shapes, gigabytes, most, share=0.6):
    """The largest number of tokens, `most` halved as often as needed, that one GPU of so many
    gigabytes trains at a time by the plan. -> (tokens, planned gigabytes), or (0, planned) if not
    even 1,024 fit. share: of the GPU's memory; the rest is for what the plan does not know
    (temporary results, fragments, the sampler's cache in RL).

    Planned for train.py's gpu scale (109.5M parameters, not measured on the cards named): 32,768
    tokens take 13.0 GB and fit 24, 40, 80 and 141 GB; 65,536 take 24.1 GB and fit 80 and 141; 16 GB
    carry 16,384 (7.5 GB), 8 GB 8,192 (4.7 GB)."""
    tokens = most
    while True:
        planned = sum(memory(config, shapes, Layout(), Step(tokens=tokens)).values()) / 1e9
        if planned <= share * gigabytes:
            return tokens, planned
        if tokens < 2048:
            return 0, planned
        tokens //= 2


def parameter_shapes(name, folder=""):
    """A named model, or that of a published folder, on the meta device. -> (ModelConfig,
    {parameter: shape})"""
    from moe import ModelConfig
    from published.families import read_config

    if not folder and name not in MODELS:
        raise ValueError(f"unknown model {name!r}: {', '.join(MODELS)}")
    config = read_config(Path(folder, "config.json"))[0] if folder else ModelConfig(**MODELS[name])
    with torch.device("meta"):
        return config, {n: tuple(p.shape) for n, p in config.build_model().named_parameters()}


def plan(name, folder, gpus, cp, ep, step, hardware):
    """Print what one model costs per GPU in three layouts, and the command of the first that fits.
    Copies of a narrow group span one node. cp and ep, where not given: 2 and 8; for a published
    folder 1, and as many as experts, GPUs and a node have in common."""
    config, shapes = parameter_shapes(name, folder)
    name, experts = folder or name, config.experts if any(map(is_expert, shapes)) else 1
    cp = (1 if folder else 2) if cp is None else cp
    ep = (math.gcd(gpus, experts, hardware.node) if folder else 8) if ep is None else ep
    h, nodes, giga = hardware, max(gpus // hardware.node, 1), lambda v: f"{v / 1e9:,.4g}"
    layouts = {
        "all narrow": Layout(gpus, cp, ep, nodes, max(gpus // max(h.node, ep), 1)),
        "dense narrow, experts wide": Layout(gpus, cp, ep, nodes),
        "all wide": Layout(gpus, cp, ep),
    }
    table = [("", list(layouts))]
    for l in layouts.values():
        l.check(shapes)
    row = lambda what, values: table.append((what, list(values)))
    row("dense mesh (replicate, shard)", (str((l.dp_replicate, l.shard)) for l in layouts.values()))
    row(
        "expert mesh (replicate, efsdp, ep)",
        (str((l.expert_replicate, l.efsdp, l.ep)) for l in layouts.values()),
    )
    kinds, flows, times = (
        [f(l) for l in layouts.values()]
        for f in (
            lambda l: memory(config, shapes, l, step),
            lambda l: traffic(config, shapes, l, step),
            lambda l: optimizer_step(shapes, l, step, h),
        )
    )
    row("GB of memory per GPU", [""] * 3)
    for what in kinds[0]:
        row(f"  {what}", (giga(k[what]) for k in kinds))
    fits = []
    for what, again in (("  total", False), ("  total, if blocks are recomputed", True)):
        sums = [sum(memory(config, shapes, l, step, again).values()) for l in layouts.values()]
        fits += [
            (l, again)
            for l, v in zip(layouts.values(), sums)
            if v <= 1e9 * h.memory and l.expert_replicate == 1
        ]
        row(what, (giga(v) + (" fits" if v <= 1e9 * h.memory else " does not fit") for v in sums))
    row("GB received per GPU and step", [""] * 3)
    for rows in zip(*flows):
        row(f"  {rows[0][0]:15s}{rows[0][1]}", (giga(r[2]) for r in rows))
    seconds = lambda flow: sum(
        size / 1e9 / (h.link if span <= h.node else h.net) for *_, size, span in flow
    )
    row("  seconds, if nothing overlaps", (f"{seconds(flow):.3g}" for flow in flows))
    row("seconds of one Muon step", [""] * 3)
    for what in times[0]:
        row(f"  {what}", (f"{t[what]:.3g}" for t in times))
    row(
        "  predicted (wire behind Newton-Schulz)",
        (f"{max(list(t.values())[:2]) + t['elementwise']:.3g}" for t in times),
    )
    numbers, experts = (
        sum(math.prod(s) for n, s in shapes.items() if is_expert(n) >= least)
        for least in (False, True)
    )
    print(
        f"{name}: {numbers / 1e9:,.4g}B parameters, {experts / numbers:.0%} of them experts; {gpus} GPUs, cp={cp}, ep={ep}"
    )
    print(
        "assumed (flags): " + " ".join(f"--{k}={v:g}" for k, v in {**vars(step), **vars(h)}.items())
    )
    print("\n".join(f"{what:42s}" + "".join(f"{v:>28s}" for v in values) for what, values in table))
    if fits:
        (l, again), origin = fits[0], (
            f"--scale={name}"
            if name in ("gpu", "laptop")
            else f"--init_from={folder or 'DIR'} --stage=sft"
        )
        print(
            f"fits: torchrun --nnodes={-(-gpus // h.node)} --nproc_per_node={min(gpus, h.node)} train.py {origin} --cp={cp} --ep={ep} "
            f"--dp_replicate={l.dp_replicate} --micro_tokens={step.tokens}"
            + " --recompute" * again
            + " --weights=bfloat16" * (step.kept == 2)
        )
    else:
        print(
            f"fits in none of these layouts on {gpus} GPUs of {h.memory:g} GB: more GPUs, or fewer --tokens at a time"
        )
    print("Cursor states 0.2 s for its 1T model, and neither its hardware nor its number of GPUs.")
    print(
        f"cp={cp} and ep={ep} as directions of one shared mesh need {cp * ep} GPUs; on two meshes {math.lcm(cp, ep)}."
    )


# ---------------------------------------------------------------- demo


class Wire(TorchDispatchMode):
    """`with Wire() as wire`: wire.bytes are the bytes this rank receives, by collective, whoever
    calls it."""

    KINDS = {
        "_allgather_base_": "all-gather",
        "_reduce_scatter_base_": "reduce-scatter",
        "allreduce_": "all-reduce",
        "alltoall_base_": "all-to-all",
    }

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it comes back as plain tensors
        kind = self.KINDS.get(op._schema.name.removeprefix("c10d::"))
        if kind:
            self.bytes[kind] += self.received(kind, args)
        return op(*args, **(kwargs or {}))

    def received(self, kind, args):
        group = dist.ProcessGroup.unbox(args[1 if kind == "all-reduce" else 2])
        ring = (group.size() - 1) / group.size()
        if kind == "all-reduce":
            return 2 * ring * sum(t.nbytes for t in args[0])
        if kind == "all-to-all" and args[3]:
            return args[0].nbytes - args[3][group.rank()] * args[0].nbytes // max(len(args[0]), 1)
        return ring * args[kind == "reduce-scatter"].nbytes


def small_model():
    from moe import Model, ModelConfig

    torch.manual_seed(0)
    model = Model(
        ModelConfig(
            vocab=64,
            dim=32,
            layers=2,
            kv_lora=16,
            qk_nope=8,
            qk_rope=8,
            v_dim=8,
            dense_ffn=64,
            expert_ffn=16,
        )
    )
    for p in model.parameters():
        if not p.any():
            # a matrix that starts at zero hides the gradients behind it
            torch.nn.init.normal_(p, std=0.05)
    return model


def forward_backward(model, meshes, seed=1):
    """This rank's share of one batch of 8 x 64 tokens, as a training loop does it. -> loss over all
    ranks"""
    rows = torch.randint(0, 64, (8, 65), generator=torch.Generator().manual_seed(seed))
    mine = rows.chunk(meshes.layout.data)[meshes.data_rank]
    tokens, targets = shard_sequence(mine[:, :-1], meshes), shard_sequence(mine[:, 1:], meshes)
    logits = model.logits(model(tokens, positions(64, meshes)))
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    loss = nll / total(targets.numel())
    loss.backward()
    return float(total(loss.detach()))


def difference(model, grads):
    """Worst gradient entry, relative to the largest of its tensor."""
    return max(
        float((grads[n] - p.grad).abs().max() / p.grad.abs().max())
        for n, p in model.named_parameters()
    )


def _demo_rank(rank, folder, layouts):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 8), rank=rank, world_size=8
    )
    found = []
    for layout in layouts:
        meshes = make_meshes(**vars(layout))
        model = parallelize(small_model(), meshes)
        with Wire() as wire:
            loss = forward_backward(model, meshes)
        grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        counted = {kind: float(total(float(wire.bytes[kind]))) / 8 for kind in Wire.KINDS.values()}
        found.append((loss, grads, counted))
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.barrier()


def draw(layouts, path):
    """The same ranks on two meshes, side by side: equal colours hold equal weights."""
    # before the import: a notebook exports its own to what it starts
    os.environ["MPLBACKEND"] = "agg"
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(layouts), 2, figsize=(12, 2 * len(layouts)), squeeze=False)
    for l, pair in zip(layouts, axes):
        for axis, rows, pieces, label, title in (
            (
                pair[0],
                l.dp_replicate,
                l.shard,
                lambda r: f"rank {r}\npiece {r % l.shard}\nbatch {r // l.cp}.{r % l.cp}",
                f"dense weights: {l.dp_replicate} x {l.shard} pieces, cp={l.cp}",
            ),
            (
                pair[1],
                l.efsdp,
                l.world,
                lambda r: f"rank {r}\nexperts {r % l.ep}\npiece {r // l.ep % l.efsdp}",
                f"experts: {l.ep} groups (ep) x {l.efsdp} pieces (efsdp)",
            ),
        ):
            columns = l.world // rows
            axis.imshow(
                [[(r * columns + c) % pieces for c in range(columns)] for r in range(rows)],
                cmap="Set3",
                vmin=0,
                vmax=11,
                aspect="auto",
                extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
            )
            axis.hlines([r + 0.5 for r in range(rows - 1)], -0.5, columns - 0.5, color="white")
            for r in range(l.world):
                axis.text(r % columns, r // columns, label(r), ha="center", va="center", fontsize=7)
            axis.set(title=title, xticks=[], yticks=[])
    figure.suptitle(
        "Which rank holds which weights: the same 8 ranks on two meshes; equal colours are copies  (python hsdp.py)"
    )
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def demo(path="out/hsdp.png"):
    import torch._dynamo  # noqa: F401  FSDP imports it: once here, not in every child
    import torch.multiprocessing as mp

    if sys.platform != "linux":  # macOS may hang where a process that has threads is forked
        print(
            "hsdp.py: the demonstration forks eight ranks, which is safe on Linux only; the functions work under torchrun",
            file=sys.stderr,
        )
        sys.exit(2)
    # Eight forked ranks on the CPU. Once a process has seen a GPU, a backward starts autograd's
    # device threads, and a child that is forked afterwards cannot run one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    layouts = [Layout(8, cp=2, ep=8), Layout(8, cp=2, ep=4, dp_replicate=2)]
    model, worst = small_model(), 0.0
    loss, shapes = forward_backward(model, make_meshes()), {
        n: tuple(p.shape) for n, p in model.named_parameters()
    }
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with tempfile.TemporaryDirectory() as folder:
        # Joining raises the first traceback of a rank that failed, at once.
        mp.start_processes(_demo_rank, (folder, layouts), nprocs=8, start_method="fork")
        found = torch.load(f"{folder}/found", weights_only=True)
    for l, (there, grads, counted) in zip(layouts, found):
        print(f"cp={l.cp}, ep={l.ep}, dp_replicate={l.dp_replicate}")
        for what, of in (
            ("rank", lambda r: r),
            ("batch . part", lambda r: f"{r // l.cp}.{r % l.cp}"),
            ("dense copy . piece", lambda r: f"{r // l.shard}.{r % l.shard}"),
            ("experts . piece", lambda r: f"{r % l.ep}.{r // l.ep % l.efsdp}"),
        ):
            print(f"  {what:20s}" + "".join(f"{of(r):>6}" for r in range(l.world)))
        planned = Counter()
        for kind, what, size, _ in traffic(
            model.config, shapes, l, Step(tokens=64, weight=4, act=4)
        ):
            planned[kind] += size * (what != "Muon units")
        print(
            "  bytes per rank: "
            + ", ".join(f"{k} {v:,.0f} (planned {planned[k]:,.0f})" for k, v in counted.items())
        )
        error = difference(model, grads)
        print(
            f"  loss {there:.6f}, one process {loss:.6f}; gradients differ by at most {error:.1e} of a tensor's largest\n"
        )
        worst = max(worst, error, abs(there - loss))
    draw(layouts, path)
    print(
        f"{path} shows the grids. Seen: CP=2 and EP=8 share 8 ranks and compute what one process computes, to {worst:.0e}."
    )


def main(argv):
    def refuse(message):
        raise ValueError(message)

    parser = argparse.ArgumentParser(
        description="a demo, or a plan for a model and a cluster", allow_abbrev=False
    )
    parser.error = refuse
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--model", default="kimi-k2.5", help=", ".join(MODELS))
    parser.add_argument(
        "--init_from",
        default="",
        help="plan for the published checkpoint in this folder; only its config.json is read",
    )
    for name, default in dict(gpus=512, cp=None, ep=None).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for field in (*fields(Step), *fields(Hardware)):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    given = parser.parse_args(argv)
    if argv and not given.plan:
        raise ValueError(
            f"{' '.join(argv)}: the demo takes no flags, those of a plan go with --plan"
        )
    step, hardware = (
        kind(**{f.name: getattr(given, f.name) for f in fields(kind)}) for kind in (Step, Hardware)
    )
    if min(vars(step).values()) <= 0 or min(vars(hardware).values()) <= 0:
        raise ValueError("every assumption must be positive")
    (
        plan(given.model, given.init_from, given.gpus, given.cp, given.ep, step, hardware)
        if given.plan
        else demo()
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"hsdp.py: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        sys.exit(
            print(f"hsdp.py: {error.filename or 'cannot write'}: {error.strerror}", file=sys.stderr)
            or 2
        )
