"""task_checks.py: what a repository's task has to pass before it is one.

synth_tasks.py asks two questions of any codebase: do tests fail without the feature, and do all
others still pass? A real repository has to pass more checks. Each is a function here, which raises
Discard with the reason:

    check_collected, check_imports   the rest of the repository still works
    judging_tests                    some of the failing tests can be hidden and judge
    failing_mutants                  a changed copy of such a test fails for the original
    check_trivial_bodies             no body that anybody could write wins
    check_original                   the original wins, every time, also by the task's own command

Ours: all of it. Standard library only.
"""

import re
from dataclasses import replace

from repositories.deletion import definitions, methods, stub_bodies
from repositories.verdict import ROUNDS, judge_repository, run_judgement
from repositories.mutants import list_changes, lost_names, with_mutants
from repositories.run_suite import WORLDS, green_command, run_suite, working_imports
from repositories.source import (
    find_test,
    is_text,
    package_root,
    remove_tests,
    file_of_test,
    function_of_test,
)
from world.task import Discard


# ---------------------------------------------------------------- the rest still works
def check_collected(repository, errors):
    """Discards a deletion that keeps a test file from being collected which could be before.
    errors: {what could not be collected, or a node id: why}, without the feature."""
    files = [where for where in errors if "::" not in where]
    if any(where not in repository.ignored for where in files):
        raise Discard("a test file cannot be collected without it")


def check_imports(repository, base, sandbox):
    """Discards a deletion that keeps a module from being imported which could be before. The tests
    alone do not show that, since they may not import every module. base: the files without the
    feature."""
    dropped = [path for path in repository.files if path not in base and path.endswith(".py")]
    left_out = {package_root(path, set(repository.files))[1] for path in dropped}
    modules = [name for name in repository.importable if name not in left_out]
    if working_imports(base, sandbox, modules, repository.plan) != modules:
        raise Discard("the package does not import without it")


# ---------------------------------------------------------------- which tests can judge
def judging_tests(files, broken, outcomes, deleted_from):
    """Sorts the tests that a deletion broke -> (node ids that may judge, node ids that the deletion
    left without a setup, test functions that can be hidden). deleted_from: paths of the files from
    which it deleted."""
    # A test whose setup or teardown broke has not failed itself. It has to pass with the feature in
    # place, but it is not a test of the feature.
    unready = {node for node in broken if outcomes.get(node) != "failed"}

    # The agent may edit the file that the feature lives in, so tests in that file judge nothing; a
    # doctest there may have been deleted with its docstring.
    judging = {node for node in broken - unready if file_of_test(node) not in deleted_from}
    if not judging:
        if unready:
            raise Discard("its tests cannot be set up without it")
        raise Discard("its tests are in its own file")
    unready = {node for node in unready if file_of_test(node) not in deleted_from}

    # All cases of a test function are hidden, or none. A function is not hidden if one of its cases
    # was left without a setup.
    half_ready = {function_of_test(node) for node in unready}
    groups = []
    for group in sorted({function_of_test(node) for node in judging}):
        can_hide = is_text(group) and is_hideable(files[file_of_test(group)], group)
        if can_hide and group not in half_ready:
            groups.append(group)
    if not groups:
        raise Discard("its tests cannot be hidden")
    return judging, unready, groups


def is_hideable(text, node_id):
    """True if this file defines the test function and names it nowhere else."""
    name = node_id.split("::")[-1]
    return find_test(text, node_id) is not None and not re.search(rf"(?<!def )\b{name}\b", text)


def inherited_tests(files, stable, groups):
    """The stable tests that run one of these test functions again, in a subclass or in a file that
    imports it. They cannot be hidden themselves and disappear with the function."""
    inherited = set()
    for node in stable:
        function = function_of_test(node)
        name = function.split("::")[-1]
        namesakes = [group for group in groups if group.split("::")[-1] == name]
        is_other = any(group != function for group in namesakes)
        if is_other and not find_test(files[file_of_test(node)], node):
            inherited.add(node)
    return inherited


def without_tests(files, groups):
    """The files without these test functions."""
    out = dict(files)
    for path in {file_of_test(group) for group in groups}:
        own = [group for group in groups if file_of_test(group) == path]
        out[path] = remove_tests(files[path], own)
    return out


# how often a mutant has to fail before it is one; how many are tried of each test
TIMES, TRIES = 10, 4


