"""Reads a repository's Python as Python itself reads it, and changes it without touching any other
byte.

A file of a repository is kept as "stored" text: its bytes decoded as UTF-8, with every byte that is
not UTF-8 as a surrogate. Stored text gives back the file's bytes exactly, but it is not always what
Python reads: a byte-order mark, a PEP 263 cookie (`# -*- coding: latin-1 -*-`) and the three kinds
of line ends are part of the language. `SourceText` decodes a file as Python does, finds places in
it by the line and column of a syntax tree, and encodes it again after the edits.

All edits here are cuts in the text. The syntax tree is never printed again, so comments and layout
of everything else survive. Every function takes and returns stored text."""

import ast
import bisect
import functools
import io
import re
import tokenize
from collections import Counter
from pathlib import PurePosixPath

from world.untrusted import parse

# What decoding a stranger's file may raise. An unknown codec is a SyntaxError or a LookupError.
DECODE_ERRORS = SyntaxError, ValueError, LookupError

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)


# ------------------------------------------------------------ reading
def decode_source(stored):
    """(text, encoding) as Python decodes this file (PEP 263). Raises one of DECODE_ERRORS where
    Python could not decode it.

    A file whose bytes do not come back by encoding is refused, too: an edit would change more than
    its own place."""
    data = stored.encode("utf-8", "surrogateescape")
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    text = data.decode(encoding)
    if text.encode(encoding) != data:
        raise ValueError(f"the encoding {encoding} does not give the same bytes back")
    return text, encoding


def encode_source(text, encoding, errors="strict"):
    """Stored text of a decoded file, the inverse of decode_source."""
    return text.encode(encoding, errors).decode("utf-8", "surrogateescape")


def read_tree(stored):
    """The new syntax tree of a file; None where Python 3 cannot read it."""
    try:
        return parse(decode_source(stored)[0])
    except DECODE_ERRORS:
        return None


def parse_stored(stored):
    """A new syntax tree, which the caller may change; empty where Python 3 cannot read the file."""
    return read_tree(stored) or ast.Module([], [])


@functools.lru_cache(1024)
def parsed(stored):
    """The same tree from a cache. All callers share it, so nobody may change it."""
    return parse_stored(stored)


def is_python(stored):
    """True if Python 3 can read this file."""
    return read_tree(stored) is not None


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
            # `@(` may stand on a line above the expression itself. Only brackets, space and
            # comments lie between; they are looked for in the 2000 characters before it.
            first = self.index(decorators[0].lineno, decorators[0].col_offset)
            before = self.text[max(0, first - 2000) : first]
            sign = re.search(r"@(?:[\s(\\]|#[^\r\n]*)*$", before)
            start = first - len(before) + sign.start()
        return start, self.index(node.end_lineno, node.end_col_offset)

    def line_number(self, place):
        """The number (from 1) of the line that holds this place."""
        return bisect.bisect_right(self.starts, place)

    def line_start(self, place):
        """The place where the line of this place begins."""
        return max(self.text.rfind("\n", 0, place), self.text.rfind("\r", 0, place)) + 1

    def line_end(self, place):
        """The place behind the line of this place, its line end included."""
        found = re.compile(r"\r\n|\r|\n").search(self.text, place)
        return found.end() if found else len(self.text)

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
        return encode_source(text, self.encoding, "backslashreplace")


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

    # In no package: the source is imported from the root, or from src/.
    if top == len(parts) - 1:
        top = 1 if len(parts) > 1 and parts[0] == "src" else 0

    # The folders below `top` and the file are the dotted name; a package is called by its folder.
    names = parts[top:]
    names[-1] = names[-1].removesuffix(".py")
    if names[-1] == "__init__" and len(names) > 1:
        names.pop()
    return "/".join(parts[:top]), ".".join(names)


