"""benchmarks/muon.py: one step of Muon beside torch.optim.Muon and beside a floor, and sharded
beside one rank.

    python -m benchmarks.muon            67.2M parameters on one device, 22.4M on 1 to 8 forked
                                         ranks; minutes
    python -m benchmarks.muon --quick    one layer, two ranks; seconds: does it run?

The floor is the matrix products of the plain Newton-Schulz iteration alone, in the batches that
suit the machine. Ours is muon.py with the iteration of fast/, as train.py takes it.
torch.optim.Muon knows 2-D matrices only, so it gets every head and every expert as a parameter of
its own. Its length of an update is max(1, R/C)^0.5 and ours 0.2 max(R, C)^0.5, which costs the
same.

Sharded, each rank holds some rows of every unit, so that no unit is whole anywhere. Whoever gathers
every momentum whole on every rank multiplies as much on each as one rank does alone. Time there is
CPU seconds of the busiest rank, gloo's threads included: the ranks share the cores of one machine,
so the wall would say how many cores there are.

Overlap: two ranks, a core for each, with one task in flight and with three, as muon.WINDOW says. A
rank is idle where its main thread neither multiplies nor packs. The two of a pair take turns.
"""

import math
import sys
import time
from collections import defaultdict

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness import measure_seconds, print_table, read_quick
from demos.forked_ranks import fork_ranks
from fast import choose
from fast.gram_newton_schulz import gram_newton_schulz
from fast.stochastic_rounding import RoundingMuon
from demos.muon_steps import make_parameters
import muon
from muon import Muon, as_stack

CACHE_BYTES = 2 << 20  # of a CPU
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def layer_shapes(layers, dim=384, heads=6, experts=8, hidden=1024):
    """{name: shape} of the matrices of a small MoE decoder. Heads and experts are stacked: N
    matrices of R x C are one (N, R, C)."""
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


# ---------------------------------------------------------------- one device


