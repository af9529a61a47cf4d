"""command/old_flags.py: flags of earlier versions, and what a run on disk that has them means now.

OLD_NAMES    a flag that only has another name. On the command line it is answered with the new one;
             in a checkpoint (its configuration, or its model's shape) it is read as the new one, so
             that an old run loads, resumes, evaluates and exports.
DERIVED      a flag that follows from others now. A run on disk keeps the value that it has.
OLD_FLAGS    a flag that only an ablation needed. It is a patch in experiments/ now, or a constant
             of train.py. A run on disk goes on if it has the value at which the flag changed
             nothing.

It stands apart from train.py because a reader of the recipe need not know its history, and apart
from hsdp.py, which reads checkpoints, for the same reason. It imports nothing.
"""

# {name in an earlier version: name now}, of fields of train.Config and moe.ModelConfig
OLD_NAMES = {
    "active": "num_experts_per_tok",
    "group": "group_size",
    "length": "loss_norm_length",
    "clip": "grad_clip",
    "grow": "seq_len_warmup",
    "turns": "max_turns",
    "kl": "kl_coef",
    "hardest": "max_level",
    "replay": "router_replay",
    "weights": "weight_dtype",
}

# {name: what it is now}
DERIVED = {
    "qk_nope": "dim / heads",
    "qk_rope": "dim / heads / 2, and 32 at least",
    "v_dim": "dim / heads",
}

# {name: (value at which it changed nothing, the file that makes the change now)}
OLD_FLAGS = {
    "std_norm": (False, "experiments/objective.py"),
    "length_norm": (False, "experiments/objective.py"),
    "mask_overlong": (False, "experiments/objective.py"),
    "imitate": (False, "experiments/sdft.py"),
    "reward": (1.0, "experiments/sdft.py"),
    "placebo": ("none", "experiments/teachers.py"),
    "restless": (0.0, "experiments/penalty.py"),
    "easy": (0.0, "experiments/penalty.py"),
    "full_price": (False, "experiments/penalty.py"),
    "distinct": (0, "experiments/tasks.py"),
    "truncate": (False, "experiments/summary.py"),
    "learn_summaries": (True, "experiments/summary.py"),
    "commands": (0, "experiments/summary.py"),
    "short": (0.0, "experiments/summary.py"),
    "harden": (True, "experiments/hacking.py"),
    "documented": (True, "experiments/hacking.py"),
    "time_tools": (False, "benchmarks/tools.py"),
    "context_loss": (0.3, "train.py, as CONTEXT_LOSS"),
    "copy_loss": (4.0, "train.py, as COPY_LOSS"),
    "sloppy": (1.0, "train.py, as SLOPPY"),
    "hints": (0.5, "train.py, as HINT_RATE"),
    "neutral_hints": (0.05, "experiments/habits.py"),
    "balance_rate": (2e-3, "train.py, as BALANCE_RATE"),
    "loss_norm_length": (64.0, "train.py, as Reinforcement.loss_norm_length"),
    "divergence": ("reverse", "experiments/teachers.py"),
    "teacher": ("ema", "experiments/teachers.py"),
    "teacher_rate": (0.1, "feedback_distill.py, as TEACHER_RATE"),
    "penalty_k": (1.0, "experiments/penalty.py"),
    "penalty_q": (0.5, "experiments/penalty.py"),
    "max_level": (6, "experiments/retold.py, that of a fixed mix in --levels"),
}
# {name: a second value at which it changed nothing}, in runs from a published model. There the
# recipe itself has this value, also without the flag.
OLD_FINE_TUNING = {"copy_loss": 1.0, "balance_rate": 0.0}


def changed_flags(made):
    """The removed flags that changed something in a run. made: its configuration. -> {flag: (its
    value there, the file that makes the change now)}"""
    changed = {}
    for name, (default, place) in OLD_FLAGS.items():
        harmless = [default]
        if made.get("init_from") and name in OLD_FINE_TUNING:
            harmless.append(OLD_FINE_TUNING[name])
        if made.get(name, default) not in harmless:
            changed[name] = made[name], place
    return changed


def explain_old_flag(word):
    """One line about a word of the command line if it is a flag of an earlier version, else an
    empty text"""
    # The name without dashes and value. The order below matters: a flag that got another name may
    # have been removed since.
    name = word.removeprefix("--").partition("=")[0]
    if not word.startswith("--"):
        return ""
    now = OLD_NAMES.get(name, name)
    if now in OLD_FLAGS:
        return f"--{name} is no flag any more: what it did stands in {OLD_FLAGS[now][1]}"
    if name in DERIVED:
        return f"--{name} is no flag any more: it is {DERIVED[name]}"
    if name in OLD_NAMES:
        return f"--{name} has another name now: --{now}"
    return ""


def with_new_names(extra):
    """What a checkpoint says of itself, with the names of today in its configuration and in its
    model's shape"""
    renamed = dict(extra)
    for part in ("config", "model"):
        if part in extra:
            values = extra[part].items()
            renamed[part] = {OLD_NAMES.get(name, name): value for name, value in values}
    return renamed
