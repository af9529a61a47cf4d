"""A repository's files in memory: path -> text, where a text may know that it is executable or that
it is a link.

Such texts (FileText, Link) are strings all the same, so that a tree stays a plain dictionary that
every function can read, compare and write as JSON. What JSON forgets is kept in two fields of the
task's `meta`: `modes` (path -> permission bits) and `links` (a list of paths)."""

import os
import stat
from pathlib import Path


class FileText(str):
    """A file's text with permission bits other than the usual ones."""

    mode = None


class Link(str):
    """Where a symbolic link points to, relative to its own folder."""


def with_mode(text, mode):
    """The text of a file with these permission bits; its owner may always read it."""
    text = FileText(text)
    text.mode = stat.S_IMODE(mode) & 0o777 | stat.S_IRUSR
    return text


def has_own_mode(mode):
    """True for permission bits that a new file does not have by itself: it is executable, or its
    owner may not write it."""
    return bool(mode & 0o111) or not mode & stat.S_IWUSR


def read_link(place, root):
    """The Link of a symbolic link that stays inside the folder `root`, always relative; None for
    any other link."""
    inside, target = os.path.realpath(root), os.path.realpath(place)
    if target != inside and not target.startswith(inside + os.sep):
        return None
    written = os.readlink(place)

    # What the link says is kept, unless it is absolute. Through another link, `link/..` is not the
    # folder above `link`: where the words alone lead to another place than the file system does,
    # the true place is kept instead.
    by_words = os.path.normpath(os.path.join(os.path.realpath(place.parent), written))
    if os.path.isabs(written) or os.path.realpath(by_words) != target:
        written = os.path.relpath(target, os.path.realpath(place.parent))
    return Link(written)


def file_modes(files):
    """path -> permission bits of the files that have bits of their own."""
    return {path: text.mode for path, text in files.items() if isinstance(text, FileText)}


def tree_meta(files):
    """The fields `modes` and `links` for the `meta` of a tree's task; an empty one is left out."""
    modes = file_modes(files)
    links = sorted(path for path, text in files.items() if isinstance(text, Link))
    return {name: value for name, value in (("modes", modes), ("links", links)) if value}


def as_stored(files, meta):
    """The tree with the modes and links that `meta` names. Raises TypeError or ValueError where
    `meta` does not have the right form."""
    # Most trees have neither.
    modes, links = meta.get("modes", {}), meta.get("links", [])
    if not modes and not links:
        return files
    if type(modes) is not dict or type(links) is not list:
        raise TypeError("modes is a dictionary, links a list")

    # Plain texts become texts with a mode, or links.
    out = dict(files)
    for path, mode in modes.items():
        if path in out:
            out[path] = with_mode(out[path], int(mode))
    for path in links:
        if path in out:
            out[path] = Link(out[path])
            if not out[path] or "\0" in out[path]:
                raise ValueError(f"{path!r} is a link to nothing")
    return out


def with_links(tree, files):
    """The tree with the links of `files` that it lacks, since an agent hands in regular files
    only."""
    out = dict(tree)
    for path, text in files.items():
        # A file, or a folder, may have taken a link's place.
        replaced = path in tree or any(other.startswith(path + "/") for other in tree)
        if isinstance(text, Link) and not replaced:
            out[path] = text
    return out


def write_links(files, root):
    """Writes the links of a tree whose files are written already -> the first path that cannot be a
    link or leads out of the tree; None if all is well.

    Links come last, so no file is ever written through one. The file system is asked whether one
    leads out, since links that each look harmless may lead out together."""
    # Make all of them, whatever they point to.
    inside = os.path.realpath(root)
    places = []
    for path, target in files.items():
        if isinstance(target, Link):
            place = Path(root) / path
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                os.symlink(target, place)
            except OSError:
                return path
            places.append((path, place))

    # If one of them leads out, remove them all.
    for path, place in places:
        leads_to = os.path.realpath(place)
        if leads_to != inside and not leads_to.startswith(inside + os.sep):
            for _, other in places:
                os.unlink(other)
            return path
    return None


def keep_modes(tree, files):
    """The tree with the modes that its plain texts have in `files`: an edit in memory loses the
    mode of a file."""
    changed = {}
    for path, mode in file_modes(files).items():
        if path in tree and not isinstance(tree[path], FileText):
            changed[path] = with_mode(tree[path], mode)
    return {**tree, **changed}
