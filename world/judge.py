"""judge.py: does a submission solve its generated task? (Those of repositories are judged by
repositories/verdict.py, which is the door for both.)

The judge never believes a process in which the agent's code has run.

Generated tasks: the child (inside/driver.py) is given calls and returns values, and the parent
compares them, types included, with what it alone knows. Printing, exiting early, or rewriting tests
can only lose.

`run_trusted` says in this process what the sandbox would say, 20 times faster. It is for code that
was written here and for nothing else.
"""

import builtins
import functools
import os
import re
import sys
import types

from world.files import printable
from world.machine import MachineFailure
from world.memo import DRIVER
from world.task import Result, Verdict
from world.untrusted import read_literal


@functools.lru_cache(4096)
def compiled(text, path):
    """The code object of a file. The same few files are run over and over, hence the cache."""
    # optimize=0: also under python -O a test is made of its asserts
    return compile(text, path, "exec", dont_inherit=True, optimize=0)


def run_trusted(files, command="python tests.py"):
    """What the sandbox would answer, in-process and 20 times faster. ONLY for code written here:
    nothing is contained."""
    if command != "python tests.py":
        raise ValueError(f"only the tests run in-process, not {command!r}")
    printed, modules = [], {}

    # What the tests find in place of the system: a sys, a print, an open and an import of our own.
    # The files are a dictionary, so nothing is written to a disk. An import runs the file of that
    # name, once. Besides `sys` no other module can be imported.
    def load(name, *_):
        if name not in modules:
            if f"{name}.py" not in files:
                raise ModuleNotFoundError(f"No module named {name!r}")
            code = compiled(files[f"{name}.py"], f"{name}.py")
            modules[name] = types.ModuleType(name)
            modules[name].__dict__["__builtins__"] = inner
            exec(code, modules[name].__dict__)
        return modules[name]

    # The builtins of every module: Python's own, with these replaced.
    modules["sys"] = system = types.SimpleNamespace(excepthook=None, exit=sys.exit)
    inner = vars(builtins) | dict(
        print=lambda *words: printed.append(" ".join(map(str, words)) + "\n"),
        __import__=load,
        open=lambda path: types.SimpleNamespace(read=lambda: files[path]),
    )

    # Run the tests. The exit code is what they leave with, or 1 for an exception.
    code = 0
    main = {"__name__": "__main__", "__builtins__": inner}
    try:
        exec(compiled(files["tests.py"], "tests.py"), main)
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except Exception as error:
        system.excepthook(type(error), error, None)
        code = 1
    return Result(code, "".join(printed))


def same_value(value, expected):
    """Whether a submission's value is the expected one, and so are the types at every depth.

    A test that compares by `==` does not accept a tuple for a list, and one that compares by `is`
    does not accept True for 1. The recursion goes only as deep as `expected`, so a submission
    cannot make it overflow."""
    if type(value) is not type(expected):
        return False

    # The types agree: compare what a container holds, place by place.
    if isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict):
        # A look-up with the expected key finds the value's own key, which may be equal and yet of
        # another type: True where 1 is expected.
        own_key = {key: key for key in value}
        return value.keys() == expected.keys() and all(
            same_value(own_key[key], key) and same_value(value[key], expected[key])
            for key in expected
        )
    if isinstance(expected, float):
        return repr(value) == repr(expected)  # nan is itself, and -0.0 is not 0.0
    return value == expected


# stands for a value that is not built of plain lists, numbers and texts: it may equal anything
NOT_PLAIN = object()


def read_values(text, number):
    """The values in a child's answer to `number` calls, each as a list: [value], [NOT_PLAIN], or []
    where the call returned none. None where the text is no such answer.

    The submission may have written the answer: whatever it holds, this returns and never raises."""
    # A literal and nothing else is read: nothing of it is run.
    answers = (read_literal(text) or [None])[0]
    if type(answers) is not list or len(answers) != number:
        return None

    # The driver writes [1, [value]] for a call that returned, and [0, why] for any other.
    values = []
    for answer in answers:
        is_pair = type(answer) is list and len(answer) == 2
        is_value = is_pair and answer[0] == 1 and type(answer[1]) is list and len(answer[1]) == 1
        values.append(answer[1] if is_value else [])
        if answer == [0, "no plain value"]:
            values[-1] = [NOT_PLAIN]
    return values


def call_functions(files, calls, sandbox):
    """Calls a submission's functions, [(module, function, arguments)], in a child -> (what
    read_values makes of its answer, its Result)."""
    command = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", DRIVER]
    result = sandbox.run_files(files, command, repr(calls))
    return read_values(result.output, len(calls)), result


def fails_visibly(value, expected):
    """Whether a test that compares by `==` fails, too. value: as read_values gives it."""
    return not value or value[0] is not NOT_PLAIN and value[0] != expected


def judge_generated(task, files, sandbox):
    """Verdict on a submission (path -> text). MachineFailure where the machine could not run it.

    The child is given calls and returns values, and the comparison is made here. Nothing in the
    child knows what is expected, so printing, exiting early, patching or rewriting tests can only
    lose."""
    # Call the submission's functions in a child. The tests that it brings are replaced by the
    # task's own. A case is [module, function, arguments, expected]: the last one stays here.
    pristine = {**task.files, **task.solution}
    restored = {**files, "tests.py": pristine["tests.py"], "check.py": pristine["check.py"]}
    cases = task.hidden + task.meta["visible"]
    try:
        values, result = call_functions(restored, [case[:3] for case in cases], sandbox)
    except ValueError as error:  # a name or a text that no file can have
        return Verdict(False, 0, len(cases), f"cannot write: {printable(str(error))}")
    if not result.started:
        raise MachineFailure(result.output)

    # Without a well-formed answer no case counts as passed.
    if values is None:
        why = "timed out" if result.timed_out else f"no values: {result.output[-200:]}"
        return Verdict(False, 0, len(cases), why)

    # Compare each value with the expected one; the first wrong case is the reason.
    # Of a function that is wrong: does a visible test show it?
    wrong, seen = [], {}
    for value, case in zip(values, cases):
        if not value or not same_value(value[0], case[3]):
            wrong.append(case)
            is_seen = case in task.meta["visible"] and fails_visibly(value, case[3])
            name = tuple(case[:2])
            seen[name] = seen.get(name, False) or is_seen
    why = ""
    if wrong:
        module, name, arguments, _ = wrong[0]
        why = f"{module}.{name}({arguments[0]}) is wrong"

    # Of functions that were to be renamed the old name may stand nowhere any more, and the new one
    # has to stand wherever it should: a file that was emptied has neither. What is never run has
    # the very lines of the solution.
    left = []
    for new, old in task.renamed:
        if any(stands_in(text, old) for text in files.values()):
            left.append(f"{old} still stands in a file")
        for path, text in task.solution.items():
            submitted = files.get(path, "")
            wanted = {line for line in text.split("\n") if stands_in(line, new)}
            is_there = not wanted or stands_in(submitted, new)
            if path in ("docs.md", "tests.py"):
                is_there = wanted <= set(submitted.split("\n"))
            if not is_there:
                left.append(f"{new} does not stand in {path}")
    if left and not wrong:
        why = left[0]
    failed = len(wrong) + len(left)
    return Verdict(not failed, len(cases) - len(wrong), failed, why, all(seen.values()))


def stands_in(text, name):
    """Whether a name stands in a text, as a word"""
    return bool(re.search(rf"\b{re.escape(name)}\b", text))
