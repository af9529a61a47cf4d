"""Who may import whom: the rules of the house, read from the syntax trees of all files.

A room is one of the ten files at the top or one of the folders. MAY_KNOW is the whole rule: a room
imports what its row names, itself, and libraries. What a row leaves out is an upward import. An
import inside of `main` or of a demonstration is the file's own door to its appendix and may lead
anywhere but to experiments/ and benchmarks/.

OPEN lists what does not hold yet. An entry that is no longer needed fails the second test, so the
list can only shrink.
"""

import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LOWEST = {"muon", "hsdp", "moe", "length_penalty"}
BOOK = LOWEST | {"synth_tasks", "rollout", "feedback_distill", "summarize", "eval", "train"}
AGENT = {"world", "synth_tasks", "moe"}
LEARNING = AGENT | {"rollout"} | LOWEST

# room -> the rooms that it may import
MAY_KNOW = {
    "muon": set(),
    "hsdp": set(),
    "moe": set(),
    "length_penalty": set(),
    "world": set(),
    "synth_tasks": {"world"},
    "rollout": AGENT | {"length_penalty"},  # what it counts is what the penalty weighs
    "feedback_distill": LEARNING,
    "summarize": LEARNING,
    "eval": LEARNING | {"feedback_distill", "summarize", "fast", "published", "command"},
    "train": (BOOK - {"train"}) | {"world", "fast", "published", "command"},
    # the appendix: each folder knows what lies below it
    "fast": LEARNING | {"published"},
    "published": {"moe", "rollout", "world"},
    "command": {"world", "fast", "published"},
    "experiments": BOOK | {"world", "fast", "published", "command", "benchmarks"},
    "benchmarks": BOOK | {"world", "fast", "published", "command"},
}
# nobody imports these; the second may be read by the first
OUTERMOST = {"experiments", "benchmarks"}

# Libraries of the rooms that promise to know few. What only draws a figure is imported where it is
# drawn.
LIBRARIES = {
    "world": set(),
    "synth_tasks": set(),
    "muon": {"torch", "numpy"},
    "hsdp": {"torch", "numpy"},
    "moe": {"torch", "numpy"},
    "length_penalty": {"torch", "numpy"},
}
FIGURES = {"matplotlib"}
# Programs that run inside the sandbox: the suite's runner finds pytest there.
INSIDE = {("world/suite_runner.py", "pytest")}

# (file, function or "", module) -> why it is still so
OPEN = {
    ("command/bpe.py", "", "rollout.CONTROLS"): "fit_tokenizer returns a rollout.Tokenizer",
    ("command/bpe.py", "", "rollout.SPLIT"): "fit_tokenizer returns a rollout.Tokenizer",
    ("command/bpe.py", "", "rollout.Tokenizer"): "fit_tokenizer returns a rollout.Tokenizer",
    ("command/gpu_memory.py", "", "hsdp.Layout"): "counts by hsdp's layout",
    ("command/gpu_memory.py", "", "hsdp.is_expert"): "counts by hsdp's layout",
    ("command/gpu_memory.py", "", "moe.ModelConfig"): "counts by hsdp's layout",
    ("command/in_turn.py", "", "rollout.Sampler"): "plays the plain form's rollouts",
    ("command/in_turn.py", "", "rollout.rollouts"): "plays the plain form's rollouts",
    ("command/muon_on_ranks.py", "", "muon.Muon"): "part of muon.py's demonstration",
    ("command/policy_report.py", "", "eval.compare_pairs"): "a table of eval's statistics",
    ("command/policy_report.py", "", "eval.sampler_mismatch"): "a table of eval's statistics",
    ("command/policy_report.py", "", "eval.summarize_levels"): "a table of eval's statistics",
    ("command/policy_report.py", "", "eval.summarize_records"): "a table of eval's statistics",
    ("command/policy_report.py", "", "eval.write_json"): "a table of eval's statistics",
    ("command/rollout_statistics.py", "", "eval"): "counts what these find",
    ("command/rollout_statistics.py", "", "feedback_distill"): "counts what these find",
    ("command/rollout_statistics.py", "", "summarize"): "counts what these find",
}


