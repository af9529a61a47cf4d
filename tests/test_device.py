"""The device against the CPU: python -m pytest -m device, on one GPU.

Without a GPU the same tests compare the CPU with itself, which shows only that they run. They are
run in a process of their own, since the other tests fork ranks and must not see a card. In float32
without TF32 the two may differ by rounding alone."""

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
import fast
import hsdp
import moe
import muon
import rollout
from fast import low_precision
from published.grouped_query import config_of

ROOT = Path(moe.__file__).parent
SIZES = dict(
    vocab=512,
    dim=128,
    layers=3,
    heads=4,
    kv_lora=64,
    qk_nope=32,
    qk_rope=16,
    v_dim=32,
    experts=8,
    active=2,
    expert_ffn=128,
    dense_ffn=256,
    context=256,
)
KINDS = {
    "mla": {},
    "gqa, qk norm, softmax routing": dict(attention="gqa", qk_norm=True, scoring="softmax"),
    "gqa, bias, dense": dict(attention="gqa", qkv_bias=True, dense_layers=3),
    "groups of experts": dict(n_group=4, topk_group=2),
}


@pytest.fixture(scope="module")
def device(request):
    asked = request.config.getoption("--device")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and found == "cpu":
        pytest.skip("there is no GPU here")
    return found if asked == "auto" else asked


def build(where, dtype=torch.float32, **more):
    """The same weights wherever they lie"""
    torch.manual_seed(1)
    model = fast.accelerate(config_of({**SIZES, **more}).build_model())
    for p in model.parameters():
        if p.ndim > 1 and not p.any():
            # a matrix that starts at zero hides what is behind it
            torch.nn.init.normal_(p, std=0.02)
    return model.compute(dtype).to(where)


def some_tokens(rows=4, length=200):
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(2))


def difference(a, b):
    """|a - b| / |b|, on the CPU in fp64"""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def gradients(model, tokens):
    """-> hidden states, log-probs and all gradients of a mean cross-entropy"""
    tokens = tokens.to(model.embed.weight.device)
    hidden = model.train()(tokens[:, :-1])
    logprobs = model.logprobs(hidden, tokens[:, 1:])
    (-logprobs.mean()).backward()
    return (
        hidden,
        logprobs,
        torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]),
    )


@pytest.mark.device
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_logprobs_and_gradients_are_the_cpus(kind, device):
    expected, found = (
        gradients(build(where, **KINDS[kind]), some_tokens()) for where in ("cpu", device)
    )
    for name, limit, a, b in zip(
        ("hidden", "log-probs", "gradients"), (1e-5, 1e-5, 1e-4), found, expected
    ):
        assert difference(a, b) <= limit, name


@pytest.mark.device
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-4), (torch.bfloat16, 0.06)])
@torch.inference_mode()
def test_prefill_and_decoding_are_one_forward(dtype, limit, device):
    model, tokens = build(device, dtype).eval(), some_tokens().to(device)
    whole = model.logits(model(tokens))
    cache, rows = moe.Cache(model, 4, 260), slice(0, 4)
    model.prefill([row[:150].tolist() for row in tokens], cache, [0, 1, 2, 3], [0] * 4)
    found = [
        model.logits(model.decode(tokens[:, i : i + 1], cache, rows, [i] * 4))
        for i in range(150, 170)
    ]
    assert difference(torch.cat(found, 1), whole[:, 150:170]) <= limit


@pytest.mark.device
@pytest.mark.parametrize("shape", [(64, 64), (5, 48, 96), (3, 130, 33), (2, 7, 9)])
def test_orthogonalize_is_the_cpus(shape, device):
    G = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    expected = muon.orthogonalize(G, dtype=torch.float32)
    assert difference(muon.orthogonalize(G.to(device), dtype=torch.float32), expected) <= 1e-4


