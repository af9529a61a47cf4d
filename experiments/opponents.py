"""opponents.py: Is a targeted hint better than telling the policy by its reward?

The claim (cursor.com/blog/composer-2-5): a reward at the end of hundreds of thousands of tokens
tells that something went wrong, and not where. So the opponents see the same rules and the same
turns as the hint, and only what is made of them differs.

    neither              no feedback at all
    scalar               the reward of a rollout falls by BEHAVIOUR for each flagged turn
    constant             a negative advantage on the flagged tokens alone, of the weight that the
                         distillation has there: no teacher (arXiv 2608.31046 found it as good)
    hint                 the default run
    scalar and hint      both

    python -m experiments.opponents
    python -m experiments.opponents --lengths=out/long    runs of other lengths, in folders ARM-NAME

steps to half: the first step at which the mean of five is half of the first five's; one more than
there were, if there is none. wrong, offered, no call: where the policy before RL has called a tool
that does not exist, the probability, after RL, of calling that one, one of those offered, and
nothing.

Found (seeds 1337, 1, 2): the reward alone leaves the habit, every opponent removes it. It is halved
in 12, 10 and 10 steps by the hint, in 17, 20 and 9 by the scalar, in 8, 8 and 7 by the constant;
held out they solve .892, .841 and .907 in the mean, .890 without any. The hint solves more on the
way than the scalar. The constant calls nothing more often where it called a wrong tool, and with a
weight of .15 (up to twice that, before its patch was mended) it did harm (.12, .04, .26 less
solved), the hint hardly (.01 and .08 less, .10 more). Length does not part them: with 5, 23 and 36
turns the scalar takes 11 steps, the hint 8 to 11 (one seed).
Figures: figures/opponents.png, figures/lengths.png.
"""

import math
import sys
from pathlib import Path

import torch

import eval
import feedback_distill
import rollout
import train
from command import checkpoints, drawing, step_log
from experiments import runner, tables
from experiments.runner import Arm, Experiment

RULES = ("unavailable_tool",)
BEHAVIOUR = 0.2  # what a flagged turn costs of the reward


# 1. The scalar: the same turns, told by the reward.
def scalar():
    plain = rollout.grade

    def grade(played, price=rollout.FREE):
        plain(played, price)
        played.reward -= BEHAVIOUR * len(feedback_distill.detect(played, RULES))

    rollout.grade = grade


# 2. The constant: the same tokens, and no teacher.
class Constant(train.Reinforcement):
    """Makes each flagged token less likely, by what --feedback weighs on it in the distillation"""

    def find_hints(self, played):
        return feedback_distill.detect(played, RULES)

    def weigh_segments(self, groups):
        items = super().weigh_segments(groups)
        flagged = sum(hint.num_targets for segment, _ in items for hint in segment.hints)
        self.count = max(self.num_rollouts, int(self.run.sum(flagged)))
        return items

    def policy_objective(self, logp, batch, normaliser, reference):
        loss = super().policy_objective(logp, batch, normaliser, reference)
        targets = feedback_distill.pack_hinted(batch["segments"])
        flagged = logp[targets.student_row, targets.student_position]
        return loss + train.Config.feedback / self.count * flagged.sum()


def constant():
    train.STAGE["rl"] = Constant


# 3. What has become of the place where the wrong tool was called?
def choices(folder, policies):
    """-> numbers of a run's end: see the head of this file"""
    after = eval.load_policy(folder)
    saved = checkpoints.load_extra(folder / "rl")
    before = eval.load_policy(checkpoints.find_origin(saved))

    # Calls to tools that do not exist, by the policy from which RL began, each in its context
    tasks = eval.held_out(4, (0, 1, 2, 3))
    found = []
    for group in eval.play_tasks(*before, tasks, passes=1):
        for played in group:
            for hint in feedback_distill.detect(played, RULES):
                found.append(call_choices(after[0], after[1], played, hint))
    wrong, offered, no_call = torch.tensor(found).mean(0).tolist() if found else [math.nan] * 3
    curve = [line["bad_tool"] for line in step_log.read_step_log(folder, "rl")]
    return {
        "steps to half": tables.first_step_at(0.5, curve),
        "wrong": wrong,
        "offered": offered,
        "no call": no_call,
    }


@torch.no_grad()
def call_choices(model, tokenizer, played, hint):
    """-> probabilities (the wrong tool, one of those offered, no call at all) at the call that a
    hint is about"""
    segment = played.segments[hint.segment]
    spliced = feedback_distill.splice(tokenizer, segment, hint)
    context = spliced.above + spliced.turn[: spliced.first]

    def probability(tokens):
        logits = model.logits(model(torch.tensor([context + tokens]))[0])
        logp = logits[len(context) - 1 : -1].log_softmax(-1)
        return float(logp.gather(1, torch.tensor(tokens)[:, None]).sum().exp())

    call = tokenizer.id["<|call|>"]
    named = [[call, *tokenizer.encode(tool)] for tool in played.task.tools]
    wrong = spliced.turn[spliced.first : spliced.end]
    return probability(wrong), sum(map(probability, named)), 1 - probability([call])


# 4. Do the arms part where rollouts are longer?
def read_lengths(folder):
    """Runs in folders ARM-NAME -> {arm: [(turns of a rollout in the first step, steps to half,
    steps) of each run, the shortest first]}"""
    found = {}
    for path in sorted(Path(folder).glob("*-*/rl.jsonl")):
        lines = step_log.read_step_log(path.parent, "rl")
        half = tables.first_step_at(0.5, [line["bad_tool"] for line in lines])
        # In the first step all arms play the same tasks with the same policy.
        point = lines[0]["turns"], half, len(lines)
        found.setdefault(path.parent.name.partition("-")[0], []).append(point)
    if not found:
        raise ValueError(f"{folder}: no runs there (folders ARM-NAME with an rl.jsonl)")
    return {arm: sorted(points) for arm, points in found.items()}


def show_lengths(folder):
    """Prints the points, and draws them as a line for each arm"""
    found = read_lengths(folder)
    figure, ax = drawing.make_axes(
        "Does the length of a rollout part them?", "turns of a rollout, first step", "steps to half"
    )
    for arm, points in found.items():
        said = []
        for turns, half, steps in points:
            # A run that never came to the half has one step more than there were.
            said.append(
                f"{turns:.0f} turns: " + (f"{half}" if half <= steps else f"not in {steps}")
            )
        print(f"{arm:12s}{', '.join(said)}")
        turns, half, _ = zip(*points)
        ax.plot(turns, half, marker="o", label=arm)
    ax.set_ylim(bottom=0)
    ax.legend()
    figure.savefig(Path(folder, "lengths.png"), dpi=120)


# 5. The arms
EXPERIMENT = Experiment(
    question="A hint at the turn, or a price in the reward",
    curves=("bad_tool", "solved"),
    arms={
        "neither": Arm(("--feedback=0",)),
        "scalar": Arm(("--feedback=0",), scalar),
        "constant": Arm(("--feedback=0",), constant),
        "hint": Arm(),
        "scalar and hint": Arm((), scalar),
    },
    more=choices,
    by_seed=("steps to half", "wrong tool", "solved", "moved", "wrong", "offered", "no call"),
)

if __name__ == "__main__":
    runner.main_or("experiments.opponents", sys.argv[1:], {"--lengths": show_lengths})
