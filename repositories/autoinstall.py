"""autoinstall.py: finds an environment in which a repository's tests run.

After Cursor's post of 6 May 2026: one agent proposes ten commands and says what they should print,
a second one gets a bare environment and three of them, and has to make them run as described within
five tries, mocks allowed, or else the repository is discarded.

Ours: both agents are scripts (arguments of `autoinstall`; a policy can take their place). Only the
install command has a network, and it asks only for what the repository declares. A package name
guessed from an import is a stranger's code.

    python synth_tasks.py --autoinstall --repo=PATH [--keep=DIR]
"""

import ast
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from repositories import suite as suites
from repositories.copies import installed_copies
from repositories.editable import setup_arguments
from world.files import write_tree
from repositories.repo_files import copy_repository, packages
from world.machine import fresh_directory
from repositories.run_suite import run_by_plan
from world.sandbox import Sandbox, has_bwrap, hidden_place
from repositories.study import module_names
from world.untrusted import parsed
from world.task import Refusal


@dataclass
class Proposal:
    """A command and what it should do, in words. One that runs tests has a Plan of them
    (repositories/suite.py); the output of any other one has to match a pattern."""

    command: str
    says: str
    pattern: str = ""
    plan: object = None

    def try_out(self, sandbox, root):
        """Runs it in the folder `root` -> (why it is not as described or "", what it said)."""
        if self.plan:
            why, said = self.try_tests(sandbox, root)
        else:
            result = sandbox.run(self.command, root)
            is_right = result.exit_code == 0 and re.search(self.pattern, result.output)
            why, said = "" if is_right else f"ended with code {result.exit_code}", result.output
        last = said.strip().split("\n")[-1][:120]
        return why and f"`{self.command}` should {self.says}, but {why}: {last}", said

    def try_tests(self, sandbox, root):
        """The same for tests, whose outcomes a reporter tells. A suite that is not green still
        counts where more than nine times as many tests passed as failed."""

        def start(words, stdin):
            return sandbox.run(words, root, stdin)

        answer = run_by_plan(start, sandbox, self.plan, limit=False)
        kinds = Counter(answer["outcomes"].values())
        failed = kinds["failed"] + kinds["error"] + sum("::" not in at for at in answer["errors"])
        counts = f"{kinds['passed']} passed, {failed} failed"
        said = "\n".join([counts, answer["said"], *answer["errors"].values()])
        if kinds["passed"] > 9 * failed:
            return "", said
        return f"{kinds['passed']} tests passed and {failed} did not", said


def settings(node, path=""):
    """(dotted path, words) of every list and text in a parsed configuration. A table of poetry's
    dependencies counts as the list of its names."""
    for key, value in node.items():
        where = f"{path}.{key}"
        if isinstance(value, dict):
            yield from settings(value, where)
            if "poetry" in where and where.endswith("dependencies"):
                yield where, [name for name in value if name != "python"]
        elif isinstance(value, str):
            yield where, value.split("\n")
        elif isinstance(value, (list, tuple)):
            yield where, [word for word in value if isinstance(word, str)]


# Where tests' requirements are declared: groups of pyproject.toml, pdm, poetry and uv; environments
# of hatch and tox; tests_require of setuptools.
NEEDED = re.compile(
    r"\.dependency-groups\.[^.]*(test|dev)[^.]*$"
    r"|(test|dev|default)[^.]*\.(extra-)?dependencies$"
    r"|\.dev-dependencies(\.[^.]*(test|dev)[^.]*)?$"
    r"|\.(tests_require|testenv\.deps|env_run_base\.deps|env\.[^.]+\.deps)$"
)


