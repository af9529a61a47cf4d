"""train.py: the whole recipe. One loop; a stage only says where the batch and the loss come from.

    pretrain   next-token prediction on real Python (the standard library of this machine, or
               --data=DIR), short window
    long       the same with the window stretched by YaRN
    sft        transcripts of a competent but sloppy expert in generated codebases
    rl         feature-deletion tasks in sandboxed codebases: grouped rollouts, hidden tests as
               reward, textual feedback distilled into the flagged turn, a nonlinear price on
               effort, self-summaries, a curriculum
    eval       held-out tasks before and after RL: table, summary.json, figures

Composer 2.5's order of things (cursor.com/blog/composer-2-5; Technical Report, arXiv 2603.24477):
continued pretraining at a short window, a long-context extension, a short SFT, reinforcement
learning. All sizes, rates and step counts here are ours.

    python train.py                      everything, at the scale this machine carries
    python train.py --resume             go on after Ctrl-C, SIGTERM or kill -9
    python train.py --help --stage=rl    every flag, with its value in that stage

    one stage, one technique off:
    python train.py --stage=rl --feedback=0 --out=out/plain --start_from=out/run

    many GPUs, the same script (--cp: not in rl):
    torchrun --nproc_per_node=8 train.py --stage=pretrain --ep=8 --cp=2

In this file: the configuration, where each stage's batches and losses come from, what the stages
share (Run), the one loop, its log. What surrounds a run (flags, checks, launch, lock, signals,
messages) stands in command/, the stage eval in eval.py.

Left out: data mixing, deduplication, and every private number.
"""

import contextlib
import gc
import hashlib
import json
import os
import random
import sys
import sysconfig
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

# first: it says in one line what Windows lacks
from world import machine
from world.machine import owned_directory
import eval
import fast
import feedback_distill
import hsdp
import length_penalty
import rollout
import summarize
import synth_tasks
from moe import ModelConfig, balance, count_draft_hits, mtp_loss
from muon import Muon, check_parameters, newton_schulz
from published.export import export_model
from published.families import read_config
from published.grouped_query import config_of
from published.loading import load_model
from published.tokenizers import make_tokenizer, read_tokenizer
from command import (
    checkpoint_files,
    checkpoints,
    checks,
    evaluation,
    failures,
    flags,
    hardware,
    idle_flags,
    launch,
    output_files,
    transcripts,
)
from command.flags import usage_error
from fast import workers as fast_workers
from fast.gram_newton_schulz import gram_newton_schulz
from world.micro import CONSTANTS, WORDS
from world.task_file import read_tasks


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
    # of matrix products: float32, bfloat16 (bf16) or auto; the experts' may be narrower, see
    # precision
    dtype: str = "auto"
    # as they are kept; bfloat16: five sixths of the memory, and updates are rounded by chance
    weights: str = "float32"
    # 1: the blocks of pretrain and long by torch.compile. A step takes 14 % less on an H100,
    # compiling 80 s
    compile: bool = False
    # 1: every part in its plain form, none of fast/: to the same curves, slower
    plain: bool = False
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
    # of the experts' products: dtype (as all others), mxfp8 or nvfp4; emulated where the hardware
    # has none (a GPU before the B200, a CPU): then slower, the same numbers
    precision: str = "dtype"
    # 1: one more block drafts the token after the next. It learns in pretrain, long and sft what
    # the model would say there, and moves no other weight; moe.speculate decodes with it (the
    # rollouts' sampler takes its drafts from the text)
    mtp: bool = False

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
    "time_tools": (False, "benchmarks/tools.py"),
    "context_loss": (0.3, "train.py, as CONTEXT_LOSS"),
}
# The change of the recipe that is in force in this process, as module:function; none: "". It is
# kept in every checkpoint, so that a run goes on with the change that it was begun with.
PATCH = ""
# How this program is started; the patch of an experiment has a program of its own.
PROGRAM = [sys.executable, __file__]


# ---------------------------------------------------------------- from flags to a configuration


def parse(argv):
    """--name=value or --name value for every field of Config -> dict of what was given. --help
    prints every flag and ends; with --stage or --scale it prints the values in force there."""
    for word in argv:
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and name in OLD_FLAGS:
            usage_error(f"--{name} is no flag any more: what it did stands in {OLD_FLAGS[name][1]}")
    given, wants_help = flags.parse_flags(argv, Config)
    if not wants_help:
        return given
    stage, values, sources = given.get("stage", "all"), None, None
    check_stage(stage)
    if given:
        values, sources = merge_flags(given, stage)
    print(__doc__ + flags.describe_flags(Config, values, sources))
    raise SystemExit(0)


def check_stage(stage):
    if stage != "all" and stage not in STAGES:
        usage_error(f"unknown stage {stage!r}: all, {', '.join(STAGES)}")


