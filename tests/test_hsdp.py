"""hsdp.py against one process: 8 gloo ranks are forked once, run through every layout, and report
differences and bytes."""

import errno
import itertools
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import run_ranks
from torch.distributed.tensor import DTensor

import fast
import hsdp
from benchmarks import plan
from command import checkpoints, failures, launch
from fast import gpu_memory
from demos import comm_counter
from hsdp import Layout, parallelize
from moe import Model, ModelConfig, update_router_bias, mtp_loss
from muon import Muon
from small import EVEN_SIZES
from world.machine import MachineFailure

# (cp, ep, dp_replicate) on 8 ranks: every two of the three meet in all of their sizes. Then eight
# copies of the dense weights, none of them cut; and context parallelism over all eight ranks.
SIZES = [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 4, 1), (2, 4, 2), (1, 8, 2), (2, 8, 1)]
LAYOUTS = [Layout(8, *sizes) for sizes in [*SIZES, (1, 1, 8), (8, 4, 1)]]
# On a busy machine 8 ranks may keep each other waiting for longer than 25 seconds.
make_meshes = partial(hsdp.make_meshes, seconds=200)
CONFIG = ModelConfig(**EVEN_SIZES)


def build(config=CONFIG, seed=0):
    torch.manual_seed(seed)
    model = fast.accelerate(Model(config))
    for p in model.parameters():
        if not p.any():
            torch.nn.init.normal_(p, std=0.05)
    return model


def make_optimizer(model):
    named = list(model.named_parameters())
    matrices = [(n, p) for n, p in named if gpu_memory.is_muon(n, p.shape)]
    rest = [(n, p) for n, p in named if not gpu_memory.is_muon(n, p.shape)]
    optimizer = Muon(
        [
            dict(params=matrices, lr=0.02, weight_decay=0.01),
            dict(params=rest, algorithm="adamw", lr=3e-3),
        ],
        ns_dtype=torch.float32,
    )
    return optimizer


def forward_backward(model, meshes, step, length=32):
    """Masked next-token loss of 8 rows: ranks hold different numbers of counted tokens, some rows
    none."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, CONFIG.vocab, (8, length + 1), generator=generator)
    mask = (torch.rand(8, length, generator=generator) < 0.7) & (torch.arange(8) != 3)[:, None]
    mine = lambda t: hsdp.shard_sequence(t.chunk(meshes.layout.data)[meshes.data_rank], meshes)
    tokens, targets, counted = mine(rows[:, :-1]), mine(rows[:, 1:]), mine(mask)
    logits = model.logits(model(tokens, hsdp.local_positions(length, meshes)))
    nll = (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        * counted.flatten()
    )
    loss = nll.sum() / hsdp.all_reduce_sum(counted.sum())
    loss.backward()
    return float(hsdp.all_reduce_sum(loss.detach()))


def update(model, optimizer):
    norm = hsdp.clip_grad_norm(model, 0.3)
    optimizer.step()
    optimizer.zero_grad()
    update_router_bias(model, reduce=hsdp.all_reduce_sum)
    return float(norm)


def train(meshes, steps=2, recompute=False):
    """Two Muon steps, and the gradients of the third. -> losses and norms, whole gradients,
    whole state"""
    model = parallelize(build(), meshes)
    model.recompute = recompute
    optimizer, numbers = make_optimizer(model), []
    for step in range(steps):
        numbers += [forward_backward(model, meshes, step), update(model, optimizer)]
    numbers.append(forward_backward(model, meshes, steps))
    whole = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    return numbers, {n: whole(p.grad) for n, p in model.named_parameters()}, hsdp.full_state(model)


def distance(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def compare(mine, one):
    """(losses and norms, gradients relative to the largest entry of each tensor, weights, router
    biases)"""
    far = lambda a, b: float((a - b).abs().max())
    return (
        distance(mine[0], one[0]),
        max(far(mine[1][n], g) / float(g.abs().max()) for n, g in one[1].items()),
        max(far(mine[2][n], t) for n, t in one[2].items() if ".load" not in n),
        max(far(mine[2][n], t) for n, t in one[2].items() if n.endswith("bias")),
    )


def draft_gradients(meshes):
    """Gradients of the main loss and of the MTP head's, each rank on its rows."""
    model = parallelize(build(ModelConfig(**{**vars(CONFIG), "mtp": 1})), meshes)
    rows = torch.randint(
        0, CONFIG.vocab, (8, 17), generator=torch.Generator().manual_seed(5)
    ).chunk(meshes.layout.data)[meshes.data_rank]
    hidden = model(rows[:, :-1])
    nll = F.cross_entropy(model.logits(hidden).flatten(0, 1), rows[:, 1:].flatten())
    ((nll + mtp_loss(model, rows[:, :-1], hidden)) / meshes.layout.data).backward()
    return {
        n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for n, p in model.named_parameters()
    }


# ---------------------------------------------------------------- what the 8 ranks do


