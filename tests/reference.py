"""Did a change of the code change a number? Every stage, small, from one seed, on one process.

    python tests/reference.py --record=FILE [--part=tiny,laptop,muon]   before the change
    python tests/reference.py --compare=FILE [--part=...]               after it: exit code 1 and what differs

Recorded are the log lines of each stage (without the values that a clock or the memory decides),
the evaluation, the transcripts and a hash of each stage's weights. Everything runs on one thread,
since the order of a sum depends on the number of threads. The bits depend on the machine too
(bf16): a recorded file is of use only where it was made, and is not kept in git. About 30 s for
tiny, 3 minutes for laptop, 10 s for muon.
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
# Steps of each stage of the part `laptop`, which runs only the beginning of the recipe.
LAPTOP = {"pretrain": 20, "long": 5, "sft": 60, "rl": 5}


def hash_bytes(*parts):
    """-> 16 hexadecimal digits over all parts together"""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def hash_weights(folder):
    """-> hash over the names and bits of all tensors of a checkpoint folder, in order of name"""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    # The shards of the checkpoint become one file.
    with tempfile.TemporaryDirectory() as there:
        dcp_to_torch_save(folder, f"{there}/whole.pt")
        tensors = torch.load(f"{there}/whole.pt", weights_only=False)

    # Nested dicts become one: "prefix.key" -> tensor. What is no tensor is left out.
    flat = {}

    def collect(prefix, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(f"{prefix}.{key}", inner)
        elif torch.is_tensor(value):
            flat[prefix] = value

    collect("", tensors)

    # Bytes, since numpy knows no bf16; sorted, since a dict's order does not count.
    parts = []
    for name in sorted(flat):
        tensor = flat[name].detach().contiguous()
        parts += [name.encode(), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()]
    return hash_bytes(*parts)


def read_run(out):
    """-> all that a run left in its folder (logs, weights, transcripts, evaluation), without the
    values that a clock decides"""
    # Each stage that was run: its log lines and a hash of its weights.
    run = {}
    for stage in STAGES:
        if not Path(out, f"{stage}.jsonl").exists():
            continue
        lines = [json.loads(line) for line in Path(out, f"{stage}.jsonl").open()]
        run[f"{stage} log"] = [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]
        run[f"{stage} weights"] = hash_weights(Path(out, stage))

    # What rl and the evaluation leave, where they were run.
    if Path(out, "transcripts.jsonl").exists():
        run["transcripts"] = hash_bytes(Path(out, "transcripts.jsonl").read_bytes())
    if Path(out, "summary.json").exists():
        run["summary"] = json.loads(Path(out, "summary.json").read_text())["policies"]
    return run


def train(out, *flags):
    """Runs train.py in a process of its own, in the one way that repeats: one process, one thread,
    a fixed seed and a fixed order of sets. Ends this program if it fails."""
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
    from muon import Muon, newton_schulz

    # The model of hsdp.py's demo, cut over the ranks. The optimizer comes after the cut, because
    # parallelize replaces the parameters.
    model = fast.accelerate(hsdp.demo_model())
    meshes = hsdp.make_meshes(world)
    model = hsdp.parallelize(model, meshes)
    matrices = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and "embed" not in name and "head" not in name
    ]
    optimizer = Muon([dict(params=matrices, lr=0.02)], newton_schulz=fast.choose(newton_schulz))

    # Only the matrices are updated.
    losses = []
    for step in range(3):
        losses.append(hsdp.forward_backward(model, meshes, step))
        optimizer.step()
        model.zero_grad()

    # Gathered whole, so that the hash does not depend on how the weights are cut.
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
    """-> one line for each place where two nested values differ. Of a key that only one side has,
    one line says so, and what is below it is not listed."""
    # Dicts by key, lists of equal length by index; anything else is compared as a whole.
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
    # The command line: exactly one of --record and --compare.
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", metavar="FILE")
    parser.add_argument("--compare", metavar="FILE")
    parser.add_argument("--part", default=",".join(PARTS), help="a list of: " + ", ".join(PARTS))
    given = parser.parse_args()
    if bool(given.record) == bool(given.compare):
        parser.error("one of --record=FILE and --compare=FILE")

    # Run the parts.
    parts = given.part.split(",")
    with tempfile.TemporaryDirectory() as folder:
        results = {name: PARTS[name](folder) for name in parts}

    # Through JSON and back, so that both sides of a comparison hold lists instead of tuples.
    results = json.loads(json.dumps(results))
    if given.record:
        Path(given.record).write_text(json.dumps(results, indent=1))
        print(f"recorded: {given.record}")
        return

    # Compare the parts that were asked for; at most 60 lines are shown.
    recorded = json.loads(Path(given.compare).read_text())
    lines = [line for name in parts for line in differences(recorded[name], results[name], name)]
    print("\n".join(lines[:60]) or f"equal to the last bit: {', '.join(parts)}")
    raise SystemExit(1 if lines else 0)


if __name__ == "__main__":
    main()
