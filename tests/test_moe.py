"""The model against slow loops, PyTorch's own autograd, and itself computed another way."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

import fast
import moe
from fast import decode
from moe import (
    Cache,
    Experts,
    Model,
    ModelConfig,
    MoE,
    Router,
    apply_rotary_emb,
    update_router_bias,
    mtp_loss,
    rope_cos_sin,
    rope_frequencies,
    decode_speculatively,
)
from small import SIZES
from published.grouped_query import VariantConfig, VariantRouter, config_of

SMALL = ModelConfig(**SIZES)
KINDS = {
    "mla": {},
    "mla, low-rank queries": dict(q_lora=12),
    "mla, stretched": dict(yarn_factor=4.0),
    "mla, untied values": dict(v_dim=24),
    "gqa": dict(attention="gqa"),
    "gqa, low-rank queries, stretched": dict(attention="gqa", q_lora=12, yarn_factor=2.0),
}


def configure(**changes):
    """SMALL with changes, which may be those of a variant"""
    return config_of({**vars(SMALL), "kv_heads": 1, **changes})


def build(seed=0, accelerate=True, **changes):
    """A model whose zero-initialised matrices are random too: at initialisation every layer is the
    identity."""
    torch.manual_seed(seed)
    model = configure(**changes).build_model()
    model = fast.accelerate(model) if accelerate else model
    with torch.no_grad():
        for p in model.parameters():
            if p.abs().sum() == 0:
                p.normal_(std=p.shape[-1] ** -0.5)
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))  # gains of 1 would hide a forgotten norm
    return model.eval()


def text(rows, length, seed=0, vocab=61):
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- decoding from the cache


@pytest.mark.parametrize("kind", list(KINDS))
@torch.inference_mode()
def test_ragged_prefill_of_scattered_rows_then_one_by_one_equals_the_full_forward(kind):
    model, tokens, chosen = build(**KINDS[kind]), text(3, 60), []
    full, cache = model(tokens, record=chosen), Cache(model, 4, 64)
    rows, done = [2, 0, 1], [0, 0, 0]
    # Noise stands for what an earlier sequence left in the cache. The last row belongs to another.
    cache.data.normal_()
    other = cache.data[:, 3].clone()
    for lengths in ([3, 37, 1], [25, 1, 16], [6, 17, 40]):
        places = enumerate(zip(done, lengths))
        record, chunks = [], [tokens[i, at : at + n].tolist() for i, (at, n) in places]
        # Zeros fill up the shorter chunks.
        width = max(lengths)
        fed = torch.tensor([chunk + [0] * (width - len(chunk)) for chunk in chunks])
        model.decode(fed, cache, rows, done, record)
        # The recorded experts, token by token; those of what fills up do not count.
        for mine, whole in zip(record, chosen):
            for i, n in enumerate(lengths):
                found = mine[0, i * width : i * width + n]
                assert torch.equal(found, whole[i, done[i] : done[i] + n])
        done = [at + n for at, n in zip(done, lengths)]
    # Decode in another order than that of the cache, each row at its own position, two tokens at a
    # time. A row that is complete feeds its last ones again.
    order, at = torch.tensor([1, 2, 0])[:, None], torch.tensor(done)[[1, 2, 0]].clamp(max=58)
    for _ in range(5):
        places = at[:, None] + torch.arange(2)
        hidden = model.decode(tokens[order, places], cache, slice(0, 3), at)
        torch.testing.assert_close(hidden, full[order, places], atol=2e-5, rtol=1e-5)
        at = (at + 2).clamp(max=58)
    assert torch.equal(cache.data[:, 3], other)


@pytest.mark.parametrize("kind", list(KINDS))
@torch.inference_mode()
def test_weights_side_by_side_decode_as_apart_take_what_is_loaded_into_them_and_may_part_again(
    kind,
):
    model, lean, tokens = build(**KINDS[kind]), build(**KINDS[kind]), text(3, 12)
    for p in lean.parameters():
        p.normal_()
    decode = lambda m: m.decode(
        tokens, Cache(m, 3, 13), slice(0, 3), torch.zeros(3, dtype=torch.long)
    )
    assert not torch.allclose(decode(lean), decode(model), atol=0.1)
    lean.load_state_dict(model.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(lean.state_dict().values(), model.state_dict().values())
    )
    torch.testing.assert_close(decode(lean), decode(model), atol=1e-5, rtol=1e-5)
    apart = copy.deepcopy(lean)
    for p in apart.parameters():
        p.mul_(1.1)
    for p in model.parameters():
        p.mul_(1.1)
    torch.testing.assert_close(decode(apart), decode(model), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_many_tokens_at_once_read_keys_and_values_back_and_few_or_few_beside_many_attend_to_latents(
    monkeypatch,
):
    model, tokens, spread = build(), text(2, 400), []
    pays = decode.FastAttention.absorbing_pays

    def counted(self, tokens, keys):
        if not pays(self, tokens, keys):
            spread.append(tokens)
        return pays(self, tokens, keys)

    monkeypatch.setattr(decode.FastAttention, "absorbing_pays", counted)
    full, cache, at = model(tokens), Cache(model, 2, 402), 0
    spread.clear()
    # Reading keys and values back pays for more than 24 tokens, but not for 45: 8 times 45 is less
    # than the number of entries that they attend to.
    for n in (24, 25, 300, 3, 45):
        hidden = model.decode(tokens[:, at : at + n], cache, slice(0, 2), torch.full((2,), at))
        torch.testing.assert_close(hidden, full[:, at : at + n], atol=2e-5, rtol=1e-5)
        at += n
    assert spread == [25] * 3 + [300] * 3


def test_the_cache_holds_one_latent_per_token_and_not_the_heads():
    model = build()
    assert Cache(model, 2, 10).data.shape == (3, 2, 10, SMALL.kv_lora + SMALL.qk_rope)
    assert Cache(build(attention="gqa"), 2, 10).data.shape[-1] == 1 * (
        SMALL.qk_nope + SMALL.qk_rope + SMALL.v_dim
    )


@torch.inference_mode()
def test_padding_that_reaches_past_the_cache_harms_nobody():
    model, tokens = build(), text(2, 10)
    cache, full = Cache(model, 2, 11), model(tokens)
    model.decode(tokens[:, :6], cache, slice(0, 2), torch.tensor([0, 0]))
    fed = torch.stack(
        (tokens[0, 6:10], torch.cat((tokens[1, 6:7], torch.zeros(3, dtype=torch.long))))
    )
    # Nine tokens from position 6 reach position 14, and the cache has 11.
    model.decode(
        torch.cat((fed, torch.zeros(2, 5, dtype=torch.long)), 1),
        cache,
        slice(0, 2),
        torch.tensor([6, 6]),
    )
    hidden = model.decode(tokens[1:, 7:10], cache, slice(1, 2), torch.tensor([7]))
    torch.testing.assert_close(hidden[0], full[1, 7:10], atol=2e-5, rtol=1e-5)
    with pytest.raises(AssertionError, match="cache of 11"):
        model.decode(tokens[:, :1], cache, slice(0, 2), torch.tensor([0, 11]))


# ---------------------------------------------------------------- attention


@torch.inference_mode()
def test_attention_equals_a_loop_over_heads_and_pairs_of_tokens():
    model, T = build(), 7
    attn, x, c = model.layers[0].attn, torch.randn(1, T, 32), SMALL
    cos, sin = model.rotary_cos_sin(torch.arange(T)[None])
    down = x[0] @ attn.wkv_a.T
    latent = F.rms_norm(down[:, : c.kv_lora], (c.kv_lora,), attn.kv_norm.weight, c.norm_eps)
    key_rope = apply_rotary_emb(down[None, :, None, c.kv_lora :], cos, sin)[0, :, 0]
    heads = []
    for h in range(c.heads):
        q = x[0] @ attn.wq[h].T
        q = torch.cat(
            (q[:, : c.qk_nope], apply_rotary_emb(q[None, :, None, c.qk_nope :], cos, sin)[0, :, 0]),
            -1,
        )
        k, v = torch.cat((latent @ attn.wk_b[h].T, key_rope), -1), latent @ attn.wv_b[h].T
        rows = []
        for t in range(T):
            score = torch.stack([q[t] @ k[s] for s in range(t + 1)]) / math.sqrt(
                c.qk_nope + c.qk_rope
            )
            rows.append(score.softmax(0) @ v[: t + 1])
        heads.append(torch.stack(rows))
    torch.testing.assert_close(
        attn(x, cos, sin)[0], torch.cat(heads, -1) @ attn.wo.T, atol=1e-5, rtol=1e-5
    )


@torch.inference_mode()
def test_two_query_heads_of_gqa_share_each_key_head():
    """Equal to plain multi-head attention whose key and value heads are copied."""
    model = build(attention="gqa", heads=4, kv_heads=2)
    many = build(attention="gqa", heads=4, kv_heads=4)
    state = {
        n: t.repeat_interleave(2, 0) if n.endswith(("attn.wk", "attn.wv")) else t
        for n, t in model.state_dict().items()
    }
    many.load_state_dict(state)
    torch.testing.assert_close(model(text(2, 9)), many(text(2, 9)), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["mla", "gqa"])
@torch.inference_mode()
def test_changing_one_token_leaves_every_earlier_logit_alone_and_moves_every_later_one(kind):
    """Earlier tokens choose the same experts too. With replayed experts each expert gets the same
    rows, so products round alike and earlier logits are equal to the bit."""
    model, tokens, experts = build(**KINDS[kind]), text(1, 14), []
    before = model.logits(model(tokens, record=experts))
    for t in range(14):
        changed, chosen = tokens.clone(), []
        changed[0, t] = (changed[0, t] + 1) % 61
        model(changed, record=chosen)
        assert all(torch.equal(a[:, :t], b[:, :t]) for a, b in zip(chosen, experts))
        after = model.logits(model(changed, replay=torch.stack(experts, 2)))
        assert torch.equal(after[:, :t], before[:, :t])
        assert ((after - before)[0, t:].abs().amax(-1) > 1e-5).all()


@pytest.mark.parametrize("kind", list(KINDS))
@torch.inference_mode()
def test_tokens_out_of_order_with_their_positions_equal_tokens_in_order(kind):
    model, tokens = build(**KINDS[kind]), text(2, 16)
    # The order of the chunks that two context-parallel ranks hold.
    zigzag = torch.cat([torch.arange(i, i + 4) for i in (0, 12, 4, 8)])
    for order in (zigzag, torch.randperm(16, generator=torch.Generator().manual_seed(1))):
        hidden = model(tokens[:, order], positions=order)
        torch.testing.assert_close(hidden[:, order.argsort()], model(tokens), atol=2e-5, rtol=1e-5)


@torch.inference_mode()
def test_two_parts_of_a_sequence_that_gather_each_others_latents_equal_the_whole():
    """Context parallelism without ranks: both parts run in lockstep, layer by layer, and `gather`
    hands over the other's entries."""
    model, tokens = build(), text(1, 16)
    parts = [torch.tensor([0, 1, 2, 3, 12, 13, 14, 15]), torch.arange(4, 12)]
    x = [model.embed(tokens[:, p]) for p in parts]
    for block in model.layers:
        angles = [model.rotary_cos_sin(p[None]) for p in parts]
        entries = [block.attn.project_qkv(block.attn_norm(h), *a)[1] for h, a in zip(x, angles)]
        keys = torch.cat(parts)
        for i, p in enumerate(parts):
            block.attn.gather_entries = lambda t: torch.cat(entries, 1)
            x[i] = block(x[i], *angles[i], mask=(keys <= p[:, None])[None, None])
            block.attn.gather_entries = lambda t: t
    torch.testing.assert_close(
        torch.cat(x, 1)[:, torch.cat(parts).argsort()], model(tokens), atol=2e-5, rtol=1e-5
    )


