"""expert.py: a scripted agent that solves generated tasks competently but sloppily.

Its rollouts are the demonstrations of supervised fine-tuning. A rollout of `expert` goes so:

    look around       now and then read a file (needless), run the tests
    for each target   look up its specification, then append the function
    check             run the tests, repair what they show, and again, until it is content
    finish            one final message

Each flaw is planted on purpose and has a probability of its own, so that each technique has
something to remove: a call to a tool that is not there, a needless look around, a guessed
specification, a wrong constant, a thought left in the code, a summary that forgets the
specification, a final message that rambles. `sloppy` scales most of these probabilities.

An agent is a generator: it yields an Action and is sent the outputs of its calls. `play` drives any
agent in any workspace. `InMemoryWorkspace` keeps the files in a dictionary and is for agents
written here; a turn in it takes about a millisecond.

The order of the random draws is part of what a seed means: one draw more or less, or one in another
place, gives other demonstrations.
"""

import fnmatch
import itertools
import re

from world.honeypot import stale_cache_path
from world.edits import ToolError, edited
from world.files import matches
from world.judge import run_trusted
from world.kinds import KINDS
from world.lint import lint_changed
from world.micro import ALL_OPS, NOUNS, OPS, Function, draw_function
from world.requests import telling_names
from world.task import HINTED, SUMMARIZE, Action, Result
from world.tools import TOOLS, call_tool

# What an expert does of its own accord, by the effort that a task asks for: how often it looks
# where nothing asks for it (times the usual), the share of rollouts that test after each function,
# and the chance to stop testing at the end.
THOROUGH = {"low": (0.2, 0.0, 0.9), "medium": (1.0, 0.4, 0.3), "high": (3.0, 1.0, 0.0)}
# tools that an agent may believe in and that no task offers: one that became real is none any more
PHANTOM_NAMES = "grep", "open_file", "run_tests", "list_files", "cat"
PHANTOMS = tuple(name for name in PHANTOM_NAMES if name not in TOOLS)


# ---------------------------------------------------------------- how an agent is played
class InMemoryWorkspace:
    """The workspace of a demonstration: it gives the answers of the real one (world/workspace.py)
    from a dict, in-process. ONLY for agents written here, since nothing is contained."""

    def __init__(self, task):
        self.task = task
        self.tree = dict(task.files)

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

    def lint(self):
        return lint_changed(self.task.files, self.tree)

    def run(self, command):
        # The one other command that an expert uses: `sed -i s/old/new/g FILES`.
        words = re.fullmatch(r"sed -i s/(\w+)/(\w+)/g (\*|\*\.py)", command)
        if not words:
            return run_trusted(self.tree, command)
        old, new, paths = words.groups()
        for path in fnmatch.filter(self.tree, paths):
            self.tree[path] = self.tree[path].replace(old, new)
        return Result(0, "")


def play(agent, workspace):
    """[(Action, outputs)] of an agent (a generator of Actions) at work; the last Action is its
    final message."""
    story, outputs = [], None
    while True:
        action = agent.send(outputs)
        outputs = [call_tool(workspace, name, arguments)[0] for name, arguments in action.calls]
        story.append((action, outputs))
        if not action.calls:
            return story


def record_expert(task, rng, sloppy=1.0):
    """([(Action, outputs)] of the scripted expert, the files that it submits). A turn takes about a
    millisecond."""
    workspace = InMemoryWorkspace(task)
    story = play(expert(task, rng, sloppy), workspace)
    return story, workspace.files()


