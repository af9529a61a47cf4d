"""feedback_distill.py: one sentence of feedback, put where the mistake was made, teaches that one
turn.

A scalar reward says that something in a hundred turns was good; it cannot say which tool call was
silly. So: write a short hint, put it right above the faulty turn, and let the same policy, now
reading the hint, re-score tokens that it has sampled. That is the teacher; the policy in the
original context is the student; a KL moves student to teacher on the tokens that the hint speaks
about: on a call and its name, say, and not on the rest of the turn.

Stated by Cursor (cursor.com/blog/composer-2-5): this construction, beside the RL objective over the
whole trajectory; one forward pass, no new decoding; the example of a tool that does not exist
("Reminder: Available tools: ..."); used from coding style to communication. Ours: who writes the
hints (rules here), the KL's direction, the teacher's weights, all coefficients; the choices are
those of SDPO (2601.20802), SDFT (2601.19897) and OPSD (2601.18734).

    student   s = log pi(. | x, y_<n)        teacher   t = log pi_T(. | x, hint, y_<n), no gradient
    reverse   sum e^s (s - t)                forward   sum e^t (t - s)
    JSD       (KL(s | m) + KL(t | m)) / 2,   m = log((e^s + e^t) / 2)
    loss      sum of these, each at most TOKEN_CAP nats, over the N tokens that hints speak about /
              max(N, number of rollouts), so that a few last hints do not outweigh the reward.
              Student and teacher at temperature 1, whatever the rollouts were sampled at

The way of a hint: a rule finds the turn (detect -> Hint), the hint is put above it in a context of
its own (splice -> Splice, in the list segment.hints), the contexts of a batch are packed
(pack_hinted -> Targets), the Teacher reads them (-> logits), feedback_loss compares.

To add a rule, write one function with its docstring under @rule: (rollout, e, i), where segment e
has the turn i, -> a Hint, a text or None. `detect` asks it, the trainer teaches it (--habits=its
name).

Left out: a trust region around the teacher; replaying the sampled experts in the teacher's forward
(it routes by itself); targets spread over context-parallel ranks; a second hint on one turn.

Letters (README has them all): B rows of the trainer's batch, T their length, N targets (the tokens
that the hints speak about), V vocabulary.

    python feedback_distill.py    a small policy, wrong tools, the hint's KL per token, the cure
    python feedback_distill.py --ask=out/run/transcripts.jsonl --rules=code_style
                                  which turns of a run would this rule flag?
"""

import posixpath
import random
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from muon import copy_tensors, to_local
from rollout import Limits, Tokenizer, demonstrate, make_turn, pack, play_moves
from synth_tasks import make_task
from world.expert import PHANTOMS, expert, hinted_moves
from world.lint import find_new_comment
from world.requests import PASSED, done_targets, is_untrue, spoken_words, target_names
from world.tools import ARGUMENTS, TOOLS

# ---------------------------------------------------------------- rules


@dataclass(frozen=True)
class Hint:
    """What a rule says, and which of the turn's tokens it speaks about: the name of its call number
    `call`, or character number `character` of the text that this call writes; the whole turn, where
    there is neither. `detect` adds the rule and the turn."""

    text: str
    call: int | None = None
    character: int | None = None
    kind: str = ""  # the name of the rule
    segment: int = 0
    turn: int = 0


RULES = {}  # name -> rule, in the order in which they are asked


def rule(function):
    """Decorator: ask this function about every turn of the policy, after the rules above it."""
    RULES[function.__name__] = function
    return function


def available_tools(task):
    return f"Reminder: Available tools: {', '.join(task.tools)}."


@rule
def unavailable_tool(rollout, e, i):
    """A call names a tool that the task does not offer. The hint is about the token that begins the
    call, since it may be right to call nothing, and about the name; it says nothing of arguments.
    """
    for n, call in enumerate(rollout.segments[e].turns[i].calls):
        if call.error == "unknown_tool":
            return Hint(available_tools(rollout.task), call=n)


def call_forms(task):
    forms = [f"{tool}({', '.join(ARGUMENTS[tool])})" for tool in task.tools if tool in ARGUMENTS]
    return f"Reminder: calls are {', '.join(forms)}."


