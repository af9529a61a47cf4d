"""How the authors of a repository run its tests, and what a failed run means, in words.

Pure functions of {path: text}. A Plan is the way a suite is run. The judge runs the suite by it,
and so do the study before tasks are made and the command that a task tells the agent. Ours, after
what pytest documents about its configuration files.
"""

import configparser
import re
import shlex
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

# Where pytest looks for its configuration, in this order. The last three serve other tools as well
# and count only where they hold a section of pytest's.
CONFIG_FILES = (
    "pytest.toml",
    ".pytest.toml",
    "pytest.ini",
    ".pytest.ini",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
)

# Options that cannot be kept, each with the reason. Coverage would set a trace function, and so do
# we. Several processes, another order or a stop at the first failure would hide outcomes.
LEFT_OUT = [
    (re.compile(pattern), why)
    for pattern, why in (
        (r"--(no-)?cov\b.*|--cov[-=].*|--no-cov-on-fail", "coverage"),
        (
            r"-n(\d+|auto|logical)?|--numprocesses\b.*|--dist\b.*|--maxprocesses\b.*|--tx\b.*"
            r"|-f|--looponfail|--max-worker-restart\b.*|--workers\b.*|--tests-per-worker\b.*",
            "several processes",
        ),
        (r"--randomly-.*|--random-order.*|--reverse|--random.*", "a random order"),
        (
            r"-x|--exitfirst|--maxfail\b.*|--sw|--stepwise.*|--lf|--last-failed.*|--pdb|--trace"
            r"|--co|--collect-only",
            "an early end",
        ),
        (
            r"--junit-?xml\b.*|--html\b.*|--self-contained-html|--alluredir\b.*|--report-log\b.*",
            "a report",
        ),
    )
]

# Options that take the next word as their value.
VALUED = set("""
    --alluredir --asyncio-mode --basetemp --capture --color --confcutdir --config-file --cov
    --cov-config --cov-fail-under --cov-report --deselect --dist --doctest-glob --durations
    --durations-min --durations-path --html --ignore --ignore-glob --import-mode --junit-prefix
    --junit-xml --junitxml --log-cli-level --log-file --log-level --maxfail --maxprocesses
    --numprocesses --override-ini --pythonwarnings --random-order-bucket --random-order-seed
    --randomly-seed --reruns --reruns-delay --rootdir --tb --timeout --timeout-method --tx
    --workers -W -c -k -m -n -o -p -r
    """.split())

# Each plugin with the fixtures, marks and options that it provides. Only known names are listed: a
# package whose name was guessed is a stranger's code.
PROVIDED = """
anyio: anyio anyio_backend
faker: faker
hypothesis: hypothesis-profile hypothesis-show-statistics
pyfakefs: fs
pytest-aiohttp: aiohttp_client
pytest-assume: assume
pytest-asyncio: event_loop asyncio asyncio_mode
pytest-benchmark: benchmark benchmark-skip benchmark-disable
pytest-black: black
pytest-cases: cases
pytest-check: check
pytest-codspeed: codspeed
pytest-console-scripts: script_runner
pytest-cov: cov
pytest-datadir: datadir shared_datadir
pytest-dependency: dependency
pytest-django: django_db db
pytest-doctestplus: doctest-plus
pytest-env: env
pytest-flake8: flake8
pytest-flakes: flakes
pytest-freezer: freezer freeze_time
pytest-httpbin: httpbin
pytest-httpserver: httpserver
pytest-httpx: httpx_mock
pytest-isort: isort
pytest-lazy-fixtures: lazy_fixture
pytest-memray: memray
pytest-mock: mocker
pytest-mpl: mpl mpl_image_compare
pytest-mypy: mypy
pytest-mypy-testing: mypy-testing
pytest-order: order
pytest-qt: qtbot
pytest-recording: vcr
pytest-regressions: data_regression file_regression
pytest-remotedata: remote-data
pytest-rerunfailures: flaky reruns
pytest-ruff: ruff
pytest-run-parallel: run_parallel
pytest-socket: socket_enabled disable-socket
pytest-spec: spec
pytest-subtests: subtests
pytest-sugar: sugar
pytest-timeout: timeout
pytest-trio: trio
pytest-xdist: numprocesses xdist_group
pytest-xprocess: xprocess
requests-mock: requests_mock
respx: respx_mock
syrupy: snapshot
"""
PLUGINS = {}
for line in PROVIDED.strip().split("\n"):
    plugin, _, names = line.partition(": ")
    PLUGINS.update(dict.fromkeys(names.split(), plugin))


