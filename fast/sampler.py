"""fast/sampler.py: many agents decode together in one batch.

The twin of rollout.Sampler, which plays one agent after the other and one token at a time. Both
take the same agents and seeds and yield the same tokens, since every agent draws with random
numbers of its own (tests/test_fast_sampler.py). Only rounding may differ: a sum over a batch can
round in another order than the sum over one sequence, and in bf16 a draw that lies at the edge of
two tokens then falls to the other one.

It gives 4.8 to 9.1 times the tokens/s of the plain form: 32 synthetic segments with tool calls, the
laptop's model in bf16, one core, a busy machine (four runs of benchmarks/decode.py's parts, whose
tools take a tenth of a second now and then). Three ideas make it fast:

- continuous batching: a row of the batch that ends makes room for the next agent at once, and tools
  run in threads while other rows decode;
- shared prefixes: the rollouts of a group start from the same prompt, which is fed once. Chunks of
  like length are fed together;
- speculative decoding (stated for Cursor's edits, cursor.com/blog/instant-apply, where the old file
  is the draft). Ours: the draft is what followed the same tokens the last time, in any row of the
  batch (n-grams, as in suffix decoding, arXiv 2411.04975). A draft decides how many tokens a step
  yields, never which: every place draws with the random number that is its own, drafted or not.

The model is whatever it is: a Cache with rows, Model.decode with rows and start, and Model.logits
are all that is asked of it, so an edit of the model acts here as in training.

Left out: paged attention and preemption. Each row owns a stretch of the cache as long as the
window.

Letters: rows of the batch are Python objects; tensors are (B rows, T tokens fed at once).
"""

import os
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import numpy as np
import torch

import moe
import rollout
from fast.cpu_kernels import round_up, slice_rows, to_device
from rollout import Request

# A draft is looked up by the last 8 tokens of a context; where they are not known, by the last 4
# or 2.
NGRAM_SIZES = 8, 4, 2
MAX_NGRAMS = 1 << 20  # some 200 MB; then the table is emptied
# The agents' turns are handled every so many steps, so that prefills come in batches.
STRIDE = 4
# To read so many cached entries again costs a row as much as one token more.
KEYS_PER_TOKEN = 64


class Row:
    """One agent in the batch. Of its tokens, context[:cached] are in the model's cache; the others
    wait to be fed."""

    def __init__(self, order, agent, seed, routes_shape):
        self.order = order  # the agent's number among those of Sampler.run
        self.agent = agent
        self.rng = np.random.default_rng(seed)
        self.uniforms = []  # drawn from rng, and not used yet
        self.context = []
        self.cached = 0
        self.indexed = 0  # context[:indexed] is in the sampler's n-gram table

        # The turn that is being sampled: its tokens, their log-probs, and the version of the
        # weights that each was sampled with.
        self.body = []
        self.logprobs = []
        self.versions = []
        self.room = 0  # sampled tokens at most

        # What the row does now: it samples a turn, or waits for a tool (a future), or has ended (a
        # rollout).
        self.sampling = False
        self.tool = None
        self.rollout = None

        # One array per segment, the experts of every token that was fed: (window + 1, L, K).
        self.routes = []
        self.routes_shape = routes_shape
        self.steps = 0  # decoding steps that sampled for this row

    def start_turn(self, request):
        """Takes the request of the row's agent: its tokens go behind the context, and a turn is to
        be sampled."""
        if request.restart:
            self.context, self.cached, self.indexed = [], 0, 0
            self.routes.append(np.full(self.routes_shape, -1, dtype=np.int16))
        self.context += request.tokens
        self.room = request.room
        self.body, self.logprobs, self.versions = [], [], []
        self.sampling = True

    def peek_uniforms(self, n):
        """The row's next n random numbers, one per sampled token. They are not used up yet: append
        does that, for as many as there were tokens."""
        # numpy gives the same numbers whether n are drawn at once or one by one, so drafts do not
        # change which number a token gets.
        missing = max(0, n - len(self.uniforms))
        self.uniforms += self.rng.random(missing).tolist()
        return self.uniforms[:n]

    def append(self, tokens, logprobs, version):
        """Takes the tokens that one step sampled, and uses up their random numbers."""
        self.steps += 1
        del self.uniforms[: len(tokens)]
        self.context += tokens
        self.body += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)