def merge_flags(given, stage):
    """Defaults, then the scale, then the stage, then the stage at that scale, then fine-tuning
    where it is that, then the command line: each wins over those before it. -> ({field: value},
    {field: where that comes from}), fields with their default left out. stage "all": what all
    stages have in common"""
    # Without --scale the machine decides: how large a model, and how many tokens at a time.
    scale, fitted = given.get("scale", "auto"), {}
    chosen = {}
    if scale == "auto":
        at_gpu = STAGE_SCALES.get(("gpu", stage), {})
        most = at_gpu.get("micro_tokens", SCALES["gpu"]["micro_tokens"])
        scale, fitted = hardware.scale_of_machine(given, most)
        chosen = {"scale": scale}
    if scale not in SCALES:
        usage_error(f"unknown scale {scale!r}: {', '.join(SCALES)}")

    typed = {name: value for name, value in given.items() if (name, value) != ("scale", "auto")}
    layers = [
        (f"scale {scale}", SCALES[scale]),
        (f"stage {stage}", STAGES.get(stage, {})),
        (f"stage {stage} at scale {scale}", STAGE_SCALES.get((scale, stage), {})),
        ("fine-tuning", FINE_TUNING.get(stage, {}) if given.get("init_from") else {}),
        ("this machine", {**fitted, **chosen}),
        ("flag", typed),
    ]
    values, sources = {}, {}
    for source, layer in layers:
        for name, value in layer.items():
            values[name], sources[name] = value, source

    # compared on resume: however it is spelled, one folder is one
    for name in ("init_from", "tasks", "data"):
        if values.get(name):
            values[name] = str(Path(values[name]).resolve())
    return values, sources


def configure(given, stage, stages=()):
    """The configuration of a stage, checked. stages: all that this command runs (default: this
    one)."""
    values, _ = merge_flags(given, stage)
    config = replace(Config(), **values)
    optimizers = set()
    for other in stages or (stage,):
        if other in ORDER:
            optimizers.add({**STAGES[other], **given}.get("optimizer", Config.optimizer))
    checks.check_values(config)
    checks.check_together(config, given, stage, SIZES, text_window(config))
    checks.check_optimizer_flags(config, given, stage, optimizers)
    return config


def text_window(config):
    """Tokens of a window of pretrain or long"""
    return int(config.context * (config.yarn if config.stage == "long" else 1))


def habits(config):
    return config.habits.split(",")


SIZES = {f.name for f in fields(ModelConfig)} & {f.name for f in fields(Config)} - {"vocab"}


def model_config(config, vocab):
    """The model of a run from noise. With one expert per token a gate over the sum of the gates
    would always be 1, and the loss would teach the router nothing: then the gate is the router's
    score itself."""
    sizes = {name: getattr(config, name) for name in SIZES}
    sizes["precision"] = "" if config.precision == "dtype" else config.precision
    sizes["mtp"] = int(config.mtp)
    return ModelConfig(vocab=vocab, norm_gates=config.active > 1, **sizes)


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
        usage_error(f"--data={folder}: no such folder")
    texts = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        # a link may lead nowhere
        if not path.is_file() or SKIP & set(inside.parts[:-1]) or path.stat().st_size >= 200_000:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            texts[inside.as_posix()] = text
    if len(texts) < 2:
        usage_error(f"--data={folder}: fewer than two Python files there")

    # A number from 0 to 1 for each path. A small folder may have no file below the threshold, or no
    # other: one of each is needed.
    place = {}
    for name in texts:
        found = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
        place[name] = int.from_bytes(found[:7], "big") / 2**56
    held = {name for name in texts if place[name] < HELD_OUT}
    if not 0 < len(held) < len(texts):
        held = {min(texts, key=place.get)}
    train = [text for name, text in texts.items() if name not in held]
    return train, [text for name, text in texts.items() if name in held]


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


