"""command/checkpoints.py: checkpoints, written, read, and chosen.

A checkpoint is a folder: what torch.distributed.checkpoint (DCP) writes (.metadata and a file per
rank), extra.pt (configuration, tokenizer, step) and manifest.json, which has the size and the
checksum of each of them. A policy that is only to be used (assets/sft) has its weights in
model.safetensors instead, and no optimizer. Three parts:

    write     over any layout of the weights; whole after a kill at any moment, since a folder gets
              its name only when it is complete. From a GPU in the background: training waits for a
              copy in the machine's memory, and not for the disk
    read      into any other layout. A folder that was damaged, or that a stranger made, is refused
              in one line before anything of it is loaded: by sizes and checksums; by names, since
              nothing outside the folder is part of it; and by .metadata, a pickle, out of which
              come only the classes that describe tensors
    choose    a stage goes on with its own checkpoint where there is one, else it starts from that
              of the stage before, in the folder --start_from or --out. Either must have been made
              with the same model, and its own one by the same command and from the same data.
              What differs is named in one line, with the flag that brings it back

It knows torch and what it is handed: a model, an optimizer, a configuration.

Left out: signatures. Who can write the folder can also write its checksums.
"""

import copy
import errno
import io
import json
import os
import pickle
import shutil
import time
import warnings
import weakref
import zlib
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from command import source_files
from command.flags import fill_in, rules_of, usage_error, write_value
from command.output_files import digest_file
from published.grouped_query import config_of
from published.safetensors import open_safetensors, write_safetensors

WEIGHTS = "model.safetensors"  # of a policy that is only to be used


class SaveFailed(OSError):
    """A checkpoint or a log could not be written. The message is one line; what was saved before is
    whole."""


class DamagedCheckpoint(ValueError):
    """A checkpoint that is incomplete, damaged or not safe to read. The message is one line."""


# What is said of a folder that was once a whole checkpoint. Of others nobody is told to delete
# them: they may be no checkpoint at all, or only unreadable for the moment.
DAMAGED = "the checkpoint is damaged: copy it again, or delete the folder and run its stage again"


# ---------------------------------------------------------------- write


save_under_way = []  # the future of the save that is written in the background


def save_checkpoint(directory, model, optimizer=None, extra=None, more=None, in_background=None):
    """Write a checkpoint to a folder that all ranks see. It holds the weights, the optimizer state
    (by parameter name), `more` (named tensors, cut as the weights are: a teacher's) and `extra`
    (plain data, equal on all ranks: configuration, tokenizer, step), all as they are at the call.

    in_background: None: where a tensor is on a GPU. Then a thread writes while training goes on,
    and the next save or `finish_save` waits for it and raises what it raised.
    A full disk: SaveFailed on every rank, and the checkpoint before stays. Call it when router
    loads are zero, right after update_router_bias(): they are counts of one rank, and only one
    rank's are kept."""
    finish_save()
    tensors = checkpoint_tensors(model, optimizer) | (more or {})
    if in_background is None:
        in_background = any(tensor.is_cuda for tensor in tensors.values())
    if not in_background:
        return write_and_rename(directory, tensors, extra)

    # The next step changes the weights, and what the source of the batches keeps. So both are
    # copied before this returns. A DTensor stays one: its shard is on the CPU then.
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    extra, group = copy.deepcopy(extra), background_group()
    # A thread for this save alone: one that waits for the next would be missing in forked children.
    thread = futures.ThreadPoolExecutor(1)
    save_under_way.append(thread.submit(write_and_rename, directory, tensors, extra, group))
    thread.shutdown(wait=False)


def finish_save():
    """Waits for the save under way, where there is one. SaveFailed where it could not be written"""
    while save_under_way:
        save_under_way.pop().result()


@contextmanager
def saves_finished():
    """A context that no save outlives, whatever ends it"""
    try:
        yield
    except BaseException:
        # What ended it is told, and not that this save failed as well.
        with suppress(Exception):
            finish_save()
        raise
    finish_save()


