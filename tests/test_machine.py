"""Tests of world/machine.py, world/edits.py and of whatever meets a machine that fails. Oracles:
slow loops over small texts, the same files on a machine with room, and processes that are really
killed."""

import errno
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import synth_tasks as st
from rollout import Tokenizer, without_middle_tokens
from synth_tasks import make_task
from world import (
    files as world_files,
    machine,
    memo,
    sandbox as world_sandbox,
    workspace as world_workspace,
)
from world.edits import ToolError, edited
from repositories.verdict import judge
from world.machine import MachineFailure
from fast import workers
from world.sandbox import Sandbox
from world.task import Task
from world.workspace import Workspace

ROOT = Path(st.__file__).parent
BYTES = Tokenizer({bytes([b]): b for b in range(256)})


@pytest.fixture
def quick(monkeypatch):
    """Nobody waits between tries."""
    monkeypatch.setattr(machine, "WAITS", (0.0, 0.0))


def solved_files(task):
    return {**task.files, **task.solution}


# ---------------------------------------------------------------- other systems

HIDE_UNIX = """
import os, signal, sys
for name in ("fcntl", "resource"):
    sys.modules[name] = None
for module, names in ((signal, ("SIGKILL", "SIGCHLD", "SIGHUP")), (os, ("geteuid", "getuid", "memfd_create", "fork"))):
    for name in names:
        delattr(module, name)
"""


