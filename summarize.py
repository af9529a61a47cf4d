"""summarize.py: an agent that outgrows its context writes itself a summary and goes on.

Stated by Cursor (blog on self-summarization, 17 March 2026; Technical Report, arXiv 2603.24477,
section 4.1): generate until a fixed token trigger; append a short query asking for a summary; the
model has scratch space to think, then writes the condensed context; go on from task + summary +
carried state (plan, what remains, how many summaries so far). One rollout is then several
generations chained by summaries, and the final reward goes to every sampled token of the rollout,
summaries included. The query is appended to the same context, so its cache is reused. Triggers of
80k and 40k tokens were studied; summaries take about 1,000 tokens where a long hand-written prompt
gave over 5,000, with half the error.

    segment 1:  task  turn turn turn  query  [scratch <|summary|> condensed]
                                             trigger passed: the summary is sampled
    segment 2:  task  number, condensed  turn turn ...      the same reward for both

Derived: each segment is one training sequence; the group's mean is over rollouts, never over
segments; the price of effort is taken over the whole rollout. The context is bounded by
construction: no turn is sampled beyond the window, and a segment that has passed the trigger is
asked for a summary at once. Tool outputs are cut so that about the window's last eighth is left for
the summary. An action begun just below the trigger may write into that eighth, and so do the tokens
around the outputs of many calls; then the summary is short. Of the carried state the number of
summaries alone is kept here. Ours: the trigger (a share of the window, below seven eighths), the
query's words, that a condensed context is cut at a quarter of the window.

    python summarize.py      a task several windows long, played by the scripted expert: the ends
                             of its segments, and the longest context with summaries and without
"""

import random
import sys
from dataclasses import dataclass
from typing import ClassVar

from rollout import Limits, Tokenizer, demonstrate, make_turn
from synth_tasks import make_task
from world.task import SUMMARIZE

QUERY = "Summarize."


def condensed_context(tokenizer, body, most):
    """The tokens of a sampled summary turn that the next segment gets: those behind <|summary|>, or
    all where that mark is missing, without the model's thoughts. If they are more than `most`, the
    end is cut off and a note says how many tokens were cut; the note counts within `most`. body:
    the sampled tokens."""
    # The stop token ends the turn and the scratch thinking comes before the mark: both stay behind.
    tokens = list(body[:-1] if body and body[-1] in tokenizer.ends else body)
    tokens = behind_last(tokens, tokenizer.id[SUMMARIZE])
    # The thoughts of a published model end with </think>, where its tokenizer has that token.
    tokens = behind_last(tokens, tokenizer.special.get("</think>"))
    if len(tokens) <= most:
        return tokens

    # The note says how many tokens are gone, and takes room itself. A longer number may need a
    # longer note, so the number is computed again with the note in its place.
    lost = len(tokens) - most
    for _ in range(3):
        note = tokenizer.encode(f"\n[{lost} tokens cut]")
        lost = len(tokens) - max(0, most - len(note))
    kept = tokens[: max(0, most - len(note))]
    return (kept + note)[:most]


def behind_last(tokens, mark):
    """The tokens behind the last `mark`, or all where there is none"""
    if mark not in tokens:
        return tokens
    return tokens[len(tokens) - tokens[::-1].index(mark) :]


