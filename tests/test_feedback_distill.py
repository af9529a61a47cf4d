"""Targeted feedback: rules on hand-made turns, splices by hand, divergences in float64 and against
torch, the teacher."""

import copy
import math
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from commands import run_command

import feedback_distill as fd
from command import checkpoints, transcripts
from moe import Model, ModelConfig
from refusals import refuse
from rollout import Limits, Tokenizer, flatten, grade, play_moves
from summarize import Compaction
from synth_tasks import make_task
from world.expert import expert
from world.lint import find_new_comment

ROOT = Path(__file__).resolve().parent.parent
USER, ASSISTANT, TOOL, QUERY, HINT, END = range(6)


@dataclass
class Call:
    name: str
    args: list
    output: str = "ok"
    error: str = ""
    cut: bool = False


@dataclass
class Turn:
    role: str
    tokens: list
    text: str = ""
    calls: list = field(default_factory=list)
    head: int = 1


def say(role, text="", *calls, body=(10, 11)):
    return Turn(
        role,
        [dict(user=USER, assistant=ASSISTANT, tool=TOOL, query=QUERY)[role], *body, END],
        text,
        list(calls),
    )


def do(*calls, text=""):
    """An assistant turn and the outputs of its calls."""
    return [say("assistant", text, *calls), *(say("tool", call.output) for call in calls)]


def rollout(*segments, finished=True, files={}, **task):
    task = SimpleNamespace(
        tools=("read_file", "edit_file", "run_command"),
        test_command="python tests.py",
        **{"meta": {}, **task},
    )
    return SimpleNamespace(
        task=task,
        finished=finished,
        files=files,
        segments=[SimpleNamespace(turns=[say("user", "Do it."), *turns]) for turns in segments],
    )


def fired(c, rule):
    return [(h.segment, h.turn) for h in fd.detect(c, [rule])]


READ, DOCS = Call("read_file", ["a.py"], "def f(xs):\n"), Call(
    "read_file", ["docs.md"], "a.f: add 1"
)
EDIT = Call("edit_file", ["a.py", "", "def f(xs):\n    xs = [x + 1 for x in xs]\n    return xs\n"])
RED = Call("run_command", ["python tests.py"], "a.f: missing\na.g: missing\n1 passed, 2 failed")
GREEN = Call("run_command", ["python tests.py"], "3 passed, 0 failed")
BYE = say("assistant", "Put back f.")
CLEAN = [*do(READ, DOCS, text="Look."), *do(EDIT), *do(GREEN), BYE]


# ---------------------------------------------------------------- rules


def test_every_rule_is_silent_on_a_clean_rollout():
    assert len(fd.RULES) >= 6
    assert fd.detect(rollout(CLEAN)) == []
    assert (
        fd.detect(
            rollout([*do(READ), say("query"), say("assistant", "So far: " + "f " * 40)], CLEAN)
        )
        == []
    )


def test_unavailable_tool_lists_what_the_task_offers():
    c = rollout([*do(READ), *do(Call("grep", ["f"], "Tool not found: grep", "unknown_tool")), BYE])
    (hint,) = fd.detect(c)
    assert (hint.segment, hint.turn, hint.kind) == (0, 3, "unavailable_tool")
    assert hint.text == "Reminder: Available tools: read_file, edit_file, run_command."


def test_a_wrong_tool_among_parallel_calls_is_found():
    assert fired(
        rollout([*do(READ, Call("grep", [], "", "unknown_tool")), BYE]), "unavailable_tool"
    ) == [(0, 1)]


def test_malformed_calls_are_told_how_calls_are_written_and_a_failed_call_is_none():
    c = rollout(
        [
            *do(Call("edit_file", ["a.py"], "", "bad_arguments")),
            *do(Call("", [], "This call cannot be read.", "bad_arguments")),
            *do(Call("read_file", ["no.py"], "", "failed")),
            BYE,
        ]
    )
    said = "calls are read_file(path), edit_file(path, old, new), run_command(command)."
    assert [(hint.turn, hint.kind, hint.text) for hint in fd.detect(c)] == [
        (1, "malformed_arguments", f"Reminder: {said}"),
        (3, "malformed_arguments", f"Reminder: {said}"),
    ]


@pytest.mark.parametrize(
    "new, place",
    [
        ("    x = 1  # think first\n", 11),
        ("x = 1\n# so\n", 6),
        ("    x = 1; y = 2\n", None),
        ("    x = '#'\n", None),
        ('    x = "; # "\n', None),
        # Python does not end a line at these characters, so they are part of the string.
        *((f"    x = 'a{mark}  # c'\n", None) for mark in "\u2028\u2029\x85\x0b\x1c"),
        ("    x = 'a\u2028'  # 2\n", 14),
    ],
)
def test_code_style_finds_each_comment_and_nothing_else(new, place):
    hints = fd.detect(rollout([*do(Call("edit_file", ["a.py", "", new])), BYE]), ["code_style"])
    found = [(hint.text, hint.call, hint.character) for hint in hints]
    assert found == ([] if place is None else [(fd.COMMENT_REMINDER, 0, place)])


