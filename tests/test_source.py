"""Reading real repositories as Python reads them, and deleting features without losing anything
else."""

import bz2
import codecs
import gzip
import io
import json
import os
import py_compile
import subprocess
import sys
import tarfile
import zipfile

import pytest

import synth_tasks as st
from repositories import cage
from repositories import verdict
from world import (
    untrusted,
    task as world_task,
    workspace as world_workspace,
)
from repositories import (
    copies as world_copies,
    deletion,
    task_checks,
    leftovers,
    study,
    run_suite,
    source,
    task_file,
    mutants,
)

GONE = dict(kind="gone", docstring=False)
STUB = dict(kind="function", docstring=True)
GROSS = "def gross(net):\n    tax = net // 5\n    total = net + tax\n    return total\n"
TWICE = "def twice(n):\n    a = n\n    b = n\n    return a + b\n"
CODE = GROSS + "\n\n" + TWICE
TEST = (
    "import shop.price\n\n\ndef test_gross():\n    assert shop.price.gross(10) == 12\n\n\n"
    "def test_more():\n    assert shop.price.gross(50) == 60\n\n\n"
    "def test_twice():\n    assert shop.price.twice(4) == 8\n\n\n"
    "def test_twice_more():\n    assert shop.price.twice(5) == 10\n"
)
SHOP = {"shop/__init__.py": "", "shop/price.py": CODE, "tests/test_price.py": TEST}


def cut(files, name, dials):
    """-> the files without the feature of this name; every Python file must still parse"""
    found = study.definitions(files)
    chosen = [one for one in found if one.name == name]
    assert len(chosen) == 1, [one.name for one in found]
    base, _ = st.delete_feature(files, chosen, dials, found)
    for path in base:
        if path.endswith(".py"):
            assert untrusted.is_python(base[path])
    return base


def write(root, files):
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def tasks_of(root, tmp_path, n=2, level=1):
    """-> (tasks, reasons) of a repository; an empty list where no task could be made"""
    out = tmp_path / "tasks.jsonl"
    out.unlink(missing_ok=True)
    try:
        _, reasons, _ = st.generate(str(root), str(out), n=n, level=level, jobs=2, time_limit=30)
    except world_task.Refusal as refusal:
        return [], str(refusal)
    return task_file.read_tasks(out), reasons


def names_of(tasks):
    return sorted(name for task in tasks for name in task.meta["names"])


# ------------------------------------------------------------ files as Python reads them
def stored(data):
    """Bytes as the text that tasks hold: a byte that is not UTF-8 becomes a surrogate"""
    return data.decode("utf-8", "surrogateescape")


ODD_FILES = {
    "a mark": codecs.BOM_UTF8 + CODE.encode(),
    "a mark and CRLF": codecs.BOM_UTF8 + CODE.replace("\n", "\r\n").encode(),
    "CRLF": CODE.replace("\n", "\r\n").encode(),
    "CR": CODE.replace("\n", "\r").encode(),
    "no last line end": CODE.rstrip("\n").encode(),
    "latin-1": (
        "# -*- coding: latin-1 -*-\nCITY = 'K\xf6ln'  # \xe4\n" + CODE + "X = '\xdf'\n"
    ).encode("latin-1"),
    "cp1252 in the second line": (
        "#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\nE = '\u20ac'\n" + CODE
    ).encode("cp1252"),
    "euc-jp": ("# coding: euc-jp\nE = '\u65e5\u672c'\n" + CODE).encode("euc-jp"),
    "form feeds": ("X = 1\n\x0c\n" + GROSS + "\n\x0c\n" + TWICE + "\x0c\n").encode(),
    "signs beyond ASCII": ("\u00fc = '\U0001f600'; \u00e4 = 1\n" + CODE).encode(),
    "other line separators": ("X = '\u2028\x85\x0b\x1c'\n" + CODE).encode(),
}


@pytest.mark.parametrize("title", ODD_FILES)
@pytest.mark.parametrize("name", ["gross", "twice"])
def test_a_body_is_cut_out_of_any_file_that_python_reads_and_every_other_byte_is_kept(title, name):
    data = ODD_FILES[title]
    end = b"\r\n" if b"\r\n" in data else b"\r" if b"\r" in data else b"\n"
    body = (GROSS if name == "gross" else TWICE).encode().split(b"\n", 1)[1].replace(b"\n", end)
    body = body.removesuffix(end)
    assert data.count(body) == 1
    base = cut({"m.py": stored(data)}, name, STUB)
    assert base["m.py"].encode("utf-8", "surrogateescape") == data.replace(
        body, b"    raise NotImplementedError"
    )