@pytest.mark.parametrize("name", ["synth_tasks", "rollout", "train", "eval"])
def test_on_windows_the_first_import_is_one_line_that_names_wsl(name):
    done = subprocess.run(
        [sys.executable, "-c", f"{HIDE_UNIX}\nimport {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == "", done
    assert (
        len(done.stderr.strip().split("\n")) == 1
        and "WSL" in done.stderr
        and "fcntl" in done.stderr
    )


# What macOS lacks: /proc, /dev/shm, bubblewrap, memfd, prctl, and fork beside threads.
HIDE_LINUX = """
import builtins, ctypes, multiprocessing, os, platform, shutil, subprocess, sys, sysconfig
import numpy, torch
sysconfig.get_config_vars(), platform.uname()       # would look for a file that only a Mac has
hidden = ("/proc", "/dev/shm", "/sys")
def guard(module, name):
    real = getattr(module, name)
    def guarded(path, *rest, **named):
        if isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(hidden):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, *rest, **named)
    setattr(module, name, guarded)
for name in ("open", "listdir", "scandir", "stat", "lstat", "statvfs", "readlink"):
    guard(os, name)
guard(builtins, "open")
access, which, library, context = os.access, shutil.which, ctypes.CDLL, multiprocessing.get_context
os.access = lambda path, mode, **named: not os.fsdecode(path).startswith(hidden) and access(path, mode, **named)
shutil.which = lambda name, *rest: None if name in ("bwrap", "unshare") else which(name, *rest)
def no_glibc(name, *rest, **named):
    if name:
        raise OSError("no such library: " + name)
    return library(name, *rest, **named)
ctypes.CDLL = no_glibc
def no_fork(*_):
    raise RuntimeError("fork beside threads")
os.fork = no_fork
for name in ("memfd_create", "O_PATH", "sched_getaffinity"):
    delattr(os, name)
popen = subprocess.Popen.__init__
def checked(self, *words, preexec_fn=None, **named):
    assert preexec_fn is None, "Python between fork and exec, beside threads"
    popen(self, *words, **named)
subprocess.Popen.__init__ = checked
sys.platform = "darwin"
"""

ON_A_MAC = """
import random, tempfile
import fast.sampler
import hsdp, rollout, synth_tasks, train
from demos.forked_ranks import fork_ranks
from synth_tasks import make_task
from repositories.verdict import judge
from world.sandbox import Sandbox
from world.workspace import Workspace
task, sandbox = make_task(1, 5), Sandbox()
with Workspace(task, sandbox) as workspace:
    first = workspace.run("python tests.py").output
    workspace.edit("more.txt", "", "x")
    assert workspace.run("cat more.txt").output == "x" and "failed" in first
    assert "proc" not in str(workspace.root) and "shm" not in str(workspace.root)
assert judge(task, {**task.files, **task.solution}, sandbox).solved and not judge(task, task.files, sandbox).solved
tokenizer = rollout.Tokenizer({bytes([b]): b for b in range(256)})
model = rollout.random_model(tokenizer, dim=32, layers=2, heads=2, kv_lora=16)
(rollout,), = rollout.sample_groups(fast.sampler.Sampler(fast.accelerate(model), tokenizer, 2, 600), [task], 1, 0, rollout.Limits(600, 2, 16), sandbox)
assert rollout.files and not rollout.failure
with tempfile.TemporaryDirectory() as out:
    train.main(["--scale=tiny", "--stage=pretrain", "--steps=1", "--processes=1", "--vocab=300", "--dim=32", "--context=64",
                "--batch_tokens=256", "--micro_tokens=256", f"--data={os.path.dirname(random.__file__)}/json", f"--out={out}"])
print("works")
for refused in (hsdp.demo, lambda: fork_ranks(2, len), lambda: train.main(["--device=mps"])):
    try:
        refused()
    except SystemExit as end:
        print("refused", end.code)
"""


def test_on_a_mac_what_is_linux_s_own_is_gone_around_or_refused_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HIDE_LINUX + ON_A_MAC],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert done.stdout.strip().split("\n")[-4:] == ["works"] + ["refused 2"] * 3, done
    words = [
        line
        for line in done.stderr.strip().split("\n")
        if "forks ranks" in line or line.startswith("--device")
    ]
    assert len(words) >= 2 and "mps" in done.stderr and "Traceback" not in done.stderr, done.stderr


# ---------------------------------------------------------------- edits


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_an_edit_is_the_same_whatever_the_files_line_ends_are(end):
    """The oracle is str.replace in the file with plain line ends, where the old text stands exactly
    once. Places that overlap count too."""
    rng = random.Random(0)
    for _ in range(4000):
        text, old, new = (
            "".join(rng.choices("ab \n", k=rng.randint(low, high)))
            for low, high in ((0, 14), (1, 4), (0, 5))
        )
        places = sum(text.startswith(old, i) for i in range(len(text)))
        there = text.replace("\n", end)
        if places != 1:
            with pytest.raises(ToolError, match="not found" if places == 0 else "occurs [2-9]"):
                edited(there, "a", old, new)
        else:
            whole = text.replace(old, new)
            assert edited(there, "a", old, new) == (
                whole.replace("\n", end) if "\n" in text else whole
            )
        if "\n" in text:
            added = (text + "\n" * (not text.endswith("\n")) + new).replace("\n", end)
            assert edited(there, "a", "", new) == added


@pytest.mark.parametrize(
    "text, old, new, result",
    [
        # Bytes that are no text keep theirs.
        ("caf\udce9 = 1\nx\n", " = 1\nx", " = 2\ny", "caf\udce9 = 2\ny\n"),
        # A file of mixed line ends is edited to the letter.
        ("a\r\nb\nc\n", "b\nc", "b\nC", "a\r\nb\nC\n"),
        ("a\r\nb\nc\n", "a\r\nb", "A\r\nb", "A\r\nb\nc\n"),
        # The file has no line end to follow.
        ("one", "one", "1\r\n2", "1\r\n2"),
        # Beside \n, a lone \r is no line end.
        ("p = 'a\\rb'\rx\ny\n", "x\ny", "x\nz\ny", "p = 'a\\rb'\rx\nz\ny\n"),
        ("\ufeffx = 1\r\ny\r\n", "x = 1\ny", "x = 2\ny", "\ufeffx = 2\r\ny\r\n"),
        ("a\r\nb\r\n", "a\r\nb", "a\r\nc", "a\r\nc\r\n"),
        ("a\nb\n", "a\r\nb", "a\r\nc", "a\nc\n"),
        ("a\nb\n", "a\nb", "a\r\nc", "a\nc\n"),
    ],
)
def test_an_edit_by_hand(text, old, new, result):
    assert edited(text, "a", old, new) == result
    with Workspace(Task("x", "", {"a.py": text}, {})) as workspace:
        assert workspace.edit("a.py", old, new) == "ok" and workspace.files()["a.py"] == result


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize("most", [0, 5, 41, 60, 200])
def test_an_output_that_is_too_long_loses_its_middle_and_says_how_much(most):
    """The oracle is the data itself: head and tail are compared with it, and the note must give the
    number of bytes between them, up to 3 bytes of a character that was cut in two."""
    rng = random.Random(most)
    for _ in range(200):
        data = "".join(rng.choices("ab\n☃é\U0001f600", k=rng.randint(0, 150))).encode()
        output = world_sandbox.CutOutput(most)
        at = 0
        while at < len(data):
            step = rng.randint(1, 40)
            output.add(data[at : at + step])
            at += step
        text = output.text()
        if len(data) <= most:
            assert text == data.decode()
            continue
        head, note, tail = text.rpartition("\n[")[0], text, text.rpartition(" bytes cut]\n")[2]
        missing = int(text.rpartition("\n[")[2].split()[0])
        assert (
            data.decode().startswith(head) and data.decode().endswith(tail) and "\ufffd" not in note
        )
        assert 0 <= len(data) - len(head.encode()) - len(tail.encode()) - missing <= 3
        assert most < 41 or len(text.encode()) <= most + 4


def test_tokens_and_texts_that_are_too_long_lose_their_middle_within_the_limit():
    for most in range(60):
        tokens = list(range(97, 122)) * 8
        cut = without_middle_tokens(BYTES, tokens, most)
        assert (
            len(cut) <= most and without_middle_tokens(BYTES, tokens[:most], most) == tokens[:most]
        )
        if most >= 30:
            words = BYTES.decode(cut)
            missing = int(words.split("[")[1].split()[0])
            assert (
                words.startswith("ab")
                and words.endswith("xy")
                and missing + len(cut) - len(f"\n[{missing} tokens cut]\n") == len(tokens)
            )
    long = Task("x", "", {"a.txt": "x" * 100_000 + "8 failed"}, {})
    with Workspace(long, longest=1000) as workspace:
        shown = workspace.read("a.txt")
    assert len(shown) <= 1000 and shown.endswith("8 failed") and "bytes cut]" in shown


def test_a_long_output_does_not_end_the_command_and_one_without_end_does():
    with Workspace(Task("x", "", {"a.py": "x = 1\n"}, {}), Sandbox(time_limit=8)) as workspace:
        result = workspace.run("seq 9000; sed -i 's/1/2/' a.py; seq 9000; echo 3 failed")
        assert (
            result.exit_code == 0
            and not result.stopped
            and result.output.endswith("9000\n3 failed\n")
            and result.output.startswith("1\n2\n")
        )
        assert (
            "bytes cut]" in result.output
            and len(result.output) <= 16_100
            and workspace.files()["a.py"] == "x = 2\n"
        )
        start = time.perf_counter()
        result = workspace.run("yes")
        assert (
            result.exit_code
            and "without end" in result.output
            and len(result.output) < 17_000
            and time.perf_counter() - start < 6
        )
        with open(workspace.root / "long", "w") as file:
            file.write("x" * 20_000 + "the end")
        assert workspace.read("long").endswith("the end") and len(workspace.read("long")) <= 16_000


# ---------------------------------------------------------------- what a workspace may hold


def test_a_tree_of_too_many_files_is_told_and_the_tasks_own_are_in_the_submission_first():
    task = make_task(0, 1)
    with Workspace(task, Sandbox(files=500, time_limit=20)) as workspace:
        result = workspace.run("python -c \"for i in range(20000): open(f'a{i}', 'w')\"")
        assert result.stopped == "too many files" and "too many files" in result.output
        files = workspace.files()
        assert len(files) == 500 and {path: files[path] for path in task.files} == task.files
    with Workspace(task, Sandbox(time_limit=20)) as workspace:  # and by itself
        assert workspace.run("python -c \"for i in range(20000): open(f'a{i}', 'w')\"").stopped
        assert len(workspace.files()) <= 10_000


def test_no_pipe_device_or_link_that_took_a_files_place_is_waited_for(tmp_path, monkeypatch):
    task = make_task(0, 1)
    with Workspace(task) as workspace:
        for name in ("pipe", "more"):
            os.mkfifo(workspace.root / name)
        for name, target in (
            ("loop", "loop"),
            ("null", "/dev/zero"),
            ("a", "b"),
            ("b", "a"),
            ("up", ".."),
        ):
            os.symlink(target, workspace.root / name)
        start = time.perf_counter()
        assert set(workspace.files()) == set(task.files)
        # As if they had come between the look and the reading.
        for name in ("pipe", "loop", "null"):
            for touch in (
                lambda: world_files.read_file(workspace.root, name, 100),
                lambda: world_files.write_file(workspace.root, name, "x"),
            ):
                with pytest.raises((ToolError, OSError)):
                    touch()
        assert time.perf_counter() - start < 1


# ---------------------------------------------------------------- the same from any shell
TELL = """import getpass, os, resource, signal, socket
print([n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN], signal.pthread_sigmask(0, []))
print([resource.getrlimit(getattr(resource, 'RLIMIT_' + n)) for n in 'CORE CPU DATA STACK NOFILE AS FSIZE'.split()])
print(os.umask(0o77), os.getcwd(), sorted(os.environ), getpass.getuser(), os.getuid(), os.getsid(0) == os.getpid())
print(socket.gethostbyname('localhost'), socket.gethostbyname(socket.gethostname()))
"""
SHELL = """import os, sys
sys.path.insert(0, sys.argv[1])
from world.sandbox import Sandbox
print(Sandbox(memo=False).run(["python", "-c", sys.argv[2]], sys.argv[3]).output, end="")
print(Sandbox(memo=False).run([*Sandbox().python, "-c", sys.argv[2]], sys.argv[3]).output, end="")
"""


@pytest.mark.skipif(not world_sandbox.has_bwrap(), reason="needs bubblewrap")
@pytest.mark.parametrize(
    "before",
    [
        "trap '' HUP TERM USR1 CHLD INT",
        "umask 077",
        "ulimit -S -n 200; ulimit -S -s 512; ulimit -S -t 50; ulimit -S -d 900000",
        "export PYTHONOPTIMIZE=1 PYTHONPATH=/nowhere IFS=x LC_ALL=C COLUMNS=7",
        "cd /; exec 0<&-",
    ],
)
def test_a_command_finds_the_same_from_any_shell(before, tmp_path):
    """The oracle is a plain shell. The command runs as a process of its own and as a fork of the
    server."""
    tmp_path.chmod(0o755)

    def said(before):
        words = [sys.executable, "-c", SHELL, ROOT, TELL, tmp_path]
        line = ["sh", "-c", f'{before}\nexec "$@"', "sh", *words]
        return subprocess.run(line, capture_output=True, text=True).stdout

    plain = said(":")
    assert "agent 1000" in plain and "127.0.0.1 127.0.0.1" in plain and "PYTHONOPT" not in plain
    assert said(before) == plain


def test_processor_time_of_many_threads_is_not_counted(tmp_path):
    """Four threads that hash for a second each use more processor time than time on the wall."""
    code = (
        "import hashlib, threading, time, resource\ndef work():\n    end = time.time() + 1\n"
        "    while time.time() < end: hashlib.sha256(bytes(1 << 20))\n"
        "all = [threading.Thread(target=work) for _ in range(4)]\n"
        "[t.start() for t in all]; [t.join() for t in all]\n"
        "print(resource.getrlimit(resource.RLIMIT_CPU)[0])\n"
    )
    (tmp_path / "a.py").write_text(code)
    result = Sandbox(memo=False).run("python a.py", tmp_path)
    assert (result.exit_code, result.output) == (0, "-1\n")


def test_a_line_of_any_length_is_taken_apart_at_once():
    start = time.perf_counter()
    for line in (
        "echo " + "x" * (4 << 20),
        "python " + "a/" * (1 << 20),
        "python " + "- " * 500_000,
    ):
        assert len(Sandbox().argv(line)) >= 3 and time.perf_counter() - start < 2


def test_too_many_files_made_between_two_looks_fail_the_command(monkeypatch, tmp_path):
    """Nobody looks while it runs: the last look, when nothing is written any more, decides."""
    real, ended = Sandbox.overfull, []

    def stop(self):
        ended.append(1)
        return stopped(self)

    stopped = world_sandbox.Server.stop
    monkeypatch.setattr(world_sandbox.Server, "stop", stop)
    monkeypatch.setattr(Sandbox, "overfull", lambda *words: real(*words) if ended else "")
    result = Sandbox(memo=False, files=100).run("seq 300 | xargs touch", tmp_path)
    assert result.exit_code and result.stopped == "too many files"
    assert "too many files" in result.output


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="Linux keeps what it needs")
def test_without_a_cage_no_session_of_its_own_outlives_its_command(monkeypatch, tmp_path):
    monkeypatch.setattr(world_sandbox, "has_bwrap", lambda: False)
    line = "setsid sh -c 'setsid sleep 61.03125 & sleep 61.03125' >/dev/null 2>&1 & sleep .3"
    assert Sandbox(memo=False).run(line, tmp_path).exit_code == 0
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "sleep 61.03125" not in running


