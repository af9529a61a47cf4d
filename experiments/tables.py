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
from command import drawing, learning_curves, step_log
from command.policy_report import ROWS, align_columns, format_number

# keys of the log for which the table tells the step at which a habit is down to a tenth
HABITS = ("bad_tool", *eval.HABITS)
# Words for keys of the log that the evaluation's table does not have
AXIS_LABELS = {
    "solved": "solved in training",
    "sampled": "sampled tokens of a rollout",
    "cheats": "certain cheats, of rollouts that can read files",
    "equal": "groups with equal rewards",
    "best": "groups with a solved rollout",
    "stale": "updates by which the policy that sampled is older",
}


def read_results(experiment, runs):
    """runs: {arm: the folders of its runs, one for each seed} -> {arm: [outcome of each seed]}"""
    results = {}
    for arm, folders in runs.items():
        results[arm] = [read_outcome(folder, experiment) for folder in folders]
    return results


def curve_by_step(lines, name):
    """What a log says of `name`, step 1 first; nan for a step that is not in it, so that a log
    which lost its beginning is not moved forward"""
    by_step = {int(line["step"]): line.get(name, math.nan) for line in lines}
    return [by_step.get(step, math.nan) for step in range(1, max(by_step, default=0) + 1)]


def read_outcome(folder, experiment):
    """What one run says -> its curves by step, its numbers at the end and, where the experiment
    asks for them, numbers by level"""
    # The step log is that of RL. An arm that is pretraining alone has no other, and no evaluation.
    alone = len(experiment.stages) == 1
    lines = step_log.read_step_log(folder, experiment.stages[0] if alone else "rl")
    curves = {name: curve_by_step(lines, name) for name in experiment.curves}
    if alone:
        return {"curves": curves, "end": {"held-out loss": lines[-1]["held_out_loss"]}}

    # The evaluation on held-out tasks.
    policies = json.loads((folder / "summary.json").read_text())["policies"]
    before, after = policies.get("before RL"), policies["after RL"]
    overall, levels = after["overall"], list(after["levels"].values())
    worst = min(levels, key=lambda level: level["solved"])
    bench = after["bench"]["overall"]["solved"] if "bench" in after else math.nan
    end = {
        "solved": overall["solved"],
        "bench": bench,
        "easiest": levels[0]["solved"],
        "worst level": worst["solved"],
        "tokens": overall["tokens"],
        "easiest: tokens": levels[0]["tokens"],
        "worst level: tokens": worst["tokens"],
        "wrong tool": overall["bad_tool"],
        "moved": overall.get("moved", math.nan),
        "seconds a step": float(np.median([line["seconds"] for line in lines])),
        "before RL": before["overall"]["solved"] if before else math.nan,
    }

    # The curves, at their beginning and at their end.
    for name, values in curves.items():
        end[f"{name}: first 5"] = learning_curves.mean_known(values[:5])
        end[f"{name}: last 5"] = learning_curves.mean_known(values[-5:])
        if name in HABITS:
            end[f"{name}: tenth at"] = first_step_at(0.1, values)
    end |= experiment.more(folder, policies)

    # Numbers by level, after RL and where it began.
    result = {"curves": curves, "end": end}
    if experiment.by_level:
        result["levels"] = numbers_by_level(after, experiment.by_level)
        result["level_names"] = list(after["levels"])
        if before:
            result["began"] = numbers_by_level(before, experiment.by_level)
    return result


def first_step_at(share, values):
    """The first step at which the running mean of five steps is at most this share of the first
    five's. If there is none: one step more than there were"""
    bar = share * learning_curves.mean_known(values[:5])
    for i, mean in enumerate(learning_curves.running_mean(values)):
        if i >= 4 and mean <= bar:
            return i + 1
    return len(values) + 1


def numbers_by_level(policy, names):
    """-> {name: [number of each level]}. policy: an entry of summary.json"""
    return {name: [level[name] for level in policy["levels"].values()] for name in names}


def number_at_end(run, column):
    """nan where a kept run is older than this number"""
    return run["end"].get(column, math.nan)


