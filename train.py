"""train.py: the whole recipe. One loop; a stage only says where the batch and the loss come from.

    pretrain   next-token prediction on real Python (the standard library of this machine, or --data=DIR), short window
    long       the same with the window stretched by YaRN
    sft        transcripts of a competent but sloppy expert in generated codebases
    rl         feature-deletion tasks in sandboxed codebases: grouped rollouts, hidden tests as reward, textual feedback
               distilled into the flagged turn, a nonlinear price on effort, self-summaries, a
               curriculum
    eval       held-out tasks before and after RL: table, summary.json, figures

Composer 2.5's order of things (cursor.com/blog/composer-2-5; Technical Report, arXiv 2603.24477):
continued pretraining at a short window, a long-context extension, a short SFT, reinforcement
learning. All sizes, rates and step counts here are ours.

    python train.py                                          everything, at the scale this machine carries
    python train.py --stage=rl --feedback=0 --out=out/plain --start_from=out/run     one stage, one technique off
    python train.py --resume                                 go on after Ctrl-C, SIGTERM or kill -9
    torchrun --nproc_per_node=8 train.py --stage=pretrain --ep=8 --cp=2     many GPUs, the same script (cp: not in rl)

Left out: data mixing, deduplication, multi-token prediction, and every private number.
"""

import contextlib
import ctypes
import difflib
import errno
import gc
import hashlib
import inspect
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
import warnings
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

# first: it says in one line what Windows lacks
from world.machine import MachineFailure, fcntl, owned_directory, resource
import eval
import feedback_distill
import hsdp
import length_penalty
import rollout
import summarize
import synth_tasks
from moe import (
    Model,
    ModelConfig,
    balance,
    fast_dtype,
    filled,
    load_model,
    parse_json,
    read_config,
    write_checkpoint,
)
from muon import Muon, check_parameters


@dataclass(frozen=True)
class Config:
    # ---- what and where
    stage: str = "all"  # all, pretrain, long, sft, rl or eval
    scale: str = "auto"  # laptop, gpu or tiny; auto = gpu where CUDA is, else laptop
    # checkpoints, logs and figures; the same command again goes on where it stopped
    out: str = "out/run"
    # folder of the run whose previous stage this stage starts from (default: out)
    start_from: str = ""
    resume: bool = False  # go on with the run in out (the same command does so too)
    # folder of Python files to pretrain on (default: this Python's standard library)
    data: str = ""
    # folder of a published checkpoint to start from instead of noise; the model's sizes are then
    # its own
    init_from: str = ""
    # write the run in out to this folder in the published format, and nothing else: its last stage
    # or --stage
    export: str = ""
    # file of tasks made by synth_tasks.py --repo (default: generated codebases)
    tasks: str = ""
    seed: int = 1337
    device: str = "auto"  # cpu, cuda or auto
    dtype: str = "auto"  # of matrix products: float32, bfloat16 or auto
    # as they are kept; bfloat16: five sixths of the memory, and updates are rounded by chance
    weights: str = "float32"
    # 1: the blocks of pretrain and long by torch.compile. A step takes 14 % less on an H100,
    # compiling 80 s
    compile: bool = False
    # on CPU: started by itself, each with its share of cores and batch; at most one per core
    processes: int = 2
    save_every: int = 0  # steps between checkpoints (0: a tenth of the stage)

    # ---- model: see moe.ModelConfig
    vocab: int = 1024  # of the tokenizer that is trained on the run's own text
    dim: int = 128  # width of the residual stream
    layers: int = 4  # the first has a dense FFN
    heads: int = 4  # of attention
    experts: int = 8  # routed ones of a layer; one more is shared
    active: int = 2  # of them, for a token
    expert_ffn: int = 128  # hidden units of an expert
    dense_ffn: int = 384  # of the first layer's FFN
    kv_lora: int = 128  # width of the latent that the cache holds
    qk_nope: int = 32  # of a head's query and key, without rotation
    qk_rope: int = 16  # with it
    v_dim: int = 32  # of a head's values
    # short windows want fast rotations: with 10000, copying names is learned 100 steps later
    rope_theta: float = 1000.0
    balance_rate: float = 2e-3  # of the routers' biases per step

    # ---- optimizer
    optimizer: str = "muon"  # muon (matrices) with adamw (the rest), or adamw for all
    # of Muon's matrices: an update has RMS 0.2 * lr. At 0.02 the laptop model never learns to copy
    # names
    lr: float = 0.006
    # of embeddings, head, gains, router; of everything when optimizer=adamw
    adam_lr: float = 3e-3
    # of Muon's matrices: what a step takes off, as a share of the rate
    weight_decay: float = 0.01
    clip: float = 1.0  # gradient norm
    warmup: float = 0.05  # fraction of the stage's steps
    decay: float = 0.4  # last fraction, falling linearly to a tenth

    # ---- batches
    # of a stage; each has its own default, see STAGES and STAGE_SCALES
    steps: int = 100
    context: int = 256  # tokens of a sequence
    batch_tokens: int = 4096  # per step, over all ranks
    micro_tokens: int = 4096  # per forward
    # of a layer only the input is kept, the rest computed again in the backward: memory for a third
    # more work
    recompute: bool = False
    # share of pretrain's and sft's steps with a shorter window: a quarter of it, then half
    grow: float = 0.25
    yarn: float = 2.0  # window stretch of the long stage

    # ---- sft
    demos: int = 12000  # distinct expert transcripts
    sloppy: float = 1.0  # how often the expert errs
    hints: float = 0.5  # of its wrong tool calls: replaced by a hint and the right call
    # of its right turns: a hint above them too, so that it means nothing but tools
    neutral_hints: float = 0.05
    # weight of the names and constants it wrote, while the window is short: what tests decide on
    copy_loss: float = 4.0
    # of generated tasks in sft, from 0 on, and in a curriculum at first; it goes beyond
    levels: int = 6

    # ---- rl
    tasks_per_step: int = 8  # over all ranks
    group: int = 8  # rollouts per task
    temperature: float = 0.95  # of rollouts, in training and evaluation
    # tokens guessed ahead while sampling: only time and the rounding of bf16 depend on it
    draft: int = 3
    kl: float = 0.0  # weight of the k1 penalty against the policy that RL started from
    length: float = 64.0  # L, the constant that replaces each rollout's own length
    replay: bool = True  # router replay
    # generation processes beside each training process; 0: it samples and updates in turn
    workers: int = 0
    # 1, for the clock: each step's rollouts again with every answer of a tool remembered (log:
    # tools_s)
    time_tools: bool = False
    # with workers: by how many updates at most a token's policy may lag behind the one it trains
    staleness: int = 1
    feedback: float = 0.15  # weight of the targeted distillation, 0 = off
    # what hints speak about in sft and rl, a list: communication, code_style
    habits: str = "unavailable_tool"
    divergence: str = "reverse"  # forward, reverse or jsd
    teacher: str = "ema"  # current, ema or frozen
    teacher_rate: float = 0.1  # ema: this share of the new weights per step
    length_penalty: float = 0.03  # weight of C(effort), 0 = off
    penalty_k: float = 1.0  # C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)): how soon it bends
    penalty_q: float = 0.5  # ... and how much: 0 is linear
    summarize: bool = True  # self-summaries when the context passes the trigger
    trigger: float = 0.7  # of the window
    window: int = 512  # context of an agent in sft, rl and evaluation
    turns: int = 40  # of an agent in all
    # tasks of the levels that are neither won nor lost; 0: a fixed mix
    curriculum: bool = True
    hardest: int = 6  # the hardest level of rl: a fixed mix has all up to it

    # ---- parallel (torchrun)
    cp: int = 1  # ranks that share a sequence
    ep: int = 1  # ranks that share a layer's experts
    # copies of the dense weights, each sharded over the ranks of its own
    dp_replicate: int = 1

    # ---- evaluation
    eval_levels: int = 6  # levels of evaluation, from 0 on
    eval_tasks: int = 24  # per level
    eval_samples: int = 2  # per task


START = time.time()
ORDER = ["pretrain", "long", "sft", "rl"]
SCALES = {
    "tiny": dict(
        vocab=512,
        dim=64,
        layers=2,
        heads=2,
        experts=4,
        expert_ffn=64,
        dense_ffn=128,
        kv_lora=32,
        demos=64,
        tasks_per_step=2,
        group=2,
        eval_tasks=1,
        eval_samples=1,
        batch_tokens=2048,
        micro_tokens=2048,
    ),
    "laptop": dict(),
    "gpu": dict(
        vocab=8192,
        dim=640,
        layers=10,
        heads=10,
        experts=8,
        expert_ffn=512,
        dense_ffn=2048,
        kv_lora=256,
        qk_nope=64,
        qk_rope=32,
        v_dim=64,
        rope_theta=10000.0,
        context=1024,
        batch_tokens=65536,
        micro_tokens=32768,
        window=4096,
        tasks_per_step=32,
        group=16,
        lr=0.005,
        adam_lr=1e-3,
        demos=20000,
    ),
}
STAGES = {
    "pretrain": dict(steps=120),
    "long": dict(steps=20, lr=0.004, adam_lr=2e-3, grow=0.0),
    "sft": dict(steps=1300, micro_tokens=2048),
    "rl": dict(
        steps=60,
        micro_tokens=2048,
        optimizer="adamw",
        adam_lr=5e-4,
        weight_decay=0.0,
        clip=0.5,
        decay=0.3,
    ),
    "eval": dict(),
}
# Of a published model (ours): its weights are good, so all move at AdamW's rate of fine-tuning (0.2
# * lr = adam_lr), its biases stay, and nothing teaches it to copy.
FINE = dict(lr=5e-5, adam_lr=1e-5, balance_rate=0.0, grow=0.0, copy_loss=1.0)
FINE_TUNING = {
    "pretrain": FINE,
    "long": FINE,
    "sft": FINE | dict(steps=200),
    "rl": FINE | dict(lr=5e-6, adam_lr=1e-6),
    "eval": FINE,
}
# gpu: the standard library is read about eight times
STAGE_SCALES = {("tiny", stage): dict(steps=4) for stage in ORDER} | {
    ("gpu", "pretrain"): dict(steps=300),
    ("gpu", "long"): dict(steps=40),
    ("gpu", "sft"): dict(steps=150, micro_tokens=32768),
    ("gpu", "rl"): dict(steps=100, micro_tokens=32768),
}
NOT_COMPARED = {
    "processes",
    "out",
    "export",
    "start_from",
    "stage",
    "resume",
    "device",
    "compile",
    "save_every",
    "cp",
    "ep",
    "dp_replicate",
    "micro_tokens",
    "recompute",
    "eval_levels",
    "eval_tasks",
    "eval_samples",
    "workers",
    "staleness",
}

# Fields of Config in earlier versions: the value at which they changed nothing, and the file that
# makes the change now. A run on disk that has them at this value goes on.
OLD_FLAGS = {
    "std_norm": (False, "experiments/objective.py"),
    "length_norm": (False, "experiments/objective.py"),
    "mask_overlong": (False, "experiments/objective.py"),
    "imitate": (False, "experiments/sdft.py"),
    "reward": (1.0, "experiments/sdft.py"),
    "placebo": ("none", "experiments/teachers.py"),
    "restless": (0.0, "experiments/penalty.py"),
    "easy": (0.0, "experiments/penalty.py"),
    "full_price": (False, "experiments/penalty.py"),
    "distinct": (0, "experiments/tasks.py"),
    "truncate": (False, "experiments/summary.py"),
    "learn_summaries": (True, "experiments/summary.py"),
    "commands": (0, "experiments/summary.py"),
    "short": (0.0, "experiments/summary.py"),
    "harden": (True, "experiments/hacking.py"),
    "documented": (True, "experiments/hacking.py"),
    "context_loss": (0.3, "train.py, as CONTEXT_LOSS"),
}
# The change of the recipe that is in force in this process, as module:function; none: "". It is
# kept in every checkpoint, so that a run goes on with the change that it was begun with.
PATCH = ""


