"""muon.py against its oracles: the SVD, torch.optim.Muon, torch.optim.AdamW, and one process for every sharded layout."""
import copy
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from conftest import run_ranks
from muon import COEFFICIENTS, Muon, check_parameters, orthogonalize, qk_clip, step_scale

torch.set_num_threads(1)
SHAPES = {"heads": (6, 8, 40), "experts": (8, 24, 16), "odd": (3, 13, 7), "output": (40, 48), "tall": (50, 12), "small": (2, 3)}


def tensors(seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def train(place, steps=3, dtype=torch.float32, **options):
    """Three Muon steps; place(name, tensor) puts a full tensor where it belongs. Returns full parameters and the optimizer."""
    params = {name: torch.nn.Parameter(place(name, value)) for name, value in tensors(0).items()}
    rest = {name: torch.nn.Parameter(place(name, value)) for name, value in tensors(1, {"gain": (7,), "embed": (11, 5)}).items()}
    columns = {"output"}
    optimizer = Muon([dict(params=[(n, p) for n, p in params.items() if n not in columns], lr=0.02, weight_decay=0.1),
                      dict(params=[(n, p) for n, p in params.items() if n in columns], lr=0.03, column_blocks=6, scale="spectral"),
                      dict(params=list(rest.items()), algorithm="adamw", lr=0.01)], ns_dtype=dtype, **options)
    everything = {**params, **rest}
    for step in range(steps):
        for name, grad in tensors(10 + step, {n: p.shape for n, p in everything.items()}).items():
            everything[name].grad = place(name, grad)
        optimizer.step()
    whole = {n: (p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()) for n, p in everything.items()}
    return whole, optimizer


LAYOUTS = {  # name -> mesh shape and placements by parameter
    "rows of one mesh": ((4,), {None: (Shard(0),)}),
    "rows of the experts inside": ((4,), {None: (Shard(0),), "experts": (Shard(1),), "heads": (Shard(1),), "odd": (Shard(1),)}),
    "columns": ((3,), {None: (Shard(0),), "experts": (Shard(2),), "output": (Shard(1),), "odd": (Shard(2),), "tall": (Shard(1),)}),
    "replicas": ((2, 2), {None: (Replicate(), Shard(0)), "experts": (Replicate(), Shard(1)), "odd": (Replicate(), Shard(1))}),
    "all replicated": ((3,), {None: (Replicate(),)}),
    "more ranks than rows": ((7,), {None: (Shard(0),), "odd": (Shard(1),)}),
    "two shards": ((2, 2), {None: (Shard(0), Shard(0)), "experts": (Shard(1), Shard(0)), "odd": (Shard(2), Shard(1))}),
}


def one_layout(rank, world, name, dtype, options):
    shape, placements = LAYOUTS[name]
    mesh = DeviceMesh("cpu", torch.arange(world).view(shape))
    whole, optimizer = train(lambda n, t: distribute_tensor(t, mesh, placements.get(n, placements[None])), dtype=dtype, **options)
    return whole, optimizer.traffic


@pytest.mark.parametrize("name", LAYOUTS)
def test_sharded_steps_equal_one_process_exactly(name):
    reference, _ = train(lambda n, t: t.clone())
    for whole, _ in run_ranks(math.prod(LAYOUTS[name][0]), one_layout, name, torch.float32, {}):
        assert {n: (whole[n] - p).abs().max().item() for n, p in reference.items()} == dict.fromkeys(reference, 0.0)
