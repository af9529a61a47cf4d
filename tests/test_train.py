"""train.py: what a user types, right and wrong; exact resume; the same loss on one process and on
two."""

import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eval as evaluation
import fast
from published_folder import build_foreign_model, write_byte_tokenizer
from small import FLAGS as SMALL
import moe
import train
from command import (
    checkpoints,
    checks,
    drawing,
    flags,
    output_files,
    policy_report,
    rollout_statistics,
    source_files,
    step_log,
)
from commands import Command, run_command
from conftest import run_ranks
from experiments import effort
from experiments.learn_new import Imitation
from published.export import write_checkpoint
from published.loading import load_model
from published.tokenizers import read_tokenizer
from refusals import refuse

ROOT = Path(train.__file__).parent
# An evaluation without its fourteen rows is done in a fifth of the time.
NO_BENCH = "--bench_tasks=0"


def weights(folder):
    model = train.eval.load_policy(folder)[0]
    return {name: t.clone() for name, t in model.state_dict().items()}


def read_log(folder, stage):
    return [json.loads(line) for line in (folder / f"{stage}.jsonl").read_text().splitlines()]


def configure(words, stage):
    return train.FLAGS.configure(train.FLAGS.parse(words), stage)


def build_sft(run):
    """The stage sft of a small run, built and not begun. The head starts at zero, where every token
    would be equally likely, so it is drawn."""
    one = train.Run(configure([*SMALL, "--stage=sft", f"--out={run}"], "sft"))
    one.build(train.rollout.Tokenizer(**checkpoints.open_checkpoint(run / "sft")["tokenizer"]))
    torch.nn.init.normal_(one.model.head.weight, std=0.1)
    return one


def build_pretrain(*more):
    one = train.Run(configure([*SMALL, *more], "pretrain"))
    one.build(train.rollout.Tokenizer({bytes([b]): b for b in range(256)}))
    return one


def refused_at_end(arguments, capsys):
    """Runs train.py, which must end with exit code 2 -> its last line of error"""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        train.main(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def refused(arguments, capsys):
    """Runs train.py, which must refuse these arguments with exit code 2 -> its one line of error"""
    return refuse(train.main, arguments, capsys)


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--feedbak=0", "did you mean --feedback?"),
        ("steps=3", "did you mean --steps?"),
        ("pretrain", "unrecognized arguments: pretrain"),
        ("--ste", "unrecognized arguments: --ste"),
        ("--lr", "expected one argument"),
        ("--steps=ten", "takes a whole number"),
        ("--lr=fast", "takes a number"),
        ("--lr=nan", "finite"),
        ("--grad_clip=inf", "finite"),
        ("--grad_clip=0", "at least 1e-30"),
        ("--temperature=0", "at least 0.001"),
        ("--seed=99999999999999999999", "at most 4294967295"),
        ("--levels=0-5", "a list, with commas, of 0, 1, 2"),
        ("--stage=rll", "one of all, pretrain, long, sft, rl, eval"),
        ("--habits=tools", "a list, with commas"),
        ("--length_penalty=1", "one, or one each for low, medium, high"),
        ("--length_penalty=a,b,c", "at least 0 and below 1"),
        ("--length_penalty=0.1,0.2", "not '0.1,0.2'"),
        ("--summarize=2", "0 or 1"),
        ("--out=", "is empty"),
        ("--trigger=0.9", "below .875"),
        ("--num_experts_per_tok=9", "at most"),
        ("--ep=3", "ep=3"),
        ("--cp=2", "cp=2"),
        ("--cp=3", "--cp=3 cuts"),
        ("--dp_replicate=2", "dp_replicate=2"),
        ("--heads=3", "a multiple of 4 * --heads"),
        ("--dim=33", "--dim=33"),
        ("--dim=36", "a multiple of 8"),
        ("--data=/no/such/folder", "no such folder"),
        ("--start_from=x", "one stage"),
        ("--resume", "no checkpoint"),
        ("--out=/dev/null/run", "cannot be written"),
        ("--stage=long --cp=3 --context=65 --yarn=2", "--context times --yarn is 130"),
        ("--stage=eval --expert_ffn=12", "--expert_ffn=12"),
        ("--stage=long", "run the pretrain stage first"),
        ("--stage=long --mtp --cp=2", "goes with --cp=1"),
        ("--expert_ffn=40 --precision=nvfp4", "a multiple of 32"),
    ],
)
def test_bad_flags_are_refused_in_one_line_with_exit_code_2(flag, words, capsys, tmp_path):
    out = [] if "--out" in flag else [f"--out={tmp_path}"]
    assert words in refused([*SMALL, "--stage=pretrain", *out, *flag.split()], capsys)
    assert not (tmp_path / "pretrain").exists()


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "cannot be read"),
        ("", "holds no tasks"),
        ("{}\n", "line 1 is no task"),
    ],
)
def test_a_file_of_tasks_that_is_none_is_refused_before_anything_is_trained(
    text, words, capsys, tmp_path
):
    if text is not None:
        (tmp_path / "tasks.jsonl").write_text(text)
    assert words in refused(
        [*SMALL, f"--tasks={tmp_path}/tasks.jsonl", f"--out={tmp_path}/o"], capsys
    )
    assert not (tmp_path / "o").exists()


def test_what_is_no_data_is_left_out_and_what_else_is_left_out_is_said(
    tmp_path, capsys, monkeypatch
):
    assert "fewer than two Python files" in refused(
        [*SMALL, "--stage=pretrain", f"--out={tmp_path}/o", f"--data={tmp_path}"], capsys
    )
    # A link that leads nowhere, and a folder named like a source.
    (tmp_path / "broken.py").symlink_to("nowhere")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "tests").mkdir()
    for name, text in (("a", "a = 1\n"), ("b", "b = 1\n"), ("large", "#" * 200_000)):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "tests" / "test_a.py").write_text("c = 1\n")
    lines = []
    found = source_files.python_sources(str(tmp_path), lines.append)
    assert sorted(sum(found, [])) == ["a = 1\n", "b = 1\n"]
    (line,) = lines
    assert "2 of 4 files" in line and "1 of 200 kB" in line and "1 in folders called tests" in line
    # One that cannot be read
    with monkeypatch.context() as patch:
        read = Path.read_text
        patch.setattr(
            Path,
            "read_text",
            lambda path, **how: read(path if path.name != "a.py" else Path("/"), **how),
        )
        (tmp_path / "c.py").write_text("c = 1\n")
        source_files.python_sources(str(tmp_path), lines.append)
        (tmp_path / "c.py").unlink()
    assert "1 that cannot be read" in lines.pop()
    (tmp_path / "large.py").unlink(), shutil.rmtree(tmp_path / "tests")
    source_files.python_sources(str(tmp_path), lines.append)
    source_files.python_sources("", lines.append)  # of the standard library nothing is said
    assert len(lines) == 1


def test_a_window_that_no_demonstration_fits_is_refused(run, capsys, tmp_path):
    words = [*SMALL, *"--stage=sft --steps=1 --window=20".split(), f"--start_from={run}"]
    said = refused_at_end([*words, f"--out={tmp_path}"], capsys)
    assert said.endswith("none of 12 demonstrations fits")


def test_a_run_that_is_older_than_a_flag_has_its_default_and_goes_on(run, capsys, monkeypatch):
    opened = checkpoints.open_checkpoint

    def without(path, left_out=("habits", "precision", "mtp", "eval_tasks", "max_turns")):
        saved = opened(path)
        made = {name: v for name, v in saved["config"].items() if name not in left_out}
        return {**saved, "config": made}

    monkeypatch.setattr(checkpoints, "open_checkpoint", without)
    # max_turns was 3, and without it the run counts as one with the default
    words = [*SMALL, "--stage=sft", "--steps=2", f"--out={run}", "--max_turns=40"]
    capsys.readouterr()
    train.main(words)
    assert "sft: finished already" in capsys.readouterr().out
    said = "was made with mtp=0, not 1: take another --out"
    assert said in refused([*words, "--mtp"], capsys)


def test_every_rank_gets_as_many_windows():
    text = train.Text.__new__(train.Text)
    for ranks, asked, given in ((1, 0, 1), (1, 16, 16), (2, 1, 2), (3, 16, 18), (4, 16, 16)):
        text.run = SimpleNamespace(data_ranks=ranks)
        assert text.round_up_to_ranks(asked) == given


def test_a_finished_stage_is_not_overwritten_by_another_configuration(run, capsys):
    before = (run / "sft" / "manifest.json").stat().st_mtime_ns
    without_data = [word for word in SMALL if not word.startswith("--data")]
    for words, says in (
        ([*SMALL, "--stage=sft", "--demos=13"], "demos=12, not 13: take another --out"),
        ([*without_data, "--stage=pretrain"], 'json, not "": take another --out'),
    ):
        assert says in refused([*words, "--steps=2", f"--out={run}"], capsys)
    # the same command, finished already; also with other values of what this stage does not read
    for more in ([], ["--feedback=0.5", "--kl_coef=1"]):
        train.main([*SMALL, "--stage=sft", "--steps=2", f"--out={run}", *more])
    assert (run / "sft" / "manifest.json").stat().st_mtime_ns == before
    # A checkpoint is no folder for a run.
    words = [*SMALL, "--stage=rl", f"--start_from={run}", f"--out={run}/sft"]
    assert "is a checkpoint" in refused(words, capsys)


@pytest.mark.parametrize(
    "stage, flags, words",
    [
        ("long", ["--dim=48"], "give --dim=32 here"),
        (
            "sft",
            ["--num_experts_per_tok=1", "--rope_theta=9"],
            "give --num_experts_per_tok=2 --rope_theta=1000.0 here",
        ),
        ("rl", ["--yarn=3"], "give --yarn=2.0 here"),
        ("rl", ["--scale=laptop"], "give --scale=tiny here"),
    ],
)
def test_a_stage_that_would_go_on_in_another_model_is_refused_by_name(
    stage, flags, words, run, capsys, tmp_path
):
    assert words in refused(
        [*SMALL, f"--stage={stage}", f"--out={tmp_path}", f"--start_from={run}", *flags], capsys
    )


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--group_size=1", "--feedback=0"], "nothing to learn from"),
        (["--window=20"], "leaves room for a turn"),
        (["--stage=rl", "--plain=1", "--workers=2"], "--plain=1 samples in the training process"),
    ],
)
def test_rl_that_could_learn_nothing_or_other_than_was_asked_is_refused(
    flags, words, run, capsys, tmp_path
):
    common = [*SMALL, *"--stage=rl --steps=1".split(), f"--start_from={run}"]
    assert words in refused_at_end([*common, f"--out={tmp_path}/o", *flags], capsys)
    assert not (tmp_path / "o" / "rl").exists()


