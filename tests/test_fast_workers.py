"""Generation processes against the same in one process; weights on their way against the casts."""

import json
import math
import os
import pickle
import signal
import time
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import moe
from fast import workers as fast_workers
from fast.samplers import make_sampler
from moe import Model, ModelConfig
from rollout import InTurn, Limits, staleness
from sampling import TRAINED, same
from small import SIZES
from summarize import Compaction
from synth_tasks import make_task

CONFIG = ModelConfig(**SIZES | dict(vocab=TRAINED.vocab, layers=2, experts=4, context=400))
REAL = [make_task(0, seed) for seed in range(3)]


def weights(seed=0):
    """Random weights of a policy that calls tools and ends turns: the first number of every hidden
    state is large, and the head adds it to the logits of these control tokens."""
    torch.manual_seed(seed)
    model = Model(CONFIG)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=p.shape[-1] ** -0.5) if p.ndim > 1 else None
        model.embed.weight[:, 0] = 2.0
        for name, extra in (("<|call|>", 2.4), ("<|arg|>", 1.5), ("<|end|>", 2.0)):
            model.head.weight[TRAINED.id[name], 0] = extra
    return model.state_dict()


def settings_of(folder, **changes):
    """Of a generation process that reads the weights of this folder"""
    settings = dict(folder=folder, config=CONFIG, dtype=torch.float32, device="cpu")
    return settings | dict(tokenizer=TRAINED, group=1, limits=Limits(300)) | changes


def bits(t):
    return t.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    )


def test_a_base_and_its_deltas_give_the_weights_bit_for_bit():
    """Compared are bits: of zeros of either sign, the largest and smallest numbers, infinities and
    NaN, empty and single tensors, in several dtypes."""
    g = torch.Generator().manual_seed(0)
    edge = torch.tensor([0.0, -0.0, 1.0, -1.0, 3.3e38, 1e-40, math.inf, -math.inf, math.nan])
    for kind in (torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.uint8):
        draw = lambda: {
            "a": torch.randn(5, 7, generator=g).mul(50).abs().to(kind),
            "e": torch.zeros(0, 3, dtype=kind),
            "one": torch.randn((), generator=g).abs().to(kind),
            "same": torch.arange(6).to(kind),
            "edge": (edge if kind.is_floating_point else edge[:4].abs()).to(kind),
        }
        old, new = draw(), draw()
        new["edge"] = new["edge"].flip(0) if kind.is_floating_point else new["edge"]
        for before, after in (
            (old, new),
            (new, old),
            (fast_workers.zeros(new), new),
            (old, {k: -v for k, v in old.items()}),
            (old, old),
        ):
            got = fast_workers.apply_delta(before, fast_workers.encode_delta(before, after))
            assert all(
                got[k].dtype == v.dtype
                and got[k].shape == v.shape
                and torch.equal(bits(got[k]), bits(v))
                for k, v in after.items()
            )
    with pytest.raises(ValueError, match="delta of"):
        fast_workers.apply_delta(
            {"a": torch.zeros(3)},
            fast_workers.encode_delta({"a": torch.zeros(4)}, {"a": torch.ones(4)}),
        )


