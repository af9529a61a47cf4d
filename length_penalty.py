"""length_penalty.py: a price for effort that is steep for easy tasks and flat for hard ones.

A cost linear in length charges the thousandth token as much as the first, so the cheapest way out
of a hard task is to give up. A concave cost charges the first steps of every task and almost
nothing at the end of a long one: the policy becomes quick where it can be and may think where it
must.

Stated by Cursor (Composer 2 Technical Report, arXiv 2603.24477, section 4.2): the cost C(x) below,
increasing and concave, its curvature set by k and q; x is a weighted sum of thinking tokens,
tool-call tokens, tool-output tokens, final-message tokens, number of tool calls and number of
turns; parallel tool calls emerge. Ours: k, q, the weights, the scale, the budget rule.

    C(x)   = ((1 + k x)^(1-q) - 1) / (k (1-q)) = expm1((1-q) log1p(k x)) / (k (1-q))
    C'(x)  = (1 + k x)^-q        the price of the next unit
             q = 0: linear, C = x      q -> 1: ln(1 + k x) / k      q > 1: never above 1 / (k (q-1))
    reward = r - scale * C(x)

A truncated or over-long rollout pays C(budget), so that being cut off is never cheaper than
finishing. In experiments/penalty.py a rollout that is not solved pays it too, so that giving up is
not cheaper either.

Left out: a coefficient that adapts to a target length (the scale is a constant), and prices per
tool. The reward is shaped before the group mean is taken, and advantages are never divided by the
group's standard deviation: in a group that is all correct the cost is the only difference, and
dividing would blow one token up to the size of a solved task (the demo prints it).

Letters: x effort, k and q curvature, w weights. Everything takes numbers or numpy arrays of any
shape, in float64.

    python length_penalty.py        the curves, the price of the next 100 tokens, reference values
    python length_penalty.py --k=.1 --q=1 --turns=2
"""

import math
import sys
from dataclasses import dataclass, fields, replace

import numpy as np

# (k, q): C(1), C(3), C(10), C(30), C(100), worked out by hand from the formula
REFERENCE = {
    (1, 0.5): (0.828, 2.000, 4.633, 9.136, 18.100),
    (1, 1): (0.693, 1.386, 2.398, 3.434, 4.615),
    (0.1, 1): (0.953, 2.624, 6.931, 13.863, 23.979),
    (0.01, 2): (0.990, 2.913, 9.091, 23.077, 50.0),
}


@dataclass(frozen=True)
class Weights:
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


