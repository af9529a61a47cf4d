"""benchmarks/gpu_equality.py: the same computations on the CPU and on the device, each with a
limit; a part of benchmarks/gpu.py, and tests of the device (tests/test_device.py).

Weights and inputs are drawn on the CPU, so both devices get the same. On a CPU every difference
is zero, but for what compares two ways of computing one thing (decoding from a cache).

Left out: the sampler beside the trainer, which the part `job` compares in a step of RL; sampling,
distillation and low precision, which are tests of the device alone.
"""

from functools import cache, partial
from types import SimpleNamespace

import torch

import moe
import train
from benchmarks.gpu_bench import relative_error
from fast import accelerate
from fast.samplers import sampling_model
from published.grouped_query import config_of

# Limits of the relative error. FP32 is about thirty times what an H100 showed. BF16 is wide because
# a significand has 8 bits: two orders of one sum differ by percents.
FP32, BF16 = 1e-5, 0.06

# The architectures that are compared, as changes of the small model
ARCHITECTURES = {
    "MLA": dict(),
    "MLA, 600 tokens": dict(context=600),
    "GQA with query and key norm": dict(attention="gqa", qk_norm=True),
    "groups of experts": dict(n_group=4, topk_group=2),
    "softmax routing": dict(scoring="softmax"),
    "dense with bias": dict(attention="gqa", qkv_bias=True, dense_layers=3),
}


def count_different(found, expected):
    return int((found.cpu() != expected.cpu()).sum())


def build_small_model(device, dtype=torch.float32, **changes):
    """A small model with equal weights on every device, because they are drawn on the CPU"""
    # The same seed before every build: two models of one shape are equal.
    torch.manual_seed(1)
    sizes = dict(
        vocab=512,
        dim=128,
        layers=3,
        heads=4,
        kv_lora=64,
        qk_nope=32,
        qk_rope=16,
        v_dim=32,
        experts=8,
        num_experts_per_tok=2,
        expert_ffn=128,
        dense_ffn=256,
        context=256,
    )
    model = accelerate(config_of({**sizes, **changes}).build_model())

    # The head starts as zeros, and products with zeros would be equal on any device: draw it.
    for p in model.parameters():
        if p.ndim > 1 and not p.any():
            torch.nn.init.normal_(p, std=0.02)
    return model.compute_in(dtype).to(device)


def draw_tokens(rows, length):
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(2))


@cache
def backward_errors(device, kind):
    """{what: relative error against the CPU} of a forward and backward of one architecture, fp32"""
    expected, found = (run_backward(where, **ARCHITECTURES[kind]) for where in ("cpu", device))
    return {what: relative_error(found[what], expected[what]) for what in expected}


def run_backward(device, dtype=torch.float32, **changes):
    """-> {"hidden states": (B, T, D), "log-probs": (B, T), "gradients": of all parameters as one
    flat vector}"""
    model = build_small_model(device, dtype, **changes).train()
    tokens = draw_tokens(2, model.config.context).to(device)
    hidden = model(tokens[:, :-1])
    logprobs = model.logprobs(hidden, tokens[:, 1:])
    (-logprobs.mean()).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    found = {"hidden states": hidden, "log-probs": logprobs, "gradients": gradient}
    return {what: tensor.detach() for what, tensor in found.items()}


@torch.inference_mode()
def decoding_error(dtype, device):
    """Relative error of the logits of 50 tokens: decoded one by one behind a prefill of 150 tokens,
    against one forward of all 200"""
    # The model that trains, and its copy in the form that only generates.
    model = build_small_model(device, dtype).eval()
    sampler_model = sampling_model(model.config, dtype, device)
    sampler_model.load_state_dict(model.state_dict())
    tokens = draw_tokens(4, 200).to(device)  # (4, 200)

    # Store the prompt in the cache.
    cache = moe.Cache(sampler_model, 4, 260)
    sampler_model.decode(tokens[:, :150], cache, slice(0, 4), [0] * 4)

    # The other 50 tokens are given, not sampled, so that both ways read the same text.
    logits = []  # 50 of (4, 1, V)
    for i in range(150, 200):
        start = torch.full((4,), i, device=device)
        hidden = sampler_model.decode(tokens[:, i : i + 1], cache, slice(0, 4), start)
        logits.append(sampler_model.logits(hidden))
    return relative_error(torch.cat(logits, 1), model.logits(model(tokens))[:, 150:])


def make_optimizer(model, dtype):
    """The optimizer of train.py: Muon for the matrices, AdamW for the rest"""
    # A stand-in with the few attributes of a train.Run that the method reads.
    run = SimpleNamespace(config=train.Config(), model=model, replicas=False, world=1, dtype=dtype)
    return train.Run.make_optimizer(run)


def five_optimizer_steps(device):
    """-> the difference that five steps with the same drawn gradients make to all parameters, as
    one flat vector"""
    model = build_small_model(device)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = make_optimizer(model, torch.float32)
    generator = torch.Generator().manual_seed(9)
    for _ in range(5):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - start


def training_step_differences(device):
    """How many numbers of the gradient differ between two runs of one training step. 0 says that
    the device computes the same bits every time."""
    gradients = [run_backward(device, torch.bfloat16)["gradients"] for _ in range(2)]
    return count_different(*gradients)


def optimizer_error(device):
    return relative_error(five_optimizer_steps(device), five_optimizer_steps("cpu"))


def list_checks():
    """-> {what is computed twice: (the limit of what differs, a function of the device)}"""
    # Forward and backward of every architecture, against the CPU.
    checks = {}
    for kind in ARCHITECTURES:
        for what in ("hidden states", "log-probs", "gradients"):
            checks[f"{kind}: {what}, fp32"] = FP32, partial(find_backward_error, kind, what)

    # The device against itself: two ways of computing the same logits, and the same bits again.
    decoding = "prefill and decoding against one forward"
    checks[f"{decoding}, fp32"] = FP32, partial(decoding_error, torch.float32)
    checks[f"{decoding}, bf16"] = BF16, partial(decoding_error, torch.bfloat16)
    checks["two runs of a training step, bf16"] = 0, training_step_differences
    checks["Muon and AdamW, five steps, fp32"] = FP32, optimizer_error
    return checks


def find_backward_error(kind, what, device):
    return backward_errors(device, kind)[what]


def check_equality(bench):
    """All checks of this part"""
    # TF32 would round the factors of an fp32 product to 10 bits: this part compares fp32 itself.
    torch.backends.cuda.matmul.allow_tf32 = False
    table = "equality: relative error, or numbers that differ"
    for what, (limit, measure) in list_checks().items():
        bench.check(table, what, limit, partial(measure, bench.device))
