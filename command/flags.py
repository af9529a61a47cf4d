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
"""

import argparse
import difflib
import inspect
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial

from tqdm import tqdm

WIDTH = 100  # of what is printed, in columns


def is_first_rank():
    """Is this the process that talks to the user? Of several ranks it is rank 0."""
    return int(os.environ.get("RANK", 0)) == 0


def usage_error(message, program="train.py", any_rank=False):
    """Bad input: one line, exit code 2, nothing touched. program: the command that says so;
    any_rank: the others may not have met it, so whichever rank this is says it"""
    # A bar that is on the screen ends first, so that the line begins on its own.
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
    # On each machine: a file may be missing on one alone.
    if any_rank or int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"{program}: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---------------------------------------------------------------- what a field says


@dataclass(frozen=True)
class Rule:
    """What a field says of its flag beside type, default and explanation"""

    stages: str = ""  # those that read it; "": all
    choices: tuple = ()  # the words that it takes; (): any
    several: bool = False  # it takes several of them, with commas
    check: Callable | None = None  # called with the value; its ValueError says what is wrong
    at_least: float = 0
    at_most: float = 1e30  # beyond it, products are not finite in fp32
    why: str = ""  # the reason of the range, where it needs one
    may_change: bool = False  # when a stage goes on: it says where and how, not what
    # the value of another flag with which this one changes nothing, such as "summarize=0"; a name
    # alone: any value that is not empty
    idle_with: str = ""
    defaults: dict = field(default_factory=dict)  # other defaults, see default_value

    def is_read_by(self, stage):
        return not self.stages or stage in self.stages.split()

    def why_idle(self, config):
        """Why a flag changes nothing in the stage of this configuration; "" where it does"""
        if not self.is_read_by(config.stage):
            return f"of {self.stages.replace(' ', ' and ')}"
        other, _, value = self.idle_with.partition("=")
        if not other or not rules_of(type(config))[other].is_read_by(config.stage):
            return ""
        now = write_value(getattr(config, other))
        is_idle = now == value if value else now != ""
        return f"with --{other}={now}" if is_idle else ""


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

# A shell puts the home folder in the place of ~ only where a word begins with it.
READERS = {"int": int, "float": float, "str": os.path.expanduser}
BOOLS = {"0": False, "1": True, "false": False, "true": True}


def read_value(text, kind, rule):
    """The text behind a flag as a value of its field's type ("bool", "int", "float" or "str").
    argparse.ArgumentTypeError where it is none, no choice, or out of the range"""
    try:
        value = BOOLS[text.lower()] if kind == "bool" else READERS[kind](text)
    except (ValueError, KeyError):
        wanted = {"bool": "0 or 1", "int": "a whole number", "float": "a number"}[kind]
        raise argparse.ArgumentTypeError(f"takes {wanted}, not {text!r}") from None

    if value == "":
        raise argparse.ArgumentTypeError("is empty (a variable that is not set?)")
    try:
        if rule.check:
            rule.check(value)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{problem}, not {text!r}") from None
    words = text.split(",") if rule.several else [text]
    if rule.choices and not set(words) <= set(rule.choices):
        how = "a list, with commas," if rule.several else "one"
        raise argparse.ArgumentTypeError(f"takes {how} of {', '.join(rule.choices)}, not {text!r}")
    if len(set(words)) < len(words):
        raise argparse.ArgumentTypeError(f"names one twice: {text!r}")
    if kind != "str" and not rule.at_least <= value <= rule.at_most:
        why = f" ({rule.why})" if rule.why else ""
        most = f" and at most {rule.at_most}" if rule.at_most < Rule.at_most else ""
        finite = "" if math.isfinite(value) else "finite and "
        allowed = f"{finite}at least {rule.at_least}{most}"
        raise argparse.ArgumentTypeError(f"must be {allowed}, not {text}{why}")
    return value


def make_parser(program, about, **more):
    """A parser that answers wrong input with one line. program: the command that says so; more: see
    argparse.ArgumentParser"""
    parser = argparse.ArgumentParser(program, description=about, allow_abbrev=False, **more)

    def refuse(message):
        # An unknown flag is answered with the flag most like it.
        message = str(message)  # argparse hands texts over, others exceptions
        unknown = re.search(r"unrecognized arguments: (?:--)?(\w+)", message)
        known = {*parser._option_string_actions} - {"--help", "-h"}
        near = difflib.get_close_matches(f"--{unknown[1]}", known, 1, 0.7) if unknown else []
        usage_error(message + "".join(f"; did you mean {name}?" for name in near), program)

    parser.error = refuse
    return parser


def make_config_parser(Config, values=None, sources=None, about=None):
    """A parser with every field of Config as a flag, in the groups of Config, each with its
    default and what it does. values and sources (see command/configuration.py): then with the value
    in force, and where that comes from."""
    # The result holds what was given and nothing else. --help comes last: its values depend on the
    # other flags.
    parser = make_parser(
        "train.py",
        about,
        usage=argparse.SUPPRESS,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=28, width=WIDTH
        ),
    )
    parser.add_argument("-h", "--help", action="store_true", help="this text, and the end")

    kinds, rules = {one.name: one.type.__name__ for one in fields(Config)}, rules_of(Config)
    for title, group in field_groups(Config):
        flags = parser.add_argument_group(title)
        for name, explanation in group:
            # A value that is no default takes its place; the explanation then tells the default.
            value = default = getattr(Config, name)
            if values is not None and values[name] != default:
                value = values[name]
                explanation += f" [{sources[name]}; default {write_value(default)}]"
            flags.add_argument(
                f"--{name}",
                type=partial(read_value, kind=kinds[name], rule=rules[name]),
                metavar=write_value(value) or '""',
                help=explanation.replace("%", "%%"),
                # a bool without a value is 1
                **({"nargs": "?", "const": True} if kinds[name] == "bool" else {}),
            )
    return parser


# ---------------------------------------------------------------- from fields to text


def field_groups(Config):
    """-> [(title, [(name, explanation)])], from the source of Config and of the classes it is
    derived from"""
    # Base classes first, so that fields keep the order in which the dataclass has them.
    groups, comments = [("flags", [])], []
    for cls in filter(is_dataclass, reversed(Config.__mro__)):
        for line in inspect.getsource(cls).splitlines():
            line = line.strip()
            # `name: type = default`, with an explanation behind two spaces and "#".
            found = re.match(r"(\w+): \w+ = .*?(?:  # (.*))?$", line)
            if line.startswith("# ---- "):
                groups.append((line[7:], []))
            elif line.startswith("# "):
                comments.append(line[2:])
            elif found:
                # The comments above it and the one behind it.
                groups[-1][1].append((found[1], " ".join([*comments, found[2] or ""]).strip()))
                comments = []
    return [(title, group) for title, group in groups if group]


def write_value(value):
    """A value as it would be typed: 0 and 1 for bools"""
    return str(int(value)) if isinstance(value, bool) else f"{value}"


def describe_stage(config, sources):
    """A text for the start of a stage: the values in force in it, in the groups of Config, several
    to a line. Those that are no defaults have the place they come from behind them. Left out are
    values that the stage does not read, and texts that are empty. sources: {field: place} or None
    """
    text = f"{config.stage}: the configuration in force (in brackets: where it comes from)"
    rules = rules_of(type(config))
    for title, group in field_groups(type(config)):
        words = []
        for name, _ in group:
            value = getattr(config, name)
            if value == "" or not rules[name].is_read_by(config.stage):
                continue
            is_default = value == getattr(type(config), name) or name not in (sources or {})
            source = "" if is_default else f" ({sources[name]})"
            words.append(f"{name}={write_value(value)}{source}")
        if words:
            line = f"  {title.partition(':')[0]}: " + ", ".join(words)
            text += "\n" + textwrap.fill(line, WIDTH, subsequent_indent="    ")
    return text
