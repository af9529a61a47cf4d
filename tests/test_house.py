"""Who may import whom: the rules of the house, read from the syntax trees of all files.

A room is one of the ten files at the top or one of the folders. MAY_KNOW is the whole rule: a room
imports what its row names, itself, and libraries, at the top of a file as well as inside a
function. What a row leaves out is an upward import. `demo` and `main` of a file of the book are its
door to the appendix: they may also import command/ and demos/. There are no other exceptions.
"""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LOWEST = {"muon", "hsdp", "moe", "length_penalty"}
BOOK = LOWEST | {"synth_tasks", "rollout", "feedback_distill", "summarize", "eval", "train"}
AGENT = {"world", "repositories", "synth_tasks", "moe"}
LEARNING = AGENT | {"rollout"} | LOWEST
APPENDIX = {"world", "repositories", "fast", "published", "command", "demos"}

# room -> the rooms that it may import
MAY_KNOW = {
    "muon": set(),
    "hsdp": {"moe"},  # the model of its demo
    "moe": set(),
    "length_penalty": set(),
    "world": set(),
    "repositories": {"world"},
    "inside": set(),
    "synth_tasks": {"world", "repositories"},
    "rollout": AGENT | {"length_penalty"},  # what it counts is what the penalty weighs
    "feedback_distill": LEARNING,
    "summarize": LEARNING,
    "eval": LEARNING | {"feedback_distill", "summarize", "fast", "published", "command"},
    "train": (BOOK - {"train"}) | {"world", "repositories", "fast", "published", "command"},
    # the appendix: each folder knows what lies below it
    "fast": LEARNING | {"published"},
    "published": {"moe", "rollout", "world"},
    "command": {"world", "repositories", "fast", "published"},
    "demos": {"command"},
    "experiments": BOOK | APPENDIX,
    "benchmarks": BOOK | APPENDIX,
    "exercises": BOOK | APPENDIX,
}
# what `demo` and `main` of a file of the book may import beyond its row
DOORS, BEHIND_THEM = {"demo", "main"}, {"command", "demos"}
# nobody imports these
OUTERMOST = {"experiments", "benchmarks", "exercises"}

# Libraries of the rooms that promise to know few. What only draws a figure is imported where it is
# drawn.
LIBRARIES = {
    "world": set(),
    "repositories": set(),
    "inside": set(),
    "synth_tasks": set(),
    "muon": {"torch", "numpy"},
    "hsdp": {"torch", "numpy"},
    "moe": {"torch", "numpy"},
    "length_penalty": {"torch", "numpy"},
}
FIGURES = {"matplotlib"}
# Programs that run inside the sandbox: the suite's runner finds pytest there.
INSIDE = {("inside/suite_runner.py", "pytest")}


def python_files():
    """Every Python file of the house but the tests, relative to the root."""
    for room in sorted(MAY_KNOW):
        place = ROOT / room
        found = place.rglob("*.py") if place.is_dir() else [ROOT / f"{room}.py"]
        for file in sorted(found):
            if file.exists():
                yield file.relative_to(ROOT)


def module_name(file):
    """The dotted name of a file; a folder is the module of its __init__.py."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


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
            # the outermost function decides: a demo may have functions of its own
            visit(child, function or (child.name if is_function else ""))

    visit(ast.parse((ROOT / file).read_text(encoding="utf-8")), "")
    return found


def violations():
    """{(file, function or "", module): what rule it breaks}"""
    broken = {}
    for file in python_files():
        room = room_of(module_name(file))
        for module, function in find_imports(file):
            other = room_of(module)
            place = str(file), function, module
            known = {room} | MAY_KNOW[room]
            if room in BOOK and function in DOORS:
                known |= BEHIND_THEM
            if other in OUTERMOST and room != other:
                broken[place] = "nobody imports experiments/, benchmarks/ or exercises/"
            elif other in MAY_KNOW:
                if other not in known:
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
    broken = violations()
    assert not broken, "\n".join(f"{place}: {why}" for place, why in sorted(broken.items()))


def test_no_module_imports_itself_around_a_circle():
    """Imports inside functions count as well."""
    modules = {module_name(file): file for file in python_files()}
    graph = {}
    for module, file in modules.items():
        found = set()
        for name, _ in find_imports(file):
            # `from world import suite` loads repositories.suite, `from world.task import Task` world.task
            if name not in modules:
                name = name.rpartition(".")[0]
            found |= {name} & set(modules)
        graph[module] = found - {module}
    assert find_circle(graph) == []
    assert len(graph) > 40 and "world.tools" in graph["world.task"]
    # an import inside a function is seen, and one of a whole folder
    assert "demos.muon_steps" in graph["muon"] and "fast" in graph["train"]


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


def test_lines_have_at_most_100_columns_and_sections_of_experiments_300_words():
    for file in python_files():
        lines = (ROOT / file).read_text(encoding="utf-8").split("\n")
        assert not [line for line in lines if len(line) > 100], file
    text = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    for section in re.split("^##+ ", text, flags=re.M)[1:]:
        title, *lines = section.split("\n")
        # prose: neither tables nor figures nor commands
        prose = [line for line in lines if not line.startswith(("|", "!", "`", "    "))]
        assert max(map(len, prose)) <= 100, title
        assert len(" ".join(prose).split()) <= 300, title
