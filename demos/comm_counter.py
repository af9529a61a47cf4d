"""demos/comm_counter.py: how many bytes a rank receives, by collective, whoever calls it.

FSDP, DTensor and our own exchanges all end in torch's collective operators, so a dispatch mode that
sees every operator counts them all. The demonstration of hsdp.py compares its layouts with it, and
the tests compare the planner with it.

It stands apart from hsdp.py because counting is no part of cutting a model. Left out: what hardware
or NCCL makes of a collective; the counts are those of the usual ring algorithms.
"""

from collections import Counter

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class CommCounter(TorchDispatchMode):
    """`with CommCounter() as counter`: counter.bytes are the bytes that this rank receives, by
    collective, whoever calls it."""

    # {name of torch's operator behind "c10d::": what the field calls it}
    KINDS = {
        "_allgather_base_": "all-gather",
        "_reduce_scatter_base_": "reduce-scatter",
        "allreduce_": "all-reduce",
        "alltoall_base_": "all-to-all",
    }

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        """Called by torch in place of every operator: counts a collective, then runs it"""
        if DTensor in types:
            return NotImplemented  # DTensor handles it, and it comes back with plain tensors
        kind = self.KINDS.get(op._schema.name.removeprefix("c10d::"))
        if kind:
            self.bytes[kind] += self.received(kind, args)
        return op(*args, **(kwargs or {}))

    def received(self, kind, args):
        """Bytes that this rank receives, by the usual ring algorithms; args: of torch's operator"""
        # The operators differ in the order of their arguments.
        group = dist.ProcessGroup.unbox(args[1 if kind == "all-reduce" else 2])
        others = (group.size() - 1) / group.size()

        # A ring all-reduce is a reduce-scatter and an all-gather.
        if kind == "all-reduce":
            return 2 * others * sum(t.nbytes for t in args[0])

        # With unequal splits: all that arrives, less the part that the rank sends to itself.
        if kind == "all-to-all" and args[3]:
            output, splits = args[0], args[3]
            from_itself = splits[group.rank()] * output.nbytes // max(len(output), 1)
            return output.nbytes - from_itself

        # Else all ranks have equal shares of the larger tensor: a reduce-scatter's input, or the
        # output of an all-gather or of an all-to-all without splits.
        whole = args[1] if kind == "reduce-scatter" else args[0]
        return others * whole.nbytes
