"""Synthetic tasks: delete a feature, keep its tests, ask for it back.

HEAD_TO_WRITE
"""
import argparse
import ast
import functools
import hashlib
import json
import os
import random
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

TOOLS = ("edit_file", "read_file", "run_command", "search_codebase")
PHANTOMS = ("grep", "open_file", "run_tests", "list_files", "cat")      # tools an agent believes in and nobody offers


# ---------------------------------------------------------------------------------------------------- a task
@dataclass
class Task:
    """Field names as in SWE-bench where they mean the same. `solution` and `hidden` never enter a sandbox."""
    instance_id: str
    problem_statement: str
    files: dict                                     # path -> text: what the agent sees, visible tests included
    solution: dict                                  # path -> original text of every file the deletion changed
    tools: tuple = TOOLS
    level: int = 0
    hidden: list = field(default_factory=list)      # micro-codebases: [module, function, arguments, expected]
    test_command: str = "python tests.py"
    FAIL_TO_PASS: list = field(default_factory=list)
    PASS_TO_PASS: list = field(default_factory=list)
    meta: dict = field(default_factory=dict)

    def to_json(self):
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text):
        values = json.loads(text)
        return cls(**{**values, "tools": tuple(values["tools"])})


@dataclass
class Result:
    exit_code: int
    output: str
    timed_out: bool = False
    seconds: float = 0.0


@dataclass
class Verdict:
    solved: bool
    passed: int
    failed: int
    reason: str = ""


@dataclass
class Action:
    """One turn of an agent: a thought (may be empty), then calls; without calls it is the final message."""
    text: str = ""
    calls: list = field(default_factory=list)       # [(tool, (argument, ...)), ...]
    bad_tool: bool = False                          # the planted habit: a tool that is not there


class ToolError(ValueError):
    """What a tool says when it cannot do what it was asked; its text is the tool's output."""


# ---------------------------------------------------------------------------------------------------- the sandbox
SHELL_SIGNS = re.compile(r"[|&;<>()$`*?\[\]~#\n\\!{}]")
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
DROP = "--clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all".split()


@functools.lru_cache(None)
def has_bwrap():
    """True if bubblewrap is installed and this kernel lets us use it; otherwise says so once."""
    path = shutil.which("bwrap")
    command = [path, "--unshare-all", "--ro-bind", "/", "/", "true"]
    if path and subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
        return True
    warnings.warn("bubblewrap is not usable here: commands of agents run under resource limits only, with network and "
                  "your files in reach (apt-get install bubblewrap)", stacklevel=3)
    return False


