"""Rollouts against re-scoring by the full forward, the same rollout alone, slow loops, and
hand-worked gradients."""

import copy
import json
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import regex
import torch

import fast.sampler
import feedback_distill
from eval import logprob_gaps
from experiments.summary import OldestTruncated
import rollout as rollout_module
from rollout import (
    CONTROLS,
    Call,
    Limits,
    Rollout,
    SPLIT,
    Sampler,
    Segment,
    Turn,
    Work,
    advantages,
    agent,
    demonstrate,
    flatten,
    grade,
    main,
    make_turn,
    pack,
    policy_loss,
    random_model,
    sample_from_logits,
    sample_groups,
)
from demos.kl_estimates import kl_estimates
from command.bpe import train_bpe
from summarize import Compaction
from synth_tasks import make_task
from repositories.audit import audit_rollout
from world.honeypot import unharden
from world.expert import InMemoryWorkspace, expert, hinted_moves, play
from repositories.verdict import judge
from world.sandbox import Sandbox
from world.task import Action, Task
from refusals import refuse
from sampling import BYTES, TASKS, TEXTS, TRAINED, graded_rollout, policy, sample, target_logprobs
from command import transcripts
import eval as eval_module
import length_penalty

# ---------------------------------------------------------------- tokenizer


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "trained"])
def test_decoding_what_was_encoded_is_the_identity_and_no_text_encodes_to_a_control_token(
    tokenizer,
):
    rng = random.Random(0)
    letters = [
        c
        for c in map(
            chr,
            [
                *range(0x300),
                *range(0x590, 0x600),
                *range(0x4E00, 0x4E40),
                *range(0x1F600, 0x1F640),
                0x200D,
                0xFEFF,
            ],
        )
    ]
    texts = [
        "",
        "\n\n    def f(x):\r\n\treturn  x_y_1\n",
        "  \u00a0\u2028 ",
        "e\u0301\u200d",
        *CONTROLS,
        "".join(CONTROLS),
        "<|end|",
        "<|call|>a<|arg|>",
    ]
    texts += [
        "".join(rng.choices(letters + list(CONTROLS), k=rng.randint(1, 60))) for _ in range(300)
    ]
    for text in texts:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert all(t < len(tokenizer.ranks) for t in tokens)
    assert sorted(tokenizer.id.values()) == list(range(len(tokenizer.ranks), tokenizer.vocab))


def naive_bpe(texts, merges):
    """The oracle for train_bpe: counts all pairs again before every merge"""
    words = [
        [bytes([b]) for b in word.encode()] for text in texts for word in regex.findall(SPLIT, text)
    ]
    ranks = {bytes([b]): b for b in range(256)}
    while len(ranks) < 256 + merges:
        counts = Counter(pair for word in words for pair in zip(word, word[1:]))
        if not counts:
            break
        a, b = max(counts, key=lambda pair: (counts[pair], pair))
        ranks.setdefault(a + b, len(ranks))
        for word in words:
            i = 0
            while i < len(word) - 1:
                if word[i] == a and word[i + 1] == b:
                    word[i : i + 2] = [a + b]
                i += 1
    return ranks


def test_training_the_tokenizer_equals_recounting_every_pair_before_every_merge():
    texts = TEXTS[:2] + ["aaaa aaa aaaaaaa banana bananas", "été ÉTÉ 日本日本日"]
    assert train_bpe(texts, 256 + 150, SPLIT) == naive_bpe(texts, 150)


def test_a_text_too_small_for_the_vocabulary_gives_fewer_tokens_and_invents_none():
    assert train_bpe(["banana banana"], 1000, SPLIT) == naive_bpe(["banana banana"], 700)


def test_tiktoken_merges_a_word_in_the_order_of_the_ranks():
    """The oracle merges the pair of lowest rank until none is left."""
    for word in set(regex.findall(SPLIT, TEXTS[0])):
        parts = [bytes([b]) for b in word.encode()]
        while len(parts) > 1:
            rank, i = min(
                (TRAINED.ranks.get(a + b, math.inf), i)
                for i, (a, b) in enumerate(zip(parts, parts[1:]))
            )
            if rank == math.inf:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        assert TRAINED.encode(word) == [TRAINED.ranks[p] for p in parts]


# ---------------------------------------------------------------- transcript


def test_what_is_written_as_an_action_is_read_back_the_same():
    calls = [
        ("edit_file", ("a.py", "", "def f(x):\n    return x * 3 + 2\n")),
        ("search_codebase", ("<|call|> <|end|> é日🙂",)),
        ("odd", ()),
        ("", ("", "")),
    ]
    for tokenizer in (BYTES, TRAINED):
        for n in range(5):
            body = tokenizer.write_action("Look <|arg|> up.", calls[:n])
            text, read = tokenizer.read_action(body)
            assert (
                text == "Look <|arg|> up." and [(c.name, tuple(c.args)) for c in read] == calls[:n]
            )
            assert body.count(tokenizer.id["<|call|>"]) == n and body[-1] == tokenizer.id["<|end|>"]


def test_arguments_before_any_call_and_an_unfinished_turn_read_as_far_as_they_go():
    call, arg, end = (TRAINED.id[n] for n in ("<|call|>", "<|arg|>", "<|end|>"))
    x = TRAINED.encode("x")
    assert TRAINED.read_action([arg, *x, end]) == ("", [])
    assert TRAINED.read_action([*x, call, *x, arg]) == ("x", [Call("x", [""])])
    assert TRAINED.read_action([TRAINED.id["<|user|>"], *x]) == ("<|user|>x", [])
    assert TRAINED.read_action([]) == ("", [])


def test_the_mask_is_one_exactly_where_a_token_was_sampled_stop_token_included():
    t, enc = TRAINED.id, TRAINED.encode
    act = [t["<|assistant|>"], *enc("go"), t["<|call|>"], *enc("x"), t["<|end|>"]]
    turns = [
        make_turn(TRAINED, "user", "do it"),
        make_turn(TRAINED, "summary", "1\nleft: a.f"),
        make_turn(TRAINED, "hint", "Tools: x"),
        Turn("assistant", act, logprobs=np.arange(1, len(act), dtype=np.float32)),
        make_turn(TRAINED, "tool", "ok"),
        make_turn(TRAINED, "query", "Summarize."),
        Turn("assistant", [t["<|assistant|>"], *enc("cut off")]),
    ]
    tokens, mask, logprobs, index = flatten(Segment(turns))
    expected = []
    for turn in turns:
        expected += [
            (token, turn.role == "assistant" and i > 0) for i, token in enumerate(turn.tokens)
        ]
    assert [(int(a), bool(b)) for a, b in zip(tokens, mask)] == expected
    assert (
        logprobs[index == 3].tolist() == [0, *range(1, len(act))] and not logprobs[index != 3].any()
    )
    assert (
        mask[index == 3].tolist() == [0] + [1] * (len(act) - 1)
        and tokens[index == 3][-1] == t["<|end|>"]
    )
    assert len(tokens) == len(mask) == len(logprobs) == len(index) == len(Segment(turns))