@pytest.mark.parametrize("title", ODD_FILES)
def test_a_definition_goes_with_the_blank_lines_after_it_and_nothing_else(title):
    data = ODD_FILES[title]
    gone = cut({"m.py": stored(data)}, "gross", GONE)["m.py"].encode("utf-8", "surrogateescape")
    end = b"\r\n" if b"\r\n" in data else b"\r" if b"\r" in data else b"\n"
    start = data.index(b"def gross")
    stop = start + len(GROSS.encode().replace(b"\n", end))
    while data[stop:].startswith(end):
        stop += len(end)
    assert gone == data[:start] + data[stop:]


def test_a_file_that_python_cannot_read_costs_itself_only(tmp_path):
    odd = {
        "scripts/old.py": "print 'hello'\n",
        "shop/tpl/{{name}}.py": "import {{ name }}\n",
        "samples/broken.py": "def f(:\n",
        "shop/nul.py": b"x = '\0'\n",
        "shop/bytes.py": b"# \xff\n",
        "shop/codec.py": b"# coding: nosuch\nx = 1\n",
        "shop/rot.py": b"# coding: rot13\nx = 1\n",
        "tests/data/bad.py": "class {\n",
    }
    root = write(tmp_path / "repo", {**SHOP, **odd})
    tasks, _ = tasks_of(root, tmp_path)
    assert names_of(tasks) == ["gross", "twice"]
    for task in tasks:
        for path, data in odd.items():
            data = data if isinstance(data, bytes) else data.encode()
            assert task.files[path].encode("utf-8", "surrogateescape") == data


def test_tests_in_a_latin_1_file_are_hidden_and_judged_with_the_values_they_have(tmp_path):
    code = "# coding: latin-1\ndef city(n):\n    first = 'K\xf6ln'\n    names = [first] * n\n    return names\n"
    test = (
        "# coding: latin-1\nfrom shop import city\n\n\ndef test_one():\n    assert city.city(1) == ['K\xf6ln']\n"
        "\n\ndef test_two():\n    assert city.city(2) == ['K\xf6ln', 'K\\u00f6ln'] != '\\u20ac'\n"
    )
    root = write(
        tmp_path / "repo",
        {
            "shop/__init__.py": "",
            "shop/city.py": code.encode("latin-1"),
            "tests/test_city.py": test.encode("latin-1"),
            "tests/test_other.py": "def test_a():\n    assert 1\n\n\ndef test_b():\n    assert 2\n",
        },
    )
    (task,), _ = tasks_of(root, tmp_path, n=1)
    wrong = task.files["shop/city.py"].replace("raise NotImplementedError", "return ['Koln'] * n")
    assert verdict.judge(task, {**task.files, **task.solution}, None).solved
    assert not verdict.judge(task, {**task.files, "shop/city.py": wrong}, None).solved


def test_a_function_in_the_first_line_of_its_file_does_not_count_as_run_at_import(tmp_path):
    root = write(tmp_path / "repo", SHOP)
    found = {
        one.name: one
        for one in study.study(str(root), time_limit=30, say=lambda _: None).definitions
    }
    assert not found["gross"].early and found["gross"].tests


# ------------------------------------------------------------ definitions that share a name
SAME_NAMES = {
    "property": (
        "C.p",
        "class C:\n    @property\n    def p(self):\n        a = self.a\n        return a\n\n"
        "    @p.setter\n    def p(self, a):\n        self.a = a\n        self.b = a\n\n"
        "    @p.deleter\n    def p(self):\n        self.a = 0\n\n    def q(self):\n        return 'kept'\n",
        3,
    ),
    "overloads": (
        "f",
        "from typing import overload\n\n\n@overload\ndef f(x: int) -> int: ...\n@overload\n"
        "def f(x: str) -> str:\n    ...\ndef f(x):\n    y = x\n    return y\n",
        1,
    ),
    "arms of an if": (
        "f",
        "import sys\nif sys.maxsize > 1:\n    def f(x):\n        a = x\n        return a\n"
        "else:\n    def f(x):\n        b = x\n        return b\n",
        2,
    ),
    "arms of a try": (
        "f",
        "try:\n    import nosuch\n    def f(x):\n        a = nosuch\n        return a\n"
        "except ImportError:\n    def f(x):\n        b = x\n        return b\nfinally:\n    X = 1\n",
        2,
    ),
    "a redefinition": (
        "f",
        "def f(x):\n    a = x\n    return a\n\n\ndef g():\n    return 'kept'\n\n\n"
        "def f(x):\n    b = x\n    return b\n",
        2,
    ),
    "an async twin": (
        "f",
        "import sys\nif sys.maxsize > 1:\n    async def f(x):\n        a = x\n        return a\n"
        "else:\n    def f(x):\n        b = x\n        return b\n",
        2,
    ),
    "methods of two arms": (
        "C.m",
        "import sys\nif sys.maxsize > 1:\n    class C:\n        def m(self):\n            a = 1\n"
        "            return a\nelse:\n    class C:\n        def m(self):\n            b = 1\n"
        "            return b\n",
        2,
    ),
}