# ---------------------------------------------------------------- rotary positions


def test_rope_scores_depend_only_on_the_distance():
    frequency, _ = rope_frequencies(8, 100.0, 64, 1)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind(0)
    turn = lambda x, t: apply_rotary_emb(x, *rope_cos_sin((t * frequency)[None, None, None]))
    score = lambda m, n: float((turn(q, m) * turn(k, n)).sum())
    for distance in (0, 1, 5, 30):
        assert [score(n + distance, n) for n in (1, 7, 33)] == pytest.approx(
            [score(distance, 0)] * 3, abs=1e-5
        )
    assert abs(score(5, 0) - score(0, 0)) > 1e-3


def test_rope_equals_multiplication_by_complex_numbers():
    frequency, _ = rope_frequencies(8, 50.0, 64, 1)
    x, t = torch.randn(1, 6, 3, 8), torch.arange(6.0)
    angle = t[None, :, None, None] * frequency
    z = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(
        apply_rotary_emb(x, *rope_cos_sin(angle)),
        torch.cat((z.real, z.imag), -1),
        atol=1e-5,
        rtol=1e-5,
    )


def test_yarn_keeps_pairs_that_turn_often_and_slows_pairs_that_do_not_turn_once():
    dims, theta, context, factor = 64, 10000.0, 4096, 8
    plain, one = rope_frequencies(dims, theta, context, 1)
    slowed, temperature = rope_frequencies(dims, theta, context, factor)
    turns = context * plain / (2 * math.pi)
    assert one == 1 and temperature == pytest.approx((0.1 * math.log(factor) + 1) ** 2)
    assert torch.equal(slowed[turns > 40], plain[turns > 40]) and (turns > 40).sum() > 3
    torch.testing.assert_close(slowed[turns < 0.8], plain[turns < 0.8] / factor)
    assert (turns < 0.8).sum() > 3
    between = (turns > 1.5) & (turns < 25)
    assert ((slowed < plain) & (slowed > plain / factor))[between].all() and (
        slowed.diff() < 0
    ).all()


