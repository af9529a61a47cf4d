"""group.py: Does RL raise the best of a group, or only its mean?

40 steps of RL in groups of 16 on a fixed mix of levels 0 to 7, of which no demonstration had the
last two.

    groups of 16

    python -m experiments.group

Found, a few versions before commit 534553e: both rise, the mean reward from .33 to .55, the best
of 16 from .79 to .88; a group's submissions become less diverse, .58 of them distinct and then
.43. Figure: figures/group.png.
"""

import sys

from experiments import runner
from experiments.runner import Arm, Experiment

# One arm alone: what is compared are its first steps with its last ones. `best` and `different` are
# keys of the step log, which train.py writes at every step; any key can be a curve.
EXPERIMENT = Experiment(
    question="Mean reward and best of 16, on a fixed mix",
    curves=("reward", "best", "different"),
    arms={
        "groups of 16": Arm(
            (
                "--steps=40",
                "--max_turns=20",
                "--group_size=16",
                "--curriculum=0",
                "--levels=0,1,2,3,4,5,6,7",
            )
        )
    },
    by_level=("solved",),
)

if __name__ == "__main__":
    runner.main("experiments.group", sys.argv[1:])
