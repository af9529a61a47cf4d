"""How the authors of a repository run its tests.

Functions of {path: text}. A Plan is the way a suite is run. The judge runs the suite by it, and so
do the study before tasks are made and the command that a task tells the agent. Ours, after what
pytest documents about its configuration files. What a failed run means is told by
repositories/refusals.py, what an installation adds by repositories/editable.py.
"""

import configparser
import importlib.util
import re
import shlex
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from repositories.source import file_of_test

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
    # pytest rewrites each assertion, so that its message shows the values. That takes half of a
    # run; the runs of the judge go without where no test needs it.
    rewrite: bool = True
    said: list = field(default_factory=list)  # what was left out, a line each

    def to_meta(self):
        """The fields that a task stores in its `meta`: all but `said`."""
        return {name: value for name, value in vars(self).items() if name != "said"}

    def upwards(self):
        """The way from the plan's folder to the root, in front of a path: "" or "../" and so on."""
        return "../" * len(PurePosixPath(self.folder).parts)


def plan_of_task(meta):
    """The Plan that to_meta() wrote; None for None, ValueError for anything else."""
    if meta is None:
        return None

    # A file of tasks may come from a stranger: only known fields are taken, each of its type.
    lists, texts = ("options", "paths"), ("config", "folder")
    refusal = ValueError("no plan of a suite")
    if type(meta) is not dict or not set(meta) <= {*lists, *texts, "rewrite"}:
        raise refusal
    if type(meta.get("rewrite", True)) is not bool:
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
    if importlib.util.find_spec("pytest_randomly"):
        line = "pytest-randomly is switched off: it draws the order of the tests anew in each run"
        plan = with_options(plan, ["-p", "no:randomly"], line)
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


# What allows settings and marks that no plugin here knows, which a strict suite refuses.
LENIENT = ["-o", "strict_config=false", "-o", "strict_markers=false"]
LENIENT += ["-W", "ignore::pytest.PytestConfigWarning"]
LENIENT += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]


def adapted(plan, files, said, errors):
    """The plan without what pytest refused in this environment; None where nothing can be left out.

    said: what pytest printed where it did not start; errors: {where: text} of the run. One refusal
    is handled per call: the caller runs the suite again and asks again."""
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

    # A setting or a mark of a plugin that is not here: the repository is strict about them, or
    # pytest warns and the repository turns warnings into errors.
    texts = [said, *errors.values()]
    name = first_group(r"Unknown config option:? ?s?:? ?(\w+)", texts)
    name = name or first_group(r"Unknown pytest\.mark\.(\w+)", texts)
    name = name or first_group(r"'(\w+)' not found in `markers`", texts)
    if name and LENIENT[1] not in plan.options:
        owner = provider(name)
        why = f"{owner} is not installed" if owner else f"no plugin here knows {name}"
        strict = ["--strict", "--strict-config", "--strict-markers"]
        found = without_options(plan, files, strict, why) or plan
        return with_options(found, LENIENT, f"unknown settings and marks are allowed ({why})")

    # Two test files of one name, in folders that are no packages.
    apart = "--import-mode=importlib"
    if any("import file mismatch" in text for text in texts) and apart not in plan.options:
        line = f"test files of one name are imported apart ({apart})"
        return with_options(plan, [apart], line)
    return None


def with_options(plan, more, line):
    """The plan with more options, and with a line that explains them."""
    return replace(plan, options=[*plan.options, *more], said=[*plan.said, line])


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
    # Defaults of tox's {posargs} are kept; every other variable, of a shell or of make, is dropped.
    line = re.sub(r"\{posargs:?([^}]*)\}", r"\1", line)
    line = re.sub(r"(\{[^}]*\}|\$\{[^}]*\}|\$\([^)]*\)|\$\w+)/?|\\$", " ", line)
    runner, rest = runner_of(words_of(line))

    # A path counts only if the repository has it.
    folders = set()
    for path in files:
        folders.update(str(parent) for parent in PurePosixPath(path).parents)

    def present(word):
        return word in files or word.rstrip("/") in folders or word in (".", "./")

    def tidy(word):
        return word.removeprefix("./").rstrip("/") or "."

    # Each runner has its own way to say what is collected.
    plan = configured_plan(files)
    if runner in ("pytest", "py.test"):
        kept, _ = keep_options(rest)
        for group in grouped(kept, present):
            if group[0].startswith("-"):
                plan.options += group
            elif present(tidy(group[0].partition("::")[0])):
                plan.paths.append(tidy(group[0]))
        return plan
    if runner == "unittest":
        return unittest_plan(plan, rest, present)
    plan.paths = [tidy(word) for word in rest if present(tidy(word))]
    return plan if runner and (plan.paths or runner != "FILE") else None


def runner_of(words):
    """(the program of a command that runs tests, the words behind it); ("", []) where there is
    none. What stands in front of it does not count: an environment, `poetry run`, `python -m`,
    `coverage run`. FILE is a test module that Python is given as a file; pytest collects it."""
    for place, word in enumerate(words):
        if word in ("install", "add", "download"):
            break
        name = word.rpartition("/")[2]
        if name in ("pytest", "py.test", "unittest", "nosetests", "nose", "nose2", "trial"):
            return name, words[place + 1 :]
        by_python = not place or any(re.search(r"python|^run$", one) for one in words[:place])
        if by_python and name.endswith(".py") and "test" in name.lower():
            return "FILE", [word]
    return "", []


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


def test_command(plan, left_out=(), ignored=(), known=()):
    """The command line that runs the suite by this plan, for a person or an agent at the root.

    left_out: node ids that are not run, of all that are known; ignored: files that are not
    collected."""
    up, left_out, known = plan.upwards(), set(left_out), set(known) | set(left_out)
    words = ["python", "-m", "pytest", "-q", *plan.options]
    words += [f"--rootdir={up.rstrip('/') or '.'}"] if plan.folder or left_out else []
    words += [f"--ignore={up}{path}" for path in sorted(ignored)]

    # pytest leaves out every test whose id begins with that of --deselect. Where this would take
    # others along, the tests that are to run are named instead.
    deselected, kept = whole_functions(left_out, known), known - left_out
    caught = {node for node in kept if node.startswith(tuple(deselected))}
    paths = plan.paths
    if caught:
        crowded = {file_of_test(node) for node in caught}
        deselected = [node for node in deselected if file_of_test(node) not in crowded]
        named = {file_of_test(node) for node in kept} - crowded
        named.update(
            whole_functions({node for node in kept if file_of_test(node) in crowded}, known)
        )
        paths = [up + path for path in sorted(named)]
    words += [f"--deselect={node}" for node in deselected]
    line = shlex.join([*words, *paths])
    return f"cd {shlex.quote(plan.folder)} && {line}" if plan.folder else line


def whole_functions(nodes, known):
    """These node ids. Where every known case of a test function is among them, the id of the
    function stands for all."""
    left = {node.split("[")[0] for node in known if node not in nodes}
    return sorted({node if node.split("[")[0] in left else node.split("[")[0] for node in nodes})