@pytest.mark.parametrize("title", SAME_NAMES)
def test_definitions_that_share_a_name_are_one_feature_and_nothing_else_is_lost(title):
    name, text, bodies = SAME_NAMES[title]
    stub = cut({"m.py": text}, name, STUB)["m.py"]
    assert stub.count("raise NotImplementedError") == bodies
    assert not any(f" {letter} = " in stub for letter in "abc" if title != "property")
    assert stub.count("def ") == text.count("def ") and stub.count("kept") == text.count("kept")
    if "." not in name:
        gone = cut({"m.py": text}, name, GONE)["m.py"]
        assert f"def {name}(" not in gone and gone.count("kept") == text.count("kept")
        assert {line for line in gone.split("\n")} <= {line for line in text.split("\n")} | {
            "    pass"
        }


def test_a_name_that_is_a_class_here_and_a_function_there_is_no_candidate_and_neither_is_a_lone_underscore():
    text = (
        "import sys, other\nif sys.maxsize > 1:\n    class A:\n        x = 1\nelse:\n    def A():\n        return 1\n\n\n"
        "@other.f.register\ndef _(x):\n    return 1\n\n\n@other.g.register\ndef _(x):\n    return 2\n"
    )
    assert study.definitions({"m.py": text}) == []


def test_functions_that_are_registered_with_a_feature_stay_and_need_it():
    text = (
        "import functools\n\n\n@functools.singledispatch\ndef f(x):\n    a = x\n    return a\n\n\n"
        "@f.register\ndef _(x: int):\n    b = x\n    return b\n\n\n@f.register(str)\ndef _(x):\n"
        "    c = x\n    return c\n"
    )
    stub = cut({"m.py": text}, "f", STUB)["m.py"]
    assert stub == text.replace("    a = x\n    return a", "    raise NotImplementedError")
    gone = cut({"m.py": text}, "f", GONE)["m.py"]
    assert gone == text.replace(text[text.index("@functools") : text.index("@f.register\n")], "")
    with pytest.raises(NameError):  # so no such task is made: the module does not import
        exec(gone, {})


def test_features_between_decorators_and_comments_leave_no_line_of_theirs():
    text = (
        "import functools\nX = 1\n\n\n@functools.cache\n# why\n\n@(\n    # mail a@b.c\n    functools.cache\n)\n"
        "def f(x):\n    # first\n    a = x\n    return a\n    # the trick: a is x\n\n\n# of g\ndef g():\n    return 2"
    )
    assert (
        cut({"m.py": text}, "f", GONE)["m.py"]
        == "import functools\nX = 1\n\n\n# of g\ndef g():\n    return 2"
    )
    stub = cut({"m.py": text}, "f", STUB)["m.py"]
    assert stub == text.replace(
        "    # first\n    a = x\n    return a\n    # the trick: a is x",
        "    raise NotImplementedError",
    )
    assert cut({"m.py": text}, "g", GONE)["m.py"].endswith("# of g\n")


def test_a_statement_beside_its_docstring_is_no_candidate_for_a_stub_that_keeps_it():
    text = 'def f(x):\n    "doc"; return x\n'
    assert cut({"m.py": text}, "f", STUB)["m.py"] == text
    assert (
        cut({"m.py": text}, "f", dict(kind="function", docstring=False))["m.py"]
        == "def f(x):\n    raise NotImplementedError\n"
    )


