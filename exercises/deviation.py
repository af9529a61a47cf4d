"""1. Divide by the deviation, as GRPO does.   rollout.py, `advantages`   one line

Composer does not: in a group with one solved rollout of eight the deviation is small, so dividing
makes that group as loud as one that is half solved, and in a group that is all solved it makes the
price of a token as large as a solved task. See it.

Change `advantages` so that they have mean 0 and deviation 1 (of the population, as numpy's std);
equal rewards still give zeros.

    python -m pytest exercises/deviation.py        red before, green after
    python train.py --stage=rl --steps=5 --start_from=assets/sft --out=out/deviation

Number to reach: `norm` of the first step is .192, with the same rollouts; before it is .119. Look
at: `solved` and `sampled` of the five steps, here and in a run without the change.
"""

import numpy as np

import rollout


def test_a_rare_success_is_as_loud_as_a_common_one():
    rare = rollout.advantages([1, 0, 0, 0, 0, 0, 0, 0])
    common = rollout.advantages([1, 1, 1, 1, 0, 0, 0, 0])
    np.testing.assert_allclose([rare.mean(), common.mean()], 0, atol=1e-12)
    np.testing.assert_allclose([rare.std(), common.std()], 1, rtol=1e-3)


def test_equal_rewards_teach_nothing():
    assert not rollout.advantages([0.3] * 5).any()