def test_a_long_output_is_cut_to_its_limit_with_a_note():
    for most in (12, 40, 1000):
        turn = make_turn(BYTES, "tool", "y" * 100, most)
        # The note that says how much was cut counts as part of the output.
        assert min(most, 100) + 1 <= len(turn.tokens) <= min(most, 100) + 2
        assert ("cut]" in BYTES.decode(turn.tokens)) == (most < 100)


# ---------------------------------------------------------------- the agent, driven by hand


def drive(play, bodies):
    """Plays an agent with given bodies -> (rollout, the Requests it made, the context as a sampler
    would hold it at each)."""
    requests, contexts, context, asked = [], [], [], next(play)
    bodies = iter(bodies)
    while True:
        try:
            if isinstance(asked, Work):
                asked.run()
                asked = play.send(None)
                continue
            context = asked.tokens if asked.restart else context + asked.tokens
            requests.append(asked)
            contexts.append(list(context))
            body = next(bodies)[: asked.room]
            context = context + body
            asked = play.send((body, np.full(len(body), -1.0, dtype=np.float32), 7))
        except StopIteration as end:
            return end.value, requests, contexts


def by_bytes(text):
    return list(text.encode())


def test_a_split_that_the_tokenizer_would_never_make_survives_to_the_loss():
    call, arg, end = (TRAINED.id[n] for n in ("<|call|>", "<|arg|>", "<|end|>"))
    odd = [*by_bytes("Look"), call, *by_bytes("read_file"), arg, *by_bytes("a.py"), end]
    # The tokenizer itself would write this action with fewer tokens.
    assert len(odd) > len(TRAINED.write_action("Look", [("read_file", ("a.py",))]))
    # Two of the three bytes of a character.
    broken = [0xE2, 0x82, end]
    rollout, _, contexts = drive(
        agent(TASKS[0], TRAINED, InMemoryWorkspace(TASKS[0]), Limits(400)), [odd, broken]
    )
    assert rollout.turns[2].text == "def f():\n    pass\n" and rollout.finished
    tokens, mask, _, _ = flatten(rollout.segments[0])
    assert tokens[mask == 1].tolist() == odd + broken
    batch = pack(rollout.segments, [1.0])
    assert batch["targets"][batch["mask"] == 1].tolist() == odd + broken
    assert [set(turn.versions) for turn in rollout.turns if turn.role == "assistant"] == [{7}, {7}]


def test_the_ids_of_an_segment_only_grow_and_are_what_the_sampler_saw():
    act = lambda *calls: TRAINED.write_action("", calls)
    bodies = [
        act(("read_file", ("a.py",)), ("nothing", ())),
        act(("edit_file", ("a.py", "", "x = 1\n"))),
        act(),
    ]
    rollout, requests, contexts = drive(
        agent(TASKS[0], TRAINED, InMemoryWorkspace(TASKS[0]), Limits(400)), bodies
    )
    ids = flatten(rollout.segments[0])[0].tolist()
    for shorter, longer in zip(contexts, contexts[1:] + [ids]):
        assert longer[: len(shorter)] == shorter and len(longer) > len(shorter)
    assert [r.restart for r in requests] == [True, False, False]
    assert [(c.name, c.error) for t in rollout.turns for c in t.calls] == [
        ("read_file", ""),
        ("nothing", "unknown_tool"),
        ("edit_file", ""),
    ]
    assert [t.text for t in rollout.turns if t.role == "tool"][
        1
    ] == "Tool not found: nothing" and rollout.files["a.py"].endswith("x = 1\n")
    assert rollout.finished and rollout.segments[0].turns[-1].role == "assistant"


def test_bad_calls_are_told_apart_and_answered():
    limited = Task("t", "x", {"a.py": ""}, {}, tools=("read_file",))
    calls = [
        ("read_file", ()),
        ("read_file", ("none.py",)),
        ("read_file", ("a.py",)),
        ("edit_file", ("a.py", "", "x")),
        ("ls", ("a",)),
    ]
    rollout, _, _ = drive(
        agent(limited, TRAINED, InMemoryWorkspace(limited), Limits(900)),
        [TRAINED.write_action("", calls), TRAINED.write_action("", [])],
    )
    assert [c.error for c in rollout.turns[1].calls] == [
        "bad_arguments",
        "failed",
        "",
        "unknown_tool",
        "unknown_tool",
    ]
    stats = length_penalty.count_effort(rollout)
    names = "bad_tools", "bad_arguments", "calls", "turns"
    assert [stats[name] for name in names] == [2, 1, 5, 2]


def test_commands_beyond_the_limit_are_refused_and_other_calls_are_not():
    task = Task(
        "t", "x", {"a.py": "", "tests.py": "print('ran')\n"}, {}, tools=("read_file", "run_command")
    )
    act = lambda *names: TRAINED.write_action(
        "",
        [(name, ("python tests.py" if name == "run_command" else "a.py",)) for name in names],
    )
    bodies = [
        act("run_command", "read_file"),
        act("run_command", "run_command"),
        act("run_command", "read_file"),
        act(),
    ]
    said = lambda commands: [
        turn.text
        for turn in drive(
            agent(task, TRAINED, InMemoryWorkspace(task), Limits(900, commands=commands)), bodies
        )[0].turns
        if turn.role == "tool"
    ]
    for commands in (0, 1, 2, 3, 9):
        ran = [i < commands or not commands for i in range(4)]
        ran = ["ran" if right else "No more commands." for right in ran]
        assert said(commands) == [ran[0], "", ran[1], ran[2], ran[3], ""]
    without = Task("t", "x", {"a.py": ""}, {}, tools=("read_file",))
    rollout, _, _ = drive(
        agent(without, TRAINED, InMemoryWorkspace(without), Limits(900, commands=1)),
        [act("run_command"), act("run_command"), act()],
    )
    assert [call.error for turn in rollout.turns for call in turn.calls] == ["unknown_tool"] * 2


def test_effort_is_counted_token_by_token_as_worked_by_hand():
    call, end = BYTES.id["<|call|>"], BYTES.id["<|end|>"]
    bodies = [[*by_bytes("think"), call, *by_bytes("zz"), end], [*by_bytes("done!"), end]]
    rollout, _, _ = drive(agent(TASKS[2], BYTES, InMemoryWorkspace(TASKS[2]), Limits(200)), bodies)
    stats = length_penalty.count_effort(rollout)
    output = len("Tool not found: zz") + 1  # <|end|> counts
    assert {
        k: stats[k]
        for k in (
            "thinking_tokens",
            "call_tokens",
            "output_tokens",
            "final_tokens",
            "calls",
            "turns",
            "sampled",
            "summaries",
        )
    } == {
        "thinking_tokens": 5,
        "call_tokens": 4,
        "output_tokens": output,
        "final_tokens": 6,
        "calls": 1,
        "turns": 2,
        "sampled": 15,
        "summaries": 0,
    }
    assert stats["total"] == stats["context"] == 3 + (1 + 9) + (1 + output) + (1 + 6)


