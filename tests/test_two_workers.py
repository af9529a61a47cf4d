"""two_workers.py: what two workers report is what one process reports."""

import os
import re
import signal
import sys

import pytest

from commands import Command, run_command

SUITE = {
    # No test of this suite starts a command, so there is no process to fork them.
    "conftest.py": """
import commands
commands.connection = "not needed"
pytest_plugins = ["two_workers"]

def pytest_runtest_protocol(item):
    if item.name == "test_hook":
        raise ValueError("of the hook")
""",
    "test_a.py": """
import warnings
import pytest

@pytest.fixture(scope="module")
def shared():
    print("set up")
    yield 3
    print("taken down")

def test_passes(shared):
    warnings.warn("an old name", DeprecationWarning)

@pytest.mark.parametrize("number", [3, 4])
def test_number(shared, number):
    print("printed", number)
    assert number == shared

@pytest.mark.xfail
def test_known(shared):
    assert 0

def test_last(shared):
    pass
""",
    "test_b.py": """
import pytest

@pytest.fixture
def broken():
    raise OSError("no such thing")

def test_skipped():
    pytest.skip("not here")

def test_error(broken):
    pass

def test_number_too():
    assert {"a": 1} == {"a": 2}
""",
    "test_c.py": "def test_passes(tmp_path):\n    assert tmp_path.exists()\n",
}
# A file of each: what its test does to the process that runs it
FATAL = {
    "dies": "import os\ndef test_dies():\n    os._exit(7)\n",
    "hook": "def test_hook():\n    pass\n",
    "leaves": "import pytest\ndef test_leaves():\n    pytest.exit('enough')\n",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in SUITE.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def words_of(workers, *flags):
    return [sys.executable, "-m", "pytest", "--color=no", f"--workers={workers}", *flags]


def run_tests(folder, workers, *flags):
    """-> the exit code and the lines of the report, sorted, without times and progress"""
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__), "COLUMNS": "100"}
    # The reader's own flags are for the tests of this project, such as --durations, which name
    # folders and times.
    environment["PYTEST_ADDOPTS"] = ""
    done = run_command(words_of(workers, *flags), cwd=folder, env=environment)
    text = re.sub(r"\d+\.\d+s|\[ *\d+%\]", "", done.stdout + done.stderr)
    lines = [line.strip("=-! ") for line in text.splitlines()]
    # The dots of one process stand behind the name of their file.
    return done.returncode, sorted(
        line for line in lines if not re.search(r"^[\w.]* ?[.FEsx]+$", line)
    )


@pytest.mark.parametrize(
    "flags, code, words",
    [
        (["-v", "-rA"], 1, "printed 4"),
        (["-q"], 1, "OSError: no such thing"),
        (["-q", "-k", "passes"], 0, "DeprecationWarning: an old name"),
        (["-q", "-k", "nothing"], 5, "9 deselected"),
        (["-vv", "--durations=0"], 1, "test_c.py::test_passes"),
        (["-q", "test_a.py", "test_c.py", "--tb=no"], 1, "FAILED test_a.py::test_number[4]"),
    ],
)
def test_the_report_and_the_exit_code_are_those_of_one_process(flags, code, words, folder):
    one, two = (run_tests(folder, workers, *flags) for workers in (1, 2))
    assert one == two and one[0] == code
    assert any(words in line for line in one[1]), one[1]


def test_the_last_failures_are_kept_and_the_first_one_ends_a_run(folder):
    run_tests(folder, 2, "-q")
    one, two = (run_tests(folder, workers, "-q", "--lf") for workers in (1, 2))
    assert one == two and "2 failed, 1 error in" in one[1]
    code, lines = run_tests(folder, 2, "-q", "-x")
    # Each worker ends the test that it is at, which may fail, too.
    assert code == 1 and any(re.match("stopping after [12] failures", line) for line in lines)


@pytest.mark.parametrize(
    "how, code, says",
    [
        ("dies", 2, "a worker ended in test_dies.py::test_dies"),
        ("hook", 3, "ValueError: of the hook"),
        ("leaves", 2, "a worker ended in test_leaves.py::test_leaves"),
    ],
)
def test_a_worker_that_ends_ends_the_run_and_names_its_test(how, code, says, folder):
    (folder / f"test_{how}.py").write_text(FATAL[how])
    found, lines = run_tests(folder, 2, "-q")
    assert found == code and any(says in line for line in lines), lines


def test_after_a_signal_to_all_its_processes_fixtures_are_taken_down(folder):
    (folder / "test_waits.py").write_text("""
import pathlib, time
import pytest

@pytest.fixture
def made():
    place = pathlib.Path("made")
    place.touch()
    yield
    place.unlink()

def test_waits(made):
    time.sleep(60)
""")
    environment = os.environ | {"PYTHONPATH": os.path.dirname(__file__)}
    child = Command(words_of(2, "-q"), cwd=folder, env=environment, new_session=True)
    child.wait_for((folder / "made").exists)
    os.killpg(child.pid, signal.SIGINT)
    assert child.wait(30) == 2 and "KeyboardInterrupt" in child.stdout
    assert not (folder / "made").exists()
