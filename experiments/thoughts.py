"""thoughts.py: Does it help to say again what the next edit needs?

What an edit needs, the specification of a function, may stand far above it. Here the expert says it
again right before it writes the function: never where a task asks for low effort, half the time at
medium, always at high. So the policy has seen both, and RL has a price for thoughts at low and
medium. Each thought begins with a mark that stands nowhere else: an evaluation cuts thoughts by
never drawing it.

    no thoughts        the default run, whose thoughts are few and say nothing of the task
    thinks             the same with an SFT of its own, on such demonstrations

    python -m experiments.thoughts

Found (seed 1337): it does not. At high effort .535 are solved after SFT with thoughts and .528 with
the same policy's thoughts cut, .826 and .819 after RL.
"""

import contextlib
import math
import re
import sys
from pathlib import Path

import eval
import moe
import rollout
import synth_tasks
from command import checkpoints
from experiments import runner
from experiments.runner import Arm, Experiment
from world import expert

MARK = "~"
# How often it thinks, by the effort that a task asks for.
THINKS = {"low": 0.0, "medium": 0.5, "high": 1.0}


# 1. The demonstrations: in the place of a label like "Write f." stands what the edit needs.
def thinks():
    plain = expert.Expert.think

    def think(self, thought, calls):
        # The specifications, as a tool has shown them, of the functions that these calls write.
        written = "\n".join(arguments[2] for name, arguments in calls if name == "edit_file")
        names = re.findall(r"^def (\w+)\(", written, re.M)
        known = [full for full in self.specs if full.partition(".")[2] in names]
        if known and self.rng.random() < THINKS.get(self.task.meta.get("effort"), 0.0):
            return MARK + "\n".join(f"{name}: {self.specs[name]}" for name in known)
        return plain(self, thought, calls)

    expert.Expert.think = think


# 2. The evaluation of the same policy without its thoughts.
@contextlib.contextmanager
def thoughts_cut():
    plain = moe.Model.logits

    def logits(self, hidden):
        found = plain(self, hidden)
        found[..., ord(MARK)] = -math.inf  # the first 256 tokens are the bytes
        return found

    moe.Model.logits = logits
    try:
        yield
    finally:
        moe.Model.logits = plain


def with_and_without(folder, policies):
    """Solved at high effort, and tokens of thoughts, before and after RL: as the policy is, and
    with its thoughts cut. The same tasks, the same random numbers. NaN for the default run."""
    after = checkpoints.open_checkpoint(Path(folder, "rl"))
    paths = {"SFT": checkpoints.find_origin(after), "RL": Path(folder, "rl")}
    tasks = eval.ask_for_each(eval.held_out(16, synth_tasks.DEFAULT_LEVELS), ("high",))
    found = {}
    for name, path in paths.items():
        for kind, cut in (("thinks", contextlib.nullcontext), ("cut", thoughts_cut)):
            solved = thinking = math.nan
            if after["patch"]:
                with cut():
                    solved, thinking = play_and_count(path, tasks)
            found[f"{name}, {kind}: solved"] = solved
            found[f"{name}, {kind}: tokens of thoughts"] = thinking
    return found


def play_and_count(path, tasks):
    """-> the share solved of these tasks, and the mean number of tokens of thoughts"""
    played = []
    for group in eval.play_tasks(*eval.load_policy(path), tasks, passes=1):
        played += group
    for one in played:
        rollout.grade(one)
    solved = sum(one.solved for one in played)
    thinking = sum(one.stats["thinking_tokens"] for one in played)
    return solved / len(played), thinking / len(played)


# 3. The arms.
EXPERIMENT = Experiment(
    question="Does a thought help that says again what the next edit needs?",
    curves=("solved", "thinking_tokens"),
    arms={"no thoughts": Arm(), "thinks": Arm((), thinks)},
    sft=Arm((), thinks),
    by_level=("solved",),
    more=with_and_without,
)

if __name__ == "__main__":
    runner.main("experiments.thoughts", sys.argv[1:])
