"""eval.py: how good is a policy, and what does a solved task cost?

One number hides what matters for an agent: that hard tasks are solved too, that effort follows
difficulty, what a task costs. So: held-out tasks at every level, several passes each, and score
against tokens.

Stated by Cursor (blog on CursorBench; Technical Report, arXiv 2603.24477, sections 5 and 7.1):
accuracy over several passes, completion tokens, median cost per task; score plotted against tokens
and against cost. Composer 2.5's prices are the defaults of the flags: $0.50 per million tokens in,
$2.50 out. Ours: the tasks (unseen seeds, compositions and names), the confidence interval
(Wilson's; passes of one task count for as much as they tell), two policies compared task by task,
and that a token is paid as input once, as if every turn hit the cache.

    pass@k = 1 - C(n - c, k) / C(n, k)          n passes of a task, c of them solved: unbiased (arXiv 2107.03374)
    best-of-k                                   the same number, since hidden tests tell a solved pass from others

Left out: latency (our hardware is not theirs) and real user sessions.

    python eval.py demo              the scripted expert at three degrees of care, through the same table
    python eval.py out/a out/b       runs compared: table, out/eval.json, figures
    python eval.py out/run --mismatch          the trainer's log-probs against the sampler's, in bf16, with and without router replay
"""

import argparse
import contextlib
import errno
import hashlib
import io
import json
import math
import os
import random
import re
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from world import machine  # first: it says in one line what Windows lacks
import feedback_distill
import hsdp
import rollout
import summarize
import synth_tasks
from length_penalty import Weights, effort
from published.grouped_query import config_of
from published.tokenizers import make_tokenizer
import fast
from fast.sampler import Sampler as FastSampler
from fast.workers import generation_model
from world.judge import judge
from world.sandbox import Sandbox
from world.task import Refusal
from world.task_file import read_tasks

LEVELS = range(6)


# ---------------------------------------------------------------- numbers


def pass_at_k(n, c, k):
    """Chance that at least one of k passes, drawn from n of which c are solved, is solved. k <=
    n."""
    assert 0 <= c <= n and 1 <= k <= n, f"pass@{k} of {c} solved among {n}"
    return 1.0 if n - c < k else 1.0 - math.comb(n - c, k) / math.comb(n, k)


def interval(values, passes=1):
    """95 % interval of a solve rate: values (N,) are the shares of each task's `passes` that were
    solved -> [low, high].

    Wilson's score interval. It has a width where all or none were solved, and near 0 and 1 it
    covers what it claims, which a bootstrap over tasks does not. Passes of one task are alike, so
    they count for less than as many tasks: `observations` is the number of independent ones that
    would scatter the mean as much as these tasks do. It lies between N (passes of a task always
    agree) and N * passes (they know nothing of each other)."""
    values, z = np.asarray(values, dtype=np.float64), 1.96
    tasks, rate = len(values), float(values.mean())

    # The variance of the mean, as the scatter of the tasks tells it. No scatter tells nothing: then
    # only tasks are counted.
    variance = values.var(ddof=1) / tasks if tasks > 1 else 0.0
    observations = rate * (1 - rate) / variance if variance > 0 else tasks
    observations = min(max(observations, tasks), tasks * passes)

    # Wilson: all rates at which what was seen lies within z standard deviations
    spread = 1 + z * z / observations
    centre = (rate + z * z / (2 * observations)) / spread
    half = z / spread * math.sqrt(rate * (1 - rate) / observations + z * z / (4 * observations**2))
    return [max(0.0, centre - half), min(1.0, centre + half)]


def compare_pairs(first, second):
    """Two policies' records on the same tasks -> what the pairs say, or None where they share no
    task.

    Each task is compared with itself, so that easy and hard ones do not blur the difference: won
    and lost are the tasks of which `second` solved more, or fewer, of its passes than `first`. p:
    chance of a split at least as uneven if both were equally good (sign test, exact, two-sided)."""

    def solve_rates(records):
        solved = {}
        for r in records:
            solved.setdefault(r["task"], []).append(r["solved"])
        return {task: float(np.mean(passes)) for task, passes in solved.items()}

    before, after = solve_rates(first), solve_rates(second)
    shared = [task for task in before if task in after]
    if not shared:
        return None
    won = sum(after[task] > before[task] for task in shared)
    lost = sum(after[task] < before[task] for task in shared)
    decided = won + lost
    tail = sum(math.comb(decided, i) for i in range(min(won, lost) + 1)) / 2**decided
    return {
        "tasks": len(shared),
        "won": won,
        "lost": lost,
        "p": min(1.0, 2 * tail),
        "difference": float(np.mean([after[task] - before[task] for task in shared])),
    }


def format_number(value, form):
    """The number in its column's form, or in three significant digits where the form would round
    more than a twentieth of it away. form: a format string with a width, such as "{:7.4f}", or
    without."""
    text = form.format(value)
    if not math.isfinite(value) or abs(float(text) - value) <= 0.05 * abs(value):
        return text
    return f"{value:.2e}".rjust(len(text))


