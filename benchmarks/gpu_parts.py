"""benchmarks/gpu_parts.py: what benchmarks/gpu.py measures. Each part below runs in a process of its own.

A part appends its rows to a file as soon as it has them. A row belongs to a table and has any columns; a row with `holds` is
a check. One measurement that fails leaves its traceback as a row, and the next one goes on.

What the numbers mean:
    floor       the least time the device needs: products at its measured speed plus bytes at its measured copy speed
    MFU         model FLOPs per second / the measured bf16 product (not the data sheet). FLOPs of a trained token:
                6 per active parameter without the embedding, which multiplies nothing, and for attention
                6 * layers * heads * (qk_nope + qk_rope + v_dim) * T / 2, where the half is for causality
"""
import argparse
import gc
import importlib.util
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

import feedback_distill
import hsdp
import moe
import muon
import rollout
import synth_tasks
import train
from benchmarks.gpu import ROOT, last_lines, read_rows


class Bench:
    """Where a part runs and where its rows go."""

    def __init__(self, arguments):
        self.device, self.tiny = arguments.device, arguments.device == "cpu"
        self.rows, self.scratch = Path(arguments.rows), Path(arguments.scratch)
        self.deadline = time.monotonic() + arguments.seconds
        # The part `card` measured the ceilings; a part that is run without it reports no share of them.
        report = json.loads(Path(arguments.report).read_text()) if Path(arguments.report).exists() else {"parts": {}}
        card = {row["what"]: row["value"] for row in report["parts"].get("card", {}).get("rows", []) if "value" in row}
        self.peak_flops = card.get(PRODUCT, math.nan) * 1e12
        self.bandwidth = card.get(COPY, math.nan) * 1e12

    def emit(self, table, **columns):
        with open(self.rows, "a", encoding="utf-8") as file:
            file.write(json.dumps({"table": table, **columns}) + "\n")

    def attempt(self, table, what, measure):
        """measure() -> the columns of one row. An exception becomes a row of its own: the part goes on."""
        try:
            self.emit(table, what=what, **measure())
        except Exception as error:
            self.emit(table, what=what, found=f"{type(error).__name__}", holds=False, traceback=traceback.format_exc())
        gc.collect()

    def check(self, table, what, limit, measure):
        """measure() -> a number that must be at most `limit`; what is not a number does not hold."""
        def compare():
            found = float(measure())
            return {"found": found, "limit": limit, "holds": found <= limit}
        self.attempt(table, what, compare)

    def seconds_left(self):
        return self.deadline - time.monotonic()

    def time(self, call, repeat=10, warmup=2):
        """Median seconds of a call, up to the moment when the device has finished it."""
        repeat, warmup = (2, 1) if self.tiny else (repeat, warmup)
        times = []
        for i in range(warmup + repeat):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[warmup:])

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()


# ---------------------------------------------------------------- card

PRODUCT = "bf16 product, TFLOP/s"
COPY = "copy, bytes read and written, TB/s"


