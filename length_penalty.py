"""length_penalty.py: a price for effort that is steep for easy tasks and flat for hard ones, and a
dial for it.

A cost linear in length charges the thousandth token as much as the first. A concave cost charges
the first steps of every task and almost nothing at the end of a long one: the policy becomes quick
where it can be and may think where it must. How much a user wants to pay is said in the prompt, so
one policy has a curve of score over tokens and not a point.

Stated by Cursor (Composer 2 Technical Report, arXiv 2603.24477, section 4.2): the cost C(x) below,
increasing and concave, its curvature set by k and q; x is a weighted sum of thinking tokens,
tool-call tokens, tool-output tokens, final-message tokens, number of tool calls and number of
turns; parallel tool calls emerge. Score is plotted against tokens and cost over levels of effort
(sections 5 and 7.1, and the blog on CursorBench). Ours: k, q, the weights, the budget, the
settings, and that a price is paid for solved tasks alone.

    C(x)   = ((1 + k x)^(1-q) - 1) / (k (1-q)) = expm1((1-q) log1p(k x)) / (k (1-q))
    C'(x)  = (1 + k x)^-q        the price of the next unit
             q = 0: linear, C = x      q -> 1: ln(1 + k x) / k      q > 1: never above 1 / (k (q-1))
    reward = solved * (1 - w C(min(x, budget)) / C(budget))        0 <= w < 1

Every solved rollout has a larger reward than every failure, and failures are alike: if they paid,
too, failing fast would beat failing late, and the policy would learn to give up.

The dial: a task says `Effort: low`, `medium` or `high`, and w is .9, .4 or 0. All rollouts of a
group have the same setting; mixed, their advantages would tell which setting was drawn. What the
words mean is shown in demonstrations (world.expert.THOROUGH).

Left out: a coefficient that adapts to a target length (w is a constant), and prices per tool. The
reward is shaped before the group mean is taken, and advantages are never divided by the group's
standard deviation: in a group that is all correct the cost is the only difference, and dividing
would blow one token up to the size of a solved task (the demo prints it).

Letters: x effort, k and q curvature, w weight. All functions take numbers or arrays, in float64.

    python length_penalty.py    what a solved task is worth, the price of the next 100 tokens
"""

import math
import sys
from dataclasses import dataclass, fields, replace

import numpy as np


@dataclass(frozen=True)
class CountWeights:
    """What one unit of each count adds to the effort x (ours). A turn with one call weighs 1, its
    tokens apart. A second call in the same turn adds .2, so parallel calls are cheaper than one
    call per turn. A token of tool output costs a fifth of a written one, as input tokens cost less
    than output tokens."""

    thinking_tokens: float = 0.05
    call_tokens: float = 0.05
    output_tokens: float = 0.01  # what the tools answered
    final_tokens: float = 0.05
    calls: float = 0.2  # per tool call
    turns: float = 0.8  # per turn

    def __post_init__(self):
        for name, weight in vars(self).items():
            fits = weight >= 0 and math.isfinite(weight)
            if not fits:
                raise ValueError(f"a weight must be a finite number >= 0, not {name}={weight}")


# ---------------------------------------------------------------- mathematics


def concave_cost(x, k, q):
    """The concave cost C(x), in float64, same shape as x."""
    x = np.asarray(x, dtype=np.float64)
    # Outside these bounds the cost is not concave or not a number.
    fits = k >= 0 and q >= 0 and math.isfinite(k + q)
    if not fits:
        raise ValueError(f"k and q must be finite and >= 0, not k={k}, q={q}")
    if not (x >= 0).all():
        raise ValueError(f"effort must be >= 0, not {x.min()}")

    # The straight line: q = 0, and the limit k -> 0.
    if q == 0 or k == 0:
        return x + 0.0
    # The logarithm is the limit q -> 1. Only q = 1 itself needs it: for q near 1, expm1 and the
    # division by 1-q lose no digit.
    log = np.log1p(k * x)
    if q == 1:
        return log / k
    return np.expm1((1 - q) * log) / (k * (1 - q))


