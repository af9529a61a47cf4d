"""Muon: an optimizer that makes every direction of a weight matrix move by the same amount, on one
rank or a thousand.

The momentum of a matrix is dominated by a few singular directions. Muon replaces it by the nearest
semi-orthogonal matrix, so that rare directions learn as fast as common ones. A few matrix products
do that (Newton-Schulz), no SVD:

    m <- mu m + (1-mu) g        u = (1-mu) g + mu m  (Nesterov)        X = u / |u|_F
    X <- (a I + b A + c A^2) X  with A = X X^T, five times             acts on singular values only
    w <- (1 - lr wd) w - lr scale X                                    scale: 0.2 sqrt(max(R, C))

A step has three phases on 1..N ranks (Muon.run_task):

    1. momentum        elementwise, each rank on the part of each matrix that it holds
    2. orthogonalize   all-to-all gathers whole matrices on their owners, Newton-Schulz runs once
                       per matrix, a second all-to-all sends the results back
    3. apply           elementwise again: weight decay and update, each rank on its part

Stated by Cursor (https://cursor.com/blog/composer-2-5): Newton-Schulz runs at the model's natural
granularity, per attention head and per expert; same-shaped tensors are batched; all-to-all as in
phase 2; asynchronous, while one task waits on communication others advance; the result equals
full-matrix Muon. Derived here from that: the owner of each unit follows from shapes alone. So no
rank ever asks another for a size, nothing is padded, and a unit that already lies whole on a rank
stays there.

newton_schulz has a fast twin, gram_newton_schulz, which steps aside where one edits it
(fast/twins.py). Ours, for want of a public value: learning rate, momentum, coefficients, scale.
Left out: weights in bf16 that keep small updates (fast/stochastic_rounding.py), refusal of a
gradient that is NaN (hsdp.clip_grad_norm), fused kernels and symmetric GEMMs (they would save a
third of the FLOPs of a square matrix), a second level of all-to-all for thousands of ranks, strided
shards (tensor parallelism and FSDP on one dimension).

    N      matrices in a stack (heads, experts)       R, C   rows and columns of a matrix
    unit   matrix n of a stack: has an owner, and travels as a whole; its column blocks, if it has
           any, are orthogonalized one by one
    shard  the part of a parameter that one rank holds
    piece  the part of a unit that lies in one shard

python muon.py    singular values, four ranks against one, a timeline (out/muon.png)
"""

import math
import sys
import time
from collections import defaultdict, deque, namedtuple
from itertools import compress

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.adamw import adamw

# ---------------------------------------------------------------- mathematics

# (a, b, c) of the polynomial (Keller Jordan)
COEFFICIENTS = 3.4445, -4.7750, 2.0315


def newton_schulz(X, steps=5):
    """X (N, R, C), of norm 1 at most -> about U V^T of its singular value decomposition U S V^T:
    each step maps every singular value s to a s + b s^3 + c s^5 and leaves U and V alone."""
    a, b, c = COEFFICIENTS
    # On the wide form X X^T is the smaller of the two squares.
    tall = X.shape[-2] > X.shape[-1]
    X = X.mT if tall else X  # (N, R, C), R <= C
    for _ in range(steps):
        A = X @ X.mT  # (N, R, R)
        B = b * A + c * A @ A  # (N, R, R)
        X = a * X + B @ X  # (N, R, C)
    return X.mT if tall else X


def step_scale(rows, columns):
    """The factor of one update. It gives the entries an RMS of about 0.2, as AdamW's have
    (Moonlight), so that both share a learning rate and a weight decay."""
    return 0.2 * max(rows, columns) ** 0.5


def orthogonalize(G, steps=5, dtype=torch.bfloat16, iterate=newton_schulz):
    """The nearest semi-orthogonal matrix, roughly: singular values go to about 1. G (..., R, C) ->
    same shape and dtype.

    dtype: in which the matrices are multiplied. iterate: a function to use in place of
    newton_schulz. Many small matrices are multiplied as one batch, and the result of a matrix does
    not depend on the others of its batch."""
    assert G.ndim >= 2, f"orthogonalize wants (..., R, C), got shape {tuple(G.shape)}"
    # All leading dimensions make one stack. On a CPU zeros fill rows and columns up to multiples of
    # 8: without them the last bit of a product would depend on where in memory the matrix begins,
    # and so on its batch.
    R, C = G.shape[-2:]
    X = G.reshape(-1, R, C)
    if G.device.type == "cpu":
        X = torch.nn.functional.pad(X, (0, -C % 8, 0, -R % 8))

    # Zeros stay zeros in every product, so they are cut off again at the end.
    X = iterate(unit_norm(X).to(dtype), steps)
    return X[:, :R, :C].reshape(G.shape).to(G.dtype)