def measure_card(bench):
    def emit(what, value):
        bench.emit("card", what=what, value=value)

    emit("device", torch.cuda.get_device_name() if bench.device == "cuda" else "CPU")
    if bench.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        emit("memory, GB", properties.total_memory / 1e9)
        emit("compute capability", f"{properties.major}.{properties.minor}")
        emit("CUDA of torch", str(torch.version.cuda))
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True).stdout if shutil.which("nvidia-smi") else ""
        emit("driver", found.strip().split("\n")[0] or "unknown: nvidia-smi is not here")
    emit("CPU cores", len(os.sched_getaffinity(0)))

    n = 256 if bench.tiny else 8192
    a = torch.randn(n, n, device=bench.device, dtype=torch.bfloat16)
    emit(PRODUCT, 2 * n ** 3 / bench.time(lambda: a @ a) / 1e12)
    source = torch.zeros(1 << (20 if bench.tiny else 31), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    emit(COPY, 2 * source.numel() / bench.time(lambda: target.copy_(source)) / 1e12)


# ---------------------------------------------------------------- equality

# Limits: about thirty times what an H100 showed in fp32; bf16 has 8 bits, so that two orders of summation differ by percents.
FP32, BF16 = 1e-5, 0.06
ARCHITECTURES = {
    "MLA": dict(),
    "MLA, 600 tokens": dict(context=600),
    "GQA with query and key norm": dict(attention="gqa", qk_norm=True),
    "groups of experts": dict(n_group=4, topk_group=2),
    "softmax routing": dict(scoring="softmax"),
    "dense with bias": dict(attention="gqa", qkv_bias=True, dense_layers=3),
}


def relative_error(found, expected):
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def count_different(found, expected):
    return int((found.cpu() != expected.cpu()).sum())


def build_small_model(device, dtype=torch.float32, **changes):
    """Equal weights on every device: they are drawn on the CPU."""
    torch.manual_seed(1)
    sizes = dict(vocab=512, dim=128, layers=3, heads=4, kv_lora=64, qk_nope=32, qk_rope=16, v_dim=32, experts=8, active=2,
                 expert_ffn=128, dense_ffn=256, context=256)
    model = moe.Model(moe.ModelConfig(**{**sizes, **changes}))
    # The head begins as zeros, and zeros are equal everywhere.
    for p in model.parameters():
        if p.ndim > 1 and not p.any():
            torch.nn.init.normal_(p, std=0.02)
    return model.compute(dtype).to(device)


def draw_tokens(rows, length, seed=2):
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(seed))


def run_backward(device, dtype, **changes):
    """-> hidden states, log-probs and the gradient of all parameters in one row"""
    model = build_small_model(device, dtype, **changes).train()
    tokens = draw_tokens(2, 600) if changes.get("context") == 600 else draw_tokens(4, 200)
    tokens = tokens.to(device)
    hidden = model(tokens[:, :-1])
    logprobs = model.logprobs(hidden, tokens[:, 1:])
    (-logprobs.mean()).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return hidden.detach(), logprobs.detach(), gradient


@torch.inference_mode()
def decoding_error(device, dtype):
    """A prompt of 150 tokens by prefill, then 50 tokens one by one from the cache, against one forward of all 200"""
    model = build_small_model(device, dtype).eval()
    sampler_model = rollout.generation_model(model.config, dtype, device)
    sampler_model.load_state_dict(model.state_dict())
    tokens = draw_tokens(4, 200).to(device)
    cache = moe.Cache(sampler_model, 4, 260)
    sampler_model.prefill([row[:150].tolist() for row in tokens], cache, [0, 1, 2, 3], [0] * 4)
    logits = []
    for i in range(150, 200):
        start = torch.full((4,), i, device=device)
        logits.append(sampler_model.logits(sampler_model.decode(tokens[:, i:i + 1], cache, slice(0, 4), start)))
    return relative_error(torch.cat(logits, 1), model.logits(model(tokens))[:, 150:])


def orthogonalize_error(device, dtype):
    worst = 0.0
    for shape in ((64, 64), (5, 48, 96), (3, 130, 33), (2, 7, 9)):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        expected = muon.orthogonalize(gradient, dtype=torch.float32)
        worst = max(worst, relative_error(muon.orthogonalize(gradient.to(device), dtype=dtype), expected))
    return worst


def make_optimizer(model, dtype):
    """train.py's own: Muon for the matrices, AdamW for the rest"""
    run = SimpleNamespace(config=train.Config(), model=model, replicas=False, world=1, dtype=dtype)
    return train.Run.make_optimizer(run)


def five_optimizer_steps(device):
    """-> how far five steps with given gradients moved all parameters"""
    model = build_small_model(device)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = make_optimizer(model, torch.float32)
    generator = torch.Generator().manual_seed(9)
    for _ in range(5):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - start


def quantization_differences(device, name):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(6)) * torch.logspace(-6, 6, 64)[:, None]
    return count_different(moe.FORMATS[name](x.to(device)), moe.FORMATS[name](x))


def training_step_differences(device):
    gradients = [run_backward(device, torch.bfloat16)[2] for _ in range(2)]
    return count_different(*gradients)


