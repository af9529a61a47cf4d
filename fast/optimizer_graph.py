"""fast/optimizer_graph.py: Muon's step on one GPU as a CUDA graph.

Newton-Schulz of a small model is some hundred kernels over hundreds of matrices, and Python takes
longer to start them and to cut the views than the card to run them: on one H200 a step of the
default's model takes 22.8 ms, of which its products need 3.0 (benchmarks/gpu_h200.md).

GraphMuon is muon.Muon whose way from the gradients to the orthogonalized matrices is recorded once
and then repeated by one call. Weight decay and the learning rate change from step to step, so what
they multiply, the last lines of a step, runs as it is written; so does AdamW. Momentum, Nesterov
and the number of iterations are part of the recording: where one of them changes, another one is
made.

On a CPU, over several ranks, or for weights in bf16 it is muon.Muon to the letter. Left out:
messages within a graph; AdamW, whose few launches are not worth it.
"""

import math
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from fast.cuda_graphs import CapturedSteps, CudaGraph
from muon import Muon


def is_on_card(tensor):
    return tensor.device.type == "cuda"


class GraphMuon(Muon):
    """muon.Muon with its matrix products as a CUDA graph. graph: the class that records."""

    def __init__(self, *arguments, graph=CudaGraph, **options):
        self.graph, self.captured = graph, None
        self.ready = None  # while a step is run or recorded: its orthogonalized matrices
        super().__init__(*arguments, **options)

    def run_tasks(self, tasks):
        params = list(dict.fromkeys(unit.sharded.param for task in tasks for unit in task.held))
        if not self.can_capture(tasks, params):
            return super().run_tasks(tasks)

        # A graph repeats addresses. State that was put in place of another, as load_state_dict
        # does, needs new graphs.
        momenta = [self.state[sharded.param]["momentum"] for sharded in self.sharded_params]
        if not self.captured or list(map(id, momenta)) != list(map(id, self.captured.changed)):
            device = params[0].device
            name = "a step of the optimizer"
            self.captured = CapturedSteps(name, device, self.graph, changed=momenta)

        # The gradients come in one tensor. What Python reads besides decides which graph it is.
        gradients = torch.cat([p.grad.flatten() for p in params])
        settings = [(g["momentum"], g["nesterov"], g["ns_steps"]) for g in self.muon_groups()]
        size = *map(id, params), *settings
        function = partial(self.orthogonalize_all, params=params, tasks=tasks)
        found = self.captured.run(size, function, gradients)

        # Cut apart again, they move the weights, by the learning rate of this step.
        units = [unit for task in tasks for unit in task.own_pieces]
        pieces = found.split([math.prod(unit.shape) for unit in units])
        pieces = [piece.view(unit.shape) for piece, unit in zip(pieces, units)]
        super().apply_updates(units, pieces)

    def can_capture(self, tasks, params):
        """Is all on one card, in fp32, and nobody asks when what happens?"""
        if not params or not is_on_card(params[0]) or self.events is not None:
            return False
        if any(task.gathers or task.returns for task in tasks):
            return False
        return all(p.dtype == torch.float32 and not isinstance(p, DTensor) for p in params)

    def muon_groups(self):
        return [group for group in self.param_groups if group["algorithm"] == "muon"]

    def orthogonalize_all(self, gradients, params, tasks):
        """gradients: of the parameters, one behind the other -> the orthogonalized matrices, one
        behind the other in the order of the tasks. Momentum moves on."""
        own = [p.grad for p in params]
        sizes = [p.numel() for p in params]
        try:
            for p, gradient in zip(params, gradients.split(sizes)):
                p.grad = gradient.view_as(p)
            self.ready = []
            super().run_tasks(tasks)
            return torch.cat([piece.flatten() for piece in self.ready])
        finally:
            self.ready = None
            for p, gradient in zip(params, own):
                p.grad = gradient

    def apply_updates(self, units, pieces):
        if self.ready is None:
            return super().apply_updates(units, pieces)
        self.ready += pieces