def test_code_style_knows_what_was_there_before_and_what_is_a_text():
    for old, new, place in (
        ("x = 1  # keep", "x = 2  # keep", None),
        ("", r"s = 'it\'s # no'", None),
        ("", r"s = 'it\'s'  # yes", 13),
        ("x = 1  # keep", "x = 2  # more", 7),
    ):
        assert find_new_comment(old, new) == place, new
    failed = Call("edit_file", ["a.py", "y", "x = 1  # one"], "old text not found", "failed")
    assert fired(rollout([*do(failed), BYE]), "code_style") == []


def test_a_file_is_the_same_however_its_path_is_written():
    other = Call("read_file", ["./a.py"], READ.output)
    assert fired(rollout([*do(READ), *do(other), BYE]), "repetition") == [(0, 3)]
    edit = Call("edit_file", ["./a.py", *EDIT.args[1:]])
    assert fired(rollout([*do(READ), *do(edit), *do(READ), BYE]), "repetition") == []


def test_code_style_reads_only_new_lines_of_python():
    old = "    x = 1  # was here\n"
    assert not fired(
        rollout([*do(Call("edit_file", ["a.py", old, old + "    y = 2\n"])), BYE]), "code_style"
    )
    assert not fired(
        rollout([*do(Call("edit_file", ["docs.md", "", "# Title\n"])), BYE]), "code_style"
    )


def test_communication_wants_a_last_message():
    assert fired(rollout([*do(GREEN), say("assistant", " ")]), "communication") == [(0, 3)]
    # what a real repository's functions are called may be any word
    long = say("assistant", "word f " * 30)
    real = rollout([*do(GREEN), long], files={"a.py": GIVEN})
    real.task.files, real.task.meta = {"a.py": GIVEN}, {}
    assert fired(real, "communication") == []
    # a limit cut it off
    assert fired(rollout([*do(EDIT), *do(GREEN)], finished=False), "communication") == []
    cut = rollout([*do(EDIT), say("assistant", " ")], finished=False)
    assert fired(cut, "communication") == []


def test_a_message_may_use_the_words_of_the_check_and_the_old_name():
    task = make_task(10, 3)
    new, old = task.meta["targets"][0]["name"], task.meta["gone"][0]
    played = rollout([*do(GREEN), BYE], files={**task.files, **task.solution})
    played.task = task
    for text, untrue in (
        (f"Renamed {old} to {new}.", False),
        (f"Renamed {new}. The tests run, and it passes.", False),
        (f"Renamed {old}.", True),
    ):
        played.segments[0].turns[-1] = say("assistant", text)
        assert fired(played, "communication") == [(0, 3)] * untrue, text


GIVEN = "def old(xs):\n    return xs\n\n\ndef g(xs):\n    xs = xs[1:]\n\n    return xs\n"
PUT_BACK = "\n\ndef f(xs):\n    return [x + 1 for x in xs]\n"


@pytest.mark.parametrize(
    "after, message, untrue",
    [
        (GIVEN + PUT_BACK, "Put back f.", False),
        (GIVEN + PUT_BACK, "I looked, I wrote, and `f` is there again, I hope.", False),
        (GIVEN + PUT_BACK, "Put back f, old.", True),  # old is as it was
        (GIVEN + PUT_BACK, "Done.", True),  # f is left out
        (GIVEN, "Put back f.", True),  # it is not
        (GIVEN, "Nothing done.", False),
        (GIVEN.replace("[1:]", "[2:]") + PUT_BACK, "Put back f, g.", False),
        (GIVEN + PUT_BACK + GIVEN, "Put back f.", False),
    ],
)
def test_communication_wants_what_the_files_say(after, message, untrue):
    files = {"a.py": after, "docs.md": "def h(x):\n    f\n"}
    played = rollout(
        [*do(GREEN), say("assistant", f"<think>old</think>{message}")],
        files=files,
        meta={"targets": [{"name": "f"}]},
    )
    played.task.files = {**files, "a.py": GIVEN}
    assert fired(played, "communication") == ([(0, 3)] if untrue else [])
    # The hint names what is done, and nothing where nothing is.
    says = "Reminder: the last message names what is done"
    texts = [hint.text for hint in fd.detect(played, ("communication",))]
    assert texts == [f"{says}: f." if PUT_BACK in after else f"{says}."] * untrue
    # a transcript holds no files
    played.files = {}
    assert fired(played, "communication") == []


def test_a_muted_token_is_in_neither_distribution_and_has_no_gradient():
    torch.manual_seed(0)
    student, teacher, muted = (
        torch.randn(5, 7, requires_grad=True),
        torch.randn(5, 7),
        torch.tensor([2, -1, 0, 6, -1]),
    )
    for kind in ("forward", "reverse", "jsd"):
        got = fd.divergence(fd.mute(student, muted), fd.mute(teacher, muted), kind)
        for i, token in enumerate(muted.tolist()):
            rest = [v for v in range(7) if v != token]
            assert torch.allclose(
                got[i],
                fd.divergence(student[i : i + 1, rest], teacher[i : i + 1, rest], kind)[0],
                atol=1e-6,
            )
        (gradient,) = torch.autograd.grad(got.sum(), student)
        assert [
            bool((gradient[i] == 0)[token]) for i, token in enumerate(muted.tolist()) if token >= 0
        ] == [True] * 3
        assert (
            torch.equal(fd.mute(student, 0 * muted - 1), student) and torch.isfinite(gradient).all()
        )


