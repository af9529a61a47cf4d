"""hsdp.py: one model on many ranks, its weights cut in two ways: dense weights over narrow groups,
experts over a wide mesh.

Fully sharded data parallelism (FSDP) keeps a piece of every weight per rank and gathers a layer
just before it runs. Experts are most of the weights and need a wide cut to fit; the rest is small
and is best gathered inside a node. So the same ranks form two meshes, and every tensor lies on one
of them only. Context parallelism (CP, a cut of the sequence, on the dense mesh) and expert
parallelism (EP, whole experts per rank, on the expert mesh) therefore overlap on the same GPUs.

Stated by Cursor (cursor.com/blog/composer-2-5; Technical Report, arXiv 2603.24477): FSDP copies
with an all-reduce across them, dense weights in narrow groups, experts on a wider mesh; CP=2 with
EP=8 on 8 GPUs instead of 16; CP folded into the FSDP dimension, all-gather of the latents, zig-zag
chunks; 0.2 s per Muon step at 1T parameters. Ours: gradients are summed, never averaged.
Engine: PyTorch's DeviceMesh, fully_shard and DTensor. Checkpoints over any of these layouts:
command/checkpoints.py.

    dense mesh     (replicate, shard)    replicate * shard ranks: cp neighbours share a batch
    expert mesh    (efsdp, ep)           efsdp * ep ranks, the same ones
    loss           sum over ranks of  nll of my tokens / tokens of all ranks:  gradients add up

Left out: copies of the experts; overlap of the latents' gather with the query projection and of
the token exchange with the shared expert (a step waits for both); random weights drawn in pieces
(every rank draws the whole model once; a published one is read in pieces).

Letters (README has them all): B rows, T tokens of a row, D model width, M tokens, E experts, K
experts of a token, R, C rows and columns of a weight.

    python hsdp.py      two grids on 8 ranks, bytes by layout, equality with one process
    torchrun --nnodes=64 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \
        train.py --ep=8 --cp=2
"""

import math
import os
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

# seconds a collective waits for a rank that is silent; one whose process ended is noticed at once
PATIENCE = 25
# renamed in torch 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ---------------------------------------------------------------- layout: arithmetic


@dataclass(frozen=True)
class Layout:
    """How the ranks are cut in two ways. Ranks are numbered row by row: neighbours in a mesh's last
    direction share a node."""

    world: int = 1
    cp: int = 1  # ranks that share one sequence
    ep: int = 1  # ranks that share one set of experts
    dp_replicate: int = 1  # copies of the dense weights

    def __post_init__(self):
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"{name}={size}: a mesh has at least one rank in every direction")
        dense, ranks = f"dp_replicate={self.dp_replicate} x cp={self.cp}", f"{self.world} ranks"
        if self.world % (self.dp_replicate * self.cp):
            raise ValueError(f"{dense} does not divide the {ranks}")
        if self.world % self.ep:
            raise ValueError(f"ep={self.ep} does not divide the {ranks}")

    @property
    def shard(self):
        """Pieces of a dense weight: one per data rank and cp rank, in one flat dimension. CP ranks
        hold different tokens of one loss, as all data ranks do."""
        return self.world // self.dp_replicate

    @property
    def efsdp(self):
        """Number of pieces that the rows of an expert are cut into"""
        return self.world // self.ep

    @property
    def data(self):
        """Number of different batches. The cp ranks of one group read the same batch."""
        return self.world // self.cp

    def check_expert_shapes(self, shapes):
        """shapes: {name: shape}. Raises unless every expert stack (E, R, C) can be cut: E over ep,
        R over efsdp."""
        for name, shape in shapes.items():
            if not is_expert(name):
                continue
            E, R, _ = shape
            if E % self.ep:
                raise ValueError(f"ep={self.ep} does not divide the {E} experts")
            if R % self.efsdp:
                raise ValueError(f"efsdp={self.efsdp} does not divide the {R} rows of {name}")


def is_expert(name):
    return ".experts." in name


