"""benchmarks/gpu.py: everything that only a GPU can show, in one command.

    python -m benchmarks.gpu --out=DIR                             on one CUDA device, about 8 minutes
    python -m benchmarks.gpu --out=DIR --device=cpu --minutes=2    the same parts with tiny sizes: shows that the command works

Time on a GPU is short and rare, so the parts are ordered by worth and each has a time limit of its own. What a part leaves
unused goes to the parts after it. Every part is a process of its own: when CUDA crashes or hangs, the part is ended at its
limit and the next one begins. DIR/gpu.json and DIR/gpu.md are rewritten whenever a new row arrives, so a run that is cut
short keeps what it had measured. DIR/parts/ holds the raw rows and the screen output of each part.

    card            the device, its driver, and two measured ceilings: a bf16 product and a copy in memory
    equality        the same computations on the CPU and on the device, each with a limit
    device_tests    python -m pytest -m device
    job             train.py --scale=gpu, every stage cut short but whole in kind; kill -9 and resume
    speed           optimizer, mixture of experts and decoding, beside what one would use instead and beside a floor
    low_precision   MXFP8 and NVFP4: in hardware where there is any, else what the emulation costs

Exit code: 0 when every part ended and every check holds, 1 when not, 2 when the command cannot run here.
The measurements themselves are in benchmarks/gpu_parts.py, the profile of train.py in benchmarks/gpu_watch.py.
"""
import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# name: (weight of its time limit, heading in gpu.md). The weights are seconds when --minutes=8.
PARTS = {
    "card": (30, "The card and its ceilings"),
    "equality": (55, "Equality of CPU and device"),
    "device_tests": (45, "The tests of the device"),
    "job": (230, "The main job: train.py --scale=gpu"),
    "speed": (85, "Optimizer, mixture of experts, decoding"),
    "low_precision": (30, "Low precision"),
}


# ---------------------------------------------------------------- command line

def usage_error(message):
    """Bad input: one line, exit code 2, nothing touched."""
    print(f"benchmarks.gpu: {message}", file=sys.stderr)
    raise SystemExit(2)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = usage_error
    parser.add_argument("--out", required=True, help="folder for gpu.json, gpu.md and the parts' output")
    parser.add_argument("--minutes", type=float, default=8, help="time limit of the whole command")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same parts, tiny")
    arguments = parser.parse_args(argv)

    if not 0 < arguments.minutes < float("inf"):
        usage_error(f"--minutes={arguments.minutes:g}: a finite number above 0")
    # The parts run in the project's folder, so a relative path must be resolved before they start.
    arguments.out = Path(arguments.out).resolve()
    return arguments


