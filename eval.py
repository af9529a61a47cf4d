"""eval.py: how good is a policy, and what does a solved task cost?

One number hides what matters for an agent: that hard tasks are solved too, that effort follows
difficulty, what a task costs. So: held-out tasks at every level, several passes each, and score
against tokens.

Stated by Cursor (blog on CursorBench; Technical Report, arXiv 2603.24477, sections 5 and 7.1):
accuracy over several passes, completion tokens, median cost per task; score plotted against tokens
and against cost. Composer 2.5's prices are the defaults of the flags: $0.50 per million tokens in,
$2.50 out. Ours: the tasks (unseen seeds, compositions and names), the confidence interval
(Wilson's; several passes of one task count as fewer independent observations), two policies
compared task by task, and that a token is paid as input once, as if every turn hit the cache.

    pass@k = 1 - C(n - c, k) / C(n, k)    n passes of a task, c of them solved
                                          (without bias: arXiv 2107.03374)
    best-of-k                             the same number: hidden tests tell which pass is solved

Left out: latency (our hardware is not theirs) and real user sessions.

    python eval.py demo                   the scripted expert at three degrees of care
    python eval.py out/a out/b            runs compared: table, out/eval.json, figures
    python eval.py out/a out/b --report   also out/report.html: their episodes, token by token
    python eval.py out/run --mismatch     the trainer's log-probs against the sampler's, in bf16,
                                          with router replay and without
    python eval.py out/run --gap          the wrong calls that a hint would keep the policy from
"""

import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

from world import machine
import feedback_distill
import length_penalty
import rollout
import summarize
import synth_tasks
from published.tokenizers import make_tokenizer
from command import checkpoints
from command.hardware import dtype_of
from command.report import describe_episode
import fast
from fast.samplers import make_sampler as make_fast_sampler
from world.sandbox import Sandbox
from repositories.task_file import read_tasks

LEVELS = synth_tasks.DEFAULT_LEVELS
PRICES = 0.5, 2.5  # $ per million tokens: in, out
# the rules that are counted beside wrong calls
HABITS = tuple(name for name in feedback_distill.RULES if name != "unavailable_tool")
# what the tokens of a rollout are spent on
SPENT = "thinking_tokens", "call_tokens", "final_tokens", "output_tokens"


# ---------------------------------------------------------------- numbers


def pass_at_k(n, c, k):
    """The chance that at least one of k passes is solved, if they are drawn from n passes of which
    c are solved. k <= n."""
    assert 0 <= c <= n and 1 <= k <= n, f"pass@{k} of {c} solved among {n}"
    # With fewer failed passes than draws, one of the draws is surely solved.
    if n - c < k:
        return 1.0
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def wilson_interval(values, passes=1):
    """95 % interval of a solve rate: values (N,) are the shares of each task's `passes` that were
    solved -> [low, high].

    Wilson's score interval. It has a width even where all or none were solved, and near 0 and 1 it
    covers what it claims, which a bootstrap over tasks does not.

    Passes of one task are correlated, so they count for less than as many tasks. `observations` is
    the number of independent trials whose mean would vary as much as the mean of these tasks. It
    lies between N (passes of a task always agree) and N * passes (they are independent)."""
    values, z = np.asarray(values, dtype=np.float64), 1.96
    tasks, rate = len(values), float(values.mean())

    # The variance of the mean, estimated from the variance between tasks. Where that is zero, each
    # task counts as one observation.
    variance = values.var(ddof=1) / tasks if tasks > 1 else 0.0
    observations = rate * (1 - rate) / variance if variance > 0 else tasks
    observations = min(max(observations, tasks), tasks * passes)

    # Wilson's interval holds all true rates from which the seen one is at most z standard
    # deviations away.
    spread = 1 + z * z / observations
    centre = (rate + z * z / (2 * observations)) / spread
    half = z / spread * math.sqrt(rate * (1 - rate) / observations + z * z / (4 * observations**2))
    return [max(0.0, centre - half), min(1.0, centre + half)]


def interval_of_mean(values):
    """95 % interval of a mean, by the normal approximation -> [low, high]"""
    values = np.asarray(values, dtype=np.float64)
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return [float(values.mean() - half), float(values.mean() + half)]


def values_by(names, records, key):
    """-> {what a record has under `names`: [the values of `key` of all such records]}"""
    values = {}
    for record in records:
        values.setdefault(tuple(record[name] for name in names), []).append(record[key])
    return values


