"""contexts.py: What should the teacher read, who is it, and which divergence?

One loss, and an arm for each method that we know. All of them distil the policy that reads more
into the one that reads less, on tokens that the latter sampled. They differ in what is read, and
above which turn:

    a rule's sentence       above a call to a tool that does not exist (Composer; the default)
    whole turn              the same, on all tokens of the turn and not on the call's name alone
    a wrong sentence        the same, but it says that this tool is there: what moves under it, too,
                            is no knowledge (arXiv 2606.11709)
    no words                the same, empty
    the specification       above an edit that put a function back wrongly: its line of the docs
                            (OPSD, 2601.18734: privileged knowledge; "as OPSD" also has that paper's
                            forward KL, clipped entry by entry, and its frozen teacher; "text alone"
                            teaches what the edit writes, and not the decision to write)
    the failing test        above the same edit: what the next test run said of the function (SDPO,
                            2601.20802: feedback of the environment)
    a solved sibling        above the same edit: how a solved rollout of the group wrote it (SDPO)
    a demonstration         above every turn of a rollout that failed: all edits of the expert
                            (SDFT, 2601.19897)

The default's teacher is a moving average of the policy, and its divergence the reverse KL. Others,
with the rule's sentence: the current policy, the policy that RL began from ("frozen"), the forward
KL, Jensen-Shannon. "as stated" is the current policy on the whole turn. A larger model is a teacher
that reads no more than the policy does, and teaches all that was sampled (on-policy distillation);
it is twice as wide, after the same SFT, and made first, for each seed:

    for stage in pretrain long sft eval; do
        python train.py --stage=$stage --dim=256 --seed=1337 --out=out/wide-1337
    done

    python -m experiments.contexts
    python -m experiments.contexts --gap=assets/sft      which of them does this policy heed?
    python -m experiments.contexts --places=assets/rl    from which output did an edit come?

The first runs 20 steps of RL with each arm. --gap tells: places, and per token that would be
distilled: how far student and teacher are apart (KL), by how much the context raises the
log-probability of what was sampled there, and, of wrong edits, that of the right text in its place.
--places is a reader that finds the place: it blanks one tool output after the other, and where what
an edit wrote becomes least likely, there it came from.

Found (the SFT of three seeds): a wrong sentence moves a policy nearly as much as the right one (KL
.11 .17 .13 and .11 .21 .16 nats a token): it heeds that a hint stands there. Only the specification
makes the right text likelier (+.07 to +.08); a sibling and a demonstration make all text less
likely. In RL (20 steps; seeds 1, 2 and two SFTs of 1337) teachers that read of tools remove wrong
calls (.03 to .12, by Jensen-Shannon .14 to .19, in the place of .39 to .71), also one that reads a
wrong sentence (seeds 1337, 1, 2: .05, .03, .08, the right one .07, .03, .08); no words do not. The
default solves .837 in the mean of three seeds, with the current policy as the teacher .787, on the
whole turn .794; those two move the policy elsewhere by .05 to .11 nats a token, the default by .04.
After 40 steps all solve alike (.897, .880, .899 in the mean, the reward alone .890), but that one
run of three as stated, both at once, goes astray (.731 .889 .912); the default moves the policy
least (.061, the others .083 to .087). Contexts that tell of an edit add little to the reward at a
weight of .03 (.01 to .04 more solved in seeds 1 and 2; one run in four with a sibling went wrong,
.49), and ruined the policy at .15 (.19 to .37 solved): it learned to write without a look what only
its teacher has read. A larger model adds .01, .06 and .02 to what the reward alone solves, though
it solves less itself.
"""

import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import eval
import fast
import feedback_distill
import rollout
import train
from command import checkpoints, step_log
from command.flags import usage_error
from experiments import runner
from experiments.opponents import RULES
from experiments.runner import Arm, Experiment
from feedback_distill import Hint
from world.micro import Function


# 1. Where was a function put back wrongly?
def targets_of(played):
    return [Function(**target) for target in played.task.meta.get("targets", ())]


def writes_function(call, name=r"\w+"):
    """Is it an edit that writes a function, of this name where one is given?"""
    is_edit = call.name == "edit_file" and len(call.args) == 3 and not call.error
    return is_edit and bool(re.search(rf"def {name}\(", call.args[2]))


def find_edits(played):
    """-> [(segment, turn, number of the call, target, the text that it writes)] of all edits that
    write one of the task's functions"""
    found = []
    for e, segment in enumerate(played.segments):
        for i, turn in enumerate(segment.turns):
            calls = turn.calls if turn.role == "assistant" else ()
            for n, call in enumerate(calls):
                for target in targets_of(played):
                    if writes_function(call, target.name):
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


