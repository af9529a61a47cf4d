"""benchmarks/gpu.py: everything that only a GPU can show, in one command.

    python -m benchmarks.gpu --out=DIR                           one CUDA device, 8 minutes
    python -m benchmarks.gpu --out=DIR --device=cpu --minutes=2  the same parts with tiny sizes

Time on a GPU is short and rare, so the parts are ordered by worth and each has a time limit of its
own. Every part is a process of its own: when CUDA crashes or hangs, the part is ended at its limit
and the next one begins. DIR/gpu.json and DIR/gpu.md are written anew after each part. DIR/parts/
has the screen of each part and its rows, written one by one: a run that is cut short keeps them.

    card            the device, its driver, and two measured ceilings: a bf16 product, a copy
    equality        the same computations on the CPU and on the device, each with a limit
    job             train.py --scale=gpu, every stage cut short
    speed           optimizer, mixture of experts and decoding, beside others and beside a floor
    device_tests    python -m pytest -m device

Exit code: 0 when every part ended and every check holds, 1 when not, 2 when it cannot run here.
The run on a CPU says nothing about speed. It shows that the command still works.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import ROOT, make_parser
from command import flags
from command.output_files import check_writable, current_commit, to_json

usage_error = partial(flags.usage_error, program="benchmarks.gpu")


@dataclass(frozen=True)
class Part:
    function: str  # file and function that measure it
    weight: int  # of its share of the time: seconds when --minutes=8
    heading: str  # in gpu.md
    note: str = ""  # what the columns mean


PARTS = {
    "card": Part("gpu_bench.measure_card", 25, "The card and its ceilings"),
    "equality": Part(
        "gpu_equality.check_equality",
        50,
        "Equality of CPU and device",
        """
Found is a relative error (norm of the difference / norm), or how many numbers differ.""",
    ),
    "job": Part(
        "gpu_job.measure_main_job",
        265,
        "The main job: train.py at the scale of the device",
        """
Every stage is cut short but whole in kind: fewer steps, demonstrations and tasks. Seconds per
step and tokens/s are medians over the second half of a stage's steps; in rl these are the tokens
trained on, over the whole step. Busy: nvidia-smi, over the second half of a stage's time. RL saves
once in three steps here, and once in ten by default.

MFU = tokens/s x FLOPs of a token / the measured bf16 product above; beside it the share of the
989 TFLOP/s that an H100 or H200 has by name, by which others divide. FLOPs of a token
= 6 x active parameters without the embedding
+ 6 x layers x heads x (qk_nope + qk_rope + v_dim) x T / 2 for causal attention over T tokens
(left out in sft, where T varies: there the MFU is a lower bound). The planner predicts one
training step, without the second model and the cache that rollouts need.""",
    ),
    "speed": Part(
        "gpu_speed.measure_speed",
        80,
        "Optimizer, mixture of experts, decoding",
        """