@dataclass
class Plan:
    """How a suite is run."""

    options: list = field(default_factory=list)  # of pytest, in front of the runner's own
    config: str = ""  # pytest's configuration file
    folder: str = ""  # where pytest is started
    paths: list = field(default_factory=list)  # what is collected; [] leaves it to pytest
    rewrite: bool = False  # assertions are rewritten: a test reads their messages
    said: list = field(default_factory=list)  # what was left out, a line each

    def to_meta(self):
        """The fields that a task stores in its `meta`: all but `said`."""
        return dict(
            options=self.options,
            config=self.config,
            folder=self.folder,
            paths=self.paths,
            rewrite=self.rewrite,
        )


def plan_of_task(meta):
    """The Plan that to_meta() wrote; None for None, ValueError for anything else."""
    if meta is None:
        return None

    # A file of tasks may come from a stranger: only known fields are taken, each of its type.
    lists, texts = ("options", "paths"), ("config", "folder")
    refusal = ValueError("no plan of a suite")
    if type(meta) is not dict or not set(meta) <= {*lists, *texts, "rewrite"}:
        raise refusal
    if type(meta.get("rewrite", False)) is not bool:
        raise refusal

    # Lists of words that a command line can hold.
    for name in lists:
        words = meta.get(name, [])
        if type(words) is not list:
            raise refusal
        if not all(type(word) is str and "\0" not in word for word in words):
            raise refusal

    # Paths that do not lead out of the tree.
    for name in texts:
        text = meta.get(name, "")
        if type(text) is not str or text.startswith("/") or ".." in PurePosixPath(text).parts:
            raise refusal
    return Plan(**meta)


# ---------------------------------------------------------------- what the configuration says
def read_toml(text):
    """The tables of a TOML file; {} where it is none."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return {}


def read_ini(text):
    """{section: {key: text}} of an ini file; {} where it is none."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except (configparser.Error, ValueError):
        return {}
    return {name: dict(section) for name, section in parser.items()}


def pytest_settings(files):
    """(configuration file, its settings) as pytest finds them at the root; ("", {}) for none."""
    # The first file that counts decides; settings are never merged.
    for name in CONFIG_FILES:
        text = files.get(name)
        if text is None:
            continue

        # TOML: pyproject.toml counts only if it has a table for pytest, the other files always do.
        if name.endswith(".toml"):
            tool = read_toml(text)
            if name == "pyproject.toml":
                tool = tool.get("tool")
            found = tool.get("pytest") if isinstance(tool, dict) else None
            if isinstance(found, dict):
                options = found.get("ini_options")
                return name, options if isinstance(options, dict) else found
            if name != "pyproject.toml":
                return name, {}
            continue

        # An ini file: one that is not pytest's own counts only if it has a section for pytest.
        section = "tool:pytest" if name == "setup.cfg" else "pytest"
        sections = read_ini(text)
        if section in sections or name in ("pytest.ini", ".pytest.ini"):
            return name, sections.get(section, {})
    return "", {}


def words_of(value):
    """The words of a setting: a list, or a text as a shell would cut it."""
    if isinstance(value, (list, tuple)):
        return [word for word in value if isinstance(word, str)]
    try:
        return shlex.split(str(value or ""), comments=False)
    except ValueError:
        return str(value or "").split()


def grouped(words, exists=lambda word: False):
    """The words of a command line in groups; an option and its value form one group.

    exists: whether a word names a file or folder of the repository."""
    # Each word begins a group; the word after it may be its value.
    groups, left = [], list(words)
    while left:
        word = left.pop(0)
        groups.append([word])
        if not left or left[0].startswith("-"):
            continue

        # VALUED lists the options that take a value. An unknown option may take a number. --cov
        # takes its value or none: a path behind it is what to collect.
        is_option = word.startswith("-") and "=" not in word
        takes_one = word in VALUED or is_option and re.fullmatch(r"\d+(\.\d+)?", left[0])
        if takes_one and not (word == "--cov" and exists(left[0])):
            groups[-1].append(left.pop(0))
    return groups


