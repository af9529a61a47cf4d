"""summarize.py: an agent that outgrows its context writes itself a summary and goes on.

Stated by Cursor (blog on self-summarization, 17 March 2026; Technical Report, arXiv 2603.24477,
section 4.1): generate until a fixed token trigger; append a short query asking for a summary; the
model has scratch space to think, then writes the condensed context; go on from task + summary +
carried state (plan, what remains, how many summaries so far). One rollout is then several
generations chained by summaries, and the final reward goes to every sampled token of the chain,
summaries included. The query is appended to the same context, so its cache is reused. Triggers of
80k and 40k tokens were studied; summaries take about 1,000 tokens where a long hand-written prompt
gave over 5,000, with half the error.

    episode 1:  task  turn turn turn  query  [scratch <|summary|> condensed]      <- trigger passed, the summary is sampled
    episode 2:  task  condensed  turn turn ...                                    <- the same reward for both

Derived: each episode is one training sequence; the group's mean is over chains, never over
episodes; the price of effort is taken over the whole chain. The context is bounded by construction:
no turn is sampled beyond the window, an episode longer than the trigger is asked for a summary at
once, and what tools answer is cut so that query and summary find the window's last eighth; only an
action begun just below the trigger may write into that, and then the summary is short. Ours: the
trigger (a share of the window, below seven eighths), the query's words, that a condensed context is
cut at a quarter of the window.

    python summarize.py      a task several windows long, played by the scripted expert: its chain, and contexts with and without
"""

import argparse
import random
from dataclasses import dataclass
from typing import ClassVar

from rollout import Limits, Tokenizer, demonstrate, make_turn
from synth_tasks import make_task
from world.task import SUMMARIZE

QUERY = "Summarize."


def condensed(tokenizer, body, most):
    """The part of a sampled summary turn that is carried on: what follows <|summary|>, or all of it
    where that is missing, without its thought. Of one longer than `most` tokens the beginning, with
    a note of how much was cut, all within `most`."""
    mark = tokenizer.id[SUMMARIZE]
    tokens = list(body[:-1] if body and body[-1] in tokenizer.ends else body)
    if mark in tokens:
        tokens = tokens[len(tokens) - tokens[::-1].index(mark) :]
    # a published model's scratch space ends there
    thought = tokenizer.special.get("</think>")
    if thought in tokens:
        tokens = tokens[len(tokens) - tokens[::-1].index(thought) :]
    if len(tokens) <= most:
        return tokens
    # The note says how many tokens are gone, and takes room itself: the number is found with the
    # note in its place.
    lost = len(tokens) - most
    for _ in range(3):
        note = tokenizer.encode(f"\n[{lost} tokens cut]")
        lost = len(tokens) - max(0, most - len(note))
    return (tokens[: max(0, most - len(note))] + note)[:most]


@dataclass(frozen=True)
class Compact:
    """rollout.agent's hook. trigger, window in tokens."""

    window: int
    trigger: int
    # The agent goes on from a summary. In experiments/summary.py it goes on without one.
    truncate: ClassVar[bool] = False

    def room(self, tokenizer, chain):
        """Tokens that the last turn's outputs may have, so that query and summary still find an
        eighth of the window"""
        return max(
            16, self.window * 7 // 8 - len(chain.episodes[-1]) - len(tokenizer.encode(QUERY)) - 8
        )

    def __call__(self, tokenizer, chain):
        """After each turn's outputs: the query turn if the context has passed the trigger, else
        None."""
        if len(chain.episodes[-1]) >= self.trigger:
            return make_turn(tokenizer, "query", QUERY)

    def restart(self, tokenizer, chain, turn):
        """The turns that a new episode starts from: the task, and the condensed context with the
        number of summaries so far."""
        carried = tokenizer.encode(f"{len(chain.episodes)}\n") + condensed(
            tokenizer, turn.tokens[turn.head :], self.window // 4
        )
        return [
            chain.episodes[0].turns[0],
            tokenizer.wrap_turn("summary", carried, tokenizer.decode(carried)),
        ]


def compact(config):
    """The hook of a run's configuration (a dict), None where the run does not summarise"""
    if config["summarize"]:
        return Compact(config["window"], int(config["trigger"] * config["window"]))


def probe(chain):
    """What is lost? -> summaries, their sampled tokens, and of the deleted functions that were not
    written yet when one was written how many there were (left) and how many are named in what of it
    went on (named). Generated tasks only."""
    gone, counts = {target["name"] for target in chain.task.meta.get("targets", ())}, dict(
        summaries=0, tokens=0, left=0, named=0
    )
    for episode, after in zip(chain.episodes, chain.episodes[1:]):
        asked, summary = episode.turns[-2:]
        edits = [
            call.args
            for turn in episode.turns
            for call in turn.calls
            if call.name == "edit_file" and not call.error
        ]
        gone -= {name for name in gone if any(f"def {name}(" in args[2] for args in edits)}
        if asked.role != "query":
            continue
        said = "".join(turn.text for turn in after.turns if turn.role == "summary")
        counts = {
            "summaries": counts["summaries"] + 1,
            "tokens": counts["tokens"] + len(summary.tokens) - summary.head,
            "left": counts["left"] + len(gone),
            "named": counts["named"] + sum(name in said for name in gone),
        }
    return counts


def main():
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)})
    task = make_task(7, 3)
    window = 900
    chains = {
        name: demonstrate(task, tokenizer, random.Random(2), Limits(10**6), compact=compact)
        for name, compact in (("without", None), ("with", Compact(window, int(0.6 * window))))
    }
    for number, episode in enumerate(chains["with"].episodes):
        print(f"\n======== episode {number + 1}: {len(episode)} tokens (window {window})")
        for turn in episode.turns:
            if (
                turn.role in ("summary", "query")
                or turn is episode.turns[-1]
                and number < len(chains["with"].episodes) - 1
            ):
                print(f"{turn.role:>10}: {tokenizer.decode(turn.tokens[1:-1])}")
    longest = {name: max(len(e) for e in chain.episodes) for name, chain in chains.items()}
    print(
        f"\nThe same expert on the same task: {longest['without']} tokens of context without summaries, never more than "
        f"{longest['with']} with {len(chains['with'].episodes) - 1} of them; all {sum(t.role == 'assistant' for t in chains['with'].turns)} "
        f"turns, summaries included, get one reward."
    )


if __name__ == "__main__":
    argparse.ArgumentParser(
        description="A task several windows long.", usage=argparse.SUPPRESS, allow_abbrev=False
    ).parse_args()
    main()
