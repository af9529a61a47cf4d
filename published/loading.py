"""loading: HEAD TO BE WRITTEN"""

from moe import MoE
from pathlib import Path
from published.families import TOP, hf_tensor_map, read_config
from published.safetensors import let_go, open_folder
import torch.nn as nn
import torch


def build_model(config):
    """The model that a published configuration describes, its weights drawn at random"""
    return config.build_model()


def swap_pairs(x, dims, back=False):
    """DeepSeek's RoPE turns neighbours (0, 1), (2, 3), ..., ours the two halves: the last `dims`
    rows of x (..., rows, C) change places, so that queries and keys are permuted alike and their
    products stay what they were."""
    keep, rotary = x[..., :-dims, :], x[..., -dims:, :]
    rotary = rotary.unflatten(-2, (2, -1) if back else (-1, 2)).transpose(-3, -2).flatten(-3, -2)
    return torch.cat((keep, rotary), -2)


def to_ours(config, name, shape, x, interleaved):
    """One published tensor -> our layout"""
    if name.endswith(("attn.wk_b", "attn.wv_b")):
        x = x.view(config.heads, -1, config.kv_lora)
        return x[:, : config.qk_nope] if name.endswith("wk_b") else x[:, config.qk_nope :]
    x = x.view(shape)
    return (
        swap_pairs(x, config.qk_rope)
        if interleaved and name.endswith(("attn.wq", "attn.wkv_a"))
        else x
    )


