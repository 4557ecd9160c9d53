"""Removes the working folder from the import path: a ``torch.py`` or ``yaml.py`` there must not be imported.

``python -m`` puts the working folder first on the path of imports. A process that quern starts is started with ``-P``
(:func:`module`); an entry point takes the folder off its own path, and lets everything that it starts do without
(:func:`leave_working_folder`). Imports nothing that is not loaded when Python has started.
"""

import os
import sys

__all__ = ["leave_working_folder", "module"]


def module(name: str, *arguments: str) -> list[str]:
    """The command by which this Python runs a module of quern's as a program."""
    return [sys.executable, "-P", "-m", name, *arguments]


def leave_working_folder() -> None:
    """Stop importing from the working folder, in this process and every Python that it starts.

    Called by entry points before they import what is large. A folder that ``PYTHONPATH`` names stays.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if "PYTHONPATH" in os.environ:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)  # an empty place in it is the working folder, too
    try:
        here = os.getcwd()
        stays = here in map(os.path.abspath, named)
    except OSError:  # the folder was removed
        here, stays = "", False
    library = os.path.dirname(os.__file__)  # behind it stand folders of installed packages, of which this may be one
    end = sys.path.index(library) if library in sys.path else len(sys.path)
    if not stays:
        sys.path[:end] = [path for path in sys.path[:end] if path not in ("", here)]