# ---------------------------------------------------------------- an agent's file
PUT = {  # what a command puts in a file's place, or on the way to it
    "a pipe": "rm {0}; mkfifo {0}",
    "a link out": "rm {0}; ln -s /etc/hostname {0}",
    "a link to itself": "rm {0}; ln -s {0} {0}",
    "a folder": "rm {0}; mkdir {0}",
    "holes": "rm {0}; truncate -s 60M {0}",
    "a linked folder": "mv sub moved; ln -s moved sub",
}


@pytest.mark.parametrize("name", PUT)
def test_what_a_command_put_in_a_files_place_is_neither_read_nor_waited_for(name):
    path = "sub/test_a.py" if name == "a linked folder" else "test_a.py"
    files = {path: "def test_a():\n    assert 1\n", "b.py": "x = 1\n"}
    with Workspace(Task("x", "", files, {}), Sandbox(time_limit=5)) as workspace:
        start = time.perf_counter()
        assert workspace.run(PUT[name].format(path)).exit_code == 0
        assert workspace.recorder.text_now(path) is None and workspace.recorder.weaker_now()
        assert path not in workspace.files() and workspace.files()["b.py"] == "x = 1\n"
        for call in (lambda: workspace.read(path), lambda: workspace.edit(path, "", "x")):
            with pytest.raises(ToolError):
                call()
        assert time.perf_counter() - start < 4


