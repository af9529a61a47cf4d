"""Mutants: changed copies of a test that must fail wherever the test itself passes.

A test that passes says little while the code under test runs in its process: the code may return an
object that equals everything, replace the helper that compares, or replace the names that check. A
mutant is the same test with one thing changed that it asserts: another expected value, another
exception, the opposite operator. Code that does what the test asks for fails the mutant; code that
only makes tests pass passes the mutant as well, and is found out.

A mutant stands in the place of its test, under the test's own name, in a run of its own. Every
other byte of the file stays. So neither leaves a trace in the other's process, and nothing that the
code meets there says which of the two it is in. A literal becomes another literal; any other
expected value goes through `other_value`, whose text then stands inside the test.

A mutant is (number, place), drawn once when its task is made: the number of the change
(`list_changes`), and which part of the value is another one. A change must make the mutant fail
*because* the test passes, whatever the implementation: what is expected is changed, never what the
feature is given.

Left out: assertions in fixtures, in helpers of one argument, in `if a != b: fail()`, and in what a
test calls by a name that says nothing. Such a test has no mutant, and a task is not judged by it
alone.
"""

import ast
import builtins
import inspect
import re

from repositories.source import SourceText, called_name, file_of_test, find_test
from world.untrusted import read_literal

# For each operator one that is false where it is true. == and `in` get other values instead.
OPPOSITE = {
    ast.NotEq: "==",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
}
# unittest's methods that have an opposite; the others compare two values or expect an exception
OPPOSITE_METHOD = {
    "assertTrue": "assertFalse",
    "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone",
    "assertIsInstance": "assertNotIsInstance",
    "assertLess": "assertGreaterEqual",
    "assertGreater": "assertLessEqual",
    "assertLogs": "assertNoLogs",
}
OPPOSITE_METHOD |= {back: name for name, back in OPPOSITE_METHOD.items()}
OPPOSITE_METHOD |= {
    "assertNotEqual": "assertEqual",
    "assertNotIn": "assertIn",
    "assertNotRegex": "assertRegex",
    "assertNotAlmostEqual": "assertAlmostEqual",
}
# calls that expect an exception or a warning
RAISES = set("raises warns assertRaises assertRaisesRegex assertWarns assertWarnsRegex".split())
RAISES.add("assert_raises")
# calls that only write a value down
WRITING = set(
    "approx tuple list set dict frozenset float int str bytes date datetime timedelta Decimal "
    "Fraction Path array".split()
)
# calls that compare their arguments and return whether they agree
COMPARING = re.compile(
    r"(^|_)(isclose|allclose|array_equal|array_equiv|startswith|endswith|equals?|same)$"
    r"|^(fullmatch|match|search)$"
)
# calls that assert by themselves: a package's own helpers, numpy.testing, mock
HELPER = re.compile(
    r"assert|check|verif|expect|same|equal|compare|should|ensure|validate|match|close", re.I
)
ASSERTING_METHOD = re.compile(r"assert|expect|same|equal|should", re.I)