def test_extending_by_one_is_plain_rope_and_extending_later_equals_building_so():
    plain, tokens = build(), text(1, 10)
    before = plain(tokens)
    plain.extend_window(1.0)
    assert torch.equal(plain(tokens), before) and plain.config.window == 32
    plain.extend_window(4.0)
    long = build(yarn_factor=4.0)
    assert torch.equal(plain(tokens), long(tokens)) and plain.config.window == 128
    assert not torch.allclose(plain(tokens), before)


# ---------------------------------------------------------------- experts


@pytest.mark.parametrize("shared,scale", [(1, 1.0), (0, 2.5)])
@pytest.mark.parametrize("accelerate", [False, True])
def test_the_layer_equals_a_loop_over_tokens_and_their_chosen_experts(shared, scale, accelerate):
    torch.manual_seed(2)
    layer = MoE(
        dataclasses.replace(SMALL, shared=shared, route_scale=scale, num_experts_per_tok=3)
    ).eval()
    layer = fast.accelerate(layer) if accelerate else layer
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    layer.router.bias.copy_(torch.randn(6) * 0.2)
    x, e = torch.randn(2, 5, 32), layer.requires_grad_(False).experts
    swiglu = lambda t, gate, up, down: down @ (F.silu(gate @ t) * (up @ t))
    expected = torch.zeros_like(x)
    for b in range(2):
        for t in range(5):
            score = [float(torch.sigmoid(layer.router.weight[i] @ x[b, t])) for i in range(6)]
            best = sorted(range(6), key=lambda i: -(score[i] + float(layer.router.bias[i])))[:3]
            for i in best:
                gate = scale * score[i] / sum(score[j] for j in best)
                expected[b, t] += gate * swiglu(x[b, t], e.w_gate[i], e.w_up[i], e.w_down[i])
            if shared:
                expected[b, t] += swiglu(
                    x[b, t], layer.shared.w_gate, layer.shared.w_up, layer.shared.w_down
                )
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)


