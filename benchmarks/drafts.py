"""benchmarks/drafts.py: what should propose the next tokens of a rollout, the text or a head of the
model?

    python -m benchmarks.drafts            the trained policy of assets/rl, one core, ten minutes
    python -m benchmarks.drafts --quick    an untrained head, one task, seconds: does it run?

Speculative decoding yields as many tokens a forward as a draft is right. The sampler's draft costs
nothing: what followed the same tokens the last time, in any rollout of the batch. Composer's base
model has a head that drafts (multi-token prediction, moe.MTP): it reads a hidden state and the
token drawn behind it, and guesses the next one; what it says of this guess is read again for the
one after. Here a head is trained on the policy's own rollouts, by self-distillation as in train.py,
and the same tasks are then played with each draft. All of them sample the same tokens.

Left out: the head's cost in training, and a head that is trained on its own guesses.
"""

import random
import sys
import time
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

import eval
from benchmarks.harness import ROOT, print_table, read_quick
from fast.sampler import Sampler
from fast.samplers import sampling_model
from length_penalty import SETTINGS, ask_for
from moe import mtp_loss
from rollout import Limits, flatten, pack, sample_groups
from synth_tasks import make_task
from world.sandbox import Sandbox

LEVELS = 0, 2, 3, 5, 8, 11

# ---------------------------------------------------------------- the sampler


class HeadSampler(Sampler):
    """Sampler, whose drafts come from the model's MTP head. text_first: where the text proposes
    something, its draft is taken"""

    text_first = False

    def propose_ngram_draft(self, row):
        text = super().propose_ngram_draft(row) if self.text_first else []
        # What the head said after the last step is of no use where tools have answered since.
        length, guesses = getattr(row, "guessed", (0, []))
        if text or length != len(row.context):
            return text
        # As the text's draft, it leaves room for one token, and stops before the end of a turn.
        room = max(0, row.room - len(row.body) - 1)
        ends = [i for i, token in enumerate(guesses) if token in self.tokenizer.ends]
        return guesses[: min([room, *ends])]

    def feed(self, batch, places):
        self.contexts = {place: row.context for place, row in zip(places, batch)}
        super().feed(batch, places)

    def read_pieces(self, tokens, rows, start):
        # The head reads each token with its follower, and has an entry of its own of both.
        chosen = super().read_pieces(tokens, rows, start)
        followers = []
        for row, first in zip(rows, start):
            piece = self.contexts[row][first + 1 : first + 1 + len(tokens[0])]
            followers.append(piece + [0] * (len(tokens[0]) - len(piece)))
        place = self.cache, rows, start
        self.model.draft_logits(self.model.hidden, torch.tensor(followers), *place)
        return chosen

    def step(self, rows):
        self.guesses = []
        super().step(rows)
        for row, guesses in zip(rows, self.guesses):
            row.guessed = len(row.context), guesses

    def decode_and_draw(self, tokens, position, uniforms):
        found = super().decode_and_draw(tokens, position, uniforms)
        self.guesses = self.guess(tokens, position, uniforms, found[0])
        return found

    def guess(self, tokens, position, uniforms, drawn):
        """-> three guesses for each row that samples, behind the last token that was accepted.
        tokens (B, W), position (B,): what was fed; drawn: the tokens behind all places that have a
        random number"""
        # The token behind each place, and the last place that counts.
        B, W = len(tokens), len(tokens[0])
        followers, last, first = np.zeros((B, W), dtype=np.int64), [0] * B, 0
        for i, numbers in enumerate(uniforms):
            followers[i, : len(numbers)] = drawn[first : first + len(numbers)]
            while last[i] + 1 < len(numbers) and tokens[i][last[i] + 1] == followers[i, last[i]]:
                last[i] += 1
            first += len(numbers)

        # The head on all that was fed, then on what it has guessed itself.
        model, guesses = self.model, []
        hidden, following = model.hidden, torch.from_numpy(followers)
        for number in range(self.draft):
            embedded = F.embedding(following, model.embed.weight)
            place = self.cache, slice(0, B), position
            hidden = model.run_mtp(hidden, embedded, following, *place)
            if number == 0:
                hidden = hidden[torch.arange(B), last][:, None]  # (B, 1, D)
                position = [start + place for start, place in zip(position, last)]
            position = [min(start + 1, self.window) for start in position]
            following = F.linear(hidden, model.head.weight.to(hidden.dtype)).argmax(-1)  # (B, 1)
            guesses.append(following[:, 0])
        return torch.stack(guesses, 1)[: len(uniforms)].tolist()


