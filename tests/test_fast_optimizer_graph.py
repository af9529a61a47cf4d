"""Muon's step as a CUDA graph, without a card: it moves weights and momentum as muon.Muon does, bit
for bit, whatever changes between two steps."""

import copy

import pytest
import torch

import fast
import muon
from fast import optimizer_graph
from fast.cuda_graphs import CAPTURED_AFTER
from fast.optimizer_graph import GraphMuon
from recorded_graphs import Different, Failing, Recording

SHAPES = dict(heads=(4, 8, 24), experts=(3, 24, 16), matrix=(24, 40), wo=(24, 32), gain=(24,))
STEPS = 14


@pytest.fixture(autouse=True)
def pretend_card(monkeypatch):
    monkeypatch.setattr(optimizer_graph, "is_on_card", lambda tensor: True)
    Recording.replays = 0


def make(kind, **options):
    """-> an optimizer over parameters of all kinds, and the parameters by name"""
    torch.manual_seed(0)
    params = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    matrices = [params[name] for name in ("heads", "experts", "matrix")]
    groups = [
        dict(params=[params["gain"]], algorithm="adamw"),
        dict(params=matrices, weight_decay=0.1),
        dict(params=[params["wo"]], column_blocks=4),
    ]
    return kind(groups, lr=0.02, **options), params


def take_steps(kind, between=lambda step, optimizer, params: None, **options):
    """-> the optimizer, and (weights, momenta) after each of the steps"""
    optimizer, params = make(kind, **options)
    rng, found = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=rng)
        between(step, optimizer, params)
        optimizer.step()
        momenta = [state["momentum"] for state in optimizer.state.values() if "momentum" in state]
        found.append([tensor.detach().clone() for tensor in (*params.values(), *momenta)])
    return optimizer, found


def check_equal(between=lambda step, optimizer, params: None, **options):
    """Plain and captured steps agree bit for bit -> the captured ones' optimizer"""
    _, expected = take_steps(muon.Muon, between)
    optimizer, found = take_steps(GraphMuon, between, graph=Recording, **options)
    for step, (one, other) in enumerate(zip(expected, found)):
        assert all(map(torch.equal, one, other)), f"step {step}"
    return optimizer


def change_rates(step, optimizer, params):
    for group in optimizer.param_groups:
        group["lr"] = 0.02 / (1 + step)
        group["weight_decay"] = 0.01 * step


def change_weights(step, optimizer, params):
    for p in params.values():
        p.data.mul_(1 + 0.1 * step)


def leave_out_gradients(step, optimizer, params):
    """An expert layer that nobody routes to"""
    if step % 3 == 1:
        params["experts"].grad = None


def load_its_own_state(step, optimizer, params):
    if step == 6:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def warm_up_momentum(step, optimizer, params):
    for group in optimizer.param_groups:
        group["momentum"] = min(0.95, 0.8 + 0.05 * (step // 4))


@pytest.mark.parametrize(
    "between, least",
    [
        (change_rates, 12),
        (change_weights, 12),
        (leave_out_gradients, 10),
        (load_its_own_state, 10),
        (warm_up_momentum, 6),
    ],
)
def test_steps_as_graphs_move_weights_and_momentum_as_written_ones_do(between, least):
    optimizer = check_equal(between)
    # Each replay but the first of a graph, which checks it, is a step.
    assert Recording.replays >= least and optimizer.captured.graphs


def test_what_leads_to_a_step_is_recorded_once():
    optimizer = check_equal()
    assert len(optimizer.captured.graphs) == 1
    assert Recording.replays == STEPS - CAPTURED_AFTER + 1


@pytest.mark.parametrize(
    "graph, said", [(Different, "gives other numbers"), (Failing, "error during capture;")]
)
def test_where_a_capture_fails_or_differs_written_steps_go_on(graph, said, capsys):
    _, expected = take_steps(muon.Muon)
    optimizer, found = take_steps(GraphMuon, graph=graph)
    for one, other in zip(expected, found):
        assert all(map(torch.equal, one, other))
    assert not optimizer.captured.enabled
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "a step of the optimizer" in error and said in error


class WrongMomentum(Recording):
    """The matrices are right, the momentum that it leaves behind is not."""

    def replay(self, given):
        found = super().replay(given)
        for operator, args, _, _ in self.calls:
            if "lerp_" in str(operator):
                args[0][0].add_(1)
        return found


def test_momentum_is_compared_too(capsys):
    _, expected = take_steps(muon.Muon)
    optimizer, found = take_steps(GraphMuon, graph=WrongMomentum)
    for one, other in zip(expected, found):
        assert all(map(torch.equal, one, other))
    assert "gives other numbers" in capsys.readouterr().err


def test_on_a_cpu_it_is_muon(monkeypatch):
    monkeypatch.undo()
    optimizer, _ = take_steps(GraphMuon, graph=Failing)
    assert optimizer.captured is None


def test_an_edit_of_muon_runs_as_it_is_written(monkeypatch):
    assert fast.choose(muon.Muon) is GraphMuon
    monkeypatch.setattr(muon, "step_scale", lambda rows, columns: 0.1)
    assert fast.choose(muon.Muon) is muon.Muon
