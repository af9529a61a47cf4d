"""benchmarks/decode.py: how fast tokens are sampled, beside what one would write first and beside a
floor.

    python -m benchmarks.decode            laptop model on one core, about a minute
    python -m benchmarks.decode --quick    a small model and few rounds, seconds: does it run?

A decoding step from the cache of latents is compared with a full forward for every token (without a
cache), and with its own matrix products alone, which no other way of writing it can do without. The
same for a step that is fed a draft of three tokens as well. Then whole rollouts with tool calls, by
continuous batching (a row that ends makes room at once) and by rollout.py's plain sampler (one
agent after the other, one token at a time) with the same model.

Left out: the agents' thinking. A synthetic agent asks for turns of drawn lengths, and every third
of its tools takes a tenth of a second.
"""

import sys
import time
from functools import partial

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import measure_seconds, print_speeds, read_quick
from fast.gpu_memory import LAPTOP_SCALE
from fast import accelerate
from fast.sampler import Sampler
from fast.samplers import sampling_model
from command.hardware import fast_dtype
from moe import Cache
from rollout import Rollout, Request, Tokenizer, Work, random_model, sample_from_logits
from rollout import Sampler as PlainSampler

ROWS, WINDOW = 32, 512  # sequences decoded together; positions of each in the cache
DRAFT = 3  # tokens that a draft proposes; here none of them is right


# ---------------------------------------------------------------- one step


class Products(TorchDispatchMode):
    """Records every matrix product that runs under this mode, with its operands. In inference mode
    linear, matmul and einsum arrive here as they are, not decomposed into mm and others."""

    # Operators that count as matrix products
    NAMES = (
        "linear",
        "matmul",
        "einsum",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "_grouped_mm",
        "scaled_dot_product_attention",
    )

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in self.NAMES:
            self.kept.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def matrix_products(step):
    """-> a function that repeats only the matrix products of `step()`, attention included"""
    # One real step records the products.
    with Products() as mode:
        step()
    assert mode.kept, "no matrix product was seen"

    def multiply():
        for function, args, kwargs in mode.kept:
            function(*args, **kwargs)

    return multiply


def byte_tokenizer():
    """A tokenizer with as many tokens as the laptop's (1,024), without training one: every byte,
    and pairs of bytes"""
    ranks = {bytes([b]): b for b in range(256)}
    for i in range(256, 1014):
        ranks[bytes(divmod(i, 256))] = i
    return Tokenizer(ranks)


def build_models(tokenizer, quick):
    """-> a model as it is trained, and one with the same weights that only generates"""
    sizes = {name: size for name, size in LAPTOP_SCALE.items() if name != "vocab"}
    if quick:
        sizes = dict(dim=64, layers=2, heads=2, kv_lora=32, experts=4)

    # The full forward uses the model that trains, decoding uses the copy with fused weights.
    dtype = fast_dtype("cpu")
    model = accelerate(random_model(tokenizer, **sizes)).compute_in(dtype)
    sampler_model = sampling_model(model.config, dtype)
    sampler_model.load_state_dict(model.state_dict())
    return model, sampler_model


def decoding_step(model, tokens, position, window, device="cpu"):
    """tokens (B, T), fed at `position` of a cache with `window` positions -> a call that decodes
    them and samples after each, as the sampler does. The cache before the position holds zeros,
    which take as much time as real entries."""
    # Every call writes to the same positions, so it can be repeated without filling the cache.
    rows = len(tokens)
    cache = Cache(model, rows, window)
    start = torch.full((rows,), position, device=device)  # (B,)

    def step():
        hidden = model.decode(tokens, cache, slice(0, rows), start).flatten(0, 1)  # (B*T, D)
        uniform = torch.rand(len(hidden), device=device)
        # tolist: as in the sampler, the tokens go to the CPU, where the agents read them.
        return sample_from_logits(model.logits(hidden), uniform)[0].tolist()

    return step