@dataclass(frozen=True)
class Meshes:
    """A layout and its meshes of ranks. One rank alone has no mesh."""

    layout: Layout
    dense: DeviceMesh | None = None  # ([replicate,] shard)
    experts: DeviceMesh | None = None  # (efsdp [, ep])
    context: DeviceMesh | None = None  # (data, cp), where cp > 1

    @property
    def rank(self):
        return dist.get_rank() if self.dense is not None else 0

    @property
    def data_rank(self):  # which of layout.data batches this rank reads
        return self.rank // self.layout.cp


def make_meshes(world=1, cp=1, ep=1, dp_replicate=1, device="cpu", seconds=PATIENCE):
    """Two meshes over the same ranks. Sizes that do not fit: ValueError on every rank, before any
    collective. world=1 needs no process group and makes no mesh. Give more seconds where a rank may
    be late for good reasons (compilation, long rollouts)."""
    # Layout refuses sizes that do not fit.
    layout = Layout(world, cp, ep, dp_replicate)
    if world == 1:
        return Meshes(layout)
    ranks = dist.get_world_size() if dist.is_initialized() else 0
    if ranks != world:
        raise ValueError(f"world={world}, but the process group has {ranks} ranks")

    def make_mesh(keep, **sizes):
        # A dimension of size 1 is left out, except the one whose name the code asks for.
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == keep}
        mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        # A new group does not take over the default group's timeout: it would wait half an hour.
        for group in mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
        return mesh

    return Meshes(
        layout,
        dense=make_mesh("shard", replicate=dp_replicate, shard=layout.shard),
        experts=make_mesh("efsdp", efsdp=layout.efsdp, ep=ep),
        context=make_mesh("cp", data=layout.data, cp=cp) if cp > 1 else None,
    )


# ---------------------------------------------------------------- context parallelism


def zigzag_positions(length, cp, rank):
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
    if cp == 1:
        return t
    return t.index_select(dim, zigzag_positions(t.shape[dim], cp, meshes.rank % cp).to(t.device))


def local_positions(length, meshes, device="cpu"):
    """What model.forward wants as `positions`: (T/cp,), or None where the sequence is whole."""
    cp = meshes.layout.cp
    return None if cp == 1 else zigzag_positions(length, cp, meshes.rank % cp).to(device)


