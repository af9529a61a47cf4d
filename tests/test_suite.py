"""How the suites of real repositories are run, judged by test, refused, and kept in an
environment."""

import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from commands import run_command
import synth_tasks as st
from repositories import cage
from repositories import verdict
from world import (
    files as world_files,
    sandbox as world_sandbox,
    task as world_task,
    workspace as world_workspace,
)
from repositories import (
    autoinstall,
    editable,
    repo_files,
    refusals,
    study,
    run_suite,
    suite as suites,
    task_file,
)

CODE = (
    '"""Prices."""\n\n\ndef gross(net):\n    tax = net // 5\n    total = net + tax\n    return total\n\n\n'
    "def twice(n):\n    a = n\n    b = n\n    return a + b\n"
)
TEST = (
    "from shop.price import gross, twice\n\n\ndef test_gross():\n    assert gross(10) == 12\n\n\n"
    "def test_twice():\n    assert twice(4) == 8\n"
)
BASE = {"shop/__init__.py": "", "shop/price.py": CODE, "tests/test_price.py": TEST}


def run(files, **options):
    return run_suite.run_suite(files, cage.repository_sandbox(files, 60), limit=False, **options)


def names(outcomes):
    return {node.split("::")[-1]: outcome for node, outcome in outcomes.items()}


def write(files, root):
    world_files.write_tree(files, root)
    return str(root)


def refusal(files, tmp_path, time_limit=60):
    with pytest.raises(world_task.Refusal) as caught:
        study.study(write(files, tmp_path / "shop"), None, time_limit, lambda line: None)
    return str(caught.value)


# ---------------------------------------------------------------- the outcome of a test
KINDS = """
import unittest
import pytest


@pytest.fixture
def no_setup():
    raise KeyError("nothing here")


@pytest.fixture
def no_teardown():
    yield 1
    raise OSError("gone")


def test_setup(no_setup):
    pass


def test_teardown(no_teardown):
    pass


def test_call_and_teardown(no_teardown):
    assert 0


@pytest.mark.xfail
def test_expected():
    assert 0


@pytest.mark.xfail(strict=True)
def test_unexpected():
    pass


@pytest.mark.xfail
def test_expected_but_torn(no_teardown):
    assert 0


@pytest.mark.parametrize("n", [1, 2])
def test_ids(n):
    assert n == 1


def test_skipped():
    pytest.skip("not here")


def test_parts(subtests):
    for n in range(3):
        with subtests.test(n=n):
            assert n != 1


def test_part_skipped(subtests):
    with subtests.test("one"):
        pytest.skip("not here")


class TestUnit(unittest.TestCase):
    def test_unit_parts(self):
        for n in range(3):
            with self.subTest(n=n):
                self.assertNotEqual(n, 1)

    def test_unit(self):
        with self.subTest("one"):
            self.assertEqual(1, 1)
"""
AGAIN = '''
from _pytest.runner import runtestprotocol


def pytest_runtest_protocol(item, nextitem):
    """Runs a failed test once more, as plugins for that do."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if "again" in item.name and any(report.failed for report in reports):
        for report in reports:
            report.outcome = "rerun" if report.failed else report.outcome
            item.ihook.pytest_runtest_logreport(report=report)
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
'''


def test_a_test_is_as_good_as_its_worst_part():
    has_subtests = int(pytest.__version__.split(".")[0]) >= 9
    text = (
        KINDS
        if has_subtests
        else KINDS[: KINDS.index("def test_parts")] + KINDS[KINDS.index("class TestUnit") :]
    )
    outcomes = names(run({"m.py": "", "test_m.py": text})["outcomes"])
    wanted = {
        "test_setup": "error",
        "test_teardown": "error",
        "test_call_and_teardown": "failed",
        "test_expected": "xfail",
        "test_unexpected": "failed",
        "test_expected_but_torn": "xfail",
        "test_ids[1]": "passed",
        "test_ids[2]": "failed",
        "test_skipped": "skipped",
        "test_unit_parts": "failed",
        "test_unit": "passed",
    }
    wanted |= {"test_parts": "failed", "test_part_skipped": "passed"} if has_subtests else {}
    assert outcomes == wanted


def test_of_a_test_that_was_run_again_the_last_attempt_counts_and_the_study_does_not_ask_for_it():
    text = "seen = []\n\n\ndef test_again():\n    seen.append(1)\n    assert len(seen) > 1\n\n\ndef test_again_in_vain():\n    assert 0\n"
    answer = run({"m.py": "", "test_m.py": text, "conftest.py": AGAIN})
    assert names(answer["outcomes"]) == {"test_again": "passed", "test_again_in_vain": "failed"}
    assert {node.split("::")[-1] for node in answer["again"]} == {
        "test_again",
        "test_again_in_vain",
    }


def test_a_test_that_reads_the_words_of_an_assertion_asks_nothing():
    text = "import pytest\n\n\ndef test_words():\n    with pytest.raises(AssertionError, match='assert 1 == 2'):\n        assert 1 == 2\n\n\n"
    found = run({**BASE, "tests/test_words.py": text})
    assert names(found["outcomes"])["test_words"] == "failed"
    assert names(found["outcomes"])["test_gross"] == "passed"