def prepare_folder(out):
    """Makes the folder and removes the rows of an earlier run, so that they are not read as this run's."""
    try:
        (out / "parts").mkdir(parents=True, exist_ok=True)
        for name in PARTS:
            for ending in ("jsonl", "log"):
                (out / "parts" / f"{name}.{ending}").unlink(missing_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        usage_error(f"--out={out} cannot be written: {error.strerror}")


# ---------------------------------------------------------------- running the parts

def current_commit():
    """The commit that is measured, with a note where the working tree differs from it."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    try:
        commit = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except OSError:
        return "unknown"
    return (commit or "unknown") + (" with changes" if changed else "")


def read_rows(path):
    """The complete lines of a file of JSON lines. The last line may still be on its way."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def end_process_group(process):
    """Ends a part together with every process that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run_part(name, limit, report, arguments, scratch):
    """Runs one part in a process group of its own and fills report["parts"][name] as its rows arrive."""
    rows = arguments.out / "parts" / f"{name}.jsonl"
    log = arguments.out / "parts" / f"{name}.log"
    part = report["parts"][name] = {"state": "running", "limit_s": round(limit, 1), "seconds": 0.0, "rows": []}
    command = [sys.executable, "-m", "benchmarks.gpu_parts", name, f"--device={arguments.device}", f"--rows={rows}",
               f"--report={arguments.out / 'gpu.json'}", f"--scratch={scratch}", f"--seconds={limit:.1f}"]
    write_report(report, arguments.out)

    start = time.monotonic()
    with open(log, "w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True)
    try:
        # Every new row is in the report at once: nothing is lost when this command itself is ended.
        while process.poll() is None and time.monotonic() - start < limit:
            time.sleep(0.2)
            arrived = read_rows(rows)
            if len(arrived) > len(part["rows"]):
                part["rows"] = arrived
                part["seconds"] = round(time.monotonic() - start, 1)
                write_report(report, arguments.out)
        finished = process.poll() is not None
    finally:
        end_process_group(process)

    part["rows"] = read_rows(rows)
    part["seconds"] = round(time.monotonic() - start, 1)
    if not finished:
        part["state"] = "ended at its time limit"
    elif process.returncode == 0:
        part["state"] = "complete"
    else:
        part["state"] = f"failed with exit code {process.returncode}"
    if part["state"] != "complete":
        part["output"] = last_lines(log)
    write_report(report, arguments.out)


def last_lines(path, number=40):
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")
    return "\n".join(lines[-number:])


# ---------------------------------------------------------------- the report

def write_report(report, out):
    """Both files are replaced as a whole: a reader never finds half of one."""
    texts = {"gpu.json": json.dumps(report, indent=1), "gpu.md": render_markdown(report)}
    for name, text in texts.items():
        part = out / f"{name}.part"
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(out / name)


def count_checks(report):
    """-> (number of checks that hold, number of checks)"""
    checks = [row["holds"] for part in report["parts"].values() for row in part["rows"] if "holds" in row]
    return sum(checks), len(checks)


def is_successful(report):
    holding, checks = count_checks(report)
    complete = all(part["state"] == "complete" for part in report["parts"].values())
    return complete and holding == checks


def format_value(value):
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def render_table(rows):
    """Rows may have different columns: the table has all of them, in the order in which they first appear."""
    columns = []
    for row in rows:
        columns += [name for name in row if name not in ("table", "traceback") and name not in columns]
    lines = ["| " + " | ".join(name.replace("_", " ") for name in columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(format_value(row[name]) if name in row else "" for name in columns) + " |")
    return lines


def render_markdown(report):
    holding, checks = count_checks(report)
    lines = [
        "# What one device shows", "",
        f"`{report['command']}`",
        f"on {report['device']}, {report['date']}, commit {report['commit']}, torch {report['torch']}, "
        f"Python {report['python']}.", "",
        f"{holding} of {checks} checks hold. Every number below was measured in this run.",
    ]
    for name, part in report["parts"].items():
        lines += ["", f"## {PARTS[name][1]}", "",
                  f"{part['state']}, {part['seconds']:.0f} s (limit {part['limit_s']:.0f} s)"]
        tables = {}
        for row in part["rows"]:
            tables.setdefault(row["table"], []).append(row)
        for title, rows in tables.items():
            lines += ["", f"**{title}**", "", *render_table(rows)]
        for row in part["rows"]:
            if "traceback" in row:
                lines += ["", f"{row['table']}, {row['what']}:", "", "```", row["traceback"].rstrip(), "```"]
        if "output" in part:
            lines += ["", "The end of its output:", "", "```", part["output"], "```"]
    return "\n".join(lines)


def main(argv):
    started = time.monotonic()
    arguments = parse_arguments(argv)
    import torch
    if arguments.device == "cuda" and not torch.cuda.is_available():
        usage_error("no CUDA device here; --device=cpu runs the same parts with tiny sizes")
    prepare_folder(arguments.out)

    # SIGTERM then passes through the `finally` of run_part, which ends the processes of the running part.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    report = {
        "command": "python -m benchmarks.gpu " + shlex.join(argv), "device": arguments.device, "minutes": arguments.minutes,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "commit": current_commit(),
        "torch": torch.__version__, "python": sys.version.split()[0], "parts": {},
    }

    # A part may use its share of the time that is left; so what an earlier part did not use goes to the later ones.
    deadline = started + 60 * arguments.minutes - 1
    for position, name in enumerate(PARTS):
        weights = [weight for weight, _ in list(PARTS.values())[position:]]
        limit = max(0.0, deadline - time.monotonic()) * weights[0] / sum(weights)
        # Checkpoints of more than a gigabyte are no result: they go to a folder that is removed with the part.
        with tempfile.TemporaryDirectory(prefix="gpu-bench-") as scratch:
            run_part(name, limit, report, arguments, scratch)
        part = report["parts"][name]
        print(f"{name:14s} {part['state']}, {part['seconds']:.0f} s of at most {limit:.0f} s", flush=True)

    holding, checks = count_checks(report)
    print(f"{holding} of {checks} checks hold; {arguments.out / 'gpu.md'}")
    return 0 if is_successful(report) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