background_groups = weakref.WeakKeyDictionary()  # {group of all ranks: that of the background}


def background_group():
    """The process group in which the ranks' background threads meet; None in a single process.
    In the group of all ranks, their collectives would mix with those of training. It is made once,
    by all ranks, and ends with the group of all ranks."""
    if not dist.is_initialized():
        return None
    everyone = dist.group.WORLD
    if everyone not in background_groups:
        background_groups[everyone] = dist.new_group(backend="gloo")
    return background_groups[everyone]


def write_and_rename(directory, tensors, extra, group=None):
    """Writes {name: tensor} and extra. The folder gets its name, and replaces the checkpoint before
    it, only when every file is complete. group: in which the ranks meet; None: that of all ranks"""
    target, part, old = (Path(f"{directory}{end}") for end in ("", ".part", ".old"))
    rank = dist.get_rank() if dist.is_initialized() else 0

    # An empty folder, beside the checkpoint that is there.
    with fail_on_all_ranks(directory, part, group):
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)

    # Every rank writes its shards.
    with fail_on_all_ranks(directory, part, group):
        # No copies ahead: with them, the writer asks CUDA for a stream even where all tensors are
        # on the CPU.
        writer = dcp.FileSystemWriter(part, per_thread_copy_ahead=0)
        run_dcp(dcp.save, tensors, storage_writer=writer, process_group=group)

    # Every rank computes the checksums of the files that it has written itself, so that they take
    # no longer with more ranks.
    with fail_on_all_ranks(directory, part, group):
        mine = {path.name: describe_file(path) for path in sorted(part.glob(f"__{rank}_*.distcp"))}
    manifest = {}
    for files in gather_from_ranks(mine, group):
        manifest.update(files)
    with fail_on_all_ranks(directory, part, group):
        wait_for_files(part, manifest)

    # The first rank adds the rest, and gives the folder its name.
    with fail_on_all_ranks(directory, part, group):
        if rank == 0:
            # To memory first: torch's own writer says nothing of a full disk that a reader would
            # understand.
            data = io.BytesIO()
            torch.save(extra or {}, data)
            write_synced(part / "extra.pt", data.getbuffer())
            for path in part.iterdir():
                if path.name not in manifest:
                    manifest[path.name] = describe_file(path)
            write_synced(part / "manifest.json", json.dumps(manifest).encode())
            # Two renames. Between them the only complete checkpoint is called .old, where
            # `find_folder` looks for it too.
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                target.rename(old)
            part.rename(target)
            shutil.rmtree(old, ignore_errors=True)


def save_policy(directory, weights, extra):
    """Writes the folder of a policy that is only to be used, on one process: weights {name: tensor}
    in their dtypes, and `extra` as of save_checkpoint"""
    folder = Path(directory)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
    write_safetensors(folder / WEIGHTS, entries, weights.values())
    torch.save(extra, folder / "extra.pt")
    manifest = {name: describe_file(folder / name) for name in (WEIGHTS, "extra.pt")}
    (folder / "manifest.json").write_text(json.dumps(manifest))


SEEN_AFTER = 10.0  # seconds after which a file on a shared disk is seen by all machines


def wait_for_files(folder, names):
    """Returns when all files are there. A folder that another machine does not see would hold a
    part of the checkpoint only: OSError"""
    deadline = time.monotonic() + SEEN_AFTER
    while not all((folder / name).exists() for name in names):
        if time.monotonic() > deadline:
            raise OSError("not every rank sees this folder: give an --out on a disk that all share")
        time.sleep(0.1)


