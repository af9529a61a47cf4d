"""Each kernel and module of fast/cpu_kernels.py against its plain form in moe.py. (tests/test_moe.py
has their slow loops.)"""

import pytest
import torch

import moe
from fast import accelerate, cpu_kernels
from twins import relative_difference, twins


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


def test_the_norm_is_the_plain_norm():
    plain, accelerated = pair(lambda: moe.RMSNorm(24, 1e-6))
    x = torch.randn(3, 5, 24) * 4
    compare(plain, accelerated, x, 1e-6)
    with torch.inference_mode():
        assert relative_difference(accelerated(x), plain(x)) <= 1e-6


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 130, 600])
def test_attention_in_blocks_is_the_plain_attention(length, masked):
    torch.manual_seed(0)
    mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None] if masked else None
    q, k = (torch.randn(2, 3, length, 12, requires_grad=True) for _ in range(2))
    v, upstream = torch.randn(2, 3, length, 8, requires_grad=True), torch.randn(2, 3, length, 8)
    results = []
    for function in (moe.dot_product_attention, cpu_kernels.attend_in_blocks):
        y = function(q, k, v, mask, 0.3)
        results.append([y, *torch.autograd.grad((y * upstream).sum(), (q, k, v))])
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("counts", [[4, 0, 7], [0, 11, 0], [300, 0, 20]])
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


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_of_the_targets_are_those_of_the_plain_model(temperature):
    hidden, targets, results = torch.randn(3, 30, 32), torch.randint(0, 61, (3, 30)), []
    where = torch.rand(3, 30) < 0.5
    for model in twins():
        for chosen in (None, where):
            x = hidden.clone().requires_grad_()
            logp = model.logprobs(x, targets, temperature, chosen)
            gradients = torch.autograd.grad(logp.square().sum(), (x, model.head.weight))
            results.append((logp, *gradients))
    for expected, found in ((results[0], results[2]), (results[1], results[3])):
        for a, b in zip(expected, found):
            torch.testing.assert_close(b, a, atol=1e-4, rtol=1e-4)
