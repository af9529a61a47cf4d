"""The README's commands and links: each names files, modules and flags that exist.

Running the commands takes hours; what is read here is what goes wrong when something is renamed.
"""

import importlib.util
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

import train
from commands import run_command
from command.flags import make_config_parser

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "benchmarks/README.md", "experiments/README.md")


def commands(readme):
    """The indented lines of a README that begin a program, as words without the comment. A line
    that ends in a backslash goes on in the next one."""
    text = (ROOT / readme).read_text().replace("\\\n", " ")
    found = []
    for line in text.split("\n"):
        for part in line.split(" && "):
            words = re.sub(r"\s#.*", "", part).split()
            if line.startswith("    ") and words and words[0] in ("python", "torchrun"):
                found.append(words)
    return found


def programs():
    """Every command of the READMEs as (program, its own flags): a file, or "-m" and a module"""
    for readme in READMES:
        for words in commands(readme):
            names = [i for i, word in enumerate(words) if word == "-m" or word.endswith(".py")]
            assert names, f"{readme}: {' '.join(words)} runs nothing"
            first = names[0] + (words[names[0]] == "-m")
            yield readme, words[first], words[first + 1 :]


def test_there_are_commands_to_read():
    assert len(list(programs())) > 30


@pytest.mark.parametrize("readme, program, words", list(programs()))
def test_a_command_names_a_program_and_flags_that_exist(readme, program, words):
    if program == "pytest":
        return
    if not program.endswith(".py"):
        assert importlib.util.find_spec(program), f"{readme}: no module {program}"
    else:
        assert (ROOT / program).is_file(), f"{readme}: no file {program}"
    if program == "train.py" and "--help" not in words:
        make_config_parser(train.Config).parse_args(words)


@pytest.mark.parametrize(
    "program", ["eval.py", "rollout.py", "synth_tasks.py", "benchmarks.plan", "benchmarks.gpu"]
)
def test_a_flag_of_another_program_is_one_that_its_help_names(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as end:
        if program.endswith(".py"):
            runpy.run_path(str(ROOT / program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__")
    assert not end.value.code
    helped = capsys.readouterr().out
    for readme, name, words in programs():
        if name == program:
            for word in words:
                flag = word.partition("=")[0]
                assert not flag.startswith("--") or flag in helped, f"{readme}: {flag}"


@pytest.mark.parametrize("readme", READMES)
def test_a_link_leads_to_a_file(readme):
    folder = (ROOT / readme).parent
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / readme).read_text()):
        if not target.startswith("http"):
            assert (folder / target).exists(), f"{readme}: {target}"


def test_every_file_that_the_readme_names_exists():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"`([\w/]+(?:\.py|\.md|/))`", text):
        # Files that a task holds, not this project.
        if name not in ("docs.md", "tests.py"):
            assert (ROOT / name).exists(), name


def test_what_the_readme_does_from_python_runs_as_it_stands(tmp_path):
    """Twice in one process, as a notebook does it: what a call changes in the process it puts
    back."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    again = code.replace("out/notebook", "out/again")
    check = (
        "\nimport os, signal\n"
        "assert 'RANK' not in os.environ and 'WORLD_SIZE' not in os.environ\n"
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\n"
    )
    (tmp_path / "cells.py").write_text(code + check + again + check)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    done = run_command([sys.executable, "cells.py"], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True\n<|user|>") and "def total(xs):" in done.stdout
    for name in ("notebook", "again"):
        assert (tmp_path / "out" / name / "curve.png").stat().st_size > 1000
