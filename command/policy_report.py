"""command/policy_report.py: policies compared, as a table and as figures.

eval.summarize_policies makes the numbers. Here they become what a person reads: the table (solved,
levels, pass@k, what it takes), score.png (what does a solved task cost, in tokens and in dollars?),
effort.png (does effort follow difficulty?), and the answers to --mismatch and --gap.

It stands apart from eval.py because the numbers are the concept and a table only shows them.
"""

import math
from collections import Counter
from pathlib import Path

import numpy as np

from command import drawing
from command.output_files import to_json

# ---------------------------------------------------------------- the table


def format_number(value, form):
    """The number in its column's form, or in three significant digits where the form would round
    more than a twentieth of it away. form: a format string with a width, such as "{:7.4f}", or
    without."""
    text = form.format(value)
    if not math.isfinite(value) or abs(float(text) - value) <= 0.05 * abs(value):
        return text
    return f"{value:.2e}".rjust(len(text))


def align_columns(rows):
    """Rows of texts -> lines. The first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        for text, width in zip(others, widths[1:]):
            cells.append(text.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


# Rows below pass@k. Key of eval.summarize_records: (its name in the table, number format, factor)
ROWS = {
    "tokens": ("tokens per task", "{:.0f}", 1),
    "effort": ("effort", "{:.1f}", 1),
    "turns": ("turns", "{:.1f}", 1),
    "cost": ("median cost, $ per 1000 tasks", "{:.3f}", 1000),
    "bad_tool": ("rollouts with a wrong tool", "{:.3f}", 1),
    "wrong_calls_per_turn": ("wrong calls per turn", "{:.4f}", 1),
    "summaries": ("summaries per task", "{:.2f}", 1),
    "finished": ("ended by itself", "{:.3f}", 1),
    "calls_per_turn": ("calls per turn", "{:.2f}", 1),
    "thinking_tokens": ("tokens of thoughts", "{:.1f}", 1),
    "call_tokens": ("tokens of calls", "{:.1f}", 1),
    "final_tokens": ("tokens of the last message", "{:.1f}", 1),
    "output_tokens": ("tokens of the tools' answers", "{:.1f}", 1),
    "communication": ("last message untrue, or none", "{:.3f}", 1),
    "code_style": ("comments left in code", "{:.3f}", 1),
    "repetition": ("looked up again", "{:.3f}", 1),
    "malformed_arguments": ("malformed calls", "{:.3f}", 1),
    "unfinished": ("ended while tests were red", "{:.3f}", 1),
}


def format_table(numbers, kind="held-out"):
    """numbers: see eval.summarize_policies; kind: which tasks these were -> the text of the table,
    a column for each policy"""
    policies, lines = numbers["policies"], []
    width = max(18, 2 + max(map(len, policies)))

    def add_row(label, cells):
        lines.append(f"{label:32s}" + "".join(f"{cell:>{width}s}" for cell in cells))

    def add_number(parts, key, label, form, factor=1):
        cells = []
        for row in (part["overall"] for part in parts):
            cells.append(format_number(row[key] * factor, form) if key in row else "-")
        add_row(label, cells)

    def add_solved(parts, title, pairs=()):
        """What is solved, how sure that is, and by level"""
        whole = [part["overall"] for part in parts]
        add_row(f"{title} x {whole[0]['passes']}", policies)
        add_row("solved [95 % interval]", [f"{row['solved']:.3f}" for row in whole])
        add_row("", ["[{:.2f} {:.2f}]".format(*row["interval"]) for row in whole])
        for label, cells in pairs:
            add_row(label, cells)
        # By the effort that was asked for, where it was.
        for setting in parts[0].get("settings", ()):
            rows = [part.get("settings", {}).get(setting) for part in parts]
            cells = [describe_cell(row["overall"]) if row else "-" for row in rows]
            add_row(f"  effort {setting}", cells)
        # The levels are those of the first policy; another one may have been given other tasks.
        for level, first in parts[0]["levels"].items():
            rows = [part["levels"].get(level) for part in parts]
            cells = [describe_cell(row) if row else "-" for row in rows]
            add_row(f"  level {level}: {first['label'] or 'solved (tokens)'}", cells)

    parts = list(policies.values())
    first = parts[0]["overall"]
    add_solved(parts, f"{first['tasks']} {kind} tasks", pair_rows(numbers))

    # Several chances at a task, as far as the first policy had so many passes.
    for key in first:
        if key.startswith("pass@"):
            k = key.removeprefix("pass@")
            add_number(parts, key, key if k == "1" else f"{key} = best-of-{k}", "{:.3f}")

    # What it takes.
    for key, (label, form, factor) in ROWS.items():
        add_number(parts, key, label, form, factor)

    # These count as failed, though nothing was tried.
    if any(part["overall"]["no_turn"] for part in parts):
        add_number(parts, "no_turn", "without room for a turn", "{:.0f}")

    # The bench, where there is one beside the other tasks, and whether second instructions ("leave
    # b.py alone") were kept in it.
    benches = [part["bench"] for part in parts if "bench" in part]
    if len(benches) == len(parts):
        lines.append("")
        add_solved(benches, f"bench: {benches[0]['overall']['tasks']} tasks")
        add_number(benches, "kept", "second instructions kept", "{:.3f}")
    return "\n".join(lines)


def describe_cell(row):
    """What is solved, with how many tokens, and at how many times a careful expert's effort. row:
    the numbers of some records"""
    ratio = f", {row['effort_ratio']:.2f}x" if "effort_ratio" in row else ""
    return f"{row['solved']:.2f} ({row['tokens']:.0f}{ratio})"


def pair_rows(numbers):
    """The rows of the table that set each policy against the first one, task by task, as (label,
    cells); none where no task is shared."""
    if not numbers["pairs"]:
        return []

    # The first policy is not compared with itself. The number of shared tasks is told where some
    # are missing.
    first, *others = numbers["policies"]
    whole = numbers["policies"][first]["overall"]["tasks"]
    won, chance = ["-"], [""]
    for name in others:
        pair = numbers["pairs"].get(name)
        if pair is None:
            won.append("other tasks")
            chance.append("")
            continue
        part = f" of {pair['tasks']}" if pair["tasks"] < whole else ""
        won.append(f"+{pair['won']} -{pair['lost']}{part}")
        chance.append("p=" + format_number(pair["p"], "{:.3f}"))
    return [("  tasks won, lost against first", won), ("  if alike, so uneven by chance", chance)]


# ---------------------------------------------------------------- files


def write_report(numbers, folder, name, kind="held-out"):
    """Writes the numbers (see eval.summarize_policies) as JSON and as figures into the folder.
    name: of the JSON file. -> the text of the table, with the reason below it if there are no
    figures"""
    Path(folder, name).write_text(to_json(numbers, indent=1))
    problem = drawing.draw_safely(draw_policies, numbers, folder)
    text = format_table(numbers, kind)
    return f"{text}\n{problem}" if problem else text


# ---------------------------------------------------------------- figures


# The points of score.png say their setting of effort by their form: names beside them would lie
# over each other where settings cost alike.
MARKERS = {"low": "v", "medium": "o", "high": "^"}


def draw_policies(numbers, folder, form="png"):
    """score.png: solved against tokens and against cost, a line per policy over its settings of
    effort; effort.png: tokens by level, a line per setting; bench.png, where there is a bench: what
    each policy knows of it. form: the end of the names, which says what is written"""
    policies = numbers["policies"]
    draw_score(policies, numbers.get("careful"), Path(folder, f"score.{form}"))
    draw_effort(policies, numbers.get("careful"), Path(folder, f"effort.{form}"))
    benches = {name: policy["bench"] for name, policy in policies.items() if "bench" in policy}
    if benches:
        draw_bench(benches, Path(folder, f"bench.{form}"))


def values_and_errors(rows, key, interval):
    """-> what `rows` have under `key` (N,), and how far the 95 % interval of each reaches below and
    above it (2, N)"""
    values = np.array([row[key] for row in rows])
    low, high = np.array([row[interval] for row in rows]).T
    # Of few passes an interval may lie beside the share by a rounding error.
    return values, np.maximum([values - low, high - values], 0)


def draw_bench(benches, path):
    """A row for each level of the bench, a point with its 95 % interval for each policy.
    benches: {name: numbers of the bench, overall and by levels}"""
    figure, ax = drawing.make_axes("What of the bench is solved?", "solved", "")
    levels = next(iter(benches.values()))["levels"]
    places = {level: place for place, level in enumerate(levels)}
    for number, (name, bench) in enumerate(benches.items()):
        # The policies of a row stand one above the other.
        below = 0.5 * number / max(1, len(benches) - 1) - 0.25
        rows = {level: row for level, row in bench["levels"].items() if level in places}
        solved, errors = values_and_errors(rows.values(), "solved", "interval")
        label = f"{name}: {bench['overall']['solved']:.2f}"
        heights = [places[level] + below for level in rows]
        ax.errorbar(solved, heights, xerr=errors, fmt="o", capsize=2, label=label)
    ax.set_yticks(range(len(levels)), [row["label"] for row in levels.values()], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(-0.03, 1.03)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=120)


def numbers_by_setting(policy):
    """{setting of effort: numbers, overall and by levels} of a policy; of one whose tasks say
    nothing of effort {"": its numbers}"""
    return policy.get("settings") or {"": policy}


def draw_effort(policies, careful, path):
    """A panel for each policy: tokens by level, a line per setting; dashed what a careful expert
    needs. policies: {name: its numbers, overall and by levels}; careful: the same or None"""
    figure, axes = drawing.make_axes("", "level of the task", "sampled tokens", len(policies))
    figure.suptitle("Does effort follow difficulty?")
    axes, highest = np.atleast_1d(axes), 0.0
    for ax, (name, policy) in zip(axes, policies.items()):
        for setting, numbers in numbers_by_setting(policy).items():
            rows = numbers["levels"]
            tokens = [row["tokens"] for row in rows.values()]
            label = f"{setting or 'all'}: {numbers['overall']['tokens']:.0f}"
            ax.plot(range(len(rows)), tokens, "o-", label=label)
        if careful:
            needed = [careful["levels"].get(level) for level in policy["levels"]]
            tokens = [row["tokens"] if row else math.nan for row in needed]
            ax.plot(range(len(tokens)), tokens, "k--", label="careful expert")
        # Levels of other kinds are not simply harder ones: what they ask for stands at the axis.
        # Given tasks have a level alone.
        names = []
        for level, row in policy["levels"].items():
            names.append(f"{level}: {row['label']}" if row["label"] else str(level))
        ax.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=7)
        ax.set(title=name, xlabel="level of the task")
        ax.legend(fontsize=8)
        highest = max(highest, ax.get_ylim()[1])
    # One scale, so that the policies can be compared.
    for ax in axes:
        ax.set_ylim(0, highest)
    figure.savefig(path, dpi=120)


def draw_score(policies, careful, path):
    """Solved against tokens and against median cost: a line for each policy over its settings of
    effort, with 95 % intervals, and a star for the careful expert. careful: its numbers or None"""
    figure, (left, right) = drawing.make_axes(
        "What does a task cost, and is it solved?", "sampled tokens per task", "solved", 2
    )
    # only now: make_axes says which backend matplotlib takes when it is first imported
    from matplotlib import ticker

    for name, policy in policies.items():
        settings = numbers_by_setting(policy)
        rows = [numbers["overall"] for numbers in settings.values()]
        solved, up = values_and_errors(rows, "solved", "interval")
        tokens, across = values_and_errors(rows, "tokens", "tokens_interval")
        label = f"{name}: {policy['overall']['solved']:.2f}"
        bars = left.errorbar(tokens, solved, up, across, fmt="-", capsize=2, label=label)
        cost = np.array([1000 * row["cost"] for row in rows])
        right.errorbar(cost, solved, up, fmt="-", capsize=2)
        # A marker at each point says which setting it is.
        for i, setting in enumerate(settings):
            style = dict(marker=MARKERS.get(setting, "o"), color=bars.lines[0].get_color())
            left.plot(tokens[i], solved[i], **style)
            right.plot(cost[i], solved[i], **style)
    if careful:
        row = careful["overall"]
        left.plot(row["tokens"], row["solved"], "k*", markersize=12, label="careful expert")
        right.plot(1000 * row["cost"], row["solved"], "k*", markersize=12)
    right.set_xlabel("median cost, $ per 1000 tasks")
    for ax in (left, right):
        ax.set_xscale("log")
        # The range is often less than a factor of ten, which has no tick of its own.
        ax.margins(x=0.12)
        ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
        ax.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        ax.xaxis.set_minor_formatter(ticker.NullFormatter())
        ax.set_ylim(-0.03, 1.05)
    # One legend: colours and forms are the same in both panels.
    for setting in numbers_by_setting(policy):
        left.plot([], [], MARKERS.get(setting, "o"), color="gray", label=setting)
    lines, labels = left.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=120)


def report_mismatch(found):
    """--mismatch: a line for each run and setting. found: {label: differences of all tokens (N,)},
    see eval.sampler_mismatch"""
    # What few tokens do is seen at the 99th percentile and at the largest, not at the median.
    for name, gaps in found.items():
        print(
            f"{name:48s} median {np.median(gaps):.1e}   p99 {np.quantile(gaps, .99):.1e}   "
            f"largest {gaps.max():.1e}"
        )


def report_hint_effects(run, records):
    """--gap: the tools that are most often called where they are not there, eight at most"""
    # (tool, probability without the hint, probability with it) of every such call.
    found = [call for record in records for call in record["hints"]]
    print(
        f"\n{run}: probability of a call to a tool that is not there, where it was made, without "
        "and with the hint above it"
    )
    # Per tool: how many calls, and the mean of both probabilities.
    for tool, number in Counter(name for name, _, _ in found).most_common(8):
        pairs = [(before, after) for name, before, after in found if name == tool]
        before, after = np.mean(pairs, axis=0)
        print(f"  {tool[:20]:20s} {number:4d} calls   {before:.3f}   {after:.3f}")
