"""fast/decode.py: attention and the mixture of experts, sooner where few tokens go through the
model: in a decoding step.

The plain forms are moe.Attention.forward and moe.MoE.forward. While it decodes, plain attention
rebuilds keys and values of all cached tokens from their latents, for every new token again; and the
plain mixture sorts the few rows of a step by expert. The twins here give the same results up to the
order of sums (tests/test_fast_decode.py).

    FastAttention    q^T (W_kb c) = (W_kb^T q)^T c: absorb W_kb into the query, and attention runs
                     on the latents themselves, which all heads share. In training, where keys and
                     values are rebuilt, it attends in blocks (fast/cpu_kernels.py)
    FastProjection   one call of RoPE for queries and keys, and in sampling one product for all
                     weights that multiply a layer's input
    WideMoE          a step's few tokens touch nearly every expert: one wide network, with those not
                     chosen gated to zero, costs less than sorting the rows

Left out: a paged cache, and one in fewer bits.

Letters: as in moe.py; S cached entries, Q query width.
"""

from functools import partial

import torch
import torch.nn.functional as F

from fast.cpu_kernels import attend_in_blocks, route_tokens
from moe import Attention, MoE, apply_rotary_emb, linear


def joined(module, weights, join, dtype=None):
    """join() of a module's weights, a tuple, kept until one of them changes: only in sampling,
    where it serves thousands of steps. New numbers go to where the old ones lie, since a CUDA graph
    reads them there (fast/cuda_graphs.py, which calls module.rejoin). dtype: that of the result
    where it may be another one than the weights'"""
    # A tensor's version rises with every change in place. One made in inference mode has none.
    if any(weight.is_inference() for weight in weights):
        return join()
    places, versions = zip(*((weight.data_ptr(), weight._version) for weight in weights))
    places = dtype, *places
    known_places, known_versions = getattr(module, "joined_from", (None, None))
    if places != known_places:
        module.joined_weights = join()
    elif versions != known_versions:
        for old, new in zip(module.joined_weights, join()):
            old.copy_(new)
    module.joined_from = places, versions
    module.rejoin = partial(joined, module, weights, join, dtype)
    return module.joined_weights


# ---------------------------------------------------------------- attention


class FastProjection(Attention):
    """The twin of moe.Attention.project_qkv"""

    def project_qkv(self, x, cos, sin):
        c = self.config
        # One product for the queries (or the narrow vector that they come from), the latent and the
        # rotary key.
        first = self.wq_a if c.q_lora else self.wq
        if torch.is_inference_mode_enabled():
            (weight,) = joined(
                self, [first, self.wkv_a], lambda: (torch.cat((first.flatten(0, -2), self.wkv_a)),)
            )
            q, down = linear(x, weight).split((len(weight) - len(self.wkv_a), len(self.wkv_a)), -1)
            q = q if c.q_lora else q.unflatten(-1, first.shape[:2])
        else:
            q, down = linear(x, first), linear(x, self.wkv_a)
        if c.q_lora:
            q = linear(self.q_norm(q), self.wq)  # (B, T, H, N + R)
        latent, k = down[..., : c.kv_lora], down[:, :, None, c.kv_lora :]  # k (B, T, 1, R)

        # The key stands behind the queries as one more head: (B, T, H + 1, R).
        turned = apply_rotary_emb(torch.cat((q[..., c.qk_nope :], k), 2), cos, sin)
        q = torch.cat((q[..., : c.qk_nope], turned[:, :, : c.heads]), -1)
        return q, torch.cat((self.kv_norm(latent), turned[:, :, c.heads]), -1)


