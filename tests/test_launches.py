"""What Python asks of a GPU, without one: every stage, the sampler and the optimizer on fake CUDA
tensors.

torch's FakeTensorMode gives every operator its shapes, dtypes and devices and computes nothing, so
it needs no card. It raises where a CPU tensor meets a CUDA one. Above it a second mode counts the
kernels that would be started, and the places where Python would wait for the card: to read a
number, to learn the size of a result, to copy. Both counts are pinned: on a GPU a small model takes
the time that Python needs to start its kernels, and every wait leaves the card idle.

A count that falls is good news: write the new one here. A count that rises wants a reason.
"""

import collections
import ctypes
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

import fast
import feedback_distill
import hsdp
import moe
from rollout import Limits, Tokenizer, agent, demonstrate, grade
from small import SIZES
import synth_tasks
import train
from fast import low_precision
from fast.cuda_graphs import GraphSampler
from fast.samplers import sampling_model

CARD = "cuda:0"
# The data pointer of a fake tensor is null, and torch warns of every look at it.
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

# Operators that start no kernel: another look at the same memory, or new memory that nobody fills.
NO_KERNEL = (
    "view",
    "reshape",
    "transpose",
    "permute",
    "expand",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "aten.t.default",
    "detach",
    "split",
    "chunk",
    "alias",
    "as_strided",
    "unbind",
    "diagonal",
    "empty",
    "prim.device",
    "lift_fresh",
    "_local_scalar",
)


class CountLaunches(TorchDispatchMode):
    """`with CountLaunches() as count`: count.kernels, and count.waits as {reason: how often}.

    What stays on the CPU is computed. On the card there are no data, so whatever depends on them
    gets a fixed answer: a float is 1.0, an integer 0, a truth value False, a mask selects
    everything, and a copy on the CPU is a real tensor of zeros."""

    def __init__(self):
        super().__init__()
        self.kernels, self.waits = 0, collections.Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name, kwargs = str(operator), kwargs or {}
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        on_card = any(t.device.type == "cuda" for t in tensors_of(args))
        made_on_card = (
            kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        )
        # Nothing of the card takes part: compute it.
        if not on_card and not made_on_card:
            with unset_fake_temporarily():
                return operator(*args, **kwargs)
        self.kernels += not any(word in name for word in NO_KERNEL)

        # Python reads one number.
        if name.startswith("aten._local_scalar_dense"):
            self.waits["read a number"] += 1
            return 1.0 if first.is_floating_point() else False if first.dtype == torch.bool else 0

        # Operators whose result has a size that depends on the data.
        if name.startswith("aten.bincount"):
            self.waits["bincount"] += 1
            return torch.zeros(
                kwargs.get("minlength", args[-1]), dtype=torch.long, device=first.device
            )
        if name.startswith("aten.nonzero"):
            self.waits["nonzero"] += 1
            return torch.zeros((first.numel(), first.ndim), dtype=torch.long, device=first.device)
        if name.startswith("aten.index.Tensor"):
            masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
            if masks:
                self.waits["boolean index"] += 1
                return first.reshape(-1, *first.shape[masks[0].ndim :])
        # A copy between the two memories.
        if "_to_copy" in name and kwargs.get("device") is not None:
            if not made_on_card:
                self.waits["copy to the CPU"] += 1
                with unset_fake_temporarily():
                    return torch.zeros(first.shape, dtype=kwargs.get("dtype") or first.dtype)
            if not on_card:
                self.waits["copy to the card"] += not kwargs.get("non_blocking")
                dtype = kwargs.get("dtype") or first.dtype
                return torch.empty_strided(
                    first.shape, first.stride(), dtype=dtype, device=kwargs["device"]
                )
        return operator(*args, **kwargs)


def tensors_of(args):
    """The tensors among an operator's arguments, in lists too"""
    for argument in args:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_of(argument)


def allow_fake_cuda():
    """A build of torch without CUDA has no device guard for it, which autograd asks for. The guard
    of the meta device, which does nothing, stands in until torch itself replaces it by one for a
    CUDA without cards."""
    try:
        core = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * 22).in_dll(core, "_ZN3c104impl26device_guard_impl_registryE")
    except (OSError, ValueError):
        pytest.skip("this build of torch does not show its device guards")
    cuda, meta = 1, 14  # c10::DeviceType
    if not guards[cuda]:
        guards[cuda] = guards[meta]
    torch._C._ensureCUDADeviceGuardSet()


