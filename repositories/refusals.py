"""refusals.py: why a repository's suite cannot be used, in one line that says what helps.

    suite_fails, no_tests, too_slow   the text of a refusal
    explain_error                     what one error of a suite means

Pure functions of {path: text} and of what run_suite (repositories/run_suite.py) has answered. A
refusal is true of the repository that it is about: it tells what pytest reported, and it guesses
nothing.
"""

import re
from collections import Counter

from world.files import printable
from repositories.repo_files import importable, packages
from repositories.suite import first_group, provider

# the exit code of pytest where it has found no tests
NO_TESTS = 5


# ---------------------------------------------------------------- the text of a refusal
def too_slow(repo, answer, time_limit):
    """The text that refuses a suite that was stopped: how long it ran, how far it came, and which
    time limit may be enough."""
    # How far it came, by its trail: how many tests there are, and which one was begun last.
    trail = [line for line in answer.get("trail", ()) if line]
    number = next((int(line.split()[0]) for line in trail if re.fullmatch(r"\d+ tests", line)), 0)
    began = [line[2:] for line in trail if line.startswith("> ")]
    text = f"{repo}: its test suite ran longer than --time_limit={time_limit:g} s"

    # What the whole suite takes at this pace, and half as much again; at least twice the limit.
    if began:
        whole = time_limit * max(2, 1.5 * number / max(1, len(began)))
        running = printable(began[-1], 100)
        text += f": {len(began) - 1} of {number} tests were done, and {running} was running"
        return f"{text}; try --time_limit={-(-whole // 10) * 10:.0f}"
    return f"{text}: it was still collecting its tests; try --time_limit={3 * time_limit:g}"


def no_tests(repo, files, answer):
    """The text that refuses a repository in which no test could be collected: the first reason that
    is known."""
    own = sorted({*packages(files), *importable(files)})
    errors = [(where, text) for where, text in answer["errors"].items() if where]

    # A file cannot be imported: the first one is explained.
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        why = explain_error(*errors[0], files, own, repo)
        return f"{repo}: pytest finds no tests: {why}{more}"

    # pytest ran and found nothing that is a test function.
    if answer.get("status") == NO_TESTS:
        if answer["others"]:
            return (
                f"{repo}: its {answer['others']} tests are doctests or checks of style: "
                "features are judged by test functions"
            )
        tests = [path for path in files if re.search(r"(^|/)tests?(/|\.py$)", path)]
        found = f", and how {tests[0]} is run is not said" if tests else ""
        return (
            f"{repo}: pytest finds no tests (files test_*.py or *_test.py with functions test_*)"
            f"{found}"
        )

    # pytest ended in the middle of a test.
    began = [line[2:] for line in answer.get("trail", ()) if line.startswith("> ")]
    if began:
        code = answer["exit_code"]
        how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
        where = printable(began[-1], 200)
        return (
            f"{repo}: its suite ends the whole Python ({how}) in {where}: "
            "deselect that test in addopts"
        )

    # pytest did not start.
    where, text = explain_usage(answer["said"])
    reason = explain_error(where, text, files, own, repo) if text else answer.get("stopped", "")
    return f"{repo}: pytest finds no tests: it does not start: {reason}"


def suite_fails(repo, files, answer):
    """The text that refuses a suite that does not pass: how many tests fail, and why."""
    # How many fail, cannot be set up, cannot be collected.
    outcomes, errors = answer["outcomes"], answer["errors"]
    kinds = Counter(outcomes.values())
    parts = []
    if kinds["failed"] or not kinds["error"]:
        parts.append(f"{kinds['failed']} of {len(outcomes)} tests fail")
    if kinds["error"]:
        parts.append(f"{kinds['error']} of {len(outcomes)} tests cannot be set up")
    uncollected = [where for where in errors if where and "::" not in where]
    if uncollected:
        parts.append(f"{len(uncollected)} files cannot be collected")

    # Of the reasons the most frequent one for which something helps, as a package that is missing;
    # if there is none, the most frequent one. Each with the first place of it.
    own, reasons = sorted({*packages(files), *importable(files)}), []
    for text, _ in Counter(errors.values()).most_common():
        where = next(where for where in errors if errors[where] == text)
        explained = explain_error(where, text, files, own, repo)
        reasons.append((explained == located(where, text), explained))
    why = f": {min(reasons, key=lambda one: one[0])[1]}" if reasons else ""
    return f"{repo}: its own suite does not pass ({', '.join(parts)}){why}"