def test_of_two_tests_with_one_name_the_last_is_hidden_and_the_dead_one_does_not_come_to_life():
    text = "def test_a():\n    assert 1 == 2\n\n\ndef test_b():\n    assert 1\n\n\ndef test_a():\n    assert 3 == 3\n"
    assert source.find_test(text, "t.py::test_a").lineno == 9
    left = task_checks.without_tests({"t.py": text}, ["t.py::test_a"])["t.py"]
    assert "test_a" not in left and "test_b" in left
    made = mutants.with_mutants({"t.py": text}, {"t.py::test_a": (0, 0)})["t.py"]
    assert made == text.replace("3 == 3", "3 == 4")
    twice = "class TestX:\n    def test_a(self):\n        assert 0\n\n\nclass TestX:\n    def test_a(self):\n        assert 1\n"
    assert source.find_test(twice, "t.py::TestX::test_a").lineno == 7
    assert task_checks.without_tests({"t.py": twice}, ["t.py::TestX::test_a"])[
        "t.py"
    ] == twice.replace("    def test_a(self):\n        assert 1\n", "    pass\n")


@pytest.mark.parametrize(
    "text",
    [
        "import sys\ndef test_a():\n    assert 1\nif sys.maxsize > 1:\n    def test_a():\n        assert 2\n",
        "def test_a():\n    assert 1\ntest_a = test_a\n",
        "def test_a():\n    assert 1\nfrom other import test_a\n",
    ],
)
def test_a_test_whose_name_is_bound_in_another_way_too_is_not_hidden(text):
    assert source.find_test(text, "t.py::test_a") is None


# ------------------------------------------------------------ names in imports and in __all__
# shop/__init__.py -> the same file after `gross` was removed, written by hand
EXPORTS = {
    "from .price import *\n__all__ = []\n__all__.extend(('twice', 'gross'))\n__all__.extend(['gross'])\n": "from .price import *\n__all__ = []\n__all__.extend(('twice',))\n__all__.extend([])\n",
    "from .price import gross, twice\n__all__ = ['gross', 'twice']\n": "from .price import twice\n__all__ = ['twice']\n",
    "from .price import twice, gross\n__all__ = ('twice', 'gross')\n": "from .price import twice\n__all__ = ('twice',)\n",
    "from .price import twice\nfrom .price import gross as g\n__all__ = 'g', 'twice', 'a'\na = 1\n": "from .price import twice\n__all__ = ('twice', 'a')\na = 1\n",
    "import os; from .price import gross; X = 1\n__all__ = ('gross',)\n": "import os; pass; X = 1\n__all__ = ()\n",
    "from .price import (\n    gross,  # the one\n    twice,  # kept\n)\n__all__ = [\n    'gross',  # the one\n    'twice',  # kept\n]\n": "from .price import twice\n__all__ = ['twice']\n",
    "from .price import twice, \\\n    gross\n__all__ = []\n__all__ += ['gross']\n": "from .price import twice\n__all__ = []\n__all__ += []\n",
    "from .price import gross, twice\n__all__: list = ['gross'] + ['twice', \"gross\"]\n": "from .price import twice\n__all__: list = [] + ['twice']\n",
    "import sys\nif sys.maxsize > 1:\n    from shop.price import gross\n    from .price import twice\nelse:\n    from shop.price import gross\n": "import sys\nif sys.maxsize > 1:\n    from .price import twice\nelse:\n    pass\n",
    "try:\n    from .fast import gross\nexcept ImportError:\n    from .price import gross\n__all__ = ['twice']\nfrom .price import twice\n": "try:\n    from .fast import gross\nexcept ImportError:\n    pass\n__all__ = ['twice']\nfrom .price import twice\n",
    "try:\n    from .price import gross, twice\nexcept ImportError:\n    pass\n__all__ = ['gross', 'twice']\n": "try:\n    from .price import twice\nexcept ImportError:\n    pass\n__all__ = ['twice']\n",
    "from .other import gross\nfrom .price import twice\n__all__ = ['gross']\n": "from .other import gross\nfrom .price import twice\n__all__ = ['gross']\n",
}