def test_uploads_of_real_updates_arrive_as_the_cast_weights_and_cost_what_changed(tmp_path):
    """Each step moves a fiftieth of the fp32 numbers; one reader takes every upload, one comes
    late; the casts are the oracle."""
    state, sizes = weights(), []
    publisher = fast_workers.Publisher(tmp_path, CONFIG, torch.bfloat16, every=4)
    settings = settings_of(tmp_path, dtype=torch.bfloat16)
    faithful = fast_workers.Generator(**settings)
    for version in range(3, 13):
        sizes.append(publisher.publish(version, state))
        late = fast_workers.Generator(**settings)
        for reader in (faithful, late):
            reader.refresh()
            held = reader.sampler.model.state_dict()
            assert reader.sampler.version == version and {t.dtype for t in held.values()} == {
                torch.bfloat16,
                torch.float32,
            }
            assert all(
                torch.equal(bits(held[name]), bits(state[name].to(held[name].dtype)))
                for name in state
            )
        for t in state.values():
            t.view(-1)[version::50] += 0.01 * torch.randn(len(t.view(-1)[version::50]))
    base, delta = sizes[0], sizes[1]
    assert (
        base["sync_full"] == sum(t.nbytes for t in held.values())
        and base["sync_bytes"] < 1.02 * base["sync_full"]
    )
    assert delta["sync_bytes"] < 0.1 * base["sync_bytes"] and 0.97 < delta["sync_same"] < 1
    assert sizes[4]["sync_bytes"] > 0.8 * base["sync_bytes"]  # version 7, the next base
    assert sorted(int(p.stem) for p in tmp_path.iterdir()) == list(range(7, 13))


def test_a_job_that_cannot_be_sent_ends_in_its_error_and_the_next_is_done(tmp_path):
    fast_workers.Publisher(tmp_path, CONFIG, torch.float32).publish(0, weights())
    workers = fast_workers.Workers(1, settings_of(tmp_path, limits=Limits(160, 2, 8)))
    try:
        with pytest.raises(Exception, match="lambda|pickle"):
            workers.submit([lambda: 0], [0], 0)[0][0].result(timeout=60)
        assert len(workers.submit(REAL[:1], [0], 0)[0][0].result(timeout=60)) == 1
    finally:
        workers.close()


def test_a_corrupted_upload_is_refused(tmp_path):
    fast_workers.Publisher(tmp_path, CONFIG, torch.float32).publish(0, weights())
    path = tmp_path / "00000000.base"
    path.write_bytes(bytes(16) + path.read_bytes()[16:])
    reader = fast_workers.Generator(**settings_of(tmp_path))
    with pytest.raises(ValueError, match="not the trainer's weights"):
        reader.refresh()


@pytest.mark.parametrize("draft", [0, 3])
def test_every_token_is_tagged_with_the_weights_that_chose_it_when_they_change_in_flight(
    tmp_path, draft
):
    """The head is rigged to choose the token 65 + its own first weight: the tokens tell the
    versions."""
    state = weights()
    publisher = fast_workers.Publisher(tmp_path, CONFIG, torch.float32)
    head = lambda version: {
        **state,
        "head.weight": torch.full_like(state["head.weight"], float(version)),
    }
    publisher.publish(0, head(0))
    more = dict(group=3, limits=Limits(400, 2, 40), temperature=0, draft=draft)
    generator = fast_workers.Generator(**settings_of(tmp_path, **more))
    model, step = generator.sampler.model, generator.sampler.step
    model.logits = lambda hidden: F.one_hot(
        (65 + model.head.weight[0, 0].long()).expand(len(hidden)), TRAINED.vocab
    ).float()

    def counted(rows):
        step(rows)
        if generator.sampler.steps in (7, 8, 21):  # 8: two uploads within two steps
            publisher.publish(
                generator.sampler.steps, head({7: 1, 8: 2, 21: 3}[generator.sampler.steps])
            )

    generator.sampler.step = counted
    (group,) = generator(REAL[:1], [0], 5)
    for turn in (t for rollout in group for t in rollout.turns if t.role == "assistant"):
        assert [{0: 0, 7: 1, 8: 2, 21: 3}[v] for v in turn.versions] == [
            t - 65 for t in turn.tokens[1:]
        ]
        assert len(turn.versions) == len(turn.logprobs) == 40 and turn.versions.tolist() == sorted(
            turn.versions
        )
        assert set(turn.versions) == ({0, 7, 8} if draft else {0, 7, 8, 21})
    if not draft:
        # Each of the 3 rollouts has 7, 1, 13 and 19 tokens of the four versions.
        assert Counter(staleness([group], 21)) == {21: 21, 14: 3, 13: 39, 0: 57}