def keep_options(words):
    """(the words that are kept, {reason: those left out})."""
    kept, left_out = [], {}

    # An option is left out for what it does, or because `-p` names a plugin that is not used here.
    unused = re.compile(r"-p (no:)?(xdist|randomly|random_order|cov|pytest_cov)")
    for group in grouped(words):
        why = next((why for pattern, why in LEFT_OUT if pattern.fullmatch(group[0])), None)
        if unused.fullmatch(" ".join(group)):
            why = "a plugin that is not used here"
        if why:
            left_out.setdefault(why, []).extend(group)
        else:
            kept += group
    return kept, left_out


def configured_plan(files):
    """The Plan of `pytest` at the root: its configuration, without what cannot be kept."""
    # Which of the configured options can be kept.
    config, settings = pytest_settings(files)
    addopts = words_of(settings.get("addopts"))
    kept, left_out = keep_options(addopts)

    # If one has to go, the kept ones are given on the command line, where they replace the
    # configuration's own addopts.
    plan = Plan(config=config)
    if left_out:
        plan.options = ["-o", f"addopts={shlex.join(kept)}"]
        plan.said = [
            f"pytest runs without {shlex.join(words)} ({why})" for why, words in left_out.items()
        ]
    return plan


def without_options(plan, files, refused, why):
    """The plan without the options that pytest refused, and without their values."""
    # The options in force: those of the configuration, or those that this plan has put in their
    # place by `-o addopts=...` (the word before them is the -o).
    _, settings = pytest_settings(files)
    addopts, other = words_of(settings.get("addopts")), list(plan.options)
    for i, word in enumerate(plan.options):
        if word.startswith("addopts="):
            addopts = words_of(word.partition("=")[2])
            other = plan.options[: i - 1] + plan.options[i + 1 :]
            break

    # whether a word names a file or a folder of the repository
    def present(word):
        folder = word.rstrip("/") + "/"
        return word in files or any(path.startswith(folder) for path in files)

    # Drop the refused options. A word that follows one and names no file is its value.
    kept, gone, refused_before = [], [], False
    for group in grouped(addopts, present):
        is_value = not group[0].startswith("-") and not present(group[0])
        if group[0] in refused or group in refused or refused_before and is_value:
            gone += group
            refused_before = group[0].startswith("-") and len(group) == 1
        else:
            kept += group
            refused_before = False

    # None tells that nothing could be dropped, so another run would be refused again.
    if not gone:
        return None
    options = ["-o", f"addopts={shlex.join(kept)}", *other]
    line = f"pytest runs without {shlex.join(gone)} ({why})"
    return replace(plan, options=options, said=[*plan.said, line])


def provider(name):
    """The plugin that provides a fixture, a mark or an option; "" where none is known.

    An option is known by its whole name or by its first word: --cov-report by `cov`."""
    bare = name.lstrip("-").partition("=")[0]
    return PLUGINS.get(bare) or PLUGINS.get(bare.partition("-")[0], "")


def adapted(plan, files, said, errors):
    """The plan without what pytest refused in this environment; None where nothing can be left out.

    said: what pytest printed; errors: {where: text} of the run. One refusal is handled per call:
    the caller runs the suite again and asks again."""
    # Options of plugins that are not installed, and plugins that cannot be loaded.
    if match := re.search(r"unrecognized arguments: (.*)", said):
        words = words_of(match[1])
        names = sorted({provider(word) for word in words} - {""})
        why = "no plugin here knows it"
        if names:
            why = f"{' and '.join(names)} is not installed"
        return without_options(plan, files, words, why)
    if match := re.search(r"Error importing plugin \"([\w.]+)\"", said):
        words = [["-p", match[1]], f"-p{match[1]}"]
        return without_options(plan, files, words, f"the plugin {match[1]} is not installed")

    # pytest-asyncio warns where its loop scope is unset, and the repository turns warnings into
    # errors: a scope that is set is not warned of.
    unset = r"INTERNALERROR> .*configuration option \"(\w+_loop_scope)\" is unset"
    if match := re.search(unset, said):
        more = ["-o", f"{match[1]}=function"]
        if more[1] not in plan.options:
            line = f"{match[1]} is set to function (pytest-asyncio warns where it is unset)"
            return with_options(plan, more, line)

    # A setting that no plugin here knows. A strict configuration refuses it, or pytest warns of it
    # and the repository turns warnings into errors.
    if match := re.search(r"Unknown config option:? ?s?:? ?([\w, ]+)", said):
        name = match[1].strip()
        more = ["-o", "strict_config=false", "-W", "ignore::pytest.PytestConfigWarning"]
        if more[1] in plan.options:
            return None
        found = without_options(plan, files, ["--strict-config"], f"no plugin here knows {name}")
        if found:
            return with_options(found, more)
        return with_options(plan, more, f"unknown settings are allowed ({name})")

    # The same for marks: first as a warning, then as an error of --strict-markers.
    if name := first_group(r"Unknown pytest\.mark\.(\w+)", [said, *errors.values()]):
        more = ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
        if more[1] in plan.options:
            return None
        owner = provider(name) or "a plugin"
        line = f"unknown marks are allowed ({name} belongs to {owner}, which is not installed)"
        return with_options(plan, more, line)
    name = first_group(r"'(\w+)' not found in `markers`", errors.values())
    if name and "strict_markers=false" not in plan.options:
        owner = provider(name) or "a plugin"
        why = f"its mark {name} belongs to {owner}, which is not installed"
        found = without_options(plan, files, ["--strict-markers", "--strict"], why)
        more = ["-o", "strict_markers=false"]
        if found:
            return with_options(found, more)
        return with_options(plan, more, f"unknown marks are allowed ({name})")
    return None