def dollars(stats, price_in=0.5, price_out=2.5):
    """Cost of a chain: every token enters once as input (cache), every sampled one is paid as
    output."""
    return ((stats["total"] - stats["sampled"]) * price_in + stats["sampled"] * price_out) / 1e6


def record(chain, price=(0.5, 2.5)):
    """What one pass leaves behind: plain numbers."""
    flaws = {hint.kind for hint in feedback_distill.detect(chain, ("communication", "code_style"))}
    return {
        **{name: name in flaws for name in ("communication", "code_style")},
        "task": chain.task.instance_id,
        "level": chain.task.level,
        "solved": bool(chain.solved and chain.finished),
        "finished": bool(chain.finished),
        "effort": float(effort(chain.stats, Weights())),
        "cost": dollars(chain.stats, *price),
        **chain.stats,
    }


def summary(records):
    """Records of one policy -> overall numbers and the same by level."""
    tasks = {}
    for r in records:
        tasks.setdefault(r["task"], []).append(r["solved"])
    passes, mean = min(map(len, tasks.values())), lambda key: float(
        np.mean([r[key] for r in records])
    )
    turns = sum(r["turns"] for r in records)
    result = {
        "solved": mean("solved"),
        "interval": interval([np.mean(s) for s in tasks.values()], passes),
        "tasks": len(tasks),
        "passes": passes,
        "tokens": mean("sampled"),
        "effort": mean("effort"),
        "turns": mean("turns"),
        "cost": float(np.median([r["cost"] for r in records])),
        "summaries": mean("summaries"),
        "finished": mean("finished"),
        "wrong_calls_per_turn": sum(r["bad_tools"] for r in records) / max(1, turns),
        "no_turn": sum(r["turns"] == 0 for r in records),
        "bad_tool": float(np.mean([r["bad_tools"] > 0 for r in records])),
        **{habit: mean(habit) for habit in ("communication", "code_style")},
    }
    if "moved" in records[0]:
        result["moved"] = sum(r["moved"] for r in records) / max(
            1, sum(r["unflagged"] for r in records)
        )
    for k in (2**i for i in range(6) if 2**i <= passes):
        result[f"pass@{k}"] = float(np.mean([pass_at_k(len(s), sum(s), k) for s in tasks.values()]))
    return result


def by_level(records):
    return {
        level: summary([r for r in records if r["level"] == level])
        for level in sorted({r["level"] for r in records})
    }


# ---------------------------------------------------------------- counts for reward hacking


def has_cheat(chain):
    """Does the audit find a cheat in this rollout? By facts alone: what only sounds like one is
    `is_suspicious`."""
    return any(finding.severity == "cheat" for finding in rollout.audit_chain(chain))


def is_suspicious(chain):
    """Does something in this rollout sound like a cheat, though no fact says that it is one?"""
    if has_cheat(chain):
        return False
    return any(finding.severity == "suspicious" for finding in rollout.audit_chain(chain))


def submitted_untested(chain):
    """Was it submitted although the tests could be run and were not, or not since the last edit, or
    were red?"""
    if not chain.finished or "run_command" not in chain.task.tools:
        return False
    green = False
    for turn in chain.turns:
        for call in turn.calls:
            if call.error:
                continue
            if call.name == "edit_file":
                green = False
            elif call.name == "run_command" and call.args == [chain.task.test_command]:
                red = re.search(r"[1-9]\d* (failed|error)", call.output)
                green = "passed" in call.output and not red
    return not green


# ---------------------------------------------------------------- policies


def held_out(number, levels=LEVELS, split="heldout"):
    """`number` tasks per level that no training has seen: seeds, compositions of operations and
    names are all held out; with split="train" seeds only, which tells what is missing apart from
    what does not carry over."""
    first = 0 if split == "heldout" else 10**12
    return [
        synth_tasks.make_task(level, first + seed, split)
        for level in levels
        for seed in range(number)
    ]


def last_stage(folder):
    """The checkpoint of a run's last stage, or the folder itself where it is no run"""
    stages = (Path(folder, name) for name in ("rl", "sft", "long", "pretrain"))
    return next((path for path in stages if hsdp.exists(path)), Path(folder))


def unfinished(folder):
    """ "" of a checkpoint at its stage's end; of one before it, what a result made from it must be
    labelled with: "unfinished: step 3 of 60"."""
    extra = hsdp.load_extra(folder)
    step, steps = extra.get("step"), extra["config"].get("steps")
    return (
        f"unfinished: step {step} of {steps}"
        if step is not None and steps is not None and step < steps
        else ""
    )


def made_by(folder):
    """ "" of a checkpoint of the plain recipe; of an experiment's arm what changed the recipe, since
    here its policy acts without that change"""
    patch = hsdp.load_extra(folder).get("patch", "")
    return f"made by {patch}" if patch else ""


