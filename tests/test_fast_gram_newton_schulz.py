"""The Gram form of Newton-Schulz against the ten lines of muon.py."""

import pytest
import torch

from fast.gram_newton_schulz import gram_newton_schulz
from muon import newton_schulz, orthogonalize


@pytest.mark.parametrize("shape", [(3, 24, 96), (2, 80, 16), (32, 32), (1, 8, 9)])
def test_the_gram_form_is_the_plain_iteration(shape):
    """In bf16 five steps amplify the rounding of either: there it is as near to the exact result as
    the plain one is."""
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def run(dtype, iterate=newton_schulz):
        return orthogonalize(G, 5, dtype, iterate=iterate)

    exact = run(torch.float32)
    gram = run(torch.float32, gram_newton_schulz)
    assert (gram - exact).norm() <= 1e-4 * exact.norm()
    error = (run(torch.bfloat16) - exact).norm()
    gram_error = (run(torch.bfloat16, gram_newton_schulz) - exact).norm()
    assert gram_error <= 1.5 * error <= 0.3 * exact.norm()


def test_no_step_is_the_normalised_matrix_itself():
    G = torch.randn(2, 6, 8)
    assert torch.equal(
        orthogonalize(G, 0, dtype=torch.float32),
        orthogonalize(G, 0, dtype=torch.float32, iterate=gram_newton_schulz),
    )
