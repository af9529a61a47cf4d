"""Reads a repository's Python as Python itself reads it, and changes it without touching any other
byte.

A file of a repository is kept as "stored" text: its bytes decoded as UTF-8, with every byte that is
not UTF-8 as a surrogate. Stored text gives back the file's bytes exactly, but it is not always what
Python reads: a byte-order mark, a PEP 263 cookie (`# -*- coding: latin-1 -*-`) and the three kinds
of line ends are part of the language. `SourceText` decodes a file as Python does, finds places in
it by the line and column of a syntax tree, and encodes it again after the edits.

All edits here are cuts in the text, so comments and layout of everything else survive. Every
function takes and returns stored text.
"""

import ast
import re
from collections import Counter
from pathlib import PurePosixPath

from world.task import Discard
from world.untrusted import (
    DEFINITIONS,
    FUNCTIONS,
    decode_source,
    is_python,
    parsed,
)


# ------------------------------------------------------------ reading
def split_lines(text):
    """Lines with their ends, cut where Python's tokenizer cuts: at \\n, \\r\\n and \\r. Unlike
    str.splitlines it does not cut at a form feed."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)


class SourceText:
    """A file, decoded, with places by line (from 1) and column (in UTF-8 bytes) as syntax trees
    give them."""

    def __init__(self, stored):
        self.text, self.encoding = decode_source(stored)
        self.lines = split_lines(self.text)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        # A byte-order mark needs no correction: the syntax tree does not count it, and the codec
        # utf-8-sig has taken it away.

    def index(self, line, column):
        """The place in the text of a line and column of the tree."""
        before = self.lines[line - 1].encode()[:column].decode()
        return self.starts[line - 1] + len(before)

    def span(self, node):
        """(start, end) of a node, the decorators and their `@` included."""
        start = self.index(node.lineno, node.col_offset)
        decorators = getattr(node, "decorator_list", None)
        if decorators:
            first = self.index(decorators[0].lineno, decorators[0].col_offset)
            start = self.text.rindex("@", 0, first)
        return start, self.index(node.end_lineno, node.end_col_offset)

    def line_start(self, place):
        """The place where the line of this place begins."""
        return max(self.text.rfind("\n", 0, place), self.text.rfind("\r", 0, place)) + 1

    def apply(self, edits):
        """Stored text after the edits (start, end, replacement). An edit that overlaps one that
        begins before it is dropped; mostly it lies inside that one."""
        # Of edits that begin at one place the longest comes first, and the others are inside it.
        kept = []
        for start, end, new in sorted(set(edits), key=lambda edit: (edit[0], -edit[1])):
            if not kept or start >= kept[-1][1]:
                kept.append((start, end, new))

        # From the last edit to the first: the places of those before it stay valid.
        text = self.text
        for start, end, new in reversed(kept):
            text = text[:start] + new + text[end:]

        # A replacement may hold characters that this encoding lacks; in a literal its escape says
        # the same.
        data = text.encode(self.encoding, "backslashreplace")
        return data.decode("utf-8", "surrogateescape")


# ------------------------------------------------------------ modules
def package_root(path, paths):
    """(folder that a source is imported from, dotted name of its module) for a path of the
    repository.

    The folder is the one above the topmost package: `lib` for lib/shop/price.py where lib holds no
    __init__.py. Where there is no package at all, it is the root or src/, as for a namespace
    package or a single module."""
    # `top` becomes the number of folders above the topmost package.
    parts = list(PurePosixPath(path).parts)
    top = len(parts) - 1
    while top > 0 and "/".join([*parts[:top], "__init__.py"]) in paths:
        top -= 1

    # What lies in src/ is imported from there, a namespace package too; what is in no package
    # elsewhere, from the root.
    if top > 0 and parts[0] == "src":
        top = 1
    elif top == len(parts) - 1:
        top = 0

    # The folders below `top` and the file are the dotted name; a package is called by its folder.
    names = parts[top:]
    names[-1] = names[-1].removesuffix(".py")
    if names[-1] == "__init__" and len(names) > 1:
        names.pop()
    return "/".join(parts[:top]), ".".join(names)


def import_names(path, roots):
    """The dotted names under which a source can be imported where these folders are on the path:
    shop.price and src.shop.price for src/shop/price.py."""
    stem = path.removesuffix(".py").removesuffix("/__init__")
    return {stem.removeprefix(f"{root}/").replace("/", ".") for root in roots}


# ------------------------------------------------------------ scopes and definitions
def scope_nodes(scope):
    """Every node in the scope of a module or class: its statements, those in the arms of if, try
    and so on included, and what they bind. No order."""
    waiting = [scope]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            yield node
            # A definition has a scope of its own. Of expressions only a target binds anything.
            is_value = isinstance(node, ast.expr) and not isinstance(
                getattr(node, "ctx", None), ast.Store
            )
            if not is_value and not isinstance(node, DEFINITIONS):
                waiting.append(node)


def bound_names(scope):
    """How often each name is bound in a scope: by a definition, an import, an assignment, a for, a
    with."""
    found = Counter()
    for node in scope_nodes(scope):
        if isinstance(node, DEFINITIONS):
            found[node.name] += 1
        elif isinstance(node, ast.alias):
            found[node.asname or node.name.split(".")[0]] += 1
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] += 1
    return found


def named_definitions(scopes, kinds=DEFINITIONS):
    """name -> [nodes] of the definitions in these scopes, in the order of the file.

    Definitions of one name are one entry: a property with its setter and deleter, overloads, a
    redefinition, the arms of an `if` or `try`. Functions called `_` have only the name in common
    and are left out."""
    nodes = [node for scope in scopes for node in scope_nodes(scope) if isinstance(node, kinds)]
    found = {}
    for node in sorted(nodes, key=lambda node: node.lineno):
        found.setdefault(node.name, []).append(node)
    found.pop("_", None)
    return found


def find_definitions(stored):
    """[(qualified name, kind, nodes)] of a module's functions, classes and methods. A name that is
    a class in one arm and a function in another is left out."""
    found = []
    for name, nodes in named_definitions([parsed(stored)]).items():
        kinds = {isinstance(node, ast.ClassDef) for node in nodes}
        if kinds == {False}:
            found.append((name, "function", nodes))
        # Several classes of one name (the arms of an `if`) have their methods together.
        elif kinds == {True}:
            found.append((name, "class", nodes))
            for method, inner in named_definitions(nodes, FUNCTIONS).items():
                found.append((f"{name}.{method}", "method", inner))
    return found


def first_line(node):
    """The number (from 1) that the code object of this definition carries: that of its first
    decorator."""
    decorators = getattr(node, "decorator_list", ())
    return min([node.lineno] + [decorator.lineno for decorator in decorators])


def is_overload(node):
    """True for a signature of `typing.overload`, which has no body to delete."""
    names = [ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list]
    return "overload" in names


def called_name(node):
    """The last name of what is called, `approx` for pytest.approx(1); "" where it has no name."""
    function = node.func if isinstance(node, ast.Call) else node
    return getattr(function, "id", None) or getattr(function, "attr", "")


# ------------------------------------------------------------ bodies
def last_line(source, node):
    """The number (from 1) of a definition's last line. Comments below it that are indented deeper
    belong to it."""
    last = node.end_lineno
    for number in range(last + 1, len(source.lines) + 1):
        line = source.lines[number - 1]
        text = line.lstrip()
        if text.startswith("#") and len(line) - len(text) > node.col_offset:
            last = number
        elif text:
            break
    return last


def body_span(source, node, keep_docstring):
    """(start, end, indent) of a function's body: from the start of its first line to the end of its
    last line, without the line end. None where there is nothing to delete, or where body and `def`
    share a line.

    Comments above the first statement and below the last one belong to the body."""
    # The body has to begin its line, and to hold more than a docstring.
    first = node.body[0]
    start = source.span(first)[0]
    indent = source.text[source.line_start(start) : start]
    has_docstring = ast.get_docstring(node, clean=False) is not None
    if indent.strip() or (has_docstring and len(node.body) == 1):
        return None

    # The first line to delete: after the docstring, or at the first statement and the comments and
    # empty lines above it (the line of the `def` ends the search).
    if has_docstring and keep_docstring:
        if node.body[1].lineno == first.end_lineno:  # `"doc"; return 1`
            return None
        begin = first.end_lineno + 1
    else:
        begin = first_line(first)
        while re.match(r"\s*(#|$)", source.lines[begin - 2]):
            begin -= 1
    last = last_line(source, node)
    end = source.starts[last - 1] + len(source.lines[last - 1].rstrip("\r\n"))
    return source.starts[begin - 1], end, indent


def replace_bodies(stored, nodes, keep_docstring, body):
    """The file with these functions' bodies replaced. `{first}` in `body` stands for the
    function's first argument other than self, or for None where there is none."""
    source, edits = SourceText(stored), []
    for node in nodes:
        span = None if is_overload(node) else body_span(source, node, keep_docstring)
        if span:
            start, end, indent = span
            arguments = node.args.posonlyargs + node.args.args
            names = [argument.arg for argument in arguments if argument.arg != "self"]
            edits.append((start, end, indent + body.replace("{first}", (names or ["None"])[0])))
    return cut(source, edits)


