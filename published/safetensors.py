"""safetensors: HEAD TO BE WRITTEN"""

from contextlib import contextmanager
import json
import math
import mmap
import re
import torch
import warnings

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
HEADER, INDEX = 8 << 20, 64 << 20


def parse_json(raw, path):
    """Bytes -> a dict. A name given twice is refused: two readers would see two different files."""

    def unique(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        found = json.loads(raw.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON object")
    return found


@contextmanager
def reading(path):
    """What the system answers where a file cannot be read (no permission, a bad disk) becomes the
    one line of every other error."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_bytes(path, most):
    with reading(path):
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        if path.stat().st_size > most:
            raise ValueError(f"{path}: {path.stat().st_size} bytes where at most {most} make sense")
        return path.read_bytes()


def check_entry(entry):
    """One entry of a safetensors header -> (dtype, shape, start, stop), or a ValueError that says
    what is wrong with it."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("an entry is dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r:.40}")
    # type(): True is an int as well
    for numbers, most in ((shape, 8), (offsets, 2)):
        if (
            not isinstance(numbers, list)
            or len(numbers) > most
            or any(type(n) is not int or not 0 <= n < 1 << 48 for n in numbers)
        ):
            raise ValueError(f"impossible shape or offsets {numbers!r:.60}")
    # (0, 2^47, 2^47) holds nothing and overflows all the same
    if math.prod(n or 1 for n in shape) >= 1 << 60:
        raise ValueError(f"impossible shape {shape!r:.60}")
    if len(offsets) != 2 or math.prod(shape) * DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
        raise ValueError(f"{dtype} of shape {shape} does not fill the bytes {offsets}")
    return DTYPES[dtype], shape, *offsets


def open_safetensors(path):
    """A file -> {name: tensor}, views of the mapped file: nothing is read before it is used, and
    the map goes with its last view. The format: 8 bytes of header length, a JSON header, then raw
    little-endian data that the tensors fill without gap or overlap."""
    with reading(path):
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER):
                raise ValueError(f"{path}: a header of {length} bytes in a file of {size}")
            header, data = parse_json(file.read(length), path), mmap.mmap(
                file.fileno(), 0, access=mmap.ACCESS_READ
            )
    header.pop("__metadata__", None)
    entries, expected, tensors = {}, 8 + length, {}
    for name, entry in header.items():
        try:
            entries[name] = check_entry(entry)
        except ValueError as error:
            raise ValueError(f"{path}: tensor {name!r:.200}: {error}") from None
    for name, (dtype, shape, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if 8 + length + start != expected or 8 + length + stop > size:
            raise ValueError(
                f"{path}: tensor {name!r:.200}: bytes {start} to {stop} leave a gap, overlap, or end after the file"
            )
        tensors[name] = view(data, dtype, shape, expected)
        tensors[name].mapped, expected = (data, expected, 8 + length + stop), 8 + length + stop
    if expected != size:
        raise ValueError(f"{path}: {size - expected} bytes that belong to no tensor")
    return tensors


def view(data, dtype, shape, start):
    """A tensor over bytes of a map that must not be written to"""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        # "not writable": that is the point
        warnings.simplefilter("ignore")
        raw = torch.frombuffer(
            data, dtype=torch.uint8, count=math.prod(shape) * dtype.itemsize, offset=start
        )
    return (raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()).view(dtype).view(shape)


def let_go(tensor):
    """The pages a view was read from leave this process: else a model in one file would be held
    twice while it is loaded."""
    data, start, stop = tensor.mapped
    start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if hasattr(mmap, "MADV_DONTNEED") and start < stop:
        data.madvise(mmap.MADV_DONTNEED, start, stop - start)


def open_folder(folder):
    """-> ({name: tensor}, {name: file}) of one model.safetensors or of the shards that the index
    names"""
    index = folder / "model.safetensors.index.json"
    with reading(index):
        sharded = index.is_file()
    if not sharded:
        tensors = open_safetensors(folder / "model.safetensors")
        return tensors, dict.fromkeys(tensors, folder / "model.safetensors")
    home, tensors = parse_json(read_bytes(index, INDEX), index).get("weight_map"), {}
    if not isinstance(home, dict):
        raise ValueError(f"{index}: no weight_map")
    # a plain name: no way out of the folder, nor back to the index itself
    for name, shard in home.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", shard):
            raise ValueError(
                f"{index}: tensor {name!r:.200}: {shard!r:.200} does not name a file of this folder"
            )
    for shard in sorted(set(home.values())):
        found = open_safetensors(folder / shard)
        for name in found:
            if home.get(name) != shard:
                raise ValueError(
                    f"{folder / shard}: tensor {name!r:.200} is not in the index under this file"
                )
        tensors.update(found)
    for name, shard in home.items():
        if name not in tensors:
            raise ValueError(f"{folder / shard}: tensor {name!r:.200} of the index is missing")
    return tensors, {name: folder / shard for name, shard in home.items()}


def write_safetensors(path, entries, tensors):
    """entries {name: (dtype, shape)} make the header; then the tensors, in the same order, one at a
    time."""
    names, header, at = (
        {dtype: name for name, dtype in DTYPES.items()},
        {"__metadata__": {"format": "pt"}},
        0,
    )
    for name, (dtype, shape) in entries.items():
        header[name] = {
            "dtype": names[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + math.prod(shape) * dtype.itemsize],
        }
        at = header[name]["data_offsets"][1]
    raw = json.dumps(header).encode()
    # so that the data starts aligned
    raw += b" " * (-len(raw) % 8)
    with path.open("xb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for (name, (dtype, shape)), tensor in zip(entries.items(), tensors, strict=True):
            assert tuple(tensor.shape) == tuple(
                shape
            ), f"{name} is {tuple(tensor.shape)}, its header says {tuple(shape)}"
            file.write(tensor.to("cpu", dtype).contiguous().flatten().view(torch.uint8).numpy())
