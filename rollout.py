"""rollout.py: an agent acts in a codebase, token by token, and is trained on exactly the tokens it
sampled.

A policy reads a task, calls tools in a real directory, sees their outputs, and ends with a final
message; hidden tests give the reward. In this order: the tokenizer, the transcript, the agent as
one coroutine, a sampler in its plain form, group rollouts, and the policy-gradient objective.

Stated by Cursor (Technical Report, arXiv 2603.24477, sections 4.1 and 6.2): several rollouts per
task, each task used once; advantage = reward minus the group's mean, NOT divided by its standard
deviation (that would blow up small differences in a group where all are right); no length
standardisation, no overlong masking; KL by the k1 estimator; router replay.

    A_i = r_i - mean_group(r)
    J   = 1 / (G Z) sum_i sum_t (A_i - beta k1_t) log pi(y_it)
          t over sampled tokens, stop tokens included; Z constant
    k1  = log pi(y_t) - log ref(y_t), detached: as a loss its expected gradient is zero, so it is
          part of the reward

Ours: beta (0 by default), Z, the reference (the policy after SFT), the tool-call format, all sizes.
No ratio and no clip: one update per batch, so without workers the sampling policy is the policy.
With --workers it may be --staleness updates older, and nothing corrects for that. Left out:
branching environments and semantic search. Sampler has a fast twin, in which many agents decode
together; it steps aside where the plain one is edited (fast/twins.py).

History is linear: a turn is [role] body <|end|>, tokens are only ever appended, and what was
sampled is never decoded and re-encoded on the way to the loss. Control tokens separate calls and
arguments; no text encodes to one, so no tool output can forge a call.

Letters (README has them all): B rows, T tokens of a row, V vocabulary, G rollouts per group, Z the
length constant, L MoE layers, K experts per token.

    python rollout.py [--effort=high]     the trained policy of assets/rl at work on a task, with
                                          its masks, and rewards and advantages of its group
    python rollout.py --replay=out/run/transcripts.jsonl      a conversation of a run, in colour
"""

import math
import sys
from bisect import bisect
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F

from length_penalty import (
    FREE,
    SETTINGS,
    Price,
    ask_for,
    count_effort,
    effort_budget,
    read_price_weights,
)
from moe import Cache, Model, ModelConfig, divide_by_temperature
from synth_tasks import make_task
from repositories.audit import audit_rollout
from repositories.cage import sandbox_for
from repositories.verdict import judge
from world.expert import InMemoryWorkspace, expert
from world.machine import MachineFailure, is_machine_failure, try_again
from world.requests import is_kept
from world.sandbox import Sandbox
from world.task import SUMMARIZE, Task
from world.tools import call_tool
from world.workspace import Workspace

# ---------------------------------------------------------------- tokenizer

# Control tokens. <|text|> separates documents in pretraining.
ROLES = ("<|user|>", "<|assistant|>", "<|tool|>", "<|query|>", "<|summary|>", "<|hint|>")
CONTROLS = (*ROLES, "<|call|>", "<|arg|>", "<|end|>", "<|text|>")
# How a text is cut before its pieces are encoded. Single digits, so that numbers can be copied;
# words with the space or underscore before them; "def" with the space after it, so that a name is
# the same tokens where it is defined and where it is used; a newline with its indentation; runs of
# signs.
SPLIT = r"(?:def|class|import|from) |\.(?:py|md)\b|[ _]?\p{L}+| ?\p{N}|\n[ ]*| ?[^\s\p{L}\p{N}]+|\s"


