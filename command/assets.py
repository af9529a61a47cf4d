"""command/assets.py: the policies of the default run, small enough to lie in the repository.

    python -m command.assets out/run    out/run/sft and out/run/rl -> assets/sft, assets/rl
                                        its figures and report.html -> assets

A folder of a policy holds the weights as the sampler holds them (matrices in bf16, so it samples
the same tokens), configuration, tokenizer, and the commit that the run was made at. It has no
optimizer: a stage can start from it, and none can go on with it.

    python rollout.py                                         the trained agent at work
    python eval.py assets/sft assets/rl                       the README's table
    python train.py --stage=rl --steps=5 --start_from=assets/sft --out=out/change
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch

from command import checkpoints, flags
from fast.samplers import sampling_model

usage_error = partial(flags.usage_error, program="command.assets")
ASSETS = Path(__file__).resolve().parent.parent / "assets"
# What is kept of what a checkpoint says of itself
KEPT = "config", "model", "tokenizer", "step", "patch"
PAGES = "report.html", "score.png", "effort.png", "bench.png", "reward.png"


def keep_policy(source, target, commit):
    """The checkpoint `source` without its optimizer, in the folder `target`"""
    model, extra = checkpoints.load_model(source)
    held = sampling_model(model.config, torch.bfloat16).state_dict()
    weights = {name: tensor.to(held[name].dtype) for name, tensor in model.state_dict().items()}
    kept = {name: extra[name] for name in KEPT if name in extra}
    checkpoints.save_policy(target, weights, {**kept, "commit": commit})


def main(argv):
    if len(argv) != 1:
        usage_error("one run: python -m command.assets out/run")
    run = Path(argv[0])
    try:
        commit = json.loads((run / "summary.json").read_text())["commit"]
        # All is read before any of it is replaced.
        for stage in ("sft", "rl"):
            checkpoints.load_model(run / stage)
        pages = {name: (run / name).read_bytes() for name in PAGES}
        for stage in ("sft", "rl"):
            keep_policy(run / stage, ASSETS / stage, commit)
            size = sum(path.stat().st_size for path in (ASSETS / stage).iterdir())
            print(f"{ASSETS / stage}: {size / 1e6:.1f} MB, of commit {commit}")
        for name, page in pages.items():
            (ASSETS / name).write_bytes(page)
    except (OSError, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", None) or error
        usage_error(f"{run} is no finished run: {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
