"""A plain model and its accelerated twin with the same weights, for the tests of fast/."""

import torch

import fast
import small
from published.grouped_query import config_of

SIZES = small.SIZES | dict(kv_heads=1)
# Kinds of models that the tests of fast/ are run on: changes of SIZES.
KINDS = {
    "mla": {},
    "mla, low-rank queries, stretched, a draft": dict(q_lora=12, yarn_factor=4.0, mtp=1),
    "gqa": dict(attention="gqa"),
    "gqa, biases, softmax routing, tied": dict(
        attention="gqa", qkv_bias=True, scoring="softmax", tie=True
    ),
}


def twins(**changes):
    """-> [plain model, fast model] with equal weights. No matrix is zero, because a zero would hide
    every difference behind it."""
    # Both are built and drawn from the same seed.
    models = []
    for number in range(2):
        torch.manual_seed(0)
        model = config_of({**SIZES, **changes}).build_model()
        with torch.no_grad():
            for p in model.parameters():
                if not p.any():
                    p.normal_(std=p.shape[-1] ** -0.5)
                # Gains start as ones and biases as zeros, where a wrong use would not show.
                if p.ndim == 1:
                    p.add_(0.3 * torch.randn_like(p))

        # The second model becomes the fast one.
        models.append(fast.accelerate(model) if number else model)
    return models


def draw_tokens(rows, length):
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(0))


def relative_difference(found, expected):
    """Norm of the difference / norm of what is expected"""
    return float((found - expected).detach().norm() / expected.detach().norm())