class Tokenizer:
    """tiktoken.Encoding with this project's control tokens, and the form in which a conversation is
    written with them. Text never encodes to a control token. ranks: {bytes: id}.

    The tokenizer of a published model is a subclass with other control tokens and another form of
    the conversation. So all other code asks the tokenizer what a turn looks like."""

    def __init__(self, ranks, pattern=SPLIT):
        self.ranks = ranks
        self.pattern = pattern
        # the control tokens have the ids behind those of the text
        self.special = {name: len(ranks) + i for i, name in enumerate(CONTROLS)}
        self.encoding = tiktoken.Encoding(
            "nanocomposer", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special
        )
        self.id = dict(self.special)
        self.name = {i: name for name, i in self.id.items()}
        self.vocab = len(ranks) + len(self.special)
        # Whichever of these is sampled ends the turn.
        self.ends = {self.id["<|end|>"]}

    def encode(self, text):
        return self.encoding.encode_ordinary(text)

    def decode(self, tokens):
        return self.encoding.decode(list(tokens))

    def state_dict(self):
        """What a checkpoint keeps of it: the arguments that make it again"""
        return {"ranks": self.ranks, "pattern": self.pattern}

    # ---- the form of a conversation: [role] body <|end|>

    def generation_prompt(self, after):
        """The tokens that the harness writes to begin a turn of the policy. after: the role of the
        turn before it"""
        return [self.id["<|assistant|>"]]

    def wrap_turn(self, role, tokens, text):
        """A turn that was not sampled: these tokens, between the control tokens of the form"""
        return Turn(role, [self.id[f"<|{role}|>"], *tokens, self.id["<|end|>"]], text)

    def write_turn(self, role, tokens, text, answers=("", 0, 1, "")):
        """A turn that was not sampled. text: what it says; tokens: as much of it as there is room
        for. answers: for a tool's output, the call that it answers, as (name of the tool, i, n, id
        or ""), where the call is number i, from 0 on, of the n calls of one turn."""
        return self.wrap_turn(role, tokens, text)

    def written_text(self, turn):
        """The text of a turn that was not sampled"""
        return self.decode(turn.tokens[1:-1])

    def declare_tools(self, tools):
        """Tokens that stand before the task of a conversation and say which tools there are. Here
        there are none: the task itself says it."""
        return []

    def write_action(self, text, calls, number=0):
        """The body of an assistant turn, <|end|> included: text, then <|call|>name<|arg|>argument
        ... per call. Only for text of our own, since SUMMARIZE in it becomes the control token.
        number: the first call's number, for families of models that number the calls of a
        conversation."""
        thought, *carried = text.split(SUMMARIZE)
        body = self.encode(thought)
        for part in carried:
            body += [self.id[SUMMARIZE], *self.encode(part)]
        for name, args in calls:
            body += [self.id["<|call|>"], *self.encode(name)]
            for arg in args:
                body += [self.id["<|arg|>"], *self.encode(arg)]
        return body + [self.id["<|end|>"]]

    def read_action(self, body, start=0):
        """Sampled tokens -> (text, calls). Any other control token inside ends nothing: it is read
        as text, by its name. start: before this place of the body no call begins, all is text."""
        call, arg = self.id["<|call|>"], self.id["<|arg|>"]

        # The stop token is no part of the text or of the last argument.
        if body and body[-1] in self.ends:
            body = body[:-1]

        # Cut the body at its calls and arguments.
        parts, marks, starts = [[]], [], []
        for i, token in enumerate(body):
            if token in (call, arg) and i >= start:
                marks.append(token)
                starts.append(i)
                parts.append([])
            else:
                parts[-1].append(token)

        # The first part is text. An argument before any call belongs to none and is dropped.
        text, calls = self.decode(parts[0]), []
        for mark, begin, part in zip(marks, starts, parts[1:]):
            if mark == call:
                calls.append(Call(self.decode(part).strip(), [], start=begin))
            elif calls:
                calls[-1].args.append(self.decode(part))
        return text, calls

    def number_calls(self, calls, number):
        """For families of models that number the calls of a conversation: gives a number to each
        sampled call that has none. number: the next free one -> the next free one afterwards. Our
        own form numbers nothing."""
        return number

    def find_call(self, body, n):
        """Where in a body its n-th call begins"""
        return [i for i, token in enumerate(body) if token == self.id["<|call|>"]][n]

    def find_call_name(self, turn, n):
        """(first, end), among the sampled tokens of a turn, of the token that begins its n-th call
        and the call's name"""
        body = turn.tokens[turn.head :]
        first = self.find_call(body, n)
        # The name ends at the next control token.
        end = first + 1
        while body[end] not in self.name:
            end += 1
        return first, end

    def find_written_character(self, turn, n, place):
        """(first, end), among the sampled tokens of a turn, of the token that holds character
        number `place` of the text that its n-th call, an edit, writes"""
        body = turn.tokens[turn.head :]
        call = self.find_call(body, n)
        # edit_file's arguments are path, old, new; the text is the third.
        arguments = [i for i in range(call, len(body)) if body[i] == self.id["<|arg|>"]]
        first = arguments[2] + 1

        def written_length(i):
            return len(self.decode(body[first : i + 1]))

        # The first token with which more than `place` characters are written holds that character.
        token = first + bisect(range(first, len(body)), place, key=written_length)
        return token, token + 1


# ---------------------------------------------------------------- transcript


@dataclass
class Call:
    """A tool call of the policy, and the tool's answer to it."""

    name: str
    args: list
    output: str = ""
    error: str = ""  # "", "unknown_tool", "bad_arguments" or "failed"
    # index in the turn's body of its first token (of the first call: of what opens all calls, where
    # a form has such an opening)
    start: int = field(default=0, compare=False)
    # where a family of models numbers its calls: the number, which the answer repeats
    id: str = field(default="", compare=False)
    # in a published form, where arguments have names: {name: value}
    given: dict = field(default=None, compare=False)
    # the middle of its output had no room, so the context does not show it
    cut: bool = field(default=False, compare=False)


@dataclass
class Turn:
    """One turn of a conversation. The first `head` tokens of an assistant turn are the harness's
    (the role's control token); all others were sampled.

    The role decides what is trained on: the sampled tokens of every turn of the role assistant, in
    each segment that it stands in. An old turn that a later segment repeats as context has another
    role there (recent), so that it is not trained on twice."""

    # user, assistant, tool, query, summary, hint; for turns repeated as context: recent, recent
    # output
    role: str
    tokens: list
    text: str = ""
    calls: list = field(default_factory=list)
    thinking: int = 0  # assistant: tokens before the first call
    logprobs: np.ndarray = None  # assistant: one per sampled token
    # assistant: the policy's version, per sampled token: new weights may arrive in the middle of a
    # turn
    versions: np.ndarray = None
    head: int = 1
    # the policy goes on right behind this turn: the harness writes no token between the two
    open: bool = False