def test_group_limited_routing_equals_a_loop_over_the_groups_of_every_token():
    torch.manual_seed(4)
    sizes = dict(experts=12, n_group=4, topk_group=2, num_experts_per_tok=3)
    router, free = (
        VariantRouter(VariantConfig(**{**vars(SMALL), **s}))
        for s in (sizes, {**sizes, "n_group": 1, "topk_group": 1})
    )
    router.bias.copy_(torch.randn(12) * 0.1)
    free.load_state_dict(router.state_dict())
    x, odd = torch.randn(40, 32), 0
    choice, gates = router(x)
    for t in range(40):
        score = torch.sigmoid(x[t] @ router.weight.detach().T).tolist()
        biased = [s + float(b) for s, b in zip(score, router.bias)]
        worth = [sum(sorted(biased[3 * g : 3 * g + 3])[-2:]) for g in range(4)]
        groups = sorted(range(4), key=lambda g: -worth[g])[:2]
        best = sorted((i for i in range(12) if i // 3 in groups), key=lambda i: -biased[i])[:3]
        assert set(choice[t].tolist()) == set(best), t
        assert gates[t].tolist() == pytest.approx(
            [score[i] / sum(score[j] for j in best) for i in choice[t].tolist()], abs=1e-5
        )
        odd += set(best) != set(free(x[t : t + 1])[0][0].tolist())
    assert odd > 5  # the limit is felt
    # Recorded experts of three groups are taken although two groups are the limit.
    replay = torch.tensor([[0, 3, 6]]).expand(40, 3)
    assert torch.equal(router(x, replay)[0].sort(1)[0], replay)


@torch.inference_mode()
def test_a_decoding_step_gives_what_the_sorted_rows_give_and_low_precision_never_takes_the_short_cut():
    layer = build(experts=6, n_group=3, topk_group=2).layers[1].ffn
    x = torch.randn(5, 1, 32)
    assert layer.runs_wide(x)
    plain = moe.MoE.forward(layer, x)
    torch.testing.assert_close(layer(x), plain, atol=1e-5, rtol=1e-5)
    coarse = build(precision="mxfp8", expert_ffn=32).layers[1].ffn
    assert not coarse.runs_wide(x)
    most_bf16 = 2048 // 6
    for dtype, most in ((torch.float32, most_bf16 // 8), (torch.bfloat16, most_bf16)):
        assert [layer.runs_wide(torch.zeros(n, 1, 32, dtype=dtype)) for n in (most, most + 1)] == [
            True,
            False,
        ]


def test_the_bias_moves_the_choice_and_never_the_gates():
    router, x = Router(SMALL), torch.randn(50, 32)
    choice, gates = router(x)
    torch.testing.assert_close(gates.sum(1), torch.ones(50))
    router.bias[4] = 10.0
    biased, gates = router(x)
    score = torch.sigmoid(x @ router.weight.T)
    assert (biased == 4).any(1).all() and not (choice == 4).any(1).all()
    picked = score.gather(1, biased)
    torch.testing.assert_close(gates, picked / picked.sum(1, keepdim=True), atol=1e-6, rtol=1e-6)


def test_balance_moves_towards_the_mean_zeroes_the_counts_and_sums_over_ranks():
    model = build()
    blocks = [b.ffn.router for b in model.layers if isinstance(b.ffn, MoE)]
    loads = [torch.tensor([10.0, 0, 5, 5, 5, 5]), torch.tensor([1.0, 2, 3, 4, 5, 6])]
    for router, load in zip(blocks, loads):
        router.load.copy_(load)
    # The counts of another data rank, one per layer.
    other = iter([torch.tensor([0.0, 20, 5, 5, 0, 0]), torch.zeros(6)])
    worst = update_router_bias(model, rate=0.01, reduce=lambda counts: counts + next(other))
    # First layer: the sums are 10 20 10 10 5 5, their mean is 10.
    torch.testing.assert_close(blocks[0].bias, 0.01 * torch.tensor([0.0, -1, 0, 0, 1, 1]))
    # Second layer: the mean is 3.5.
    torch.testing.assert_close(blocks[1].bias, 0.01 * torch.tensor([1.0, 1, 1, -1, -1, -1]))
    assert worst == pytest.approx(2.0) and all((router.load == 0).all() for router in blocks)


def test_training_counts_every_token_once_per_chosen_expert_and_balance_evens_out_a_skewed_router():
    model, tokens = build().train(), text(4, 16)
    router = model.layers[1].ffn.router
    with torch.no_grad():
        model(tokens), model(tokens)
        assert router.load.sum() == 2 * 4 * 16 * SMALL.num_experts_per_tok
        record = []
        model.eval()(tokens, record=record)
        # The forward for evaluation has added nothing to the counts.
        assert torch.equal(torch.bincount(record[0].flatten(), minlength=6) * 2, router.load.long())
        model.train()
        first = update_router_bias(model, rate=0.02)
        for _ in range(60):
            model(tokens)
            last = update_router_bias(model, rate=0.02)
    assert last < 0.7 * first and first > 1.5


# ---------------------------------------------------------------- router replay


def test_recorded_experts_reproduce_the_forward_bit_for_bit():
    model, tokens, record = build(num_experts_per_tok=3), text(2, 12), []
    hidden = model(tokens, record=record)
    assert torch.equal(model(tokens, replay=torch.stack(record, 2)), hidden)
    assert torch.equal(model(tokens, replay=torch.stack(record, 2).to(torch.int16)), hidden)
    assert torch.equal(model(tokens, replay=torch.full((2, 12, 2, 3), -1)), hidden)


def test_replayed_experts_are_taken_while_scores_stay_live():
    """Gates are those of the current router for the recorded experts, and gradients reach the
    router through them."""
    router, x = Router(SMALL), torch.randn(20, 32)
    replay = torch.stack([torch.randperm(6)[:2] for _ in range(20)])
    choice, gates = router(x, replay)
    assert torch.equal(choice.sort(1)[0], replay.sort(1)[0])
    score = torch.sigmoid(x @ router.weight.T)
    picked = score.gather(1, choice)
    torch.testing.assert_close(gates, picked / picked.sum(1, keepdim=True), atol=1e-6, rtol=1e-6)
    upstream = torch.randn(20, 2)
    (gates * upstream).sum().backward()
    weight = router.weight.detach().clone().requires_grad_()
    picked = torch.sigmoid(x @ weight.T).gather(1, choice)
    (picked / picked.sum(1, keepdim=True) * upstream).sum().backward()
    torch.testing.assert_close(router.weight.grad, weight.grad, atol=1e-6, rtol=1e-5)
    assert router.weight.grad.abs().sum() > 0


def test_places_that_were_not_recorded_route_freely_beside_replayed_ones():
    router, x = Router(SMALL), torch.randn(30, 32)
    free = router(x)[0]
    replay = torch.full((30, 2), -1)
    replay[::2] = torch.tensor([0, 5])
    # one expert recorded, the other place free
    replay[1::3, 0] = 0
    choice = router(x, replay)[0]
    score = torch.sigmoid(x @ router.weight.T)
    for i in range(30):
        given = {int(e) for e in replay[i] if e >= 0}
        rest = [int(e) for e in score[i].argsort(descending=True) if int(e) not in given]
        assert set(choice[i].tolist()) == given | set(rest[: 2 - len(given)]), i
    assert not torch.equal(choice, free)


def test_activations_computed_again_give_the_same_gradients_and_loads_from_fewer_kept_bytes():
    model, tokens, kept = build().train(), text(2, 16), []
    routers = [block.ffn.router for block in model.layers if isinstance(block.ffn, MoE)]

    def results():
        sizes = []
        for router in routers:
            router.load = torch.zeros(6)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.nbytes) or t, lambda t: t
        ):
            model.logits(model(tokens)).square().sum().backward()
        kept.append(sum(sizes))
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        return grads, [router.load for router in routers]

    (grads, loads), model.recompute = results(), True
    again = results()
    assert (
        all(map(torch.equal, grads, again[0]))
        and all(map(torch.equal, loads, again[1]))
        and loads[0].sum() == 32 * SMALL.num_experts_per_tok
    )
    assert kept[1] < 0.3 * kept[0]


def test_replayed_tokens_are_counted_as_the_experts_that_they_went_to():
    model, tokens, record = build().train(), text(1, 8), []
    model(tokens, record=record)
    before = model.layers[1].ffn.router.load.clone()
    model(tokens, replay=torch.stack(record, 2))
    assert torch.equal(model.layers[1].ffn.router.load, 2 * before) and before.sum() == 16


@pytest.mark.parametrize("recompute", [False, True])
def test_padding_is_computed_as_token_0_and_counted_by_no_router(recompute):
    """The oracle counts the choices of the real tokens in a loop. The hidden states are those of
    token 0 in place of the padding."""
    model, tokens, record = build().train(), text(3, 16), []
    model.recompute = recompute
    padded = tokens.clone()
    # the end of a row, and a whole spare row
    padded[0, 5:], padded[2] = -1, -1
    hidden = model(padded, record=record)
    hidden.sum().backward()
    for layer, block in enumerate(block for block in model.layers if isinstance(block.ffn, MoE)):
        expected = torch.zeros(6)
        for row, column in (padded >= 0).nonzero().tolist():
            for expert in record[layer][row, column].tolist():
                expected[expert] += 1
        assert (
            torch.equal(block.ffn.router.load, expected)
            and expected.sum() == (5 + 16) * SMALL.num_experts_per_tok
        )
    assert torch.equal(hidden, model.eval()(padded.clamp(min=0)))


# ---------------------------------------------------------------- the head that drafts


def greedy(model, prompt, count):
    """The oracle for decoding: the whole sequence is computed again for every token"""
    tokens = prompt.tolist()
    for _ in range(count):
        tokens.append(int(model.logits(model(torch.tensor([tokens])))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_the_distillation_loss_is_that_of_a_loop_over_places():
    model, tokens = build(mtp=1), text(2, 6)
    hidden, losses = model(tokens).detach(), []
    cos, sin = model.rotary_cos_sin(torch.arange(5)[None])
    head = model.mtp
    for b in range(2):
        norm = lambda x, n: F.rms_norm(x, (32,), n.weight, SMALL.norm_eps)
        x = [
            head.join
            @ torch.cat(
                (
                    norm(hidden[b, t], head.hidden_norm),
                    norm(model.embed.weight[tokens[b, t + 1]], head.token_norm),
                )
            )
            for t in range(5)
        ]
        x = head.block(torch.stack(x)[None], cos, sin)[0]
        for t in range(5):
            p = (model.head.weight @ norm(hidden[b, t + 1], model.norm)).softmax(0)
            q = (model.head.weight @ norm(x[t], head.norm)).softmax(0)
            losses.append(sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist())))
    assert (
        mtp_loss(model, tokens, hidden).item() == pytest.approx(sum(losses) / 10, rel=1e-4)
        and min(losses) > 0
    )


def test_the_drafts_loss_moves_the_draft_alone_and_the_head_changes_nothing_else():
    model, tokens = build(mtp=1), text(2, 8)
    mtp_loss(model, tokens, model(tokens)).backward()
    moved = {
        n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0
    }
    assert moved == {n for n, _ in model.named_parameters() if n.startswith("mtp.")} and moved
    plain = build()
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if not n.startswith("mtp.")})
    assert torch.equal(plain(tokens), model(tokens))
    model.extend_window(4.0)
    assert (
        model.mtp.block.attn.scale == model.layers[0].attn.scale > 1
        and model.mtp.block.attn.config.yarn_factor == 4
    )


