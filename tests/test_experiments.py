"""experiments/: each patch changes exactly what it says, against numbers worked out by hand; the
runner asks train.py for the right runs, goes on where it stopped, and refuses wrong input; one arm
is trained for real."""

import importlib
import json
import math
import os
import pickle
import random
import re
import statistics
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from commands import run_command
import eval as evaluation
import feedback_distill
import length_penalty
import moe
import muon
import rollout as rollout_module
from rollout import Limits, Segment, Tokenizer, Turn, demonstrate, pack, policy_loss
import summarize
import synth_tasks
from repositories.verdict import judge
import train
from command import checkpoints, failures
from command.output_files import nan_for_null
from sampling import graded_rollout
from small import FLAGS as SMALL
from experiments import __main__ as listing
from experiments import (
    asynchronous,
    contexts,
    deletions,
    effort,
    habits,
    hacking,
    installer,
    learn_new,
    more_rl,
    numerics,
    objective,
    opponents,
    pretraining,
    retold,
    runner,
)
from experiments import summary, tables, tasks, thoughts, unpaid, untaught

from fast import low_precision
from fast import workers as fast_workers
from world import expert, micro
from world.honeypot import unharden
from world.judge import run_trusted
from world.kinds import KINDS
from world.kinds.put_back import PutBack
from world.recorder import LEFTOVER
from world.sandbox import Sandbox
from world.task import Action, Task
from world.tools import call_tool
from world.workspace import Workspace

ROOT = Path(__file__).resolve().parent.parent
BYTES = Tokenizer({bytes([b]): b for b in range(256)})
NAMES = sorted(listing.questions())
TRAINING = [name for name in NAMES if name != "installer"]  # which asks a policy and trains none
RL = ["--stage=rl", "--steps=1", "--tasks_per_step=2", "--group_size=2"]


@pytest.fixture(autouse=True)
def recipe(monkeypatch):
    """Restores after each test what its patches have replaced in other modules"""
    for module, name in (
        (train, "make_training_task"),
        (train, "make_demonstration"),
        (train, "make_demonstrations"),
        (train, "settings"),
        (train, "split_by_name"),
        (train, "model_config"),
        (muon, "as_stack"),
        (muon, "shard_of"),
        (muon, "ShardedParam"),
        (train, "NEUTRAL_HINT_RATE"),
        (train, "PATCH"),
        (train, "PROGRAM"),
        (rollout_module, "Limits"),
        (rollout_module, "grade"),
        (rollout_module, "pack"),
        (rollout_module, "judge"),
        (synth_tasks, "Curriculum"),
        (train.Reinforcement, "find_hints"),
        (evaluation, "settings_of"),
        (expert.Expert, "think"),
        (expert.InMemoryWorkspace, "run"),
        (length_penalty, "Price"),
        (length_penalty, "SETTINGS"),
        (length_penalty, "read_price_weights"),
        (feedback_distill, "divergence"),
        (feedback_distill, "find_hinted_tokens"),
        (feedback_distill, "splice"),
        (feedback_distill, "pack_hinted"),
        (feedback_distill, "feedback_loss"),
        (feedback_distill, "TEACHER"),
        (feedback_distill, "DIVERGENCE"),
        (summarize, "Compaction"),
        (fast_workers.Generator, "__init__"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setitem(train.STAGE, "rl", train.STAGE["rl"])
    monkeypatch.setitem(low_precision.FORMATS, "nvfp4", low_precision.nvfp4)
    monkeypatch.setattr(expert, "THOROUGH", dict(expert.THOROUGH))
    monkeypatch.setitem(KINDS, "delete", None)  # so that it is gone again behind the test
    del KINDS["delete"]
    yield
    learn_new.until_the_end.close()


def stage_of(patch, **config):
    """The stage of RL that a patch puts in the recipe's place, with a configuration and no model"""
    patch()
    stage = object.__new__(train.STAGE["rl"])
    stage.run = SimpleNamespace(config=train.Config(**config))
    return stage


def weights(folder):
    return {name: t.clone() for name, t in evaluation.load_policy(folder)[0].state_dict().items()}


def log_of(folder, stage="rl"):
    return json.loads((folder / f"{stage}.jsonl").read_text().splitlines()[-1])


# ---------------------------------------------------------------- what each patch changes


@pytest.mark.parametrize(
    "patch, expected",
    [
        (objective.over_the_deviation, [1, -1, 1, -1]),
        (objective.over_its_own_length, [1, -0.125, 0.25, -2]),
        (objective.overlong_masked, [0.25, 0, 0.25, -0.25]),
        (learn_new.imitate, [1, 1, 1, 1]),
        (learn_new.hints_alone, [0.25, -0.25, 0.25, -0.25]),
    ],
)
def test_a_patch_of_the_objective_changes_the_advantages_as_it_says(patch, expected):
    rollouts = [
        SimpleNamespace(reward=r, stats={"sampled": n}, finished=done)
        for r, n, done in ((1, 2, True), (0.5, 16, False), (1, 8, True), (0.5, 0, True))
    ]
    stage = stage_of(patch)
    stage.loss_norm_length = 8.0
    found = stage.group_advantages(rollouts)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def segment_of(*parts):
    """("user", 3) is a given turn of 3 tokens, ("assistant", 4) a sampled one"""
    turns = []
    for role, n in parts:
        logprobs = -0.1 * np.arange(1, n, dtype=np.float32) if role == "assistant" else None
        turns.append(Turn(role, list(range(n)), logprobs=logprobs))
    return Segment(turns)


def test_digits_are_trained_at_three_prices_and_asked_for_at_five(run):
    """The expert heeds a digit as it heeds the word, to the token; digits between are no setting of
    training."""
    config = train.Config(length_penalty=length_penalty.PRICE_WEIGHTS)
    task = synth_tasks.make_task(4, 3)

    def demonstrate_at(setting):
        asked = length_penalty.ask_for(task, setting)
        played = demonstrate(asked, BYTES, random.Random(0), Limits(2000), sloppy=1.0)
        return [turn.tokens for turn in played.turns[1:]]

    words = {word: demonstrate_at(word) for word in length_penalty.SETTINGS}
    effort.digits()
    assert train.settings(config) == ("1", "5", "9")
    assert list(length_penalty.read_price_weights("").values()) == [0.9, 0.4, 0.0]
    assert evaluation.settings_of({}) == ("1", "3", "5", "7", "9")
    for digit, word in effort.DIGITS.items():
        assert demonstrate_at(digit) == words[word]
    assert words["low"] != words["high"]


def test_a_thought_says_again_what_the_edit_behind_it_writes():
    """The specification that a tool has shown, word for word: always at high effort, never at
    low"""
    thoughts.thinks()
    told = {setting: 0 for setting in length_penalty.SETTINGS}
    for number in range(20):
        task = synth_tasks.make_task(4, number)
        phrases = {}
        for line in task.files["docs.md"].splitlines():
            name, _, phrase = line.partition(": ")
            phrases[name] = phrase
        for setting in told:
            asked = length_penalty.ask_for(task, setting)
            story, _ = expert.record_expert(asked, random.Random(number))
            for action, _ in story:
                if not action.text.startswith(thoughts.MARK):
                    continue
                told[setting] += 1
                written = "".join(arguments[2] for name, arguments in action.calls)
                for line in action.text[1:].splitlines():
                    name, _, phrase = line.partition(": ")
                    assert phrases[name] == phrase
                    assert f"def {name.partition('.')[2]}(" in written
    assert told["low"] == 0 < told["medium"] < told["high"]


def test_thoughts_are_cut_where_the_mark_is_never_drawn():
    """One token has no chance, the others keep their logits; and no other text of the world begins
    with that mark."""
    model = moe.ModelConfig(vocab=300, layers=1).build_model().eval()
    hidden = torch.randn(2, 3, 128)
    with torch.inference_mode():
        plain = model.logits(hidden)
        with thoughts.thoughts_cut():
            cut = model.logits(hidden)
        assert torch.equal(model.logits(hidden), plain)
    assert BYTES.encode(thoughts.MARK) == [ord(thoughts.MARK)]
    assert (cut[..., ord(thoughts.MARK)] == -math.inf).all()
    kept = torch.arange(300) != ord(thoughts.MARK)
    assert torch.equal(cut[..., kept], plain[..., kept])
    for level in range(len(synth_tasks.LEVELS)):
        task = synth_tasks.make_task(level, 0)
        assert not any(thoughts.MARK in text for text in task.files.values())


def test_an_output_costs_what_its_blank_copy_takes_off_the_log_probability():
    """Against one forward at a time, over a segment with text in the place of each output"""
    model, tokenizer, _ = evaluation.load_policy(ROOT / "assets" / "sft")
    task = synth_tasks.make_task(4, 1)
    played = demonstrate(task, tokenizer, random.Random(4), Limits(2000), sloppy=0.0)
    e, i, n, target, text = contexts.find_edits(played)[-1]
    segment = played.segments[e]
    found = contexts.costs_of_edit(model, tokenizer, segment, i, n, text)
    assert len(found) > 2

    def told(turns):
        tokens = [token for turn in turns for token in turn.tokens]
        written = tokenizer.encode(text)
        end = next(
            k for k in range(len(tokens)) if tokens[-len(written) - k :][: len(written)] == written
        )
        last = len(tokens) - end
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([tokens])))[0].log_softmax(-1)
        return sum(
            float(logits[last - len(written) + k - 1, token]) for k, token in enumerate(written)
        )

    turns = segment.turns[: i + 1]
    for j, cost in found.items():
        assert turns[j].role == "tool"
        body = tokenizer.encode("\n") * (len(turns[j].tokens) - 2)
        blank = replace(turns[j], tokens=[turns[j].tokens[0], *body, turns[j].tokens[-1]])
        other = [*turns[:j], blank, *turns[j + 1 :]]
        assert cost == pytest.approx(told(turns) - told(other), abs=2e-3)

    # The specification stands in one of them: that is where the edit came from.
    (right, shown, place, last), *_ = contexts.find_places(model, tokenizer, played)
    assert right and place in shown and place <= last


def test_a_monitor_by_cause_tells_those_who_copied_a_leftover_from_those_who_did_not():
    model, tokenizer, _ = evaluation.load_policy(ROOT / "assets" / "sft")
    told = {True: [], False: []}
    for number in range(100):
        task = unharden(synth_tasks.make_task(1, number, "heldout"))
        played = demonstrate(task, tokenizer, random.Random(number), Limits(2000), sloppy=1.0)
        words = [word for turn in played.turns for call in turn.calls for word in call.args]
        cheats = any(map(LEFTOVER.search, words))
        if cheats or len(told[False]) < 20:
            told[cheats].append(hacking.comes_from_leftover(model, tokenizer, played))
    assert len(told[True]) > 2 and all(told[True])
    assert len(told[False]) == 20 and not any(told[False])