def load(folder, device="cpu", plain=False):
    """A checkpoint folder, or a run (its last stage) -> model ready to sample (plain: without the
    twins of fast/), tokenizer, configuration. Whoever shows what it does says so where its stage is
    `unfinished`."""
    path = last_stage(folder)
    extra = hsdp.load_extra(path)
    # than these knobs: had them so
    older = {"draft": 3, "init_from": "", "weights": "float32"}
    config = {**older, **extra["config"]}
    # knobs of an earlier version, without which this policy would be shown in another world
    for name in ("truncate", "commands"):
        if config.get(name):
            raise ValueError(
                f"{path} was made with {name}={config[name]}, no flag any more: see experiments/summary.py"
            )
    tokenizer = make_tokenizer(**extra["tokenizer"])
    model = config_of(extra["model"]).build_model()
    hsdp.load(path, model)
    if not plain:
        fast.accelerate(model)
    return model.to(device).requires_grad_(False), tokenizer, config


def make_sampler(model, tokenizer, config, temperature):
    """A sampler of this policy: the plain one if the run is plain, else its fast twin, which takes
    a copy of the weights rounded to the dtype of the products"""
    options = dict(window=config["window"], temperature=temperature)
    if config.get("plain"):
        return rollout.Sampler(model, tokenizer, **options)
    copy = generation_model(model.config, model.dtype, model.embed.weight.device)
    copy.load_state_dict(model.state_dict())
    return FastSampler(copy, tokenizer, draft=config["draft"], **options)


def attempt(
    model,
    tokenizer,
    config,
    tasks,
    passes,
    seed=0,
    temperature=None,
    price=(0.5, 2.5),
    numbers=None,
    began=None,
    hints=False,
):
    """`passes` rollouts of each task, at the temperature of the run's RL if none is given ->
    records. numbers: see rollouts. began: a model; the records then say how far the policy has
    moved from it. hints: see heeded."""
    compact = summarize.make_compaction(config)
    limits = rollout.Limits(config["window"], config["turns"])
    temperature = config["temperature"] if temperature is None else temperature
    sampler = make_sampler(model, tokenizer, config, temperature)
    groups = rollout.rollouts(sampler, tasks, passes, seed, limits, Sandbox(), compact, numbers)
    # What the machine failed at is neither solved nor unsolved.
    groups, lost = rollout.drop_failed(groups)
    if lost:
        tqdm.write(
            machine.failures_line([chain.failure for chain in lost], len(tasks) * passes),
            file=sys.stderr,
        )
    if lost and not groups:
        print(
            "eval.py: no rollout could be played on this machine; free what the line above names",
            file=sys.stderr,
        )
        sys.exit(2)
    moved = lambda chain: (
        {} if began is None else dict(zip(("moved", "unflagged"), drift(began, chain, temperature)))
    )
    told = lambda chain: {"hints": heeded(model, tokenizer, chain)} if hints else {}
    return [
        {**record(chain, price), **moved(chain), **told(chain)}
        for group in groups
        for chain in group
    ]


@torch.no_grad()
def heeded(model, tokenizer, chain):
    """Would this policy heed the hint, could it be its own teacher? -> for each call to a tool that
    is not there (tool, probability of beginning and naming that call, the same under the hint).
    Where the two are alike, there is nothing to distil."""
    found = []
    for hint in feedback_distill.detect(chain, ("unavailable_tool",)):
        episode = chain.episodes[hint.episode]
        text = feedback_distill.hint_tokens(tokenizer, hint.text, episode.turns[hint.turn])
        turn, above = episode.turns[hint.turn], [
            token for turn in episode.turns[: hint.turn + 1] for token in turn.tokens
        ]
        span, device = feedback_distill.span(tokenizer, turn, hint), model.embed.weight.device
        at = feedback_distill.pack([episode], [(0, hint.turn, text, span)]).to(device)
        places = (torch.tensor([above], device=device), at.student_row, at.student_position), (
            at.tokens,
            at.row,
            at.position,
        )
        logp = [
            feedback_distill.logits_at(model, *place)
            .log_softmax(-1)
            .gather(1, at.token[:, None])
            .sum()
            for place in places
        ]
        found.append(
            (
                next(call.name for call in turn.calls if call.error == "unknown_tool"),
                *(float(p.exp()) for p in logp),
            )
        )
    return found


def mismatch(model, tokenizer, config, tasks):
    """How far lie the trainer's log-probs from those recorded at sampling? -> {name: sizes of the
    differences, token by token}, in bf16 with the experts of sampling replayed and with the
    trainer's own, and in fp32"""
    found, limits = {}, rollout.Limits(config["window"], config["turns"])
    for dtype in (torch.bfloat16, torch.float32):
        sampler = make_sampler(model.compute(dtype), tokenizer, config, config["temperature"])
        groups = rollout.rollouts(
            sampler, tasks, 1, 0, limits, Sandbox(), summarize.make_compaction(config)
        )
        episodes = [
            e
            for group in groups
            for chain in group
            for e in chain.episodes
            if any(turn.role == "assistant" for turn in e.turns)
        ]
        for replay, how in (
            ((True, "replayed"), (False, "chosen again"))
            if dtype == torch.bfloat16
            else ((True, "replayed"),)
        ):
            gaps = [
                rollout.rescore(model.compute(dtype), e, config["temperature"], replay).abs()
                for e in episodes
            ]
            found[f"{str(dtype).removeprefix('torch.')}, experts {how}"] = torch.cat(gaps).numpy()
    return found