def move_to_card(model, device):
    """Takes the place of Module.to, which swaps parameters. Fake ones cannot be swapped, so new
    ones are set."""
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = torch.nn.Parameter(
                    p.detach().to(device), requires_grad=p.requires_grad
                )
        for name, t in list(module._buffers.items()):
            if t is not None:
                module._buffers[name] = t.to(device)
    return model


def run_backward(loss):
    """loss.backward(), node by node, because autograd's own engine needs a real card for a CUDA
    tensor"""
    # A depth-first order of the graph. Reversed, each node comes after all nodes that send it a
    # gradient.
    order, seen = [], {loss.grad_fn}
    stack = [(loss.grad_fn, iter(loss.grad_fn.next_functions))]
    while stack:
        node, rest = stack[-1]
        following = next((n for n, _ in rest if n is not None and n not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(following.next_functions)))

    # One gradient for each output of a node. A node without any is not on the way to a leaf.
    gradients = {loss.grad_fn: [torch.ones_like(loss)]}
    for node in reversed(order):
        given = gradients.pop(node, None)
        if given is None:
            continue
        if hasattr(node, "variable"):  # a leaf
            p = node.variable
            p.grad = given[0] if p.grad is None else p.grad + given[0]
            continue

        # A torch.autograd.Function returns a gradient for every argument, a built-in node for every
        # edge.
        ours = hasattr(node, "needs_input_grad")
        with torch.no_grad():
            found = node.apply(*given) if ours else node(*given)
        found = found if isinstance(found, tuple) else (found,)
        edges = node.next_functions
        if ours:
            edges = [edge for edge in edges if edge[0] is not None]
            found = [gradient for gradient, needed in zip(found, node.needs_input_grad) if needed]

        # Add what this node sends to the gradients of the nodes behind it.
        for (following, place), gradient in zip(edges, found):
            if following is None or gradient is None:
                continue
            # As the engine does: sum over dimensions that were broadcast.
            wanted = following._input_metadata[place]
            gradient = gradient.sum_to_size(wanted.shape).to(wanted.dtype)
            slots = gradients.setdefault(following, [None] * len(following._input_metadata))
            slots[place] = gradient if slots[place] is None else slots[place] + gradient


def test_a_backward_node_by_node_is_that_of_the_engine():
    torch.manual_seed(0)
    model = fast.accelerate(moe.ModelConfig(**SIZES).build_model())
    for p in model.parameters():
        if not p.any():
            # a matrix that starts at zero hides the gradients behind it
            torch.nn.init.normal_(p, std=0.05)
    tokens = torch.randint(0, 61, (2, 17))
    loss = lambda: -model.logprobs(model(tokens[:, :-1]), tokens[:, 1:]).mean()
    loss().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    run_backward(loss())
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for i in range(25):
        (folder / f"m{i}.py").write_text("def f(x):\n    return x + 1\n\n\n" * 50)
    return folder


@pytest.fixture
def card(monkeypatch):
    """A card that is not there, and the count of what is asked of it"""
    if sys.platform != "linux":
        pytest.skip("the device guards are found by their names in a Linux library")
    allow_fake_cuda()
    monkeypatch.setattr(moe.Model, "to", move_to_card)
    # A list of numbers is read with one wait; a fake tensor would read them one by one.
    monkeypatch.setattr(FakeTensor, "tolist", lambda t: t.cpu().tolist())
    with FakeTensorMode(allow_non_fake_inputs=True), CountLaunches() as count:
        yield count


def make_run(stage, sources, **flags):
    """A run of a tiny model on the card, its optimizer, and where the stage's batches and losses
    come from"""
    given = dict(
        scale="tiny",
        device="cpu",
        data=str(sources),
        context=64,
        batch_tokens=512,
        micro_tokens=256,
        demos=6,
        window=2048,
        max_turns=8,
        steps=2,
        **flags,
    )
    config = replace(
        train.FLAGS.configure(given, stage), device=CARD, dtype="bfloat16", stage=stage
    )
    run = train.Run(config)
    run.build(Tokenizer({bytes([b]): b for b in range(256)}))
    return run, run.make_optimizer(), train.STAGE[stage](run)


