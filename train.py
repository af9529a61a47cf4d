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
import itertools
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

# first: it says in one line what Windows lacks
from world.machine import owned_directory
import eval
import fast
import feedback_distill
import hsdp
import length_penalty
import rollout
import summarize
import synth_tasks
from moe import ModelConfig, count_draft_hits, mtp_loss, update_router_bias
from muon import Muon, newton_schulz, split_by_name
from published.tokenizers import make_tokenizer
from command import (
    bpe,
    checkpoints,
    checks,
    configuration,
    evaluation,
    failures,
    hardware,
    launch,
    published_model,
    output_files,
    rollout_statistics,
    source_files,
    step_log,
)
from command.flags import describe_stage, flag, usage_error
from fast.samplers import make_sampler
from fast import workers as fast_workers
from fast.stochastic_rounding import RoundingMuon
from world.micro import CONSTANTS, WORDS
from repositories.task_file import read_tasks

ORDER = ["pretrain", "long", "sft", "rl"]
# In which stages a flag is read; one that does not say so is read in all.
TRAINING = "pretrain long sft rl"
AGENT = "sft rl eval"
LEVELS = [str(level) for level in range(len(synth_tasks.LEVELS))]
DEFAULT_LEVELS = ",".join(map(str, synth_tasks.DEFAULT_LEVELS))


@dataclass(frozen=True)
class Config:
    """Every field is a flag; the comment above or behind it is its --help text. The first value is
    the default. Another one holds for a stage (sft=), for a scale (gpu=), for a stage at that scale
    (gpu_sft=), for a run from a published model (published=, published_sft=); the last that applies
    wins. stages: which of them read the flag; may_change: it may differ when a stage is resumed;
    the rest is its range. See command/flags.py."""

    # ---- what and where
    # all, pretrain, long, sft, rl or eval
    stage: str = flag("all", choices=("all", *ORDER, "eval"), may_change=True)
    # laptop, gpu or tiny; auto: gpu where there is a CUDA device, else laptop
    scale: str = flag("auto", choices=("auto", "laptop", "gpu", "tiny"))
    # folder for checkpoints, logs and figures; the same command again goes on where it stopped
    out: str = flag("out/run", may_change=True)
    # folder of the run whose previous stage this stage starts from (default: out)
    start_from: str = flag("", may_change=True)
    # go on with the run in out, and refuse to begin a new one (the same command without it goes on,
    # too)
    resume: bool = flag(False, may_change=True)
    # folder of Python files to pretrain on (default: the standard library of this Python)
    data: str = flag("", stages="pretrain long")
    # folder of a published checkpoint to start from, instead of random weights; the model's sizes
    # are then those of the checkpoint
    init_from: str = ""
    # only write the run in out to this folder in the published format: the last stage that was run,
    # or the one named by stage
    export: str = flag("", may_change=True)
    # file of tasks made by synth_tasks.py --repo (default: tasks in generated codebases)
    tasks: str = flag("", stages="rl eval")
    seed: int = flag(1337, stages=TRAINING, at_most=2**32 - 1)  # of every random choice
    # cpu, cuda or auto
    device: str = flag("auto", choices=("auto", "cpu", "cuda"), may_change=True)
    # dtype of matrix products: float32, bfloat16 or auto (bfloat16 where the hardware has it);
    # those of the experts may be narrower still, see precision
    dtype: str = flag("auto", choices=("auto", "float32", "bfloat16"))
    # dtype in which weights are stored: float32 or bfloat16. bfloat16 takes five sixths of the
    # memory of weights, gradients and optimizer, and its updates are rounded stochastically
    weight_dtype: str = flag("float32", choices=("float32", "bfloat16"))
    # 1: compile the blocks with torch.compile in pretrain and long. On an H100 a step takes 14 %
    # less time, and compiling takes 80 s
    compile: bool = flag(False, stages="pretrain long", may_change=True)
    # 1: use the plain form of every part and no twin of fast/. Slower; the curves are the same
    plain: bool = flag(False, may_change=True)
    # on CPU: number of training processes that are started. Each has its share of the cores and of
    # the batch; there is at most one per core
    processes: int = flag(2, may_change=True)
    # steps between checkpoints (0: a tenth of the stage)
    save_every: int = flag(0, stages=TRAINING, may_change=True)

    # ---- model: see moe.ModelConfig
    # tokens of the tokenizer, which is trained on the run's own text
    vocab: int = flag(
        1024,
        at_least=256 + len(rollout.CONTROLS),
        why="bytes and control tokens",
        tiny=512,
        gpu=8192,
    )
    dim: int = flag(128, at_least=1, tiny=64, gpu=640)  # width of the residual stream
    # number of blocks; the first has a dense feed-forward network (FFN)
    layers: int = flag(4, at_least=1, tiny=2, gpu=10)
    # attention heads. A head's query, key and value have dim / heads dimensions; beside these its
    # query and key have half as many with rotary embedding, and 32 at least: see MIN_QK_ROPE
    heads: int = flag(4, at_least=1, tiny=2, gpu=10)
    # routed experts in a layer; one more is shared by all tokens
    experts: int = flag(8, idle_with="layers=1", tiny=4)
    # routed experts that each token goes to
    num_experts_per_tok: int = flag(2, at_least=1, idle_with="layers=1")
    # hidden units of an expert
    expert_ffn: int = flag(128, at_least=1, idle_with="layers=1", tiny=64, gpu=512)
    # hidden units of the first block's dense FFN
    dense_ffn: int = flag(384, at_least=1, tiny=128, gpu=2048)
    # width of the latent vector that the KV cache holds
    kv_lora: int = flag(128, at_least=1, tiny=32, gpu=256)
    # base of the rotary embedding. Short windows want fast rotations: with 10000 the laptop model
    # learned to copy names later (in November 2026; not measured again)
    rope_theta: float = flag(
        1000.0, at_least=1.1, why="pairs of dimensions turn slower one by one", gpu=10000.0
    )
    # number format of the experts' products: dtype (the same as all others), mxfp8 or nvfp4.
    # These are emulated: the same numbers, slower
    precision: str = flag("dtype", choices=("dtype", "mxfp8", "nvfp4"), idle_with="layers=1")
    # 1: add a block that drafts the token after the next (multi-token prediction). It learns in
    # every stage from the model's own predictions and changes no other weight.
    # for moe.decode_speculatively; drafts of rollouts come from the text (benchmarks/drafts.py)
    mtp: bool = flag(False, stages=TRAINING)

    # ---- optimizer
    # muon: Muon for matrices, AdamW for the rest; adamw: AdamW for everything
    optimizer: str = flag("muon", stages=TRAINING, choices=("muon", "adamw"), rl="adamw")
    # peak learning rate of Muon; an update has RMS 0.2 * lr. At 0.02 the laptop model never learns
    # to copy names. The weights of a published model are good, so all of them move at AdamW's
    # fine-tuning rate, which is 0.2 * lr here
    lr: float = flag(
        0.006,
        stages=TRAINING,
        idle_with="optimizer=adamw",
        long=0.004,
        gpu=0.005,
        gpu_long=0.004,
        published=5e-5,
        published_rl=5e-6,
    )
    # peak learning rate of AdamW: for embeddings, head, gains and routers, or for everything with
    # optimizer=adamw. From a published model: ours, not tuned on a real one
    adam_lr: float = flag(
        3e-3,
        stages=TRAINING,
        long=2e-3,
        rl=5e-4,
        gpu=1e-3,
        gpu_long=2e-3,
        gpu_rl=5e-4,
        published=1e-5,
        published_rl=1e-6,
    )
    # of Muon's matrices: each step shrinks them by lr * weight_decay of their size
    weight_decay: float = flag(0.01, stages=TRAINING, idle_with="optimizer=adamw", rl=0.0)
    # the gradient is scaled down to this norm if it is larger
    grad_clip: float = flag(1.0, stages=TRAINING, at_least=1e-30, rl=0.5)
    # fraction of the stage's steps in which the learning rate rises
    warmup: float = flag(0.05, stages=TRAINING, at_most=1)
    # last fraction of the steps, in which it falls linearly to a tenth
    decay: float = flag(0.4, stages=TRAINING, at_most=1, rl=0.3)

    # ---- batches
    # optimizer steps of a stage. At scale gpu, pretrain reads the standard library about eight
    # times
    steps: int = flag(
        100,
        stages=TRAINING,
        at_least=1,
        pretrain=120,
        long=20,
        sft=1000,
        rl=40,
        tiny=4,
        gpu_pretrain=300,
        gpu_long=40,
        gpu_sft=150,
        gpu_rl=100,
        published_sft=200,
    )
    # tokens of a training sequence in pretrain; long multiplies it by yarn
    context: int = flag(256, at_least=1, gpu=1024)
    # tokens per optimizer step, over all ranks
    batch_tokens: int = flag(4096, stages="pretrain long sft", at_least=1, tiny=2048, gpu=65536)
    # tokens per forward and backward, on one rank
    micro_tokens: int = flag(
        4096, stages=TRAINING, at_least=1, may_change=True, sft=2048, rl=2048, tiny=2048, gpu=32768
    )
    # 1: keep only the input of each block and compute the rest again in the backward
    # (activation checkpointing): less memory for a third more work
    recompute: bool = flag(False, stages=TRAINING, may_change=True)
    # fraction of the steps of pretrain and sft with shorter sequences, which makes copying easier
    # to learn: a quarter of the length in the first half of them, half of it in the second. A
    # published model can copy
    seq_len_warmup: float = flag(
        0.25, stages="pretrain long sft", at_most=1, long=0.0, published=0.0
    )
    # factor by which the stage long stretches the window: to that of the agent
    yarn: float = flag(2.0, at_least=1, gpu=4.0)

    # ---- sft
    # number of different expert transcripts
    demos: int = flag(12000, stages="sft", at_least=1, tiny=64, gpu=20000)
    # levels of the tasks of sft and of rl, with commas: rows of synth_tasks.LEVELS. 0 to 5: put
    # back what was deleted; 8: repair, 11: extend, 13: put back, asked for as people type
    levels: str = flag(
        DEFAULT_LEVELS,
        stages="sft rl",
        choices=LEVELS,
        several=True,
        idle_with="tasks",
    )

    # ---- rl
    # tasks per optimizer step, over all ranks
    tasks_per_step: int = flag(8, stages="rl", at_least=1, tiny=2, gpu=32)
    # rollouts per task; their mean reward is the baseline
    group_size: int = flag(8, stages="rl", at_least=1, tiny=2, gpu=16)
    # of sampling, in training and in evaluation
    temperature: float = flag(
        0.95,
        stages="rl eval",
        at_least=0.001,
        why="python eval.py RUN --temperature=0 samples colder: a policy that never varies has "
        "nothing to learn from, and the gradient is divided by the temperature",
    )
    # tokens guessed ahead while sampling (speculative decoding); the results are the same up to the
    # rounding of bfloat16
    draft: int = flag(3, stages="rl eval", idle_with="plain=1")
    # weight of the penalty on the KL divergence (k1) from the policy that RL started from
    kl_coef: float = flag(0.0, stages="rl")
    # 1: router replay. Training sends each token to the experts that were chosen in sampling
    router_replay: bool = flag(True, stages="rl")
    # generation processes beside each training process; 0: sampling and training take turns
    workers: int = flag(0, stages="rl", may_change=True)
    # with workers: by how many updates the policy that sampled a token may be older than the policy
    # that trains on it. At 4 the default run fell apart (experiments/asynchronous.py)
    staleness: int = flag(1, stages="rl", may_change=True, idle_with="workers=0")
    # weight of the targeted textual feedback (distillation); 0: off. AdamW divides by the size of
    # the summed gradient, so a large weight drowns the reward
    feedback: float = flag(0.03, stages="rl")
    # which bad habits get hints in sft and rl, separated by commas: names of
    # feedback_distill.RULES, such as unavailable_tool, communication, code_style
    habits: str = flag(
        "unavailable_tool", stages="sft rl", choices=feedback_distill.RULES, several=True
    )
    # weights of the price of effort in tasks that ask for low, medium and high effort, each at
    # least 0 and below 1. A single one: tasks say nothing of effort and have this price; 0: off
    length_penalty: str = flag(
        length_penalty.PRICE_WEIGHTS, stages=AGENT, check=length_penalty.read_price_weights
    )
    # 1: the agent summarizes its context when that grows beyond trigger, and goes on from the
    # summary
    summarize: bool = flag(True, stages=AGENT)
    # fraction of the window at which it has to summarize
    trigger: float = flag(0.7, stages=AGENT, at_most=1, idle_with="summarize=0")
    # context window of the agent in tokens, in sft, rl and evaluation
    window: int = flag(512, stages=AGENT, at_least=1, gpu=4096)
    # turns of the agent per task, over all its contexts
    max_turns: int = flag(40, stages=AGENT, at_least=1)
    # 1: prefer the levels on which some rollouts succeed and some fail; 0: a fixed mix. Of the
    # default's levels all are open; with fewer in --levels a mastered one opens another of them
    curriculum: bool = flag(True, stages="rl")

    # ---- parallel (torchrun)
    # context parallelism: ranks that share each sequence
    cp: int = flag(1, at_least=1, may_change=True)
    # expert parallelism: ranks that share the experts of a layer
    ep: int = flag(1, at_least=1, may_change=True)
    # number of copies of the dense weights; each copy is sharded over its own ranks
    dp_replicate: int = flag(1, at_least=1, may_change=True)

    # ---- evaluation
    # levels in evaluation, with commas
    eval_levels: str = flag(
        DEFAULT_LEVELS,
        stages="eval",
        choices=LEVELS,
        several=True,
        may_change=True,
        idle_with="tasks",
    )
    # per level
    eval_tasks: int = flag(
        16, stages="eval", at_least=1, may_change=True, idle_with="tasks", tiny=1
    )
    # per row of the bench, whose names and compositions no training has; 0: without it
    bench_tasks: int = flag(10, stages="eval", may_change=True, idle_with="tasks", tiny=1)
    # rollouts per task and setting of effort
    eval_samples: int = flag(1, stages="eval", at_least=1, may_change=True, tiny=1)

    @property
    def text_window(self):
        """Tokens of a window of pretrain or long"""
        return int(self.context * (self.yarn if self.stage == "long" else 1))


