"""The base of classes whose objects are closed at the end of a ``with`` block."""

from abc import abstractmethod
from typing import Self

__all__ = ["Closes"]


class Closes:
    """Leaving the ``with`` closes it, whatever the block raised."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
