"""benchmarks/tools.py: what the tool calls of a step of RL take, beside a plain subprocess.

    python -m benchmarks.tools            64 rollouts, as in a step of the laptop's RL
                                          (about half a minute)
    python -m benchmarks.tools --quick    8 rollouts; seconds: does it run?

The scripted expert plays the rollouts, so the numbers are of tools alone: no model is at work.
First one command, the tests of a small codebase: in the sandbox (a cage of its own, with limits),
by subprocess.run in a plain folder (what one writes first, no protection), and remembered (the same
command on the same files again, which the sandbox does not run twice). Then whole rollouts: in
workspaces on the disk, with every answer remembered, and in memory without any process.

Left out: what sampling and tools take from each other when they share cores. In training tools run
beside the sampler, and most of what they cost there is the core they run on.
"""

import contextlib
import random
import subprocess
import sys
import tempfile
from functools import partial

from benchmarks.harness import measure_seconds, print_speeds, read_quick
from synth_tasks import make_task
from world.expert import InMemoryWorkspace, expert, play
from world.files import write_tree
from world.sandbox import Sandbox
from world.workspace import Workspace

COMMAND = "python tests.py"


def bench_command(rounds):
    """One run of a task's tests, three ways"""
    # Two workspaces with the files of one task: only the second keeps a memo of its answers.
    task = make_task(1, 5)
    caged = Workspace(task, Sandbox(memo=False))
    remembering = Workspace(task, Sandbox())
    with tempfile.TemporaryDirectory() as folder, caged, remembering:
        # The unprotected way starts Python with the flags that the sandbox gives it too: without
        # site (-S) and without writing bytecode (-B).
        write_tree(task.files, folder)
        words = [sys.executable, "-S", "-B", "tests.py"]
        plain = partial(subprocess.run, words, cwd=folder, capture_output=True)

        # All three must end with the same exit code, or their times could not be compared. This run
        # also fills the memo.
        results = caged.run(COMMAND), remembering.run(COMMAND), plain()
        codes = results[0].exit_code, results[1].exit_code, results[2].returncode
        assert len(set(codes)) == 1, codes

        # The work is the same every time, so the fastest round is the one least disturbed.
        seconds = measure_seconds(
            {
                "subprocess.run": plain,
                "in the sandbox": partial(caged.run, COMMAND),
                "remembered": partial(remembering.run, COMMAND),
            },
            rounds,
            min,
        )
    print_speeds(f"{COMMAND}, best of {rounds}", seconds, "subprocess.run")


def play_rollouts(tasks, make_workspace):
    """-> the number of tool calls in one demonstration of each task"""
    calls = 0
    for i, task in enumerate(tasks):
        with make_workspace(task) as workspace:
            story = play(expert(task, random.Random(i), 1.0), workspace)
        calls += sum(len(action.calls) for action, _ in story)
    return calls


def in_memory(task):
    """The expert's own workspace: files in a dict, tests in this process, nothing to clean up"""
    return contextlib.nullcontext(InMemoryWorkspace(task))


def bench_rollouts(rollouts, rounds):
    """Whole rollouts one after the other, in three kinds of workspaces"""
    # Tasks of the levels 0 to 3. All workspaces of `remembering` share one sandbox, and its memo.
    tasks = [make_task(i % 4, i) for i in range(rollouts)]
    remembering = partial(Workspace, sandbox=Sandbox())

    def play_without_memory():
        # Each round gets a new sandbox, so it knows no answers of earlier rounds.
        play_rollouts(tasks, partial(Workspace, sandbox=Sandbox()))

    # One untimed pass counts the tool calls and fills the memo of `remembering`.
    calls = play_rollouts(tasks, remembering)

    # A kind of workspace that has used a minute is not measured again.
    seconds = measure_seconds(
        {
            "sandbox": play_without_memory,
            "commands remembered": partial(play_rollouts, tasks, remembering),
            "in memory, no process": partial(play_rollouts, tasks, in_memory),
        },
        rounds,
        min,
        budget=60.0,
    )
    print_speeds(f"{rollouts} rollouts of the expert", seconds, "sandbox", calls)


def main(argv):
    quick = read_quick("tools", __doc__, argv)
    bench_command(3 if quick else 50)
    bench_rollouts(8 if quick else 64, 1 if quick else 3)


if __name__ == "__main__":
    main(sys.argv[1:])
