"""memo.py: may the outcome of a command be remembered?

A group of rollouts often writes the same file and runs the same tests. A command's outcome is
remembered by (files, command) where it can depend on nothing else: no clock, no chance, no address,
no order of hashes, no other file. Generated codebases are small enough to decide that by reading
their syntax trees. Everything that is not on a list of harmless names makes the command run again.

Only two kinds of commands are looked at: `python NAME.py` for a script of the codebase, and the
driver by which the judge calls functions (inside/driver.py).

check.py is the file that a generated codebase's tests use to count what passes. Agents see it, so
its text is part of every generated task.
"""

import ast
import builtins
import functools
import re

from world.machine import program_inside
from world.untrusted import parse

CHECK = program_inside("check.py")


# Names that a program may use and still depend on its own files only. They give it no clock, no
# chance, no order of hashes, no other files. All exceptions are added below. (The text of an object
# may hold an address: a program that prints one is remembered with the first.)
PURE = set("""
    abs all any ascii bool bytearray bytes chr classmethod dict divmod enumerate filter float
    int isinstance issubclass iter len list map max min next ord pow print property range repr
    reversed round slice sorted staticmethod str sum super tuple zip bin hex oct complex
    NotImplemented Ellipsis __name__ __debug__ __build_class__
    """.split())
PURE |= {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}
# beginnings of attributes that lead into the interpreter: of private names, of frames, generators,
# tracebacks, coroutines and code
FRAMES = ("_", "f_", "gi_", "tb_", "cr_", "ag_", "co_")


def is_function_of_files(files, command):
    """Whether the outcome of the command can depend on nothing but these files, so that it may be
    remembered. False where that is in doubt: then the command is run again."""
    # Only commands of the generated world: one of its scripts, or the judge's own driver.
    if isinstance(command, str):
        words = re.fullmatch(r"python3? (\w+\.py)", command)
        if not words or words[1] not in files:
            return False
    elif command[-1] != DRIVER:
        return False

    # No file but sources and docs: anything else might be imported in a module's place (bytecode,
    # an extension, a folder).
    if not all(re.fullmatch(r"\w+\.(py|md)", path) for path in files):
        return False

    # All modules have to be pure. The checker is known to be, where it is ours and unchanged.
    modules = frozenset(path[:-3] for path in files if path.endswith(".py"))
    checked = files.get("check.py") == CHECK
    judged = modules - {"check"} if checked else modules
    return all(is_pure(files[f"{name}.py"], modules, checked) for name in judged)


@functools.lru_cache(4096)
def is_pure(text, modules, checked):
    """Whether a module uses nothing but the listed modules, math, itertools, and what PURE names.
    checked: check.py is ours, so the module may hand it globals()."""
    # In doubt where there is no tree of it.
    tree = parse(text)
    if tree is None:
        return False

    # Refuse whatever could tell one run from another: the order of a set, frames, names that reach
    # beyond the module, other modules.
    trusted, importable = set(), modules | {"math", "itertools"}
    for node in ast.walk(tree):
        # ast.walk meets a call before the names in it, so `globals` is trusted in time.
        if checked and isinstance(node, ast.Call) and ast.unparse(node) == "check.run(globals())":
            trusted.add(node.args[0].func)
        elif isinstance(node, (ast.Set, ast.SetComp)):
            return False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "__" in node.value:
            return False
        elif isinstance(node, ast.Attribute) and node.attr.startswith(FRAMES):
            return False
        elif isinstance(node, ast.Name) and node not in trusted:
            # A folded expression is no identifier and may hold anything.
            known = hasattr(builtins, node.id) or node.id.startswith("__")
            if not node.id.isidentifier() or known and node.id not in PURE:
                return False
        elif isinstance(node, ast.Import):
            if any(alias.name not in importable for alias in node.names):
                return False
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module not in importable:
                return False
    return True


# The program by which the judge calls a submission's functions.
DRIVER = program_inside("driver.py")
