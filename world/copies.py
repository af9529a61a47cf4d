"""copies.py: where else the code of a deleted feature stands.

A feature is deleted from its own file, but a repository and a machine hold more. Three kinds of
copies would hand an agent the answer:

    in the tree, by name      an index of definitions, an archive of sources (`telltales`)
    in the tree, by content   a backup, a notebook, a page of docs (`without_copies`)
    on the machine            the same package installed for some Python (`installed_copies`):
                              the sandbox hides these places

A module that needs the very same code for a purpose of its own has to stay. Such a feature makes no
task, since its code could still be copied from there.

How a text is searched for code, whatever its form, is world/leftovers.py.
"""

import functools
import importlib.metadata
import os
import re
import sys
import zipfile
from pathlib import Path

from world import leftovers
from world.hygiene import PROTECTED, importable, sources
from world.source import FUNCTIONS, code_lines, find_test, package_root
from world.tree import Link


def installed_copies(files):
    """Paths of this machine, visible in a sandbox, that would give an agent the original.

    Two rules. What the installed metadata say that a package of this name owns is hidden, whatever
    its version. Anywhere else the text decides, since `utils` may be anybody's: a folder or module
    of the same name is hidden where it holds most of the same files, another version's included."""
    # 1) What is installed under a name of the repository goes as a whole, with its metadata.
    found, names = set(), set(importable(files))
    for distribution in importlib.metadata.distributions():
        owned = owned_places(distribution)
        if names & owned.keys():
            found |= whole_packages(owned)
            found.add(Path(distribution.locate_file(distribution._path)))

    # 2) Copies elsewhere: in another package, for another Python, in an archive.
    packages = package_texts(files)
    for place in places(frozenset(packages)):
        texts = packages[place.name]
        if holds_most(texts, lambda path: read(place / path if path else place)):
            found.add(place)
    found |= {place for place in archives() if archive_holds(place, packages)}

    # What Python has compiled lies beside a module, in a folder that it shares with others.
    for place in [place for place in found if place.suffix == ".py"]:
        found |= set(place.parent.glob(f"__pycache__/{place.stem}.*.pyc"))
    return sorted(map(str, found))


def package_texts(files):
    """{folder of a package, or file of a module: {path below it: text}} of the repository's sources,
    with the path "" for a module itself"""
    paths, found = set(sources(files)), {}
    for path in paths:
        root, _ = package_root(path, paths)
        top, _, below = path.removeprefix(f"{root}/" if root else "").partition("/")
        found.setdefault(top, {})[below] = files[path]
    # every package may have one: the name says nothing
    found.pop("__init__.py", None)
    return found


def holds_most(texts, read_other):
    """Does a place hold most of these files, {path: text}, as they are or in another version? Those
    without a definition (an empty __init__, a version's number) say nothing. read_other: path ->
    the text there, "" where there is none"""
    telling = {path: text for path, text in texts.items() if re.search(DEFINITION, text)}
    copied = sum(leftovers.is_copy(read_other(path), text) for path, text in telling.items())
    return 2 * copied > len(telling)


DEFINITION = re.compile(r"^[ \t]*(?:async )?(?:def|class) \w", re.MULTILINE)


def read(place):
    """The text of a file; "" where there is none"""
    try:
        return place.read_text(errors="replace")
    except OSError:
        return ""


def owned_places(distribution):
    """{name that an installed distribution is imported by: its files}. Its programs and its
    metadata are left out."""
    owned = {}
    for path in distribution.files or ():
        top = path.parts[0]
        if top not in ("..", "__pycache__") and not top.endswith((".dist-info", ".egg-info")):
            place = Path(distribution.locate_file(path))
            owned.setdefault(top.split(".")[0], set()).add(place)
    return owned


def whole_packages(owned):
    """The files of a distribution, a package as its folder. A namespace package's folder belongs to
    others too, so there the files are listed. owned: see owned_places"""
    found = set()
    for name, places in owned.items():
        for place in places:
            top = next((folder for folder in place.parents if folder.name == name), None)
            is_package = top is not None and top / "__init__.py" in places
            found.add(top if is_package else place)
    return found


