"""The small sizes that several test files share: a model's shape, and the flags of a run."""

import json
from pathlib import Path

# A model's shape: fields of moe.ModelConfig.
SIZES = dict(
    vocab=61,
    dim=32,
    layers=3,
    heads=2,
    kv_lora=16,
    qk_nope=8,
    qk_rope=8,
    v_dim=16,
    dense_ffn=48,
    experts=6,
    num_experts_per_tok=2,
    expert_ffn=16,
    context=32,
)
# The same, so that eight ranks can cut it.
EVEN_SIZES = SIZES | dict(vocab=48, layers=2, v_dim=8, experts=8, context=256)
# The flags of a small run of train.py.
FLAGS = [
    *"--scale=tiny --vocab=320 --dim=32 --context=64 --batch_tokens=512".split(),
    *"--micro_tokens=256 --processes=1 --demos=12 --window=512 --dtype=float32".split(),
    *"--device=cpu --max_turns=3".split(),
    # A folder of Python's standard library: no edit of this project changes this text.
    f"--data={Path(json.__file__).parent}",
]
