"""feedback_distill.py: one sentence of feedback, put where the mistake was made, teaches that one
turn.

A scalar reward says that something in a hundred turns was good; it cannot say which tool call was
silly. So: write a short hint, put it right above the faulty turn, and let the same policy, now
reading the hint, re-score the tokens it has sampled. That is the teacher; the policy in the
original context is the student; a KL moves student to teacher on that turn only.

Stated by Cursor (cursor.com/blog/composer-2-5): this construction, beside the RL objective over the
whole trajectory; one forward pass, no new decoding; the example of a tool that does not exist
("Reminder: Available tools: ..."); used from coding style to communication. Ours: who writes the
hints (rules here), the KL's direction, the teacher's weights, all coefficients; the choices are
those of SDPO (2601.20802), SDFT (2601.19897) and OPSD (2601.18734).

    student   s = log pi(. | x, y_<t)        teacher   t = log pi_T(. | x, hint, y_<t), no gradient
    reverse   sum e^s (s - t)                forward   sum e^t (t - s)
    JSD       (1-a) KL(s | m) + a KL(t | m),   m = log((1-a) e^s + a e^t)
    top-k     the k likeliest entries and one bucket for the rest, log(1 - sum)
    loss      sum of these over the hinted turns' tokens / number of such tokens (train.py divides
              by the number of rollouts where that is larger)

To add a rule, write one function with its docstring under @rule: (chain, episode, turn) -> what to
say of that turn, or None. `detect` asks it, the trainer teaches it (--habits=its name).

Left out: a trust region around the teacher; replaying the sampled experts in the teacher's forward
(it routes by itself); targets spread over context-parallel ranks; a second hint on one turn.

Letters (README has them all): B rows of the trainer's batch, T tokens of a row, N targets (tokens
of hinted turns), V vocabulary, k entries kept.

    python feedback_distill.py    a tiny model, a wrong tool, the hint's KL per token, the cure
"""

import itertools
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from length_penalty import count_effort
from rollout import Tokenizer, make_turn, play_moves
from world.expert import expert
from world.task import HINTED, Action
from world.tools import ARGUMENTS

# ---------------------------------------------------------------- rules


class Remark(NamedTuple):
    """What a rule says of a turn, and which of the turn's tokens it speaks about: the name of its
    call number `call`, or character number `character` of the text that this call writes. A rule
    that speaks about the whole turn returns the text alone."""

    text: str
    call: int | None = None
    character: int | None = None


RULES = {}  # name -> rule, in the order in which they are asked


def rule(function):
    """Decorator: ask this function about every turn of the policy, after the rules above it."""
    RULES[function.__name__] = function
    return function


def available_tools(task):
    return f"Reminder: Available tools: {', '.join(task.tools)}."


@rule
def unavailable_tool(chain, e, i):
    """A call names a tool that the task does not offer. The hint is about two things: the token
    that begins the call, since it may be right to call nothing, and the name. It is not about the
    arguments: a list of tools says nothing about those of a tool that does not exist."""
    for n, call in enumerate(chain.episodes[e].turns[i].calls):
        if call.error == "unknown_tool":
            return Remark(available_tools(chain.task), call=n)


UNREADABLE = "Reminder: a call must be whole, outside of thoughts, and in the form "
UNREADABLE += "that the tools are called in."


@rule
def malformed_arguments(chain, e, i):
    """A call cannot be read, or has the wrong arguments."""
    # A call that cannot be read has no name.
    for call in chain.episodes[e].turns[i].calls:
        if call.error == "bad_arguments" and not call.name:
            return UNREADABLE
        if call.error == "bad_arguments":
            wanted = ARGUMENTS.get(call.name, ("other arguments",))
            return f"Reminder: {call.name} takes {', '.join(wanted)}."


# What a repository may ask of its code: name -> what to say, and what breaks it. There is a rule
# against comments because a policy may begin to write its thoughts there.
STYLE = {
    "comments": ("no comments in code.", re.compile(r"#")),
    "statements": ("one statement per line.", re.compile(r";")),
    "indent": ("indent by 4 spaces.", re.compile(r"^(?:    )*(?: {1,3}(?=\S)|\t)")),
}
STRING = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")


@rule
def code_style(chain, e, i):
    """A line of Python that this turn adds breaks a rule of the repository (task.meta["style"]
    names its rules; default: all). The hint is about the token that breaks the rule, not the code
    around it."""
    meta = getattr(chain.task, "meta", None) or {}
    for n, call in enumerate(chain.episodes[e].turns[i].calls):
        broken = find_broken_style(call, meta.get("style", STYLE))
        if broken:
            said, character = broken
            return Remark(f"Reminder: code style: {said}", n, character)


