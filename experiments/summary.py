"""summary.py: Is a summary worth its tokens, where what it holds is told once?

The tests answer once, so what is missing is told once: after that only the context knows it. All
arms begin at one SFT on all eight levels, of whose demonstrations half have a quarter of the
window.

    window 1024                 everything fits, no summaries
    window 256                  a quarter: summaries are carried on
    window 256, not learned     the same, but the reward does not reach the tokens of summaries
    window 256, truncated       no summaries: the oldest turns are left out

    python -m experiments.summary

Found, a few versions before commit 534553e: a quarter of the window with summaries solves .633,
the whole .572, without learning them .594; truncated .322, and nothing that needs more than two
windows. Figure: figures/summary.png. Where the tests can be asked again: experiments/retold.py.
"""

import sys
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

import rollout
import summarize
import train
from experiments import runner
from experiments.runner import Arm, Experiment


# 1. What takes the place of summaries? A rollout's next segment begins with what this class carries
#    over from the last one.
class OldestTruncated(summarize.Compaction):
    """No summary is asked for: a new segment starts from the task and the newest turns."""

    truncate = True

    def newest_turns(self, tokenizer, played):
        """The task, and the newest calls with their outputs that fit into half of the window. They
        are context here: they were trained on in the segment in which they were sampled."""
        task, *past = played.segments[-1].turns

        def size():
            return len(task.tokens) + sum(len(turn.tokens) for turn in past)

        # Under these roles no token of a turn counts as sampled, see rollout.flatten.
        def recalled(turn):
            role = "recent" if turn.role in ("assistant", "recent") else "recent output"
            return rollout.Turn(role, turn.tokens, turn.text)

        # Drop the oldest turns until the rest fits; what is left begins with a call, not an output.
        while past and (size() > self.window // 2 or past[0].role not in ("assistant", "recent")):
            past.pop(0)
        return [task, *(recalled(turn) for turn in past)]


# 2. What if the reward does not teach how to summarise? The advantage of these tokens becomes zero.
def written_summaries(segments, like):
    """1 where the target is a token of a summary that the policy wrote, else 0. It is aligned with
    rollout.pack, with the shape and dtype of `like`, (B, T)."""
    found = torch.zeros_like(like)  # (B, T)
    for row, segment in zip(found, segments):
        # A summary is the turn right behind the question for it.
        asked = [i + 1 for i, turn in enumerate(segment.turns) if turn.role == "query"]
        _, mask, _, index = rollout.flatten(segment)
        of_summary = torch.from_numpy(mask * np.isin(index, asked))  # (tokens of the segment,)
        # Position t predicts token t + 1.
        row[: len(mask) - 1] = of_summary[1:].to(row)
    return found


class SummariesNotLearned(train.Reinforcement):
    def policy_objective(self, logp, batch, normaliser, reference):
        advantage = batch["advantage"]
        keep = 1 - written_summaries(batch["segments"], advantage)
        batch = {**batch, "advantage": advantage * keep}
        return super().policy_objective(logp, batch, normaliser, reference)


# 3. Demonstrations of both windows, so that one SFT serves all arms.
def demonstrate_in_two_windows(
    config, task, rng, tokenizer, compact, plain=train.make_demonstration
):
    """Half of the demonstrations have a quarter of the window: a policy learns to work in both."""
    if rng.random() < 0.5:
        config = replace(config, window=config.window // 4)
        compact = summarize.make_compaction(asdict(config))
    return plain(config, task, rng, tokenizer, compact)


# 4. The patches. In every arm the tests answer one command per rollout; some add a second change.
@dataclass(frozen=True)
class ToldOnce(rollout.Limits):
    commands: int = 1


def truncate_oldest():
    summarize.Compaction = OldestTruncated


def told_once():
    rollout.Limits = ToldOnce


def told_once_in_two_windows():
    told_once()
    train.make_demonstration = demonstrate_in_two_windows


def told_once_not_learned():
    told_once()
    train.STAGE["rl"] = SummariesNotLearned


def told_once_truncated():
    told_once()
    truncate_oldest()


# 5. The arms, and the SFT from which they begin.
LONG = (
    "--trigger=0.45",
    "--levels=0,1,2,3,4,5,6,7",
    "--max_turns=60",
    "--eval_levels=0,1,2,3,4,5,6,7",
)
EXPERIMENT = Experiment(
    question="Is a summary worth its tokens?",
    curves=("named",),
    arms={
        "window 1024": Arm((*LONG, "--window=1024", "--summarize=0"), told_once),
        "window 256": Arm((*LONG, "--window=256"), told_once),
        "window 256, not learned": Arm((*LONG, "--window=256"), told_once_not_learned),
        "window 256, truncated": Arm((*LONG, "--window=256"), told_once_truncated),
    },
    sft=Arm((*LONG, "--window=1024", "--steps=2600"), told_once_in_two_windows),
    by_level=("summaries", "solved"),
)

if __name__ == "__main__":
    runner.main("experiments.summary", sys.argv[1:])