@rule
def malformed_arguments(rollout, e, i):
    """A call cannot be read, or has the wrong arguments."""
    calls = rollout.segments[e].turns[i].calls
    if any(call.error == "bad_arguments" for call in calls):
        return call_forms(rollout.task)


COMMENT_REMINDER = "Reminder: code style: no comments in code."


@rule
def code_style(rollout, e, i):
    """A line of Python that this turn adds holds a comment, where a policy may begin to write its
    thoughts. The hint is about the token that begins the comment, not the code around it."""
    for n, call in enumerate(rollout.segments[e].turns[i].calls):
        edits = call.name == "edit_file" and len(call.args) == 3 and not call.error
        if edits and call.args[0].endswith(".py"):
            _, old, new = call.args
            character = find_new_comment(old, new)
            if character is not None:
                return Hint(COMMENT_REMINDER, n, character)


REPEAT_REMINDER = "Reminder: what is above need not be looked up again."


@rule
def repetition(rollout, e, i):
    """Reading what the context already shows, or testing again although nothing has changed. Only
    this segment counts: after a summary the context is new."""
    tests = ("run_command", rollout.task.test_command)
    seen = set()  # what the context shows, as (tool, *arguments)
    for j, turn in enumerate(rollout.segments[e].turns[: i + 1]):
        for call in turn.calls:
            # Only turn i is judged; the turns before it fill `seen`.
            key = call.name, *call.args
            if call.name in ("read_file", "edit_file") and call.args:
                key = call.name, posixpath.normpath(call.args[0]), *call.args[1:]
            if key in seen and j == i:
                return REPEAT_REMINDER

            # What does the context show after this call?
            if call.name == "edit_file" and not call.error:
                # The file that was edited may be read again, and the tests may be run again.
                seen = {k for k in seen if k[0] == "read_file" and k[1] != key[1]}
            elif call.name == "run_command" and key != tests:
                seen = set()  # another command may have written any file
            elif not call.error and not call.cut:
                seen.add(key)


def ends_rollout(rollout, e, i):
    """Did the rollout end with this turn? (A summary, which follows a query, ends a segment.)"""
    turns = rollout.segments[e].turns
    if e < len(rollout.segments) - 1 or turns[i - 1].role == "query":
        return False
    return not any(turn.role == "assistant" for turn in turns[i + 1 :])


RED_REMINDER = "Reminder: end when the tests are green."
RED = re.compile(r"\b[1-9]\d* (failed|error)")  # how a test run ends, here and by pytest


@rule
def unfinished(rollout, e, i):
    """The rollout is submitted though its last test run was red, and nothing has changed since."""
    # Only the turn that submits: after any other one the policy may still do it.
    if not rollout.finished or not ends_rollout(rollout, e, i):
        return None

    red = False
    calls = [call for segment in rollout.segments for turn in segment.turns for call in turn.calls]
    for call in calls:
        if (call.name, *call.args) == ("run_command", rollout.task.test_command):
            # A run that a broken file has stopped tells no numbers. One that was refused tells
            # nothing.
            if not call.error:
                red = bool(RED.search(call.output)) or not PASSED.search(call.output)
        elif call.name in ("edit_file", "run_command") and not call.error:
            red = False
    return RED_REMINDER if red else None


def message_reminder(names):
    """names: of the functions that are done, in the order of the task"""
    listed = f": {', '.join(names)}" if names else ""
    return f"Reminder: the last message names what is done{listed}."


@rule
def communication(rollout, e, i):
    """The final message is missing or untrue: it names a function that is as it was, or leaves out
    one that was asked for and is not. Only where the policy ended by itself: where a limit cut it
    off, "end with a message" would teach it to give up."""
    if rollout.finished and ends_rollout(rollout, e, i):
        words = spoken_words(rollout.segments[e].turns[i].text)  # a thought is no message
        if not words or is_untrue(rollout.task, rollout.files, words):
            return message_reminder(done_targets(rollout.task, rollout.files))


# ---------------------------------------------------------------- hints


