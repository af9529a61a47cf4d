"""Extend a function by the step that the docs and a red test ask for."""

from dataclasses import replace

from world.kinds.put_back import Beginning
from world.kinds.repair import Repair


class Extend(Repair):
    """Functions lack their last step. The expert works as in a repair: the line that differs is the
    return, and the step goes above it."""

    unnamed = "Some functions lack a step that docs.md has. Find them and add it."
    done = "Extended"

    def ask(self, target, where):
        """The sentence that names the function."""
        return f"Add the step that `{target.module}.{target.name}` lacks. See docs.md."

    def begin(self, codebase, targets, rng, delete):
        """See kinds/put_back.py. The agent gets each target without its last step."""
        given = dict(codebase)
        for target in targets:
            path, shorter = f"{target.module}.py", replace(target, steps=target.steps[:-1])
            given[path] = given[path].replace(target.code(), shorter.code())
        return Beginning(codebase, given)
