"""refusals.py: why a repository's suite cannot be used, in one line that says what helps.

    suite_fails, no_tests, too_slow   the text of a refusal
    explain_error                     what one error of a suite means

Pure functions of {path: text} and of what run_suite (repositories/run_suite.py) has answered. A
refusal is true of the repository that it is about: it tells what pytest reported. Each text is the
first row that holds of a table (whether it holds, the sentence).
"""

import re
from collections import Counter

from world.files import printable
from repositories.repo_files import packages
from repositories.suite import first_group

# the exit code of pytest where it has found no tests
NO_TESTS = 5


def first_that_holds(rows):
    """The sentence of the first row (holds, sentence) that holds; "" if none does."""
    return next((sentence for holds, sentence in rows if holds), "")


# ---------------------------------------------------------------- the text of a refusal
def begun_tests(answer):
    """The node ids of the tests that a run without an answer has begun, by its trail."""
    return [line[2:] for line in answer.get("trail", ()) if line.startswith("> ")]


def too_slow(repo, answer, time_limit):
    """The text that refuses a suite that was stopped: how far it came, and which limit to try."""
    number = first_group(r"^(\d+ tests)$", answer.get("trail", ()))
    began = begun_tests(answer)
    how_far = "it was still collecting its tests"
    if began:
        running = printable(began[-1], 100)
        how_far = f"{len(began) - 1} of {number} were done, and {running} was running"
    return (
        f"{repo}: its test suite ran longer than --time_limit={time_limit:g} s: {how_far}; "
        f"try --time_limit={3 * time_limit:g}"
    )


def no_tests(repo, files, answer):
    """The text that refuses a repository in which no test could be collected."""
    errors = [(where, text) for where, text in answer["errors"].items() if where]
    why = explain_error(*errors[0], files, repo) if errors else ""
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    others, is_empty = answer.get("others"), answer.get("status") == NO_TESTS
    began = [printable(node, 200) for node in begun_tests(answer)] or [""]
    does_not_start = explain_error(*explain_usage(answer["said"]), files, repo)
    return f"{repo}: " + first_that_holds(
        [
            (errors, f"pytest finds no tests: {why}{more}"),
            (
                is_empty and others,
                f"its {others} tests are doctests or checks of style: features are judged by test "
                "functions",
            ),
            (
                is_empty,
                "pytest finds no tests: functions test_* in files test_*.py or *_test.py, or in "
                "those that python_files names in its configuration",
            ),
            (
                began[-1],
                f"its suite ends the whole Python (exit code {answer.get('exit_code')}) in "
                f"{began[-1]}: deselect that test in addopts",
            ),
            (True, "pytest finds no tests: it does not start: " + does_not_start),
        ]
    )


def suite_fails(repo, files, answer):
    """The text that refuses a suite that does not pass: how many tests fail, and why."""
    outcomes, errors = answer["outcomes"], answer["errors"]
    kinds = Counter(outcomes.values())
    uncollected = sum("::" not in where for where in errors if where)
    counts = (
        f"{kinds['failed']} of {len(outcomes)} tests fail, {kinds['error']} cannot be set up, "
        f"{uncollected} files cannot be collected"
    )

    # Of the reasons the most frequent one for which something helps, as a package that is missing;
    # if there is none, the most frequent one. Each with the first place of it.
    reasons = []
    for text, _ in Counter(errors.values()).most_common():
        where = next(where for where in errors if errors[where] == text)
        explained = explain_error(where, text, files, repo)
        reasons.append((explained.endswith(text), explained))
    why = f": {min(reasons, key=lambda one: one[0])[1]}" if reasons else ""
    return f"{repo}: its own suite does not pass ({counts}){why}"


# ---------------------------------------------------------------- what an error means
def missing_module(text):
    """The module that an error says is missing, or ""."""
    named = r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'"
    if match := re.search(named, text):
        return f"{match[2]}.{match[1]}"
    return first_group(r"No module named '?([\w.]+)", [text])


def explain_error(where, text, files, repo):
    """What an error of a suite means and what helps, in one line.

    where: the test or file it belongs to; repo: the repository's path as the user gave it."""
    # The names that the repository's own files take
    own = {path.partition("/")[0].removesuffix(".py") for path in files} | {*packages(files)}
    module = missing_module(text)
    unknown = first_group(r"(?:fixture )?'(\w+)' not found", [text])
    helps = first_that_holds(
        [
            (
                unknown,
                "a plugin or a conftest.py that is not here provides it; --autoinstall installs "
                "what the repository declares",
            ),
            (
                "async def functions are not natively supported" in text,
                "a plugin has to run them: pip install pytest-asyncio, or anyio",
            ),
            (
                "PackageNotFoundError" in text,
                "only an installation or a build writes the metadata that the package asks for: "
                "unpack a source distribution, or write a PKG-INFO with its name and version",
            ),
            (
                module.partition(".")[0] in own,
                f"{module} is not in this folder: a build writes it (python -m pip install "
                f"--no-deps --editable {repo}), or a source distribution has left it out (use a "
                "checkout of the repository)",
            ),
            (
                module,
                f"install the package that has the module {module} for this Python; --autoinstall "
                "installs what the repository declares",
            ),
        ]
    )
    return f"{where}: " * bool(where) + text + f"; {helps}" * bool(helps)


def explain_usage(said):
    """(file name of the conftest.py that failed, or "", and the line of pytest's own output that
    says why it did not start): the last line that names an error, or the last one of all."""
    lines = [line.strip() for line in said.strip().split("\n") if line.strip()]
    telling = re.compile(r"E  |INTERNALERROR>|.*([Ee]rror|ERROR|Exception|Exit|Interrupt)\b")
    marked = [line for line in lines if telling.match(line)] or lines or [""]
    conftest = first_group(r"ImportError while loading conftest '([^']*)'", lines)
    return conftest.rpartition("/")[2], re.sub(r"^(E|INTERNALERROR>) +", "", marked[-1])[:300]