def module_name(path):
    """The dotted name under which a source is imported: shop.price for src/shop/price.py and for
    src/shop/price/__init__.py."""
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# ------------------------------------------------------------ scopes and definitions
def scope_blocks(body):
    """Every list of statements in the same scope as `body`: `body` itself, and the arms of if, try,
    with, for, while, match in it."""
    yield body

    # A definition opens a scope of its own; any other statement may have several arms.
    for statement in body:
        if isinstance(statement, DEFINITIONS):
            continue
        for name in ("body", "orelse", "finalbody"):
            if isinstance(getattr(statement, name, None), list):
                yield from scope_blocks(getattr(statement, name))
        for arm in [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]:
            yield from scope_blocks(arm.body)


def scope_statements(body):
    """Every statement of a scope, those in the arms of if, try and so on included."""
    for block in scope_blocks(body):
        yield from block


def registered_with(node):
    """The name of the generic function that `@name.register` or `@name.register(type)` adds this
    definition to, or None."""
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        is_register = isinstance(target, ast.Attribute) and target.attr == "register"
        if is_register and isinstance(target.value, ast.Name):
            return target.value.id
    return None


def named_definitions(body, kinds=DEFINITIONS):
    """name -> [nodes] of the definitions of one scope, in the order of the file.

    Definitions of one name are one entry: a property with its setter and deleter, overloads, a
    redefinition, the arms of an `if` or `try`. A function called `_` that is registered with a
    singledispatch function belongs to that function's entry."""
    nodes = [node for node in scope_statements(body) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: node.lineno)
    names = {node.name for node in nodes}

    # Group them by name.
    found = {}
    for node in nodes:
        name = node.name
        if name == "_" and registered_with(node) in names:
            name = registered_with(node)
        found.setdefault(name, []).append(node)

    # Functions called `_` that belong to nothing here have only the name in common.
    found.pop("_", None)
    return found


def find_definitions(stored):
    """[(qualified name, kind, nodes)] of a module's functions, classes and methods. A name that is
    a class in one arm and a function in another is left out."""
    found = []
    for name, nodes in named_definitions(parsed(stored).body).items():
        # One name, one kind.
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        if classes and len(classes) < len(nodes):
            continue
        found.append((name, "class" if classes else "function", nodes))

        # Several classes of one name (the arms of an `if`) have their methods together.
        methods = {}
        for node in classes:
            for method, inner in named_definitions(node.body, FUNCTIONS).items():
                methods.setdefault(method, []).extend(inner)
        found += [(f"{name}.{method}", "method", inner) for method, inner in methods.items()]
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


def bound_names(body):
    """How often each name is bound by the statements of a scope."""
    found = Counter()
    for statement in scope_statements(body):
        if isinstance(statement, DEFINITIONS):
            found[statement.name] += 1
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            found.update(alias.asname or alias.name.split(".")[0] for alias in statement.names)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.For, ast.With)):
            # The targets: several of an Assign, one of an annotation or a for, those of with.
            targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
            targets += [item.optional_vars for item in getattr(statement, "items", ())]
            for target in filter(None, targets):
                for node in ast.walk(target):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        found[node.id] += 1
    return found


