"""demos/forked_ranks.py: several ranks on one machine, forked, for demonstrations and benchmarks.

torchrun starts ranks as new processes and waits seconds for their imports. A fork has everything
imported, so four ranks cost tenths of a second. They talk over gloo on the CPU.

It stands here because muon.py, hsdp.py and benchmarks/muon.py show something on many ranks and none
of them is about starting processes. Left out: restarts, other machines, GPUs (a process that has
used one cannot be forked).
"""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def fork_ranks(world, call, *args):
    """Forks `world` ranks on this machine and runs call(rank, world, *args) in each. -> what they
    return, by rank: anything that torch.load reads with weights_only=True"""
    if sys.platform != "linux":  # macOS may hang where a process that has threads is forked
        print(
            f"{os.path.basename(sys.argv[0])}: this part forks ranks, which is safe on Linux only; "
            "the functions themselves work under torchrun",
            file=sys.stderr,
        )
        raise SystemExit(2)
    import torch._dynamo  # noqa: F401  FSDP and optimizers import it: once here, not in every child

    # gloo talks over the local interface. Results come back in files, one per rank.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        # Joining raises the first traceback of a rank that failed, at once.
        mp.start_processes(run_rank, (world, folder, call, args), world, start_method="fork")
        return [torch.load(f"{folder}/{rank}", weights_only=True) for rank in range(world)]


def run_rank(rank, world, folder, call, args):
    """The life of one rank: join the group, run the call, leave its result in a file."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # it stays on the CPU, whatever cards there are
    torch.set_num_threads(1)
    store, patience = dist.FileStore(f"{folder}/store", world), timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    torch.save(call(rank, world, *args), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()
