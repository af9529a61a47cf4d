"""Twins: changed copies of a test that must fail wherever the test itself passes.

A test that passes says little while the code under test runs in its process: the code may return an
object that equals everything, replace the helper that compares, or replace the names that check. A
twin is the same test with one thing changed that it asserts: another expected value, another
exception, the opposite operator. Code that does what the test asks for fails the twin; code that
only makes tests pass passes the twin as well, and is found out.

A change must make the twin fail *because* the test passes, whatever the implementation: what is
expected is changed, never what the feature is given. Where a value is expected, test and twins call
the same function `odd`, which returns its value unchanged or changed, according to a number. So all
copies look alike but for a number. Where changing a value would not do (`is`, `<`, `not`), the twin
has the opposite operator.

Left out: assertions in fixtures, in helpers of one argument, and in what a test calls by a name
that says nothing. Such a test has no twin, and a task is not judged by it alone.
"""

import ast
import builtins
import copy
import itertools
import re
from pathlib import Path

from world.source import SourceText, encode_source, find_test
from world.untrusted import parse

# The functions that the copies call, as text. The file's head is left out, and so are the numbers
# that stand there for the drawn ones.
HELPERS = Path(__file__).with_name("twin_helpers.py").read_text(encoding="utf-8")
HELPERS = "\n\n\n" + HELPERS[HELPERS.index("def GUARD") :]