def test_speculative_decoding_gives_the_tokens_of_greedy_decoding_whatever_the_draft_is_worth():
    model, prompt = build(mtp=1), text(1, 5)[0]
    with torch.no_grad():
        expected = greedy(model, prompt, 16)
        tokens, before = decode_speculatively(model, prompt, 16)
        # The draft has learned nothing yet.
        assert tokens == expected and 0 <= before < 0.5
        optimizer = torch.optim.Adam(model.mtp.parameters(), 1e-2)
    for step in range(60):
        batch = text(4, 16, seed=step)
        mtp_loss(model, batch, model(batch).detach()).backward()
        optimizer.step(), optimizer.zero_grad()
    with torch.no_grad():
        tokens, after = decode_speculatively(model, prompt, 16)
        assert tokens == expected and after > before
        model.draft_logits = lambda hidden, following, cache, rows, start: knows(
            int(start) + following.shape[1] - len(prompt)
        )
        for lies, share in (((), 1.0), ((3, 4, 9), None), (range(99), 0.0)):
            knows = lambda i: F.one_hot(
                torch.tensor([[((expected + [0])[min(i + 1, 16)] + (i in lies)) % 61]]), 61
            )
            tokens, right = decode_speculatively(model, prompt, 16)
            assert tokens == expected and (right == share or share is None and 0 < right < 1)


