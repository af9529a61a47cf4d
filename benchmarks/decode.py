"""benchmarks/decode.py: how fast tokens are sampled, beside what one would write first and beside a
floor.

    python -m benchmarks.decode            laptop model on one core, about a minute
    python -m benchmarks.decode --quick    a small model and few rounds, seconds: does it run?

A decoding step from the cache of latents is compared with a full forward for every token (without a
cache), and with its own matrix products alone, which no other way of writing it can do without. The
same for a step that is fed a draft of three tokens as well. Then whole episodes with tool calls:
continuous batching (a row that ends makes room at once) against static batching (a batch begins and
ends together), and against rollout.py's plain sampler (one agent after the other, one token at a
time) with the same model.

Left out: the agents' thinking. A synthetic agent asks for turns of drawn lengths, and every third
of its tools takes a tenth of a second.
"""

import sys
import time

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import least_seconds, make_parser, print_table
from fast import accelerate
from fast.sampler import Sampler
from fast.workers import generation_model
from moe import Cache, fast_dtype
from rollout import Chain, Request, Tokenizer, Work, random_model, sample_from_logits
from rollout import Sampler as PlainSampler

ROWS, WINDOW = 32, 512  # sequences side by side, places of a sequence in the cache
DRAFT = 3  # tokens that a draft proposes, none of them right


# ---------------------------------------------------------------- one step


class Products(TorchDispatchMode):
    """Keeps the matrix products of what runs under it, with their operands; in inference mode they
    pass here undecomposed."""

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
    """-> a function that does again only the matrix products (attention's own included) of
    `step()`"""
    with Products() as mode:
        step()
    assert mode.kept, "no matrix product was seen"

    def multiply():
        for function, args, kwargs in mode.kept:
            function(*args, **kwargs)

    return multiply


def byte_tokenizer(vocab=1014):
    """A tokenizer of the laptop's size without training one: every byte, and pairs of bytes."""
    ranks = {bytes([b]): b for b in range(256)}
    for i in range(256, vocab):
        ranks[bytes(divmod(i, 256))] = i
    return Tokenizer(ranks)


def build_models(tokenizer, quick):
    """-> a model as it is trained, and one with the same weights that only generates"""
    # train.py's laptop scale, of 1,024 tokens
    sizes = dict(kv_lora=128, qk_nope=32)
    if quick:
        sizes = dict(dim=64, layers=2, heads=2, kv_lora=32, experts=4)
    dtype = fast_dtype("cpu")
    model = accelerate(random_model(tokenizer, **sizes)).compute_in(dtype)
    sampler_model = generation_model(model.config, dtype)
    sampler_model.load_state_dict(model.state_dict())
    return model, sampler_model


def measure_steps(model, sampler_model, length, rounds):
    """{what: seconds of one step for ROWS sequences of `length` tokens}"""
    tokens = torch.randint(0, 256, (ROWS, length + 1 + DRAFT))
    start = torch.full((ROWS,), length)
    cache = Cache(sampler_model, ROWS, WINDOW + 2)

    def step(width):
        fed = tokens[:, length : length + width]
        hidden = sampler_model.decode(fed, cache, slice(0, ROWS), start).flatten(0, 1)
        return sample_from_logits(sampler_model.logits(hidden), torch.rand(len(hidden)))

    def plain_step():
        return step(1)

    def drafted_step():
        return step(1 + DRAFT)

    def full_forward():
        hidden = model(tokens[:, : length + 1])[:, -1]
        return sample_from_logits(model.logits(hidden), torch.rand(ROWS))

    with torch.inference_mode():
        # The cache holds a prompt of `length` tokens before the clock starts.
        sampler_model.decode(
            tokens[:, :length], cache, slice(0, ROWS), torch.zeros(ROWS, dtype=torch.long)
        )
        return least_seconds(
            {
                "from the latent cache": plain_step,
                "its matrix products alone": matrix_products(plain_step),
                "with 3 drafts, none right": drafted_step,
                "its matrix products": matrix_products(drafted_step),
                "full forward per token": full_forward,
            },
            rounds,
        )


# ---------------------------------------------------------------- whole episodes


def synthetic_agent(rng):
    """An agent for the clock: turns of drawn lengths, and tools of which every third takes a tenth
    of a second."""
    tokens, restart = rng.integers(0, 256, 60).tolist(), True
    for _ in range(rng.integers(1, 10)):
        yield Request(tokens, restart, int(min(60, 1 + rng.exponential(12))))
        slow = bool(rng.random() < 1 / 3)

        def use_tool(seconds=0.1 * slow):
            time.sleep(seconds)

        yield Work([], use_tool, slow)
        tokens, restart = rng.integers(0, 256, 20).tolist(), False
    return Chain(None, [])


