"""The device against the CPU: python -m pytest -m device, on one GPU.

Without a GPU the same tests compare the CPU with itself, which shows only that they run. Where there
is one they are run in a process of their own, since the other tests fork ranks and must not see a
card. In float32 without TF32 the two may differ by rounding alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import conftest
import feedback_distill
import moe
import muon
from rollout import sample_from_logits
from benchmarks.gpu_bench import relative_error
from benchmarks.gpu_equality import build_small_model, count_different, list_checks
from command import checkpoints
from fast.gram_newton_schulz import gram_newton_schulz
from fast.low_precision import FORMATS

ROOT = Path(moe.__file__).parent


@pytest.fixture(scope="module")
def device(request):
    asked = request.config.getoption("--device")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and found == "cpu":
        pytest.skip("there is no GPU here")
    return found if asked == "auto" else asked


@pytest.mark.device
@pytest.mark.parametrize("what", list_checks())
def test_what_is_computed_twice_is_equal(what, device):
    """The checks of the part `equality` of benchmarks.gpu"""
    limit, measure = list_checks()[what]
    assert measure(device) <= limit


def orthogonalize_fast(gradient, dtype):
    """With the iteration that train.py uses"""
    return muon.orthogonalize(gradient, dtype=dtype, iterate=gram_newton_schulz)


def orthogonalize_error(device, dtype):
    worst = 0.0
    for shape in ((64, 64), (5, 48, 96), (3, 130, 33), (2, 7, 9)):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        expected = orthogonalize_fast(gradient, torch.float32)
        worst = max(worst, relative_error(orthogonalize_fast(gradient.to(device), dtype), expected))
    return worst


def quantization_differences(device, name):
    # Rows of very different sizes: each block has a scale of its own.
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(6))
    x = x * torch.logspace(-6, 6, 64)[:, None]
    return count_different(FORMATS[name](x.to(device)), FORMATS[name](x))


def sampling_differences(device):
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(64, 512, generator=generator) * 3
    uniform = torch.rand(64, generator=generator)
    found = sample_from_logits(logits.to(device), uniform.to(device), 0.95)[0]
    return count_different(found, sample_from_logits(logits, uniform, 0.95)[0])


def divergence_error(device, kind):
    generator = torch.Generator().manual_seed(8)
    student, teacher = (torch.randn(32, 512, generator=generator) for _ in range(2))
    found = feedback_distill.divergence(student.to(device), teacher.to(device), kind)
    return relative_error(found, feedback_distill.divergence(student, teacher, kind))


@pytest.mark.device
def test_orthogonalize_is_the_cpus(device):
    assert orthogonalize_error(device, torch.float32) <= 1e-4
    assert orthogonalize_error(device, torch.bfloat16) <= 0.06


@pytest.mark.device
@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_small_formats_have_the_bits_of_the_cpu(precision, device):
    assert quantization_differences(device, precision) == 0


@pytest.mark.device
def test_what_is_sampled_and_the_divergences_are_the_cpus(device):
    assert sampling_differences(device) == 0
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(64, 512, generator=generator) * 3
    uniform = torch.rand(64, generator=generator)
    expected, found = (
        sample_from_logits(logits.to(where), uniform.to(where), 0.95)[1]
        for where in ("cpu", device)
    )
    assert relative_error(found, expected) <= 1e-5
    for kind in ("forward", "reverse", "jsd"):
        assert divergence_error(device, kind) <= 1e-5, kind


@pytest.mark.device
def test_a_checkpoint_of_the_device_is_read_on_the_cpu_and_back(device, tmp_path):
    model = build_small_model(device)
    checkpoints.save_checkpoint(tmp_path / "made", model)
    elsewhere = build_small_model("cpu")
    for p in elsewhere.parameters():
        torch.nn.init.zeros_(p)
    checkpoints.load_checkpoint(tmp_path / "made", elsewhere)
    assert all(torch.equal(p, q.cpu()) for p, q in zip(elsewhere.parameters(), model.parameters()))
    checkpoints.save_checkpoint(tmp_path / "again", elsewhere)
    checkpoints.load_checkpoint(tmp_path / "again", model)
    assert all(torch.equal(p, q.cpu()) for p, q in zip(elsewhere.parameters(), model.parameters()))


def train_command(out, device, *more):
    # Few files and a small vocabulary, since the test is not about the tokenizer or the window.
    return [
        sys.executable,
        str(ROOT / "train.py"),
        "--scale=tiny",
        "--stage=pretrain",
        f"--out={out}",
        f"--device={device}",
        "--processes=1",
        "--vocab=320",
        f"--data={Path(json.__file__).parent}",
        *more,
    ]


def losses(out, stage="pretrain"):
    return [
        json.loads(line)["loss"] for line in (Path(out) / f"{stage}.jsonl").read_text().splitlines()
    ]


@pytest.mark.device
def test_a_run_that_was_killed_goes_on_to_the_same_losses(device, tmp_path):
    if device == "cpu":
        pytest.skip("test_train.py kills a run on the CPU")
    words = ["--steps=30", "--save_every=5"]
    subprocess.run(
        train_command(tmp_path / "whole", device, *words), check=True, capture_output=True
    )
    child = subprocess.Popen(
        train_command(tmp_path / "cut", device, *words),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    log, deadline = tmp_path / "cut" / "pretrain.jsonl", time.monotonic() + 120
    while (
        not (log.exists() and log.read_text().count("\n") >= 12)
        and child.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    subprocess.run(
        train_command(tmp_path / "cut", device, *words, "--resume"), check=True, capture_output=True
    )
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.device
def test_compiled_blocks_stay_compiled_and_warn_of_nothing(device, tmp_path):
    if device == "cpu":
        pytest.skip("compiling on a CPU takes longer than this test may")
    for stage in ("pretrain", "long"):
        words = ["--compile=1", "--steps=12", "--layers=10", f"--stage={stage}"]
        done = subprocess.run(
            train_command(tmp_path, device, *words), capture_output=True, text=True
        )
        assert (
            done.returncode == 0
            and "recompile_limit" not in done.stderr
            and "Warning" not in done.stderr
        ), done.stderr[-2000:]


@pytest.mark.skipif(not conftest.HAS_CARD, reason="there is no GPU here")
def test_the_tests_of_the_device_pass_in_a_process_of_their_own():
    environment = {n: value for n, value in os.environ.items() if n != "CUDA_VISIBLE_DEVICES"}
    if conftest.VISIBLE_CARDS is not None:
        environment["CUDA_VISIBLE_DEVICES"] = conftest.VISIBLE_CARDS
    command = [sys.executable, *"-m pytest -q -m device -p no:cacheprovider".split(), __file__]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
