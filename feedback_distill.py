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

    student   s = log pi(. | x, y_<t)                  teacher   t = log pi_T(. | x, hint, y_<t), no gradient
    reverse   sum e^s (s - t)       forward   sum e^t (t - s)
    JSD       (1-a) KL(s | m) + a KL(t | m),   m = log((1-a) e^s + a e^t)
    top-k     the k likeliest entries and one bucket for the rest, log(1 - sum)
    loss      sum of these over the hinted turns' tokens / number of such tokens (its own denominator, not RL's)

Left out: a trust region around the teacher; replaying the sampled experts in the teacher's forward
(it routes by itself); targets spread over context-parallel ranks. Several rules may fire on one
turn: only the first one is heard.

Letters: B rows of the trainer's batch, R teacher rows (one per hint), S their length, N targets
(tokens of hinted turns), V vocabulary, k entries kept.

    python feedback_distill.py      a tiny model calls a tool that is not there; a hint, its KL per token (a figure), the cure
"""

import argparse
import itertools
import os
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

from rollout import Tokenizer, effort_counts, make_turn, play_moves
from world.expert import expert
from world.task import HINTED, Action
from world.tools import ARGUMENTS

# flags of train.py that say nothing with --feedback=0
KNOBS = "divergence", "teacher", "teacher_rate"

# ---------------------------------------------------------------- rules: (chain, episode, turn) -> the hint's text, or None

# thoughts must not leak into the code
STYLE = {
    "comments": ("no comments in code.", re.compile(r"#")),
    "statements": ("one statement per line.", re.compile(r";")),
    "indent": ("indent by 4 spaces.", re.compile(r"^(?:    )*(?: {1,3}(?=\S)|\t)")),
}
STRING = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")
FINAL_WORDS = 16  # of the final message; the micro-world's is "Put back this, that."


UNREADABLE = "Reminder: a call must be whole, outside of thoughts, and in the form that the tools are called in."
SILENT, RAMBLING = (
    "Reminder: end with a short message that says what was done.",
    "Reminder: the final message must be short.",
)


def available_tools(task):
    return f"Reminder: Available tools: {', '.join(task.tools)}."


def unavailable_tool(chain, e, i):
    if any(call.error == "unknown_tool" for call in chain.episodes[e].turns[i].calls):
        return available_tools(chain.task)


def malformed_arguments(chain, e, i):
    for call in chain.episodes[e].turns[i].calls:
        if call.error == "bad_arguments" and not call.name:
            return UNREADABLE
        if call.error == "bad_arguments":
            return f"Reminder: {call.name} takes {', '.join(ARGUMENTS.get(call.name, ('other arguments',)))}."


def breach(call, wanted=STYLE):
    """-> what to say of the first rule that a line of Python added by `call` breaks, and where the
    new text does; or None. Read line by line, without parsing: an edit is seldom a whole
    program."""
    if call.name == "edit_file" and len(call.args) == 3 and call.args[0].endswith(".py"):
        kept, text = set(call.args[1].split("\n")), call.args[2]
        for said, broken in (STYLE[name] for name in wanted):
            start = 0
            for line in text.split("\n"):
                found = line not in kept and broken.search(
                    STRING.sub(lambda quoted: "'" * len(quoted[0]), line)
                )
                if found:
                    return said, start + found.start()
                start += len(line) + 1


def code_style(chain, e, i):
    """A line of Python that this turn adds breaks a rule of the repository (task.meta["style"]
    names them; default: all)."""
    wanted = (getattr(chain.task, "meta", None) or {}).get("style", STYLE)
    for said, _ in filter(
        None, (breach(call, wanted) for call in chain.episodes[e].turns[i].calls)
    ):
        return f"Reminder: code style: {said}"


def spoken_text(text):
    """What a turn says, without the thought before it"""
    before, close, after = text.partition("</think>")
    return after if close else before.partition("<think>")[0]


def last_word(chain, e, i):
    """Is this the assistant turn with which the chain ended? (a summary, asked for by a query, ends
    an episode only)"""
    turns, last = chain.episodes[e].turns, e == len(chain.episodes) - 1
    return (
        last
        and turns[i - 1].role != "query"
        and not any(turn.role == "assistant" for turn in turns[i + 1 :])
    )


def communication(chain, e, i):
    """Only where the policy ended by itself: to one that a limit cut off, "end with a message"
    would teach to give up."""
    turn = chain.episodes[e].turns[i]
    if chain.finished and last_word(chain, e, i):
        words = len(spoken_text(turn.text).split())  # a thought is no message
        return SILENT if not words else RAMBLING if words > FINAL_WORDS else None


def effort(chain, e, i):
    """Reading what the context already shows, or testing again although nothing has changed. Only
    this episode counts: after a summary the context is new."""
    seen, tests = set(), ("run_command", chain.task.test_command)
    for j, turn in enumerate(chain.episodes[e].turns[: i + 1]):
        for call in turn.calls:
            key = call.name, *call.args
            if key in seen and j == i:
                return (
                    "Reminder: nothing has changed since the last test run."
                    if key == tests
                    else f"Reminder: {call.args[0]} is already above."
                )
            if call.name == "edit_file" and not call.error:
                seen = {k for k in seen if k[0] == "read_file" and k[1] != call.args[0]}
            elif call.name == "run_command" and key != tests:
                seen = set()  # another command may have written any file
            elif not call.error:
                seen.add(key)


def unfinished(chain, e, i):
    """The chain is submitted while its own to-do list has open items, or the last test run still
    names missing functions."""
    turn = chain.episodes[e].turns[i]
    if turn.calls or not chain.finished or not last_word(chain, e, i):
        return None
    plan, missing = [], []
    for turn in (turn for episode in chain.episodes for turn in episode.turns):
        own = turn.text if turn.role in ("assistant", "summary") else ""
        plan = re.findall(r"^\s*[-*] \[([ xX])\] (.+)$", own, re.M) or plan
        for call in turn.calls:
            if (
                call.name == "run_command"
                and call.args == [chain.task.test_command]
                and not call.error
            ):
                missing = re.findall(r"^(\S+): missing", call.output, re.M)
            elif call.name == "edit_file" and not call.error:
                missing = [
                    name for name in missing if f"def {name.split('.')[-1]}(" not in call.args[2]
                ]
    left = list(dict.fromkeys([item for mark, item in plan if mark == " "] + missing))
    return f"Reminder: still to do: {', '.join(left)}." if left else None


RULES = {
    rule.__name__: rule
    for rule in (
        unavailable_tool,
        malformed_arguments,
        code_style,
        effort,
        unfinished,
        communication,
    )
}


# what a demonstration's hints say of the flaws that the expert shows (synth_tasks.Action): rule ->
# (task, flawed action) -> text
REMINDERS = {
    "unavailable_tool": lambda task, action: available_tools(task),
    "communication": lambda task, action: RAMBLING if action.text else SILENT,
    "code_style": lambda task, action: f"Reminder: code style: {STYLE['comments'][0]}",
}


def span(tokenizer, turn, hint):
    """(first, end), among the turn's sampled tokens, of what a hint speaks about: the whole turn,
    with two exceptions. Of a tool that is not there the call: the token that begins it, for there
    may be none to make, and the name. On the arguments of a tool that does not exist, a reminder of
    the tools has nothing to say. Of code style the token that breaks the rule, not the code around
    it."""
    if hint.kind == "unavailable_tool":
        n = [call.error for call in turn.calls].index("unknown_tool")
        return tokenizer.find_call_name(turn, n)
    if hint.kind == "code_style":
        rule = [name for name, (said, _) in STYLE.items() if hint.text.endswith(said)]
        n, (_, place) = next(
            (n, found) for n, call in enumerate(turn.calls) if (found := breach(call, rule))
        )
        return tokenizer.find_written_character(turn, n, place)
    return 0, len(turn.tokens) - turn.head


def muted(tokenizer, kind):
    """A token that hints of this kind say nothing about, -1 = none. Those on the final message do
    not ask whether it is time for one: if the teacher could say so, "end with a message" would also
    teach to end."""
    return tokenizer.id["<|call|>"] if kind == "communication" else -1


def mute(logits, tokens):
    """logits (N, V) without one token (N,) each, -1 = none: their softmax is the distribution over
    all others"""
    return logits.masked_fill(
        torch.arange(logits.shape[-1], device=logits.device) == tokens[:, None], -1e4
    )


@dataclass
class Hint:
    episode: int
    turn: int
    kind: str
    text: str


def detect(chain, rules=RULES, critic=None):
    """-> the Hints of a chain, at most one per turn. `rules`: a dict of
    functions, or names out of RULES. `critic`, any function (chain, episode, turn) -> text or None,
    is asked instead of the rules: a model, for instance."""
    unknown = [name for name in rules if name not in RULES and not isinstance(rules, dict)]
    assert not unknown, f"no rule {unknown[0]!r}; there are {', '.join(RULES)}"
    asked = (
        {"critic": critic}
        if critic
        else rules if isinstance(rules, dict) else {name: RULES[name] for name in rules}
    )
    hints = []
    for e, episode in enumerate(chain.episodes):
        for i, turn in enumerate(episode.turns):
            said = (
                (kind, rule(chain, e, i))
                for kind, rule in asked.items()
                if turn.role == "assistant"
            )
            hints += [Hint(e, i, kind, text) for kind, text in said if text][:1]
    return hints


# ---------------------------------------------------------------- demonstrations with hints


def hint_turn(tokenizer, text, turn):
    """The hint above an assistant turn. Where that turn begins without a word of the harness, the
    hint ends in the words that let the policy speak."""
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
    """The expert's actions. Into `hinted` goes, by the number of the action, the hint that stands
    above it.

    A flawed action is, with probability `hints`, left out, and the hint remind[flaw](task, action)
    stands above the right one: so the model learns to heed hints. With probability `neutral` one of
    the hints stands above an action that was right anyway, calls and final messages alike: a hint
    must say nothing but what it says, or its distillation drifts (a model that saw hints about
    tools above calls only unlearned to finish, and one that saw hints about the final message above
    final messages only learned to quit)."""
    # Each text that a hint can have, once
    texts = []
    for tell in remind.values():
        for words in ("", "too many"):
            text = tell(task, Action(words))
            if text not in texts:
                texts.append(text)

    action = next(moves)
    for number in itertools.count():
        hint = None
        while action.flaw in remind and rng.random() < hints:
            hint = remind[action.flaw](task, action)
            action = moves.send([HINTED])
        is_right = hint is None and action.flaw not in remind
        if is_right and remind and neutral and rng.random() < neutral:
            hint = texts[0] if len(texts) == 1 else rng.choice(texts)
        if hint is not None:
            hinted[number] = hint
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
    """A demonstration in which some flaws are left out and a hint stands in their place -> Chain.
    It is for fine-tuning: a model this small cannot read a hint that it has never seen. sloppy: how
    often the expert errs; restless: see world.expert.expert; the others: see hinted_moves."""
    hinted = {}
    moves = expert(task, rng, sloppy, untidy="code_style" in remind, restless=restless)
    moves = hinted_moves(task, moves, rng, remind, hints, neutral, hinted)
    chain = play_moves(task, tokenizer, moves, limits, compact)
    insert_hints(tokenizer, chain, hinted)
    chain.stats = effort_counts(chain)
    return chain


# ---------------------------------------------------------------- splicing and packing


class Splice(NamedTuple):
    teacher: list  # ids: above + hint + turn
    student: list  # ids: above + turn
    # where the student's first target is predicted: at the last token above what was sampled
    above: int
    # tokens of the hint turn; the teacher's first target is predicted at position above + hint
    hint: int
    targets: int  # sampled tokens of the turn, its <|end|> included


def hint_tokens(tokenizer, text, turn):
    """The hint as a turn of its own above an assistant turn; an empty text is no turn at all."""
    return hint_turn(tokenizer, text, turn).tokens if text else []


def splice(episode, turn_index, hint):
    """Put the hint turn (ids, may be empty) right above an assistant turn. What comes after the
    turn is left out: the model is causal. The turn's head, its role token, is given by the harness:
    the last of both prefixes, never a target."""
    turn = episode.turns[turn_index]
    assert (
        turn.role == "assistant"
    ), f"only the policy's own turns can be taught, turn {turn_index} is {turn.role!r}"
    above = [token for t in episode.turns[:turn_index] for token in t.tokens]
    own = list(turn.tokens)
    return Splice(
        above + list(hint) + own,
        above + own,
        len(above) + turn.head - 1,
        len(hint),
        len(own) - turn.head,
    )


@dataclass
class Targets:
    """N targets in two places: the teacher's own padded rows, and the trainer's batch, whose
    forward is reused."""

    tokens: torch.Tensor  # (R, S) teacher input, padded on the right
    row: torch.Tensor  # (N,) where the teacher predicts target n
    position: torch.Tensor
    student_row: torch.Tensor  # (N,) where the student does
    student_position: torch.Tensor
    token: torch.Tensor  # (N,) the target itself
    hint: torch.Tensor  # (N,) index into `hinted` of the hint it belongs to
    # (N,) a token that the hint says nothing about, -1 = none: see mute
    muted: torch.Tensor
    real_tokens: int = 0  # of the teacher's input, without padding

    def __len__(self):
        return len(self.token)

    def to(self, device):
        values = [getattr(self, f.name) for f in fields(self)]
        return Targets(
            *(v.to(device, non_blocking=True) if torch.is_tensor(v) else v for v in values)
        )


def pack(episodes, hinted, keep_empty=False):
    """episodes: what the trainer's batch holds; hinted: (index into episodes, turn, hint ids), in
    any number and order; a fourth entry is the (first, end) of the sampled tokens that the hint
    speaks about, where that is not the whole turn, a fifth a token that it says nothing about.
    Each hint gets a row of its own, since a second hint in the same row would change the context by more than
    itself. An empty hint says nothing and is dropped, which makes its loss exactly 0;
    keep_empty=True keeps it as a placebo (what an EMA teacher teaches without a hint). Without any
    hint one row of one token remains: all ranks run the same forward."""
    rows, columns = [], []
    for index, (episode, turn, hint, *about) in enumerate(hinted):
        if not hint and not keep_empty:
            continue
        cut = splice(episodes[episode], turn, hint)
        n = np.arange(*(about[0] if about else (cut.targets,)))
        columns.append(
            np.stack(
                [
                    0 * n + len(rows),
                    n + cut.above + cut.hint,
                    0 * n + episode,
                    n + cut.above,
                    np.array(cut.student)[cut.above + 1 + n],
                    0 * n + index,
                    0 * n + (about[1] if len(about) > 1 else -1),
                ]
            )
        )
        rows.append(cut.teacher)
    S = max(map(len, rows), default=1)
    # (R, S)
    tokens = torch.tensor([row + [0] * (S - len(row)) for row in rows] or [[0]])
    columns = np.concatenate(columns, 1) if columns else np.zeros((7, 0))
    return Targets(tokens, *torch.from_numpy(columns.astype(np.int64)), sum(map(len, rows)))


# ---------------------------------------------------------------- divergence and loss


def log_buckets(student, teacher, top_k=0, top_by="student"):
    """Logits (N, V) twice -> log-probs (N, V), or (N, k + 1): the k likeliest entries and the sum
    of all others. The tail is a logsumexp over the others themselves: 1 - sum of the k would be
    rounding noise once the k hold all the mass."""
    assert top_by in ("student", "teacher"), f"top_by must be student or teacher, not {top_by!r}"
    both = [F.log_softmax(x.float(), -1) for x in (student, teacher.detach())]
    if not 0 < top_k < student.shape[-1]:
        return both
    # (N, k)
    where = both[top_by == "teacher"].detach().topk(top_k, -1)[1]
    tail = lambda x: x.scatter(-1, where, -torch.inf).logsumexp(-1, keepdim=True)
    return [torch.cat((x.gather(-1, where), tail(x)), -1) for x in both]


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
    give exactly 0 in every kind. entry_clip (OPSD: .05 with forward): no vocabulary entry adds more
    than this. token_cap: a token's value is scaled down to the cap, its gradient with it; a clamp
    would drop exactly the tokens that need the correction most."""
    assert (
        student.shape == teacher.shape
    ), f"student {tuple(student.shape)} and teacher {tuple(teacher.shape)} differ"
    assert kind in (
        "reverse",
        "forward",
        "jsd",
    ), f"kind must be reverse, forward or jsd, not {kind!r}"
    assert 0 < alpha < 1, f"alpha={alpha}: its ends 0 and 1 are the forward and the reverse KL"
    s, t = log_buckets(student, teacher, top_k, top_by)
    if kind == "reverse":
        entries = s.exp() * (s - t)
    elif kind == "forward":
        entries = t.exp() * (t - s)
    # m - s = log(1 + a (e^(t-s) - 1)), from the side that cannot overflow
    else:
        d = t - s
        up, down = torch.log1p(alpha * torch.expm1(d.clamp(max=0))), torch.log1p(
            (1 - alpha) * torch.expm1(-d.clamp(min=0))
        )
        # m - s
        above_s = torch.where(d > 0, d + down, up)
        entries = (1 - alpha) * s.exp() * -above_s + alpha * t.exp() * (d - above_s)
    if entry_clip is not None:
        entries = entries.clamp(max=entry_clip)
    value = entries.sum(-1)
    return value if token_cap is None else value * (token_cap / value.detach().clamp(min=token_cap))