def other_value(value, place):
    # Where an exception or a warning is expected: all other kinds, since an exception may be of
    # several kinds at once.
    kinds = value if type(value) is tuple else (value,)
    if kinds and all(isinstance(one, type) and issubclass(one, BaseException) for one in kinds):
        others = [ZeroDivisionError, KeyError, IndexError, OSError, TypeError, ValueError]
        others += [EOFError, AttributeError, BufferError, GeneratorExit]
        if issubclass(kinds[0], Warning):
            others = [UnicodeWarning, BytesWarning, ImportWarning, ResourceWarning]
        for one in kinds:
            others = [
                kind for kind in others if not (issubclass(kind, one) or issubclass(one, kind))
            ]
        return tuple(others) or value

    # A value that holds no other ones: a neighbour, which looks like what tests usually hold.
    if value is None:
        return 0
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1 + place
    if isinstance(value, (float, complex)):
        return value + 1 + abs(value) if abs(value) < 1e300 else 1.0
    if isinstance(value, bytes):
        return other_value(value.decode("latin-1"), place).encode("latin-1", "replace")
    if isinstance(value, str):
        # One letter or digit becomes the next one. Behind a backslash it is part of a pattern.
        places = [i for i, one in enumerate(value) if one.isalnum() and value[i - 1 : i] != "\\"]
        if not places:
            return value + "a"
        i = places[place % len(places)]
        following = chr(ord(value[i]) + 1)
        return value[:i] + (following if following.isalnum() else "a") + value[i + 1 :]

    # A container: one of its members is another one.
    if type(value) in (list, tuple, set, frozenset):
        members = sorted(value, key=repr) if type(value) in (set, frozenset) else list(value)
        if not members:
            return type(value)([0])
        i, inner = place % len(members), place // len(members)
        return type(value)(members[:i] + [other_value(members[i], inner)] + members[i + 1 :])
    if type(value) is dict:
        key = list(value)[place % len(value)] if value else "a"
        return {**value, key: other_value(value.get(key), place // max(1, len(value)))}

    # Anything else may be like a number, a path or a date.
    for change in (
        lambda: value + 1,
        lambda: value / "a",
        lambda: value.replace(year=value.year + 1),
    ):
        try:
            return change()
        except Exception:
            pass
    return object()


# its lines, for the tests that need it
OTHER_VALUE = inspect.getsource(other_value).rstrip().split("\n")


class Changes(ast.NodeVisitor):
    """Finds every change of one test. `found` lists them: (kind, edits of the file), of kind
    "value" or "operator".

    source: the file; test: the ast node of the test function in it; lost: the names of the feature
    (the arguments of a call to one are never changed); place: which part of a value is changed."""

    def __init__(self, source, test, lost=(), place=0):
        self.source, self.lost, self.place, self.found = source, set(lost), place, []
        # Where the test's own statements begin, and how far they are indented. A test that stands
        # in one line has no changes.
        first = source.span(test.body[0])[0]
        self.begin = source.line_start(first)
        self.indent = source.text[self.begin : first]
        if not self.indent.strip():
            for statement in test.body:
                self.visit(statement)

    # ------------------------------------------------------------------ the two kinds of change
    def text(self, node):
        return self.source.text[slice(*self.source.span(node))]

    def value_edits(self, node, each=False):
        """The edits that put another value in the place of an expected one. each: every member of
        the value becomes another one; so nothing is in it that was."""
        # Of approx(value), the value is the one inside.
        if called_name(node) == "approx" and isinstance(node, ast.Call) and node.args:
            node = node.args[0]
        text, span = self.text(node), self.source.span(node)

        # A literal becomes another literal, if that one can be written.
        literal = read_literal(f"({text})")
        if literal and not each:
            other = other_value(literal[0], self.place)
            if read_literal(repr(other)) == [other]:
                return [(*span, repr(other))]

        # Otherwise the value is changed when the test runs, by a function at the test's beginning.
        function = "".join(self.indent + line + "\n" for line in OTHER_VALUE)
        changed = f"other_value(({text}), {self.place})"
        if each:
            changed = f"[other_value(one, {self.place}) for one in ({text})]"
        return [(self.begin, self.begin, function), (*span, changed)]

    def change_value(self, node, each=False):
        # A starred argument stands for several values, and is none that could be changed. Nor is a
        # generator, whose parentheses may be those of a call.
        if not isinstance(node, (ast.Starred, ast.GeneratorExp)):
            self.found.append(("value", self.value_edits(node, each)))

    def replace(self, *edit):
        self.found.append(("operator", [edit]))

    # ------------------------------------------------------------------ truths
    def falsify(self, node):
        """Finds the changes of an expression that is true in a passing test; each one alone makes
        it false."""
        if isinstance(node, ast.Compare):
            self.falsify_compare(node)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            for value in node.values:
                self.falsify(value)
        elif not self.falsify_call(node):
            # Of any other expression only its truth can be changed.
            self.replace(*self.source.span(node), f"(not ({self.text(node)}))")

    def falsify_call(self, node):
        """The same for a call: all(... for ...), where each item is checked, or a call that
        compares its arguments. False for anything else."""
        name = called_name(node)
        if not isinstance(node, ast.Call) or name in self.lost or not node.args:
            return False
        given = node.args[0]
        if name == "all" and isinstance(given, (ast.GeneratorExp, ast.ListComp)):
            self.falsify(given.elt)
            return True
        helper = len(node.args) > 1 and is_helper(node, name, isinstance(node.func, ast.Attribute))
        if COMPARING.search(name) or helper:
            self.change_arguments(node.args)
            return True
        return False

    def falsify_compare(self, node):
        """A comparison: == and `in` get other values, every other operator becomes its opposite. Of
        a chain (a < b < c) each operator is a change of its own."""
        sides = [node.left, *node.comparators]
        for place, operator in enumerate(node.ops):
            left, right = sides[place], sides[place + 1]
            if isinstance(operator, (ast.Eq, ast.In)):
                contained = isinstance(operator, ast.In)
                # Of an equality the plainer side is the expected one; of two equally plain sides
                # each is a change. Of `in` both sides are.
                difference = plainness(left) - plainness(right)
                if contained or difference <= 0:
                    self.change_value(right, each=contained)
                if contained or difference >= 0:
                    self.change_value(left)
                continue

            # Of a chain only these two sides are left.
            opposite = f"({self.text(left)}) {OPPOSITE[type(operator)]} ({self.text(right)})"
            self.replace(*self.source.span(node), opposite)

    def change_arguments(self, arguments):
        """Arguments of a comparing call. Those that call nothing are expected values, and each is a
        change of its own; if all of them call something, each is one."""
        plain = [argument for argument in arguments if not has_call(argument)] or arguments
        for argument in plain:
            self.change_value(argument)

    # ------------------------------------------------------------------ statements
    def visit_Assert(self, node):
        self.falsify(node.test)

    def visit_With(self, node):
        for item in node.items:
            if isinstance(item.context_expr, ast.Call):
                self.visit_asserting(item.context_expr, in_with=True)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncWith = visit_With

    def visit_Expr(self, node):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call):
            self.visit_asserting(call)

    def visit_asserting(self, node, in_with=False):
        """A call, if it is one that asserts: unittest's methods, raises and warns, helpers of any
        package."""
        # A call to the feature itself is given its arguments as they are.
        name, method = called_name(node), isinstance(node.func, ast.Attribute)
        if name in self.lost:
            return

        # raises, warns: another exception, another pattern to match.
        if name in RAISES:
            given = node.args[: 2 if name.endswith("Regex") else 1]
            words = ("match", "expected_exception", "expected_warning")
            given += [keyword.value for keyword in node.keywords if keyword.arg in words]
            for argument in given:
                self.change_value(argument)
            return

        # unittest's methods: other values, or the opposite method.
        if method and name in OPPOSITE_METHOD:
            given = node.args[0] if node.args else None
            if name == "assertTrue" and isinstance(given, (ast.Compare, ast.BoolOp)):
                self.falsify(given)
            elif name != "assertTrue" or not self.falsify_call(given):
                end = self.source.span(node.func)[1]
                self.replace(end - len(name), end, OPPOSITE_METHOD[name])
            return

        # The remaining ones assert only where they stand alone, not as a context manager.
        if in_with:
            return
        if method and name.startswith("assert") and len(node.args) > 1:
            if name == "assertIn":
                self.change_value(node.args[0])
                self.change_value(node.args[1], each=True)
            elif name == "assertRegex":
                self.change_value(node.args[1])
            else:
                self.change_arguments(node.args[:2])

        # Helpers of any package, known by their names or by having two arguments.
        elif is_helper(node, name, method):
            self.change_arguments(node.args)
            for keyword in node.keywords:
                if keyword.arg is not None and not has_call(keyword.value):
                    self.change_value(keyword.value)


def is_helper(node, name, method):
    """Whether a call that stands alone asserts, judged by its name or, for a plain function, by its
    having two arguments. method: whether it is called as an attribute."""
    # Of methods only telling names count; a wider choice of names on the test class itself.
    if method:
        owner = getattr(node.func.value, "id", "")
        own = owner in ("self", "cls") and HELPER.search(name)
        return bool(ASSERTING_METHOD.search(name) or own)
    is_function = not name[:1].isupper() and not hasattr(builtins, name)
    return bool(HELPER.search(name)) or len(node.args) > 1 and is_function


def has_call(node):
    """Whether an expression calls anything but WRITING: approx and constructors of plain values."""
    calls = (ast.Call, ast.Await, ast.Yield)
    parts = (part for part in ast.walk(node) if isinstance(part, calls))
    return any(called_name(part) not in WRITING for part in parts)


def plainness(node):
    """How much an expression looks like an expected value: 2 for literals, 1 if it has names, 0 if
    it calls something."""
    if has_call(node):
        return 0
    has_name = any(isinstance(part, (ast.Name, ast.Attribute)) for part in ast.walk(node))
    return 1 if has_name else 2


def list_changes(text, test, lost=()):
    """What can be changed in a test (its node id) of a file: "value" or "operator" for each change,
    by its number."""
    found = Changes(SourceText(text), find_test(text, test), lost).found
    return [kind for kind, _ in found]


def with_mutants(files, mutants, lost=()):
    """The files with mutants in the place of their tests. mutants: {node id of a test function:
    (number of the change, place in the value)}; lost: the names of the feature."""
    out = dict(files)
    for path in {file_of_test(test) for test in mutants}:
        source, edits = SourceText(files[path]), []
        for test, (number, place) in mutants.items():
            if file_of_test(test) == path:
                node = find_test(files[path], test)
                edits += Changes(source, node, lost, place).found[number][1]
        out[path] = source.apply(edits)
    return out


def lost_names(names):
    """The names by which a feature's parts are called: of Class.method both names, but no special
    method such as __init__, which Python itself calls."""
    parts = set()
    for name in names:
        parts.update(name.split("."))
    return sorted(part for part in parts if not part.startswith("__"))