class Sandbox:
    """Runs one command at a time per call, any number of calls at once (threads).

    `cpu` (s) and `memory` (bytes) hold per process, `processes` per sandbox; `disk` (bytes) is looked at ten times a second.
    root is exempt from the process limit, so as root every directory gets its own powerless user id; `hide` lists paths of
    this machine (installed copies of the package under study) that must not be there."""

    def __init__(self, time_limit=10.0, cpu=5, memory=1 << 30, file_size=64 << 20, disk=256 << 20, output=16_000, open_files=256,
                 processes=64, python=(os.path.realpath(sys.executable), "-S", "-E", "-B"), memo=True, hide=()):
        self.time_limit, self.output, self.disk, self.python, self.hide = time_limit, output, disk, tuple(python), tuple(hide)
        self.limits = "; ".join(["ulimit -c 0", f"ulimit -t {cpu}", f"ulimit -v {memory // 1024}", f"ulimit -f {file_size // 512}",
                                 f"ulimit -n {open_files}"])
        if has_bwrap():                             # the limit counts this sandbox only: alone it would count all of a user's
            self.limits += f"; ulimit -p {processes} 2>/dev/null || ulimit -u {processes}"
        self.limits += '; exec "$@"'
        self.memo = {} if memo else None

    def argv(self, command):
        """A plain command line becomes its words (no shell to start); anything else goes to sh."""
        if not SHELL_SIGNS.search(command):
            try:
                words = shlex.split(command)
            except ValueError:
                words = []
            if words:
                return [*self.python, *words[1:]] if words[0] in ("python", "python3") else words
        python = " ".join(map(shlex.quote, self.python))
        return ["/bin/sh", "-c", f"python() {{ {python} \"$@\"; }}\n{command}"]

    def cage(self, root):
        """The words in front of a command that put it behind bubblewrap."""
        if not has_bwrap():
            return []
        drop, user = [], "--unshare-user"
        if os.geteuid() == 0 and shutil.which("setpriv"):
            uid, user = 100_000 + os.stat(root).st_ino % 1_000_000, "--unshare-uts"
            give(root, uid)
            drop = ["setpriv", "--reuid", str(uid), "--regid", str(uid), *DROP]
        words = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", user,
                 "--die-with-parent", "--new-session", "--size", str(self.disk), "--perms", "1777", "--tmpfs", "/tmp"]
        prefixes = {os.path.realpath(path) for path in (sys.base_prefix, sys.prefix)} | {sys.prefix}
        prefixes = sorted(path for path in prefixes if not (path + "/").startswith("/usr/"))
        for parent in sorted({str(parent) for path in prefixes for parent in Path(path).parents} - {"/", "/tmp"}):
            words += ["--perms", "0755", "--dir", parent]
        for path in [*SYSTEM, *prefixes]:
            words += ["--ro-bind-try", path, path]
        for path in self.hide:
            words += ["--tmpfs", path] if os.path.isdir(path) else ["--ro-bind", "/dev/null", path]
        return words + ["--proc", "/proc", "--dev", "/dev", "--bind", str(root), "/work", "--chdir", "/work", *drop]

    def run(self, command, root, stdin="", time_limit=None):
        """Result of `command` (a line, or a list of words) in directory `root`; never raises for what the command does."""
        words = self.argv(command) if isinstance(command, str) else list(command)
        if os.path.islink(root) or not os.path.isdir(root):
            return Result(127, "no such directory")
        words = [*self.cage(root), "/bin/sh", "-c", self.limits, "sh", *words]
        if any("\0" in word for word in words):
            return Result(127, "a command cannot hold a zero byte")
        environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8",
                       "PYTHONDONTWRITEBYTECODE": "1"}
        start = time.perf_counter()
        try:
            child = subprocess.Popen(words, cwd=root, env=environment, start_new_session=True, stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except (OSError, UnicodeError) as error:
            return Result(127, f"cannot start: {error}")
        threading.Thread(target=feed, args=(child, stdin), daemon=True).start() if stdin else child.stdin.close()
        text, timed_out = self.collect(child, start + (time_limit or self.time_limit), root)
        return Result(child.returncode, text, timed_out, time.perf_counter() - start)

    def collect(self, child, deadline, root):
        """Output up to the limit; the whole process group is killed at the deadline, at a flood, and at the end."""
        chunks, size, note, pipe = [], 0, "", child.stdout.fileno()
        while not note:
            wait = min(0.1, deadline - time.perf_counter())
            chunk = os.read(pipe, 65536) if wait > 0 and select.select([pipe], [], [], wait)[0] else None
            chunks.append(chunk or b"")
            size += len(chunk or b"")
            if chunk == b"" or (chunk is None and child.poll() is not None):
                break
            note = ("timed out" if wait <= 0 else "output cut" if size > self.output else
                    "disk full" if chunk is None and weight(root) > self.disk else "")
        while not note and child.poll() is None:    # closed its output and goes on
            note = "timed out" if time.perf_counter() > deadline else ""
            time.sleep(.001)
        kill_group(child.pid)
        child.wait()
        child.stdout.close()
        text = b"".join(chunks)[:self.output].decode("utf-8", "replace")
        return text + (f"\n[{note}]" if note else ""), note == "timed out"

    def run_files(self, files, command, stdin=""):
        """The same in a fresh copy of `files`. Remembered: runs of the micro-world are functions of (files, command)."""
        key = tree_key(files, repr((command, stdin)))
        if self.memo is not None and key in self.memo:
            return self.memo[key]
        with fresh_directory() as root:
            write_tree(files, root)
            result = self.run(command, root, stdin)
        if self.memo is not None and not result.timed_out:
            self.memo[key] = result
        return result


def feed(child, text):
    try:
        with child.stdin as pipe:
            pipe.write(text.encode())
    except (BrokenPipeError, ValueError):
        pass


def give(root, uid):
    """Hands the tree to a user; links themselves, never what they point to."""
    for folder, folders, names in os.walk(root):
        for path in [folder, *(os.path.join(folder, name) for name in folders + names)]:
            os.chown(path, uid, uid, follow_symlinks=False)


def weight(root):
    """Bytes on disk under a directory."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                pass
    return total


def kill_group(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def tree_key(files, command):
    return hashlib.sha256(json.dumps([command, sorted(files.items())]).encode()).digest()


def fresh_directory():
    """Private, deleted when left; in memory where the system has such a place."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="task-", dir=memory, ignore_cleanup_errors=True)


def write_tree(files, root):
    for path, text in files.items():
        place = Path(root) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode("utf-8", "surrogateescape"))


# ---------------------------------------------------------------------------------------------------- the workspace
def edited(text, path, old, new):
    """`text` (None: no such file yet) with `old`, which must occur exactly once, replaced; an empty `old` appends."""
    if not old:
        return (text or "") + ("\n" if text and not text.endswith("\n") else "") + new
    if text is None:
        raise ToolError(f"no such file: {path[:80]}")
    if text.count(old) != 1:
        raise ToolError("old text not found" if old not in text else f"old text occurs {text.count(old)} times")
    return text.replace(old, new)


def matches(files, query, hits=20):
    """Lines holding the fixed string, as `path:line: text`."""
    if not query.strip():
        raise ToolError("empty query")
    found = [f"{path}:{number}: {line.strip()[:200]}" for path, text in sorted(files.items()) if query in text
             for number, line in enumerate(text.split("\n"), 1) if query in line]
    return "\n".join(found[:hits] + [f"[{len(found) - hits} more]"] * (len(found) > hits)) or "no matches"


