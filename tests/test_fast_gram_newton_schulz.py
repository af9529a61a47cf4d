"""The Gram form of Newton-Schulz against the ten lines of muon.py."""

import pytest
import torch

from fast.gram_newton_schulz import gram_newton_schulz
from muon import COEFFICIENTS, orthogonalize


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(3, 24, 96), (2, 80, 16), (32, 32), (1, 8, 9)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_the_gram_form_is_the_plain_iteration(shape, coefficients, dtype, tolerance):
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    plain = orthogonalize(G, 5, coefficients, dtype)
    gram = orthogonalize(G, 5, coefficients, dtype, iterate=gram_newton_schulz)
    assert (gram - plain).norm() <= tolerance * plain.norm()


def test_no_step_is_the_normalised_matrix_itself():
    G = torch.randn(2, 6, 8)
    assert torch.equal(
        orthogonalize(G, 0, dtype=torch.float32),
        orthogonalize(G, 0, dtype=torch.float32, iterate=gram_newton_schulz),
    )
