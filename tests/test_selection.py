"""Which tests run: those that a change can break, a quarter of the others, and none whose time is over."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import grimp
import pytest

from support.impact import Sources, changed_since
from support.processes import TESTS
from support.programs import python

ROOT = TESTS.parent
FILES = {
    ".gitignore": "__pycache__/\n",
    "quern/__init__.py": "_NAMES = {'Rule': 'quern.rules', 'load': 'quern.loading'}\ndef __getattr__(name): ...\n",
    "quern/rules.py": "",
    "quern/loading.py": "",
    "quern/part/__init__.py": "_NAMES = {'Inner': 'quern.inner'}\ndef __getattr__(name): ...\n",
    "quern/inner.py": "",
    "docs/python.md": "```python\nfrom quern import load as load_it\n```\n",
    "examples/loop.py": "import quern\n\nquern.load()\n",
    "tests/test_from.py": "from quern import (\n    Rule,\n)\n",
    "tests/test_used.py": "import quern\nCLASS = quern.Rule\n",
    "tests/test_text.py": "PROGRAM = f'import quern\\nquern.load({1})'\n",
    "tests/test_written.py": "SCRIPT = 'import os\\nfrom quern import Rule\\n' + 'class A(Rule): ...'\n",
    "tests/test_unsure.py": "import quern\ngetattr(quern, 'lo' + 'ad')(quern.Rule)\n",
    "tests/test_renamed.py": "import quern as q\nq.load()\n",
    "tests/test_patched.py": "TARGET = 'quern.load'\n",
    "tests/test_page.py": "PAGE = 'docs', 'python.md'\n",
    "tests/test_loop.py": "SCRIPT = 'examples/loop.py'\n",
    "tests/test_inner.py": "from quern import part\n",
    "tests/test_version.py": "import quern\nVERSION = quern.__version__\n",
    "tests/test_told.py": "TOLD = 'expected a quern.Rule'\n",
    "quern/errors.py": "",
    "quern/low.py": "def low(): ...\n",
    "quern/high/__init__.py": "from .deep import deep\n",
    "quern/high/deep.py": "def deep():\n    from ..low import low\n    return low\n",
    "quern/high/rules.txt": "",
    "quern/program.py": "import quern.errors\n",
    "quern/commands/__init__.py": "",
    "quern/commands/main.py": "import importlib\nrun = lambda one: importlib.import_module(f'quern.commands.{one}')\n",
    "quern/commands/one.py": "",
    "benchmarks/speed.py": "import quern.low\n",
    "configs/small.yaml": "",
    "docs/guide.md": "",
    "pyproject.toml": "",
    "quern/tool/__init__.py": "",
    "quern/tool/__main__.py": "",
    "tests/test_tool.py": "COMMAND = ['-m', 'quern.tool']\n",
    "tests/conftest.py": "'''Starts quern.commands.main, say.'''\nfrom support.impact import Sources\n",
    "tests/support/impact.py": "UNREAD = '.github', '.ci/long-green'\n",
    "tests/part/draw.py": "DRAWN = 'drawn.yaml'\n",
    "tests/part/drawn.yaml": "",
    "tests/data/golden.json": "",
    "tests/support/__init__.py": "",
    "tests/support/case.py": "from quern.low import low\n",
    "tests/test_low.py": "import quern.low\n",
    "tests/test_high.py": "from quern import high\n",
    "tests/part/conftest.py": "import quern.errors\n",
    "tests/part/test_case.py": "from support.case import low\nPATHS = 'golden.json', 'beside.py'\n",
    "tests/part/test_program.py": "COMMAND = ['-m', 'quern.program', 'configs/small.yaml']\n",
    "tests/test_command.py": "from quern.commands import main\n",
    "tests/support/started.py": "",
    "tests/test_started.py": "COMMAND = ['-m', 'support.started']\n",
    "tests/part/beside.py": "",
    "tests/test_speed.py": "import speed\nGUIDE = 'docs/guide.md'\n",
}
ALL = {path for path in FILES if "/test_" in path}
EVERY = " ".join(re.findall(r"/test_(\w+)", " ".join(ALL)))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("quern/low.py", "low high case speed"),
        ("quern/high/deep.py", "high"),
        ("quern/high/rules.txt", "high"),
        ("quern/program.py", "program"),
        ("quern/commands/one.py", "command"),
        ("quern/errors.py", "case program"),
        ("quern/tool/__main__.py", "tool"),
        ("quern/rules.py", "from used written unsure renamed"),
        ("quern/loading.py", "text unsure renamed patched page loop"),
        ("quern/inner.py", "inner"),
        ("examples/loop.py", "loop"),
        ("quern/__init__.py", EVERY.replace("started", "")),
        ("benchmarks/speed.py", "speed"),
        ("tests/support/case.py", "case"),
        ("tests/part/conftest.py", "case program"),
        ("tests/support/started.py", "started"),
        ("tests/part/beside.py", "case"),
        ("tests/test_low.py", "low"),
        ("tests/test_gone.py", ""),
        ("tests/data/golden.json", "case"),
        ("configs/small.yaml", "program"),
        ("docs/guide.md", "speed"),
        ("docs/log.md", ""),
        (".github/workflows/ci.yml", ""),
        (".ci/long-green", ""),
        ("tests/support/impact.py", ""),
        ("tests/part/drawn.yaml", ""),
        ("tests/conftest.py", EVERY),
    ],
)
def test_tests_that_reach_a_file_are_those_it_can_break(tree: Path, changed: str, tests: str) -> None:
    found = Sources(tree).affected([changed])
    assert found == {path for path in ALL if re.search(r"test_(\w+)", path)[1] in tests.split()}  # type: ignore[index]


@pytest.mark.parametrize(
    "changed", ["pyproject.toml", "constraints.txt", "quern/gone.py", "data.bin", "Makefile", "tests/gone/conftest.py"]
)
def test_where_readers_cannot_be_told_all_tests_are_affected(tree: Path, changed: str) -> None:
    assert Sources(tree).affected(["docs/log.md", changed]) is None


@pytest.mark.long
def test_a_change_of_this_tree_affects_what_it_can_break_and_not_all() -> None:
    sources = Sources(ROOT)
    for path in ("quern/lineage/sql/query.py", "quern/model/loss.py", "quern/train/profiling/__main__.py"):
        found = sources.affected([path])
        assert found, path
        assert len(found) < len(sources.tests) * 2 / 3, path
    assert sources.affected(["tests/conftest.py"]) == set(sources.tests)


@pytest.mark.long
def test_what_grimp_finds_is_reached() -> None:
    """grimp is another reader of imports; what it says a module imports is never missed, nor what that imports."""
    graph, sources = grimp.build_graph("quern"), Sources(ROOT)
    paths = {name: path for path in sources.direct for name in [path.removesuffix(".py").replace("/", ".")]}
    paths |= {name.removesuffix(".__init__"): path for name, path in paths.items()}
    missed = {}
    for name in sorted(graph.modules):
        reached = sources.reached(paths[name]).keys()
        for one in graph.find_modules_directly_imported_by(name):
            if more := {paths[one], *sources.reached(paths[one])} - reached:
                missed[name] = more
    assert len(graph.modules) > 300
    assert not missed


@pytest.fixture
def checkout(tree: Path) -> Callable[..., str]:
    """``run(*options)`` of pytest in a repository with these tests and our conftest; what it printed."""
    shutil.copy(ROOT / "tests" / "conftest.py", tree / "tests")
    shutil.copy(ROOT / "tests" / "support" / "impact.py", tree / "tests" / "support")
    shutil.copytree(ROOT / "tests" / "support" / "programs", tree / "tests" / "support" / "programs")
    for path in ALL:
        (tree / path).write_text("")  # nothing but what is wanted of each
    (tree / "quern" / "low.py").write_text("def low(): return 1\n")
    (tree / "tests" / "test_low.py").write_text(
        "import time\nimport pytest\nimport quern.low\n"
        "def reached(name): return [f'quern/{name}.py'] if name == 'errors' else ['quern/commands/one.py']\n"
        "def test_low(): time.sleep(0.4)\n"
        "@pytest.mark.reaches(files=reached)\n"
        "@pytest.mark.parametrize('name', ['errors', 'one'])\n"
        "def test_own(name): pass\n"
    )
    (tree / "tests" / "test_high.py").write_text(
        "import pytest\n"
        "def test_high(): pass\n"
        "@pytest.mark.parametrize('number', range(60))\n"
        "def test_many(number): pass\n"
    )
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)

    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    def run(*options: str) -> str:
        command = [python(), "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
        done = subprocess.run(
            [*command, "-o", "pythonpath=tests .", *options, "tests"],
            cwd=tree, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode in (0, 5), done.stdout + done.stderr
        return done.stdout

    return run


def passed(output: str) -> set[str]:
    return set(re.findall(r"::(\S+) (?:PASSED|SKIPPED)", output))


@pytest.mark.long
def test_the_options_choose_tests(checkout: Callable[..., str], tree: Path) -> None:
    many = {f"test_many[{number}]" for number in range(60)}
    everything = {"test_low", "test_own[errors]", "test_own[one]", "test_high", *many}
    later = str(time.time() + 600)
    assert (
        passed(checkout("--record-durations", "--changed-since", "no-such-commit", "--begin-before", later))
        == everything
    )
    noted = json.loads((tree / "tests" / "durations.json").read_text())
    assert noted["tests/test_low.py::test_low"] >= 0.4
    for name in ("errors", "low"):
        (tree / "quern" / f"{name}.py").write_text("new = 1\n")
    assert changed_since("HEAD", tree) == {"quern/errors.py", "quern/low.py", "tests/durations.json"}
    changed = {"test_low", "test_own[errors]"}
    assert passed(checkout("--changed-since", "HEAD")) == changed
    quarters = [
        set(
            re.findall(
                r"::(\S+)", checkout("--collect-only", "-qq", "--changed-since", "HEAD", "--also-quarter", number)
            )
        )
        for number in "0123"
    ]
    assert set.union(*quarters) == everything
    for one, other in itertools.combinations(quarters, 2):
        assert one & other == changed
    assert all(len(quarter & many) >= 5 for quarter in quarters)


@pytest.mark.slow
def test_tests_begin_before_the_time_or_not_at_all(checkout: Callable[..., str], tree: Path) -> None:
    """Fixtures neither: one that fails would be an error."""
    (tree / "tests" / "test_low.py").unlink()
    (tree / "tests" / "test_high.py").write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def late():\n    assert False\n"
        "def test_one(late): pass\n"
        "def test_two(): pass\n"
    )
    output = checkout("-n", "1", "--dist", "loadfile", "-rs", "--begin-before", str(time.time() - 1))
    assert len(re.findall("SKIPPED", output)) >= 2
    assert "not begun: the time for tests was over" in output
