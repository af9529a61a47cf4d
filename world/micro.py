"""micro.py: the functions of which generated codebases consist, and the inputs that tell them from
wrong ones.

A function takes a list, sends it through one or two steps (`x + 3`, keep `x > 4`) and reduces the
result (sum, count, largest). One `Function` knows its code, its value for an input, and the phrase
that the docs use, so a codebase, its tests and its docs agree by construction.

The words are few and the constants are single digits: a model this small learns to find and to copy
long before it learns to translate. One composition in five, and one pair of words in five, is held
out for evaluation. A bench (BENCH) has compositions that are further away, with an operation and a
reduction of its own.

The expert needs the same functions to write them and to get them wrong (world/expert.py); whole
codebases are put together in synth_tasks.py.
"""

import zlib
from collections import Counter
from dataclasses import dataclass, replace

# name of a step -> (kind, expression); {k} is a single digit. The docs use the code's own words: a
# model this small learns to find and to copy long before it learns to translate.
OPS = {
    "add": ("map", "x + {k}"),
    "subtract": ("map", "x - {k}"),
    "multiply": ("map", "x * {k}"),
    "cap": ("map", "min(x, {k})"),
    "raise": ("map", "max(x, {k})"),
    "multiples": ("filter", "x % {k} == 0"),
    "above": ("filter", "x > {k}"),
    "below": ("filter", "x < {k}"),
}


# name of a reduction -> its expression
REDUCTIONS = {"list": "xs", "sum": "sum(xs)", "count": "len(xs)", "largest": "max(xs, default=0)"}


# those of the bench alone
BENCH_OPS = {"other": ("filter", "x != {k}")}
BENCH_REDUCTIONS = {"smallest": "min(xs, default=0)"}
ALL_OPS = {**OPS, **BENCH_OPS}
ALL_REDUCTIONS = {**REDUCTIONS, **BENCH_REDUCTIONS}


# kind of a step -> what it makes of a list, around its expression
FORMS = {"map": "[{} for x in xs]", "filter": "[x for x in xs if {}]"}


def step_code(op, k):
    """The expression of the list that a step makes of the list xs."""
    kind, expression = ALL_OPS[op]
    return FORMS[kind].format(expression.format(k=k))


# What each step and each reduction computes. It is made from the code once, since `Function.value`
# is called for every mistake and every input.
MEANING = {op: eval(f"lambda xs, k: {step_code(op, 'k')}") for op in ALL_OPS}
MEANING |= {name: eval(f"lambda xs: {code}") for name, code in ALL_REDUCTIONS.items()}


VERBS = (
    "bake bring build carry catch clean climb count drop find follow give hide hold join lift "
    "make move open paint push send turn wash"
).split()


NOUNS = (
    "apple bell boat book cloud coin door field flower garden hill horse island key lake moon "
    "paper river stone table tower train tree window"
).split()


@dataclass(frozen=True)
class Words:
    """What a generator draws compositions from."""

    ops: list
    reductions: list


# The bench has an operation and a reduction more, and compositions that no training has. Its names
# are held-out pairs, too: names of two nouns (door_key) a laptop's model could not copy at all, it
# writes a verb where every name of training has one.
TRAINING = Words(list(OPS), list(REDUCTIONS))
BENCH = Words(list(ALL_OPS), list(ALL_REDUCTIONS))
CONSTANTS = {*"23456789"}


# the words in which tasks differ from each other: names and constants
WORDS = {*VERBS, *NOUNS, *CONSTANTS}


@dataclass
class Function:
    """One function of a micro-codebase: xs goes through the steps and then the reduction."""

    module: str
    name: str
    steps: list  # [(op, k), ...]
    reduction: str

    def lines(self):
        """The lines of the body."""
        steps = [f"xs = {step_code(op, k)}" for op, k in self.steps]
        return [*steps, f"return {ALL_REDUCTIONS[self.reduction]}"]

    def code(self):
        """The source of the function."""
        return "\n    ".join([f"def {self.name}(xs):", *self.lines()]) + "\n"

    def phrase(self):
        """What the docs say of the function, for example `keep x > 4, x + 3, return sum(xs)`."""
        steps = [
            ("keep " if ALL_OPS[op][0] == "filter" else "") + ALL_OPS[op][1].format(k=k)
            for op, k in self.steps
        ]
        return ", ".join([*steps, f"return {ALL_REDUCTIONS[self.reduction]}"])

    def value(self, xs):
        """What the function returns for the list `xs`."""
        for op, k in self.steps:
            xs = MEANING[op](xs, k)
        return MEANING[self.reduction](xs)

    def held_out(self):
        """Whether the composition is one of the fifth that is kept for evaluation. A composition is
        the sequence of operations and the reduction; of a single step the constant counts, too."""
        key = (
            self.steps[0] if len(self.steps) == 1 else tuple(op for op, _ in self.steps),
            self.reduction,
        )
        return zlib.crc32(repr(key).encode()) % 5 == 0