def with_options(plan, more, *lines):
    """The plan with more options, and with these lines that explain them."""
    return replace(plan, options=[*plan.options, *more], said=[*plan.said, *lines])


def first_group(pattern, texts):
    """The first group of a pattern's match in the first text that has one; "" if none has."""
    for text in texts:
        if match := re.search(pattern, text):
            return match[1]
    return ""


# ---------------------------------------------------------------- what tox, make, CI and others run
COMMAND_FILES = re.compile(
    r"^(tox\.ini|setup\.cfg|pyproject\.toml|noxfile\.py|Makefile|makefile|GNUmakefile"
    r"|justfile|Justfile|setup\.py|\.travis\.yml"
    r"|\.gitlab-ci\.yml|azure-pipelines\.yml|appveyor\.yml|\.appveyor\.yml"
    r"|\.github/workflows/[^/]*|\.circleci/config\.yml"
    r"|(scripts?|bin|ci)/[^/]*test[^/]*|[^/]*test[^/]*\.sh|README[^/]*|CONTRIBUTING[^/]*)$"
)
RUNNERS = re.compile(
    r"\b(py\.?test|unittest|nose(tests|2)?|python[\d.]*\s+\S*tests?\S*\.py|setup\.py\s+test)\b"
)


# what may precede a command in a line of a build file: a prompt, a dash of a list, a key
LINE_HEAD = re.compile(
    r"^[\s@$>*-]*(-\s+)?(run|script|test|tests|commands|check|test_script)?" r"\s*[:=]?\s*[-@|]*\s*"
)


def command_lines(files):
    """(path, line) of every line of the build files that may hold a command; stated_plans keeps
    those that run tests."""
    # Where the authors are most likely to say it comes first; prose (README) comes last.
    order = ("tox.ini", "noxfile.py", "pyproject.toml", "setup.cfg", "Makefile", "setup.py")

    def rank(path):
        place = order.index(path) if path in order else len(order)
        return place, path.startswith(("README", "CONTRIB")), path

    for path in sorted((path for path in files if COMMAND_FILES.match(path)), key=rank):
        # A command may go on in the next line. Each kind of file writes commands in its own way.
        text = files[path].replace("\\\n", " ")
        if path == "noxfile.py":
            for call in re.findall(r"session\.run\(([^)]*)\)", text, re.S):
                words = re.findall(r"['\"]([^'\"]+)['\"]", call)
                yield path, shlex.join(words)
        elif path == "setup.py":
            if match := re.search(r"test_suite\s*=\s*['\"]([\w.]+)['\"]", text):
                yield path, f"python -m unittest {match[1]}"
        elif path.endswith(".toml"):
            for line in re.findall(r"=\s*(?:\[\s*)?[\"'](.*?)[\"']\s*[\],}]*\s*$", text, re.M):
                yield path, line
        else:
            for line in text.split("\n"):
                yield path, LINE_HEAD.sub("", line).strip("`'\" ")