class FastAttention(Attention):
    """The twin of moe.Attention.forward. When it decodes, it attends to the cached latents
    themselves, where the plain form rebuilds keys and values of all cached tokens. Grouped-query
    attention (published/) has none: its keys and values are read back as they are."""

    def forward(self, x, cos, sin, mask=None, store=None):
        q, entries = self.project_qkv(x, cos, sin)
        entries = self.gather_entries(entries) if store is None else store(entries)
        q = q.transpose(1, 2)  # (B, H, T, N + R)
        if store is not None and self.absorbing_pays(q.shape[2], entries.shape[1]):
            out = self.attend_to_latents(q, entries, mask)
        else:
            k, v = (t.transpose(1, 2) for t in self.keys_values(entries))  # (B, H, S, N + R or V)
            # The biases of Qwen2's keys take its scores to hundreds, where bf16 numbers are 1 or
            # more apart: they must not be rounded.
            coarse = not getattr(self.config, "qkv_bias", False)
            out = attend_in_blocks(q, k, v, mask, self.scale * self.head_dim**-0.5, coarse)
        return linear(out.transpose(1, 2).flatten(2), self.wo)

    def absorbing_pays(self, tokens, keys):
        """Is it cheaper to absorb W_kb into the queries of `tokens` tokens than to rebuild all
        keys and values?"""
        # Per head, a query and a key cost 2 (C + R) multiply-adds with absorbed weights. With
        # rebuilt keys and values they cost N + R + V, and rebuilding costs C (N + V) per key:
        # cheaper for many tokens at once, as of a prompt. With many more keys than tokens it would
        # take much memory, so it is not done then.
        c = self.config
        if not hasattr(self, "wk_b"):
            return False
        extra = 2 * c.kv_lora + c.qk_rope - c.qk_nope - c.v_dim
        return tokens * extra <= c.kv_lora * (c.qk_nope + c.v_dim) or 8 * tokens <= keys

    def attend_to_latents(self, q, entries, mask):
        """Absorbed attention: q (B, H, T, N + R) attends to the cached entries (B, S, C + R), and
        no key or value is rebuilt -> (B, H, T, V). The entries are keys and values at once; of the
        values the rotary part is dropped."""
        c, (B, H, T, _) = self.config, q.shape

        def by_head(x, w):  # (B, H, T, R) times a matrix per head (H, R, R')
            rows = x.transpose(0, 1).flatten(1, 2)  # (H, B * T, R)
            products = torch.bmm(rows, w.to(x.dtype))
            return products.view(H, B, T, -1).transpose(0, 1)

        # W_kb goes into the query: q^T (W_kb c) = (W_kb^T q)^T c.
        q_nope, q_rope = q[..., : c.qk_nope], q[..., c.qk_nope :]
        q = torch.cat((by_head(q_nope, self.wk_b), q_rope), -1)  # (B, H, T, C + R)

        # All heads read the same entries, so they line up along the query axis of one wide head.
        q, entries = q.view(B, 1, H * T, -1), entries[:, None]  # (B, 1, S, C + R)
        # Where each has one query, that needs no copy of the mask.
        mask = mask[:, :, None].expand(-1, -1, H, -1, -1).flatten(2, 3)  # (B, 1, H * T, S)
        o = attend_in_blocks(q, entries, entries, mask, self.scale * self.head_dim**-0.5)

        # A weighted sum of latents, through W_vb, is the weighted sum of values.
        latents = o.view(B, H, T, -1)[..., : c.kv_lora]  # (B, H, T, C)
        return by_head(latents, self.wv_b.transpose(1, 2))


# ---------------------------------------------------------------- experts


class WideMoE(MoE):
    """The twin of moe.MoE.forward, Experts.forward and FFN.forward for few tokens, in sampling: all
    experts run as one wide network, where the plain form sorts the rows by expert."""

    def forward(self, x, replay=None, record=None, real=None):
        if not self.runs_wide(x):
            return super().forward(x, replay, record, real)
        tokens, choice, gates = route_tokens(self, x, replay, record)
        return self.all_experts(tokens, choice, gates).unflatten(0, x.shape[:2])

    def runs_wide(self, x):
        """Does this model sample, and are the tokens of x (B, T, D) so few that the work of all
        experts is worth it? Never with more than 16 experts, in low precision, which the wide
        network does not have, or where the experts are on other ranks."""
        experts = len(self.router.bias)
        if self.training or not torch.is_inference_mode_enabled() or "dispatch" in vars(self):
            return False
        return (
            experts <= 16
            and not self.experts.precision
            and len(x) * x.shape[1] <= most_tokens(experts, x)
        )

    def wide_weights(self):
        """All E experts, with the S shared ones behind them, as one network: gate and up in one
        matrix (2 (E + S) F, D), down (D, (E + S) F)."""
        experts, shared = self.experts, [self.shared] if self.shared is not None else []
        parts = [experts, *shared]
        weights = [getattr(part, name) for part in parts for name in ("w_gate", "w_up", "w_down")]

        def join():
            # All gates first and then all ups.
            up = [experts.w_gate.flatten(0, 1), *(part.w_gate for part in shared)]
            up += [experts.w_up.flatten(0, 1), *(part.w_up for part in shared)]
            down = [experts.w_down.transpose(0, 1).flatten(1), *(part.w_down for part in shared)]
            return torch.cat(up), torch.cat(down, 1)

        return joined(self, weights, join)

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
        # Laid out by token again: the layers that follow take their products of rows.
        return (down @ hidden.flatten(0, 1)).T.contiguous()  # (M, D)


def most_tokens(experts, x):
    """Up to how many tokens of x all experts run. fp32 products cost more on a CPU, so there it is
    an eighth."""
    most = 2048 // experts
    return most // 8 if x.device.type == "cpu" and x.dtype == torch.float32 else most
