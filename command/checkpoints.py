"""command/checkpoints.py: which checkpoint does a stage go on from, and does it fit?

A stage goes on with its own checkpoint where there is one, else with that of the stage before, in
the folder --start_from or --out. Either must have been made with the same model, and its own one by
the same command and from the same data: otherwise the run that results would be neither of the two.
What differs is named in one line, with the flag that brings it back.

It stands apart from train.py because the recipe never needs it: where everything fits, nothing here
does anything. Checkpoints themselves (saving, loading, checksums) are hsdp.py's.
"""

from dataclasses import asdict
from pathlib import Path

import hsdp
from command import source_files
from command.flags import usage_error, write_value
from command.old_flags import changed_flags
from command.output_files import digest_file
from command.published_model import published_config

# {stage: the one whose checkpoint it starts from}
PREVIOUS_STAGE = {"long": "pretrain", "sft": "long", "rl": "sft", "eval": "rl"}


# Flags that may change when a stage goes on: they say where and how it is computed, not what.
NOT_COMPARED = {
    "processes",
    "out",
    "export",
    "start_from",
    "stage",
    "resume",
    "device",
    "compile",
    "plain",
    "save_every",
    "cp",
    "ep",
    "dp_replicate",
    "micro_tokens",
    "recompute",
    "eval_levels",
    "eval_tasks",
    "eval_samples",
    "workers",
    "staleness",
}


# Flags that older checkpoints do not have: {flag: the value that describes what was done then}
BEFORE_THE_FLAG = {"precision": "dtype", "mtp": False}


def compared_values(config):
    """{field: value} of all that must be the same when a stage goes on"""
    return {name: value for name, value in asdict(config).items() if name not in NOT_COMPARED}


def open_checkpoint(path):
    """What a checkpoint says of itself: configuration, model, tokenizer, step, source"""
    try:
        return hsdp.load_extra(path)
    except ValueError as error:
        usage_error(str(error))


def checkpoint_paths(stage, out, start_from):
    """-> the path of the stage's own checkpoint, and the path of the checkpoint from which it
    starts: that of the stage before, or None for the first stage"""
    before = PREVIOUS_STAGE.get(stage)
    return Path(out, stage), Path(start_from or out, before) if before else None


def find_checkpoint(stage, out, start_from):
    """The path of the checkpoint that a stage continues: its own or, where there is none, that of
    the stage before. None where neither is there"""
    for path in checkpoint_paths(stage, out, start_from):
        if path and hsdp.checkpoint_exists(path):
            return path
    return None


def find_init_from(stage, out, start_from):
    """The --init_from of the checkpoint that this stage continues, or an empty text. A run that
    began from a published model goes on with it, also where the flag is not typed again."""
    path = find_checkpoint(stage, out, start_from)
    return open_checkpoint(path)["config"].get("init_from", "") if path else ""


def check_same_model(config, origin, saved, sizes):
    """A stage takes over the weights of the stage before, so its model must have the same shape. In
    another model the same weights would compute another function. saved: what the checkpoint in
    `origin` says; sizes: the fields that are the model's shape"""
    # The stage `long` sets yarn. All other stages keep the value of the stage before.
    made, names = saved["config"], sizes | {"vocab"}
    if config.stage != "long":
        names = names | {"yarn"}

    # What differs. A field that the checkpoint does not know cannot be compared.
    other = {}
    for name in sorted(names):
        before = made.get(name, BEFORE_THE_FLAG.get(name))
        if before is not None and before != getattr(config, name):
            other[name] = before
    if not other:
        return

    # The flags that bring the model back. Where the scales differ, one flag brings back all sizes.
    words = [f"--{name}={write_value(value)}" for name, value in other.items()]
    if made["scale"] != config.scale:
        words = [f"--scale={made['scale']}"]
    usage_error(
        f"{origin} was made with {', '.join(f'{name}={value}' for name, value in other.items())}: "
        f"give {' '.join(words)} here, too"
    )


def check_same_gates(config, path, saved):
    """Refuses a checkpoint whose gates were computed in another way. With one expert per token, an
    earlier version divided the gate by itself, so that it was always 1; now it is not divided. The
    same weights with other gates would compute another function."""
    if saved["model"].get("norm_gates", True) != (config.num_experts_per_tok > 1):
        usage_error(
            f"{path} was made with --num_experts_per_tok=1 and a gate that is always 1, "
            "which teaches its routers nothing: begin anew in another --out"
        )


def check_same_data(config, state, now):
    """Refuses to go on with other texts than those the stage began with. state: what the stage's
    checkpoint keeps of its data; now: the digest of the texts that are there now"""
    # A checkpoint of an earlier version has no digest, and is not compared.
    if state.get("data", now) != now:
        folder = config.data or "this Python's standard library"
        usage_error(
            f"{folder} no longer holds the text that {config.out}/{config.stage} was begun with: "
            "put it back, or take another --out"
        )


