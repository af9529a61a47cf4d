"""benchmarks/gpu_job.py: train.py at the scale of the device, every stage cut short but whole in
kind; a part of benchmarks/gpu.py.

Each stage is a process of its own, so that its peak memory is its own, under
benchmarks/gpu_watch.py. Then sft runs once more, is killed with signal 9 and resumed, and has to
repeat the losses of the run that was not interrupted.
"""

import json
import signal
import statistics
import subprocess
import sys
import time
from functools import partial

import hsdp
import moe
import train
from benchmarks.gpu import ROOT, last_lines, read_rows
from command import gpu_memory

# Cut short: fewer steps, demonstrations, tasks of a step and tasks of an evaluation. The model, its
# windows, its batches and what a stage consists of stay those of the scale. A stage saves at its
# end; a second run of sft saves more often, so that it can be killed between two checkpoints.
JOB_FLAGS = {
    "cuda": {
        "all": ["--scale=gpu", "--device=cuda", "--compile=0", "--save_every=1000"],
        "pretrain": ["--steps=40"],
        "long": ["--steps=6"],
        "sft": ["--steps=90", "--demos=3000"],
        "rl": ["--steps=3", "--tasks_per_step=8"],
        "eval": ["--eval_levels=2", "--eval_tasks=4", "--eval_samples=2"],
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
        ],
        "pretrain": ["--steps=2"],
        "long": ["--steps=2"],
        "sft": ["--steps=12", "--demos=32"],
        "rl": ["--steps=2"],
        "eval": ["--eval_levels=1"],
    },
}
# Steps of sft: between checkpoints, until the process is killed, and until the comparison ends
SAVE_EVERY, KILL_AFTER = {"cuda": 9, "cpu": 3}, {"cuda": 12, "cpu": 4}
COMPARE_UNTIL = {"cuda": 30, "cpu": 8}


def stage_flags(bench, stage, out):
    flags = JOB_FLAGS[bench.device]
    return [*flags["all"], *flags[stage], f"--stage={stage}", f"--out={out}"]


def stage_config(bench, stage):
    """The values that train.py gives this stage"""
    return train.FLAGS.configure(train.FLAGS.parse(stage_flags(bench, stage, bench.scratch)), stage)


def training_flops(config, vocab, length):
    """Of one trained token in a sequence of `length` tokens: the formula in gpu.md"""
    shape = train.model_config(config, vocab)
    _, active = moe.parameters_per_token(shape)
    attention = (
        6 * shape.layers * shape.heads * (shape.qk_nope + shape.qk_rope + shape.v_dim) * length / 2
    )
    return 6 * (active - shape.vocab * shape.dim) + attention


def planned_memory(config):
    """Gigabytes of one training step as the planner predicts them, without what samples"""
    shape = train.model_config(config, config.vocab)
    step = gpu_memory.Step(tokens=config.micro_tokens)
    kinds = gpu_memory.memory(
        shape, gpu_memory.parameter_shapes(shape), hsdp.Layout(), step, config.recompute
    )
    return sum(kinds.values()) / 1e9


def run_stage(bench, stage, out, seconds):
    """One stage of train.py under the watch -> columns of its row, what the watch saw, and the
    lines of its log"""
    watch, screen = bench.scratch / f"{stage}.json", bench.rows.with_name(f"job_{stage}.log")
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_watch",
        str(watch),
        *stage_flags(bench, stage, out),
    ]
    # The stage may take so many seconds; then what it has logged still counts.
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

    # What the watch saw; a stage that ended at once has left nothing.
    seen = {"busy": None, "phases": {}}
    if watch.exists():
        seen = json.loads(watch.read_text())
    lines = read_rows(out / f"{stage}.jsonl")
    if outcome.startswith("exit code"):
        raise RuntimeError(f"train.py --stage={stage}: {outcome}\n{last_lines(screen)}")
    columns = {"outcome": outcome, "wall_s": wall}
    if seen["busy"] is not None:
        columns["card_busy_%"] = 100 * seen["busy"]
    return columns, seen, lines


