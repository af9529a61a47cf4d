"""fast/low_precision.py: the experts' products in 8 and 4 bits.

    x -> round(x / s) * s per block of the contraction axis:
        MXFP8   numbers of E4M3 in blocks of 32, s = 2^n
        NVFP4   numbers of E2M1 in blocks of 16, s = E4M3 * FP32

Stated by Cursor (Technical Report, arXiv 2603.24477, and cursor.com/blog/composer-2-5): experts in
MXFP8 in training, NVFP4 in the forward with an FP32 scale per token instead of per tensor, so that
no token's value depends on the others in its batch. The plain form is moe.Experts.forward, which
does not round: ModelConfig(precision=...) names the format, and fast.accelerate(model) puts
LowPrecisionExperts into its place.

The formats are emulated: numbers are rounded to what a format holds, and multiplied in the dtype of
x (tests/test_fast_low_precision.py searches the tables of the formats for every value).

Left out: the kernels of the cards that multiply such numbers themselves (from the B200 on), which
would be faster and give the same result up to the order of sums. And a backward in the small
formats (Cursor computes it in MXFP8): the gradient is that of the products of the rounded values,
and passes straight through the rounding.

Letters: C columns (the axis that is summed over), M rows sorted by expert, E experts.
"""

import torch

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


def mxfp8(x):
    """x (..., C) rounded to what MXFP8 can hold: numbers of E4M3, and for every 32 of them a power
    of two, chosen so that the largest number is at most 448"""
    blocks = x.float().unflatten(-1, (-1, 32))  # (..., C/32, 32)
    fraction, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))  # (..., C/32, 1)
    # The largest E4M3 is 448 = 0.875 * 2^9. The scale is rounded up, so that nothing saturates.
    scale = power_of_two((exponent - 9 + (fraction > 0.875)).clamp(min=-126))
    numbers = nearest(blocks / scale, 3, -6)
    return (numbers * scale).flatten(-2).to(x.dtype)


def nvfp4(x):
    """x (..., C) rounded to what NVFP4 can hold: numbers of E2M1, an E4M3 scale for every 16 of
    them, and an FP32 scale. In Cursor's variant the FP32 scale belongs to the row (the token), not
    to the tensor, so no token's value depends on the others in its batch."""
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
    numbers = nearest(blocks / (scale * row), 1, 0).clamp(-6, 6)
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


# ---------------------------------------------------------------- the experts


class LowPrecisionExperts(moe.Experts):
    """The twin of moe.Experts.forward where the operands of its products are rounded to the format
    `precision`"""

    @staticmethod
    def is_for(experts):
        return bool(experts.precision)

    def forward(self, x, counts):
        dtype, weights = x.dtype, self.local_weights()

        def round_to_format(tensor):
            return Quantize.apply(tensor.to(dtype), self.precision)

        def round_weights():
            return [round_to_format(weight) for weight in weights]

        # In sampling, weights serve thousands of steps: they are rounded once.
        if torch.is_inference_mode_enabled():
            rounded = joined(self, weights, round_weights, dtype)
        else:
            rounded = round_weights()
        return grouped_swiglu(x, counts, *rounded, round_to_format)
