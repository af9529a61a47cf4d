"""command/checks.py: is what was asked for possible, and does it mean anything?

All of it is looked at before the first file is written or the first weight is drawn: a mistake
costs one line and a second, not the hours until the stage that meets it. First flags that
contradict each other, then what the machine has to offer (folders that can be written, ranks that
can cut the model). The range of a single flag stands with the flag, in train.Config.

It stands apart from train.py because a reader of the recipe need not see it: what a value may be
says nothing about what is done with it. Whether a checkpoint fits is said by
command/checkpoints.py.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from command import checkpoints, published_model
from command.flags import is_first_rank, rules_of, usage_error, write_value
from command.hardware import device_of, dtype_of, fast_dtype, this_card, uses_card
from command.output_files import check_writable
from fast.twins import describe_edits
from world.task import Refusal
from repositories.task_file import read_tasks


def check_model_sizes(config):
    """Sizes that the products, the number formats and the rotary embedding can work with"""
    for name in ("dim", "expert_ffn"):
        size = getattr(config, name)
        # Whatever the dtype of this run is: its weights may later be read in another one.
        if size % 8 and not config.init_from:
            usage_error(
                f"--{name}={size}: a multiple of 8, grouped products of experts read rows of 16 "
                "bytes"
            )
        if config.precision != "dtype" and size % 32:
            usage_error(
                f"--{name}={size}: a multiple of 32 with --precision={config.precision}, which "
                "scales numbers in blocks of so many"
            )

    if config.dim % (4 * config.heads) and not config.init_from:
        usage_error(
            f"--dim={config.dim}: a multiple of 4 * --heads={config.heads}; half of dim / heads "
            "dimensions are turned by RoPE in pairs"
        )


def check_hardware(config):
    """Is there such a device, and can it compute in this dtype?"""
    if config.device == "cuda" and not torch.cuda.is_available():
        usage_error("--device=cuda: there is no such device here")
    card = device_of(config) == "cuda"
    if config.dtype == "bfloat16" and card and fast_dtype("cuda") == torch.float32:
        usage_error(
            f"--dtype=bfloat16: {this_card().name} has no bf16 (compute capability 8.0 has): leave "
            "the flag away, for float32"
        )


def check_together(config, given, stage, sizes):
    """What goes with what. given: the flags that were typed; sizes: the fields that are the
    model's shape"""
    check_model_sizes(config)
    check_hardware(config)
    # A published model has its sizes. Only `context` may be given: it is the length of training
    # sequences, too.
    own_sizes = sizes - {"context"} | {"vocab"}
    if config.init_from and own_sizes & set(given):
        name = min(own_sizes & set(given))
        usage_error(
            f"--{name} beside a published model: its sizes are its own "
            f"({config.init_from}/config.json); leave the flag away"
        )
    if config.summarize and config.trigger >= 0.875:
        usage_error(
            f"--trigger={config.trigger:g}: below .875, since query and summary take the window's "
            "last eighth"
        )

    # What samples, and what RL can learn from.
    if config.plain and config.workers:
        usage_error(
            f"--plain=1 samples in the training process: without --workers={config.workers}"
        )
    if stage == "rl" and config.group_size == 1 and not config.feedback:
        usage_error(
            "--group_size=1 has nothing to learn from: a rollout's advantage is its reward less "
            "the group's mean; take more, or --feedback"
        )

    # What some combinations of parallelism, number format and compiler cannot do.
    if stage == "rl" and config.cp > 1:
        usage_error(
            "--cp is for pretrain, long and sft; in rl take --ep or --dp_replicate (run the stages "
            "one by one with --stage)"
        )
    # Only the twin of the experts rounds. An edit of theirs puts it aside, as --plain does.
    if config.precision != "dtype":
        edited = any(line.startswith("moe.Experts.forward") for line in describe_edits())
        if config.plain or edited:
            usage_error(
                f"--precision={config.precision} goes with --plain=0 and moe.Experts.forward as "
                "it was: rounding to few bits is in its twin in fast/"
            )
    if config.mtp and config.cp > 1 and stage != "eval":
        usage_error("--mtp goes with --cp=1: the head that drafts reads whole sequences")
    if config.compile and dtype_of(config) == torch.float32:
        usage_error(
            "--compile=1 goes with products in bfloat16: torch compiles the experts' grouped "
            "products in no other dtype"
        )

    # Sizes against each other.
    check_windows(config, stage)
    if config.num_experts_per_tok > config.experts:
        usage_error(
            f"--num_experts_per_tok={config.num_experts_per_tok}: at most all of "
            f"--experts={config.experts}"
        )


def check_windows(config, stage):
    """The ranks of --cp share a window in 2 * cp equal parts. A window that cannot be cut so would
    else fail in the validation, when the stage has already been trained."""
    parts, window = 2 * config.cp, config.text_window
    if stage in ("pretrain", "long") and config.cp > 1 and window % parts:
        flags = "--context" if stage == "pretrain" else "--context times --yarn"
        usage_error(
            f"--cp={config.cp} cuts a window into {parts} equal parts, and {flags} is {window}: "
            f"take a multiple of {parts}"
        )