# ---------------------------------------------------------------- precision, sizes, doors


@torch.inference_mode()
def test_bf16_products_stay_near_fp32_and_the_router_decides_in_fp32():
    model, tokens, exact, coarse = build(), text(4, 24), [], []
    fp32 = model.logits(model(tokens, record=exact))
    model.compute_in(torch.bfloat16)
    hidden = model(tokens, replay=torch.stack(exact, 2), record=coarse)
    bf16 = model.logits(hidden)
    assert (
        hidden.dtype == bf16.dtype == torch.float32
        and Cache(model, 1, 4).data.dtype == torch.bfloat16
    )
    assert [torch.equal(a.sort(-1)[0], b.sort(-1)[0]) for a, b in zip(exact, coarse)] == [
        True,
        True,
    ]
    error = (bf16.log_softmax(-1) - fp32.log_softmax(-1)).abs()
    assert 1e-5 < error.mean() < 0.02 and error.max() < 0.2
    model.compute_in(torch.float32)
    assert torch.equal(model.logits(model(tokens)), fp32)


def test_a_tied_head_is_the_embedding_and_gets_both_gradients():
    tied, tokens = build(tie=True), text(1, 6)
    assert tied.head.weight is tied.embed.weight
    assert len(list(tied.parameters())) == len(list(build().parameters())) - 1
    F.cross_entropy(tied.logits(tied(tokens))[0, :-1], tokens[0, 1:]).backward()
    seen = torch.zeros(61, dtype=torch.bool).scatter_(0, tokens[0], True)
    # Rows of tokens that never came in get their gradient from the head.
    assert (tied.embed.weight.grad.abs().sum(1) > 0).all() and (~seen).any()


