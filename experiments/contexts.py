"""contexts.py: What should the teacher read? One loss, and a context for each method that we know.

All of them distil the policy that reads more into the one that reads less, on tokens that the
latter sampled. They differ in what is read, and above which turn:

    a rule's sentence       above a call to a tool that does not exist (Composer; the default)
    a wrong sentence        the same, but it says that this tool is there: what moves under it, too,
                            is no knowledge (arXiv 2606.11709)
    no words                the same, empty
    the specification       above an edit that put a function back wrongly: its line of the docs
                            (OPSD, 2601.18734: privileged knowledge)
    the failing test        above the same edit: what the next test run said of the function (SDPO,
                            2601.20802: feedback of the environment)
    a solved sibling        above the same edit: how a solved rollout of the group wrote it (SDPO)
    a demonstration         above every turn of a rollout that failed: all edits of the expert
                            (SDFT, 2601.19897)

    python -m experiments.contexts
    python -m experiments.contexts --gap=assets/sft      which of them does this policy heed?

The first runs 20 steps of RL with each. --gap tells: places, and per token that would be distilled:
how far student and teacher are apart (KL), by how much the context raises the log-probability of
what was sampled there, and, of wrong edits, that of the right text in its place. Left out: an
external teacher.

Found (assets/sft): a wrong sentence moves this policy as much as the right one (KL .18 and .17 nats
a token): it heeds that a hint stands there. Only the specification makes the right text likelier
(+.11 a token); a sibling and a demonstration make all text less likely. The arms have not been run.
"""

import sys
from dataclasses import replace

import numpy as np
import torch

import eval
import feedback_distill
import rollout
import train
from command.flags import usage_error
from experiments import runner, teachers
from experiments.opponents import RULES
from experiments.runner import Arm, Experiment
from feedback_distill import Hint
from world.micro import Function


# 1. Where was a function put back wrongly?
def targets_of(played):
    return [Function(**target) for target in played.task.meta.get("targets", ())]


def find_edits(played):
    """-> [(segment, turn, number of the call, target, the text that it writes)] of all edits that
    write one of the task's functions"""
    found = []
    for e, segment in enumerate(played.segments):
        for i, turn in enumerate(segment.turns):
            calls = turn.calls if turn.role == "assistant" else ()
            for n, call in enumerate(calls):
                if call.name != "edit_file" or len(call.args) != 3 or call.error:
                    continue
                for target in targets_of(played):
                    if f"def {target.name}(" in call.args[2]:
                        found.append((e, i, n, target, call.args[2]))
    return found


def is_right(target, text):
    return target.code().strip() in text


def wrong_edits(played):
    """At most one of each turn, since a turn has one hint"""
    found = {}
    for e, i, n, target, text in find_edits(played):
        if not is_right(target, text):
            found.setdefault((e, i), (n, target))
    return [(*place, *what) for place, what in found.items()]


# 2. The contexts: (rollout, its group) -> Hints. A hint that names no call speaks about the whole
#    turn.
def rule(played, group):
    return feedback_distill.detect(played, RULES)


def wrong_sentence(played, group):
    return teachers.name_wrong_tools(played, rule(played, group))


def no_words(played, group):
    return [replace(hint, text="") for hint in rule(played, group)]


def above_wrong_edits(played, tell):
    """tell(segment, turn, target) -> text, or "" where there is nothing to tell"""
    hints = []
    for e, i, _, target in wrong_edits(played):
        text = tell(e, i, target)
        if text:
            hints.append(Hint(text, segment=e, turn=i))
    return hints


def above_every_turn(played, text):
    """Above each turn of the policy"""
    hints = []
    for e, segment in enumerate(played.segments):
        for i, turn in enumerate(segment.turns):
            if turn.role == "assistant":
                hints.append(Hint(text, segment=e, turn=i))
    return hints


def specification(played, group):
    return above_wrong_edits(played, lambda e, i, target: f"{target.name}: {target.phrase()}")


def failing_test(played, group):
    def tell(e, i, target):
        # The next test run of this context that speaks of the function
        for turn in played.segments[e].turns[i + 1 :]:
            for call in turn.calls:
                lines = [line for line in call.output.split("\n") if target.name in line]
                if call.args == [played.task.test_command] and lines:
                    return lines[0]
        return ""

    return above_wrong_edits(played, tell)


def solved_sibling(played, group):
    written = {}
    for one in group:
        if one.solved and one is not played:
            for *_, target, text in find_edits(one):
                written.setdefault(target.name, text)
    return above_wrong_edits(played, lambda e, i, target: written.get(target.name, ""))