def parts(tensors, name, shape, quant):
    """What stands in the file for a weight of this shape: {name: (shape, dtypes)}, one tensor or,
    quantised, its pieces."""
    floats, integers = (torch.float32, torch.bfloat16, torch.float16, torch.float64), (
        torch.int32,
        torch.int64,
    )
    if len(shape) != 2:
        return {name: (shape, floats)}
    if name + "_packed" in tensors:
        return {
            name + "_packed": ((shape[0], -(-shape[1] // 8)), (torch.int32,)),
            name + "_scale": ((shape[0], -(-shape[1] // quant["group"])), floats),
            name + "_shape": ((2,), integers),
        }
    if name in tensors and tensors[name].dtype == torch.float8_e4m3fn:
        blocks = tuple(-(-n // b) for n, b in zip(shape, quant["block"]))
        return {name: (shape, (torch.float8_e4m3fn,)), name + "_scale_inv": (blocks, floats)}
    return {name: (shape, floats)}


def dequantize(pieces, shape, quant):
    """fp8 with one scale per block of the matrix, or eight 4-bit integers (low bits first, offset
    8) per int32 with one scale per group."""
    if len(pieces) == 1:
        return pieces[0]
    spread = (
        lambda scale, rows, columns: scale.float()
        .repeat_interleave(rows, 0)[: shape[0]]
        .repeat_interleave(columns, 1)[:, : shape[1]]
    )
    if len(pieces) == 2:
        return pieces[0].float() * spread(pieces[1], *quant["block"])
    # (R, C / 8, 8)
    nibbles = (pieces[0][..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    return (nibbles.flatten(1)[:, : shape[1]] - 8).float() * spread(pieces[1], 1, quant["group"])


def quantization(get):
    """quantization_config -> {"block": rows and columns under one fp8 scale, "group": columns under
    one int4 scale}"""
    raw = get.raw.get("quantization_config") or {}
    try:
        block, group = raw.get("weight_block_size", [128, 128]), 32
        for scheme in raw.get("config_groups", {}).values():
            weights = scheme["weights"]
            group, four = weights["group_size"], (
                weights["num_bits"],
                weights["type"],
                weights["symmetric"],
            ) == (4, "int", True)
            if not four or raw["format"] != "pack-quantized":
                raise ValueError
        if raw.get("quant_method", "fp8") not in ("fp8", "compressed-tensors") or len(block) != 2:
            raise ValueError
        if any(type(n) is not int or not 1 <= n <= 1 << 20 for n in (*block, group)):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{get.path}: quantization_config {raw!r:.80} is neither block-scaled fp8 nor packed symmetric int4"
        ) from None
    if raw.get("transform_config"):
        raise ValueError(
            f"{get.path}: quantization_config has a transform_config, rotations not applied here: take weights without"
        )
    return {"block": block, "group": group}


def surplus(config, get, prefix, names):
    """Names of tensors that no part of the model asked for. Known extras are not counted: a vision
    tower beside the language model, layers that predict further tokens (MTP), a head stored
    although it is tied, tables of angles."""
    # transformers' older name and newer
    more = max(get(key, 0, 0, 64) for key in ("num_nextn_predict_layers", "num_mtp_layers"))
    extra = tuple(f"{prefix}model.layers.{config.layers + i}." for i in range(more))
    extra += ("vision_tower.", "mm_projector.") if prefix else ()
    known = (
        lambda n: n.startswith(extra)
        or n.endswith("rotary_emb.inv_freq")
        or config.tie
        and n == prefix + "lm_head.weight"
    )
    return [name for name in names if not known(name)]


def equal_in_slices(one, other):
    """Do two views of files hold the same numbers? Of neither more than a slice is in memory."""
    same = one.shape == other.shape
    for a, b in zip(one.split(1024), other.split(1024)) if same else ():
        same = same and torch.equal(a.float(), b.float())
        let_go(one), let_go(other)
    return same


def read_checkpoint(folder, dtype=None, wanted={}):
    """A folder of a published model -> (ModelConfig, iterator of (our name, tensor)). Names and
    shapes are all checked before the first byte of a weight is read (then, by every rank, a head
    that is stored although it is tied); then one tensor at a time is dequantised, brought to our
    layout and cast to `dtype` (None: as stored; what was quantised becomes fp32). wanted: {our
    name: a slice per dimension}, the stretch of a tensor that is wanted of it, asked when its turn
    comes; of experts outside it no weight is read. Raises ValueError with the tensor and the
    file."""
    folder = Path(folder)
    config, get, prefix = read_config(folder / "config.json")
    quant, (tensors, files) = quantization(get), open_folder(folder)
    if config.layers > len(tensors):
        raise ValueError(
            f"{get.path}: {config.layers} layers, but only {len(tensors)} tensors in the folder"
        )
    with torch.device("meta"):
        state = build_model(config).state_dict()
    plan, left = [], set(tensors)
    for ours, shape, theirs, theirs_shape in hf_tensor_map(config, state):
        plan.append(
            (
                ours,
                shape,
                [parts(tensors, prefix + name, theirs_shape, quant) for name in theirs],
                theirs_shape,
            )
        )
        for name, (right, dtypes) in ((n, w) for pieces in plan[-1][2] for n, w in pieces.items()):
            if name not in tensors:
                raise ValueError(f"{folder}: tensor {name!r} is missing")
            found = tensors[name]
            if tuple(found.shape) != right or found.dtype not in dtypes:
                raise ValueError(
                    f"{files[name]}: tensor {name!r} is {found.dtype} {tuple(found.shape)}, expected {dtypes[0]} {right}"
                )
            if name.endswith(".weight_shape") and tuple(found.tolist()) != theirs_shape:
                raise ValueError(
                    f"{files[name]}: tensor {name!r} says {found.tolist()}, expected {theirs_shape}"
                )
            left.discard(name)
    for name in sorted(surplus(config, get, prefix, left)):
        raise ValueError(f"{files[name]}: tensor {name!r:.200} is not part of this architecture")
    head, embed = (prefix + TOP[name] for name in ("head.weight", "embed.weight"))
    if head in left and config.tie and not equal_in_slices(tensors[head], tensors[embed]):
        raise ValueError(
            f"{files[head]}: tensor {head!r} is not the embedding it is tied to: set tie_word_embeddings to false"
        )
    return config, load(
        config,
        tensors,
        plan,
        quant,
        bool(get("rope_interleave", True, 0)) and config.attention == "mla",
        dtype,
        wanted,
    )


def load(config, tensors, plan, quant, interleaved, dtype, wanted):
    """The data behind read_checkpoint"""
    for ours, shape, theirs, theirs_shape in plan:
        part = wanted.get(ours, tuple(slice(0, n) for n in shape))
        read = lambda pieces: dequantize([tensors[name] for name in pieces], theirs_shape, quant)
        if len(theirs) == 1:
            x = to_ours(config, ours, shape, read(theirs[0]), interleaved)[part]
            x = x.to(
                torch.float32 if ours.endswith("router.bias") else dtype or x.dtype,
                copy=True,
                memory_format=torch.contiguous_format,
            )
        else:
            mine, x = theirs[part[0]], None
            for e, pieces in enumerate(mine):
                expert = read(pieces)[part[1:]]
                x = (
                    torch.empty(len(mine), *expert.shape, dtype=dtype or expert.dtype)
                    if x is None
                    else x
                )
                x[e] = expert
        for pieces in theirs:
            for name in pieces:
                let_go(tensors[name])
        yield ours, x


def load_model(folder, dtype=torch.float32, device="cpu", lay_out=lambda model: {}):
    """A published folder -> Model with weights in `dtype`. No weight is drawn at random first, none
    is held twice. lay_out: cuts the model, which has no data yet, over ranks, and says which part
    of each weight is this rank's ({name: a slice per dimension}; hsdp.py has one): nothing else is
    kept, and of other ranks' experts nothing is read."""
    own = {}
    config, tensors = read_checkpoint(folder, dtype, own)
    with torch.device("meta"):
        model = build_model(config).to(dtype)
    own.update(lay_out(model))
    if own:
        model.to_empty(device=device)
    for name, tensor in tensors:
        owner, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner)
        if name in own:
            getattr(owner, leaf).detach().to_local().copy_(tensor)
        else:
            setattr(
                owner,
                leaf,
                nn.Parameter(tensor.to(device)) if leaf in owner._parameters else tensor.to(device),
            )
    if config.tie and not own:
        model.head.weight = model.embed.weight
    for block in model.layers:
        if isinstance(block.ffn, MoE):
            block.ffn.router.load = torch.zeros(config.experts, device=device)
            if config.scoring == "softmax":  # has no bias to read
                block.ffn.router.bias = torch.zeros(config.experts, device=device)
    # its table of angles was on the meta device, too
    model.extend(config.yarn_factor)
    return model
