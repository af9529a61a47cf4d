"""objective.py: What do the terms do that the objective leaves out?

Cursor states that the policy gradient divides neither by the group's standard deviation nor by a
rollout's own length. Each of these is put in alone, and so is a third, the mask of DAPO
(arXiv 2503.14476): what a limit cut short teaches nothing. 40 steps of RL on a fixed mix of levels
0 to 5; 20 turns are the limit that cuts short.

    as it is                 advantage = reward less the group's mean, a rollout's tokens over L
    over the deviation       the advantage over the group's standard deviation (GRPO)
    over its own length      a rollout's tokens over their own number
    overlong masked          the advantage of what a limit cut short is zero

    python -m experiments.objective

Found (commit 534553e or older): each has the fault that it is left out for, and what is solved
(.744, .780, .758, .814) differs less than seeds do. Division by the deviation makes as much of the
mild price of effort as of solving where a whole group is solved: a fifth of the tokens go. The
other two let rollouts grow until .06 and .08 of them run into the limit, where it was .03. Figure:
figures/objective.png.
"""

import sys

import numpy as np

import train
from experiments import runner
from experiments.runner import Arm, Experiment


# 1. Where is the place to change? train.Reinforcement calls its method group_advantages once for
#    each group: rollouts of one task in, one number for each of them out. A subclass overrides that
#    alone, and gets the recipe's own numbers by super().
class OverTheDeviation(train.Reinforcement):
    def group_advantages(self, group):
        rewards = np.asarray([rollout.reward for rollout in group])
        return super().group_advantages(group) / (rewards.std() + 1e-6)


class OverItsOwnLength(train.Reinforcement):
    def group_advantages(self, group):
        # The loss divides every token by L. Over a rollout's length in units of L, what is left is
        # the mean over its own tokens.
        L = self.loss_norm_length
        lengths = np.array([max(1, rollout.stats["sampled"]) / L for rollout in group])
        return super().group_advantages(group) / lengths


class OverlongMasked(train.Reinforcement):
    def group_advantages(self, group):
        # It counts in the group's mean, and is not learned from.
        cut_short = [not rollout.finished for rollout in group]
        return np.where(cut_short, 0.0, super().group_advantages(group))


# 2. train.STAGE says which class is which stage. A patch puts the subclass there.
def over_the_deviation():
    train.STAGE["rl"] = OverTheDeviation


def over_its_own_length():
    train.STAGE["rl"] = OverItsOwnLength


def overlong_masked():
    train.STAGE["rl"] = OverlongMasked


# 3. The arms: the same flags for all, one patch each. The first is the recipe, to compare with.
FIXED_MIX = ("--steps=40", "--max_turns=20", "--levels=0,1,2,3,4,5", "--curriculum=0")
EXPERIMENT = Experiment(
    question="What the objective leaves out, put in",
    curves=("sampled", "finished"),
    arms={
        "as it is": Arm(FIXED_MIX),
        "over the deviation": Arm(FIXED_MIX, over_the_deviation),
        "over its own length": Arm(FIXED_MIX, over_its_own_length),
        "overlong masked": Arm(FIXED_MIX, overlong_masked),
    },
    by_level=("tokens", "solved"),
)

if __name__ == "__main__":
    runner.main("experiments.objective", sys.argv[1:])