def test_hints_on_the_final_message_leave_the_decision_to_act_alone():
    e, kinds = segment(1, 2), ("communication", "unavailable_tool", "code_style")
    cuts = [fd.splice(BYTES, e, fd.Hint("Stop.", turn=1, kind=kind)) for kind in kinds]
    assert [cut.muted for cut in cuts] == [BYTES.id["<|call|>"], -1, -1]
    taught = packed((0, by_hand(e, 1, [7], muted=9)), (0, by_hand(e, 1, [7, 8], (2, 3))))
    assert taught.muted.tolist() == [9, 9, 9, -1] and taught.token.tolist() == [11, 12, END, 12]


def test_a_summary_is_not_a_final_message():
    long = say("assistant", "word " * 100)
    assert fired(rollout([*do(READ), say("query"), long], [*do(EDIT), BYE]), "communication") == []
    # cut off while summarizing
    assert fired(rollout([*do(READ), say("query"), long], finished=False), "communication") == []


def test_repetition_finds_rereading_and_retesting_but_not_after_a_change():
    assert fired(rollout([*do(READ), *do(READ), BYE]), "repetition") == [(0, 3)]
    assert fired(rollout([*do(READ, READ), BYE]), "repetition") == [(0, 1)]
    assert fired(rollout([*do(READ), *do(EDIT), *do(READ), BYE]), "repetition") == []
    # another file was edited
    assert fired(rollout([*do(DOCS), *do(EDIT), *do(DOCS), BYE]), "repetition") == [(0, 5)]
    assert fired(rollout([*do(GREEN), *do(GREEN), BYE]), "repetition") == [(0, 3)]
    assert fired(rollout([*do(RED), *do(EDIT), *do(GREEN), BYE]), "repetition") == []
    failed = Call("edit_file", ["a.py", "x", "y"], "old text not found", "failed")
    # a failed edit changes nothing
    assert fired(rollout([*do(RED), *do(failed), *do(RED), BYE]), "repetition") == [(0, 5)]
    shell = Call("run_command", ["sed -i s/1/2/ a.py"])
    assert fired(rollout([*do(READ, GREEN), *do(shell), *do(READ, GREEN), BYE]), "repetition") == []


def test_repetition_forgets_what_a_summary_has_removed_and_what_could_not_be_read():
    assert fired(rollout([*do(READ), say("query"), BYE], [*do(READ), BYE]), "repetition") == []
    lost = Call("read_file", ["b.py"], "no such file", "failed")
    assert fired(rollout([*do(lost), *do(lost), BYE]), "repetition") == []
    long = Call("read_file", ["b.py"], "x = 1\n" * 999, cut=True)
    assert fired(rollout([*do(long), *do(long), BYE]), "repetition") == []


def test_unfinished_is_to_end_on_red_tests_with_nothing_done_about_it():
    (hint,) = fd.detect(rollout([*do(RED), BYE]), ["unfinished"])
    assert (hint.turn, hint.text) == (3, fd.RED_REMINDER)
    pytest_red = Call("run_command", ["python tests.py"], "== 1 error, 3 passed in 0.1s ==")
    assert fired(rollout([*do(pytest_red), *do(READ), BYE]), "unfinished") == [(0, 5)]
    assert fired(rollout([*do(RED), *do(EDIT), BYE]), "unfinished") == []
    assert fired(rollout([*do(RED), *do(EDIT), *do(GREEN), BYE]), "unfinished") == []
    failed = Call("edit_file", ["a.py", "x", "y"], "old text not found", "failed")
    assert fired(rollout([*do(RED), *do(failed), BYE]), "unfinished") == [(0, 5)]
    assert fired(rollout([*do(RED), say("query"), BYE], [*do(READ), BYE]), "unfinished") == [(1, 3)]
    # a limit cut it off
    assert fired(rollout([*do(RED), BYE], finished=False), "unfinished") == []
    # A file that is no Python stops the run before it counts; a run that was refused says nothing.
    broken = Call("run_command", ["python tests.py"], "SyntaxError: '(' was never closed")
    assert fired(rollout([*do(broken), BYE]), "unfinished") == [(0, 3)]
    refused = Call("run_command", ["python tests.py"], "No more commands.", "failed")
    assert fired(rollout([*do(RED), *do(refused), BYE]), "unfinished") == [(0, 5)]
    assert fired(rollout([*do(GREEN), *do(refused), BYE]), "unfinished") == []


