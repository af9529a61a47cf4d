"""fast/gpu_memory.py: the memory that a training step takes on one GPU, from shapes alone.

train.py asks before it has built anything: does the gpu scale fit on this card, and how many tokens
at a time? benchmarks/plan.py asks for whole clusters. Weights, gradients and optimizer state are
counted exactly, by parameter and layout (hsdp.Layout); activations are an estimate, since kernels
keep more or less than their formulas need.

Left out: temporary results, fragments of the allocator, and the sampler's cache in RL. A share of
the card's memory is kept free for them (largest_micro_batch).
"""

import math
from collections import Counter
from dataclasses import dataclass

import torch

from hsdp import Layout, is_expert
from moe import ModelConfig

# train.py's scales in fields of moe.ModelConfig; the laptop's, where its defaults are others. A
# test compares them with train.SCALES, which this file cannot import.
LAPTOP_SCALE = dict(vocab=1024, kv_lora=128, qk_nope=32, qk_rope=32, v_dim=32, rope_theta=1000.0)
GPU_SCALE = dict(
    vocab=8192,
    dim=640,
    layers=10,
    heads=10,
    kv_lora=256,
    qk_nope=64,
    qk_rope=32,
    v_dim=64,
    dense_ffn=2048,
    experts=8,
    expert_ffn=512,
)


@dataclass(frozen=True)
class Step:
    """What a training step works on: tokens, and the bytes of each kind of number"""

    tokens: int = 8192  # per GPU
    weight: int = 2  # bytes per number on the wire: matrices
    act: int = 2  # activations and their gradients
    unit: int = 2  # Muon's units
    # bytes per number of weights as they are kept (2: train.py --weight_dtype=bfloat16)
    kept: int = 4


def is_muon(name, shape):
    """Does Muon move this parameter? AdamW moves vectors, embeddings, the head and the routers."""
    return len(shape) > 1 and not name.startswith(("embed", "head")) and ".router." not in name


def layer_of(name):
    return name.split(".")[1] if name.startswith("layers.") else "root"


def gathered(name, shape, layout):
    """How many numbers of one parameter a rank holds while FSDP has gathered it. FSDP pads the
    first dimension, which it cuts. Of experts it gathers those of one ep rank."""
    if is_expert(name):
        return math.prod(shape) // layout.ep
    return -(-shape[0] // layout.shard) * layout.shard * math.prod(shape[1:])


def held(name, shape, layout):
    """How many numbers of one parameter a rank holds all the time: its piece"""
    return gathered(name, shape, layout) / (layout.efsdp if is_expert(name) else layout.shard)


def memory(config, shapes, layout, step, recompute=False):
    """{kind: bytes on one GPU}. Optimizer state is fp32. Gathered: the root and one layer with
    their gradients, and the next layer."""
    # What is counted exactly: weights, gradients (fp32, see hsdp.keep_gradients_in_fp32), state. In
    # fp32 Muon keeps one moment (4 bytes) and AdamW two (8 bytes).
    kinds, gathered_by_layer = Counter(), Counter()
    for name, shape in shapes.items():
        what = "expert" if is_expert(name) else "dense"
        size = held(name, shape, layout)
        kinds[f"{what} weights"] += step.kept * size
        kinds[f"{what} gradients"] += 4 * size
        kinds[f"{what} optimizer"] += (4 if is_muon(name, shape) else 8) * size
        gathered_by_layer[layer_of(name)] += gathered(name, shape, layout)

    # What FSDP gathers for a while. The largest layer decides.
    if layout.world > 1:
        root = 2 * step.kept * gathered_by_layer.pop("root")
        layer = (4 + 3 * step.weight) * max(gathered_by_layer.values())
        kinds["gathered for now"] = root + layer

    # What a layer keeps of one token for its backward: the residual stream (fp32), its norms,
    # queries, keys and values (keys and values of all cp ranks), and the hidden units of the FFN.
    c = config
    keys_values = layout.cp * (c.qk_nope + c.qk_rope + c.v_dim)
    attention = c.heads * (c.qk_nope + c.qk_rope + c.v_dim + keys_values)
    dense_ffn = 2 * c.dim + 4 * c.dense_ffn
    moe_ffn = (c.num_experts_per_tok + c.shared) * (2 * c.dim + 4 * c.expert_ffn)
    dense_layer = 4 * c.dim + step.act * (2 * c.dim + attention + dense_ffn)
    moe_layer = 4 * c.dim + step.act * (2 * c.dim + attention + moe_ffn)
    layers = [dense_layer] * c.dense_layers + [moe_layer] * (c.layers - c.dense_layers)

    # With recomputation every layer keeps its input alone (4 bytes per number, added below), and
    # one layer at a time keeps all of its activations.
    kept = max(layers) if recompute else sum(layers)

    # The scores over the vocabulary are made for a stretch of rows at a time
    # (fast.cpu_kernels.TargetLogprobs).
    scores = 8 * min(step.tokens * c.vocab, 1 << 26)
    kinds["activations (estimate)"] = step.tokens * (kept + 4 * c.dim * c.layers) + scores
    return kinds


def planned_gigabytes(config, shapes, tokens, recompute=False):
    """Gigabytes of a training step with so many tokens at a time, on one GPU that holds all"""
    return sum(memory(config, shapes, Layout(), Step(tokens=tokens), recompute).values()) / 1e9


def largest_micro_batch(config, shapes, gigabytes, most):
    """-> how many tokens one GPU of so many gigabytes trains at a time by the plan: `most`, halved
    until they fit; 0 if not even 1,024 fit.

    Planned for train.py's gpu scale (109.5M parameters, not measured on the cards named): 32,768
    tokens take 13.0 GB and fit 24, 40, 80 and 141 GB; 65,536 take 24.1 GB and fit 80 and 141; 16 GB
    carry 16,384 (7.5 GB), 8 GB 8,192 (4.7 GB)."""
    tokens = most
    # The rest of the memory is for what the plan does not know: see "Left out" above.
    while planned_gigabytes(config, shapes, tokens) > 0.6 * gigabytes:
        if tokens < 2048:
            return 0
        tokens //= 2
    return tokens


def parameter_shapes(config):
    """{parameter: shape} of a moe.ModelConfig, without memory for a single weight."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in config.build_model().named_parameters()}


def gpu_scale():
    """-> (ModelConfig, {parameter: shape}) of train.py's gpu scale"""
    config = ModelConfig(**GPU_SCALE)
    return config, parameter_shapes(config)
