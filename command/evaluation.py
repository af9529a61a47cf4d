"""command/evaluation.py: the stage eval of train.py, around its rollouts.

Before: which policies does this folder hold, and was any of them made otherwise than the flags now
say? Is the table of the same evaluation there already? After: the table on the screen, summary.json
and figures. The rollouts themselves, and all numbers, are eval.py's; train.py stands between.

It stands apart from eval.py because who compares policies need not know how a run lays out its
checkpoints.
"""

import contextlib
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from command import checkpoints, hardware, published_model
from command.flags import fill_in
from command.output_files import current_commit, digest_file, to_json
from command.drawing import draw_safely
from command.learning_curves import draw_training
from command.policy_report import draw_policies, format_table
from command.report import write_report_page
from command.step_log import minutes_so_far, read_step_log
from world.task import Refusal

# The flags that make another evaluation of the same policies
KEY = ("tasks", "temperature", "eval_levels", "eval_tasks", "bench_tasks", "eval_samples")


@dataclass(frozen=True)
class Asked:
    """What is to be evaluated"""

    config: object  # train.Config; window, turns, ... are those the policies were made with
    paths: dict  # {name: checkpoint folder}
    made: dict  # the configuration that the last one was made with
    published: object  # what published_model.load_published gives, or None
    trained: bool  # is there a policy after RL?
    # what tells one evaluation from another: commit, digests of the file of tasks and of each
    # checkpoint, flags
    key: dict


def find_policies(run, given, sizes, patch):
    """What a run has to evaluate: its policies before and after RL, or, where nothing was trained
    yet, the published model itself -> Asked.

    run: train.py's; given: the flags that were typed; sizes: names of those that are the model's
    shape; patch: the change of the recipe that is in force. Refusal where a flag says otherwise
    than the policies were made, or where there is nothing to evaluate."""
    # A policy that was trained with a patch is evaluated with the same one.
    config, out, published = run.config, Path(run.config.out), None
    trained = checkpoints.checkpoint_exists(out / "rl")
    if trained:
        saved = checkpoints.open_checkpoint(out / "rl")
        checkpoints.check_patch(out / "rl", saved, patch)

    # Before RL: the very checkpoint from which it began, and none that stands in its place today.
    # Where there is no RL: the SFT of this run, or of --start_from.
    sft = [out / "sft", Path(config.start_from or config.out, "sft")]
    if trained:
        paths = {"before RL": checkpoints.find_origin(saved, *sft), "after RL": out / "rl"}
        origin = saved.get("origin")
        if origin and not paths["before RL"]:
            run.say(f"{out}/rl began from {origin['path']}, which was moved or made anew since")
        elif not origin:
            run.say(f"no column before RL: {out}/rl keeps no checkpoint from which it began")
    else:
        there = [path for path in sft if checkpoints.checkpoint_exists(path)]
        paths = {"after SFT": there[0] if there else None}
    paths = {name: path for name, path in paths.items() if path}
    if not paths and config.init_from and not config.start_from:
        published = published_model.load_published(config, run.device)
        paths = {"published": Path(config.init_from)}
    if not paths:
        raise Refusal(f"--stage=eval: neither {sft[1]} nor {out}/rl is there")

    # A stage that is not at its end is named as unfinished, in the table and in the figures.
    labelled = {}
    for name, path in paths.items():
        label = "" if published else checkpoints.unfinished_label(path)
        labelled[f"{name} ({label})" if label else name] = path

    # One model, one window, one limit of turns, ... for all of them: those of the last one.
    last = list(labelled.values())[-1]
    made = published[2] if published else checkpoints.open_checkpoint(last)["config"]
    made = fill_in(type(config), made)
    if config.init_from not in ("", made["init_from"]):
        raise Refusal(
            f"{last} did not begin from --init_from={config.init_from}: take another --out, or "
            "leave the flag away"
        )

    # A flag that was typed must agree with how the policy was made: its shape and its rules.
    rules = ["window", "max_turns", "draft", "summarize", "trigger", "dtype", "length_penalty"]
    shape = [] if published else sorted({*sizes, "vocab", "yarn"})
    for name in shape + rules:
        if given.get(name, "auto") not in ("auto", made[name]):
            raise Refusal(
                f"--{name}={given[name]}: {last} was made with {made[name]}, and so it is evaluated"
            )

    # The rules are the policy's own. Only the temperature may be chosen anew.
    as_made = {name: made[name] for name in rules}
    as_made["temperature"] = given.get("temperature", made["temperature"])

    # A published model is no checkpoint of ours, and has no such digest.
    made_from = {}
    if not published:
        made_from = {name: checkpoints.digest_checkpoint(path) for name, path in labelled.items()}
    config = replace(config, **as_made)
    key = {"commit": current_commit(), "file": digest_file(config.tasks), "made_from": made_from}
    for name in KEY:
        key[name] = getattr(config, name)
    return Asked(config, labelled, made, published, trained, key)