def check_same_values(config, out, origin, saved, digest):
    """A stage that was begun goes on with the values it was begun with, and with the same tasks.
    saved: what its checkpoint in `out` says; origin: where the stage before stands; digest: of the
    file of tasks, now"""
    # The first value that differs ends the command, with a way to begin again.
    made = saved["config"]
    for name, value in compared_values(config).items():
        before = made.get(name, BEFORE_THE_FLAG.get(name))
        if before == value:
            continue

        # How it was made, and, where there is a stage before it, how to begin anew from that one.
        how = f"by a version without --{name}"
        if before is not None:
            how = f"with {name}={before}, not {value}"
        again = ""
        if origin:
            begun = made["start_from"] or config.out
            again = f" (--stage={config.stage} --start_from={begun} begins from its stage before)"
        usage_error(f"{out} was made {how}: take another --out{again}")

    # The path of the tasks may be the same, and the file another.
    if saved["source"].get("file", digest) != digest:
        usage_error(
            f"{config.tasks} is no longer the file that {out} was begun with: take another --out"
        )


def check_patch(out, saved, patch):
    """A stage goes on with the change of the recipe that it was begun with. saved: what its
    checkpoint in `out` says; patch: the change that is in force now"""
    # Some flags of earlier versions changed the recipe as a patch does now.
    for name, (made, place) in changed_flags(saved["config"]).items():
        usage_error(
            f"{out} was made with {name}={made}, no flag any more: what it did stands in {place}; "
            "take another --out"
        )

    made = saved.get("patch", "")
    if made != patch:
        how = f"python -m experiments.runner --arm={made} -- ..." if made else "python train.py"
        usage_error(f"{out} was made by {how}: go on with that, or take another --out")


def find_start(config, out, origin, sizes, patch):
    """-> (begun, previous), each checked, or None where it is not there. begun: what the stage's
    own checkpoint in `out` says; the stage goes on with it. previous: what the checkpoint of the
    stage before in `origin` says; it is read only where `begun` is None, and the stage starts from
    it."""
    if hsdp.checkpoint_exists(out):
        begun = open_checkpoint(out)
        check_begun(config, out, origin, begun, patch)
        return begun, None
    previous = None
    if origin and hsdp.checkpoint_exists(origin):
        previous = open_checkpoint(origin)
    check_previous(config, origin, previous, sizes)
    return None, previous


def check_previous(config, origin, previous, sizes):
    """May a stage start from the stage before? previous: what that one's checkpoint in `origin`
    says, or None; sizes: the fields that are the model's shape"""
    check_origin(config, origin, previous)
    # A published model brings its own shape and gates; no flag sets them.
    if previous and not config.init_from:
        check_same_model(config, origin, previous, sizes)
        check_same_gates(config, origin, previous)


def check_begun(config, out, origin, begun, patch):
    """May a stage go on with its own checkpoint? A finished stage is checked too: its result
    belongs to the values it was made with. begun: what its checkpoint in `out` says"""
    if not config.init_from:
        check_same_gates(config, out, begun)
    check_same_values(config, out, origin, begun, digest_file(config.tasks))
    check_patch(out, begun, patch)
    if config.data and config.stage in ("pretrain", "long"):
        train, held = source_files.python_sources(config.data)
        check_same_data(config, begun["source"], source_files.digest_texts(train, held))


def check_origin(config, origin, saved):
    """The stage before must be there, where there is one, and must have begun from the same
    published model."""
    if saved and saved["config"].get("init_from", "") != config.init_from:
        usage_error(
            f"{origin} did not begin from --init_from={config.init_from}: take another --out, or "
            "leave the flag away"
        )
    if not saved and origin and (config.start_from or not config.init_from):
        usage_error(
            f"--stage={config.stage} starts from {origin}, which is not there: run the "
            f"{origin.name} stage first, or give --start_from=FOLDER"
        )


def check_positions(configs):
    """A published model has positions for a limited number of tokens. The window of each stage is
    compared with it before the first stage begins."""
    for stage, config in configs.items():
        if not config.init_from or stage == "eval":
            continue

        # The sizes are those in the checkpoint, or, before there is one, those of the folder.
        path = find_checkpoint(stage, config.out, config.start_from)
        saved = open_checkpoint(path) if path else None
        if saved and saved["config"].get("init_from", "") != config.init_from:
            # The checkpoint began from another model. The stage itself refuses it, with its name.
            continue
        try:
            published_config(config, saved)
        except (ValueError, OSError) as error:
            usage_error(str(error))