def test_tasks_that_leave_no_room_for_a_turn_are_left_out_by_name_and_counted_in_an_evaluation(
    run, capsys, tmp_path
):
    """The oracle is a run that was given the short task alone: both logs are equal."""
    make = train.synth_tasks.make_task
    short, long = make(0, 5), make(0, 6)
    long.instance_id, long.problem_statement = "longish", long.problem_statement * 100
    words = [
        *SMALL,
        *"--stage=rl --tasks_per_step=2 --group_size=2 --steps=1 --feedback=0".split(),
        f"--start_from={run}",
        f"--tasks={tmp_path}/t.jsonl",
    ]
    logs = {}
    for name, tasks in {"both": (long, short), "short": (short,)}.items():
        (tmp_path / "t.jsonl").write_text("".join(task.to_json() + "\n" for task in tasks))
        train.main([*words, f"--out={tmp_path}/{name}"])
        said = capsys.readouterr()
        assert (
            "--window=512 leaves no room for a turn in 1 of 2 tasks, which are left out: longish"
            in said.out + said.err
        ) == (name == "both")
        logs[name] = json.loads((tmp_path / name / "rl.jsonl").read_text().split("\n")[0])
    assert all(
        logs["both"][key] == logs["short"][key]
        for key in ("reward", "solved", "turns", "sampled", "loss", "level")
        if key in logs["both"]
    )
    assert logs["both"]["no_turn"] == 0 and logs["both"]["turns"] > 0
    (tmp_path / "t.jsonl").write_text("".join(task.to_json() + "\n" for task in (long, short)))
    model, tokenizer, config = train.eval.load_policy(tmp_path / "both")
    records = train.eval.run_policy(model, tokenizer, config, [long, short], 2)
    assert [record["turns"] == 0 for record in records] == [
        True,
        True,
        False,
        False,
    ] and train.eval.summarize_records(records)["no_turn"] == 2
    assert re.search(
        r"without room for a turn +2$",
        policy_report.format_table(evaluation.summarize_policies({"one": records})),
        re.M,
    )
    assert "without room" not in policy_report.format_table(
        evaluation.summarize_policies({"one": records[2:]})
    )


def test_rl_goes_on_with_the_tasks_that_it_was_begun_with_or_says_so(run, capsys, tmp_path):
    lines = [train.synth_tasks.make_task(0, seed).to_json() + "\n" for seed in (5, 6)]
    words = [
        *SMALL,
        *"--stage=rl --tasks_per_step=1 --group_size=2".split(),
        f"--start_from={run}",
        f"--tasks={tmp_path}/t.jsonl",
        f"--out={tmp_path}/o",
    ]
    (tmp_path / "t.jsonl").write_text("".join(lines))
    stop_in_step(1, [*words, "--steps=2"], "rl")
    (tmp_path / "t.jsonl").write_text("".join(lines[::-1]))
    assert "no longer the file" in refused_at_end([*words, "--steps=2"], capsys)
    (tmp_path / "t.jsonl").write_text("".join(lines))
    train.main([*words, "--steps=2"])
    assert [line["step"] for line in read_log(tmp_path / "o", "rl")] == [1, 2]


@pytest.mark.parametrize("seed", [0, 1, 1337])
def test_the_tasks_of_rl_are_never_those_of_the_demonstrations(seed, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        train,
        "make_training_task",
        lambda config, level, number: drawn.append(number) or train.synth_tasks.make_task(0, 5),
    )
    tokenizer = train.rollout.Tokenizer({bytes([b]): b for b in range(256)})
    train.make_demonstrations(
        train.Config(seed=seed), tokenizer, None, [0, 1, 11_999], lambda numbers, _: numbers
    )
    curriculum = train.synth_tasks.Curriculum(range(6), seed)
    tried = [number for _ in range(400) for _, number in [curriculum.next(random.Random(seed))]]
    assert len(drawn) == 3 and not set(range(drawn[0], drawn[-1] + 1)) & set(tried)


def test_behind_some_levels_demonstrations_have_functions_of_two_steps():
    assert train.demonstration_levels(range(6)) == [0, 1, 18, 2, 18, 3, 4, 19, 19, 5]
    assert train.demonstration_levels([0]) == [0]
    assert train.demonstration_levels([4, 9]) == [4, 19, 19, 9]
    for level in (18, 19):
        for number in range(20):
            task = train.synth_tasks.make_task(level, number)
            assert {len(target["steps"]) for target in task.meta["targets"]} == {2}


def test_a_second_run_in_the_same_folder_is_refused_and_a_second_signal_ends_at_once(
    run, tmp_path, capsys
):
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *SMALL,
        *"--stage=sft --demos=100000 --steps=2".split(),
        f"--start_from={run}",
        f"--out={tmp_path}",
    ]
    child = Command(command)
    child.wait_for(lambda: "demonstrations" in child.stderr)
    assert "another train.py is at work" in refused(command[2:], capsys)
    # Before the first step there is nothing to save: one signal ends it at once.
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 128 + signal.SIGINT and "to go on: python" in child.stderr
    assert "--resume" not in child.stderr and "after this step" not in child.stderr

    # In a step, which is long here, the first one waits for its end, and the second does not.
    flags = "--stage=long --steps=3 --batch_tokens=1000000".split()
    child = Command([*command[:2], *SMALL, *flags, *command[-2:]])
    child.wait_for(lambda: "0/3" in child.stderr)
    child.send_signal(signal.SIGINT)
    child.wait_for(lambda: "a second time" in child.stderr)
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == -signal.SIGINT


def test_a_signal_in_the_last_save_of_a_stage_ends_the_command_before_the_next_one(
    tmp_path, monkeypatch, capsys
):
    plain = train.save_checkpoint

    def save(run, source, optimizer, step, out):
        plain(run, source, optimizer, step, out)
        if step == run.config.steps:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train, "save_checkpoint", save)
    with pytest.raises(SystemExit) as end:
        train.main([*SMALL, "--steps=2", f"--out={tmp_path}"])
    assert end.value.code == 128 + signal.SIGTERM
    assert "--resume" in capsys.readouterr().err
    assert (tmp_path / "pretrain.jsonl").exists() and not (tmp_path / "long.jsonl").exists()


def test_an_evaluation_is_made_anew_when_its_file_of_tasks_has_changed_and_rl_is_not_called_finished(
    run, tmp_path, capsys
):
    tasks, lines = tmp_path / "t.jsonl", [
        train.synth_tasks.make_task(0, seed).to_json() + "\n" for seed in (5, 6)
    ]
    tasks.write_text("".join(lines))
    words = [*SMALL, f"--start_from={run}", f"--tasks={tasks}", f"--out={tmp_path}/o"]
    train.main([*words, *RL])
    train.main([*words, "--stage=eval"])
    tasks.write_text(lines[0])
    capsys.readouterr()
    train.main([*words, "--stage=eval"])
    assert "1 given tasks" in capsys.readouterr().out
    assert "no longer the file" in refused([*words, *RL], capsys)


def test_resume_begins_no_pretraining_in_a_folder_that_has_another_stage_alone(
    run, tmp_path, capsys
):
    shutil.copytree(run / "sft", tmp_path / "sft")
    assert "no checkpoint" in refused([*SMALL, f"--out={tmp_path}", "--resume"], capsys)
    assert not (tmp_path / "pretrain").exists()


def test_a_gradient_that_is_not_finite_ends_the_stage_and_leaves_the_last_checkpoint(
    run, tmp_path, capsys, monkeypatch
):
    words = [*SMALL, "--stage=long", "--steps=3", "--save_every=1", f"--out={tmp_path}"]
    plain, steps = train.Run.clip_gradients, []

    def clip_gradients(run):
        steps.append(1)
        if len(steps) == 2:
            run.model.norm.weight.grad[0] = math.nan
        return plain(run)

    monkeypatch.setattr(train.Run, "clip_gradients", clip_gradients)
    with pytest.raises(SystemExit) as ended:
        train.main([*words, f"--start_from={run}"])
    *_, line = capsys.readouterr().err.strip().split("\n")
    assert ended.value.code == 2 and "long, step 2: gradient is NaN or infinite: norm." in line
    assert checkpoints.load_extra(tmp_path / "long")["step"] == 1
    for name, weight in weights(tmp_path / "long").items():
        assert torch.isfinite(weight).all(), name


def test_a_finished_stage_says_what_it_began_from(run, tmp_path, capsys):
    words = [*SMALL, "--stage=long", "--steps=1", f"--out={tmp_path}"]
    train.main([*words, f"--start_from={run}"])
    capsys.readouterr()
    train.main(words)
    said = capsys.readouterr().out
    assert f"finished already ({tmp_path}/long), begun from {run}" in said and "anew" not in said
    assert "elsewhere/pretrain is another" in refused([*words, "--start_from=elsewhere"], capsys)


def test_where_a_stage_began_is_known_by_its_digest_in_whatever_folder(
    run, tmp_path, capsys, monkeypatch
):
    old, moved, here = tmp_path / "old", tmp_path / "moved", tmp_path / "here"
    shutil.copytree(run, old)
    rl = [*SMALL, *"--stage=rl --steps=2 --tasks_per_step=1 --group_size=2".split()]
    ask = [*SMALL, "--stage=eval", "--eval_levels=0", NO_BENCH, f"--out={here}"]

    # Begun from a path below the present folder, stopped in the first step, gone on with elsewhere.
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(train.launch, "agree_to_stop", lambda *_: True)
        with pytest.raises(SystemExit):
            train.main([*rl, "--start_from=old", f"--out={here}"])
    monkeypatch.chdir(ROOT)
    capsys.readouterr()
    assert "another checkpoint" in refused([*rl, f"--out={here}", f"--start_from={here}"], capsys)
    train.main([*rl, f"--out={here}"])
    saved = checkpoints.load_extra(here / "rl")
    assert saved["config"]["start_from"] == str(old)
    assert saved["origin"] == checkpoints.describe_origin(run / "sft") | {"path": f"{old}/sft"}

    def evaluate(*more):
        capsys.readouterr()
        train.main([*ask, *more])
        return capsys.readouterr().out, json.loads((here / "summary.json").read_text())

    # It is found where it was, or where the flag says, and is not taken for what stands there now.
    text, numbers = evaluate()
    assert list(numbers["policies"]) == ["before RL", "after RL"] and "anew" not in text
    assert "moved" in numbers["policies"]["after RL"]["overall"]
    old.rename(moved)
    train.main([*rl, f"--out={here}", f"--start_from={moved}"])
    text, numbers = evaluate(f"--start_from={moved}")
    assert list(numbers["policies"]) == ["before RL", "after RL"] and "anew" not in text
    train.main([*SMALL, "--stage=sft", "--steps=1", f"--start_from={run}", f"--out={old}"])
    text, numbers = evaluate()
    assert list(numbers["policies"]) == ["after RL"] and "made anew since" in text
    assert "moved" not in numbers["policies"]["after RL"]["overall"]
    train.main([*rl, f"--out={here}"])
    assert f"began from {old}/sft, which was moved or made anew" in capsys.readouterr().out

    # An RL from noise, or of a version that kept no origin, has no such column either.
    load = checkpoints.load_extra
    monkeypatch.setattr(checkpoints, "load_extra", lambda path: {**load(path), "origin": None})
    text, numbers = evaluate("--eval_tasks=2")
    assert list(numbers["policies"]) == ["after RL"]
    assert f"no column before RL: {here}/rl keeps no checkpoint" in text