@pytest.mark.parametrize("window", [30, 61, 90, 140])
def test_the_window_is_never_exceeded_and_a_truncated_rollout_is_not_finished(window):
    rng = random.Random(window)
    for trial in range(60):
        compact = (
            None,
            Compaction(window, int(0.6 * window)),
            OldestTruncated(window, int(0.6 * window)),
        )[trial % 3]
        endless = (
            [
                *rng.choices(range(97, 123), k=rng.randint(0, 30)),
                BYTES.id["<|call|>"],
                *by_bytes("read_file"),
                BYTES.id["<|arg|>"],
                *by_bytes(rng.choice(("a.py", "big.py"))),
                BYTES.id["<|end|>"],
            ]
            for _ in range(99)
        )
        task = Task("t", "x" * rng.randint(1, 25), {"a.py": "x", "big.py": "y" * 500}, {})
        rollout, requests, contexts = drive(
            agent(task, BYTES, InMemoryWorkspace(task), Limits(window, 12, 40), compact), endless
        )
        assert all(
            2 <= r.room <= 40 and len(c) + r.room <= window for r, c in zip(requests, contexts)
        )
        assert all(0 < len(e) <= window for e in rollout.segments), [
            len(e) for e in rollout.segments
        ]
        assert (
            not rollout.finished and len([t for t in rollout.turns if t.role == "assistant"]) <= 12
        )


def test_a_turn_without_a_stop_token_ends_the_rollout_and_does_not_submit():
    rollout, _, _ = drive(
        agent(TASKS[0], BYTES, InMemoryWorkspace(TASKS[0]), Limits(200, 5, 6)),
        [by_bytes("I am done with this")],
    )
    assert (
        not rollout.finished and len(rollout.turns) == 2 and len(rollout.turns[1].tokens) == 1 + 6
    )
    assert flatten(rollout.segments[0])[1].sum() == 6


@pytest.mark.parametrize(
    "tail", [("<|call|>",) * 6, ("<|call|>", "edit_file", "<|arg|>"), ("<|call|>", "read_file")]
)
def test_the_calls_of_a_turn_that_was_cut_off_are_not_run_and_no_rule_stumbles_over_them(tail):
    read, cut = BYTES.write_action("", [("read_file", ("a.py",))]), [
        BYTES.id[w] if w in BYTES.id else by_bytes(w) for w in tail
    ]
    cut = sum(([w] if isinstance(w, int) else w for w in cut), [])
    rollout, _, _ = drive(
        agent(
            TASKS[0], BYTES, InMemoryWorkspace(TASKS[0]), Limits(400, 9, max(len(read), len(cut)))
        ),
        [read, cut[:]],
    )
    last = rollout.turns[-1]
    assert (
        not rollout.finished
        and last.role == "assistant"
        and last.calls
        and not any(call.output for call in last.calls)
    )
    assert {call.error for call in last.calls} == {"failed"} and feedback_distill.detect(
        rollout
    ) == []
    assert len(
        transcripts.describe_rollout(rollout, BYTES)[0]["messages"][-1]["tool_calls"]
    ) == len(last.calls)


def test_a_demonstration_whose_task_alone_outgrows_the_window_is_over_at_once():
    rollout = demonstrate(make_task(7, 1), BYTES, random.Random(0), Limits(40))
    assert not rollout.finished and [turn.role for turn in rollout.turns] == ["user"]


# ---------------------------------------------------------------- sampling one token


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_tokens_come_with_the_frequencies_that_their_log_probs_claim(temperature):
    """Chi-square against the log-probs returned, and against a softmax written as a loop."""
    n, logits = 40_000, torch.randn(9, generator=torch.Generator().manual_seed(3)) * 1.5
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(4))
    tokens, logp = sample_from_logits(logits.expand(n, 9), uniform, temperature)
    weights = [math.exp(float(l) / temperature) for l in logits]
    p = [w / sum(weights) for w in weights]
    torch.testing.assert_close(logp.exp(), torch.tensor(p)[tokens], atol=1e-6, rtol=1e-5)
    expected, seen = np.array(p) * n, np.bincount(tokens, minlength=9)
    chi = ((seen - expected) ** 2 / expected).sum()
    # the 0.1 % quantile at 8 degrees of freedom
    assert chi < 26.1


def test_the_ends_of_the_uniform_draw_never_pick_a_token_that_may_not_be_drawn():
    logits = torch.tensor([[-torch.inf, 2.0, 1.0, -torch.inf, -torch.inf]]).expand(3, 5)
    # a draw below 1 that fp32 rounds to 1
    tokens, logp = sample_from_logits(logits, torch.tensor([0.0, 0.5, 1 - 1e-9]))
    assert set(tokens.tolist()) <= {1, 2} and torch.isfinite(logp).all()
    assert sample_from_logits(logits, torch.tensor([0.0, 0.5, 0.9]), temperature=0)[0].tolist() == [
        1,
        1,
        1,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [5e-324, 1.4e-45, 1e-38, 1e-30, 1e-8, 1e-6, 1e-5])
def test_at_the_cold_end_the_largest_logit_is_drawn_with_a_finite_log_prob(temperature, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 3000, generator=generator)
    logits[::2] *= 1e4
    logits[:, 17] -= torch.inf  # a token that may not be drawn
    # no ties in bf16
    logits[torch.arange(64), torch.randint(18, 3000, (64,), generator=generator)] = (
        logits.amax(-1) * 1.1 + 1
    )
    uniform = torch.rand(64, generator=generator)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-24])
    tokens, logp = sample_from_logits(logits.to(dtype), uniform, temperature)
    assert (
        tokens.equal(logits.argmax(-1)) and logp.dtype == torch.float32 and logp.abs().max() < 1e-3
    )


def test_at_the_hot_end_all_tokens_are_alike_and_what_is_no_temperature_is_refused():
    logits, uniform = 10 * torch.randn(
        4, 8, generator=torch.Generator().manual_seed(0)
    ), torch.tensor([0.0, 0.3, 0.6, 0.99])
    for temperature in (1e30, 1e300, 1.7e308):
        tokens, logp = sample_from_logits(logits, uniform, temperature)
        assert tokens.tolist() == [0, 2, 4, 7] and logp.tolist() == pytest.approx(
            [-math.log(8)] * 4
        )
    for temperature in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature"):
            sample_from_logits(logits, uniform, temperature)


