"""published/export.py: a model that was trained here, as the folder of a published one.

`write_checkpoint` is the way back of loading.py: safetensors and config.json, which transformers,
vLLM and the like can read. `export_model` adds what else belongs to such a folder: the files of the
tokenizer, the generation settings, the ids that end a turn. Of a model that began from a published
one they are copied from its folder; a model that was trained from noise has its own tokenizer.

The weights are written first and config.json behind them: an export that was interrupted among the
weights cannot be read as a model. Left out: quantisation. Weights go out in the precision that they
were trained in, or in another one on request.
"""

import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from moe import MoE
from published.families import config_json, hf_tensor_map, read_config
from published.grouped_query import as_variant
from published.loading import swap_pairs
from published.safetensors import parse_json, write_safetensors
from published.tokenizers import read_tokenizer, write_tokenizer

# ---------------------------------------------------------------- weights and config.json


@dataclass
class Entry:
    """One published tensor, and which of our weights it comes from"""

    dtype: torch.dtype
    shape: tuple
    ours: str
    expert: int  # of a stack of experts, else None

    @property
    def bytes(self):
        return math.prod(self.shape) * self.dtype.itemsize


def to_theirs(config, state, entry):
    """One of our weights, or one expert of a stack -> the published tensor"""
    name = entry.ours
    x = state[name]
    if name.endswith("attn.wv_b"):
        # kv_b_proj holds both
        x = torch.cat((state[name.replace("wv_b", "wk_b")], x), 1)
    elif config.attention == "mla" and name.endswith(("attn.wq", "attn.wkv_a")):
        x = swap_pairs(x, config.qk_rope, back=True)
    if entry.expert is not None:
        x = x[entry.expert]
    return x.reshape(entry.shape)


def list_entries(config, state, dtype):
    """{their name: Entry} of all weights"""
    entries = {}
    for ours, _, theirs, shape in hf_tensor_map(config, state):
        # goes with wv_b
        if ours.endswith("attn.wk_b"):
            continue
        # the balancing bias is fp32 in every model
        kind = torch.float32 if ours.endswith("router.bias") else dtype or state[ours].dtype
        for e, name in enumerate(theirs):
            entries[name] = Entry(kind, shape, ours, e if len(theirs) > 1 else None)
    return entries


def cut_into_shards(entries, shard_bytes):
    """[{their name: Entry}] of at most shard_bytes, or one tensor"""
    shards, full = [], math.inf
    for name, entry in entries.items():
        if full + entry.bytes > shard_bytes:
            shards.append({})
            full = 0
        shards[-1][name] = entry
        full += entry.bytes
    return shards


def write_checkpoint(folder, model, dtype=None, shard_bytes=5 << 30, extra=None):
    """A model -> a folder in the published format, weights in `dtype` (None: their own), shards of
    at most shard_bytes (or one tensor). extra: further keys of config.json (eos_token_id, ...).
    config.json comes last: an interrupted export cannot be read."""
    folder = Path(folder)
    # 1) can it be published at all, and is there room for it?
    variant = as_variant(model.config)
    config = config_json(variant) | (extra or {})
    routers = [block.ffn.router for block in model.layers if isinstance(block.ffn, MoE)]
    if variant.scoring == "softmax" and any(router.bias.any() for router in routers):
        raise ValueError(
            "the routers' balancing biases are not zero, and qwen3_moe has no place for them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder}: not empty, an export wants a folder of its own")

    # 2) the weights
    state = model.state_dict()
    shards = cut_into_shards(list_entries(variant, state, dtype), shard_bytes)
    file_of = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        # large numbers first: that keeps every tensor aligned
        shard = dict(sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize))
        header = {name: (entry.dtype, entry.shape) for name, entry in shard.items()}
        tensors = (to_theirs(variant, state, entry) for entry in shard.values())
        write_safetensors(folder / file, header, tensors)
        file_of |= dict.fromkeys(shard, file)

    # 3) which file holds which, and what they are
    if len(shards) > 1:
        size = sum(entry.bytes for shard in shards for entry in shard.values())
        index = {"metadata": {"total_size": size}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1))


# ---------------------------------------------------------------- what else belongs to a folder

# copied where they are there
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
    """A model that was trained here -> the folder of a published model. source: the published
    folder that it began from, or None; what else belongs to a folder is copied from there, or is
    the tokenizer that was trained with it."""
    # the id that turns are written with comes first
    end = tokenizer.id["<|end|>"]
    others = sorted(tokenizer.ends - {end})
    ends = [end, *others] if others else end

    # 1) all that will be copied is looked at before the first file is written
    ids, files, generation = {}, [], {}
    if source:
        if not source.is_dir():
            raise ValueError(
                f"{source}, which this run began from, is not there: "
                "its tokenizer's files belong to an export, so put it back"
            )
        read_tokenizer(source, model.config.vocab)
        _, settings, _ = read_config(source / "config.json")
        for name in ("bos_token_id", "pad_token_id"):
            if name in settings.raw:
                ids[name] = settings.raw[name]
        for name in (*TOKENIZER_FILES, *find_tokenizer_code(source)):
            files += [path for path in source.glob(name) if path.is_file()]
        path = source / "generation_config.json"
        if path.is_file():
            generation = parse_json(path.read_bytes(), path)

    # 2) the model, and then what belongs to it
    write_checkpoint(target, model, dtype, extra={**ids, "eos_token_id": ends})
    for path in files:
        shutil.copyfile(path, target / path.name)
    # its own end of a turn may be another than the one trained
    if generation:
        text = json.dumps({**generation, "eos_token_id": ends}, indent=1)
        (target / "generation_config.json").write_text(text)
    if not source:
        write_tokenizer(tokenizer, target)


def find_tokenizer_code(folder):
    """The Python files behind a tokenizer: those that auto_map names, and what they import from
    beside them. Copied, never run; only plain names, so nothing from outside the folder."""
    path, found = folder / "tokenizer_config.json", set()
    raw = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    names = re.findall(r'"(\w+)\.\w+"', json.dumps(raw.get("auto_map")))
    while names:
        file = folder / f"{names.pop()}.py"
        if file.name not in found and file.is_file():
            found.add(file.name)
            text = file.read_text(errors="ignore")
            names += re.findall(r"^\s*from \.(\w+) import", text, re.MULTILINE)
    return sorted(found)