# ---------------------------------------------------------------- as the authors run it
def test_the_cache_and_an_import_mode_are_as_the_authors_have_them():
    cached = "import pytest\n\n\n@pytest.fixture(autouse=True)\ndef rate(pytestconfig):\n    pytestconfig.cache.set('shop/rate', 5)\n"
    files = {
        **BASE,
        "tests/conftest.py": cached,
        "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n",
        "tests/a/test_same.py": "def test_a(): pass\n",
        "tests/b/test_same.py": "def test_b(): pass\n",
    }
    assert names(run(files)["outcomes"]) == dict.fromkeys(
        ("test_gross", "test_twice", "test_a", "test_b"), "passed"
    )


def test_test_files_of_one_name_are_imported_apart_where_nobody_said_so():
    files = {
        **BASE,
        "tests/a/test_same.py": "def test_a(): pass\n",
        "tests/b/test_same.py": "def test_b(): pass\n",
    }
    answer = study.first_run("shop", files, cage.repository_sandbox(files, 60))
    assert set(names(answer["outcomes"])) == {"test_gross", "test_twice", "test_a", "test_b"}
    assert any("importlib" in line for line in answer["plan"].said)
    assert "--import-mode=importlib" in suites.test_command(answer["plan"])


@pytest.mark.parametrize(
    "name, text",
    [
        (
            "pytest.ini",
            "[pytest]\naddopts = -ra --cov=shop --cov-report term-missing -n auto --strict-markers\n",
        ),
        (
            "tox.ini",
            "[pytest]\naddopts = -ra --cov=shop --cov-report=term\n  -n 4 --strict-markers\n",
        ),
        (
            "setup.cfg",
            "[tool:pytest]\naddopts = -ra -n4 --no-cov-on-fail --cov --strict-markers --dist loadfile\n",
        ),
        (
            "pyproject.toml",
            '[tool.pytest.ini_options]\naddopts = ["-ra", "--cov", "--numprocesses=2", "--strict-markers"]\n',
        ),
    ],
)
def test_coverage_and_other_processes_are_left_out_and_a_line_says_so(name, text):
    plan = suites.configured_plan({name: text})
    assert plan.config == name and plan.options == ["-o", "addopts=-ra --strict-markers"]
    (line,) = [line for line in plan.said if "--cov" in line]
    assert "coverage, several processes" in line


def test_an_option_without_a_value_takes_no_path_with_it():
    plan = suites.configured_plan({"pytest.ini": "[pytest]\naddopts = -x tests/unit -n 2 -ra\n"})
    assert plan.options == ["-o", "addopts=tests/unit -ra"]
    alone = "-nauto", "-n4", "--cov-branch", "--cov-append", "--no-cov-on-fail", "--random-order"
    with_value = "--random-order-seed 5", "--random-order-bucket global", "--randomly-seed 3"
    for left_out in (*alone, *with_value, "--random-order-bucket=global"):
        text = f"[pytest]\naddopts = {left_out} tests/unit -ra\n"
        plan = suites.configured_plan({"pytest.ini": text})
        assert plan.options == ["-o", "addopts=tests/unit -ra"], left_out


def test_a_configuration_that_asks_for_nothing_special_is_left_to_pytest():
    assert (
        suites.configured_plan({"pytest.ini": "[pytest]\naddopts = -ra -k 'not slow'\n"}).options
        == []
    )
    assert suites.configured_plan({"setup.cfg": "[metadata]\nname = x\n"}) == suites.Plan()
    assert (
        suites.configured_plan({"tox.ini": "[tox]\n", "setup.cfg": "[tool:pytest]\n"}).config
        == "setup.cfg"
    )
    assert suites.configured_plan({"pyproject.toml": "no toml ["}) == suites.Plan()


def test_what_no_plugin_here_knows_is_left_out_with_its_value_and_that_is_said():
    files = {
        **BASE,
        "pytest.ini": "[pytest]\naddopts = -ra --timeout-nowhere 60 --nosuch=1 -p nosuch_plugin\n",
    }
    answer = run(files)
    assert set(answer["outcomes"].values()) == {"passed"} and answer["plan"].options == [
        "-o",
        "addopts=-ra",
    ]
    assert "--nosuch=1 (no plugin here knows it)" in "\n".join(answer["plan"].said)
    assert "nosuch_plugin is not installed" in "\n".join(answer["plan"].said)


def test_marks_and_settings_of_plugins_that_are_not_here_do_not_cost_a_strict_suite():
    marked = TEST.replace(
        "def test_gross", "import pytest\n\n\n@pytest.mark.nosuchmark(10)\ndef test_gross"
    )
    answer = run(
        {
            **BASE,
            "tests/test_price.py": marked,
            "pytest.ini": "[pytest]\naddopts = --strict-markers --strict-config\nno_such_setting = 1\n",
        }
    )
    said = "\n".join(answer["plan"].said)
    assert (
        set(answer["outcomes"].values()) == {"passed"}
        and "no_such_setting" in said
        and "unknown settings and marks are allowed" in said
    )


@pytest.mark.parametrize("package", ["iniconfig", "pluggy", "pytest"])
def test_a_package_that_pytest_itself_runs_on_is_refused(package, tmp_path):
    files = {f"src/{package}/__init__.py": CODE, "tests/test_it.py": f"import {package}\n"}
    words = refusal(files, tmp_path)
    assert f"it is {package}, which pytest itself runs on" in words