def failing_mutants(files, groups, nodes, names, rng, sandbox, plan):
    """{test function: its mutants (repositories/mutants.py), at most ROUNDS}. A mutant is kept if
    it fails for the original in each of its cases among `nodes`, ten times of ten. names: what the
    deleted definitions are called."""
    # Draw what to try, in random order. A changed value tells more than a changed operator, so
    # values come first; each may be tried again with another part of the value.
    lost = lost_names(names)
    waiting = {}
    for group in groups:
        kinds = list_changes(files[file_of_test(group)], group, lost)
        order = rng.sample(range(len(kinds)), len(kinds))
        values = [number for number in order if kinds[number] == "value"]
        numbers = values + [number for number in order if kinds[number] != "value"] + values * TRIES
        waiting[group] = [[number, rng.randrange(50)] for number in numbers[:TRIES]]

    # Each run has the next mutant of every test that lacks some.
    found = {group: [] for group in groups}
    while True:
        tried = {}
        for group, sites in waiting.items():
            if sites and len(found[group]) < ROUNDS:
                tried[group] = sites.pop(0)
        if not tried:
            return found
        only = sorted(node for node in nodes if function_of_test(node) in tried)
        tree = with_mutants(files, tried, lost)
        outcomes = run_suite(tree, sandbox, only, True, plan=plan, times=TIMES)["outcomes"]
        spared = {function_of_test(node) for node in only if outcomes.get(node) != "failed"}
        for group, site in tried.items():
            if group not in spared:
                found[group].append(site)


# ---------------------------------------------------------------- bodies that must not win
# Bodies that know nothing of the feature: a constant, the argument, and an exception of every kind
# that tests ask for.
TRIVIAL_BODIES = (
    "return None",
    "return {first}",
    "raise type('Any', (ValueError, KeyError, TypeError, AttributeError, RuntimeError, "
    "ZeroDivisionError, IndexError), {})()",
)


# A body that returns an object which is true, equals everything, is greater, and holds everything.
# Its attributes, items, sums and results are such objects, too.
UNIVERSAL_OBJECT = (
    "return (lambda make: make(make))(lambda make: type('Any', (), {"
    "**{f'__{name}__': lambda *words: True for name in "
    "'eq ne lt le gt ge contains bool'.split()}, "
    "**{f'__{name}__': lambda *words, **named: make(make) for name in "
    "'getattr call getitem enter add radd sub rsub mul rmul truediv rtruediv floordiv mod pow and "
    "or xor neg abs round'.split()}, "
    "'__hash__': lambda self: 1, '__exit__': lambda *words: False, '__int__': lambda self: 1, "
    "'__float__': lambda self: 1.0, '__len__': lambda self: 1, "
    "'__iter__': lambda self: iter([make(make)])})())"
)


def check_trivial_bodies(files, chosen, task, sandbox):
    """Discards a task whose tests and mutants a body satisfies that anybody could write."""
    # A feature that is deleted as a whole leaves no body to fill in. A class goes with its methods.
    bodies = [UNIVERSAL_OBJECT]
    if task.meta["kind"] == "gone":
        found = definitions(files, {one.path for one in chosen})
        chosen = [*chosen, *(method for one in chosen for method in methods(one, found))]
    else:
        bodies += TRIVIAL_BODIES
    for body in bodies:
        forged = stub_bodies(files, chosen, False, body)
        # A class without methods has no bodies.
        if forged == files:
            continue
        submission = task.files | {path: forged[path] for path in task.solution if path in forged}
        if judge_repository(replace(task, PASS_TO_PASS=[]), submission, sandbox).solved:
            raise Discard("a body that anybody could write passes")


# ---------------------------------------------------------------- the original must win
def check_original(task, repository, sandbox):
    """The task with a test command that is green for its original, which has also won the whole
    judgement, and whose required tests have passed once more in each other one of WORLDS. Tests
    that the original itself cannot keep green are taken out of PASS_TO_PASS. Discard where the
    original does not win."""
    original = {**task.files, **task.solution}
    for world in WORLDS:
        # A test that only stays green may be lost here; a broken test or a mutant may not.
        lost, loose, _ = run_judgement(task, original, sandbox, world)
        if loose or set(lost) - set(task.PASS_TO_PASS):
            raise Discard("the original does not pass again")
        if not lost:
            continue

        # A lost test is unstable, or it needs a file that the task leaves out since that holds the
        # feature's code. Without it the original has to win. Later tasks find out by themselves:
        # what they ask for must not depend on which task was verified first.
        kept = [node for node in task.PASS_TO_PASS if node not in lost]
        task = replace(task, PASS_TO_PASS=kept)
        lost, loose, _ = run_judgement(task, original, sandbox, world)
        if lost or loose:
            raise Discard("the original does not pass again")

    # The agent gets a command that is green with the original in place and leaves out no test that
    # has to pass again. It leaves out whatever begins like a test that is red.
    command, _, left_out = green_command(
        original, repository.plan, repository.ignored, repository.left_out, sandbox
    )
    if not command or any(node.startswith(tuple(left_out)) for node in task.FAIL_TO_PASS):
        raise Discard("its test command is not green with the original in place")
    return replace(task, test_command=command)