def losses_of(stage, run, source):
    """The losses as train.loop asks for them. In rl the rollouts are demonstrations with many wrong
    tools, half of them with the reward 1."""
    if stage != "rl":
        return source.losses(0, {})
    groups = []
    for number in range(2):
        task = synth_tasks.make_task(0, number)
        play = lambda seed: demonstrate(
            task, run.tokenizer, random.Random(seed), train.agent_limits(run.config), sloppy=3.0
        )
        groups.append([play(seed) for seed in range(2)])
        for rollout, reward in zip(groups[-1], (0.0, 1.0)):
            grade(rollout)
            rollout.reward = reward
    assert any(feedback_distill.detect(rollout) for group in groups for rollout in group)
    return source.group_losses(source.leave_out_failed(groups, {}), {})


def counted(card, call):
    """-> the result of the call, and (kernels, {reason: waits}) that it took"""
    kernels, waits = card.kernels, collections.Counter(card.waits)
    result = call()
    return result, (card.kernels - kernels, dict(card.waits - waits))


def count_optimizer(card, optimizer):
    """The same of a step as it is written, of what of it a CUDA graph holds, and of what is left to
    start where the graph is replayed: a copy and the replay in its place"""
    inside = []

    def run(size, function, given):
        result, one = counted(card, lambda: function(given))
        inside.append(one[0])
        return result

    optimizer.step()  # the first one also makes its plan
    captured = getattr(optimizer, "captured", None)
    if captured:
        captured.run = run
    _, (kernels, waits) = counted(card, optimizer.step)
    if not captured:
        return {"optimizer": (kernels, waits)}
    left = kernels - inside[0] + 2
    return {"optimizer": (kernels, waits), "replayed": (left, waits)}


def count_step(card, stage, run, optimizer, source):
    """{part: (kernels, waits)} of a first micro-batch, and of what a step does once"""
    found = {}
    losses = losses_of(stage, run, source)
    loss, found["forward"] = counted(card, lambda: next(losses))
    _, found["backward"] = counted(card, lambda: run_backward(loss))
    for p in run.model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    _, found["clip"] = counted(card, lambda: hsdp.clip_grad_norm(run.model, 1.0))
    found |= count_optimizer(card, optimizer)
    _, found["balance"] = counted(
        card, lambda: moe.update_router_bias(run.model, 1e-3, hsdp.all_reduce_sum)
    )
    return found


def make_sampler(sources, rows, **options):
    """A sampler on the card with `rows` agents admitted, their prompts not yet read"""
    run, _, _ = make_run("pretrain", sources)
    model = sampling_model(run.model.config, torch.bfloat16, CARD)
    sampler = GraphSampler(model, run.tokenizer, rows=rows, window=1500, **options)
    tasks = [synth_tasks.make_task(0, number) for number in range(rows)]
    limits = Limits(1500, 8)
    agents = [agent(task, run.tokenizer, None, limits) for task in tasks]
    sampler.patient, sampler.cache = True, moe.Cache(model, rows, 1502)
    queue = [(i, (one, i)) for i, one in enumerate(agents)][::-1]
    return sampler, sampler.handle_turns([], queue, {}, lambda rollout: None)


def count_sampling(monkeypatch, card, sources, rows, **options):
    """{part: (kernels, waits)} of reading the prompts, of a decoding step, and of what a CUDA graph
    holds of that step"""
    inside = []

    def run(size, function, given):
        given = given.to(CARD, non_blocking=True)
        found, one = counted(card, lambda: function(given))
        inside.append(one)
        return found

    # A fake tensor cannot be made in inference mode: the twins are only told that this is it.
    monkeypatch.setattr(torch, "is_inference_mode_enabled", lambda: True)
    with torch.no_grad():
        sampler, live = make_sampler(sources, rows, **options)
        monkeypatch.setattr(sampler.captured, "run", run)
        _, read = counted(card, lambda: sampler.prefill(live, live))
        sampler.step(live)
        _, step = counted(card, lambda: sampler.step(live))
    return {"prefill": read, "step": step, "captured": inside[-1]}