class Workspace:
    """A task's files in a real private directory, and the four tools on it. Tools raise ToolError for the agent to read."""

    def __init__(self, task, sandbox=None, longest=16_000):
        self.task, self.sandbox = task, sandbox or Sandbox()
        self.longest = longest
        self.directory = fresh_directory()
        self.root = Path(self.directory.name).resolve()
        write_tree(task.files, self.root)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.directory.cleanup()

    def place(self, path):
        """The real place of a path, refused if it could lie outside the directory."""
        parts = Path(path).parts if path and "\0" not in path else ()
        if not parts or os.path.isabs(path) or ".." in parts:
            raise ToolError(f"bad path: {path[:80]!r}")
        place = self.root / path
        try:
            if Path(os.path.realpath(place)) != place:      # a link somewhere on the way
                raise ToolError(f"bad path: {path[:80]!r}")
            if place.exists() and not place.is_file():
                raise ToolError(f"not a file: {path[:80]}")
        except (OSError, ValueError) as error:
            raise error if isinstance(error, ToolError) else ToolError(f"bad path: {path[:80]!r}") from None
        return place

    def text(self, place):
        """Up to a megabyte: an agent that writes a huge file must not fill the trainer's memory."""
        with open(place, "rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace")

    def read(self, path):
        place = self.place(path)
        if not place.exists():
            raise ToolError(f"no such file: {path[:80]}")
        text = self.text(place)
        return text if len(text) <= self.longest else text[:self.longest] + "\n[cut]"

    def edit(self, path, old, new):
        """Replaces `old`, which must occur exactly once; an empty `old` appends, or creates the file."""
        place = self.place(path)
        text = edited(self.text(place) if place.exists() else None, path, old, new)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(text.encode("utf-8", "surrogateescape"))
        except (OSError, UnicodeError):
            raise ToolError(f"cannot write: {path[:80]!r}") from None
        return "ok"

    def search(self, query):
        return matches(self.files(), query)

    def run(self, command):
        """Result. Remembered per (files, command) unless the command changed the files."""
        memo = self.sandbox.memo if "repo" not in self.task.meta else None
        if memo is None:
            return self.sandbox.run(command, self.root)
        files = self.files()
        key = tree_key(files, command)
        if key in memo:
            return memo[key]
        result = self.sandbox.run(command, self.root)
        if not result.timed_out and self.files() == files:
            memo[key] = result
        return result

    def files(self):
        """Every regular file of readable size, by path: what a submission consists of."""
        found = {}
        for folder, _, names in os.walk(self.root):
            for name in sorted(names):
                place = Path(folder, name)
                if not place.is_symlink() and place.is_file() and "__pycache__" not in place.parts:
                    path = str(place.relative_to(self.root)).encode("utf-8", "replace").decode()
                    found[path] = self.text(place)
        return dict(sorted(found.items()))


# ---------------------------------------------------------------------------------------------------- micro-codebases
OPS = {                 # name -> (kind, expression, phrase); constants are single digits
    "add": ("map", "x + {k}", "add {k}"),
    "subtract": ("map", "x - {k}", "subtract {k}"),
    "multiply": ("map", "x * {k}", "multiply by {k}"),
    "cap": ("map", "min(x, {k})", "cap at {k}"),
    "raise": ("map", "max(x, {k})", "raise to at least {k}"),
    "multiples": ("filter", "x % {k} == 0", "keep multiples of {k}"),
    "above": ("filter", "x > {k}", "keep above {k}"),
    "below": ("filter", "x < {k}", "keep below {k}"),
}
REDUCTIONS = {"list": ("xs", "return the list"), "sum": ("sum(xs)", "return the sum"),
              "count": ("len(xs)", "return the count"), "largest": ("max(xs, default=0)", "return the largest or 0")}
MEANING = {"add": lambda xs, k: [x + k for x in xs], "subtract": lambda xs, k: [x - k for x in xs],
           "multiply": lambda xs, k: [x * k for x in xs], "cap": lambda xs, k: [min(x, k) for x in xs],
           "raise": lambda xs, k: [max(x, k) for x in xs], "multiples": lambda xs, k: [x for x in xs if x % k == 0],
           "above": lambda xs, k: [x for x in xs if x > k], "below": lambda xs, k: [x for x in xs if x < k],
           "list": list, "sum": sum, "count": len, "largest": lambda xs: max(xs, default=0)}
VERBS = ("blend bring build carry catch clean count draw drop feed find fold give grow hide hold join lift lock make melt "
         "mix move open pack paint pick pull push rest roll save send shake sort spin stack turn wash weigh").split()
NOUNS = ("apple bell bird boat book bread bridge cloud coin cup desk door engine field fish flower garden glass hill horse "
         "house lake lamp leaf moon mouse paper pencil pond rain river road rope ship shirt star stone table tree wheel").split()
PROBE = [0, 1, 50]      # shows family and constant of one map step by copying: [4, 5, 54], [-4, -3, 46], [0, 4, 200], ...

# level -> number of steps, deletions, and where the specification is ("prompt", "docs", "tests"); named: prompt names the target
LEVELS = [dict(steps=(1, 2), deletions=1, where="prompt", named=True),
          dict(steps=(1, 2), deletions=1, where="docs", named=True),
          dict(steps=(1, 1), deletions=1, where="tests", named=True),
          dict(steps=(2, 2), deletions=2, where="docs", named=False),
          dict(steps=(2, 3), deletions=3, where="docs", named=False),
          dict(steps=(2, 3), deletions=4, where="docs", named=False),
          dict(steps=(2, 4), deletions=5, where="docs", named=False),      # 6 and 7: made when 5 is won
          dict(steps=(3, 5), deletions=6, where="docs", named=False)]

