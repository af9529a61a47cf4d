"""Muon: an optimizer that makes every direction of a weight matrix move by the same amount, on one
rank or a thousand.

The momentum of a matrix is dominated by a few singular directions. Muon replaces it by the nearest
semi-orthogonal matrix, so that rare directions learn as fast as common ones. A few matrix products
do that (Newton-Schulz), no SVD:

    m <- mu m + (1-mu) g        u = (1-mu) g + mu m  (Nesterov)        X = u / |u|_F
    X <- (a I + b A + c A^2) X  with A = X X^T, five times             an odd polynomial acts on the singular values only
    W <- (1 - lr wd) W - lr scale X                                    scale: 0.2 sqrt(max(R, C)) or sqrt(max(1, R/C))

Stated by Cursor (https://cursor.com/blog/composer-2-5): Newton-Schulz runs at the model's natural
granularity, per attention head and per expert; same-shaped tensors are batched, all-to-all brings
the shards together into whole matrices, Newton-Schulz runs once, all-to-all takes them back;
asynchronous, while one task waits on communication others advance; the result equals full-matrix
Muon. Derived here from that: the owner of each unit follows from shapes alone, so no rank ever asks
another for a size, nothing is padded, and units that are already whole stay at home. Ours, for want
of a public value: learning rate, momentum, coefficients, scale. Left out: fused kernels and
symmetric GEMMs (a third of the FLOPs on a GPU), a second level of all-to-all for thousands of
ranks, strided shards (tensor parallelism and FSDP on one dimension).

    N  units in a stack (heads, experts)     R, C  rows and columns of a unit     m <= n  the same, sorted     W  ranks
    unit   a matrix that is orthogonalised as a whole: the last two dimensions of a stack, a 2-D parameter, or a column block
    block  the part of a parameter that one rank holds            piece  the part of a unit that lies in one block

python muon.py    singular values before and after, four ranks against one, the timeline out/muon.png
"""

import argparse
import heapq
import math
import os
import sys
import tempfile
import time
from collections import defaultdict, deque, namedtuple
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

# One (a, b, c) per step; the last repeats if more steps are asked for. Sources: Keller Jordan
# (quintic), modded-nanogpt (five_step), arXiv 2505.16932 with modded-nanogpt's 2 % safety margin
# (polar_express).
COEFFICIENTS = {
    "quintic": ((3.4445, -4.7750, 2.0315),),
    "five_step": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
# its first polynomial leaves [0, 1] soon after 1, and bf16 rounding reaches beyond
MARGIN = {"polar_express": 1.02}
# on a CPU: small calls pay overhead, big ones leave the cache; others 2 << 20
CACHE_BYTES = {torch.bfloat16: 3 << 20}


# ---------------------------------------------------------------------------------------------------- mathematics


def orthogonalize(G, steps=5, coefficients="quintic", dtype=None, out=None, iterate=None):
    """The nearest semi-orthogonal matrix, roughly: singular values go to about 1. G (..., R, C) ->
    same shape and dtype.

    dtype is what the products run in, bf16 unless given. Many small matrices are multiplied as one
    batch; on a CPU big ones go through in cache-sized chunks. What becomes of a matrix does not
    depend on its company. out may be G itself. iterate: what to do in the place of newton_schulz.
    """
    assert G.ndim >= 2, f"orthogonalize wants (..., R, C), got shape {tuple(G.shape)}"
    assert (
        coefficients in COEFFICIENTS
    ), f"coefficients is one of {sorted(COEFFICIENTS)}, not {coefficients!r}"
    dtype, iterate = dtype or torch.bfloat16, iterate or newton_schulz
    out = torch.empty(G.shape, dtype=G.dtype, device=G.device) if out is None else out
    if not G.numel():
        return out
    if not out.is_contiguous():
        return out.copy_(orthogonalize(G, steps, coefficients, dtype, iterate=iterate))
    R, C = G.shape[-2:]
    # zeros up to whole cache lines: on some CPUs the last bit hangs
    if G.device.type == "cpu" and (R % 8 or C % 8):
        # on where in a line a matrix begins, so on its company
        padded = torch.nn.functional.pad(G, (0, -C % 8, 0, -R % 8))
        whole = orthogonalize(padded, steps, coefficients, dtype, iterate=iterate)
        return out.copy_(whole[..., :R, :C])
    X, O = G.reshape(-1, *G.shape[-2:]), out.view(-1, *G.shape[-2:])  # (N, R, C)
    rows, chunk = COEFFICIENTS[coefficients], max(1, len(X))
    if G.device.type == "cpu":
        chunk = cpu_chunk(X[0].numel(), dtype)
    table = [rows[min(i, len(rows) - 1)] for i in range(steps)]
    for x, o in zip(X.split(chunk), O.split(chunk)):
        result = o if o.dtype == dtype else torch.empty(o.shape, dtype=dtype, device=o.device)
        iterate(unit_norm(x, dtype, MARGIN.get(coefficients, 1.0)), table, result)
        o.copy_(result) if result is not o else None
    return out


def cpu_chunk(elements, dtype):
    """Matrices of so many elements to multiply in one call: small calls pay overhead, big ones
    leave the cache."""
    return max(1, CACHE_BYTES.get(dtype, 2 << 20) // (elements * dtype.itemsize))


# between them no square of an entry that matters leaves the range of fp32 and bf16
ORDINARY_NORMS = (1e-12, 1e18)
EXPONENT_BITS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF << 52),
}


