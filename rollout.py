"""rollout.py: an agent acts in a codebase, token by token, and is trained on exactly the tokens it
sampled.

A policy reads a task, calls tools in a real directory, sees their outputs, and ends with a final
message; hidden tests give the reward. This file holds the tokenizer, the transcript, the tools, the
agent, a sampler in its plain form (one agent after the other, one token at a time) and the
policy-gradient objective.

Stated by Cursor (Technical Report, arXiv 2603.24477, sections 4.1 and 6.2): several rollouts per
task, each task used once; advantage = reward minus the group's mean, NOT divided by its standard
deviation (a group where every rollout is right would have its accidents blown up to unit
advantage); no length standardisation, no overlong masking; KL by the k1 estimator; router replay.
Seed names of the tools: read_file, edit_file, run_command, search_codebase.

    A_i = r_i - mean_group(r)
    J   = 1 / (G L) sum_i sum_t (A_i - beta k1_t) log pi(y_it)
          t over sampled tokens, stop tokens included; L constant
    k1  = log pi(y_t) - log ref(y_t), detached: as a loss its expected gradient is zero, so it is
          part of the reward

Ours: beta, L, the reference (the policy after SFT), the tool-call format, all sizes. No ratio and
no clip: one update per batch, so the sampling policy is the policy. Left out: branching
environments and semantic search.

History is linear: a turn is [role] body <|end|>, tokens are only ever appended, and what was
sampled is never decoded and re-encoded on the way to the loss. Control tokens separate calls and
arguments; no text encodes to one, so no tool output can forge a call. A published model is
addressed in the form that it is used to: see Chat.

Letters: B rows, T time, V vocabulary, G rollouts per group, L MoE layers (or the length constant),
K experts per token.

    python rollout.py       one group sampled from an untrained model and one demonstration, printed
                            with masks
    python rollout.py --replay=out/run/transcripts.jsonl      a conversation that training left
                            there, in colour, with masks and flags
"""

import argparse
import base64
import json
import math
import os
import random
import re
import sys
import unicodedata
from bisect import bisect
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import regex  # comes with tiktoken
import tiktoken
import torch
import torch.nn.functional as F

