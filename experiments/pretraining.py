"""pretraining.py: What is pretraining worth, once SFT and RL have followed?

Stated (Technical Report on Composer 2): more continued pretraining gives more reward after RL, and
the loss on code of their own tells so in advance. Three budgets of pretraining, on the library
alone and with half of the text from generated codebases of the training split (no transcripts);
then the same SFT and the same RL.

    30 steps
    120 steps                     the recipe
    480 steps
    30 steps, with codebases      and so on

    python -m experiments.pretraining
    python -m experiments.pretraining --positions=out/run     what does the long stage buy?

The figure sets what is solved against three losses: after pretraining on codebases that nobody has
seen, the same on files of the library, and at the end of SFT.

Found, a few versions before commit 534553e, of the library alone: something, up to a point, with
.656 to .847 solved after 30 steps, .868 to .906 after 120, .351 to .892 after 480. What decides is
the loss after SFT, which more pretraining did not lower. The long stage buys next to nothing at
this size. Figure: figures/pretraining.png. With codebases, and their loss: not run yet.
"""

import math
import sys
from pathlib import Path

import numpy as np
import torch

import eval
import synth_tasks
import train
from command import source_files, step_log
from experiments import runner
from experiments.runner import Arm, Experiment

CODEBASES = 3000  # some million tokens: as many as half of 480 steps reads
HELD_OUT = 100


# 1. Text of generated codebases
def codebase_texts(number, seed, split):
    """All files of `number` codebases as they are before a deletion, but for the runner of their
    tests, which is the same in all"""
    texts = []
    for i in range(number):
        task = synth_tasks.make_task(i % 6, seed + i, split)
        files = {**task.files, **task.solution}
        texts += [text for path, text in files.items() if path != "check.py"]
    return texts


class WithCodebases(train.Text):
    """Half of the stream is the library, half codebases, over and over where they are fewer."""

    def __init__(self, run):
        super().__init__(run)
        texts = codebase_texts(CODEBASES, run.config.seed << 24, "train")
        codebases = train.make_stream(run.tokenizer, texts)  # (tokens,)
        times = -(-len(self.train) // len(codebases))
        self.train = torch.cat([self.train, codebases.repeat(times)[: len(self.train)]])


def with_codebases():
    train.STAGE["pretrain"] = WithCodebases


# 2. What a loss foretells. `more` gets the folder of a run, and may read all that is in it.
def loss_on_codebases(folder):
    """Nats a token, in windows of pretraining's length"""
    model, tokenizer, config = eval.load_policy(folder)
    stream = train.make_stream(tokenizer, codebase_texts(HELD_OUT, 0, "heldout"))
    return float(token_losses(model, cut_windows(stream, config["context"])).mean())


def cut_windows(stream, window):
    """A stream (tokens,) -> rows (B, window + 1), of which each begins where the one before ends"""
    return stream.unfold(0, window + 1, window)


@torch.no_grad()
def token_losses(model, rows):
    """(B, T + 1) tokens -> (B, T), nats"""
    # Some rows at a time: the logits of all of them are much memory.
    parts = [model.logprobs(model(part[:, :-1]), part[:, 1:]) for part in rows.split(16)]
    return -torch.cat(parts)


def read_losses(folder, policies):
    """The three numbers that could foretell what RL reaches"""
    pretrained = step_log.read_step_log(folder, "pretrain")[-1]
    of_sft = [line["loss"] for line in step_log.read_step_log(folder, "sft")[-50:]]
    return {
        "loss on codebases": loss_on_codebases(folder / "pretrain"),
        "loss on the library": pretrained["held_out_loss"],
        "loss after SFT": float(np.mean(of_sft or math.nan)),
    }


# 3. What the long stage buys
BANDS = 8


def print_positions(folder):
    """Held-out files of the library, in windows as the long stage has them"""
    model, tokenizer, config = eval.load_policy(Path(folder, "pretrain"))
    long, *_ = eval.load_policy(Path(folder, "long"))
    window = long.config.window
    _, held_out = source_files.python_sources(config["data"])
    rows = cut_windows(train.make_stream(tokenizer, held_out), window)
    rows = rows[:: max(1, len(rows) // 64)]  # some, from all over them

    print(f"{folder}: loss by position, window {window}, pretraining's {model.config.context}\n")
    ends = [window * (band + 1) // BANDS for band in range(BANDS)]
    print(f"{'up to token':28s}" + "".join(f"{end:8d}" for end in ends))
    found = {"before, as it is": token_losses(model, rows)}  # (B, T) each
    model.extend_window(long.config.yarn_factor)
    found["before, stretched by YaRN"] = token_losses(model, rows)
    found["after the long stage"] = token_losses(long, rows)
    for name, nats in found.items():
        bands = nats.view(len(rows), BANDS, -1).mean((0, 2)).tolist()  # (BANDS,)
        print(f"{name:28s}" + "".join(f"{loss:8.3f}" for loss in bands))


# 4. The arms: all stages, one after the other. Their flags and patches belong to the first of them.
BUDGETS = (30, 120, 480)
EXPERIMENT = Experiment(
    question="What is pretraining worth?",
    curves=("reward",),
    arms={
        "30 steps": Arm(("--steps=30",)),
        "120 steps": Arm(),
        "480 steps": Arm(("--steps=480",)),
        **{f"{n} steps, with codebases": Arm((f"--steps={n}",), with_codebases) for n in BUDGETS},
    },
    stages=("pretrain", "long", "sft", "rl", "eval"),
    by_level=("solved",),
    more=read_losses,
    scatters=(
        ("loss on codebases", "solved"),
        ("loss on the library", "solved"),
        ("loss after SFT", "solved"),
    ),
)

if __name__ == "__main__":
    runner.main_or("experiments.pretraining", sys.argv[1:], {"--positions": print_positions})
