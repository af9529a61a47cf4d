"""benchmarks/plan.py: what a training step of a model costs on a cluster, from shapes alone: memory
per GPU, bytes on the wire, and the optimizer step, in two layouts beside each other.

    python -m benchmarks.plan --model=kimi-k2.5 --gpus=512    a named model
    python -m benchmarks.plan --init_from=DIR --gpus=8        does a published checkpoint fit, and
                                                              on what layout?

Both cut the experts over all GPUs. The dense weights are cut over a node, with a copy in every
node, or over all GPUs: hsdp.py says what that means. The first that fits is printed as a command.
Every assumption is printed as the flag that changes it. Bytes on the wire agree within 2 percent
with those counted on eight ranks (tests/test_hsdp.py), and the count of Newton-Schulz with one by
hand (tests/test_plan.py).

Left out: overlap (the seconds of the wire are those of transfers one after the other), latency,
what activations take beyond an estimate, and what recomputed blocks send once more (half as many
bytes of tokens again, and the latents' all-gather). A plan says what cannot work; a run says what
does.
"""

import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.harness import make_parser, print_table
from fast.gpu_memory import (
    GPU_SCALE,
    LAPTOP_SCALE,
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

# Named models as fields of moe.ModelConfig: the published ones from their config.json, the others
# from the scales of train.py.
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
    "laptop": LAPTOP_SCALE,
}


@dataclass(frozen=True)
class Hardware:
    """What is assumed of the cluster. tflops, share and hbm were measured on one H100 of 80 GB
    (torch 2.11, 2026-11-26): tflops by a product of two 8192 x 8192 matrices, share by the products
    of Newton-Schulz at 359M parameters (45 % at 67M), hbm by a copy. link and net are figures of
    data sheets, not measured."""

    node: int = 8  # GPUs that share the fast link
    memory: float = 80  # GB per GPU
    tflops: float = 736  # dense bf16
    share: float = 0.83  # of it that Newton-Schulz reaches
    hbm: float = 2950  # GB/s, read and written
    link: float = 450  # GB/s per GPU inside a node
    net: float = 50  # GB/s per GPU between nodes


# ---------------------------------------------------------------- bytes on the wire


def wire_bytes(name, step):
    """Bytes on the wire for one number of a weight, over all gathers of one step. The root is
    gathered once, because it stays gathered. A layer is gathered twice: for the forward and for the
    backward."""
    if layer_of(name) == "root":
        return step.kept
    # Norms and routers travel as they are kept, matrices in the dtype of the wire.
    if name.endswith(("norm.weight", "router.weight")):
        return 2 * step.kept
    return 2 * step.weight


def ring(ranks):
    """The share of the whole that a rank of a ring receives: all but its own part"""
    return (ranks - 1) / ranks


def fsdp_traffic(what, shapes, layout, step):
    """-> the rows of comm_traffic that FSDP causes. what: "dense" or "expert". Weights are
    gathered for the passes, gradients are scattered and summed over the copies."""
    # Pieces of a weight, and how many ranks the group of one copy spans.
    shard, span = layout.shard, layout.shard
    if what == "expert":
        shard, span = layout.efsdp, layout.world

    # What one rank gathers in a step: the numbers, and the bytes of all their gathers.
    numbers = weights = 0
    for name, shape in shapes.items():
        if is_expert(name) == (what == "expert"):
            size = gathered(name, shape, layout)
            numbers += size
            weights += wire_bytes(name, step) * size

    # Gradients are summed in fp32: 4 bytes.
    gradients = 4 * numbers
    rows = [
        ("all-gather", f"{what} weights", ring(shard) * weights, span),
        ("reduce-scatter", f"{what} gradients", ring(shard) * gradients, span),
    ]

    # Only dense weights have copies. An all-reduce over them sends as much as a reduce-scatter and
    # an all-gather (factor 2), of the piece of one rank only.
    if what == "dense":
        copied = 2 * ring(layout.dp_replicate) * gradients / shard
        rows.append(("all-reduce", "dense gradients of copies", copied, layout.world))
    return rows


