"""deletions.py: Can the policy make its own tasks?

Stated: an agent deletes a feature so that the codebase goes on working, and to put it back is the
task; and harder tasks are selected and created during the run, since a list that the policy has
mastered teaches nothing more. Here one task of eight of a step says: delete one function or more,
all else stays green. It is solved if exactly the tests of what was deleted fail. What was left is
then a task, and it stays one as long as a group of the current policy wins between a tenth and nine
tenths of it. 120 steps; all arms begin at one SFT, a twentieth of whose demonstrations delete.

    fixed list         ten tasks of each level, over and over
    recipe             tasks of the same levels, none twice
    opened             levels beyond the evaluation's, too, where the last ones are mastered
    deletions          one task of a step deletes, and two are what was deleted before

    python -m experiments.deletions

Found (seeds 1337, 1, 2): levels opened help the bench in each (.486, .479, .457; recipe .443, .386,
.350). In two seeds it learns to delete (.15 and .34 of its deletions are valid at first, .41 and
.93 at the end), in one it loses the role (.31 to 0): it makes up names, and a group of which none
wins teaches nothing. What it leaves is too easy for it; with deletions it solves .824, .912, .875,
the recipe .958, .926, .914. A fixed list of ten tasks a level does not stall in 120 steps (.938,
.926, .903). Figure: figures/deletions.png.
"""

import math
import random
import re
import sys
from dataclasses import replace

import length_penalty
import rollout
import synth_tasks
import train
from command import step_log
from experiments import runner
from experiments.runner import Arm, Experiment
from experiments.tasks import ten_of_a_level
from world.expert import InMemoryWorkspace
from world.judge import call_functions, same_value
from world.kinds import KINDS
from world.kinds.put_back import PutBack
from world.machine import MachineFailure
from world.micro import NOUNS
from world.task import Result, Task, Verdict
from world.untrusted import parse

# The recipe's method keeps a name of its own: the patched one still calls it.
plain_run = InMemoryWorkspace.run

# The level whose dials both kinds of task have: nothing is named, the docs hold the specifications.
LEVEL = 6


# 1. The role. It is the way back of "put it back", from the same draw.
class Delete(PutBack):
    """Functions are to go, with their signatures; which ones, nobody says."""

    unnamed = "Delete one function or more. All other tests stay green."
    done = "Deleted"
    needs = ("read_file",)

    def solve(self, expert, group):
        """Reads the module, then cuts the function out. An edit would have to repeat all its text,
        which a policy of this size cannot copy (.01 of its deletions were valid): sed names it."""
        for target in group:
            read = expert.read_module(target.module)
            if read:
                yield from expert.turn(f"Look at {target.module}.", read)
            cut = f"sed -i '/def {target.name}(/,/return/d' {target.module}.py"
            yield from expert.turn(f"Delete {target.name}.", ("run_command", (cut,)))


def run_or_delete_lines(workspace, command):
    """InMemoryWorkspace.run, which knows the expert's sed, too: it deletes from the line with the
    name to the next one with `return`, the last one of the function."""
    words = re.fullmatch(r"sed -i '/def (\w+)\(/,/return/d' (\w+\.py)", command)
    if not words:
        return plain_run(workspace, command)
    name, path = words.groups()
    lines = rf".*def {name}\(.*\n(?:.*\n)*?.*return.*\n"
    workspace.tree[path] = re.sub(lines, "", workspace.tree[path])
    return Result(0, "")


def draw_codebase(number):
    """The functions and their inputs of a codebase, and the random numbers that follow"""
    rng = random.Random(f"deletions/{number}")
    nouns = rng.sample(NOUNS, len(NOUNS))
    # Three modules of two functions
    modules = [nouns.pop() for _ in range(3)]
    slots = sorted(2 * modules)
    steps = synth_tasks.LEVELS[LEVEL]["steps"]
    functions, cases = synth_tasks.draw_functions(rng, slots, range(6), steps, "train", nouns)
    return functions, cases, rng


