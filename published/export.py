"""export: HEAD TO BE WRITTEN"""

from moe import MoE
from pathlib import Path
from published.families import config_json, hf_tensor_map
from published.grouped_query import as_variant
import json
import math
import torch
from published.loading import swap_pairs
from published.safetensors import write_safetensors


def to_theirs(config, name, state, shape, expert):
    """One of our weights, or one expert of a stack -> the published tensor"""
    x = state[name]
    if name.endswith("attn.wv_b"):
        x = torch.cat((state[name.replace("wv_b", "wk_b")], x), 1)
    elif config.attention == "mla" and name.endswith(("attn.wq", "attn.wkv_a")):
        x = swap_pairs(x, config.qk_rope, back=True)
    return (x if expert is None else x[expert]).reshape(shape)


def write_checkpoint(folder, model, dtype=None, shard_bytes=5 << 30, extra=None):
    """A model -> a folder in the published format, weights in `dtype` (None: their own), shards of
    at most shard_bytes (or one tensor). extra: further keys of config.json (eos_token_id, ...).
    config.json comes last: an interrupted export cannot be read."""
    folder, state = Path(folder), model.state_dict()
    variant = as_variant(model.config)
    config = {**config_json(variant), **(extra or {})}
    if variant.scoring == "softmax" and any(
        b.ffn.router.bias.any() for b in model.layers if isinstance(b.ffn, MoE)
    ):
        raise ValueError(
            "the routers' balancing biases are not zero, and qwen3_moe has no place for them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder}: not empty, an export wants a folder of its own")
    # [{their name: (dtype, shape, our name, expert)}]
    shards, full = [], math.inf
    for ours, _, theirs, shape in hf_tensor_map(variant, state):
        kind = torch.float32 if ours.endswith("router.bias") else dtype or state[ours].dtype
        # goes with wv_b
        for e, name in enumerate(theirs if not ours.endswith("attn.wk_b") else ()):
            size = math.prod(shape) * kind.itemsize
            if full + size > shard_bytes:
                shards.append({})
                full = 0
            shards[-1][name], full = (
                kind,
                shape,
                ours,
                e if len(theirs) > 1 else None,
            ), full + size
    home = {}
    for i, shard in enumerate(shards):
        file = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        )
        # keeps every tensor aligned
        shard = dict(sorted(shard.items(), key=lambda item: -item[1][0].itemsize))
        write_safetensors(
            folder / file,
            {name: entry[:2] for name, entry in shard.items()},
            (to_theirs(variant, ours, state, shape, e) for _, shape, ours, e in shard.values()),
        )
        home |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        size = sum(
            math.prod(shape) * kind.itemsize
            for shard in shards
            for kind, shape, _, _ in shard.values()
        )
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": size}, "weight_map": home}, indent=1)
        )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
