"""command/evaluation.py: the stage eval of train.py, around its rollouts.

Before: which policies does this folder hold, and was any of them made otherwise than the flags now
say? Is the table of the same evaluation there already? After: the table on the screen, summary.json
and figures. The rollouts themselves, and all numbers, are eval.py's.

It stands apart from eval.py because who compares policies need not know how a run lays out its
checkpoints.
"""

import contextlib
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import hsdp
from command import checkpoints, hardware, idle_flags, published_model
from command.flags import usage_error
from command.output_files import digest_file
from command.drawing import draw_safely
from command.learning_curves import draw_training, read_step_log
from command.policy_report import draw_policies, format_table, write_json
from eval import evaluate, load_policy, summarize_policies, unfinished_label
from world.task import Refusal

START = time.time()  # of this command


def evaluate_policies(run, given, sources, sizes, patch):
    """The whole stage. run: train.py's; given: the flags that were typed; sources: where the values
    in force come from; sizes: names of the fields that are the model's shape; patch: the change of
    the recipe that is in force"""
    # A policy that was trained with a patch is evaluated with the same one.
    config, trained = run.config, Path(run.config.out, "rl")
    if hsdp.checkpoint_exists(trained):
        checkpoints.check_patch(trained, checkpoints.open_checkpoint(trained), patch)

    # What is evaluated, and with which values; the user is told both.
    try:
        config, paths, made, published = find_policies(
            config, given, sizes, lambda: published_model.load_published(config, run.device)
        )
    except ValueError as error:
        usage_error(str(error))
    run.say(idle_flags.describe_stage(run.config, sources))
    told = ", ".join(f"{name} = {path}" for name, path in paths.items())
    run.say(
        f"evaluated: {told}" + f"; there is no {trained}" * (not hsdp.checkpoint_exists(trained))
    )

    # The same evaluation of the same checkpoints again: its table is there already.
    origin = describe_origin(config, paths, published)
    kept = find_kept_table(config, origin) if hsdp.checkpoint_exists(trained) else ""
    if kept:
        run.say(kept)
        return

    # All ranks play; the first one writes.
    policies = evaluate(run, config, paths, made, published)
    minutes, memory = (time.time() - START) / 60, run.sum(hardware.peak_memory())
    processes = f"{run.world} process" + "es" * (run.world > 1)
    cost = f"this command: {minutes:.1f} minutes, {memory:.1f} GB at most in {processes}"
    if run.rank == 0:
        write_evaluation(config, policies, origin, cost)


def find_policies(config, given, sizes, load_published):
    """What a run has to evaluate: its policies before and after RL, or, where nothing was trained
    yet, the published model itself. -> (the configuration to evaluate with, {name: checkpoint
    folder}, the configuration that the last one was made with, what load_published() gives or
    None).

    config: that of the command; given: the flags that were typed; sizes: names of those that are
    the model's shape; load_published: called without arguments, gives the model of --init_from.
    Window, turns, ... are those the policies were made with. Refusal where a flag says otherwise,
    or where there is nothing to evaluate."""
    out, published = Path(config.out), None

    # Before RL: the run's own SFT, or the one from which its RL began.
    trained = hsdp.checkpoint_exists(out / "rl")
    before = out / "sft"
    if not hsdp.checkpoint_exists(before):
        begun = hsdp.load_extra(out / "rl")["config"]["start_from"] if trained else ""
        before = Path(config.start_from or begun or config.out) / "sft"
    paths = {"before RL" if trained else "after SFT": before, "after RL": out / "rl"}
    paths = {name: path for name, path in paths.items() if hsdp.checkpoint_exists(path)}
    if not paths and config.init_from and not config.start_from:
        published = load_published()
        paths = {"published": Path(config.init_from)}
    if not paths:
        raise Refusal(f"--stage=eval: neither {before} nor {out}/rl is there")

    # A stage that is not at its end is named as unfinished, in the table and in the figures.
    labelled = {}
    for name, path in paths.items():
        label = "" if published else unfinished_label(path)
        labelled[f"{name} ({label})" if label else name] = path

    # One model, one window, one limit of turns, ... for all of them: those of the last one.
    last = list(labelled.values())[-1]
    made = published[2] if published else load_policy(last)[2]
    if config.init_from not in ("", made["init_from"]):
        raise Refusal(
            f"{last} did not begin from --init_from={config.init_from}: take another --out, or "
            "leave the flag away"
        )

    # A flag that was typed must agree with how the policy was made: its shape and its rules.
    rules = ["window", "max_turns", "draft", "summarize", "trigger"]
    shape = [] if published else sorted({*sizes, "vocab", "yarn"})
    as_made = {}
    for name in shape + rules:
        # A run older than a flag was made with its default.
        before = made.get(name, getattr(type(config), name))
        if name in rules:
            as_made[name] = before
        if given.get(name, before) != before:
            raise Refusal(
                f"--{name}={given[name]}: {last} was made with {before}, and so it is evaluated"
            )

    # The rules are the policy's own. Only the temperature may be chosen anew.
    temperature = made.get("temperature", config.temperature)
    as_made["temperature"] = given.get("temperature", temperature)
    return replace(config, **as_made), labelled, made, published


