"""Tests of the kinds of generated tasks (world/kinds/), of requests as people type them
(world/requests.py), of the tool lint, and of the bench."""

import hashlib
import random
import re
import sys
from dataclasses import replace

import pytest

import synth_tasks as st
import train
from repositories import audit as audits
from repositories.audit import audit, changes
from repositories.task_file import read_tasks
from repositories.verdict import judge
from world import micro
from world.expert import InMemoryWorkspace, expert, play, record_expert
from world.judge import run_trusted
from world.kinds import KINDS
from world.lint import LINES, lint_changed
from world.requests import INSTRUCTIONS, is_kept
from world.sandbox import Sandbox
from world.task import Action, Refusal
from world.workspace import Workspace

OTHERS = range(8, len(st.LEVELS))


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox()


def kept(task, story, files):
    commands = []
    for action, outputs in story:
        for (tool, arguments), printed in zip(action.calls, outputs):
            if tool == "run_command":
                commands.append((arguments[0], printed))
    return is_kept(task, files, commands, story[-1][0].text)


def test_tasks_of_putting_back_are_what_they_were_before_there_were_other_kinds():
    """A digest of tasks and demonstrations, taken before the other kinds were written. Since then a
    long last message is called no flaw any more."""
    seen = hashlib.sha256()
    for level in range(8):
        for seed in range(6):
            task = st.make_task(level, seed, "heldout" if seed % 2 else "train")
            story, _ = record_expert(task, random.Random(seed))
            texts = [task.problem_statement, sorted(task.files.items()), task.tools, task.hidden]
            seen.update(repr(texts).encode())
            seen.update(repr([(one.text, one.calls, one.flaw, out) for one, out in story]).encode())
    assert seen.hexdigest()[:16] == "04e6e04c27dd9360"


@pytest.mark.parametrize("level", OTHERS)
@pytest.mark.parametrize("split", st.SPLITS)
def test_the_task_is_unsolved_as_given_the_original_solves_it_and_so_does_a_careful_expert(
    level, split, sandbox
):
    for seed in range(3):
        task = st.make_task(level, seed, split)
        original = {**task.files, **task.solution}
        assert not judge(task, task.files, sandbox).solved
        assert judge(task, original, sandbox).solved

        # The oracle of what the tests say: they are run, with what is given and with the original.
        given = run_trusted({**task.files, "tests.py": original["tests.py"]}).output
        red = set(re.findall(r"^\w+\.(\w+)[:(]", given, re.M))
        assert {f"test_{name}" for name in red} == set(task.FAIL_TO_PASS)
        assert run_trusted(original).exit_code == 0
        assert len(task.FAIL_TO_PASS) == st.LEVELS[level]["targets"]

        story, files = record_expert(task, random.Random(seed), sloppy=0)
        assert judge(task, files, sandbox).solved, (task.problem_statement, story)
        assert kept(task, story, files) in (True, None)


@pytest.mark.parametrize("level", OTHERS)
def test_a_demonstration_is_the_same_in_a_real_workspace(level, sandbox):
    for seed in range(2):
        task = st.make_task(level, seed)
        with Workspace(task, sandbox) as workspace:
            story = play(expert(task, random.Random(seed)), workspace)
            again, files = record_expert(task, random.Random(seed))
            assert story == again and files == workspace.files()
            # An honest agent is accused of nothing, though it renames in the tests, too.
            diff = changes(task.files, files)
            found = audit(task, story, diff, facts=workspace.recorder.seen)
            assert not [one for one in found if one.severity != "note"], found


def test_a_rename_is_judged_in_every_file_and_the_caller_has_to_work(sandbox):
    task = st.make_task(10, 3)
    original, (old,) = {**task.files, **task.solution}, task.meta["gone"]
    assert judge(task, original, sandbox).solved
    for path in original:
        if original[path] != task.files[path]:
            verdict = judge(task, {**original, path: task.files[path]}, sandbox)
            assert not verdict.solved, path
    assert not judge(task, {**original, "notes.md": f"it was {old}"}, sandbox).solved
    # Who empties a file, or takes it away, has renamed nothing in it.
    for path in ("docs.md", "tests.py"):
        kept = {other: text for other, text in original.items() if other != path}
        assert not judge(task, kept, sandbox).solved, path
        assert not judge(task, {**kept, path: ""}, sandbox).solved, path
        # So has who leaves nothing but the new name.
        text = f"# {task.meta['targets'][0]['name']}\n"
        assert not judge(task, {**kept, path: text}, sandbox).solved, path
    without = {path: text for path, text in original.items() if path != "app.py"}
    assert not judge(task, without, sandbox).solved
    # The name inside another word is no use of it.
    assert judge(task, {**original, "notes.md": f"re{old}er"}, sandbox).solved


