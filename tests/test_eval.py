"""The numbers of an evaluation against enumeration, hand-made records, and the real command
line."""

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import run_command
import eval as evaluation
import muon
import rollout
from rollout import Limits, Rollout, Segment, Tokenizer, Turn, demonstrate, make_turn
from command import checkpoints, learning_curves, policy_report, step_log
from experiments import tables
from moe import Model, ModelConfig
from refusals import refuse
from synth_tasks import LEVELS, make_task
from world.machine import MachineFailure
from world.micro import Function, held_out_name
from world.task import Task

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_equals_the_share_of_all_k_subsets_that_hold_a_solved_pass(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert evaluation.pass_at_k(n, c, k) == pytest.approx(
                sum(map(any, subsets)) / len(subsets)
            )
    for wrong in ((n, n + 1, 1), (n, 0, n + 1), (n, 0, 0)):
        with pytest.raises(AssertionError, match="pass@"):
            evaluation.pass_at_k(*wrong)


@pytest.mark.parametrize("rate", [0.03, 0.3, 0.7, 0.97])
@pytest.mark.parametrize("alike", [False, True])
def test_the_interval_holds_the_true_rate_about_95_times_in_100_also_near_its_ends(rate, alike):
    """24 tasks, two passes each: passes that know nothing of each other, and passes that always
    agree"""
    rng, inside = np.random.default_rng(0), 0
    for _ in range(400):
        solved = rng.random((24, 1)) < rate if alike else rng.random((24, 2)) < rate
        low, high = evaluation.wilson_interval(solved.mean(1), 2)
        assert 0 <= low <= solved.mean() <= high <= 1
        inside += low <= rate <= high
    assert 0.92 <= inside / 400 <= 0.995


def test_the_interval_is_wilsons_where_passes_are_independent_or_always_agree():
    """By hand, of 8 solved among 10: (.8 + .1921 -+ 1.96 sqrt(.016 + .0096)) / 1.3842; and where
    all or none were solved"""
    agree = [1.0] * 8 + [0.0] * 2
    assert evaluation.wilson_interval(agree) == pytest.approx([0.4902, 0.9433], abs=2e-3)
    # Four passes that always agree say no more than one.
    assert evaluation.wilson_interval(agree, 4)[0] == pytest.approx(0.4902, abs=0.03)
    for n in (1, 5, 24):
        (low, one), (none, high) = evaluation.wilson_interval(
            [1.0] * n, 2
        ), evaluation.wilson_interval([0.0] * n, 2)
        assert (
            one == 1
            and none == 0
            and low == pytest.approx(n / (n + 1.96**2))
            and high == pytest.approx(1 - low)
        )


def test_the_interval_is_as_wide_as_the_normal_approximation_says_where_much_is_known():
    values = np.random.default_rng(1).random(400)
    low, high = evaluation.wilson_interval(values, 10**6)
    half = 1.96 * values.std() / 20
    assert (low, high) == (
        pytest.approx(values.mean() - half, abs=0.1 * half),
        pytest.approx(values.mean() + half, abs=0.1 * half),
    )


def test_dollars_by_hand():
    stats = {"total": 3_000_000, "sampled": 1_000_000}
    assert evaluation.cost_in_dollars(stats) == pytest.approx(2 * 0.5 + 1 * 2.5)
    assert evaluation.cost_in_dollars(stats, 1, 10) == pytest.approx(2 + 10)
    assert evaluation.cost_in_dollars({"total": 1200, "sampled": 200}) == pytest.approx(
        0.0005 + 0.0005
    )


def line(
    task, level, solved, sampled, turns=2, bad=0, cost=1.0, effort=3.0, summaries=0, finished=True
):
    return dict(
        task=task,
        level=level,
        solved=solved,
        sampled=sampled,
        turns=turns,
        bad_tools=bad,
        calls=2 * turns,
        split="heldout",
        label="",
        kept=None,
        cost=cost,
        effort=effort,
        summaries=summaries,
        finished=finished,
        **dict.fromkeys(evaluation.HABITS, False),
        setting="",
        thinking_tokens=1,
        call_tokens=sampled - 3,
        final_tokens=2,
        output_tokens=5,
    )


RECORDS = [
    line("a", 0, True, 10),
    line("a", 0, True, 20, turns=4, bad=1),
    line("b", 0, False, 30, cost=5.0),
    line("b", 0, True, 40),
    line("c", 3, False, 100, turns=6, bad=2, cost=9.0, effort=9.0, summaries=2, finished=False),
    line("c", 3, False, 200, cost=2.0),
]


def test_a_summary_of_hand_made_records():
    s = evaluation.summarize_records(RECORDS)
    assert (s["solved"], s["tasks"], s["passes"], s["tokens"], s["effort"], s["turns"]) == (
        0.5,
        3,
        2,
        pytest.approx(400 / 6),
        4.0,
        3.0,
    )
    # The cost is the median, not the mean.
    assert (s["cost"], s["summaries"], s["finished"]) == (
        1.5,
        pytest.approx(2 / 6),
        pytest.approx(5 / 6),
    )
    assert (s["wrong_calls_per_turn"], s["bad_tool"]) == (3 / 18, pytest.approx(2 / 6))
    assert s["calls_per_turn"] == 2 and "kept" not in s
    assert (
        s["pass@1"] == pytest.approx((1 + 0.5 + 0) / 3)
        and s["pass@2"] == pytest.approx((1 + 1 + 0) / 3)
        and "pass@4" not in s
    )
    assert 0 <= s["interval"][0] <= s["solved"] <= s["interval"][1] <= 1
    json.dumps(s)


def test_settings_of_effort_and_the_careful_expert_are_numbers_of_their_own(tmp_path):
    # By hand: three tasks at three settings; the careful expert needs an effort of 2, 2 and 6.
    efforts = {"low": (2, 2, 3), "medium": (2, 4, 6), "high": (4, 4, 12)}
    records = []
    for setting, (a, b, c) in efforts.items():
        records += [
            dict(line("a", 0, True, 10 * a, effort=a), setting=setting),
            dict(line("b", 0, setting != "low", 10 * b, effort=b), setting=setting),
            dict(line("c", 3, setting == "high", 10 * c, effort=c), setting=setting),
        ]
    careful = [
        line("a", 0, True, 15, effort=2.0),
        line("b", 0, True, 15, effort=2.0),
        line("c", 3, True, 60, effort=6.0),
    ]
    numbers = evaluation.summarize_policies({"one": records}, careful)
    one = numbers["policies"]["one"]
    solved = {name: row["overall"]["solved"] for name, row in one["settings"].items()}
    assert solved == pytest.approx({"low": 1 / 3, "medium": 2 / 3, "high": 1.0})
    ratio = {name: row["overall"]["effort_ratio"] for name, row in one["settings"].items()}
    assert ratio == pytest.approx({"low": 7 / 10, "medium": 12 / 10, "high": 20 / 10})
    assert one["settings"]["high"]["levels"][3]["effort_ratio"] == pytest.approx(2.0)
    assert one["overall"]["effort_ratio"] == pytest.approx(39 / 30) and one["overall"]["tasks"] == 3
    assert numbers["careful"]["overall"]["tokens"] == 30
    # What does not fit the limits of the careful expert says nothing of what the task needs.
    careful[2]["solved"] = False
    one = evaluation.summarize_policies({"one": records}, careful)["policies"]["one"]
    assert one["overall"]["effort_ratio"] == pytest.approx(18 / 12)
    assert "effort_ratio" not in one["levels"][3]

    # The table and the figures.
    text = policy_report.write_report(numbers, tmp_path, "eval.json")
    rows = {row[:32].strip(): row[32:].split() for row in text.split("\n")}
    assert rows["effort low"] == ["0.33", "(23,", "0.70x)"]
    assert rows["effort high"] == ["1.00", "(67,", "2.00x)"]
    assert rows["tokens of thoughts"] == ["1.0"] and rows["tokens of the last message"] == ["2.0"]
    assert rows["tokens of calls"] == ["40.3"] and rows["tokens of the tools' answers"] == ["5.0"]
    for name in ("effort.png", "score.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation():
    low, high = evaluation.interval_of_mean([1, 2, 3, 4])
    half = 1.96 * (5 / 3) ** 0.5 / 2
    assert (low, high) == (pytest.approx(2.5 - half), pytest.approx(2.5 + half))
    assert evaluation.interval_of_mean([7]) == [7, 7]


def test_each_task_is_asked_for_once_at_each_setting():
    tasks = evaluation.held_out(2, [0, 3])
    asked = evaluation.ask_for_each(tasks, ("low", "high"))
    assert [task.meta["effort"] for task in asked] == ["low"] * 4 + ["high"] * 4
    assert [task.instance_id for task in asked] == 2 * [task.instance_id for task in tasks]
    assert all(f"Effort: {task.meta['effort']}" in task.problem_statement for task in asked)
    bench = evaluation.held_out(1, [0, 3], "bench")
    asked = evaluation.ask_for_each(bench, ("low", "medium", "high"))
    assert [task.meta["effort"] for task in asked] == ["medium"] * 2
    assert evaluation.ask_for_each(bench + tasks, ("",)) == [
        replace(task, meta={**task.meta, "effort": ""}) for task in bench + tasks
    ]


def test_the_careful_expert_solves_every_task_and_says_what_it_takes():
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)})
    config = dict(window=10**6, max_turns=100, summarize=False)
    records = evaluation.play_careful_expert(evaluation.held_out(2), tokenizer, config)
    assert len(records) == 18 and all(record["solved"] for record in records)
    assert records == evaluation.play_careful_expert(evaluation.held_out(2), tokenizer, config)


