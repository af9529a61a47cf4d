"""repo_files.py: which files of a real repository an agent may see, and which it may not change.

`copy_repository` reads a folder into a tree (path -> text). Some files could give a deleted feature
away and are known by their names: caches, bytecode, version control, virtual environments, builds
(JUNK). They are not copied. What decides the verdict may not be changed: PROTECTED in
world/tree.py.

    packages   the names under which the sources are imported

What gives a feature away by its content is found in repositories/copies.py.
"""

import os
import re
from pathlib import Path

from repositories import leftovers
from repositories.deletion import sources
from repositories.source import package_root
from world.untrusted import is_python
from world.task import Refusal

JUNK = re.compile(
    r"(^|/)(__pycache__"
    r"|\.(mypy_cache|pytest_cache|ruff_cache|pytype|hypothesis|git|hg|svn|tox|nox|venv|eggs"
    r"|idea|vscode)|venv|node_modules|htmlcov|[^/]+\.(egg-info|dist-info))(/|$)"
    r"|\.(py[cod]|swp|orig|rej|so|pth)$|~$"
    r"|(^|/)(\.coverage[^/]*|coverage\.xml|tags|TAGS|\.DS_Store)$|^(build|dist)/"
)


MOST_FILES, MOST_BYTES = 5000, 32 << 20


def copy_repository(repo):
    """path -> text of everything an agent may see; bytes that are no text are surrogates. Refusal
    where the folder holds no usable repository. Symbolic links are left out.

    A Python file that Python 3 cannot read (a template, a sample, Python 2) is copied like any
    other; no feature is taken from it."""
    root, files, size = Path(repo), {}, 0
    if not repo or not root.is_dir():
        raise Refusal(f"{repo or '--repo'}: no such directory")

    for folder, folders, names in os.walk(root):
        # Neither junk nor a link to a folder is walked into.
        below = "" if folder == str(root) else f"{Path(folder).relative_to(root).as_posix()}/"
        inside = [name for name in folders if not JUNK.search(f"{below}{name}/")]
        folders[:] = sorted(inside)

        # Keep files that are not compiled Python. What is beyond the limit of bytes is not read,
        # only counted.
        for name in sorted(names):
            place = Path(folder, name)
            path = below + name
            # an extension that was compiled in its place is no junk: the suite may need it
            if JUNK.search(path.removesuffix(".so")):
                continue
            if place.is_file() and not place.is_symlink():
                size += place.stat().st_size
                data = place.read_bytes() if size <= MOST_BYTES else b""
                if leftovers.is_bytecode(data):
                    continue
                files[path] = data.decode("utf-8", "surrogateescape")

            # The first file beyond a limit ends the walk.
            if len(files) > MOST_FILES or size > MOST_BYTES:
                most = f"{MOST_FILES} files or {MOST_BYTES >> 20} MB"
                raise Refusal(f"{repo}: too large (more than {most})")

    # A compiled extension that has a source in Python beside it could hold a deleted feature.
    for path in [path for path in files if path.endswith(".so")]:
        folder, slash, name = path.rpartition("/")
        if f"{folder}{slash}{name.partition('.')[0]}.py" in files:
            del files[path]

    # It has to be a repository of Python 3.
    if not any(path.endswith(".py") for path in files):
        raise Refusal(f"{repo}: holds no Python files")
    candidates = sources(files)
    if candidates and not any(is_python(files[path]) for path in candidates):
        raise Refusal(
            f"{repo}: {candidates[0]} does not parse as Python 3, and no other source does"
        )
    return files


def packages(files):
    """The top-level names under which the sources can be imported."""
    paths = set(sources(files))
    names = {package_root(path, paths)[1].split(".")[0] for path in paths}
    return sorted(names - {"setup", "__init__"})