def code_lines(stored, node):
    """The lines of code in a function's body, stripped: no docstring, no comment, no blank line."""
    # Statement by statement, since a comment between two statements is part of neither.
    source, found = SourceText(stored), []
    has_docstring = ast.get_docstring(node, clean=False) is not None
    for statement in node.body[1:] if has_docstring else node.body:
        start, end = source.span(statement)
        for line in map(str.strip, split_lines(source.text[start:end])):
            if line and not line.startswith("#"):
                found.append(line)
    return found


# ------------------------------------------------------------ cutting out statements
def cut(source, edits):
    """The file after these edits. Discard where Python cannot read it any more."""
    stored = source.apply(edits)
    if not is_python(stored):
        raise Discard("its code cannot be cut out of its file")
    return stored


def cut_statements(source, tree, unwanted):
    """Edits that take these statements (nodes) out of a file. A block that would be empty gets a
    `pass`."""
    # A node may come from another tree of the same text: its place says which statement it is.
    edits, places = [], {(node.lineno, node.col_offset) for node in unwanted}
    for parent in ast.walk(tree):
        for block in (getattr(parent, name, ()) for name in ("body", "orelse", "finalbody")):
            statements = block if isinstance(block, list) else []  # a lambda's body is no list
            gone = [node for node in statements if (node.lineno, node.col_offset) in places]
            for node in gone:
                # A module may be empty, any other block needs a statement.
                needs_pass = node is gone[0] and len(gone) == len(block) and parent is not tree
                edits.append(cut_statement(source, node, needs_pass))
    return edits


