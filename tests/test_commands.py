"""commands.py: a command that is forked is the command that a new Python would run."""

import os
import signal
import subprocess
import sys
import time

import pytest

from commands import Command, run_command

# What a program can see of its process, apart from numbers of processes
LOOK = """
import atexit, json, os, signal, sys, threading
import torch
print(json.dumps([sys.argv, sys.path[:3], __name__, sys.modules["__main__"].__dict__ is globals(),
    os.getcwd(), dict(os.environ), [str(signal.getsignal(n)) for n in (2, 15, 17)],
    torch.get_num_threads(), sys.stdout.isatty()]))
threading.Thread(target=lambda: print("a thread")).start()
atexit.register(print, "at the end")
print("error", file=sys.stderr)
"""


@pytest.mark.parametrize("how, threads", [("-c", "1"), ("-m", "2"), ("file", "")])
def test_a_forked_command_sees_what_a_new_process_sees(how, threads, tmp_path):
    (tmp_path / "look.py").write_text(LOOK)
    words = {"-c": ["-c", LOOK], "-m": ["-m", "look"], "file": ["look.py"]}[how]
    names = ("PATH", "HOME", "LC_CTYPE", "LANG")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment |= {"A": "B", "PYTHONPATH": "/nowhere"}
    if threads:
        environment["OMP_NUM_THREADS"] = threads
    command = [sys.executable, *words, "--x=1"]

    # A shell that starts the suite in the background makes it ignore Ctrl-C, and each new process
    # with it. A forked command heeds it, as one that is started from a terminal.
    def heed_interrupts():
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    new = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=heed_interrupts,
    )
    found = run_command(command, cwd=tmp_path, env=environment)
    assert found.stdout == new.stdout and "at the end" in new.stdout
    assert (found.stderr, found.returncode) == (new.stderr, new.returncode)


@pytest.mark.parametrize(
    "end, code",
    [
        ("", 0),
        ("import sys; sys.exit(7)", 7),
        ("raise SystemExit('a reason')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(5)", 5),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("raise KeyboardInterrupt", -2),
        ("no Python", 1),
    ],
)
def test_it_ends_as_a_new_process_ends(end, code):
    command = [sys.executable, "-c", end]
    found, new = run_command(command), subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == new.returncode == code
    assert found.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


def test_a_copy_of_the_tree_imports_its_own_modules(tmp_path):
    (tmp_path / "moe.py").write_text("WHERE = 'the copy'")
    command = [sys.executable, "-c", "import moe, sys; print(moe.WHERE, 'train' in sys.modules)"]
    assert run_command(command, cwd=tmp_path).stdout == "the copy False\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_command_and_its_group_alone(number):
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"]
    one, other = Command(command, new_session=True), Command(command)
    for child in (one, other):
        child.wait_for(lambda: "here" in child.stdout)
    assert os.getpgid(one.pid) == one.pid and os.getpgid(other.pid) != other.pid
    os.killpg(one.pid, number)
    assert one.wait(10) == -number and other.poll() is None
    other.send_signal(number)
    assert other.wait(10) == -number


def test_a_command_that_hangs_is_ended_at_its_limit_and_says_what_it_printed():
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as end:
        code = "import time; print('begun', flush=True); time.sleep(60)"
        run_command([sys.executable, "-c", code], timeout=2)
    assert time.monotonic() - start < 30 and end.value.stdout == "begun\n"


def test_no_file_of_the_server_or_of_another_command_stays_open():
    code = "import os; print(*sorted(os.listdir('/proc/self/fd')))"
    assert run_command([sys.executable, "-c", code]).stdout == "0 1 2 3\n"


def test_two_commands_draw_other_random_numbers():
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1))"
    one, other = (run_command([sys.executable, "-c", code]).stdout.split() for _ in range(2))
    assert not set(one) & set(other)


def test_no_file_of_a_command_grows_beyond_its_limit(tmp_path):
    code = "open('a', 'wb', buffering=0).write(bytes(1000)); open('a', 'ab', 0).write(b'x')"
    done = run_command([sys.executable, "-c", code], cwd=tmp_path, file_limit=1000)
    assert done.returncode == 1 and "File too large" in done.stderr
