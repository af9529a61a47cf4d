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
    fused_weights = None  # see fuse_weights

    def forward(self, x, replay=None, record=None, real=None, decoding=False):
        if not decoding:
            return super().forward(x, replay, record, real)
        tokens, choice, gates = self.route(x, replay, record)
        return self.all_experts(tokens, choice, gates).unflatten(0, x.shape[:2])

    def dense_max_tokens(self, x):
        """At most so many tokens are worth the work of all experts. fp32 products weigh more on a
        CPU, so there an eighth as many."""
        experts = len(self.router.bias)
        if experts > 16 or self.experts.precision:
            return 0
        most = 2048 // experts
        return most // 8 if x.device.type == "cpu" and x.dtype == torch.float32 else most

    def fit(self, x):
        """Are the tokens of x (B, T, D) few enough for all_experts?"""
        return x.shape[:2].numel() <= self.dense_max_tokens(x)

    def wide_weights(self):
        """All experts, the shared ones behind the others, as one network: gate and up (2 (E + S) F,
        D), down (D, (E + S) F)."""
        experts, shared = self.experts, self.shared
        fused = self.fused_weights
        # They are no longer ours where a copy of the model got weights of its own.
        if fused is not None and fused[0].data_ptr() == experts.w_gate.data_ptr():
            return fused
        up = []
        for name in ("w_gate", "w_up"):
            up.append(getattr(experts, name).flatten(0, 1))
            if shared is not None:
                up.append(getattr(shared, name))
        down = [experts.w_down.transpose(0, 1).flatten(1)]
        if shared is not None:
            down.append(shared.w_down)
        return torch.cat(up), torch.cat(down, 1)

    def fuse_weights(self):
        """The parameters become views of the wide network's matrices."""
        up, down = self.fused_weights = self.wide_weights()
        (E, F_, _), n = self.experts.w_gate.shape, self.experts.w_gate.shape[:2].numel()
        for name, rows in zip(("w_gate", "w_up"), up.chunk(2)):
            getattr(self.experts, name).data = rows[:n].unflatten(0, (E, F_))
            if self.shared is not None:
                getattr(self.shared, name).data = rows[n:]
        self.experts.w_down.data = down[:, :n].unflatten(1, (E, F_)).transpose(0, 1)
        if self.shared is not None:
            self.shared.w_down.data = down[:, n:]

    def all_experts(self, x, choice, gates):
        """A decoding step, or a short prefill, reads nearly every expert's weights for its few
        tokens. Then one wide network, each expert a stretch of its hidden units and those not
        chosen gated to zero, costs less than sorting. Weights stand on the left of both products,
        where a CPU reads them as they lie, at twice the rate. x (M, D), choice and gates (M, K) ->
        (M, D)"""
        up, down = (w.to(x.dtype) for w in self.wide_weights())
        E, F_ = self.experts.w_gate.shape[:2]
        # A gate for each expert and token (E + S, M): 0 where it is not chosen, 1 for shared ones.
        gate = gates.new_zeros(down.shape[1] // F_, len(x)).scatter_(0, choice.T, gates.T)
        gate[E:] = 1
        g, u = (up @ x.T).chunk(2)  # ((E + S) F, M) each
        hidden = F.silu(g).mul_(u).view(len(gate), F_, -1)  # (E + S, F, M)
        hidden = hidden.mul_(gate.to(x.dtype)[:, None])
        return (down @ hidden.flatten(0, 1)).T


# ---------------------------------------------------------------- attention


class DecodingAttention(Attention):
    """Latent attention. Its cache is a function of queries, entries and of the attention to run on
    what is stored: see attend_cached."""

    fused_weight = None  # see fuse_weights
    # Scores may be rounded to the compute dtype, see attend_in_blocks.
    coarse = True

    @property
    def lined_up(self):
        """In attend_stored the heads line up along the query axis: that many times as many rows"""
        return self.config.heads

    def input_weights(self):
        """The weights that multiply a layer's input"""
        return [self.wq_a if self.config.q_lora else self.wq, self.wkv_a]

    def fuse_weights(self):
        weights = self.input_weights()
        self.fused_weight = torch.cat([w.flatten(0, -2) for w in weights])
        rows = [w.shape[:-1].numel() for w in weights]
        for w, part in zip(weights, self.fused_weight.split(rows)):
            w.data = part.view(w.shape)

    def input_projections(self, x):
        """x (B, T, D) times each of these weights: (B, T, R), or (B, T, H, R) of a stack"""
        weights, fused = self.input_weights(), self.fused_weight
        # It is no longer ours where a copy of the model got weights of its own.
        if fused is None or fused.data_ptr() != weights[0].data_ptr():
            return [linear(x, w) for w in weights]
        rows = [w.shape[:-1].numel() for w in weights]
        parts = F.linear(x, fused.to(x.dtype)).split(rows, -1)
        return [
            part if w.ndim == 2 else part.unflatten(-1, w.shape[:-1])
            for part, w in zip(parts, weights)
        ]

    def project_qkv(self, x, cos, sin):
        """As Attention.project_qkv; RoPE turns the heads' queries and the shared key at once."""
        c = self.config
        q, down = self.input_projections(x)
        if c.q_lora:
            q = linear(self.q_norm(q), self.wq)
        latent, k = down[..., : c.kv_lora], down[:, :, None, c.kv_lora :]
        turned = apply_rotary_emb(torch.cat((q[..., c.qk_nope :], k), 2), cos, sin)
        q = torch.cat((q[..., : c.qk_nope], turned[:, :, : c.heads]), -1)
        latent = self.kv_norm(latent).to(x.dtype)
        return q, torch.cat((latent, turned[:, :, c.heads]), -1)

    def forward(self, x, cos, sin, mask=None, cache=None):
        q, entries = self.project_qkv(x, cos, sin)
        q = q.transpose(1, 2)  # (B, H, T, N + R)
        if cache is None:
            out = self.attend_entries(q, self.gather_entries(entries), mask)
        else:
            out = cache(q, entries, self.attend_stored)
        return linear(out.transpose(1, 2).flatten(2), self.wo)

    def attend_entries(self, q, entries, mask):
        """Attention of q (B, H, T, N + R) over keys and values rebuilt from entries (B, S, width)
        -> (B, H, T, V)"""
        k, v = (t.transpose(1, 2) for t in self.keys_values(entries))
        return attend_in_blocks(q, k, v, mask, self.scale * self.head_dim**-0.5, self.coarse)

    def attend_stored(self, q, entries, mask):
        """Attention of q (B, H, T, N + R) on the cache's latents themselves: every head reads the
        same C + R numbers, so the heads line up along the query axis of one wide head (mask (B, 1,
        H * T, S)). The values are the entries; their rotary part is dropped."""
        c, (B, H, T, _) = self.config, q.shape

        # Many tokens at once, as of a prompt, pay for reading keys and values back, whose products
        # are narrower. (Beside many more keys they would take much memory.)
        extra = 2 * c.kv_lora + c.qk_rope - c.qk_nope - c.v_dim
        if T * extra > c.kv_lora * (c.qk_nope + c.v_dim) and 8 * T > entries.shape[1]:
            return self.attend_entries(q, entries, mask[:, :, :T])

        def by_head(x, w):  # (B, H, T, R) times a matrix per head (H, R, R')
            rows = x.transpose(0, 1).flatten(1, 2)  # (H, B * T, R)
            products = torch.bmm(rows, w.to(x.dtype))
            return products.view(H, B, T, -1).transpose(0, 1)

        q_nope, q_rope = q[..., : c.qk_nope], q[..., c.qk_nope :]
        q = torch.cat((by_head(q_nope, self.wk_b), q_rope), -1)
        q, entries = q.view(B, 1, H * T, -1), entries[:, None]
        o = attend_in_blocks(q, entries, entries, mask, self.scale * self.head_dim**-0.5)
        latents = o.view(B, H, T, -1)[..., : c.kv_lora]
        return by_head(latents, self.wv_b.transpose(1, 2))


class DecodingGroupedQueryAttention(DecodingAttention, GroupedQueryAttention):
    lined_up = 1

    @property
    def coarse(self):
        # Qwen2's scores reach hundreds, by the biases of its keys.
        return not self.config.qkv_bias

    def input_weights(self):
        return [self.wq_a if self.config.q_lora else self.wq, self.wk, self.wv]

    def project_qkv(self, x, cos, sin):
        c = self.config
        q, k, v = self.input_projections(x)
        if c.q_lora:
            q = linear(self.q_norm(q), self.wq)
        q = self.add_bias_and_norm(q, "q")
        k = self.add_bias_and_norm(k, "k")
        v = self.add_bias_and_norm(v, "v")
        both = torch.cat((q[..., c.qk_nope :], k[..., -c.qk_rope :]), 2)
        turned = apply_rotary_emb(both, cos, sin)
        q = torch.cat((q[..., : c.qk_nope], turned[:, :, : c.heads]), -1)
        # An entry: keys without position, keys turned, values.
        entries = torch.cat((k[..., : c.qk_nope], turned[:, :, c.heads :], v), -1)
        return q, entries.flatten(2)

    def attend_stored(self, q, entries, mask):
        return self.attend_entries(q, entries, mask)


class DecodingBlock(Block):
    def forward(self, x, cos, sin, mask=None, cache=None, replay=None, record=None, real=None):
        x = x + self.attn(self.attn_norm(x), cos, sin, mask, cache)
        h = self.ffn_norm(x)
        if not isinstance(self.ffn, MoE):
            return x + self.ffn(h)
        decoding = cache is not None and self.ffn.fit(h)
        return x + self.ffn(h, replay, record, real, decoding)


# ---------------------------------------------------------------- the cache


def cache_mask(cache, position, last, heads):
    """position (B, T), the largest of them `last` -> what tokens there may look at, 0 or -inf (B,
    1, T, S); S reaches as far as any of them looks. heads: that many times, where they line up
    along the query axis."""
    upto = min(cache.data.shape[2], round_up(last + 1))
    later = torch.arange(upto, device=position.device) > position[..., None]  # (B, T, S)
    later = torch.zeros(later.shape, dtype=cache.data.dtype, device=position.device).masked_fill_(
        later, -torch.inf
    )
    return later.repeat(1, heads, 1)[:, None]


def attend_cached(cache, layer, row, position, spans, order=None):
    """-> for a layer's attention: a function that stores the entries (1, N, width) of the N tokens
    fed at `position` of `row` (of any shapes that broadcast to N numbers), and gives what their
    queries (1, H, N, Q) see of all that is cached, (1, H, N, V). spans: (rows, index, mask) of
    sequences that are continued by equally many tokens; index (b, t) says which of the N, None all
    in order. order (N,): where each token's result stands in those of all spans, one behind the
    other."""

    def seen(q, entries, attend_stored):
        data, q = cache.data[layer], q[0].transpose(0, 1)  # (N, H, Q)
        data[row, position] = entries.view(*position.shape, -1)
        found = []
        for rows, index, mask in spans:
            # (b, t, H, Q)
            part = q.unflatten(0, (len(mask), -1)) if index is None else q[index]
            stored = data[rows, : mask.shape[-1]]
            out = attend_stored(part.transpose(1, 2), stored, mask)
            found.append(out.transpose(1, 2).flatten(0, 1))
        o = found[0] if order is None else torch.cat(found)[order]  # (N, H, V)
        return o.transpose(0, 1)[None]

    return seen


# ---------------------------------------------------------------- the model


class DecodingModel(Model):
    def fuse_weights(self):
        """For a model that only samples: weights that a decoding step multiplies by the same
        numbers are moved to lie side by side in memory, so that one product does for several. They
        stay the parameters that they were, and take what is loaded into them."""
        for module in self.modules():
            if isinstance(module, (DecodingAttention, DecodingMoE)):
                module.fuse_weights()
        return self.requires_grad_(False)

    def embed_tokens(self, tokens):
        if self.embed.weight.dtype.itemsize < 4:
            return EmbedTokens.apply(tokens, self.embed.weight)
        return self.embed(tokens).float()

    def mark_real(self, tokens):
        """Once for all routers: (M*K,), see FastMoE.forward"""
        real = (tokens >= 0).float().view(-1, 1)
        return real.expand(-1, self.config.num_experts_per_tok).flatten()

    def continue_cached(self, tokens, cache, row, position, spans, order=None, record=None):
        """All layers for tokens that continue cached sequences; of any shape, see attend_cached ->
        hidden (N, D)"""
        x = self.embed(tokens.reshape(1, -1)).float()
        cos, sin = self.rotary_cos_sin(position.reshape(1, -1))
        for layer, block in enumerate(self.layers):
            stored = attend_cached(cache, layer, row, position, spans, order)
            x = block(x, cos, sin, None, stored, None, record)
        return x[0]

    def decode(self, tokens, cache, rows, start, record=None):
        row, position, spans = self.locate_span(tokens.shape[1], cache, rows, start)
        hidden = self.continue_cached(tokens, cache, row, position, spans, None, record)
        return hidden.view(*tokens.shape, -1)

    def locate_span(self, length, cache, rows, start):
        """-> rows (B, 1) and positions (B, T) of `length` tokens from start (B,), and the one span
        that they are. start: a list, or a tensor, which Python then has to read."""
        room, device = cache.data.shape[2], cache.data.device
        start = start.tolist() if torch.is_tensor(start) else start
        assert max(start) < room, f"position {max(start)} in a cache of {room} tokens"
        # (B, T)
        position = to_device(start, device)[:, None] + torch.arange(length, device=device)
        # only padding reaches so far
        position = position.clamp(max=room - 1)
        row = torch.arange(cache.data.shape[1], device=device)[rows]
        last = min(max(start) + length, room) - 1
        mask = cache_mask(cache, position, last, self.layers[0].attn.lined_up)
        return row[:, None], position, [(rows, None, mask)]

    def prefill(self, chunks, cache, rows, start, record=None):
        """Feed chunks (lists of tokens, of any lengths), each to the cached sequence rows[i] from
        start[i] on; hidden states are not wanted. The tokens stand one behind the other; only
        attention pads, among chunks of about a length, a chunk's last token repeated. record: as in
        decode, the tokens of all chunks and some more, (1, N, K)."""
        device, lengths = cache.data.device, [len(chunk) for chunk in chunks]
        heads = self.layers[0].attn.lined_up

        # All tokens, one chunk behind the other, and the last one some times more: few different
        # shapes, see round_up.
        ends, more = list(accumulate(lengths)), -sum(lengths) % 32
        where = [(row, first + j) for row, first, n in zip(rows, start, lengths) for j in range(n)]
        row, position = to_device(where + where[-1:] * more, device).T
        tokens = [token for chunk in chunks for token in chunk] + chunks[-1][-1:] * more
        tokens = to_device(tokens, device)

        # Chunks of about a length are a span: attention takes them together.
        spans, order, at = [], [0] * ends[-1], 0
        for width in sorted({round_up(n, 16) for n in lengths}):
            members = [i for i, n in enumerate(lengths) if round_up(n, 16) == width]
            index = []
            for i in members:
                begin, last_place = ends[i] - lengths[i], lengths[i] - 1
                index.append([begin + min(j, last_place) for j in range(width)])
            index = to_device(index, device)
            last = max(start[i] + lengths[i] for i in members) - 1
            mask = cache_mask(cache, position[index], last, heads)
            spans.append((to_device([rows[i] for i in members], device), index, mask))
            for i in members:
                order[ends[i] - lengths[i] : ends[i]] = range(at, at + lengths[i])
                at += width
        order = to_device(order + order[-1:] * more, device)
        self.continue_cached(tokens, cache, row, position, spans, order, record)

    def run_mtp(self, hidden, embedded, following, cache, rows, start):
        if cache is None:
            return super().run_mtp(hidden, embedded, following, cache, rows, start)
        row, position, spans = self.locate_span(following.shape[1], cache, rows, start)
        stored = attend_cached(cache, len(self.layers), row, position, spans)
        one_row = hidden.flatten(0, 1)[None], embedded.flatten(0, 1)[None]
        x = self.mtp(*one_row, *self.rotary_cos_sin(position.reshape(1, -1)), None, stored)
        return x.view(hidden.shape)

    def logprobs(self, hidden, targets, temperature=1.0, where=None):
        """Log-probs of the targets (B, T), fp32: the cross-entropy of training, without (B, T,
        vocab). where (B, T): compute these only, 0 elsewhere."""
        # Selecting by a mask makes a GPU's host wait for the number of rows, so it is left out
        # where all are wanted.
        h = hidden.flatten(0, 1) if where is None else hidden[where]  # (N, D)
        t = targets.flatten() if where is None else targets[where]  # (N,)
        fill = round_up(len(t)) - len(t)
        h = F.pad(self.norm(h), (0, 0, 0, fill))
        found = TargetLogprobs.apply(h, self.head.weight, F.pad(t, (0, fill)), temperature)
        found = found[: len(t)]
        if where is None:
            return found.view(targets.shape)
        return torch.zeros(targets.shape, device=found.device).masked_scatter(where, found)


class DecodingVariantModel(DecodingModel, VariantModel):
    pass
