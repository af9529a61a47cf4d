"""fast/decode.py: decoding from the cache of latents, sooner.

The plain form is moe.Model.decode: every layer rebuilds keys and values of all cached tokens from
their latents, for every new token again. The twins here give the same hidden states up to the order
of sums (tests/test_moe.py, tests/test_fast_decode.py) and keep the plain parameters, so a state
dict fits both.

    absorbed attention     q^T (W_kb c) = (W_kb^T q)^T c: absorb W_kb into the query, and attention
                           runs on the latents themselves, which all heads share
    fused weights          matrices that a step multiplies by the same numbers lie side by side in
                           memory, so that one product does for several
    all experts at once    a step's few tokens touch nearly every expert: one wide network, with
                           those not chosen gated to zero, costs less than sorting the rows
    prefill of chunks      chunks of any lengths stand one behind the other; only attention pads,
                           among chunks of about a length

For 64 rows behind 300 tokens a step gives 1.9 times the tokens/s of the plain form (the laptop's
model, bf16, a CPU core, `python -m benchmarks.train_step`, a busy machine).

A Model that trains has the same twins; without a cache they only fuse what RoPE turns.

Left out: a paged cache, and one in fewer bits.

Letters: as in moe.py; S cache rows' length, N tokens that stand one behind the other, Q query
width.
"""

from itertools import accumulate

import torch
import torch.nn.functional as F

from fast.cpu_kernels import (
    EmbedTokens,
    FastMoE,
    TargetLogprobs,
    attend_in_blocks,
    round_up,
    to_device,
)
from moe import Attention, Block, Model, MoE, apply_rotary_emb, linear
from published.grouped_query import GroupedQueryAttention, VariantModel

# ---------------------------------------------------------------- experts


