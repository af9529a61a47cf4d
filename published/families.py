"""families: HEAD TO BE WRITTEN"""

import math
from published.grouped_query import VariantConfig, as_variant
from published.safetensors import parse_json, read_bytes

FAMILIES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


ONLY = {
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
INERT = set("""
    architectures auto_map dtype torch_dtype attn_implementation name_or_path transformers_version tokenizer_class use_cache initializer_range pretraining_tp ep_size
    seq_aux aux_loss_alpha router_aux_loss_coef output_router_logits num_nextn_predict_layers num_mtp_layers max_window_layers
    sliding_window bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id
    forced_eos_token_id id2label label2id problem_type finetuning_task task_specific_params prefix keys_to_ignore_at_inference
    return_dict output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss pruned_heads chunk_size_feed_forward
    is_encoder_decoder is_decoder tie_encoder_decoder max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens""".split())


# Settings that are read, by whom, or checked against ONLY
READ = set("""
    model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    rms_norm_eps tie_word_embeddings max_position_embeddings rope_theta rope_scaling rope_parameters layer_types
    quantization_config""".split()) | ONLY.keys()


FAMILY_READS = {
    "qwen2": {"qkv_bias"},
    "qwen3": {"use_qk_norm"},
    "qwen3_moe": {
        "use_qk_norm",
        "mlp_only_layers",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
    },
    "deepseek_v3": set(
        """q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim
        first_k_dense_replace n_routed_experts num_local_experts num_experts_per_tok n_shared_experts moe_intermediate_size
        routed_scaling_factor norm_topk_prob n_group topk_group rope_interleave""".split()
    ),
}


ROPE_READS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


YARN_READS = ROPE_READS | set(
    """factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim
    truncate attn_factor extrapolation_factor""".split()
)


def refuse_unread(path, settings, read, where=""):
    """A setting that nobody reads is refused by name, unless it is off (null, false, 0, empty): it
    may change what the model computes, and dropped in silence it would be another model. Names with
    a leading underscore are notes."""
    for key, value in settings.items():
        if key not in read and value and not key.startswith(("_", "unsloth")):
            raise ValueError(
                f"{path}: {where}{key} = {value!r:.60} is not known here: delete it if the model computes the same without it"
            )


class Settings:
    """config.json with the question "which number, within which bounds?": a wrong answer names the
    key and the file."""

    def __init__(self, raw, path):
        self.raw, self.path = raw, path
        for key, only in ONLY.items():
            if raw.get(key) not in (None, only):
                raise ValueError(
                    f"{path}: {key} = {raw[key]!r:.60} is not supported, only {only!r}"
                )

    def __call__(self, key, default=None, low=1, high=1 << 20, kind=int):
        value = default if self.raw.get(key) is None else self.raw[key]
        kind = kind if default is None else type(default)
        if kind is float and type(value) is int:
            value = float(value) if abs(value) <= high else value
        if type(value) is not kind or not low <= value <= high:
            raise ValueError(
                f"{self.path}: {key} = {value!r:.60}, not {kind.__name__} from {low} to {high}"
            )
        return value


def rope_settings(get, mla):
    """RoPE's part of VariantConfig. Published models put YaRN's temperature on cos and sin
    (attention_factor) or on the scores (mscale). The settings stand under a new key or an old one,
    or under both: readers differ in which one they take."""
    told = []
    for key in ("rope_parameters", "rope_scaling"):
        found = get.raw.get(key) or {}
        if (
            not isinstance(found, dict)
            or found.get("rope_type", found.get("type", "default")) not in ("default", "yarn")
            or any(isinstance(value, dict) for value in found.values())
        ):
            raise ValueError(
                f"{get.path}: {key} {found!r:.80} is not supported, only yarn, the same for all layers"
            )
        told += [{"rope_type": found.get("type", "default"), **found}] if found else []
    rope = {key: value for found in told for key, value in found.items() if key != "type"}
    own = lambda found, key, value: found.get(
        key, get.raw.get(key, value) if key == "rope_theta" else None
    )
    if len(told) == 2 and any(
        own(found, key, value) != value for found in told for key, value in rope.items()
    ):
        raise ValueError(
            f"{get.path}: rope_parameters and rope_scaling do not say the same: delete the one that is not meant"
        )
    refuse_unread(
        get.path,
        rope,
        YARN_READS if rope.get("rope_type") == "yarn" else ROPE_READS,
        "rope_scaling: ",
    )
    # Of the keys beside it only the base and the share of turned dimensions belong to RoPE.
    beside = {
        key: get.raw[key] for key in ("rope_theta", "partial_rotary_factor") if key in get.raw
    }
    yarn, ask = rope.get("rope_type") == "yarn", Settings({**beside, **rope}, get.path)
    length = get("max_position_embeddings", high=1 << 30)
    found = dict(rope_theta=ask("rope_theta", 1e4, 1.1, 1e12), context=length)
    if not yarn:
        return found
    context = ask("original_max_position_embeddings", length, high=1 << 30)
    factor = ask("factor", length / context, 1, 1e4)
    heat = lambda m: 0.1 * m * math.log(factor) + 1
    mscale, all_dim = ask("mscale", 0.0, 0, 10), ask("mscale_all_dim", 0.0, 0, 10)
    # With one of the two DeepSeek's own code and transformers compute different temperatures.
    # mscale = 1 alone is the default of both.
    if not (mscale and all_dim) and (all_dim or rope.get("mscale") not in (None, 1)):
        raise ValueError(
            f"{get.path}: rope_scaling: mscale = {rope.get('mscale')!r:.40} with mscale_all_dim = "
            f"{rope.get('mscale_all_dim')!r:.40} is not supported, only both above 0 or neither: readers differ in the rest"
        )
    amplitude = ask(
        "attention_factor",
        heat(mscale) / heat(all_dim) if mscale and all_dim else heat(1),
        1e-3,
        1e3,
    )
    fast, slow = ask("beta_fast", 32.0, 1e-3, 1e6), ask("beta_slow", 1.0, 1e-3, 1e6)
    return dict(
        found,
        context=context,
        yarn_factor=factor,
        yarn_fast=fast,
        yarn_slow=slow,
        yarn_mscale=all_dim if mla else 0.0,
        yarn_amplitude=amplitude,
    )


def mla_settings(get):
    return dict(
        attention="mla",
        q_lora=0 if get.raw.get("q_lora_rank") is None else get("q_lora_rank"),
        kv_lora=get("kv_lora_rank"),
        qk_nope=get("qk_nope_head_dim"),
        qk_rope=get("qk_rope_head_dim"),
        v_dim=get("v_head_dim"),
        dense_layers=get("first_k_dense_replace", 0, 0),
        experts=get("n_routed_experts", high=1 << 12),
        active=get("num_experts_per_tok"),
        shared=get("n_shared_experts", 0, 0, 64),
        expert_ffn=get("moe_intermediate_size"),
        route_scale=get("routed_scaling_factor", None, 0, 1e3, float),
        norm_gates=get("norm_topk_prob", True, 0),
        # no default: readers differ in theirs
        n_group=get("n_group"),
        topk_group=get("topk_group"),
    )


def gqa_settings(get, family, layers):
    head = get(
        "head_dim",
        128 if family == "qwen3" else max(get("hidden_size") // get("num_attention_heads"), 1),
    )
    found = dict(
        attention="gqa",
        kv_heads=get("num_key_value_heads", get("num_attention_heads")),
        qk_nope=0,
        qk_rope=head,
        v_dim=head,
        qk_norm=family != "qwen2",
        qkv_bias=family == "qwen2",
        dense_layers=layers,
    )
    if get("num_attention_heads") % found["kv_heads"]:
        raise ValueError(f"{get.path}: num_attention_heads is no multiple of num_key_value_heads")
    if family != "qwen3_moe":
        return found
    dense, key = get.raw.get("mlp_only_layers") or [], (
        "num_experts" if "num_experts" in get.raw else "num_local_experts"
    )
    if get.raw.get("num_local_experts", get.raw.get(key)) != get.raw.get(key):
        raise ValueError(
            f"{get.path}: num_experts and num_local_experts differ: delete the one that is not meant"
        )
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise ValueError(
            f"{get.path}: mlp_only_layers = {dense!r:.60} is not supported, only the first ones"
        )
    return dict(
        found,
        dense_layers=len(dense),
        experts=get(key, high=1 << 12),
        active=get("num_experts_per_tok"),
        shared=0,
        expert_ffn=get("moe_intermediate_size"),
        scoring="softmax",
        norm_gates=get("norm_topk_prob", False, 0),
    )


def read_config(path):
    """config.json -> (VariantConfig, Settings of the language model, prefix of its tensors' names)"""
    raw, prefix = parse_json(read_bytes(path, 1 << 20), path), ""
    if raw.get("model_type") == "kimi_k25" and isinstance(raw.get("text_config"), dict):
        whole, raw, prefix = raw, {"model_type": "kimi_k2", **raw["text_config"]}, "language_model."
        # Of the settings around the language model's own none may speak about it: only one of the
        # two places is read.
        for key in sorted((READ | FAMILY_READS["deepseek_v3"]) - {"model_type"}):
            if whole.get(key) and whole[key] != raw.get(key):
                raise ValueError(
                    f"{path}: {key} stands beside text_config and not, or otherwise, inside it: put it inside"
                )
    family = "deepseek_v3" if raw.get("model_type") == "kimi_k2" else raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"{path}: model_type {family!r:.60} is not one of {', '.join(FAMILIES)}, kimi_k2, kimi_k25"
        )
    get, mla = Settings(raw, path), family == "deepseek_v3"
    refuse_unread(path, raw, READ | INERT | FAMILY_READS[family])
    if (
        raw.get("qkv_bias") is False
        and family == "qwen2"
        or raw.get("use_qk_norm") is False
        and family in ("qwen3", "qwen3_moe")
    ):
        raise ValueError(
            f"{path}: qkv_bias or use_qk_norm = False is not supported: {family} has them"
        )
    layers = get("num_hidden_layers", high=1024)
    if raw.get("layer_types") not in (None, ["full_attention"] * layers):
        raise ValueError(
            f"{path}: layer_types other than full_attention in every layer are not supported"
        )
    own = mla_settings(get) if mla else gqa_settings(get, family, layers)
    try:
        config = VariantConfig(
            vocab=get("vocab_size", high=1 << 24),
            dim=get("hidden_size"),
            layers=layers,
            heads=get("num_attention_heads", high=1 << 12),
            dense_ffn=get("intermediate_size"),
            tie=get("tie_word_embeddings", False, 0),
            norm_eps=get("rms_norm_eps", 1e-6, 0, 1),
            **own,
            **rope_settings(get, mla),
        )
    except AssertionError as error:
        raise ValueError(f"{path}: {error}") from None
    return config, get, prefix


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


NAMES |= {
    f"ffn.{ours}w_{w}": f"mlp.{theirs}{w}_proj.weight"
    for w in ("gate", "up", "down")
    for ours, theirs in (("", ""), ("shared.", "shared_experts."), ("experts.", "experts.*."))
}
TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def hf_tensor_map(config, state):
    """Yields (our name, our shape, their names, shape of each of theirs): experts are one stack
    here, and kv_b_proj is cut in two. state: the model's state dict, of which only the shapes
    count."""
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        if name in TOP:
            if not (config.tie and name == "head.weight"):
                yield name, shape, [TOP[name]], shape
            continue
        _, layer, rest = name.split(".", 2)
        if rest == "ffn.router.load" or rest == "ffn.router.bias" and config.scoring == "softmax":
            continue
        theirs = f"model.layers.{layer}." + (
            "self_attn.q_b_proj.weight" if rest == "attn.wq" and config.q_lora else NAMES[rest]
        )
        if ".experts.w_" in name:
            yield name, shape, [theirs.replace("*", str(e)) for e in range(config.experts)], shape[
                1:
            ]
        elif rest in ("attn.wk_b", "attn.wv_b"):
            yield name, shape, [theirs], (
                config.heads * (config.qk_nope + config.v_dim),
                config.kv_lora,
            )
        else:
            yield name, shape, [theirs], (
                (math.prod(shape[:-1]), shape[-1]) if len(shape) == 3 else shape
            )


def config_json(config):
    """ModelConfig -> config.json of the published architecture it is an instance of, or a
    ValueError"""
    c, dense = as_variant(config), config.dense_layers >= config.layers
    if c.mtp:
        raise ValueError(
            "no published architecture has this drafting head: export the model without it (mtp=0)"
        )
    raw = dict(
        vocab_size=c.vocab,
        hidden_size=c.dim,
        intermediate_size=c.dense_ffn,
        num_hidden_layers=c.layers,
        attention_bias=False,
        num_attention_heads=c.heads,
        hidden_act="silu",
        rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tie,
        max_position_embeddings=c.window,
    )
    moe = dict(
        num_experts_per_tok=c.active,
        moe_intermediate_size=c.expert_ffn,
        norm_topk_prob=c.norm_gates,
    )
    gqa = dict(num_key_value_heads=c.kv_heads, head_dim=c.qk_rope, use_sliding_window=False)
    whole = c.attention == "gqa" and c.qk_nope == c.q_lora == 0 and c.v_dim == c.qk_rope
    if c.attention == "mla" and c.scoring == "sigmoid" and c.shared:
        family = "deepseek_v3"
        raw |= moe | dict(
            num_key_value_heads=c.heads,
            q_lora_rank=c.q_lora or None,
            kv_lora_rank=c.kv_lora,
            qk_nope_head_dim=c.qk_nope,
            qk_rope_head_dim=c.qk_rope,
            v_head_dim=c.v_dim,
            n_shared_experts=c.shared,
            n_routed_experts=c.experts,
            routed_scaling_factor=c.route_scale,
            n_group=c.n_group,
            topk_group=c.topk_group,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            first_k_dense_replace=c.dense_layers,
            num_nextn_predict_layers=0,
            rope_interleave=True,
        )
    elif whole and dense and c.qkv_bias != c.qk_norm:
        family, raw = "qwen2" if c.qkv_bias else "qwen3", raw | gqa
    elif (
        whole
        and c.qk_norm
        and not c.qkv_bias
        and c.scoring == "softmax"
        and not c.shared
        and c.route_scale == c.n_group == 1
    ):
        family = "qwen3_moe"
        raw |= (
            gqa
            | moe
            | dict(
                num_experts=c.experts,
                mlp_only_layers=list(range(c.dense_layers)),
                decoder_sparse_step=1,
            )
        )
    else:
        raise ValueError(
            "no published architecture has this attention, routing and norms; known: "
            + ", ".join(FAMILIES)
        )
    return {"architectures": [FAMILIES[family]], "model_type": family, **raw, **rope_json(c)}


def rope_json(c):
    if c.yarn_factor == c.yarn_amplitude == 1:
        return {"rope_theta": c.rope_theta}
    # gqa turns whole heads, so the temperature on the scores can sit on cos and sin
    heat = 1 if c.attention == "mla" else 0.1 * c.yarn_mscale * math.log(c.yarn_factor) + 1
    yarn = dict(
        type="yarn",
        rope_type="yarn",
        factor=float(c.yarn_factor),
        original_max_position_embeddings=c.context,
        beta_fast=c.yarn_fast,
        beta_slow=c.yarn_slow,
        attention_factor=heat * c.yarn_amplitude,
    )
    if c.attention == "mla":
        yarn |= dict(mscale=c.yarn_mscale, mscale_all_dim=c.yarn_mscale)
    return {"rope_theta": c.rope_theta, "rope_scaling": yarn}
