"""Did a change of the code change a number? Every stage, small, from one seed, on one process.

    python tests/reference.py --record=FILE [--part=tiny,laptop,muon]   before the change
    python tests/reference.py --compare=FILE [--part=...]               after it: exit code 1 and what differs

Recorded are the log lines of each stage (all but what a clock or the memory says), the evaluation, the
transcripts and a hash of each stage's weights. One thread, since the order of a sum depends on
their number. The bits depend on the machine too (bf16): a recorded file is of use where it was
made, and is not kept in git. About 30 s for tiny, 3 minutes for laptop, 10 s for muon.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
STAGES = ("pretrain", "long", "sft", "rl")
# Keys of a log line that a clock or the machine's memory decides.
CLOCK = {"seconds", "tokens_per_s", "memory", "rollout_s", "minutes"}
# What the laptop's model does at its start: 60 steps of sft, 5 of rl.
LAPTOP = {"pretrain": 20, "long": 5, "sft": 60, "rl": 5}


def hash_bytes(*parts):
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def hash_weights(folder):
    """-> hash over the names and bits of all tensors of a checkpoint folder, in order of name"""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as there:
        dcp_to_torch_save(folder, f"{there}/whole.pt")
        tensors = torch.load(f"{there}/whole.pt", weights_only=False)
    flat = {}

    def collect(prefix, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(f"{prefix}.{key}", inner)
        elif torch.is_tensor(value):
            flat[prefix] = value

    collect("", tensors)
    parts = []
    for name in sorted(flat):
        tensor = flat[name].detach().contiguous()
        parts += [name.encode(), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()]
    return hash_bytes(*parts)


def read_run(out):
    """-> what a run in a folder said and made, without what a clock decides"""
    run = {}
    for stage in STAGES:
        if not Path(out, f"{stage}.jsonl").exists():
            continue
        lines = [json.loads(line) for line in Path(out, f"{stage}.jsonl").open()]
        run[f"{stage} log"] = [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]
        run[f"{stage} weights"] = hash_weights(Path(out, stage))
    if Path(out, "transcripts.jsonl").exists():
        run["transcripts"] = hash_bytes(Path(out, "transcripts.jsonl").read_bytes())
    if Path(out, "summary.json").exists():
        run["summary"] = json.loads(Path(out, "summary.json").read_text())["policies"]
    return run


def train(out, *flags):
    command = [sys.executable, "train.py", "--processes=1", "--device=cpu", "--seed=7"]
    command += [f"--out={out}", *flags]
    print("$", " ".join(command[1:]), flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr[-2000:]}")


def tiny(folder):
    """The whole recipe at the tiny scale: four steps a stage, evaluation included"""
    train(f"{folder}/tiny", "--scale=tiny")
    return read_run(f"{folder}/tiny")


def laptop(folder):
    """The laptop's model at the beginning of its recipe"""
    for stage, steps in LAPTOP.items():
        train(
            f"{folder}/laptop",
            "--scale=laptop",
            f"--stage={stage}",
            f"--steps={steps}",
            "--demos=1000",
        )
    return read_run(f"{folder}/laptop")


def muon_rank(rank, world):
    """Three steps of a sharded small model. -> (losses, hash of the whole weights)"""
    import torch

    import fast
    import hsdp
    from fast.gram_newton_schulz import gram_newton_schulz
    from muon import Muon

    model = fast.accelerate(hsdp.demo_model())
    meshes = hsdp.make_meshes(world)
    model = hsdp.parallelize(model, meshes)
    matrices = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and "embed" not in name and "head" not in name
    ]
    optimizer = Muon([dict(params=matrices, lr=0.02)], newton_schulz=gram_newton_schulz)
    losses = []
    for step in range(3):
        losses.append(hsdp.forward_backward(model, meshes, step))
        optimizer.step()
        model.zero_grad()
    state = hsdp.full_state(model)
    parts = []
    for name in sorted(state):
        tensor = state[name].detach().contiguous()
        parts += [name.encode(), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()]
    return losses, hash_bytes(*parts)


def muon(folder):
    """Muon on one rank and on four"""
    from conftest import run_ranks

    return {f"{world} ranks": list(run_ranks(world, muon_rank)[0]) for world in (1, 4)}


PARTS = {"tiny": tiny, "muon": muon, "laptop": laptop}


def differences(before, after, path=""):
    """-> one line for each place where two nested values differ; keys that only one side has are
    named once"""
    if isinstance(before, dict) and isinstance(after, dict):
        lines = []
        for key in [*before, *(key for key in after if key not in before)]:
            if key not in after or key not in before:
                lines.append(f"{path}/{key}: only {'before' if key in before else 'after'}")
            else:
                lines += differences(before[key], after[key], f"{path}/{key}")
        return lines
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{path}/{i}")]
    return [] if before == after else [f"{path}: {str(before)[:60]} -> {str(after)[:60]}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", metavar="FILE")
    parser.add_argument("--compare", metavar="FILE")
    parser.add_argument("--part", default=",".join(PARTS), help="a list of: " + ", ".join(PARTS))
    given = parser.parse_args()
    if bool(given.record) == bool(given.compare):
        parser.error("one of --record=FILE and --compare=FILE")
    parts = given.part.split(",")
    with tempfile.TemporaryDirectory() as folder:
        results = {name: PARTS[name](folder) for name in parts}
    # As the file holds them: a tuple is a list there.
    results = json.loads(json.dumps(results))
    if given.record:
        Path(given.record).write_text(json.dumps(results, indent=1))
        print(f"recorded: {given.record}")
        return
    recorded = json.loads(Path(given.compare).read_text())
    lines = [line for name in parts for line in differences(recorded[name], results[name], name)]
    print("\n".join(lines[:60]) or f"equal to the last bit: {', '.join(parts)}")
    raise SystemExit(1 if lines else 0)


if __name__ == "__main__":
    main()
