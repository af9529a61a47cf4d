"""published/tokenizers.py: the tokenizer of a published model, read from its folder, and that of a
model trained here, written into one.

Two formats are read: tiktoken.model (Kimi) and tokenizer.json (transformers). Both are byte-level
BPE, so tiktoken can encode for each of them, if it merges in the same order: tiktoken merges by the
id of what two tokens make, the other by a list of pairs. A folder for which that, or anything else,
could give other ids than the original tokenizer gives is refused. One wrong id in a thousand would
show nowhere but in a model that is a little worse.

A transcript needs control tokens. `PublishedTokenizer` takes the model's own where it has one with
that meaning, and otherwise rows of its embedding that it never used. It writes and reads the
conversation in the form of the model's family (chat.py). A vocabulary without the marks of a known
family is refused: no agent could speak to that model in the form that it was trained in.

    make_tokenizer(**state)               that of a checkpoint
    read_tokenizer(folder, vocab)         that of a published model with `vocab` rows of embedding
    write_tokenizer(tokenizer, folder)    tokenizer.json, for transformers and its kin

Left out: vocabularies that are not byte-level BPE (SentencePiece, WordPiece), and normalizers other
than NFC.
"""

import base64
import json
import re
import unicodedata
from itertools import groupby
from pathlib import Path

import regex  # comes with tiktoken
import tiktoken

from published.chat import (
    CONTROL,
    find_calls,
    find_character,
    find_chat,
    find_in_json_string,
    read_json_object,
    take_arguments,
)
from rollout import CONTROLS, SPLIT, Call, Tokenizer, Turn
from world.tools import name_arguments, tool_schema

# ---------------------------------------------------------------- patterns and names

