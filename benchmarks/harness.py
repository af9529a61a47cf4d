"""benchmarks/harness.py: what the benchmarks share: a command line that refuses wrong flags in one
line, clocks that are fair on a busy machine, and the table at the end.

Two things that are compared are measured in turns: a machine that is busy for a second is then busy
for both. A ratio of two numbers of one run says more than either number, since the machines differ.
Left out: confidence intervals. Run a benchmark more than once before you believe its second digit.
"""

import argparse
import functools
import time

import torch

from command.flags import usage_error


def make_parser(module, description):
    """-> an argparse parser for `python -m benchmarks.<module>`. A wrong flag is one line on stderr
    and exit code 2."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    parser.error = functools.partial(usage_error, program=f"benchmarks.{module}")
    return parser


def median_seconds(*calls, repeat=5):
    """Median wall time of each call, measured in turns after a round that warms up."""
    times = [[] for _ in calls]
    for _ in range(repeat + 1):
        for call, times_of_call in zip(calls, times):
            start = time.perf_counter()
            call()
            # A GPU has only been given its work when a call returns.
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times_of_call.append(time.perf_counter() - start)
    return [sorted(times_of_call[1:])[repeat // 2] for times_of_call in times]


def least_seconds(candidates, rounds, budget=5.0):
    """{name: function} -> {name: least seconds}. They take turns. One that has used its budget of
    seconds stops."""
    times = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            if sum(times[name]) < budget:
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    # The first round warms up, if there is a second one.
    return {name: min(found[1:] or found) for name, found in times.items()}


def print_table(title, columns, rows):
    """A table with its columns aligned: text to the left, numbers (given as text) to the right.
    columns: the headings; rows: a list of texts for each line."""
    widths = []
    for i, heading in enumerate(columns):
        widths.append(max([len(heading)] + [len(row[i]) for row in rows]))
    print(f"\n{title}" if title else "")
    for row in [columns, *rows]:
        first, *numbers = row
        cells = [first.ljust(widths[0])]
        for text, width in zip(numbers, widths[1:]):
            cells.append(text.rjust(width))
        print("  ".join(cells).rstrip(), flush=True)
