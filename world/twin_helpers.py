"""Two functions that stand at the end of a test module with twins (world/twins.py).

Nobody imports this file: its text, without this head, is appended to the module in the sandbox,
with GUARD, ODD, MODULUS, REST and NUMBER replaced by names and numbers that are drawn for one run.
Neither function imports anything, since whatever it imported could have been replaced.

GUARD hands a compared value on, and fails where it is equal to things that nothing can be equal to.

ODD is what a test and its twins call where a value is expected: for the number of the test it hands
the value on, for that of a twin it answers with another one. A candidate counts if it is not equal
to the value; for an object that equals everything there is none, and it gets an empty object.
"""

# what stands here for the numbers that are drawn
MODULUS, REST, NUMBER = 2, 0, 0


def GUARD(value):
    parts = (
        list(value.values())
        if type(value) is dict
        else list(value) if type(value) in (list, tuple) else []
    )
    others = [type("", (), {})(), NUMBER, NUMBER + 0.5, "NUMBER", b"NUMBER"]
    others += [[NUMBER], (NUMBER,), {NUMBER: NUMBER}, {NUMBER}, frozenset([NUMBER])]
    for other in others:
        try:
            same = bool(value == other)
        except Exception:
            same = False
        assert not same
    assert all(GUARD(part) is part for part in parts)
    return value


def ODD(number, value, how=""):
    if number % MODULUS == REST:
        return value
    letters = "".join("bcdfghjkqvwxz"[number // 13**place % 13] for place in range(9))
    kind = type(value)
    if how == "kind":
        kinds = value if kind is tuple else (value,)
        warned = any(isinstance(one, type) and issubclass(one, Warning) for one in kinds)
        others = [
            ZeroDivisionError,
            KeyError,
            IndexError,
            OSError,
            TypeError,
            ValueError,
            EOFError,
            AttributeError,
            BufferError,
            GeneratorExit,
        ]
        if warned:
            others = [UnicodeWarning, BytesWarning, ImportWarning, SyntaxWarning, ResourceWarning]
        # all that are unrelated: an exception of several kinds is one of them, too
        unrelated = [
            other
            for other in others
            if not any(issubclass(other, one) or issubclass(one, other) for one in kinds)
        ]
        return tuple(unrelated) or value

    def another(one):
        return ODD(number, one, "far" if how == "all" else how)

    far = number // 11 % 89999 + 10000
    candidates = []
    if kind is bool:
        candidates = [not value]
    elif kind in (int, float, complex):
        candidates = [value + 2 * abs(value) + far, -value]
    elif kind is str and how == "all":
        candidates = [""]
    elif kind is str:
        where = [place for place, letter in enumerate(value) if letter.isalnum()]
        if where and not how:
            place = where[number // 17 % len(where)]
            candidates = [
                value[:place] + letter + value[place + 1 :]
                for letter in letters
                if letter != value[place].lower()
            ]
        candidates.append(letters + value + letters)
    elif kind is bytes:
        candidates = [letters.encode() + value]
        if value and not how:
            candidates.insert(0, bytes([value[0] ^ 1]) + value[1:])
    elif kind in (list, tuple):
        place = number // 17 % len(value) if value else 0
        changed = [
            another(one) if how == "all" or index == place else one
            for index, one in enumerate(value)
        ]
        candidates = [kind(changed), kind([*value, far])]
    elif kind in (set, frozenset):
        changed = [another(one) for one in value] if how == "all" else [far, *list(value)[1:]]
        candidates = [kind(changed), kind([*value, far])]
    elif kind is dict and how == "all":
        candidates = [{another(key): one for key, one in value.items()}]
    elif kind is dict:
        place = number // 17 % len(value) if value else 0
        changed = {
            key: another(one) if index == place else one
            for index, (key, one) in enumerate(value.items())
        }
        candidates = [changed, {**value, letters: far}]
    elif value is None:
        candidates = [letters]
    else:
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
    for candidate in candidates:
        try:
            if not candidate == value:
                return candidate
        except Exception:
            return candidate
    return object()