def unit_norm(X, dtype, margin=1.0):
    """X (N, R, C) / its Frobenius norm, an upper bound of the largest singular value, in the dtype
    of the products.

    Any finite scale will do: where squares would underflow or overflow, a matrix is first divided
    by a power of two, which rounds nothing. A matrix of zeros stays one."""
    # fp16 cannot hold a gradient, and no other dtype holds what fp64 can: divide first.
    # The others are cast first, as on the wire.
    if dtype != torch.float16 and X.dtype != torch.float64:
        X = X.to(dtype)
    # Asking for the norms would make a GPU's host wait, so there every matrix is scaled, with the
    # same result.
    if X.device.type != "cpu" or not has_ordinary_norms(X):
        X = X / power_of_two_below(X)
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)  # (N, 1, 1)
    return (X / (norm * margin).clamp(min=torch.finfo(X.dtype).tiny)).to(dtype)


def has_ordinary_norms(X):
    """Can the entries of every matrix of X (N, R, C) be squared and summed as they are?"""
    norm = torch.linalg.vector_norm(X, dim=(-2, -1))
    low, high = ORDINARY_NORMS
    return bool(((norm > max(low, torch.finfo(X.dtype).tiny)) & (norm < high)).all())


def power_of_two_below(X):
    """The power of two at or below the largest entry of each matrix of X (N, R, C), (N, 1, 1): its
    bits without the mantissa. At least the smallest normal number, which a matrix of zeros can be
    divided by, too."""
    largest = torch.linalg.vector_norm(X, math.inf, dim=(-2, -1), keepdim=True)
    whole, mask = EXPONENT_BITS[X.dtype]
    return (largest.view(whole) & mask).view(X.dtype).clamp(min=torch.finfo(X.dtype).tiny)


def newton_schulz(X, table, out):
    """out <- p_k(...p_1(X)) for X (N, R, C), p_i(X) = (a I + b A + c A^2) X with A = X X^T (N, m,
    m), on the small side: the transpose of a tall X is multiplied."""
    tall = X.shape[1] > X.shape[2]
    X = X.mT if tall else X
    for a, b, c in table:
        A = X @ X.mT
        B = b * A + c * A @ A
        X = a * X + B @ X
    return out.copy_(X.mT if tall else X)


def step_scale(rule, rows, columns):
    """Length of one update: "rms" makes its RMS about 0.2, as AdamW's (Moonlight); "spectral" sizes
    it to the layer's gain."""
    return 0.2 * max(rows, columns) ** 0.5 if rule == "rms" else max(1.0, rows / columns) ** 0.5