# ---------------------------------------------------------------- what is remembered

REMEMBERED = {
    "def f(xs):\n    return sorted(x + 1 for x in xs)\n": True,
    "import math\ndef f(xs):\n    return math.floor(xs[0])\n": True,
    "def f(:\n": False,  # what cannot be read is not known to depend on the files alone
    "class A(ValueError):\n    def __init__(self):\n        self.x = 1\n": True,
    "import time\nprint(time.time())\n": False,
    "import random\n": False,
    "from os import urandom\n": False,
    "print(id(1))\n": False,
    "print({'a', 'b'})\n": False,
    "print(hash('a'))\n": False,
    "x = open('a.py').read()\n": False,
    "y = (x for x in []).gi_frame\n": False,
    "print(().__class__)\n": False,
    "exec('import time')\n": False,
    "print('{0.__class__}'.format(1))\n": False,
    "import sys\n": False,
    "x = globals()\n": False,
    "x = __builtins__\n": False,
}


@pytest.mark.parametrize("code", REMEMBERED)
def test_only_what_is_a_function_of_the_files_is_remembered(code):
    files = {
        "a.py": code,
        "tests.py": "import check\nimport a\n\ncheck.run(globals())\n",
        "check.py": memo.CHECK,
        "docs.md": "",
    }
    assert memo.is_function_of_files(files, "python tests.py") == REMEMBERED[code]
    assert not memo.is_function_of_files(
        {**files, "check.py": memo.CHECK + "import time\n"}, "python tests.py"
    )
    for command in (
        "date +%N",
        "python -c 'import time; print(time.time())'",
        "echo $RANDOM",
        "cat a.py; date",
    ):
        assert not memo.is_function_of_files(files, command)
    assert not memo.is_function_of_files({**files, "a.so": ""}, "python tests.py")


