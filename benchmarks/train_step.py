"""benchmarks/train_step.py: a training step of the mixture of experts beside a dense layer of equal
active FLOPs, and beside transformers where that is installed.

    python -m benchmarks.train_step            one device; minutes
    python -m benchmarks.train_step --quick    small sizes, few rounds; seconds: does it run?
    python -m benchmarks.train_step --twins    what a step of SFT and of RL saves by each twin of
                                               fast/, in seconds of one core

Routing sends each expert another number of rows at every step. So the batch is a new one each time:
on a CPU the library compiles a kernel for every number of rows that it meets, and a benchmark that
repeats one batch would not see what training pays for that.

transformers gets the same small random DeepSeek-V3 with the same weights; its experts exist in two
forms, "eager" and "grouped_mm", and we are compared with whichever is faster. It runs in a process
of its own, so that kernels compiled before do not crowd it.
"""

import copy
import importlib.util
import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.decode import build_models, byte_tokenizer, decoding_step, synthetic_agent
from benchmarks.harness import make_parser, measure_seconds, print_speeds, print_table
from fast.gpu_memory import LAPTOP_SCALE
from fast import accelerate, choose, twins
from fast.samplers import make_sampler
from command.hardware import fast_dtype
from moe import FFN, Cache, Model, ModelConfig, MoE
from muon import Muon, newton_schulz
from published.loading import load_model


@dataclass(frozen=True)
class Sizes:
    """One layer: T tokens of width D, E experts of F hidden units, K of them for a token. Whole
    models: `batch` rows in training, `decoded_rows` in decoding; prompts: their lengths;
    new_tokens: how many are decoded behind them. repeat: rounds of a measurement."""

    T: int = 4096
    D: int = 256
    F: int = 512
    E: int = 16
    K: int = 2
    batch: int = 16
    decoded_rows: int = 64
    repeat: int = 5
    prompts: tuple = (64, 1024)
    new_tokens: int = 64


QUICK = Sizes(
    T=128, D=32, F=32, E=4, batch=2, decoded_rows=4, repeat=1, prompts=(16,), new_tokens=4
)


# ---------------------------------------------------------------- one layer


def build_layers(device, sizes):
    """-> {name: a forward} of a routed layer and of a dense layer with the same active FLOPs; and
    the list of all tensors that get a gradient"""
    dtype, D, K = fast_dtype(device), sizes.D, sizes.K
    torch.manual_seed(0)
    shape = dict(dim=D, experts=sizes.E, num_experts_per_tok=K, expert_ffn=sizes.F, shared=0)
    config = ModelConfig(**shape)

    # Two equal layers: one keeps the experts' weights in the dtype of the products, the other in
    # fp32 and casts them at every use. The dense layer has K * F hidden units, as many as are
    # active for a token.
    moe, moe_fp32 = (accelerate(MoE(config)).to(device) for _ in range(2))
    moe.experts.to(dtype)
    dense = FFN(D, K * sizes.F).to(device, dtype)
    x = torch.randn(1, sizes.T, D, device=device, dtype=dtype, requires_grad=True)  # (1, T, D)

    layers = {
        "dense layer": partial(dense, x),
        "MoE layer": partial(moe, x),
        "MoE layer, weights kept in fp32": partial(moe_fp32, x),
    }
    leaves = [x, *moe.parameters(), *moe_fp32.parameters(), *dense.parameters()]
    return layers, leaves


def measure_layers(device, sizes):
    """-> {name: seconds of a forward and backward}, for the layers of build_layers"""
    layers, leaves = build_layers(device, sizes)

    def forward_backward(layer):
        # Drop the gradients of all layers each time, so that no backward adds to an old one: adding
        # would take time.
        for leaf in leaves:
            leaf.grad = None
        output = layer()
        output.backward(torch.ones_like(output))

    calls = {name: partial(forward_backward, layer) for name, layer in layers.items()}
    return measure_seconds(calls, sizes.repeat)


def bench_layers(device, sizes):
    """Prints the table of one layer; 1.00 is the speed of the dense layer"""
    title = (
        f"forward + backward of a layer, {device}, {fast_dtype(device)}, "
        f"T={sizes.T} D={sizes.D} E={sizes.E} K={sizes.K} F={sizes.F}"
    )
    print_speeds(title, measure_layers(device, sizes), "dense layer", sizes.T, "tokens")


# ---------------------------------------------------------------- the laptop's model