def find_broken_style(call, names):
    """-> (what to say, position in the new text) for the first of these rules that an edit of
    Python breaks in a line that it adds; None if it breaks none. Lines are searched and not parsed:
    an edit is seldom a whole program."""
    if call.name != "edit_file" or len(call.args) != 3 or not call.args[0].endswith(".py"):
        return None
    # A line that the replaced text holds, too, was not added by this edit.
    _, old, new = call.args
    kept = set(old.split("\n"))

    # The first rule in the repository's order, then the first line that breaks it.
    for name in names:
        said, breaks = STYLE[name]
        start = 0  # of the line, in the new text
        for line in new.split("\n"):
            found = breaks.search(blank_strings(line))
            if found and line not in kept:
                return said, start + found.start()
            start += len(line) + 1
    return None


def blank_strings(line):
    """The line with each string replaced by as many quotes, since a "#" in a string is no comment.
    Positions in the line stay right."""

    def quotes(string):
        return "'" * len(string[0])

    return STRING.sub(quotes, line)


@rule
def effort(chain, e, i):
    """Reading what the context already shows, or testing again although nothing has changed. Only
    this episode counts: after a summary the context is new."""
    tests = ("run_command", chain.task.test_command)
    seen = set()  # what the context shows, as (tool, *arguments)
    for j, turn in enumerate(chain.episodes[e].turns[: i + 1]):
        for call in turn.calls:
            # Only turn i is judged; the turns before it fill `seen`.
            key = call.name, *call.args
            if key in seen and j == i and key == tests:
                return "Reminder: nothing has changed since the last test run."
            if key in seen and j == i:
                return f"Reminder: {call.args[0]} is already above."

            # What does the context show after this call?
            if call.name == "edit_file" and not call.error:
                # The file that was edited may be read again, and the tests may be run again.
                seen = {k for k in seen if k[0] == "read_file" and k[1] != call.args[0]}
            elif call.name == "run_command" and key != tests:
                seen = set()  # another command may have written any file
            elif not call.error:
                seen.add(key)


def ends_chain(chain, e, i):
    """Is this the assistant turn with which the chain ended? (A summary, which follows a query,
    ends only an episode.)"""
    turns = chain.episodes[e].turns
    if e < len(chain.episodes) - 1 or turns[i - 1].role == "query":
        return False
    return not any(turn.role == "assistant" for turn in turns[i + 1 :])


@rule
def unfinished(chain, e, i):
    """The chain is submitted while its own to-do list has open items, or the last test run still
    names missing functions."""
    # Only the turn that submits can have forgotten something: after any other turn the policy may
    # still do it.
    turn = chain.episodes[e].turns[i]
    if turn.calls or not chain.finished or not ends_chain(chain, e, i):
        return None

    plan, missing = [], []
    for episode in chain.episodes:
        for turn in episode.turns:
            # The last to-do list that the policy wrote: [(mark, item)].
            if turn.role in ("assistant", "summary"):
                plan = re.findall(r"^\s*[-*] \[([ xX])\] (.+)$", turn.text, re.M) or plan
            for call in turn.calls:
                missing = still_missing(chain.task, call, missing)

    # A function that both the list and the tests name is named once in the hint.
    open_items = [item for mark, item in plan if mark == " "]
    left = dict.fromkeys(open_items + missing)
    return f"Reminder: still to do: {', '.join(left)}." if left else None


def still_missing(task, call, missing):
    """The names of functions that are missing after a call: those that the last test run names,
    without those that an edit has defined since. missing: the names before the call"""
    if call.error:
        return missing
    if call.name == "run_command" and call.args == [task.test_command]:
        return re.findall(r"^(\S+): missing", call.output, re.M)
    if call.name == "edit_file":
        new = call.args[2]
        return [name for name in missing if f"def {name.split('.')[-1]}(" not in new]
    return missing


FINAL_WORDS = 16  # words of the final message at most; the expert's is "Put back this, that."
SILENT = "Reminder: end with a short message that says what was done."
RAMBLING = "Reminder: the final message must be short."


def spoken_text(text):
    """What a turn says, without the thought before it"""
    # A thought that is not closed goes on to the turn's end.
    before, close, after = text.partition("</think>")
    return after if close else before.partition("<think>")[0]


