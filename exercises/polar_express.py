"""4. Polar Express.   muon.py, `newton_schulz`   ten lines

Newton-Schulz applies one polynomial five times. Polar Express (Amsel et al., arXiv 2505.16932)
takes another one in each step, the best for where the singular values are by then: the first steps
lift the small ones fast, the last ones bring all of them close to 1.

Let `COEFFICIENTS` be a list of (a, b, c), one for each step (the last one again for more steps).

    python -m pytest exercises/polar_express.py    red before, green after
    python muon.py                                 singular values before and after, out/muon.png

Number to reach: with five steps every singular value from .01 to 1 ends between .87 and 1.13; with
one polynomial the smallest ends at .68. Look at: the screen of `python train.py`, which says that
muon.newton_schulz runs without its twin, since the twin stands for the old polynomial.
"""

import torch

import muon


def singular_values_after(steps=5):
    values = torch.logspace(-2, 0, 64, dtype=torch.float64)
    u, v = (torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0] for _ in range(2))
    X = u @ values.diag() @ v
    return torch.linalg.svdvals(muon.newton_schulz(X[None], steps)[0])


def test_all_singular_values_end_near_one():
    torch.manual_seed(0)
    found = singular_values_after()
    assert 0.87 < found.min() and found.max() < 1.13


def test_more_steps_take_the_last_polynomial_again():
    torch.manual_seed(0)
    found = singular_values_after(9)
    assert 0.99 < found.min() and found.max() < 1.01