def test_rl_by_other_rules_than_its_sft_and_a_window_beyond_the_positions_are_said_in_one_line_each(
    run, tmp_path, capsys
):
    rl = "--stage=rl --steps=1 --tasks_per_step=1 --group_size=2".split()
    for more, said in (
        ((), []),
        (("--window=900", "--max_turns=4"), ["--window is 900 and was 512", "--max_turns is 4"]),
        (("--summarize=0",), ["--summarize is 0 and was 1"]),
    ):
        out = tmp_path / str(len(said))
        train.main([*SMALL, *rl, f"--start_from={run}", f"--out={out}", *more])
        lines = capsys.readouterr().out.splitlines()
        told = [line for line in lines if "other rules" in line]
        assert len(told) == bool(said) and all(words in told[0] for words in said)
        # The model of these flags has 64 * 2 positions.
        (beyond,) = [line for line in lines if "128 positions" in line]
        assert f"--window={900 if len(said) == 2 else 512} " in beyond
    lines = []
    checks.say_positions(train.Config(stage="sft", window=128), 128, lines.append)
    checks.say_positions(train.Config(stage="long", window=129), 128, lines.append)
    assert not lines


def test_a_folder_behind_a_tilde_is_below_home(monkeypatch, tmp_path):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    given = train.FLAGS.parse(["--out=~/a", "--start_from", "~/b", "--data=c~d", "--stage=sft"])
    assert (given["out"], given["start_from"], given["data"]) == (f"{home}/a", f"{home}/b", "c~d")


TWICE = """
import os, signal, torch, train
keep = lambda: (dict(os.environ), [signal.getsignal(n) for n in (2, 15)], torch.get_num_threads())
before = keep()
for n, words in enumerate((%r, %r, ["--dim=7"])):
    try:
        train.main([*%r, *words, f"--out=%s/{n}"])
    except SystemExit as end:
        print("ended", end.code)
print("same:", [a == b for a, b in zip(before, keep())], train.dist.is_initialized())
"""