# For each operator one that is false where it is true. == and `in` get other values instead.
OPPOSITE = {
    ast.NotEq: ast.Eq,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
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
RAISES = {
    "raises",
    "warns",
    "assertRaises",
    "assertRaisesRegex",
    "assertWarns",
    "assertWarnsRegex",
    "assert_raises",
}
APPROXIMATE = {"approx"}
# calls that only write a value down
WRITING = APPROXIMATE | {
    "tuple",
    "list",
    "set",
    "dict",
    "frozenset",
    "float",
    "int",
    "str",
    "bytes",
    "date",
    "datetime",
    "timedelta",
    "Decimal",
    "Fraction",
    "Path",
    "array",
}
# calls that compare their arguments and return whether they agree
COMPARING = re.compile(
    r"(^|_)(isclose|allclose|array_equal|array_equiv|startswith|endswith|equals?"
    r"|same)$"
    r"|^(fullmatch|match|search)$"
)
# those of them that look for one argument inside another
CONTAINING = {"startswith", "endswith", "fullmatch", "match", "search"}
# calls that assert by themselves: a package's own helpers, numpy.testing, mock
HELPER = re.compile(
    r"assert|check|verif|expect|same|equal|compare|should|ensure|validate|match" r"|close", re.I
)
ASSERTING_METHOD = re.compile(r"assert|expect|same|equal|should", re.I)
# what a test calls or raises to fail
FAILING = {"fail", "AssertionError"}


class Twins(ast.NodeTransformer):
    """One pass over a test that numbers every change, and makes the change of number `chosen`.

    odd: the name of the function in the copies that hands on expected values. Every expected value
    goes through it, changed or not. numbers(changed): draws the number that tells `odd` whether to
    change its value. lost: the names of the feature; the arguments of a call to one are never
    changed. `changes` lists what each change is: "value" or "operator"."""

    def __init__(self, odd, numbers, chosen=None, lost=()):
        self.odd, self.numbers, self.chosen, self.lost = odd, numbers, chosen, set(lost)
        self.changes = []

    # ------------------------------------------------------------------ the two kinds of change
    def through_odd(self, value, how=""):
        """The call odd(number, value[, how]).

        `how` is "far" for a value that must not occur inside another one, "all" for a container of
        which no element may stay, "kind" for a class of exceptions."""
        self.changes.append("value")
        number = self.numbers(len(self.changes) - 1 == self.chosen)
        words = [ast.Constant(number), value]
        if how:
            words.append(ast.Constant(how))
        return ast.Call(ast.Name(self.odd, ast.Load()), words, [])

    def is_opposite(self):
        """Counts a change of an operator. True if it is the one to make: then the caller replaces
        the operator by its opposite."""
        self.changes.append("operator")
        return len(self.changes) - 1 == self.chosen

    # ------------------------------------------------------------------ truths
    def falsify(self, node):
        """An expression that is true in a passing test, with its changes; each change alone makes
        it false."""
        # What the expression is made of.
        if isinstance(node, ast.Compare):
            return self.falsify_compare(node)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
            node.values = [self.falsify(value) for value in node.values]
            return node
        if isinstance(node, ast.BoolOp):
            return self.falsify_or(node)
        if is_not(node) and is_unequal(node.operand):
            self.change_sides(node.operand)  # `not a != b` asserts a == b
            return node

        # A call: all(... for ...), where each item is checked, or one that compares its arguments.
        if isinstance(node, ast.Call):
            name = called_name(node)
            given = node.args[0] if len(node.args) == 1 else None
            if name == "all" and isinstance(given, (ast.GeneratorExp, ast.ListComp)):
                node.args[0].elt = self.falsify(node.args[0].elt)
                return node
            method = isinstance(node.func, ast.Attribute)
            helper = len(node.args) > 1 and is_helper(node, name, method)
            if name not in self.lost and node.args and (COMPARING.search(name) or helper):
                node.args = self.changed_arguments(node.args, "far" if name in CONTAINING else "")
                return node

        # Of any other expression only its truth can be changed.
        return self.negated(node)

    def negated(self, node):
        """`not node`, or x for `not x`, if this is the change to make."""
        if not self.is_opposite():
            return node
        if is_not(node):
            return node.operand
        return ast.UnaryOp(ast.Not(), node)

    def falsify_or(self, node):
        """An `or` with one change that makes all its parts false: an equality gets another value,
        any other part `and False`."""
        # In every copy the equalities go through `odd`, so that the copies look alike.
        made = self.is_opposite()
        for place, part in enumerate(node.values):
            if compares_by(part, ast.Eq):
                words = [ast.Constant(self.numbers(made)), part.comparators[0]]
                part.comparators = [ast.Call(ast.Name(self.odd, ast.Load()), words, [])]
            elif made:
                node.values[place] = ast.BoolOp(ast.And(), [part, ast.Constant(False)])
        return node

    def falsify_compare(self, node):
        """A comparison with its changes: == and `in` get other values, every other operator becomes
        its opposite. Of a chain (a < b < c) each operator is a change of its own."""
        sides = [node.left, *node.comparators]
        for place, operator in enumerate(node.ops):
            left, right = sides[place], sides[place + 1]
            if isinstance(operator, (ast.Eq, ast.In)):
                contained = isinstance(operator, ast.In)
                # Of an equality the plainer side is the expected one; of two equally plain sides
                # each is a change. Of `in` both sides are.
                difference = plainness(left) - plainness(right)
                if contained or difference <= 0:
                    sides[place + 1] = self.expected(right, "all" if contained else "")
                if contained or difference >= 0:
                    sides[place] = self.expected(left, "far" if contained else "")
            elif self.is_opposite():
                node.ops[place] = OPPOSITE[type(operator)]()
        node.left, node.comparators = sides[0], sides[1:]
        return node

    def expected(self, node, how=""):
        """An expected value, sent through `odd`; of approx(value) it is the value inside."""
        if isinstance(node, ast.Call) and called_name(node) in APPROXIMATE and node.args:
            node.args[0] = self.through_odd(node.args[0], how)
            return node
        return self.through_odd(node, how)

    def changed_arguments(self, arguments, how=""):
        """Arguments of a comparing call. Those that call nothing are expected values, and each is a
        change of its own; if all of them call something, each is one."""
        plain = [argument for argument in arguments if not has_call(argument)] or arguments
        changed = []
        for argument in arguments:
            can_change = argument in plain and not isinstance(argument, ast.Starred)
            changed.append(self.expected(argument, how) if can_change else argument)
        return changed

    def change_sides(self, test):
        """Makes both sides of a comparison a change each."""
        test.left, test.comparators = self.expected(test.left), [self.expected(test.comparators[0])]

    # ------------------------------------------------------------------ statements
    def visit_Assert(self, node):
        node.test = self.falsify(node.test)
        return node

    def visit_If(self, node):
        """`if a != b: fail()` asserts a == b."""
        # What its first statement raises or calls.
        first = node.body[0]
        call = None
        if isinstance(first, ast.Raise):
            call = first.exc
        elif isinstance(first, ast.Expr):
            call = first.value

        # If that fails the test, the condition is one that must not hold. Any other `if` is
        # searched for assertions.
        fails = call is not None and called_name(call) in FAILING
        if fails and is_unequal(node.test):
            self.change_sides(node.test)
            return node
        if fails:
            node.test = self.negated(node.test)
            return node
        return self.generic_visit(node)

    def visit_With(self, node):
        for item in node.items:
            if isinstance(item.context_expr, ast.Call):
                item.context_expr = self.asserting_call(item.context_expr, in_with=True)
        node.body = [self.visit(statement) for statement in node.body]
        return node

    visit_AsyncWith = visit_With

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call):
            node.value = self.asserting_call(node.value)
        elif isinstance(node.value, ast.Await) and isinstance(node.value.value, ast.Call):
            node.value.value = self.asserting_call(node.value.value)
        return node

    def visit_Assign(self, node):
        """`error = pytest.raises(...)` asserts the same as `with pytest.raises(...)`."""
        if isinstance(node.value, ast.Call) and called_name(node.value) in RAISES:
            node.value = self.asserting_call(node.value)
        return node

    def asserting_call(self, node, in_with=False):
        """A call with its changes, if it is one that asserts: unittest's methods, raises and warns,
        helpers of any package."""
        # A call to the feature itself is given its arguments as they are.
        name, method = called_name(node), isinstance(node.func, ast.Attribute)
        if name in self.lost:
            return node

        # raises, warns: another exception, another pattern to match.
        if name in RAISES:
            if node.args and not isinstance(node.args[0], ast.Starred):
                node.args[0] = self.through_odd(node.args[0], "kind")
            for keyword in node.keywords:
                if keyword.arg == "match":
                    keyword.value = self.through_odd(keyword.value, "far")
                elif keyword.arg in ("expected_exception", "expected_warning"):
                    keyword.value = self.through_odd(keyword.value, "kind")
            if name.endswith("Regex") and len(node.args) > 1:
                node.args[1] = self.through_odd(node.args[1], "far")
            return node

        # unittest's methods: the opposite one, or other values.
        if method and name in OPPOSITE_METHOD:
            given = node.args[0] if node.args else None
            if name == "assertTrue" and isinstance(given, (ast.Compare, ast.BoolOp, ast.Call)):
                node.args[0] = self.falsify(given)
            elif name == "assertFalse" and is_unequal(given):
                self.change_sides(given)  # asserts that the two are equal
            elif self.is_opposite():
                node.func.attr = OPPOSITE_METHOD[name]
            return node

        # The remaining ones assert only where they stand alone, not as a context manager.
        if in_with:
            return node
        if method and name.startswith("assert") and len(node.args) > 1:
            if name == "assertIn":
                node.args[0] = self.expected(node.args[0], "far")
                node.args[1] = self.expected(node.args[1], "all")
            elif name == "assertRegex":
                node.args[1] = self.expected(node.args[1], "far")
            else:
                node.args[:2] = self.changed_arguments(node.args[:2])
            return node

        # Helpers of any package, known by their names or by having two arguments.
        if is_helper(node, name, method):
            node.args = self.changed_arguments(node.args)
            for keyword in node.keywords:
                if keyword.arg is not None and not has_call(keyword.value):
                    keyword.value = self.expected(keyword.value)
        return node


