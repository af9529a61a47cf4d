import sys

sys.excepthook = lambda kind, error, trace: print(f"{kind.__name__}: {error}")


def passes(test):
    try:
        return test() is None
    except Exception as error:
        place = error.__traceback__.tb_next
        case = open("tests.py").read().split("\n")[place.tb_lineno - 1].strip()[7:]
        missing = isinstance(error, AttributeError) and place.tb_next is None
        word = "failed" if isinstance(error, AssertionError) else type(error).__name__
        print(case.split("(")[0] + ": missing" if missing else case + ": " + word)


def run(tests):
    results = [passes(test) for name, test in list(tests.items()) if name.startswith("test_")]
    print(f"{sum(map(bool, results))} passed, {results.count(None)} failed")
    sys.exit(None in results)