def sampling_differences(device):
    generator = torch.Generator().manual_seed(7)
    logits, uniform = torch.randn(64, 512, generator=generator) * 3, torch.rand(64, generator=generator)
    found = rollout.choose(logits.to(device), uniform.to(device), 0.95)[0]
    return count_different(found, rollout.choose(logits, uniform, 0.95)[0])


def divergence_error(device, kind):
    generator = torch.Generator().manual_seed(8)
    student, teacher = (torch.randn(32, 512, generator=generator) for _ in range(2))
    found = feedback_distill.divergence(student.to(device), teacher.to(device), kind)
    return relative_error(found, feedback_distill.divergence(student, teacher, kind))


def upload_differences(device):
    """The delta of one version of the weights to the next, encoded and applied on the device"""
    old = {name: w.detach().bfloat16() for name, w in build_small_model(device).state_dict().items()}
    new = {name: w + 0.01 for name, w in old.items()}
    arrived = rollout.apply_delta(old, rollout.encode_delta(old, new))
    return sum(count_different(arrived[name], new[name]) for name in new)


def sampler_mismatch(device, dtype):
    """Mean |log-prob of the sampler - log-prob of the trainer| over the tokens that real agents sampled"""
    tokenizer = rollout.Tokenizer.train(synth_tasks.example_texts(100, 0), 700)
    model = build_small_model(device, dtype, vocab=tokenizer.vocab)
    sampler_model = rollout.generation_model(model.config, dtype, device)
    sampler_model.load_state_dict(model.state_dict())
    sampler = rollout.Sampler(sampler_model, tokenizer, rows=16, window=256)
    tasks, limits = [synth_tasks.make_task(level, 5) for level in (0, 1)], rollout.Limits(256, 4, 40)
    groups = rollout.rollouts(sampler, tasks, 8, 0, limits, rollout.Sandbox())

    episodes = [episode for group in groups for chain in group for episode in chain.episodes]
    batch = rollout.pack(episodes, [1.0] * len(episodes))
    batch = {name: t.to(device) for name, t in batch.items()}
    with torch.no_grad():
        hidden = model(batch["tokens"], None, batch["experts"])
        logprobs = model.logprobs(hidden, batch["targets"])
    sampled = batch["mask"] > 0
    return (logprobs - batch["logprobs"])[sampled].abs().mean()


def check_equality(bench):
    # TF32 would round the factors of an fp32 product to 10 bits: this part compares fp32 itself.
    torch.backends.cuda.matmul.allow_tf32 = False
    device = bench.device

    def check(what, limit, measure):
        bench.check("equality: relative error, or numbers that differ", what, limit, measure)

    for label, changes in ARCHITECTURES.items():
        results = {}

        def hidden_error():
            results["cpu"] = run_backward("cpu", torch.float32, **changes)
            results["device"] = run_backward(device, torch.float32, **changes)
            return relative_error(results["device"][0], results["cpu"][0])
        check(f"{label}: hidden states, fp32", FP32, hidden_error)
        check(f"{label}: gradients, fp32", FP32, lambda: relative_error(results["device"][2], results["cpu"][2]))

    def bf16_difference():
        expected, found = (run_backward(where, torch.bfloat16)[1].cpu() for where in ("cpu", device))
        return (found - expected).abs().mean()
    check("MLA: log-probs, bf16, mean difference", 0.05, bf16_difference)

    check("prefill and decoding against one forward, fp32", FP32, lambda: decoding_error(device, torch.float32))
    check("prefill and decoding against one forward, bf16", BF16, lambda: decoding_error(device, torch.bfloat16))
    check("orthogonalize, fp32", FP32, lambda: orthogonalize_error(device, torch.float32))
    check("orthogonalize, bf16 against fp32", BF16, lambda: orthogonalize_error(device, torch.bfloat16))
    check("Muon and AdamW, five steps, fp32", FP32,
          lambda: relative_error(five_optimizer_steps(device), five_optimizer_steps("cpu")))
    for name in ("mxfp8", "nvfp4"):
        check(f"{name} emulation, of 16,384 numbers", 0, lambda: quantization_differences(device, name))
    check("two runs of a training step, bf16", 0, lambda: training_step_differences(device))
    check("tokens chosen from given logits", 0, lambda: sampling_differences(device))
    for kind in ("forward", "reverse", "jsd"):
        check(f"divergence, {kind}", FP32, lambda: divergence_error(device, kind))
    check("weights after a delta upload", 0, lambda: upload_differences(device))
    check("sampler's log-probs against the trainer's, fp32", 1e-4, lambda: sampler_mismatch(device, torch.float32))
    check("sampler's log-probs against the trainer's, bf16", 5e-3, lambda: sampler_mismatch(device, torch.bfloat16))


