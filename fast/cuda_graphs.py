"""fast/cuda_graphs.py: steps as CUDA graphs, those of the sampler.

A decoding step of a small model starts hundreds of kernels, each shorter than the time that Python
needs to start it. A CUDA graph records them once and starts them by one call: on one H200 a token
for 32 rows takes 2.2 ms in the place of 17.6 (benchmarks/gpu_h200.md).

A graph repeats addresses and sizes. So everything that changes from step to step comes in one
tensor (the tokens, where they stand, the random numbers), and steps are padded to a few sizes:
rows, tokens per row, cached entries that are looked at. The first steps of a size run as they are
written. Then it is captured, and the capture is run once beside the written step: where a number
differs, or capturing fails, written steps go on, and one line says so.

Weights may change between two steps: load_state_dict writes them to where they lie. Copies that
the twins of fast/decode.py made of them are made anew. The optimizer's graph stands in
fast/optimizer_graph.py.

Left out: graphs of forward and backward in training; a graph that many lengths of the cache share
(paged attention).

Letters: B rows, W tokens fed of each, N = B * W, L layers with experts, K experts per token.
"""

import collections
import sys
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

import rollout
from fast.sampler import Sampler

# A size is captured when it comes for this time: what comes less often is not worth it.
CAPTURED_AFTER = 3
# Steps with more tokens than this keep the card busy as they are written.
MAX_TOKENS = 2048


class CudaGraph:
    """A function of one tensor, recorded with its kernels and addresses. pool: memory that several
    graphs share, since they never run at once."""

    def __init__(self, function, given, pool):
        self.given = given.clone()
        self.graph = torch.cuda.CUDAGraph()
        # Threads of tools may use the card meanwhile: only this one is watched.
        mode = "thread_local"
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode=mode):
            self.found = function(self.given)

    def replay(self, given):
        """-> the function's result for other numbers of the same shape. The next replay of a graph
        of this pool overwrites it."""
        self.given.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.found


class CapturedSteps:
    """Runs functions of one tensor on a device, those that come often as graphs. name: what they
    are, for the line that says that they fail; graph: the class that records; model: whose weights
    they read; changed: tensors that they change where they lie."""

    def __init__(self, name, device, graph=CudaGraph, model=None, changed=()):
        self.name, self.device, self.graph, self.changed = name, device, graph, changed
        self.modules = list(model.modules()) if model else []
        self.weights = [*model.parameters(), *model.buffers()] if model else []
        self.changes = self.count_changes()
        self.pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        self.times_seen = collections.Counter()
        self.graphs = {}  # by size
        self.enabled = True

    def count_changes(self):
        """How often the weights were changed where they lie"""
        return sum(weight._version for weight in self.weights)

    def run(self, size, function, given):
        """-> function(given). size: all that decides which kernels run."""
        # What the twins keep of the weights follows them, in its place.
        if self.count_changes() != self.changes:
            for module in self.modules:
                if hasattr(module, "rejoin"):
                    module.rejoin()
            self.changes = self.count_changes()

        if size in self.graphs:
            return self.graphs[size].replay(given)
        given = given.to(self.device, non_blocking=True)
        self.times_seen[size] += 1
        if not self.enabled or self.times_seen[size] < CAPTURED_AFTER:
            return function(given)
        return self.capture(size, function, given)

    def capture(self, size, function, given):
        """Runs the function, records it, and runs the recording on the same numbers -> what the
        function itself has found"""
        before = [tensor.clone() for tensor in self.changed]
        found = function(given)
        after = [tensor.clone() for tensor in self.changed]
        try:
            graph = self.graph(function, given, self.pool)
            copy_all(self.changed, before)
            same = torch.equal(graph.replay(given), found)
            same = same and all(map(torch.equal, self.changed, after))
            problem = "" if same else "it gives other numbers"
        except RuntimeError as error:
            problem = str(error).strip().partition("\n")[0]

        if not problem:
            self.graphs[size] = graph
            return found
        copy_all(self.changed, after)
        self.enabled = False
        self.graphs.clear()
        tqdm.write(f"{self.name} as a CUDA graph: {problem}; without graphs now", file=sys.stderr)
        return found


def copy_all(targets, sources):
    for target, source in zip(targets, sources):
        target.copy_(source)


