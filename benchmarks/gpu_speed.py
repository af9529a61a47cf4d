"""benchmarks/gpu_speed.py: optimizer, mixture of experts and decoding; a part of benchmarks/gpu.py.

Each is measured beside what one would use instead (torch.optim.Muon, a dense layer) or beside a
floor, the least time that the device needs: the matrix products of Newton-Schulz alone, or the
bytes of a decoding step at the measured copy speed. What is compared is what benchmarks/muon.py,
train_step.py and decode.py compare, at the sizes of a GPU.

Left out: transformers, beside which benchmarks/train_step.py puts a whole model, on a GPU too.
"""

import math
from functools import partial

import torch

import hsdp
import train
from benchmarks.decode import decoding_step
from benchmarks.gpu_equality import make_optimizer
from benchmarks.gpu_job import stage_config
from benchmarks.muon import build_steps, gemm_floor, layer_shapes
from benchmarks.train_step import Sizes, measure_layers
from fast import accelerate
from fast.cuda_graphs import CAPTURED_AFTER, GraphSampler
from fast.samplers import sampling_model
from moe import Cache

# Where a decoding step is measured, and how many places a sequence has in the cache: the window of
# the sampler and two more, as the sampler makes its cache.
POSITION, WINDOW = {"cuda": 700, "cpu": 40}, {"cuda": 4098, "cpu": 130}


def model_shape(bench):
    """-> train.py's configuration of the gpu scale (on a CPU: tiny), and the shape of its model"""
    config = stage_config(bench, "pretrain")
    return config, train.model_config(config, config.vocab)


def build_scale_model(bench):
    """The model of the scale as it is trained, in the fast form, computing in bf16"""
    torch.manual_seed(0)
    _, shape = model_shape(bench)
    return accelerate(shape.build_model()).to(bench.device).compute_in(torch.bfloat16)


def ratio_columns(seconds):
    """{"ours": seconds, name: seconds of what it is compared with} -> columns of a row: times_X is
    our time over that of X"""
    columns = {"ms": 1e3 * seconds["ours"]}
    for name, t in seconds.items():
        if name != "ours":
            columns |= {f"{name}_ms": 1e3 * t, f"times_{name}": seconds["ours"] / t}
    return columns


def measure_model_step(bench):
    """An optimizer step on the model of the scale, on a card by its CUDA graph, beside the same
    step as it is written and the Newton-Schulz products of the matrices that Muon updates"""
    # Every parameter gets a random gradient.
    model = build_scale_model(bench)
    optimizer = make_optimizer(model, torch.bfloat16)
    written = make_optimizer(model, torch.bfloat16)
    written.can_capture = lambda tasks, params: False
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    for _ in range(CAPTURED_AFTER):
        optimizer.step()
    graphs = len(optimizer.captured.graphs) if optimizer.captured else 0

    # The floor leaves out what AdamW updates: it needs no products.
    matrices = []
    for group in optimizer.param_groups:
        if group["algorithm"] == "muon":
            matrices += [p.shape for p in group["params"]]
    products = gemm_floor(matrices, torch.bfloat16, bench.device)
    calls = {"ours": optimizer.step, "written": written.step, "floor": products}
    return {"graphs": graphs, **ratio_columns(bench.time(calls, 5))}


def measure_muon(bench, sizes):
    """One step of Muon on the matrices of a decoder of these sizes"""
    shapes = layer_shapes(*sizes)
    steps = build_steps(shapes, torch.bfloat16, torch.float32, bench.device)
    numbers = sum(math.prod(shape) for shape in shapes.values())
    return {"parameters_M": numbers / 1e6, **ratio_columns(bench.time(steps, 5))}