def called_name(node):
    """The last name of what is called, `approx` for pytest.approx(1); "" where it has no name."""
    function = node.func if isinstance(node, ast.Call) else node
    return getattr(function, "id", None) or getattr(function, "attr", "")


def compares_by(node, operator):
    """Whether a node is a comparison of two things by this operator."""
    is_single = isinstance(node, ast.Compare) and len(node.ops) == 1
    return is_single and isinstance(node.ops[0], operator)


def is_unequal(node):
    return compares_by(node, ast.NotEq)


def is_not(node):
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


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


def list_changes(test, lost=()):
    """What can be changed in a test function (its ast node), by number: "value" or "operator"."""
    pass_over = Twins("odd", lambda changed: 0, None, lost)
    for statement in copy.deepcopy(test.body):
        pass_over.visit(statement)
    return pass_over.changes


def changed_copy(test, odd, numbers, chosen=None, lost=()):
    """A copy of a test's ast with the change of number `chosen`. Without one, the copy asserts the
    same as the test."""
    made = copy.deepcopy(test)
    twins = Twins(odd, numbers, chosen, lost)
    made.body = [twins.visit(statement) for statement in made.body]
    return made


def draw_numbers(draw):
    """(modulus, rest, numbers): numbers(False) draws a number with this rest, numbers(True) one
    with any other rest."""
    # A number tells by its remainder whether it changes a value: only the parent knows which.
    modulus = draw.randrange(101, 999)
    rest = draw.randrange(modulus)

    def numbers(changed):
        while True:
            number = draw.getrandbits(40)
            if (number % modulus != rest) == changed:
                return number
            # move it to the right rest; with changed=True draw again instead
            if not changed:
                return number - number % modulus + rest

    return modulus, rest, numbers


