"""published/chat.py: how the families of published models write a conversation.

A published model was trained on the turns and calls of its own chat template, so an agent speaks to
it in that form: Qwen's <tool_call> with JSON inside, the numbered calls of Kimi K2, DeepSeek's
blocks with ```json. `Chat` describes a form as strings in which control tokens go by name; QWEN,
KIMI and DEEPSEEK are those of the templates that Qwen2.5, Kimi-K2 and DeepSeek-V3 were published
with. The transcript of models trained here is in rollout.Tokenizer.

Writing is a matter of filling strings in (tokenizers.ChatTokenizer does it). Reading is not: what a
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

from world.tools import ARGUMENTS, tool_schema

# ---------------------------------------------------------------- the forms

CONTROL = r"<\|\w+?\|>|<｜[^｜]+｜>|</?tool_call>|</?tool_response>"


class Listing(NamedTuple):
    """The calls of one turn, or their outputs: what stands before the first, one of them, between
    two, behind the last"""

    before: str
    item: str
    between: str
    after: str


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
    # an output is {words} of call {i} to {name}
    tool: Listing
    # (): calls have our own form
    call: Listing = ()
    # what stands inside a call, see mark_controls: its name and its arguments; "": a JSON object of
    # the two
    reads: str = ""

    @property
    def numbered(self):
        """Does a call carry a number, which its answer repeats?"""
        return bool(self.call) and "{i}" in self.call.item

    def marks(self):
        """The control tokens of a call by what they do: {name: "begin", "end", "inside" or
        "section"}"""
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
        """This, if a tokenizer has its control tokens, without calls (and how to make them) if only
        those of turns; else None"""
        known = {"<tool_response>", "</tool_response>", *special}

        def has(*texts):
            return set(re.findall(CONTROL, "".join(texts))) <= known

        if has(*self.call, self.opening):
            return self
        if has(self.user, self.assistant):
            return replace(self, opening="", call=())
        return None


QWEN = Chat(
    opening="<|im_start|>system\n# Tools\n\n<tools>\n{tools}\n</tools>\n\nA call:\n<tool_call>\n"
    '{{"name": <name>, "arguments": <object>}}\n</tool_call><|im_end|>',
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


def declare_tools(chat, tools):
    """-> (template, its words) that tell the model which tools there are"""
    lines = []
    for tool in tools:
        lines.append(json.dumps({"type": "function", "function": tool_schema(tool)}))
    between = "," if "[{tools}]" in chat.opening else "\n"
    return chat.opening, {"tools": between.join(lines)}


# ---------------------------------------------------------------- reading what was sampled

UNREADABLE = "This call cannot be read."
ONLY_THOUGHT = "Calls inside a thought that is not closed are not run."
NOT_STRINGS = "The arguments must be a JSON object of strings."


@dataclass
class CallBlock:
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


def read_json_object(text):
    """A JSON object that fills the text -> {key: (value, where it begins, where it ends)}. Of equal
    keys the last one counts, as in every reader of JSON. ValueError where it is none."""
    decoder = json.JSONDecoder()
    space = re.compile(r"[ \t\r\n]*")

    def skip_space(at):
        return space.match(text, at).end()

    members, at = {}, skip_space(0)
    if text[at : at + 1] != "{":
        raise ValueError("no object")
    at = skip_space(at + 1)
    # a comma promises one more member
    while text[at : at + 1] != "}" or members and text[:at].rstrip().endswith(","):
        key, at = decoder.raw_decode(text, at)
        at = skip_space(at)
        if not isinstance(key, str) or text[at : at + 1] != ":":
            raise ValueError("no key")
        begins = skip_space(at + 1)
        value, ends = decoder.raw_decode(text, begins)
        members[key] = value, begins, ends
        at = skip_space(ends)
        if text[at : at + 1] == ",":
            at = skip_space(at + 1)
        elif text[at : at + 1] != "}":
            raise ValueError("no end")
    if skip_space(at + 1) != len(text):
        raise ValueError("more behind it")
    return members


def read_json_members(text):
    """The members of the JSON object that a text begins with, whatever stands behind it"""
    _, end = json.JSONDecoder().raw_decode(text)
    return read_json_object(text[:end])


CHARACTER = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.|.", re.S)


def find_in_json_string(text, start, count):
    """Where in a JSON string, which begins at `start` with its quote, the character number `count`
    of its value is written"""
    at = start + 1
    for _ in range(count):
        at = CHARACTER.match(text, at).end()
    return at


def read_json_block(block):
    """Of a call that is a JSON object -> (name, arguments), and where they stand into the block"""
    try:
        members = read_json_object(block.text)
    except ValueError:
        # of a call that is no JSON the name may still be plain
        name = re.match(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,', block.text)[1]
        block.name_end = block.text.index(name) + len(name) + 1
        return name, None
    name, _, block.name_end = members["name"]
    given, block.arguments_at, _ = members["arguments"]
    # an object, written as JSON once more
    if isinstance(given, str):
        given, block.arguments_at = json.loads(given), -1
    return name, given


def read_named_block(chat, block):
    """The same of a call whose name and arguments stand apart"""
    found = re.fullmatch(chat.reads, block.text)
    arguments = found["arguments"]
    space = len(arguments) - len(arguments.lstrip())
    block.name_end = found.end("name")
    block.arguments_at = found.start("arguments") + space
    groups = found.groupdict()
    block.id = groups["id"] if groups.get("i") else ""
    try:
        return found["name"], json.loads(arguments)
    except (ValueError, RecursionError):
        # the name is known all the same
        return found["name"], None


def read_block(chat, block):
    """Fill in name, arguments and id of a call from its text. What its family's parsers would not
    read is an error."""
    try:
        name, given = read_named_block(chat, block) if chat.reads else read_json_block(block)
        if not isinstance(name, str) or not name.strip():
            raise ValueError("no name")
        block.name, block.given = name.strip(), given
    except (ValueError, KeyError, TypeError, RecursionError):
        block.name, block.error = "", UNREADABLE


def find_thought(tokenizer, body):
    """Where the models write <think> as plain text: how many tokens of the body are the thought
    that it begins with"""
    if "</think>" in tokenizer.special or not tokenizer.decode(body).lstrip().startswith("<think>"):
        return 0
    closing = tokenizer.mark_controls(body).find("</think>")
    if closing < 0:
        # The thought is not closed: all of the body is thought.
        return len(body)

    def text_length(i):
        return len(tokenizer.mark_controls(body[: i + 1]))

    # The token that holds the last character of </think> is the last of the thought.
    last_character = closing + len("</think>") - 1
    return bisect(range(len(body)), last_character, key=text_length) + 1


def find_calls(tokenizer, body):
    """The calls in a body in a published form -> [Block]. A thought (<think> ... </think>; without
    its first token, where the template has given that) holds none, whatever it drafts. A call may
    stand without its section's token. What belongs to a call and is no whole call is a Block with
    an error: never nothing, or the turn would be taken for a final word."""
    names = {i: name for name, i in tokenizer.special.items()}
    marks = tokenizer.chat.marks()
    skipped = find_thought(tokenizer, body)
    blocks = []
    first = None  # where the calls begin
    block = None  # the call that is open
    drafts = False  # did the thought hold calls?
    thinking = skipped == len(body) > 0
    may_close = skipped == 0  # a </think> may say that all before it was thought

    for i, token in enumerate(body):
        name = names.get(token)
        mark = marks.get(name)
        # 1) Inside of a thought nothing counts but its end.
        if i < skipped or thinking:
            drafts = drafts or mark is not None
            if name == "</think>" and thinking:
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
            if block is None:  # its beginning is missing
                blocks.append(CallBlock(i, i + 1, error=UNREADABLE))
            continue
        if mark == "begin":
            block = CallBlock(i, i + 1)

    # 4) What the end of the turn cuts off is an error, if not all of it is a call.
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
    """Fill in a call that ends before the token number `stop`; whole: by its own control token"""
    chat = tokenizer.chat
    block.text = tokenizer.mark_controls(body[block.inside : stop], chat.marks())
    # Qwen's parsers read a call to the end of the turn, too.
    if whole or not chat.reads:
        read_block(chat, block)
    else:
        block.error = UNREADABLE
    return block


def replace_surrogates(text):
    """JSON can spell halves of characters, files cannot hold them."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def take_arguments(call, given):
    """Put arguments that came by their names in the order of the tool's own. Another name, or one
    too few, is an error that says so."""
    call.name = replace_surrogates(call.name)
    call.given = given if isinstance(given, dict) else {}
    wanted = ARGUMENTS.get(call.name)

    # There is no such tool, so whatever it was given is taken.
    if wanted is None:
        for value in call.given.values():
            text = replace_surrogates(value) if isinstance(value, str) else json.dumps(value)
            call.args.append(text)
        return

    problems = []
    for name in wanted:
        if name not in call.given:
            problems.append(f"`{name}` is missing")
    for name in call.given:
        if name not in wanted:
            problems.append(f"there is no `{replace_surrogates(name)[:40]}`")
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
    """The token of a body that a character of a call's text falls into"""
    marks = tokenizer.chat.marks()

    def text_length(i):
        return len(tokenizer.mark_controls(body[block.inside : i + 1], marks))

    places = range(block.inside, len(body))
    return block.inside + bisect(places, character, key=text_length)
