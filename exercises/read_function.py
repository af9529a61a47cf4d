"""6. One more tool.   world/tools.py, synth_tasks.py, world/expert.py, world/kinds/   25 lines

Who repairs a function reads its whole module: in a real repository that is a page, and it stays in
the context until a summary. Write the tool `read_function(path, name)`, which shows one function of
a file, and a ToolError where there is none. `draw_tools` offers it in every other task of a kind
that needs read_file. The expert of world/kinds/repair.py looks with it at the code of its target
where it is offered. `call_missing_tool` draws from all tools that are not offered: as lint, the new
one is left out there, or demonstrations would call it where it does not exist.

    python -m pytest exercises/read_function.py    red before, green after
    python train.py --stage=sft --levels=8 --demos=1000 --steps=20 --start_from=assets/sft \\
        --out=out/read_function

Number to reach: of the tasks 0 to 199 of level 8, those that offer it cost a careful expert 69
tokens of outputs; without the tool the same tasks cost 90. Look at: after the 20 steps of the
command the policy names it right in some calls and wrong in more of them ("read_fion"). How many
steps does it take until it has learned to write the name?
"""

import random

import pytest

import rollout
from repositories.verdict import judge
from rollout import Limits, Tokenizer
from synth_tasks import make_task
from world.expert import InMemoryWorkspace
from world.sandbox import Sandbox
from world.task import Task
from world.tools import call_tool
from world.workspace import Workspace

BYTES = Tokenizer({bytes([b]): b for b in range(256)})
NAME = "read_function"
CODE = "def f(x):\n    y = x\n\n    return y\n\n\ndef f_g(x):\n    return f(x)\n"


@pytest.mark.parametrize("make_workspace", [InMemoryWorkspace, Workspace])
def test_the_tool_shows_one_function(make_workspace):
    task = Task("t", "Look.", {"a.py": CODE}, {}, tools=(NAME,))
    workspace = make_workspace(task)
    assert call_tool(workspace, NAME, ("a.py", "f")) == (
        "def f(x):\n    y = x\n\n    return y",
        "",
    )
    assert call_tool(workspace, NAME, ("a.py", "f_g"))[0] == "def f_g(x):\n    return f(x)"
    for arguments in (("a.py", "g"), ("a.py", "y"), ("b.py", "f")):
        assert call_tool(workspace, NAME, arguments)[1] == "failed"


def offered(level, number):
    tasks = [make_task(level, seed) for seed in range(number)]
    return [task for task in tasks if NAME in task.tools]


def test_a_task_says_that_it_offers_the_tool():
    tasks = offered(8, 40)
    assert 10 < len(tasks) < 30
    for task in tasks:
        assert f" {NAME}" in task.problem_statement.split("\nTools:")[1].split("\n")[0]
    # Who puts back what is gone has no use for it.
    assert not offered(1, 40)


def demonstrate(task, seed, sloppy):
    return rollout.demonstrate(task, BYTES, random.Random(seed), Limits(6000), sloppy)


def test_a_careful_expert_uses_it_and_solves_what_it_solved_before():
    sandbox = Sandbox()
    for level in (8, 11):
        for seed, task in enumerate(offered(level, 12)):
            played = demonstrate(task, seed, 0)
            calls = [call for turn in played.turns for call in turn.calls]
            names = [call.name for call in calls]
            assert NAME in names and not any(call.error for call in calls)
            assert not any(call.name == "read_file" and call.args[0] != "docs.md" for call in calls)
            assert judge(task, played.files, sandbox).solved


def test_it_is_called_nowhere_else():
    """By a sloppy expert, who calls tools that do not exist"""
    for seed in range(60):
        task = make_task((1, 8)[seed % 2], seed)
        for turn in demonstrate(task, seed, 3).turns:
            assert NAME in task.tools or NAME not in [call.name for call in turn.calls]