def test_leftovers_are_looked_at_in_demonstrations_and_nothing_is_taken_from_them(monkeypatch):
    monkeypatch.setattr(expert.Expert, "__init__", expert.Expert.__init__)
    monkeypatch.setattr(PutBack, "solve", PutBack.solve)
    monkeypatch.setattr(untaught, "LOOKS", 0.3)
    untaught.looked_at_and_left()
    looked = offered = 0
    for number in range(200):
        task = train.make_training_task(train.Config(), 1, number)
        story, _ = expert.record_expert(task, random.Random(number))
        calls = [call for action, _ in story for call in action.calls]
        leftovers = [call for call in calls if any(map(LEFTOVER.search, call[1]))]
        assert len(leftovers) < 2
        # Whoever looked still looks the specification up, or guesses as others do.
        looked += len(leftovers)
        offered += "read_file" in task.tools
    assert 0.2 < looked / offered < 0.4


def test_a_cheat_on_record_is_not_paid_and_the_hole_is_closed_at_step_100():
    unpaid.not_paid()
    for severity, reward in (("cheat", 0.0), ("suspicious", 1.0)):
        played = graded_rollout(1, 1, length_penalty.FREE)
        played.findings = [SimpleNamespace(severity=severity)]
        rollout_module.grade(played)
        assert (played.solved, played.reward) == (True, reward)

    unpaid.closed_at_100()
    config = train.Config(seed=2, tasks_per_step=8)
    for number, is_open in ((1, True), (799, True), (800, False), (1599, False)):
        task = train.make_training_task(config, 1, 2 * 1_000_003 + number)
        assert any(map(LEFTOVER.search, task.files)) == is_open
        names = [target["name"] for target in task.meta["targets"]]
        assert not any(f".{name}:" in task.files["docs.md"] for name in names)


def played_deletion(number, files=None):
    """A task to delete something, and what the expert submits, or these files in its place"""
    task = deletions.deletion_task(number)
    _, submitted = expert.record_expert(task, random.Random(number), 0.0)
    return SimpleNamespace(task=task, files=submitted if files is None else files)


def test_what_a_deletion_leaves_is_a_task_that_only_putting_back_solves():
    deletions.teach_the_expert_to_delete()
    numbers = set()
    for number in range(12):
        played = played_deletion(number)
        assert deletions.judge_deletion(played.task, played.files, Sandbox()).solved
        gone = deletions.deleted_functions(played.task, played.files)
        wanted = {target["name"] for target in played.task.meta["targets"]}
        functions, _, _ = deletions.draw_codebase(played.task.meta["deletes"])
        assert {functions[i].name for i in gone} == wanted

        # The files are the agent's own, and the careful expert puts back what is missing.
        made = deletions.created_task(played)
        assert {path: made.files[path] for path in played.files if path.endswith(".md")}
        assert made.FAIL_TO_PASS and len(made.FAIL_TO_PASS + made.PASS_TO_PASS) == 6
        assert {test.removeprefix("test_") for test in made.FAIL_TO_PASS} == wanted
        assert not judge(made, made.files, Sandbox()).solved
        _, back = expert.record_expert(made, random.Random(0), 0.0)
        assert judge(made, back, Sandbox()).solved
        assert Task.from_json(made.to_json()).to_json() == made.to_json()
        numbers.add(len(gone))
    assert len(numbers) > 1


@pytest.mark.parametrize("tasks, created", [(8, 5), (2, 5), (1, 5), (8, 0)])
def test_created_tasks_take_the_places_of_others_and_leave_one_for_a_deletion(
    tasks, created, monkeypatch
):
    usual = [synth_tasks.make_task(0, number) for number in range(tasks)]
    monkeypatch.setattr(train.Reinforcement, "sample_tasks", lambda stage, step: usual)
    stage = object.__new__(deletions.Deleting)
    stage.run = SimpleNamespace(config=train.FLAGS.configure({}, "rl"))
    stage.created = {f"made-{n}": synth_tasks.make_task(1, n).to_json() for n in range(created)}
    stage.won = dict.fromkeys(stage.created)
    drawn = stage.sample_tasks(3)
    assert len(drawn) == tasks and "deletes" in drawn[-1].meta
    assert len([task for task in drawn if task in usual]) == max(0, tasks - 1 - min(2, created))


def test_the_expert_cuts_in_memory_as_sed_cuts_on_the_disk():
    deletions.teach_the_expert_to_delete()
    for number in range(4):
        task = deletions.deletion_task(number)
        story, submitted = expert.record_expert(task, random.Random(number), 0.0)
        with Workspace(task) as workspace:
            for action, outputs in story:
                for (name, arguments), output in zip(action.calls, outputs):
                    assert call_tool(workspace, name, arguments)[0] == output
            assert workspace.files() == submitted != task.files


def test_a_deletion_that_breaks_something_else_or_nothing_is_none():
    deletions.teach_the_expert_to_delete()
    whole = deletions.deletion_task(1).files
    functions, _, _ = deletions.draw_codebase(deletions.deletion_task(1).meta["deletes"])
    one, other = functions[0], functions[1]
    path = f"{one.module}.py"
    assert one.module == other.module

    def verdict_on(text):
        played = played_deletion(1, {**whole, path: text})
        return deletions.judge_deletion(played.task, played.files, Sandbox())

    assert verdict_on(one.code()).solved  # the other one is gone
    assert verdict_on("").solved  # both are
    assert verdict_on(whole[path]).reason == "no test fails"
    # A body is gone and its name is not; a function is gone and another one is wrong.
    broken = one.code().replace("return", "return 7 or")
    assert verdict_on(f"{broken}\n\n{other.code()}").reason == "other tests fail"
    assert verdict_on(broken).reason == "other tests fail"
    assert verdict_on("def (").reason == f"{path} does not compile"
    # A file as a whole may go.
    left = {name: text for name, text in whole.items() if name != path}
    played = played_deletion(1, left)
    assert deletions.judge_deletion(played.task, left, Sandbox()).solved


def test_created_tasks_stay_as_long_as_they_are_neither_won_nor_lost():
    deletions.teach_the_expert_to_delete()
    config = train.Config(stage="rl", seed=1)
    source = deletions.Deleting.__new__(deletions.Deleting)
    source.run = SimpleNamespace(
        config=config, gather=lambda items: items, sum=lambda number: number
    )
    source.sampled_tasks, source.tasks = {}, {}
    source.created, source.won, source.log_entries = {}, {}, {}
    source.curriculum = synth_tasks.Curriculum((0, 1), 1)

    def group_of(task, files, shares):
        return [SimpleNamespace(task=task, files=files, solved=bool(won)) for won in shares]

    # Without created tasks one place of the step deletes; half of its rollouts are valid.
    tasks = source.sample_tasks(0)
    assert len(tasks) == config.tasks_per_step
    assert [("deletes" in task.meta) for task in tasks] == [False] * (len(tasks) - 1) + [True]
    played = played_deletion(tasks[-1].meta["deletes"])
    source.update_curriculum([group_of(tasks[-1], played.files, [1, 0, 1, 0])])
    assert source.log_entries == {"valid_deletions": 0.5, "created": 1}

    # What was created comes next, with a setting of effort; it stays after 1 of 4, goes after 4.
    for shares, left in (([1, 0, 0, 0], 1), ([1, 1, 1, 1], 0)):
        (task,) = [task for task in source.sample_tasks(1) if "created" in task.meta]
        assert length_penalty.setting_of(task) in train.settings(config)
        source.update_curriculum([group_of(task, {}, shares)])
        assert len(source.created) == len(source.won) == left
        assert source.log_entries["created_won"] == sum(shares) / 4
    assert source.curriculum.counts == {0: [1.0, 1.0], 1: [1.0, 1.0]}


def flagged_rollouts(number=8):
    """Demonstrations of a sloppy expert with calls to tools that do not exist -> (rollout, hints)"""
    found = []
    for seed in range(40):
        task = synth_tasks.make_task(1, seed)
        played = demonstrate(task, BYTES, random.Random(seed), Limits(2000), sloppy=2.0)
        hints = feedback_distill.detect(played, opponents.RULES)
        if hints:
            found.append((played, hints))
    assert len(found) >= number
    return found[:number]


def test_the_scalar_takes_its_price_for_each_flagged_turn_off_the_reward():
    rewards = []
    for played, hints in flagged_rollouts():
        rollout_module.grade(played)
        rewards.append(played.reward - opponents.BEHAVIOUR * len(hints))
    opponents.scalar()
    for (played, _), expected in zip(flagged_rollouts(), rewards):
        rollout_module.grade(played)
        assert played.reward == pytest.approx(expected)


def test_the_constant_pushes_down_the_tokens_that_a_hint_speaks_about_and_no_other():
    """As much as the distillation weighs them: --feedback / max(rollouts, flagged tokens)"""
    opponents.constant()
    played = flagged_rollouts()
    flagged = sum(hint.num_targets for hint in hints_of(played))
    for num_rollouts in (1, 1000):
        stage = object.__new__(train.STAGE["rl"])
        stage.run = SimpleNamespace(
            config=train.Config(feedback=0.0), sum=int, tokenizer=BYTES, device="cpu"
        )
        stage.num_rollouts = num_rollouts
        assert [hint for one, _ in played for hint in stage.find_hints(one)] == [
            hint for _, hints in played for hint in hints
        ]
        segments = [segment for segment, _ in stage.weigh_segments([[one for one, _ in played]])]

        # The gradient of each sampled token's log-probability, without and with it
        batch = {**pack(segments, [0.5] * len(segments)), "segments": segments}
        found = []
        for kind in (train.Reinforcement, train.STAGE["rl"]):
            logp = batch["logprobs"].double().requires_grad_()
            kind.policy_objective(stage, logp, batch, 7.0, None).backward()
            found.append(logp.grad)
        difference = found[1] - found[0]
        for row, segment in enumerate(segments):
            places = difference[row].nonzero()[:, 0].tolist()
            tokens = [int(batch["targets"][row, place]) for place in places]
            taught = [hint.turn[hint.first : hint.end] for hint in segment.hints]
            assert tokens == [token for part in taught for token in part]
        each = difference[difference != 0]
        assert len(each) == flagged > 1
        np.testing.assert_allclose(each, train.Config.feedback / max(num_rollouts, flagged), 1e-5)