def detect(rollout, names=RULES):
    """-> the Hints of a rollout, at most one per turn. names: the rules that are asked, in order"""
    unknown = [name for name in names if name not in RULES]
    assert not unknown, f"no rule {unknown[0]!r}; there are {', '.join(RULES)}"
    hints = []
    for e, segment in enumerate(rollout.segments):
        for i, turn in enumerate(segment.turns):
            # The policy's own turns: nothing else was its choice, so nothing else can be taught.
            hint = first_hint(rollout, e, i, names) if turn.role == "assistant" else None
            if hint:
                hints.append(hint)
    return hints


def first_hint(rollout, e, i, names):
    """The Hint of the first rule that has something to say of a turn, or None"""
    # One hint per turn: under two, nobody could tell which of them the teacher has heeded.
    for name in names:
        said = RULES[name](rollout, e, i)
        if said:
            hint = said if isinstance(said, Hint) else Hint(said)
            return replace(hint, kind=name, segment=e, turn=i)
    return None


def hint_turn(tokenizer, text, turn):
    """The hint above an assistant turn. If that turn has no head, since the policy went on by
    itself, the hint ends with the tokens that begin a turn of the policy."""
    above = make_turn(tokenizer, "hint", text)
    if not turn.head:
        above.tokens += tokenizer.generation_prompt("hint")
    return above


# ---------------------------------------------------------------- demonstrations with hints


def remind_of_message(task, action):
    """The names are those of the action, which is right. Above a call nothing is said yet."""
    said = re.findall(r"\w+", "" if action.calls else action.text)
    return message_reminder([name for name in target_names(task) if name in said])


# What the hints in a demonstration say about a flaw of the expert: the words of the rule. name of
# the rule -> function of the task, and of the action that is right -> text
REMINDERS = {
    "unavailable_tool": lambda task, action: available_tools(task),
    "malformed_arguments": lambda task, action: call_forms(task),
    "code_style": lambda task, action: COMMENT_REMINDER,
    "repetition": lambda task, action: REPEAT_REMINDER,
    "unfinished": lambda task, action: RED_REMINDER,
    "communication": remind_of_message,
}


def demonstrate_with_hints(
    task,
    tokenizer,
    rng,
    limits,
    sloppy=1.0,
    compact=None,
    remind={},
    hint_rate=0.0,
    neutral_rate=0.0,
):
    """A demonstration in which hints replace some of the expert's flaws -> Rollout. It is for
    fine-tuning: a model this small cannot understand a hint if it has never seen one. sloppy: how
    often the expert errs; the others: see hinted_moves."""
    # The expert plays without hints in its context ...
    hint_texts = {}
    moves = expert(task, rng, sloppy, planted=remind)
    moves = hinted_moves(task, moves, rng, remind, hint_rate, neutral_rate, hint_texts)
    rollout = play_moves(task, tokenizer, moves, limits, compact)

    # ... and they are put above its turns afterwards.
    number = 0  # of the assistant's turns
    for segment in rollout.segments:
        turns = []
        for turn in segment.turns:
            if turn.role == "assistant":
                if number in hint_texts:
                    turns.append(hint_turn(tokenizer, hint_texts[number], turn))
                number += 1
            turns.append(turn)
        segment.turns = turns
    return rollout


# ---------------------------------------------------------------- splicing and packing


@dataclass
class Splice:
    """A hint put right above its turn: the two contexts in which tokens of that turn are scored.
    The student reads above + turn, the teacher above + hint_ids + turn. What comes after the turn
    is left out, since the model is causal."""

    above: list  # ids of the turns above
    hint_ids: list  # ids of the hint's own turn; none where the hint has no text
    turn: list  # ids of the turn
    # which of these ids the hint speaks about: turn[first:end]. Never the head (the role token),
    # which comes from the harness.
    first: int
    end: int
    muted: int  # a token that is left out of the distillation, -1 = none

    @property
    def num_targets(self):
        return self.end - self.first


