"""What a kind of task makes of a codebase."""

from dataclasses import dataclass, field


@dataclass
class Beginning:
    """Two states of a codebase, path -> text each, and what is judged beside the targets' values:
    names that may stand in no file at the end, and further calls [module, function, arguments,
    expected value]."""

    done: dict  # as it is to be, with tests that pass
    given: dict  # as the agent is given it
    gone: list = field(default_factory=list)
    cases: list = field(default_factory=list)