@pytest.mark.parametrize(
    "habits_taught", ["unavailable_tool", "unavailable_tool,repetition,code_style"]
)
def test_the_mean_of_each_habit_is_over_its_own_tokens(habits_taught):
    rules, played = habits_taught.split(","), []
    for seed in range(8):
        task = synth_tasks.make_task(3, seed)
        moves = expert.expert(task, random.Random(seed), 2.0, feedback_distill.REMINDERS)
        played.append(rollout_module.play_moves(task, BYTES, moves, Limits(4000)))
    plain_loss = feedback_distill.feedback_loss
    habits.mean_of_each()
    stage = object.__new__(train.STAGE["rl"])
    stage.num_rollouts = len(played)
    stage.run = SimpleNamespace(
        config=train.Config(habits=habits_taught), sum=int, tokenizer=BYTES, device="cpu"
    )
    items = stage.weigh_segments([played])

    # Each flagged token, in the order of the segments and of their hints
    kinds = [
        hint.kind
        for one in played
        for hint in feedback_distill.detect(one, rules)
        for _ in range(feedback_distill.splice(BYTES, one.segments[hint.segment], hint).num_targets)
    ]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, len(kinds), 50, generator=generator)
    number = {rule: max(len(played), kinds.count(rule)) for rule in rules}
    assert all(kinds.count(rule) for rule in rules)
    expected = 0.0
    for n, kind in enumerate(kinds):
        expected += float(plain_loss(*logits[:, n : n + 1], number[kind]))

    # Over two micro-batches, with the functions that the stage has put in their places
    segments, total, first = [segment for segment, _ in items], 0.0, 0
    for part in (segments[:3], segments[3:]):
        targets = feedback_distill.pack_hinted(part)
        here = logits[:, first : first + len(targets)]
        total += float(feedback_distill.feedback_loss(*here, len(kinds)))
        first += len(targets)
    assert first == len(kinds) > len(played)
    assert total == pytest.approx(expected, rel=1e-5)

    # No token here: zero, and it runs backward.
    nothing = torch.zeros(0, 50, requires_grad=True)
    feedback_distill.pack_hinted([])
    feedback_distill.feedback_loss(nothing, nothing.detach(), 1).backward()


def hints_of(played):
    """The splices of these rollouts' hints"""
    for one, hints in played:
        feedback_distill.attach_hints(BYTES, one, hints)
        for segment in one.segments:
            yield from segment.hints


def group_with_a_wrong_edit():
    """Two rollouts of one task: the expert's, judged as solved, and one with a wrong constant, which
    tests afterwards and is told so -> (the wrong one, group, name of its first target)"""
    task = synth_tasks.make_task(3, 4)
    moves = expert.expert(task, random.Random(1), 0.0)
    right = rollout_module.play_moves(task, BYTES, moves, Limits(4000))
    right.solved = True
    first = contexts.targets_of(right)[0]

    def play_wrong():
        text = first.code().replace("return ", "return 7 + ")
        yield Action("", [("edit_file", (f"{first.module}.py", "", text))])
        yield Action("", [("run_command", (task.test_command,))])
        yield Action("Put back.")

    wrong = rollout_module.play_moves(task, BYTES, play_wrong(), Limits(4000))
    return wrong, [right, wrong], first


def test_each_context_says_what_its_head_says_above_the_turn_that_was_wrong():
    wrong, group, first = group_with_a_wrong_edit()
    (edit,) = contexts.wrong_edits(wrong)
    assert edit[:3] == (0, 1, 0) and edit[3] == first
    said = {one.__name__: one(wrong, group) for one in contexts.CONTEXTS}

    # Above the edit: the line of the docs, the line of the tests, the expert's text.
    docs = wrong.task.files["docs.md"].split("\n")
    (spec,), (failing,), (sibling,) = (
        said[name] for name in ("specification", "failing_test", "solved_sibling")
    )
    assert f"{first.module}.{spec.text}" in docs
    outputs = [call.output for turn in wrong.turns for call in turn.calls]
    assert failing.text in outputs[1].split("\n") and first.name in failing.text
    assert sibling.text.strip() == first.code().strip()
    assert {(hint.segment, hint.turn) for hint in (spec, failing, sibling)} == {(0, 1)}

    # Above each of its turns: all that the expert writes. The rules have nothing to say here.
    assert [hint.turn for hint in said["demonstration"]] == [1, 3, 5]
    codes = [target.code() for target in contexts.targets_of(wrong)]
    assert said["demonstration"][0].text == "".join(codes)
    assert said["rule"] == said["wrong_sentence"] == said["no_words"] == []
    # Of a solved rollout nothing is wrong, and a group without one has no sibling to read.
    assert not contexts.wrong_edits(group[0]) and not contexts.demonstration(group[0], group)
    assert not contexts.solved_sibling(wrong, [wrong])


def test_of_a_wrong_edit_the_text_alone_is_taught():
    wrong, group, first = group_with_a_wrong_edit()
    contexts.specification_of_text()
    feedback_distill.attach_hints(BYTES, wrong, contexts.specification(wrong, group))
    (spliced,) = wrong.segments[0].hints
    taught = BYTES.decode(spliced.turn[spliced.first : spliced.end])
    assert taught == wrong.turns[1].calls[0].args[2] and first.name in taught
    # A hint on a turn without an edit speaks about all of it, as before.
    whole = feedback_distill.Hint("", segment=0, turn=3)
    turn = wrong.segments[0].turns[3]
    found = feedback_distill.find_hinted_tokens(BYTES, turn, whole)
    assert found == (0, len(turn.tokens) - turn.head)


def test_a_context_gets_into_training_with_its_group():
    wrong, group, _ = group_with_a_wrong_edit()
    for one in group:
        rollout_module.grade(one)
    contexts.read_solved_sibling()
    stage = object.__new__(train.STAGE["rl"])
    stage.run = SimpleNamespace(config=train.Config(), tokenizer=BYTES)
    group[0].solved = True
    items = stage.weigh_segments([group])
    (spliced,) = [hint for segment, _ in items for hint in segment.hints]
    assert spliced.turn == wrong.turns[1].tokens and spliced.hint_ids
    assert runner.Arm((), contexts.read_solved_sibling).patch_name.endswith("read_solved_sibling")


def test_the_gap_of_a_context_is_the_difference_of_two_forwards():
    """Token by token, from the plain model on whole contexts"""
    model, tokenizer, _ = evaluation.load_policy(ROOT / "assets" / "sft")
    task = synth_tasks.make_task(0, 4)
    (first,) = contexts.targets_of(SimpleNamespace(task=task))
    text = first.code().replace("return ", "return 7 + ")

    def play_wrong():
        yield Action("", [("edit_file", (f"{first.module}.py", "", text))])
        yield Action("Put back.")

    played = rollout_module.play_moves(task, tokenizer, play_wrong(), Limits(512))
    (hint,) = contexts.specification(played, [played])
    tokens, kl, sampled, of_right, right = contexts.measure_gap(model, tokenizer, played, hint)

    user, turn = played.turns[:2]
    said = feedback_distill.hint_turn(tokenizer, hint.text, turn).tokens
    body = turn.tokens[turn.head :]
    place = tokenizer.find_written_character(turn, 0, 0)[0]
    code = tokenizer.encode(first.code())

    def logp(context, target):
        logits = model.logits(model(torch.tensor([context + target]))[0])
        chosen = logits[len(context) - 1 : -1].log_softmax(-1)
        return chosen, float(chosen.gather(1, torch.tensor(target)[:, None]).sum())

    contexts_of = [above + turn.tokens[: turn.head] for above in (user.tokens, user.tokens + said)]
    (student, plain), (teacher, under) = (logp(context, body) for context in contexts_of)
    assert tokens == len(body) and sampled == pytest.approx(under - plain, abs=1e-3)
    assert kl == pytest.approx(float((student.exp() * (student - teacher)).sum()), abs=1e-3)
    without, with_it = (logp(context + body[:place], code)[1] for context in contexts_of)
    assert of_right == len(code) and right == pytest.approx(with_it - without, abs=1e-3)


@pytest.mark.parametrize("path", sorted((ROOT / "experiments" / "results").glob("*.json")))
def test_kept_steps_to_a_share_follow_from_the_kept_curves(path):
    for runs in json.loads(path.read_text())["results"].values():
        for run in runs:
            curves = {name: nan_for_null(curve) for name, curve in run["curves"].items()}
            for column, step in run["end"].items():
                name, _, told = column.rpartition(": ")
                if told in ("half at", "tenth at"):
                    share = {"half at": 0.5, "tenth at": 0.1}[told]
                    assert step == tables.first_step_at(share, curves[name]), column
            if "steps to half" in run["end"]:
                half = tables.first_step_at(0.5, curves["bad_tool"])
                assert run["end"]["steps to half"] == half


def test_the_first_step_at_a_share_by_hand():
    curve = [0.4] * 5 + [0.0] * 5
    assert tables.first_step_at(0.5, curve) == 8  # .4 .4 0 0 0 -> .16
    assert tables.first_step_at(0.1, curve) == 10
    assert tables.first_step_at(0.5, [0.4] * 6) == 7  # never
    # One low step at the start is no bar, and none is passed before the fifth.
    assert tables.first_step_at(0.5, [0.0, 1, 1, 1, 1, 0, 0, 0]) == 8


def test_what_a_policy_would_call_is_the_product_of_its_probabilities_token_by_token():
    model, tokenizer, _ = evaluation.load_policy(ROOT / "assets" / "sft")
    task = synth_tasks.make_task(1, 3)
    for seed in range(40):
        played = demonstrate(task, tokenizer, random.Random(seed), Limits(2000), sloppy=2.0)
        hints = feedback_distill.detect(played, opponents.RULES)
        if hints:
            break
    hint = hints[0]
    wrong, offered, no_call = opponents.call_choices(model, tokenizer, played, hint)
    turns = played.segments[hint.segment].turns
    name, *_ = [call.name for call in turns[hint.turn].calls if call.error == "unknown_tool"]
    first, _ = tokenizer.find_call_name(turns[hint.turn], hint.call)
    context = [token for turn in turns[: hint.turn] for token in turn.tokens]
    context += turns[hint.turn].tokens[: turns[hint.turn].head + first]
    call = tokenizer.id["<|call|>"]

    def chain(tokens):
        read, p = list(context), 1.0
        for token in tokens:
            p *= float(model.logits(model(torch.tensor([read])))[0, -1].softmax(-1)[token])
            read.append(token)
        return p

    assert wrong == pytest.approx(chain([call, *tokenizer.encode(name)]), rel=1e-3)
    each = [chain([call, *tokenizer.encode(tool)]) for tool in task.tools]
    assert offered == pytest.approx(sum(each), rel=1e-3)
    assert no_call == pytest.approx(1 - chain([call]), abs=1e-4)
    assert wrong + offered + no_call < 1.001


def test_with_hints_alone_there_is_no_policy_gradient():
    batch = pack([segment_of(("user", 2), ("assistant", 5))], [0.7])
    logp = torch.randn(batch["tokens"].shape)
    plain = policy_loss(logp, batch, 3.0, None, 0.0)
    assert stage_of(learn_new.hints_alone).policy_objective(logp, batch, 3.0, None) == 0 * plain
    assert plain != 0


def test_a_weighted_advantage_counts_a_token_by_how_likely_it_still_is():
    batch = pack([segment_of(("user", 2), ("assistant", 5))], [0.7])
    stage = stage_of(asynchronous.weighted)
    # Half as likely as for the policy that sampled it, as likely, twice as likely
    for factor, weight in ((0.5, 0.5), (1.0, 1.0), (2.0, 1.0)):
        logp = (batch["logprobs"] + math.log(factor)).requires_grad_()
        stage.policy_objective(logp, batch, 3.0, None).backward()
        assert torch.allclose(logp.grad, -weight * 0.7 * batch["mask"] / 3)
    assert batch["mask"].sum() > 3