def count_effort(rollout, weights=CountWeights()):
    """The six quantities that the length penalty weighs, the effort that they come to, and the
    counts that the tables show, over the whole rollout."""

    def count_tokens(turns):
        return sum(len(turn.tokens) - turn.head for turn in turns)

    # The policy's turns: those that act, and those that only speak (summaries, the final message).
    own = [turn for turn in rollout.turns if turn.role == "assistant"]
    acting = [turn for turn in own if turn.calls]
    speaking = [turn for turn in own if not turn.calls]
    # A rollout that was ended by a limit has no final message.
    final = speaking[-1:] if rollout.finished else []

    # The rest: what the tools answered, the calls, and the length of each context.
    outputs = [turn for turn in rollout.turns if turn.role == "tool"]
    calls = [call for turn in acting for call in turn.calls]
    lengths = [len(segment) for segment in rollout.segments]

    # Thinking is what stands before the first call of a turn, and every summary.
    thinking = sum(turn.thinking for turn in acting)
    counts = dict(
        thinking_tokens=thinking + count_tokens(speaking) - count_tokens(final),
        call_tokens=count_tokens(acting) - thinking,
        output_tokens=count_tokens(outputs),
        final_tokens=count_tokens(final),
        calls=len(calls),
        turns=len(own),
    )
    return dict(
        counts,
        effort=compute_effort(counts, weights),
        # from here on for the tables only
        sampled=count_tokens(own),
        summaries=len(rollout.segments) - 1,
        context=max(lengths),
        total=sum(lengths),
        bad_tools=sum(call.error == "unknown_tool" for call in calls),
        bad_arguments=sum(call.error == "bad_arguments" for call in calls),
        finished=rollout.finished,
    )


def compute_effort(counts, weights=CountWeights()):
    """x: the weighted sum of the six counts. counts: a mapping from the names of the weights to
    numbers (-> a number) or to arrays over rollouts (-> an array). A rollout of several segments
    has its totals there."""
    # A count that is left out would be free of charge, so it is refused.
    missing = [field.name for field in fields(weights) if field.name not in counts]
    assert not missing, f"counts lack {', '.join(missing)}"
    x = 0.0
    for name, weight in vars(weights).items():
        x = x + weight * counts[name]
    return x


@dataclass(frozen=True)
class Price:
    """The share of a solved task's reward that effort costs: weight * C(min(effort, budget)) /
    C(budget). weight = 0: effort is free; q = 0: a linear price (numbers: ours)."""

    weight: float = 0.2  # of a solved task, at an effort of the budget
    k: float = 1.0  # k and q: the curvature of C
    q: float = 0.5
    budget: float = 80.0  # the effort at which the price stops rising
    weights: CountWeights = CountWeights()  # of the counts, in the effort

    def __post_init__(self):
        if not 0 <= self.weight < 1:
            raise ValueError(f"the weight of a price is at least 0 and below 1, not {self.weight}")
        if not 0 < self.budget < math.inf:
            raise ValueError(f"the budget must be finite and above 0, not {self.budget}")
        concave_cost(0.0, self.k, self.q)  # refuses a k or q out of bounds

    def cost(self, x):
        """The share of a solved task that an effort of x costs"""
        most = concave_cost(self.budget, self.k, self.q)
        return self.weight * concave_cost(np.minimum(x, self.budget), self.k, self.q) / most

    def shape_reward(self, worth, x):
        """The reward of a rollout. worth: of its result, 0 where the task is not solved"""
        # The price comes off the reward before any mean is taken: within a group the cheaper of two
        # solved rollouts has the larger advantage.
        return np.asarray(worth, dtype=np.float64) * (1 - self.cost(x))


FREE = Price(weight=0.0)  # the reward is 1 or 0

# ---------------------------------------------------------------- the dial

SETTINGS = "low", "medium", "high"  # what a task may ask for
PRICE_WEIGHTS = "0.9,0.4,0"  # of the price at these settings


def read_price_weights(text):
    """The weights of the price, from a flag -> {setting: weight}: three are those of low, medium
    and high; the setting of a single one is "": the task says nothing."""
    words = str(text).split(",")
    names = ("",) if len(words) == 1 else SETTINGS
    try:
        return {name: Price(float(word)).weight for name, word in zip(names, words, strict=True)}
    except ValueError:
        wanted = f"one, or one each for {', '.join(SETTINGS)}, with commas"
        raise ValueError(f"takes weights of at least 0 and below 1: {wanted}") from None


def effort_line(setting):
    """What a prompt says of the effort that is wanted"""
    return f"\nEffort: {setting}" if setting else ""


