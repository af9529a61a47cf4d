"""tree.py: which files of a tree decide a verdict.

A tree is a repository's files in memory: path -> text, where bytes that are no text are surrogates.
Left out: permission bits and symbolic links. A test that needs one fails in the study of its
repository, too, and is left out there.
"""

import re

# What decides a verdict, so that no submission may change it: tests, their configuration, and files
# that run before a program starts.
PROTECTED = re.compile(
    r"(^|/)tests?/"
    r"|(^|/)(tests|test_[^/]*|[^/]*_test|conftest|sitecustomize|usercustomize|noxfile|setup)\.py$"
    r"|(^|/)(\.?pytest\.(ini|toml)|tox\.ini|setup\.cfg|pyproject\.toml|\.coveragerc)$|\.pth$"
)


def is_protected(path):
    """Whether a file is a test or configuration, which no submission may change."""
    return bool(PROTECTED.search(path)) or path == "check.py"