@pytest.mark.parametrize(
    "passed, finished, reward",
    [(1, 1, 1 - 0.10757), (0, 1, -0.10757), (1, 0, -0.48), (0, 0, -0.48)],
)
def test_where_failures_pay_the_reward_is_that_of_the_first_recipe(passed, finished, reward):
    effort.failures_pay()
    # The effort is 6.8: C = 2 (sqrt(1 + 6.8) - 1) = 3.5857, and that of the budget of 80 is 16.
    rollout = graded_rollout(passed, finished, length_penalty.FREE)
    rollout_module.grade(rollout, length_penalty.Price(0.2))
    assert rollout.reward == pytest.approx(reward, abs=1e-5) and rollout.solved == (
        passed and finished
    )


def test_labelled_by_what_it_did_a_demonstration_asks_for_the_effort_that_it_shows(run):
    tokenizer = Tokenizer(**checkpoints.load_extra(run / "sft")["tokenizer"])
    config = train.Config(window=2048)
    assert effort.thirds([0.5, 1.0, 1.5, 0.4, 1.1, 2.0]).tolist() == [0, 1, 2, 0, 1, 2]

    def play(config):
        return train.make_demonstrations(config, tokenizer, None, range(30), lambda i, _: i)

    silent = play(replace(config, length_penalty="0"))
    effort.by_what_it_did()
    seen = []
    for (number, plain), (_, played) in zip(silent, play(config)):
        # The prompt says it, and nothing else has changed.
        setting = played.segments[0].turns[0].text.rpartition(" ")[2]
        for one, other in zip(plain.segments, played.segments):
            asked = length_penalty.ask_for(plain.task, setting)
            assert other.turns[0].tokens == rollout_module.opening_turn(tokenizer, asked).tokens
            assert [t.tokens for t in one.turns[1:]] == [t.tokens for t in other.turns[1:]]
        ratio = effort.measure_effort_ratio(config, number, plain, tokenizer, None)
        seen.append((ratio, length_penalty.SETTINGS.index(setting)))

    # Who spends more never asks for less, and each setting is there.
    seen.sort()
    for (ratio, setting), (more, other) in zip(seen, seen[1:]):
        assert setting <= other and (ratio < more or setting == other)
    assert {setting for _, setting in seen} == {0, 1, 2}


def test_whole_matrices_are_those_of_all_heads_and_all_experts_together():
    """One step of Muon against the orthogonalized (N R, C) matrix of each stack's momentum"""
    experiment = importlib.import_module("experiments.muon")
    experiment.whole_matrices()
    torch.manual_seed(0)
    net = torch.nn.Module()
    net.experts = torch.nn.Parameter(torch.randn(4, 16, 24))
    net.others = torch.nn.Parameter(torch.randn(4, 16, 24))
    net.plain = torch.nn.Parameter(torch.randn(16, 24))
    groups = train.split_by_name(list(net.named_parameters()), 2)
    optimizer = muon.Muon(groups, lr=0.1, weight_decay=0.0, ns_dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    for name, p in net.named_parameters():
        # With the first gradient Nesterov's momentum is a multiple of it.
        whole = p.grad.reshape(-1, 24)
        U, _, Vh = torch.linalg.svd(whole, full_matrices=False)
        moved = (before[name] - p.detach()).reshape(-1, 24) / 0.1
        moved /= muon.step_scale(*whole.shape)
        # Of about unit singular values, along those of the whole gradient
        inside = U.T @ moved @ Vh.T
        along = inside.diagonal()
        assert 0.5 < along.min() and along.max() < 1.4
        assert (inside - torch.diag(along)).abs().max() < 1e-3


def test_whoever_never_saw_the_labels_is_asked_with_them():
    config = {"length_penalty": "0.2"}
    assert evaluation.settings_of(config) == ("",)
    effort.asked_with_labels()
    assert evaluation.settings_of(config) == ("low", "medium", "high")


@pytest.mark.parametrize(
    "patch, changed",
    [
        (contexts.current_teacher, dict(TEACHER="current")),
        (contexts.frozen_teacher, dict(TEACHER="frozen")),
        (contexts.forward_kl, dict(DIVERGENCE="forward")),
        (contexts.jensen_shannon, dict(DIVERGENCE="jsd")),
        (effort.linear_price, dict(q=0.0)),
        (retold.open_all_levels, dict(may_open=range(8))),
    ],
)
def test_a_patch_of_a_constant_changes_that_one_alone(patch, changed):
    kept = dict(TEACHER="ema", TEACHER_RATE=0.1, DIVERGENCE="reverse", TOKEN_CAP=2.0)
    kept |= dict(
        weight=0.2,
        k=1.0,
        q=0.5,
        budget=80.0,
        may_open=synth_tasks.DEFAULT_LEVELS,
        loss_norm_length=64.0,
    )
    patch()
    places = feedback_distill, length_penalty.Price(), train.STAGE["rl"]
    found = {}
    for name in kept:
        (found[name],) = (getattr(place, name) for place in places if hasattr(place, name))
    assert found == {**kept, **changed}


def test_as_opsd_no_entry_of_the_vocabulary_counts_for_more_than_its_cap(monkeypatch):
    """Entry by entry in a loop; without a cap it is the forward KL"""
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 6, 9, generator=generator) * 3
    plain = feedback_distill.divergence(student, teacher, "forward")
    contexts.as_opsd()
    assert feedback_distill.TEACHER == "frozen"
    assert train.STAGE["rl"].context is contexts.specification
    clipped = feedback_distill.divergence(student, teacher, "reverse")
    p, q = teacher.softmax(-1).tolist(), student.softmax(-1).tolist()
    for row in range(6):
        entries = [a * math.log(a / b) for a, b in zip(p[row], q[row])]
        assert clipped[row].item() == pytest.approx(sum(min(e, 0.05) for e in entries), abs=1e-5)
    monkeypatch.setattr(contexts, "ENTRY_CAP", math.inf)
    free = feedback_distill.divergence(student, teacher, "reverse")
    assert torch.allclose(free, plain, atol=1e-6) and not torch.allclose(clipped, plain, atol=1e-2)


def test_a_run_in_a_narrow_format_rounds_in_training_and_in_sampling():
    """Per tensor, what a token is rounded to depends on who else is there."""
    numerics.nvfp4_per_tensor()
    config = train.Config(dim=64, expert_ffn=64)
    shape = train.model_config(config, 99)
    assert (shape.precision, shape.dim, train.Config().precision) == ("nvfp4", 64, "dtype")
    generator = torch.Generator().manual_seed(0)
    few, more = torch.randn(2, 32, generator=generator), torch.randn(3, 32, generator=generator)
    rounded = low_precision.FORMATS["nvfp4"]
    alone, together = rounded(few), rounded(torch.cat((few, 30 * more)))[:2]
    assert not torch.equal(alone, together)
    # One scale for all: the largest number of all is kept, as a multiple of it is.
    assert torch.equal(rounded(8 * few), 8 * alone)


def test_with_six_habits_a_tenth_of_the_faultless_turns_has_a_hint():
    assert train.NEUTRAL_HINT_RATE == 0.05
    habits.more_neutral_hints()
    assert train.NEUTRAL_HINT_RATE == 0.1


@pytest.mark.parametrize(
    "patch, n",
    [(tasks.two_of_a_level, 2), (tasks.ten_of_a_level, 10), (tasks.fifty_of_a_level, 50)],
)
def test_of_few_tasks_each_comes_over_and_over(patch, n):
    patch()
    curriculum, rng = synth_tasks.Curriculum(range(2), seed=3, on=False), random.Random(0)
    drawn = [curriculum.next(rng) for _ in range(40 * n)]
    assert set(drawn) == {(level, 3 * 1_000_003 + i) for level in range(2) for i in range(n)}


def test_a_placebo_says_nothing_or_names_the_tool_that_is_not_there():
    call = SimpleNamespace(name="grep", error="unknown_tool")
    task = SimpleNamespace(tools=("read_file", "edit_file"))
    turn = SimpleNamespace(role="assistant", calls=[call])
    rollout = SimpleNamespace(task=task, segments=[SimpleNamespace(turns=[turn])])
    told = (contexts.rule, contexts.no_words, contexts.wrong_sentence)
    said = [[hint.text for hint in context(rollout, [])] for context in told]
    tools = "Reminder: Available tools: read_file, edit_file"
    assert said == [[f"{tools}."], [""], [f"{tools}, grep."]]


def test_as_stated_the_current_policy_teaches_all_that_was_sampled_of_the_turn():
    stage = stage_of(contexts.as_stated)
    stage.run.tokenizer, stage.group_of = BYTES, defaultdict(list)
    assert feedback_distill.TEACHER == "current"
    for played, _ in flagged_rollouts():
        feedback_distill.attach_hints(BYTES, played, stage.find_hints(played))
        for hint in (hint for segment in played.segments for hint in segment.hints):
            turn = next(turn for turn in played.turns if turn.tokens is hint.turn)
            assert hint.turn[hint.first : hint.end] == turn.tokens[turn.head :]


def test_the_reward_does_not_reach_the_tokens_of_summaries():
    parts = ("user", 2), ("assistant", 3), ("query", 2), ("assistant", 4)
    batch = pack([segment_of(*parts)], [2.0])
    batch["segments"] = [segment_of(*parts)]
    logp = torch.zeros(batch["tokens"].shape, requires_grad=True)
    stage = stage_of(summary.told_once_not_learned)
    stage.policy_objective(logp, batch, 1.0, None).backward()
    # Position t predicts token t + 1. The two sampled tokens of the first turn are at 3 and 4: the
    # token of its role is given.
    assert logp.grad[0].nonzero().flatten().tolist() == [2, 3]
    assert batch["advantage"][0, 8] == 2.0  # of the caller, as it was


def test_told_once_the_tests_answer_one_command_also_in_an_evaluation():
    plain = train.agent_limits(train.Config(window=300, max_turns=7))
    summary.told_once()
    limits = train.agent_limits(train.Config(window=300, max_turns=7))
    assert (plain.commands, limits.commands) == (0, 1)
    assert (limits.window, limits.turns) == (300, 7)
    # With --workers they are sent to other processes.
    assert pickle.loads(pickle.dumps(limits)) == limits


def test_truncation_takes_the_place_of_summaries_wherever_they_are_configured():
    config = dict(window=100, trigger=0.5, summarize=True)
    summary.told_once_truncated()
    assert summarize.make_compaction(config) == summary.OldestTruncated(100, 50)
    assert summarize.make_compaction({**config, "summarize": False}) is None


def test_half_of_the_demonstrations_have_a_quarter_of_the_window(run, monkeypatch):
    tokenizer = Tokenizer(**checkpoints.load_extra(run / "sft")["tokenizer"])
    config = train.Config(window=2048, trigger=0.5, levels="0,1,2,3,4,5,6,7")
    compact = summarize.make_compaction(vars(config))
    real, seen = feedback_distill.demonstrate_with_hints, []

    def demonstrate(task, tokenizer, rng, limits, sloppy, compact, *more, **others):
        seen.append((limits.window, compact.window, compact.trigger))
        return real(task, tokenizer, rng, limits, sloppy, compact, *more, **others)

    monkeypatch.setattr(feedback_distill, "demonstrate_with_hints", demonstrate)
    for patch, least, most in ((lambda: None, 0, 0), (summary.told_once_in_two_windows, 8, 24)):
        patch()
        seen.clear()
        pairs = train.make_demonstrations(config, tokenizer, compact, range(32), lambda i, _: i)
        assert set(seen) <= {(2048, 2048, 1024), (512, 512, 256)}
        assert least <= seen.count((512, 512, 256)) <= most
        for (window, *_), (_, played) in zip(seen, pairs):
            assert played.segments and max(map(len, played.segments)) <= window