def run_forward(model, tokens):
    with torch.no_grad():
        model.logits(model(tokens))


def train_once(model, tokens):
    """Forward and backward. Each token is its own target: the time does not depend on targets."""
    (-model.logprobs(model(tokens), tokens).mean()).backward()


def bench_laptop_model(device, sizes):
    """The laptop's model as the recipe runs it, beside its plain form (train.py --plain=1)"""
    # Two models with the same weights, and one batch for both.
    dtype, rows = fast_dtype(device), sizes.decoded_rows
    plain = Model(ModelConfig(**LAPTOP_SCALE)).to(device).compute_in(dtype)
    models = {"fast": accelerate(copy.deepcopy(plain)), "plain": plain}
    tokens = torch.randint(0, 1024, (sizes.batch, 256), device=device)  # (B, T)

    def report(what, calls, amount):
        # Both forms take turns, so that other work of the machine slows both alike.
        seconds = measure_seconds(calls, sizes.repeat)
        print_speeds(f"the laptop's model, {dtype}: {what}", seconds, "plain", amount, "tokens")

    # What evaluation and training do with a batch.
    for what, call in (("forward", run_forward), ("forward + backward", train_once)):
        calls = {name: partial(call, model, tokens) for name, model in models.items()}
        report(what, calls, tokens.numel())

    # One token for each row, from a cache that holds 300 positions of each.
    token = tokens[:1, :1].expand(rows, 1)  # (B, 1)
    with torch.inference_mode():
        steps = {}
        for name, model in models.items():
            steps[name] = decoding_step(model.eval(), token, 300, 512, device)
        report(f"decoding {rows} rows at position 300", steps, rows)


# ---------------------------------------------------------------- what each twin saves


def build_steps(sizes):
    """-> the calls of one step of SFT and one of RL, of the laptop's model with the twins that
    TWINS holds now. RL: as many agents as the batch has rows sample, and the batch is learned. Left
    out: AdamW, which has no twin, and the tools."""
    torch.manual_seed(0)
    tokenizer, dtype = byte_tokenizer(), fast_dtype("cpu")
    model, _ = build_models(tokenizer, quick=False)
    matrices = [p for p in model.layers.parameters() if p.ndim > 1]
    muon = Muon([dict(params=matrices)], ns_dtype=dtype, newton_schulz=choose(newton_schulz))
    sampler = make_sampler(model.config, dtype, "cpu", tokenizer, 1024)
    sampler.model.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 1014, (sizes.batch, 256))  # (B, T)

    def learn():
        model.zero_grad()
        train_once(model, tokens)

    def sft_step():
        learn()
        muon.step()

    def rl_step():
        agents = [synthetic_agent(np.random.default_rng(i), []) for i in range(sizes.batch)]
        sampler.run(agents, list(range(sizes.batch)))
        learn()

    return sft_step, rl_step


def bench_twins(sizes):
    """Prints what a step of each stage saves by each twin: the share of the time that it takes
    when this one is taken out of TWINS, and when all are"""
    steps, every = {"none": build_steps(sizes)}, twins.TWINS
    for out in (*every, None):
        twins.TWINS = tuple(twin for twin in every if out not in (None, twin))
        steps[out.twin.partition(":")[2] if out else "all"] = build_steps(sizes)
    twins.TWINS = every

    # The time of this process alone: the machine may be busy, and some tools sleep.
    columns = []
    for stage in range(2):
        calls = {name: pair[stage] for name, pair in steps.items()}
        seconds = measure_seconds(calls, sizes.repeat, min, clock=time.process_time)
        columns.append(
            {name: (f"{t:.3f}", f"{1 - seconds['none'] / t:.1%}") for name, t in seconds.items()}
        )
    rows = [[name, *columns[0][name], *columns[1][name]] for name in steps]
    print_table("without", ["twin", "SFT s", "it saves", "RL s", "it saves"], rows)


# ---------------------------------------------------------------- transformers