def deletion_task(number):
    """The codebase as it is whole, and what the agent is asked. What the expert would delete are
    the targets."""
    while True:
        functions, cases, rng = draw_codebase(number)
        chosen = sorted(rng.sample(range(6), rng.randint(1, 4)))
        task = synth_tasks.begin_and_verify(rng, LEVEL, functions, cases, chosen)
        if task:
            break
        number += 10**9  # another draw, where a check refuses this one
    whole = {**task.files, **task.solution}
    tools = synth_tasks.draw_tools(rng, synth_tasks.LEVELS[LEVEL], Delete.needs)
    sources = sorted(path for path in whole if path[:-3] in {one.module for one in functions})
    return replace(
        task,
        instance_id=f"delete-{number}",
        problem_statement=synth_tasks.micro_prompt(Delete.unnamed, tools, sources),
        files=whole,
        tools=tools,
        meta={**task.meta, "deletes": number, "asked": {**task.meta["asked"], "kind": "delete"}},
    )


def deleted_functions(task, files):
    """The indices of the functions whose names stand in no module any more"""
    functions, _, _ = draw_codebase(task.meta["deletes"])
    text = "\n".join(files.get(f"{function.module}.py", "") for function in functions)
    return [i for i, one in enumerate(functions) if f"def {one.name}(" not in text]


def judge_deletion(task, files, sandbox):
    """Verdict: do exactly the tests of what was deleted fail?"""
    functions, cases, _ = draw_codebase(task.meta["deletes"])
    calls = []
    for function, inputs in zip(functions, cases):
        calls += synth_tasks.judged_cases(function, [*inputs[0], *inputs[1]])

    # As for any other task: the child returns values, and the comparison is made here.
    pristine = {path: task.files[path] for path in ("tests.py", "check.py")}
    try:
        values, result = call_functions({**files, **pristine}, [c[:3] for c in calls], sandbox)
    except ValueError as error:
        return Verdict(False, 0, len(calls), str(error))
    if not result.started:
        raise MachineFailure(result.output)
    if values is None:
        return Verdict(False, 0, len(calls), "no values")
    outcomes = {f"test_{function.name}": "passed" for function in functions}
    for value, (_, name, _, expected) in zip(values, calls):
        if not value or not same_value(value[0], expected):
            outcomes[f"test_{name}"] = "failed"

    # What is left of a module has to load, though nobody calls it.
    spoiled = [path for path in task.files if path.endswith(".py") and path in files]
    spoiled = [path for path in spoiled if parse(files[path]) is None]
    if spoiled:
        return Verdict(False, 0, len(calls), f"{spoiled[0]} does not compile")
    own = {f"test_{functions[i].name}" for i in deleted_functions(task, files)}
    lost = synth_tasks.tests_lost(list(outcomes), outcomes, own)
    why = lost if isinstance(lost, str) else "" if lost == own else "a deleted function is back"
    return Verdict(not why, len(outcomes) - len(own), len(own), why)


def created_task(played):
    """What a valid deletion has left, as a task: None where a check refuses it"""
    task, files = played.task, played.files
    number, chosen = task.meta["deletes"], deleted_functions(task, files)
    functions, cases, _ = draw_codebase(number)
    rng = random.Random(f"created/{number}/{chosen}")
    made = synth_tasks.begin_and_verify(rng, LEVEL, functions, cases, chosen)
    if not made:
        return None
    # The files are the agent's to the letter, also where it has spoiled them, but for the tests.
    tests = {path: made.files[path] for path in ("tests.py", "check.py")}
    whole = {**task.files, **tests}
    left = {path: text for path, text in files.items() if path in whole}
    left.update(tests)
    return replace(
        made,
        instance_id=f"created-{number}-{'-'.join(map(str, chosen))}",
        files=left,
        solution={path: text for path, text in whole.items() if left.get(path) != text},
        meta={**made.meta, "created": True},
    )