# An integer type of as many bits as the number, and those of its bits that hold the exponent
EXPONENT = {
    torch.float64: (torch.int64, 0x7FF0 << 48),
    torch.float32: (torch.int32, 0x7F80 << 16),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}


def unit_norm(X):
    """X (N, R, C) / its Frobenius norm, an upper bound of the largest singular value. A matrix of
    zeros stays one."""
    # Squares of very small or large entries would leave the range of the dtype. Division by a power
    # of two prevents that and changes no digit: the one at or below the largest entry, which is
    # that entry without its mantissa.
    tiny = torch.finfo(X.dtype).tiny
    largest = torch.linalg.vector_norm(X, math.inf, dim=(-2, -1), keepdim=True).clamp(min=tiny)
    bits, exponent = EXPONENT[X.dtype]
    X = X / (largest.view(bits) & exponent).view(X.dtype)
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)  # (N, 1, 1)
    return X / norm.clamp(min=tiny)


# ---------------------------------------------------------------- who holds what, who computes what


def to_local(tensor):
    """What this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def as_stack(tensor):
    """A 2-D parameter is a stack of one."""
    return tensor if tensor.ndim == 3 else tensor[None]


def shard_of(shape, mesh_shape, placements, coordinate):
    """(n0, n1, r0, r1, c0, c1): the shard at one coordinate of a mesh. Each dimension is cut as
    torch.chunk cuts it: equal pieces, the last ones smaller or empty."""
    # Each Shard placement narrows its dimension to one piece; two on one dimension narrow it twice.
    spans = [[0, size] for size in shape]
    for ranks, placement, index in zip(mesh_shape, placements, coordinate):
        if isinstance(placement, Shard):
            lo, hi = spans[placement.dim]
            size = -(-(hi - lo) // ranks)  # rounded up
            start = min(lo + index * size, hi)
            spans[placement.dim] = [start, min(start + size, hi)]

    # A matrix is a stack of one, a vector a stack of one row.
    spans = [[0, 1]] * (3 - len(shape)) + spans
    return tuple(edge for span in spans for edge in span)


class ShardedParam:
    """A Muon parameter as a stack (N, R, C), and the shard of it that each rank holds. All of it
    follows from shapes: no rank asks another."""

    def __init__(self, param, number, group, column_blocks, replicas):
        self.param = param
        self.number = number  # among all Muon parameters of the optimizer
        self.group = group  # index of its group in the optimizer
        self.shape = (1,) * (3 - param.ndim) + tuple(param.shape)  # (N, R, C)
        self.column_blocks = column_blocks  # orthogonalized one by one

        # Plain replicas are laid out as a parameter that is replicated over all of a mesh.
        self.process_group, self.rank = None, 0
        if isinstance(param, DTensor):
            self.read_mesh(param.device_mesh, param.placements)
        elif replicas is not None:
            self.read_mesh(replicas, [Replicate()] * replicas.ndim)
        else:
            self.shards = [shard_of(param.shape, (), (), ())]  # by rank
            self.copies = [()]  # by rank: the copy of the parameter that its shard belongs to

    def read_mesh(self, mesh, placements):
        """Fill process_group, rank, shards and copies of a parameter that lies on a mesh."""
        self.process_group = mesh_group(mesh)
        ranks = dist.get_process_group_ranks(self.process_group)
        self.rank = ranks.index(dist.get_rank())

        # Ranks that agree on the replicated mesh dimensions hold one whole copy of the parameter
        # between them.
        replicated = [isinstance(placement, Replicate) for placement in placements]
        self.shards, self.copies = [], []
        for rank in ranks:
            coordinate = tuple((mesh.mesh == rank).nonzero()[0].tolist())
            self.shards.append(shard_of(self.param.shape, mesh.shape, placements, coordinate))
            self.copies.append(tuple(compress(coordinate, replicated)))

        # What torch has dealt must be what is calculated here.
        n0, n1, r0, r1, c0, c1 = self.shards[self.rank]
        expected, held = (n1 - n0) * (r1 - r0) * (c1 - c0), to_local(self.param).numel()
        assert held == expected, f"{held} numbers of {self.shape} here, {placements}: {expected}"


def mesh_group(mesh):
    """One process group over all ranks of a mesh. Meshes that span all ranks of the job share one
    group, and so their parameters share tasks."""
    if set(mesh.mesh.flatten().tolist()) == set(range(dist.get_world_size())):
        return dist.group.WORLD
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


class Unit:
    """Matrix n of a stack: what has an owner, and travels as a whole."""

    def __init__(self, sharded, n):
        self.sharded, self.n = sharded, n
        self.owner = 0  # the rank that orthogonalizes it
        self.shape = sharded.shape[1:]  # (R, C)
        # A step of Newton-Schulz costs about r r c for each of its blocks of r x c, r <= c.
        width = self.shape[1] // sharded.column_blocks
        self.cost = math.prod(self.shape) * min(self.shape[0], width)

        # {rank that holds some of it: its piece, as slices (rows, columns)}
        self.pieces = {}
        for rank, (n0, n1, r0, r1, c0, c1) in enumerate(sharded.shards):
            if n0 <= n < n1 and r0 < r1 and c0 < c1:
                self.pieces[rank] = slice(r0, r1), slice(c0, c1)

    def is_whole_on(self, rank):
        return rank in self.pieces and piece_size(self.pieces[rank]) == math.prod(self.shape)

    def travels(self):
        """Does any rank but the owner hold a piece of it?"""
        return any(rank != self.owner for rank in self.pieces)

    def local(self, tensor):
        """What this rank holds of it, in a tensor shaped like the parameter: (rows here, columns
        here)."""
        first = self.sharded.shards[self.sharded.rank][0]
        return as_stack(to_local(tensor))[self.n - first]


def piece_size(piece):
    rows, columns = piece
    return (rows.stop - rows.start) * (columns.stop - columns.start)


def assign_owners(units):
    """Which rank orthogonalizes which unit, from shapes alone. A unit that lies whole on a rank
    stays there, on the least loaded one if several hold it. The others may go anywhere."""
    load = [0] * len(units[0].sharded.shards)
    choices = {}
    for unit in units:
        whole = [rank for rank in unit.pieces if unit.is_whole_on(rank)]
        choices[unit] = whole or range(len(load))

    # Those that can go to few ranks come first. Among the others cheap ones come last, so that they
    # even out the loads.
    for unit in sorted(units, key=lambda unit: (len(choices[unit]), -unit.cost)):
        unit.owner = min(choices[unit], key=load.__getitem__)
        load[unit.owner] += unit.cost


# a piece (rows, columns) of a unit that crosses the wire to or from a rank
Route = namedtuple("Route", "rank unit piece")


class MuonTask:
    """Units that are computed, and travel, together. Routes say which pieces cross the wire, in
    which order:

    sends           momentum of units that others own, to their owners
    recvs           momentum of the units that this rank owns, from whoever holds a piece
    result_sends    the orthogonalized units of this rank, back to whoever holds a piece
    result_recvs    the orthogonalized units of others, from their owners"""

    def __init__(self, units):
        sharded = units[0].sharded  # what all of them share: group, rank, device
        self.process_group, self.device = sharded.process_group, sharded.param.device
        self.rank, self.world = sharded.rank, len(sharded.shards)
        self.number = 0  # in the log of events

        # This rank orthogonalizes the units that it owns. Of some it also holds a piece itself, as
        # it does of units that others own.
        self.owned = [unit for unit in units if unit.owner == self.rank]
        self.held = [unit for unit in units if self.rank in unit.pieces]
        self.own_pieces = [unit for unit in self.held if unit.owner == self.rank]

        # Sorted by rank, as all-to-all wants it. The sort is stable, so within a rank both ends
        # keep the order of the units.
        self.sends, self.recvs, self.result_sends, self.result_recvs = [], [], [], []
        for unit in units:
            self.add_routes(unit)
        for routes in (self.sends, self.recvs, self.result_sends, self.result_recvs):
            routes.sort(key=lambda route: route.rank)

        # Every rank takes part in a collective, also one that neither sends nor receives.
        self.gathers = any(not unit.is_whole_on(unit.owner) for unit in units)
        self.returns = any(unit.travels() for unit in units)

    def add_routes(self, unit):
        """Add the routes of one unit that begin or end on this rank."""
        owner, copies = unit.owner, unit.sharded.copies
        for rank, piece in unit.pieces.items():
            # The owner collects pieces from its own copy of the parameter and sends results to all
            # copies. That way the all-gather over copies costs no collective of its own.
            same_copy = copies[rank] == copies[owner]

            # A piece that stays on its rank needs no route, and two other ranks make their own.
            if rank != owner and rank == self.rank:
                route = Route(owner, unit, piece)
                self.result_recvs.append(route)
                if same_copy:
                    self.sends.append(route)
            elif rank != owner and owner == self.rank:
                route = Route(rank, unit, piece)
                self.result_sends.append(route)
                if same_copy:
                    self.recvs.append(route)


WINDOW = 3  # tasks in flight at once
# Bytes of a task per rank. On a CPU it fits the cache; on a GPU it is large, since each costs some
# launches.
CPU_TASK, GPU_TASK = 3 << 20, 32 << 20


def plan_tasks(sharded_params, itemsize):
    """Cut all units into tasks. Units that travel: per process group about three tasks, so that
    there is something to overlap, and more where a task would pass its size per rank. Units that
    stay: tasks of that size, which fill the waiting time."""
    by_group = defaultdict(list)
    for sharded in sharded_params:
        units = [Unit(sharded, n) for n in range(sharded.shape[0])]
        by_group[sharded.process_group].extend(units)

    moving, staying = [], []
    for units in by_group.values():
        assign_owners(units)

        # Most expensive first. What stays on another rank is not our work.
        units.sort(key=lambda unit: (-unit.cost, unit.shape))
        sharded = units[0].sharded
        travelling = [unit for unit in units if unit.travels()]
        at_home = [u for u in units if not u.travels() and u.owner == sharded.rank]

        third = itemsize * sum(math.prod(unit.shape) for unit in travelling) // 3
        size = CPU_TASK if sharded.param.device.type == "cpu" else GPU_TASK
        moving += cut_tasks(travelling, itemsize, min(third, size * len(sharded.shards)))
        staying += cut_tasks(at_home, itemsize, size)

    for number, task in enumerate(moving + staying, start=1):
        task.number = number
    # Tasks at home come right after the first that travel: they multiply while messages are under
    # way.
    return moving[: WINDOW - 1] + staying + moving[WINDOW - 1 :]


def cut_tasks(units, itemsize, bound):
    """Tasks that close as soon as they hold `bound` bytes."""
    tasks, batch, size = [], [], 0
    for unit in units:
        batch.append(unit)
        size += itemsize * math.prod(unit.shape)
        if size >= bound or unit is units[-1]:
            tasks.append(MuonTask(batch))
            batch, size = [], 0
    return tasks


def measure_routes(routes, world):
    """-> how many elements the piece of each route has, and how many go to or come from each
    rank"""
    sizes, by_rank = [], [0] * world
    for rank, _, piece in routes:
        sizes.append(piece_size(piece))
        by_rank[rank] += sizes[-1]
    return sizes, by_rank


def copy_tensors(targets, sources):
    if targets:
        # one kernel for many small pieces, and the cast to the wire's dtype
        torch._foreach_copy_(targets, sources)


def allocate_matrices(units, dtype):
    """Memory for whole units, those of equal shape in one stack: {(group, R, C): stack (N, R, C)}
    and {unit: its matrix (R, C) in a stack}."""
    same, stacks, matrices = defaultdict(list), {}, {}
    for unit in units:
        same[unit.sharded.group, *unit.shape].append(unit)
    for key, units in same.items():
        device = units[0].sharded.param.device
        stacks[key] = torch.empty(len(units), *key[1:], dtype=dtype, device=device)  # (N, R, C)
        matrices.update(zip(units, stacks[key]))
    return stacks, matrices


def is_turned(blocks):
    """On a GPU, where each product costs a launch, tall blocks are turned and multiplied with the
    wide ones. On a CPU the norm of a turned one would be summed in another order."""
    return blocks.device.type != "cpu" and blocks.shape[-2] > blocks.shape[-1]


# ---------------------------------------------------------------- the optimizer


class Muon(torch.optim.Optimizer):
    """Muon for matrices and stacks of matrices, AdamW for everything else, on one rank or sharded
    over many.

    param_groups: dicts with `params` (tensors or (name, tensor) pairs; names serve the error
    messages) and any of: algorithm "muon" or "adamw", lr, weight_decay (decoupled); for Muon
    momentum, nesterov, ns_steps, column_blocks (orthogonalize a 2-D matrix in that many column
    blocks: heads of an output projection); for AdamW betas, eps. Parameters are plain tensors or
    DTensors with Shard and Replicate placements.

    replicas: a DeviceMesh whose ranks hold the same plain tensors and, in step(), the same
    gradients: each rank orthogonalizes some of the units for all. ns_dtype: dtype of the matrix
    products, and of the wire, bf16 or fp32; on a CPU without bf16 instructions fp32 is much
    faster. newton_schulz: the iteration, see orthogonalize.

    Set .events to [] to log (seconds, task, event); .traffic counts the collectives and bytes
    received of the last step. A DTensor without gradient counts as gradient 0 (AdamW leaves it
    alone). State is fp32."""

    def __init__(
        self,
        param_groups,
        lr=1e-3,
        momentum=0.95,
        nesterov=True,
        weight_decay=0.0,
        ns_steps=5,
        betas=(0.9, 0.95),
        eps=1e-8,
        replicas=None,
        ns_dtype=torch.bfloat16,
        newton_schulz=newton_schulz,
    ):
        self.names = {}  # parameter -> its name
        # plans: {numbers of the parameters that take part in a step: its tasks}
        self.sharded_params, self.plans = [], {}
        self.events, self.traffic = None, {}
        self.replicas, self.ns_dtype, self.newton_schulz = replicas, ns_dtype, newton_schulz
        # fp16 has no numbers below 6e-8: it would lose small gradients.
        if ns_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"ns_dtype must be bfloat16 or float32, not {ns_dtype}")

        # Last, because torch calls add_param_group from here, which needs all of the above.
        defaults = dict(algorithm="muon", lr=lr, weight_decay=weight_decay)
        of_muon = dict(momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, column_blocks=1)
        super().__init__(param_groups, {**defaults, **of_muon, "betas": betas, "eps": eps})

    def add_param_group(self, group):
        """Check a group, and make its state now, placed as its parameters are. A checkpoint is
        loaded in place, so the state must be there before the first step."""
        # A parameter comes with a name, or is called by its place.
        super().add_param_group(dict(group))
        group, index = self.param_groups[-1], len(self.param_groups) - 1
        unnamed = [f"parameter {i} of group {index}" for i in range(len(group["params"]))]
        for p, name in zip(group["params"], group.get("param_names", unnamed)):
            check_parameter(name, p, group)
            self.names[p] = name
            self.state[p] = make_state(p, group["algorithm"])
            if group["algorithm"] == "muon":
                number, blocks = len(self.sharded_params) + 1, group["column_blocks"]
                sharded = ShardedParam(p, number, index, blocks, self.replicas)
                self.sharded_params.append(sharded)
        self.plans = {}  # made anew at the next step

    def load_state_dict(self, state_dict):
        """As torch's, which casts state to the dtype of the weights: here it stays fp32."""
        super().load_state_dict(state_dict)
        # Saved state is keyed by number, ours by parameter: the groups give the pairs.
        for saved, group in zip(state_dict["param_groups"], self.param_groups):
            for number, p in zip(saved["params"], group["params"]):
                if p.dtype != torch.float32:
                    for key, tensor in state_dict["state"].get(number, {}).items():
                        self.state[p][key] = tensor.to(p.device, copy=True)

    @torch.no_grad()
    def step(self, closure=None):
        """One update of all parameters. closure, as in torch: computes the loss, which is
        returned."""
        with torch.enable_grad():
            loss = closure() if closure else None
        self.traffic = dict(collectives=0, bytes_received=0)
        for p, name in self.names.items():
            check_gradient(name, p)

        # AdamW is elementwise: each rank updates its shards alone.
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                self.adamw_step(group)

        # Muon. Every rank must take part in the same tasks, so a sharded parameter without gradient
        # goes along, with gradient 0.
        active = []
        for sharded in self.sharded_params:
            if sharded.param.grad is not None or isinstance(sharded.param, DTensor):
                active.append(sharded)

        # The plan follows from shapes: it is made once for a set of parameters.
        key = tuple(sharded.number for sharded in active)
        if key not in self.plans:
            self.plans[key] = plan_tasks(active, self.ns_dtype.itemsize)
        self.run_tasks(self.plans[key])
        return loss

    def run_tasks(self, tasks):
        """Round robin over a window of generators: while the messages of one are under way, another
        multiplies."""
        waiting, live = deque(self.run_task(task) for task in tasks), deque()
        while waiting or live:
            # Fill the window first, then go on with whichever has waited longest.
            task = waiting.popleft() if waiting and len(live) < WINDOW else live.popleft()
            if next(task, "done") != "done":
                live.append(task)

    def run_task(self, task):
        """One task from gradients to new weights, in three phases. It yields where it would wait
        for messages. Its local variables keep the buffers on the wire alive."""
        # Phase 1: momentum of what lies here, {unit: (rows here, columns here)}.
        updates = self.update_momentum(task)

        # Phase 2: orthogonalize whole matrices.
        # Pieces of units that other ranks own leave for their owners. Meanwhile the pieces of our
        # own units are copied into whole matrices.
        stacks, matrices = allocate_matrices(task.owned, self.ns_dtype)
        if task.gathers:
            pieces = [updates[unit] for _, unit, _ in task.sends]
            receive = self.start_all_to_all(task, task.sends, pieces, task.recvs)
            self.log(task, "send")
        own_slots = [matrices[unit][unit.pieces[task.rank]] for unit in task.own_pieces]
        copy_tensors(own_slots, [updates[unit] for unit in task.own_pieces])

        # The missing pieces of our units arrive: now the matrices are whole.
        if task.gathers:
            yield
            copy_tensors([matrices[unit][piece] for _, unit, piece in task.recvs], receive())

        # Newton-Schulz in place. All blocks of equal shape are joined to one stack, since a product
        # of many matrices costs no more launches than one of a few, and come back to where they
        # were.
        self.log(task, "multiply")
        for steps, same in self.group_blocks(stacks):
            parts = [blocks.flatten(0, 1) for blocks in same]
            joined = torch.cat(parts) if len(parts) > 1 else parts[0]
            found = orthogonalize(joined, steps, self.ns_dtype, self.newton_schulz)
            for blocks, part in zip(same, found.split([len(part) for part in parts])):
                blocks.copy_(part.view_as(blocks))
        self.log(task, "multiplied")

        # The results leave for whoever holds a piece.
        if task.returns:
            pieces = [matrices[unit][piece] for _, unit, piece in task.result_sends]
            receive = self.start_all_to_all(task, task.result_sends, pieces, task.result_recvs)
            self.log(task, "return")

        # Phase 3: apply our own results to the weights here, then those of others as they arrive.
        self.apply_updates(task.own_pieces, own_slots)
        if task.returns:
            yield
            self.apply_updates([unit for _, unit, _ in task.result_recvs], receive())
        self.log(task, "done")

    def update_momentum(self, task):
        """Momentum and Nesterov in fp32 on what lies here -> {unit: (rows here, columns here)}.
        Momentum is a convex sum, not g + mu m: orthogonalization ignores the scale, and the
        rounding is better."""
        by_group = defaultdict(list)
        for unit in task.held:
            by_group[unit.sharded.group].append(unit)

        updates = {}
        for number, units in by_group.items():
            momenta, gradients = [], []
            for unit in units:
                param = unit.sharded.param
                momenta.append(unit.local(self.state[param]["momentum"]))
                # A shard without gradient goes along with gradient 0.
                if param.grad is None:
                    gradients.append(torch.zeros_like(momenta[-1]))
                else:
                    gradients.append(unit.local(param.grad).float())

            # lerp with weight 1 - mu: m <- mu m + (1-mu) g, in the optimizer's state.
            group = self.param_groups[number]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            if group["nesterov"]:
                momenta = torch._foreach_lerp(gradients, momenta, group["momentum"])
            updates.update(zip(units, momenta))
        return updates

    def group_blocks(self, stacks):
        """{(group, R, C): stack (N, R, C)} -> [(steps, stacks of blocks (N, blocks, rows, columns)
        that are multiplied together)]. The blocks of a matrix are its column blocks."""
        together = defaultdict(list)
        for (number, *_), stack in stacks.items():
            group = self.param_groups[number]
            blocks = stack.unflatten(2, (group["column_blocks"], -1)).transpose(1, 2)
            blocks = blocks.mT if is_turned(blocks) else blocks
            together[group["ns_steps"], *blocks.shape[2:]].append(blocks)
        return [(steps, same) for (steps, *_), same in together.items()]

    def start_all_to_all(self, task, sends, tensors, recvs):
        """Start one all-to-all with exact splits: tensors leave along the routes `sends`. -> a
        function that waits, and gives what came along the routes `recvs`."""
        # Sender and receiver compute the same sizes from their routes: no message about sizes.
        send_sizes, send_splits = measure_routes(sends, task.world)
        recv_sizes, recv_splits = measure_routes(recvs, task.world)
        send_buffer = torch.empty(sum(send_sizes), dtype=self.ns_dtype, device=task.device)
        recv_buffer = torch.empty(sum(recv_sizes), dtype=self.ns_dtype, device=task.device)

        # One flat buffer: the routes are sorted by rank, so each rank's pieces stand side by side.
        parts = zip(send_buffer.split(send_sizes), tensors)
        copy_tensors([part.view(tensor.shape) for part, tensor in parts], tensors)
        splits, group = (recv_splits, send_splits), task.process_group
        work = dist.all_to_all_single(recv_buffer, send_buffer, *splits, group=group, async_op=True)

        self.traffic["collectives"] += 1
        self.traffic["bytes_received"] += recv_buffer.nbytes

        def receive(sent=send_buffer):  # keeps the sent buffer alive until the wait is over
            work.wait()
            received = []
            for part, (_, _, (rows, _)) in zip(recv_buffer.split(recv_sizes), recvs):
                received.append(part.view(rows.stop - rows.start, -1))
            return received

        return receive

    def apply_updates(self, units, pieces):
        """Weight decay, and the orthogonal pieces, on the weights here."""
        by_rate = defaultdict(lambda: ([], []))  # {(decay, length): (weights, pieces)}
        for unit, piece in zip(units, pieces):
            sharded, group = unit.sharded, self.param_groups[unit.sharded.group]
            weight = unit.local(sharded.param)
            decay = 1 - group["lr"] * group["weight_decay"]
            rows, columns = unit.shape
            length = group["lr"] * step_scale(rows, columns // group["column_blocks"])
            if weight.dtype.itemsize >= 4:
                weights, updates = by_rate[decay, length]
                weights.append(weight)
                updates.append(piece)
            else:
                # Decay and update in fp32, then one rounding.
                exact = weight.float().mul_(decay).sub_(piece, alpha=length)
                self.write_weight(weight, exact, sharded.param, unit)

        # One call for all weights that move by the same factors.
        for (decay, length), (weights, updates) in by_rate.items():
            torch._foreach_mul_(weights, decay)
            torch._foreach_add_(weights, updates, alpha=-length)

    def write_weight(self, weight, exact, param, unit=None):
        """weight (bf16) <- exact (fp32): what lies here of a parameter, or of one of its units.
        Rounded to the nearest, updates of less than 1/512 of a weight are lost."""
        weight.copy_(exact)

    def log(self, task, event):
        if self.events is not None:
            self.events.append((time.perf_counter(), task.number, event))

    def adamw_step(self, group):
        """AdamW (Loshchilov and Hutter) on what lies here, by torch's own function."""
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        states = [self.state[p] for p in params]
        means = [to_local(state["exp_avg"]) for state in states]
        # fp32 weights are changed in place. Narrower ones are changed in an fp32 copy.
        exact = [to_local(p).to(mean.dtype) for p, mean in zip(params, means)]
        adamw(
            exact,
            [to_local(p.grad).to(mean.dtype) for p, mean in zip(params, means)],
            means,
            [to_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=True,  # one call for all weights, wherever they lie
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

        # The copies go back into the weights.
        for p, updated in zip(params, exact):
            if p.dtype != updated.dtype:
                self.write_weight(to_local(p), updated, p)

    def __getstate__(self):
        """What copies and pickle take along: all of it. torch's own part would not do."""
        return self.__dict__


def make_state(p, algorithm):
    """The state of one parameter before its first step: zeros, placed as the parameter is. fp32, or
    fp64 for AdamW on fp64 weights."""
    if algorithm == "muon":
        state = dict(momentum=torch.zeros_like(p, dtype=torch.float32))
    else:
        dtype = torch.promote_types(p.dtype, torch.float32)
        state = {key: torch.zeros_like(p, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
        state["step"] = torch.zeros((), dtype=torch.float32)  # for the correction of the bias
    return state


# ---------------------------------------------------------------- refusals


def split_by_name(named_parameters, heads=1):
    """-> param_groups of Muon for (name, parameter) pairs: AdamW takes vectors and whatever is
    called embed, head or router, Muon the matrices and stacks of matrices. In a stack the matrix of
    each head or expert is orthogonalized by itself (stated); so is each of the `heads` column
    blocks of an output projection, attn.wo, where the heads lie side by side."""
    rest, matrices, outputs = [], [], []
    for name, p in named_parameters:
        if p.ndim < 2 or any(word in name for word in ("embed", "head", "router")):
            rest.append((name, p))
        elif name.endswith("attn.wo"):
            outputs.append((name, p))
        else:
            matrices.append((name, p))
    groups = [
        dict(params=rest, algorithm="adamw", weight_decay=0.0),
        dict(params=matrices, algorithm="muon"),
        dict(params=outputs, algorithm="muon", column_blocks=heads),
    ]
    return [group for group in groups if group["params"]]


def check_parameter(name, param, options):
    """Raise ValueError, with the parameter's name, if a group with these options cannot hold it."""
    shape, blocks = tuple(param.shape), options["column_blocks"]
    placements = param.placements if isinstance(param, DTensor) else ()

    # The first problem is the one reported. AdamW takes any shape.
    problem = ""
    if options["algorithm"] not in ("muon", "adamw"):
        problem = f"algorithm is 'muon' or 'adamw', not {options['algorithm']!r}"
    elif not all(type(placement) in (Shard, Replicate) for placement in placements):
        problem = f"placement {placements} is not supported, only Shard and Replicate are"
    elif options["algorithm"] == "muon":
        if len(shape) not in (2, 3):
            problem = f"Muon wants (R, C) or (N, R, C), not shape {shape}: use an 'adamw' group"
        elif not param.numel():
            problem = f"shape {shape} has no numbers to train; leave it out"
        elif blocks < 1 or blocks > 1 and (len(shape) != 2 or shape[1] % blocks):
            problem = f"{blocks} column blocks do not divide shape {shape}"
    if problem:
        raise ValueError(f"{name}: {problem}")


def check_gradient(name, param):
    """Raise ValueError if a gradient is sparse, or does not lie where its parameter lies."""
    if getattr(param.grad, "layout", torch.strided) != torch.strided:
        raise ValueError(f"{name}: its gradient is sparse; give the embedding sparse=False")
    placements = getattr(param.grad, "placements", None)
    if placements is not None and placements != param.placements:
        raise ValueError(f"{name}: gradient placed {placements}, parameter {param.placements}")


# ---------------------------------------------------------------- demo


def demo():
    from demos.muon_steps import show_ranks, show_singular_values

    torch.set_num_threads(1)
    show_singular_values(orthogonalize)
    show_ranks(Muon)


def main(argv):
    from demos.demonstration import run_demo

    run_demo("muon.py", "Muon, alone", demo, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