def build_both(device, dtype):
    """One small random DeepSeek-V3 -> ({kind of experts: transformers' model}, ours with the same
    weights)"""
    import transformers

    # Their model once for each form of the experts. Each gets a configuration of its own, because a
    # model writes its form into it.
    theirs = {}
    for kind in ("eager", "grouped_mm"):
        config = transformers.DeepseekV3Config(
            vocab_size=1024,
            hidden_size=256,
            intermediate_size=512,
            moe_intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=16,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            q_lora_rank=None,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            first_k_dense_replace=1,
            max_position_embeddings=2048,
        )
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, experts_implementation=kind
        )
        theirs[kind] = model.to(device)

    # Ours reads the weights of one of theirs from a checkpoint in the published format.
    with tempfile.TemporaryDirectory() as folder:
        theirs["eager"].save_pretrained(folder)
        ours = accelerate(load_model(folder, dtype, device)).compute_in(dtype)
    return theirs, ours


def bench_training(theirs, ours, device, sizes):
    """Forward and backward of each model, with kernels that were compiled for it"""
    # Ours is measured first, because their kernels push ours out of the cache of compiled kernels.
    models = {"ours": ours} | theirs

    def train_model(model):
        # The loss of theirs is written out here: cross-entropy over all positions, in fp32.
        tokens = torch.randint(0, 1024, (8, 256), device=device)
        model.zero_grad()
        if model is ours:
            train_once(ours, tokens)
        else:
            logits = model(tokens, use_cache=False).logits.flatten(0, 1).float()
            F.cross_entropy(logits, tokens.flatten()).backward()

    # One model after the other: on a CPU two models that take turns would push each other's
    # compiled kernels out of the cache.
    seconds = {}
    for name, model in models.items():
        step = partial(train_model, model.train())
        seconds |= measure_seconds({name: step}, 3 * sizes.repeat)

    # The base of the ratios is the faster of their two forms.
    base = min(theirs, key=seconds.get)
    print_speeds("training, a new batch each time", seconds, base, 8 * 256, "tokens")


def bench_generation(theirs, ours, device, sizes):
    """Greedy decoding behind prompts of several lengths, against the generate() of transformers"""
    rows, new = 16, sizes.new_tokens
    theirs, ours = theirs["grouped_mm"].eval(), ours.requires_grad_(False).eval()
    # Without an end token, both decode all of the new tokens.
    greedy = dict(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    generate = partial(theirs.generate, **greedy)

    @torch.inference_mode()
    def decode_greedily(prompts):
        # The whole prompt (B, T) in one forward, then one token at a time.
        length = prompts.shape[1]
        cache = Cache(ours, rows, length + new + 1)
        hidden = ours.decode(prompts, cache, slice(0, rows), prompts.new_zeros(rows))
        for i in range(new):
            token = ours.logits(hidden[:, -1:]).argmax(-1)
            position = prompts.new_full((rows,), length + i)
            hidden = ours.decode(token, cache, slice(0, rows), position)

    # The longer the prompt, the larger the share of the time that its prefill takes.
    for length in sizes.prompts:
        prompts = torch.randint(0, 1024, (rows, length), device=device)
        calls = {
            "transformers": partial(generate, prompts),
            "ours": partial(decode_greedily, prompts),
        }
        seconds = measure_seconds(calls, 3 if sizes.repeat > 1 else 1)
        title = f"{rows} prompts of {length} tokens, {new} decoded for each"
        print_speeds(title, seconds, "transformers", rows * new, "tokens")


def bench_against_transformers(device, sizes):
    """The comparison with transformers: the body of a process of its own"""
    import transformers

    # A new process starts with a thread for each core again.
    torch.set_num_threads(1)
    dtype = fast_dtype(device)
    theirs, ours = build_both(device, dtype)
    print(f"\na small DeepSeek-V3, transformers {transformers.__version__} and ours, {dtype}")
    bench_training(theirs, ours, device, sizes)
    bench_generation(theirs, ours, device, sizes)


def main(argv):
    parser = make_parser("train_step", __doc__)
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    parser.add_argument("--twins", action="store_true", help="what a step saves by each twin")
    asked = parser.parse_args(argv)
    sizes = QUICK if asked.quick else Sizes()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # One thread: train.py starts one such process for each core.
    torch.set_num_threads(1)
    if asked.twins:
        return bench_twins(sizes)
    bench_layers(device, sizes)
    bench_laptop_model(device, sizes)

    # transformers is optional.
    if importlib.util.find_spec("transformers") is None:
        print("\ntransformers is not installed: no comparison with it")
        return

    # A process of its own, in which no kernel has been compiled before. spawn starts a new
    # interpreter; fork would copy this one.
    process = multiprocessing.get_context("spawn").Process(
        target=bench_against_transformers, args=(device, sizes)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main(sys.argv[1:])
