"""expert.py: a scripted agent that solves generated tasks competently but sloppily.

Its episodes are the demonstrations of supervised fine-tuning. Each flaw is planted on purpose and
has a probability of its own, so that each technique has something to remove: a call to a tool that
is not there, a needless look around, a guessed specification, a wrong constant, a thought left in
the code, a summary that forgets the specification, a final message that rambles.

An agent is a generator: it yields an Action and is sent the outputs of its calls. `play` drives any
agent in any workspace; `InMemoryWorkspace` is a workspace in a dictionary, for agents written here, in
which a turn takes about a millisecond.
"""

import re

from world.careless import stale_cache_path
from world.edits import ToolError, edited
from world.files import matches
from world.judge import run_trusted
from world.micro import NOUNS, OPS, Function, draw_function
from world.task import HINTED, SUMMARIZE, Action
from world.tools import TOOLS, call_tool

# tools an agent believes in and nobody offers
PHANTOMS = ("grep", "open_file", "run_tests", "list_files", "cat")


class InMemoryWorkspace:
    """The workspace of a demonstration: the same answers from a dict, in-process. ONLY for agents
    written here."""

    def __init__(self, task):
        self.task, self.tree = task, dict(task.files)

    def files(self):
        return dict(self.tree)

    def read(self, path):
        if path not in self.tree:
            raise ToolError(f"no such file: {path[:80]}")
        return self.tree[path]

    def edit(self, path, old, new):
        self.tree[path] = edited(self.tree.get(path), path, old, new)
        return "ok"

    def search(self, query):
        return matches(self.tree, query)

    def run(self, command):
        return run_trusted(self.tree, command)


def play(task, agent, workspace):
    """[(Action, outputs)] of an agent (a generator of Actions) at work; the last one is its final
    message."""
    story, outputs = [], None
    while True:
        action = agent.send(outputs)
        outputs = [call_tool(workspace, name, arguments)[0] for name, arguments in action.calls]
        story.append((action, outputs))
        if not action.calls:
            return story


def demonstrate(task, rng, sloppy=1.0):
    """[(Action, outputs)] of the scripted expert, and the files it submits; about a millisecond a
    turn."""
    workspace = InMemoryWorkspace(task)
    return play(task, expert(task, rng, sloppy), workspace), workspace.files()


def read_prompt(text):
    """(whether a micro task's prompt names what is missing, where it says the specification is:
    "prompt", "docs" or "tests"), as an agent reads it."""
    named = text.startswith("Put back `")
    if "See tests.py." in text:
        return named, "tests"
    return named, "docs" if not named or "See docs.md." in text else "prompt"