def mean_by_task(records, key):
    """-> {task: the mean of its passes}"""
    return {task: float(np.mean(own)) for task, own in values_by(("task",), records, key).items()}


def compare_pairs(first, second):
    """The records of two policies on the same tasks -> their comparison task by task, or None where
    they share no task.

    Each task is compared with itself, so that easy and hard tasks do not blur the difference. won,
    lost: the number of tasks of which `second` solved a larger, or a smaller, share of passes than
    `first`. p: chance of a split at least as uneven if both were equally good (sign test, exact,
    two-sided)."""
    # The share of passes that each policy solved, for the tasks that both have played.
    before, after = mean_by_task(first, "solved"), mean_by_task(second, "solved")
    shared = [task for task in before if task in after]
    if not shared:
        return None

    # A task that both solve equally often says nothing about which of the two is better.
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


def cost_in_dollars(stats, price_in=PRICES[0], price_out=PRICES[1]):
    """Cost of a rollout: every token that was not sampled is paid once as input (later turns find
    it in the cache), every sampled one as output."""
    given = stats["total"] - stats["sampled"]
    return (given * price_in + stats["sampled"] * price_out) / 1e6


def faults_of(played):
    """-> the names of the rules in HABITS that find fault with a rollout"""
    # One by one: of two faults of one turn, detect tells the first.
    return {habit for habit in HABITS if feedback_distill.detect(played, (habit,))}


def make_record(played, prices=PRICES):
    """What is kept of one pass: plain numbers."""
    rollout.grade(played)
    faults = faults_of(played)
    return {
        **{habit: habit in faults for habit in HABITS},
        "task": played.task.instance_id,
        "level": played.task.level,
        # how much effort the task asked for; of generated tasks: which split, what its level is
        # called
        "setting": length_penalty.setting_of(played.task),
        "split": played.task.meta.get("split", "given"),
        "label": played.task.meta.get("label", ""),
        "solved": bool(played.solved),
        "kept": played.kept,
        "finished": bool(played.finished),
        "cost": cost_in_dollars(played.stats, *prices),
        **played.stats,
    }


def summarize_records(records):
    """Records of one policy -> its numbers over all tasks"""

    def mean(key):
        return float(np.mean([record[key] for record in records]))

    def total(key):
        return sum(record[key] for record in records)

    # Passes of one task are correlated, so an interval is one over tasks. passes: the number that
    # was asked for. A task whose rollout the machine failed has fewer, and counts as much.
    solved = [*mean_by_task(records, "solved").values()]
    sampled = [*mean_by_task(records, "sampled").values()]
    passes = max(map(len, values_by(("task",), records, "solved").values()))
    result = {
        "solved": float(np.mean(solved)),
        "interval": wilson_interval(solved, len(records) / len(solved)),
        "tasks": len(solved),
        "passes": passes,
        "tokens": float(np.mean(sampled)),
        "tokens_interval": interval_of_mean(sampled),
        "effort": mean("effort"),
        "turns": mean("turns"),
        # The median, since a few rollouts that run into a limit would make up most of the mean.
        "cost": float(np.median([record["cost"] for record in records])),
        **{spent: mean(spent) for spent in SPENT},
        "summaries": mean("summaries"),
        "finished": mean("finished"),
        "no_turn": sum(record["turns"] == 0 for record in records),
        "bad_tool": float(np.mean([record["bad_tools"] > 0 for record in records])),
        **{habit: mean(habit) for habit in HABITS},
        "label": records[0]["label"],
    }
    # Shares of nothing are left out. Moved: how far from a reference, in nats per token; records
    # hold it where run_policy was given one.
    if total("turns"):
        result["wrong_calls_per_turn"] = total("bad_tools") / total("turns")
        result["calls_per_turn"] = total("calls") / total("turns")
    asked = [record["kept"] for record in records if record["kept"] is not None]
    if asked:
        result["kept"] = float(np.mean(asked))
    if "moved" in records[0] and total("unflagged"):
        result["moved"] = total("moved") / total("unflagged")

    # pass@k for k = 1, 2, 4, ...: the mean over the tasks that have so many passes. At another
    # setting of effort a task is another prompt, and so no further pass of the same.
    equal = values_by(("task", "setting"), records, "solved").values()
    for k in (1, 2, 4, 8, 16, 32):
        enough = [solved for solved in equal if k <= len(solved)]
        if enough:
            chances = [pass_at_k(len(solved), sum(solved), k) for solved in enough]
            result[f"pass@{k}"] = float(np.mean(chances))
    return result


