"""A model whose modules are all replaced by their fast twins computes what the plain one computes."""

from dataclasses import replace

import pytest
import torch

import fast
import moe
from rollout import Tokenizer
import train
from twins import KINDS, draw_tokens, relative_difference, twins


def forward_backward(model, tokens):
    """-> hidden states, log-probs, {name: gradient}, the routers' counts"""
    record = []
    hidden = model.train()(tokens, record=record)
    targets, where = tokens.clamp(min=0).roll(-1, 1), tokens >= 0
    logprobs = model.logprobs(hidden, targets, 0.7, where)
    loss = -logprobs.sum() / 100
    if model.mtp is not None:
        loss = loss + moe.mtp_loss(model, tokens.clamp(min=0), hidden)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    loads = [block.ffn.router.load for block in model.layers if isinstance(block.ffn, moe.MoE)]
    return hidden, logprobs, gradients, loads, record


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
def test_forward_and_gradients_are_those_of_the_plain_model(kind, dtype, tolerance):
    """To rounding. In bf16 a near-tie of the router may fall otherwise, so there the experts of the
    plain model are replayed."""
    tokens = draw_tokens(3, 40)
    tokens[0, 30:] = -1  # padding
    plain, accelerated = twins(**KINDS[kind])
    hidden, logprobs, gradients, loads, record = forward_backward(plain.compute_in(dtype), tokens)
    if dtype == torch.bfloat16:
        choice = torch.stack(record, 2)
        forward = accelerated.forward
        accelerated.forward = lambda tokens, record: forward(tokens, None, choice, record)
    found = forward_backward(accelerated.compute_in(dtype), tokens)
    assert relative_difference(found[0], hidden) <= tolerance
    assert relative_difference(found[1], logprobs) <= tolerance
    for name, gradient in gradients.items():
        assert relative_difference(found[2][name], gradient) <= 5 * tolerance, name
    assert all(torch.equal(a, b) for a, b in zip(found[3], loads))


def test_weights_and_names_stay_and_a_second_time_changes_nothing():
    plain, accelerated = twins(mtp=1)
    for module in plain.modules():
        assert not type(module).__name__.startswith("Fast")
    ours, theirs = accelerated.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs) and all(map(torch.equal, ours.values(), theirs.values()))
    kinds = [type(module) for module in accelerated.modules()]
    assert [type(module) for module in fast.accelerate(accelerated).modules()] == kinds


def sft_losses(sources, plain, steps=3):
    given = dict(
        scale="tiny",
        device="cpu",
        data=str(sources),
        context=64,
        batch_tokens=512,
        micro_tokens=256,
        demos=6,
        window=1024,
        max_turns=8,
        steps=steps,
        dtype="float32",
        plain=plain,
    )
    config = replace(train.FLAGS.configure(given, "sft"), stage="sft")
    run = train.Run(config)
    run.build(Tokenizer({bytes([b]): b for b in range(256)}))
    optimizer, source, losses = run.make_optimizer(), train.STAGE["sft"](run), []
    run.model.train()
    for step in range(steps):
        for loss in source.losses(step, {}):
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, run.model


def test_the_recipe_trains_to_the_same_losses_in_its_plain_form(tmp_path):
    """Three steps of sft in fp32: Muon's iteration differs in rounding too."""
    for i in range(10):
        (tmp_path / f"m{i}.py").write_text("def f(x):\n    return x + 1\n\n\n" * 50)
    plain, model = sft_losses(tmp_path, plain=True)
    accelerated, _ = sft_losses(tmp_path, plain=False)
    assert type(model) is moe.Model and len(plain) == len(accelerated) >= 3
    assert plain == pytest.approx(accelerated, rel=1e-4) and min(plain) < max(plain)