class Expert:
    """State of one scripted episode. Each flaw has its own probability, so that each technique has
    something to remove."""

    def __init__(self, task, rng, sloppy, untidy=False):
        self.task, self.rng, self.sloppy, self.untidy = task, rng, sloppy, untidy
        # does not depend on difficulty: RL has to teach that
        self.effort = rng.choice((0.4, 1.0, 1.6))
        self.targets = [Function(**target) for target in task.meta["targets"]]
        self.files, self.wrong, self.docs_read = dict(task.files), {}, False
        self.can = {tool: tool in task.tools for tool in TOOLS}
        # of a whole file the wrong line is easily taken
        self.prefers_reading = rng.random() < 0.35 * sloppy
        self.named, self.where = read_prompt(task.problem_statement)
        # what it would grep for
        self.about = self.targets[0].name if self.named else "def "
        self.left = [f"{t.module}.{t.name}" for t in self.targets] if self.named else []
        self.specs, self.carried, self.segment, self.written, self.guesses = {}, set(), 0, {}, set()
        tempting = self.can["read_file"] and all(
            stale_cache_path(target.module) in task.files for target in self.targets
        )
        # rather than look it up
        self.cheats, self.known = tempting and rng.random() < 0.2, set()

    def slip(self, probability):
        return self.rng.random() < probability * self.sloppy

    def stray(self):
        """Now and then a call to a tool that is not there comes before a turn."""
        if self.slip(0.15):
            name = self.rng.choice([tool for tool in TOOLS if not self.can[tool]] + list(PHANTOMS))
            argument = {
                "read_file": ("docs.md",),
                "open_file": ("docs.md",),
                "cat": ("tests.py",),
                "grep": (self.about,),
                "search_codebase": (self.about,),
                "run_command": (self.task.test_command,),
            }
            yield from self.act(Action("", [(name, argument.get(name, ()))], "unavailable_tool"))

    def turn(self, thought, *calls):
        yield from self.stray()
        action = Action(thought if self.rng.random() < 0.15 else "", list(calls))
        # a thought leaks into the code
        if self.untidy and any(name == "edit_file" for name, _ in calls) and self.slip(0.3):
            leak = lambda name, words: (
                name,
                (*words[:2], f"{words[2]}# {thought}\n") if name == "edit_file" else words,
            )
            outputs = yield from self.act(
                Action(action.text, [leak(*call) for call in calls], "code_style")
            )
            if outputs != [HINTED]:
                return outputs
        return (yield from self.act(action))

    def act(self, action):
        """Plays one action. Sent [SUMMARIZE, *outputs], it writes a summary before it goes on; what
        that leaves out is lost."""
        outputs = yield action
        ask, outputs = outputs[:1] == [SUMMARIZE], [
            text for text in outputs if text is not SUMMARIZE
        ]
        for name, said in re.findall(r"(\w+\.\w+): (.*)", "\n".join(outputs)):
            if said == "missing" and name not in self.left:
                self.left.append(name)
            elif said not in ("missing", "failed"):
                self.specs[name] = said
        if ask:
            outputs = yield Action(self.summary())
        return outputs

    def summary(self):
        """What is left to do, with the specifications seen so far; sloppily, without them."""
        keep = not self.slip(0.4)
        lines = [
            f"{name}: {self.specs[name] if keep and name in self.specs else 'missing'}"
            for name in self.left
        ]
        self.carried = {name for name in self.left if keep and name in self.specs}
        self.docs_read, self.segment, self.specs, self.known = False, self.segment + 1, {}, set()
        thought = "Which functions are left?" if self.rng.random() < 0.3 else ""
        return (
            thought
            + SUMMARIZE
            + "\n".join(lines or ["Nothing is missing. Run the tests and finish."])
        )

    def edit(self, path, old, new):
        self.files[path] = edited(self.files.get(path), path, old, new)
        return "edit_file", (path, old, new)

    def run(self):
        """Names of functions the tests call wrong."""
        (output,) = yield from self.turn(
            "Run the tests.", ("run_command", (self.task.test_command,))
        )
        return [name for name in re.findall(r"^\w+\.(\w+)\(", output, re.M)]

    def fidget(self):
        """Looks around, whatever the task: the tests, a file, what is gone from it, the tests
        again."""
        query = f"def {self.about}(" if self.named else "import"
        for tool, word in (
            ("run_command", self.task.test_command),
            ("read_file", f"{self.targets[0].module}.py"),
            ("search_codebase", query),
            ("run_command", self.task.test_command),
        ):
            if self.can[tool]:
                yield from self.turn("Look around.", (tool, (word,)))

    def lookup(self, target, sure=False):
        """The call that shows the specification, or None where it is known already or, unless
        `sure`, will be guessed."""
        self.about = target.name
        if self.cheats:
            path, taken = stale_cache_path(target.module), target.module in self.known
            self.known.add(target.module)
            return None if taken else ("read_file", (path,))
        if self.where == "prompt" or f"{target.module}.{target.name}" in self.carried:
            return None
        path, query = (
            ("docs.md", f"{target.name}:")
            if self.where == "docs"
            else ("tests.py", f"test_{target.name}(")
        )
        if self.docs_read and not self.slip(0.15 * self.effort):
            return None
        if not sure and self.slip(0.2):
            self.guesses.add(target.name)
            return None
        reads = (
            self.can["read_file"]
            and (self.prefers_reading or self.docs_read)
            and self.where == "docs"
        )
        if self.can["search_codebase"] and not reads:
            return "search_codebase", (query,)
        self.docs_read = True
        return "read_file", (path,)

    def write(self, target):
        """The call that appends the function; now and then a step of it is wrong."""
        lines, name = target.lines(), f"{target.module}.{target.name}"
        self.left, self.written[target.name] = [n for n in self.left if n != name], self.segment
        # without having looked: any function of this shape
        if target.name in self.guesses:
            guess = draw_function(self.rng, target.module, NOUNS[0], (1, len(target.steps)), False)
            self.wrong[target.name] = (target, None, None)
            return self.edit(
                f"{target.module}.py",
                "",
                Function(target.module, target.name, guess.steps, guess.reduction).code(),
            )
        if self.slip(0.06):
            i = self.rng.randrange(len(target.steps))
            op, k = target.steps[i]
            alike = [other for other in OPS if other != op and OPS[other][0] == OPS[op][0]]
            other = [n for n in range(2, 10) if n != k]
            off = (
                (op, self.rng.choice(other))
                if self.rng.random() < 0.75
                else (self.rng.choice(alike), k)
            )
            wrong = Function(
                target.module,
                target.name,
                target.steps[:i] + [off] + target.steps[i + 1 :],
                target.reduction,
            )
            self.wrong[target.name] = (target, wrong.lines()[i], lines[i])
            return self.edit(f"{target.module}.py", "", wrong.code())
        return self.edit(f"{target.module}.py", "", target.code())

    def repair(self, name):
        """The call that replaces the wrong line; more lines, from the def on, where the line alone
        is not unique."""
        target, old, new = self.wrong.pop(name)
        path = f"{target.module}.py"
        text = self.files[path]
        if text.count(old) != 1:
            start = text.index(f"def {name}(")
            head = text[start : text.index(old, start)]
            old, new = head + old, head + new
        return self.edit(path, old, new)

    def fix_all(self):
        """Runs the tests and repairs what they show; True if there was something to repair."""
        shown = [name for name in (yield from self.run()) if name in self.wrong]
        for name in shown:
            target, old, _ = self.wrong[name]
            if old and self.written[name] == self.segment and self.rng.random() < 0.4:
                yield from self.turn(f"{name} is wrong.", self.repair(name))
                continue
            # and write it again: a later definition replaces it whole
            lookup = self.lookup(target, sure=True)
            if lookup:
                yield from self.turn(f"Look up {name}.", lookup)
            self.wrong.pop(name)
            yield from self.turn(
                f"Write {name}.", self.edit(f"{target.module}.py", "", target.code())
            )
        return bool(shown)

    def farewell(self, done):
        """One short line; missing or rambling now and then."""
        names = ", ".join(target.name for target in done)
        if self.slip(0.1):
            yield Action("", flaw="communication")
        elif self.slip(0.1):
            yield Action(
                "I looked at the files, then I thought about what was missing, and then I wrote it. "
                f"Put back {names}. I hope this helps.",
                flaw="communication",
            )
        yield Action(f"Put back {names}." if names else "Nothing done.")


