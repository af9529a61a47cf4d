"""On a machine with a GPU what belongs to the CPU stays there: shown with a card that is not there
(pretend_cuda.py)."""

import os
import re
import sys
from pathlib import Path

import pytest

from commands import run_command

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def run_beside_a_card(code, folder):
    """python -c code, in a process that believes in a GPU and fails where it is touched -> the
    finished process"""
    environment = {
        name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(ROOT)])
    words = [sys.executable, "-c", f"import pretend_cuda\n{code}"]
    return run_command(words, cwd=folder, env=environment)


TOUCHES = """
import os, torch
def noticed(call):
    try:
        call()
    except pretend_cuda.CardTouched:
        return True
for call in (torch.cuda.current_stream, torch.cuda.synchronize, torch.cuda.get_device_name, lambda: torch.zeros(1, device="cuda")):
    assert noticed(call), call
backward = lambda: torch.ones(1, requires_grad=True).sum().backward()
backward()
child = os.fork()
if not child:
    os._exit(0 if noticed(backward) else 1)
assert os.waitpid(child, 0)[1] == 0, "a backward in a forked child, after one here"
"""


def test_the_card_that_is_not_there_is_noticed(tmp_path):
    """The other tests of this file rely on it."""
    done = run_beside_a_card(TOUCHES, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


# A demo -> what it ends with
DEMOS = {
    "hsdp": "CP=2 and EP=8 share 8 ranks",
    "muon": "differ from one process by 0.0",
    "moe": "out/moe.png",
    "rollout": "out/rollout.png",
    "eval": "Figures: out/demo/effort.png, out/demo/score.png.",
}


@pytest.mark.parametrize("file", DEMOS)
def test_a_demo_ends_with_its_numbers_whether_there_is_a_card_or_not(file, tmp_path):
    words = ["eval.py", "demo"] if file == "eval" else [f"{file}.py"]
    code = f"import runpy, sys; sys.argv = {words!r}; runpy.run_path({str(ROOT / file)!r} + '.py', run_name='__main__')"
    done = run_beside_a_card(code, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    # Of the last lines each may name a figure, which is there then.
    end = done.stdout[-600:]
    assert DEMOS[file] in end, end
    for path in re.findall(r"out/[\w/]+\.png", end):
        assert (tmp_path / path).stat().st_size > 5000


def test_a_checkpoint_of_cpu_tensors_asks_cuda_for_nothing(tmp_path):
    code = """
import hsdp, muon, torch
from command import checkpoints
model = hsdp.demo_model()
optimizer = muon.Muon([dict(params=[(n, p) for n, p in model.named_parameters() if p.ndim > 1])])
checkpoints.save_checkpoint("made", model, optimizer, {"step": 3})
assert checkpoints.load_checkpoint("made", model, optimizer)["step"] == 3
"""
    done = run_beside_a_card(code, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_forked_ranks_of_the_tests_see_no_card(tmp_path):
    """Tests that fork ranks, started as a person starts them on a machine with a GPU"""
    command = [
        "-q",
        "-p",
        "pretend_cuda",
        "-p",
        "no:cacheprovider",
        str(TESTS / "test_hsdp.py"),
        "-k",
        "when_a_rank_dies",
    ]
    done = run_beside_a_card(f"import pytest; raise SystemExit(pytest.main({command!r}))", ROOT)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]