CHECK = '''import sys

sys.excepthook = lambda kind, error, trace: print(f"{kind.__name__}: {error}")


def passes(test):
    try:
        return test() is None
    except Exception as error:
        place = error.__traceback__.tb_next
        case = open("tests.py").read().split("\\n")[place.tb_lineno - 1].strip()[7:]
        missing = isinstance(error, AttributeError) and place.tb_next is None
        word = "failed" if isinstance(error, AssertionError) else type(error).__name__
        print(case.split("(")[0] + ": missing" if missing else case + ": " + word)


def run(tests):
    results = [passes(test) for name, test in list(tests.items()) if name.startswith("test_")]
    print(f"{sum(map(bool, results))} passed, {results.count(None)} failed")
    sys.exit(None in results)
'''


@dataclass
class Function:
    """One function of a micro-codebase: xs goes through the steps and then the reduction."""
    module: str
    name: str
    steps: list         # [(op, k), ...]
    reduction: str

    def lines(self):
        code = []
        for op, k in self.steps:
            kind, expression, _ = OPS[op]
            expression = expression.format(k=k)
            code.append(f"xs = [{expression} for x in xs]" if kind == "map" else f"xs = [x for x in xs if {expression}]")
        return code + [f"return {REDUCTIONS[self.reduction][0]}"]

    def code(self):
        return "\n    ".join([f"def {self.name}(xs):", *self.lines()]) + "\n"

    def phrase(self):
        return ", ".join([OPS[op][2].format(k=k) for op, k in self.steps] + [REDUCTIONS[self.reduction][1]])

    def value(self, xs):
        for op, k in self.steps:
            xs = MEANING[op](xs, k)
        return MEANING[self.reduction](xs)

    def held_out(self):
        """One composition in five is kept for evaluation: the sequence of operations, or for one step its constant too."""
        key = (self.steps[0] if len(self.steps) == 1 else tuple(op for op, _ in self.steps), self.reduction)
        return zlib.crc32(repr(key).encode()) % 5 == 0


def held_out_name(name):
    """Function names are held out as pairs: each word is known from training, the pair is not."""
    return zlib.crc32(name.encode()) % 5 == 0


def draw_function(rng, module, noun, steps, held_out, maps_only=False):
    """A function whose composition and name are (not) among the held-out ones."""
    names = [f"{verb}_{noun}" for verb in VERBS if held_out_name(f"{verb}_{noun}") == held_out]
    while True:
        ops = [op for op in OPS if not maps_only or OPS[op][0] == "map"]
        function = Function(module, rng.choice(names), [(rng.choice(ops), rng.randint(2, 9)) for _ in range(rng.randint(*steps))],
                            "list" if maps_only else rng.choice(list(REDUCTIONS)))
        repeats = any(a == b for (a, _), (b, _) in zip(function.steps, function.steps[1:]))
        if function.held_out() == held_out and not repeats:
            return function


def near_misses(function, rng):
    """The mistakes the tests have to see: a step forgotten, a constant off, another operation, another reduction."""
    for i, (op, k) in enumerate(function.steps):
        others = [[], [(op, k + 1)], [(op, k - 1)], [(rng.choice(list(OPS)), k)], [(op, rng.randint(2, 9))]]
        for other in others:
            yield Function("", "", function.steps[:i] + other + function.steps[i + 1:], function.reduction)
    yield Function("", "", function.steps, rng.choice(list(REDUCTIONS)))


def draw_inputs(function, rng, number=10):
    """(visible inputs, hidden inputs) or None if no two inputs tell the function from its near misses."""
    if function.reduction == "list" and len(function.steps) == 1 and OPS[function.steps[0][0]][0] == "map":
        visible = [PROBE]
        return visible, [[rng.randint(-9, 60) for _ in range(4)] for _ in range(5)]
    inputs = [[rng.randint(0, 12) for _ in range(rng.randint(3, 4))] for _ in range(number)]
    right = [function.value(xs) for xs in inputs]
    if len({repr(value) for value in right}) < 4:
        return None                                 # almost constant: a trivial body would pass
    seen = [{i for i, xs in enumerate(inputs) if miss.value(xs) != right[i]} for miss in near_misses(function, rng)]
    if not all(seen[0::5][:len(function.steps)]):
        return None                                 # a step that does nothing
    seen = [where for where in seen if where]       # the rest is equivalent on these inputs
    first = max(range(number), key=lambda i: sum(i in where for where in seen))
    second = max(range(number), key=lambda i: (i != first) + 9 * sum(i in where and first not in where for where in seen))
    if sum(first in where or second in where for where in seen) < len(seen):
        return None
    return [inputs[first], inputs[second]], [xs for i, xs in enumerate(inputs) if i not in (first, second)][:6]


def trivial(function, inputs):
    """True if `return xs`, `return []`, `return 0` or any constant gives all these values."""
    values = [function.value(xs) for xs in inputs]
    return values == inputs or all(value == values[0] for value in values) and len(values) > 1 or values[0] in ([], 0)


