"""demos/transcript_view.py: a conversation of transcripts.jsonl in a terminal.

    format_transcript(line)        -> text in colour: sampled bright, the rest dim
    print_transcript(path, line)   the conversation that stands in a line of a file
    replay_or_demonstrate(...)     the command line of rollout.py
    ask_or_demonstrate(...)        the command line of feedback_distill.py

    python rollout.py --replay=out/run/transcripts.jsonl

It stands apart from command/transcripts.py, which writes such files, because training shows
nothing. A file may come from anywhere, so control characters are spelled out before they reach the
terminal. Left out: a pager.
"""

import json
from functools import partial
from pathlib import Path

from command.flags import make_parser, usage_error
from command.output_files import print_for_reader
from command.transcripts import escape_control_chars, read_rollouts
from demos.demonstration import draw_or_refuse


def message_notes(message):
    """What stands behind a message: how many tokens were sampled, by which policy, and flags"""
    notes = []
    if message.get("sampled"):
        notes.append(f"{message['sampled']} sampled")
    versions = message.get("versions", [])
    if len(versions) == 1:
        notes.append(f"policy {versions[0]}")
    elif versions:
        notes.append(f"policy {versions[0]}-{versions[-1]}")
    return notes + message.get("flags", [])


def message_text(message):
    """What a message says: its content, and a line for each of its calls"""
    # The content may be None beside calls.
    words = [message["content"] or ""]
    for call in message.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        pairs = " ".join(f"{name}={value}" for name, value in arguments.items())
        words.append(f"> {call['function']['name']} {pairs}")
    return "\n".join(word for word in words if word)


def as_read(value):
    """A value of a transcript's first line as a person reads it"""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def format_transcript(line):
    """A conversation (see transcripts.describe_rollout) in colour: what was sampled bright, the
    rest dim; behind it how many tokens, by which policy, and flags. -> the text of it"""
    # First a line about the segment, then its messages, each with the speaker on the left. For a
    # terminal 1 is bright, 2 dim and 33 yellow. No text gets there with control characters in it.
    about = [f"{name} {as_read(value)}" for name, value in line.items() if name != "messages"]
    rows = [escape_control_chars("  ".join(about))]
    for message in line["messages"]:
        text = escape_control_chars(message_text(message)).replace("\n", "\n" + " " * 11)
        speaker = escape_control_chars(f"{message.get('name', message['role']):>9}")
        brightness = 1 if message.get("sampled") else 2
        row = f"{speaker}  \033[{brightness}m{text}\033[0m"
        notes = message_notes(message)
        if notes:
            row += f"  \033[33m[{escape_control_chars(', '.join(notes))}]\033[0m"
        rows.append(row)
    return "\n".join(rows)


def print_transcript(path, number=None):
    """Prints a conversation of a file: line `number`, from 1, or the last one. ValueError says in
    one line why it cannot."""
    # utf-8-sig also reads a file that begins with a byte order mark.
    try:
        rows = Path(path).read_text(encoding="utf-8-sig").strip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ValueError(f"{path} cannot be read: {reason}") from None
    number = len(rows) if number is None else number
    if not 1 <= number <= len(rows):
        raise ValueError(f"--line={number}: {path} has lines 1 to {len(rows)}")

    # A file may come from anywhere: what is no conversation fails somewhere on the way to its text.
    try:
        text = format_transcript(json.loads(rows[number - 1]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"{path}: line {number} is no conversation (messages of role, content, tool_calls)"
        ) from None
    print_for_reader(text)


def replay_or_demonstrate(argv, demo, settings):
    """With --replay prints a conversation, without it runs the demonstration. demo: a function of
    one of the settings of effort"""
    parser = make_parser("rollout.py", "A trained agent at work, and the group that it belongs to.")
    about = "how much effort the task asks for"
    parser.add_argument("--effort", choices=settings, help=about)
    about = "print a conversation of a transcripts.jsonl, the last if no --line is given"
    parser.add_argument("--replay", metavar="FILE", help=about)
    about = "with --replay: which line of the file, from 1"
    parser.add_argument("--line", type=int, metavar="N", help=about)
    given = parser.parse_args(argv)
    if given.replay is None and given.line is not None:
        parser.error("--line goes with --replay=FILE")
    if given.replay is None:
        return draw_or_refuse("rollout.py", partial(demo, given.effort or settings[0]))
    if given.effort is not None:
        parser.error("--effort is of the demonstration: a transcript asks for what it asks for")
    try:
        print_transcript(given.replay, given.line)
    except ValueError as error:
        parser.error(error)


# ---------------------------------------------------------------- what rules say of a file


def ask_or_demonstrate(argv, demo, rules, detect):
    """With --ask prints what rules say of the turns of a file, without it runs the demonstration.
    rules: their names; detect: (rollout, names) -> hints"""
    parser = make_parser("feedback_distill.py", "Hints cure a small policy; or what rules say.")
    about = "a transcripts.jsonl: which of its turns would the rules flag?"
    parser.add_argument("--ask", metavar="FILE", help=about)
    about = f"with --ask: which rules, with commas, of {', '.join(rules)} (default: all)"
    parser.add_argument("--rules", help=about)
    given = parser.parse_args(argv)
    if given.ask is None:
        if given.rules:
            parser.error("--rules is for --ask=FILE")
        return draw_or_refuse("feedback_distill.py", demo)

    # A rule that is not there, or a file that is none, is one line.
    names = given.rules.split(",") if given.rules else list(rules)
    unknown = [name for name in names if name not in rules]
    if unknown:
        parser.error(f"--rules={unknown[0]}: no such rule; there are {', '.join(rules)}")
    try:
        rollouts = read_rollouts(given.ask)
    except ValueError as error:
        usage_error(str(error), "feedback_distill.py")

    # Each flagged turn, with the line of the file that holds it
    rows, counts = [], dict.fromkeys(names, 0)
    for line, rollout in rollouts:
        for hint in detect(rollout, names):
            counts[hint.kind] += 1
            turn = rollout.segments[hint.segment].turns[hint.turn]
            called = [f"{call.name}({', '.join(map(repr, call.args))})" for call in turn.calls]
            rows.append(f"line {line + hint.segment}  {hint.kind}  {hint.text}")
            rows.append(f"    {ascii(turn.text)[:80]} {ascii(' '.join(called))[1:-1][:160]}")
    told = ", ".join(f"{name} {number}" for name, number in counts.items())
    rows.append(f"{len(rollouts)} rollouts; turns that are flagged: {told}")
    print_for_reader("\n".join(rows))
