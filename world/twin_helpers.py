"""Functions that stand at the end of a test module with twins (world/twins.py).

Nobody imports this file: its text, without this head, is appended to the module in the sandbox,
with all words in capitals replaced by names and numbers that are drawn for one run. No function
imports anything, since whatever it imported could have been replaced.

GUARD hands a compared value on, and fails where it is equal to things that nothing can be equal to.

ODD is what a test and its twins call where a value is expected. For the number of the test it hands
the value on; for the number of a twin it answers with another value. A candidate counts if it is
not equal to the value. For an object that equals everything there is none, and an empty object
takes its place.
"""

# these stand here in place of the numbers that are drawn
MODULUS, REST, NUMBER = 2, 0, 0


def GUARD(value):
    # Fail if the value claims to be equal to what nothing can be equal to.
    others = [type("", (), {})(), NUMBER, NUMBER + 0.5, "NUMBER", b"NUMBER"]
    others += [[NUMBER], (NUMBER,), {NUMBER: NUMBER}, {NUMBER}, frozenset([NUMBER])]
    for other in others:
        try:
            same = bool(value == other)
        except Exception:
            same = False
        assert not same

    # The same for all that the value holds.
    parts = []
    if type(value) is dict:
        parts = list(value.values())
    elif type(value) in (list, tuple):
        parts = list(value)
    assert all(GUARD(part) is part for part in parts)
    return value


def ODD(number, value, how=""):
    # The number of the test itself: nothing is changed.
    if number % MODULUS == REST:
        return value

    # Where a kind of exception or warning is expected, another kind.
    if how == "kind":
        return UNRELATED(value)

    # The first candidate that is not equal to the value. One that cannot be compared is another
    # value, too.
    for candidate in CANDIDATES(number, value, how):
        try:
            if not candidate == value:
                return candidate
        except Exception:
            return candidate
    return object()


def UNRELATED(value):
    kinds = value if type(value) is tuple else (value,)
    others = [ZeroDivisionError, KeyError, IndexError, OSError, TypeError, ValueError]
    others += [EOFError, AttributeError, BufferError, GeneratorExit]
    if any(isinstance(one, type) and issubclass(one, Warning) for one in kinds):
        others = [UnicodeWarning, BytesWarning, ImportWarning, SyntaxWarning, ResourceWarning]

    # All that are unrelated, and not just one: an exception that is of several kinds at once is of
    # one of these, too.
    for one in kinds:
        others = [other for other in others if not issubclass(other, one)]
        others = [other for other in others if not issubclass(one, other)]
    return tuple(others) or value


def CANDIDATES(number, value, how):
    # Letters and a large number that depend on the number of the twin only.
    letters = "".join("bcdfghjkqvwxz"[number // 13**place % 13] for place in range(9))
    far = number // 11 % 89999 + 10000
    kind = type(value)

    def another(one):
        return ODD(number, one, "far" if how == "all" else how)

    # Values that hold no other values. Without `how`, one place of a text or of bytes is changed
    # first; otherwise letters are added to it. With "all" a text becomes empty.
    if kind is bool or value is None:
        return [letters if value is None else not value]
    if kind in (int, float, complex):
        return [value + 2 * abs(value) + far, -value]
    if kind is str and how == "all":
        return [""]
    if kind is str:
        candidates = []
        where = [place for place, letter in enumerate(value) if letter.isalnum()]
        if where and not how:
            # replace one of its letters or digits by another letter
            place = where[number // 17 % len(where)]
            for letter in letters:
                if letter != value[place].lower():
                    candidates.append(value[:place] + letter + value[place + 1 :])
        return candidates + [letters + value + letters]
    if kind is bytes:
        longer = letters.encode() + value
        return [bytes([value[0] ^ 1]) + value[1:], longer] if value and not how else [longer]

    # Containers: one element is changed, or (with "all") every element; or there is one more.
    place = number // 17 % len(value) if kind in (list, tuple, dict) and value else 0
    if kind in (list, tuple):
        changed = [another(one) for one in value] if how == "all" else list(value)
        if value and how != "all":
            changed[place] = another(value[place])
        return [kind(changed), kind([*value, far])]
    if kind in (set, frozenset):
        changed = [another(one) for one in value] if how == "all" else [far, *list(value)[1:]]
        return [kind(changed), kind([*value, far])]
    if kind is dict and how == "all":
        return [{another(key): one for key, one in value.items()}]
    if kind is dict:
        changed = dict(value)
        for key in list(value)[place : place + 1]:
            changed[key] = another(value[key])
        return [changed, {**value, letters: far}]

    # Anything else may be like a number, a path or a date: each change that works is a candidate.
    candidates = []
    for change in (
        lambda: value + 2 * abs(value) + far,
        lambda: value + far,
        lambda: value / letters,
        lambda: value.replace(year=value.year + 1),
    ):
        try:
            candidates.append(change())
        except Exception:
            pass
    return candidates
