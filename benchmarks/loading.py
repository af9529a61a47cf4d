"""benchmarks/loading.py: how fast a published checkpoint is loaded into a model, beside reading the
bytes of its files.

    python -m benchmarks.loading            a checkpoint of 2 GB in a temporary folder
    python -m benchmarks.loading --quick    one of a few MB; seconds: does it run?

The checkpoint was just written, so the system still holds its pages: what is measured is parsing,
checking and copying, not the disk. Reading alone is what no loader can do without.
"""

import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.harness import make_parser, median_seconds, print_table
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
    with torch.device("meta"):
        model = Model(ModelConfig(**sizes)).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        write_checkpoint(folder, model.to_empty(device="cpu"))
        # Its memory is not what is measured.
        model.to("meta")
        files = list(folder.iterdir())
        size = sum(path.stat().st_size for path in files) / 1e9

        def read_files():
            for path in files:
                path.read_bytes()

        def load():
            load_model(folder, torch.bfloat16)

        read, loaded = median_seconds(read_files, load)
    rows = [
        ["reading the bytes of its files", f"{size / read:.2f}", "1.00"],
        ["into a model", f"{size / loaded:.2f}", f"{read / loaded:.2f}"],
    ]
    print_table(f"a checkpoint of {size:.2g} GB, bf16", ["", "GB/s", "x reading"], rows)


def main(argv):
    parser = make_parser("loading", __doc__)
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    try:
        bench_loading(QUICK if parser.parse_args(argv).quick else SIZES)
    except OSError as error:
        print(f"benchmarks.loading: {error.filename}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main(sys.argv[1:])