class DecodingMoE(FastMoE):
    """The twin of moe.MoE for decoding. For a few tokens it runs all experts as one wide network,
    where the plain form sorts the rows by expert: see all_experts."""

    fused_weights = None  # see fuse_weights

    def forward(self, x, replay=None, record=None, real=None, decoding=False):
        """As FastMoE.forward. decoding: may all experts run? See fit, and DecodingBlock."""
        if not decoding:
            return super().forward(x, replay, record, real)
        tokens, choice, gates = self.route(x, replay, record)
        return self.all_experts(tokens, choice, gates).unflatten(0, x.shape[:2])

    def dense_max_tokens(self, x):
        """Up to how many tokens the work of all experts is worth it. 0: never, with more than 16
        experts, or in low precision, which the wide network does not have. fp32 products cost more
        on a CPU, so there it is an eighth."""
        experts = len(self.router.bias)
        if experts > 16 or self.experts.precision:
            return 0
        most = 2048 // experts
        return most // 8 if x.device.type == "cpu" and x.dtype == torch.float32 else most

    def fit(self, x):
        """Are the tokens of x (B, T, D) few enough for all_experts?"""
        return x.shape[:2].numel() <= self.dense_max_tokens(x)

    def wide_weights(self):
        """All E experts, with the S shared ones behind them, as one network: gate and up in one
        matrix (2 (E + S) F, D), down (D, (E + S) F)."""
        experts, shared = self.experts, self.shared
        fused = self.fused_weights

        # After fuse_weights the parameters lie in these matrices. A copy of the model may have got
        # parameters of its own: then they lie elsewhere, and the matrices are not its own.
        if fused is not None and fused[0].data_ptr() == experts.w_gate.data_ptr():
            return fused

        # Not fused: the matrices are put together anew, all gates first and then all ups.
        up = []
        for name in ("w_gate", "w_up"):
            up.append(getattr(experts, name).flatten(0, 1))  # (E F, D)
            if shared is not None:
                up.append(getattr(shared, name))
        down = [experts.w_down.transpose(0, 1).flatten(1)]  # (D, E F)
        if shared is not None:
            down.append(shared.w_down)
        return torch.cat(up), torch.cat(down, 1)

    def fuse_weights(self):
        """The parameters become views of the wide network's matrices: one memory for both, and what
        is loaded into a parameter reaches the network."""
        up, down = self.fused_weights = self.wide_weights()
        (E, F_, _), n = self.experts.w_gate.shape, self.experts.w_gate.shape[:2].numel()

        # The first half of `up` holds the gates. In each half the first n = E F rows are the
        # experts', the others the shared ones'.
        for name, rows in zip(("w_gate", "w_up"), up.chunk(2)):
            getattr(self.experts, name).data = rows[:n].unflatten(0, (E, F_))  # (E, F, D)
            if self.shared is not None:
                getattr(self.shared, name).data = rows[n:]  # (S F, D)

        # `down` has them along its columns.
        self.experts.w_down.data = down[:, :n].unflatten(1, (E, F_)).transpose(0, 1)  # (E, D, F)
        if self.shared is not None:
            self.shared.w_down.data = down[:, n:]  # (D, S F)

    def all_experts(self, x, choice, gates):
        """All experts as one wide network: x (M, D), choice and gates (M, K) -> (M, D). Each expert
        is a stretch of the hidden units, gated to zero for tokens that did not choose it.

        A decoding step, or a short prefill, reads nearly every expert's weights for its few tokens:
        then this costs less than sorting the rows. Weights stand on the left of both products,
        where a CPU reads them as they lie, at twice the rate."""
        up, down = (w.to(x.dtype) for w in self.wide_weights())
        E, F_ = self.experts.w_gate.shape[:2]

        # A gate for each expert and token (E + S, M): 0 where it is not chosen, 1 for shared ones.
        gate = gates.new_zeros(down.shape[1] // F_, len(x)).scatter_(0, choice.T, gates.T)
        gate[E:] = 1

        # The gate multiplies the hidden units, since `down` sums over all experts at once.
        g, u = (up @ x.T).chunk(2)  # ((E + S) F, M) each
        hidden = F.silu(g).mul_(u).view(len(gate), F_, -1)  # (E + S, F, M)
        hidden = hidden.mul_(gate.to(x.dtype)[:, None])
        return (down @ hidden.flatten(0, 1)).T  # (M, D)


# ---------------------------------------------------------------- attention


class DecodingAttention(Attention):
    """The twin of moe.Attention. When it decodes, it attends to the cached latents themselves
    (attend_stored), where the plain form rebuilds keys and values of all cached tokens. One product
    does for all weights that multiply the input, once they are fused.

    cache: a function that stores the entries and runs attention on what is stored, for which it
    takes queries, entries and attend_stored: see attend_cached."""

    fused_weight = None  # see fuse_weights
    # Scores may be rounded to the compute dtype, see attend_in_blocks.
    coarse = True

    @property
    def lined_up(self):
        """How many heads attend_stored lines up along the query axis: a mask for it has that many
        times T rows"""
        return self.config.heads

    def input_weights(self):
        """The weights that multiply a layer's input x: (R, D) each, or (H, R, D) of a stack"""
        return [self.wq_a if self.config.q_lora else self.wq, self.wkv_a]

    def fuse_weights(self):
        """The input weights become views of one matrix, so that one product does for all."""
        weights = self.input_weights()
        self.fused_weight = torch.cat([w.flatten(0, -2) for w in weights])
        rows = [w.shape[:-1].numel() for w in weights]
        for w, part in zip(weights, self.fused_weight.split(rows)):
            w.data = part.view(w.shape)

    def input_projections(self, x):
        """x (B, T, D) -> its product with each of the input weights: (B, T, R), or (B, T, H, R)
        for a stack"""
        weights, fused = self.input_weights(), self.fused_weight

        # Not fused, or this is a copy of a fused model that got weights of its own: then they do
        # not lie in the fused matrix.
        if fused is None or fused.data_ptr() != weights[0].data_ptr():
            return [linear(x, w) for w in weights]

        # One product, cut at the rows of each weight.
        rows = [w.shape[:-1].numel() for w in weights]
        parts = F.linear(x, fused.to(x.dtype)).split(rows, -1)
        return [
            part if w.ndim == 2 else part.unflatten(-1, w.shape[:-1])
            for part, w in zip(parts, weights)
        ]

    def project_qkv(self, x, cos, sin):
        """As Attention.project_qkv: x (B, T, D) -> queries (B, T, H, N + R), entries (B, T, C + R).
        RoPE turns the heads' queries and the shared key in one call."""
        c = self.config

        # One product for the queries (or the narrow vector that they come from), the latent and the
        # rotary key.
        q, down = self.input_projections(x)
        if c.q_lora:
            q = linear(self.q_norm(q), self.wq)  # (B, T, H, N + R)
        latent, k = down[..., : c.kv_lora], down[:, :, None, c.kv_lora :]  # k (B, T, 1, R)

        # The key stands behind the queries as one more head: (B, T, H + 1, R).
        turned = apply_rotary_emb(torch.cat((q[..., c.qk_nope :], k), 2), cos, sin)
        q = torch.cat((q[..., : c.qk_nope], turned[:, :, : c.heads]), -1)
        latent = self.kv_norm(latent).to(x.dtype)  # (B, T, C)
        return q, torch.cat((latent, turned[:, :, c.heads]), -1)

    def forward(self, x, cos, sin, mask=None, cache=None):
        """As Attention.forward, x (B, T, D) -> (B, T, D), but for `cache`, see the class."""
        q, entries = self.project_qkv(x, cos, sin)
        q = q.transpose(1, 2)  # (B, H, T, N + R)
        if cache is None:
            out = self.attend_entries(q, self.gather_entries(entries), mask)
        else:
            out = cache(q, entries, self.attend_stored)
        return linear(out.transpose(1, 2).flatten(2), self.wo)

    def attend_entries(self, q, entries, mask):
        """Attention of q (B, H, T, N + R) over keys and values that are rebuilt from entries (B, S,
        width) -> (B, H, T, V)"""
        k, v = (t.transpose(1, 2) for t in self.keys_values(entries))  # (B, H, S, N + R or V)
        return attend_in_blocks(q, k, v, mask, self.scale * self.head_dim**-0.5, self.coarse)

    def attend_stored(self, q, entries, mask):
        """Absorbed attention: q (B, H, T, N + R) attends to the cached entries (B, S, C + R), and
        no key or value is rebuilt -> (B, H, T, V). All heads read the same entries, so the heads
        line up along the query axis of one wide head: mask (B, 1, H * T, S). The entries are keys
        and values at once; of the values the rotary part is dropped."""
        c, (B, H, T, _) = self.config, q.shape

        # Per head, a query and a key cost 2 (C + R) multiply-adds here. With rebuilt keys and
        # values they cost N + R + V, and rebuilding costs C (N + V) per key: cheaper for many
        # tokens at once, as of a prompt. With many more keys than tokens it would take much memory,
        # so it is not done then. The mask's rows are the same for every head: the first T will do.
        extra = 2 * c.kv_lora + c.qk_rope - c.qk_nope - c.v_dim
        if T * extra > c.kv_lora * (c.qk_nope + c.v_dim) and 8 * T > entries.shape[1]:
            return self.attend_entries(q, entries, mask[:, :, :T])

        def by_head(x, w):  # (B, H, T, R) times a matrix per head (H, R, R')
            rows = x.transpose(0, 1).flatten(1, 2)  # (H, B * T, R)
            products = torch.bmm(rows, w.to(x.dtype))
            return products.view(H, B, T, -1).transpose(0, 1)

        # W_kb goes into the query: q^T (W_kb c) = (W_kb^T q)^T c.
        q_nope, q_rope = q[..., : c.qk_nope], q[..., c.qk_nope :]
        q = torch.cat((by_head(q_nope, self.wk_b), q_rope), -1)  # (B, H, T, C + R)

        # One wide head, whose keys and values are the entries.
        q, entries = q.view(B, 1, H * T, -1), entries[:, None]  # (B, 1, S, C + R)
        o = attend_in_blocks(q, entries, entries, mask, self.scale * self.head_dim**-0.5)

        # A weighted sum of latents, through W_vb, is the weighted sum of values.
        latents = o.view(B, H, T, -1)[..., : c.kv_lora]  # (B, H, T, C)
        return by_head(latents, self.wv_b.transpose(1, 2))


class DecodingGroupedQueryAttention(DecodingAttention, GroupedQueryAttention):
    """The twin of GroupedQueryAttention: fused input weights, and one call of RoPE for queries and
    keys. Its cache holds keys and values themselves, so there is nothing to absorb."""

    lined_up = 1

    @property
    def coarse(self):
        # The biases of Qwen2's keys take its scores to hundreds, where bf16 numbers are 1 or more
        # apart.
        return not self.config.qkv_bias

    def input_weights(self):
        return [self.wq_a if self.config.q_lora else self.wq, self.wk, self.wv]

    def project_qkv(self, x, cos, sin):
        """As GroupedQueryAttention.project_qkv, with one call of RoPE -> queries (B, T, H, N + R),
        entries (B, T, G (N + R + V))"""
        c = self.config
        q, k, v = self.input_projections(x)  # (B, T, H or G, dims)
        if c.q_lora:
            q = linear(self.q_norm(q), self.wq)
        q = self.add_bias_and_norm(q, "q")
        k = self.add_bias_and_norm(k, "k")
        v = self.add_bias_and_norm(v, "v")

        # The keys' heads stand behind the queries': (B, T, H + G, R).
        both = torch.cat((q[..., c.qk_nope :], k[..., -c.qk_rope :]), 2)
        turned = apply_rotary_emb(both, cos, sin)
        q = torch.cat((q[..., : c.qk_nope], turned[:, :, : c.heads]), -1)

        # An entry holds for each key head: the key's part without position, its turned part, the
        # value.
        entries = torch.cat((k[..., : c.qk_nope], turned[:, :, c.heads :], v), -1)
        return q, entries.flatten(2)

    def attend_stored(self, q, entries, mask):
        return self.attend_entries(q, entries, mask)


class DecodingBlock(Block):
    """The twin of moe.Block: it tells the mixture of experts whether this is a decoding step of few
    tokens."""

    def forward(self, x, cos, sin, mask=None, cache=None, replay=None, record=None, real=None):
        x = x + self.attn(self.attn_norm(x), cos, sin, mask, cache)
        h = self.ffn_norm(x)
        if not isinstance(self.ffn, MoE):
            return x + self.ffn(h)
        decoding = cache is not None and self.ffn.fit(h)
        return x + self.ffn(h, replay, record, real, decoding)


# ---------------------------------------------------------------- the cache


def cache_mask(cache, position, last, heads):
    """The mask of tokens at `position` (B, T), of which `last` is the largest: 0 where a token may
    look, -inf elsewhere, (B, 1, heads * T, S). S is `last` + 1, rounded up. heads: how many heads
    line up along the query axis; each has the same rows."""
    # Few different S, see round_up, but no more than the cache has.
    upto = min(cache.data.shape[2], round_up(last + 1))
    later = torch.arange(upto, device=position.device) > position[..., None]  # (B, T, S)

    # As numbers in the compute dtype, once for all layers: see attend_in_blocks.
    later = torch.zeros(later.shape, dtype=cache.data.dtype, device=position.device).masked_fill_(
        later, -torch.inf
    )
    return later.repeat(1, heads, 1)[:, None]


def attend_cached(cache, layer, row, position, spans, order=None):
    """-> the function that a layer's attention takes as its cache. The function stores the entries
    (1, N, width) of the N tokens that are fed, and gives what their queries (1, H, N, Q) see of all
    that is cached: (1, H, N, V).

    row, position: where each token stands in the cache, of any shapes that broadcast to N numbers.
    spans: [(rows, index, mask)], each of b sequences that are continued by t tokens each. index (b,
    t) says which of the N tokens these are; None: all, in order. order (N,): where each token's
    result stands among the results of all spans, one span behind the other; None: there is one
    span, in order."""

    def seen(q, entries, attend_stored):
        # Store first: a token also looks at itself.
        data, q = cache.data[layer], q[0].transpose(0, 1)  # (N, H, Q)
        data[row, position] = entries.view(*position.shape, -1)

        # Attention pads within a span alone: its sequences are continued by equally many tokens.
        found = []
        for rows, index, mask in spans:
            # (b, t, H, Q)
            part = q.unflatten(0, (len(mask), -1)) if index is None else q[index]
            stored = data[rows, : mask.shape[-1]]  # (b, S, width)
            out = attend_stored(part.transpose(1, 2), stored, mask)  # (b, H, t, V)
            found.append(out.transpose(1, 2).flatten(0, 1))  # (b * t, H, V)

        # Back to the order in which the tokens were fed. Padding has no place in `order`.
        o = found[0] if order is None else torch.cat(found)[order]  # (N, H, V)
        return o.transpose(0, 1)[None]

    return seen


# ---------------------------------------------------------------- the model


class DecodingModel(Model):
    """The twin of moe.Model. It decodes without rebuilding keys and values of what is cached, feeds
    chunks of different lengths at once (prefill), and its log-probs need no (B, T, V) scores."""

    def fuse_weights(self):
        """For a model that only samples: moves weights that a decoding step multiplies by the same
        numbers side by side in memory, so that one product does for several. They remain the same
        parameters, and loading a state dict still fills them."""
        for module in self.modules():
            if isinstance(module, (DecodingAttention, DecodingMoE)):
                module.fuse_weights()
        return self.requires_grad_(False)

    def embed_tokens(self, tokens):
        # A table in fp32 needs no copy, so there the plain form is as good.
        if self.embed.weight.dtype.itemsize < 4:
            return EmbedTokens.apply(tokens, self.embed.weight)
        return self.embed(tokens).float()

    def mark_real(self, tokens):
        """tokens (B, T), -1 = padding -> what FastMoE.forward takes as `real` (M*K,), made once for
        all layers"""
        real = (tokens >= 0).float().view(-1, 1)  # (M, 1)
        return real.expand(-1, self.config.num_experts_per_tok).flatten()

    def continue_cached(self, tokens, cache, row, position, spans, order=None, record=None):
        """All layers for N tokens (of any shape) that continue cached sequences -> hidden (N, D).
        The rest as for attend_cached. The N tokens are one row of a batch of 1: only attention
        knows which sequence a token belongs to."""
        x = self.embed(tokens.reshape(1, -1)).float()  # (1, N, D)
        cos, sin = self.rotary_cos_sin(position.reshape(1, -1))
        for layer, block in enumerate(self.layers):
            stored = attend_cached(cache, layer, row, position, spans, order)
            x = block(x, cos, sin, None, stored, None, record)
        return x[0]

    def decode(self, tokens, cache, rows, start, record=None):
        """As Model.decode: tokens (B, T) -> hidden (B, T, D)"""
        row, position, spans = self.locate_span(tokens.shape[1], cache, rows, start)
        hidden = self.continue_cached(tokens, cache, row, position, spans, None, record)
        return hidden.view(*tokens.shape, -1)

    def locate_span(self, length, cache, rows, start):
        """Where `length` tokens of each of B sequences stand, from start (B,) on -> rows (B, 1),
        positions (B, T), and the one span that they make (see attend_cached). start: a list is
        better than a tensor, for which Python has to wait if it is on a GPU."""
        room, device = cache.data.shape[2], cache.data.device
        start = start.tolist() if torch.is_tensor(start) else start
        assert max(start) < room, f"position {max(start)} in a cache of {room} tokens"

        # Only padding reaches beyond the last place, and is written there.
        # (B, T)
        position = to_device(start, device)[:, None] + torch.arange(length, device=device)
        position = position.clamp(max=room - 1)

        # The last position is known from `start`, so the GPU need not be asked for it.
        row = torch.arange(cache.data.shape[1], device=device)[rows]
        last = min(max(start) + length, room) - 1
        mask = cache_mask(cache, position, last, self.layers[0].attn.lined_up)
        return row[:, None], position, [(rows, None, mask)]

    def prefill(self, chunks, cache, rows, start, record=None):
        """Feed several chunks at once. Chunk i, a list of tokens of any length, continues the
        cached sequence rows[i] from start[i] on. Nothing is returned: only the cache is filled.

        The tokens of all chunks stand one behind the other, without padding. Attention alone pads,
        among chunks of about the same length, by repeating a chunk's last token. record: as in
        decode, one (1, N, K) per MoE layer, of the tokens of all chunks and some more behind."""
        device, lengths = cache.data.device, [len(chunk) for chunk in chunks]
        heads = self.layers[0].attn.lined_up

        # All tokens, one chunk behind the other. The very last one is repeated up to a multiple of
        # 32, so that few different shapes come up (see round_up). Its entry is stored at the same
        # place again.
        ends, more = list(accumulate(lengths)), -sum(lengths) % 32
        where = [(row, first + j) for row, first, n in zip(rows, start, lengths) for j in range(n)]
        row, position = to_device(where + where[-1:] * more, device).T  # (N,) each
        tokens = [token for chunk in chunks for token in chunk] + chunks[-1][-1:] * more
        tokens = to_device(tokens, device)  # (N,)

        # Chunks whose lengths round up to the same multiple of 16 are one span: attention takes
        # them together. `order` notes where each token's result will stand.
        spans, order, at = [], [0] * ends[-1], 0
        for width in sorted({round_up(n, 16) for n in lengths}):
            members = [i for i, n in enumerate(lengths) if round_up(n, 16) == width]

            # The places of each chunk's tokens among all that are fed; its last one fills up.
            index = []
            for i in members:
                begin, last_place = ends[i] - lengths[i], lengths[i] - 1
                index.append([begin + min(j, last_place) for j in range(width)])
            index = to_device(index, device)  # (b, width)

            # The span's mask reaches as far as the longest of its sequences.
            last = max(start[i] + lengths[i] for i in members) - 1
            mask = cache_mask(cache, position[index], last, heads)
            spans.append((to_device([rows[i] for i in members], device), index, mask))

            # In the span's results each chunk has `width` places, of which the first are its own.
            for i in members:
                order[ends[i] - lengths[i] : ends[i]] = range(at, at + lengths[i])
                at += width

        order = to_device(order + order[-1:] * more, device)  # (N,)
        self.continue_cached(tokens, cache, row, position, spans, order, record)

    def run_mtp(self, hidden, embedded, following, cache, rows, start):
        """As Model.run_mtp: hidden and embedded (B, T, D) -> (B, T, D)"""
        if cache is None:
            return super().run_mtp(hidden, embedded, following, cache, rows, start)

        # The head is one more layer of the cache, behind the others.
        row, position, spans = self.locate_span(following.shape[1], cache, rows, start)
        stored = attend_cached(cache, len(self.layers), row, position, spans)

        # Its tokens, too, are one row of a batch of 1: (1, B * T, D).
        one_row = hidden.flatten(0, 1)[None], embedded.flatten(0, 1)[None]
        x = self.mtp(*one_row, *self.rotary_cos_sin(position.reshape(1, -1)), None, stored)
        return x.view(hidden.shape)

    def logprobs(self, hidden, targets, temperature=1.0, where=None):
        """As Model.logprobs, without scores of (B, T, vocab): log-probs of the targets (B, T), in
        fp32, from hidden (B, T, D). where (B, T): compute these only, 0 elsewhere."""
        # Selecting by a mask makes Python wait for a GPU to count the rows, so it is left out where
        # all are wanted.
        h = hidden.flatten(0, 1) if where is None else hidden[where]  # (N, D)
        t = targets.flatten() if where is None else targets[where]  # (N,)

        # Few different numbers of rows, see round_up. Rows of zeros fill up and are cut off again.
        fill = round_up(len(t)) - len(t)
        h = F.pad(self.norm(h), (0, 0, 0, fill))
        found = TargetLogprobs.apply(h, self.head.weight, F.pad(t, (0, fill)), temperature)
        found = found[: len(t)]  # (N,)

        if where is None:
            return found.view(targets.shape)
        return torch.zeros(targets.shape, device=found.device).masked_scatter(where, found)


class DecodingVariantModel(DecodingModel, VariantModel):
    """The twin of published.grouped_query.VariantModel"""

    pass