# ------------------------------------------------------------ bodies
def body_span(source, node, keep_docstring):
    """(start, end, indent) of a function's body: from the start of its first line to the end of its
    last line, without the line end. None where there is nothing to delete, or where body and `def`
    share a line.

    Comments above the first statement and below the last one belong to the body."""
    # The body has to begin its line, and to hold more than a docstring.
    first = node.body[0]
    line = source.lines[first.lineno - 1]
    indent = line[: len(line) - len(line.lstrip())]
    line_start = source.starts[first.lineno - 1]
    if source.index(first.lineno, first.col_offset) != line_start + len(indent):
        return None
    has_docstring = ast.get_docstring(node, clean=False) is not None
    if has_docstring and len(node.body) == 1:
        return None
    last = node.end_lineno

    # Comments after the last statement go with the body if they are indented deeper than the `def`.
    own_column = len(source.lines[node.lineno - 1]) - len(source.lines[node.lineno - 1].lstrip())
    for number in range(last + 1, len(source.lines) + 1):
        text = source.lines[number - 1].strip()
        column = len(source.lines[number - 1]) - len(source.lines[number - 1].lstrip())
        if text.startswith("#") and column > own_column:
            last = number
        elif text:
            break

    # The first line to delete: after the docstring, or at the first statement and the comments and
    # empty lines above it (the line of the `def` ends the search).
    if has_docstring and keep_docstring:
        if node.body[1].lineno == first.end_lineno:  # `"doc"; return 1`
            return None
        begin = first.end_lineno + 1
    else:
        begin = source.line_number(source.span(first)[0])
        above = source.lines[begin - 2].strip()
        while not above or above.startswith("#"):
            begin -= 1
            above = source.lines[begin - 2].strip()
    end = source.starts[last - 1] + len(source.lines[last - 1].rstrip("\r\n"))
    return source.starts[begin - 1], end, indent


def replace_bodies(stored, nodes, keep_docstring, body="raise NotImplementedError"):
    """The file with these functions' bodies replaced. `{first}` in `body` stands for the
    function's first argument other than self, or for None where there is none."""
    source, edits = SourceText(stored), []
    for node in nodes:
        span = None if is_overload(node) else body_span(source, node, keep_docstring)
        if span:
            start, end, indent = span
            arguments = node.args.posonlyargs + node.args.args
            names = [argument.arg for argument in arguments if argument.arg != "self"]
            edits.append((start, end, indent + body.format(first=(names or ["None"])[0])))
    return source.apply(edits) if edits else stored


def code_lines(stored, nodes):
    """The lines of code in these definitions' bodies, stripped: no docstring, no comment, no blank
    line."""
    try:
        source = SourceText(stored)
    except DECODE_ERRORS:
        return []

    # Statement by statement, since a comment between two statements is part of neither.
    found = []
    for node in nodes:
        statements = list(node.body)
        if ast.get_docstring(node, clean=False) is not None:
            statements = statements[1:]
        for statement in statements:
            start, end = source.span(statement)
            for line in map(str.strip, split_lines(source.text[start:end])):
                if line and not line.startswith("#"):
                    found.append(line)
    return found


# ------------------------------------------------------------ cutting out statements
def cut_statements(source, body, unwanted):
    """Edits that take these statements (nodes) out of a scope. A block that would be empty gets a
    `pass`."""
    # A node may come from another tree of the same text: its place says which statement it is.
    edits, places = [], {(node.lineno, node.col_offset) for node in unwanted}
    for block in scope_blocks(body):
        gone = [node for node in block if (node.lineno, node.col_offset) in places]
        # The arm of an `if` needs a statement; a module does not.
        stays_empty = len(gone) == len(block) and block is not body

        # A statement that shares its line with other code becomes `pass`, any other goes with its
        # line. A definition also takes along its trailing comments and empty lines.
        for node in gone:
            start, end = source.span(node)
            begin, line_end = source.line_start(start), source.line_end(end)
            before, after = source.text[begin:start], source.text[end:line_end].strip()
            alone = not before.strip() and (not after or after.startswith("#"))
            if not alone or stays_empty and node is gone[0]:
                edits.append((start, end, "pass"))
                continue
            if isinstance(node, DEFINITIONS):
                line_end = after_definition(source, node, line_end)
            edits.append((begin, line_end, ""))
    return edits