def test_one_hint_per_turn_and_no_unknown_rule():
    bad = Call("grep", [], "", "unknown_tool")
    c = rollout([*do(bad, READ, READ), *do(bad), *do(bad), BYE])
    assert [(h.turn, h.kind) for h in fd.detect(c)] == [
        (1, "unavailable_tool"),
        (5, "unavailable_tool"),
        (7, "unavailable_tool"),
    ]
    with pytest.raises(AssertionError, match="speling"):
        fd.detect(c, ["speling"])


def test_a_new_rule_is_one_function_with_its_docstring_and_is_asked_about_the_policys_turns():
    asked = []

    @fd.rule
    def shouting(rollout, e, i):
        """A turn is written in capitals."""
        asked.append(i)
        if rollout.segments[e].turns[i].text.isupper():
            return "Reminder: do not shout."

    try:
        (hint,) = fd.detect(rollout([*do(READ, text="LOOK."), *do(EDIT), BYE]))
    finally:
        del fd.RULES["shouting"]
    assert (hint.turn, hint.kind, hint.text) == (1, "shouting", "Reminder: do not shout.")
    assert asked == [1, 3, 5]
    assert all(rule.__doc__ for rule in fd.RULES.values())


# ---------------------------------------------------------------- splicing and packing


def segment(*lengths):
    """user, assistant, tool, assistant, ... turns with all-different ids"""
    ids, turns = iter(range(10, 1000)), []
    for i, n in enumerate(lengths):
        role = "user" if i == 0 else "assistant" if i % 2 else "tool"
        turns.append(say(role, body=[next(ids) for _ in range(n)]))
    return SimpleNamespace(turns=turns)


BYTES = Tokenizer({bytes([b]): b for b in range(256)})


def by_hand(e, i, hint_ids, span=None, muted=-1):
    """A Splice whose hint has these ids, on turn i of a segment. span: of the turn's tokens, all
    but the role's if none is given"""
    above = [token for turn in e.turns[:i] for token in turn.tokens]
    return fd.Splice(
        above, hint_ids, e.turns[i].tokens, *(span or (1, len(e.turns[i].tokens))), muted
    )


def packed(*pairs):
    """pack_hinted of a batch of 4 rows. pairs: (row, Splice of a hint on its segment)"""
    rows = [SimpleNamespace(hints=[]) for _ in range(4)]
    for row, cut in pairs:
        rows[row].hints.append(cut)
    return fd.pack_hinted(rows)


@pytest.mark.parametrize("n", [0, 1, 2, 7, 40])
def test_a_hint_stands_right_above_its_turn_and_speaks_about_what_was_sampled(n):
    e = segment(3, 4, 2, 5)
    cut = fd.splice(BYTES, e, fd.Hint("x" * n, turn=3))
    hint_ids = [BYTES.id["<|hint|>"], *[ord("x")] * n, BYTES.id["<|end|>"]] if n else []
    assert cut == by_hand(e, 3, hint_ids)
    assert cut.turn[cut.first : cut.end] == e.turns[3].tokens[1:] and cut.num_targets == 6
    with pytest.raises(AssertionError, match="tool"):
        fd.splice(BYTES, e, fd.Hint("x", turn=2))


def test_packed_positions_predict_the_same_ids_for_many_hints_in_many_segments():
    segments = [segment(3, 4, 2, 5, 1, 2), segment(1, 1), segment(6, 2, 9, 3)]
    hinted = [(0, 3, [7] * 5), (0, 1, [9]), (0, 5, [5] * 3), (2, 1, [8] * 2), (2, 3, [6] * 11)]
    t = packed(*((e, by_hand(segments[e], i, ids)) for e, i, ids in hinted))
    flat = [[token for turn in e.turns for token in turn.tokens] for e in segments]
    assert len(t) == sum(
        len(segments[e].turns[i].tokens) - 1 for e, i, _ in hinted
    ) and t.tokens.shape[0] == len(hinted)
    for n in range(len(t)):
        assert (
            t.tokens[t.row[n], t.position[n] + 1]
            == t.token[n]
            == flat[t.student_row[n]][t.student_position[n] + 1]
        )
        assert t.position[n] - t.student_position[n] == len(hinted[t.row[n]][2])
    # all sampled tokens of the turn, its <|end|> included, once each; the teacher reads the hint
    # between the turns above and the turn
    lengths = 0
    for k, (e, i, ids) in enumerate(hinted):
        turn = segments[e].turns[i].tokens
        assert t.token[t.row == k].tolist() == turn[1:]
        above = [token for earlier in segments[e].turns[:i] for token in earlier.tokens]
        row = above + ids + turn
        assert t.tokens[k].tolist() == row + [0] * (t.tokens.shape[1] - len(row))
        lengths += len(row)
    assert (t.student_row == torch.tensor([hinted[k][0] for k in t.row])).all()
    assert t.real_tokens == lengths


def small(seed=0, vocab=64):
    torch.manual_seed(seed)
    model = Model(
        ModelConfig(
            vocab,
            dim=16,
            layers=2,
            heads=2,
            kv_lora=8,
            qk_nope=8,
            qk_rope=4,
            v_dim=8,
            dense_ffn=32,
            experts=4,
            num_experts_per_tok=2,
            expert_ffn=16,
            context=64,
        )
    )
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.3)
    return model


