"""command/checks.py: is what was asked for possible, and does it mean anything?

All of it is looked at before the first file is written or the first weight is drawn: a mistake
costs one line and a second, not the hours until the stage that meets it. First each flag by itself,
then flags that contradict each other, then what the machine has to offer (folders that can be
written, ranks that can cut the model).

It stands apart from train.py because a reader of the recipe need not see it: what a value may be
says nothing about what is done with it. Whether a flag that is allowed changes anything in a stage
is said by command/idle_flags.py; whether a checkpoint fits, by command/checkpoints.py.
"""

import os
import sys

import torch
import torch.distributed as dist

import feedback_distill
import hsdp
import rollout
import synth_tasks
from command.flags import is_first_rank, usage_error
from command.hardware import dtype_of, this_card, uses_card
from command.output_files import check_writable
from moe import fast_dtype
from world.task import Refusal
from world.task_file import read_tasks
from command import drawing

# {flag: the words that it takes}
CHOICES = {
    "optimizer": ("muon", "adamw"),
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16"),
    "weight_dtype": ("float32", "bfloat16"),
    "precision": ("dtype", "mxfp8", "nvfp4"),
}
# names of flags, by the values they take
AT_LEAST_ONE = (
    "steps context batch_tokens micro_tokens tasks_per_step group_size cp ep dp_replicate dim "
    "layers heads num_experts_per_tok expert_ffn dense_ffn kv_lora yarn window "
    "max_turns demos eval_tasks eval_samples"
).split()
ABOVE_ZERO = ("grad_clip", "rope_theta", "temperature")
SHARES = ("seq_len_warmup", "trigger", "warmup", "decay")


