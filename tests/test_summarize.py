"""Self-summaries against contexts worked out by hand and many scripted demonstrations."""

import random
import re

import numpy as np

from sampling import fit_tokenizer
from length_penalty import count_effort
from rollout import (
    Rollout,
    Segment,
    Limits,
    Turn,
    Work,
    agent,
    demonstrate,
    flatten,
    make_turn,
    pack,
)
from experiments.summary import OldestTruncated, written_summaries
from summarize import QUERY, Compaction, condensed_context, count_named_targets, make_compaction
from synth_tasks import example_texts, make_task
from world.expert import InMemoryWorkspace
from world.task import SUMMARIZE, Task

TRAINED = fit_tokenizer(example_texts(24, 0), 500)
ID, ENC = TRAINED.id, TRAINED.encode
WINDOW = 480


def expert_rollout(level, seed, compact, window=WINDOW, sloppy=1.0):
    return demonstrate(
        make_task(level, seed), TRAINED, random.Random(seed), Limits(window, 99), sloppy, compact
    )


ROLLOUTS = [
    expert_rollout(level, seed, Compaction(WINDOW, int(0.6 * WINDOW)))
    for level in (3, 4, 5)
    for seed in range(40)
]


def test_the_context_of_every_demonstration_stays_within_the_window_however_long_the_task():
    # A window in which there is hardly room to work.
    tight = [
        expert_rollout(level, seed, Compaction(250, 150), 250)
        for level in (3, 4, 5)
        for seed in range(40)
    ]
    assert max(len(e) for c in tight for e in c.segments) <= 250 and not all(
        c.finished for c in tight
    )
    hardest = [expert_rollout(7, seed, Compaction(WINDOW, int(0.6 * WINDOW))) for seed in range(40)]
    longest = max(len(e) for c in ROLLOUTS + hardest for e in c.segments)
    without = [
        sum(len(e) for e in expert_rollout(7, seed, None, 10**6).segments) for seed in range(40)
    ]
    assert longest <= WINDOW and max(without) > 2 * WINDOW
    assert (
        max(len(c.segments) for c in ROLLOUTS) >= 3
        and sum(len(c.segments) > 1 for c in ROLLOUTS) > 30
    )


def test_a_summary_is_asked_for_at_the_first_turn_that_passes_the_trigger_and_never_before():
    for rollout in ROLLOUTS:
        for segment in rollout.segments:
            length = 0
            for turn, following in zip(segment.turns, segment.turns[1:] + [None]):
                passed, length = length >= int(0.6 * WINDOW), length + len(turn.tokens)
                assert turn.role != "query" or passed
                if (
                    turn.role == "tool"
                    and (following is None or following.role != "tool")
                    and length >= int(0.6 * WINDOW)
                ):
                    assert (
                        following is not None
                        and following.role == "query"
                        or segment is rollout.segments[-1]
                        and not rollout.finished
                    )


