"""feedback.py: How fast does a bad habit go, by targeted feedback and by the reward alone?

The habit is to call tools that are not there. Both arms are the same RL from the same SFT.

    reward alone                  without the distillation of hints
    with targeted feedback        the recipe

    python -m experiments.feedback

Found (commit 534553e or older): with feedback a tenth of the first step's rate is reached after
19, 18 and 24 steps, by the reward alone in no seed within 60. Held out, .028 of the episodes call
a wrong tool, against .259. No difference in what is solved can be told. Figure:
figures/feedback.png.
"""

import sys

from experiments import runner
from experiments.runner import Arm, Experiment

# One flag switches the technique off; all else, and the SFT that both begin at, is the same.
EXPERIMENT = Experiment(
    question="How fast does a bad habit go?",
    curves=("bad_tool",),
    arms={"reward alone": Arm(("--feedback=0",)), "with targeted feedback": Arm()},
)

if __name__ == "__main__":
    runner.main("experiments.feedback", sys.argv[1:])
