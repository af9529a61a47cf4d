"""copies.py: where else the code of a deleted feature stands.

A feature is deleted from its own file, but a repository and a machine hold more. Three kinds of
copies would hand an agent the answer:

    in the tree, by name      an index of definitions, an archive of sources (`telltales`)
    in the tree, by content   a backup, a notebook, a page of docs (`without_copies`)
    on the machine            the same package installed for some Python (`installed_copies`):
                              the sandbox hides these places

A module that needs the very same code for a purpose of its own has to stay. Such a feature makes no
task, since its code could still be copied from there.

How a text is searched for code, whatever its form, is repositories/leftovers.py.
"""

import functools
import importlib.metadata
import os
import re
import sys
import zipfile
from pathlib import Path

from repositories import leftovers
from repositories.deletion import sources
from world.machine import shown_folders
from world.tree import PROTECTED
from repositories.source import code_lines, file_of_test, find_test, package_root
from world.untrusted import FUNCTIONS


def installed_copies(files):
    """Paths of this machine, visible in a sandbox, that would give an agent the original.

    Two rules. An installed distribution is hidden, whatever its version, if it owns a file that the
    repository has under the same name. Anywhere else the text decides, since `utils` may be
    anybody's: a folder, a module or an archive is hidden if it holds most of the same files,
    another version's included."""
    packages, found = package_texts(files), set()

    # 1) Every package has an __init__: it tells two of them apart only where there is nothing else.
    own = set()
    for top, texts in packages.items():
        telling = [path for path in texts if path != "__init__.py"] or texts
        own |= {f"{top}/{path}" if path else top for path in telling}
    for folder, paths in installed_files(tuple(sys.path), shown_folders()):
        if own & paths:
            found |= {Path(folder, owned_place(path, paths)) for path in paths}

    # 2) Copies elsewhere: in another package, for another Python, in an archive.
    for name, place in places(frozenset(packages)):
        if holds_most(packages[name], place):
            found.add(place)
    for archive in machine_index(shown_folders())[""]:
        if any(holds_most(packages[name], place) for name, place in packed(archive, packages)):
            found.add(Path(archive))

    # What Python has compiled lies beside a module, in a folder that it shares with others.
    for place in [place for place in found if place.suffix == ".py"]:
        found |= set(place.parent.glob(f"__pycache__/{place.stem}.*.pyc"))
    return sorted(map(str, found))


def package_texts(files):
    """{folder of a package, or file of a module: {path below it: text}} of the repository's
    sources, with the path "" for a module itself."""
    paths, found = set(sources(files)), {}
    for path in paths:
        root, _ = package_root(path, paths)
        top, _, below = path.removeprefix(f"{root}/" if root else "").partition("/")
        found.setdefault(top, {})[below] = files[path]
    found.pop("__init__.py", None)
    return found


@functools.lru_cache(4)
def installed_files(search_path, shown):
    """[(folder, the paths of its files below it)] of every distribution that is installed for this
    Python (search_path: sys.path) in one of the shown folders. Programs are left out."""
    found = []
    for one in importlib.metadata.distributions(path=list(search_path)):
        folder = str(one.locate_file(""))
        if f"{os.path.realpath(folder)}/".startswith(tuple(f"{top}/" for top in shown)):
            paths = {str(path) for path in one.files or ()}
            outside = {path for path in paths if path.startswith(("../", "__pycache__/"))}
            found.append((folder, paths - outside))
    return found


def owned_place(path, paths):
    """What to hide of a distribution with these paths for one of them: the outermost folder that
    belongs to it alone (a package, its metadata), or the file. Others may share any other folder.
    """
    parts = path.split("/")
    for number in range(1, len(parts)):
        folder = "/".join(parts[:number])
        if f"{folder}/__init__.py" in paths or folder.endswith((".dist-info", ".egg-info")):
            return folder
    return path


DEFINITION = re.compile(r"^[ \t]*(?:async )?(?:def|class) \w", re.MULTILINE)


def holds_most(texts, place):
    """True if a place holds most of these files, {path below it: text}, as they are or in another
    version. Those without a definition (an empty __init__, a version's number) say nothing."""
    number = copied = 0
    for path, text in texts.items():
        if DEFINITION.search(text):
            number += 1
            copied += leftovers.is_copy(read_text(place / path if path else place), text)
    return 2 * copied > number


