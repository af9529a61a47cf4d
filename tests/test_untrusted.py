"""Python that others wrote: read, or answered with None, and never an exception."""

import ast
import copy
import dis
import random
import sys

import pytest

from world.untrusted import parse, read_literal

BAD = {
    "no Python": "def f(:\n",
    "a NUL": "x = 1\0\n",
    "half a character": "x = '\ud800'\n" + "y = (",
    "too many brackets": "[" * 300 + "]" * 300,
    "too many signs": "x = " + "-" * 100_000 + "1",
    "more terms than the parser takes": "x = " + "1+" * 100_000 + "1",
    "more digits than Python reads": "x = " + "9" * 5000,
    "a rollout of elif without end": "if x: pass\n" + "elif x: pass\n" * 2000,
    "indented too deep": "".join(" " * n + "if x:\n" for n in range(120)) + " " * 120 + "pass",
    "no text": None,
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_read_is_none(what):
    assert parse(BAD[what]) is None
    assert read_literal(BAD[what]) is None


DEEP = {
    "a long sum": " + ".join(f"'{n} '" for n in range(600)),
    "a long sum in a call": "f(" + " + ".join(["1"] * 800) + ")",
    "signs": "-" * 500 + "1",
    "attributes": "a" + ".b" * 700,
    "calls of calls": "f" + "(1)" * 700,
    "brackets": "[" * 150 + "1" + "]" * 150,
    "tuples": "(" * 150 + "1," + ")," * 149 + ")",
    "slices": "a" + "[1:2, ::3]" * 400,
    "stars": "f(*" * 90 + "x" + ")" * 90,
    "a number that cannot be printed": "0x" + "f" * 9000,
    "a no-break space in an f-string": "f\"{'\N{NO-BREAK SPACE}'.join(words)}\"",
    "a long sum in an f-string": 'f"{' + "+".join(["1"] * 900) + '}"',
    "a large number in an f-string": 'f"{0x' + "f" * 9000 + '}"',
    "comments in between": "(\n" + "\n".join(f"  {n} +  # {n}" for n in range(300)) + "\n  1)",
}


def frames_left(used, call):
    """call() with only this many frames of Python's stack used before it."""
    return frames_left(used - 1, call) if used else call()


@pytest.mark.parametrize("statement", ["x = {}\n", "assert {} == y\n", "def f():\n  return {}\n"])
@pytest.mark.parametrize("what", DEEP)
def test_a_tree_can_be_walked_dumped_and_printed_and_means_the_same(what, statement):
    text = statement.format(DEEP[what])
    tree = parse(text)

    # 200 frames are used before: less is left than in any run of ours.
    def use():
        ast.NodeTransformer().visit(parse(text))
        return ast.unparse(tree), ast.dump(tree)

    printed, dumped = frames_left(200, use)

    # What is printed compiles to the same instructions and values.
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        code, again = (compile(one, "x", "exec") for one in (text, printed))
        assert list(bytecode(code)) == list(bytecode(again))
    finally:
        sys.setrecursionlimit(limit)

    # Equal texts give equal trees, and another term gives another one.
    assert ast.dump(parse(text)) == dumped
    other = text.replace("1", "7", 1).replace("NO-BREAK", "").replace("'0 '", "'1 '")
    if other != text:
        assert ast.dump(parse(other)) != dumped


def bytecode(code):
    """Instructions and constants of a code object and of those in it. A NOP only marks a line."""
    pairs = zip(code.co_code[::2], code.co_code[1::2])
    constants = [one for one in code.co_consts if not hasattr(one, "co_code")]
    yield [pair for pair in pairs if pair[0] != dis.opmap["NOP"]], constants
    for one in code.co_consts:
        if hasattr(one, "co_code"):
            yield from bytecode(one)


def test_an_ordinary_file_has_the_tree_that_python_gives_it():
    for module in (ast, random, copy):
        with open(module.__file__, encoding="utf-8") as file:
            text = file.read()
        assert ast.dump(parse(text)) == ast.dump(ast.parse(text))


def test_a_hundred_arms_of_elif_are_read():
    text = "if x == 0:\n    pass\n" + "".join(f"elif x == {n}:\n    pass\n" for n in range(120))
    tree = parse(text)
    assert ast.dump(tree) == ast.dump(ast.parse(text))
    ast.NodeTransformer().visit(parse(text))
    ast.unparse(tree)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("[1, (2.5, 'a')]", [[1, (2.5, "a")]]),
        ("{1: None, b'x': {2}}", [{1: None, b"x": {2}}]),
        ("-1", [-1]),
        ("f'{1}'", None),
        ("[x]", None),
        ("{[]: 1}", None),
        ("{**x}", None),
        ("1 + 1", None),
        ("0x" + "f" * 9000, None),
        ("[" * 150 + "]" * 150, None),
        ("", None),
    ],
)
def test_a_literal_is_read_and_nothing_else(text, answer):
    assert read_literal(text) == answer