def check_pins(found, pins):
    """found, pins: {part: (kernels, {reason: waits})}"""
    for part, (kernels, waits) in pins.items():
        assert (
            found[part][1] == waits
        ), f"{part}: Python waits for {found[part][1]}, pinned are {waits}"
        assert found[part][0] <= kernels, f"{part}: {found[part][0]} kernels, pinned are {kernels}"


# The output projections are a group of their own, orthogonalized per head: 28 of Muon's kernels.
ONCE_A_STEP = {"clip": (16, {"read a number": 1}), "balance": (14, {"read a number": 1})}
MUON_STEP = ONCE_A_STEP | {
    # As it is written, of it what collects the gradients and joins the matrices: 2. As a graph:
    # these two, a copy, the replay, the weights and AdamW.
    "optimizer": (135, {}),
    "replayed": (16, {}),
}
ADAMW_STEP = ONCE_A_STEP | {"optimizer": (7, {})}
# A step of sampling is read once: tokens, log-probs and experts together.
ONE_READ = {"copy to the CPU": 1}
# Selecting the positions that are trained on waits: their number depends on the data.
SELECTED = {"boolean index": 2}
# In sampling: the wide network lays its result out by token (1 kernel per layer).
# In every forward: tokens of padding are read as token 0 (1 kernel), and in training what the
# routers count is marked (3).


@pytest.mark.parametrize(
    "stage, flags, pins",
    [
        ("pretrain", {}, MUON_STEP | {"forward": (211, {}), "backward": (298, {})}),
        ("long", {}, MUON_STEP | {"forward": (211, {}), "backward": (298, {})}),
        ("sft", {}, MUON_STEP | {"forward": (233, SELECTED), "backward": (304, {})}),
        ("rl", {}, ADAMW_STEP | {"forward": (470, SELECTED), "backward": (344, {})}),
        ("rl", dict(kl_coef=0.1), {"forward": (678, {"boolean index": 4}), "backward": (344, {})}),
        ("rl", dict(feedback=0.0), {"forward": (224, SELECTED), "backward": (307, {})}),
    ],
)
def test_a_stage_of_training_stays_on_the_card_and_asks_no_more_of_it(
    stage, flags, pins, card, sources
):
    check_pins(count_step(card, stage, *make_run(stage, sources, **flags)), pins)


@pytest.mark.parametrize(
    "constants, pins",
    [
        (dict(DIVERGENCE="jsd"), {"forward": (489, SELECTED), "backward": (374, {})}),
        (
            dict(DIVERGENCE="forward", TEACHER="frozen"),
            {"forward": (470, SELECTED), "backward": (342, {})},
        ),
    ],
)
def test_other_teachers_ask_no_more_of_the_card(constants, pins, card, sources, monkeypatch):
    for name, value in constants.items():
        monkeypatch.setattr(feedback_distill, name, value)
    check_pins(count_step(card, "rl", *make_run("rl", sources)), pins)


@pytest.mark.parametrize(
    "rows, pins",
    [
        (1, {"prefill": (158, ONE_READ), "step": (163, ONE_READ), "captured": (161, {})}),
        (16, {"prefill": (166, ONE_READ), "step": (166, ONE_READ), "captured": (164, {})}),
    ],
)
def test_the_sampler_stays_on_the_card_and_asks_no_more_of_it(
    rows, pins, card, sources, monkeypatch
):
    check_pins(count_sampling(monkeypatch, card, sources, rows), pins)


def test_a_cpu_tensor_that_meets_one_of_the_card_is_found(card):
    with pytest.raises(RuntimeError, match="different devices|Expected all tensors"):
        torch.zeros(3, device=CARD) + torch.zeros(3)


def test_small_formats_divide_by_numbers_on_the_card(card):
    """Where the divisor is a plain number, CUDA multiplies by its reciprocal, and the last bit may
    differ from the CPU's. So every divisor must be a tensor on the card."""
    divisors = []

    class Divisors(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if str(operator).startswith("aten.div"):
                divisors.append(args[1])
            return operator(*args, **(kwargs or {}))

    for quantise in (low_precision.nvfp4, low_precision.mxfp8):
        with Divisors():
            quantise(torch.zeros(4, 64, device=CARD))
    assert len(divisors) > 4 and all(
        torch.is_tensor(d) and d.device.type == "cuda" for d in divisors
    )