def gemm_floor(shapes, dtype, device):
    """-> a call that does only the matrix products of the plain Newton-Schulz iteration, in the
    batches that suit the machine. shapes: those of single matrices and of stacks"""
    # How many matrices there are of each shape (m, n), m <= n: the iteration transposes a matrix
    # that is taller than wide.
    matrices = defaultdict(int)
    for shape in shapes:
        matrices[tuple(sorted(shape[-2:]))] += math.prod(shape[:-2])

    # As many matrices as the cache of a CPU holds, or all at once on a GPU. Batches of one shape
    # share their operands, because the time of a product does not depend on the numbers in it.
    batches = []
    for (m, n), count in matrices.items():
        chunk = count
        if device == "cpu":
            chunk = min(count, max(1, CACHE_BYTES // (m * n * dtype.itemsize)))
        # X, Y (chunk, m, n); A (chunk, m, m)
        X, A, Y = (torch.randn(chunk, m, columns, device=device).to(dtype) for columns in (n, m, n))
        for first in range(0, count, chunk):
            size = min(chunk, count - first)
            batches.append((X[:size], A[:size], Y[:size]))

    # Three products per step: X X^T, its square, and one with X again.
    def multiply():
        for X, A, Y in batches:
            B = torch.empty_like(A)
            for _ in range(5):  # steps of Newton-Schulz
                torch.bmm(X, X.mT, out=B)
                torch.bmm(A, A, out=B)
                torch.bmm(A, X, out=Y)

    return multiply


def split_matrices(params):
    """-> every head and every expert as a 2-D parameter of its own, with its gradient, because
    torch.optim.Muon takes 2-D parameters only"""
    matrices = []
    for p in params.values():
        for weight, gradient in zip(as_stack(p.data), as_stack(p.grad)):
            matrices.append(torch.nn.Parameter(weight.clone()))
            matrices[-1].grad = gradient.clone()
    return matrices


def build_steps(shapes, products, weights, device):
    """-> {name: a call}: the products alone, a step of torch.optim.Muon, a step of ours. products:
    the dtype of the matrix products; weights: that of the parameters"""
    params = make_parameters(shapes, dtype=weights, device=device)
    rates = dict(lr=1e-3, weight_decay=0.1)
    kind = RoundingMuon if weights == torch.bfloat16 else choose(Muon)
    options = dict(ns_dtype=products, newton_schulz=gram_newton_schulz)
    ours = kind([dict(params=list(params.items()))], **options, **rates)

    # split_matrices copies, so each optimizer updates parameters of its own.
    theirs = torch.optim.Muon(split_matrices(params), **rates)
    return {
        "floor": gemm_floor(shapes.values(), products, device),
        "torch.optim.Muon": theirs.step,
        "ours": ours.step,
    }


def keep_dtype(tensor):
    """Takes the place of Tensor.bfloat16 and casts nothing"""
    return tensor


def measure_one_device(shapes, products, weights, device, rounds):
    """-> {name: seconds of one step}, for the calls of build_steps"""
    calls = build_steps(shapes, products, weights, device)

    # torch.optim.Muon always casts to bf16 before it multiplies. To compare both in fp32, its cast
    # is replaced by one that does nothing.
    cast = torch.Tensor.bfloat16
    if products == torch.float32:
        torch.Tensor.bfloat16 = keep_dtype

    # On a CPU, the CPU seconds of the one thread: wall time would also count other programs.
    clock = time.process_time if device == "cpu" else time.perf_counter
    try:
        return measure_seconds(calls, rounds, min, clock=clock)
    finally:
        torch.Tensor.bfloat16 = cast


def bench_one_device(device, quick):
    """The table of one device: a row for each pair of dtypes"""
    shapes = layer_shapes(1, dim=128, hidden=256) if quick else layer_shapes(6)
    numbers = sum(math.prod(shape) for shape in shapes.values())
    rounds = 1 if quick else 5
    columns = ["products, weights", "GEMM floor", "torch.optim.Muon", "muon.py"]

    # Three cases: as train.py runs it; on a CPU without bf16 instructions; with weights kept in
    # bf16.
    rows = []
    for products, weights in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ):
        seconds = measure_one_device(shapes, products, weights, device, rounds)
        floor, other, ours = seconds.values()  # in the order of build_steps
        cells = [f"{t:.3f}" for t in seconds.values()]
        ratios = [f"{ours / floor:.2f}", f"{ours / other:.2f}"]
        rows.append([f"{NAMES[products]}, {NAMES[weights]}", *cells, *ratios])
    print_table(
        f"one step, {numbers / 1e6:.1f}M parameters, {device}, seconds, best of {rounds}",
        [*columns, "x floor", "x torch"],
        rows,
    )


# ---------------------------------------------------------------- sharded


def measure_rank(rank, world, shapes):
    """-> CPU seconds of one rank's step (all threads, gloo's too), its collectives, and the bytes
    that it received"""
    params = make_parameters(shapes, DeviceMesh("cpu", torch.arange(world)))
    optimizer = Muon([dict(params=list(params.items()))], newton_schulz=gram_newton_schulz)

    # All ranks begin a step together. The first two of five warm up.
    seconds = []
    for _ in range(5):
        dist.barrier()
        start = time.process_time()
        optimizer.step()
        seconds.append(time.process_time() - start)
    traffic = optimizer.traffic
    return min(seconds[2:]), traffic["collectives"], traffic["bytes_received"]


def bench_sharded(quick):
    """The table of forked ranks: a row for each world size"""
    shapes = layer_shapes(1, dim=96, hidden=128) if quick else layer_shapes(2)
    numbers = sum(math.prod(shape) for shape in shapes.values())
    rows, alone = [], None
    for world in (1, 2) if quick else (1, 2, 4, 8):
        # The largest of each number over the ranks: a step ends when the busiest rank has ended.
        ranks = fork_ranks(world, measure_rank, shapes)
        seconds, collectives, received = [max(column) for column in zip(*ranks)]
        alone = alone or seconds
        cells = [f"{seconds:.3f}", f"{received / 1e6:.1f}", str(collectives)]
        rows.append([str(world), *cells, f"{seconds / alone:.2f}"])
    print_table(
        f"sharded over forked gloo ranks, {numbers / 1e6:.1f}M parameters; the busiest rank, "
        "best of 3",
        ["W", "CPU s", "MB received", "collectives", "x one rank"],
        rows,
    )


def measure_windows(rank, world, shapes, rounds):
    """-> for one task in flight and for three: median seconds of a step, and the share of them in
    which this rank is idle"""
    params = make_parameters(shapes, DeviceMesh("cpu", torch.arange(world)))
    optimizer = Muon([dict(params=list(params.items()))], newton_schulz=gram_newton_schulz)
    found = {1: [], 3: []}
    for _ in range(1 + rounds):  # the first one warms up
        for window, rows in found.items():
            muon.WINDOW = window
            optimizer.plans = {}
            optimizer.step()
            dist.barrier()
            wall, busy = time.perf_counter(), time.thread_time()
            optimizer.step()
            busy = time.thread_time() - busy
            wall = time.perf_counter() - wall
            rows.append((wall, 1 - busy / wall))
    return [np.median(rows[1:], axis=0).tolist() for rows in found.values()]


def bench_overlap(quick):
    """The table of one task in flight against three: all matrices, and the experts alone"""
    layer = layer_shapes(1, dim=96, hidden=128) if quick else layer_shapes(2)
    experts = {name: shape for name, shape in layer.items() if shape[0] == 8}
    rows = []
    for what, shapes in (("all", layer), ("experts alone", experts)):
        numbers = sum(math.prod(shape) for shape in shapes.values())
        ranks = fork_ranks(2, measure_windows, shapes, 1 if quick else 9)
        # (ranks, windows, 2): a step ends when the slower rank has ended.
        found = np.array(ranks)
        one, three = found[:, :, 0].max(0)
        for i, window in enumerate((1, 3)):
            idle = [f"{share:.0%}" for share in found[:, i, 1]]
            seconds = f"{found[:, i, 0].max():.3f}"
            ratio = "" if i == 0 else f"{three / one:.2f}"
            rows.append([f"{what}, {numbers / 1e6:.1f}M", str(window), seconds, *idle, ratio])
    print_table(
        "two gloo ranks, a core each: tasks in flight, median seconds of a step",
        ["matrices", "in flight", "seconds", "idle, rank 0", "rank 1", "x one"],
        rows,
    )


def main(argv):
    quick = read_quick("muon", __doc__, argv)
    torch.set_num_threads(1)
    # The part that forks comes first, because a process that has used a GPU cannot fork.
    bench_sharded(quick)
    bench_overlap(quick)
    bench_one_device("cuda" if torch.cuda.is_available() else "cpu", quick)


if __name__ == "__main__":
    main(sys.argv[1:])