def stated_plans(files):
    """[(Plan, where it is said)] of the commands by which the authors run their tests."""
    # Each command that starts a known runner, once.
    plans = []
    for path, line in command_lines(files):
        if not RUNNERS.search(line):
            continue
        folder = ""
        # One line may hold several commands, and a `cd` before them.
        for part in re.split(r"&&|;|\|\|?", line):
            words = words_of(part)
            if words[:1] == ["cd"] and len(words) == 2:
                folder = words[1].strip("./")
                continue
            found = plan_in_folder(part.strip(), files, folder)
            if found and all(found != plan for plan, _ in plans):
                plans.append((found, f"`{part.strip()[:80]}` in {path}"))

    # Last, files that hold tests and are named like tests, though not by pytest's own pattern.
    named = sorted(
        path
        for path in files
        if re.search(r"(^|/)(tests?|unit_?tests?|[^/]*tests|test[^/_][^/]*)\.py$", path, re.I)
        and path.count("/") < 3
        and re.search(r"^\s*(def test|class \w+.*TestCase)", files[path], re.M)
    )
    if named:
        plan = configured_plan(files)
        plan.paths = named
        plans.append((plan, f"the name of {named[0]}"))
    return plans


def plan_in_folder(line, files, folder):
    """The Plan of a command line that is given in a folder of the repository, or None."""
    if not folder:
        return plan_of_command(line, files)
    # The command sees this folder as its root.
    top = folder + "/"
    inner = {path.removeprefix(top): text for path, text in files.items() if path.startswith(top)}
    plan = plan_of_command(line, inner)
    if plan is None:
        return None
    plan.folder = folder
    plan.config = top + plan.config if plan.config else configured_plan(files).config
    return plan


def plan_of_command(line, files):
    """The Plan of one command line that runs tests, or None."""
    # Only the words from the runner on count. What setup.py runs is read from that file itself
    # (command_lines).
    words = without_launchers(words_of(without_variables(line)))
    if words[:2] == ["FILE", "setup.py"] or not words:
        return None
    plan, head, rest = configured_plan(files), words[0].rpartition("/")[2], words[1:]

    # A path counts only if the repository has it.
    folders = set()
    for path in files:
        folders.update(str(parent) for parent in PurePosixPath(path).parents)

    def present(word):
        return word in files or word.rstrip("/") in folders or word in (".", "./")

    def tidy(word):
        return word.removeprefix("./").rstrip("/") or "."

    # Each runner has its own way to say what is collected. A test module that Python is given as a
    # file (FILE) is collected by pytest instead.
    if head in ("pytest", "py.test"):
        kept, _ = keep_options(rest)
        for group in grouped(kept, present):
            if group[0].startswith("-"):
                plan.options += group
            elif present(tidy(group[0].partition("::")[0])):
                plan.paths.append(tidy(group[0]))
        return plan
    if head in ("nosetests", "nose", "nose2", "trial"):
        plan.paths = [tidy(word) for word in rest if present(tidy(word))]
        return plan
    if head == "FILE" and rest and rest[0].endswith(".py") and "test" in rest[0].lower():
        if present(tidy(rest[0])):
            plan.paths = [tidy(rest[0])]
            return plan
    if head == "unittest":
        return unittest_plan(plan, rest, present)
    return None


def without_variables(line):
    """A command line without the variables of tox, make and shells.

    Python and the root are put in their places, defaults of {posargs} are kept, and every other
    variable becomes a space."""
    line = re.sub(r"\{posargs:?([^}]*)\}", r"\1", line)
    python = r"\{env(python|bindir)\}/?|\$[({]?(PYTHON|python)[)}]?"
    line = re.sub(python, lambda match: "" if "bindir" in match[0] else "python", line)
    line = re.sub(r"\{toxinidir\}/?|\$\{?PWD\}?/?|\$\(CURDIR\)/?", "", line)
    return re.sub(r"\{[^}]*\}|\$\{[^}]*\}|\$\([^)]*\)|\$\w+|\\$", " ", line)


def without_launchers(words):
    """The words of a command from the test runner on: without an environment, `poetry run`,
    `python -m`, `coverage run`. The word FILE precedes a program that Python is given as a file."""
    # Variables and wrappers, then a manager of environments.
    while words and re.fullmatch(r"\w+=.*|time|xvfb-run|env|exec|-", words[0]):
        words.pop(0)
    managers = ("poetry", "uv", "pipenv", "hatch", "pdm", "rye")
    while len(words) > 2 and words[0] in managers and words[1] == "run":
        words = words[2:]

    # Python with its own options: what follows is a module or a file.
    if words and re.fullmatch(r"(\S*/)?python[\d.]*", words[0]):
        words = words[1:]
        while len(words) > 1 and words[0] in ("-W", "-X"):
            words = words[2:]
        while words and re.fullmatch(r"-[A-Zbdsuv]+\S*", words[0]):
            words = words[1:]
        words = words[1:] if words[:1] == ["-m"] else ["FILE", *words]

    # Coverage with its own options: the runner under it is again a module or a file.
    if words[:2] == ["coverage", "run"]:
        words = words[2:]
        alone = ("-a", "-p", "--append", "--branch", "--parallel-mode")
        while words and words[0].startswith("-") and words[0] != "-m":
            has_value = "=" not in words[0] and words[0] not in alone
            words = words[2:] if has_value else words[1:]
        words = words[1:] if words[:1] == ["-m"] else ["FILE", *words]
    return words


