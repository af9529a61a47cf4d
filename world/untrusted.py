"""Reads Python that others wrote: a repository's files, a policy's answer, a child's output.

`parse` answers with a syntax tree or with None, whatever it is given; `read_literal` with a value
or None. Whoever reads a stranger's Python reads it here.

A tree from here can be walked by recursion, compared by ast.dump, and printed by ast.unparse.
Python's own parser answers with trees that cannot: a sum of 400 terms is 400 levels deep, a number
written in base 16 may have more digits than Python prints, and Python 3.11 cannot print every
f-string. Such an expression is folded: one Name stands in its place, and the text of the expression
is its name. So two of them are equal where their texts are, and printing gives the text back. A
Name whose id is no identifier may hold anything.

Standard library only.
"""

import ast
import functools
import io
import threading
import tokenize

# How deep an expression may be, and how deep statements may stand in one another (each elif is one
# level more). Recursion takes up to four frames a level, and Python stops at a thousand.
DEEPEST_EXPRESSION, DEEPEST_STATEMENT = 100, 150
MOST_BITS = 14_000  # of a number: Python prints no more than 4300 digits

# The threads of Python 3.11 share one counter of the recursion depth. A garbage collection in the
# middle of one parse lets another thread change it.
ONE_AT_A_TIME = threading.Lock()

# What Python may raise over a text, and over what the text says.
ERRORS = SyntaxError, ValueError, TypeError, LookupError, RecursionError, MemoryError


# What decoding a stranger's file may raise. An unknown codec is a SyntaxError or a LookupError.
DECODE_ERRORS = SyntaxError, ValueError, LookupError
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)


def parse(text, mode="exec"):
    """A new syntax tree of a text, which the caller may change; None where Python 3 cannot read the
    text, or where its statements are too deep. It never raises."""
    try:
        with ONE_AT_A_TIME:
            tree = ast.parse(text, mode=mode)
        return fold(tree, text)
    except ERRORS:
        return None


def explain_unreadable(text):
    """(line, why) of a text that `parse` cannot read. It never raises."""
    try:
        with ONE_AT_A_TIME:
            ast.parse(text)
    except SyntaxError as error:
        return error.lineno or 1, f"{type(error).__name__}: {error.msg}"
    except ERRORS as error:
        return 1, f"{type(error).__name__}"
    return 1, "too deep"


def read_literal(text):
    """[value] of a text that is one literal; None for any other text. It never raises."""
    tree = parse(text, "eval")
    try:
        return None if tree is None else [ast.literal_eval(tree)]
    except ERRORS:
        return None


def fold(tree, text):
    """The tree with every expression folded that recursion or printing cannot take; None where
    statements are too deep."""
    # Each node with the numbers of statements and of expressions above it. A list takes the place
    # of recursion: the tree may be deeper than Python's stack.
    waiting = [(tree, 0, 0)]
    while waiting:
        node, statements, levels = waiting.pop()
        for name, value in ast.iter_fields(node):
            for place, part in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(part, ast.AST):
                    continue
                if isinstance(part, ast.stmt):
                    waiting.append((part, statements + 1, 0))
                    if statements == DEEPEST_STATEMENT:
                        return None
                    continue

                # An f-string is kept or folded as a whole, since Python 3.11 knows no right places
                # inside it.
                if can_stay(part, levels):
                    if not isinstance(part, ast.JoinedStr):
                        waiting.append((part, statements, levels + 1))
                    continue

                # Fold it. All places in the tree stay what they were.
                folded = ast.Name(f"({ast.get_source_segment(text, part)})", ast.Load())
                ast.copy_location(folded, part)
                if isinstance(value, list):
                    value[place] = folded
                else:
                    setattr(node, name, folded)
    return tree


def can_stay(node, levels):
    """Whether a node that stands so many levels deep in its statement need not be folded."""
    # Of an expression only. In brackets of their own, these would mean something else.
    if not isinstance(node, ast.expr) or isinstance(node, (ast.Starred, ast.Slice, ast.Tuple)):
        return True
    if levels >= DEEPEST_EXPRESSION:
        return False
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value.bit_length() <= MOST_BITS
    if isinstance(node, ast.JoinedStr):
        try:
            return bool(ast.unparse(node))
        except ERRORS:
            return False
    return True


# ---------------------------------------------------------------- files
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


@functools.lru_cache(1024)
def read_tree(stored):
    """The syntax tree of a file; None where Python 3 cannot read it. All callers share it, so
    nobody may change it."""
    try:
        return parse(decode_source(stored)[0])
    except DECODE_ERRORS:
        return None


def is_python(stored):
    """True if Python 3 can read this file."""
    return read_tree(stored) is not None


def parsed(stored):
    """The shared tree of a file; an empty one where Python 3 cannot read it."""
    return read_tree(stored) or ast.Module([], [])


def parse_stored(stored):
    """The same tree anew, which the caller may change."""
    return read_tree.__wrapped__(stored) or ast.Module([], [])
