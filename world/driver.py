import os, sys

mouth = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(1, 2)
calls, answers = eval(sys.stdin.read()), []
sys.path.insert(0, os.getcwd())


def plain(value):
    # a subclass could print like the right value and not be equal to it
    if type(value) in (list, tuple):
        return all(map(plain, value))
    if type(value) is dict:
        return all(map(plain, value)) and all(map(plain, value.values()))
    return value is None or type(value) in (bool, int, float, str)


for module, function, arguments in calls:
    try:
        value = getattr(__import__(module), function)(*arguments)
        # written down at once, as a test compares at once: the next call may change a list that both return
        answers.append("[1, %r]" % ([value],) if plain(value) else "[0, 'no plain value']")
    except Exception as error:
        answers.append("[0, %r]" % type(error).__name__)
os.write(mouth, ("[" + ", ".join(answers) + "]").encode("utf-8", "backslashreplace"))
