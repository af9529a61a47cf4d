"""edits.py: how edit_file finds a text and puts another in its place.

An agent writes lines that end in \\n. Where all lines of a file end in \\r\\n (or all in \\r), they
go on doing so. A file of mixed line ends is edited to the letter, as it is.

Standard library only.
"""


class ToolError(ValueError):
    """What a tool says when it cannot do what it was asked; its text is the tool's output."""


def line_end(text):
    """The line end that all lines of a text have; None where they differ, or where it has none"""
    # A lone \r ends a line only in a file that has no other line end, as on old Macintoshes.
    if "\n" not in text:
        return "\r" if "\r" in text else None
    both = text.count("\r\n")
    if both == text.count("\n"):
        return "\r\n"
    return None if both else "\n"


def edited(text, path, old, new):
    """`text` with `old`, which must stand there exactly once, replaced by `new`. An empty `old`
    appends; `text` is None where there is no such file yet. ToolError says why nothing was
    changed."""
    if text is None and old:
        raise ToolError(f"no such file: {path[:80]}")
    text = text or ""

    # All in the agent's line ends, for as long as it takes.
    end = line_end(text)
    if end:
        text = text.replace(end, "\n")
        old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")

    if old:
        first = text.find(old)
        if first < 0:
            raise ToolError("old text not found")
        # Two places that overlap are two.
        if text.find(old, first + 1) >= 0:
            raise ToolError(f"old text occurs {max(2, text.count(old))} times")
        text = text.replace(old, new)
    else:
        # Append: what is new begins a line of its own.
        if text and not text.endswith("\n"):
            text += "\n"
        text += new

    # Back to the file's own.
    return text.replace("\n", end) if end else text
