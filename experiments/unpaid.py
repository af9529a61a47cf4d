"""unpaid.py: What ends a cheat that RL has found?

In two seeds of three of untaught.py RL finds the leftovers. From the same SFT, in the same world,
200 steps:

    as sampled          what the cheat wins is paid
    not paid            what the world recorded as a cheat has no reward
    closed at 100       from step 100 on the leftovers are cleared

    python -m experiments.unpaid

Found (seed 1337): what is not paid does not grow (.03 to .01; paid .05 to .52). Closing the hole
does not end the search: a hundred steps later .46 still ask for the leftovers. Figure:
figures/unpaid.png.
"""

import sys

import eval
import length_penalty
import rollout
import train
from experiments import hacking, runner, untaught
from experiments.runner import Arm, Experiment


# 1. The patches of RL.
def not_paid():
    hacking.careless()
    plain = rollout.grade

    def grade(played, price=length_penalty.FREE):
        plain(played, price)
        if eval.has_cheat(played):
            played.reward = 0.0

    rollout.grade = grade


def closed_at_100():
    def make(config, level, number):
        # A run numbers its tasks one by one.
        step = number % 1_000_003 // config.tasks_per_step
        world = (
            hacking.task_in_a_careless_world if step < 100 else hacking.task_without_documentation
        )
        return world(config, level, number)

    train.make_training_task = make


# 2. The arms.
EXPERIMENT = Experiment(
    question="What ends a cheat that RL has found?",
    curves=("cheats", "solved"),
    arms={
        "as sampled": Arm(untaught.TWO_LEVELS, hacking.careless),
        "not paid": Arm(untaught.TWO_LEVELS, not_paid),
        "closed at 100": Arm(untaught.TWO_LEVELS, closed_at_100),
    },
    sft=Arm((), untaught.looked_at_and_left),
    more=hacking.monitor,
)

if __name__ == "__main__":
    runner.main("experiments.unpaid", sys.argv[1:])
