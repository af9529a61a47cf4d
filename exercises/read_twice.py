"""3. A rule for hints: the same file is read twice.   feedback_distill.py   one function

A rule looks at one turn of a rollout and says what should have stood above it. Write `read_twice`
beside the other rules: a turn that calls read_file with a path that an earlier turn of this segment
has read, with no edit of that file in between, gets the hint "Reminder: you have read PATH." on
that call.

    python -m pytest exercises/read_twice.py       red before, green after
    python train.py --stage=rl --steps=5 --start_from=assets/sft --out=out/read_twice \\
        --habits=unavailable_tool,read_twice

Number to reach: `flagged` in the first line of out/read_twice/rl.jsonl is 113; with wrong tools
alone it is 104. Look at: `python rollout.py --replay=out/read_twice/transcripts.jsonl`, the flags
in yellow.
"""

from types import SimpleNamespace

import feedback_distill
from rollout import Call


def rollout_of(*turns):
    """A rollout of one segment, whose turns make these calls"""
    turns = [SimpleNamespace(role="assistant", calls=list(calls), text="") for calls in turns]
    task = SimpleNamespace(tools=("read_file", "edit_file"), meta={})
    return SimpleNamespace(task=task, segments=[SimpleNamespace(turns=turns)])


READ, OTHER = Call("read_file", ["a.py"]), Call("read_file", ["b.py"])
EDIT = Call("edit_file", ["a.py", "x", "y"])


def ask(number, *turns):
    return feedback_distill.RULES["read_twice"](rollout_of(*turns), 0, number)


def test_the_second_reading_is_flagged_on_its_call():
    hint = ask(2, [READ], [OTHER], [OTHER, READ])
    assert hint.call == 0 and hint.text == "Reminder: you have read b.py."
    hint = ask(1, [READ], [OTHER, READ])
    assert hint.call == 1 and hint.text == "Reminder: you have read a.py."


def test_a_first_reading_and_one_after_an_edit_are_not():
    assert ask(0, [READ], [READ]) is None
    assert ask(1, [READ], [OTHER]) is None
    assert ask(2, [READ], [EDIT], [READ]) is None
