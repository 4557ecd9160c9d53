"""A sample site in seven languages, made by code: what ``quern demo`` grinds when there is no network.

Nothing here imports the rest of quern: the site is written as a stranger's crawler would have left it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quern.demo.site import Site, SitePage, write_site

__all__ = ["Site", "SitePage", "write_site"]


def __getattr__(name: str) -> Any:
    # Lazily, so that ``python -m quern.demo.site`` does not find its own module imported already.
    if name in __all__:
        from quern.demo import site

        return getattr(site, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