def measure_mixture(bench):
    """Forward and backward of one layer of the scale, its weights kept in fp32 and in bf16, against
    a dense FFN with the FLOPs of the active experts"""
    # The sizes of the scale, with as many tokens as a micro-batch has.
    config, shape = model_shape(bench)
    sizes = Sizes(
        T=config.micro_tokens,
        D=shape.dim,
        F=shape.expert_ffn,
        E=shape.experts,
        K=shape.num_experts_per_tok,
        repeat=2 if bench.tiny else 10,
    )

    # Three of the measured layers make the row: the training form first, which is "ours".
    seconds = measure_layers(bench.device, sizes)
    names = {
        "ours": "MoE layer, weights kept in fp32",
        "bf16_weights": "MoE layer",
        "dense": "dense layer",
    }
    return {"tokens": sizes.T, **ratio_columns({key: seconds[name] for key, name in names.items()})}


def decoding_bytes(model, rows, position):
    """The bytes that a decoding step must read at least: the cache entries of all rows in all
    layers, and every weight once. Of the experts only the share that the rows can choose counts.
    The embedding does not count, since a step reads one row of it per token."""
    config = model.config
    # The share of the experts that is read if all rows choose different ones.
    chosen = min(1, rows * config.num_experts_per_tok / config.experts)
    # The cache holds 2 bytes per number.
    needed = 2 * config.layers * rows * position * config.entry_width
    for name, p in model.named_parameters():
        if hsdp.is_expert(name):
            needed += chosen * p.nbytes
        elif not name.startswith("embed"):
            needed += p.nbytes
    return needed


@torch.inference_mode()
def measure_decoding(bench, rows, model):
    """One decoding step: a token for each of `rows` sequences of equal length, by the sampler's
    CUDA graph, beside the same step as it is written and the time that reading its bytes takes at
    the measured copy speed"""
    position, device = POSITION[bench.device], bench.device
    tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)  # (B, 1)
    written = decoding_step(model, tokens, position, WINDOW[device], device)

    sampler = GraphSampler(model, None, rows=rows, window=WINDOW[device] - 2)
    sampler.cache = Cache(model, rows, WINDOW[device])
    numbers = [[0]] * rows, [position] * rows, [[0.5]] * rows
    captured = partial(sampler.decode_and_draw, *numbers)
    for _ in range(CAPTURED_AFTER):
        captured()
    graphs = len(sampler.captured.graphs)

    # Bytes needed / time / bandwidth: how near the step is to what the card can read.
    seconds = bench.time({"ours": captured, "written": written}, 20)
    seconds["floor"] = decoding_bytes(model, rows, position) / bench.bandwidth
    row = {"rows": rows, "graphs": graphs, "tokens_per_s": rows / seconds["ours"]}
    used = {"bandwidth_used_%": 100 * seconds["floor"] / seconds["ours"]}
    return row | ratio_columns(seconds) | used


def measure_speed(bench):
    """All measurements of the part `speed`"""
    # The optimizer: on the model of the scale, and at several sizes beside torch.optim.Muon.
    table = "optimizer step"
    what = "Muon and AdamW, the model of the scale"
    bench.attempt(table, what, partial(measure_model_step, bench))
    # Layers, width, heads, experts and hidden units of an expert: 2M, 67M and 359M parameters
    decoders = [(4, 128, 4, 8, 128), (6, 384, 6, 8, 1024), (8, 768, 12, 8, 2048)]
    for sizes in [(1, 64, 2, 2, 64)] if bench.tiny else decoders:
        what = f"Muon, {sizes[0]} layers of width {sizes[1]}"
        bench.attempt(table, what, partial(measure_muon, bench, sizes))

    # One layer beside a dense one.
    table = "mixture of experts, forward and backward"
    bench.attempt(table, "one layer of the scale", partial(measure_mixture, bench))

    # Decoding with the model that the sampler uses: bf16 weights, fused, without optimizer state.
    trained = build_scale_model(bench)
    model = sampling_model(trained.config, torch.bfloat16, bench.device)
    model.load_state_dict(trained.state_dict())
    table = f"decoding one token at position {POSITION[bench.device]}"
    for rows in (1, 8) if bench.tiny else (1, 32, 128, 256, 512):
        bench.attempt(table, "ours", partial(measure_decoding, bench, rows, model))
