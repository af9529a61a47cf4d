"""command/rollout_statistics.py: a step's rollouts as numbers for the log of rl.

    describe_rows(rows)          rows of all ranks (eval.rollout_rows) -> {key of the log: number}
    write_best_and_worst(...)    two rollouts in full, for the reader

What the keys mean, where the name does not say it:

    sampled         tokens that the policy sampled
    decode_steps    forwards that were needed to sample them
    blind           submitted without a test run after the last edit
    cheats          of rollouts that could read files: what the audit calls a certain cheat
    best            share of groups in which at least one rollout solved the task
    different       distinct final states of the files in a group, over the rollouts in it
    equal           share of groups whose rollouts all got the same reward: nothing to learn from
    named           of the deleted functions not yet written at a summary, the share it names
    no_turn         rollouts whose task filled the window

A share of nothing is left out: where no rollout could read a file, there is no share of cheats.

It stands apart from train.py because none of these numbers reaches a gradient. Evaluation counts
per task and has its own table in eval.py.
"""

import numpy as np

from command import transcripts

# keys of the log that are plain means over all rollouts
MEANS = (
    "reward",
    "solved",
    "effort",
    "sampled",
    "decode_steps",
    "turns",
    "calls",
    "thinking_tokens",
    "call_tokens",
    "output_tokens",
    "final_tokens",
    "finished",
    "summaries",
    "level",
    "blind",
)


def mean(values):
    """The mean of numbers or bools, from any iterable"""
    return float(np.mean(list(values)))


def describe_rows(rows, habits):
    """rows: those of all ranks; habits: of which the share of rollouts that show them is logged ->
    {key of the log: number}"""
    # Means and shares over all rollouts.
    log = {key: mean(row[key] for row in rows) for key in MEANS}
    for habit in habits:
        log[habit] = mean(habit in row["faults"] for row in rows)
    log["bad_tool"] = mean(row["bad_tools"] > 0 for row in rows)
    log["no_turn"] = sum(row["turns"] == 0 for row in rows)

    # {key: (sum, the number that it is divided by)}
    turns = sum(row["turns"] for row in rows)
    shares = {"wrong_calls_per_turn": (sum(row["bad_tools"] for row in rows), turns)}

    # Only rollouts that had a tool to read files can have read what they should not.
    readers = [row for row in rows if row["reads"]]
    for key in ("cheats", "suspicious"):
        shares[key] = sum(row[key] for row in readers), len(readers)

    # What a summary keeps of what is still to be done, and its length.
    probe = {}
    for key in ("summaries", "tokens", "left", "named"):
        probe[key] = sum(row["probe"][key] for row in rows)
    shares["named"] = probe["named"], probe["left"]
    shares["summary_tokens"] = probe["tokens"], probe["summaries"]

    log |= {key: total / number for key, (total, number) in shares.items() if number}
    return log | describe_groups(rows)


def describe_groups(rows):
    """How the rollouts of one task differ from each other: without a difference there is no
    advantage, and nothing to learn."""
    # The rows come from all ranks: those of one group have the same (rank, number).
    groups = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)

    # One number per group. See the head of this file for what they mean.
    best, different, equal = [], [], []
    for group in groups.values():
        best.append(max(row["solved"] for row in group))
        different.append(len({row["files"] for row in group}) / len(group))
        equal.append(len({row["reward"] for row in group}) == 1)
    return {"best": mean(best), "different": mean(different), "equal": mean(equal)}


def write_best_and_worst(path, step, groups, tokenizer, detect, say):
    """The best and the worst rollout of the group whose rewards differ most: what this step learns
    from, for the reader. groups: of this rank; detect: finds the flaws of a rollout; say: prints a
    line"""
    if not groups:
        return

    # ptp: the largest reward less the smallest.
    group = max(groups, key=lambda g: np.ptp([rollout.reward for rollout in g]))
    rewards = [float(f"{rollout.reward:.6g}") for rollout in group]
    best = max(group, key=lambda rollout: rollout.reward)
    worst = min(group, key=lambda rollout: rollout.reward)

    # Each with what the detectors found in it.
    lines = []
    for rollout in (best, worst):
        flags = {}
        for hint in detect(rollout):
            flags[hint.segment, hint.turn] = [hint.kind]
        lines += transcripts.describe_rollout(rollout, tokenizer, flags, group=rewards)

    # The file is only there to be read, so a full disk does not end the run.
    try:
        transcripts.write_transcripts(path, step, lines)
    except OSError as error:
        say(f"transcripts.jsonl: step {step} could not be written: {error.strerror or error}")
