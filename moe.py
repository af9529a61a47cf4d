"""moe.py: the model, a small decoder in the shape of Kimi K2 (the base that Composer 2.5 was
trained from).

Two ideas. Multi-head latent attention: keys and values of all heads are rebuilt from one short
vector per token (the latent), so the decoding cache is that vector. Mixture of experts: a router
sends each token to k of E small feed-forward networks, so parameters grow with E while the work per
token does not.

Stated by Cursor (cursor.com/blog/composer-2-5; Technical Report, arXiv 2603.24477): the base is
Kimi K2.5, 1.04T parameters, 32B active, 61 layers, latent attention; router replay in RL; an MTP
head distilled from the main head's logits; NVFP4 with an FP32 scale per token, MXFP8. The layer
shapes are those of Kimi K2's public configuration (DeepSeek-V3's architecture). Ours: the sizes,
fp32 residual stream, initialisation, the balancing rate.

    attention   c_t = norm(W_a x_t),  k_t = [W_kb c_t ; rope(W_r x_t)],  v_t = W_vb c_t
    decoding    q^T (W_kb c) = (W_kb^T q)^T c: absorb W_kb into the query, and attention runs on the latents themselves
    routing     s = sigmoid(W_router x) in fp32;  choice = top-k of s + b;  y = shared(x) + scale * sum_i s_i / sum_j s_j * expert_i(x)
    low bits    x -> round(x / s) * s per block of the contraction axis: E4M3 and s = 2^n (MXFP8), E2M1 and s = E4M3 * FP32 (NVFP4)
    drafting    h'_t = block(W [norm h_t ; norm embed(x_t+1)]) speaks of x_t+2; learned from the main head's logits at t+1
    balancing   b_e += rate * sign(mean load - load_e): the bias only moves the choice, no auxiliary loss bends the gradient

Left out: dropout, and a backward in the small formats. The model knows no ranks: hsdp.py replaces
two attributes, MoE.dispatch (tokens travel to their experts) and Attention.gather (latents of the
whole sequence), whose defaults do nothing.

Letters: B batch, T time, D model width, H heads, N q/k dims without RoPE, R rotary dims, V value
dims, C latent dims, E experts, K chosen experts, F expert width, M = B * T tokens, S cache rows.

    python moe.py            trains 150 steps on real Python twice: expert load with and without the balancing bias (a figure),
                             what the small formats cost, how often the draft is right
    python moe.py --bench    tokens/s, grouped_mm against the loop, MoE against a dense layer of equal active FLOPs; transformers, if there
"""

import argparse
import importlib.util
import json
import math
import mmap
import multiprocessing
import os
import re
import sys
import sysconfig
import tempfile
import time
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class ModelConfig:
    vocab: int = 1024
    dim: int = 128
    layers: int = 4
    heads: int = 4
    attention: str = "mla"  # "mla" as Kimi and DeepSeek, "gqa" as Qwen3
    q_lora: int = 0  # rank of the query projection, 0 = full (Kimi K2: 1536)
    kv_lora: int = 64  # width of the latent = what the cache holds (Kimi K2: 512)
    qk_nope: int = 16  # (Kimi K2: 128)
    qk_rope: int = 16  # (Kimi K2: 64)
    v_dim: int = 32  # (Kimi K2: 128)
    kv_heads: int = 2  # gqa only
    dense_layers: int = 1  # the first layer is dense in Kimi K2 as well
    dense_ffn: int = 384
    experts: int = 8  # (Kimi K2: 384, 8 active)
    active: int = 2
    shared: int = 1
    expert_ffn: int = 128
    route_scale: float = 1.0  # (Kimi K2: 2.827)
    # experts stand in groups and a token chooses among its best ones (DeepSeek-V3: 8 groups, best
    # 4)
    n_group: int = 1
    topk_group: int = 1
    # a replayed expert must score this much of the router's own K-th best, or is replaced
    plausible: float = 0.0
    # of the expert products: "mxfp8", "nvfp4", or "" = that of compute()
    precision: str = ""
    mtp: int = 0  # 1: a head that drafts the token after the next
    rope_theta: float = 10000.0
    context: int = 256  # the window of pretraining; YaRN stretches it by yarn_factor
    yarn_factor: float = 1.0
    norm_eps: float = 1e-6
    tie: bool = False
    qk_norm: bool = False  # gqa: RMSNorm of every head's query and key (Qwen3)
    qkv_bias: bool = False  # gqa: (Qwen2)
    scoring: str = "sigmoid"  # or "softmax" (Qwen3-MoE)
    norm_gates: bool = True  # the gates of the chosen experts are divided by their sum
    # pairs that turn more often than this in the old window are kept (Kimi K2: 1) ...
    yarn_fast: float = 32.0
    yarn_slow: float = 1.0  # ... and those that turn less often are slowed by the whole factor
    yarn_mscale: float = 1.0  # softmax temperature (0.1 yarn_mscale ln(factor) + 1)^2
    yarn_amplitude: float = 1.0  # factor on cos and sin, where Qwen puts the temperature

    def __post_init__(self):
        assert self.attention in (
            "mla",
            "gqa",
        ), f"attention must be mla or gqa, not {self.attention!r}"
        assert (
            self.active <= self.experts
        ), f"active={self.active} experts of experts={self.experts}"
        assert self.qk_rope % 2 == 0, "qk_rope must be even: RoPE turns pairs"
        size, rest = divmod(self.experts, self.n_group)
        assert self.n_group == 1 or (
            rest == 0 and size > 1
        ), f"n_group={self.n_group} groups of two or more out of experts={self.experts}"
        assert self.active <= size * self.topk_group <= self.experts, (
            f"topk_group={self.topk_group} of n_group={self.n_group} groups "
            f"of {size} experts must hold active={self.active}"
        )
        assert (
            self.precision in FORMATS
        ), f"precision must be one of {list(FORMATS)}, not {self.precision!r}"
        assert (
            not self.precision or self.dim % 32 == self.expert_ffn % 32 == 0
        ), "low precision scales dim and expert_ffn by blocks of 32"
        assert self.mtp in (0, 1), f"mtp={self.mtp}: no head or one"
        assert self.scoring in (
            "sigmoid",
            "softmax",
        ), f"scoring must be sigmoid or softmax, not {self.scoring!r}"
        assert self.attention == "gqa" or not (
            self.qk_norm or self.qkv_bias
        ), "qk_norm and qkv_bias are for gqa"

    @property
    def window(self):
        return int(self.context * self.yarn_factor)


# ---------------------------------------------------------------- mathematics


def to_device(numbers, device):
    """A list of numbers -> a tensor there. Not torch.tensor(numbers, device=...): that waits until
    the GPU has done all it was asked before. From ordinary memory a copy that does not wait is
    safe, since CUDA takes the numbers before it returns."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def linear(x, weight):
    """x (..., C) @ weight (..., C) transposed, in x's dtype; a stack (H, R, C) gives (..., H,
    R)."""
    y = F.linear(x, weight.flatten(0, -2).to(x.dtype))
    return y if weight.ndim == 2 else y.view(*x.shape[:-1], *weight.shape[:-1])


def rope_frequencies(dims, theta, context, factor, fast=32, slow=1, mscale=1):
    """Angles per position (dims/2,) and the attention temperature, stretched by YaRN (arXiv
    2309.00071): pairs that turn less than `slow` times inside the old window are slowed by
    `factor`, fast ones are kept, a ramp lies between."""
    frequency = theta ** (-torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    if factor == 1:
        return frequency, 1.0
    pair = lambda turns: dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), dims - 1)
    slow = ((torch.arange(dims // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (
        frequency * (1 - slow) + frequency / factor * slow,
        (0.1 * mscale * math.log(factor) + 1) ** 2,
    )


def rotate(x, cos, sin):
    """RoPE on the last dimension, halves as pairs: x (B, T, H, R), cos and sin (B or 1, T, 1, R) of
    `turns`."""
    x, dtype = x.float(), x.dtype
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((b, a), -1) * sin).to(dtype)


def turns(angle):
    """(..., R/2) -> cos and sin (..., R), as a pair's halves need them: a cos - b sin, b cos + a
    sin"""
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def attend(q, k, v, mask, scale, coarse=True):
    """softmax(scale q k^T) v with a causal mask, or `mask` (True = may look, or 0 and -inf in the
    dtype of q, which the kernel would make of it in every layer again): q (B, H, T, Q), k (B, H, S,
    Q), v (B, H, S, V). coarse: scores may be rounded to that dtype."""
    B, H, T, Q = q.shape
    S, V = v.shape[-2:]
    plain = S <= 512 if mask is None else q.dtype == torch.bfloat16 == mask.dtype
    if (
        plain
        and q.device.type == "cpu"
        and (q.dtype == torch.float32 or coarse and q.dtype == torch.bfloat16)
    ):
        # on a CPU plain products of numbers that lie together, 128 queries with what they may see,
        # take .4 to .8 of the kernel's time (forward and backward; of fp32 a few queries with many
        # keys, as in decoding, are the kernel's)
        shared, k = k is v, k.contiguous()
        v = k if shared else v.contiguous()
        q, k, v, out = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1), []
        for r in slice_rows(T, 128):
            end = S if mask is not None else min(r.stop, S)
            bias = (
                q.new_full((min(r.stop, T) - r.start, end), -torch.inf).triu(1 + r.start)
                if mask is None
                else mask[:, :, r]
            )
            bias = bias.expand(B, H, -1, -1).flatten(0, 1)
            out.append(
                torch.bmm(
                    torch.baddbmm(bias, q[:, r], k[:, :, :end], alpha=scale).softmax(-1), v[:, :end]
                )
            )
        return (torch.cat(out, 1) if len(out) > 1 else out[0]).view(B, H, T, V)
    # flash attention wants equal widths
    v = F.pad(v, (0, Q - V)) if Q > V else v
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)[
        ..., :V
    ]


def swiglu(x, w_gate, w_up, w_down):
    return linear(F.silu(linear(x, w_gate)) * linear(x, w_up), w_down)


def power_of_two(exponent):
    # by its bits: exact on any device, which exp2 does not promise
    return ((exponent + 127) << 23).view(torch.float32)


def nearest(x, mantissa, lowest):
    """The nearest number with so many mantissa bits and exponents from `lowest` up (subnormals
    below), ties to even."""
    step = power_of_two((torch.frexp(x)[1] - 1).clamp(min=lowest) - mantissa)
    return (x / step).round() * step


def mxfp8_parts(x):
    """-> numbers of E4M3 (..., C/32, 32), and a power of two for every 32 (..., C/32, 1) that takes
    the largest to at most 448."""
    blocks = x.float().unflatten(-1, (-1, 32))
    fraction, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))
    # 448 = 0.875 * 2^9: rounded up, no saturation
    scale = power_of_two((exponent - 9 + (fraction > 0.875)).clamp(min=-126))
    return nearest(blocks / scale, 3, -6), scale


def nvfp4_parts(x):
    """-> numbers of E2M1 (..., C/16, 16), an E4M3 scale for every 16 (..., C/16, 1), and an FP32
    one. That is Cursor's variant: it belongs to the row (token), not to the tensor, so that no
    token's value depends on the others in its batch: (..., 1, 1)"""
    blocks = x.float().unflatten(-1, (-1, 16))
    top = blocks.abs().amax(-1, keepdim=True)
    # Divisors are tensors on the device: CUDA turns a division by a plain number into a product
    # with its reciprocal, whose last bit may differ, and NVFP4 wants the IEEE quotient (Technical
    # Report, 6.1).
    largest, both = top.new_full((), 6.0), top.new_full((), 6.0 * 448)
    row = (top.amax(-2, keepdim=True) / both).clamp(min=1e-30)
    scale = nearest(top / largest / row, 3, -6).clamp(2**-9, 448)
    return nearest(blocks / (scale * row), 1, 0).clamp(-6, 6), scale, row


def mxfp8(x):
    """x (..., C) rounded to what MXFP8 can hold"""
    numbers, scale = mxfp8_parts(x)
    return (numbers * scale).flatten(-2).to(x.dtype)


def nvfp4(x):
    """x (..., C) rounded to what NVFP4 can hold"""
    numbers, scale, row = nvfp4_parts(x)
    return (numbers * scale * row).flatten(-2).to(x.dtype)


FORMATS = {"": lambda x: x, "mxfp8": mxfp8, "nvfp4": nvfp4}


