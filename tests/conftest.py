"""What several test files share: forked ranks that talk over gloo, so that a distributed test costs
tenths of a second.

    python -m pytest                                  everything; where there is a GPU, its tests run in a process of their own
    python -m pytest --workers=1                      in one process (two where there are two cores: two_workers.py)
    python -m pytest -m device [--device=cuda]        the GPU's tests alone (where there is none: the CPU against itself)
"""

import functools
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
pytest_plugins = ["two_workers"]
VISIBLE_CARDS = os.environ.get("CUDA_VISIBLE_DEVICES")
# The files of the drivers of Nvidia, of AMD, and of Windows' Linux. torch is not asked: that could
# already be a use of the card, see pytest_configure.
HAS_CARD = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")))


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        default="auto",
        choices=("auto", "cuda", "cpu"),
        help="where the tests marked `device` run",
    )


def pytest_configure(config):
    """Hides the card from the tests of the CPU. They fork ranks, and that fails after a process has
    used CUDA: in its children CUDA does not work, and after a first backward autograd does not
    either."""
    config.addinivalue_line(
        "markers", "device: runs on a GPU (python -m pytest -m device), in a process without forks"
    )
    if config.getoption("markexpr") != "device":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config, items):
    """Deselects the tests marked `device` where there is a card: test_device.py starts a process of
    their own for them. Elsewhere they compare the CPU with itself, and are tests like any other."""
    if HAS_CARD and config.getoption("markexpr") != "device":
        left = [item for item in items if item.get_closest_marker("device")]
        items[:] = [item for item in items if not item.get_closest_marker("device")]
        config.hook.pytest_deselected(items=left)


def _rank(rank, world, folder, seconds, fn, args):
    """The body of one forked rank: joins the group, runs fn(rank, world, *args), and leaves the
    result or the traceback in a file"""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)

    # A BaseException counts too: the parent has to report whatever ended this rank.
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store", world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=seconds),
        )
        outcome = ("ok", fn(rank, world, *args))
    except BaseException:
        outcome = ("error", traceback.format_exc())

    # Write, then rename: the parent sees a whole result or none.
    torch.save(outcome, f"{folder}/part{rank}")
    os.rename(f"{folder}/part{rank}", f"{folder}/result{rank}")
    sys.stdout.flush()

    # _exit skips atexit and the teardown of the group: a rank that failed must not wait for others.
    os._exit(0 if outcome[0] == "ok" else 1)


def run_ranks(world, fn, *args, timeout=120, collective_timeout=30, may_die=()):
    """Fork `world` ranks in one gloo group and run fn(rank, world, *args) in each. Returns the list
    of their results by rank.

    If a rank raises or dies, this function raises at once with the traceback of that rank, and ends
    all others. Ranks in may_die may die (the fault tests do that on purpose); their result is
    None."""
    import torch
    import torch._dynamo  # noqa: F401  an optimizer imports it: once here, not in every child

    assert not torch.cuda.is_available(), "forked ranks and a card in sight: see pytest_configure"
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # needs no name for this machine

    # Flush first: a child would print what it inherits in a buffer once more.
    sys.stdout.flush(), sys.stderr.flush()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            get_context("fork").Process(
                target=_rank, args=(r, world, folder, collective_timeout, fn, args), daemon=True
            )
            for r in range(world)
        ]
        for process in ranks:
            process.start()

        # Collect the results. Whatever happens, no rank outlives this call.
        try:
            _wait(ranks, folder, time.monotonic() + timeout, may_die)
            return [
                None if r in may_die else torch.load(f"{folder}/result{r}", weights_only=False)[1]
                for r in range(world)
            ]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


def _wait(ranks, folder, deadline, may_die):
    """Returns when all ranks have ended well. Raises if one failed, or at the deadline."""
    import torch

    while True:
        # Ranks that ended with an exit code other than 0.
        failed = [
            r for r, p in enumerate(ranks) if p.exitcode not in (None, 0) and r not in may_die
        ]
        if failed:
            # One failing rank makes the others fail in their collectives. Wait a moment for all
            # files, and report the oldest: it is that of the rank that failed first.
            time.sleep(0.2)
            files = sorted(
                (
                    f
                    for f in Path(folder).glob("result*")
                    if torch.load(f, weights_only=False)[0] == "error"
                ),
                key=lambda f: f.stat().st_mtime,
            )
            if files:
                raise RuntimeError(
                    f"rank {files[0].name[6:]} failed\n{torch.load(files[0], weights_only=False)[1]}"
                )
            # Without a file a rank did not raise: it was killed.
            raise RuntimeError(f"rank {failed[0]} died with exit code {ranks[failed[0]].exitcode}")

        # All have ended, time is up, or look again.
        if all(p.exitcode is not None for p in ranks):
            return
        if time.monotonic() > deadline:
            alive = [r for r, p in enumerate(ranks) if p.exitcode is None]
            raise TimeoutError(f"ranks {alive} are still running")
        time.sleep(0.01)


@pytest.fixture(scope="session", autouse=True)
def texts_are_made_once():
    """Every tokenizer is trained on the same 1500 texts. They depend on their arguments alone, and
    to make them takes ten seconds."""
    import synth_tasks

    made = synth_tasks.example_texts
    synth_tasks.example_texts = functools.cache(made)
    yield
    synth_tasks.example_texts = made


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The folder of a run: pretrain, long and sft of a very small model, two steps each. Nothing may
    be trained in it: tests begin from it."""
    import train
    from small import FLAGS

    out = tmp_path_factory.mktemp("run")
    for stage in ("pretrain", "long", "sft"):
        train.main([*FLAGS, f"--stage={stage}", "--steps=2", f"--out={out}"])
    return out


@pytest.fixture
def answers(monkeypatch):
    """Tools without a workspace: any call gets an answer that depends on its name only. About every
    third call counts as slow (run_command), and the sampler answers slow calls from a thread."""

    from rollout import Tokenizer

    # The answer has 0 to 8 lines more, by the letters of the name.
    def run_tool(workspace, call):
        call.output = f"ran {len(call.name)} " + "ok\n" * (sum(map(ord, call.name)) % 9)

    monkeypatch.setattr("rollout.run_tool", run_tool)

    # An untrained policy calls tools by random names, so some are renamed to a slow tool.
    whole = Tokenizer.read_action

    def read(tokenizer, body):
        text, calls = whole(tokenizer, body)
        for call in calls:
            call.name = "run_command" if sum(map(ord, call.name)) % 3 == 0 else call.name
        return text, calls

    monkeypatch.setattr(Tokenizer, "read_action", read)
