"""8. A curriculum by unequal rewards.   synth_tasks.py, `Curriculum`; train.py   15 lines

The curriculum draws a level by p (1 - p), where p is the share of its rollouts that are solved. The
gradient knows another number: the rewards of a group minus their mean. Beside p, a reward has the
price of effort and what a second instruction is worth, so a level that is always solved may still
teach to solve it with less.

Let `update` take the variance of the group's rewards as a fourth argument, which
`update_curriculum` in train.py computes (without it rewards are 0 and 1). Keep one number for each
level, which begins at .25 and forgets at the rate of the counts: keep * old + (1 - keep) * new.
`choose` draws by .02 + this number. Checkpoints hold it. What opens a level stays as it is.

    python -m pytest exercises/unequal.py          red before, green after
    python train.py --stage=rl --steps=5 --start_from=assets/sft --out=out/unequal

Number to reach: of two levels, one untried and one with three groups that are all solved at almost
equal prices, the second is drawn 18 times of 100 at forget=.5 (31 times before). Look at: `equal`
in out/unequal/rl.jsonl, the share of groups that teach nothing, and `level`, the mean of the levels
drawn. Does the number that was kept foretell `equal`?
"""

import json
import random
from types import SimpleNamespace

import pytest

import train
from synth_tasks import Curriculum


def drawn(curriculum, number=4000):
    """{level: how often it is drawn}"""
    rng, counts = random.Random(0), {level: 0 for level in curriculum.levels}
    for _ in range(number):
        counts[curriculum.next(rng)[0]] += 1
    return counts


def test_the_shares_are_those_by_hand():
    """Three groups of eight whose rewards are all but equal, at forget = .5: .25, .13, .07, .04"""
    curriculum = Curriculum(range(2), forget=0.5)
    for _ in range(3):
        curriculum.update(0, 8, 8, 0.01)
    counts = drawn(curriculum)
    assert counts[0] / 4000 == pytest.approx((0.02 + 0.04) / (0.02 + 0.04 + 0.02 + 0.25), abs=0.02)


def test_of_two_levels_that_are_always_solved_the_one_with_unequal_prices_comes_more_often():
    curriculum = Curriculum(range(2), may_open=())
    for _ in range(80):
        curriculum.update(0, 8, 8, 0.0)
        curriculum.update(1, 8, 8, 0.06)
    counts = drawn(curriculum)
    assert counts[1] > 3 * counts[0]


def test_without_a_variance_rewards_are_0_and_1():
    told, untold = Curriculum(range(3)), Curriculum(range(3))
    for solved in (2, 4, 8):
        told.update(1, solved, 8, solved / 8 * (1 - solved / 8))
        untold.update(1, solved, 8)
    assert drawn(told) == drawn(untold)


def test_a_checkpoint_holds_it():
    first, again = Curriculum(range(3)), Curriculum(range(3))
    first.update(2, 8, 8, 0.003)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert drawn(again) == drawn(first)


def test_training_tells_the_curriculum_the_variance_of_the_rewards():
    rewards = (1.0, 0.8, 0.6, 0.6)  # mean .75, variance .0275
    task = SimpleNamespace(level=1)
    group = [SimpleNamespace(task=task, solved=True, reward=reward) for reward in rewards]
    told = []
    stage = SimpleNamespace(
        run=SimpleNamespace(gather=lambda results: results),
        curriculum=SimpleNamespace(update=lambda *words: told.append(words)),
    )
    train.Reinforcement.update_curriculum(stage, [group])
    assert told == [(1, 4, 4, pytest.approx(0.0275))]
