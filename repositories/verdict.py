"""verdict.py: does a submission solve its task?

`judge` is the one door: it judges generated tasks by world/judge.py, and those of a repository by
its pytest suite.

pytest suites have to compare inside the child. They run on the repository's own files, with the
feature's files and new files of the submission (`submitted`). The tests that were broken are run
again and again, each time in a new process by the same order: as they are, and as mutants
(repositories/mutants.py), which differ in what they assert and must fail. Code that makes all tests
pass, replaces what compares, or returns values that equal everything passes the mutants as well and
gives itself away. Code that does so by chance, in a share p of the processes, is not caught with a
probability of p^2 (1 - p)^2, at most 1 in 16. Not covered: code that reads the bytecode or the
locals of the test that calls it, to tell a test from a mutant.
"""

import sys
from pathlib import Path

from repositories import suite as suites
from repositories.cage import sandbox_for
from repositories.editable import import_roots
from repositories.mutants import lost_names, with_mutants
from repositories.repo_files import JUNK
from repositories.run_suite import WORLDS, run_suite
from repositories.source import function_of_test, import_names
from world.files import printable
from world.judge import judge_generated
from world.task import Verdict
from world.tree import PROTECTED


def judge(task, files, sandbox):
    """Verdict on a submission (path -> text). MachineFailure where the machine could not run it."""
    if "repo" in task.meta:
        return judge_repository(task, files, sandbox_for(task, sandbox))
    return judge_generated(task, files, sandbox)


def submitted(task, files):
    """The part of a submission that is judged: the files that the feature lives in, and new files
    that take no other file's place.

    All other files are the repository's own. So a submission cannot empty a helper that only tests
    use, nor hide it behind a new module of its name. Nor can it take a name of the standard library
    or of a package that runs the tests."""
    # Files that the deletion changed may be rewritten freely.
    lives_in = set(task.solution)
    own = {path: text for path, text in files.items() if path in lives_in}

    # Names that are taken: by this Python, and by the repository's other modules. pytest puts the
    # folder of a test on the path, so a module beside the tests is imported by its bare name.
    taken = set(sys.stdlib_module_names) | suites.RUNNERS
    others = [path for path in {**task.files, **task.meta["pristine"]} if path not in lives_in]
    modules, roots = set(), import_roots(task.files)
    for path in others:
        if path.endswith(".py"):
            modules |= import_names(path, roots)
            if PROTECTED.search(path):
                modules.add(Path(path).stem)

    # New files: neither tests nor junk, and in the way of nothing. A file at the place of a folder,
    # or below the place of a file, would keep one of the repository's files from being written.
    known = {*lives_in, *task.files, *task.meta["pristine"]}
    for path, text in files.items():
        if path in known or PROTECTED.search(path) or JUNK.search(path):
            continue
        in_the_way = any(
            other.startswith(path + "/") or path.startswith(other + "/") for other in others
        )
        names = import_names(path, roots)
        tops = {name.split(".")[0] for name in names}
        if not (in_the_way or names & modules or tops & taken):
            own[path] = text
    return own


def required_tests(task):
    """The node ids that have to pass. Those that the deletion broke come first; ERROR_TO_PASS are
    those whose setup or teardown it broke."""
    return task.FAIL_TO_PASS + task.PASS_TO_PASS + task.meta.get("ERROR_TO_PASS", [])


def overlay(task, files):
    """The files that the judge runs: the repository's own ones with what was submitted."""
    # The repository's own files, the part of the submission that is judged, and, over both, the
    # original tests and configuration (`pristine`).
    base = {path: text for path, text in task.files.items() if path not in task.solution}
    return {**base, **submitted(task, files), **task.meta["pristine"]}


def mutated(task, tree, number):
    """The files with a mutant in the place of each test that has some; the mutants of a test take
    turns by this number."""
    mutants = {}
    for test, sites in task.meta["mutants"].items():
        if sites:
            mutants[test] = sites[number % len(sites)]
    return with_mutants(tree, mutants, lost_names(task.meta["names"]))


