"""Experts in 8 and 4 bits against the plain experts on rounded numbers. (tests/test_moe.py has the
formats' tables.)"""

import pytest
import torch
import torch.nn.functional as F

import fast
import moe
from fast.low_precision import FORMATS, LowPrecisionExperts


@pytest.mark.parametrize("precision", FORMATS)
def test_low_precision_experts_are_the_plain_products_of_rounded_numbers(precision):
    torch.manual_seed(0)
    experts, counts = moe.Experts(3, 64, 32, precision), torch.tensor([5, 0, 9])
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x, rounded = torch.randn(14, 64), FORMATS[precision]
    with pytest.raises(AssertionError, match=precision):  # the plain form does not round
        experts(x, counts)
    expected = []
    for rows, gate, up, down in zip(x.split(counts.tolist()), *experts.parameters()):
        rows = rounded(rows)
        hidden = F.silu(rows @ rounded(gate).T) * (rows @ rounded(up).T)
        expected.append(rounded(hidden) @ rounded(down).T)
    accelerated = fast.accelerate(experts)
    assert isinstance(accelerated, LowPrecisionExperts)
    torch.testing.assert_close(accelerated(x, counts), torch.cat(expected), atol=1e-3, rtol=1e-3)