@contextmanager
def fail_on_all_ranks(directory, part, group):
    """Around one step of a save: where it fails on any rank, the unfinished folder `part` is
    deleted and SaveFailed is raised on every rank."""
    problem = ""
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        problem = explain_write_error(error)

    # A rank that failed gets here too, so all learn of the failure and none waits in vain.
    problems = [p for p in gather_from_ranks(problem, group) if p]
    if problems:
        # Every rank does it: each may have written to a disk of its own.
        shutil.rmtree(part, ignore_errors=True)
        raise SaveFailed(
            f"{directory}: this checkpoint could not be saved: {problems[0]}; "
            "what was saved before is whole"
        )


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


def checkpoint_tensors(model, optimizer):
    """{name: tensor} of what this rank holds, DTensors where cut: weights, buffers, optimizer state
    by parameter name. The optimizer must have made its state already, as muon.py does before the
    first step: loading fills tensors in place, each in its layout."""
    # A forward without backward leaves gathered copies of some weights; the shards are wanted.
    if isinstance(model, FSDPModule):
        model.reshard()
    tensors = {f"model.{name}": t.detach() for name, t in model.state_dict().items()}
    if optimizer is not None:
        for name, p in model.named_parameters():
            for key, t in optimizer.state[p].items():
                tensors[f"optimizer.{name}/{key}"] = t
    return tensors


def run_dcp(verb, tensors, **where):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        verb(tensors, no_dist=not dist.is_initialized(), **where)


def check_same_on_ranks(what, value):
    """Ends the command on every rank unless all have the same value of what each of them has read
    by itself, such as the digest of a text"""
    if len(set(gather_from_ranks(value))) > 1:
        usage_error(f"the ranks have read different {what}: all machines need the same files")


def gather_from_ranks(item, group=None):
    """The items of all ranks, on every rank. Also a barrier: the ranks wait for each other."""
    if not dist.is_initialized():
        return [item]
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item, group)
    return items


# ---------------------------------------------------------------- read


def find_folder(directory):
    """A save that ended between its two renames left the checkpoint before it as .old."""
    return Path(directory) if Path(directory).exists() else Path(f"{directory}.old")


def checkpoint_exists(directory):
    return find_folder(directory).exists()


def load_checkpoint(directory, model, optimizer=None, more=None):
    """Read a checkpoint into model, optimizer and `more`, in place -> extra. The layout that saved
    it may differ from this one. A folder that is missing, damaged or of another model: ValueError
    on every rank, before anything is loaded."""
    # Is every byte as it was written?
    folder, manifest = read_manifest(directory)
    check_all_sums(directory, folder, manifest)
    tensors = checkpoint_tensors(model, optimizer) | (more or {})
    if WEIGHTS in manifest:
        weights = open_safetensors(folder / WEIGHTS)
        weights = {f"model.{name}": tensor for name, tensor in weights.items()}
        stored = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    else:
        reader = CheckpointReader(folder, manifest)
        metadata = reader.read_metadata().state_dict_metadata
        stored = {name: tuple(entry.size) for name, entry in metadata.items()}

    # Every tensor of the folder must have its place here, and the other way round. Without an
    # optimizer only the model's are asked for.
    asked = {name for name in stored if optimizer is not None or name.startswith("model.")}
    for name in sorted(asked | tensors.keys()):
        there = stored.get(name, "missing")
        here = tuple(tensors[name].shape) if name in tensors else "missing"
        if there != here:
            raise ValueError(
                f"{directory}: {name} is {there} there and {here} here: "
                "not one of this model and optimizer"
            )

    # Each rank reads the parts of its own shards, whatever ranks have written them.
    extra = load_extra(directory)
    if WEIGHTS in manifest:
        for name, tensor in tensors.items():
            copy_shard(tensor, weights[name])
        return extra
    try:
        run_dcp(dcp.load, tensors, storage_reader=reader)
    # Whoever can write the folder can write its checksums, too.
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise DamagedCheckpoint(
            f"{directory}: the weights cannot be read ({type(cause).__name__}): {DAMAGED}"
        ) from None
    return extra


def load_model(directory):
    """-> the model of a checkpoint on the CPU, and what the checkpoint says of itself"""
    extra = load_extra(directory)
    model = config_of(extra["model"]).build_model()
    load_checkpoint(directory, model)
    return model, extra


