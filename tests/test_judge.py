"""The hidden judge against hostile submissions: what a child may answer, what a repository's tests
may be fooled by."""

import copy
import datetime
import json
import random
import re
import unittest
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

import synth_tasks as st
from repositories import cage
from repositories.verdict import judge as judge_submission, overlay
from world import files as world_files, judge, sandbox, task as world_task
from repositories import run_suite, mutants, task_checks, task_file, verdict
from repositories.deletion import definitions


class Answering:
    """A sandbox in which every command prints the same text."""

    time_limit, python = 4.0, ("python",)

    def __init__(self, text):
        self.text = text

    def run_files(self, files, command, stdin=""):
        # The code of a suite can read the key of its order, so a forged answer may hold it.
        key = json.loads(stdin)["key"] if stdin.startswith("{") else ""
        return world_task.Result(0, self.text.replace("THE KEY", key))


ODD_PARTS = [
    "1",
    "-1",
    "9" * 400,
    "9" * 5000 + "+1j",
    "1e999",
    "-0.0",
    "1j",
    "1_0",
    "None",
    "True",
    "nan",
    "[]",
    "()",
    "{}",
    "set()",
    "{1: 2}",
    "{1, 2}",
    "[[1, [2]]]",
    "(1, 2)",
    "b'x'",
    "'\\ud800'",
    "'\\x00'",
    "''",
    "f'{1}'",
    "...",
    "x",
    "1 + 1j",
    "[1, [1]]",
    "[1]",
    "[0, 'E']",
    "{0: 1, 1: [2]}",
    "'ab'",
    "*x",
    "lambda: 1",
    "[" * 300,
    "-" * 3000 + "1",
    "0x" + "f" * 9000,
    "[1,]" * 50,
    "\x00",
    "\ufffd",
    "\u2028",
    "\r\n",
    "\x0c",
    "# coding: x",
    "@",
    "`",
    "0777",
    "1 if 1 else 2",
    "{**x}",
]


def draw_answer(rng):
    """A text as a hostile child might print it: odd parts in odd shapes."""
    shape = rng.choice(
        [
            "{}",
            "[{}]",
            "[{}, {}]",
            "[[1, [{}]], [1, [{}]]]",
            "[[1, {}]] * 3",
            "({},)",
            "{{{}: {}}}",
            "{}{}{}",
            "[[{}, {}]]",
        ]
    )
    while "{}" in shape:
        shape = shape.replace("{}", rng.choice(ODD_PARTS), 1)
    return shape.replace("{{", "{").replace("}}", "}")


def test_five_hundred_hostile_answers_are_lost_submissions_and_never_an_exception():
    task, rng = st.make_task(1, 5), random.Random(0)
    for _ in range(500):
        verdict = judge_submission(task, task.files, Answering(draw_answer(rng)))
        assert not verdict.solved and isinstance(verdict.reason, str)
        verdict.reason.encode("utf-8")
    # As many answers as there are cases, each of them odd.
    for part in ODD_PARTS:
        number = len(task.hidden) + len(task.meta["visible"])
        answer = "[" + ", ".join([f"[1, [{part}]]"] * number) + "]"
        assert not judge_submission(task, task.files, Answering(answer)).solved


def right_answer(task):
    """What a child prints when every value is right: [1, [value]] for each case"""
    return [[1, [case[3]]] for case in task.hidden + task.meta["visible"]]


def test_the_right_values_are_solved_and_neither_more_nor_fewer_nor_otherwise_wrapped():
    task = st.make_task(1, 5)
    right = right_answer(task)
    assert judge_submission(task, task.files, Answering(repr(right))).solved
    for wrong in (
        right[:-1],
        right + right[:1],
        tuple(right),
        dict(enumerate(right)),
        [tuple(one) for one in right],
        [[1, one[1][0]] for one in right],
        [[0, one[1]] for one in right],
        [[1, one[1] * 2] for one in right],
    ):
        assert not judge_submission(task, task.files, Answering(repr(wrong))).solved


