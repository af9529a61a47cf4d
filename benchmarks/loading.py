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
    """Writes a checkpoint to a temporary folder, then times reading its files and loading it"""
    # The meta device allocates no memory and draws no weights.
    with torch.device("meta"):
        model = Model(ModelConfig(**sizes)).to(torch.bfloat16)

    with tempfile.TemporaryDirectory() as scratch:
        # The weights that are written stay uninitialised: the time does not depend on their values.
        folder = Path(scratch, "model")
        write_checkpoint(folder, model.to_empty(device="cpu"))

        # The written model frees its memory, because the loaded model needs as much.
        model.to("meta")

        # The lower bound reads the bytes of all files and does nothing with them.
        files = list(folder.iterdir())
        megabytes = sum(path.stat().st_size for path in files) / 1e6

        def read_files():
            for path in files:
                path.read_bytes()

        # Both are timed in turns, and each speed is that of the same number of bytes.
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
