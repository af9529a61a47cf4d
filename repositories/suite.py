"""How the suite of a repository is run.

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

# Options that cannot be kept. Coverage would set a trace function, and so do we. Several processes,
# another order or a stop at the first failure would hide outcomes.
NO_VALUE = (
    r"--no-cov.*|--cov-(append|branch|reset)|-n(\d+|auto|logical)"
    r"|-f|--looponfail|--reverse|--random-order|--randomly-dont-.*|-x|--exitfirst|--sw|--stepwise.*"
    r"|--lf|--last-failed.*|--pdb|--trace|--co|--collect-only"
)
LEFT_OUT = re.compile(
    r"--cov([-=].*)?"
    r"|-n|--(numprocesses|dist|maxprocesses|tx|workers|tests-per-worker)(=.*)?"
    rf"|--maxfail(=.*)?|--random.*|{NO_VALUE}"
)
WHY_LEFT_OUT = "no coverage, several processes, other order or early end"

# Packages that run the tests. Neither a repository nor a submission may bring one of them.
RUNNERS = {"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"}


@dataclass
class Plan:
    """How a suite is run."""

    options: list = field(default_factory=list)  # of pytest, in front of the runner's own
    config: str = ""  # pytest's configuration file
    paths: list = field(default_factory=list)  # what is collected; [] leaves it to pytest
    said: list = field(default_factory=list)  # what was left out, a line each

    def to_meta(self):
        """The fields that a task stores in its `meta`: all but `said`."""
        return {name: value for name, value in vars(self).items() if name != "said"}


def plan_of_task(meta):
    """The Plan that to_meta() wrote; None for None, ValueError for anything else."""
    if meta is None:
        return None

    # A file of tasks may come from a stranger: each field has to be of its type. One of an earlier
    # version may have fields that are gone.
    default = Plan().to_meta()
    if type(meta) is not dict or not meta.keys() & default.keys():
        raise ValueError("no plan of a suite")
    kept = {name: value for name, value in meta.items() if name in default}
    if any(type(value) is not type(default[name]) for name, value in kept.items()):
        raise ValueError("no plan of a suite")

    # Words that a command line can hold, and a file that is in the tree.
    plan = Plan(**kept)
    words = [plan.config, *plan.options, *plan.paths]
    if any(type(word) is not str or "\0" in word for word in words):
        raise ValueError("no words of a command line")
    if plan.config.startswith("/") or ".." in PurePosixPath(plan.config).parts:
        raise ValueError("a configuration file outside of the tree")
    return plan


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
        return shlex.split(str(value or ""))
    except ValueError:
        return str(value or "").split()


def split_options(words, is_refused):
    """(the words of a command line that are kept, those that are refused). The word behind an
    option goes with it: its value, as `src` in `--cov src`."""
    groups = []
    for word in words:
        option = groups[-1][0] if groups and len(groups[-1]) == 1 else ""
        has_value = option.startswith("-") and "=" not in option
        has_value = has_value and not re.fullmatch(NO_VALUE, option)
        is_value = has_value and not word.startswith("-")
        groups = [*groups[:-1], [option, word]] if is_value else [*groups, [word]]
    kept, refused = [], []
    for group in groups:
        (refused if is_refused(group) else kept).extend(group)
    return kept, refused


def configured_plan(files):
    """The Plan of `pytest` at the root: its configuration, without what cannot be kept."""
    config, _ = pytest_settings(files)
    plan = Plan(config=config)
    plan = without_options(plan, files, is_left_out, WHY_LEFT_OUT) or plan
    if importlib.util.find_spec("pytest_randomly"):
        line = "pytest-randomly is switched off: it draws the order of the tests anew in each run"
        plan = with_options(plan, ["-p", "no:randomly"], line)
    return plan


def is_left_out(group):
    """Whether an option, [word] or [word, value], cannot be kept."""
    return bool(LEFT_OUT.fullmatch(group[0]))


def without_options(plan, files, is_refused, why):
    """The plan without the options that are refused, and without their values; None where there is
    none. is_refused: of an option, [word] or [word, value]."""
    # The options in force: those of the configuration, or those that this plan has put in their
    # place by `-o addopts=...` (the word before them is the -o).
    _, settings = pytest_settings(files)
    addopts, other = words_of(settings.get("addopts")), list(plan.options)
    for i, word in enumerate(plan.options):
        if word.startswith("addopts="):
            addopts = words_of(word.partition("=")[2])
            other = plan.options[: i - 1] + plan.options[i + 1 :]
            break

    # The kept ones are given on the command line, where they replace the configuration's own.
    kept, refused = split_options(addopts, is_refused)
    if not refused:
        return None
    options = ["-o", f"addopts={shlex.join(kept)}", *other]
    line = f"pytest runs without {shlex.join(refused)} ({why})"
    return replace(plan, options=options, said=[*plan.said, line])


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
        why = "no plugin here knows it"
        return without_options(plan, files, lambda group: group[0] in words, why)
    if match := re.search(r"Error importing plugin \"([\w.]+)\"", said):
        words = f"-p{match[1]}", f"-p {match[1]}"
        why = f"the plugin {match[1]} is not installed"
        return without_options(plan, files, lambda group: " ".join(group) in words, why)

    # A setting or a mark of a plugin that is not here: the repository is strict about them, or
    # pytest warns and the repository turns warnings into errors.
    texts = [said, *errors.values()]
    name = first_group(r"Unknown config option:? ?s?:? ?(\w+)", texts)
    name = name or first_group(r"Unknown pytest\.mark\.(\w+)", texts)
    name = name or first_group(r"'(\w+)' not found in `markers`", texts)
    if name and LENIENT[1] not in plan.options:
        why = f"no plugin here knows {name}"
        strict = "--strict", "--strict-config", "--strict-markers"
        found = without_options(plan, files, lambda group: group[0] in strict, why) or plan
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


def test_command(plan, left_out=(), ignored=()):
    """The command line that runs the suite by this plan, for a person or an agent at the root.

    left_out: test functions or files whose tests are not run, nor is any test whose id begins like
    theirs (pytest deselects by the beginning); ignored: files that are not collected."""
    words = ["python", "-m", "pytest", "-q", *plan.options]
    words += ["--rootdir=."] if left_out else []
    words += [f"--ignore={path}" for path in sorted(ignored)]
    words += [f"--deselect={node}" for node in sorted(left_out)]
    return shlex.join([*words, *plan.paths])