class GatherSequence(torch.autograd.Function):
    """(B, T/cp, entry) -> (B, T, entry), the parts in the order of the ranks. Not the order of the
    sequence, and need not be: the mask compares positions. Backward: every rank has used every
    entry, so a reduce-scatter sums the gradients and gives each rank those of its own part."""

    @staticmethod
    def forward(ctx, t, group):
        ctx.group, cp = group, group.size()
        parts = t.new_empty(cp * t.shape[0], *t.shape[1:])  # (cp * B, T/cp, entry)
        all_gather(parts, t.contiguous(), group=group)
        # Batch first, then the parts of each sequence one after the other.
        return parts.unflatten(0, (cp, -1)).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx, grad):
        cp = ctx.group.size()
        # The way back: parts first, one for each rank, (cp * B, T/cp, entry).
        parts = grad.unflatten(1, (cp, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        mine = parts.new_empty(grad.shape[0], *parts.shape[1:])  # (B, T/cp, entry)
        reduce_scatter(mine, parts, group=ctx.group)
        return mine, None


# ---------------------------------------------------------------- expert parallelism


class Exchange(torch.autograd.Function):
    """All-to-all of rows with uneven splits: send[r] rows go to rank r, receive[r] come from it.
    Backward: the gradients go back the same way."""

    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.way_back = (receive, send, group)
        out = x.new_empty(sum(receive), *x.shape[1:])  # (rows received, D)
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.way_back), None, None, None


def all_to_all_dispatch(x, counts, run, group):
    """MoE.dispatch: x (M*K, D) sorted by global expert, counts (E,) -> each row through its expert,
    back in the same order. Rank r owns experts r*E/ep to (r+1)*E/ep, so rows sorted by expert are
    sorted by rank. A rank may get no row at all."""
    # First the counts: how many rows each rank will send to each of my experts.
    counts = counts.view(group.size(), -1)  # (ep, E/ep) rows that I send
    incoming = torch.empty_like(counts)  # (ep, E/ep) rows that each rank sends me
    dist.all_to_all_single(incoming, counts, group=group)
    # The one wait for the device: the splits are needed on the host.
    send, receive = torch.stack((counts.sum(1), incoming.sum(1))).tolist()

    # The rows arrive by rank, then by expert. The experts want them by expert, then by rank.
    rows = Exchange.apply(x, send, receive, group)  # (rows received, D)
    expert = torch.arange(counts.numel(), device=x.device) % counts.shape[1]  # (ep * E/ep,)
    order = expert.repeat_interleave(incoming.flatten()).argsort(stable=True)  # (rows received,)
    outputs = run(rows[order], incoming.sum(0))

    # Back into the order of arrival, and back to where they came from.
    return Exchange.apply(outputs[order.argsort()], receive, send, group)


# ---------------------------------------------------------------- the model on the meshes


def parallelize(model, meshes, wire=None):
    """Cut `model` (equal on all ranks) over the meshes, in place, and return it. Parameters become
    DTensors, so make the optimizer afterwards. world=1 changes nothing.

    The caller's part: gradients are SUMMED over ranks, never averaged, so the loss of a rank is its
    share of the global mean:

        loss = nll_of_my_tokens.sum() / all_reduce_sum(number_of_my_tokens)
        loss.backward()
        shown = all_reduce_sum(loss.detach())

    The sum over ranks is the loss and gradient of one process, even when masks leave the ranks with
    different numbers of tokens; an average of the ranks' averages is not. Experts need no factor
    of their own. All ranks must run equally many forwards and backwards per step: a rank with
    nothing to learn multiplies its loss by zero.

    wire: dtype in which matrices are gathered. torch.bfloat16 when the model computes in it: same
    numbers, half the bytes. Norms, routers, embedding and head travel in fp32, and gradients are
    reduced in fp32."""
    if meshes.layout.world == 1:
        return model
    # Refuse first what would fail late or go wrong silently.
    meshes.layout.check_expert_shapes({name: p.shape for name, p in model.named_parameters()})
    same_weights(model)

    in_fp32 = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    in_wire_dtype = replace(in_fp32, param_dtype=wire)
    for block in find_blocks(model):
        # Context parallelism: attention gathers the latents of the whole sequence.
        if meshes.layout.cp > 1:
            group = meshes.context.get_group("cp")
            block.attn.gather_entries = partial(gather_sequence, group=group)

        # Experts first, on their own mesh: the dense mesh then takes what is left of the block.
        if hasattr(block.ffn, "experts"):
            shard_experts(block.ffn, meshes, in_wire_dtype)

        # Norms and routers stay in fp32, so they are sharded, and gathered, apart from the rest.
        if wire:
            small = [m for n, m in block.named_modules() if n.endswith(("norm", "router"))]
            fully_shard(small, mesh=meshes.dense, mp_policy=in_fp32)
        fully_shard(block, mesh=meshes.dense, mp_policy=in_wire_dtype)
    # What is in no block: embedding, last norm, head.
    fully_shard(model, mesh=meshes.dense, mp_policy=in_fp32)

    # FSDP averages gradients unless told otherwise.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    return model


def find_blocks(model):
    """The layers of the model, each of which is gathered as a whole just before it runs."""
    return [m for m in model.modules() if hasattr(m, "attn") and hasattr(m, "ffn")]


def gather_sequence(t, group):
    return GatherSequence.apply(t, group)


def shard_experts(moe, meshes, policy):
    """Cut the stacks of experts (E, R, C) twice: whole experts over ep (Shard(0)), then their rows
    over efsdp (Shard(1)). The two cuts lie in different dimensions."""
    mesh = meshes.experts
    if meshes.layout.ep > 1:
        # Every rank keeps its own experts of the stack, and tokens travel to them.
        ep = mesh["ep"]
        for name, p in list(moe.experts.named_parameters()):
            mine = p.detach().chunk(ep.size())[ep.get_local_rank()].clone()
            mine = DTensor.from_local(mine, ep, [Shard(0)], run_check=False)
            moe.experts.register_parameter(name, torch.nn.Parameter(mine))
        moe.dispatch = partial(all_to_all_dispatch, group=ep.get_group())

    # FSDP cuts the rows, and gathers them on the ranks of its direction alone.
    efsdp = mesh[tuple(name for name in mesh.mesh_dim_names if name != "ep")]
    fully_shard(moe.experts, mesh=efsdp, shard_placement_fn=by_rows, mp_policy=policy)


def by_rows(stack):
    return Shard(1)


def own_parts(model):
    """{name of a weight that is cut: a slice per dimension}, the part of the whole that this rank
    holds: what it has to read of a published checkpoint. Cuts of one weight lie in different
    dimensions, so each gives one slice."""
    parts = {}
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor):
            continue
        part = [slice(0, n) for n in p.shape]
        mesh = p.device_mesh
        for ranks, i, placement in zip(mesh.shape, mesh.get_coordinate(), p.placements):
            if placement.is_shard():
                # Dealt as torch.chunk deals: equal pieces, the last ones smaller or empty.
                n = p.shape[placement.dim]
                size = -(-n // ranks)
                part[placement.dim] = slice(min(n, i * size), min(n, (i + 1) * size))
        parts[name] = tuple(part)
    return parts


def same_weights(model):
    """Raise ValueError unless all ranks have built the same model. With different seeds, training
    would go on unnoticed, with each rank's piece taken from a different model. A model on the meta
    device has no weights yet."""
    if not dist.is_initialized() or next(model.parameters()).is_meta:
        return model
    # The sum of all weights stands for the model: its smallest and largest value over the ranks.
    sums = [p.detach().double().sum() for p in model.parameters()]
    low = torch.stack(sums).sum()
    high = low.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if high - low > 1e-6 * (1 + high.abs()):
        raise ValueError(
            "the ranks hold different weights: build the model with the same seed on every rank"
        )
    return model


# ---------------------------------------------------------------- what a step needs from all ranks


def join_process_group(device="cpu", seconds=PATIENCE):
    """Join the ranks that torchrun started; without torchrun do nothing. -> (rank, world)"""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        backend = "gloo"
        if device == "cuda":
            check_cards()
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    return rank_and_world()


def rank_and_world():
    """(0, 1) where there is no process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def check_cards():
    """Every process of a machine needs a GPU of its own. More processes than GPUs: ValueError on
    every rank, before any collective."""
    here, cards = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if here > cards:
        raise ValueError(
            f"{here} processes on a machine with {cards} GPU{'s' * (cards != 1)}: one each, so "
            f"start --nproc_per_node={cards}, or add --device=cpu"
        )


def all_reduce_sum(t):
    """Sum of a tensor or number over all ranks: token counts, losses, the router's counts
    (update_router_bias(model, reduce=all_reduce_sum)). CP ranks hold different tokens, so they
    count like any data rank."""
    t = torch.as_tensor(t).clone()
    if rank_and_world()[1] > 1:
        dist.all_reduce(t)
    return t


def keep_gradients_in_fp32(model):
    """Keep the gradients of bf16 weights in fp32, where micro-batches add up: in bf16 what is less
    than 1/512 of the sum so far would be lost. Call it once the parameters have their dtype and are
    cut (parallelize), before the first backward. fp32 weights: no change."""
    for p in model.parameters():
        if not p.requires_grad or p.dtype.itemsize >= 4:
            continue
        if not isinstance(p, DTensor):
            # autograd casts each gradient to this dtype before it adds it
            p.grad_dtype = torch.float32
            continue
        # FSDP sets the first gradient itself, in the weights' dtype, and adds the next ones to what
        # it finds there.
        p.grad_dtype = None  # any dtype may be set
        p.register_post_accumulate_grad_hook(widen_gradient)


def widen_gradient(p):
    if p.grad.dtype != torch.float32:
        p.grad = p.grad.float()


@torch.no_grad()
def sum_gradients(model):
    """For plain replicas, where nothing is cut and every rank holds the whole model: sum all
    gradients in one all-reduce, once per step. Call it on all ranks before clip_grad_norm. After
    parallelize() no such call is needed."""
    if rank_and_world()[1] > 1:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        # One vector for all, and in fp32: the sum over the ranks is not rounded on its way.
        wide = [g.flatten().to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
        flat = torch.cat(wide)
        dist.all_reduce(flat)
        for g, part in zip(grads, flat.split([g.numel() for g in grads])):
            g.copy_(part.view_as(g))


def clip_grad_norm(model, max_norm=math.inf, parameters=None):
    """Scale the gradient to at most max_norm; returns its norm before that, a 0-d tensor equal on
    all ranks. parameters: only of these (default: all of the model's). One all-reduce of one number
    serves both meshes. A NaN or infinity in any gradient: ValueError on every rank, before anything
    has changed."""
    drop_gathered_weights(model)
    parameters = model.parameters() if parameters is None else parameters
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]

    # The norms of what lies here. All gradients at once: a few kernels instead of several for each
    # of them.
    norms = torch.stack(torch._foreach_norm(local, 2, torch.float64))  # one per gradient

    # The sum over all ranks counts a shard k times if k ranks hold it, so each rank adds a k-th.
    copies = torch.tensor([float(count_copies(g)) for g in grads]).to(norms, non_blocking=True)
    square = (norms**2 / copies).sum()
    if any(isinstance(g, DTensor) for g in grads):
        square = all_reduce_sum(square)
    norm = square.sqrt()
    is_bad = ~(norm < math.inf)  # a NaN is not smaller either
    if is_bad:
        raise ValueError(f"gradient is NaN or infinite: {name_bad_gradients(model)}")

    # Every rank scales its own part by the same number.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    for dtype in {g.dtype for g in local}:
        torch._foreach_mul_([g for g in local if g.dtype == dtype], scale.to(dtype))
    return norm.float()


def name_bad_gradients(model):
    """-> text: the parameters whose gradient is not finite in what lies here"""
    names = []
    for name, p in model.named_parameters():
        if p.grad is not None:
            here = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            if not here.isfinite().all():
                names.append(name)
    return ", ".join(names) or "on another rank"


def drop_gathered_weights(model):
    """A forward without backward (an evaluation) leaves embedding, norm and head gathered. Such a
    gathered copy would still be used after an update, so free it before weights change and before
    they are read."""
    if isinstance(model, FSDPModule):
        model.reshard()


def count_copies(t):
    """How many ranks hold each number of a tensor"""
    copies = 1
    if isinstance(t, DTensor):
        for ranks, placement in zip(t.device_mesh.shape, t.placements):
            copies *= ranks if placement.is_replicate() else 1
    return copies


@torch.no_grad()
def full_state(model):
    """{name: whole plain tensor, a copy} on every rank, buffers included. It gives the sampler its
    weights: Model(config).load_state_dict(full_state(model)). All ranks must call it."""
    drop_gathered_weights(model)
    whole = {}
    for name, t in model.state_dict().items():
        # What is cut over one rank is whole already, and no copy.
        whole[name] = t.full_tensor().clone() if isinstance(t, DTensor) else t.detach().clone()
    return whole


# ---------------------------------------------------------------- demo


def demo_model():
    from moe import Model, ModelConfig

    torch.manual_seed(0)
    sizes = dict(vocab=64, dim=32, layers=2, kv_lora=16, qk_nope=8, qk_rope=8, v_dim=8)
    model = Model(ModelConfig(dense_ffn=64, expert_ffn=16, **sizes))
    for p in model.parameters():
        if not p.any():
            # a matrix that starts at zero hides the gradients behind it
            torch.nn.init.normal_(p, std=0.05)
    return model


def forward_backward(model, meshes, seed=1):
    """This rank's share of one batch of 8 x 64 tokens, as a training loop does it. -> loss over all
    ranks"""
    # Cut twice: sequences over the data ranks, positions over the cp ranks.
    rows = torch.randint(0, 64, (8, 65), generator=torch.Generator().manual_seed(seed))
    mine = rows.chunk(meshes.layout.data)[meshes.data_rank]  # (B, 65)
    tokens, targets = shard_sequence(mine[:, :-1], meshes), shard_sequence(mine[:, 1:], meshes)

    # A share of the global mean: see parallelize.
    logits = model.logits(model(tokens, local_positions(64, meshes)))  # (B, 64/cp, vocab)
    logits, flat = logits.flatten(0, 1), targets.flatten()
    nll = torch.nn.functional.cross_entropy(logits, flat, reduction="sum")
    loss = nll / all_reduce_sum(targets.numel())
    loss.backward()
    return float(all_reduce_sum(loss.detach()))


def largest_difference(model, grads):
    """Worst gradient entry, relative to the largest of its tensor."""
    worst = 0.0
    for name, p in model.named_parameters():
        error = (grads[name] - p.grad).abs().max() / p.grad.abs().max()
        worst = max(worst, float(error))
    return worst


def demo_layout_rank(rank, world, layouts, comm_counter):
    """-> for each layout: loss, whole gradients, bytes that a rank receives by collective.
    comm_counter: the class that counts them"""
    found = []
    for layout in layouts:
        meshes = make_meshes(**vars(layout))
        model = parallelize(demo_model(), meshes)
        with comm_counter() as counter:
            loss = forward_backward(model, meshes)

        # Whole gradients, to compare; and the mean over ranks of the bytes that one receives.
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        received = {}
        for kind in comm_counter.KINDS.values():
            received[kind] = float(all_reduce_sum(float(counter.bytes[kind]))) / world
        found.append((loss, grads, received))
    return found


def describe_ranks(layout):
    """{what: a word for each rank}: the place of every rank on the two meshes"""
    table = {"rank": [], "batch . part": [], "dense copy . piece": [], "experts . piece": []}
    for r in range(layout.world):
        table["rank"].append(f"{r}")
        table["batch . part"].append(f"{r // layout.cp}.{r % layout.cp}")
        table["dense copy . piece"].append(f"{r // layout.shard}.{r % layout.shard}")
        table["experts . piece"].append(f"{r % layout.ep}.{r // layout.ep % layout.efsdp}")
    return table


def demo():
    from demos.comm_counter import CommCounter
    from demos.forked_ranks import fork_ranks

    # No GPU: a process that has seen one starts autograd's device threads with its first backward,
    # and cannot be forked afterwards.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    # Two meshes; two, with copies of the dense weights; and what one shared mesh allows: there CP
    # and EP are directions of the same grid, so cp=2 leaves room for ep=4.
    layouts = [
        Layout(8, cp=2, ep=8),
        Layout(8, cp=2, ep=4, dp_replicate=2),
        Layout(8, cp=2, ep=4),
    ]
    # One process without any mesh: what all layouts must compute.
    model = demo_model()
    expected = forward_backward(model, make_meshes())

    # The same on eight ranks, for each layout.
    found = fork_ranks(8, demo_layout_rank, layouts, CommCounter)[0]
    worst = 0.0
    for layout, (loss, grads, received) in zip(layouts, found):
        print(f"cp={layout.cp}, ep={layout.ep}, dp_replicate={layout.dp_replicate}")
        for what, words in describe_ranks(layout).items():
            print(f"  {what:20s}" + "".join(f"{word:>6}" for word in words))
        print("  bytes per rank: " + ", ".join(f"{k} {v:,.0f}" for k, v in received.items()))
        error = largest_difference(model, grads)
        print(
            f"  loss {loss:.6f}, one process {expected:.6f}; gradients differ by at most "
            f"{error:.1e} of a tensor's largest\n"
        )
        worst = max(worst, error, abs(loss - expected))

    two, _, one = (sum(received.values()) for *_, received in found)
    print(
        f"Seen: CP=2 and EP=8 share 8 ranks and compute what one process computes, to {worst:.0e}. "
        f"On one shared mesh CP=2 leaves EP=4, and a rank receives {one / two:.2f} times the bytes."
    )


def main(argv):
    from demos.demonstration import run_demo

    run_demo("hsdp.py", "The demonstration.", demo, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