def ask_for(task, setting):
    """The task with this setting of effort in its prompt"""
    prompt = task.problem_statement + effort_line(setting)
    return replace(task, problem_statement=prompt, meta={**task.meta, "effort": setting})


def setting_of(task):
    """Which effort a task asks for; "" where it says nothing"""
    return task.meta.get("effort", "")


BUDGET_SHARE = 5 / 16  # of what a rollout can spend: two to three times what tasks need (ours)


def effort_budget(window, turns):
    """The effort at which the price stops rising: BUDGET_SHARE of what an agent with a context of
    `window` tokens and `turns` turns can spend, so many turns with a call each and 25/16 windows of
    written tokens (more than 40 turns have several contexts). Were it all of that, C would be flat
    where tasks end. Window 512 and 40 turns: an effort of 80, and a budget of 25 (ours)."""
    # As if all of these tokens were written in tool calls, one call per turn.
    tokens = 25 / 16 * window * max(1.0, turns / 40)
    counts = dict.fromkeys((field.name for field in fields(CountWeights)), 0)
    counts.update(call_tokens=tokens, calls=turns, turns=turns)
    return BUDGET_SHARE * compute_effort(counts)


# ---------------------------------------------------------------- demo


def cost_of_going_on(x, price):
    """What the next 100 tokens cost after an effort of x"""
    return price.cost(x + 100 * price.weights.thinking_tokens) - price.cost(x)


def print_rewards(price):
    """What a solved task is worth, by effort and setting"""
    print("reward of a solved task   x = 5       9      13      21      25")
    for setting, weight in read_price_weights(PRICE_WEIGHTS).items():
        reward = replace(price, weight=weight).shape_reward(1, [5, 9, 13, 21, 25])
        print(f"  Effort: {setting:14}" + "".join(f"{r:8.3f}" for r in reward))


def print_groups(price):
    """Eight rollouts, one of them a thinking token longer than the others. -> largest advantage of
    a group that is half solved, the same divided by the standard deviation, and both for a group
    that is all solved"""
    # Seven rollouts are equal, the eighth has 81 thinking tokens instead of 80.
    counts = dict(call_tokens=60, output_tokens=100, final_tokens=10, calls=4, turns=5)
    counts["thinking_tokens"] = np.array([80] * 7 + [81])
    x = compute_effort(counts, price.weights)
    groups = {"half of the group solved": np.arange(8) % 2, "all solved": np.ones(8)}
    sizes = []
    for name, solved in groups.items():
        reward = price.shape_reward(solved, x)
        advantage = reward - reward.mean()
        scaled = advantage / (advantage.std() + 1e-6)  # as GRPO does
        sizes += [np.abs(advantage).max(), np.abs(scaled).max()]
        print(f"  {name:26} largest advantage {sizes[-2]:.5f}   divided by std {sizes[-1]:.2f}")
    return sizes


def demo():
    from demos.demo_figures import draw_prices

    price = Price(read_price_weights(PRICE_WEIGHTS)["medium"], budget=effort_budget(512, 40))
    print_rewards(price)
    print("why advantages are not divided by the standard deviation")
    mixed, _, same, blown = print_groups(price)

    # The settings, and the straight line that charges as much as medium at an effort of 9
    slope = float(price.cost(9)) / 9
    prices = {"linear, as medium at x=9": replace(price, weight=slope * price.budget, q=0.0)}
    for setting, weight in read_price_weights(PRICE_WEIGHTS).items():
        prices[f"Effort: {setting}"] = replace(price, weight=weight)
    path, x = "out/length_penalty.png", np.linspace(0, 30, 400)
    curves = {name: (one.cost(x), cost_of_going_on(x, one)) for name, one in prices.items()}
    draw_prices(x, curves, path)
    first, later = cost_of_going_on(np.array([0, 20.0]), price)
    print(
        f"The next 100 tokens cost {first:.3f} at the start and {later:.3f} at effort 20.\n"
        f"One token among equals is an advantage of {same:.5f} beside {mixed:.2f} for solving, "
        f"but divided by the deviation it would be {blown:.2f}. Figure: {path}"
    )


def main(argv):
    from demos.demonstration import run_demo

    run_demo("length_penalty.py", "The curves of the length penalty.", demo, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