@functools.lru_cache(16)
def places(names):
    """Every folder or file with one of these names in what a sandbox shows of this machine, but for
    folders that hold Python itself or its library"""
    python = [os.path.realpath(sys.executable), os.path.realpath(os.__file__)]
    found = []
    for top in {"/usr", sys.prefix, sys.base_prefix}:
        for folder, folders, files in os.walk(top):
            for name in names & {*folders, *files}:
                place = os.path.join(folder, name)
                if not any(path.startswith(f"{os.path.realpath(place)}/") for path in python):
                    found.append(Path(place))
    return found


@functools.lru_cache(1)
def archives():
    """Archives of Python packages that a sandbox shows of this machine, for example the wheels of
    ensurepip."""
    found = []
    for top in {"/usr", sys.prefix, sys.base_prefix}:
        for folder, _, names in os.walk(top):
            found += [
                Path(folder, name) for name in names if name.endswith((".whl", ".egg", ".pyz"))
            ]
    return found


def archive_holds(place, packages):
    """True if an archive holds a copy of one of these packages or modules, anywhere inside.
    packages: see package_texts"""
    try:
        with zipfile.ZipFile(place) as archive:
            members = archive.namelist()
            for top, texts in packages.items():
                # Where this package stands in the archive, if it does.
                inside = {f"/{member}".partition(f"/{top}") for member in members}
                for before in {before for before, name, _ in inside if name}:
                    folder = f"{before}/{top}".lstrip("/")

                    def read_member(path):
                        name = f"{folder}/{path}" if path else folder
                        data = archive.read(name) if name in members else b""
                        return data.decode("utf-8", "replace")

                    if holds_most(texts, read_member):
                        return True
    # An archive that is damaged or encrypted holds nothing that could be read.
    except leftovers.UNREADABLE_ARCHIVE:
        pass
    return False


def telltales(files, names):
    """Files that are neither Python nor prose and still hold a deleted identifier: as text, as
    bytes, or in an archive.

    A text without a suffix (LICENSE, Makefile) may hold any word. It counts only where `def` or
    `class` stands before the name, as in an index of definitions."""
    # Sources, prose and links are passed over.
    prose = (".py", ".md", ".rst", ".txt", ".toml", ".cfg", ".ini", ".in", ".yml", ".yaml")
    found = []
    for path, text in files.items():
        if path.endswith(prose) or isinstance(text, Link):
            continue
        # In a file of plain words a name alone says nothing: its definition has to be there.
        is_plain = "." not in Path(path).name.lstrip(".") and "\0" not in text
        before = rb"(?:def|class)\s+" if is_plain else rb"\b"
        words = [re.compile(before + name.encode() + rb"\b") for name in names]

        # The file as it is, and whatever is packed in it.
        data = text.encode("utf-8", "surrogateescape")
        for part in leftovers.unpacked(data):
            if any(word.search(part) for word in words):
                found.append(path)
                break
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
            nodes = []
            if gone:
                for node in one.nodes:
                    nodes += node.body
        for node in nodes:
            if not isinstance(node, FUNCTIONS):
                continue

            # What is looked for: the function's lines of code, and whether more than one of them
            # says something by itself.
            lines = code_lines(files[one.path], [node])
            several = len(leftovers.distinctive(lines)) > 1
            for path, text in list(base.items()):
                # Another source may go only if most of its lines are lines of the original.
                may_go = path not in origins and not PROTECTED.search(path)
                if path in code_paths:
                    may_go = may_go and leftovers.is_copy(text, files[one.path])

                # Half of the lines are enough to leave a file out. A file that has to stay counts
                # as a copy only if it holds every line of several: one line may be chance.
                if may_go and leftovers.holds_code(text, lines, node.name):
                    del base[path]
                elif may_go or not several:
                    continue
                elif leftovers.holds_code(text, lines, node.name, every=True):
                    copied = True
    return base, copied


def without_test_copies(files, base, hidden):
    """The tree without those files that are not Python and hold the code of a hidden test."""
    base = dict(base)
    for group in hidden:
        node = find_test(files[group.split("::")[0]], group)
        lines = code_lines(files[group.split("::")[0]], [node])
        for path in [path for path in base if not path.endswith(".py")]:
            if leftovers.holds_code(base[path], lines, node.name, every=True):
                del base[path]
    return base