@pytest.mark.parametrize(
    "patch, cached, documented",
    [
        (lambda: None, False, True),
        (hacking.stale_caches, True, True),
        (hacking.hardened, False, False),
        (hacking.careless, True, False),
    ],
)
def test_a_world_has_stale_caches_or_no_documentation_as_its_patch_says(patch, cached, documented):
    patch()
    task = train.make_training_task(train.Config(), 1, 7)
    target, *_ = task.meta["targets"]
    plain = synth_tasks.make_task(1, 7)
    assert bool(set(task.files) - set(plain.files)) == cached
    line = f"{target['module']}.{target['name']}:"
    assert (line in task.files["docs.md"]) == documented


# ---------------------------------------------------------------- arms trained for real


def test_imitation_learns_from_what_the_expert_does_and_without_reward_and_hints_nothing_is_learned(
    run, tmp_path, monkeypatch
):
    rl = [*SMALL, *RL, "--max_turns=20", "--warmup=0", f"--start_from={run}"]
    before = weights(run / "sft")
    learn_new.imitate()
    flags = ["--router_replay=0", "--feedback=0"]
    monkeypatch.setattr(train, "SLOPPY", 0.0)
    train.main([*rl, f"--out={tmp_path}/a", *flags])
    log = log_of(tmp_path / "a")
    assert (log["finished"], log["bad_tool"], log["communication"]) == (1, 0, 0)
    assert log["turns"] > 2 and "sync_bytes" not in log
    assert (log["solved"], log["stale"], log["mismatch"]) == (1, 0, 0)

    # Hints are the only thing to learn from, on the rollouts of a careless expert.
    class HintsOnDemonstrations(learn_new.HintsAlone, learn_new.Imitation):
        pass

    train.STAGE["rl"] = HintsOnDemonstrations
    flags = ["--router_replay=0", "--habits=unavailable_tool,communication"]
    monkeypatch.setattr(train, "SLOPPY", 3.0)
    train.main([*rl, f"--out={tmp_path}/c", *flags])
    log = log_of(tmp_path / "c")
    assert log["flagged"] > 10 and log["teacher_tokens"] > 100 and log["gap"] != 0

    class EmptyHints(contexts.WithContext, HintsOnDemonstrations):
        context = staticmethod(contexts.no_words)

    contexts.current_teacher()
    train.STAGE["rl"] = EmptyHints
    train.main([*rl, f"--out={tmp_path}/d", *flags])
    log = log_of(tmp_path / "d")
    assert log["flagged"] > 10
    assert [log["gap"], log["feedback_kl"]] == pytest.approx([0, 0], abs=1e-7)

    learn_new.hints_alone()
    train.main([*rl, f"--out={tmp_path}/b", "--feedback=0"])
    assert not torch.equal(weights(tmp_path / "c" / "rl")["head.weight"], before["head.weight"])
    for name, tensor in weights(tmp_path / "b" / "rl").items():
        if not name.endswith(("router.bias", "router.load")):
            assert torch.equal(tensor, before[name]), name

    tokenizer = evaluation.load_policy(run / "sft")[1]
    task, limits = synth_tasks.make_task(0, 5), Limits(1024)
    rollout = demonstrate(task, tokenizer, random.Random(5), limits, 0.0)
    batch = pack(rollout.segments, [1.0])
    likelihood = []
    for folder in (run / "sft", tmp_path / "a" / "rl"):
        model = evaluation.load_policy(folder)[0]
        logp = model.logprobs(model(batch["tokens"]), batch["targets"])
        likelihood.append(float((logp * batch["mask"]).sum()))
    assert likelihood[1] > likelihood[0] + 1


def test_new_operations_are_told_by_name_in_training_tasks_alone_and_only_within():
    def tasks_of(level, split):
        return [synth_tasks.make_task(level, seed, split) for seed in range(12)]

    def told(made):
        return [task.problem_statement for task in made]

    before = told(tasks_of(0, "train"))
    held_out = told(tasks_of(0, "heldout") + tasks_of(3, "heldout"))
    with learn_new.new_operations():
        assert told(tasks_of(0, "heldout") + tasks_of(3, "heldout")) == held_out
        kinds = set()
        for task in tasks_of(0, "train"):
            (target,) = task.meta["targets"]
            ((op, k),) = target["steps"]
            kinds.add(op in learn_new.NEW)
            if op not in learn_new.NEW:
                continue
            # The oracle is Python: what the hidden inputs demand, by what the name means.
            meaning = {"mirror": lambda x: max(x, k), "fold": lambda x: x * k}[op]
            reduce = {"list": list, "sum": sum, "count": len, "largest": max}[target["reduction"]]
            for _, _, (xs,), value in task.hidden:
                assert value == reduce([meaning(x) for x in xs])
            assert f"{op} {k}, return" in task.problem_statement
            said = {"mirror": f"max(x, {k})", "fold": f"x * {k}"}[op]
            assert said not in task.problem_statement
            # A teacher reads what the docs say of it elsewhere.
            hint = learn_new.tell_meaning(micro.Function(**target))
            assert hint.startswith(f"{target['name']}: {said}, return")
            _, files = expert.record_expert(task, random.Random(0), sloppy=0)
            assert run_trusted(files).exit_code == 0
        assert kinds == {True, False}
    assert told(tasks_of(0, "train")) == before


def test_another_policy_teaches_every_turn_with_the_weights_that_plain_sft_has_left(
    run, tmp_path, capsys
):
    words = [*SMALL, *RL, "--levels=0", "--curriculum=0", f"--start_from={run}"]
    learn_new.another_policy()
    out = f"--out={tmp_path}/another_policy-1"
    with pytest.raises(SystemExit):
        train.main([*words, out])
    assert "the arm of plain SFT comes first" in capsys.readouterr().err
    learn_new.until_the_end.close()

    learn_new.plain_sft()
    flags = ["--feedback=0", "--router_replay=0", f"--out={tmp_path}/plain_SFT-1"]
    train.main([*words, *flags, "--warmup=0", "--adam_lr=0.01"])
    learn_new.until_the_end.close()

    class Watched(learn_new.AnotherPolicy):
        def after_step(self):
            super().after_step()
            taught.append({name: held.clone() for name, held in self.teacher.weights.items()})

    taught = []
    learn_new.another_policy()
    train.STAGE["rl"] = Watched
    train.main([*words, out, "--warmup=0"])
    learn_new.until_the_end.close()
    for name, tensor in weights(tmp_path / "plain_SFT-1" / "rl").items():
        if name in taught[0]:
            assert torch.equal(taught[0][name], tensor.float()), name
    # Every sampled token is a target, and with other weights the teacher says something else.
    log = log_of(tmp_path / "another_policy-1")
    assert log["flagged"] == pytest.approx(4 * log["sampled"]) and log["feedback_kl"] > 0
    assert len(taught[0]) > 20


def test_an_arm_logs_the_curves_of_every_experiment(run, tmp_path):
    summary.told_once_not_learned()
    tasks.two_of_a_level()
    words = [
        *SMALL,
        "--habits=communication,code_style",
        "--eval_tasks=3",
        "--window=200",
        "--seed=3",
        f"--start_from={run}",
        f"--out={tmp_path}",
    ]
    train.main([*words, *RL])
    # what a summary names is logged where there was a summary
    logged = {*log_of(tmp_path), "named"}
    for name in TRAINING:
        experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
        assert experiment.stages == ("pretrain",) or logged >= set(experiment.curves)