class Quantize(torch.autograd.Function):
    """The values are those of the format, the products run in the dtype of x. The gradient passes
    straight through (Cursor computes it in MXFP8: left out)."""

    @staticmethod
    def forward(ctx, x, precision):
        return FORMATS[precision](x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def tiled(scale):
    """Block scales (R, S) as the products want them: tiles of 128 rows by 4, row r of a tile at 16
    (r mod 32) + 4 (r div 32) (cuBLAS documentation, "1D block scaling factors layout")."""
    tiles = F.pad(scale.view(torch.uint8), (0, -scale.shape[1] % 4, 0, -scale.shape[0] % 128))
    return (
        tiles.unflatten(1, (-1, 4))
        .unflatten(0, (-1, 4, 32))
        .permute(0, 3, 2, 1, 4)
        .flatten()
        .view(scale.dtype)
    )


def packed(x, precision):
    """x (R, C) as the operand of a scaled product: numbers (R, C), or two to a byte, block scales
    in tiles, and rows' scales (R, 1)."""
    if precision == "mxfp8":
        numbers, scale = mxfp8_parts(x)
        return (
            numbers.flatten(1).to(torch.float8_e4m3fn),
            tiled(scale[..., 0].to(torch.float8_e8m0fnu)),
            scale.new_ones(len(x), 1),
        )
    numbers, scale, row = nvfp4_parts(x)
    size = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=x.device)
    code = (torch.bucketize(numbers.abs(), size) + 8 * (numbers < 0)).flatten(1).to(torch.uint8)
    return (
        (code[:, ::2] | code[:, 1::2] << 4).view(torch.float4_e2m1fn_x2),
        tiled(scale[..., 0].to(torch.float8_e4m3fn)),
        row[..., 0],
    )


class ScaledProduct(torch.autograd.Function):
    """x (M, C) sorted by expert, w (E, R, C) -> (M, R), on tensor cores that take the small
    formats, an expert at a time. The gradient is that of the emulation: products of the rounded
    values in the dtype of x."""

    @staticmethod
    def forward(ctx, x, w, counts, precision):
        ctx.save_for_backward(x, w, counts)
        ctx.precision = precision
        kind = F.ScalingType.BlockWise1x32 if precision == "mxfp8" else F.ScalingType.BlockWise1x16
        order, y = F.SwizzleType.SWIZZLE_32_4_4, x.new_empty(len(x), w.shape[1])
        for rows, weight, out in zip(x.split(counts.tolist()), w, y.split(counts.tolist())):
            if len(rows):
                (a, a_scale, a_row), (b, b_scale, b_row) = packed(rows, precision), packed(
                    weight, precision
                )
                product = F.scaled_mm(
                    a,
                    b.t(),
                    a_scale,
                    kind,
                    b_scale,
                    kind,
                    order,
                    order,
                    output_dtype=torch.bfloat16,
                )
                out.copy_(product * a_row * b_row.T)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, w, counts = ctx.saved_tensors
        offsets, q = counts.cumsum(0).to(torch.int32), FORMATS[ctx.precision]
        return (
            F.grouped_mm(grad, q(w), offs=offsets),
            F.grouped_mm(grad.t(), q(x), offs=offsets),
            None,
            None,
        )


def scales_in_hardware(device):
    """Do the tensor cores of this device multiply MXFP8 and NVFP4? Compute capability 10 (B200) and
    later."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (10, 0)
    )


def grouped_swiglu(x, counts, w_gate, w_up, w_down, precision=""):
    """x (M, D) sorted by expert, counts (E,): rows per expert. One grouped GEMM per matrix instead
    of E small ones. precision: in hardware where there is any, else emulated: the same numbers
    multiplied in the dtype of x."""
    offsets = counts.cumsum(0).to(torch.int32)
    q = lambda t: Quantize.apply(t, precision) if precision else t
    mm = lambda a, w: F.grouped_mm(a, q(w.to(a.dtype)).transpose(-2, -1), offs=offsets)
    if precision and scales_in_hardware(x.device):
        q, mm = lambda t: t, lambda a, w: ScaledProduct.apply(a, w.to(a.dtype), counts, precision)
    x = q(x)
    return mm(q(F.silu(mm(x, w_gate)) * mm(x, w_up)), w_down)


def filled(number):
    """The next multiple of 64. On a CPU, oneDNN compiles a kernel for every shape it meets and
    keeps a thousand of them: ragged numbers of rows cost this small model half of its time and
    gigabytes."""
    return -(-number // 64) * 64


class LoopedSwiGLU(torch.autograd.Function):
    """grouped_swiglu, one expert after the other. In bf16 on a CPU it wins from 64 rows an expert
    on: what one touches stays in the cache. Each product takes its expert's rows, filled up with
    those that follow. What it writes into these, their own experts overwrite later, and in the
    backward pass their gradient is zero: results land where they belong, and only the gradient's
    rows are copied."""

    @staticmethod
    def places(counts):
        """-> for each expert: its number, how many rows it has, and the slice that its products
        take"""
        numbers, ends = counts.tolist(), counts.cumsum(0).tolist()
        return [
            (i, n, slice(end - n, end - n + filled(n)))
            for i, (n, end) in enumerate(zip(numbers, ends))
        ]

    @staticmethod
    def forward(ctx, x, counts, w_gate, w_up, w_down):
        places, rows = LoopedSwiGLU.places(counts), len(x)
        x = F.pad(x, (0, 0, 0, filled(1)))  # the last expert's too
        y, (gate, up) = torch.empty_like(x), x.new_empty(2, len(x), w_gate.shape[1])
        for i, _, r in places:
            torch.mm(x[r], w_gate[i].T, out=gate[r])
            torch.mm(x[r], w_up[i].T, out=up[r])
            torch.mm(F.silu(gate[r]).mul_(up[r]), w_down[i].T, out=y[r])
        ctx.save_for_backward(x, gate, up, w_gate, w_up, w_down)
        ctx.places = places
        return y.resize_(rows, y.shape[1])  # no view: FSDP warns of those

    @staticmethod
    def backward(ctx, grad):
        x, gate, up, *weights = ctx.saved_tensors
        (w_gate, w_up, w_down), (d_gate, d_up, d_down) = weights, (
            torch.empty_like(w) for w in weights
        )
        dx = torch.empty_like(x)
        for i, n, r in ctx.places:
            dy = F.pad(grad[r.start : r.start + n], (0, 0, 0, r.stop - r.start - n))
            act = F.silu(gate[r])
            torch.mm(dy.T, act * up[r], out=d_down[i])
            dh = dy @ w_down[i]
            du, dg = act.mul_(dh), torch.ops.aten.silu_backward(dh.mul_(up[r]), gate[r])
            torch.mm(dg.T, x[r], out=d_gate[i])
            torch.mm(du.T, x[r], out=d_up[i])
            torch.addmm(dg @ w_gate[i], du, w_up[i], out=dx[r])
        return dx[: len(grad)], None, d_gate, d_up, d_down


def looped_swiglu(x, counts, w_gate, w_up, w_down):
    return LoopedSwiGLU.apply(x, counts, *(w.to(x.dtype) for w in (w_gate, w_up, w_down)))


class EmbedTokens(torch.autograd.Function):
    """Rows of W (V, D) for tokens (B, T) -> (B, T, D) in fp32. The gradient of a token's row is the
    sum over all its places: it is kept in fp32, whatever the dtype of W, and rounded once. In bf16
    the sum of a frequent token would soon stop growing."""

    @staticmethod
    def forward(ctx, tokens, W):
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtype = len(W), W.dtype
        return F.embedding(tokens, W).float()

    @staticmethod
    def backward(ctx, grad):
        (tokens,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(grad, tokens, ctx.rows, -1, False).to(
            ctx.dtype
        )


COLDEST = 1e-30  # colder is as good as 0, and 1 / temperature stays finite in fp32


def divide_by_temperature(scores, temperature):
    """scores (..., V) in fp32 -> what softmax takes at a temperature above 0. At very small ones
    relative to the largest score, which changes no probability, and no quotient overflows: the
    largest logit then has all of it."""
    if temperature == 1:
        return scores
    if temperature >= 1e-4:
        return scores / temperature
    return (scores - scores.amax(-1, keepdim=True)) / max(temperature, COLDEST)


class TargetLogprobs(torch.autograd.Function):
    """log softmax(h W^T / temperature)[target] for h (N, D), W (V, D), targets (N,) -> (N,) fp32, a
    stretch of rows at a time: the (N, V) scores, the largest tensor of a small model by far, never
    exist. The backward computes each stretch again."""

    @staticmethod
    def scores(h, W, temperature):
        return divide_by_temperature(F.linear(h, W.to(h.dtype)).float(), temperature)

    @staticmethod
    def stretches(h, W):
        return slice_rows(len(h), max(64, (1 << (26 if h.is_cuda else 18)) // len(W)))

    @staticmethod
    def forward(ctx, h, W, targets, temperature):
        ctx.save_for_backward(h, W, targets)
        ctx.temperature = temperature
        nll = [
            F.cross_entropy(
                TargetLogprobs.scores(h[r], W, temperature), targets[r], reduction="none"
            )
            for r in TargetLogprobs.stretches(h, W)
        ]
        return -torch.cat(nll) if nll else h.new_zeros(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad):
        h, W, targets = ctx.saved_tensors
        # The sum over the stretches is kept in fp32, whatever the weights' dtype.
        dh, dW, lower = (
            torch.empty_like(h),
            torch.zeros_like(W, dtype=torch.promote_types(W.dtype, torch.float32)),
            W.to(h.dtype),
        )
        for r in TargetLogprobs.stretches(h, W):
            p = TargetLogprobs.scores(h[r], lower, ctx.temperature).softmax(-1).mul_(-grad[r, None])
            # grad * (one-hot - softmax)
            p.scatter_add_(1, targets[r, None], grad[r, None])
            p = (
                p.div_(max(ctx.temperature, COLDEST)).to(h.dtype)
                if ctx.temperature != 1
                else p.to(h.dtype)
            )
            dh[r] = p @ lower
            dW += p.T @ h[r]
        return dh, dW.to(W.dtype), None, None


def slice_rows(number, size):
    return [slice(i, i + size) for i in range(0, number, size)]


# ---------------------------------------------------------------- layers


def inverse_rms(x, eps):
    """x (..., D) -> 1 / sqrt(mean(x^2) + eps), (..., 1)"""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.mul_(norm).div_(x.shape[-1]).add_(eps).rsqrt_()


class RMSNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * w by hand, x (..., D), w (D,): on a CPU, where PyTorch makes it
    of many steps, each over all of x, forward and backward take a third of the time."""

    @staticmethod
    def forward(ctx, x, w, eps):
        r = inverse_rms(x, eps)
        ctx.save_for_backward(x, w, r)
        return (x * r).mul_(w)

    @staticmethod
    def backward(ctx, grad):
        x, w, r = ctx.saved_tensors
        product = grad * x
        # what changes the norm itself
        along = (product @ w)[..., None] * r**3 / -x.shape[-1]
        return (grad * w).mul_(r).addcmul_(x, along), product.flatten(0, -2).T @ r.flatten(), None


