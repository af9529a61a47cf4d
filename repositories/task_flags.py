"""task_flags.py: the flags of `python synth_tasks.py`, and which of their values are refused.

Wrong input is one clear line and exit code 2; a flag that is misspelt is answered with the nearest
one that there is.
"""

import argparse
import difflib
import os
import re
from pathlib import Path

from repositories.features import REPO_LEVELS
from world.task import Refusal


class FlagParser(argparse.ArgumentParser):
    """An argument parser that answers wrong input by one line."""

    def error(self, message):
        hint = ""
        misspelt = re.findall(r"--[\w-]+", message) if "unrecognized" in message else []
        if misspelt:
            near = difflib.get_close_matches(misspelt[0], self._option_string_actions, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
        self.exit(2, f"synth_tasks.py: {message}{hint}\n")


def read_flags():
    """The flags of the command line. Where one is wrong, the program ends with one line."""
    # Every flag has to be spelt in full.
    parser = FlagParser(
        allow_abbrev=False,
        description="Feature-deletion tasks. Without flags: a ten-second demonstration.",
    )

    # Three uses: make tasks of a repository, find an environment for one, check a file of tasks.
    add = parser.add_argument
    hardest = len(REPO_LEVELS) - 1
    home = os.path.expanduser  # a shell leaves the ~ of --out=~/tasks.jsonl as it is
    add("--repo", type=home, help="folder of a Python repository with a pytest suite")
    add("--out", type=home, default="tasks.jsonl")
    add("--n", type=int, default=50)
    add("--level", type=int, help=f"0 to {hardest}; all of them if not given")
    add("--seed", type=int, default=0)
    add("--jobs", type=int, default=2)
    add("--time_limit", type=float, default=60.0, help="seconds for one run of the suite")
    add(
        "--autoinstall",
        action="store_true",
        help="find an environment for --repo instead of making tasks",
    )
    add(
        "--keep",
        type=home,
        metavar="DIR",
        help="where --autoinstall keeps the environment (default: beside --out)",
    )
    add("--check", type=home, metavar="TASKS", help="verify every task of a file again")
    flags = parser.parse_args()

    # Refuse numbers out of their ranges, and flags without the one that they belong to.
    for name, least in (("n", 1), ("jobs", 1), ("time_limit", 0.1)):
        if not least <= getattr(flags, name) <= 10**6:
            parser.error(f"--{name} must be at least {least} and at most a million")
    if flags.autoinstall and flags.repo is None:
        parser.error("--autoinstall needs --repo")
    if flags.keep is not None and not flags.autoinstall:
        parser.error("--keep belongs to --autoinstall")
    if flags.keep == "":
        parser.error("--keep needs a folder")
    if flags.check is not None and flags.repo is not None:
        parser.error("--check stands alone: leave --repo away")
    if flags.level is not None and not 0 <= flags.level <= hardest:
        parser.error(f"--level must be 0 to {hardest}")
    return flags


def refuse_unwritable(out):
    """Raises a Refusal where no file of tasks can be written: better now than after minutes of
    work."""
    place = Path(out).resolve()
    # A name that ends with a slash is that of a folder, also where there is none yet.
    is_folder = out.endswith("/") or place.is_dir()
    is_closed = place.exists() and not os.access(place, os.W_OK)
    if is_folder or is_closed or not os.access(f"{place.parent}/", os.W_OK):
        raise Refusal(f"{out or '--out'}: cannot be written")
