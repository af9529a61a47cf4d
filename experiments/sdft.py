"""sdft.py: A new convention: plain SFT or self-distillation?

The convention is "no comments in code". Both arms have 20 steps on tasks of level 0 alone, and
begin at an SFT with hints on all three habits. What is measured is what they learn there, and what
they forget of the harder tasks.

    plain SFT            imitates the expert, who writes no comments: demonstrations in the place of
                         rollouts, none worth more than another
    self-distillation    the policy's own rollouts, with the hint as all there is to learn: the
                         policy gradient has weight zero

    python -m experiments.sdft

Found (commit 534553e or older, mean of three seeds): comments .256 -> .001 and .010; levels 1 to
5 solved .456 before, .274 after plain SFT, .469 after self-distillation. A step of it takes 3.8
times as long. Figure: figures/sdft.png.
"""

import random
import sys

import numpy as np

import rollout
import train
from experiments import runner
from experiments.habits import ALL_HABITS, more_neutral_hints
from experiments.runner import Arm, Experiment


# 1. Who acts? RL hands tasks to `workers` and collects groups of rollouts from them. Whatever has
#    these methods can stand there: here an expert that plays its demonstrations.
class ScriptedExpert:
    """Stands where Reinforcement has its workers and its publisher: tasks go in, demonstrations
    come out. Nothing is sampled, so no weights are published."""

    restarts = 0

    def __init__(self, run):
        self.run = run

    # The publisher's part: new weights are for policies that sample.
    def publish(self, version, weights):
        return {}

    # The workers' part: a job goes in, its rollouts come out.
    def submit(self, tasks, numbers, seed):
        return tasks, numbers, seed

    def collect(self, job):
        """-> groups of demonstrations, each from random numbers of its own"""
        tasks, numbers, seed = job
        group = range(self.run.config.group_size)
        return [
            [self.play(task, random.Random(f"{seed}/{number}/{j}")) for j in group]
            for task, number in zip(tasks, numbers)
        ]

    def play(self, task, rng):
        """-> the rollout of one demonstration, judged without running its tests"""
        run, config = self.run, self.run.config
        limits = train.agent_limits(config)
        played = rollout.demonstrate(task, run.tokenizer, rng, limits, train.SLOPPY, run.compact)
        # The judge is not asked: the tests pass if every line that was deleted is there again.
        played.passed = True
        for path, deleted in task.solution.items():
            there = {"", *played.files[path].split("\n")}
            if not set(deleted.split("\n")) <= there:
                played.passed = False
        return played

    def close(self):
        pass


# 2. What is learned? With an advantage of one for all, the policy gradient is the gradient of the
#    demonstrations' likelihood: this is SFT in the loop of RL.
class Imitation(train.Reinforcement):
    def __init__(self, run):
        super().__init__(run)
        self.workers.close()
        self.workers = self.publisher = ScriptedExpert(run)

    def group_advantages(self, group):
        return np.ones(len(group))

    def group_losses(self, groups, log):
        yield from super().group_losses(groups, log)
        # These say how far the policy is from the one that sampled. Here no policy did.
        log.update(mismatch=0.0, stale=0.0, stalest=0)


# 3. The other arm: rollouts as in RL, but the reward has weight zero. Left is the distillation of
#    hints.
class HintsAlone(train.Reinforcement):
    def policy_objective(self, logp, batch, normaliser, reference):
        return 0.0 * super().policy_objective(logp, batch, normaliser, reference)


# 4. The patches.
def imitate():
    train.STAGE["rl"] = Imitation


def hints_alone():
    train.STAGE["rl"] = HintsAlone


# 5. What is measured, beside the numbers that every experiment has.
def comments_and_harder_tasks(folder, policies):
    """Comments, and what is solved above level 0, each before and after the arm"""
    numbers = {}
    for when, policy in (("before", "before RL"), ("after", "after RL")):
        levels = list(policies[policy]["levels"].values())
        numbers[f"comments {when}"] = policies[policy]["overall"]["code_style"]
        numbers[f"other levels {when}"] = float(np.mean([level["solved"] for level in levels[1:]]))
    return numbers


# 6. The arms.
NARROW = ("--levels=0", "--curriculum=0", "--steps=20", "--max_turns=20")
EXPERIMENT = Experiment(
    question="A new convention: plain SFT or self-distillation?",
    curves=("code_style",),
    arms={
        # A demonstration has no record of routed experts that could be replayed.
        "plain SFT": Arm((*NARROW, "--feedback=0", "--router_replay=0"), imitate),
        "self-distillation": Arm((*NARROW, "--habits=code_style"), hints_alone),
    },
    sft=Arm((ALL_HABITS,), more_neutral_hints),
    by_level=("solved",),
    more=comments_and_harder_tasks,
)

if __name__ == "__main__":
    runner.main("experiments.sdft", sys.argv[1:])
