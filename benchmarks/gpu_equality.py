"""benchmarks/gpu_equality.py: the same computations on the CPU and on the device, each with a
limit; a part of benchmarks/gpu.py.

Weights and inputs are drawn on the CPU, so both devices get the same. On a CPU every difference
is zero, but for what compares two ways of computing one thing (decoding from a cache, a sampler
and a trainer).
"""

from functools import partial
from types import SimpleNamespace

import torch

import feedback_distill
import moe
import muon
import rollout
from command.bpe import fit_tokenizer
import synth_tasks
import train
from benchmarks.gpu_bench import relative_error
from fast import accelerate
from fast import sampler as fast_sampler, workers
from fast.gram_newton_schulz import gram_newton_schulz
from fast.low_precision import FORMATS
from published.grouped_query import config_of

# Limits: about thirty times what an H100 showed in fp32; bf16 has 8 bits, so that two orders of
# summation differ by percents.
FP32, BF16 = 1e-5, 0.06
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
    """Equal weights on every device: they are drawn on the CPU."""
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
    # The head begins as zeros, and zeros are equal everywhere.
    for p in model.parameters():
        if p.ndim > 1 and not p.any():
            torch.nn.init.normal_(p, std=0.02)
    return model.compute_in(dtype).to(device)


def draw_tokens(rows, length, seed=2):
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(seed))


def run_backward(device, dtype, **changes):
    """-> hidden states, log-probs and the gradient of all parameters in one row"""
    model = build_small_model(device, dtype, **changes).train()
    tokens = draw_tokens(2, 600) if changes.get("context") == 600 else draw_tokens(4, 200)
    tokens = tokens.to(device)
    hidden = model(tokens[:, :-1])
    logprobs = model.logprobs(hidden, tokens[:, 1:])
    (-logprobs.mean()).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return hidden.detach(), logprobs.detach(), gradient


@torch.inference_mode()
def decoding_error(device, dtype):
    """A prompt of 150 tokens by prefill, then 50 tokens one by one from the cache, against one
    forward of all 200"""
    model = build_small_model(device, dtype).eval()
    sampler_model = workers.generation_model(model.config, dtype, device)
    sampler_model.load_state_dict(model.state_dict())
    tokens = draw_tokens(4, 200).to(device)
    # The prompt at once, then token by token, each fed as it is given: nothing is sampled.
    cache = moe.Cache(sampler_model, 4, 260)
    sampler_model.prefill([row[:150].tolist() for row in tokens], cache, [0, 1, 2, 3], [0] * 4)
    logits = []
    for i in range(150, 200):
        start = torch.full((4,), i, device=device)
        logits.append(
            sampler_model.logits(
                sampler_model.decode(tokens[:, i : i + 1], cache, slice(0, 4), start)
            )
        )
    return relative_error(torch.cat(logits, 1), model.logits(model(tokens))[:, 150:])


def orthogonalize_fast(gradient, dtype):
    """As train.py does it"""
    return muon.orthogonalize(gradient, dtype=dtype, iterate=gram_newton_schulz)


def orthogonalize_error(device, dtype):
    worst = 0.0
    for shape in ((64, 64), (5, 48, 96), (3, 130, 33), (2, 7, 9)):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        expected = orthogonalize_fast(gradient, torch.float32)
        worst = max(worst, relative_error(orthogonalize_fast(gradient.to(device), dtype), expected))
    return worst


def make_optimizer(model, dtype):
    """train.py's own: Muon for the matrices, AdamW for the rest"""
    run = SimpleNamespace(config=train.Config(), model=model, replicas=False, world=1, dtype=dtype)
    return train.Run.make_optimizer(run)


def five_optimizer_steps(device):
    """-> how far five steps with given gradients moved all parameters"""
    model = build_small_model(device)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = make_optimizer(model, torch.float32)
    generator = torch.Generator().manual_seed(9)
    for _ in range(5):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - start


def quantization_differences(device, name):
    # Rows of very different sizes: each block has a scale of its own.
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(6))
    x = x * torch.logspace(-6, 6, 64)[:, None]
    return count_different(FORMATS[name](x.to(device)), FORMATS[name](x))


def training_step_differences(device):
    gradients = [run_backward(device, torch.bfloat16)[2] for _ in range(2)]
    return count_different(*gradients)


def sampling_differences(device):
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(64, 512, generator=generator) * 3
    uniform = torch.rand(64, generator=generator)
    found = rollout.sample_from_logits(logits.to(device), uniform.to(device), 0.95)[0]
    return count_different(found, rollout.sample_from_logits(logits, uniform, 0.95)[0])


def divergence_error(device, kind):
    generator = torch.Generator().manual_seed(8)
    student, teacher = (torch.randn(32, 512, generator=generator) for _ in range(2))
    found = feedback_distill.divergence(student.to(device), teacher.to(device), kind)
    return relative_error(found, feedback_distill.divergence(student, teacher, kind))