def stack_choices(record):
    """What Model.decode recorded, one (1, N, K) per MoE layer -> numpy (N, L, K). All layers in one
    copy from the GPU. A model without MoE layers has no record: None"""
    return torch.cat(record).cpu().numpy().swapaxes(0, 1) if record else None


def choose_width(lengths, longest, widths):
    """Chunks of these lengths are cut into pieces of one width, each a row of a forward: which of
    the widths costs least? longest: tokens of the longest context."""

    # A piece costs its tokens, padding included, and reads the entries of its row once more.
    def cost(width):
        pieces = sum(-(-length // width) for length in lengths)
        return pieces * (width + longest / KEYS_PER_TOKEN)

    return min(widths, key=cost)


class Sampler:
    """The twin of rollout.Sampler: many agents decode in one batch, whose rows change while it runs
    (continuous batching). One step then reads the weights once for all agents.

    rows: how many agents decode at once. window: tokens of a context at most. draft: how many
    tokens are proposed ahead at most, 0 for none."""

    most_rows = 128  # more take longer than they save

    def __init__(
        self,
        model,
        tokenizer,
        rows=96,
        window=512,
        temperature=1.0,
        draft=3,
    ):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.rows = min(rows, self.most_rows)
        self.window = window
        self.temperature = temperature
        self.draft = draft
        self.device = model.embed.weight.device
        self.pool = ThreadPoolExecutor(max(4, os.cpu_count() or 1))
        self.cache = None  # made by the first run
        self.ngram_table = {}  # the last tokens of a context -> the token that followed

        # How many updates the weights have seen. refresh() is called before every decoding step
        # and may load newer weights.
        self.version = 0
        self.refresh = lambda: None

        # for measurements
        self.steps = 0
        self.fed = 0  # tokens

    @torch.inference_mode()
    def run(self, agents, seeds, on_end=lambda played: None, patient=True):
        """-> the Rollouts of the agents, in order. seeds: one per agent, of its random numbers.
        on_end is called with each rollout that ends, to judge it, in one of the tools' threads.

        patient: between turns, all rows wait for the tools that are running. So it does not depend
        on the tools' speed which rows decode together, which decides how sums round: such a run can
        be repeated exactly. Not patient: a row waits for its own tool alone, which is right for
        tools that take longer than a few steps."""
        self.patient = patient
        self.ngram_table = {}
        if self.cache is None:
            self.cache = moe.Cache(self.model, self.rows, self.window + 2)

        # Agents that have not begun. They are taken from the end, the first agent first.
        queue = list(enumerate(zip(agents, seeds)))
        queue.reverse()
        rows = []
        done = {}  # order -> (rollout, the future of on_end)

        while queue or rows:
            # Between turns: agents go on, end and begin.
            rows = self.handle_turns(rows, queue, done, on_end)

            # Feed what is new in their contexts. The last token is left to the decoding step, which
            # samples behind it.
            unfed = [row for row in rows if row.sampling and len(row.context) - row.cached > 1]
            self.prefill(unfed, rows)

            for _ in range(STRIDE if rows else 0):
                self.refresh()
                self.step(rows)

        # An error of on_end is raised here.
        for _, ended in done.values():
            ended.result()
        return [done[i][0] for i in range(len(done))]

    # ------------------------------------------------------------ between two turns

    def handle_turns(self, rows, queue, done, on_end):
        """What happens between decoding steps: collect finished tools, let every agent that is due
        go on, retire the ended ones, admit new ones -> the rows"""
        # When all rows wait for tools, there is nothing to decode: wait for the first tool.
        if not self.patient:
            running = [row.tool for row in rows if row.tool and not row.tool.done()]
            if running and len(running) == len(rows):
                wait(running, return_when=FIRST_COMPLETED)

        # Every agent whose turn is sampled, or whose tool has answered, goes on.
        for row in self.due_rows(rows):
            if row.tool is not None:
                row.tool.result()  # waits, and raises what the tool raised
                row.tool = None
                self.advance(row, None)
            else:
                logprobs = np.array(row.logprobs, dtype=np.float32)
                self.advance(row, (row.body, logprobs, np.array(row.versions)))

        # An ended row leaves. The last row takes its place, in the cache too, so that the rows of
        # the cache that are in use stay the first ones.
        for i in reversed(range(len(rows))):
            if rows[i].rollout is not None:
                self.retire(rows[i], done, on_end)
                last = rows.pop()
                if i < len(rows):
                    self.cache.copy_rows([i], [len(rows)], last.cached)
                    rows[i] = last

        # New agents fill the room. One whose task does not fit the window ends at once.
        while queue and len(rows) < self.rows:
            order, (agent, seed) = queue.pop()
            row = Row(order, agent, seed, self.routes_shape())
            self.advance(row, None)
            if row.rollout is None:
                rows.append(row)
            else:
                self.retire(row, done, on_end)
        return rows

    def due_rows(self, rows):
        """Rows that neither sample nor wait for a tool. A patient sampler waits for every tool."""
        return [
            row
            for row in rows
            if not row.sampling and (self.patient or not row.tool or row.tool.done())
        ]

    def retire(self, row, done, on_end):
        """Keeps the rollout of a row that has ended, and has on_end judge it in a thread."""
        done[row.order] = row.rollout, self.pool.submit(on_end, row.rollout)

    def routes_shape(self):
        """(window + 1, L, K): room for the K experts that each token of a segment takes at each of
        the L MoE layers"""
        routers = [block.ffn.router for block in self.model.layers if hasattr(block.ffn, "router")]
        top_k = max([router.k for router in routers], default=0)
        return self.window + 1, len(routers), top_k

    def advance(self, row, message):
        """Sends `message` to the row's agent, which then asks for a turn or for tools, or ends.
        message: the turn that was sampled (tokens, log-probs, versions), or None."""
        try:
            request = row.agent.send(message)
        except StopIteration as end:
            # The agent has ended. Training replays the experts that its tokens took.
            row.rollout, row.sampling = end.value, False
            row.rollout.steps = row.steps
            for segment, routes in zip(row.rollout.segments, row.routes):
                segment.routes = routes[: len(segment)]
            return

        # Slow tools run in a thread and are collected between later turns. Fast ones run here, and
        # the agent goes on at once.
        if isinstance(request, Request):
            row.start_turn(request)
        elif request.slow:
            row.tool = self.pool.submit(request.run)
        else:
            request.run()
            self.advance(row, None)

    # ------------------------------------------------------------ the model

    def prefill(self, waiting, rows):
        """Feed all tokens of each waiting row that are not cached, but for its last one. Rows that
        start from the same prompt are fed once. rows: all rows, in the order of their places in the
        cache."""
        # Rows with an empty cache and the same context make a group.
        place = {id(row): i for i, row in enumerate(rows)}  # in the cache
        groups = {}
        for row in waiting:
            key = tuple(row.context[:-1]) if row.cached == 0 else id(row)
            groups.setdefault(key, []).append(row)

        # One row of each group is fed, at most 32 at once so that attention's scores stay small.
        firsts = [group[0] for group in groups.values()]
        for batch in slice_rows(len(firsts), 32):
            self.feed(firsts[batch], [place[id(row)] for row in firsts[batch]])

        # The others of a group copy the entries, and the record of experts.
        for first, *others in groups.values():
            if others:
                targets = [place[id(row)] for row in others]
                self.cache.copy_rows(targets, [place[id(first)]] * len(others), first.cached)
            for row in others:
                row.cached = first.cached
                row.routes[-1][:] = first.routes[-1]

    def feed(self, batch, places):
        """Feeds each row of a batch all tokens that are not cached, but for its last one, in one
        forward. places: of these rows in the cache.

        Padding every chunk to the longest would cost more than the chunks. So they are cut into
        pieces of one width. In every layer all pieces store their entries before any of them looks:
        a piece sees those before it as if they had been fed earlier."""
        longest = max(len(row.context) for row in batch)
        lengths = [len(row.context) - 1 - row.cached for row in batch]
        width = choose_width(lengths, longest, self.piece_widths(max(lengths)))
        owners, rows, start, tokens = [], [], [], []
        for row, place in zip(batch, places):
            for first in range(row.cached, len(row.context) - 1, width):
                owners.append(row)
                rows.append(place)
                start.append(first)
                tokens.append(row.context[first : min(first + width, len(row.context) - 1)])

        # Only the last piece of a chunk is padded, behind the row's last token.
        lengths = [len(piece) for piece in tokens]
        padded = [piece + [0] * (width - len(piece)) for piece in tokens]
        chosen = self.read_pieces(padded, rows, start)
        self.fed += sum(lengths)
        self.record_routes(owners, chosen, lengths, width)

    def piece_widths(self, longest):
        """The widths that a chunk of up to `longest` tokens may be cut by"""
        return range(4, round_up(longest, 4) + 1, 4)

    def read_pieces(self, tokens, rows, start):
        """One forward over pieces of contexts: lists of tokens (N, width), and for each piece its
        row of the cache and its first position -> the experts of all tokens (N * width, L, K)"""
        record = []
        self.model.decode(to_device(tokens, self.device), self.cache, rows, start, record)
        return stack_choices(record)

    def record_routes(self, batch, chosen, lengths, width):
        """Note which experts every fed token took, and that these tokens are cached now.

        chosen: (N, L, K), the tokens of one row of `batch` behind the other's, or None. lengths:
        how many tokens of each row are kept. width: how many were fed of each row."""
        # What a wrong draft left behind the kept tokens is overwritten by the next step.
        first = 0
        for row, n in zip(batch, lengths):
            if chosen is not None:
                row.routes[-1][row.cached : row.cached + n] = chosen[first : first + n]
            row.cached += n
            first += width

    def propose_ngram_draft(self, row):
        """A draft of a row's next tokens. It finds the longest known n-gram that the context ends
        in, and proposes what followed the last time, in any row. Rollouts of the same task write
        much the same, and code repeats itself."""
        # Enter what is new in this context into the table.
        if len(self.ngram_table) > MAX_NGRAMS:
            self.ngram_table.clear()
        context = row.context
        for end in range(row.indexed, len(context)):
            for n in NGRAM_SIZES:
                if n <= end:
                    self.ngram_table[tuple(context[end - n : end])] = context[end]
        row.indexed = len(context)

        # Look up one token after the other, each behind the draft so far. The step itself samples
        # one token more than the draft has, so the draft leaves room for it; and it stops before a
        # token that ends the turn.
        draft = []
        while len(draft) < min(self.draft, row.room - len(row.body) - 1):
            token = self.look_up_next(context[-max(NGRAM_SIZES) :] + draft)
            if token is None or token in self.tokenizer.ends:
                break
            draft.append(token)
        return draft

    def look_up_next(self, tokens):
        """The token that last followed the longest known n-gram that `tokens` end in, or None"""
        for n in NGRAM_SIZES:
            token = self.ngram_table.get(tuple(tokens[-n:]))
            if token is not None:
                return token
        return None

    def partition_active_rows(self, rows):
        """Puts the rows that are sampling before the others, in `rows` and in the cache -> how many
        they are. A step then reads a slice of the cache, which needs no copy."""
        # Idle rows among the first `active` places change with sampling rows behind them: there are
        # as many of the one as of the other.
        active = sum(row.sampling for row in rows)
        idle_places = [i for i in range(active) if not rows[i].sampling]
        late_places = [i for i in range(active, len(rows)) if rows[i].sampling]
        for i, j in zip(idle_places, late_places):
            rows[i], rows[j] = rows[j], rows[i]

        # Their entries change places too, as far as any row has entries.
        if idle_places:
            used = max(row.cached for row in rows)
            self.cache.copy_rows(idle_places + late_places, late_places + idle_places, used)
        return active

    def padded_batch_size(self, active):
        """How many rows are fed when `active` ones are sampling: a multiple of 8, so that few
        different shapes come up. Fewer than 8 rows are fed alone."""
        return active + -active % min(active, 8)

    def step(self, rows):
        """One step of speculative decoding. Every row that is sampling is fed its last token and a
        draft of the next ones, and a token is drawn behind each of them. While the draft agrees
        with what was drawn, the next draw is valid too. So drafts change the number of steps and
        nothing else (but how bf16 rounds)."""
        active = self.partition_active_rows(rows)
        if not active:
            return

        # 1) Drafts. A wider step pays only where the rows have a drafted token each, on average.
        drafts = [self.propose_ngram_draft(row) for row in rows[:active]]
        speculative = sum(map(len, drafts)) >= active
        if not speculative:
            drafts = [[]] * active
        width = 1 + self.draft if speculative else 1

        # 2) One forward pass over all rows, and a draw behind every token that was fed. The random
        # numbers are the rows' own, one for each place.
        batch_size = min(self.padded_batch_size(active), self.rows)
        fed, position = self.batch_to_feed(rows, drafts, batch_size, width)
        uniforms = [row.peek_uniforms(1 + len(draft)) for row, draft in zip(rows, drafts)]
        drawn_tokens, logprobs, chosen = self.decode_and_draw(fed, position, uniforms)
        self.steps += 1
        self.fed += batch_size * width

        # 3) A draw is accepted if all of the draft before it was drawn too; the first one always
        # is.
        lengths, first = [], 0
        for row, draft in zip(rows, drafts):
            n = 1
            while n <= len(draft) and drawn_tokens[first + n - 1] == draft[n - 1]:
                n += 1
            accepted = drawn_tokens[first : first + n]
            row.append(accepted, logprobs[first : first + n], self.version)

            # The turn ends by a token that says so, or where its room is used up.
            ended = accepted[-1] in self.tokenizer.ends
            row.sampling = not ended and len(row.body) < row.room
            lengths.append(n)
            first += 1 + len(draft)
        self.record_routes(rows[:active], chosen, lengths, width)

    def batch_to_feed(self, rows, drafts, batch_size, width):
        """-> lists: tokens (batch size, width), padded by zeros at the end, and from which position
        on each row is fed. A row that is not sampling, and only fills up the batch, feeds its last
        cached token again: this stores the same entry, or under newer weights the entry that they
        make."""
        # Each row with its draft; rows beyond the sampling ones have none.
        tokens, position = [], []
        for i in range(batch_size):
            if i < len(rows):
                row = rows[i]
                draft = drafts[i] if i < len(drafts) else []
                start = row.cached if row.sampling else row.cached - 1
                fed = [row.context[start], *draft]
            else:
                start, fed = 0, [0]  # no agent has this row of the cache

            tokens.append(fed + [0] * (width - len(fed)))
            position.append(start)
        return tokens, position

    def decode_and_draw(self, tokens, position, uniforms):
        """One forward over the first rows of the cache: lists of the tokens (B, width) and of where
        each row's begin. uniforms: for each row that samples the random numbers of its first
        places. -> two lists, drawn tokens and their log-probs at these places, the rows one behind
        the other; and the experts of all tokens (B * width, L, K)"""
        record, batch = [], slice(0, len(tokens))
        fed = to_device(tokens, self.device)
        hidden = self.model.decode(fed, self.cache, batch, position, record)  # (B, width, D)

        # One product with the head for all places without padding: N of them, logits (N, V).
        places = [(i, j) for i, numbers in enumerate(uniforms) for j in range(len(numbers))]
        row_index, column = to_device(places, self.device).T
        logits = self.model.logits(hidden[row_index, column])
        numbers = to_device([number for row in uniforms for number in row], self.device)
        drawn = rollout.sample_from_logits(logits, numbers, self.temperature)

        # Both in one copy from the GPU: fp64 holds a token's number and an fp32 log-prob exactly.
        drawn_tokens, logprobs = torch.stack([t.double() for t in drawn]).tolist()
        return [int(token) for token in drawn_tokens], logprobs, stack_choices(record)