@pytest.mark.parametrize("before", EXPORTS)
def test_a_name_goes_out_of_every_form_of_import_and_of_all_and_the_package_imports(
    before, tmp_path
):
    files = {**SHOP, "shop/__init__.py": before, "shop/other.py": "def gross(n):\n    return n\n"}
    found = study.definitions(files)
    base = deletion.remove_definitions(
        files, [one for one in found if one.path == "shop/price.py" and one.name == "gross"]
    )
    assert base["shop/__init__.py"] == EXPORTS[before]
    write(tmp_path, base)
    subprocess.run([sys.executable, "-c", "from shop import *"], cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    "text",
    [
        "from .price import gross, twice\n__all__ = 'gross twice'.split()\n",
        "from .price import gross, twice\n__all__ = ['twice']\n__all__.append('gross')\n",
        "from .price import gross, twice\n__all__ = [gross.__name__, twice.__name__]\n",
        "from .price import gross, twice\n__all__ = {'gross', 'twice'}\n",
    ],
)
def test_a_form_of_all_that_is_not_edited_makes_no_task_of_the_whole_feature(text, tmp_path):
    files = {**SHOP, "shop/__init__.py": text}
    with pytest.raises(task_checks.Discard, match="`__all__` names it"):
        cut(files, "gross", GONE)
    assert cut(files, "gross", STUB)["shop/__init__.py"] == text
    # A word that only begins like the name is another one.
    longer = "from .price import gross\n__all__ = 'gross_total'.split()\n"
    assert "split" in cut({**SHOP, "shop/__init__.py": longer}, "gross", GONE)["shop/__init__.py"]


def test_what_python_could_not_read_after_the_cut_makes_no_task():
    text = "@(  # mail a@b.c\n    id\n)\ndef f(x):\n    a = x\n    return a\n"
    with pytest.raises(task_checks.Discard, match="cannot be cut out of its file"):
        cut({"m.py": text}, "f", GONE)
    assert cut({"m.py": text}, "f", STUB)["m.py"].endswith(
        "def f(x):\n    raise NotImplementedError\n"
    )


def test_a_name_is_followed_through_modules_that_hand_it_on():
    files = {
        "shop/__init__.py": "from .api import *\nfrom .api import cost\n__all__ = ['cost', 'twice']\n",
        "shop/api.py": "from .price import gross as cost, twice\n",
        "shop/price.py": CODE,
        "lib/more/__init__.py": "from shop import cost\nfrom shop.price import twice\n",
        "app.py": "from shop.api import cost, twice\n\n\ndef late():\n    from shop.api import cost\n    return cost\n",
    }
    base = cut(files, "gross", GONE)
    assert base["shop/__init__.py"] == "from .api import *\n__all__ = ['twice']\n"
    assert base["shop/api.py"] == "from .price import twice\n"
    assert base["lib/more/__init__.py"] == "from shop.price import twice\n"
    assert base["app.py"] == files["app.py"].replace("cost, twice", "twice")


USES_AT_IMPORT = [
    "from .price import gross\nX = gross(3)\n",
    "import shop.price\nTABLE = {'gross': shop.price.gross}\n",
    "from . import price\nnames = ['twice', 'gross']\n__all__ = list(names)\nfor n in names:\n    globals()[n] = getattr(price, n)\n",
    "from .price import gross\n\n\n@(lambda g: lambda f: f)(gross)\ndef f():\n    pass\n",
    "_where = {'gross': 'price'}\n__all__ = list(_where)\n\n\ndef __getattr__(name):\n    if name not in _where:\n"
    "        raise AttributeError(name)\n    from . import price\n    return getattr(price, name)\n",
]


@pytest.mark.parametrize("module", USES_AT_IMPORT)
def test_a_module_that_needs_the_feature_to_be_imported_is_found_whether_a_test_imports_it_or_not(
    module,
):
    files = {**SHOP, "shop/extra.py": module}
    sandbox = cage.repository_sandbox(files, 20)
    names = study.module_names(files, set())
    assert names == ["shop", "shop.extra", "shop.price"]
    assert run_suite.working_imports(files, sandbox, names, plan=None) == names
    after = run_suite.working_imports(cut(files, "gross", GONE), sandbox, names, plan=None)
    assert after == ["shop", "shop.price"]


def test_a_feature_without_which_the_package_does_not_import_is_no_candidate(tmp_path):
    root = write(tmp_path / "repo", {**SHOP, "shop/extra.py": USES_AT_IMPORT[0]})
    tasks, reasons = tasks_of(root, tmp_path, level=2)
    assert "gross" not in names_of(tasks) and "does not import" in str(reasons)