def test_parameters_are_counted_as_stored_and_as_met_by_one_token():
    total, active = moe.parameters_per_token(SMALL)
    model = Model(SMALL)
    experts = sum(
        p.numel() for m in model.modules() if isinstance(m, Experts) for p in m.parameters()
    )
    assert total == sum(p.numel() for p in model.parameters())
    assert active == total - experts * (SMALL.experts - SMALL.num_experts_per_tok) // SMALL.experts


def test_every_parameter_gets_a_gradient():
    model = build(q_lora=12)
    F.cross_entropy(
        model.logits(model(text(4, 24)))[:, :-1].flatten(0, 1), text(4, 24)[:, 1:].flatten()
    ).backward()
    assert [
        n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0
    ] == []


def test_impossible_sizes_are_refused_in_words():
    for changes, words in (
        (dict(attention="linear"), "mla or gqa"),
        (dict(num_experts_per_tok=9), "experts"),
        (dict(qk_rope=7), "even"),
        (dict(n_group=4), "n_group=4"),
        (dict(n_group=6), "two or more"),
        (dict(n_group=3, topk_group=4), "topk_group"),
        (dict(precision="fp8"), "mxfp8"),
        (dict(precision="nvfp4"), "blocks of 32"),
        (dict(mtp=2), "mtp=2"),
    ):
        with pytest.raises(ValueError, match=words):
            configure(**changes)