@torch.no_grad()
def qk_clip(query, key, max_logits, threshold=100.0, rope=0):
    """QK-clip (Kimi K2), after a step: shrink the heads whose largest attention logit passed the
    threshold.

    query (H, r, D), key (K, r', D), K dividing H, plain or sharded; max_logits (H,), equal on every
    rank. Each head's logits shrink by gamma = min(1, threshold / max_logit). The key head takes the
    root of its smallest gamma, its query heads the rest; the last `rope` rows of a query face a
    rotary key that all heads share (MLA) and take all of gamma."""
    gamma = (threshold / max_logits.float().clamp(min=1e-12)).clamp(max=1.0)  # (H,)
    key_factor = gamma.view(len(key), -1).amin(1).sqrt()  # (K,)
    query_factor = gamma / key_factor.repeat_interleave(len(query) // len(key))  # (H,)
    rows = torch.arange(query.shape[1], device=gamma.device) < query.shape[1] - rope  # (r,)
    for weight, factor in (
        (query, torch.where(rows, query_factor[:, None], gamma[:, None])),
        (key, key_factor[:, None].expand(-1, key.shape[1])),
    ):
        n0, n1, r0, r1, _, _ = Leaf(weight, "qk_clip").block
        local(weight).mul_(factor[n0:n1, r0:r1, None].to(weight.dtype))


# ---------------------------------------------------------------------------------- who holds what, who computes what


def local(tensor):
    """What this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def stacked(tensor):
    """A 2-D parameter is a stack of one."""
    return tensor if tensor.ndim == 3 else tensor[None]


def block_of(shape, mesh_shape, placements, coordinate):
    """(n0, n1, r0, r1, c0, c1): the block at one coordinate of a mesh. Rows are dealt as
    torch.chunk deals them."""
    spans = [[0, size] for size in shape]
    for ranks, placement, here in zip(mesh_shape, placements, coordinate):
        if isinstance(placement, Shard):
            lo, hi = spans[placement.dim]
            size = -(-(hi - lo) // ranks)
            spans[placement.dim] = [min(lo + here * size, hi), min(lo + (here + 1) * size, hi)]
    return tuple(edge for span in [[0, 1]] * (3 - len(shape)) + spans for edge in span)


def start_of(tensor):
    """Where the block that this rank holds begins in the whole tensor: a number per dimension."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    mesh = tensor.device_mesh
    edges = block_of(tensor.shape, mesh.shape, tensor.placements, mesh.get_coordinate())
    return edges[::2][len(edges) // 2 - tensor.ndim :]


class Leaf:
    """One Muon parameter and the block of it that each rank holds. All of it follows from shapes:
    no rank asks another."""

    def __init__(self, param, name, group=0, column_blocks=1, replicas=None):
        self.param, self.name, self.group = param, name, group  # group: its index in the optimizer
        self.shape = (1,) * (3 - param.ndim) + tuple(param.shape)  # (N, R, C)
        self.width = self.shape[2] // column_blocks  # columns of a unit
        self.process_group, self.me, self.replica = None, 0, [()]
        self.blocks = [block_of(param.shape, (), (), ())]
        if isinstance(param, DTensor):
            self.read_mesh(param.device_mesh, param.placements)
        elif replicas is not None:
            self.process_group, self.me, world = (
                replicas,
                dist.get_rank(replicas),
                dist.get_world_size(replicas),
            )
            self.blocks, self.replica = self.blocks * world, [(rank,) for rank in range(world)]
        self.block = self.blocks[self.me]
        self.holders = defaultdict(list)  # stack index -> ranks that hold some of it
        for rank, (n0, n1, r0, r1, c0, c1) in enumerate(self.blocks):
            for n in range(n0, n1) if r0 < r1 and c0 < c1 else ():
                self.holders[n].append(rank)

    def read_mesh(self, mesh, placements):
        self.process_group = mesh_group(mesh)
        ranks = dist.get_process_group_ranks(self.process_group)
        # mesh coordinate of each rank
        where = [tuple((mesh.mesh == rank).nonzero()[0].tolist()) for rank in ranks]
        self.me = ranks.index(dist.get_rank())
        self.blocks = [block_of(self.param.shape, mesh.shape, placements, at) for at in where]
        # ranks that agree on the replicated mesh dimensions hold one whole copy of the parameter
        # between them
        self.replica = [
            tuple(c for c, p in zip(at, placements) if isinstance(p, Replicate)) for at in where
        ]
        n0, n1, r0, r1, c0, c1 = self.blocks[self.me]
        have, want = tuple(stacked(local(self.param)).shape), (n1 - n0, r1 - r0, c1 - c0)
        if have != want and local(self.param).numel() + want[0] * want[1] * want[2]:
            raise ValueError(
                f"{self.name}: this rank holds {have} of {self.shape}; {placements} says {want}"
            )

    def units(self):
        return [
            Unit(self, n, c)
            for n in range(self.shape[0])
            for c in range(0, self.shape[2], self.width)
        ]

    def matrix(self, tensor, n):
        """Layer n of what this rank holds of a tensor shaped like the parameter: (rows here,
        columns here)."""
        return stacked(local(tensor))[n - self.block[0]]


def mesh_group(mesh):
    """One process group over all ranks of a mesh: two meshes over the same ranks share it, and so
    share their tasks."""
    if set(mesh.mesh.flatten().tolist()) == set(range(dist.get_world_size())):
        return dist.group.WORLD
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


class Unit:
    """A matrix that is orthogonalised as a whole: layer n of a stack, columns `column` to `column +
    width`."""

    __slots__ = ("leaf", "n", "column", "owner", "shape", "cost")

    def __init__(self, leaf, n, column):
        self.leaf, self.n, self.column, self.owner = leaf, n, column, 0
        self.shape = (leaf.shape[1], leaf.width)  # (R, C)
        self.cost = leaf.shape[1] * leaf.width * min(self.shape)  # a Newton-Schulz step is m m n

    def piece(self, rank):
        """The part of the unit in a rank's block, as slices (rows, columns) of the unit."""
        _, _, r0, r1, c0, c1 = self.leaf.blocks[rank]
        left = max(c0 - self.column, 0)
        return slice(r0, r1), slice(left, max(min(c1 - self.column, self.shape[1]), left))

    @staticmethod
    def size(piece):
        return (piece[0].stop - piece[0].start) * (piece[1].stop - piece[1].start)

    def holders(self):
        return [rank for rank in self.leaf.holders[self.n] if self.size(self.piece(rank))]

    def whole(self, rank):
        return self.size(self.piece(rank)) == self.shape[0] * self.shape[1]

    def travels(self):
        return any(rank != self.owner for rank in self.holders())

    def here(self, matrix):
        """The part of a local matrix (rows here, columns here) that belongs to this unit."""
        c0 = self.leaf.block[4]
        return matrix[:, max(self.column - c0, 0) : max(self.column + self.shape[1] - c0, 0)]


def assign_owners(units):
    """Who orthogonalises what, from shapes alone: a unit that lies whole on a rank stays there, the
    rest goes, dearest first, to the least loaded. Replicas hold the same units, and each unit is
    done by one of them only."""
    load, away = [0] * len(units[0].leaf.blocks), []
    for unit in units:
        whole = [rank for rank in unit.holders() if unit.whole(rank)]
        if whole:
            unit.owner = min(whole, key=load.__getitem__)
            load[unit.owner] += unit.cost
        else:
            away.append(unit)
    queue = [(cost, rank) for rank, cost in enumerate(load)]
    heapq.heapify(queue)
    for unit in sorted(away, key=lambda unit: -unit.cost):
        cost, unit.owner = queue[0]
        heapq.heapreplace(queue, (cost + unit.cost, unit.owner))


# a piece (rows, columns) of a unit that crosses the wire to or from a rank
Route = namedtuple("Route", "rank unit piece")


class Task:
    """Units that are computed, and travel, together. Its four lists of routes say what crosses the
    wire, in what order."""

    def __init__(self, units):
        self.leaf, self.number, me = units[0].leaf, 0, units[0].leaf.me
        self.gather, self.arrive, self.spread, self.settle = [], [], [], []
        self.mine = [unit for unit in units if unit.owner == me]
        # [parameter, lo, hi): runs of stack indices that this rank holds some of; momentum goes by
        # run
        self.slabs = []
        for unit in units:
            self.route(unit, me)
            held, (leaf, lo, hi) = me in unit.leaf.holders[unit.n], (
                self.slabs[-1] if self.slabs else (None, 0, 0)
            )
            if held and leaf is unit.leaf and unit.n <= hi:
                self.slabs[-1][2] = max(hi, unit.n + 1)
            elif held:
                self.slabs.append([unit.leaf, unit.n, unit.n + 1])
        for routes in (self.gather, self.arrive, self.spread, self.settle):
            # stable: within a rank the order of the units, on both ends
            routes.sort(key=lambda route: route.rank)
        # known to every rank, also to one that neither sends nor receives
        self.moves = any(unit.travels() for unit in units)
        self.gathers = any(not unit.whole(unit.owner) for unit in units)

    def route(self, unit, me):
        replica, owner, mine = unit.leaf.replica, unit.owner, unit.piece(me)
        for rank in unit.holders():
            if rank == owner or me not in (rank, owner):
                continue
            # the owner collects from its own replica and answers them all: that way
            near = replica[rank] == replica[owner]
            # the all-gather over replicas costs no collective of its own
            if rank == me:
                self.gather.extend([Route(owner, unit, mine)] * near)
                self.settle.append(Route(owner, unit, mine))
            else:
                self.arrive.extend([Route(rank, unit, unit.piece(rank))] * near)
                self.spread.append(Route(rank, unit, unit.piece(rank)))


def plan_tasks(leaves, itemsize, task_bytes, window):
    """Cut all units into tasks: per process group those that move, about a third of the bytes each
    so that there is something to overlap, at most task_bytes per rank; then those that stay, in
    cache-sized tasks that fill the waiting time."""
    groups, moving, staying = defaultdict(list), [], []
    for leaf in leaves:
        groups[leaf.process_group].extend(leaf.units())
    for units in groups.values():
        assign_owners(units)
        # the column blocks of one matrix stay together: they share its momentum
        rows = defaultdict(list)
        for unit in sorted(units, key=lambda unit: (-unit.cost, unit.shape)):
            rows[unit.leaf, unit.n].append(unit)
        moves = {key: any(unit.travels() for unit in row) for key, row in rows.items()}
        size = itemsize * sum(
            leaf.shape[1] * leaf.shape[2] for (leaf, _), moved in moves.items() if moved
        )
        bound = min(max(size // 3, 1 << 12), task_bytes * len(units[0].leaf.blocks))
        moving += cut([row for key, row in rows.items() if moves[key]], itemsize, bound)
        mine = [
            row
            for key, row in rows.items()
            if not moves[key] and any(unit.owner == key[0].me for unit in row)
        ]
        staying += cut(
            mine,
            itemsize,
            CACHE_BYTES[torch.bfloat16] if units[0].leaf.param.device.type == "cpu" else task_bytes,
        )
    for number, task in enumerate(moving + staying):
        task.number = number + 1
    return moving[: window - 1] + staying + moving[window - 1 :]


def cut(rows, itemsize, bound):
    """Tasks that close as soon as they hold `bound` bytes."""
    tasks, units, size = [], [], 0
    for row in rows:
        units, size = units + row, size + itemsize * row[0].leaf.shape[1] * row[0].leaf.shape[2]
        if size >= bound or row is rows[-1]:
            tasks.append(Task(units))
            units, size = [], 0
    return tasks


# ------------------------------------------------------------------------------------------------------ the optimizer

# of Muon, beside its groups
SETTINGS = "ns_dtype", "newton_schulz", "wire_dtype", "check_gradients", "task_bytes", "window"


class Lent:
    """A process group on its way into a copy of an optimizer: the copy uses the same one."""

    def __init__(self, group):
        self.group = group

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError(
            "an optimizer with replicas holds a process group, which cannot be pickled: save its state_dict()"
        )


class Muon(torch.optim.Optimizer):
    """Muon for matrices and stacks of matrices, AdamW for everything else, on one rank or sharded
    over many.

    param_groups: dicts with `params` (tensors or (name, tensor) pairs; names serve the error
    messages) and any of: algorithm "muon" or "adamw", lr, weight_decay (decoupled); for Muon
    momentum, nesterov, ns_steps, coefficients, scale ("rms" or "spectral"), column_blocks
    (orthogonalise a 2-D matrix in that many column blocks: heads of an output projection); for
    AdamW betas, eps. Parameters are plain tensors or DTensors with Shard and Replicate placements.

    replicas: a process group whose ranks hold the same plain tensors and, in step(), the same
    gradients: they share the units. ns_dtype: dtype of the matrix products, and of the wire; on a
    CPU without bf16 instructions fp32 is some 20 times faster. newton_schulz: the iteration, see orthogonalize. check_gradients: NaN and inf raise
    before anything has changed. task_bytes, window: size of a task per rank, and how many are in
    flight. Set .events to [] to log (seconds, task, event); .traffic counts the collectives and
    bytes received of the last step. A DTensor without gradient counts as gradient 0 (AdamW leaves
    it alone). State is fp32. Weights in bf16 are rounded by chance, alike on every rank that holds
    a copy."""

    def __init__(
        self,
        param_groups,
        lr=1e-3,
        momentum=0.95,
        nesterov=True,
        weight_decay=0.0,
        ns_steps=5,
        coefficients="quintic",
        scale="rms",
        betas=(0.9, 0.95),
        eps=1e-8,
        replicas=None,
        ns_dtype=torch.bfloat16,
        newton_schulz=newton_schulz,
        check_gradients=True,
        task_bytes=32 << 20,
        window=3,
    ):
        self.names, self.leaves, self.plans, self.events, self.traffic = {}, [], {}, None, {}
        self.replicas, self.ns_dtype, self.check_gradients = replicas, ns_dtype, check_gradients
        self.newton_schulz = newton_schulz
        self.task_bytes, self.window = task_bytes, window
        # fp16 has no room for a gradient that has not been divided by its norm: it travels as bf16
        self.wire_dtype = torch.bfloat16 if ns_dtype == torch.float16 else ns_dtype
        super().__init__(
            param_groups,
            dict(
                lr=lr,
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=weight_decay,
                ns_steps=ns_steps,
                coefficients=coefficients,
                scale=scale,
                betas=betas,
                eps=eps,
                algorithm="muon",
                column_blocks=1,
            ),
        )

    def add_param_group(self, group):
        """Check a group by name, and make its state now, in its placement: a checkpoint needs no
        first step to know it."""
        number, group, params = len(self.param_groups), dict(group), group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        names = group.pop("names", [f"parameter {i} of group {number}" for i in range(len(params))])
        pairs = [
            p if isinstance(p, tuple) else (name, p) for name, p in zip(names, params, strict=True)
        ]
        options = {**self.defaults, **group}
        for name, p in pairs:
            twins = (
                [self.names[p]] if p in self.names else [other for other, q in pairs if q is p][1:]
            )
            if twins:
                raise ValueError(f"{name}: given twice, already held as {twins[0]}")
            check_parameter(name, p, options)
        # Only what passed every check is kept: a group that is refused leaves no trace.
        super().add_param_group({**group, "params": [p for _, p in pairs]})
        for name, p in pairs:
            self.names[p] = name
            adamw, wide = options["algorithm"] == "adamw", torch.promote_types(
                p.dtype, torch.float32
            )
            zeros = lambda dtype: torch.zeros_like(p, dtype=dtype)
            self.state[p] = (
                dict(exp_avg=zeros(wide), exp_avg_sq=zeros(wide))
                if adamw
                else dict(momentum=zeros(torch.float32))
            )
            if adamw or p.dtype == torch.bfloat16:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32)
        self.find_leaves()

    def find_leaves(self):
        """What follows from the groups: who holds what of each Muon parameter. Plans are made anew
        at the next step."""
        self.leaves, self.plans = [], {}
        for number, group in enumerate(self.param_groups):
            for p in group["params"] if group["algorithm"] == "muon" else ():
                self.leaves.append(
                    Leaf(p, self.names[p], number, group["column_blocks"], self.replicas)
                )
                self.leaves[-1].order = len(self.leaves)

    def __getstate__(self):
        """What copy.deepcopy and pickle take along: torch's part, our settings and the names.
        Leaves and plans follow from them. A process group is lent to the copy (deepcopy) and
        refused by pickle: another process does not have it."""
        names = [[self.names[p] for p in group["params"]] for group in self.param_groups]
        return {
            **super().__getstate__(),
            **{key: getattr(self, key) for key in SETTINGS},
            "names_by_group": names,
            "replicas": Lent(self.replicas) if self.replicas is not None else None,
        }

    def __setstate__(self, state):
        """The other end of __getstate__; torch's load_state_dict calls it, too, with groups and
        state alone."""
        state = dict(state)
        names = state.pop("names_by_group", None)
        if names is not None:
            state["replicas"] = state["replicas"].group if state["replicas"] is not None else None
            state.update(events=None, traffic={})
        super().__setstate__(state)
        if names is not None:
            self.names = {
                p: name
                for group, row in zip(self.param_groups, names)
                for p, name in zip(group["params"], row)
            }
        self.find_leaves()

    def load_state_dict(self, state_dict):
        """Exact resume: torch casts state to the parameter's dtype, which would round the fp32
        state of bf16 weights."""
        super().load_state_dict(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        for n, p in zip(numbers, (p for group in self.param_groups for p in group["params"])):
            if p.dtype != torch.float32:
                self.state[p].update(
                    {
                        key: t.to(p.device, copy=True)
                        for key, t in state_dict["state"].get(n, {}).items()
                    }
                )

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        self.traffic = dict(collectives=0, bytes_received=0)
        if self.check_gradients:
            self.refuse_bad_gradients()
        for number, group in enumerate(self.param_groups):
            if group["algorithm"] == "adamw":
                self.adamw(group, number)
        leaves = [
            leaf
            for leaf in self.leaves
            if leaf.param.grad is not None or isinstance(leaf.param, DTensor)
        ]
        for state in (
            self.state[leaf.param] for leaf in leaves if leaf.param.dtype == torch.bfloat16
        ):
            state["step"] += 1
        key = tuple(map(id, leaves))
        if leaves and key not in self.plans:
            self.plans[key] = plan_tasks(
                leaves, self.wire_dtype.itemsize, self.task_bytes, self.window
            )
        if leaves:
            self.advance(self.plans[key])
        return loss

    def advance(self, tasks):
        """Round robin over a window of generators: while the messages of one are under way, another
        multiplies."""
        waiting, live = deque(self.run(task) for task in tasks), deque()
        while waiting or live:
            task = waiting.popleft() if waiting and len(live) < self.window else live.popleft()
            if next(task, "done") != "done":
                live.append(task)

    def run(self, task):
        """One task from momentum to new weights. It yields where it would wait; its frame owns the
        buffers on the wire."""
        fresh = self.momentum(task)  # {(leaf, n): (rows here, columns here)}
        stacks, slots = stack_units(task.mine, self.wire_dtype)
        home = [unit for unit in task.mine if unit.leaf.me in unit.leaf.holders[unit.n]]
        if task.gathers:
            receive = self.exchange(
                task,
                task.gather,
                [unit.here(fresh[unit.leaf, unit.n]) for _, unit, _ in task.gather],
                task.arrive,
            )
            self.log(task, "send")
        copy(
            [slots[unit][unit.piece(task.leaf.me)] for unit in home],
            [unit.here(fresh[unit.leaf, unit.n]) for unit in home],
        )
        if task.gathers:
            yield
            copy([slots[unit][piece] for _, unit, piece in task.arrive], receive())
        self.log(task, "multiply")
        for (number, *_), X in stacks.items():
            group = self.param_groups[number]
            steps, coefficients = group["ns_steps"], group["coefficients"]
            orthogonalize(X, steps, coefficients, self.ns_dtype, X, self.newton_schulz)
        self.log(task, "multiplied")
        if task.moves:
            receive = self.exchange(
                task,
                task.spread,
                [slots[unit][piece] for _, unit, piece in task.spread],
                task.settle,
            )
            self.log(task, "return")
        self.decay(task)
        self.apply(home, [slots[unit][unit.piece(task.leaf.me)] for unit in home])
        if task.moves:
            yield
            self.apply([unit for _, unit, _ in task.settle], receive())
        self.log(task, "done")

    def momentum(self, task):
        """Momentum and Nesterov in fp32 on what lies here. A convex sum, not g + mu m: the scale is
        free, the rounding better."""
        fresh = {}
        for leaf, lo, hi in task.slabs:
            group, first = self.param_groups[leaf.group], leaf.block[0]
            # (n, rows here, columns here)
            m = stacked(local(self.state[leaf.param]["momentum"]))[lo - first : hi - first]
            g = leaf.param.grad
            g = (
                torch.zeros_like(m)
                if g is None
                else stacked(local(g))[lo - first : hi - first].float()
            )
            m.lerp_(g, 1 - group["momentum"])
            u = torch.lerp(g, m, group["momentum"]) if group["nesterov"] else m
            fresh.update(((leaf, n), u[n - lo]) for n in range(lo, hi))
        return fresh

    def decay(self, task):
        for leaf, lo, hi in task.slabs:
            group, first = self.param_groups[leaf.group], leaf.block[0]
            if group["weight_decay"] and leaf.param.dtype != torch.bfloat16:
                stacked(local(leaf.param))[lo - first : hi - first].mul_(
                    1 - group["lr"] * group["weight_decay"]
                )

    def apply(self, units, pieces):
        """Add each orthogonal piece to the weights here: one fused call per step length. bf16
        weights: one rounding, decay included."""
        by_length = defaultdict(lambda: ([], []))
        for unit, piece in zip(units, pieces):
            leaf, group = unit.leaf, self.param_groups[unit.leaf.group]
            weight, length = unit.here(leaf.matrix(leaf.param, unit.n)), group["lr"] * step_scale(
                group["scale"], *unit.shape
            )
            if weight.dtype == torch.bfloat16:
                exact = (
                    weight.float()
                    .mul_(1 - group["lr"] * group["weight_decay"])
                    .sub_(piece, alpha=length)
                )
                rows, columns = unit.piece(leaf.me)
                start = (rows.start, unit.column + columns.start)
                round_by_chance(
                    weight,
                    exact,
                    (self.state[leaf.param]["step"].item(), leaf.order, unit.n),
                    start,
                )
                continue
            weights, updates = by_length[length]
            weights.append(weight)
            updates.append(piece)
        for length, (weights, updates) in by_length.items():
            torch._foreach_add_(weights, updates, alpha=-length)

    def exchange(self, task, out, tensors, back):
        """Start one all-to-all with exact splits: tensors leave along the routes `out`; the call
        that is returned waits, and gives what came along the routes `back`. Sizes follow from the
        routes, on every rank alike."""
        world, device = len(task.leaf.blocks), task.leaf.param.device
        sizes = [[unit.size(piece) for _, unit, piece in routes] for routes in (out, back)]
        splits = [[0] * world, [0] * world]
        for routes, size, split in zip((out, back), sizes, splits):
            for route, elements in zip(routes, size):
                split[route.rank] += elements
        sent, received = (
            torch.empty(sum(size), dtype=self.wire_dtype, device=device) for size in sizes
        )
        copy(
            [part.view(tensor.shape) for part, tensor in zip(sent.split(sizes[0]), tensors)],
            tensors,
        )
        work = dist.all_to_all_single(
            received, sent, splits[1], splits[0], group=task.leaf.process_group, async_op=True
        )
        self.traffic["collectives"] += 1
        self.traffic["bytes_received"] += received.nbytes

        def receive(sent=sent):  # keeps the sent buffer alive until the wait is over
            work.wait()
            shapes = [(rows.stop - rows.start, -1) for _, _, (rows, _) in back]
            return [part.view(shape) for part, shape in zip(received.split(sizes[1]), shapes)]

        return receive

    def log(self, task, event):
        if self.events is not None:
            self.events.append((time.perf_counter(), task.number, event))

    def adamw(self, group, number):
        """AdamW (Loshchilov and Hutter) on what lies here: elementwise, so a shard needs nobody."""
        (b1, b2), lr = group["betas"], group["lr"]
        # Parameters that have seen equally many steps share their constants, and so a few calls for
        # all of them.
        by_step = defaultdict(list)
        for i, p in enumerate(group["params"]):
            if p.grad is not None:
                self.state[p]["step"] += 1
                by_step[self.state[p]["step"].item()].append((i, p))
        for t, numbered in by_step.items():
            params = [p for _, p in numbered]
            m = [local(self.state[p]["exp_avg"]) for p in params]
            v = [local(self.state[p]["exp_avg_sq"]) for p in params]
            # weights in fp32 are themselves
            w = [local(p).to(mean.dtype) for p, mean in zip(params, m)]
            g = [local(p.grad).to(mean.dtype) for p, mean in zip(params, m)]
            torch._foreach_mul_(w, 1 - lr * group["weight_decay"])
            torch._foreach_lerp_(m, g, 1 - b1)
            torch._foreach_mul_(v, b2)
            torch._foreach_addcmul_(v, g, g, 1 - b2)
            deviation = torch._foreach_sqrt(v)
            torch._foreach_div_(deviation, (1 - b2**t) ** 0.5)
            torch._foreach_add_(deviation, group["eps"])
            torch._foreach_addcdiv_(w, m, deviation, -lr / (1 - b1**t))
            for (i, p), updated in zip(numbered, w):
                if p.dtype == torch.bfloat16:
                    round_by_chance(local(p), updated, (t, number, i), start_of(p))
                elif p.dtype != updated.dtype:
                    local(p).copy_(updated)

    def refuse_bad_gradients(self):
        """Raise, on every rank of a mesh alike, before a NaN reaches momentum or a half-done step
        leaves ranks waiting."""
        by_group = defaultdict(list)
        for p, name in self.names.items():
            if (
                isinstance(p.grad, DTensor)
                and isinstance(p, DTensor)
                and p.grad.placements != p.placements
            ):
                raise ValueError(
                    f"{name}: gradient placed {p.grad.placements}, parameter {p.placements}"
                )
            if p.grad is not None or isinstance(p, DTensor):
                by_group[mesh_group(p.device_mesh) if isinstance(p, DTensor) else None].append(p)
        for process_group, params in by_group.items():
            grads = [local(p if p.grad is None else p.grad) for p in params]
            # A rank may hold nothing of a small matrix, and nothing has no largest entry.
            grads = [g if g.numel() else g.new_zeros(1) for g in grads]
            # The largest entry: the sum of squares of large finite numbers would be infinite.
            bad = torch.stack([~n.isfinite() for n in torch._foreach_norm(grads, math.inf)]).to(
                torch.uint8
            )
            if process_group is not None:
                dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=process_group)
                self.traffic["collectives"] += 1
            if bad.any():
                names = [self.names[p] for p, flag in zip(params, bad.tolist()) if flag]
                raise ValueError(f"gradient is NaN or infinite: {', '.join(names)}")


def round_by_chance(weight, exact, seed, start=None):
    """weight (bf16) <- one of the two neighbours of exact (fp32), each with the probability that
    makes the mean exact. Rounded to the nearest, an update of less than 1/512 of its weight would
    be lost, every time. Equal seeds round alike.

    start: where this block begins in the whole tensor, a number per dimension; all zeros unless
    given. A number's noise follows from the seed and its place in the whole: it is the same however
    the tensor is cut, and on every device."""
    noise = noise_of_places(start or (0,) * weight.ndim, weight.shape, seed, weight.device)
    # bf16 is the upper half of fp32
    weight.copy_(((exact.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32))


def noise_of_places(start, shape, seed, device):
    """Random int32 from 0 to 65,535 for the block of this shape that begins at `start`: a hash of
    the seed and of each number's place. Every dimension's places are hashed on their own, as a
    vector, and what is put together once more."""
    noise = torch.full((), hash((*seed, -1)) % 2**31, dtype=torch.int32, device=device)
    for dim, (first, size) in enumerate(zip(start, shape)):
        # The key of a dimension keeps place (1, 2) from the noise of place (2, 1).
        key = hash((*seed, dim)) % 2**31
        places = torch.arange(first, first + size, dtype=torch.int32, device=device)
        noise = noise[..., None] ^ scramble(scramble(places) + key)
    return scramble(noise) & 0xFFFF


def scramble(bits):
    """A hash of each int32 (Chris Wellons' lowbias32): every bit of the result depends on every bit
    of the input."""
    bits = bits ^ (bits >> 16 & 0xFFFF)  # the shift of a signed number drags its sign along
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15 & 0x1FFFF)
    bits = bits * (0x846CA68B - 2**32)  # as a signed number
    return bits ^ (bits >> 16 & 0xFFFF)


def copy(targets, sources):
    if targets:
        # one kernel for many small pieces, and the cast to the wire's dtype
        torch._foreach_copy_(targets, sources)


def stack_units(units, dtype):
    """Room for whole units, equal shapes together: {(group, R, C): (K, R, C)} and {unit: its (R, C)
    in there}."""
    same, stacks, slots = defaultdict(list), {}, {}
    for unit in units:
        same[unit.leaf.group, *unit.shape].append(unit)
    for key, units in same.items():
        stacks[key] = torch.empty(
            len(units), *key[1:], dtype=dtype, device=units[0].leaf.param.device
        )
        slots.update(zip(units, stacks[key]))
    return stacks, slots


def check_parameter(name, param, options):
    """What a group may hold, said with the parameter's name."""
    if options["algorithm"] not in ("muon", "adamw"):
        raise ValueError(f"algorithm is 'muon' or 'adamw', not {options['algorithm']!r} ({name})")
    if options["scale"] not in ("rms", "spectral") or options["coefficients"] not in COEFFICIENTS:
        raise ValueError(
            f"{name}: scale {options['scale']!r} or coefficients {options['coefficients']!r} unknown"
        )
    if isinstance(param, DTensor) and not all(
        type(p) in (Shard, Replicate) for p in param.placements
    ):
        raise ValueError(
            f"{name}: placement {tuple(param.placements)} is not supported, only Shard and Replicate are"
        )
    if options["algorithm"] == "muon":
        if param.ndim not in (2, 3):
            raise ValueError(
                f"{name}: Muon wants matrices (R, C) or stacks (N, R, C), this has shape {tuple(param.shape)}; "
                "put it in an 'adamw' group"
            )
        if not param.numel():
            raise ValueError(
                f"{name}: shape {tuple(param.shape)} has no numbers to train; leave it out"
            )
        blocks = options["column_blocks"]
        if blocks < 1 or blocks > 1 and (param.ndim != 2 or param.shape[1] % blocks):
            raise ValueError(
                f"{name}: {blocks} column blocks do not divide shape {tuple(param.shape)}"
            )


def check_parameters(optimizer, named_parameters):
    """Raise unless the optimizer holds exactly the model's parameters: one that is forgotten is
    never trained, silently."""
    wanted = {p: name for name, p in named_parameters if p.requires_grad}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    missing = [name for p, name in wanted.items() if p not in set(held)]
    foreign = [
        getattr(optimizer, "names", {}).get(p, tuple(p.shape)) for p in held if p not in wanted
    ]
    if missing or foreign:
        raise ValueError(
            f"the optimizer misses {missing} and holds {foreign}, which the model does not train"
        )


# ------------------------------------------------------------------------------------------------------ demo


def layer_shapes(layers, dim=384, heads=6, experts=8, hidden=1024):
    """The matrices of a small MoE decoder, heads and experts stacked."""
    one = {
        "wq": (heads, dim // heads, dim),
        "wk": (heads, dim // heads, dim),
        "wv": (heads, dim // heads, dim),
        "wo": (dim, dim),
        "gate": (experts, hidden, dim),
        "up": (experts, hidden, dim),
        "down": (experts, dim, hidden),
        "shared.gate": (hidden, dim),
        "shared.up": (hidden, dim),
        "shared.down": (dim, hidden),
    }
    return {f"{layer}.{name}": shape for layer in range(layers) for name, shape in one.items()}


def make_parameters(shapes, place=lambda name, tensor: tensor, dtype=torch.float32, device="cpu"):
    """Random parameters with random gradients, the same for every world size."""
    generator, params = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        weight, grad = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
        params[name] = torch.nn.Parameter(place(name, weight))
        params[name].grad = place(name, grad)
    return params


def fork_ranks(world, call, *args):
    """Fork `world` gloo ranks on this machine, run call(rank, world, *args) in each, return what
    they return, by rank."""
    if sys.platform != "linux":  # macOS may hang where a process that has threads is forked
        print(
            "muon.py: this part forks ranks, which is safe on Linux only; the optimizer itself works under torchrun",
            file=sys.stderr,
        )
        sys.exit(2)
    import torch._dynamo  # noqa: F401  optimizers import it on first use: once here instead of in every child

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:

        def rank_main(rank):
            # a forked rank stays on the CPU, whatever cards there are
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(f"{folder}/store", world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=60),
            )
            torch.save(call(rank, world, *args), f"{folder}/{rank}")
            dist.barrier()
            dist.destroy_process_group()

        ranks = [
            get_context("fork").Process(target=rank_main, args=(rank,), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        for process in ranks:
            process.kill()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(
                f"exit codes of the ranks: {[process.exitcode for process in ranks]}"
            )
        return [torch.load(f"{folder}/{rank}", weights_only=True) for rank in range(world)]


def shard(world):
    """A layout like FSDP's: stacks and matrices by rows. Rows inside the experts, so that no expert
    is whole anywhere."""
    mesh = DeviceMesh("cpu", torch.arange(world), mesh_dim_names=("shard",))
    return lambda name, tensor: distribute_tensor(
        tensor, mesh, [Shard(tensor.ndim - 2)], src_data_rank=None
    )


def demo_rank(rank, world):
    """Three sharded steps with the event log on; returns the whole weights and the log."""
    params = make_parameters(DEMO, shard(world))
    optimizer = Muon([dict(params=list(params.items()))], ns_dtype=torch.float32, lr=0.02)
    for _ in range(3):
        dist.barrier()
        optimizer.events = []
        optimizer.step()
    return (
        {name: p.full_tensor().detach() for name, p in params.items()},
        optimizer.events,
        optimizer.traffic,
    )


DEMO = {
    "q": (6, 64, 384),
    "o": (384, 384),
    "gate": (8, 256, 384),
    "up": (8, 256, 384),
    "down": (8, 384, 256),
}


def draw_timeline(events, path):
    """One row per task of rank 0: when its shards were under way, when it multiplied. Overlap is a
    bar above another."""
    # before the import: a notebook exports its own to what it starts
    os.environ["MPLBACKEND"] = "agg"
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    start, marks = min(t for t, _, _ in events), defaultdict(dict)
    for t, task, event in events:
        marks[task][event] = 1e3 * (t - start)
    figure, axes = plt.subplots(figsize=(9, 0.7 + 0.55 * len(marks)))
    bars = (
        ("send", "multiply", "#9ecae1", "shards to owners"),
        ("multiply", "multiplied", "#e6550d", "Newton-Schulz"),
        ("return", "done", "#a1d99b", "results back"),
    )
    for task, mark in marks.items():
        for begin, end, color, label in bars:
            axes.barh(
                task,
                mark[end] - mark[begin],
                left=mark[begin],
                color=color,
                label=label if task == min(marks) else None,
            )
    axes.set(
        xlabel="ms, rank 0 of 4",
        ylabel="task",
        yticks=sorted(marks),
        title="One task's shards travel, another multiplies",
    )
    axes.invert_yaxis(), axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def demo():
    torch.set_num_threads(1)
    G = (
        torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
        / torch.arange(1, 65)[:, None]
    )
    print(
        "singular values of a 64 x 256 matrix, rows falling off as 1/k\n"
        "                 largest   median  smallest   cosine to U V^T"
    )
    U, S, V = torch.linalg.svd(G, full_matrices=False)
    for name, X in [("before", G)] + [
        (name, orthogonalize(G, coefficients=name)) for name in COEFFICIENTS
    ]:
        S = torch.linalg.svdvals(X)
        print(
            f"{name:15s}  {S[0]:7.3f}  {S[31]:7.3f}  {S[-1]:8.3f}   {(X * (U @ V)).sum() / X.norm() / 8:.4f}"
        )
    single = make_parameters(DEMO)
    optimizer = Muon([dict(params=list(single.items()))], ns_dtype=torch.float32, lr=0.02)
    for _ in range(3):
        optimizer.step()
    ranks = fork_ranks(4, demo_rank)
    error = max(
        (whole[name] - p).abs().max().item() for whole, _, _ in ranks for name, p in single.items()
    )
    events, traffic = ranks[0][1:]
    draw_timeline(events, Path("out/muon.png"))
    when = {(task, event): t for t, task, event in events}
    lead = 1e3 * (when[1, "multiply"] - when[2, "send"])
    print(
        f"Four ranks ({traffic['collectives']} collectives, {traffic['bytes_received'] / 1e6:.1f} MB received per step) end three "
        f"steps with weights that differ from one process by {error}; task 2 was on the wire {lead:.1f} ms before task 1 "
        f"multiplied (out/muon.png)."
    )


def refuse(message):
    print(f"muon.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def main(argv):
    if "--bench" in argv:
        refuse("--bench has moved: python -m benchmarks.muon")
    parser = argparse.ArgumentParser(
        description="Muon, alone", usage=argparse.SUPPRESS, allow_abbrev=False
    )
    parser.error = refuse
    parser.parse_args(argv)
    try:
        demo()
    except OSError as error:
        refuse(f"{error.filename or 'cannot write'}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