# the fields that are the model's shape
SIZES = {f.name for f in fields(ModelConfig)} & {f.name for f in fields(Config)} - {"vocab"}
# The command line: the fields' defaults, and what the user has typed.
FLAGS = configuration.Flags(Config, SIZES, about=__doc__)

# The change of the recipe that an experiment has made in this process, as module:function; "" for
# the plain recipe. Every checkpoint keeps it, so that a run goes on with the change that it was
# begun with.
PATCH = ""
# How this program is started. An experiment starts its patched recipe by another program.
PROGRAM = [sys.executable, __file__]


# ---------------------------------------------------------------- a stage: its batches, its losses


def habits(config):
    return config.habits.split(",")


def levels_of(config):
    return eval.read_levels(config.levels)


def settings(config):
    """How much effort tasks ask for; ("",) where they say nothing of it"""
    return tuple(length_penalty.read_price_weights(config.length_penalty))


def accumulate(sums, key, value):
    """Adds a micro-batch's value to a sum over the step. value: a number, or a tensor, which stays
    on its device"""
    sums[key] = sums.get(key, 0) + value


def train_tokenizer(config):
    """BPE on a sample of the pretraining text and of transcripts, so that both take few tokens."""
    # The beginnings of random files, about 800,000 characters in all.
    rng = random.Random(config.seed)
    texts, _ = source_files.python_sources(config.data)
    rng.shuffle(texts)
    sample, size = [], 0
    for text in texts:
        sample.append(text[:20_000])
        size += len(sample[-1])
        if size > 800_000:
            break
    # The transcripts, with the line that says how much effort is asked for.
    demos = synth_tasks.example_texts(1500, config.seed, levels_of(config))
    for text, setting in zip(demos, itertools.cycle(settings(config))):
        sample.append(text + length_penalty.effort_line(setting))
    # The vocabulary is what was learned from them, and the control tokens.
    learned = config.vocab - len(rollout.CONTROLS)
    return rollout.Tokenizer(bpe.train_bpe(sample, learned, rollout.SPLIT))


def seq_len_divisor(step, config):
    """What the window is divided by in this step: 4, then 2, then 1. It is sequence-length warm-up
    (arXiv 2108.06084). Attention heads that look back and copy form several times sooner in short
    sequences; without the warm-up they came late in some runs, and in one not at all."""
    if not config.seq_len_warmup:
        return 1
    # 0 in the first half of the warm-up, 1 in the second, more after it
    phase = int(2 * step / (config.seq_len_warmup * config.steps))
    return 4 >> min(2, phase)


