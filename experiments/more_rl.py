"""more_rl.py: Does more RL teach what no sample could do, or does it choose among what was there?

Stated (Technical Report on Composer 2): mean and best of 16 rise together. 160 steps; at steps 0,
10, 20, 40, 80 and 160 the policy plays 54 held-out tasks and 28 of the bench at high effort, 16
times each. Where only the mean rises, RL makes likely what the policy could do before. Of the
solved rollouts of a task: how many different sequences of calls are among them?

    160 steps

    python -m experiments.more_rl
    python -m experiments.more_rl --draw=out/more_rl/160_steps-1337

Found (seeds 1337 and 2): it chooses among what was there. The mean comes up to the best of 16 (held
out .64, .60 to .97; bench .16, .15 to .45, .43), which hardly moves (bench .36, .39 to .46 within
ten steps, and no further). What is solved is solved in fewer ways (different .83, .84 to .26, .36).
Figure: figures/more_rl_by_step.png.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

import eval
import length_penalty
import rollout
import synth_tasks
import train
from command import drawing
from experiments import runner
from experiments.runner import Arm, Experiment

AT = (0, 10, 20, 40, 80, 160)
# Of the levels of the evaluation, nearly all held-out tasks have a solved rollout among 16 before
# RL; on the bench the best has room to rise.
TASKS_OF_A_LEVEL, TASKS_OF_A_ROW, PASSES = 6, 2, 16
FILE = "held_out.jsonl"


# 1. What is measured of the policy of a moment
def measure(groups):
    """Judged rollouts, a group for each task -> the share solved, the share of the tasks with one
    that is, and how many different sequences of calls stand among the solved ones, for each"""
    solved, different = [], []
    for group in groups:
        for played in group:
            rollout.grade(played)
        ways = [
            tuple((call.name, *call.args) for turn in played.turns for call in turn.calls)
            for played in group
            if played.solved
        ]
        solved.append(len(ways) / len(group))
        if ways:
            different.append(len(set(ways)) / len(ways))
    return {
        "mean": float(np.mean(solved)),
        "best": float(np.mean(np.array(solved) > 0)),
        "different": float(np.mean(different or [np.nan])),
    }


# 2. The stage of RL, which stops for it
class Measured(train.Reinforcement):
    def losses(self, step, log):
        if step in AT:
            self.measure(step)
        yield from super().losses(step, log)

    def validate(self):
        self.measure(self.run.config.steps)
        return super().validate()

    def measure(self, step):
        run, found = self.run, {"step": step}
        levels = eval.read_levels(run.config.eval_levels)
        held_out = eval.held_out(TASKS_OF_A_LEVEL, levels)
        bench = eval.held_out(TASKS_OF_A_ROW, synth_tasks.BENCH_LEVELS, "bench")
        config = asdict(run.config)
        for name, tasks in (("held out", held_out), ("bench", bench)):
            tasks = [length_penalty.ask_for(task, "high") for task in tasks]
            groups = eval.play_tasks(run.model, run.tokenizer, config, tasks, passes=PASSES)
            found |= {f"{name}: {number}": value for number, value in measure(groups).items()}
        # A run that was stopped may measure a step again: the last line counts.
        with open(Path(run.config.out, FILE), "a") as file:
            file.write(json.dumps(found) + "\n")


def measured():
    train.STAGE["rl"] = Measured


# 3. What a run has found, as numbers and as a figure
def read_measures(folder):
    """-> {step: numbers of `measure`}"""
    if not Path(folder, FILE).exists():
        raise ValueError(f"{folder}: no run of this experiment (it has no {FILE})")
    lines = [json.loads(line) for line in Path(folder, FILE).read_text().splitlines()]
    return {line.pop("step"): line for line in lines}


def mean_and_best(folder, policies):
    found = {}
    for step, numbers in read_measures(folder).items():
        found |= {f"{name} at step {step}": value for name, value in numbers.items()}
    return found


def draw(folders, path):
    """A line for each run and number, over the logarithm of the steps"""
    figure, panels = drawing.make_axes("", "", "", 3)
    figure.suptitle(EXPERIMENT.question)
    held_out, bench, different = panels
    lines = (
        (held_out, "held out: mean", "C0", "mean"),
        (held_out, "held out: best", "C1", "best of 16"),
        (bench, "bench: mean", "C0", "mean"),
        (bench, "bench: best", "C1", "best of 16"),
        (different, "held out: different", "C0", "held out"),
        (different, "bench: different", "C1", "bench"),
    )
    for folder in folders:
        found = read_measures(folder)
        x = [step + 1 for step in found]
        for panel, name, color, _ in lines:
            y = [numbers[name] for numbers in found.values()]
            panel.plot(x, y, color=color, marker="o", alpha=0.7)
            panel.annotate(f"{y[-1]:.2f}", (x[-1], y[-1]), color=color)
    # One line of the legend for all runs: they differ by their seeds alone.
    for panel, _, color, said in lines:
        panel.plot([], [], color=color, label=said)
    for panel, said in (
        (held_out, "solved of 54 held-out tasks"),
        (bench, "solved of 28 tasks of the bench"),
        (different, "different sequences of calls among the solved"),
    ):
        panel.set(xscale="log", xlabel="steps of RL, and one", ylabel=said, ylim=(0, 1.05))
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def draw_runs(folders):
    """folders: of runs, with commas"""
    Path("out").mkdir(exist_ok=True)
    draw(folders.split(","), "out/more_rl.png")
    print("out/more_rl.png")


EXPERIMENT = Experiment(
    question="More RL: does the best of 16 rise with the mean?",
    curves=("solved", "best"),
    arms={"160 steps": Arm(("--steps=160",), measured)},
    more=mean_and_best,
)

if __name__ == "__main__":
    runner.main_or("experiments.more_rl", sys.argv[1:], {"--draw": draw_runs})
