"""editable.py: what `pip install --editable` adds to a repository.

The authors of a suite run it where their package is installed: Python finds the package from any
folder, and importlib.metadata finds its name, version and entry points. Here no build of a stranger
is run. The folders of the sources are put on Python's path (world/sandbox.py), and the metadata are
written into the tree, from what the repository declares.

    import_roots   -> the folders that go on Python's path
    metadata       -> {path: text} of the .dist-info folder

Ours, after the specification of installed projects (packaging.python.org). Left out: the programs
of [project.scripts], versions that only a build can tell, entry points that setup.py or setup.cfg
declare and no build has written down.
"""

import ast
import email
import json
import re
from pathlib import Path

from repositories.deletion import sources
from repositories.source import called_name, package_root
from world.untrusted import parsed
from repositories.suite import read_ini, read_toml

BUILD_FILES = ("pyproject.toml", "setup.cfg", "setup.py")


def import_roots(files):
    """The folders, relative to the root, from which the packages are imported: the root, src/, and
    any other one that a build file names and that holds a package."""
    paths = set(sources(files))
    folders = {package_root(path, paths)[0] for path in paths} - {"", "src"}
    build = "\n".join(files.get(name, "") for name in BUILD_FILES)

    # It is named as a word of its own: lib in `where = ["lib"]`, in `package_dir = =lib`.
    named = []
    for folder in sorted(folders):
        if re.search(rf"(?m)(?:^|[\"'=\s])(?:\./)?{re.escape(folder)}/?(?:[\"'\s]|$)", build):
            named.append(folder)
    return ["", "src", *named]


def metadata(files, repo=None):
    """{path: text} of the package's .dist-info folder; {} where no file tells its name.

    files: the tree; repo: the folder it was copied from, in which a build may have left metadata
    that a copy leaves out."""
    # The PKG-INFO of a source distribution has headers like those of a letter. A setup.py gives
    # literal arguments; the other files are tables.
    headers = email.message_from_string(files.get("PKG-INFO", ""))
    arguments = setup_arguments(files)
    declared = read_toml(files.get("pyproject.toml", ""))
    project, poetry = table(declared, "project"), table(declared, "tool", "poetry")
    config = read_ini(files.get("setup.cfg", ""))
    tables = [headers, project, poetry, config.get("metadata", {}), arguments]

    # The first one that tells a name or a version decides. A version that only a build works out is
    # not known.
    name = first_word(tables, "name")
    version = first_word(tables, "version") or "0"
    if not name:
        return {}

    # The files that pip writes.
    stem = re.sub(r"[-_.]+", "_", name).lower()
    folder = f"{stem}-{version}.dist-info"
    found = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "INSTALLER": "pip\n",
        "direct_url.json": json.dumps({"dir_info": {"editable": True}, "url": "file:///work"}),
    }
    points = built_points(repo) or declared_points(project, poetry)
    if points:
        found["entry_points.txt"] = points
    found["RECORD"] = "".join(f"{folder}/{path},,\n" for path in [*sorted(found), "RECORD"])
    return {f"{folder}/{path}": text for path, text in found.items()}


def table(node, *keys):
    """The table below these keys of a parsed file; {} where there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def first_word(tables, key):
    """The first value of a key that has the form of a name or a version; "" where none has."""
    for one in tables:
        word = one.get(key, "")
        if isinstance(word, str) and re.fullmatch(r"\w[\w.+!-]*", word.strip()):
            return word.strip()
    return ""


def setup_arguments(files):
    """{name: value} of the literal arguments that setup.py gives to setup()."""
    found = {}
    for node in ast.walk(parsed(files.get("setup.py", ""))):
        if not isinstance(node, ast.Call) or called_name(node) != "setup":
            continue
        for word in node.keywords:
            try:
                found[word.arg] = ast.literal_eval(word.value)
            except (ValueError, TypeError, RecursionError):
                pass  # it is worked out when setup.py runs
    return found


def declared_points(project, poetry):
    """The text of entry_points.txt by the tables of pyproject.toml: groups, and scripts."""
    groups = {
        "console_scripts": {**table(poetry, "scripts"), **table(project, "scripts")},
        **table(poetry, "plugins"),
        **table(project, "entry-points"),
    }
    text = ""
    for group in groups:
        points = table(groups, group).items()
        lines = [f"{name} = {value}" for name, value in points if isinstance(value, str)]
        text += "\n".join([f"[{group}]", *lines, "", ""]) if lines else ""
    return text


def built_points(repo):
    """The entry_points.txt that a build has left in the folder, as in every source distribution; ""
    where there is none."""
    for folder in ("", "src"):
        for place in sorted(Path(repo, folder).glob("*.egg-info/entry_points.txt")) if repo else ():
            if place.is_file() and not place.is_symlink():
                return place.read_text(encoding="utf-8", errors="replace")[: 1 << 20]
    return ""
