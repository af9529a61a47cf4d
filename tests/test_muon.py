"""muon.py against its oracles: the SVD, torch.optim.Muon, torch.optim.AdamW, and one process for
every sharded layout."""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import muon
from conftest import run_ranks
from fast.gram_newton_schulz import gram_newton_schulz
from fast.stochastic_rounding import RoundingMuon
from refusals import refuse
from muon import COEFFICIENTS, Muon, newton_schulz, orthogonalize, step_scale

torch.set_num_threads(1)
SHAPES = {
    "heads": (6, 8, 40),
    "experts": (8, 24, 16),
    "odd": (3, 13, 7),
    "output": (40, 48),
    "tall": (50, 12),
    "small": (2, 3),
}


def tensors(seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def train(place, steps=3, dtype=torch.float32, **options):
    """Three Muon steps; place(name, tensor) puts a full tensor where it belongs. Returns full
    parameters and the optimizer."""
    shapes = {**SHAPES, "gain": (7,), "embed": (11, 5)}
    params = {
        name: torch.nn.Parameter(place(name, value)) for name, value in tensors(0, shapes).items()
    }

    def pick(*names):
        return [(name, params[name]) for name in names]

    apart = "output", "gain", "embed"
    rest = pick(*(name for name in shapes if name not in apart))
    optimizer = RoundingMuon(
        [
            dict(params=rest, lr=0.02, weight_decay=0.1),
            dict(params=pick("output"), lr=0.03, column_blocks=6),
            dict(params=pick("gain", "embed"), algorithm="adamw", lr=0.01),
        ],
        ns_dtype=dtype,
        **options,
    )
    for step in range(steps):
        for name, grad in tensors(10 + step, shapes).items():
            params[name].grad = place(name, grad)
        optimizer.step()
    whole = {}
    for name, p in params.items():
        whole[name] = (p.full_tensor() if isinstance(p, DTensor) else p).detach()
    return whole, optimizer


LAYOUTS = {  # name -> mesh shape and placements by parameter
    "rows of one mesh": ((4,), {None: (Shard(0),)}),
    "rows of the experts inside": (
        (4,),
        {None: (Shard(0),), "experts": (Shard(1),), "heads": (Shard(1),), "odd": (Shard(1),)},
    ),
    "columns": (
        (3,),
        {
            None: (Shard(0),),
            "experts": (Shard(2),),
            "output": (Shard(1),),
            "odd": (Shard(2),),
            "tall": (Shard(1),),
        },
    ),
    "replicas": (
        (2, 2),
        {
            None: (Replicate(), Shard(0)),
            "experts": (Replicate(), Shard(1)),
            "odd": (Replicate(), Shard(1)),
        },
    ),
    "all replicated": ((3,), {None: (Replicate(),)}),
    "more ranks than rows": ((7,), {None: (Shard(0),), "odd": (Shard(1),)}),
    "two shards": (
        (2, 2),
        {None: (Shard(0), Shard(0)), "experts": (Shard(1), Shard(0)), "odd": (Shard(2), Shard(1))},
    ),
}


def one_layout(rank, world, name):
    """-> {dtype of the weights: (whole weights, traffic)}"""
    shape, placements = LAYOUTS[name]
    mesh, found = DeviceMesh("cpu", torch.arange(world).view(shape)), {}
    for dtype in (torch.float32, torch.bfloat16):
        place = lambda n, t: distribute_tensor(
            t.to(dtype), mesh, placements.get(n, placements[None])
        )
        whole, optimizer = train(place)
        found[dtype] = whole, optimizer.traffic
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_sharded_steps_equal_one_process_exactly(name):
    """bf16 weights are rounded as on one process, too, and replicas alike."""
    ranks = run_ranks(math.prod(LAYOUTS[name][0]), one_layout, name)
    for dtype in (torch.float32, torch.bfloat16):
        alone, _ = train(lambda n, t: t.to(dtype))
        for found in ranks:
            whole, _ = found[dtype]
            assert [n for n, p in alone.items() if not torch.equal(whole[n], p)] == []
    if name == "replicas":
        # Nothing is padded. 4 bytes per number. Of each unit the owner receives, once, the part
        # that it lacks. Each of the four ranks receives the result for its half (together twice a
        # unit), except the owner's part.
        received = sum(found[torch.float32][1]["bytes_received"] for found in ranks)
        assert received < 4 * (1 + 2) * sum(math.prod(shape) for shape in SHAPES.values())


# ---------------------------------------------------------------- orthogonalize


def polar(G):
    """The oracle: the nearest semi-orthogonal matrix, by the SVD in fp64"""
    U, _, V = torch.linalg.svd(G.double(), full_matrices=False)
    return U @ V


def quintic_in_float64(G, steps=5):
    """The oracle: the Newton-Schulz iteration as it is written down, in fp64"""
    X = G.double() / G.double().norm(dim=(-2, -1), keepdim=True)
    for a, b, c in [COEFFICIENTS] * steps:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (32, 32), (3, 16, 80), (2, 3, 80, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_orthogonalize_is_close_to_the_polar_factor_of_the_svd(shape, dtype):
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    G = G + 3 * G.mean(dim=(-2, -1), keepdim=True)
    O, P = orthogonalize(G, dtype=dtype), polar(G)
    assert O.shape == G.shape and O.dtype == G.dtype
    cosine = (O * P).sum((-2, -1)) / O.norm(dim=(-2, -1)) / P.norm(dim=(-2, -1))
    assert cosine.min() > (0.93 if 32 in shape else 0.97)
    assert torch.linalg.svdvals(O.double()).max() < 1.25


@pytest.mark.parametrize("spectrum", ["gauss", "1/k", "rank 4"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("iterate", [newton_schulz, gram_newton_schulz])
def test_both_forms_equal_the_iteration_in_float64(iterate, spectrum, steps, tall):
    G = torch.randn(2, 24, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    U, S, V = torch.linalg.svd(G, full_matrices=False)
    k = torch.arange(1, 25)
    spectra = {"gauss": S, "1/k": (1 / k).expand(2, -1), "rank 4": (k <= 4).expand(2, -1)}
    G = U @ torch.diag_embed(spectra[spectrum].double()) @ V
    G = G.mT if tall else G
    # Ten steps multiply the rounding error of a zero singular value by 3.4 ** 10.
    if spectrum != "rank 4" or steps < 10:
        assert torch.allclose(
            orthogonalize(G.float(), steps, dtype=torch.float32, iterate=iterate).double(),
            quintic_in_float64(G, steps),
            atol=2e-4,
        )


def test_a_matrix_does_not_notice_what_it_is_batched_with():
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((9, 24, 72), (9, 40, 24), (5, 384, 512), (3, 13, 7), (9, 21, 50)):
            G = torch.randn(shape, generator=torch.Generator().manual_seed(2))
            assert torch.equal(
                orthogonalize(G, dtype=dtype),
                torch.stack([orthogonalize(g, dtype=dtype) for g in G]),
            )


# ---------------------------------------------------------------- one process


def reference_muon(shapes, steps, nesterov, dtype):
    """torch.optim.Muon with a 2-D parameter per unit."""
    params = {
        n: [torch.nn.Parameter(u.clone()) for u in t.view(-1, *t.shape[-2:])]
        for n, t in tensors(0, shapes).items()
    }
    optimizer = torch.optim.Muon(
        [u for units in params.values() for u in units],
        lr=0.02,
        weight_decay=0.1,
        nesterov=nesterov,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(steps):
        for name, grad in tensors(10 + step, shapes).items():
            for unit, g in zip(params[name], grad.view(-1, *grad.shape[-2:])):
                unit.grad = g.clone()
        with pytest.MonkeyPatch.context() as patch:
            if dtype == torch.float32:  # it knows bf16 only; a copy, because it divides in place
                patch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
            optimizer.step()
    return {n: torch.stack([u.detach() for u in units]) for n, units in params.items()}


@pytest.mark.parametrize("turned", [False, True], ids=["as it lies", "tall turned, as on a GPU"])
@pytest.mark.parametrize(
    "nesterov, dtype, tolerance",
    [(True, torch.float32, 2e-5), (False, torch.float32, 2e-5), (True, torch.bfloat16, 6e-3)],
)
def test_muon_equals_torch_optim_muon_on_every_head_and_expert(
    nesterov, dtype, tolerance, turned, monkeypatch
):
    is_tall = lambda blocks: blocks.shape[-2] > blocks.shape[-1]
    monkeypatch.setattr(muon, "is_turned", lambda blocks: turned and is_tall(blocks))
    # turned, the last two are multiplied with the first two
    shapes = {"heads": (6, 8, 40), "matrix": (40, 48), "experts": (4, 40, 8), "tall": (48, 40)}
    want = reference_muon(shapes, 4, nesterov, dtype)
    params = {n: torch.nn.Parameter(t.clone()) for n, t in tensors(0, shapes).items()}
    optimizer = Muon(
        [dict(params=list(params.items()))],
        lr=0.02,
        weight_decay=0.1,
        nesterov=nesterov,
        ns_dtype=dtype,
    )
    for step in range(4):
        for name, grad in tensors(10 + step, shapes).items():
            params[name].grad = grad
        optimizer.step()
    for name in shapes:
        assert (params[name] - want[name].view(params[name].shape)).abs().max() < tolerance, name


def test_column_blocks_are_orthogonalised_one_by_one():
    p = torch.nn.Parameter(torch.zeros(12, 40))
    p.grad = torch.randn(12, 40, generator=torch.Generator().manual_seed(5))
    Muon([dict(params=[p], column_blocks=5)], lr=1.0, ns_dtype=torch.float32).step()
    want = torch.cat(
        [
            orthogonalize(block.contiguous(), dtype=torch.float32)
            for block in p.grad.split(8, dim=1)
        ],
        dim=1,
    )
    assert torch.allclose(-p.detach(), want * step_scale(12, 8), atol=1e-5)


@pytest.mark.parametrize("options", [dict(), dict(betas=(0.8, 0.99), eps=1e-6, weight_decay=0.2)])
def test_the_adamw_groups_equal_torch_optim_adamw_bit_for_bit(options):
    shapes = {"embed": (11, 5), "gain": (7,)}
    ours = {n: torch.nn.Parameter(t.clone()) for n, t in tensors(0, shapes).items()}
    theirs = {n: torch.nn.Parameter(t.clone()) for n, t in tensors(0, shapes).items()}
    a = Muon([dict(params=list(ours.items()), algorithm="adamw", lr=0.01, **options)])
    b = torch.optim.AdamW(
        theirs.values(),
        lr=0.01,
        **{"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, **options},
    )
    for step in range(5):
        for name, grad in tensors(10 + step, shapes).items():
            ours[name].grad, theirs[name].grad = grad.clone(), grad.clone()
        a.step(), b.step()
    assert all(torch.equal(ours[n], theirs[n]) for n in shapes)


@pytest.mark.parametrize("kind", [Muon, RoundingMuon])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_optimizer_resumes_exactly(tmp_path, dtype, kind):
    straight, optimizer = small_optimizer(dtype, kind)
    steps_of(straight, optimizer, range(6))
    first, optimizer = small_optimizer(dtype, kind)
    steps_of(first, optimizer, range(3))
    torch.save((first, optimizer.state_dict()), tmp_path / "half")
    weights, state = torch.load(tmp_path / "half", weights_only=True)
    second, optimizer = small_optimizer(dtype, kind)
    with torch.no_grad():
        [p.copy_(weights[n]) for n, p in second.items()]
    optimizer.load_state_dict(state)
    steps_of(second, optimizer, range(3, 6))
    assert all(torch.equal(straight[n], second[n]) for n in straight)


def test_adamw_moves_fp16_weights_too():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    Muon([dict(params=[p], algorithm="adamw", lr=0.25)]).step()
    assert p.tolist() == [0.75] * 3


def test_a_parameter_without_gradient_is_left_alone():
    a, b = (torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    optimizer = Muon([dict(params=[("a", a), ("b", b)], weight_decay=0.1)], lr=0.1)
    a.grad = torch.randn(4, 6)
    optimizer.step()
    assert torch.equal(b, torch.ones(4, 6)) and not torch.equal(a, torch.ones(4, 6))
    optimizer.param_groups[0]["lr"] = 0.0
    before = a.detach().clone()
    optimizer.step()
    assert torch.equal(a, before)


# ---------------------------------------------------------------- bad input


def parameter(*shape):
    return torch.nn.Parameter(torch.zeros(shape))


def test_bad_groups_are_refused_by_name():
    p = parameter(4, 4)
    with pytest.raises(ValueError, match="more than one parameter group"):
        Muon(
            [
                dict(params=[("layers.0.wq", p)]),
                dict(params=[("layers.1.wq", p)], algorithm="adamw"),
            ]
        )
    with pytest.raises(ValueError, match="norm.gain"):
        Muon([dict(params=[("norm.gain", parameter(4))])])
    with pytest.raises(ValueError, match="wo.*3 column blocks"):
        Muon([dict(params=[("wo", p)], column_blocks=3)])
    with pytest.raises(ValueError, match="sgd"):
        Muon([dict(params=[("wo", p)], algorithm="sgd")])


# ---------------------------------------------------------------- many ranks


def bad_ranks(rank, world):
    mesh = DeviceMesh("cpu", torch.arange(world))
    partial = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    with pytest.raises(ValueError, match="layers.0.wo: placement .*Partial"):
        Muon([dict(params=[("layers.0.wo", partial)])])
    p = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    optimizer = Muon([dict(params=[("w", p)])])
    p.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    with pytest.raises(ValueError, match="w: gradient placed"):
        optimizer.step()
    p.grad = (
        None if rank else distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
    )
    optimizer.step()  # a rank without gradient counts as zero there: nobody hangs
    return p.full_tensor().isfinite().all().item()


def test_ranks_refuse_bad_placements_and_survive_a_missing_gradient():
    assert run_ranks(2, bad_ranks) == [True, True]


def events_of_a_step(rank, world):
    mesh = DeviceMesh("cpu", torch.arange(world))
    _, optimizer = train(
        lambda n, t: distribute_tensor(t, mesh, [Shard(max(t.ndim - 2, 0))]), steps=1
    )
    silent = optimizer.events is None
    optimizer.events = []
    optimizer.step()
    return silent, optimizer.events, optimizer.traffic


def test_the_send_of_task_two_happens_before_task_one_multiplies():
    for silent, events, traffic in run_ranks(4, events_of_a_step):
        order = [(task, event) for _, task, event in events]
        assert silent and order.index((2, "send")) < order.index((1, "multiply"))
        assert order.index((1, "return")) < order.index((2, "multiplied"))
        tasks = {task for task, _ in order}
        assert len(tasks) >= 2 and traffic["collectives"] <= 8 and traffic["bytes_received"] > 0


def plain_copies(rank, world):
    mesh, found = DeviceMesh("cpu", torch.arange(world)), {}
    for dtype in (torch.float32, torch.bfloat16):
        whole, optimizer = train(lambda n, t: t.to(dtype), dtype=torch.bfloat16, replicas=mesh)
        found[dtype] = whole, optimizer.traffic, costs_of(optimizer)
    return found


def costs_of(optimizer):
    """What the units cost that this rank orthogonalizes"""
    (tasks,) = optimizer.plans.values()
    return sum(unit.cost for task in tasks for unit in task.owned)


def test_plain_copies_share_the_work_and_end_with_the_bits_of_one_process():
    ranks, numel = run_ranks(3, plain_copies), sum(map(math.prod, SHAPES.values()))
    for dtype in (torch.float32, torch.bfloat16):
        reference, alone = train(lambda n, t: t.to(dtype), dtype=torch.bfloat16)
        for found in ranks:
            whole, traffic, cost = found[dtype]
            assert all(torch.equal(whole[name], p) for name, p in reference.items())
            assert cost < 0.4 * costs_of(alone) and traffic["bytes_received"] <= 2 * numel
        assert sum(found[dtype][2] for found in ranks) == costs_of(alone)


def home_layout(rank, world):
    mesh = DeviceMesh("cpu", torch.arange(world))
    p = torch.nn.Parameter(distribute_tensor(tensors(0)["experts"], mesh, [Shard(0)]))
    optimizer = Muon([dict(params=[("experts", p)])])
    p.grad = distribute_tensor(tensors(1)["experts"], mesh, [Shard(0)])
    optimizer.step()
    return optimizer.traffic


def test_whole_units_stay_home_and_cost_no_collective():
    assert run_ranks(4, home_layout) == [dict(collectives=0, bytes_received=0)] * 4


class Net(torch.nn.Module):
    """A dense matrix and a stack of experts: enough for two meshes."""

    def __init__(self):
        super().__init__()
        t = tensors(0, {"dense": (12, 16), "experts": (4, 8, 16), "gain": (16,)})
        self.dense, self.gain = torch.nn.Parameter(t["dense"]), torch.nn.Parameter(t["gain"])
        self.experts = torch.nn.Module()
        self.experts.weight = torch.nn.Parameter(t["experts"])

    def groups(self):
        return [
            dict(params=[("dense", self.dense), ("experts.weight", self.experts.weight)], lr=0.05),
            dict(params=[("gain", self.gain)], algorithm="adamw"),
        ]


def net_step(net, optimizer, step):
    for name, p in net.named_parameters():
        grad = tensors(20 + step, {name: p.shape})[name]
        p.grad = (
            distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        )
    optimizer.step()


def parallel_net(rank, world):
    """Dense parameters fully_sharded over all ranks, experts Shard(0) over ep and then
    fully_sharded by rows over efsdp."""
    net = Net()
    dense = DeviceMesh("cpu", torch.arange(world), mesh_dim_names=("dp",))
    expert = DeviceMesh("cpu", torch.arange(world).view(2, -1), mesh_dim_names=("efsdp", "ep"))
    net.experts.weight = torch.nn.Parameter(
        distribute_tensor(net.experts.weight.detach(), expert["ep"], [Shard(0)])
    )
    fully_shard(net.experts, mesh=expert["efsdp"], shard_placement_fn=lambda p: Shard(1))
    fully_shard(net, mesh=dense)
    return net, Muon(net.groups(), ns_dtype=torch.float32)


def two_meshes(rank, world, folder):
    net, optimizer = parallel_net(rank, world)
    placements = net.experts.weight.placements
    for step in range(3):
        net_step(net, optimizer, step)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save(dict(model=model_state, optimizer=optimizer_state), checkpoint_id=folder)
    net_step(net, optimizer, 3)
    return {n: p.full_tensor().detach() for n, p in net.named_parameters()}, str(placements)


def resume(rank, world, folder):
    net, optimizer = parallel_net(rank, world)
    before = optimizer.state[net.dense]["momentum"].to_local().clone()
    # get_state_dict must find the state without taking a step of the optimizer.
    state = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer)))
    assert torch.equal(before, optimizer.state[net.dense]["momentum"].to_local())
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    net_step(net, optimizer, 3)
    return {n: p.full_tensor().detach() for n, p in net.named_parameters()}


def test_fully_sharded_on_two_meshes_equals_one_process_and_resumes_on_another_world_size(tmp_path):
    net = Net()
    optimizer = Muon(net.groups(), ns_dtype=torch.float32)
    for step in range(4):
        net_step(net, optimizer, step)
    want = {n: p.detach() for n, p in net.named_parameters()}
    for weights, placements in run_ranks(4, two_meshes, str(tmp_path / "c")):
        assert "Shard(dim=1), Shard(dim=0)" in placements or "S(1), S(0)" in placements
        assert all(torch.equal(weights[n], want[n]) for n in want)
    for weights in run_ranks(2, resume, str(tmp_path / "c")):
        assert all(torch.equal(weights[n], want[n]) for n in want)


def test_a_flag_is_refused_in_one_line(capsys):
    assert "--bensch" in refuse(muon.main, ["--bensch"], capsys)


# ---------------------------------------------------------------- scales, copies, noise

SCALED = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", [-110, -83, -66, -41, 60, 65, 83, 123])
def test_orthogonalize_does_not_notice_the_scale(exponent, dtype):
    # A power of two changes no digit, so the result is the same to the bit.
    scaled = torch.ldexp(SCALED, torch.tensor(exponent))
    assert torch.equal(orthogonalize(scaled, dtype=dtype), orthogonalize(SCALED, dtype=dtype))


@pytest.mark.parametrize(
    "source, scale",
    [
        (torch.float32, 1e-38),
        (torch.float64, 1e-200),
        (torch.float64, 1e200),
        (torch.float16, 1e-6),
        (torch.float16, 1e4),
        (torch.bfloat16, 1e-37),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_singular_values_are_right_at_the_ends_of_every_dtype(source, scale, dtype):
    found = torch.linalg.svdvals(
        orthogonalize((SCALED.double() * scale).to(source), dtype=dtype).float()
    )
    assert found.min() > 0.3 and found.max() < 1.6


def test_matrices_of_every_scale_in_one_batch_are_as_each_alone():
    scales = torch.tensor([1e-30, 0.0, 1.0, 1e30])[:, None, None]
    batch = scales * SCALED[0]
    together = orthogonalize(batch)
    assert all(torch.equal(one, orthogonalize(alone)) for one, alone in zip(together, batch))
    assert not together[1].any()


@pytest.mark.parametrize("case", ["rank one", "expanded", "transposed", "one entry", "identity"])
def test_odd_matrices_are_orthogonalised(case):
    g = torch.Generator().manual_seed(1)
    vectors = torch.randn(24, 1, generator=g), torch.randn(1, 16, generator=g)
    one_entry = torch.zeros(16, 24)
    one_entry[3, 5] = -1e-25
    matrix = {
        "rank one": vectors[0] * vectors[1],
        "expanded": vectors[1].expand(24, 16),
        "transposed": SCALED[0].mT,
        "one entry": one_entry,
        "identity": torch.eye(16),
    }[case]
    found = orthogonalize(matrix, dtype=torch.float32)
    # Directions that the matrix has come out near 1, those that it has not stay at 0.
    there = torch.linalg.svdvals(matrix * (1e25 if case == "one entry" else 1)) > 1e-3
    values = torch.linalg.svdvals(found)
    assert values[there].min() > 0.3 and values.max() < 1.6 and not (values[~there] > 0.01).any()


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 4, 8), (2, 0, 8)])
def test_an_empty_parameter_is_refused_by_name(shape):
    with pytest.raises(ValueError, match="nothing.weight.*no numbers"):
        Muon([dict(params=[("nothing.weight", torch.nn.Parameter(torch.zeros(shape)))])])


def small_optimizer(dtype, kind=RoundingMuon):
    params = {
        n: torch.nn.Parameter(t.to(dtype))
        for n, t in tensors(4, {"w": (4, 12), "out": (6, 8), "gain": (5,)}).items()
    }
    groups = [
        dict(params=[("w", params["w"])], weight_decay=0.1),
        dict(params=[("out", params["out"])], column_blocks=2),
        dict(params=[("gain", params["gain"])], algorithm="adamw", lr=3e-3),
    ]
    return params, kind(groups, lr=0.02, ns_dtype=torch.float32)


def steps_of(params, optimizer, seeds):
    for seed in seeds:
        for name, grad in tensors(seed, {n: p.shape for n, p in params.items()}).items():
            params[name].grad = grad.to(params[name].dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copied_optimizer_goes_on_alone_to_the_same_bits(way, dtype):
    params, optimizer = small_optimizer(dtype)
    steps_of(params, optimizer, range(3))
    twins, twin = way((params, optimizer))
    assert list(twin.names.values()) == ["w", "out", "gain"]
    steps_of(params, optimizer, range(3, 6))
    frozen = {n: p.detach().clone() for n, p in params.items()}
    steps_of(twins, twin, range(3, 6))
    assert all(
        torch.equal(params[n], frozen[n]) and torch.equal(twins[n], frozen[n]) for n in params
    )


def test_the_length_of_a_step_follows_the_blocks_that_a_group_has_now():
    """Loading the state of an optimizer with other heads changes what its groups say."""
    lengths = []
    for begun, now in ((8, 8), (1, 8)):
        p = torch.nn.Parameter(torch.zeros(16, 64))
        group = dict(params=[p], algorithm="muon", column_blocks=begun)
        optimizer = Muon([group], lr=1.0, ns_dtype=torch.float32)
        optimizer.param_groups[0]["column_blocks"] = now
        p.grad = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        lengths.append(float(p.detach().square().mean().sqrt()))
    assert lengths[0] == lengths[1] == pytest.approx(0.2, rel=0.15)


def test_what_would_lose_a_gradient_is_refused():
    p = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match="ns_dtype must be bfloat16 or float32"):
        Muon([dict(params=[p], algorithm="muon")], lr=1.0, ns_dtype=torch.float16)
    embed = torch.nn.Embedding(4, 4, sparse=True)
    named = [("embed.weight", embed.weight)]
    optimizer = Muon([dict(params=named, algorithm="adamw")], lr=1.0)
    embed(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="embed.weight: its gradient is sparse"):
        optimizer.step()


def test_a_group_that_is_added_later_is_trained():
    params, optimizer = small_optimizer(torch.float32)
    more = torch.nn.Parameter(torch.ones(4, 6))
    optimizer.add_param_group(dict(params=[("more", more)]))
    more.grad = torch.randn(4, 6)
    assert optimizer.step(lambda: 7.0) == 7.0 and not torch.equal(more, torch.ones(4, 6))
    twins, twin = copy.deepcopy((params, optimizer))
    assert list(twin.names.values()) == ["w", "out", "gain", "more"]