def declared(files):
    """The arguments of pip that install what the tests need: what the configuration declares, and
    nothing guessed. A module's name need not be its package's name, and what a stranger has
    registered under a guessed name must not run here."""
    # Every list of the configuration by its dotted path, and which extras the package has.
    trees = {"setup.py": setup_arguments(files)}
    for name in ("pyproject.toml", "hatch.toml", "tox.toml", "pdm.toml", "uv.toml"):
        trees[name] = suites.read_toml(files.get(name, ""))
    for name in ("setup.cfg", "tox.ini"):
        trees[name] = suites.read_ini(files.get(name, ""))
    lists = dict(settings(trees))
    optional = re.compile(r"(optional-dependencies|extras_require|poetry\.extras)\.([\w-]+)$")
    extras = {match[2] for path in lists if (match := optional.search(path))}

    # Words that may be requirements: those of the lists that tests need.
    words = []
    for path, value in lists.items():
        if NEEDED.search(path):
            words += value

    # Keep the words that have the form of a requirement and name neither this repository nor a tool
    # that installs or builds.
    own = {name.lower() for name in packages(files)} | {"pip", "tox", "nox", "build", "twine"}
    requirement = re.compile(r"([A-Za-z][\w.-]*)\s*(\[[\w,.\s-]*\])?\s*([<>=!~;][^:]*)?$")
    named = {"pytest"}
    for word in map(str.strip, words):
        match = requirement.match(word)
        if match and re.match(r"[\w-]*", word)[0].lower().replace("-", "_") not in own:
            named.add(word)

    # Files of requirements are handed to pip as they are, and so is the package with its extras.
    listed = re.compile(r"^[^/]*requirements?[^/]*(\.txt|/[^/]*(test|dev)[^/]*\.txt)$")
    lists = [f"-r{path}" for path in files if listed.search(path)]
    extras = ",".join(sorted(name for name in extras if re.search("test|dev", name)))
    return [f"--editable=.[{extras}]".replace("[]", ""), *sorted(named), *lists]


def propose(files):
    """Stage 1: ten commands that work where the repository does, the most telling first."""
    test_file = re.compile(r"(^|/)(test_[^/]*|[^/]*_test|tests)\.py$")
    # The test files. Those whose outermost folder is not named for tests come last: benchmarks are
    # not the suite.
    tests = [path for path in files if test_file.search(path)]
    tests.sort(key=lambda path: "test" not in path.partition("/")[0])

    # The modules that a command can import, the outermost first.
    modules = sorted(module_names(files, set()), key=lambda name: name.count("."))

    plan = suites.configured_plan(files)
    suite = suites.test_command(plan)

    def test_run(plan, more=()):
        """The proposal to run tests by a plan."""
        plan = replace(plan, options=[*plan.options, *more])
        return Proposal(suites.test_command(plan), "pass", plan=plan)

    # The commands, the most telling first: the suite, imports, test files, the modules'
    # documentation, single tests. Ten of them are kept.
    found = [test_run(plan), Proposal(f"{suite} --collect-only", "list the tests", "::")]
    for name in modules[:4]:
        command = f"python -c 'import {name}; print({name}.__name__)'"
        found.append(Proposal(command, f"print {name}", name))
    found += [test_run(replace(plan, paths=[path])) for path in tests]
    for name in modules[:3]:
        command = f"python -m pydoc {name}"
        found.append(Proposal(command, f"print the documentation of {name}", name))
    for path in tests:
        for node in ast.walk(parsed(files[path])):
            if (getattr(node, "name", None) or "").startswith("test"):
                found.append(test_run(replace(plan, paths=[path]), ["-k", node.name]))
    first = {}
    for one in found:
        first.setdefault(one.command, one)
    return list(first.values())[:10]


# the source of a module from which anything can be imported
MOCK = (
    "from unittest.mock import MagicMock\n"
    "__path__ = []\n"
    "def __getattr__(name): return MagicMock()\n"
)


def install(files, tries):
    """Stage 2: the shell command of the next try. `tries` holds each earlier command with all that
    was printed. The first try installs everything at once; the second one by one, whatever fails;
    the third uses no index but the packages of this Python; later ones mock what is still
    missing."""
    # This Python's pip installs into the bare environment, which has none.
    pip = (
        f"unset PYTHONPATH; {shlex.quote(sys.executable)} -m pip --python .venv/bin/python "
        "--disable-pip-version-check install -q --no-compile --retries 1"
    )
    # What is declared: all at once, then one by one.
    wanted = [shlex.quote(word) for word in declared(files)]
    if len(tries) == 0:
        return f"{pip} {' '.join(wanted)}"
    if len(tries) == 1:
        return "; ".join(f"{pip} {word}" for word in wanted)

    # A .pth file lends the environment the packages of this Python; only the repository itself is
    # installed.
    site = "$(echo .venv/lib/*/site-packages)"
    if len(tries) == 2:
        borrow = f"echo {shlex.quote(sysconfig.get_path('purelib'))} > {site}/borrowed.pth"
        return f"{borrow}; {pip} --no-index --no-build-isolation --no-deps --editable=."

    # A mock for each module that was missing in any try so far, but for the repository's own.
    printed = "".join(text for _, text in tries)
    mocks = []
    for name in dict.fromkeys(re.findall(r"No module named '?([A-Za-z]\w*)", printed)):
        if name not in packages(files):
            mocks.append(f"printf %s {shlex.quote(MOCK)} > {site}/{name}.py")
    return "; ".join(mocks) or "true"


