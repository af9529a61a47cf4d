"""published/families.py: which published architectures are known, and what they call things.

config.json describes a model in its family's own words. `read_config` translates it into a
VariantConfig (grouped_query.py), `config_json` translates back, and `hf_tensor_map` says what each
of our weights is called in the files and which shape it has there. Known are DeepSeek-V3 and Kimi
K2 (latent attention), Qwen2, Qwen3 and Qwen3-MoE (grouped queries).

One rule for all of it: a setting that nobody here reads is refused by name, unless it is off or is
known to change nothing (UNUSED_SETTINGS). Ignored in silence it would give another model, one that
loads and runs and is a little worse. For the same reason a setting that two readers take in two
ways (YaRN's mscale, two keys for RoPE) is refused where the two would differ.

    read_config(path)               config.json -> VariantConfig, and what else loading.py needs
    config_json(config)             VariantConfig -> config.json; a ValueError if no family has this
    hf_tensor_map(config, state)    our weights and theirs

Left out: everything but text (of Kimi K2.5 the language model is read, its vision tower is not),
sliding windows, and variants of RoPE other than plain and YaRN.
"""

import math

from published.grouped_query import VariantConfig, as_variant
from published.safetensors import parse_json, read_bytes

# ---------------------------------------------------------------- the settings that are known

# model_type: the class of transformers
FAMILIES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Settings of which one value is supported, and that value
SUPPORTED_VALUES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "partial_rotary_factor": 1,
    "truncate": True,
    "is_causal": True,
    "attention_dropout": 0,
    "mlp_bias": False,
    "attn_factor": 1,
    "extrapolation_factor": 1,
}
# Settings that say nothing about what a forward computes: names, ids of tokens, losses, how text is
# generated, how it was trained.
UNUSED_SETTINGS = set("""
    architectures auto_map dtype torch_dtype attn_implementation name_or_path transformers_version
    tokenizer_class use_cache initializer_range pretraining_tp ep_size seq_aux aux_loss_alpha
    router_aux_loss_coef output_router_logits num_nextn_predict_layers num_mtp_layers
    max_window_layers sliding_window bos_token_id eos_token_id pad_token_id sep_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id id2label label2id problem_type
    finetuning_task task_specific_params prefix keys_to_ignore_at_inference return_dict
    output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss pruned_heads
    chunk_size_feed_forward is_encoder_decoder is_decoder tie_encoder_decoder max_length min_length
    do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens""".split())
# Settings that are read of every family, or checked against SUPPORTED_VALUES
READ_SETTINGS = SUPPORTED_VALUES.keys() | set("""
    model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps tie_word_embeddings max_position_embeddings rope_theta
    rope_scaling rope_parameters layer_types quantization_config""".split())
# ... of one family
FAMILY_READS = {
    "qwen2": {"qkv_bias"},
    "qwen3": {"use_qk_norm"},
    "qwen3_moe": set("""
        use_qk_norm mlp_only_layers num_experts num_local_experts num_experts_per_tok
        moe_intermediate_size norm_topk_prob""".split()),
    "deepseek_v3": set("""
        q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim
        first_k_dense_replace n_routed_experts num_local_experts num_experts_per_tok
        n_shared_experts moe_intermediate_size routed_scaling_factor norm_topk_prob n_group
        topk_group rope_interleave""".split()),
}
# ... of plain RoPE, and of YaRN
ROPE_READS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
YARN_READS = ROPE_READS | set("""
    factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale
    mscale_all_dim truncate attn_factor extrapolation_factor""".split())


def refuse_unread(path, settings, read, where=""):
    """Raises a ValueError for the first setting that nobody here reads, unless it is off (null,
    false, 0, empty). It may change what the model computes: ignored in silence, it would give
    another model. Names that begin with an underscore or "unsloth" are notes."""
    for key, value in settings.items():
        if key not in read and value and not key.startswith(("_", "unsloth")):
            raise ValueError(
                f"{path}: {where}{key} = {value!r:.60} is not known here: "
                "delete it if the model computes the same without it"
            )