@rule
def communication(chain, e, i):
    """The final message is missing or long. Only where the policy ended by itself: where a limit
    cut it off, "end with a message" would teach it to give up."""
    if chain.finished and ends_chain(chain, e, i):
        # a thought is no message
        words = len(spoken_text(chain.episodes[e].turns[i].text).split())
        if not words:
            return SILENT
        if words > FINAL_WORDS:
            return RAMBLING


# ---------------------------------------------------------------- hints


@dataclass
class Hint:
    """A remark, and the turn that it is about."""

    episode: int
    turn: int
    kind: str  # the name of the rule
    text: str
    call: int | None = None
    character: int | None = None


def detect(chain, rules=RULES, critic=None):
    """-> the Hints of a chain, at most one per turn. `rules`: a dict of functions, or names out of
    RULES. `critic`, any function (chain, episode, turn) -> text or None, is asked instead of the
    rules: a model, for instance."""
    # Which rules? The result is a dict, in the order in which they are asked.
    if critic:
        rules = {"critic": critic}
    elif not isinstance(rules, dict):
        unknown = [name for name in rules if name not in RULES]
        assert not unknown, f"no rule {unknown[0]!r}; there are {', '.join(RULES)}"
        rules = {name: RULES[name] for name in rules}

    # The policy's own turns: nothing else was its choice, so nothing else can be taught.
    hints = []
    for e, episode in enumerate(chain.episodes):
        for i, turn in enumerate(episode.turns):
            if turn.role == "assistant":
                hints += first_hint(chain, e, i, rules)
    return hints


def first_hint(chain, e, i, rules):
    """[the Hint of the first rule that has something to say of a turn], or []"""
    # One hint per turn: under two, nobody could tell which of them the teacher has heeded.
    for kind, ask in rules.items():
        remark = ask(chain, e, i)
        if remark:
            remark = remark if isinstance(remark, Remark) else Remark(remark)
            return [Hint(e, i, kind, *remark)]
    return []


def find_hinted_tokens(tokenizer, turn, hint):
    """(first, end), among the turn's sampled tokens, of what a hint speaks about."""
    # The whole turn, the name of a call, or one character of the text that a call writes.
    if hint.call is None:
        return 0, len(turn.tokens) - turn.head
    if hint.character is None:
        return tokenizer.find_call_name(turn, hint.call)
    return tokenizer.find_written_character(turn, hint.call, hint.character)


def muted(tokenizer, kind):
    """The token that is left out of the distillation under hints of this kind, -1 = none. Under a
    hint on the final message it is <|call|>: else the teacher could also say that it is time for a
    message instead of a call, and "end with a message" would teach to end."""
    return tokenizer.id["<|call|>"] if kind == "communication" else -1


def mute(logits, tokens):
    """logits (N, V), tokens (N,) -> logits whose softmax is the distribution over all tokens but
    this one in each row; -1 = over all"""
    vocabulary = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(vocabulary == tokens[:, None], -1e4)


# ---------------------------------------------------------------- demonstrations with hints


def remind_of_tools(task, action):
    return available_tools(task)


def remind_of_message(task, action):
    return RAMBLING if action.text else SILENT


def remind_of_style(task, action):
    return f"Reminder: code style: {STYLE['comments'][0]}"


# What the hints in a demonstration say about a flaw of the expert. name of the rule -> function
# (task, flawed action) -> text
REMINDERS = {
    "unavailable_tool": remind_of_tools,
    "communication": remind_of_message,
    "code_style": remind_of_style,
}


def hint_turn(tokenizer, text, turn):
    """The hint above an assistant turn. If that turn has no head, since the policy went on by
    itself, the hint ends with the tokens that begin a turn of the policy."""
    hint = make_turn(tokenizer, "hint", text)
    if not turn.head:
        hint.tokens += tokenizer.generation_prompt("hint")
    return hint


def insert_hints(tokenizer, chain, hints):
    """Put a hint right above each assistant turn whose number is in `hints`."""
    number = 0
    for episode in chain.episodes:
        turns = []
        for turn in episode.turns:
            if turn.role == "assistant":
                if number in hints:
                    turns.append(hint_turn(tokenizer, hints[number], turn))
                number += 1
            turns.append(turn)
        episode.turns = turns