def whole_turn(played, group):
    return [replace(hint, call=None, character=None) for hint in rule(played, group)]


def wrong_sentence(played, group):
    """Says that the tools that were called are there, all of them"""
    hints = []
    for hint in rule(played, group):
        turn = played.segments[hint.segment].turns[hint.turn]
        tools = dict.fromkeys([*played.task.tools, *(call.name for call in turn.calls)])
        text = f"Reminder: Available tools: {', '.join(tools)}."
        hints.append(replace(hint, text=text))
    return hints


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
    whole_turn,
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


def stage_with(context):
    """The stage of RL whose teacher reads this context"""
    return type("Stage", (WithContext,), {"context": staticmethod(context)})


def make_patch(context):
    """-> the patch with which the teacher reads this context, read_<its name>"""

    def patch():
        train.STAGE["rl"] = stage_with(context)

    patch.__name__ = f"read_{context.__name__}"
    # The process of an arm finds its patch by this name.
    globals()[patch.__name__] = patch
    return patch


# Who teaches and by which divergence are constants of the recipe: each is changed where it stands.
def current_teacher():
    feedback_distill.TEACHER = "current"


def frozen_teacher():
    feedback_distill.TEACHER = "frozen"


def forward_kl():
    feedback_distill.DIVERGENCE = "forward"


def jensen_shannon():
    feedback_distill.DIVERGENCE = "jsd"


def as_stated():
    """The current policy under the hint teaches all that was sampled of the turn."""
    current_teacher()
    train.STAGE["rl"] = stage_with(whole_turn)


ENTRY_CAP = 0.05  # nats that one entry of the vocabulary adds at most (OPSD's value)


def clipped_divergence(student, teacher, kind):
    """The forward KL, in which no entry of the vocabulary counts for more than ENTRY_CAP. Logits
    (N, V) twice -> (N,)"""
    s, t = student.float().log_softmax(-1), teacher.detach().float().log_softmax(-1)
    return (t.exp() * (t - s)).clamp(max=ENTRY_CAP).sum(-1)


def as_opsd():
    """The specification in OPSD's own form: clipped, and the teacher stays as it was"""
    train.STAGE["rl"] = stage_with(specification)
    feedback_distill.divergence, feedback_distill.TEACHER = clipped_divergence, "frozen"


plain_find = feedback_distill.find_hinted_tokens


def find_written_text(tokenizer, turn, hint):
    """(first, end) of what the turn's first edit of a function writes, in the place of the whole
    turn"""
    edits = [n for n, call in enumerate(turn.calls) if writes_function(call)]
    # The rules of an evaluation have hints on other turns, too.
    if hint.call is not None or not edits:
        return plain_find(tokenizer, turn, hint)
    last = len(turn.calls[edits[0]].args[2]) - 1
    first, _ = tokenizer.find_written_character(turn, edits[0], 0)
    _, end = tokenizer.find_written_character(turn, edits[0], last)
    return first, end


def specification_of_text():
    """What the teacher has read says what to write, and not when."""
    train.STAGE["rl"] = stage_with(specification)
    feedback_distill.find_hinted_tokens = find_written_text


class WithLargerTeacher(train.Reinforcement):
    """The teacher is out/wide-SEED, and reads what the policy reads."""

    def __init__(self, run):
        super().__init__(run)
        path = Path(run.config.out).parents[1] / f"wide-{run.config.seed}" / "sft"
        try:
            larger, extra = checkpoints.load_model(path)
        except (OSError, ValueError):
            usage_error(f"{path}: the larger model comes first", "experiments.contexts")
        # Its logits are compared with the policy's token by token.
        assert extra["tokenizer"]["ranks"] == run.tokenizer.ranks, f"{path}: another tokenizer"
        if not run.config.plain:
            fast.accelerate(larger)
        larger.to(run.device).compute_in(run.dtype)
        # "current": the weights that its own module holds, of which no copy is kept
        larger = larger.requires_grad_(False).eval()
        self.teacher = feedback_distill.Teacher(larger, "current")

    def find_hints(self, played):
        return above_every_turn(played, "")


def larger_teacher():
    train.STAGE["rl"] = WithLargerTeacher


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