def test_a_command_that_tells_the_time_is_run_again_and_so_is_a_judgement_by_chance():
    sandbox, task = Sandbox(), make_task(1, 5)
    with Workspace(task, sandbox) as workspace:
        assert len({workspace.run("date +%s%N").output for _ in range(3)}) == 3
        assert workspace.run("python tests.py") is workspace.run("python tests.py")
    ((path, whole),) = task.solution.items()
    name = task.hidden[0][1]
    coin = whole + f"\n\nimport random\nif random.random() < .5:\n    {name} = None\n"
    verdicts = {judge(task, {**task.files, path: coin}, sandbox).solved for _ in range(30)}
    assert verdicts == {True, False}


# ---------------------------------------------------------------- a machine that fails


def no_room(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_no_verdict_and_with_room_again_the_same_answer_is_solved(
    quick, monkeypatch
):
    task, sandbox = make_task(1, 5), Sandbox()
    with monkeypatch.context() as patch:
        for module in (world_sandbox, world_workspace):
            patch.setattr(module, "write_tree", no_room)
        with pytest.raises(MachineFailure, match="No space left"):
            judge(task, solved_files(task), sandbox)
        with pytest.raises(MachineFailure, match="No space left"):
            Workspace(task, sandbox)
    assert judge(task, solved_files(task), sandbox).solved


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.ENOMEM, errno.EDQUOT])
def test_tools_that_meet_a_full_machine_do_not_answer_the_agent(number, quick, monkeypatch):
    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    with Workspace(make_task(1, 5), Sandbox()) as workspace:
        for module, name, tool in (
            (world_files.os, "open", lambda: workspace.edit("a.txt", "", "x")),
            (world_workspace, "walk", workspace.files),
            (world_workspace, "walk", lambda: workspace.search("x")),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, fails)
                with pytest.raises(MachineFailure):
                    tool()
        with monkeypatch.context() as patch:
            patch.setattr(Sandbox, "order", fails)
            with pytest.raises(MachineFailure, match="cannot start"):
                workspace.run("echo 1")
            assert not workspace.sandbox.run("echo 1", workspace.root).started
        assert workspace.run("echo 1").output == "1\n"