def test_the_command_runs_twice_in_a_process_and_puts_back_what_it_changed(run, tmp_path):
    words = ["--stage=long", "--steps=1", f"--start_from={run}", "--processes=2"]
    code = TWICE % (words, [*words, "--seed=5"], SMALL, tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    done = run_command([sys.executable, "-c", code], env=environment)
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["ended 2", "same: [True, True, True] False"], done.stderr[-2000:]
    assert all((tmp_path / str(n) / "long").exists() for n in range(2))


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the process in /proc")
def test_a_rank_that_dies_before_it_joins_ends_the_others_within_seconds(run, tmp_path):
    flags = [*SMALL, "--stage=long", "--steps=5000", "--processes=2", f"--start_from={run}"]
    command = [sys.executable, str(ROOT / "train.py"), *flags, f"--out={tmp_path}"]
    child = Command(command, env=os.environ | {"OMP_NUM_THREADS": "2"})
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    child.wait_for(lambda: children.exists() and children.read_text())
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    assert child.wait(60) == 2
    assert child.stderr.count("\n") == 1 and "rank 1 was killed by signal 9" in child.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the process in /proc")
def test_a_rank_that_dies_in_a_step_ends_the_run_in_one_line(run, tmp_path):
    flags = [*SMALL, "--stage=long", "--steps=5000", "--processes=2", f"--start_from={run}"]
    command = [sys.executable, str(ROOT / "train.py"), *flags, f"--out={tmp_path}"]
    child = Command(command, env=os.environ | {"OMP_NUM_THREADS": "2"})
    log = tmp_path / "long.jsonl"
    child.wait_for(lambda: log.exists() and log.read_text())
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert child.wait(60) == 2 and "Traceback" not in child.stderr
    assert "rank 0 of 2: another rank died or stopped answering" in child.stderr.split("\n")[-2]


def numbers_of_a_log(folder, stage):
    return [json.loads(line) for line in (folder / f"{stage}.jsonl").read_text().splitlines()]


def test_minutes_are_those_of_the_run_over_its_stages_and_commands(run, tmp_path):
    before = numbers_of_a_log(run, "pretrain")[-1]["minutes"]
    assert 0 < before < numbers_of_a_log(run, "long")[0]["minutes"]

    # The log of what goes on says that ten minutes were taken.
    words = [*SMALL, "--stage=long", "--steps=3", f"--start_from={run}", f"--out={tmp_path}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.launch, "agree_to_stop", lambda *_: True)
        with pytest.raises(SystemExit):
            train.main(words)
    (line,) = numbers_of_a_log(tmp_path, "long")
    assert before < line["minutes"] < before + 5
    (tmp_path / "long.jsonl").write_text(json.dumps({**line, "minutes": 10.0}) + "\n")
    train.main(words)
    assert all(10 < line["minutes"] < 15 for line in numbers_of_a_log(tmp_path, "long")[1:])


def test_a_log_keeps_nine_digits_and_a_number_that_is_none_is_null_in_every_file(tmp_path, capsys):
    refuse = lambda word: pytest.fail(f"{word} is no JSON")
    value = {"a": [1.5, float("nan"), (float("-inf"), None)], "b": {"c": float("inf"), "d": "NaN"}}
    known = {"a": [1.5, None, [None, None]], "b": {"c": None, "d": "NaN"}}
    text = output_files.to_json(value, indent=1)
    assert json.loads(text, parse_constant=refuse) == known

    numbers = dict(step=1, loss=1.23456789e-12, norm=-4e-7, tokens=123456789, stale=1 / 3)
    bar = SimpleNamespace(update=lambda: None)
    r = SimpleNamespace(rank=0, config=train.Config(stage="sft"))
    log = {**numbers, "reward": float("nan")}
    assert step_log.report(r, bar, log, tmp_path / "sft.jsonl") == ""
    json.loads((tmp_path / "sft.jsonl").read_text(), parse_constant=refuse)
    (read,) = step_log.read_step_log(tmp_path, "sft")
    assert np.isnan(read.pop("reward")) and "1.23e-12" in capsys.readouterr().out
    assert read == {name: pytest.approx(n, rel=1e-8, abs=0) for name, n in numbers.items()}


def test_a_share_of_nothing_is_left_out_of_the_log():
    nothing = dict(summaries=0, tokens=0, left=0, named=0)
    row = dict.fromkeys(rollout_statistics.MEANS, 0.0)
    row |= dict(faults=set(), bad_tools=0, reads=False, cheats=False, suspicious=False)
    row |= dict(probe=nothing, group=(0, 0), files=1)
    log = rollout_statistics.describe_rows([row, row], ())
    shares = {"named", "summary_tokens", "cheats", "suspicious", "wrong_calls_per_turn"}
    assert not shares & log.keys() and log["reward"] == 0
    told = dict(summaries=2, tokens=30, left=5, named=2)
    other = {**row, "probe": told, "reads": True, "suspicious": True, "turns": 4, "bad_tools": 1}
    log = rollout_statistics.describe_rows([row, other], ())
    assert {key: log[key] for key in shares} == {
        "named": 0.4,
        "summary_tokens": 15,
        "cheats": 0,
        "suspicious": 1,
        "wrong_calls_per_turn": 0.25,
    }


def test_the_reference_policy_routes_by_itself():
    """Also with router replay: the routes of sampling are those of a policy that has moved on."""
    torch.manual_seed(3)
    sizes = dict(vocab=48, dim=32, layers=3, heads=2, kv_lora=16, experts=6, expert_ffn=16)
    model = train.ModelConfig(dense_ffn=32, **sizes).build_model()
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.1)
    r = SimpleNamespace(model=model, config=SimpleNamespace(router_replay=True, temperature=0.8))
    rl = train.Reinforcement.__new__(train.Reinforcement)
    rl.run, rl.reference = r, train.feedback_distill.Teacher(model, "frozen")
    routes = np.random.default_rng(1).permuted(
        np.tile(np.arange(6, dtype=np.int16), (30, 2, 1)), axis=-1
    )[..., :2]
    turn = train.rollout.Turn(
        "assistant", list(range(1, 31)), logprobs=np.zeros(29, dtype=np.float32)
    )
    batch = train.rollout.pack([train.rollout.Segment([turn], routes)], [1.0])
    own = model.logprobs(model(batch["tokens"]), batch["targets"], 0.8, batch["mask"] > 0)
    torch.testing.assert_close(rl.reference_logprobs(batch), own.detach())


UNDER_O = """
import dataclasses, json, pathlib, sys, synth_tasks
from command import checkpoints
from length_penalty import Price
from published.grouped_query import VariantConfig
from repositories.task_file import read_tasks
top = pathlib.Path(sys.argv[1])
task = dataclasses.asdict(synth_tasks.make_task(1, 4))
(top / "good.jsonl").write_text(json.dumps(task))
task["files"]["a/../../../out.py"] = "x = 1"
(top / "bad.jsonl").write_text(json.dumps(task))
(top / "run").mkdir()
(top / "run" / "manifest.json").write_text('{"extra.pt": {"bytes": true, "crc32": "0"}}')
tried = dict(
    good=lambda: read_tasks(top / "good.jsonl"),
    task=lambda: read_tasks(top / "bad.jsonl"),
    manifest=lambda: checkpoints.load_extra(top / "run"),
    sizes=lambda: VariantConfig(num_experts_per_tok=9, experts=8),
    price=lambda: Price(-1),
)
for name, call in tried.items():
    try:
        call()
        print(name, "taken")
    except ValueError as error:
        print(name, "refused:", str(error).replace(str(top), ""))
"""


def test_what_a_stranger_brings_is_checked_without_assert_too(tmp_path):
    done = subprocess.run(
        [sys.executable, "-O", "-c", UNDER_O, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert said.pop("good") == "taken", done.stderr
    assert len(said) == 4 and all(words.startswith("refused: ") for words in said.values())
    assert "no readable manifest.json" in said["manifest"] and "line 1" in said["task"]


@pytest.mark.parametrize("group", [2, 3, 6, 7, 11, 12, 48])
def test_equal_rewards_have_no_advantage_to_the_last_bit(group):
    for reward in np.random.default_rng(group).random(50):
        assert not train.rollout.advantages([reward] * group).any()
    assert train.rollout.advantages([1.0] + [0.0] * (group - 1)).any()


def text_of_a_rank(rank, world, folder, words):
    """What the digest of a rank's own text says, or the exit code with which it ended"""
    config = train.FLAGS.configure(
        train.FLAGS.parse([*SMALL, f"--dp_replicate={world}", f"--data={folder}/{words[rank]}"]),
        "pretrain",
    )
    r = train.Run(replace(config, stage="pretrain"))
    r.tokenizer = train.rollout.Tokenizer({bytes([b]): b for b in range(256)})
    try:
        return train.Text(r).data_digest
    except SystemExit as end:
        return end.code


def test_ranks_that_read_other_texts_end_before_they_begin(tmp_path):
    for name in ("one", "same", "other"):
        (tmp_path / name).mkdir()
        for i in range(30):
            text = f"def f{i}(x):\n    return x + {i + (name == 'other')}\n" * 20
            (tmp_path / name / f"m{i}.py").write_text(text)
    first, second = run_ranks(2, text_of_a_rank, str(tmp_path), ("one", "same"))
    assert first == second and len(first) == 64
    assert run_ranks(2, text_of_a_rank, str(tmp_path), ("one", "other")) == [2, 2]


def test_a_published_folder_is_known_by_the_ends_of_its_files(tmp_path):
    digests = []
    for name, end in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(3 << 20) + end)
        digests.append(output_files.digest_ends(tmp_path / name))
    assert digests[0] == digests[1] != digests[2]


def test_a_truncated_checkpoint_is_refused(run, capsys, tmp_path):
    shutil.copytree(run / "pretrain", tmp_path / "pretrain")
    file = next((tmp_path / "pretrain").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    assert "bytes" in refused([*SMALL, "--stage=long", f"--out={tmp_path}"], capsys)
    shutil.copytree(run / "pretrain", tmp_path / "pretrain", dirs_exist_ok=True)
    extra = tmp_path / "pretrain" / "extra.pt"
    extra.write_bytes(bytes(len(extra.read_bytes())))
    assert "damaged" in refused([*SMALL, "--stage=long", f"--out={tmp_path}"], capsys)


@pytest.mark.parametrize(
    "stage, options",
    [
        ("long", []),
        ("long", ["--weight_dtype=bfloat16"]),
        ("sft", []),
        ("rl", ["--tasks_per_step=2", "--group_size=2", "--kl_coef=0.01"]),
    ],
)
def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_weights(
    stage, options, run, tmp_path
):
    common = [*SMALL, f"--stage={stage}", "--steps=3", "--save_every=2", f"--start_from={run}"]
    common += options
    train.main([*common, f"--out={tmp_path}/whole"])
    stop_in_step(2, [*common, f"--out={tmp_path}/parts"], stage)
    train.main([*common, f"--out={tmp_path}/parts", "--resume"])
    whole, parts = weights(tmp_path / "whole" / stage), weights(tmp_path / "parts" / stage)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    before = weights(run / train.ORDER[train.ORDER.index(stage) - 1])
    assert not any(
        torch.equal(whole[name], before[name]) for name in whole if name.endswith("down")
    )
    assert [line["step"] for line in read_log(tmp_path / "parts", stage)] == [1, 2, 3]


def test_a_run_that_saves_in_the_background_is_the_same_run_and_ends_with_its_last_save(
    run, tmp_path, monkeypatch
):
    """As on a GPU: with saves after each step, a slow disk, a stop by signal and a resume."""
    common = [*SMALL, "--stage=rl", "--steps=3", "--save_every=1", f"--start_from={run}"]
    common += ["--tasks_per_step=2", "--group_size=2", "--kl_coef=0.01"]
    train.main([*common, f"--out={tmp_path}/plain"])

    write, threads = checkpoints.write_synced, []

    def slow(*arguments):
        threads.append(threading.current_thread())
        time.sleep(0.2)
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_synced", slow)
        save = partial(checkpoints.save_checkpoint, in_background=True)
        patch.setattr(checkpoints, "save_checkpoint", save)
        stop_in_step(2, [*common, f"--out={tmp_path}/parts"], "rl")
        assert checkpoints.load_extra(tmp_path / "parts" / "rl")["step"] == 2
        train.main([*common, f"--out={tmp_path}/parts", "--resume"])
    assert threads and threading.main_thread() not in threads
    first, second = (checkpoints.load_extra(tmp_path / name / "rl") for name in ("plain", "parts"))
    assert first["source"] == second["source"] and second["step"] == 3
    plain, parts = weights(tmp_path / "plain" / "rl"), weights(tmp_path / "parts" / "rl")
    assert all(torch.equal(plain[name], parts[name]) for name in plain)


def test_killed_with_minus_nine_the_same_command_goes_on_to_the_same_weights(run, tmp_path):
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *SMALL,
        *"--stage=long --steps=30 --save_every=3".split(),
        f"--start_from={run}",
    ]
    run_command([*command, f"--out={tmp_path}/whole"], check=True)
    child = Command([*command, f"--out={tmp_path}/killed"])
    child.wait_for((tmp_path / "killed" / "long").exists)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    run_command([*command, f"--out={tmp_path}/killed"], check=True)
    whole, killed = weights(tmp_path / "whole" / "long"), weights(tmp_path / "killed" / "long")
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def test_sigterm_saves_and_says_how_to_go_on(run, tmp_path):
    words = [*SMALL, "--stage=long", "--steps=5000", f"--start_from={run}", f"--out={tmp_path}"]
    log = tmp_path / "long.jsonl"
    child = Command([sys.executable, str(ROOT / "train.py"), *words]).wait_for(
        lambda: log.exists() and log.read_text()
    )
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 128 + signal.SIGTERM and "--resume" in child.stderr
    assert checkpoints.load_extra(tmp_path / "long")["step"] == len(log.read_text().splitlines())


@pytest.mark.skipif(sys.platform != "linux", reason="a rank ends with rank 0 on Linux alone")
def test_a_signal_to_all_ranks_while_they_start_ends_the_run(run, tmp_path):
    """As Ctrl-C does. A rank that died while it was importing left rank 0 waiting for it."""
    flags = [*SMALL, "--stage=long", "--steps=5000", "--processes=2", f"--start_from={run}"]
    command = [sys.executable, str(ROOT / "train.py"), *flags, f"--out={tmp_path}"]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    child = Command(command, env=environment, new_session=True)
    child.wait_for(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text)
    time.sleep(0.2)
    os.killpg(child.pid, signal.SIGTERM)
    # Ended at once by the signal, or after the first step by its handler.
    assert child.wait(120) in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_a_run_that_ends_early_leaves_no_process_group(tmp_path):
    """One that is left has threads, which may end the process with an abort and a line of C++."""
    store = train.dist.FileStore(str(tmp_path / "store"), 1)
    with pytest.raises(SystemExit), train.launch.restored_process(None):
        train.dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        raise SystemExit(128 + signal.SIGTERM)
    assert not train.dist.is_initialized()


def commands(rank, world, *lists):
    """What torchrun would do, in ranks that are forked already: one process group for all lists."""
    os.environ["RANK"] = str(rank)
    train.dist.destroy_process_group = lambda: None
    for words in lists:
        train.main(words)


def test_two_processes_have_the_loss_of_one(run, tmp_path):
    """As torchrun starts them, and in other layouts as forked ranks in one process group."""
    common = [*SMALL, "--stage=long", "--steps=2", f"--start_from={run}"]
    train.main([*common, f"--out={tmp_path}/one"])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [str(ROOT / "train.py"), *common, f"--out={tmp_path}/torchrun"]
    run_command([*launcher, "--nproc_per_node=2", *words], env=environment, check=True)
    layouts = {
        "ep": ["--ep=2"],
        "cp": ["--cp=2"],
        "bf16": ["--ep=2", "--weight_dtype=bfloat16"],
    }
    run_ranks(
        2, commands, *([*common, *more, f"--out={tmp_path}/{n}"] for n, more in layouts.items())
    )

    def losses(name):
        return [line["loss"] for line in read_log(tmp_path / name, "long")]

    one = losses("one")
    assert len(one) == 2
    for name, tolerance in {"torchrun": 1e-4, "ep": 1e-4, "cp": 1e-4, "bf16": 5e-3}.items():
        assert losses(name) == pytest.approx(one, abs=tolerance), name


def test_a_head_that_drafts_learns_in_every_stage_and_moves_no_weight_of_the_model(
    run, tmp_path, capsys, monkeypatch
):
    for stage in ("pretrain", "long", "sft"):
        words = [*SMALL, f"--stage={stage}", "--steps=2", f"--out={tmp_path}"]
        train.main([*words, "--mtp"])
        *_, line = [json.loads(line) for line in (tmp_path / f"{stage}.jsonl").open()]
        assert line["draft_kl"] > 0
        plain, drafting = weights(run / stage), weights(tmp_path / stage)
        assert all(torch.equal(plain[name], drafting[name]) for name in plain)
        assert {name.split(".")[0] for name in set(drafting) - set(plain)} == {"mtp"}
        assert ("draft_accepted" in line) == (stage != "sft")
        # A stage without the head cannot go on from one with it.
        if stage == "pretrain":
            words[-1] = f"--out={tmp_path}/other"
            words = [*words, f"--start_from={tmp_path}"]
            words[words.index("--stage=pretrain")] = "--stage=long"
            capsys.readouterr()
            assert "give --mtp=1 here" in refused(words, capsys)
    began = weights(tmp_path / "sft")
    # Room enough for two rollouts that differ, and failures that pay for their effort, or there is
    # nothing to learn.
    monkeypatch.setattr(train.rollout, "grade", train.rollout.grade)
    effort.failures_pay()
    train.main([*SMALL, *RL, "--mtp", "--window=1024", f"--out={tmp_path}"])
    words = [*SMALL, *RL, "--window=1024", f"--start_from={run}", f"--out={tmp_path}/plain"]
    train.main(words)
    *_, line = [json.loads(line) for line in (tmp_path / "rl.jsonl").open()]
    plain, after = weights(tmp_path / "plain" / "rl"), weights(tmp_path / "rl")
    assert line["draft_kl"] > 0
    assert all(torch.equal(plain[name], after[name]) for name in plain)
    assert not all(torch.equal(began[name], after[name]) for name in plain)
    head = [name for name in after if name.startswith("mtp.")]
    assert not any(torch.equal(began[name], after[name]) for name in head)


def test_edited_experts_have_no_low_precision(capsys, monkeypatch):
    monkeypatch.setattr(moe.Experts, "forward", lambda self, x, counts: x)
    words = [*SMALL, "--stage=pretrain", "--precision=nvfp4"]
    assert "moe.Experts.forward as it was" in refused(words, capsys)


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_the_experts_of_a_run_multiply_in_the_precision_asked_for_in_every_stage(
    precision, run, tmp_path, capsys
):
    """The oracle is the same run without rounding: the loss is near, the weights are others."""
    words = [*SMALL, "--stage=pretrain", "--steps=2", f"--precision={precision}"]
    train.main([*words, f"--out={tmp_path}"])
    model = train.eval.load_policy(tmp_path)[0]
    assert model.config.precision == precision
    assert {block.ffn.experts.precision for block in model.layers[1:]} == {precision}
    ours, theirs = (
        json.loads((folder / "pretrain.jsonl").read_text().splitlines()[-1])
        for folder in (tmp_path, run)
    )
    assert ours["held_out_loss"] == pytest.approx(theirs["held_out_loss"], rel=1e-3)
    rounded, whole = weights(tmp_path / "pretrain"), weights(run / "pretrain")
    moved = [name for name in whole if not torch.equal(rounded[name], whole[name])]
    assert "layers.1.ffn.experts.w_down" in moved
    capsys.readouterr()
    assert f"give --precision={precision} here" in refused(
        [*SMALL, "--stage=long", f"--out={tmp_path}/o", f"--start_from={tmp_path}"], capsys
    )


def test_the_advantages_are_as_stated():
    # By hand: each reward minus the mean of the group, 0.75.
    rollouts = [SimpleNamespace(reward=reward) for reward in (1, 0.5, 1, 0.5)]
    found = train.Reinforcement.group_advantages(SimpleNamespace(), rollouts)
    np.testing.assert_allclose(found, [0.25, -0.25, 0.25, -0.25])


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize(
    "levels, opened",
    [("0,1,2,3,4,5", []), ("0,1", [2, 3, 4, 5]), ("0,1,8", [2, 3, 4, 5]), ("5,6,7", [])],
)
def test_rl_begins_with_the_levels_of_sft_and_a_curriculum_alone_opens_harder_ones(
    on, levels, opened
):
    stage = object.__new__(train.Reinforcement)
    stage.run = SimpleNamespace(config=train.Config(levels=levels, curriculum=on))
    stage.tasks = {}
    curriculum = stage.make_curriculum()
    given = [int(level) for level in levels.split(",")]
    assert curriculum.levels == given
    for _ in range(100):
        for level in list(curriculum.levels):
            curriculum.update(level, 8, 8)
    assert curriculum.levels == given + (opened if on else [])


def test_a_batch_without_a_gradient_moves_nothing_although_the_optimizer_remembers_one(
    run, tmp_path, monkeypatch
):
    # The expert takes the place of the policy, so that the first step surely has a gradient.
    monkeypatch.setitem(train.STAGE, "rl", Imitation)
    monkeypatch.setattr(train, "SLOPPY", 0.0)
    learn, seen = train.Reinforcement.group_losses, []

    def silent_in_the_second_step(self, groups, log):
        seen.append({name: t.clone() for name, t in self.run.model.state_dict().items()})
        for loss in learn(self, groups, log):
            yield loss * (len(seen) == 1)

    monkeypatch.setattr(train.Reinforcement, "group_losses", silent_in_the_second_step)
    train.main(
        [
            *SMALL,
            *"--stage=rl --steps=2 --tasks_per_step=2 --group_size=2 --max_turns=20".split(),
            *"--warmup=0 --router_replay=0 --feedback=0".split(),
            f"--start_from={run}",
            f"--out={tmp_path}",
        ]
    )
    seen.append(weights(tmp_path / "rl"))
    moved = [
        {name for name in a if not torch.equal(a[name], b[name])} for a, b in zip(seen, seen[1:])
    ]
    assert "head.weight" in moved[0] and all(
        name.endswith(("router.bias", "router.load")) for name in moved[1]
    )


def test_the_two_processes_it_starts_itself_do_what_one_does(run, tmp_path):
    """Loss of a supervised stage, rollouts, and evaluation; bad input and a signal to one of them
    end both."""

    imitation = ["-m", "experiments.runner", "--arm=experiments.learn_new:imitate", "--"]
    # Where failures pay for their effort, a policy that solves nothing learns something, too.
    paying = ["-m", "experiments.runner", "--arm=experiments.effort:failures_pay", "--"]

    def start(*words, processes, program=(str(ROOT / "train.py"),)):
        words = [*SMALL, f"--start_from={run}", *words, f"--processes={processes}"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(processes)}
        return Command([sys.executable, *program, *words], cwd=ROOT, env=environment)

    def read(out, stage, key):
        return [line[key] for line in read_log(out, stage)]

    found = {}
    for processes in (1, 2):
        out, given = tmp_path / str(processes), tmp_path / f"given_{processes}"
        rl = [
            *"--stage=rl --steps=2 --tasks_per_step=3 --group_size=2 --kl_coef=10".split(),
            *"--grad_clip=1000 --adam_lr=0.01".split(),
        ]
        # Three tasks over two ranks: one of them fills up with a spare batch.
        held_out = ["--stage=eval", "--eval_levels=0,1,2", NO_BENCH]
        # The expert's rollouts: what is learned from is the same to the token. The patch must work
        # in both processes.
        by_expert = [*rl, "--router_replay=0", f"--out={given}"]
        for words, program in (
            ([*rl, f"--out={out}"], paying),
            ([*held_out, f"--out={out}"], paying),
            (by_expert, imitation),
        ):
            child = start(*words, processes=processes, program=program)
            assert child.wait() == 0, child.stderr
        summary = json.loads((out / "summary.json").read_text())["policies"]
        found[processes] = SimpleNamespace(
            norms=read(out, "rl", "norm"),
            sampled=read(out, "rl", "sampled")[0],
            evaluated=[summary[name]["overall"]["tokens"] for name in sorted(summary)],
            given=read(given, "rl", "norm"),
        )
    one, two = found[1], found[2]
    assert (one.sampled, one.evaluated) == (two.sampled, two.evaluated)
    assert one.given == pytest.approx(two.given, rel=1e-4) and len(one.given) == 2
    # Rollouts of one and of two processes differ by a token now and then, because the rounding of a
    # sum depends on the other rows of the batch. One such token moved the norm by 1.6e-3. The
    # second norm shows that the k1 penalty acts: without it both are alike (.098 and .104).
    assert one.norms == pytest.approx(two.norms, rel=1e-2) and one.norms[1] > 5 * one.norms[0]

    # The supervised stage: the losses before it is stopped.
    long, out = ["--stage=long", "--steps=5000"], tmp_path / "stopped"
    child, log = start(*long, f"--out={out}", processes=2), out / "long.jsonl"
    child.wait_for(lambda: log.exists() and log.read_text().count("\n") >= 3)
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 128 + signal.SIGTERM and "Traceback" not in child.stderr
    stop_in_step(3, [*SMALL, f"--start_from={run}", *long, f"--out={tmp_path}/alone"], "long")
    losses = read(tmp_path / "alone", "long", "loss")
    assert losses == pytest.approx(read(out, "long", "loss")[:3], abs=1e-4) and len(losses) == 3
    said, typed = (
        train.FLAGS.parse(shlex.split(words))
        for words in (child.stderr.rsplit("train.py ", 1)[1], shlex.join(child.args[2:]))
    )
    assert said == {**typed, "resume": True}  # what it says is what was typed
    assert checkpoints.load_extra(out / "long")["step"] >= 3
    child = start("--stage=rl", f"--out={tmp_path}/none", "--start_from=nowhere", processes=2)
    assert child.wait() == 2 and child.stderr.count("\n") == 1 and "nowhere" in child.stderr


def test_an_evaluation_of_other_tasks_or_after_a_torn_summary_is_made_anew_and_the_same_again_is_not(
    run, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("command.evaluation.current_commit", lambda: "aaaa")
    words = [*SMALL, f"--start_from={run}", f"--out={tmp_path}", "--eval_levels=0"]
    train.main([*words, "--stage=rl", "--steps=1", "--tasks_per_step=1", "--group_size=2"])
    (tmp_path / "one.jsonl").write_text(train.synth_tasks.make_task(0, 5).to_json() + "\n")
    texts = []
    given = [f"--tasks={tmp_path}/one.jsonl"]
    for more in ([NO_BENCH], [NO_BENCH], ["--temperature=0.5", NO_BENCH], given, None, "report"):
        if more is None:
            (tmp_path / "summary.json").write_text('{"policies"')
        if more == "report":
            (tmp_path / "report.html").unlink()
            more = None
        capsys.readouterr()
        train.main([*words, "--stage=eval", *(more or [NO_BENCH])])
        texts.append(capsys.readouterr().out)
    assert '"level": 0' in (tmp_path / "report.html").read_text()
    assert ["and figures" in text for text in texts] == [
        True,
        False,
        True,
        True,
        True,
        True,
    ] and "given tasks" in texts[3]
    assert "was made with 3, and so" in refused([*words, "--stage=eval", "--max_turns=4"], capsys)
    # Nobody knows which edit a table was made with, so an edited project makes it anew.
    for commit in ("aaaa-dirty", ""):
        monkeypatch.setattr("command.evaluation.current_commit", lambda: commit)
        for _ in range(2):
            capsys.readouterr()
            train.main([*words, "--stage=eval", NO_BENCH])
            assert "and figures" in capsys.readouterr().out
    # Without the flag the run's own number of turns is taken.
    unsaid = [word for word in words if not word.startswith("--max_turns")]
    train.main([*unsaid, "--stage=eval", "--temperature=0.6", NO_BENCH])
    assert json.loads((tmp_path / "summary.json").read_text())["config"]["max_turns"] == 3


def test_a_published_checkpoint_comes_in_is_trained_and_goes_out_again(run, tmp_path, capsys):
    """A random one in DeepSeek-V3's format: the wrong ways in are refused, sft and rl run on it,
    what is exported is what was trained. Two ranks with half of the experts each do the same."""
    folder, out, back = tmp_path / "published", tmp_path / "out", tmp_path / "back"
    write_checkpoint(folder, build_foreign_model(context=4096))
    common = [
        *(flag for flag in SMALL if not flag.startswith(("--dim", "--vocab"))),
        f"--init_from={folder}",
        f"--out={out}",
    ]
    assert "tokenizer" in refused([*common, "--stage=sft", "--steps=1"], capsys)
    write_byte_tokenizer(folder)
    assert "config.json" in refused(
        [*common[:-2], f"--init_from={tmp_path}", f"--out={out}", "--stage=sft", "--steps=1"],
        capsys,
    )
    train.main([*common, "--stage=sft", "--steps=1"])
    rl = ["--stage=rl", "--steps=1", "--tasks_per_step=1", "--group_size=2"]
    # Without --init_from, rl still knows the published model that the run began from.
    train.main([*(flag for flag in common if not flag.startswith("--init_from")), *rl])
    assert checkpoints.load_extra(out / "rl")["config"]["init_from"] == str(folder)
    # the same: finished already
    train.main([*common, *rl])
    capsys.readouterr()
    assert "did not begin from" in refused(
        [*common[:-1], *rl, f"--start_from={run}", f"--out={tmp_path}/mixed"], capsys
    )
    train.main(
        [
            *common[:-1],
            f"--out={tmp_path}/narrow",
            *"--stage=sft --steps=1 --weight_dtype=bfloat16".split(),
        ]
    )
    two = [*common[:-1], f"--out={tmp_path}/two", "--ep=2"]
    run_ranks(
        2,
        commands,
        [*two, "--stage=sft", "--steps=1"],
        [*two, "--stage=rl", "--steps=1", "--tasks_per_step=2", "--group_size=2"],
    )
    read = lambda folder, stage: json.loads((folder / f"{stage}.jsonl").read_text())
    assert read(tmp_path / "two", "sft")["loss"] == pytest.approx(
        read(out, "sft")["loss"], abs=1e-4
    )
    assert read(tmp_path / "narrow", "sft")["loss"] == pytest.approx(
        read(out, "sft")["loss"], abs=5e-3
    )
    assert read(tmp_path / "two", "rl")["sampled"]
    train.main([f"--out={out}", f"--export={back}"])
    mine, config = load_model(back), json.loads((back / "config.json").read_text())
    assert (
        config["model_type"] == "deepseek_v3"
        and (back / "tiktoken.model").read_bytes() == (folder / "tiktoken.model").read_bytes()
    )
    trained, start = train.eval.load_policy(out)[0].state_dict(), load_model(folder).state_dict()
    assert all(
        torch.equal(trained[name], t)
        for name, t in mine.state_dict().items()
        if not name.endswith("load")
    )
    assert not torch.equal(trained["head.weight"], start["head.weight"])
    capsys.readouterr()
    assert "not empty" in refused([f"--out={out}", f"--export={back}"], capsys)


@pytest.fixture
def published(tmp_path):
    """A small random model in DeepSeek-V3's format, in a folder named `published` with what
    tokenizers of such models have beside them"""
    folder, model = tmp_path / "published", build_foreign_model(context=1024)
    torch.nn.init.normal_(model.head.weight, std=0.02)
    write_checkpoint(
        folder, model, extra={"bos_token_id": 7, "eos_token_id": 8, "pad_token_id": None}
    )
    write_byte_tokenizer(folder)
    return folder


FROM_PUBLISHED = [flag for flag in SMALL if not flag.startswith(("--dim", "--vocab"))]
RL = ["--stage=rl", "--steps=1", "--tasks_per_step=1", "--group_size=2"]


def test_what_begins_from_a_published_model_is_fine_tuned_also_in_stages_that_do_not_say_where_it_began(
    published, tmp_path, monkeypatch, capsys
):
    fine = configure([f"--init_from={published}", "--stage=sft"], "sft")
    assert train.bias_rate(SimpleNamespace(config=fine)) == 0
    assert train.bias_rate(SimpleNamespace(config=train.Config())) == train.BALANCE_RATE
    out, sft = tmp_path / "out", ["--stage=sft", "--steps=4", f"--init_from={published}"]
    train.main([*FROM_PUBLISHED, *sft, f"--out={out}"])
    before, after = load_model(published).state_dict(), weights(out / "sft")
    for name in ("embed.weight", "head.weight", "layers.0.attn.wq"):
        assert 0 < (after[name] - before[name]).norm() < 0.01 * before[name].norm()
    for name, w in before.items():
        assert torch.equal(after[name], w) or not name.endswith("router.bias")
    train.main([*FROM_PUBLISHED, *RL, f"--out={out}"])
    config = checkpoints.load_extra(out / "rl")["config"]
    made = config["init_from"], config["adam_lr"], config["optimizer"]
    assert made == (str(published), 1e-6, "adamw")
    monkeypatch.chdir(tmp_path)
    for spelled in ("published", f"{published}/", "out/../published"):
        capsys.readouterr()
        train.main([*FROM_PUBLISHED, *RL, f"--init_from={spelled}", "--out=out"])
        assert "finished already" in capsys.readouterr().out
    # All stages would begin with a pretraining of random weights.
    said = f"out: its stage sft began from {published}, without pretrain: add --stage=sft"
    assert said in refused(["--scale=tiny", "--out=out"], capsys)


def test_data_and_tasks_are_the_same_however_they_are_spelled(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    spelled = [
        train.FLAGS.configure({"data": f"{at}d", "tasks": f"{at}t"}, "rl")
        for at in ("", "./", f"{tmp_path}/")
    ]
    assert spelled[0] == spelled[1] == spelled[2]


def test_every_stage_runs_from_a_published_model_and_before_any_the_model_itself_is_evaluated(
    published, tmp_path
):
    words = [
        *FROM_PUBLISHED,
        f"--init_from={published}",
        f"--out={tmp_path}/out",
        "--eval_levels=0,1",
    ]
    solved = lambda: {
        name: p["overall"]["tasks"]
        for name, p in json.loads((tmp_path / "out" / "summary.json").read_text())[
            "policies"
        ].items()
    }
    train.main([*words, "--stage=eval", NO_BENCH])
    assert solved() == {"published": 2}
    (tmp_path / "tasks.jsonl").write_text(train.synth_tasks.make_task(0, 5).to_json() + "\n")
    train.main([*words, "--stage=eval", f"--tasks={tmp_path}/tasks.jsonl"])
    assert solved() == {"published": 1}
    train.main([*words, "--steps=1", "--tasks_per_step=1"])
    assert solved() == {"before RL": 2, "after RL": 2}
    # Without --init_from the same command finds all stages finished.
    again = "--eval_levels=0,1 --steps=1 --tasks_per_step=1".split()
    train.main([*FROM_PUBLISHED, f"--out={tmp_path}/out", *again])
    assert {
        checkpoints.load_extra(tmp_path / "out" / stage)["config"]["init_from"]
        for stage in train.ORDER
    } == {str(published)}


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--stage=sft --start_from=nowhere", "nowhere/long, which is not there"),
        ("--stage=eval --start_from=nowhere", "nowhere/sft"),
        ("--stage=sft --dim=64", "--dim beside a published model"),
        ("--stage=eval --vocab=512", "--vocab beside a published model"),
        ("--stage=sft --window=1025", "positions for 1024"),
        ("--stage=eval --window=1025", "positions for 1024"),
        ("--stage=pretrain --context=1025", "--context is 1025"),
        ("--stage=long --context=1024", "--yarn is 2048"),
        # The window of every stage is looked at before the first one.
        ("--window=1025", "positions for 1024"),
        ("--context=600", "--yarn is 1200"),
    ],
)
def test_what_does_not_go_with_a_published_model_is_refused(
    flags, words, published, tmp_path, capsys
):
    given = [*FROM_PUBLISHED, f"--init_from={published}", f"--out={tmp_path}/out", *flags.split()]
    assert words in refused(given, capsys)
    assert {path.name for path in tmp_path.glob("out/*")} <= {".lock"}


def test_another_window_is_refused_in_a_later_stage_too_and_other_weights_are_not_evaluated_as_the_published_models(
    published, run, tmp_path, capsys
):
    words = [*FROM_PUBLISHED, f"--out={tmp_path}/out"]
    train.main([*words, "--stage=sft", "--steps=1", f"--init_from={published}"])
    capsys.readouterr()
    assert "positions for 1024" in refused([*words, *RL, "--window=2048"], capsys)
    assert "--layers beside a published model" in refused([*words, *RL, "--layers=3"], capsys)
    assert "did not begin from" in refused(
        [*FROM_PUBLISHED, "--stage=eval", f"--init_from={published}", f"--out={run}"], capsys
    )


def test_a_published_folder_with_a_bad_tokenizer_is_told_before_weights_are_read_and_what_cannot_be_read_in_one_line(
    published, tmp_path, monkeypatch, capsys
):
    def load_model(*words):
        raise OSError(5, "Input/output error", f"{published}/model.safetensors")

    monkeypatch.setattr(train.published_model, "load_model", load_model)
    for stage in ("sft", "eval"):
        words = [
            *FROM_PUBLISHED,
            f"--stage={stage}",
            f"--init_from={published}",
            f"--out={tmp_path}/out",
        ]
        assert "Input/output error" in refused(words, capsys)
        (published / "tiktoken.model").rename(tmp_path / "aside")
        assert "tokenizer" in refused(words, capsys)
        (tmp_path / "aside").rename(published / "tiktoken.model")


def test_an_export_has_what_belongs_to_the_published_tokenizer_and_nothing_from_outside_its_folder(
    published, tmp_path, capsys
):
    """Also: a stage may be chosen, and the weights' dtype, which is that of the run; without the
    folder that a run began from, nothing."""
    texts = {
        "tokenization_own.py": "from .helper import x\nraise SystemExit('was run')\n",
        "helper.py": "x = 1\n",
        "chat_template.jinja": "{{ x }}",
        "special_tokens_map.json": "{}",
        "added_tokens.json": "{}",
        "generation_config.json": '{"eos_token_id": [8, 9], "top_p": 0.8, "pad_token_id": 3}',
    }
    others = dict.fromkeys(["README.md", "../outside.py", "notes.json"], "")
    for name, text in {**texts, **others}.items():
        (published / name).write_text(text)
    out = f"--out={tmp_path}/out"
    common = [*FROM_PUBLISHED, "--weight_dtype=bfloat16", out]
    train.main([*common, "--stage=sft", "--steps=1", f"--init_from={published}"])
    train.main([*common, *RL])
    capsys.readouterr()
    for words, says in (
        ("--steps=3", "--steps does nothing beside --export"),
        (f"--init_from={published}", "--init_from does nothing"),
        ("--stage=long", "out/long: no such folder"),
        ("--weight_dtype=fp8", "float32, bfloat16"),
    ):
        assert says in refused([out, f"--export={tmp_path}/no", words], capsys)

    # Of the last stage, of another one, in another dtype.
    chosen = {"rl": (), "sft": ("--stage=sft",), "wide": ("--weight_dtype=float32",)}
    for name, words in chosen.items():
        train.main([out, f"--export={tmp_path}/{name}", *words])
        trained = weights(tmp_path / "out" / ("sft" if name == "sft" else "rl"))
        loaded = load_model(tmp_path / name).state_dict()
        for key, w in trained.items():
            assert torch.equal(loaded[key], w) or key.endswith("load")
    size = lambda name: (tmp_path / name / "model.safetensors").stat().st_size
    assert size("wide") > 1.8 * size("rl")
    own = {"config.json", "model.safetensors", "tiktoken.model", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "rl").iterdir()} == own | set(texts)

    # The end that turns are written with, and those that the model was published with.
    read = lambda name: json.loads((tmp_path / "rl" / name).read_text())
    tokenizer = evaluation.load_policy(tmp_path / "out")[1]
    ends = [tokenizer.id["<|end|>"], *sorted(tokenizer.ends - {tokenizer.id["<|end|>"]})]
    assert tokenizer.ends >= {8, 9}
    ids = [read("config.json")[f"{name}_token_id"] for name in ("bos", "eos", "pad")]
    assert ids == [7, ends, None]
    assert read("generation_config.json") == {"eos_token_id": ends, "pad_token_id": 3}

    # Without the folder that the run began from.
    (published / "tiktoken.model").unlink()
    assert "tokenizer" in refused([out, f"--export={tmp_path}/no"], capsys)
    shutil.rmtree(published)
    said = f"{published}, which this run began from, is not there"
    assert said in refused([out, f"--export={tmp_path}/no"], capsys)
    assert not (tmp_path / "no").exists()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="workspaces stand elsewhere")
