"""2. A price that grows as the logarithm.   length_penalty.py, `Price`   one line

C(x) has two knobs. At q = 1 it is ln(1 + k x) / k: it begins as steeply as before, and far from its
beginning a doubling of effort costs the same wherever it happens. The price is C(x) over C(budget),
so small efforts get dearer.

Change the default of q.

    python -m pytest exercises/log_price.py        red before, green after
    python length_penalty.py                       the price of the next 100 tokens, early and late

Number to reach: at w = .9 an effort of 20 leaves .38 of a solved task (.60 before). Look at:
out/length_penalty.png: where do the lines of `low` lie now, and what does the last hundred tokens
of a long rollout cost?
"""

import math

import length_penalty


def test_far_from_the_beginning_a_doubling_costs_the_same_wherever_it_happens():
    price = length_penalty.Price(weight=0.9, budget=1000.0)
    steps = [price.cost(2 * x) - price.cost(x) for x in (100.0, 200.0, 400.0)]
    assert max(steps) - min(steps) < 0.001


def test_what_is_left_of_a_solved_task():
    left = float(length_penalty.Price(weight=0.9, budget=80.0).shape_reward(1.0, 20.0))
    assert math.isclose(left, 1 - 0.9 * math.log(21) / math.log(81), rel_tol=1e-9)