def test_what_the_agent_did_to_its_own_files_is_not_the_machines_failure():
    task = make_task(0, 1)
    # a file in a file
    verdict = judge(task, {**task.files, "check.py/a": "x"}, Sandbox())
    assert not verdict.solved
    with Workspace(task, Sandbox()) as workspace:
        # a path that is too long
        deep = "import os\nfor i in range(2500):\n    os.mkdir('d')\n    os.chdir('d')\n"
        workspace.edit("deep.py", "", deep)
        assert (
            workspace.run("python deep.py").exit_code == 0
            and workspace.run("echo 1").output == "1\n"
        )


def test_a_helper_that_is_killed_in_the_middle_of_a_judgement_costs_a_try_and_no_verdict(
    quick, monkeypatch
):
    task, sandbox, stopped = make_task(1, 5), Sandbox(), world_sandbox.Server.stop

    def dies_once(self):
        if not lost:
            lost.append(stopped(self))
            return "no answer b''"
        return stopped(self)

    lost = []
    monkeypatch.setattr(world_sandbox.Server, "stop", dies_once)
    assert judge(task, solved_files(task), sandbox).solved and lost


# ---------------------------------------------------------------- rollouts that the machine failed


class Script:
    """A sampler whose agents write one text and say that they are done."""

    tokenizer = BYTES

    def __init__(self, edits):
        self.edits = edits

    def run(self, agents, seeds, on_end, patient=True):
        from rollout import Work

        rollouts = []
        for play, seed in zip(agents, seeds):
            bodies = [
                BYTES.write_action("", [("edit_file", self.edits)]),
                BYTES.write_action("Done.", []),
            ]
            try:
                asked = next(play)
                while True:
                    if isinstance(asked, Work):
                        asked.run()
                        asked = play.send(None)
                    else:
                        body = bodies.pop(0)
                        asked = play.send((body, np.zeros(len(body), np.float32), 0))
            except StopIteration as end:
                rollouts.append(end.value)
                on_end(end.value)
        return rollouts