def batch_of(segments):
    flat = [[token for turn in e.turns for token in turn.tokens] for e in segments]
    T = max(map(len, flat))
    return torch.tensor([row + [0] * (T - len(row)) for row in flat])


def test_a_reminder_of_the_tools_is_about_the_call_of_the_first_one_that_is_not_there():
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)})
    tokenizer.id = {"<|call|>": 90, "<|arg|>": 91, "<|end|>": END}
    tokenizer.name = {i: name for name, i in tokenizer.id.items()}
    # thought, read_file(..), cat(..), ls()
    body = [20, 90, 30, 31, 91, 32, 90, 40, 41, 91, 42, 90, 50, END]
    turn = SimpleNamespace(
        tokens=[ASSISTANT, *body],
        head=1,
        calls=[
            Call("read_file", []),
            Call("cat", [], error="unknown_tool"),
            Call("ls", [], error="unknown_tool"),
        ],
    )
    turn.role = "assistant"
    (hint,) = fd.detect(rollout([turn]), ["unavailable_tool"])
    first, end = fd.find_hinted_tokens(tokenizer, turn, hint)
    assert body[first:end] == [90, 40, 41]
    e = segment(3, 12)
    whole, part = (
        packed((0, by_hand(e, 1, [7, 7], span))) for span in (None, (first + 1, end + 1))
    )
    assert len(part) == end - first and part.tokens.equal(whole.tokens)
    for name in ("row", "position", "student_row", "student_position", "token"):
        assert getattr(part, name).equal(getattr(whole, name)[first:end])
    assert part.token.tolist() == e.turns[1].tokens[1:][first:end]


@pytest.mark.parametrize(
    "new,broken",
    [
        ("def f(x):  # note\n    return x\n", "#"),
        ("s = '# ;'  # é # b\n", "#"),
        ("x = '# é'\nkept = 1  # old\ny = 2 # new\n", "#"),
    ],
)
def test_a_reminder_of_style_is_about_the_token_that_breaks_the_rule(new, broken):
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)})
    calls = [
        Call("read_file", ["a.py"]),
        Call("edit_file", ["b.py", "kept = 1  # old\n", "kept = 1  # old\n"]),
        Call("edit_file", ["a.py", "kept = 1  # old\n", new]),
    ]
    turn = SimpleNamespace(
        tokens=[
            tokenizer.id["<|assistant|>"],
            *tokenizer.write_action("Edit # it; ", [(c.name, c.args) for c in calls]),
        ],
        role="assistant",
        calls=calls,
        head=1,
    )
    (hint,) = fd.detect(rollout([turn]), ["code_style"])
    first, end = fd.find_hinted_tokens(tokenizer, turn, hint)
    body = turn.tokens[1:]
    assert end == first + 1 and tokenizer.decode(body[first:end]) == broken
    # The text before that token breaks no rule, and with the token it does.
    calls[2].args[2] = new = tokenizer.decode(body[:first]).rsplit("<|arg|>", 1)[-1]
    assert not fired(rollout([turn]), "code_style"), new
    calls[2].args[2] += broken + "x"
    assert fired(rollout([turn]), "code_style")


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_an_empty_hint_is_exactly_zero(kind, monkeypatch):
    monkeypatch.setattr(fd, "DIVERGENCE", kind)
    e, model = segment(3, 4, 2, 5), small()
    # Student and teacher read the same context in the same shape, so their bits are equal.
    t = packed((0, fd.splice(BYTES, e, fd.Hint("", turn=3))))
    student = fd.student_logits(model, model(batch_of([e])), t)
    teacher = fd.Teacher(model, "current")(t)
    assert len(t) == 6 and (fd.divergence(student, teacher, kind) == 0).all()
    assert fd.feedback_loss(student, teacher, 6).item() == 0
    assert fd.logprob_gap(student, teacher, t.token).item() == 0


def test_no_hint_at_all_gives_zero_that_runs_backward():
    model = small()
    t = fd.pack_hinted([])
    teacher = fd.Teacher(model, "ema")(t)
    assert teacher.shape == (0, 64) and t.tokens.shape == (1, 1)
    student = fd.student_logits(model, model(batch_of([segment(3, 4)])), t)
    loss = fd.feedback_loss(student, teacher, 0)
    assert loss.item() == 0 and fd.logprob_gap(student, teacher, t.token).item() == 0
    loss.backward()
    assert all(
        p.grad is not None and (p.grad == 0).all()
        for p in model.parameters()
        if p is not model.embed.weight
    )


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_the_gradient_is_exactly_zero_outside_what_the_hint_speaks_about(kind, monkeypatch):
    monkeypatch.setattr(fd, "DIVERGENCE", kind)
    segments, model = [segment(3, 4, 2, 5), segment(4, 3)], small()
    hint_ids = [HINT, 30, 31, END]
    # user turn: 5 tokens; the role token at 5 predicts the first of 5 targets
    for span, predicting in (((1, 6), slice(5, 10)), ((2, 4), slice(6, 8))):
        t = packed((0, by_hand(segments[0], 1, hint_ids, span)))
        logits = model.logits(model(batch_of(segments))).detach().requires_grad_()
        student = logits[t.student_row, t.student_position]
        fd.feedback_loss(student, fd.Teacher(model, "ema")(t), len(t)).backward()
        inside = torch.zeros(logits.shape[:2], dtype=torch.bool)
        inside[0, predicting] = True
        assert ((logits.grad != 0).any(-1) == inside).all()


