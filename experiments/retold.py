"""retold.py: Is a summary worth its tokens, where the tests tell again?

From the recipe's SFT, RL in its window of 512 or in half of it, with summaries or without the
oldest turns. Levels 6 and 7 are open to the curriculum, and a rollout may have 60 turns.

    window 512                  the recipe's
    window 256                  half of it: summaries are carried on
    window 256, truncated       no summaries: the oldest turns are left out

    python -m experiments.retold

Found, a few versions before commit 534553e: truncated, it solves as much as the whole window
(.882 and .813), with summaries less (.609): each costs one of the 60 turns. A summary is worth
its tokens for what cannot be had again (experiments/summary.py). Figure: figures/retold.png.
"""

import sys

import train
from experiments import runner
from experiments.runner import Arm, Experiment
from experiments.summary import truncate_oldest


# How hard do tasks become? The curriculum may open the levels of an attribute of the class.
class AllLevels(train.Reinforcement):
    may_open = range(8)


def open_all_levels():
    train.STAGE["rl"] = AllLevels


# A patch may call one of another experiment.
def open_all_levels_truncated():
    open_all_levels()
    truncate_oldest()


ASKED = ("--max_turns=60", "--eval_levels=0,1,2,3,4,5,6,7")
HALF = ("--window=256", "--trigger=0.45")
EXPERIMENT = Experiment(
    question="Summaries where tests tell again",
    curves=("named",),
    arms={
        "window 512": Arm(ASKED, open_all_levels),
        "window 256": Arm((*ASKED, *HALF), open_all_levels),
        "window 256, truncated": Arm((*ASKED, *HALF), open_all_levels_truncated),
    },
    by_level=("summaries", "solved"),
)

if __name__ == "__main__":
    runner.main("experiments.retold", sys.argv[1:])
