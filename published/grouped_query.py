"""published/grouped_query.py: what open models do otherwise than Kimi K2, as subclasses of moe's.

moe.Model has the shape of Kimi K2 alone. The Qwen families, and in some parts DeepSeek, differ from
it. A VariantConfig says in which parts, and VariantModel is built of the subclasses below.

    grouped-query attention   k_t, v_t of a few heads, each shared by several query heads; the cache
                              holds both. Biases (Qwen2) or norms of every head (Qwen3)
    softmax routing           s = softmax(W_router x), and no bias that balances (Qwen3-MoE)
    groups of experts         a token chooses among the experts of its best groups (DeepSeek-V3)
    tied embeddings           the output head is the embedding
    YaRN's temperature        on cos and sin, where a whole head is turned, not on the scores

Stated by the published config.json and code of these families (where transformers is
installed, tests/test_published_checkpoint.py compares the logits). Left out: sliding windows,
attention of other kinds.

Letters: as in moe.py; G key heads.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn as nn

import moe
from moe import ModelConfig, RMSNorm, apply_rotary_emb, init_weight, linear


@dataclass(frozen=True)
class VariantConfig(ModelConfig):
    attention: str = "mla"  # "mla" as Kimi and DeepSeek, "gqa" as Qwen3
    kv_heads: int = 2  # gqa only
    qk_norm: bool = False  # gqa: RMSNorm of every head's query and key (Qwen3)
    qkv_bias: bool = False  # gqa: (Qwen2)
    tie: bool = False  # the head's weight is the embedding's
    scoring: str = "sigmoid"  # or "softmax" (Qwen3-MoE)
    # experts stand in groups and a token chooses among its best ones (DeepSeek-V3: 8 groups, best
    # 4)
    n_group: int = 1
    topk_group: int = 1
    yarn_amplitude: float = 1.0  # factor on cos and sin, where Qwen puts the temperature

    def __post_init__(self):
        super().__post_init__()

        # Only the variants that exist, and only where they have an effect.
        if self.attention not in ("mla", "gqa"):
            raise ValueError(f"attention must be mla or gqa, not {self.attention!r}")
        if self.scoring not in ("sigmoid", "softmax"):
            raise ValueError(f"scoring must be sigmoid or softmax, not {self.scoring!r}")
        if self.attention != "gqa" and (self.qk_norm or self.qkv_bias):
            raise ValueError("qk_norm and qkv_bias are for gqa")

        # Groups are of equal size, of two experts at least (a group is worth its two best), and the
        # chosen groups must hold enough experts for a token.
        size, rest = divmod(self.experts, self.n_group)
        if self.n_group != 1 and (rest or size < 2):
            raise ValueError(
                f"n_group={self.n_group} groups of two or more out of experts={self.experts}"
            )
        if not self.num_experts_per_tok <= size * self.topk_group <= self.experts:
            raise ValueError(
                f"topk_group={self.topk_group} of n_group={self.n_group} groups "
                f"of {size} experts must hold num_experts_per_tok={self.num_experts_per_tok}"
            )

    @property
    def entry_width(self):
        if self.attention == "mla":
            return super().entry_width
        return self.kv_heads * (self.qk_nope + self.qk_rope + self.v_dim)

    def build_model(self):
        return VariantModel(self)


# What a VariantConfig says of a model in the shape of Kimi K2. (kv_heads means nothing there.)
KIMI_SHAPE = {
    field.name: field.default
    for field in fields(VariantConfig)
    if field.name not in {"kv_heads", *(f.name for f in fields(ModelConfig))}
}


# A field of earlier versions, which no flag could change
GONE = "plausible"


def config_of(values):
    """{field: value}, as a checkpoint keeps a model's configuration -> a ModelConfig where the
    model has the shape of Kimi K2, else a VariantConfig. Checkpoints of earlier versions name the
    fields of both, so the values decide and not the names."""
    values = {name: value for name, value in values.items() if name != GONE}
    if all(values.get(name, default) == default for name, default in KIMI_SHAPE.items()):
        own = {name: values[name] for name in values if name not in {"kv_heads", *KIMI_SHAPE}}
        return ModelConfig(**own)
    return VariantConfig(**values)


def as_variant(config):
    """A ModelConfig or a VariantConfig -> the same configuration as a VariantConfig"""
    return VariantConfig(**vars(config))


class GroupedQueryAttention(moe.Attention):
    """H query heads share G key and value heads. The cache's entry of a token holds, for each of
    the G heads, its key after RoPE and its value."""

    def __init__(self, config):
        # Not Attention's: it would draw weights that this attention does not have.
        nn.Module.__init__(self)
        c = self.config = config
        self.scale = 1.0
        self.head_dim = c.qk_nope + c.qk_rope

        # Queries, in full or by way of a narrow vector, as in Attention.
        if c.q_lora:
            self.wq_a = init_weight(c.q_lora, c.dim)
            self.q_norm = RMSNorm(c.q_lora, 1e-6)
        self.wq = init_weight(c.heads, self.head_dim, c.q_lora or c.dim)

        # Keys and values straight from the input, for G heads.
        self.wk = init_weight(c.kv_heads, self.head_dim, c.dim)
        self.wv = init_weight(c.kv_heads, c.v_dim, c.dim)

        # What the families add: norms of every head (Qwen3), biases (Qwen2).
        if c.qk_norm:
            self.q_head_norm = RMSNorm(self.head_dim, c.norm_eps)
            self.k_head_norm = RMSNorm(self.head_dim, c.norm_eps)
        if c.qkv_bias:
            # Flat, so that AdamW takes them: matrices go to Muon.
            self.bq, self.bk, self.bv = (
                nn.Parameter(torch.zeros(w.shape[0] * w.shape[1]))
                for w in (self.wq, self.wk, self.wv)
            )

        # zero, as in Attention: an untrained layer changes nothing
        self.wo = init_weight(c.dim, c.heads * c.v_dim, std=0)

    def add_bias_and_norm(self, y, name):
        """y: the queries, keys or values of all heads (B, T, heads, dims); name: "q", "k" or "v" ->
        the same with the biases and norms that this model has"""
        if self.config.qkv_bias:
            y = y + getattr(self, "b" + name).to(y.dtype).view(y.shape[-2:])
        if self.config.qk_norm and name != "v":
            y = getattr(self, name + "_head_norm")(y)
        return y

    def project_qkv(self, x, cos, sin):
        """x (B, T, D) -> queries (B, T, H, N + R) and entries (B, T, G (N + R + V))"""
        c = self.config
        narrow = self.q_norm(linear(x, self.wq_a)) if c.q_lora else x
        q = self.add_bias_and_norm(linear(narrow, self.wq), "q")  # (B, T, H, N + R)
        k = self.add_bias_and_norm(linear(x, self.wk), "k")  # (B, T, G, N + R)
        v = self.add_bias_and_norm(linear(x, self.wv), "v")  # (B, T, G, V)
        q, k = (self.turn(y, cos, sin) for y in (q, k))
        return q, torch.cat((k, v), -1).flatten(2)

    def turn(self, y, cos, sin):
        """RoPE on the last R dims of every head: y (B, T, heads, N + R)"""
        c = self.config
        nope, rope = y.split((c.qk_nope, c.qk_rope), -1)
        return torch.cat((nope, apply_rotary_emb(rope, cos, sin)), -1)

    def keys_values(self, entries):
        """entries (B, S, width) -> keys (B, S, H, N + R), values (B, S, H, V). Each of the G heads
        is repeated for the H / G query heads that share it."""
        c = self.config
        heads = entries.unflatten(-1, (c.kv_heads, -1))  # (B, S, G, N + R + V)
        repeated = heads.repeat_interleave(c.heads // c.kv_heads, 2)  # (B, S, H, N + R + V)
        return repeated.split((self.head_dim, c.v_dim), -1)


class VariantRouter(moe.Router):
    """A router that can also score by softmax (Qwen3-MoE) and choose by groups (DeepSeek-V3)"""

    def __init__(self, config):
        super().__init__(config)
        self.softmax = config.scoring == "softmax"
        self.n_group, self.topk_group = config.n_group, config.topk_group

    def score_experts(self, x):
        if not self.softmax:
            return super().score_experts(x)
        return nn.functional.linear(x.float(), self.weight.float()).softmax(1)

    def rule_out_experts(self, biased):
        """biased (M, E) -> the same, with -inf for experts outside of the token's best groups"""
        if self.n_group == 1:
            return biased

        # A group's score is the sum of its two best experts' scores.
        groups = biased.unflatten(1, (self.n_group, -1))  # (M, groups, E / groups)
        group_scores = groups.topk(2)[0].sum(-1)  # (M, groups)

        # True for the groups that the token does not choose from, and so for all their experts.
        kept = group_scores.topk(self.topk_group)[1]  # (M, topk_group)
        out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
        return biased.masked_fill(out.repeat_interleave(groups.shape[2], 1), -torch.inf)


def variant_mixture(config):
    """moe.MoE with a VariantRouter"""
    return moe.MoE(config, router=VariantRouter)


class VariantModel(moe.Model):
    """moe.Model of a VariantConfig"""

    def __init__(self, config):
        super().__init__(config)
        if config.tie:
            self.head.weight = self.embed.weight

    def make_block(self, config, dense):
        attention = GroupedQueryAttention if config.attention == "gqa" else moe.Attention
        return moe.Block(config, dense, attention, variant_mixture)

    def rotary_cos_sin(self, positions):
        cos, sin = super().rotary_cos_sin(positions)
        return self.config.yarn_amplitude * cos, self.config.yarn_amplitude * sin
