"""Each kernel and module of fast/cpu_kernels.py against its plain form in moe.py, against fp64, or
against PyTorch's own gradient."""

import pytest
import torch
import torch.nn.functional as F

import moe
from fast import accelerate, cpu_kernels, decode
from fast.cpu_kernels import (
    Permute,
    RMSNormFunction,
    TargetLogprobs,
    Unpermute,
    attend_in_blocks,
)
from published.grouped_query import VariantConfig
from twins import relative_difference


def compare(plain, accelerated, inputs, tolerance, *rest):
    """Results and gradients of two modules with equal parameters. inputs (..., D) get a gradient
    too."""
    results = []
    for module in (plain, accelerated):
        x = inputs.clone().requires_grad_()
        y = module(x, *rest)
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        wanted = (x, *module.parameters())
        results.append([y, *torch.autograd.grad((y * upstream).sum(), wanted)])
    for expected, found in zip(*results):
        assert relative_difference(found.float(), expected.float()) <= tolerance


def pair(make):
    """-> the same module plain and accelerated, no weight zero"""
    modules = []
    for number in range(2):
        torch.manual_seed(0)
        module = make()
        for p in module.parameters():
            torch.nn.init.normal_(p, std=0.3)
        modules.append(accelerate(module) if number else module)
    assert type(modules[0]) is not type(modules[1])
    return modules