@pytest.mark.device
def test_five_steps_of_muon_and_adamw_are_the_cpus(device):
    start = torch.cat([p.detach().flatten() for p in build("cpu").parameters()])
    moved = []
    for where in ("cpu", device):
        model = build(where)
        plain = [
            (n, p)
            for n, p in model.named_parameters()
            if p.ndim < 2 or any(w in n for w in ("embed", "head", "router"))
        ]
        matrices = [(n, p) for n, p in model.named_parameters() if n not in dict(plain)]
        optimizer = muon.Muon(
            [
                dict(params=plain, algorithm="adamw", lr=1e-3),
                dict(params=matrices, algorithm="muon", lr=1e-2),
            ],
            ns_dtype=torch.float32,
        )
        generator = torch.Generator().manual_seed(9)
        for _ in range(5):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(where)
            optimizer.step()
        moved.append(torch.cat([p.detach().cpu().flatten() for p in model.parameters()]) - start)
    assert difference(moved[1], moved[0]) <= 1e-4


@pytest.mark.device
@pytest.mark.parametrize("quantise", [low_precision.mxfp8, low_precision.nvfp4])
def test_small_formats_have_the_bits_of_the_cpu(quantise, device):
    x = (
        torch.randn(64, 256, generator=torch.Generator().manual_seed(6))
        * torch.logspace(-6, 6, 64)[:, None]
    )
    assert torch.equal(quantise(x.to(device)).cpu(), quantise(x))


@pytest.mark.device
@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_experts_in_hardware_are_those_of_the_emulation(precision, device, monkeypatch):
    if not low_precision.scales_in_hardware(torch.device(device)):
        pytest.skip(
            "the tensor cores here do not multiply small formats: compute capability 10 does"
        )
    torch.manual_seed(9)
    experts, counts = fast.accelerate(moe.Experts(3, 64, 32, precision)).to(device), torch.tensor(
        [3, 0, 140], device=device
    )
    torch.nn.init.normal_(experts.w_down)
    x = torch.randn(143, 64, device=device)
    found = []
    for real in (False, True):
        monkeypatch.setattr(low_precision, "scales_in_hardware", lambda where, real=real: real)
        found.append(experts(x, counts))
    assert difference(found[1], found[0]) <= 0.03


@pytest.mark.device
def test_what_is_sampled_and_the_divergences_are_the_cpus(device):
    generator = torch.Generator().manual_seed(7)
    logits, uniform = torch.randn(64, 512, generator=generator) * 3, torch.rand(
        64, generator=generator
    )
    expected, found = (
        rollout.choose(logits.to(where), uniform.to(where), 0.95) for where in ("cpu", device)
    )
    assert torch.equal(found[0].cpu(), expected[0]) and difference(found[1], expected[1]) <= 1e-5
    other = torch.randn(64, 512, generator=generator)
    for kind in ("forward", "reverse", "jsd"):
        a, b = (
            feedback_distill.divergence(logits.to(where), other.to(where), kind)
            for where in (device, "cpu")
        )
        assert difference(a, b) <= 1e-5, kind


@pytest.mark.device
def test_a_training_step_has_the_same_bits_every_time(device):
    one, two = (gradients(build(device, torch.bfloat16), some_tokens()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two))


@pytest.mark.device
def test_a_checkpoint_of_the_device_is_read_on_the_cpu_and_back(device, tmp_path):
    model = build(device)
    hsdp.save(tmp_path / "made", model)
    elsewhere = build("cpu", layers=3)
    for p in elsewhere.parameters():
        torch.nn.init.zeros_(p)
    hsdp.load(tmp_path / "made", elsewhere)
    assert all(torch.equal(p, q.cpu()) for p, q in zip(elsewhere.parameters(), model.parameters()))
    hsdp.save(tmp_path / "again", elsewhere)
    hsdp.load(tmp_path / "again", model)
    assert all(torch.equal(p, q.cpu()) for p, q in zip(elsewhere.parameters(), model.parameters()))


def train_command(out, device, *more):
    # Small files alone: the tokenizer and the window are what the test does not look at.
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


def test_the_tests_of_the_device_pass_in_a_process_of_their_own():
    environment = {
        name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"
    }
    if conftest.VISIBLE_CARDS is not None:
        environment["CUDA_VISIBLE_DEVICES"] = conftest.VISIBLE_CARDS
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "device",
        "-p",
        "no:cacheprovider",
        __file__,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