# ------------------------------------------------------------ copies of the deleted code
def copies(root):
    """Writes copies of the code under odd names and in odd forms -> their paths"""
    html = "<pre><span class='k'>tax</span> = net // <b>5</b>\n    total = net + tax</pre>"
    write(
        root,
        {
            "shop/price.py.bak": CODE,
            "shop/#price.py#": CODE,
            "shop/.ipynb_checkpoints/price-checkpoint.py": CODE,
            "shop/build/lib/shop/price.py": CODE,
            "attic/price_old.py": CODE,
            "notes.txt": CODE.replace("\n", "\r\n"),
            "review.patch": "\n".join("+" + line for line in CODE.split("\n")),
            "docs/price.html": html,
            "README.md": "# Shop\n\n    tax  =  net // 5\n    total = net + tax\n    return total\n",
            "try.ipynb": json.dumps({"cells": [{"source": CODE.splitlines(True)}]}),
            "u16": CODE.encode("utf-16"),
            "a.bin": gzip.compress(CODE.encode()),
            "b.bin": bz2.compress(CODE.encode()),
        },
    )
    with zipfile.ZipFile(root / "c.jar", "w") as archive:
        archive.writestr("x", CODE)
    with tarfile.open(root / "d.data", "w:gz") as archive:
        member = tarfile.TarInfo("x")
        member.size = len(CODE)
        archive.addfile(member, io.BytesIO(CODE.encode()))
    py_compile.compile(
        str(write(root.parent / "x", {"p.py": CODE}) / "p.py"), cfile=str(root / "e.data")
    )
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()} - set(
        SHOP
    )


@pytest.mark.parametrize("level", [1, 2])
def test_no_copy_of_the_deleted_code_is_left_whatever_it_is_called_and_other_files_are_kept(
    tmp_path, level
):
    root = write(
        tmp_path / "repo", {"NEWS.md": "gross and net\n", "LICENSE": "gross negligence\n", **SHOP}
    )
    told = copies(root) - {"NEWS.md", "LICENSE"}
    tasks, reasons = tasks_of(root, tmp_path, level=level)
    (task,) = [task for task in tasks if task.meta["names"] == ["gross"]]
    assert not told & set(task.files) and {"NEWS.md", "LICENSE", *SHOP} <= set(task.files)
    assert not any("tax = net // 5" in text for text in task.files.values())
    assert set(task.solution) == {"shop/price.py"}, "the original is judged without them, too"
    assert st.check(str(tmp_path / "tasks.jsonl"))[0] == len(tasks)


def test_code_that_another_module_holds_for_itself_makes_no_task(tmp_path):
    other = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(9)) + GROSS.replace(
        "gross", "price_of"
    )
    root = write(tmp_path / "repo", {**SHOP, "shop/other.py": other})
    tasks, reasons = tasks_of(root, tmp_path)
    assert names_of(tasks) == ["twice"] and "elsewhere" in str(reasons)


def test_a_copy_of_a_hidden_test_is_left_out():
    files = {**SHOP, "tests/test_price.py.orig": TEST, "plan.txt": "shop.price.gross is tested\n"}
    left = world_copies.without_test_copies(files, files, ["tests/test_price.py::test_gross"])
    assert set(files) - set(left) == {"tests/test_price.py.orig"}


@pytest.mark.parametrize(
    "lines, text, holds",
    [
        (["x = 1", "return x"], "x = 1\nreturn x\n", False),
        (["result = a * b", "return result"], "def g():\n  result=a*b", False),
        (["result = a * b", "return result"], "result = a * b  # area", True),
        (["a = n", "b = n", "return a + b"], "> a = n\n> b = n\n", False),
        (["a = n", "b = n", "return a + b"], "\ta = n\r\n\tb = n\r\n\treturn a + b", True),
    ],
)
def test_one_common_line_is_no_copy(lines, text, holds):
    assert leftovers.holds_code(text, lines, "area") is holds


STEPS = "".join(f"def step_{i}(x):\n    y = x + {i}\n    return y\n" for i in range(6))