def copy_shard(tensor, whole):
    """tensor <- what this rank holds of a whole one"""
    if isinstance(tensor, DTensor):
        whole = whole.to(tensor.device)
        whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
    tensor.copy_(whole)


def load_extra(directory):
    """What a checkpoint says of itself: configuration, model, tokenizer, step, source. The model
    can be built by it before it is loaded."""
    folder, manifest = read_manifest(directory)
    check_sum(directory, folder, "extra.pt", manifest)
    try:
        return torch.load(folder / "extra.pt", weights_only=True)
    # whatever unpickling damaged bytes may raise
    except Exception as error:
        raise DamagedCheckpoint(
            f"{directory}: extra.pt cannot be read ({type(error).__name__}): {DAMAGED}"
        ) from None


def read_manifest(directory):
    """-> the folder, and its manifest {file: {"bytes": size, "crc32": checksum}}. Names and sizes
    are checked here, checksums by check_sum. DamagedCheckpoint where something is wrong."""
    # The manifest is written last: a folder without a readable one was never complete.
    folder = find_folder(directory)
    if not folder.is_dir():
        raise DamagedCheckpoint(f"{directory}: no such folder")
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        kinds = {(type(entry["bytes"]), type(entry["crc32"])) for entry in manifest.values()}
        if kinds != {(int, str)}:
            raise ValueError
    # whatever a file that is none, or one of other values, may raise
    except Exception:
        raise DamagedCheckpoint(
            f"{directory}: not a complete checkpoint (no readable manifest.json)"
        ) from None

    # Nothing outside the folder is part of a checkpoint, whatever a manifest says: its names must
    # be those of files here. A file of another size was cut off or replaced.
    there = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    for name, entry in manifest.items():
        if there.get(name) != entry["bytes"]:
            raise DamagedCheckpoint(
                f"{directory}: {name!r} has {there.get(name, 0)} of {entry['bytes']} bytes: "
                f"{DAMAGED}"
            )

    # Nothing can be loaded without the weights, in one form or the other, and what is said of them.
    weights = WEIGHTS if WEIGHTS in manifest else ".metadata"
    for name in (weights, "extra.pt"):
        if name not in manifest:
            raise DamagedCheckpoint(
                f"{directory}: manifest.json does not name {name}: not a complete checkpoint"
            )
    return folder, manifest


def check_sum(directory, folder, name, manifest):
    """DamagedCheckpoint if the file `name` has another checksum than the manifest says. directory:
    the path that the message names"""
    if describe_file(folder / name) != manifest[name]:
        raise DamagedCheckpoint(
            f"{directory}: {name} holds other bytes than were written (checksum): {DAMAGED}"
        )


def check_all_sums(directory, folder, manifest):
    """Raise DamagedCheckpoint on every rank unless every byte of a checkpoint is as it was written.
    Each rank reads its share of the files."""
    # No rank raises before all know: one that left alone would keep the others waiting.
    problem, rank, world = "", 0, 1
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    try:
        for name in sorted(manifest)[rank::world]:
            check_sum(directory, folder, name, manifest)
    except DamagedCheckpoint as error:
        problem = str(error)
    except OSError as error:
        problem = f"{directory}: cannot be read: {error.strerror or error}"
    problems = [p for p in gather_from_ranks(problem) if p]
    if problems:
        raise DamagedCheckpoint(problems[0])


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
                f"{self.folder}: .metadata cannot be read ({type(error).__name__}): {DAMAGED}"
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
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    }

    def find_class(self, module, name):
        """Called by pickle for each name in the file -> the class, or UnpicklingError"""
        # The path under which the checkpoint was saved, on any system and with any Python: a path
        # that cannot touch the disk.
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return PurePath
        # A dtype is pickled under its name, such as torch.float32.
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


# ---------------------------------------------------------------- choose