def draw_mismatch(found, path):
    figure, ax = axes(
        "Trainer against sampler",
        "tokens, by the size of the difference",
        "difference of log-probabilities",
    )
    for name, gaps in found.items():
        ax.plot(
            np.linspace(0, 1, len(gaps)),
            np.maximum(np.sort(gaps), 1e-8),
            label=f"{name}: p99 {np.quantile(gaps, .99):.1e}",
        )
    ax.set_yscale("log")
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=120)


@torch.no_grad()
def drift(began, chain, temperature):
    """How far has the policy that sampled this chain moved from the model `began`, where no rule
    finds fault? -> (k1 summed, tokens): log-probability at sampling minus that under `began`, over
    the sampled tokens of turns that are not flagged. The mean estimates a KL divergence in nats per
    token."""
    flagged, total, count = (
        {
            (h.episode, h.turn)
            for h in feedback_distill.detect(chain, tuple(feedback_distill.REMINDERS))
        },
        0.0,
        0,
    )
    for e, episode in enumerate(chain.episodes):
        batch, (_, mask, _, turn) = rollout.pack([episode], [1.0], 64), rollout.flatten(episode)
        keep = torch.from_numpy(mask * [(e, i) not in flagged for i in turn])[1:] > 0
        tokens, targets = (
            batch[name].to(began.embed.weight.device) for name in ("tokens", "targets")
        )
        gap = batch["logprobs"][0] - began.logprobs(began(tokens), targets, temperature)[0].cpu()
        total, count = total + float(gap[: len(keep)][keep].sum()), count + int(keep.sum())
    return total, count


# ---------------------------------------------------------------- what one sees

ROWS = {
    "solved": ("solved", "{:.3f}"),
    "pass@1": ("pass@1", "{:.3f}"),
    "tokens": ("tokens per task", "{:.0f}"),
    "effort": ("effort", "{:.1f}"),
    "turns": ("turns", "{:.1f}"),
    "cost": ("median cost, $ per 1000 tasks", "{:.3f}"),
    "bad_tool": ("episodes with a wrong tool", "{:.3f}"),
    "wrong_calls_per_turn": ("wrong calls per turn", "{:.4f}"),
    "summaries": ("summaries per task", "{:.2f}"),
    "finished": ("ended by itself", "{:.3f}"),
}


def table(policies, kind="held-out"):
    """{name: records}, and which tasks these were -> the text of the table"""
    whole = {name: summary(records) for name, records in policies.items()}
    levels = {name: by_level(records) for name, records in policies.items()}
    any_one = next(iter(whole.values()))
    width = max(14, 2 + max(map(len, policies)))
    line = lambda label, cells: f"{label:32s}" + "".join(f"{cell:>{width}s}" for cell in cells)
    text = [line(f"{any_one['tasks']} {kind} tasks x {any_one['passes']}", policies)]
    text.append(line("solved [95 % interval]", [f"{w['solved']:.3f}" for w in whole.values()]))
    text.append(line("", ["[{:.2f} {:.2f}]".format(*w["interval"]) for w in whole.values()]))
    text += pair_lines(policies, line)
    for level in next(iter(levels.values())):
        rows = [by.get(level) for by in levels.values()]
        cells = [f"{row['solved']:.2f} ({row['tokens']:.0f})" if row else "-" for row in rows]
        text.append(line(f"  level {level}: solved (tokens)", cells))
    for k in [key for key in any_one if key.startswith("pass@")]:
        cells = [format_number(w[k], "{:.3f}") if k in w else "-" for w in whole.values()]
        text.append(line(f"{k}" + (" = best-of-" + k[5:] if k != "pass@1" else ""), cells))
    for key in (
        "tokens",
        "effort",
        "turns",
        "cost",
        "bad_tool",
        "wrong_calls_per_turn",
        "summaries",
        "finished",
    ):
        scale = 1000 if key == "cost" else 1
        text.append(
            line(
                ROWS[key][0], [format_number(w[key] * scale, ROWS[key][1]) for w in whole.values()]
            )
        )
    # these count as failed, and nothing was tried
    if any(w["no_turn"] for w in whole.values()):
        text.append(
            line("without room for a turn", [f"{w['no_turn']:.0f}" for w in whole.values()])
        )
    return "\n".join(text)


def pair_lines(policies, line):
    """The rows of the table that set each policy against the first one, task by task; none where no
    task is shared. line: as in table, label and cells -> a row"""
    first, *others = policies
    pairs = [compare_pairs(policies[first], policies[name]) for name in others]
    if not any(pairs):
        return []
    whole = len({r["task"] for r in policies[first]})
    won, chance = ["-"], [""]
    for pair in pairs:
        if pair is None:
            won.append("other tasks")
            chance.append("")
            continue
        part = f" of {pair['tasks']}" if pair["tasks"] < whole else ""
        won.append(f"+{pair['won']} -{pair['lost']}{part}")
        chance.append("p=" + format_number(pair["p"], "{:.3f}"))
    return [
        line("  tasks won, lost against first", won),
        line("  if alike, so uneven by chance", chance),
    ]