@torch.inference_mode()
def measure_steps(model, sampler_model, length, rounds):
    """{what: seconds of one step for ROWS sequences of `length` tokens}"""
    # A step with a draft feeds DRAFT more tokens per row. The cache has two positions more than the
    # window, as the sampler's has.
    tokens = torch.randint(0, 256, (ROWS, length + 1 + DRAFT))
    plain_step = decoding_step(sampler_model, tokens[:, -1:], length, WINDOW + 2)
    drafted_step = decoding_step(sampler_model, tokens[:, length:], length, WINDOW + 2)

    # Without a cache, all tokens are computed again to sample one.
    def full_forward():
        hidden = model(tokens[:, : length + 1])[:, -1]
        return sample_from_logits(model.logits(hidden), torch.rand(ROWS))

    calls = {
        "from the latent cache": plain_step,
        "its matrix products alone": matrix_products(plain_step),
        "with 3 drafts, none right": drafted_step,
        "its matrix products": matrix_products(drafted_step),
        "full forward": full_forward,
    }
    return measure_seconds(calls, rounds, min, budget=5.0)


def bench_steps(model, sampler_model, quick):
    """One step: how much the cache saves, and how near the step is to its own products"""
    length = 64 if quick else 256
    seconds = measure_steps(model, sampler_model, length, rounds=3 if quick else 100)
    title = f"one step for {ROWS} sequences of {length} tokens, one core, {fast_dtype('cpu')}"
    print_speeds(title, seconds, "full forward", ROWS, "tokens")

    # In the order of `calls` in measure_steps.
    cached, products, drafted, drafted_products, _ = seconds.values()
    print(
        f"A step takes {cached / products:.2f} x its matrix products. With a draft of {DRAFT} "
        f"tokens it takes {drafted / drafted_products:.2f} x its own\nproducts and "
        f"{drafted / cached:.2f} x a step without: drafts pay where a step yields more tokens than "
        "that."
    )


# ---------------------------------------------------------------- whole rollouts


def synthetic_agent(rng, sampled):
    """An agent that only takes time: it asks for turns of drawn lengths, and every third of its
    tool calls, on average, takes a tenth of a second. sampled: a list to which the number of tokens
    of each turn is added."""
    # A prompt of 60 tokens, then 1 to 9 turns.
    tokens, restart = rng.integers(0, 256, 60).tolist(), True
    for _ in range(rng.integers(1, 10)):
        answer = yield Request(tokens, restart, int(min(60, 1 + rng.exponential(12))))
        sampled.append(len(answer[0]))
        slow = bool(rng.random() < 1 / 3)
        yield Work([], partial(time.sleep, 0.1 * slow), slow)
        # The tool's answer, 20 tokens, is appended to what is in the cache already.
        tokens, restart = rng.integers(0, 256, 20).tolist(), False
    return Rollout(None, [])


def bench_samplers(sampler_model, tokenizer, rollouts):
    """Whole rollouts: how much faster they are together than one agent after the other"""
    # As many agents as rows, each with a context of up to 1,024 tokens.
    samplers = {
        "continuous batching": Sampler(sampler_model, tokenizer, ROWS, 1024),
        "plain sampler": PlainSampler(sampler_model, tokenizer, 1024),
    }

    # Rounding in bf16 depends on the batch, so the two may draw different tokens. Each counts its
    # own, and the time per token is compared.
    tokens = {}

    def play(name):
        # Each agent has its own generator, so the same agents run every time.
        sampled = []
        agents = [synthetic_agent(np.random.default_rng(i), sampled) for i in range(rollouts)]
        samplers[name].run(agents, list(range(rollouts)), patient=False)
        tokens[name] = sum(sampled)

    calls = {name: partial(play, name) for name in samplers}
    seconds = measure_seconds(calls, 1, min, budget=5.0)
    title = f"{rollouts} rollouts with tool calls, the time of one sampled token"
    each = {name: t / tokens[name] for name, t in seconds.items()}
    print_speeds(title, each, "plain sampler", unit="tokens")


def main(argv):
    quick = read_quick("decode", __doc__, argv)
    # One thread: train.py starts one such process for each core.
    torch.set_num_threads(1)
    tokenizer = byte_tokenizer()
    model, sampler_model = build_models(tokenizer, quick)
    bench_steps(model, sampler_model, quick)
    bench_samplers(sampler_model, tokenizer, 2 if quick else ROWS)


if __name__ == "__main__":
    main(sys.argv[1:])
