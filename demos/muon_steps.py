"""demos/muon_steps.py: what `python muon.py` shows.

    show_singular_values   steps of Newton-Schulz on one matrix
    show_ranks             three steps of Muon on four forked ranks, beside one process: the weights
                           agree to the last bit, and the timeline shows that one task's shards
                           travel while another multiplies

It stands apart from muon.py because it measures the optimizer and is no part of it: what it
measures is handed over. Left out: speed against other optimizers (benchmarks/muon.py).
"""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from demos.demo_figures import draw_timeline
from demos.forked_ranks import fork_ranks

# Matrices in their stacks (N, R, C), heads or experts, and one plain matrix.
SHAPES = {
    "q": (6, 64, 384),
    "o": (384, 384),
    "gate": (8, 256, 384),
    "down": (8, 384, 256),
}


def show_singular_values(orthogonalize):
    """How five steps bring the singular values of one matrix to about 1. orthogonalize: that of
    muon.py"""
    # Row k is divided by k, so the singular values differ widely. V comes transposed.
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(64, 256, generator=generator) / torch.arange(1, 65)[:, None]  # (64, 256)
    U, _, V = torch.linalg.svd(G, full_matrices=False)  # (64, 64), (64,), (64, 256)
    print("singular values of a 64 x 256 matrix, rows falling off as 1/k")
    print("                 largest   median  smallest   cosine to U V^T")

    # The goal U V^T has 64 singular values of 1, so its norm is 8.
    for steps in range(6):
        X = orthogonalize(G, steps) if steps else G
        S = torch.linalg.svdvals(X)
        cosine = (X * (U @ V)).sum() / X.norm() / 8
        name = f"after {steps} step{'s' * (steps > 1)}" if steps else "before"
        print(f"{name:15s}  {S[0]:7.3f}  {S[31]:7.3f}  {S[-1]:8.3f}   {cosine:.4f}")


def make_parameters(shapes, mesh=None, dtype=torch.float32, device="cpu"):
    """Random parameters with random gradients, the same for every world size. On a mesh each rank
    holds some rows of every matrix, so that no expert is whole anywhere."""
    # Every rank draws the same whole tensors, so nothing has to be sent (src_data_rank=None).
    generator, params = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        pair = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2)]
        if mesh is not None:
            rows = [Shard(len(shape) - 2)]
            pair = [distribute_tensor(tensor, mesh, rows, src_data_rank=None) for tensor in pair]
        params[name] = torch.nn.Parameter(pair[0])
        params[name].grad = pair[1]
    return params


def train_three_steps(make_optimizer, params):
    """Three steps. The event log begins anew with each: it ends with the last one's events.
    make_optimizer: the class muon.Muon"""
    optimizer = make_optimizer([dict(params=list(params.items()))], ns_dtype=torch.float32, lr=0.02)
    for _ in range(3):
        optimizer.events = []
        optimizer.step()
    return optimizer


def train_rank(rank, world, make_optimizer):
    """-> the whole weights after three steps on this rank, its event log, and its traffic"""
    params = make_parameters(SHAPES, DeviceMesh("cpu", torch.arange(world)))
    optimizer = train_three_steps(make_optimizer, params)
    whole = {name: p.full_tensor().detach() for name, p in params.items()}
    return whole, optimizer.events, optimizer.traffic


def show_ranks(make_optimizer):
    """The same three steps in one process and on four ranks: the largest difference, a timeline.
    make_optimizer: the class muon.Muon"""
    # What differs between one process and any of the ranks.
    single = make_parameters(SHAPES)
    train_three_steps(make_optimizer, single)
    ranks = fork_ranks(4, train_rank, make_optimizer)
    error = 0.0
    for whole, _, _ in ranks:
        for name, p in single.items():
            error = max(error, (whole[name] - p).abs().max().item())

    # What overlaps: task 2 is on the wire before task 1 multiplies. The difference is in ms.
    _, events, traffic = ranks[0]
    draw_timeline(events, "out/muon.png")
    when = {(task, event): t for t, task, event in events}
    lead = 1e3 * (when[1, "multiply"] - when[2, "send"])
    print(
        f"Four ranks ({traffic['collectives']} collectives, "
        f"{traffic['bytes_received'] / 1e6:.1f} MB received per step) end three steps with\n"
        f"weights that differ from one process by {error}; task 2 was on the wire {lead:.1f} ms\n"
        f"before task 1 multiplied (out/muon.png)."
    )