def test_the_teachers_distribution_is_that_of_a_forward_over_the_spliced_row_alone():
    segments, model = [segment(3, 4, 2, 5), segment(6, 2)], small()
    cuts = [
        by_hand(segments[0], 3, [HINT, 30, 31, 32, END]),
        by_hand(segments[1], 1, [HINT, 40, END]),
    ]
    t = packed((0, cuts[0]), (1, cuts[1]))
    got = fd.Teacher(model, "ema")(t)
    with torch.no_grad():
        for k, cut in enumerate(cuts):
            row = cut.above + cut.hint_ids + cut.turn
            alone = model.eval().logits(model(torch.tensor([row])))[0, -len(cut.turn) : -1]
            torch.testing.assert_close(got[t.row == k], alone, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- divergences


def pair(n=7, v=50, scale=3.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, v, generator=g) * scale, torch.randn(n, v, generator=g) * scale


def brute(s, t, kind):
    """Probabilities in float64, one entry after the other."""
    values = []
    for row_s, row_t in zip(s.double().softmax(-1), t.double().softmax(-1)):
        kl = lambda p, q: sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q))
        m = [(float(a) + float(b)) / 2 for a, b in zip(row_s, row_t)]
        values.append(
            {
                "reverse": kl(row_s, row_t),
                "forward": kl(row_t, row_s),
                "jsd": kl(row_s, m) / 2 + kl(row_t, m) / 2,
            }[kind]
        )
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_each_divergence_equals_brute_force_in_float64(kind):
    s, t = pair()
    got = fd.divergence(s, t, kind)
    assert got.dtype == torch.float32 and got.shape == (7,)
    torch.testing.assert_close(got, brute(s, t, kind), atol=2e-6, rtol=2e-5)


def test_each_divergence_equals_torch_kl_div_gradients_included():
    s, t = pair()
    s.requires_grad_()
    logs, logt = F.log_softmax(s, -1), F.log_softmax(t, -1)
    # KL(p | q)
    kl = lambda p, q: F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    m = torch.logaddexp(logs, logt) - math.log(2)
    for kind, want in (
        ("reverse", kl(logs, logt)),
        ("forward", kl(logt, logs)),
        ("jsd", kl(logs, m) / 2 + kl(logt, m) / 2),
    ):
        got = fd.divergence(s, t, kind)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        grads = [torch.autograd.grad(v.sum(), s, retain_graph=True)[0] for v in (got, want)]
        torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_far_apart_and_certain_distributions_stay_finite(kind):
    s = torch.tensor([[200.0, 0, 0, 0], [0, 200.0, 0, 0], [1e4, 0, 0, -1e4]], requires_grad=True)
    t = torch.tensor([[0, 200.0, 0, 0], [0, 200.0, 0, 0], [-1e4, 0, 0, 1e4]])
    d = fd.divergence(s, t, kind)
    d.sum().backward()
    assert d.isfinite().all() and s.grad.isfinite().all() and d[1] == 0
    assert d[0].item() == pytest.approx(math.log(2) if kind == "jsd" else 200, abs=0.02)


def test_bf16_logits_are_compared_in_fp32():
    s, t = (x.bfloat16() for x in pair())
    got, want = fd.divergence(s, t, "reverse"), brute(s, t, "reverse")
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)


def test_the_token_cap_bounds_each_token_and_keeps_the_direction_of_its_gradient():
    s, t = pair(scale=1.5)
    s.requires_grad_()
    values = fd.divergence(s, t, "reverse")
    assert values.min() < fd.TOKEN_CAP < values.max()
    loss = fd.feedback_loss(s, t, 7)
    torch.testing.assert_close(loss, values.clamp(max=fd.TOKEN_CAP).mean())
    g, h = (torch.autograd.grad(v, s)[0] for v in (values.sum(), 7 * loss))
    # The gradient of a capped token is scaled down, not dropped.
    cap = fd.TOKEN_CAP / values.detach().clamp(min=fd.TOKEN_CAP)
    torch.testing.assert_close(h, g * cap[:, None])


def test_the_loss_has_its_own_denominator():
    s, t = pair()
    whole = fd.feedback_loss(s, t, 7)
    torch.testing.assert_close(
        fd.feedback_loss(s[:3], t[:3], 7) + fd.feedback_loss(s[3:], t[3:], 7), whole
    )
    torch.testing.assert_close(fd.feedback_loss(s, t, 14), whole / 2)
    with pytest.raises(AssertionError, match="count"):
        fd.feedback_loss(s, t, 3)