def splice(tokenizer, segment, hint):
    """A Hint on a turn of this segment -> its Splice"""
    turn = segment.turns[hint.turn]
    taught = f"turn {hint.turn} is {turn.role!r}: only the policy's own turns can be taught"
    assert turn.role == "assistant", taught
    above = []
    for earlier in segment.turns[: hint.turn]:
        above += earlier.tokens
    hint_ids = hint_turn(tokenizer, hint.text, turn).tokens if hint.text else []

    # Under a hint on the final message <|call|> is muted: else the teacher could also say that it
    # is time for a message instead of a call, and "end with a message" would teach to end.
    muted = tokenizer.id["<|call|>"] if hint.kind == "communication" else -1
    first, end = find_hinted_tokens(tokenizer, turn, hint)
    return Splice(above, hint_ids, turn.tokens, turn.head + first, turn.head + end, muted)


def find_hinted_tokens(tokenizer, turn, hint):
    """(first, end), among the turn's sampled tokens, of what a hint speaks about."""
    # The whole turn, the name of a call, or one character of the text that a call writes.
    if hint.call is None:
        return 0, len(turn.tokens) - turn.head
    if hint.character is None:
        return tokenizer.find_call_name(turn, hint.call)
    return tokenizer.find_written_character(turn, hint.call, hint.character)


@dataclass
class Targets:
    """N targets and where each is predicted: by the teacher in rows of its own, by the student in
    the trainer's batch, whose forward is reused."""

    tokens: torch.Tensor  # (hints, T) the teacher's input, padded on the right
    row: torch.Tensor  # (N,) row of `tokens` in which the teacher predicts target n
    position: torch.Tensor  # (N,) and the position in that row
    student_row: torch.Tensor  # (N,) row of the trainer's batch in which the student predicts it
    student_position: torch.Tensor  # (N,) and the position in that row
    token: torch.Tensor  # (N,) the target itself
    muted: torch.Tensor  # (N,) token to leave out of both distributions, -1 = none: see mute
    real_tokens: int = 0  # of the teacher's input, without padding

    def __len__(self):
        return len(self.token)

    def to(self, device):
        tensors = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        moved = {name: t.to(device, non_blocking=True) for name, t in tensors.items()}
        return replace(self, **moved)


def attach_hints(tokenizer, rollout, hints):
    """Each segment gets its Hints, spliced, in the list segment.hints."""
    for number, segment in enumerate(rollout.segments):
        here = [hint for hint in hints if hint.segment == number]
        segment.hints = [splice(tokenizer, segment, hint) for hint in here]


def pack_hinted(segments):
    """The hints of a micro-batch -> Targets. segments: those of the trainer's batch, one per row,
    with their hints. Without any hint one row of one token remains, so that all ranks run the same
    forward."""
    # One row per hint: with two hints in the same row, the later turn would be scored under both.
    # One column of six numbers per target, in the order of the fields of Targets.
    rows, columns = [], []
    spliced = [(row, hint) for row, segment in enumerate(segments) for hint in segment.hints]
    for row, (student_row, hint) in enumerate(spliced):
        for n in range(hint.first, hint.end):
            # A token is predicted at the place before it; the hint shifts the teacher's places.
            place = len(hint.above) + n - 1
            teacher_place = place + len(hint.hint_ids)
            columns.append((row, teacher_place, student_row, place, hint.turn[n], hint.muted))
        rows.append(hint.above + hint.hint_ids + hint.turn)

    # Padding on the right: the model is causal, so no target sees it.
    length = max(map(len, rows), default=1)
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows] or [[0]])  # (hints, T)
    numbers = torch.tensor(columns, dtype=torch.int64).view(-1, 6).T.contiguous()  # (6, N)
    return Targets(tokens, *numbers, sum(map(len, rows)))


# ---------------------------------------------------------------- divergence and loss

# The recipe's choices (ours), which train.py, the demo below and the experiments' patches share.
DIVERGENCE = "reverse"  # of student and teacher: reverse or forward (KL), or jsd
TOKEN_CAP = 2.0  # nats that one target adds to the loss at most
TEACHER = "ema"  # the teacher's weights: see Teacher
TEACHER_RATE = 0.1  # share of the student in each update of an ema teacher


def mute(logits, tokens):
    """logits (N, V), tokens (N,) -> logits whose softmax is the distribution over all tokens but
    this one in each row; -1 = over all"""
    vocabulary = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(vocabulary == tokens[:, None], -1e4)