def test_a_signal_to_an_evaluation_of_two_processes_leaves_no_workspace(run, tmp_path):
    names, lines = [f"of_{os.getpid()}_{rank}.txt" for rank in (0, 1)], []
    for name in names:  # one task for each process
        task = json.loads(train.synth_tasks.make_task(0, 5).to_json())
        lines.append(
            json.dumps({**task, "instance_id": name, "files": {**task["files"], name: ""}}) + "\n"
        )
    (tmp_path / "tasks.jsonl").write_text("".join(lines))
    standing = lambda: {
        path.name for name in names for path in Path("/dev/shm").glob(f"task-*/{name}")
    }
    command = [sys.executable, str(ROOT / "train.py"), *SMALL, "--processes=2", "--stage=eval"]
    command += [f"--start_from={run}", "--eval_samples=500", f"--tasks={tmp_path}/tasks.jsonl"]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    child = Command([*command, f"--out={tmp_path}/out"], env=environment)
    child.wait_for(lambda: standing() == set(names))
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 128 + signal.SIGTERM and not standing()


def test_a_run_from_noise_goes_out_with_its_own_tokenizer(run, tmp_path):
    train.main([f"--out={run}", f"--export={tmp_path}/out"])
    model, tokenizer, _ = train.eval.load_policy(run)
    again, text = (
        read_tokenizer(tmp_path / "out", tokenizer.vocab),
        Path(train.__file__).read_text(),
    )
    assert again.encode(text) == tokenizer.encode(text) and again.id == tokenizer.id
    state = load_model(tmp_path / "out").state_dict()
    assert all(
        torch.equal(state[name], t)
        for name, t in model.state_dict().items()
        if not name.endswith("load")
    )


