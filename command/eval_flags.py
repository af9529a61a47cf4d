"""command/eval_flags.py: the command line of eval.py.

Wrong input is one line and exit code 2, before anything is loaded. It stands apart from eval.py
because nobody who reads how a policy is scored needs to know how a flag is checked.

Left out: flags of train.py. A run is evaluated with the configuration that it was made with.
"""

import os
from functools import partial

from command import flags

usage_error = partial(flags.usage_error, program="eval.py")


def parse_eval_flags(argv, default_levels, most_levels, settings):
    """-> the values of all flags, checked. default_levels: those of the tasks if nothing
    else is asked for, with commas; most_levels: how many there are; settings: of effort"""
    parser = flags.make_parser("eval.py", "Score runs on held-out tasks.")

    def add(name, default, about, kind="int", **limits):
        kind = partial(flags.read_value, kind=kind, rule=flags.Rule(**limits))
        parser.add_argument(f"--{name}", type=kind, default=default, help=about)

    runs = "folders of runs or of single checkpoints; the word demo: a demonstration"
    parser.add_argument("runs", nargs="*", help=runs)

    # Which tasks, and how they are played. At temperature 0 sampling is greedy.
    add("number", 16, "tasks per level", at_least=1)
    levels = f"levels, from 0 to {most_levels - 1}, with commas"
    known = tuple(map(str, range(most_levels)))
    add("levels", default_levels, levels, "str", choices=known, several=True)
    add("bench", 10, "tasks per row of the bench; 0: without it")
    add("passes", 1, "rollouts per task and setting", at_least=1)
    add("turns", 0, "of a rollout (default: those of the run's RL)")
    add("temperature", None, "of sampling (default: that of the run's RL)", "float")
    tasks = "tasks.jsonl of synth_tasks.py --repo instead of generated codebases"
    add("tasks", None, tasks, "str")
    split = "of generated tasks; train: only seeds are new"
    parser.add_argument("--split", choices=("heldout", "train"), default="heldout", help=split)

    effort = "settings that the tasks ask for, with commas (default: those of the run's RL)"
    add("effort", None, effort, "str", choices=settings, several=True)

    # What is reported.
    add("price_in", 0.5, "$ per million tokens", "float")
    add("price_out", 2.5, "$ per million tokens", "float")
    report = "also write report.html: the table, the figures, and episodes token by token"
    parser.add_argument("--report", action="store_true", help=report)
    gap = "also tell which wrong tools a hint would keep the policy from"
    parser.add_argument("--gap", action="store_true", help=gap)
    mismatch = "only: how far the trainer's log-probs lie from the sampler's, in bf16"
    parser.add_argument("--mismatch", action="store_true", help=mismatch)
    parser.add_argument("--out", default="out", type=os.path.expanduser)
    values = parser.parse_args(argv)
    if not values.runs:
        usage_error("which runs? python eval.py RUN [RUN], or python eval.py demo")
    if len(set(values.runs)) < len(values.runs):
        usage_error("each run once: the table has a column for each")
    for name in ("turns", "temperature", "effort", "passes", "report", "gap"):
        if values.mismatch and getattr(values, name) != parser.get_default(name):
            usage_error(f"--{name} does nothing beside --mismatch")
    return values