# limits of the sandboxes of the installation and of the commands
LIMITS = dict(
    memory=4 << 30,
    file_size=1 << 30,
    disk=4 << 30,
    output=4 << 20,
    processes=256,
    memo=False,
)


def autoinstall(
    repo,
    time_limit=60.0,
    seed=0,
    network=True,
    proposer=propose,
    installer=install,
    attempts=5,
    keep=None,
):
    """[(install command, output)] of the tries. After the last one, three of the ten proposals ran
    as described in an environment that was bare at first. `proposer` and `installer` are scripts
    here; a policy can take their place. Refusal after `attempts` tries, with the reason. `keep` is
    a folder for the environment that works; it must not exist yet."""
    # A folder that cannot be used is refused now, not after minutes of work.
    files = copy_repository(repo)
    if keep is not None:
        refuse_place(keep)

    # 1) Propose ten commands; three of them, the suite's among these, have to work.
    proposals, tries = proposer(files), []
    if len(proposals) < 3:
        raise Refusal(f"{repo}: fewer than three commands can be proposed")
    chosen = [proposals[0], *random.Random(seed).sample(proposals[1:], 2)]
    for one in proposals:
        print("*" if one in chosen else " ", f"`{one.command}` should {one.says}")

    # Two sandboxes, which both hide copies of the repository that are installed on this machine.
    limits = {**LIMITS, "hide": installed_copies(files)}
    # Only the installation reaches the network.
    offline = Sandbox(time_limit, python=(".venv/bin/python", "-B"), **limits)
    online = Sandbox(600, network=network, **limits)

    # 2) Install, run the three, and try again with what was learnt, until they do as described.
    with fresh_directory() as root:
        write_tree(files, root)
        online.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], root)
        while len(tries) < attempts:
            command = installer(files, tries)
            installed = online.run(command, root)
            results = [one.try_out(offline, root) for one in chosen]
            outputs = [installed.output, *(said for _, said in results)]
            tries.append((command, "\n".join(outputs)))

            # Report the try: done, or the first thing that was not as described.
            failures = [why for why, _ in results if why]
            said = [
                f"try {len(tries)}: {command.replace(sys.executable, 'python')}",
                installed.output.strip().split("\n")[-1],
                failures[0] if failures else "all as described",
            ]
            print(*filter(None, said), sep="\n  -> ")
            if not failures:
                if keep is not None:
                    keep_environment(Path(root, ".venv"), Path(keep), files)
                return tries
    raise Refusal(f"{repo}: discarded after {attempts} tries: {failures[0]}")


def refuse_place(keep):
    """Raises a Refusal where an environment cannot be kept, or could not be used later."""
    place = Path(keep).resolve()

    # Nothing is overwritten, not even a link to nowhere.
    if os.path.lexists(keep):
        raise Refusal(
            f"{keep}: is there already: use it, remove it, or name another folder by --keep=DIR"
        )

    # We can write there, and a command in the sandbox can see it.
    if not os.access(place.parent, os.W_OK):
        raise Refusal(f"{keep}: cannot be written: name another folder by --keep=DIR")
    if has_bwrap() and hidden_place(place):
        raise Refusal(
            f"{keep}: the sandbox shows nothing of {hidden_place(place)}: "
            "name another folder by --keep=DIR"
        )


def keep_environment(found, place, files):
    """Makes a virtual environment at `place` with the packages of the environment `found`, without
    the repository itself.

    Nothing of it runs when its Python starts: .pth files and customisations of the interpreter,
    which a stranger's installation may have written, are not copied. The packages themselves run in
    the sandbox only."""
    # An empty environment of this Python, without pip.
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(place)], capture_output=True, text=True
    )
    if made.returncode:
        raise Refusal(f"{place}: no environment can be made: {made.stderr.strip()[-200:]}")

    # Copy what was installed, but for links, bytecode, the repository itself, and what runs when
    # Python starts.
    source, target = (next(top.glob("lib/*/site-packages")) for top in (found, place))
    own = set(packages(files))
    for one in sorted(source.iterdir()):
        stem = re.split(r"[-.]", one.name)[0]
        runs_at_start = (
            one.suffix == ".pth"
            or stem in ("sitecustomize", "usercustomize")
            or stem.startswith("__editable__")
        )
        if runs_at_start or stem in own or one.is_symlink() or one.name == "__pycache__":
            continue
        if one.is_dir():
            shutil.copytree(
                one, target / one.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copyfile(one, target / one.name)

    # No .pth file was copied. The one by which the third try of `install` borrows the packages of
    # this Python is written anew.
    if (source / "borrowed.pth").exists():
        (target / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
