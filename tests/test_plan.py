"""benchmarks/plan.py: its counts against hand counts, its table and its flags. That its bytes are
those that eight ranks receive is tested in test_hsdp.py, where they are counted."""

import math
from dataclasses import replace

import pytest
import torch

from refusals import refuse
from small import EVEN_SIZES
import hsdp
import train
from benchmarks import plan
from fast import gpu_memory
from hsdp import Layout
from moe import Model, ModelConfig
from published.export import write_checkpoint

SHAPE = ModelConfig(**EVEN_SIZES)


def refused(flags, capsys):
    """-> the one line that says why; the exit code is 2"""
    error = refuse(plan.main, flags, capsys)
    assert error.startswith("benchmarks.plan: ")
    return error


def test_kimi_has_a_trillion_parameters_and_its_newton_schulz_is_the_hand_count():
    config, shapes = plan.find_model("kimi-k2.5")
    numbers = sum(torch.Size(s).numel() for s in shapes.values())
    assert 1.02e12 < numbers < 1.05e12
    only = {n: s for n, s in shapes.items() if hsdp.is_expert(n)}
    one = plan.optimizer_step(
        only, Layout(512, 2, 8), gpu_memory.Step(), plan.Hardware(tflops=1e3, share=1)
    )
    by_hand = 60 * 384 * 3 * 5 * (4 * 2048**2 * 7168 + 2 * 2048**3)
    assert one["Newton-Schulz"] == pytest.approx(by_hand / 512 / 1e15) and by_hand == pytest.approx(
        47.5e15, rel=0.01
    )
    # The output projections per head: 64 blocks of 7168 x 128 in each of 61 layers.
    outputs = {n: s for n, s in shapes.items() if n.endswith("attn.wo")}
    of_outputs = plan.optimizer_step(
        outputs, Layout(512, 2, 8), gpu_memory.Step(), plan.Hardware(tflops=1e3, share=1), 64
    )
    by_hand = 61 * 64 * 5 * (4 * 128**2 * 7168 + 2 * 128**3)
    assert of_outputs["Newton-Schulz"] == pytest.approx(by_hand / 512 / 1e15)
    # The units of the experts travel there and back in bf16: 7.9 GB for one rank.
    assert one["units on the wire"] * 50e9 == pytest.approx(7.9e9, rel=0.01)


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_a_named_scale_is_the_model_that_train_py_makes_of_it(scale):
    config = train.FLAGS.configure({"scale": scale, "device": "cpu"}, "pretrain")
    made = vars(train.model_config(config, plan.MODELS[scale]["vocab"]))
    named = vars(ModelConfig(**plan.MODELS[scale]))
    # The plan needs no window.
    assert {**named, "context": made["context"]} == made and config.vocab == named["vocab"]


def test_the_plan_prints_its_assumptions_and_both_meshes(capsys):
    plan.main(["--model=moonlight", "--gpus=64", "--net=25"])
    text = capsys.readouterr().out
    assert (
        "--net=25" in text
        and "--share=" in text
        and "shared mesh need 16 GPUs; on two meshes 8." in text
    )
    assert "dense mesh (replicate, shard)" in text and text.count("(8, 8)") == 3 and "0.2 s" in text


def test_the_plan_of_weights_kept_in_bf16_takes_less_and_says_how(capsys):
    flags = ["--model=moonlight", "--gpus=1", "--cp=1", "--ep=1", "--memory=180"]
    plan.main(flags)
    assert "fits in neither" in capsys.readouterr().out
    plan.main([*flags, "--kept=2"])
    text = capsys.readouterr().out
    # one GPU gathers nothing
    assert (
        "--micro_tokens=8192 --recompute --weight_dtype=bfloat16" in text and "gathered" not in text
    )


def test_the_plan_of_a_published_folder_names_the_command_that_fits(tmp_path, capsys):
    write_checkpoint(tmp_path / "moe", Model(SHAPE))
    plan.main([f"--init_from={tmp_path}/moe", "--gpus=4"])
    assert (
        f"train.py --init_from={tmp_path}/moe --stage=sft --cp=1 --ep=4 --dp_replicate=1"
        in capsys.readouterr().out
    )
    write_checkpoint(tmp_path / "dense", Model(replace(SHAPE, dense_layers=2)))
    plan.main([f"--init_from={tmp_path}/dense", "--gpus=1", "--tokens=100000"])
    assert (
        f"--nproc_per_node=1 train.py --init_from={tmp_path}/dense --stage=sft --cp=1 --ep=1"
        in capsys.readouterr().out
    )
    plan.main([f"--init_from={tmp_path}/dense", "--gpus=1", "--tokens=100000", "--memory=0.1"])
    assert "fits in neither layout on 1 GPUs of 0.1 GB" in capsys.readouterr().out
    assert "config.json" in refused([f"--init_from={tmp_path}"], capsys)


def test_a_layout_that_cuts_nothing_is_none_of_the_choices(capsys):
    plan.main("--model=moonlight --gpus=8 --node=1 --cp=1 --ep=1 --tokens=2048".split())
    text = capsys.readouterr().out
    assert "narrow" not in text and "--dp_replicate=1 " in text


def test_a_context_that_is_wider_than_a_node_is_planned_over_all_gpus_alone(capsys):
    plan.main("--model=gpu --gpus=16 --cp=16 --ep=8".split())
    out = capsys.readouterr().out
    assert "all wide" in out and "dense narrow" not in out


def test_the_elementwise_bytes_of_an_optimizer_step_are_those_of_its_dtypes():
    config, shapes = plan.find_model("laptop")
    hardware, numbers = plan.Hardware(), sum(map(math.prod, shapes.values()))
    for kept, unit, size in ((4, 2, 24), (2, 2, 20), (4, 4, 28)):
        step = plan.Step(kept=kept, unit=unit)
        found = plan.optimizer_step(shapes, plan.Layout(1, 1, 1), step, hardware)["elementwise"]
        assert found == pytest.approx(size * numbers / (hardware.hbm * 1e9))


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--model=kimi", "unknown model"),
        ("--gpus=12", "12 are no whole nodes of --node=8"),
        ("--gpus=4", "does not divide"),
        ("--gpu=8", "--gpu=8"),
        ("--gpus=x", "invalid int"),
        ("--ep=7 --gpus=56", "ep=7 does not divide the 384 experts"),
        ("--cp=0", "cp=0"),
        ("--hbm=0", "positive"),
    ],
)
def test_bad_flags_are_one_clear_line(flags, message, capsys):
    assert message in refused(flags.split(), capsys)


def test_a_file_that_cannot_be_read_ends_in_one_line_and_code_2(tmp_path, capsys):
    # On Linux reading this file fails with EIO; elsewhere the target does not exist.
    (tmp_path / "config.json").symlink_to("/proc/self/mem")
    assert f"{tmp_path}/config.json: " in refused([f"--init_from={tmp_path}"], capsys)