def cut_statement(source, node, needs_pass):
    """The edit that takes a statement away. One that shares its line with other code becomes
    `pass`, as where a `pass` is needed; any other goes with its line. A definition also takes along
    its trailing comments and empty lines."""
    start, end = source.span(node)
    begin, last = source.line_start(start), node.end_lineno
    before, after = source.text[begin:start], source.text[end : source.starts[last]].strip()
    if needs_pass or before.strip() or (after and not after.startswith("#")):
        return start, end, "pass"

    # A line with a form feed is empty to Python, and a page break to its authors.
    if isinstance(node, DEFINITIONS):
        last = last_line(source, node)
        while last < len(source.lines) and not source.lines[last].strip(" \t\r\n"):
            last += 1
    return begin, source.starts[last], ""


def remove_statements(stored, nodes):
    """The file without these statements."""
    source = SourceText(stored)
    return cut(source, cut_statements(source, parsed(stored), nodes))


# ------------------------------------------------------------ names in imports and in __all__
def is_export(node):
    """True for a statement that makes or changes `__all__`: =, +=, an annotation, a call of one of
    its methods."""
    if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)):
        return False
    return any(getattr(part, "id", "") == "__all__" for part in ast.walk(node))


def module_paths(paths, path, node):
    """The files among `paths` that `from ... import` (node) in the file `path` may mean."""
    # Relative: one dot is the file's own folder, each further dot the folder above.
    tail = (node.module or "").replace(".", "/")
    if node.level:
        folders = PurePosixPath(path).parents
        if node.level > len(folders):
            return set()
        wanted = folders[node.level - 1] / tail
        return {f"{wanted}.py", str(wanted / "__init__.py")} & paths

    # Absolute: the name starts in a folder on the path (the root, src/, lib/). Such a folder is no
    # package itself.
    found = set()
    for ending in (f"{tail}.py", f"{tail}/__init__.py"):
        for other in paths:
            root = other[: len(other) - len(ending)]
            if f"/{other}".endswith(f"/{ending}") and f"{root}__init__.py" not in paths:
                found.add(other)
    return found