def feedback_loss(student, teacher, count, **options):
    """Sum of the divergence over this micro-batch's N targets / count, the number of targets in the
    whole step (all micro-batches, all ranks). With N = 0 it is an exact 0 that still runs backward,
    so ranks without a hint stay in step."""
    assert count >= len(
        student
    ), f"count={count} is the number of targets of the whole step, but here alone are {len(student)}"
    return (
        divergence(student, teacher, **options).sum() / max(count, 1)
        if len(student)
        else student.sum() * 0
    )


# ---------------------------------------------------------------- teacher


def logits_at(model, tokens, row, position):
    """Logits (N, V) at the given places only; (R, S, V) never exists. Models without .logits are
    taken to return logits."""
    return getattr(model, "logits", lambda hidden: hidden)(model(tokens)[row, position])


class Teacher:
    """Weights for the hinted forward: the student's own ("current"), those it began with
    ("frozen"), or their moving average ("ema", teacher = (1 - rate) teacher + rate student after
    each step). They are lent to the student's own module for the forward and the student's are put
    back bit by bit: no second module, so it also works where one cannot be copied (FSDP). Averages
    are kept in fp32 at least, since in bf16 a twentieth of a small change is rounded away."""

    def __init__(self, model, kind="ema", rate=0.05):
        assert kind in (
            "ema",
            "current",
            "frozen",
        ), f"teacher must be ema, current or frozen, not {kind!r}"
        assert 0 <= rate <= 1, f"rate={rate} is the share of the student in each update"
        self.model, self.kind, self.rate = model, kind, rate
        wide = lambda p: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
        self.weights = {} if kind == "current" else {name: wide(p) for name, p in self.lent()}

    def lent(self):
        """Parameters and floating-point buffers (a router's bias follows its weights). FSDP may
        still hold the gathered weights of the last forward: reading or writing those would be lost,
        so they are dropped first."""
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        yield from self.model.named_parameters()
        yield from ((name, b) for name, b in self.model.named_buffers() if b.is_floating_point())

    @torch.no_grad()
    def update(self):
        """Once per optimizer step, after it."""
        if self.kind == "ema":
            for name, p in self.lent():
                self.weights[name].mul_(1 - self.rate).add_(
                    p.detach().to(self.weights[name].dtype), alpha=self.rate
                )

    @contextmanager
    def worn(self):
        """The model wears the teacher's weights. Written through .data, which leaves autograd's
        version counters alone: a graph of the student that was built before can still run backward
        after."""
        mine = {name: p.detach().clone() for name, p in self.lent() if name in self.weights}
        training = self.model.training
        try:
            self.put(self.weights)
            # evaluation mode: the router counts no load
            yield self.model.eval()
        finally:
            self.put(mine)
            self.model.train(training)

    def put(self, weights):
        for name, p in self.lent() if weights else ():
            p.data.copy_(weights[name])

    @torch.no_grad()
    def __call__(self, targets):
        """Targets -> logits (N, V) without gradient, at the places where the hinted context
        predicts them."""
        with self.worn() as model:
            return logits_at(model, targets.tokens, targets.row, targets.position)


