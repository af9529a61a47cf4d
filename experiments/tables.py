"""tables.py: what the runs of an experiment say: numbers at the end, curves by step, a figure.

For each run: the curves of its step log, the numbers of its evaluation on held-out tasks, and for
some experiments numbers by the level of those tasks. Over the seeds: mean and the sample's standard
deviation, and each arm's difference to the first one, seed by seed. Arms of one seed share all that
came before them, so a difference of two of them scatters less than either.

Left out: what a single run looks like; `python eval.py RUN` shows that.
"""

import json
import math

import numpy as np

import eval
from command import step_log

# of these habits: when the running mean has fallen to a tenth of its first value
HABITS = ("bad_tool", "communication", "code_style")


def read_results(experiment, runs):
    """runs: {arm: the folders of its runs, a seed each} -> {arm: [outcome of a seed]}. Of several
    policies of one run each is an arm."""
    if len(experiment.policies) == 1:
        (policy,) = experiment.policies
        return {
            arm: [outcome(folder, experiment, policy) for folder in folders]
            for arm, folders in runs.items()
        }
    folders = next(iter(runs.values()))
    return {
        policy: [outcome(folder, experiment, policy) for folder in folders]
        for policy in experiment.policies
    }


def outcome(folder, experiment, policy="after RL"):
    """The curves by step, numbers at the end, and for some what comes out by level, of one run."""
    stage = experiment.stages[0]
    whole_recipe = len(experiment.stages) > 1
    lines = step_log.read_step_log(folder, "rl" if whole_recipe else stage)
    curves = {name: step_log.curve_by_step(lines, name) for name in experiment.curves}
    if not whole_recipe:  # pretraining alone: nothing is evaluated
        return {"curves": curves, "end": {"held-out loss": lines[-1]["held_out_loss"]}}

    policies = json.loads((folder / "summary.json").read_text())["policies"]
    before, after = policies.get("before RL"), policies[policy]
    overall, levels = after["overall"], list(after["levels"].values())
    end = {
        "solved": overall["solved"],
        "easiest": levels[0]["solved"],
        "hardest": levels[-1]["solved"],
        "tokens": overall["tokens"],
        "easiest: tokens": levels[0]["tokens"],
        "hardest: tokens": levels[-1]["tokens"],
        "wrong tool": overall["bad_tool"],
        "moved": overall.get("moved", math.nan),
        "seconds a step": float(np.median([line["seconds"] for line in lines])),
        "before RL": before["overall"]["solved"] if before else math.nan,
    }
    for name, values in curves.items():
        end[f"{name}: first 5"] = step_log.mean_known(values[:5])
        end[f"{name}: last 5"] = step_log.mean_known(values[-5:])
        if name in HABITS:
            end[f"{name}: tenth at"] = first_step_at_a_tenth(values)
    end |= experiment.more(folder, policies)

    result = {"curves": curves, "end": end}
    if experiment.by_level:
        result["levels"] = numbers_by_level(after, experiment.by_level)
        if before:
            result["began"] = numbers_by_level(before, experiment.by_level)
    return result


def first_step_at_a_tenth(values):
    """The first step at which the running mean is a tenth of the first value; never: one step more
    than there were"""
    for i, mean in enumerate(step_log.running_mean(values)):
        if mean <= 0.1 * values[0] > 0:
            return i + 1
    return len(values) + 1


def numbers_by_level(policy, names):
    return {name: [level[name] for level in policy["levels"].values()] for name in names}


def known_columns(results):
    """The names of those numbers that are known in at least one run"""
    ends = [run["end"] for runs in results.values() for run in runs]
    return [column for column in ends[0] if not all(math.isnan(end[column]) for end in ends)]


def mean_and_deviation(values):
    """Over seeds: mean and the sample's standard deviation (n - 1, since the mean is estimated from
    the same few); of one the mean alone."""
    mean = eval.format_number(float(np.mean(values)), "{:.3f}")
    if len(values) == 1:
        return mean
    return f"{mean} ({eval.format_number(float(np.std(values, ddof=1)), '{:.3f}')})"


def paired_differences(results):
    """Each arm less the first one, seed by seed -> {arm: {number: [difference of a seed]}}"""
    first, *others = results
    columns = known_columns(results)
    differences = {}
    for arm in others:
        pairs = list(zip(results[first], results[arm]))
        differences[arm] = {
            column: [after["end"][column] - before["end"][column] for before, after in pairs]
            for column in columns
        }
    return differences


def compare(question, results):
    """-> the text of the table: arms against numbers, the longer list downwards; below it the
    differences in what is solved"""
    columns = known_columns(results)
    rows = [["", *columns]]
    for arm, runs in results.items():
        values = [[run["end"][column] for run in runs] for column in columns]
        rows.append([arm, *(mean_and_deviation(v) for v in values)])
    if len(columns) > len(results):
        rows = list(zip(*rows))
    first, *widths = (max(map(len, column)) + 2 for column in zip(*rows))
    lines = [row[0].ljust(first) + "".join(map(str.rjust, row[1:], widths)) for row in rows]

    seeds = len(next(iter(results.values())))
    what = f"mean, and sample standard deviation over {seeds} seeds"
    if seeds == 1:
        what = "one seed: the spread is not known"
    lines.insert(0, f"{question}  ({what})")
    for arm, differences in paired_differences(results).items():
        if "solved" in differences:
            each = ", ".join(f"{d:+.3f}" for d in differences["solved"])
            mean = mean_and_deviation(differences["solved"])
            lines.append(f"solved, {arm} less {next(iter(results))}: {mean}, seed by seed {each}")
    return "\n".join(lines)


def draw_curves(experiment, results, path):
    """Mean over the seeds with the range between them: by step, each a running mean, and for some
    by the level of held-out tasks. Where the arms differ before RL, the last panel sets what is
    solved in the end against the loss after SFT (the reward depends on the curriculum's level)."""
    first = next(iter(results.values()))[0]
    panels = [("curves", name, 1) for name in first["curves"]]
    panels += [("levels", name, 0) for name in first.get("levels", ())]
    points = {
        arm: [[run["end"].get(x, math.nan) for run in runs] for x in ("loss after SFT", "solved")]
        for arm, runs in results.items()
    }
    scatter = bool(np.isfinite(list(points.values())).all())
    figure, ax = eval.make_axes(experiment.question, "step", "", len(panels) + scatter)
    for panel, (part, name, start) in zip(np.atleast_1d(ax), panels):
        for arm, runs in results.items():
            rows = [run[part][name] for run in runs]
            rows = np.array([step_log.running_mean(row) for row in rows] if start else rows)
            x = range(start, start + rows.shape[1])
            line = panel.plot(x, rows.mean(0), label=arm)[0]
            panel.fill_between(x, rows.min(0), rows.max(0), color=line.get_color(), alpha=0.15)
        if part == "levels" and "began" in first:
            arm = next(iter(results))
            before = np.mean([run["began"][name] for run in results[arm]], 0)
            panel.plot(x, before, "k--", label=f"{arm}, before")
        panel.set_xlabel("step" if start else "level of held-out tasks, after RL")
        panel.set_ylabel(name.replace("_", " "))
    panel.legend(fontsize=8)
    if scatter:
        for arm, (losses, solved) in points.items():
            ax[-1].plot(losses, solved, "o", label=arm)
        ax[-1].set(xlabel="loss after SFT, nats per token", ylabel="solved, held out, after RL")
        ax[-1].locator_params(axis="x", nbins=5)
    figure.savefig(path, dpi=120)
