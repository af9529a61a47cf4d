"""benchmarks/gpu_speed.py: optimizer, mixture of experts, decoding and low precision; two parts
of benchmarks/gpu.py.

Each is measured beside what one would use instead (torch.optim.Muon, a dense layer, bf16) or beside
a floor, the least time that the device needs: the matrix products of Newton-Schulz alone, or the
bytes of a decoding step at the measured copy speed. What is compared is what benchmarks/muon.py,
train_step.py and decode.py compare, at the sizes of a GPU.

Left out: transformers, beside which benchmarks/train_step.py puts a whole model, on a GPU too.
"""

import math
from dataclasses import replace
from functools import partial

import torch

import hsdp
import train
from benchmarks.decode import decoding_step
from benchmarks.gpu_equality import make_optimizer
from benchmarks.gpu_job import stage_config
from benchmarks.muon import build_steps, gemm_floor, layer_shapes
from benchmarks.train_step import Sizes, measure_layers, train_once
from fast import accelerate, low_precision, workers

POSITION, WINDOW = {"cuda": 700, "cpu": 40}, {"cuda": 4098, "cpu": 130}


def model_shape(bench, **changes):
    """-> train.py's configuration of the gpu scale (on a CPU: tiny), and the shape of its model"""
    config = stage_config(bench, "pretrain")
    return config, replace(train.model_config(config, config.vocab), **changes)


def build_scale_model(bench, **changes):
    torch.manual_seed(0)
    _, shape = model_shape(bench, **changes)
    return accelerate(shape.build_model()).to(bench.device).compute_in(torch.bfloat16)


def ratio_columns(seconds):
    """{"ours": seconds, name: seconds of what it is compared with} -> columns of a row"""
    columns = {"ms": 1e3 * seconds["ours"]}
    for name, t in seconds.items():
        if name != "ours":
            columns |= {f"{name}_ms": 1e3 * t, f"times_{name}": seconds["ours"] / t}
    return columns


# ---------------------------------------------------------------- speed


def measure_model_step(bench):
    """An optimizer step on the model of the scale; the floor has the products of the matrices that
    Muon updates"""
    model = build_scale_model(bench)
    optimizer = make_optimizer(model, torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    matrices = []
    for group in optimizer.param_groups:
        if group["algorithm"] == "muon":
            matrices += [p.shape for p in group["params"]]
    products = gemm_floor(matrices, torch.bfloat16, bench.device)
    return ratio_columns(bench.time({"ours": optimizer.step, "floor": products}, 5))


def measure_muon(bench, sizes):
    """One step of Muon on the matrices of a decoder of these sizes"""
    shapes = layer_shapes(*sizes)
    steps = build_steps(shapes, torch.bfloat16, torch.float32, bench.device)
    numbers = sum(math.prod(shape) for shape in shapes.values())
    return {"parameters_M": numbers / 1e6, **ratio_columns(bench.time(steps, 5))}


def measure_mixture(bench):
    """Forward and backward of one layer of the scale, its weights kept in fp32 and in bf16, against
    a dense FFN with the FLOPs of the active experts"""
    config, shape = model_shape(bench)
    sizes = Sizes(
        T=config.micro_tokens,
        D=shape.dim,
        F=shape.expert_ffn,
        E=shape.experts,
        K=shape.num_experts_per_tok,
        repeat=2 if bench.tiny else 10,
    )
    seconds = measure_layers(bench.device, sizes)
    names = {
        "ours": "MoE layer, weights kept in fp32",
        "bf16_weights": "MoE layer",
        "dense": "dense layer",
    }
    return {"tokens": sizes.T, **ratio_columns({key: seconds[name] for key, name in names.items()})}


def decoding_bytes(model, rows, position):
    """What a step reads at least: every weight once, of the experts as many as the rows can choose,
    of the embedding next to nothing; and every sequence's entries of all layers"""
    config = model.config
    chosen = min(1, rows * config.num_experts_per_tok / config.experts)
    needed = 2 * config.layers * rows * position * config.entry_width
    for name, p in model.named_parameters():
        if hsdp.is_expert(name):
            needed += chosen * p.nbytes
        elif not name.startswith("embed"):
            needed += p.nbytes
    return needed


@torch.inference_mode()
def measure_decoding(bench, rows, model):
    """One token for each of `rows` sequences of equal length"""
    position, device = POSITION[bench.device], bench.device
    tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
    step = decoding_step(model, tokens, position, WINDOW[device], device)
    seconds = bench.time({"ours": step}, 20)
    seconds["floor"] = decoding_bytes(model, rows, position) / bench.bandwidth
    return {"rows": rows, "tokens_per_s": rows / seconds["ours"], **ratio_columns(seconds)}


def measure_speed(bench):
    # The optimizer: on the model of the scale, and at several sizes beside torch.optim.Muon.
    table = "optimizer step"
    what = "Muon and AdamW, the model of the scale"
    bench.attempt(table, what, partial(measure_model_step, bench))
    # Layers, width, heads, experts and hidden units of an expert: 2M, 67M and 359M parameters
    decoders = [(4, 128, 4, 8, 128), (6, 384, 6, 8, 1024), (8, 768, 12, 8, 2048)]
    for sizes in [(1, 64, 2, 2, 64)] if bench.tiny else decoders:
        what = f"Muon, {sizes[0]} layers of width {sizes[1]}"
        bench.attempt(table, what, partial(measure_muon, bench, sizes))

    table = "mixture of experts, forward and backward"
    bench.attempt(table, "one layer of the scale", partial(measure_mixture, bench))

    # Decoding, as the sampler does it: weights alone, in bf16 and fused.
    trained = build_scale_model(bench)
    model = workers.generation_model(trained.config, torch.bfloat16, bench.device)
    model.load_state_dict(trained.state_dict())
    table = f"decoding one token at position {POSITION[bench.device]}"
    for rows in (1, 32, 128, 256):
        bench.attempt(table, "ours", partial(measure_decoding, bench, rows, model))


# ---------------------------------------------------------------- low precision


def measure_low_precision(bench):
    """What MXFP8 and NVFP4 cost beside bf16, multiplied by the hardware or emulated. That the
    result is right is a test of the device."""
    by = "emulation: the hardware has no block scales (compute capability 10 has)"
    if low_precision.scales_in_hardware(torch.device(bench.device)):
        by = "hardware"
    config, shape = model_shape(bench)
    rows = max(1, config.micro_tokens // config.context)
    tokens = torch.randint(0, shape.vocab, (rows, config.context), device=bench.device)
    seconds = {}

    def measure(precision):
        model = build_scale_model(bench, precision=precision)

        def step():
            train_once(model, tokens)
            model.zero_grad()

        seconds[precision] = bench.time({"step": step}, 5)["step"]
        ratio = seconds[precision] / seconds[""]
        return {"by": by if precision else "", "ms": 1e3 * seconds[precision], "times_bf16": ratio}

    table = "forward and backward of one micro-batch at the scale"
    for precision in ("", "mxfp8", "nvfp4"):
        bench.attempt(table, precision or "bf16", partial(measure, precision))
