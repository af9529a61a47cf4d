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
import os
import re
import sys
import zipfile
from pathlib import Path

from repositories import leftovers
from repositories.repo_files import sources
from world.tree import PROTECTED
from repositories.source import code_lines, find_test, package_root
from world.untrusted import FUNCTIONS
from world.tree import Link


def installed_copies(files):
    """Paths of this machine, visible in a sandbox, that would give an agent the original. It may be
    installed for this Python or for another, inside another package, or in an archive of packages.
    Beside a module its bytecode is listed, too.

    In this Python's site-packages a name from the repository's root or from src/ decides, as only
    one package can have it. Anywhere else half of the names defined have to agree as well: `utils`
    may be anybody's."""
    # What the repository defines, under the names by which it can be imported.
    paths = set(sources(files))
    by_name = set()
    # folder of a package, or file of a module -> names that it defines
    defined = {}
    for path in paths:
        root, _ = package_root(path, paths)
        name = Path(path).relative_to(root or ".").parts[0]
        if root in ("", "src"):
            by_name.add(name.removesuffix(".py"))
        defined.setdefault(name, set()).update(names_defined(files[path]))
    # every package may have one: the name says nothing
    defined.pop("__init__.py", None)

    # Installed for this Python: the name decides.
    found = []
    for folder in {path for path in sys.path if "site-packages" in path or "dist-packages" in path}:
        if not Path(folder).is_dir():
            continue
        for place in Path(folder).iterdir():
            stem = re.split(r"[-.]", place.name.removeprefix("__editable__."))[0].replace("-", "_")
            if stem in by_name:
                found.append(place)

    # Elsewhere on the machine: the names that are defined decide.
    python = [os.path.realpath(sys.executable), os.path.realpath(os.__file__)]
    for name, place in places(frozenset(defined)):
        # All Python of the place, and apart from it that of its outermost folder: another version,
        # or a copied part of the package, may agree there only.
        texts, outermost = {}, []
        for path in place.rglob("*.py*") if place.is_dir() else [place]:
            if path.suffix in (".py", ".pyi") and path.is_file():
                texts[path] = path.read_text(errors="replace")
                if not place.is_dir() or path.parent == place:
                    outermost.append(texts[path])

        # A folder that holds Python itself or its library cannot be hidden.
        if same_names(defined[name], outermost) or same_names(defined[name], texts.values(), 0.25):
            if not any(path.startswith(f"{os.path.realpath(place)}/") for path in python):
                found.append(place)
    found += [archive for archive in archives() if archive_holds(archive, defined)]

    # What Python has compiled lies beside a module, in a folder that it shares with others.
    for place in [place for place in found if place.suffix == ".py"]:
        found += place.parent.glob(f"__pycache__/{place.stem}.*.pyc")
    return sorted({str(place) for place in found})


def names_defined(text):
    """Names of all functions and classes, also of a source that does not parse."""
    return set(re.findall(r"^[ \t]*(?:async )?(?:def|class) (\w+)", text, re.M))


def same_names(own, texts, share=0.0):
    """True if `own` and the names that these texts define have more than half of the shorter list
    in common, and at least `share` of the longer list."""
    theirs = set().union(*map(names_defined, texts))
    common = len(theirs & own)
    shorter, longer = sorted((len(theirs), len(own)))
    return 2 * common > shorter and common >= share * longer


@functools.lru_cache(16)
def places(names):
    """(name, place) of every folder or file with one of these names, in what a sandbox shows of
    this machine."""
    found = []
    for top in {"/usr", sys.prefix, sys.base_prefix}:
        for folder, folders, files in os.walk(top):
            found += [(name, Path(folder, name)) for name in names & {*folders, *files}]
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


def archive_holds(place, defined):
    """True if an archive holds a copy of one of these packages or modules, anywhere inside."""
    try:
        with zipfile.ZipFile(place) as archive:
            # Per package the files in its folder, wherever that stands in the archive.
            members = [member for member in archive.namelist() if member.endswith(".py")]
            for name, own in defined.items():
                inside = [member for member in members if name in member.split("/")]
                texts = [archive.read(member).decode("utf-8", "replace") for member in inside]
                if texts and same_names(own, texts, 0.25):
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
