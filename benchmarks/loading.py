"""benchmarks/loading.py: how fast a published checkpoint is loaded into a model, beside reading the
bytes of its files.

    python -m benchmarks.loading            a checkpoint of 2 GB in a temporary folder
    python -m benchmarks.loading --quick    one of a few MB; seconds: does it run?

The checkpoint was just written, so the system still holds its pages: what is measured is parsing,
checking and copying, not the disk. Reading alone is what no loader can do without.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import measure_seconds, print_speeds, read_quick
from command.flags import usage_error
from moe import Model, ModelConfig
from published.export import write_checkpoint
from published.loading import load_model

SIZES = dict(
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
    v_dim=64,
)
QUICK = {**SIZES, "vocab": 512, "dim": 128, "layers": 2, "experts": 4, "expert_ffn": 64}


def bench_loading(sizes):
    # Weights of any values: what is measured does not depend on them.
    with torch.device("meta"):
        model = Model(ModelConfig(**sizes)).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        write_checkpoint(folder, model.to_empty(device="cpu"))
        # The model that was written gives its memory back: the one that is read needs it.
        model.to("meta")
        files = list(folder.iterdir())
        megabytes = sum(path.stat().st_size for path in files) / 1e6

        def read_files():
            for path in files:
                path.read_bytes()

        calls = {
            "reading the files": read_files,
            "into a model": partial(load_model, folder, torch.bfloat16),
        }
        seconds = measure_seconds(calls, 5)
    title = f"a checkpoint of {megabytes:,.0f} MB, bf16"
    print_speeds(title, seconds, "reading the files", megabytes, "MB")


def main(argv):
    quick = read_quick("loading", __doc__, argv)
    try:
        bench_loading(QUICK if quick else SIZES)
    except OSError as error:
        usage_error(f"{error.filename}: {error.strerror or error}", program="benchmarks.loading")


if __name__ == "__main__":
    main(sys.argv[1:])
