"""Published checkpoints: read, written, attacked. transformers is the oracle where it is installed; nothing here needs the network."""
import json
import math
import random

import pytest
import torch

import moe
from moe import Cache, Model, ModelConfig, load_model, open_safetensors, read_checkpoint, write_checkpoint, write_safetensors

MLA = dict(model_type="deepseek_v3", vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3,
           num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, routed_scaling_factor=2.5, kv_lora_rank=16,
           q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10, n_group=1, topk_group=1, num_experts_per_tok=3,
           first_k_dense_replace=1, norm_topk_prob=True, hidden_act="silu", max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4,
           tie_word_embeddings=False, num_nextn_predict_layers=0)
QWEN = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=12, hidden_act="silu", max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1e5, tie_word_embeddings=False)
YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=32)
MOE = dict(QWEN, model_type="qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True,
           decoder_sparse_step=1, mlp_only_layers=[])
FAMILIES = {
    "deepseek_v3": dict(MLA, n_group=4, topk_group=2), "moonlight": dict(MLA, q_lora_rank=None, n_shared_experts=2, rope_theta=5e4),
    "kimi_k2": dict(MLA, model_type="kimi_k2", rope_scaling=dict(YARN, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)),
    "mla, two mscales": dict(MLA, rope_scaling=dict(YARN, beta_fast=4.0, mscale=0.7, mscale_all_dim=1.3)),
    "mla, halves": dict(MLA, rope_interleave=False, norm_topk_prob=False),
    "qwen2": dict(QWEN, model_type="qwen2", head_dim=8), "qwen2, yarn": dict(QWEN, model_type="qwen2", head_dim=8, rope_scaling=YARN),
    "qwen3": dict(QWEN, model_type="qwen3", tie_word_embeddings=True), "qwen3, yarn": dict(QWEN, model_type="qwen3", rope_scaling=YARN),
    "qwen3_moe": MOE, "qwen3_moe, raw gates": dict(MOE, norm_topk_prob=False, mlp_only_layers=[0]),
}


def write_folder(folder, raw, change=lambda tensors: None):
    """A random checkpoint in the published format, made from config.json's own numbers by the names and shapes of the format's
    description, not by the code under test. -> its tensors"""
    g = torch.Generator().manual_seed(0)
    made = lambda *shape: torch.randn(shape, generator=g) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
    ones = lambda n: 1 + 0.2 * torch.randn(n, generator=g)
    D, H, V = raw["hidden_size"], raw["num_attention_heads"], raw["vocab_size"]
    tensors = {"model.embed_tokens.weight": made(V, D), "model.norm.weight": ones(D)}
    if not raw["tie_word_embeddings"]:
        tensors["lm_head.weight"] = made(V, D)
    for i in range(raw["num_hidden_layers"]):
        p = f"model.layers.{i}."
        tensors |= {p + "input_layernorm.weight": ones(D), p + "post_attention_layernorm.weight": ones(D)}
        tensors |= {p + "self_attn." + n: t for n, t in (mla if "kv_lora_rank" in raw else gqa)(raw, made, ones, D, H).items()}
        experts = raw.get("n_routed_experts", raw.get("num_experts"))
        mlp = lambda at, F: {f"{p}mlp.{at}{n}_proj.weight": made(*s) for n, s in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F)))}
        if experts is None or i < raw.get("first_k_dense_replace", 0) or i in raw.get("mlp_only_layers", ()):
            tensors |= mlp("", raw["intermediate_size"])
            continue
        tensors[p + "mlp.gate.weight"] = made(experts, D)
        for e in range(experts):
            tensors |= mlp(f"experts.{e}.", raw["moe_intermediate_size"])
        if "n_shared_experts" in raw:
            tensors[p + "mlp.gate.e_score_correction_bias"] = 0.1 * made(experts)
            tensors |= mlp("shared_experts.", raw["moe_intermediate_size"] * raw["n_shared_experts"])
    change(tensors)
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, tensors.values())
    (folder / "config.json").write_text(json.dumps(raw))
    return tensors


def mla(raw, made, ones, D, H):
    C, Q, R, N, V = (raw[k] for k in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    query = {"q_a_proj.weight": made(Q, D), "q_a_layernorm.weight": ones(Q), "q_b_proj.weight": 2 * made(H * (N + R), Q)} if Q else {
        "q_proj.weight": 2 * made(H * (N + R), D)}
    return query | {"kv_a_proj_with_mqa.weight": 2 * made(C + R, D), "kv_a_layernorm.weight": ones(C),
                    "kv_b_proj.weight": made(H * (N + V), C), "o_proj.weight": made(D, H * V)}


def gqa(raw, made, ones, D, H):
    K, d = raw["num_key_value_heads"], raw["head_dim"]
    tensors = {"q_proj.weight": 2 * made(H * d, D), "k_proj.weight": 2 * made(K * d, D), "v_proj.weight": made(K * d, D),
               "o_proj.weight": made(D, H * d)}
    if raw["model_type"] == "qwen2":
        return tensors | {"q_proj.bias": made(H * d), "k_proj.bias": made(K * d), "v_proj.bias": made(K * d)}
    return tensors | {"q_norm.weight": ones(d), "k_norm.weight": ones(d)}


# ---------------------------------------------------------------- against transformers

def reference(folder):
    transformers = pytest.importorskip("transformers")
    raw = json.loads((folder / "config.json").read_text())
    if raw["model_type"] == "kimi_k2":                                   # transformers has it under the name of its architecture
        (folder / "config.json").write_text(json.dumps(dict(raw, model_type="deepseek_v3")))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True,
                                                                   attn_implementation="eager", local_files_only=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return model.eval(), info


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_also_beyond_the_old_window(family, tmp_path):
    write_folder(tmp_path / "in", FAMILIES[family])
    theirs, info = reference(tmp_path / "in")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ours, tokens = load_model(tmp_path / "in"), torch.randint(0, 96, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, logits = theirs(tokens).logits, ours.logits(ours(tokens))
        assert (logits - expected).abs().max() < 1e-4 and expected.std() > 0.3
        cache = Cache(ours, 2, 65)
        decoded = [ours.decode(tokens[:, :60], cache, slice(0, 2), torch.zeros(2, dtype=torch.long))]
        decoded += [ours.decode(tokens[:, t:t + 1], cache, slice(0, 2), torch.full((2,), t)) for t in range(60, 64)]
        assert (ours.logits(torch.cat(decoded, 1)) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_folder_loads_in_transformers_whole_and_with_the_same_logits(family, tmp_path):
    write_folder(tmp_path / "in", FAMILIES[family])
    ours, tokens = load_model(tmp_path / "in"), torch.arange(64)[None] % 96
    write_checkpoint(tmp_path / "out", ours, shard_bytes=40_000)
    theirs, info = reference(tmp_path / "out")
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.inference_mode():
        assert (theirs(tokens).logits - ours.logits(ours(tokens))).abs().max() < 1e-4
