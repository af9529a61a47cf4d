"""benchmarks/tools.py: what the tool calls of a step of RL take, beside a plain subprocess.

    python -m benchmarks.tools            64 episodes, as in a step of the laptop's RL; about half a minute
    python -m benchmarks.tools --quick    8 episodes; seconds: does it run?

The scripted expert plays the episodes, so the numbers are of tools alone: no model is at work. First
one command, the tests of a small codebase: in the sandbox (a cage of its own, with limits), by
subprocess.run in a plain folder (what one writes first, no protection), and remembered (the same
command on the same files again, which the sandbox does not run twice). Then whole episodes: in
workspaces on the disk, with every answer remembered, and in memory without any process.

Left out: what sampling and tools take from each other when they share cores. In training tools run
beside the sampler, and most of what they cost there is the core they run on.
"""

import random
import subprocess
import sys
import tempfile
from functools import partial

from benchmarks.harness import least_seconds, make_parser, print_table
from synth_tasks import make_task
from world.expert import InMemoryWorkspace, expert, play
from world.files import write_tree
from world.sandbox import Sandbox
from world.workspace import Workspace

COMMAND = "python tests.py"


def bench_command(rounds):
    """One run of a task's tests, three ways"""
    task = make_task(1, 5)
    with tempfile.TemporaryDirectory() as folder:
        write_tree(task.files, folder)
        caged = Workspace(task, Sandbox(memo=False))
        remembering = Workspace(task, Sandbox())
        words = [sys.executable, "-S", "-B", "tests.py"]
        plain = partial(subprocess.run, words, cwd=folder, capture_output=True)
        with caged, remembering:
            results = caged.run(COMMAND), remembering.run(COMMAND), plain()
            # All three have run the same tests to the same end.
            codes = results[0].exit_code, results[1].exit_code, results[2].returncode
            assert len(set(codes)) == 1, codes
            seconds = least_seconds(
                {
                    "subprocess.run, no protection": plain,
                    "in the sandbox": partial(caged.run, COMMAND),
                    "remembered": partial(remembering.run, COMMAND),
                },
                rounds,
            )
    base = seconds["subprocess.run, no protection"]
    rows = [[name, f"{1e3 * t:.2f}", f"{t / base:.2f}"] for name, t in seconds.items()]
    print_table(f"{COMMAND}, best of {rounds}", ["", "ms", "x subprocess"], rows)


def play_episodes(tasks, make_workspace):
    """-> the number of tool calls in one demonstration of each task"""
    calls = 0
    for i, task in enumerate(tasks):
        with make_workspace(task) as workspace:
            story = play(task, expert(task, random.Random(i), 1.0), workspace)
        calls += sum(len(action.calls) for action, _ in story)
    return calls


class InMemory(InMemoryWorkspace):
    """The expert's own workspace, as a context: files in a dict, tests in this process."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def bench_episodes(episodes, rounds):
    tasks = [make_task(i % 4, i) for i in range(episodes)]
    sandbox = Sandbox()

    def fresh():
        play_episodes(tasks, partial(Workspace, sandbox=Sandbox()))

    def remembered():
        play_episodes(tasks, partial(Workspace, sandbox=sandbox))

    def in_memory():
        play_episodes(tasks, InMemory)

    calls = play_episodes(tasks, partial(Workspace, sandbox=sandbox))
    seconds = least_seconds(
        {
            "workspaces and sandbox": fresh,
            "commands remembered": remembered,
            "in memory, no process": in_memory,
        },
        rounds,
        budget=60.0,
    )
    base = seconds["workspaces and sandbox"]
    rows = []
    for name, t in seconds.items():
        rows.append([name, f"{t:.3f}", f"{1e3 * t / calls:.2f}", f"{t / base:.2f}"])
    print_table(
        f"{episodes} episodes of the expert, one after the other, {calls} tool calls",
        ["", "seconds", "ms a call", "x sandbox"],
        rows,
    )


def main(argv):
    parser = make_parser("tools", __doc__)
    parser.add_argument("--quick", action="store_true", help="short: does it run?")
    quick = parser.parse_args(argv).quick
    bench_command(3 if quick else 50)
    bench_episodes(8 if quick else 64, 1 if quick else 3)


if __name__ == "__main__":
    main(sys.argv[1:])
