"""Runs inside the sandbox: calls the functions of a submission and answers with their values.

Nobody imports this file; the judge gives its text to a Python there. Standard input is a list of
[module, function, arguments]. Standard output is one list with an entry for each call: [1, [value]]
or [0, why]. The program does without json, which takes as long to import as Python takes to start.

What it evaluates was written by the judge and is read before any of the submission's code runs.
What it answers may come from the submission's code, so the judge compares the values, and this
program does not know what is expected.
"""

import os, sys

# Only the answer goes to the real output. Whatever the submission prints goes nowhere.
result_fd = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(1, 2)
calls, answers = eval(sys.stdin.read()), []
sys.path.insert(0, os.getcwd())


def plain(value):
    """Whether a value is built of plain lists, tuples, dictionaries, numbers and texts only."""
    # `type`, not isinstance: a subclass could print like the right value and not be equal to it.
    if type(value) in (list, tuple):
        return all(map(plain, value))
    if type(value) is dict:
        return all(map(plain, value)) and all(map(plain, value.values()))
    return value is None or type(value) in (bool, int, float, str)


for module, function, arguments in calls:
    try:
        value = getattr(__import__(module), function)(*arguments)
        # Write it down at once, as a test compares at once: the next call may change a list that
        # both calls return.
        answers.append("[1, %r]" % ([value],) if plain(value) else "[0, 'no plain value']")
    except Exception as error:
        answers.append("[0, %r]" % type(error).__name__)
os.write(result_fd, ("[" + ", ".join(answers) + "]").encode("utf-8", "backslashreplace"))