def eight(rank, world, one, folder):
    """Runs every check on one of 8 ranks. one: the results of one process, the oracle. -> {check:
    differences from it, or what the check reports}"""
    found = {}
    for layout in LAYOUTS:
        found[layout] = compare(train(make_meshes(**vars(layout))), one)
    for check in (refusals, nan_on_one_rank, bf16_wire, evaluation_between_steps, counted_bytes):
        found[check.__name__] = check(world)
    starved = zip(starved_gradients(make_meshes(8, 1, 4)), one[3], strict=True)
    found["starved"] = max(float((mine - alone).abs().max()) for mine, alone in starved)
    found["recomputed"] = compare(train(make_meshes(8, 2, 4), recompute=True), one)
    drafted = draft_gradients(make_meshes(8, 1, 4, 2))
    found["drafted"] = max(
        float((drafted[n] - g).abs().max() / g.abs().max()) for n, g in one[4].items()
    )
    found["saved"] = save_and_go_on(make_meshes(8, 2, 8), folder)
    return found


def refusals(world):
    """Every bad size is refused on every rank, and the ranks can still talk to each other
    afterwards."""
    messages = []
    few = ModelConfig(**{**vars(CONFIG), "experts": 6, "expert_ffn": 12})
    for attempt in (
        lambda: make_meshes(world, cp=3),
        lambda: make_meshes(world, ep=16),
        lambda: make_meshes(world + 1),
        lambda: parallelize(build(few), make_meshes(world, ep=4)),
        lambda: parallelize(build(few), make_meshes(world, ep=1)),
        lambda: parallelize(build(seed=dist.get_rank()), make_meshes(world)),
    ):
        with pytest.raises(ValueError) as refusal:
            attempt()
        messages.append(str(refusal.value))
    assert float(hsdp.all_reduce_sum(1.0)) == world
    return messages


def nan_on_one_rank(world):
    """What the last rank's NaN is called on each rank"""
    meshes = make_meshes(world)
    model = parallelize(build(), meshes)
    forward_backward(model, meshes, 0)
    if meshes.rank == world - 1:
        model.layers[0].attn.wo.grad.to_local().fill_(math.nan)
    with pytest.raises(ValueError) as refusal:
        hsdp.clip_grad_norm(model)
    return str(refusal.value).partition(": ")[2]


def starved_gradients(meshes):
    """All tokens to two experts: most ranks get no row, and still take part."""
    model = build()
    model.layers[1].ffn.router.bias[:2] = 9.0
    model = parallelize(model, meshes)
    forward_backward(model, meshes, 0)
    return [p.grad.full_tensor() if meshes.dense else p.grad for p in model.parameters()]


def bf16_wire(world):
    """One step in three ways: weights gathered in fp32, cast to bf16 before they are gathered, and
    kept in bf16. -> difference of the loss between the first two; bytes gathered in the first, in
    the second, as planned; bytes of gradients (always fp32) in the first, in the third, as
    planned"""
    out = []
    for wire, kept in (
        (None, torch.float32),
        (torch.bfloat16, torch.float32),
        (None, torch.bfloat16),
    ):
        meshes, model = make_meshes(world, 1, 4), build()
        for p in model.parameters():
            p.data = p.data.to(kept)
        model = parallelize(model, meshes, wire=wire).compute_in(torch.bfloat16)
        with comm_counter.CommCounter() as counter:
            out.append(
                (
                    forward_backward(model, meshes, 0),
                    counter.bytes["all-gather"],
                    counter.bytes["reduce-scatter"],
                )
            )
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    rows = plan.comm_traffic(CONFIG, shapes, meshes.layout, gpu_memory.Step(tokens=32, weight=2))
    planned = [
        sum(size for kind, _, size, _ in rows if kind == one)
        for one in ("all-gather", "reduce-scatter")
    ]
    return (
        abs(out[0][0] - out[1][0]),
        (out[0][1], out[1][1], planned[0]),
        (out[0][2], out[2][2], planned[1]),
    )


def evaluation_between_steps(world):
    """A forward without backward leaves the root gathered; the step after it must not train on what
    was gathered then."""
    meshes, losses = make_meshes(world, 2, 2), []
    for evaluate in (False, True):
        model = parallelize(build(), meshes)
        optimizer = make_optimizer(model)
        forward_backward(model, meshes, 0)
        if evaluate:
            with torch.no_grad():
                model.eval()(torch.zeros(1, 16, dtype=torch.long), hsdp.local_positions(32, meshes))
            model.train()
        update(model, optimizer)
        losses.append(forward_backward(model, meshes, 1))
    return abs(losses[0] - losses[1])


