"""The policies in assets/: of the present configuration, small, and good for all that the README
does with them"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import conftest
import eval
import train
from benchmarks.gpu_equality import make_optimizer
from command import checkpoints
from commands import run_command
from fast.samplers import make_sampler
from small import SIZES
from moe import ModelConfig
from published.safetensors import open_safetensors

ROOT = Path(train.__file__).parent
# What differs from machine to machine, or from command to command.
MACHINE = {"out", "start_from", "resume", "device", "dtype", "processes", "dp_replicate", "seed"}


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_a_policy_is_of_the_present_configuration_and_small(stage):
    folder = ROOT / "assets" / stage
    extra = checkpoints.load_extra(folder)
    config = train.FLAGS.configure({"scale": "laptop", "stage": stage}, stage)
    for name, value in asdict(config).items():
        if name not in MACHINE:
            assert extra["config"][name] == value, name
    shape = asdict(train.model_config(config, config.vocab))
    found = {name: extra["model"][name] for name in shape if name in extra["model"]}
    assert found == {**shape, "yarn_factor": config.yarn}
    assert extra["commit"] and not checkpoints.unfinished_label(folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5e6


def test_a_policy_samples_with_the_weights_that_it_was_kept_with():
    """Nothing is rounded again on the way into the sampler."""
    model, tokenizer, config = eval.load_policy(ROOT / "assets" / "rl")
    sampler = make_sampler(model.config, torch.bfloat16, "cpu", tokenizer, 100)
    sampler.model.load_state_dict(model.state_dict())
    stored = open_safetensors(ROOT / "assets" / "rl" / "model.safetensors")
    assert stored.keys() == sampler.model.state_dict().keys()
    for name, tensor in sampler.model.state_dict().items():
        assert tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name]), name
    assert {t.dtype for t in stored.values()} == {torch.bfloat16, torch.float32}


def keep_small(folder):
    torch.manual_seed(0)
    model = ModelConfig(**SIZES).build_model()
    checkpoints.save_policy(folder, model.state_dict(), {"model": asdict(model.config)})
    return model


def load_on_rank(rank, world, folder):
    from hsdp import make_meshes, parallelize

    torch.manual_seed(1)
    model = parallelize(ModelConfig(**SIZES).build_model(), make_meshes(world))
    checkpoints.load_checkpoint(folder, model)
    whole = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    return {name: whole(t) for name, t in model.state_dict().items()}


def test_a_policy_comes_back_and_a_damaged_one_does_not(tmp_path):
    model = keep_small(tmp_path / "kept")
    found, extra = checkpoints.load_model(tmp_path / "kept")
    assert extra["model"] == asdict(model.config)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name])

    # Cut over two ranks, too.
    for state in conftest.run_ranks(2, load_on_rank, tmp_path / "kept"):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())

    # No stage goes on with it: it has no optimizer.
    optimizer = make_optimizer(model, torch.float32)
    with pytest.raises(ValueError, match="missing there"):
        checkpoints.load_checkpoint(tmp_path / "kept", model, optimizer)

    path = tmp_path / "kept" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(checkpoints.DamagedCheckpoint, match="other bytes than were written"):
        checkpoints.load_model(tmp_path / "kept")


def test_a_change_is_seen_in_a_step_of_rl_from_the_policy_at_hand(tmp_path):
    words = "--stage=rl --steps=1 --tasks_per_step=2 --group_size=2 --max_turns=4 --processes=2"
    done = run_command(
        [
            sys.executable,
            "train.py",
            *words.split(),
            "--start_from=assets/sft",
            f"--out={tmp_path}",
        ],
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "rl.jsonl").read_text().splitlines()
    assert json.loads(line)["turns"] > 1
    assert checkpoints.load_extra(tmp_path / "rl")["origin"]["path"] == str(ROOT / "assets" / "sft")


def test_a_trained_agent_is_shown_at_work(tmp_path):
    done = run_command([sys.executable, str(ROOT / "rollout.py"), "--effort=high"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Effort: high" in done.stdout and "solved yes" in done.stdout
    group = done.stdout[done.stdout.index("advantage\n") :].splitlines()[1:7]
    gains = [float(line.split()[-1]) for line in group]
    assert any(gains) and abs(sum(gains)) < 0.05
