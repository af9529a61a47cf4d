"""published/chat.py: how the families of published models write a conversation.

A published model was trained on the turns and calls of its own chat template, so an agent speaks to
it in that form: Qwen's <tool_call> with JSON inside, the numbered calls of Kimi K2, DeepSeek's
blocks with ```json. `Chat` describes a form as strings in which control tokens go by name; QWEN,
KIMI and DEEPSEEK are those of the templates that Qwen2.5, Kimi-K2 and DeepSeek-V3 were published
with. The transcript of models trained here is in rollout.Tokenizer.

Writing is a matter of filling strings in (PublishedTokenizer does it). Reading is not: what a
model sampled may be half a call, a call inside of a thought, or JSON that is none. `find_calls`
finds every call in the body of a turn with the place where each part of it stands, and takes what
the family's own parsers would take. Whatever belongs to a call and is no whole call becomes an
error that the model is told; were it dropped in silence, the turn would be taken for a final word.

Text cannot forge a control token: where a body is read as text, `mark_controls` sets a zero byte
before those that were sampled, and text itself cannot hold one.

Left out: images, several messages in one turn of the user, and the system prompts of the templates
beyond the declaration of the tools.
"""

import json
import re
from bisect import bisect
from dataclasses import dataclass, replace
from typing import NamedTuple

from world.tools import ARGUMENTS

# ---------------------------------------------------------------- the forms

CONTROL = r"<\|\w+?\|>|<｜[^｜]+｜>|</?tool_call>|</?tool_response>"


class Listing(NamedTuple):
    """How the calls of one turn, or their outputs, are written: what stands before the first one,
    how one of them is written, what stands between two, what stands behind the last"""

    before: str
    item: str
    between: str
    after: str


@dataclass(frozen=True)
class Chat:
    """How a family of published models writes a conversation, as in its chat template. The strings
    contain control tokens by their names, and fields in braces. Queries, summaries and hints come
    from neither the policy nor a tool: the harness writes them as the user."""

    # before the first user's turn; {tools}: the tools' signatures, a line of JSON each
    opening: str
    user: str  # with {words} in it
    assistant: str  # before what is sampled
    after_tool: str  # the same, behind a tool's output
    # outputs: {words} is the output of call {i} to {name}, whose id is {id}
    tool: Listing
    # calls; (): they have the form of rollout.Tokenizer
    call: Listing = ()
    # The opening for a tokenizer that has no tokens of calls: it declares nothing. (Qwen's is what
    # Qwen2's template writes where nobody speaks as the system.)
    bare_opening: str = ""
    # A regular expression for the text inside a call, as mark_controls writes it, that finds name
    # and arguments. "": the text is a JSON object with both.
    reads: str = ""

    @property
    def numbered(self):
        """Does a call carry a number, which its answer repeats?"""
        return bool(self.call) and "{i}" in self.call.item

    def marks(self):
        """{name of a control token of calls: what it does}: "begin" or "end" (of a call), "inside"
        (a call), or "section" (around all calls)"""
        # The first and the last control token of one call are its ends. A later entry replaces an
        # earlier one: a token that stands in both places is the call's.
        begin, *inside, end = re.findall(CONTROL, self.call.item)
        section = re.findall(CONTROL, self.call.before + self.call.between + self.call.after)
        return {
            **dict.fromkeys(section, "section"),
            **dict.fromkeys(inside, "inside"),
            begin: "begin",
            end: "end",
        }

    def fit(self, special):
        """special: the special tokens of a tokenizer -> this form, if all of its control tokens are
        among them. The form without calls and their declaration, if only those of turns are. Else
        None."""
        # <tool_response> need not be a token.
        known = {"<tool_response>", "</tool_response>", *special}

        def has(*texts):
            return set(re.findall(CONTROL, "".join(texts))) <= known

        if has(*self.call, self.opening, self.user, self.assistant, *self.tool):
            return self
        if has(self.bare_opening, self.user, self.assistant):
            return replace(self, opening=self.bare_opening, call=())
        return None