def test_a_folder_that_is_named_like_a_package_of_pytest_takes_nothing_from_it():
    files = {
        **BASE,
        "packaging/make.py": "x = 1\n",
        "tests/test_more.py": "import packaging.version\n\n\ndef test_more(): pass\n",
    }
    study.refuse_unusable("shop", files)
    assert names(run(files)["outcomes"])["test_more"] == "passed"


@pytest.mark.parametrize("path", ["checks/check_price.py", "test.py"])
def test_tests_by_other_names_are_refused_with_the_setting_that_finds_them(path):
    files = {"shop/__init__.py": "", "shop/price.py": CODE, path: TEST}
    with pytest.raises(world_task.Refusal, match="python_files"):
        study.first_run("shop", files, cage.repository_sandbox(files, 60))
    files["pytest.ini"] = f"[pytest]\npython_files = {os.path.basename(path)}\n"
    answer = study.first_run("shop", files, cage.repository_sandbox(files, 60))
    assert names(answer["outcomes"])["test_gross"] == "passed"


def test_a_plan_comes_back_from_a_file_of_tasks_and_nothing_else_does():
    plan = suites.Plan(["-o", "addopts="], "tox.ini", ["tests"])
    assert suites.plan_of_task(json.loads(json.dumps(plan.to_meta()))) == plan
    assert suites.plan_of_task({**plan.to_meta(), "folder": ""}) == plan  # of an earlier version
    assert suites.plan_of_task(None) is None
    for odd in (
        3,
        [],
        {"options": 3},
        {"options": [3]},
        {"config": "../x"},
        {"config": "/etc/x"},
        {"paths": ["a\0"]},
        {"other": 1},
    ):
        with pytest.raises(ValueError):
            suites.plan_of_task(odd)


# ---------------------------------------------------------------- outcomes come from the reporter
LOUD = "def pytest_unconfigure():\n    print('7 failed, 1 error')\n"
OLD_DOCTEST = 'def half(n):\n    """\n    >>> half(4)\n    2\n    """\n    return n / 2\n'


@pytest.mark.parametrize(
    "addopts", ["-ra -q", "-q -q", "-rs --doctest-modules", "--color=yes -v", "--no-summary -rN"]
)
def test_whatever_a_suite_prints_its_command_is_green_and_leaves_out_what_is_red(addopts):
    files = {
        **BASE,
        "shop/old.py": OLD_DOCTEST,
        "tests/test_red.py": "def test_red():\n    assert 0\n",
        "conftest.py": LOUD,
        "pytest.ini": f"[pytest]\naddopts = {addopts}\n",
    }
    sandbox = cage.repository_sandbox(files, 60)
    plan = suites.configured_plan(files)
    command, ignored, left_out = run_suite.green_command(files, plan, [], [], sandbox)
    red = ["tests/test_red.py::test_red"]
    red += ["shop/old.py::shop.old.half"] if "doctest" in addopts else []
    assert command and ignored == [] and left_out == sorted(red)

    # the command tells a wrong feature from the right one
    broken = {**files, "shop/price.py": CODE.replace("net + tax", "net - tax")}
    assert run_suite.is_green(sandbox.run_files(files, command))
    assert not run_suite.is_green(sandbox.run_files(broken, command))


@pytest.mark.parametrize("number", [20, 60])
def test_where_too_many_tests_are_red_to_name_each_their_files_are_left_out(number):
    """Twenty of them fit into a command of 2,000 characters, sixty do not."""
    red = "".join(f"def test_that_was_written_for_a_year_{n}(): assert 0\n" for n in range(number))
    files = {**BASE, "tests/test_red.py": red + "def test_sum(): assert 1 + 1 == 2\n"}
    sandbox, plan = cage.repository_sandbox(files, 60), suites.configured_plan(files)
    command, _, left_out = run_suite.green_command(
        files, plan, [], ["tests/test_red.py::test_that_was_written_for_a_year_0"], sandbox
    )
    assert len(command) < 2000 and len(left_out) == (number if number < 60 else 1)
    output = sandbox.run_files(files, command).output
    assert f"{3 if number < 60 else 2} passed, {number + (number == 60)} deselected" in output


def test_red_tests_in_too_many_files_are_refused_with_what_helps():
    more = {f"tests/test_of_another_kind_{n}.py": "def test_red(): assert 0\n" for n in range(60)}
    files = {**BASE, **more}
    plan = suites.configured_plan(files)
    sandbox = cage.repository_sandbox(files, 60)
    red = [f"{path}::test_red" for path in more]
    command, _, why = run_suite.green_command(files, plan, [], red, sandbox)
    assert command is None and "60 files hold red tests" in why and "--ignore" in why


def test_a_command_leaves_out_these_functions_and_a_task_whose_tests_begin_like_one_of_them_is_none(
    tmp_path,
):
    """A red test called test_gross would take test_gross_low with it out of the command."""
    text = TEST.replace("def test_gross", "def test_gross_low")
    more = "\n\ndef test_gross_high():\n    assert gross(50) == 60\n"
    more += "\n\ndef test_twice_too():\n    assert twice(6) == 12\n"
    red = "\n\ndef test_gross():\n    assert open('/rates').read() == gross(1)\n"
    repo = write({**BASE, "tests/test_price.py": text + more + red}, tmp_path / "shop")
    tasks, reasons, _ = st.generate(repo, str(tmp_path / "t.jsonl"), n=9, level=1, jobs=1)
    assert [task.meta["names"] for task in tasks] == [["twice"]] and "not green" in str(reasons)
    assert tasks[0].test_command.endswith("--deselect=tests/test_price.py::test_gross")


