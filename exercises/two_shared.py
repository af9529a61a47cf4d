"""9. Two shared experts.   moe.py, `MoE`   six lines

DeepSeek-V2 has two shared experts (`n_shared_experts` of its configuration). With shared=2 our
layer has one network of twice the width. For the forward pass that is the same: the sum of two
networks is one network with the weights side by side. For Muon it is not: the update of each matrix
is orthogonalized by itself, expert by expert (stated), and two experts in one matrix share one.

Let `MoE.shared` be an nn.ModuleList of `shared` networks of width expert_ffn, whose outputs are
added up, and give DEMO two of them. The fast twins of the layer stand for the old form; they step
aside. Checkpoints of before have other names and do not load.

    python -m pytest exercises/two_shared.py       red before, green after
    python moe.py                                  expert load, parameters, out/moe.png

Number to reach: 148,352 parameters, 111,488 of them at work on a token (before: 142,208 and
105,344). Look at: the loss that moe.py prints with the bias and without it, and the shares of the
experts: what do the routed ones have to learn where two are always there?
"""

from dataclasses import replace

import torch

import fast
import moe
import muon
from command.checkpoints import load_checkpoint, save_checkpoint

CONFIG = replace(moe.DEMO, shared=2)


def random_model(config=CONFIG):
    torch.manual_seed(0)
    model = moe.Model(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(std=0.1)
    return model


def mixture(model):
    return model.layers[1].ffn


def test_the_output_is_the_sum_of_the_routed_and_both_shared_experts():
    layer = mixture(random_model())
    x = torch.randn(2, 5, CONFIG.dim)
    both = sum(expert(x) for expert in layer.shared)
    whole = layer(x)
    layer.shared = torch.nn.ModuleList()
    torch.testing.assert_close(whole, layer(x) + both)


def test_it_is_one_network_with_the_weights_side_by_side():
    first, second = mixture(random_model()).shared
    wide = moe.FFN(CONFIG.dim, 2 * CONFIG.expert_ffn)
    with torch.no_grad():
        wide.w_gate.copy_(torch.cat((first.w_gate, second.w_gate)))
        wide.w_up.copy_(torch.cat((first.w_up, second.w_up)))
        wide.w_down.copy_(torch.cat((first.w_down, second.w_down), 1))
    x = torch.randn(7, CONFIG.dim)
    torch.testing.assert_close(first(x) + second(x), wide(x))


def test_the_number_of_parameters():
    """Each shared expert has three matrices, and every token meets it."""
    one = 3 * CONFIG.dim * CONFIG.expert_ffn
    for shared in (0, 1, 2, 3):
        total, active = moe.parameters_per_token(replace(CONFIG, shared=shared))
        none = moe.parameters_per_token(replace(CONFIG, shared=0))
        assert (total, active) == (none[0] + shared * one, none[1] + shared * one)


def test_muon_takes_each_matrix_of_each_expert_and_adamw_none():
    adamw, *by_muon = muon.split_by_name(random_model().named_parameters())
    assert not [name for name, _ in adamw["params"] if "shared" in name]
    shapes = []
    for group in by_muon:
        shapes += [tuple(p.shape) for name, p in group["params"] if "ffn.shared." in name]
    narrow, wide = (CONFIG.expert_ffn, CONFIG.dim), (CONFIG.dim, CONFIG.expert_ffn)
    assert sorted(shapes) == sorted([narrow, narrow, wide] * 2)


def test_a_checkpoint_and_the_fast_model_give_the_same(tmp_path):
    model = random_model().eval()
    tokens = torch.arange(12)[None]
    expected = model.logits(model(tokens))
    save_checkpoint(tmp_path / "run", model)
    again = moe.Model(CONFIG).eval()
    load_checkpoint(tmp_path / "run", again)
    torch.testing.assert_close(again.logits(again(tokens)), expected)
    with torch.inference_mode():
        quick = fast.accelerate(again)
        torch.testing.assert_close(quick.logits(quick(tokens)), expected, rtol=1e-4, atol=1e-4)