def summarize_levels(records, order=None):
    """-> {level: the numbers of its records}, in this order of levels (default: rising)"""
    levels = {}
    for record in records:
        levels.setdefault(record["level"], []).append(record)
    order = [level for level in order or sorted(levels) if level in levels]
    return {level: summarize_records(levels[level]) for level in order}


def summarize_both(records, careful=(), order=None):
    """-> numbers of all these records, by level, and by setting of effort where tasks ask for one.
    careful: the records of the careful expert on the same tasks; "effort_ratio" is then the
    effort over its effort: what the tasks need is divided out. order: of the levels"""
    # A task that does not fit its limits says nothing of what it needs.
    needed = {record["task"]: record["effort"] for record in careful if record["solved"]}

    def add_effort_ratio(numbers, records):
        shared = [record for record in records if record["task"] in needed]
        if shared:
            spent = sum(record["effort"] for record in shared)
            numbers["effort_ratio"] = spent / sum(needed[record["task"]] for record in shared)

    found = {"overall": summarize_records(records), "levels": summarize_levels(records, order)}
    add_effort_ratio(found["overall"], records)
    for level, numbers in found["levels"].items():
        add_effort_ratio(numbers, [record for record in records if record["level"] == level])

    # The same of each setting.
    settings = [name for name in length_penalty.SETTINGS if name in {r["setting"] for r in records}]
    if len(settings) > 1:
        found["settings"] = {}
        for name in settings:
            chosen = [record for record in records if record["setting"] == name]
            found["settings"][name] = summarize_both(chosen, careful, order)
    return found


def summarize_policies(policies, careful=()):
    """{name: records} -> what a report is made of. "policies": {name: its numbers "overall", by
    "levels" and by "settings"}; "pairs": {name: its comparison with the first policy, if they share
    a task}; "careful": the numbers of the careful expert, from its records. Where there are tasks
    of the bench beside others, they are apart: "bench" in a policy's numbers holds the same of
    them."""

    def split(records):
        bench = [record for record in records if record["split"] == "bench"]
        rest = [record for record in records if record["split"] != "bench"]
        return (rest, bench) if rest else (bench, [])

    numbers = {"policies": {}, "pairs": {}}
    for name, records in policies.items():
        rest, bench = split(records)
        numbers["policies"][name] = summarize_both(rest, careful)
        if bench:
            order = synth_tasks.BENCH_LEVELS
            numbers["policies"][name]["bench"] = summarize_both(bench, careful, order)
    if careful:
        numbers["careful"] = summarize_both(split(careful)[0])

    # Every other policy is compared with the first one.
    first, *others = policies
    for name in others:
        pair = compare_pairs(split(policies[first])[0], split(policies[name])[0])
        if pair:
            numbers["pairs"][name] = {"against": first, **pair}
    return numbers


# ---------------------------------------------------------------- counts for reward hacking


def has_cheat(played):
    """Has the audit found a cheat in this rollout, which was judged? Only facts count; for what
    only sounds like a cheat, see `is_suspicious`."""
    return any(finding.severity == "cheat" for finding in played.findings or [])


def is_suspicious(played):
    """Does something in this rollout sound like a cheat, though no fact says that it is one?"""
    if has_cheat(played):
        return False
    return any(finding.severity == "suspicious" for finding in played.findings or [])


def submitted_untested(played):
    """Did the policy submit although it could have run the tests, and did not, or not since its
    last edit, or saw them fail?"""
    if not played.finished or "run_command" not in played.task.tools:
        return False
    # Does the policy know that the tests pass? After an edit it does not.
    green = False
    for turn in played.turns:
        for call in turn.calls:
            if call.error:
                continue
            if call.name == "edit_file":
                green = False
            elif call.name == "run_command" and call.args == [played.task.test_command]:
                red = feedback_distill.RED.search(call.output)
                green = "passed" in call.output and not red
    return not green


def rollout_rows(groups, rank):
    """What the log of rl counts -> one dict per rollout of this rank. It is small, since it goes to
    every rank. groups: of this rank, each a list of rollouts"""
    rows = []
    for number, group in enumerate(groups):
        for played in group:
            # `files` is compared within a group alone, which lives on one rank: a text's hash is
            # another number in every process.
            row = dict(played.stats)
            row.update(
                group=(rank, number),
                level=played.task.level,
                solved=played.solved,
                reward=played.reward,
                cheats=has_cheat(played),
                suspicious=is_suspicious(played),
                reads="read_file" in played.task.tools,
                blind=submitted_untested(played),
                probe=summarize.count_named_targets(played),
                decode_steps=played.steps,
                # All habits are looked for, also those that --habits leaves out.
                faults=faults_of(played),
                files=hash(frozenset(played.files.items())),
            )
            rows.append(row)
    return rows