def held_out_name(name):
    """Whether a function name is kept for evaluation. Names are held out as pairs: each word is
    known from training, the pair is not."""
    return zlib.crc32(name.encode()) % 5 == 0


def draw_function(rng, module, noun, steps, held_out, words=TRAINING):
    """A random function whose composition and name are held out for evaluation, or (with `held_out`
    false) both of training. steps: (least, most) number of steps. With the words of the bench,
    held_out demands a composition that no training has: an operation or a reduction of the bench,
    one operation twice, or one that is held out."""
    # The names that belong to this split.
    names = [f"{verb}_{noun}" for verb in VERBS if held_out_name(f"{verb}_{noun}") == held_out]

    # Draw compositions until one belongs to this split, too. In training no operation follows
    # itself.
    while True:
        ops = [rng.choice(words.ops) for _ in range(rng.randint(*steps))]
        function = Function(
            module,
            rng.choice(names),
            [(op, rng.randint(2, 9)) for op in ops],
            rng.choice(words.reductions),
        )
        repeats = any(op == following for op, following in zip(ops, ops[1:]))
        is_new = function.held_out()
        if words is BENCH:
            is_new |= repeats or not {*ops, function.reduction} <= {*OPS, *REDUCTIONS}
        elif repeats:
            continue
        if is_new == held_out:
            return function


# ---------------------------------------------------------------- inputs that tell right from wrong
def near_misses(function, rng):
    """Yields the mistakes that the tests have to see, as functions: a step forgotten, a constant
    off by one, another operation, another constant; at the end another reduction. That is five for
    each step, the forgotten step first, and one more."""
    for number, (op, k) in enumerate(function.steps):
        # What may stand in the place of this step: nothing, or a wrong step.
        before, after = function.steps[:number], function.steps[number + 1 :]
        mistakes = [
            [],
            [(op, k + 1)],
            [(op, k - 1)],
            [(rng.choice(list(OPS)), k)],
            [(op, rng.randint(2, 9))],
        ]
        for mistake in mistakes:
            yield replace(function, steps=before + mistake + after)
    # The right steps with a reduction drawn at random.
    yield replace(function, reduction=rng.choice(list(REDUCTIONS)))


def draw_inputs(function, rng):
    """(two visible inputs, up to six hidden ones), or None if no two of the ten inputs that are
    drawn tell the function from all of its near misses."""
    inputs, numbers = [], range(10)
    for _ in numbers:
        inputs.append([rng.randint(0, 12) for _ in range(rng.randint(3, 4))])
    right = [function.value(xs) for xs in inputs]
    if len({repr(value) for value in right}) < 4:
        return None  # almost constant: a trivial body would pass

    # For each near miss: the indices of the inputs for which it gives a wrong value.
    shown_by = []
    for miss in near_misses(function, rng):
        values = [miss.value(xs) for xs in inputs]
        shown_by.append({i for i in numbers if values[i] != right[i]})
    # Every fifth near miss forgets a step.
    forgotten_steps = shown_by[0 : 5 * len(function.steps) : 5]
    if not all(forgotten_steps):
        return None  # a step that does nothing
    # A near miss that no input shows is equivalent on all of them, and no test could tell it.
    shown_by = [shows for shows in shown_by if shows]

    # The first visible input shows as many near misses as any, the second as many as any of those
    # that the first does not show. Together they have to show all.
    first = most_frequent(shown_by, numbers)
    not_shown = [shows for shows in shown_by if first not in shows]
    second = most_frequent(not_shown, [i for i in numbers if i != first])
    if not all(second in shows for shows in not_shown):
        return None
    visible = [inputs[first], inputs[second]]
    hidden = [xs for xs in inputs if xs not in visible]
    return visible, hidden[:6]


def most_frequent(sets, members):
    """The member that is in most of the sets; the first of them where several are."""
    counts = Counter()
    for one in sets:
        counts.update(one)
    return max(members, key=counts.__getitem__)


def trivial_body_passes(function, inputs):
    """True if `return xs` or any constant gives all these values, or if the first of them is [] or
    0."""
    values = [function.value(xs) for xs in inputs]
    if values == inputs or values[0] in ([], 0):
        return True
    return all(value == values[0] for value in values)
