"""Tokenizers, tasks and small policies that the tests of sampling share"""

import numpy as np
import torch
import torch.nn.functional as F

import fast
from published.grouped_query import config_of
from small import SIZES
from command.bpe import train_bpe
from rollout import CONTROLS, SPLIT, Call, Rollout, Segment, Limits, Tokenizer, Turn, agent
from rollout import flatten, grade
from summarize import Compaction
from synth_tasks import example_texts
from world.task import Task

TEXTS = example_texts(12, 0)


# A tokenizer whose tokens are the bytes (and the special tokens)
BYTES = Tokenizer({bytes([b]): b for b in range(256)})


def fit_tokenizer(texts, vocab):
    """A tokenizer with `vocab` entries, control tokens included, learned from the texts"""
    return Tokenizer(train_bpe(texts, vocab - len(CONTROLS), SPLIT))


# A tokenizer with merges, fitted to TEXTS
TRAINED = fit_tokenizer(TEXTS, 330)


# Tasks with prompts of different lengths
TASKS = [
    Task(f"t{i}", prompt, {"a.py": "def f():\n    pass\n"}, {})
    for i, prompt in enumerate(
        ("Put back a.f", "Some functions are missing.", "x", "Put back a.g: add 3, return the sum")
    )
]


def target_logprobs(logits, targets, temperature=1.0):
    """logits (B, T, V), targets (B, T) -> log-probs of the targets (B, T), by cross-entropy of
    torch: the oracle for the sampler's log-probs"""
    return -F.cross_entropy(
        logits.flatten(0, 1) / temperature, targets.flatten(), reduction="none"
    ).view(targets.shape)


class Fixed:
    """Stands for a workspace with no files. The fixture `answers` in conftest.py gives it tools."""

    def __init__(self, task):
        self.task = task

    def files(self):
        return {}


def policy(seed=0, **changes):
    """A random model that likes to call tools and to end its turns: otherwise hardly a turn would
    end."""
    # The vocabulary of TRAINED; `changes` are other fields of ModelConfig, a GQA model's too.
    torch.manual_seed(seed)
    sizes = SIZES | dict(vocab=TRAINED.vocab, context=160)
    model = fast.accelerate(config_of({**sizes, **changes}).build_model())

    # Parameters that start as zeros, such as the head, get random values.
    with torch.no_grad():
        for p in model.parameters():
            if p.abs().sum() == 0:
                p.normal_(std=p.shape[-1] ** -0.5)

    # Three special tokens get higher logits, and the model's own logits are halved.
    favour = torch.zeros(TRAINED.vocab)
    for name, extra in (("<|call|>", 7.5), ("<|arg|>", 5), ("<|end|>", 5.8)):
        favour[TRAINED.id[name]] = extra
    plain = model.logits
    model.logits = lambda hidden: 0.5 * plain(hidden) + favour
    return model.requires_grad_(False)


def graded_rollout(passed, finished, price):
    """A rollout whose effort is 6.8 by hand: 20 tokens of thought, 40 of a call, 100 of output, 20
    at the end (1 + 2 + 1 + 1), one call (.2), two turns (1.6)"""
    act = Turn("assistant", [0] * 61, calls=[Call("read_file", ["a.py"])], thinking=20)
    turns = [Turn("user", [0] * 3), act, Turn("tool", [0] * 101), Turn("assistant", [0] * 21)]
    rollout = Rollout(TASKS[0], [Segment(turns)], passed=bool(passed), finished=bool(finished))
    grade(rollout, price)
    return rollout


# Window in tokens, turns, tokens of a turn.
LIMITS = Limits(160, 14, 24)


# Window, and the tokens from which on a summary is asked for.
COMPACT = Compaction(160, 50)


def sample(sampler, tasks, seeds, compact=COMPACT, limits=LIMITS, patient=True):
    """Runs one agent per task -> their rollouts"""
    return sampler.run(
        [agent(task, TRAINED, Fixed(task), limits, compact) for task in tasks],
        seeds,
        patient=patient,
    )


def same(rollout, other):
    """Asserts that two rollouts have the same tokens and masks, and log-probs that differ by rounding
    only"""
    a, b = [[flatten(e) for e in c.segments] for c in (rollout, other)]
    assert [x[0].tolist() for x in a] == [x[0].tolist() for x in b] and [
        x[1].tolist() for x in a
    ] == [x[1].tolist() for x in b]
    for x, y in zip(a, b):
        np.testing.assert_allclose(x[2], y[2], atol=1e-5, rtol=1e-5)