class Settings:
    """config.json, which is asked for one setting at a time. The caller says of which kind the
    setting is, its bounds, and its default where the file says nothing or null. With a default of
    None the file must say it. A wrong value is a ValueError that names the key and the file."""

    def __init__(self, raw, path):
        self.raw, self.path = raw, path
        for key, only in SUPPORTED_VALUES.items():
            if raw.get(key) not in (None, only):
                raise ValueError(
                    f"{path}: {key} = {raw[key]!r:.60} is not supported, only {only!r}"
                )

    def integer(self, key, default=None, low=1, high=1 << 20):
        value = self.value(key, default)
        # type(): True is an int as well
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{self.path}: {key} = {value!r:.60}, not int from {low} to {high}")
        return value

    def number(self, key, default, low, high):
        value = self.value(key, default)
        # an int beyond `high` may be too large for a float
        if type(value) is int and abs(value) <= high:
            value = float(value)
        if type(value) is not float or not low <= value <= high:
            raise ValueError(f"{self.path}: {key} = {value!r:.60}, not float from {low} to {high}")
        return value

    def flag(self, key, default):
        value = self.value(key, default)
        if type(value) is not bool:
            raise ValueError(f"{self.path}: {key} = {value!r:.60}, not true or false")
        return value

    def value(self, key, default):
        found = self.raw.get(key)
        return default if found is None else found


# ---------------------------------------------------------------- config.json -> VariantConfig


def read_config(path):
    """config.json -> (VariantConfig, Settings of the language model, prefix of the names of its
    tensors)"""
    # 1) A family that is known. Kimi K2 is a DeepSeek-V3 of other sizes.
    raw, prefix = read_language_model(path)
    family = "deepseek_v3" if raw.get("model_type") == "kimi_k2" else raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(
            f"{path}: model_type {family!r:.60} is not one of {known}, kimi_k2, kimi_k25"
        )

    # 2) No setting that would change the model and is not read.
    settings = Settings(raw, path)
    refuse_unread(path, raw, READ_SETTINGS | UNUSED_SETTINGS | FAMILY_READS[family])
    refuse_missing_parts(path, raw, family)

    layers = settings.integer("num_hidden_layers", high=1024)
    if raw.get("layer_types") not in (None, ["full_attention"] * layers):
        raise ValueError(
            f"{path}: layer_types other than full_attention in every layer are not supported"
        )

    # 3) What the family says in its own words, and what all families say alike.
    if family == "deepseek_v3":
        own = mla_settings(settings)
    else:
        own = gqa_settings(settings, family, layers)
    own |= rope_settings(settings, mla=family == "deepseek_v3")
    own |= dict(
        vocab=settings.integer("vocab_size", high=1 << 24),
        dim=settings.integer("hidden_size"),
        layers=layers,
        heads=settings.integer("num_attention_heads", high=1 << 12),
        dense_ffn=settings.integer("intermediate_size"),
        tie=settings.flag("tie_word_embeddings", False),
        norm_eps=settings.number("rms_norm_eps", 1e-6, 0, 1),
    )
    try:
        config = VariantConfig(**own)
    except ValueError as error:
        # VariantConfig refuses sizes that do not go together. It knows no file.
        raise ValueError(f"{path}: {error}") from None
    return config, settings, prefix


def read_language_model(path):
    """config.json -> (the settings of the language model, prefix of its tensors' names). Kimi K2.5
    holds its language model under text_config, beside a vision tower."""
    raw = parse_json(read_bytes(path, 1 << 20), path)
    if raw.get("model_type") != "kimi_k25" or not isinstance(raw.get("text_config"), dict):
        return raw, ""
    inner = {"model_type": "kimi_k2", **raw["text_config"]}

    # Only the settings inside text_config are read. One beside it that says something else about
    # the language model is refused.
    for key in sorted((READ_SETTINGS | FAMILY_READS["deepseek_v3"]) - {"model_type"}):
        if raw.get(key) and raw[key] != inner.get(key):
            raise ValueError(
                f"{path}: {key} stands beside text_config and not, or otherwise, inside it: "
                "put it inside"
            )
    return inner, "language_model."


