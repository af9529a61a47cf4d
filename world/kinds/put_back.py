"""Put back what was deleted: the kind of which Cursor tells (feature deletion)."""

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


class PutBack:
    """Functions are gone, with their signatures."""

    unnamed = "Some functions are missing. Find them and put them back."
    done = "Put back"
    red_line = r"^(\w+\.\w+): missing"
    needs = ()

    def ask(self, target, where):
        """The sentence that names the function and says where its specification is."""
        endings = {
            "prompt": f": {target.phrase()}.",
            "docs": ". See docs.md.",
            "tests": ". See tests.py.",
        }
        return f"Put back `{target.module}.{target.name}`{endings[where]}"

    def begin(self, codebase, targets, rng, delete):
        """The Beginning. codebase: path -> text, with the targets; delete: codebase -> the codebase
        without them."""
        return Beginning(codebase, delete(codebase))

    def solve(self, expert, group):
        """Looks up what has to be looked up for these targets, then writes all of them."""
        lookups = [expert.lookup(target) for target in group]
        lookups = [call for call in lookups if call]
        if lookups:
            yield from expert.turn(f"Look up {group[0].name}.", *lookups)
        edits = [expert.write(target) for target in group]
        yield from expert.turn(f"Write {group[0].name}.", *edits)