@pytest.mark.parametrize("where", ["judge", "Workspace", "run_tool"])
@pytest.mark.parametrize("times", [1, 99])
def test_a_rollout_that_the_machine_failed_is_played_again_and_then_left_out(
    where, times, quick, monkeypatch
):
    import rollout as rollout_module
    from rollout import Limits, drop_failed, grade, sample_groups

    task, sandbox, left = make_task(1, 5), Sandbox(), [times]
    ((path, whole),) = task.solution.items()
    real = getattr(rollout_module, where)

    def fails(*words):
        left[0] -= 1
        if left[0] >= 0:
            raise MachineFailure("no room")
        return real(*words)

    monkeypatch.setattr(rollout_module, where, fails)
    (group,) = sample_groups(Script((path, "", whole)), [task], 2, 0, Limits(20_000), sandbox)
    for rollout in group:
        grade(rollout)
    kept, lost = drop_failed([group])
    if times == 1:
        assert (
            [c.solved for c in group] == [True, True]
            and not lost
            and [c.reward for c in kept[0]] == [1.0, 1.0]
        )
    else:
        assert (
            kept == []
            and len(lost) == 2
            and all(c.failure == "no room" and not c.solved and c.stats["turns"] < 3 for c in lost)
        )
        assert "2 of 2 rollouts" in machine.failures_line([c.failure for c in lost], 2)


def rl_step(group, failed, out, monkeypatch):
    """One step of rl on the same rollouts, some of which the machine failed -> (gradients, log,
    what was said)"""
    import train

    words = [
        "--scale=tiny",
        "--dim=32",
        "--dtype=float32",
        "--device=cpu",
        "--window=220",
        "--max_turns=2",
        "--tasks_per_step=2",
        f"--group_size={group}",
        "--stage=rl",
        "--steps=3",
        "--vocab=300",
        "--processes=1",
        f"--out={out}",
    ]
    run, said, log = train.Run(train.FLAGS.configure(train.FLAGS.parse(words), "rl")), [], {}
    run.build(BYTES)
    source = train.Reinforcement(run)
    monkeypatch.setattr(run, "say", said.append)
    real = source.workers.collect

    def collect(dealt):
        groups = real(dealt)
        for one in groups:
            for j, rollout in enumerate(one):
                rollout.finished, rollout.passed = True, j == 0
                lost = failed == "all" or one is groups[0] and j >= 4 - len(failed)
                rollout.failure = "no room is left" if lost else ""
        return groups if failed == "all" else [groups[0]]

    monkeypatch.setattr(source.workers, "collect", collect)
    sum(source.losses(0, log)).backward()
    return (
        {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None},
        log,
        said,
    )


def test_a_rollout_that_the_machine_failed_has_no_gradient_and_no_part_in_its_groups_mean(
    tmp_path, monkeypatch
):
    """The oracle is a group that never had this rollout. The loss is divided by the number of
    rollouts that count, so the gradients differ by that ratio."""
    import torch

    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with_failed, log, said = rl_step(4, "x", tmp_path / "a", monkeypatch)
    without, plain, silent = rl_step(3, "", tmp_path / "b", monkeypatch)
    assert (
        log["machine_failures"] == 1
        and len(said) == 1
        and "1 of 8 rollouts" in said[0]
        and "no room is left" in said[0]
    )
    assert plain["machine_failures"] == 0 and not silent
    assert (
        log["solved"] == plain["solved"] == 1 / 3
        and log["reward"] == plain["reward"]
        and log["sampled"] == plain["sampled"]
    )
    # Rollouts that count: 8 - 1 of two groups of four, 6 of two groups of three.
    scale = (8 - 1) / 6
    for name, gradient in without.items():
        torch.testing.assert_close(with_failed[name] * scale, gradient, rtol=1e-3, atol=1e-7)
    assert any(gradient.abs().max() > 0 for gradient in without.values())