class Norm(nn.Module):
    """RMSNorm in fp32; its output is in the compute dtype, which every matrix product after it then
    follows."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps, self.dtype = nn.Parameter(torch.ones(dim)), eps, torch.float32

    def forward(self, x):
        x, w = x.float(), self.weight.float()
        if x.device.type != "cpu":
            return F.rms_norm(x, w.shape, w, self.eps).to(self.dtype)
        y = (
            (x * inverse_rms(x, self.eps)).mul_(w)
            if torch.is_inference_mode_enabled()
            else RMSNorm.apply(x, w, self.eps)
        )
        # in the sampler the same bits, without autograd's own time
        return y.to(self.dtype)


def weight(*shape, std=None):
    return nn.Parameter(torch.randn(shape) * (shape[-1] ** -0.5 if std is None else std))


class FFN(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w_gate, self.w_up, self.w_down = (
            weight(hidden, dim),
            weight(hidden, dim),
            weight(dim, hidden, std=0),
        )

    def forward(self, x):
        return swiglu(x, self.w_gate, self.w_up, self.w_down)


class Experts(nn.Module):
    """A stack of E feed-forward networks. Input rows come sorted by expert."""

    def __init__(self, experts, dim, hidden, precision=""):
        super().__init__()
        self.precision = precision
        self.w_gate, self.w_up = weight(experts, hidden, dim), weight(experts, hidden, dim)
        self.w_down = weight(experts, dim, hidden, std=0)

    def forward(self, x, counts):
        weights = [
            w.to_local() if hasattr(w, "to_local") else w
            for w in (self.w_gate, self.w_up, self.w_down)
        ]
        if (
            x.device.type == "cpu"
            and x.dtype == torch.bfloat16
            and len(x) >= 64 * len(counts)
            and not self.precision
        ):
            return looped_swiglu(x, counts, *weights)
        return grouped_swiglu(x, counts, *weights, self.precision)


class Router(nn.Module):
    """Scores in fp32: a bf16 score flips near-ties between trainer and sampler. The bias is a
    buffer: no gradient."""

    def __init__(self, config):
        super().__init__()
        self.k, self.scale, self.groups, self.best = (
            config.active,
            config.route_scale,
            config.n_group,
            config.topk_group,
        )
        self.softmax, self.normalize = config.scoring == "softmax", config.norm_gates
        self.weight = weight(config.experts, config.dim)
        self.register_buffer("bias", torch.zeros(config.experts))
        # tokens per expert since the last balance()
        self.register_buffer("load", torch.zeros(config.experts))

    def forward(self, x, replay=None, plausible=0.0):
        """x (M, D) -> choice (M, K), gates (M, K). replay (M, K) overrides the choice where it is
        >= 0; scores stay live. A replayed expert that scores below plausible * (the router's own
        K-th best) gives way to the router's candidate."""
        score = F.linear(x.float(), self.weight.float())  # (M, E)
        score = score.softmax(1) if self.softmax else score.sigmoid()
        preference = biased = score.detach() + self.bias
        # a group is worth its two best experts
        if self.groups > 1:
            # (M, groups)
            worth = biased.unflatten(1, (self.groups, -1)).topk(2)[0].sum(-1)
            out = torch.ones_like(worth, dtype=torch.bool).scatter_(
                1, worth.topk(self.best)[1], False
            )
            preference = biased.masked_fill(
                out.repeat_interleave(score.shape[1] // self.groups, 1), -torch.inf
            )
        if replay is not None:
            floor = plausible * score.detach().topk(self.k)[0][:, -1:]
            # a column in front takes the -1s
            given = F.pad(torch.zeros_like(score, dtype=torch.bool), (1, 0))
            given = given.scatter_(1, replay.long() + 1, True)[:, 1:]
            preference = torch.where(given & (score >= floor), biased + 1e3, preference)
        choice = preference.topk(self.k)[1]
        gates = score.gather(1, choice)
        gates = gates / (gates.sum(1, keepdim=True) + 1e-20) if self.normalize else gates
        return choice, gates if self.scale == 1 else gates * self.scale


def collect(rows, back, gates):
    """rows (M*K, D) by expert -> what came back to each token (M, K, D), and its sum weighted by
    gates (M, K): (M, D)"""
    copies = rows.index_select(0, back).view(*gates.shape, -1)
    # sums in fp32 whatever the dtype
    return copies, torch.bmm(gates[:, None], copies)[:, 0]


class Spread(torch.autograd.Function):
    """A copy of each token's row for each of its experts, sorted by expert. Plain indexing would
    scatter-add the gradient, which on several threads sums in an order of its own: a resumed run
    would not end with the same bits."""

    @staticmethod
    def forward(ctx, x, order, back, k):
        ctx.save_for_backward(back)
        ctx.k = k
        return x.index_select(0, order // k)  # (M*K, D)

    @staticmethod
    def backward(ctx, grad):
        return (
            collect(grad, ctx.saved_tensors[0], grad.new_ones(len(grad) // ctx.k, ctx.k))[1],
            None,
            None,
            None,
        )


class Collect(torch.autograd.Function):
    """The way back, Spread's transpose: the sum over a token's experts, each times its gate."""

    @staticmethod
    def forward(ctx, rows, order, back, gates):
        copies, y = collect(rows, back, gates)
        ctx.save_for_backward(copies, order, gates)
        return y  # (M, D)

    @staticmethod
    def backward(ctx, grad):
        copies, order, gates = ctx.saved_tensors
        rows = grad.index_select(0, order // gates.shape[1]).mul_(gates.flatten()[order, None])
        return rows, None, None, torch.bmm(copies, grad[:, :, None])[:, :, 0]


class MoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config.experts, config.dim, config.expert_ffn, config.precision)
        self.shared = FFN(config.dim, config.expert_ffn * config.shared) if config.shared else None
        self.few, self.plausible = (
            0 if config.experts > 16 or config.precision else 2048 // config.experts
        ), config.plausible
        # hsdp.py: all-to-all to the ranks that own the experts
        self.dispatch = lambda x, counts, run: run(x, counts)
        self.whole = None  # see Model.side_by_side

    def forward(self, x, replay=None, record=None, decoding=False, real=None):
        """x (B, T, D). real (M*K,): 1.0 for each pair (token, expert) that counts as load, 0.0 for
        padding, which is computed all the same; None: all count."""
        B, T, D = x.shape
        flat = x.reshape(B * T, D)
        choice, gates = self.router(
            flat, None if replay is None else replay.reshape(B * T, -1), self.plausible
        )
        if record is not None:
            record.append(choice.view(B, T, -1))
        if decoding:
            return self.all_experts(flat, choice, gates).unflatten(0, (B, T))
        # (M*K,) rows by expert
        order = choice.flatten().argsort(stable=True)
        # Rows per expert. (bincount gives the same, but on a GPU Python waits until it has found
        # the largest number.)
        ones = torch.ones_like(order)
        # (E,)
        counts = ones.new_zeros(len(self.router.bias)).scatter_add_(0, choice.flatten(), ones)
        if self.training:
            # Padding is the same token over and over and lands on two or three experts: counted, it
            # would move the biases against the experts that real tokens need.
            self.router.load.scatter_add_(
                0, choice.flatten(), ones.float() if real is None else real
            )
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        y = self.dispatch(Spread.apply(flat, order, back, self.router.k), counts, self.experts)
        y = Collect.apply(y, order, back, gates.to(y.dtype)).view(B, T, D)
        return y if self.shared is None else y + self.shared(x)

    def fit(self, x):
        """Are the tokens of x few enough for all_experts? fp32 products weigh more on a CPU, so
        there an eighth as many."""
        return x.shape[:2].numel() <= (
            self.few // 8 if x.device.type == "cpu" and x.dtype == torch.float32 else self.few
        )

    def wide(self):
        """All experts, the shared ones behind the others, as one network: gate and up (2 (E + S) F,
        D), down (D, (E + S) F)."""
        e, s = self.experts, self.shared
        if self.whole is not None and self.whole[0].data_ptr() == e.w_gate.data_ptr():
            return self.whole
        of_shared = lambda name: [getattr(s, name)] if s is not None else []
        up = [
            w
            for name in ("w_gate", "w_up")
            for w in (getattr(e, name).flatten(0, 1), *of_shared(name))
        ]
        return torch.cat(up), torch.cat(
            [e.w_down.transpose(0, 1).flatten(1), *of_shared("w_down")], 1
        )

    def side_by_side(self):
        up, down = self.whole = self.wide()
        (E, F, _), n = self.experts.w_gate.shape, self.experts.w_gate.shape[:2].numel()
        for name, rows in zip(("w_gate", "w_up"), up.chunk(2)):
            getattr(self.experts, name).data = rows[:n].unflatten(0, (E, F))
            if self.shared is not None:
                getattr(self.shared, name).data = rows[n:]
        self.experts.w_down.data = down[:, :n].unflatten(1, (E, F)).transpose(0, 1)
        if self.shared is not None:
            self.shared.w_down.data = down[:, n:]

    def all_experts(self, x, choice, gates):
        """A decoding step, or a short prefill, reads nearly every expert's weights for its few
        tokens. Then one wide network, each expert a stretch of its hidden units and those not
        chosen gated to zero, costs less than sorting. Weights stand on the left of both products,
        where a CPU reads them as they lie, at twice the rate. x (M, D), choice and gates (M, K) ->
        (M, D)"""
        up, down = (w.to(x.dtype) for w in self.wide())
        E, F_ = self.experts.w_gate.shape[:2]
        # (E + S, M)
        gate = gates.new_zeros(down.shape[1] // F_, len(x)).scatter_(0, choice.T, gates.T)
        gate[E:] = 1
        # ((E + S) F, M) each
        g, u = (up @ x.T).chunk(2)
        hidden = F.silu(g).mul_(u).view(len(gate), F_, -1).mul_(gate.to(x.dtype)[:, None])
        return (down @ hidden.flatten(0, 1)).T


class Attention(nn.Module):
    """Both kinds write one `entry` per token (what a cache holds) and read keys and values back
    from it.

    MLA: the entry is the latent and the rotary key shared by all heads. GQA: the rotated keys and
    the values."""

    def __init__(self, config):
        super().__init__()
        # hsdp.py: gather over the sequence
        self.config, self.gather, self.scale = config, lambda t: t, 1.0
        c, D, H = config, config.dim, config.heads
        self.q = c.qk_nope + c.qk_rope
        if c.q_lora:
            # DeepSeek's code: 1e-6 here, whatever norm_eps
            self.wq_a, self.q_norm = weight(c.q_lora, D), Norm(c.q_lora, 1e-6)
        self.wq = weight(H, self.q, c.q_lora or D)
        if c.attention == "mla":
            self.wkv_a, self.kv_norm = weight(c.kv_lora + c.qk_rope, D), Norm(c.kv_lora, 1e-6)
            self.wk_b, self.wv_b = weight(H, c.qk_nope, c.kv_lora), weight(H, c.v_dim, c.kv_lora)
        else:
            self.wk, self.wv = weight(c.kv_heads, self.q, D), weight(c.kv_heads, c.v_dim, D)
        if c.qk_norm:
            self.q_head_norm, self.k_head_norm = Norm(self.q, c.norm_eps), Norm(self.q, c.norm_eps)
        # flat: vectors are AdamW's, matrices Muon's
        if c.qkv_bias:
            self.bq, self.bk, self.bv = (
                nn.Parameter(torch.zeros(w.shape[0] * w.shape[1]))
                for w in (self.wq, self.wk, self.wv)
            )
        self.wo = weight(D, H * c.v_dim, std=0)
        self.whole = None  # see Model.side_by_side

    @property
    def entry_width(self):
        c = self.config
        return c.kv_lora + c.qk_rope if c.attention == "mla" else c.kv_heads * (self.q + c.v_dim)

    def readers(self):
        """The weights that multiply a layer's input"""
        rest = ("wkv_a",) if self.config.attention == "mla" else ("wk", "wv")
        return [getattr(self, name) for name in ("wq_a" if self.config.q_lora else "wq", *rest)]

    def side_by_side(self):
        weights = self.readers()
        self.whole = torch.cat([w.flatten(0, -2) for w in weights])
        for w, part in zip(weights, self.whole.split([w.shape[:-1].numel() for w in weights])):
            w.data = part.view(w.shape)

    def products(self, x):
        """x (B, T, D) times each of these weights: (B, T, R), or (B, T, H, R) of a stack"""
        weights = self.readers()
        if self.whole is None or self.whole.data_ptr() != weights[0].data_ptr():
            return [linear(x, w) for w in weights]
        parts = F.linear(x, self.whole.to(x.dtype)).split(
            [w.shape[:-1].numel() for w in weights], -1
        )
        return [
            part if w.ndim == 2 else part.unflatten(-1, w.shape[:-1])
            for part, w in zip(parts, weights)
        ]

    def refined(self, y, name):
        """Queries, keys or values (name q, k or v) of all heads (B, T, H, N + R or V), with biases
        and norms where there are any"""
        if self.config.qkv_bias:
            y = y + getattr(self, "b" + name).to(y.dtype).view(y.shape[-2:])
        return getattr(self, name + "_head_norm")(y) if self.config.qk_norm and name != "v" else y

    def read(self, x, cos, sin):
        """x (B, T, D) -> queries (B, H, T, N + R), and the entries (B, T, width) that a cache
        holds. RoPE turns all heads at once."""
        c = self.config
        q, *rest = self.products(x)
        q = self.refined(linear(self.q_norm(q), self.wq) if c.q_lora else q, "q")
        if c.attention == "mla":
            # one rotary key for all heads
            latent, k = rest[0][..., : c.kv_lora], rest[0][:, :, None, c.kv_lora :]
        else:
            k, v = self.refined(rest[0], "k"), self.refined(rest[1], "v")
        turned = rotate(torch.cat((q[..., c.qk_nope :], k[..., -c.qk_rope :]), 2), cos, sin)
        q = torch.cat((q[..., : c.qk_nope], turned[:, :, : c.heads]), -1).transpose(1, 2)
        if c.attention == "mla":
            return q, torch.cat((self.kv_norm(latent).to(x.dtype), turned[:, :, c.heads]), -1)
        return q, torch.cat((k[..., : c.qk_nope], turned[:, :, c.heads :], v), -1).flatten(2)

    def keys_values(self, entry):
        """entry (B, T, width) -> k (B, H, T, N + R), v (B, H, T, V)"""
        c = self.config
        if c.attention == "mla":
            latent, rope = entry.split((c.kv_lora, c.qk_rope), -1)
            k = torch.cat(
                (linear(latent, self.wk_b), rope[:, :, None].expand(-1, -1, c.heads, -1)), -1
            )
            return k.transpose(1, 2), linear(latent, self.wv_b).transpose(1, 2)
        k, v = entry.unflatten(-1, (c.kv_heads, -1)).split((self.q, c.v_dim), -1)
        repeat = lambda t: t.transpose(1, 2).repeat_interleave(c.heads // c.kv_heads, 1)
        return repeat(k), repeat(v)

    def absorbed(self, q, entry, mask):
        """Attention of q (B, H, T, N + R) on the cache's latents themselves: every head reads the
        same C + R numbers, so the heads line up along the query axis of one wide head (mask (B, 1,
        H * T, S)). The values are the entries; their rotary part is dropped. Many tokens at once,
        as of a prompt, pay for reading keys and values back, whose products are narrower."""
        c, (B, H, T, _) = self.config, q.shape
        if (
            T * (2 * c.kv_lora + c.qk_rope - c.qk_nope - c.v_dim)
            > c.kv_lora * (c.qk_nope + c.v_dim)
            and 8 * T > entry.shape[1]
        ):
            # (else they would take much memory)
            return self.over(q, entry, mask[:, :, :T])
        by_head = (
            lambda x, w: torch.bmm(x.transpose(0, 1).flatten(1, 2), w.to(x.dtype))
            .view(H, B, T, -1)
            .transpose(0, 1)
        )
        q, entry = (
            torch.cat((by_head(q[..., : c.qk_nope], self.wk_b), q[..., c.qk_nope :]), -1).view(
                B, 1, H * T, -1
            ),
            entry[:, None],
        )
        o = attend(q, entry, entry, mask, self.scale * self.q**-0.5)
        return by_head(o.view(B, H, T, -1)[..., : c.kv_lora], self.wv_b.transpose(1, 2))

    def over(self, q, entry, mask):
        """Attention of q (B, H, T, N + R) over entries (B, S, width) -> (B, H, T, V)"""
        k, v = self.keys_values(entry)
        # Qwen2's reach hundreds
        return attend(q, k, v, mask, self.scale * self.q**-0.5, coarse=not self.config.qkv_bias)

    def forward(self, x, cos, sin, mask=None, cache=None):
        q, entry = self.read(x, cos, sin)
        if cache is None:
            o = self.over(q, self.gather(entry), mask)
        else:
            o = cache(q, entry, self.absorbed if self.config.attention == "mla" else self.over)
        return linear(o.transpose(1, 2).flatten(2), self.wo)


class Block(nn.Module):
    def __init__(self, config, dense):
        super().__init__()
        self.attn_norm, self.ffn_norm = Norm(config.dim, config.norm_eps), Norm(
            config.dim, config.norm_eps
        )
        self.attn = Attention(config)
        self.ffn = FFN(config.dim, config.dense_ffn) if dense else MoE(config)

    def forward(self, x, cos, sin, mask=None, cache=None, replay=None, record=None, real=None):
        x = x + self.attn(self.attn_norm(x), cos, sin, mask, cache)
        h = self.ffn_norm(x)
        if not isinstance(self.ffn, MoE):
            return x + self.ffn(h)
        return x + self.ffn(
            h, replay, record, decoding=cache is not None and self.ffn.fit(h), real=real
        )


@contextmanager
def again(block):
    """While a block computes its activations once more, its router does not count the tokens once
    more."""
    training, block.ffn.training = block.ffn.training, False
    try:
        yield
    finally:
        block.ffn.training = training


class MTP(nn.Module):
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): one block that sees the hidden state
    of a token and the token after it, and speaks of the one after that. Ours: the block is dense,
    so that replay and balancing do not meet it."""

    def __init__(self, config):
        super().__init__()
        self.hidden_norm, self.token_norm, self.norm = (
            Norm(config.dim, config.norm_eps) for _ in range(3)
        )
        self.join, self.block = weight(config.dim, 2 * config.dim), Block(config, dense=True)

    def forward(self, hidden, token, cos, sin, mask=None, cache=None):
        x = linear(
            torch.cat((self.hidden_norm(hidden), self.token_norm(token)), -1), self.join
        ).float()
        return self.norm(self.block(x, cos, sin, mask, cache))


class Cache:
    """Entries of S rows: (layers, S, T_max, width), the MTP head's behind the layers'. A row is one
    sequence; `length` of each is the caller's business."""

    def __init__(self, model, rows, length):
        layers, width = len(model.layers) + model.config.mtp, model.layers[0].attn.entry_width
        self.data = torch.zeros(
            layers, rows, length, width, dtype=model.dtype, device=model.embed.weight.device
        )
        # see Attention.absorbed
        self.lined_up = model.config.heads if model.config.attention == "mla" else 1

    def mask(self, position, last):
        """position (B, T), the largest of them `last` -> what tokens there may look at, 0 or -inf
        (B, 1, T, S); S reaches as far as any of them looks. Where all heads line up along the query
        axis, once for each of them."""
        upto = min(self.data.shape[2], filled(last + 1))
        # (B, T, S)
        later = torch.arange(upto, device=position.device) > position[..., None]
        later = torch.zeros(
            later.shape, dtype=self.data.dtype, device=position.device
        ).masked_fill_(later, -torch.inf)
        return later.repeat(1, self.lined_up, 1)[:, None]

    def look(self, layer, row, position, spans, order=None):
        """-> for a layer's attention: a function that stores the entries (1, N, width) of the N
        tokens fed at `position` of `row` (of any shapes that broadcast to N numbers), and gives
        what their queries (1, H, N, Q) see of all that is cached, (1, H, N, V). spans: (rows,
        index, mask) of sequences that are continued by equally many tokens; index (b, t) says which
        of the N, None all in order. order (N,): where each token's result stands in those of all
        spans, one behind the other."""

        def seen(q, entry, over):
            data, q = self.data[layer], q[0].transpose(0, 1)  # (N, H, Q)
            data[row, position] = entry.view(*position.shape, -1)
            found = []
            for rows, index, mask in spans:
                # (b, t, H, Q)
                part = q.unflatten(0, (len(mask), -1)) if index is None else q[index]
                found.append(
                    over(part.transpose(1, 2), data[rows, : mask.shape[-1]], mask)
                    .transpose(1, 2)
                    .flatten(0, 1)
                )
            o = found[0] if order is None else torch.cat(found)[order]  # (N, H, V)
            return o.transpose(0, 1)[None]

        return seen


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        # recompute: see Model.run
        self.config, self.dtype, self.recompute = config, torch.float32, False
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(
            Block(config, dense=i < config.dense_layers) for i in range(config.layers)
        )
        self.norm = Norm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.zeros_(self.head.weight)
        if config.tie:
            self.head.weight = self.embed.weight
        self.mtp = MTP(config) if config.mtp else None
        self.extend(config.yarn_factor)

    def extend(self, factor):
        """Stretch the window to config.context * factor tokens (the long-context stage)."""
        self.config = c = replace(self.config, yarn_factor=factor)
        frequency, temperature = rope_frequencies(
            c.qk_rope, c.rope_theta, c.context, factor, c.yarn_fast, c.yarn_slow, c.yarn_mscale
        )
        # A buffer moves with the model; it follows from the configuration, so no checkpoint holds
        # it.
        self.register_buffer("frequency", frequency.to(self.embed.weight.device), persistent=False)
        for attn in (m for m in self.modules() if isinstance(m, Attention)):
            attn.config, attn.scale = c, temperature

    def compute(self, dtype):
        """Matrix products in `dtype`; weights, residual stream, norms, router and softmax stay in
        fp32."""
        for module in self.modules():
            if isinstance(module, (Norm, Model)):
                module.dtype = dtype
        return self

    def side_by_side(self):
        """For a model that only samples: weights that a decoding step multiplies by the same
        numbers are moved to lie side by side in memory, so that one product does for several. They
        stay the parameters that they were, and take what is loaded into them."""
        for module in self.modules():
            if isinstance(module, (Attention, MoE)):
                module.side_by_side()
        return self.requires_grad_(False)

    def angles(self, positions):
        angle = positions.float()[..., None, None] * self.frequency  # (B or 1, T, 1, R/2)
        cos, sin = turns(angle)
        return self.config.yarn_amplitude * cos, self.config.yarn_amplitude * sin

    def forward(self, tokens, positions=None, replay=None, record=None):
        """tokens (B, T), -1 where there is none (padding: computed as token 0, and no router counts
        it) -> hidden (B, T, D). positions (T,): where these tokens stand in the whole sequence,
        when this rank holds only a part. replay (B, T, L, K): experts to take at the L MoE layers,
        -1 = free; record: a list that receives the choices, one (B, T, K) per MoE layer."""
        mask = None
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            keys = self.layers[0].attn.gather(positions.view(1, -1, 1))[0, :, 0]
            # (1, 1, T_local, T)
            mask = (keys <= positions[:, None])[None, None]
        cos, sin = self.angles(positions[None])
        real = None
        # once for all routers; see MoE.forward
        if self.training:
            real = (tokens >= 0).float().view(-1, 1).expand(-1, self.config.active).flatten()
        tokens = tokens.clamp(min=0)
        narrow = self.embed.weight.dtype.itemsize < 4
        x = EmbedTokens.apply(tokens, self.embed.weight) if narrow else self.embed(tokens).float()
        moe = 0
        for block in self.layers:
            chosen = None
            if isinstance(block.ffn, MoE):
                chosen, moe = None if replay is None else replay[:, :, moe], moe + 1
            x = self.run(block, x, cos, sin, mask, None, chosen, record, real)
        return x

    def run(self, block, *inputs):
        """One layer; with `recompute` only its input is kept, and its backward computes the rest
        again: memory for a third more work."""
        if not (self.recompute and torch.is_grad_enabled()):
            return block(*inputs)
        return checkpoint(
            block,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), again(block)),
        )

    def continued(self, tokens, cache, row, position, spans, order=None, record=None):
        """All layers for tokens that continue cached sequences; of any shape, see Cache.look ->
        hidden (N, D)"""
        x, (cos, sin) = self.embed(tokens.reshape(1, -1)).float(), self.angles(
            position.reshape(1, -1)
        )
        for i, block in enumerate(self.layers):
            x = block(x, cos, sin, None, cache.look(i, row, position, spans, order), None, record)
        return x[0]

    def decode(self, tokens, cache, rows, start, record=None):
        """tokens (B, T) continue the cached sequences `rows` (a slice) at start (B,), a tensor or a
        list -> hidden (B, T, D). Padding at the end of a row is harmless: its entries are masked
        now and overwritten later. The cache's last place is never read by a real token: give it one
        more than the window. record: gets the experts, one (1, B * T, K) per MoE layer."""
        row, position, spans = self.places(tokens.shape[1], cache, rows, start)
        return self.continued(tokens, cache, row, position, spans, None, record).view(
            *tokens.shape, -1
        )

    def places(self, length, cache, rows, start):
        """-> rows (B, 1) and positions (B, T) of `length` tokens from start (B,), and the one span
        that they are. start: a list, or a tensor, which Python then has to read."""
        room, device = cache.data.shape[2], cache.data.device
        start = start.tolist() if torch.is_tensor(start) else start
        assert max(start) < room, f"position {max(start)} in a cache of {room} tokens"
        # (B, T)
        position = to_device(start, device)[:, None] + torch.arange(length, device=device)
        # only padding reaches so far
        position = position.clamp(max=room - 1)
        row = torch.arange(cache.data.shape[1], device=device)[rows]
        last = min(max(start) + length, room) - 1
        return row[:, None], position, [(rows, None, cache.mask(position, last))]

    def prefill(self, chunks, cache, rows, start, record=None):
        """Feed chunks (lists of tokens, of any lengths), each to the cached sequence rows[i] from
        start[i] on; hidden states are not wanted. The tokens stand one behind the other; only
        attention pads, among chunks of about a length, a chunk's last token repeated. record: as in
        decode, the tokens of all chunks and some more, (1, N, K)."""
        device, lengths = cache.data.device, [len(chunk) for chunk in chunks]
        tensor = lambda numbers: to_device(numbers, device)
        # few different shapes: see filled
        ends, more = list(accumulate(lengths)), -sum(lengths) % 32
        where = [(row, first + j) for row, first, n in zip(rows, start, lengths) for j in range(n)]
        row, position = tensor(where + where[-1:] * more).T
        tokens = tensor([token for chunk in chunks for token in chunk] + chunks[-1][-1:] * more)
        spans, order, at = [], [0] * ends[-1], 0
        for width in sorted({n + -n % 16 for n in lengths}):
            members = [i for i, n in enumerate(lengths) if n + -n % 16 == width]
            index = tensor(
                [
                    [ends[i] - lengths[i] + min(j, lengths[i] - 1) for j in range(width)]
                    for i in members
                ]
            )
            last = max(start[i] + lengths[i] for i in members) - 1
            spans.append(
                (tensor([rows[i] for i in members]), index, cache.mask(position[index], last))
            )
            for i in members:
                order[ends[i] - lengths[i] : ends[i]] = range(at, at + lengths[i])
                at += width
        self.continued(
            tokens, cache, row, position, spans, tensor(order + order[-1:] * more), record
        )

    def draft(self, hidden, following, cache=None, rows=None, start=None):
        """hidden (B, T, D) and the token after each (B, T) -> the MTP head's logits (B, T, vocab)
        for the token after that. Embedding and output head are the model's, but this gradient does
        not reach them: the draft learns, the model stays."""
        assert (
            self.mtp is not None
        ), "this model has no head to draft with: build it with ModelConfig(mtp=1)"
        hidden, token = hidden.detach(), F.embedding(following, self.embed.weight.detach())
        if cache is None:
            x = self.mtp(
                hidden,
                token,
                *self.angles(torch.arange(following.shape[1], device=following.device)[None]),
            )
        else:
            row, position, spans = self.places(following.shape[1], cache, rows, start)
            flat = (
                hidden.flatten(0, 1)[None],
                token.flatten(0, 1)[None],
                *self.angles(position.reshape(1, -1)),
            )
            x = self.mtp(*flat, None, cache.look(len(self.layers), row, position, spans)).view(
                hidden.shape
            )
        return F.linear(x, self.head.weight.detach().to(x.dtype)).float()

    def logits(self, hidden):
        """hidden (..., D) -> logits (..., vocab), fp32"""
        return F.linear(self.norm(hidden), self.head.weight.to(self.norm.dtype)).float()

    def logprobs(self, hidden, targets, temperature=1.0, where=None):
        """Log-probs of the targets (B, T), fp32: the cross-entropy of training, without (B, T,
        vocab). where (B, T): compute these only, 0 elsewhere."""
        # Selecting by a mask makes a GPU's host wait for the number of rows, so it is left out
        # where all are wanted.
        h = hidden.flatten(0, 1) if where is None else hidden[where]  # (N, D)
        t = targets.flatten() if where is None else targets[where]  # (N,)
        fill = filled(len(t)) - len(t)
        h = F.pad(self.norm(h), (0, 0, 0, fill))
        found = TargetLogprobs.apply(h, self.head.weight, F.pad(t, (0, fill)), temperature)[
            : len(t)
        ]
        if where is None:
            return found.view(targets.shape)
        return torch.zeros(targets.shape, device=found.device).masked_scatter(where, found)


def balance(model, rate=1e-3, reduce=lambda counts: counts):
    """Aux-loss-free balancing (arXiv 2408.15664): one step of every router's bias from the tokens
    counted since the last call. `reduce` sums counts over data ranks, so that all ranks move alike.
    Returns the worst load / mean load."""
    ratios = []
    for block in model.layers:
        if isinstance(block.ffn, MoE):
            router = block.ffn.router
            load = reduce(router.load.clone())
            ratios.append(load.max() / load.mean().clamp(min=1))
            router.bias += rate * torch.sign(load.mean() - load)
            router.load.zero_()
    # All layers' ratios in one read: each would wait for the GPU.
    return max(1.0, float(torch.stack(ratios).max())) if ratios else 1.0


def mtp_loss(model, tokens, hidden, places=None):
    """Self-distillation, as Composer's: tokens (B, T), -1 = padding, hidden (B, T, D) =
    model(tokens) of whole sequences -> KL from the main head's distribution at t + 1 to the
    draft's at t, the sum over all places that have a token behind them, divided by `places` (default:
    their number, so the mean). A sampled token would teach less."""
    following = tokens[:, 1:]
    real = following >= 0
    with torch.no_grad():
        target = model.logits(hidden[:, 1:]).log_softmax(-1)
    draft = model.draft(hidden[:, :-1], following.clamp(min=0)).log_softmax(-1)
    divergence = F.kl_div(draft, target, reduction="none", log_target=True).sum(-1)
    return (divergence * real).sum() / (real.sum().clamp(min=1) if places is None else places)


@torch.no_grad()
def count_draft_hits(model, tokens, hidden):
    """As mtp_loss -> how many places have a draft that is the main head's own first choice. Over
    the number of places: the share that speculative decoding accepts."""
    following = tokens[:, 1:]
    draft = model.draft(hidden[:, :-1], following.clamp(min=0)).argmax(-1)
    return ((draft == model.logits(hidden[:, 1:]).argmax(-1)) & (following >= 0)).sum()


@torch.inference_mode()
def speculate(model, prompt, count):
    """Greedy decoding with the MTP head as the draft: prompt (T,) -> (a list of `count` tokens,
    share of drafts that were right). A pass reads the last sure token and the draft of the next
    one. If the model itself chooses that draft, its choice behind the draft counts too: two tokens.
    The draft's quality moves the speed alone (but for ties: two rows may round unlike one)."""
    tokens, start, draft, passes, right = prompt.tolist(), 0, None, 0, 0
    cache, tensor = Cache(model, 1, len(prompt) + count + 1), lambda t: torch.tensor(
        t, device=prompt.device
    )
    while len(tokens) < len(prompt) + count:
        sure, where = len(tokens) - start, (cache, slice(0, 1), tensor([start]))
        hidden = model.decode(tensor([tokens[start:] + [draft] * (passes > 0)]), *where)
        # after every token read
        choice = model.logits(hidden)[0].argmax(-1).tolist()
        hit = choice[sure - 1] == draft
        tokens += choice[sure - 1 : sure + hit]
        # a wrong draft's entry is overwritten
        read = sure + hit
        draft = int(
            model.draft(hidden[:, :read], tensor([tokens[start + 1 : start + 1 + read]]), *where)[
                0, -1
            ].argmax()
        )
        start, passes, right = start + read, passes + 1, right + hit
    return tokens[len(prompt) : len(prompt) + count], right / max(passes - 1, 1)


def fast_dtype(device):
    """bf16 products are several times faster than fp32 on GPUs and CPUs that have instructions for
    them, far slower elsewhere."""
    if device == "cuda":
        # compute capability 8.0 (A100) and later
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def parameters_per_token(config):
    """(total, active) parameters: what is stored, and what one token meets."""
    model = Model(config)
    total = sum(p.numel() for p in model.parameters())
    idle = (
        3
        * config.dim
        * config.expert_ffn
        * (config.experts - config.active)
        * max(0, config.layers - config.dense_layers)
    )
    return total, total - idle


# ---------------------------------------------------------------- published checkpoints
# A folder as the open models are published: config.json, *.safetensors and an index that says which
# file holds which tensor. It comes from strangers: every length, offset, shape and file name in it
# is checked before it is used, and nothing is ever executed.

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# most bytes of JSON read into memory: 3 MB describe 25,000 tensors
HEADER, INDEX = 8 << 20, 64 << 20


def parse_json(raw, path):
    """Bytes -> a dict. A name given twice is refused: two readers would see two different files."""

    def unique(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        found = json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON object")
    return found


@contextmanager
def reading(path):
    """What the system answers where a file cannot be read (no permission, a bad disk) becomes the
    one line of every other error."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_bytes(path, most):
    with reading(path):
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        if path.stat().st_size > most:
            raise ValueError(f"{path}: {path.stat().st_size} bytes where at most {most} make sense")
        return path.read_bytes()


def check_entry(entry):
    """One entry of a safetensors header -> (dtype, shape, start, stop), or a ValueError that says
    what is wrong with it."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("an entry is dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r:.40}")
    # type(): True is an int as well
    for numbers, most in ((shape, 8), (offsets, 2)):
        if (
            not isinstance(numbers, list)
            or len(numbers) > most
            or any(type(n) is not int or not 0 <= n < 1 << 48 for n in numbers)
        ):
            raise ValueError(f"impossible shape or offsets {numbers!r:.60}")
    # (0, 2^47, 2^47) holds nothing and overflows all the same
    if math.prod(n or 1 for n in shape) >= 1 << 60:
        raise ValueError(f"impossible shape {shape!r:.60}")
    if len(offsets) != 2 or math.prod(shape) * DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
        raise ValueError(f"{dtype} of shape {shape} does not fill the bytes {offsets}")
    return DTYPES[dtype], shape, *offsets


def open_safetensors(path):
    """A file -> {name: tensor}, views of the mapped file: nothing is read before it is used, and
    the map goes with its last view. The format: 8 bytes of header length, a JSON header, then raw
    little-endian data that the tensors fill without gap or overlap."""
    with reading(path):
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER):
                raise ValueError(f"{path}: a header of {length} bytes in a file of {size}")
            header, data = parse_json(file.read(length), path), mmap.mmap(
                file.fileno(), 0, access=mmap.ACCESS_READ
            )
    header.pop("__metadata__", None)
    entries, expected, tensors = {}, 8 + length, {}
    for name, entry in header.items():
        try:
            entries[name] = check_entry(entry)
        except ValueError as error:
            raise ValueError(f"{path}: tensor {name!r:.200}: {error}") from None
    for name, (dtype, shape, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if 8 + length + start != expected or 8 + length + stop > size:
            raise ValueError(
                f"{path}: tensor {name!r:.200}: bytes {start} to {stop} leave a gap, overlap, or end after the file"
            )
        tensors[name] = view(data, dtype, shape, expected)
        tensors[name].mapped, expected = (data, expected, 8 + length + stop), 8 + length + stop
    if expected != size:
        raise ValueError(f"{path}: {size - expected} bytes that belong to no tensor")
    return tensors


def view(data, dtype, shape, start):
    """A tensor over bytes of a map that must not be written to"""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        # "not writable": that is the point
        warnings.simplefilter("ignore")
        raw = torch.frombuffer(
            data, dtype=torch.uint8, count=math.prod(shape) * dtype.itemsize, offset=start
        )
    return (raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()).view(dtype).view(shape)


def let_go(tensor):
    """The pages a view was read from leave this process: else a model in one file would be held
    twice while it is loaded."""
    data, start, stop = tensor.mapped
    start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if hasattr(mmap, "MADV_DONTNEED") and start < stop:
        data.madvise(mmap.MADV_DONTNEED, start, stop - start)


def open_folder(folder):
    """-> ({name: tensor}, {name: file}) of one model.safetensors or of the shards that the index
    names"""
    index = folder / "model.safetensors.index.json"
    with reading(index):
        sharded = index.is_file()
    if not sharded:
        tensors = open_safetensors(folder / "model.safetensors")
        return tensors, dict.fromkeys(tensors, folder / "model.safetensors")
    home, tensors = parse_json(read_bytes(index, INDEX), index).get("weight_map"), {}
    if not isinstance(home, dict):
        raise ValueError(f"{index}: no weight_map")
    # a plain name: no way out of the folder, nor back to the index itself
    for name, shard in home.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", shard):
            raise ValueError(
                f"{index}: tensor {name!r:.200}: {shard!r:.200} does not name a file of this folder"
            )
    for shard in sorted(set(home.values())):
        found = open_safetensors(folder / shard)
        for name in found:
            if home.get(name) != shard:
                raise ValueError(
                    f"{folder / shard}: tensor {name!r:.200} is not in the index under this file"
                )
        tensors.update(found)
    for name, shard in home.items():
        if name not in tensors:
            raise ValueError(f"{folder / shard}: tensor {name!r:.200} of the index is missing")
    return tensors, {name: folder / shard for name, shard in home.items()}


# ---- config.json

FAMILIES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "partial_rotary_factor": 1,
    "truncate": True,
    "is_causal": True,
    "attention_dropout": 0,
    "mlp_bias": False,
    "attn_factor": 1,
    "extrapolation_factor": 1,
}
# Settings that say nothing about what a forward computes: names, ids of tokens, losses, how text is
# generated, how it was trained.
INERT = set("""
    architectures auto_map dtype torch_dtype attn_implementation name_or_path transformers_version tokenizer_class use_cache initializer_range pretraining_tp ep_size
    seq_aux aux_loss_alpha router_aux_loss_coef output_router_logits num_nextn_predict_layers num_mtp_layers max_window_layers
    sliding_window bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id
    forced_eos_token_id id2label label2id problem_type finetuning_task task_specific_params prefix keys_to_ignore_at_inference
    return_dict output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss pruned_heads chunk_size_feed_forward
    is_encoder_decoder is_decoder tie_encoder_decoder max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens""".split())
# Settings that are read, by whom, or checked against ONLY
READ = set("""
    model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    rms_norm_eps tie_word_embeddings max_position_embeddings rope_theta rope_scaling rope_parameters layer_types
    quantization_config""".split()) | ONLY.keys()
FAMILY_READS = {
    "qwen2": {"qkv_bias"},
    "qwen3": {"use_qk_norm"},
    "qwen3_moe": {
        "use_qk_norm",
        "mlp_only_layers",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
    },
    "deepseek_v3": set(
        """q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim
        first_k_dense_replace n_routed_experts num_local_experts num_experts_per_tok n_shared_experts moe_intermediate_size
        routed_scaling_factor norm_topk_prob n_group topk_group rope_interleave""".split()
    ),
}
ROPE_READS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
YARN_READS = ROPE_READS | set(
    """factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim
    truncate attn_factor extrapolation_factor""".split()
)


def refuse_unread(path, settings, read, where=""):
    """A setting that nobody reads is refused by name, unless it is off (null, false, 0, empty): it
    may change what the model computes, and dropped in silence it would be another model. Names with
    a leading underscore are notes."""
    for key, value in settings.items():
        if key not in read and value and not key.startswith(("_", "unsloth")):
            raise ValueError(
                f"{path}: {where}{key} = {value!r:.60} is not known here: delete it if the model computes the same without it"
            )


class Settings:
    """config.json with the question "which number, within which bounds?": a wrong answer names the
    key and the file."""

    def __init__(self, raw, path):
        self.raw, self.path = raw, path
        for key, only in ONLY.items():
            if raw.get(key) not in (None, only):
                raise ValueError(
                    f"{path}: {key} = {raw[key]!r:.60} is not supported, only {only!r}"
                )

    def __call__(self, key, default=None, low=1, high=1 << 20, kind=int):
        value = default if self.raw.get(key) is None else self.raw[key]
        kind = kind if default is None else type(default)
        if kind is float and type(value) is int:
            value = float(value) if abs(value) <= high else value
        if type(value) is not kind or not low <= value <= high:
            raise ValueError(
                f"{self.path}: {key} = {value!r:.60}, not {kind.__name__} from {low} to {high}"
            )
        return value


def rope_settings(get, mla):
    """RoPE's part of ModelConfig. Published models put YaRN's temperature on cos and sin
    (attention_factor) or on the scores (mscale). The settings stand under a new key or an old one,
    or under both: readers differ in which one they take."""
    told = []
    for key in ("rope_parameters", "rope_scaling"):
        found = get.raw.get(key) or {}
        if (
            not isinstance(found, dict)
            or found.get("rope_type", found.get("type", "default")) not in ("default", "yarn")
            or any(isinstance(value, dict) for value in found.values())
        ):
            raise ValueError(
                f"{get.path}: {key} {found!r:.80} is not supported, only yarn, the same for all layers"
            )
        told += [{"rope_type": found.get("type", "default"), **found}] if found else []
    rope = {key: value for found in told for key, value in found.items() if key != "type"}
    own = lambda found, key, value: found.get(
        key, get.raw.get(key, value) if key == "rope_theta" else None
    )
    if len(told) == 2 and any(
        own(found, key, value) != value for found in told for key, value in rope.items()
    ):
        raise ValueError(
            f"{get.path}: rope_parameters and rope_scaling do not say the same: delete the one that is not meant"
        )
    refuse_unread(
        get.path,
        rope,
        YARN_READS if rope.get("rope_type") == "yarn" else ROPE_READS,
        "rope_scaling: ",
    )
    # Of the keys beside it only the base and the share of turned dimensions belong to RoPE.
    beside = {
        key: get.raw[key] for key in ("rope_theta", "partial_rotary_factor") if key in get.raw
    }
    yarn, ask = rope.get("rope_type") == "yarn", Settings({**beside, **rope}, get.path)
    length = get("max_position_embeddings", high=1 << 30)
    found = dict(rope_theta=ask("rope_theta", 1e4, 1.1, 1e12), context=length)
    if not yarn:
        return found
    context = ask("original_max_position_embeddings", length, high=1 << 30)
    factor = ask("factor", length / context, 1, 1e4)
    heat = lambda m: 0.1 * m * math.log(factor) + 1
    mscale, all_dim = ask("mscale", 0.0, 0, 10), ask("mscale_all_dim", 0.0, 0, 10)
    # With one of the two DeepSeek's own code and transformers compute different temperatures.
    # mscale = 1 alone is the default of both.
    if not (mscale and all_dim) and (all_dim or rope.get("mscale") not in (None, 1)):
        raise ValueError(
            f"{get.path}: rope_scaling: mscale = {rope.get('mscale')!r:.40} with mscale_all_dim = "
            f"{rope.get('mscale_all_dim')!r:.40} is not supported, only both above 0 or neither: readers differ in the rest"
        )
    amplitude = ask(
        "attention_factor",
        heat(mscale) / heat(all_dim) if mscale and all_dim else heat(1),
        1e-3,
        1e3,
    )
    fast, slow = ask("beta_fast", 32.0, 1e-3, 1e6), ask("beta_slow", 1.0, 1e-3, 1e6)
    return dict(
        found,
        context=context,
        yarn_factor=factor,
        yarn_fast=fast,
        yarn_slow=slow,
        yarn_mscale=all_dim if mla else 0.0,
        yarn_amplitude=amplitude,
    )


def mla_settings(get):
    return dict(
        attention="mla",
        q_lora=0 if get.raw.get("q_lora_rank") is None else get("q_lora_rank"),
        kv_lora=get("kv_lora_rank"),
        qk_nope=get("qk_nope_head_dim"),
        qk_rope=get("qk_rope_head_dim"),
        v_dim=get("v_head_dim"),
        dense_layers=get("first_k_dense_replace", 0, 0),
        experts=get("n_routed_experts", high=1 << 12),
        active=get("num_experts_per_tok"),
        shared=get("n_shared_experts", 0, 0, 64),
        expert_ffn=get("moe_intermediate_size"),
        route_scale=get("routed_scaling_factor", None, 0, 1e3, float),
        norm_gates=get("norm_topk_prob", True, 0),
        # no default: readers differ in theirs
        n_group=get("n_group"),
        topk_group=get("topk_group"),
    )


def gqa_settings(get, family, layers):
    head = get(
        "head_dim",
        128 if family == "qwen3" else max(get("hidden_size") // get("num_attention_heads"), 1),
    )
    found = dict(
        attention="gqa",
        kv_heads=get("num_key_value_heads", get("num_attention_heads")),
        qk_nope=0,
        qk_rope=head,
        v_dim=head,
        qk_norm=family != "qwen2",
        qkv_bias=family == "qwen2",
        dense_layers=layers,
    )
    if get("num_attention_heads") % found["kv_heads"]:
        raise ValueError(f"{get.path}: num_attention_heads is no multiple of num_key_value_heads")
    if family != "qwen3_moe":
        return found
    dense, key = get.raw.get("mlp_only_layers") or [], (
        "num_experts" if "num_experts" in get.raw else "num_local_experts"
    )
    if get.raw.get("num_local_experts", get.raw.get(key)) != get.raw.get(key):
        raise ValueError(
            f"{get.path}: num_experts and num_local_experts differ: delete the one that is not meant"
        )
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise ValueError(
            f"{get.path}: mlp_only_layers = {dense!r:.60} is not supported, only the first ones"
        )
    return dict(
        found,
        dense_layers=len(dense),
        experts=get(key, high=1 << 12),
        active=get("num_experts_per_tok"),
        shared=0,
        expert_ffn=get("moe_intermediate_size"),
        scoring="softmax",
        norm_gates=get("norm_topk_prob", False, 0),
    )


def read_config(path):
    """config.json -> (ModelConfig, Settings of the language model, prefix of its tensors' names)"""
    raw, prefix = parse_json(read_bytes(path, 1 << 20), path), ""
    if raw.get("model_type") == "kimi_k25" and isinstance(raw.get("text_config"), dict):
        whole, raw, prefix = raw, {"model_type": "kimi_k2", **raw["text_config"]}, "language_model."
        # Of the settings around the language model's own none may speak about it: only one of the
        # two places is read.
        for key in sorted((READ | FAMILY_READS["deepseek_v3"]) - {"model_type"}):
            if whole.get(key) and whole[key] != raw.get(key):
                raise ValueError(
                    f"{path}: {key} stands beside text_config and not, or otherwise, inside it: put it inside"
                )
    family = "deepseek_v3" if raw.get("model_type") == "kimi_k2" else raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"{path}: model_type {family!r:.60} is not one of {', '.join(FAMILIES)}, kimi_k2, kimi_k25"
        )
    get, mla = Settings(raw, path), family == "deepseek_v3"
    refuse_unread(path, raw, READ | INERT | FAMILY_READS[family])
    if (
        raw.get("qkv_bias") is False
        and family == "qwen2"
        or raw.get("use_qk_norm") is False
        and family in ("qwen3", "qwen3_moe")
    ):
        raise ValueError(
            f"{path}: qkv_bias or use_qk_norm = False is not supported: {family} has them"
        )
    layers = get("num_hidden_layers", high=1024)
    if raw.get("layer_types") not in (None, ["full_attention"] * layers):
        raise ValueError(
            f"{path}: layer_types other than full_attention in every layer are not supported"
        )
    own = mla_settings(get) if mla else gqa_settings(get, family, layers)
    try:
        config = ModelConfig(
            vocab=get("vocab_size", high=1 << 24),
            dim=get("hidden_size"),
            layers=layers,
            heads=get("num_attention_heads", high=1 << 12),
            dense_ffn=get("intermediate_size"),
            tie=get("tie_word_embeddings", False, 0),
            norm_eps=get("rms_norm_eps", 1e-6, 0, 1),
            **own,
            **rope_settings(get, mla),
        )
    except AssertionError as error:
        raise ValueError(f"{path}: {error}") from None
    return config, get, prefix


# ---- names, layouts, quantised weights

NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn.wq_a": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn.wkv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn.wk_b": "self_attn.kv_b_proj.weight",
    "attn.wv_b": "self_attn.kv_b_proj.weight",
    "attn.wq": "self_attn.q_proj.weight",
    "attn.wk": "self_attn.k_proj.weight",
    "attn.wv": "self_attn.v_proj.weight",
    "attn.wo": "self_attn.o_proj.weight",
    "attn.bq": "self_attn.q_proj.bias",
    "attn.bk": "self_attn.k_proj.bias",
    "attn.bv": "self_attn.v_proj.bias",
    "attn.q_head_norm.weight": "self_attn.q_norm.weight",
    "attn.k_head_norm.weight": "self_attn.k_norm.weight",
    "ffn.router.weight": "mlp.gate.weight",
    "ffn.router.bias": "mlp.gate.e_score_correction_bias",
}
NAMES |= {
    f"ffn.{ours}w_{w}": f"mlp.{theirs}{w}_proj.weight"
    for w in ("gate", "up", "down")
    for ours, theirs in (("", ""), ("shared.", "shared_experts."), ("experts.", "experts.*."))
}
TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def published(config):
    """Yields (our name, our shape, their names, shape of each of theirs): experts are one stack
    here, and kv_b_proj is cut in two."""
    with torch.device("meta"):
        ours = Model(config).state_dict()
    for name, tensor in ours.items():
        shape = tuple(tensor.shape)
        if name in TOP:
            if not (config.tie and name == "head.weight"):
                yield name, shape, [TOP[name]], shape
            continue
        _, layer, rest = name.split(".", 2)
        if rest == "ffn.router.load" or rest == "ffn.router.bias" and config.scoring == "softmax":
            continue
        theirs = f"model.layers.{layer}." + (
            "self_attn.q_b_proj.weight" if rest == "attn.wq" and config.q_lora else NAMES[rest]
        )
        if ".experts.w_" in name:
            yield name, shape, [theirs.replace("*", str(e)) for e in range(config.experts)], shape[
                1:
            ]
        elif rest in ("attn.wk_b", "attn.wv_b"):
            yield name, shape, [theirs], (
                config.heads * (config.qk_nope + config.v_dim),
                config.kv_lora,
            )
        else:
            yield name, shape, [theirs], (
                (math.prod(shape[:-1]), shape[-1]) if len(shape) == 3 else shape
            )


def swap_pairs(x, dims, back=False):
    """DeepSeek's RoPE turns neighbours (0, 1), (2, 3), ..., ours the two halves: the last `dims`
    rows of x (..., rows, C) change places, so that queries and keys are permuted alike and their
    products stay what they were."""
    keep, rotary = x[..., :-dims, :], x[..., -dims:, :]
    rotary = rotary.unflatten(-2, (2, -1) if back else (-1, 2)).transpose(-3, -2).flatten(-3, -2)
    return torch.cat((keep, rotary), -2)


def to_ours(config, name, shape, x, interleaved):
    """One published tensor -> our layout"""
    if name.endswith(("attn.wk_b", "attn.wv_b")):
        x = x.view(config.heads, -1, config.kv_lora)
        return x[:, : config.qk_nope] if name.endswith("wk_b") else x[:, config.qk_nope :]
    x = x.view(shape)
    return (
        swap_pairs(x, config.qk_rope)
        if interleaved and name.endswith(("attn.wq", "attn.wkv_a"))
        else x
    )


def parts(tensors, name, shape, quant):
    """What stands in the file for a weight of this shape: {name: (shape, dtypes)}, one tensor or,
    quantised, its pieces."""
    floats, integers = (torch.float32, torch.bfloat16, torch.float16, torch.float64), (
        torch.int32,
        torch.int64,
    )
    if len(shape) != 2:
        return {name: (shape, floats)}
    if name + "_packed" in tensors:
        return {
            name + "_packed": ((shape[0], -(-shape[1] // 8)), (torch.int32,)),
            name + "_scale": ((shape[0], -(-shape[1] // quant["group"])), floats),
            name + "_shape": ((2,), integers),
        }
    if name in tensors and tensors[name].dtype == torch.float8_e4m3fn:
        blocks = tuple(-(-n // b) for n, b in zip(shape, quant["block"]))
        return {name: (shape, (torch.float8_e4m3fn,)), name + "_scale_inv": (blocks, floats)}
    return {name: (shape, floats)}


def dequantize(pieces, shape, quant):
    """fp8 with one scale per block of the matrix, or eight 4-bit integers (low bits first, offset
    8) per int32 with one scale per group."""
    if len(pieces) == 1:
        return pieces[0]
    spread = (
        lambda scale, rows, columns: scale.float()
        .repeat_interleave(rows, 0)[: shape[0]]
        .repeat_interleave(columns, 1)[:, : shape[1]]
    )
    if len(pieces) == 2:
        return pieces[0].float() * spread(pieces[1], *quant["block"])
    # (R, C / 8, 8)
    nibbles = (pieces[0][..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    return (nibbles.flatten(1)[:, : shape[1]] - 8).float() * spread(pieces[1], 1, quant["group"])


def quantization(get):
    """quantization_config -> {"block": rows and columns under one fp8 scale, "group": columns under
    one int4 scale}"""
    raw = get.raw.get("quantization_config") or {}
    try:
        block, group = raw.get("weight_block_size", [128, 128]), 32
        for scheme in raw.get("config_groups", {}).values():
            weights = scheme["weights"]
            group, four = weights["group_size"], (
                weights["num_bits"],
                weights["type"],
                weights["symmetric"],
            ) == (4, "int", True)
            if not four or raw["format"] != "pack-quantized":
                raise ValueError
        if raw.get("quant_method", "fp8") not in ("fp8", "compressed-tensors") or len(block) != 2:
            raise ValueError
        if any(type(n) is not int or not 1 <= n <= 1 << 20 for n in (*block, group)):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{get.path}: quantization_config {raw!r:.80} is neither block-scaled fp8 nor packed symmetric int4"
        ) from None
    if raw.get("transform_config"):
        raise ValueError(
            f"{get.path}: quantization_config has a transform_config, rotations not applied here: take weights without"
        )
    return {"block": block, "group": group}


def surplus(config, get, prefix, names):
    """Names of tensors that no part of the model asked for. Known extras are not counted: a vision
    tower beside the language model, layers that predict further tokens (MTP), a head stored
    although it is tied, tables of angles."""
    # transformers' older name and newer
    more = max(get(key, 0, 0, 64) for key in ("num_nextn_predict_layers", "num_mtp_layers"))
    extra = tuple(f"{prefix}model.layers.{config.layers + i}." for i in range(more))
    extra += ("vision_tower.", "mm_projector.") if prefix else ()
    known = (
        lambda n: n.startswith(extra)
        or n.endswith("rotary_emb.inv_freq")
        or config.tie
        and n == prefix + "lm_head.weight"
    )
    return [name for name in names if not known(name)]


def equal_in_slices(one, other):
    """Do two views of files hold the same numbers? Of neither more than a slice is in memory."""
    same = one.shape == other.shape
    for a, b in zip(one.split(1024), other.split(1024)) if same else ():
        same = same and torch.equal(a.float(), b.float())
        let_go(one), let_go(other)
    return same


def read_checkpoint(folder, dtype=None, wanted={}):
    """A folder of a published model -> (ModelConfig, iterator of (our name, tensor)). Names and
    shapes are all checked before the first byte of a weight is read (then, by every rank, a head
    that is stored although it is tied); then one tensor at a time is dequantised, brought to our
    layout and cast to `dtype` (None: as stored; what was quantised becomes fp32). wanted: {our
    name: a slice per dimension}, the stretch of a tensor that is wanted of it, asked when its turn
    comes; of experts outside it no weight is read. Raises ValueError with the tensor and the
    file."""
    folder = Path(folder)
    config, get, prefix = read_config(folder / "config.json")
    quant, (tensors, files) = quantization(get), open_folder(folder)
    if config.layers > len(tensors):
        raise ValueError(
            f"{get.path}: {config.layers} layers, but only {len(tensors)} tensors in the folder"
        )
    plan, left = [], set(tensors)
    for ours, shape, theirs, theirs_shape in published(config):
        plan.append(
            (
                ours,
                shape,
                [parts(tensors, prefix + name, theirs_shape, quant) for name in theirs],
                theirs_shape,
            )
        )
        for name, (right, dtypes) in ((n, w) for pieces in plan[-1][2] for n, w in pieces.items()):
            if name not in tensors:
                raise ValueError(f"{folder}: tensor {name!r} is missing")
            found = tensors[name]
            if tuple(found.shape) != right or found.dtype not in dtypes:
                raise ValueError(
                    f"{files[name]}: tensor {name!r} is {found.dtype} {tuple(found.shape)}, expected {dtypes[0]} {right}"
                )
            if name.endswith(".weight_shape") and tuple(found.tolist()) != theirs_shape:
                raise ValueError(
                    f"{files[name]}: tensor {name!r} says {found.tolist()}, expected {theirs_shape}"
                )
            left.discard(name)
    for name in sorted(surplus(config, get, prefix, left)):
        raise ValueError(f"{files[name]}: tensor {name!r:.200} is not part of this architecture")
    head, embed = (prefix + TOP[name] for name in ("head.weight", "embed.weight"))
    if head in left and config.tie and not equal_in_slices(tensors[head], tensors[embed]):
        raise ValueError(
            f"{files[head]}: tensor {head!r} is not the embedding it is tied to: set tie_word_embeddings to false"
        )
    return config, load(
        config,
        tensors,
        plan,
        quant,
        bool(get("rope_interleave", True, 0)) and config.attention == "mla",
        dtype,
        wanted,
    )


def load(config, tensors, plan, quant, interleaved, dtype, wanted):
    """The data behind read_checkpoint"""
    for ours, shape, theirs, theirs_shape in plan:
        part = wanted.get(ours, tuple(slice(0, n) for n in shape))
        read = lambda pieces: dequantize([tensors[name] for name in pieces], theirs_shape, quant)
        if len(theirs) == 1:
            x = to_ours(config, ours, shape, read(theirs[0]), interleaved)[part]
            x = x.to(
                torch.float32 if ours.endswith("router.bias") else dtype or x.dtype,
                copy=True,
                memory_format=torch.contiguous_format,
            )
        else:
            mine, x = theirs[part[0]], None
            for e, pieces in enumerate(mine):
                expert = read(pieces)[part[1:]]
                x = (
                    torch.empty(len(mine), *expert.shape, dtype=dtype or expert.dtype)
                    if x is None
                    else x
                )
                x[e] = expert
        for pieces in theirs:
            for name in pieces:
                let_go(tensors[name])
        yield ours, x


def load_model(folder, dtype=torch.float32, device="cpu", lay_out=lambda model: {}):
    """A published folder -> Model with weights in `dtype`. No weight is drawn at random first, none
    is held twice. lay_out: cuts the model, which has no data yet, over ranks, and says which part
    of each weight is this rank's ({name: a slice per dimension}; hsdp.py has one): nothing else is
    kept, and of other ranks' experts nothing is read."""
    own = {}
    config, tensors = read_checkpoint(folder, dtype, own)
    with torch.device("meta"):
        model = Model(config).to(dtype)
    own.update(lay_out(model))
    if own:
        model.to_empty(device=device)
    for name, tensor in tensors:
        owner, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner)
        if name in own:
            getattr(owner, leaf).detach().to_local().copy_(tensor)
        else:
            setattr(
                owner,
                leaf,
                nn.Parameter(tensor.to(device)) if leaf in owner._parameters else tensor.to(device),
            )
    if config.tie and not own:
        model.head.weight = model.embed.weight
    for block in model.layers:
        if isinstance(block.ffn, MoE):
            block.ffn.router.load = torch.zeros(config.experts, device=device)
            if config.scoring == "softmax":  # has no bias to read
                block.ffn.router.bias = torch.zeros(config.experts, device=device)
    # its table of angles was on the meta device, too
    model.extend(config.yarn_factor)
    return model


# ---- and back


def config_json(config):
    """ModelConfig -> config.json of the published architecture it is an instance of, or a
    ValueError"""
    c, dense = config, config.dense_layers >= config.layers
    if c.mtp:
        raise ValueError(
            "no published architecture has this drafting head: export the model without it (mtp=0)"
        )
    raw = dict(
        vocab_size=c.vocab,
        hidden_size=c.dim,
        intermediate_size=c.dense_ffn,
        num_hidden_layers=c.layers,
        attention_bias=False,
        num_attention_heads=c.heads,
        hidden_act="silu",
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tie,
        max_position_embeddings=c.window,
    )
    moe = dict(
        num_experts_per_tok=c.active,
        moe_intermediate_size=c.expert_ffn,
        norm_topk_prob=c.norm_gates,
    )
    gqa = dict(num_key_value_heads=c.kv_heads, head_dim=c.qk_rope, use_sliding_window=False)
    whole = c.attention == "gqa" and c.qk_nope == c.q_lora == 0 and c.v_dim == c.qk_rope
    if c.attention == "mla" and c.scoring == "sigmoid" and c.shared:
        family = "deepseek_v3"
        raw |= moe | dict(
            num_key_value_heads=c.heads,
            q_lora_rank=c.q_lora or None,
            kv_lora_rank=c.kv_lora,
            qk_nope_head_dim=c.qk_nope,
            qk_rope_head_dim=c.qk_rope,
            v_head_dim=c.v_dim,
            n_shared_experts=c.shared,
            n_routed_experts=c.experts,
            routed_scaling_factor=c.route_scale,
            n_group=c.n_group,
            topk_group=c.topk_group,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            first_k_dense_replace=c.dense_layers,
            num_nextn_predict_layers=0,
            rope_interleave=True,
        )
    elif whole and dense and c.qkv_bias != c.qk_norm:
        family, raw = "qwen2" if c.qkv_bias else "qwen3", raw | gqa
    elif (
        whole
        and c.qk_norm
        and not c.qkv_bias
        and c.scoring == "softmax"
        and not c.shared
        and c.route_scale == c.n_group == 1
    ):
        family = "qwen3_moe"
        raw |= (
            gqa
            | moe
            | dict(
                num_experts=c.experts,
                mlp_only_layers=list(range(c.dense_layers)),
                decoder_sparse_step=1,
            )
        )
    else:
        raise ValueError(
            "no published architecture has this attention, routing and norms; known: "
            + ", ".join(FAMILIES)
        )
    return {"architectures": [FAMILIES[family]], "model_type": family, **raw, **rope_json(c)}


def rope_json(c):
    if c.yarn_factor == c.yarn_amplitude == 1:
        return {"rope_theta": c.rope_theta}
    # gqa turns whole heads, so the temperature on the scores can sit on cos and sin
    heat = 1 if c.attention == "mla" else 0.1 * c.yarn_mscale * math.log(c.yarn_factor) + 1
    yarn = dict(
        type="yarn",
        rope_type="yarn",
        factor=float(c.yarn_factor),
        original_max_position_embeddings=c.context,
        beta_fast=c.yarn_fast,
        beta_slow=c.yarn_slow,
        attention_factor=heat * c.yarn_amplitude,
    )
    if c.attention == "mla":
        yarn |= dict(mscale=c.yarn_mscale, mscale_all_dim=c.yarn_mscale)
    return {"rope_theta": c.rope_theta, "rope_scaling": yarn}


def to_theirs(config, name, state, shape, expert):
    """One of our weights, or one expert of a stack -> the published tensor"""
    x = state[name]
    if name.endswith("attn.wv_b"):
        x = torch.cat((state[name.replace("wv_b", "wk_b")], x), 1)
    elif config.attention == "mla" and name.endswith(("attn.wq", "attn.wkv_a")):
        x = swap_pairs(x, config.qk_rope, back=True)
    return (x if expert is None else x[expert]).reshape(shape)


def write_safetensors(path, entries, tensors):
    """entries {name: (dtype, shape)} make the header; then the tensors, in the same order, one at a
    time."""
    names, header, at = (
        {dtype: name for name, dtype in DTYPES.items()},
        {"__metadata__": {"format": "pt"}},
        0,
    )
    for name, (dtype, shape) in entries.items():
        header[name] = {
            "dtype": names[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + math.prod(shape) * dtype.itemsize],
        }
        at = header[name]["data_offsets"][1]
    raw = json.dumps(header).encode()
    # so that the data starts aligned
    raw += b" " * (-len(raw) % 8)
    with path.open("xb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for (name, (dtype, shape)), tensor in zip(entries.items(), tensors, strict=True):
            assert tuple(tensor.shape) == tuple(
                shape
            ), f"{name} is {tuple(tensor.shape)}, its header says {tuple(shape)}"
            file.write(tensor.to("cpu", dtype).contiguous().flatten().view(torch.uint8).numpy())


def write_checkpoint(folder, model, dtype=None, shard_bytes=5 << 30, extra=None):
    """A model -> a folder in the published format, weights in `dtype` (None: their own), shards of
    at most shard_bytes (or one tensor). extra: further keys of config.json (eos_token_id, ...).
    config.json comes last: an interrupted export cannot be read."""
    folder, state = Path(folder), model.state_dict()
    config = {**config_json(model.config), **(extra or {})}
    if model.config.scoring == "softmax" and any(
        b.ffn.router.bias.any() for b in model.layers if isinstance(b.ffn, MoE)
    ):
        raise ValueError(
            "the routers' balancing biases are not zero, and qwen3_moe has no place for them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder}: not empty, an export wants a folder of its own")
    # [{their name: (dtype, shape, our name, expert)}]
    shards, full = [], math.inf
    for ours, _, theirs, shape in published(model.config):
        kind = torch.float32 if ours.endswith("router.bias") else dtype or state[ours].dtype
        # goes with wv_b
        for e, name in enumerate(theirs if not ours.endswith("attn.wk_b") else ()):
            size = math.prod(shape) * kind.itemsize
            if full + size > shard_bytes:
                shards.append({})
                full = 0
            shards[-1][name], full = (
                kind,
                shape,
                ours,
                e if len(theirs) > 1 else None,
            ), full + size
    home = {}
    for i, shard in enumerate(shards):
        file = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        )
        # keeps every tensor aligned
        shard = dict(sorted(shard.items(), key=lambda item: -item[1][0].itemsize))
        write_safetensors(
            folder / file,
            {name: entry[:2] for name, entry in shard.items()},
            (
                to_theirs(model.config, ours, state, shape, e)
                for _, shape, ours, e in shard.values()
            ),
        )
        home |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        size = sum(
            math.prod(shape) * kind.itemsize
            for shard in shards
            for kind, shape, _, _ in shard.values()
        )
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": size}, "weight_map": home}, indent=1)
        )
    (folder / "config.json").write_text(json.dumps(config, indent=1))


# ---------------------------------------------------------------- demo and bench


def python_bytes(limit=1_000_000):
    """Real Python to train on: the top of this interpreter's standard library, as bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(p.read_bytes() for p in sorted(root.glob("*.py")))[:limit]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def train_small(config, data, rate, steps=150):
    """Next-byte prediction -> the model, losses, and loads (steps, E) of the first MoE layer as
    shares. Adam by hand: torch.optim would load the compiler first, which takes as long as the
    training."""
    torch.manual_seed(0)
    model, losses, loads = Model(config), [], []
    parameters = list(model.parameters())
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    for step in range(1, steps + 1):
        rows = torch.stack([data[i : i + 65] for i in torch.randint(len(data) - 65, (4,)).tolist()])
        hidden = model(rows[:, :-1])
        loss = F.cross_entropy(model.logits(hidden).flatten(0, 1), rows[:, 1:].flatten())
        grads = torch.autograd.grad(
            loss + (mtp_loss(model, rows[:, :-1], hidden) if config.mtp else 0), parameters
        )
        with torch.no_grad():
            for p, g, m, v in zip(parameters, grads, first, second):
                m.lerp_(g, 0.1), v.lerp_(g * g, 0.05)
                p.addcdiv_(
                    m, (v / (1 - 0.95**step)).sqrt_().add_(1e-8), value=-3e-3 / (1 - 0.9**step)
                )
        load = next(b.ffn.router.load for b in model.layers if isinstance(b.ffn, MoE))
        loads.append(load / load.sum())
        balance(model, rate)
        losses.append(loss.item())
    return model.eval(), losses, torch.stack(loads)


@torch.inference_mode()
def price_of_precision(model, tokens):
    """Relative error of the expert outputs of the last layer in each format, on the rows that the
    router sends them."""
    layer, seen = model.layers[-1].ffn, []
    run = layer.dispatch
    layer.dispatch = lambda x, counts, experts: seen.append((x, counts)) or run(x, counts, experts)
    model(tokens)
    layer.dispatch, (x, counts), e = run, seen[0], layer.experts
    outputs = {
        name: grouped_swiglu(x.to(dtype), counts, e.w_gate, e.w_up, e.w_down, precision).float()
        for name, dtype, precision in (
            ("fp32", x.dtype, ""),
            ("bf16", torch.bfloat16, ""),
            ("MXFP8", x.dtype, "mxfp8"),
            ("NVFP4", x.dtype, "nvfp4"),
        )
    }
    exact = outputs.pop("fp32")
    return {name: float((y - exact).norm() / exact.norm()) for name, y in outputs.items()}


def draw_loads(runs, path):
    # before the import: a notebook exports its own to what it starts
    os.environ["MPLBACKEND"] = "agg"
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(runs), figsize=(9, 3.2), sharey=True, layout="constrained")
    for ax, (name, (_, losses, loads)) in zip(axes, runs.items()):
        ax.stackplot(range(len(loads)), loads.T.numpy())
        ax.set(
            title=f"{name}: loss {sum(losses[-20:]) / 20:.2f}, busiest expert {loads[-20:].mean(0).max():.0%}",
            xlabel="step",
            xlim=(0, len(loads) - 1),
            ylim=(0, 1),
        )
    axes[0].set_ylabel("share of the tokens, expert by expert")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)


def demo():
    torch.set_num_threads(1)
    config = ModelConfig(
        vocab=256, dim=64, layers=2, heads=2, kv_lora=32, dense_ffn=128, experts=8, expert_ffn=32
    )
    data, runs = python_bytes(), {}
    for name, rate, mtp in (("without balancing", 0.0, 0), ("with the bias", 2e-2, 1)):
        runs[name] = model, losses, loads = train_small(replace(config, mtp=mtp), data, rate)
        shares = " ".join(f"{x:.2f}" for x in loads[-20:].mean(0).sort(descending=True)[0])
        print(
            f"{name:18s} loss {losses[0]:.2f} -> {sum(losses[-20:]) / 20:.2f}   shares of the last 20 steps: {shares}"
        )
    draw_loads(runs, Path("out/moe.png"))
    costs = price_of_precision(model, data[:512].view(8, 64))
    print(
        "relative error of the expert outputs: "
        + ", ".join(f"{name} {error:.1%}" for name, error in costs.items())
    )
    text, right = speculate(model, data[:64], 100)
    print(
        f"MTP head as the draft: {right:.0%} of its bytes are the model's own choice, {1 + right:.2f} bytes per pass; it goes on with "
        f"{bytes(text)[:24]!r}"
    )
    total, active = parameters_per_token(config)
    busiest = [loads[-20:].mean(0).max() for _, _, loads in runs.values()]
    print(
        f"{total:,} parameters, {active:,} of them at work on a token. The bias that only moves the choice takes the busiest of "
        f"{config.experts} experts from {busiest[0]:.0%} to {busiest[1]:.0%} of the tokens (even: {1 / config.experts:.0%}); out/moe.png"
    )


def seconds(*calls, repeat=5):
    """Median wall time of each call, measured in turns after a round that warms up: a busy machine
    is then busy for all."""
    times = [[] for _ in calls]
    for _ in range(repeat + 1):
        for call, mine in zip(calls, times):
            start = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            mine.append(time.perf_counter() - start)
    return [sorted(mine[1:])[repeat // 2] for mine in times]


def bench():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # as in train.py's processes: one for each core
    torch.set_num_threads(1)
    dtype, T, D, Fe, E, K = fast_dtype(device), 4096, 256, 512, 16, 2
    torch.manual_seed(0)
    config = ModelConfig(dim=D, experts=E, active=K, expert_ffn=Fe, shared=0)
    moe, master, dense = (
        MoE(config).to(device),
        MoE(config).to(device),
        FFN(D, K * Fe).to(device, dtype),
    )
    moe.experts.to(dtype)
    x = torch.randn(1, T, D, device=device, dtype=dtype, requires_grad=True)
    y = torch.randn(T * K, D, device=device, dtype=dtype)
    # others every time, as in training
    counts = lambda: torch.bincount(torch.randint(0, E, (T * K,), device=device), minlength=E)
    weights = (moe.experts.w_gate, moe.experts.w_up, moe.experts.w_down)

    def both(layer):
        for leaf in (x, *moe.parameters(), *master.parameters(), *dense.parameters()):
            leaf.grad = None
        out = layer()
        out.backward(torch.ones_like(out))

    layers = {
        "dense layer of equal active FLOPs": lambda: dense(x),
        "MoE layer": lambda: moe(x),
        "MoE layer, weights kept in fp32": lambda: master(x),
        "experts, grouped_mm": lambda: grouped_swiglu(y, counts(), *weights),
        "experts, loop": lambda: looped_swiglu(y, counts(), *weights),
    }
    times = seconds(*(partial(both, layer) for layer in layers.values()))
    where = "one core" if device == "cpu" else torch.cuda.get_device_name()
    print(f"{where}, {dtype}, T={T} D={D} E={E} K={K} F={Fe}, forward + backward")
    for name, t in zip(layers, times):
        print(f"  {name:36s} {1e3 * t:8.2f} ms   {t / times[0]:5.2f} x dense")
    model = Model(ModelConfig()).to(device).compute(dtype)
    tokens = torch.randint(0, 1024, (16, 256), device=device)
    (train,) = seconds(
        lambda: F.cross_entropy(
            model.logits(model(tokens)).flatten(0, 1), tokens.flatten()
        ).backward()
    )
    with torch.inference_mode():
        cache, start = Cache(model.eval(), 64, 512), torch.full((64,), 300, device=device)
        (one,) = seconds(
            lambda: model.logits(
                model.decode(tokens[:1, :1].expand(64, 1), cache, slice(0, 64), start)
            )
        )
    print(
        f"laptop model: {tokens.numel() / train:,.0f} tokens/s forward + backward, {64 / one:,.0f} tokens/s decoding 64 rows at 300"
    )
    loading()
    # in a process of its own: kernels compiled before crowd it
    if importlib.util.find_spec("transformers"):
        other = multiprocessing.get_context("spawn").Process(
            target=against_transformers, args=(device,)
        )
        other.start(), other.join()


def loading():
    """A checkpoint of 2 GB, whose pages the system still holds: into a model, and for comparison
    its bytes into memory."""
    sizes = dict(
        vocab=32000,
        dim=1024,
        layers=6,
        dense_ffn=4096,
        experts=64,
        expert_ffn=896,
        heads=16,
        kv_lora=256,
        qk_nope=64,
        qk_rope=32,
    )
    with torch.device("meta"):
        model = Model(ModelConfig(**sizes, v_dim=64)).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder, "model"), model.to_empty(device="cpu"))
        # its memory is not what is measured
        model.to("meta")
        files = list(Path(folder, "model").iterdir())
        size = sum(path.stat().st_size for path in files) / 1e9
        read, load = seconds(
            lambda: [path.read_bytes() for path in files],
            lambda: load_model(files[0].parent, torch.bfloat16),
        )
    print(
        f"a checkpoint of {size:.1f} GB is loaded at {size / load:.1f} GB/s, {read / load:.2f} x the speed of reading its files"
    )


def against_transformers(device, rows=16, new=64):
    """Where transformers is installed: training steps and greedy decoding of one small random
    DeepSeek-V3 by both. Training meets a new batch at every step, so that the experts get other
    numbers of rows: see `filled` for what that costs on a CPU."""
    import transformers

    torch.set_num_threads(1)
    dtype = fast_dtype(device)
    # one each: a model writes its kind of experts into it
    sizes = lambda: transformers.DeepseekV3Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        first_k_dense_replace=1,
        max_position_embeddings=2048,
    )
    theirs = {
        kind: transformers.AutoModelForCausalLM.from_config(
            sizes(), dtype=dtype, experts_implementation=kind
        ).to(device)
        for kind in ("eager", "grouped_mm")
    }
    with tempfile.TemporaryDirectory() as folder:
        theirs["eager"].save_pretrained(folder)
        ours = load_model(folder, dtype, device).compute(dtype)
    # ours first: their kernels crowd out what ours have compiled
    models = {"ours": ours} | theirs
    draw = lambda *shape: torch.randint(0, 1024, shape, device=device)
    same = draw(8, 256)

    def step(model, batch):
        tokens = batch()
        model.zero_grad()
        if model is ours:
            return ours.logprobs(ours(tokens), tokens).mean().neg().backward()
        F.cross_entropy(
            model(tokens, use_cache=False).logits.flatten(0, 1).float(), tokens.flatten()
        ).backward()

    @torch.inference_mode()
    def decode(start):
        length = start.shape[1]
        cache, text = Cache(ours, rows, length + new + 1), start
        hidden = ours.decode(start, cache, slice(0, rows), start.new_zeros(rows))
        for i in range(new):
            token = ours.logits(hidden[:, -1:]).argmax(-1)
            text = torch.cat((text, token), 1)
            hidden = ours.decode(token, cache, slice(0, rows), start.new_full((rows,), length + i))
        return text

    generate = partial(
        theirs["grouped_mm"].generate,
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    print(f"a small DeepSeek-V3, transformers {transformers.__version__} and ours, {dtype}")
    for title, batch in (
        ("a new batch each time", lambda: draw(8, 256)),
        ("the same batch again", lambda: same),
    ):
        times = [
            seconds(partial(step, model.train(), batch), repeat=15)[0] for model in models.values()
        ]
        for name, t in zip(models, times):
            print(
                f"  training, {title}, {name:12s} {same.numel() / t:8,.0f} tokens/s   {min(times[1:]) / t:5.2f} x their faster one"
            )
    theirs["grouped_mm"].eval(), ours.side_by_side().eval()
    for length in (64, 1024):
        start = draw(rows, length)
        times = seconds(partial(generate, start), partial(decode, start), repeat=3)
        for name, t in zip(("generate", "ours"), times):
            print(
                f"  prompts of {length:4d}, {rows} rows decoded, {name:8s} {rows * new / t:8,.0f} tokens/s  {times[0] / t:5.2f} x theirs"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Expert load with and without the balancing bias.",
        usage=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--bench", action="store_true", help="measure")
    try:
        bench() if parser.parse_args().bench else demo()
    except OSError as error:
        sys.exit(
            print(f"moe.py: {error.filename or 'cannot write'}: {error.strerror}", file=sys.stderr)
            or 2
        )