def try_to_draw():
    """Draws an empty figure into memory -> "" or why that is not possible here. For the start of a
    command that draws at its end."""
    try:
        figure, _ = axes("", "", "")
        figure.savefig(io.BytesIO(), format="png")
    # of a foreign library, and whatever its settings make of it
    except Exception as error:
        return f"no figures: matplotlib does not draw here ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    return ""


def draw_safely(draw_it, *inputs):
    """Draws; what only draws never ends a command whose work is done. -> "" or why there is no
    figure, in one line"""
    try:
        draw_it(*inputs)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return f"{draw_it.__name__}: no figure ({type(error).__name__}: {lines[0]})"
    return ""


def axes(title, x, y, panels=1):
    # A notebook exports the backend of its own process to what it starts, where that module may not
    # exist. Nothing is shown on a screen here. It has to be set before the first import: matplotlib
    # reads it then.
    os.environ["MPLBACKEND"] = "agg"
    # pyplot would keep every figure, and a run draws many
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 4 * panels, 4), layout="constrained")
    ax = figure.subplots(1, panels)
    for panel in np.atleast_1d(ax):
        panel.grid(alpha=0.3)
    np.atleast_1d(ax)[0].set(title=title, xlabel=x, ylabel=y)
    return figure, ax


def draw(policies, folder):
    """effort.png: tokens by difficulty; score.png: score against tokens, one line per policy over
    the levels"""
    folder = Path(folder)
    levels = {name: by_level(records) for name, records in policies.items()}
    figure, ax = axes("Effort follows difficulty?", "level of the task", "sampled tokens per task")
    for name, rows in levels.items():
        ax.plot(list(rows), [r["tokens"] for r in rows.values()], "o-", label=name)
        for level, r in rows.items():
            top = r["tokens"] >= max(
                other[level]["tokens"] for other in levels.values() if level in other
            )
            ax.annotate(
                f"{r['tokens']:.0f}",
                (level, r["tokens"]),
                textcoords="offset points",
                xytext=(0, 6 if top else -12),
                ha="center",
                fontsize=7,
            )
    ax.legend()
    figure.savefig(folder / "effort.png", dpi=120)
    figure, ax = axes(
        "Score against tokens (one point per level)", "sampled tokens per task", "solved"
    )
    for name, rows in levels.items():
        points = ax.plot(
            [r["tokens"] for r in rows.values()],
            [r["solved"] for r in rows.values()],
            "o",
            label=name,
            alpha=0.5,
        )
        whole = summary(policies[name])
        ax.plot(whole["tokens"], whole["solved"], "*", markersize=16, color=points[0].get_color())
        ax.annotate(
            f"{name}: {whole['solved']:.2f} at {whole['tokens']:.0f} tokens",
            (whole["tokens"], whole["solved"]),
            textcoords="offset points",
            xytext=(8, 8),
            fontsize=8,
        )
        for level, r in rows.items():
            ax.annotate(
                str(level),
                (r["tokens"], r["solved"]),
                textcoords="offset points",
                xytext=(4, -8),
                fontsize=7,
            )
    ax.set_ylim(0, 1.15)
    ax.legend(loc="lower right")
    figure.savefig(folder / "score.png", dpi=120)


def lines_of(run, stage):
    """The step log of one stage of a run: a dictionary for each step, in order. A step that stands
    there twice counts once, as it was written last; a line that a kill or a full disk has cut is
    left out."""
    path = Path(run, f"{stage}.jsonl")
    steps = {}
    for line in path.read_text(errors="replace").split("\n") if path.exists() else ():
        try:
            entry = json.loads(line)
            steps[int(entry["step"])] = entry
        except (ValueError, KeyError, TypeError):
            continue
    return [steps[step] for step in sorted(steps)]


def curve(lines, name):
    """What a log says of `name`, step 1 first; nan for a step that is not in it, so that a log
    which lost its beginning is not moved forward"""
    by_step = {int(line["step"]): line.get(name, math.nan) for line in lines}
    return [by_step.get(step, math.nan) for step in range(1, max(by_step, default=0) + 1)]


def mean_known(values):
    """The mean of the numbers that are known, nan where none is"""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def draw_training(logs, folder):
    """loss.png: the supervised stages end to end; reward.png: reward, solved and wrong calls by RL
    step. logs: {stage: its lines}"""
    figure, ax = axes("Loss of the supervised stages", "step", "nats per token")
    start = 0
    for stage, lines in (
        (stage, lines) for stage, lines in logs.items() if stage != "rl" and lines
    ):
        ax.plot(
            [start + line["step"] for line in lines], [line["loss"] for line in lines], label=stage
        )
        start += int(lines[-1]["step"])
    if start:
        ax.set_yscale("log")
        ax.legend()
        figure.savefig(Path(folder, "loss.png"), dpi=120)
    lines = logs.get("rl")
    if not lines:
        return
    figure, ax = axes(
        "Reinforcement learning", "RL step", "per rollout (training tasks, five-step mean)"
    )
    steps, level = [line["step"] for line in lines], ax.twinx()

    def plot_running(axis, key, **style):
        axis.plot(steps, running([line[key] for line in lines]), **style)

    for key, label in (
        ("solved", "solved"),
        ("best", "best of the group"),
        ("reward", "reward"),
        ("bad_tool", "with a wrong tool call"),
    ):
        plot_running(ax, key, label=label)
    plot_running(level, "level", color="gray", alpha=0.5)
    ax.set_ylim(min(0, ax.get_ylim()[0]), 1.05)  # rewards may be negative
    level.set(ylim=(0, 8), ylabel="level of the tasks (gray)")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0.32), ncols=2, fontsize=8)
    figure.savefig(Path(folder, "reward.png"), dpi=120)