# 5. Where did an edit come from?
@torch.no_grad()
def costs_of_blanking(model, tokenizer, segment, i, first, end):
    """{index of an earlier tool turn: by how much the log-probability of tokens first to end of the
    body of turn i falls where the text of that output is blank}"""
    tokens, _, _, index = rollout.flatten(segment)
    begin = np.flatnonzero(index == i)[0] + segment.turns[i].head
    outputs = [j for j in range(i) if segment.turns[j].role == "tool"]

    # One row as it was, and one for each output. A row keeps its length, so all else stays in its
    # place.
    blank = tokenizer.encode("\n")[0]
    rows = np.tile(tokens[: begin + end], (1 + len(outputs), 1))
    for row, j in zip(rows[1:], outputs):
        where = np.flatnonzero(index == j)
        row[where[1:-1]] = blank

    # Position t predicts token t + 1.
    rows = torch.from_numpy(rows)  # (1 + outputs, T)
    logp = model.logprobs(model(rows[:, :-1]), rows[:, 1:])  # (1 + outputs, T - 1)
    of_edit = logp[:, begin + first - 1 :].sum(1)  # (1 + outputs,)
    return dict(zip(outputs, (of_edit[0] - of_edit[1:]).tolist()))


def costs_of_edit(model, tokenizer, segment, i, n, text):
    """The same for the text that the n-th call of turn i, an edit, writes"""
    turn = segment.turns[i]
    first, _ = tokenizer.find_written_character(turn, n, 0)
    _, end = tokenizer.find_written_character(turn, n, len(text) - 1)
    return costs_of_blanking(model, tokenizer, segment, i, first, end)


def find_places(model, tokenizer, played):
    """-> [(is the edit right, the outputs that show the specification of what it writes, the output
    that it came from, the last one before it)] of all edits with two outputs or more above them"""
    found = []
    for e, i, n, target, text in find_edits(played):
        segment = played.segments[e]
        costs = costs_of_edit(model, tokenizer, segment, i, n, text)
        shown = []
        for j in costs:
            if f"{target.module}.{target.name}: {target.phrase()}" in segment.turns[j].text:
                shown.append(j)
        if len(costs) > 1 and shown:
            found.append((is_right(target, text), shown, max(costs, key=costs.get), max(costs)))
    return found


def print_places(folder):
    model, tokenizer, config = eval.load_policy(folder)
    groups = eval.play_tasks(
        model, tokenizer, config, eval.held_out(16, (3, 4, 5, 6)), passes=2, temperature=1.0
    )
    found = []
    for group in groups:
        for played in group:
            found += find_places(model, tokenizer, played)
    print(f"{folder}: {sum(map(len, groups))} rollouts\n")
    print(f"{'edits':24s}number  blanking finds it  the last output is it")
    for name, wanted in (("right", True), ("wrong", False)):
        some = [one for one in found if one[0] == wanted]
        # Where the last output shows it, whoever takes the last one is right, too.
        other = [one for one in some if one[3] not in one[1]]
        for label, chosen in ((name, some), ("  not the last output", other)):
            shares = [np.nan, np.nan]
            if chosen:
                shares = np.mean([(one[2] in one[1], one[3] in one[1]) for one in chosen], axis=0)
            print(f"{label:24s}{len(chosen):6d}{shares[0]:19.2f}{shares[1]:23.2f}")


# 6. What does the teaching cost?
def cost_of_teaching(folder, policies):
    """Of all steps. A forward with its backward is three forwards."""
    lines = step_log.read_step_log(folder, "rl")
    distilled, teacher, trained = (
        sum(line.get(name, 0) for line in lines) for name in ("flagged", "teacher_tokens", "tokens")
    )
    return {
        "tokens distilled": distilled,
        "teacher's FLOPs over the trainer's": teacher / (3 * trained) if trained else math.nan,
    }


# 7. The arms
SHORT = ("--steps=20",)
EXPERIMENT = Experiment(
    question="What should the teacher read, and who is it?",
    curves=("bad_tool", "solved"),
    arms={
        "reward alone": Arm((*SHORT, "--feedback=0")),
        **{one.__name__.replace("_", " "): Arm(SHORT, make_patch(one)) for one in CONTEXTS},
        "specification, text alone": Arm(SHORT, specification_of_text),
        "as OPSD": Arm(SHORT, as_opsd),
        "as stated": Arm(SHORT, as_stated),
        "current": Arm(SHORT, current_teacher),
        "frozen": Arm(SHORT, frozen_teacher),
        "forward KL": Arm(SHORT, forward_kl),
        "JSD": Arm(SHORT, jensen_shannon),
        "a larger model": Arm(SHORT, larger_teacher),
    },
    more=cost_of_teaching,
    by_seed=("solved", "wrong tool", "tokens", "moved", "tokens distilled"),
)

if __name__ == "__main__":
    others = {"--gap": print_gaps, "--places": print_places}
    runner.main_or("experiments.contexts", sys.argv[1:], others)