def hinted_moves(task, moves, rng, remind, hints, neutral, hinted):
    """Yields the expert's actions, and writes the hints into `hinted`: {number of an action: the
    hint that stands above it}.

    With probability `hints` a flawed action is left out, and the hint remind[flaw](task, action)
    stands above the right action: so the model learns to heed hints.

    With probability `neutral` one of the hints stands above an action that was right anyway, a call
    or a final message. Otherwise the place of a hint would mean something, too, and its
    distillation would drift. A model that saw hints about tools only above calls unlearned to
    finish; one that saw hints about the final message only above final messages learned to quit."""
    # Every text that a hint can have, once: a reminder may depend on whether the action has a text.
    texts = []
    for tell in remind.values():
        for words in ("", "too many"):
            text = tell(task, Action(words))
            if text not in texts:
                texts.append(text)

    # One round per action that is played.
    action = next(moves)
    for number in itertools.count():
        # A flaw is left out, and the expert asked again for what it does instead.
        hint = None
        while action.flaw in remind and rng.random() < hints:
            hint = remind[action.flaw](task, action)
            action = moves.send([HINTED])

        # A hint above an action that needed none.
        is_right = hint is None and action.flaw not in remind
        if is_right and remind and neutral and rng.random() < neutral:
            hint = texts[0] if len(texts) == 1 else rng.choice(texts)
        if hint is not None:
            hinted[number] = hint

        # The agent plays the action and sends back what the tools answered.
        outputs = yield action
        action = moves.send(outputs)


def demonstrate_with_hints(
    task,
    tokenizer,
    rng,
    limits,
    sloppy=1.0,
    compact=None,
    remind={},
    hints=0.3,
    neutral=0.0,
    restless=0.0,
):
    """A demonstration in which hints replace some of the expert's flaws -> Chain. It is for
    fine-tuning: a model this small cannot understand a hint if it has never seen one. sloppy: how
    often the expert errs; restless: see world.expert.expert; the others: see hinted_moves."""
    # The expert plays without hints in its context; they are put above its turns afterwards.
    hinted = {}
    moves = expert(task, rng, sloppy, untidy="code_style" in remind, restless=restless)
    moves = hinted_moves(task, moves, rng, remind, hints, neutral, hinted)
    chain = play_moves(task, tokenizer, moves, limits, compact)
    insert_hints(tokenizer, chain, hinted)
    chain.stats = count_effort(chain)
    return chain


# ---------------------------------------------------------------- splicing and packing


class Splice(NamedTuple):
    """An assistant turn in the two contexts in which its tokens are scored."""

    teacher: list  # ids: above + hint + turn
    student: list  # ids: above + turn
    # position at which the student predicts the first target: the last token before the sampled
    # ones
    above: int
    # number of tokens of the hint turn; the teacher predicts the first target at above + hint
    hint: int
    targets: int  # number of sampled tokens of the turn, its <|end|> included


def hint_tokens(tokenizer, text, turn):
    """The hint as a turn of its own above an assistant turn; an empty text is no turn at all."""
    return hint_turn(tokenizer, text, turn).tokens if text else []


def splice(episode, turn_index, hint):
    """Put the hint turn (ids, may be empty) right above an assistant turn. What comes after the
    turn is left out, since the model is causal. The turn's head (its role token) comes from the
    harness: both contexts hold it, and it is never a target."""
    turn = episode.turns[turn_index]
    taught = f"turn {turn_index} is {turn.role!r}: only the policy's own turns can be taught"
    assert turn.role == "assistant", taught

    # Everything above the turn, in the student's context and in the teacher's.
    above = []
    for earlier in episode.turns[:turn_index]:
        above += earlier.tokens
    own = list(turn.tokens)
    return Splice(
        teacher=above + list(hint) + own,
        student=above + own,
        above=len(above) + turn.head - 1,
        hint=len(hint),
        targets=len(own) - turn.head,
    )


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
    hint: torch.Tensor  # (N,) index into `hinted` of the hint it belongs to
    muted: torch.Tensor  # (N,) token to leave out of both distributions, -1 = none: see mute
    real_tokens: int = 0  # of the teacher's input, without padding

    def __len__(self):
        return len(self.token)

    def to(self, device):
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if torch.is_tensor(value):
                values[name] = value.to(device, non_blocking=True)
        return Targets(**values)