def comm_traffic(config, shapes, layout, step):
    """-> [(collective, what, bytes that one rank receives per step, ranks that a group spans)]. In
    a ring of n ranks each receives (n-1)/n of what is gathered or scattered; an all-reduce does
    both."""
    # FSDP: weights and gradients.
    rows = []
    for what in ("dense", "expert"):
        rows += fsdp_traffic(what, shapes, layout, step)

    # Context parallelism: each layer receives the cache entries of the other ranks' tokens, and in
    # the backward as many bytes of gradients of its own entries.
    latents = (layout.cp - 1) * config.layers * step.tokens * config.entry_width * step.act

    # Expert parallelism: a row travels to its expert and back, in the forward and in the backward
    # (4 times). Of the rows, (ep-1)/ep belong to experts of other ranks. The numbers of rows per
    # expert travel too, 8 bytes each.
    moe_layers = config.layers - config.dense_layers
    rows_of_layer = 4 * step.tokens * config.num_experts_per_tok * config.dim * step.act
    tokens = moe_layers * ring(layout.ep) * (rows_of_layer + 8 * config.experts)

    # Muon: each unit travels to its owner and comes back orthogonalized. An average over the ranks.
    units = step.unit * muon_numbers(shapes, layout) / layout.world
    return rows + [
        ("all-gather", "latents (cp)", latents, layout.cp),
        ("reduce-scatter", "latents (cp)", latents, layout.cp),
        ("all-to-all", "tokens (ep)", tokens, layout.ep),
        ("all-to-all", "Muon units", units, layout.world),
    ]


def muon_numbers(shapes, layout):
    """-> how many numbers all W ranks together receive for Muon. A unit that is cut over ranks
    travels to one owner, who sends the result to its k copies. The owner has k/W of it already, on
    average. A unit that is whole on a rank does not travel: only its other copies receive the
    result."""
    numbers = 0
    for name, shape in shapes.items():
        if not is_muon(name, shape):
            continue

        # copies: k. cut: over how many ranks one unit is spread.
        if is_expert(name):
            copies, cut = 1, layout.efsdp
        else:
            # FSDP cuts the first dimension: heads stay whole, and only a plain matrix (R, C) is cut
            # through its rows.
            copies, cut = layout.dp_replicate, layout.shard if len(shape) == 2 else 1

        # In multiples of the unit. Cut: the owner lacks 1 - k/W of it, and its k copies together
        # receive k results without the k/W that the owner keeps.
        if cut == 1:
            received = copies - 1
        else:
            received = 1 + copies - 2 * copies / layout.world
        numbers += math.prod(shape) * received
    return numbers


# ---------------------------------------------------------------- the optimizer step