def test_log_probs_are_computed_where_asked_and_zero_elsewhere():
    model, tokens = build(), text(3, 12)
    hidden, where = (
        model(tokens),
        torch.rand(3, 12, generator=torch.Generator().manual_seed(0)) < 0.4,
    )
    whole = model.logits(hidden).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(
        model.logprobs(hidden, tokens, 1.0, where), whole * where, atol=1e-5, rtol=1e-5
    )
    # Where nothing is asked for there is still a gradient, of zeros.
    model.logprobs(hidden, tokens, 1.0, where & False).sum().backward()
    assert not model.embed.weight.grad.any()


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accelerate", [False, True])
def test_sums_over_tokens_of_bf16_weights_are_kept_in_fp32(products, tie, accelerate):
    """The gradient of the most frequent token, in the embedding and in the head, is as exact as
    that of the others."""
    torch.manual_seed(0)
    sizes = dict(
        vocab=64, dim=32, layers=2, heads=2, experts=4, num_experts_per_tok=1, expert_ffn=32
    )
    config = config_of(dict(sizes, dense_ffn=32, kv_lora=16, tie=tie))
    model = config.build_model()
    model = fast.accelerate(model) if accelerate else model
    torch.nn.init.normal_(model.head.weight, std=0.1)
    model.compute_in(products)
    tokens, targets = torch.randint(1, 64, (2, 8, 512))
    tokens[torch.rand(8, 512) < 0.3] = 0
    targets[torch.rand(8, 512) < 0.3] = 0
    for p in model.parameters():
        p.data = p.data.bfloat16().float()

    def gradients(dtype):
        model.zero_grad(set_to_none=True)
        for p in model.parameters():
            p.data = p.data.to(dtype)
        (-model.logprobs(model(tokens), targets).sum() / tokens.numel()).backward()
        return model.embed.weight.grad.float(), model.head.weight.grad.float()

    exact, rounded = gradients(torch.float32), gradients(torch.bfloat16)
    for right, found in zip(exact, rounded):
        error = (found - right).norm(dim=1) / right.norm(dim=1)
        assert error[0] <= 2 * error[1:].mean() and error[0] < 0.01
