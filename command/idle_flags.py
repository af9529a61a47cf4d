"""command/idle_flags.py: which of the flags that were given change nothing in a stage?

A flag that is accepted and does nothing is worse than one that is refused: the user believes in an
effect. So one line at the start of a command names the flags that no stage of it reads, with the
reason. Which stages read a flag stands with the flag, in train.Config.

It stands apart from train.py because it describes the recipe's flags and does nothing.
"""

import os

import torch
from tqdm import tqdm

from command.flags import is_first_rank, rules_of


def idle_flags(config, given):
    """What was given by hand and changes nothing in this stage -> {flag: why}"""
    # Flags that the stage does not read.
    stage, rules = config.stage, rules_of(type(config))
    idle = {
        name: f"of {rules[name].stages.replace(' ', ' and ')}"
        for name in given
        if not rules[name].is_read_by(stage)
    }

    # Flags that it reads, but that another flag or the machine makes idle. An empty text: not so.
    adamw = config.optimizer == "adamw" and stage != "eval"
    rl = stage == "rl"
    reasons = {
        "lr weight_decay": "AdamW moves all weights, by --adam_lr" if adamw else "",
        "trigger": "--summarize=0" if not config.summarize else "",
        "levels": "not with --tasks" if rl and config.tasks else "",
        "draft": "--plain=1 samples one token at a time" if config.plain else "",
        "eval_levels eval_tasks bench_tasks": "not with --tasks" if config.tasks else "",
        "mtp": "its head learns in pretrain, long and sft alone, and is kept" if rl else "",
        "experts num_experts_per_tok expert_ffn precision": (
            "the only layer is dense" if config.layers == 1 and not config.init_from else ""
        ),
        "processes": (
            "torchrun or the GPU decides"
            if "PLAIN_REPLICAS" not in os.environ
            and ("RANK" in os.environ or torch.cuda.is_available() and config.device != "cpu")
            else ""
        ),
    }

    # Only flags that were given are named.
    for names, why in reasons.items():
        idle |= {name: why for name in names.split() if why and name in given}
    return idle


def say_idle_flags(configs, given):
    """One line about the flags that change nothing in any of the stages to come, and one for each
    stage in which --lr or --weight_decay changes nothing. configs: {stage: its configuration}"""
    # A flag that is idle in every stage of the command.
    stages = list(configs)
    idle = {stage: idle_flags(config, given) for stage, config in configs.items()}
    nowhere = {}
    for name, why in idle[stages[0]].items():
        if all(name in idle[stage] for stage in stages):
            nowhere[name] = why

    lines = []
    if nowhere:
        words = ", ".join(f"--{name} ({why})" for name, why in nowhere.items())
        lines.append(f"in no stage of this command: {words}")

    # That a flag is read in some of the stages alone is no surprise, except for these two.
    for stage in stages:
        words = []
        for name in ("lr", "weight_decay"):
            if name in idle[stage] and name not in nowhere and stage != "eval":
                words.append(f"--{name} ({idle[stage][name]})")
        if words:
            lines.append(f"not in {stage}: " + ", ".join(words))
    if lines and is_first_rank():
        tqdm.write("\n".join(f"flags that change nothing {line}" for line in lines))
