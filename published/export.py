"""published/export.py: a model that was trained here, as the folder of a published one.

`write_checkpoint` is the way back of loading.py: safetensors and config.json, which transformers,
vLLM and the like can read. `export_model` adds what else belongs to such a folder: the files of the
tokenizer, the generation settings, the ids that end a turn. Of a model that began from a published
one they are copied from its folder (of the generation settings only the ids); a model that was
trained from noise has its own tokenizer.

The weights are written first and config.json behind them: an export that was interrupted among the
weights cannot be read as a model. Left out: quantisation. Weights go out in the precision that they
were trained in, or in another one on request.
"""

import json
import math
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
    """One published tensor, and the name of our weight that it is made from"""

    dtype: torch.dtype
    shape: tuple
    ours: str
    expert: int  # its number in our stack of experts; None: it is made from all of our weight

    @property
    def bytes(self):
        return math.prod(self.shape) * self.dtype.itemsize


def to_theirs(config, state, entry):
    """The published tensor of an entry, in their layout, from our weights `state`"""
    name = entry.ours
    x = state[name]

    # Layouts that differ: kv_b_proj is one matrix there, and their RoPE turns neighbours.
    if name.endswith("attn.wv_b"):
        # for each head the rows of its key, then those of its value: (H, N + V, C)
        x = torch.cat((state[name.replace("wv_b", "wk_b")], x), 1)
    elif config.attention == "mla" and name.endswith(("attn.wq", "attn.wkv_a")):
        x = swap_pairs(x, config.qk_rope, back=True)

    # One expert of a stack, all heads in one matrix.
    if entry.expert is not None:
        x = x[entry.expert]
    return x.reshape(entry.shape)


def list_entries(config, state, dtype):
    """{their name: Entry} of all weights. dtype: in which they go out, None: as they are"""
    entries = {}
    for ours, _, theirs, shape in hf_tensor_map(config, state):
        # it is written together with wv_b
        if ours.endswith("attn.wk_b"):
            continue
        # the balancing bias is fp32 in every model
        kind = torch.float32 if ours.endswith("router.bias") else dtype or state[ours].dtype
        for e, name in enumerate(theirs):
            entries[name] = Entry(kind, shape, ours, e if len(theirs) > 1 else None)
    return entries


def cut_into_shards(entries, shard_bytes):
    """{their name: Entry} -> a list of such dicts, one per file, each of at most shard_bytes or of
    one tensor"""
    # `full`: bytes in the last shard. At first it is infinite, so that the first entry begins one.
    shards, full = [], math.inf
    for name, entry in entries.items():
        if full + entry.bytes > shard_bytes:
            shards.append({})
            full = 0
        shards[-1][name] = entry
        full += entry.bytes
    return shards


def write_checkpoint(folder, model, dtype=None, shard_bytes=5 << 30, extra=None):
    """A model -> a folder in the published format. dtype: of the weights, None: their own.
    shard_bytes: most bytes of a file (or one tensor). extra: further keys of config.json
    (eos_token_id, ...). config.json comes last, so that an interrupted export cannot be read."""
    folder = Path(folder)

    # 1) Is there an architecture for it, and is the folder empty?
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

    # 2) The weights, one file after the other. A tensor is brought to their layout when it is
    # written, so no second model is in memory.
    state = model.state_dict()
    shards = cut_into_shards(list_entries(variant, state, dtype), shard_bytes)
    file_of = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"

        # Dtypes of many bytes first: then every tensor begins at a multiple of its number's size.
        shard = dict(sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize))
        header = {name: (entry.dtype, entry.shape) for name, entry in shard.items()}
        tensors = (to_theirs(variant, state, entry) for entry in shard.values())

        write_safetensors(folder / file, header, tensors)
        file_of |= dict.fromkeys(shard, file)

    # 3) The index, which says which file holds which tensor, and config.json.
    if len(shards) > 1:
        size = sum(entry.bytes for shard in shards for entry in shard.values())
        index = {"metadata": {"total_size": size}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    # Servers take a config.json without a dtype for float32, and cast it to float16.
    kind = dtype or model.embed.weight.dtype
    config["torch_dtype"] = str(kind).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=1))


# ---------------------------------------------------------------- what else belongs to a folder

# the tokenizer's files: those that a folder has are copied, and never run. Code may be the
# tokenizer's, as Kimi's is; what belongs to the model is not asked for: config.json names none.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "*.py",
)


def export_model(target, model, tokenizer, source, dtype):
    """A model that was trained here -> the folder of a published model. source: the published
    folder that the model began from; its tokenizer and settings are copied from there. None: the
    model was trained from noise, and the tokenizer that was trained with it is written."""
    # The ids that end a turn, as eos_token_id has them: a number, or a list that begins with the id
    # that turns are written with.
    end = tokenizer.id["<|end|>"]
    others = sorted(tokenizer.ends - {end})
    ends = [end, *others] if others else end

    # 1) All that will be copied is read and checked before the first file is written.
    ids, files, generation = {}, [], {}
    if source:
        if not source.is_dir():
            raise ValueError(
                f"{source}, which this run began from, is not there: "
                "its tokenizer's files belong to an export, so put it back"
            )
        read_tokenizer(source, model.config.vocab)  # raises where it is not one for this model
        _, settings, _ = read_config(source / "config.json")
        for name in ("bos_token_id", "pad_token_id"):
            if name in settings.raw:
                ids[name] = settings.raw[name]
        for name in TOKENIZER_FILES:
            files += [path for path in source.glob(name) if path.is_file()]
        path = source / "generation_config.json"
        if path.is_file():
            generation = parse_json(path.read_bytes(), path)

    # 2) The model, and then what belongs to it.
    write_checkpoint(target, model, dtype, extra={**ids, "eos_token_id": ends})
    for path in files:
        shutil.copyfile(path, target / path.name)
    # The ids of its generation settings stay. How the source was sampled does not: a server would
    # apply its repetition_penalty or top_p by default, and RL sampled without them. The source's
    # end of a turn may not be the one that was trained, so ours replaces it.
    if generation:
        kept = {key: value for key, value in generation.items() if key.endswith("_token_id")}
        text = json.dumps({**kept, "eos_token_id": ends}, indent=1)
        (target / "generation_config.json").write_text(text)
    if not source:
        write_tokenizer(tokenizer, target)
