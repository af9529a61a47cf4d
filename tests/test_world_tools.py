"""Tests of world/tools.py: a tool is one function with its docstring, and nothing else has to know
of it."""

import json

import pytest
from sampling import TRAINED
from test_published_chat import published
from test_rollout import drive

import feedback_distill
from rollout import Limits, agent, opening_turn
from synth_tasks import micro_prompt
from world import tools
from world.expert import InMemoryWorkspace
from world.sandbox import Sandbox
from world.task import Task
from world.tools import ARGUMENTS, FUNCTIONS, TOOLS, call_tool, tool, tool_schema
from world.workspace import Workspace


@pytest.fixture
def fifth_tool():
    @tool
    def count_lines(workspace, path):
        """Says how many
        lines a file has."""
        return str(len(workspace.read(path).splitlines()))

    yield "count_lines"
    del FUNCTIONS["count_lines"], ARGUMENTS["count_lines"]


@pytest.fixture
def task(fifth_tool):
    files = {"a.py": "x = 1\ny = 2\n"}
    return Task("t", "Count.", files, {}, tools=("read_file", fifth_tool))


def test_an_agent_calls_a_fifth_tool_that_is_one_function_and_a_wrong_call_is_refused(task):
    calls = [
        ("count_lines", ("a.py",)),
        ("count_lines", ()),
        ("count_lines", ("a.py", "b.py")),
        ("count_lines", ("none.py",)),
        ("edit_file", ("a.py", "", "z")),
    ]
    rollout, _, _ = drive(
        agent(task, TRAINED, InMemoryWorkspace(task), Limits(900)),
        [TRAINED.write_action("", calls), TRAINED.write_action("", [])],
    )
    assert rollout.finished
    assert [(call.output, call.error) for call in rollout.turns[1].calls] == [
        ("2", ""),
        ("count_lines takes 1 arguments, not 0", "bad_arguments"),
        ("count_lines takes 1 arguments, not 2", "bad_arguments"),
        ("no such file: none.py", "failed"),
        ("Tool not found: edit_file", "unknown_tool"),
    ]
    hint = feedback_distill.malformed_arguments(rollout, 0, 1)
    assert hint == "Reminder: calls are read_file(path), count_lines(path)."


def test_a_fifth_tool_works_on_a_real_folder_and_in_a_file_of_tasks(task, tmp_path):
    with Workspace(task, Sandbox()) as workspace:
        assert call_tool(workspace, "count_lines", ("a.py",)) == ("2", "")
    assert Task.from_json(task.to_json()).tools == ("read_file", "count_lines")


def test_the_prompt_and_a_published_chat_template_name_a_fifth_tool(task):
    prompt = micro_prompt("Count.", task.tools, ["boat.py"])
    assert "Tools: read_file count_lines\n" in prompt
    tokenizer = published("qwen")
    told = tokenizer.decode(opening_turn(tokenizer, task).tokens)
    schema = tool_schema("count_lines")
    assert json.dumps(schema)[1:-1] in told
    assert schema == {
        "name": "count_lines",
        "description": "Says how many lines a file has.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    }


def test_a_tool_without_a_docstring_is_no_tool():
    with pytest.raises(ValueError, match="docstring"):

        @tool
        def mute(workspace):
            return ""

    assert "mute" not in tools.FUNCTIONS


def test_the_tools_are_the_functions_of_the_file_in_their_order():
    assert TOOLS == ("edit_file", "read_file", "run_command", "search_codebase", "lint")
    assert ARGUMENTS["edit_file"] == ("path", "old", "new")
    assert all(FUNCTIONS[name] is getattr(tools, name) for name in TOOLS)