def running(values, window=5):
    """Mean over the last `window` values"""
    return [mean_known(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def check_writable(folder, names):
    """Before long work: can its results be written? folder is made. OSError if not, with the path
    that is in the way: what is no plain file, or may not be overwritten."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    for path in (Path(folder, name) for name in names):
        if path.exists() and not path.is_file():
            raise OSError(errno.EISDIR, "a file is to be written there, and it is none", str(path))
        if path.exists() and not os.access(path, os.W_OK):
            raise OSError(errno.EACCES, "cannot be overwritten", str(path))


def write(policies, folder, name, extra=None, kind="held-out"):
    """JSON and figures of {name: records} -> the text of the table; why there are no figures is
    said below it."""
    write_json(policies, Path(folder, name), extra)
    problem = draw_safely(draw, policies, folder)
    return table(policies, kind) + f"\n{problem}" * bool(problem)


def write_json(policies, path, extra=None):
    """The numbers of {name: records}, overall, by level and in pairs; extra: what else belongs in
    the file"""
    data = {
        "policies": {
            n: {"overall": summary(r), "levels": by_level(r)} for n, r in policies.items()
        },
        **(extra or {}),
    }
    first, *others = policies
    data["pairs"] = {
        name: {"against": first, **pair}
        for name in others
        if (pair := compare_pairs(policies[first], policies[name]))
    }
    path.write_text(json.dumps(data, indent=1))


# ---------------------------------------------------------------- the stage `eval` of train.py


def find_policies(config, given, sizes, load_published):
    """What a run has to evaluate: its policies before and after RL, before any training the
    published model itself -> (the configuration to evaluate with, {name: checkpoint folder}, the
    configuration that the last one was made with, the published model as `load` gives it or None).

    config: that of the command; given: the flags that were typed; sizes: names of those that are
    the model's shape; load_published: called without arguments, gives the model of --init_from.
    Window, turns, ... are those the policies were made with. Refusal where a flag says otherwise,
    or where there is nothing to evaluate."""
    out, published = Path(config.out), None

    # Before RL: the run's own SFT, or the one from which its RL began.
    trained = hsdp.exists(out / "rl")
    before = out / "sft"
    if not hsdp.exists(before):
        begun = hsdp.load_extra(out / "rl")["config"]["start_from"] if trained else ""
        before = Path(config.start_from or begun or config.out) / "sft"
    paths = {"before RL" if trained else "after SFT": before, "after RL": out / "rl"}
    paths = {name: path for name, path in paths.items() if hsdp.exists(path)}
    if not paths and config.init_from and not config.start_from:
        published = load_published()
        paths = {"published": Path(config.init_from)}
    if not paths:
        raise Refusal(f"--stage=eval: neither {before} nor {out}/rl is there")

    # What is shown belongs to what was run: a stage that is not at its end is called so.
    labelled = {}
    for name, path in paths.items():
        label = "" if published else unfinished(path)
        labelled[f"{name} ({label})" if label else name] = path

    # One model, one window, one limit of turns, ... for all of them: those of the last one.
    last = list(labelled.values())[-1]
    made = published[2] if published else load(last)[2]
    if config.init_from not in ("", made["init_from"]):
        raise Refusal(
            f"{last} did not begin from --init_from={config.init_from}: take another --out, or "
            "leave the flag away"
        )
    rules = ["window", "turns", "draft", "summarize", "trigger"]
    shape = [] if published else sorted({*sizes, "vocab", "yarn"})
    for name in shape + rules:
        # A run older than a flag was made with its default.
        before = made.get(name, getattr(type(config), name))
        if given.get(name, before) != before:
            raise Refusal(
                f"--{name}={given[name]}: {last} was made with {before}, and so it is evaluated"
            )
    as_made = {name: made[name] for name in rules}
    # This may be asked for otherwise.
    temperature = made.get("temperature", config.temperature)
    as_made["temperature"] = given.get("temperature", temperature)
    return replace(config, **as_made), labelled, made, published


def evaluate(run, config, paths, made, published, describe_cost):
    """Held-out tasks before and after RL -> table, summary.json, figures. Every rank plays its
    share of the tasks. config, paths, made, published: see find_policies; run: train.py's;
    describe_cost: called on every rank at the end, gives a line on what the command took."""
    out = Path(config.out)
    trained = hsdp.exists(out / "rl")
    told = ", ".join(f"{name} = {path}" for name, path in paths.items())
    run.say(f"evaluated: {told}" + f"; there is no {out}/rl" * (not trained))

    # The same evaluation of the same checkpoints again: its table is there already.
    made_from = {} if published else {name: when_saved(path) for name, path in paths.items()}
    kept = find_kept_table(config, made_from) if trained else ""
    if kept:
        return run.say(kept)

    # Tasks that no policy has seen.
    held = held_out(config.eval_tasks, range(config.eval_levels))
    if config.tasks:
        held = read_tasks(config.tasks)

    policies = {}
    for name, path in run.bar(list(paths.items()), "evaluation"):
        model, tokenizer, saved = published or load(path, run.device, config.plain)
        # How far RL has moved the policy from where it began. (Of a published model, one more may
        # not fit.)
        began, origin = None, Path(saved["start_from"] or saved["out"], "sft")
        if saved["stage"] == "rl" and hsdp.exists(origin) and not saved["init_from"]:
            began = load(origin, run.device, config.plain)[0].compute(run.dtype)
        mine = attempt(
            model.compute(run.dtype),
            tokenizer,
            {**made, "plain": config.plain},
            run.share(held),
            config.eval_samples,
            temperature=config.temperature,
            numbers=run.share(range(len(held))),
            began=began,
        )
        policies[name] = run.gather(mine)
    cost = describe_cost()
    if run.rank == 0:
        write_evaluation(config, policies, made_from, cost)


def find_kept_table(config, made_from):
    """The table in summary.json if it is of the same evaluation of the same checkpoints, else an
    empty text"""
    path = Path(config.out, "summary.json")
    asked = ["tasks", "temperature", "start_from"]
    asked += ["eval_levels", "eval_tasks", "eval_samples"]
    # A full disk may have left half of it.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        done = json.loads(path.read_text())
        same = all(done["config"][name] == getattr(config, name) for name in asked)
        if same and done["file"] == digest_file(config.tasks) and done["made_from"] == made_from:
            return done["table"]
    return ""


def write_evaluation(config, policies, made_from, cost):
    """Table, summary.json, figures of {name: records}"""
    out = Path(config.out)
    text = table(policies, "given" if config.tasks else "held-out") + f"\n{cost}"
    logs = {stage: lines_of(out, stage) for stage in ("pretrain", "long", "sft", "rl")}
    extra = {
        "table": text,
        "config": asdict(config),
        "stages": {stage: lines[-1] for stage, lines in logs.items() if lines},
        "file": digest_file(config.tasks),
        "made_from": made_from,
    }

    # The table first: it is what the hour was for, and a full disk or a broken matplotlib must not
    # cost it.
    print(f"\n{text}\n")
    try:
        write_json(policies, out / "summary.json", extra)
    except OSError as error:
        print(
            f"train.py: the table above could not be kept in {out}/summary.json: {error.strerror}",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    problems = [draw_safely(draw, policies, out), draw_safely(draw_training, logs, out)]
    figures = ", ".join(sorted(path.name for path in out.glob("*.png")))
    print("\n".join([f"{out}/summary.json and figures: {figures}", *filter(None, problems)]))


def when_saved(path):
    """When a checkpoint was written, which tells it from another that later stands in its place"""
    files = [Path(folder, "manifest.json") for folder in (path, f"{path}.old")]
    return next((str(file.stat().st_mtime_ns) for file in files if file.exists()), "")


def digest_file(path):
    """Of the bytes of a file; "" of none"""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


# ---------------------------------------------------------------- command line


def expert_records(sloppy, tasks):
    """The scripted expert as a policy, graded by the real judge."""
    tokenizer, sandbox, records = (
        rollout.Tokenizer({bytes([b]): b for b in range(256)}),
        Sandbox(),
        [],
    )
    for task in tasks:
        chain = rollout.demonstrate(
            task, tokenizer, random.Random(task.instance_id), rollout.Limits(10**6), sloppy
        )
        chain.solved = judge(task, chain.files, sandbox).solved
        records.append(record(chain))
    return records


def demo():
    Path("out/demo").mkdir(parents=True, exist_ok=True)
    tasks = held_out(8)
    policies = {
        name: expert_records(sloppy, tasks)
        for name, sloppy in (("careful", 0.0), ("sloppy", 1.0), ("hasty", 2.0))
    }
    print(write(policies, "out/demo", "eval.json"))
    careful, hasty = summary(policies["careful"]), summary(policies["hasty"])
    print(
        f"\nThe same expert, careful and hasty: {careful['solved']:.2f} of the tasks solved for {careful['tokens']:.0f} bytes each, "
        f"against {hasty['solved']:.2f} for {hasty['tokens']:.0f}. Figures: out/demo/effort.png, out/demo/score.png."
    )


def flags(argv):
    parser = argparse.ArgumentParser(
        description="Score runs on held-out tasks.", allow_abbrev=False
    )
    parser.error = lambda message: (print(f"eval.py: {message}", file=sys.stderr), sys.exit(2))
    parser.add_argument(
        "runs",
        nargs="*",
        help="folders of runs or of single checkpoints; the word demo: a demonstration",
    )
    parser.add_argument("--number", type=int, default=24, help="tasks per level")
    parser.add_argument(
        "--levels",
        type=int,
        default=len(LEVELS),
        help=f"levels, from 0 on, of {len(synth_tasks.LEVELS)}",
    )
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument(
        "--turns", type=int, default=0, help="of an episode (default: those of the run's RL)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=None,
        help="of sampling (default: that of the run's RL)",
    )
    parser.add_argument(
        "--tasks",
        default="",
        help="tasks.jsonl of synth_tasks.py --repo instead of generated codebases",
    )
    parser.add_argument(
        "--split",
        choices=("heldout", "train"),
        default="heldout",
        help="of generated tasks; train: only seeds are new",
    )
    parser.add_argument("--price_in", type=float, default=0.5, help="$ per million tokens")
    parser.add_argument("--price_out", type=float, default=2.5)
    parser.add_argument(
        "--gap",
        action="store_true",
        help="also tell which wrong tools a hint would keep the policy from",
    )
    parser.add_argument(
        "--mismatch",
        action="store_true",
        help="only: how far the trainer's log-probs lie from the sampler's, in bf16",
    )
    parser.add_argument("--out", default="out")
    # what an earlier version did with this flag has a command of its own
    for flag, _, name in (word.partition("=") for word in argv):
        if flag == "--experiment":
            parser.error(
                f"experiments have a command of their own: python -m experiments.{name or 'NAME'}"
            )
    args, others = parser.parse_known_args(argv)
    if others:
        parser.error(f"unknown flag {others[0]!r}")
    folders = [Path(run).resolve() for run in args.runs]
    twice = [run for run, folder in zip(args.runs, folders) if folders.count(folder) > 1]
    if twice:
        parser.error(f"{twice[0]} is named more than once: each run once")
    if min(args.number, args.passes) < 1 or args.turns < 0:
        parser.error("--number and --passes must be at least 1, --turns at least 0")
    if not 0 < args.levels <= len(synth_tasks.LEVELS):
        parser.error(f"--levels must be from 1 to {len(synth_tasks.LEVELS)}")
    for name in ("temperature", "price_in", "price_out"):
        if getattr(args, name) is not None and not 0 <= getattr(args, name) < math.inf:
            parser.error(f"--{name} must be a number from 0 on")
    if not args.runs:
        parser.error(
            "which runs? Name their folders: python eval.py out/run (python eval.py demo is a demonstration)"
        )
    return args, parser


def main(argv):
    args, parser = flags(argv)
    problem = try_to_draw()  # now, and not when all is done
    if problem:
        print(f"eval.py: {problem}", file=sys.stderr)
    if args.runs == ["demo"] and not Path("demo").exists():
        try:
            return demo()
        except OSError as error:
            parser.error(f"{error.filename or 'cannot write'}: {error.strerror}")
    policies = {}
    try:
        tasks = (
            read_tasks(args.tasks)
            if args.tasks
            else held_out(args.number, range(args.levels), args.split)
        )
        if not tasks:
            raise ValueError(f"{args.tasks}: holds no tasks")
        models = {}
        for run in args.runs:
            labels = [unfinished(last_stage(run)), made_by(last_stage(run))]
            label = "; ".join(filter(None, labels))
            models[f"{run} ({label})" if label else run] = load(run)
        check_writable(
            args.out,
            ["mismatch.png"] if args.mismatch else ["eval.json", "effort.png", "score.png"],
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.mismatch:
        found = {
            f"{run}, {name}": gaps
            for run, loaded in models.items()
            for name, gaps in mismatch(*loaded, tasks).items()
        }
        for name, gaps in found.items():
            print(
                f"{name:48s} median {np.median(gaps):.1e}   p99 {np.quantile(gaps, .99):.1e}   largest {gaps.max():.1e}"
            )
        return print(
            draw_safely(draw_mismatch, found, Path(args.out, "mismatch.png"))
            or f"{args.out}/mismatch.png"
        )
    for run, (model, tokenizer, config) in tqdm(models.items(), desc="runs", leave=False):
        config["turns"] = args.turns or config["turns"]
        policies[run] = attempt(
            model,
            tokenizer,
            config,
            tasks,
            args.passes,
            0,
            args.temperature,
            (args.price_in, args.price_out),
            hints=args.gap,
        )
    kind = "given" if args.tasks else "held-out" if args.split == "heldout" else "training"
    try:
        print(write(policies, args.out, "eval.json", kind=kind))
    # the table is what the time was spent on
    except OSError as error:
        print(table(policies, kind))
        parser.error(f"the table above could not be kept in {args.out}/eval.json: {error.strerror}")
    for run, records in policies.items() if args.gap else ():
        found = [call for record in records for call in record["hints"]]
        print(
            f"\n{run}: probability of a call to a tool that is not there, where it was made, without and with the hint above it"
        )
        for tool, number in Counter(tool for tool, *_ in found).most_common(8):
            before, after = np.mean([p for name, *p in found if name == tool], 0)
            print(f"  {tool[:20]:20s} {number:4d} calls   {before:.3f}   {after:.3f}")
    print(f"\n{args.out}/eval.json, effort.png, score.png")


if __name__ == "__main__":
    main(sys.argv[1:])