# ---------------------------------------------------------------- demo

PHANTOM = "open_browser"  # a tool that exists in the model's habits only
OFFERED = ("read_file", "edit_file", "run_command", "search_codebase")


class Words(Tokenizer):
    """A tokenizer for the demo: one id per word."""

    def __init__(self):
        text = f"Tools Fix done ok Tool not found Reminder Available tools {PHANTOM} {' '.join(OFFERED)} : , . 0 1 2 3 4 5 6 7"
        controls = [
            f"<|{name}|>" for name in ("pad", "user", "assistant", "tool", "hint", "call", "end")
        ]
        self.names = list(dict.fromkeys(controls + text.split()))
        self.id = {name: i for i, name in enumerate(self.names)}

    def encode(self, text):
        return [self.id[word] for word in re.findall(r"\w+|[^\w\s]", text)]


def toy_chain(words, tools, item, tool, hinted=False):
    """A task, (a hint,) one call, its answer, a final message, in the shapes of real rollouts."""
    from rollout import Call, Chain, Episode, Turn

    turn = lambda role, body, **more: Turn(
        role, [words.id[f"<|{role}|>"], *body, words.id["<|end|>"]], **more
    )
    call = Call(tool, [], *(("ok", "") if tool in tools else ("Tool not found", "unknown_tool")))
    return Chain(
        task := SimpleNamespace(tools=tools, test_command=""),
        [
            Episode(
                [
                    turn(
                        "user", words.encode(f"Tools: {', '.join(tools)}. Fix {item}."), text=item
                    ),
                    *([turn("hint", words.encode(available_tools(task)))] if hinted else []),
                    turn("assistant", [words.id["<|call|>"], words.id[tool]], calls=[call]),
                    turn("tool", words.encode(call.output)),
                    turn("assistant", words.encode(f"done {item}."), text=f"done {item}."),
                ]
            )
        ],
    )


