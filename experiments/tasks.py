"""tasks.py: What are more tasks worth, of one kind and of several?

Equal steps of RL. The tasks are of one kind, "put back" (levels 0 to 5), or of several, with
repairs and untidy requests (levels 8 and 13): 2 of each level, 10 or 50, over and over. No arm
trains on extensions (level 11), which only SFT has shown.

    one kind, 2         twelve tasks in all, each drawn some 27 times
    one kind, 10
    one kind, 50        each drawn about once
    several, 2          sixteen tasks in all
    several, 10
    several, 50

    python -m experiments.tasks

Found (seeds 1337, 1 and 2): how many, hardly: of the bench 50 of a level solve .03 more than 2.
Which kinds, more: of extensions, which no arm trains on, arms of several kinds solve .92 and .85
(10 and 50 of a level), arms of one kind .69 and .70: in seed 2 putting back lifts the others less.
Figure: figures/tasks.png.
"""

import sys

import numpy as np

import synth_tasks
from experiments import runner
from experiments.runner import Arm, Experiment


# 1. Which tasks? RL numbers them one by one, and a number makes the same task every time. So a
#    number taken over and over is a task drawn over and over.
def draw_few(of_a_level):
    class FewTasks(synth_tasks.Curriculum):
        def task_number(self):
            return self.seed * 1_000_003 + self.drawn % of_a_level

    synth_tasks.Curriculum = FewTasks


# 2. The patches.
def two_of_a_level():
    draw_few(2)


def ten_of_a_level():
    draw_few(10)


def fifty_of_a_level():
    draw_few(50)


# 3. The arms. Of the levels that an arm trains on and of the other, the evaluation has as many
#    tasks as the recipe's, and none that was trained on.
LEVELS_OF_KIND = {"put back": range(6), "repair": (8,), "untidy": (13,), "extend": (11,)}


def solved_by_kind(folder, policies):
    levels = policies["after RL"]["levels"]
    solved = {int(level): numbers["solved"] for level, numbers in levels.items()}
    found = {}
    for kind, its_levels in LEVELS_OF_KIND.items():
        found[kind] = float(np.mean([solved.get(level, np.nan) for level in its_levels]))
    return found


ONE_KIND = ("--levels=0,1,2,3,4,5",)
SEVERAL = ("--levels=0,1,2,3,4,5,8,13",)
EXPERIMENT = Experiment(
    question="What are more tasks worth, of one kind and of several?",
    curves=("reward",),
    arms={
        "one kind, 2": Arm(ONE_KIND, two_of_a_level),
        "one kind, 10": Arm(ONE_KIND, ten_of_a_level),
        "one kind, 50": Arm(ONE_KIND, fifty_of_a_level),
        "several, 2": Arm(SEVERAL, two_of_a_level),
        "several, 10": Arm(SEVERAL, ten_of_a_level),
        "several, 50": Arm(SEVERAL, fifty_of_a_level),
    },
    by_level=("solved",),
    more=solved_by_kind,
    by_seed=("solved", "put back", "repair", "untidy", "extend", "bench"),
)

if __name__ == "__main__":
    runner.main("experiments.tasks", sys.argv[1:])