def describe_stage(bench, stage, lines, wall):
    """Columns of a stage that trains. Its first half warms up, with shorter windows too: the
    medians are of its second half."""
    if not lines:
        raise RuntimeError(f"{stage} made no step")
    config, half = stage_config(bench, stage), lines[len(lines) // 2 :]
    speed = statistics.median(line["tokens_per_s"] for line in half)
    columns = {
        "steps": len(lines),
        "outside_steps_s": wall - sum(line["seconds"] for line in lines),
        "s_per_step": statistics.median(line["seconds"] for line in half),
        "tokens_per_s": speed,
    }
    # The share of the measured peak that training reaches. In pretrain and long all sequences have
    # one length. Elsewhere attention is left out: the MFU is then a lower bound.
    lengths = {"pretrain": config.context, "long": int(config.context * config.yarn), "sft": 0}
    if stage in lengths:
        columns["MFU_%"] = (
            100 * speed * training_flops(config, config.vocab, lengths[stage]) / bench.peak_flops
        )
    return {
        **columns,
        "peak_GB": max(line["memory"] for line in lines),
        "planner_GB": planned_memory(config),
    }


def describe_rollouts(bench, lines, phases):
    """An RL step, split: rows of the tables of the stage rl"""
    config = stage_config(bench, "rl")
    seconds = statistics.mean(line["seconds"] for line in lines)
    for phase, share in phases.items():
        bench.emit(
            "an RL step, by the wall",
            what=phase,
            **{"share_%": 100 * share},
            seconds=share * seconds,
        )
    rollouts = config.tasks_per_step * config.group_size
    for line in lines:
        bench.emit(
            "RL steps",
            step=line["step"],
            rollouts=rollouts,
            seconds=line["seconds"],
            rollout_s=line["rollout_s"],
            sampled_tokens_per_s=line["sampled"] * rollouts / line["rollout_s"],
            solved=line["solved"],
            wrong_tool=line["bad_tool"],
            turns=line["turns"],
            upload_MB=line.get("sync_bytes", 0) / 1e6,
        )

    def worst_mismatch():
        return max(line["mismatch"] for line in lines)

    what = "RL: sampler's log-probs against the trainer's, mean"
    bench.check("checks", what, 5e-3, worst_mismatch)


def run_until(bench, stage, out, start_from, steps):
    """Starts a stage and kills it with signal 9 as soon as its log has so many steps -> its log"""
    give_up = time.monotonic() + bench.seconds_left() / 3
    command = [
        sys.executable,
        "train.py",
        *stage_flags(bench, stage, out),
        f"--start_from={start_from}",
        f"--save_every={SAVE_EVERY[bench.device]}",
    ]
    log, screen = out / f"{stage}.jsonl", bench.rows.with_name("job_resume.log")
    with open(screen, "a") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            while len(read_rows(log)) < steps:
                if process.poll() is not None:
                    raise RuntimeError(f"{stage} ended before step {steps}\n{last_lines(screen)}")
                if time.monotonic() > give_up:
                    raise TimeoutError(f"{stage} is too slow: no step {steps} yet")
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return read_rows(log)


def compare_resume(bench, straight):
    """sft again from the same checkpoint, killed and resumed, against the same steps of the run
    that was not interrupted"""
    until = COMPARE_UNTIL[bench.device]
    out = bench.scratch / "killed"
    out.mkdir()
    # The second process begins where the first was killed, by the same command.
    killed = run_until(bench, "sft", out, straight, KILL_AFTER[bench.device])
    resumed = run_until(bench, "sft", out, straight, until)[:until]
    expected = read_rows(straight / "sft.jsonl")[:until]

    # The steps up to the checkpoint are still those that the killed run wrote, times included.
    kept = sum(a == b for a, b in zip(killed, resumed))

    def count_other_steps():
        pairs = zip(expected, resumed, strict=True)
        return sum((a["loss"], a["norm"]) != (b["loss"], b["norm"]) for a, b in pairs)

    what = "kill -9 and resume: steps with another loss or gradient norm"
    bench.check("checks", what, 0, count_other_steps)

    # The log has the peak of the process so far. What a CPU process holds also depends on the
    # allocator.
    limit = 1.5 if bench.tiny else 1.02

    def memory_ratio():
        return resumed[-1]["memory"] / expected[-1]["memory"]

    what = "kill -9 and resume: peak memory, as a multiple of the run without"
    bench.check("checks", what, limit, memory_ratio)
    return {"killed_after_step": len(killed), "went_on_after_step": kept, "compared_steps": until}


def measure_main_job(bench):
    out = bench.scratch / "run"
    out.mkdir()

    def measure(stage):
        columns, _, lines = run_stage(bench, stage, out, bench.seconds_left() - 2)
        return {**columns, **describe_stage(bench, stage, lines, columns["wall_s"])}

    for stage in ("pretrain", "long", "sft"):
        bench.attempt("stages", stage, partial(measure, stage))
    bench.attempt("kill -9 and resume", "sft", partial(compare_resume, bench, out))

    # A policy that is hardly trained may sample up to every limit: the evaluation keeps a part of
    # the time.
    def reinforce():
        columns, seen, lines = run_stage(bench, "rl", out, 0.75 * bench.seconds_left())
        row = {**columns, **describe_stage(bench, "rl", lines, columns["wall_s"])}
        describe_rollouts(bench, lines, seen["phases"])
        return row

    def evaluate():
        return run_stage(bench, "eval", out, bench.seconds_left() - 2)[0]

    bench.attempt("stages", "rl", reinforce)
    bench.attempt("stages", "eval", evaluate)
