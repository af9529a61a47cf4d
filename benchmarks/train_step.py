"""train_step: HEAD TO BE WRITTEN"""

from moe import (
    Cache,
    FFN,
    MoE,
    Model,
    ModelConfig,
    fast_dtype,
    grouped_swiglu,
    load,
    load_model,
    looped_swiglu,
    write_checkpoint,
)
import torch.nn.functional as F
import importlib.util
import multiprocessing
import tempfile
import time
import torch
from pathlib import Path
from functools import partial


def seconds(*calls, repeat=5):
    """Median wall time of each call, measured in turns after a round that warms up: a busy machine
    is then busy for all."""
    times = [[] for _ in calls]
    for _ in range(repeat + 1):
        for call, mine in zip(calls, times):
            start = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            mine.append(time.perf_counter() - start)
    return [sorted(mine[1:])[repeat // 2] for mine in times]


def bench():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # as in train.py's processes: one for each core
    torch.set_num_threads(1)
    dtype, T, D, Fe, E, K = fast_dtype(device), 4096, 256, 512, 16, 2
    torch.manual_seed(0)
    config = ModelConfig(dim=D, experts=E, active=K, expert_ffn=Fe, shared=0)
    moe, master, dense = (
        MoE(config).to(device),
        MoE(config).to(device),
        FFN(D, K * Fe).to(device, dtype),
    )
    moe.experts.to(dtype)
    x = torch.randn(1, T, D, device=device, dtype=dtype, requires_grad=True)
    y = torch.randn(T * K, D, device=device, dtype=dtype)
    # others every time, as in training
    counts = lambda: torch.bincount(torch.randint(0, E, (T * K,), device=device), minlength=E)
    weights = (moe.experts.w_gate, moe.experts.w_up, moe.experts.w_down)

    def both(layer):
        for leaf in (x, *moe.parameters(), *master.parameters(), *dense.parameters()):
            leaf.grad = None
        out = layer()
        out.backward(torch.ones_like(out))

    layers = {
        "dense layer of equal active FLOPs": lambda: dense(x),
        "MoE layer": lambda: moe(x),
        "MoE layer, weights kept in fp32": lambda: master(x),
        "experts, grouped_mm": lambda: grouped_swiglu(y, counts(), *weights),
        "experts, loop": lambda: looped_swiglu(y, counts(), *weights),
    }
    times = seconds(*(partial(both, layer) for layer in layers.values()))
    where = "one core" if device == "cpu" else torch.cuda.get_device_name()
    print(f"{where}, {dtype}, T={T} D={D} E={E} K={K} F={Fe}, forward + backward")
    for name, t in zip(layers, times):
        print(f"  {name:36s} {1e3 * t:8.2f} ms   {t / times[0]:5.2f} x dense")
    model = Model(ModelConfig()).to(device).compute(dtype)
    tokens = torch.randint(0, 1024, (16, 256), device=device)
    (train,) = seconds(
        lambda: F.cross_entropy(
            model.logits(model(tokens)).flatten(0, 1), tokens.flatten()
        ).backward()
    )
    with torch.inference_mode():
        cache, start = Cache(model.eval(), 64, 512), torch.full((64,), 300, device=device)
        (one,) = seconds(
            lambda: model.logits(
                model.decode(tokens[:1, :1].expand(64, 1), cache, slice(0, 64), start)
            )
        )
    print(
        f"laptop model: {tokens.numel() / train:,.0f} tokens/s forward + backward, {64 / one:,.0f} tokens/s decoding 64 rows at 300"
    )
    loading()
    # in a process of its own: kernels compiled before crowd it
    if importlib.util.find_spec("transformers"):
        other = multiprocessing.get_context("spawn").Process(
            target=against_transformers, args=(device,)
        )
        other.start(), other.join()


def loading():
    """A checkpoint of 2 GB, whose pages the system still holds: into a model, and for comparison
    its bytes into memory."""
    sizes = dict(
        vocab=32000,
        dim=1024,
        layers=6,
        dense_ffn=4096,
        experts=64,
        expert_ffn=896,
        heads=16,
        kv_lora=256,
        qk_nope=64,
        qk_rope=32,
    )
    with torch.device("meta"):
        model = Model(ModelConfig(**sizes, v_dim=64)).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder, "model"), model.to_empty(device="cpu"))
        # its memory is not what is measured
        model.to("meta")
        files = list(Path(folder, "model").iterdir())
        size = sum(path.stat().st_size for path in files) / 1e9
        read, load = seconds(
            lambda: [path.read_bytes() for path in files],
            lambda: load_model(files[0].parent, torch.bfloat16),
        )
    print(
        f"a checkpoint of {size:.1f} GB is loaded at {size / load:.1f} GB/s, {read / load:.2f} x the speed of reading its files"
    )


def against_transformers(device, rows=16, new=64):
    """Where transformers is installed: training steps and greedy decoding of one small random
    DeepSeek-V3 by both. Training meets a new batch at every step, so that the experts get other
    numbers of rows: see `filled` for what that costs on a CPU."""
    import transformers

    torch.set_num_threads(1)
    dtype = fast_dtype(device)
    # one each: a model writes its kind of experts into it
    sizes = lambda: transformers.DeepseekV3Config(
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
    theirs = {
        kind: transformers.AutoModelForCausalLM.from_config(
            sizes(), dtype=dtype, experts_implementation=kind
        ).to(device)
        for kind in ("eager", "grouped_mm")
    }
    with tempfile.TemporaryDirectory() as folder:
        theirs["eager"].save_pretrained(folder)
        ours = load_model(folder, dtype, device).compute(dtype)
    # ours first: their kernels crowd out what ours have compiled
    models = {"ours": ours} | theirs
    draw = lambda *shape: torch.randint(0, 1024, shape, device=device)
    same = draw(8, 256)

    def step(model, batch):
        tokens = batch()
        model.zero_grad()
        if model is ours:
            return ours.logprobs(ours(tokens), tokens).mean().neg().backward()
        F.cross_entropy(
            model(tokens, use_cache=False).logits.flatten(0, 1).float(), tokens.flatten()
        ).backward()

    @torch.inference_mode()
    def decode(start):
        length = start.shape[1]
        cache, text = Cache(ours, rows, length + new + 1), start
        hidden = ours.decode(start, cache, slice(0, rows), start.new_zeros(rows))
        for i in range(new):
            token = ours.logits(hidden[:, -1:]).argmax(-1)
            text = torch.cat((text, token), 1)
            hidden = ours.decode(token, cache, slice(0, rows), start.new_full((rows,), length + i))
        return text

    generate = partial(
        theirs["grouped_mm"].generate,
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    print(f"a small DeepSeek-V3, transformers {transformers.__version__} and ours, {dtype}")
    for title, batch in (
        ("a new batch each time", lambda: draw(8, 256)),
        ("the same batch again", lambda: same),
    ):
        times = [
            seconds(partial(step, model.train(), batch), repeat=15)[0] for model in models.values()
        ]
        for name, t in zip(models, times):
            print(
                f"  training, {title}, {name:12s} {same.numel() / t:8,.0f} tokens/s   {min(times[1:]) / t:5.2f} x their faster one"
            )
    theirs["grouped_mm"].eval(), ours.side_by_side().eval()
    for length in (64, 1024):
        start = draw(rows, length)
        times = seconds(partial(generate, start), partial(decode, start), repeat=3)
        for name, t in zip(("generate", "ours"), times):
            print(
                f"  prompts of {length:4d}, {rows} rows decoded, {name:8s} {rows * new / t:8,.0f} tokens/s  {times[0] / t:5.2f} x theirs"
            )
