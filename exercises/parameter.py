"""7. One more kind of task.   a class in world/kinds/, synth_tasks.py   90 lines

Kinds are put back, repair, rename, extend. Add one: a function gets a parameter k in the place of
the constant of its first step, and the constant becomes the default. Before and after:

    def find_key(xs):                      def find_key(xs, k=3):
        xs = [x + 3 for x in xs]               xs = [x + k for x in xs]
        return sum(xs)                         return sum(xs)

docs.md says `x + k, return sum(xs), k=3` already, and one line of the function's test calls it with
another k: that line is red. `Beginning.cases` has three more calls, with constants that the agent
does not see; without the parameter nobody passes them. In `x * 3, min(x, 2)` the constant does not
matter: there `begin` returns None, and draw_task draws again. The expert works as in a repair, so
let the class inherit from Repair, and give Repair a method for the edit that your class replaces.
Two rows of LEVELS, 20 with one named target and 21 with two that have to be found, are a ladder.

    python -m pytest exercises/parameter.py        red before, green after
    python train.py --stage=rl --steps=5 --start_from=assets/sft --levels=20 --out=out/parameter

Number to reach: the careful expert solves 20 of 20 tasks of either level. Look at: `solved` of the
five steps is 0, since the policy has never seen the kind; the transcripts in out/parameter show it
writing the function anew, without k. A group of zeros has no gradient: what has to come first?
"""

import random

import pytest

import synth_tasks
from repositories.verdict import judge
from world.expert import record_expert
from world.judge import run_trusted
from world.kinds import KINDS
from world.micro import Function
from world.sandbox import Sandbox

LEVELS = (20, 21)


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox()


def tasks(level, number):
    assert len(synth_tasks.LEVELS) > level, "no such level"
    return [synth_tasks.make_task(level, seed) for seed in range(number)]


@pytest.mark.parametrize("level, targets", [(20, 1), (21, 2)])
def test_the_expert_solves_all_of_twenty_tasks(level, targets, sandbox):
    for seed, task in enumerate(tasks(level, 20)):
        assert len(task.FAIL_TO_PASS) == targets
        assert run_trusted({**task.files, **task.solution}).exit_code == 0
        _, files = record_expert(task, random.Random(seed), sloppy=0)
        assert judge(task, files, sandbox).solved, task.problem_statement
        assert not judge(task, task.files, sandbox).solved


def test_a_parameter_that_does_nothing_solves_no_task(sandbox):
    for task in tasks(20, 10):
        (target,) = task.meta["targets"]
        path, name = f"{target['module']}.py", target["name"]
        idle = task.files[path].replace(f"def {name}(xs):", f"def {name}(xs, k=0):")
        assert idle != task.files[path]
        assert not judge(task, {**task.files, path: idle}, sandbox).solved


def test_the_constant_is_the_default_and_no_other_file_is_part_of_the_solution(sandbox):
    for task in tasks(20, 10):
        (target,) = task.meta["targets"]
        (path,) = task.solution
        default = target["steps"][0][1]
        assert f"def {target['name']}(xs, k={default}):" in task.solution[path]
        wrong = task.solution[path].replace(f"k={default}):", f"k={default + 10}):")
        assert not judge(task, {**task.files, path: wrong}, sandbox).solved


def test_a_ladder_leads_from_one_target_to_two():
    assert LEVELS in synth_tasks.LADDERS


def test_where_the_constant_does_not_matter_there_is_no_task():
    function = Function("boat", "find_key", [("multiply", 3), ("cap", 2)], "list")
    said = f"boat.find_key: {function.phrase()}\n"
    tests = "import boat\n\n\ndef test_find_key():\n    assert boat.find_key([1]) == [2]\n"
    codebase = {"boat.py": function.code(), "docs.md": said, "tests.py": tests}
    kind = KINDS["parameter"]
    assert kind.begin(codebase, [function], random.Random(0), None) is None