def test_where_every_rollout_is_lost_the_run_ends_with_the_cause(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "WAITS", (0.0, 0.0))
    with pytest.raises(SystemExit) as end:
        rl_step(3, "all", tmp_path, monkeypatch)
    assert end.value.code == 2 and "the same command goes on" in capsys.readouterr().err


# ---------------------------------------------------------------- directories that have an owner

HOLDER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from world import machine
held = [machine.owned_directory("task", sys.argv[2]) for _ in range(3)]
held.append(machine.owned_directory("weights", sys.argv[2]))
for one in held:
    os.makedirs(one.name + "/a/b")
print(*(one.name for one in held), flush=True)
sys.stdin.read()
"""


def holder(place):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(ROOT), str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().split()


def test_what_a_killed_process_left_goes_when_the_next_begins_and_what_a_living_one_owns_stays(
    tmp_path,
):
    (tmp_path / "task-of-somebody").mkdir()
    # A directory whose lock file is gone: nobody can tell whether its owner lives, so it stays.
    (tmp_path / f"task-{'0' * 16}-abc").mkdir()
    killed, gone = holder(tmp_path)
    living, stays = holder(tmp_path)
    killed.kill(), killed.wait()
    assert all(map(os.path.isdir, gone + stays))
    third, own = holder(tmp_path)
    assert not any(map(os.path.exists, gone)) and all(map(os.path.isdir, stays + own))
    # one that ends by itself leaves nothing
    for process in (living, third):
        process.stdin.close(), process.wait()
    assert {path.name for path in tmp_path.iterdir()} == {
        "task-of-somebody",
        f"task-{'0' * 16}-abc",
    }


def test_what_cannot_be_removed_keeps_its_lock_for_the_next_and_links_are_not_followed(
    tmp_path, monkeypatch
):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    killed, gone = holder(tmp_path)
    os.symlink(tmp_path / "kept", gone[0].rpartition("-")[0] + "-link")
    killed.kill(), killed.wait()
    monkeypatch.setattr(machine, "remove_tree", lambda path: False)
    machine.sweep(str(tmp_path))
    assert all(map(os.path.isdir, gone)) and list(tmp_path.glob(".owner-*"))
    monkeypatch.undo()
    machine.sweep(str(tmp_path))
    assert (
        not any(map(os.path.exists, gone))
        and not list(tmp_path.glob(".owner-*"))
        and (tmp_path / "kept" / "file").exists()
    )


def test_a_fork_owns_its_own_directories_and_removes_none_of_its_parents(tmp_path):
    mine = machine.owned_directory("task", tmp_path)
    pid = os.fork()
    if not pid:
        other = machine.owned_directory("task", tmp_path)
        os._exit(int(Path(other.name).name.split("-")[1] == Path(mine.name).name.split("-")[1]))
    assert os.waitpid(pid, 0)[1] == 0 and os.path.isdir(mine.name)
    # The directory that the fork left is removed, its parent's stays.
    machine.sweep(str(tmp_path))
    assert [path.name for path in tmp_path.glob("task-*")] == [Path(mine.name).name]
    mine.cleanup()
    machine.release_place(os.path.realpath(tmp_path), os.getpid())


def test_workspaces_stand_where_there_is_room(monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: True)
    for memory, disk, place in (
        (1 << 30, 1 << 30, "/dev/shm"),
        (0, 1 << 30, tempfile.gettempdir()),
        (2, 1, "/dev/shm"),
    ):
        monkeypatch.setattr(
            machine, "room_left", lambda place: memory if place == "/dev/shm" else disk
        )
        assert machine.roomy_place() == place


def test_a_generation_process_ends_with_its_trainer_in_the_middle_of_a_job():
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    watched, alive = context.Pipe(duplex=False)
    process = context.Process(target=busy_generation, args=(watched,), daemon=True)
    process.start()
    watched.close()
    time.sleep(0.5)
    assert process.is_alive()
    # The pipe closes, as it does when the trainer is killed.
    alive.close()
    process.join(30)
    assert process.exitcode == 1


def busy_generation(watched):
    import threading

    threading.Thread(target=workers.exit_with_trainer, args=(watched,), daemon=True).start()
    while True:
        sum(range(1000))
