"""installer.py: Can the previous policy prepare the world of the next one?

Stated (the launch post of Composer 2.5): before a repository becomes tasks, the previous model sets
it up: it installs, and tries until the tests run. Here whole generated codebases have a fault in
their set-up, and a policy is asked to make the tests run. It is solved if all of them pass.

    a line that does not compile stands at the head of a module (left by a merge)
    a module imports what is not there
    a module lies under another name

Beside the policy: a script that knows these three faults and mends what it finds.

    python -m experiments.installer
    python -m experiments.installer --policy=out/run

Found (assets/rl, 64 rollouts of each): no, as it has never seen such a task. The policy mends none
of the first two, and .09 of the third, where it writes the functions anew from the docs; after SFT
none. The script mends all. No figure.
"""

import random
import sys
from dataclasses import replace

import numpy as np

import eval
import rollout
import synth_tasks
from command.flags import usage_error
from world.sandbox import Sandbox
from world.untrusted import parse

ASKED = "The tests do not run. Set the project up so that they do."


# 1. The faults: each changes the files in place. path: of the module that it strikes
def leave_a_merge(files, path):
    files[path] = "<<<<<<< HEAD\n" + files[path]


def import_what_is_not_there(files, path):
    files[path] = "import settings\n\n" + files[path]


def move_the_module(files, path):
    files[path.replace(".py", "_old.py")] = files.pop(path)


FAULTS = (leave_a_merge, import_what_is_not_there, move_the_module)


def broken_project(fault, number):
    """A task: a held-out codebase as it is whole, but for a fault in its set-up"""
    task = synth_tasks.make_task(1, number, "heldout")
    whole = {**task.files, **task.solution}
    sources = sorted({f"{module}.py" for module, *_ in task.hidden})
    files = dict(whole)
    fault(files, random.Random(f"installer/{number}").choice(sources))

    listed = sorted(path for path in files if path not in ("docs.md", "tests.py", "check.py"))
    tools = ("run_command", "read_file", "edit_file", "search_codebase")
    return replace(
        task,
        instance_id=f"{fault.__name__}-{number}",
        problem_statement=synth_tasks.micro_prompt(ASKED, tools, listed),
        files=files,
        solution=whole,
        tools=tools,
        meta={**task.meta, "targets": []},
    )


# 2. The script
def set_up(files):
    """-> the files, with what it knows of put right"""
    mended = {}
    for path, text in files.items():
        lines = text.split("\n")
        if path.endswith(".py") and parse(text) is None:
            lines = lines[1:]
        if lines[0] == "import settings" and "settings.py" not in files:
            lines = lines[1:]
        mended[path.replace("_old.py", ".py")] = "\n".join(lines)
    return mended


# 3. Who sets up how many?
def compare(folder, number=16):
    """-> a line of the table for each fault"""
    model, tokenizer, config = eval.load_policy(folder)
    lines, sandbox = [], Sandbox()
    for fault in FAULTS:
        tasks = [broken_project(fault, i) for i in range(number)]
        # As it is, nothing passes; by the script, everything does.
        before = [rollout.judge(task, task.files, sandbox).solved for task in tasks]
        script = [rollout.judge(task, set_up(task.files), sandbox).solved for task in tasks]
        groups = eval.play_tasks(model, tokenizer, config, tasks, passes=4)
        solved = [rollout.grade(played) or played.solved for group in groups for played in group]
        shares = [np.mean(column) for column in (before, script, solved)]
        name = fault.__name__.replace("_", " ")
        lines.append(f"{name:26s}" + "".join(f"{share:10.2f}" for share in shares))
    return lines


def main(argv):
    option, _, folder = (argv or ["--policy=assets/rl"])[0].partition("=")
    if option != "--policy" or len(argv) > 1:
        usage_error(f"{' '.join(argv)}: --policy=RUN is all it takes", "experiments.installer")
    try:
        lines = compare(folder)
    except (ValueError, OSError) as error:
        usage_error(str(error), "experiments.installer")
    print(f"{'all tests pass':26s}  as it is    script    policy")
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
