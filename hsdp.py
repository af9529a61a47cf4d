"""hsdp.py: one model on many ranks, its weights cut twice: dense weights over narrow groups, experts over a wide mesh.

Fully sharded data parallelism (FSDP) keeps a piece of every weight per rank and gathers a layer just before it runs. Experts
are most of the weights and need a wide cut to fit; the rest is small and wants short trips inside a node. So the same ranks
form two meshes, and since the two never meet in one tensor, context parallelism (a cut of the sequence, on the dense mesh)
and expert parallelism (on the expert mesh) overlap on the same GPUs.

Stated by Cursor (cursor.com/blog/composer-2-5; Technical Report, arXiv 2603.24477): FSDP copies with an all-reduce across them,
dense weights in narrow groups, experts on a wider mesh; CP=2 with EP=8 on 8 GPUs instead of 16; CP folded into the FSDP
dimension, all-gather of the latents, zig-zag chunks; 0.2 s per Muon step at 1T parameters. Ours: gradients are summed, never
averaged; the checkpoint's two renames; the planner's hardware. The engine is PyTorch's: DeviceMesh, fully_shard, DTensor, DCP.

    dense mesh     (replicate, shard = dp_shard x cp)      W = replicate * shard
    expert mesh    (replicate', efsdp, ep)                 W = replicate' * efsdp * ep, over the same ranks
    loss           sum over ranks of  nll_of_my_tokens / tokens_of_all_ranks:  gradients add up to one process's

Left out: overlap of the latents' gather with the query projection and of EP exchange with the shared expert (about 10 % of a
step on a fast network), recomputation of activations, weights initialised in pieces (every rank builds the model once).

Letters: W ranks, B batch, T time, C width of an entry, M rows (token, choice), D model width, E experts, R rows of an expert.

    python hsdp.py                                            two grids on 8 ranks, bytes by layout, equality with one process
    python hsdp.py --plan --model=kimi-k2.5 --gpus=512        memory, bytes on the wire and optimizer step of a layout
    torchrun --nnodes=64 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py --ep=8 --cp=2
"""
import argparse
import json
import math
import os
import shutil
import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

PATIENCE = 25        # seconds a collective waits: a rank that died is known everywhere within half a minute
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)          # renamed in torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# ---------------------------------------------------------------- layout: arithmetic only, the planner uses it as well

@dataclass(frozen=True)
class Layout:
    """How `world` ranks are cut, twice. Ranks are numbered row by row: neighbours in the last dimension share a node."""
    world: int = 1
    cp: int = 1                  # ranks that share one sequence
    ep: int = 1                  # ranks that share one set of experts
    dp_replicate: int = 1        # copies of the dense weights
    expert_replicate: int = 1    # copies of the experts; 1 = the wide mesh: cut over all ranks

    def __post_init__(self):
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"{name}={size}: a mesh has at least one rank in every direction")
        if self.world % (self.dp_replicate * self.cp):
            raise ValueError(f"dp_replicate={self.dp_replicate} x cp={self.cp} does not divide the {self.world} ranks")
        if self.world % (self.expert_replicate * self.ep):
            raise ValueError(f"expert_replicate={self.expert_replicate} x ep={self.ep} does not divide the {self.world} ranks")

    @property
    def shard(self):             # dp_shard x cp, flattened: CP ranks hold different tokens of one loss, like any data ranks
        return self.world // self.dp_replicate

    @property
    def efsdp(self):
        return self.world // (self.expert_replicate * self.ep)

    @property
    def data(self):              # different batches; the cp ranks of one group read the same batch
        return self.world // self.cp

    def check(self, shapes):
        """shapes: {name: shape}. Raises unless every expert stack (E, R, C) can be cut: E over ep, R over efsdp."""
        for name, (E, R, *_) in ((n, s) for n, s in shapes.items() if is_expert(n)):
            if E % self.ep:
                raise ValueError(f"ep={self.ep} does not divide the {E} experts")
            if R % self.efsdp:
                raise ValueError(f"efsdp={self.efsdp} does not divide the {R} rows of {name}")


def is_expert(name):
    return ".experts." in name


@dataclass(frozen=True)
class Meshes:
    layout: Layout
    dense: DeviceMesh | None = None      # ([replicate,] shard)
    experts: DeviceMesh | None = None    # ([replicate,] efsdp [, ep])
    context: DeviceMesh | None = None    # (data, cp), only where cp > 1

    @property
    def rank(self):
        return dist.get_rank() if self.dense is not None else 0

    @property
    def data_rank(self):
        return self.rank // self.layout.cp


