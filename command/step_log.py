"""command/step_log.py: where the numbers of a step go: a line on the screen, a line in a file.

    out/<run>/<stage>.jsonl    every number of every step, one JSON object a line
    the screen                 one aligned line a step, of the numbers in COLUMNS; the bar below it

A run that was killed may have logged steps after its last checkpoint. They come again when it goes
on, so the file is first cut back to that checkpoint (keep_lines).

It stands apart from train.py because the loop only says what it measured. What the numbers of a
batch of rollouts are is said by command/rollout_statistics.py.
"""

import contextlib
import json
from pathlib import Path

from tqdm import tqdm

from command.checkpoints import explain_write_error
from command.output_files import nan_for_null, to_json
from command.policy_report import format_number


def read_lines(path):
    """The whole lines of a log, in order -> [(step, text)]. One that a kill or a full disk has cut
    is left out."""
    lines = []
    for text in path.read_text(errors="replace").split("\n") if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            lines.append((int(json.loads(text)["step"]), text))
    return lines


def read_step_log(run, stage):
    """The step log of one stage of a run: a dictionary for each step, in order"""
    entries = []
    for _, text in read_lines(Path(run, f"{stage}.jsonl")):
        # What was no number is null there (output_files.to_json).
        entries.append(nan_for_null(json.loads(text)))
    return entries


def minutes_so_far(run, stage):
    """The minutes that a run had taken up to the last step of a stage, its earlier stages
    included; 0.0 where no log says so"""
    lines = read_step_log(run, stage)
    return lines[-1].get("minutes", 0.0) if lines else 0.0


def keep_lines(path, step):
    """Cuts a log at the checkpoint of `step`: a killed run may have gone on beyond it, and those
    steps come again. Lines are chosen by the steps that they name, not by their place, since a log
    may have lost its beginning."""
    # The new file takes the old one's place in one step, so that a kill loses neither.
    part = Path(f"{path}.part")
    part.write_text("".join(text + "\n" for number, text in read_lines(path) if number <= step))
    part.replace(path)


def progress_bar(run, step):
    """-> a bar of the stage's steps, shown by the first rank. Used as a context it is closed
    whatever happens, so that what is printed afterwards begins on a line of its own."""
    stage, steps = run.config.stage, run.config.steps
    return tqdm(
        total=steps,
        initial=step,
        desc=f"{stage:>14}",
        disable=run.rank > 0,
        dynamic_ncols=True,
    )


# {key of the log: its format on the screen}, from left to right; other keys are in the file alone.
# A number that a stage puts into its log gets its column here.
COLUMNS = {
    "loss": "{:7.4f}",
    "reward": "{:6.3f}",
    "solved": "{:6.3f}",
    "bad_tool": "{:6.3f}",
    "effort": "{:6.2f}",
    "turns": "{:5.2f}",
    "feedback_kl": "{:7.4f}",
    "held_out_loss": "{:7.4f}",
    "mismatch": "{:6.4f}",
    "draft_kl": "{:7.4f}",
    "draft_accepted": "{:5.3f}",
    "names": "{:5.3f}",
    "constants": "{:5.3f}",
    "norm": "{:7.3f}",
    "load": "{:5.2f}",
    "lr": "{:7.5f}",
    "adam_lr": "{:7.5f}",
    "memory": "{:5.2f}",
    "tokens_per_s": "{:8.0f}",
    "seconds": "{:6.2f}",
}


def report(run, bar, log, path):
    """Writes the numbers of a step: all of them to the file, those in COLUMNS to the screen. Moves
    the bar on. log: {key: number}. -> why the file could not be written, or an empty text"""
    if run.rank:
        return ""

    # The file: a line of JSON, with nine digits.
    try:
        with open(path, "a") as file:
            file.write(to_json({k: float(f"{float(v):.9g}") for k, v in log.items()}) + "\n")
    except OSError as error:
        return (
            f"{path}: step {log['step']} could not be written: {explain_write_error(error)}; what "
            "was saved before is whole"
        )

    # The screen. Whoever reads along may have gone, which is no reason to end the run.
    words = [f"{k} {format_number(float(log[k]), form)}" for k, form in COLUMNS.items() if k in log]
    with contextlib.suppress(OSError):
        tqdm.write(f"{run.config.stage:>9} {log['step']:5d}  " + "  ".join(words))
    bar.update()
    return ""