# ---------------------------------------------------------------- as an editable install has it
def test_a_package_is_found_from_any_folder_by_its_entry_points_and_as_a_namesake_of_the_standard_library():
    files = {
        "lib/profile/__init__.py": "",
        "lib/profile/__main__.py": "print(3)\n",
        "lib/profile/plugin.py": "import pytest\n\n\n@pytest.fixture\ndef ten():\n    return 10\n",
        "pyproject.toml": "[project]\nname = 'Shop.of-ours'\nversion = '1.5'\n"
        "[project.entry-points.pytest11]\nshop = 'profile.plugin'\n"
        "[project.scripts]\nshop = 'profile:main'\n[tool.setuptools.packages.find]\nwhere = ['lib']\n",
        "tests/test_it.py": "import subprocess, sys\nfrom importlib.metadata import distribution\n"
        "import profile.plugin\n\n\ndef test_process(tmp_path, ten):\n"
        "    line = [sys.executable, '-m', 'profile']\n"
        "    assert subprocess.run(line, cwd=tmp_path, capture_output=True).stdout == b'3\\n'\n\n\n"
        "def test_metadata():\n    found = distribution('shop-of.ours')\n"
        "    assert found.version == '1.5' and len(found.entry_points) == 2\n"
        "    assert all(path.locate().exists() for path in found.files)\n",
    }
    answer = run({**files, **editable.metadata(files)})
    assert names(answer["outcomes"]) == {"test_process": "passed", "test_metadata": "passed"}


@pytest.mark.parametrize(
    "files, version, points",
    [
        ({"setup.cfg": "[metadata]\nname = shop\nversion = 2\n"}, "2", ""),
        (
            {
                "setup.py": "import setuptools\nsetuptools.setup(name='shop', version='3')\n",
                "pyproject.toml": "[project.scripts]\nb = 'shop:c'\n",
            },
            "3",
            "[console_scripts]\nb = shop:c\n\n",
        ),
        (
            {
                "pyproject.toml": "[tool.poetry]\nname = 'shop'\nversion = '4'\n[tool.poetry.plugins.a]\nb = 'shop:c'\n"
            },
            "4",
            "[a]\nb = shop:c\n\n",
        ),
        ({"pyproject.toml": "[project]\nname = 'shop'\ndynamic = ['version']\n"}, "0", ""),
    ],
)
def test_metadata_are_what_the_build_files_declare(files, version, points):
    found = editable.metadata(files)
    folder = f"shop-{version}.dist-info"
    assert f"\nVersion: {version}\n" in found[f"{folder}/METADATA"]
    assert found.get(f"{folder}/entry_points.txt", "") == points
    assert editable.metadata({"shop.py": "x = 1\n"}) == {}


def test_code_in_threads_is_run_by_its_test(tmp_path):
    threaded = "from threading import Thread\nfrom shop.price import gross, twice\n\n\ndef test_gross():\n    one = Thread(target=gross, args=[10])\n    one.start()\n    one.join()\n"
    write(
        {"shop/__init__.py": "", "shop/price.py": CODE, "tests/test_price.py": threaded}, tmp_path
    )
    files = repo_files.copy_repository(tmp_path)
    touched = run(files, trace=True)["touched"]["tests/test_price.py::test_gross"]
    assert "shop/price.py:4:gross" in touched


def test_one_seed_gives_one_file_of_tasks_however_many_work_on_it(tmp_path):
    more = "\n\ndef test_more():\n    assert gross(50) == 60\n\n\ndef test_again():\n    assert twice(6) == 12\n"
    repo = write({**BASE, "tests/test_price.py": TEST + more}, tmp_path / "shop")
    made = []
    for jobs in (1, 3):
        out = tmp_path / f"{jobs}.jsonl"
        st.generate(repo, str(out), n=2, jobs=jobs)
        made.append([task.instance_id for task in task_file.read_tasks(out)])
    assert made[0] == made[1] and len(made[0]) == 2


# ---------------------------------------------------------------- refusals
SCM = '[build-system]\nrequires = ["setuptools", "setuptools_scm"]\n[tool.setuptools_scm]\nversion_file = "shop/_version.py"\n'