def test_held_out_files_are_not_trained_on():
    texts, held = source_files.python_sources(str(ROOT))
    assert held and not set(held) & set(texts) and "class Sampler" in "".join(texts + held)


def test_the_window_is_a_quarter_then_half_then_whole():
    config = train.FLAGS.configure({"stage": "sft", "steps": 10, "seq_len_warmup": 0.4}, "sft")
    divisors = [train.seq_len_divisor(step, config) for step in range(10)]
    assert divisors == [4] * 2 + [2] * 2 + [1] * 6
    assert train.seq_len_divisor(0, replace(config, seq_len_warmup=0.0)) == 1


def test_demonstrations_are_of_every_level_asked_for(run):
    tokenizer = train.rollout.Tokenizer(**checkpoints.load_extra(run / "sft")["tokenizer"])
    config = replace(train.Config(), window=2048, trigger=0.5, levels="0,1,2,3,4,5,6,7")
    compact = train.summarize.make_compaction(vars(config))
    pairs = train.make_demonstrations(config, tokenizer, compact, range(24), lambda i, _: i)
    assert [number for number, _ in pairs] == list(range(24))
    missing = {
        turn.text.count(": missing")
        for _, played in pairs
        for segment in played.segments
        for turn in segment.turns
        if turn.role == "tool"
    }
    # The tests report as many missing functions as the level deletes: 4 and 6 in the last two.
    assert missing >= {0, 2, 3, 4, 6}