def test_temperatures_of_every_day_give_the_bits_that_they_gave():
    """The plain quotient is the oracle"""
    logits, uniform = torch.randn(300, 700, generator=torch.Generator().manual_seed(0)), torch.rand(
        300, generator=torch.Generator().manual_seed(1)
    )
    for temperature in (1.0, 0.95, 0.5, 1e-3, 2.0):
        p = (logits / temperature).softmax(-1)
        mass = p.cumsum(-1)
        tokens = torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True).clamp(
            max=699
        )[:, 0]
        found, logp = sample_from_logits(logits, uniform, temperature)
        assert found.equal(tokens) and logp.equal(p[torch.arange(300), tokens].log())


# ---------------------------------------------------------------- the sampler


@pytest.mark.parametrize("kind", [Sampler, fast.sampler.Sampler], ids=["plain", "fast"])
def test_a_task_that_does_not_fit_the_window_ends_at_once_and_leaves_the_others_alone(
    answers, kind
):
    huge = Task("huge", "word " * 400, {}, {})
    rollouts = sample(kind(policy(), TRAINED, window=160), [huge, TASKS[0], huge], [0, 1, 2])
    assert [c.task.instance_id for c in rollouts] == ["huge", "t0", "huge"]
    assert (
        not rollouts[0].finished
        and flatten(rollouts[0].segments[0])[1].sum()
        == 0
        < flatten(rollouts[1].segments[0])[1].sum()
    )


@pytest.mark.parametrize("kind", [Sampler, fast.sampler.Sampler], ids=["plain", "fast"])
def test_rollouts_in_real_directories_are_judged_by_the_hidden_tests(kind):
    tasks, sandbox = [make_task(0, 1), make_task(1, 2)], Sandbox()
    sampler = kind(policy(context=400), TRAINED, window=400)
    groups = sample_groups(sampler, tasks, 3, 9, Limits(400, 3, 16), sandbox)
    assert [[c.task for c in g] for g in groups] == [[tasks[0]] * 3, [tasks[1]] * 3]
    for rollout in (c for g in groups for c in g):
        grade(rollout)
        assert rollout.files and rollout.stats["turns"] == sum(
            t.role == "assistant" for t in rollout.turns
        )
        assert rollout.reward == float(judge(rollout.task, rollout.files, sandbox).solved) == 0.0
    # The same path with the solution of each task in the policy's place: the reward is 1.
    scripted = copy.copy(sampler)
    scripted.run = lambda agents, seeds, on_end, patient: [end(a, on_end) for a in agents]

    def end(play, on_end):
        first, zeros = next(play), np.zeros(4000)
        task = next(
            t
            for t in tasks
            if make_turn(TRAINED, "user", t.problem_statement).tokens == first.tokens[:-1]
        )
        edits = [("edit_file", (path, "", "\n\n" + text)) for path, text in task.solution.items()]
        try:
            work = play.send((TRAINED.write_action("", edits), zeros, 0))
            work.run()
            play.send(None)
            play.send((TRAINED.write_action("Done.", []), zeros, 0))
        except StopIteration as over:
            on_end(over.value)
            return over.value

    solved = sample_groups(scripted, tasks, 2, 0, Limits(4000), sandbox)
    for rollout in (c for g in solved for c in g):
        grade(rollout)
        assert rollout.passed and rollout.solved and rollout.reward == 1.0


@pytest.mark.parametrize(
    "passed, finished, reward", [(1, 1, 1 - 0.068), (0, 1, 0.0), (1, 0, 0.0), (0, 0, 0.0)]
)
def test_what_a_limit_cut_short_is_not_solved_and_what_is_not_solved_pays_nothing(
    passed, finished, reward
):
    rollout = graded_rollout(passed, finished, length_penalty.Price(0.4, q=0.0, budget=40.0))
    assert rollout.stats["effort"] == pytest.approx(6.8) and rollout.stats["turns"] == 2
    assert rollout.reward == pytest.approx(reward) and rollout.solved == (passed and finished)
    assert graded_rollout(passed, finished, length_penalty.FREE).reward == (passed and finished)


@pytest.mark.parametrize("kind", [Sampler, fast.sampler.Sampler], ids=["plain", "fast"])
def test_scoring_again_takes_the_recorded_experts_or_the_models_own(kind):
    model = random_model(TRAINED, dim=32, layers=3, heads=2, kv_lora=16, experts=4)
    model = fast.accelerate(model) if kind is fast.sampler.Sampler else model
    (group,) = sample_groups(
        kind(model, TRAINED, window=400), [make_task(0, 1)], 1, 9, Limits(400, 3, 40), Sandbox()
    )
    # The oracle is the sampler's own log-probs: they are reproduced with the experts it recorded,
    # and no longer when the record names other experts.
    segment, far = group[0].segments[0], lambda **how: float(
        logprob_gaps(model, segment, **how).abs().max()
    )
    assert far() < 1e-4
    segment.routes = np.where(segment.routes < 0, -1, (segment.routes + 1) % 4)
    assert far() > 1e-3 and far(replay=False) < 1e-4


# ---------------------------------------------------------------- demonstrations


def hint_for(task, action=None):
    return f"Reminder: Available tools: {' '.join(task.tools)}"


def test_without_its_hints_a_demonstration_has_the_ids_of_one_that_never_went_wrong():
    """The oracle is the same demonstration without hints, which makes the wrong calls. Without
    those and their answers it must equal the hinted one without its hints."""
    hinted_turns = 0
    for seed in range(60):
        task = make_task(seed % 6, seed)
        play = lambda hints: feedback_distill.demonstrate_with_hints(
            task,
            TRAINED,
            random.Random(seed),
            Limits(10**6, 999),
            1.0,
            None,
            {"unavailable_tool": hint_for},
            hints,
        )
        hinted, plain = play(1.0), play(0.0)
        hints = [t for t in hinted.turns if t.role == "hint"]
        hinted_turns += len(hints)
        assert all(t.text == hint_for(task) for t in hints) and not any(
            t.role == "hint" for t in plain.turns
        )
        assert not any(c.error == "unknown_tool" for t in hinted.turns for c in t.calls)
        kept, wrong = [], 0
        for turn in plain.turns:
            if any(c.error == "unknown_tool" for c in turn.calls):
                wrong = len(turn.calls)
            elif wrong and turn.role == "tool":
                wrong -= 1
            else:
                kept += turn.tokens
        assert [t for turn in hinted.turns if turn.role != "hint" for t in turn.tokens] == kept
        above = [b for a, b in zip(hinted.turns, hinted.turns[1:]) if a.role == "hint"]
        assert all(b.role == "assistant" for b in above) and len(above) == len(hints) == sum(
            bool(t.calls) and any(c.error == "unknown_tool" for c in t.calls) for t in plain.turns
        )
    assert hinted_turns > 20