def toy_chains(words, rng, n, habit, hinted=False):
    """n chains in which a share `habit` of the calls goes to the phantom, the others to the right
    one of two offered tools."""
    chains = []
    for _ in range(n):
        tools = tuple(rng.permutation(OFFERED)[:2].tolist())
        tool = PHANTOM if rng.random() < habit else min(tools, key=OFFERED.index)
        chains.append(toy_chain(words, tools, str(rng.integers(8)), tool, hinted))
    return chains


def toy_batch(chains):
    """-> tokens (B, T), mask (B, T): 1 where the policy chose the token"""
    from rollout import flatten

    rows = [flatten(chain.episodes[0])[:2] for chain in chains]
    T = max(len(tokens) for tokens, _ in rows)
    return [
        torch.from_numpy(np.stack([np.pad(row[j], (0, T - len(row[j]))) for row in rows]))
        for j in (0, 1)
    ]


def practise(model, words, rng, steps=135):
    """Half of the demonstrations have the habit, half stand under a hint and heed it: a tiny model
    has to be shown what a pretrained one can do already."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.98), weight_decay=0.0)
    ramp = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 10, 2.1 * (1 - step / steps))
    )
    for step in range(steps):
        tokens, mask = toy_batch(
            toy_chains(words, rng, 24, *((0.6, False) if step % 2 else (0, True)))
        )
        chosen = mask[:, 1:] == 1
        loss = F.cross_entropy(model.logits(model(tokens[:, :-1])[chosen]), tokens[:, 1:][chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ramp.step()


@torch.no_grad()
def look(model, words, chains):
    """Log-probs where the tool is named (B, V) and over the four sampled tokens of the final
    message (B, 4, V)."""
    logp = model.logits(model(toy_batch(chains)[0])).log_softmax(-1)
    return logp[:, len(chains[0].turns[0].tokens) + 1], logp[:, -5:-1]


def teach(model, words, rng, held_out, steps=20):
    """Feedback alone, no reward. -> per step: probability of the phantom, of the offered tools, KL
    of the final message"""
    optimizer, teacher = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0), Teacher(
        model, "ema", 0.05
    )
    offered, curve = torch.tensor([words.encode(" ".join(c.task.tools)) for c in held_out]), []
    before = look(model, words, held_out)[1]
    for step in range(steps + 1):
        tool, final = look(model, words, held_out)
        moved = divergence(final.flatten(0, 1), before.flatten(0, 1), "forward").mean()
        curve.append(
            [
                tool.exp()[:, words.id[PHANTOM]].mean(),
                tool.exp().gather(1, offered).sum(1).mean(),
                moved,
            ]
        )
        tasks = toy_chains(words, rng, 24, habit=1)
        # what the policy calls
        sampled = torch.multinomial(look(model, words, tasks)[0].exp(), 1)[:, 0].tolist()
        chains = [
            toy_chain(words, c.task.tools, c.turns[0].text, words.names[i])
            for c, i in zip(tasks, sampled)
        ]
        hinted = [
            (i, hint.turn, hint_tokens(words, hint.text, chain.turns[hint.turn]))
            for i, chain in enumerate(chains)
            for hint in detect(chain)
        ]
        targets = pack([chain.episodes[0] for chain in chains], hinted)
        student = logits_at(
            model, toy_batch(chains)[0], targets.student_row, targets.student_position
        )
        # The first steps are small.
        warmup = min(1.0, (step + 1) / 5)
        loss = warmup * feedback_loss(student, teacher(targets), len(targets), token_cap=10.0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        teacher.update()
    return np.array(curve)


@torch.no_grad()
def along(model, words, chain, hint):
    """The hint's KL at every sampled token of an episode, those after the hinted turn included ->
    names, KL"""
    (tokens,), (mask,) = toy_batch([chain])
    above = len(chain.turns[0].tokens)
    teacher = torch.cat((tokens[:above], torch.tensor(hint), tokens[above:]))
    at = mask.nonzero()[:, 0]
    s, t = (
        model.logits(model(tokens[None]))[0, at - 1],
        model.logits(model(teacher[None]))[0, at - 1 + len(hint)],
    )
    return [words.names[i] for i in tokens[at]], divergence(s, t).numpy()


def plot(path, names, kl, curve):
    # before the import: a notebook exports its own to what it starts
    os.environ["MPLBACKEND"] = "agg"
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    left, right = plt.subplots(1, 2, figsize=(11, 4))[1]
    bars = left.bar(range(len(kl)), kl, color=["tab:red"] * 3 + ["lightgray"] * (len(kl) - 3))
    left.bar_label(bars, fmt="%.2f", fontsize=8)
    left.set_xticks(range(len(kl)), names, rotation=45, ha="right", fontsize=8)
    left.set(
        ylabel="KL(student | teacher), nats",
        title="Where the hint disagrees (red: the hinted turn, in the loss)",
    )
    for j, name in enumerate(("the wrong tool", "offered tools", "KL of the final message")):
        right.plot(curve[:, j], label=f"{name}: {curve[0, j]:.3f} -> {curve[-1, j]:.3f}")
    right.set(
        xlabel="distillation step",
        ylabel="probability (KL: nats)",
        title="What the student does without the hint",
    )
    right.legend(frameon=False, fontsize=8, loc="center right")
    plt.savefig(path, dpi=110, bbox_inches="tight")


def refuse(message):
    print(f"feedback_distill.py: {message}", file=sys.stderr)
    sys.exit(2)


def main():
    from moe import Model, ModelConfig

    parser, path = argparse.ArgumentParser(
        description="A hint cures a tiny model.", allow_abbrev=False
    ), Path("out/feedback.png")
    parser.error = refuse
    parser.parse_args()
    try:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    except OSError as problem:
        refuse(f"cannot write {path}: {problem.strerror}")
    # tensors this small only lose by being shared
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng, words = np.random.default_rng(0), Words()
    model = Model(
        ModelConfig(
            len(words.names),
            dim=32,
            layers=2,
            heads=4,
            kv_lora=16,
            qk_nope=16,
            qk_rope=8,
            v_dim=16,
            dense_ffn=64,
            experts=4,
            num_experts_per_tok=2,
            expert_ffn=32,
            context=64,
        )
    )
    practise(model, words, rng)
    chain = toy_chains(words, rng, 1, habit=1)[0]
    hint = detect(chain)[0]
    print(
        f"turn    the model calls {chain.turns[1].calls[0].name}, the task offers {' and '.join(chain.task.tools)}"
    )
    print(f"hint    {hint.text}   ({hint.kind}, above turn {hint.turn})")
    names, kl = along(model, words, chain, hint_tokens(words, hint.text, chain.turns[hint.turn]))
    print("KL      " + "  ".join(f"{name} {value:.2f}" for name, value in zip(names, kl)))
    curve = teach(model, words, rng, toy_chains(words, rng, 128, habit=1))
    for step in range(0, len(curve), 5):
        print(
            "step {:2}  wrong tool {:.3f}  offered tools {:.3f}  final message moved {:.4f}".format(
                step, *curve[step]
            )
        )
    try:
        plot(path, names, kl, curve)
    except OSError as problem:
        refuse(f"cannot write {path}: {problem.strerror}")
    (wrong, good, _), (wrong_now, good_now, moved) = curve[0], curve[-1]
    print(
        f"The hint disagrees by {kl[:3].max():.2f} nats at one token; {len(curve) - 1} steps of distilling that turn took the "
        f"wrong tool from {wrong:.2f} to {wrong_now:.3f} and\nthe offered ones from {good:.2f} to {good_now:.3f}, with no hint "
        f"in the context; the final message moved by {moved:.4f} nats. Figure: {path}"
    )


if __name__ == "__main__":
    main()