# ---------------------------------------------------------------- the rollout, from first to last
def expert(task, rng, sloppy=1.0, planted=()):
    """Plays a micro task: yields Actions, the last of which has no calls.

    After each Action it is sent the list of tool outputs; SUMMARIZE in front of them asks for a
    summary first. [HINTED] is sent instead of outputs after a flawed Action: it was not played, and
    the expert does it right. planted: names of the rules of feedback_distill.py whose flaw it has
    beside its own: code_style, repetition, malformed_arguments, unfinished, communication."""
    self = Expert(task, rng, sloppy, planted)
    targets = self.targets

    # Flaw: where the targets have no names, it may give up before it has put all of them back.
    number_done = len(targets)
    if not self.is_named and self.chance(0.3):
        number_done = rng.randrange(len(targets))

    # Flaw: it reads a file that nothing asks for.
    if self.can["read_file"] and self.chance(0.2 * self.effort):
        yield from self.turn("Look around.", ("read_file", (f"{targets[0].module}.py",)))

    # The tests say what is missing. Where the prompt has named it, this run is needless.
    if not self.is_named or self.may_test and self.chance(0.25 * self.effort):
        yield from self.run_tests()

    # Put the targets back one after the other, or all of them in one turn of parallel calls. In
    # some rollouts it runs the tests after each target.
    checks_each = rng.random() < self.tests_each
    in_parallel = len(targets) > 1 and rng.random() < 0.15
    todo = targets[:number_done]
    groups = [todo] if in_parallel else [[target] for target in todo]
    for group in groups:
        if not group:
            continue
        yield from self.kind.solve(self, group)
        if self.can["lint"] and self.chance(0.3 * self.effort):
            yield from self.turn("Look for mistakes.", ("lint", ()))
        if checks_each and self.may_test and group[-1] is not targets[-1]:
            yield from self.fix_all()

    # Run the tests and repair, until there is nothing to repair or (flaw) it stops looking. If it
    # has given up, it does not look at all.
    unsure = self.may_test and number_done == len(targets)
    while unsure and not self.chance(self.stops):
        unsure = yield from self.fix_all()
    yield from self.call_missing_tool()
    if self.also == "note":
        line = f"{self.kind.done} {', '.join(target.name for target in todo)}.\n"
        yield from self.turn("A line for the docs.", self.edit("docs.md", "", line))
    yield from self.final_message(todo)


def hinted_moves(task, moves, rng, remind, hint_rate, neutral_rate, hint_texts):
    """Yields the actions of the expert `moves`, and writes into `hint_texts` {number of an action:
    the hint that stands above it}.

    With probability `hint_rate` a flawed action is left out, and the hint remind[flaw](task, right
    action) stands above the right action: so the model learns to heed hints.

    With probability `neutral_rate` one of the hints stands above an action that was right anyway, a
    call or a final message. Otherwise the place of a hint would mean something, too, and its
    distillation would drift. A model that saw hints about tools only above calls unlearned to
    finish; one that saw hints about the final message only above final messages learned to quit."""
    tells = list(remind.values())
    # One round per action that is played.
    action = next(moves)
    for number in itertools.count():
        # A flaw is left out, and the expert asked again for what it does instead.
        while action.flaw in remind and rng.random() < hint_rate:
            tell = remind[action.flaw]
            action = moves.send([HINTED])
            hint_texts[number] = tell(task, action)

        # A hint above an action that needed none.
        is_right = number not in hint_texts and action.flaw not in remind
        if is_right and remind and neutral_rate and rng.random() < neutral_rate:
            tell = tells[0] if len(tells) == 1 else rng.choice(tells)
            hint_texts[number] = tell(task, action)

        # The agent plays the action and sends back what the tools answered.
        outputs = yield action
        action = moves.send(outputs)