def pack_hinted(episodes, hinted, keep_empty=False):
    """The hints of a micro-batch -> Targets. episodes: those of the trainer's batch; hinted: a list
    of (index into episodes, turn, hint ids) in any order. Two more entries are optional: the
    (first, end) of the sampled tokens that the hint speaks about (default: the whole turn), and a
    token to leave out (default: none, see muted).

    An empty hint is dropped, which makes its loss exactly 0; keep_empty=True keeps it as a placebo
    (what an EMA teacher teaches without a hint). Without any hint one row of one token remains, so
    that all ranks run the same forward."""
    # One row per hint: with two hints in the same row, the later turn would be scored under both.
    # One column of seven numbers per target, in the order of the fields of Targets.
    rows, columns = [], []
    for index, (episode, turn, hint, *about) in enumerate(hinted):
        if not hint and not keep_empty:
            continue
        # In both rows, sampled token n is predicted n positions after the first one.
        cut = splice(episodes[episode], turn, hint)
        first, end = about[0] if about else (0, cut.targets)
        muted_token = about[1] if len(about) > 1 else -1
        for n in range(first, end):
            teacher_place = len(rows), cut.above + cut.hint + n
            student_place = episode, cut.above + n
            token = cut.student[cut.above + 1 + n]
            columns.append((*teacher_place, *student_place, token, index, muted_token))
        rows.append(cut.teacher)

    # Padding on the right: the model is causal, so no target sees it.
    T = max(map(len, rows), default=1)
    tokens = torch.tensor([row + [0] * (T - len(row)) for row in rows] or [[0]])  # (hints, T)
    numbers = torch.tensor(columns, dtype=torch.int64).view(-1, 7).T.contiguous()  # (7, N)
    return Targets(tokens, *numbers, sum(map(len, rows)))


# ---------------------------------------------------------------- divergence and loss


def log_buckets(student, teacher, top_k=0, top_by="student"):
    """Logits (N, V) twice -> log-probs (N, V) twice, or with top_k (N, k + 1): the k likeliest
    entries, and one for the sum of all others. top_by: by whom the k are likeliest"""
    assert top_by in ("student", "teacher"), f"top_by must be student or teacher, not {top_by!r}"
    # In fp32, whatever the model computes in. The teacher is a constant.
    s = F.log_softmax(student.float(), -1)
    t = F.log_softmax(teacher.detach().float(), -1)
    if not 0 < top_k < student.shape[-1]:
        return s, t

    # The same k entries of both, so that they can be compared.
    by = s if top_by == "student" else t
    kept = by.detach().topk(top_k, -1)[1]  # (N, k)
    return keep_entries(s, kept), keep_entries(t, kept)


def keep_entries(logp, kept):
    """Log-probs (N, V) and indices (N, k) -> (N, k + 1): these, and the sum of all others. That sum
    is a logsumexp of the others: 1 - (sum of the k) would be rounding noise where the k hold nearly
    all of the mass."""
    others = logp.scatter(-1, kept, -torch.inf).logsumexp(-1, keepdim=True)  # (N, 1)
    return torch.cat((logp.gather(-1, kept), others), -1)


def divergence(
    student,
    teacher,
    kind="reverse",
    alpha=0.5,
    top_k=0,
    top_by="student",
    entry_clip=None,
    token_cap=None,
):
    """Logits (N, V) twice -> (N,) fp32, in nats; gradients reach the student only. Equal logits
    give exactly 0 in every kind.

    entry_clip (OPSD: .05 with forward): no vocabulary entry adds more than this. token_cap: a
    larger value is scaled down to the cap, and its gradient with it. A clamp would make that
    gradient zero, and so drop exactly the tokens that need the correction most."""
    shapes = tuple(student.shape), tuple(teacher.shape)
    assert shapes[0] == shapes[1], f"student {shapes[0]} and teacher {shapes[1]} differ"
    assert 0 < alpha < 1, f"alpha={alpha}: its ends 0 and 1 are the forward and the reverse KL"
    s, t = log_buckets(student, teacher, top_k, top_by)

    # What each vocabulary entry adds to the sum, (N, V) or (N, k + 1)
    if kind == "reverse":
        entries = s.exp() * (s - t)
    elif kind == "forward":
        entries = t.exp() * (t - s)
    else:
        assert kind == "jsd", f"kind must be reverse, forward or jsd, not {kind!r}"
        d = t - s
        m_minus_s = log_mixture(d, alpha)
        entries = (1 - alpha) * s.exp() * -m_minus_s + alpha * t.exp() * (d - m_minus_s)

    # The two bounds, per entry and per token.
    if entry_clip is not None:
        entries = entries.clamp(max=entry_clip)
    value = entries.sum(-1)  # (N,)
    if token_cap is None:
        return value
    return value * (token_cap / value.detach().clamp(min=token_cap))


