"""tools.py: the tools, as the agent calls them.

A tool is one function with its docstring. Its first parameter is the workspace; the others are the
arguments that the agent gives, all of them texts. What is known of a tool anywhere comes from this
function:

    its name and arguments    the prompt's list of tools, the check of a call, the detectors' hints
    its docstring             what a published model is told of it (`tool_schema`)
    its body                  what a call does; a ToolError is for the agent to read

So a tool more is one function here:

    @tool
    def count_lines(workspace, path):
        \"\"\"Says how many lines a file has.\"\"\"
        return str(len(workspace.read(path).splitlines()))

A task offers its `tools`, and to an agent the others do not exist. Which ones a generated task
offers is drawn in synth_tasks.draw_tools: without a line there nobody is offered a new tool. What
the demonstrations do with a tool is written in world/expert.py.

A workspace is a real folder (world/workspace.py) or a dictionary (`InMemoryWorkspace` in
world/expert.py).
The names of the first four are Cursor's: read_file, edit_file, run_command, search_codebase; lint
is what Cursor's agents collect, too.

Standard library only.
"""

import inspect

from world.edits import ToolError

# name -> the function, and name -> the names of its arguments; filled by @tool
FUNCTIONS, ARGUMENTS = {}, {}


def tool(function):
    """Registers a function as a tool, under its own name and the names of its arguments."""
    if not function.__doc__:
        raise ValueError(f"{function.__name__}: its docstring is what an agent is told of it")
    FUNCTIONS[function.__name__] = function
    ARGUMENTS[function.__name__] = tuple(inspect.signature(function).parameters)[1:]
    return function


# ---------------------------------------------------------------- the tools


@tool
def edit_file(workspace, path, old, new):
    """Puts `new` in the place of `old`, which must stand in the file once; an empty `old` appends
    to it, or makes it."""
    return workspace.edit(path, old, new)


@tool
def read_file(workspace, path):
    """Shows a file."""
    return workspace.read(path)


@tool
def run_command(workspace, command):
    """Runs a command in the repository and shows what it prints."""
    result = workspace.run(command)
    return result.output.rstrip("\n") or f"exit code {result.exit_code}"


@tool
def search_codebase(workspace, query):
    """Shows the lines that hold the query."""
    return workspace.search(query)


@tool
def lint(workspace):
    """Says what is wrong with the Python files that were changed, without running them."""
    return workspace.lint()


# ---------------------------------------------------------------- what all of them share

# the tools of a task that does not say which
TOOLS = tuple(FUNCTIONS)


def call_tool(workspace, name, arguments):
    """(output, error) of a call by an agent: error is "" or "unknown_tool", "bad_arguments",
    "failed"."""
    if name not in workspace.task.tools or name not in FUNCTIONS:
        return f"Tool not found: {name}", "unknown_tool"
    wanted = len(ARGUMENTS[name])
    if len(arguments) != wanted:
        return f"{name} takes {wanted} arguments, not {len(arguments)}", "bad_arguments"
    try:
        return FUNCTIONS[name](workspace, *arguments), ""
    except ToolError as error:
        return str(error), "failed"


def tool_schema(name):
    """The description of a tool for the chat template of a published model: name, purpose, and the
    JSON schema of its arguments."""
    # All arguments are texts, and none can be left out.
    properties = {argument: {"type": "string"} for argument in ARGUMENTS[name]}
    return {
        "name": name,
        "description": " ".join(FUNCTIONS[name].__doc__.split()),
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": list(ARGUMENTS[name]),
        },
    }


def name_arguments(name, args):
    """{name: argument} of a call. Arguments that the tool does not have are named by numbers from
    0 on."""
    return dict(zip((*ARGUMENTS.get(name, ()), *map(str, range(99))), args))
