"""fast/stochastic_rounding.py: Muon for weights in bf16, so that they keep small updates.

bf16 has 8 bits for the digits: an update of less than 1/512 of its weight is lost if the sum is
rounded to the nearest, every time. Rounded up or down by chance, the sum is right in the mean.

RoundingMuon is muon.Muon with this one change. Two ranks that hold a copy of the same weights must
round alike, and a weight must not notice how its matrix is cut. So the noise is no stream of random
numbers but a hash of the step, the parameter and the place of the weight in the whole.

It stands apart from muon.py because it is about the format of the weights, not about their update.
It is no twin: with --weight_dtype=bfloat16 it is the recipe. Left out: fp8 weights.
"""

import torch
from torch.distributed.tensor import DTensor

from muon import Muon, shard_of


class RoundingMuon(Muon):
    """Muon whose bf16 weights are rounded by chance. Its state also counts the steps of every such
    weight, since the noise must differ from step to step, and go on as it was after a resume."""

    def __init__(self, *args, **options):
        self.places = {}  # parameter -> (index of its group, place in the group)
        super().__init__(*args, **options)

    def add_param_group(self, group):
        super().add_param_group(group)
        for place, param in enumerate(self.param_groups[-1]["params"]):
            self.places[param] = len(self.param_groups) - 1, place
            # AdamW counts its steps anyway.
            if param.dtype.itemsize < 4:
                self.state[param].setdefault("step", torch.zeros(()))

    def run_tasks(self, tasks):
        """Called once in every step"""
        for state in self.state.values():
            if "momentum" in state and "step" in state:
                state["step"] += 1
        super().run_tasks(tasks)

    def write_weight(self, weight, exact, param, unit=None):
        # Both numbers are alike on every rank.
        step = int(self.state[param]["step"])
        if unit is None:
            seed = step, *self.places[param]
            start = block_start(param)
        else:
            seed = step, unit.sharded.number, unit.n
            start = [part.start for part in unit.pieces[unit.sharded.rank]]
        stochastic_round(weight, exact, seed, start)


def block_start(tensor):
    """Where the block that this rank holds begins in the whole tensor: a number per dimension"""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    mesh = tensor.device_mesh
    edges = shard_of(tensor.shape, mesh.shape, tensor.placements, mesh.get_coordinate())
    # Every second edge is a start. The tensor's own dimensions are the last of the three.
    return edges[::2][len(edges) // 2 - tensor.ndim :]


def stochastic_round(weight, exact, seed, start=None):
    """weight (bf16) <- one of the two neighbours of exact (fp32), each with the probability that
    makes the mean exact. Equal seeds round alike. Weights in fp16 are rounded to the nearest.

    start: where this block begins in the whole tensor, a number per dimension; all zeros unless
    given. A number's noise follows from the seed and its place in the whole: it is the same however
    the tensor is cut, and on every device."""
    if weight.dtype != torch.bfloat16:
        weight.copy_(exact)
        return
    noise = noise_of_places(start or (0,) * weight.ndim, weight.shape, seed, weight.device)
    # bf16 is the upper 16 bits of fp32. Random bits are added to the lower 16, which are then cut
    # off: the larger they are, the likelier is a carry into the upper ones.
    weight.copy_(((exact.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32))


def noise_of_places(start, shape, seed, device):
    """Random int32 from 0 to 65,535 for the block of this shape that begins at `start`: a hash of
    the seed and of each number's place. The places of each dimension are hashed as a vector, and
    the vectors are combined by one more hash."""
    # Python hashes integers alike in every process.
    key = hash((*seed, -1)) % 2**31
    noise = torch.full((), key, dtype=torch.int32, device=device)
    for dim, (first, size) in enumerate(zip(start, shape)):
        # The key of a dimension keeps place (1, 2) from the noise of place (2, 1).
        key = hash((*seed, dim)) % 2**31
        places = torch.arange(first, first + size, dtype=torch.int32, device=device)
        noise = noise[..., None] ^ scramble(scramble(places) + key)  # one more dimension
    return scramble(noise) & 0xFFFF


def scramble(bits):
    """A hash of each int32 (Chris Wellons' lowbias32): every bit of the result depends on every bit
    of the input."""
    # A shift of a signed number fills up with its sign, which the masks clear.
    bits = bits ^ (bits >> 16 & 0xFFFF)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15 & 0x1FFFF)
    bits = bits * (0x846CA68B - 2**32)  # as a signed number
    return bits ^ (bits >> 16 & 0xFFFF)