def refuse_missing_parts(path, raw, family):
    """Raises a ValueError where a config.json says that Qwen2 has no biases on queries, keys and
    values, or Qwen3 no norms on queries and keys: these families always have them."""
    without_biases = family == "qwen2" and raw.get("qkv_bias") is False
    without_norms = family in ("qwen3", "qwen3_moe") and raw.get("use_qk_norm") is False
    if without_biases or without_norms:
        raise ValueError(
            f"{path}: qkv_bias or use_qk_norm = False is not supported: {family} has them"
        )


def mla_settings(settings):
    """The fields of VariantConfig about latent attention, and about the experts beside it"""
    # null means full queries, without the narrow vector
    has_q_lora = settings.raw.get("q_lora_rank") is not None
    return dict(
        attention="mla",
        q_lora=settings.integer("q_lora_rank") if has_q_lora else 0,
        kv_lora=settings.integer("kv_lora_rank"),
        qk_nope=settings.integer("qk_nope_head_dim"),
        qk_rope=settings.integer("qk_rope_head_dim"),
        v_dim=settings.integer("v_head_dim"),
        dense_layers=settings.integer("first_k_dense_replace", 0, 0),
        experts=settings.integer("n_routed_experts", high=1 << 12),
        num_experts_per_tok=settings.integer("num_experts_per_tok"),
        shared=settings.integer("n_shared_experts", 0, 0, 64),
        expert_ffn=settings.integer("moe_intermediate_size"),
        norm_gates=settings.flag("norm_topk_prob", True),
        # The file must say these: readers differ in their defaults.
        route_scale=settings.number("routed_scaling_factor", None, 0, 1e3),
        n_group=settings.integer("n_group"),
        topk_group=settings.integer("topk_group"),
    )


