"""Decoding from the cache: latents with absorbed weights, joined weights and all experts at once,
against the plain decode that rebuilds keys and values."""

import pytest
import torch

import moe
from twins import KINDS, draw_tokens, twins


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_prefill_and_decoding_are_those_of_the_plain_model(kind):
    """Rows of different lengths, in an order of their own; hidden states, experts, and what the
    cache holds"""
    tokens, found = draw_tokens(3, 40), []
    for model in twins(**KINDS[kind]):
        cache, record = moe.Cache(model.eval(), 3, 50), []
        chunks = [tokens[0, :17].tolist(), tokens[1, :3].tolist(), tokens[2, :30].tolist()]
        for chunk, row in zip(chunks, (2, 0, 1)):
            record.append([])
            model.decode(torch.tensor([chunk]), cache, [row], [0], record[-1])
        prefilled = [torch.cat(layer, 1)[0] for layer in zip(*record)]
        start, rows, record, hidden = torch.tensor([3, 30, 17]), [1, 2, 0], [], []
        for step in range(4):
            fed = tokens[rows, start][:, None]
            hidden.append(model.decode(fed, cache, slice(0, 3), start, record))
            start = start + 1
        found.append(
            (torch.cat(hidden, 1), cache.data, torch.cat(prefilled + [r[0] for r in record]))
        )
    for expected, mine in zip(*found):
        torch.testing.assert_close(mine, expected, atol=2e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_draft_from_the_cache_is_that_of_the_plain_model():
    tokens, found = draw_tokens(2, 12), []
    for model in twins(mtp=1):
        cache = moe.Cache(model.eval(), 2, 14)
        place = (cache, slice(0, 2), [0, 0])
        hidden = model.decode(tokens[:, :-1], *place)
        found.append(model.draft_logits(hidden, tokens[:, 1:], *place))
    torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=1e-5)


def test_speculative_decoding_yields_the_tokens_of_the_plain_model():
    plain, accelerated = twins(mtp=1)
    prompt = draw_tokens(1, 6)[0]
    assert (
        moe.decode_speculatively(plain.eval(), prompt, 12)[0]
        == moe.decode_speculatively(accelerated.eval(), prompt, 12)[0]
    )
