"""command/eval_flags.py: the command line of eval.py, and what it refuses.

Wrong input is one line and exit code 2, before anything is loaded. It stands apart from eval.py
because nobody who reads how a policy is scored needs to know how a flag is checked.

Left out: flags of train.py. A run is evaluated with the configuration that it was made with.
"""

import argparse
import functools
import math
import os
from pathlib import Path

from command import flags

usage_error = functools.partial(flags.usage_error, program="eval.py")


def make_eval_parser(default_levels, most_levels):
    """default_levels: those of the tasks if nothing else is asked for; most_levels: how many there
    are"""
    parser = argparse.ArgumentParser(
        description="Score runs on held-out tasks.", allow_abbrev=False
    )
    parser.error = usage_error
    add = parser.add_argument
    runs = "folders of runs or of single checkpoints; the word demo: a demonstration"
    add("runs", nargs="*", help=runs)

    # Which tasks, and how they are played.
    add("--number", type=int, default=24, help="tasks per level")
    levels = f"levels, from 0 to {most_levels - 1}, with commas"
    add("--levels", default=",".join(map(str, default_levels)), help=levels)
    bench = "tasks per row of the bench; 0: without it"
    add("--bench", type=int, default=0, help=bench)
    add("--passes", type=int, default=2)
    turns = "of a rollout (default: those of the run's RL)"
    add("--turns", type=int, default=0, help=turns)
    temperature = "of sampling (default: that of the run's RL)"
    add("--temperature", type=float, default=None, help=temperature)
    tasks = "tasks.jsonl of synth_tasks.py --repo instead of generated codebases"
    add("--tasks", default="", type=os.path.expanduser, help=tasks)
    split = "of generated tasks; train: only seeds are new"
    add("--split", choices=("heldout", "train", "bench"), default="heldout", help=split)

    # What is reported.
    add("--price_in", type=float, default=0.5, help="$ per million tokens")
    add("--price_out", type=float, default=2.5)
    gap = "also tell which wrong tools a hint would keep the policy from"
    add("--gap", action="store_true", help=gap)
    mismatch = "only: how far the trainer's log-probs lie from the sampler's, in bf16"
    add("--mismatch", action="store_true", help=mismatch)
    add("--out", default="out", type=os.path.expanduser)
    return parser


def parse_eval_flags(argv, default_levels, most_levels):
    """-> the values of all flags, checked"""
    args, others = make_eval_parser(default_levels, most_levels).parse_known_args(argv)
    if others:
        usage_error(f"unknown flag {others[0]!r}")
    check_eval_flags(args, most_levels)
    return args


def check_eval_flags(args, most_levels):
    """Refuses a run that is named twice, numbers out of their range, and a command without runs"""
    # Two spellings of one folder are one run: it would be compared with itself.
    folders = [Path(run).resolve() for run in args.runs]
    for run, folder in zip(args.runs, folders):
        if folders.count(folder) > 1:
            usage_error(f"{run} is named more than once: each run once")

    # --temperature=0 samples greedily; without the flag it is None.
    if min(args.number, args.passes) < 1 or min(args.turns, args.bench) < 0:
        usage_error("--number and --passes must be at least 1, --turns and --bench at least 0")
    known = [str(level) for level in range(most_levels)]
    if not set(args.levels.split(",")) <= set(known):
        usage_error(f"--levels takes numbers from 0 to {known[-1]}, with commas")
    for name in ("temperature", "price_in", "price_out"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            usage_error(f"--{name} must be a number from 0 on")

    if not args.runs:
        usage_error(
            "which runs? Name their folders: python eval.py out/run (python eval.py demo is a "
            "demonstration)"
        )
