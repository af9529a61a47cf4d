"""numerics.py: How far apart are sampler and trainer, and does RL notice?

The policy gradient takes its log-probabilities from the trainer's forward, the tokens come from the
sampler's. Both compute in bf16, in other batches: sums round otherwise, and where two experts are
nearly alike the router takes the other one, unless training replays the routes of sampling.

    bf16, replay                    the recipe
    bf16, no replay                 the trainer's routers choose again
    mxfp8, nvfp4                    the experts' operands in 8 or 4 bits, in both forwards alike
    nvfp4, a scale per tensor       the FP32 scale of the whole batch, in the place of the token's:
                                    what a token is rounded to depends on who else is there

    python -m experiments.numerics
    python -m experiments.numerics --table=assets/rl

The first runs 20 steps of RL with each arm. --table trains nothing: it plays held-out tasks with a
policy in each format, and tells by how much the log-probs of the same tokens differ. A table of 64
experts needs a policy of them: python train.py --experts=64 --expert_ffn=32, with --stage=pretrain,
long and sft.

Found (assets/rl, no RL yet), p99 of the difference in nats: bf16 .033, mxfp8 .042, nvfp4 .058, with
a scale per tensor .074. Without replay .035, .047, .059 and .075. No figure.
"""

import sys
from dataclasses import replace

import torch

import eval
import fast
import train
from command.policy_report import report_mismatch
from experiments import runner
from experiments.runner import Arm, Experiment
from fast import low_precision


# 1. The formats. The recipe's own flag belongs to a whole run; here RL alone is rounded.
def in_format(precision):
    plain = train.model_config
    train.model_config = lambda config, vocab: replace(plain(config, vocab), precision=precision)


def mxfp8():
    in_format("mxfp8")


def nvfp4():
    in_format("nvfp4")


def scale_per_tensor():
    """All numbers of a tensor share the FP32 scale that those of a token have."""
    of_token = low_precision.nvfp4
    low_precision.FORMATS["nvfp4"] = lambda x: of_token(x.flatten()).view_as(x)


def nvfp4_per_tensor():
    nvfp4()
    scale_per_tensor()


# 2. A policy as it is, with its experts in each format.
def rounded(model, precision):
    """A copy of the policy whose experts compute in this format"""
    copy = replace(model.config, precision=precision).build_model()
    copy.load_state_dict(model.state_dict())
    return fast.accelerate(copy).requires_grad_(False)


@torch.no_grad()
def print_differences(folder):
    model, tokenizer, config = eval.load_policy(folder)
    tasks = eval.held_out(8, (0, 1, 2, 3, 4, 5))
    for name, precision in (("bf16", ""), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4")):
        policy = rounded(model, precision)
        found = eval.sampler_mismatch(policy, tokenizer, config, tasks, eval.IN_BF16)
        report_mismatch({f"{name}: {setting}": gaps for setting, gaps in found.items()})
    scale_per_tensor()
    found = eval.sampler_mismatch(policy, tokenizer, config, tasks, eval.IN_BF16)
    report_mismatch({f"nvfp4 per tensor: {setting}": gaps for setting, gaps in found.items()})


# 3. The arms
SHORT = ("--steps=20",)
EXPERIMENT = Experiment(
    question="How far apart are sampler and trainer, and does RL notice?",
    curves=("mismatch", "solved"),
    arms={
        "bf16, replay": Arm(SHORT),
        "bf16, no replay": Arm((*SHORT, "--router_replay=0")),
        "mxfp8": Arm(SHORT, mxfp8),
        "nvfp4": Arm(SHORT, nvfp4),
        "nvfp4, a scale per tensor": Arm(SHORT, nvfp4_per_tensor),
    },
)

if __name__ == "__main__":
    runner.main_or("experiments.numerics", sys.argv[1:], {"--table": print_differences})
