"""rollout.py: an agent acts in a codebase, token by token, and is trained on exactly the tokens it
sampled.

A policy reads a task, calls tools in a real directory, sees their outputs, and ends with a final
message; hidden tests give the reward. This file holds the tokenizer, the transcript, the tools, the
sampler and the policy-gradient objective.

Stated by Cursor (Technical Report, arXiv 2603.24477, sections 4.1 and 6.2): several rollouts per
task, each task used once; advantage = reward minus the group's mean, NOT divided by its standard
deviation (a group where every rollout is right would have its accidents blown up to unit
advantage); no length standardisation, no overlong masking; KL by the k1 estimator; router replay.
Seed names of the tools: read_file, edit_file, run_command, search_codebase.

    A_i = r_i - mean_group(r)
    J   = 1 / (G L) sum_i sum_t (A_i - beta k1_t) log pi(y_it)        t over sampled tokens, stop tokens included; L constant
    k1  = log pi(y_t) - log ref(y_t), detached: as a loss its expected gradient is zero, so it is part of the reward

Ours: beta, L, the reference (the policy after SFT), the tool-call format, all sizes. No ratio and
no clip: one update per batch, so the sampling policy is the policy. Left out: branching
environments and semantic search.

Asynchronous (stated: generation workers beside the trainer; weights sent every step as compressed
deltas against the previous upload, a full one now and then, swapped in mid-rollout, so that later
tokens are fresher; off-policyness is kept small, not corrected). Ours: files in a folder, xor and
zlib, a bound on staleness. What it costs: with stale tokens J's gradient is that of the current
policy at an older one's samples, and k1 is no longer unbiased.

Speculative decoding (stated for Cursor's edits, cursor.com/blog/instant-apply, where the old file
is the draft). Ours: the draft is what followed the same tokens the last time, in any row of the
batch (n-grams, as in suffix decoding, arXiv 2411.04975). It decides how many tokens a step yields,
never which: every place draws with the random number that is its own, drafted or not.

History is linear: a turn is [role] body <|end|>, tokens are only ever appended, and what was
sampled is never decoded and re-encoded on the way to the loss. Control tokens separate calls and
arguments; no text encodes to one, so no tool output can forge a call. A published model is
addressed in the form that it is used to: see Chat.

Letters: B rows, T time, V vocabulary, G rollouts per group, L MoE layers (or the length constant),
K experts per token.

    python rollout.py                 one group sampled from an untrained model and one demonstration, printed with masks
    python rollout.py --replay=out/run/transcripts.jsonl      a conversation that training left there, in colour, with masks and flags
    python rollout.py --bench         decoding against re-running the full forward, its matrix products alone, static batching
"""

import argparse
import atexit
import base64
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import queue
import random
import re
import signal
import sys
import tempfile
import threading
import time
import unicodedata
import zlib
from bisect import bisect
from collections import Counter, defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import regex  # comes with tiktoken
import tiktoken
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from moe import Cache, Model, ModelConfig, divide_by_temperature, fast_dtype, to_device
from synth_tasks import (
    ARGUMENTS,
    HINTED,
    SUMMARIZE,
    Action,
    Rehearsal,
    Sandbox,
    Task,
    Workspace,
    audit,
    call_tool,
    changes,
    expert,
    judge,
    make_task,
)
from world.machine import MachineFailure, is_machine_failure, owned_directory, try_again

# ---------------------------------------------------------------- tokenizer

CONTROLS = (
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|query|>",
    "<|summary|>",
    "<|hint|>",
    "<|call|>",
    "<|arg|>",
    "<|end|>",
    # <|text|> separates documents in pretraining
    "<|text|>",
)
# Single digits, so that numbers can be copied; words with the space or underscore before them; `def
# ` with the space after it, so that a name is the same tokens where it is defined and where it is
# used; a newline with its indentation; runs of signs.
SPLIT = r"(?:def|class|import|from) |\.(?:py|md)\b|[ _]?\p{L}+| ?\p{N}|\n[ ]*| ?[^\s\p{L}\p{N}]+|\s"


def train_bpe(texts, vocab):
    """Byte-pair encoding by counting: merge the most frequent neighbours until 256 + merges +
    controls = vocab. -> {bytes: rank}. Pairs are counted once per distinct word and updated only
    where a merge touched them."""
    words = Counter(piece for text in texts for piece in regex.findall(SPLIT, text))
    pieces = [[bytes([b]) for b in word.encode()] for word in words]
    counts, where = Counter(), defaultdict(set)
    for i, (piece, n) in enumerate(zip(pieces, words.values())):
        for pair in zip(piece, piece[1:]):
            counts[pair] += n
            where[pair].add(i)
    number, ranks = list(words.values()), {bytes([b]): b for b in range(256)}
    while len(ranks) < vocab - len(CONTROLS) and counts:
        best = max(counts, key=lambda pair: (counts[pair], pair))
        if counts[best] <= 0:
            # the text has no neighbours left to merge
            break
        ranks.setdefault(best[0] + best[1], len(ranks))
        for i in where.pop(best):
            old = pieces[i]
            new, j = [], 0
            while j < len(old):
                hit = old[j : j + 2] == list(best)
                new.append(old[j] + old[j + 1] if hit else old[j])
                j += 2 if hit else 1
            for pair in zip(old, old[1:]):
                counts[pair] -= number[i]
            for pair in zip(new, new[1:]):
                counts[pair] += number[i]
                where[pair].add(i)
            pieces[i] = new
        del counts[best]
    return ranks


PURPOSE = {
    "read_file": "Shows a file.",
    "run_command": "Runs a command in the repository and shows what it prints.",
    "edit_file": "Puts `new` in the place of `old`, which must stand in the file once; an empty `old` appends to it, or makes it.",
    "search_codebase": "Shows the lines that hold the query.",
}
CONTROL = r"<\|\w+?\|>|<｜[^｜]+｜>|</?tool_call>|</?tool_response>"


@dataclass(frozen=True)
class Chat:
    """How a family of published models writes a conversation, as in its chat template: strings in
    which control tokens go by name. What neither the policy nor a tool says (queries, summaries,
    hints) the harness says as the user."""

    # before the first user; {tools}: their signatures, a line of JSON each
    opening: str
    user: str  # with {words} in it
    assistant: str  # before what is sampled
    after_tool: str  # the same, behind a tool's output
    # before a turn's first output, an output {words} of call {i} to {name}, between two, behind the
    # last
    tool: tuple
    # before a turn's first call, a call, between two, behind the last; (): calls have our own form
    call: tuple = ()
    # what stands inside a call, see marked: its name and its arguments; "": a JSON object of the
    # two
    reads: str = ""

    @property
    def numbered(self):
        """Does a call carry a number, which its answer repeats?"""
        return bool(self.call) and "{i}" in self.call[1]

    def marks(self):
        """The control tokens of a call by what they do: {name: "begin", "end", "inside" or
        "section"}"""
        first, one, between, last = self.call
        begin, *inside, end = re.findall(CONTROL, one)
        section = re.findall(CONTROL, first + between + last)
        return {
            **dict.fromkeys(section, "section"),
            **dict.fromkeys(inside, "inside"),
            begin: "begin",
            end: "end",
        }

    def fit(self, special):
        """This, if a tokenizer has its control tokens, without calls (and how to make them) if only
        those of turns; else None"""
        has = lambda *texts: set(re.findall(CONTROL, "".join(texts))) <= {
            "<tool_response>",
            "</tool_response>",
            *special,
        }
        return (
            self
            if has(*self.call, self.opening)
            else replace(self, opening="", call=()) if has(self.user, self.assistant) else None
        )