@dataclass
class Segment:
    """The turns that share one context = one training sequence."""

    turns: list
    routes: np.ndarray = None  # (T, L, K) int16 chosen at sampling, -1 = not recorded
    # the hints on its turns, as feedback_distill.Splice: what a teacher reads above them
    hints: list = field(default_factory=list)

    def __len__(self):
        return sum(len(turn.tokens) for turn in self.turns)


@dataclass
class Rollout:
    """One rollout: segments joined by summaries, and one reward that belongs to every sampled token
    of all of them."""

    task: Task
    segments: list
    passed: bool = False  # by the judge: do the hidden tests pass?
    # how the machine failed, "" if it did not. After a failure the reward says nothing about the
    # policy
    failure: str = ""
    finished: bool = False  # ended by its own final message, not by a limit
    steps: int = 0  # decoding steps that it took; accepted drafts save some
    files: dict = field(default_factory=dict)  # path -> text at its end: what is submitted
    # what the world recorded of its tool calls (world.recorder.Seen); None: nothing was recorded
    facts: list = None
    findings: list = None  # the audit's; None: not audited yet
    # what grade() makes of all this: the counts, is the task solved, the reward
    stats: dict = field(default_factory=dict)
    solved: bool = False
    kept: bool = None  # was the second instruction kept? None: there was none
    reward: float = 0.0

    @property
    def turns(self):
        return [turn for segment in self.segments for turn in segment.turns]


def flatten(segment):
    """-> tokens, mask (1 = the policy chose it), logprobs, turn index: aligned arrays of length
    T"""
    tokens, mask, logprobs, turn_index = [], [], [], []
    for i, turn in enumerate(segment.turns):
        # The head of a turn is the harness's. Behind it, the tokens of an assistant were sampled.
        sampled = turn.role == "assistant"
        n = len(turn.tokens) - turn.head
        tokens += turn.tokens
        mask += [0] * turn.head + [int(sampled)] * n
        logprobs += [0.0] * turn.head
        if sampled and turn.logprobs is not None:
            logprobs += turn.logprobs.tolist()
        else:
            logprobs += [0.0] * n
        turn_index += [i] * len(turn.tokens)
    logprobs = np.array(logprobs, dtype=np.float32)
    return np.array(tokens), np.array(mask), logprobs, np.array(turn_index)


def make_turn(tokenizer, role, text, most=10**9, answers=("", 0, 1, "")):
    """A turn that was not sampled. In a text of more than `most` tokens a note replaces the middle.
    answers: see Tokenizer.write_turn"""
    tokens = without_middle_tokens(tokenizer, tokenizer.encode(text), most)
    return tokenizer.write_turn(role, tokens, text, answers)


def without_middle_tokens(tokenizer, tokens, most):
    """At most `most` of these tokens: all, or the beginning and the end with a line between them
    that says how many are missing. The end stays because the end of a test run says what failed.
    The line counts against the limit; where it has no room, a shorter one stands there."""
    if len(tokens) <= most:
        return tokens

    # The number in the line depends on the length of the line, so we keep room for the longest.
    longest_note = tokenizer.encode(f"\n[{len(tokens)} tokens cut]\n")
    room = most - len(longest_note)
    if room < 2:
        note = tokenizer.encode("\n[cut]\n")
        room = max(0, most - len(note))
        note = note[:most]
    else:
        note = tokenizer.encode(f"\n[{len(tokens) - room} tokens cut]\n")
        room = min(room, most - len(note))

    # Half of the room is for the beginning, the rest for the end.
    half = room // 2
    return tokens[:half] + note + tokens[len(tokens) - (room - half) :]


def opening_turn(tokenizer, task):
    """The user's turn that a rollout starts from"""
    turn = make_turn(tokenizer, "user", task.problem_statement)
    turn.tokens[:0] = tokenizer.declare_tools(task.tools)
    return turn


# ---------------------------------------------------------------- one agent, as a coroutine


def run_tool(workspace, call):
    """Fills in call.output and call.error."""
    call.output, call.error = call_tool(workspace, call.name, call.args)


def run_tools(workspace, calls, rollout):
    """Answers the calls of a turn, in order. Where the machine fails (no room, no process), the
    rollout says so and is over."""
    try:
        for call in calls:
            if not call.error:
                run_tool(workspace, call)
    except MachineFailure as failure:
        rollout.failure = str(failure)


