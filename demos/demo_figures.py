"""demos/demo_figures.py: the figures that the files of the book draw at the end of their demos.

A file computes what it shows and hands over numbers; one function here draws them.

    muon.py            draw_timeline       which task travels while another multiplies
    moe.py             draw_loads          expert load with and without the balancing bias
    rollout.py         draw_kl_variances   what three estimates of a KL divergence cost
    feedback_distill   draw_hint           where a hint disagrees, and how the policy follows
    length_penalty     draw_prices         what a rollout pays, what its next 100 tokens cost

They stand here because a figure shows a concept and is none of it. This file imports nothing of the
book, so the lowest of its files may use it in their demos. Left out: figures of a training run
(learning_curves.py) and of an evaluation (policy_report.py).
"""

from collections import defaultdict
from pathlib import Path

from command.drawing import make_axes


def save_figure(figure, path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def draw_timeline(events, path):
    """events: [(seconds, task, event)] of one rank. One row per task: when its shards were under
    way, when it multiplied. Overlap is a bar above another."""
    # Per task, the time of each of its events, counted from the first event of all.
    start = min(seconds for seconds, _, _ in events)
    times = defaultdict(dict)  # task -> {event: milliseconds}
    for seconds, task, event in events:
        times[task][event] = 1e3 * (seconds - start)

    # Three bars in each row, from one event of the task to another.
    title = "One task's shards travel, another multiplies"
    figure, ax = make_axes(title, "ms, rank 0 of 4", "task")
    figure.set_size_inches(9, 0.7 + 0.55 * len(times))
    for begin, end, color, label in (
        ("send", "multiply", "#9ecae1", "shards to owners"),
        ("multiply", "multiplied", "#e6550d", "Newton-Schulz"),
        ("return", "done", "#a1d99b", "results back"),
    ):
        lengths = [row[end] - row[begin] for row in times.values()]
        lefts = [row[begin] for row in times.values()]
        ax.barh(list(times), lengths, left=lefts, color=color, label=label)

    # The first task at the top.
    ax.set(yticks=sorted(times))
    ax.invert_yaxis()
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    save_figure(figure, path)


def draw_loads(runs, path):
    """runs: {name: (losses, loads)}, loads (steps, E) the share of the tokens by expert"""
    # One panel per run. Its title has the means over the last 20 steps.
    figure, axes = make_axes("", "step", "share of the tokens, expert by expert", len(runs))
    for ax, (name, (losses, loads)) in zip(axes, runs.items()):
        loss, busiest = sum(losses[-20:]) / 20, loads[-20:].mean(0).max()
        ax.stackplot(range(len(loads)), loads.T.numpy())
        ax.set(title=f"{name}: loss {loss:.2f}, busiest expert {busiest:.0%}", xlabel="step")
        ax.set(xlim=(0, len(loads) - 1), ylim=(0, 1))
    save_figure(figure, path)


def draw_kl_variances(kl, variances, path):
    """kl (N,): true divergences in nats; variances: {name of the estimate: (N,)}"""
    figure, ax = make_axes("Why k1", "KL divergence, nats", "variance of one sample's estimate")
    for name, values in variances.items():
        ax.plot(kl, values, label=name)
    ax.set_yscale("log")
    ax.legend()
    save_figure(figure, path)


def draw_hint(names, kl, taught, curve, hinted, path):
    """names, kl, taught (N,): the tokens of a turn, the hint's KL at each, is it in the loss? curve
    {step: (probability of the wrong tools, KL of all other tokens)}; hinted: the same
    probability where the policy reads the hints"""
    # Left: the divergence at each token.
    title = "Where the hint disagrees (red: in the loss)"
    figure, (left, right) = make_axes(title, "", "KL(student | teacher), nats", 2)
    colors = ["tab:red" if one else "lightgray" for one in taught]
    bars = left.bar(range(len(kl)), kl, color=colors)
    left.bar_label(bars, fmt="%.2f", fontsize=8)
    left.set_xticks(range(len(kl)), names, rotation=45, ha="right", fontsize=8)

    # Right: how the policy changes while it is distilled.
    labels = ("wrong tools", "KL of other tokens")
    for name, values in zip(labels, zip(*curve.values())):
        right.plot(list(curve), values, label=f"{name}: {values[0]:.3f} -> {values[-1]:.3f}")
    label = f"wrong tools, with hint: {hinted:.3f}"
    right.axhline(hinted, color="gray", linestyle="--", label=label)
    right.set(xlabel="distillation step", ylabel="probability (KL: nats)", xticks=list(curve))
    right.set_title("What the student does without the hint")
    right.legend(frameon=False, fontsize=8, loc="center right")
    save_figure(figure, path)


def draw_prices(x, curves, path):
    """curves: {name: (what a rollout of effort x pays, what its next 100 tokens cost)}"""
    # Left the price of a whole rollout, right that of going on: the legend has its two ends.
    title = "What a rollout pays"
    y = "w C(x) / C(budget), in units of one solved task"
    figure, (left, right) = make_axes(title, "effort x", y, 2)
    for name, (paid, price) in curves.items():
        left.plot(x, paid, label=name)
        right.plot(x, price, label=f"{name}: {price[0]:.2f} -> {price[-1]:.2f}")
    right.set(xlabel="effort so far", ylabel="price", title="What the next 100 tokens cost")
    for ax in (left, right):
        ax.legend(frameon=False, fontsize=9)
    # Room for the legend above the curves.
    right.set_ylim(0, 1.5 * right.get_ylim()[1])
    save_figure(figure, path)
