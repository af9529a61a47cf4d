"""Experts in 8 and 4 bits: every value against a search through the tables of the formats, the
experts against the plain products of rounded numbers."""

import math
import struct

import pytest
import torch
import torch.nn.functional as F

import fast
from fast import low_precision
from fast.cpu_kernels import looped_swiglu
from fast.low_precision import LowPrecisionExperts, mxfp8, nvfp4
from moe import Experts

# All magnitudes of the two formats, in the order of their codes. The last code of E4M3 is NaN.
E4M3 = [
    (m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    for e in range(16)
    for m in range(8)
][:-1]
E2M1 = [m / 2 if e == 0 else (1 + m / 2) * 2.0 ** (e - 1) for e in range(4) for m in range(2)]
# Rounds to fp32. One operation on two fp32 numbers may be done in double and rounded afterwards:
# the result is that of fp32 arithmetic.
fp32 = lambda x: struct.unpack("f", struct.pack("f", x))[0]


def by_table(x, table):
    """The nearest of all representable values; of two equally near the one with the even code."""
    code = min(range(len(table)), key=lambda i: (abs(table[i] - abs(x)), i % 2))
    return math.copysign(table[code], x)


def slow_mxfp8(row):
    """The oracle for MXFP8: blocks of 32, each with the smallest power of two as its scale that
    holds the largest value"""
    out = []
    for i in range(0, len(row), 32):
        scale = 2.0**-126
        while max(map(abs, row[i : i + 32])) > 448 * scale:
            scale *= 2
        out += [by_table(x / scale, E4M3) * scale for x in row[i : i + 32]]
    return out


def slow_nvfp4(row):
    """The oracle for NVFP4: blocks of 16 with an E4M3 scale, and one fp32 scale for the row"""
    out, whole = [], max(fp32(max(map(abs, row)) / 2688), fp32(1e-30))
    for i in range(0, len(row), 16):
        scale = max(by_table(fp32(fp32(max(map(abs, row[i : i + 16])) / 6) / whole), E4M3), E4M3[1])
        out += [
            fp32(by_table(fp32(x / fp32(scale * whole)), E2M1) * scale * whole)
            for x in row[i : i + 16]
        ]
    return out


def awkward_rows():
    """Every magnitude, ties, zeros, and blocks whose largest value stands at or just past what a
    scale can hold."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(12, 64, generator=g) * 2.0 ** torch.randint(-12, 12, (12, 64), generator=g)
    x[1:4] = torch.randn(3, 64, generator=g) * 2.0 ** torch.tensor([[-60.0], [0.0], [60.0]])
    x[4], x[5, :32] = 0, 0
    x[6, 0], x[6, 32], x[7, 0], x[7, 32] = (
        448 * 2.0**14,
        448.001 * 2.0**14,
        7 * 2.0**30,
        -7.0000005 * 2.0**30,
    )
    middles = [(a + b) / 2 for a, b in zip(E4M3, E4M3[1:])]
    x[8, :32], x[8, 32:], x[9] = (
        torch.tensor(middles[:31] + [448.0]),
        torch.tensor(middles[-31:] + [448.0]),
        torch.arange(-32, 32) / 8,
    )
    x[9, ::16] = 6.0
    x[10] = torch.randn(64, generator=g) * 1e-8
    # One large value, beside which the scales of the other blocks would round to zero.
    x[10, 0] = 1e5
    return x


@pytest.mark.parametrize("fast,slow", [(mxfp8, slow_mxfp8), (nvfp4, slow_nvfp4)])
def test_every_quantised_value_is_that_of_a_search_through_the_table(fast, slow):
    x = awkward_rows()
    assert fast(x).tolist() == [slow(row) for row in x.tolist()]
    assert torch.equal(fast(-x), -fast(x))
    assert torch.equal(fast(x.bfloat16()), fast(x.bfloat16().float()).bfloat16())


def test_the_tables_are_those_of_the_formats_and_torchs_own_cast_rounds_alike():
    assert (len(E4M3), max(E4M3), E4M3[1], E2M1) == (127, 448, 2**-9, [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.cat(
        (torch.tensor(E4M3), torch.linspace(-448, 448, 3001), torch.linspace(-0.02, 0.02, 501))
    )
    assert torch.equal(low_precision.nearest(x, 3, -6), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("quantise", [mxfp8, nvfp4])
def test_a_token_is_quantised_alike_in_any_company_which_a_scale_per_tensor_does_not_give(quantise):
    torch.manual_seed(6)
    tokens, company = torch.randn(5, 64), 50 * torch.randn(3, 64)
    assert torch.equal(quantise(torch.cat((tokens, company)))[:5], quantise(tokens))
    if quantise is nvfp4:
        per_tensor = lambda t: nvfp4(t.flatten()).view_as(t)  # the whole batch as one row
        assert not torch.equal(per_tensor(torch.cat((tokens, company)))[:5], per_tensor(tokens))


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_in_sampling_weights_are_rounded_once_and_follow_new_ones(precision, monkeypatch):
    torch.manual_seed(8)
    experts = fast.accelerate(Experts(3, 32, 32, precision)).requires_grad_(False)
    x, counts, calls = torch.randn(7, 32), torch.tensor([3, 0, 4]), []
    plain = low_precision.FORMATS[precision]

    def counted(t):
        calls.append(t.ndim)
        return plain(t)

    monkeypatch.setitem(low_precision.FORMATS, precision, counted)
    for _ in range(2):
        for weight in (experts.w_gate, experts.w_up, experts.w_down):
            weight.copy_(torch.randn(weight.shape))
        expected = experts(x, counts)
        with torch.inference_mode():
            assert torch.equal(experts(x, counts), expected)
            calls.clear()
            assert torch.equal(experts(x, counts), expected)
            assert calls == [2, 2]  # the rows alone
    # Another dtype of the products is another rounding of the same weights.
    lower = fast.accelerate(experts.requires_grad_(False))(x.bfloat16(), counts)
    with torch.inference_mode():
        assert torch.equal(experts(x.bfloat16(), counts), lower)
        assert torch.equal(experts(x, counts), expected)


@pytest.mark.parametrize("precision,slow", [("mxfp8", slow_mxfp8), ("nvfp4", slow_nvfp4)])
def test_low_precision_experts_multiply_quantised_numbers_and_pass_the_gradient_straight_through(
    precision, slow
):
    torch.manual_seed(7)
    experts, counts = Experts(3, 32, 32, precision), torch.tensor([3, 0, 4])
    x = torch.randn(7, 32, requires_grad=True)
    with pytest.raises(AssertionError, match=precision):  # the plain form does not round
        experts(x, counts)
    experts = fast.accelerate(experts)
    assert isinstance(experts, LowPrecisionExperts)
    torch.nn.init.normal_(experts.w_down)
    weights, upstream = (experts.w_gate, experts.w_up, experts.w_down), torch.randn(7, 32)

    def q(t):
        rounded = torch.tensor([slow(r) for r in t.detach().flatten(0, -2).tolist()])
        return t + (rounded.view_as(t) - t).detach()

    rows = []
    for e, part in enumerate(x.split(counts.tolist())):
        if len(part):
            gate, up = (q(part) @ q(w[e]).T for w in weights[:2])
            rows.append(q(F.silu(gate) * up) @ q(weights[2][e]).T)
    mine, reference = experts(x, counts), torch.cat(rows)
    torch.testing.assert_close(mine, reference, atol=1e-3, rtol=1e-3)
    assert (mine - looped_swiglu(x, counts, *weights)).norm() > 0.01 * mine.norm()
    for a, b in zip(
        *(torch.autograd.grad((y * upstream).sum(), (x, *weights)) for y in (mine, reference))
    ):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