@pytest.mark.parametrize(
    "files, says",
    [
        (
            {"shop/__init__.py": "from ._version import version\n", "pyproject.toml": SCM},
            ["shop._version", "a build writes it", "pip install --no-deps --editable"],
        ),
        (
            {
                "shop/__init__.py": "from . import _fast\n",
                "shop/_fast.pyx": "",
                "setup.py": "ext_modules = []\n",
            },
            ["shop._fast", "a build writes it", "pip install --no-deps --editable"],
        ),
        (
            {
                "shop/__init__.py": "import importlib.metadata\nv = importlib.metadata.version('shop-of-ours')\n"
            },
            ["PackageNotFoundError", "shop-of-ours", "metadata"],
        ),
        (
            {
                "tests/__init__.py": "",
                "tests/test_price.py": "from tests.helpers import thing\n" + TEST,
            },
            ["tests/test_price.py", "tests.helpers", "source distribution"],
        ),
        ({"tests/conftest.py": "import shop_test_helpers\n"}, ["conftest.py", "shop_test_helpers"]),
        (
            {
                "tests/test_price.py": "import nosuchpackage\n" + TEST,
                "setup.cfg": "[options.extras_require]\ntest = nosuchpackage>=2\n",
            },
            ["nosuchpackage", "install the package", "--autoinstall"],
        ),
        (
            {"tests/test_price.py": TEST.replace("():", "(mocker_of_nobody):")},
            ["cannot be set up", "fixture 'mocker_of_nobody' not found", "--autoinstall"],
        ),
        (
            {
                "tests/test_price.py": "import os\nfrom shop.price import gross\n\n\ndef test_gross():\n    os._exit(3)\n"
            },
            ["exit code 3", "test_gross"],
        ),
        (
            {"tests/test_price.py": TEST.replace("12", "13").replace("8", "9")},
            ["2 of 2 tests fail"],
        ),
        ({"pytest.ini": "[pytest]\nminversion = 99.0\n"}, ["does not start", "99.0"]),
    ],
)
def test_a_refusal_names_the_reason_and_what_helps(files, says, tmp_path):
    words = refusal({**BASE, **files}, tmp_path)
    assert all(say in words for say in says) and "\n" not in words, words


def test_a_package_that_asks_for_its_own_version_gets_it_from_what_the_files_tell():
    files = {
        **BASE,
        "shop/__init__.py": "import importlib.metadata\nversion = importlib.metadata.version('shop-of-ours')\n",
        "tests/test_version.py": "import shop\n\n\ndef test_version():\n    assert shop.version == '3.1'\n",
        "PKG-INFO": "Metadata-Version: 2.1\nName: shop_of.ours\nVersion: 3.1\n\nName: no\n",
    }
    answer = run({**files, **editable.metadata(files)})
    assert len(answer["outcomes"]) == 3 and set(answer["outcomes"].values()) == {"passed"}


def test_an_extension_that_was_compiled_in_its_place_is_taken_and_one_that_has_a_source_in_python_is_not(
    tmp_path,
):
    elf = dict.fromkeys(
        (
            "shop/_fast.cpython-311.so",
            "shop/price.abi3.so",
            "v1.0/tax.so",
            "build/lib/shop/_fast.so",
            ".venv/x.so",
        ),
        "\x7fELF",
    )
    world_files.write_tree({**BASE, "v1.0/tax.py": "", **elf}, tmp_path)
    taken = {path for path in repo_files.copy_repository(tmp_path) if path.endswith(".so")}
    assert taken == {"shop/_fast.cpython-311.so"}


def test_errors_of_setup_and_collection_are_not_counted_as_failing_tests(tmp_path):
    files = {
        **BASE,
        "tests/test_odd.py": "import nosuchthing\n",
        "tests/test_setup.py": "import pytest\n\n\n@pytest.fixture\ndef broken():\n    raise KeyError\n\n\ndef test_setup(broken): pass\n",
        # A path that pytest would cut at its bracket
        "tests/[unit]/test_plain.py": "def test_plain(): pass\n",
    }
    said = []
    found = study.study(write(files, tmp_path / "shop"), None, 60, said.append)
    assert f"shop: {len(files)} files; 4 tests, 3 stable, 0 failing, 2 errors" in said[0]
    assert "nosuchthing" in said[-1]
    assert found.ignored == ["tests/test_odd.py"] and found.left_out == [
        "tests/test_setup.py::test_setup"
    ]
    assert len(found.stable) == 3


def test_a_test_that_fails_in_the_opposite_order_alone_stays_in_the_command():
    """Four runs, every other one in the opposite order: what each test does in them, by hand"""
    story = {"steady": "pppp", "by order": "pfpf", "by chance": "pfpp", "elsewhere": "ppff"}
    words, runs = {"p": "passed", "f": "failed"}, []
    for number, world in enumerate([0, 0, 1, 1]):
        outcomes = {name: words[kinds[number]] for name, kinds in story.items()}
        runs.append((run_suite.WORLDS[world], dict(outcomes=outcomes, seconds={})))
    # "elsewhere" never fails in the first world, in which the agent's commands run.
    assert study.sort_tests(runs) == ({"steady"}, set(), {"by chance"})


def test_a_slow_suite_is_refused_with_how_far_it_came_and_the_flag_that_helps(tmp_path):
    slow = "import time\n\n\ndef test_quick(): pass\n\n\ndef test_slow():\n    time.sleep(99)\n\n\ndef test_late(): pass\n"
    words = refusal({**BASE, "tests/test_price.py": slow}, tmp_path, time_limit=6)
    assert (
        "longer than --time_limit=6 s: 1 of 3 tests were done, and tests/test_price.py::test_slow was running"
        in words
    )
    assert "try --time_limit=" in words


def test_a_suite_that_is_slow_only_where_its_calls_are_traced_is_refused_as_slow(tmp_path):
    """Five tests of 4 s each, which is where a test is ended: longer than 16 s together."""
    waiting = (
        "import sys\nimport time\nimport pytest\n\n\n@pytest.mark.parametrize('n', range(5))\n"
        "def test_waits(n):\n    while sys.gettrace():\n        time.sleep(0.1)\n"
    )
    words = refusal({**BASE, "tests/test_price.py": waiting}, tmp_path, time_limit=16)
    assert "longer than --time_limit=16 s" in words and "test_waits" in words


