"""command/transcripts.py: conversations on file.

Reinforcement learning leaves a few rollouts of every step in transcripts.jsonl: a line of JSON per
segment, which is one training sequence. Its messages have the usual chat form (role, content,
tool_calls, tool_call_id), so that any program that reads chats reads them. Beyond that form each
message says how many tokens it has, how many of them were sampled (only those are trained on), by
which version of the policy, and what was flagged in it.

    describe_rollout(rollout, tokenizer)    -> a dict per segment
    write_transcripts(path, step, lines)    a step that comes again replaces what it held
    read_rollouts(path)                     what a rule of feedback_distill.py can be asked about

It stands apart from rollout.py because nothing of it is sampled or learnt. Left out: token ids,
since who wants to train again samples again; and the terminal, for which demos/transcript_view.py
is there.
"""

import json
from pathlib import Path
from types import SimpleNamespace

from command.step_log import keep_lines
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
    entry = {"id": call_id, "type": "function", "function": function}
    # Why it was refused, and that the context does not show its whole answer
    if call.error:
        entry["error"] = call.error
    if call.cut:
        entry["cut"] = True
    return entry


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
            "tools": list(rollout.task.tools),
            "test_command": rollout.task.test_command,
            "segment": e + 1,
            "segments": len(rollout.segments),
            "reward": rollout.reward,
            "solved": bool(rollout.solved),
            "finished": rollout.finished,
            "messages": messages,
        }
        lines.append(line)
    return lines


# ---------------------------------------------------------------- what is shown of it


def escape_control_chars(text):
    """The text with its control characters spelled out: what is shown must not move the cursor.
    Half of a surrogate pair, and what turns the direction of writing, is not printable either."""

    def spell_out(char):
        return char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1]

    return "".join(map(spell_out, text))


# ---------------------------------------------------------------- the file


def write_transcripts(path, step, lines):
    """Puts a step's lines behind those of the steps before. Lines of this step or of later ones are
    removed: a run that was killed comes to these steps again."""
    keep_lines(path, step - 1)
    with open(path, "a") as file:
        file.writelines(json.dumps({"step": step, **line}) + "\n" for line in lines)


def read_rollouts(path):
    """-> [(number of its first line, rollout)]. A rollout has what rules ask for: the task's tools
    and test command, its end, and per turn role, text and calls. ValueError: in one line why not"""
    rollouts, number = [], 1
    try:
        for number, text in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            line = json.loads(text)
            if line["segment"] == 1:
                task = SimpleNamespace(
                    tools=tuple(line["tools"]), test_command=line["test_command"], meta={}
                )
                played = SimpleNamespace(
                    task=task, segments=[], files={}, finished=line["finished"]
                )
                rollouts.append((number, played))
            rollouts[-1][1].segments.append(SimpleNamespace(turns=read_turns(line["messages"])))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(
            f"{path}: line {number} is of no transcripts.jsonl of this version"
        ) from None
    return rollouts


def read_turns(messages):
    """The messages of a segment as turns"""
    turns, waiting = [], {}  # {id: a call whose output comes later}
    for message in messages:
        calls = []
        for entry in message.get("tool_calls", ()):
            arguments = json.loads(entry["function"]["arguments"])
            call = SimpleNamespace(
                name=entry["function"]["name"],
                args=list(arguments.values()),
                output="",
                error=entry.get("error", ""),
                cut=entry.get("cut", False),
            )
            calls.append(call)
            waiting[entry["id"]] = call
        if message.get("tool_call_id") in waiting:
            waiting.pop(message["tool_call_id"]).output = message["content"]
        role = message.get("name", message["role"])
        turns.append(SimpleNamespace(role=role, text=message["content"] or "", calls=calls))
    return turns