def log_mixture(d, alpha):
    """m - s, where m = log((1-a) e^s + a e^t), from d = t - s. It is log(1 + a (e^d - 1)). For
    d > 0 the equal form d + log(1 + (1-a) (e^-d - 1)) is used, which cannot overflow."""
    from_s = torch.log1p(alpha * torch.expm1(d.clamp(max=0)))
    from_t = d + torch.log1p((1 - alpha) * torch.expm1(-d.clamp(min=0)))
    return torch.where(d > 0, from_t, from_s)


def feedback_loss(student, teacher, count, **options):
    """Sum of the divergence over this micro-batch's N targets / count, the number of targets in the
    whole step (all micro-batches, all ranks). With N = 0 it is an exact 0 that still runs backward,
    so ranks without a hint stay in step."""
    here = len(student)
    assert count >= here, f"count={count} must count the whole step's targets; {here} are here"
    if not here:
        return student.sum() * 0
    return divergence(student, teacher, **options).sum() / max(count, 1)


# ---------------------------------------------------------------- teacher


def logits_at(model, tokens, row, position):
    """Logits (N, V) at these places only. A model without .logits is taken to return logits."""
    hidden = model(tokens)[row, position]
    return model.logits(hidden) if hasattr(model, "logits") else hidden


class Teacher:
    """Weights for the hinted forward: the student's own ("current"), those it began with
    ("frozen"), or their moving average ("ema", teacher = (1 - rate) teacher + rate student after
    each step). During the forward they replace the student's in the student's module; afterwards
    the student's come back, bit-equal. There is no second module, so this also works where a module
    cannot be copied (FSDP)."""

    def __init__(self, model, kind="ema", rate=0.05):
        kinds = "ema", "current", "frozen"
        assert kind in kinds, f"teacher must be ema, current or frozen, not {kind!r}"
        assert 0 <= rate <= 1, f"rate={rate} is the share of the student in each update"
        # A copy of every weight; "current" needs none.
        self.model, self.kind, self.rate = model, kind, rate
        self.weights = {}
        if kind != "current":
            for name, tensor in self.named_tensors():
                # In fp32 at least: in bf16 `rate` times a small change would be rounded away.
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
            for name, tensor in self.named_tensors():
                average = self.weights[name]
                student = tensor.detach().to(average.dtype)
                average.mul_(1 - self.rate).add_(student, alpha=self.rate)

    @contextmanager
    def swapped_weights(self):
        """Within it the model has the teacher's weights, and is in evaluation mode, so that the
        routers count no load."""
        # What is replaced is kept, and comes back whatever happens in between.
        student = {}
        for name, tensor in self.named_tensors():
            if name in self.weights:
                student[name] = tensor.detach().clone()
        training = self.model.training
        try:
            self.write_weights(self.weights)
            yield self.model.eval()
        finally:
            self.write_weights(student)
            self.model.train(training)

    def write_weights(self, weights):
        """Through .data, which leaves autograd's version counters alone: a graph of the student
        that was built before can still run backward after."""
        if weights:
            for name, tensor in self.named_tensors():
                tensor.data.copy_(weights[name])

    @torch.no_grad()
    def __call__(self, targets):
        """Targets -> the teacher's logits (N, V) for them, without gradient."""
        with self.swapped_weights() as model:
            return logits_at(model, targets.tokens, targets.row, targets.position)


# ---------------------------------------------------------------- demo

PHANTOM = "open_browser"  # a tool that exists in the model's habits only
OFFERED = ("read_file", "edit_file", "run_command", "search_codebase")


class WordTokenizer(Tokenizer):
    """A tokenizer for the demo: one id per word."""

    def __init__(self):
        controls = "pad", "user", "assistant", "tool", "hint", "call", "end"
        text = f"Tools Fix done ok Tool not found Reminder Available tools {PHANTOM} "
        text += f"{' '.join(OFFERED)} : , . 0 1 2 3 4 5 6 7"
        names = [f"<|{name}|>" for name in controls] + text.split()
        self.names = list(dict.fromkeys(names))
        self.id = {name: i for i, name in enumerate(self.names)}

    def encode(self, text):
        return [self.id[word] for word in re.findall(r"\w+|[^\w\s]", text)]


