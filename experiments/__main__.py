"""python -m experiments: the questions, and what was found, a line each."""

import ast
import re
import sys
from pathlib import Path

from command.output_files import print_for_reader

OTHERS = {"__init__", "__main__", "runner", "tables"}


def questions():
    """-> {name: (the question in the first line of the file's head, the first sentence of what was
    found)}"""
    # The heads are read without importing the files, which would import all of train.py.
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in OTHERS:
            head = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            question = head.splitlines()[0].partition(": ")[2]
            sentence = re.search(r"^Found.*?\.(?=\s|$)", head, re.M | re.S)
            found[path.stem] = question, " ".join(sentence[0].split())
    return found


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1:] not in (["-h"], ["--help"]):
        print(
            f"experiments: {sys.argv[1]!r}: a question is asked as python -m experiments.NAME; "
            "python -m experiments lists them",
            file=sys.stderr,
        )
        raise SystemExit(2)
    lines = []
    for name, (question, sentence) in questions().items():
        lines.append(f"python -m experiments.{name:12s} {question}\n    {sentence}")
    print_for_reader("\n".join(lines))
