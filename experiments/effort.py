"""effort.py: Can one policy be asked for little effort or much, and what does that cost?

Tasks say `Effort: low`, `medium` or `high`, and RL prices the effort of solved ones at .9, .4 and
0. The arms differ in how the policy learns the label, and in the price.

    the expert heeds   the default run: in demonstrations whoever is asked for more looks and tests
                       more
    by what it did     (begins at an SFT of its own) demonstrations are labelled afterwards: effort
                       over that of the careful expert on the same task, in thirds
    RL alone           the label means nothing until RL gives it a price. This arm and those below
                       begin at an SFT whose demonstrations say nothing of effort
    never told         one price of .4 and no label in training; the evaluation asks with labels
    price .9, free     one price each, no labels: the line that one policy has to reach
    linear             one price, linear, as dear as .4 at an effort of 15
    far budget         (by hand, from the default's SFT) the price rises up to an effort of 80
    failures pay       .03 C(x) off every rollout, and the budget's price where it was cut short
    digits             (by hand, with an SFT of its own) 1, 5 and 9 in the place of the words; the
                       evaluation also asks for 3 and 7

    python -m experiments.effort
    python -m experiments.runner --arm=experiments.effort:by_what_it_did -- --stage=sft \\
        --start_from=out/base-1337 --out=out/by_what

Found: asked for low effort the default run takes .59, .56 and .46 of the tokens of high effort and
has .65, .63 and .51 solved in the place of .92 (seeds 1337, 1, 2). Digits are learned as words
(.45, .76, .75): asked for 7, never shown, a policy spends less than for 5. RL alone finds no dial
(1.03, .97, 1.06). Policies of one price: never told .92 .93 .78 with 168 132 287 tokens; price .9
.81 .74 .67 with 105 117 199; free .90 .85 .81 with 217 235 360; linear .90 .92 .84 with 163 124
275; failures pay .94 .98 .77 with 158 144 275. Figure: figures/effort.png.
"""

import math
import random
import sys
from dataclasses import dataclass, replace

import numpy as np

import eval
import length_penalty
import rollout
import train
from experiments import runner
from experiments.runner import Arm, Experiment
from world import expert


# 1. A policy that never saw the labels is asked with them: one point, three times.
def asked_with_labels():
    eval.settings_of = lambda config: length_penalty.SETTINGS


# 2. Another way to teach the label: the lowest third of effort ratios is low, and so on.
def by_what_it_did():
    plain = train.make_demonstrations

    def label(config, tokenizer, compact, numbers, bar):
        # Nobody is asked beforehand.
        silent = replace(config, length_penalty="0")
        pairs = plain(silent, tokenizer, compact, numbers, bar)
        ratios = [measure_effort_ratio(config, *pair, tokenizer, compact) for pair in pairs]
        for (_, played), third in zip(pairs, thirds(ratios)):
            asked = length_penalty.ask_for(played.task, length_penalty.SETTINGS[third])
            for segment in played.segments:
                segment.turns[0] = rollout.opening_turn(tokenizer, asked)
        return pairs

    train.make_demonstrations = label


def measure_effort_ratio(config, number, played, tokenizer, compact):
    """The effort of a demonstration over that of the expert who makes no mistakes on the same task:
    what the task needs is divided out"""
    rng = random.Random(f"{config.seed}/careful/{number}")
    limits, careful = train.agent_limits(config), 0.0
    needed = rollout.demonstrate(played.task, tokenizer, rng, limits, careful, compact)
    efforts = [length_penalty.count_effort(one)["effort"] for one in (played, needed)]
    return efforts[0] / efforts[1]


def thirds(values):
    """0, 1 or 2 for each value: in which third of all it is"""
    return np.searchsorted(np.quantile(values, [1 / 3, 2 / 3]), values)


# 3. A digit in the place of a word. Three of them are trained, and two more are asked for.
DIGITS = {"1": "low", "5": "medium", "9": "high"}


def digits():
    length_penalty.SETTINGS = "1", "3", "5", "7", "9"
    weights = map(float, length_penalty.PRICE_WEIGHTS.split(","))
    trained = dict(zip(DIGITS, weights))
    length_penalty.read_price_weights = lambda text: trained
    asked_with_labels()
    # The expert heeds a digit as it heeds the word.
    for digit, word in DIGITS.items():
        expert.THOROUGH[digit] = expert.THOROUGH[word]


# 4. Another price. Its weight is a flag.
@dataclass(frozen=True)
class LinearPrice(length_penalty.Price):
    q: float = 0.0


def linear_price():
    length_penalty.Price = LinearPrice


# The price rises up to what a rollout can spend, so it is flat where tasks end.
def far_budget():
    length_penalty.BUDGET_SHARE = 1.0


# 5. Another reward: failures pay for their effort, too.
def failures_pay():
    plain = rollout.grade

    def grade(played, price=length_penalty.FREE):
        plain(played, price)
        x = played.stats["effort"] if played.finished else price.budget
        played.reward = float(played.solved - 0.03 * length_penalty.concave_cost(x, 1.0, 0.5))

    rollout.grade = grade


# 6. More numbers of a run's end: solved, tokens and effort over the careful expert's, by setting.
def by_setting(folder, policies):
    found = {}
    for setting in length_penalty.SETTINGS:
        numbers = policies["after RL"].get("settings", {}).get(setting)
        row = numbers["overall"] if numbers else {}
        for name in ("solved", "tokens", "effort_ratio"):
            found[f"{setting}: {name}"] = row.get(name, math.nan)
    return found


# 7. The arms. The flag is one weight, or three for the settings.
EXPERIMENT = Experiment(
    question="One policy, three settings of effort",
    curves=("sampled", "solved"),
    arms={
        "the expert heeds": Arm(),
        "RL alone": Arm((f"--length_penalty={length_penalty.PRICE_WEIGHTS}",)),
        "never told": Arm(("--length_penalty=0.4",), asked_with_labels),
        "price .9": Arm(("--length_penalty=0.9",)),
        "free": Arm(("--length_penalty=0",)),
        "linear": Arm(("--length_penalty=0.49",), linear_price),
        "failures pay": Arm(("--length_penalty=0.4",), failures_pay),
    },
    sft=Arm(("--length_penalty=0.4",)),
    by_level=("tokens", "solved"),
    more=by_setting,
)

if __name__ == "__main__":
    runner.main("experiments.effort", sys.argv[1:])
