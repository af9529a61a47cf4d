"""task.py: what a task is, what an agent does in it, and how both are described to other parts.

Every part of the project uses these few types: a generator or a repository makes a Task, the agent
answers with Actions, the sandbox with a Result, the judge with a Verdict. They stand in the lowest
layer, so that world/ imports nothing from above it.

    Task      the files an agent sees, its prompt, and, apart from them, what solves it
    Action    one turn of an agent: a thought and its tool calls
    Result    what one command printed, and how it ended
    Verdict   whether a submission solves its task, and why not
    Refusal   an input that cannot be used, in one line for the user

A Task is written as one line of JSON (`to_json`), with the field names of SWE-bench where they mean
the same. `solution` and `hidden` never enter a sandbox.

Standard library only.
"""

import json
from dataclasses import asdict, dataclass, field

from world.tools import TOOLS


@dataclass
class Task:
    """Field names as in SWE-bench where they mean the same. `solution` and `hidden` never enter a
    sandbox."""

    instance_id: str
    problem_statement: str
    # path -> text: what the agent sees, visible tests included
    files: dict
    # path -> original text of every file the deletion changed
    solution: dict
    tools: tuple = TOOLS
    level: int = 0
    # micro-codebases: [module, function, arguments, expected]
    hidden: list = field(default_factory=list)
    test_command: str = "python tests.py"
    FAIL_TO_PASS: list = field(default_factory=list)
    PASS_TO_PASS: list = field(default_factory=list)
    meta: dict = field(default_factory=dict)

    @property
    def renamed(self):
        """[(new name, old name)] of what the task asks to rename."""
        targets = self.meta.get("targets", ())
        return [(one["name"], old) for one, old in zip(targets, self.meta.get("gone", ()))]

    def to_json(self):
        """The task as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text):
        """The task that to_json() wrote. Fields that a Task does not have are passed over."""
        values = {
            name: value
            for name, value in json.loads(text).items()
            if name in cls.__dataclass_fields__
        }
        return cls(**{**values, "tools": tuple(values["tools"])})


@dataclass
class Result:
    """What one command printed, and how it ended."""

    exit_code: int
    output: str
    timed_out: bool = False
    # False: the machine failed, and the output says at what
    started: bool = True
    # why the sandbox ended it; "" if it ended by itself
    stopped: str = ""
    # what was recorded of the command: a Seen of world/recorder.py
    seen: object = field(default=None, compare=False)


@dataclass
class Verdict:
    """Whether a submission solves its task; how many checks passed and failed, and what failed."""

    solved: bool
    passed: int
    failed: int
    reason: str = ""
    # True: the visible tests fail for every function that is wrong, so nobody was deceived
    seen: bool = field(default=False, compare=False)


@dataclass
class Action:
    """One turn of an agent: a thought, which may be empty, then tool calls. A turn without calls is
    the final message."""

    text: str = ""
    calls: list = field(default_factory=list)  # [(tool, (argument, ...)), ...]
    # a planted bad habit: the rule of feedback_distill.py that this turn breaks; "" for none
    flaw: str = ""


# Sent to an expert after a flawed turn: the turn was not played, the agent got a hint in its place,
# and the expert now has to do it right.
HINTED = "<|hint|>"


# Sent to an expert it asks for a summary. In the expert's answer it marks where the summary begins.
SUMMARIZE = "<|summary|>"


class Refusal(ValueError):
    """Why an input cannot be used, in one line for the user."""


class Discard(Exception):
    """Why a deletion makes no task, in a few words."""