# {stage: the one whose checkpoint it starts from}
PREVIOUS_STAGE = {"long": "pretrain", "sft": "long", "rl": "sft", "eval": "rl"}


def last_stage(folder):
    """The checkpoint of a run's last stage, or the folder itself where it is no run"""
    for stage in ("rl", "sft", "long", "pretrain"):
        if checkpoint_exists(Path(folder, stage)):
            return Path(folder, stage)
    return Path(folder)


def unfinished_label(folder):
    """The label that a result made from this checkpoint needs: "" at the end of its stage, before
    that "unfinished: step 3 of 60"."""
    extra = load_extra(folder)
    step, steps = extra.get("step"), extra["config"].get("steps")
    if step is None or steps is None or step >= steps:
        return ""
    return f"unfinished: step {step} of {steps}"


def made_by(folder):
    """The label of a checkpoint's recipe: "" for the plain one; for an arm of an experiment, the
    patch that it was trained with. Evaluation does not apply the patch."""
    patch = load_extra(folder).get("patch", "")
    return f"made by {patch}" if patch else ""


def open_checkpoint(path):
    """What a checkpoint says of itself. One that cannot be read ends the command."""
    try:
        return load_extra(path)
    except ValueError as error:
        usage_error(str(error))


def checkpoint_paths(stage, out, start_from):
    """-> the path of the stage's own checkpoint, and the path of the checkpoint from which it
    starts: that of the stage before, or None for the first stage"""
    before = PREVIOUS_STAGE.get(stage)
    origin = Path(start_from or out, before) if before else None
    # --start_from may name the checkpoint itself.
    if before and start_from and Path(start_from, "manifest.json").exists():
        origin = Path(start_from)
    return Path(out, stage), origin


def open_start(stage, out, start_from):
    """What the checkpoint says of itself that a stage continues: its own or, where there is none,
    that of the stage before. None where neither is there"""
    for path in checkpoint_paths(stage, out, start_from):
        if path and checkpoint_exists(path):
            return open_checkpoint(path)
    return None


def digest_checkpoint(path):
    """A digest by which a checkpoint is known again in whatever folder: of its manifest, which has
    the checksum of every file. "" where there is none"""
    manifest = find_folder(path) / "manifest.json"
    return digest_file(manifest) if manifest.is_file() else ""


def describe_origin(path):
    """What a checkpoint keeps of the one that its stage began from: where it stood, and its
    digest"""
    return {"path": str(Path(path).resolve()), "digest": digest_checkpoint(path)}


def find_origin(saved, *others):
    """-> the path of the checkpoint that a stage began from, where it stood or at one of `others`;
    None where it is no longer there. One that was trained anew since is another checkpoint. saved:
    what the stage's own checkpoint says of itself"""
    origin = saved.get("origin")
    for path in [origin["path"], *others] if origin else []:
        if digest_checkpoint(path) == origin["digest"]:
            return Path(path)
    return None


def find_start(config, out, origin, sizes, patch):
    """-> (begun, previous), each checked, or None where it is not there. begun: what the stage's
    own checkpoint in `out` says; the stage goes on with it. previous: what the checkpoint of the
    stage before in `origin` says; it is read only where `begun` is None, and the stage starts from
    it. sizes: names of the fields that are the model's shape; patch: see check_patch"""
    # A finished stage is checked too: its result belongs to the values it was made with.
    if checkpoint_exists(out):
        begun = open_checkpoint(out)
        check_same_values(config, out, origin, begun)
        check_patch(out, begun, patch)
        check_same_origin(config, out, origin, begun)
        check_same_data(config, out, begun["source"])
        return begun, None

    # A published model brings its own shape; no flag sets it.
    previous = open_checkpoint(origin) if origin and checkpoint_exists(origin) else None
    check_origin(config, origin, previous)
    if previous and not config.init_from:
        check_same_model(config, origin, previous, sizes)
    return None, previous


