"""Which twins there are: each steps aside when what it stands for is edited, an edit acts in training
and in sampling, and each can be taken out alone."""

import inspect
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import fast
import moe
import muon
from fast import twins
from fast.samplers import make_sampler
from rollout import Request, Rollout, Sampler
from sampling import TRAINED
from small import SIZES

ROOT = Path(moe.__file__).parent
CONFIG = moe.ModelConfig(**SIZES | dict(vocab=TRAINED.vocab, context=160))


def draw_weights():
    """Weights of a model of CONFIG, none of them zero"""
    torch.manual_seed(0)
    model = moe.Model(CONFIG)
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0, 0.3) if p.ndim == 1 else torch.nn.init.normal_(p, 0.0, 0.2)
    return model.state_dict()


def one_turn(prompt):
    """An agent that asks for one turn of 12 tokens behind a prompt"""
    answer = yield Request(prompt, True, 12)
    rollout = Rollout(None, [])
    rollout.answer = prompt, answer
    return rollout


def sample_and_learn(dtype=torch.float32):
    """A small step of RL: two agents sample, the trainer computes the loss and the gradient of what
    they wrote, Muon's iteration goes over a gradient -> (loss, sampled log-probs, mismatch, what the
    iteration made)"""
    weights, found = draw_weights(), []
    sampler = make_sampler(CONFIG, dtype, "cpu", TRAINED, 100, rows=2)
    sampler.model.load_state_dict(weights)
    model = fast.accelerate(moe.Model(CONFIG)).compute_in(dtype).train()
    model.load_state_dict(weights)

    rollouts = sampler.run([one_turn([5, 9, 70, 3]), one_turn([8, 2])], [0, 1])
    loss, mismatch = 0, 0
    for rollout in rollouts:
        prompt, (body, logprobs, _) = rollout.answer
        tokens, logprobs = torch.tensor([prompt + body]), torch.from_numpy(logprobs)
        logp = model.logprobs(model(tokens[:, :-1]), tokens[:, 1:])[0, len(prompt) - 1 :]
        mismatch = max(mismatch, float((logp - logprobs).abs().max()))
        loss = loss - logp.mean()
        found.append(logprobs)
    loss.backward()
    # Tokens that do not depend on what was sampled
    fixed = torch.arange(1, 25)[None]
    fixed_loss = float(-model.logprobs(model(fixed[:, :-1]), fixed[:, 1:]).mean())
    ortho = muon.orthogonalize(
        weights["layers.1.attn.wq"], dtype=dtype, iterate=fast.choose(muon.newton_schulz)
    )
    return fixed_loss, torch.cat(found), mismatch, ortho


def change_source(monkeypatch, form, old, new):
    """Patches a plain form with its own source, in which `old` became `new`"""
    found, owner = twins.find_form(form)
    source = textwrap.dedent(inspect.getsource(found))
    assert source.count(old) >= 1, f"{form} does not read {old!r}"
    module = inspect.getmodule(found)
    space = {}
    exec(compile(source.replace(old, new, 1), "<edited>", "exec"), vars(module), space)
    monkeypatch.setattr(owner or module, found.__name__, space[found.__name__])


# form, what it reads, what it becomes. Where it is called in sampling alone, "sampling".
EDITS = [
    ("moe.RMSNorm.forward", "self.weight.float()", "self.weight.float() * 1.5", ""),
    ("moe.swiglu", "F.silu(", "F.gelu(", ""),
    ("moe.linear", "F.linear(x,", "1.1 * F.linear(x,", ""),
    ("moe.FFN.forward", "return swiglu(", "return 2 * swiglu(", ""),
    ("moe.Experts.forward", "swiglu(rows, *weights)", "2 * swiglu(rows, *weights)", ""),
    ("moe.Experts.local_weights", "self.w_down)", "2 * self.w_down)", ""),
    ("moe.Router.forward", "score.gather(1, choice)", "score.gather(1, choice) ** 2", ""),
    ("moe.MoE.forward", "routed + self.shared", "routed - self.shared", ""),
    ("moe.MoE.dispatch", "return experts(", "return 2 * experts(", ""),
    ("moe.Attention.project_qkv", "self.kv_norm(latent)", "2 * self.kv_norm(latent)", ""),
    ("moe.Attention.keys_values", "linear(latent, self.wk_b)", "2 * linear(latent, self.wk_b)", ""),
    ("moe.Attention.forward", "self.head_dim**-0.5", "self.head_dim**-0.2", ""),
    ("moe.dot_product_attention", "scale=scale", "scale=2 * scale", ""),
    ("moe.apply_rotary_emb", "exact * cos", "0.5 * exact * cos", ""),
    ("moe.Block.forward", "return x + self.ffn(h, replay", "return x + 2 * self.ffn(h, replay", ""),
    ("moe.Model.embed_tokens", "return F.emb", "return 2 * F.emb", ""),
    ("moe.Model.run_layers", "self.embed_tokens(tokens)", "self.embed_tokens(tokens) + 1", ""),
    ("moe.Model.run_block", "return block(*inputs)", "return 2 * block(*inputs)", ""),
    ("moe.Model.logits", "return F.linear(", "return 2 * F.linear(", ""),
    ("moe.Model.logprobs", "found = logits.log", "found = (2 * logits).log", "training"),
    ("moe.Model.forward", "tokens.clamp(min=0)", "tokens.clamp(min=9)", "training"),
    ("moe.Model.decode", "self.run_layers(tokens,", "self.run_layers(tokens + 1,", "sampling"),
    ("moe.Cache.update", "= entries", "= 2 * entries", "sampling"),
    ("rollout.Sampler.sample_turn", "float(logprob)", "float(logprob) - 1", "sampling"),
    ("rollout.sample_from_logits", "].log()", "].log() - 1", "sampling"),
    ("muon.newton_schulz", "a * X + B @ X", "a * X + 0.9 * B @ X", "optimizer"),
]


