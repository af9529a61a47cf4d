"""10. Drafts as long as they are right.   fast/sampler.py   fifteen lines

A step of speculative decoding feeds 1 + `draft` tokens of each row, whatever the drafts were worth
so far. Inside a line that is copied a draft is right for long. Where something new is written it is
wrong from the first token on, and the others are fed for nothing. Let each `Row` have a `reach`,
the length of its next draft, which begins at 1. Write

    next_reach(reach, proposed, accepted, most)

twice as long, up to `most`, after a draft that was right to its end; half as long, and at least 1,
after one that was not; the same where nothing was proposed. `step` calls it for each row and feeds
one token more than the longest draft has. Edit the twin: the plain sampler has no drafts. (On a GPU
each width is a CUDA graph of its own.)

    python -m pytest exercises/draft_length.py     red before, green after; -s prints what is fed
    python train.py --stage=rl --steps=5 --start_from=assets/sft --out=out/draft_length --draft=16

Number to reach: at draft=16 and temperature .95 the four rollouts of the test take 105 steps and
1,604 tokens fed, with 481 proposed and 264 accepted. Drafts of a fixed length: 93 steps, 2,775 fed,
880 proposed. Look at: which of the two is sooner (`rollout_s` of the log), and how does that change
with `--tasks_per_step`? A step costs once, a token each time.
"""

import pytest
import torch

import fast
from command.checkpoints import load_model
from fast import sampler
from rollout import Limits, Tokenizer, flatten, sample_groups
from synth_tasks import make_task
from world.sandbox import Sandbox


@pytest.mark.parametrize(
    "reach, proposed, accepted, expected",
    [
        (1, 1, 1, 2),
        (4, 4, 4, 8),
        (8, 8, 8, 10),  # the limit
        (10, 3, 3, 10),
        (2, 1, 1, 4),  # of the draft there was no more
        (8, 8, 7, 4),
        (4, 2, 0, 2),
        (3, 3, 0, 1),
        (1, 1, 0, 1),
        (4, 0, 0, 4),
    ],
)
def test_by_hand(reach, proposed, accepted, expected):
    assert sampler.next_reach(reach, proposed, accepted, 10) == expected


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    model, extra = load_model("assets/sft")
    model = fast.accelerate(model.requires_grad_(False))
    return model, Tokenizer(**extra["tokenizer"])


class Counting(sampler.Sampler):
    """Counts the tokens that the drafts of all steps propose."""

    proposed = 0

    def batch_to_feed(self, rows, drafts, batch_size, width):
        self.proposed += sum(map(len, drafts))
        return super().batch_to_feed(rows, drafts, batch_size, width)


def play(policy, draft, temperature):
    """-> (the tokens of four rollouts of a task, the sampler, how many tokens of drafts were
    accepted)"""
    one = Counting(*policy, rows=4, temperature=temperature, draft=draft)
    (group,) = sample_groups(one, [make_task(4, 3, "heldout")], 4, 0, Limits(512, 10), Sandbox())
    segments = [flatten(segment) for rollout in group for segment in rollout.segments]
    sampled = sum(int(mask.sum()) for _, mask, _, _ in segments)
    # A step of a row samples one token, and one more for each that was accepted.
    accepted = sampled - sum(rollout.steps for rollout in group)
    print(f"draft={draft}: {one.steps} steps, {one.fed} tokens fed")
    print(f"  {one.proposed} proposed, {accepted} accepted")
    return [tokens.tolist() for tokens, *_ in segments], one, accepted


@pytest.mark.parametrize("temperature", [0, 0.95])
def test_the_same_tokens_and_fewer_proposals_for_each_that_is_accepted(policy, temperature):
    print(f"\ntemperature {temperature}")
    expected, without, _ = play(policy, 0, temperature)
    tokens, found, accepted = play(policy, 16, temperature)
    assert tokens == expected
    assert found.steps < 0.8 * without.steps
    assert found.proposed < 2.5 * accepted
