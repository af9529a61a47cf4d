"""tools.py: the tools, as the agent calls them.

HEAD
"""

from world.edits import ToolError
from world.task import ARGUMENTS


def call_tool(workspace, name, arguments):
    """(output, error): error is "" or "unknown_tool", "bad_arguments", "failed"."""
    names = {
        "read_file": workspace.read,
        "edit_file": workspace.edit,
        "search_codebase": workspace.search,
        "run_command": lambda command: said(workspace.run(command)),
    }
    if name not in workspace.task.tools or name not in names:
        return f"Tool not found: {name}", "unknown_tool"
    if len(arguments) != len(ARGUMENTS[name]):
        return (
            f"{name} takes {len(ARGUMENTS[name])} arguments, not {len(arguments)}",
            "bad_arguments",
        )
    try:
        return names[name](*arguments), ""
    except ToolError as error:
        return str(error), "failed"


def said(result):
    return result.output.rstrip("\n") or f"exit code {result.exit_code}"