# A word as Kimi cuts it, without Chinese characters: capitals and then small letters. How many of
# each is filled in below: one of the two kinds may be missing.
_KIMI_WORD = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]{capitals}"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]{small}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
KIMI_SPLIT = "|".join(
    [
        r"[\p{Han}]+",
        _KIMI_WORD.format(capitals="*", small="+"),
        _KIMI_WORD.format(capitals="+", small="*"),
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# What published models call the control tokens of a transcript. Where a model has several of the
# names, the first one counts.
OTHER_NAMES = {
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
# Tokens that may end a turn of a published model, beside the one that our own turns are written
# with.
ENDS = "<|im_end|>", "<|endoftext|>", "[EOS]", "<｜end▁of▁sentence｜>"


def require(condition, message):
    """Raises a ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


def own_name(control, special):
    """The name that a tokenizer with these special tokens has for a control token of the
    transcript, or None"""
    for name in (control, *OTHER_NAMES.get(control, ())):
        if name in special:
            return name
    return None


# ---------------------------------------------------------------- the tokenizers


class PublishedTokenizer(Tokenizer):
    """tiktoken.Encoding with the special tokens of a published model. Text never encodes to one of
    them. Turns have the form of the model's family, see chat.py. So have calls where `chat.call` is
    not empty; else they have that of rollout.Tokenizer. ValueError where no family is known that
    has these special tokens.

    ranks: {bytes: id}. special: {name: id}. pattern: cuts a text into the pieces that are encoded.
    before: patterns that cut it before, each one the pieces that the last one left. nfc: does text
    become Unicode's composed form first? ends: further ids that end a turn."""

    def __init__(self, ranks, special, pattern=SPLIT, before=(), nfc=False, ends=()):
        self.ranks = ranks
        self.pattern = pattern
        self.before = tuple(before)
        self.special = special
        self.nfc = nfc
        self.chat = find_chat(special)
        require(self.chat, "its special tokens are those of no family: Qwen, Kimi or DeepSeek")
        self.encoding = tiktoken.Encoding(
            "nanocomposer", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )

        # The transcript's control tokens, whatever this model calls them.
        self.id = {name: special[own_name(name, special)] for name in CONTROLS}
        self.name = {i: name for name, i in self.id.items()}
        self.vocab = len(ranks) + len(special)

        # Whichever of these is sampled ends the turn, and stays in it as it was sampled.
        others = [special[name] for name in ENDS if name in special]
        self.ends = {self.id["<|end|>"], *others, *ends}

    def encode(self, text):
        pieces = [unicodedata.normalize("NFC", text) if self.nfc else text]

        # Each pattern cuts every piece that the one before it has left.
        for pattern in self.before:
            cut = []
            for piece in pieces:
                cut += [match[0] for match in regex.finditer(pattern, piece)]
            pieces = cut

        # tiktoken cuts by the last pattern itself, and merges bytes inside of its pieces alone.
        tokens = []
        for piece in pieces:
            tokens += self.encoding.encode_ordinary(piece)
        return tokens

    def state_dict(self):
        return {
            "ranks": self.ranks,
            "pattern": self.pattern,
            "before": self.before,
            "special": self.special,
            "nfc": self.nfc,
            "ends": sorted(self.ends),
        }

    def render_template(self, template, **words):
        """A string of a Chat -> tokens. words: what is filled into its fields. Control tokens come
        from the template alone, never from the words."""
        # Cut the template at its control tokens: every second part is one.
        known = [name for name in re.findall(CONTROL, template) if name in self.special]
        names = "|".join(re.escape(name) for name in known)
        parts = re.split(f"({names})", template) if known else [template]

        # Words are filled into the other parts only, and encoded as text.
        tokens = []
        for i, part in enumerate(parts):
            tokens += [self.special[part]] if i % 2 else self.encode(part.format(**words))
        return tokens

    def mark_controls(self, tokens):
        """Tokens -> text with a zero byte before each control token of calls and nowhere else. So a
        control token is not mistaken for text that spells its name."""
        marks = self.chat.marks()
        known = {i: name for name, i in self.special.items() if name in marks}
        text = ""
        for name, part in groupby(tokens, known.get):
            part = list(part)
            if name:
                text += len(part) * f"\0{name}"
            else:
                text += self.decode(part).replace("\0", "\ufffd")
        return text

    # ---- turns

    # As the methods of Tokenizer, in the family's form.

    def generation_prompt(self, after):
        is_output = after in ("tool", "recent output")
        return self.render_template(self.chat.after_tool if is_output else self.chat.assistant)

    def wrap_turn(self, role, tokens, text):
        before, behind = self.chat.user.split("{words}")
        return Turn(
            role, [*self.render_template(before), *tokens, *self.render_template(behind)], text
        )

    def write_turn(self, role, tokens, text, answers=("", 0, 1, "")):
        # An output of a tool. What stands before the first, between two and behind the last comes
        # from the listing.
        name, i, n, call_id = answers
        is_last = role == "tool" and i == n - 1
        template = self.chat.user
        if role == "tool":
            before, item, between, after = self.chat.tool
            template = item + (after if is_last else between)
            if i == 0:
                template = before + template

        # Words and template are rendered as one text, as the model has seen it.
        words = self.decode(tokens)
        call_id = call_id or f"functions.{name}:{i}"
        tokens = self.render_template(template, words=words, name=name, i=i, id=call_id)
        return Turn(role, tokens, words, open=is_last and not self.generation_prompt("tool"))

    def written_text(self, turn):
        return turn.text

    def declare_tools(self, tools):
        lines = []
        for tool in tools:
            lines.append(json.dumps({"type": "function", "function": tool_schema(tool)}))
        between = "," if "[{tools}]" in self.chat.opening else "\n"
        return self.render_template(self.chat.opening, tools=between.join(lines))

    # ---- calls

    def write_action(self, text, calls, number=0):
        if not calls or not self.chat.call:
            return super().write_action(text, calls, number)

        # Before the first call stands the text, and then what opens the calls.
        before, item, between, after = self.chat.call
        body = []
        for i, (name, args) in enumerate(calls):
            if i > 0:
                lead = between
            elif before:
                lead = "{text}" + before
            else:
                lead = "{text}\n" if text else "{text}"

            # The name goes in as it is or quoted, as the form has it; arguments are JSON.
            arguments = json.dumps(name_arguments(name, args), ensure_ascii=False)
            body += self.render_template(
                lead + item,
                text=text,
                name=name,
                quoted=json.dumps(name),
                i=number + i,
                arguments=arguments,
            )

        return body + self.render_template(after) + [self.id["<|end|>"]]

    def read_action(self, body, start=0):
        """As Tokenizer.read_action, where calls have the form of the model's family: their
        arguments are JSON, and may be anything"""
        if not self.chat.call:
            return super().read_action(body, start)

        # The token that ended the turn is no part of its text.
        body = body[:-1] if body and body[-1] in self.ends else body
        blocks = find_calls(self, body)
        if not blocks:
            return self.decode(body), []

        # A call that could not be read has its error as its output already.
        calls = []
        for block in blocks:
            error = "bad_arguments" if block.error else ""
            call = Call(block.name, [], block.error, error, block.start, block.id)
            if not block.error:
                take_arguments(call, block.given)
            calls.append(call)

        # The text is what stands before the first call.
        return self.decode(body[: blocks[0].start]).rstrip("\n"), calls

    def number_calls(self, calls, number):
        if self.chat.numbered:
            for call in calls:
                call.id = call.id or f"functions.{call.name}:{number}"
                number = max(number, int(call.id.rpartition(":")[2]) + 1)
        return number

    def find_call_name(self, turn, n):
        if not self.chat.call:
            return super().find_call_name(turn, n)
        body = turn.tokens[turn.head :]
        block = find_calls(self, body)[n]
        return block.start, find_character(self, body, block, block.name_end - 1) + 1

    def find_written_character(self, turn, n, place):
        if not self.chat.call:
            return super().find_written_character(turn, n, place)

        body = turn.tokens[turn.head :]
        block = find_calls(self, body)[n]
        # The arguments are JSON inside of a JSON string: then no place in the text is the
        # character's, and the whole body is the answer.
        if block.arguments_at < 0:
            return 0, len(body)

        # The written text is the argument `new`; the character is looked for in its JSON string.
        arguments = block.text[block.arguments_at :]
        _, new, _ = read_json_object(arguments)[0]["new"]
        character = block.arguments_at + find_in_json_string(arguments, new, place)
        token = find_character(self, body, block, character)
        return (token, token + 1) if token < len(body) else (0, len(body))


def make_tokenizer(ranks, pattern=SPLIT, special=None, **settings):
    """The tokenizer of the settings that a checkpoint holds. One that was trained here has no
    special tokens among them or, in an export, the transcript's own."""
    own = {name: len(ranks) + i for i, name in enumerate(CONTROLS)}
    if (special or own) == own:
        changed = [name for name in ("nfc", "before") if settings.get(name)]
        require(not changed, "the transcript's own tokens, and a text that is changed before")
        return Tokenizer(ranks, pattern)
    return PublishedTokenizer(ranks, special, pattern, **settings)


# ---------------------------------------------------------------- reading


def read_json(path, missing=None):
    """What a file of JSON holds. missing: the result where there is no file; None: that is an
    error."""
    if missing is not None and not path.is_file():
        return missing
    return json.loads(path.read_text(encoding="utf-8"))


# What can be raised by reading a file that does not hold what it should.
WRONG_FILE = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OSError,
    RecursionError,
    regex.error,
)


def read_tokenizer(folder, vocab):
    """The tokenizer in the folder of a published model whose embedding has `vocab` rows:
    tiktoken.model or tokenizer.json. Anything that could give other ids than the original is
    refused with a ValueError."""
    folder = Path(folder)
    try:
        # 1) The vocabulary, by its format.
        refuse_unknown_calls(folder)
        named = read_named_tokens(folder)
        if (folder / "tiktoken.model").is_file():
            found = read_tiktoken(folder, named)
        else:
            found = read_tokenizer_json(folder, named)

        # 2) Control tokens for the transcript, and the tokens that end a turn.
        special = complete_special(found["ranks"], found["special"], vocab)
        ends = read_ends(folder)
        are_rows = all(type(i) is int and 0 <= i < vocab for i in ends)
        require(are_rows, f"eos_token_id {ends!r:.60}: ids below {vocab}")
        return make_tokenizer(**{**found, "special": special, "ends": ends})
    except WRONG_FILE as error:
        raise ValueError(
            f"{folder}: the tokenizer cannot be read exactly: {type(error).__name__} {error!s:.200}"
        ) from None


def refuse_unknown_calls(folder):
    """Raises a ValueError where the chat template writes calls as Qwen3-Coder does. Its control
    tokens are those of Qwen3, so they do not tell the two apart, and no call could be read."""
    template = str(read_json(folder / "tokenizer_config.json", {}).get("chat_template", ""))
    path = folder / "chat_template.jinja"
    if path.is_file():
        template += path.read_text(encoding="utf-8")
    require("<function=" not in template, "its calls, <function=...>, are not known here")


def read_named_tokens(folder):
    """{name: id} of the special tokens that stand beside the vocabulary, in
    tokenizer_config.json and added_tokens.json"""
    config = read_json(folder / "tokenizer_config.json", {})
    added = read_json(folder / "added_tokens.json", {})
    named = {}
    for i, token in config.get("added_tokens_decoder", {}).items():
        named[token["content"]] = int(i)
    require(
        all(added[name] == named.get(name, added[name]) for name in added),
        "added_tokens.json and tokenizer_config.json disagree",
    )
    return named | added


def read_ends(folder):
    """The ids that a published folder says end a turn: eos_token_id of generation_config.json and
    config.json, one or several"""
    ends = []
    for name in ("generation_config.json", "config.json"):
        raw = read_json(folder / name, {})
        for settings in (raw, raw.get("text_config") or {}):
            found = settings.get("eos_token_id")
            if isinstance(found, list):
                ends += found
            elif found is not None:
                ends.append(found)
    return ends


def read_tiktoken(folder, named):
    """tiktoken.model: a line per token, in base64, with its rank"""
    raw = (folder / "tiktoken.model").read_bytes()
    lines = [line.split() for line in raw.split(b"\n") if line.strip()]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    require(sorted(ranks.values()) == list(range(len(lines))), "the ranks are not 0, 1, 2, ...")

    # Kimi sets 256 ids aside for special tokens, whether they have names or not.
    rows = range(len(ranks), len(ranks) + 256)
    names = {i: name for name, i in named.items()}
    special = {names.get(i, f"<|reserved_token_{i}|>"): i for i in rows}
    return dict(ranks=ranks, pattern=KIMI_SPLIT, special=special)


# Settings of a BPE model that change what a text encodes to, unless they are off.
UNUSUAL_BPE = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
)


def read_tokenizer_json(folder, named):
    """tokenizer.json: byte-level BPE behind regular expressions that cut one after the other"""
    raw = read_json(folder / "tokenizer.json")
    model = raw["model"]
    special = {t["content"]: t["id"] for t in raw.get("added_tokens") or []}

    # 1) It must be plain byte-level BPE.
    odd = [key for key in UNUSUAL_BPE if model.get(key)]
    require(
        model.get("type", "BPE") == "BPE" and not odd,
        f"not a plain byte-level BPE: {model.get('type')!r:.40} {odd}",
    )

    # 2) How a text is changed and cut before it is encoded.
    normalizer = raw.get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    kinds = [step["type"] for step in steps]
    cuts = read_cuts(raw.get("pre_tokenizer") or {})
    require(kinds in ([], ["NFC"]) and cuts, f"normalizer {kinds}, {len(cuts)} patterns")

    # 3) The vocabulary.
    ranks = read_ranks(model["vocab"], model["merges"], special)

    # 4) A word that was added without being special is text there, and has its own id in every text
    #    that holds it. Controls begin with a bracket, like <tool_call>, whether special or not.
    for token in raw.get("added_tokens") or []:
        control = token.get("special") or re.fullmatch(r"[<\[｜]\S*\w\S*", token["content"])
        require(control, f"the word {token['content']!r:.40} was added as a token of its own")

    # 5) Special tokens that stand in another file.
    require(
        all(special.get(name, i) == i for name, i in named.items()),
        "two files give a special token two ids",
    )
    own = set(ranks.values())
    special |= {name: i for name, i in named.items() if i not in own}
    return dict(
        ranks=ranks, pattern=cuts[-1], before=cuts[:-1], special=special, nfc=kinds == ["NFC"]
    )


def read_cuts(pre_tokenizer):
    """The regular expressions of a pre_tokenizer, in their order. Each matches all of a text: what
    it does not cut out itself is a piece too."""
    # The last step must be ByteLevel: it writes bytes as letters.
    steps = [pre_tokenizer]
    if pre_tokenizer.get("type") == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    are_last = [step["type"] == "ByteLevel" for step in steps]
    require(
        are_last == [False] * (len(steps) - 1) + [True],
        "bytes become letters last, or not at all",
    )

    # The others may cut by a regular expression that keeps what it matches, each match a piece.
    cuts = []
    for step in steps:
        if step["type"] == "ByteLevel":
            require(not step.get("add_prefix_space"), "a space is put before the text")
            require(not step.get("use_regex", True), "ByteLevel cuts by a pattern of its own")
        else:
            settings = step["type"], step["behavior"], step.get("invert", False)
            require(settings == ("Split", "Isolated", False), f"{step!r:.80}")
            cuts.append(step["pattern"]["Regex"])
    require(not any(regex.search(cut, "") for cut in cuts), "a pattern that matches nothing at all")

    # What a pattern does not match is a piece as well.
    return [f"{cut}|(?:(?!{cut})[\\s\\S])+" for cut in cuts]


def byte_letters():
    """{character: byte} as GPT-2 writes bytes in its vocabulary: printable ones as they are, the
    others as the characters from 256 on"""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    return letters | {chr(256 + i): b for i, b in enumerate(others)}


def find_merges(ranks):
    """{bytes: id} -> yields the pair of tokens that each longer token is merged from, in the order
    of the ids. It merges the token's bytes by all lower ranks, as tiktoken does; two parts are
    left."""
    for token, rank in sorted(ranks.items(), key=lambda pair: pair[1]):
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield tuple(parts)


def read_ranks(vocab, merges, added):
    """Vocabulary and list of merges -> {bytes: id}. added: names of special tokens, left out.

    tiktoken merges by the ids and knows no list. So the list must say the same: its merges make all
    longer tokens, in the order of their ids, each from the two parts that merging by id leads
    to."""
    byte = byte_letters()

    def to_bytes(text):
        return bytes(byte[c] for c in text)

    # Letters stand for bytes. A merge is a pair, or two words in one string.
    ranks = {to_bytes(token): i for token, i in vocab.items() if token not in added}
    pairs = []
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        pairs.append(tuple(to_bytes(part) for part in parts))

    # The ids that the merges make, one after the other, and the ids that some merge must make.
    made = [ranks[b"".join(pair)] for pair in pairs]
    longer = {i for token, i in ranks.items() if len(token) > 1}
    require(all(bytes([b]) in ranks for b in range(256)), "not every byte has a token")
    require(made == sorted(made) and set(made) == longer, "merges and ids do not agree")
    require(
        set(find_merges(ranks)) <= set(pairs),
        "a token is merged from other parts than its bytes lead to",
    )
    return ranks


def complete_special(ranks, special, vocab):
    """{name: id} of special tokens, with one for every control token of the transcript and a name
    for every row of the embedding"""
    # No two tokens may have one id, and each id is a row.
    used = [*ranks.values(), *special.values()]
    are_rows = all(type(i) is int and 0 <= i < vocab for i in used)
    require(are_rows and len(set(used)) == len(used), f"ids are not distinct rows of {vocab}")

    # Rows without a token get a name. If 65,536 or more have none, this is no vocabulary for the
    # embedding, and they are left alone.
    gaps = []
    if vocab - len(used) < 1 << 16:
        gaps = sorted(set(range(vocab)) - set(used))
    special = {f"<|unused_{i}|>": i for i in gaps} | special

    # A control that the model has no token for takes a row that was never used.
    spare = [name for name in special if re.match(r"<\W?(unused_|reserved_|place.?holder)", name)]
    for name in CONTROLS:
        if own_name(name, special) is None:
            require(spare, f"no unused row left for {name}")
            special[name] = special.pop(spare.pop(0))
    return special


# ---------------------------------------------------------------- writing


def write_tokenizer(tokenizer, folder):
    """Writes a tokenizer that was trained here as tokenizer.json and tokenizer_config.json, for
    transformers and the like. Beware: there, text that holds the name of a control token encodes to
    that token, so keep such names out of what users and tools write."""
    letter = {b: c for c, b in byte_letters().items()}

    def to_letters(token):
        return "".join(letter[b] for b in token)

    # The parts of the file: control tokens, how a text is cut, the vocabulary with its merges.
    # Tokens marked special are what decoding drops by default. A server has to see the calls.
    shown = ("<|call|>", "<|arg|>")
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    special = sorted(tokenizer.special.items(), key=lambda pair: pair[1])
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    split = dict(
        type="Split", pattern={"Regex": tokenizer.pattern}, behavior="Isolated", invert=False
    )
    model = dict(
        type="BPE",
        dropout=None,
        unk_token=None,
        continuing_subword_prefix=None,
        end_of_word_suffix=None,
        fuse_unk=False,
        byte_fallback=False,
        vocab={to_letters(token): i for token, i in tokenizer.ranks.items()},
        merges=[[to_letters(a), to_letters(b)] for a, b in find_merges(tokenizer.ranks)],
    )

    added = []
    for name, i in special:
        added.append(dict(id=i, content=name, special=name not in shown, **flags))

    # Text is neither normalized nor surrounded by further tokens, as here.
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
    text = json.dumps(whole, ensure_ascii=False)
    Path(folder, "tokenizer.json").write_text(text, encoding="utf-8")

    # No clean-up: it would take away blanks before . and , which code may need.
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )
    Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