QWEN = Chat(
    opening="<|im_start|>system\n# Tools\n\n<tools>\n{tools}\n</tools>\n\nA call:\n<tool_call>\n"
    '{{"name": <name>, "arguments": <object>}}\n</tool_call><|im_end|>',
    bare_opening="<|im_start|>system\nYou are a helpful assistant.<|im_end|>",
    user="\n<|im_start|>user\n{words}<|im_end|>",
    assistant="\n<|im_start|>assistant\n",
    after_tool="\n<|im_start|>assistant\n",
    tool=Listing(
        "\n<|im_start|>user\n",
        "<tool_response>\n{words}\n</tool_response>",
        "\n",
        "<|im_end|>",
    ),
    call=Listing(
        "",
        '<tool_call>\n{{"name": {quoted}, "arguments": {arguments}}}\n</tool_call>',
        "\n",
        "",
    ),
)
KIMI = Chat(
    opening="<|im_system|>tool_declare<|im_middle|>[{tools}]<|im_end|>"
    "<|im_system|>system<|im_middle|>You act by calling tools.<|im_end|>",
    user="<|im_user|>user<|im_middle|>{words}<|im_end|>",
    assistant="<|im_assistant|>assistant<|im_middle|>",
    after_tool="<|im_assistant|>assistant<|im_middle|>",
    tool=Listing(
        "",
        "<|im_system|>tool<|im_middle|>## Return of {id}\n{words}<|im_end|>",
        "",
        "",
    ),
    call=Listing(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.{name}:{i}"
        "<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    reads=r"\s*(?P<id>(?:[^\0:]*\.)?(?P<name>[^\0:.]*?)(?::(?P<i>[0-9]{1,9}))?)\s*"
    r"\0<\|tool_call_argument_begin\|>(?P<arguments>[^\0]*)",
)
DEEPSEEK = Chat(
    opening="<｜begin▁of▁sentence｜>Tools:\n{tools}",
    bare_opening="<｜begin▁of▁sentence｜>",
    user="<｜User｜>{words}",
    assistant="<｜Assistant｜>",
    after_tool="",
    tool=Listing(
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁output▁begin｜>{words}<｜tool▁output▁end｜>",
        "\n",
        "<｜tool▁outputs▁end｜>",
    ),
    call=Listing(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    reads=r"\s*(?:function\s*\0<｜tool▁sep｜>)?\s*(?!function\s*\0)(?P<name>[^\s\0]*)"
    r"(?:\s*```(?:json)?\s|\s*\0<｜tool▁sep｜>)(?P<arguments>[^\0]*?)(?:\s*```)?\s*",
)
FAMILIES = QWEN, KIMI, DEEPSEEK


def find_chat(special):
    """The form of the family whose control tokens these are, or None"""
    for chat in FAMILIES:
        found = chat.fit(special)
        if found:
            return found
    return None


# ---------------------------------------------------------------- reading what was sampled

UNREADABLE = "This call cannot be read."
ONLY_THOUGHT = "Calls inside a thought that is not closed are not run."
NOT_STRINGS = "The arguments must be a JSON object of strings."


@dataclass
class CallBlock:
    """One call in the body of a turn in a published form: where it begins, its text, and where the
    parts of the text stand"""

    # the call's first token; of the first call, the first token of what stands before all calls
    start: int
    inside: int  # the first token of its text
    text: str = ""
    name: str = ""
    id: str = ""
    given: object = None  # the arguments as JSON gives them
    name_end: int = 0  # the place in the text behind the name
    # the place in the text where the arguments' JSON object begins, -1: there is none
    arguments_at: int = -1
    error: str = ""


def read_json_object(text):
    """A text that begins with a JSON object -> {key: (value, where the value begins, where it
    ends)}, and the place where what follows the object begins. Of equal keys the last one counts,
    as in every reader of JSON. A ValueError where the text begins with none. (json.loads does not
    say where things stand.)"""
    decoder = json.JSONDecoder()
    space = re.compile(r"[ \t\r\n]*")

    def skip_space(at):
        return space.match(text, at).end()

    # The opening brace.
    members, at = {}, skip_space(0)
    if text[at : at + 1] != "{":
        raise ValueError("no object")
    at = skip_space(at + 1)

    # Members up to the closing brace. After a comma a brace is wrong: the loop goes on, and reading
    # a key there fails.
    while text[at : at + 1] != "}" or members and text[:at].rstrip().endswith(","):
        key, at = decoder.raw_decode(text, at)
        at = skip_space(at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise ValueError("no key")
        begins = skip_space(at + 1)
        value, ends = decoder.raw_decode(text, begins)
        members[key] = value, begins, ends

        # Behind a value stands a comma or the end.
        at = skip_space(ends)
        if text[at : at + 1] == ",":
            at = skip_space(at + 1)
        elif text[at : at + 1] != "}":
            raise ValueError("no end")

    return members, skip_space(at + 1)


# one character of a value as a JSON string writes it: a surrogate pair, an escape, or itself
CHARACTER = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.|.", re.S)


def find_in_json_string(text, start, count):
    """The place in `text` where character number `count` of a JSON string's value is written.
    start: where the string's opening quote stands."""
    at = start + 1
    for _ in range(count):
        at = CHARACTER.match(text, at).end()
    return at


def read_json_block(block):
    """A call whose text is a JSON object -> (name, arguments). Where the two stand is noted in the
    block."""
    # If the text is no JSON, the name may still be readable; the arguments are None then.
    try:
        members, end = read_json_object(block.text)
        if end < len(block.text):
            raise ValueError("more behind it")
    except ValueError:
        found = re.match(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,', block.text)
        if not found:
            raise
        block.name_end = found.end(1) + 1
        return found[1], None

    name, _, block.name_end = members["name"]
    # A call without "arguments" has its name all the same, and an error that says what is missing.
    given, block.arguments_at, _ = members.get("arguments", (None, -1, -1))
    # Arguments may also be a JSON string that contains JSON: then no object stands in the text.
    if isinstance(given, str):
        given, block.arguments_at = json.loads(given), -1
    return name, given


def read_named_block(chat, block):
    """As read_json_block, of a call whose name and arguments stand apart: chat.reads finds them"""
    found = re.fullmatch(chat.reads, block.text)
    arguments = found["arguments"]
    space = len(arguments) - len(arguments.lstrip())
    block.name_end = found.end("name")
    block.arguments_at = found.start("arguments") + space

    # An id counts only with a call number in it.
    groups = found.groupdict()
    block.id = groups["id"] if groups.get("i") else ""

    # Arguments that are no JSON are None, and the name is known all the same.
    try:
        return found["name"], json.loads(arguments)
    except (ValueError, RecursionError):
        return found["name"], None


def read_block(chat, block):
    """Fills in name, arguments and id of a call from its text. A call that the family's own parsers
    would not read gets an error."""
    try:
        name, given = read_named_block(chat, block) if chat.reads else read_json_block(block)
        if not isinstance(name, str) or not name.strip():
            raise ValueError("no name")
        block.name, block.given = name.strip(), given
    except (ValueError, KeyError, TypeError, RecursionError):
        block.name, block.error = "", UNREADABLE


def find_calls(tokenizer, body):
    """The calls in a body in a published form -> [CallBlock].

    A thought (<think> ... </think>) holds no calls, whatever it drafts. Its first token is missing
    where the template wrote it. Calls may stand without the token of their section. Whatever
    belongs to a call and is no whole call becomes a CallBlock with an error: if it were dropped,
    the turn would be taken for a final word."""
    names = {i: name for name, i in tokenizer.special.items()}
    marks = tokenizer.chat.marks()
    blocks = []
    first = None  # where the calls begin
    block = None  # the call that is open
    drafts = False  # did the thought hold calls?
    thinking = False
    may_close = True  # a </think> may say that all before it was thought

    for i, token in enumerate(body):
        name = names.get(token)
        mark = marks.get(name)

        # 1) Inside of a thought nothing counts but its end.
        if thinking:
            drafts = drafts or mark is not None
            if name == "</think>":
                thinking, may_close, drafts = False, False, False
            continue

        # 2) A thought begins, or the end of one shows that all before it was thought.
        if block is None and name == "<think>":
            thinking = True
        elif block is None and name == "</think>" and may_close:
            blocks, first, may_close = [], None, False
        if mark is None:
            continue

        # 3) A control token of calls closes the open call, or stands outside of one.
        first = i if first is None else first
        if block is not None and mark != "inside":
            blocks.append(close_block(tokenizer, body, block, i, mark == "end"))
            block = None
        elif mark in ("inside", "end"):
            if block is None:  # the call's beginning is missing
                blocks.append(CallBlock(i, i + 1, error=UNREADABLE))
            continue
        if mark == "begin":
            block = CallBlock(i, i + 1)

    # 4) The end of the turn. It may cut a call off, which close_block judges. It is an error if a
    # thought with drafts of calls was not closed, or if tokens of calls stand there without a call.
    if block is not None:
        blocks.append(close_block(tokenizer, body, block, len(body), False))
    if thinking and drafts and not blocks:
        blocks.append(CallBlock(0, 0, error=ONLY_THOUGHT))
    elif first is not None and not blocks:
        blocks.append(CallBlock(first, first + 1, error=UNREADABLE))
    if blocks and first is not None:
        blocks[0].start = first  # with what stands before all calls
    return blocks


def close_block(tokenizer, body, block, stop, whole):
    """Fills in a call that ends before token number `stop`. whole: did its own control token end
    it?"""
    chat = tokenizer.chat
    block.text = tokenizer.mark_controls(body[block.inside : stop])
    # Qwen's parsers (no chat.reads) also take a call that the end of the turn cut off.
    if whole or not chat.reads:
        read_block(chat, block)
    else:
        block.error = UNREADABLE
    return block


def replace_surrogates(text):
    """A text without lone surrogates: JSON can spell these halves of characters, and files cannot
    hold them."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def take_arguments(call, given):
    """Puts the arguments of a call, {name: value}, into the order of the tool's parameters. A name
    that is missing or unknown becomes an error that says so."""
    # The call keeps what was given, whatever comes of it.
    call.name = replace_surrogates(call.name)
    call.given = given if isinstance(given, dict) else {}
    wanted = ARGUMENTS.get(call.name)

    # There is no such tool, so whatever it was given is taken.
    if wanted is None:
        for value in call.given.values():
            text = replace_surrogates(value) if isinstance(value, str) else json.dumps(value)
            call.args.append(text)
        return

    # Arguments are strings, and just those that the tool has.
    problems = []
    for name in wanted:
        if name not in call.given:
            problems.append(f"`{name}` is missing")
    for name in call.given:
        if name not in wanted:
            problems.append(f"there is no `{replace_surrogates(name)[:40]}`")

    # Of two errors the one about the form comes first.
    are_strings = all(isinstance(value, str) for value in call.given.values())
    if not isinstance(given, dict) or not are_strings:
        call.output, call.error = NOT_STRINGS, "bad_arguments"
    elif problems:
        signature = f"{call.name}({', '.join(wanted)})"
        call.output = f"{signature}: {', '.join(problems)}."
        call.error = "bad_arguments"
    else:
        call.args = [replace_surrogates(given[name]) for name in wanted]


def find_character(tokenizer, body, block, character):
    """-> the number of the token in `body` that holds a character of a call's text"""

    def text_length(i):
        return len(tokenizer.mark_controls(body[block.inside : i + 1]))

    places = range(block.inside, len(body))
    return block.inside + bisect(places, character, key=text_length)
