"""command/flags.py: the command line of train.py, generated from the fields of its `Config`.

Every field is a flag, `--name=value` or `--name value`; a field of type bool takes 0, 1 or nothing.
The explanations that --help prints are the comments above or behind the fields, read from the
source, so that nothing is said twice. The titles of their groups (`# ---- model`) are its titles.

Here too: how the configuration in force is printed (the same titles; a value that is no default
with the place it comes from), and `usage_error`, the one line with which wrong input ends.

It stands apart from train.py because nobody who reads the recipe needs to know how a flag becomes
a number. It knows no field by name: `Config` comes in as an argument, so that a class derived from
it (an ablation) has its own flags at once.

Left out: abbreviated flags and argparse, whose messages take several lines.
"""

import difflib
import inspect
import os
import re
import sys
import textwrap
from dataclasses import fields, is_dataclass

from tqdm import tqdm

WIDTH = 100  # of what is printed, in columns


def is_first_rank():
    """Is this the process that talks to the user? Of several ranks it is rank 0."""
    return int(os.environ.get("RANK", 0)) == 0


def usage_error(message, program="train.py"):
    """Bad input: one line, exit code 2, nothing touched. program: the command that says so"""
    # A bar that is on the screen ends first, so that the line begins on its own.
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
    if is_first_rank():
        print(f"{program}: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---------------------------------------------------------------- from words to values


def parse_flags(argv, Config):
    """--name=value or --name value for every field of Config -> (dict of what was given, was help
    asked for?)"""
    types = {field.name: field.type.__name__ for field in fields(Config)}
    given, wants_help, words = {}, False, list(argv)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            wants_help = True
            continue

        # A word that is no flag is answered with the flag most like it.
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in types:
            near = difflib.get_close_matches(name.lstrip("-"), types, 1, 0)
            hint = f"; did you mean --{near[0]}?" if near else ""
            usage_error(f"unknown flag {word!r}{hint}")

        # Without "=" the value is the next word; a bool that has none is 1.
        if not equals:
            last = not words or words[0] == "-h" or words[0].startswith("--")
            if last and types[name] != "bool":
                usage_error(f"--{name} takes a value: --{name}=...")
            value = "1" if last else words.pop(0)
        given[name] = convert(name, types[name], value)
    return given, wants_help


def convert(name, kind, value):
    """The text behind a flag as a value of its field's type: "bool", "int", "float" or "str" """
    # int() and float() read numbers; a bool has words of its own.
    if kind == "bool":
        if value.lower() not in ("0", "1", "true", "false"):
            usage_error(f"--{name} takes 0 or 1, not {value!r}")
        return value.lower() in ("1", "true")
    try:
        number = {"int": int, "float": float, "str": str}[kind](value)
    except ValueError:
        wanted = "a whole number" if kind == "int" else "a number"
        usage_error(f"--{name} takes {wanted}, not {value!r}")

    # What could be read but makes no sense for any flag.
    if number == "":
        usage_error(
            f"--{name}= is empty (a variable that is not set?): give a value, or leave the flag "
            "away"
        )
    if kind != "str" and not (0 <= number < float("inf")):
        usage_error(f"--{name} must be a finite number >= 0, not {value}")
    # The inverse and the products of such a number must be finite in fp32, too.
    if kind == "float" and number and not 1e-30 <= number <= 1e30:
        usage_error(f"--{name} must be 0 or from 1e-30 to 1e30, not {value}")
    return number


# ---------------------------------------------------------------- from fields to text


def field_groups(Config):
    """-> [(title, [(name, default as it is written, explanation)])], from the source of Config and
    of the classes it is derived from"""
    # Base classes first, so that fields keep the order in which the dataclass has them.
    groups, comments = [], []
    for cls in reversed(Config.__mro__):
        if not is_dataclass(cls):
            continue
        for line in inspect.getsource(cls).splitlines():
            line = line.strip()
            # `name: type = default`, with an explanation behind two spaces and "#".
            field = re.match(r"(\w+): \w+ = (.*?)(?:  # (.*))?$", line)
            if line.startswith("# ---- "):
                groups.append((line[7:], []))
            elif line.startswith("# "):
                comments.append(line[2:])
            elif field:
                # A field before any title; then the comments above it and the one behind it.
                if not groups:
                    groups.append(("flags", []))
                explanation = " ".join([*comments, field[3] or ""]).strip()
                groups[-1][1].append((field[1], field[2], explanation))
                comments = []
    return groups


def write_value(value):
    """A value as it would be typed: 0 and 1 for bools"""
    return str(int(value)) if isinstance(value, bool) else f"{value}"


def describe_flags(Config, values=None, sources=None):
    """Every field of Config as a flag with its default and, from the comment above or behind it,
    what it does. With values and sources (see command/configuration.py): with the value in
    force instead, and where that comes from."""
    text = []
    for title, group in field_groups(Config):
        text.append(f"\n{title}")
        for name, default, explanation in group:
            # A value that is no default takes its place; the explanation then tells the default.
            if values is not None and name in values and values[name] != getattr(Config, name):
                explanation += f" [{sources[name]}; default {default}]"
                default = write_value(values[name])

            # The explanation beside the flag, or under it where the flag is long.
            flag = f"  --{name}={default}"
            lines = textwrap.wrap(
                explanation, WIDTH, initial_indent=f"{flag:27s} ", subsequent_indent=" " * 28
            )
            text += lines or [flag]
    return "\n".join(text)


def describe_configuration(config, sources, idle=()):
    """The values in force, in the groups of Config: several to a line, those that are no defaults
    with the place they come from. idle: names of fields that this stage does not read, left out.
    So is a text that is empty."""
    lines = []
    for title, group in field_groups(type(config)):
        # Each value is one word; a source behind it tells that it is no default.
        words = []
        for name, _, _ in group:
            value = getattr(config, name)
            if name in idle or value == "":
                continue
            source = sources.get(name) if value != getattr(type(config), name) else None
            word = f"{name}={write_value(value)}"
            if source:
                word += f" ({source})"
            # Its spaces are taken for letters, so that it stays on one line.
            words.append(word.replace(" ", "\0"))

        # The title up to its colon, and as many values to a line as find room.
        if words:
            lines += textwrap.wrap(
                f"{title.partition(':')[0]}: " + ", ".join(words),
                WIDTH,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines).replace("\0", " ")