def size_above(number):
    """The next of the sizes 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, ..."""
    power = 1 << (number - 1).bit_length()
    between = power * 3 // 4
    return between if number <= between and between >= 12 else power


class GraphSampler(Sampler):
    """The sampler on a GPU: Sampler with its two forwards as graphs"""

    most_rows = 512  # a GPU reads the weights for so many in the time that it takes for 128

    def __init__(self, *arguments, rows=most_rows, graph=CudaGraph, **options):
        super().__init__(*arguments, rows=rows, **options)
        self.captured = CapturedSteps("a sampling step", self.device, graph, self.model)

    def padded_batch_size(self, active):
        return size_above(active)

    def piece_widths(self, longest):
        return [1 << power for power in range(3, max(4, longest.bit_length() + 1))]

    def keys_for(self, start, width):
        """How many cached entries are looked at: a few sizes, up to the last token at least"""
        return min(self.cache.data.shape[2], size_above(max(256, max(start) + width)))

    def decode_and_draw(self, tokens, position, uniforms):
        # One row of numbers for each of the batch: where it is fed, its tokens, its random numbers.
        # fp64 holds them all exactly.
        rows, width = len(tokens), len(tokens[0])
        given = np.zeros((rows, 1 + 2 * width))
        given[:, 0], given[:, 1 : 1 + width] = position, tokens
        for i, numbers in enumerate(uniforms):
            given[i, 1 + width : 1 + width + len(numbers)] = numbers

        # One copy to the card and one back, with all that is read.
        size = "draw", rows, width, self.keys_for(position, width)
        draw = partial(self.draw_everywhere, width=width, keys=size[-1])
        found = self.captured.run(size, draw, torch.from_numpy(given)).cpu().numpy()

        # A row has `width` places of which the first ones were fed, the rest is padding.
        places = [width * i + j for i, numbers in enumerate(uniforms) for j in range(len(numbers))]
        logprobs = found[places, 1].view(np.float32).tolist()
        return found[places, 0].tolist(), logprobs, self.unpack_choices(found[:, 2:])

    def draw_everywhere(self, given, width, keys):
        """given (B, 1 + 2 W), see decode_and_draw -> int32 (N, 2 + L K): the token drawn behind
        each place, the bits of its log-prob, and the experts that the place took"""
        start, tokens, uniforms = given.split((1, width, width), 1)
        batch, record = slice(0, len(given)), []
        start = start[:, 0].long()
        hidden = self.model.decode(tokens.long(), self.cache, batch, start, record, keys)
        logits = self.model.logits(hidden.flatten(0, 1))  # (N, V)
        uniforms = uniforms.flatten().float()
        drawn, logprobs = rollout.sample_from_logits(logits, uniforms, self.temperature)
        return join_columns([drawn[:, None], logprobs.view(torch.int32)[:, None]], record)

    def read_pieces(self, tokens, rows, start):
        # Padded to a few sizes: the last piece again stores the same entries.
        number, width = len(tokens), len(tokens[0])
        padded = size_above(number)
        if padded * width > MAX_TOKENS:
            return super().read_pieces(tokens, rows, start)
        given = np.empty((padded, 2 + width))
        given[:number, 0], given[:number, 1], given[:number, 2:] = rows, start, tokens
        given[number:] = given[number - 1]

        size = "read", padded, width, self.keys_for(start, width)
        read = partial(self.read_everywhere, keys=size[-1])
        found = self.captured.run(size, read, torch.from_numpy(given))
        return self.unpack_choices(found[: number * width].cpu().numpy())

    def read_everywhere(self, given, keys):
        """given (B, 2 + W): row of the cache, first position, tokens -> int32 (N, L K): the experts
        that the tokens took"""
        row, start, tokens = given.long().split((1, 1, given.shape[1] - 2), 1)
        record = []
        self.model.decode(tokens, self.cache, row[:, 0], start[:, 0], record, keys)
        return join_columns([tokens.new_zeros(tokens.numel(), 0)], record)

    def unpack_choices(self, packed):
        """(N, L K) -> (N, L, K)"""
        return packed.reshape(len(packed), *self.routes_shape()[1:])


def join_columns(columns, record):
    """columns: (N, number) each; record: of Model.decode, (1, N, K) each -> int32 (N, all)"""
    return torch.cat([*columns, *(choice[0] for choice in record)], 1).int()