def counted_bytes(world):
    """{layout: {collective: (counted, planned)}} of one step with Muon, mean over ranks. It has
    more tokens than the other checks, because the number of rows that leave a rank is random."""
    found, length = {}, 256
    for layout in (Layout(8, 2, 8), Layout(8, 2, 4, 2), Layout(8, 1, 2, 1), Layout(8, 2, 2, 4)):
        meshes = make_meshes(**vars(layout))
        model = parallelize(build(), meshes)
        optimizer = make_optimizer(model)
        with comm_counter.CommCounter() as wire:
            forward_backward(model, meshes, 0, length)
            update(model, optimizer)
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        planned = dict.fromkeys(comm_counter.CommCounter.KINDS.values(), 0)
        for kind, _, size, _ in plan.comm_traffic(
            CONFIG, shapes, layout, gpu_memory.Step(8 * length // world, 4, 4, 4)
        ):
            planned[kind] += size
        found[layout] = {
            k: (float(hsdp.all_reduce_sum(float(wire.bytes[k]))) / world, planned[k])
            for k in planned
        }
    return found


def save_and_go_on(meshes, folder):
    """Two steps, a checkpoint, a third step. -> whole states at the checkpoint and after, momenta
    at the checkpoint"""
    model = parallelize(build(), meshes)
    optimizer = make_optimizer(model)
    for step in range(2):
        forward_backward(model, meshes, step)
        update(model, optimizer)
    checkpoints.save_checkpoint(folder, model, optimizer, {"step": 2, "config": vars(CONFIG)})
    states = [hsdp.full_state(model), whole_optimizer(model, optimizer)]
    forward_backward(model, meshes, 2)
    update(model, optimizer)
    return [*states, hsdp.full_state(model)]


def load_and_go_on(meshes, folder):
    """Loads that checkpoint in another layout, over other weights, and takes the third step -> the
    same states as save_and_go_on"""
    model = parallelize(build(seed=5), meshes)
    optimizer = make_optimizer(model)
    extra = checkpoints.load_checkpoint(folder, model, optimizer)
    states = [hsdp.full_state(model), whole_optimizer(model, optimizer)]
    forward_backward(model, meshes, extra["step"])
    update(model, optimizer)
    return [*states, hsdp.full_state(model)]


def whole_optimizer(model, optimizer):
    whole = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
    return {
        f"{n}/{k}": whole(v)
        for n, p in model.named_parameters()
        for k, v in optimizer.state[p].items()
    }


def four(rank, world, folder):
    return [load_and_go_on(make_meshes(4, *sizes), folder) for sizes in ((1, 2, 2), (2, 4, 1))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoint") / "good"


@pytest.fixture(scope="module")
def found(folder):
    """What rank 0 of the 8 ranks reports, and what all of them refuse"""
    answers = run_ranks(
        8,
        eight,
        (*train(make_meshes()), starved_gradients(make_meshes()), draft_gradients(make_meshes())),
        folder,
        timeout=500,
        collective_timeout=200,
    )
    of_all = {name: [a[name] for a in answers] for name in ("refusals", "nan_on_one_rank")}
    return {**answers[0], **of_all}


# ---------------------------------------------------------------- equality with one process


@pytest.mark.parametrize("what", [*LAYOUTS, "recomputed"], ids=str)
def test_eight_ranks_equal_one_process_after_two_muon_steps(found, what):
    losses, gradients, weights, biases = found[what]
    assert losses <= 1e-6 and gradients <= 1e-5 and weights <= 1e-5 and biases == 0


def test_a_rank_whose_experts_get_no_token_still_takes_part(found):
    assert found["starved"] < 1e-6


def test_the_drafting_heads_gradients_equal_one_process_too(found):
    assert found["drafted"] < 1e-5


def test_a_bf16_wire_changes_no_number_and_saves_bytes(found):
    difference, (fp32, bf16, planned), gradients = found["bf16_wire"]
    assert difference == 0 and bf16 < 0.7 * fp32 and abs(bf16 - planned) < 0.02 * bf16
    assert gradients[0] == gradients[1] and abs(gradients[1] - gradients[2]) < 0.02 * gradients[2]


def test_an_evaluation_between_backward_and_step_leaves_no_stale_weights(found):
    assert found["evaluation_between_steps"] == 0


def test_one_process_is_left_alone_and_needs_no_group():
    model, meshes = build(), make_meshes(1)
    before = [id(p) for p in model.parameters()]
    assert parallelize(model, meshes) is model and [id(p) for p in model.parameters()] == before
    tokens = torch.arange(10)[None]
    assert (
        hsdp.shard_sequence(tokens, meshes) is tokens and hsdp.local_positions(10, meshes) is None
    )
    assert float(hsdp.all_reduce_sum(3)) == 3 and not dist.is_initialized()


def test_the_gradient_norm_is_torchs_on_one_process():
    mine, theirs = build(), build()
    for model in (mine, theirs):
        forward_backward(model, make_meshes(), 0)
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    torch.testing.assert_close(hsdp.clip_grad_norm(mine, 0.1), norm)
    for a, b in zip(mine.parameters(), theirs.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_gradient_is_refused_by_name_before_anything_changes(value):
    model = torch.nn.ModuleDict({"good": torch.nn.Linear(2, 2), "bad": torch.nn.Linear(2, 2)})
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e30)
    # large is not infinite
    assert hsdp.clip_grad_norm(model) == pytest.approx(1e30 * 12**0.5)
    model["bad"].weight.grad[1, 0] = value
    with pytest.raises(ValueError, match=r"NaN or infinite: bad\.weight$"):
        hsdp.clip_grad_norm(model, 1.0)
    assert torch.equal(model["good"].bias.grad, torch.full((2,), 1e30))


def test_a_nan_is_refused_on_the_ranks_whose_own_shard_is_fine_too(found):
    assert found["nan_on_one_rank"] == 7 * ["on another rank"] + ["layers.0.attn.wo"]


def test_zigzag_deals_every_position_once_and_every_rank_the_same_number_of_keys():
    for cp in (1, 2, 4, 8):
        parts = [hsdp.zigzag_positions(64, cp, rank) for rank in range(cp)]
        assert sorted(torch.cat(parts).tolist()) == list(range(64))
        # a query at position p sees p + 1 keys
        assert len({int((part + 1).sum()) for part in parts}) == 1
    assert hsdp.zigzag_positions(8, 2, 0).tolist() == [0, 1, 6, 7]


# ---------------------------------------------------------------- what does not fit, and ranks that die


def test_sizes_that_do_not_fit_are_refused_on_every_rank_with_one_clear_line(found):
    cp, ep, world, experts, rows, seeds = found["refusals"][0]
    assert "dp_replicate=1 x cp=3 does not divide the 8 ranks" == cp
    assert "ep=16 does not divide the 8 ranks" == ep
    assert "world=9, but the process group has 8 ranks" == world
    assert "ep=4 does not divide the 6 experts" == experts
    assert (
        "efsdp=8 does not divide the 12 rows of layers.1.ffn.experts.w_gate" == rows
        and "different weights" in seeds
    )
    assert all("\n" not in line for line in found["refusals"][0])
    assert all(refusals == found["refusals"][0] for refusals in found["refusals"])


def test_a_sequence_that_cp_cannot_cut_is_refused():
    with pytest.raises(ValueError, match="sequence of 30 tokens cannot be cut in 2 x cp=2"):
        hsdp.zigzag_positions(30, 2, 0)


def dies(rank, world):
    meshes = hsdp.make_meshes(world, 2, 4)
    model = parallelize(build(), meshes)
    start = time.monotonic()
    try:
        with failures.report_rank_failure():
            for step in range(1000):
                if rank == 2 and step == 1:
                    os._exit(9)
                forward_backward(model, meshes, step)
    except MachineFailure as error:
        return str(error), time.monotonic() - start


def test_when_a_rank_dies_the_others_say_so_within_30_seconds():
    answers = run_ranks(4, dies, timeout=60, may_die=(2,))
    for rank in (0, 1, 3):
        message, seconds = answers[rank]
        assert (
            message.startswith(f"rank {rank} of 4: another rank died")
            and "\n" not in message
            and seconds < 30
        )


def hangs(rank, world):
    meshes = make_meshes(world, 1, 4, seconds=2)
    model = parallelize(build(), meshes)
    start = time.monotonic()
    try:
        with failures.report_rank_failure():
            if rank == 2:
                time.sleep(6)
            forward_backward(model, meshes, 0)
    except MachineFailure as error:
        return str(error), time.monotonic() - start


def test_a_rank_that_stops_answering_is_not_waited_for_longer_than_the_patience():
    answers = run_ranks(4, hangs, collective_timeout=20)
    for rank in (0, 1, 3):
        message, seconds = answers[rank]
        assert "another rank died or stopped answering" in message and seconds < 20


# ---------------------------------------------------------------- checkpoints


def test_a_checkpoint_of_8_ranks_goes_on_the_same_on_4_and_on_1(found, folder):
    here = load_and_go_on(make_meshes(), folder)
    for other in (*run_ranks(4, four, folder, collective_timeout=200)[0], here):
        # weights and optimizer as saved: bit for bit
        for mine, saved in zip(other[:2], found["saved"][:2]):
            assert mine.keys() == saved.keys() and all(
                torch.equal(mine[n], t) for n, t in saved.items()
            )
        for name, t in found["saved"][2].items():  # one step later
            if ".load" not in name:
                torch.testing.assert_close(other[2][name], t, rtol=0, atol=2e-6)
    assert checkpoints.load_extra(folder)["config"] == vars(CONFIG)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of one process at step 1."""
    model = build()
    optimizer = make_optimizer(model)
    checkpoints.save_checkpoint(tmp_path / "run", model, optimizer, {"step": 1})
    return tmp_path / "run", model, optimizer


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "everything"])
def test_a_damaged_checkpoint_is_refused_with_one_clear_line(saved, damage):
    folder, model, optimizer = saved
    part = next(folder.glob("*.distcp"))
    if damage == "truncate":
        part.write_bytes(part.read_bytes()[:-7])
    elif damage == "remove":
        part.unlink()
    elif damage == "manifest":
        (folder / "manifest.json").unlink()
    else:
        folder = folder.with_name("nothing")
    with pytest.raises(ValueError) as refusal:
        checkpoints.load_checkpoint(folder, model, optimizer)
    assert str(folder) in str(refusal.value) and "\n" not in str(refusal.value)


def test_the_good_checkpoint_stays_until_the_next_one_is_complete(saved, monkeypatch):
    """Ended while writing, before either rename or after: what load() finds is whole, and the next
    save works again."""
    folder, model, optimizer = saved
    for name in ("save", "rename 1", "rename 2"):
        with monkeypatch.context() as patch:
            calls = []

            def ended(path, *rest, **named):
                # torch renames files as well
                calls.extend([path] if name == "save" or path.name.startswith("run") else [])
                if name == f"rename {len(calls)}" or name == "save":
                    raise KeyboardInterrupt
                return rename(path, *rest)

            rename = type(folder).rename
            patch.setattr(
                *((checkpoints.dcp, "save") if name == "save" else (type(folder), "rename")), ended
            )
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save_checkpoint(folder, model, optimizer, {"step": 2})
        assert checkpoints.load_checkpoint(folder, model, optimizer) == {
            "step": 1
        } and checkpoints.load_extra(folder) == {"step": 1}
    checkpoints.save_checkpoint(folder, model, optimizer, {"step": 3})
    assert checkpoints.load_checkpoint(folder, model, optimizer) == {"step": 3}
    assert [p.name for p in folder.parent.iterdir()] == ["run"]


def save_held_up(monkeypatch, *arguments, where=(checkpoints, "run_dcp"), when=lambda *_: True):
    """A save in the background that stops at a call of a function -> (an event: it is there, an
    event that lets it go on)"""
    there, go_on, right = threading.Event(), threading.Event(), getattr(*where)

    def wait(*args, **named):
        if when(*args):
            there.set()
            assert go_on.wait(60)
        return right(*args, **named)

    monkeypatch.setattr(*where, wait)
    checkpoints.save_checkpoint(*arguments, in_background=True)
    return there, go_on


def save_while_training(rank, world, folder, sizes):
    """A step, a save in the background, and a step before anything of it is written -> the whole
    states: at the save, later, and as read back; the sums of the files; those of a plain save"""
    meshes = make_meshes(world, **sizes)
    model = parallelize(build(), meshes)
    optimizer = make_optimizer(model)
    forward_backward(model, meshes, 0)
    update(model, optimizer)

    # The ranks meet in both steps while the other thread waits, or meets too.
    whole = lambda: [hsdp.full_state(model), whole_optimizer(model, optimizer)]
    extra, before = {"step": 1, "source": [1]}, whole()
    checkpoints.save_checkpoint(f"{folder}/plain", model, optimizer, extra)
    with pytest.MonkeyPatch.context() as patch:
        _, go_on = save_held_up(patch, f"{folder}/run", model, optimizer, extra)
        extra["source"].append(2)
        forward_backward(model, meshes, 1)
        update(model, optimizer)
        after = whole()
        assert not os.path.exists(f"{folder}/run")
        go_on.set()
        forward_backward(model, meshes, 2)
        checkpoints.finish_save()

    assert checkpoints.load_checkpoint(f"{folder}/run", model, optimizer)["source"] == [1]
    sums = []
    for name in ("run", "plain"):
        manifest = json.loads(Path(folder, name, "manifest.json").read_text())
        sums.append({file: entry for file, entry in manifest.items() if file.endswith("distcp")})
    return [before, after, whole(), *sums]


@pytest.mark.parametrize("world, sizes", [(1, {}), (2, {}), (4, dict(cp=2, ep=2))])
def test_training_goes_on_while_what_it_had_at_the_call_is_saved(world, sizes, tmp_path):
    for before, after, read, sums, plain_sums in run_ranks(
        world, save_while_training, str(tmp_path), sizes
    ):
        for at_call, later, found in zip(before, after, read):
            assert all(torch.equal(found[name], t) for name, t in at_call.items())
            assert not any(torch.equal(later[name], t) for name, t in at_call.items() if t.ndim > 1)
        assert len(sums) == world and sums == plain_sums


def kill_while_saving(rank, world, folder, where):
    model = parallelize(build(), make_meshes(world))
    checkpoints.save_checkpoint(folder, model, None, {"step": 1})
    # The second of the two renames; torch renames files as well.
    where = (Path, "rename") if where == "rename" else (checkpoints, where)
    when = lambda *args: where[0] is not Path or args[0].name == "run.part"
    with pytest.MonkeyPatch.context() as patch:
        arguments = folder, model, None, {"step": 2}
        there, _ = save_held_up(patch, *arguments, where=where, when=when)
        # Only rank 0 renames. Its neighbour, which waits for it, is killed a little later.
        there.wait(60 if rank == 0 else 2)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("where", ["run_dcp", "describe_file", "wait_for_files", "rename"])
def test_killed_while_it_is_written_in_the_background_the_checkpoint_before_is_whole(
    where, tmp_path
):
    folder, model = tmp_path / "run", build()
    run_ranks(2, kill_while_saving, str(folder), where, may_die=(0, 1))
    assert Path(f"{folder}.part").exists()
    assert checkpoints.load_checkpoint(folder, model) == {"step": 1}
    checkpoints.save_checkpoint(folder, model, None, {"step": 3}, in_background=True)
    checkpoints.finish_save()
    assert checkpoints.load_checkpoint(folder, model) == {"step": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_save_is_waited_for_at_the_next_one_at_the_end_and_after_an_error(saved, monkeypatch):
    folder, model, optimizer = saved
    step = lambda: checkpoints.load_extra(folder)["step"]
    _, go_on = save_held_up(monkeypatch, folder, model, optimizer, {"step": 2})
    threading.Timer(0.3, go_on.set).start()
    assert step() == 1
    with checkpoints.saves_finished():
        checkpoints.save_checkpoint(folder, model, optimizer, {"step": 3}, in_background=True)
        assert step() >= 2
    assert step() == 3

    # What ended the work is told, whether the disk took what was saved or not.
    for write, number in ((checkpoints.write_synced, 4), (full, 5)):
        monkeypatch.setattr(checkpoints, "write_synced", write)
        _, go_on = save_held_up(monkeypatch, folder, model, optimizer, {"step": number})
        threading.Timer(0.3, go_on.set).start()
        with pytest.raises(ZeroDivisionError), checkpoints.saves_finished():
            1 / 0
        assert step() == 4 and not checkpoints.save_under_way


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(saved):
    other = build(ModelConfig(**{**vars(CONFIG), "dim": 48}))
    with pytest.raises(ValueError, match="not one of this model"):
        checkpoints.load_checkpoint(saved[0], other)
    with pytest.raises(ValueError, match="optimizer.*missing here"):
        # it makes its state in the first step
        checkpoints.load_checkpoint(saved[0], saved[1], torch.optim.AdamW(saved[1].parameters()))


def test_saving_a_million_parameters_takes_less_than_three_tenths_of_a_second(tmp_path):
    model = Model(ModelConfig(vocab=1024, layers=2))
    optimizer, seconds = make_optimizer(model), []
    for _ in range(3):
        start = time.monotonic()
        checkpoints.save_checkpoint(tmp_path / "run", model, optimizer)
        seconds.append(time.monotonic() - start)
    assert sum(p.numel() for p in model.parameters()) > 0.8e6 and min(seconds) < 0.3


# ---------------------------------------------------------------- planner


def test_the_planner_agrees_within_two_percent_with_bytes_counted_on_eight_ranks(found):
    for layout, kinds in found["counted_bytes"].items():
        for kind, (counted, planned) in kinds.items():
            assert abs(counted - planned) <= 0.02 * counted + 200, (layout, kind, counted, planned)


# ---------------------------------------------------------------- bf16 weights: sums in fp32


def bf16_gradients(rank, world, micro_batches, **sizes):
    """The gradients of equal micro-batches, summed; whole, on every rank."""
    meshes, model = make_meshes(world, **sizes), hsdp.demo_model()
    for p in model.parameters():
        p.data = p.data.bfloat16()
    replicas = meshes.layout.shard == 1
    if not replicas:
        model = parallelize(model, meshes)
    hsdp.keep_gradients_in_fp32(model)
    for _ in range(micro_batches):
        hsdp.forward_backward(model, meshes)
    if replicas:
        hsdp.sum_gradients(model)
    hsdp.clip_grad_norm(model)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return {
        n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
        for n, p in model.named_parameters()
    }


def bf16_gradients_in(rank, world, sizes):
    return [bf16_gradients(rank, world, number, **sizes) for number in (16, 1)]


@pytest.mark.parametrize(
    "world, sizes", [(1, {}), (2, {}), (2, dict(ep=2)), (2, dict(dp_replicate=2))]
)
def test_gradients_of_bf16_weights_add_up_in_fp32_over_micro_batches(world, sizes):
    # 16 equal micro-batches are 16 times one: exact in fp32, while a sum in bf16 loses 0.8 per
    # cent.
    found = run_ranks(world, bf16_gradients_in, sizes)
    many, one = found[0]
    for name in one:
        assert torch.equal(many[name], found[-1][0][name])
        assert (many[name] - 16 * one[name]).norm() <= 1e-5 * (16 * one[name]).norm(), name


def ranks_add_up(rank, world):
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    module = torch.nn.Module()
    module.p = p
    hsdp.keep_gradients_in_fp32(module)
    p.grad = torch.tensor([256.0, 1.0, 0.1]) if rank == 0 else torch.tensor([1.0, 1.0, 0.1])
    hsdp.sum_gradients(module)
    return p.grad


def test_the_sum_over_ranks_of_bf16_weights_is_in_fp32():
    # Added up in bf16, 256 + 1 + 1 stays 256.
    for grad in run_ranks(3, ranks_add_up):
        assert torch.allclose(grad, torch.tensor([258.0, 3.0, 0.3]))


# ---------------------------------------------------------------- checkpoints: full disks, damage, strangers


def full(*args, **named):
    raise OSError(errno.ENOSPC, "No space left on device")


def zip_writer_fails(*args, **named):
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.parametrize("told_by", ["the call", "the wait", "the next save"])
@pytest.mark.parametrize(
    "where, name, failure",
    [
        (os, "fsync", full),
        (checkpoints, "write_synced", full),
        (checkpoints, "describe_file", full),
        (torch, "save", zip_writer_fails),
        (checkpoints.dcp.filesystem.pickle, "dump", full),
    ],
)
def test_a_full_disk_is_one_line_and_costs_nothing_that_was_saved(
    saved, monkeypatch, where, name, failure, told_by
):
    folder, model, optimizer = saved
    save = partial(checkpoints.save_checkpoint, folder, model, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failure)
        if told_by != "the call":
            save({"step": 2}, in_background=True)
        with pytest.raises(checkpoints.SaveFailed) as refusal:
            checkpoints.finish_save() if told_by == "the wait" else save({"step": 3})
    text = str(refusal.value)
    assert (
        "the disk is full" in text
        and str(folder) in text
        and "\n" not in text
        and "Traceback" not in text
    )
    # What was half written has given its space back, and the one before is whole.
    assert [p.name for p in folder.parent.iterdir()] == ["run"]
    assert checkpoints.load_checkpoint(folder, model, optimizer) == {"step": 1}
    checkpoints.save_checkpoint(folder, model, optimizer, {"step": 3})
    assert checkpoints.load_checkpoint(folder, model, optimizer) == {"step": 3}


def one_disk_is_full(rank, world, folder, in_background):
    """-> what each rank is told when one of them cannot write, at different moments, and what is
    there afterwards"""
    model, told = parallelize(build(), make_meshes(world)), []
    checkpoints.save_checkpoint(folder, model, None, {"step": 1})
    for failing, (where, name) in itertools.product(
        range(world), ((os, "fsync"), (checkpoints, "describe_file"), (checkpoints, "write_synced"))
    ):
        right = getattr(where, name)
        setattr(where, name, full if rank == failing else right)
        try:
            checkpoints.save_checkpoint(
                folder, model, None, {"step": 2}, in_background=in_background
            )
            checkpoints.finish_save()
            told.append("saved")
        except checkpoints.SaveFailed as error:
            told.append(str(error))
        setattr(where, name, right)
        told.append(checkpoints.load_checkpoint(folder, model)["step"])
        checkpoints.save_checkpoint(folder, model, None, {"step": 1})
    return told


@pytest.mark.parametrize("in_background", [False, True])
def test_all_ranks_are_told_that_one_disk_is_full(in_background, tmp_path):
    first, second = run_ranks(2, one_disk_is_full, str(tmp_path / "run"), in_background)
    assert first == second
    # Files that rank 0 alone writes cannot fail on rank 1.
    assert [t if t == "saved" else "the disk is full" in t for t in first[::2]] == [True] * 5 + [
        "saved"
    ]
    assert first[1::2] == [1] * 5 + [2]


def save_on_a_disk_of_ones_own(rank, world, folder):
    """-> what the save says on each rank, and whether the checkpoint before it is whole"""
    os.makedirs(f"{folder}/{rank}")
    os.chdir(f"{folder}/{rank}")
    model = parallelize(build(), make_meshes(world))
    checkpoints.SEEN_AFTER = 0.5
    shared = f"{folder}/shared"
    checkpoints.save_checkpoint(shared, model, extra={"step": 1})
    os.symlink(shared, "run")
    try:
        # The folder that is there is shared; the one that is written beside it is not.
        checkpoints.save_checkpoint("run", model, extra={"step": 2})
        return "saved"
    except checkpoints.SaveFailed as error:
        return str(error), checkpoints.load_extra("run")["step"], os.listdir(".")


def test_a_save_to_a_disk_of_each_rank_fails_on_all_and_the_good_checkpoint_stays(tmp_path):
    first, second = run_ranks(2, save_on_a_disk_of_ones_own, str(tmp_path))
    assert first == second and first[1:] == (1, ["run"])
    assert "not every rank sees this folder" in first[0] and "\n" not in first[0]


def meet_one_that_ends(rank, world, port):
    """What rank 0 says when the rank that it has started has joined it at the port, and ends before
    it can be connected"""
    dist.destroy_process_group()
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    code = "import os, torch.distributed as dist\n"
    code += f"dist.TCPStore('127.0.0.1', {port}, 2, False)\nos._exit(3)"
    launch.child_processes.append(subprocess.Popen([sys.executable, "-c", code]))
    try:
        return launch.watch_ranks(lambda: hsdp.join_process_group("cpu", 600))
    except MachineFailure as failure:
        return str(failure)


def test_a_rank_that_ends_just_after_it_has_joined_is_not_waited_for():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (said,) = run_ranks(1, meet_one_that_ends, port, timeout=60)
    assert said == "rank 1 ended with exit code 3 before it had joined the others"


def spoil(path, how):
    """Changes bytes of a file and keeps its size"""
    data = bytearray(path.read_bytes())
    if how == "zeros":
        data[:] = bytes(len(data))
    elif how == "garbage":
        data[:] = (
            torch.randint(256, (len(data),), generator=torch.Generator().manual_seed(0))
            .to(torch.uint8)
            .numpy()
            .tobytes()
        )
    elif how == "a page of zeros":
        middle = len(data) // 2
        data[middle : middle + 512] = bytes(len(data[middle : middle + 512]))
    else:
        for place in range(0, len(data), max(1, len(data) // 64)):
            data[place] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["zeros", "garbage", "a page of zeros", "flipped"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "extra.pt"])
def test_other_bytes_of_the_right_size_are_refused_before_anything_is_loaded(saved, name, how):
    folder, model, optimizer = saved
    spoil(folder / name, how)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with torch.no_grad():
        [p.zero_() for p in model.parameters()]
    with pytest.raises(checkpoints.DamagedCheckpoint) as refusal:
        checkpoints.load_checkpoint(folder, model, optimizer)
    told = str(refusal.value)
    assert f"{name} holds other bytes" in told and "\n" not in told
    # What to do about it
    assert told.endswith(checkpoints.DAMAGED)
    assert not any(p.any() for p in model.parameters()) and any(t.any() for t in before.values())


def renew_manifest(folder):
    """The manifest as whoever can write the folder can write it: with the checksums of what is
    there now"""
    names = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(
        json.dumps({name: checkpoints.describe_file(folder / name) for name in names})
    )


@pytest.mark.parametrize("how", ["zeros", "garbage"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "extra.pt"])
def test_damage_is_one_line_where_the_checksums_are_those_of_the_damage_too(saved, name, how):
    folder, model, optimizer = saved
    spoil(folder / name, how)
    renew_manifest(folder)
    with pytest.raises(checkpoints.DamagedCheckpoint) as refusal:
        checkpoints.load_checkpoint(folder, model, optimizer)
    assert str(folder) in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/hostname", "sub/file", "..", "", "sub\\file", "__0_0.distcp/../../secret"],
)
def test_a_manifest_that_names_files_outside_its_folder_is_refused(saved, name):
    folder, model, optimizer = saved
    (folder.parent / "secret").write_text("x")
    raw = json.loads((folder / "manifest.json").read_text())
    size = 1 if "secret" in name else os.path.getsize("/etc/hostname") if "hostname" in name else 0
    (folder / "manifest.json").write_text(json.dumps({**raw, name: {"bytes": size, "crc32": ""}}))
    for way in (
        lambda: checkpoints.load_checkpoint(folder, model, optimizer),
        lambda: checkpoints.load_extra(folder),
    ):
        with pytest.raises(checkpoints.DamagedCheckpoint, match="not to be trusted|damaged"):
            way()


@pytest.mark.parametrize(
    "manifest",
    [
        '{"a": "b"}',
        '{"a": {"size": 1}}',
        '{"a": 1}',  # a size alone
        '{"a": {"bytes": 1}}',
        '{"a": {"bytes": true, "crc32": ""}}',
        '{"a": null}',
        '{"a": true}',
        *("[" * 100_000, "[]", "null", "{}", "{"),
        '{"extra.pt": 1e400}',
    ],
)
def test_a_manifest_of_odd_values_is_refused(saved, manifest):
    (saved[0] / "manifest.json").write_text(manifest)
    with pytest.raises(checkpoints.DamagedCheckpoint, match="no readable manifest"):
        checkpoints.load_checkpoint(*saved)


class Runs:
    """A hostile pickle: whoever unpickles it calls what it was given."""

    def __init__(self, call, *args):
        self.call = call, args

    def __reduce__(self):
        return self.call


def replace_metadata(folder, content):
    """Replaces .metadata as a stranger could: the manifest names the new file's checksum."""
    (folder / ".metadata").write_bytes(
        content if isinstance(content, bytes) else pickle.dumps(content)
    )
    renew_manifest(folder)


@pytest.mark.parametrize(
    "kind",
    [
        "system",
        "eval",
        "dotted",
        "torch function",
        "load",
        "inside",
        "bytes entry",
        "other file",
        "transform",
    ],
)
def test_metadata_of_a_stranger_runs_nothing(saved, kind, tmp_path):
    folder, model, optimizer = saved
    here = checkpoints.dcp.FileSystemReader(folder).read_metadata()
    mark = tmp_path / "ran"
    if kind == "bytes entry":  # torch would unpickle that, whatever is in it
        here.state_dict_metadata["model.embed.weight"] = (
            checkpoints.dcp.metadata.BytesStorageMetadata()
        )
    elif kind in ("other file", "transform"):
        for place in here.storage_data.values():
            if kind == "other file":
                place.relative_path = "../elsewhere"
            else:
                place.transform_descriptors = ["zstd"]
    elif kind == "inside":
        here.planner_data = Runs(os.system, f"touch {mark}")
    else:
        here = {
            "system": Runs(os.system, f"touch {mark}"),
            "eval": Runs(eval, f"open({str(mark)!r}, 'w')"),
            "dotted": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c"
            + bytes([len(f"touch {mark}")])
            + f"touch {mark}".encode()
            + b"\x85R.",
            "torch function": Runs(torch.save, 1, str(mark)),
            "load": Runs(torch.load, str(folder / "extra.pt")),
        }[kind]
    replace_metadata(folder, here)
    with pytest.raises(checkpoints.DamagedCheckpoint) as refusal:
        checkpoints.load_checkpoint(folder, model, optimizer)
    assert (
        "not to be trusted" in str(refusal.value)
        and "\n" not in str(refusal.value)
        and not mark.exists()
    )


def test_the_unpickler_knows_all_that_is_written_for_every_kind_of_tensor(tmp_path):
    tensors = {
        str(dtype): torch.zeros(3, 4).to(dtype)
        for dtype in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int64,
            torch.int32,
            torch.uint8,
            torch.bool,
        )
    }
    tensors["scalar"], tensors["turned"] = torch.zeros(()), torch.zeros(4, 3).mT
    checkpoints.dcp.save(
        tensors, storage_writer=checkpoints.dcp.FileSystemWriter(tmp_path), no_dist=True
    )
    names = {path.name: {} for path in tmp_path.iterdir()}
    assert (
        checkpoints.CheckpointReader(tmp_path, names).read_metadata().state_dict_metadata.keys()
        == tensors.keys()
    )
