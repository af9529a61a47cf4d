"""published/loading.py: the weights of a published folder, in our model.

Three things stand between a file and a weight. Quantised tensors come in pieces: fp8 with a scale
per block (DeepSeek-V3), or eight 4-bit integers in an int32 with a scale per group (Kimi K2). The
layout is another one: experts are one stack here and one tensor each there, kv_b_proj is our wk_b
and wv_b, and DeepSeek's RoPE turns neighbouring dimensions where ours turns two halves. And on many
ranks each keeps a part of the model and should read no more than that.

`read_checkpoint` checks all names and shapes before the first weight is read, then yields one
tensor at a time. `load_model` fills a model with them that had no data before, so memory holds
little more than the weights that stay.

    config, tensors = read_checkpoint(folder)     an iterator of (our name, tensor)
    model = load_model(folder, torch.bfloat16)    the whole model

Left out: other quantisations (GPTQ, AWQ, NVFP4), and the rotations that some apply to weights.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn

from moe import MoE
from published.families import TOP, hf_tensor_map, read_config
from published.safetensors import open_folder, release_pages

FLOATS = torch.float32, torch.bfloat16, torch.float16, torch.float64
INTEGERS = torch.int32, torch.int64


# ---------------------------------------------------------------- layouts


def swap_pairs(x, dims, back=False):
    """Changes the order of the last `dims` rows of x (..., rows, C) from DeepSeek's to ours, or
    back. DeepSeek's RoPE turns neighbours (0, 1), (2, 3), ...; ours turns row i of the first half
    with row i of the second. Queries and keys are permuted alike, so their products stay the
    same."""
    keep, rotary = x[..., :-dims, :], x[..., -dims:, :]
    # (..., dims / 2, 2, C), or on the way back (..., 2, dims / 2, C)
    pairs = rotary.unflatten(-2, (2, -1) if back else (-1, 2))
    rotary = pairs.transpose(-3, -2).flatten(-3, -2)
    return torch.cat((keep, rotary), -2)


def to_ours(config, name, shape, x, interleaved):
    """One published tensor x -> our weight `name`, of this shape. interleaved: does its RoPE turn
    neighbours? See swap_pairs."""
    if name.endswith(("attn.wk_b", "attn.wv_b")):
        # kv_b_proj: of each head first the rows of its key, then those of its value
        x = x.view(config.heads, -1, config.kv_lora)  # (H, N + V, C)
        return x[:, : config.qk_nope] if name.endswith("wk_b") else x[:, config.qk_nope :]
    x = x.view(shape)
    if interleaved and name.endswith(("attn.wq", "attn.wkv_a")):
        return swap_pairs(x, config.qk_rope)
    return x


# ---------------------------------------------------------------- quantised weights


def expected_pieces(tensors, name, shape, quant):
    """The tensors that must stand in the files for a published weight of this shape: {name: (shape,
    dtypes)}. It is one tensor or, where the weight is quantised, its pieces. tensors: those that
    are there."""
    # Only matrices are quantised.
    if len(shape) != 2:
        return {name: (shape, FLOATS)}

    # int4: eight numbers to an int32, along the columns
    rows, columns = shape
    if name + "_packed" in tensors:
        return {
            name + "_packed": ((rows, -(-columns // 8)), (torch.int32,)),
            name + "_scale": ((rows, -(-columns // quant["group"])), FLOATS),
            name + "_shape": ((2,), INTEGERS),
        }

    # fp8: a scale per block
    if name in tensors and tensors[name].dtype == torch.float8_e4m3fn:
        blocks = tuple(-(-n // b) for n, b in zip(shape, quant["block"]))
        return {
            name: (shape, (torch.float8_e4m3fn,)),
            name + "_scale_inv": (blocks, FLOATS),
        }

    return {name: (shape, FLOATS)}


def dequantize(pieces, shape, quant):
    """pieces: the tensors that expected_pieces names, in its order -> the weight (R, C), in fp32
    where it was quantised. fp8 has one scale per block of the matrix; 4-bit integers stand eight to
    an int32 (low bits first, offset 8) and have one scale per group."""
    # The number of pieces says which it is: not quantised, fp8, int4.
    if len(pieces) == 1:
        return pieces[0]
    if len(pieces) == 2:
        weight, scale = pieces
        return weight.float() * repeat_scales(scale, *quant["block"], shape)
    packed, scale, _ = pieces
    # (R, C / 8, 8)
    nibbles = (packed[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    integers = nibbles.flatten(1)[:, : shape[1]] - 8  # (R, C), from -8 to 7
    return integers.float() * repeat_scales(scale, 1, quant["group"], shape)


def repeat_scales(scale, rows, columns, shape):
    """One scale per block of (rows, columns) -> one per number of a matrix of this shape. Blocks at
    the end may be smaller."""
    scale = scale.float().repeat_interleave(rows, 0)[: shape[0]]
    return scale.repeat_interleave(columns, 1)[:, : shape[1]]


def read_quantization(settings):
    """quantization_config -> {"block": rows and columns that share an fp8 scale, "group": columns
    that share an int4 scale}"""
    raw = settings.raw.get("quantization_config") or {}

    # Anything but block-scaled fp8 and packed symmetric int4 is an error, as is a section whose
    # parts are of the wrong kind.
    try:
        block, group = raw.get("weight_block_size", [128, 128]), 32
        for scheme in raw.get("config_groups", {}).values():
            weights = scheme["weights"]
            group = weights["group_size"]
            kind = weights["num_bits"], weights["type"], weights["symmetric"]
            if kind != (4, "int", True) or raw["format"] != "pack-quantized":
                raise ValueError
        if raw.get("quant_method", "fp8") not in ("fp8", "compressed-tensors") or len(block) != 2:
            raise ValueError
        if any(type(n) is not int or not 1 <= n <= 1 << 20 for n in (*block, group)):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{settings.path}: quantization_config {raw!r:.80} is neither block-scaled fp8 "
            "nor packed symmetric int4"
        ) from None

    # Weights that were rotated before they were quantised would need the rotation here.
    if raw.get("transform_config"):
        raise ValueError(
            f"{settings.path}: quantization_config has a transform_config, "
            "rotations not applied here: take weights without"
        )
    return {"block": block, "group": group}


# ---------------------------------------------------------------- reading a checkpoint


@dataclass
class Weight:
    """One of our weights, and which tensors of the files it is made from"""

    name: str
    shape: tuple
    # An entry per published weight that it is made from, of which a stack of experts has many:
    # {name: (shape, dtypes)} of its pieces, see expected_pieces.
    sources: list
    published_shape: tuple  # of one published weight, once it is dequantised


def read_checkpoint(folder, dtype=None, wanted={}):
    """A folder of a published model -> (VariantConfig, iterator of (our name, tensor)).

    All names and shapes are checked here, before a weight is read. A head that is stored although
    it is tied is compared with the embedding here too, by every rank. The iterator then
    dequantises one tensor at a time, brings it to our layout and casts it to `dtype` (None: as
    stored; what was quantised becomes fp32).

    wanted: {our name: a slice per dimension}, the part of a weight that is wanted. It is looked up
    when the weight's turn comes, so it may be filled later. Of experts outside of the part no
    weight is read. Raises a ValueError that names the tensor and the file."""
    folder = Path(folder)
    config, settings, prefix = read_config(folder / "config.json")
    quant = read_quantization(settings)
    tensors, files = open_folder(folder)
    if config.layers > len(tensors):
        raise ValueError(
            f"{settings.path}: {config.layers} layers, "
            f"but only {len(tensors)} tensors in the folder"
        )

    # 1) Every weight of the model must be there, in its shape. (On the meta device a model has
    # shapes and no data.)
    with torch.device("meta"):
        state = config.build_model().state_dict()
    weights, left = [], set(tensors)
    for name, shape, theirs, published_shape in hf_tensor_map(config, state):
        sources = [
            expected_pieces(tensors, prefix + other, published_shape, quant) for other in theirs
        ]
        weights.append(Weight(name, shape, sources, published_shape))
        for pieces in sources:
            check_pieces(folder, tensors, files, pieces, published_shape)
            left -= pieces.keys()

    # 2) Nothing else may be there. A head that is tied must be the embedding.
    for name in sorted(unexpected_keys(config, settings, prefix, left)):
        raise ValueError(f"{files[name]}: tensor {name!r:.200} is not part of this architecture")
    head, embed = prefix + TOP["head.weight"], prefix + TOP["embed.weight"]
    if head in left and config.tie and not equal_in_slices(tensors[head], tensors[embed]):
        raise ValueError(
            f"{files[head]}: tensor {head!r} is not the embedding it is tied to: "
            "set tie_word_embeddings to false"
        )

    interleaved = settings.flag("rope_interleave", True) and config.attention == "mla"
    return config, read_weights(config, tensors, weights, quant, interleaved, dtype, wanted)


def check_pieces(folder, tensors, files, pieces, published_shape):
    """Raises a ValueError unless all tensors that a weight is stored in are in the folder, with
    their shapes and dtypes."""
    for name, (shape, dtypes) in pieces.items():
        # Only headers are needed: no weight is read.
        if name not in tensors:
            raise ValueError(f"{folder}: tensor {name!r} is missing")
        found = tensors[name]
        if tuple(found.shape) != shape or found.dtype not in dtypes:
            raise ValueError(
                f"{files[name]}: tensor {name!r} is {found.dtype} {tuple(found.shape)}, "
                f"expected {dtypes[0]} {shape}"
            )

        # A packed weight also has its shape as a tensor.
        if name.endswith(".weight_shape") and tuple(found.tolist()) != published_shape:
            raise ValueError(
                f"{files[name]}: tensor {name!r} says {found.tolist()}, expected {published_shape}"
            )


def unexpected_keys(config, settings, prefix, names):
    """Of the names of tensors that no part of the model asked for, those that are not known extras.
    Known are a vision tower beside the language model, layers that predict further tokens (MTP), a
    head that is stored although it is tied, and tables of angles."""
    # MTP layers stand behind the model's. transformers has an older and a newer name for their
    # number.
    keys = "num_nextn_predict_layers", "num_mtp_layers"
    mtp_layers = max(settings.integer(key, 0, 0, 64) for key in keys)
    extra = [f"{prefix}model.layers.{config.layers + i}." for i in range(mtp_layers)]
    if prefix:
        extra += ["vision_tower.", "mm_projector."]

    def is_known(name):
        if config.tie and name == prefix + "lm_head.weight":
            return True
        return name.startswith(tuple(extra)) or name.endswith("rotary_emb.inv_freq")

    return [name for name in names if not is_known(name)]


def equal_in_slices(one, other):
    """Do two views of files hold the same numbers? No more than a slice of each is in memory."""
    if one.shape != other.shape:
        return False
    same = True
    for a, b in zip(one.split(1024), other.split(1024)):
        same = same and torch.equal(a.float(), b.float())
        release_pages(one)
        release_pages(other)
    return same


def read_weights(config, tensors, weights, quant, interleaved, dtype, wanted):
    """The iterator of read_checkpoint: yields (our name, the wanted part of the weight), one weight
    after the other"""
    for weight in weights:
        part = wanted.get(weight.name, tuple(slice(0, n) for n in weight.shape))

        # One published tensor; or a stack of experts, of which only the wanted ones are read.
        if len(weight.sources) == 1:
            x = read_source(tensors, weight, weight.sources[0], quant)
            x = to_ours(config, weight.name, weight.shape, x, interleaved)[part]
            # The balancing bias is fp32 in every model.
            kind = torch.float32 if weight.name.endswith("router.bias") else dtype or x.dtype
            # A copy, since x may be a view of the file.
            x = x.to(kind, copy=True, memory_format=torch.contiguous_format)
        else:
            mine, x = weight.sources[part[0]], None
            for e, pieces in enumerate(mine):
                expert = read_source(tensors, weight, pieces, quant)[part[1:]]
                if x is None:
                    x = torch.empty(len(mine), *expert.shape, dtype=dtype or expert.dtype)
                x[e] = expert

        # The file's pages have been copied and may leave memory.
        for pieces in weight.sources:
            for name in pieces:
                release_pages(tensors[name])
        yield weight.name, x


def read_source(tensors, weight, pieces, quant):
    """One published tensor, dequantised"""
    return dequantize([tensors[name] for name in pieces], weight.published_shape, quant)


# ---------------------------------------------------------------- loading a model


def load_model(folder, dtype=torch.float32, device="cpu", lay_out=lambda model: {}):
    """A published folder -> a model with weights in `dtype`. No weight is drawn at random first,
    and none is held twice.

    lay_out: a function that cuts the model, which has no data yet, over ranks, and returns which
    part of each weight is this rank's, {name: a slice per dimension} (hsdp.py has one). Nothing
    else is kept, and nothing of other ranks' experts is read."""
    # A model without data, cut over ranks. `own` is filled before the first weight is asked for.
    own = {}
    config, tensors = read_checkpoint(folder, dtype, own)
    with torch.device("meta"):
        model = config.build_model().to(dtype)
    own.update(lay_out(model))
    if own:
        model.to_empty(device=device)

    # Each weight is copied into this rank's part, or takes the place of the one without data.
    for name, tensor in tensors:
        owner, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner)
        if name in own:
            getattr(owner, leaf).detach().to_local().copy_(tensor)
        elif leaf in owner._parameters:
            setattr(owner, leaf, nn.Parameter(tensor.to(device)))
        else:
            setattr(owner, leaf, tensor.to(device))  # a buffer: the router's bias
    if config.tie and not own:
        model.head.weight = model.embed.weight

    # What no file holds has no data yet either: the routers' counts, a bias that is 0, and RoPE's
    # frequencies.
    for block in model.layers:
        if isinstance(block.ffn, MoE):
            block.ffn.router.load = torch.zeros(config.experts, device=device)
            if config.scoring == "softmax":  # has no bias to read
                block.ffn.router.bias = torch.zeros(config.experts, device=device)
    model.extend_window(config.yarn_factor)
    return model