def divergence(student, teacher, kind):
    """Logits (N, V) twice -> (N,) fp32, in nats; gradients reach the student only. Equal logits
    give exactly 0 in every kind."""
    shapes = tuple(student.shape), tuple(teacher.shape)
    assert shapes[0] == shapes[1], f"student {shapes[0]} and teacher {shapes[1]} differ"
    # In fp32, whatever the model computes in. The teacher is a constant.
    s = F.log_softmax(student.float(), -1)
    t = F.log_softmax(teacher.detach().float(), -1)

    # What each vocabulary entry adds to the sum, (N, V)
    if kind == "reverse":
        entries = s.exp() * (s - t)
    elif kind == "forward":
        entries = t.exp() * (t - s)
    else:
        assert kind == "jsd", f"kind must be reverse, forward or jsd, not {kind!r}"
        d = t - s
        m_minus_s = log_mixture(d)
        entries = 0.5 * s.exp() * -m_minus_s + 0.5 * t.exp() * (d - m_minus_s)
    return entries.sum(-1)


def log_mixture(d):
    """m - s, where m = log((e^s + e^t) / 2), from d = t - s. It is log(1 + (e^d - 1) / 2). For
    d > 0 the equal form d + log(1 + (e^-d - 1) / 2) is used, which cannot overflow."""
    from_s = torch.log1p(0.5 * torch.expm1(d.clamp(max=0)))
    from_t = d + torch.log1p(0.5 * torch.expm1(-d.clamp(min=0)))
    return torch.where(d > 0, from_t, from_s)


def feedback_loss(student, teacher, count):
    """The divergence of this micro-batch's N targets, from logits (N, V) twice: summed and divided
    by `count`, the number of targets in the whole step (all micro-batches, all ranks) or a larger
    one. With N = 0 it is an exact 0 that still runs backward, so ranks without a hint stay in
    step."""
    here = len(student)
    assert count >= here, f"count={count} must count the whole step's targets; {here} are here"
    if not here:
        return student.sum() * 0
    value = divergence(student, teacher, DIVERGENCE)  # (N,)

    # A larger value is scaled down to the cap, and its gradient with it. A clamp would make that
    # gradient zero, and so drop exactly the tokens that need the correction most.
    return (value * (TOKEN_CAP / value.detach().clamp(min=TOKEN_CAP))).sum() / max(count, 1)


def logprob_gap(student, teacher, tokens):
    """Logits (N, V) twice, tokens (N,) -> by how many nats the hint makes these tokens less likely,
    summed. Where it is zero, there is nothing to distil."""
    without = student.detach().log_softmax(-1).gather(1, tokens[:, None]).sum()
    under_hint = teacher.detach().log_softmax(-1).gather(1, tokens[:, None]).sum()
    return without - under_hint


# ---------------------------------------------------------------- teacher


def logits_at(model, tokens, row, position):
    """Logits (N, V) at these places only"""
    return model.logits(model(tokens)[row, position])


def student_logits(model, hidden, targets):
    """hidden (B, T, D) of the trainer's batch, which reads no hint -> the student's logits (N, V)
    for the targets"""
    flagged = hidden[targets.student_row, targets.student_position]  # (N, D)
    return mute(model.logits(flagged), targets.muted)


