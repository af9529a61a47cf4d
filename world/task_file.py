"""task_file.py: a file of tasks, one line of JSON each.

`instance` writes a line with SWE-bench's fields beside our own. `read_tasks` reads a file that may
come from a stranger: every path stays inside its tree, every test that is named can be found, and
no id comes twice. What does not hold is refused with the number of its line.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from world import suite as suites
from world.files import unified
from world.source import find_test
from world.task import Refusal, Task
from world.tools import FUNCTIONS


def instance(task, original):
    """One JSON line with SWE-bench's fields beside our own: patch restores the feature, test_patch
    the hidden tests."""
    solved, pristine = {**task.files, **task.solution}, {**task.files, **task.meta["pristine"]}
    extra = dict(
        repo=task.meta["repo"],
        patch=unified(task.files, solved),
        test_patch=unified(task.files, pristine),
    )
    return json.dumps({**asdict(task), **extra})


def read_tasks(path):
    """The tasks of a file; a broken line is refused with its number, and so is one whose id an
    earlier line has: results are kept by id, so the two would be counted as one."""
    tasks, seen = [], {}
    try:
        # others than \n may stand inside a string
        lines = Path(path).read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
        lines = lines if lines != [""] else []
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{path}: cannot be read ({type(error).__name__})") from None
    for number, line in enumerate(lines, 1):
        try:
            tasks.append(Task.from_json(line))
            files, solution, meta = tasks[-1].files, tasks[-1].solution, tasks[-1].meta
            assert (
                isinstance(tasks[-1].problem_statement, str)
                and isinstance(tasks[-1].hidden, list)
                and type(tasks[-1].level) is int
            )
            assert isinstance(tasks[-1].instance_id, str) and isinstance(
                tasks[-1].test_command, str
            )
            assert set(tasks[-1].tools) <= FUNCTIONS.keys() and isinstance(
                meta.get("style", []), list
            )
            for place, text in (
                item
                for tree in (files, solution, meta.get("pristine", {}))
                for item in tree.items()
            ):
                assert not (os.path.isabs(place) or ".." in Path(place).parts or "\0" in place)
                place.encode("utf-8", "surrogateescape"), text.encode("utf-8", "surrogateescape")
            if "repo" in meta:
                assert all(
                    find_test(meta["pristine"][group.split("::")[0]], group)
                    for group in meta["hidden_groups"]
                )
                assert all(node.split("[")[0] in meta["hidden_groups"] for node in tasks[-1].hidden)
                tests = {**files, **meta["pristine"]}
                for group, sites in meta.get("twins", {}).items():
                    assert find_test(tests[group.split("::")[0]], group)
                    assert isinstance(sites, list) and all(type(site) is int for site in sites)
                assert all(isinstance(name, str) for name in meta.get("names", []))
                required = (
                    tasks[-1].FAIL_TO_PASS + tasks[-1].PASS_TO_PASS + meta.get("ERROR_TO_PASS", [])
                )
                assert all(isinstance(node, str) for node in required)
                suites.plan_of_task(meta.get("suite"))
            else:
                assert {"tests.py", "check.py"} <= files.keys()
                assert all(
                    isinstance(module + name, str) and isinstance(words, list) and words
                    for module, name, words, _ in tasks[-1].hidden + meta["visible"]
                )
        except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError):
            raise Refusal(f"{path}: line {number} is no task") from None
        name = tasks[-1].instance_id
        if name in seen:
            raise Refusal(
                f"{path}: line {number} has the id of line {seen[name]}, {name!r}: give each task an id of its own"
            )
        seen[name] = number
    return tasks