def remove_names(files, paths, lost):
    """The files without the imports and exports of names that are no longer defined. A statement
    that loses some of its names is printed again, on one line.

    files: path -> stored text, already without the definitions; paths: the sources among them;
    lost: {(path, name), ...}. A module that imported a lost name has lost it, too, unless something
    else binds the name there; so re-exports are followed."""
    out, lost, paths = dict(files), set(lost), set(paths)
    # Where neither word stands, nothing is imported or exported; most files need not be parsed.
    trees = {}
    for path in paths:
        if "import" in files[path] or "__all__" in files[path]:
            trees[path] = parsed(files[path])

    # Follow the imports until no further module loses a name.
    unwanted, before = {}, -1  # path -> aliases to be taken out
    while before < len(lost):
        before = len(lost)
        for path, tree in trees.items():
            unwanted[path] = lost_aliases(path, tree, paths, lost)

    # Then write each file once.
    for path, tree in trees.items():
        names = {name for place, name in lost if place == path}
        if names or unwanted[path]:
            out[path] = without_names(files[path], tree, unwanted[path], names)
    return out


def lost_aliases(path, tree, paths, lost):
    """The aliases of one module's imports whose names are lost. The names that they were bound to
    in this module are added to `lost`."""
    found, local, bound = [], Counter(), bound_names(tree)
    lost_names = {name for _, name in lost} | {"*"}
    for node in scope_nodes(tree):
        # Most imports name nothing that is lost anywhere.
        if not isinstance(node, ast.ImportFrom):
            continue
        if not lost_names.intersection(alias.name for alias in node.names):
            continue

        # A star import brings all names that its module has lost; any other one brings its own.
        targets = module_paths(paths, path, node)
        lost_here = {name for target, name in lost if target in targets}
        for alias in node.names:
            if alias.name == "*":
                lost.update((path, name) for name in lost_here if not bound[name])
            elif alias.name in lost_here:
                found.append(alias)
                local[alias.asname or alias.name] += 1

    # A name that nothing else binds in this module is lost here, too.
    lost.update((path, name) for name, number in local.items() if bound[name] <= number)
    return found


def without_names(stored, tree, aliases, names):
    """One file without these aliases of its imports and these names in the lists and tuples of its
    `__all__`. Discard where `__all__` holds one in a form that is not edited."""
    source, edits, whole = SourceText(stored), [], []
    for node in scope_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            kept = [alias for alias in node.names if alias not in aliases]
            if not kept:
                whole.append(node)
            elif len(kept) < len(node.names):
                left = ast.ImportFrom(node.module, kept, node.level)
                edits.append((*source.span(node), ast.unparse(left)))
        for part in ast.walk(node) if is_export(node) else ():
            if isinstance(part, (ast.List, ast.Tuple)):
                kept = [one for one in part.elts if getattr(one, "value", None) not in names]
                if len(kept) < len(part.elts):
                    left = type(part)(kept, ast.Load())
                    edits.append((*source.span(part), ast.unparse(left)))
    stored = cut(source, edits + cut_statements(source, tree, whole))

    for statement in filter(is_export, scope_nodes(parsed(stored))):
        if set(re.findall(r"\w+", ast.unparse(statement))) & names:
            raise Discard("`__all__` names it in a form that cannot be edited")
    return stored


# ------------------------------------------------------------ tests
def function_of_test(node_id):
    """The node id of a test's function: of a parametrized case the part before its [...]."""
    return node_id.split("[")[0]


def file_of_test(node_id):
    """The path of the file that a test stands in."""
    return node_id.split("::")[0]


def find_test(stored, node_id):
    """The ast node of a test function by its node id. None where the test is inherited or
    generated, or where it is not certain which definition the name means. Of several definitions in
    one block Python keeps the last."""
    # Class by class, then the function.
    scope = parsed(stored)
    for name in function_of_test(node_id).split("::")[1:]:
        named = definitions_called(name, scope)
        # A further binding in an arm of an `if`, or by an assignment or an import, may be the one
        # that counts.
        if not named or bound_names(scope)[name] > len(named):
            return None
        scope = named[-1]
    return scope if isinstance(scope, FUNCTIONS) else None


def definitions_called(name, scope):
    """The definitions of this name that stand in a module's or class's own block."""
    return [node for node in scope.body if isinstance(node, DEFINITIONS) and node.name == name]


def remove_tests(stored, node_ids):
    """The file without these test functions. Earlier definitions of the same name go with them:
    without the last one Python would keep the one before it, which has never been run."""
    nodes = []
    for node_id in node_ids:
        # The scope of the test: the module, or the class that is last of its name.
        scope = parsed(stored)
        *classes, name = function_of_test(node_id).split("::")[1:]
        for outer in classes:
            scope = definitions_called(outer, scope)[-1]
        nodes += definitions_called(name, scope)
    return remove_statements(stored, nodes)


def is_text(path):
    """False for a name that is not UTF-8: no prompt and no log can spell it."""
    try:
        return bool(path.encode())
    except UnicodeEncodeError:
        return False
