"""deletion.py: the edits that delete a set of definitions from a tree of files.

synth_tasks.py decides what a feature is and what goes with it (`delete_feature`). This file removes
its definitions: it leaves stubs (`stub_bodies`) or nothing (`remove_definitions`), and it finds the
helpers that nobody needs any more (`find_dead_helpers`). Every other byte of a file stays as it is;
repositories/source.py makes such edits, in one file and its syntax tree at a time.

Definitions are those of repositories/study.py. Standard library only.
"""

import ast
import re

from repositories.study import definitions
from repositories.source import remove_statements, replace_bodies


def functions_of(chosen):
    """The functions and methods among these definitions."""
    return [one for one in chosen if one.kind != "class"]


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
    """The files without these definitions, which no other file imports or exports by name."""
    out = dict(files)
    for path, nodes in nodes_by_path(chosen).items():
        out[path] = remove_statements(files[path], nodes)
    return out


def find_dead_helpers(files, base, chosen, found):
    """Top-level functions that only the deleted code used: they would give the answer away.

    files: before the deletion; base: after it; found: all definitions."""
    # Candidates are the other functions in the files of the deleted code that the code names;
    # `unparse` writes no comments.
    deleted = "\n".join(ast.unparse(node) for one in chosen for node in one.nodes)
    words, paths = set(re.findall(r"\w+", deleted)), {one.path for one in chosen}
    candidates = []
    for one in found:
        may_go = one.kind == "function" and one.path in paths and one not in chosen
        if may_go and one.name in words:
            candidates.append(one)
    if not candidates:
        return []

    # Nothing that is left may name a helper, except its own definition: the one occurrence in all
    # that is left is the one in its own file.
    left = "\n".join(base[path] for path in base if path.endswith((".py", ".pyi")))
    helpers = []
    for one in candidates:
        word = re.compile(rf"\b{one.name}\b")
        is_alone = len(word.findall(left)) == len(word.findall(base[one.path])) == 1
        if is_alone:
            helpers.append(one)
    return helpers


def find_again(files, chosen):
    """The same definitions, with their nodes and lines in the changed files."""
    now = {}
    for one in definitions(files, {one.path for one in chosen}):
        now[one.path, one.name] = one
    return [now[one.path, one.name] for one in chosen]