def check_surroundings(configs, given, check_cards):
    """What the stages to come will read and write is tried now, and not when those before are done.
    check_cards: hsdp.py's"""
    # Each process needs a GPU of its own.
    if uses_card(given):
        try:
            check_cards()
        except ValueError as error:
            usage_error(str(error))

    first = next(iter(configs.values()))
    check_tasks(first.tasks)
    published_model.check_positions(configs)
    if Path(first.out, "manifest.json").exists():
        usage_error(f"--out={first.out} is a checkpoint: give a folder for the run")
    try:
        check_writable(first.out)
    except OSError as error:
        usage_error(f"--out={first.out} cannot be written: {error.strerror or error}")


def check_tasks(path):
    """A file of tasks must hold some."""
    if not path:
        return
    try:
        tasks = read_tasks(path)
    except Refusal as refusal:
        usage_error(refusal)
    if not tasks:
        usage_error(f"{path}: holds no tasks")


def say_other_rules(config, origin, previous, say):
    """One line where rl plays by other rules than the demonstrations that its policy has learned
    from: the flags that sft and rl read and pretrain does not. origin: the path of the checkpoint
    that it begins from; previous: what that says, or None; say: prints a line"""
    if config.stage != "rl" or not previous or previous["config"]["stage"] != "sft":
        return
    names = []
    for name, rule in rules_of(type(config)).items():
        if rule.is_read_by("sft") and rule.is_read_by("rl") and not rule.is_read_by("pretrain"):
            names.append(name)
    words = []
    for name, made in checkpoints.other_values(config, previous, names).items():
        now = write_value(getattr(config, name))
        words.append(f"--{name} is {now} and was {write_value(made)}")
    if words:
        say(f"rl plays by other rules than {origin} was made with: {', '.join(words)}")


def say_positions(config, positions, say):
    """One line where the agent's window is longer than the model was made for: rotary embedding
    goes on beyond it, untrained. (A published model refuses such a window, see published_model.py.)
    """
    if config.stage in ("sft", "rl") and config.window > positions:
        say(
            f"{config.stage}: --window={config.window} is longer than the {positions} positions "
            "that the model was made for (--context times --yarn)"
        )


def tasks_with_room(tasks, has_room, window, say):
    """The given tasks without those whose statement leaves no room for a turn: rollouts of them
    would count as failed. One line says which they are. has_room: a bool for each task; say: prints
    a line"""
    fitting = [task for task, room in zip(tasks, has_room) if room]
    names = [task.instance_id for task, room in zip(tasks, has_room) if not room]

    # Without any task that fits, there is nothing to train on. Else three of the names are shown.
    if names and not fitting:
        usage_error(f"--window={window}: none of the tasks leaves room for a turn")
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        say(
            f"--window={window} leaves no room for a turn in {len(names)} of {len(tasks)} "
            f"tasks, which are left out: {', '.join(name[:60] for name in names[:3])}{more}"
        )
    return fitting


def say_idle_flags(configs, given):
    """One line about the flags that were given and change nothing in any stage of the command: the
    user would believe in an effect. configs: {stage: its configuration}"""
    words = []
    rules = rules_of(type(next(iter(configs.values()))))
    for name in given:
        reasons = [rules[name].why_idle(config) for config in configs.values()]
        if all(reasons):
            words.append(f"--{name} ({reasons[0]})")
    if words and is_first_rank():
        tqdm.write(f"flags that change nothing in any stage of this command: {', '.join(words)}")


def check_layout(configs, Layout):
    """Can these ranks cut the sizes of every stage's model, and has each a task in rl? Where each
    rank holds all, nothing is cut. configs: {stage: its configuration}; Layout: hsdp.py's"""
    # Before torch.distributed is set up, torchrun's variable says how many ranks there are.
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))

    # Layout itself refuses degrees that do not divide the ranks. Only stacks of experts have sizes
    # that must be divisible; the first layer is dense, so layer 1 stands for all. A published
    # model has sizes of its own, and an evaluation cuts nothing.
    for config in configs.values():
        E, F, D = config.experts, config.expert_ffn, config.dim
        try:
            layout = Layout(world, config.cp, config.ep, config.dp_replicate)
            cut = layout.shard > 1 or config.ep > 1
            if cut and not config.init_from and config.stage != "eval" and config.layers > 1:
                experts = "layers.1.ffn.experts"
                layout.check_expert_shapes(
                    {f"{experts}.w_gate": (E, F, D), f"{experts}.w_down": (E, D, F)}
                )
        except ValueError as error:
            usage_error(str(error))

    # The ranks of one cp group share their tasks.
    if "rl" in configs:
        ranks = world // configs["rl"].cp
        if configs["rl"].tasks_per_step < ranks:
            usage_error(
                f"--tasks_per_step={configs['rl'].tasks_per_step}: at least one for each of the "
                f"{ranks} data ranks (fewer with --processes=1)"
            )
