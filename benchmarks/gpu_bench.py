"""benchmarks/gpu_bench.py: the process of one part of benchmarks/gpu.py, and what all parts
share.

A part appends its rows to a file as soon as it has them. A row belongs to a table and may have
any columns; a row with `holds` is a check. A measurement that fails leaves its traceback as a
row, and the next one goes on.
"""

import gc
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.harness import ROOT, measure_seconds
from command.output_files import to_json

PRODUCT = "bf16 product, TFLOP/s"
COPY = "copy, bytes read and written, TB/s"


class Bench:
    """What the functions of a part get: the device, the time left, the measured ceilings, and where
    their rows go. tiny: on a CPU all sizes are small, and the run only shows that it works."""

    def __init__(self, asked):
        self.device, self.tiny = asked.device, asked.device == "cpu"
        self.rows, self.scratch = Path(asked.rows), Path(asked.scratch)
        self.deadline = time.monotonic() + asked.seconds
        self.peak_flops, self.bandwidth = read_ceilings(asked.report)

    def emit(self, table, **columns):
        """Appends one row to the file of the part"""
        # The file is closed after every row, so a part that is killed loses none. A share of a
        # ceiling that was not measured is NaN, and becomes null.
        with open(self.rows, "a", encoding="utf-8") as file:
            file.write(to_json({"table": table, **columns}) + "\n")

    def attempt(self, table, what, measure):
        """Emits a row with the columns that measure() returns. If it raises, the row holds the
        traceback instead and counts as a failed check; the part goes on."""
        try:
            self.emit(table, what=what, **measure())
        except Exception as error:
            self.emit(
                table,
                what=what,
                found=type(error).__name__,
                holds=False,
                traceback=traceback.format_exc(),
            )

        # Free what this measurement held, so that the next one has the whole memory of the card.
        if self.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def check(self, table, what, limit, measure):
        """Emits a row that says whether the number measure() returns is at most `limit`. A NaN does
        not hold."""

        def compare():
            found = float(measure())
            return {"found": found, "limit": limit, "holds": found <= limit}

        self.attempt(table, what, compare)

    def seconds_left(self):
        return self.deadline - time.monotonic()

    def time(self, calls, rounds=10):
        """{name: call} -> {name: median seconds}, including the time until the device has
        finished"""
        return measure_seconds(calls, 2 if self.tiny else rounds)


def read_ceilings(report):
    """-> FLOP/s and bytes/s as the part `card` measured them. Both are NaN where it did not, and so
    is every share of them."""
    try:
        rows = json.loads(Path(report).read_text())["parts"]["card"]["rows"]
    except (OSError, KeyError):
        rows = []
    values = {row["what"]: row.get("value") for row in rows}
    return values.get(PRODUCT, math.nan) * 1e12, values.get(COPY, math.nan) * 1e12


def relative_error(found, expected):
    """Norm of the difference / norm of what is expected, computed in fp64 on the CPU"""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


# ---------------------------------------------------------------- two small parts


def measure_card(bench):
    """What the device is, and two measured ceilings: a bf16 product and a copy"""

    def emit(what, value):
        bench.emit("card", what=what, value=value)

    # Names and sizes of the card, its software and the host.
    emit("device", torch.cuda.get_device_name() if bench.device == "cuda" else "CPU")
    if bench.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        emit("memory, GB", properties.total_memory / 1e9)
        emit("compute capability", f"{properties.major}.{properties.minor}")
        emit("CUDA of torch", str(torch.version.cuda))
        driver = "unknown: nvidia-smi is not here"
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
        emit("driver", driver)
    emit("CPU cores", len(os.sched_getaffinity(0)))

    # The ceilings: a square product (2 n^3 FLOPs), and a copy of 2 GiB. The other parts report
    # shares of these two.
    n = 256 if bench.tiny else 8192
    a = torch.randn(n, n, device=bench.device, dtype=torch.bfloat16)
    source = torch.zeros(1 << (20 if bench.tiny else 31), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    calls = {"product": partial(torch.matmul, a, a), "copy": partial(target.copy_, source)}
    seconds = bench.time(calls)

    # A copy reads every byte and writes it.
    emit(PRODUCT, 2 * n**3 / seconds["product"] / 1e12)
    emit(COPY, 2 * source.numel() / seconds["copy"] / 1e12)


def run_device_tests(bench):
    """Runs the tests marked `device`, but for the checks of the part `equality` and the one that
    compiles, which takes minutes. On a CPU they compare it with itself, and one of them shows that
    the part works."""
    command = [sys.executable, *"-u -m pytest -v -m device -p no:cacheprovider".split()]
    command += ["tests/test_device.py", "-k"]
    command.append("orthogonalize" if bench.tiny else "not computed_twice and not compiled")
    # Its output goes to a file line by line: it is there if this part is ended at its limit.
    output = bench.rows.with_name("device_tests.txt")
    with open(output, "w") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)

    # The last line of pytest is the outcome. The end of its output goes to the report when a test
    # failed.
    lines = output.read_text(errors="replace").rstrip().split("\n")
    row = dict(what="python -m pytest -m device", outcome=lines[-1], holds=done.returncode == 0)
    if not row["holds"]:
        row["traceback"] = "\n".join(lines[-60:])
    bench.emit("device tests", **row)


def main(argv):
    # What start_part in benchmarks/gpu.py asks for; the function is file.function of this folder.
    asked = SimpleNamespace(**json.loads(argv[0]))
    file, function = asked.function.split(".")
    getattr(importlib.import_module(f"benchmarks.{file}"), function)(Bench(asked))


if __name__ == "__main__":
    main(sys.argv[1:])
