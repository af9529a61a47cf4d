"""effort.py: Can one policy be asked for little effort or much, and what does that cost?

Tasks say `Effort: low`, `medium` or `high`, and RL prices the effort of solved ones at .6, .2 and
0. The arms differ in how the policy learns the label, and in the price; all but the first begin RL
at an SFT whose demonstrations say nothing of effort.

    labelled           the default run: demonstrations are labelled by what they did
    RL alone           the label means nothing until RL gives it a price
    never told         one price of .2 and no label in training; the evaluation asks with labels
    price .6, free     one price each, no labels: the line that one policy has to reach
    linear             one price, linear, as dear as .2 at an effort of 15
    failures pay       .03 C(x) off every rollout, and the budget's price where it was cut short

    python -m experiments.effort

Found: nothing yet; the runs are under way.
"""

import math
import sys
from dataclasses import dataclass

import eval
import length_penalty
import rollout
from experiments import runner
from experiments.runner import Arm, Experiment


# 1. A policy that never saw the labels is asked with them: one point, three times.
def asked_with_labels():
    eval.settings_of = lambda config: length_penalty.SETTINGS


# 2. Another price. Its weight is a flag.
@dataclass(frozen=True)
class LinearPrice(length_penalty.Price):
    q: float = 0.0


def linear_price():
    length_penalty.Price = LinearPrice


# 3. Another reward: failures pay for their effort, too.
def failures_pay():
    plain = rollout.grade

    def grade(played, price=length_penalty.FREE):
        plain(played, price)
        x = played.stats["effort"] if played.finished else price.budget
        played.reward = float(played.solved - 0.03 * length_penalty.concave_cost(x, 1.0, 0.5))

    rollout.grade = grade


# 4. More numbers of a run's end: solved, tokens and effort over the careful expert's, by setting.
def by_setting(folder, policies):
    found = {}
    for setting in length_penalty.SETTINGS:
        numbers = policies["after RL"].get("settings", {}).get(setting)
        row = numbers["overall"] if numbers else {}
        for name in ("solved", "tokens", "care"):
            found[f"{setting}: {name}"] = row.get(name, math.nan)
    return found


# 5. The arms. The flag is one weight, or three for the settings.
EXPERIMENT = Experiment(
    question="One policy, three settings of effort",
    curves=("sampled", "solved"),
    arms={
        "labelled": Arm(),
        "RL alone": Arm((f"--length_penalty={length_penalty.WEIGHTS}",)),
        "never told": Arm(("--length_penalty=0.2",), asked_with_labels),
        "price .6": Arm(("--length_penalty=0.6",)),
        "free": Arm(("--length_penalty=0",)),
        "linear": Arm(("--length_penalty=0.4",), linear_price),
        "failures pay": Arm(("--length_penalty=0.2",), failures_pay),
    },
    sft=Arm(("--length_penalty=0.2",)),
    by_level=("tokens", "solved"),
    more=by_setting,
)

if __name__ == "__main__":
    runner.main("experiments.effort", sys.argv[1:])
