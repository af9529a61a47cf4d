"""Each exercise: its test is red in this project, and green in a copy where its solution is applied.

An exercise is a file with its text and its test, and a patch of the same name."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train
from commands import run_command

ROOT = Path(train.__file__).parent
EXERCISES = sorted(path.stem for path in (ROOT / "exercises").glob("*.patch"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy") / "nanocomposer"
    left_out = shutil.ignore_patterns(".git", "out", "__pycache__", ".*_cache", "*venv*")
    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder


def run_test(folder, name):
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"exercises/{name}.py"]
    return run_command([sys.executable, *words], cwd=folder)


def apply(folder, name, *flags):
    patch = f"exercises/{name}.patch"
    # Outside of any repository, as where the project was downloaded as an archive.
    command = ["git", f"--git-dir={folder}/none", "apply", *flags, patch]
    subprocess.run(command, cwd=folder, check=True)


def test_there_is_a_text_for_each_patch_and_no_other():
    files = {path.stem for path in (ROOT / "exercises").glob("*.py")} - {"__init__"}
    assert files == set(EXERCISES) and len(files) >= 4
    numbers = []
    for name in EXERCISES:
        text = " ".join((ROOT / "exercises" / f"{name}.py").read_text().split())
        numbers.append(int(re.match(r'"""(\d+)\. ', text)[1]))
        assert f"python -m pytest exercises/{name}.py" in text
        assert "Number to reach:" in text and "Look at:" in text
        assert f"{name}.py" in (ROOT / "README.md").read_text()
    assert sorted(numbers) == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_is_red_before_and_green_with_its_solution(name, copy):
    before = run_test(copy, name)
    assert before.returncode == 1 and " failed" in before.stdout, before.stdout
    apply(copy, name)
    try:
        after = run_test(copy, name)
        assert after.returncode == 0, after.stdout
    finally:
        apply(copy, name, "--reverse")