def upload_differences(device):
    """The delta of one version of the weights to the next, encoded and applied on the device"""
    old = {
        name: w.detach().bfloat16() for name, w in build_small_model(device).state_dict().items()
    }
    new = {name: w + 0.01 for name, w in old.items()}
    arrived = workers.apply_delta(old, workers.encode_delta(old, new))
    return sum(count_different(arrived[name], new[name]) for name in new)


def mean_sampler_mismatch(device, dtype):
    """Mean |log-prob of the sampler - log-prob of the trainer| over the tokens that real agents
    sampled"""
    tokenizer = fit_tokenizer(synth_tasks.example_texts(100, 0), 700)
    model = build_small_model(device, dtype, vocab=tokenizer.vocab)
    sampler_model = workers.generation_model(model.config, dtype, device)
    sampler_model.load_state_dict(model.state_dict())
    sampler = fast_sampler.Sampler(sampler_model, tokenizer, rows=16, window=256)
    tasks = [synth_tasks.make_task(level, 5) for level in (0, 1)]
    limits = rollout.Limits(window=256, turns=4, turn_tokens=40)
    groups = rollout.rollouts(sampler, tasks, 8, 0, limits, rollout.Sandbox())

    # The trainer's forward over the same tokens, with the experts that the sampler chose.
    chains = [chain for group in groups for chain in group]
    episodes = []
    for chain in chains:
        episodes += chain.episodes
    batch = rollout.pack(episodes, [1.0] * len(episodes))
    batch = {name: t.to(device) for name, t in batch.items()}
    with torch.no_grad():
        hidden = model(batch["tokens"], None, batch["experts"])
        logprobs = model.logprobs(hidden, batch["targets"])
    sampled = batch["mask"] > 0
    return (logprobs - batch["logprobs"])[sampled].abs().mean()


def check_equality(bench):
    # TF32 would round the factors of an fp32 product to 10 bits: this part compares fp32 itself.
    torch.backends.cuda.matmul.allow_tf32 = False

    def check(what, limit, measure, *inputs):
        table = "equality: relative error, or numbers that differ"
        bench.check(table, what, limit, partial(measure, *inputs))

    check_model(check, bench.device)
    check_optimizer(check, bench.device)
    check_reinforcement(check, bench.device)


def check_model(check, device):
    """Forward and backward of every architecture, and decoding"""

    def hidden_error(results, changes):
        results["cpu"] = run_backward("cpu", torch.float32, **changes)
        results["device"] = run_backward(device, torch.float32, **changes)
        return relative_error(results["device"][0], results["cpu"][0])

    def gradient_error(results):
        return relative_error(results["device"][2], results["cpu"][2])

    for label, changes in ARCHITECTURES.items():
        # Each device runs once, for two checks.
        results = {}
        check(f"{label}: hidden states, fp32", FP32, hidden_error, results, changes)
        check(f"{label}: gradients, fp32", FP32, gradient_error, results)

    check("MLA: log-probs, bf16, mean difference", 0.05, bf16_difference, device)
    decoding = "prefill and decoding against one forward"
    check(f"{decoding}, fp32", FP32, decoding_error, device, torch.float32)
    check(f"{decoding}, bf16", BF16, decoding_error, device, torch.bfloat16)


def bf16_difference(device):
    expected = run_backward("cpu", torch.bfloat16)[1]
    found = run_backward(device, torch.bfloat16)[1].cpu()
    return (found - expected).abs().mean()


def check_optimizer(check, device):
    """Newton-Schulz alone, whole steps, low precision, and whether a step repeats"""
    check("orthogonalize, fp32", FP32, orthogonalize_error, device, torch.float32)
    check("orthogonalize, bf16 against fp32", BF16, orthogonalize_error, device, torch.bfloat16)
    check("Muon and AdamW, five steps, fp32", FP32, optimizer_error, device)
    for name in ("mxfp8", "nvfp4"):
        what = f"{name} emulation, of 16,384 numbers"
        check(what, 0, quantization_differences, device, name)
    check("two runs of a training step, bf16", 0, training_step_differences, device)


def optimizer_error(device):
    return relative_error(five_optimizer_steps(device), five_optimizer_steps("cpu"))


def check_reinforcement(check, device):
    """Sampling, distillation, and what lies between sampler and trainer"""
    check("tokens chosen from given logits", 0, sampling_differences, device)
    for kind in ("forward", "reverse", "jsd"):
        check(f"divergence, {kind}", FP32, divergence_error, device, kind)
    check("weights after a delta upload", 0, upload_differences, device)
    mismatch = "sampler's log-probs against the trainer's"
    check(f"{mismatch}, fp32", 1e-4, mean_sampler_mismatch, device, torch.float32)
    check(f"{mismatch}, bf16", 5e-3, mean_sampler_mismatch, device, torch.bfloat16)
