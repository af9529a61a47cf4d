"""benchmarks/task_sizes.py: how large the bench's tasks are, beside those of real repositories.

Cursor compares benches so (cursor.com/blog/cursorbench): the median prompt of its own has 390
characters and 181 changed lines, SWE-bench's 7 to 10 lines. No run is needed:

    python synth_tasks.py --repo=PATH --n=50 --out=a.jsonl
    python -m benchmarks.task_sizes a.jsonl b.jsonl c.jsonl     table, out/task_sizes.png

Left out: how hard they are, which no size says.
"""

import difflib
import sys
from pathlib import Path

import numpy as np

import eval
import synth_tasks
from command import drawing
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


def draw_sizes(sizes, path):
    """A panel for each size, a line for each set: the share of tasks that are at most so large.
    sizes: {name of a set: {name of a size: numbers}}"""
    names = list(next(iter(sizes.values())))
    figure, axes = drawing.make_axes("How large are the tasks?", "", "share of tasks", len(names))
    for panel, name in zip(axes, names):
        for label, numbers in sizes.items():
            values = np.sort(numbers[name])
            panel.plot(values, np.arange(1, len(values) + 1) / len(values), label=label)
        panel.set(xlabel=name, xscale="log")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main(files):
    sets = {"bench": eval.held_out(10, synth_tasks.BENCH_LEVELS, "bench")}
    try:
        for file in files:
            sets[file] = read_tasks(file)
            if not sets[file]:
                raise Refusal(f"{file}: no task stands in it")
    except (Refusal, OSError) as error:
        usage_error(str(error), program="task_sizes")

    # The median of each size, and the figure.
    sizes = {}
    for label, tasks in sets.items():
        measured = [measure_task(task) for task in tasks]
        sizes[label] = {name: [one[name] for one in measured] for name in measured[0]}
    print(f"{'median of':32s}" + "".join(f"{label:>22s}" for label in sizes))
    for name in next(iter(sizes.values())):
        cells = [f"{np.median(numbers[name]):22.0f}" for numbers in sizes.values()]
        print(f"{name:32s}" + "".join(cells))
    Path("out").mkdir(exist_ok=True)
    print(drawing.draw_safely(draw_sizes, sizes, "out/task_sizes.png") or "out/task_sizes.png")


if __name__ == "__main__":
    main(sys.argv[1:])