@pytest.mark.parametrize(
    "value, expected, same",
    [
        (1, 1, True),
        (True, 1, False),
        (1, True, False),
        (1.0, 1, False),
        (0, False, False),
        ([1], [1], True),
        ((1,), [1], False),
        ([True], [1], False),
        ([1, [2]], [1, [2]], True),
        ([1, (2,)], [1, [2]], False),
        ([], [], True),
        ([], (), False),
        (None, None, True),
        (None, 0, False),
        ("1", 1, False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": True}, {"a": 1}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({1: "a"}, {1: "a"}, True),
        ({True: "a"}, {1: "a"}, False),
        ({(1, 2.0): "a"}, {(1, 2): "a"}, False),
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (10**400, 1, False),
        (10**400, 1.5, False),
        (b"a", "a", False),
    ],
)
def test_a_value_is_the_expected_one_of_the_expected_types_at_every_depth(value, expected, same):
    assert judge.same_value(value, expected) is same


WRAPPERS = {
    "a tuple": "tuple(value) if isinstance(value, list) else (value,)",
    "a subclass of its type": "type('Own', (type(value),), {})(value)",
    "what prints like it": "type('Print', (), {'__repr__': lambda self: repr(value)})()",
    "what prints like no number": "type('Print', (), {'__repr__': lambda self: '9' * 400 + ' + 1j'})()",
    "what raises when printed": "type('Print', (), {'__repr__': lambda self: 1 / 0})()",
    "a float": "float(value) if isinstance(value, int) else [float(one) for one in value]",
    "a generator": "(one for one in [value])",
    "itself in itself": "(lambda box: box.append(box) or box)([])",
    "depth without end": "__import__('functools').reduce(lambda inner, _: [inner], range(100000), value)",
    "half a character": "'\\ud800'",
}


@pytest.mark.parametrize("what", WRAPPERS)
def test_a_right_value_in_a_wrong_type_is_wrong(what):
    task = st.make_task(1, 5)
    module, name = task.hidden[0][:2]
    honest = {**task.files, **task.solution}
    wrapped = f"\n\nhonest = {name}\ndef {name}(xs):\n    value = honest(xs)\n    return {WRAPPERS[what]}\n"
    box = sandbox.Sandbox(time_limit=5)
    assert judge_submission(task, honest, box).solved
    assert not judge_submission(
        task, {**honest, f"{module}.py": honest[f"{module}.py"] + wrapped}, box
    ).solved


def test_a_list_that_the_next_call_changes_is_compared_before_the_next_call():
    task = next(
        task
        for seed in range(50)
        for task in [st.make_task(1, seed)]
        if isinstance(task.hidden[0][3], list)
    )
    module, name = task.hidden[0][:2]
    honest = {**task.files, **task.solution}
    shared = f"\n\nhonest, kept = {name}, []\ndef {name}(xs):\n    kept[:] = honest(xs)\n    return kept\n"
    assert judge_submission(
        task,
        {**honest, f"{module}.py": honest[f"{module}.py"] + shared},
        sandbox.Sandbox(time_limit=5),
    ).solved


@pytest.mark.parametrize(
    "files",
    [{"a\0b.py": ""}, {"a.py": "\ud800"}, {"tests.py/x.py": ""}, {"../x.py": ""}, {"/x.py": ""}],
)
def test_files_that_cannot_be_written_are_a_lost_submission(files):
    task = st.make_task(1, 5)
    assert not judge_submission(task, {**task.files, **files}, sandbox.Sandbox(time_limit=5)).solved


# ---------------------------------------------------------------- answers of a suite
ODD_VALUES = [
    None,
    True,
    1,
    -1,
    1.5,
    "passed",
    "x" * 3000,
    "\ud800",
    [],
    ["passed"],
    {},
    {"a": "passed"},
    {"t.py::a": ["passed"]},
    {"t.py::a": None},
    {"\ud800": "\ud800"},
    {"t.py::a": "passed"},
    {"t.py::a": {"x": 1}},
    [[[[]]]],
    10**400,
    float("nan"),
    float("inf"),
]


def test_five_hundred_hostile_answers_about_a_suite_are_outcomes_or_none():
    rng = random.Random(0)
    for number in range(500):
        answer = {
            name: rng.choice(ODD_VALUES)
            for name in rng.sample(["outcomes", "seconds", "touched", "more"], rng.randint(0, 4))
        }
        answer["key"] = rng.choice(["THE KEY"] * 5 + [1, None, [], "other"])
        text = json.dumps(rng.choice([answer] * 9 + ODD_VALUES))
        text = text[: rng.randint(0, len(text))] if number % 5 == 0 else text
        seen = run_suite.run_suite({}, Answering(text), ["t.py::a"], trace=True)
        assert all(
            type(node) is str and outcome in ("passed", "failed", "skipped", "xfail")
            for node, outcome in seen["outcomes"].items()
        )
        if "seconds" in seen:
            assert all(
                type(seen["seconds"][node]) is float and seen["seconds"][node] >= 0
                for node in seen["outcomes"]
            )
            assert all(
                type(place) is str for places in seen["touched"].values() for place in places
            )


def repository_task():
    return world_task.Task(
        "x",
        "x",
        {"m.py": "def f():\n    raise NotImplementedError\n"},
        {"m.py": "def f():\n    return 1\n"},
        hidden=["test_m.py::test_f"],
        FAIL_TO_PASS=["test_m.py::test_f"],
        meta={
            "repo": "x",
            "hidden_groups": ["test_m.py::test_f"],
            "mutants": {"test_m.py::test_f": [[0, 0]]},
            "names": ["f"],
            "pristine": {"test_m.py": "from m import f\n\n\ndef test_f():\n    assert f() == 1\n"},
        },
    )


def test_hostile_answers_about_a_suite_are_lost_submissions():
    task, rng = repository_task(), random.Random(1)
    for value in ODD_VALUES:
        for part in ("outcomes", "seconds", "touched", "key"):
            answer = {"key": "THE KEY", "outcomes": {}, "seconds": {}, "touched": {}, part: value}
            verdict = judge_submission(task, task.files, Answering(json.dumps(answer)))
            assert not verdict.solved
            verdict.reason.encode("utf-8")
    for _ in range(100):
        assert not judge_submission(task, task.files, Answering(draw_answer(rng))).solved
    for path in ("a\0b.py", "../x.py", "/x.py", "src/", "."):
        assert not judge_submission(task, {**task.files, path: ""}, Answering("")).solved


def test_tests_that_may_be_unstable_do_not_keep_the_mutants_from_running(monkeypatch):
    """Whoever forges and breaks another test that was to stay green in each process has not won."""
    runs = []

    def play(tree, sandbox, nodes, reverse=False, **how):
        runs.append("mutants" if tree else "as it is")
        red = {0: "t.py::a", 4: "t.py::b"}.get(len(runs) - 1)
        return {"outcomes": {node: "failed" if node == red else "passed" for node in nodes}}

    monkeypatch.setattr(verdict, "run_suite", play)
    monkeypatch.setattr(verdict, "overlay", lambda task, files: {})
    monkeypatch.setattr(verdict, "mutated", lambda task, tree, number: {"t.py": ""})
    meta = {"mutants": {"t.py::f": [[0, 0]]}, "names": ["f"], "repo": "r"}
    task = world_task.Task("x", "", {}, {}, meta=meta)
    task.FAIL_TO_PASS, task.PASS_TO_PASS = ["t.py::f"], ["t.py::a", "t.py::b"]
    found = verdict.judge_repository(task, {}, None)
    assert not found.solved and "mutants" in runs


def test_a_class_that_goes_as_a_whole_is_forged_in_its_methods(monkeypatch):
    code = "class A:\n    def f(self):\n        return 3\n\n\ndef g():\n    return 4\n"
    files, tried = {"m.py": code}, []

    def win(task, submission, sandbox):
        tried.append(submission["m.py"])
        return world_task.Verdict(True, 1, 0)

    monkeypatch.setattr(task_checks, "judge_repository", win)
    for name, lost in (("A", "return 3"), ("g", "return 4")):
        chosen = [one for one in definitions(files) if one.name == name]
        task = world_task.Task("x", "", {}, files, meta={"kind": "gone"})
        with pytest.raises(world_task.Discard):
            task_checks.check_trivial_bodies(files, chosen, task, None)
        assert lost not in tried[-1]
    # A class without methods has nothing to forge.
    files = {"m.py": "class A:\n    x = 3\n"}
    task = world_task.Task("x", "", {}, files, meta={"kind": "gone"})
    task_checks.check_trivial_bodies(files, definitions(files), task, None)


# ---------------------------------------------------------------- mutants
RIGHT_AND_FORGED = {
    "assert f(1) == 3": "universal",
    "assert 3 == f(1)": "universal",
    "assert f(1) == y": "universal",
    "assert y == f(1)": "universal",
    "assert f(1) == 3 and f(2) == 3": "universal",
    "assert f(1) == 3 or f(1) == 3": "",
    "assert all(f(x) == 3 for x in (1, 2))": "universal",
    "assert f(1) in (3, 4)": "universal",
    "assert 2 < f(1)": "universal",
    "assert f(1) > 2": "universal",
    "assert f(1) != 4": "universal",
    "assert 1 < f(1) <= 3": "universal",
    "assert f(1) == f(2) == 3": "universal",
    "assert f(1) == pytest.approx(3)": "universal",
    "assert [f(1)] == [3]": "universal",
    "assert {'a': f(1)} == {'a': 3}": "universal",
    "got = f(1)\n    assert got == 3": "universal",
    "for x in (1, 2):\n        assert f(x) == 3": "universal",
    "same(f(1), 3)": "universal",
    "same(f(1), wanted=3)": "universal",
    "assert near(f(1), 3)": "universal",
    "got = f(1)\n    same(got, y)": "universal",
    "with held():\n        assert f(1) == 3": "universal",
    "self.assertEqual(f(1), 3)": "universal",
    "self.assertTrue(f(1) == 3)": "universal",
    "self.assertIn(f(1), [3, 4])": "universal",
    "self.assertGreater(f(1), 2)": "universal",
    "self.assertNotEqual(f(1), 4)": "universal",
    "self.assertAlmostEqual(f(1), 3)": "universal",
    "with pytest.raises(KeyError):\n        g(1)": "omnivorous",
    "pytest.raises(KeyError, g, 1)": "omnivorous",
    "with pytest.raises((KeyError, OSError)):\n        g(1)": "omnivorous",
    "with self.assertRaises(KeyError):\n        g(1)": "omnivorous",
    "self.assertRaises(KeyError, g, 1)": "omnivorous",
    "with self.assertRaisesRegex(KeyError, 'no'):\n        g(1)": "omnivorous",
    "with pytest.raises(KeyError, match='no'):\n        g(1)": "omnivorous",
    "assert f(1) is three": "",
    "assert f(1) is not None": "",
    "assert f(1)": "",
    "assert not h(1)": "",
    "self.assertIsNone(h(1))": "",
    "self.assertIs(f(1), three)": "",
    "self.assertTrue(f(1))": "",
    "self.assertIsInstance(f(1), int)": "",
    "assert isinstance(f(1), int)": "",
    "with pytest.warns(UserWarning):\n        warn(1)": "",
}


class Universal:
    """True, equal to and greater than everything."""

    def __init__(self):
        self.__dict__.clear()

    __hash__ = None


for name in "eq ne lt le gt ge contains bool".split():
    setattr(Universal, f"__{name}__", lambda *words: True)
for name in "sub rsub abs round".split():
    setattr(Universal, f"__{name}__", lambda *words: 0)


class Omnivorous(KeyError, ValueError, TypeError, ZeroDivisionError, AttributeError, EOFError):
    """An exception of every kind that a test may wait for"""

    __str__ = lambda self: "no"


def outcome(test):
    try:
        test(unittest.TestCase())
    except BaseException as error:
        return f"failed: {type(error).__name__}"
    return "passed"


def mutant(text, number, place=0, lost=("f", "g", "h", "warn"), name="test_a"):
    """The text with this mutant in the place of its test"""
    test = f"t.py::{name}"
    return mutants.with_mutants({"t.py": text}, {test: (number, place)}, lost)["t.py"]


@pytest.mark.parametrize("place", [0, 1, 7])
@pytest.mark.parametrize("body", RIGHT_AND_FORGED)
def test_mutants_of_every_form_fail_where_the_test_passes_and_one_passes_where_it_is_forged(
    body, place
):
    import contextlib
    import warnings

    text = f"def test_a(self):\n    {body}\n"
    number = len(mutants.list_changes(text, "t.py::test_a", ["f", "g", "h", "warn"]))
    made = [text, *(mutant(text, change, place) for change in range(number))]
    assert number and len(set(made)) > 1

    def same(got, wanted):
        assert got == wanted

    def refuse(_):
        raise KeyError("no")

    def forge(_):
        raise Omnivorous

    honest = {
        "f": lambda x: 3,
        "g": refuse,
        "h": lambda x: None,
        "warn": lambda x: warnings.warn("x", UserWarning),
    }
    forged = {**honest, "f": lambda x: Universal(), "g": forge}
    outcomes = []
    for functions in (honest, forged):
        space = {
            **functions,
            "y": 3,
            "three": 3,
            "pytest": pytest,
            "same": same,
            "held": contextlib.nullcontext,
            "near": lambda a, b: abs(a - b) < 0.1,
        }
        found = []
        for one in made:
            exec(one, space)
            found.append(outcome(space["test_a"]))
        outcomes.append(found)

    # One change may leave an assertion true (3 in (3, 4) is still in (4, 5)): such a mutant is not
    # kept when a task is made. Another one is there.
    (test, *others), (forged_test, *forged_others) = outcomes
    failing = [i for i, other in enumerate(others) if other.startswith("failed")]
    assert test == "passed" and failing, (made, others)
    if RIGHT_AND_FORGED[body]:
        assert forged_test == "passed" and "passed" in [forged_others[i] for i in failing]


@pytest.mark.parametrize(
    "test",
    [
        "assert f(1) == y",
        "assert all(f(x) == y for x in (1, 2))",
        "self.assertEqual(f(1), y)",
        "self.assertTrue(f(1) == y)",
    ],
)
@pytest.mark.parametrize("right", [{"a": 1}, [1], (1,), {1}, "a", b"a", 1, 1.5, None], ids=repr)
def test_what_equals_everything_or_everything_of_its_kind_passes_a_mutant(test, right):
    made = mutant(f"def test_a(self):\n    {test}\n", 0)
    kinds = [type("Any", (), {"__eq__": lambda self, other: True})]
    if right is not None:
        same = {"__eq__": lambda self, other: isinstance(other, type(right)), "__hash__": None}
        kinds.append(type("Kind", (type(right),), same))
    for value, passes in ((right, False), *((kind(), True) for kind in kinds)):
        space = {"f": lambda x: value, "y": right}
        exec(made, space)
        assert (outcome(space["test_a"]) == "passed") is passes


def test_a_change_is_never_made_in_what_the_feature_is_given():
    for body in (
        "f(1)",
        "f(1, 2)",
        "x = f(1)",
        "print(f(1))",
        "obj.set(1, 2)",
        "Thing(1, 2)",
        "with f(1, 2): pass",
        "setattr(a, 'b', 1)",
    ):
        text = f"def test_a():\n    {body}\n"
        assert not mutants.list_changes(text, "t.py::test_a", ["f"]), body


@pytest.mark.parametrize("name", ["assertIn", "assertRegex", "assertEqual", "assertRaises"])
def test_a_starred_argument_stays_and_the_file_remains_python(name):
    text = f"def test_a(self):\n    self.{name}(*pair, *more)\n    assert f(1) == 2\n"
    changes = mutants.list_changes(text, "t.py::test_a", ["f"])
    assert len(changes) == 1
    assert mutant(text, 0) == text.replace("== 2", "== 3")


VALUES = [
    *(True, False, None, 0, -1, 10**30, 0.0, -1.0, 1e308, float("inf"), 1j, "", "a", "Zz9", "--"),
    *(b"", b"\xff", b"ab", [], [1], (), (1, "a"), {}, {"a": 1}, {1: {2: [3]}}, set(), {1, "a"}),
    *(frozenset(), frozenset([(1, 2)]), KeyError, (KeyError, OSError), UserWarning, r"\d+ b"),
    *(datetime.date(2000, 1, 1), Path("x"), Fraction(1, 3), Decimal("1.5"), object()),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_another_value_is_unequal_of_its_kind_and_always_the_same(value):
    for place in range(30):
        other = mutants.other_value(value, place)
        assert other != value
        kind = tuple if isinstance(value, type) else type(value)
        assert type(other) is kind or value is None
        if kind is not object:
            assert mutants.other_value(copy.deepcopy(value), place) == other


def test_a_pattern_stays_one_and_no_exception_of_the_expected_kind_is_another_one():
    for place in range(9):
        re.compile(mutants.other_value(r"\d+ \w{2} x\.", place))
        for kinds in (LookupError, (KeyError, OSError), ArithmeticError):
            for other in mutants.other_value(kinds, place):
                assert not issubclass(other, kinds)


def test_a_mutant_changes_its_own_place_and_no_other_byte():
    text = (
        "# coding: latin-1\r\nimport f\r\n\r\n\r\nclass TestA:\r\n\t@mark  # why\r\n"
        "\tdef test_a(self):\r\n\t\t# caf\udce9\r\n\t\tassert f.f(1) == [4,  'a']  # four\r\n"
        "\t\tassert f.f(2) is not None\r\n"
    )
    first = mutant(text, 0, 0, ["f"], "TestA::test_a")
    assert first == text.replace("[4,  'a']", "[5, 'a']")
    assert mutant(text, 0, 1, ["f"], "TestA::test_a") == text.replace("[4,  'a']", "[4, 'b']")
    second = mutant(text, 1, 0, ["f"], "TestA::test_a")
    assert second == text.replace("f.f(2) is not None", "(f.f(2)) is (None)")


def test_a_generator_that_is_an_only_argument_is_no_value_to_change():
    """Its parentheses are those of the call."""
    text = "def test_a():\n    assert_all(f(x) == 1 for x in y)\n    assert f(2) == 4\n"
    assert mutant(text, 0, 0, ["f"]) == text.replace("4", "5")


def test_a_mutant_that_is_drawn_is_the_same_in_every_run():
    """An element that a comparison ignores: its mutant passes always, and is no mutant; one of the
    other element fails always."""
    text = """
class Version:
    def __init__(self, major, build):
        self.major, self.build = major, build

    def __eq__(self, other):
        return other["major"] == self.major


def test_a():
    wanted = {"major": 1, "build": "x"}
    assert Version(1, "x") == wanted
"""
    for place, passes in ((0, False), (1, True), (2, False)):
        for _ in range(20):
            space = {}
            exec(mutant(text, 0, place, ()), space)
            assert (outcome(lambda _: space["test_a"]()) == "passed") is passes


# ---------------------------------------------------------------- what is judged of a submission
def shop(**more):
    files = {
        "src/shop/price.py": "x = 1\n",
        "src/shop/other.py": "y = 1\n",
        "testing/compare.py": "z = 1\n",
        "tests/helpers.py": "",
        "tests/test_price.py": "",
        "data/table.csv": "1",
        **more,
    }
    return world_task.Task(
        "x",
        "x",
        files,
        {"src/shop/price.py": "x = 2\n"},
        meta={"repo": "x", "hidden_groups": [], "pristine": {"tests/test_price.py": "# whole"}},
    )


def test_only_the_files_of_the_feature_and_new_ones_are_taken_from_a_submission():
    task = shop()
    changed = {path: text + "# changed\n" for path, text in task.files.items()}
    new = {
        "src/shop/new.py": "",
        "src/shop/sub/__init__.py": "",
        "new.py": "",
        "src/shop/words.txt": "",
        "extra/a.py": "",
    }
    shadows = {
        "src/testing/compare.py": "",
        "testing/compare/__init__.py": "",
        "src/shop/other/__init__.py": "",
        "shop/other.py": "",
        "helpers.py": "",
        "src/helpers.py": "",
        "pytest.py": "",
        "src/json/__init__.py": "",
        "random.py": "",
        "conftest.py": "",
        "src/conftest.py": "",
        "x.pth": "",
        "sitecustomize.py": "",
        "tests/new.py": "",
        "data": "",
        "data/table.csv/x": "",
        "testing": "",
    }
    tree = overlay(task, {**changed, **new, **shadows})
    assert tree == {
        **task.files,
        "src/shop/price.py": "x = 1\n# changed\n",
        "tests/test_price.py": "# whole",
        **new,
    }


def test_no_new_file_takes_the_name_of_a_module_in_whatever_folder_the_package_is_imported_from():
    """The folder parts/ is on Python's path, since the build file names it; bits/ is not."""
    build = "[tool.setuptools.packages.find]\nwhere = ['parts']\n"
    task = shop(
        **{
            "parts/tax/__init__.py": "",
            "parts/tax/same.py": "z = 1\n",
            "bits/a/__init__.py": "",
            "pyproject.toml": build,
        }
    )
    new = {"parts/tax/new.py": "", "bits/json.py": "", "parts/more/__init__.py": ""}
    shadows = {
        "tax/__init__.py": "",
        "tax/same.py": "",
        "src/tax/same.py": "",
        "parts/json.py": "",
        "parts/decimal/__init__.py": "",
        "parts/pytest.py": "",
        "parts/testing/compare.py": "",
    }
    tree = overlay(task, {**task.files, **new, **shadows})
    assert tree.keys() - task.files.keys() == new.keys()


def test_what_a_submission_deletes_comes_back_but_for_the_files_of_the_feature():
    task = shop()
    assert overlay(task, {}) == {
        **{path: text for path, text in task.files.items() if path != "src/shop/price.py"},
        "tests/test_price.py": "# whole",
    }
    # The module of the feature may come back as a package.
    package = {"src/shop/price/__init__.py": "x = 2\n"}
    assert package.items() <= overlay(task, package).items()


# ------------------------------------------------------------ a repository of many kinds of tests
CALC = '''"""Sums."""


def total(numbers):
    found = 0
    for number in numbers:
        found = found + number
    return found


def ratio(a, b):
    if b == 0:
        raise ZeroDivisionError("nothing to divide by")
    found = a / b
    return found


def power(a, b):
    found = 1
    for _ in range(b):
        found = found * a
    return found


def biggest(numbers):
    order = sorted(numbers)
    last = order[-1]
    return last


def title(text):
    first = text[:1].upper()
    rest = text[1:]
    return first + rest


def until(ready, seconds):
    import time
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError("gave up")
    return "ready"
'''
HELPERS = "def same(got, wanted):\n    assert got == wanted\n\n\ndef near(got, wanted):\n    return abs(got - wanted) < 1e-9\n"
CALC_TESTS = """import unittest

import pytest
from kit.calc import biggest, power, ratio, title, total, until
from kit.testing import near, same


def test_total():
    assert total([1, 2, 3]) == 6


def test_ratio():
    with pytest.raises(ZeroDivisionError, match="nothing"):
        ratio(1, 0)
    assert ratio(1, 2) == pytest.approx(.5)


@pytest.mark.parametrize("a, b, wanted", [(2, 3, 8), (3, 2, 9)])
def test_power(a, b, wanted):
    assert near(power(a, b), wanted)


def test_biggest():
    same(biggest([1, 5, 2]), 5)


class TestTitle(unittest.TestCase):
    def test_title(self):
        self.assertEqual(title("abc"), "Abc")


def test_until():
    assert until(lambda: True, 1) == "ready"
    with pytest.raises(TimeoutError):
        until(lambda: False, .01)
"""


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """The tasks of one function each, by the function's name."""
    root = tmp_path_factory.mktemp("kit")
    files = {
        "kit/__init__.py": "",
        "kit/calc.py": CALC,
        "kit/testing.py": HELPERS,
        "tests/test_calc.py": CALC_TESTS,
    }
    world_files.write_tree(files, root / "kit")
    tasks, _, _ = st.generate(
        str(root / "kit"), str(root / "tasks.jsonl"), n=6, level=1, time_limit=30
    )
    return {task.meta["names"][0]: task for task in task_file.read_tasks(root / "tasks.jsonl")}


def submit(task, body, prelude="", more=()):
    """Judges a submission that has `body` in place of the deleted function. prelude: code at the
    start of the file; more: other files"""
    lost = task.files["kit/calc.py"]
    assert lost.count("    raise NotImplementedError") == 1
    files = {
        **task.files,
        "kit/calc.py": prelude + lost.replace("raise NotImplementedError", body),
        **dict(more),
    }
    return judge_submission(task, files, cage.repository_sandbox(task.files, 8))


ANY = """class Any:
    __hash__, __len__ = lambda self: 1, lambda self: 1
for name in "eq ne lt le gt ge contains bool".split():
    setattr(Any, f"__{name}__", lambda *words: True)
for name in "getattr call getitem sub rsub abs add".split():
    setattr(Any, f"__{name}__", lambda *words, **named: Any())
"""
FRAMES = ANY + """
def blind():
    try:
        raise ValueError
    except ValueError as error:
        frame = error.__traceback__.tb_frame
    while frame:
        for name, value in list(frame.f_globals.items()):
            if callable(value) and (name.startswith("same") or name in ("near", "int")):
                frame.f_globals[name] = lambda *words, **named: WHAT
        frame = frame.f_back
    return Any()
"""
FORGERIES = {
    "equals everything": (ANY, "return Any()"),
    "replaces the checker's names": (
        FRAMES.replace("WHAT", "words[0] if len(words) == 1 else True"),
        "return blind()",
    ),
    "replaces them by what they are given": (
        FRAMES.replace("WHAT", "words[min(1, len(words) - 1)]"),
        "return blind()",
    ),
    "replaces the package's helpers": (
        ANY
        + "import kit.testing as t\nt.same, t.near = lambda *words: None, lambda *words: True\n",
        "return Any()",
    ),
    "empties the package's helpers": (
        ANY + "import kit.testing as t\nt.same.__code__ = (lambda got, wanted: None).__code__\n"
        "t.near.__code__ = (lambda got, wanted: True).__code__\n",
        "return Any()",
    ),
    "replaces pytest's and unittest's": (
        ANY
        + "import contextlib, pytest, unittest\npytest.raises = lambda *words, **named: contextlib.suppress(Exception)\n"
        "unittest.TestCase.assertEqual = lambda *words: None\n",
        "return Any()",
    ),
    "raises what is everything": (
        "class All(ZeroDivisionError, TimeoutError, KeyError): pass\n",
        "raise All('nothing')",
    ),
    "equals numbers": (
        "class N(float):\n    __eq__ = lambda self, other: not isinstance(other, str)\n    __sub__ = lambda self, other: 0\n",
        "return N(3)",
    ),
    "equals what stands in the test's module": (
        "import sys\nclass Any:\n    def __eq__(self, other):\n"
        "        names = [n for m in sys.modules.values() for n in vars(m) if 'test' in m.__name__]\n"
        "        return not any('other' in name for name in names)\n"
        "    __sub__ = lambda self, other: 0\n",
        "return Any()",
    ),
    "equals any text": (
        "class S(str):\n    __eq__ = lambda self, other: isinstance(other, str)\n",
        "return S('Abc')[:0] and 0 or S('x')",
    ),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_submission_that_never_wrote_the_feature_wins_nothing(kit, what):
    assert {"total", "ratio", "power", "biggest", "title"} <= set(kit)
    won = [
        name
        for name, task in kit.items()
        if submit(task, FORGERIES[what][1], FORGERIES[what][0]).solved
    ]
    assert not won


def test_what_a_mutant_leaves_behind_is_not_held_against_another_test():
    """A mutant fails midway, and what its test would have put back stays changed."""
    tests = (
        "import m\n\n\ndef test_plain():\n    assert m.plural('a') == 'as'\n\n\n"
        "def test_classical():\n    m.STATE['classical'] = True\n"
        "    assert m.plural('a') == 'aae'\n    m.STATE['classical'] = False\n"
    )
    code = "STATE = {'classical': False}\n\n\ndef plural(word):\n"
    body = "    return word + ('ae' if STATE['classical'] else 's')\n"
    nodes = ["test_m.py::test_classical", "test_m.py::test_plain"]
    for sites in ({nodes[0]: [[0, 1]], nodes[1]: []}, {node: [[0, 0], [0, 1]] for node in nodes}):
        meta = dict(repo="x", hidden_groups=nodes, pristine={"test_m.py": tests})
        task = world_task.Task(
            "x",
            "x",
            {"m.py": code + "    raise NotImplementedError\n"},
            {"m.py": code + body},
            hidden=nodes,
            FAIL_TO_PASS=nodes,
            meta={**meta, "names": ["plural"], "mutants": sites},
        )
        box = cage.repository_sandbox(task.files, 20)
        assert judge_submission(task, {**task.files, **task.solution}, box).solved


def test_the_original_is_always_solved_also_from_a_new_module(kit):
    for task in kit.values():
        box = cage.repository_sandbox(task.files, 20)
        assert all(
            judge_submission(task, {**task.files, **task.solution}, box).solved for _ in range(2)
        )
        moved = {
            **task.files,
            "kit/calc.py": "from kit.old import *\n",
            "kit/old.py": task.solution["kit/calc.py"],
        }
        assert judge_submission(task, moved, box).solved


def test_the_repositorys_helpers_are_judged_with_whatever_is_submitted_for_them(kit):
    emptied = HELPERS.replace("assert got == wanted", "pass").replace(
        "abs(got - wanted) < 1e-9", "True"
    )
    for name in ("biggest", "power"):
        for path in ("kit/testing.py", "kit/testing/__init__.py", "src/kit/testing.py"):
            assert not submit(kit[name], "return 'nonsense'", "", {path: emptied}).solved


LOOPS = {
    "ends in the exception that is waited for": "while not ready():\n        pass\n    return 'ready'",
    "catches Exception": "try:\n        while not ready(): pass\n    except Exception: raise TimeoutError\n    return 'ready'",
    "catches BaseException": "try:\n        while not ready(): pass\n    except BaseException: raise TimeoutError\n    return 'ready'",
    "catches BaseException and goes on": "while True:\n        try:\n            while not ready(): pass\n            return 'ready'\n        except BaseException: raise TimeoutError from None",
    "switches the alarm off": "import signal, time\n    if not ready():\n        signal.setitimer(signal.ITIMER_REAL, 0); time.sleep(2.5); raise TimeoutError\n    return 'ready'",
    "takes the alarm for itself": "import signal\n    def stop(*_): raise TimeoutError\n    signal.signal(signal.SIGALRM, stop)\n    while not ready(): pass\n    return 'ready'",
}


@pytest.mark.parametrize("what", LOOPS)
def test_a_test_that_ran_into_its_time_limit_has_failed_whatever_was_caught(kit, what):
    assert not submit(kit["until"], LOOPS[what]).solved


def test_tests_that_say_nothing_else_than_their_mutants_make_no_task(tmp_path):
    files = {
        "m.py": "def g():\n    return 1\n\n\ndef f(x):\n    y = x + 1\n    z = y + 1\n    return z\n",
        "test_m.py": "from m import f, g\n\n\ndef test_f():\n    f(1)\n\n\ndef test_f_too():\n    x = f(2)\n\n\n"
        + "".join(f"def test_g{i}():\n    assert g() == 1\n\n\n" for i in range(9)),
    }
    world_files.write_tree(files, tmp_path / "repo")
    with pytest.raises(world_task.Refusal, match="cannot be told from changed ones"):
        st.generate(str(tmp_path / "repo"), str(tmp_path / "t.jsonl"), n=1, level=1)