# How often a suite is run again if the only red tests are some that the deletion had left green:
# such a test may be flaky.
MORE_RUNS = 3


def judge_repository(task, files, sandbox):
    """pytest in a fresh copy; every expected node id must be collected and pass, and every mutant
    must fail.

    If the only red tests are some that were to stay green (PASS_TO_PASS), the whole suite is run
    again before they cost a submission: such a test may fail now and then, whatever was written."""
    # Up to MORE_RUNS further runs, until no test has been red in all of them.
    number, stays_green = len(required_tests(task)), set(task.PASS_TO_PASS)
    try:
        lost, loose, answer = run_judgement(task, files, sandbox)
        first = lost
        for _ in range(MORE_RUNS):
            if loose or not lost or set(lost) - stays_green:
                break
            again, loose, _ = run_judgement(task, files, sandbox)
            # Keep the tests that were red in every run so far. A test of the feature that is red
            # now is worse, and ends the loop.
            if set(again) - stays_green:
                lost = again
            else:
                lost = {node: outcome for node, outcome in lost.items() if node in again}
    except ValueError as error:  # a name or a text that no file can have
        return Verdict(False, 0, number, f"cannot write: {printable(str(error))}")

    # The verdict's numbers and reason are those of the first run.
    if lost:
        reasons = [f"{node}: {outcome}" for node, outcome in first.items()]
        why = answer.get("stopped") or (reasons or [""])[0]
        return Verdict(False, number - len(first), len(first), why)
    if loose:
        return Verdict(False, 0, number, "a test that must fail did not: the results are forged")
    return Verdict(True, number, 0)


ROUNDS = 2  # runs with mutants; a test has at most so many of them


def run_judgement(task, files, sandbox, world=WORLDS[0]):
    """One judgement: ({test that must pass and did not: its outcome}, the tests whose mutant did
    not fail, the suite's last answer).

    A verdict is given in the first world: in any other one the required tests are run once and
    nothing more. In the first one the tests that the deletion broke are run again as they are, too,
    by the order that the mutants get. Otherwise code could forge in the first run only, which no
    run of mutants is like."""
    tree, required = overlay(task, files), required_tests(task)
    plan = suites.plan_of_task(task.meta.get("suite"))
    has_mutants = {test for test, sites in task.meta["mutants"].items() if sites}

    # First all required tests, then those that the deletion broke, in the opposite order: as they
    # are, and as mutants. The first run that shows anything wrong decides; but where nothing else
    # is wrong than tests that were to stay green, which may be unstable, the mutants run, too.
    broken, unstable = task.FAIL_TO_PASS, {}
    runs = [(tree, required, "passed")]
    if world == WORLDS[0]:
        runs.append((tree, broken, "passed"))
        for number in range(ROUNDS):
            runs.append((mutated(task, tree, number), broken, "failed"))
    for number, (tree, nodes, right) in enumerate(runs):
        answer = run_suite(tree, sandbox, sorted(nodes), number > 0, plan=plan, world=world)

        # Beside mutants, the tests that have none say nothing: a mutant that failed may have left
        # anything behind.
        if right == "failed":
            nodes = [node for node in nodes if function_of_test(node) in has_mutants]
        outcomes = {node: answer["outcomes"].get(node, "not collected") for node in nodes}
        wrong = {node: outcome for node, outcome in outcomes.items() if outcome != right}
        if wrong and number == 0 and set(wrong) <= set(task.PASS_TO_PASS):
            unstable = wrong
        elif wrong:
            break

    # Without an outcome, a mutant is lost like any other test: the run may have been stopped.
    if right == "passed":
        return {**unstable, **wrong}, [], answer
    lost = {node: outcome for node, outcome in wrong.items() if outcome == "not collected"}
    return {**unstable, **lost}, sorted(wrong.keys() - lost.keys()), answer