def demonstration(played, group):
    if played.solved or not targets_of(played):
        return []
    return above_every_turn(played, "".join(target.code() for target in targets_of(played)))


CONTEXTS = (
    rule,
    wrong_sentence,
    no_words,
    specification,
    failing_test,
    solved_sibling,
    demonstration,
)


# 3. A patch for each: all else is the default run.
class WithContext(train.Reinforcement):
    context = staticmethod(rule)

    def weigh_segments(self, groups):
        # A context may look at the other rollouts of the group.
        self.group_of = {id(played): group for group in groups for played in group}
        return super().weigh_segments(groups)

    def find_hints(self, played):
        return self.context(played, self.group_of[id(played)])


def make_patch(context):
    """-> the patch with which the teacher reads this context, read_<its name>"""

    def patch():
        stage = type("Stage", (WithContext,), {"context": staticmethod(context)})
        train.STAGE["rl"] = stage

    patch.__name__ = f"read_{context.__name__}"
    # The process of an arm finds its patch by this name.
    globals()[patch.__name__] = patch
    return patch


# 4. Which of them does a policy heed?
@torch.no_grad()
def measure_gap(model, tokenizer, played, hint):
    """-> (tokens, KL, change of the log-probability of what was sampled, tokens of the right text,
    the change of its log-probability), all summed over the tokens that the hint speaks about"""
    segment = played.segments[hint.segment]
    spliced = feedback_distill.splice(tokenizer, segment, hint)
    student, teacher, tokens = eval.logits_with_and_without(model, segment, spliced)
    kl = feedback_distill.divergence(student, teacher, "reverse").sum()

    def change(logits, tokens):
        without, under = (one.log_softmax(-1).gather(1, tokens[:, None]) for one in logits)
        return float((under - without).sum())

    sampled = change((student, teacher), tokens)
    # A turn that calls a wrong tool, or that only looks, has written nothing wrong.
    edits = {(e, i): (n, target) for e, i, n, target in wrong_edits(played)}
    place = hint.segment, hint.turn
    if hint.kind in RULES or place not in edits:
        return len(tokens), float(kl), sampled, 0, 0.0

    # The right text where the wrong one was written: the turn as it was up to there, then the code.
    n, target = edits[place]
    turn = segment.turns[hint.turn]
    first, _ = tokenizer.find_written_character(turn, n, 0)
    right = tokenizer.encode(target.code())
    begun = turn.tokens[: turn.head + first]
    ends = replace(spliced, turn=begun + right, first=len(begun), end=len(begun + right))
    *pair, tokens_of_right = eval.logits_with_and_without(model, segment, ends)
    return len(tokens), float(kl), sampled, len(right), change(pair, tokens_of_right)


def print_gaps(folder):
    model, tokenizer, config = eval.load_policy(folder)
    tasks = eval.held_out(8, (0, 1, 2, 3, 4))
    groups = eval.play_tasks(model, tokenizer, config, tasks, passes=4)
    for group in groups:
        for played in group:
            rollout.grade(played)
    print(f"{folder}: {sum(map(len, groups))} rollouts\n")
    print(f"{'what the teacher reads':24s}places  tokens      KL  sampled   right")
    for context in CONTEXTS:
        rows = []
        for group in groups:
            for played in group:
                for hint in context(played, group):
                    rows.append(measure_gap(model, tokenizer, played, hint))
        tokens, kl, sampled, of_right, right = np.sum(rows or [[0] * 5], axis=0)
        cells = [kl / max(tokens, 1), sampled / max(tokens, 1)]
        told = f"{right / of_right:+8.3f}" if of_right else f"{'-':>8}"
        name = context.__name__.replace("_", " ")
        print(f"{name:24s}{len(rows):6d}{int(tokens):8d}{cells[0]:8.3f}{cells[1]:+9.3f}{told}")


# 5. The arms
SHORT = ("--steps=20",)
EXPERIMENT = Experiment(
    question="What should the teacher read?",
    curves=("bad_tool", "solved"),
    arms={
        "reward alone": Arm((*SHORT, "--feedback=0")),
        **{one.__name__.replace("_", " "): Arm(SHORT, make_patch(one)) for one in CONTEXTS},
    },
)

if __name__ == "__main__":
    given = sys.argv[1:]
    if not given or not given[0].startswith("--gap="):
        runner.main("experiments.contexts", given)
    else:
        try:
            print_gaps(given[0].removeprefix("--gap="))
        except (ValueError, OSError) as error:
            usage_error(str(error), "experiments.contexts")