class TextFirst(HeadSampler):
    text_first = True


def keep_hidden(model):
    """From now on model.hidden is what the last call of decode returned."""
    decode = model.decode

    def keep(*given):
        model.hidden = decode(*given)
        return model.hidden

    model.decode = keep


# ---------------------------------------------------------------- a head for a trained policy


def with_head(policy):
    """A copy of a model, with an untrained MTP head"""
    model = replace(policy.config, mtp=1).build_model()
    model.extend_window(policy.config.yarn_factor)
    model.load_state_dict(policy.state_dict(), strict=False)
    for name, p in model.named_parameters():
        p.requires_grad = name.startswith("mtp.")
    return model.eval()


def train_head(model, groups, steps, rate=3e-3):
    """Self-distillation on the policy's rollouts. -> of the last steps, the head's loss"""
    segments = [segment for group in groups for played in group for segment in played.segments]
    rng, losses = random.Random(0), []
    optimizer = torch.optim.AdamW(model.mtp.parameters(), lr=rate)
    for step in range(steps):
        chosen = rng.sample(segments, min(6, len(segments)))
        tokens = pack(chosen, [0.0] * len(chosen))["tokens"]
        with torch.no_grad():
            hidden = model(tokens)
        loss = mtp_loss(model, tokens, hidden)
        optimizer.param_groups[0]["lr"] = rate * max(0.1, 1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-20:]) / len(losses[-20:])


# ---------------------------------------------------------------- the comparison


def make_tasks(levels, seeds):
    """A training task of each level and seed at each setting of effort"""
    made = [make_task(level, seed) for level in levels for seed in seeds]
    return [ask_for(task, effort) for task in made for effort in SETTINGS]


def play(sampler, tasks, group, limits):
    """-> the groups, and (sampled tokens, tokens a forward, forwards, CPU seconds)"""
    start = time.process_time()
    groups = sample_groups(sampler, tasks, group, 0, limits, Sandbox())
    seconds = time.process_time() - start
    played = [one for group in groups for one in group]
    sampled = sum(int(flatten(segment)[1].sum()) for one in played for segment in one.segments)
    return groups, (sampled, sampled / sum(one.steps for one in played), sampler.steps, seconds)


def main(argv):
    quick = read_quick("drafts", __doc__, argv)
    torch.set_num_threads(1)
    policy, tokenizer, config = eval.load_policy(ROOT / "assets" / "rl")
    limits = Limits(config["window"], config["max_turns"])
    levels, group, steps = (LEVELS[:1], 1, 2) if quick else (LEVELS, 4, 300)

    # A head for this policy, from rollouts of other tasks.
    model = with_head(policy)
    sampler = eval.make_sampler(policy, tokenizer, config, config["temperature"])
    groups, _ = play(sampler, make_tasks(levels, range(1000, 1004)), group, limits)
    loss = train_head(model, groups, steps)
    print(f"the head after {steps} steps: {loss:.3f} nats from what the policy says a token later")

    # The same tasks with each draft
    sampling = sampling_model(model.config, torch.float32)
    sampling.extend_window(policy.config.yarn_factor)
    sampling.load_state_dict(model.state_dict())
    keep_hidden(sampling)
    drafts = {
        "none": (Sampler, dict(draft=0)),
        "text": (Sampler, {}),
        "head": (HeadSampler, {}),
        "text, then head": (TextFirst, {}),
    }
    rows, tasks, base = [], make_tasks(levels, range(5000, 5002)), None
    for name, (kind, options) in drafts.items():
        sampler = kind(sampling, tokenizer, window=limits.window, **options)
        _, (sampled, per_forward, forwards, seconds) = play(sampler, tasks, group, limits)
        base = base or seconds
        numbers = f"{sampled}", f"{per_forward:.2f}", f"{forwards}", f"{seconds:.1f}"
        rows.append([name, *numbers, f"{base / seconds:.2f}"])
    columns = ["draft", "tokens", "a forward", "forwards", "CPU s", "x none"]
    print_table(f"{len(tasks) * group} rollouts, one core, fp32", columns, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