class Teacher:
    """Weights for the hinted forward: the student's own ("current"), those it began with
    ("frozen"), or their moving average ("ema", teacher = (1 - TEACHER_RATE) teacher + TEACHER_RATE
    student after each step). During the forward they replace the student's in the student's module;
    afterwards the student's come back, bit-equal. There is no second module, so this also works
    where a module cannot be copied (FSDP)."""

    def __init__(self, model, kind):
        kinds = "ema", "current", "frozen"
        assert kind in kinds, f"teacher must be ema, current or frozen, not {kind!r}"
        # A copy of every weight; "current" needs none.
        self.model, self.kind = model, kind
        self.weights = {}
        if kind != "current":
            for name, tensor in self.named_tensors():
                # In fp32 at least: in bf16 a tenth of a small change would be rounded away.
                dtype = torch.promote_types(tensor.dtype, torch.float32)
                self.weights[name] = tensor.detach().to(dtype, copy=True)

    def named_tensors(self):
        """Parameters and floating-point buffers (a router's bias follows its weights)."""
        # FSDP may still hold the gathered weights of the last forward: reading or writing those
        # would be lost, so they are dropped first.
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        yield from self.model.named_parameters()
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point():
                yield name, buffer

    @torch.no_grad()
    def update(self):
        """Once per optimizer step, after it."""
        if self.kind == "ema":
            tensors = dict(self.named_tensors())
            averages = [to_local(average) for average in self.weights.values()]
            students = [
                to_local(tensors[name].detach()).to(average.dtype)
                for name, average in self.weights.items()
            ]
            torch._foreach_mul_(averages, 1 - TEACHER_RATE)
            torch._foreach_add_(averages, students, alpha=TEACHER_RATE)

    @contextmanager
    def swapped_weights(self):
        """Within it the model has the teacher's weights, and is in evaluation mode, so that the
        routers count no load."""
        # What is replaced is kept, and comes back whatever happens in between.
        tensors = dict(self.named_tensors())
        replaced = [tensors[name].detach() for name in self.weights]
        student = [torch.empty_like(tensor) for tensor in replaced]
        copy_tensors([to_local(t) for t in student], [to_local(t) for t in replaced])
        training = self.model.training
        try:
            self.write_weights(self.weights.values())
            yield self.model.eval()
        finally:
            self.write_weights(student)
            self.model.train(training)

    def write_weights(self, weights):
        """Weights in the order of self.weights. Through .data, which leaves autograd's version
        counters alone: a graph of the student that was built before can still run backward
        after."""
        tensors = dict(self.named_tensors())
        held = [to_local(tensors[name]).data for name in self.weights]
        copy_tensors(held, [to_local(weight) for weight in weights])

    @torch.no_grad()
    def __call__(self, targets):
        """Targets -> the teacher's logits (N, V) for them, without gradient."""
        with self.swapped_weights() as model:
            logits = logits_at(model, targets.tokens, targets.row, targets.position)
        return mute(logits, targets.muted)


# ---------------------------------------------------------------- demo


def flagged_demonstrations(tokenizer, seeds):
    """Rollouts of the sloppy expert that call tools that do not exist, with their hints. (Those
    that need summaries are left out.)"""
    found = []
    for seed in seeds:
        task = make_task(0, seed)
        rollout = demonstrate(task, tokenizer, random.Random(seed), Limits(512), sloppy=1.5)
        hints = detect(rollout, ("unavailable_tool",))
        if hints and len(rollout.segments) == 1:
            attach_hints(tokenizer, rollout, hints)
            found.append(rollout)
    return found


def pack_both(rollouts):
    """-> the trainer's batch, and the Targets of the hints"""
    segments = [rollout.segments[0] for rollout in rollouts]
    return pack(segments, [1.0] * len(segments)), pack_hinted(segments)


def wrong_tools(tokenizer, rollouts, targets, logits):
    """logits (N, V) at the targets -> probability that a flagged call begins as no offered tool
    begins: by the first token of its name (that of run_tests is that of run_command, too)"""
    # The first token of a tool's name stands behind the token of the call.
    names = 1 + (targets.token == tokenizer.id["<|call|>"]).nonzero().flatten()  # (calls,)
    first = {name: tokenizer.encode(name)[0] for name in (*TOOLS, *PHANTOMS)}
    wrong = 0.0
    for n in names.tolist():
        offered = {first[tool] for tool in rollouts[targets.student_row[n]].task.tools}
        not_offered = list({*first.values()} - offered)
        wrong += float(logits[n].softmax(-1)[not_offered].sum())
    return wrong / len(names)


@torch.no_grad()
def measure_policy(model, tokenizer, rollouts, before):
    """-> (wrong_tools of the student, by how much its other sampled tokens have moved: KL, nats a
    token), and the logits (M, V) of these. before: the same logits at the beginning, or None"""
    batch, targets = pack_both(rollouts)
    hidden = model(batch["tokens"])  # (B, T, D)
    wrong = wrong_tools(tokenizer, rollouts, targets, student_logits(model, hidden, targets))

    # All that was sampled, but for the tokens that the hints speak about
    rest = batch["mask"] > 0  # (B, T)
    rest[targets.student_row, targets.student_position] = False
    logits = model.logits(hidden[rest])  # (M, V)
    moved = 0.0 if before is None else float(divergence(logits, before, "forward").mean())
    return (wrong, moved), logits