def toy_chain(words, tools, item, tool, hinted=False):
    """A task, (a hint,) one call, its answer, a final message, in the shapes of real rollouts."""
    from rollout import Call, Chain, Episode, Turn

    def turn(role, body, **more):
        tokens = [words.id[f"<|{role}|>"], *body, words.id["<|end|>"]]
        return Turn(role, tokens, **more)

    # What the world would answer: a tool that is not offered is not found.
    outcome = ("ok", "") if tool in tools else ("Tool not found", "unknown_tool")
    call = Call(tool, [], *outcome)
    task = SimpleNamespace(tools=tools, test_command="")
    # The turns in the order of a real episode, the hint right above the call.
    prompt, message = f"Tools: {', '.join(tools)}. Fix {item}.", f"done {item}."
    turns = [turn("user", words.encode(prompt), text=item)]
    if hinted:
        turns.append(turn("hint", words.encode(available_tools(task))))
    turns.append(turn("assistant", [words.id["<|call|>"], words.id[tool]], calls=[call]))
    turns.append(turn("tool", words.encode(call.output)))
    turns.append(turn("assistant", words.encode(message), text=message))
    return Chain(task, [Episode(turns)])


def toy_chains(words, rng, n, habit, hinted=False):
    """n chains of one call each. A share `habit` of them calls the phantom, the others the right
    one of the two tools that are offered: the first of them in OFFERED."""
    chains = []
    for _ in range(n):
        tools = tuple(rng.permutation(OFFERED)[:2].tolist())
        tool = PHANTOM if rng.random() < habit else min(tools, key=OFFERED.index)
        chains.append(toy_chain(words, tools, str(rng.integers(8)), tool, hinted))
    return chains


def toy_batch(chains):
    """-> tokens (B, T), padded on the right, and mask (B, T): 1 where the policy chose the token"""
    from rollout import flatten

    rows = [flatten(chain.episodes[0]) for chain in chains]
    T = max(len(tokens) for tokens, *_ in rows)
    tokens = [np.pad(tokens, (0, T - len(tokens))) for tokens, *_ in rows]
    masks = [np.pad(mask, (0, T - len(mask))) for _, mask, *_ in rows]
    return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(masks))