# ---------------------------------------------------------------- command line


def stop(message):
    """Bad input: one line, exit code 2, nothing touched."""
    # A bar that is on the screen ends first, so that the line begins on its own.
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"train.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def parse(argv):
    """--name=value or --name value for every field of Config -> dict of what was given"""
    kinds, given, words = {f.name: f.type.__name__ for f in fields(Config)}, {}, list(argv)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            print(__doc__ + describe_flags())
            raise SystemExit(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in OLD_FLAGS:
            stop(f"--{name} is no flag any more: what it did stands in {OLD_FLAGS[name][1]}")
        if not word.startswith("--") or name not in kinds:
            near = difflib.get_close_matches(name.lstrip("-"), kinds, 1, 0)
            stop(f"unknown flag {word!r}" + (f"; did you mean --{near[0]}?" if near else ""))
        kind = kinds[name]
        if not equals:
            alone = not words or words[0].startswith("--")
            if alone and kind != "bool":
                stop(f"--{name} takes a value: --{name}=...")
            value = "1" if alone else words.pop(0)
        given[name] = convert(name, kind, value)
    return given


def describe_flags():
    """Every field of Config as a flag with its default and, from the comment above or behind it, what it does"""
    text, said = [], []
    for line in inspect.getsource(Config).splitlines()[2:]:
        line = line.strip()
        field = re.match(r"(\w+): \w+ = (.*?)(?:  # (.*))?$", line)
        if line.startswith("# ---- "):
            text.append(f"\n{line[7:]}")
        elif line.startswith("# "):
            said.append(line[2:])
        elif field:
            flag, words = f"  --{field[1]}={field[2]}", " ".join([*said, field[3] or ""])
            # The explanation beside the flag, or under it where the flag is long; as wide as a screen.
            text += textwrap.wrap(
                words, 100, initial_indent=f"{flag:28s}", subsequent_indent=" " * 28
            ) or [flag]
            said = []
    return "\n".join(text)


def convert(name, kind, value):
    if kind == "bool":
        if value.lower() not in ("0", "1", "true", "false"):
            stop(f"--{name} takes 0 or 1, not {value!r}")
        return value.lower() in ("1", "true")
    try:
        number = {"int": int, "float": float, "str": str}[kind](value)
    except ValueError:
        stop(f"--{name} takes {'a whole number' if kind == 'int' else 'a number'}, not {value!r}")
    if number == "":
        stop(
            f"--{name}= is empty (a variable that is not set?): give a value, or leave the flag away"
        )
    if kind != "str" and not (0 <= number < float("inf")):
        stop(f"--{name} must be a finite number >= 0, not {value}")
    # its inverse and its products must be numbers in fp32, too
    if kind == "float" and number and not 1e-30 <= number <= 1e30:
        stop(f"--{name} must be 0 or from 1e-30 to 1e30, not {value}")
    return number


def configure(given, stage, stages=()):
    """Defaults, then the scale, then the stage, then the stage at that scale, then fine-tuning
    where it is that, then the command line: each wins over those before it. stages: all that this
    command runs (default: this one)."""
    scale, fitted = given.get("scale", "auto"), {}
    if scale == "auto":
        scale, fitted = scale_of_machine(given, stage)
    if scale not in SCALES:
        stop(f"unknown scale {scale!r}: {', '.join(SCALES)}")
    fine = FINE_TUNING[stage] if given.get("init_from") else {}
    merged = {
        **SCALES[scale],
        **STAGES[stage],
        **STAGE_SCALES.get((scale, stage), {}),
        **fine,
        **fitted,
        **given,
        "scale": scale,
    }
    # compared on resume: however it is spelled, one folder is one
    for name in ("init_from", "tasks", "data"):
        if merged.get(name):
            merged[name] = str(Path(merged[name]).resolve())
    config = replace(Config(), **merged)
    check_values(config)
    check_together(config, given, stage)
    check_optimizer_flags(config, given, stage, stages)
    return config


def this_card():
    """torch's properties of the GPU of this process: name, total_memory in bytes, ..."""
    return torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", 0)))


def uses_card(given):
    return torch.cuda.is_available() and given.get("device") != "cpu"


def describe_card(config):
    """One line at the start: which model on which GPU, and in what"""
    card, (shape, shapes) = this_card(), hsdp.parameter_shapes("gpu")
    gigabytes, small = card.total_memory / 1e9, fast_dtype("cuda") == torch.float32
    if config.scale != "gpu":
        return f"{card.name}, {gigabytes:.0f} GB, is too small for the gpu scale: this is the laptop's model, on the GPU"
    planned = (
        sum(
            hsdp.memory(
                shape, shapes, hsdp.Layout(), hsdp.Step(tokens=config.micro_tokens)
            ).values()
        )
        / 1e9
    )
    return (
        f"scale gpu, {sum(map(math.prod, shapes.values())) / 1e6:.1f}M parameters, on {card.name}: {config.micro_tokens:,} tokens "
        f"at a time, about {planned:.0f} of {gigabytes:.0f} GB planned"
        + ", in float32: this card has no bf16" * small
    )


def scale_of_machine(given, stage):
    """--scale=auto -> (scale, {flag: value}): laptop without a GPU; with one the gpu scale, in as
    large micro-batches as its memory carries, and the laptop's model on a card that is too small
    for it."""
    if not uses_card(given):
        return "laptop", {}
    gigabytes = this_card().total_memory / 1e9
    config, shapes = hsdp.parameter_shapes("gpu")
    most = STAGE_SCALES.get(("gpu", stage), {}).get("micro_tokens", SCALES["gpu"]["micro_tokens"])
    tokens, _ = hsdp.largest_micro_batch(config, shapes, gigabytes, most)
    return ("gpu", {"micro_tokens": tokens}) if tokens else ("laptop", {})


def check_values(config):
    """Each flag by itself"""
    for name, allowed in dict(
        optimizer=("muon", "adamw"),
        divergence=("forward", "reverse", "jsd"),
        device=("auto", "cpu", "cuda"),
        teacher=("current", "ema", "frozen"),
        dtype=("auto", "float32", "bfloat16"),
        weights=("float32", "bfloat16"),
    ).items():
        if getattr(config, name) not in allowed:
            stop(f"--{name} takes one of {', '.join(allowed)}, not {getattr(config, name)!r}")
    for name in (
        "steps",
        "context",
        "batch_tokens",
        "micro_tokens",
        "tasks_per_step",
        "group",
        "cp",
        "ep",
        "dp_replicate",
        "dim",
        "layers",
        "heads",
        "active",
        "expert_ffn",
        "dense_ffn",
        "kv_lora",
        "qk_nope",
        "v_dim",
        "yarn",
        "window",
        "turns",
        "demos",
        "eval_tasks",
        "eval_samples",
    ):
        if getattr(config, name) < 1:
            stop(f"--{name} must be at least 1")
    # temperature: who never varies has nothing to learn from
    for name in ("clip", "length", "rope_theta", "temperature"):
        if getattr(config, name) == 0:
            stop(
                f"--{name} must be above 0"
                + " (python eval.py RUN --temperature=0 is for greedy evaluation)"
                * (name == "temperature")
            )
    # whatever the dtype: a run may be read in another one
    for name in ("dim", "expert_ffn"):
        if getattr(config, name) % 8 and not config.init_from:
            stop(
                f"--{name}={getattr(config, name)}: a multiple of 8, grouped products of experts read rows of 16 bytes"
            )
    # an update is divided by it
    if config.temperature < 1e-3:
        stop(
            f"--temperature={config.temperature:g}: at least 0.001 (python eval.py RUN --temperature={config.temperature:g} samples colder)"
        )
    if config.rope_theta < 1.1:
        stop(
            f"--rope_theta={config.rope_theta:g}: at least 1.1, pairs of dimensions turn slower one by one"
        )
    if config.qk_rope % 2:
        stop(f"--qk_rope={config.qk_rope}: an even number, RoPE turns pairs")
    if config.seed >= 1 << 32:
        stop(f"--seed={config.seed}: below 2^32")
    if config.device == "cuda" and not torch.cuda.is_available():
        stop("--device=cuda: there is no such device here")
    if (
        config.dtype == "bfloat16"
        and uses_card({"device": config.device})
        and fast_dtype("cuda") == torch.float32
    ):
        stop(
            f"--dtype=bfloat16: {this_card().name} has no bf16 (compute capability 8.0 has): leave the flag away, for float32"
        )
    for name in (
        "hints",
        "neutral_hints",
        "grow",
        "trigger",
        "teacher_rate",
        "warmup",
        "decay",
    ):
        if getattr(config, name) > 1:
            stop(f"--{name}={getattr(config, name):g}: a share, at most 1")
    if config.hardest >= len(synth_tasks.LEVELS):
        stop(f"--hardest={config.hardest}: levels go from 0 to {len(synth_tasks.LEVELS) - 1}")
    for name in ("levels", "eval_levels"):
        if not 0 < getattr(config, name) <= len(synth_tasks.LEVELS):
            stop(
                f"--{name}={getattr(config, name)}: at least 1, and there are {len(synth_tasks.LEVELS)} levels"
            )
    if not set(habits(config)) <= set(feedback_distill.REMINDERS):
        stop(
            f"--habits={config.habits}: a list, with commas, of {', '.join(feedback_distill.REMINDERS)}"
        )


def check_together(config, given, stage):
    """What goes with what"""
    # context: of training, too
    for name in sorted((SIZES - {"context"} | {"vocab"}) & set(given)) if config.init_from else ():
        stop(
            f"--{name} beside a published model: its sizes are its own ({config.init_from}/config.json); leave the flag away"
        )
    for name, its in dict(
        feedback=feedback_distill.KNOBS, length_penalty=("penalty_k", "penalty_q")
    ).items():
        for idle in sorted(set(its) & set(given)) if getattr(config, name) == 0 else ():
            stop(f"--{idle} says nothing with --{name}=0")
    if config.summarize and config.trigger >= 0.875:
        stop(
            f"--trigger={config.trigger:g}: below .875, since query and summary take the window's last eighth"
        )
    if config.tasks and "hardest" in given:
        stop(
            "--hardest goes with generated tasks: of --tasks all are taken, each once before any comes again"
        )
    if "staleness" in given and not config.workers:
        stop(
            "--staleness goes with --workers: without them the policy that samples is the one that learns"
        )
    if stage == "rl" and config.group == 1 and not config.feedback:
        stop(
            "--group=1 has nothing to learn from: a rollout's worth is its reward less the group's mean; take more, or --feedback"
        )
    if config.time_tools and (config.workers or config.tasks):
        stop(
            "--time_tools goes with generated tasks and --workers=0: what tools answered is remembered there"
        )
    if stage == "rl" and config.cp > 1:
        stop(
            "--cp is for pretrain, long and sft; in rl take --ep or --dp_replicate (run the stages one by one with --stage)"
        )
    if config.compile and dtype_of(config) == torch.float32:
        stop(
            "--compile=1 goes with products in bfloat16: torch compiles the experts' grouped products in no other dtype"
        )
    if "teacher_rate" in given and config.teacher != "ema":
        stop(
            f"--teacher_rate says nothing with --teacher={config.teacher}: only ema follows at a rate"
        )
    check_windows(config, stage)
    if config.active > config.experts:
        stop(f"--active={config.active} experts of --experts={config.experts}: at most all of them")


def device_of(config):
    return (
        config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    )


def dtype_of(config):
    """Of matrix products"""
    return fast_dtype(device_of(config)) if config.dtype == "auto" else getattr(torch, config.dtype)


def text_window(config):
    """Tokens of a window of pretrain or long"""
    return int(config.context * (config.yarn if config.stage == "long" else 1))


def check_windows(config, stage):
    """The ranks of --cp share a window in 2 * cp equal parts. Found out by the validation, it would
    cost the stage."""
    parts = 2 * config.cp
    if stage in TEXT and config.cp > 1 and text_window(config) % parts:
        flags = "--context" if stage == "pretrain" else "--context times --yarn"
        stop(
            f"--cp={config.cp} cuts a window into {parts} equal parts, and {flags} is {text_window(config)}: take a multiple of {parts}"
        )


# whose peak is a group's rate, by its algorithm
RATE_FLAGS = {"muon": "lr", "adamw": "adam_lr"}
TRAINING, TEXT = ("pretrain", "long", "sft", "rl"), ("pretrain", "long")
READ_BY = {
    name: stages
    for stages, names in {  # flags that only some stages look at
        TEXT: "data compile",
        ("pretrain", "long", "sft"): "batch_tokens grow",
        TRAINING: "seed steps optimizer lr adam_lr weight_decay clip warmup decay balance_rate micro_tokens recompute save_every",
        ("sft",): "demos sloppy hints neutral_hints copy_loss",
        ("sft", "rl"): "levels habits",
        ("rl",): "tasks_per_step group kl length replay workers time_tools staleness "
        "feedback divergence teacher teacher_rate length_penalty penalty_k penalty_q curriculum hardest",
        ("rl", "eval"): "tasks temperature draft",
        ("sft", "rl", "eval"): "window turns summarize trigger",
        ("eval",): "eval_levels eval_tasks eval_samples",
    }.items()
    for name in names.split()
}


def check_optimizer_flags(config, given, stage, stages):
    """--lr and --weight_decay are of Muon's matrices. Where AdamW moves all weights they would
    change nothing: refused, unless a later or earlier stage of the same command has Muon."""
    muon = any(
        {**STAGES[other], **given}.get("optimizer", Config.optimizer) == "muon"
        for other in stages or (stage,)
        if other in TRAINING
    )
    if config.optimizer == "adamw" and not muon and stage in TRAINING:
        if "lr" in given:
            stop(
                f"--lr={config.lr:g} is of Muon's matrices, and with --optimizer=adamw, as here, there are none: give --adam_lr"
            )
        if "weight_decay" in given:
            stop(
                f"--weight_decay={config.weight_decay:g} is of Muon's matrices, and with --optimizer=adamw, as here, there are none: "
                "leave it away, or take --optimizer=muon"
            )


def idle_flags(config, given):
    """What was given by hand and changes nothing in this stage -> {flag: why}"""
    stage = config.stage
    idle = {
        name: f"of {' and '.join(READ_BY[name])}"
        for name in given
        if stage not in READ_BY.get(name, (stage,))
    }
    adamw = config.optimizer == "adamw" and stage in TRAINING
    rl = stage == "rl"
    reasons = {
        "lr weight_decay": "AdamW moves all weights, by --adam_lr" if adamw else "",
        "copy_loss": "it goes with --grow" if stage == "sft" and not config.grow else "",
        "trigger": "--summarize=0" if not config.summarize else "",
        "levels": (
            "not with --tasks or --curriculum=0"
            if rl and (config.tasks or not config.curriculum)
            else ""
        ),
        "balance_rate": (
            "biases stay where the experts of sampling are replayed" if rl and config.replay else ""
        ),
        "eval_levels eval_tasks": "not with --tasks" if config.tasks else "",
        "experts active expert_ffn balance_rate": (
            "the only layer is dense" if config.layers == 1 and not config.init_from else ""
        ),
        "processes": (
            "torchrun or the GPU decides"
            if "PLAIN_REPLICAS" not in os.environ
            and ("RANK" in os.environ or torch.cuda.is_available() and config.device != "cpu")
            else ""
        ),
    }
    for names, why in reasons.items():
        idle |= {name: why for name in names.split() if why and name in given}
    return idle


def say_idle_flags(stages, configs, given):
    """One line about the flags that change nothing in any of the stages to come, and one for each
    in which a rate does not reach."""
    idle = {stage: idle_flags(configs[stage], given) for stage in stages}
    nowhere = {
        name: why
        for name, why in idle[stages[0]].items()
        if all(name in idle[stage] for stage in stages)
    }
    lines = (
        [
            "in no stage of this command: "
            + ", ".join(f"--{name} ({why})" for name, why in nowhere.items())
        ]
        if nowhere
        else []
    )
    for stage in stages:
        rates = [
            name
            for name in ("lr", "weight_decay")
            if name in idle[stage] and name not in nowhere and stage in TRAINING
        ]
        lines += (
            [f"not in {stage}: " + ", ".join(f"--{name} ({idle[stage][name]})" for name in rates)]
            if rates
            else []
        )
    if lines and int(os.environ.get("RANK", 0)) == 0:
        tqdm.write("\n".join(f"flags that change nothing {line}" for line in lines))


def habits(config):
    return config.habits.split(",")


SIZES = {f.name for f in fields(ModelConfig)} & {f.name for f in fields(Config)} - {"vocab"}


def model_config(config, vocab):
    """The model of a run from noise. With one expert per token a gate over the sum of the gates
    would always be 1, and the loss would teach the router nothing: then the gate is the router's
    score itself."""
    return ModelConfig(
        vocab=vocab, norm_gates=config.active > 1, **{name: getattr(config, name) for name in SIZES}
    )


def same_model(config, origin, given):
    """A stage goes on with the weights of the one before: in the same model, or it would be another
    function of them."""
    made, flags = given["config"], SIZES | {"vocab"} | (
        {"yarn"} if config.stage != "long" else set()
    )
    other = {
        name: made[name]
        for name in sorted(flags)
        if name in made and made[name] != getattr(config, name)
    }
    if other:
        words = (
            [f"--scale={made['scale']}"]
            if made["scale"] != config.scale
            else [f"--{name}={value}" for name, value in other.items()]
        )
        stop(
            f"{origin} was made with {', '.join(f'{name}={value}' for name, value in other.items())}: give {' '.join(words)} here, too"
        )


def same_gates(config, path, given):
    """Of a version that divided a single gate by itself: the same weights with other gates would be
    another function."""
    if given["model"].get("norm_gates", True) != (config.active > 1):
        stop(
            f"{path} was made with --active=1 and a gate that is always 1, which teaches its routers nothing: begin anew in another --out"
        )


# ---------------------------------------------------------------- data

HELD_OUT = 1 / 20  # of the files
SKIP = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "__pycache__",
    "lib2to3",
    "pydoc_data",
    "encodings",
    "turtledemo",
    "idlelib",
}