@pytest.mark.parametrize(
    "words, says",
    [
        (["synth_tasks.py", "--check=EMPTY"], "holds no tasks"),
        (["eval.py"], "which runs?"),
        (["synth_tasks.py", "--keep=x"], "--autoinstall"),
        (["synth_tasks.py", "--repo=.", "--autoinstall", "--keep="], "needs a folder"),
    ],
)
def test_a_command_line_without_its_object_says_what_is_missing(words, says, tmp_path):
    if words[0] == "eval.py":
        pytest.importorskip("torch")
    (tmp_path / "EMPTY").touch()
    script = Path(st.__file__).with_name(words[0])
    done = run_command([sys.executable, script, *words[1:]], cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


# ---------------------------------------------------------------- one seed, one time zone
def test_every_python_in_the_sandbox_has_one_seed_of_hashes_and_one_time_zone(tmp_path):
    code = "import time; print(hash('a word'), time.tzname)"
    (tmp_path / "one.py").write_text(code + "\n")
    line = f'python -c "{code}"'
    said = {
        world_sandbox.Sandbox().run(words, tmp_path).output
        for _ in range(2)
        for words in ("python one.py", "true; python one.py", line)
    }
    assert len(said) == 1 and "UTC" in said.pop()


def test_a_suite_is_run_in_the_world_that_it_is_told():
    text = (
        "import os, time\n\n\ndef test_seed():\n    assert hash('a word') == {seed}\n\n\ndef test_zone():\n"
        "    assert time.timezone == {zone}\n"
    )
    seeds = [
        int(
            subprocess.run(
                [sys.executable, "-c", "print(hash('a word'))"],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
            ).stdout
        )
        for seed, _ in run_suite.WORLDS
    ]
    for world, seed, zone in zip(run_suite.WORLDS, seeds, (0, 18000, -19800)):
        answer = run({"m.py": "", "test_m.py": text.format(seed=seed, zone=zone)}, world=world)
        assert set(answer["outcomes"].values()) == {"passed"}, world


def test_runs_that_share_an_import_share_nothing_that_a_test_does_and_draw_numbers_of_their_own():
    """Each test that is left passes in all of thirty runs: by chance none of the others would."""
    text = (
        "import os\nimport random\nimport numpy\n\nseen, imported_by = [], os.getpid()\n\n\n"
        "def test_first():\n    seen.append(1)\n    assert len(seen) == 1\n\n\n"
        "def test_draw():\n    assert random.random() < 0.5\n\n\n"
        "def test_numpy():\n    assert numpy.random.rand() < 0.5\n\n\n"
        "def test_imported_here():\n    assert imported_by == os.getpid()\n"
    )
    outcomes = names(run({"test_a.py": text}, times=30)["outcomes"])
    assert outcomes == {"test_first": "passed"}  # the last run only is no fork


def test_a_test_that_needs_one_order_of_a_set_or_one_time_zone_is_not_asked_for(tmp_path):
    more = (
        "\n\ndef test_order():\n    assert len({hash(w) % 7 for w in 'abcdefg'}) > 0 and hash('a word') % 2 == %d\n\n\n"
        "def test_zone():\n    import time\n    assert time.timezone == 0\n"
    )
    seed = int(
        subprocess.run(
            [sys.executable, "-c", "print(hash('a word') % 2)"],
            env={**os.environ, "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
        ).stdout
    )
    found = study.study(
        write(
            {**BASE, "tests/test_price.py": TEST + more.replace("%d", str(seed))}, tmp_path / "shop"
        ),
        None,
        60,
        lambda _: None,
    )
    kept = {node.split("::")[-1] for node in found.stable}
    assert {"test_gross", "test_twice"} <= kept and "test_zone" not in kept
    assert not found.left_out  # in the agent's world it is green


# ---------------------------------------------------------------- a task that is written holds
@pytest.fixture(scope="module")
def shop_task(tmp_path_factory):
    """A task of a repository in which a test compares an index of definitions with the source, one
    fails, and a fixture needs the feature. The task leaves out the index, which names the feature.
    """
    root = tmp_path_factory.mktemp("held")
    text = (
        "from pathlib import Path\nimport pytest\n"
        + TEST
        + "\n\ndef test_gross_again():\n    assert gross(20) == 24\n\n\ndef test_broken():\n    assert 0\n"
        "\n\ndef test_named():\n    body = 'total = net + tax' in Path('shop/price.py').read_text()\n"
        "    assert Path('tags').exists() == body\n"
        "\n\n@pytest.fixture\ndef paid():\n    return gross(5)\n\n\ndef test_paid(paid):\n    assert paid == 6\n"
        "\n\ndef test_four():\n    assert twice(2) == 4\n\n\ndef test_six():\n    assert twice(3) == 6\n"
    )
    files = {
        **BASE,
        "tests/test_price.py": text,
        "tags": "shop/price.py: def gross(net)\n",
        "pytest.ini": "[pytest]\naddopts = -ra --nosuch=1\n",
    }
    out = root / "tasks.jsonl"
    st.generate(write(files, root / "shop"), str(out), n=2, level=1, jobs=2)
    return next(task for task in task_file.read_tasks(out) if task.meta["names"] == ["gross"])


def test_setup_errors_are_no_failing_tests_and_must_be_gone_with_the_solution(shop_task):
    assert "tests/test_price.py::test_paid" in shop_task.meta["ERROR_TO_PASS"]
    assert not any(
        node.endswith("test_paid")
        for node in shop_task.FAIL_TO_PASS + shop_task.PASS_TO_PASS + shop_task.hidden
    )


def test_the_command_that_a_task_states_is_green_with_the_original_and_red_without(shop_task):
    sandbox = cage.repository_sandbox(shop_task.files, 60)
    with world_workspace.Workspace(shop_task, sandbox) as workspace:
        assert not run_suite.is_green(workspace.run(shop_task.test_command))
        for path, text in shop_task.solution.items():
            Path(workspace.root, path).write_text(text)
        assert run_suite.is_green(workspace.run(shop_task.test_command))
    assert "test_broken" in shop_task.test_command and "nosuch" not in shop_task.test_command


def test_what_the_original_does_not_keep_green_is_not_asked_for(shop_task):
    assert not any(node.endswith("test_named") for node in shop_task.PASS_TO_PASS)
    assert "::test_named" in shop_task.test_command  # left out of it by name
    original = {**shop_task.files, **shop_task.solution}
    assert (
        verdict.judge(shop_task, original, None).solved
        and not verdict.judge(shop_task, shop_task.files, None).solved
    )


def test_a_test_that_is_red_now_and_then_costs_no_submission_and_one_that_is_always_red_does(
    shop_task, monkeypatch
):
    rng, node = random.Random(0), shop_task.PASS_TO_PASS[0]
    for chance, solved in ((0.4, True), (1.0, False)):
        runs = []

        def judgement(task, files, sandbox):
            runs.append(1)
            return (
                ({node: "failed"} if len(runs) == 1 or rng.random() < chance else {}),
                [],
                {"outcomes": {}},
            )

        monkeypatch.setattr(verdict, "run_judgement", judgement)
        assert (
            verdict.judge_repository(shop_task, {}, None).solved == solved
            and 1 < len(runs) <= 1 + verdict.MORE_RUNS
        )
    runs = []
    hidden = shop_task.FAIL_TO_PASS[0]
    monkeypatch.setattr(
        verdict,
        "run_judgement",
        lambda *_: (runs.append(1), ({hidden: "failed"}, [], {"outcomes": {}}))[1],
    )
    assert not verdict.judge_repository(shop_task, {}, None).solved and len(runs) == 1


# ---------------------------------------------------------------- an environment that is kept
def test_an_environment_is_kept_without_the_repository_and_without_what_runs_when_python_starts(
    tmp_path,
):
    site = tmp_path / ".venv" / "lib" / "python3" / "site-packages"
    world_files.write_tree(
        {
            "helper/__init__.py": "x = 1\n",
            "helper-1.dist-info/METADATA": "",
            "single.py": "y = 2\n",
            "shop/__init__.py": "",
            "shop-1.dist-info/METADATA": "",
            "__editable__.shop-1.pth": "/work",
            "__editable___shop_1_finder.py": "x",
            "evil.pth": "import os; os._exit(7)\n",
            "sitecustomize.py": "import os; os._exit(7)\n",
        },
        site,
    )
    place = tmp_path / "kept"
    autoinstall.keep_environment(tmp_path / ".venv", place, BASE)
    done = subprocess.run(
        [
            place / "bin" / "python",
            "-c",
            "import helper, single; print(helper.x + single.y)\nimport shop",
        ],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "3\n" and "No module named 'shop'" in done.stderr
    left = {path.name for path in next(place.glob("lib/*/site-packages")).iterdir()}
    assert left == {"helper", "helper-1.dist-info", "single.py"}
    with pytest.raises(world_task.Refusal, match="is there already"):
        autoinstall.refuse_place(str(place))
    with pytest.raises(world_task.Refusal, match="cannot be written"):
        autoinstall.refuse_place(str(tmp_path / "no" / "such"))


def test_autoinstall_runs_the_tests_as_the_authors_do_and_keeps_what_works(tmp_path):
    build = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n[project]\nname = "price"\nversion = "1"\n'
    files = {
        "price.py": CODE,
        "test_price.py": TEST.replace("shop.price", "price"),
        "pyproject.toml": build + '[tool.setuptools]\npy-modules = ["price"]\n',
    }

    def borrowing(files, tries):
        return autoinstall.install(files, [("", "")] * 2 + tries)  # asks no index

    keep = tmp_path / "kept"
    tries = autoinstall.autoinstall(
        write(files, tmp_path / "shop"), network=False, installer=borrowing, keep=str(keep)
    )
    assert "2 passed" in tries[-1][1]
    done = subprocess.run(
        [keep / "bin" / "python", "-c", "import pytest; import price"],
        capture_output=True,
        text=True,
    )
    assert "No module named 'price'" in done.stderr


def test_a_test_whose_name_is_too_long_to_ask_for_is_left_out_and_no_other():
    """Cut, it would be another name, and the run that asks for it would find nothing."""
    long = "tests/test_a.py::test_one[" + "x" * 1500 + "]"
    outcomes = {
        "tests/test_a.py::test_two": "passed",
        long: "passed",
        "test_\udcff.py::t": "passed",
    }
    answer = {"key": "k", "outcomes": outcomes, "seconds": {}, "touched": {}}
    found = run_suite.read_outcomes(json.dumps(answer), "k")["outcomes"]
    assert found == {"tests/test_a.py::test_two": "passed"}


# ---------------------------------------------------------------- refusals are true
def doctest_only(files):
    return {**files, "pytest.ini": "[pytest]\naddopts = --doctest-modules\n"}


LONG, SHORT = (
    BASE["shop/price.py"],
    "def gross(net): return net + net // 5\n\n\ndef twice(n): return n + n\n",
)
MORE = (
    TEST
    + "\n\ndef test_more():\n    assert gross(50) == 60\n\n\ndef test_again():\n    assert twice(6) == 12\n"
)
SHELL = "import subprocess, sys\n\n\ndef test_gross():\n    line = 'from shop.price import gross; assert gross(10) == 12'\n    assert not subprocess.call([sys.executable, '-c', line])\n"


@pytest.mark.parametrize(
    "holds, does_not, says",
    [
        (
            {"m.py": CODE},
            {"m.py": CODE, "test_m.py": "def test_m(): pass\n"},
            "pytest finds no tests: functions test_* in files test_*.py",
        ),
        (
            doctest_only({"m.py": OLD_DOCTEST}),
            doctest_only({"m.py": OLD_DOCTEST, "test_m.py": "def test_m(): pass\n"}),
            "1 tests are doctests",
        ),
        (
            {**BASE, "shop/price.py": SHORT},
            {**BASE, "shop/price.py": LONG},
            "no test runs a definition of 3 lines",
        ),
        ({**BASE, "tests/test_price.py": SHELL}, BASE, "no stable test runs one of its functions"),
        (
            {"m.py": "x = 1\n", "test_m.py": "def test_m(): pass\n"},
            BASE,
            "there is no function or class",
        ),
        (
            {**BASE, "tests/test_price.py": TEST.partition("\n\n\ndef test_twice")[0] + "\n"},
            {**BASE, "tests/test_price.py": MORE},
            "is run by more than 60% of the tests",
        ),
        (
            {
                **BASE,
                "shop/price.py": LONG + "\n\nfirst = gross(1), twice(1)\n",
                "tests/test_price.py": MORE,
            },
            {**BASE, "tests/test_price.py": MORE},
            "is needed to import",
        ),
    ],
)
def test_a_refusal_holds_for_one_repository_and_is_not_given_for_another(holds, does_not, says):
    for files, is_true in ((holds, True), (does_not, False)):
        words = refused_words(tuple(files.items()))
        assert (says in words) == is_true, words


@functools.cache
def refused_words(items):
    """The words that refuse a repository of these files, "" where it gives a task. Several refusals
    are not given for the same repository."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            repo = write(dict(items), Path(folder, "shop"))
            st.generate(repo, f"{folder}/t.jsonl", n=1, level=0, jobs=1, time_limit=30)
            return ""
        except world_task.Refusal as caught:
            return str(caught)


def test_of_several_errors_the_one_that_something_helps_against_is_told():
    files = {"pyproject.toml": '[project]\nname = "shop"\ndependencies = ["nosuch"]\n', **BASE}
    tests = [f"tests/test_{number}.py::test_a" for number in range(5)]
    common = dict.fromkeys(tests, "AttributeError: module 'shop' has no attribute 'engine'")
    missing = {"tests/test_x.py": "ModuleNotFoundError: No module named 'nosuch'"}
    answer = {"outcomes": dict.fromkeys(tests, "failed"), "errors": {**common, **missing}}
    assert "has the module nosuch" in refusals.suite_fails("shop", files, answer)
    assert "engine" in refusals.suite_fails("shop", files, {**answer, "errors": common})


@pytest.mark.parametrize(
    "files",
    [
        {"pyproject.toml": '[tool.pdm.dev-dependencies]\ntest = ["mocks>=3"]\n'},
        {"pyproject.toml": '[tool.hatch.envs.default]\ndependencies = ["mocks>=3"]\n'},
        {"pyproject.toml": '[tool.hatch.envs.hatch-test]\nextra-dependencies = ["mocks>=3"]\n'},
        {"pyproject.toml": '[tool.tox.env_run_base]\ndeps = ["mocks>=3"]\n'},
        {"pyproject.toml": '[tool.uv]\ndev-dependencies = ["mocks>=3"]\n'},
        {"hatch.toml": '[envs.test]\ndependencies = ["mocks>=3"]\n'},
        {"tox.toml": '[env.py]\ndeps = ["mocks>=3"]\n'},
        {"setup.cfg": "[options]\ntests_require =\n  mocks>=3\n"},
        {"setup.py": "from setuptools import setup\nsetup(tests_require=['mocks>=3'])\n"},
    ],
)
def test_what_tests_need_is_installed_wherever_it_is_declared(files):
    docs = {"pyproject.toml": '[tool.pdm.dev-dependencies]\ndoc = ["sphinx"]\n'}
    assert "mocks>=3" in autoinstall.declared({"shop.py": "", **files})
    assert "sphinx" not in autoinstall.declared({"shop.py": "", **docs})


@pytest.mark.parametrize("word", ["mocks[a, b]>=3", "mocks [a,b.c] >= 3", "mocks[a]", "mocks"])
def test_a_requirement_may_have_blanks_wherever_pip_allows_them(word):
    files = {"shop.py": "", "pyproject.toml": f'[tool.uv]\ndev-dependencies = ["{word}"]\n'}
    assert word in autoinstall.declared(files)