def delete(text, names):
    """The source without these top-level definitions; every other byte stays."""
    lines = text.split("\n")
    for node in reversed(ast.parse(text).body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in names:
            end = node.end_lineno
            while end < len(lines) - 1 and not lines[end].strip():
                end += 1
            del lines[node.lineno - 1:end]
    return "\n".join(lines).rstrip("\n") + "\n" if "\n".join(lines).strip() else ""


def make_task(level, seed, split="train"):
    """The micro task of this level, seed and split: the same three always give the same task."""
    assert split in ("train", "heldout"), f"split is train or heldout, not {split}"
    assert 0 <= level < len(LEVELS), f"levels are 0 to {len(LEVELS) - 1}, not {level}"
    rng = random.Random(f"{split}/{level}/{seed}")
    while True:
        task = try_task(rng, level, split)
        if task:
            task.instance_id = f"micro-{split}-{level}-{seed}"
            return task


def try_task(rng, level, split):
    """One draw of a codebase and a deletion; None where a gate refuses it."""
    dials = LEVELS[level]
    sizes = [2, 2] if dials["named"] else [rng.choice((2, 3)) for _ in range(2 if dials["deletions"] < 3 else 3)]
    if sum(sizes) <= dials["deletions"]:
        return None
    nouns = rng.sample(NOUNS, len(NOUNS))
    modules = [nouns.pop() for _ in sizes]
    slots = [module for module, size in zip(modules, sizes) for _ in range(size)]
    chosen = set(rng.sample(range(len(slots)), dials["deletions"]))
    functions, cases = [], []
    for i, module in enumerate(slots):
        noun, function, inputs = nouns.pop(), None, None
        while inputs is None or trivial(function, inputs[0]):
            induce = dials["where"] == "tests" and i in chosen
            steps = dials["steps"] if i in chosen else (1, 2)
            function = draw_function(rng, module, noun, steps, split == "heldout" and i in chosen, induce)
            inputs = draw_inputs(function, rng)
        functions.append(function)
        cases.append(inputs)
    return assemble(rng, level, functions, cases, sorted(chosen))


def assemble(rng, level, functions, cases, chosen):
    """Files, deletion, gates and prompt of one codebase."""
    dials, modules = LEVELS[level], sorted({function.module for function in functions})
    original = {f"{m}.py": "\n\n".join(f.code() for f in functions if f.module == m) for m in modules}
    order = rng.sample(range(len(functions)), len(functions))
    tests = "\n\n".join(f"def test_{functions[i].name}():\n" + "".join(
        f"    assert {functions[i].module}.{functions[i].name}({xs}) == {functions[i].value(xs)}\n" for xs in cases[i][0])
        for i in order)
    known = [f for i, f in enumerate(functions) if i not in chosen or dials["where"] == "docs"]
    original["docs.md"] = "".join(f"{f.module}.{f.name}: {f.phrase()}\n" for f in rng.sample(known, len(known)))
    original["tests.py"] = "".join(f"import {m}\n" for m in ("check", *modules)) + f"\n\n{tests}\n\ncheck.run(globals())\n"
    original["check.py"] = CHECK
    gone = [functions[i] for i in order if i in chosen]
    files = {path: delete(text, {f.name for f in gone if path == f"{f.module}.py"}) if path[:-3] in modules else text
             for path, text in original.items()}
    missing = "".join(f"{f.module}.{f.name}: missing\n" for f in gone)
    left = len(functions) - len(gone)               # the gates: the suite is green, and loses exactly the feature's tests
    if run_trusted(original).exit_code or run_trusted(files).output != f"{missing}{left} passed, {len(gone)} failed\n":
        return None
    tools = draw_tools(rng, dials)
    case = lambda i, xs: [functions[i].module, functions[i].name, [xs], functions[i].value(xs)]
    return Task("", micro_prompt(dials, gone, tools, modules), files,
                {path: text for path, text in original.items() if files[path] != text}, tools, level,
                [case(i, xs) for i in chosen for xs in cases[i][1]], "python tests.py",
                [f"test_{f.name}" for f in gone], [f"test_{f.name}" for f in functions if f not in gone],
                {"visible": [case(i, xs) for i in order for xs in cases[i][0]], "targets": [asdict(f) for f in gone]})


def draw_tools(rng, dials):
    """edit_file, and a random subset of the others that leaves the task solvable."""
    look, run = ["read_file", "search_codebase"], ["run_command"]
    tools = {tool for tool, p in zip(look, (.5, .8)) if rng.random() < p} | {tool for tool in run if rng.random() < .75 or not dials["named"]}
    if dials["where"] != "prompt" and not tools & set(look):
        tools.add(rng.choice(look))
    tools = ["edit_file", *sorted(tools)]
    return tuple(rng.sample(tools, len(tools)))


def micro_prompt(dials, gone, tools, modules):
    if dials["named"]:
        where = {"prompt": f": {gone[0].phrase()}.", "docs": ". See docs.md.", "tests": ". See tests.py."}[dials["where"]]
        ask = f"Put back `{gone[0].module}.{gone[0].name}`{where}"
    else:
        ask = "Some functions are missing. Find them and put them back."
    return f"{ask}\nTools: {' '.join(tools)}\nFiles: {' '.join(f'{m}.py' for m in modules)} docs.md tests.py"


# ---------------------------------------------------------------------------------------------------- our own code, fast
@functools.lru_cache(4096)
def compiled(text, path):
    return compile(text, path, "exec", dont_inherit=True)


def run_trusted(files, command="python tests.py"):
    """What the sandbox would answer, in-process and 20 times faster. ONLY for code written here: nothing is contained."""
    assert command == "python tests.py", f"only the tests run in-process, not {command!r}"
    printed, modules = [], {}

    def leave(code=0):
        raise SystemExit(code)

    def load(name, *_):
        if name not in modules:
            if f"{name}.py" not in files:
                raise ModuleNotFoundError(f"No module named {name!r}")
            code = compiled(files[f"{name}.py"], f"{name}.py")
            modules[name] = types.ModuleType(name)
            modules[name].__dict__["__builtins__"] = inner
            exec(code, modules[name].__dict__)
        return modules[name]

    modules["sys"] = system = types.SimpleNamespace(excepthook=None, exit=leave)
    inner = {**__builtins__} if isinstance(__builtins__, dict) else {**vars(__builtins__)}
    inner.update(print=lambda *words: printed.append(" ".join(map(str, words)) + "\n"), __import__=load,
                 open=lambda path: types.SimpleNamespace(read=lambda: files[path]))
    code = 0
    try:
        exec(compiled(files["tests.py"], "tests.py"), {"__name__": "__main__", "__builtins__": inner})
    except SystemExit as leaving:
        code = int(leaving.code)
    except Exception as error:
        system.excepthook(type(error), error, None)
        code = 1
    return Result(code, "".join(printed))


# ---------------------------------------------------------------------------------------------------- the judge
DRIVER = """import json, os, sys
mouth = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(1, 2)
calls, values = json.load(sys.stdin), []
sys.path.insert(0, os.getcwd())
for module, function, arguments in calls:
    try:
        values.append([1, getattr(__import__(module), function)(*arguments)])
    except Exception as error:
        values.append([0, type(error).__name__])
os.write(mouth, json.dumps(values).encode())
"""


def judge(task, files, sandbox):
    """Verdict on a submission (path -> text). The child is given calls and returns values; the comparison is made here, so
    printing, exiting early, patching or rewriting tests can only lose: nothing in the child knows what is expected."""
    if "repo" in task.meta:
        return judge_repository(task, files, sandbox)
    restored = {**files, "tests.py": task.files["tests.py"], "check.py": task.files["check.py"]}
    cases = task.hidden + task.meta["visible"]
    command = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", DRIVER]
    result = sandbox.run_files(restored, command, json.dumps([case[:3] for case in cases]))
    try:
        values = json.loads(result.output)
        right = [value[0] == 1 and json.dumps(value[1]) == json.dumps(case[3]) for value, case in zip(values, cases)]
    except (ValueError, TypeError, IndexError, KeyError):
        values, right = [], []
    if len(values) != len(cases):
        return Verdict(False, 0, len(cases), "timed out" if result.timed_out else f"no values: {result.output[-200:]}")
    wrong = next((case for case, ok in zip(cases, right) if not ok), None)
    return Verdict(wrong is None, sum(right), len(cases) - sum(right),
                   "" if wrong is None else f"{wrong[0]}.{wrong[1]}({wrong[2][0]}) is wrong")


# ---------------------------------------------------------------------------------------------------- the tools, as the agent calls them
def call_tool(workspace, name, arguments):
    """(output, error): error is "" or "unknown_tool", "bad_arguments", "failed"."""
    names = {"read_file": workspace.read, "edit_file": workspace.edit, "search_codebase": workspace.search,
             "run_command": lambda command: said(workspace.run(command))}
    if name not in workspace.task.tools or name not in names:
        return f"Tool not found: {name}", "unknown_tool"
    if len(arguments) != (3 if name == "edit_file" else 1):
        return f"{name} takes {3 if name == 'edit_file' else 1} arguments, not {len(arguments)}", "bad_arguments"
    try:
        return names[name](*arguments), ""
    except ToolError as error:
        return str(error), "failed"


def said(result):
    return result.output.rstrip("\n") or f"exit code {result.exit_code}"


class Rehearsal:
    """The workspace of a demonstration: the same answers from a dict, in-process. ONLY for agents written here."""

    def __init__(self, task):
        self.task, self.tree = task, dict(task.files)

    def files(self):
        return dict(self.tree)

    def read(self, path):
        if path not in self.tree:
            raise ToolError(f"no such file: {path[:80]}")
        return self.tree[path]

    def edit(self, path, old, new):
        self.tree[path] = edited(self.tree.get(path), path, old, new)
        return "ok"

    def search(self, query):
        return matches(self.tree, query)

    def run(self, command):
        return run_trusted(self.tree, command)


def play(task, agent, workspace):
    """[(Action, outputs)] of an agent (a generator of Actions) at work; the last one is its final message."""
    story, outputs = [], None
    while True:
        try:
            action = agent.send(outputs)
        except StopIteration:
            return story
        outputs = [call_tool(workspace, name, arguments)[0] for name, arguments in action.calls]
        story.append((action, outputs))


def demonstrate(task, rng, sloppy=1.0):
    """[(Action, outputs)] of the scripted expert, and the files it submits; about a millisecond a turn."""
    workspace = Rehearsal(task)
    return play(task, expert(task, rng, sloppy), workspace), workspace.files()


# ---------------------------------------------------------------------------------------------------- the expert: competent, sloppy on purpose
SUMMARIZE = "<|summary|>"       # sent to an expert: write a summary now; in its answer: the summary begins here


class Expert:
    """State of one scripted episode. Each flaw has its own probability, so that each technique has something to remove."""

    def __init__(self, task, rng, sloppy):
        self.task, self.rng, self.sloppy = task, rng, sloppy
        self.effort = rng.choice((.4, 1.0, 1.6))            # does not depend on difficulty: RL has to teach that
        self.targets = [Function(**target) for target in task.meta["targets"]]
        self.files, self.wrong, self.docs_read = dict(task.files), {}, False
        self.can = {tool: tool in task.tools for tool in TOOLS}
        self.prefers_reading = rng.random() < .2
        self.where = LEVELS[task.level]["where"]
        self.about = self.targets[0].name if LEVELS[task.level]["named"] else "def "     # what it would grep for
        self.left = [f"{t.module}.{t.name}" for t in self.targets] if LEVELS[task.level]["named"] else []
        self.specs, self.carried, self.segment, self.written = {}, set(), 0, {}

    def slip(self, probability):
        return self.rng.random() < probability * self.sloppy

    def turn(self, thought, *calls):
        """One turn; now and then a call to a tool that is not there comes first."""
        if self.slip(.15):
            name = self.rng.choice([tool for tool in TOOLS if not self.can[tool]] + list(PHANTOMS))
            argument = {"read_file": ("docs.md",), "open_file": ("docs.md",), "cat": ("tests.py",), "grep": (self.about,),
                        "search_codebase": (self.about,), "run_command": (self.task.test_command,)}
            yield from self.act(Action("", [(name, argument.get(name, ()))], bad_tool=True))
        return (yield from self.act(Action(thought if self.rng.random() < .3 else "", list(calls))))

    def act(self, action):
        """Plays one action. Sent [SUMMARIZE, *outputs], it writes a summary before it goes on; what that leaves out is lost."""
        outputs = yield action
        ask, outputs = outputs[:1] == [SUMMARIZE], [text for text in outputs if text is not SUMMARIZE]
        for name, said in re.findall(r"(\w+\.\w+): (.*)", "\n".join(outputs)):
            if said == "missing" and name not in self.left:
                self.left.append(name)
            elif said not in ("missing", "failed"):
                self.specs[name] = said
        if ask:
            outputs = yield Action(self.summary())
        return outputs

    def summary(self):
        """What is left to do, with the specifications seen so far; sloppily, without them."""
        keep = not self.slip(.4)
        lines = [f"{name}: {self.specs[name] if keep and name in self.specs else 'missing'}" for name in self.left]
        self.carried = {name for name in self.left if keep and name in self.specs}
        self.docs_read, self.segment, self.specs = False, self.segment + 1, {}
        thought = "Which functions are left?" if self.rng.random() < .3 else ""
        return thought + SUMMARIZE + "\n".join(lines or ["Nothing is missing. Run the tests and finish."])

    def edit(self, path, old, new):
        self.files[path] = edited(self.files.get(path), path, old, new)
        return "edit_file", (path, old, new)

    def run(self):
        """Names of functions the tests call wrong."""
        output, = yield from self.turn("Run the tests.", ("run_command", (self.task.test_command,)))
        return [name for name in re.findall(r"^\w+\.(\w+)\(", output, re.M)]

    def lookup(self, target):
        """The call that shows the specification, or None where it is known already."""
        self.about = target.name
        if self.where == "prompt" or f"{target.module}.{target.name}" in self.carried:
            return None
        path, query = ("docs.md", f"{target.name}:") if self.where == "docs" else ("tests.py", f"{target.module}.{target.name}(")
        if self.docs_read and not self.slip(.15 * self.effort):
            return None
        if self.can["search_codebase"] and not (self.can["read_file"] and (self.prefers_reading or self.docs_read)):
            return "search_codebase", (query,)
        self.docs_read = True
        return "read_file", (path,)

    def write(self, target):
        """The call that appends the function; one time in four a step of it is wrong."""
        lines, name = target.lines(), f"{target.module}.{target.name}"
        self.left, self.written[target.name] = [n for n in self.left if n != name], self.segment
        if self.slip(.25):
            i = self.rng.randrange(len(target.steps))
            op, k = target.steps[i]
            alike = [other for other in OPS if other != op and OPS[other][0] == OPS[op][0]]
            off = (op, self.rng.choice([n for n in range(2, 10) if n != k])) if self.rng.random() < .75 else (self.rng.choice(alike), k)
            wrong = Function(target.module, target.name, target.steps[:i] + [off] + target.steps[i + 1:], target.reduction)
            self.wrong[target.name] = (target, wrong.lines()[i], lines[i])
            return self.edit(f"{target.module}.py", "", wrong.code())
        return self.edit(f"{target.module}.py", "", target.code())

    def repair(self, name):
        """The call that replaces the wrong line; more lines, from the def on, where the line alone is not unique."""
        target, old, new = self.wrong.pop(name)
        path = f"{target.module}.py"
        text = self.files[path]
        if text.count(old) != 1:
            start = text.index(f"def {name}(")
            head = text[start:text.index(old, start)]
            old, new = head + old, head + new
        return self.edit(path, old, new)

    def fix_all(self):
        """Runs the tests and repairs what they show; True if there was something to repair."""
        shown = [name for name in (yield from self.run()) if name in self.wrong]
        for name in shown:
            target, same = self.wrong[name][0], self.written[name] == self.segment
            if same:
                yield from self.turn(f"{name} is wrong.", self.repair(name))
                continue
            lookup = self.lookup(target)                        # the summary lost it: a later definition replaces it whole
            if lookup:
                yield from self.turn(f"Look up {name}.", lookup)
            self.wrong.pop(name)
            yield from self.turn(f"Write {name}.", self.edit(f"{target.module}.py", "", target.code()))
        return bool(shown)

    def farewell(self, done):
        """One short line; missing or rambling now and then."""
        names = ", ".join(target.name for target in done)
        if self.slip(.1):
            return ""
        if self.slip(.1):
            return f"I looked at the files, then I thought about what was missing, and then I wrote it. Put back {names}. I hope this helps."
        return f"Put back {names}." if names else "Nothing done."


def expert(task, rng, sloppy=1.0):
    """Plays a micro task: yields Actions and is sent the list of tool outputs (after SUMMARIZE, if it shall sum up first);
    ends with an Action without calls."""
    self = Expert(task, rng, sloppy)
    named, targets, can = LEVELS[task.level]["named"], self.targets, self.can
    quits = rng.randrange(len(targets)) if not named and self.slip(.15) else len(targets)
    if can["read_file"] and self.slip(.2 * self.effort):                            # needless
        yield from self.turn("Look around.", ("read_file", (f"{targets[0].module}.py",)))
    if not named or can["run_command"] and self.slip(.25 * self.effort):            # needless when the target is named
        yield from self.run()
    stepwise, parallel = rng.random() < .4, len(targets) > 1 and rng.random() < .15
    todo = targets[:quits]
    for group in [todo] if parallel else [[target] for target in todo]:
        lookups = [call for call in map(self.lookup, group) if call]
        if lookups:
            yield from self.turn(f"Look up {group[0].name}.", *lookups)
        if group:
            yield from self.turn(f"Write {group[0].name}.", *[self.write(target) for target in group])
        if stepwise and group and group[-1] is not targets[-1]:
            yield from self.fix_all()
    unsure = can["run_command"] and quits == len(targets)
    while unsure and not self.slip(.3):
        unsure = yield from self.fix_all()
    yield Action(self.farewell(todo))


def example_texts(number, seed):
    """What is said in demonstrations, as plain texts (a tokenizer is trained on them)."""
    texts = []
    for i in range(number):
        rng = random.Random(f"{seed}/text/{i}")
        task = make_task(i % 6, (seed << 24) + i)
        story, files = demonstrate(task, rng)
        said = [part for action, outputs in story for part in (action.text, *(w for n, a in action.calls for w in (n, *a)), *outputs)]
        texts.append("\n".join([task.problem_statement, *files.values(), *said]))
    return texts


# ---------------------------------------------------------------------------------------------------- the curriculum
class Curriculum:
    """Selects levels that are neither always won nor never, and opens a harder one when the hardest is won.

    Per level a Beta posterior over the solve rate, with forgetting since the policy moves. A level is drawn with weight
    p (1 - p), p a sample of its posterior: the variance of its reward, which is what a group can learn from."""

    def __init__(self, levels=range(6), seed=0, on=True, hardest=len(LEVELS) - 1, forget=.9):
        self.levels, self.on, self.hardest, self.forget = list(levels), on, hardest, forget
        self.counts = {level: [1.0, 1.0] for level in self.levels}
        self.seed, self.drawn = seed, 0

    def next(self, rng):
        """(level, seed); no seed is ever given twice."""
        self.drawn += 1
        return self.choose(rng), self.seed * 1_000_003 + self.drawn

    def choose(self, rng):
        if not self.on:
            return rng.choice(self.levels)
        samples = [rng.betavariate(*self.counts[level]) for level in self.levels]
        return rng.choices(self.levels, [.02 + p * (1 - p) for p in samples])[0]

    def update(self, level, solved, total):
        """Counts a group's outcome; opens the next level once the hardest one is solved three times in four."""
        won, lost = self.counts[level]
        self.counts[level] = [self.forget * won + solved + 1 - self.forget, self.forget * lost + total - solved + 1 - self.forget]
        top = max(self.levels)
        if self.on and level == top < self.hardest and sum(self.counts[top]) > 20 and self.rate(top) > .75:
            self.levels.append(top + 1)
            self.counts[top + 1] = [1.0, 1.0]

    def rate(self, level):
        won, lost = self.counts[level]
        return won / (won + lost)

    def state_dict(self):
        return {"levels": list(self.levels), "counts": {k: list(v) for k, v in self.counts.items()}, "seed": self.seed,
                "drawn": self.drawn, "on": self.on}

    def load_state_dict(self, state):
        self.levels, self.seed, self.drawn, self.on = list(state["levels"]), state["seed"], state["drawn"], state["on"]
        self.counts = {int(level): list(counts) for level, counts in state["counts"].items()}


# ---------------------------------------------------------------------------------------------------- demo
def demo():
    import difflib
    task, sandbox = make_task(3, 6), Sandbox()
    whole = {**task.files, **task.solution}
    for path in task.solution:
        print(*difflib.unified_diff(whole[path].split("\n"), task.files[path].split("\n"), path, path, lineterm="", n=1), sep="\n")
    for name, files in (("before", whole), ("deleted", task.files), ("restored", {**task.files, **task.solution})):
        print(f"{name:9}", " | ".join(sandbox.run_files(files, task.test_command).output.split("\n")))
    with Workspace(task, sandbox) as workspace:
        for action, outputs in play(task, expert(task, random.Random(0)), workspace):
            for (name, arguments), output in zip(action.calls, outputs):
                print(f"  {name}{arguments}"[:110], "->", output.replace("\n", " | ")[:80])
        print(" ", action.text, "->", judge(task, workspace.files(), sandbox))
    cheat = {**task.files, "tests.py": "print('8 passed, 0 failed')\n", "check.py": ""}
    print("a cheat rewrites the tests:", sandbox.run_files(cheat, task.test_command).output.strip(), "->", judge(task, cheat, sandbox).reason)
    print("The deleted functions failed their tests, the expert restored them, and rewriting the tests won nothing.")


if __name__ == "__main__":
    demo()
