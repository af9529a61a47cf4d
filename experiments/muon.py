"""muon.py: Is Muon in 80 steps of pretraining as good as AdamW in 120?

Three rates of each. Muon's embeddings and gains keep AdamW's best rate.

    AdamW, 120 steps, lr .003, .006, .012
    Muon, 80 steps, lr .006, .012, .024
    whole matrices, 80 steps, the same rates: all heads of a layer, and all its experts, as one
    matrix each

    python -m experiments.muon

Found: it is better, with a held-out loss of 3.745, 3.712 and 3.706 in three seeds, AdamW 3.810,
3.887 and 3.785, whole matrices 3.754, 3.738 and 3.738, each at its best rate. Figure:
figures/muon.png.
"""

import math
import sys

import muon
import train
from experiments import runner
from experiments.runner import Arm, Experiment


# Heads and experts lie in stacks (N, R, C). Here a stack is one matrix of N R rows, and an output
# projection, in which the heads lie side by side, is not cut into blocks.
def whole_matrices():
    plain_split, plain_shard = train.split_by_name, muon.shard_of

    def as_one(shape):
        return 1, math.prod(shape[:-1]), shape[-1]

    class Whole(muon.ShardedParam):
        def __init__(self, *given):
            super().__init__(*given)
            self.shape = as_one(self.shape)

    train.split_by_name = lambda named, heads: plain_split(named, heads=1)
    muon.shard_of = lambda shape, *place: plain_shard(as_one(shape), *place)
    muon.as_stack = lambda tensor: tensor.reshape(as_one(tensor.shape))
    muon.ShardedParam = Whole


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
        "whole matrices, lr 0.006": Arm((*MUON, "--lr=0.006"), whole_matrices),
        "whole matrices, lr 0.012": Arm((*MUON, "--lr=0.012"), whole_matrices),
        "whole matrices, lr 0.024": Arm((*MUON, "--lr=0.024"), whole_matrices),
    },
    stages=("pretrain",),
)

if __name__ == "__main__":
    runner.main("experiments.muon", sys.argv[1:])