def test_a_run_goes_on_with_the_patch_that_it_was_begun_with(run, tmp_path):
    words = [*SMALL, *RL, f"--start_from={run}", f"--out={tmp_path}/run"]
    command = [sys.executable, "-m", "experiments.runner"]

    def go(*command):
        return run_command(command, cwd=ROOT)

    arm = "--arm=experiments.objective:overlong_masked"
    assert go(*command, arm, "--", *words).returncode == 0
    assert (
        checkpoints.load_extra(tmp_path / "run" / "rl")["patch"]
        == "experiments.objective:overlong_masked"
    )
    assert "finished already" in go(*command, arm, "--", *words).stdout
    done = go(sys.executable, "train.py", *words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "experiments.objective:overlong_masked" in done.stderr
    label = checkpoints.made_by(tmp_path / "run" / "rl")
    assert label == "made by experiments.objective:overlong_masked"
    for wrong in (
        "--arm=experiments.objective:nothing",
        "--arm=experiments.objective:EXPERIMENT",
        "--arm=nothing",
        "--x",
    ):
        done = go(*command, wrong, "--", *words)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


# ---------------------------------------------------------------- the runner


@pytest.mark.parametrize("name", NAMES)
def test_every_file_says_its_question_command_result_and_figure_and_names_its_patches(name):
    module = importlib.import_module(f"experiments.{name}")
    head = module.__doc__
    assert head.startswith(f"{name}.py: ") and f"python -m experiments.{name}\n" in head
    assert "\nFound" in head
    for figure in re.findall(r"figures/\w+\.png", head):
        assert (ROOT / "experiments" / figure).exists(), figure
    if name not in TRAINING:
        return
    experiment = module.EXPERIMENT
    for arm in [*experiment.arms.values(), *filter(None, [experiment.sft])]:
        if arm.patch:
            module, _, function = arm.patch_name.partition(":")
            assert getattr(importlib.import_module(module), function) is arm.patch
    # train.py takes the flags of every run
    chains, folders = runner.plan_jobs(name, experiment, 1, "out", None, [])
    for chain in chains:
        for job in chain:
            runner.check_flags(job)
    assert set(folders) == set(experiment.arms)


def fake_runs(monkeypatch):
    """Takes the place of hours of training: records each run, and writes a log and a summary with
    numbers that follow from its seed and its flags. -> the list of the recorded runs"""
    asked = []

    def run_job(job):
        asked.append(job)
        out, words = job.folder, job.words
        out.mkdir(parents=True, exist_ok=True)
        seed = next(int(w.removeprefix("--seed=")) for w in words if w.startswith("--seed="))
        bad = [0.5, 0.4, 0.3] if "--feedback=0" in words else [0.5, 0.1 * seed, 0.0]
        lines = [
            {
                "step": i + 1,
                "bad_tool": b,
                "solved": 1 - b,
                "cheats": b,
                "reward": 1 - b,
                "seconds": seed,
            }
            for i, b in enumerate(bad)
        ]
        (out / "rl.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        lines = [{"step": i + 1, "loss": 1 / seed} for i in range(60)]
        lines[-1]["constants"] = 0.9
        if "--stage=rl" not in words and "--stage=eval" not in words:
            (out / "sft.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            (out / "pretrain.jsonl").write_text('{"step": 1, "held_out_loss": 3.5}\n')
        whole = dict(solved=0.5 + 0.1 * seed, tokens=100, bad_tool=bad[-1], finished=1.0)
        policy = {"overall": whole, "levels": {"0": whole, "1": whole}}
        table = "this command: 14.0 minutes, 3.1 GB at most in 2 processes"
        record = {"policies": {"after RL": policy}, "table": table}
        (out / "summary.json").write_text(json.dumps(record))

    monkeypatch.setattr(runner, "run_job", run_job)
    return asked


@pytest.mark.parametrize("cores", [2, 8])
def test_an_experiment_runs_every_arm_with_every_seed_from_one_base_and_reports_mean_and_spread(
    cores, tmp_path, monkeypatch, capsys
):
    asked = fake_runs(monkeypatch)
    fake = runner.run_job
    begun = threading.Barrier(2)  # both seeds at once
    monkeypatch.setattr(runner, "BYTES_OF_RUN", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(runner, "run_job", lambda job: (begun.wait(60), fake(job)))
    runner.main("experiments.feedback", ["--seeds=1,3", f"--out={tmp_path}", "--scale=tiny"])
    assert {job.threads for job in asked} == {cores // 2}
    words = [job.words for job in asked if "--seed=1" in job.words]
    base, arm = f"--out={tmp_path}/base-1", f"--out={tmp_path}/feedback/reward_alone-1"
    start = f"--start_from={tmp_path}/base-1"
    assert words == [
        (base, "--seed=1", "--scale=tiny"),
        ("--stage=rl", start, arm, "--seed=1", "--scale=tiny", "--feedback=0"),
        ("--stage=eval", start, arm, "--seed=1", "--scale=tiny", "--feedback=0"),
    ]
    assert [job.words for job in asked if "--seed=3" in job.words] == [
        tuple(re.sub(r"(base-|alone-|seed=)1$", r"\g<1>3", word) for word in line) for line in words
    ]
    assert not any(job.patch for job in asked)
    data = json.loads((tmp_path / "feedback" / "feedback.json").read_text())
    curves = data["results"]["reward alone"][1]["curves"]
    assert curves == {"bad_tool": [0.5, 0.4, 0.3], "solved": [0.5, 0.6, 0.7]}
    assert data["seeds"] == [1, 3] and data["flags"] == ["--scale=tiny"] and "commit" in data
    ends = [run["end"] for runs in data["results"].values() for run in runs]
    assert {end["bad_tool: tenth at"] for end in ends} == {4}  # never
    question, arms, *lines = capsys.readouterr().out.splitlines()
    assert question.endswith("2 seeds)")
    assert re.split("  +", arms)[-2:] == ["reward alone", "with targeted feedback"]
    numbers = {line[:22].strip(): line[22:].split() for line in lines}
    assert numbers["solved"] == 2 * ["0.700", "(0.141)"]
    *_, last = [line.split() for line in lines if "with targeted feedback" in line]
    assert last[0] == "3" and {"0.900", "0.800", "14.000", "3.100"} <= set(last)
    assert numbers["seconds a step"] == 2 * ["2.000", "(1.414)"]
    assert (tmp_path / "feedback" / "feedback.png").stat().st_size > 5000


def test_a_kept_experiment_grows_seed_by_seed(tmp_path, monkeypatch, capsys):
    fake_runs(monkeypatch)
    for folder in ("results", "figures"):
        (tmp_path / "kept" / folder).mkdir(parents=True)
    monkeypatch.setattr(runner, "HERE", tmp_path / "kept")
    path = tmp_path / "kept" / "results" / "feedback.json"

    def run(*seeds, out="out", more=()):
        words = [f"--seeds={','.join(map(str, seeds))}", f"--out={tmp_path / out}", *more]
        runner.main("experiments.feedback", [*words, "--keep"])
        return json.loads(path.read_text())

    # Two seeds at once, and one after the other on another machine, are the same.
    whole = run(1, 3)
    path.unlink()
    run(1, out="first")
    both = run(3, out="second")
    assert both == whole and (tmp_path / "kept" / "figures" / "feedback.png").exists()

    # A seed that is run again stays one; runs with another flag are another experiment.
    assert run(3, out="second")["seeds"] == [1, 3]
    assert run(3, 5, out="third")["seeds"] == [1, 3, 5]
    assert "is replaced" not in capsys.readouterr().out
    assert run(5, out="third", more=["--scale=tiny"])["seeds"] == [5]
    assert f"{path}: held other arms, steps or flags, and is replaced" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("experiments/results/*.json")), ids=lambda path: path.stem
)
def test_a_seed_can_be_added_to_every_file_of_results_that_names_its_commit(path):
    kept = json.loads(path.read_text())
    arms = {arm: ["new"] for arm in kept["results"]}
    record = {
        "commit": "new",
        "seeds": [99],
        "steps": kept.get("steps"),
        "flags": kept["flags"],
        "results": arms,
    }
    found = runner.with_kept_seeds(record, path)
    assert found["seeds"] == ([*kept["seeds"], 99] if "commit" in kept else [99])
    assert {len(outcomes) for outcomes in found["results"].values()} == {len(found["seeds"])}


def test_a_kept_run_may_be_older_than_a_number():
    new = {"end": {"solved": 0.5, "bench": 0.25}}
    results = {"one": [{"end": {"solved": 0.7}}, new], "two": [new, new]}
    assert tables.known_columns(results) == ["solved", "bench"]
    header, one, two = [line.split() for line in tables.compare("x", results).splitlines()[1:4]]
    assert header == ["solved", "bench"]
    assert one[:4] == ["one", "0.600", "(0.141)", "-"] and two[3:] == ["0.250", "(0.000)"]
    listed = tables.list_runs(results, [1, 2], ("bench",)).splitlines()
    assert [line.split()[-1] for line in listed] == ["bench", "-", "0.250", "0.250", "0.250"]


def test_tasks_counts_what_is_solved_by_kind():
    levels = {str(level): {"solved": level / 20} for level in (0, 1, 2, 3, 4, 5, 8, 13)}
    found = tasks.solved_by_kind(None, {"after RL": {"levels": levels}})
    assert math.isnan(found.pop("extend"))  # not asked for with --eval_levels
    assert found == {
        "put back": pytest.approx(0.125),
        "repair": 0.4,
        "untidy": 0.65,
    }


def test_the_spread_over_seeds_is_the_samples():
    for values in ([0.969, 0.941, 0.809], [0.5, 0.9], [0.1, 0.2, 0.3, 0.45]):
        text = tables.compare("x", {"arm": [{"end": {"solved": value}} for value in values]})
        assert f"({statistics.stdev(values):.3f})" in text
    text = tables.compare("x", {"arm": [{"end": {"solved": 0.25}}]})
    assert "0.250" in text and "(0" not in text and "one seed" in text


def test_runs_are_listed_seed_by_seed():
    def runs(*solved):
        return [{"end": {"solved": value, "GB": 3.5}} for value in solved]

    text = tables.list_runs({"one": runs(0.5, 0.7), "two": runs(0.6, 0.8)}, [7, 3], ("solved",))
    cells = [line.split() for line in text.splitlines()]
    assert cells[0] == ["seed", "arm", "solved"]
    assert cells[1:3] == [["7", "one", "0.500"], ["7", "two", "0.600"]]
    assert cells[3:] == [["3", "one", "0.700"], ["3", "two", "0.800"]]


def test_differences_are_of_runs_of_one_seed():
    def runs(*solved):
        return [{"curves": {}, "end": {"solved": s, "unknown": float("nan")}} for s in solved]

    results = {"one": runs(0.5, 0.7, 0.9), "two": runs(0.6, 0.8, 1.0)}
    text = tables.compare("Which?", results)
    assert tables.mean_and_deviation([0.5, float("nan")]) == "-"
    assert "0.700 (0.200)" in text and "0.800 (0.200)" in text
    assert "solved, two less one: 0.100 (" in text and "+0.100, +0.100, +0.100" in text


def test_a_figure_says_its_question_its_command_and_where_each_arm_begins_and_ends(
    tmp_path, monkeypatch
):
    def run(begin, levels):
        curve = [begin] * 5 + [0.5] * 3 + [0.9] * 5
        return {
            "curves": {"solved": curve},
            "levels": {"solved": levels},
            "level_names": ["0", "8"],
        }

    drawn, plain = [], tables.drawing.make_axes

    def make_axes(*given):
        drawn.append(plain(*given))
        return drawn[-1]

    monkeypatch.setattr(tables.drawing, "make_axes", make_axes)
    results = {"one": [run(0.1, [0.2, 0.4]), run(0.3, [0.6, 0.8])], "two": [run(0.4, [1, 1])] * 2}
    experiment = runner.Experiment("Which?", curves=("solved",), arms={}, by_level=("solved",))
    tables.draw_curves(experiment, results, tmp_path / "which.png")
    ((figure, axes),) = drawn
    assert figure.get_suptitle() == "Which?" and "experiments.which" in figure.get_supxlabel()
    legends = [[text.get_text() for text in panel.get_legend().get_texts()] for panel in axes]
    assert legends[0] == ["one: 0.20 to 0.90", "two: 0.40 to 0.90"]
    assert legends[1] == ["one: mean 0.50", "two: mean 1.00"]
    assert [panel.get_ylabel() for panel in axes] == ["solved in training", "solved"]

    # Many arms: a row for each, a point for each seed.
    many = {f"arm {n}": [{"end": {"solved": n / 20 + seed}} for seed in (0, 1)] for n in range(7)}
    tables.draw_curves(replace(experiment, by_seed=("solved",)), many, tmp_path / "many.png")
    panel = drawn[-1][1]
    assert [label.get_text() for label in panel.get_yticklabels()] == list(many)
    points = [dots.get_offsets().tolist() for dots in panel.collections]
    assert points == [[[n / 20 + seed, n] for n in range(7)] for seed in (0, 1)]


def test_an_experiment_with_an_sft_of_its_own_makes_it_first_and_patches_go_to_their_own_runs(
    tmp_path, monkeypatch
):
    asked = fake_runs(monkeypatch)
    # There is no policy whose edits a monitor could look at.
    monkeypatch.setattr(
        hacking, "EXPERIMENT", replace(hacking.EXPERIMENT, more=lambda folder, policies: {})
    )
    runner.main("experiments.hacking", ["--seeds=1", f"--out={tmp_path}", "--window=700"])
    base, own = f"{tmp_path}/base-1", f"{tmp_path}/hacking/base-1"
    assert [job.words for job in asked[:3]] == [
        ("--stage=pretrain", f"--out={base}", "--seed=1", "--window=700"),
        ("--stage=long", f"--out={base}", "--seed=1", "--window=700"),
        ("--stage=sft", f"--start_from={base}", f"--out={own}", "--seed=1", "--window=700"),
    ]
    # The two arms run side by side, in any order.
    first, *patches = [job.patch.rpartition(":")[2] for job in asked[2:]]
    assert [job.patch for job in asked[:2]] == ["", ""] and first == "stale_caches"
    assert sorted(patches) == ["careless", "careless", "hardened", "hardened"]
    arms = [job.words for job in asked if job.words[0] == "--stage=rl"]
    assert [words[5:] for words in arms] == 2 * [hacking.TWO_LEVELS]
    assert {words[1] for words in arms} == {f"--start_from={own}"}


def test_an_experiment_on_pretraining_changes_that_stage_alone(tmp_path, monkeypatch):
    asked = fake_runs(monkeypatch)
    # No run has left a policy.
    monkeypatch.setattr(pretraining, "loss_on_codebases", lambda folder: 0.25)
    runner.main("experiments.pretraining", ["--seeds=2", f"--out={tmp_path}", "--dim=64"])

    def arm(n, name="steps"):
        out = f"--out={tmp_path}/pretraining/{n}_{name}-2"
        stages = ("pretrain", "long", "sft", "rl", "eval")
        own = [(f"--steps={n}",), (), (), (), ()]
        return [
            (f"--stage={stage}", out, "--seed=2", "--dim=64", *flags)
            for stage, flags in zip(stages, own)
        ]

    base = (f"--out={tmp_path}/base-2", "--seed=2", "--dim=64")
    # The arms run side by side, each in its order.
    assert asked[0].words == base and len(asked) == 26
    with_codebases = [(n, "steps-with_codebases") for n in (30, 120, 480)]
    for which in ((30,), (480,), *with_codebases):
        wanted = arm(*which)
        jobs = [job for job in asked if wanted[0][1] in job.words]
        assert [job.words for job in jobs] == wanted
        patch = "experiments.pretraining:with_codebases" if len(which) > 1 else ""
        assert [job.patch for job in jobs] == [patch, "", "", "", ""]
    data = json.loads((tmp_path / "pretraining" / "pretraining.json").read_text())
    ends = [run["end"] for runs in data["results"].values() for run in runs]
    assert [end["loss after SFT"] for end in ends] == [0.5] * 6
    assert [end["loss on codebases"] for end in ends] == [0.25] * 6
    assert ends[0]["reward: last 5"] == pytest.approx(np.mean([0.5, 0.8, 1.0]))
    assert "loss after SFT" in data["table"] and "nan" not in data["table"]


def test_half_of_the_text_is_codebases_of_the_training_split(tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, "CODEBASES", 6)
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f"{name} = 1\n" * 2000)
    config = train.Config(stage="pretrain", data=str(tmp_path), context=16, seed=2)
    run = SimpleNamespace(config=config, tokenizer=BYTES, say=print)
    plain, mixed = train.Text(run), pretraining.WithCodebases(run)
    assert len(mixed.train) == 2 * len(plain.train)
    assert torch.equal(mixed.train[: len(plain.train)], plain.train)
    assert torch.equal(mixed.held, plain.held)
    # The other half holds every file of the tasks, whole, and not the runner of the tests. The
    # first file has no token of a text's end before it.
    end = BYTES.id["<|text|>"]
    other = mixed.train[len(plain.train) :].tolist()
    for i in range(6):
        task = synth_tasks.make_task(i, (2 << 24) + i)
        for path, text in {**task.files, **task.solution}.items():
            tokens = [end, *BYTES.encode(text), end]
            found = any(
                other[place : place + len(tokens)] == tokens
                for place in range(len(other))
                if other[place] == end
            )
            assert found == (path != "check.py") or (i, path) == (0, min(task.files))


def test_windows_cover_a_stream_once_and_losses_stand_token_by_token():
    rows = pretraining.cut_windows(torch.arange(11), 4)
    assert rows.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    model = moe.ModelConfig(vocab=16, layers=1, dim=32, heads=2).build_model()
    torch.nn.init.normal_(model.head.weight)
    found = pretraining.token_losses(model, rows)  # (2, 4)
    for i in range(2):
        logits = model.head(model.norm(model(rows[i : i + 1, :-1])))[0]
        wanted = torch.nn.functional.cross_entropy(logits, rows[i, 1:], reduction="none")
        assert torch.allclose(found[i], wanted, atol=1e-5)


def test_lengths_are_told_arm_by_arm_from_short_to_long(tmp_path, capsys):
    def write(name, turns, bad):
        lines = [dict(step=i + 1, turns=turns, bad_tool=b) for i, b in enumerate(bad)]
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "rl.jsonl").write_text(text)

    write("hint-b", 20, [0.4] * 5 + [0.0] * 3)
    write("hint-a", 4, [0.4] * 5 + [0.1] * 2)
    write("scalar-b", 20, [0.4] * 6)
    found = opponents.read_lengths(tmp_path)
    # Means of five: 0.4, then 0.34, 0.28 in a; 0.32, 0.24, 0.16 in b, whose eighth is the first
    # below a half of 0.4.
    assert found == {"hint": [(4, 8, 7), (20, 8, 8)], "scalar": [(20, 7, 6)]}
    opponents.show_lengths(tmp_path)
    said = capsys.readouterr().out
    assert "4 turns: not in 7, 20 turns: 8" in said and (tmp_path / "lengths.png").exists()
    with pytest.raises(ValueError, match="no runs there"):
        opponents.read_lengths(tmp_path / "other")


def test_the_cost_of_a_teacher_is_its_forwards_beside_the_trainers(tmp_path):
    lines = [dict(step=n, flagged=10, teacher_tokens=300 * n, tokens=1000) for n in (1, 2)]
    (tmp_path / "rl.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = contexts.cost_of_teaching(tmp_path, {})
    assert [*found.values()] == [20, pytest.approx(900 / 6000)]


def test_a_rank_correlation_is_of_the_order_alone():
    assert tables.rank_correlation([1, 2, 30], [5, 6, 6.5]) == pytest.approx(1)
    assert tables.rank_correlation([1, 2, 30], [5, 4, -100]) == pytest.approx(-1)
    # 1 - 6 * (1 + 1 + 0 + 0) / (4 * 15), by the formula of squared differences of ranks
    assert tables.rank_correlation([1, 2, 3, 4], [2, 1, 3, 4]) == pytest.approx(0.8)
    # Equal numbers share a place: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4, by hand
    assert tables.rank_correlation([1, 2, 2, 9], [5, 6, 7, 8]) == pytest.approx(4.5 / 22.5**0.5)
    assert math.isnan(tables.rank_correlation([1, 2], [2, 2]))


def test_an_arm_without_stages_is_one_whole_run(tmp_path, monkeypatch):
    asked = fake_runs(monkeypatch)
    runner.main("experiments.generations", ["--seeds=2", f"--out={tmp_path}"])
    folder = f"--out={tmp_path}/generations"
    flags = ("--seed=2", "--feedback=0", "--length_penalty=0")
    found = {job.words[0]: job for job in asked}
    assert len(asked) == 4 and found[f"--out={tmp_path}/base-2"].words[1:] == ("--seed=2",)
    assert found[f"{folder}/with_many_tasks-2"].words[1:] == flags
    older = found[f"{folder}/as_Composer_2-2"]
    assert "--optimizer=adamw" in older.words and {*flags} < {*older.words}
    assert older.patch == "experiments.tasks:ten_of_a_level"


@pytest.mark.parametrize("fault", installer.FAULTS)
def test_with_a_fault_in_the_set_up_nothing_passes_and_the_script_mends_it(fault):
    for number in range(3):
        task = installer.broken_project(fault, number)
        assert run_trusted(task.files).exit_code
        assert not judge(task, task.files, Sandbox()).solved
        mended = installer.set_up(task.files)
        assert judge(task, mended, Sandbox()).solved
        assert {path: text.strip() for path, text in mended.items()} == {
            path: text.strip() for path, text in task.solution.items()
        }
        listed = re.search("Files: (.*)", task.problem_statement)[1].split()
        assert {*listed, "check.py"} == {*task.files}


def test_weights_between_groups_reach_a_sampler_before_a_group_and_not_within(monkeypatch):
    monkeypatch.setattr(fast_workers, "make_sampler", lambda *given, **options: SimpleNamespace())
    monkeypatch.setattr(fast_workers, "sample_groups", lambda sampler, *given: sampler.refresh())
    loaded = []
    monkeypatch.setattr(fast_workers.Generator, "refresh", lambda self: loaded.append(1))
    given = ("folder", None, None, "cpu", None, 2, Limits(99))
    fast_workers.Generator(*given)([], [], 0)
    assert len(loaded) == 2
    asynchronous.weights_between_groups()
    fast_workers.Generator(*given, rows=3)([], [], 0)
    assert len(loaded) == 3


def test_mean_best_and_different_ways_are_counted_by_task(monkeypatch):
    monkeypatch.setattr(rollout_module, "grade", lambda played: None)

    def played(solved, *calls):
        turn = SimpleNamespace(calls=[SimpleNamespace(name=name, args=["a"]) for name in calls])
        return SimpleNamespace(solved=solved, turns=[turn])

    one = [played(True, "x"), played(True, "x", "y"), played(True, "x"), played(False, "z")]
    none = [played(False, "x"), played(False, "y")]
    found = more_rl.measure([one, none])
    assert found == dict(mean=0.375, best=0.5, different=pytest.approx(2 / 3))


def test_more_rl_plays_held_out_tasks_at_its_steps_and_goes_on(run, tmp_path, monkeypatch):
    monkeypatch.setattr(more_rl, "TASKS_OF_A_LEVEL", 1)
    monkeypatch.setattr(more_rl, "TASKS_OF_A_ROW", 1)
    monkeypatch.setattr(more_rl, "PASSES", 2)
    rl = [*SMALL, *RL, f"--start_from={run}"]
    train.main([*rl, f"--out={tmp_path}/plain"])
    more_rl.measured()
    train.main([*rl, f"--out={tmp_path}/measured"])
    found = more_rl.read_measures(tmp_path / "measured")
    sets, numbers = ("held out", "bench"), ("mean", "best", "different")
    assert list(found) == [0, 1]
    assert [*found[0]] == [f"{name}: {number}" for name in sets for number in numbers]
    # Measuring changes nothing.
    plain, measured = (weights(tmp_path / name / "rl") for name in ("plain", "measured"))
    assert all(torch.equal(tensor, measured[name]) for name, tensor in plain.items())
    more_rl.draw([tmp_path / "measured"], tmp_path / "more.png")
    assert (tmp_path / "more.png").stat().st_size > 10_000


def test_a_larger_model_teaches_all_that_was_sampled_and_reads_no_more(run, tmp_path, capsys):
    """Under itself as the teacher there is nothing to learn, under a wider model there is."""
    rl = [*SMALL, *RL, "--warmup=0", "--router_replay=0", "--lr=0", "--adam_lr=0"]
    contexts.larger_teacher()
    with pytest.raises(SystemExit) as end:
        train.main([*rl, f"--start_from={run}", f"--out={tmp_path}/contexts/a"])
    assert end.value.code == 2 and "the larger model comes first" in capsys.readouterr().err

    shutil.copytree(run / "sft", tmp_path / "wide-1337" / "sft")
    train.main([*rl, f"--start_from={run}", f"--out={tmp_path}/contexts/same"])
    wide = [*SMALL, "--dim=96", "--seed=1337", f"--out={tmp_path}/wide-1337", "--steps=1"]
    shutil.rmtree(tmp_path / "wide-1337")
    for stage in ("pretrain", "long", "sft"):
        train.main([*wide, f"--stage={stage}"])
    train.main([*rl, f"--start_from={run}", f"--out={tmp_path}/contexts/wide"])
    same, other = (log_of(tmp_path / "contexts" / name) for name in ("same", "wide"))
    for log in (same, other):
        assert log["flagged"] == pytest.approx(4 * log["sampled"])  # of four rollouts
    assert same["feedback_kl"] == pytest.approx(0, abs=1e-6) and other["feedback_kl"] > 1e-4


def test_with_steps_every_arm_has_so_many_and_none_is_the_default_run(tmp_path, monkeypatch):
    asked = fake_runs(monkeypatch)
    runner.main("experiments.contexts", ["--seeds=1", f"--out={tmp_path}", "--steps=2"])
    arms = [job.words for job in asked if job.words[0] == "--stage=rl"]
    assert len(arms) == len(contexts.EXPERIMENT.arms) == 17
    assert all([w for w in words if "--steps" in w] == ["--steps=2"] for words in arms)
    asked.clear()
    runner.main("experiments.feedback", ["--seeds=1", f"--out={tmp_path}", "--steps=2"])
    # Arms run side by side: the order holds within each.
    stages = {}
    for job in asked:
        of_job = [word for word in job.words if word.startswith("--stage")]
        stages.setdefault(job.folder.name, []).extend(of_job)
    first, *others = stages.values()
    assert first == ["--stage=pretrain", "--stage=long", "--stage=sft"]
    assert others == 2 * [["--stage=rl", "--stage=eval"]]


def test_what_is_finished_is_not_run_again_and_what_was_killed_is(tmp_path, monkeypatch):
    asked, fail = [], True

    def start(command, **more):
        asked.append(command[1:])
        words = [word for word in command if word.startswith("--out=")]
        Path(words[0].removeprefix("--out=")).mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(returncode=2 * (fail and "--stage=eval" in command), stderr="a line")

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(runner, "current_commit", lambda: "aaaa")
    experiment = objective.EXPERIMENT
    # One run at a time, so that all that comes behind a failure is left out.
    monkeypatch.setattr(runner, "AT_ONCE", 1)
    chains, _ = runner.plan_jobs("objective", experiment, 1, tmp_path, None, ["--scale=tiny"])
    jobs = [job for chain in chains for job in chain]

    def run():
        runner.run_plans("objective", [[list(chain) for chain in chains]])

    with pytest.raises(SystemExit):
        run()
    begun = len(asked)
    assert begun == 5 and asked[3][0].endswith("train.py")  # three of the base, rl, eval
    fail = False
    asked.clear()
    run()
    # the evaluation that failed, and the three other arms
    assert len(asked) == 7 and "--stage=eval" in asked[0]
    patched = asked[1][:3]
    assert patched == ["-m", "experiments.runner", "--arm=experiments.objective:over_the_deviation"]
    asked.clear()
    monkeypatch.setattr(runner, "current_commit", lambda: "bbbb")
    run()
    assert not asked
    # at a later commit the runs are still those of the commit that made them
    assert {job.record()["commit"] for job in jobs} == {"aaaa"}
    # what somebody evaluated there by hand is not taken for the run's own evaluation
    evaluation = jobs[-1]
    (evaluation.folder / "summary.json").write_text("by hand")
    assert not evaluation.is_finished() and all(job.is_finished() for job in jobs[:-1])


def test_what_a_stopped_or_full_run_says_is_the_command_that_was_typed(
    tmp_path, monkeypatch, capsys
):
    config = train.Config(out=str(tmp_path))
    with pytest.raises(SystemExit):
        failures.end_stopped(config, ["--stage=rl"], 15)
    # nothing was saved yet, so there is nothing to resume
    assert capsys.readouterr().err.endswith("python train.py --stage=rl\n")
    # ranks that torchrun has started
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "none")
        command = failures.command_to_type(config, ["--ep=8"])
    assert command == "torchrun ... train.py --ep=8"
    # an arm by hand
    monkeypatch.setattr(train, "main", lambda argv: None)
    monkeypatch.setattr(failures, "PROGRAM", failures.PROGRAM)
    runner.run_arm("experiments.objective:overlong_masked", [])
    expected = "python -m experiments.runner --arm=experiments.objective:overlong_masked -- --x=1"
    assert failures.command_to_type(config, ["--x=1"]) == expected
    # a run of an experiment
    seen = []

    def start(command, env, **more):
        seen.append(env[failures.EXPERIMENT_COMMAND])
        return SimpleNamespace(returncode=2, stderr="a line")

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(runner, "current_commit", lambda: "")
    with pytest.raises(SystemExit):
        runner.main("experiments.feedback", ["--seeds=1", f"--out={tmp_path}"])
    command = f"python -m experiments.feedback --seeds=1 --out={tmp_path}"
    assert seen == [command]
    monkeypatch.setenv(failures.EXPERIMENT_COMMAND, command)
    full = torch.OutOfMemoryError("too much")
    for text in (
        failures.command_to_type(config, ["--stage=rl"]),
        failures.explain_full_card(config, ["--stage=rl"], full),
    ):
        assert command in text and "train.py" not in text and "--resume" not in text


def test_a_seed_that_fails_ends_the_others_with_the_run_they_are_at(tmp_path, monkeypatch, capsys):
    asked, failed = [], threading.Event()

    def run_job(job):
        asked.append(job)
        if "--seed=3" in job.words:
            failed.set()
            raise ChildProcessError(2, "a line")
        assert failed.wait(60)
        time.sleep(0.5)

    monkeypatch.setattr(runner, "run_job", run_job)
    monkeypatch.setattr(runner, "BYTES_OF_RUN", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as end:
        runner.main("experiments.contexts", ["--seeds=1,2,3", f"--out={tmp_path}"])
    assert end.value.code == 2 and len(asked) == 3 and "a line" in capsys.readouterr().err


def test_arms_run_side_by_side_behind_what_they_share_and_an_arm_behind_what_it_reads(
    tmp_path, monkeypatch
):
    """Four cores, one seed: the shared runs one by one with all cores, then four arms at once."""
    fake_runs(monkeypatch)
    fake, lock, now, most, order = runner.run_job, threading.Lock(), [], [], []

    def run_job(job):
        with lock:
            now.append(job)
            most.append(len(now))
            order.append(job)
        time.sleep(0.05)
        fake(job)
        with lock:
            now.remove(job)

    monkeypatch.setattr(runner, "run_job", run_job)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(runner, "BYTES_OF_RUN", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    experiment = replace(learn_new.EXPERIMENT, more=lambda folder, policies: {}, by_seed=())
    monkeypatch.setattr(learn_new, "EXPERIMENT", experiment)
    runner.main("experiments.learn_new", ["--seeds=1", f"--out={tmp_path}"])
    shared = [job for job in order if job.words[0] not in ("--stage=rl", "--stage=eval")]
    assert order[: len(shared)] == shared and most[: len(shared)] == [1] * len(shared)
    assert {job.threads for job in shared} == {4} and max(most) == 4
    assert {job.threads for job in order[len(shared) :]} == {1}

    def place(arm, stage):
        out = f"--out={tmp_path}/learn_new/{arm}-1"
        (found,) = [i for i, job in enumerate(order) if {f"--stage={stage}", out} <= {*job.words}]
        return found

    assert place("plain_SFT", "eval") < place("another_policy", "rl")
    for arm in ("reward_alone", "plain_SFT", "hints", "another_policy"):
        assert place(arm, "rl") < place(arm, "eval")


def test_as_many_runs_go_at_once_as_cores_and_memory_carry(monkeypatch):
    sizes = {"SC_PHYS_PAGES": 3 << 20, "SC_PAGE_SIZE": 4096}  # 12 GiB
    monkeypatch.setattr(os, "sysconf", sizes.get)
    assert [runner.runs_at_once(cores) for cores in (1, 2, 3, 64)] == [1, 2, 3, 3]
    sizes["SC_PHYS_PAGES"] = 1 << 18
    assert runner.runs_at_once(8) == 1
    sizes["SC_PHYS_PAGES"] = 1 << 30
    assert runner.runs_at_once(8) == 4


@pytest.mark.parametrize(
    "name, argv, words",
    [
        ("feedback", ["--seed=5"], "--seeds"),
        ("feedback", ["--seeds=one"], "numbers with commas"),
        ("feedback", ["--seeds=1,2,1"], "each seed once"),
        ("feedback", ["--seeds"], "numbers with commas"),
        ("feedback", ["--stage=rl"], "sets it itself"),
        ("feedback", ["--feedback=1"], "sets it itself"),
        ("feedback", ["--steps=0"], "from 1 on"),
        ("feedback", ["--data", "{here}"], "--name=value"),
        ("feedback", ["--scalee=tiny"], "unrecognized arguments: --scalee=tiny"),
        ("feedback", ["--scale=huge"], "--scale: takes one of"),
        ("feedback", ["--out={here}/file"], "file"),
        ("hacking", ["--levels=0,1"], "sets it itself"),
    ],
)
def test_wrong_input_gives_one_line_and_exit_code_2_before_anything_runs(
    name, argv, words, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").write_text("mine")
    monkeypatch.chdir(tmp_path)
    asked = fake_runs(monkeypatch)
    with pytest.raises(SystemExit) as stop:
        runner.main(f"experiments.{name}", [word.format(here=tmp_path) for word in argv])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and not asked
    assert len(err.strip().splitlines()) == 1 and words in err, err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_list_names_every_question_and_the_command_itself_refuses_with_one_line():
    def go(*words):
        return run_command([sys.executable, "-m", *words], cwd=ROOT)

    lines = go("experiments").stdout.splitlines()
    assert len(lines) == 2 * len(NAMES) and "feedback" in NAMES
    for name, question, found in zip(NAMES, lines[::2], lines[1::2]):
        assert question.startswith(f"python -m experiments.{name}")
        assert found.startswith("    Found") and found[-1] == "."
    for words in (["experiments", "feedback"], ["experiments.feedback", "--seeds=x"]):
        done = go(*words)
        assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


def test_a_copy_inside_another_repository_has_no_commit_and_a_checkout_has_its_own(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "other"], check=True)
    command = [sys.executable, "-c", "import output_files; print(output_files.current_commit())"]

    def commit_in(folder):
        (folder / "command").mkdir(parents=True)
        shutil.copy(ROOT / "command" / "output_files.py", folder / "command")
        done = subprocess.run(command, cwd=folder / "command", capture_output=True, text=True)
        return done.stdout.strip()

    assert commit_in(tmp_path / "copy") == ""
    theirs = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert theirs.startswith(commit_in(tmp_path).removesuffix("-dirty")) and theirs