def test_bad_options_are_refused():
    s, t = pair()
    with pytest.raises(AssertionError):
        fd.divergence(s, t, "kl")
    with pytest.raises(AssertionError):
        fd.divergence(s, t[:3], "reverse")


# ---------------------------------------------------------------- teacher


def moved(model, by=0.1):
    for i, p in enumerate(model.parameters()):
        p.data.add_(by * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))


def test_one_ema_update_is_90_old_and_10_new():
    model = small()
    old, teacher = copy.deepcopy(model.state_dict()), fd.Teacher(model, "ema")
    moved(model)
    model.layers[1].ffn.router.bias.fill_(0.5)
    teacher.update()
    for name, p in model.named_parameters():
        want = 0.9 * old[name].double() + 0.1 * p.detach().double()
        assert (teacher.weights[name].double() - want).abs().max() < 1e-7
    assert torch.allclose(
        teacher.weights["layers.1.ffn.router.bias"], torch.full((4,), 0.05), atol=1e-8
    )


def test_current_is_the_student_frozen_never_moves_and_ema_lies_between():
    t = packed((0, by_hand(segment(3, 4), 1, [HINT, 30, END])))
    model = small()
    first = fd.Teacher(model, "current")(t)
    teachers = {kind: fd.Teacher(model, kind) for kind in ("current", "frozen", "ema")}
    moved(model)
    for teacher in teachers.values():
        teacher.update()
    now = model.eval().logits(model(t.tokens)[t.row, t.position]).detach()
    got = {kind: teacher(t) for kind, teacher in teachers.items()}
    assert torch.equal(got["current"], now) and torch.equal(got["frozen"], first)
    assert not torch.equal(got["ema"], now) and not torch.equal(got["ema"], first)
    apart = lambda a: fd.divergence(a, first, "reverse").mean()
    assert 0 < apart(got["ema"]) < apart(now)


def test_the_teacher_gets_no_gradient_and_leaves_student_graph_mode_and_counters_untouched():
    segments, model = [segment(3, 4, 2, 5)], small().train()
    teacher = fd.Teacher(model, "ema")
    moved(model)
    t = packed((0, by_hand(segments[0], 3, [HINT, 30, END])))
    tokens = batch_of(segments)
    weights = copy.deepcopy(model.state_dict())

    def gradient(first):
        student = fd.student_logits(model, model(tokens), t)
        # None: the student's graph exists before the teacher runs
        logits = teacher(t) if first is None else first
        loss = fd.feedback_loss(student, logits, len(t))
        model.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected, _ = teacher(t), fd.Teacher(model, "current")(t)
    assert not expected.requires_grad and all(not w.requires_grad for w in teacher.weights.values())
    # The state dict holds the routers' load counters too.
    assert model.training and all(torch.equal(p, weights[n]) for n, p in model.state_dict().items())
    for a, b in zip(gradient(expected), gradient(None)):
        assert torch.equal(a, b)


def test_no_gradient_reaches_the_teachers_logits():
    s, t = (x.requires_grad_() for x in pair())
    for kind in ("reverse", "forward", "jsd"):
        got = fd.divergence(s, t, kind).sum()
        assert torch.autograd.grad(got, t, allow_unused=True) == (None,)


def test_the_weights_come_back_even_when_the_forward_fails():
    model = small()
    teacher, before = fd.Teacher(model, "frozen"), copy.deepcopy(model.state_dict())
    moved(model)
    now = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError):
        with teacher.swapped_weights():
            assert torch.equal(model.head.weight, before["head.weight"])
            raise RuntimeError
    assert all(torch.equal(p, now[n]) for n, p in model.state_dict().items())


def test_resume_restores_the_teacher_bit_for_bit(tmp_path):
    model, other = small(), small(1)
    teacher = fd.Teacher(model, "ema")
    for _ in range(3):
        moved(model)
        teacher.update()
    checkpoints.save_checkpoint(tmp_path / "c", model, more=teacher.weights)
    resumed = fd.Teacher(other, "ema")
    checkpoints.load_checkpoint(tmp_path / "c", other, more=resumed.weights)
    for m, t in ((model, teacher), (other, resumed)):
        moved(m)
        t.update()
    assert all(torch.equal(resumed.weights[name], w) for name, w in teacher.weights.items())
    with pytest.raises(ValueError, match="not one of this model"):
        checkpoints.load_checkpoint(
            tmp_path / "c", other, more=fd.Teacher(small(vocab=32), "ema").weights
        )


def test_bf16_weights_are_averaged_in_fp32():
    model = small().bfloat16()
    teacher = fd.Teacher(model, "ema")
    old, head = teacher.weights["head.weight"].clone(), model.head.weight
    head.data.mul_(1.01)
    teacher.update()
    assert teacher.weights["head.weight"].dtype == torch.float32
    torch.testing.assert_close(teacher.weights["head.weight"], 0.9 * old + 0.1 * head.float())


def test_a_bad_teacher_is_refused():
    with pytest.raises(AssertionError):
        fd.Teacher(small(), "old")