def optimizer_step(shapes, layout, step, hardware, heads=1):
    """{kind: seconds per GPU} of one Muon step. Newton-Schulz: five times X X^T, its square and one
    product with X. The wire: the units. Elementwise: reading weight, gradient, momentum, unit, and
    writing weight, momentum, unit. heads: column blocks of the output projections, orthogonalized
    one by one."""
    # For X (m, n), m <= n: X X^T and the product with X take 2 m^2 n FLOPs each, the square 2 m^3.
    flops = 0
    for name, shape in shapes.items():
        if is_muon(name, shape):
            blocks = heads if name.endswith("attn.wo") else 1
            matrices = blocks * math.prod(shape[:-2])
            m, n = sorted((shape[-2], shape[-1] // blocks))
            flops += 5 * matrices * (4 * m * m * n + 2 * m**3)

    # The slowest link decides: that between the nodes, where there is more than one.
    wire = step.unit * muon_numbers(shapes, layout) / layout.world
    numbers = sum(held(name, shape, layout) for name, shape in shapes.items())
    speed = hardware.link if layout.world <= hardware.node else hardware.net

    # Every rank does its share of Newton-Schulz. Elementwise, gradient and momentum are fp32.
    elementwise = 12 + 2 * step.kept + 2 * step.unit  # bytes of a number
    return {
        "Newton-Schulz": flops / layout.world / (hardware.tflops * 1e12 * hardware.share),
        "units on the wire": wire / (speed * 1e9),
        "elementwise": elementwise * numbers / (hardware.hbm * 1e9),
    }


# ---------------------------------------------------------------- the plan


def find_model(name, folder=""):
    """-> (ModelConfig, {parameter: shape}) of a named model, or of the published model in a folder,
    of which only config.json is read"""
    if folder:
        config = read_config(Path(folder, "config.json"))[0]
    elif name in MODELS:
        config = ModelConfig(**MODELS[name])
    else:
        raise ValueError(f"unknown model {name!r}: {', '.join(MODELS)}")
    return config, parameter_shapes(config)


def two_layouts(gpus, cp, ep, node):
    """-> {name: layout}. Narrow: every node holds a copy. Wide: one copy is cut over all GPUs."""
    if gpus > node and gpus % node:
        raise ValueError(f"--gpus={gpus} are no whole nodes of --node={node} GPUs")
    layouts, wide = {}, Layout(gpus, cp, ep)
    # Narrow needs a context within a node. Where it cuts neither dense weights nor experts, every
    # GPU would have the whole model.
    copies = max(gpus // node, 1)
    if gpus % (copies * cp) == 0:
        narrow = Layout(gpus, cp, ep, copies)
        if gpus == 1 or narrow.shard > 1 or narrow.ep > 1:
            layouts["dense narrow, experts wide"] = narrow
    return {**layouts, "all wide": wide}


def gigabytes(size):
    return f"{size / 1e9:,.4g}"


def memory_cells(model, layout, step, hardware):
    """model: (ModelConfig, {parameter: shape}) -> {line of the table: its text for one layout}"""
    # Each kind of memory, then the total as it is and with recomputed blocks.
    cells = {"GB of memory per GPU": ""}
    for what, size in memory(*model, layout, step).items():
        cells[f"  {what}"] = gigabytes(size)
    for what, recompute in (("  total", False), ("  total, if blocks are recomputed", True)):
        size = sum(memory(*model, layout, step, recompute).values())
        fits = size <= 1e9 * hardware.memory
        cells[what] = gigabytes(size) + (" fits" if fits else " does not fit")
    return cells


def traffic_cells(model, layout, step, hardware):
    """The same for the bytes on the wire, with the seconds that they take one after the other"""
    cells, seconds = {"GB received per GPU and step": ""}, 0
    for collective, what, size, span in comm_traffic(*model, layout, step):
        cells[f"  {collective:15s}{what}"] = gigabytes(size)
        # A group that fits into one node has the fast link.
        speed = hardware.link if span <= hardware.node else hardware.net
        seconds += size / 1e9 / speed
    cells["  seconds, if nothing overlaps"] = f"{seconds:.3g}"
    return cells


def optimizer_cells(model, layout, step, hardware):
    """The same for the optimizer step"""
    config, shapes = model
    times = optimizer_step(shapes, layout, step, hardware, config.heads)
    cells = {"seconds of one Muon step": ""}
    for what, t in times.items():
        cells[f"  {what}"] = f"{t:.3g}"
    # Units travel while others are multiplied, so the longer of the two counts. The elementwise
    # work comes after both.
    predicted = max(times["Newton-Schulz"], times["units on the wire"]) + times["elementwise"]
    cells["  predicted (wire behind Newton-Schulz)"] = f"{predicted:.3g}"
    return cells


def describe_layout(model, layout, step, hardware):
    """-> {line of the table: its text for one layout}"""
    return {
        "dense mesh (replicate, shard)": str((layout.dp_replicate, layout.shard)),
        "expert mesh (efsdp, ep)": str((layout.efsdp, layout.ep)),
        **memory_cells(model, layout, step, hardware),
        **traffic_cells(model, layout, step, hardware),
        **optimizer_cells(model, layout, step, hardware),
    }


def layout_rows(model, layouts, step, hardware):
    """-> the rows of the table, a column for each layout"""
    columns = [describe_layout(model, layout, step, hardware) for layout in layouts]
    return [[line, *(cells[line] for cells in columns)] for line in columns[0]]


def find_fitting(model, layouts, step, hardware):
    """-> (layout, recompute) of the first layout that fits into memory, or None. Recomputing costs
    a third of the time, so all layouts are tried without it first."""
    for recompute in (False, True):
        for layout in layouts:
            size = sum(memory(*model, layout, step, recompute).values())
            if size <= 1e9 * hardware.memory:
                return layout, recompute
    return None


def training_command(name, folder, gpus, step, hardware, layout, recompute):
    """-> the torchrun command that trains in this layout"""
    # Where the model comes from: a published checkpoint (DIR where no folder was given), or for our
    # own models the flag of their scale.
    origin = f"--init_from={folder or 'DIR'} --stage=sft"
    if not folder and name in ("gpu", "laptop"):
        origin = f"--scale={name}"

    nodes, ranks = max(gpus // hardware.node, 1), min(gpus, hardware.node)
    command = (
        f"torchrun --nnodes={nodes} --nproc_per_node={ranks} train.py {origin} --cp={layout.cp} "
        f"--ep={layout.ep} --dp_replicate={layout.dp_replicate} --micro_tokens={step.tokens}"
    )

    # Only what differs from the defaults of train.py.
    if recompute:
        command += " --recompute"
    if step.kept == 2:
        command += " --weight_dtype=bfloat16"
    return command


def print_plan(name, folder, gpus, cp, ep, step, hardware):
    """Prints what one model costs per GPU in two layouts, and the command of the first that fits.
    Where cp and ep are None they become 2 and 8. For a published folder they become 1 and the
    greatest common divisor of experts, GPUs and the GPUs of a node."""
    # gcd(.., 1) = 1: a model without experts has no expert parallelism.
    model = config, shapes = find_model(name, folder)
    experts = config.experts if any(map(is_expert, shapes)) else 1
    if cp is None:
        cp = 1 if folder else 2
    if ep is None:
        ep = math.gcd(gpus, experts, hardware.node) if folder else 8

    # A layout that cannot cut the experts raises a ValueError here, which main prints.
    layouts = two_layouts(gpus, cp, ep, hardware.node)
    for layout in layouts.values():
        layout.check_expert_shapes(shapes)

    # What is planned, and under which assumptions.
    numbers = sum(math.prod(shape) for shape in shapes.values())
    in_experts = sum(math.prod(shape) for n, shape in shapes.items() if is_expert(n))
    assumed = {**vars(step), **vars(hardware)}
    flags = " ".join(f"--{name}={value:g}" for name, value in assumed.items())
    print_table(
        f"{folder or name}: {numbers / 1e9:,.4g}B parameters, {in_experts / numbers:.0%} of them "
        f"experts; {gpus} GPUs, cp={cp}, ep={ep}\nassumed (flags): {flags}",
        ["", *layouts],
        layout_rows(model, layouts.values(), step, hardware),
    )

    # The command, or what to change.
    fitting = find_fitting(model, layouts.values(), step, hardware)
    if fitting:
        print("fits: " + training_command(name, folder, gpus, step, hardware, *fitting))
    else:
        print(
            f"fits in neither layout on {gpus} GPUs of {hardware.memory:g} GB: more GPUs, "
            "more --memory, or fewer --tokens at a time"
        )

    # The stated figure to compare the prediction with, and what two meshes save.
    print("Cursor states 0.2 s for its 1T model, and neither its hardware nor its number of GPUs.")
    print(
        f"cp={cp} and ep={ep} as directions of one shared mesh need {cp * ep} GPUs; on two meshes "
        f"{math.lcm(cp, ep)}."
    )


def main(argv):
    # The model and the cluster. cp and ep have no default here: print_plan chooses.
    parser = make_parser("plan", __doc__)
    parser.add_argument("--model", default="kimi-k2.5", help=", ".join(MODELS))
    parser.add_argument(
        "--init_from",
        default="",
        help="plan for the published checkpoint in this folder; only its config.json is read",
    )
    for name, default in dict(gpus=512, cp=None, ep=None).items():
        parser.add_argument(f"--{name}", type=int, default=default)

    # Every field of the two tables of assumptions is a flag.
    for field in (*fields(Step), *fields(Hardware)):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    given = parser.parse_args(argv)

    # The flags become the two tables again. Wrong values and unreadable files cost one line.
    step = Step(**{field.name: getattr(given, field.name) for field in fields(Step)})
    hardware = Hardware(**{field.name: getattr(given, field.name) for field in fields(Hardware)})
    if min(vars(step).values()) <= 0 or min(vars(hardware).values()) <= 0:
        parser.error("every assumption must be positive")
    try:
        print_plan(given.model, given.init_from, given.gpus, given.cp, given.ep, step, hardware)
    except ValueError as error:
        parser.error(error)
    except OSError as error:
        parser.error(f"{error.filename or given.init_from}: {error.strerror or error}")


if __name__ == "__main__":
    main(sys.argv[1:])