def known_columns(results):
    """The names of those numbers that are known in at least one run, in the order of the newest"""
    ends = [run["end"] for runs in results.values() for run in runs]
    known = {name for end in ends for name, value in end.items() if not math.isnan(value)}
    return [name for name in ends[-1] if name in known]


def mean_and_deviation(values):
    """-> text: the mean over seeds and the sample's standard deviation (n - 1, since the mean is
    estimated from the same few); for one seed the mean alone; "-" where a number is not known"""
    if np.isnan(values).any():
        return "-"
    mean = format_number(float(np.mean(values)), "{:.3f}")
    if len(values) == 1:
        return mean
    return f"{mean} ({format_number(float(np.std(values, ddof=1)), '{:.3f}')})"


def compare(question, results):
    """-> the text of the table: arms against numbers, the longer list downwards; below it the
    differences in what is solved"""
    # A row for each arm, turned where there are more numbers than arms.
    columns = known_columns(results)
    rows = [["", *columns]]
    for arm, runs in results.items():
        cells = [
            mean_and_deviation([number_at_end(run, column) for run in runs]) for column in columns
        ]
        rows.append([arm, *cells])
    if len(columns) > len(results):
        rows = list(zip(*rows))

    # The title says what the numbers are.
    seeds = len(next(iter(results.values())))
    what = f"mean, and sample standard deviation over {seeds} seeds"
    if seeds == 1:
        what = "one seed: the spread is not known"
    lines = [f"{question}  ({what})", *align_columns(rows)]

    # What is solved, less the first arm, seed by seed: runs of one seed differ by the arm alone.
    first, *others = results
    for arm in others if "solved" in columns else ():
        pairs = zip(results[first], results[arm])
        differences = [after["end"]["solved"] - before["end"]["solved"] for before, after in pairs]
        each = ", ".join(f"{d:+.3f}" for d in differences)
        mean = mean_and_deviation(differences)
        lines.append(f"solved, {arm} less {first}: {mean}, seed by seed {each}")
    return "\n".join(lines)


def list_runs(results, seeds, columns):
    """-> the text of a table with a line for each run: its seed, its arm and these numbers"""
    rows = [["seed", "arm", *columns]]
    for i, seed in enumerate(seeds):
        for arm, runs in results.items():
            cells = [mean_and_deviation([number_at_end(runs[i], column)]) for column in columns]
            rows.append([str(seed), arm, *cells])
    return "\n".join(align_columns(rows))


def rank_correlation(x, y):
    """Spearman's: 1 where the larger x always has the larger y, -1 where it has the smaller one;
    nan where all numbers of a side are equal"""
    if min(len(set(x)), len(set(y))) < 2:
        return math.nan
    ranks = []
    for values in (x, y):
        # Numbers that are equal share the mean of their places.
        ordered = np.sort(values)
        places = [np.searchsorted(ordered, values, side) for side in ("left", "right")]
        ranks.append(np.mean(places, axis=0))
    return float(np.corrcoef(*ranks)[0, 1])