def test_a_hint_says_what_the_rule_would_have_said_of_the_flawed_turn_in_whose_place_the_right_one_stands():
    said, sandbox, detect = Counter(), Sandbox(), feedback_distill.detect
    remind = feedback_distill.REMINDERS
    for seed in range(60):
        task = make_task(seed % 6, seed)
        hinted, plain = (
            feedback_distill.demonstrate_with_hints(
                task, TRAINED, random.Random(seed), Limits(10**6, 999), 1.0, None, remind, hints
            )
            for hints in (1.0, 0.0)
        )
        rng = random.Random(seed)
        moves = expert(task, rng, planted=remind)
        moves = hinted_moves(task, moves, rng, remind, 0.0, 0.0, {})
        story = play(moves, InMemoryWorkspace(task))
        flaws = [action.flaw for action, _ in story]
        mine = [i for i, turn in enumerate(plain.turns) if turn.role == "assistant"]
        # Every planted flaw is found by its rule. What is found beside is how the expert works.
        for i, flaw in zip(mine, flaws, strict=True):
            found = {name for name in remind if i in {h.turn for h in detect(plain, (name,))}}
            assert flaw in found or not flaw
            beside = {"repetition", "unfinished"}
            # Who gives up says of nothing that it is done.
            beside |= {"communication"} if flaw == "unfinished" else set()
            assert found - {flaw} <= beside
        # Of flaws in a row the last one's hint stands above the right turn. In the place of an edit
        # with a comment the same edit without one is right.
        texts = []
        for flaw, following in zip(flaws, [*flaws[1:], ""]):
            if flaw == "code_style" or flaw and not following:
                texts.append(remind[flaw](task, Action(hinted.turns[-1].text)))
        theirs = [turn.text for turn in hinted.turns if turn.role == "hint"]
        if flaws[-1] == "unfinished":
            # The plain one has ended, the hinted one goes on.
            assert theirs[: len(texts) - 1] == texts[:-1]
        else:
            assert theirs == texts
            # It names what the rule would have named of the files.
            if flaws[-1] == "communication":
                assert theirs[-1] == detect(plain, ("communication",))[-1].text
            # No other flaw decides whether the task is solved.
            files = hinted.files, plain.files
            assert len({judge(task, one, sandbox).solved for one in files}) == 1
        assert {hint.kind for hint in detect(hinted)} <= {"repetition", "unfinished"}
        said.update(flaws)
    assert said.keys() == {"", *remind} and min(said.values()) > 3


def test_neutral_hints_of_every_kind_stand_above_calls_and_final_messages_alike():
    above = {"call": Counter(), "final": Counter()}
    for seed in range(60):
        remind = feedback_distill.REMINDERS
        rollout = feedback_distill.demonstrate_with_hints(
            make_task(seed % 6, seed),
            TRAINED,
            random.Random(seed),
            Limits(10**6, 999),
            0.0,
            None,
            remind,
            0.3,
            0.5,
        )
        for turn, following in zip(rollout.turns, rollout.turns[1:]):
            if turn.role == "hint":
                above["call" if following.calls else "final"][turn.text[10:15]] += 1
    for kinds in above.values():
        assert len(kinds) == 6 and min(kinds.values()) > 0.5 * sum(kinds.values()) / 6


def test_a_demonstration_is_the_same_transcript_that_the_real_workspace_gives():
    from world.workspace import Workspace

    for level in (1, 4):
        task, sandbox = make_task(level, 3), Sandbox()
        rollout = demonstrate(task, TRAINED, random.Random(1), Limits(10**6, 999))
        bodies = [t.tokens[1:] for t in rollout.turns if t.role == "assistant"]
        with Workspace(task, sandbox) as workspace:
            real, _, _ = drive(agent(task, TRAINED, workspace, Limits(10**6, 999, 10**6)), bodies)
        assert [t.tokens for t in real.turns] == [
            t.tokens for t in rollout.turns
        ] and real.files == rollout.files


def test_in_a_careless_world_the_expert_now_and_then_takes_the_answer_and_the_audit_counts_exactly_those_rollouts():
    took = []
    for i in range(90):
        clean = make_task(i % 6, i)
        for task in (clean, unharden(clean)):
            rollout = demonstrate(task, TRAINED, random.Random(i), Limits(10**6, 999))
            read = [
                call
                for turn in rollout.turns
                for call in turn.calls
                if any(".mypy_cache" in argument for argument in call.args)
            ]
            audit_rollout(rollout)
            assert eval_module.has_cheat(rollout) == bool(read) and all(
                call.name == "read_file" and not call.error for call in read
            )
            took.append((task is clean, bool(read)))
    counts = Counter(took)
    assert not counts[True, True] and 3 <= counts[False, True] <= 20


@pytest.mark.parametrize(
    "moves, expected",
    [
        ("e t", False),
        ("t e", True),
        ("e", True),
        ("e t e", True),
        ("e r", True),
        ("r e t", False),
        ("e t x", False),
        ("", True),
    ],
)
def test_a_submission_is_blind_unless_green_tests_came_after_the_last_edit(moves, expected):
    command = "python tests.py"
    made = {
        "e": Call("edit_file", ["a.py", "", "x"], "ok"),
        "t": Call("run_command", [command], "3 passed, 0 failed"),
        "r": Call("run_command", [command], "a.f(1) is wrong\n2 passed, 1 failed"),
        "x": Call("edit_file", ["a.py", "y", "x"], "no", "failed"),
    }
    turns = [Turn("assistant", [0], calls=[made[move]]) for move in moves.split()]
    rollout = Rollout(Task("t", "", {}, {}, test_command=command), [Segment(turns)], finished=True)
    assert eval_module.submitted_untested(rollout) == expected
    rollout.finished = False
    assert not eval_module.submitted_untested(rollout)
    rollout.finished, rollout.task = True, Task("t", "", {}, {}, tools=("edit_file",))
    assert not eval_module.submitted_untested(rollout)


# ---------------------------------------------------------------- objective


def test_advantages_are_centred_not_scaled_and_a_group_of_equals_gives_zeros():
    np.testing.assert_allclose(advantages([1, 0, 0, 1]), [0.5, -0.5, -0.5, 0.5])
    # A single small deviation stays small, because nothing divides by the standard deviation.
    np.testing.assert_allclose(advantages([1, 1, 1, 0.9]), [0.025, 0.025, 0.025, -0.075])
    assert (advantages([0.3] * 8) == 0).all() and (advantages([1.0]) == 0).all()


def turns(*parts):
    """Segments by hand: ("user", 3) is a given turn of 3 tokens, ("assistant", 4) a sampled one,
    log-probs -.1, -.2 ..."""
    rng = np.random.default_rng(len(parts))
    return Segment(
        [
            Turn(
                role,
                rng.integers(0, 7, n).tolist(),
                logprobs=-0.1 * np.arange(1, n, dtype=np.float32) if role == "assistant" else None,
            )
            for role, n in parts
        ]
    )


