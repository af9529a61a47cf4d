"""benchmarks/plan.py: what a training step of a model costs on a cluster, from shapes alone: memory
per GPU, bytes on the wire, and the optimizer step, in three layouts beside each other.

    python -m benchmarks.plan --model=kimi-k2.5 --gpus=512    a named model
    python -m benchmarks.plan --init_from=DIR --gpus=8        does a published checkpoint fit, and
                                                              on what layout?

The three layouts cut the dense weights over a node or over all GPUs, and the experts likewise:
hsdp.py says what that means. The first that fits is printed as a command. Every assumption is
printed as the flag that changes it. Bytes on the wire agree within 2 percent with those counted on
eight ranks, and the count of Newton-Schulz with one by hand (tests/test_plan.py).

Left out: overlap (the seconds of the wire are those of transfers one after the other), latency, and
what activations take beyond an estimate. A plan says what cannot work; a run says what does.
"""

import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.harness import make_parser
from command.gpu_memory import (
    GPU_SCALE,
    Step,
    gathered,
    held,
    is_muon,
    layer_of,
    memory,
    parameter_shapes,
)
from hsdp import Layout, is_expert
from moe import ModelConfig
from published.families import read_config

# Fields of moe.ModelConfig: the published ones from their config.json, the others as train.py's
# scales.
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
        num_experts_per_tok=8,
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
        num_experts_per_tok=6,
        shared=2,
        expert_ffn=1408,
    ),
    "gpu": GPU_SCALE,
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
class CopiedExperts(Layout):
    """A layout that hsdp.py does not have: copies of the experts too, each cut over its own ranks.
    It shows what the wide mesh saves."""

    expert_replicate: int = 1

    def __post_init__(self):
        super().__post_init__()
        if self.world % (self.expert_replicate * self.ep):
            raise ValueError(
                f"expert_replicate={self.expert_replicate} x ep={self.ep} does not divide the "
                f"{self.world} ranks"
            )

    @property
    def efsdp(self):
        return self.world // (self.expert_replicate * self.ep)


def copies_of_experts(layout):
    return getattr(layout, "expert_replicate", 1)


# ---------------------------------------------------------------- bytes on the wire


def wire_bytes(name, step):
    """Per number, all gathers of one step: the root once (it stays), a layer for the forward and
    for the backward."""
    if layer_of(name) == "root":
        return step.kept
    if name.endswith(("norm.weight", "router.weight")):
        return 2 * step.kept
    return 2 * step.weight


def ring(ranks):
    """What a rank receives of a ring's whole: all but its own part"""
    return (ranks - 1) / ranks


def fsdp_traffic(what, shapes, layout, step, shard, copies, span):
    """Rows of the dense weights or of the experts: gathered for the passes, gradients scattered,
    and summed over the copies."""
    numbers = weights = 0
    for name, shape in shapes.items():
        if is_expert(name) == (what == "experts"):
            size = gathered(name, shape, layout)
            numbers += size
            weights += wire_bytes(name, step) * size
    gradients = 4 * numbers
    return [
        ("all-gather", f"{what} weights", ring(shard) * weights, span),
        ("reduce-scatter", f"{what} gradients", ring(shard) * gradients, span),
        (
            "all-reduce",
            f"{what} gradients of copies",
            2 * ring(copies) * gradients / shard,
            layout.world,
        ),
    ]


def comm_traffic(config, shapes, layout, step):
    """[(collective, what, bytes one rank receives per step, ranks that a group spans)]. A ring
    passes (n-1)/n of what it gathers or scatters, an all-reduce does both."""
    rows = fsdp_traffic(
        "dense", shapes, layout, step, layout.shard, layout.dp_replicate, layout.shard
    )
    rows += fsdp_traffic(
        "experts",
        shapes,
        layout,
        step,
        layout.efsdp,
        copies_of_experts(layout),
        layout.efsdp * layout.ep,
    )

    # Context parallelism: the entries of the other ranks' tokens, and the gradients of ours.
    latents = (layout.cp - 1) * config.layers * step.tokens * config.entry_width * step.act

    # Expert parallelism: there and back, forward and backward; (ep-1)/ep of the rows live
    # elsewhere. And each rank's counts of rows, 8 bytes for each expert.
    moe_layers = config.layers - config.dense_layers
    rows_of_layer = 4 * step.tokens * config.num_experts_per_tok * config.dim * step.act
    tokens = moe_layers * ring(layout.ep) * (rows_of_layer + 8 * config.experts)

    units = step.unit * muon_numbers(shapes, layout) / layout.world
    return rows + [
        ("all-gather", "latents (cp)", latents, layout.cp),
        ("reduce-scatter", "latents (cp)", latents, layout.cp),
        ("all-to-all", "tokens (ep)", tokens, layout.ep),
        ("all-to-all", "Muon units", units, layout.world),
    ]


