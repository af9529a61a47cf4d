"""fast/low_precision.py: the experts' products in 8 and 4 bits.

    x -> round(x / s) * s per block of the contraction axis:
        MXFP8   numbers of E4M3 in blocks of 32, s = 2^n
        NVFP4   numbers of E2M1 in blocks of 16, s = E4M3 * FP32

Stated by Cursor (Technical Report, arXiv 2603.24477, and cursor.com/blog/composer-2-5): experts in
MXFP8 in training, NVFP4 in the forward with an FP32 scale per token instead of per tensor, so that
no token's value depends on the others in its batch. The plain form is moe.Experts.forward, which
does not round: ModelConfig(precision=...) names the format, and fast.accelerate(model) puts
LowPrecisionExperts into its place.

Where the tensor cores multiply such numbers (compute capability 10, a B200, and later) they do;
elsewhere the same numbers are multiplied in the dtype of x, to the same result up to the order of
sums (tests/test_moe.py reads the bytes of both by the tables of the formats).

Left out: a backward in the small formats (Cursor computes it in MXFP8). The gradient is that of the
products of the rounded values, and passes straight through the rounding.

Letters: R rows, C columns (the axis that is summed over), M rows sorted by expert, E experts.

    python -m fast.low_precision    trains a small model and prints what each format costs
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

import moe
from fast.cpu_kernels import grouped_swiglu
from fast.decode import joined

# ---------------------------------------------------------------- the formats


def power_of_two(exponent):
    """2^exponent in fp32, from an integer tensor of exponents from -126 to 127"""
    # made of its bits: exact on any device, which exp2 does not promise
    return ((exponent + 127) << 23).view(torch.float32)


def nearest(x, mantissa, lowest):
    """The nearest number with `mantissa` bits behind the leading one and exponents from `lowest`
    up; smaller numbers are subnormals. Ties go to even."""
    # Neighbours are `step` apart. (frexp gives a fraction from 0.5 on, so its exponent is 1 more.)
    step = power_of_two((torch.frexp(x)[1] - 1).clamp(min=lowest) - mantissa)
    return (x / step).round() * step


def mxfp8_parts(x):
    """x (..., C) -> numbers of E4M3 (..., C/32, 32), and for every 32 of them a power of two (...,
    C/32, 1), chosen so that the largest number is at most 448"""
    blocks = x.float().unflatten(-1, (-1, 32))  # (..., C/32, 32)
    fraction, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))  # (..., C/32, 1)
    # The largest E4M3 is 448 = 0.875 * 2^9. The scale is rounded up, so that nothing saturates.
    scale = power_of_two((exponent - 9 + (fraction > 0.875)).clamp(min=-126))
    return nearest(blocks / scale, 3, -6), scale


def nvfp4_parts(x):
    """x (..., C) -> numbers of E2M1 (..., C/16, 16), an E4M3 scale for every 16 of them (..., C/16,
    1), and an FP32 scale (..., 1, 1). In Cursor's variant the FP32 scale belongs to the row (the
    token), not to the tensor, so no token's value depends on the others in its batch."""
    blocks = x.float().unflatten(-1, (-1, 16))  # (..., C/16, 16)
    top = blocks.abs().amax(-1, keepdim=True)  # (..., C/16, 1)

    # The largest E2M1 is 6, the largest E4M3 448: the row's scale takes its largest number to the
    # product of the two. 1e-30: a row of zeros must not divide by 0.
    #
    # Divisors are tensors on the device: CUDA turns a division by a plain number into a product
    # with its reciprocal, whose last bit may differ, and NVFP4 wants the IEEE quotient (Technical
    # Report, 6.1).
    largest, both = top.new_full((), 6.0), top.new_full((), 6.0 * 448)
    row = (top.amax(-2, keepdim=True) / both).clamp(min=1e-30)  # (..., 1, 1)

    # Each block's scale takes its largest number to 6, as near as E4M3 comes to it. A scale
    # that was rounded down saturates the largest numbers. 2^-9 is the smallest E4M3 above 0.
    scale = nearest(top / largest / row, 3, -6).clamp(2**-9, 448)
    return nearest(blocks / (scale * row), 1, 0).clamp(-6, 6), scale, row


