"""The fast sampler against its twin in rollout.py, against re-scoring by the full forward, and
against the same rollout alone."""

import contextlib
import threading
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import rollout as rollout_module
from rollout import Sampler as PlainSampler
from rollout import grade, sample_groups
from experiments.summary import OldestTruncated
from fast.sampler import Sampler
from rollout import Rollout, Limits, Request, Work, flatten, make_turn, pack
from sampling import TASKS, TRAINED, policy, same, sample, target_logprobs
from summarize import Compaction
from synth_tasks import make_task
from world.sandbox import Sandbox


@pytest.mark.parametrize("truncate", [False, True], ids=["summaries", "truncation"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_plain_sampler_and_the_fast_one_yield_the_same_rollouts(answers, truncate, temperature):
    """Several turns with tools and summaries, a limit of commands, and ends by a final message, by
    the window and by a turn that was cut off: the same tokens and experts, log-probs within 1e-5
    (fp32; a batch rounds in another order)."""
    options = dict(window=160, temperature=temperature)
    limits = Limits(160, 9, 24, commands=2)
    tasks, seeds = [TASKS[i % 4] for i in range(8)], [(7, i) for i in range(8)]
    compact = (OldestTruncated if truncate else Compaction)(160, 50)
    found = [
        sample(sampler, tasks, seeds, compact, limits)
        for sampler in (
            PlainSampler(policy(), TRAINED, **options),
            Sampler(policy(), TRAINED, rows=5, **options),
        )
    ]
    for plain, fast in zip(*found):
        same(plain, fast)
        assert plain.finished == fast.finished
        assert [turn.role for turn in plain.turns] == [turn.role for turn in fast.turns]
        for turn, twin in zip(plain.turns, fast.turns):
            assert (turn.text, turn.calls, turn.head) == (twin.text, twin.calls, twin.head)
            assert np.array_equal(turn.versions, twin.versions)
        for segment, twin in zip(plain.segments, fast.segments):
            assert np.array_equal(segment.routes, twin.routes)
        # Drafts save steps; without them a step is a token.
        assert (
            fast.steps
            <= plain.steps
            == sum(len(turn.logprobs) for turn in plain.turns if turn.role == "assistant")
        )
    turns = [turn for rollout in found[0] for turn in rollout.turns]
    outputs = [call.output for turn in turns for call in turn.calls]
    roles = Counter(turn.role for turn in turns)
    assert roles["tool"] > 5 and roles["recent" if truncate else "summary"] > 0
    assert "No more commands." in outputs and any(rollout.finished for rollout in found[0])
    assert not all(rollout.finished for rollout in found[0])


def test_rollouts_of_real_tasks_are_the_same_from_either_sampler():
    """Real directories and hidden tests: also the same files, rewards and counts"""
    tasks, sandbox = [make_task(0, 1), make_task(1, 2)], Sandbox()
    found = [
        sample_groups(sampler, tasks, 2, 3, Limits(400, 3, 24), sandbox)
        for sampler in (
            PlainSampler(policy(context=400), TRAINED, 400),
            Sampler(policy(context=400), TRAINED, 4, 400),
        )
    ]
    for plain_group, fast_group in zip(*found):
        for plain, fast in zip(plain_group, fast_group):
            same(plain, fast)
            grade(plain)
            grade(fast)
            assert plain.files == fast.files and plain.stats == fast.stats
            assert plain.reward == fast.reward and plain.findings == fast.findings


@pytest.mark.parametrize("kind,truncate", [("mla", False), ("gqa", False), ("mla", True)])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_log_probs_recorded_at_sampling_equal_the_full_forward_token_by_token(
    answers, kind, truncate, temperature
):
    """The oracle is one forward over each whole segment, after tool outputs, summaries and
    truncation too. The recorded experts are the trainer's own choice in fp32."""
    model = policy(seed=1, attention=kind)
    rollouts = sample(
        Sampler(model, TRAINED, 5, 160, temperature),
        [TASKS[i % 4] for i in range(24)],
        list(range(24)),
        (OldestTruncated if truncate else Compaction)(160, 50),
    )
    segments = [e for c in rollouts for e in c.segments]
    roles = Counter(t.role for c in rollouts for t in c.turns)
    assert roles["tool"] > 20 and len(segments) > len(rollouts)
    assert (
        roles["recent"] >= 3 > roles["query"]
        if truncate
        else roles["summary"] >= 3 <= roles["query"]
    )
    scored = 0
    for segment in (e for e in segments if flatten(e)[1].any()):
        batch, record = pack([segment], [1.0], multiple=8), []
        free = model(batch["tokens"], record=record)
        n = len(segment)
        logp = target_logprobs(model.logits(free), batch["targets"], temperature)
        where = batch["mask"].bool()
        torch.testing.assert_close(logp[where], batch["logprobs"][where], atol=1e-4, rtol=0)
        scored += int(where.sum())
        recorded, own = batch["routes"][0], torch.stack(record, 2)[0]
        fed = recorded[:, 0, 0] >= 0
        # The last token of a turn that ends a segment was never fed: nothing follows it.
        last = segment.turns[-1].role == "assistant"
        assert fed[: n - 1].all() or not last
        assert torch.equal(recorded[fed].long().sort(-1)[0], own[fed].sort(-1)[0])
        replayed = target_logprobs(
            model.logits(model(batch["tokens"], replay=batch["routes"])),
            batch["targets"],
            temperature,
        )
        torch.testing.assert_close(replayed[where], batch["logprobs"][where], atol=1e-4, rtol=0)
    assert scored > 250


@pytest.mark.parametrize("rows", [3, 16])
def test_a_rollout_does_not_depend_on_what_else_is_in_the_batch(answers, rows):
    """Each prompt is that of three rollouts, and read once. With three rows, each row has several
    tenants, one after the other."""
    model = policy()
    tasks, seeds = [TASKS[i % 4] for i in range(12)], [(5, i) for i in range(12)]
    together = sample(Sampler(model, TRAINED, rows, 160), tasks, seeds)
    assert [c.task for c in together] == tasks
    for a, b in zip(
        together, sample(Sampler(model, TRAINED, rows, 160), tasks, seeds, patient=False)
    ):
        same(a, b)
    for i in (0, 3, 4, 11):
        alone = sample(Sampler(model, TRAINED, 1, 160), [tasks[i]], [seeds[i]])[0]
        same(alone, together[i])
        prompt = len(alone.segments[0].turns[0].tokens)
        for mine, other in zip(alone.segments, together[i].segments):
            assert np.array_equal(mine.routes, other.routes)
            assert (other.routes[:prompt] >= 0).all()
    # other seeds, other rollouts
    assert len({str([t.tokens for t in c.turns]) for c in together}) > 10


def test_drafts_change_the_number_of_steps_and_nothing_else(answers):
    tasks, seeds, found = [TASKS[i % 4] for i in range(12)], list(range(12)), []
    for draft in (0, 1, 3, 7):
        sampler = Sampler(policy(), TRAINED, 12, 160, 0.5, draft=draft)
        found.append((sample(sampler, tasks, seeds), sampler.steps))
    (plain, steps), *drafted = found
    assert all(
        rollout.steps
        == sum(len(turn.logprobs) for turn in rollout.turns if turn.logprobs is not None)
        for rollout in plain
    )
    for rollouts, fewer in drafted:
        assert fewer < 0.9 * steps
        for a, b in zip(plain, rollouts):
            same(a, b)
            assert b.steps <= a.steps and [
                turn.versions.tolist() for turn in a.turns if turn.versions is not None
            ] == [turn.versions.tolist() for turn in b.turns if turn.versions is not None]
            for e, f in zip(a.segments, b.segments):
                assert np.array_equal(e.routes, f.routes)


def test_a_sequence_that_repeats_itself_takes_a_quarter_of_the_steps():
    def play():
        yield Request([1, 2], True, 40)
        return Rollout(None, [])

    model = policy()
    model.logits = lambda hidden: F.one_hot(torch.full((len(hidden),), 65), TRAINED.vocab).float()
    # Drafts can begin once a first pair of tokens was seen. The room for 40 tokens cuts the last
    # draft.
    for draft, steps in ((0, 40), (3, 3 + 10), (39, 4)):
        sampler = Sampler(model, TRAINED, 1, 160, 0, draft=draft)
        assert sampler.run([play()], [0])[0].steps == sampler.steps == steps


@pytest.mark.parametrize("patient", [False, True])
def test_a_slow_tool_holds_up_only_its_own_sequence_unless_the_run_shall_be_repeatable(patient):
    """The slow tool waits until the other sequence has ended, or until its time limit."""
    ended, seen = threading.Event(), []

    def slow():
        yield Request([1, 2], True, 3)
        yield Work([], lambda: seen.append(ended.wait(0.2 if patient else 60)), True)
        yield Request([3], False, 3)
        return Rollout(None, [])

    def quick():
        for turn in range(9):
            yield Request([1, 2, 4], not turn, 9)
        ended.set()
        return Rollout(None, [])

    sampler = Sampler(policy(), TRAINED, 8, 160)
    assert len(sampler.run([slow(), quick(), slow()], [0, 1, 2], patient=patient)) == 3
    assert seen == [not patient] * 2


def test_a_shared_prompt_is_fed_once_per_group(answers):
    """Every agent has a single turn. So the sampler is fed each group's prompt, once, and one token
    for each step of each row."""
    model, prompt = policy(), len(make_turn(TRAINED, "user", TASKS[3].problem_statement).tokens)
    short = Limits(160, 1, 2)
    sampler = Sampler(model, TRAINED, 8, 160)
    rollouts = sample(sampler, [TASKS[3]] * 6, list(range(6)), None, short)
    assert sampler.fed == prompt + sum(rollout.steps for rollout in rollouts)
    sampler = Sampler(model, TRAINED, 8, 160)
    rollouts = sample(sampler, [TASKS[3]] * 3 + [TASKS[1]] * 3, list(range(6)), None, short)
    prompts = sum(
        len(make_turn(TRAINED, "user", t.problem_statement).tokens) for t in (TASKS[3], TASKS[1])
    )
    assert sampler.fed == prompts + sum(rollout.steps for rollout in rollouts)


def test_no_more_workspaces_stand_than_rows_and_none_is_left_by_a_failure(monkeypatch):
    folders, most, step = [], 0, Sampler.step

    class Counted(rollout_module.Workspace):
        def __init__(self, *given):
            super().__init__(*given)
            folders.append(self.root)

    def watched(self, rows):
        nonlocal most
        most = max(most, sum(folder.exists() for folder in folders))
        step(self, rows)
        if len(folders) >= breaks_at:
            raise RuntimeError("out of memory")

    monkeypatch.setattr("rollout.Workspace", Counted)
    monkeypatch.setattr(Sampler, "step", watched)
    for breaks_at in (99, 4):
        folders.clear()
        sampler = Sampler(policy(context=400), TRAINED, 2, 400)
        with (
            pytest.raises(RuntimeError, match="out of memory")
            if breaks_at == 4
            else contextlib.nullcontext()
        ):
            sample_groups(
                sampler,
                [make_task(0, seed) for seed in range(3)],
                3,
                9,
                Limits(400, 3, 16),
                Sandbox(),
            )
        assert (
            (len(folders) == 9) == (breaks_at == 99)
            and most == 2
            and not any(folder.exists() for folder in folders)
        )