# 2. RL. One place of a step deletes, two are tasks that were made so.
class Deleting(train.Reinforcement):
    """What was deleted validly waits in `created` for its turn."""

    def __init__(self, run):
        super().__init__(run)
        self.created = {}  # name: the task as JSON
        self.won = {}  # name: the share of its last group that solved it, None before the first
        self.log_entries = {}  # of the last step

    def sample_tasks(self, step):
        tasks = super().sample_tasks(step)
        rng = random.Random(f"{self.run.config.seed}/deletions/{step}")
        # One deletion; of what was created two, where there is room: new ones first, then those
        # that are still neither won nor lost.
        names = sorted(self.created, key=lambda name: (self.won[name] is not None, rng.random()))
        names = names[: min(2, len(tasks) - 1)]
        others = [Task.from_json(self.created[name]) for name in names]
        others.append(deletion_task(self.run.config.seed * 1_000_003 + step))
        kept = rng.sample(tasks, len(tasks) - len(others))
        efforts = train.settings(self.run.config)
        return kept + [length_penalty.ask_for(one, rng.choice(efforts)) for one in others]

    def update_curriculum(self, groups):
        ours = [group for group in groups if {"deletes", "created"} & group[0].task.meta.keys()]
        super().update_curriculum([group for group in groups if group not in ours])

        # What was deleted, and how often what had been deleted was put back: on all ranks alike.
        tried, found, results = 0, [], []
        for group in ours:
            task = group[0].task
            solved = [played for played in group if played.solved]
            if "created" in task.meta:
                results.append((task.instance_id, len(solved) / len(group)))
                continue
            tried += len(group)
            made = [created_task(played) for played in solved]
            found += [(one.instance_id, one.to_json()) for one in made if one]
        results = sorted(self.run.gather(results))
        for name, text in sorted(self.run.gather(found)):
            if name not in self.created:
                self.created[name], self.won[name] = text, None
        for name, share in results:
            self.won[name] = share
            if not 0.1 <= share <= 0.9:
                del self.created[name], self.won[name]
        valid, tried = self.run.sum(len(found)), self.run.sum(tried)
        self.log_entries = {"valid_deletions": valid / max(1, tried), "created": len(self.created)}
        shares = [share for _, share in results]
        if shares:
            self.log_entries["created_won"] = sum(shares) / len(shares)

    def losses(self, step, log):
        yield from super().losses(step, log)
        log.update(self.log_entries)

    def state_dict(self):
        return {**super().state_dict(), "created": self.created, "won": self.won}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.created, self.won = state["created"], state["won"]


class Opened(train.Reinforcement):
    may_open = range(len(synth_tasks.LEVELS))


# 3. The patches.
def teach_the_expert_to_delete():
    KINDS["delete"] = Delete()
    InMemoryWorkspace.run = run_or_delete_lines


def a_twentieth_deletes():
    teach_the_expert_to_delete()
    plain = train.make_training_task

    def make(config, level, number):
        return plain(config, level, number) if number % 20 else deletion_task(number)

    train.make_training_task = make


def judge_both_kinds():
    plain = rollout.judge

    def judge(task, files, sandbox):
        judge_it = judge_deletion if "deletes" in task.meta else plain
        return judge_it(task, files, sandbox)

    rollout.judge = judge


def deletions():
    judge_both_kinds()
    train.STAGE["rl"] = Deleting


def opened():
    train.STAGE["rl"] = Opened


# 4. More numbers of the end, and the arms.
def what_was_deleted(folder, policies):
    lines = step_log.read_step_log(folder, "rl")
    found = {}
    for name in ("valid_deletions", "created", "created_won"):
        for part, some in (("first", lines[:10]), ("last", lines[-10:])):
            values = [line[name] for line in some if name in line]
            found[f"{name}: {part} 10"] = sum(values) / len(values) if values else math.nan
    return found


LONG = ("--steps=120",)
EXPERIMENT = Experiment(
    question="Can the policy make its own tasks?",
    curves=("equal", "solved"),
    arms={
        "fixed list": Arm(LONG, ten_of_a_level),
        "recipe": Arm(LONG),
        "opened": Arm(LONG, opened),
        "deletions": Arm(LONG, deletions),
    },
    sft=Arm((), a_twentieth_deletes),
    by_level=("solved",),
    more=what_was_deleted,
)

if __name__ == "__main__":
    runner.main("experiments.deletions", sys.argv[1:])