class Text:
    """pretrain and long: windows of one long stream. The batch of a step is a function of (seed,
    stage, step) alone."""

    def __init__(self, run):
        self.run, config = run, run.config
        self.window = text_window(config)
        train, held = python_sources(config.data)
        self.data = digest_texts(train, held)
        self.train, self.held = self.make_stream(train), self.make_stream(held)
        if min(len(self.train), len(self.held)) < 2 * self.window + 2:
            usage_error(
                f"--data={config.data}: {len(self.train)} tokens are too few for windows of "
                f"{self.window}"
            )

    def make_stream(self, texts):
        """All texts as one row of tokens, each with the token <|text|> at its end"""
        tokenizer = self.run.tokenizer
        end = tokenizer.id["<|text|>"]
        return torch.cat([torch.tensor([*tokenizer.encode(text), end]) for text in texts])

    def losses(self, step, log):
        """Yields the micro-batch losses of one step; their sum is the mean over the whole batch of
        all ranks."""
        config = self.run.config
        # At first a quarter of the window, then half; the ranks of --cp share it in 2 * cp parts.
        parts = 2 * config.cp
        window = self.window // seq_len_divisor(step, config) // parts * parts or self.window
        # The windows begin anywhere in the stream.
        rng = np.random.default_rng((config.seed, ORDER.index(config.stage), step))
        number = self.rows(config.batch_tokens // window)
        starts = rng.integers(0, len(self.train) - window - 1, number)
        yield from self.cross_entropy(self.train, starts, window, log)

    def rows(self, n):
        """n windows, or a few more: as many for each rank, since all have to run the same number of
        forwards."""
        return max(1, -(-n // self.run.data)) * self.run.data

    def cross_entropy(self, stream, starts, window, log):
        """Yields the losses of the windows of `stream` that begin at `starts`, a micro-batch at a
        time."""
        run, total = self.run, len(starts) * window
        # Each rank takes its share of the windows; ranks of --cp its part of each window.
        mine = run.share(starts)
        size = max(1, run.config.micro_tokens // window)
        for i in range(0, len(mine), size):
            rows = torch.stack([stream[s : s + window + 1] for s in mine[i : i + size]])
            rows = rows.to(run.device, non_blocking=True)
            batch = run.shard({"tokens": rows[:, :-1], "targets": rows[:, 1:]})
            hidden = run.hidden(batch)
            loss = -run.model.logprobs(hidden, batch["targets"]).sum() / total
            log["loss"] = log.get("loss", 0) + loss.detach()
            log["tokens"] = log.get("tokens", 0) + batch["tokens"].numel()
            if run.config.mtp:
                loss = loss + run.draft_loss(batch, hidden, len(starts) * (window - 1), log)
            yield loss

    @torch.no_grad()
    def validate(self):
        """Mean loss on held-out files, fixed windows."""
        self.run.model.eval()  # the routers count no load
        last, number = len(self.held) - self.window - 2, max(8, 32768 // self.window)
        starts = np.linspace(0, last, self.rows(number)).astype(int)
        log = {}
        for _ in self.cross_entropy(self.held, starts, self.window, log):
            pass
        found = {"held_out_loss": self.run.sum(log["loss"])}
        if self.run.config.mtp:
            places = len(starts) * (self.window - 1)
            found["held_out_draft_kl"] = self.run.sum(log["draft_kl"])
            found["draft_accepted"] = self.run.sum(log["draft_hits"]) / places
        return found

    after_step = lambda self: None
    tensors = lambda self: {}

    def state_dict(self):
        return {"data": self.data}

    def load_state_dict(self, state):
        checkpoints.check_same_data(self.run.config, state, self.data)


# Weight, in sft, of the tokens that the expert did not write (tool outputs, tasks): copying is
# learned from them too.
CONTEXT_LOSS = 0.3


class Demonstrations:
    """sft: the expert's transcripts. The loss reported is of the tokens that a policy would have
    sampled."""

    def __init__(self, run):
        self.run, config = run, run.config
        # Every rank writes its share of the demonstrations, and gets those of all.
        numbers = run.share(range(config.demos))
        mine = make_demonstrations(config, run.tokenizer, run.compact, numbers, run.bar)
        made = sorted(run.gather(mine), key=lambda pair: pair[0])
        self.episodes = [episode for _, episodes in made for episode in episodes]
        if not self.episodes:
            usage_error(f"--window={config.window}: none of {config.demos} demonstrations fits")
        left_out = sum(not episodes for _, episodes in made)
        if left_out:
            run.say(
                f"--window={config.window}: {left_out} of {config.demos} demonstrations do not fit "
                "and are left out"
            )
        self.batches = self.plan_batches()
        self.names = self.mark_tokens(WORDS - CONSTANTS)
        self.constants = self.mark_tokens(CONSTANTS)

    def plan_batches(self):
        """For each step two groups of indices of episodes, of half of the batch's tokens each.
        While the window is short, episodes that fit it."""
        config, batches = self.run.config, []
        lengths = np.array([len(episode) for episode in self.episodes])
        divisors = [seq_len_divisor(step, config) for step in range(config.steps)]
        for divisor in sorted(set(divisors), reverse=True):
            fits = np.flatnonzero(lengths <= max(lengths.max() // divisor, lengths.min()))
            number, seed = 2 * divisors.count(divisor), (config.seed, divisor)
            groups = length_groups(lengths[fits], config.batch_tokens // 2, number, seed)
            for first, second in zip(groups[::2], groups[1::2]):
                batches.append([fits[first], fits[second]])
        return batches

    def mark_tokens(self, words):
        """(vocab,) True for each token that is one of these words, whatever stands around it"""
        marked = torch.zeros(self.run.model.config.vocab, dtype=torch.bool)
        for text, token in self.run.tokenizer.ranks.items():
            # a published tokenizer may know more tokens than its model
            if token < len(marked):
                marked[token] = text.decode(errors="ignore").strip(" ._`") in words
        return marked.to(self.run.device)

    def losses(self, step, log):
        """Yields the micro-batch losses of one step; their sum is the mean over the tokens that the
        expert wrote, in the whole batch of all ranks, with what the other tokens add."""
        config, run = self.run.config, self.run
        groups = [[self.episodes[i] for i in group] for group in self.batches[step]]
        episodes = [episode for group in groups for episode in group]
        total = sum(int(rollout.flatten(episode)[1].sum()) for episode in episodes)

        # The ranks take turns in a group, so that each has short and long episodes; in the second
        # group the next rank begins.
        mine = []
        for g, group in enumerate(groups):
            for j, episode in enumerate(group):
                if (2 * j + g) % run.data == run.meshes.data_rank:
                    mine.append((episode, 1.0))

        for batch in run.micro_batches(mine, spare=(groups[0][0], 1.0)):
            hidden, targets = run.hidden(batch), batch["targets"]
            logp = run.model.logprobs(hidden, targets, where=batch["inside"] > 0)

            # What the expert wrote weighs 1, names and constants more while the window is short;
            # what it read weighs CONTEXT_LOSS.
            mask = batch["mask"]
            copied = (self.names | self.constants)[targets] & (seq_len_divisor(step, config) > 1)
            weight = torch.where(copied, config.copy_loss, 1.0) * mask
            weight = weight + CONTEXT_LOSS * (1 - mask) * batch["inside"]
            loss = -(logp * weight).sum() * batch["real"] / total
            reported = (logp.detach() * mask).sum() * batch["real"] / total
            log["loss"] = log.get("loss", 0) - reported
            log["tokens"] = log.get("tokens", 0) + batch["real_tokens"]
            if config.mtp:
                places = sum(len(episode) - 1 for episode in episodes)
                loss = loss + run.draft_loss(batch, hidden, places, log)
            yield loss

    @torch.no_grad()
    def validate(self):
        """Are names and constants copied? Their mean probabilities where a careful expert writes
        them, in held-out tasks."""
        config, run, limits = self.run.config, self.run, agent_limits(self.run.config)
        run.model.eval()  # the routers count no load
        episodes = []
        for task in run.share(eval.held_out(12, range(config.levels))):
            rng, careful = random.Random(task.instance_id), 0.0
            chain = rollout.demonstrate(task, run.tokenizer, rng, limits, careful, run.compact)
            episodes += [(e, 1.0) for e in chain.episodes if len(e) <= config.window]

        # The sum of the probabilities and the number of the places, of each kind.
        kinds = {"names": self.names, "constants": self.constants}
        total = {name: torch.zeros(2, dtype=torch.float64) for name in kinds}
        for batch in run.micro_batches(episodes, spare=(self.episodes[0], 1.0)):
            p = run.model.logprobs(run.hidden(batch), batch["targets"]).exp()
            for name, marked in kinds.items():
                where = marked[batch["targets"]] & (batch["mask"] > 0)
                counted = torch.stack([p[where].sum(), where.sum()]).cpu()
                total[name] = total[name] + counted * batch["real"]
        sums = {name: [run.sum(x) for x in pair] for name, pair in total.items()}
        return {name: p / count for name, (p, count) in sums.items() if count}

    after_step = lambda self: None
    state_dict = lambda self: {}
    load_state_dict = lambda self, state: None
    tensors = lambda self: {}


def seq_len_divisor(step, config):
    """What the window is divided by: 4, then 2, then 1. Sequence-length warm-up (arXiv 2108.06084):
    heads that look back and copy form several times sooner where there is less to look at; without
    it they came late in some runs and in one not at all."""
    return 4 >> min(2, int(2 * step / (config.grow * config.steps))) if config.grow else 1


def padded_length(length):
    """Rows are padded to a multiple of 64, see rollout.pack."""
    return -(-length // 64) * 64


def length_groups(lengths, tokens, number, seed):
    """Groups of indices of like length, `tokens` in each when padded: little padding, and few
    different shapes."""
    rng, groups = np.random.default_rng(seed), []
    # One round holds every index once; as many rounds as are needed.
    while len(groups) < number:
        # Shuffled into pools of about 32 groups, so that no two rounds are alike ...
        n_pools = max(1, lengths.sum() // (32 * tokens))
        for pool in np.array_split(rng.permutation(len(lengths)), n_pools):
            # ... and within a pool the longest ones together, then the next ones.
            pool = list(pool[np.argsort(lengths[pool], kind="stable")])
            cut = []
            while pool:
                n = max(1, tokens // padded_length(lengths[pool[-1]]))
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
    reminders = {habit: feedback_distill.REMINDERS[habit] for habit in habits(config)}
    chain = rollout.demonstrate(
        task,
        tokenizer,
        rng,
        agent_limits(config),
        config.sloppy,
        compact,
        reminders,
        config.hints,
        config.neutral_hints,
        **more,
    )
    # Only what fits the window, and has a turn to learn from.
    episodes = []
    for episode in chain.episodes:
        roles = {turn.role for turn in episode.turns}
        if len(episode) <= config.window and "assistant" in roles:
            episodes.append(episode)
    return episodes


def make_task(config, level, seed):
    """A generated task, in the world that the run trains in."""
    return synth_tasks.make_task(level, seed)


class Reinforcement:
    """rl: sample groups, reward, push. One update per batch. Without workers the sampling policy is
    the policy; with them a token's is up to `staleness` updates older, and that is kept small, not
    corrected (stated): no ratio, no clip either way."""

    def __init__(self, run):
        self.run, config, self.asked, self.drawn = run, run.config, {}, {}
        self.folder, self.ahead = owned_directory("weights", tempfile.gettempdir()), (
            config.staleness if config.workers else 0
        )
        settings = dict(
            tokenizer=run.tokenizer,
            group=config.group,
            limits=agent_limits(config),
            compact=run.compact,
            temperature=config.temperature,
        )
        device = str(next(run.model.parameters()).device)
        if config.plain:
            # Another model samples, since the policy's own may be cut over ranks.
            policy = run.model.config.build_model().to(device).compute(run.dtype)
            self.workers = self.publisher = rollout.InTurn(policy, **settings)
        else:
            settings |= dict(
                folder=self.folder.name,
                config=run.model.config,
                dtype=run.dtype,
                device=device,
                draft=config.draft,
                rows=min(128, -(-config.tasks_per_step // run.data) * config.group),
            )
            self.publisher = fast_workers.Publisher(
                self.folder.name, run.model.config, run.dtype, shared=config.workers > 0
            )
            self.workers = fast_workers.Workers(config.workers, settings)
        tasks = read_tasks(config.tasks) if config.tasks else []
        tasks = self.with_room(tasks)
        self.file = output_files.digest_file(config.tasks)
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
            usage_error(f"--window={window}: none of the tasks leaves room for a turn")
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
            usage_error(f"--window={config.window}: none of the tasks leaves room for a turn")
        for level, solved, total in sorted(
            run.gather([(g[0].task.level, sum(c.solved for c in g), len(g)) for g in groups])
        ):
            self.curriculum.update(level, solved, total)
        log["rollout_s"] = time.time() - start
        lag = fast_workers.staleness(groups, step)
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
        kept, lost = rollout.drop_failed(groups)
        causes = self.run.gather([chain.failure for chain in lost])
        total = self.run.config.tasks_per_step * self.run.config.group
        log["machine_failures"] = len(causes)
        self.judged = total - len(causes)
        # for a rank that has nothing left to learn from
        self.spare = groups[0][0].episodes[0] if groups else None
        if causes:
            self.run.say(f"rl: {machine.failures_line(causes, total)}")
        if not self.judged:
            usage_error(
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
            lines += transcripts.describe_chain(
                chain, self.run.tokenizer, flags, group=[float(f"{c.reward:.6g}") for c in group]
            )
        try:
            transcripts.write_transcripts(self.run.out / "transcripts.jsonl", step, lines)
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
                    "cheats": eval.has_cheat(c),
                    "suspicious": eval.is_suspicious(c),
                    "reads": "read_file" in c.task.tools,
                    "blind": eval.submitted_untested(c),
                    "probe": summarize.count_named_targets(c),
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
        self.device = hardware.device_of(config)
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
            usage_error(str(error))
        self.data = self.meshes.layout.data
        # nothing is cut: every rank holds all
        self.replicas = self.meshes.layout.shard == 1 and config.ep == 1
        self.dtype = hardware.dtype_of(config)
        self.compact = summarize.make_compaction(asdict(config))
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
        return float(
            hsdp.all_reduce_sum(torch.as_tensor(number, dtype=torch.float64, device="cpu"))
        )

    def gather(self, items):
        """The items of all data ranks, on every rank."""
        if self.data == 1:
            return items
        lists = [None] * self.world
        dist.all_gather_object(lists, items)
        return [item for part in lists[:: self.config.cp] for item in part]

    def shard(self, batch):
        """This rank's part of the sequence, and where it stands in it."""
        part = dict(batch)
        for name, value in batch.items():
            if torch.is_tensor(value):
                value = value.to(self.device, non_blocking=True)  # see fast.cpu_kernels.to_device
                part[name] = hsdp.shard_sequence(value, self.meshes)
        length = batch["tokens"].shape[1]
        part["positions"] = hsdp.positions(length, self.meshes, self.device)
        return part

    def micro_batches(self, items, spare):
        """(episode, number) pairs of this rank -> packed batches of about micro_tokens tokens,
        short episodes together. Every rank makes as many: one that has fewer goes on with `spare`
        at weight zero."""
        # The longest ones first, as many as fit when padded to the longest.
        items, batches = sorted(items, key=lambda item: len(item[0])), []
        while items:
            n = max(1, self.config.micro_tokens // padded_length(len(items[-1][0])))
            batches.append(items[-n:])
            del items[-n:]

        most = max(self.gather([len(batches)]))
        for i in range(most):
            real = i < len(batches)
            part = batches[i] if real else [spare]
            episodes = [episode for episode, _ in part]
            numbers = [number * real for _, number in part]
            batch = rollout.pack(episodes, numbers, 64 * self.config.cp)
            # a spare: its tokens are computed and count nowhere
            if not real:
                batch["tokens"] = torch.full_like(batch["tokens"], -1)
            # The ranks of a sequence count an equal share of it each, so that the sum over all
            # ranks is right.
            real_tokens = sum(map(len, episodes)) / self.config.cp if real else 0
            batch = self.shard(batch)
            batch.update(episodes=episodes, real=real, real_tokens=real_tokens)
            yield batch

    # model
    def hidden(self, batch):
        replay = batch.get("experts") if self.config.replay else None
        return self.model(batch["tokens"], batch.get("positions"), replay)

    def draft_loss(self, batch, hidden, places, log):
        """What the head that drafts learns from a micro-batch: the divergence from the model's own
        choice, over the `places` of the whole batch. Its gradient stays in the head."""
        loss = mtp_loss(self.model, batch["tokens"], hidden, places)
        log["draft_kl"] = log.get("draft_kl", 0) + loss.detach()
        if not self.model.training:
            hits = count_draft_hits(self.model, batch["tokens"], hidden)
            log["draft_hits"] = log.get("draft_hits", 0) + hits
        return loss

    def clip_gradients(self):
        """Cuts the gradient at --clip -> its norm before. The head that drafts has another loss,
        and is cut by itself: together, its gradient would shorten the model's."""
        if not self.config.mtp:
            return hsdp.clip_grad_norm(self.model, self.config.clip)
        head = list(self.model.mtp.parameters())
        rest = [p for name, p in self.model.named_parameters() if not name.startswith("mtp.")]
        hsdp.clip_grad_norm(self.model, self.config.clip, head)
        return hsdp.clip_grad_norm(self.model, self.config.clip, rest)

    def full_state(self):
        return hsdp.full_state(self.model)

    def build(self, tokenizer, shape=None):
        """The same weights on every rank and in every layout, drawn on the CPU from the seed.
        shape: a published model's; where it is cut nothing is drawn, since a checkpoint will fill
        it."""
        torch.manual_seed(self.config.seed)
        self.tokenizer = tokenizer
        with torch.device("meta" if shape and not self.replicas else "cpu"):
            model = (shape or model_config(self.config, tokenizer.vocab)).build_model()
        if not shape and self.config.stage != "pretrain":
            model.extend(self.config.yarn)
        if not next(model.parameters()).is_meta:
            self.model = self.lay_out(model.to(self.device))
        else:
            self.model = self.lay_out(model).to_empty(device=self.device)
            # its table of angles was on the meta device, too
            self.model.extend(shape.yarn_factor)

    def lay_out(self, model):
        """Its fast twins, the dtype of its products and of its weights, its compiled blocks, its cut
        over the ranks."""
        if not self.config.plain:
            fast.accelerate(model)
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
        self.tokenizer = read_tokenizer(folder, shape.vocab)
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
            plain = p.ndim < 2 or any(word in name for word in ("embed", "head", "router"))
            if plain or config.optimizer == "adamw":
                rest.append((name, p))
            else:
                matrices.append((name, p))
        groups = [dict(params=rest, algorithm="adamw", lr=config.adam_lr, weight_decay=0.0)]
        if matrices:
            group = dict(lr=config.lr, weight_decay=config.weight_decay)
            groups.append(dict(params=matrices, algorithm="muon", **group))
        optimizer = Muon(
            groups,
            replicas=dist.group.WORLD if self.replicas and self.world > 1 else None,
            ns_dtype=self.dtype,
            newton_schulz=newton_schulz if self.config.plain else gram_newton_schulz,
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


def published_shape(config, given=None):
    """The sizes of the published model, which has positions for windows up to its own. given: a
    checkpoint of a run from it"""
    shape = (
        config_of(given["model"])
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
    if config.balance_rate and not shape.balances:
        raise ValueError(
            f"--balance_rate={config.balance_rate:g}: the routers of {config.init_from} have no biases; leave the flag away"
        )
    return shape


def train(config, interrupted, sources=None):
    """One stage: build, load, loop, save. True if it ran to its end. sources: where the values of
    config come from, see merge_flags"""
    # Where does it go on? With its own checkpoint (begun), else with that of the stage before.
    stage = config.stage
    out, origin = checkpoints.checkpoint_paths(stage, config.out, config.start_from)
    begun = checkpoints.open_checkpoint(out) if hsdp.exists(out) else None
    saved = begun
    if not begun and origin and hsdp.exists(origin):
        saved = checkpoints.open_checkpoint(origin)

    # Does what is there fit what was asked for? In the same model, by the same command, from the
    # same data.
    if not begun:
        checkpoints.check_origin(config, origin, saved)
    if saved and not config.init_from:
        if not begun:
            checkpoints.check_same_model(config, origin, saved, SIZES)
        checkpoints.check_same_gates(config, out if begun else origin, saved)
    run = Run(config)
    if begun:
        tasks = output_files.digest_file(config.tasks)
        checkpoints.check_same_values(config, out, origin, begun, tasks)
        checkpoints.check_patch(out, begun, OLD_FLAGS, PATCH)
        # finished or not: a result is called by what it was made from
        if config.data and stage in ("pretrain", "long"):
            texts = digest_texts(*python_sources(config.data))
            checkpoints.check_same_data(config, begun["source"], texts)
        if begun["step"] == config.steps:
            start = begun["config"]["start_from"]
            run.say(f"{stage}: finished already ({out})" + f", begun from {start}" * bool(start))
            return True
    say_configuration(run, config, sources)

    # The model: of a checkpoint, of a published folder, or from noise.
    try:
        shape = published_shape(config, saved) if config.init_from else None
        if saved:
            run.build(make_tokenizer(**saved["tokenizer"]), shape)
        elif shape:
            run.read(config.init_from, shape)
        else:
            run.build(train_tokenizer(config))
    except (ValueError, OSError) as error:
        usage_error(str(error))
    optimizer = run.make_optimizer()

    # The weights, and where the batches and the losses come from.
    label = eval.unfinished(origin) if saved and not begun else ""
    if label:
        run.say(f"{stage} begins from {origin}, which is {label}")
    try:
        if saved and not begun:
            hsdp.load(origin, run.model)
        source = STAGE[stage](run)
        if begun:
            source.load_state_dict(begun["source"])
            hsdp.load(out, run.model, optimizer, source.tensors())
    except ValueError as error:
        usage_error(str(error))
    with hsdp.report_rank_failure():
        return loop(run, source, optimizer, begun["step"] if begun else 0, interrupted, out)


def say_configuration(run, config, sources):
    """At the start of a stage: the values in force, and where those come from that are no
    defaults"""
    stage = config.stage
    idle = {name for name, stages in idle_flags.READ_BY.items() if stage not in stages}
    text = flags.describe_configuration(config, sources or {}, idle)
    run.say(f"{stage}: the configuration in force (in brackets: where it comes from)\n{text}")


def export(config, given):
    """A stage of the run as the folder of a published model, weights as the run kept them or in
    --weights; what else belongs to it from where it began, or, of a run from noise, its own
    tokenizer."""
    for name in sorted(set(given) - {"export", "out", "stage", "weights"}):
        usage_error(
            f"--{name} does nothing beside --export, which takes --out, --stage and --weights"
        )
    target = Path(config.export)
    try:
        stage = (
            eval.last_stage(config.out) if config.stage == "all" else Path(config.out, config.stage)
        )
        label = eval.unfinished(stage)
        model, tokenizer, saved = eval.load(stage)
        dtype = getattr(torch, given.get("weights", saved["weights"]))
        source = Path(saved["init_from"]) if saved["init_from"] else None
        export_model(target, model, tokenizer, source, dtype)
    except (ValueError, OSError) as error:
        usage_error(str(error))
    print(
        f"{target}: "
        + ", ".join(sorted(p.name for p in target.iterdir()))
        + f"\n{stage} is {label}" * bool(label)
    )


# more than there are signals on all ranks together
LOG_FAILED = 10**9
# of the log: each rank adds its part
SUMMED = {"loss", "tokens", "draft_kl"}
# whose peak is a group's rate, by its algorithm
RATE_FLAGS = {"muon": "lr", "adamw": "adam_lr"}


def loop(run, source, optimizer, step, interrupted, out):
    """From `step` to the stage's last one. True if it came there, False if a signal ended it."""
    config, log_file = run.config, run.out / f"{run.config.stage}.jsonl"
    save_every = config.save_every or max(1, config.steps // 10)
    if run.rank == 0:
        keep_lines(log_file, step)
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

            # 1) The learning rates of this step.
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * schedule(step, config)

            # 2) Forward and backward, a micro-batch at a time. Their losses sum to the mean over
            #    the batch of all ranks, so their gradients add up to its gradient.
            run.model.train()
            for loss in source.losses(step, log):
                loss.backward()
            if run.replicas:
                hsdp.sum_gradients(run.model)

            # 3) The update. A gradient of zero has nothing to teach: AdamW's and Muon's memories
            #    would move on.
            norm = run.clip_gradients()
            if norm != 0:
                optimizer.step()
            optimizer.zero_grad()

            # 4) The routers' biases follow the load, a teacher follows the policy.
            worst = balance(run.model, bias_rate(run), hsdp.all_reduce_sum)
            source.after_step()
            step += 1

            # 5) The log. Loss and tokens are summed over the ranks; at the end held-out data, too.
            summed = {k: run.sum(v) if k in SUMMED else v for k, v in log.items()}
            log = {"step": step, **summed, "norm": float(norm), "load": worst}
            for group in optimizer.param_groups:
                log[RATE_FLAGS[group["algorithm"]]] = group["lr"]
            log["seconds"] = time.time() - start
            log["tokens_per_s"] = log["tokens"] / log["seconds"]
            log["memory"] = run.sum(hardware.peak_memory())
            if step == config.steps:
                # once: without gradients a block would be compiled again
                with torch.compiler.set_stance("force_eager"):
                    log.update(source.validate())
            problem = ""
            try:
                report(run, bar, log, log_file)
            except OSError as error:
                problem = checkpoint_files.explain_write_error(error)

            # 6) Stop? A signal may reach one rank only, and only the first one writes the log: one
            #    sum tells all ranks of both.
            code = run.sum(len(interrupted) + LOG_FAILED * bool(problem))
            if code >= LOG_FAILED:
                raise checkpoint_files.SaveFailed(
                    f"{log_file}: step {step} could not be written: {problem}; what was saved "
                    "before is whole"
                )
            stopping = code > 0

            # 7) A checkpoint: all that the next step depends on.
            if step % save_every == 0 or step == config.steps or stopping:
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
                hardware.release_memory()
            if stopping:
                return False
    return True


def bias_rate(run):
    """How far a step moves the routers' biases. Not at all where softmax routers have none, nor
    where the experts of sampling are replayed: what is counted then is what was sampled, for the
    log; moving the bias would part the trainer from the sampler."""
    config = run.config
    replayed = config.stage == "rl" and config.replay
    return config.balance_rate if run.model.config.balances and not replayed else 0.0


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
    "draft_kl": "{:7.4f}",
    "draft_accepted": "{:5.3f}",
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


# ---------------------------------------------------------------- evaluation and the command


def load_published(config, device):
    """As eval.load, of the folder of a published model: whole on every rank"""
    try:
        shape = published_shape(config)
        tokenizer = read_tokenizer(config.init_from, shape.vocab)
        model = load_model(config.init_from, getattr(torch, config.weights), device)
        model = model if config.plain else fast.accelerate(model)
        return model.requires_grad_(False), tokenizer, asdict(config)
    except (ValueError, OSError) as error:
        usage_error(str(error))


def evaluate(config, given, sources):
    """The stage eval: the policies before and after RL, by eval.py"""
    trained = Path(config.out, "rl")
    if hsdp.exists(trained):
        saved = checkpoints.open_checkpoint(trained)
        checkpoints.check_patch(trained, saved, OLD_FLAGS, PATCH)
    run = Run(config)
    try:
        config, paths, made, published = evaluation.find_policies(
            config, given, SIZES, lambda: load_published(config, run.device)
        )
    except ValueError as error:
        usage_error(str(error))
    say_configuration(run, config, sources)
    told = ", ".join(f"{name} = {path}" for name, path in paths.items())
    run.say(f"evaluated: {told}" + f"; there is no {trained}" * (not hsdp.exists(trained)))

    # The same evaluation of the same checkpoints again: its table is there already.
    origin = evaluation.describe_origin(config, paths, published)
    kept = evaluation.find_kept_table(config, origin) if hsdp.exists(trained) else ""
    if kept:
        return run.say(kept)

    policies = eval.evaluate(run, config, paths, made, published)
    minutes, memory = (time.time() - START) / 60, run.sum(hardware.peak_memory())
    processes = f"{run.world} process" + "es" * (run.world > 1)
    cost = f"this command: {minutes:.1f} minutes, {memory:.1f} GB at most in {processes}"
    if run.rank == 0:
        evaluation.write_evaluation(config, policies, origin, cost)


def main(argv):
    # Which stages, and with which configurations? All of them are checked before the first begins.
    given = parse(argv)
    check_stage(given.get("stage", "all"))
    stages = ORDER + ["eval"] if given.get("stage", "all") == "all" else [given["stage"]]
    if "export" in given:
        return export(configure(given, stages[0]), given)
    if hardware.uses_card(given):
        try:
            hsdp.check_cards()
        except ValueError as error:
            usage_error(str(error))
    configs = {}
    for stage in stages:
        folders = given.get("out", Config.out), given.get("start_from")
        given["init_from"] = given.get("init_from") or checkpoints.find_init_from(stage, *folders)
        configs[stage] = configure({**given, "stage": stage}, stage, stages)
    config = configs[stages[0]]
    # of all stages, each would leave the one before it aside
    if config.start_from and config.stage == "pretrain":
        usage_error("--start_from is for one stage: add --stage=long, sft, rl or eval")
    if config.resume and not any(hsdp.exists(Path(config.out, stage)) for stage in ORDER):
        usage_error(f"--resume: no checkpoint in {config.out} to go on from")

    # What the stages to come will read and write is tried now, and not when those before are done.
    checks.check_tasks(config)
    checkpoints.check_positions(configs, published_shape)
    checks.check_outputs(config.out, stages)
    chosen = given.get("scale", "auto") == "auto" and not config.init_from
    if hardware.uses_card(given) and chosen and flags.is_first_rank():
        print(hardware.describe_card(config))
    with launch.run_lock(config.out), failures.explain_failures(config, argv):
        run_stages(argv, stages, configs, given)


def run_stages(argv, stages, configs, given):
    """The stages, one after the other, in as many processes as they want."""
    for stage, config in configs.items():
        configs[stage] = launch.launch_local_ranks(argv, config, PROGRAM)
    checks.check_layout(configs)
    idle_flags.say_idle_flags(stages, configs, given)
    ranks = int(os.environ.get("WORLD_SIZE", 1)) // configs[stages[0]].cp
    if "rl" in configs and configs["rl"].tasks_per_step < ranks:
        usage_error(
            f"--tasks_per_step={configs['rl'].tasks_per_step}: at least one for each of the "
            f"{ranks} data ranks"
        )

    interrupted = launch.stop_after_step()
    for stage in stages:
        config, (_, sources) = configs[stage], merge_flags(given, stage)
        if stage == "eval":
            launch.stop_at_once()
            evaluate(config, given, sources)
        elif not train(config, interrupted, sources):
            failures.end_stopped(config, argv, max(interrupted, default=0))
        # what a stage held, before the next one begins
        gc.collect()
        hardware.release_memory()
    if dist.is_initialized():
        # a rank that is late still needs the store in rank 0
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