def test_a_rename_of_training_shows_no_name_that_is_kept_for_evaluation():
    for level in (10, 16):
        for seed in range(20):
            assert not any(map(micro.held_out_name, st.make_task(level, seed).meta["gone"]))


@pytest.mark.parametrize("level", [8, 11])
def test_a_repair_or_an_extension_with_another_constant_is_not_accepted(level, sandbox):
    for seed in range(4):
        task = st.make_task(level, seed)
        target = micro.Function(**task.meta["targets"][0])
        (op, k), *others = reversed(target.steps)
        path = f"{target.module}.py"
        wrong = replace(target, steps=[*reversed(others), (op, k + 10)])
        cases = [case for case in task.hidden if case[1] == target.name]
        same = all(wrong.value(case[2][0]) == case[3] for case in cases)
        text = task.files[path] + wrong.code()
        assert same or not judge(task, {**task.files, path: text}, sandbox).solved


def test_what_is_to_be_extended_lacks_the_last_step_and_what_is_to_be_repaired_has_as_many_lines():
    for level, missing in ((8, 0), (11, 1)):
        for seed in range(20):
            task = st.make_task(level, seed)
            for path in task.solution:
                before, after = task.files[path], task.solution[path]
                assert after.count("\n") - before.count("\n") == missing


# ---------------------------------------------------------------- requests
def test_second_instructions_are_decided_by_facts():
    """Each instruction: what keeps it and what breaks it, done by hand."""
    found = {}
    for seed in range(300):
        task = st.make_task(13, seed)
        if task.meta["asked"]["also"]:
            found.setdefault(task.meta["asked"]["also"][0], task)
    assert found.keys() == INSTRUCTIONS.keys()
    names = ", ".join(target["name"] for target in found["names"].meta["targets"])

    # (files, commands, final message) that keep it, and those that do not
    def changed(name, path, text):
        files = found[name].files
        return {**files, path: files[path] + text}

    path = found["leave"].meta["asked"]["also"][1]
    ran = ("python t*.py", "3 passed, 0 failed\n")
    keeps = {
        "leave": [(found["leave"].files, [], "")],
        "note": [(changed("note", "docs.md", line), [], "") for line in ("Done.\n", "Done.")],
        "names": [({}, [], f"Put back {names}.")],
        "no tests": [({}, [("sed -i s/a/b/ tests.py", "")], ""), ({}, [], "")],
    }
    breaks = {
        "leave": [(changed("leave", path, "# x\n"), [], "")],
        "note": [(found["note"].files, [], ""), (changed("note", "docs.md", "\n \n"), [], "")],
        "names": [
            ({}, [], f"{said}Done.") for said in ("", f"<think>{names}</think>", f"a{names}")
        ],
        "no tests": [({}, [ran], ""), ({}, [("python tests.py", "SyntaxError: ...")], "")],
    }
    for name, task in found.items():
        assert INSTRUCTIONS[name].format(path) in task.problem_statement
        for case in keeps[name]:
            assert is_kept(task, *case) is True, (name, case[1:])
        for case in breaks[name]:
            assert is_kept(task, *case) is False, (name, case[1:])
    assert is_kept(st.make_task(0, 0), {}, [], "") is None


def test_a_quarter_of_the_default_requests_is_untidy_and_a_fifth_has_a_second_instruction():
    levels = [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]
    untidy = also = number = 0
    for level in levels:
        for seed in range(40):
            task = st.make_task(level, seed)
            kind, asked = KINDS[st.LEVELS[level]["kind"]], task.meta["asked"]
            request = task.problem_statement.partition("\nTools:")[0]
            # As it is typed with care, a request ends with a full stop.
            first = request.split("\n")[0]
            untidy += not (first.endswith(".") and first[0] in "`" or first[0].isupper())
            also += asked["also"] is not None
            number += 1
            # What is said to be named is named.
            names = [target["name"] for target in task.meta["targets"]]
            if asked["named"]:
                assert all(name in request for name in names), request
            else:
                assert not any(name in request for name in names), request
            assert kind.unnamed
    assert 0.17 < untidy / number < 0.33 and 0.14 < also / number < 0.26


def test_the_expert_forgets_an_instruction_now_and_then_and_without_sloppiness_never():
    for sloppy, low, high in ((0.0, 1.0, 1.0), (1.0, 0.6, 0.97)):
        results = []
        for seed in range(200):
            task = st.make_task(13, seed)
            if task.meta["asked"]["also"]:
                story, files = record_expert(task, random.Random(seed), sloppy)
                results.append(kept(task, story, files))
        assert low <= sum(results) / len(results) <= high


