"""pretraining.py: What is pretraining worth, once SFT and RL have followed?

Three budgets of pretraining, then the same SFT and the same RL.

    30 steps
    120 steps      the recipe
    480 steps

    python -m experiments.pretraining

Found, a few versions before commit 534553e: solved after RL .656 to .847, .868 to .906, .351 to
.892. What decides is the loss after SFT, which more pretraining did not lower. Figure:
figures/pretraining.png.
"""

import math
import sys

import numpy as np

from command import step_log
from experiments import runner
from experiments.runner import Arm, Experiment


# A number that no evaluation has: `more` gets the folder of a run, and may read any of its logs.
def loss_after_sft(folder, policies):
    losses = [line["loss"] for line in step_log.read_step_log(folder, "sft")[-50:]]
    return {"loss after SFT": float(np.mean(losses or math.nan))}


# All stages, one after the other; an arm's flags belong to the first of them alone.
EXPERIMENT = Experiment(
    question="What is pretraining worth?",
    curves=("reward",),
    arms={"30 steps": Arm(("--steps=30",)), "120 steps": Arm(), "480 steps": Arm(("--steps=480",))},
    stages=("pretrain", "long", "sft", "rl", "eval"),
    by_level=("solved",),
    more=loss_after_sft,
)

if __name__ == "__main__":
    runner.main("experiments.pretraining", sys.argv[1:])