@dataclass(frozen=True)
class Limits:
    window: int = 512  # tokens that the context may hold
    turns: int = 40  # assistant turns per rollout
    # sampled tokens per turn (0: three eighths of the window, and at least 192)
    turn_tokens: int = 0
    commands: int = 0  # run_command calls per rollout that are answered (0: all)

    @property
    def max_turn_tokens(self):
        return self.turn_tokens or max(192, self.window * 3 // 8)


@dataclass
class Request:
    """What an agent asks of a sampler: append `tokens` to its context (a new one if restart),
    then sample a turn."""

    tokens: list
    restart: bool
    room: int  # sampled tokens at most
    summary: bool = False  # the turn asked for is a summary
    # number of the turn's first call, for families of models that number their calls
    number: int = 0


@dataclass
class Work:
    """Tool calls to run outside the model. slow: they start a process, so the sampler may go on
    with other agents meanwhile."""

    calls: list
    run: callable
    slow: bool


def leaves_room(tokenizer, task, limits):
    """Is there room for a first turn, two tokens at least, behind the task's opening?"""
    return limits.window - len(context_tokens(tokenizer, [opening_turn(tokenizer, task)])) >= 2


def agent(task, tokenizer, workspace, limits, compact=None):
    """A coroutine: one agent works on one task. It yields a Request and is sent (body, logprobs,
    versions), yields a Work and is sent nothing, and so on; it returns its Rollout. versions may be
    one number for all of a body.

    `compact(tokenizer, rollout)` is summarize.py's hook: after each turn it may return a query
    turn; the summary is then sampled in the same context, and a new segment starts from task +
    summary. With compact.truncate no summary is sampled: a new segment starts at once from task +
    newest turns."""
    rollout = Rollout(task, [Segment([opening_turn(tokenizer, task)])])
    restart = True  # the segment begins a new context
    added = []  # in a context that goes on: the turns that the sampler has not read yet
    summarizing = False  # the next turn is a summary
    call_number = commands_run = 0  # the next call's number in its context; commands of the rollout
    for _ in range(limits.turns):
        # 1) Is there room for a turn, two tokens at least? A sampler (or the expert) reads what is
        #    new and writes the turn, which is kept token for token.
        segment = rollout.segments[-1]
        unread = segment.turns if restart else added
        prompt = tokenizer.generation_prompt(unread[-1].role)
        room = limits.window - len(segment) - len(prompt)
        if room < 2:
            break
        tokens = context_tokens(tokenizer, unread)
        most = min(limits.max_turn_tokens, room)
        answer = yield Request(tokens, restart, most, summarizing, call_number)
        turn = sampled_turn(tokenizer, prompt, room, *answer)
        segment.turns.append(turn)
        restart = False

        # 2) A turn without a stop token ran out of room: nothing of it is run or submitted.
        if turn.tokens[-1] not in tokenizer.ends:
            cut_off = [] if summarizing else turn.calls
            turn.calls = [replace(call, output="", error="failed") for call in cut_off]
            break

        # 3) A summary ends the segment, and the next one starts from it.
        if summarizing:
            turn.calls = []
            rollout.segments.append(Segment(compact.turns_after_summary(tokenizer, rollout, turn)))
            restart, summarizing, call_number = True, False, 0
            continue

        # 4) A turn without calls is the final message: the work is submitted.
        if not turn.calls:
            rollout.finished = True
            break

        # 5) The tools run outside the model. After a failure of the machine their outputs say
        #    nothing about this agent's work, so the rollout ends.
        call_number = tokenizer.number_calls(turn.calls, call_number)
        commands = refuse_calls(task, limits, turn.calls, commands_run)
        commands_run += commands
        run = partial(run_tools, workspace, turn.calls, rollout)
        yield Work(turn.calls, run, slow=commands > 0)
        if rollout.failure:
            break
        added = output_turns(tokenizer, rollout, limits, compact)
        segment.turns += added

        # 6) Is the context nearly full? Then a summary is asked for, or the oldest turns go.
        query = compact(tokenizer, rollout) if compact else None
        if query and compact.truncate:
            rollout.segments.append(Segment(compact.newest_turns(tokenizer, rollout)))
            restart = True
        elif query:
            segment.turns.append(query)
            added.append(query)
            summarizing = True
    end_rollout(rollout, workspace, limits)
    return rollout


def sampled_turn(tokenizer, prompt, room, body, logprobs, versions):
    """The turn that a sampler wrote behind the harness's prompt. A demonstration may write more
    than there is room for: then the rest is cut off."""
    body, logprobs = body[:room], logprobs[:room]
    text, calls = tokenizer.read_action(body)
    turn = Turn("assistant", [*prompt, *body], text, calls, head=len(prompt))
    turn.thinking = calls[0].start if calls else 0
    turn.logprobs = logprobs
    turn.versions = np.resize(versions, len(body))
    return turn


def output_turns(tokenizer, rollout, limits, compact):
    """One turn per call of the last turn, with the call's output. Together they have at most a
    third of the window, in equal shares."""
    room = limits.window // 3
    # With summaries, the query and the summary need room, too.
    if compact:
        room = min(room, compact.room_for_outputs(tokenizer, rollout))

    turns = []
    calls = rollout.segments[-1].turns[-1].calls
    for i, call in enumerate(calls):
        answers = call.name, i, len(calls), call.id
        most = room // len(calls)
        call.cut = len(tokenizer.encode(call.output)) > most
        turns.append(make_turn(tokenizer, "tool", call.output, most, answers))
    return turns


def context_tokens(tokenizer, turns):
    """The tokens of these turns, and what the harness writes before the policy's next turn"""
    tokens = []
    for turn in turns:
        tokens += turn.tokens
    return tokens + tokenizer.generation_prompt(turns[-1].role)


def refuse_calls(task, limits, calls, commands_run):
    """Answers the commands of a turn that are beyond limits.commands, so that they do not run.
    Returns how many commands the turn holds. commands_run: commands of the earlier turns"""
    commands = []
    for call in calls:
        # A tool that is not offered. An error found in reading the call is cleared, so that the
        # call runs and its answer says that there is no such tool.
        if call.name and call.name not in task.tools:
            call.output, call.error = "", ""
        elif call.name == "run_command":
            commands.append(call)

    # The first ones may run until the limit is reached.
    if limits.commands:
        allowed = max(0, limits.commands - commands_run)
        for call in commands[allowed:]:
            call.output, call.error = "No more commands.", "failed"
    return len(commands)


def end_rollout(rollout, workspace, limits):
    """A rollout ends with turns that the policy has read or written itself, and with the files that
    it leaves."""
    # Outputs that overflowed the context were never fed.
    for segment in rollout.segments:
        while len(segment) > limits.window and len(segment.turns) > 1:
            segment.turns.pop()

    # If the last turn allowed was a summary, the policy never acted in the segment that it began.
    roles = [turn.role for turn in rollout.segments[-1].turns]
    if len(rollout.segments) > 1 and "assistant" not in roles:
        rollout.segments.pop()

    # What is submitted. The machine may fail at reading it, too.
    try:
        rollout.files = workspace.files()
    except MachineFailure as failure:
        rollout.failure = str(failure)


# ---------------------------------------------------------------- sampling


def sample_from_logits(logits, uniform, temperature=1.0):
    """logits (B, V), uniform (B,) in [0, 1) -> tokens (B,), log-probs (B,) of the distribution that
    was sampled from, in fp32. temperature: finite and not negative, else a ValueError; 0 takes the
    largest logit."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be a finite number from 0 on")
    if temperature == 0:
        return logits.argmax(-1), torch.zeros(len(logits), device=logits.device)
    p = divide_by_temperature(logits.float(), temperature).softmax(-1)  # (B, V)

    # The inverse of the cumulative distribution turns a uniform number into a token. (A draw just
    # below 1 rounds to 1 in fp32.)
    mass = p.cumsum(-1)  # (B, V)
    draw = uniform.clamp(max=1 - 2**-24) * mass[:, -1]  # (B,)
    tokens = torch.searchsorted(mass, draw[:, None], right=True)  # (B, 1)
    tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens[:, 0], p.gather(-1, tokens)[:, 0].log()


class Context:
    """What a model has read of one segment: tokens, its cache of their keys and values, and the
    experts that each of them took."""

    def __init__(self, model, window):
        self.tokens = []
        self.cached = 0  # tokens[:cached] are in the cache
        self.cache = Cache(model, 1, window + 2)
        self.routes = []  # arrays (N, L, K)

    def routes_of(self, length):
        """-> (length, L, K) int16, -1 where a token was not fed; None without MoE layers"""
        if not self.routes:
            return None
        known = np.concatenate(self.routes)[:length]
        routes = np.full((length, *known.shape[1:]), -1, dtype=known.dtype)
        routes[: len(known)] = known
        return routes


class Sampler:
    """The plain form of sampling: one agent after the other, one token at a time, with a KV cache.

    Each agent draws with random numbers of its own, one per token: what it samples does not depend
    on who else is sampled. What the plain form costs is time. A step that decodes one token reads
    all weights of the model, and would read them once for a batch of 64 agents too."""

    def __init__(self, model, tokenizer, window=512, temperature=1.0):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.window = window
        self.temperature = temperature
        self.device = model.embed.weight.device
        self.version = 0  # of the weights: how many updates they have seen

    @torch.inference_mode()
    def run(self, agents, seeds, on_end=lambda rollout: None, patient=True):
        """-> the Rollouts of the agents, in order. seeds: one per agent, of whatever numpy makes a
        generator. on_end is called as each rollout ends (to judge it). patient (fast/sampler.py):
        without effect here, where one agent plays at a time."""
        rollouts = []
        for agent, seed in zip(agents, seeds):
            rollouts.append(self.play(agent, np.random.default_rng(seed)))
            on_end(rollouts[-1])
        return rollouts

    def play(self, agent, rng):
        """Answers what one agent asks for, until it returns its Rollout."""
        contexts = []  # one per segment
        answer, steps = None, 0
        while True:
            # The agent goes on until it asks for something, or ends.
            try:
                request = agent.send(answer)
            except StopIteration as end:
                rollout = end.value
                break

            # Tools need no model.
            if isinstance(request, Work):
                request.run()
                answer = None
                continue

            # A turn is sampled behind what the model has read, or in a new context.
            if request.restart:
                contexts.append(Context(self.model, self.window))
            contexts[-1].tokens += request.tokens
            answer = self.sample_turn(contexts[-1], request.room, rng)
            steps += len(answer[0])

        # The experts that each token took are part of the record: training replays them.
        rollout.steps = steps
        for segment, context in zip(rollout.segments, contexts):
            segment.routes = context.routes_of(len(segment))
        return rollout

    def sample_turn(self, context, room, rng):
        """-> (tokens, log-probs, versions) of a turn of at most `room` tokens"""
        body, logprobs = [], []
        while len(body) < room:
            # One random number per token, from this agent's own generator.
            logits = self.next_token_logits(context)
            uniform = torch.tensor([rng.random()], dtype=torch.float32, device=self.device)
            token, logprob = sample_from_logits(logits, uniform, self.temperature)
            body.append(int(token))
            logprobs.append(float(logprob))
            context.tokens.append(body[-1])
            if body[-1] in self.tokenizer.ends:
                break
        return body, np.array(logprobs, dtype=np.float32), np.full(len(body), self.version)

    def next_token_logits(self, context):
        """Feeds the tokens that are not in the cache yet -> logits (1, V) of what follows the last
        of them"""
        tokens = torch.tensor([context.tokens[context.cached :]], device=self.device)  # (1, N)
        chosen = []  # of each MoE layer (1, N, K)
        hidden = self.model.decode(tokens, context.cache, slice(0, 1), [context.cached], chosen)
        if chosen:
            routes = torch.cat(chosen).transpose(0, 1)  # (N, L, K)
            context.routes.append(routes.cpu().numpy().astype(np.int16))
        context.cached = len(context.tokens)
        return self.model.logits(hidden[0, -1:])


# ---------------------------------------------------------------- rollouts and demonstrations


def agent_in_workspace(task, tokenizer, sandbox, limits, compact):
    """An agent in a workspace of its own, made when it begins and gone when it ends"""
    try:
        workspace = try_again(lambda: Workspace(task, sandbox_for(task, sandbox)))
    except MachineFailure as failure:
        return Rollout(task, [Segment([opening_turn(tokenizer, task)])], failure=str(failure))
    with workspace:
        rollout = yield from agent(task, tokenizer, workspace, limits, compact)
        # What the tools did is seen only as long as the workspace stands.
        rollout.facts = workspace.recorder.seen
        return rollout


def judge_rollout(rollout, sandbox):
    """Do the hidden tests of the task pass with what was submitted (rollout.passed), and was there
    a cheat (rollout.findings)?"""
    if rollout.failure:
        return
    try:
        verdict = judge(rollout.task, rollout.files, sandbox)
        rollout.passed = verdict.solved
        # Audited here, not later: here it runs beside the sampling, in the processes that sample.
        audit_rollout(rollout, verdict)
    except (MachineFailure, OSError, MemoryError) as failure:
        if not is_machine_failure(failure):
            raise
        rollout.failure = str(failure)


# What a solved task is worth whose second instruction was not kept (ours)
NOT_KEPT = 0.5


def grade(rollout, price=FREE):
    """Sets the counts, solved, kept and the reward of a rollout; nothing else sets them. It is
    solved if the agent ended by itself and the hidden tests pass: what a limit cut short has
    submitted nothing, even if its files pass them. Then its worth is 1, or NOT_KEPT where a second
    instruction was not kept, and the reward is that less the price of effort."""
    rollout.stats = count_effort(rollout, price.weights)
    rollout.solved = rollout.passed and rollout.finished
    calls = [call for turn in rollout.turns for call in turn.calls if call.name == "run_command"]
    commands = [(call.args[0], call.output) for call in calls if call.args]
    message = rollout.turns[-1].text if rollout.finished else ""
    rollout.kept = is_kept(rollout.task, rollout.files, commands, message)
    worth = rollout.solved * (NOT_KEPT if rollout.kept is False else 1.0)
    rollout.reward = float(price.shape_reward(worth, rollout.stats["effort"]))


def sample_groups(sampler, tasks, group, seed, limits, sandbox, compact=None, numbers=None):
    """`group` rollouts per task -> list of groups, judged and not yet graded. Rollout j of a task
    draws its random numbers from the seed (seed, the task's number, j); numbers: those of the tasks
    (default: 0, 1, ...). A rollout that the machine failed is played once more. Where it fails
    again, rollout.failure says why, and it is neither right nor wrong: leave it out (see
    drop_failed)."""
    # Tests of a real repository take long: the sampler is not patient, only their own agent waits.
    patient = not any("repo" in task.meta for task in tasks)

    def play(places):
        agents, seeds = [], []
        for number, task, j in places:
            agents.append(agent_in_workspace(task, sampler.tokenizer, sandbox, limits, compact))
            seeds.append((seed, number, j))
        try:
            return sampler.run(
                agents, seeds, partial(judge_rollout, sandbox=sandbox), patient=patient
            )
        finally:
            # After an error some agents have not ended; closing them removes their workspaces.
            for one in agents:
                one.close()

    # One place (task's number, task, j) per rollout; the rollouts of a task stand side by side.
    places = []
    for number, task in zip(numbers or range(len(tasks)), tasks):
        places += [(number, task, j) for j in range(group)]
    rollouts = play(places)

    # What the machine failed at gets one more try.
    failed = [i for i, rollout in enumerate(rollouts) if rollout.failure]
    if failed:
        for i, rollout in zip(failed, play([places[i] for i in failed])):
            rollouts[i] = rollout
    return [rollouts[i : i + group] for i in range(0, len(rollouts), group)]


def drop_failed(groups):
    """-> (the groups without the rollouts that the machine failed, those rollouts). A group of
    which nothing is left is left out."""
    kept, failed = [], []
    for group in groups:
        kept.append([rollout for rollout in group if not rollout.failure])
        failed += [rollout for rollout in group if rollout.failure]
    return [group for group in kept if group], failed


class InTurn:
    """Where the rollouts of training come from when one process samples and learns in turn. The
    trainer hands over its weights (publish), asks for rollouts of its tasks (submit), and takes
    the groups (collect), which are sampled then. Its twin fast.workers.Workers samples in other
    processes while this one learns: the same tasks, seeds and limits, and so the same tokens."""

    restarts = 0  # of workers that died: there are none here

    def __init__(self, sampler, group, limits, compact=None):
        """sampler: with a model of its own, since publish() writes into it; group: rollouts per
        task; compact: see agent"""
        self.sampler = sampler
        self.group = group
        self.limits = limits
        self.compact = compact
        self.sandbox = Sandbox()

    def publish(self, version, weights):
        """Takes the weights {name: tensor} of this version. -> entries for the log: none, since
        nothing is sent"""
        self.sampler.model.load_state_dict(weights)
        self.sampler.version = version
        return {}

    def submit(self, tasks, numbers, seed):
        """-> what collect() takes. Nothing is sampled yet."""
        return tasks, numbers, seed

    def collect(self, submitted):
        """Samples what submit() returned. -> a group of rollouts per task"""
        tasks, numbers, seed = submitted
        return sample_groups(
            self.sampler, tasks, self.group, seed, self.limits, self.sandbox, self.compact, numbers
        )

    def close(self):
        pass


def staleness(groups, version):
    """Groups of rollouts -> for every sampled token (N,), by how many updates the policy that
    sampled it was older than `version`"""
    versions = [np.zeros(0, dtype=int)]
    for group in groups:
        for rollout in group:
            versions += [turn.versions for turn in rollout.turns if turn.role == "assistant"]
    return version - np.concatenate(versions)


def demonstrate(task, tokenizer, rng, limits, sloppy=1.0, compact=None):
    """The scripted expert plays through the same agent and tools -> Rollout. sloppy: how often it
    errs. With hints: feedback_distill.demonstrate_with_hints"""
    return play_moves(task, tokenizer, expert(task, rng, sloppy), limits, compact)


def play_moves(task, tokenizer, moves, limits, compact=None):
    """An expert's moves (a generator, as world.expert.expert is one) as an agent's turns ->
    Rollout"""
    play = agent(task, tokenizer, InMemoryWorkspace(task), limits, compact)
    try:
        asked = next(play)
        action = next(moves)
        while True:
            # 1) The expert writes what the agent asks for.
            body = tokenizer.write_action(action.text, action.calls, asked.number)
            asked = play.send((body, np.zeros(len(body), dtype=np.float32), 0))

            # 2) It sees what the tools answer. Where the agent asks for a summary, SUMMARIZE stands
            #    before the outputs, and after the summary the expert sees the same outputs again.
            if isinstance(asked, Work):
                asked.run()
                outputs = [call.output for call in asked.calls]
                asked = play.send(None)
                action = moves.send([SUMMARIZE] * asked.summary + outputs)
            else:
                action = moves.send(outputs)
    except StopIteration as end:
        # The agent has ended: with its final message, or because there is no more room.
        return end.value


# ---------------------------------------------------------------- objective


def advantages(rewards):
    """Rewards of one group (G,) -> advantages (G,): each reward minus the group's mean. What is
    left out of GRPO and its kin stands in experiments/objective.py."""
    rewards = np.asarray(rewards, dtype=np.float64)
    # Of equal rewards the mean may be rounded, and what it leaves would count as a gradient.
    if (rewards == rewards[0]).all():
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def predictable_tokens(segment):
    """(T,) 1 = the token before may be trained to predict this one, 0 = it may not: the policy
    itself would go on here, and this token is someone else's"""
    known = np.ones(len(segment))
    start = 0  # where the following turn begins
    for turn, following in zip(segment.turns, segment.turns[1:]):
        start += len(turn.tokens)
        if turn.open and following.role not in ("assistant", "recent"):
            known[start] = 0
    return known


def pack(segments, advantage, multiple=1):
    """Segments and one number each -> tensors (B, T), T a multiple of `multiple`. Of position t:
    tokens (-1 = padding); of the token t + 1, which it predicts: targets (its id), mask (1 = it was
    sampled), logprobs (at sampling), advantage (0 where it was not sampled), has_target (1 = there
    is one to learn). routes (B, T, L, K) or None.

    There is no target where the policy would go on by itself but the harness has put another turn
    (a query, a hint): the policy would learn to write that turn's first token itself."""
    T = -(-max(len(segment) for segment in segments) // multiple) * multiple

    # One row per segment, and behind its end padding, which is no token: the routers do not count
    # it as load.
    columns = {"tokens": [], "targets": [], "mask": [], "logprobs": [], "has_target": []}
    for segment in segments:
        tokens, mask, logprobs, _ = flatten(segment)
        padding = (0, T - len(tokens))
        columns["tokens"].append(np.pad(tokens, padding, constant_values=-1))

        # What is said of a token belongs to the position before it, which predicts it.
        of_targets = (tokens, mask, logprobs, predictable_tokens(segment))
        for name, row in zip(("targets", "mask", "logprobs", "has_target"), of_targets):
            columns[name].append(np.pad(row, padding)[1:])

    batch = {}
    for name, rows in columns.items():
        dtype = np.int64 if name in ("tokens", "targets") else np.float32
        column = torch.from_numpy(np.stack(rows).astype(dtype))
        batch[name] = F.pad(column, (0, T - column.shape[1]))  # (B, T)
    weights = torch.tensor(np.asarray(advantage), dtype=torch.float32)  # (B,)
    batch["advantage"] = batch["mask"] * weights[:, None]

    # Router replay. A segment without a record routes freely.
    batch["routes"] = None
    records = [segment.routes for segment in segments if segment.routes is not None]
    if records:
        _, L, K = records[0].shape
        routes = np.full((len(segments), T, L, K), -1, dtype=records[0].dtype)
        for row, segment in zip(routes, segments):
            if segment.routes is not None:
                row[: len(segment.routes)] = segment.routes
        batch["routes"] = torch.from_numpy(routes)  # (B, T, L, K)
    return batch


def policy_loss(logp, batch, normaliser, reference=None, beta=0.0):
    """This batch's part of -J. logp (B, T) with gradient; normaliser: Z times the number of
    rollouts of all ranks and micro-batches; reference (B, T): log-probs under the reference policy.

    There is no ratio and no clip: one update per batch. The gradient of A log pi is the policy
    gradient."""
    advantage = batch["advantage"]  # (B, T)
    # The k1 penalty is part of the reward, token by token, so it has no gradient of its own.
    if beta:
        k1 = logp.detach() - reference  # (B, T)
        advantage = advantage - beta * k1 * batch["mask"]
    return -(advantage * logp * batch["mask"]).sum() / normaliser


# ---------------------------------------------------------------- demo


def random_model(tokenizer, **sizes):
    """A model with random weights. Matrices that are zero in a new model become random, too: with
    a head of zeros all tokens would be equally likely."""
    torch.manual_seed(0)
    model = Model(ModelConfig(vocab=tokenizer.vocab, **sizes))
    for p in model.parameters():
        if p.ndim > 1 and not p.any():
            torch.nn.init.normal_(p, std=0.1)
    return model


def demo(effort):
    from command.checkpoints import load_model
    from command.transcripts import describe_rollout
    from demos.demo_figures import draw_kl_variances
    from demos.kl_estimates import kl_variances
    from demos.transcript_view import format_transcript

    # The policy of the default run (python -m command.assets), and a task that it has not seen
    torch.set_num_threads(1)
    model, extra = load_model(Path(__file__).parent / "assets" / "rl")
    tokenizer = Tokenizer(**extra["tokenizer"])
    task = ask_for(make_task(4, 3, "heldout"), effort)
    limits = Limits(extra["config"]["window"], 16)

    # A group of rollouts, judged by hidden tests, and the reward at this setting of effort
    sampler = Sampler(model.requires_grad_(False), tokenizer, limits.window, temperature=0.95)
    (group,) = sample_groups(sampler, [task], 6, 0, limits, Sandbox())
    weight = read_price_weights(extra["config"]["length_penalty"])[effort]
    price = Price(weight, budget=effort_budget(limits.window, extra["config"]["max_turns"]))
    for rollout in group:
        grade(rollout, price)

    # One of them with its masks: the best one
    best = max(group, key=lambda rollout: rollout.reward)
    for line in describe_rollout(best, tokenizer):
        print(format_transcript(line))
    print("\nAbove, what the policy wrote is bright: only that is trained on. The group:\n")
    print("          solved  effort  sampled tokens  reward  advantage")
    gains = advantages([rollout.reward for rollout in group])
    for number, (rollout, gain) in enumerate(zip(group, gains), 1):
        sampled = sum(flatten(segment)[1].sum() for segment in rollout.segments)
        solved, effort = "yes" if rollout.solved else "no", rollout.stats["effort"]
        row = f"{solved:>6} {effort:>7.1f} {sampled:>15} {rollout.reward:>7.2f} {gain:>+10.2f}"
        print(f"rollout {number} {row}")
    draw_kl_variances(*kl_variances(), "out/rollout.png")
    print("\nWhat the estimates of the KL penalty cost in variance: out/rollout.png")


def main(argv):
    from demos.transcript_view import replay_or_demonstrate

    replay_or_demonstrate(argv, demo, SETTINGS)


if __name__ == "__main__":
    main(sys.argv[1:])