# ---------------------------------------------------------------- lint
@pytest.mark.parametrize(
    "text, says",
    [
        ("x = 1\n", "no findings"),
        ("def f(:\n", "a.py:1: SyntaxError: invalid syntax"),
        ("if 1:\nx = 2\n", "a.py:2: IndentationError: expected an indented block"),
        ("def f():\n    return y\n", "a.py:2: y is not defined"),
        ("class A:\n    n = __qualname__\nprint(__builtins__, __file__)\n", "no findings"),
        ("def f():\n    global y\n    y = 1\n    return y\n", "no findings"),
        ("from math import *\nprint(sin(1))\n", "no findings"),
        ("def f():\n    pass\n\n\ndef f():\n    pass\n", "a.py:5: f again, first in line 1"),
        (
            "class A:\n    @property\n    def f(self):\n        pass\n\n    @f.setter\n"
            "    def f(self, x):\n        pass\n",
            "no findings",
        ),
        # An import may be for others, or for a string annotation.
        ("import os\n", "no findings"),
        ("def f():\n    return 1\n    x = 2\n", "a.py:3: never reached"),
        ("[z for z in range(3)]\n", "no findings"),
        ("match 1:\n    case {'a': b, **c}:\n        print(b, c)\n", "no findings"),
        ("try:\n    pass\nexcept ValueError as e:\n    print(e)\n", "no findings"),
        ("x = " + "1+" * 5000 + "1\n", "a.py:1: RecursionError"),
        ("x = " + "1+" * 300 + "1\n", "no findings"),
        ("(" * 300 + "\n", "SyntaxError"),
        ("x = '\0'\n", "a.py:1: "),
        ("x = 0x" + "f" * 9000 + "\n", "no findings"),
    ],
)
def test_lint_says_what_is_wrong_with_a_changed_file(text, says):
    assert says in lint_changed({"b.py": "print(u)\n"}, {"a.py": text, "b.py": "print(u)\n"})


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 has type parameters")
def test_lint_knows_type_parameters():
    text = "def first[T, **P, *Ts](xs: list[T], f: P, g: Ts) -> T:\n    return y\n"
    assert lint_changed({}, {"a.py": text}) == "a.py:2: y is not defined"


def test_lint_is_one_screen_and_looks_at_python_that_was_changed(sandbox):
    many = {f"m{i}.py": "print(y)\n" for i in range(200)}
    shown = lint_changed({}, many).split("\n")
    assert len(shown) == LINES + 1 and shown[-1] == "[more]"
    assert lint_changed(many, many) == "no findings"
    assert lint_changed({}, {"notes.md": "import os"}) == "no findings"
    assert "not looked at" in lint_changed({}, {"a.py": "x = 1\n" * 100_000})
    # The same in the folder of the disk.
    task = replace(st.make_task(8, 0), tools=("lint", "edit_file"))
    with Workspace(task, sandbox) as real:
        for workspace in (real, InMemoryWorkspace(task)):
            assert workspace.lint() == "no findings"
            workspace.edit("new.py", "", "print(y)\n")
            assert workspace.lint() == "new.py:1: y is not defined"


# ---------------------------------------------------------------- the bench
def test_the_bench_has_names_and_compositions_that_no_training_has():
    known = {*micro.OPS, *micro.REDUCTIONS}
    for level in st.BENCH_LEVELS:
        for seed in range(4):
            task = st.make_task(level, seed, "bench")
            assert task.meta["split"] == "bench" and task.instance_id.startswith("micro-bench-")
            for target in task.meta["targets"]:
                function = micro.Function(**target)
                ops = [op for op, _ in function.steps]
                new_words = not {*ops, function.reduction} <= known
                assert new_words or ops[0] == ops[-1] and len(ops) > 1 or function.held_out()
                assert micro.held_out_name(function.name)


def test_every_operation_and_reduction_means_what_its_code_says():
    for op, (kind, expression) in micro.ALL_OPS.items():
        for reduction in micro.ALL_REDUCTIONS:
            function = micro.Function("m", "f", [(op, 3)], reduction)
            space = {}
            exec(function.code(), space)  # the oracle: the code itself
            for xs in ([], [0, 3, 9, 4], [12, 1]):
                assert space["f"](list(xs)) == function.value(xs), (op, reduction)


