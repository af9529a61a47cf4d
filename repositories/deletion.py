"""deletion.py: the definitions of a tree of files, and the edits that delete a set of them.

`sources` are the files that a feature can be deleted from, `definitions` what stands in them.
synth_tasks.py decides what a feature is and what goes with it (`delete_feature`). This file removes
its definitions: it leaves stubs (`stub_bodies`) or nothing (`remove_definitions`), and it finds the
helpers that nobody needs any more (`find_dead_helpers`). Every other byte of a file stays as it is;
repositories/source.py makes such edits, in one file and its syntax tree at a time.

Standard library only.
"""

import ast
import re
from dataclasses import dataclass, field

from repositories.source import (
    find_definitions,
    first_line,
    is_text,
    remove_names,
    remove_statements,
    replace_bodies,
)
from world.tree import PROTECTED


def sources(files):
    """The paths of files that features are deleted from: Python that is neither test nor
    configuration nor documentation."""
    return [
        path
        for path in files
        if path.endswith(".py")
        and not PROTECTED.search(path)
        and not re.match(r"docs?/|examples?/", path)
    ]


@dataclass
class Definition:
    """A function, method or class of a repository, which may be deleted to make a task."""

    path: str
    name: str  # Class.method for a method
    kind: str  # function | method | class
    # every definition of this name in its scope, setters and overloads included
    nodes: list
    tests: set = field(default_factory=set)
    early: bool = False  # runs while the package is imported: nothing works without it
    wanted: bool = False  # tests import it by name: they are not collected without it

    def size(self):
        """The number of lines of the last of them, decorators included"""
        return self.nodes[-1].end_lineno - first_line(self.nodes[-1]) + 1


def definitions(files, paths=None):
    """[Definition] of the functions, classes and methods outside tests. Those of one name in one
    scope are one Definition."""
    found = []
    for path in paths if paths is not None else sources(files):
        # A path that is not UTF-8 cannot be named in a task.
        if not is_text(path):
            continue
        for name, kind, nodes in find_definitions(files[path]):
            found.append(Definition(path, name, kind, nodes))
    return found


def functions_of(chosen):
    """The functions and methods among these definitions."""
    return [one for one in chosen if one.kind != "class"]


def methods(one, found):
    """The Definitions among `found` that are methods of this class."""
    return [
        other for other in found if other.path == one.path and other.name.startswith(one.name + ".")
    ]


def nodes_by_path(chosen):
    """path -> the nodes of these definitions in that file."""
    found = {}
    for one in chosen:
        found.setdefault(one.path, []).extend(one.nodes)
    return found


def stub_bodies(files, chosen, keep_docstring, body="raise NotImplementedError"):
    """The files with these bodies replaced; every other byte stays."""
    out = dict(files)
    for path, nodes in nodes_by_path(functions_of(chosen)).items():
        out[path] = replace_bodies(files[path], nodes, keep_docstring, body)
    return out


def remove_definitions(files, chosen):
    """The files without these definitions, and without their names in imports and __all__ of other
    sources."""
    if not chosen:
        return dict(files)
    out = dict(files)
    for path, nodes in nodes_by_path(chosen).items():
        out[path] = remove_statements(files[path], nodes)
    lost = {(one.path, one.name) for one in chosen}
    return remove_names(out, sources(out), lost)


def find_dead_helpers(files, base, chosen, found):
    """Top-level functions of the same files that only the deleted code used: they would give the
    answer away.

    files: before the deletion; base: after it; found: all definitions."""
    paths = {one.path for one in chosen}
    # Candidates are the other functions that the code which goes names, and that these name.
    helpers = []
    while True:
        gone, names = [*chosen, *helpers], set()
        for one in gone:
            for node in one.nodes:
                names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        more = []
        for one in found:
            may_go = one.kind == "function" and one.path in paths and one not in gone
            if may_go and one.name in names:
                more.append(one)
        if not more:
            break
        helpers += more

    # Nothing that is left may name a helper: neither code nor docs, nor a build file, which may
    # have it as a command. Those that are named stay, and so may what they use.
    endings = ".py", ".pyi", ".toml", ".cfg", ".md", ".rst"
    left = "\n".join(base[path] for path in base if path.endswith(endings))
    while True:
        leaving = "\n".join(own_text(files, one) for one in helpers)
        stay = []
        for one in helpers:
            word = re.compile(rf"\b{one.name}\b")
            if len(word.findall(left)) > len(word.findall(leaving)):
                stay.append(one)
        if not stay:
            return helpers
        helpers = [one for one in helpers if one not in stay]


def own_text(files, one):
    """The lines of a definition, its decorators included"""
    lines = files[one.path].split("\n")
    parts = [lines[first_line(node) - 1 : node.end_lineno] for node in one.nodes]
    return "\n".join(line for part in parts for line in part)


def find_again(files, chosen):
    """The same definitions, with their nodes and lines in the changed files."""
    now = {}
    for one in definitions(files, {one.path for one in chosen}):
        now[one.path, one.name] = one
    return [now[one.path, one.name] for one in chosen]