def test_packed_positions_predict_the_next_token_and_carry_its_mask_log_prob_and_advantage():
    segments = [
        turns(("user", 3), ("assistant", 4), ("tool", 2), ("assistant", 3)),
        turns(("user", 2), ("assistant", 3)),
    ]
    segments[0].routes = np.arange(12 * 2 * 2).reshape(12, 2, 2).astype(np.int16)
    batch = pack(segments, [2.0, -1.0], multiple=8)
    assert batch["tokens"].shape == (2, 16)
    for i, segment in enumerate(segments):
        tokens, mask, logprobs, _ = flatten(segment)
        for t in range(16):
            inside, target = t < len(tokens), t + 1 < len(tokens)
            assert batch["tokens"][i, t] == (tokens[t] if inside else -1)
            assert batch["targets"][i, t] == (tokens[t + 1] if target else 0)
            assert batch["mask"][i, t] == (mask[t + 1] if target else 0)
            assert batch["logprobs"][i, t] == (logprobs[t + 1] if target else 0)
            assert batch["advantage"][i, t] == (mask[t + 1] * (2.0, -1.0)[i] if target else 0)
    assert pack(segments, [1, 1])["tokens"].shape == (2, 12)
    experts = pack(segments, [2.0, -1.0], multiple=8)["routes"]
    assert (
        torch.equal(experts[0, :12], torch.from_numpy(segments[0].routes))
        and (experts[0, 12:] == -1).all()
    )
    # The second segment has no record of its experts (-1), and the first keeps its own.
    assert (experts[1] == -1).all()
    segments[1].routes = np.zeros((5, 2, 2), dtype=np.int16)
    experts = pack(segments, [2.0, -1.0], multiple=8)["routes"]
    assert (experts[1, :5] == 0).all() and (experts[1, 5:] == -1).all()
    assert pack([turns(("user", 2))], [0.0])["routes"] is None


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_gradient_of_the_loss_is_the_one_worked_by_hand_and_zero_where_nothing_was_sampled(
    beta,
):
    torch.manual_seed(0)
    batch = pack(
        [
            turns(("user", 3), ("assistant", 4), ("tool", 2), ("assistant", 3)),
            turns(("user", 2), ("assistant", 3)),
        ],
        [0.75, -0.25],
    )
    logits = torch.randn(2, 12, 7, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(2, 12).double()
    logp = target_logprobs(logits, batch["targets"])
    policy_loss(logp, batch, normaliser=50.0, reference=reference, beta=beta).backward()
    p, expected = logits.detach().softmax(-1), torch.zeros(2, 12, 7, dtype=torch.float64)
    for i, A in enumerate((0.75, -0.25)):
        for t in range(12):
            y = int(batch["targets"][i, t])
            k1 = math.log(p[i, t, y]) - float(reference[i, t])
            for v in range(7):
                # d(-A log p_y)/dz_v = A (p_v - [v = y])
                if batch["mask"][i, t]:
                    expected[i, t, v] = (A - beta * k1) * (float(p[i, t, v]) - (v == y)) / 50.0
    torch.testing.assert_close(logits.grad, expected, atol=1e-9, rtol=1e-6)
    assert (logits.grad[batch["mask"] == 0] == 0).all() and (
        logits.grad.abs().sum(-1)[batch["mask"] == 1] > 0
    ).all()


def test_the_stop_token_is_trained():
    end = TRAINED.id["<|end|>"]
    rollout, _, _ = drive(
        agent(TASKS[0], TRAINED, InMemoryWorkspace(TASKS[0]), Limits(200)),
        [TRAINED.write_action("", [("x", ())]), TRAINED.write_action("ok", [])],
    )
    batch = pack(rollout.segments, [1.0])
    logits = torch.zeros(*batch["tokens"].shape, TRAINED.vocab, requires_grad=True)
    policy_loss(target_logprobs(logits, batch["targets"]), batch, 1.0).backward()
    stops = (batch["targets"] == end) & (batch["mask"] == 1)
    assert stops.sum() == 2 and (logits.grad[stops][:, end] < 0).all()


def test_every_segment_of_a_rollout_gets_gradient_from_the_same_scalar():
    """The gradient on each sampled token is worked by hand: with logits of zero it is the same
    number everywhere."""
    act = lambda text, calls=(): TRAINED.write_action(text, calls)
    read = [("read_file", ("a.py",))]
    bodies = [
        act("one", read),
        act("plan <|summary|>left"),
        act("a longer second thought", read),
        act("<|summary|>b"),
        act("done"),
    ]
    # A trigger of 1 token: a summary is asked for after every turn with calls.
    compact = Compaction(400, 1)
    rollout, requests, _ = drive(
        agent(TASKS[0], TRAINED, InMemoryWorkspace(TASKS[0]), Limits(400), compact), bodies
    )
    assert (
        len(rollout.segments) == 3
        and len({len(e) for e in rollout.segments}) == 3
        and rollout.finished
    )
    assert [(r.restart, r.summary) for r in requests] == [
        (True, False),
        (False, True),
        (True, False),
        (False, True),
        (True, False),
    ]
    batch = pack(rollout.segments, [0.5] * 3)
    sampled = [
        sum((t.tokens[1:] for t in e.turns if t.role == "assistant"), []) for e in rollout.segments
    ]
    assert [batch["targets"][i][batch["mask"][i] == 1].tolist() for i in range(3)] == sampled
    # summaries included, each sampled token once
    assert sum(sampled, []) == sum(bodies, [])
    V = TRAINED.vocab
    logits = torch.zeros(*batch["tokens"].shape, V, requires_grad=True)
    policy_loss(target_logprobs(logits, batch["targets"]), batch, 10.0).backward()
    on_target = logits.grad.gather(-1, batch["targets"][..., None])[..., 0]
    torch.testing.assert_close(on_target, -0.5 * (1 - 1 / V) / 10.0 * batch["mask"])


def test_the_loss_mask_is_no_attention_mask():
    """A changed tool output moves later logits, though no gradient falls on it; earlier logits
    stay."""
    model = policy()
    rollout, _, _ = drive(
        agent(TASKS[0], TRAINED, InMemoryWorkspace(TASKS[0]), Limits(300)),
        [TRAINED.write_action("", [("read_file", ("a.py",))]), TRAINED.write_action("ok", [])],
    )
    segment, changed = rollout.segments[0], copy.deepcopy(rollout.segments[0])
    place = len(segment.turns[0].tokens) + len(segment.turns[1].tokens) + 3
    changed.turns[2].tokens[3] = (changed.turns[2].tokens[3] + 1) % 256
    a, b = pack([segment], [1.0]), pack([changed], [1.0])
    assert (a["tokens"] != b["tokens"]).nonzero().tolist() == [[0, place]] and a["mask"][
        0, place - 1
    ] == 0
    x, y = model.logits(model(a["tokens"]))[0], model.logits(model(b["tokens"]))[0]
    torch.testing.assert_close(x[:place], y[:place], atol=1e-6, rtol=0)
    assert ((x - y)[place:].abs().amax(-1) > 1e-5).all() and a["mask"][0, place:].sum() > 0


@pytest.mark.parametrize("d", [0.3, 1.0, 1.5])
def test_means_and_variances_of_the_three_kl_estimates_between_gaussians(d):
    """q = N(0, 1), p = N(d, 1), by quadrature: KL = d^2 / 2."""
    x, w = np.polynomial.hermite_e.hermegauss(90)
    w, kl = w / w.sum(), d * d / 2
    log_q, log_p = torch.tensor(-(x**2) / 2), torch.tensor(-((x - d) ** 2) / 2)
    (m1, v1), (m2, _), (m3, v3) = (
        ((w * k).sum(), (w * (k - (w * k).sum()) ** 2).sum())
        for k in (k.numpy() for k in kl_estimates(log_q, log_p))
    )
    assert (
        m1 == pytest.approx(kl) and m3 == pytest.approx(kl) and m2 == pytest.approx(kl + kl**2 / 2)
    )
    assert v1 == pytest.approx(2 * kl) and v3 == pytest.approx(math.exp(2 * kl) - 1 - 2 * kl)
    assert (v3 > v1) == (kl > 0.628)


def test_k1_as_a_loss_has_no_expected_gradient_and_as_a_reward_it_has_that_of_the_kl():
    """Expectations are exact sums over six outcomes; the oracle is autograd of the KL itself."""
    torch.manual_seed(0)
    logits, reference = torch.randn(6, dtype=torch.float64, requires_grad=True), torch.randn(
        6, dtype=torch.float64
    ).log_softmax(0)
    logp = logits.log_softmax(0)
    p = logp.detach().exp()
    (as_loss,) = torch.autograd.grad(
        (p * kl_estimates(logp, reference)[0]).sum(), logits, retain_graph=True
    )
    assert as_loss.abs().max() < 1e-12
    (truth,) = torch.autograd.grad(
        (logp.exp() * (logp - reference)).sum(), logits, retain_graph=True
    )
    batch = {"advantage": torch.zeros(1, 6), "mask": torch.ones(1, 6)}
    per_outcome = [
        torch.autograd.grad(
            policy_loss(
                logp[None], {**batch, "mask": torch.eye(6)[i][None]}, 1.0, reference[None], 1.0
            ),
            logits,
            retain_graph=True,
        )[0]
        for i in range(6)
    ]
    torch.testing.assert_close(
        sum(q * g for q, g in zip(p, per_outcome)), truth, atol=1e-9, rtol=1e-6
    )
    assert truth.abs().max() > 0.05


# ---------------------------------------------------------------- limits


def test_a_turn_has_three_eighths_of_the_window_and_at_least_192_tokens():
    assert [Limits(window).max_turn_tokens for window in (200, 512, 1024, 8192)] == [
        192,
        192,
        384,
        3072,
    ] and Limits(8192, 9, 40).max_turn_tokens == 40
    room = [
        next(agent(TASKS[0], TRAINED, InMemoryWorkspace(TASKS[0]), Limits(window))).room
        for window in (150, 4096)
    ]
    assert room == [150 - len(TRAINED.encode(TASKS[0].problem_statement)) - 3, 1536]


# ---------------------------------------------------------------- transcripts on file


def spoken_rollout():
    """Two calls in one turn, one of a tool that is not there; a summary; a cut-off end."""
    act = lambda text, *calls: TRAINED.write_action(text, calls)
    bodies = [
        act("look", ("read_file", ("a.py",)), ("zz", ("1", "\x1b[2J"))),
        act("plan <|summary|>left: f"),
        by_bytes("the end is"),
    ]
    rollout, _, _ = drive(
        agent(
            TASKS[0], TRAINED, InMemoryWorkspace(TASKS[0]), Limits(400, 5, 40), Compaction(400, 1)
        ),
        bodies,
    )
    rollout.reward = -0.25
    return rollout, bodies


def test_a_transcript_is_the_chat_form_and_says_of_every_token_whether_it_was_sampled():
    rollout, bodies = spoken_rollout()
    lines = json.loads(
        json.dumps(transcripts.describe_rollout(rollout, TRAINED, {(0, 1): ["style"]}, step=3))
    )
    assert [(l["step"], l["segment"], l["reward"], l["finished"]) for l in lines] == [
        (3, 1, -0.25, False),
        (3, 2, -0.25, False),
    ]
    roles = [[(m["role"], m.get("name")) for m in l["messages"]] for l in lines]
    assert roles == [
        [
            ("user", None),
            ("assistant", None),
            ("tool", None),
            ("tool", None),
            ("user", "query"),
            ("assistant", None),
        ],
        [("user", None), ("user", "summary"), ("assistant", None)],
    ]
    for line, segment in zip(lines, rollout.segments):
        mask = sum(
            ([0] + [int(m["sampled"] > 0)] * (m["tokens"] - 1) for m in line["messages"]), []
        )
        assert mask == flatten(segment)[1].tolist() and sum(
            m["sampled"] for m in line["messages"]
        ) == sum(mask)
    first, one, two = lines[0]["messages"][1:4]
    assert (
        first["content"] == "look"
        and first["flags"] == ["unknown_tool", "style"]
        and first["versions"] == [7]
    )
    assert [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in first["tool_calls"]
    ] == [("read_file", {"path": "a.py"}), ("zz", {"0": "1", "1": "\x1b[2J"})]
    assert [m["tool_call_id"] for m in (one, two)] == [c["id"] for c in first["tool_calls"]]
    assert (one["content"], two["content"]) == ("def f():\n    pass\n", "Tool not found: zz")
    assert lines[0]["messages"][-1]["content"] == "plan <|summary|>left: f" and lines[1][
        "messages"
    ][-1]["flags"] == ["cut off"]


def test_a_replay_shows_exactly_the_sampled_text_bright_with_flags_and_reward(tmp_path, capsys):
    rollout, _ = spoken_rollout()
    transcripts.write_transcripts(
        tmp_path / "t.jsonl", 1, transcripts.describe_rollout(rollout, TRAINED)
    )
    main([f"--replay={tmp_path}/t.jsonl", "--line=1"])
    printed = capsys.readouterr().out
    bright = [
        " ".join(text.split()) for text in re.findall(r"\033\[1m(.*?)\033\[0m", printed, re.S)
    ]
    assert bright == ["look > read_file path=a.py > zz 0=1 1=\\x1b[2J", "plan <|summary|>left: f"]
    assert "reward -0.25" in printed and "\033[2J" not in printed
    assert f"[{len(rollout.turns[1].tokens) - 1} sampled, policy 7, unknown_tool]" in printed
    main([f"--replay={tmp_path}/t.jsonl"])
    assert "the end is" in (last := capsys.readouterr().out) and "cut off" in last
    odd = {
        "task": "\033[2J",
        "x": "\udc80",
        "messages": [{"role": "\033[2J", "content": "a\rb\b\u009b2J\u00e9", "flags": ["\033[2J"]}],
    }
    (tmp_path / "odd.jsonl").write_text(json.dumps(odd))
    main([f"--replay={tmp_path}/odd.jsonl"])
    head, said = capsys.readouterr().out.splitlines()
    assert (
        head == "task \\x1b[2J  x \\udc80"
        and said.strip()
        == "\\x1b[2J  \033[2ma\\rb\\x08\\x9b2J\u00e9\033[0m  \033[33m[\\x1b[2J]\033[0m"
    )


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "No such file"),
        ("", "line 1 is no"),
        ("[1]", "line 1 is no"),
        ('{"messages": []}\n{"a', "line 2 is no"),
        ('{"messages": [{"role": "user"}]}', "line 1 is no"),
        (b"\xff\xfe", "no text"),
        (
            '{"messages": [{"role": "x", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]}',
            "line 1 is no",
        ),
        ('{"messages": []}', "lines 1 to 1"),
    ],
)
def test_a_file_that_cannot_be_replayed_is_refused_in_one_line_with_exit_code_2(
    text, words, tmp_path, capsys
):
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    line = ["--line=2"] if "1 to 1" in words else []
    assert words in refuse(main, [f"--replay={path}", *line], capsys)


