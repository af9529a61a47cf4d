"""muon.py: Is Muon in 80 steps of pretraining as good as AdamW in 120?

Three rates of each. Muon's embeddings and gains keep AdamW's best rate.

    AdamW, 120 steps, lr .003, .006, .012
    Muon, 80 steps, lr .006, .012, .024

    python -m experiments.muon

Found (commit 534553e or older), held-out loss at the best rates in three seeds: AdamW 3.872,
3.804, 3.815; Muon 3.808, 3.770, 3.773. Figure: figures/muon.png.
"""

import sys

from experiments import runner
from experiments.runner import Arm, Experiment

# Each optimizer at three learning rates: a comparison at one rate would compare the rates.
ADAMW = ("--optimizer=adamw", "--steps=120")
MUON = ("--adam_lr=0.006", "--steps=80")
# `stages` says what an arm runs: pretraining alone. Its outcome is the held-out loss.
EXPERIMENT = Experiment(
    question="Pretraining: is Muon in 80 steps as good as AdamW in 120?",
    curves=("loss",),
    arms={
        "AdamW, 120 steps, lr 0.003": Arm((*ADAMW, "--adam_lr=0.003")),
        "AdamW, 120 steps, lr 0.006": Arm((*ADAMW, "--adam_lr=0.006")),
        "AdamW, 120 steps, lr 0.012": Arm((*ADAMW, "--adam_lr=0.012")),
        "Muon, 80 steps, lr 0.006": Arm((*MUON, "--lr=0.006")),
        "Muon, 80 steps, lr 0.012": Arm((*MUON, "--lr=0.012")),
        "Muon, 80 steps, lr 0.024": Arm((*MUON, "--lr=0.024")),
    },
    stages=("pretrain",),
)

if __name__ == "__main__":
    runner.main("experiments.muon", sys.argv[1:])