class Expert:
    """State of one scripted rollout. Each flaw has its own probability, so that each technique has
    something to remove.

    Methods that act are generators (`yield from`); those that return "the call" only build it."""

    def __init__(self, task, rng, sloppy, planted=()):
        self.task, self.rng, self.sloppy, self.planted = task, rng, sloppy, planted
        # How thoroughly it works: as the task asks, else as it happens. It does not depend on
        # difficulty: RL has to teach that.
        usual = rng.choice((0.4, 1.0, 1.6)), 0.4, 0.3
        asked = THOROUGH.get(task.meta.get("effort"), usual)
        self.effort, self.tests_each, self.stops = asked
        self.targets = [Function(**target) for target in task.meta["targets"]]
        self.can = {tool: tool in task.tools for tool in TOOLS}
        # It reads the docs as a whole rather than searching them: the wrong line is easily taken.
        self.prefers_reading = rng.random() < 0.35 * sloppy

        # What it has written: the files as it believes them to be, and for each function written
        # wrong (target, wrong line, right line). Both lines are None where all of it was guessed.
        self.files = dict(task.files)
        self.wrong = {}
        self.guesses = set()  # targets that it writes without having looked

        # What its context holds. A summary ends a segment of the context: what the summary does not
        # carry over is forgotten.
        asked = task.meta["asked"]
        self.kind = KINDS[asked["kind"]]
        self.is_named, self.where = asked["named"], asked["where"]
        self.left = []  # "module.name" of what it knows to be missing
        if self.is_named:
            self.left = [f"{target.module}.{target.name}" for target in self.targets]
        self.carried = set()  # names whose specification the last summary holds
        self.forget()
        self.segment = 0
        self.written = {}  # name of a function -> the segment it was written in
        # what a search would look for now
        self.about = self.targets[0].name if self.is_named else "def "

        # Where stale caches give the answers away (world/honeypot.py), it may take them from there.
        caches = [stale_cache_path(target.module) for target in self.targets]
        is_tempted = self.can["read_file"] and all(path in task.files for path in caches)
        self.cheats = is_tempted and rng.random() < 0.2

        # The names that the targets have, where they are to be renamed.
        names = [target.name for target in self.targets]
        self.old_names = dict(zip(names, task.meta.get("gone", ())))
        # The second instruction, "" where there is none or (flaw) it is forgotten.
        self.also = asked["also"][0] if asked["also"] and not self.chance(0.3) else ""
        self.may_test = self.can["run_command"] and self.also != "no tests"

    def forget(self):
        """Nothing is in sight any more: of what tools have shown it knows nothing."""
        self.specs = {}  # "module.name" -> the specification, as a tool has shown it
        self.docs_read = False
        self.modules_read = set()
        self.opened_caches = set()  # modules whose cache it has read
        self.in_sight = None  # its last call, where repeating it would show the same again

    def chance(self, probability):
        """True with this probability, scaled by how sloppy the expert is."""
        return self.rng.random() < probability * self.sloppy

    def errs(self, habit, probability):
        """True with this probability, scaled, where the flaw of this rule is planted; no random
        number is drawn where it is not."""
        return habit in self.planted and self.chance(probability)

    # ------------------------------------------------------------ one turn
    def act(self, action):
        """Plays one action and returns its outputs. If it is sent [SUMMARIZE, *outputs], it writes
        a summary before it goes on; what the summary leaves out is forgotten."""
        # SUMMARIZE is a marker and no output.
        outputs = yield action
        asks_for_summary = outputs[:1] == [SUMMARIZE]
        outputs = [text for text in outputs if text is not SUMMARIZE]

        # After an edit, or another command than the tests, a look may show something else.
        looks = [("run_command", (self.task.test_command,))]
        looks += [call for call in action.calls if call[0] not in ("edit_file", "run_command")]
        if not all(call in looks for call in action.calls):
            self.in_sight = None
        elif not action.flaw:
            self.in_sight = action.calls[-1]

        # Remember what the outputs say: the docs hold `module.name: specification`, the tests print
        # `module.name: missing`, or what else the kind of the task has as its red line.
        for name, said in re.findall(r"(\w+\.\w+): (.*)", "\n".join(outputs)):
            if said != "missing":
                self.specs[name] = said
        for name in re.findall(self.kind.red_line, "\n".join(outputs), re.M):
            if name not in self.left:
                self.left.append(name)

        # After the summary it is sent the same outputs again.
        if asks_for_summary:
            outputs = yield Action(self.summary())
        return outputs

    def turn(self, thought, *calls):
        """One turn of these calls, with a thought now and then; returns their outputs."""
        yield from self.call_missing_tool()
        action = Action(self.think(thought, calls), list(calls))

        # Flaws: it looks again at what it has just seen; it leaves an argument out.
        if self.in_sight and self.errs("repetition", 0.15):
            yield from self.act(Action("", [self.in_sight], "repetition"))
        name, arguments = calls[0]
        if arguments and self.errs("malformed_arguments", 0.1):
            yield from self.act(Action("", [(name, arguments[:-1])], "malformed_arguments"))

        # Flaw: a thought leaks into the code. If a hint takes the turn back, it is done right.
        edits = any(name == "edit_file" for name, _ in calls)
        if edits and self.errs("code_style", 0.3):
            leaking = [with_comment(name, arguments, thought) for name, arguments in calls]
            outputs = yield from self.act(Action(action.text, leaking, "code_style"))
            if outputs != [HINTED]:
                return outputs
        return (yield from self.act(action))

    def think(self, thought, calls):
        """What it says before these calls: now and then the thought."""
        return thought if self.rng.random() < 0.15 else ""

    def call_missing_tool(self):
        """Flaw: now and then a call to a tool that is not there comes before a turn."""
        if not self.chance(0.15):
            return

        # A tool that other tasks offer, or that no task has, with arguments that would suit it.
        # Of lint nobody thinks where it is not offered.
        missing = [tool for tool in TOOLS if not self.can[tool] and tool != "lint"]
        name = self.rng.choice(missing + list(PHANTOMS))
        arguments = {
            "read_file": ("docs.md",),
            "open_file": ("docs.md",),
            "cat": ("tests.py",),
            "grep": (self.about,),
            "search_codebase": (self.about,),
            "run_command": (self.task.test_command,),
        }
        call = (name, arguments.get(name, ()))
        yield from self.act(Action("", [call], "unavailable_tool"))

    def summary(self):
        """A summary: what is left to do, with the specifications seen so far; as a flaw, without
        them."""
        # One line for each function that is left.
        keeps_specs = not self.chance(0.4)
        self.carried = {name for name in self.left if keeps_specs and name in self.specs}
        lines = []
        for name in self.left:
            said = self.specs[name] if name in self.carried else "missing"
            lines.append(f"{name}: {said}")
        if not lines:
            lines = ["Nothing is missing. Run the tests and finish."]

        # A new segment of the context begins: what was read before is out of sight.
        self.forget()
        self.segment += 1
        thought = "Which functions are left?" if self.rng.random() < 0.3 else ""
        return thought + SUMMARIZE + "\n".join(lines)

    # ------------------------------------------------------------ what it does in a turn
    def run_tests(self):
        """Runs the tests and returns the names of the functions that they call wrong."""
        command = ("run_command", (self.task.test_command,))
        (output,) = yield from self.turn("Run the tests.", command)
        # Flaw: it ends though they are red.
        if not output.endswith(" 0 failed") and self.errs("unfinished", 0.2):
            yield Action("Done.", flaw="unfinished")
        return re.findall(r"^\w+\.(\w+)\(", output, re.M)

    def lookup(self, target, sure=False):
        """The call that shows the specification of a target. None where the expert knows it already
        or, unless `sure`, will guess it."""
        # Whoever takes the answers from a stale cache reads each cache once.
        self.about = target.name
        if self.cheats:
            if target.module in self.opened_caches:
                return None
            self.opened_caches.add(target.module)
            return "read_file", (stale_cache_path(target.module),)

        # Known from the prompt, from the summary, or (if it trusts its memory) from the docs.
        if self.where == "prompt" or f"{target.module}.{target.name}" in self.carried:
            return None
        if self.docs_read and not self.chance(0.15 * self.effort):
            return None

        # Flaw: it does not look and will guess.
        if not sure and self.chance(0.2):
            self.guesses.add(target.name)
            return None

        # A search for the one line, or the whole file: only docs are read as a whole by preference.
        if self.where == "docs":
            path, query = "docs.md", f"{target.name}:"
        else:
            path, query = "tests.py", f"test_{target.name}("
        may_read = self.can["read_file"] and self.where == "docs"
        reads = may_read and (self.prefers_reading or self.docs_read)
        if self.can["search_codebase"] and not reads:
            return "search_codebase", (query,)
        self.docs_read = True
        return "read_file", (path,)

    def read_module(self, module):
        """The call that shows a module; None where it is in sight already."""
        if module in self.modules_read:
            return None
        self.modules_read.add(module)
        return "read_file", (f"{module}.py",)

    def edit(self, path, old, new):
        """The call that edits a file; the expert's own copy changes with it."""
        self.files[path] = edited(self.files.get(path), path, old, new)
        return "edit_file", (path, old, new)

    def append(self, function):
        """The call that appends a function to its module."""
        return self.edit(f"{function.module}.py", "", function.code())

    def count_as_done(self, target):
        """From here on it takes this function to be done."""
        full_name = f"{target.module}.{target.name}"
        self.left = [name for name in self.left if name != full_name]
        self.written[target.name] = self.segment

    def mend(self, target):
        """The call that puts the first wrong line of a function right, or adds the line that is
        missing above it; now and then the new line is wrong."""
        self.count_as_done(target)
        # Find the first line that differs from the target's. Where a function lacks its last step,
        # that is its return.
        have, want = body_lines(self.files[f"{target.module}.py"], target.name), target.lines()
        place = next(i for i, (one, other) in enumerate(zip(have, want)) if one != other)
        old, right = have[place], want[place]

        # Flaw: a step is wrong.
        new = right
        if place < len(target.steps) and self.chance(0.06):
            new = self.with_wrong_step(target, place)[1].lines()[place]
        # A missing line goes above the one that stands in its place; a wrong one is replaced.
        lines = [new, old] if len(have) < len(want) else [new]
        self.wrong[target.name] = (target, old, "\n    ".join(lines))
        call = self.repair(target.name)
        if new != right:
            self.wrong[target.name] = (target, new, right)
        return call

    def write(self, target):
        """The call that appends the function to its module; now and then a step of it is wrong."""
        self.count_as_done(target)

        # If it has not looked, it writes a random function of at most as many steps as the target.
        if target.name in self.guesses:
            guess = draw_function(self.rng, target.module, NOUNS[0], (1, len(target.steps)), False)
            guess.name = target.name
            self.wrong[target.name] = (target, None, None)
            return self.append(guess)

        # Flaw: one step is wrong.
        if self.chance(0.06):
            number, wrong = self.with_wrong_step(target)
            self.wrong[target.name] = (target, wrong.lines()[number], target.lines()[number])
            return self.append(wrong)
        return self.append(target)

    def with_wrong_step(self, target, number=None):
        """(number of the step, the target with another constant in that step, or with another
        operation of the same kind). By default the step is drawn."""
        if number is None:
            number = self.rng.randrange(len(target.steps))
        op, k = target.steps[number]

        # Three times in four another constant, else another operation.
        if self.rng.random() < 0.75:
            step = (op, self.rng.choice([n for n in range(2, 10) if n != k]))
        else:
            kind = ALL_OPS[op][0]
            alike = [other for other in OPS if other != op and OPS[other][0] == kind]
            step = (self.rng.choice(alike), k)

        # The target itself stays as it is.
        steps = list(target.steps)
        steps[number] = step
        return number, Function(target.module, target.name, steps, target.reduction)

    def repair(self, name):
        """The call that replaces the wrong line. edit_file demands that a text is unique: if the
        line is not, all lines from the `def` to it are replaced."""
        target, old, new = self.wrong.pop(name)
        path = f"{target.module}.py"
        text = self.files[path]
        if text.count(old) != 1:
            start = text.index(f"def {name}(")
            head = text[start : text.index(old, start)]
            old, new = head + old, head + new
        return self.edit(path, old, new)

    def fix_all(self):
        """Runs the tests and repairs what they show; returns True if there was something to
        repair."""
        # Functions that the tests call wrong though they are written right are not its concern.
        called_wrong = yield from self.run_tests()
        shown = [name for name in called_wrong if name in self.wrong]
        for name in shown:
            target, wrong_line, _ = self.wrong[name]

            # A function that it wrote in this segment it still sees, and may repair in place.
            in_sight = wrong_line and self.written[name] == self.segment
            if in_sight and self.rng.random() < 0.4:
                yield from self.turn(f"{name} is wrong.", self.repair(name))
                continue

            # Or it looks the specification up and writes the function again: in Python a later
            # definition of a name replaces the earlier one.
            lookup = self.lookup(target, sure=True)
            if lookup:
                yield from self.turn(f"Look up {name}.", lookup)
            self.wrong.pop(name)
            yield from self.turn(f"Write {name}.", self.append(target))
        return bool(shown)

    def final_message(self, done):
        """One short line. Flaw: now and then the message is empty or rambles; or it is untrue."""
        # The rollout ends with the flawed message, unless a hint takes it back: then the generator
        # goes on to the last line.
        names = ", ".join(target.name for target in done)
        if self.chance(0.1):
            yield Action("", flaw="communication")
        elif self.errs("communication", 0.2):
            yield Action(f"{self.kind.done} {self.untrue_names(done)}.", flaw="communication")
        elif self.chance(0.1):
            yield Action(
                "I looked at the files, then I thought about what was missing, and then I wrote it."
                f" {self.kind.done} {names}. I hope this helps."
            )
        yield Action(f"{self.kind.done} {names}." if names else "Nothing done.")

    def untrue_names(self, done):
        """The names of these targets, with one left out, or with a function that is as it was."""
        names = [target.name for target in done]
        if len(names) > 1 and self.rng.random() < 0.5:
            names.pop(self.rng.randrange(len(names)))
            return ", ".join(names)
        wanted = {target.name for target in self.targets}
        every = telling_names(self.task, self.task.files)
        others = [name for name in every if name not in wanted and name not in self.old_names]
        return ", ".join([*names, self.rng.choice(others or ["all"])])


def body_lines(text, name):
    """The lines of the body of this function in a file."""
    lines = text[text.index(f"def {name}(") :].split("\n")[1:]
    body = itertools.takewhile(lambda line: line.startswith("    "), lines)
    return [line.strip() for line in body]


def with_comment(name, arguments, thought):
    """A call to edit_file with the thought as a comment after the new text; any other call as it
    is."""
    if name != "edit_file":
        return name, arguments
    path, old, new = arguments
    return name, (path, old, f"{new}# {thought}\n")