Times X: our time over that of X. The floor of an optimizer step are the products of Newton-Schulz
alone; that of decoding are the bytes that it reads, at the copy speed of the first table. Graphs: 1
where the step was captured; written: the same step without a CUDA graph.""",
    ),
    "device_tests": Part("gpu_bench.run_device_tests", 40, "The tests of the device"),
}


# ---------------------------------------------------------------- command line


def parse_arguments(argv):
    parser = make_parser("gpu", __doc__)
    out = "folder for gpu.json, gpu.md and the parts' output"
    parser.add_argument("--out", required=True, help=out)
    parser.add_argument("--minutes", type=float, default=8, help="time limit of the whole command")
    device = "cpu: the same parts, tiny"
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=device)
    arguments = parser.parse_args(argv)

    if not 0 < arguments.minutes < float("inf"):
        usage_error(f"--minutes={arguments.minutes:g}: a finite number above 0")
    # The parts run in the project's folder, so a relative path must be resolved before they start.
    arguments.out = Path(arguments.out).resolve()
    return arguments


def prepare_folder(out):
    """Makes the folder and removes the rows of an earlier run, so that nobody takes them for rows
    of this run"""
    try:
        check_writable(out / "parts")
        check_writable(out)
        for name in PARTS:
            for old in (out / "parts").glob(f"{name}*"):
                old.unlink()
    except OSError as error:
        usage_error(f"--out={out} cannot be written: {error.strerror or error}")


# ---------------------------------------------------------------- running the parts


def read_rows(path):
    """-> the values of the complete lines of a file of JSON lines. What stands behind the last line
    break is dropped: it may be half written."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def end_process_group(process):
    """Kills a part together with every process that it started"""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def part_environment(device):
    """-> the environment variables of a part. On a CPU it gets one thread, because with such small
    sizes threads would mostly wait for each other, and it does not see the card of the machine."""
    if device == "cuda":
        return None
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def start_part(name, limit, arguments, scratch):
    """-> the process of a part, started as the leader of a process group of its own"""
    # gpu_bench imports the function and runs it. The report goes along because it holds the
    # ceilings that the first part has measured.
    parts = arguments.out / "parts"
    asked = {
        "function": PARTS[name].function,
        "device": arguments.device,
        "rows": f"{parts / name}.jsonl",
        "report": str(arguments.out / "gpu.json"),
        "scratch": str(scratch),
        "seconds": limit,
    }
    command = [sys.executable, "-m", "benchmarks.gpu_bench", json.dumps(asked)]

    # Its screen goes to a log. start_new_session: whatever it starts can be killed with it.
    with open(parts / f"{name}.log", "w") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=part_environment(arguments.device),
            start_new_session=True,
        )


def run_part(name, limit, arguments, scratch):
    """Runs one part to its end or to its time limit (seconds) -> its entry in the report"""
    # A part that fails or hangs is an entry like any other: the next parts still run.
    start = time.monotonic()
    process = start_part(name, limit, arguments, scratch)
    state = "complete"
    try:
        if process.wait(limit):
            state = f"failed with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        state = "ended at its time limit"
    finally:
        # Also when this command itself is ended by a signal: no part outlives it.
        end_process_group(process)

    # The rows that it had written by then count, whatever its state.
    parts = arguments.out / "parts"
    part = {
        "state": state,
        "limit_s": round(limit, 1),
        "seconds": round(time.monotonic() - start, 1),
        "rows": read_rows(parts / f"{name}.jsonl"),
    }
    if state != "complete":
        part["output"] = last_lines(parts / f"{name}.log")
    return part


def last_lines(path):
    """The last 40 lines of a part's log, where a traceback stands"""
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")
    return "\n".join(lines[-40:])


# ---------------------------------------------------------------- the report


def write_gpu_report(report, out):
    (out / "gpu.json").write_text(to_json(report, indent=1) + "\n")
    (out / "gpu.md").write_text(render_markdown(report) + "\n", encoding="utf-8")


def count_checks(report):
    """-> (number of checks that hold, number of checks)"""
    checks = []
    for part in report["parts"].values():
        checks += [row["holds"] for row in part["rows"] if "holds" in row]
    return sum(checks), len(checks)


def is_successful(report):
    """Whether every part is complete and every check holds"""
    holding, checks = count_checks(report)
    complete = all(part["state"] == "complete" for part in report["parts"].values())
    return complete and holding == checks


def summarize_part(part):
    return f"{part['state']}, {part['seconds']:.0f} s of at most {part['limit_s']:.0f} s"