def test_each_segment_starts_from_the_task_and_the_condensed_context_with_the_number_of_summaries():
    for rollout in ROLLOUTS:
        task = rollout.segments[0].turns[0]
        for number, (before, after) in enumerate(zip(rollout.segments, rollout.segments[1:]), 1):
            query, summary = before.turns[-2:]
            assert (query.role, TRAINED.decode(query.tokens[1:-1])) == (
                "query",
                QUERY,
            ) and summary.role == "assistant"
            body = summary.tokens[1:-1]
            kept = body[body.index(ID[SUMMARIZE]) + 1 :][: WINDOW // 4]
            assert after.turns[0].tokens == task.tokens
            assert after.turns[1].tokens == [
                ID[SUMMARIZE],
                *ENC(f"{number}\n"),
                *kept,
                ID["<|end|>"],
            ]
        assert count_effort(rollout)["summaries"] == len(rollout.segments) - 1


def test_the_sampled_summary_is_trained_and_the_carried_copy_is_not():
    seen = 0
    for rollout in ROLLOUTS:
        for segment in rollout.segments:
            tokens, mask, _, index = flatten(segment)
            for i, turn in enumerate(segment.turns):
                expected = (
                    [0] + [1] * (len(turn.tokens) - 1)
                    if turn.role == "assistant"
                    else [0] * len(turn.tokens)
                )
                assert mask[index == i].tolist() == expected
            marks = [int(m) for t, m in zip(tokens, mask) if t == ID[SUMMARIZE]]
            carried, written = (
                segment is not rollout.segments[0],
                segment is not rollout.segments[-1],
            )
            # a summary that the window cut short
            cut = not rollout.finished and not written and marks[carried:] == [1]
            assert marks == [0] * carried + [1] * (written or cut)
            seen += sum(marks)
    assert seen > 30


def test_what_is_carried_over_lets_the_expert_finish_as_without_summaries():
    """The oracle is the careful expert in one large context: through a small window it writes the
    same code."""
    for level in (4, 5):
        for seed in range(6):
            whole, small = (
                expert_rollout(level, seed, c, w, sloppy=0.0)
                for c, w in ((None, 10**6), (Compaction(WINDOW, 200), WINDOW))
            )
            assert len(small.segments) > 1 and small.finished
            restored = {path: text for path, text in whole.files.items() if path.endswith(".py")}
            assert {
                path: sorted(text.split("\n"))
                for path, text in small.files.items()
                if path in restored
            } == {path: sorted(text.split("\n")) for path, text in restored.items()}


# ---------------------------------------------------------------- by hand


def test_condensed_is_what_follows_the_last_mark_without_the_stop_token():
    mark, end = ID[SUMMARIZE], ID["<|end|>"]
    for body, most, expected in (
        ([1, 2, mark, 3, 4, end], 9, [3, 4]),
        ([1, 2, mark, 3, 4, end], 2, [3, 4]),
        ([mark, end], 9, []),
        ([1, mark, 2, mark, 3, end], 9, [3]),
        ([1, 2, 3, end], 9, [1, 2, 3]),
        ([1, 2, 3, end], 3, [1, 2, 3]),
        ([1, mark, 5, ID["<|call|>"], 6], 9, [5, ID["<|call|>"], 6]),
        ([], 9, []),
        ([end], 9, []),
    ):
        assert condensed_context(TRAINED, body, most) == expected


def run(
    compact, bodies, limits=Limits(400), task=Task("t", "Put back a.f", {"a.py": "x = 1\n"}, {})
):
    """The agent with given bodies -> (rollout, its Requests)."""
    play, requests, bodies = (
        agent(task, TRAINED, InMemoryWorkspace(task), limits, compact),
        [],
        iter(bodies),
    )
    asked = next(play)
    try:
        while True:
            if isinstance(asked, Work):
                asked.run()
                asked = play.send(None)
            else:
                requests.append(asked)
                body = next(bodies)[: asked.room]
                asked = play.send((body, np.zeros(len(body), dtype=np.float32), 0))
    except StopIteration as end:
        return end.value, requests


READ = TRAINED.write_action("", [("read_file", ("a.py",))])
SUMMARY = TRAINED.write_action(f"Think.{SUMMARIZE}left: a.f", [])
DONE = TRAINED.write_action("done", [])


def test_the_query_comes_into_the_same_context_and_only_the_summary_starts_a_new_one():
    rollout, requests = run(Compaction(400, 1), [READ, SUMMARY, READ, SUMMARY, DONE])
    assert [(r.restart, r.summary) for r in requests] == [
        (True, False),
        (False, True),
        (True, False),
        (False, True),
        (True, False),
    ]
    head, tool = ID["<|assistant|>"], make_turn(TRAINED, "tool", "x = 1\n").tokens
    # The query is appended to the context, so what is cached stays.
    assert requests[1].tokens == [*tool, ID["<|query|>"], *ENC(QUERY), ID["<|end|>"], head]
    user = make_turn(TRAINED, "user", "Put back a.f").tokens
    for number, request in ((1, requests[2]), (2, requests[4])):
        assert request.tokens == [
            *user,
            ID["<|summary|>"],
            *ENC(f"{number}\n"),
            *ENC("left: a.f"),
            ID["<|end|>"],
            head,
        ]
    assert rollout.finished and [len(e.turns) for e in rollout.segments] == [5, 6, 3]


def test_truncation_goes_on_from_the_task_and_the_newest_whole_exchanges_that_fit_into_half_of_the_window():
    user, tool = (
        make_turn(TRAINED, role, text).tokens
        for role, text in (("user", "Put back a.f"), ("tool", "x = 1\n"))
    )
    exchange, head = [ID["<|assistant|>"], *READ, *tool], ID["<|assistant|>"]
    # Half of this window holds the task and two exchanges, but not three.
    window = 2 * (len(user) + 2 * len(exchange)) + 1
    rollout, requests = run(
        OldestTruncated(window, len(user) + 3 * len(exchange)),
        [READ] * 6 + [DONE],
        Limits(window),
    )
    assert [r.restart for r in requests] == [
        True,
        False,
        False,
        True,
        True,
        True,
        True,
    ] and not any(r.summary for r in requests)
    assert all(request.tokens == [*user, *exchange, *exchange, head] for request in requests[3:])
    assert rollout.finished and max(map(len, rollout.segments)) <= window
    sampled = sum(int(flatten(segment)[1].sum()) for segment in rollout.segments)
    assert sampled == 6 * len(READ) + len(DONE)  # nothing is trained on twice
    assert [turn.role for turn in rollout.segments[1].turns] == [
        "user",
        "recent",
        "recent output",
        "recent",
        "recent output",
        "assistant",
        "tool",
    ]
    assert count_named_targets(rollout) == dict(summaries=0, tokens=0, left=0, named=0)
    assert (
        run(OldestTruncated(window, 1), [ENC("and so on"), DONE], Limits(20))[0]
        .segments[0]
        .turns[-1]
        .role
        == "assistant"
    )


def test_the_configuration_decides_over_the_hook():
    config = dict(window=100, trigger=0.5, summarize=True)
    assert make_compaction(config) == Compaction(100, 50)
    assert make_compaction({**config, "summarize": False}) is None


def test_the_probe_counts_what_is_left_and_what_the_summary_names():
    names = ("first", "second", "third")
    task = Task(
        "t",
        "Put back",
        {"a.py": "x = 1\n"},
        {},
        meta={"targets": [{"name": name} for name in names]},
    )
    edit = lambda name, old="": TRAINED.write_action(
        "", [("edit_file", ("a.py", old, f"def {name}(x):\n    return x\n"))]
    )
    said = lambda text: TRAINED.write_action(f"{names[0]}?{SUMMARIZE}{text}", [])
    bodies = [
        edit("first"),
        said("a.second: missing"),
        edit("second", "not there"),
        said("a.second"),
        edit("second"),
        said("a.third"),
        DONE,
    ]
    rollout = run(Compaction(2000, 1), bodies, Limits(2000), task)[0]
    tokens = sum(map(len, bodies[1:6:2]))
    # a failed edit wrote nothing
    assert count_named_targets(rollout) == dict(
        summaries=3, tokens=tokens, left=2 + 2 + 1, named=1 + 1 + 1
    )
    assert count_named_targets(
        run(Compaction(2000, 10**6), [edit("first"), DONE], Limits(2000), task)[0]
    ) == dict(summaries=0, tokens=0, left=0, named=0)


def test_outputs_leave_room_for_query_and_summary():
    task, window = Task("t", "x", {"a.py": "y = 2\n" * 300}, {}), 300
    talk = TRAINED.write_action("and so on " * 8, [("read_file", ("a.py",))])
    bodies = [talk, talk, SUMMARY, DONE]
    rollout, requests = run(Compaction(window, 210), bodies, Limits(window), task)
    assert [r.summary for r in requests].count(True) == 1 and rollout.finished
    assert next(r.room for r in requests if r.summary) >= window // 8


def test_calls_inside_a_summary_are_neither_run_nor_counted():
    busy = TRAINED.write_action(f"{SUMMARIZE}x", [("edit_file", ("a.py", "", "y = 2\n"))])
    rollout, _ = run(Compaction(400, 1), [READ, busy, DONE])
    assert (
        rollout.files == {"a.py": "x = 1\n"}
        and [t.calls for t in rollout.segments[0].turns if t.role == "assistant"][-1] == []
    )
    assert rollout.finished and len(rollout.segments) == 2


def test_a_summary_that_never_stops_ends_the_rollout_unfinished():
    rollout, _ = run(Compaction(400, 1), [READ, ENC("and so on " * 40)])
    assert not rollout.finished and len(rollout.segments) == 1


def test_a_summary_longer_than_a_quarter_of_the_window_is_cut_when_carried():
    rambling = [ID[SUMMARIZE], *[ENC("a")[0]] * 70, ID["<|end|>"]]
    rollout, _ = run(Compaction(200, 1), [READ, rambling, DONE], Limits(200))
    assert len(rollout.segments[1].turns[1].tokens) == 1 + len(ENC("1\n")) + 50 + 1
    assert len(rollout.segments[0].turns[-1].tokens) == 73


def test_a_summary_that_is_cut_says_so_within_its_room_and_counts_what_went_on():
    words = [
        ID[SUMMARIZE],
        *ENC("first, then second: " + "a step and " * 20 + "third"),
        ID["<|end|>"],
    ]
    most, size = 60, len(words) - 2
    carried = condensed_context(TRAINED, words, most)
    note = re.search(r"\n\[(\d+) tokens cut\]$", TRAINED.decode(carried))
    assert (
        len(carried) <= most and note and int(note[1]) == size - (len(carried) - len(ENC(note[0])))
    )
    assert all(0 < len(condensed_context(TRAINED, words, room)) <= room for room in range(1, 30))
    names = ("first", "second", "third")
    task = Task(
        "t",
        "Put back",
        {"a.py": "x = 1\n"},
        {},
        meta={"targets": [{"name": name} for name in names]},
    )
    # a quarter of the window is room for a summary
    for window, named in ((240, 2), (4000, 3)):
        rollout, _ = run(
            Compaction(window, 1), [READ, words, DONE], Limits(window, turn_tokens=400), task
        )
        text = rollout.segments[1].turns[1].text
        assert ("tokens cut]" in text) == (named < 3) and count_named_targets(rollout)[
            "named"
        ] == named == sum(name in text for name in names)


def test_below_the_trigger_nobody_asks():
    rollout = Rollout(None, [Segment([Turn("user", [0] * 9)])])
    assert Compaction(100, 10)(TRAINED, rollout) is None
    rollout.segments[0].turns.append(Turn("tool", [0]))
    query = Compaction(100, 10)(TRAINED, rollout)
    assert (
        query.role == "query"
        and query.tokens[0] == ID["<|query|>"]
        and query.tokens[-1] == ID["<|end|>"]
    )


def test_the_tokens_of_written_summaries_are_found_one_by_one():
    segments = [e for rollout in ROLLOUTS[:20] for e in rollout.segments]
    batch, summaries = pack(segments, [1.0] * len(segments)), 0
    found = written_summaries(segments, batch["advantage"])
    for row, mask, segment in zip(found.tolist(), batch["mask"].tolist(), segments):
        expected, asked = [], False
        # The oracle walks through the turns. The token of a role is never a target.
        for turn in segment.turns:
            summaries += asked
            expected += [0] + [int(asked)] * (len(turn.tokens) - 1)
            asked = turn.role == "query"
        expected = expected[1:]
        assert row[: len(expected)] == expected and not any(row[len(expected) :])
        assert all(m for m, one in zip(mask, row) if one)  # and all of them were sampled
    assert summaries > 3 and 0 < found.sum() < batch["mask"].sum()