def check_values(config):
    """Each flag by itself"""
    # Tables of what a value may be.
    for name, allowed in CHOICES.items():
        value = getattr(config, name)
        if value not in allowed:
            usage_error(f"--{name} takes one of {', '.join(allowed)}, not {value!r}")
    for name in AT_LEAST_ONE:
        if getattr(config, name) < 1:
            usage_error(f"--{name} must be at least 1")
    for name in ABOVE_ZERO:
        if getattr(config, name) == 0:
            # A policy that never varies has nothing to learn from.
            greedy = " (python eval.py RUN --temperature=0 is for greedy evaluation)"
            usage_error(f"--{name} must be above 0" + greedy * (name == "temperature"))
    for name in SHARES:
        if getattr(config, name) > 1:
            usage_error(f"--{name}={getattr(config, name):g}: a share, at most 1")

    # What has a reason of its own.
    check_model_sizes(config)
    check_hardware(config)
    check_levels(config)
    # The log-probs of an update divide the logits by it, and so its gradient is divided by it.
    if config.temperature < 1e-3:
        usage_error(
            f"--temperature={config.temperature:g}: at least 0.001 (python eval.py RUN "
            f"--temperature={config.temperature:g} samples colder)"
        )
    if config.seed >= 1 << 32:
        usage_error(f"--seed={config.seed}: below 2^32")
    if not set(config.habits.split(",")) <= set(feedback_distill.RULES):
        usage_error(
            f"--habits={config.habits}: a list, with commas, of {', '.join(feedback_distill.RULES)}"
        )


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

    # Limits of the rotary embedding.
    if config.rope_theta < 1.1:
        usage_error(
            f"--rope_theta={config.rope_theta:g}: at least 1.1, pairs of dimensions turn slower "
            "one by one"
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
    card = uses_card({"device": config.device})
    if config.dtype == "bfloat16" and card and fast_dtype("cuda") == torch.float32:
        usage_error(
            f"--dtype=bfloat16: {this_card().name} has no bf16 (compute capability 8.0 has): leave "
            "the flag away, for float32"
        )


def check_levels(config):
    """Levels of difficulty that exist"""
    number = len(synth_tasks.LEVELS)
    for name in ("levels", "eval_levels"):
        value = getattr(config, name)
        if not 0 < value <= number:
            usage_error(f"--{name}={value}: at least 1, and there are {number} levels")


def check_together(config, given, stage, sizes):
    """What goes with what. given: the flags that were typed; sizes: the fields that are the
    model's shape"""
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
    if "staleness" in given and not config.workers:
        usage_error(
            "--staleness goes with --workers: without them the policy that samples is the one that "
            "learns"
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
    if config.precision != "dtype" and config.plain:
        usage_error(
            f"--precision={config.precision} goes with --plain=0: rounding to few bits is in fast/"
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


def check_optimizer_flags(config, given, stage, optimizers):
    """--lr and --weight_decay belong to Muon's matrices. Where AdamW moves all weights they would
    change nothing. They are refused there, unless another stage of the same command has Muon.
    optimizers: those of all the stages of the command that train"""
    # An evaluation trains nothing: command/idle_flags.py names such flags there.
    if config.optimizer == "adamw" and "muon" not in optimizers and stage != "eval":
        if "lr" in given:
            usage_error(
                f"--lr={config.lr:g} is of Muon's matrices, and with --optimizer=adamw, as here, "
                "there are none: give --adam_lr"
            )
        if "weight_decay" in given:
            usage_error(
                f"--weight_decay={config.weight_decay:g} is of Muon's matrices, and with "
                "--optimizer=adamw, as here, there are none: "
                "leave it away, or take --optimizer=muon"
            )


def check_tasks(config):
    """A file of tasks must hold some, of styles that are known."""
    if not config.tasks:
        return
    try:
        tasks = read_tasks(config.tasks)
    except Refusal as refusal:
        usage_error(refusal)
    if not tasks:
        usage_error(f"{config.tasks}: holds no tasks")

    # A task may name the styles that its code is checked for: feedback must know them.
    for number, task in enumerate(tasks, 1):
        if not set(task.meta.get("style", ())) <= set(feedback_distill.STYLE):
            usage_error(
                f"{config.tasks}: line {number} names a style that is none of "
                f"{', '.join(feedback_distill.STYLE)}"
            )


def tasks_with_room(tasks, tokenizer, limits, say):
    """The given tasks without those whose statement leaves no room for a turn: rollouts of them
    would count as failed. One line says which they are. limits: the agent's; say: prints a line"""
    # Does the window hold the task's statement and at least a first turn?
    fitting, names = [], []
    for task in tasks:
        if rollout.leaves_room(tokenizer, task, limits):
            fitting.append(task)
        else:
            names.append(task.instance_id)

    # Without any task that fits, there is nothing to train on. Else three of the names are shown.
    if names and not fitting:
        usage_error(f"--window={limits.window}: none of the tasks leaves room for a turn")
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        say(
            f"--window={limits.window} leaves no room for a turn in {len(names)} of {len(tasks)} "
            f"tasks, which are left out: {', '.join(name[:60] for name in names[:3])}{more}"
        )
    return fitting


def check_outputs(out, stages):
    """Can the files that are written at the end be written, and the figures be drawn? It is tried
    now. A figure that cannot be drawn is no reason to stop."""
    # A log for each stage that trains; an evaluation has its summary.
    names = [f"{stage}.jsonl" for stage in stages if stage != "eval"]
    names += ["summary.json"] if "eval" in stages else []
    try:
        check_writable(out, names)
    except OSError as error:
        usage_error(
            f"--out={out} cannot be written: "
            + (f"{error.filename}: " if error.filename else "")
            + str(error.strerror or error)
        )

    # Only an evaluation draws, on the first rank.
    problem = drawing.try_to_draw() if "eval" in stages and is_first_rank() else ""
    if problem:
        print(f"train.py: {problem}; the run goes on without", file=sys.stderr)


def check_layout(configs):
    """Can these ranks cut the sizes of every stage's model, and has each a task in rl? Where each
    rank holds all, nothing is cut. configs: {stage: its configuration}"""
    # Before torch.distributed is set up, torchrun's variable says how many ranks there are.
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))

    # Layout itself refuses degrees that do not divide the ranks. Only stacks of experts have sizes
    # that must be divisible; the first layer is dense, so layer 1 stands for all. A published
    # model has sizes of its own, and an evaluation cuts nothing.
    for config in configs.values():
        try:
            layout = hsdp.Layout(world, config.cp, config.ep, config.dp_replicate)
            cut = layout.shard > 1 or config.ep > 1
            if cut and not config.init_from and config.stage != "eval" and config.layers > 1:
                layout.check_expert_shapes(
                    {
                        "layers.1.ffn.experts.w_gate": (
                            config.experts,
                            config.expert_ffn,
                            config.dim,
                        ),
                        "layers.1.ffn.experts.w_down": (
                            config.experts,
                            config.dim,
                            config.expert_ffn,
                        ),
                    }
                )
        except ValueError as error:
            usage_error(str(error))

    # The ranks of one cp group share their tasks.
    if "rl" in configs:
        ranks = int(os.environ.get("WORLD_SIZE", 1)) // next(iter(configs.values())).cp
        if configs["rl"].tasks_per_step < ranks:
            usage_error(
                f"--tasks_per_step={configs['rl'].tasks_per_step}: at least one for each of the "
                f"{ranks} data ranks"
            )


def check_parameters(optimizer, named_parameters):
    """Raise unless the optimizer holds exactly the model's parameters: one that is forgotten would
    never be trained, and nothing would show it."""
    # Parameters are compared as objects: a tensor is hashed by its identity.
    wanted = {p: name for name, p in named_parameters if p.requires_grad}
    names, held = getattr(optimizer, "names", {}), {}
    for group in optimizer.param_groups:
        held.update(dict.fromkeys(group["params"]))

    # What does not belong there is told by the optimizer's name for it, or by its shape.
    missing = [name for p, name in wanted.items() if p not in held]
    foreign = [names.get(p, tuple(p.shape)) for p in held if p not in wanted]
    if missing or foreign:
        raise ValueError(
            f"the optimizer misses {missing} and holds {foreign}, which the model does not train"
        )
