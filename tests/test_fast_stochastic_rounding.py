"""Rounding by chance: right in the mean, alike on every rank, and enough for small updates. That
sharded weights are rounded as on one process is in test_muon.py."""

import math

import pytest
import torch

from fast.stochastic_rounding import RoundingMuon, noise_of_places, stochastic_round


def test_rounding_by_chance_picks_one_of_the_two_neighbours_and_is_right_in_the_mean():
    drawn = torch.randn(300, generator=torch.Generator().manual_seed(0))
    exact = torch.cat((drawn, torch.tensor([1.0, -0.5, 0.0, 1e-30, -1e-30])))
    nearest = exact.bfloat16()
    ulp = (nearest.view(torch.int16) + 1).view(torch.bfloat16).float().sub(nearest.float()).abs()
    draws = torch.empty(4000, len(exact), dtype=torch.bfloat16)
    for seed, weight in enumerate(draws):
        stochastic_round(weight, exact, (seed, 7))
    error = draws.float() - exact
    # 5 standard errors: 5 * .5 / sqrt(4000)
    assert (error.abs() < ulp).all() and (error.mean(0).abs() <= 0.04 * ulp).all()
    assert not error[:, -5:-2].any() and (draws[:, :300].float().std(0) > 0).sum() > 290
    again = torch.empty_like(nearest)
    stochastic_round(again, exact, (3, 7))
    assert torch.equal(again, draws[3]) and not torch.equal(again, draws[4])


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_updates_too_small_for_bf16_weights_add_up_all_the_same(algorithm):
    """Each moves a weight by 1/30 of the distance to its neighbour: rounded to the nearest, none
    would ever arrive."""
    start, grad, ends = (
        torch.full((64, 64), 1.0),
        torch.randn(64, 64, generator=torch.Generator().manual_seed(3)),
        {},
    )
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.nn.Parameter(start.to(dtype, copy=True))
        optimizer = RoundingMuon(
            [dict(params=[p], algorithm=algorithm)],
            lr=1.6e-4 if algorithm == "muon" else 2.6e-4,
            weight_decay=0.5,
        )
        for _ in range(100):
            p.grad = grad.to(dtype)
            optimizer.step()
        ends[dtype] = p.detach().float() - start
    moved, difference = ends[torch.float32], ends[torch.bfloat16] - ends[torch.float32]
    assert moved.abs().mean() > 2**-8
    assert torch.equal((start + moved / 100).bfloat16(), start.bfloat16())
    # A bias of the rounding would show in the mean, that of the decay too, which has one sign.
    assert difference.mean().abs() < 0.02 * moved.abs().mean()
    along = (moved * ends[torch.bfloat16]).sum() / (moved * moved).sum()
    assert along == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("shape", [(), (5000,), (64, 96), (6, 32, 48), (3, 5, 7, 90)])
def test_noise_follows_from_the_place_and_looks_like_chance(shape):
    whole = noise_of_places((0,) * len(shape), shape, (3, 1), "cpu")
    assert whole.shape == shape and whole.min() >= 0 and whole.max() < 1 << 16
    if shape:
        start = tuple(size // 3 for size in shape)
        block = whole[tuple(slice(s, None) for s in start)]
        assert torch.equal(noise_of_places(start, block.shape, (3, 1), "cpu"), block)
        # Uniform to five standard errors, and unlike its neighbours in every direction, its
        # transpose and other seeds.
        n = whole.double() / 65536 - 0.5
        bound = 5 / math.sqrt(n.numel())
        assert n.mean().abs() < bound * 12**-0.5 and abs(12 * n.square().mean() - 1) < bound
        others = [n.roll(1, dim) for dim in range(len(shape))]
        others += [
            noise_of_places((0,) * len(shape), shape, seed, "cpu").double() / 65536 - 0.5
            for seed in ((4, 1), (3, 2))
        ]
        assert all(12 * (n * other).mean().abs() < 1.2 * bound for other in others)