def is_done(run, asked):
    """Says what is evaluated. -> is the table of the same evaluation of the same checkpoints there
    already? Then it is printed."""
    told = ", ".join(f"{name} = {path}" for name, path in asked.paths.items())
    if not asked.trained:
        told += f"; there is no {asked.config.out}/rl"
    run.say(f"evaluated: {told}")

    # Whoever edits the code wants another table, and of an edit no commit tells which it was.
    commit = asked.key["commit"]
    if not commit or commit.endswith("-dirty"):
        return False

    # A full disk may have left half of the file: whatever cannot be read holds no such table.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        done = json.loads(Path(asked.config.out, "summary.json").read_text())
        # The report is written last: without it something was not.
        has_report = Path(asked.config.out, "report.html").exists()
        if asked.trained and has_report and done["key"] == asked.key:
            run.say(done["table"])
            return True
    return False


def write_evaluation(run, asked, numbers, episodes):
    """The table on the screen, summary.json, the figures and report.html, by the first rank.
    numbers: see eval.summarize_policies; episodes: eval.play_episodes"""
    memory = run.sum(hardware.peak_memory())
    if run.rank:
        return
    # What the run took, with all its commands, and not the last one alone.
    config, out = asked.config, Path(asked.config.out)
    logs = {stage: read_step_log(out, stage) for stage in ("pretrain", "long", "sft", "rl")}
    memory = max([memory, *(line.get("memory", 0) for lines in logs.values() for line in lines)])
    last = list(asked.paths.values())[-1]
    minutes = run.minutes() + minutes_so_far(last.parent, last.name)
    processes = f"{run.world} process" + "es" * (run.world > 1)
    cost = f"the run: {minutes:.1f} minutes, {memory:.1f} GB at most in {processes}"

    # Beside the evaluation stands the last line of each stage's log.
    kind = "given" if config.tasks else "held-out"
    text = format_table(numbers, kind) + f"\n{cost}"
    written = {
        **numbers,
        "table": text,
        "config": asdict(config),
        "commit": current_commit(),
        "stages": {stage: lines[-1] for stage, lines in logs.items() if lines},
        "key": asked.key,
    }

    # The table first: it is what the hour was for, and a full disk or a broken matplotlib must not
    # cost it.
    print(f"\n{text}\n")
    try:
        (out / "summary.json").write_text(to_json(written, indent=1))
    except OSError as error:
        reason = error.strerror or error
        print(
            f"train.py: the table above could not be kept in {out}/summary.json: {reason}",
            file=sys.stderr,
        )
        raise SystemExit(1) from None

    # The figures last.
    title = f"{out}: {', '.join(asked.paths)}"
    problems = [
        draw_safely(draw_policies, numbers, out),
        draw_safely(draw_training, logs, out),
        draw_safely(write_report_page, out / "report.html", title, text, numbers, episodes, logs),
    ]
    figures = ", ".join(sorted(path.name for path in out.glob("*.png")))
    print(
        f"{out}/summary.json, report.html and figures: {figures}", *filter(None, problems), sep="\n"
    )