def after_definition(source, node, end):
    """The end of a definition with the comments of its own indentation and the blank lines that
    follow it."""
    # Comments indented deeper than the definition belong to its body, up to the next code.
    own_column = len(source.lines[node.lineno - 1]) - len(source.lines[node.lineno - 1].lstrip())
    last_comment = node.end_lineno
    for number in range(node.end_lineno + 1, len(source.lines) + 1):
        line = source.lines[number - 1]
        if line.strip().startswith("#") and len(line) - len(line.lstrip()) > own_column:
            last_comment = number
        elif line.strip():
            break

    # Empty lines, but not one with a form feed: it is empty to Python, and a page break to its
    # authors.
    while last_comment < len(source.lines) and not source.lines[last_comment].strip(" \t\r\n"):
        last_comment += 1
    return max(end, source.starts[last_comment])


def remove_statements(stored, nodes):
    """The file without these definitions of its module's scope."""
    source = SourceText(stored)
    return source.apply(cut_statements(source, parsed(stored).body, nodes))


# ------------------------------------------------------------ names in imports and in __all__
def is_bracketed(text, start):
    """True if the nearest bracket before this place, comments aside, is an opening one."""
    before = re.sub(r"#[^\r\n]*", "", text[:start])
    signs = re.findall(r"[(\[{)\]}]", before)
    return bool(signs) and signs[-1] in "([{"


def cut_elements(source, elements, unwanted):
    """Edits that take some, not all, of the elements of a comma-separated list out of it."""
    # kept_before: where the last kept element ends.
    edits, kept_before = [], None
    spans = [source.span(element) for element in elements]
    for number, (element, (start, end)) in enumerate(zip(elements, spans)):
        if element not in unwanted:
            kept_before = end
            continue

        # An element with a line of its own inside brackets goes with that line and its comment.
        begin, line_end = source.line_start(start), source.line_end(end)
        before, after = source.text[begin:start], source.text[end:line_end]
        own_line = not before.strip() and re.fullmatch(r"\s*,\s*(#[^\r\n]*)?\s*", after)
        if own_line and is_bracketed(source.text, start):
            edits.append((begin, line_end, ""))
        # Otherwise its comma goes with it: the one behind it, or, at the end of the list, the one
        # in front of it.
        elif number + 1 < len(elements) and elements[number + 1] not in unwanted:
            edits.append((start, spans[number + 1][0], ""))
        elif kept_before is not None and all(other in unwanted for other in elements[number:]):
            edits.append((kept_before, end, ""))
            kept_before = end
        else:
            edits.append((start, spans[number + 1][0], ""))
    return edits


def names_export(node, name):
    """True for an element of `__all__` that names this: `"name"` or `name.__name__`."""
    if isinstance(node, ast.Constant):
        return node.value == name
    is_name = isinstance(node, ast.Attribute) and node.attr == "__name__"
    return is_name and getattr(node.value, "id", "") == name


def changes_exports(statement):
    """True for a statement that makes or changes `__all__`: =, +=, an annotation, extend, append,
    insert."""
    # An assignment, also to __all__ as one of several targets.
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if any(getattr(node, "id", "") == "__all__" for node in ast.walk(target)):
                return True
        return False
    if isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        return getattr(statement.target, "id", "") == "__all__"

    # A call of any method of __all__ itself.
    call = statement.value if isinstance(statement, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and getattr(call.func.value, "id", "") == "__all__"
    )


def export_edits(source, statement, names):
    """(edits, whole): the edits that take these names out of a statement on `__all__`. whole is
    True if the statement has to go as a whole."""
    edits = []

    def listed(node):
        return any(names_export(node, name) for name in names)

    # __all__.append("name") adds one name only.
    if isinstance(statement, ast.Expr) and statement.value.func.attr in ("append", "insert"):
        return [], bool(statement.value.args) and listed(statement.value.args[-1])

    # Lists of names, wherever they stand in the statement.
    for node in ast.walk(statement):
        is_display = isinstance(node, (ast.List, ast.Tuple, ast.Set))
        gone = [element for element in node.elts if listed(element)] if is_display else []
        if gone:
            left = [element for element in node.elts if element not in gone]
            if left and (not isinstance(node, ast.Tuple) or len(left) > 1):
                edits += cut_elements(source, node.elts, gone)
                continue
            # Nothing is left, or a tuple of one, which needs its comma: the whole display is
            # written anew.
            start, end = source.span(node)
            if left:
                begin, stop = source.span(left[0])
                edits.append((start, end, f"({source.text[begin:stop]},)"))
            else:
                empty = {ast.List: "[]", ast.Tuple: "()", ast.Set: "set()"}
                edits.append((start, end, empty[type(node)]))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "split":
            # "one two three".split()
            start, end = source.span(node.func.value)
            text = source.text[start:end]
            for name in names:
                text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)[ \t]*", "", text)
            if text != source.text[start:end] and isinstance(node.func.value, ast.Constant):
                edits.append((start, end, text))
    return edits, False