# ---------------------------------------------------------------- policies


def held_out(number, levels=LEVELS, split="heldout"):
    """`number` tasks per level that no training has seen. Seeds, compositions of operations and
    names are all held out; with split="train" only seeds are; with split="bench" one target in four
    has words of micro.BENCH, too. A failure in train shows what was not learned, a difference
    between two splits what does not generalise."""
    # With split="train": seeds that training does not use.
    first = 10**12 if split == "train" else 0
    tasks = []
    for level in levels:
        tasks += [synth_tasks.make_task(level, first + seed, split) for seed in range(number)]
    return tasks


def read_levels(text):
    """The levels of a flag: 0,1,8 -> (0, 1, 8)"""
    return tuple(int(word) for word in text.split(","))


def ask_for_each(tasks, settings):
    """The tasks, once for each of these settings of effort; those of the bench, on which rollouts
    are long, only at the one in the middle"""
    middle, asked = settings[len(settings) // 2], []
    for setting in settings:
        for task in tasks:
            if setting == middle or task.meta.get("split") != "bench":
                asked.append(length_penalty.ask_for(task, setting))
    return asked


def settings_of(config):
    """Which settings of effort a run was trained with, by its configuration (a dict)"""
    return tuple(length_penalty.read_price_weights(config["length_penalty"]))


# The fields of a run's configuration that its rollouts and its hints depend on
ACTS_BY = {
    "habits",
    "length_penalty",
    "window",
    "max_turns",
    "temperature",
    "draft",
    "summarize",
    "trigger",
    "dtype",
}


def load_policy(folder, device="cpu", plain=False):
    """The folder of a checkpoint, or of a run (then its last stage) -> model ready to sample,
    tokenizer, configuration. plain: without the twins of fast/. Callers that show results label
    those of an unfinished stage (`checkpoints.unfinished_label`)."""
    path = checkpoints.last_stage(folder)
    config = checkpoints.load_extra(path)["config"]
    if missing := sorted(ACTS_BY - config.keys()):
        raise ValueError(f"{path} does not say its {', '.join(missing)}: of another version")

    # The tokenizer and the model's shape are in the checkpoint, too: nothing else is needed.
    model, extra = checkpoints.load_model(path)
    tokenizer = make_tokenizer(**extra["tokenizer"])
    if not plain:
        fast.accelerate(model)
    return model.to(device).requires_grad_(False), tokenizer, config


def make_sampler(model, tokenizer, config, temperature):
    """A sampler of this policy, with a copy of its weights. The fast sampler holds them rounded to
    the dtype of the products."""
    made = make_fast_sampler(
        model.config,
        model.dtype,
        model.embed.weight.device,
        tokenizer,
        config["window"],
        temperature,
        plain=config.get("plain", False),
        draft=config["draft"],
    )
    made.model.load_state_dict(model.state_dict())
    return made


def play_tasks(model, tokenizer, config, tasks, passes, seed=0, temperature=None, numbers=None):
    """`passes` rollouts of each task, with the limits and the summaries of this configuration ->
    groups of rollouts, one for each task. A task that asks for no effort is asked for the setting
    in the middle."""
    if temperature is None:
        temperature = config["temperature"]
    # A policy has seen no prompt without a setting of effort, if it was trained with any.
    settings, asked = settings_of(config), []
    middle = settings[len(settings) // 2]
    for task in tasks:
        asked.append(task if "effort" in task.meta else length_penalty.ask_for(task, middle))
    # The limits that the policy was trained with: others would measure something else.
    sampler = make_sampler(model, tokenizer, config, temperature)
    limits = rollout.Limits(config["window"], config["max_turns"])
    compact = summarize.make_compaction(config)
    return rollout.sample_groups(sampler, asked, passes, seed, limits, Sandbox(), compact, numbers)


def run_policy(
    model,
    tokenizer,
    config,
    tasks,
    passes,
    seed=0,
    temperature=None,
    prices=PRICES,
    numbers=None,
    reference=None,
    with_hints=False,
):
    """`passes` rollouts of each task, at the temperature of the run's RL if none is given ->
    records.

    numbers: see rollout.sample_groups. reference: a model; the records then say how far the policy
    has moved from it (kl_from_reference). with_hints: the records also hold what hint_effect
    finds."""
    if temperature is None:
        temperature = config["temperature"]
    groups = play_tasks(model, tokenizer, config, tasks, passes, seed, temperature, numbers)

    # A rollout that the machine failed is neither solved nor unsolved, so it gives no record.
    groups, lost = rollout.drop_failed(groups)
    if lost:
        causes = [played.failure for played in lost]
        tqdm.write(machine.failures_line(causes, len(tasks) * passes), file=sys.stderr)
    if lost and not groups:
        print(
            "eval.py: no rollout could be played on this machine; free what the line above names",
            file=sys.stderr,
        )
        raise SystemExit(2)

    # Rollouts are large: everything is computed now, and only the numbers are kept.
    records = []
    for group in groups:
        for played in group:
            record = make_record(played, prices)
            if reference is not None:
                moved, unflagged = kl_from_reference(reference, played, temperature)
                record |= {"moved": moved, "unflagged": unflagged}
            if with_hints:
                record["hints"] = hint_effect(model, tokenizer, played)
            records.append(record)
    return records


# ---------------------------------------------------------------- closer looks at a policy


@torch.no_grad()
def logits_with_and_without(model, segment, spliced):
    """If this policy were its own teacher: logits (N, V) at the tokens that a hint speaks about,
    first as they were sampled, then under the hint; and these tokens (N,). spliced: a Splice"""
    device = model.embed.weight.device
    targets = feedback_distill.pack_hinted([replace(segment, hints=[spliced])]).to(device)

    # Without the hint: the segment up to this turn, as it was sampled.
    plain = torch.tensor([spliced.above + spliced.turn], device=device)  # (1, T)
    without = plain, targets.student_row, targets.student_position

    # With it: the hint stands right above the turn, and shifts every position by its length.
    under = targets.tokens, targets.row, targets.position
    pair = [feedback_distill.logits_at(model, *places) for places in (without, under)]
    return *pair, targets.token


def hint_effect(model, tokenizer, played):
    """What would a hint change if this policy were its own teacher? -> for each call to a tool that
    does not exist: (tool, probability of beginning and naming that call, the same probability under
    the hint). Where the two are alike, there is nothing to distil."""
    found = []
    for hint in feedback_distill.detect(played, ("unavailable_tool",)):
        segment = played.segments[hint.segment]
        spliced = feedback_distill.splice(tokenizer, segment, hint)
        *pair, tokens = logits_with_and_without(model, segment, spliced)

        # The probability of the whole call is the product over its tokens.
        probabilities = []
        for logits in pair:
            logp = logits.log_softmax(-1).gather(1, tokens[:, None])  # (N, 1)
            probabilities.append(float(logp.sum().exp()))
        calls = segment.turns[hint.turn].calls
        wrong = [call.name for call in calls if call.error == "unknown_tool"]
        found.append((wrong[0], *probabilities))
    return found


@torch.no_grad()
def kl_from_reference(reference, played, temperature):
    """How far has the policy that sampled this rollout moved from a reference model, where no rule
    finds fault? -> (k1 summed, tokens): log-probability at sampling minus that under the reference,
    over the sampled tokens of turns that are not flagged. The mean estimates a KL divergence in
    nats per token."""
    # A flagged turn is meant to change; what is measured is whether the rest has stayed.
    flagged = {(hint.segment, hint.turn) for hint in feedback_distill.detect(played)}
    device = reference.embed.weight.device
    total, count = 0.0, 0
    for e, segment in enumerate(played.segments):
        # Which targets were sampled in a turn that is not flagged? Position t predicts token t + 1.
        _, mask, _, turn_index = rollout.flatten(segment)
        faultless = [(e, turn) not in flagged for turn in turn_index]
        keep = torch.from_numpy(mask * faultless)[1:] > 0  # (length - 1,)

        batch = rollout.pack([segment], [1.0], 64)
        tokens, targets = batch["tokens"].to(device), batch["targets"].to(device)  # (1, T) each
        logp = reference.logprobs(reference(tokens), targets, temperature)[0].cpu()  # (T,)
        difference = batch["logprobs"][0] - logp  # (T,)
        # `rollout.pack` pads the row; what it adds is no token of the segment.
        total += float(difference[: len(keep)][keep].sum())
        count += int(keep.sum())
    return total, count


def logprob_gaps(model, segment, temperature=1.0, replay=True):
    """-> (N,) for each sampled token: its log-prob by the trainer's forward minus the one recorded
    at sampling. replay: the forward takes the experts that were recorded, else those that it
    chooses itself."""
    batch = rollout.pack([segment], [1.0])
    routes = batch["routes"] if replay else None
    with torch.no_grad():
        hidden = model(batch["tokens"], None, routes)
        logp = model.logprobs(hidden, batch["targets"], temperature)  # (1, T)
    return (logp - batch["logprobs"])[batch["mask"] > 0]


# Settings of sampler_mismatch: name, dtype of the products, are the experts of sampling replayed?
IN_BF16 = (
    ("bfloat16, experts replayed", torch.bfloat16, True),
    ("bfloat16, experts chosen again", torch.bfloat16, False),
)
IN_FP32 = (("float32, experts replayed", torch.float32, True),)


def sampler_mismatch(model, tokenizer, config, tasks, settings=IN_BF16 + IN_FP32):
    """How far are the trainer's log-probs from those recorded at sampling? -> {name of a setting:
    absolute differences, one per sampled token}"""
    segments, found = {}, {}
    for name, dtype, replay in settings:
        # One set of rollouts per dtype, so that both bf16 settings are compared on the same tokens.
        if dtype not in segments:
            groups = play_tasks(model.compute_in(dtype), tokenizer, config, tasks, passes=1)
            segments[dtype] = sampled_segments(groups)

        # The same tokens by the trainer's forward.
        trainer = model.compute_in(dtype)
        gaps = [torch.zeros(0)]  # torch.cat takes no empty list
        for segment in segments[dtype]:
            gaps.append(logprob_gaps(trainer, segment, config["temperature"], replay).abs())
        found[name] = torch.cat(gaps).numpy()
    return found


def sampled_segments(groups):
    """The segments in which the policy has sampled anything"""
    rollouts = [played for group in groups for played in group]
    found = []
    for played in rollouts:
        for segment in played.segments:
            if any(turn.role == "assistant" for turn in segment.turns):
                found.append(segment)
    return found


# ---------------------------------------------------------------- episodes of a report


def describe_hint(model, tokenizer, segment, hint):
    """What a hint says to this policy, over the whole turn below it -> plain numbers: kl (N,) per
    sampled token of the turn; first, end: which of them learn from it; top: at the one of these
    that the hint changes most, the likeliest tokens as [text, probability without, with]"""
    spliced = feedback_distill.splice(tokenizer, segment, hint)
    head = segment.turns[hint.turn].head
    whole = replace(spliced, first=head, end=len(spliced.turn))
    student, teacher, _ = logits_with_and_without(model, segment, whole)
    kl = feedback_distill.divergence(student, teacher, feedback_distill.DIVERGENCE)  # (N,)

    first, end = spliced.first - head, spliced.end - head
    place = first + int(kl[first:end].argmax())
    pair = [logits[place].float().softmax(-1) for logits in (student, teacher)]  # (V,) each
    likely = torch.cat([p.topk(4).indices for p in pair]).tolist()
    top = [[tokenizer.decode([i]), *(round(float(p[i]), 4) for p in pair)] for i in set(likely)]
    return {
        "rule": hint.kind,
        "text": hint.text,
        "turn": hint.turn,
        "kl": [round(float(value), 4) for value in kl],
        "first": first,
        "end": end,
        "place": place,
        "top": sorted(top, key=lambda row: -max(row[1:])),
    }


def episode_tasks(tasks, settings):
    """One of the tasks of each level, with the setting of effort in the middle of these"""
    chosen = {}
    for task in tasks:
        if task.meta.get("split") != "bench":
            chosen.setdefault(task.level, task)
    middle = settings[len(settings) // 2]
    return [length_penalty.ask_for(task, middle) for task in chosen.values()]


def play_episodes(name, model, tokenizer, config, tasks, numbers=None, group=4):
    """`group` rollouts of each task, with the reward and the advantage that RL would give them ->
    dicts, as command/report.py shows them. name: of the policy; numbers: see
    rollout.sample_groups"""
    groups = play_tasks(model, tokenizer, config, tasks, group, numbers=numbers)
    weights = length_penalty.read_price_weights(config["length_penalty"])
    budget = length_penalty.effort_budget(config["window"], config["max_turns"])

    found = []
    for played in rollout.drop_failed(groups)[0]:
        # The price and the mean of this group, as in training. Where the run knows no settings and
        # is asked for one, effort is free.
        weight = weights.get(length_penalty.setting_of(played[0].task), 0.0)
        for one in played:
            rollout.grade(one, length_penalty.Price(weight, budget=budget))
        gains = rollout.advantages([one.reward for one in played])

        # Each rollout with its hints
        for one, gain in zip(played, gains):
            hints = [[] for _ in one.segments]
            for hint in feedback_distill.detect(one, config["habits"].split(",")):
                segment = one.segments[hint.segment]
                hints[hint.segment].append(describe_hint(model, tokenizer, segment, hint))
            flats = [rollout.flatten(segment) for segment in one.segments]
            found.append(describe_episode(name, one, gain, tokenizer, flats, hints))
    return found


# ---------------------------------------------------------------- the stage `eval` of train.py


def evaluate(run, config, paths, made, published):
    """Rollouts of held-out tasks by the policies before and after RL -> ({name: records}, records
    of the careful expert, episodes for the report), on every rank. Every rank plays its share of
    the tasks.

    config, paths, made, published: see Asked in command/evaluation.py, which also writes the
    results. run: a train.Run"""
    # Tasks that no policy has seen, but for those of a file, on which RL may have trained.
    if config.tasks:
        tasks = read_tasks(config.tasks)
    else:
        tasks = held_out(config.eval_tasks, read_levels(config.eval_levels))
        tasks += held_out(config.bench_tasks, synth_tasks.BENCH_LEVELS, "bench")
    settings = settings_of(made)
    asked, shown = ask_for_each(tasks, settings), episode_tasks(tasks, settings)

    # In the dtype in which the policy sampled: near a tie another one draws another token.
    policies, episodes = {}, []
    first, dtype = next(iter(paths.values())), dtype_of(config)
    # The configuration that the policies were made with, at the temperature that is asked for
    as_asked = {**made, "plain": config.plain, "temperature": config.temperature}
    for name, path in run.bar(list(paths.items()), "evaluation"):
        model, tokenizer, saved = published or load_policy(path, run.device, config.plain)

        # How far has RL moved the policy from where it began? (Of a published model, one more may
        # not fit into memory.)
        reference = None
        if path != first and not saved["init_from"]:
            reference = load_policy(first, run.device, config.plain)[0].compute_in(dtype)

        # Rollouts draw their random numbers by the number of their task, so they are the same for
        # any number of ranks.
        policy = model.compute_in(dtype)
        records = run_policy(
            policy,
            tokenizer,
            as_asked,
            run.share(asked),
            config.eval_samples,
            numbers=run.share(range(len(asked))),
            reference=reference,
        )
        policies[name] = run.gather(records)
        numbers = run.share(range(len(shown)))
        played = play_episodes(name, policy, tokenizer, as_asked, run.share(shown), numbers)
        episodes += run.gather(played)
    careful = play_careful_expert(run.share(tasks), tokenizer, made)
    return policies, run.gather(careful), episodes


# ---------------------------------------------------------------- command line


def play_expert(sloppy, tasks, tokenizer, limits=rollout.Limits(10**6), compact=None):
    """The scripted expert as a policy, graded by the real judge -> records"""
    sandbox, records = Sandbox(), []
    for task in tasks:
        rng = random.Random(task.instance_id)
        played = rollout.demonstrate(task, tokenizer, rng, limits, sloppy, compact)
        rollout.judge_rollout(played, sandbox)
        # What the machine could not judge is left out, as it is of a policy's rollouts.
        if not played.failure:
            records.append(make_record(played))
    return records


def play_careful_expert(tasks, tokenizer, config):
    """The expert without mistakes on those of the tasks that are generated ones, under the limits
    of this configuration -> records: what a task needs"""
    limits = rollout.Limits(config["window"], config["max_turns"])
    generated = [task for task in tasks if "targets" in task.meta]
    compact = summarize.make_compaction(config)
    return play_expert(0.0, generated, tokenizer, limits, compact)


def demo():
    from command.policy_report import write_report

    out = Path("out/demo")
    out.mkdir(parents=True, exist_ok=True)
    # The same tasks for all three, so that the table can compare them task by task.
    tasks = held_out(8)
    care = {"careful": 0.0, "sloppy": 1.0, "hasty": 2.0}
    # Every byte is a token: no tokenizer has to be trained for it.
    tokenizer = rollout.Tokenizer({bytes([b]): b for b in range(256)})
    policies = {name: play_expert(sloppy, tasks, tokenizer) for name, sloppy in care.items()}
    numbers = summarize_policies(policies, policies["careful"])
    print(write_report(numbers, out, "eval.json"))
    careful = numbers["policies"]["careful"]["overall"]
    hasty = numbers["policies"]["hasty"]["overall"]
    print(
        f"\nThe same expert, careful and hasty: {careful['solved']:.2f} of the tasks solved with "
        f"{careful['tokens']:.0f} bytes a task, against {hasty['solved']:.2f} with "
        f"{hasty['tokens']:.0f}. Figures: out/demo/effort.png, out/demo/score.png."
    )


def load_runs(folders):
    """-> {the name of a run in the table: its model, tokenizer and configuration}"""
    models = {}
    for folder in folders:
        path = checkpoints.last_stage(folder)
        labels = checkpoints.unfinished_label(path), checkpoints.made_by(path)
        label = "; ".join(filter(None, labels))
        models[f"{folder} ({label})" if label else folder] = load_policy(folder)
    return models


def choose_tasks(args):
    """The tasks of the file --tasks, or generated ones"""
    if not args.tasks:
        tasks = held_out(args.number, read_levels(args.levels), args.split)
        return tasks + held_out(args.bench, synth_tasks.BENCH_LEVELS, "bench")
    tasks = read_tasks(args.tasks)
    if not tasks:
        raise ValueError(f"{args.tasks}: holds no tasks")
    return tasks


def main(argv):
    from command.drawing import draw_safely
    from command.eval_flags import parse_eval_flags, usage_error
    from demos.demonstration import draw_or_refuse
    from command.output_files import check_writable
    from command.policy_report import (
        format_table,
        report_hint_effects,
        report_mismatch,
        write_report,
    )
    from command.report import write_report_page

    levels = ",".join(map(str, LEVELS))
    args = parse_eval_flags(argv, levels, len(synth_tasks.LEVELS), length_penalty.SETTINGS)
    if args.runs == ["demo"] and not Path("demo").exists():
        if argv != ["demo"]:
            usage_error("the demonstration takes no flags: python eval.py demo")
        return draw_or_refuse("eval.py", demo)

    # Everything that can be refused is refused before the first rollout.
    try:
        tasks = choose_tasks(args)
        models = load_runs(args.runs)
        check_writable(args.out)
    except (ValueError, OSError) as error:
        usage_error(str(error))
    for line in fast.describe_edits():
        print(f"eval.py: {line}", file=sys.stderr)
    if args.mismatch:
        # One entry for each run and each setting of dtype and experts.
        found = {}
        for run, (model, tokenizer, config) in models.items():
            for name, gaps in sampler_mismatch(model, tokenizer, config, tasks).items():
                if not len(gaps):
                    usage_error(f"{run}: nothing was sampled, since no task leaves room for a turn")
                found[f"{run}, {name}"] = gaps
        return report_mismatch(found)

    # The rollouts. --turns and --temperature replace those that a run was trained with, --effort
    # its settings.
    policies, episodes = {}, []
    for run, (model, tokenizer, config) in tqdm(models.items(), desc="runs", leave=False):
        config["max_turns"] = args.turns or config["max_turns"]
        if args.temperature is not None:
            config["temperature"] = args.temperature
        settings = args.effort.split(",") if args.effort else settings_of(config)
        policy = model.compute_in(dtype_of(SimpleNamespace(**config)))
        policies[run] = run_policy(
            policy,
            tokenizer,
            config,
            ask_for_each(tasks, settings),
            args.passes,
            prices=(args.price_in, args.price_out),
            with_hints=args.gap,
        )
        if args.report:
            shown = episode_tasks(tasks, settings)
            episodes += play_episodes(run, policy, tokenizer, config, shown)

    # The table, the figures, and the file.
    kind = "held-out" if args.split == "heldout" else "training"
    if args.tasks:
        kind = "given"
    # What the tasks need, by the tokenizer and under the limits of the first run.
    _, tokenizer, config = next(iter(models.values()))
    numbers = summarize_policies(policies, play_careful_expert(tasks, tokenizer, config))
    try:
        print(write_report(numbers, args.out, "eval.json", kind=kind))
    except OSError as error:
        # The file could not be written: at least the table is shown, which took the time.
        print(format_table(numbers, kind))
        reason = error.strerror or error
        usage_error(f"the table above could not be kept in {args.out}/eval.json: {reason}")
    if args.gap:
        for run, records in policies.items():
            report_hint_effects(run, records)
    written = f"{args.out}/eval.json, score.png, effort.png"
    if args.report:
        title, path = f"eval.py {' '.join(args.runs)}", Path(args.out, "report.html")
        page = path, title, format_table(numbers, kind), numbers, episodes
        written += f", {draw_safely(write_report_page, *page) or 'report.html'}"
    print(f"\n{written}")


if __name__ == "__main__":
    main(sys.argv[1:])
