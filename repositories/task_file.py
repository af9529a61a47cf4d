"""task_file.py: a file of tasks, one line of JSON each.

`instance` writes a line with SWE-bench's fields beside our own. `read_tasks` reads a file that may
come from a stranger. It checks that every path stays inside its tree, that every test that is named
can be found, and that no id comes twice. A line that fails is refused with its number.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from repositories import suite as suites
from world.files import unified
from repositories.mutants import list_changes, lost_names
from repositories.source import file_of_test, find_test, function_of_test
from repositories.verdict import required_tests
from world.requests import INSTRUCTIONS
from world.task import Refusal, Task
from world.tools import FUNCTIONS


def instance(task):
    """One JSON line with SWE-bench's fields beside our own: `patch` restores the feature,
    `test_patch` the hidden tests."""
    solved, pristine = {**task.files, **task.solution}, {**task.files, **task.meta["pristine"]}
    extra = dict(
        repo=task.meta["repo"],
        patch=unified(task.files, solved),
        test_patch=unified(task.files, pristine),
    )
    return json.dumps({**asdict(task), **extra})


def read_tasks(path):
    """The tasks of a file. A Refusal names the line that is broken or that has the id of an earlier
    line: results are kept by id, so the two would be counted as one."""
    # Lines end at \n only: other line ends may stand inside a JSON string.
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{path or '--check'}: cannot be read ({type(error).__name__})") from None
    if lines == [""]:
        return []

    tasks, seen = [], {}
    for number, line in enumerate(lines, 1):
        # Whatever a stranger's line holds, the user reads one sentence and no traceback.
        try:
            task = Task.from_json(line)
            check_task(task)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise Refusal(f"{path}: line {number} is no task") from None

        # The first line with an id keeps it.
        name = task.instance_id
        if name in seen:
            raise Refusal(
                f"{path}: line {number} has the id of line {seen[name]}, {name!r}: "
                "give each task an id of its own"
            )
        seen[name] = number
        tasks.append(task)
    return tasks


def demand(truth):
    """Raises ValueError where something does not hold. An `assert` is left out by python -O."""
    if not truth:
        raise ValueError


def check_task(task):
    """Raises one of the errors that read_tasks expects, unless the task can be played and
    judged."""
    # The fields have the right types.
    texts = (task.problem_statement, task.instance_id, task.test_command)
    demand(all(isinstance(text, str) for text in texts))
    demand(isinstance(task.hidden, list) and type(task.level) is int)
    demand(set(task.tools) <= FUNCTIONS.keys())

    # No path leads out of the tree, and every name and text can be written.
    for tree in (task.files, task.solution, task.meta.get("pristine", {})):
        for path, text in tree.items():
            demand(not os.path.isabs(path) and ".." not in Path(path).parts and "\0" not in path)
            path.encode("utf-8", "surrogateescape")
            text.encode("utf-8", "surrogateescape")

    # What else has to hold depends on where the task comes from.
    if "repo" in task.meta:
        check_repository_task(task)
        return

    # A generated codebase: the judge calls functions by [module, function, arguments, expected].
    demand({"tests.py", "check.py"} <= task.files.keys())
    for module, name, words, _ in task.hidden + task.meta["visible"]:
        demand(isinstance(module + name, str) and isinstance(words, list) and words[0])
        demand(all(type(number) is int for number in words[0]))
    # Beside the tests: names that must be gone, and a second instruction.
    demand(all(isinstance(name, str) and name for name in task.meta.get("gone", ())))
    demand(all(isinstance(one["name"], str) for one in task.meta.get("targets", ())))
    also = task.meta.get("asked", {}).get("also")
    if also:
        name, path = also
        demand(name in INSTRUCTIONS and (name != "leave" or path in task.files))
        demand(name != "note" or "docs.md" in task.files)


def check_repository_task(task):
    """The same check for what only a repository's task has: every test that is named can be
    found."""
    meta = task.meta
    # The hidden tests stand in the pristine files, and every hidden case is one of theirs.
    for group in meta["hidden_groups"]:
        demand(find_test(meta["pristine"][file_of_test(group)], group))
    demand(all(function_of_test(node) in meta["hidden_groups"] for node in task.hidden))

    # The names of the feature are texts. Each test with mutants stands somewhere, and each mutant
    # is a number of one of its changes and a place.
    demand(all(isinstance(name, str) for name in meta["names"]))
    tests = {**task.files, **meta["pristine"]}
    for group, mutants in meta["mutants"].items():
        number = len(list_changes(tests[file_of_test(group)], group, lost_names(meta["names"])))
        for change, place in mutants:
            demand(type(change) is type(place) is int and 0 <= change < number and 0 <= place)

    # The required tests are texts, and the plan has the form of one.
    demand(all(isinstance(node, str) for node in required_tests(task)))
    suites.plan_of_task(meta.get("suite"))
