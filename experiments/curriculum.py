"""curriculum.py: Do chosen tasks teach more than a fixed mix?

Equal steps of RL on the default's nine levels alike, or on those that are neither won nor lost.

    fixed mix
    curriculum      the recipe

    python -m experiments.curriculum

Found (seeds 1337, 1, 2): hardly, with .861, .877 and .938 solved in the place of .880, .845 and
.863, as much on the bench (.350, .355), most of it on the hardest levels (.79 .81 .88; .81 .72
.80). Runs of one seed differ as much. Figure: figures/curriculum.png.
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