def unittest_plan(plan, words, present):
    """The Plan of `python -m unittest WORDS`: its folders and patterns, as pytest takes them."""
    # What the words say: where to start, a pattern of file names, names of modules. Values of
    # options that do not matter here are dropped.
    folder, pattern, names, words = "", "", [], list(words)
    while words:
        word = words.pop(0)
        if word in ("-s", "--start-directory") and words:
            folder = words.pop(0)
        elif word in ("-p", "--pattern") and words:
            pattern = words.pop(0)
        elif word in ("-t", "--top-level-directory", "-k") and words:
            words.pop(0)
        elif not word.startswith("-") and word != "discover":
            names.append(word)

    # A name is a file, a module, a package, or a class in a module.
    for name in names:
        dotted = name.replace(".", "/")
        for path in (name, dotted + ".py", dotted, dotted.rpartition("/")[0] + ".py"):
            if present(path.rstrip("/")):
                plan.paths.append(path.rstrip("/"))
                break

    # A folder to start from. unittest's own pattern, test*.py, holds wherever a folder is searched.
    folder = folder and (folder.rstrip("/").removeprefix("./") or ".")
    if folder and present(folder):
        plan.paths.append(folder)
    if pattern:
        plan.options += ["-o", f"python_files={pattern}"]
    elif not plan.paths or any(not path.endswith(".py") for path in plan.paths):
        plan.options += ["-o", "python_files=test*.py"]
    return plan


def test_command(plan, deselected=(), ignored=()):
    """The command line that runs the suite by this plan, for a person or an agent at the root.

    deselected: node ids that are not run; ignored: files that are not collected."""
    words = ["python", "-m", "pytest", "-q", *plan.options]
    if plan.folder:
        up = [".."] * len(PurePosixPath(plan.folder).parts)
        words.append(f"--rootdir={'/'.join(up)}")
    words += [f"--ignore={path}" for path in ignored]
    words += [f"--deselect={node}" for node in deselected]
    line = shlex.join([*words, *plan.paths])
    return f"cd {shlex.quote(plan.folder)} && {line}" if plan.folder else line


# ---------------------------------------------------------------- what went wrong, in words
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


def own_metadata(files):
    """{path: text} of a file by which importlib.metadata finds the package. It holds the name and
    the version and nothing else.

    Both come from a source distribution's PKG-INFO, or from pyproject.toml; {} where neither holds
    both."""
    # A source distribution says both in its PKG-INFO, whose headers end at the first empty line.
    name = version = ""
    for line in files.get("PKG-INFO", "").split("\n\n")[0].split("\n"):
        key, _, value = line.partition(": ")
        name = value.strip() if key == "Name" else name
        version = value.strip() if key == "Version" else version

    # Otherwise pyproject.toml may; a version that a build works out is not written there.
    project = read_toml(files.get("pyproject.toml", "")).get("project", {})
    if not (name and version) and isinstance(project, dict):
        name, version = project.get("name", ""), project.get("version", "")
    for word in (name, version):
        if not isinstance(word, str) or not re.fullmatch(r"[\w.+!-]+", word):
            return {}

    # The least metadata that importlib.metadata accepts.
    folder = re.sub(r"[-_.]+", "_", name)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    return {f"{folder}.egg-info/PKG-INFO": text}


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


def explain_error(where, text, files, own, repo):
    """What an error of a suite means and what helps, in one line.

    where: the test or file it belongs to; own: top-level names of the repository; repo: its path as
    the user gave it."""
    first = f"{where}: {text}" if where else text

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
    if "import file mismatch" in text:
        return (
            f"{first}; two test files have one name: the authors' --import-mode=importlib, or an "
            "__init__.py in each folder, helps"
        )
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
