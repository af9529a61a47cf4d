"""benchmarks/gpu_speed.py: optimizer, mixture of experts, decoding and low precision; two parts
of benchmarks/gpu.py.

Each is measured beside what one would use instead (torch.optim.Muon, a dense layer, transformers,
bf16) and beside a floor, the least time that the device needs: products at its measured speed
plus bytes at its measured copy speed.
"""

import importlib.util
import math
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import torch
import torch.nn.functional as F

import hsdp
import moe
import rollout
import train
from benchmarks.gpu_bench import relative_error
from benchmarks.gpu_equality import make_optimizer
from benchmarks.gpu_job import stage_config
from benchmarks.muon import layer_shapes, split_matrices
from fast import accelerate, low_precision, workers
from fast.gram_newton_schulz import gram_newton_schulz
from command.muon_on_ranks import make_parameters
from muon import Muon
from published.export import write_checkpoint


def build_scale_model(bench, **changes):
    """A model of train.py's gpu scale (on a CPU: tiny) -> its shape, the model, tokens of one
    micro-batch (B, T + 1)"""
    config = stage_config(bench, "pretrain")
    shape = replace(train.model_config(config, config.vocab), **changes)
    torch.manual_seed(0)
    model = accelerate(shape.build_model()).to(bench.device).compute_in(torch.bfloat16)
    tokens = torch.randint(
        0, shape.vocab, (max(1, config.micro_tokens // config.context), config.context + 1)
    )
    return shape, model, tokens.to(bench.device)


def train_once(model, tokens):
    """Forward and backward of one micro-batch"""
    (-model.logprobs(model(tokens[:, :-1]), tokens[:, 1:]).mean()).backward()
    for p in model.parameters():
        p.grad = None


def newton_schulz_flops(shapes, steps=5):
    """Per step and matrix (m, n), m <= n: X X^T, its square, and one product with X"""
    total = 0
    for shape in shapes:
        m, n = sorted(shape[-2:])
        total += math.prod(shape[:-2]) * steps * (4 * m * m * n + 2 * m**3)
    return total


def optimizer_floor(bench, matrices, numbers):
    """Newton-Schulz at the speed of a large product, and per number: weight, gradient and
    momentum read, weight and momentum written, in fp32, and 4 bytes for the bf16 matrix on its
    way"""
    return newton_schulz_flops(matrices) / bench.peak_flops + 24 * numbers / bench.bandwidth


def measure_model_step(bench):
    _, model, _ = build_scale_model(bench)
    optimizer = make_optimizer(model, torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    seconds = bench.time(optimizer.step, 5)
    # The floor counts Newton-Schulz for the matrices that Muon updates, and bytes for all.
    matrices = [
        p.shape
        for group in optimizer.param_groups
        if group["algorithm"] == "muon"
        for p in group["params"]
    ]
    floor = optimizer_floor(bench, matrices, sum(p.numel() for p in model.parameters()))
    return {"ms": 1e3 * seconds, "floor_ms": 1e3 * floor, "times_floor": seconds / floor}


def measure_muon(bench, layers, dim, heads, experts, hidden):
    """One step of Muon on the matrices of a decoder; torch.optim.Muon gets every head and expert
    as a matrix of its own"""
    shapes = layer_shapes(layers, dim, heads, experts, hidden)
    params = make_parameters(shapes, device=bench.device)
    ours = Muon(
        [dict(params=list(params.items()))],
        ns_dtype=torch.bfloat16,
        newton_schulz=gram_newton_schulz,
        lr=1e-3,
        weight_decay=0.1,
    )
    theirs = torch.optim.Muon(split_matrices(params), lr=1e-3, weight_decay=0.1)
    seconds, other = bench.time(ours.step, 5), bench.time(theirs.step, 3, 1)
    numbers = sum(math.prod(shape) for shape in shapes.values())
    floor = optimizer_floor(bench, shapes.values(), numbers)
    return {
        "parameters_M": numbers / 1e6,
        "ms": 1e3 * seconds,
        "torch.optim.Muon_ms": 1e3 * other,
        "times_torch": seconds / other,
        "floor_ms": 1e3 * floor,
        "times_floor": seconds / floor,
    }


def measure_mixture(bench):
    """Forward and backward of one layer: routed experts against a dense FFN with the FLOPs of the
    active ones"""
    config = stage_config(bench, "pretrain")
    shape = replace(train.model_config(config, config.vocab), shared=0)
    layer = accelerate(moe.MoE(shape)).to(bench.device)
    dense = moe.FFN(shape.dim, shape.num_experts_per_tok * shape.expert_ffn).to(bench.device)
    tokens = config.micro_tokens
    x = torch.randn(
        1, tokens, shape.dim, device=bench.device, dtype=torch.bfloat16, requires_grad=True
    )

    def both(module):
        output = module(x)
        output.backward(torch.ones_like(output))
        x.grad = None
        for p in module.parameters():
            p.grad = None

    seconds, other = bench.time(partial(both, layer)), bench.time(partial(both, dense))
    floor = (
        3
        * 2
        * tokens
        * 3
        * shape.dim
        * shape.num_experts_per_tok
        * shape.expert_ffn
        / bench.peak_flops
    )
    return {
        "tokens": tokens,
        "ms": 1e3 * seconds,
        "dense_ms": 1e3 * other,
        "times_dense": seconds / other,
        "floor_ms": 1e3 * floor,
        "times_floor": seconds / floor,
    }


DECODING_ROWS = (1, 32, 128, 256)
POSITION, WINDOW = {"cuda": 700, "cpu": 40}, {"cuda": 4098, "cpu": 130}


@torch.inference_mode()
def measure_decoding(bench, rows, model):
    """One token for each of `rows` sequences of equal length, sampled and brought to the CPU as
    the sampler does"""
    position = POSITION[bench.device]
    cache = moe.Cache(model, rows, WINDOW[bench.device])
    tokens = torch.zeros(rows, 1, dtype=torch.long, device=bench.device)
    start = torch.full((rows,), position, device=bench.device)

    def step():
        hidden = model.decode(tokens, cache, slice(0, rows), start)
        return rollout.sample_from_logits(
            model.logits(hidden[:, -1]), torch.rand(rows, device=bench.device), 0.95
        )[0].tolist()

    seconds = bench.time(step, 20)
    # At least: every weight is read once, of the experts as many as the rows can choose, of the
    # embedding next to nothing; and every sequence's entries of all layers.
    config, needed = model.config, cache.data[:, :, :position].numel() * cache.data.element_size()
    chosen = min(1, rows * config.num_experts_per_tok / config.experts)
    for name, p in model.named_parameters():
        share = 0 if name.startswith("embed") else chosen if hsdp.is_expert(name) else 1
        needed += share * p.numel() * p.element_size()
    floor = needed / bench.bandwidth
    return {
        "rows": rows,
        "ms": 1e3 * seconds,
        "tokens_per_s": rows / seconds,
        "floor_ms": 1e3 * floor,
        "times_floor": seconds / floor,
    }


def load_with_transformers(bench, model):
    """The same weights in transformers, by way of the published format"""
    import transformers

    folder = bench.scratch / "published"
    write_checkpoint(folder, model, torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, local_files_only=True
    )
    return theirs.to(bench.device).eval()


@torch.inference_mode()
def measure_transformers(bench, rows, model):
    """The same step: a prompt of equal length, then one greedy token at a time, brought to the
    CPU"""
    # The cache: one forward of the prompt, of which only the last logits are wanted.
    position = POSITION[bench.device]
    prompt = torch.zeros(rows, position, dtype=torch.long, device=bench.device)
    cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
    tokens = prompt[:, :1]

    def step():
        output = model(tokens, past_key_values=cache, use_cache=True)
        return output.logits[:, -1].argmax(-1).tolist()

    seconds = bench.time(step, 10)
    return {"rows": rows, "ms": 1e3 * seconds, "tokens_per_s": rows / seconds}


def measure_speed(bench):
    # The optimizer: on the model of the scale, and at several sizes beside torch.optim.Muon.
    table = "optimizer step"
    what = "Muon and AdamW, the model of the scale"
    bench.attempt(table, what, partial(measure_model_step, bench))
    # Layers, width, heads, experts and hidden units of an expert: 2M, 67M and 359M parameters
    sizes = [(4, 128, 4, 8, 128), (6, 384, 6, 8, 1024), (8, 768, 12, 8, 2048)]
    if bench.tiny:
        sizes = [(1, 64, 2, 2, 64)]
    for layers, width, *others in sizes:
        what = f"Muon, {layers} layers of width {width}"
        bench.attempt(table, what, partial(measure_muon, bench, layers, width, *others))

    table = "mixture of experts, forward and backward"
    bench.attempt(table, "one layer of the scale", partial(measure_mixture, bench))
    measure_decoders(bench)


def measure_decoders(bench):
    """One token for each of several numbers of rows: ours, and transformers where it is
    installed"""
    table = f"decoding one token at position {POSITION[bench.device]}"
    shape, model, _ = build_scale_model(bench)
    lean = workers.generation_model(shape, torch.bfloat16, bench.device)
    lean.load_state_dict(model.state_dict())
    for rows in DECODING_ROWS:
        bench.attempt(table, "ours", partial(measure_decoding, bench, rows, lean))
    if importlib.util.find_spec("transformers") is None:
        bench.emit(table, what="transformers: not installed")
        return

    # What cannot be loaded leaves one row that says so, and is not measured.
    theirs = []

    def load():
        theirs.append(load_with_transformers(bench, model))
        return {"version": version("transformers")}

    bench.attempt(table, "transformers", load)
    for loaded in theirs:
        for rows in DECODING_ROWS:
            measure = partial(measure_transformers, bench, rows, loaded)
            bench.attempt(table, "transformers", measure)


# ---------------------------------------------------------------- low precision


def measure_scaled_product(bench):
    """The product of two FP8 matrices with one scale each, as the hardware has it, against the
    same in bf16"""
    n = 64 if bench.tiny else 8192
    a = torch.randn(n, n, device=bench.device, dtype=torch.bfloat16)
    small, scale = a.to(torch.float8_e4m3fn), torch.ones((), device=bench.device)
    wide = bench.time(partial(torch.matmul, a, a.t()))
    multiply = partial(torch._scaled_mm, out_dtype=torch.bfloat16)
    seconds = bench.time(partial(multiply, small, small.t(), scale, scale))
    return {"ms": 1e3 * seconds, "TFLOP/s": 2 * n**3 / seconds / 1e12, "times_bf16": seconds / wide}


def experts_error(bench, precision):
    """The experts' FFN as the model computes it (in hardware, or emulated) against its formula:
    operands rounded to the format, then multiplied in bf16"""
    torch.manual_seed(0)
    x = torch.randn(512, 256, device=bench.device, dtype=torch.bfloat16)
    shapes = (128, 256), (128, 256), (256, 128)
    w_gate, w_up, w_down = (
        torch.randn(4, *shape, device=bench.device, dtype=torch.bfloat16) * 0.05 for shape in shapes
    )
    counts = torch.tensor([128, 200, 56, 128], device=bench.device)
    offsets, rounded = counts.cumsum(0).to(torch.int32), low_precision.FORMATS[precision]

    def product(a, w):
        return F.grouped_mm(rounded(a), rounded(w).transpose(-2, -1), offs=offsets)

    expected = product(F.silu(product(x, w_gate)) * product(x, w_up), w_down)
    found = low_precision.low_precision_swiglu(x, counts, w_gate, w_up, w_down, precision)
    return relative_error(found, expected)


def measure_low_precision(bench):
    in_hardware = low_precision.scales_in_hardware(torch.device(bench.device))
    measure_low_precision_hardware(bench, in_hardware)

    # Is the result right? Hardware adds up in another order and rounds once less; the emulation is
    # the formula.
    limit = 0.02 if in_hardware else 0
    for precision in ("mxfp8", "nvfp4"):
        what = f"{precision}: the experts' products against their formula"
        bench.check("checks", what, limit, partial(experts_error, bench, precision))

    # What does it cost, beside bf16?
    table = "forward and backward of one micro-batch at the scale"
    seconds = {}

    def measure(precision):
        _, model, tokens = build_scale_model(bench, precision=precision)
        seconds[precision] = bench.time(partial(train_once, model, tokens), 5)
        by = "bf16"
        if precision:
            by = "hardware" if in_hardware else "emulation"
        return {
            "by": by,
            "ms": 1e3 * seconds[precision],
            "times_bf16": seconds[precision] / seconds[""],
        }

    for precision in ("", "mxfp8", "nvfp4"):
        bench.attempt(table, precision or "bf16", partial(measure, precision))


def measure_low_precision_hardware(bench, in_hardware):
    """What this device has of its own"""
    found = "not here (compute capability 10 or later): emulated"
    if in_hardware:
        found = "multiplied by the tensor cores"
    bench.emit("hardware", what="block scales (MXFP8, NVFP4)", found=found)

    capability = torch.cuda.get_device_capability() if bench.device == "cuda" else (0, 0)
    if bench.tiny or capability >= (8, 9):
        what = "FP8 product, one scale per matrix (not used by the model)"
        bench.attempt("hardware", what, partial(measure_scaled_product, bench))
    else:
        found = "not here (compute capability 8.9 or later)"
        bench.emit("hardware", what="FP8 product", found=found)