# ---------------------------------------------------------------- what an error means
def normalised(name):
    """The name of a package as the package index compares names (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


BUILD_FILES = re.compile(
    r"(^|/)(pyproject\.toml|setup\.(cfg|py)|tox\.ini|noxfile\.py"
    r"|[^/]*requirements?[^/]*\.txt)$|^requirements?/"
)


def declared_names(files):
    """Names of packages that the build files mention, normalised."""
    text = "\n".join(text for path, text in files.items() if BUILD_FILES.search(path))
    return {normalised(word) for word in re.findall(r"[A-Za-z][\w.-]+", text)}


def missing_module(text):
    """The module that an error says is missing, or ""."""
    match = re.search(r"No module named '?([\w.]+)", text)
    if match:
        return match[1]
    match = re.search(
        r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'", text
    )
    return f"{match[2]}.{match[1]}" if match else ""


VERSION_WRITERS = re.compile(
    r"setuptools.scm|hatch-vcs|versioningit|versioneer|pbr|flit_scm|dynamic-versioning"
)


def written_by_build(module, files):
    """(why this module of the repository is missing, the command that helps) if a build writes the
    module; None if no build does."""
    # Where the module would stand, and all that the build files say.
    path = "/".join(module.split("."))
    stem = path.rpartition("/")[2]
    build = "\n".join(
        files.get(name, "")
        for name in ("pyproject.toml", "setup.cfg", "setup.py", "meson.build", "CMakeLists.txt")
    )
    helps = "python -m pip install --no-deps --editable"

    # A file of Python that the build writes, as setuptools_scm and hatch-vcs write a version: the
    # configuration names it, or it is called like a version and such a tool is in use.
    is_named = re.search(rf"{re.escape(path)}\.py|[/\"']{re.escape(stem)}\.py", build)
    if is_named or "version" in stem and VERSION_WRITERS.search(build):
        tools = ("setuptools_scm", "hatch-vcs", "versioningit", "versioneer", "flit_scm")
        tool = "its build"
        for name in (*tools, "pbr", "pdm"):
            if name.replace("_", "-") in build.replace("_", "-"):
                tool = name
                break
        return f"{path}.py is written by {tool} when the package is built", helps

    # A compiled extension: its source is there, or the build says that it compiles one.
    short, whole = re.escape(stem.lstrip("_")), re.escape(stem)
    extension = re.compile(
        rf"(?i:(^|/){short}\w*\.(pyx|c|cc|cpp|cxx|rs|f90))$"
        rf"|(^|/){whole}\.(pyx|c|cc|cpp|cxx|rs)$"
    )
    sources = [name for name in files if extension.search(name)]
    declares = re.search(
        rf"['\"]{re.escape(module)}['\"]|ext_modules|cythonize|maturin|setuptools.rust"
        r"|py-modules-extension|mypycify",
        build,
    )
    if sources or (declares and not any(name.startswith(f"{path}.py") for name in files)):
        source = f" from {sources[0]}" if sources else ""
        return f"{module} is an extension that the build compiles{source}", helps
    return None


def located(where, text):
    """An error's text with the test or file that it belongs to."""
    return f"{where}: {text}" if where else text


def explain_error(where, text, files, own, repo):
    """What an error of a suite means and what helps, in one line.

    where: the test or file it belongs to; own: top-level names of the repository; repo: its path as
    the user gave it."""
    first = located(where, text)

    # A plugin of pytest is missing: for a fixture, a mark, async tests.
    if match := re.search(r"fixture '(\w+)' not found", text):
        name = provider(match[1])
        if name:
            return f"{first}; the plugin {name} provides it: pip install {name}"
        return f"{first}; a plugin or a conftest.py that is not here provides it"
    if match := re.search(r"'(\w+)' not found in `markers`", text):
        name = provider(match[1])
        hint = f"; the plugin {name} provides the mark: pip install {name}" if name else ""
        return first + hint
    if "async def functions are not natively supported" in text:
        known = {"pytest-asyncio", "anyio", "pytest-trio", "pytest-aiohttp", "pytest-twisted"}
        named = sorted(known & declared_names(files))
        helps = f"pip install {named[0]}" if named else "pytest-asyncio and anyio are such plugins"
        return f"{where}: its async tests need a plugin that runs them: {helps}"

    # The package was never installed, or a module is missing.
    if re.search(
        r"PackageNotFoundError: (?:No package metadata was found for )?['\"]?([\w.-]+)", text
    ):
        return (
            f"{first}; the package asks for its own metadata, which only an installation or a "
            "build writes: unpack a source distribution, or give it a PKG-INFO with its name and "
            "version"
        )
    if module := missing_module(text):
        return f"{first}; {explain_missing(module, files, own, repo)}"
    return first


def explain_missing(module, files, own, repo):
    """What helps where a module is missing. own: the names that the repository's files take."""
    # A module of the repository may be written by a build; any other one may be declared.
    top = module.partition(".")[0]
    if top in own:
        built = written_by_build(module, files)
        if built:
            return f"{built[0]}: {built[1]} {repo}, then run this again"
    elif normalised(top) in declared_names(files):
        name = normalised(top)
        return f"it is declared but not installed: pip install {name}, or --autoinstall"

    # Otherwise it is a part of the repository that is not here, judged by its place or its name.
    is_helper = re.search(r"test|conftest|helper|util|support|fixtures", top)
    if top in own or is_helper or any(path.split("/")[0] == top for path in files):
        return (
            f"the module {module} is not in this folder (a source distribution often "
            "leaves the helpers of its tests out): use a checkout of the repository"
        )
    return f"install the package that has the module {module} for this Python"


def explain_usage(said):
    """(file name of the conftest.py that failed, or "", and the line of pytest's own output that
    says why it did not start)."""
    lines = [line.strip() for line in said.strip().split("\n") if line.strip()]

    # The patterns stand in the order of how much they tell. The first one that matches any line
    # decides; of the lines that match it, the last one is taken.
    telling = (
        r"E +(.*)",
        r"INTERNALERROR>\s*([\w.]+(?:Error|Warning|Exception|Exit): .*)",
        r"((?:ERROR|error|.*: error:|INTERNALERROR|\w*(?:Error|Exception|Exit):).*)",
        r"([\w.]*(?:Error|Exception|Interrupt)\b.*)",
    )
    why = lines[-1] if lines else ""
    for pattern in telling:
        marked = [match[1] for line in lines if (match := re.match(pattern, line))]
        if marked:
            why = marked[-1]
            break

    # Whose fault it is, where pytest names a conftest.py.
    conftest = first_group(r"ImportError while loading conftest '([^']*)'", lines)
    return conftest.rpartition("/")[2], why[:300]