def make_meshes(world=1, cp=1, ep=1, dp_replicate=1, dp_shard=None, expert_replicate=1, device="cpu", seconds=PATIENCE):
    """Two meshes over the same ranks (and a third view of the first for CP). Sizes that do not fit: ValueError on every
    rank, before any collective. world=1 needs no process group and makes no mesh."""
    layout = Layout(world, cp, ep, dp_replicate, expert_replicate)
    if dp_shard not in (None, layout.shard // cp):
        raise ValueError(f"dp_replicate={dp_replicate} x dp_shard={dp_shard} x cp={cp} is not the {world} ranks")
    if world == 1:
        return Meshes(layout)
    if not dist.is_initialized() or dist.get_world_size() != world:
        raise ValueError(f"world={world}, but the process group has {dist.get_world_size() if dist.is_initialized() else 0} ranks")
    dims = lambda *pairs, keep: {n: s for n, s in pairs if s > 1 or n == keep}     # a direction of one rank is no direction
    dense = dims(("replicate", dp_replicate), ("shard", layout.shard), keep="shard")
    experts = dims(("replicate", expert_replicate), ("efsdp", layout.efsdp), ("ep", ep), keep="efsdp")
    made = [_mesh(device, d, seconds) for d in (dense, experts)]
    return Meshes(layout, *made, _mesh(device, {"data": layout.data, "cp": cp}, seconds) if cp > 1 else None)


def _mesh(device, dims, seconds):
    mesh = init_device_mesh(device, tuple(dims.values()), mesh_dim_names=tuple(dims))
    for group in mesh.get_all_groups():      # a new group forgets the patience of the default group: half an hour
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    return mesh


# ---------------------------------------------------------------- context parallelism

def zigzag(length, cp, rank):
    """Positions of CP rank `rank` in a sequence of `length`: cut in 2*cp chunks, rank i takes chunks i and 2*cp-1-i, so that
    all ranks attend to equally many keys (a contiguous cut gives the last rank almost twice the average)."""
    if length % (2 * cp):
        raise ValueError(f"a sequence of {length} tokens cannot be cut in 2 x cp={cp} equal chunks: pad it")
    chunks = torch.arange(length).chunk(2 * cp)
    return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]))


def shard_sequence(t, meshes, dim=1):
    """The part of t (B, T, ...) that this rank's tokens, targets or masks are: (B, T/cp, ...). cp=1: t itself."""
    cp = meshes.layout.cp
    return t if cp == 1 else t.index_select(dim, zigzag(t.shape[dim], cp, meshes.rank % cp).to(t.device))


def positions(length, meshes, device="cpu"):
    """What model.forward wants as `positions` (T/cp,), or None where the sequence is whole."""
    cp = meshes.layout.cp
    return None if cp == 1 else zigzag(length, cp, meshes.rank % cp).to(device)


class GatherSequence(torch.autograd.Function):
    """(B, T/cp, C) -> (B, T, C), rank by rank: attention masks by position, so the order of the keys is free.
    Backward: every rank used every entry, the gradients are summed on their way home."""
    @staticmethod
    def forward(ctx, t, group):
        ctx.group, n = group, group.size()
        parts = t.new_empty(n * t.shape[0], *t.shape[1:])                            # (cp*B, T/cp, C)
        all_gather(parts, t.contiguous(), group=group)
        return parts.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx, grad):
        n = ctx.group.size()
        parts = grad.unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1)             # (cp*B, T/cp, C)
        mine = parts.new_empty(grad.shape[0], *parts.shape[1:])
        reduce_scatter(mine, parts.contiguous(), group=ctx.group)
        return mine, None


# ---------------------------------------------------------------- expert parallelism

class Exchange(torch.autograd.Function):
    """All-to-all of rows with uneven splits: send[r] rows go to rank r, receive[r] come from it. Backward: the way back."""
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
    """MoE.dispatch over `group`: x (M, D) sorted by global expert, counts (E,) -> run(rows of my experts), rows back home.
    Rank r owns experts r*E/ep ... (r+1)*E/ep - 1, so rows sorted by expert are already sorted by rank."""
    counts = counts.view(group.size(), -1)                                           # (ep, E/ep) rows I send
    incoming = torch.empty_like(counts)                                              # (ep, E/ep) rows each rank sends me
    dist.all_to_all_single(incoming, counts, group=group)
    send, receive = torch.stack((counts.sum(1), incoming.sum(1))).tolist()           # the one wait for the device
    rows = Exchange.apply(x, send, receive, group)                                   # by rank, then by expert
    expert = torch.arange(counts.numel(), device=x.device) % counts.shape[1]
    order = expert.repeat_interleave(incoming.flatten()).argsort(stable=True)        # by expert, then by rank
    y = run(rows[order], incoming.sum(0))
    return Exchange.apply(y[order.argsort()], receive, send, group)


