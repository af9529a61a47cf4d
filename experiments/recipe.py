"""recipe.py: What does the whole recipe come to, over seeds?

The default run, and nothing else: each policy before and after RL.

    python -m experiments.recipe

Found (commit 534553e or older), seeds 1337, 1 and 2: solved .590, .556, .507 before RL and .969,
.941, .809 after it; wrong tools in .375 of the episodes, then in .028. See experiments/README.md.
"""

import sys

from experiments import runner
from experiments.runner import Arm, Experiment

# No flags and no patch: the default run. The two policies of its evaluation are compared as if they
# were arms.
EXPERIMENT = Experiment(
    question="The whole recipe",
    curves=("solved",),
    arms={"recipe": Arm()},
    policies=("before RL", "after RL"),
)

if __name__ == "__main__":
    runner.main("experiments.recipe", sys.argv[1:])