def test_work_on_many_cores_is_the_work_of_one_in_the_same_order():
    """A patch of this process acts in the others too, and an error of theirs is raised here."""
    factor = 3

    def function(number):
        if number == 777:
            raise ValueError("no 777")
        return number * factor, os.getpid()

    found = list(train.launch.compute_on_cores(function, range(300), cores=4))
    assert [value for value, _ in found] == [3 * number for number in range(300)]
    processes = {pid for _, pid in found}
    assert os.getpid() not in processes

    # Few cores, or little to do: here.
    for items, cores in ((range(300), 2), (range(20), 4)):
        assert {pid for _, pid in train.launch.compute_on_cores(function, items, cores)} == {
            os.getpid()
        }
    with pytest.raises(ValueError, match="no 777"):
        list(train.launch.compute_on_cores(function, range(700, 900), cores=4))


def test_demonstrations_made_on_many_cores_are_those_of_one(run, monkeypatch):
    tokenizer = train.rollout.Tokenizer(**checkpoints.load_extra(run / "sft")["tokenizer"])
    config = replace(train.Config(), window=512)

    def tokens(cores):
        plain = train.launch.compute_on_cores
        with monkeypatch.context() as here:
            many = lambda function, items: plain(function, items, cores)
            here.setattr(train.launch, "compute_on_cores", many)
            numbers = range(0, 240, 2)
            pairs = train.make_demonstrations(config, tokenizer, None, numbers, lambda i, _: i)
        assert [number for number, _ in pairs] == list(numbers)
        return [[turn.tokens for turn in played.turns] for _, played in pairs]

    assert tokens(1) == tokens(4)


def test_a_rule_without_a_reminder_is_a_habit_too_and_no_demonstration_has_its_hint(run):
    tokenizer = train.rollout.Tokenizer(**checkpoints.load_extra(run / "sft")["tokenizer"])
    task = train.synth_tasks.make_task(0, 1)

    def segments(habits):
        config = replace(train.Config(), window=2048, habits=habits)
        flags.read_value(habits, "str", flags.rules_of(train.Config)["habits"])
        rng = train.random.Random(1)
        return train.make_demonstration(config, task, rng, tokenizer, None).segments

    def spoken(habits):
        return [turn.tokens for segment in segments(habits) for turn in segment.turns]

    train.feedback_distill.rule(lambda rollout, e, i: None)
    try:
        assert spoken("unavailable_tool,<lambda>") == spoken("unavailable_tool")
    finally:
        del train.feedback_distill.RULES["<lambda>"]


def test_groups_hold_every_segment_once_a_round_and_fit_their_tokens():
    lengths = np.random.default_rng(0).integers(50, 500, 400)
    groups = train.length_groups(lengths, 2048, 150, 7)
    order = [i for group in groups for i in group]
    # Every 400 places are a round, in which each segment comes once.
    for start in range(0, len(order) - 399, 400):
        assert sorted(order[start : start + 400]) == list(range(400))
    for group in groups:
        shortest, longest = min(lengths[i] for i in group), max(lengths[i] for i in group)
        assert 0 < len(group) <= 2048 // (-(-longest // 64) * 64) and longest - shortest < 300
    again = train.length_groups(lengths, 2048, 150, 7)
    assert len(groups) == 150 and list(map(list, groups)) == list(map(list, again))


@pytest.mark.parametrize("step, copied", [(0, 3), (3, 1)])
def test_names_and_constants_weigh_more_at_first_and_what_others_wrote_less(
    step, copied, run, monkeypatch
):
    """The loss that is trained, token by token from the model's full distribution, against the one
    of the stage."""
    monkeypatch.setattr(train, "COPY_LOSS", 3.0)
    one = build_sft(run)
    source = train.Demonstrations(one)
    with torch.no_grad():
        got, expected, written, segments = (
            float(sum(source.losses(step, {}))),
            0,
            0,
            source.batches[step],
        )
        for segment in (source.segments[i] for group in segments for i in group):
            tokens, mask, *_ = train.rollout.flatten(segment)
            logp = one.model.logits(one.model(torch.tensor(tokens)[None]))[0].log_softmax(-1)
            for place, (token, own) in enumerate(zip(tokens[1:].tolist(), mask[1:])):
                word = (
                    ""
                    if token in one.tokenizer.name
                    else one.tokenizer.decode([token]).strip(" ._`")
                )
                expected -= float(logp[place, token]) * (
                    (copied if word in train.WORDS else 1) if own else 0.3
                )
                written += own
    assert abs(got - expected / written) < 1e-4


def test_demonstrations_ask_for_every_setting_of_effort_and_the_expert_heeds_it(run):
    one = build_sft(run)
    config = replace(one.config, levels="1,2,3,4", window=2048, max_turns=40)
    spent = {"low": [], "medium": [], "high": []}
    for _, played in train.make_demonstrations(
        config, one.tokenizer, None, range(240), lambda numbers, _: numbers
    ):
        setting = train.length_penalty.setting_of(played.task)
        asked = f"\nEffort: {setting}"
        assert played.task.problem_statement.endswith(asked)
        assert played.segments[0].turns[0].text.endswith(asked)
        spent[setting].append(train.length_penalty.count_effort(played)["effort"])
    low, medium, high = (np.mean(spent[name]) for name in ("low", "medium", "high"))
    assert all(len(efforts) > 50 for efforts in spent.values())
    assert low < 0.9 * medium < 0.9 * high
    # With one price nothing is said of effort.
    silent = replace(config, length_penalty="0.4")
    ((_, played),) = train.make_demonstrations(
        silent, one.tokenizer, None, [0], lambda numbers, _: numbers
    )
    assert "Effort" not in played.segments[0].turns[0].text


def test_while_the_window_is_short_every_segment_copies_a_constant(run):
    one = build_sft(run)
    one.config = replace(one.config, demos=90)
    source = train.Demonstrations(one)
    assert train.seq_len_divisor(0, one.config) == 4
    digits = {token for token in range(one.model.config.vocab) if source.constants[token]}
    copies = []
    for segment in source.segments:
        tokens, mask, *_ = train.rollout.flatten(segment)
        copies.append(any(token in digits for token, own in zip(tokens, mask) if own))
    assert 0 < sum(copies) < len(copies)
    for step in range(one.config.steps):
        drawn = [copies[i] for group in source.batches[step] for i in group]
        assert drawn and (all(drawn) or train.seq_len_divisor(step, one.config) == 1)


def test_how_well_names_and_constants_are_copied_in_held_out_tasks(run):
    """What the stage reports at its end against the model's full distribution, token by token."""
    one = build_sft(run)
    config = one.config
    got, found = train.Demonstrations(one).validate(), {"names": [], "constants": []}
    names = train.settings(config)
    for number, task in enumerate(train.eval.held_out(12, train.levels_of(config))):
        task = train.length_penalty.ask_for(task, names[number % 3])
        rollout = train.rollout.demonstrate(
            task,
            one.tokenizer,
            random.Random(task.instance_id),
            train.agent_limits(config),
            0.0,
            one.compact,
        )
        for turn, before in (
            (turn, segment.turns[:i])
            for segment in rollout.segments
            for i, turn in enumerate(segment.turns)
        ):
            past = [token for earlier in before for token in earlier.tokens]
            if turn.role == "assistant":
                logits = one.model.logits(one.model(torch.tensor([*past, *turn.tokens])[None]))[0]
                for place, token in enumerate(turn.tokens[1:], len(past)):
                    word = (
                        ""
                        if token in one.tokenizer.name
                        else one.tokenizer.decode([token]).strip(" ._`")
                    )
                    if word in train.WORDS:
                        found["constants" if word.isdigit() else "names"].append(
                            float(logits[place].softmax(-1)[token].detach())
                        )
    assert all(found.values()) and got == pytest.approx(
        {name: sum(ps) / len(ps) for name, ps in found.items()}, rel=1e-4
    )


