"""generations.py: Which part of the recipe carries the gain of 2.5 over 2?

Whole runs from the first step of pretraining. Each arm has one thing more than the one above it;
the last is the default run.

    as Composer 2            AdamW, a fixed mix of ten tasks of each of levels 0 to 5, no hints, no
                             settings of effort
    with Muon                in all stages but RL
    with many tasks          none twice, other kinds, and the curriculum
    with hints and effort    the recipe

    python -m experiments.generations

Beside them, by hand, a model twice as wide after SFT alone ("smarter post-training, not more
parameters"; the commands stand in contexts.py, which has it as a teacher).

Found (seed 3): Muon carries it, .285 solved as Composer 2, .903 with Muon, .803 by the default.
With AdamW, at three rates, the heads that copy constants do not form in SFT. Many tasks gain
nothing here (.833); hints and effort take wrong tools from .41 to .03 and turns from 13.8 to 10.3.
A model twice as wide after SFT alone solves less (.29 and .51). Figure: figures/generations.png.
"""

import math
import sys

from experiments import runner
from experiments.runner import Arm, Experiment
from experiments.tasks import ten_of_a_level


# Beside the usual numbers: second instructions kept, cost, and what was said at the end.
def what_a_user_sees(folder, policies):
    after, found = policies["after RL"], {}
    for name in ("kept", "cost", "communication"):
        number = after["overall"].get(name)
        found[name] = math.nan if number is None else number
    return found


NO_HINTS = ("--feedback=0", "--length_penalty=0")
EXPERIMENT = Experiment(
    question="Which part of the recipe carries the gain?",
    curves=("solved",),
    arms={
        "as Composer 2": Arm(
            ("--optimizer=adamw", "--levels=0,1,2,3,4,5", "--curriculum=0", *NO_HINTS),
            ten_of_a_level,
        ),
        "with Muon": Arm(("--levels=0,1,2,3,4,5", "--curriculum=0", *NO_HINTS), ten_of_a_level),
        "with many tasks": Arm(NO_HINTS),
        "with hints and effort": Arm(),
    },
    stages=(),
    by_level=("solved",),
    more=what_a_user_sees,
    scatters=(("tokens", "solved"),),
)

if __name__ == "__main__":
    runner.main("experiments.generations", sys.argv[1:])