def test_two_processes_give_the_rollouts_of_none_and_lose_nothing_when_one_is_killed(tmp_path):
    more = dict(group=3, limits=Limits(400, 14, 24), compact=Compaction(400, 280), rows=6)
    settings = settings_of(tmp_path, **more)
    publisher, tasks = fast_workers.Publisher(tmp_path, CONFIG, torch.float32), REAL
    publisher.publish(0, weights())
    alone, beside = fast_workers.Generator(**settings), fast_workers.Workers(2, settings)
    try:
        for version in (0, 1):
            publisher.publish(version, weights(version)) if version else None
            handle = beside.submit(tasks, range(3), version)
            # both are warm now: one is killed while it samples
            if version == 1:
                time.sleep(0.03)
                os.kill(beside.processes[0].pid, signal.SIGKILL)
            groups, expected = beside.collect(handle), alone(tasks, range(3), version)
            assert [[c.task for c in g] for g in groups] == [[t] * 3 for t in tasks]
            for a, b in zip((c for g in groups for c in g), (c for g in expected for c in g)):
                same(a, b)
                assert a.passed == b.passed and a.files == b.files
            assert not staleness(groups, version).any() and beside.restarts == (version > 0)
    finally:
        beside.close()
    assert sum(len(c.turns) > 2 for g in expected for c in g) >= 3


def test_two_steps_at_once_are_dealt_to_one_process_each(tmp_path):
    more = dict(group=3, limits=Limits(400, 14, 24), compact=Compaction(400, 280), rows=9)
    settings = settings_of(tmp_path, **more)
    publisher = fast_workers.Publisher(tmp_path, CONFIG, torch.float32)
    publisher.publish(0, weights())
    alone = fast_workers.Generator(**settings)
    beside = fast_workers.Workers(2, settings, steps_at_once=2)
    try:
        handles = [beside.submit(REAL, range(3), seed) for seed in (5, 6)]
        assert [len(dealt) for dealt in handles] == [1, 1]
        for seed, dealt in zip((5, 6), handles):
            groups, expected = beside.collect(dealt), alone(REAL, range(3), seed)
            for group, other in zip(groups, expected, strict=True):
                for rollout, twin in zip(group, other, strict=True):
                    same(rollout, twin)
        assert len(beside.processes) == 2
    finally:
        beside.close()
    # Three processes for two steps: each step keeps two of them busy.
    assert [fast_workers.Workers(n, {}, "", at_once).parts for n, at_once in ((3, 2), (1, 4))] == [
        2,
        1,
    ]


def test_the_plain_form_of_generation_yields_the_same_groups():
    """One process samples and updates in turn, with the plain sampler: the same tokens and counts
    under two versions of the weights, log-probs within 1e-5"""
    samplers = [
        make_sampler(CONFIG, torch.float32, "cpu", TRAINED, 400, 0.9, plain=plain)
        for plain in (True, False)
    ]
    plain, fast = (InTurn(sampler, 2, Limits(400, 3, 24)) for sampler in samplers)
    for version in (0, 1):
        for source in (plain, fast):
            assert source.publish(version, weights(version)) == {}  # nothing is sent
        found, twins = (
            source.collect(source.submit(REAL[:2], [0, 1], version)) for source in (plain, fast)
        )
        for group, twin_group in zip(found, twins):
            assert len(group) == 2
            for rollout, twin in zip(group, twin_group):
                same(rollout, twin)
                assert (rollout.passed, rollout.files) == (twin.passed, twin.files)
        for groups in (found, twins):
            assert not staleness(groups, version).any()


def test_processes_that_cannot_be_started_are_an_error_and_nobody_waits_for_them(monkeypatch):
    def fails(self, i):
        raise EOFError("the server that forks is gone")

    monkeypatch.setattr(fast_workers.Workers, "start", fails)
    workers = fast_workers.Workers(1, {})
    # Whoever asks a second time gets the error too.
    for _ in range(2):
        ((future, _),) = workers.submit(REAL, range(3), 0)
        with pytest.raises(RuntimeError, match="died three times"):
            future.result(timeout=30)


