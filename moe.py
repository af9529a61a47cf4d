"""moe.py: the model, a small decoder in the shape of Kimi K2 (the base that Composer 2.5 was
trained from).

Two ideas. Multi-head latent attention: keys and values of all heads are rebuilt from one short
vector per token (the latent), so the decoding cache is that vector. Mixture of experts: a router
sends each token to K of E small feed-forward networks, so parameters grow with E while the work per
token does not.

Stated by Cursor (cursor.com/blog/composer-2-5; Technical Report, arXiv 2603.24477): the base is
Kimi K2.5, 1.04T parameters, 32B active, 61 layers, latent attention; router replay in RL; an MTP
head distilled from the main head's logits; NVFP4 with an FP32 scale per token, MXFP8. The layer
shapes are those of Kimi K2's public configuration (DeepSeek-V3's architecture). Ours: the sizes,
fp32 residual stream, initialisation, the balancing rate.

    attention   c_t = norm(W_a x_t),  k_t = [W_kb c_t ; rope(W_r x_t)],  v_t = W_vb c_t
    routing     s = sigmoid(W_router x) in fp32;  choice = top-K of s + b
                y = shared(x) + scale * sum_i s_i / sum_j s_j * expert_i(x)
    balancing   b_e += rate * sign(mean load - load_e): the bias only moves the choice,
                no auxiliary loss bends the gradient
    drafting    h'_t = block(W [norm h_t ; norm embed(x_t+1)]) predicts x_t+2;
                learned from the main head's logits at t+1

Left out: dropout; every faster way to compute the same; the Report's rule that a replayed expert
which now scores far below the router's own choice gives way to it (what a threshold changes here:
experiments/README.md, "How far apart are sampler and trainer?"). RMSNorm, Experts, MoE, Attention
and Model.logprobs have fast twins, which step aside where one edits what they stand for
(fast/twins.py). The model knows no ranks: hsdp.py replaces two methods, MoE.dispatch (tokens travel
to their experts) and Attention.gather_entries (latents of the whole sequence).

Letters (README has them all): B rows, T tokens of a row, S keys, D model width, H heads, V
vocabulary, E experts, K experts per token, F expert width, M = B * T tokens.

    python moe.py    trains 150 steps on real Python twice: expert load with and without the
                     balancing bias (a figure), and how often the draft is right
"""

import math
import sys
import sysconfig
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model, small ones unless given. Behind some of them stand Kimi K2's."""

    vocab: int = 1024
    dim: int = 128
    layers: int = 4
    heads: int = 4
    q_lora: int = 0  # rank of the query projection, 0 = full (Kimi K2: 1536)
    kv_lora: int = 64  # width of the latent = what the cache holds (Kimi K2: 512)
    qk_nope: int = 16  # (Kimi K2: 128)
    qk_rope: int = 16  # (Kimi K2: 64)
    v_dim: int = 32  # (Kimi K2: 128)
    dense_layers: int = 1  # the first layer is dense in Kimi K2 as well
    dense_ffn: int = 384
    experts: int = 8  # (Kimi K2: 384, 8 active)
    num_experts_per_tok: int = 2
    shared: int = 1
    expert_ffn: int = 128
    route_scale: float = 1.0  # (Kimi K2: 2.827)
    norm_gates: bool = True  # the gates of the chosen experts are divided by their sum
    # number format of the expert products: "mxfp8", "nvfp4", or "" = the dtype of compute_in()
    precision: str = ""
    mtp: int = 0  # 1: a head that drafts the token after the next
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    context: int = 256  # the window of pretraining; YaRN stretches it by yarn_factor
    yarn_factor: float = 1.0
    # pairs that turn more often than this in the old window are kept (Kimi K2: 1) ...
    yarn_fast: float = 32.0
    yarn_slow: float = 1.0  # ... and those that turn less often are slowed by the whole factor
    yarn_mscale: float = 1.0  # factor on the scores, (0.1 yarn_mscale ln(factor) + 1)^2

    def __post_init__(self):
        # What the arithmetic below takes for granted. A wrong size would fail late and obscurely.
        # A published folder or a checkpoint may bring any, so it is no assert.
        K, E = self.num_experts_per_tok, self.experts
        if K > E:
            raise ValueError(f"num_experts_per_tok={K} experts of experts={E}")
        if self.qk_rope % 2:
            raise ValueError("qk_rope must be even: RoPE turns pairs")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, not {self.precision!r}")
        if self.precision and (self.dim % 32 or self.expert_ffn % 32):
            raise ValueError("low precision scales dim and expert_ffn by blocks of 32")
        if self.mtp not in (0, 1):
            raise ValueError(f"mtp={self.mtp}: no head or one")

    @property
    def window(self):
        return int(self.context * self.yarn_factor)

    @property
    def entry_width(self):
        """Numbers that a layer's cache holds of one token: the latent and the rotary key"""
        return self.kv_lora + self.qk_rope

    def build_model(self):
        """The model of this configuration, with random weights"""
        return Model(self)