def count_effort(rollout, weights=Weights()):
    """The six quantities that the length penalty weighs, the effort that they come to, and the
    counts that the tables show, over the whole rollout."""

    def count_tokens(turns):
        return sum(len(turn.tokens) - turn.head for turn in turns)

    # The policy's turns: those that act, and those that only speak (summaries, the final message).
    own = [turn for turn in rollout.turns if turn.role == "assistant"]
    acting = [turn for turn in own if turn.calls]
    silent = [turn for turn in own if not turn.calls]
    # A rollout that was ended by a limit has no final message.
    final = silent[-1:] if rollout.finished else []

    # The rest: what the tools answered, the calls, and the length of each context.
    outputs = [turn for turn in rollout.turns if turn.role == "tool"]
    calls = [call for turn in acting for call in turn.calls]
    lengths = [len(segment) for segment in rollout.segments]

    # Thinking is what stands before the first call of a turn, and every summary.
    thinking = sum(turn.thinking for turn in acting)
    counts = dict(
        thinking_tokens=thinking + count_tokens(silent) - count_tokens(final),
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


def compute_effort(counts, weights=Weights()):
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
    """What a rollout pays for its effort: scale * C(effort), up to the price of the budget (all of
    these numbers are ours). scale = 0: effort is free; q = 0: the linear penalty of the ablation.
    solved, finished and x are numbers or arrays over rollouts."""

    scale: float = 0.03  # of one unit of C, in solved tasks
    k: float = 1.0  # k and q: the curvature of C
    q: float = 0.5
    budget: float = math.inf  # the effort at which the price stops rising
    weights: Weights = Weights()  # of the counts, in the effort

    def __post_init__(self):
        fits = self.scale >= 0 and math.isfinite(self.scale)
        if not fits:
            raise ValueError(f"scale must be finite and >= 0, not {self.scale}")
        concave_cost(0.0, self.k, self.q)  # refuses a k or q out of bounds

    def cost(self, x):
        """What an effort of x costs, in solved tasks"""
        return self.scale * concave_cost(x, self.k, self.q)

    def pays_whole_budget(self, solved, finished):
        """Who pays for the whole budget, whatever it used? A rollout that a limit cut short: else a
        policy near the limit could save by being cut off."""
        return np.logical_not(finished)

    def shape_reward(self, solved, x, finished=True):
        """The reward: 1 or 0 for the task, less the price of effort x"""
        reward = np.asarray(solved, dtype=np.float64)
        if not self.scale:
            return reward
        pays_budget = self.pays_whole_budget(solved, finished) | (np.asarray(x) > self.budget)
        known = math.isfinite(self.budget) or not np.any(pays_budget)
        assert known, "a truncated rollout is charged the budget: the price needs a finite budget"

        # The price comes off the reward before any mean is taken: within a group the cheaper of two
        # solved rollouts has the larger advantage.
        return reward - self.cost(np.where(pays_budget, self.budget, x))


FREE = Price(scale=0.0)  # the reward is 1 or 0


def effort_budget(window, turns):
    """The effort at which the price stops rising, and which a truncated rollout pays for. An agent
    with a context of `window` tokens and `turns` turns cannot spend more in one context, so every
    rollout that fits pays for what it spent.

    It is the effort of `turns` turns with one call each and of 25/16 windows of written tokens.
    Rollouts of more than 40 turns have several contexts, so there the tokens grow in proportion to
    the turns. Window 512 and 40 turns: 40 turns of 20 tokens, an effort of 80 (ours)."""
    # As if all of these tokens were written in tool calls, one call per turn.
    tokens = 25 / 16 * window * max(1.0, turns / 40)
    counts = dict.fromkeys((field.name for field in fields(Weights)), 0)
    counts.update(call_tokens=tokens, calls=turns, turns=turns)
    return compute_effort(counts)


def linear_price(price, x):
    """The linear price that charges as much at effort x as this one. A fair ablation compares a
    concave price with this."""
    return replace(price, scale=float(price.cost(x) / x), q=0.0)


def margin_over_quitting(solved, x_solving, x_quitting, price):
    """Expected reward of trying minus that of giving up at once. solved: the probability that
    trying succeeds. Keep the margin above .1 on every level: where it is negative, the reward
    teaches the policy to quit."""
    return solved - (price.cost(x_solving) - price.cost(x_quitting))


# ---------------------------------------------------------------- demo


def price_curves(x, price):
    """Over effort x: {penalty: (what a rollout pays, what its next 100 tokens cost)}"""
    # Beside the price asked for: a straight line, and two curves that bend more.
    prices = {
        f"k={price.k:g} q={price.q:g}": price,
        "linear, equal at x=9": linear_price(price, 9),
        "k=1 q=1": replace(price, k=1.0, q=1.0),
        "k=.1 q=2, bounded": replace(price, k=0.1, q=2.0),
    }
    return {name: (one.cost(x), cost_of_going_on(x, one)) for name, one in prices.items()}


def cost_of_going_on(x, price):
    """What the next 100 tokens cost after an effort of x"""
    return price.cost(x + 100 * price.weights.thinking_tokens) - price.cost(x)


def print_reference():
    """The cost beside the values worked out by hand -> the largest difference"""
    worst = 0.0
    print("reference values        x = 1       3      10      30     100")
    for (k, q), known in REFERENCE.items():
        values = concave_cost([1, 3, 10, 30, 100], k, q)
        worst = max(worst, float(np.abs(values - known).max()))
        print(f"  C(x; k={k:<4g} q={q:<3g})" + "".join(f"{v:8.3f}" for v in values))
    return worst


def print_margins(price):
    """Is trying worth its price, by how much effort the task takes?"""
    # Equal at effort 9, so that only the shape of the two penalties differs.
    even = linear_price(price, 9)
    print("worth of trying over giving up at effort 3, when nine tries of ten succeed")
    print("(the two penalties are equal at effort 9)")
    for x in (5, 9, 13, 21):
        concave = margin_over_quitting(0.9, x, 3, price)
        linear = margin_over_quitting(0.9, x, 3, even)
        print(f"  effort {x:2}: this penalty {concave:+.2f}    linear {linear:+.2f}")


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


def parse_penalty_flags(parser, argv):
    """-> the Price that the flags ask for. A bad value is one line and exit code 2."""
    # The scale and the curvature, and one flag per weight. Their defaults are the recipe's.
    for name in ("scale", "k", "q"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Price, name))
    for field in fields(Weights):
        about = "weight in the effort"
        parser.add_argument(f"--{field.name}", type=float, default=field.default, help=about)
    args = parser.parse_args(argv)

    # Price and Weights check their own values.
    try:
        weights = Weights(**{field.name: getattr(args, field.name) for field in fields(Weights)})
        price = Price(args.scale, args.k, args.q, weights=weights)
        for name, value in vars(args).items():
            if value > 1e6:
                raise ValueError(f"--{name}={value:g}: at most 1e6")
    except ValueError as problem:
        parser.error(problem)
    return price


def demo(price):
    from demos.demo_figures import draw_prices

    worst = print_reference()
    print_margins(price)
    print("why advantages are not divided by the standard deviation")
    mixed, _, same, blown = print_groups(price)

    # The price of the next 100 tokens falls with what was spent before.
    path = "out/length_penalty.png"
    x = np.linspace(0, 60, 400)
    draw_prices(x, price_curves(x, price), path)
    first, later = cost_of_going_on(np.array([0, 40.0]), price)
    print(
        f"The table agrees with the reference to {worst:.4f}; the next 100 tokens cost "
        f"{first:.3f} at the start and {later:.3f} at effort 40;\n"
        f"one token among equals is an advantage of {same:.5f} beside {mixed:.2f} for solving, "
        f"but divided by the deviation it would be {blown:.2f}. Figure: {path}"
    )


def main(argv):
    from command.flags import make_parser
    from demos.demonstration import draw_or_refuse

    parser = make_parser("length_penalty.py", "The curves of the length penalty.")
    price = parse_penalty_flags(parser, argv)
    draw_or_refuse("length_penalty.py", lambda: demo(price))


if __name__ == "__main__":
    main(sys.argv[1:])
