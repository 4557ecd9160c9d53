"""The working folder may hold anybody's files: no process of quern imports a ``torch.py`` or ``yaml.py`` from there.

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
    """Import nothing more from the working folder, here and in every Python that this process starts.

    Called by entry points before they import what is large. A folder that ``PYTHONPATH`` names stays.
    """
    os.environ["PYTHONSAFEPATH"] = "1"
    if sys.flags.safe_path or not sys.path:
        return
    named = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if sys.path[0] in ("", os.getcwd()) and os.getcwd() not in named:
        del sys.path[0]
