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
    C'(x)  = (1 + k x)^-q        q = 0: linear, C = x      q -> 1: ln(1 + k x) / k      q > 1: never above 1 / (k (q-1))
    reward = r - scale * C(x)    a truncated or over-long episode pays C(budget), so that being cut off is never a bargain;
                                 in experiments/penalty.py so does one that is not solved, and
                                 giving up is none either

Left out: a coefficient that adapts to a target length (the scale is a constant), and prices per
tool. The reward is shaped before the group mean is taken, and advantages are never divided by the
group's standard deviation: in a group that is all correct the cost is the only difference, and
dividing would blow one token up to the size of a solved task (the demo prints it).

Letters: x effort, k and q curvature, w weights. Everything takes numbers or numpy arrays of any
shape, in float64.

    python length_penalty.py                 the curves, the price of the next 100 tokens, the reference values
    python length_penalty.py --k=.1 --q=1 --turns=2
"""

import argparse
import math
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

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
    """What one unit of each count adds to the effort x (ours). A turn with one call weighs 1; a
    second call in the same turn only .2, which is what makes parallel calls pay. Tool output costs
    a fifth of written tokens, like input against output."""

    thinking_tokens: float = 0.05
    call_tokens: float = 0.05
    output_tokens: float = 0.01  # what the tools answered
    final_tokens: float = 0.05
    calls: float = 0.2  # per tool call
    turns: float = 0.8  # per turn

    def __post_init__(self):
        bad = [name for name, w in vars(self).items() if not (w >= 0 and math.isfinite(w))]
        assert (
            not bad
        ), f"a weight must be a finite number >= 0, not {bad[0]}={getattr(self, bad[0])}"


# ---------------------------------------------------------------- mathematics


def cost(x, k=1.0, q=0.5):
    """C(x), same shape as x. Both limits are exact: the factor (1-q) cancels in floating point down
    to the last bit, so only q = 1 itself needs the logarithm, and k = 0 the straight line."""
    x = np.asarray(x, dtype=np.float64)
    assert (
        k >= 0 and q >= 0 and math.isfinite(k + q)
    ), f"k and q must be finite and >= 0, not k={k}, q={q}"
    assert (x >= 0).all(), f"effort must be >= 0, not {x.min()}"
    if q == 0 or k == 0:
        return x + 0.0
    log = np.log1p(k * x)
    return log / k if q == 1 else np.expm1((1 - q) * log) / (k * (1 - q))


def effort(counts, weights=Weights()):
    """x from a mapping that holds the six counts (numbers, or arrays over episodes); of a chain of
    summaries, the totals."""
    missing = [f.name for f in fields(weights) if f.name not in counts]
    assert not missing, f"counts lack {', '.join(missing)}"
    return sum(w * np.asarray(counts[name], dtype=np.float64) for name, w in vars(weights).items())


def charged(x, truncated=False, budget=math.inf):
    """The effort that is paid for: the whole budget for a truncated or over-long episode, however
    short it was cut."""
    assert math.isfinite(budget) or not np.any(
        truncated
    ), "a truncated episode is charged the budget: pass a finite budget"
    x = np.asarray(x, dtype=np.float64)
    return np.where(np.asarray(truncated, dtype=bool) | (x > budget), budget, x)[()]


def shaped_reward(reward, x, scale=0.15, k=1.0, q=0.5, truncated=False, budget=math.inf):
    """reward - scale * C(effort paid for). q = 0 is the linear penalty of the ablation, scale = 0
    none."""
    return (
        np.asarray(reward, dtype=np.float64) - scale * cost(charged(x, truncated, budget), k, q)
        if scale
        else reward
    )


def effort_budget(window, turns, weights=Weights()):
    """The effort at which the price stops to rise, and what a cut episode pays: above what an agent
    in a context of `window` tokens with `turns` turns can spend in one context, so that no episode
    which fits is beyond it.

    A turn with its call, `turns` times, and 25/16 of a window in written tokens, more in proportion
    where an episode has more than 40 turns and so several contexts. Window 512 and 40 turns: 40
    turns of 20 tokens, an effort of 80 (ours)."""
    tokens = 25 / 16 * window * max(1.0, turns / 40)
    counts = dict(
        thinking_tokens=0,
        call_tokens=tokens,
        output_tokens=0,
        final_tokens=0,
        calls=turns,
        turns=turns,
    )
    return float(effort(counts, weights))


def linear_scale(x, scale=0.15, k=1.0, q=0.5):
    """The scale at which the linear penalty (q = 0) charges as much at effort x as the concave one:
    a fair ablation."""
    return scale * cost(x, k, q) / x


def margin(solved, x_solving, x_quitting, scale=0.15, k=1.0, q=0.5):
    """How much better trying is than giving up at once, when trying succeeds with probability
    `solved`. Keep it above .1 on every level: where it is negative, the reward teaches the policy
    to quit."""
    return solved - scale * (cost(x_solving, k, q) - cost(x_quitting, k, q))


# ---------------------------------------------------------------- demo


def plot(path, k, q, scale, token):
    # before the import: a notebook exports its own to what it starts
    os.environ["MPLBACKEND"] = "agg"
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x, (left, right) = np.linspace(0, 60, 400), plt.subplots(1, 2, figsize=(10, 4))[1]
    even = linear_scale(9, scale, k, q)
    for K, Q, S, name in (
        (k, q, scale, f"k={k:g} q={q:g}"),
        (1, 0, even, "linear, equal at x=9"),
        (1, 1, scale, "k=1 q=1"),
        (0.1, 2, scale, "k=.1 q=2, bounded"),
    ):
        price = S * (cost(x + 100 * token, K, Q) - cost(x, K, Q))
        left.plot(x, S * cost(x, K, Q), label=name)
        right.plot(x, price, label=f"{name}: {price[0]:.2f} -> {price[-1]:.2f}")
    left.set(
        xlabel="effort x",
        ylabel="scale * C(x), in units of one solved task",
        title="What an episode pays",
    )
    right.set(xlabel="effort so far", ylabel="price", title="What the next 100 tokens cost")
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=9)
    right.set_ylim(0, 1.5 * right.get_ylim()[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(path, dpi=110, bbox_inches="tight")


def print_reference():
    worst = 0.0
    print("reference values        x = 1       3      10      30     100")
    for (k, q), known in REFERENCE.items():
        values = cost([1, 3, 10, 30, 100], k, q)
        worst = max(worst, float(np.abs(values - known).max()))
        print(f"  C(x; k={k:<4g} q={q:<3g})" + "".join(f"{v:8.3f}" for v in values))
    return worst


def print_margins(k, q, scale):
    even = linear_scale(9, scale, k, q)
    print(
        "worth of trying over giving up at effort 3, when nine tries of ten succeed (the two penalties are equal at effort 9)"
    )
    for x in (5, 9, 13, 21):
        print(
            f"  effort {x:2}: this penalty {margin(.9, x, 3, scale, k, q):+.2f}    linear {margin(.9, x, 3, even, q=0):+.2f}"
        )


def print_groups(k, q, scale, weights):
    """Eight correct rollouts, one of them a thinking token longer: advantage with and without
    division by the deviation."""
    tokens = np.array([80, 80, 80, 80, 80, 80, 80, 81])
    x = effort(
        dict(
            thinking_tokens=tokens,
            call_tokens=60,
            output_tokens=100,
            final_tokens=10,
            calls=4,
            turns=5,
        ),
        weights,
    )
    sizes = []
    for name, solved in (
        ("half of the group solved", np.arange(8) % 2),
        ("all solved", np.ones(8)),
    ):
        r = shaped_reward(solved, x, scale, k, q)
        a = r - r.mean()
        scaled = a / (a.std() + 1e-6)
        sizes += [np.abs(a).max(), np.abs(scaled).max()]
        print(f"  {name:26} largest advantage {sizes[-2]:.5f}   divided by std {sizes[-1]:.2f}")
    return sizes


def refuse(message):
    print(f"length_penalty.py: {message}", file=sys.stderr)
    sys.exit(2)


def flags():
    parser = argparse.ArgumentParser(
        description="The curves of the length penalty.", allow_abbrev=False
    )
    parser.error = refuse
    parser.add_argument("--k", type=float, default=1.0)
    parser.add_argument("--q", type=float, default=0.5)
    parser.add_argument("--scale", type=float, default=0.15)
    for f in fields(Weights):
        parser.add_argument(
            f"--{f.name}", type=float, default=f.default, help="weight in the effort"
        )
    args = parser.parse_args()
    try:
        weights = Weights(**{f.name: getattr(args, f.name) for f in fields(Weights)})
        cost(1.0, args.k, args.q)
        assert args.scale >= 0 and math.isfinite(
            args.scale
        ), f"scale must be finite and >= 0, not {args.scale}"
        for name, value in vars(args).items():
            assert value <= 1e6, f"--{name}={value:g}: at most 1e6"
    except AssertionError as problem:
        refuse(problem)
    return args, weights


def main():
    args, weights = flags()
    k, q, scale = args.k, args.q, args.scale
    worst = print_reference()
    print_margins(k, q, scale)
    print("why advantages are not divided by the standard deviation")
    mixed, _, same, blown = print_groups(k, q, scale, weights)
    path = Path("out/length_penalty.png")
    try:
        plot(path, k, q, scale, weights.thinking_tokens)
    except OSError as problem:
        refuse(f"cannot write {path}: {problem.strerror}")
    x = np.array([0, 40.0])
    price = scale * (cost(x + 100 * weights.thinking_tokens, k, q) - cost(x, k, q))
    print(
        f"The table agrees with the reference to {worst:.4f}; the next 100 tokens cost {price[0]:.3f} at the start and "
        f"{price[1]:.3f} at effort 40;\none token among equals is an advantage of {same:.5f} beside {mixed:.2f} for solving, "
        f"but divided by the deviation it would be {blown:.2f}. Figure: {path}"
    )


if __name__ == "__main__":
    main()
