"""What still gives a deleted feature away, found by content and not by name.

A repository holds more than its sources: editors' backups, notebooks' checkpoints, builds,
archives, docs that quote the code. `holds_code` looks for the deleted lines in any of them: as text
in any white space, as UTF-16, between HTML tags, in JSON strings, in archives and compressed files.
Bytecode is recognised by its first bytes. Code that was rewritten, encrypted, or encoded in any
other way is not found."""

import bz2
import functools
import html
import io
import json
import lzma
import re
import tarfile
import zipfile
import zlib

MOST_UNPACKED = 32 << 20  # bytes of one archive that are looked at
# What reading an archive may raise: it is damaged, encrypted, or packed in a way that this Python
# does not know.
UNREADABLE_ARCHIVE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,  # NotImplementedError is one
)


def is_bytecode(data):
    """True for a compiled Python file, whatever it is called: it begins with the magic number of a
    CPython 3, a CR and an LF. The zero byte rules out a text that begins alike."""
    number = int.from_bytes(data[:2], "little")
    return data[2:4] == b"\r\n" and 3000 <= number < 4000 and b"\0" in data[4:16]


# A compressed file's first bytes -> its decompressor. 31: zlib expects the head and the end of gzip
# around the data.
DECOMPRESSORS = {
    b"\x1f\x8b": lambda: zlib.decompressobj(31),
    b"\x78\x01": zlib.decompressobj,
    b"\x78\x9c": zlib.decompressobj,
    b"\x78\xda": zlib.decompressobj,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\0": lzma.LZMADecompressor,
}


def unpacked(data, depth=2):
    """The bytes themselves and, for an archive or a compressed file, those of what is in it;
    archives in archives down to `depth` levels."""
    yield data
    if depth == 0:
        return

    # A zip archive, a compressed file, a tar archive: recognised by their bytes, never by their
    # names. Members that are too large are passed over.
    try:
        for start, decompressor in DECOMPRESSORS.items():
            if data.startswith(start):
                yield from unpacked(decompressor().decompress(data, MOST_UNPACKED), depth - 1)
        if zipfile.is_zipfile(io.BytesIO(data)):
            archive = zipfile.ZipFile(io.BytesIO(data))
            members = [member for member in archive.infolist() if member.file_size < MOST_UNPACKED]
            for member in members:
                yield from unpacked(archive.read(member), depth - 1)
        elif data[257:262] == b"ustar":
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                for member in archive:
                    if member.isfile() and member.size < MOST_UNPACKED:
                        yield from unpacked(archive.extractfile(member).read(), depth - 1)

    # Nothing more is found in it.
    except UNREADABLE_ARCHIVE:
        return


def json_strings(value):
    """Every string in a value that was read from JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from json_strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from json_strings(item)


def squeeze(text):
    """The text without any white space, so that indentation, wrapping and line ends do not hide a
    copy."""
    return re.sub(r"\s+", "", text)


@functools.lru_cache(4096)
def readings(stored):
    """The texts that the content of a file may be read as, each without white space. stored: the
    file as text, with surrogates for bytes that are no text."""
    found, room = [], MOST_UNPACKED
    for part in unpacked(stored.encode("utf-8", "surrogateescape")):
        room -= len(part)
        # An archive may hold a thousand times its own size.
        if room < 0 and found:
            break

        # Read it as plain text, as UTF-16, as HTML without its tags, and as the strings of a JSON
        # file (a notebook keeps its code in such strings).
        text = part.decode("utf-8", "replace")
        found.append(squeeze(text))
        if b"\0" in part[:200]:
            found.append(squeeze(part.decode("utf-16-le", "replace")))
            found.append(squeeze(part.decode("utf-16-be", "replace")))
        if "</" in text or "&lt;" in text or "&quot;" in text or "&#" in text:
            found.append(squeeze(html.unescape(re.sub(r"<[^<>]*>", "", text))))
        if text.lstrip()[:1] in ("{", "["):
            try:
                found.append(squeeze("".join(json_strings(json.loads(text)))))
            except (ValueError, RecursionError):
                pass
    return tuple(found)


def distinctive(lines):
    """Those of these lines of code that say something by themselves: each once, without white
    space."""
    found = []
    for line in lines:
        short = squeeze(line)
        plain = re.fullmatch(r"(return|raise|yield|del|assert|import|pass|else|try)\w*:?", short)
        if len(short) >= 8 and not plain and short not in found:
            found.append(short)
    return found


def holds_code(stored, lines, name, every=False):
    """True if a file holds a deleted body: all of it in one piece, or more than half of its
    distinctive lines (with `every`, all of them).

    lines: the body's lines of code; name: the function's name. One line alone may be there by
    chance, so the name has to be there, too."""
    wanted, whole = distinctive(lines), "".join(map(squeeze, lines))
    # A copy may have its lines in one piece, or mixed with others. A very short body is never
    # looked for in one piece.
    one_piece = len(lines) > 1 and len(whole) >= 12
    if not wanted and not one_piece:
        return False
    for text in readings(stored):
        if one_piece and whole in text:
            return True
        found = sum(line in text for line in wanted)
        enough = 0 < found == len(wanted) or (not every and 2 * found > len(wanted))
        if enough and (len(wanted) > 1 or name in text):
            return True
    return False


def is_copy(text, original):
    """True if at least 60 % of a file's lines are lines of the original, as in a backup, a build or
    another version of it."""
    lines = [squeeze(line) for line in text.split("\n") if line.strip()]
    known = {squeeze(line) for line in original.split("\n")}
    return bool(lines) and sum(line in known for line in lines) >= 0.6 * len(lines)
