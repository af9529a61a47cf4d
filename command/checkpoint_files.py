"""command/checkpoint_files.py: the files of a checkpoint folder, and whether they may be read.

A checkpoint is a folder: what torch.distributed.checkpoint writes (.metadata and a file per rank),
extra.pt (configuration, tokenizer, step) and manifest.json, which has the size and the checksum of
each of them. A folder that was damaged, or that a stranger made, is refused in one line before
anything of it is loaded:

    size, checksum      every file holds the bytes that were written
    names               nothing outside the folder is part of a checkpoint
    .metadata           a pickle could run any program: only classes that describe tensors are read

It stands apart from hsdp.py, which saves and loads across layouts: none of this knows of a mesh.
Left out: signatures. Who can write the folder can also write its checksums.
"""

import errno
import json
import os
import pickle
import zlib
from pathlib import Path, PurePath

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException


class SaveFailed(OSError):
    """A checkpoint or a log could not be written. The message is one line; what was saved before is
    whole."""


class DamagedCheckpoint(ValueError):
    """A checkpoint that is incomplete, damaged or not safe to read. The message is one line."""


def explain_write_error(error):
    """What went wrong while something was written, in one line. error: an OSError, or torch's
    CheckpointException, which holds the failures by rank"""
    # The failure of one rank stands for all.
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip() or type(error).__name__

    # torch's zip writer turns whatever the disk said into a RuntimeError about positions.
    signs = "No space left", "PytorchStreamWriter", "inline_container"
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(
        sign in text for sign in signs
    ):
        return "the disk is full"

    # The system's own words for the error, or the first line of what was raised.
    return getattr(error, "strerror", None) or text.splitlines()[0][:200]


def describe_file(path):
    """-> {"bytes": size, "crc32": checksum in hexadecimal}"""
    size, checksum = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def write_synced(path, data):
    """Write bytes and wait until they are on the disk. The file's folder is renamed afterwards:
    without the wait, a power cut could keep the new name and leave the file empty."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def validated_folder(directory):
    """-> the folder, and its manifest {file: {"bytes": size, "crc32": checksum}}; an older manifest
    has sizes alone and no checksums. Names and sizes are checked here, checksums by check_sum.
    DamagedCheckpoint where something is wrong."""
    # A save that ended between its two renames left the checkpoint before it as .old.
    folder = Path(directory) if Path(directory).exists() else Path(f"{directory}.old")

    # The manifest is written last: a folder without a readable one was never complete.
    try:
        raw = json.loads((folder / "manifest.json").read_text())
        manifest = {
            name: entry if isinstance(entry, dict) else {"bytes": entry}
            for name, entry in raw.items()
        }
        assert manifest and all(type(entry["bytes"]) is int for entry in manifest.values())
    except (OSError, ValueError, AssertionError, AttributeError, KeyError, RecursionError):
        raise DamagedCheckpoint(
            f"{directory}: not a complete checkpoint (no readable manifest.json)"
        ) from None

    # Nothing outside the folder is part of a checkpoint, whatever a manifest says. A file of
    # another size was cut off or replaced.
    for name, entry in manifest.items():
        if not name or name != Path(name).name or "\\" in name or "\0" in name or name == "..":
            raise DamagedCheckpoint(
                f"{directory}: manifest.json names {name!r}, which is no file of this "
                "folder: not to be trusted"
            )
        size, path = entry["bytes"], folder / name
        there = path.stat().st_size if path.is_file() else 0
        if there != size:
            raise DamagedCheckpoint(
                f"{directory}: {name} has {there} of {size} bytes: the checkpoint is damaged"
            )

    # Without these two nothing can be loaded.
    for name in (".metadata", "extra.pt"):
        if name not in manifest:
            raise DamagedCheckpoint(
                f"{directory}: manifest.json does not name {name}: not a complete checkpoint"
            )
    return folder, manifest


def check_sum(directory, folder, name, manifest):
    """DamagedCheckpoint if the file `name` has another checksum than the manifest says. Where the
    manifest has no checksum, nothing is checked. directory: the path that the message names"""
    if "crc32" in manifest[name] and describe_file(folder / name) != manifest[name]:
        raise DamagedCheckpoint(
            f"{directory}: {name} holds other bytes than were written (checksum): the "
            "checkpoint is damaged"
        )


class CheckpointReader(dcp.FileSystemReader):
    """torch's reader, made safe. The original trusts .metadata, which is a pickle: one that a
    stranger made can run any program. Here nothing but the classes that describe tensors can come
    out of it, and no file is read that the manifest does not name."""

    def __init__(self, folder, manifest):
        super().__init__(folder)
        self.folder, self.manifest = folder, manifest

    def read_metadata(self, *args, **kwargs):
        """-> torch's Metadata, checked. DamagedCheckpoint where it cannot be read or trusted"""
        try:
            with open(self.folder / ".metadata", "rb") as file:
                metadata = MetadataUnpickler(file).load()
            self.check(metadata)
        except pickle.UnpicklingError as error:
            raise DamagedCheckpoint(
                f"{self.folder}: .metadata cannot be read ({error}): damaged, or not to be trusted"
            ) from None
        # Damaged bytes may raise anything while they are unpickled.
        except Exception as error:
            raise DamagedCheckpoint(
                f"{self.folder}: .metadata cannot be read ({type(error).__name__}): "
                f"the checkpoint is damaged"
            ) from None

        # As torch's own reader does: the id is that of this load.
        metadata.storage_meta = dcp.metadata.StorageMeta(load_id=self.load_id)
        return metadata

    def check(self, metadata):
        """UnpicklingError unless the metadata describes tensors alone, by name, and in files that
        the manifest names"""
        # {name: what is known of the tensor}, {piece of a tensor: where its bytes stand}
        tensors, places = metadata.state_dict_metadata, metadata.storage_data
        for name, tensor in tensors.items():
            if type(name) is not str or type(tensor) is not dcp.metadata.TensorStorageMetadata:
                raise pickle.UnpicklingError("it describes something that is no tensor")

        # transform_descriptors would have an extension decode the file. Our files need none.
        for place in places.values():
            if place.relative_path not in self.manifest or getattr(
                place, "transform_descriptors", None
            ):
                raise pickle.UnpicklingError("it names a file that is not in manifest.json")


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler that makes only the classes which torch.distributed.checkpoint (2.11 to 2.13)
    writes into .metadata for tensors. It refuses all other names."""

    ALLOWED = {
        ("torch.distributed.checkpoint.metadata", name): getattr(dcp.metadata, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    }
    ALLOWED["torch.distributed.checkpoint.filesystem", "_StorageInfo"] = dcp.filesystem._StorageInfo
    ALLOWED["torch.serialization", "_get_layout"] = torch.serialization._get_layout
    ALLOWED["torch", "Size"] = torch.Size
    # The path under which the checkpoint was saved, on any system and with any Python. PurePath is
    # a path that cannot touch the disk.
    ALLOWED |= {
        (module, name): PurePath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    }

    def find_class(self, module, name):
        """Called by pickle for each name in the file -> the class, or UnpicklingError"""
        if (module, name) in self.ALLOWED:
            return self.ALLOWED[module, name]
        # A dtype is pickled under its name, such as torch.float32.
        if (
            module == "torch"
            and "." not in name
            and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")
