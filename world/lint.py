"""lint.py: what can be said of changed Python files without running them, in one screen.

Cursor says that its agents collect lint. Here it is what Python's own parser says, and a few checks
of the syntax tree: a name that is nowhere defined, a function that is defined twice, a line that is
never reached. `find_new_comment` says whether an edit adds a comment.

Left out: imports that nobody uses. A package's __init__.py imports names for others, and a name in
a string annotation is used, too.

Standard library only.
"""

import ast
import builtins
import re

from world.untrusted import FUNCTIONS, explain_unreadable, parse

LINES = 20  # of one screen
LONGEST = 200_000  # characters of a file that is looked at


def lint_changed(before, after):
    """What there is to say of the files that differ from `before`, or are new (path -> text each):
    lines `path:line: text`."""
    found = []
    for path in sorted(after):
        if not path.endswith(".py") or after[path] == before.get(path):
            continue
        found += [f"{path}:{line}: {text}" for line, text in lint_file(after[path])]
        if len(found) > LINES:
            break
    shown = found[:LINES]
    if len(found) > LINES:
        shown.append("[more]")
    return "\n".join(shown) or "no findings"


def lint_file(text):
    """[(line, what is wrong there)] of one file, in the order of its lines."""
    if len(text) > LONGEST:
        return [(1, f"more than {LONGEST} characters: not looked at")]
    tree = parse(text)
    if tree is None:
        return [explain_unreadable(text)]
    found = find_undefined(tree)
    for node in ast.walk(tree):
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                found += find_in_block(statements)
    return sorted(found)


def find_in_block(statements):
    """Of statements that follow each other: functions of one name, and what is never reached."""
    found, defined, ended = [], {}, False
    for statement in statements:
        if ended:
            found.append((statement.lineno, "never reached"))
        ended = isinstance(statement, (ast.Return, ast.Raise, ast.Break, ast.Continue))
        # A decorator may mean it, as @property and @overload do.
        if isinstance(statement, FUNCTIONS) and not statement.decorator_list:
            if statement.name in defined:
                first = defined[statement.name]
                found.append((statement.lineno, f"{statement.name} again, first in line {first}"))
            defined[statement.name] = statement.lineno
    return found


def bound_names(tree):
    """All names that a file binds anywhere: this is generous, so that what is reported is true."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.split(".")[0])
        elif isinstance(node, ast.MatchMapping):
            names.add(node.rest)
        else:
            # A definition, what `except` caught, a pattern, from Python 3.12 on a type parameter
            names.add(getattr(node, "name", None))
    return names


def find_undefined(tree):
    """Names that are read and that the file binds nowhere."""
    known = bound_names(tree) | set(dir(builtins))
    # After `from x import *` any name may be known.
    if "*" in known:
        return []
    found = []
    for node in ast.walk(tree):
        # A folded expression is no identifier (world/untrusted.py). Python itself binds names such
        # as __file__.
        reads = isinstance(node, ast.Name) and node.id.isidentifier()
        if reads and node.id not in known and not re.fullmatch(r"__\w+__", node.id):
            found.append((node.lineno, f"{node.id} is not defined"))
    return found


# ---------------------------------------------------------------- comments
STRING = re.compile(r"'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\"")


def find_new_comment(old, new):
    """-> position in `new` of the first comment that an edit of Python adds, None if it adds none.
    Lines are searched and not parsed, since an edit is seldom a whole program; so a "#" in a
    docstring counts, too."""
    # A comment that the replaced text holds, too, was not added by this edit.
    kept = {comment for _, comment in find_comments(old)}
    for place, comment in find_comments(new):
        if comment not in kept:
            return place
    return None


def find_comments(text):
    """Yields (position, the comment) line by line."""
    start = 0  # of the line
    for line in text.split("\n"):
        # A "#" in a string is no comment. As many quotes in its place keep all positions.
        place = STRING.sub(lambda string: "'" * len(string[0]), line).find("#")
        if place >= 0:
            yield start + place, line[place:]
        start += len(line) + 1
