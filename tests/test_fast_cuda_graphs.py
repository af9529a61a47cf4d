"""Sampling by CUDA graphs, without a card"""

import numpy as np
import pytest
import torch

from fast.cuda_graphs import CAPTURED_AFTER, CapturedSteps, GraphSampler, size_above
from recorded_graphs import Different, Failing, Recording
from rollout import Limits
from rollout import Sampler as PlainSampler
from sampling import TASKS, TRAINED, policy, same, sample
from summarize import Compaction


def play(make, compact=True, **options):
    limits = Limits(160, 9, 24, commands=2)
    tasks, seeds = [TASKS[i % 4] for i in range(8)], [(7, i) for i in range(8)]
    sampler = make(policy(), TRAINED, window=160, **options)
    return sampler, sample(sampler, tasks, seeds, Compaction(160, 50) if compact else None, limits)


def test_steps_as_graphs_yield_the_rollouts_of_the_plain_sampler():
    Recording.replays = 0
    sampler, found = play(GraphSampler, rows=5, graph=Recording)
    for plain, captured in zip(play(PlainSampler)[1], found):
        same(plain, captured)
        for segment, twin in zip(plain.segments, captured.segments):
            assert np.array_equal(segment.routes, twin.routes)
    kinds = {size[0] for size in sampler.captured.graphs}
    assert kinds == {"draw", "read"} and Recording.replays > sampler.steps / 2


def test_a_graph_reads_new_weights_where_the_old_ones_lay():
    """New weights before every step, as a generation process takes them"""

    def changing(sampler, works):
        rng = torch.Generator().manual_seed(3)
        sampler.captured.enabled = works

        def refresh():
            state = sampler.model.state_dict()
            moved = {}
            for name, tensor in state.items():
                noise = torch.randn(tensor.shape, generator=rng) * 0.02
                moved[name] = tensor + noise.to(tensor)
            sampler.model.load_state_dict(moved)
            sampler.version += 1

        sampler.refresh = refresh
        return sampler

    Recording.replays = 0
    make = lambda works: lambda *a, **o: changing(GraphSampler(*a, **o), works)
    _, expected = play(make(False), rows=5, graph=Recording)
    assert not Recording.replays
    sampler, found = play(make(True), rows=5, graph=Recording)
    assert Recording.replays > sampler.steps / 3
    for one, other in zip(expected, found):
        same(one, other)


@pytest.mark.parametrize(
    "graph, said", [(Different, "gives other numbers"), (Failing, "error during capture;")]
)
def test_where_a_capture_fails_or_differs_written_steps_go_on(graph, said, capsys):
    sampler, found = play(GraphSampler, rows=5, graph=graph)
    for plain, captured in zip(play(PlainSampler)[1], found):
        same(plain, captured)
    assert not sampler.captured.enabled and not sampler.captured.graphs
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error and "without graphs" in error


def test_what_comes_often_is_captured():
    calls = []

    def double(given):
        calls.append(1)
        return given * 2

    steps = CapturedSteps("a step", "cpu", Recording)
    for i in range(10):
        assert steps.run("size", double, torch.tensor([i])).tolist() == [2 * i]
    # The recording is one more call.
    assert len(calls) == CAPTURED_AFTER + 1


def test_sizes_are_few_and_never_too_small():
    sizes = [size_above(n) for n in range(1, 600)]
    assert all(n <= size <= max(2 * n - 1, 1) for n, size in enumerate(sizes, 1))
    assert sorted(set(sizes)) == [
        1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768,
    ]  # fmt: skip