def gqa_settings(settings, family, layers):
    """The fields of VariantConfig about grouped queries, and about the experts of Qwen3-MoE"""
    # Where the file does not say how wide a head is, transformers takes these widths.
    heads = settings.integer("num_attention_heads")
    width = 128 if family == "qwen3" else max(settings.integer("hidden_size") // heads, 1)
    width = settings.integer("head_dim", width)

    # RoPE turns whole heads (qk_nope = 0). Without experts all layers are dense.
    found = dict(
        attention="gqa",
        kv_heads=settings.integer("num_key_value_heads", heads),
        qk_nope=0,
        qk_rope=width,
        v_dim=width,
        qk_norm=family != "qwen2",
        qkv_bias=family == "qwen2",
        dense_layers=layers,
    )
    if heads % found["kv_heads"]:
        raise ValueError(
            f"{settings.path}: num_attention_heads is no multiple of num_key_value_heads"
        )
    if family == "qwen3_moe":
        found |= qwen3_moe_settings(settings)
    return found


def qwen3_moe_settings(settings):
    """The fields of VariantConfig about the experts of Qwen3-MoE"""
    # The number of experts has two names. Where both are there, they must say the same.
    raw = settings.raw
    key = "num_experts" if "num_experts" in raw else "num_local_experts"
    if raw.get("num_local_experts", raw.get(key)) != raw.get(key):
        raise ValueError(
            f"{settings.path}: num_experts and num_local_experts differ: "
            "delete the one that is not meant"
        )

    # Dense layers must be the first ones, as they are in moe.Model.
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise ValueError(
            f"{settings.path}: mlp_only_layers = {dense!r:.60} is not supported, "
            "only the first ones"
        )

    return dict(
        dense_layers=len(dense),
        experts=settings.integer(key, high=1 << 12),
        num_experts_per_tok=settings.integer("num_experts_per_tok"),
        shared=0,
        expert_ffn=settings.integer("moe_intermediate_size"),
        scoring="softmax",
        norm_gates=settings.flag("norm_topk_prob", False),
    )


def rope_settings(settings, mla):
    """The fields of VariantConfig about RoPE and YaRN. Published models put YaRN's temperature on
    cos and sin (attention_factor), or on the scores (mscale)."""
    rope = read_rope_section(settings)
    is_yarn = rope.get("rope_type") == "yarn"
    refuse_unread(settings.path, rope, YARN_READS if is_yarn else ROPE_READS, "rope_scaling: ")

    # Outside of RoPE's section, config.json may also give the base and the share of dimensions that
    # are turned. The section's own values come first.
    for key in ("partial_rotary_factor", "rope_theta"):
        if key in settings.raw:
            rope = {key: settings.raw[key], **rope}
    rope = Settings(rope, settings.path)
    length = settings.integer("max_position_embeddings", high=1 << 30)
    theta = rope.number("rope_theta", 1e4, 1.1, 1e12)
    if not is_yarn:
        return dict(rope_theta=theta, context=length)

    context = rope.integer("original_max_position_embeddings", length, high=1 << 30)
    factor = rope.number("factor", length / context, 1, 1e4)

    # 1) The temperature, by its two coefficients. The amplitude on cos and sin that follows from
    # them is only a default: the file may say it itself.
    mscale = rope.number("mscale", 0.0, 0, 10)
    all_dim = rope.number("mscale_all_dim", 0.0, 0, 10)
    refuse_one_mscale(rope, mscale, all_dim)
    if mscale and all_dim:
        amplitude = yarn_mscale(mscale, factor) / yarn_mscale(all_dim, factor)
    else:
        amplitude = yarn_mscale(1, factor)
    amplitude = rope.number("attention_factor", amplitude, 1e-3, 1e3)

    # 2) Which pairs of dimensions are slowed; and for latent attention alone the coefficient of a
    # temperature on the scores.
    return dict(
        rope_theta=theta,
        context=context,
        yarn_factor=factor,
        yarn_fast=rope.number("beta_fast", 32.0, 1e-3, 1e6),
        yarn_slow=rope.number("beta_slow", 1.0, 1e-3, 1e6),
        yarn_mscale=all_dim if mla else 0.0,
        yarn_amplitude=amplitude,
    )


def yarn_mscale(coefficient, factor):
    """YaRN's temperature for a context that is `factor` times as long"""
    return 0.1 * coefficient * math.log(factor) + 1


def read_rope_section(settings):
    """{setting: value} of RoPE. They stand under a new key, an old one, or both. Readers differ in
    which one they take, so both must say the same."""
    sections = []
    for key in ("rope_parameters", "rope_scaling"):
        found = settings.raw.get(key) or {}
        if not is_plain_rope_section(found):
            raise ValueError(
                f"{settings.path}: {key} {found!r:.80} is not supported, "
                "only yarn, the same for all layers"
            )
        # "type" is the old name of rope_type. The base may also stand outside of a section.
        if found:
            given = {key: value for key, value in found.items() if value is not None}
            known = {"rope_type": given.pop("type", "default"), **given}
            if settings.raw.get("rope_theta") is not None:
                known.setdefault("rope_theta", settings.raw["rope_theta"])
            sections.append(known)

    # Both in one dict. A base that stands in one of them is that of both.
    if not sections:
        return {}
    rope = {"rope_theta": None} | sections[0] | sections[-1]
    if any({"rope_theta": rope["rope_theta"]} | section != rope for section in sections):
        raise ValueError(
            f"{settings.path}: rope_parameters and rope_scaling do not say the same: "
            "delete the one that is not meant"
        )
    return rope


def is_plain_rope_section(found):
    """Is this plain RoPE or YaRN, with one setting for all layers?"""
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        return False
    return found.get("rope_type", found.get("type", "default")) in ("default", "yarn")


def refuse_one_mscale(rope, mscale, all_dim):
    """Raises a ValueError where a file sets one of mscale and mscale_all_dim: DeepSeek's own code
    and transformers then compute different temperatures. mscale = 1 alone is the default of both,
    and is taken."""
    both = mscale and all_dim
    neither = not all_dim and rope.raw.get("mscale") in (None, 1)
    if not both and not neither:
        raise ValueError(
            f"{rope.path}: rope_scaling: mscale = {rope.raw.get('mscale')!r:.40} with "
            f"mscale_all_dim = {rope.raw.get('mscale_all_dim')!r:.40} is not supported, "
            "only both above 0 or neither: readers differ in the rest"
        )


# ---------------------------------------------------------------- VariantConfig -> config.json


def config_json(config):
    """A VariantConfig or a ModelConfig -> config.json of the published architecture that it is an
    instance of, as a dict. A ValueError where there is none."""
    # 1) The architecture
    config = as_variant(config)
    family = find_family(config)
    if family is None:
        known = ", ".join(FAMILIES)
        raise ValueError(
            f"no published architecture has this attention, routing and norms; known: {known}"
        )

    # 2) What all families say alike
    raw = dict(
        architectures=[FAMILIES[family]],
        model_type=family,
        vocab_size=config.vocab,
        hidden_size=config.dim,
        intermediate_size=config.dense_ffn,
        num_hidden_layers=config.layers,
        attention_bias=False,
        num_attention_heads=config.heads,
        hidden_act="silu",
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie,
        max_position_embeddings=config.window,
    )

    # 3) Attention, and the experts where there are any
    if family == "deepseek_v3":
        raw |= mla_json(config)
    else:
        raw |= dict(
            num_key_value_heads=config.kv_heads, head_dim=config.qk_rope, use_sliding_window=False
        )
    if family in ("deepseek_v3", "qwen3_moe"):
        raw |= dict(
            num_experts_per_tok=config.num_experts_per_tok,
            moe_intermediate_size=config.expert_ffn,
            norm_topk_prob=config.norm_gates,
        )
    if family == "qwen3_moe":
        raw |= dict(
            num_experts=config.experts,
            mlp_only_layers=list(range(config.dense_layers)),
            decoder_sparse_step=1,
        )

    return raw | rope_json(config)


def find_family(config):
    """model_type of the published architecture that a configuration is an instance of, or None"""
    # Latent attention: DeepSeek-V3 has a sigmoid router.
    if config.attention == "mla":
        return "deepseek_v3" if config.scoring == "sigmoid" else None

    # Grouped queries: the published ones turn whole heads.
    if config.qk_nope or config.q_lora or config.v_dim != config.qk_rope:
        return None

    # Without experts, biases or norms tell Qwen2 from Qwen3. With experts there is Qwen3-MoE alone.
    if config.dense_layers >= config.layers and config.qkv_bias != config.qk_norm:
        return "qwen2" if config.qkv_bias else "qwen3"
    plain_routing = config.scoring == "softmax" and config.route_scale == config.n_group == 1
    if config.qk_norm and not config.qkv_bias and plain_routing and not config.shared:
        return "qwen3_moe"
    return None


def mla_json(config):
    """The settings of config.json about latent attention, and about the experts beside it"""
    return dict(
        num_key_value_heads=config.heads,
        q_lora_rank=config.q_lora or None,
        kv_lora_rank=config.kv_lora,
        qk_nope_head_dim=config.qk_nope,
        qk_rope_head_dim=config.qk_rope,
        v_head_dim=config.v_dim,
        n_shared_experts=config.shared or None,
        n_routed_experts=config.experts,
        routed_scaling_factor=config.route_scale,
        n_group=config.n_group,
        topk_group=config.topk_group,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        first_k_dense_replace=config.dense_layers,
        num_nextn_predict_layers=0,
        rope_interleave=True,
    )


def rope_json(config):
    """The settings of config.json about RoPE and YaRN"""
    if config.yarn_factor == config.yarn_amplitude == 1:
        return {"rope_theta": config.rope_theta}

    yarn = dict(
        type="yarn",
        rope_type="yarn",
        factor=float(config.yarn_factor),
        original_max_position_embeddings=config.context,
        beta_fast=config.yarn_fast,
        beta_slow=config.yarn_slow,
        attention_factor=config.yarn_amplitude,
    )

    # The temperature on the scores, where there is one (at a factor of 1 it is 1). Both
    # coefficients are written, since with one readers differ. The other one gives the amplitude to
    # those that know no attention_factor.
    if config.attention == "mla" and config.yarn_mscale and config.yarn_factor != 1:
        mscale = config.yarn_mscale
        if config.yarn_amplitude != 1:
            whole = config.yarn_amplitude * yarn_mscale(mscale, config.yarn_factor)
            mscale = (whole - 1) / (0.1 * math.log(config.yarn_factor))
        yarn |= dict(mscale=mscale, mscale_all_dim=config.yarn_mscale)
    else:
        # Grouped queries turn whole heads, so the temperature on the scores can go into the factor
        # on cos and sin.
        heat = yarn_mscale(config.yarn_mscale, config.yarn_factor)
        yarn["attention_factor"] = heat * config.yarn_amplitude
    return {"rope_theta": config.rope_theta, "rope_scaling": yarn}


# ---------------------------------------------------------------- names and shapes of tensors

# our name: their name, within a layer; * is the number of an expert
NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn.wq_a": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn.wkv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "attn.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn.wk_b": "self_attn.kv_b_proj.weight",
    "attn.wv_b": "self_attn.kv_b_proj.weight",
    "attn.wq": "self_attn.q_proj.weight",
    "attn.wk": "self_attn.k_proj.weight",
    "attn.wv": "self_attn.v_proj.weight",
    "attn.wo": "self_attn.o_proj.weight",
    "attn.bq": "self_attn.q_proj.bias",
    "attn.bk": "self_attn.k_proj.bias",
    "attn.bv": "self_attn.v_proj.bias",
    "attn.q_head_norm.weight": "self_attn.q_norm.weight",
    "attn.k_head_norm.weight": "self_attn.k_norm.weight",
    "ffn.router.weight": "mlp.gate.weight",
    "ffn.router.bias": "mlp.gate.e_score_correction_bias",
}
for matrix in ("gate", "up", "down"):
    NAMES[f"ffn.w_{matrix}"] = f"mlp.{matrix}_proj.weight"
    NAMES[f"ffn.shared.w_{matrix}"] = f"mlp.shared_experts.{matrix}_proj.weight"
    NAMES[f"ffn.experts.w_{matrix}"] = f"mlp.experts.*.{matrix}_proj.weight"
