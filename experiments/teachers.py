"""teachers.py: Whose hints, and which divergence?

Targeted feedback distils a teacher that reads a hint into the policy that does not. Who is the
teacher (the policy of the moment, its moving average, or the policy that RL began from), which
divergence, and does it matter what the hint says? 20 steps of RL.

    reward alone                        no feedback
    EMA, reverse KL                     the default
    current, frozen                     other teachers
    whole turn                          a KL on all that was sampled of the flagged turn
    as stated                           both: the current policy under the hint, and the whole turn
    forward KL, JSD                     other divergences
    empty hint                          a placebo: the teacher reads a hint without words
    wrong hint                          a placebo: it names the tools that are not there as there

    python -m experiments.teachers

Found (commit 534553e or older): all true hints unlearn the habit (.280 -> .031 to .053), and all
cost some of the solve rate at 20 steps, as the empty hint does. Jensen-Shannon costs half as
much. The current policy as its own teacher may run after itself. Figure: figures/teachers.png.
"""

import sys
from dataclasses import replace

import feedback_distill
import train
from experiments import runner
from experiments.runner import Arm, Experiment


# 1. What does the teacher read? train.Reinforcement asks its method find_hints for the hints on a
#    rollout. A placebo changes their words, and nothing else.
class EmptyHint(train.Reinforcement):
    def find_hints(self, rollout):
        return [replace(hint, text="") for hint in super().find_hints(rollout)]


def name_wrong_tools(rollout, hints):
    """The hints on a rollout, which now say that the tools that were called are there, all of
    them"""
    wrong = []
    for hint in hints:
        turn = rollout.segments[hint.segment].turns[hint.turn]
        tools = dict.fromkeys([*rollout.task.tools, *(call.name for call in turn.calls)])
        text = f"Reminder: Available tools: {', '.join(tools)}."
        wrong.append(replace(hint, text=text))
    return wrong


class WholeTurn(train.Reinforcement):
    def find_hints(self, rollout):
        """On all that was sampled of the turn, and not on the call and its name alone"""
        return [replace(hint, call=None, character=None) for hint in super().find_hints(rollout)]


class WrongHint(train.Reinforcement):
    def find_hints(self, rollout):
        return name_wrong_tools(rollout, super().find_hints(rollout))


# 2. The patches. Who teaches, and by which divergence, are constants of the recipe: each is changed
#    where it stands.
def empty_hint():
    train.STAGE["rl"] = EmptyHint


def wrong_hint():
    train.STAGE["rl"] = WrongHint


def whole_turn():
    train.STAGE["rl"] = WholeTurn


def current_teacher():
    feedback_distill.TEACHER = "current"


def as_stated():
    current_teacher()
    whole_turn()


def frozen_teacher():
    feedback_distill.TEACHER = "frozen"


def forward_kl():
    feedback_distill.DIVERGENCE = "forward"


def jensen_shannon():
    feedback_distill.DIVERGENCE = "jsd"


# 3. The arms.
SHORT = ("--steps=20", "--max_turns=20")
EXPERIMENT = Experiment(
    question="Whose hints, and which divergence?",
    curves=("bad_tool",),
    arms={
        "reward alone": Arm((*SHORT, "--feedback=0")),
        "EMA, reverse KL": Arm(SHORT),
        "current": Arm(SHORT, current_teacher),
        "frozen": Arm(SHORT, frozen_teacher),
        "whole turn": Arm(SHORT, whole_turn),
        "as stated": Arm(SHORT, as_stated),
        "forward KL": Arm(SHORT, forward_kl),
        "JSD": Arm(SHORT, jensen_shannon),
        "empty hint": Arm(SHORT, empty_hint),
        "wrong hint": Arm(SHORT, wrong_hint),
    },
)

if __name__ == "__main__":
    runner.main("experiments.teachers", sys.argv[1:])