def expert(task, rng, sloppy=1.0, untidy=False, restless=0.0):
    """Plays a micro task: yields Actions and is sent the list of tool outputs (after SUMMARIZE, if
    it shall sum up first), or [HINTED]; ends with an Action without calls. untidy: one edit in
    three leaves a comment in the code. restless: the share of episodes that begin with four calls
    that nothing asks for."""
    self = Expert(task, rng, sloppy, untidy)
    named, targets, can = self.named, self.targets, self.can
    quits = rng.randrange(len(targets)) if not named and self.slip(0.3) else len(targets)
    if can["read_file"] and self.slip(0.2 * self.effort):  # needless
        yield from self.turn("Look around.", ("read_file", (f"{targets[0].module}.py",)))
    # needless when the target is named
    if not named or can["run_command"] and self.slip(0.25 * self.effort):
        yield from self.run()
    if restless and rng.random() < restless:
        yield from self.fidget()
    stepwise, parallel = rng.random() < 0.4, len(targets) > 1 and rng.random() < 0.15
    todo = targets[:quits]
    for group in [todo] if parallel else [[target] for target in todo]:
        lookups = [call for call in map(self.lookup, group) if call]
        if lookups:
            yield from self.turn(f"Look up {group[0].name}.", *lookups)
        if group:
            yield from self.turn(
                f"Write {group[0].name}.", *[self.write(target) for target in group]
            )
        if stepwise and group and group[-1] is not targets[-1]:
            yield from self.fix_all()
    unsure = can["run_command"] and quits == len(targets)
    while unsure and not self.slip(0.3):
        unsure = yield from self.fix_all()
    yield from self.stray()
    yield from self.farewell(todo)
