"""edits.py: how edit_file finds a text and puts another in its place.

An agent sees a file as read_file shows it and writes lines that end in \\n. The file itself may end
its lines in \\r\\n and may hold bytes that are no text. So the text is looked for as it is shown,
and what was not meant to change keeps its bytes.

Standard library only.
"""

import bisect
import difflib
import itertools
import re

LONE_BYTES = "[\udc80-\udcff]+"
LINE_END = re.compile("\r\n|\n")
NO_TEXT = "\ufffd"  # what read_file shows for bytes that are no text
MOST_LINES = 2000  # in longer stretches, kept lines are not looked for


class ToolError(ValueError):
    """What a tool says when it cannot do what it was asked; its text is the tool's output."""


class Shown:
    """A text as an agent sees it (`text`), and for every place in it the place in the whole text,
    as the file holds it.

    shown_at and whole_at are places that belong together, in rising order. Between two of them both
    texts are alike."""

    def __init__(self, text):
        self.whole = text
        pieces, self.shown_at, self.whole_at, done, length = [], [0], [0], 0, 0

        # The units that are shown in another form than the file has. A lone \r ends a line only in
        # a file that has no other line end.
        returns = "\r" if only_returns(text) else "\r\n"
        for found in re.finditer(f"{returns}|{LONE_BYTES}", text):
            pieces.append(text[done : found.start()])
            length += found.start() - done

            # Each unit is one character as it is shown and one or more in the text. The places
            # before and behind it are noted.
            done = found.start()
            for size in [len(returns)] if found[0] == returns else undecodable(found[0]):
                self.shown_at.append(length)
                self.whole_at.append(done)
                pieces.append("\n" if found[0] == returns else NO_TEXT)
                done, length = done + size, length + 1
                self.shown_at.append(length)
                self.whole_at.append(done)
        self.text = "".join(pieces) + text[done:]

    def place(self, at):
        """The place in the whole text of the character that is shown at `at`."""
        last = bisect.bisect_right(self.shown_at, at) - 1
        return self.whole_at[last] + at - self.shown_at[last]

    def piece(self, start, end):
        """The stretch of the whole text that is shown from `start` to `end`."""
        return self.whole[self.place(start) : self.place(end)]


def undecodable(run):
    """For each replacement character that is shown in place of these lone bytes, the number of
    bytes that it stands for."""
    data, sizes = run.encode("utf-8", "surrogateescape"), []
    while data:
        try:
            data.decode("utf-8")
            start, end = len(data), len(data)
        except UnicodeDecodeError as error:
            start, end = error.start, error.end
        # Bytes that together would make a character are still shown one by one; the rest is the
        # invalid stretch that the decoder replaces by one character.
        sizes += [1] * start + [end - start] * (end > start)
        data = data[end:]
    return sizes


def only_returns(text):
    """Whether all lines of this text end in \\r alone, as on old Macintoshes."""
    return "\r" in text and "\n" not in text


def line_end(whole, start):
    """The line end to use at the place `start` of a whole text: that of the first line that ends
    there or later, else that of the last line before, else None."""
    if only_returns(whole):
        return "\r"
    found = whole.find("\n", start)
    found = whole.rfind("\n", 0, start) if found < 0 else found
    if found < 0:
        return None
    return "\r\n" if whole[found - 1 : found + 1] == "\r\n" else "\n"


def with_line_ends(text, end):
    """The text with `end` as its line ends; unchanged where `end` is None, since the file has no
    line end to go by."""
    return text if end is None else LINE_END.sub(lambda found: end, text)


def only_place(text, old):
    """Where `old` stands in `text`. ToolError if it stands nowhere or more than once; two places
    that overlap are two."""
    first = text.find(old)
    if first < 0:
        raise ToolError("old text not found")
    if text.find(old, first + 1) >= 0:
        raise ToolError(f"old text occurs {max(2, text.count(old))} times")
    return first


def kept_lines(before, after):
    """[(start, end, start, end)] of the stretches in which two texts differ, in the first and in
    the second text. Their common beginning and end are kept by characters, the rest by lines."""
    # How many characters the two share at their beginnings and at their ends.
    most = min(len(before), len(after))
    head = next((i for i in range(most) if before[i] != after[i]), most)
    tail = next((i for i in range(most - head) if before[-1 - i] != after[-1 - i]), most - head)

    # The lines in between, and the places where they begin and end in their text. Comparing very
    # many lines would take too long: then all of them count as changed.
    lines, ends = [], []
    for text in (before, after):
        lines.append(re.findall(r"[^\n]*\n|[^\n]+", text[head : len(text) - tail]))
        ends.append(list(itertools.accumulate(map(len, lines[-1]), initial=head)))
    if max(map(len, lines)) > MOST_LINES:
        return [(head, len(before) - tail, head, len(after) - tail)]

    # The stretches of these lines that differ.
    stretches = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
        if kind != "equal":
            stretches.append((ends[0][a], ends[0][b], ends[1][c], ends[1][d]))
    return stretches


def put_in_place(shown, start, old, new):
    """The text that replaces `old`, which is shown at `start`. Lines that are in both `old` and
    `new` keep their bytes, others get the file's line end. Bytes that are no text stay where `new`
    shows them again."""
    parts, done, end = [], 0, line_end(shown.whole, shown.place(start))
    for a, b, c, d in kept_lines(old, new):
        # What both texts share up to here, as the file holds it; then the new stretch.
        parts.append(shown.piece(start + done, start + a))
        fresh = with_line_ends(new[c:d], end)

        # The bytes behind the replacement characters in the old stretch.
        lone = []
        for place in range(a, b):
            if old[place] == NO_TEXT:
                lone.append(shown.piece(start + place, start + place + 1))

        # Where the new stretch has as many of these characters, each stands for the same bytes as
        # before. Otherwise nobody can tell which one is meant, and they are written as they are.
        if lone and fresh.count(NO_TEXT) == len(lone):
            words = fresh.split(NO_TEXT)
            fresh = words[0] + "".join(byte + word for byte, word in zip(lone, words[1:]))
        parts.append(fresh)
        done = b
    return "".join([*parts, shown.piece(start + done, start + len(old))])


def edited(text, path, old, new):
    """`text` with `old`, which must stand there exactly once, replaced by `new`. An empty `old`
    appends; `text` is None where there is no such file yet.

    `old` and `new` are written as an agent sees a file: \\n stands for the file's own line end.
    ToolError says why nothing was changed."""
    # Append, after a line end where the last line has none.
    if not old:
        end = line_end(text, len(text)) if text else None
        if text and not text.endswith(("\n", "\r") if end == "\r" else "\n"):
            text += end or "\n"
        return (text or "") + with_line_ends(new, end)
    if text is None:
        raise ToolError(f"no such file: {path[:80]}")

    # An `old` with \r\n may mean exactly these bytes: so it does where the file holds them once.
    if "\r\n" in old and text.count(old) == 1 and text.find(old, text.find(old) + 1) < 0:
        start = text.find(old)
        return text[:start] + with_line_ends(new, line_end(text, start)) + text[start + len(old) :]

    # Otherwise \r\n is a plain line end, and the text is looked for as it is shown.
    shown, old = Shown(text), old.replace("\r\n", "\n")
    if line_end(text, 0) is not None:
        new = new.replace("\r\n", "\n")
    start = only_place(shown.text, old)
    return (
        text[: shown.place(start)]
        + put_in_place(shown, start, old, new)
        + text[shown.place(start + len(old)) :]
    )