def distill(model, tokenizer, rollouts, held_out):
    """Feedback alone, no reward: 20 steps of 4 rollouts. -> {step: what measure_policy says then
    of rollouts that no step has seen}, for every fifth step"""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
    teacher = Teacher(model, TEACHER)
    now, before = measure_policy(model, tokenizer, held_out, None)
    curve = {0: now}
    for step in range(1, 21):
        # The teacher re-scores the call and its name; the student learns from it there alone.
        batch, targets = pack_both(rollouts[4 * step - 4 : 4 * step])
        teacher_logits = teacher(targets)
        student = student_logits(model, model(batch["tokens"]), targets)
        loss = feedback_loss(student, teacher_logits, max(8, len(targets)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        teacher.update()
        if step % 5 == 0:
            curve[step] = measure_policy(model, tokenizer, held_out, before)[0]
    return curve


@torch.no_grad()
def kl_of_turn(model, tokenizer, rollout):
    """-> the first hint, and at each token of its turn: the token's text, the hint's KL, and
    whether it is in the loss"""
    hint, segment = detect(rollout, ("unavailable_tool",))[0], rollout.segments[0]
    whole = replace(hint, call=None)
    targets = pack_hinted([replace(segment, hints=[splice(tokenizer, segment, whole)])])
    student = student_logits(model, model(pack([segment], [1.0])["tokens"]), targets)
    kl = divergence(student, Teacher(model, "current")(targets), DIVERGENCE)
    first, end = find_hinted_tokens(tokenizer, segment.turns[hint.turn], hint)
    taught = [first <= n < end for n in range(len(kl))]
    names = [tokenizer.decode([token]) for token in targets.token.tolist()]
    return hint, names, kl.numpy(), taught


def demo():
    from command.checkpoints import load_model
    from command.output_files import check_writable
    from demos.demo_figures import draw_hint

    # A place that cannot be written is refused before the work.
    path = Path("out/feedback.png")
    check_writable(path.parent)

    # The policy of the default run after SFT (python -m command.assets). Demonstrations of a sloppy
    # expert have taught it to call tools that do not exist, and what a hint is.
    torch.set_num_threads(1)
    model, extra = load_model(Path(__file__).parent / "assets" / "sft")
    tokenizer = Tokenizer(**extra["tokenizer"])
    rollouts = flagged_demonstrations(tokenizer, range(200))[:80]
    held_out = flagged_demonstrations(tokenizer, range(1000, 1060))[:16]

    # Where does a hint disagree with the policy? Take the turn with the largest KL
    turns = [(one, *kl_of_turn(model, tokenizer, one)) for one in held_out]
    rollout, hint, names, kl, taught = max(turns, key=lambda turn: turn[3].max())
    called = rollout.segments[0].turns[hint.turn].calls[hint.call].name
    print(f"turn    {called} is called, the task offers {' '.join(rollout.task.tools)}")
    print(f"hint    {hint.text}   ({hint.kind}, above turn {hint.turn})")
    print("KL      " + "  ".join(f"{name} {value:.2f}" for name, value in zip(names, kl)))

    # What does the policy do where it reads the hints? The student can hardly come further.
    _, targets = pack_both(held_out)
    hinted = wrong_tools(tokenizer, held_out, targets, Teacher(model, "current")(targets))
    print(f"hinted  wrong tools {hinted:.3f}  (the same policy, reading the hints)")

    # The cure
    curve = distill(model, tokenizer, rollouts, held_out)
    for step, (wrong, moved) in curve.items():
        print(f"step {step:2}  wrong tools {wrong:.3f}  other tokens moved {moved:.4f}")
    draw_hint(names, kl, taught, curve, hinted, path)
    print(f"20 steps of distilling such calls: {curve[0][0]:.3f} to {curve[20][0]:.3f}; see {path}")


def main(argv):
    from demos.transcript_view import ask_or_demonstrate

    ask_or_demonstrate(argv, demo, RULES, detect)


if __name__ == "__main__":
    main(sys.argv[1:])