def test_what_the_machine_cannot_judge_of_the_expert_is_left_out(monkeypatch):
    tasks, plain = evaluation.held_out(1), rollout.judge
    lost = {task.instance_id for task in tasks[::2]}

    def judge(task, files, sandbox):
        if task.instance_id in lost:
            raise MachineFailure("no room")
        return plain(task, files, sandbox)

    monkeypatch.setattr(rollout, "judge", judge)
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)})
    records = evaluation.play_expert(0.0, tasks, tokenizer)
    assert [record["task"] for record in records] == [task.instance_id for task in tasks[1::2]]


def test_a_lost_rollout_takes_its_task_alone_out_of_pass_at_2():
    s = evaluation.summarize_records(RECORDS[:-1])
    assert s["passes"] == 2 and s["pass@1"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert s["pass@2"] == 1.0
    # Each task counts once, however many of its passes are left, as in pass@1 and in the interval.
    assert s["solved"] == s["pass@1"] and s["tokens"] == pytest.approx((15 + 35 + 100) / 3)
    silent = evaluation.summarize_records([dict(RECORDS[0], turns=0, moved=0.0, unflagged=0)])
    assert not {"moved", "wrong_calls_per_turn"} & silent.keys()


def test_another_setting_of_effort_is_no_second_pass():
    asked = [dict(record, setting=name) for record in RECORDS for name in ("low", "high")]
    s = evaluation.summarize_records(asked)
    assert s["passes"] == 4 and "pass@4" not in s
    assert s["pass@2"] == evaluation.summarize_records(RECORDS)["pass@2"]


def test_passes_of_a_task_are_one_observation_of_its_tokens():
    once = [line(f"t{i}", 0, True, 10 * i) for i in range(5)]
    whole = evaluation.summarize_records(once)["tokens_interval"]
    assert evaluation.summarize_records(4 * once)["tokens_interval"] == whole
    assert whole == evaluation.interval_of_mean([0, 10, 20, 30, 40])


def test_levels_are_summarised_apart():
    levels = evaluation.summarize_levels(RECORDS)
    assert (
        list(levels) == [0, 3]
        and levels[0] == evaluation.summarize_records(RECORDS[:4])
        and levels[3] == evaluation.summarize_records(RECORDS[4:])
    )
    assert (levels[0]["solved"], levels[3]["solved"], levels[0]["tokens"], levels[3]["tokens"]) == (
        0.75,
        0,
        25,
        150,
    )


def test_the_bench_and_second_instructions_are_numbers_of_their_own(tmp_path):
    bench = [
        dict(RECORDS[i], split="bench", level=level, label=label, kept=kept)
        for i, level, label, kept in (
            (0, 14, "put back 8", None),
            (1, 8, "repair 1", True),
            (2, 8, "repair 1", False),
        )
    ]
    policies = {"one": RECORDS + bench, "two": bench + RECORDS}
    numbers = evaluation.summarize_policies(policies)
    for policy in numbers["policies"].values():
        assert policy["overall"] == evaluation.summarize_records(RECORDS)
        # Two passes of task a, both solved, and one of task b: each task counts once.
        assert policy["bench"]["overall"]["solved"] == 0.5
        assert policy["bench"]["overall"]["kept"] == 0.5
        # The rows stand in the bench's own order.
        assert list(policy["bench"]["levels"]) == [14, 8]
    text = policy_report.write_report(numbers, tmp_path, "eval.json")
    assert "bench: 2 tasks x 2" in text and "level 8: repair 1" in text
    rows = {row[:32].strip(): row[32:].split() for row in text.split("\n")}
    assert rows["second instructions kept"] == ["0.500", "0.500"]
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"
    # Task by task, the bench is not counted among the others.
    lost = [dict(record, solved=False) for record in bench]
    pair = evaluation.summarize_policies({"one": policies["one"], "two": RECORDS + lost})["pairs"]
    assert (pair["two"]["tasks"], pair["two"]["won"], pair["two"]["lost"]) == (3, 0, 0)
    # Of the bench alone there is one table.
    alone = evaluation.summarize_policies({"one": bench})["policies"]["one"]
    assert "bench" not in alone and list(alone["levels"]) == [8, 14]


def test_a_task_is_known_by_its_name_wherever_its_passes_stand():
    shuffled = [RECORDS[i] for i in (3, 5, 0, 2, 4, 1)]
    assert (
        evaluation.summarize_records(shuffled)["pass@2"]
        == evaluation.summarize_records(RECORDS)["pass@2"]
    )


def test_the_table_and_the_figures_say_what_the_summary_says(tmp_path):
    other = [{**r, "solved": True} for r in RECORDS]
    numbers = {**evaluation.summarize_policies({"one": RECORDS, "two": other}), "note": 1}
    text = policy_report.write_report(numbers, tmp_path, "eval.json")
    rows = {row[:32].strip(): row[32:].split() for row in text.split("\n")}
    assert rows["solved [95 % interval]"] == ["0.500", "1.000"] and rows[
        "level 3: solved (tokens)"
    ] == ["0.00", "(150)", "1.00", "(150)"]
    assert rows["pass@2 = best-of-2"] == ["0.667", "1.000"] and rows["tokens per task"] == [
        "67",
        "67",
    ]
    data = json.loads((tmp_path / "eval.json").read_text())
    assert data["note"] == 1 and data["policies"]["two"]["overall"] == evaluation.summarize_records(
        other
    )
    assert data["policies"]["one"]["levels"]["3"] == evaluation.summarize_records(RECORDS[4:])
    assert all(
        (tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in ("effort.png", "score.png")
    )


def test_a_record_holds_the_counts_the_cost_and_the_effort_of_its_rollout():
    task = make_task(1, 0, "heldout")
    rollout = demonstrate(
        task,
        Tokenizer({bytes([b]): b for b in range(256)}),
        random.Random(0),
        Limits(10**6),
    )
    rollout.passed = True
    r = evaluation.make_record(rollout, (1.0, 10.0))
    sampled = sum(len(t.tokens) - 1 for t in rollout.turns if t.role == "assistant")
    given = sum(len(t.tokens) for t in rollout.turns) - sampled
    assert (r["task"], r["level"], r["solved"], r["sampled"]) == (
        task.instance_id,
        1,
        True,
        sampled,
    )
    assert r["cost"] == pytest.approx((given * 1.0 + sampled * 10.0) / 1e6) and r["effort"] > 0
    json.dumps(r)


def solved_by(numbers, first=0, among=40):
    return [line(f"t{i}", 0, i in numbers, 10) for i in range(first, among)]


def test_two_policies_on_the_same_tasks_are_compared_task_by_task():
    """The chance of a split by counting all of them: 2 * (C(9, 0)) / 2^9, and 2 * (C(8,0) + .. +
    C(8,3)) / 2^8"""
    base = solved_by(range(10))
    better, other = solved_by(range(19)), solved_by(range(3, 15))
    assert evaluation.compare_pairs(base, better) == {
        "tasks": 40,
        "won": 9,
        "lost": 0,
        "p": 2 / 2**9,
        "difference": pytest.approx(9 / 40),
    }
    mixed = evaluation.compare_pairs(base, other)
    assert (mixed["won"], mixed["lost"], mixed["p"]) == (
        5,
        3,
        pytest.approx(2 * (1 + 8 + 28 + 56) / 2**8),
    )
    assert evaluation.compare_pairs(base, base)["p"] == 1
    assert evaluation.compare_pairs(base, solved_by(range(90, 100), 90, 100)) is None
    others = {"c": solved_by(range(90, 100), 90, 100), "d": solved_by((), 30)}
    text = policy_report.format_table(
        evaluation.summarize_policies({"a": base, "b": better, **others})
    )
    row = next(row for row in text.split("\n") if "won, lost" in row)
    assert (
        re.split("  +", row)[-4:] == ["-", "+9 -0", "other tasks", "+0 -0 of 10"]
        and "p=0.004" in text
    )
    assert "won, lost" not in policy_report.format_table(evaluation.summarize_policies({"a": base}))


def test_passes_of_a_task_are_one_pair():
    one = [
        line("a", 0, True, 1),
        line("a", 0, False, 1),
        line("b", 0, True, 1),
        line("b", 0, True, 1),
    ]
    two = [
        line("a", 0, True, 1),
        line("a", 0, True, 1),
        line("b", 0, False, 1),
        line("b", 0, True, 1),
    ]
    pair = evaluation.compare_pairs(one, two)
    assert (pair["tasks"], pair["won"], pair["lost"], pair["difference"]) == (2, 1, 1, 0)


@pytest.mark.parametrize(
    "value, form, text",
    [
        (0.123, "{:.3f}", "0.123"),
        (0.00012, "{:.3f}", "1.20e-04"),
        (0.0, "{:.3f}", "0.000"),
        (-4e-7, "{:7.4f}", "-4.00e-07"),
        (123456.7, "{:8.0f}", "  123457"),
        (float("nan"), "{:.3f}", "nan"),
    ],
)
def test_small_numbers_are_printed_in_significant_digits(value, form, text):
    assert policy_report.format_number(value, form) == text


def test_a_log_that_lost_its_beginning_or_was_cut_is_read_by_step(tmp_path):
    (tmp_path / "rl.jsonl").write_text(
        '{"step": 3.0, "x": 5}\n{"step": 4.0, "x": 2}\n7\n{"step": 5'
    )
    lines = step_log.read_step_log(tmp_path, "rl")
    assert [(entry["step"], entry["x"]) for entry in lines] == [(3, 5), (4, 2)]
    assert str(tables.curve_by_step(lines, "x")) == "[nan, nan, 5, 2]"
    assert (
        learning_curves.running_mean([float("nan"), 4.0, 2.0])[1:] == [4.0, 3.0]
        and step_log.read_step_log(tmp_path, "sft") == []
    )


# ---------------------------------------------------------------- held out


def test_no_held_out_task_shares_a_name_or_a_composition_with_training():
    def targets(task):
        return [Function(**t) for t in task.meta["targets"]]

    def composition(f):
        return (
            tuple(map(tuple, f.steps)) if len(f.steps) == 1 else tuple(op for op, _ in f.steps)
        ), f.reduction

    held = evaluation.held_out(12)
    train = [make_task(level, seed) for level in evaluation.LEVELS for seed in range(50)]
    assert len(held) == 12 * len(evaluation.LEVELS) and [t.level for t in held] == sorted(
        t.level for t in held
    )
    assert len({t.instance_id for t in held + train}) == len(held) + len(train)
    for what in (lambda f: f.name, composition):
        asked = {what(f) for t in held for f in targets(t)}
        assert len(asked) > 20 and not asked & {what(f) for t in train for f in targets(t)}
    # Training does not show them as neighbours of a deleted function either.
    shown = {case[1] for t in train for case in t.meta["visible"]}
    assert not {f.name for t in held for f in targets(t)} & shown and not any(
        map(held_out_name, shown)
    )
    files = {json.dumps(sorted(t.files.items())) for t in train}
    assert not any(json.dumps(sorted(t.files.items())) in files for t in held)


def test_held_out_tasks_are_the_same_every_time():
    assert [t.to_json() for t in evaluation.held_out(2)] == [
        t.to_json() for t in evaluation.held_out(2)
    ]


# ---------------------------------------------------------------- a policy from a checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with two stages of a tiny untrained model."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)})
    sizes = dict(
        dim=16,
        layers=2,
        heads=2,
        kv_lora=8,
        qk_nope=4,
        qk_rope=4,
        v_dim=8,
        dense_ffn=16,
        experts=4,
        num_experts_per_tok=2,
        expert_ffn=8,
        context=400,
    )
    for stage in ("sft", "rl"):
        model = Model(ModelConfig(vocab=tokenizer.vocab, yarn_factor=2.0, **sizes))
        torch.nn.init.normal_(model.head.weight)
        config = {
            **sizes,
            "stage": stage,
            "yarn": 2.0,
            "window": 800,
            "trigger": 0.7,
            "habits": "unavailable_tool",
            "length_penalty": "0.2",
            "temperature": 1.0,
            "summarize": True,
            "max_turns": 3,
            "draft": 3,
            "dtype": "float32",
        }
        checkpoints.save_checkpoint(
            folder / stage,
            model,
            None,
            {"config": config, "model": vars(model.config), "tokenizer": tokenizer.state_dict()},
        )
    return folder, model, tokenizer


def test_a_run_is_loaded_from_its_last_stage_and_its_model_is_the_saved_one(run):
    folder, model, tokenizer = run
    loaded, read, config = evaluation.load_policy(folder)
    assert config["stage"] == "rl" and read.ranks == tokenizer.ranks and loaded.config.window == 800
    for name, p in model.state_dict().items():
        assert torch.equal(p, loaded.state_dict()[name]), name
    assert evaluation.load_policy(folder / "sft")[2]["stage"] == "sft"
    # What is left of a save that was ended between its two renames.
    (folder / "rl").rename(folder / "rl.old")
    assert evaluation.load_policy(folder)[2]["stage"] == "rl"
    (folder / "rl.old").rename(folder / "rl")


def test_a_checkpoint_that_does_not_say_how_its_policy_acts_is_refused_in_one_line(
    run, tmp_path, capsys
):
    model, tokenizer, config = evaluation.load_policy(run[0])
    del config["draft"]
    described = {"config": config, "model": vars(model.config), "tokenizer": tokenizer.state_dict()}
    checkpoints.save_checkpoint(tmp_path / "r" / "rl", model, None, described)
    error = refuse(evaluation.main, [str(tmp_path / "r"), f"--out={tmp_path}"], capsys)
    assert error.endswith("does not say its draft: of another version")


def test_an_unfinished_checkpoint_is_labelled_in_table_and_file_and_a_finished_one_is_not(
    run, tmp_path, capsys
):
    model, tokenizer, config = evaluation.load_policy(run[0])
    for step, label in ((3, "unfinished: step 3 of 60"), (60, "")):
        config["steps"] = 60
        checkpoints.save_checkpoint(
            tmp_path / "r" / "rl",
            model,
            None,
            {
                "config": config,
                "model": vars(model.config),
                "tokenizer": tokenizer.state_dict(),
                "step": step,
            },
        )
        assert checkpoints.unfinished_label(tmp_path / "r" / "rl") == label
        evaluation.main(
            [str(tmp_path / "r"), "--number=1", "--levels=0", "--passes=1", f"--out={tmp_path}"]
        )
        (name,) = json.loads((tmp_path / "eval.json").read_text())["policies"]
        assert (
            label in name
            and label in capsys.readouterr().out
            and ("unfinished: step" in name) == bool(label)
        )


def test_tasks_of_one_id_are_refused_by_line(run, tmp_path, capsys):
    tasks = [make_task(0, 5), make_task(0, 6), make_task(0, 5)]
    (tmp_path / "t.jsonl").write_text("".join(task.to_json() + "\n" for task in tasks))
    words = [str(run[0]), f"--tasks={tmp_path}/t.jsonl", f"--out={tmp_path}"]
    error = refuse(evaluation.main, words, capsys)
    assert "line 3 has the id of line 1" in error and tasks[0].instance_id in error


def test_what_only_draws_ends_no_evaluation_and_a_notebooks_backend_is_not_asked_for(
    run, tmp_path, monkeypatch, capsys
):
    def fails(*words):
        raise RuntimeError("no font\nat all")

    monkeypatch.setattr(policy_report, "draw_policies", fails)
    evaluation.main([str(run[0]), "--number=1", "--levels=0", "--passes=1", f"--out={tmp_path}"])
    assert (
        "no figure (RuntimeError: no font)" in capsys.readouterr().out
        and (tmp_path / "eval.json").exists()
    )
    # In a process of its own, so that matplotlib is imported by the figures of an evaluation.
    code = "import json; from command import policy_report; "
    code += "policy_report.draw_policies(json.load(open('eval.json')), '.')"
    environment = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    environment["PYTHONPATH"] = str(ROOT)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "score.png").exists() and (tmp_path / "effort.png").exists()


def test_an_edited_form_is_told_once(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(muon, "COEFFICIENTS", (3.0, -4.0, 2.0))
    evaluation.main([str(run[0]), "--number=1", "--levels=0", "--passes=1", f"--out={tmp_path}"])
    assert capsys.readouterr().err.count("muon.newton_schulz, or what it calls, was changed") == 1


def test_an_attempt_leaves_one_record_per_pass_and_repeats_exactly(run):
    model, tokenizer, config = evaluation.load_policy(run[0])
    tasks = evaluation.held_out(1, levels=(0, 1))
    records = evaluation.run_policy(model, tokenizer, config, tasks, 2)
    assert [r["task"] for r in records] == [t.instance_id for t in tasks for _ in range(2)]
    assert not any(r["solved"] for r in records) and all(
        r["sampled"] > 0 and r["turns"] <= 3 for r in records
    )
    assert evaluation.run_policy(model, tokenizer, config, tasks, 2) == records
    assert evaluation.run_policy(model, tokenizer, config, tasks, 2, seed=1) != records


def test_a_policy_has_moved_by_the_difference_of_its_log_probs_where_no_rule_flags_and_not_at_all_from_itself(
    run,
):
    model, tokenizer, config = evaluation.load_policy(run[0])
    tasks = [make_task(0, 10**6 + i) for i in range(3)]
    records = evaluation.run_policy(model, tokenizer, config, tasks, 2, reference=model)
    assert all(
        abs(r["moved"]) < 1e-3 and 0 <= r["unflagged"] <= r["sampled"] for r in records
    ) and any(r["unflagged"] for r in records)
    assert abs(evaluation.summarize_records(records)["moved"]) < 1e-4
    other, _, _ = evaluation.load_policy(run[0])
    torch.nn.init.normal_(other.head.weight, std=0.3)
    rollout = Rollout(tasks[0], [Segment([make_turn(tokenizer, "user", "Do it.")])], finished=True)
    body = tokenizer.write_action("Nothing done.", [])
    rollout.segments[0].turns.append(
        Turn(
            "assistant",
            [tokenizer.id["<|assistant|>"], *body],
            "Nothing done.",
            [],
            0,
            np.full(len(body), -1.5, dtype=np.float32),
            np.zeros(len(body)),
        )
    )
    ids = torch.tensor([[t for turn in rollout.turns for t in turn.tokens]])
    logp = (
        (other.logits(other(ids[:, :-1])) / 0.7)
        .log_softmax(-1)[0]
        .gather(1, ids[0, 1:, None])[-len(body) :]
    )
    total, count = evaluation.kl_from_reference(other, rollout, 0.7)
    assert count == len(body) and total == pytest.approx(float((-1.5 - logp).sum()), abs=1e-3)
    # Without its final message the turn is flagged, and flagged turns do not count.
    rollout.turns[-1].text = ""
    assert evaluation.kl_from_reference(other, rollout, 0.7) == (0.0, 0)


def test_the_trainer_and_the_sampler_differ_by_rounding_alone_in_fp32_and_by_more_in_bf16(
    run, tmp_path, capsys
):
    evaluation.main([str(run[0]), "--mismatch", "--number=1", "--levels=0,1", f"--out={tmp_path}"])
    assert capsys.readouterr().out.count("p99") == 3
    assert not (tmp_path / "eval.json").exists()

    # A task whose statement fills the window
    (long,) = evaluation.held_out(1, (0,))
    long = replace(long, problem_statement=long.problem_statement + " word" * 3000)
    (tmp_path / "long.jsonl").write_text(json.dumps(vars(long)) + "\n")
    words = [str(run[0]), "--mismatch", f"--tasks={tmp_path}/long.jsonl", f"--out={tmp_path}"]
    assert "no task leaves room" in refuse(evaluation.main, words, capsys)

    model, tokenizer, config = evaluation.load_policy(run[0])
    # Matrices that start at zero would make every layer the identity.
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3) if p.ndim > 1 and not p.any() else None
    found = evaluation.sampler_mismatch(model, tokenizer, config, evaluation.held_out(2, range(2)))
    replayed, own, exact = (
        found[name]
        for name in (
            "bfloat16, experts replayed",
            "bfloat16, experts chosen again",
            "float32, experts replayed",
        )
    )
    assert (
        exact.max() < 1e-4
        and np.quantile(replayed, 0.99) > 1e-3
        and len(own) == len(replayed) > 100
    )


def test_whether_a_hint_is_heeded_is_the_probability_of_the_wrong_call_with_it_and_without_token_by_token(
    run, tmp_path, capsys
):
    model, tokenizer, _ = evaluation.load_policy(run[0])
    torch.nn.init.normal_(model.head.weight, std=0.1)
    task = next(
        task for task in (make_task(0, i) for i in range(99)) if "read_file" not in task.tools
    )
    rollout = demonstrate(task, tokenizer, random.Random(6), Limits(10**6), sloppy=4.0)
    expected, said = [], []
    for i, turn in enumerate(turns := rollout.segments[0].turns):
        names = [call.name for call in turn.calls if call.error == "unknown_tool"]
        if names:
            begin = turn.tokens.index(tokenizer.id["<|call|>"])
            wrong = [tokenizer.id["<|call|>"], *tokenizer.encode(names[0])]
            assert turn.tokens[begin : begin + len(wrong)] == wrong
            before = [token for earlier in turns[:i] for token in earlier.tokens]
            hint = [
                tokenizer.id["<|hint|>"],
                *tokenizer.encode(f"Reminder: Available tools: {', '.join(task.tools)}."),
                tokenizer.id["<|end|>"],
            ]
            for above in ([], hint):
                ids = [*before, *above, *turn.tokens[:begin]]
                p = 1.0
                for token in wrong:
                    p *= float(
                        model.logits(model(torch.tensor([ids])))[0, -1].softmax(-1)[token].detach()
                    )
                    ids.append(token)
                said.append(p)
            expected.append((names[0], *said[-2:]))
    found = evaluation.hint_effect(model, tokenizer, rollout)
    assert (
        len(expected) > 1
        and [
            (name, pytest.approx(p, rel=1e-3), pytest.approx(q, rel=1e-3))
            for name, p, q in expected
        ]
        == found
    )
    evaluation.main(
        [str(run[0]), "--number=1", "--passes=1", "--levels=0", "--gap", f"--out={tmp_path}"]
    )
    assert "with the hint above it" in capsys.readouterr().out


def test_the_careful_expert_is_graded_as_right_and_a_lazy_one_as_wrong():
    tasks, tokenizer = evaluation.held_out(2), Tokenizer({bytes([b]): b for b in range(256)})
    assert all(r["solved"] for r in evaluation.play_expert(0.0, tasks, tokenizer))
    nothing = [
        Task(**{**vars(t), "meta": {**t.meta, "targets": t.meta["targets"][:1]}})
        for t in tasks
        if len(t.meta["targets"]) > 1
    ]
    # A lazy expert: with only the first target in its task, it puts back only the first function.
    assert not any(r["solved"] for r in evaluation.play_expert(0.0, nothing, tokenizer))


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--number=x"], "--number"),
        (["--number=0"], "at least 1"),
        (["--passes=-2"], "at least 1"),
        (["--nmber=3", "out"], "did you mean --number?"),
        (["--temperature=-1", "out"], "--temperature"),
        (["--temperature=nan", "out"], "--temperature"),
        (["--price_in=-1", "out"], "--price"),
        ([f"--levels={len(LEVELS)}", "out"], "a list, with commas"),
        (["--levels=0-5", "out"], "a list, with commas"),
        (["--turns=-1", "out"], "--turns"),
        (["--effort=lo", "out"], "a list, with commas, of low, medium, high"),
        (["no/such/run"], "no/such/run"),
        (["{here}"], "{here}"),
        (["{run}", "--tasks={here}/none.jsonl"], "none.jsonl"),
        (["{run}", "--tasks={here}/bad.jsonl"], "bad.jsonl"),
        (["{run}", "--tasks={here}/empty.jsonl"], "holds no tasks"),
        (["{run}", "--out={here}/file"], "file"),
        (["{damaged}"], "damaged"),
        (["--number=2"], "which runs?"),
        (["demo", "--number=2"], "takes no flags"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2_and_overwrites_nothing(
    run, argv, words, tmp_path, capsys, monkeypatch
):
    (tmp_path / "bad.jsonl").write_text("not json\n")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "file").write_text("mine")
    shutil.copytree(run[0] / "rl", tmp_path / "damaged")
    data = max(
        (p for p in (tmp_path / "damaged").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    data.write_bytes(data.read_bytes()[:100])
    monkeypatch.chdir(tmp_path)
    fill = lambda text: text.format(here=tmp_path, run=run[0], damaged=tmp_path / "damaged")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        evaluation.main([fill(a) for a in argv])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert len(err.strip().split("\n")) == 1 and fill(words) in err, err
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "mine"


def test_levels_and_turns_are_those_asked_for_or_the_runs(run, tmp_path, monkeypatch):
    asked, run_policy = [], evaluation.run_policy
    monkeypatch.setattr(
        evaluation,
        "run_policy",
        lambda *words, **more: asked.append(words[2]["max_turns"]) or run_policy(*words, **more),
    )
    for words, levels in (
        (("--levels=0,7", "--turns=2", "--effort=low,high", "--report"), "0 7"),
        ((), "0 1 11 13 2 3 4 5 8"),
    ):
        evaluation.main([str(run[0]), "--number=1", "--passes=1", f"--out={tmp_path}", *words])
        (policy,) = json.loads((tmp_path / "eval.json").read_text())["policies"].values()
        assert sorted(policy["levels"]) == levels.split()
        # This run was trained without settings, and is asked for them where that is asked for.
        settings = {"low", "high"} if words else set()
        assert policy.get("settings", {}).keys() == settings
    assert asked == [2, 3]
    # The report, of the first command alone, shows a task of each level.
    page = (tmp_path / "report.html").read_text()
    assert '"level": 7' in page and '"level": 1,' not in page and '"effort_asked": "high"' in page


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_is_played_in_the_dtype_that_its_run_sampled_in(dtype, run, tmp_path, monkeypatch):
    load, play, seen = evaluation.load_policy, evaluation.run_policy, []

    def load_as(*words):
        model, tokenizer, config = load(*words)
        return model, tokenizer, {**config, "dtype": dtype}

    def play_and_note(model, *words, **more):
        seen.append(model.dtype)
        return play(model, *words, **more)

    monkeypatch.setattr(evaluation, "load_policy", load_as)
    monkeypatch.setattr(evaluation, "run_policy", play_and_note)
    words = ["--number=1", "--levels=0", "--passes=1", f"--out={tmp_path}"]
    evaluation.main([str(run[0]), *words])
    assert seen == [getattr(torch, dtype)]


def test_the_command_itself_exits_with_2_and_one_line():
    result = run_command([sys.executable, "eval.py", "--passes=none"], cwd=ROOT)
    assert (
        result.returncode == 2
        and result.stdout == ""
        and len(result.stderr.strip().split("\n")) == 1
        and "--passes" in result.stderr
    )