@dataclass(frozen=True)
class Compaction:
    """rollout.agent's hook: when is a summary asked for, and what does the next segment start from?
    window, trigger: in tokens."""

    window: int
    trigger: int
    # The agent goes on from a summary. In experiments/summary.py it goes on without one.
    truncate: ClassVar[bool] = False

    def __call__(self, tokenizer, rollout):
        """After each turn's outputs: the query turn if the context has passed the trigger, else
        None."""
        if len(rollout.segments[-1]) >= self.trigger:
            return make_turn(tokenizer, "query", QUERY)
        return None

    def room_for_outputs(self, tokenizer, rollout):
        """How many tokens the outputs of the last turn may have, if an eighth of the window is to
        be left for the summary"""
        query_tokens = len(tokenizer.encode(QUERY)) + 8  # with the control tokens around it
        room = self.window * 7 // 8 - len(rollout.segments[-1]) - query_tokens
        # After a long action there may be no room at all: a few tokens of output are kept anyway.
        return max(16, room)

    def turns_after_summary(self, tokenizer, rollout, summary):
        """The turns that a new segment starts from: the task, and the condensed context behind the
        number of summaries so far. summary: the turn that was sampled, the last one of the segment
        rollout.segments[-1], which stands complete: [task, (summary,) turns ..., query, summary]"""
        body = summary.tokens[summary.head :]
        carried = tokenizer.encode(f"{len(rollout.segments)}\n")
        carried += condensed_context(tokenizer, body, self.window // 4)
        task_turn = rollout.segments[0].turns[0]
        return [task_turn, tokenizer.wrap_turn("summary", carried, tokenizer.decode(carried))]


def make_compaction(config):
    """The hook of a run's configuration (a dict), None where the run does not summarise"""
    if not config["summarize"]:
        return None
    return Compaction(config["window"], int(config["trigger"] * config["window"]))


def count_named_targets(rollout):
    """What do summaries lose? -> counts over a rollout: `summaries`, their sampled `tokens`, how
    many deleted functions were still to be written at each summary (`left`), and how many of these
    the next segment was told the names of (`named`). Generated tasks only."""
    counts = {"summaries": 0, "tokens": 0, "left": 0, "named": 0}
    unwritten = {target["name"] for target in rollout.task.meta.get("targets", ())}
    for segment, next_segment in zip(rollout.segments, rollout.segments[1:]):
        unwritten -= functions_written(segment, unwritten)
        # A segment that was asked for a summary ends with query and summary. One whose oldest
        # turns were dropped instead (see truncate) does not.
        query, summary = segment.turns[-2:]
        if query.role != "query":
            continue

        # What counts is the text that the next segment begins with, not all that was sampled.
        carried = [turn.text for turn in next_segment.turns if turn.role == "summary"]
        counts["summaries"] += 1
        counts["tokens"] += len(summary.tokens) - summary.head
        counts["left"] += len(unwritten)
        counts["named"] += sum(name in "".join(carried) for name in unwritten)
    return counts


def functions_written(segment, names):
    """Those of `names` that an edit of this segment defined"""
    found = set()
    for turn in segment.turns:
        for call in turn.calls:
            if call.name == "edit_file" and not call.error:
                new_text = call.args[2]
                found |= {name for name in names if f"def {name}(" in new_text}
    return found


# ---------------------------------------------------------------- demo


def demo():
    # The same expert on the same task, in a window that never ends and in one that is too short.
    # The tokenizer has one token per byte, so the task is long.
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)})
    task = make_task(7, 3)
    window = 900
    limits = Limits(10**6)
    compaction = Compaction(window, int(0.6 * window))
    unbounded = demonstrate(task, tokenizer, random.Random(2), limits)
    rollout = demonstrate(task, tokenizer, random.Random(2), limits, compact=compaction)

    # Print of each segment the summary that it began with, and how it ended.
    for number, segment in enumerate(rollout.segments, 1):
        print(f"\n======== segment {number}: {len(segment)} tokens (window {window})")
        for turn in segment.turns:
            was_summarized = turn is segment.turns[-1] and number < len(rollout.segments)
            if turn.role in ("summary", "query") or was_summarized:
                print(f"{turn.role:>10}: {tokenizer.decode(turn.tokens[1:-1])}")

    longest = max(len(segment) for segment in rollout.segments)
    longest_unbounded = max(len(segment) for segment in unbounded.segments)
    turns = sum(turn.role == "assistant" for turn in rollout.turns)
    print(
        f"\nThe same expert on the same task: {longest_unbounded} tokens of context without "
        f"summaries, never more than {longest} with {len(rollout.segments) - 1} of them; "
        f"all {turns} turns, summaries included, get one reward."
    )


def main(argv):
    from demos.demonstration import run_demo

    run_demo("summarize.py", "A task several windows long.", demo, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
