"""tasks.py: What are more tasks worth, at equal steps of RL?

The recipe draws 480 tasks, none twice. The other arms draw from a few of each level, over and over,
and are evaluated on those too.

    2 of a level         each drawn some 35 times
    10 of a level        each some seven times
    never one twice      the recipe

    python -m experiments.tasks

Found (commit 534553e or older): little, with 2 of a level .873 of unseen tasks are solved, with 10
.896, with ever new ones .906. Of those that the first two were trained on: .977 and .939. What the
few teach is how to act, and that carries over.
Figure: figures/tasks.png.
"""

import json
import math
import sys
from pathlib import Path

import eval
import synth_tasks
import train
from command import checkpoints
from command.output_files import to_json
from experiments import runner
from experiments.runner import Arm, Experiment


# 1. Which tasks? RL numbers them one by one, and a number makes the same task every time. So a
#    number taken over and over is a task drawn over and over.
class FewTasks(synth_tasks.Curriculum):
    number = 2  # of a level

    def task_number(self):
        return self.seed * 1_000_003 + self.drawn % self.number


class TenTasks(FewTasks):
    number = 10


# 2. The evaluation gets a second part: the new function calls the recipe's, then adds to its file.
def draw_from(curriculum):
    """Tasks come from `curriculum`. An evaluation adds the policy's results on the tasks that it
    was trained on, with about as many rollouts as on the others."""
    plain = train.evaluate_run

    def evaluate(config, given, sources):
        plain(config, given, sources)
        add_seen_tasks(config, curriculum.number)

    synth_tasks.Curriculum = curriculum
    train.evaluate_run = evaluate


def add_seen_tasks(config, number):
    """Evaluates the policy on tasks that RL drew, and adds its numbers to summary.json. number: how
    many tasks of each level RL drew from"""
    # The policy after RL, and the one that RL began from, which tells how far it has moved.
    run, out = train.Run(config), Path(config.out)
    model, tokenizer, saved = eval.load_policy(out / "rl", run.device, config.plain)
    origin = checkpoints.find_origin(checkpoints.load_extra(out / "rl"), out / "sft")
    began = None
    if origin:
        began = eval.load_policy(origin, run.device, config.plain)[0].compute_in(run.dtype)

    # The tasks that RL drew, with the numbers that it gave them: FewTasks.task_number. Fewer tasks
    # than the evaluation has of a level are played more often.
    number = min(number, config.eval_tasks)
    passes = max(1, config.eval_tasks * config.eval_samples // number)
    first = saved["seed"] * 1_000_003
    tasks = []
    for level in eval.read_levels(config.eval_levels):
        tasks += [train.make_training_task(config, level, first + i) for i in range(number)]
    tasks = eval.ask_for_each(tasks, eval.settings_of(saved))

    # Each rank plays its share. As in the recipe's evaluation, the rules are those of the run.
    mine = eval.run_policy(
        model.compute_in(run.dtype),
        tokenizer,
        {**saved, "plain": config.plain},
        run.share(tasks),
        passes,
        temperature=saved["temperature"],
        numbers=run.share(range(len(tasks))),
        reference=began,
    )

    # The first rank adds them to the file that the recipe's evaluation has written.
    records = run.gather(mine)
    if run.rank == 0:
        path = out / "summary.json"
        summary = json.loads(path.read_text())
        seen = {
            "overall": eval.summarize_records(records),
            "levels": eval.summarize_levels(records),
        }
        summary["policies"]["after, seen"] = seen
        path.write_text(to_json(summary, indent=1))
        print(f"solved, of the tasks it was trained on: {seen['overall']['solved']:.3f}")


# 3. The patches.
def two_of_a_level():
    draw_from(FewTasks)


def ten_of_a_level():
    draw_from(TenTasks)


# 4. What the table says beside the usual numbers, and the arms.
def solved_of_the_seen(folder, policies):
    seen = policies.get("after, seen")
    return {"solved, seen": seen["overall"]["solved"] if seen else math.nan}


EXPERIMENT = Experiment(
    question="What are more tasks worth?",
    curves=("reward",),
    arms={
        "2 of a level": Arm(patch=two_of_a_level),
        "10 of a level": Arm(patch=ten_of_a_level),
        "never one twice": Arm(),
    },
    by_level=("solved",),
    more=solved_of_the_seen,
)

if __name__ == "__main__":
    runner.main("experiments.tasks", sys.argv[1:])
