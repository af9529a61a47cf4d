"""benchmarks/harness.py: what the benchmarks share: a command line that refuses wrong flags in one
line, a clock that is fair on a busy machine, and the tables at the end.

Two things that are compared are measured in turns: a machine that is busy for a second is then busy
for both. A ratio of two numbers of one run says more than either number, since the machines differ.
Left out: confidence intervals. Run a benchmark more than once before you believe its second digit.
"""

import argparse
import math
import statistics
import time
from pathlib import Path

import torch

from command import flags
from command.policy_report import align_columns

ROOT = Path(__file__).resolve().parent.parent


# ---------------------------------------------------------------- the command line


def make_parser(module, description):
    """-> the parser of `python -m benchmarks.<module>`"""
    keep_lines = argparse.RawDescriptionHelpFormatter
    return flags.make_parser(f"benchmarks.{module}", description, formatter_class=keep_lines)


def read_quick(module, description, argv):
    """-> whether --quick was given. It is the only flag of most benchmarks."""
    parser = make_parser(module, description)
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    return parser.parse_args(argv).quick


# ---------------------------------------------------------------- the clock


def time_call(call, clock=time.perf_counter):
    """Seconds of one call, including the time until a GPU has finished the work of the call"""
    start = clock()
    call()
    # CUDA calls are asynchronous: when one returns, the GPU has received its work, not done it.
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


def measure_seconds(
    calls, rounds, pick=statistics.median, budget=math.inf, clock=time.perf_counter
):
    """{name: function} -> {name: seconds}, measured in turns after a round that warms up. pick: how
    one number is made of all rounds: min where every round does the same work, the median where the
    work differs. A call that has used its budget of seconds is not called again."""
    # The calls take turns, so that a busy moment of the machine slows all of them alike.
    times = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            if sum(times[name]) < budget:
                times[name].append(time_call(call, clock))

    # The first round is the warm-up and is dropped, unless it used the whole budget and is alone.
    return {name: pick(found[1:] or found) for name, found in times.items()}


# ---------------------------------------------------------------- tables


def print_table(title, columns, rows):
    """columns: the headings; rows: one list of texts for each line of the table"""
    print("", title, *align_columns([columns, *rows]), sep="\n", flush=True)


def print_speeds(title, seconds, base, amount=1, unit="calls"):
    """Prints a table of {name: seconds for `amount` units}. Its last column is the speed as a
    multiple of the speed of `base`: 2.00 is twice as fast."""
    rows = []
    for name, t in seconds.items():
        ratio = seconds[base] / t
        rows.append([name, f"{1e3 * t:,.2f}", f"{amount / t:,.0f}", f"{ratio:.2f}"])
    print_table(title, ["", "ms", f"{unit}/s", f"x {base}"], rows)
