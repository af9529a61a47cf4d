"""Repair what is wrong: a step, a constant, an operation or the reduction."""

from world.kinds.put_back import Beginning
from world.micro import near_misses


class Repair:
    """Functions are there and give wrong values."""

    unnamed = "Some functions are wrong. Find them and repair them."
    done = "Repaired"
    red_line = r"^(\w+\.\w+)\(.*: failed"
    needs = ("read_file", "search_codebase")

    def ask(self, target, where):
        """The sentence that names the function."""
        return f"`{target.module}.{target.name}` is wrong. Repair it. See docs.md."

    def begin(self, codebase, targets, rng, delete):
        """See kinds/put_back.py. The agent gets a near miss in the place of each target."""
        given = dict(codebase)
        for target in targets:
            # As many lines, so that one of them is wrong and none is missing.
            misses = []
            for miss in near_misses(target, rng):
                if len(miss.steps) == len(target.steps) and miss.lines() != target.lines():
                    misses.append(miss)
            path = f"{target.module}.py"
            given[path] = given[path].replace(target.code(), rng.choice(misses).code())
        return Beginning(codebase, given)

    def solve(self, expert, group):
        """Looks up the specifications and reads the code, then puts the wrong lines right."""
        # Once more where a summary has taken out of sight what was read.
        for _ in range(2):
            segment = expert.segment
            lookups = [expert.lookup(target, sure=True) for target in group]
            reads = [expert.read_module(target.module) for target in group]
            calls = [call for call in [*lookups, *dict.fromkeys(reads)] if call]
            if calls:
                yield from expert.turn(f"Look at {group[0].name}.", *calls)
            if expert.segment == segment:
                break
        edits = [expert.mend(target) for target in group]
        yield from expert.turn(f"Repair {group[0].name}.", *edits)