# ---------------------------------------------------------------- device tests

def run_device_tests(bench):
    """The tests that are marked for the device. pytest's exit code 5 says that there are none."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "device", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.stdout.rstrip().split("\n")
    print(done.stdout)
    row = dict(what="python -m pytest -m device", outcome=lines[-1], holds=done.returncode in (0, 5))
    if not row["holds"]:
        row["traceback"] = "\n".join(lines[-60:])
    bench.emit("device tests", **row)


# ---------------------------------------------------------------- the main job

# Cut short: fewer steps, demonstrations, tasks of a step and tasks of an evaluation. The model, its windows, its batches and
# what a stage consists of stay those of the scale.
JOB_FLAGS = {
    "cuda": {
        "all": ["--scale=gpu", "--device=cuda", "--compile=0"],
        "pretrain": ["--steps=40"], "long": ["--steps=6"], "sft": ["--steps=90", "--demos=3000", "--save_every=9"],
        "rl": ["--steps=3", "--tasks_per_step=8"], "eval": ["--eval_levels=2", "--eval_tasks=4", "--eval_samples=2"],
    },
    "cpu": {
        "all": ["--scale=tiny", "--device=cpu", "--processes=1", f"--data={ROOT}"],
        "pretrain": ["--steps=2"], "long": ["--steps=2"], "sft": ["--steps=30", "--demos=32", "--save_every=3"],
        "rl": ["--steps=2"], "eval": ["--eval_levels=1"],
    },
}
# Of sft: killed as soon as the log has so many steps (the checkpoint before is then complete), and compared up to a later one
KILL_AND_COMPARE = {"cuda": (12, 30), "cpu": (4, 9)}


def stage_flags(bench, stage, out):
    flags = JOB_FLAGS[bench.device]
    return [*flags["all"], *flags[stage], f"--stage={stage}", f"--out={out}"]


def stage_config(bench, stage):
    """The values that train.py gives this stage"""
    return train.configure(train.parse(stage_flags(bench, stage, bench.scratch)), stage)


def training_flops(config, vocab, length):
    """Of one trained token in a sequence of `length` tokens: the formula at the head of this file"""
    shape = train.model_config(config, vocab)
    _, active = moe.parameters_per_token(shape)
    attention = 6 * shape.layers * shape.heads * (shape.qk_nope + shape.qk_rope + shape.v_dim) * length / 2
    return 6 * (active - shape.vocab * shape.dim) + attention


def planned_memory(config):
    """Gigabytes of one training step as the planner predicts them, without what samples"""
    shape = train.model_config(config, config.vocab)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in moe.Model(shape).named_parameters()}
    kinds = hsdp.memory(shape, shapes, hsdp.Layout(), hsdp.Step(tokens=config.micro_tokens), config.recompute)
    return sum(kinds.values()) / 1e9


def run_stage(bench, stage, out, seconds):
    """One stage of train.py under the watch -> columns of its row, what the watch saw, and the lines of its log"""
    watch, screen = bench.scratch / f"{stage}.json", bench.scratch / f"{stage}.txt"
    command = [sys.executable, "-m", "benchmarks.gpu_watch", str(watch), *stage_flags(bench, stage, out)]
    start = time.monotonic()
    with open(screen, "w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(seconds)
            outcome = "complete" if process.returncode == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            outcome = f"ended after {seconds:.0f} s"
    wall = time.monotonic() - start
    seen = json.loads(watch.read_text()) if watch.exists() else {"busy": None, "phases": {}, "looks": 0}
    lines = read_rows(out / f"{stage}.jsonl")
    if outcome.startswith("exit code"):
        raise RuntimeError(f"train.py --stage={stage}: {outcome}\n{last_lines(screen)}")
    columns = {"outcome": outcome, "wall_s": wall}
    if seen["busy"] is not None:
        columns["card_busy"] = f"{seen['busy']:.0%}"
    return columns, seen, lines


def describe_stage(bench, stage, lines, wall):
    """Columns of a stage that trains. Its first half warms up, with shorter windows too: the medians are of its second half."""
    if not lines:
        raise RuntimeError(f"{stage} made no step")
    config, half = stage_config(bench, stage), lines[len(lines) // 2:]
    speed = statistics.median(line["tokens_per_s"] for line in half)
    columns = {
        "steps": len(lines),
        "before_first_step_s": wall - sum(line["seconds"] for line in lines),
        "s_per_step": statistics.median(line["seconds"] for line in half),
        "tokens_per_s": speed,
    }
    # In pretrain and long all sequences have one length. Elsewhere attention is left out: the MFU is then a lower bound.
    lengths = {"pretrain": config.context, "long": int(config.context * config.yarn), "sft": 0}
    if stage in lengths:
        columns["MFU"] = f"{speed * training_flops(config, config.vocab, lengths[stage]) / bench.peak_flops:.1%}"
    return {**columns, "peak_GB": max(line["memory"] for line in lines), "planner_GB": planned_memory(config)}


def describe_rollouts(bench, lines, phases):
    """An RL step, split: rows of the tables of the stage rl"""
    config = stage_config(bench, "rl")
    seconds = statistics.mean(line["seconds"] for line in lines)
    for phase, share in phases.items():
        bench.emit("an RL step, by the wall", what=phase, share=f"{share:.1%}", seconds=share * seconds)
    rollouts = config.tasks_per_step * config.group
    for line in lines:
        bench.emit("RL steps", step=line["step"], rollouts=rollouts, seconds=line["seconds"], rollout_s=line["rollout_s"],
                   sampled_tokens_per_s=line["sampled"] * rollouts / line["rollout_s"], solved=line["solved"],
                   wrong_tool=line["bad_tool"], turns=line["turns"], upload_MB=line.get("sync_bytes", 0) / 1e6)
    bench.check("checks", "RL: sampler's log-probs against the trainer's, mean", 5e-3,
                lambda: max(line["mismatch"] for line in lines))


def run_until(bench, stage, out, start_from, steps):
    """Starts a stage and kills it with signal 9 as soon as its log has so many steps"""
    command = [sys.executable, "train.py", *stage_flags(bench, stage, out), f"--start_from={start_from}"]
    log, screen = out / f"{stage}.jsonl", bench.scratch / "resume.txt"
    with open(screen, "w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            while len(read_rows(log)) < steps:
                if process.poll() is not None:
                    raise RuntimeError(f"{stage} ended before step {steps}\n{last_lines(screen)}")
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return read_rows(log)


def compare_resume(bench, straight):
    """sft again from the same checkpoint, killed and resumed, against the same steps of the run that was not interrupted"""
    kill_after, until = KILL_AND_COMPARE[bench.device]
    out = bench.scratch / "killed"
    out.mkdir()
    killed = run_until(bench, "sft", out, straight, kill_after)
    resumed = run_until(bench, "sft", out, straight, until)[:until]
    expected = read_rows(straight / "sft.jsonl")[:until]

    # The steps up to the checkpoint are still those that the killed run wrote, times included.
    kept = sum(a == b for a, b in zip(killed, resumed))
    bench.emit("kill -9 and resume", what="sft", killed_after_step=len(killed), went_on_after_step=kept, compared_steps=until)
    bench.check("checks", "kill -9 and resume: steps with another loss or gradient norm", 0,
                lambda: sum((a["loss"], a["norm"]) != (b["loss"], b["norm"]) for a, b in zip(expected, resumed, strict=True)))
    # The log has the peak of the process so far. What a CPU process holds also depends on the allocator.
    limit = 1.5 if bench.tiny else 1.02
    bench.check("checks", "kill -9 and resume: peak memory, as a multiple of the run without", limit,
                lambda: resumed[-1]["memory"] / expected[-1]["memory"])


def run_job(bench):
    out = bench.scratch / "run"
    out.mkdir()
    for stage in ("pretrain", "long", "sft"):
        def measure():
            columns, _, lines = run_stage(bench, stage, out, bench.seconds_left() - 2)
            return {**columns, **describe_stage(bench, stage, lines, columns["wall_s"])}
        bench.attempt("stages", stage, measure)

    def resume():
        compare_resume(bench, out)
        return {"outcome": "complete"}
    bench.attempt("kill -9 and resume", "both runs", resume)

    # A policy that is hardly trained may sample up to every limit: the evaluation keeps a part of the time.
    def reinforce():
        columns, seen, lines = run_stage(bench, "rl", out, 0.75 * bench.seconds_left())
        row = {**columns, **describe_stage(bench, "rl", lines, columns["wall_s"])}
        describe_rollouts(bench, lines, seen["phases"])
        return row
    bench.attempt("stages", "rl", reinforce)
    bench.attempt("stages", "eval", lambda: run_stage(bench, "eval", out, bench.seconds_left() - 2)[0])


# ---------------------------------------------------------------- speed

def build_scale_model(bench, **changes):
    """A model of train.py's gpu scale (on a CPU: tiny) -> its shape, the model, tokens of one micro-batch (B, T + 1)"""
    config = stage_config(bench, "pretrain")
    shape = replace(train.model_config(config, config.vocab), **changes)
    torch.manual_seed(0)
    model = moe.Model(shape).to(bench.device).compute(torch.bfloat16)
    tokens = torch.randint(0, shape.vocab, (max(1, config.micro_tokens // config.context), config.context + 1))
    return shape, model, tokens.to(bench.device)


def train_once(model, tokens):
    """Forward and backward of one micro-batch"""
    (-model.logprobs(model(tokens[:, :-1]), tokens[:, 1:]).mean()).backward()
    for p in model.parameters():
        p.grad = None


def newton_schulz_flops(shapes, steps=5):
    """Per step and matrix (m, n), m <= n: X X^T, its square, and one product with X"""
    total = 0
    for shape in shapes:
        m, n = sorted(shape[-2:])
        total += math.prod(shape[:-2]) * steps * (4 * m * m * n + 2 * m ** 3)
    return total


def optimizer_floor(bench, matrices, numbers):
    """Newton-Schulz at the speed of a large product, and per number: weight, gradient and momentum read, weight and momentum
    written, in fp32, and 4 bytes for the bf16 matrix on its way"""
    return newton_schulz_flops(matrices) / bench.peak_flops + 24 * numbers / bench.bandwidth


def measure_model_step(bench):
    _, model, _ = build_scale_model(bench)
    optimizer = make_optimizer(model, torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    seconds = bench.time(optimizer.step, 5)
    matrices = [p.shape for group in optimizer.param_groups if group["algorithm"] == "muon" for p in group["params"]]
    floor = optimizer_floor(bench, matrices, sum(p.numel() for p in model.parameters()))
    return {"ms": 1e3 * seconds, "floor_ms": 1e3 * floor, "times_floor": seconds / floor}


def measure_muon(bench, layers, dim, heads, experts, hidden):
    """One step of Muon on the matrices of a decoder; torch.optim.Muon gets every head and expert as a matrix of its own"""
    shapes = muon.layer_shapes(layers, dim, heads, experts, hidden)
    params = muon.make_parameters(shapes, device=bench.device)
    ours = muon.Muon([dict(params=list(params.items()))], ns_dtype=torch.bfloat16, scale="spectral", lr=1e-3, weight_decay=0.1)
    matrices = []
    for p in params.values():
        for matrix, gradient in zip(p.detach().reshape(-1, *p.shape[-2:]), p.grad.reshape(-1, *p.shape[-2:])):
            matrices.append(torch.nn.Parameter(matrix.clone()))
            matrices[-1].grad = gradient.clone()
    theirs = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1)
    seconds, other = bench.time(ours.step, 5), bench.time(theirs.step, 3, 1)
    numbers = sum(math.prod(shape) for shape in shapes.values())
    floor = optimizer_floor(bench, shapes.values(), numbers)
    return {"parameters_M": numbers / 1e6, "ms": 1e3 * seconds, "torch.optim.Muon_ms": 1e3 * other,
            "times_torch": seconds / other, "floor_ms": 1e3 * floor, "times_floor": seconds / floor}


def measure_mixture(bench):
    """Forward and backward of one layer: routed experts against a dense FFN with the FLOPs of the active ones"""
    config = stage_config(bench, "pretrain")
    shape = replace(train.model_config(config, config.vocab), shared=0)
    layer = moe.MoE(shape).to(bench.device)
    dense = moe.FFN(shape.dim, shape.active * shape.expert_ffn).to(bench.device)
    tokens = config.micro_tokens
    x = torch.randn(1, tokens, shape.dim, device=bench.device, dtype=torch.bfloat16, requires_grad=True)

    def both(module):
        output = module(x)
        output.backward(torch.ones_like(output))
        x.grad = None
        for p in module.parameters():
            p.grad = None
    seconds, other = bench.time(lambda: both(layer)), bench.time(lambda: both(dense))
    floor = 3 * 2 * tokens * 3 * shape.dim * shape.active * shape.expert_ffn / bench.peak_flops
    return {"tokens": tokens, "ms": 1e3 * seconds, "dense_ms": 1e3 * other, "times_dense": seconds / other,
            "floor_ms": 1e3 * floor, "times_floor": seconds / floor}


DECODING_ROWS = (1, 32, 128, 256)
POSITION, WINDOW = {"cuda": 700, "cpu": 40}, {"cuda": 4098, "cpu": 130}


@torch.inference_mode()
def measure_decoding(bench, rows, model):
    """One token for each of `rows` sequences of equal length, sampled and brought to the CPU as the sampler does"""
    position = POSITION[bench.device]
    cache = moe.Cache(model, rows, WINDOW[bench.device])
    tokens = torch.zeros(rows, 1, dtype=torch.long, device=bench.device)
    start = torch.full((rows,), position, device=bench.device)

    def step():
        hidden = model.decode(tokens, cache, slice(0, rows), start)
        return rollout.choose(model.logits(hidden[:, -1]), torch.rand(rows, device=bench.device), 0.95)[0].tolist()
    seconds = bench.time(step, 20)
    # At least: every weight once, and every sequence's entries of all layers.
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    entries = cache.data[:, :, :position].numel() * cache.data.element_size()
    floor = 2 * (weights + entries) / (2 * bench.bandwidth)
    return {"rows": rows, "ms": 1e3 * seconds, "tokens_per_s": rows / seconds, "floor_ms": 1e3 * floor, "times_floor": seconds / floor}


def load_with_transformers(bench, model):
    """The same weights in transformers, by way of the published format"""
    import transformers
    folder = bench.scratch / "published"
    moe.write_checkpoint(folder, model, torch.bfloat16)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).to(bench.device).eval()


@torch.inference_mode()
def measure_transformers(bench, rows, model):
    """The same step: a prompt of equal length, then one greedy token at a time, brought to the CPU"""
    position = POSITION[bench.device]
    prompt = torch.zeros(rows, position, dtype=torch.long, device=bench.device)
    cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
    tokens = prompt[:, :1]
    seconds = bench.time(lambda: model(tokens, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1).tolist(), 10)
    return {"rows": rows, "transformers_ms": 1e3 * seconds, "tokens_per_s": rows / seconds}


def measure_speed(bench):
    bench.attempt("optimizer step", "Muon and AdamW, the model of the scale", lambda: measure_model_step(bench))
    sizes = [(1, 64, 2, 2, 64)] if bench.tiny else [(4, 128, 4, 8, 128), (6, 384, 6, 8, 1024), (8, 768, 12, 8, 2048)]
    for layers, dim, heads, experts, hidden in sizes:
        bench.attempt("optimizer step", f"Muon, {layers} layers of width {dim}",
                      lambda: measure_muon(bench, layers, dim, heads, experts, hidden))
    bench.attempt("mixture of experts, forward and backward", "one layer of the scale", lambda: measure_mixture(bench))

    table = f"decoding one token at position {POSITION[bench.device]}"
    shape, model, _ = build_scale_model(bench)
    lean = rollout.generation_model(shape, torch.bfloat16, bench.device)
    lean.load_state_dict(model.state_dict())
    for rows in DECODING_ROWS:
        bench.attempt(table, "ours", lambda: measure_decoding(bench, rows, lean))
    if importlib.util.find_spec("transformers") is None:
        bench.emit(table, what="transformers: not installed")
        return
    theirs = {}

    def load():
        theirs["model"] = load_with_transformers(bench, model)
        return {}
    bench.attempt(table, "transformers", load)
    for rows in DECODING_ROWS if theirs else ():
        bench.attempt(table, "transformers", lambda: measure_transformers(bench, rows, theirs["model"]))


# ---------------------------------------------------------------- low precision

def measure_scaled_product(bench):
    """The product of two FP8 matrices with one scale each, as the hardware has it, against the same in bf16"""
    n = 256 if bench.tiny else 8192
    a = torch.randn(n, n, device=bench.device, dtype=torch.bfloat16)
    small, scale = a.to(torch.float8_e4m3fn), torch.ones((), device=bench.device)
    wide = bench.time(lambda: a @ a.t())
    seconds = bench.time(lambda: torch._scaled_mm(small, small.t(), scale, scale, out_dtype=torch.bfloat16))
    return {"ms": 1e3 * seconds, "TFLOP/s": 2 * n ** 3 / seconds / 1e12, "times_bf16": seconds / wide}


def hardware_error(bench, precision):
    """Products in the hardware's small format against the emulation: the same rounded numbers, multiplied in bf16"""
    torch.manual_seed(0)
    x = torch.randn(512, 256, device=bench.device, dtype=torch.bfloat16)
    weights = [torch.randn(4, *shape, device=bench.device, dtype=torch.bfloat16) * 0.05 for shape in ((128, 256), (128, 256), (256, 128))]
    counts = torch.tensor([128, 200, 56, 128], device=bench.device)
    found = moe.grouped_swiglu(x, counts, *weights, precision)
    in_hardware = moe.scales_in_hardware
    try:
        moe.scales_in_hardware = lambda device: False
        expected = moe.grouped_swiglu(x, counts, *weights, precision)
    finally:
        moe.scales_in_hardware = in_hardware
    return relative_error(found, expected)


def measure_low_precision(bench):
    hardware = moe.scales_in_hardware(torch.device(bench.device))
    bench.emit("hardware", what="block scales (MXFP8, NVFP4)", found="multiplied by the tensor cores" if hardware else
               "not here (compute capability 10 or later): emulated")
    capability = torch.cuda.get_device_capability() if bench.device == "cuda" else (0, 0)
    if bench.tiny or capability >= (8, 9):
        bench.attempt("hardware", "FP8 product, one scale per matrix (not used by the model)", lambda: measure_scaled_product(bench))
    else:
        bench.emit("hardware", what="FP8 product", found="not here (compute capability 8.9 or later)")
    for precision in ("mxfp8", "nvfp4") if hardware else ():
        bench.check("checks", f"{precision}: hardware against emulation", 0.02, lambda: hardware_error(bench, precision))

    seconds = {}
    for precision in ("", "mxfp8", "nvfp4"):
        def measure():
            _, model, tokens = build_scale_model(bench, precision=precision)
            seconds[precision] = bench.time(lambda: train_once(model, tokens), 5)
            return {"by": "hardware" if hardware and precision else "emulation" if precision else "bf16",
                    "ms": 1e3 * seconds[precision], "times_bf16": seconds[precision] / seconds[""]}
        bench.attempt("forward and backward of one micro-batch at the scale", precision or "bf16", measure)


# ---------------------------------------------------------------- command line

PARTS = {"card": measure_card, "equality": check_equality, "device_tests": run_device_tests, "job": run_job,
         "speed": measure_speed, "low_precision": measure_low_precision}


def main(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_parts", description="One part of benchmarks.gpu, which calls this.")
    parser.add_argument("part", choices=PARTS)
    for name in ("device", "rows", "report", "scratch"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args(argv)
    PARTS[arguments.part](Bench(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
