"""Help of ``quern`` is that of its groups, and imports none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from quern.cli import main

SHOWS = "import sys\nfrom quern.cli.main import main\nsys.argv[0] = 'quern'\ntry:\n    main()\nfinally:\n    "
SHOWS += "print(*sorted(name for name in ('pydantic', 'numpy', 'pyarrow', 'torch') if name in sys.modules))"


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_is_that_of_the_groups_and_imports_none(arguments: list[str]) -> None:
    shown = subprocess.run([sys.executable, "-c", SHOWS, *arguments], capture_output=True, text=True, check=False)
    *lines, imported = shown.stdout.splitlines()
    assert imported == ""
    expected = CliRunner().invoke(main.app, arguments, prog_name="quern")
    assert [line.rstrip() for line in lines] == [line.rstrip() for line in expected.output.splitlines()]
    assert shown.returncode == expected.exit_code