def test_the_norms_hand_written_gradient_is_that_of_numerical_differences():
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 5, dtype=torch.double, requires_grad=True), torch.rand(
        5, dtype=torch.double, requires_grad=True
    )
    torch.testing.assert_close(RMSNormFunction.apply(x, w, 0.1), F.rms_norm(x, (5,), w, 0.1))
    for one in (x, x[0, 0]):
        assert torch.autograd.gradcheck(RMSNormFunction.apply, (one, w, 0.1))


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.01), (torch.float32, 1e-6)])
@pytest.mark.parametrize("length", [1, 128, 300, 600])
def test_attention_in_blocks_is_attention(length, dtype, tolerance):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, length, width, dtype=dtype, requires_grad=True) for width in (12, 12, 8)
    )
    upstream = torch.randn(2, 3, length, 8)
    found = attend_in_blocks(q, k, v, None, 0.3)
    mine = [found, *torch.autograd.grad((found * upstream).sum(), (q, k, v))]
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    scores = (0.3 * q @ k.transpose(-2, -1)).masked_fill(
        torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf
    )
    found = scores.softmax(-1) @ v
    for got, exact in zip(mine, [found, *torch.autograd.grad((found * upstream).sum(), (q, k, v))]):
        assert (got - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("heads, length", [(1, 1), (1, 16), (3, 1), (3, 150)])
def test_attention_of_a_few_tokens_on_a_cache_is_attention(heads, length):
    """The oracle is softmax attention in fp64. Keys and values are a slice of a longer cache, and
    each row attends to another number of them."""
    torch.manual_seed(0)
    cache, q = (
        torch.randn(4, heads, 200, 12).bfloat16(),
        torch.randn(3, heads, length, 12).bfloat16(),
    )
    k, upto = cache[:3, :, :170], torch.randint(1, 170, (3, 1, length, 1))
    mask = torch.zeros(3, 1, length, 170).masked_fill(torch.arange(170) >= upto, -torch.inf)
    for v in (k, cache[:3, :, :170, :8]):
        exact = (0.3 * q.double() @ k.double().transpose(-2, -1) + mask.double()).softmax(
            -1
        ) @ v.double()
        for dtype, tolerance in ((torch.bfloat16, 0.01), (torch.float32, 1e-6)):
            keys = k.to(dtype)
            found = attend_in_blocks(
                q.to(dtype), keys, keys if v is k else v.to(dtype), mask.to(dtype), 0.3
            )
            assert found.dtype == dtype and (found - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("length", [1, 150])
def test_scores_in_the_hundreds_are_not_rounded(length):
    """The biases of Qwen2's keys make such scores (a standard deviation of 27 has been reported).
    The oracle is softmax attention in fp64."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, length, 64) * std for std in (3, 1, 1))
    k = (k + 27 * torch.randn(64)).bfloat16()
    q, v, mask = (
        q.bfloat16(),
        v.bfloat16(),
        torch.full((2, 1, length, length), -torch.inf).triu(1).bfloat16(),
    )
    exact = (q.double() @ k.double().transpose(-2, -1) / 8 + mask.double()).softmax(-1) @ v.double()
    for given in (mask, None):
        found = attend_in_blocks(q, k, v, given, 1 / 8, coarse=False)
        rounded = attend_in_blocks(q, k, v, given, 1 / 8)
        assert (found - exact).norm() <= 0.01 * exact.norm() and (
            length == 1 or (rounded - exact).norm() > 0.05 * exact.norm()
        )


@pytest.mark.parametrize("bias", [True, False])
def test_attention_with_biased_keys_asks_for_exact_scores(bias, monkeypatch):
    asked = []

    def watched(*given):
        asked.append(given[-1])
        return attend_in_blocks(*given)

    monkeypatch.setattr(decode, "attend_in_blocks", watched)
    model = accelerate(
        VariantConfig(
            vocab=16,
            dim=16,
            layers=2,
            heads=2,
            kv_heads=1,
            attention="gqa",
            qkv_bias=bias,
            qk_nope=0,
            qk_rope=8,
            v_dim=8,
        ).build_model()
    )
    model(torch.arange(5)[None])
    assert asked == [not bias] * 2


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("counts", [[4, 0, 7], [0, 11, 0], [3, 3, 3], [300, 0, 20]])
def test_the_experts_are_the_plain_experts(counts, dtype, tolerance):
    """By grouped products, and by the loop of bf16 where an expert has many rows"""
    plain, accelerated = pair(lambda: moe.Experts(3, 16, 8))
    x = torch.randn(sum(counts), 16, dtype=dtype)
    compare(plain, accelerated, x, tolerance, torch.tensor(counts))


def test_the_layer_is_the_plain_layer():
    config = moe.ModelConfig(
        dim=16, experts=5, num_experts_per_tok=3, expert_ffn=8, route_scale=2.0
    )
    plain, accelerated = pair(lambda: moe.MoE(config))
    x = torch.randn(2, 9, 16)
    compare(plain, accelerated, x, 1e-5)
    assert torch.equal(plain.router.load, accelerated.router.load) and plain.router.load.any()


@pytest.mark.parametrize("k", [1, 3])
def test_spreading_tokens_over_experts_and_collecting_them_has_the_gradient_of_plain_indexing(k):
    torch.manual_seed(3)
    x, gates = torch.randn(7, 4, dtype=torch.float64, requires_grad=True), torch.rand(
        7, k, dtype=torch.float64, requires_grad=True
    )
    order, factor, upstream = (
        torch.randperm(7 * k),
        torch.randn(7 * k, 4, dtype=torch.float64),
        torch.randn(7, 4, dtype=torch.float64),
    )
    back = order.argsort()
    mine = Unpermute.apply(Permute.apply(x, order, back, k) * factor, order, back, gates)
    plain = (
        (x.repeat_interleave(k, 0)[order] * factor)[back].view(7, k, 4) * gates[..., None]
    ).sum(1)
    torch.testing.assert_close(mine, plain)
    for a, b in zip(
        *(torch.autograd.grad((y * upstream).sum(), (x, gates)) for y in (mine, plain))
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 1e-10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_of_the_targets_are_finite_however_cold(temperature, dtype):
    h, W = torch.randn(70, 16, generator=torch.Generator().manual_seed(0)).to(dtype), torch.randn(
        50, 16, generator=torch.Generator().manual_seed(1)
    )
    best = (h.float() @ W.to(dtype).float().T).argmax(-1)
    h.requires_grad_(), W.requires_grad_()
    found = TargetLogprobs.apply(h, W, best, temperature)
    # In bf16 two logits may tie for the largest, so the log-prob need not be near 0.
    assert found.abs().max() < 1e-3 or dtype == torch.bfloat16 and found.isfinite().all()
    assert TargetLogprobs.apply(h, W, (best + 1) % 50, temperature).isfinite().all()
    if dtype == torch.float32:
        found.sum().backward()
        assert not h.grad.any() and not W.grad.any()  # nothing is left to learn


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_the_targets_and_their_gradients_are_those_of_log_softmax(temperature):
    torch.manual_seed(0)
    # Two stretches of rows (64 and 6), so that the loop over them is tested.
    h, W, grad = torch.randn(70, 8), torch.randn(5000, 8), torch.randn(70)
    targets, results = torch.randint(5000, (70,)), []
    assert len(TargetLogprobs.stretches(h, W)) == 2
    for f in (
        lambda h, W: TargetLogprobs.apply(h, W, targets, temperature),
        lambda h, W: (h @ W.T / temperature).log_softmax(-1)[torch.arange(70), targets],
    ):
        a, b = h.clone().requires_grad_(), W.clone().requires_grad_()
        logp = f(a, b)
        logp.backward(grad)
        results.append((logp, a.grad, b.grad))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_the_gradient_of_many_stretches_is_summed_in_fp32(monkeypatch):
    """By hand: 2,000 rows of ones, each with the gradient 1 - 1/4 for the target and -1/4 for the
    others. A sum in bf16 would stop growing."""
    monkeypatch.setattr(
        TargetLogprobs, "stretches", staticmethod(lambda h, W: cpu_kernels.slice_rows(len(h), 1))
    )
    h, W = torch.ones(2000, 8), torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
    TargetLogprobs.apply(h, W, torch.zeros(2000, dtype=torch.long), 1.0).sum().backward()
    assert torch.allclose(
        W.grad[:, 0].float(), torch.tensor([1500.0, -500, -500, -500]), rtol=1 / 256
    )
