"""command/flags.py: one place for each flag, a field of train.py's `Config`.

    # peak learning rate of Muon
    lr: float = flag(0.006, stages="pretrain long sft rl", gpu=0.005, published=5e-5)

The field's type and default, what else `flag` says of it (Rule), and the comments above or behind
it are all that there is to a flag. Everything follows from them: how a word of the command line
becomes a value, and which values are refused; what the default is in a stage, at a scale, from a
published model; which flags a stage reads; which may change when a stage goes on; --help and the
configuration in force as they are printed, under the titles of the groups (`# ---- model`).

Here too `usage_error`, the one line with which wrong input ends.

It stands apart from train.py because nobody who reads the recipe needs to know how a flag becomes
a number. It knows no field by name: `Config` comes in as an argument, so that a class derived from
it (an ablation) has its own flags at once.

Left out: abbreviated flags and argparse, whose messages take several lines.
"""

import difflib
import inspect
import math
import os
import re
import sys
import textwrap
from dataclasses import dataclass, field, fields, is_dataclass

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


# ---------------------------------------------------------------- what a field says


@dataclass(frozen=True)
class Rule:
    """What a field says of its flag beside type, default and explanation"""

    stages: str = ""  # those that read it; "": all
    choices: tuple = ()  # the words that it takes; (): any
    several: bool = False  # it takes several of them, with commas
    at_least: float = 0
    at_most: float = math.inf
    why: str = ""  # the reason of the range, where it needs one
    may_change: bool = False  # when a stage goes on: it says where and how, not what
    defaults: dict = field(default_factory=dict)  # other defaults, see default_value

    def is_read_by(self, stage):
        return not self.stages or stage in self.stages.split()


def flag(default, **says):
    """A field of Config with a Rule. What is no field of Rule is a default of a stage or scale."""
    names = [name for name in says if name in Rule.__dataclass_fields__]
    rule = {name: says.pop(name) for name in names}
    return field(default=default, metadata={"rule": Rule(**rule, defaults=says)})


def rules_of(Config):
    """-> {field: its Rule}"""
    return {one.name: one.metadata.get("rule", Rule()) for one in fields(Config)}


def default_value(Config, name, scale, stage, published):
    """-> (the default of a field in a stage at a scale, where that comes from). published: does the
    run begin from a published model? The last of these that the field names wins over those before
    it."""
    found = getattr(Config, name), "default"
    layers = {
        stage: f"stage {stage}",
        scale: f"scale {scale}",
        f"{scale}_{stage}": f"stage {stage} at scale {scale}",
    }
    if published:
        layers |= {"published": "fine-tuning", f"published_{stage}": "fine-tuning"}
    defaults = rules_of(Config)[name].defaults
    for key, source in layers.items():
        if key in defaults:
            found = defaults[key], source
    return found


def fill_in(Config, made):
    """The configuration of a run on disk as one of Config: a field that is newer than the run has
    the default of the run's stage and scale."""
    complete = {}
    for name in rules_of(Config):
        default, _ = default_value(Config, name, made["scale"], made["stage"], made["init_from"])
        complete[name] = made.get(name, default)
    return complete


# ---------------------------------------------------------------- from words to values


def parse_flags(argv, Config):
    """--name=value or --name value for every field of Config -> (dict of what was given, was help
    asked for?)"""
    types, rules = {one.name: one.type.__name__ for one in fields(Config)}, rules_of(Config)
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
        check_value(name, rules[name], given[name])
    return given, wants_help


def convert(name, kind, value):
    """The text behind a flag as a value of its field's type: "bool", "int", "float" or "str" """
    # int() and float() read numbers; a bool has words of its own.
    if kind == "bool":
        if value.lower() not in ("0", "1", "true", "false"):
            usage_error(f"--{name} takes 0 or 1, not {value!r}")
        return value.lower() in ("1", "true")
    # A shell puts the home folder in the place of ~ only where a word begins with it.
    kinds = {"int": int, "float": float, "str": os.path.expanduser}
    try:
        number = kinds[kind](value)
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


def check_value(name, rule, value):
    """Refuses a value that is none of the choices, or out of the range"""
    words = value.split(",") if rule.several else [value]
    if rule.choices and not set(words) <= set(rule.choices):
        how = "a list, with commas," if rule.several else "one"
        usage_error(f"--{name} takes {how} of {', '.join(rule.choices)}, not {value!r}")
    if not isinstance(value, str) and not rule.at_least <= value <= rule.at_most:
        allowed = f"at least {rule.at_least}"
        if rule.at_most < math.inf:
            allowed = f"from {rule.at_least} to {rule.at_most}"
        usage_error(f"--{name}={write_value(value)}: {allowed}" + f" ({rule.why})" * bool(rule.why))


# ---------------------------------------------------------------- from fields to text


def field_groups(Config):
    """-> [(title, [(name, explanation)])], from the source of Config and of the classes it is
    derived from"""
    # Base classes first, so that fields keep the order in which the dataclass has them.
    groups, comments = [], []
    for cls in reversed(Config.__mro__):
        if not is_dataclass(cls):
            continue
        for line in inspect.getsource(cls).splitlines():
            line = line.strip()
            # `name: type = default`, with an explanation behind two spaces and "#".
            found = re.match(r"(\w+): \w+ = .*?(?:  # (.*))?$", line)
            if line.startswith("# ---- "):
                groups.append((line[7:], []))
            elif line.startswith("# "):
                comments.append(line[2:])
            elif found:
                # A field before any title; then the comments above it and the one behind it.
                if not groups:
                    groups.append(("flags", []))
                groups[-1][1].append((found[1], " ".join([*comments, found[2] or ""]).strip()))
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
        for name, explanation in group:
            # A value that is no default takes its place; the explanation then tells the default.
            value = default = getattr(Config, name)
            if values is not None and values.get(name, default) != default:
                value = values[name]
                explanation += f" [{sources[name]}; default {write_value(default)}]"

            # The explanation beside the flag, or under it where the flag is long.
            flag = f"  --{name}={write_value(value)}"
            lines = textwrap.wrap(
                explanation, WIDTH, initial_indent=f"{flag:27s} ", subsequent_indent=" " * 28
            )
            text += lines or [flag]
    return "\n".join(text)


def describe_stage(config, sources):
    """A text for the start of a stage: the values in force in it, in the groups of Config, several
    to a line. Those that are no defaults have the place they come from behind them. Left out are
    values that the stage does not read, and texts that are empty. sources: {field: place} or None
    """
    lines, rules = [], rules_of(type(config))
    for title, group in field_groups(type(config)):
        # Each value is one word; a source behind it tells that it is no default.
        words = []
        for name, _ in group:
            value = getattr(config, name)
            if value == "" or not rules[name].is_read_by(config.stage):
                continue
            word = f"{name}={write_value(value)}"
            if value != getattr(type(config), name) and name in (sources or {}):
                word += f" ({sources[name]})"
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
    first = f"{config.stage}: the configuration in force (in brackets: where it comes from)"
    return "\n".join([first, *lines]).replace("\0", " ")
