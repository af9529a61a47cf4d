"""command/output_files.py: questions about files that are asked around long work.

Can what is written at the end be written at all, and can every program read it? Is a file still
the one that it was? Which commit of this program wrote a result? And does whoever reads what is
printed still read?
"""

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def check_writable(folder):
    """Before long work: can its results be written into the folder, which is made? Else OSError"""
    Path(folder).mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def to_json(value, indent=None):
    """The text of a value as JSON. JSON has no NaN and no infinity: such a number is null, as one
    that is not known."""
    known = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(known, indent=indent)


def nan_for_null(value):
    """A value out of JSON, in which every null is the NaN that to_json has taken for one"""
    if isinstance(value, dict):
        return {key: nan_for_null(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [nan_for_null(inner) for inner in value]
    return math.nan if value is None else value


def digest_file(path):
    """SHA-256 of a file's bytes, in hexadecimal; "" where path is empty"""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


def digest_ends(folder):
    """SHA-256 of the names, the sizes and the first and last megabyte of a folder's files: enough
    to tell one published checkpoint from another without reading all of its weights"""
    found, end = hashlib.sha256(), 1 << 20
    for path in sorted(path for path in Path(folder).iterdir() if path.is_file()):
        size = path.stat().st_size
        with open(path, "rb") as file:
            found.update(f"{path.name} {size}\n".encode() + file.read(end))
            file.seek(max(0, size - end))
            found.update(file.read())
    return found.hexdigest()


def current_commit():
    """The commit of this checkout, with "-dirty" where files were changed since; "" where this
    folder is no checkout of its own: a copy inside another repository has no commit"""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    describe = ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(["git", "-C", str(root), *describe], capture_output=True, text=True)
        return done.stdout.strip()
    except OSError:  # no git
        return ""


def print_for_reader(text):
    """Prints a long text. A terminal that is not for all letters shows their numbers; a reader that
    has seen enough (`| head`) ends the command in silence."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # What Python still has to write when it ends goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