def pretrain_toy(model, words, rng, steps=135):
    """Half of the batches have the habit, half stand under a hint and heed it: a tiny model has to
    learn first what a pretrained one can do already."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        # The rate rises over ten steps and falls over the last half.
        ramp = min(1, (step + 1) / 10, 2.1 * (1 - step / steps))
        optimizer.param_groups[0]["lr"] = 8e-3 * ramp
        if step % 2:
            chains = toy_chains(words, rng, 24, habit=0.6)
        else:
            chains = toy_chains(words, rng, 24, habit=0, hinted=True)

        # Next-token prediction of what the policy chose.
        tokens, mask = toy_batch(chains)  # (B, T) each
        chosen = mask[:, 1:] == 1  # (B, T - 1)
        hidden = model(tokens[:, :-1])[chosen]  # (N, D)
        loss = F.cross_entropy(model.logits(hidden), tokens[:, 1:][chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def toy_logprobs(model, words, chains):
    """Log-probs where the tool is named (B, V) and over the four sampled tokens of the final
    message (B, 4, V)."""
    logp = model.logits(model(toy_batch(chains)[0])).log_softmax(-1)  # (B, T, V)
    # Behind the task stand the role token and <|call|>, which predicts the name; the message ends
    # the row.
    return logp[:, len(chains[0].turns[0].tokens) + 1], logp[:, -5:-1]


def distill_toy(model, words, rng, held_out, steps=20):
    """Feedback alone, no reward. -> (steps + 1, 3), per step: probability of the phantom, of the
    offered tools, and how far the final message has moved (KL)"""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    # Measured on chains that are drawn apart from those of the steps. The final message must stay
    # what it was.
    teacher, curve = Teacher(model, "ema", 0.05), []
    offered = torch.tensor([words.encode(" ".join(chain.task.tools)) for chain in held_out])
    _, before = toy_logprobs(model, words, held_out)
    for step in range(steps + 1):
        # What the policy does now, without a hint
        tool, final = toy_logprobs(model, words, held_out)
        wrong = tool.exp()[:, words.id[PHANTOM]].mean()
        right = tool.exp().gather(1, offered).sum(1).mean()
        moved = divergence(final.flatten(0, 1), before.flatten(0, 1), "forward").mean()
        curve.append([wrong, right, moved])

        # Rollouts: the policy names a tool. A rule writes the hints.
        tasks = toy_chains(words, rng, 24, habit=1)
        logp, _ = toy_logprobs(model, words, tasks)
        sampled = torch.multinomial(logp.exp(), 1)[:, 0].tolist()
        chains, hinted = [], []
        for i, (task, token) in enumerate(zip(tasks, sampled)):
            item, tool = task.turns[0].text, words.names[token]
            chains.append(toy_chain(words, task.task.tools, item, tool))
            for hint in detect(chains[i]):
                ids = hint_tokens(words, hint.text, chains[i].turns[hint.turn])
                hinted.append((i, hint.turn, ids))

        # The teacher re-scores the hinted turns; the student learns from it on these turns alone.
        targets = pack_hinted([chain.episodes[0] for chain in chains], hinted)
        tokens, _ = toy_batch(chains)
        student = logits_at(model, tokens, targets.student_row, targets.student_position)
        loss = feedback_loss(student, teacher(targets), len(targets), token_cap=10.0)
        loss = min(1.0, (step + 1) / 5) * loss  # the first steps are small
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        teacher.update()
    return np.array(curve)


@torch.no_grad()
def kl_along_episode(model, words, chain, hint):
    """The hint's KL at every sampled token of an episode, those after the hinted turn included ->
    names, KL"""
    # The same tokens twice, without the hint and with it behind the task, which shifts all later
    # positions by its length.
    (tokens,), (mask,) = toy_batch([chain])  # (T,) each
    above = len(chain.turns[0].tokens)
    hinted = torch.cat((tokens[:above], torch.tensor(hint), tokens[above:]))

    # A token at position t is predicted at t - 1.
    at = mask.nonzero()[:, 0]  # (N,)
    student = model.logits(model(tokens[None]))[0, at - 1]  # (N, V)
    teacher = model.logits(model(hinted[None]))[0, at - 1 + len(hint)]  # (N, V)
    return [words.names[i] for i in tokens[at]], divergence(student, teacher).numpy()


def make_toy_model(words):
    from moe import Model, ModelConfig

    sizes = dict(dim=32, layers=2, heads=4, kv_lora=16, qk_nope=16, qk_rope=8, v_dim=16)
    sizes.update(dense_ffn=64, experts=4, num_experts_per_tok=2, expert_ffn=32, context=64)
    return Model(ModelConfig(len(words.names), **sizes))


def demo():
    from demos.demo_figures import draw_hint
    from command.output_files import check_writable

    # A place that cannot be written is refused before the work.
    path = Path("out/feedback.png")
    check_writable(path.parent, [path.name])

    # tensors this small only lose by being shared
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng, words = np.random.default_rng(0), WordTokenizer()
    model = make_toy_model(words)
    pretrain_toy(model, words, rng)

    # One faulty turn, its hint, and where the hint disagrees with the policy
    chain = toy_chains(words, rng, 1, habit=1)[0]
    hint = detect(chain)[0]
    called, offered = chain.turns[1].calls[0].name, " and ".join(chain.task.tools)
    print(f"turn    the model calls {called}, the task offers {offered}")
    print(f"hint    {hint.text}   ({hint.kind}, above turn {hint.turn})")
    ids = hint_tokens(words, hint.text, chain.turns[hint.turn])
    names, kl = kl_along_episode(model, words, chain, ids)
    print("KL      " + "  ".join(f"{name} {value:.2f}" for name, value in zip(names, kl)))

    # The cure
    curve = distill_toy(model, words, rng, toy_chains(words, rng, 128, habit=1))
    for step in range(0, len(curve), 5):
        wrong, good, moved = curve[step]
        now = f"wrong tool {wrong:.3f}  offered tools {good:.3f}"
        print(f"step {step:2}  {now}  final message moved {moved:.4f}")
    draw_hint(names, kl, curve, path)
    (wrong, good, _), (wrong_now, good_now, moved) = curve[0], curve[-1]
    print(
        f"The hint disagrees by {kl[:3].max():.2f} nats at one token; {len(curve) - 1} steps of "
        f"distilling that turn took the\nwrong tool from {wrong:.2f} to {wrong_now:.3f} and the "
        f"offered ones from {good:.2f} to {good_now:.3f}, with no hint in the\ncontext; the final "
        f"message moved by {moved:.4f} nats. Figure: {path}"
    )


def main(argv):
    from demos.demonstration import run_demo

    run_demo("feedback_distill.py", "A hint cures a tiny model.", demo, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
