"""published/export.py: a model that was trained here, as the folder of a published one.

`write_checkpoint` is the way back of loading.py: config.json and safetensors, which transformers,
vLLM and the like can read. `export_model` adds what else belongs to such a folder: the files of the
tokenizer, the generation settings, the ids that end a turn. Of a model that began from a published
one they are copied from its folder; one that was trained from noise has its own tokenizer.

config.json is written last, so that an export that was interrupted cannot be read as a model. Weights
are written in the precision that they were trained in, or in another on request, never quantised.
"""

import json
import math
import re
import shutil
from pathlib import Path

import torch

from moe import MoE
from published.families import config_json, hf_tensor_map, read_config
from published.loading import swap_pairs
from published.safetensors import parse_json, write_safetensors
from published.tokenizers import read_tokenizer, write_tokenizer


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
    config = {**config_json(model.config), **(extra or {})}
    if model.config.scoring == "softmax" and any(
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
    for ours, _, theirs, shape in hf_tensor_map(model.config, state):
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
            (
                to_theirs(model.config, ours, state, shape, e)
                for _, shape, ours, e in shard.values()
            ),
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


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
)


def export_model(target, model, tokenizer, source, dtype):
    """A model that was trained here -> the folder of a published model. source: the published folder
    that it began from, or None; what else belongs to a folder is copied from there, or is the
    tokenizer that was trained with it. All of that is looked at before the first file is written.
    """
    end = tokenizer.id["<|end|>"]
    others = sorted(tokenizer.ends - {end})
    # the one that turns are written with comes first
    ends = [end, *others] if others else end
    ids, files, generation = {}, [], {}
    if source:
        if not source.is_dir():
            raise ValueError(
                f"{source}, which this run began from, is not there: its tokenizer's files belong to an export, so put it back"
            )
        # does it still stand there whole?
        read_tokenizer(source, model.config.vocab)
        raw = read_config(source / "config.json")[1].raw
        ids = {name: raw[name] for name in ("bos_token_id", "pad_token_id") if name in raw}
        for name in (*TOKENIZER_FILES, *tokenizer_code(source)):
            files += [path for path in source.glob(name) if path.is_file()]
        path = source / "generation_config.json"
        if path.is_file():
            generation = parse_json(path.read_bytes(), path)
    write_checkpoint(target, model, dtype, extra={**ids, "eos_token_id": ends})
    for path in files:
        shutil.copyfile(path, target / path.name)
    # its own end of a turn may be another than the one trained
    if generation:
        text = json.dumps({**generation, "eos_token_id": ends}, indent=1)
        (target / "generation_config.json").write_text(text)
    if not source:
        write_tokenizer(tokenizer, target)


def tokenizer_code(folder):
    """The Python files behind a tokenizer: those that auto_map names, and what they import from
    beside them. Copied, never run; only plain names, so nothing from outside the folder."""
    path, found = folder / "tokenizer_config.json", set()
    raw = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    names = re.findall(r'"(\w+)\.\w+"', json.dumps(raw.get("auto_map")))
    while names:
        file = folder / f"{names.pop()}.py"
        if file.name not in found and file.is_file():
            found.add(file.name)
            names += re.findall(
                r"^\s*from \.(\w+) import", file.read_text(errors="ignore"), re.MULTILINE
            )
    return sorted(found)