PRECISIONS = ("", "mxfp8", "nvfp4")


# ---------------------------------------------------------------- mathematics


def linear(x, weight):
    """x (..., C) @ weight (..., C) transposed, in x's dtype; a stack (H, R, C) gives (..., H,
    R)."""
    y = F.linear(x, weight.flatten(0, -2).to(x.dtype))
    return y if weight.ndim == 2 else y.view(*x.shape[:-1], *weight.shape[:-1])


def rope_frequencies(dims, theta, context, factor, fast=32, slow=1, mscale=1):
    """-> the angle per position of each pair (dims/2,) and the factor on the scores, stretched by
    YaRN (arXiv 2309.00071): pairs that turn less than `slow` times inside the old window are slowed
    by `factor`, pairs that turn more than `fast` times are kept, a ramp lies between."""
    # Plain RoPE: from one radian per position down to almost 1 / theta.
    frequency = theta ** (-torch.arange(0, dims, 2, dtype=torch.float32) / dims)  # (dims/2,)
    if factor == 1:
        return frequency, 1.0

    # Pair i turns context * theta^(-2i/dims) / (2 pi) times in the old window: solved for i.
    def pair_that_turns(times):
        return dims * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    # The share of the whole factor that each pair is slowed by: 0 before `low`, 1 after `high`.
    # Fast pairs tell neighbours apart and must stay; slow ones tell where in the window one is.
    low = max(math.floor(pair_that_turns(fast)), 0)
    high = min(math.ceil(pair_that_turns(slow)), dims - 1)
    slowed = ((torch.arange(dims // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    frequency = frequency * (1 - slowed) + frequency / factor * slowed
    return frequency, (0.1 * mscale * math.log(factor) + 1) ** 2


def rope_cos_sin(angles):
    """angles (..., qk_rope/2) -> cos and sin (..., qk_rope) for both halves: a pair (a, b) turns
    into (a cos - b sin, b cos + a sin), so the first half's sine has a minus."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def apply_rotary_emb(x, cos, sin):
    """RoPE on the last dimension of x (B, T, H, qk_rope); entry i of its first half and entry i of
    its second half are a pair. cos and sin (B or 1, T, 1, qk_rope): from rope_cos_sin."""
    exact = x.float()
    first, second = exact.chunk(2, -1)
    turned = exact * cos + torch.cat((second, first), -1) * sin
    return turned.to(x.dtype)


def dot_product_attention(q, k, v, mask, scale):
    """softmax(scale q k^T) v: q (B, H, T, head_dim), k (B, H, S, head_dim), v (B, H, S, v_dim) ->
    (B, H, T, v_dim). mask (B or 1, 1, T, S): True or 0 = may look, False or -inf = may not; None:
    causal, query t sees keys 0 to t."""
    causal = mask is None
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)


def swiglu(x, w_gate, w_up, w_down):
    return linear(F.silu(linear(x, w_gate)) * linear(x, w_up), w_down)


# Any lower temperature gives the same as this one, and 1 / temperature stays finite in fp32.
COLDEST = 1e-30


def divide_by_temperature(scores, temperature):
    """scores (..., vocab) in fp32 -> what softmax takes at a temperature above 0."""
    if temperature == 1:
        return scores
    if temperature >= 1e-4:
        return scores / temperature
    # Very cold: the largest score gets nearly all the probability. It is subtracted first, which
    # changes no probability, so that its quotient is 0 and none overflows.
    return (scores - scores.amax(-1, keepdim=True)) / max(temperature, COLDEST)


# ---------------------------------------------------------------- layers


def init_weight(*shape, std=None):
    """Random weights of the variance 1 / inputs (the last dimension), unless std is given"""
    return nn.Parameter(torch.randn(shape) * (shape[-1] ** -0.5 if std is None else std))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w in fp32; its output is in the compute dtype, which every matrix
    product after it then follows."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.dtype = torch.float32  # see Model.compute_in

    def forward(self, x):
        x = x.float()
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(self.dtype)


class FFN(nn.Module):
    """A feed-forward network: W_down (silu(W_gate x) * W_up x)"""

    def __init__(self, dim, hidden):
        super().__init__()
        self.w_gate = init_weight(hidden, dim)
        self.w_up = init_weight(hidden, dim)
        self.w_down = init_weight(dim, hidden, std=0)

    def forward(self, x):
        return swiglu(x, self.w_gate, self.w_up, self.w_down)


class Experts(nn.Module):
    """A stack of E feed-forward networks. Input rows come sorted by expert."""

    def __init__(self, experts, dim, hidden, precision=""):
        super().__init__()
        self.precision = precision
        self.w_gate = init_weight(experts, hidden, dim)
        self.w_up = init_weight(experts, hidden, dim)
        self.w_down = init_weight(experts, dim, hidden, std=0)

    def local_weights(self):
        """The experts that this rank owns: all, unless hsdp.py has cut the stacks."""
        weights = (self.w_gate, self.w_up, self.w_down)
        return [w.to_local() if hasattr(w, "to_local") else w for w in weights]

    def forward(self, x, counts):
        """x (M * K, D) sorted by expert, counts (E,): how many rows each expert has -> (M * K, D)
        in the same order"""
        assert not self.precision, f"precision={self.precision}: the plain experts do not round"
        outputs = []
        for rows, *weights in zip(x.split(counts.tolist()), *self.local_weights()):
            outputs.append(swiglu(rows, *weights))
        return torch.cat(outputs)  # (M * K, D)


class Router(nn.Module):
    """Scores in fp32: a bf16 score flips near-ties between trainer and sampler. The bias is a
    buffer: no gradient."""

    def __init__(self, config):
        super().__init__()
        self.k, self.scale, self.norm_gates = (
            config.num_experts_per_tok,
            config.route_scale,
            config.norm_gates,
        )
        self.weight = init_weight(config.experts, config.dim)
        self.register_buffer("bias", torch.zeros(config.experts))
        # tokens per expert since the last update_router_bias()
        self.register_buffer("load", torch.zeros(config.experts))

    def score_experts(self, x):
        """x (M, D) -> each expert's score (M, E), between 0 and 1"""
        return F.linear(x.float(), self.weight.float()).sigmoid()

    def rule_out_experts(self, biased):
        """biased scores (M, E) -> the scores by which experts are chosen. A subclass may rule some
        experts out."""
        return biased

    def forward(self, x, replay=None):
        """x (M, D) -> choice (M, K), gates (M, K). replay (M, K) overrides the choice where it is
        >= 0; the gates still come from the scores of now, with their gradient."""
        score = self.score_experts(x)  # (M, E)

        # The bias moves the choice and never the gates: it balances without bending the gradient.
        biased = score.detach() + self.bias
        preference = self.rule_out_experts(biased)  # (M, E)
        # A replayed expert is put 1,000 ahead of all others, so it is chosen.
        if replay is not None:
            replayed = self.find_replayed(replay)  # (M, E)
            preference = torch.where(replayed, biased + 1e3, preference)
        choice = preference.topk(self.k)[1]  # (M, K)

        # Scores of the chosen experts are their gates: this is where the router gets its gradient.
        gates = score.gather(1, choice)  # (M, K)
        if self.norm_gates:
            gates = gates / (gates.sum(1, keepdim=True) + 1e-20)
        return choice, gates if self.scale == 1 else gates * self.scale

    def find_replayed(self, replay):
        """replay (M, K), -1 = none -> (M, E): True where an expert was recorded"""
        # An extra column in front takes the -1s, and is cut off.
        given = replay.new_zeros(len(replay), 1 + len(self.bias), dtype=torch.bool)
        return given.scatter_(1, replay.long() + 1, True)[:, 1:]


class MoE(nn.Module):
    """A mixture of experts: each token goes through its K chosen experts and the shared one."""

    def __init__(self, config, router=Router):
        super().__init__()
        self.router = router(config)
        self.experts = Experts(config.experts, config.dim, config.expert_ffn, config.precision)
        self.shared = FFN(config.dim, config.expert_ffn * config.shared) if config.shared else None

    def dispatch(self, permuted, tokens_per_expert, experts):
        """Each row through its expert. Expert parallelism (hsdp.py) replaces this by an all-to-all
        to the ranks that own the experts; one device calls them directly."""
        return experts(permuted, tokens_per_expert)

    def forward(self, x, replay=None, record=None, real=None):
        """x (B, T, D) -> (B, T, D). replay (B, T, K): see Router. record: a list that receives the
        choice (B, T, K). real (B, T): False where a token is padding, which is computed and not
        counted as load; None: all count."""
        # The router takes tokens one by one, whatever sequence they come from.
        tokens = x.flatten(0, 1)  # (M, D)
        if replay is not None:
            replay = replay.flatten(0, 1)  # (M, K)
        choice, gates = self.router(tokens, replay)  # (M, K) each
        if record is not None:
            record.append(choice.view(*x.shape[:2], -1))

        # Balancing wants to know how many real tokens each expert got.
        num_experts, top_k = len(self.router.bias), self.router.k
        if self.training:
            counted = choice if real is None else choice[real.flatten()]
            self.router.load += counted.flatten().bincount(minlength=num_experts)

        # Sort the M*K pairs (token, expert) by expert: each expert's tokens become one contiguous
        # block.
        order = choice.flatten().argsort(stable=True)  # (M*K,)
        tokens_per_expert = choice.flatten().bincount(minlength=num_experts)  # (E,)
        permuted = tokens[order // top_k]  # (M*K, D)
        outputs = self.dispatch(permuted, tokens_per_expert, self.experts)  # (M*K, D)

        # Each token's result is the sum of its K experts' outputs, each times its gate.
        weighted = outputs * gates.to(outputs.dtype).flatten()[order, None]  # (M*K, D)
        routed = torch.zeros_like(tokens).index_add_(0, order // top_k, weighted)  # (M, D)
        if self.shared is not None:
            routed = routed + self.shared(tokens)
        return routed.view_as(x)


class Attention(nn.Module):
    """Multi-head latent attention. What a cache holds of a token is its `entry`: the latent, from
    which keys and values of all heads are rebuilt, and one rotary key that all heads share."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.scale = 1.0  # YaRN's factor on the scores, see Model.extend_window
        self.head_dim = c.qk_nope + c.qk_rope

        # Queries, straight from x or by way of a narrow vector. That vector is never cached: it
        # only saves weights.
        if c.q_lora:
            self.wq_a = init_weight(c.q_lora, c.dim)
            # 1e-6 as in DeepSeek's code, whatever norm_eps is
            self.q_norm = RMSNorm(c.q_lora, 1e-6)
        # (H, head_dim, D or q_lora)
        self.wq = init_weight(c.heads, self.head_dim, c.q_lora or c.dim)

        # Keys and values: down to the latent and the rotary key, up again for each head.
        self.wkv_a = init_weight(c.kv_lora + c.qk_rope, c.dim)  # (kv_lora + qk_rope, D)
        self.kv_norm = RMSNorm(c.kv_lora, 1e-6)
        self.wk_b = init_weight(c.heads, c.qk_nope, c.kv_lora)  # (H, qk_nope, kv_lora)
        self.wv_b = init_weight(c.heads, c.v_dim, c.kv_lora)  # (H, v_dim, kv_lora)

        # Zero, like every projection into the residual stream: an untrained layer changes nothing.
        self.wo = init_weight(c.dim, c.heads * c.v_dim, std=0)  # (D, H * v_dim)

    def gather_entries(self, entries):
        """Context parallelism (hsdp.py) replaces this: each rank has a part of the sequence, and
        gathers the entries (B, T, entry) of the whole."""
        return entries

    def project_qkv(self, x, cos, sin):
        """x (B, T, D) -> queries (B, T, H, head_dim) and entries (B, T, entry)"""
        c = self.config

        # Only the last qk_rope dims of a query know its position.
        narrow = self.q_norm(linear(x, self.wq_a)) if c.q_lora else x
        q_nope, q_rope = linear(narrow, self.wq).split((c.qk_nope, c.qk_rope), -1)
        q = torch.cat((q_nope, apply_rotary_emb(q_rope, cos, sin)), -1)  # (B, T, H, head_dim)

        # A rotary key cannot be rebuilt from a latent, so the entry holds it too, once for all
        # heads.
        # (B, T, kv_lora), (B, T, qk_rope)
        latent, k_rope = linear(x, self.wkv_a).split((c.kv_lora, c.qk_rope), -1)
        k_rope = apply_rotary_emb(k_rope[:, :, None], cos, sin)[:, :, 0]
        return q, torch.cat((self.kv_norm(latent), k_rope), -1)

    def keys_values(self, entries):
        """entries (B, S, entry) -> keys (B, S, H, head_dim), values (B, S, H, v_dim)"""
        c = self.config
        latent, k_rope = entries.split((c.kv_lora, c.qk_rope), -1)
        k_nope = linear(latent, self.wk_b)  # (B, S, H, qk_nope)
        k_rope = k_rope[:, :, None].expand(-1, -1, c.heads, -1)  # (B, S, H, qk_rope)
        return torch.cat((k_nope, k_rope), -1), linear(latent, self.wv_b)

    def forward(self, x, cos, sin, mask=None, store=None):
        """x (B, T, D) -> (B, T, D). mask: see dot_product_attention. store: a function that stores
        the entries of these tokens and returns those of all keys (B, S, entry)."""
        # Other tokens see a token only through its entry. All keys and values are rebuilt from
        # entries, whether they come from this batch, from other ranks, or out of a cache.
        q, entries = self.project_qkv(x, cos, sin)
        entries = self.gather_entries(entries) if store is None else store(entries)
        k, v = self.keys_values(entries)

        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T or S, dims)
        # (B, H, T, v_dim)
        out = dot_product_attention(q, k, v, mask, self.scale * self.head_dim**-0.5)
        return linear(out.transpose(1, 2).flatten(2), self.wo)


class Block(nn.Module):
    """One layer: attention, then a feed-forward network or a mixture of experts. Each adds its
    output to the residual stream x, which stays in fp32."""

    def __init__(self, config, dense, attention=Attention, mixture=MoE):
        super().__init__()
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = attention(config)
        self.ffn = FFN(config.dim, config.dense_ffn) if dense else mixture(config)

    def forward(self, x, cos, sin, mask=None, store=None, replay=None, record=None, real=None):
        x = x + self.attn(self.attn_norm(x), cos, sin, mask, store)
        h = self.ffn_norm(x)
        if isinstance(self.ffn, MoE):
            return x + self.ffn(h, replay, record, real)
        return x + self.ffn(h)


@contextmanager
def without_counting_load(block):
    """While a block recomputes its activations, its router does not count the same tokens again:
    only a layer in training counts."""
    training, block.ffn.training = block.ffn.training, False
    try:
        yield
    finally:
        block.ffn.training = training


class MTP(nn.Module):
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): one block that sees the hidden state
    of a token and the token after it, and predicts the one after that. Ours: the block is dense, so
    that it needs no replay and no balancing."""

    def __init__(self, config, make_block):
        super().__init__()
        self.hidden_norm = RMSNorm(config.dim, config.norm_eps)
        self.token_norm = RMSNorm(config.dim, config.norm_eps)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.join = init_weight(config.dim, 2 * config.dim)
        self.block = make_block(config, dense=True)

    def forward(self, hidden, embedded, cos, sin, mask=None, store=None):
        """hidden (B, T, D), embedded (B, T, D): the tokens after them -> (B, T, D)"""
        both = torch.cat((self.hidden_norm(hidden), self.token_norm(embedded)), -1)  # (B, T, 2 D)
        x = linear(both, self.join).float()
        return self.norm(self.block(x, cos, sin, mask, store))


class Cache:
    """The entries of several sequences, one per row: data (layers, rows, length, width). The MTP
    head's come after those of the layers. The caller knows how far each row is filled."""

    def __init__(self, model, rows, length):
        layers = len(model.layers) + model.config.mtp
        shape = (layers, rows, length, model.config.entry_width)
        self.data = torch.zeros(shape, dtype=model.dtype, device=model.embed.weight.device)

    def update(self, layer, rows, places, length, entries):
        """Store entries (B, T, width) of the sequences `rows` (a slice or numbers) at places, a
        pair of indices: row (B, 1) and position (B, T). -> the first `length` entries of these
        sequences (B, length, width)"""
        data = self.data[layer]
        data[places] = entries
        return data[rows, :length]

    def copy_rows(self, targets, sources, length):
        """The first `length` entries of the rows `sources` become those of the rows `targets`."""
        # Given as lists, these numbers would be copied to a GPU by a call that waits for it.
        rows = torch.tensor([targets, sources]).to(self.data.device, non_blocking=True)
        targets, sources = rows
        self.data[:, targets, :length] = self.data[:, sources, :length]


class Model(nn.Module):
    """The decoder: embedding, layers, last norm and head, and the MTP head where there is one"""

    def __init__(self, config):
        super().__init__()
        self.config, self.dtype = config, torch.float32
        self.recompute = False  # see run_block

        # The first layers are dense, as in Kimi K2: so near the embedding, routing learns slowly.
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList()
        for i in range(config.layers):
            self.layers.append(self.make_block(config, dense=i < config.dense_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

        # A head of zeros gives all tokens the same probability, so the first loss is log(vocab).
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.zeros_(self.head.weight)
        self.mtp = MTP(config, self.make_block) if config.mtp else None
        self.extend_window(config.yarn_factor)

    def make_block(self, config, dense):
        return Block(config, dense)

    def extend_window(self, factor):
        """Stretch the window to config.context * factor tokens (the long-context stage)."""
        self.config = c = replace(self.config, yarn_factor=factor)
        frequency, scale = rope_frequencies(
            c.qk_rope, c.rope_theta, c.context, factor, c.yarn_fast, c.yarn_slow, c.yarn_mscale
        )
        # A buffer moves with the model. This one follows from the configuration, so no checkpoint
        # holds it.
        self.register_buffer("frequency", frequency.to(self.embed.weight.device), persistent=False)
        for module in self.modules():
            if isinstance(module, Attention):
                module.config, module.scale = c, scale

    def compute_in(self, dtype):
        """Matrix products in `dtype`; weights, residual stream, norms, router and softmax stay in
        fp32."""
        # A norm stands before every product, and a product follows the dtype of what comes in.
        for module in self.modules():
            if isinstance(module, (RMSNorm, Model)):
                module.dtype = dtype
        return self

    def rotary_cos_sin(self, positions):
        """positions (B or 1, T) -> cos and sin (B or 1, T, 1, qk_rope)"""
        return rope_cos_sin(positions.float()[..., None, None] * self.frequency)

    def embed_tokens(self, tokens):
        """tokens (B, T) -> (B, T, D) in fp32: the gradient of a frequent token is a sum over its
        places, which then adds up in fp32 too"""
        return F.embedding(tokens, self.embed.weight.float())

    def forward(self, tokens, positions=None, replay=None, record=None):
        """tokens (B, T), -1 where there is none (padding: computed as token 0, and no router counts
        it) -> hidden (B, T, D). positions (T,): where these tokens stand in the whole sequence,
        when this rank holds only a part. replay (B, T, L, K): experts to take at the L MoE layers,
        -1 = free; record: a list that receives the choices, one (B, T, K) per MoE layer."""
        # Where the sequence is whole, attention is causal without a mask. A part of a sequence
        # needs a mask that compares positions; the keys' are gathered as their entries are.
        mask = None
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        else:
            keys = self.layers[0].attn.gather_entries(positions.view(1, -1, 1))[0, :, 0]  # (S,)
            mask = (keys <= positions[:, None])[None, None]  # (1, 1, T, S)
        real = tokens >= 0 if self.training else None
        return self.run_layers(tokens.clamp(min=0), positions[None], mask, replay, record, real)

    def run_layers(self, tokens, positions, mask, replay=None, record=None, real=None, stores=()):
        """All layers, in training and in sampling: tokens (B, T), positions (B or 1, T) -> hidden
        (B, T, D). replay, record: see forward; real: see MoE.forward; stores: for each layer what
        Attention.forward takes as store, or none"""
        cos, sin = self.rotary_cos_sin(positions)
        x = self.embed_tokens(tokens)  # (B, T, D)

        # Each MoE layer has its own column of the replay, dense layers have none.
        moe_layer = 0
        for layer, block in enumerate(self.layers):
            replayed, store = None, stores[layer] if stores else None
            if isinstance(block.ffn, MoE):
                if replay is not None:
                    replayed = replay[:, :, moe_layer]  # (B, T, K)
                moe_layer += 1
            x = self.run_block(block, x, cos, sin, mask, store, replayed, record, real)
        return x

    def run_block(self, block, *inputs):
        """One layer. With `recompute` only its input is kept, and its backward computes the rest
        again: less memory for a third more work."""
        if not (self.recompute and torch.is_grad_enabled()):
            return block(*inputs)
        return checkpoint(
            block,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), without_counting_load(block)),
        )

    def locate_in_cache(self, tokens, cache, rows, start, keys=None):
        """tokens (B, T), rows (a slice or a list), start (B,): the position of each row's first
        token -> where Cache.update stores and reads (rows, places, length), the positions (B, T),
        and the mask of what these tokens may look at (B, 1, T, S). keys: see decode"""
        (room, T), device = (cache.data.shape[2], tokens.shape[1]), tokens.device
        if keys is None:
            # Lists are known to Python: it need not wait for a GPU to say where the last token
            # stands. Keys up to there, rounded up: a CPU compiles its kernels for every length
            # anew.
            start = start.tolist() if torch.is_tensor(start) else start
            assert max(start) < room, f"position {max(start)} in a cache of {room} tokens"
            keys = -(-(max(start) + T) // 64) * 64
        length = min(room, keys)

        # Each sequence has a length of its own so far, so the rows begin at different positions.
        row, first = rows, start  # (B,) each
        if isinstance(rows, slice):
            row = torch.arange(cache.data.shape[1], device=device)[rows]
        elif not torch.is_tensor(rows):
            row = rows = torch.tensor(rows).to(device, non_blocking=True)
        if not torch.is_tensor(start):
            first = torch.tensor(start).to(device, non_blocking=True)
        positions = first[:, None] + torch.arange(T, device=device)  # (B, T)
        positions = positions.clamp(max=room - 1)  # only padding reaches so far

        # Causal: a token looks at what stands in its own sequence up to itself.
        later = torch.arange(length, device=device) > positions[..., None]  # (B, T, S)
        mask = torch.zeros(later.shape, dtype=cache.data.dtype, device=device)
        mask = mask.masked_fill_(later, -torch.inf)[:, None]  # (B, 1, T, S)
        return (rows, (row[:, None], positions), length), positions, mask

    def decode(self, tokens, cache, rows, start, record=None, keys=None):
        """tokens (B, T) continue the cached sequences `rows` (a slice, a list or a tensor) at
        start (B,), a tensor or a list -> hidden (B, T, D). Padding at the end of a row is harmless:
        its entries are masked now and overwritten later. No real token reads the cache's last
        place, so make the cache one longer than the window. record: gets the experts, one
        (1, B * T, K) per MoE layer. keys: how many entries of each row are looked at, up to the
        last of these tokens at least; None: as few as that, which waits for a GPU where start is a
        tensor there."""
        place, positions, mask = self.locate_in_cache(tokens, cache, rows, start, keys)

        # As forward, but each layer stores its entries and attends to all that are stored.
        stores = [partial(cache.update, layer, *place) for layer in range(len(self.layers))]
        choices = []
        x = self.run_layers(tokens, positions, mask, record=choices, stores=stores)
        if record is not None:
            record += [choice.flatten(0, 1)[None] for choice in choices]
        return x

    def draft_logits(self, hidden, following, cache=None, rows=None, start=None):
        """hidden (B, T, D) and the token after each (B, T) -> the MTP head's logits (B, T, vocab)
        for the token after that. Embedding and output head are the model's, but this gradient does
        not reach them: the draft learns, the model stays."""
        assert (
            self.mtp is not None
        ), "this model has no head to draft with: build it with ModelConfig(mtp=1)"
        # Everything that comes from the model is detached on its way into the head, and out of it.
        hidden, embedded = hidden.detach(), F.embedding(following, self.embed.weight.detach())
        x = self.run_mtp(hidden, embedded, following, cache, rows, start)
        return F.linear(x, self.head.weight.detach().to(x.dtype)).float()

    def run_mtp(self, hidden, embedded, following, cache, rows, start):
        """The MTP head on whole sequences, or on tokens that continue those of a cache"""
        if cache is None:
            positions = torch.arange(following.shape[1], device=following.device)
            return self.mtp(hidden, embedded, *self.rotary_cos_sin(positions[None]))
        place, positions, mask = self.locate_in_cache(following, cache, rows, start)
        update = partial(cache.update, len(self.layers), *place)
        return self.mtp(hidden, embedded, *self.rotary_cos_sin(positions), mask, update)

    def logits(self, hidden):
        """hidden (..., D) -> logits (..., vocab), fp32"""
        return F.linear(self.norm(hidden), self.head.weight.to(self.norm.dtype)).float()

    def logprobs(self, hidden, targets, temperature=1.0, where=None):
        """Log-probs of the targets (B, T), fp32: the cross-entropy of training. where (B, T):
        compute these only, 0 elsewhere."""
        # Logits, as wide as the vocabulary, are the largest tensor of a step: they are computed for
        # the places asked for only.
        if where is not None:
            hidden, chosen = hidden[where], targets[where]
        else:
            chosen = targets
        logits = divide_by_temperature(self.logits(hidden), temperature)
        found = logits.log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
        if where is None:
            return found
        return torch.zeros(targets.shape, device=found.device).masked_scatter(where, found)


# ---------------------------------------------------------------- balancing and drafting


def update_router_bias(model, rate=1e-3, reduce=lambda counts: counts):
    """Aux-loss-free balancing (arXiv 2408.15664): one step of every router's bias from the tokens
    counted since the last call. `reduce` sums counts over data ranks, so that all ranks move alike.
    Returns the worst load / mean load."""
    ratios = []
    for block in model.layers:
        if isinstance(block.ffn, MoE):
            router = block.ffn.router
            load = reduce(router.load.clone())
            ratios.append(load.max() / load.mean().clamp(min=1))
            # By a constant step, whatever the distance: one odd batch cannot throw the bias far.
            router.bias += rate * torch.sign(load.mean() - load)
            router.load.zero_()
    # One read for the ratios of all layers, since each read waits for the GPU.
    return max(1.0, float(torch.stack(ratios).max())) if ratios else 1.0


def mtp_loss(model, tokens, hidden, places=None):
    """Self-distillation, as Composer's: KL from the main head's distribution at t + 1 to the
    draft's at t. One sampled token in place of the distribution would teach less.

    tokens (B, T), -1 = padding; hidden (B, T, D) = model(tokens) of whole sequences. -> the sum
    over all places that a real token follows, divided by `places` (default: their number, which
    gives the mean)."""
    following = tokens[:, 1:]  # (B, T-1)
    real = following >= 0
    # The teacher is the model itself, one token later: it has read what the draft has to guess.
    with torch.no_grad():
        target = model.logits(hidden[:, 1:]).log_softmax(-1)  # (B, T-1, vocab)
    draft = model.draft_logits(hidden[:, :-1], following.clamp(min=0)).log_softmax(-1)
    divergence = F.kl_div(draft, target, reduction="none", log_target=True).sum(-1)  # (B, T-1)
    return (divergence * real).sum() / (real.sum().clamp(min=1) if places is None else places)


@torch.no_grad()
def count_draft_hits(model, tokens, hidden):
    """tokens, hidden: as for mtp_loss -> at how many places the draft is the main head's own first
    choice. Divided by the number of places: the share of drafts that speculative decoding
    accepts."""
    following = tokens[:, 1:]
    draft = model.draft_logits(hidden[:, :-1], following.clamp(min=0)).argmax(-1)
    choice = model.logits(hidden[:, 1:]).argmax(-1)
    hits = (draft == choice) & (following >= 0)
    return hits.sum()


@torch.inference_mode()
def decode_speculatively(model, prompt, count):
    """Greedy decoding with the MTP head as the draft: prompt (T,) -> (a list of `count` tokens,
    share of drafts that were right). A pass reads the last sure token and the draft of the next
    one. If the model itself chooses that draft, its choice after the draft counts too: two tokens.
    The draft's quality changes the speed only (except at ties: two tokens read in one pass may
    round unlike one)."""
    tokens, draft = prompt.tolist(), None
    read = 0  # tokens that are in the cache
    passes = right = 0
    cache = Cache(model, 1, len(prompt) + count + 1)
    while len(tokens) < len(prompt) + count:
        # Read the sure tokens that are not in the cache yet, and then the draft.
        sure, fed = len(tokens) - read, tokens[read:]
        if passes > 0:
            fed = fed + [draft]
        place = (cache, slice(0, 1), torch.tensor([read], device=prompt.device))
        hidden = model.decode(torch.tensor([fed], device=prompt.device), *place)

        # The model's own choice after every token read. After the last sure token it is the next
        # sure one; if that is the draft, the choice after the draft is sure too.
        choice = model.logits(hidden)[0].argmax(-1).tolist()
        hit = choice[sure - 1] == draft
        tokens += choice[sure - 1 : sure + hit]

        # The next draft: the head reads each token that was kept and its follower. The entry of a
        # wrong draft is not counted as read, so it is overwritten.
        kept = sure + hit
        following = torch.tensor([tokens[read + 1 : read + 1 + kept]], device=prompt.device)
        draft = int(model.draft_logits(hidden[:, :kept], following, *place)[0, -1].argmax())
        read, passes, right = read + kept, passes + 1, right + hit
    return tokens[len(prompt) : len(prompt) + count], right / max(passes - 1, 1)


def parameters_per_token(config):
    """(total, active) parameters: what is stored, and what one token meets."""
    # All experts are stored, K of E work. A token meets everything else.
    total = sum(p.numel() for p in config.build_model().parameters())
    expert = 3 * config.dim * config.expert_ffn
    moe_layers = max(0, config.layers - config.dense_layers)
    idle = moe_layers * (config.experts - config.num_experts_per_tok) * expert
    return total, total - idle


# ---------------------------------------------------------------- demo


def python_bytes(limit=1_000_000):
    """Real Python to train on: the top of this interpreter's standard library, as bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(p.read_bytes() for p in sorted(root.glob("*.py")))[:limit]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def train_small(config, data, rate, steps=150):
    """Next-byte prediction -> the model, losses, and loads (steps, E) of the first MoE layer as
    shares"""
    torch.manual_seed(0)
    model = Model(config)

    # Adam's two running means, and the router whose loads are drawn.
    parameters = list(model.parameters())
    means = [torch.zeros_like(p) for p in parameters]
    squares = [torch.zeros_like(p) for p in parameters]
    router = next(block.ffn.router for block in model.layers if isinstance(block.ffn, MoE))
    losses, loads = [], []
    for step in range(1, steps + 1):
        # Four stretches of the text, from anywhere.
        starts = torch.randint(len(data) - 65, (4,)).tolist()
        rows = torch.stack([data[i : i + 65] for i in starts])  # (4, 65)
        tokens, targets = rows[:, :-1], rows[:, 1:]  # (4, 64) each

        # The MTP head's loss is simply added: it reaches no weight of the model itself.
        hidden = model(tokens)
        loss = F.cross_entropy(model.logits(hidden).flatten(0, 1), targets.flatten())
        whole = loss + mtp_loss(model, tokens, hidden) if config.mtp else loss
        gradients = torch.autograd.grad(whole, parameters)

        # Adam by hand: torch.optim would load the compiler first, which takes as long as the
        # training.
        with torch.no_grad():
            for p, g, mean, square in zip(parameters, gradients, means, squares):
                mean.lerp_(g, 0.1)
                square.lerp_(g * g, 0.05)
                deviation = (square / (1 - 0.95**step)).sqrt_().add_(1e-8)
                p.addcdiv_(mean, deviation, value=-3e-3 / (1 - 0.9**step))

        losses.append(loss.item())
        loads.append(router.load / router.load.sum())
        update_router_bias(model, rate)
    return model.eval(), losses, torch.stack(loads)


DEMO = ModelConfig(
    vocab=256, dim=64, layers=2, heads=2, kv_lora=32, dense_ffn=128, experts=8, expert_ffn=32
)


def demo():
    from demos.demo_figures import draw_loads

    # The same training twice: without the bias, and with it. Only the second has an MTP head.
    torch.set_num_threads(1)
    data, curves, busiest = python_bytes(), {}, []
    for name, rate, mtp in (("without balancing", 0.0, 0), ("with the bias", 2e-2, 1)):
        model, losses, loads = train_small(replace(DEMO, mtp=mtp), data, rate)
        curves[name] = losses, loads
        shares = loads[-20:].mean(0).sort(descending=True)[0].tolist()
        busiest.append(shares[0])
        print(
            f"{name:18s} loss {losses[0]:.2f} -> {sum(losses[-20:]) / 20:.2f}   "
            "shares of the last 20 steps: " + " ".join(f"{share:.2f}" for share in shares)
        )
    draw_loads(curves, "out/moe.png")

    # The model that was trained last is the one with the head that drafts.
    text, right = decode_speculatively(model, data[:64], 100)
    print(
        f"MTP head as the draft: {right:.0%} of its bytes are the model's own choice, "
        f"{1 + right:.2f} bytes per pass; it goes on with {bytes(text)[:24]!r}"
    )
    total, active = parameters_per_token(DEMO)
    before, after = busiest
    print(
        f"{total:,} parameters, {active:,} of them at work on a token. The bias that only moves "
        f"the choice takes the busiest of {DEMO.experts} experts from {before:.0%} to {after:.0%} "
        f"of the tokens (even: {1 / DEMO.experts:.0%}); out/moe.png"
    )


def main(argv):
    from demos.demonstration import run_demo

    about = "Expert load with and without the balancing bias."
    run_demo("moe.py", about, demo, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