def mxfp8(x):
    """x (..., C) rounded to what MXFP8 can hold"""
    numbers, scale = mxfp8_parts(x)  # (..., C/32, 32), (..., C/32, 1)
    return (numbers * scale).flatten(-2).to(x.dtype)


def nvfp4(x):
    """x (..., C) rounded to what NVFP4 can hold"""
    numbers, scale, row = nvfp4_parts(x)  # (..., C/16, 16), (..., C/16, 1), (..., 1, 1)
    return (numbers * scale * row).flatten(-2).to(x.dtype)


FORMATS = {"mxfp8": mxfp8, "nvfp4": nvfp4}


class Quantize(torch.autograd.Function):
    """x (..., C) rounded to a format, in the dtype of x. The gradient passes straight through the
    rounding."""

    @staticmethod
    def forward(ctx, x, precision):
        return FORMATS[precision](x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# ---------------------------------------------------------------- products in hardware


def tiled(scale):
    """Block scales (R, S), one byte each, in the order that the products want: tiles of 128 rows by
    4 columns, one behind the other. Row r of a tile begins at byte 16 (r mod 32) + 4 (r div 32)
    (cuBLAS documentation, "1D block scaling factors layout")."""
    R, S = scale.shape
    tiles = F.pad(scale.view(torch.uint8), (0, -S % 4, 0, -R % 128))
    tiles = tiles.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))  # (R/128, 4, 32, S/4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scale.dtype)


def packed(x, precision):
    """x (R, C) as the operand of a scaled product -> its numbers, (R, C) in MXFP8 or two to a byte
    (R, C/2) in NVFP4; block scales in tiles; and the rows' scales (R, 1), ones in MXFP8"""
    if precision == "mxfp8":
        numbers, scale = mxfp8_parts(x)
        codes = numbers.flatten(1).to(torch.float8_e4m3fn)  # (R, C)
        return codes, tiled(scale[..., 0].to(torch.float8_e8m0fnu)), scale.new_ones(len(x), 1)

    # The code of an E2M1 number is a sign bit and its place in the table of the eight sizes.
    numbers, scale, row = nvfp4_parts(x)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=x.device)
    codes = torch.bucketize(numbers.abs(), sizes) + 8 * (numbers < 0)  # (R, C/16, 16)
    codes = codes.flatten(1).to(torch.uint8)  # (R, C)

    # Two codes to a byte, the first one in the low bits.
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)
    return pairs, tiled(scale[..., 0].to(torch.float8_e4m3fn)), row[..., 0]


class ScaledProduct(torch.autograd.Function):
    """The experts' products on tensor cores that take the small formats, one expert at a time: x
    (M, C) sorted by expert, w (E, R, C), counts (E,) -> (M, R). The gradient is the same as without
    such cores: products of the rounded values in the dtype of x."""

    @staticmethod
    def forward(ctx, x, w, counts, precision):
        ctx.save_for_backward(x, w, counts)
        ctx.precision = precision
        kind = F.ScalingType.BlockWise1x32 if precision == "mxfp8" else F.ScalingType.BlockWise1x16
        # how block scales are laid out (see tiled), and the result (M, R)
        order, y = F.SwizzleType.SWIZZLE_32_4_4, x.new_empty(len(x), w.shape[1])
        sizes = counts.tolist()
        for rows, weight, out in zip(x.split(sizes), w, y.split(sizes)):
            if not len(rows):
                continue

            # Both operands are rounded along C: x per token, w per output row.
            a, a_scale, a_row = packed(rows, precision)
            b, b_scale, b_row = packed(weight, precision)
            scales = (a_scale, kind, b_scale, kind, order, order)
            product = F.scaled_mm(a, b.t(), *scales, output_dtype=torch.bfloat16)

            # The cores apply the block scales; the scales of rows are left to do: (m, 1), (1, R).
            out.copy_(product * a_row * b_row.T)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, w, counts = ctx.saved_tensors
        offsets, quantize = counts.cumsum(0).to(torch.int32), FORMATS[ctx.precision]
        dx = F.grouped_mm(grad, quantize(w), offs=offsets)  # (M, C)
        dw = F.grouped_mm(grad.t(), quantize(x), offs=offsets)  # (E, R, C)
        return dx, dw, None, None


