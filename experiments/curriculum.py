"""curriculum.py: Do chosen tasks teach more than a fixed mix?

Equal steps of RL on the default's nine levels alike, or on those that are neither won nor lost.

    fixed mix
    curriculum      the recipe

    python -m experiments.curriculum

Found (commit 534553e or older): solved .887 and .906 in the mean of three seeds, ahead in all
three, which is about what chance would do. There is no figure of that version.
"""

import sys

from experiments import runner
from experiments.runner import Arm, Experiment

# The smallest kind of change: other flags. An arm without any is the default run itself.
EXPERIMENT = Experiment(
    question="Do chosen tasks teach more than a fixed mix?",
    curves=("solved",),
    arms={"fixed mix": Arm(("--curriculum=0",)), "curriculum": Arm()},
)

if __name__ == "__main__":
    runner.main("experiments.curriculum", sys.argv[1:])