def test_the_rl_stage_asks_ahead_logs_staleness_and_syncs_and_leaves_transcripts(
    tmp_path, monkeypatch
):
    """Workers that finish the moment they are asked: with staleness 1, all tokens after the first
    step are exactly one update old."""
    import train

    class Prompt(fast_workers.Workers):
        def __init__(self, n, settings, patch, steps_at_once):
            self.generator, self.restarts = fast_workers.Generator(**settings), 0

        def submit(self, tasks, numbers, seed):
            return self.generator(tasks, numbers, seed)

        def collect(self, groups):
            return groups

    monkeypatch.setattr(fast_workers, "Workers", Prompt)
    words = "--scale=tiny --dim=32 --dtype=float32 --device=cpu --window=220 --max_turns=2".split()
    words += "--tasks_per_step=2 --group_size=2 --stage=rl --workers=1 --steps=3".split()
    words.append(f"--out={tmp_path}")
    for lag in (1, 0):
        run = train.Run(train.FLAGS.configure(train.FLAGS.parse(words), "rl"))
        run.build(TRAINED)
        source, logs = train.Reinforcement(run), []
        source.max_staleness = lag
        for step in range(3):
            logs.append({})
            sum(source.losses(step, logs[-1])).backward()
            with torch.no_grad():
                [p.view(-1)[::9].add_(0.01) for p in run.model.parameters()]
            # a resumed run trains on what was drawn ahead
            again = train.Reinforcement(run)
            again.load_state_dict(pickle.loads(pickle.dumps(source.state_dict())))
            assert [
                [t.instance_id for t in one.sample_tasks(step + 1)] for one in (again, source)
            ] == 2 * [[t.instance_id for t in source.sample_tasks(step + 1)]]
        assert [l["stale"] for l in logs] == [0, lag, lag] and [l["stalest"] for l in logs] == [
            0,
            lag,
            lag,
        ]
        assert logs[0]["sync_same"] == 0 and all(0.85 < l["sync_same"] < 0.95 for l in logs[1:])
        assert all(
            l["sync_bytes"] < 0.5 * logs[0]["sync_bytes"] < 0.5 * 1.02 * l["sync_full"]
            for l in logs[1:]
        )
        lines = [json.loads(line) for line in (tmp_path / "transcripts.jsonl").open()]
        assert (
            sorted({l["step"] for l in lines}) == [1, 2, 3]
            and len(lines) >= 6
            and len({l["task"] for l in lines}) == 3
        )
        assert all(
            m["versions"] == [max(0, l["step"] - 1 - lag)]
            for l in lines
            for m in l["messages"]
            if m["role"] == "assistant"
        )
        assert all(l["reward"] in [pytest.approx(r, abs=1e-3) for r in l["group"]] for l in lines)


def change_the_norm():
    """A patch as an experiment's: every norm doubles"""
    plain = moe.RMSNorm.forward
    moe.RMSNorm.forward = lambda self, x: 2 * plain(self, x)


def test_a_patch_of_the_book_acts_in_the_generation_processes_too(tmp_path):
    settings = settings_of(tmp_path, group=2, limits=Limits(400, 2, 24))
    fast_workers.Publisher(tmp_path, CONFIG, torch.float32).publish(0, weights())
    found = []
    for patch in ("", "test_fast_workers:change_the_norm"):
        workers = fast_workers.Workers(1, settings, patch)
        try:
            found.append(workers.collect(workers.submit(REAL[:1], [0], 0))[0])
        finally:
            workers.close()
    logprobs = [[turn.logprobs.tolist() for turn in group[0].turns[1:2]] for group in found]
    assert logprobs[0] != logprobs[1]