def format_value(value):
    """-> the text of a cell: three digits of a float, thousands separated, Markdown escaped"""
    # bool first: in Python a bool is an int too.
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def render_table(rows):
    """-> lines of Markdown. Rows may have different columns: the table has all of them, in the
    order in which they first appear."""
    # A traceback does not fit a cell: render_markdown prints it below the table.
    columns = []
    for row in rows:
        columns += [
            name for name in row if name not in ("table", "traceback") and name not in columns
        ]

    # The heading, then one line for each row. A column that a row does not have stays empty.
    lines = [
        "| " + " | ".join(name.replace("_", " ") for name in columns) + " |",
        "|---" * len(columns) + "|",
    ]
    for row in rows:
        cells = [format_value(row.get(name)) for name in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def render_markdown(report):
    """-> the text of gpu.md"""
    # The head: the command, the machine and the software of this run.
    holding, checks = count_checks(report)
    lines = [
        "# What one device shows",
        "",
        f"`{report['command']}`",
        f"on {report['device']}, {report['date']}, commit {report['commit']}, "
        f"torch {report['torch']}, Python {report['python']}.",
        "",
        f"{holding} of {checks} checks hold. Every number below was measured in this run.",
    ]

    # A section for each part that has run so far.
    for name, part in report["parts"].items():
        lines += [
            "",
            f"## {PARTS[name].heading}",
            "",
            summarize_part(part),
        ]
        if PARTS[name].note:
            lines += [PARTS[name].note]

        # A part may emit the rows of one table between those of another: group them by table.
        tables = {}
        for row in part["rows"]:
            tables.setdefault(row["table"], []).append(row)
        for title, rows in tables.items():
            lines += ["", f"**{title}**", "", *render_table(rows)]

        # Below the tables, what went wrong: tracebacks of rows, and the end of the part's log.
        for row in part["rows"]:
            if "traceback" in row:
                lines += ["", f"{row['table']}, {row['what']}:"]
                lines += ["", "```", row["traceback"].rstrip(), "```"]
        if "output" in part:
            lines += ["", "The end of its output:", "", "```", part["output"], "```"]
    return "\n".join(lines)


def end_by_signal(number, frame):
    """A handler that raises SystemExit, so that `finally` blocks run. 128 + number is the shell's
    exit code of a process that a signal ended."""
    sys.exit(128 + number)


def time_limit(name, minutes, left):
    """-> the seconds that a part may take, of the seconds that are left. A part may take twice its
    share, but half of the shares of all later parts stays reserved for them. So the later parts
    start whatever happens in one part, and what one part does not use goes to the others."""
    weights = {part: PARTS[part].weight for part in PARTS}
    later = list(PARTS)[list(PARTS).index(name) + 1 :]
    second = 60 * minutes / sum(weights.values())
    reserved = sum(weights[part] for part in later) * second / 2
    return max(0.0, min(2 * weights[name] * second, left - reserved))


def main(argv):
    started = time.monotonic()
    arguments = parse_arguments(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        usage_error("no CUDA device here; --device=cpu runs the same parts with tiny sizes")
    prepare_folder(arguments.out)

    # With this handler SIGTERM passes through the `finally` of run_part, which kills the processes
    # of the running part.
    signal.signal(signal.SIGTERM, end_by_signal)

    # What makes the numbers comparable later: device, date, commit and versions.
    report = {
        "command": "python -m benchmarks.gpu " + shlex.join(argv),
        "device": arguments.device,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": current_commit() or "unknown",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "parts": {},
    }

    # One part after the other. The last one must end a second before the limit of the command.
    deadline = started + 60 * arguments.minutes - 1
    for name in PARTS:
        limit = time_limit(name, arguments.minutes, deadline - time.monotonic())

        # A part may write checkpoints of more than a gigabyte. They are no result, so they go to a
        # folder that is removed after the part.
        with tempfile.TemporaryDirectory(
            prefix="gpu-bench-", ignore_cleanup_errors=True
        ) as scratch:
            part = report["parts"][name] = run_part(name, limit, arguments, scratch)

        # The report is complete after every part, so a run that is cut short keeps it.
        write_gpu_report(report, arguments.out)
        print(f"{name:14s} {summarize_part(part)}", flush=True)

    holding, checks = count_checks(report)
    print(f"{holding} of {checks} checks hold; {arguments.out / 'gpu.md'}")
    return 0 if is_successful(report) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