# ---------------------------------------------------------------- all of it


def test_of_a_real_demonstration_the_call_and_its_name_are_taught_and_nothing_else():
    """The rollouts of the demo, with the tokenizer of the default run"""
    tokenizer = Tokenizer(**checkpoints.load_extra(ROOT / "assets" / "sft")["tokenizer"])
    found = fd.flagged_demonstrations(tokenizer, range(40))
    assert len(found) > 10
    for c in found:
        tokens, mask, _, index = flatten(c.segments[0])
        hints = fd.detect(c, ("unavailable_tool",))
        t = fd.pack_hinted(c.segments)
        taught = []
        for hint in hints:
            (call,) = c.turns[hint.turn].calls
            assert call.name not in c.task.tools
            sampled = tokens[(index == hint.turn) & (mask == 1)].tolist()
            # A thought may stand before the call.
            begin = sampled.index(tokenizer.id["<|call|>"])
            taught += sampled[begin : begin + 1 + len(tokenizer.encode(call.name))]
        assert t.token.tolist() == taught
        # What the student is asked for is what was sampled there.
        assert tokens[t.student_position.numpy() + 1].tolist() == taught


def test_bad_flags_and_a_place_that_cannot_be_written_give_one_line_and_exit_code_two(tmp_path):
    (tmp_path / "out").write_text("a file where the folder should be")
    for flags in (["--hint=x"], []):
        command = [sys.executable, str(ROOT / "feedback_distill.py"), *flags]
        done = run_command(command, cwd=tmp_path)
        assert (
            done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and not done.stdout
        )


def test_the_demo_removes_the_wrong_tool_draws_its_figure_and_says_so(tmp_path):
    done = run_command([sys.executable, str(ROOT / "feedback_distill.py")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    numbers = {
        line[:7]: [float(word) for word in re.findall(r"\d\.\d+", line)]
        for line in done.stdout.splitlines()
    }
    (hinted,), first, last = (numbers[line] for line in ("hinted ", "step  0", "step 20"))
    # Without the hint the student comes to where the policy is that reads it, which is the oracle.
    assert first[0] > 0.1 and hinted < 0.4 * first[0] and last[0] < hinted + 0.15 * first[0]
    assert first[1] == 0 < last[1] < 0.1
    assert (
        tmp_path / "out/feedback.png"
    ).stat().st_size > 5000 and "distilling such calls" in done.stdout


def test_a_call_without_arguments_that_is_made_again_is_named_by_its_tool():
    lint = Call("lint", [], "no findings")
    (hint,) = fd.detect(rollout([*do(lint), *do(lint), BYE]), ["repetition"])
    assert (hint.turn, hint.text) == (3, fd.REPEAT_REMINDER)
    # After an edit it may say something new.
    assert not fd.detect(rollout([*do(lint), *do(EDIT), *do(lint), BYE]), ["repetition"])


# ---------------------------------------------------------------- what rules say of a file


def test_rules_say_of_a_file_what_they_say_of_the_rollouts_in_it(tmp_path, capsys):
    """Sloppy demonstrations with every kind of flaw, with summaries between"""
    compact, found, flaws = Compaction(1500, 700), [], set()
    lines = []
    for seed in range(30):
        task = make_task(5, seed)
        moves = expert(task, random.Random(seed), sloppy=2.0, planted=fd.REMINDERS)
        played = play_moves(task, BYTES, moves, Limits(1500), compact)
        grade(played)
        played.files = {}  # a transcript holds none
        hints = fd.detect(played)
        found += [(hint.kind, hint.text) for hint in hints]
        flaws |= {hint.kind for hint in hints}
        lines += transcripts.describe_rollout(played, BYTES)
    assert len(flaws) > 3 and len(lines) > 30

    transcripts.write_transcripts(tmp_path / "t.jsonl", 1, lines)
    fd.main([f"--ask={tmp_path}/t.jsonl"])
    *said, total = capsys.readouterr().out.splitlines()
    assert [tuple(line.split("  ")[1:]) for line in said[::2]] == found
    assert (
        total.startswith("30 rollouts") and f"repetition {found_of('repetition', found)}" in total
    )

    # One rule alone; a rule that is not there, and a file that is none.
    fd.main([f"--ask={tmp_path}/t.jsonl", "--rules=unavailable_tool"])
    *said, total = capsys.readouterr().out.splitlines()
    assert len(said) == 2 * found_of("unavailable_tool", found) and "repetition" not in total
    path = tmp_path / "t.jsonl"
    assert "no such rule" in refuse(fd.main, [f"--ask={path}", "--rules=taste"], capsys)
    assert "cannot be read" in refuse(fd.main, [f"--ask={tmp_path}/none"], capsys)
    path.write_bytes(b"\xff\x00")
    assert "line 1" in refuse(fd.main, [f"--ask={path}"], capsys)
    path.write_text("{}\n")
    assert "line 1" in refuse(fd.main, [f"--ask={path}"], capsys)


def found_of(kind, found):
    return sum(name == kind for name, _ in found)