# ---------------------------------------------------------------- the model on the meshes

def parallelize(model, meshes, wire=None):
    """Cut `model` (the same weights on every rank) over the meshes, in place, and return it. Call it before the optimizer is
    made. Afterwards parameters are DTensors; world=1 changes nothing.

    The caller's part: gradients are SUMMED over ranks, never averaged, so each rank's loss must be its share of the global
    mean:    loss = nll_of_my_tokens.sum() / total(number_of_my_tokens)
    and the sum over ranks, total(loss.detach()), is the loss of one process on all tokens. This is exact when ranks hold
    different numbers of tokens (masks!), which an average of averages is not, and experts need no factor of their own.
    Every rank runs as many forwards and one backward per step; a rank with nothing to learn multiplies by zero.

    wire: dtype in which matrices are gathered (torch.bfloat16 when the model computes in it: same result, half the bytes).
    Norms, router, embedding and head travel in fp32, gradients are reduced in fp32."""
    if meshes.layout.world == 1:
        return model
    meshes.layout.check({n: p.shape for n, p in model.named_parameters()})
    _same_weights(model)
    policy = MixedPrecisionPolicy(param_dtype=wire, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in [m for m in model.modules() if hasattr(m, "attn") and hasattr(m, "ffn")]:
        if meshes.layout.cp > 1:
            block.attn.gather = lambda t: GatherSequence.apply(t, meshes.context.get_group("cp"))
        if hasattr(block.ffn, "experts"):
            _cut_experts(block.ffn, meshes, policy)
        if wire:
            fully_shard([m for n, m in block.named_modules() if n.endswith(("norm", "router"))], mesh=meshes.dense)
        fully_shard(block, mesh=meshes.dense, mp_policy=policy)
    fully_shard(model, mesh=meshes.dense)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)     # gloo cannot scale while it sums
    return model


def _cut_experts(moe, meshes, policy):
    """Experts over ep (Shard(0), whole experts), then their rows over efsdp (Shard(1)): two cuts that never meet."""
    mesh = meshes.experts
    if meshes.layout.ep > 1:
        ep = mesh["ep"]
        for name, p in list(moe.experts.named_parameters()):
            mine = p.detach().chunk(ep.size())[ep.get_local_rank()].clone()
            moe.experts.register_parameter(name, torch.nn.Parameter(DTensor.from_local(mine, ep, [Shard(0)], run_check=False)))
        moe.dispatch = partial(dispatch, group=ep.get_group())
    names = [n for n in mesh.mesh_dim_names if n != "ep"]
    fully_shard(moe.experts, mesh=mesh[tuple(names)], shard_placement_fn=lambda p: Shard(1), mp_policy=policy)


def _same_weights(model):
    """Every rank built the model itself. Different seeds would train on silently: each rank keeps its piece of its own."""
    mine = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN), dist.all_reduce(high, dist.ReduceOp.MAX)
    if low != high:
        raise ValueError("the ranks hold different weights: build the model with the same seed on every rank")


def total(t):
    """Sum of a tensor or number over all ranks (token counts, losses, the router's counts for balance()): CP ranks hold
    different tokens, so they count like data ranks."""
    t = torch.as_tensor(t).clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(t)
    return t


# ---------------------------------------------------------------- what one step needs from all ranks

@torch.no_grad()
def clip_grad_norm(model, max_norm):
    """Norm of the whole gradient, over both meshes, and the clip to max_norm (inf: only measure). Returns the norm, a 0-d
    tensor equal on all ranks. One all-reduce of one number: every shard adds its squares, divided by its number of copies."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    squares = [torch.linalg.vector_norm(l, dtype=torch.float64) ** 2 / _copies(g) for g, l in zip(grads, local)]
    square = torch.stack(squares).sum()
    norm = (total(square) if any(isinstance(g, DTensor) for g in grads) else square).sqrt()
    for l in local:
        l.mul_((max_norm / (norm + 1e-6)).clamp(max=1).to(l.dtype))
    return norm.float()


def _copies(t):
    if not isinstance(t, DTensor):
        return 1
    return math.prod(size for size, placement in zip(t.device_mesh.shape, t.placements) if placement.is_replicate())


@torch.no_grad()
def full_state(model):
    """{name: whole plain tensor, a copy} on every rank, parameters and buffers, for the generation weights:
    Model(config).load_state_dict(full_state(model)). All ranks must call it."""
    return {n: t.full_tensor() if isinstance(t, DTensor) else t.detach().clone() for n, t in model.state_dict().items()}


def connect(device="cpu", seconds=PATIENCE):
    """Join the ranks that torchrun started (its environment variables); without torchrun do nothing. -> (rank, world)"""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not dist.is_initialized():
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@contextmanager
def one_fate():
    """When a rank dies, the others' collectives fail with a line about sockets. This says what happened instead."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in ("onnection", "imed out", "imeout", "gloo", "NCCL", "closed by peer")):
            raise
        raise RuntimeError(f"rank {dist.get_rank()} of {dist.get_world_size()}: another rank died or stopped answering; start "
                           f"again from the last checkpoint ({str(error).splitlines()[0][:120]})") from error