@pytest.fixture
def hidden_of(tmp_path, monkeypatch):
    """-> a function: files installed below an environment's lib/, files of a repository -> what is
    hidden below lib/. A distribution is the file "<its name>.dist-info/RECORD": what it owns."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib")])

    def hidden(installed, files):
        for path, text in installed.items():
            if path.endswith("RECORD"):
                folder = path.partition("/")[0]
                installed = {**installed, f"{folder}/METADATA": "Metadata-Version: 2.1\n"}
                installed[path] = "".join(f"{one},,\n" for one in (*text.split(), path))
        write(tmp_path / "lib", installed)
        world_copies.machine_index.cache_clear(), world_copies.installed_files.cache_clear()
        found = world_copies.installed_copies(files)
        return sorted(
            os.path.relpath(place, tmp_path / "lib") for place in found if str(tmp_path) in place
        )

    yield hidden
    world_copies.machine_index.cache_clear(), world_copies.installed_files.cache_clear()


OWNED = {
    "another version": (
        {
            "shop/__init__.py": "",
            "shop/price.py": "def old(): pass\n",
            "bag.py": "",
            "shop-1.dist-info/RECORD": "shop/__init__.py shop/price.py bag.py",
        },
        {"src/shop/__init__.py": "", "src/shop/price.py": STEPS},
        ["bag.py", "shop", "shop-1.dist-info"],
    ),
    "a module": (
        {"shop.py": "def old(): pass\n", "shop-1.dist-info/RECORD": "shop.py ../bin/shop"},
        {"shop.py": STEPS},
        ["shop-1.dist-info", "shop.py"],
    ),
    "part of a namespace": (
        {
            "corp/shop/__init__.py": "",
            "corp/shop/price.py": "",
            "corp/bag/__init__.py": "def carry(): pass\n",
            "shop-1.dist-info/RECORD": "corp/shop/__init__.py corp/shop/price.py",
            "bag-1.dist-info/RECORD": "corp/bag/__init__.py",
        },
        {"src/corp/shop/price.py": STEPS},
        ["corp/shop", "shop-1.dist-info"],
    ),
    "an __init__ is all there is": (
        {"shop/__init__.py": "old = 1\n", "shop-1.dist-info/RECORD": "shop/__init__.py"},
        {"shop/__init__.py": STEPS},
        ["shop", "shop-1.dist-info"],
    ),
    "scripts in a folder called like a dependency": (
        {
            "box/__init__.py": "",
            "box/lid.py": "def close(): pass\n",
            "box-1.dist-info/RECORD": "box/__init__.py box/lid.py",
        },
        {"shop/__init__.py": STEPS, "box/__init__.py": "", "box/build.py": STEPS},
        [],
    ),
    "tests that a dependency left in the open": (
        {
            "box.py": "def close(): pass\n",
            "tests/__init__.py": "",
            "tests/test_box.py": STEPS,
            "box-1.dist-info/RECORD": "box.py tests/__init__.py tests/test_box.py",
        },
        {"shop/price.py": STEPS, "tests/__init__.py": "", "tests/test_box.py": STEPS},
        [],
    ),
    "no metadata and another text": (
        {"shop/__init__.py": "", "shop/price.py": "def other(): pass\n"},
        {"shop/__init__.py": "", "shop/price.py": STEPS},
        [],
    ),
    "no metadata and most of the text": (
        {
            "more/_vendor/shop/price.py": STEPS,
            "more/_vendor/shop/tax.py": STEPS + "X = 1\n",
            "bin/tool.py": "def main(): pass\n",
        },
        {
            **{f"shop/{name}.py": STEPS for name in ("price", "tax", "new")},
            "bin/update.py": "def main(): pass\n",
        },
        ["more/_vendor/shop"],
    ),
}


@pytest.mark.parametrize("title", OWNED)
def test_hidden_is_what_a_distribution_owns_that_has_a_file_of_the_repository_and_what_has_its_text(
    title, hidden_of
):
    installed, files, hidden = OWNED[title]
    assert hidden_of(installed, files) == hidden


def test_copies_without_metadata_are_found_by_the_layout_of_the_package(tmp_path, hidden_of):
    installed = {
        "single.py": STEPS,
        "small/__init__.py": "",
        "small/core.py": STEPS,
        "lib/__init__.py": "def other(): pass\n",
        "single_more.py": "x = 1\n",
    }
    write(tmp_path / "lib", installed)
    py_compile.compile(str(tmp_path / "lib" / "single.py"))
    with zipfile.ZipFile(tmp_path / "lib" / "bundled.whl", "w") as archive:
        archive.writestr("vendor/small/core.py", STEPS)
    (tmp_path / "lib" / "broken.whl").write_bytes(b"PK")
    bytecode = f"__pycache__/single.{sys.implementation.cache_tag}.pyc"
    assert hidden_of(installed, {"single.py": STEPS}) == [bytecode, "single.py"]
    for layout in ("lib", "packages/core", "python/src"):
        files = {f"{layout}/small/__init__.py": "", f"{layout}/small/core.py": STEPS}
        assert hidden_of(installed, files) == ["bundled.whl", "small"], layout
    unlike = {"tools/small/__init__.py": "", "tools/small/x.py": "def unlike(): pass\n"}
    assert hidden_of(installed, unlike) == []


# ------------------------------------------------------------ tests inside, links, names
INSIDE = (
    CODE
    + "\n\ndef test_gross():\n    assert gross(10) == 12\n\n\ndef test_twice():\n    assert twice(10) == 20\n"
)
OTHER = {"pytest.ini": "[pytest]\npython_files = *.py\n"}


def test_tests_in_the_file_of_the_feature_judge_nothing(tmp_path):
    alone = {
        **OTHER,
        "shop/__init__.py": "",
        "shop/price.py": INSIDE
        + "".join(f"\n\ndef test_{i}():\n    assert {i} == {i}\n" for i in range(4)),
    }
    assert tasks_of(write(tmp_path / "alone", alone), tmp_path)[0] == []
    both = write(tmp_path / "both", {**OTHER, **SHOP, "shop/price.py": INSIDE})
    tasks, _ = tasks_of(both, tmp_path)
    assert names_of(tasks) == ["gross", "twice"]
    for task in tasks:
        judged = task.hidden + task.FAIL_TO_PASS
        assert judged and not any(node.startswith("shop/") for node in judged)
        lost = task.files["shop/price.py"]
        right = "return net + net // 5" if "gross" in task.meta["names"] else "return n + n"
        assert verdict.judge(
            task,
            {**task.files, "shop/price.py": lost.replace("raise NotImplementedError", right)},
            None,
        ).solved
        wrong = (
            lost.replace("raise NotImplementedError", "return 0").partition("def test_")[0]
            + "def test_gross():\n    pass\n"
        )
        assert not verdict.judge(task, {**task.files, "shop/price.py": wrong}, None).solved


def test_names_that_are_not_utf_8_reach_the_agent_and_the_judge_and_a_test_that_needs_a_link_is_left_out(
    tmp_path,
):
    test = (
        "import os, subprocess\nfrom pathlib import Path\n\nHERE = Path(__file__).parent\n\n\n"
        "def test_mode():\n    assert subprocess.run([HERE / '../bin/tool'], capture_output=True).stdout == b'ran\\n'\n\n\n"
        "def test_links():\n    assert (HERE / 'all/x.txt').read_text() == 'x'\n\n\n"
        "def test_name():\n    assert os.listdir(os.fsencode(HERE / '../names')) == [b'K\\xf6ln.txt']\n"
    )
    root = write(
        tmp_path / "repo",
        {
            **SHOP,
            "tests/test_tree.py": test,
            "bin/tool": "#!/bin/sh\necho ran\n",
            "data/x.txt": "x",
        },
    )
    (root / "bin/tool").chmod(0o755)
    os.symlink("../data", root / "tests/all")
    os.symlink("/etc/passwd", root / "outside")
    (root / "names").mkdir()
    with open(os.fsencode(root / "names") + b"/K\xf6ln.txt", "w"):
        pass
    tasks, _ = tasks_of(root, tmp_path)
    assert names_of(tasks) == ["gross", "twice"]
    for task in tasks:
        assert [node for node in task.PASS_TO_PASS if "test_tree" in node] == [
            "tests/test_tree.py::test_name"
        ]
        assert not {"outside", "tests/all", "tests/all/x.txt"} & set(task.files)
        with world_workspace.Workspace(task) as workspace:
            workspace.edit("shop/price.py", "", "# by the agent\n")
            handed_in = {**workspace.files(), **task.solution}
        assert verdict.judge(task, handed_in, None).solved


def test_a_test_that_another_file_imports_and_runs_again_is_asked_for_where_it_is_written(tmp_path):
    test = (
        "import shop.price\n\n\nclass TestGross:\n"
        "    def test_gross(self):\n        assert shop.price.gross(10) == 12\n\n"
        "    def test_more(self):\n        assert shop.price.gross(50) == 60\n\n\n"
        "import pytest\n\n\n@pytest.mark.parametrize('n', range(8))\n"
        "def test_twice(n):\n    assert shop.price.twice(n) == 2 * n\n"
    )
    other = (
        "from test_price import TestGross\n\n\nclass TestAgain(TestGross):\n"
        "    def test_third(self):\n        assert 1 + 1 == 2\n"
    )
    files = {**SHOP, "tests/test_price.py": test, "tests/test_again.py": other}
    root = write(tmp_path / "repo", files)
    tasks, reasons = tasks_of(root, tmp_path, n=2)
    gross = [task for task in tasks if task.meta["names"] == ["gross"]]
    assert gross, reasons
    asked = [f"tests/test_price.py::TestGross::test_{name}" for name in ("gross", "more")]
    assert gross[0].FAIL_TO_PASS == asked
    assert "tests/test_again.py::TestAgain::test_third" in gross[0].PASS_TO_PASS
