"""5. Keep the last call through a summary.   summarize.py, `turns_after_summary`   eight lines

After a summary the new segment begins with the task and the summary alone: what the last tool
answered is gone, unless the policy wrote it down. Carry the last call and its outputs over as they
were, behind the summary. They are context there: they were trained on in the segment in which they
were sampled, so they get the roles "recent" and "recent output", under which no token counts as
sampled (`rollout.flatten`).

    python -m pytest exercises/last_call.py        red before, green after
    python train.py --stage=rl --steps=5 --start_from=assets/sft --out=out/last_call --trigger=.4

Number to reach: a segment after a summary begins with four turns or more, and a rollout has as many
sampled tokens as before. Look at: `summary_tokens` and `named` in the log: how much of what a
summary must say does it still have to say?
"""

import random

import rollout
from rollout import Limits, Tokenizer
from summarize import Compaction
from synth_tasks import make_task

BYTES = Tokenizer({bytes([b]): b for b in range(256)})


def demonstrate(number):
    compact = Compaction(2000, 900)
    task = make_task(5, number)
    return rollout.demonstrate(task, BYTES, random.Random(number), Limits(2000), compact=compact)


def segments_after_summaries():
    found = []
    for number in range(8):
        segments = demonstrate(number).segments
        found += list(zip(segments, segments[1:]))
    assert len(found) > 3
    return found


def test_a_new_segment_begins_with_the_last_call_and_its_outputs():
    for before, after in segments_after_summaries():
        acting = [i for i, turn in enumerate(before.turns[:-2]) if turn.role == "assistant"]
        if not acting:
            continue
        kept = before.turns[acting[-1] : -2]
        assert [turn.role for turn in after.turns[:3]] == ["user", "summary", "recent"]
        copies = after.turns[2 : 2 + len(kept)]
        assert [copy.tokens for copy in copies] == [turn.tokens for turn in kept]
        assert all(copy.role == "recent output" for copy in copies[1:])


def test_nothing_that_is_carried_over_is_trained_on_again():
    for _, after in segments_after_summaries():
        _, mask, _, index = rollout.flatten(after)
        for place, turn in enumerate(after.turns):
            if turn.role.startswith("recent"):
                assert not mask[index == place].any()