# ---------------------------------------------------------------- checkpoints: any layout in, any layout out

def save(directory, model, optimizer=None, extra=None):
    """Write weights, optimizer state and `extra` (plain data, equal on all ranks: configuration, tokenizer, step) to a
    folder all ranks see. The folder appears, or replaces the one before, only when every file in it is complete."""
    target, part = Path(directory), Path(f"{directory}.part")
    first = _rank() == 0
    if first:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    _barrier()
    tensors, numbers = _contents(model, optimizer)
    _dcp("save", tensors, storage_writer=_files("Writer", part))
    if first:
        torch.save({"extra": extra or {}, "numbers": numbers}, part / "extra.pt")
        sizes = {f.name: f.stat().st_size for f in sorted(part.iterdir())}
        (part / "manifest.json").write_text(json.dumps(sizes))
        _replace(target, part)
    _barrier()


def _replace(target, part):
    """Two renames: between them the good checkpoint is called .old, and load() knows that name."""
    old = Path(f"{target}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    part.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def load(directory, model, optimizer=None):
    """Read a checkpoint into model and optimizer, whatever layouts it was written and is read in. -> extra.
    A folder that is missing, truncated or of another model: ValueError, before any collective."""
    folder = _whole(directory)
    saved = torch.load(folder / "extra.pt", weights_only=True)
    stored = _files("Reader", folder).read_metadata().state_dict_metadata
    if optimizer is not None:
        _make_homes(model, optimizer, stored, saved["numbers"])
    tensors, _ = _contents(model, optimizer)
    for name, t in tensors.items():
        if name not in stored:
            raise ValueError(f"{directory}: the checkpoint has no {name}: it is of another model")
        if tuple(stored[name].size) != tuple(t.shape):
            raise ValueError(f"{directory}: {name} is {tuple(stored[name].size)} there and {tuple(t.shape)} here")
    _dcp("load", tensors, storage_reader=_files("Reader", folder))
    return saved["extra"]


def peek(directory):
    """The `extra` of a checkpoint: the configuration is in it, so the model can be built before it is loaded."""
    return torch.load(_whole(directory) / "extra.pt", weights_only=True)["extra"]


def _whole(directory):
    folder = Path(directory)
    if not folder.exists() and Path(f"{directory}.old").exists():
        folder = Path(f"{directory}.old")        # ended between the two renames
    try:
        sizes = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        raise ValueError(f"{directory}: not a complete checkpoint (no readable manifest.json)") from None
    for name, size in sizes.items():
        there = (folder / name).stat().st_size if (folder / name).exists() else 0
        if there != size:
            raise ValueError(f"{directory}: {name} has {there} of {size} bytes: the checkpoint is damaged")
    return folder


def _contents(model, optimizer):
    """Tensors by name, as they lie on this rank (DTensors), and the optimizer's plain numbers."""
    tensors, numbers = {f"model.{n}": t.detach() for n, t in model.state_dict().items()}, {}
    for name, p in model.named_parameters() if optimizer is not None else ():
        for key, value in optimizer.state.get(p, {}).items():
            kind = tensors if isinstance(value, torch.Tensor) else numbers
            kind[f"optimizer.{name}/{key}"] = value
    return tensors, numbers


def _make_homes(model, optimizer, stored, numbers):
    """An optimizer that makes its state in its first step has none yet: give every stored tensor an empty home, placed like
    its parameter. One that makes it when it is built (muon.py) has its homes already."""
    parameters = dict(model.named_parameters())
    empty = {name for name, p in parameters.items() if not optimizer.state.get(p)}
    for full in [*stored, *numbers]:
        name, _, key = full.removeprefix("optimizer.").partition("/")
        if not key or name not in parameters:
            continue
        p = parameters[name]
        if full in numbers:
            optimizer.state[p][key] = numbers[full]
        elif name in empty:
            shape, dtype = tuple(stored[full].size), stored[full].properties.dtype
            optimizer.state[p][key] = torch.zeros_like(p, dtype=dtype) if shape == tuple(p.shape) else torch.zeros(shape, dtype=dtype)


def _files(kind, folder):
    import torch.distributed.checkpoint as dcp       # half a second of imports that a forward pass does not need
    return dcp.FileSystemWriter(folder) if kind == "Writer" else dcp.FileSystemReader(folder)


def _dcp(verb, tensors, **where):
    import torch.distributed.checkpoint as dcp
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        getattr(dcp, verb)(tensors, no_dist=not dist.is_initialized(), **where)


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier():
    if dist.is_initialized():
        dist.barrier()


# ---------------------------------------------------------------- planner: what one step costs, from shapes alone

MODELS = {    # fields of moe.ModelConfig; the published ones from their config.json, the others are train.py's scales
    "kimi-k2.5": dict(vocab=163840, dim=7168, layers=61, heads=64, q_lora=1536, kv_lora=512, qk_nope=128, qk_rope=64, v_dim=128,
                      dense_ffn=18432, experts=384, active=8, shared=1, expert_ffn=2048),
    "moonlight": dict(vocab=163840, dim=2048, layers=27, heads=16, kv_lora=512, qk_nope=128, qk_rope=64, v_dim=128,
                      dense_ffn=11264, experts=64, active=6, shared=2, expert_ffn=1408),
    "laptop": dict(),
    "gpu": dict(vocab=8192, dim=640, layers=10, heads=10, kv_lora=256, qk_nope=64, qk_rope=32, v_dim=64, dense_ffn=2048,
                experts=16, expert_ffn=512),
}


@dataclass(frozen=True)
class Hardware:
    node: int = 8                # GPUs that share the fast link
    memory: float = 80           # GB per GPU
    tflops: float = 989          # dense bf16, H100
    share: float = 0.6           # of it that Newton-Schulz reaches
    hbm: float = 3350            # GB/s
    link: float = 450            # GB/s per GPU and direction inside a node
    net: float = 50              # GB/s per GPU between nodes


@dataclass(frozen=True)
class Step:
    tokens: int = 8192           # per GPU
    weight: int = 2              # bytes per number: gathered matrices
    act: int = 2                 # activations and their gradients
    unit: int = 2                # Muon's units on the wire


def unit_of(name):
    """Which fully_shard owns a parameter: (kind, layer)."""
    layer = ".".join(name.split(".")[:2]) if name.startswith("layers.") else "root"
    return ("experts" if is_expert(name) else "dense" if layer != "root" else "root"), layer


def is_muon(name, shape):
    return len(shape) > 1 and not name.startswith(("embed", "head")) and ".router." not in name


def padded(name, shape, layout):
    """Numbers that travel for one parameter: FSDP pads the dimension it cuts. Experts must fit, and ep has cut them already."""
    if is_expert(name):
        return math.prod(shape) // layout.ep
    return -(-shape[0] // layout.shard) * layout.shard * math.prod(shape[1:])


def traffic(config, shapes, layout, step):
    """[(collective, what, bytes one rank receives per step, ranks the group spans)]. A ring passes (n-1)/n of what it gathers
    or scatters, an all-reduce does both; rows go to other ranks' experts with probability (ep-1)/ep."""
    rows, share = [], lambda n: (n - 1) / n
    for what, kinds, n, copies, span in (("dense", ("dense", "root"), layout.shard, layout.dp_replicate, layout.shard),
                                         ("experts", ("experts",), layout.efsdp, layout.expert_replicate, layout.efsdp * layout.ep)):
        mine = [(s, unit_of(s)[0], padded(s, shapes[s], layout)) for s in shapes if unit_of(s)[0] in kinds]
        gathered = sum(size * (4 if kind == "root" else 2 * _travels(s, step)) for s, kind, size in mine)    # root: kept
        reduced = 4 * sum(size for *_, size in mine)
        rows += [("all-gather", f"{what} weights", share(n) * gathered, span),
                 ("reduce-scatter", f"{what} gradients", share(n) * reduced, span),
                 ("all-reduce", f"{what} gradients of copies", 2 * share(copies) * reduced / n, layout.world)]
    entry = config.kv_lora + config.qk_rope if config.attention == "mla" else config.kv_heads * (config.qk_nope + config.qk_rope
                                                                                                + config.v_dim)
    latents = config.layers * step.tokens * (layout.cp - 1) * entry * step.act
    moe = config.layers - config.dense_layers
    tokens = moe * 4 * share(layout.ep) * step.tokens * config.active * config.dim * step.act      # there and back, twice
    rows += [("all-gather", "latents (cp)", latents, layout.cp), ("reduce-scatter", "latents (cp)", latents, layout.cp),
             ("all-to-all", "tokens (ep)", tokens, layout.ep)]
    return rows + [("all-to-all", "Muon units", step.unit * _units_sent(shapes, layout) / layout.world, layout.world)]


def _travels(name, step):
    return 4 if name.endswith(("norm.weight", "router.weight")) else step.weight


def _units_sent(shapes, layout):
    """Numbers that all ranks together send for Muon: a unit cut over ranks goes to one owner and back, to every copy; a unit that
    is whole on a rank is done there, and only its other copies hear of it. An owner holds k/W of its units anyway."""
    sent, world = 0, layout.world
    for name, shape in shapes.items():
        k = layout.expert_replicate if is_expert(name) else layout.dp_replicate
        whole = (layout.efsdp if is_expert(name) else layout.shard if len(shape) == 2 else 1) == 1
        if is_muon(name, shape):
            sent += math.prod(shape) * (k - 1 if whole else 1 + k - 2 * k / world)
    return sent


def newton_schulz_flops(shapes, steps=5):
    """Per iteration on an (m, n) unit, m <= n: X X^T, its square, and one product with X."""
    flops = 0
    for name, shape in shapes.items():
        m, n = sorted(shape[-2:]) if is_muon(name, shape) else (0, 0)
        flops += steps * math.prod(shape[:-2]) * (4 * m * m * n + 2 * m ** 3)
    return flops


def memory(config, shapes, layout, step):
    """{kind: bytes on one GPU}. Weights, gradients and optimizer state are fp32 shards; activations are an estimate."""
    out = {}
    for what in ("dense", "experts"):
        mine = {n: s for n, s in shapes.items() if is_expert(n) == (what == "experts")}
        held = {n: padded(n, s, layout) / (layout.efsdp if what == "experts" else layout.shard) for n, s in mine.items()}
        out[f"{what} weights"] = out[f"{what} gradients"] = 4 * sum(held.values())
        out[f"{what} optimizer"] = sum(4 * h * (1 if is_muon(n, mine[n]) else 2) for n, h in held.items())
    units = {}
    for name, shape in shapes.items():
        kind, layer = unit_of(name)
        size = padded(name, shape, layout)
        units[kind, layer] = units.get((kind, layer), 0) + size * (8 if kind == "root" else 2 * step.weight + 4)
    blocks = [units.get(("experts", l), 0) + u for (kind, l), u in units.items() if kind == "dense"]
    out["gathered for now"] = units.get(("root", "root"), 0) + max(blocks) + max(blocks) / 2     # this layer and the next
    c = config
    heads = c.heads * (2 * (c.qk_nope + c.qk_rope) * (1 + layout.cp) / 2 + c.v_dim * (layout.cp + 1))
    layer = 8 * c.dim + 2 * step.act * c.dim + step.act * heads + step.act * c.active * (2 * c.dim + 4 * c.expert_ffn)
    out["activations, none recomputed"] = step.tokens * (c.layers * layer + 8 * c.vocab)
    return out


def parameter_shapes(name):
    """Shapes of a named model without its memory: moe.Model on the meta device. -> (ModelConfig, {name: shape})"""
    from moe import Model, ModelConfig
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: {', '.join(MODELS)}")
    config = ModelConfig(**MODELS[name])
    with torch.device("meta"):
        return config, {n: tuple(p.shape) for n, p in Model(config).named_parameters()}


def optimizer_step(shapes, layout, step, hardware):
    """Seconds of one Muon step per GPU: (Newton-Schulz, wire, memory traffic of the elementwise part)."""
    h, numbers = hardware, sum(math.prod(s) for s in shapes.values())
    units = step.unit * _units_sent(shapes, layout) / layout.world
    return (newton_schulz_flops(shapes) / layout.world / (h.tflops * 1e12 * h.share),
            units / (1e9 * (h.link if layout.world <= h.node else h.net)),
            28 * numbers / layout.world / (h.hbm * 1e9))       # weight, gradient, momentum: read; weight, momentum, unit: write


def plan(name, gpus, cp, ep, step, hardware):
    """Print memory, traffic and the optimizer step for three layouts of one model."""
    config, shapes = parameter_shapes(name)
    narrow = max(gpus // hardware.node, 1)
    layouts = {"all narrow": Layout(gpus, cp, ep, narrow, max(gpus // max(hardware.node, ep), 1)),
               "dense narrow, experts wide": Layout(gpus, cp, ep, narrow), "all wide": Layout(gpus, cp, ep)}
    for layout in layouts.values():
        layout.check(shapes)
    numbers, experts = (sum(math.prod(s) for n, s in shapes.items() if is_expert(n) or not only) for only in (False, True))
    print(f"{name}: {numbers / 1e9:,.4g}B parameters, {experts / numbers:.0%} of them in {config.experts} experts x "
          f"{config.layers - config.dense_layers} layers; {gpus} GPUs, cp={cp}, ep={ep}")
    print("assumed (flags): " + ", ".join(f"--{k}={v:g}" for k, v in {**vars(step), **vars(hardware)}.items()))
    line = lambda what, values, form: print(f"  {what:44s}" + "".join(f"{form(v):>28s}" for v in values))
    line("", layouts, str)
    line("dense mesh (replicate, shard)", [(l.dp_replicate, l.shard) for l in layouts.values()], str)
    line("expert mesh (replicate, efsdp, ep)", [(l.expert_replicate, l.efsdp, l.ep) for l in layouts.values()], str)
    print("memory per GPU, GB")
    kinds = [memory(config, shapes, l, step) for l in layouts.values()]
    giga = lambda v: f"{v / 1e9:,.4g}"
    for what in kinds[0]:
        line(what, [k[what] for k in kinds], giga)
    line("total", [sum(k.values()) for k in kinds],
         lambda v: giga(v) + (" fits" if v <= 1e9 * hardware.memory else f" > {hardware.memory:g}: does not fit"))
    print("received per GPU and step, GB")
    flows = [traffic(config, shapes, l, step) for l in layouts.values()]
    for rows in zip(*flows):
        line(f"{rows[0][0]:15s}{rows[0][1]}", [r[2] for r in rows], giga)
    seconds = lambda rows: sum(r[2] / (1e9 * (hardware.link if r[3] <= hardware.node else hardware.net)) for r in rows)
    line("seconds on the wire, nothing overlapped", [seconds(r) for r in flows], "{:.3g}".format)
    print("optimizer step, seconds (stated by Cursor: 0.2 at 1T parameters)")
    parts = [optimizer_step(shapes, l, step, hardware) for l in layouts.values()]
    for i, what in enumerate(("Newton-Schulz", "units on the wire", "elementwise")):
        line(what, [p[i] for p in parts], "{:.3g}".format)
    line("predicted, wire behind Newton-Schulz", [max(p[:2]) + p[2] for p in parts], "{:.3g}".format)
    line("predicted, one after the other", [sum(p) for p in parts], "{:.3g}".format)
    print(f"cp={cp} and ep={ep} as directions of one shared mesh need at least {cp * ep} GPUs; on two meshes {math.lcm(cp, ep)}.")


# ---------------------------------------------------------------- demo

class Wire(TorchDispatchMode):
    """Counts the bytes this rank receives inside `with Wire() as wire`, by collective, whoever calls it."""
    KINDS = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce",
             "alltoall_base_": "all-to-all"}

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented            # it will come back as plain tensors
        kind = self.KINDS.get(op._schema.name.removeprefix("c10d::"))
        if kind:
            self.bytes[kind] += self.received(kind, args)
        return op(*args, **(kwargs or {}))

    def received(self, kind, args):
        group = dist.ProcessGroup.unbox(args[1 if kind == "all-reduce" else 2])
        n = group.size()
        if kind == "all-reduce":
            return 2 * (n - 1) / n * sum(t.nbytes for t in args[0])
        if kind == "all-to-all" and args[3]:
            return args[0].nbytes - args[3][group.rank()] * args[0].nbytes // max(len(args[0]), 1)
        return (n - 1) / n * args[kind == "reduce-scatter"].nbytes


def small_model():
    from moe import Model, ModelConfig
    torch.manual_seed(0)
    model = Model(ModelConfig(vocab=64, dim=32, layers=2, kv_lora=16, qk_nope=8, qk_rope=8, v_dim=8, dense_ffn=64, expert_ffn=16))
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.05)       # matrices that start at zero would hide half of the gradients
    return model


def one_step(model, meshes):
    """Forward and backward on this rank's share of one batch of 8 x 64 tokens. -> global loss"""
    rows = torch.randint(0, 64, (8, 65), generator=torch.Generator().manual_seed(1))
    mine = rows.chunk(meshes.layout.data)[meshes.data_rank]
    tokens, targets = shard_sequence(mine[:, :-1], meshes), shard_sequence(mine[:, 1:], meshes)
    logits = model.logits(model(tokens, positions(64, meshes)))
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = nll / total(targets.numel())
    loss.backward()
    return float(total(loss.detach()))


def _demo_rank(rank, world, store, layouts, answers):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    for layout in layouts:
        meshes = make_meshes(**vars(layout))
        model = parallelize(small_model(), meshes)
        with Wire() as wire:
            loss = one_step(model, meshes)
        grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        counted = {kind: float(total(float(wire.bytes[kind]))) / world for kind in Wire.KINDS.values()}
        if rank == 0:
            answers.put((loss, {n: g.numpy() for n, g in grads.items()}, counted))
    dist.barrier()


def grid(layout):
    """What each rank holds, as text."""
    ranks = range(layout.world)
    lines = {"rank": ranks, "batch": [r // layout.cp for r in ranks], "part of it": [r % layout.cp for r in ranks],
             "dense copy": [r // layout.shard for r in ranks], "dense piece": [r % layout.shard for r in ranks],
             "expert group": [r % layout.ep for r in ranks], "piece of it": [r // layout.ep % layout.efsdp for r in ranks]}
    return "\n".join(f"  {name:14s}" + "".join(f"{v:4d}" for v in values) for name, values in lines.items())


def draw(layouts, path):
    """Two meshes over the same ranks, side by side: colour = what a rank holds, so equal colours are copies."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(len(layouts), 2, figsize=(10, 1.9 * len(layouts)), squeeze=False)
    for layout, (left, right) in zip(layouts, axes):
        for axis, rows, holds, label, title in (
                (left, layout.dp_replicate, layout.shard, lambda r: f"rank {r}\nbatch {r // layout.cp}.{r % layout.cp}",
                 f"dense: {layout.dp_replicate} copies x {layout.shard} pieces (cp={layout.cp})"),
                (right, layout.efsdp, layout.world, lambda r: f"rank {r}\nexperts {r % layout.ep}",
                 f"experts: {layout.ep} groups (ep) x {layout.efsdp} pieces (efsdp)")):
            columns = layout.world // rows
            axis.imshow([[(r * columns + c) % holds for c in range(columns)] for r in range(rows)], cmap="Pastel1", vmin=0, vmax=8)
            for r in range(layout.world):
                axis.text(r % columns, r // columns, label(r), ha="center", va="center", fontsize=8)
            axis.set(title=title, xticks=[], yticks=[])
    figure.suptitle("the same 8 ranks, twice      (python hsdp.py)")
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def demo(path="out/hsdp.png"):
    import tempfile
    import torch.multiprocessing as mp
    layouts = [Layout(8, cp=2, ep=8), Layout(8, cp=2, ep=4, dp_replicate=2)]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    model, step = small_model(), Step(tokens=64, weight=4, act=4)
    loss = one_step(model, make_meshes())
    with tempfile.TemporaryDirectory() as folder:
        answers = mp.get_context("fork").Queue()
        ranks = mp.start_processes(_demo_rank, (8, f"{folder}/store", layouts, answers), 8, join=False, start_method="fork")
        found = [answers.get(timeout=60) for _ in layouts]
        ranks.join()
    shapes, worst = {n: tuple(p.shape) for n, p in model.named_parameters()}, 0.0
    for layout, (there, grads, counted) in zip(layouts, found):
        print(f"8 ranks, cp={layout.cp}, ep={layout.ep}, dp_replicate={layout.dp_replicate}\n{grid(layout)}")
        planned = Counter()
        for kind, what, size, _ in traffic(model.config, shapes, layout, step):
            planned[kind] += size * (what != "Muon units")
        print("  bytes per rank  " + "   ".join(f"{k} {v:,.0f} (planned {planned[k]:,.0f})" for k, v in counted.items()))
        error = max(float((torch.from_numpy(grads[n]) - p.grad).abs().max() / p.grad.abs().max()) for n, p in model.named_parameters())
        print(f"  loss {there:.6f} against {loss:.6f} on one process; worst gradient difference {error:.1e} of its largest entry\n")
        worst = max(worst, error, abs(there - loss))
    draw(layouts, path)
    print(f"{path}: the two grids. Seen: CP=2 and EP=8 shared 8 ranks, and 8 ranks computed what one process computes, to {worst:.0e}.")


def main(argv):
    parser = argparse.ArgumentParser(description="dual-mesh HSDP: demo, or a plan for a model and a cluster", allow_abbrev=False)
    parser.error = lambda message: (_ for _ in ()).throw(ValueError(message))
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--model", default="kimi-k2.5", help=", ".join(MODELS))
    for name, default in dict(gpus=512, cp=2, ep=8).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for field in (*fields(Step), *fields(Hardware)):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    given = parser.parse_args(argv)
    chosen = lambda kind: kind(**{f.name: getattr(given, f.name) for f in fields(kind)})
    if not given.plan:
        return demo()
    return plan(given.model, given.gpus, given.cp, given.ep, chosen(Step), chosen(Hardware))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"hsdp.py: {error}", file=sys.stderr)
        sys.exit(2)