class EqualityGuard(ast.NodeTransformer):
    """Sends both sides of every equality that a test compares through a check that they are not
    equal to everything."""

    def __init__(self, name):
        self.name = name  # of the function that checks (GUARD in world/twin_helpers.py)

    def guarded(self, value):
        return ast.Call(ast.Name(self.name, ast.Load()), [value], [])

    def visit_Compare(self, node):
        self.generic_visit(node)
        if isinstance(node.ops[0], ast.Eq) and len(node.ops) == 1:
            node.left = self.guarded(node.left)
            node.comparators = [self.guarded(node.comparators[0])]
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        name = getattr(node.func, "attr", "")
        is_equality = name.startswith("assert") and name.endswith("Equal") and "Not" not in name
        if is_equality and len(node.args) >= 2:
            node.args[:2] = [self.guarded(argument) for argument in node.args[:2]]
        return node


def with_twins(text, groups, draw, sites=None, lost=()):
    """Each test under a new name, beside twins that must fail: (text, {old name: [new name, twin,
    ...]}). Names are node ids of test functions.

    groups: the tests; draw: a random.Random; sites: {test: numbers of the changes of which its
    twins are made}; lost: the names of the feature. A test without sites has one twin, which fails
    at its end.

    Only the parent knows which copy is which. So code that makes every test pass gives itself away,
    and so does code that replaces what compares. Results that claim to equal everything, or
    everything of a kind, fail. What remains: code that reads the bytecode of the running test to
    tell the copies apart."""
    # Names and numbers, drawn anew for each file and run.
    read, names, plain = SourceText(text), {}, f"same_{draw.getrandbits(32):08x}"
    # Only Python reads the result, and to Python all line ends are the same.
    lines = [line.rstrip("\r\n") for line in read.lines] + [""]
    odd = f"same_{draw.getrandbits(32):08x}"
    modulus, rest, numbers = draw_numbers(draw)
    nodes = {group: find_test(text, group) for group in groups}

    # The last test first, so that the tests above it keep their line numbers.
    for group, node in sorted(nodes.items(), key=lambda item: -item[1].lineno):
        start, old = read.line_number(read.span(node)[0]) - 1, node.name

        # The first copy asserts the same as the test; each other one has a change. Without sites,
        # both copies get one more assertion at their end, which only the first one passes.
        chosen = (sites or {}).get(group)
        if chosen:
            made = [changed_copy(node, odd, numbers, site, lost) for site in [None, *chosen]]
        else:
            made = [copy.deepcopy(node) for _ in range(2)]
            one, two = draw.sample(range(10, 100), 2)
            for copied, number in zip(made, (one, two)):
                copied.body += parse(f"assert {one} == int('{number}')").body

        # All copies stand in the test's place, under new names, with their equalities guarded, and
        # in a drawn order.
        copies = []
        for copied in made:
            # not in the decorators: they run before the function `plain` is defined
            copied.body = [EqualityGuard(plain).visit(statement) for statement in copied.body]
            copied.name = f"{old}_{draw.getrandbits(32):08x}"
            source = ast.unparse(ast.fix_missing_locations(copied)).split("\n")
            indent = lines[node.lineno - 1][: node.col_offset]
            copies.append([indent + line for line in source] + [""])
        names[group] = [group.removesuffix(old) + copied.name for copied in made]
        draw.shuffle(copies)
        lines[start : node.end_lineno] = itertools.chain.from_iterable(copies)

    # The functions that the copies call, at the end of the file. In their text the words in
    # capitals are replaced by the names and numbers that were drawn.
    drawn = dict(GUARD=plain, ODD=odd, MODULUS=modulus, REST=rest, NUMBER=draw.getrandbits(48))
    drawn.update(UNRELATED=f"{odd}_kind", CANDIDATES=f"{odd}_values")
    helpers = re.sub(r"\b[A-Z]+\b", lambda word: str(drawn.get(word[0], word[0])), HELPERS)
    text = "\n".join(lines) + helpers
    return encode_source(text, read.encoding, "backslashreplace"), names


def lost_names(names):
    """The names by which a feature's parts are called: of Class.method both names, but no special
    method such as __init__, which Python itself calls."""
    parts = set()
    for name in names:
        parts.update(name.split("."))
    return sorted(part for part in parts if not part.startswith("__"))


def place_twins(files, sites, draw, lost):
    """(files with the copies of these tests in their places, {test function: [new name, twin,
    ...]}). sites: as in with_twins, of tests in any number of files."""
    tree, copies = dict(files), {}
    for path in sorted({group.split("::")[0] for group in sites}):
        own = {group: numbers for group, numbers in sites.items() if group.split("::")[0] == path}
        tree[path], names = with_twins(tree[path], sorted(own), draw, own, lost)
        copies.update(names)
    return tree, copies
