"""habits.py: How fast do habits go that cost the reward little or nothing?

Each habit has a flaw that is planted in the demonstrations, a rule that finds it, and one sentence
that stands above the right turn in some demonstrations, and above the flagged turn in RL. Both arms
begin at an SFT with hints on all six.

    unavailable_tool        a call to a tool that is not there
    malformed_arguments     a call without its last argument
    code_style              a comment in the code
    repetition              looking up what the context shows, or testing what has not changed
    unfinished              ending while the tests are red
    communication           a last message that is missing or untrue

    reward alone                  without the distillation of hints
    with targeted feedback        hints on all six habits
    a mean for each habit         the same, but the divergence is a mean over a habit's own tokens,
                                  and not over those of all six

    python -m experiments.habits

Found (seeds 1337, 1, 2): with hints wrong tools go from .38 to .05 of the held-out rollouts (by the
reward alone to .42), comments from .18 to .05 (.18), malformed calls from .21 to .08 (.16). Looking
up again is held down in one seed (.25 to .22; .34), untrue messages hardly go (.34 to .26; .34),
ending on red tests goes in both. Solved .85, .92, .72; by the reward alone .86, .92, .87. With a
mean for each habit wrong tools take 10 steps to half in the place of 16, comments 8 in that of 19,
but less is solved in each seed (.68, .88, .71).
Figure: figures/habits.png.
"""

import sys

import feedback_distill
import train
from command import step_log
from experiments import runner, tables
from experiments.runner import Arm, Experiment
from experiments.tables import HABITS

ALL_HABITS = f"--habits={','.join(feedback_distill.REMINDERS)}"


# A constant of the recipe is changed where it stands.
def more_neutral_hints():
    """Hints above a tenth of the turns without a fault, instead of a twentieth: with six habits
    more of them have a fault."""
    train.NEUTRAL_HINT_RATE = 0.1


# A hint on a whole turn speaks about all of its tokens, one on a call about its name. In a mean
# over all of them a habit that has many tokens leaves the others little. Here each habit has a mean
# of its own, which weighs what it would weigh without the others.
plain_splice = feedback_distill.splice
plain_pack, plain_loss = feedback_distill.pack_hinted, feedback_distill.feedback_loss


def splice_with_kind(tokenizer, segment, hint):
    spliced = plain_splice(tokenizer, segment, hint)
    spliced.kind = hint.kind
    return spliced


class MeanOfEach(train.Reinforcement):
    def weigh_segments(self, groups):
        items = super().weigh_segments(groups)
        hints = [hint for segment, _ in items for hint in segment.hints]

        # {kind: by how much its sum is divided}, as the recipe divides that of all
        self.counts = {}
        for kind in feedback_distill.REMINDERS:
            flagged = sum(hint.num_targets for hint in hints if hint.kind == kind)
            self.counts[kind] = max(self.num_rollouts, int(self.run.sum(flagged)))
        # What the recipe calls for each micro-batch behind this knows the counts of this step.
        feedback_distill.pack_hinted, feedback_distill.feedback_loss = self.pack, self.loss
        return items

    def pack(self, segments):
        hints = [hint for segment in segments for hint in segment.hints]
        self.kinds = [hint.kind for hint in hints for _ in range(hint.num_targets)]
        return plain_pack(segments)

    def loss(self, student, teacher, count):
        total = plain_loss(student[:0], teacher[:0], count)
        for kind, own_count in self.counts.items():
            rows = [n for n, one in enumerate(self.kinds) if one == kind]
            if rows:
                total = total + plain_loss(student[rows], teacher[rows], own_count)
        return total


def mean_of_each():
    feedback_distill.splice = splice_with_kind
    train.STAGE["rl"] = MeanOfEach


def held_out(folder, policies):
    """Shares of the held-out rollouts that have each habit, before RL and after it; and the step of
    RL at which its share of the rollouts is halved, one more than there were if it never is"""
    log, numbers = step_log.read_step_log(folder, "rl"), {}
    for name in HABITS:
        for when in ("before RL", "after RL"):
            numbers[f"{name}: held out, {when}"] = policies[when]["overall"][name]
        numbers[f"{name}: half at"] = tables.first_step_at(0.5, [line[name] for line in log])
    return numbers


# `sft` is a supervised stage of the experiment's own, from which all arms begin. A policy this
# small cannot read a hint that it has never seen, so its demonstrations hold hints on all habits.
EXPERIMENT = Experiment(
    question="How fast do habits go that cost nothing?",
    curves=HABITS,
    arms={
        "reward alone": Arm((ALL_HABITS, "--feedback=0")),
        "with targeted feedback": Arm((ALL_HABITS,)),
        "a mean for each habit": Arm((ALL_HABITS,), mean_of_each),
    },
    sft=Arm((ALL_HABITS,), more_neutral_hints),
    more=held_out,
)

if __name__ == "__main__":
    runner.main("experiments.habits", sys.argv[1:])
