"""demos/transcript_view.py: a conversation of transcripts.jsonl in a terminal.

    format_transcript(line)     -> text in colour: sampled bright, the rest dim
    print_transcript(path)      the conversation that stands in a line of a file

    python rollout.py --replay=out/run/transcripts.jsonl

It stands apart from command/transcripts.py, which writes such files, because training shows
nothing. A file may come from anywhere, so control characters are spelled out before they reach the
terminal. Left out: a pager.
"""

import re
import sys

from command.transcripts import message_text, read_transcripts


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


def escape_control_chars(text):
    """The text with its control characters spelled out: a transcript must not move the cursor."""

    def spell_out(found):
        return ascii(found[0])[1:-1]

    # Kept as they are: newline, tab, printable ASCII, and all above U+009F but surrogates ...
    text = re.sub(r"[^\n\t -~\xa0-\ud7ff\ue000-\U0010ffff]", spell_out, text)
    # ... and what ends a line or turns the direction of writing: text could pose as other text.
    return re.sub("[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]", spell_out, text)


def format_transcript(line):
    """A conversation (see transcripts.check_conversation) in colour: what was sampled bright, the
    rest dim; behind it how many tokens, by which policy, and flags. -> the text of it"""
    # First a line about the segment, then its messages, each with the speaker on the left. For a
    # terminal 1 is bright, 2 dim and 33 yellow. No text gets there with control characters in it.
    about = [f"{name} {value}" for name, value in line.items() if name != "messages"]
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
    lines = read_transcripts(path)
    number = len(lines) if number is None else number
    if not 1 <= number <= len(lines):
        raise ValueError(f"--line={number}: {path} has lines 1 to {len(lines)}")
    # A terminal that is not for all letters shows their numbers.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    print(format_transcript(lines[number - 1]))