def test_the_learning_rate_rises_stays_and_falls_to_a_tenth():
    config = train.Config(steps=100, warmup=0.1, decay=0.5)
    assert [round(train.schedule(step, config), 3) for step in (0, 9, 30, 50, 75, 99)] == [
        0.1,
        1,
        1,
        1,
        0.5,
        0.1,
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_parameter_is_in_the_optimizer_once_and_matrices_are_muons(dtype):
    r = build_pretrain(f"--dtype={dtype}")
    optimizer = r.make_optimizer()
    # A CPU without bf16 instructions does bf16 products twenty times slower than fp32 ones.
    assert optimizer.ns_dtype == getattr(torch, dtype)
    rest, matrices, outputs = (group["params"] for group in optimizer.param_groups)
    held = [id(p) for p in [*rest, *matrices, *outputs]]
    assert sorted(held) == sorted(id(p) for p in r.model.parameters())
    # Stacks of three dimensions: wq, wk, wv of two layers, and three of the experts of one layer.
    assert all(p.ndim >= 2 for p in matrices) and sum(p.ndim == 3 for p in matrices) == 2 * 3 + 3
    # The output projections, a head for each block of columns.
    assert [id(p) for p in outputs] == [id(block.attn.wo) for block in r.model.layers]
    blocks = [(g["algorithm"], g["column_blocks"]) for g in optimizer.param_groups]
    assert blocks == [("adamw", 1), ("muon", 1), ("muon", r.config.heads)]


# ---------------------------------------------------------------- flags, the log and the report


def test_a_rate_is_taken_where_an_optimizer_has_it_and_the_rate_of_each_group_is_in_the_log(
    run, tmp_path
):
    with_muon = configure([*SMALL, "--stage=rl", "--optimizer=muon", "--lr=1e-5"], "rl")
    assert with_muon.lr == 1e-5
    config = configure([*SMALL, "--stage=sft", "--steps=2"], "sft")
    for step, line in enumerate(read_log(run, "sft")):
        assert line["lr"] == pytest.approx(config.lr * train.schedule(step, config))
        assert line["adam_lr"] == pytest.approx(config.adam_lr * train.schedule(step, config))
    words = "--stage=long --optimizer=adamw --adam_lr=1e-6 --steps=1 --warmup=0 --decay=0".split()
    train.main([*SMALL, *words, f"--start_from={run}", f"--out={tmp_path}"])
    (line,) = read_log(tmp_path, "long")
    assert line["adam_lr"] == pytest.approx(1e-6) and "lr" not in line


def test_an_evaluation_without_rl_says_what_it_evaluated_and_figures_that_fail_cost_no_table(
    run, tmp_path, monkeypatch, capsys
):
    def fails(*words):
        raise ImportError("no backend")

    monkeypatch.setattr(drawing, "make_axes", fails)
    capsys.readouterr()
    train.main(
        [*SMALL, "--stage=eval", "--eval_levels=0", f"--start_from={run}", f"--out={tmp_path}"]
    )
    out = capsys.readouterr().out
    assert "no figure (ImportError: no backend)" in out
    assert (
        f"after SFT = {run}/sft; there is no {tmp_path}/rl" in out
        and "solved [95 % interval]" in out
    )
    assert list(json.loads((tmp_path / "summary.json").read_text())["policies"]) == ["after SFT"]


def stop_in_step(number, words, stage):
    """Runs a stage until a signal reaches it in that step."""
    config = configure(words, stage)
    interrupted, report = [], step_log.report
    Path(config.out).mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            step_log,
            "report",
            lambda r, bar, log, path: (
                report(r, bar, log, path),
                log["step"] == number and interrupted.append(2),
            )[0],
        )
        assert not train.train(config, interrupted)


def test_what_is_made_from_an_unfinished_stage_says_so(run, tmp_path, capsys):
    words = [*SMALL, "--stage=sft", "--steps=3", f"--start_from={run}", f"--out={tmp_path}/o"]
    stop_in_step(1, words, "sft")
    said = "unfinished: step 1 of 3"
    for more in (
        [f"--out={tmp_path}/o", f"--export={tmp_path}/x"],
        [*SMALL, "--stage=eval", "--eval_levels=0", NO_BENCH, f"--out={tmp_path}/o"],
        [*SMALL, *RL, f"--start_from={tmp_path}/o", f"--out={tmp_path}/next"],
    ):
        capsys.readouterr()
        train.main(more)
        assert said in capsys.readouterr().out
    assert list(json.loads((tmp_path / "o" / "summary.json").read_text())["policies"]) == [
        f"after SFT ({said})"
    ]
    train.main(words)
    capsys.readouterr()
    train.main([*SMALL, "--stage=eval", "--eval_levels=0", NO_BENCH, f"--out={tmp_path}/o"])
    assert "unfinished" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "lines, step, kept",
    [
        ([3, 4, 5, 6], 4, [3, 4]),
        ([1, 2, 3], 3, [1, 2, 3]),
        ([5, 6], 4, []),
        ([1, "torn", 2], 2, [1, 2]),
        ([1, 2, "torn"], 2, [1, 2]),
    ],
)
def test_a_log_is_cut_at_the_step_of_the_checkpoint_wherever_it_begins(lines, step, kept, tmp_path):
    path = tmp_path / "log.jsonl"
    texts = [f'{{"step": {n}.0}}\n' if n != "torn" else '{"step": 2, "lo\n' for n in lines]
    path.write_text("".join(texts))
    step_log.keep_lines(path, step)
    # What was kept is as it was, and nothing else stands in the folder.
    assert path.read_text() == "".join(f'{{"step": {n}.0}}\n' for n in kept)
    assert list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------- the data that a run depends on


def test_files_that_are_added_or_removed_move_no_other_between_training_and_held_out(tmp_path):
    names = [f"pack{i % 7}/module_{i}.py" for i in range(400)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    train_before, held_before = map(set, source_files.python_sources(str(tmp_path)))
    assert 8 < len(held_before) < 40 and len(train_before) + len(held_before) == 400
    (tmp_path / "a.py").write_text("# a\n")
    (tmp_path / names[3]).unlink()
    (tmp_path / "zzz.py").write_text("# z\n")
    train_after, held_after = map(set, source_files.python_sources(str(tmp_path)))
    assert not held_before & train_after and not train_before & held_after


def write_data(folder, word, number=6):
    folder.mkdir(exist_ok=True)
    for i in range(number):
        (folder / f"m{i}.py").write_text(
            "".join(f"def {word}{i}_{j}(x):\n    return x + {i * j}\n\n" for j in range(40))
        )


@pytest.mark.parametrize("stage", ["pretrain", "long"])
def test_other_data_is_refused_on_resume_and_the_log_is_left_as_it_was(
    stage, tmp_path, capsys, run
):
    write_data(tmp_path / "data", "f")
    words = [
        *(flag for flag in SMALL if not flag.startswith("--data")),
        f"--data={tmp_path}/data",
        f"--stage={stage}",
        "--steps=3",
        f"--out={tmp_path}/o",
    ] + [f"--start_from={run}"] * (stage == "long")
    stop_in_step(2, words, stage)
    log = (tmp_path / "o" / f"{stage}.jsonl").read_text()
    (tmp_path / "data" / "a.py").write_text("A = 1\n")
    assert "no longer holds the text" in refused_at_end(words, capsys)
    (tmp_path / "data" / "a.py").unlink()
    write_data(tmp_path / "data", "g")
    assert "no longer holds the text" in refused_at_end([*words, "--resume"], capsys)
    assert (tmp_path / "o" / f"{stage}.jsonl").read_text() == log
    write_data(tmp_path / "data", "f")
    train.main(words)  # with its own data it goes on
    assert (tmp_path / "o" / f"{stage}.jsonl").read_text().startswith(log)
    (tmp_path / "data" / "m0.py").write_text("B = 1\n")
    # A finished stage is not taken for one that was trained on the changed data.
    assert "no longer holds the text" in refused_at_end(words, capsys)


# ---------------------------------------------------------------- which tokens the routers count


def test_in_sft_the_routers_count_each_real_token_and_no_padding_no_spare_and_no_validation(run):
    one = build_sft(run)
    source, log = train.Demonstrations(one), {}
    one.model.train()
    gather = one.gather
    # As if another rank had nine batches: this rank adds spare ones, which must not count.
    one.gather = lambda items: gather(items) + [9] * (type(items[0]) is int)
    for loss in source.losses(0, log):
        loss.backward()
    one.gather = gather
    real = sum(len(source.segments[i]) for group in source.batches[0] for i in group)
    routers = [block.ffn.router for block in one.model.layers if hasattr(block.ffn, "router")]
    assert log["tokens"] == real and all(
        router.load.sum() == real * one.config.num_experts_per_tok for router in routers
    )
    before = [router.load.clone() for router in routers]
    source.validate()
    assert all(torch.equal(router.load, load) for router, load in zip(routers, before))


@pytest.mark.parametrize("replay", [0, 1])
def test_in_rl_the_logged_load_is_that_of_the_real_tokens_and_replay_moves_no_bias(
    replay, run, tmp_path, monkeypatch
):
    loads, balance = [], train.update_router_bias

    def note(model, *rest):
        loads.append(
            sum(
                float(block.ffn.router.load.sum())
                for block in model.layers
                if hasattr(block.ffn, "router")
            )
        )
        return balance(model, *rest)

    monkeypatch.setattr(train, "update_router_bias", note)
    train.main(
        [*SMALL, *RL, f"--router_replay={replay}", f"--start_from={run}", f"--out={tmp_path}"]
    )
    log = json.loads((tmp_path / "rl.jsonl").read_text())
    config = checkpoints.load_extra(tmp_path / "rl")["config"]
    assert (
        loads == [log["tokens"] * config["num_experts_per_tok"] * (config["layers"] - 1)]
        and log["load"] > 1
    )
    before, after = weights(run / "sft"), weights(tmp_path / "rl")
    assert all(
        torch.equal(before[name], after[name]) for name in before if name.endswith("router.bias")
    ) == bool(replay)


@pytest.mark.parametrize("experts", [2, 4, 8])
def test_with_one_expert_per_token_the_loss_still_teaches_the_router(experts):
    config = train.FLAGS.configure(
        {
            "scale": "tiny",
            "num_experts_per_tok": 1,
            "experts": experts,
            "device": "cpu",
            "stage": "pretrain",
        },
        "pretrain",
    )
    torch.manual_seed(0)
    model = fast.accelerate(train.model_config(config, 64).build_model()).train()
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.1)
    tokens = torch.randint(0, 64, (4, 33))
    (-model.logprobs(model(tokens[:, :-1]), tokens[:, 1:]).mean()).backward()
    gradient = model.layers[1].ffn.router.weight.grad.norm()
    assert gradient > 1e-3 * model.layers[1].ffn.experts.w_gate.grad.norm()
    assert train.model_config(train.Config(), 64).norm_gates


@pytest.mark.parametrize("limit", [30_000, 200])
def test_a_full_disk_ends_in_one_line_with_the_command_that_goes_on_to_the_same_bits(
    run, tmp_path, limit
):
    """Files may not grow beyond the limit from the second run on: a checkpoint fails, or already a
    line of the log."""
    flags = [*SMALL, "--stage=long", "--steps=3", "--save_every=1", f"--start_from={run}"]
    command = [sys.executable, str(Path(train.__file__)), *flags, f"--out={tmp_path / 'full'}"]

    first = run_command(command, file_limit=limit)
    assert first.returncode == 2 and "Traceback" not in first.stderr
    last = [
        line
        for line in first.stderr.replace("\r", "\n").split("\n")
        if line.startswith("train.py: ")
    ]
    assert len(last) == 1 and "Free some space, then: python train.py" in last[0]
    assert not (tmp_path / "full" / "long.part").exists()
    again = last[0].split("then: python train.py ")[1].split()
    run_command([command[0], command[1], *again], check=True)
    # In a process of its own too: the order of a sum depends on the number of threads.
    straight = [command[0], command[1], *flags, f"--out={tmp_path / 'straight'}"]
    run_command(straight, check=True)
    one, other = (
        train.eval.load_policy(tmp_path / name / "long")[0] for name in ("full", "straight")
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))