class StaticBatching(Sampler):
    """What continuous batching is measured against: a batch begins together, each turn waits for
    the longest and for the slowest tool, and a new batch for the last to end; who waits is fed with
    the others. (Rows that ended are taken out, which is kind to it.)"""

    def padded_batch_size(self, active, rows):
        return len(rows) + -len(rows) % 8

    def handle_turns(self, rows, queue, done, on_end):
        if not any(row.sampling for row in rows):
            rows = super().handle_turns(rows, [] if rows else queue, done, on_end)
            while any(row.tool for row in rows):
                rows = super().handle_turns(rows, [], done, on_end)
        return rows


def count_sampled_tokens(sampler, episodes):
    """Run so many synthetic agents -> the number of tokens that were sampled for them"""
    bodies = []

    def recording_agent(agent):
        # Passes on what the agent asks for and what it is answered, and keeps the sampled bodies.
        asked = next(agent)
        while True:
            answer = yield asked
            if answer:
                bodies.append(answer[0])
            try:
                asked = agent.send(answer)
            except StopIteration as end:
                return end.value

    # The same agents every time: each draws from a generator of its own.
    agents = [recording_agent(synthetic_agent(np.random.default_rng(i))) for i in range(episodes)]
    sampler.run(agents, list(range(episodes)), patient=isinstance(sampler, StaticBatching))
    return sum(len(body) for body in bodies)


def measure_episodes(samplers, episodes, rounds):
    """samplers: {name: makes a sampler} -> {name: (seconds, sampled tokens)}. bf16 rounds by the
    batch: now and then two of them sample different tokens."""
    sampled, calls = {}, {}
    for name, make_sampler in samplers.items():

        def play(name=name, make_sampler=make_sampler):
            sampled[name] = count_sampled_tokens(make_sampler(), episodes)

        calls[name] = play
    seconds = least_seconds(calls, rounds)
    return {name: (seconds[name], sampled[name]) for name in samplers}


def print_episodes(title, found, slowest):
    """A table of what measure_episodes found, with the ratio to the sampler named `slowest`"""
    speeds = {name: tokens / t for name, (t, tokens) in found.items()}
    rows = []
    for name, (t, _) in found.items():
        ratio = speeds[name] / speeds[slowest]
        rows.append([name, f"{t:.2f}", f"{speeds[name]:,.0f}", f"{ratio:.2f}"])
    print_table(title, ["", "seconds", "tokens/s", f"x {slowest.split()[0]}"], rows)


def bench_samplers(sampler_model, tokenizer, quick):
    """Whole episodes, by three samplers"""

    def continuous():
        return Sampler(sampler_model, tokenizer, ROWS, 1024)

    def static():
        return StaticBatching(sampler_model, tokenizer, ROWS, 1024)

    def plain():
        return PlainSampler(sampler_model, tokenizer, 1024)

    # Whole episodes: what continuous batching saves.
    episodes = 12 if quick else 96
    samplers = {"continuous batching": continuous, "static batching": static}
    found = measure_episodes(samplers, episodes, rounds=1 if quick else 2)
    title = f"{episodes} episodes with tool calls in {ROWS} rows"
    print_episodes(title, found, "static batching")

    # The plain sampler plays as many as the other has rows.
    episodes = 4 if quick else ROWS
    samplers = {"continuous batching": continuous, "plain sampler": plain}
    found = measure_episodes(samplers, episodes, rounds=1)
    title = f"{episodes} episodes with tool calls, all at once and one after the other"
    print_episodes(title, found, "plain sampler")


# ---------------------------------------------------------------- the command


def bench_decoding(quick=False):
    # As in train.py's processes: one for each core.
    torch.set_num_threads(1)
    length = 64 if quick else 256
    tokenizer = byte_tokenizer()
    model, sampler_model = build_models(tokenizer, quick)

    # One step: what the cache saves, and how near it is to its own products.
    seconds = measure_steps(model, sampler_model, length, rounds=3 if quick else 100)
    slowest = seconds["full forward per token"]
    rows = []
    for name, t in seconds.items():
        rows.append([name, f"{1e3 * t:.2f}", f"{ROWS / t:,.0f}", f"{slowest / t:.2f}"])
    print_table(
        f"one step for {ROWS} sequences of {length} tokens, one core, {fast_dtype('cpu')}",
        ["", "ms a step", "tokens/s", "x full forward"],
        rows,
    )
    cached, products, drafted, drafted_products, _ = seconds.values()
    print(
        f"A step takes {cached / products:.2f} x its matrix products. With a draft of {DRAFT} "
        f"tokens it takes {drafted / drafted_products:.2f} x its own\nproducts and "
        f"{drafted / cached:.2f} x a step without: drafts pay where a step yields more tokens than "
        "that."
    )

    bench_samplers(sampler_model, tokenizer, quick)


def main(argv):
    parser = make_parser("decode", __doc__)
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    bench_decoding(parser.parse_args(argv).quick)


if __name__ == "__main__":
    main(sys.argv[1:])