def muon_numbers(shapes, layout):
    """Numbers that all ranks together receive for Muon. A unit cut over ranks travels to one owner,
    who answers its k copies; the owner has k/W of it already, on average. A unit that is whole on a
    rank stays, and only its other copies hear of it."""
    numbers = 0
    for name, shape in shapes.items():
        if not is_muon(name, shape):
            continue
        if is_expert(name):
            copies, cut = copies_of_experts(layout), layout.efsdp
        else:
            # Heads are dealt whole: only a plain matrix is cut through its rows.
            copies, cut = layout.dp_replicate, layout.shard if len(shape) == 2 else 1
        if cut == 1:
            received = copies - 1
        else:
            received = 1 + copies - 2 * copies / layout.world
        numbers += math.prod(shape) * received
    return numbers


# ---------------------------------------------------------------- the optimizer step


def optimizer_step(shapes, layout, step, hardware, heads=1):
    """Seconds per GPU of one Muon step: Newton-Schulz (five times X X^T, its square, one product
    with X), units on the wire, and reading weight, gradient, momentum, unit and writing weight,
    momentum, unit. heads: column blocks of the output projections, orthogonalized one by one."""
    flops = 0
    for name, shape in shapes.items():
        if is_muon(name, shape):
            blocks = heads if name.endswith("attn.wo") else 1
            matrices = blocks * math.prod(shape[:-2])
            m, n = sorted((shape[-2], shape[-1] // blocks))
            flops += 5 * matrices * (4 * m * m * n + 2 * m**3)
    wire = step.unit * muon_numbers(shapes, layout) / layout.world
    numbers = sum(held(name, shape, layout) for name, shape in shapes.items())
    speed = hardware.link if layout.world <= hardware.node else hardware.net
    return {
        "Newton-Schulz": flops / layout.world / (hardware.tflops * 1e12 * hardware.share),
        "units on the wire": wire / (speed * 1e9),
        "elementwise": 24 * numbers / (hardware.hbm * 1e9),
    }


def predict_step(times):
    """Seconds: the wire runs behind Newton-Schulz, the rest comes after"""
    return max(times["Newton-Schulz"], times["units on the wire"]) + times["elementwise"]


# ---------------------------------------------------------------- the plan


def find_model(name, folder=""):
    """A named model, or that of a published folder (its config.json alone is read) ->
    (ModelConfig, {parameter: shape})"""
    if folder:
        config = read_config(Path(folder, "config.json"))[0]
    elif name in MODELS:
        config = ModelConfig(**MODELS[name])
    else:
        raise ValueError(f"unknown model {name!r}: {', '.join(MODELS)}")
    return config, parameter_shapes(config)


def three_layouts(gpus, cp, ep, node):
    """Copies of a narrow group span one node."""
    nodes = max(gpus // node, 1)
    return {
        "all narrow": CopiedExperts(gpus, cp, ep, nodes, max(gpus // max(node, ep), 1)),
        "dense narrow, experts wide": Layout(gpus, cp, ep, nodes),
        "all wide": Layout(gpus, cp, ep),
    }


def gigabytes(size):
    return f"{size / 1e9:,.4g}"


def memory_rows(config, shapes, layouts, step, hardware):
    """-> rows of the table, and what fits as [(layout, recompute)], in the order of preference"""
    found = [memory(config, shapes, layout, step) for layout in layouts]
    rows = [("GB of memory per GPU", [""] * len(layouts))]
    for what in found[0]:
        rows.append((f"  {what}", [gigabytes(kinds[what]) for kinds in found]))

    fits = []
    for what, recompute in (("  total", False), ("  total, if blocks are recomputed", True)):
        cells = []
        for layout in layouts:
            size = sum(memory(config, shapes, layout, step, recompute).values())
            enough = size <= 1e9 * hardware.memory
            cells.append(gigabytes(size) + (" fits" if enough else " does not fit"))
            # train.py has no copies of experts.
            if enough and copies_of_experts(layout) == 1:
                fits.append((layout, recompute))
        rows.append((what, cells))
    return rows, fits


def traffic_rows(config, shapes, layouts, step, hardware):
    flows = [comm_traffic(config, shapes, layout, step) for layout in layouts]
    rows = [("GB received per GPU and step", [""] * len(layouts))]
    for same in zip(*flows):
        collective, what = same[0][:2]
        rows.append((f"  {collective:15s}{what}", [gigabytes(size) for _, _, size, _ in same]))

    cells = []
    for flow in flows:
        seconds = 0
        for _, _, size, span in flow:
            speed = hardware.link if span <= hardware.node else hardware.net
            seconds += size / 1e9 / speed
        cells.append(f"{seconds:.3g}")
    return rows + [("  seconds, if nothing overlaps", cells)]


def optimizer_rows(config, shapes, layouts, step, hardware):
    found = [optimizer_step(shapes, layout, step, hardware, config.heads) for layout in layouts]
    rows = [("seconds of one Muon step", [""] * len(layouts))]
    for what in found[0]:
        rows.append((f"  {what}", [f"{times[what]:.3g}" for times in found]))
    predicted = [f"{predict_step(times):.3g}" for times in found]
    return rows + [("  predicted (wire behind Newton-Schulz)", predicted)]


def training_command(name, folder, gpus, step, hardware, layout, recompute):
    """The command of train.py that runs in this layout"""
    origin = f"--init_from={folder or 'DIR'} --stage=sft"
    if not folder and name in ("gpu", "laptop"):
        origin = f"--scale={name}"
    nodes, ranks = -(-gpus // hardware.node), min(gpus, hardware.node)
    command = (
        f"torchrun --nnodes={nodes} --nproc_per_node={ranks} train.py {origin} --cp={layout.cp} "
        f"--ep={layout.ep} --dp_replicate={layout.dp_replicate} --micro_tokens={step.tokens}"
    )
    if recompute:
        command += " --recompute"
    if step.kept == 2:
        command += " --weight_dtype=bfloat16"
    return command


def print_plan(name, folder, gpus, cp, ep, step, hardware):
    """Print what one model costs per GPU in three layouts, and the command of the first that fits.
    cp and ep, where not given: 2 and 8; for a published folder 1, and as many as experts, GPUs and
    a node have in common."""
    config, shapes = find_model(name, folder)
    experts = config.experts if any(map(is_expert, shapes)) else 1
    if cp is None:
        cp = 1 if folder else 2
    if ep is None:
        ep = math.gcd(gpus, experts, hardware.node) if folder else 8
    layouts = three_layouts(gpus, cp, ep, hardware.node)
    for layout in layouts.values():
        layout.check_expert_shapes(shapes)

    # The table: a column for each layout.
    columns = list(layouts.values())
    rows = [
        ("", list(layouts)),
        (
            "dense mesh (replicate, shard)",
            [str((layout.dp_replicate, layout.shard)) for layout in columns],
        ),
        (
            "expert mesh (replicate, efsdp, ep)",
            [str((copies_of_experts(layout), layout.efsdp, layout.ep)) for layout in columns],
        ),
    ]
    memory_table, fits = memory_rows(config, shapes, columns, step, hardware)
    rows += memory_table
    rows += traffic_rows(config, shapes, columns, step, hardware)
    rows += optimizer_rows(config, shapes, columns, step, hardware)

    numbers = sum(math.prod(shape) for shape in shapes.values())
    in_experts = sum(math.prod(shape) for n, shape in shapes.items() if is_expert(n))
    print(
        f"{folder or name}: {numbers / 1e9:,.4g}B parameters, {in_experts / numbers:.0%} of them "
        f"experts; {gpus} GPUs, cp={cp}, ep={ep}"
    )
    assumed = {**vars(step), **vars(hardware)}
    print("assumed (flags): " + " ".join(f"--{name}={value:g}" for name, value in assumed.items()))
    for what, cells in rows:
        print(f"{what:42s}" + "".join(f"{cell:>28s}" for cell in cells))
    if fits:
        print("fits: " + training_command(name, folder, gpus, step, hardware, *fits[0]))
    else:
        print(
            f"fits in none of these layouts on {gpus} GPUs of {hardware.memory:g} GB: more GPUs, "
            "or fewer --tokens at a time"
        )
    print("Cursor states 0.2 s for its 1T model, and neither its hardware nor its number of GPUs.")
    print(
        f"cp={cp} and ep={ep} as directions of one shared mesh need {cp * ep} GPUs; on two meshes "
        f"{math.lcm(cp, ep)}."
    )


def main(argv):
    parser = make_parser("plan", __doc__)
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

    step = Step(**{field.name: getattr(given, field.name) for field in fields(Step)})
    hardware = Hardware(**{field.name: getattr(given, field.name) for field in fields(Hardware)})
    if min(vars(step).values()) <= 0 or min(vars(hardware).values()) <= 0:
        parser.error("every assumption must be positive")
    try:
        print_plan(given.model, given.init_from, given.gpus, given.cp, given.ep, step, hardware)
    except ValueError as error:
        parser.error(error)
    except OSError as error:
        parser.error(f"{error.filename or given.init_from}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