def catches_import_error(statement):
    """True for a try that goes on when an import in it fails. A bare except catches everything."""
    for handler in getattr(statement, "handlers", ()):
        caught = {"Exception"}
        if handler.type:
            caught = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
        if caught & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}:
            return True
    return False


def module_paths(paths, path, node):
    """The files among `paths` that `from ... import` (node) in the file `path` may mean."""
    # Relative: one dot is the file's own folder, each further dot the folder above.
    tail = (node.module or "").split(".") if node.module else []
    if node.level:
        folder = list(PurePosixPath(path).parent.parts)
        folder = folder[: len(folder) - (node.level - 1)] if node.level > 1 else folder
        wanted = "/".join([*folder, *tail])
        return {f"{wanted}.py", f"{wanted}/__init__.py".lstrip("/")} & paths

    # Absolute: the name starts in a folder on the path (the root, src/, lib/). Such a folder is no
    # package itself.
    found = set()
    for ending in ("/".join(tail) + ".py", "/".join(tail) + "/__init__.py"):
        for other in paths:
            if other == ending or other.endswith("/" + ending):
                root = other[: len(other) - len(ending)]
                if f"{root}__init__.py" not in paths:
                    found.add(other)
    return found


def remove_names(files, paths, lost):
    """The files without the imports and exports of names that are no longer defined.

    files: path -> stored text, already without the definitions; paths: the sources among them;
    lost: {(path, name), ...}. A module that imported a lost name has lost it, too, unless something
    else binds the name there; so re-exports are followed. An import that stands alone in a `try`
    with a fallback stays: the fallback is there for a failing import."""
    out, lost, paths = dict(files), set(lost), set(paths)
    # Where neither word stands, nothing is imported or exported; most files need not be parsed.
    trees = {}
    for path in paths:
        if "import" in files[path] or "__all__" in files[path]:
            trees[path] = parsed(files[path])

    # Follow the imports until no further module loses a name.
    unwanted = {}  # path -> aliases to be taken out
    while True:
        before = len(lost)
        for path, tree in trees.items():
            follow_imports(path, tree, paths, lost, unwanted)
        if len(lost) == before:
            break

    # Then write each file once.
    for path, tree in trees.items():
        names = {name for place, name in lost if place == path}
        if names or unwanted.get(path):
            out[path] = without_names(files[path], tree, unwanted.get(path, []), names)
    return out