class Source:
    """What the loop asks of a stage. A stage overrides what it needs."""

    def losses(self, step, log):
        """Yields the micro-batch losses of one step. They sum to the loss over the whole batch of
        all ranks. Numbers for the log are added to `log`."""
        raise NotImplementedError

    def after_step(self):
        """Called after each update of the weights"""

    def validate(self):
        """Called after the last step -> numbers for the log, from held-out data"""
        return {}

    def state_dict(self):
        """What a checkpoint keeps, so that the next batch is the same after a restart"""
        return {}

    def load_state_dict(self, state):
        pass

    def tensors(self):
        """Weights that a checkpoint keeps beside the model's"""
        return {}


def make_stream(tokenizer, texts):
    """All texts as one row of tokens, each with the token <|text|> at its end"""
    end = tokenizer.id["<|text|>"]
    return torch.cat([torch.tensor([*tokenizer.encode(text), end]) for text in texts])


class Text(Source):
    """pretrain and long: windows of one long stream. The batch of a step is a function of (seed,
    stage, step) alone."""

    def __init__(self, run):
        self.run, config = run, run.config
        self.window = config.text_window
        train, held = source_files.python_sources(config.data, run.say)
        self.data_digest = source_files.digest_texts(train, held)
        checkpoints.check_same_on_ranks("texts (--data)", self.data_digest)
        tokenizer = run.tokenizer
        self.train = make_stream(tokenizer, train)  # (tokens,)
        self.held = make_stream(tokenizer, held)  # (tokens,)
        for what, stream in (("to train on", self.train), ("held out", self.held)):
            if len(stream) < 2 * self.window + 2:
                usage_error(
                    f"--data={config.data}: {len(stream)} tokens {what} are too few for windows of "
                    f"{self.window}"
                )

    def losses(self, step, log):
        """Yields the micro-batch losses of one step; their sum is the mean over the whole batch of
        all ranks."""
        config = self.run.config
        # At first a quarter of the window, then half. Rounded down to a multiple of 2 * cp, since
        # context parallelism cuts a sequence into that many parts.
        parts = 2 * config.cp
        window = self.window // seq_len_divisor(step, config)
        window = window // parts * parts or self.window

        # The windows begin at random places of the stream.
        rng = np.random.default_rng((config.seed, ORDER.index(config.stage), step))
        number = self.round_up_to_ranks(config.batch_tokens // window)
        starts = rng.integers(0, len(self.train) - window - 1, number)
        yield from self.cross_entropy(self.train, starts, window, log)

    def round_up_to_ranks(self, number):
        """The number of windows, rounded up so that each rank has as many: all ranks have to run
        the same number of forwards."""
        per_rank = max(1, -(-number // self.run.data_ranks))
        return per_rank * self.run.data_ranks

    def cross_entropy(self, stream, starts, window, log):
        """Yields the loss of each micro-batch of the windows of `stream` that begin at `starts`."""
        run, total = self.run, len(starts) * window
        # Each rank takes its share of the windows. Ranks that share sequences (--cp) take the same
        # windows, and of each window a part.
        mine = run.share(starts)
        size = max(1, run.config.micro_tokens // window)
        for i in range(0, len(mine), size):
            # The targets are the tokens one place later.
            rows = torch.stack([stream[s : s + window + 1] for s in mine[i : i + size]])
            rows = rows.to(run.device, non_blocking=True)
            batch = run.shard({"tokens": rows[:, :-1], "targets": rows[:, 1:]})  # (B, T) each

            # This micro-batch's part of the mean over the whole batch of all ranks.
            hidden = run.hidden(batch)  # (B, T, D)
            loss = -run.model.logprobs(hidden, batch["targets"]).sum() / total
            accumulate(log, "loss", loss.detach())
            accumulate(log, "tokens", batch["tokens"].numel())
            if run.config.mtp:
                loss = loss + run.draft_loss(batch, hidden, len(starts) * (window - 1), log)
            yield loss

    @torch.no_grad()
    def validate(self):
        """Mean loss on held-out files, fixed windows."""
        self.run.model.eval()  # the routers count no load
        # The windows lie at equal distances over the whole stream.
        number = self.round_up_to_ranks(max(8, 32768 // self.window))
        last = len(self.held) - self.window - 2
        starts = np.linspace(0, last, number).astype(int)
        log = {}
        for _ in self.cross_entropy(self.held, starts, self.window, log):
            pass

        found = {"held_out_loss": self.run.sum(log["loss"])}
        if self.run.config.mtp:
            places = len(starts) * (self.window - 1)
            found["held_out_draft_kl"] = self.run.sum(log["draft_kl"])
            found["draft_accepted"] = self.run.sum(log["draft_hits"]) / places
        return found

    def state_dict(self):
        return {"data": self.data_digest}


def padded_length(length):
    """Rows are padded to a multiple of 64, see rollout.pack."""
    return -(-length // 64) * 64


def length_groups(lengths, tokens, number, seed):
    """-> `number` groups of indices. A group holds sequences of like length, as many as have up to
    `tokens` tokens when padded: little padding, and few different shapes. lengths: (segments,)"""
    rng, groups = np.random.default_rng(seed), []
    # Each round of this loop uses every index once.
    while len(groups) < number:
        # Shuffle into pools of about 32 groups, so that every round has other groups ...
        n_pools = max(1, lengths.sum() // (32 * tokens))
        for pool in np.array_split(rng.permutation(len(lengths)), n_pools):
            # ... and cut each pool into groups, the longest sequences first. The groups of a pool
            # then come in random order.
            pool = list(pool[np.argsort(lengths[pool], kind="stable")])
            cut = []
            while pool:
                n = max(1, tokens // padded_length(lengths[pool[-1]]))
                cut.append(pool[-n:])
                del pool[-n:]
            groups += [cut[i] for i in rng.permutation(len(cut))]
    return groups[:number]


def agent_limits(config):
    return rollout.Limits(config.window, config.max_turns)


# {level: the levels that follow it in the cycle of demonstrations}. Their targets all have two
# steps. Without them some runs copy either constant of a function.
TWO_STEPS = {1: (18,), 2: (18,), 4: (19, 19)}


def demonstration_levels(levels):
    """The levels of consecutive demonstrations: a cycle, which is repeated."""
    cycle = []
    for level in levels:
        cycle += [level, *TWO_STEPS.get(level, ())]
    return cycle


def make_demonstrations(config, tokenizer, compact, numbers, bar):
    """-> [(number of a demonstration, its Rollout)], each task from its own seed. A rollout with
    summaries has several segments, and each is a training sequence."""
    cycle = demonstration_levels(levels_of(config))

    def make(i):
        # Who is asked for little effort looks and tests less: see world.expert.THOROUGH.
        setting = random.Random(f"{config.seed}/effort/{i}").choice(settings(config))
        rng = random.Random(f"{config.seed}/demo/{i}")
        # Other seeds than those of rl's tasks, which begin at seed * 1000003.
        task_number = ((config.seed or 1 << 32) << 24) + i
        task = make_training_task(config, cycle[i % len(cycle)], task_number)
        task = length_penalty.ask_for(task, setting)
        return make_demonstration(config, task, rng, tokenizer, compact)

    made = launch.compute_on_cores(make, numbers)
    return [(i, next(made)) for i in bar(numbers, "demonstrations")]


SLOPPY = 1.0  # multiplies the expert's error rates; 0: it makes no mistakes
# Fraction of the expert's wrong tool calls that are replaced by a hint and the right call.
HINT_RATE = 0.5
# Fraction of its right turns that also get a hint above them, so that a hint by itself does not
# mean that something was wrong.
NEUTRAL_HINT_RATE = 0.05


def make_demonstration(config, task, rng, tokenizer, compact, **more):
    """What the sloppy expert does with a task, with hints above some of its turns -> a Rollout.
    more: see feedback_distill.demonstrate_with_hints."""
    # Demonstrations hold hints of those rules alone that have a reminder.
    known = feedback_distill.REMINDERS
    reminders = {habit: known[habit] for habit in habits(config) if habit in known}
    return feedback_distill.demonstrate_with_hints(
        task,
        tokenizer,
        rng,
        agent_limits(config),
        SLOPPY,
        compact,
        reminders,
        HINT_RATE,
        NEUTRAL_HINT_RATE,
        **more,
    )


def make_training_task(config, level, seed):
    """A generated task, in the world that the run trains in."""
    return synth_tasks.make_task(level, seed)


# Weight, in sft, of the tokens that the expert did not write (tool outputs, tasks): copying is
# learned from them too.
CONTEXT_LOSS = 0.3
# Weight of the names and constants that it wrote, as long as the sequences are short (see
# --seq_len_warmup): whether tests pass depends on them.
COPY_LOSS = 4.0


class Demonstrations(Source):
    """sft: the expert's transcripts. The loss in the log is that of the tokens that the expert
    wrote, which a policy would have to sample."""

    def __init__(self, run):
        self.run, config = run, run.config
        # Every rank makes a share of the demonstrations, and then gets all of them.
        numbers = run.share(range(config.demos))
        mine = []
        for number, played in make_demonstrations(
            config, run.tokenizer, run.compact, numbers, run.bar
        ):
            mine.append((number, self.learnable_segments(played)))
        made = sorted(run.gather(mine), key=lambda pair: pair[0])
        self.segments = []
        for _, segments in made:
            self.segments += segments
        if not self.segments:
            usage_error(f"--window={config.window}: none of {config.demos} demonstrations fits")

        # Some demonstrations may have no segment to learn from.
        left_out = sum(not segments for _, segments in made)
        if left_out:
            run.say(
                f"--window={config.window}: {left_out} of {config.demos} demonstrations do not fit "
                "and are left out"
            )
        # Which tokens of the vocabulary are names or constants, and the batch of each step.
        self.names = self.mark_tokens(WORDS - CONSTANTS)
        self.constants = self.mark_tokens(CONSTANTS)
        self.batches = self.plan_batches()

    def learnable_segments(self, played):
        """Those of a demonstration that fit the window and hold a turn of the expert"""
        segments = []
        for segment in played.segments:
            roles = {turn.role for turn in segment.turns}
            if len(segment) <= self.run.config.window and "assistant" in roles:
                segments.append(segment)
        return segments

    def plan_batches(self):
        """For each step two groups of indices of segments, each with half of the batch's tokens.
        While the window is short, they hold only segments that fit it and in which the expert
        writes a constant: what is learned there is to copy, and tasks without it (renames, say)
        would take its place."""
        config, batches = self.run.config, []
        lengths = np.array([len(segment) for segment in self.segments])
        copies = np.array([self.writes_constant(segment) for segment in self.segments])
        divisors = [seq_len_divisor(step, config) for step in range(config.steps)]

        # The steps with the shortest window come first.
        for divisor in sorted(set(divisors), reverse=True):
            window = max(lengths.max() // divisor, lengths.min())
            fits = lengths <= window
            if divisor > 1 and (fits & copies).any():
                fits &= copies
            fitting = np.flatnonzero(fits)
            number = 2 * divisors.count(divisor)
            groups = length_groups(
                lengths[fitting], config.batch_tokens // 2, number, seed=(config.seed, divisor)
            )
            for first, second in zip(groups[::2], groups[1::2]):
                batches.append([fitting[first], fitting[second]])
        return batches

    def writes_constant(self, segment):
        """Is a constant among the tokens that the expert wrote?"""
        tokens, mask, _, _ = rollout.flatten(segment)
        written = torch.from_numpy(tokens[mask > 0])
        return bool(self.constants.cpu()[written].any())

    def mark_tokens(self, words):
        """(vocab,) True for each token that is one of these words, whatever stands around it"""
        marked = torch.zeros(self.run.model.config.vocab, dtype=torch.bool)
        for text, token in self.run.tokenizer.ranks.items():
            # a published tokenizer may know more tokens than its model
            if token < len(marked):
                marked[token] = text.decode(errors="ignore").strip(" ._`") in words
        return marked.to(self.run.device)

    def losses(self, step, log):
        """Yields the micro-batch losses of one step. Their sum is the weighted loss of all tokens,
        divided by the number of tokens that the expert wrote in the batch of all ranks."""
        config, run = self.run.config, self.run
        # The segments of this step on all ranks, and how many tokens the expert wrote in them.
        short_window = seq_len_divisor(step, config) > 1
        groups = []
        for indices in self.batches[step]:
            groups.append([self.segments[i] for i in indices])
        segments = groups[0] + groups[1]
        # flatten gives (tokens, mask, ...): the mask marks what the expert wrote.
        total = sum(int(rollout.flatten(segment)[1].sum()) for segment in segments)

        # Deal the segments to the ranks. With an even number of ranks each gets segments of one
        # group alone: they are of like length, so little is padded.
        mine = []
        for g, group in enumerate(groups):
            for j, segment in enumerate(group):
                if (2 * j + g) % run.data_ranks == run.meshes.data_rank:
                    mine.append((segment, 1.0))

        # In a batch: mask is 1 where the expert wrote the target, has_target where there is one.
        for batch in run.micro_batches(mine, spare=(groups[0][0], 1.0)):
            hidden, targets = run.hidden(batch), batch["targets"]  # (B, T, D), (B, T)
            logp = run.model.logprobs(hidden, targets, where=batch["has_target"] > 0)  # (B, T)

            # What the expert wrote weighs 1; names and constants in it weigh COPY_LOSS while the
            # window is short. What it read weighs CONTEXT_LOSS.
            mask = batch["mask"]  # (B, T)
            copied = (self.names | self.constants)[targets] & short_window  # (B, T)
            weight = torch.where(copied, COPY_LOSS, 1.0) * mask
            weight = weight + CONTEXT_LOSS * (1 - mask) * batch["has_target"]
            loss = -(logp * weight).sum() * batch["real"] / total

            # The log has the unweighted loss of what the expert wrote.
            accumulate(log, "loss", (logp.detach() * mask).sum() * batch["real"] / -total)
            accumulate(log, "tokens", batch["real_tokens"])
            if config.mtp:
                places = sum(len(segment) - 1 for segment in segments)
                loss = loss + run.draft_loss(batch, hidden, places, log)
            yield loss

    @torch.no_grad()
    def validate(self):
        """Does the model copy names and constants? -> the mean probability of each kind at the
        places where an expert without mistakes writes them, in held-out tasks"""
        config, run = self.run.config, self.run
        run.model.eval()  # the routers count no load

        # This rank's share of the tasks, as the expert solves them without a mistake.
        limits, careful = agent_limits(config), 0.0
        segments = []
        tasks = eval.held_out(12, levels_of(config))
        for number, task in run.share(list(enumerate(tasks))):
            names = settings(config)
            task = length_penalty.ask_for(task, names[number % len(names)])
            rng = random.Random(task.instance_id)
            played = rollout.demonstrate(task, run.tokenizer, rng, limits, careful, run.compact)
            for segment in played.segments:
                if len(segment) <= config.window:
                    segments.append((segment, 1.0))

        # For each kind of token: (sum of the probabilities, number of places).
        kinds = {"names": self.names, "constants": self.constants}
        totals = {name: torch.zeros(2, dtype=torch.float64) for name in kinds}
        for batch in run.micro_batches(segments, spare=(self.segments[0], 1.0)):
            probability = run.model.logprobs(run.hidden(batch), batch["targets"]).exp()  # (B, T)
            for name, marked in kinds.items():
                where = marked[batch["targets"]] & (batch["mask"] > 0)  # (B, T)
                counted = torch.stack([probability[where].sum(), where.sum()]).cpu()
                totals[name] = totals[name] + counted * batch["real"]

        # The means, over all ranks.
        found = {}
        for name, pair in totals.items():
            probability, places = [run.sum(x) for x in pair]
            if places:
                found[name] = probability / places
        return found


class Reinforcement(Source):
    """rl: sample groups of rollouts, reward them, make one update per batch. Without workers the
    policy that samples is the policy that learns. With workers it may be up to `staleness` updates
    older. This lag is kept small and not corrected (stated): there is no ratio and no clip."""

    # The constant Z by which the summed loss of every rollout is divided, instead of by its length
    loss_norm_length = 64.0
    # The levels that the curriculum may open. Level 6, beyond the evaluation's, made a laptop's RL
    # a third longer.
    may_open = synth_tasks.DEFAULT_LEVELS

    def __init__(self, run):
        self.run, config = run, run.config
        # {step: the handle of its rollouts}, {step: [(level, number, effort) of each task]}. With
        # workers, sampling runs ahead of training by up to max_staleness steps.
        self.pending_rollouts, self.sampled_tasks = {}, {}
        self.max_staleness = config.staleness if config.workers else 0
        self.start_samplers()
        self.read_tasks()
        self.curriculum = self.make_curriculum()

        # The teacher that reads the hints, the policy that RL began with, and the price of effort.
        self.teacher = self.reference = None
        if config.feedback:
            self.teacher = feedback_distill.Teacher(run.model, feedback_distill.TEACHER)
        if config.kl_coef:
            self.reference = feedback_distill.Teacher(run.model, "frozen")
        budget = length_penalty.effort_budget(config.window, config.max_turns)
        self.prices = {}  # of each setting
        for setting, weight in length_penalty.read_price_weights(config.length_penalty).items():
            self.prices[setting] = length_penalty.Price(weight, budget=budget)

    def start_samplers(self):
        """Sets self.workers, which play the rollouts, and self.publisher, which gives them the
        weights of each step."""
        # A model of its own: the policy's weights may be sharded over ranks.
        run, config = self.run, self.run.config
        tasks_per_rank = -(-config.tasks_per_step // run.data_ranks)
        options = dict(
            config=run.model.config,
            dtype=run.dtype,
            device=str(next(run.model.parameters()).device),
            tokenizer=run.tokenizer,
            temperature=config.temperature,
            plain=config.plain,
            draft=config.draft,
        )
        played = dict(group=config.group_size, limits=agent_limits(config), compact=run.compact)

        # Without workers this process samples, with the weights that it hands over itself.
        if not config.workers:
            rows = tasks_per_rank * config.group_size
            sampler = make_sampler(window=config.window, rows=rows, **options)
            self.workers = self.publisher = rollout.InTurn(sampler, **played)
            return

        # With workers each version of the weights goes through a folder.
        self.folder = owned_directory("weights", tempfile.gettempdir())
        folder = self.folder.name
        self.publisher = fast_workers.Publisher(folder, run.model.config, run.dtype)
        at_once = 1 + self.max_staleness
        parts = fast_workers.number_of_parts(config.workers, at_once)
        rows = -(-tasks_per_rank // parts) * config.group_size
        settings = dict(folder=folder, rows=rows, **played, **options)
        self.workers = fast_workers.Workers(config.workers, settings, PATCH, at_once)

    # ---- the tasks

    def read_tasks(self):
        """Sets self.tasks: {level: tasks of the file --tasks}, empty where tasks are generated."""
        config = self.run.config
        tasks = read_tasks(config.tasks) if config.tasks else []
        limits = agent_limits(config)
        has_room = [rollout.leaves_room(self.run.tokenizer, task, limits) for task in tasks]
        tasks = checks.tasks_with_room(tasks, has_room, config.window, self.run.say)
        self.tasks_digest = output_files.digest_file(config.tasks)
        checkpoints.check_same_on_ranks("tasks (--tasks)", self.tasks_digest)
        random.Random(config.seed).shuffle(tasks)
        self.tasks = {}
        for task in tasks:
            self.tasks.setdefault(task.level, []).append(task)

    def make_curriculum(self):
        """The curriculum, which chooses the level of each task. It begins with the levels of sft
        and opens others of may_open, unless --curriculum=0 fixes the mix."""
        config = self.run.config
        return synth_tasks.Curriculum(
            levels_of(config),
            config.seed,
            config.curriculum,
            self.may_open,
            sizes={level: len(tasks) for level, tasks in self.tasks.items()},
        )

    def sample_tasks(self, step):
        """The tasks of a step (the same on all ranks), easy ones first."""
        config = self.run.config
        # A step's tasks are drawn once and kept, in checkpoints too. A second draw would differ,
        # since the curriculum has moved on.
        if step not in self.sampled_tasks:
            rng = random.Random(f"{config.seed}/rl/{step}")
            sampled = [self.curriculum.next(rng) for _ in range(config.tasks_per_step)]
            # All rollouts of a task ask for the same effort: else the advantages of a group would
            # tell which setting was drawn.
            names = settings(config)
            efforts = [names[(i + step) % len(names)] for i in range(len(sampled))]
            rng.shuffle(efforts)
            self.sampled_tasks[step] = sorted(
                (*drawn, effort) for drawn, effort in zip(sampled, efforts)
            )

        tasks = []
        for level, number, effort in self.sampled_tasks[step]:
            given = (
                self.tasks[level][number]
                if self.tasks
                else make_training_task(config, level, number)
            )
            tasks.append(length_penalty.ask_for(given, effort))
        return tasks

    # ---- rollouts and their reward

    def losses(self, step, log):
        """Yields the micro-batch losses of one step: rollouts, their rewards, then what is learned
        from them, and last the numbers for the reader."""
        # 1) Rollouts and their rewards.
        start = time.time()
        groups = self.collect_rollouts(step, log)
        for group in groups:
            for played in group:
                rollout.grade(played, self.prices[length_penalty.setting_of(played.task)])
        turns = sum(played.stats["turns"] for group in groups for played in group)
        if step == 0 and not self.run.sum(turns):
            usage_error(
                f"--window={self.run.config.window}: none of the tasks leaves room for a turn"
            )
        self.update_curriculum(groups)
        log["rollout_s"] = time.time() - start

        # 2) What is learned from them.
        yield from self.group_losses(groups, log)

        # 3) For the reader: statistics, and two of the rollouts in full.
        self.log_staleness(groups, step, log)
        rows = self.run.gather(eval.rollout_rows(groups, self.run.rank))
        log.update(rollout_statistics.describe_rows(rows, eval.HABITS))
        if self.run.rank == 0:
            path = self.run.out / "transcripts.jsonl"
            detect = feedback_distill.detect
            rollout_statistics.write_best_and_worst(
                path, step + 1, groups, self.run.tokenizer, detect, self.run.say
            )

    def collect_rollouts(self, step, log):
        """-> the groups of rollouts of this rank's tasks of this step"""
        run, config = self.run, self.run.config
        log.update(self.publisher.publish(step, run.full_state()))

        # Ask now for the rollouts of this step and of the next max_staleness steps. They are
        # sampled with weights at least as new as this step's, so when a step is trained, no token
        # in it is older than max_staleness updates.
        last = min(step + self.max_staleness, config.steps - 1)
        for later in range(step, last + 1):
            if later not in self.pending_rollouts:
                tasks = self.sample_tasks(later)
                mine, numbers = run.share(tasks), run.share(range(len(tasks)))
                seed = config.seed * 1_000_003 + later
                self.pending_rollouts[later] = self.workers.submit(mine, numbers, seed)

        pending = self.pending_rollouts.pop(step)
        del self.sampled_tasks[step]
        return self.leave_out_failed(self.workers.collect(pending), log)

    def leave_out_failed(self, groups, log):
        """-> the groups without the rollouts that the machine failed. Those get no reward and no
        gradient, and are in no mean. The log counts them, and one line tells their causes. Where
        nothing is left on any rank, the run ends with the cause."""
        kept, lost = rollout.drop_failed(groups)
        causes = self.run.gather([played.failure for played in lost])
        total = self.run.config.tasks_per_step * self.run.config.group_size
        log["machine_failures"] = len(causes)
        self.num_rollouts = total - len(causes)
        # A rank that has nothing left to learn from still runs the forwards, with this segment.
        self.spare_segment = groups[0][0].segments[0] if groups else None
        if causes:
            failures.say_lost_rollouts(self.run.say, causes, total)
        return kept

    def update_curriculum(self, groups):
        """The curriculum learns how many rollouts of each group solved their task. It learns those
        of all ranks, in the same order, so it stays the same on every rank."""
        results = []
        for group in groups:
            solved = sum(played.solved for played in group)
            results.append((group[0].task.level, solved, len(group)))
        for level, solved, total in sorted(self.run.gather(results)):
            self.curriculum.update(level, solved, total)

    def log_staleness(self, groups, step, log):
        """By how many updates the policy that sampled a token was older: mean and maximum"""
        run, lag = self.run, rollout.staleness(groups, step)
        total, number = run.sum(lag.sum()), run.sum(len(lag))
        if number:
            log["stale"] = total / number
        log["stalest"] = max(run.gather([int(lag.max(initial=0))]))
        log["restarts"] = run.sum(self.workers.restarts)

    # ---- what is learned from them

    def group_losses(self, groups, log):
        """Yields micro-batch losses: the policy gradient over all segments and, on the tokens that
        a hint speaks about, the divergence from the teacher that has read it."""
        run, config = self.run, self.run.config
        # The step's advantages and hints, and the numbers of all ranks by which it divides.
        items = self.weigh_segments(groups)
        flagged = sum(hint.num_targets for segment, _ in items for hint in segment.hints)
        flagged = int(run.sum(flagged))
        normaliser = self.num_rollouts * self.loss_norm_length
        # In how many places of the whole step the head drafts, where there is one
        places = config.mtp and run.sum(sum(len(segment) - 1 for segment, _ in items))

        # Sums stay on the device until the step's end: reading one here would wait for the GPU.
        sums = dict.fromkeys(("mismatch", "feedback_kl", "teacher_tokens", "hint_logprob_gap"), 0.0)
        spare = items[0] if items else (self.spare_segment, 0.0)
        for batch in run.micro_batches(items, spare):
            # 1) The teacher's distributions of the flagged tokens, and the log-probabilities of the
            #    policy that RL began with. A spare batch has no hints.
            if config.feedback:
                hinted = batch["segments"] if batch["real"] else []
                targets = feedback_distill.pack_hinted(hinted).to(run.device)
                teacher_logits = self.teacher(targets)  # (N, V)
                accumulate(sums, "teacher_tokens", targets.real_tokens)
            reference = self.reference_logprobs(batch) if config.kl_coef else None

            # 2) The policy gradient.
            hidden = run.hidden(batch)  # (B, T, D)
            logp = run.model.logprobs(
                hidden, batch["targets"], config.temperature, batch["mask"] > 0
            )  # (B, T)
            loss = batch["real"] * self.policy_objective(logp, batch, normaliser, reference)
            mismatch = ((logp.detach() - batch["logprobs"]).abs() * batch["mask"]).sum()
            accumulate(sums, "mismatch", batch["real"] * mismatch.double())

            # 3) The targeted feedback, from the same forward.
            if config.feedback:
                student = feedback_distill.student_logits(run.model, hidden, targets)  # (N, V)
                count = max(self.num_rollouts, flagged)
                distance = feedback_distill.feedback_loss(student, teacher_logits, count)
                loss = loss + config.feedback * distance
                gap = feedback_distill.logprob_gap(student, teacher_logits, targets.token)
                accumulate(sums, "feedback_kl", distance.detach().double())
                accumulate(sums, "hint_logprob_gap", gap.double())

            # 4) The head that drafts follows the policy.
            if config.mtp:
                loss = loss + batch["real"] * run.draft_loss(batch, hidden, places, log)
            accumulate(log, "tokens", batch["real_tokens"])
            yield loss

        # The log. mismatch: mean absolute difference of the trainer's log-probs from the sampler's.
        sampled = sum(played.stats["sampled"] for group in groups for played in group)
        mismatch, sampled = run.sum(sums["mismatch"]), run.sum(sampled)
        if sampled:
            log["mismatch"] = mismatch / sampled
        log["feedback_kl"] = run.sum(sums["feedback_kl"])
        log["flagged"] = flagged
        log["teacher_tokens"] = run.sum(sums["teacher_tokens"])
        # By how many nats a hint makes a flagged token less likely, on average. Where it is zero,
        # there is nothing to distil.
        gap = run.sum(sums["hint_logprob_gap"])
        if flagged:
            log["gap"] = gap / flagged

    def weigh_segments(self, groups):
        """-> [(segment, advantage of its rollout)]. Each segment holds its hints afterwards."""
        items = []
        for group in groups:
            for played, advantage in zip(group, self.group_advantages(group)):
                # All segments of a rollout have its advantage; a hint belongs to one of them.
                items += [(segment, advantage) for segment in played.segments]
                hints = self.find_hints(played)
                feedback_distill.attach_hints(self.run.tokenizer, played, hints)
        return items

    def find_hints(self, played):
        """What the teacher reads above the turns with a bad habit: at most one hint per turn"""
        config = self.run.config
        return feedback_distill.detect(played, habits(config)) if config.feedback else []

    def group_advantages(self, group):
        """(G,) The advantage of each rollout of a group: its reward less the group's mean"""
        return rollout.advantages([played.reward for played in group])

    def policy_objective(self, logp, batch, normaliser, reference):
        """The loss whose gradient is the policy's, over one micro-batch. logp, reference: (B, T)"""
        return rollout.policy_loss(logp, batch, normaliser, reference, self.run.config.kl_coef)

    def reference_logprobs(self, batch):
        """(B, T) Log-probabilities of the policy that RL began with. Its routers choose the experts
        themselves: the routes of sampling are those of the policy that has moved."""
        run = self.run
        with torch.no_grad(), self.reference.swapped_weights():
            hidden = run.model(batch["tokens"], batch.get("positions"))
            return run.model.logprobs(
                hidden, batch["targets"], run.config.temperature, batch["mask"] > 0
            )

    def after_step(self):
        if self.teacher:
            self.teacher.update()

    def validate(self):
        """After the last step. Held-out tasks are for the stage eval; the samplers end here."""
        self.workers.close()
        return {}

    # ---- checkpoints

    def state_dict(self):
        kept = self.curriculum.state_dict()
        return {**kept, "ahead": dict(self.sampled_tasks), "file": self.tasks_digest}

    def load_state_dict(self, state):
        self.curriculum.load_state_dict(state)
        self.sampled_tasks = dict(state.get("ahead", {}))

    def tensors(self):
        """What belongs in a checkpoint beside the model: the weights of the teacher and of the
        reference, sharded like the model's."""
        found = {}
        for role, held in (("teacher", self.teacher), ("reference", self.reference)):
            if held:
                for name, weight in held.weights.items():
                    found[f"{role}.{name}"] = weight
        return found


# ---------------------------------------------------------------- what the stages share


# A head's query and key have at least so many dimensions with rotary embedding. To copy, a head has
# to find the token before another; with 16 the laptop model learns that hundreds of steps later, or
# only in part.
MIN_QK_ROPE = 32


def model_config(config, vocab):
    """The shape of a model that starts from random weights"""
    sizes = {name: getattr(config, name) for name in SIZES}
    head = config.dim // config.heads
    sizes.update(qk_nope=head, qk_rope=max(head // 2, MIN_QK_ROPE), v_dim=head)
    sizes["precision"] = "" if config.precision == "dtype" else config.precision
    sizes["mtp"] = int(config.mtp)

    # Gates are divided by their sum, except with one expert per token: there the quotient would
    # always be 1, and the loss would teach the router nothing. Then the gate is the router's score.
    return ModelConfig(vocab=vocab, norm_gates=config.num_experts_per_tok > 1, **sizes)


STAGE = {"pretrain": Text, "long": Text, "sft": Demonstrations, "rl": Reinforcement}


class Run:
    """What the stages share: the place of this process among the ranks, the tokenizer, the model,
    and the hook that asks the agent for summaries."""

    said_edits = False  # see say_edits
    origin = None  # of the stage, see checkpoints.describe_origin; None where it began from noise
    minutes_before = 0.0  # that the run has taken before this command's stage

    def __init__(self, config):
        # The device, the ranks, and how they share data and weights.
        self.config, self.out, self.start = config, Path(config.out), time.time()
        self.device = hardware.device_of(config)
        try:
            self.rank, self.world, self.meshes = launch.watch_ranks(self.meet_ranks)
        except ValueError as error:
            usage_error(str(error))
        self.data_ranks = self.meshes.layout.data
        # True: no weight is sharded, every rank holds the whole model.
        self.replicas = self.meshes.layout.shard == 1 and config.ep == 1
        self.dtype = hardware.dtype_of(config)
        self.compact = summarize.make_compaction(asdict(config))
        self.tokenizer = self.model = None

    def meet_ranks(self):
        """Waits for the other ranks, where there are any -> (rank, their number, the meshes)"""
        config, patience = self.config, 1800
        rank, world = hsdp.join_process_group(self.device, patience)
        degrees = config.cp, config.ep, config.dp_replicate
        return rank, world, hsdp.make_meshes(world, *degrees, self.device, patience)

    def bar(self, iterable, name):
        return tqdm(
            iterable, desc=f"{name:>14}", disable=self.rank > 0, leave=False, dynamic_ncols=True
        )

    def say(self, text):
        if self.rank == 0:
            with contextlib.suppress(OSError):  # whoever read along is gone
                tqdm.write(text)

    def say_edits(self):
        """Once in a process: which twins step aside, because what they stand for was edited"""
        if not self.config.plain and not Run.said_edits:
            Run.said_edits = True
            for line in fast.describe_edits():
                self.say(line)

    def minutes(self):
        """Minutes that the run has taken until now: its earlier stages and commands too"""
        return self.minutes_before + (time.time() - self.start) / 60

    # ---- ranks

    def share(self, rows):
        """This data rank's part of a list: every data_ranks-th item, beginning at its own number"""
        return rows[self.meshes.data_rank :: self.data_ranks]

    def sum(self, number):
        """The sum of a number over all ranks, in float64"""
        number = torch.as_tensor(number, dtype=torch.float64, device="cpu")
        return float(hsdp.all_reduce_sum(number))

    def gather(self, items):
        """The items of all data ranks, on every rank."""
        if self.data_ranks == 1:
            return items
        lists = [None] * self.world
        dist.all_gather_object(lists, items)
        # Ranks that share sequences (--cp) hold the same items, so every cp-th rank's are enough.
        gathered = []
        for part in lists[:: self.config.cp]:
            gathered += part
        return gathered

    def shard(self, batch):
        """A batch -> this rank's part of its sequences, with the positions of the part in them"""
        part = dict(batch)
        for name, value in batch.items():
            if torch.is_tensor(value):
                value = value.to(self.device, non_blocking=True)  # see fast.cpu_kernels.to_device
                part[name] = hsdp.shard_sequence(value, self.meshes)
        length = batch["tokens"].shape[1]
        part["positions"] = hsdp.local_positions(length, self.meshes, self.device)
        return part

    def micro_batches(self, items, spare):
        """This rank's (segment, number) pairs -> packed batches of about micro_tokens tokens, with
        segments of like length together. Every rank yields the same number of batches: one that
        has fewer goes on with `spare` at weight zero."""
        # The longest ones first, as many as fit when padded to the longest.
        items = sorted(items, key=lambda item: len(item[0]))
        batches = []
        while items:
            longest, _ = items[-1]
            number = max(1, self.config.micro_tokens // padded_length(len(longest)))
            batches.append(items[-number:])
            del items[-number:]

        most = max(self.gather([len(batches)]))
        for i in range(most):
            # Pack this rank's next batch, or the spare.
            real = i < len(batches)
            part = batches[i] if real else [spare]
            segments = [segment for segment, _ in part]
            numbers = [number * real for _, number in part]
            batch = rollout.pack(segments, numbers, 64 * self.config.cp)
            # A spare is computed like any batch, but its tokens count as padding.
            if not real:
                batch["tokens"] = torch.full_like(batch["tokens"], -1)
            # Each rank that shares a sequence (--cp) counts an equal share of its tokens, so that
            # the sum over all ranks is right.
            real_tokens = sum(map(len, segments)) / self.config.cp if real else 0
            batch = self.shard(batch)
            batch.update(segments=segments, real=real, real_tokens=real_tokens)
            yield batch

    # ---- the model

    def hidden(self, batch):
        """(B, T, D) Hidden states. With router replay, tokens go to the experts that were recorded
        at sampling."""
        replay = batch.get("routes") if self.config.router_replay else None
        return self.model(batch["tokens"], batch.get("positions"), replay)

    def draft_loss(self, batch, hidden, places, log):
        """The loss of the draft head (--mtp) for a micro-batch: its KL divergence from the model's
        own predictions, summed and divided by the `places` of the whole batch. Its gradient reaches
        the draft head alone."""
        loss = mtp_loss(self.model, batch["tokens"], hidden, places)
        accumulate(log, "draft_kl", loss.detach())
        if not self.model.training:
            hits = count_draft_hits(self.model, batch["tokens"], hidden)
            accumulate(log, "draft_hits", hits)
        return loss

    def clip_gradients(self):
        """Scales the gradient down to the norm --grad_clip -> the model's norm before. The draft
        head has a loss of its own and is clipped by itself: in a common norm, its gradient would
        make the model's smaller."""
        model, limit = self.model, self.config.grad_clip
        if not self.config.mtp:
            return hsdp.clip_grad_norm(model, limit)
        head = list(model.mtp.parameters())
        rest = [p for name, p in model.named_parameters() if not name.startswith("mtp.")]
        hsdp.clip_grad_norm(model, limit, head)
        return hsdp.clip_grad_norm(model, limit, rest)

    def full_state(self):
        return hsdp.full_state(self.model)

    def make_model(self, saved):
        """A model with random weights or those of --init_from, or one that a checkpoint will fill.
        saved: what that checkpoint says of itself, or None"""
        config = self.config
        if config.init_from:
            self.tokenizer, self.model = published_model.build_published(
                self, saved, hsdp.own_parts
            )
        elif saved:
            self.build(make_tokenizer(**saved["tokenizer"]))
        else:
            self.build(train_tokenizer(config))

    def build(self, tokenizer):
        """Makes the model. Its weights are drawn on the CPU from the seed, so they are the same on
        every rank and in every layout."""
        torch.manual_seed(self.config.seed)
        self.tokenizer = tokenizer
        model = model_config(self.config, tokenizer.vocab).build_model()
        if self.config.stage != "pretrain":
            model.extend_window(self.config.yarn)
        self.model = self.prepare_model(model.to(self.device))

    def prepare_model(self, model):
        """Puts a model in the form that is trained: the fast twins of its parts, the dtypes,
        compiled blocks, and weights that are sharded over the ranks."""
        config = self.config
        if not config.plain:
            fast.accelerate(model)

        # The dtype of the products, and that of the weights.
        model.compute_in(self.dtype).recompute = config.recompute
        if config.weight_dtype == "bfloat16":
            # Not model.bfloat16(), which would also convert the buffers: the routers' counts.
            for p in model.parameters():
                p.data = p.data.bfloat16()

        # Not in sft and rl, where batches have many shapes and each would be compiled anew.
        if config.compile and config.stage in ("pretrain", "long"):
            fast.compile_blocks(model)

        # Every rank holds all weights, or a shard of each.
        if self.replicas:
            return hsdp.same_weights(model)
        comm_dtype = None if self.dtype == torch.float32 else self.dtype
        return hsdp.parallelize(model, self.meshes, comm_dtype)

    def make_optimizer(self):
        """Muon takes every matrix and stack of matrices, per head and per expert; AdamW the
        embedding, the head, the gains and the routers."""
        config, named = self.config, list(self.model.named_parameters())
        groups = split_by_name(named, self.model.config.heads)
        if config.optimizer == "adamw":
            groups = [dict(params=named, algorithm="adamw", weight_decay=0.0)]
        for group in groups:
            group["lr"] = config.adam_lr
            if group["algorithm"] == "muon":
                group |= dict(lr=config.lr, weight_decay=config.weight_decay)

        # Weights in bf16 would lose small updates, unless they are rounded by chance.
        choose = (lambda form: form) if config.plain else fast.choose
        kind = RoundingMuon if config.weight_dtype == "bfloat16" else choose(Muon)
        optimizer = kind(
            groups,
            replicas=self.meshes.dense if self.replicas else None,
            ns_dtype=self.dtype,
            newton_schulz=choose(newton_schulz),
        )
        hsdp.keep_gradients_in_fp32(self.model)
        # The schedule multiplies these.
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
        return optimizer


# ---------------------------------------------------------------- the loop


def train(config, interrupted, sources=None):
    """One stage: build, load, loop, save. True if it ran to its end, False if a signal ended it.
    interrupted: the list of signals that have come; sources: where the values of config come from,
    see FLAGS.merge"""
    # 1) The stage goes on from its own checkpoint (begun), or starts from that of the stage before
    #    (previous). Either must fit what was asked for.
    stage = config.stage
    out, origin = checkpoints.checkpoint_paths(stage, config.out, config.start_from)
    begun, previous = checkpoints.find_start(config, out, origin, SIZES, PATCH)
    if begun:
        config = replace(config, start_from=begun["config"]["start_from"])
    run = Run(config)
    run.origin = checkpoints.describe_origin(origin) if previous else (begun or {}).get("origin")
    start = out if begun else origin
    digest = checkpoints.digest_checkpoint(start) if start else ""
    checkpoints.check_same_on_ranks("checkpoints (--out, --start_from)", digest)
    # The minutes that were taken before stand in the last line of the log of what is resumed.
    if begun or previous:
        run.minutes_before = step_log.minutes_so_far(start.parent, start.name)
    if begun and run.origin and not checkpoints.find_origin(begun, origin):
        run.say(f"{stage} began from {run.origin['path']}, which was moved or made anew since")
    if begun and begun["step"] == config.steps:
        begun_from = f", begun from {config.start_from}" if config.start_from else ""
        run.say(f"{stage}: finished already ({out}){begun_from}")
        return True
    run.say(describe_stage(config, sources))
    run.say_edits()

    # 2) The model: of a checkpoint, of a published folder, or with random weights.
    try:
        run.make_model(begun or previous)
    except (ValueError, OSError) as error:
        usage_error(str(error))
    optimizer = run.make_optimizer()

    # 3) The weights, and where the batches and the losses come from.
    checks.say_other_rules(config, origin, previous, run.say)
    checks.say_positions(config, run.model.config.window, run.say)
    label = checkpoints.unfinished_label(origin) if previous else ""
    if label:
        run.say(f"{stage} begins from {origin}, which is {label}")
    try:
        if previous:
            checkpoints.load_checkpoint(origin, run.model)
        source = STAGE[stage](run)
        if begun:
            source.load_state_dict(begun["source"])
            checkpoints.load_checkpoint(out, run.model, optimizer, source.tensors())
    except ValueError as error:
        usage_error(str(error))

    # 4) The loop. From here on a signal ends training after its step, with a checkpoint. The last
    #    one may still be written when the loop has ended.
    launch.stop_after_step(interrupted)
    first_step = begun["step"] if begun else 0
    with checkpoints.saves_finished():
        return loop(run, source, optimizer, first_step, interrupted, out)


def loop(run, source, optimizer, step, interrupted, out):
    """From `step` to the stage's last one. True if it came there, False if a signal ended it.
    source: the stage's batches and losses; out: the folder of its checkpoint"""
    config = run.config
    log_file = run.out / f"{config.stage}.jsonl"
    save_every = config.save_every or max(1, config.steps // 10)
    if run.rank == 0:
        step_log.keep_lines(log_file, step)
    with step_log.progress_bar(run, step) as bar:
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

            # 3) The update. It is skipped where the gradient is zero (that of a draft head aside):
            #    there is nothing to learn, but the momentum of AdamW and Muon would change and move
            #    the weights all the same.
            try:
                norm = run.clip_gradients()
            except ValueError as error:
                usage_error(
                    f"{config.stage}, step {step + 1}: {error}; the last checkpoint is whole. Take "
                    "smaller --lr and --adam_lr, and another --out"
                )
            if norm != 0:
                optimizer.step()
            optimizer.zero_grad()

            # 4) The routers' biases follow the load, and in rl the teacher follows the policy.
            max_load_ratio = update_router_bias(run.model, bias_rate(run), hsdp.all_reduce_sum)
            source.after_step()
            step += 1

            # 5) The log; after the last step with numbers from held-out data.
            log = complete_log(run, optimizer, log, step, start)
            log.update(norm=float(norm), load=max_load_ratio)
            if step == config.steps:
                # Not compiled: for this one use, without gradients, a block would be compiled anew.
                with torch.compiler.set_stance("force_eager"):
                    log.update(source.validate())
                log["minutes"] = run.minutes()
            problem = step_log.report(run, bar, log, log_file)

            # 6) A checkpoint: all that the next step depends on.
            stopping = launch.agree_to_stop(run, interrupted, problem)
            if step % save_every == 0 or step == config.steps or stopping:
                save_checkpoint(run, source, optimizer, step, out)
            if step % 20 == 0 or log["seconds"] > 2:
                hardware.release_memory()
            if stopping:
                return False
    # A signal may have come during the last save.
    return not launch.agree_to_stop(run, interrupted, "")


def schedule(step, config):
    """Share of the peak learning rate: a linear warm-up, a plateau, a linear fall to a tenth."""
    rising = (step + 1) / max(1, config.warmup * config.steps)
    falling = (config.steps - step) / max(1, config.decay * config.steps)
    return min(1.0, rising, max(0.1, falling))


# The numbers of the log of which each rank has a part; they are summed over the ranks.
SUMMED = {"loss", "tokens", "draft_kl"}
# {algorithm of a parameter group: the flag of its peak learning rate}, a key of the log
RATE_FLAGS = {"muon": "lr", "adamw": "adam_lr"}


def complete_log(run, optimizer, log, step, start):
    """-> the numbers of a step, summed over the ranks where each has a part, with the learning
    rates, the speed and the memory. start: when the step began"""
    completed = {"step": step}
    for key, value in log.items():
        completed[key] = run.sum(value) if key in SUMMED else value
    for group in optimizer.param_groups:
        completed[RATE_FLAGS[group["algorithm"]]] = group["lr"]
    completed["seconds"] = time.time() - start
    completed["minutes"] = run.minutes()
    completed["tokens_per_s"] = completed["tokens"] / completed["seconds"]
    completed["memory"] = run.sum(hardware.peak_memory())
    return completed


def save_checkpoint(run, source, optimizer, step, out):
    """Writes all that the next step depends on."""
    extra = {
        "config": asdict(run.config),
        "model": vars(run.model.config),
        "tokenizer": run.tokenizer.state_dict(),
        "step": step,
        "source": source.state_dict(),
        "patch": PATCH,
        "origin": run.origin,
    }
    checkpoints.save_checkpoint(out, run.model, optimizer, extra, source.tensors())


BALANCE_RATE = 2e-3  # change of a router's bias per step, to balance the experts' load


def bias_rate(run):
    """How far a step moves the routers' biases. It is 0 in two cases. A published model's biases
    are good already, and softmax routers have none. Under router replay the load counts the
    experts of sampling, for the log alone; a new bias would make the trainer's routing differ from
    the sampler's."""
    config = run.config
    replayed = config.stage == "rl" and config.router_replay
    return 0.0 if config.init_from or replayed else BALANCE_RATE


# ---------------------------------------------------------------- evaluation and the command


def evaluate_run(config, given, sources):
    """The stage eval: the policies before and after RL, by eval.py"""
    run = Run(config)
    asked = evaluation.find_policies(run, given, SIZES, PATCH)
    run.say(describe_stage(config, sources))
    run.say_edits()
    if not evaluation.is_done(run, asked):
        *records, episodes = eval.evaluate(
            run, asked.config, asked.paths, asked.made, asked.published
        )
        evaluation.write_evaluation(run, asked, eval.summarize_policies(*records), episodes)


def main(argv):
    # Which stages, and with which configurations? All of them are checked before the first begins.
    given = FLAGS.parse(argv)
    if "export" in given:
        config = FLAGS.configure(given, FLAGS.stages_of(given)[0])
        return published_model.export_run(config, given, eval.load_policy)
    configs = FLAGS.configure_stages(given)
    checks.check_surroundings(configs, given, hsdp.check_cards)
    first = next(iter(configs.values()))
    with (
        launch.run_lock(first.out),
        failures.explain_failures(first, argv),
        launch.restored_process(partial(failures.end_stopped, first, argv)),
        failures.report_rank_failure(),
    ):
        run_stages(argv, configs, given)


def run_stages(argv, configs, given):
    """The stages, one after the other, in as many processes as they want."""
    # Until there is something to save, a signal ends the command at once.
    launch.stop_at_once()

    # Start the other processes, and check how the ranks share the work.
    for stage, config in configs.items():
        configs[stage] = launch.launch_local_ranks(argv, config, PROGRAM)
    checks.check_layout(configs, hsdp.Layout)
    checks.say_idle_flags(configs, given)

    interrupted = []
    for stage, config in configs.items():
        launch.stop_at_once()
        _, sources = FLAGS.merge(given, stage)
        if stage == "eval":
            evaluate_run(config, given, sources)
        elif not train(config, interrupted, sources):
            failures.end_stopped(config, argv, max(interrupted, default=0))
        # Release a stage's memory before the next one begins.
        gc.collect()
        hardware.release_memory()


if __name__ == "__main__":
    main(sys.argv[1:])