def python_sources(folder):
    """-> (training texts, held-out texts): real Python, tests and generated tables left out. About
    every 20th file is held out; which ones depends on each file's own path below the folder, so a
    file that is added or removed moves no other."""
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        stop(f"--data={folder}: no such folder")
    # a link may lead nowhere
    own = lambda p: p.is_file() and not SKIP & set(p.relative_to(root).parts[:-1])
    paths = sorted(p for p in root.rglob("*.py") if own(p) and p.stat().st_size < 200_000)
    texts = {
        p.relative_to(root).as_posix(): p.read_text(encoding="utf-8", errors="ignore")
        for p in paths
    }
    texts = {name: text for name, text in texts.items() if text.strip()}
    if len(texts) < 2:
        stop(f"--data={folder}: fewer than two Python files there")

    # A number from 0 to 1 for each path. A small folder may have no file below the threshold, or no
    # other: one of each is needed.
    place = {
        name: int.from_bytes(
            hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:7], "big"
        )
        / 2**56
        for name in texts
    }
    held = {name for name in texts if place[name] < HELD_OUT}
    if not 0 < len(held) < len(texts):
        held = {min(texts, key=place.get)}
    return [text for name, text in texts.items() if name not in held], [
        text for name, text in texts.items() if name in held
    ]


def digest_texts(train, held):
    """Of all that a run on these texts depends on: their bytes, their order, and which are held
    out"""
    found = hashlib.sha256()
    for text in [f"{len(train)} and {len(held)}", *train, *held]:
        data = text.encode("utf-8", "surrogatepass")
        found.update(len(data).to_bytes(8, "big") + data)
    return found.hexdigest()


def train_tokenizer(config):
    """BPE on a sample of the pretraining text and of transcripts, so that both are short."""
    rng = random.Random(config.seed)
    texts, _ = python_sources(config.data)
    rng.shuffle(texts)
    sample, size = [], 0
    for text in texts:
        sample.append(text[:20_000])
        size += len(sample[-1])
        if size > 800_000:
            break
    return rollout.Tokenizer.train(
        sample + synth_tasks.example_texts(1500, config.seed), config.vocab
    )


def same_data(config, state, now):
    """Refuses to go on with other texts than those the stage began with. state: of its source; now:
    their digest"""
    # a version before this one kept none
    if state.get("data", now) != now:
        folder = config.data or "this Python's standard library"
        stop(
            f"{folder} no longer holds the text that {config.out}/{config.stage} was begun with: put it back, or take another --out"
        )


