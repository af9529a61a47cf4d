"""What train.py says of a GPU, told by a card that is not there: too many processes for it, too
little memory, no bf16."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hsdp
import moe
import train
from command import hardware
from fast import gpu_memory

SMALL = [
    *"--scale=tiny --vocab=320 --dim=32 --context=64 --batch_tokens=512".split(),
    *"--micro_tokens=256 --processes=1 --dtype=float32 --device=cpu".split(),
    f"--data={Path(json.__file__).parent}",
]


@pytest.fixture
def card(monkeypatch):
    """place(gigabytes, bf16): as if such a card were the only one here"""

    def place(gigabytes=80.0, bf16=True, number=1):
        properties = SimpleNamespace(name="Test Card", total_memory=int(gigabytes * 1e9))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *which: properties)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **how: bf16)

    return place


def end_of(arguments, capsys):
    """-> exit code and the lines on stderr of train.py"""
    with pytest.raises(SystemExit) as end:
        train.main(arguments)
    return end.value.code, capsys.readouterr().err.strip().split("\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_more_processes_than_cards_are_refused_before_anything_is_touched(
    rank, card, monkeypatch, capsys, tmp_path
):
    card(number=1)
    for name, value in dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2).items():
        monkeypatch.setenv(name, str(value))
    code, lines = end_of(["--stage=pretrain", f"--out={tmp_path}/out"], capsys)
    assert code == 2 and not (tmp_path / "out").exists()
    said = "2 processes on a machine with 1 GPU: one each, so start --nproc_per_node=1, or add --device=cpu"
    assert lines == ([f"train.py: {said}"] if rank == 0 else [""])


def test_as_many_processes_as_cards_and_any_number_on_the_cpu_are_not_refused(card, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    card(number=2)
    hsdp.check_cards()
    card(number=1)
    assert not hardware.uses_card({"device": "cpu"})
    with pytest.raises(ValueError, match="2 processes on a machine with 1 GPU"):
        hsdp.check_cards()


def test_a_full_card_ends_in_one_line_that_says_how_to_go_on_and_so_it_goes_on(
    monkeypatch, capsys, tmp_path
):
    words = [*SMALL, "--stage=pretrain", "--steps=6", "--save_every=1", f"--out={tmp_path}"]
    forward, calls = moe.Model.forward, []

    def forward_until_full(model, *inputs, **more):
        calls.append(1)
        if len(calls) > 6:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 15 GiB.\nmore"
            )
        return forward(model, *inputs, **more)

    monkeypatch.setattr(moe.Model, "forward", forward_until_full)
    code, lines = end_of(words, capsys)
    line = next(line for line in lines if line.startswith("train.py:"))
    assert code == 2 and not any("Traceback" in line for line in lines)
    assert (
        "Tried to allocate 2.50 GiB" in line and "--micro_tokens=128 --recompute --resume" in line
    )
    monkeypatch.setattr(moe.Model, "forward", forward)
    train.main([*words, "--micro_tokens=128", "--recompute", "--resume"])
    steps = [
        json.loads(text)["step"]
        for text in (tmp_path / "pretrain.jsonl").read_text().split("\n")
        if text
    ]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_card_without_bf16_computes_in_float32_and_refuses_to_be_told_otherwise(
    card, capsys, tmp_path
):
    card(bf16=False)
    assert hardware.fast_dtype("cuda") == torch.float32
    assert hardware.dtype_of(train.FLAGS.configure({}, "pretrain")) == torch.float32
    code, lines = end_of(["--dtype=bfloat16", f"--out={tmp_path}"], capsys)
    assert code == 2 and lines == [
        "train.py: --dtype=bfloat16: Test Card has no bf16 (compute capability 8.0 has): leave the flag "
        "away, for float32"
    ]


@pytest.mark.parametrize(
    "gigabytes, scale, tokens",
    [
        (2, "laptop", 4096),
        (8, "gpu", 8192),
        (16, "gpu", 16384),
        (24, "gpu", 32768),
        (40, "gpu", 32768),
        (80, "gpu", 32768),
        (141, "gpu", 32768),
    ],
)
def test_auto_takes_the_size_that_the_card_carries(gigabytes, scale, tokens, card):
    card(gigabytes)
    config = train.FLAGS.configure({}, "pretrain")
    assert (config.scale, config.micro_tokens) == (scale, tokens)
    # What was given by hand stays as it is.
    assert train.FLAGS.configure({"micro_tokens": 512}, "pretrain").micro_tokens == 512
    assert train.FLAGS.configure({"scale": "laptop"}, "pretrain").scale == "laptop"


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_the_scales_that_are_planned_and_measured_are_those_of_the_recipe(scale):
    """All fields but those that a planner does not read: how the gates and the layers are run."""
    planned = {"laptop": gpu_memory.LAPTOP_SCALE, "gpu": gpu_memory.GPU_SCALE}[scale]
    config = train.FLAGS.configure({"scale": scale}, "pretrain")
    recipe, planned = train.model_config(config, config.vocab), moe.ModelConfig(**planned)
    for name in "vocab dim layers heads kv_lora qk_nope qk_rope v_dim dense_ffn experts".split():
        assert getattr(planned, name) == getattr(recipe, name), name
    for name in ("expert_ffn", "num_experts_per_tok", "shared", "rope_theta"):
        assert getattr(planned, name) == getattr(recipe, name), name


def test_the_docstring_of_the_largest_micro_batch_says_what_it_returns():
    config, shapes = gpu_memory.gpu_scale()
    said = " ".join(gpu_memory.largest_micro_batch.__doc__.split())
    for gigabytes, most, tokens, planned in (
        (24, 1 << 16, 32768, 13.0),
        (80, 1 << 16, 65536, 24.1),
        (141, 1 << 16, 65536, 24.1),
        (40, 1 << 15, 32768, 13.0),
        (16, 1 << 16, 16384, 7.5),
        (8, 1 << 16, 8192, 4.7),
    ):
        found = gpu_memory.largest_micro_batch(config, shapes, gigabytes, most)
        assert found == tokens
        assert abs(gpu_memory.planned_gigabytes(config, shapes, found) - planned) < 0.05
        assert f"{tokens:,}" in said and f"{planned:.1f} GB" in said
    assert gpu_memory.largest_micro_batch(config, shapes, 1, 1 << 15) == 0