def python_files():
    """Every Python file of the house but the tests, relative to the root."""
    for room in sorted(MAY_KNOW):
        place = ROOT / room
        found = place.rglob("*.py") if place.is_dir() else [ROOT / f"{room}.py"]
        for file in sorted(found):
            if file.exists():
                yield file.relative_to(ROOT)


def room_of(module):
    return module.split(".")[0]


def imported_modules(node):
    """Dotted names that an import statement may load: of `from a import b` both a and a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


@functools.lru_cache(None)
def find_imports(file):
    """[(module, name of the function around it or "")] of every import statement in a file."""
    found = []

    def visit(node, function):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                found.extend((module, function) for module in imported_modules(child))
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            # the outermost function decides: a demonstration may have functions of its own
            visit(child, function or (child.name if is_function else ""))

    visit(ast.parse((ROOT / file).read_text(encoding="utf-8")), "")
    return found


def is_demonstration(file, function):
    return function == "main" or "demo" in function


def violations():
    """{(file, function or "", module): what rule it breaks}"""
    broken = {}
    for file in python_files():
        room = room_of(str(file).removesuffix(".py").replace("/", "."))
        for module, function in find_imports(file):
            other = room_of(module)
            place = str(file), function, module
            known = other == room or other in MAY_KNOW.get(room, ())
            if other in OUTERMOST and room not in OUTERMOST:
                broken[place] = "nobody imports experiments/ or benchmarks/"
            elif other in MAY_KNOW:
                if not known and not is_demonstration(file, function):
                    broken[place] = f"{room} does not know {other}"
            elif room in LIBRARIES and other not in sys.stdlib_module_names:
                libraries = LIBRARIES[room] | (FIGURES if function else set())
                if other not in libraries and (str(file), other) not in INSIDE:
                    broken[place] = f"{room} does not know the library {other}"
    return broken


def find_circle(graph):
    """A list of modules each of which imports the next, the last one the first; [] if there is
    none."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        path.append(module)
        for other in sorted(graph.get(module, ())):
            circle = visit(other)
            if circle:
                return circle
        path.pop()
        done.add(module)
        return []

    for module in sorted(graph):
        circle = visit(module)
        if circle:
            return circle
    return []


def test_imports_go_only_downwards():
    broken = {place: why for place, why in violations().items() if place not in OPEN}
    assert not broken, "\n".join(f"{place}: {why}" for place, why in sorted(broken.items()))


def test_every_open_exception_is_still_needed():
    assert not set(OPEN) - set(violations())


def test_no_module_imports_itself_around_a_circle():
    files = [str(file) for file in python_files()]
    modules = {file.removesuffix(".py").replace("/", ".") for file in files}
    graph = {}
    for file in files:
        module = file.removesuffix(".py").replace("/", ".")
        found = set()
        for name, function in find_imports(file):
            # `from world.task import Task` loads world.task, `from world import suite` world.suite
            candidates = [name, name.rpartition(".")[0]]
            found |= {one for one in candidates if one in modules and not function}
        graph[module] = found - {module}
    assert find_circle(graph) == []
    assert len(graph) > 40 and "world.tools" in graph["world.task"]


@pytest.mark.parametrize(
    "graph, circle",
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c"]),
        ({"a": {"a"}}, ["a"]),
    ],
)
def test_a_circle_is_found_where_there_is_one(graph, circle):
    assert find_circle(graph) == circle


def test_the_table_names_every_room_that_is_there():
    folders = {place.name for place in ROOT.iterdir() if (place / "__init__.py").exists()}
    files = {place.stem for place in ROOT.glob("*.py")}
    assert folders | files <= set(MAY_KNOW) | {"tests"}
    assert files == BOOK