def check_origin(config, origin, previous):
    """The stage before must be there, where there is one, and must have begun from the same
    published model."""
    if previous and previous["config"]["init_from"] != config.init_from:
        usage_error(
            f"{origin} did not begin from --init_from={config.init_from}: take another --out, or "
            "leave the flag away"
        )
    if not previous and origin and (config.start_from or not config.init_from):
        usage_error(
            f"--stage={config.stage} starts from {origin}, which is not there: run the "
            f"{origin.name} stage first, or give --start_from=FOLDER"
        )


def check_same_origin(config, out, origin, begun):
    """A stage that was begun keeps its origin: --start_from may be left away, or lead to the same
    checkpoint, in whatever folder. One that is not there any more is known by its path."""
    made = begun.get("origin")
    if not (made and config.start_from):
        return
    there = describe_origin(origin)
    key = "digest" if there["digest"] else "path"
    if there[key] != made[key]:
        usage_error(
            f"{out} began from {made['path']}, and {origin} is another checkpoint: leave "
            "--start_from away, or take another --out"
        )


def other_values(config, saved, names):
    """-> {name: the value that a checkpoint was made with} of those fields that have another one
    now. saved: what the checkpoint says of itself"""
    made = fill_in(type(config), saved["config"])
    return {name: made[name] for name in names if made[name] != getattr(config, name)}


def check_same_model(config, origin, previous, sizes):
    """A stage takes over the weights of the stage before, so its model must have the same shape. In
    another model the same weights would compute another function."""
    # The stage `long` sets yarn. All other stages keep the value of the stage before.
    names = sizes | {"vocab"} | (set() if config.stage == "long" else {"yarn"})
    other = other_values(config, previous, sorted(names))
    if other:
        # The flags that bring the model back. Where the scales differ, one brings back all sizes.
        flags = other_values(config, previous, ["scale"]) or other
        words = [f"--{name}={write_value(value)}" for name, value in flags.items()]
        made = ", ".join(f"{name}={value}" for name, value in other.items())
        usage_error(f"{origin} was made with {made}: give {' '.join(words)} here, too")


def check_same_values(config, out, origin, begun):
    """A stage that was begun goes on with the values it was begun with."""
    # The first value that differs ends the command, with a way to begin again: in another folder
    # or, where there is a stage before it, from that one.
    # A flag that the stage does not read changes nothing in it.
    names = []
    for name, rule in rules_of(type(config)).items():
        if rule.is_read_by(config.stage) and not rule.may_change:
            names.append(name)
    for name, made in other_values(config, begun, names).items():
        again = ""
        if origin:
            start = begun["config"]["start_from"] or config.out
            again = f" (--stage={config.stage} --start_from={start} begins where it began)"
        # An empty text is shown as one.
        was = write_value(made) or '""'
        now = write_value(getattr(config, name)) or '""'
        usage_error(f"{out} was made with {name}={was}, not {now}: take another --out{again}")


def check_same_data(config, out, source):
    """A stage goes on with the texts, and with the tasks, that it was begun with. source: what its
    checkpoint keeps of them. The path of a file or folder may be the same and its content another.
    """
    if "data" in source:
        train, held = source_files.python_sources(config.data)
        if source["data"] != source_files.digest_texts(train, held):
            folder = config.data or "this Python's standard library"
            usage_error(
                f"{folder} no longer holds the text that {out} was begun with: put it back, or "
                "take another --out"
            )
    tasks = digest_file(config.tasks)
    if source.get("file", tasks) != tasks:
        usage_error(
            f"{config.tasks} is no longer the file that {out} was begun with: take another --out"
        )


def check_patch(out, saved, patch):
    """A stage goes on with the change of the recipe that it was begun with. saved: what its
    checkpoint in `out` says; patch: the change that is in force now"""
    made = saved["patch"]
    if made != patch:
        how = f"python -m experiments.runner --arm={made} -- ..." if made else "python train.py"
        usage_error(f"{out} was made by {how}: go on with that, or take another --out")
