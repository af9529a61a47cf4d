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
MOST_LINES = 2000  # beyond so many, changed lines are not told from kept ones


class ToolError(ValueError):
    """What a tool says when it cannot do what it was asked; its text is the tool's output."""


class Shown:
    """A text as an agent sees it, and for every place in it the place in the text itself."""

    def __init__(self, text):
        self.whole = text
        pieces, self.shown_at, self.whole_at, done, length = [], [0], [0], 0, 0
        # What is shown otherwise than it stands in the file. A lone \r ends a line only in a file
        # that knows no other line end.
        returns = "\r" if only_returns(text) else "\r\n"
        for found in re.finditer(f"{returns}|{LONE_BYTES}", text):
            pieces.append(text[done : found.start()])
            length += found.start() - done
            # Each unit is one character as it is shown and one or more in the text.
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
        """Where in the whole text the character stands that is shown at `at`."""
        last = bisect.bisect_right(self.shown_at, at) - 1
        return self.whole_at[last] + at - self.shown_at[last]

    def piece(self, start, end):
        """What stands in the whole text where this stretch is shown."""
        return self.whole[self.place(start) : self.place(end)]


def undecodable(run):
    """How many of these lone bytes are shown as one replacement character, for each such
    character."""
    data, sizes = run.encode("utf-8", "surrogateescape"), []
    while data:
        try:
            data.decode("utf-8")
            start, end = len(data), len(data)
        except UnicodeDecodeError as error:
            start, end = error.start, error.end
        # Bytes that would make a character together stand alone all the same: one for one.
        sizes += [1] * start + [end - start] * (end > start)
        data = data[end:]
    return sizes


def only_returns(text):
    """Whether the lines of this text end as those of old Macintoshes did."""
    return "\r" in text and "\n" not in text


def line_end(whole, start):
    """The line end of whole that belongs to what stands at `start`: the first one from there on,
    else the last one before, else None."""
    if only_returns(whole):
        return "\r"
    found = whole.find("\n", start)
    found = whole.rfind("\n", 0, start) if found < 0 else found
    if found < 0:
        return None
    return "\r\n" if whole[found - 1 : found + 1] == "\r\n" else "\n"


def with_line_ends(text, end):
    """The text with its lines ended in `end`; as it is where the file has no line end to go by."""
    return text if end is None else LINE_END.sub(lambda found: end, text)


def only_place(text, old):
    """Where `old` stands in `text`. ToolError if it stands nowhere or, also overlapping itself,
    more than once."""
    first = text.find(old)
    if first < 0:
        raise ToolError("old text not found")
    if text.find(old, first + 1) >= 0:
        raise ToolError(f"old text occurs {max(2, text.count(old))} times")
    return first


def kept_lines(before, after):
    """(start, end, start, end) of the stretches in which two texts differ: between their common
    beginning and end, by lines."""
    # How many characters the two share at their beginnings and at their ends.
    most = min(len(before), len(after))
    head = next((i for i in range(most) if before[i] != after[i]), most)
    tail = next((i for i in range(most - head) if before[-1 - i] != after[-1 - i]), most - head)

    # The lines in between, and where each of them ends in its text.
    lines, ends = [], []
    for text in (before, after):
        lines.append(re.findall(r"[^\n]*\n|[^\n]+", text[head : len(text) - tail]))
        ends.append(list(itertools.accumulate(map(len, lines[-1]), initial=head)))
    if max(map(len, lines)) > MOST_LINES:
        return [(head, len(before) - tail, head, len(after) - tail)]

    # Of these the stretches that differ.
    stretches = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
        if kind != "equal":
            stretches.append((ends[0][a], ends[0][b], ends[1][c], ends[1][d]))
    return stretches


def put_in_place(shown, start, old, new):
    """What takes the place of `old`, shown at `start`: lines that are in both keep their bytes,
    others get the file's line end, and bytes that are no text stay where they are shown again."""
    parts, done, end = [], 0, line_end(shown.whole, shown.place(start))
    for a, b, c, d in kept_lines(old, new):
        parts.append(shown.piece(start + done, start + a))
        fresh = with_line_ends(new[c:d], end)
        lone = []
        for place in range(a, b):
            if old[place] == NO_TEXT:
                lone.append(shown.piece(start + place, start + place + 1))
        # As many as were shown there: each is what it was. Otherwise there is no telling which one
        # is meant.
        if lone and fresh.count(NO_TEXT) == len(lone):
            words = fresh.split(NO_TEXT)
            fresh = words[0] + "".join(byte + word for byte, word in zip(lone, words[1:]))
        parts.append(fresh)
        done = b
    return "".join([*parts, shown.piece(start + done, start + len(old))])


def edited(text, path, old, new):
    """`text` (None: no such file yet) with `old`, which must stand there exactly once, replaced by
    `new`; an empty `old` appends.

    Both are taken as they are shown: \\n stands for the file's own line end. ToolError says why
    nothing was changed."""
    if not old:
        end = line_end(text, len(text)) if text else None
        begun = text and not text.endswith(("\n", "\r") if end == "\r" else "\n")
        return (text or "") + (end or "\n") * bool(begun) + with_line_ends(new, end)
    if text is None:
        raise ToolError(f"no such file: {path[:80]}")
    # Who writes \r\n and means just these bytes is taken at the word where they stand once.
    if "\r\n" in old and text.count(old) == 1 and text.find(old, text.find(old) + 1) < 0:
        start = text.find(old)
        return text[:start] + with_line_ends(new, line_end(text, start)) + text[start + len(old) :]
    shown, old = Shown(text), old.replace("\r\n", "\n")
    if line_end(text, 0) is not None:
        new = new.replace("\r\n", "\n")
    start = only_place(shown.text, old)
    return (
        text[: shown.place(start)]
        + put_in_place(shown, start, old, new)
        + text[shown.place(start + len(old)) :]
    )


def without_middle(text, most):
    """The text in at most `most` characters: of more, its beginning, its end, and a line between
    that says how much is missing."""
    if len(text) <= most:
        return text
    half = max(0, most - 40) // 2
    missing = len(text) - 2 * half
    return f"{text[:half]}\n[{missing} characters cut]\n{text[len(text) - half:]}"
