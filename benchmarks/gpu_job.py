"""benchmarks/gpu_job.py: train.py at the scale of the device, every stage cut short but whole in
kind; a part of benchmarks/gpu.py.

Each stage is a process of its own, so that its peak memory is its own. Beside it nvidia-smi writes
how busy the card is.

Left out: kill -9 and resume, which is a test of the device (tests/test_device.py); a profile of the
steps by functions (torch.profiler, py-spy).
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

import moe
import train
from benchmarks.gpu import last_lines, read_rows
from benchmarks.harness import ROOT
from fast import gpu_memory

# The flags of each stage. Fewer steps, demonstrations, tasks per step and evaluation tasks cut the
# stages short. The model, its windows, its batches and the parts of a stage stay those of the
# scale. --save_every=1000 is more than the steps of a stage, so it saves at its end alone. Last,
# rl once more: a quarter of each step's rollouts in each of four processes, whose agents' Python
# then takes four cores.
JOB_FLAGS = {
    "cuda": {
        "all": ["--scale=gpu", "--device=cuda", "--compile=0", "--save_every=1000"],
        "pretrain": ["--steps=40"],
        "long": ["--steps=6"],
        "sft": ["--steps=90", "--demos=3000"],
        "rl": ["--steps=3"],
        "eval": ["--eval_levels=0,1", "--eval_tasks=4", "--eval_samples=2"],
        "rl by workers": ["--steps=3", "--workers=4", "--staleness=0"],
    },
    "cpu": {
        "all": [
            "--scale=tiny",
            "--device=cpu",
            "--processes=1",
            f"--data={ROOT}",
            "--vocab=320",
            "--micro_tokens=512",
            "--batch_tokens=1024",
            "--save_every=1000",
            "--max_turns=3",
        ],
        "pretrain": ["--steps=2"],
        "long": ["--steps=2"],
        "sft": ["--steps=12", "--demos=32"],
        "rl": ["--steps=2"],
        "eval": ["--eval_levels=0"],
        "rl by workers": ["--steps=1", "--workers=1", "--staleness=0"],
    },
}


NOMINAL_FLOPS = 989e12  # of an H100 or H200, dense bf16 products

# Keys of the log line of each rl step that the report shows
LOGGED = ("step", "seconds", "rollout_s", "solved", "bad_tool", "turns")


def stage_flags(bench, name):
    """-> the flags of train.py for one run of a stage, on this device. name: the stage, and how"""
    flags, (stage, *how) = JOB_FLAGS[bench.device], name.split()
    run = bench.scratch / "run"
    where = [f"--start_from={run}", f"--out={bench.scratch}/again"] if how else [f"--out={run}"]
    return [*flags["all"], *flags[name], f"--stage={stage}", *where]


def stage_config(bench, name):
    """The values that train.py gives this stage"""
    given = train.FLAGS.parse(stage_flags(bench, name))
    return train.FLAGS.configure(given, given["stage"])


def training_flops(config, length):
    """FLOPs of one trained token in a sequence of `length` tokens, by the formula in gpu.md"""
    shape = train.model_config(config, config.vocab)
    _, active = moe.parameters_per_token(shape)
    width = shape.qk_nope + shape.qk_rope + shape.v_dim
    attention = 6 * shape.layers * shape.heads * width * length / 2
    return 6 * (active - shape.vocab * shape.dim) + attention


def planned_memory(config):
    """Gigabytes of one training step as the planner predicts them. The model and the cache that
    sample in rl are not in it."""
    shape = train.model_config(config, config.vocab)
    shapes = gpu_memory.parameter_shapes(shape)
    return gpu_memory.planned_gigabytes(shape, shapes, config.micro_tokens, config.recompute)


def watch_card(path):
    """Starts nvidia-smi, which writes to the file, five times a second, for what share of the time
    the card runs a kernel -> its process, or None where there is no card"""
    if not torch.cuda.is_available() or not shutil.which("nvidia-smi"):
        return None
    # nvidia-smi numbers all cards of the machine, CUDA numbers only the visible ones.
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    with open(path, "w") as output:
        return subprocess.Popen(
            ["nvidia-smi", f"--id={card}", *query], stdout=output, stderr=subprocess.DEVNULL
        )


def run_stage(bench, name, seconds):
    """Runs one stage of train.py -> columns of its row, and the lines of its log"""
    file = name.replace(" ", "_")
    screen, busy = bench.rows.with_name(f"job_{file}.log"), bench.scratch / f"{file}.busy"
    command = [sys.executable, str(ROOT / "train.py"), *stage_flags(bench, name)]
    config = stage_config(bench, name)

    # A stage that reaches its time limit is killed. The steps that it logged still count.
    start, monitor = time.monotonic(), watch_card(busy)
    with open(screen, "w") as output:
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=seconds
            )
            outcome = "complete"
        except subprocess.TimeoutExpired:
            done, outcome = None, f"ended after {seconds:.0f} s"
        finally:
            if monitor:
                monitor.kill()
                monitor.wait()
    columns = {"outcome": outcome, "wall_s": time.monotonic() - start}

    # A stage that fails is an error, with the end of its output: bench.attempt makes a row of it.
    if done and done.returncode:
        said = f"exit code {done.returncode}\n{last_lines(screen)}"
        raise RuntimeError(f"train.py, {name}: {said}")

    # In the first half of the time the stage still imports, reads and makes its data.
    looks = [int(word) for word in busy.read_text().split() if word.isdigit()] if monitor else []
    if looks:
        columns["card_busy_%"] = statistics.mean(looks[len(looks) // 2 :])
    return columns, read_rows(Path(config.out) / f"{config.stage}.jsonl")


def stage_numbers(bench, stage, lines, wall):
    """Columns of a stage that trains. The medians are of its second half, because the first half
    warms up, and its windows are shorter too."""
    if not lines:
        raise RuntimeError(f"{stage} made no step")

    # outside_steps_s: the time that no step has logged (start, held-out losses, saving).
    config, half = stage_config(bench, stage), lines[len(lines) // 2 :]
    speed = statistics.median(line["tokens_per_s"] for line in half)
    columns = {
        "steps": len(lines),
        "outside_steps_s": wall - sum(line["seconds"] for line in lines),
        "s_per_step": statistics.median(line["seconds"] for line in half),
        "tokens_per_s": speed,
    }

    # MFU: the share of the measured peak that training reaches. In pretrain and long all sequences
    # have one length. In sft they vary, so attention is left out and the MFU is a lower bound.
    lengths = {"pretrain": config.context, "long": int(config.context * config.yarn), "sft": 0}
    if stage in lengths:
        flops = speed * training_flops(config, lengths[stage])
        columns["MFU_%"] = 100 * flops / bench.peak_flops
        columns["of_989_%"] = 100 * flops / NOMINAL_FLOPS
    columns["peak_GB"] = max(line["memory"] for line in lines)
    columns["planner_GB"] = planned_memory(config)
    return columns


def describe_rollouts(bench, name, lines):
    """The steps of RL: the rows of a table, and a check"""
    config = stage_config(bench, name)
    rollouts = config.tasks_per_step * config.group_size
    for line in lines:
        bench.emit(
            "RL steps",
            workers=config.workers,
            rollouts=rollouts,
            sampled_tokens_per_s=line["sampled"] * rollouts / line["rollout_s"],
            **{"rollouts_%": 100 * line["rollout_s"] / line["seconds"]},
            **{name: line[name] for name in LOGGED},
        )

    # The same tokens get log-probs twice: from the sampler, which decodes in bf16 from its cache,
    # and from the trainer, in one forward.
    def worst_mismatch():
        return max(line["mismatch"] for line in lines)

    what = f"{name}: sampler's log-probs against the trainer's, mean"
    bench.check("checks", what, 5e-3, worst_mismatch)


def measure_main_job(bench):
    """All stages one after the other, in one folder: each starts from the checkpoint of the one
    before"""
    (bench.scratch / "run").mkdir()

    def measure(name):
        # A policy that is hardly trained may sample up to every limit, so rl may take only half of
        # the time left: what comes after it keeps the rest.
        limit = 0.5 * bench.seconds_left() if name == "rl" else bench.seconds_left() - 2
        columns, lines = run_stage(bench, name, limit)

        # The evaluation has no steps, so its row is its outcome and its time.
        if name == "eval":
            return columns
        row = {**columns, **stage_numbers(bench, name, lines, columns["wall_s"])}
        if name.startswith("rl"):
            describe_rollouts(bench, name, lines)
        return row

    for name in ("pretrain", "long", "sft", "rl", "eval", "rl by workers"):
        bench.attempt("stages", name, partial(measure, name))
