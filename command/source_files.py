"""command/source_files.py: the Python files that pretrain and long read.

A folder of Python files (by default the standard library of the Python that runs) becomes two lists
of texts, one to train on and one that is held out. The split depends on each file's own path, so
the same folder gives the same split on every machine, and one more file moves no other.

    python_sources(folder, say)  -> (training texts, held-out texts)
    digest_texts(train, held)    -> a checksum, by which a resumed run knows its data again

It stands apart from train.py because which files are skipped and how a damaged folder is refused
says nothing about the recipe.

Left out: deduplication, licences, any language but Python.
"""

import hashlib
import sysconfig
from collections import Counter
from pathlib import Path

from command.flags import usage_error

HELD_OUT = 1 / 20  # of the files
# folders whose files are left out
SKIP = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "__pycache__",
    "lib2to3",
    "pydoc_data",
    "encodings",
    "turtledemo",
    "idlelib",
}


def python_sources(folder, say=None):
    """-> (training texts, held-out texts): real Python, tests and generated tables left out. About
    every 20th file is held out; which ones depends on each file's own path below the folder, so a
    file that is added or removed moves no other. say: prints the line that tells how many files of
    a user's folder are left out, and why"""
    # {path below the folder: text}, sorted. A file of 200 kB or more counts as a generated table.
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        usage_error(f"--data={folder}: no such folder")
    texts, left_out = {}, Counter()
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        skipped = sorted(SKIP & set(inside.parts[:-1]))
        # A link may lead nowhere, and a folder may be called like a source.
        if not path.is_file():
            continue
        if skipped:
            left_out[f"in folders called {skipped[0]}"] += 1
        elif path.stat().st_size >= 200_000:
            left_out["of 200 kB or more"] += 1
        else:
            try:
                text = path.read_text(encoding="utf-8", errors="ignore")
            except OSError:
                left_out["that cannot be read"] += 1
                continue
            if text.strip():
                texts[inside.as_posix()] = text
    if len(texts) < 2:
        usage_error(f"--data={folder}: fewer than two Python files there")
    if folder and left_out and say:
        causes = ", ".join(f"{number} {cause}" for cause, number in left_out.items())
        total = len(texts) + sum(left_out.values())
        say(f"--data={folder}: {sum(left_out.values())} of {total} files are left out: {causes}")

    # A number from 0 to 1 for each path. A small folder may have no file below the threshold, or no
    # other: one of each is needed.
    place = {}
    for name in texts:
        found = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
        place[name] = int.from_bytes(found[:7], "big") / 2**56
    held = {name for name in texts if place[name] < HELD_OUT}
    if not 0 < len(held) < len(texts):
        held = {min(texts, key=place.get)}
    train = [text for name, text in texts.items() if name not in held]
    return train, [text for name, text in texts.items() if name in held]


def digest_texts(train, held):
    """SHA-256 of all that a run on these texts depends on: their bytes, their order, and which are
    held out"""
    # The length before each text: without it, other texts could have the same bytes in a row.
    found = hashlib.sha256()
    for text in [f"{len(train)} and {len(held)}", *train, *held]:
        data = text.encode("utf-8", "surrogatepass")
        found.update(len(data).to_bytes(8, "big") + data)
    return found.hexdigest()
