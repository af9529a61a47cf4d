"""penalty.py: What does a price on effort do to easy tasks, and what to hard ones?

Three quarters of the demonstrations begin with four calls that nothing asks for, on easy tasks and
on hard ones alike. Then 40 steps of RL on a mix of levels 0 to 5 of which half is of level 0, as
most of a day's tasks are easy. The hardest level of the evaluation, 6, no training has seen.

    no penalty     twice the reward: as much as the nonlinear price makes of solving an easy task
    nonlinear      concave; three quarters of it are due by an effort of 6, an easy task's
    linear         as dear at the mix's median effort of 13

Where there is a price, what is not solved pays for the whole budget, as what a limit cut short
does: else giving up is cheap.

    python -m experiments.penalty

Found (commit 534553e or older): the nonlinear price takes 40 % of the tokens from the easiest
level and 21 % from the hardest, the linear one 25 % and 8 %. Solved in all: .730, .680, .789.
Figure: figures/penalty.png.
"""

import functools
import sys
from dataclasses import dataclass

import numpy as np

import length_penalty
import synth_tasks
import train
from experiments import runner
from experiments.runner import Arm, Experiment


# 1. Which tasks? The curriculum chooses the level of each; this one ignores what was solved before.
class MostlyEasy(synth_tasks.Curriculum):
    """A fixed mix: two fifths of the tasks are of the lowest level, the rest of all alike."""

    def choose(self, rng, levels):
        return min(levels) if rng.random() < 0.4 else super().choose(rng, levels)


# 2. Which objective? Advantages are linear in the reward: twice the loss is twice the reward.
class TwiceTheReward(train.Reinforcement):
    def policy_objective(self, logp, batch, normaliser, reference):
        return 2.0 * super().policy_objective(logp, batch, normaliser, reference)


# 3. Which reward? rollout.grade asks the price, and the price asks this method who pays for the
#    whole budget.
class FullPrice(length_penalty.Price):
    def pays_whole_budget(self, solved, finished):
        """A rollout that did not solve its task: then giving up saves nothing."""
        return np.logical_not(solved)


# 4. Which price? k and q of the recipe's are fields of Price with these names.
@dataclass(frozen=True)
class NonlinearPrice(FullPrice):
    k: float = 0.05
    q: float = 6.0


@dataclass(frozen=True)
class LinearPrice(FullPrice):
    q: float = 0.0


# 5. Which demonstrations? The expert takes the habit as an argument, which partial() sets.
def restless_expert():
    train.make_demonstration = functools.partial(train.make_demonstration, restless=0.75)


# 6. Each arm's patch. It may put several things into place.
def no_penalty():
    synth_tasks.Curriculum = MostlyEasy
    train.STAGE["rl"] = TwiceTheReward


def nonlinear_price():
    synth_tasks.Curriculum = MostlyEasy
    length_penalty.Price = NonlinearPrice


def linear_price():
    synth_tasks.Curriculum = MostlyEasy
    length_penalty.Price = LinearPrice


# 7. The weight of the price is a flag.
MIX = ("--curriculum=0", "--steps=40", "--eval_levels=0,1,2,3,4,5,6")
EXPERIMENT = Experiment(
    question="What does a price on effort do?",
    curves=("effort",),
    arms={
        "no penalty": Arm((*MIX, "--length_penalty=0"), no_penalty),
        "nonlinear": Arm((*MIX, "--length_penalty=1"), nonlinear_price),
        "linear": Arm((*MIX, "--length_penalty=0.28"), linear_price),
    },
    sft=Arm(patch=restless_expert),
    by_level=("tokens", "solved"),
)

if __name__ == "__main__":
    runner.main("experiments.penalty", sys.argv[1:])
