"""habits.py: How fast do habits go that cost the reward nothing?

A comment left in the code by every third edit, a final message that is missing or rambles, and
wrong tools again. Both arms begin at an SFT with hints on all three.

    reward alone                  without the distillation of hints
    with targeted feedback        hints on all three habits

    python -m experiments.habits

Found, a few versions before commit 534553e: with feedback comments go from .16 to .01 of the
rollouts, bad final messages from .10 to .01, wrong tools from .27 to .03; by the reward alone .25
to .04, .12 to .17, .36 to .37. Figure: figures/habits.png.
"""

import sys

import train
from experiments import runner
from experiments.runner import Arm, Experiment

ALL_HABITS = "--habits=unavailable_tool,communication,code_style"


# A constant of the recipe is changed where it stands.
def more_neutral_hints():
    """Hints above a tenth of the turns without a fault, instead of a twentieth: with three habits
    more of them have a fault."""
    train.NEUTRAL_HINT_RATE = 0.1


# `sft` is a supervised stage of the experiment's own, from which all arms begin. A policy this
# small cannot read a hint that it has never seen, so its demonstrations hold hints on all three
# habits.
EXPERIMENT = Experiment(
    question="How fast do habits go that cost nothing?",
    curves=("communication", "code_style", "bad_tool"),
    arms={
        "reward alone": Arm((ALL_HABITS, "--feedback=0")),
        "with targeted feedback": Arm((ALL_HABITS,)),
    },
    sft=Arm((ALL_HABITS,), more_neutral_hints),
)

if __name__ == "__main__":
    runner.main("experiments.habits", sys.argv[1:])