# the same outside of the layers
TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def hf_tensor_map(config, state):
    """Yields, for each of our weights, (our name, our shape, their names, the shape of each of
    theirs). Our stack of experts is one tensor per expert there, and our wk_b and wv_b are both cut
    from their kv_b_proj. state: the model's state dict, of which only the shapes count."""
    for name, tensor in state.items():
        # No published architecture has this drafting head. The model is the same without it.
        if name.startswith("mtp."):
            continue
        shape = tuple(tensor.shape)
        if name in TOP:
            # A head that is tied to the embedding is not stored.
            if not (config.tie and name == "head.weight"):
                yield name, shape, [TOP[name]], shape
            continue

        # Counts of tokens are no weights, and a softmax router has no bias.
        _, layer, rest = name.split(".", 2)
        if rest == "ffn.router.load" or rest == "ffn.router.bias" and config.scoring == "softmax":
            continue

        # Behind a narrow query vector, the projection to the heads has another name.
        own = NAMES[rest]
        if rest == "attn.wq" and config.q_lora:
            own = "self_attn.q_b_proj.weight"
        theirs = f"model.layers.{layer}.{own}"

        # Where the layouts differ: stacks of experts, kv_b_proj, and heads, which are one matrix
        # there.
        if ".experts.w_" in name:
            names = [theirs.replace("*", str(e)) for e in range(config.experts)]
            yield name, shape, names, shape[1:]
        elif rest in ("attn.wk_b", "attn.wv_b"):
            rows = config.heads * (config.qk_nope + config.v_dim)
            yield name, shape, [theirs], (rows, config.kv_lora)
        elif len(shape) == 3:
            yield name, shape, [theirs], (math.prod(shape[:-1]), shape[-1])
        else:
            yield name, shape, [theirs], shape
