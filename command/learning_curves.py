"""command/learning_curves.py: the step log of a stage (command/step_log.py), drawn.

The figures show a run from its first step to its last: the loss of the supervised
stages, and what RL did to reward, solve rate and wrong calls.

It stands apart from eval.py because an evaluation needs no log: it plays tasks.
"""

import math
from pathlib import Path

import numpy as np

from command import drawing


def mean_known(values):
    """The mean of the numbers that are known, nan where none is"""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def running_mean(values):
    """For each value the mean over the last five values up to it"""
    return [mean_known(values[max(0, i - 4) : i + 1]) for i in range(len(values))]


def draw_training(logs, folder, form="png"):
    """loss.png: the supervised stages end to end; reward.png: reward, solved and wrong calls by RL
    step. logs: {stage: its lines}; form: the end of the names, which says what is written"""
    supervised = {stage: lines for stage, lines in logs.items() if stage != "rl" and lines}
    if supervised:
        draw_losses(supervised, Path(folder, f"loss.{form}"))
    if logs.get("rl"):
        draw_rewards(logs["rl"], Path(folder, f"reward.{form}"))


def draw_losses(logs, path):
    """The losses of all stages on one axis of steps. logs: {stage: its lines}"""
    figure, ax = drawing.make_axes(
        "What have the supervised stages learned?", "step", "nats per token"
    )
    # Each stage begins where the one before it has ended.
    start = 0
    for stage, lines in logs.items():
        steps = [start + line["step"] for line in lines]
        ax.plot(steps, [line["loss"] for line in lines], label=stage)
        start += int(lines[-1]["step"])
    ax.set_yscale("log")
    ax.legend()
    figure.savefig(path, dpi=120)


def draw_rewards(lines, path):
    """What RL did, step by step, and on how hard tasks"""
    figure, ax = drawing.make_axes(
        "What does RL change?", "RL step", "training rollouts, mean of five steps"
    )
    # Shares and rewards, all from about 0 to 1. {key of the log: label}
    steps = [line["step"] for line in lines]
    curves = {
        "solved": "solved",
        "best": "best of the group",
        "reward": "reward",
        "bad_tool": "with a wrong tool call",
    }
    for key, label in curves.items():
        ax.plot(steps, running_mean([line[key] for line in lines]), label=label)

    # The curriculum's level has an axis of its own: the reward means little without it.
    level_axis = ax.twinx()
    levels = running_mean([line["level"] for line in lines])
    level_axis.plot(steps, levels, color="gray", alpha=0.5, label="level")
    level_axis.set(ylim=(0, max(8, *levels)), ylabel="level of the tasks (gray)")

    ax.set_ylim(min(0, ax.get_ylim()[0]), 1.05)  # rewards may be negative
    # Below the axes it covers no curve.
    figure.legend(loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=120)