class Text:
    """pretrain and long: windows of one long stream. The batch of a step is a function of (seed,
    stage, step) alone."""

    def __init__(self, run):
        self.run, config = run, run.config
        self.window = text_window(config)
        tokenizer = run.tokenizer
        stream = lambda texts: torch.cat(
            [torch.tensor([*tokenizer.encode(text), tokenizer.id["<|text|>"]]) for text in texts]
        )
        train, held = python_sources(config.data)
        self.data = digest_texts(train, held)
        self.train, self.held = stream(train), stream(held)
        if min(len(self.train), len(self.held)) < 2 * self.window + 2:
            stop(
                f"--data={config.data}: {len(self.train)} tokens are too few for windows of {self.window}"
            )

    def losses(self, step, log):
        """Yields the micro-batch losses of one step; their sum is the mean over the whole batch of
        all ranks."""
        config, fold = self.run.config, 2 * self.run.config.cp
        window = self.window // shortened(step, config) // fold * fold or self.window
        rng = np.random.default_rng((config.seed, ORDER.index(config.stage), step))
        starts = rng.integers(
            0, len(self.train) - window - 1, self.rows(config.batch_tokens // window)
        )
        yield from self.cross_entropy(self.train, starts, window, log)

    def rows(self, n):
        """n windows, or a few more: as many for each rank, since all have to run the same number of
        forwards."""
        return max(1, -(-n // self.run.data)) * self.run.data

    def cross_entropy(self, stream, starts, window, log):
        run, total = self.run, len(starts) * window
        mine = run.share(starts)
        size = max(1, run.config.micro_tokens // window)
        for i in range(0, len(mine), size):
            rows = torch.stack([stream[s : s + window + 1] for s in mine[i : i + size]]).to(
                run.device, non_blocking=True
            )
            batch = run.shard({"tokens": rows[:, :-1], "targets": rows[:, 1:]})
            loss = -run.model.logprobs(run.hidden(batch), batch["targets"]).sum() / total
            log["loss"] = log.get("loss", 0) + loss.detach()
            log["tokens"] = log.get("tokens", 0) + batch["tokens"].numel()
            yield loss

    @torch.no_grad()
    def validate(self):
        """Mean loss on held-out files, fixed windows."""
        self.run.model.eval()  # the routers count no load
        log = {}
        starts = np.linspace(
            0, len(self.held) - self.window - 2, self.rows(max(8, 32768 // self.window))
        ).astype(int)
        for _ in self.cross_entropy(self.held, starts, self.window, log):
            pass
        return {"held_out_loss": self.run.sum(log["loss"])}

    after_step = lambda self: None
    tensors = lambda self: {}

    def state_dict(self):
        return {"data": self.data}

    def load_state_dict(self, state):
        same_data(self.run.config, state, self.data)


# Weight, in sft, of the tokens that the expert did not write (tool outputs, tasks): copying is
# learned from them too.
CONTEXT_LOSS = 0.3


class Demonstrations:
    """sft: the expert's transcripts. The loss reported is of the tokens that a policy would have
    sampled."""

    def __init__(self, run):
        self.run, config = run, run.config
        mine = make_demonstrations(
            config, run.tokenizer, run.compact, run.share(range(config.demos)), run.bar
        )
        made = sorted(run.gather(mine), key=lambda pair: pair[0])
        self.episodes = [e for _, episodes in made for e in episodes]
        if not self.episodes:
            stop(f"--window={config.window}: none of {config.demos} demonstrations fits")
        left_out = sum(not episodes for _, episodes in made)
        if left_out:
            run.say(
                f"--window={config.window}: {left_out} of {config.demos} demonstrations do not fit and are left out"
            )
        lengths, self.batches = np.array([len(e) for e in self.episodes]), []
        parts = [shortened(step, config) for step in range(config.steps)]
        for part in sorted(set(parts), reverse=True):
            fits = np.flatnonzero(lengths <= max(lengths.max() // part, lengths.min()))
            groups = length_groups(
                lengths[fits], config.batch_tokens // 2, 2 * parts.count(part), (config.seed, part)
            )
            self.batches += [[fits[a], fits[b]] for a, b in zip(groups[::2], groups[1::2])]
        trimmed = {
            token: word.decode(errors="ignore").strip(" ._`")
            for word, token in run.tokenizer.ranks.items()
        }
        marked = lambda words: torch.tensor(
            [trimmed.get(token) in words for token in range(run.model.config.vocab)],
            device=run.device,
        )
        self.names, self.constants = marked(synth_tasks.WORDS - synth_tasks.CONSTANTS), marked(
            synth_tasks.CONSTANTS
        )

    def losses(self, step, log):
        config, run, groups = (
            self.run.config,
            self.run,
            [[self.episodes[i] for i in group] for group in self.batches[step]],
        )
        total = sum(int(rollout.flatten(e)[1].sum()) for group in groups for e in group)
        mine = [
            (e, 1.0)
            for g, group in enumerate(groups)
            for j, e in enumerate(group)
            if (2 * j + g) % run.data == run.meshes.data_rank
        ]
        for batch in run.micro_batches(mine, spare=(groups[0][0], 1.0)):
            logp = run.model.logprobs(
                run.hidden(batch), batch["targets"], where=batch["inside"] > 0
            )
            copied = (self.names | self.constants)[batch["targets"]] & (shortened(step, config) > 1)
            weight = torch.where(copied, config.copy_loss, 1.0) * batch["mask"]
            weight = weight + CONTEXT_LOSS * (1 - batch["mask"]) * batch["inside"]
            loss = -(logp * weight).sum() * batch["real"] / total
            log["loss"] = (
                log.get("loss", 0) - (logp.detach() * batch["mask"]).sum() * batch["real"] / total
            )
            log["tokens"] = log.get("tokens", 0) + batch["real_tokens"]
            yield loss

    @torch.no_grad()
    def validate(self):
        """Are names and constants copied? Their mean probabilities where a careful expert writes
        them, in held-out tasks."""
        config, run = self.run.config, self.run
        run.model.eval()  # the routers count no load
        chains = [
            rollout.demonstrate(
                task,
                run.tokenizer,
                random.Random(task.instance_id),
                agent_limits(config),
                0.0,
                run.compact,
            )
            for task in run.share(eval.held_out(12, range(config.levels)))
        ]
        total = dict.fromkeys(("names", "constants"), torch.zeros(2, dtype=torch.float64))
        episodes = [(e, 1.0) for chain in chains for e in chain.episodes if len(e) <= config.window]
        for batch in run.micro_batches(episodes, spare=(self.episodes[0], 1.0)):
            p = run.model.logprobs(run.hidden(batch), batch["targets"]).exp()
            for name, those in (("names", self.names), ("constants", self.constants)):
                where = those[batch["targets"]] & (batch["mask"] > 0)
                total[name] = (
                    total[name] + torch.stack([p[where].sum(), where.sum()]).cpu() * batch["real"]
                )
        sums = {name: [run.sum(x) for x in pair] for name, pair in total.items()}
        return {name: p / count for name, (p, count) in sums.items() if count}

    after_step = lambda self: None
    state_dict = lambda self: {}
    load_state_dict = lambda self, state: None
    tensors = lambda self: {}


def shortened(step, config):
    """What the window is divided by: 4, then 2, then 1. Sequence-length warm-up (arXiv 2108.06084):
    heads that look back and copy form several times sooner where there is less to look at; without
    it they came late in some runs and in one not at all."""
    return 4 >> min(2, int(2 * step / (config.grow * config.steps))) if config.grow else 1


def length_groups(lengths, tokens, number, seed):
    """Groups of indices of like length, `tokens` in each when padded: little padding, and few
    different shapes."""
    rng, groups = np.random.default_rng(seed), []
    while len(groups) < number:
        pools = np.array_split(
            rng.permutation(len(lengths)), max(1, lengths.sum() // (32 * tokens))
        )
        for pool in pools:
            pool, cut = list(pool[np.argsort(lengths[pool], kind="stable")]), []
            while pool:
                n = max(1, tokens // filled(lengths[pool[-1]]))
                cut.append(pool[-n:])
                del pool[-n:]
            groups += [cut[i] for i in rng.permutation(len(cut))]
    return groups[:number]


def agent_limits(config):
    return rollout.Limits(config.window, config.turns)


def make_demonstrations(config, tokenizer, compact, numbers, bar):
    """-> (number, episodes) pairs. Levels in equal shares, each task from its own seed; a
    summarised chain gives several training sequences."""
    pairs = []
    for i in bar(numbers, "demonstrations"):
        rng = random.Random(f"{config.seed}/demo/{i}")
        # rl's begin at seed * 1000003
        task = make_task(config, i % config.levels, ((config.seed or 1 << 32) << 24) + i)
        pairs.append((i, demonstrate(config, task, rng, tokenizer, compact)))
    return pairs


def demonstrate(config, task, rng, tokenizer, compact, **more):
    """What the sloppy expert does with a task, with hints above some of its turns -> the episodes
    that can be learned from: they fit the window, and something was done in them. more: see
    rollout.demonstrate."""
    remind = {habit: feedback_distill.REMINDERS[habit] for habit in habits(config)}
    chain = rollout.demonstrate(
        task,
        tokenizer,
        rng,
        agent_limits(config),
        config.sloppy,
        compact,
        remind,
        config.hints,
        config.neutral_hints,
        **more,
    )
    return [
        episode
        for episode in chain.episodes
        if len(episode) <= config.window and any(t.role == "assistant" for t in episode.turns)
    ]


def make_task(config, level, seed):
    """A generated task, in the world that the run trains in."""
    return synth_tasks.make_task(level, seed)


def digest(path):
    """Of the bytes of a file; "" of none"""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


class Reinforcement:
    """rl: sample groups, reward, push. One update per batch. Without workers the sampling policy is
    the policy; with them a token's is up to `staleness` updates older, and that is kept small, not
    corrected (stated): no ratio, no clip either way."""

    def __init__(self, run):
        self.run, config, self.asked, self.drawn = run, run.config, {}, {}
        self.folder, self.ahead = owned_directory("weights", tempfile.gettempdir()), (
            config.staleness if config.workers else 0
        )
        self.publisher = rollout.Publisher(
            self.folder.name, run.model.config, run.dtype, shared=config.workers > 0
        )
        self.workers = rollout.Workers(
            config.workers,
            dict(
                folder=self.folder.name,
                config=run.model.config,
                dtype=run.dtype,
                device=str(next(run.model.parameters()).device),
                tokenizer=run.tokenizer,
                group=config.group,
                limits=agent_limits(config),
                compact=run.compact,
                temperature=config.temperature,
                draft=config.draft,
                rows=min(128, -(-config.tasks_per_step // run.data) * config.group),
            ),
        )
        tasks = synth_tasks.read_tasks(config.tasks) if config.tasks else []
        tasks = self.with_room(tasks)
        self.file = digest(config.tasks)
        random.Random(config.seed).shuffle(tasks)
        self.tasks = {
            level: [task for task in tasks if task.level == level]
            for level in {task.level for task in tasks}
        }
        levels = min(config.levels, config.hardest + 1) if config.curriculum else config.hardest + 1
        self.curriculum = synth_tasks.Curriculum(
            range(levels),
            config.seed,
            config.curriculum,
            config.hardest,
            sizes={level: len(tasks) for level, tasks in self.tasks.items()},
        )
        self.teacher = (
            feedback_distill.Teacher(run.model, config.teacher, config.teacher_rate)
            if config.feedback
            else None
        )
        self.reference = feedback_distill.Teacher(run.model, "frozen") if config.kl else None
        self.weights = length_penalty.Weights()
        self.budget = length_penalty.effort_budget(config.window, config.turns, self.weights)

    def with_room(self, tasks):
        """The given tasks without those whose statement leaves no room for a turn: rollouts of them
        would count as failed. One line says which they are."""
        run, window = self.run, self.run.config.window
        fits = [
            rollout.leaves_room(run.tokenizer, task, agent_limits(run.config)) for task in tasks
        ]
        names = [task.instance_id for task, room in zip(tasks, fits) if not room]
        if names and len(names) == len(tasks):
            stop(f"--window={window}: none of the tasks leaves room for a turn")
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            run.say(
                f"--window={window} leaves no room for a turn in {len(names)} of {len(tasks)} tasks, which are left out: "
                f"{', '.join(name[:60] for name in names[:3])}{more}"
            )
        return [task for task, room in zip(tasks, fits) if room]

    def draw(self, step):
        """This step's tasks (equal on all ranks), easy ones first. What was drawn ahead is
        remembered, by a checkpoint too."""
        rng = random.Random(f"{self.run.config.seed}/rl/{step}")
        if step not in self.drawn:
            self.drawn[step] = sorted(
                self.curriculum.next(rng) for _ in range(self.run.config.tasks_per_step)
            )
        drawn = self.drawn[step]
        return [
            self.tasks[level][number] if self.tasks else make_task(self.run.config, level, number)
            for level, number in drawn
        ]

    def compute_reward(self, chain):
        """The reward: hidden tests of what was submitted, minus the price of effort. A chain that a
        limit cut short has submitted nothing."""
        config = self.run.config
        chain.solved = chain.solved and chain.finished
        chain.stats["effort"] = float(length_penalty.effort(chain.stats, self.weights))
        chain.reward = float(
            length_penalty.shaped_reward(
                float(chain.solved),
                chain.stats["effort"],
                config.length_penalty,
                config.penalty_k,
                config.penalty_q,
                self.pays_whole_budget(chain),
                self.budget,
            )
        )

    def pays_whole_budget(self, chain):
        """Whatever a limit cut short does: so being cut off is never a bargain."""
        return not chain.finished

    def losses(self, step, log):
        run, config = self.run, self.run.config
        start = time.time()
        log.update(self.publisher.publish(step, run.full_state()))
        for later in range(step, min(step + self.ahead, config.steps - 1) + 1):
            # weights at least as new as this step's: so staleness is bounded
            if later not in self.asked:
                tasks = self.draw(later)
                self.asked[later] = self.workers.submit(
                    run.share(tasks),
                    run.share(range(len(tasks))),
                    config.seed * 1_000_003 + later,
                )
        asked, _ = self.asked.pop(step), self.drawn.pop(step)
        groups = self.leave_out_failed(self.workers.collect(asked), log)
        for group in groups:
            for chain in group:
                self.compute_reward(chain)
        if step == 0 and not run.sum(sum(c.stats["turns"] for g in groups for c in g)):
            stop(f"--window={config.window}: none of the tasks leaves room for a turn")
        for level, solved, total in sorted(
            run.gather([(g[0].task.level, sum(c.solved for c in g), len(g)) for g in groups])
        ):
            self.curriculum.update(level, solved, total)
        log["rollout_s"] = time.time() - start
        if config.time_tools:
            self.workers.collect(asked)
            run.gather([])  # for the slowest rank, as before
            log["tools_s"] = 2 * log["rollout_s"] - (time.time() - start)
        lag = rollout.staleness(groups, step)
        log.update(
            stale=run.sum(lag.sum()) / max(1, run.sum(len(lag))),
            stalest=max(run.gather([int(lag.max(initial=0))])),
            restarts=run.sum(self.workers.restarts),
        )
        self.describe(groups, log)
        self.write(groups, step + 1)
        yield from self.learn(groups, log)

    def leave_out_failed(self, groups, log):
        """-> the groups without the rollouts that the machine failed: no reward, no gradient, no
        part in a mean. They are counted in the log and told in one line. Where nothing is left on
        any rank, the run ends with the cause."""
        kept, lost = rollout.judged(groups)
        causes = self.run.gather([chain.failure for chain in lost])
        total = self.run.config.tasks_per_step * self.run.config.group
        log["machine_failures"] = len(causes)
        self.judged = total - len(causes)
        # for a rank that has nothing left to learn from
        self.spare = groups[0][0].episodes[0] if groups else None
        if causes:
            self.run.say(f"rl: {rollout.failures_line(causes, total)}")
        if not self.judged:
            stop(
                "no rollout of this step could be played on this machine; free what the line above names, and go on with --resume"
            )
        return kept

    def learn(self, groups, log):
        """Policy gradient over all episodes, and on flagged turns the divergence from the hinted
        teacher: its sum over the flagged tokens, over their number or that of the rollouts, so that
        the last few flagged turns do not drown the reward. In the log, gap: by how many nats hints
        make what was flagged less likely. Where that is nothing, nothing can be distilled."""
        run, config = self.run, self.run.config
        items, hints = [], {}
        for group in groups:
            for chain, advantage in zip(group, self.group_advantages(group)):
                flagged = feedback_distill.detect(chain, habits(config)) if config.feedback else []
                for e, episode in enumerate(chain.episodes):
                    items.append((episode, advantage))
                    hints[id(episode)] = [
                        self.splice(chain, hint) for hint in flagged if hint.episode == e
                    ]
        rollouts = self.judged
        normaliser = rollouts * config.length
        targets = run.sum(
            sum(end - first for e, _ in items for _, _, (first, end), _ in hints[id(e)])
        )
        mismatch = kl = read = gap = 0.0
        for batch in run.micro_batches(items, spare=items[0] if items else (self.spare, 0.0)):
            hinted = (
                [(i, *hint) for i, e in enumerate(batch["episodes"]) for hint in hints[id(e)]]
                if batch["real"]
                else []
            )
            taught = (
                feedback_distill.pack(batch["episodes"], hinted, keep_empty=True).to(run.device)
                if config.feedback
                else None
            )
            expected = (
                feedback_distill.mute(self.teacher(taught), taught.muted)
                if config.feedback
                else None
            )
            read += taught.real_tokens if config.feedback else 0
            reference = self.reference_logprobs(batch) if config.kl else None
            hidden = run.hidden(batch)
            logp = run.model.logprobs(
                hidden, batch["targets"], config.temperature, batch["mask"] > 0
            )
            loss = batch["real"] * self.policy_objective(logp, batch, normaliser, reference)
            # Sums stay where they are until the step's end: reading one here would wait for the
            # GPU.
            difference = ((logp.detach() - batch["logprobs"]).abs() * batch["mask"]).sum()
            mismatch += batch["real"] * difference.double()
            if config.feedback:
                student = feedback_distill.mute(
                    run.model.logits(hidden[taught.student_row, taught.student_position]),
                    taught.muted,
                )
                distance = feedback_distill.feedback_loss(
                    student,
                    expected,
                    max(rollouts, int(targets)),
                    kind=config.divergence,
                    token_cap=2.0,
                )
                loss, kl = loss + config.feedback * distance, kl + distance.detach().double()
                before, after = (
                    x.detach().log_softmax(-1).gather(1, taught.token[:, None]).sum()
                    for x in (student, expected)
                )
                gap += (before - after).double()
            log["tokens"] = log.get("tokens", 0) + batch["real_tokens"]
            yield loss
        sampled = run.sum(sum(c.stats["sampled"] for g in groups for c in g))
        log.update(
            mismatch=run.sum(mismatch) / max(1, sampled),
            feedback_kl=run.sum(kl),
            flagged=int(targets),
            teacher_tokens=run.sum(read),
            gap=run.sum(gap) / max(1, targets),
        )

    def group_advantages(self, group):
        """(G,) What each rollout of a group is worth: its reward less the group's mean"""
        return rollout.advantages([chain.reward for chain in group])

    def policy_objective(self, logp, batch, normaliser, reference):
        """The loss whose gradient is the policy's, over one micro-batch. logp, reference: (B, T)"""
        return rollout.policy_loss(logp, batch, normaliser, reference, self.run.config.kl)

    def hint_text(self, chain, hint):
        """What the teacher reads above the flagged turn"""
        return hint.text

    def splice(self, chain, hint):
        """-> the flagged turn's number, the hint's ids, what of the turn's tokens it speaks about,
        and which token it never does"""
        tokenizer = self.run.tokenizer
        turn = chain.episodes[hint.episode].turns[hint.turn]
        return (
            hint.turn,
            feedback_distill.hint_tokens(tokenizer, self.hint_text(chain, hint), turn),
            feedback_distill.span(tokenizer, turn, hint),
            feedback_distill.muted(tokenizer, hint.kind),
        )

    def after_step(self):
        if self.teacher:
            self.teacher.update()

    def reference_logprobs(self, batch):
        with torch.no_grad(), self.reference.worn():
            return self.run.model.logprobs(
                self.run.hidden(batch),
                batch["targets"],
                self.run.config.temperature,
                batch["mask"] > 0,
            )

    def write(self, groups, step):
        """The best and the worst rollout of the group whose rewards differ most: what this step
        learns from, for the reader."""
        if self.run.rank or not groups:
            return
        group, lines = max(groups, key=lambda g: np.ptp([c.reward for c in g])), []
        for chain in (max(group, key=lambda c: c.reward), min(group, key=lambda c: c.reward)):
            flags = {(h.episode, h.turn): [h.kind] for h in feedback_distill.detect(chain)}
            lines += rollout.transcript(
                chain, self.run.tokenizer, flags, group=[float(f"{c.reward:.6g}") for c in group]
            )
        try:
            rollout.write_transcripts(self.run.out / "transcripts.jsonl", step, lines)
        # it is there to be read: no reason to lose the run
        except OSError as error:
            self.run.say(f"transcripts.jsonl: step {step} could not be written: {error.strerror}")

    def describe(self, groups, log):
        """Means over the rollouts of all ranks."""
        rows = self.run.gather(
            [
                {
                    **c.stats,
                    "group": (self.run.rank, i),
                    "level": c.task.level,
                    "solved": c.solved,
                    "reward": c.reward,
                    "cheats": rollout.cheats(c),
                    "suspicious": rollout.suspicious(c),
                    "reads": "read_file" in c.task.tools,
                    "blind": rollout.blind(c),
                    "probe": summarize.probe(c),
                    "decode_steps": c.steps,
                    "flaws": {
                        hint.kind
                        for hint in feedback_distill.detect(c, tuple(feedback_distill.REMINDERS))
                    },
                    "files": hash(frozenset(c.files.items())),
                }
                for i, g in enumerate(groups)
                for c in g
            ]
        )
        mean = lambda f: float(np.mean([f(row) for row in rows]))
        rewards = {}
        for row in rows:
            rewards.setdefault(row["group"], []).append(
                (row["reward"], row["solved"], row["files"])
            )
        for key in (
            "reward",
            "solved",
            "effort",
            "sampled",
            "decode_steps",
            "turns",
            "finished",
            "summaries",
            "level",
            "blind",
        ):
            log[key] = mean(lambda row: row[key])
        log.update(
            {
                habit: mean(lambda row: habit in row["flaws"])
                for habit in ("communication", "code_style")
            }
        )
        # rollouts whose task filled the window
        log["no_turn"] = sum(row["turns"] == 0 for row in rows)
        readers = [row for row in rows if row["reads"]]
        for key in ("cheats", "suspicious"):
            log[key] = sum(row[key] for row in readers) / max(1, len(readers))
        probe = {
            key: sum(row["probe"][key] for row in rows)
            for key in ("summaries", "tokens", "left", "named")
        }
        log["named"], log["summary_tokens"] = probe["named"] / max(1, probe["left"]), probe[
            "tokens"
        ] / max(1, probe["summaries"])
        log.update(
            bad_tool=mean(lambda row: row["bad_tools"] > 0),
            best=float(np.mean([max(solved for _, solved, _ in g) for g in rewards.values()])),
            different=float(
                np.mean([len({files for _, _, files in g}) / len(g) for g in rewards.values()])
            ),
            equal=float(
                np.mean([len({reward for reward, _, _ in g}) == 1 for g in rewards.values()])
            ),
        )
        log["wrong_calls_per_turn"] = sum(row["bad_tools"] for row in rows) / max(
            1, sum(row["turns"] for row in rows)
        )

    def validate(self):
        self.workers.close()
        return {}

    def state_dict(self):
        return {**self.curriculum.state_dict(), "ahead": dict(self.drawn), "file": self.file}

    def load_state_dict(self, state):
        self.curriculum.load_state_dict(state)
        self.drawn = dict(state.get("ahead", {}))

    def tensors(self):
        """What belongs in a checkpoint beside the model: the weights of the teacher and of the
        reference, cut as the model's."""
        held = {"teacher": self.teacher, "reference": self.reference}
        return {
            f"{role}.{name}": w
            for role, one in held.items()
            if one
            for name, w in one.weights.items()
        }


# ---------------------------------------------------------------- a run

STAGE = {"pretrain": Text, "long": Text, "sft": Demonstrations, "rl": Reinforcement}


class Run:
    """What the stages share: where this process stands among the ranks, the model, the tokenizer,
    the window's rules."""

    def __init__(self, config):
        self.config, self.out = config, Path(config.out)
        self.device = device_of(config)
        self.rank, self.world = hsdp.connect(self.device, seconds=1800)
        try:
            self.meshes = hsdp.make_meshes(
                self.world,
                config.cp,
                config.ep,
                config.dp_replicate,
                device=self.device,
                seconds=1800,
            )
        except ValueError as error:
            stop(str(error))
        self.data = self.meshes.layout.data
        # nothing is cut: every rank holds all
        self.replicas = self.meshes.layout.shard == 1 and config.ep == 1
        self.dtype = dtype_of(config)
        self.compact = summarize.compact(asdict(config))
        self.tokenizer = self.model = None

    def bar(self, iterable, name):
        return tqdm(
            iterable, desc=f"{name:>14}", disable=self.rank > 0, leave=False, dynamic_ncols=True
        )

    def say(self, text):
        if self.rank == 0:
            with contextlib.suppress(OSError):  # whoever read along is gone
                tqdm.write(text)

    # ranks
    def share(self, rows):
        return rows[self.meshes.data_rank :: self.data]

    def sum(self, number):
        return float(hsdp.total(torch.as_tensor(number, dtype=torch.float64, device="cpu")))

    def gather(self, items):
        """The items of all data ranks, on every rank."""
        if self.data == 1:
            return items
        lists = [None] * self.world
        dist.all_gather_object(lists, items)
        return [item for part in lists[:: self.config.cp] for item in part]

    def shard(self, batch):
        """This rank's part of the sequence, and where it stands in it."""
        T = batch["tokens"].shape[1]
        to_device = lambda t: t.to(self.device, non_blocking=True)  # see moe.to_device
        part = {
            k: hsdp.shard_sequence(to_device(v), self.meshes) if torch.is_tensor(v) else v
            for k, v in batch.items()
        }
        return {**part, "positions": hsdp.positions(T, self.meshes, self.device)}

    def micro_batches(self, items, spare):
        """(episode, number) pairs of this rank -> packed batches of about micro_tokens tokens,
        short episodes together. Every rank makes as many: one that has fewer goes on with `spare`
        at weight zero."""
        items, batches = sorted(items, key=lambda item: len(item[0])), []
        while items:
            n = max(1, self.config.micro_tokens // filled(len(items[-1][0])))
            batches.append(items[-n:])
            del items[-n:]
        most = max(self.gather([len(batches)]))
        for i in range(most):
            part = batches[i] if i < len(batches) else [spare]
            batch = rollout.pack(
                [e for e, _ in part], [a * (i < len(batches)) for _, a in part], 64 * self.config.cp
            )
            # a spare: its tokens are computed and count nowhere
            if i >= len(batches):
                batch["tokens"] = torch.full_like(batch["tokens"], -1)
            # The ranks of a sequence count an equal share of it each, so that the sum over all
            # ranks is right.
            real_tokens = sum(len(e) for e, _ in part) / self.config.cp if i < len(batches) else 0
            yield {
                **self.shard(batch),
                "episodes": [e for e, _ in part],
                "real": i < len(batches),
                "real_tokens": real_tokens,
            }

    # model
    def hidden(self, batch):
        replay = batch.get("experts") if self.config.replay else None
        return self.model(batch["tokens"], batch.get("positions"), replay)

    def full_state(self):
        return hsdp.full_state(self.model)

    def build(self, tokenizer, shape=None):
        """The same weights on every rank and in every layout, drawn on the CPU from the seed.
        shape: a published model's; where it is cut nothing is drawn, since a checkpoint will fill
        it."""
        torch.manual_seed(self.config.seed)
        self.tokenizer = tokenizer
        with torch.device("meta" if shape and not self.replicas else "cpu"):
            model = Model(shape or model_config(self.config, tokenizer.vocab))
        if not shape and self.config.stage != "pretrain":
            model.extend(self.config.yarn)
        if not next(model.parameters()).is_meta:
            self.model = self.lay_out(model.to(self.device))
        else:
            self.model = self.lay_out(model).to_empty(device=self.device)
            # its table of angles was on the meta device, too
            self.model.extend(shape.yarn_factor)

    def lay_out(self, model):
        """The dtype of its products and of its weights, its compiled blocks, its cut over the
        ranks."""
        model.compute(self.dtype).recompute = self.config.recompute
        for p in model.parameters() if self.config.weights == "bfloat16" else ():
            # not model.bfloat16(): the routers' counts are numbers, too
            p.data = p.data.bfloat16()
        # elsewhere every batch has another shape
        if self.config.compile and self.config.stage in ("pretrain", "long"):
            # Variants (dense or with experts, short windows and long) are counted over the whole
            # process, and from the eighth on torch gives up without a word: each stage begins to
            # count anew.
            torch.compiler.reset()
            # fp32 is for what must not be rounded
            warnings.filterwarnings("ignore", message=".*TensorFloat32.*")
            for block in model.layers:
                block.compile()
        wire = None if self.dtype == torch.float32 else self.dtype
        return (
            hsdp.same_weights(model)
            if self.replicas
            else hsdp.parallelize(model, self.meshes, wire)
        )

    def read(self, folder, shape):
        """A published model, of which each rank reads its own part; the tokenizer first, since it
        is there that folders differ."""
        self.tokenizer = rollout.Tokenizer.read(folder, shape.vocab)
        self.model = load_model(
            folder,
            getattr(torch, self.config.weights),
            self.device,
            lambda model: hsdp.own_parts(self.lay_out(model)),
        )

    def make_optimizer(self):
        """Muon takes every matrix and stack of matrices, AdamW the embedding, the head, the gains
        and the routers."""
        config, matrices, rest = self.config, [], []
        for name, p in self.model.named_parameters():
            plain = (
                p.ndim < 2
                or any(word in name for word in ("embed", "head", "router"))
                or config.optimizer == "adamw"
            )
            (rest if plain else matrices).append((name, p))
        groups = [dict(params=rest, algorithm="adamw", lr=config.adam_lr, weight_decay=0.0)]
        if matrices:
            groups.append(
                dict(
                    params=matrices,
                    algorithm="muon",
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                )
            )
        optimizer = Muon(
            groups,
            replicas=dist.group.WORLD if self.replicas and self.world > 1 else None,
            ns_dtype=self.dtype,
        )
        check_parameters(optimizer, self.model.named_parameters())
        hsdp.keep_gradients_in_fp32(self.model)
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
        return optimizer


def schedule(step, config):
    """Share of the peak learning rate: a linear warm-up, a plateau, a linear fall to a tenth."""
    up = (step + 1) / max(1, config.warmup * config.steps)
    down = (config.steps - step) / max(1, config.decay * config.steps)
    return min(1.0, up, max(0.1, down))


def compared(config):
    return {k: v for k, v in asdict(config).items() if k not in NOT_COMPARED}


def open_checkpoint(path):
    try:
        return hsdp.peek(path)
    except ValueError as error:
        stop(str(error))


def places(stage, out, start_from):
    """Where the stage's checkpoint stands and where that of the one before, from which it starts
    (None: it is the first)"""
    before = list(STAGES)[: list(STAGES).index(stage)][-1:]
    return Path(out, stage), Path(start_from or out, before[0]) if before else None


def began_from(given, stage):
    """The published model that stands behind the checkpoint with which this stage goes on: what
    began from one stays one, also where --init_from is not said again."""
    there = [
        path
        for path in places(stage, given.get("out", Config.out), given.get("start_from"))
        if path and hsdp.exists(path)
    ]
    return open_checkpoint(there[0])["config"].get("init_from", "") if there else ""


def published_shape(config, given=None):
    """The sizes of the published model, which has positions for windows up to its own. given: a
    checkpoint of a run from it"""
    shape = (
        ModelConfig(**given["model"])
        if given
        else read_config(Path(config.init_from, "config.json"))[0]
    )
    flag = {"pretrain": "--context", "long": "--context times --yarn"}.get(config.stage, "--window")
    window = {"pretrain": config.context, "long": int(config.context * config.yarn)}.get(
        config.stage, config.window
    )
    if window > shape.window:
        raise ValueError(
            f"{flag} is {window}, but {config.init_from} has positions for {shape.window} tokens: at most so many"
        )
    # of fine-tuning it is 0: someone has asked for it
    if config.balance_rate and shape.scoring != "sigmoid":
        raise ValueError(
            f"--balance_rate={config.balance_rate:g}: the routers of {config.init_from} have no biases; leave the flag away"
        )
    return shape


def check_patch(extra, out):
    """A stage goes on with the change of the recipe that it was begun with. extra: of its
    checkpoint"""
    for name, (default, place) in OLD_FLAGS.items():
        made = extra["config"].get(name, default)
        if made != default:
            stop(
                f"{out} was made with {name}={made}, no flag any more: what it did stands in {place}; take another --out"
            )
    made = extra.get("patch", "")
    if made != PATCH:
        how = f"python -m experiments.runner --arm={made} -- ..." if made else "python train.py"
        stop(f"{out} was made by {how}: go on with that, or take another --out")


def train(config, interrupted):
    """One stage: build, load, loop, save. True if it ran to its end."""
    stage, (out, origin) = config.stage, places(config.stage, config.out, config.start_from)
    extra = open_checkpoint(out) if hsdp.exists(out) else None
    given = extra or (open_checkpoint(origin) if origin and hsdp.exists(origin) else None)
    if given and not extra and given["config"].get("init_from", "") != config.init_from:
        stop(
            f"{origin} did not begin from --init_from={config.init_from}: take another --out, or leave the flag away"
        )
    if given and not config.init_from:
        if not extra:
            same_model(config, origin, given)
        same_gates(config, out if extra else origin, given)
    run = Run(config)
    if extra:
        for name, value in compared(config).items():
            made = (
                f"with {name}={extra['config'][name]}, not {value}"
                if name in extra["config"]
                else f"by a version without --{name}"
            )
            if extra["config"].get(name, ...) != value:
                begun = extra["config"]["start_from"] or config.out
                again = (
                    f" (--stage={stage} --start_from={begun} begins from its stage before)"
                    if origin
                    else ""
                )
                stop(f"{out} was made {made}: take another --out{again}")
        check_patch(extra, out)
        if extra["source"].get("file", digest(config.tasks)) != digest(config.tasks):
            stop(
                f"{config.tasks} is no longer the file that {out} was begun with: take another --out"
            )
        # finished or not: a result is called by what it was made from
        if config.data and stage in ("pretrain", "long"):
            same_data(config, extra["source"], digest_texts(*python_sources(config.data)))
        if extra["step"] == config.steps:
            begun = extra["config"]["start_from"]
            run.say(f"{stage}: finished already ({out})" + f", begun from {begun}" * bool(begun))
            return True
    if not given and origin and (config.start_from or not config.init_from):
        stop(
            f"--stage={stage} starts from {origin}, which is not there: run the {origin.name} stage first, or give --start_from=FOLDER"
        )
    try:
        shape = published_shape(config, given) if config.init_from else None
        if given:
            run.build(rollout.Tokenizer(**given["tokenizer"]), shape)
        elif shape:
            run.read(config.init_from, shape)
        else:
            run.build(train_tokenizer(config))
    except (ValueError, OSError) as error:
        stop(str(error))
    optimizer = run.make_optimizer()
    if given and not extra and (label := eval.unfinished(origin)):
        run.say(f"{stage} begins from {origin}, which is {label}")
    try:
        if given and not extra:
            hsdp.load(origin, run.model)
        source = STAGE[stage](run)
        if extra:
            source.load_state_dict(extra["source"])
            hsdp.load(out, run.model, optimizer, source.tensors())
    except ValueError as error:
        stop(str(error))
    with hsdp.one_fate():
        return loop(run, source, optimizer, extra["step"] if extra else 0, interrupted, out)


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
)


def export(config, given):
    """A stage of the run as the folder of a published model, weights as the run kept them or in
    --weights; what else belongs to it from where it began, or, of a run from noise, its own
    tokenizer. All of that is looked at before the first file is written."""
    for name in sorted(set(given) - {"export", "out", "stage", "weights"}):
        stop(f"--{name} does nothing beside --export, which takes --out, --stage and --weights")
    target = Path(config.export)
    try:
        stage = (
            eval.last_stage(config.out) if config.stage == "all" else Path(config.out, config.stage)
        )
        label = eval.unfinished(stage)
        model, tokenizer, saved = eval.load(stage)
        source, end = saved["init_from"] and Path(saved["init_from"]), tokenizer.id["<|end|>"]
        others = sorted(tokenizer.ends - {end})
        # the one that turns are written with comes first
        ends = [end, *others] if others else end
        ids, files, more = {}, [], {}
        if source:
            if not source.is_dir():
                stop(
                    f"{source}, which this run began from, is not there: its tokenizer's files belong to an export, so put it back"
                )
            rollout.Tokenizer.read(source, model.config.vocab)
            raw = read_config(source / "config.json")[1].raw
            ids = {name: raw[name] for name in ("bos_token_id", "pad_token_id") if name in raw}
            files = [
                path
                for name in (*TOKENIZER_FILES, *tokenizer_code(source))
                for path in source.glob(name)
                if path.is_file()
            ]
            if (source / "generation_config.json").is_file():
                more = parse_json(
                    (source / "generation_config.json").read_bytes(),
                    source / "generation_config.json",
                )
        dtype = getattr(torch, given.get("weights", saved["weights"]))
        write_checkpoint(target, model, dtype, extra={**ids, "eos_token_id": ends})
        for path in files:
            shutil.copyfile(path, target / path.name)
        # its own end of a turn may be another than the one trained
        if more:
            (target / "generation_config.json").write_text(
                json.dumps({**more, "eos_token_id": ends}, indent=1)
            )
        if not source:
            tokenizer.write(target)
    except (ValueError, OSError) as error:
        stop(str(error))
    print(
        f"{target}: "
        + ", ".join(sorted(p.name for p in target.iterdir()))
        + f"\n{stage} is {label}" * bool(label)
    )


def tokenizer_code(folder):
    """The Python files behind a tokenizer: those that auto_map names, and what they import from
    beside them. Copied, never run; only plain names, so nothing from outside the folder."""
    path, found = folder / "tokenizer_config.json", set()
    raw = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    names = re.findall(r'"(\w+)\.\w+"', json.dumps(raw.get("auto_map")))
    while names:
        file = folder / f"{names.pop()}.py"
        if file.name not in found and file.is_file():
            found.add(file.name)
            names += re.findall(
                r"^\s*from \.(\w+) import", file.read_text(errors="ignore"), re.MULTILINE
            )
    return sorted(found)


def peak_memory():
    """Gigabytes this process has held at most."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1e9 if sys.platform == "darwin" else 1e6
    )


def trim():
    """Give freed memory back to the system. Every batch has other sizes, and glibc keeps the holes:
    gigabytes after minutes. Not after every short step: taking the pages again costs a third of
    it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


# more than there are signals on all ranks together
LOG_FAILED = 10**9


def loop(run, source, optimizer, step, interrupted, out):
    config, log_file = run.config, run.out / f"{run.config.stage}.jsonl"
    every = config.save_every or max(1, config.steps // 10)
    keep_lines(log_file, step) if run.rank == 0 else None
    # Closed whatever happens, so that what is said afterwards begins a line of its own.
    with tqdm(
        total=config.steps,
        initial=step,
        desc=f"{config.stage:>14}",
        disable=run.rank > 0,
        dynamic_ncols=True,
    ) as bar:
        while step < config.steps:
            start, log = time.time(), {}
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * schedule(step, config)
            rates = {
                RATE_FLAGS[group["algorithm"]]: group["lr"] for group in optimizer.param_groups
            }
            run.model.train()
            for loss in source.losses(step, log):
                loss.backward()
            if run.replicas:
                hsdp.sum_gradients(run.model)
            norm = hsdp.clip_grad_norm(run.model, config.clip)
            # nothing to learn from: AdamW's and Muon's memories would move on
            if norm != 0:
                optimizer.step()
            optimizer.zero_grad()
            worst = balance(run.model, bias_rate(run), hsdp.total)
            source.after_step()
            step += 1
            log = {
                "step": step,
                **{k: run.sum(v) if k in ("loss", "tokens") else v for k, v in log.items()},
                "norm": float(norm),
                "load": worst,
                **rates,
            }
            log["tokens_per_s"] = log["tokens"] / (time.time() - start)
            log["seconds"] = time.time() - start
            log["memory"] = run.sum(peak_memory())
            if step == config.steps:
                # once: without gradients a block would be compiled again
                with torch.compiler.set_stance("force_eager"):
                    log.update(source.validate())
            problem = ""
            try:
                report(run, bar, log, log_file)
            except OSError as error:
                problem = hsdp.explain_write_error(error)
            # A signal may reach one rank only, and only the first one writes the log: one sum tells
            # all ranks of both.
            code = run.sum(len(interrupted) + LOG_FAILED * bool(problem))
            if code >= LOG_FAILED:
                raise hsdp.SaveFailed(
                    f"{log_file}: step {step} could not be written: {problem}; what was saved before is whole"
                )
            stopping = code > 0
            if step % every == 0 or step == config.steps or stopping:
                extra = {
                    "config": asdict(config),
                    "model": vars(run.model.config),
                    "tokenizer": run.tokenizer.state_dict(),
                    "step": step,
                    "source": source.state_dict(),
                    "patch": PATCH,
                }
                hsdp.save(out, run.model, optimizer, extra, source.tensors())
            if step % 20 == 0 or log["seconds"] > 2:
                trim()
            if stopping:
                return False
    return True


def bias_rate(run):
    """How far a step moves the routers' biases. Not at all where softmax routers have none, nor
    where the experts of sampling are replayed: what is counted then is what was sampled, for the
    log; moving the bias would part the trainer from the sampler."""
    config = run.config
    replayed = config.stage == "rl" and config.replay
    return 0.0 if replayed or run.model.config.scoring != "sigmoid" else config.balance_rate


def keep_lines(path, step):
    """Cuts a log at the checkpoint of `step`: a killed run may have gone on beyond it, and those
    steps come again. By the steps that the lines name, since a log may have lost its beginning.
    Each step is kept once, in order; a torn line is left out."""
    kept = {}
    for line in path.read_text(errors="replace").split("\n") if path.exists() else ():
        try:
            number = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
        if 1 <= number <= step:
            kept[number] = line
    part = Path(f"{path}.part")
    part.write_text("".join(kept[number] + "\n" for number in sorted(kept)))
    part.replace(path)


COLUMNS = {
    "loss": "{:7.4f}",
    "reward": "{:6.3f}",
    "solved": "{:6.3f}",
    "bad_tool": "{:6.3f}",
    "effort": "{:6.2f}",
    "turns": "{:5.2f}",
    "feedback_kl": "{:7.4f}",
    "held_out_loss": "{:7.4f}",
    "names": "{:5.3f}",
    "constants": "{:5.3f}",
    "norm": "{:7.3f}",
    "load": "{:5.2f}",
    "lr": "{:7.5f}",
    "adam_lr": "{:7.5f}",
    "memory": "{:4.1f}",
    "tokens_per_s": "{:8.0f}",
    "seconds": "{:6.2f}",
}


def report(run, bar, log, path):
    """One aligned line per step, the same keys as one JSON line, and the bar."""
    if run.rank:
        return
    with open(path, "a") as file:
        file.write(json.dumps({k: float(f"{float(v):.9g}") for k, v in log.items()}) + "\n")
    words = [
        f"{k} {eval.format_number(float(log[k]), form)}" for k, form in COLUMNS.items() if k in log
    ]
    # whoever read along is gone: no reason to end the run
    with contextlib.suppress(OSError):
        tqdm.write(f"{run.config.stage:>9} {log['step']:5d}  " + "  ".join(words))
    bar.update()


# ---------------------------------------------------------------- evaluation and figures


def load_published(config, device):
    """As eval.load, of the folder of a published model: whole on every rank"""
    try:
        shape = published_shape(config)
        tokenizer = rollout.Tokenizer.read(config.init_from, shape.vocab)
        return (
            load_model(config.init_from, getattr(torch, config.weights), device).requires_grad_(
                False
            ),
            tokenizer,
            asdict(config),
        )
    except (ValueError, OSError) as error:
        stop(str(error))


def evaluate(config, given):
    """Held-out tasks before and after RL (before any training: the published model itself) ->
    table, summary.json, figures. Every rank plays its share of the tasks."""
    run, out = Run(config), Path(config.out)
    trained = hsdp.exists(out / "rl")
    names = {"before RL" if trained else "after SFT": out / "sft", "after RL": out / "rl"}
    first = next(iter(names))
    if not hsdp.exists(names[first]):
        begun = open_checkpoint(out / "rl")["config"]["start_from"] if trained else ""
        names[first] = Path(config.start_from or begun or config.out) / "sft"
    before, names = names[first], {name: path for name, path in names.items() if hsdp.exists(path)}
    policy = (
        load_published(config, run.device)
        if config.init_from and not config.start_from and not names
        else None
    )
    if not names and not policy:
        stop(f"--stage=eval: neither {before} nor {out}/rl is there")
    names = names or {"published": Path(config.init_from)}

    # What is shown belongs to what was run: a stage that is not at its end is called so, and what
    # is evaluated is said.
    labelled = {}
    for name, path in names.items():
        label = eval.unfinished(path) if not policy else ""
        labelled[f"{name} ({label})" if label else name] = path
    names = labelled
    run.say(
        "evaluated: "
        + ", ".join(f"{name} = {path}" for name, path in names.items())
        + (f"; there is no {out}/rl" if not trained else "")
    )
    last = list(names.values())[-1]
    # one window, one limit of turns, ... for all of them
    world = policy[2] if policy else eval.load(last)[2]
    if config.init_from not in ("", world["init_from"]):
        stop(
            f"{last} did not begin from --init_from={config.init_from}: take another --out, or leave the flag away"
        )
    for name in sorted(SIZES | {"vocab", "yarn"}) if not policy else ():
        if given.get(name, world.get(name)) != world.get(name):
            stop(
                f"--{name}={given[name]}: {last} was made with {world.get(name)}, and so it is evaluated"
            )
    for name in ("window", "turns", "draft", "summarize", "trigger"):
        if given.get(name, world[name]) != world[name]:
            stop(
                f"--{name}={given[name]}: {last} was made with {world[name]}, and so it is evaluated"
            )
        config = replace(config, **{name: world[name]})
    # this may be asked for otherwise
    config = replace(
        config, temperature=given.get("temperature", world.get("temperature", config.temperature))
    )
    kept, made_from = out / "summary.json", (
        {name: when_saved(path) for name, path in names.items()} if not policy else {}
    )
    if kept.exists() and trained:
        # or a full disk left half of it
        with contextlib.suppress(ValueError, KeyError, TypeError):
            done = json.loads(kept.read_text())
            asked = (
                "tasks",
                "temperature",
                "start_from",
                "eval_levels",
                "eval_tasks",
                "eval_samples",
            )
            if (
                all(done["config"][name] == getattr(config, name) for name in asked)
                and done["file"] == digest(config.tasks)
                and done["made_from"] == made_from
            ):
                return run.say(done["table"])
    held_out = (
        synth_tasks.read_tasks(config.tasks)
        if config.tasks
        else eval.held_out(config.eval_tasks, range(config.eval_levels))
    )
    policies = {}
    for name, path in run.bar(list(names.items()), "evaluation"):
        model, tokenizer, saved = policy or eval.load(path, run.device)
        origin = Path(saved["start_from"] or saved["out"], "sft")
        # of a published model, one more may not fit
        compare = saved["stage"] == "rl" and hsdp.exists(origin) and not saved["init_from"]
        began = eval.load(origin, run.device)[0].compute(run.dtype) if compare else None
        mine = eval.attempt(
            model.compute(run.dtype),
            tokenizer,
            world,
            run.share(held_out),
            config.eval_samples,
            temperature=config.temperature,
            numbers=run.share(range(len(held_out))),
            began=began,
        )
        policies[name] = run.gather(mine)
    memory = run.sum(peak_memory())
    if run.rank:
        return
    text = eval.table(policies, "given" if config.tasks else "held-out")
    minutes = (time.time() - START) / 60
    text += (
        f"\nthis command: {minutes:.1f} minutes, {memory:.1f} GB at most in {run.world} process"
        + "es" * (run.world > 1)
    )
    logs = {stage: eval.lines_of(out, stage) for stage in ORDER}
    ends = {stage: lines[-1] for stage, lines in logs.items() if lines}

    # The table first: it is what the hour was for, and a full disk or a broken matplotlib must not
    # cost it.
    print(f"\n{text}\n")
    try:
        eval.write_json(
            policies,
            out / "summary.json",
            {
                "table": text,
                "config": asdict(config),
                "stages": ends,
                "file": digest(config.tasks),
                "made_from": made_from,
            },
        )
    except OSError as error:
        print(
            f"train.py: the table above could not be kept in {out}/summary.json: {error.strerror}",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    problems = [
        eval.draw_safely(eval.draw, policies, out),
        eval.draw_safely(eval.draw_training, logs, out),
    ]
    figures = ", ".join(sorted(p.name for p in out.glob("*.png")))
    print("\n".join([f"{out}/summary.json and figures: {figures}", *filter(None, problems)]))


def when_saved(path):
    """When a checkpoint was written, which tells it from another that later stands in its place"""
    files = [Path(folder, "manifest.json") for folder in (path, f"{path}.old")]
    return next((str(file.stat().st_mtime_ns) for file in files if file.exists()), "")


# How this program is started; the patch of an experiment has a program of its own.
PROGRAM = [sys.executable, __file__]
STARTED = []  # by spread: the other processes


def leave(number, frame):
    """Ends an evaluation, which writes at its end and has nothing to save. The others first, so
    that they remove their workspaces too."""
    signal.signal(number, signal.SIG_IGN)
    for process in STARTED:
        process.send_signal(number)
    for process in STARTED:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    sys.exit(128 + number)


def spread(argv, config):
    """On CPU, one process per core does more than one process with a thread per core: what a small
    model costs is mostly the start of small operations. Starts the others once and makes this one
    rank 0 of plain replicas. Under torchrun: nothing."""
    cuda = torch.cuda.is_available() and config.device != "cpu"
    if "PLAIN_REPLICAS" not in os.environ and (
        "RANK" in os.environ or cuda or config.cp > 1 or config.ep > 1
    ):
        return config
    n = int(os.environ.get("PLAIN_REPLICAS", min(config.processes, torch.get_num_threads())))
    if n < 2:
        return config
    if config.dp_replicate not in (1, n):
        stop(
            f"--dp_replicate={config.dp_replicate}: the {n} processes that this command starts are {n} copies; "
            "give --processes=1 under torchrun, or leave the flag away"
        )
    if "PLAIN_REPLICAS" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        threads = str(torch.get_num_threads() // n)
        # where a machine's own name may lead nowhere
        if sys.platform == "darwin":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0")
        os.environ.update(
            PLAIN_REPLICAS=str(n),
            WORLD_SIZE=str(n),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            OMP_NUM_THREADS=threads,
        )
        for rank in range(1, n):
            STARTED.append(
                subprocess.Popen(
                    [*PROGRAM, *argv],
                    preexec_fn=hsdp.tied_to_parent(),
                    env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
        os.environ.update(RANK="0", LOCAL_RANK="0")
        torch.set_num_threads(int(threads))
    return replace(config, dp_replicate=n)


def main(argv):
    given = parse(argv)
    stages = ORDER + ["eval"] if given.get("stage", "all") == "all" else [given["stage"]]
    if stages[0] not in STAGES:
        stop(f"unknown stage {stages[0]!r}: all, {', '.join(STAGES)}")
    if "export" in given:
        return export(configure(given, stages[0]), given)
    if uses_card(given):
        try:
            hsdp.check_cards()
        except ValueError as error:
            stop(str(error))
    configs = {}
    for stage in stages:
        given["init_from"] = given.get("init_from") or began_from(given, stage)
        configs[stage] = configure({**given, "stage": stage}, stage, stages)
    config = configs[stages[0]]
    # of all stages, each would leave the one before it aside
    if config.start_from and config.stage == "pretrain":
        stop("--start_from is for one stage: add --stage=long, sft, rl or eval")
    if config.resume and not any(hsdp.exists(Path(config.out, stage)) for stage in ORDER):
        stop(f"--resume: no checkpoint in {config.out} to go on from")
    # now, and not when the stages before rl are done
    try:
        tasks = synth_tasks.read_tasks(config.tasks) if config.tasks else []
        if config.tasks and not tasks:
            stop(f"{config.tasks}: holds no tasks")
        for number, task in enumerate(tasks, 1):
            if not set(task.meta.get("style", ())) <= set(feedback_distill.STYLE):
                stop(
                    f"{config.tasks}: line {number} names a style that is none of {', '.join(feedback_distill.STYLE)}"
                )
    except synth_tasks.Refusal as refusal:
        stop(refusal)
    check_positions(configs)
    check_outputs(config.out, stages)
    if (
        uses_card(given)
        and given.get("scale", "auto") == "auto"
        and not config.init_from
        and int(os.environ.get("RANK", 0)) == 0
    ):
        print(describe_card(config))
    with alone(config.out):
        try:
            work(argv, stages, configs, given)
        except MachineFailure as failure:
            stop(f"this machine failed: {failure}; free it, and go on with --resume")
        except hsdp.SaveFailed as error:
            stop(f"{error}. {how_to_go_on(config, argv, stages)}")
        except hsdp.DamagedCheckpoint as error:
            stop(str(error))
        except OSError as error:
            # A full disk anywhere else. Other errors are no fault of the disk: their traceback is
            # needed.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            what = f"{error.filename}: " if error.filename else ""
            stop(
                f"{what}cannot be written: {hsdp.explain_write_error(error)}. {how_to_go_on(config, argv, stages)}"
            )
        except torch.OutOfMemoryError as error:
            print(f"train.py: {explain_full_card(config, argv, error)}", file=sys.stderr)
            raise SystemExit(2) from None


def how_to_go_on(config, argv, stages):
    """After a full disk: the command that goes on from the last checkpoint, or begins again where
    there is none yet"""
    saved = any(hsdp.exists(Path(config.out, stage)) for stage in TRAINING)
    words = [*argv, *["--resume"] * (saved and "--resume" not in argv and not config.resume)]
    return f"Free some space, then: python train.py {shlex.join(words)}"


def explain_full_card(config, argv, error):
    """The one line for a GPU whose memory is full, with what makes the run fit"""
    half = max(1, config.micro_tokens // 2)
    told = str(error).splitlines()[0][:160].rstrip()
    again = shlex.join(
        [*argv, f"--micro_tokens={half}", "--recompute", *["--resume"] * ("--resume" not in argv)]
    )
    return (
        f"the GPU's memory is full ({told}) What is saved is whole. Half as much at a time, and less kept of it: python train.py {again} "
        "(if that is not enough: --weights=bfloat16, and in rl fewer --tasks_per_step or a smaller --window, with another --out)"
    )


def check_positions(configs):
    """A published model has positions for so many tokens: each stage's window is looked at before
    the first one begins."""
    for stage, config in configs.items():
        if config.init_from and stage in TRAINING:
            there = [
                path
                for path in places(stage, config.out, config.start_from)
                if path and hsdp.exists(path)
            ]
            given = open_checkpoint(there[0]) if there else None
            if given and given["config"].get("init_from", "") != config.init_from:
                # of another model: the stage refuses it by name
                continue
            try:
                published_shape(config, given)
            except (ValueError, OSError) as error:
                stop(str(error))


def check_outputs(out, stages):
    """Whatever is written or drawn at the end is tried now. What only draws is no reason to
    stop."""
    names = [f"{stage}.jsonl" for stage in stages if stage in TRAINING]
    names += ["summary.json"] if "eval" in stages else []
    try:
        eval.check_writable(out, names)
    except OSError as error:
        stop(
            f"--out={out} cannot be written: "
            + (f"{error.filename}: " if error.filename else "")
            + str(error.strerror)
        )
    problem = eval.try_to_draw() if "eval" in stages and int(os.environ.get("RANK", 0)) == 0 else ""
    if problem:
        print(f"train.py: {problem}; the run goes on without", file=sys.stderr)


def check_layout(configs):
    """Can these ranks cut the sizes of every stage's model? Where each rank holds all, nothing is
    cut."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    for config in configs.values():
        try:
            layout = hsdp.Layout(world, config.cp, config.ep, config.dp_replicate)
            cut = layout.shard > 1 or config.ep > 1
            if cut and not config.init_from and config.stage in TRAINING and config.layers > 1:
                layout.check(
                    {
                        "layers.1.ffn.experts.w_gate": (
                            config.experts,
                            config.expert_ffn,
                            config.dim,
                        ),
                        "layers.1.ffn.experts.w_down": (
                            config.experts,
                            config.dim,
                            config.expert_ffn,
                        ),
                    }
                )
        except ValueError as error:
            stop(str(error))


@contextlib.contextmanager
def alone(folder):
    """Two runs in one folder would write over each other's checkpoints: the second one is
    refused."""
    with open(Path(folder, ".lock"), "w") as file:
        if int(os.environ.get("RANK", 0)) == 0:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stop(
                    f"--out={folder}: another train.py is at work there: wait for its end, or take another"
                )
            except OSError:
                pass  # a file system without locks
        yield


def work(argv, stages, configs, given):
    """The stages, one after the other, in as many processes as they want."""
    configs = {stage: spread(argv, config) for stage, config in configs.items()}
    check_layout(configs)
    say_idle_flags(stages, configs, given)
    ranks = int(os.environ.get("WORLD_SIZE", 1)) // configs[stages[0]].cp
    if "rl" in configs and configs["rl"].tasks_per_step < ranks:
        stop(
            f"--tasks_per_step={configs['rl'].tasks_per_step}: at least one for each of the {ranks} data ranks"
        )
    interrupted = []

    def heard(number, frame):
        interrupted.append(number)
        signal.signal(number, signal.SIG_DFL)
        if int(os.environ.get("RANK", 0)) == 0:
            print("stopping after this step; a second time stops at once", file=sys.stderr)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, heard)
    for stage in stages:
        if stage == "eval":
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, leave)
            trained = Path(configs[stage].out, "rl")
            if hsdp.exists(trained):
                check_patch(open_checkpoint(trained), trained)
            evaluate(configs[stage], given)
        elif not train(configs[stage], interrupted):
            if int(os.environ.get("RANK", 0)) == 0:
                words = [*argv, *["--resume"] * (not configs[stage].resume)]
                print(f"stopped; to go on: python train.py {shlex.join(words)}", file=sys.stderr)
            raise SystemExit(128 + max(interrupted, default=0))
        # what a stage held, before the next one begins
        gc.collect()
        trim()
    if dist.is_initialized():
        # a rank that is late still needs the store in rank 0
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