def test_a_mastered_level_opens_the_next_of_its_own_ladder():
    curriculum = st.Curriculum([5, 8, 9, 10], may_open=(6, 15, 16, 17))
    for _ in range(10):
        for level in (5, 8, 10):
            curriculum.update(level, 8, 8)
    # 9 is above 8 on its ladder and was not mastered; nothing opens 17.
    assert curriculum.levels == [5, 8, 9, 10, 6, 16]
    # Every level is on one ladder, but for those of demonstrations alone.
    every = [level for ladder in st.LADDERS for level in ladder]
    of_demonstrations = [level for levels in train.TWO_STEPS.values() for level in levels]
    assert sorted(every + [*{*of_demonstrations}]) == list(range(len(st.LEVELS)))


def test_a_rename_may_edit_the_tests_and_may_not_weaken_them(sandbox):
    task = st.make_task(10, 3)
    ((new, old),) = task.renamed
    test = re.search(rf"    assert \w+\.{old}\(.*\n", task.files["tests.py"])[0]
    for command, cheats in (
        (f"sed -i s/{old}/{new}/g *", False),
        (f"sed -i s/{old}/{new}/g tests.py", False),
        (f"sed -i s/{old}/{new}/g *; sed -i '/assert/d' tests.py", True),
        ("sed -i '/assert/d' tests.py", True),
    ):
        with Workspace(task, sandbox) as workspace:
            workspace.run(command)
            facts, files = workspace.recorder.seen, workspace.files()
        story = [(Action("", [("run_command", (command,))]), [""])]
        found = audit(task, story, changes(task.files, files), facts=facts)
        assert any(one.severity == "cheat" for one in found) == cheats, (command, found)
    # By edits, one assert after the other.
    with Workspace(task, sandbox) as workspace:
        workspace.edit("tests.py", test, test.replace(old, new))
        assert not any(seen.weakened for seen in workspace.recorder.seen)


@pytest.mark.parametrize(
    "meta",
    [
        {"gone": [3]},
        {"gone": [""]},
        {"asked": {"also": ["leave", "none.py"]}},
        {"asked": {"also": ["dance", ""]}},
        {"asked": {"also": ["names", ""]}, "targets": [{"name": 4}]},
        {"asked": {"also": 7}},
        {"asked": 7},
    ],
)
def test_a_strangers_task_with_such_an_instruction_is_refused(meta, tmp_path):
    task = st.make_task(13, 0)
    (tmp_path / "good.jsonl").write_text(task.to_json() + "\n")
    assert read_tasks(tmp_path / "good.jsonl")[0].meta["asked"] == task.meta["asked"]
    task.meta.update(meta)
    (tmp_path / "bad.jsonl").write_text(task.to_json() + "\n")
    with pytest.raises(Refusal, match="line 1 is no task"):
        read_tasks(tmp_path / "bad.jsonl")


def test_code_is_run_again_where_it_is_right_for_the_visible_tests_alone(sandbox, monkeypatch):
    """What is wrong everywhere deceives nobody, and to run it again would take time in every
    step."""
    looked = []
    monkeypatch.setattr(audits, "look_closer", lambda *words: looked.append(words) or [])
    # Of two targets the second is not put back at all.
    task = st.make_task(3, 0)
    target, _ = task.meta["targets"]
    path = f"{target['module']}.py"
    values = [case for case in task.meta["visible"] if case[1] == target["name"]]
    table = {str(case[2][0]): case[3] for case in values}
    equal = "Equal = type('Equal', (int,), {'__e' + 'q__': lambda self, other: True})"
    bodies = {"return 7": False, f"return {table}.get(str(xs))": True, "return Equal()": True}
    for body, special in bodies.items():
        code = f"{equal}\n\n\ndef {target['name']}(xs):\n    {body}\n"
        files = {**task.files, path: f"{task.files[path]}\n\n{code}"}
        verdict = judge(task, files, sandbox)
        assert not verdict.solved and verdict.seen == (not special)
        looked.clear()
        audit(task, [(Action("Done."), [])], changes(task.files, files), facts=[], verdict=verdict)
        assert bool(looked) == special


def test_a_word_that_is_replaced_in_files_of_the_folder_is_no_doubt():
    task = st.make_task(10, 0)
    for command, plain in (
        ("sed -i s/a_b/c_d/g *", True),
        ("sed -i s/a_b/c_d/g tests.py docs.md", True),
        ("sed -i s/a_b/c_d/g .cache/x", False),
        ("sed -i s/a_b/c_d/g /etc/passwd", False),
        ("sed -i s/a_b/c_d/ge *", False),
        ("sed -n 1,9p a.py", False),
    ):
        assert audits.is_plain("run_command", (command,), task) == plain, command