@pytest.fixture(scope="module")
def unedited():
    return sample_and_learn()


@pytest.mark.parametrize("form, old, new, where", EDITS, ids=[edit[0] for edit in EDITS])
def test_an_edit_of_a_plain_form_acts_in_training_and_in_sampling(
    form, old, new, where, unedited, monkeypatch
):
    change_source(monkeypatch, form, old, new)
    loss, logprobs, mismatch, ortho = sample_and_learn()
    changed = dict(
        training=abs(loss - unedited[0]) > 1e-3,
        sampling=not torch.allclose(logprobs, unedited[1], atol=1e-3),
        optimizer=not torch.allclose(ortho, unedited[3], atol=1e-3),
    )
    # What training and sampling both go through keeps them one model.
    if not where:
        assert changed == dict(training=True, sampling=True, optimizer=False)
        assert mismatch < 1e-4 and unedited[2] < 1e-4
    else:
        assert [name for name, acts in changed.items() if acts] == [where]


def test_every_recorded_digest_is_that_of_the_plain_forms():
    lines = []
    for twin in twins.TWINS:
        now = twins.digest_forms(twin)
        if now != twin.digest:
            lines.append(f'{twin.twin}: "{twin.digest}" is now "{now}"')
    assert not lines, "\n".join(
        ["", *lines, "Does the twin still compute the same? Then paste these into fast/twins.py."]
    )


NAMES = [twin.twin.partition(":")[2] for twin in twins.TWINS]


@pytest.mark.parametrize("out", [*NAMES, "all"])
def test_each_twin_can_be_taken_out_and_the_results_are_equal(out, unedited, monkeypatch):
    kept = [twin for twin in twins.TWINS if out != "all" and not twin.twin.endswith(f":{out}")]
    assert len(kept) == (0 if out == "all" else len(twins.TWINS) - 1)
    monkeypatch.setattr(twins, "TWINS", tuple(kept))
    loss, logprobs, mismatch, ortho = sample_and_learn()
    assert loss == pytest.approx(unedited[0], rel=1e-5) and mismatch < 1e-4
    torch.testing.assert_close(logprobs, unedited[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(ortho, unedited[3], atol=1e-4, rtol=0)


def test_layout_comments_and_docstrings_do_not_count_and_one_line_tells_what_was_changed(
    monkeypatch,
):
    assert fast.describe_edits() == [] and fast.choose(Sampler) is not Sampler
    monkeypatch.setattr(muon, "COEFFICIENTS", (3.0, -4.0, 2.0))
    assert fast.choose(muon.newton_schulz) is muon.newton_schulz
    assert fast.describe_edits() == [
        "muon.newton_schulz, or what it calls, was changed: it runs as it is written, without its "
        "fast twin"
    ]


@pytest.mark.parametrize(
    "file, old, new, told",
    [
        (
            "moe.py",
            "    return linear(F.silu(",
            "    return linear(F.gelu(",
            ["moe.Experts.forward"],
        ),
        ("moe.py", '    """A stack of E feed', '    # told\n    """A stack of E feed', []),
        ("moe.py", "        outputs = []\n", "        # told\n        outputs = list( )\n", None),
        ("muon.py", "B @ X  #", "B @ X - 0 * X  #", ["muon.newton_schulz"]),
    ],
)
def test_an_edit_on_disk_is_told_in_a_copy_of_the_project(tmp_path, file, old, new, told):
    for name in ("moe.py", "muon.py", "rollout.py", "length_penalty.py", "synth_tasks.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("fast", "world", "repositories", "inside", "published", "command"):
        shutil.copytree(ROOT / name, tmp_path / name)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1))
    command = [sys.executable, "-c", "import fast; print(*fast.describe_edits(), sep='\\n')"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in told or []:
        assert name in done.stdout
    assert told is None or bool(told) == bool(done.stdout.strip())
