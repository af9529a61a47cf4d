"""command/transcripts.py: conversations on file.

Reinforcement learning leaves a few rollouts of every step in transcripts.jsonl: a line of JSON per
segment, which is one training sequence. Its messages have the usual chat form (role, content,
tool_calls, tool_call_id), so that any program that reads chats reads them. Beyond that form each
message says how many tokens it has, how many of them were sampled (only those are trained on), by
which version of the policy, and what was flagged in it.

    describe_rollout(rollout, tokenizer)      -> a dict per segment
    write_transcripts, read_transcripts   the file; a step that comes again replaces what it held

It stands apart from rollout.py because nothing of it is sampled or learnt. A file may come from
anywhere, so each value is checked. Left out: token ids, since who wants to train again samples
again; and the terminal, for which demos/transcript_view.py is there.
"""

import json
from pathlib import Path

from world.tools import name_arguments

# ---------------------------------------------------------------- what is written


def describe_turn(turn, tokenizer, flags, ids):
    """A turn in the chat form. Beyond it: `tokens` of the turn and how many of them were `sampled`
    (the mask: all but the role's, or none), the policy's `versions`, `flags`. ids: of the calls
    that wait for their outputs. A turn with calls fills this list, a tool's turn takes the first
    one."""
    # Who speaks, what is said, and how many of its tokens the policy chose.
    sampled = turn.role == "assistant"
    # In a query, summary, recent turn or hint the harness speaks as the user.
    role = turn.role if turn.role in ("user", "assistant", "tool") else "user"
    words = turn.text if sampled else tokenizer.written_text(turn)
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
        entry["tool_calls"] = [describe_call(call, i) for call, i in zip(turn.calls, ids)]

    # Of the policy's own turns: who sampled them, wrong calls, and whether a limit cut them off.
    if sampled:
        versions = [] if turn.versions is None else turn.versions
        entry["versions"] = sorted({int(version) for version in versions})
        flags = [call.error for call in turn.calls if call.error] + list(flags)
        if turn.tokens[-1] not in tokenizer.ends:
            flags.append("cut off")
    if flags:
        entry["flags"] = flags
    return entry


def describe_call(call, call_id):
    """A call in the chat form"""
    arguments = name_arguments(call.name, call.args) if call.given is None else call.given
    function = {"name": call.name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def describe_rollout(rollout, tokenizer, flags=None, **about):
    """-> a dict per segment, that is per training sequence, to be written as a line of JSON. flags:
    {(segment, turn): words}"""
    # Calls wait for their outputs within a segment, so each has a list of ids of its own.
    flags = flags or {}
    lines = []
    for e, segment in enumerate(rollout.segments):
        ids = []
        messages = []
        for i, turn in enumerate(segment.turns):
            messages.append(describe_turn(turn, tokenizer, flags.get((e, i), []), ids))

        # What is known of the whole rollout stands in the line of each of its segments.
        line = {
            **about,
            "task": rollout.task.instance_id,
            "level": rollout.task.level,
            "segment": e + 1,
            "segments": len(rollout.segments),
            "reward": rollout.reward,
            "solved": bool(rollout.solved),
            "finished": rollout.finished,
            "messages": messages,
        }
        lines.append(line)
    return lines


# ---------------------------------------------------------------- the file


def read_transcripts(path):
    """-> the conversations in a file. ValueError says in one line what is wrong with it."""
    # utf-8-sig also reads a file that begins with a byte order mark.
    try:
        rows = Path(path).read_text(encoding="utf-8-sig").strip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ValueError(f"{path} cannot be read: {reason}") from None

    lines = []
    for number, row in enumerate(rows, 1):
        try:
            lines.append(json.loads(row))
            check_conversation(lines[-1])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f"{path}: line {number} is no conversation (messages of role, content, tool_calls)"
            ) from None
    return lines


def write_transcripts(path, step, lines):
    """Puts a step's lines behind those of the steps before. Lines of this step or of later ones are
    removed: a run that was killed comes to these steps again. The file is replaced as a whole, so
    that a kill never leaves a torn one."""
    # The lines of the steps before.
    kept = []
    try:
        if path.exists():
            kept = [line for line in read_transcripts(path) if line["step"] < step]
    except (ValueError, KeyError, TypeError):
        # The file is something else. It is kept under another name, and the run goes on.
        path.replace(path.with_suffix(".old"))

    # Written beside the file, then put in its place.
    rows = [json.dumps(line) for line in kept]
    rows += [json.dumps({"step": step, **line}) for line in lines]
    part = path.with_suffix(".part")
    part.write_text("".join(row + "\n" for row in rows))
    part.replace(path)


# ---------------------------------------------------------------- what is a conversation

# The kind of value that a message holds under each name
KINDS = {
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


def check_kinds(message):
    """A TypeError where a message of a transcript holds another kind of value than it should"""
    # The values themselves, then what the lists hold.
    for name, kind in KINDS.items():
        if name in message and not isinstance(message[name], kind):
            raise TypeError(f"{name} is no {kind}")
    words = list(message.get("flags", []))
    for call in message.get("tool_calls", []):
        words += [call["function"]["name"], call["function"]["arguments"]]
    if not all(isinstance(word, str) for word in words):
        raise TypeError("flags, names and arguments are words")
    if not all(isinstance(version, int) for version in message.get("versions", [])):
        raise TypeError("versions are numbers")


def check_conversation(line):
    """Raises a ValueError, LookupError, TypeError or AttributeError where a line of a file is no
    conversation: a dict with messages, each with somebody who says something."""
    # What the line says of itself stands beside its messages.
    line.items()
    for message in line["messages"]:
        check_kinds(message)
        message.get("name", message["role"])
        message_text(message)


def message_text(message):
    """What a message says: its content, and a line for each of its calls"""
    # The content may be None beside calls.
    words = [message["content"] or ""]
    for call in message.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        pairs = " ".join(f"{name}={value}" for name, value in arguments.items())
        words.append(f"> {call['function']['name']} {pairs}")
    text = "\n".join(word for word in words if word)
    # Half of a surrogate pair is no character and cannot be printed.
    return text.encode("utf-8", "replace").decode()
