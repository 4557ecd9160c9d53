"""Whether an installed quern is whole: every file of the package in the checkout at ROOT is there with the same bytes.

python installed.py ROOT
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path


def main(root: str) -> None:
    import quern

    source, installed = Path(root).resolve() / "quern", Path(quern.__file__).resolve().parent
    if installed == source:
        sys.exit(f"{installed}: is the checkout itself, expected an installed package")
    if version("quern") != quern.__version__:
        sys.exit(f"the distribution is {version('quern')}, the package in it {quern.__version__}")
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc")
    missing = [str(name) for name in files if not (installed / name).is_file()]
    if missing:
        sys.exit("not installed: " + ", ".join(missing))
    other = [str(name) for name in files if (installed / name).read_bytes() != (source / name).read_bytes()]
    if other:
        sys.exit("installed with other bytes: " + ", ".join(other))
    data = sum(name.suffix != ".py" for name in files)
    print(f"quern {quern.__version__}: {len(files)} files in {installed}, {data} of them data")


if __name__ == "__main__":
    main(sys.argv[1])