def test_steps_that_come_again_replace_their_transcripts(tmp_path):
    path, line = (
        tmp_path / "t.jsonl",
        transcripts.describe_rollout(spoken_rollout()[0], TRAINED)[:1],
    )
    read = lambda: [(l["step"], l["mark"]) for l in map(json.loads, path.open())]
    write = lambda step, mark: transcripts.write_transcripts(
        path, step, [{**line[0], "mark": mark}]
    )
    path.write_text('{"step": 1, "torn')
    for step in (1, 2, 3, 4):
        write(step, "first")
    write(3, "again")
    assert read() == [(1, "first"), (2, "first"), (3, "again")]
    write(1, "anew")
    assert read() == [(1, "anew")] and list(tmp_path.iterdir()) == [path]


def mutate_json(value, rng):
    """A value of another kind in a random place, or a key that is gone"""
    odd = [
        5,
        -1.5,
        None,
        True,
        [],
        {},
        "",
        "x",
        [5],
        [None],
        {"a": 1},
        "\ud800",
        "\u2028",
        1e999,
        10**400,
        eval("[" * 90 + "]" * 90),
    ]
    where = [value]
    while True:
        inside = where[-1]
        keys = (
            list(inside)
            if isinstance(inside, dict)
            else list(range(len(inside))) if isinstance(inside, list) else []
        )
        if not keys or rng.random() < 0.15:
            break
        key = rng.choice(keys)
        if rng.random() < 0.3 or not isinstance(inside[key], (dict, list)):
            if isinstance(inside, dict) and rng.random() < 0.25:
                del inside[key]
            else:
                inside[key] = copy.deepcopy(rng.choice(odd))
            return value
        where.append(inside[key])
    return rng.choice(odd) if len(where) == 1 and rng.random() < 0.2 else value