def scales_in_hardware(device):
    """Do the tensor cores of this device multiply MXFP8 and NVFP4? Compute capability 10 (B200) and
    later."""
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (10, 0)
    )


# ---------------------------------------------------------------- the experts


def low_precision_swiglu(x, counts, w_gate, w_up, w_down, precision, rounded=False):
    """As grouped_swiglu, but the operands of every product are rounded to `precision`. Tensor cores
    multiply them where they can; elsewhere the same numbers are multiplied in the dtype of x.
    rounded: the weights are rounded already"""
    # In hardware: ScaledProduct rounds both operands itself.
    if scales_in_hardware(x.device):

        def multiply(rows, weights):
            return ScaledProduct.apply(rows, weights.to(rows.dtype), counts, precision)

        return multiply(F.silu(multiply(x, w_gate)) * multiply(x, w_up), w_down)

    # Emulated: the weights are rounded in each product, the rows before it.
    offsets = counts.cumsum(0).to(torch.int32)  # (E,): where each expert's rows end

    def multiply_rounded(rows, weights):
        if not rounded:
            weights = Quantize.apply(weights.to(rows.dtype), precision)
        return F.grouped_mm(rows, weights.transpose(-2, -1), offs=offsets)

    # x is an operand of two products and is rounded once.
    x = Quantize.apply(x, precision)
    hidden = F.silu(multiply_rounded(x, w_gate)) * multiply_rounded(x, w_up)
    return multiply_rounded(Quantize.apply(hidden, precision), w_down)


class LowPrecisionExperts(moe.Experts):
    """The twin of moe.Experts.forward where the operands of its products are rounded to the format
    `precision`"""

    @staticmethod
    def is_for(experts):
        return bool(experts.precision)

    def forward(self, x, counts):
        weights = self.local_weights()
        # In sampling, weights serve thousands of steps: where rounding is emulated, once is enough.
        rounded = torch.is_inference_mode_enabled() and not scales_in_hardware(x.device)
        if rounded:
            round_all = partial(round_weights, weights, x.dtype, self.precision)
            weights = joined(self, weights, round_all)
        return low_precision_swiglu(x, counts, *weights, self.precision, rounded)


def round_weights(weights, dtype, precision):
    return [FORMATS[precision](weight.to(dtype)) for weight in weights]


@torch.inference_mode()
def price_of_precision(model, tokens):
    """{format: relative error of the last layer's expert outputs}, on the rows that its router
    sends to the experts for these tokens (B, T)"""
    # Watch what the experts are given while the model reads the tokens.
    layer, seen = model.layers[-1].ffn, []
    run = layer.dispatch

    def watch(x, counts, experts):
        seen.append((x, counts))
        return run(x, counts, experts)

    layer.dispatch = watch
    model(tokens)
    layer.dispatch, (x, counts) = run, seen[0]

    # The same rows once exactly, and once in each format.
    weights = (layer.experts.w_gate, layer.experts.w_up, layer.experts.w_down)
    exact = grouped_swiglu(x, counts, *weights).float()
    kinds = {
        "bf16": lambda: grouped_swiglu(x.bfloat16(), counts, *weights),
        "MXFP8": partial(low_precision_swiglu, x, counts, *weights, "mxfp8"),
        "NVFP4": partial(low_precision_swiglu, x, counts, *weights, "nvfp4"),
    }
    return {
        name: float((multiply().float() - exact).norm() / exact.norm())
        for name, multiply in kinds.items()
    }


def main():
    torch.set_num_threads(1)
    data = moe.python_bytes()
    model = moe.train_small(replace(moe.DEMO, mtp=1), data, rate=2e-2)[0]
    costs = price_of_precision(model, data[:512].view(8, 64))
    found = ", ".join(f"{name} {error:.1%}" for name, error in costs.items())
    print(f"relative error of the expert outputs: {found}")


if __name__ == "__main__":
    main()
