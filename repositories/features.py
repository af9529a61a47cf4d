"""features.py: which definitions of a repository make one feature, and how a task speaks of it.

REPO_LEVELS are the kinds of features, from one function to a whole module. `draw_feature` draws a
feature that was not drawn before. The other functions write what a task says of it: its prompt and
its id.

Ours: the levels and their order, the wording of the prompt. Standard library only.
"""

import hashlib

from repositories.deletion import functions_of, methods

# kind "gone": the feature is deleted as a whole, signature and all. The other kinds leave stubs;
# `docstring` says whether the stubs keep their docstrings.
REPO_LEVELS = [
    dict(kind="function", docstring=True),
    dict(kind="function", docstring=False),
    dict(kind="gone", docstring=False),
    dict(kind="class", docstring=False),
    dict(kind="multi-file", docstring=False),
    dict(kind="module", docstring=False),
]

# a shorter definition is too easy to write again
FEWEST_LINES = 3
# what a greater share of the stable tests runs is not a single feature
MOST_OF_TESTS = 0.6


def draw_feature(repository, level, rng, taken):
    """Definitions that together make one feature of this level that was not drawn before; None when
    there is none left. taken: the features drawn so far, to which this one is added."""
    kind = REPO_LEVELS[level]["kind"]
    usable = usable_definitions(repository, kind)
    # A feature grows from any usable definition; they are tried in random order.
    for seed in rng.sample(usable, len(usable)):
        chosen = grow_feature(kind, seed, usable, rng)
        # Of a kind that has several definitions, one alone is not the whole feature.
        is_whole = len(chosen) > 1 or kind not in ("multi-file", "module", "class")
        key = frozenset((kind, one.path, one.name) for one in chosen)
        if chosen and is_whole and key not in taken:
            taken.add(key)
            return chosen
    return None


def usable_definitions(repository, kind):
    """The definitions that a feature of this kind may hold."""
    most_tests = MOST_OF_TESTS * len(repository.stable)
    usable = []
    for one in repository.definitions:
        if not 0 < len(one.tests) <= most_tests or one.size() < FEWEST_LINES:
            continue
        # Tests that import a name cannot be collected once it is gone. What runs during the import
        # of the package cannot be a stub.
        is_needed = one.wanted if kind == "gone" else one.early
        if not is_needed:
            usable.append(one)
    return usable


def why_no_feature(repository, levels):
    """Why no feature of these levels can be drawn: the first condition that no definition meets."""
    found = repository.definitions
    if not found:
        return "there is no function or class outside its tests"
    found = [one for one in found if one.tests]
    if not found:
        return "no stable test runs one of its functions or classes (not in this process, at least)"
    found = [one for one in found if one.size() >= FEWEST_LINES]
    if not found:
        return f"no test runs a definition of {FEWEST_LINES} lines"
    most_tests = MOST_OF_TESTS * len(repository.stable)
    found = [one for one in found if len(one.tests) <= most_tests]
    if not found:
        share = f"{MOST_OF_TESTS:.0%}"
        return f"each definition of {FEWEST_LINES} lines is run by more than {share} of the tests"
    kinds = {REPO_LEVELS[level]["kind"] for level in levels}
    if not any(usable_definitions(repository, kind) for kind in kinds):
        return "each definition that a test runs is needed to import the package or a test file"
    return f"no definitions make a feature of the kind {' or '.join(sorted(kinds))}"


def grow_feature(kind, seed, usable, rng):
    """The definitions of one feature of this kind that grows from `seed`; [] if there is none."""

    def unlike(one):
        """Minus the share of tests that run both definitions among those that run either."""
        return -len(one.tests & seed.tests) / len(one.tests | seed.tests)

    # Related are functions that run in the same tests, those with the most tests in common first.
    is_class = seed.kind == "class"
    related = [one for one in functions_of(usable) if one is not seed and one.tests & seed.tests]
    related.sort(key=unlike)
    # A number of partners in other files, for the kind "multi-file". It is drawn for every kind, so
    # that a random seed gives the same features whatever kind is asked for.
    number = 0 if is_class else rng.randint(1, 3)

    # A single definition; a class with its methods; functions of several files, or all of one file.
    if kind == "function":
        return [] if is_class else [seed]
    if kind == "gone":
        return [] if seed.kind == "method" else [seed]
    if kind == "class":
        if is_class:
            return [seed, *methods(seed, usable)]
        # the seed is a function: up to two related ones of its file take the place of methods
        return [seed] + [one for one in related if one.path == seed.path][:2]
    if kind == "multi-file":
        elsewhere = [one for one in related if one.path != seed.path]
        return [] if is_class else [seed] + elsewhere[:number]
    return [one for one in functions_of(usable) if one.path == seed.path]


def feature_id(repository, chosen, level):
    """The id of a task: a name that people recognise, and a hash of all that was chosen."""
    names = sorted((one.path, one.name) for one in chosen)
    mark = hashlib.sha256(repr(names).encode()).hexdigest()[:8]
    return f"{repository.name}-{level}-{chosen[0].name}-{mark}"


def repository_prompt(chosen, some_visible):
    """The prompt of a repository's task: short and underspecified."""
    # Which definitions were deleted. A class is named by its methods, and three names are enough.
    named = [one for one in chosen if one.kind != "class" or len(chosen) == 1]
    places = [f"`{one.name}` in {one.path}" for one in named[:3]]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    verb = "was" if len(places) == 1 else "were"

    # What to do, and whether the agent has any of the tests.
    text = f"{', '.join(places)}{more} {verb} lost. "
    text += "Put the feature back so that the rest of the code can use it."
    if some_visible:
        text += " Some of its tests are still here; others will be run."
    else:
        text += " Its tests will be run."
    return text