def test_a_mutated_transcript_is_shown_or_refused_in_one_line_with_exit_code_2(tmp_path, capsys):
    lines, path, refused, shown = (
        transcripts.describe_rollout(spoken_rollout()[0], TRAINED),
        tmp_path / "t.jsonl",
        0,
        0,
    )
    deep = [{**lines[0], "reward": "DEEP"}] * 8
    numbers = copy.deepcopy(lines[0])
    numbers["messages"][1]["flags"] = [5]
    call = copy.deepcopy(lines[0])
    call["messages"][1]["tool_calls"][0]["function"]["arguments"] = "[1]"
    for seed in range(500):
        rng = random.Random(seed)
        line = [numbers, call, *deep][seed] if seed < 10 else copy.deepcopy(rng.choice(lines))
        for _ in range(rng.randrange(1, 4) if seed > 9 else 0):
            line = mutate_json(line, rng)
        text, depth = json.dumps(line, ensure_ascii=rng.random() < 0.5), 120 * seed
        path.write_text(
            text.replace('"DEEP"', "[" * depth + "]" * depth),
            encoding="utf-8",
            errors="surrogatepass",
        )
        try:
            main([f"--replay={path}"])
            shown += 1
            assert capsys.readouterr().out
        except SystemExit as end:
            error = capsys.readouterr().err
            assert (
                end.code == 2
                and error.count("\n") == 1
                and ("line 1 is no conversation" in error or "it is no text" in error)
            )
            refused += 1
        assert seed > 1 or refused == seed + 1
    assert refused > 50 and shown > 100


def test_a_transcript_is_shown_by_a_terminal_that_is_not_for_its_letters(tmp_path):
    line = {"task": "\u00e9", "messages": [{"role": "user", "content": "a\u2028b \u00e9"}]}
    (tmp_path / "t.jsonl").write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, rollout_module.__file__, f"--replay={tmp_path}/t.jsonl"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0 and "a\\u2028b \\xe9" in done.stdout and not done.stderr


def test_a_reader_that_has_seen_enough_ends_a_replay_in_silence(tmp_path):
    # More than a pipe holds
    line = {"task": "t", "messages": [{"role": "user", "content": "word " * 100_000}]}
    (tmp_path / "t.jsonl").write_text(json.dumps(line) + "\n")
    done = subprocess.Popen(
        [sys.executable, rollout_module.__file__, f"--replay={tmp_path}/t.jsonl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with done.stdout, done.stderr:
        assert done.stdout.read(1)
        done.stdout.close()
        assert not done.stderr.read() and done.wait(60) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--replay="],
        ["--bench", "--replay=t.jsonl"],
        ["--line=1"],
        ["--replay=t.jsonl", "--line=x"],
    ],
)
def test_flags_of_a_replay_that_go_nowhere_are_refused(words, capsys):
    refuse(main, words, capsys)


def test_the_calls_of_one_turn_run_in_order_and_share_the_room_for_their_outputs():
    task = Task("t", "x", {"a.py": "1\n", "big.py": "y" * 900}, {})
    calls = [
        ("edit_file", ("a.py", "1", "2")),
        ("read_file", ("a.py",)),
        ("zz", ()),
        ("read_file", ("big.py",)),
        ("read_file", ("none",)),
    ]
    rollout, requests, _ = drive(
        agent(task, BYTES, InMemoryWorkspace(task), Limits(600, 9, 200)),
        [BYTES.write_action("", calls), BYTES.write_action("ok", [])],
    )
    said = [BYTES.decode(t.tokens[1:-1]) for t in rollout.turns if t.role == "tool"]
    assert (
        said
        == [
            "ok",
            "2\n",
            "Tool not found: zz",
            "y" * 11 + "\n[878 tokens cut]\n" + "y" * 11,
            "no such file: none",
        ]
        and rollout.finished
    )
    assert [c.error for c in rollout.turns[1].calls] == ["", "", "unknown_tool", "", "failed"]
    assert requests[1].tokens == [
        t for turn in rollout.turns if turn.role == "tool" for t in turn.tokens
    ] + [BYTES.id["<|assistant|>"]]