def describe_origin(config, paths, published):
    """What tells one evaluation from another: the file of tasks, and when each checkpoint was
    saved"""
    made_from = {}
    # A published model is no checkpoint of ours, and says nothing about when it was saved.
    if not published:
        made_from = {name: when_saved(path) for name, path in paths.items()}
    return {"file": digest_file(config.tasks), "made_from": made_from}


def when_saved(path):
    """When a checkpoint was written, as a text. It tells the checkpoint from a later one in the
    same folder."""
    # A save that ended between its two renames left the checkpoint before it as .old.
    for folder in (path, f"{path}.old"):
        manifest = Path(folder, "manifest.json")
        if manifest.exists():
            return str(manifest.stat().st_mtime_ns)
    return ""


def find_kept_table(config, origin):
    """The table in summary.json if it is of the same evaluation of the same checkpoints, else an
    empty text. origin: see describe_origin"""
    path = Path(config.out, "summary.json")
    asked = ["tasks", "temperature", "start_from"]
    asked += ["eval_levels", "eval_tasks", "eval_samples"]
    # A full disk may have left half of the file: whatever cannot be read holds no such table.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        done = json.loads(path.read_text())
        same = all(done["config"][name] == getattr(config, name) for name in asked)
        if same and all(done[name] == value for name, value in origin.items()):
            return done["table"]
    return ""


def write_evaluation(config, policies, origin, cost):
    """The table on the screen, summary.json and the figures. policies: {name: records}; origin: see
    describe_origin; cost: a line below the table"""
    # Beside the evaluation stands the last line of each stage's log.
    out = Path(config.out)
    kind = "given" if config.tasks else "held-out"
    numbers = summarize_policies(policies)
    text = format_table(numbers, kind) + f"\n{cost}"
    logs = {stage: read_step_log(out, stage) for stage in ("pretrain", "long", "sft", "rl")}
    extra = {
        "table": text,
        "config": asdict(config),
        "stages": {stage: lines[-1] for stage, lines in logs.items() if lines},
        **origin,
    }

    # The table first: it is what the hour was for, and a full disk or a broken matplotlib must not
    # cost it.
    print(f"\n{text}\n")
    try:
        write_json(numbers, out / "summary.json", extra)
    except OSError as error:
        reason = error.strerror or error
        print(
            f"train.py: the table above could not be kept in {out}/summary.json: {reason}",
            file=sys.stderr,
        )
        raise SystemExit(1) from None

    # The figures last.
    problems = [
        draw_safely(draw_policies, numbers, out),
        draw_safely(draw_training, logs, out),
    ]
    figures = ", ".join(sorted(path.name for path in out.glob("*.png")))
    print("\n".join([f"{out}/summary.json and figures: {figures}", *filter(None, problems)]))
