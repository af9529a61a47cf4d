"""habits.py: How fast do habits go that cost the reward little or nothing?

Each habit has a flaw that is planted in the demonstrations, a rule that finds it, and one sentence
that stands above the right turn in some demonstrations, and above the flagged turn in RL. Both arms
begin at an SFT with hints on all six.

    unavailable_tool        a call to a tool that is not there
    malformed_arguments     a call without its last argument
    code_style              a comment in the code
    repetition              looking up what the context shows, or testing what has not changed
    unfinished              ending while the tests are red
    communication           a last message that is missing or untrue

    reward alone                  without the distillation of hints
    with targeted feedback        hints on all six habits

    python -m experiments.habits

Found (seed 1337): with hints wrong tools go from .33 to .03 of the held-out rollouts, comments from
.16 to .01, looking up again from .24 to .15; by the reward alone they rise or stay (.35, .23, .59).
Malformed calls and ending on red tests go in both arms; untrue messages hardly (.31 to .26; .33).
Figure: figures/habits.png.
"""

import sys

import eval
import feedback_distill
import train
from experiments import runner
from experiments.runner import Arm, Experiment

ALL_HABITS = f"--habits={','.join(feedback_distill.REMINDERS)}"


# A constant of the recipe is changed where it stands.
def more_neutral_hints():
    """Hints above a tenth of the turns without a fault, instead of a twentieth: with six habits
    more of them have a fault."""
    train.NEUTRAL_HINT_RATE = 0.1


# `sft` is a supervised stage of the experiment's own, from which all arms begin. A policy this
# small cannot read a hint that it has never seen, so its demonstrations hold hints on all habits.
EXPERIMENT = Experiment(
    question="How fast do habits go that cost nothing?",
    curves=("bad_tool", *eval.HABITS),
    arms={
        "reward alone": Arm((ALL_HABITS, "--feedback=0")),
        "with targeted feedback": Arm((ALL_HABITS,)),
    },
    sft=Arm((ALL_HABITS,), more_neutral_hints),
)

if __name__ == "__main__":
    runner.main("experiments.habits", sys.argv[1:])
