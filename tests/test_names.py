"""Every name of the code that a comment, a docstring or a page mentions is there.

`rollout.policy_loss`, moe.MoE.forward, muon.py and world/tools.py are names of this kind: a file of
the house, alone or with what it defines. All of it is read from the tree, so a renamed function
fails here wherever it is still called by its old name.
"""

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {"out", "assets", ".git", ".venv", "venv"}


def house_files(suffix):
    for path in sorted(ROOT.rglob(f"*{suffix}")):
        if not SKIPPED & set(path.relative_to(ROOT).parts):
            yield path


@functools.lru_cache(None)
def modules():
    """{name by which a text calls it: [files]}: rollout, world.tools"""
    found = {}
    for path in house_files(".py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts:
            found.setdefault(".".join(parts), []).append(path)
    return found


@functools.lru_cache(None)
def defined_names(path):
    """Dotted names that a file defines or imports at its top, and the members of its classes:
    methods, fields, and attributes of self"""
    names = set()

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(prefix + child.name)
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{prefix}{child.name}.")
                    for attribute in ast.walk(child):
                        own = isinstance(attribute, ast.Attribute)
                        if own and getattr(attribute.value, "id", "") == "self":
                            names.add(f"{prefix}{child.name}.{attribute.attr}")
            elif isinstance(child, (ast.Import, ast.ImportFrom)):
                names.update((alias.asname or alias.name).split(".")[0] for alias in child.names)
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                names.add(prefix + child.id)
            else:
                visit(child, prefix)

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return names


def is_there(module, member):
    """Does any file of that name define it? member: "" or dotted names. A class of another file of
    the house, imported there, is asked in its turn by nobody: its first name is enough."""
    if not member:
        return True
    for path in modules()[module]:
        names = defined_names(path)
        first, _, rest = member.partition(".")
        classes = any(name.startswith(f"{first}.") for name in names)
        if member in names or (first in names and (not rest or not classes)):
            return True
        # what the class inherits from torch or from another file is not looked up
        if f"{module}.{first}" in modules():
            return True
    return False


def texts(path):
    """(line, text) of the comments and docstrings of a Python file, or of the lines of a page"""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from enumerate(source.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[:1]
            text = ast.get_docstring(node, clean=False) if body else None
            if text:
                for i, row in enumerate(text.splitlines()):
                    yield body[0].lineno + i, row


# A dotted name, not inside a path, an address or a longer word
DOTTED = re.compile(r"(?<![\w./\-])([a-z_]\w*(?:\.\w+)+)(?![\w/]|\.\w|-)")
# A file of the house
FILE = re.compile(r"(?<![\w./\-<{])((?:\w+/)*\w+\.py)\b")
# Files of tasks and of strangers that texts speak of are files of no house.
HOUSE_FOLDERS = {path.parent.name for path in house_files(".py")} - {ROOT.name}


def stale_names(path):
    """[(line, name)]: names in the texts of a file that lead nowhere"""
    found = []
    for line, text in texts(path):
        for name in DOTTED.findall(text):
            # the longest beginning that is a module of the house
            parts = name.split(".")
            for end in range(len(parts), 0, -1):
                module = ".".join(parts[:end])
                if module in modules():
                    break
            else:
                continue
            member = ".".join(parts[end:])
            if member in ("py", "md", "jsonl", "json", "png") or member.endswith(".py"):
                continue
            if not is_there(module, member):
                found.append((line, name))
        for name in FILE.findall(text):
            folder = name.split("/")[0]
            if "/" in name and folder in HOUSE_FOLDERS and not (ROOT / name).exists():
                if not list(ROOT.glob(f"*/{name}")):
                    found.append((line, name))
    return found


@pytest.mark.parametrize(
    "path",
    [*house_files(".py"), *house_files(".md")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_what_a_text_names_is_there(path):
    assert stale_names(path) == []


def test_a_stale_name_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "moe.MoE.forward, rollout.policy_loss, muon.py, world/tools.py\n"
        "moe.MoE.fly and rollout.no_such_thing\n"
        "world/nowhere.py\n"
    )
    assert stale_names(page) == [
        (2, "moe.MoE.fly"),
        (2, "rollout.no_such_thing"),
        (3, "world/nowhere.py"),
    ]