QWEN = Chat(
    "<|im_start|>system\n# Tools\n\n<tools>\n{tools}\n</tools>\n\nA call:\n<tool_call>\n"
    '{{"name": <name>, "arguments": <object>}}\n</tool_call><|im_end|>',
    "\n<|im_start|>user\n{words}<|im_end|>",
    "\n<|im_start|>assistant\n",
    "\n<|im_start|>assistant\n",
    ("\n<|im_start|>user\n", "<tool_response>\n{words}\n</tool_response>", "\n", "<|im_end|>"),
    ("", '<tool_call>\n{{"name": {quoted}, "arguments": {arguments}}}\n</tool_call>', "\n", ""),
)
KIMI = Chat(
    "<|im_system|>tool_declare<|im_middle|>[{tools}]<|im_end|><|im_system|>system<|im_middle|>You act by calling tools.<|im_end|>",
    "<|im_user|>user<|im_middle|>{words}<|im_end|>",
    "<|im_assistant|>assistant<|im_middle|>",
    "<|im_assistant|>assistant<|im_middle|>",
    ("", "<|im_system|>tool<|im_middle|>## Return of {id}\n{words}<|im_end|>", "", ""),
    (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    r"\s*(?P<id>(?:[^\0:]*\.)?(?P<name>[^\0:.]*?)(?::(?P<i>[0-9]{1,9}))?)\s*\0<\|tool_call_argument_begin\|>(?P<arguments>[^\0]*)",
)
DEEPSEEK = Chat(
    "<｜begin▁of▁sentence｜>Tools:\n{tools}",
    "<｜User｜>{words}",
    "<｜Assistant｜>",
    "",
    (
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁output▁begin｜>{words}<｜tool▁output▁end｜>",
        "\n",
        "<｜tool▁outputs▁end｜>",
    ),
    (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    r"\s*(?:function\s*\0<｜tool▁sep｜>)?\s*(?!function\s*\0)(?P<name>[^\s\0]*)(?:\s*```(?:json)?\s|\s*\0<｜tool▁sep｜>)(?P<arguments>[^\0]*?)(?:\s*```)?\s*",
)
# Tokens that may end a turn of the published models, beside the one that a turn of ours is written
# with
ENDS = "<|im_end|>", "<|endoftext|>", "[EOS]", "<｜end▁of▁sentence｜>"


class Tokenizer:
    """tiktoken.Encoding with this project's control tokens. Text never encodes to a control token,
    nor to another special one.

    Of a published model (see `read`) the transcript's control tokens are the model's own where it
    has one with that meaning, and otherwise rows of its embedding that it never used. before:
    patterns that cut the text first, each piece by itself."""

    # Qwen2's
    CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    KIMI = "|".join(
        [
            r"[\p{Han}]+",
            *(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
                + upper
                + r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
                + lower
                + r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                for upper, lower in ("*+", "+*")
            ),
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )
    # ByteLevel's own
    GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    HOME = {
        "<|user|>": ("<|im_user|>", "<｜User｜>"),
        "<|assistant|>": ("<|im_assistant|>", "<｜Assistant｜>"),
        "<|tool|>": ("<|im_system|>", "<｜tool▁output▁begin｜>"),
        "<|end|>": ("<|im_end|>", "<｜end▁of▁sentence｜>"),
        "<|call|>": (
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<｜tool▁calls▁begin｜>",
            "<tool_call>",
        ),
        "<|arg|>": ("<|tool_call_argument_begin|>", "<｜tool▁sep｜>"),
        "<|text|>": ("<|endoftext|>", "[EOS]", "<｜begin▁of▁sentence｜>"),
    }

    def __init__(self, ranks, pattern=SPLIT, before=(), special=None, nfc=False, ends=()):
        self.ranks, self.pattern, self.before, self.special, self.nfc = (
            ranks,
            pattern,
            tuple(before),
            special,
            nfc,
        )
        self.chat = next(
            filter(None, (chat.fit(special) for chat in (QWEN, KIMI, DEEPSEEK) if special)), None
        )
        special = special or {name: len(ranks) + i for i, name in enumerate(CONTROLS)}
        self.encoding = tiktoken.Encoding(
            "nanocomposer", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
        self.id = {
            name: special[next(own for own in (name, *self.HOME.get(name, ())) if own in special)]
            for name in CONTROLS
        }
        self.name = {i: name for name, i in self.id.items()}
        self.vocab = len(ranks) + len(special)
        # Whichever of these is sampled ends the turn, and stays in it as it was sampled.
        others = [special[name] for name in ENDS if name in special] if self.special else []
        self.ends = {self.id["<|end|>"], *others, *ends}

    @classmethod
    def train(cls, texts, vocab):
        return cls(train_bpe(texts, vocab))

    def encode(self, text):
        pieces = [unicodedata.normalize("NFC", text) if self.nfc else text]
        for pattern in self.before:
            pieces = [match[0] for piece in pieces for match in regex.finditer(pattern, piece)]
        return [token for piece in pieces for token in self.encoding.encode_ordinary(piece)]

    def decode(self, tokens):
        return self.encoding.decode(list(tokens))

    def marked(self, tokens, names=None):
        """Text in which control tokens (those of `names`, or all), and nothing else, stand behind a
        zero byte: a call may speak of them, too"""
        known = {
            i: name for name, i in (self.special or {}).items() if names is None or name in names
        }
        parts = [(name, list(part)) for name, part in groupby(tokens, known.get)]
        return "".join(
            len(part) * f"\0{name}" if name else self.decode(part).replace("\0", "\ufffd")
            for name, part in parts
        )

    def spell(self, template, **words):
        """A string of a Chat -> tokens. Control tokens come out of the template alone, whatever is
        put into it."""
        names = "|".join(
            re.escape(name) for name in re.findall(CONTROL, template) if name in self.special
        )
        parts = re.split(f"({names})", template) if names else [template]
        return [
            token
            for i, part in enumerate(parts)
            for token in ([self.special[part]] if i % 2 else self.encode(part.format(**words)))
        ]

    def lead(self, after):
        """What the harness writes before the policy's turn behind one of the role `after`"""
        if not self.chat:
            return [self.id["<|assistant|>"]]
        return self.spell(
            self.chat.after_tool if after in ("tool", "recent output") else self.chat.assistant
        )

    def state_dict(self):
        more = (
            {
                "pattern": self.pattern,
                "before": self.before,
                "special": self.special,
                "nfc": self.nfc,
                "ends": sorted(self.ends),
            }
            if self.special
            else {}
        )
        return {"ranks": self.ranks, **more}

    @classmethod
    def read(cls, folder, vocab):
        """The tokenizer in the folder of a published model whose embedding has `vocab` rows:
        tiktoken.model, tokenizer.json, or vocab.json with merges.txt. Anything that could give
        other ids than the original is refused with a ValueError."""
        folder, load = Path(folder), lambda path: json.loads(path.read_text(encoding="utf-8"))
        try:
            config = (
                load(folder / "tokenizer_config.json")
                if (folder / "tokenizer_config.json").is_file()
                else {}
            )
            more = (
                load(folder / "added_tokens.json")
                if (folder / "added_tokens.json").is_file()
                else {}
            )
            named = {
                t["content"]: int(i) for i, t in config.get("added_tokens_decoder", {}).items()
            }
            assert all(
                more[name] == named.get(name, more[name]) for name in more
            ), "added_tokens.json and tokenizer_config.json disagree"
            named |= more
            if (folder / "tiktoken.model").is_file():
                lines = [
                    line.split()
                    for line in (folder / "tiktoken.model").read_bytes().split(b"\n")
                    if line.strip()
                ]
                ranks, names = {base64.b64decode(t, validate=True): int(n) for t, n in lines}, {
                    i: name for name, i in named.items()
                }
                # so many are set aside for special tokens, named or not
                rows = range(len(ranks), len(ranks) + 256)
                found = dict(
                    ranks=ranks,
                    pattern=cls.KIMI,
                    special={names.get(i, f"<|reserved_token_{i}|>"): i for i in rows},
                )
                assert sorted(ranks.values()) == list(
                    range(len(lines))
                ), "the ranks are not 0, 1, 2, ..."
            elif (folder / "tokenizer.json").is_file():
                found = cls._from_json(load(folder / "tokenizer.json"))
                special, own = found["special"], found["ranks"].values()
                assert all(
                    special.get(name, i) == i for name, i in named.items()
                ), "two files give a special token two ids"
                special |= {name: i for name, i in named.items() if i not in own}
            else:
                merges = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
                merges = [line for line in merges if line and not line.startswith("#version")]
                found = dict(
                    ranks=cls._ranks(load(folder / "vocab.json"), merges, named),
                    pattern=cls.CUT,
                    special=named,
                    nfc=True,
                )
            special, ends = cls._complete(found["ranks"], found["special"], vocab), cls._read_ends(
                folder, load
            )
            assert all(
                type(i) is int and 0 <= i < vocab for i in ends
            ), f"eos_token_id {ends!r:.60}: ids below {vocab}"
            return cls(**{**found, "special": special, "ends": ends})
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            IndexError,
            AssertionError,
            OSError,
            RecursionError,
            regex.error,
        ) as error:
            raise ValueError(
                f"{folder}: the tokenizer cannot be read exactly: {type(error).__name__} {error!s:.200}"
            ) from None

    @staticmethod
    def _read_ends(folder, load):
        """The ids that a published folder says end a turn: eos_token_id of generation_config.json
        and config.json, one or several"""
        ends = []
        for name in ("generation_config.json", "config.json"):
            raw = load(folder / name) if (folder / name).is_file() else {}
            for settings in (raw, raw.get("text_config") or {}):
                found = settings.get("eos_token_id")
                ends += found if isinstance(found, list) else [] if found is None else [found]
        return ends

    @classmethod
    def _from_json(cls, raw):
        """tokenizer.json: byte-level BPE behind regular expressions that cut one after the other"""
        model, added = raw["model"], {t["content"]: t["id"] for t in raw.get("added_tokens") or []}
        odd = [
            k
            for k in (
                "dropout",
                "unk_token",
                "continuing_subword_prefix",
                "end_of_word_suffix",
                "byte_fallback",
            )
            if model.get(k)
        ]
        assert (
            model.get("type", "BPE") == "BPE" and not odd
        ), f"not a plain byte-level BPE: {model.get('type')!r:.40} {odd}"
        steps, cuts, nfc = (
            raw.get("pre_tokenizer") or {},
            [],
            raw.get("normalizer") or {"type": "Sequence", "normalizers": []},
        )
        steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
        kinds = [step["type"] == "ByteLevel" for step in steps]
        assert kinds == [False] * (len(steps) - 1) + [
            True
        ], "bytes become letters last, or not at all"
        for step in steps:
            if step["type"] == "ByteLevel":
                assert not step.get("add_prefix_space"), "a space is put before the text"
                cuts += [cls.GPT2] if step.get("use_regex", True) else []
            else:
                assert (step["type"], step["behavior"], step.get("invert", False)) == (
                    "Split",
                    "Isolated",
                    False,
                ), f"{step!r:.80}"
                cuts.append(step["pattern"]["Regex"])
        kinds = [n["type"] for n in (nfc["normalizers"] if nfc["type"] == "Sequence" else [nfc])]
        assert kinds in ([], ["NFC"]) and cuts, f"normalizer {kinds}, {len(cuts)} patterns"
        assert not any(
            regex.search(cut, "") for cut in cuts
        ), "a pattern that matches nothing at all"
        # what a pattern does not match is a piece as well
        cuts = [f"{cut}|(?:(?!{cut})[\\s\\S])+" for cut in cuts]
        return dict(
            ranks=cls._ranks(model["vocab"], model["merges"], added),
            pattern=cuts[-1],
            before=cuts[:-1],
            special=added,
            nfc=kinds == ["NFC"],
        )

    def write(self, folder):
        """tokenizer.json and tokenizer_config.json of a tokenizer that was trained here, for
        transformers and its kin (with which text that holds the name of a control token encodes to
        that token: there, keep it out of what users and tools write)."""
        letter = {b: c for c, b in self._letters().items()}
        name = lambda token: "".join(letter[b] for b in token)
        added = [
            dict(
                id=i,
                content=text,
                single_word=False,
                lstrip=False,
                rstrip=False,
                normalized=False,
                special=True,
            )
            for text, i in sorted(self.encoding._special_tokens.items(), key=lambda pair: pair[1])
        ]
        byte_level = dict(
            type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False
        )
        split = dict(
            type="Split", pattern={"Regex": self.pattern}, behavior="Isolated", invert=False
        )
        model = dict(
            type="BPE",
            dropout=None,
            unk_token=None,
            continuing_subword_prefix=None,
            end_of_word_suffix=None,
            fuse_unk=False,
            byte_fallback=False,
            vocab={name(token): i for token, i in self.ranks.items()},
            merges=[[name(a), name(b)] for a, b in self.merges(self.ranks)],
        )
        whole = dict(
            version="1.0",
            truncation=None,
            padding=None,
            added_tokens=added,
            normalizer=None,
            post_processor=None,
            pre_tokenizer=dict(type="Sequence", pretokenizers=[split, byte_level]),
            decoder=byte_level,
            model=model,
        )
        Path(folder, "tokenizer.json").write_text(
            json.dumps(whole, ensure_ascii=False), encoding="utf-8"
        )
        Path(folder, "tokenizer_config.json").write_text(
            json.dumps(dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<|end|>"))
        )

    @staticmethod
    def merges(ranks):
        """The pair of tokens that each longer token is merged from: what is left of its bytes when
        every lower rank has been merged."""
        for token, rank in sorted(ranks.items(), key=lambda pair: pair[1]):
            parts = [bytes([b]) for b in token]
            while len(parts) > 2:
                pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
                i = pairs.index(min(pairs))
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            if len(parts) == 2:
                yield tuple(parts)

    @staticmethod
    def _letters():
        """{character: byte} as GPT-2 writes bytes in its vocabulary"""
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        return {chr(b): b for b in printable} | {
            chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in set(printable))
        }

    @classmethod
    def _ranks(cls, vocab, merges, added):
        """Vocabulary and merges -> {bytes: id}. tiktoken merges by id, whatever two tokens make
        another one: the merges must make all longer tokens, in the order of the ids, and from the
        two that their bytes lead to."""
        byte = cls._letters()
        to_bytes = lambda text: bytes(byte[c] for c in text)
        ranks = {to_bytes(token): i for token, i in vocab.items() if token not in added}
        pairs = [
            tuple(to_bytes(part) for part in (m.split(" ") if isinstance(m, str) else m))
            for m in merges
        ]
        made = [ranks[b"".join(pair)] for pair in pairs]
        assert all(bytes([b]) in ranks for b in range(256)), "not every byte has a token"
        assert made == sorted(made) and set(made) == {
            i for token, i in ranks.items() if len(token) > 1
        }, "merges and ids do not agree"
        assert set(cls.merges(ranks)) <= set(
            pairs
        ), "a token is merged from other parts than its bytes lead to"
        return ranks

    @classmethod
    def _complete(cls, ranks, special, vocab):
        """Special tokens for every control of the transcript and a name for every row of the
        embedding"""
        used = [*ranks.values(), *special.values()]
        assert all(type(i) is int and 0 <= i < vocab for i in used) and len(set(used)) == len(
            used
        ), f"ids are not distinct rows of {vocab}"
        gaps = sorted(set(range(vocab)) - set(used)) if vocab - len(used) < 1 << 16 else []
        special = {f"<|unused_{i}|>": i for i in gaps} | special
        spare = [
            name for name in special if re.match(r"<\W?(unused_|reserved_|place.?holder)", name)
        ]
        for name in CONTROLS:
            if not any(own in special for own in (name, *cls.HOME.get(name, ()))):
                assert spare, f"no unused row left for {name}"
                special[name] = special.pop(spare.pop(0))
        return special


# ---------------------------------------------------------------- transcript


@dataclass
class Call:
    name: str
    args: list
    output: str = ""
    error: str = ""  # "", "unknown_tool", "bad_arguments" or "failed"
    # where in the turn's body it begins, what stands before all calls included
    start: int = field(default=0, compare=False)
    # as sampled, where a family numbers its calls: the answer repeats it
    id: str = field(default="", compare=False)
    # published forms: the arguments by the names that they came under
    given: dict = field(default=None, compare=False)


@dataclass
class Turn:
    """Of an assistant turn the first `head` tokens are the harness's (the role's control token);
    all others were sampled."""

    # user, assistant, tool, query, summary, hint; where old turns go: recent, recent output
    role: str
    tokens: list
    text: str = ""
    calls: list = field(default_factory=list)
    thinking: int = 0  # assistant: tokens before the first call
    logprobs: np.ndarray = None  # assistant: one per sampled token
    # assistant: of the policy, per sampled token: new weights arrive in the middle of a turn
    versions: np.ndarray = None
    head: int = 1
    # behind it the policy goes on at once, without a token of the harness between
    open: bool = False


@dataclass
class Episode:
    """One segment = one training sequence."""

    turns: list
    experts: np.ndarray = None  # (T, L, K) int16 chosen at sampling, -1 = not recorded

    def __len__(self):
        return sum(len(turn.tokens) for turn in self.turns)


@dataclass
class Chain:
    """One rollout: episodes joined by summaries, and one reward that belongs to every sampled token
    of all of them."""

    task: Task
    episodes: list
    reward: float = 0.0
    solved: bool = False
    # what the machine failed at: then nothing above says anything about the policy
    failure: str = ""
    finished: bool = False  # ended by its own final message, not by a limit
    steps: int = 0  # decoding steps it took: right drafts save some
    stats: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    # what the world recorded of its tool calls (world.audit.Seen); None: nobody looked on
    facts: list = None
    findings: list = None  # the audit's; None: not audited yet

    @property
    def turns(self):
        return [turn for episode in self.episodes for turn in episode.turns]


def flatten(episode):
    """-> tokens, mask (1 = the policy chose it), logprobs, turn index: aligned arrays of length
    T"""
    tokens, mask, logprobs, index = [], [], [], []
    for i, turn in enumerate(episode.turns):
        sampled = turn.role == "assistant"
        n = len(turn.tokens) - turn.head
        tokens += turn.tokens
        mask += [0] * turn.head + [int(sampled)] * n
        logprobs += [0.0] * turn.head + (
            turn.logprobs.tolist() if sampled and turn.logprobs is not None else [0.0] * n
        )
        index += [i] * len(turn.tokens)
    return np.array(tokens), np.array(mask), np.array(logprobs, dtype=np.float32), np.array(index)


def make_turn(tokenizer, role, text, most=10**9, answers=("", 0, 1, "")):
    """A turn that was not sampled; of a text beyond `most` tokens the middle is cut, with a note.
    answers: of a tool's, which tool was called, that it was call i of n in one turn, and the call's
    id where it has one."""
    tokens, (name, i, n, call_id) = without_middle(tokenizer, tokenizer.encode(text), most), answers
    if not tokenizer.chat:
        return Turn(role, [tokenizer.id[f"<|{role}|>"], *tokens, tokenizer.id["<|end|>"]], text)
    first, one, between, last = tokenizer.chat.tool
    form = (
        first * (i == 0) + one + (between if i < n - 1 else last)
        if role == "tool"
        else tokenizer.chat.user
    )
    # spelled as one text, as the model has seen it
    words = tokenizer.decode(tokens)
    tokens = tokenizer.spell(
        form, words=words, name=name, i=i, id=call_id or f"functions.{name}:{i}"
    )
    return Turn(
        role, tokens, words, open=role == "tool" and i == n - 1 and not tokenizer.lead("tool")
    )


def without_middle(tokenizer, tokens, most):
    """The tokens, or of more than `most` the beginning and the end, since the end of a test run
    says what failed, and between them a line that says how many are missing. The line counts
    against the limit; where it has no room, a shorter one stands there."""
    if len(tokens) <= most:
        return tokens
    # The number in the line depends on how long the line is: the longest it can be is assumed.
    room = most - len(tokenizer.encode(f"\n[{len(tokens)} tokens cut]\n"))
    if room < 2:
        note = tokenizer.encode("\n[cut]\n")
        room = max(0, most - len(note))
        note = note[:most]
    else:
        note = tokenizer.encode(f"\n[{len(tokens) - room} tokens cut]\n")
        room = min(room, most - len(note))
    half = room // 2
    return tokens[:half] + note + tokens[len(tokens) - (room - half) :]


def frame(tokenizer, role, tokens, text):
    """A turn of tokens that another one was made of"""
    before, behind = (
        ([tokenizer.id[f"<|{role}|>"]], [tokenizer.id["<|end|>"]])
        if not tokenizer.chat
        else (tokenizer.spell(part) for part in tokenizer.chat.user.split("{words}"))
    )
    return Turn(role, [*before, *tokens, *behind], text)


def opening(tokenizer, task):
    """The user's turn that a chain starts from. A published model is told which tools there are in
    its own way, too."""
    turn = make_turn(tokenizer, "user", task.problem_statement)
    if tokenizer.chat:
        kind = lambda names: {
            "type": "object",
            "properties": {name: {"type": "string"} for name in names},
            "required": [*names],
        }
        tools = [
            {"name": tool, "description": PURPOSE[tool], "parameters": kind(ARGUMENTS[tool])}
            for tool in task.tools
        ]
        lines, form = [
            json.dumps({"type": "function", "function": tool}) for tool in tools
        ], tokenizer.chat.opening
        turn.tokens[:0] = tokenizer.spell(
            form, tools=("," if "[{tools}]" in form else "\n").join(lines)
        )
    return turn


def named(name, args):
    """A call's arguments by their names"""
    return dict(zip((*ARGUMENTS.get(name, ()), *map(str, range(99))), args))


def write_action(tokenizer, text, calls, number=0):
    """The body of an assistant turn, <|end|> included: text, then <|call|>name<|arg|>argument...
    per call, or as the model's family has it. Only for text of our own: where an expert writes
    SUMMARIZE, the control token is meant. number: of the first call, where a family numbers them
    through the conversation."""
    if calls and tokenizer.chat and tokenizer.chat.call:
        (first, one, between, last), body = tokenizer.chat.call, []
        for i, (name, args) in enumerate(calls):
            form = (between if i else "{text}" + (first or "\n" * bool(text))) + one
            arguments = json.dumps(named(name, args), ensure_ascii=False)
            body += tokenizer.spell(
                form,
                text=text,
                name=name,
                quoted=json.dumps(name),
                i=number + i,
                arguments=arguments,
            )
        return body + tokenizer.spell(last) + [tokenizer.id["<|end|>"]]
    thought, *carried = text.split(SUMMARIZE)
    body = tokenizer.encode(thought) + [
        t for part in carried for t in (tokenizer.id[SUMMARIZE], *tokenizer.encode(part))
    ]
    for name, args in calls:
        body += [tokenizer.id["<|call|>"], *tokenizer.encode(name)]
        for arg in args:
            body += [tokenizer.id["<|arg|>"], *tokenizer.encode(arg)]
    return body + [tokenizer.id["<|end|>"]]


def read_action(tokenizer, body):
    """Sampled tokens -> (text, calls). Any other control token inside ends nothing: it reads as its
    own name."""
    if tokenizer.chat and tokenizer.chat.call:
        return read_chat(tokenizer, body)
    parts, call, arg = [[]], tokenizer.id["<|call|>"], tokenizer.id["<|arg|>"]
    marks, starts, thought = [], [], own_thought(tokenizer, body)
    for i, token in enumerate(body[:-1] if body and body[-1] in tokenizer.ends else body):
        if token in (call, arg) and i >= thought:
            marks.append(token)
            starts.append(i)
            parts.append([])
        else:
            parts[-1].append(token)
    text, calls = tokenizer.decode(parts[0]), []
    for mark, start, part in zip(marks, starts, parts[1:]):
        if mark == call:
            calls.append(Call(tokenizer.decode(part).strip(), [], start=start))
        elif calls:
            calls[-1].args.append(tokenizer.decode(part))
    return text, calls


def own_thought(tokenizer, body):
    """How many tokens of a body in our own form are a thought: through </think>, where <think>
    comes before the first call"""
    opens, closes = ((tokenizer.special or {}).get(name, -1) for name in ("<think>", "</think>"))
    call = tokenizer.id["<|call|>"]
    if opens not in body or call in body[: body.index(opens)]:
        return 0
    start = body.index(opens)
    return body.index(closes, start) + 1 if closes in body[start:] else len(body)


UNREADABLE = "This call cannot be read."
ONLY_THOUGHT = "Calls inside a thought that is not closed are not run."
NOT_STRINGS = "The arguments must be a JSON object of strings."


@dataclass
class Block:
    """One call in a body in a published form: tokens [start, stop), and between them its text, with
    where the parts of it stand"""

    start: int
    inside: int  # the first token of the text
    text: str = ""
    name: str = ""
    id: str = ""
    given: object = None  # the arguments as JSON has them
    name_end: int = 0  # characters of the text through the name
    # where in the text the arguments' own object begins, -1: nowhere
    arguments_at: int = -1
    error: str = ""


def read_json_object(text, start=0):
    """A JSON object that fills the text from `start` on -> {key: (value, where it begins, where it
    ends)}. Of equal keys the last one counts, as in every reader of JSON. ValueError where it is
    none."""
    decoder, space = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")
    skip = lambda at: space.match(text, at).end()
    members, at = {}, skip(start)
    if text[at : at + 1] != "{":
        raise ValueError("no object")
    at = skip(at + 1)
    while text[at : at + 1] != "}" or members and text[:at].rstrip().endswith(","):
        key, at = decoder.raw_decode(text, at)
        at = skip(at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise ValueError("no key")
        begins = skip(at + 1)
        value, ends = decoder.raw_decode(text, begins)
        members[key] = value, begins, ends
        at = skip(ends)
        if text[at : at + 1] == ",":
            at = skip(at + 1)
        elif text[at : at + 1] != "}":
            raise ValueError("no end")
    if skip(at + 1) != len(text):
        raise ValueError("more behind it")
    return members


def read_block(chat, block):
    """Fill in name, arguments and id of a call from its text. What its family's parsers would not
    read is an error."""
    try:
        if not chat.reads:
            try:
                members = read_json_object(block.text)
            # of a call that is no JSON the name may still be plain
            except ValueError:
                name = re.match(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,', block.text)[1]
                members = {
                    "name": (name, 0, block.text.index(name) + len(name) + 1),
                    "arguments": (None, -1, -1),
                }
            name, _, block.name_end = members["name"]
            given, block.arguments_at, _ = members["arguments"]
            # an object, written as JSON once more
            if isinstance(given, str):
                given, block.arguments_at = json.loads(given), -1
        else:
            found = re.fullmatch(chat.reads, block.text)
            space = len(found["arguments"]) - len(found["arguments"].lstrip())
            name, block.name_end, block.arguments_at = (
                found["name"],
                found.end("name"),
                found.start("arguments") + space,
            )
            groups = found.groupdict()
            block.id = groups["id"] if groups.get("i") else ""
            given = None
            try:
                given = json.loads(found["arguments"])
            except (ValueError, RecursionError):  # the name is known all the same
                pass
        if not isinstance(name, str) or not name.strip():
            raise ValueError("no name")
        block.name, block.given = name.strip(), given
    except (ValueError, KeyError, TypeError, RecursionError):
        block.name, block.error = "", UNREADABLE


def spoken_text(text):
    """What a turn says, without the thought before it"""
    before, close, after = text.partition("</think>")
    return after if close else before.partition("<think>")[0]


def find_thought(tokenizer, body):
    """Where the models write <think> as plain text: how many tokens of the body are the thought
    that it begins with"""
    if "</think>" in tokenizer.special or not tokenizer.decode(body).lstrip().startswith("<think>"):
        return 0
    close = tokenizer.marked(body).find("</think>") + len("</think>")
    if close < len("</think>"):
        return len(body)
    return (
        bisect(range(len(body)), close - 1, key=lambda i: len(tokenizer.marked(body[: i + 1]))) + 1
    )


def find_calls(tokenizer, body):
    """The calls in a body in a published form -> [Block]. A thought (<think> ... </think>; without
    its first token, where the template has given that) holds none, whatever it drafts. A call may
    stand without its section's token. What belongs to a call and is no whole call is a Block with
    an error: never nothing, or the turn would be taken for a final word."""
    chat, names = tokenizer.chat, {i: name for name, i in tokenizer.special.items()}
    marks = chat.marks()
    blocks, first, block, drafts = [], None, None, False
    skipped = find_thought(tokenizer, body)
    thinking, may_close = skipped == len(body) > 0, skipped == 0

    def close(stop, whole):
        block.text = tokenizer.marked(body[block.inside : stop], marks)
        # Qwen's parsers read a call to the end of the turn, too
        if whole or not chat.reads:
            read_block(chat, block)
        else:
            block.error = UNREADABLE
        blocks.append(block)

    for i, token in enumerate(body):
        name = names.get(token)
        mark = marks.get(name)
        if i < skipped or thinking:
            drafts = drafts or mark is not None
            if name == "</think>" and thinking:
                thinking, may_close, drafts = False, False, False
            continue
        if block is None and name == "<think>":
            thinking = True
        elif block is None and name == "</think>" and may_close:
            blocks, first, may_close = [], None, False  # all before it was thought
        if mark is None:
            continue
        first = i if first is None else first
        if block is not None and mark != "inside":
            close(i, mark == "end")
            block = None
        elif mark in ("inside", "end"):
            if block is None:  # its beginning is missing
                blocks.append(Block(i, i + 1, error=UNREADABLE))
            continue
        if mark == "begin":
            block = Block(i, i + 1)
    if block is not None:
        close(len(body), False)
    if thinking and drafts and not blocks:
        blocks.append(Block(0, 0, error=ONLY_THOUGHT))
    elif first is not None and not blocks:
        blocks.append(Block(first, first + 1, error=UNREADABLE))
    if blocks and first is not None:
        blocks[0].start = first  # with what stands before all calls
    return blocks


def read_chat(tokenizer, body):
    """The same as read_action where calls have the form of the model's family: their arguments are
    JSON, and may be anything"""
    body = body[:-1] if body and body[-1] in tokenizer.ends else body
    blocks = find_calls(tokenizer, body)
    if not blocks:
        return tokenizer.decode(body), []
    calls = []
    for block in blocks:
        call = Call(
            block.name,
            [],
            block.error,
            "bad_arguments" if block.error else "",
            block.start,
            block.id,
        )
        if not block.error:
            take_arguments(call, block.given)
        calls.append(call)
    return tokenizer.decode(body[: blocks[0].start]).rstrip("\n"), calls


def take_arguments(call, given):
    """Put arguments that came by their names in the order of the tool's own. Another name, or one
    too few, is an error that says so."""
    # JSON can spell halves of characters, files cannot hold them
    whole = lambda text: re.sub("[\ud800-\udfff]", "\ufffd", text)
    call.name, call.given = whole(call.name), given if isinstance(given, dict) else {}
    wanted = ARGUMENTS.get(call.name)
    # whatever it takes, there is no such tool
    if wanted is None:
        call.args = [
            whole(value) if isinstance(value, str) else json.dumps(value)
            for value in call.given.values()
        ]
        return
    missing = [f"`{name}` is missing" for name in wanted if name not in call.given]
    unknown = [f"there is no `{whole(name)[:40]}`" for name in call.given if name not in wanted]
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        call.output, call.error = NOT_STRINGS, "bad_arguments"
    elif missing or unknown:
        call.output, call.error = (
            f"{call.name}({', '.join(wanted)}): {', '.join(missing + unknown)}.",
            "bad_arguments",
        )
    else:
        call.args = [whole(given[name]) for name in wanted]


def number_calls(tokenizer, calls, number):
    """Where a family numbers its calls through the conversation, give a number to those that were
    sampled without; -> the next one. number: of the first call that none was given to."""
    if tokenizer.chat and tokenizer.chat.numbered:
        for call in calls:
            call.id = call.id or f"functions.{call.name}:{number}"
            number = max(number, int(call.id.rpartition(":")[2]) + 1)
    return number


# ---------------------------------------------------------------- tools


def run_tool(workspace, call):
    """Fills in call.output and call.error."""
    call.output, call.error = call_tool(workspace, call.name, call.args)


def run_tools(workspace, calls, chain):
    """Answers the calls of a turn, in order. Where the machine fails (no room, no process), the
    chain says so and is over."""
    try:
        for call in calls:
            if not call.error:
                run_tool(workspace, call)
    except MachineFailure as failure:
        chain.failure = str(failure)


# ---------------------------------------------------------------- one agent, as a coroutine


@dataclass(frozen=True)
class Limits:
    window: int = 512  # tokens that the context may hold
    turns: int = 40  # assistant turns per chain
    # sampled tokens per turn (0: three eighths of the window, and at least 192)
    turn_tokens: int = 0
    commands: int = 0  # run_command calls per chain that are answered (0: all)

    @property
    def turn(self):
        return self.turn_tokens or max(192, self.window * 3 // 8)


@dataclass
class Request:
    """What an agent asks of a sampler: append `tokens` to its context (a fresh one if restart),
    then sample a turn."""

    tokens: list
    restart: bool
    room: int  # sampled tokens at most
    summary: bool = False  # the turn asked for is a summary
    # of the turn's first call, where a family numbers them: so many stand in the context
    number: int = 0


@dataclass
class Work:
    """Tools to run outside the model; slow ones (a process is started) run in a thread while other
    rows decode."""

    calls: list
    run: callable
    slow: bool


def leaves_room(tokenizer, task, limits):
    """Is there room for a first turn, two tokens at least, behind the task's opening?"""
    return limits.window - len(opening(tokenizer, task).tokens) - len(tokenizer.lead("user")) >= 2


def agent(task, tokenizer, workspace, limits, compact=None):
    """A coroutine. It yields a Request and is sent (body, logprobs, versions), yields a Work and is
    sent nothing, and so on; it returns its Chain; versions may be one number for all of a body.
    `compact(tokenizer, chain)` is summarize.py's hook: after each turn it may return a query turn;
    the summary is then sampled in the same context, and a new episode starts from task + summary
    (or, where it truncates, at once from task + newest turns)."""
    chain = Chain(task, [Episode([opening(tokenizer, task)])])
    lead = lambda: tokenizer.lead(chain.episodes[-1].turns[-1].role)
    # what a new episode starts from
    begun = lambda: [t for turn in chain.episodes[-1].turns for t in turn.tokens] + lead()
    fresh, restart, wants_summary, ran, number = begun(), True, False, 0, 0
    for _ in range(limits.turns):
        episode, head = chain.episodes[-1], lead()
        left = limits.window - len(episode) - len(head)
        if left < 2:
            break
        body, logprobs, versions = yield Request(
            fresh, restart, min(limits.turn, left), wants_summary, number
        )
        # a demonstration may write too much: the window holds
        body, logprobs, restart = body[:left], logprobs[:left], False
        versions = np.resize(versions, len(body))
        text, calls = read_action(tokenizer, body)
        thinking = calls[0].start if calls else 0
        turn = Turn(
            "assistant", [*head, *body], text, calls, thinking, logprobs, versions, len(head)
        )
        episode.turns.append(turn)
        # ran out of room inside a turn: none of its calls is run
        if body[-1] not in tokenizer.ends:
            turn.calls = [
                replace(call, output="", error="failed") for call in calls if not wants_summary
            ]
            break
        if wants_summary:
            turn.calls, restart, wants_summary, number = [], True, False, 0
            chain.episodes.append(Episode(compact.restart(tokenizer, chain, turn)))
            fresh = begun()
            continue
        if not calls:
            chain.finished = True
            break
        number = number_calls(tokenizer, calls, number)
        for call in calls:
            # how it was called no longer matters: there is no such tool
            if call.name and call.name not in task.tools:
                call.output, call.error = "", ""
        commands = [call for call in calls if call.name == "run_command" in task.tools]
        for call in commands[max(0, limits.commands - ran) :] if limits.commands else ():
            call.output, call.error = "No more commands.", "failed"
        ran += len(commands)
        yield Work(calls, lambda: run_tools(workspace, calls, chain), bool(commands))
        # what the tools say now is not what this agent's work does
        if chain.failure:
            break
        room = (
            min(limits.window // 3, compact.room(tokenizer, chain))
            if compact
            else limits.window // 3
        )
        outputs = [
            make_turn(
                tokenizer,
                "tool",
                call.output,
                room // len(calls),
                (call.name, i, len(calls), call.id),
            )
            for i, call in enumerate(calls)
        ]
        episode.turns += outputs
        fresh = [t for turn in outputs for t in turn.tokens] + lead()
        query = compact(tokenizer, chain) if compact else None
        if query and compact.truncate:
            chain.episodes.append(Episode(compact.recent(tokenizer, chain)))
            fresh, restart = begun(), True
        elif query:
            episode.turns.append(query)
            fresh, wants_summary = [
                t for turn in [*outputs, query] for t in turn.tokens
            ] + lead(), True
    for episode in chain.episodes:
        # outputs that overflowed the context: no one has read them
        while len(episode) > limits.window and len(episode.turns) > 1:
            episode.turns.pop()
    if len(chain.episodes) > 1 and not any(
        turn.role == "assistant" for turn in chain.episodes[-1].turns
    ):
        # the last turn allowed was a summary: nothing came of it
        chain.episodes.pop()
    try:
        chain.files = workspace.files()
    except MachineFailure as failure:
        chain.failure = str(failure)
    return chain


# ---------------------------------------------------------------- sampling


def choose(logits, uniform, temperature=1.0, top_p=1.0):
    """logits (B, V), uniform (B,) in [0, 1) -> tokens (B,), log-probs (B,) of the distribution that
    was sampled from, in fp32. temperature from 0 (the largest logit) on, finite; top_p from 0 (the
    likeliest token alone) to 1: else a ValueError."""
    if not (0 <= temperature < math.inf and 0 <= top_p <= 1):
        raise ValueError(
            f"temperature={temperature} must be a finite number from 0 on, top_p={top_p} one from 0 to 1"
        )
    if temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    p = divide_by_temperature(logits.float(), temperature).softmax(-1)
    if top_p < 1:
        ordered, where = p.sort(-1, descending=True)
        # keep the token that crosses the line
        cut = ordered.cumsum(-1) - ordered >= top_p
        cut[:, 0] = False  # and the first one always
        p = p.masked_fill(cut.gather(-1, where.argsort(-1)), 0)
        p = p / p.sum(-1, keepdim=True)
    mass = p.cumsum(-1)
    # a draw just below 1 rounds to 1 in fp32
    draw = uniform.clamp(max=1 - 2**-24) * mass[:, -1]
    tokens = torch.searchsorted(mass, draw[:, None], right=True).clamp(max=logits.shape[-1] - 1)
    return tokens[:, 0], p.gather(-1, tokens)[:, 0].log()


class Row:
    """One sequence in the sampler. context[:cached] is in the cache; the rest waits to be fed."""

    def __init__(self, order, agent, seed, shape):
        self.order, self.agent, self.rng = order, agent, np.random.default_rng(seed)
        self.context, self.cached, self.body, self.logprobs, self.versions = [], 0, [], [], []
        self.room, self.work, self.chain, self.sampling, self.records = 0, None, None, False, []
        # context[:known] is in the sampler's book
        self.shape, self.draws, self.known, self.steps = shape, [], 0, 0

    def take(self, request):
        if request.restart:
            self.context, self.cached, self.known = [], 0, 0
            self.records.append(np.full(self.shape, -1, dtype=np.int16))
        self.context += request.tokens
        self.room, self.body, self.logprobs, self.versions, self.sampling = (
            request.room,
            [],
            [],
            [],
            True,
        )

    def draw(self, n):
        """The row's next n uniform numbers, not used up"""
        self.draws += self.rng.random(max(0, n - len(self.draws))).tolist()
        return self.draws[:n]

    def write(self, tokens, logprobs, version):
        self.steps += 1
        del self.draws[: len(tokens)]
        self.context += tokens
        self.body += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)


# how many tokens of a context's end a draft is looked up by, the longest that is known
ENDINGS = 8, 4, 2


class Sampler:
    """Continuous batching over a latent cache: rows of the batch are filled from a queue as soon as
    one ends, and tools run in threads while others decode. Turn boundaries are handled every
    `stride` steps: prefills are batched. Each row draws from its own generator, and up to `draft`
    tokens are guessed ahead."""

    def __init__(
        self,
        model,
        tokenizer,
        rows=96,
        window=512,
        temperature=1.0,
        top_p=1.0,
        stride=4,
        draft=3,
        threads=max(4, os.cpu_count() or 1),
    ):
        self.model, self.tokenizer, self.window, self.stride, self.draft = (
            model.eval(),
            tokenizer,
            window,
            stride,
            draft,
        )
        self.temperature, self.top_p, self.version, self.rows = temperature, top_p, 0, rows
        # called between decode steps: newer weights may be taken there
        self.refresh = lambda: None
        self.device = model.embed.weight.device
        self.pool = ThreadPoolExecutor(threads)
        self.cache, self.steps, self.fed = None, 0, 0

    @torch.inference_mode()
    def run(self, agents, seeds, on_end=lambda chain: None, patient=True):
        """-> the Chains of the agents, in order. on_end is called in a tool thread as each chain
        ends (to judge it). patient: at a boundary all wait for the tools begun before. Who decodes
        beside whom decides how sums round: so a run can be repeated exactly. Otherwise only those
        wait whose tool it is: right for tools that take longer than a few steps."""
        self.patient, self.book = patient, {}
        if self.cache is None:
            self.cache = Cache(self.model, self.rows, self.window + 2)
        queue, rows, done = list(enumerate(zip(agents, seeds)))[::-1], [], {}
        while queue or rows:
            rows = self.turn(rows, queue, done, on_end)
            self.prefill(
                [row for row in rows if row.sampling and len(row.context) - row.cached > 1], rows
            )
            for _ in range(self.stride if rows else 0):
                self.refresh()
                self.step(rows)
        for _, judged in done.values():
            judged.result()
        return [done[i][0] for i in range(len(done))]

    def turn(self, rows, queue, done, on_end):
        """Collect finished tools, move every agent that is due, retire the ended ones, admit new
        ones."""
        busy = (
            [] if self.patient else [row.work for row in rows if row.work and not row.work.done()]
        )
        if busy and len(busy) == len(rows):
            wait(busy, return_when=FIRST_COMPLETED)  # there is nothing else to do
        for row in [
            row
            for row in rows
            if not row.sampling and (self.patient or not row.work or row.work.done())
        ]:
            if row.work is not None:
                row.work.result()
                row.work = None
                self.advance(row, None)
            else:
                self.advance(
                    row,
                    (row.body, np.array(row.logprobs, dtype=np.float32), np.array(row.versions)),
                )
        for i in reversed(range(len(rows))):
            if rows[i].chain is not None:
                done[rows[i].order] = rows[i].chain, self.pool.submit(on_end, rows[i].chain)
                last = rows.pop()
                # the cache's live rows stay a prefix
                if i < len(rows):
                    self.cache.data[:, i] = self.cache.data[:, len(rows)]
                    rows[i] = last
        while queue and len(rows) < self.rows:
            order, (agent, seed) = queue.pop()
            block = [b.ffn.router.k for b in self.model.layers if hasattr(b.ffn, "router")]
            row = Row(order, agent, seed, (self.window + 1, len(block), max(block, default=0)))
            self.advance(row, None)
            if row.chain is None:
                rows.append(row)
            # the task alone does not fit the window
            else:
                done[order] = row.chain, self.pool.submit(on_end, row.chain)
        return rows

    def advance(self, row, message):
        try:
            request = row.agent.send(message)
        except StopIteration as end:
            row.chain, row.sampling = end.value, False
            row.chain.steps = row.steps
            for episode, record in zip(row.chain.episodes, row.records):
                episode.experts = record[: len(episode)]
            return
        if isinstance(request, Request):
            row.take(request)
        elif request.slow:
            row.work = self.pool.submit(request.run)  # collected at the next boundary
        else:
            request.run()
            self.advance(row, None)

    def prefill(self, waiting, rows):
        """Feed all but the last pending token of each row. Rows that start with the same prompt
        share one prefill."""
        same, where = {}, {id(row): i for i, row in enumerate(rows)}
        for row in waiting:
            key = tuple(row.context[:-1]) if row.cached == 0 else id(row)
            same.setdefault(key, []).append(row)
        heads = [group[0] for group in same.values()]
        while heads:
            batch, heads = heads[:32], heads[32:]  # so attention's scores stay small
            chunks, record = [row.context[row.cached : -1] for row in batch], []
            self.fed += sum(map(len, chunks))
            self.model.prefill(
                chunks,
                self.cache,
                [where[id(row)] for row in batch],
                [row.cached for row in batch],
                record,
            )
            self.keep(batch, record, [len(chunk) for chunk in chunks])
        for head, *others in same.values():
            for row in others:
                self.cache.data[:, where[id(row)]] = self.cache.data[:, where[id(head)]]
                row.cached, row.records[-1][:] = head.cached, head.records[-1]

    def keep(self, batch, record, lengths, width=None):
        """Note which experts every fed token took, and move the rows' cache ends. In the record, a
        row has `width` tokens (None: as many as it keeps), one row behind the other."""
        # (N, L, K)
        record, at = torch.cat(record).cpu().numpy().swapaxes(0, 1) if record else None, 0
        for row, n in zip(batch, lengths):
            if record is not None:
                row.records[-1][row.cached : row.cached + n] = record[at : at + n]
            row.cached, at = row.cached + n, at + (width or n)

    def guess(self, row):
        """What followed the longest known ending of this context where it was last read or written,
        in any row: a draft of the next tokens. Siblings of a group write much the same, and code
        repeats itself."""
        text, draft = row.context, []
        if len(self.book) > 1 << 20:  # some 200 MB
            self.book.clear()
        for end in range(row.known, len(text)):
            self.book.update((tuple(text[end - n : end]), text[end]) for n in ENDINGS if n <= end)
        row.known = len(text)
        while len(draft) < min(self.draft, row.room - len(row.body) - 1):
            last = text[-max(ENDINGS) :] + draft
            token = next(
                (self.book[key] for n in ENDINGS if (key := tuple(last[-n:])) in self.book), None
            )
            if token is None or token in self.tokenizer.ends:
                break
            draft.append(token)
        return draft

    def ahead(self, rows):
        """The rows that are sampling come first, each with its place in the cache -> how many they
        are"""
        live = sum(row.sampling for row in rows)
        idle, late = [i for i in range(live) if not rows[i].sampling], [
            i for i in range(live, len(rows)) if rows[i].sampling
        ]
        for i, j in zip(idle, late):
            rows[i], rows[j] = rows[j], rows[i]
        if idle:
            used = self.cache.data[:, :, : max(row.cached for row in rows)]
            used[:, idle + late] = used[:, late + idle]
        return live

    def company(self, live, rows):
        """How many rows are fed: few different shapes again, but the last few go on alone"""
        return live + -live % min(live, 8)

    def step(self, rows):
        """Speculative decoding: every row that is sampling is fed its last token and a draft of the
        next ones, and each place is sampled. As long as a draft says what was drawn there, the next
        draw stands too; so drafts change the number of steps and nothing else (but how bf16
        rounds). Rows that only fill up the number re-feed their last token: the same entry again
        (or, of weights that came meanwhile, theirs)."""
        live = self.ahead(rows)
        if not live:
            return
        drafts = [self.guess(row) for row in rows[:live]]
        # fewer would not pay for a wider step
        wide = sum(map(len, drafts)) >= live
        drafts, width = drafts if wide else [()] * live, 1 + self.draft * wide
        number = min(self.company(live, rows), self.rows)
        position = [row.cached - (not row.sampling) for row in rows[:number]]
        tokens = [
            [row.context[p], *draft]
            for row, p, draft in zip(rows, position, drafts + [()] * (number - live))
        ]
        tokens += [[0]] * (number - len(tokens))  # nobody's rows
        position += [0] * (number - len(position))
        tokens = to_device([words + [0] * (width - len(words)) for words in tokens], self.device)
        record = []
        hidden = self.model.decode(tokens, self.cache, slice(0, number), position, record)
        self.steps, self.fed = self.steps + 1, self.fed + tokens.numel()
        places = to_device(
            [(i, j) for i, draft in enumerate(drafts) for j in range(1 + len(draft))], self.device
        ).T
        uniform = to_device(
            [u for row, draft in zip(rows, drafts) for u in row.draw(1 + len(draft))], self.device
        )
        drawn = choose(self.model.logits(hidden[*places]), uniform, self.temperature, self.top_p)
        # Both in one copy from the GPU: fp64 holds a token's number and an fp32 log-prob exactly.
        token, logp = torch.stack([t.double() for t in drawn]).tolist()
        token = list(map(int, token))
        stand = []
        for row, draft in zip(rows, drafts):
            n = 1 + next(
                (j for j, (t, guess) in enumerate(zip(token, draft)) if t != guess), len(draft)
            )
            row.write(token[:n], logp[:n], self.version)
            row.sampling = token[n - 1] not in self.tokenizer.ends and len(row.body) < row.room
            del token[: 1 + len(draft)], logp[: 1 + len(draft)]
            stand.append(n)
        self.keep(rows[:live], record, stand, width)


# ---------------------------------------------------------------- rollouts and demonstrations


def at_work(task, tokenizer, sandbox, limits, compact):
    """An agent in a workspace of its own, made when it begins and gone when it ends"""
    try:
        workspace = try_again(lambda: Workspace(task, sandbox))
    except MachineFailure as failure:
        return Chain(task, [Episode([opening(tokenizer, task)])], failure=str(failure))
    with workspace:
        chain = yield from agent(task, tokenizer, workspace, limits, compact)
        chain.facts = workspace.recorder.seen
        return chain


def rollouts(sampler, tasks, group, seed, limits, sandbox, compact=None, numbers=None):
    """`group` chains per task -> list of groups. The hidden tests of each task set chain.solved and
    chain.reward. The chance of chain j of a task is drawn from (seed, the task's number, j). A
    chain that the machine failed is played once more; where it fails again, chain.failure says why,
    and it is neither right nor wrong: leave it out (see judged)."""

    def grade(chain):
        chain.stats = effort_counts(chain)
        if chain.failure:
            return
        try:
            verdict = judge(chain.task, chain.files, sandbox)
            chain.solved, chain.reward = verdict.solved, float(verdict.solved)
            # here it runs beside the sampling, and in the processes that sample
            audited(chain, verdict)
        except (MachineFailure, OSError, MemoryError) as failure:
            if not is_machine_failure(failure):
                raise
            chain.failure = str(failure)

    def play(places):
        agents = [
            at_work(task, sampler.tokenizer, sandbox, limits, compact) for _, task, _ in places
        ]
        try:
            return sampler.run(
                agents,
                [(seed, number, j) for number, _, j in places],
                grade,
                patient=not any("repo" in task.meta for task in tasks),
            )
        finally:
            for one in agents:
                # those that an error has left under way
                one.close()

    places = [
        (number, task, j)
        for number, task in zip(numbers or range(len(tasks)), tasks)
        for j in range(group)
    ]
    chains = play(places)
    failed = [i for i, chain in enumerate(chains) if chain.failure]
    for i, chain in zip(failed, play([places[i] for i in failed]) if failed else ()):
        chains[i] = chain
    return [chains[i : i + group] for i in range(0, len(chains), group)]


def judged(groups):
    """-> (the groups without the chains that the machine failed, those chains). A group of which
    nothing is left is left out."""
    kept = [[chain for chain in group if not chain.failure] for group in groups]
    return [group for group in kept if group], [
        chain for group in groups for chain in group if chain.failure
    ]


def failures_line(lost, total):
    """What a log says of chains that the machine failed: how many, of how many, and at what most of
    them."""
    cause = Counter(lost).most_common(1)[0][0].split("\n")[0][:200]
    return f"{len(lost)} of {total} rollouts were lost to this machine, twice each, and count for nothing: {cause}"


def generation_model(config, dtype, device="cpu"):
    """A model for sampling only: matrices in the compute dtype, what the trainer keeps in fp32 in
    fp32."""
    model = Model(config).to(device).compute(dtype)
    for name, p in model.named_parameters():
        if not name.endswith(("norm.weight", "router.weight", "embed.weight")):
            p.data = p.data.to(dtype)
    return model.side_by_side().eval()


# ---------------------------------------------------------------- weights on their way, and processes that sample


def planes(tensor):
    """The bits of a tensor -> uint8 (bytes per number, numbers): high bytes hardly change, so they
    lie together when compressed."""
    return (
        tensor.detach()
        .cpu()
        .flatten()
        .view(torch.uint8)
        .reshape(tensor.numel(), tensor.element_size())
        .T
    )


def encode_delta(old, new):
    """{name: tensor} twice, of equal names, shapes and dtypes -> bytes: the bits that differ,
    compressed. An exclusive or is undone exactly whatever the numbers are, zeros of either sign
    included, and is zero where nothing changed."""
    return zlib.compress(
        b"".join((planes(old[name]) ^ planes(new[name])).numpy().tobytes() for name in new), 1
    )


def apply_delta(old, delta):
    """-> new, bit for bit as it was given to encode_delta(old, new)"""
    data, at, new = torch.frombuffer(bytearray(zlib.decompress(delta)), dtype=torch.uint8), 0, {}
    if len(data) != sum(tensor.nbytes for tensor in old.values()):
        raise ValueError(
            f"a delta of {len(data)} bytes for weights of {sum(tensor.nbytes for tensor in old.values())}"
        )
    for name, tensor in old.items():
        bits = planes(tensor) ^ data[at : at + tensor.nbytes].view(
            tensor.element_size(), tensor.numel()
        )
        new[name] = bits.T.contiguous().flatten().view(tensor.dtype).view(tensor.shape)
        at += tensor.nbytes
    return new


def zeros(weights):
    """What a base is encoded against: its delta then holds all bits."""
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}


def fingerprint(weights):
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in weights.items():
        digest.update(
            f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
            + planes(tensor).numpy().tobytes()
        )
    return digest.digest()


class Publisher:
    """The trainer's end: every version of the weights is a file in a folder, as what changed since
    the version before, or now and then, for a process that starts late, as a base. Numbers are
    rounded as the sampler holds them (bf16 matrices) before they are compared: more than 98 % of
    Cursor's bf16 weights are equal from step to step (stated), and here the log says how many.
    shared: other processes read the folder, each in its own time; else whoever reads it has read
    all but the newest."""

    def __init__(self, folder, config, dtype, every=20, shared=True):
        self.kinds = {
            name: tensor.dtype
            for name, tensor in generation_model(config, dtype).state_dict().items()
        }
        self.folder, self.every, self.shared, self.sent, self.count, self.base = (
            Path(folder),
            every,
            shared,
            None,
            0,
            0,
        )

    def publish(self, version, weights):
        """weights: {name: tensor} of any dtype; versions only rise -> what the step log says of the
        upload"""
        new = {
            name: weights[name].detach().to("cpu", kind, copy=True)
            for name, kind in self.kinds.items()
        }
        base = self.count % self.every == 0
        data = fingerprint(new) + encode_delta(zeros(new) if base else self.sent, new)
        (self.folder / "part").write_bytes(data)
        (self.folder / "part").replace(self.folder / f"{version:08d}.{'base' if base else 'delta'}")
        same = sum(int((self.sent[name] == t).sum()) for name, t in new.items()) if self.sent else 0
        if base or not self.shared:
            # the last base and what followed stay for whoever is reading them
            for path in self.folder.iterdir():
                path.unlink() if int(path.stem) < (self.base if self.shared else version) else None
            self.base = version if base else self.base
        self.sent, self.count = new, self.count + 1
        return {
            "sync_bytes": len(data),
            "sync_full": sum(t.nbytes for t in new.values()),
            "sync_same": same / sum(t.numel() for t in new.values()),
        }


def pending(folder, version):
    """Names of the uploads that lead from `version` (-1: none yet) to the newest, in order; a newer
    base makes the rest needless."""
    names = sorted(
        name for name in os.listdir(folder) if name != "part" and int(name[:8]) > version
    )
    bases = [i for i, name in enumerate(names) if name.endswith("base")]
    return names[bases[-1] :] if bases else names


class Generator:
    """Samples groups with the newest weights in the folder: the inside of a generation process, or,
    with no workers, of the trainer itself. `options` are the Sampler's."""

    def __init__(
        self, folder, config, dtype, device, tokenizer, group, limits, compact=None, **options
    ):
        self.sampler = Sampler(
            generation_model(config, dtype, device), tokenizer, window=limits.window, **options
        )
        self.sampler.refresh, self.sampler.version = self.refresh, -1
        self.folder, self.group, self.limits, self.compact, self.sandbox = (
            folder,
            group,
            limits,
            compact,
            Sandbox(),
        )

    def refresh(self):
        """Take what is new. Sequences under way go on with the new weights and the entries that old
        ones left in the cache (ours: feeding them again would cost a prefill of everything)."""
        for name in pending(self.folder, self.sampler.version):
            data, held = Path(self.folder, name).read_bytes(), self.sampler.model.state_dict()
            new = apply_delta(zeros(held) if name.endswith("base") else held, data[16:])
            if fingerprint(new) != data[:16]:
                raise ValueError(f"{name}: what arrived are not the trainer's weights")
            self.sampler.model.load_state_dict(new)
            self.sampler.version = int(name[:8])

    def __call__(self, tasks, numbers, seed):
        self.refresh()
        return rollouts(
            self.sampler, tasks, self.group, seed, self.limits, self.sandbox, self.compact, numbers
        )


def end_with(trainer):
    """Ends this process as soon as the other end of a pipe is closed, be it in the middle of a job:
    nobody waits for its groups. What it leaves behind is removed when the next run begins."""
    with contextlib.suppress(EOFError, OSError):
        trainer.recv()
    os._exit(1)


def work(pipe, trainer, settings):
    """The life of a generation process: jobs in, groups out, until the trainer is gone. trainer:
    the end of a pipe on which nothing is ever sent."""
    threading.Thread(target=end_with, args=(trainer,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    # and then the workspaces are removed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    torch.set_num_threads(1)
    generator = Generator(**settings)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(generator(*job))


class Workers:
    """n generation processes, or with n = 0 the same in this one, when the result is asked for.
    Each process is tended by a thread here. They are forked from a server that has no threads of
    its own: forking a trainer can copy a held lock."""

    def __init__(self, n, settings):
        self.n, self.settings, self.jobs, self.restarts, self.processes = (
            n,
            settings,
            queue.SimpleQueue(),
            0,
            {},
        )
        # of each process, the pipe that ends with this one
        self.lives = {}
        self.generator, self.closed = None if n else Generator(**settings), False
        self.context = multiprocessing.get_context("forkserver") if n else None
        if n:
            self.context.set_forkserver_preload(["rollout"])
            # The folder of the server's socket, too, has to go when this process is killed. There
            # is no public way to say where.
            settings_of_process = getattr(multiprocessing.current_process(), "_config", {})
            if "tempdir" not in settings_of_process:
                self.sockets = owned_directory("sockets", tempfile.gettempdir())
                # the path of a socket has 104 bytes
                if len(self.sockets.name) < 70:
                    settings_of_process["tempdir"] = self.sockets.name
        for i in range(n):
            threading.Thread(target=self.tend, args=(i,), daemon=True).start()
        atexit.register(self.close)

    def submit(self, tasks, numbers, seed):
        """Deal the tasks to the processes -> [(future, job)], for collect"""
        share = max(1, self.n)
        dealt = [(Future(), (tasks[i::share], numbers[i::share], seed)) for i in range(share)]
        for one in dealt if self.n else ():
            self.jobs.put(one)
        return dealt

    def collect(self, dealt):
        """-> groups, in the order of the tasks"""
        parts = [future.result() if self.n else self.generator(*job) for future, job in dealt]
        return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]

    def start(self, i):
        pipe, theirs = self.context.Pipe()
        # our end goes when this process does
        watched, self.lives[i] = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=work, args=(theirs, watched, self.settings), daemon=True
        )
        process.start()
        self.processes[i] = process
        # or its death would not be the end of the pipe
        theirs.close(), watched.close()
        return pipe

    def tend(self, i):
        """One job at a time. A process that dies is replaced and its job begun again: the same
        prompts and the same draws, since a rollout is a function of (seed, task number, j) and of
        the weights."""
        pipe = None
        while True:
            future, job = self.jobs.get()
            for _ in range(3):
                try:
                    pipe = pipe or self.start(i)
                    pipe.send(job)
                    future.set_result(pipe.recv())
                    break
                except (EOFError, OSError):
                    if self.closed:
                        return
                    self.restarts, pipe = self.restarts + 1, None
                # what cannot be sent or read is no reason to wait for ever
                except Exception as error:
                    future.set_exception(error)
                    break
            else:
                future.set_exception(
                    RuntimeError(
                        "a generation process died three times on the same tasks; its own words are above"
                    )
                )

    def close(self):
        self.closed = True
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.join(5)


def staleness(groups, version):
    """-> for every sampled token, how many updates older than `version` the policy was that sampled
    it"""
    turns = [
        turn
        for group in groups
        for chain in group
        for turn in chain.turns
        if turn.role == "assistant"
    ]
    return version - np.concatenate([np.zeros(0, dtype=int), *(turn.versions for turn in turns)])


def effort_counts(chain):
    """The six quantities the length penalty weighs, and the counts the tables show, over the whole
    chain."""
    mine = [turn for turn in chain.turns if turn.role == "assistant"]
    tokens = lambda turns: sum(len(turn.tokens) - turn.head for turn in turns)
    calls = [call for turn in mine for call in turn.calls]
    acting, silent = [t for t in mine if t.calls], [t for t in mine if not t.calls]
    final = silent[-1:] if chain.finished else []
    thinking = sum(turn.thinking for turn in acting)
    return dict(
        thinking_tokens=thinking + tokens(silent) - tokens(final),
        call_tokens=tokens(acting) - thinking,
        output_tokens=tokens(t for t in chain.turns if t.role == "tool"),
        final_tokens=tokens(final),
        calls=len(calls),
        turns=len(mine),
        sampled=tokens(mine),
        summaries=len(chain.episodes) - 1,
        context=max(len(e) for e in chain.episodes),
        total=sum(len(e) for e in chain.episodes),
        bad_tools=sum(call.error == "unknown_tool" for call in calls),
        bad_arguments=sum(call.error == "bad_arguments" for call in calls),
        finished=chain.finished,
    )


def demonstrate(
    task,
    tokenizer,
    rng,
    limits,
    sloppy=1.0,
    compact=None,
    remind={},
    hints=0.3,
    neutral=0.0,
    restless=0.0,
):
    """The scripted expert plays through the same agent and tools -> Chain. A flawed turn is, with
    probability `hints`, left out, and the hint remind[flaw](task, action) stands above the right
    one: so the model learns that hints are to be heeded. With probability `neutral` one of them
    stands above a turn that was right anyway, calls and final messages alike: a hint must say
    nothing but what it says, or its distillation drifts (a model that saw hints about tools above
    calls only unlearned to finish, and one that saw hints about the final message above final
    messages only learned to quit)."""
    play = agent(task, tokenizer, Rehearsal(task), limits, compact)
    moves = expert(task, rng, sloppy, untidy="code_style" in remind, restless=restless)
    texts = list(
        dict.fromkeys(
            tell(task, Action(words)) for tell in remind.values() for words in ("", "too many")
        )
    )
    action, turn, hinted, chain, asked = next(moves), 0, {}, None, None
    try:
        asked = next(play)
    except StopIteration as end:
        # the task alone does not fit the window
        chain = end.value
    while chain is None:
        while action.flaw in remind and rng.random() < hints:
            hinted[turn] = remind[action.flaw](task, action)
            action = moves.send([HINTED])
        if (
            turn not in hinted
            and remind
            and neutral
            and action.flaw not in remind
            and rng.random() < neutral
        ):
            hinted[turn] = texts[0] if len(texts) == 1 else rng.choice(texts)
        body, turn = write_action(tokenizer, action.text, action.calls, asked.number), turn + 1
        try:
            asked = play.send((body, np.zeros(len(body), dtype=np.float32), 0))
            if isinstance(asked, Work):
                asked.run()
                outputs = [call.output for call in asked.calls]
                asked = play.send(None)
                action = moves.send([SUMMARIZE] * asked.summary + outputs)
            else:  # the summary is written
                action = moves.send(outputs)
        except StopIteration as end:
            chain = end.value
    insert_hints(tokenizer, chain, hinted)
    chain.stats = effort_counts(chain)
    return chain


def audited(chain, verdict=None):
    """What the audit finds in this rollout -> findings, which the chain keeps"""
    if chain.findings is None:
        story = [
            (
                Action(turn.text, [(call.name, call.args) for call in turn.calls]),
                [call.output for call in turn.calls],
            )
            for turn in chain.turns
            if turn.role == "assistant"
        ]
        diff = changes(chain.task.files, chain.files)
        chain.findings = audit(chain.task, story, diff, facts=chain.facts, verdict=verdict)
    return chain.findings


def cheats(chain):
    """Does the audit find a cheat in this rollout? By facts alone: what only sounds like one is
    `suspicious`."""
    return any(finding.severity == "cheat" for finding in audited(chain))


def suspicious(chain):
    """Does something in this rollout sound like a cheat, though no fact says that it is one?"""
    return not cheats(chain) and any(finding.severity == "suspicious" for finding in audited(chain))


def blind(chain):
    """Was it submitted although the tests could be run and were not, or not since the last edit, or
    were red?"""
    green = False
    for call in (call for turn in chain.turns for call in turn.calls if not call.error):
        if call.name == "edit_file":
            green = False
        elif call.name == "run_command" and call.args == [chain.task.test_command]:
            green = "passed" in call.output and not re.search(
                r"[1-9]\d* (failed|error)", call.output
            )
    return chain.finished and "run_command" in chain.task.tools and not green


def hint_turn(tokenizer, text, turn):
    """The hint above an assistant turn: above one that begins without a word of the harness, it is
    the hint that ends in that"""
    hint = make_turn(tokenizer, "hint", text)
    hint.tokens += [] if turn.head else tokenizer.lead("hint")
    return hint


def insert_hints(tokenizer, chain, hints):
    """Put a hint right above each assistant turn whose number is in `hints`."""
    number = -1
    for episode in chain.episodes:
        turns = []
        for turn in episode.turns:
            number += turn.role == "assistant"
            turns += (
                [hint_turn(tokenizer, hints[number], turn), turn]
                if turn.role == "assistant" and number in hints
                else [turn]
            )
        episode.turns = turns


# ---------------------------------------------------------------- objective


def advantages(rewards):
    """Rewards of one group (G,) -> advantages (G,). What is left out of GRPO and its kin stands in
    experiments/objective.py."""
    rewards = np.asarray(rewards, dtype=np.float64)
    return rewards - rewards.mean()


def kl_estimates(logp, reference):
    """k1, k2, k3 per token for x ~ pi with r = ref / pi (Technical Report 4.1: k1 is kept, k3's
    variance explodes)."""
    log_r = reference - logp
    return -log_r, log_r**2 / 2, log_r.exp() - 1 - log_r


def targets_of(episode):
    """(T,) 1 = this token may be predicted by the one before it, 0 = the policy itself would speak
    there, and another does"""
    known, at = np.ones(len(episode)), 0
    for turn, after in zip(episode.turns, episode.turns[1:]):
        at += len(turn.tokens)
        if turn.open and after.role not in ("assistant", "recent"):
            known[at] = 0
    return known


def pack(episodes, advantage, multiple=1):
    """Episodes and one number each -> tensors (B, T), aligned so that position t predicts
    targets[t] = tokens[t + 1]: tokens (-1 = padding), targets, mask (1 = the target was sampled),
    logprobs, advantage, inside (1 = there is a target); experts (B, T, L, K) or None. T is a
    multiple of `multiple`. Where the policy would go on by itself and a user's word stands (a
    query, a hint), there is no target: it would be learnt as the policy's own."""
    T = -(-max(len(e) for e in episodes) // multiple) * multiple
    flat = [flatten(e) for e in episodes]
    fill = lambda rows, dtype: torch.from_numpy(
        np.stack([np.pad(r, (0, T - len(r))) for r in rows]).astype(dtype)
    )
    tokens, mask, logprobs = (
        fill([f[i] for f in flat], kind)
        for i, kind in enumerate((np.int64, np.float32, np.float32))
    )
    real = fill([np.ones(len(f[0])) for f in flat], np.int64) > 0
    # no token: the routers do not count it as load
    batch = {"tokens": tokens.masked_fill(~real, -1)}
    inside = fill([targets_of(e) for e in episodes], np.float32)
    for name, t in (
        ("targets", tokens),
        ("mask", mask),
        ("logprobs", logprobs),
        ("inside", inside),
    ):
        batch[name] = F.pad(t[:, 1:], (0, 1))
    batch["advantage"] = (
        batch["mask"] * torch.tensor(np.asarray(advantage), dtype=torch.float32)[:, None]
    )
    batch["experts"] = None
    known = [e.experts for e in episodes if e.experts is not None]
    # an episode without a record routes freely, alone
    if known:
        records = [known[0][:0] if e.experts is None else e.experts for e in episodes]
        pads = [np.pad(r, ((0, T - len(r)), (0, 0), (0, 0)), constant_values=-1) for r in records]
        batch["experts"] = torch.from_numpy(np.stack(pads))
    return batch


def policy_loss(logp, batch, normaliser, reference=None, beta=0.0):
    """-J of the batch, summed: the caller's `normaliser` is (rollouts) x L over all ranks and
    micro-batches. logp (B, T) with gradient; the k1 penalty enters the advantage, token by token,
    without gradient."""
    advantage = batch["advantage"]
    if beta:
        advantage = advantage - beta * (logp.detach() - reference) * batch["mask"]
    return -(advantage * logp * batch["mask"]).sum() / normaliser


# ---------------------------------------------------------------- transcripts on file


def message(turn, tokenizer, flags, ids):
    """A turn in the chat form. Beyond it: `tokens` of the turn and how many of them were `sampled`
    (the mask: all but the role's, or none), the policy's `versions`, `flags`. `ids` are those of
    calls that wait for their outputs."""
    sampled = turn.role == "assistant"
    role = turn.role if turn.role in ("user", "assistant", "tool") else "user"
    words = turn.text if sampled or tokenizer.chat else tokenizer.decode(turn.tokens[1:-1])
    entry = {
        "role": role,
        "content": words,
        "tokens": len(turn.tokens),
        "sampled": sampled * (len(turn.tokens) - turn.head),
    }
    if role != turn.role:
        # query, summary, recent or hint: the harness speaks as the user
        entry["name"] = turn.role
    if turn.role == "tool" and ids:
        entry["tool_call_id"] = ids.pop(0)
    if turn.calls:
        ids[:] = [call.id or f"call_{i}" for i, call in enumerate(turn.calls)]
        entry["tool_calls"] = [
            {
                "id": i,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(
                        named(call.name, call.args) if call.given is None else call.given
                    ),
                },
            }
            for i, call in zip(ids, turn.calls)
        ]
    if sampled:
        entry["versions"] = (
            sorted({int(v) for v in turn.versions}) if turn.versions is not None else []
        )
        flags = [*(call.error for call in turn.calls if call.error), *flags]
        flags += ["cut off"] if turn.tokens[-1] not in tokenizer.ends else []
    return {**entry, "flags": flags} if flags else entry


def transcript(chain, tokenizer, flags=None, **about):
    """-> a dict per episode, that is per training sequence, to be written as a line of JSON. flags:
    {(episode, turn): words}"""
    lines = []
    for e, episode in enumerate(chain.episodes):
        ids = []
        messages = [
            message(turn, tokenizer, (flags or {}).get((e, i), []), ids)
            for i, turn in enumerate(episode.turns)
        ]
        lines.append(
            {
                **about,
                "task": chain.task.instance_id,
                "level": chain.task.level,
                "episode": e + 1,
                "episodes": len(chain.episodes),
                "reward": chain.reward,
                "solved": bool(chain.solved),
                "finished": chain.finished,
                "messages": messages,
            }
        )
    return lines


def read_transcripts(path):
    """-> the conversations in a file. ValueError says in one line what is wrong with it."""
    try:
        rows = Path(path).read_text(encoding="utf-8-sig").strip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}"
        ) from None
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            lines.append(json.loads(row))
            # what can be printed is a conversation
            printed(lines[-1])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f"{path}: line {number} is no conversation (messages of role, content, tool_calls)"
            ) from None
    return lines


def write_transcripts(path, step, lines):
    """Puts a step's lines behind those of the steps before. What the file holds of this step or
    later goes: a run that was killed comes to these steps again. The file is replaced as a whole,
    so that none is ever torn."""
    try:
        kept = (
            [line for line in read_transcripts(path) if line["step"] < step]
            if path.exists()
            else []
        )
    # something else lay there: no reason for a run to end, nor for its loss
    except (ValueError, KeyError, TypeError):
        path.replace(path.with_suffix(".old"))
        kept = []
    part = path.with_suffix(".part")
    part.write_text(
        "".join(
            json.dumps(line) + "\n" for line in kept + [{"step": step, **line} for line in lines]
        )
    )
    part.replace(path)


def check_kinds(message):
    """A TypeError where a message of a transcript holds another kind of value than it should"""
    kinds = {
        "role": str,
        "content": (str, type(None)),
        "name": str,
        "tool_call_id": str,
        "tokens": int,
        "sampled": int,
        "flags": list,
        "versions": list,
        "tool_calls": list,
    }
    for name, kind in kinds.items():
        if name in message and not isinstance(message[name], kind):
            raise TypeError(f"{name} is no {kind}")
    called = [
        call["function"][part]
        for call in message.get("tool_calls", [])
        for part in ("name", "arguments")
    ]
    if not all(isinstance(word, str) for word in [*message.get("flags", []), *called]):
        raise TypeError("flags, names and arguments are words")
    if not all(isinstance(version, int) for version in message.get("versions", [])):
        raise TypeError("versions are numbers")


def spoken(line):
    """-> [(who, what, sampled tokens, notes)] of a conversation's messages; strict, so it is the
    check of a file as well"""
    said = []
    for m in line["messages"]:
        check_kinds(m)
        words = [m["content"] or ""]
        for call in m.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            words.append(
                f"> {call['function']['name']} "
                + " ".join(f"{name}={value}" for name, value in arguments.items())
            )
        versions = m.get("versions", [])
        notes = [f"{m['sampled']} sampled"] if m.get("sampled") else []
        notes += (
            ["policy " + "-".join(str(v) for v in (versions[0], versions[-1])[: len(versions)])]
            if versions
            else []
        )
        text = "\n".join(w for w in words if w).encode("utf-8", "replace").decode()
        said.append(
            (
                f"{m.get('name', m['role']):>9}",
                text,
                m.get("sampled", 0),
                notes + list(m.get("flags", [])),
            )
        )
    return said


def inert(text):
    """Control characters, spelled out: a transcript must not move the cursor."""
    return re.sub(
        r"[^\n\t -~\xa0-\ud7ff\ue000-\U0010ffff]", lambda found: ascii(found[0])[1:-1], text
    )


def printed(line):
    """A conversation in colour: what was sampled bright, the rest dim; behind it how many tokens,
    by which policy, and flags. -> the text of it. What is no conversation raises a ValueError,
    LookupError, TypeError, AttributeError or RecursionError."""
    said = [
        inert("  ".join(f"{name} {value}" for name, value in line.items() if name != "messages"))
    ]
    for who, text, sampled, notes in spoken(line):
        who, text, notes = (
            inert(who),
            inert(text).replace("\n", "\n" + " " * 11),
            inert(", ".join(notes)),
        )
        said.append(
            f"{who}  \033[{1 if sampled else 2}m{text}\033[0m"
            + (f"  \033[33m[{notes}]\033[0m" if notes else "")
        )
    return "\n".join(said)


def show(line):
    print(printed(line))


# ---------------------------------------------------------------- demo and bench


def small_model(tokenizer, **sizes):
    torch.manual_seed(0)
    model = Model(ModelConfig(vocab=tokenizer.vocab, **sizes))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1) if p.ndim > 1 and not p.any() else None
    return model


def rescore(model, episode, temperature=1.0, replay=True):
    """Log-probs of the sampled tokens by the trainer's forward, with the recorded experts or its
    own, minus those recorded."""
    batch = pack([episode], [1.0])
    with torch.no_grad():
        logp = model.logprobs(
            model(batch["tokens"], None, batch["experts"] if replay else None),
            batch["targets"],
            temperature,
        )
    return (logp - batch["logprobs"])[batch["mask"] > 0]


def draw_estimates(path, n=200_000):
    """What the three estimates of KL(pi || ref) cost: their variance where pi = N(0, 1) and ref =
    N(d, 1), whose KL is d^2 / 2"""
    # before the import: a notebook exports its own to what it starts
    os.environ["MPLBACKEND"] = "agg"
    from matplotlib.figure import Figure

    figure, kl, x = (
        Figure(figsize=(6, 4), layout="constrained"),
        np.linspace(0.02, 2, 25),
        torch.randn(n, dtype=torch.float64),
    )
    found = [
        [float(k.var()) for k in kl_estimates(-(x**2) / 2, -((x - (2 * one) ** 0.5) ** 2) / 2)]
        for one in kl
    ]
    ax = figure.subplots()
    for name, variance in zip(("k1, kept", "k2, biased", "k3"), zip(*found)):
        ax.plot(kl, variance, label=name)
    ax.set(
        yscale="log",
        xlabel="KL divergence, nats",
        ylabel="variance of one sample's estimate",
        title="Why k1",
    )
    ax.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def demo():
    from synth_tasks import example_texts

    tokenizer, task = Tokenizer.train(example_texts(100, 0), 700), make_task(1, 5)
    for line in transcript(demonstrate(task, tokenizer, random.Random(3), Limits()), tokenizer):
        show(line)
    model = small_model(tokenizer, dim=64, layers=2, heads=2, kv_lora=32, experts=4)
    sampler = Sampler(model, tokenizer, rows=8, window=256)
    (group,) = rollouts(sampler, [task], 8, 0, Limits(256, 4, 40), Sandbox())
    worst = max(
        float(rescore(model, e).abs().max())
        for c in group
        for e in c.episodes
        if any(t.role == "assistant" for t in e.turns)
    )
    flat = flatten(group[0].episodes[0])
    print(
        f"\nAbove, what the policy writes is bright: only that is trained on. A group of {len(group)} from an untrained model, rewards "
        f"{[c.reward for c in group]}, advantages {[float(a) for a in advantages([c.reward for c in group])]}: {int(flat[1].sum())} of the "
        f"first one's {len(flat[0])} tokens were sampled, and their log-probs from the cache equal the trainer's to {worst:.0e}."
    )
    draw_estimates(Path("out/rollout.png"))
    print("What the estimates of the KL penalty cost in variance: out/rollout.png")


def errand(rng):
    """An agent for the clock: turns of drawn lengths, and tools of which every third takes a tenth
    of a second."""
    fresh, restart = rng.integers(0, 256, 60).tolist(), True
    for _ in range(rng.integers(1, 10)):
        yield Request(fresh, restart, int(min(60, 1 + rng.exponential(12))))
        slow = bool(rng.random() < 1 / 3)
        yield Work([], lambda: time.sleep(0.1 * slow), slow)
        fresh, restart = rng.integers(0, 256, 20).tolist(), False
    return Chain(None, [])


class Static(Sampler):
    """What continuous batching is measured against: a batch begins together, each turn waits for
    the longest and for the slowest tool, and a new batch for the last to end; who waits is fed with
    the others. (Rows that ended are taken out, which is kind to it.)"""

    def company(self, live, rows):
        return len(rows) + -len(rows) % 8

    def turn(self, rows, queue, done, on_end):
        if not any(row.sampling for row in rows):
            rows = super().turn(rows, [] if rows else queue, done, on_end)
            while any(row.work for row in rows):
                rows = super().turn(rows, [], done, on_end)
        return rows


class Products(TorchDispatchMode):
    """Keeps the matrix products of what runs under it, with their operands; in inference mode they
    pass here undecomposed."""

    NAMES = (
        "linear",
        "matmul",
        "einsum",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "_grouped_mm",
        "scaled_dot_product_attention",
    )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in self.NAMES:
            self.kept.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def products(step):
    """-> a function that does again only the matrix products (attention's own included) of
    `step()`"""
    with Products() as mode:
        mode.kept = []
        step()
    assert mode.kept, "no matrix product was seen"
    return lambda: [function(*args, **kwargs) for function, args, kwargs in mode.kept]


def best_times(candidates, rounds, budget=5.0):
    """{name: function} -> {name: least seconds}. They take turns, so that a machine's moods fall on
    all; one that used its budget of seconds stops."""
    spent = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, one in candidates.items():
            if sum(spent[name]) < budget:
                start = time.perf_counter()
                one()
                spent[name].append(time.perf_counter() - start)
    return {name: min(times[1:] or times) for name, times in spent.items()}


def bench():
    # as in train.py's processes: one for each core
    torch.set_num_threads(1)
    letters, pairs = {bytes([b]): b for b in range(256)}, {
        bytes(divmod(i, 256)): i for i in range(256, 1014)
    }
    tokenizer, rows, length, window, dtype = (
        Tokenizer(letters | pairs),
        32,
        256,
        512,
        fast_dtype("cpu"),
    )
    # train.py's, of 1,024 tokens
    model = small_model(tokenizer, kv_lora=128, qk_nope=32).compute(dtype)
    lean = generation_model(model.config, dtype)
    lean.load_state_dict(model.state_dict())
    tokens, start = torch.randint(0, 256, (rows, length + 4)), torch.full((rows,), length)
    cache = Cache(lean, rows, window + 2)

    def step(width):
        hidden = lean.decode(
            tokens[:, length : length + width], cache, slice(0, rows), start
        ).flatten(0, 1)
        return choose(lean.logits(hidden), torch.rand(len(hidden)))

    one, four = (lambda: step(1)), (lambda: step(4))
    full = lambda: choose(model.logits(model(tokens[:, : length + 1])[:, -1]), torch.rand(rows))
    with torch.inference_mode():
        lean.decode(tokens[:, :length], cache, slice(0, rows), torch.zeros(rows, dtype=torch.long))
        seconds = best_times(
            {
                "from the latent cache": one,
                "its matrix products alone": products(one),
                "with 3 drafts, none right": four,
                "its matrix products": products(four),
                "full forward per token": full,
            },
            100,
        )
    for name, t in seconds.items():
        print(
            f"{name:27s} {1e3 * t:8.2f} ms a step {rows / t:9,.0f} tokens/s   {rows} sequences of {length} tokens, {dtype}"
        )
    cached, alone, drafted, its, full = seconds.values()
    print(
        f"the cache does {full / cached:.1f}x the tokens/s of the full forward; a step takes {cached / alone:.2f}x its matrix products, "
        f"with a draft {drafted / its:.2f}x\nits own and {drafted / cached:.2f}x the other: that many tokens a step and drafts pay\n"
    )
    kinds, sampled = {"continuous batching": Sampler, "static batching": Static}, {}
    work = lambda name: lambda: sampled.update(
        {name: sum(len(body) for body in bodies(kinds[name](lean, tokenizer, rows, 1024), 96))}
    )
    seconds = best_times({name: work(name) for name in kinds}, 2)
    # bf16 rounds by the batch: now and then a rollout is another one
    for name, t in seconds.items():
        print(
            f"{name:27s} {t:8.2f} s {sampled[name] / t:14,.0f} tokens/s   96 episodes with tool calls in {rows} rows"
        )
    ours, other = (sampled[name] / t for name, t in seconds.items())
    print(f"continuous batching does {ours / other:.1f}x the tokens/s of static batching")


def bodies(sampler, n):
    """Run n errands -> every body that was sampled"""
    got = []

    def overheard(play):
        asked = next(play)
        while True:
            answer = yield asked
            got.append(answer[0]) if answer else None
            try:
                asked = play.send(answer)
            except StopIteration as end:
                return end.value

    sampler.run(
        [overheard(errand(np.random.default_rng(i))) for i in range(n)],
        list(range(n)),
        patient=isinstance(sampler, Static),
    )
    return got


def refuse(text):
    print(f"rollout.py: {text}", file=sys.stderr)
    raise SystemExit(2)


def main(argv):
    parser = argparse.ArgumentParser(
        description="A demonstration and a group of rollouts.", allow_abbrev=False
    )
    parser.error = refuse
    parser.add_argument("--bench", action="store_true", help="measure decoding")
    parser.add_argument(
        "--replay",
        metavar="FILE",
        help="print a conversation of a transcripts.jsonl, the last if no --line is given",
    )
    parser.add_argument(
        "--line", type=int, metavar="N", help="with --replay: which line of the file, from 1"
    )
    given = parser.parse_args(argv)
    if given.line is not None and given.replay is None:
        refuse("--line goes with --replay=FILE")
    if given.bench and given.replay is not None:
        refuse("--bench or --replay=FILE, not both")
    if given.replay == "":
        refuse("--replay= names no file")
    if given.bench:
        return bench()
    if given.replay is None:
        try:
            return demo()
        except OSError as error:
            refuse(f"{error.filename or 'cannot write'}: {error.strerror}")
    try:
        lines = read_transcripts(given.replay)
    except ValueError as error:
        refuse(error)
    if hasattr(sys.stdout, "reconfigure"):
        # a terminal that is not for all letters shows their numbers
        sys.stdout.reconfigure(errors="backslashreplace")
    if not 1 <= (number := given.line if given.line is not None else len(lines)) <= len(lines):
        refuse(f"--line={number}: {given.replay} has lines 1 to {len(lines)}")
    show(lines[number - 1])


if __name__ == "__main__":
    main(sys.argv[1:])
