"""benchmarks/task_sizes.py: how large the tasks of the bench are, beside those of real repositories.

Cursor compares benches so (cursor.com/blog/cursorbench): the median prompt of its own has 390
characters and 181 changed lines, SWE-bench's 7 to 10 lines. No run is needed:

    python synth_tasks.py --repo=PATH --n=50 --out=a.jsonl
    python -m benchmarks.task_sizes a.jsonl b.jsonl c.jsonl

Left out: how hard they are, which no size says.
"""

import difflib
import statistics
import sys
from pathlib import Path

import eval
import synth_tasks
from benchmarks.harness import print_table
from command.flags import usage_error
from repositories.task_file import read_tasks
from world.task import Refusal


def measure_task(task):
    """The sizes of a task: characters of the prompt, files, lines of Python, and the lines that
    the original solution adds or takes away"""
    changed = 0
    for path, text in task.solution.items():
        before, after = task.files.get(path, "").splitlines(), text.splitlines()
        for line in difflib.ndiff(before, after):
            changed += line.startswith(("+ ", "- "))
    code = [text for path, text in task.files.items() if path.endswith(".py")]
    return {
        "characters of the prompt": len(task.problem_statement),
        "files": len(task.files),
        "lines of Python": sum(text.count("\n") for text in code),
        "changed lines of the solution": changed,
    }


def main(files):
    sets = {"bench": eval.held_out(10, synth_tasks.BENCH_LEVELS, "bench")}
    try:
        for file in files:
            sets[Path(file).stem] = read_tasks(file)
    except (Refusal, OSError) as error:
        usage_error(str(error), program="task_sizes")

    # A column for each set, a row for each size.
    measured = [[measure_task(task) for task in tasks] for tasks in sets.values()]
    rows = []
    for name in measured[0][0]:
        medians = [statistics.median(one[name] for one in tasks) for tasks in measured]
        rows.append([name, *(f"{median:.0f}" for median in medians)])
    print_table("sizes of tasks", ["median of", *sets], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