def follow_imports(path, tree, paths, lost, unwanted):
    """Notes which imported names of one module are lost: adds their aliases to `unwanted`, and the
    names they were bound to in this module to `lost`."""
    # Imports that stand alone in a `try` with a fallback stay.
    with_fallback = set()
    for statement in scope_statements(tree.body):
        stands_alone = isinstance(statement, ast.Try) and len(statement.body) == 1
        if stands_alone and catches_import_error(statement):
            with_fallback.add(id(statement.body[0]))

    # Which names are imported from a module that has lost them.
    gone_here = unwanted.setdefault(path, [])
    local_gone = Counter()
    imports = [node for node in scope_statements(tree.body) if isinstance(node, ast.ImportFrom)]
    lost_names = {name for _, name in lost}
    for node in imports:
        # Most imports name nothing that is lost anywhere, or no module of the repository.
        if not lost_names & {alias.name for alias in node.names} and node.names[0].name != "*":
            continue
        targets = module_paths(paths, path, node)
        if not targets:
            continue

        # A star import loses here what its module has lost, unless this module binds the name.
        if node.names[0].name == "*":
            for target, name in list(lost):
                if target in targets and not bound_names(tree.body)[name]:
                    lost.add((path, name))
            continue

        # Any other import loses the aliases of lost names. A fallback keeps the import only if all
        # of its names are lost.
        lost_here = {name for target, name in lost if target in targets}
        aliases = [alias for alias in node.names if alias.name in lost_here]
        stays = id(node) in with_fallback and len(aliases) == len(node.names)
        for alias in aliases:
            local_gone[alias.asname or alias.name] += 1
            if not stays and alias not in gone_here:
                gone_here.append(alias)

    # A name that nothing else binds in this module is lost here, too.
    bound = bound_names(tree.body)
    for name, number in local_gone.items():
        if bound[name] <= number:
            lost.add((path, name))


def without_names(stored, tree, aliases, names):
    """One file without these aliases of its imports and these names of its `__all__`."""
    # Aliases are taken out one by one; statements of which nothing is left go as a whole.
    source, edits, whole = SourceText(stored), [], []
    unwanted = {id(alias) for alias in aliases}
    for statement in scope_statements(tree.body):
        if isinstance(statement, ast.ImportFrom):
            gone = [alias for alias in statement.names if id(alias) in unwanted]
            if gone and len(gone) == len(statement.names):
                whole.append(statement)
            elif gone:
                edits += cut_elements(source, statement.names, gone)
        elif changes_exports(statement):
            more, all_of_it = export_edits(source, statement, names)
            edits += more
            if all_of_it:
                whole.append(statement)
    edits += cut_statements(source, tree.body, whole)
    return source.apply(edits) if edits else stored


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
    body, node = parsed(stored).body, None
    for name in node_id.split("[")[0].split("::")[1:]:
        named = [node for node in body if getattr(node, "name", None) == name]
        # A further binding in an arm of an `if`, or by an assignment or an import, may be the one
        # that counts.
        if not named or bound_names(body)[name] > len(named):
            return None
        node = named[-1]
        body = getattr(node, "body", [])
    return node if isinstance(node, FUNCTIONS) else None


def remove_tests(stored, node_ids):
    """The file without these test functions. Earlier definitions of the same name go with them:
    without the last one Python would keep the one before it, which has never been run."""
    source, edits = SourceText(stored), []
    for node_id in node_ids:
        # The scope of the test: the module, or the class that is last of its name.
        body = parsed(stored).body
        *classes, name = node_id.split("[")[0].split("::")[1:]
        for outer in classes:
            body = [node for node in body if getattr(node, "name", None) == outer][-1].body

        # Every definition of this name in it goes with its lines.
        for node in (node for node in body if getattr(node, "name", None) == name):
            start, end = source.span(node)
            begin = source.line_start(start)
            indent = source.text[begin:start]
            if indent.strip():
                raise ValueError(f"{node_id} shares its line with other code")

            # In a class a `pass` takes its place: the class may have no other statement.
            line_end = source.line_end(end)
            line_break = re.search(r"[\r\n]*$", source.text[begin:line_end]).group()
            edits.append((begin, line_end, f"{indent}pass{line_break}" if classes else ""))
    return source.apply(edits)


# What reading a hostile child's answer may raise. A number too large for a float is an
# ArithmeticError.
ANSWER_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    SyntaxError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)


def is_text(path):
    """False for a name that is not UTF-8: no prompt and no log can spell it."""
    try:
        return bool(path.encode())
    except UnicodeEncodeError:
        return False
