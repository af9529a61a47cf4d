"""Rename a function in modules, tests and docs."""

from world.kinds.put_back import Beginning
from world.micro import VERBS, held_out_name


class Rename:
    """Functions have another name, which must not stand in any file at the end. One more module
    calls them."""

    unnamed = "Rename"  # a prompt of this kind always names them
    done = "Renamed"
    red_line = r"$^"  # the tests are green from the first on
    needs = ("search_codebase",)

    def ask(self, target, where, old):
        """The sentence that says both names."""
        return f"Rename `{target.module}.{old}` to `{target.name}` in all files."

    def begin(self, codebase, targets, rng, delete):
        """See kinds/put_back.py. The targets have the names that they are to get."""
        # A module that uses them. What it returns is judged, too.
        modules = sorted({target.module for target in targets})
        imports = "".join(f"import {module}\n" for module in modules)
        calls = ", ".join(f"{target.module}.{target.name}(xs)" for target in targets)
        done = {**codebase, "app.py": f"{imports}\n\ndef main(xs):\n    return [{calls}]\n"}
        xs = [rng.randint(0, 12) for _ in range(4)]
        cases = [["app", "main", [xs], [target.value(xs) for target in targets]]]

        # The same with the old names.
        given, gone = dict(done), []
        for target in targets:
            verb, noun = target.name.split("_")
            others = [f"{other}_{noun}" for other in VERBS if other != verb]
            # A training task has no name that is kept for evaluation, the old one included.
            if not held_out_name(target.name):
                others = [name for name in others if not held_out_name(name)]
            old = rng.choice(others)
            given = {path: text.replace(target.name, old) for path, text in given.items()}
            gone.append(old)
        return Beginning(done, given, gone, cases)

    def solve(self, expert, group):
        """Looks where the names stand and replaces them. Flaw: only in the code, not in the
        docs."""
        for target in group:
            old = expert.old_names[target.name]
            if expert.rng.random() < 0.5:
                yield from expert.turn(f"Where is {old}?", ("search_codebase", (old,)))
            files = "*.py" if expert.chance(0.2) else "*"
            command = f"sed -i s/{old}/{target.name}/g {files}"
            yield from expert.turn(f"Rename {old}.", ("run_command", (command,)))
