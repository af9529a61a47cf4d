"""published/safetensors.py: the files that open models are published in.

A folder holds config.json, *.safetensors and, where there are several, an index that says which
file holds which tensor. A safetensors file is 8 bytes of header length, a header in JSON ({name:
dtype, shape, offsets}), and then the raw little-endian numbers, which the tensors fill without gap
or overlap.

The folder comes from strangers, so every length, offset, shape and file name in it is checked
before it is used, and nothing is ever executed. What is wrong becomes a ValueError that names the
file and the tensor in one line. Files are mapped, not read: a tensor is a view of its file, its
pages come into memory when it is used, and `release_pages` hands them back, so that a large model
is never held twice.

This file knows no model: families.py says what the tensors mean, loading.py puts them in their
places. Left out: dtypes that no supported model uses, and pickled checkpoints (*.bin), which run
code when they are read.
"""

import json
import math
import mmap
import re
import warnings
from contextlib import contextmanager

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# most bytes of JSON read into memory: 3 MB describe 25,000 tensors
MAX_HEADER = 8 << 20
MAX_INDEX = 64 << 20


# ---------------------------------------------------------------- JSON of strangers


def parse_json(raw, path):
    """Bytes of JSON -> a dict. A name that is given twice is refused: two readers could take two
    different values."""

    def unique(pairs):
        # a dict keeps one of two equal names
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    # Whatever is wrong with it becomes one line that names the file.
    try:
        found = json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON object")
    return found


@contextmanager
def reading(path):
    """Turns an OSError (no permission, a bad disk) into a ValueError of one line that names the
    file, as every other error here."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_bytes(path, most):
    """All bytes of a file. A file of more than `most` bytes is refused."""
    with reading(path):
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        size = path.stat().st_size
        if size > most:
            raise ValueError(f"{path}: {size} bytes where at most {most} make sense")
        return path.read_bytes()


# ---------------------------------------------------------------- one file


def open_safetensors(path):
    """A file -> {name: tensor}. The tensors are views of the mapped file: nothing is read before it
    is used, and the map is closed with its last view."""
    # The header is read, the rest is mapped.
    with reading(path):
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise ValueError(f"{path}: a header of {length} bytes in a file of {size}")
            header = parse_json(file.read(length), path)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    # 1) Each entry by itself
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        try:
            entries[name] = check_entry(entry)
        except ValueError as error:
            raise ValueError(f"{path}: tensor {name!r:.200}: {error}") from None

    # 2) All of them together: in the order of their bytes, each begins where the one before ended,
    # and the last one ends with the file.
    tensors = {}
    begin = 8 + length
    expected = begin
    in_order = sorted(entries, key=lambda name: entries[name][2:])
    for name in in_order:
        dtype, shape, start, stop = entries[name]
        if begin + start != expected or begin + stop > size:
            raise ValueError(
                f"{path}: tensor {name!r:.200}: bytes {start} to {stop} "
                "leave a gap, overlap, or end after the file"
            )
        tensors[name] = view_mapped(data, dtype, shape, expected)
        # release_pages needs to know where the view lies.
        tensors[name].mapped = data, expected, begin + stop
        expected = begin + stop

    if expected != size:
        raise ValueError(f"{path}: {size - expected} bytes that belong to no tensor")
    return tensors


def check_entry(entry):
    """One entry of a safetensors header -> (dtype, shape, start, stop), or a ValueError that says
    what is wrong with it."""
    # Its three keys, and a dtype that is known.
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("an entry is dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r:.40}")

    # Lists of integers that are not absurdly many or large.
    for numbers, most in ((shape, 8), (offsets, 2)):
        if not isinstance(numbers, list) or len(numbers) > most:
            raise ValueError(f"impossible shape or offsets {numbers!r:.60}")
        # type(): isinstance would take True for an int
        if any(type(n) is not int or not 0 <= n < 1 << 48 for n in numbers):
            raise ValueError(f"impossible shape or offsets {numbers!r:.60}")

    # The shape fills the bytes. A shape like (0, 2^47, 2^47) holds no numbers, and would overflow
    # all the same.
    if math.prod(n or 1 for n in shape) >= 1 << 60:
        raise ValueError(f"impossible shape {shape!r:.60}")
    if len(offsets) != 2 or math.prod(shape) * DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
        raise ValueError(f"{dtype} of shape {shape} does not fill the bytes {offsets}")
    return DTYPES[dtype], shape, *offsets


def view_mapped(data, dtype, shape, start):
    """A tensor of a shape and dtype over a map's bytes from `start` on. It must not be written
    to."""
    numbers = math.prod(shape)
    if not numbers:
        return torch.empty(shape, dtype=dtype)

    with warnings.catch_warnings():
        # torch warns that the buffer is not writable, which is intended.
        warnings.simplefilter("ignore")
        size = numbers * dtype.itemsize
        raw = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start)

    # torch needs numbers that stand at a multiple of their size. Others are read from a copy.
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(shape)


def release_pages(tensor):
    """Hands the pages that a view was read from back to the system. Otherwise a model in one file
    would be held twice while it is loaded."""
    data, start, stop = tensor.mapped
    # Whole pages only: the view shares those at its ends with its neighbours.
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = stop // mmap.PAGESIZE * mmap.PAGESIZE
    if hasattr(mmap, "MADV_DONTNEED") and start < stop:
        data.madvise(mmap.MADV_DONTNEED, start, stop - start)


def write_safetensors(path, entries, tensors):
    """Writes a new file. entries {name: (dtype, shape)} make its header; tensors, an iterable in
    the same order, are taken and written one at a time."""
    # 1) The header: where each tensor will stand
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in entries.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    # Spaces fill it up to a multiple of 8 bytes, so that the data starts aligned.
    raw += b" " * (-len(raw) % 8)

    # 2) The data
    with path.open("xb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for (name, (dtype, shape)), tensor in zip(entries.items(), tensors, strict=True):
            found = tuple(tensor.shape)
            assert found == tuple(shape), f"{name} is {found}, its header says {tuple(shape)}"
            file.write(tensor.to("cpu", dtype).contiguous().flatten().view(torch.uint8).numpy())


# ---------------------------------------------------------------- a folder of them


def open_folder(folder):
    """A folder -> ({name: tensor}, {name: file}), from its model.safetensors, or from the shards
    that its index names"""
    index = folder / "model.safetensors.index.json"
    with reading(index):
        is_sharded = index.is_file()
    if not is_sharded:
        tensors = open_safetensors(folder / "model.safetensors")
        return tensors, dict.fromkeys(tensors, folder / "model.safetensors")

    # 1) The index
    shard_of = parse_json(read_bytes(index, MAX_INDEX), index).get("weight_map")
    if not isinstance(shard_of, dict):
        raise ValueError(f"{index}: no weight_map")
    # Shards are plain names: none leads out of the folder, or back to the index itself.
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", shard):
            raise ValueError(
                f"{index}: tensor {name!r:.200}: {shard!r:.200} does not name a file of this folder"
            )

    # 2) The files hold what the index says, and nothing else.
    tensors = {}
    for shard in sorted(set(shard_of.values())):
        found = open_safetensors(folder / shard)
        for name in found:
            if shard_of.get(name) != shard:
                raise ValueError(
                    f"{folder / shard}: tensor {name!r:.200} is not in the index under this file"
                )
        tensors.update(found)
    for name, shard in shard_of.items():
        if name not in tensors:
            raise ValueError(f"{folder / shard}: tensor {name!r:.200} of the index is missing")
    return tensors, {name: folder / shard for name, shard in shard_of.items()}