from moe import Cache, Model, ModelConfig, divide_by_temperature
from synth_tasks import make_task
from world.audit import audit, changes
from world.expert import Rehearsal, expert
from world.judge import judge
from world.sandbox import Sandbox
from world.task import HINTED, SUMMARIZE, Action, Task
from world.tools import ARGUMENTS, call_tool, tool_schema
from world.workspace import Workspace
from world.machine import MachineFailure, is_machine_failure, try_again

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
        # The head of a turn is the harness's. Behind it, the tokens of an assistant were sampled.
        sampled = turn.role == "assistant"
        n = len(turn.tokens) - turn.head
        tokens += turn.tokens
        mask += [0] * turn.head + [int(sampled)] * n
        logprobs += [0.0] * turn.head
        if sampled and turn.logprobs is not None:
            logprobs += turn.logprobs.tolist()
        else:
            logprobs += [0.0] * n
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
        lines, form = [
            json.dumps({"type": "function", "function": tool_schema(tool)}) for tool in task.tools
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
    """Tools to run outside the model. slow: a process is started, so that others may be sampled
    meanwhile."""

    calls: list
    run: callable
    slow: bool


def leaves_room(tokenizer, task, limits):
    """Is there room for a first turn, two tokens at least, behind the task's opening?"""
    return limits.window - len(opening(tokenizer, task).tokens) - len(tokenizer.lead("user")) >= 2


def agent(task, tokenizer, workspace, limits, compact=None):
    """A coroutine: one agent works on one task. It yields a Request and is sent (body, logprobs,
    versions), yields a Work and is sent nothing, and so on; it returns its Chain. versions may be
    one number for all of a body.

    `compact(tokenizer, chain)` is summarize.py's hook: after each turn it may return a query turn;
    the summary is then sampled in the same context, and a new episode starts from task + summary
    (or, where it truncates, at once from task + newest turns)."""
    chain = Chain(task, [Episode([opening(tokenizer, task)])])
    pending = context_tokens(tokenizer, chain.episodes[-1])  # what the sampler has not read yet
    restart = True  # the pending tokens begin a new context
    summarizing = False  # the next turn is a summary
    call_number = 0  # calls that stand in the context
    commands_run = 0

    for _ in range(limits.turns):
        # 1) Is there room for a turn, two tokens at least? A sampler (or the expert) writes it.
        episode = chain.episodes[-1]
        prompt = tokenizer.lead(episode.turns[-1].role)
        room = limits.window - len(episode) - len(prompt)
        if room < 2:
            break
        most = min(limits.turn, room)
        body, logprobs, versions = yield Request(pending, restart, most, summarizing, call_number)
        restart = False

        # 2) It is kept token for token. (A demonstration may write more than the window holds.)
        body, logprobs = body[:room], logprobs[:room]
        text, calls = read_action(tokenizer, body)
        turn = Turn(
            "assistant",
            [*prompt, *body],
            text,
            calls,
            thinking=calls[0].start if calls else 0,
            logprobs=logprobs,
            versions=np.resize(versions, len(body)),
            head=len(prompt),
        )
        episode.turns.append(turn)

        # 3) A turn without a stop token ran out of room: none of its calls is run, and the agent
        #    has submitted nothing.
        if body[-1] not in tokenizer.ends:
            cut_off = [] if summarizing else calls
            turn.calls = [replace(call, output="", error="failed") for call in cut_off]
            break

        # 4) A summary ends the episode, and the next one starts from it.
        if summarizing:
            turn.calls = []
            chain.episodes.append(Episode(compact.restart(tokenizer, chain, turn)))
            pending = context_tokens(tokenizer, chain.episodes[-1])
            restart, summarizing, call_number = True, False, 0
            continue

        # 5) A turn without calls is the final message: the work is submitted.
        if not calls:
            chain.finished = True
            break

        # 6) The tools run outside the model. Where the machine fails at one, what the tools say is
        #    not what this agent's work does.
        call_number = number_calls(tokenizer, calls, call_number)
        commands = refuse_calls(task, limits, calls, commands_run)
        commands_run += commands
        yield Work(calls, lambda: run_tools(workspace, calls, chain), slow=commands > 0)
        if chain.failure:
            break

        # 7) Their outputs share a third of the window at most.
        room = limits.window // 3
        if compact:
            room = min(room, compact.room(tokenizer, chain))
        added = []
        for i, call in enumerate(calls):
            answers = call.name, i, len(calls), call.id
            added.append(make_turn(tokenizer, "tool", call.output, room // len(calls), answers))
        episode.turns += added

        # 8) Is the context nearly full? Then a summary is asked for, or the oldest turns are left
        #    out.
        query = compact(tokenizer, chain) if compact else None
        if query and compact.truncate:
            chain.episodes.append(Episode(compact.recent(tokenizer, chain)))
            pending = context_tokens(tokenizer, chain.episodes[-1])
            restart = True
            continue
        if query:
            episode.turns.append(query)
            added.append(query)
            summarizing = True
        pending = context_tokens(tokenizer, Episode(added))

    leave_out_unread(chain, limits)
    try:
        chain.files = workspace.files()
    except MachineFailure as failure:
        chain.failure = str(failure)
    return chain


def context_tokens(tokenizer, episode):
    """The tokens of these turns, and what the harness writes before the policy's next turn"""
    tokens = []
    for turn in episode.turns:
        tokens += turn.tokens
    return tokens + tokenizer.lead(episode.turns[-1].role)


def refuse_calls(task, limits, calls, commands_run):
    """Marks the calls of a turn that are not to run: commands beyond the limit -> how many commands
    the turn holds"""
    commands = []
    for call in calls:
        # How it was called no longer matters: there is no such tool, and its answer will say so.
        if call.name and call.name not in task.tools:
            call.output, call.error = "", ""
        elif call.name == "run_command":
            commands.append(call)
    if limits.commands:
        allowed = max(0, limits.commands - commands_run)
        for call in commands[allowed:]:
            call.output, call.error = "No more commands.", "failed"
    return len(commands)


def leave_out_unread(chain, limits):
    """A chain ends with turns that the policy has read or written itself."""
    # Outputs that overflowed the context were never fed.
    for episode in chain.episodes:
        while len(episode) > limits.window and len(episode.turns) > 1:
            episode.turns.pop()
    # Where the last turn allowed was a summary, nothing came of it.
    roles = [turn.role for turn in chain.episodes[-1].turns]
    if len(chain.episodes) > 1 and "assistant" not in roles:
        chain.episodes.pop()


# ---------------------------------------------------------------- sampling


def choose(logits, uniform, temperature=1.0):
    """logits (B, V), uniform (B,) in [0, 1) -> tokens (B,), log-probs (B,) of the distribution that
    was sampled from, in fp32. temperature from 0 (the largest logit) on, finite: else a
    ValueError."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be a finite number from 0 on")
    if temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    p = divide_by_temperature(logits.float(), temperature).softmax(-1)  # (B, V)

    # The inverse of the cumulative distribution turns a uniform number into a token. (A draw just
    # below 1 rounds to 1 in fp32.)
    mass = p.cumsum(-1)
    draw = uniform.clamp(max=1 - 2**-24) * mass[:, -1]
    tokens = torch.searchsorted(mass, draw[:, None], right=True).clamp(max=logits.shape[-1] - 1)
    return tokens[:, 0], p.gather(-1, tokens)[:, 0].log()


class Context:
    """What a model has read of one episode: tokens, its cache of their keys and values, and the
    experts that each of them took."""

    def __init__(self, model, window):
        self.tokens = []
        self.cached = 0  # tokens[:cached] are in the cache
        self.cache = Cache(model, 1, window + 2)
        self.experts = []  # arrays (N, L, K)

    def experts_of(self, length):
        """-> (length, L, K) int16, -1 where a token was not fed; None without MoE layers"""
        if not self.experts:
            return None
        known = np.concatenate(self.experts)[:length]
        return np.pad(known, ((0, length - len(known)), (0, 0), (0, 0)), constant_values=-1)


class Sampler:
    """The plain form of sampling: one agent after the other, one token at a time, from a cache.

    Each agent draws with random numbers of its own, one per token: what it samples does not depend
    on who else is sampled. What the plain form costs is time. A step that decodes one token reads
    all weights of the model, and would read them once for a batch of 64 agents too."""

    def __init__(self, model, tokenizer, window=512, temperature=1.0):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.window = window
        self.temperature = temperature
        self.device = model.embed.weight.device
        self.version = 0  # of the weights: how many updates they have seen

    @torch.inference_mode()
    def run(self, agents, seeds, on_end=lambda chain: None, patient=True):
        """-> the Chains of the agents, in order. seeds: one per agent, of whatever numpy makes a
        generator. on_end is called as each chain ends (to judge it). patient means nothing here:
        every agent waits for its tools."""
        chains = []
        for agent, seed in zip(agents, seeds):
            chains.append(self.play(agent, np.random.default_rng(seed)))
            on_end(chains[-1])
        return chains

    def play(self, agent, rng):
        """Answers what one agent asks for, until it returns its Chain."""
        contexts = []  # one per episode
        answer, steps = None, 0
        while True:
            # The agent goes on until it asks for something, or ends.
            try:
                request = agent.send(answer)
            except StopIteration as end:
                chain = end.value
                break
            # Tools need no model.
            if isinstance(request, Work):
                request.run()
                answer = None
                continue
            # A turn is sampled behind what the model has read, or in a new context.
            if request.restart:
                contexts.append(Context(self.model, self.window))
            contexts[-1].tokens += request.tokens
            answer = self.sample_turn(contexts[-1], request.room, rng)
            steps += len(answer[0])
        # The experts that each token took are part of the record: training replays them.
        chain.steps = steps
        for episode, context in zip(chain.episodes, contexts):
            episode.experts = context.experts_of(len(episode))
        return chain

    def sample_turn(self, context, room, rng):
        """-> (tokens, log-probs, versions) of a turn of at most `room` tokens"""
        body, logprobs = [], []
        while len(body) < room:
            logits = self.next_token_logits(context)
            uniform = torch.tensor([rng.random()], dtype=torch.float32, device=self.device)
            token, logprob = choose(logits, uniform, self.temperature)
            body.append(int(token))
            logprobs.append(float(logprob))
            context.tokens.append(body[-1])
            if body[-1] in self.tokenizer.ends:
                break
        return body, np.array(logprobs, dtype=np.float32), np.full(len(body), self.version)

    def next_token_logits(self, context):
        """Feeds the tokens that are not in the cache yet -> logits (1, V) of what follows the last
        of them"""
        tokens = torch.tensor([context.tokens[context.cached :]], device=self.device)  # (1, N)
        chosen = []  # of each MoE layer (1, N, K)
        hidden = self.model.decode(tokens, context.cache, slice(0, 1), [context.cached], chosen)
        if chosen:
            experts = torch.cat(chosen).transpose(0, 1)  # (N, L, K)
            context.experts.append(experts.cpu().numpy().astype(np.int16))
        context.cached = len(context.tokens)
        return self.model.logits(hidden[0, -1:])


class InTurn:
    """Where the rollouts of training come from when one process samples and updates in turn. The
    trainer hands over its weights (publish), asks for rollouts of its tasks (submit), and takes the
    groups of chains (collect), which are sampled then."""

    restarts = 0  # of processes that died

    def __init__(self, model, tokenizer, group, limits, compact=None, temperature=1.0):
        self.sampler = Sampler(model, tokenizer, limits.window, temperature)
        self.group = group
        self.limits = limits
        self.compact = compact
        self.sandbox = Sandbox()

    def publish(self, version, weights):
        """weights: {name: tensor} -> what the log says of it: nothing, since nothing is sent"""
        self.sampler.model.load_state_dict(weights)
        self.sampler.version = version
        return {}

    def submit(self, tasks, numbers, seed):
        return tasks, numbers, seed

    def collect(self, submitted):
        """-> a group of chains per task"""
        tasks, numbers, seed = submitted
        return rollouts(
            self.sampler, tasks, self.group, seed, self.limits, self.sandbox, self.compact, numbers
        )

    def close(self):
        pass


# ---------------------------------------------------------------- rollouts and demonstrations


def agent_in_workspace(task, tokenizer, sandbox, limits, compact):
    """An agent in a workspace of its own, made when it begins and gone when it ends"""
    try:
        workspace = try_again(lambda: Workspace(task, sandbox))
    except MachineFailure as failure:
        return Chain(task, [Episode([opening(tokenizer, task)])], failure=str(failure))
    with workspace:
        chain = yield from agent(task, tokenizer, workspace, limits, compact)
        chain.facts = workspace.recorder.seen
        return chain


def grade(chain, sandbox):
    """The hidden tests of the task judge what was submitted: chain.solved and chain.reward. The
    audit looks for cheats."""
    chain.stats = effort_counts(chain)
    if chain.failure:
        return
    try:
        verdict = judge(chain.task, chain.files, sandbox)
        chain.solved, chain.reward = verdict.solved, float(verdict.solved)
        # Here the audit runs beside the sampling, and in the processes that sample.
        audited(chain, verdict)
    except (MachineFailure, OSError, MemoryError) as failure:
        if not is_machine_failure(failure):
            raise
        chain.failure = str(failure)


def rollouts(sampler, tasks, group, seed, limits, sandbox, compact=None, numbers=None):
    """`group` chains per task -> list of groups, graded. The chance of chain j of a task is drawn
    from (seed, the task's number, j). A chain that the machine failed is played once more; where it
    fails again, chain.failure says why, and it is neither right nor wrong: leave it out (see
    judged)."""
    # Tests of a real repository take long, so nobody waits for them but who asked.
    patient = not any("repo" in task.meta for task in tasks)

    def play(places):
        agents, seeds = [], []
        for number, task, j in places:
            agents.append(agent_in_workspace(task, sampler.tokenizer, sandbox, limits, compact))
            seeds.append((seed, number, j))
        try:
            return sampler.run(agents, seeds, lambda chain: grade(chain, sandbox), patient=patient)
        finally:
            # After an error, agents are under way: their workspaces go.
            for one in agents:
                one.close()

    places = []
    for number, task in zip(numbers or range(len(tasks)), tasks):
        places += [(number, task, j) for j in range(group)]
    chains = play(places)

    # What the machine failed at gets one more try.
    failed = [i for i, chain in enumerate(chains) if chain.failure]
    if failed:
        for i, chain in zip(failed, play([places[i] for i in failed])):
            chains[i] = chain
    return [chains[i : i + group] for i in range(0, len(chains), group)]


def judged(groups):
    """-> (the groups without the chains that the machine failed, those chains). A group of which
    nothing is left is left out."""
    kept, failed = [], []
    for group in groups:
        kept.append([chain for chain in group if not chain.failure])
        failed += [chain for chain in group if chain.failure]
    return [group for group in kept if group], failed


def failures_line(lost, total):
    """What a log says of chains that the machine failed: how many, of how many, and at what most of
    them."""
    cause = Counter(lost).most_common(1)[0][0].split("\n")[0][:200]
    return (
        f"{len(lost)} of {total} rollouts were lost to this machine, twice each, "
        f"and count for nothing: {cause}"
    )


def effort_counts(chain):
    """The six quantities the length penalty weighs, and the counts the tables show, over the whole
    chain."""

    def count_tokens(turns):
        return sum(len(turn.tokens) - turn.head for turn in turns)

    own = [turn for turn in chain.turns if turn.role == "assistant"]
    acting = [turn for turn in own if turn.calls]
    silent = [turn for turn in own if not turn.calls]  # summaries and the final message
    final = silent[-1:] if chain.finished else []
    outputs = [turn for turn in chain.turns if turn.role == "tool"]
    calls = [call for turn in own for call in turn.calls]
    thinking = sum(turn.thinking for turn in acting)
    return dict(
        thinking_tokens=thinking + count_tokens(silent) - count_tokens(final),
        call_tokens=count_tokens(acting) - thinking,
        output_tokens=count_tokens(outputs),
        final_tokens=count_tokens(final),
        calls=len(calls),
        turns=len(own),
        sampled=count_tokens(own),
        summaries=len(chain.episodes) - 1,
        context=max(len(episode) for episode in chain.episodes),
        total=sum(len(episode) for episode in chain.episodes),
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


def submitted_untested(chain):
    """Was it submitted although the tests could be run and were not, or not since the last edit, or
    were red?"""
    if not chain.finished or "run_command" not in chain.task.tools:
        return False
    green = False
    for turn in chain.turns:
        for call in turn.calls:
            if call.error:
                continue
            if call.name == "edit_file":
                green = False
            elif call.name == "run_command" and call.args == [chain.task.test_command]:
                red = re.search(r"[1-9]\d* (failed|error)", call.output)
                green = "passed" in call.output and not red
    return not green


def hint_turn(tokenizer, text, turn):
    """The hint above an assistant turn: above one that begins without a word of the harness, it is
    the hint that ends in that"""
    hint = make_turn(tokenizer, "hint", text)
    hint.tokens += [] if turn.head else tokenizer.lead("hint")
    return hint


def insert_hints(tokenizer, chain, hints):
    """Put a hint right above each assistant turn whose number is in `hints`."""
    number = 0
    for episode in chain.episodes:
        turns = []
        for turn in episode.turns:
            if turn.role == "assistant":
                if number in hints:
                    turns.append(hint_turn(tokenizer, hints[number], turn))
                number += 1
            turns.append(turn)
        episode.turns = turns


# ---------------------------------------------------------------- objective


def advantages(rewards):
    """Rewards of one group (G,) -> advantages (G,): each reward minus the group's mean. What is
    left out of GRPO and its kin stands in experiments/objective.py."""
    rewards = np.asarray(rewards, dtype=np.float64)
    return rewards - rewards.mean()


def kl_estimates(logp, reference):
    """-> k1, k2, k3 per token, estimates of KL(pi || ref) from log-probs of x ~ pi, with r = ref /
    pi (Technical Report 4.1: k1 is kept, k3's variance explodes)."""
    log_r = reference - logp
    k1 = -log_r
    k2 = log_r**2 / 2
    k3 = log_r.exp() - 1 - log_r
    return k1, k2, k3


def predictable_tokens(episode):
    """(T,) 1 = this token may be predicted by the one before it, 0 = the policy itself would speak
    there, and another does"""
    known, start = np.ones(len(episode)), 0
    for turn, following in zip(episode.turns, episode.turns[1:]):
        start += len(turn.tokens)
        if turn.open and following.role not in ("assistant", "recent"):
            known[start] = 0
    return known


def pack(episodes, advantage, multiple=1):
    """Episodes and one number each -> tensors (B, T), aligned so that position t predicts
    targets[t] = tokens[t + 1]: tokens (-1 = padding), targets, mask (1 = the target was sampled),
    logprobs, advantage, inside (1 = there is a target); experts (B, T, L, K) or None. T is a
    multiple of `multiple`. Where the policy would go on by itself and a user's word stands (a
    query, a hint), there is no target: it would be learnt as the policy's own."""
    T = -(-max(len(episode) for episode in episodes) // multiple) * multiple

    # One row per episode, with zeros behind its end.
    columns = {"targets": [], "mask": [], "logprobs": [], "inside": [], "real": []}
    for episode in episodes:
        tokens, mask, logprobs, _ = flatten(episode)
        inside, real = predictable_tokens(episode), np.ones(len(episode))
        for column, row in zip(columns.values(), (tokens, mask, logprobs, inside, real)):
            column.append(np.pad(row, (0, T - len(row))))

    def stack(name, dtype):
        return torch.from_numpy(np.stack(columns[name]).astype(dtype))  # (B, T)

    # Padding is no token: the routers do not count it as load.
    batch = {"tokens": stack("targets", np.int64).masked_fill(stack("real", np.int64) == 0, -1)}

    # What is said of a token belongs to the position before it, which predicts it.
    for name in ("targets", "mask", "logprobs", "inside"):
        values = stack(name, np.int64 if name == "targets" else np.float32)
        batch[name] = F.pad(values[:, 1:], (0, 1))
    weights = torch.tensor(np.asarray(advantage), dtype=torch.float32)
    batch["advantage"] = batch["mask"] * weights[:, None]

    # Router replay. An episode without a record routes freely.
    batch["experts"] = None
    records = [episode.experts for episode in episodes if episode.experts is not None]
    if records:
        experts = np.full((len(episodes), T, *records[0].shape[1:]), -1, dtype=records[0].dtype)
        for row, episode in zip(experts, episodes):
            if episode.experts is not None:
                row[: len(episode.experts)] = episode.experts
        batch["experts"] = torch.from_numpy(experts)
    return batch


def policy_loss(logp, batch, normaliser, reference=None, beta=0.0):
    """-J of the batch, summed. logp (B, T) with gradient; normaliser: (rollouts) x L over all ranks
    and micro-batches; reference (B, T): log-probs under the reference policy.

    There is no ratio and no clip: one update per batch. The gradient of A log pi is the policy
    gradient."""
    advantage = batch["advantage"]
    # The k1 penalty is part of the reward, token by token, so it has no gradient of its own.
    if beta:
        k1 = logp.detach() - reference
        advantage = advantage - beta * k1 * batch["mask"]
    return -(advantage * logp * batch["mask"]).sum() / normaliser


# ---------------------------------------------------------------- transcripts on file


def message(turn, tokenizer, flags, ids):
    """A turn in the chat form. Beyond it: `tokens` of the turn and how many of them were `sampled`
    (the mask: all but the role's, or none), the policy's `versions`, `flags`. `ids` are those of
    calls that wait for their outputs."""
    sampled = turn.role == "assistant"
    # query, summary, recent or hint: the harness speaks as the user
    role = turn.role if turn.role in ("user", "assistant", "tool") else "user"
    words = turn.text if sampled or tokenizer.chat else tokenizer.decode(turn.tokens[1:-1])
    entry = {
        "role": role,
        "content": words,
        "tokens": len(turn.tokens),
        "sampled": len(turn.tokens) - turn.head if sampled else 0,
    }
    if role != turn.role:
        entry["name"] = turn.role

    # A call has an id, which the tool's message repeats.
    if turn.role == "tool" and ids:
        entry["tool_call_id"] = ids.pop(0)
    if turn.calls:
        ids[:] = [call.id or f"call_{i}" for i, call in enumerate(turn.calls)]
        entry["tool_calls"] = [tool_call(call, i) for call, i in zip(turn.calls, ids)]

    if sampled:
        versions = [] if turn.versions is None else turn.versions
        entry["versions"] = sorted({int(version) for version in versions})
        flags = [call.error for call in turn.calls if call.error] + list(flags)
        if turn.tokens[-1] not in tokenizer.ends:
            flags.append("cut off")
    if flags:
        entry["flags"] = flags
    return entry


def tool_call(call, call_id):
    """A call in the chat form"""
    arguments = named(call.name, call.args) if call.given is None else call.given
    function = {"name": call.name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def transcript(chain, tokenizer, flags=None, **about):
    """-> a dict per episode, that is per training sequence, to be written as a line of JSON. flags:
    {(episode, turn): words}"""
    flags = flags or {}
    lines = []
    for e, episode in enumerate(chain.episodes):
        ids = []
        messages = []
        for i, turn in enumerate(episode.turns):
            messages.append(message(turn, tokenizer, flags.get((e, i), []), ids))
        line = {
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
        lines.append(line)
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
    kept = []
    try:
        if path.exists():
            kept = [line for line in read_transcripts(path) if line["step"] < step]
    # something else lay there: no reason for a run to end, nor for its loss
    except (ValueError, KeyError, TypeError):
        path.replace(path.with_suffix(".old"))
    rows = [json.dumps(line) for line in kept]
    rows += [json.dumps({"step": step, **line}) for line in lines]
    part = path.with_suffix(".part")
    part.write_text("".join(row + "\n" for row in rows))
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
            pairs = " ".join(f"{name}={value}" for name, value in arguments.items())
            words.append(f"> {call['function']['name']} {pairs}")
        text = "\n".join(word for word in words if word)

        notes, versions = [], m.get("versions", [])
        if m.get("sampled"):
            notes.append(f"{m['sampled']} sampled")
        if len(versions) == 1:
            notes.append(f"policy {versions[0]}")
        elif versions:
            notes.append(f"policy {versions[0]}-{versions[-1]}")
        notes += m.get("flags", [])
        who = f"{m.get('name', m['role']):>9}"
        # what is no letter alone, half of a pair, cannot be printed
        said.append((who, text.encode("utf-8", "replace").decode(), m.get("sampled", 0), notes))
    return said


def escape_control_chars(text):
    """Control characters, spelled out: a transcript must not move the cursor."""
    return re.sub(
        r"[^\n\t -~\xa0-\ud7ff\ue000-\U0010ffff]", lambda found: ascii(found[0])[1:-1], text
    )


def printed(line):
    """A conversation in colour: what was sampled bright, the rest dim; behind it how many tokens,
    by which policy, and flags. -> the text of it. What is no conversation raises a ValueError,
    LookupError, TypeError, AttributeError or RecursionError."""
    about = [f"{name} {value}" for name, value in line.items() if name != "messages"]
    said = [escape_control_chars("  ".join(about))]
    for who, text, sampled, notes in spoken(line):
        text = escape_control_chars(text).replace("\n", "\n" + " " * 11)
        brightness = 1 if sampled else 2
        row = f"{escape_control_chars(who)}  \033[{brightness}m{text}\033[0m"
        if notes:
            row += f"  \033[33m[{escape_control_chars(', '.join(notes))}]\033[0m"
        said.append(row)
    return "\n".join(said)


def show(line):
    print(printed(line))


# ---------------------------------------------------------------- demo


def small_model(tokenizer, **sizes):
    """A random model, its head too: an untrained one would give all tokens alike."""
    torch.manual_seed(0)
    model = Model(ModelConfig(vocab=tokenizer.vocab, **sizes))
    for p in model.parameters():
        if p.ndim > 1 and not p.any():
            torch.nn.init.normal_(p, std=0.1)
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

    kl = np.linspace(0.02, 2, 25)
    x = torch.randn(n, dtype=torch.float64)  # samples of pi
    variances = []
    for nats in kl:
        distance = (2 * nats) ** 0.5
        estimates = kl_estimates(-(x**2) / 2, -((x - distance) ** 2) / 2)
        variances.append([float(estimate.var()) for estimate in estimates])

    figure = Figure(figsize=(6, 4), layout="constrained")
    ax = figure.subplots()
    for name, variance in zip(("k1, kept", "k2, biased", "k3"), zip(*variances)):
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

    # A demonstration, printed with its masks
    tokenizer, task = Tokenizer.train(example_texts(100, 0), 700), make_task(1, 5)
    chain = demonstrate(task, tokenizer, random.Random(3), Limits())
    for line in transcript(chain, tokenizer):
        show(line)

    # A group of rollouts of an untrained model, and their log-probs computed again
    model = small_model(tokenizer, dim=64, layers=2, heads=2, kv_lora=32, experts=4)
    sampler = Sampler(model, tokenizer, window=256)
    (group,) = rollouts(sampler, [task], 8, 0, Limits(256, 4, 40), Sandbox())
    worst = 0.0
    for chain in group:
        for episode in chain.episodes:
            if any(turn.role == "assistant" for turn in episode.turns):
                worst = max(worst, float(rescore(model, episode).abs().max()))
    rewards = [chain.reward for chain in group]
    tokens, mask, _, _ = flatten(group[0].episodes[0])
    print(
        f"\nAbove, what the policy writes is bright: only that is trained on. A group of {len(group)} "
        f"from an\nuntrained model, rewards {rewards}, advantages {advantages(rewards).tolist()}:\n"
        f"{int(mask.sum())} of the first one's {len(tokens)} tokens were sampled, and their log-probs "
        f"from the cache equal the trainer's to {worst:.0e}."
    )
    draw_estimates(Path("out/rollout.png"))
    print("What the estimates of the KL penalty cost in variance: out/rollout.png")


def refuse(text):
    print(f"rollout.py: {text}", file=sys.stderr)
    raise SystemExit(2)


def main(argv):
    if "--bench" in argv:
        refuse("--bench has moved: python -m benchmarks.decode")
    parser = argparse.ArgumentParser(
        description="A demonstration and a group of rollouts.", allow_abbrev=False
    )
    parser.error = refuse
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
    if given.replay == "":
        refuse("--replay= names no file")
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
