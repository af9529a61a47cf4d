"""The length penalty against arithmetic in 60 digits, finite differences and hand-worked groups."""

import sys
from dataclasses import replace
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest

from commands import run_command
import length_penalty as lp
from synth_tasks import make_task

# (k, q): C(1), C(3), C(10), C(30), C(100), worked out by hand from the formula
REFERENCE = {
    (1, 0.5): (0.828, 2.000, 4.633, 9.136, 18.100),
    (1, 1): (0.693, 1.386, 2.398, 3.434, 4.615),
    (0.1, 1): (0.953, 2.624, 6.931, 13.863, 23.979),
    (0.01, 2): (0.990, 2.913, 9.091, 23.077, 50.0),
}


ROOT = Path(__file__).resolve().parent.parent
COUNTS = dict(
    thinking_tokens=100, call_tokens=40, output_tokens=200, final_tokens=20, calls=3, turns=4
)


def exact(x, k, q):
    """C(x) straight from the definition, in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        x, k, q = Decimal(float(x)), Decimal(float(k)), Decimal(float(q))
        if k == 0 or q == 0:
            return float(x)
        return float(
            (1 + k * x).ln() / k
            if q == 1
            else (((1 - q) * (1 + k * x).ln()).exp() - 1) / (k * (1 - q))
        )


@pytest.mark.parametrize("k,q", list(REFERENCE))
def test_the_reference_values(k, q):
    assert np.abs(lp.concave_cost([1, 3, 10, 30, 100], k, q) - REFERENCE[k, q]).max() <= 5.01e-4


@pytest.mark.parametrize("k", [0, 1e-12, 0.01, 1, 50])
@pytest.mark.parametrize("q", [0, 1e-9, 0.5, 1 - 1e-9, 1 - 1e-15, 1, 1 + 1e-9, 2, 7])
def test_cost_equals_sixty_digit_arithmetic_near_every_limit(k, q):
    x = np.array([0, 1e-9, 0.3, 1, 17, 4000, 1e6])
    np.testing.assert_allclose(lp.concave_cost(x, k, q), [exact(v, k, q) for v in x], rtol=1e-12)


def test_cost_starts_at_zero_increases_and_is_concave():
    x = np.linspace(0, 300, 2000)
    for k, q in [(1, 0.5), (1, 1), (0.1, 1), (0.01, 2)]:
        c = lp.concave_cost(x, k, q)
        assert c[0] == 0 and (np.diff(c) > 0).all() and (np.diff(c, 2) < 0).all()


def test_q_zero_is_the_straight_line_exactly():
    x = np.array([0, 0.1, 3.7, 1e9])
    assert (lp.concave_cost(x, k=3, q=0) == x).all()


def test_q_above_one_is_bounded_and_reaches_its_bound_at_infinity():
    assert lp.concave_cost(np.inf, 2, 3) == 1 / (2 * 2)
    assert lp.concave_cost(1e300, 2, 3) <= 0.25


@pytest.mark.parametrize("k,q", [(1, 0.5), (0.1, 1), (0.01, 2), (2, 0)])
def test_the_price_of_the_next_unit_falls_as_one_plus_kx_to_the_minus_q(k, q):
    x, h = np.array([0.5, 3, 40.0]), 1e-5
    np.testing.assert_allclose(
        (lp.concave_cost(x + h, k, q) - lp.concave_cost(x - h, k, q)) / (2 * h),
        (1 + k * x) ** -q,
        rtol=1e-8,
    )


def test_scalars_and_arrays_of_any_shape():
    cost = lambda x: lp.concave_cost(x, 1, 0.5)
    assert np.ndim(cost(3)) == 0 and float(cost(3)) == 2.0
    x = np.arange(6).reshape(2, 3)
    assert cost(x).shape == (2, 3) and cost(x)[1, 0] == cost(3)


def test_effort_is_the_weighted_sum_of_six_counts():
    weights = lp.CountWeights(
        thinking_tokens=1, call_tokens=2, output_tokens=3, final_tokens=4, calls=5, turns=6
    )
    assert lp.compute_effort(COUNTS, weights) == 100 + 80 + 600 + 80 + 15 + 24
    # Statistics may hold other counts than the six.
    assert lp.compute_effort({**COUNTS, "other": 9}, weights) == 899
    several = {name: np.array([n, 0]) for name, n in COUNTS.items()}
    assert lp.compute_effort(several, weights).tolist() == [899, 0]


def test_a_second_call_in_the_same_turn_costs_less_than_in_a_turn_of_its_own():
    one = dict(COUNTS, calls=1, turns=1)
    assert lp.compute_effort(dict(one, calls=2)) < lp.compute_effort(dict(one, calls=2, turns=2))


def test_counts_that_lack_a_name_and_bad_numbers_are_refused():
    with pytest.raises(AssertionError, match="turns"):
        lp.compute_effort({name: 0 for name in COUNTS if name != "turns"})
    for bad in (dict(thinking_tokens=-1), dict(turns=float("nan"))):
        with pytest.raises(ValueError, match="weight"):
            lp.CountWeights(**bad)
    for arguments in ((-1, 1, 1), (np.nan, 1, 1), (1, -1, 1), (1, 1, -1), (1, 1, np.inf)):
        with pytest.raises(ValueError):
            lp.concave_cost(*arguments)
    for bad in (
        dict(weight=-0.1),
        dict(weight=1),
        dict(weight=np.nan),
        dict(k=-1),
        dict(q=np.nan),
        dict(budget=0),
        dict(budget=np.inf),
    ):
        with pytest.raises(ValueError):
            lp.Price(**bad)


def test_only_what_is_solved_has_a_price_and_beyond_the_budget_it_rises_no_more():
    price = lp.Price(0.6, budget=50)
    reward = price.shape_reward([1, 0, 1, 0, 0.5], [5, 5, 50, 90, 90])
    part = exact(5, 1, 0.5) / exact(50, 1, 0.5)
    np.testing.assert_allclose(reward, [1 - 0.6 * part, 0, 0.4, 0, 0.2])


@pytest.mark.parametrize("weight", [0.0, 0.2, 0.6, 0.999])
def test_every_solved_rollout_beats_every_failure(weight):
    price = lp.Price(weight)
    effort = np.array([0, 1, 17, 79.9, 80, 1e6])
    assert (price.shape_reward(1, effort) > 0).all()
    assert (price.shape_reward(0, effort) == 0).all()


def test_weight_zero_leaves_the_reward_and_q_zero_is_linear():
    assert lp.FREE.shape_reward(0.7, 12) == 0.7
    assert lp.Price(0.4, q=0).shape_reward(1.0, 12) == pytest.approx(1 - 0.4 * 12 / 80)


def test_a_flag_is_one_weight_or_one_for_each_setting():
    assert lp.read_price_weights("0.6,0.2,0") == {"low": 0.6, "medium": 0.2, "high": 0.0}
    assert lp.read_price_weights("0.2") == {"": 0.2} == lp.read_price_weights(0.2)
    for bad in ("", "a", "0.1,0.2", "0.1,0.2,0.3,0.4", "1", "-0.1", "nan", "0.6,0.2,1"):
        with pytest.raises(ValueError):
            lp.read_price_weights(bad)


def test_a_task_says_how_much_effort_it_asks_for():
    task = make_task(1, 3)
    asked = lp.ask_for(task, "low")
    assert asked.problem_statement == task.problem_statement + "\nEffort: low"
    assert lp.setting_of(asked) == "low" and lp.setting_of(task) == ""
    assert lp.ask_for(task, "").problem_statement == task.problem_statement
    # All else is the same task, and the one that was given is as it was.
    assert replace(asked, problem_statement="", meta={}) == replace(
        task, problem_statement="", meta={}
    )
    assert "effort" not in task.meta


def test_dividing_by_the_deviation_blows_up_an_all_correct_group():
    price = lp.Price(0.95)
    same, blown = lp.print_groups(price)[2:]
    counts = dict(
        thinking_tokens=np.array([80, 81]),
        call_tokens=60,
        output_tokens=100,
        final_tokens=10,
        calls=4,
        turns=5,
    )
    r = price.shape_reward(1, lp.compute_effort(counts))
    # One of eight rewards differs, so the mean lies 1/8 of the difference away from the others.
    assert same == pytest.approx((r[0] - r[1]) * 7 / 8)
    # Divided by the deviation it is sqrt(7), whatever the size of the difference.
    assert blown == pytest.approx(7**0.5, rel=5e-3)


def run(tmp_path, *flags):
    return run_command([sys.executable, str(ROOT / "length_penalty.py"), *flags], cwd=tmp_path)


def test_the_demo_writes_its_figure_and_ends_with_what_was_seen(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/length_penalty.png").stat().st_size > 5000
    assert "One token among equals" in done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("flag", ["--k=1", "extra"])
def test_a_bad_flag_gives_one_line_and_exit_code_two(tmp_path, flag):
    done = run(tmp_path, flag)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and not done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "window, turns", [(512, 40), (512, 10), (4096, 20), (8192, 40), (32768, 100)]
)
def test_the_budget_is_a_share_of_more_than_fits_in_one_context_and_follows_from_window_and_turns(
    window, turns
):
    """Worst cases by hand: all of the window goes into thoughts, or into calls, or half of it into
    outputs that are read, over the full number of turns"""
    budget = lp.effort_budget(window, turns)
    none = dict(
        thinking_tokens=0, call_tokens=0, output_tokens=0, final_tokens=0, calls=turns, turns=turns
    )
    for spent in (
        dict(thinking_tokens=window),
        dict(call_tokens=window),
        dict(thinking_tokens=window / 2, output_tokens=window / 2),
    ):
        assert lp.compute_effort({**none, **spent}) < budget / lp.BUDGET_SHARE
    assert lp.effort_budget(2 * window, turns) > budget < lp.effort_budget(window, 2 * turns)


def test_the_budget_of_the_default_recipe_is_an_effort_of_25():
    assert lp.effort_budget(512, 40) == 25.0 == 80 * lp.BUDGET_SHARE