def read_text(place):
    """The text of a file on disk or in an archive; "" where there is none."""
    try:
        return place.read_text(encoding="utf-8", errors="replace")
    except (KeyError, *leftovers.UNREADABLE_ARCHIVE):
        return ""


@functools.lru_cache(4)
def machine_index(tops):
    """{name of a folder or module: the folders that hold one} of all below these folders; under ""
    the archives of Python packages, for example the wheels of ensurepip."""
    found = {"": []}
    for top in tops:
        for folder, folders, names in os.walk(top):
            for name in (*folders, *(name for name in names if name.endswith(".py"))):
                found.setdefault(name, []).append(folder)
            archives = [name for name in names if name.endswith((".whl", ".egg", ".pyz"))]
            found[""] += [os.path.join(folder, name) for name in archives]
    return found


def places(names):
    """[(name, place)] of every folder or module with one of these names in what a sandbox shows of
    this machine."""
    index = machine_index(shown_folders())
    return [(name, Path(folder, name)) for name in names for folder in index.get(name, ())]


def packed(archive, names):
    """[(name, place)] of every folder or module with one of these names in an archive. One that is
    damaged or encrypted holds nothing that could be read."""
    try:
        opened = zipfile.ZipFile(archive)
    except leftovers.UNREADABLE_ARCHIVE:
        return []
    found = set()
    for member in opened.namelist():
        parts = member.split("/")
        found |= {(part, "/".join(parts[: n + 1])) for n, part in enumerate(parts) if part in names}
    return [(name, zipfile.Path(opened, place)) for name, place in found]


def telltales(files, names):
    """Files that are neither Python nor prose and still hold a deleted identifier: as text, as
    bytes, or in an archive.

    A text without a suffix (LICENSE, Makefile) may hold any word. It counts only where `def` or
    `class` stands before the name, as in an index of definitions."""
    # Sources and prose are passed over.
    prose = (".py", ".md", ".rst", ".txt", ".toml", ".cfg", ".ini", ".in", ".yml", ".yaml")
    found = []
    for path, text in files.items():
        if path.endswith(prose):
            continue
        # In a file of plain words a name alone says nothing: its definition has to be there.
        is_plain = "." not in Path(path).name.lstrip(".") and "\0" not in text
        before = rb"(?:def|class)\s+" if is_plain else rb"\b"
        words = re.compile(before + rb"(?:%s)\b" % "|".join(names).encode())

        # The file as it is, and whatever is packed in it.
        data = text.encode("utf-8", "surrogateescape")
        if any(map(words.search, leftovers.unpacked(data))):
            found.append(path)
    return found


def without_copies(files, base, lost, gone):
    """(base without the files that hold the deleted code, whether a file that has to stay holds
    it). lost: the deleted definitions; gone: whether they were deleted as a whole.

    The content decides, not the file's name: backups, builds, checkpoints of notebooks, archives,
    and docs that quote a body are left out. A module that holds the very same code for a purpose of
    its own has to stay, and so have the tests."""
    base, copied, origins = dict(base), False, {one.path for one in lost}
    code_paths = set(sources(files))
    for one in lost:
        # The code of a class is that of its methods; where they are stubs, each is listed by
        # itself.
        nodes = one.nodes
        if one.kind == "class":
            nodes = [part for node in one.nodes for part in node.body] if gone else []
        for node in nodes:
            if not isinstance(node, FUNCTIONS):
                continue

            # Half of the lines are enough to leave a file out. A source may go only if most of its
            # lines are lines of the original. A file that has to stay counts as a copy only if it
            # holds every line of several that say something: one line may be chance.
            lines = code_lines(files[one.path], node)
            several = len(leftovers.distinctive(lines)) > 1
            for path, text in list(base.items()):
                if not leftovers.holds_code(text, lines, node.name):
                    continue
                is_source = path in code_paths and not leftovers.is_copy(text, files[one.path])
                if not is_source and path not in origins and not PROTECTED.search(path):
                    del base[path]
                elif several and leftovers.holds_code(text, lines, node.name, every=True):
                    copied = True
    return base, copied


def without_test_copies(files, base, hidden):
    """The tree without those files that are not Python and hold the code of a hidden test."""
    out = dict(base)
    for group in hidden:
        stored = files[file_of_test(group)]
        node = find_test(stored, group)
        lines = code_lines(stored, node)
        for path, text in base.items():
            if not path.endswith(".py") and leftovers.holds_code(
                text, lines, node.name, every=True
            ):
                out.pop(path, None)
    return out