def draw_curves(experiment, results, path):
    """Mean over the seeds, and each of them: by step (running means), for some by the level of
    held-out tasks; for some, numbers against each other, a point for each run. Of many arms the
    numbers alone: see draw_points"""
    # The seeds of more than six arms could not be told apart as lines.
    if len(results) > 6 and experiment.by_seed and not experiment.scatters:
        return draw_points(experiment, results, path)

    # What there is to draw: any run has the names of the curves, and each gets a panel.
    first = next(iter(results.values()))[0]
    curves, levels = list(first["curves"]), list(first.get("levels", ()))
    panels = len(curves) + len(levels) + len(experiment.scatters)
    note = "(numbers: first five steps to last five)" if curves else ""
    figure, axes = make_figure(experiment, path, panels, note)

    # Curves by step. A running mean's fifth value is the mean of the first five steps, its last one
    # that of the last five: the legend has both.
    for panel, name in zip(axes, curves):
        for arm, runs in results.items():
            rows = [learning_curves.running_mean(run["curves"][name]) for run in runs]
            rows = np.array(rows)  # (seeds, steps)
            mean = rows.mean(0)
            label = f"{arm}: {mean[:5][-1]:.2f} to {mean[-1]:.2f}"
            draw_mean_and_seeds(panel, label, rows, first_x=1)
        said, *_ = ROWS.get(name, (AXIS_LABELS.get(name, name.replace("_", " ")),))
        panel.set(xlabel="step", ylabel=said)

    # Numbers by level. The dashed line is the first arm's policy before RL.
    for panel, name in zip(axes[len(curves) :], levels):
        for arm, runs in results.items():
            rows = np.array([run["levels"][name] for run in runs])
            draw_mean_and_seeds(panel, f"{arm}: mean {rows.mean():.2f}", rows, first_x=0)
        if "began" in first:
            arm = next(iter(results))
            before = np.mean([run["began"][name] for run in results[arm]], 0)
            # Where all arms begin with RL, it is the same policy in all of them.
            whose = "" if experiment.stages[:1] == ("rl",) else f"{arm}, "
            label = f"{whose}before RL: mean {before.mean():.2f}"
            panel.plot(range(len(before)), before, "k--", label=label)
        panel.set_xticks(range(len(first["level_names"])), first["level_names"])
        panel.set(xlabel="level of held-out tasks, after RL", ylabel=name.replace("_", " "))

    # Numbers against each other, and how well one orders the other.
    for panel, (x, y) in zip(axes[len(curves) + len(levels) :], experiment.scatters):
        found = {}
        for arm, runs in results.items():
            found[arm] = np.array([(run["end"][x], run["end"][y]) for run in runs])
            panel.scatter(*found[arm].T, label=arm)
        rank = rank_correlation(*np.concatenate([*found.values()]).T)
        panel.set(xlabel=x, ylabel=y)
        if not math.isnan(rank):
            panel.set(title=f"rank correlation {rank:.2f}")

    # Below its panel a legend covers no curve, and needs some room.
    figure.set_figheight(1.3 * figure.get_figheight())
    below = (0.5, -0.18)
    columns = 1 if len(results) < 6 else 2
    for panel in axes:
        panel.legend(loc="upper center", bbox_to_anchor=below, ncols=columns, fontsize=8)
    figure.savefig(path, dpi=120)


def make_figure(experiment, path, panels, note):
    """-> a figure under the experiment's question and above its command and a note, its axes"""
    figure, ax = drawing.make_axes("", "", "", panels)
    figure.suptitle(experiment.question)
    command = f"python -m experiments.{path.stem}    {note}".rstrip()
    figure.supxlabel(command, fontsize=8, family="monospace")
    return figure, list(np.atleast_1d(ax))


def draw_mean_and_seeds(panel, label, rows, first_x):
    """Draws the mean over the seeds as a line, each seed as a thin one. rows: (seeds, points)"""
    x = range(first_x, first_x + rows.shape[1])
    line = panel.plot(x, rows.mean(0), label=label)[0]
    if len(rows) > 1:
        panel.plot(x, rows.T, color=line.get_color(), linewidth=0.6, alpha=0.5)


def draw_points(experiment, results, path):
    """The numbers that are listed run by run: a row for each arm, a point for each run, in the
    colour of its seed"""
    note = "(a colour is a seed; grey: mean of the first row)"
    figure, axes = make_figure(experiment, path, len(experiment.by_seed), note)
    for panel, name in zip(axes, experiment.by_seed):
        # zip turns the runs of each arm into those of each seed, in the order of the arms.
        for i, runs in enumerate(zip(*results.values())):
            values = [number_at_end(run, name) for run in runs]
            panel.scatter(values, range(len(values)), s=18, color=f"C{i}")

        # What all others are compared with
        first_arm = next(iter(results.values()))
        mean = np.mean([number_at_end(run, name) for run in first_arm])
        panel.axvline(mean, color="grey", linewidth=0.8)
        panel.set_yticks(range(len(results)), results)
        panel.set(xlabel=name)
        panel.invert_yaxis()
    figure.savefig(path, dpi=120)
