"""Requests to a store by fsspec: each in bounded time, its errors translated, tried again as :mod:`.retry` says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.implementations.local import LocalFileSystem

from quern import storage
from quern.errors import InputError, QuernError
from quern.train.checkpoint.tiers.retry import Backoff, translated

__all__ = ["Connection"]


class Connection:
    """The file system of ``url``. Threads may share one.

    Attributes:
        root: the path of ``url`` in it.
        is_s3, is_local: whether it is S3, or this machine's.

    Raises:
        InputError: there is no such kind of store.
    """

    def __init__(self, url: str, backoff: Backoff, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        if self.url.endswith(":") or not self.url:
            raise InputError(f"{url}: expected a store with a bucket or folder, such as s3://bucket/run")
        self.backoff, self.timeout_s = backoff, timeout_s
        self.is_s3 = self.url.split("://")[0] in ("s3", "s3a")
        self._connect()

    def renew(self) -> None:
        """Begin a new session; credentials are read again from where they come from."""
        type(self.fs).clear_instance_cache()  # those that write
        self._connect()

    def _connect(self) -> None:
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self.is_s3:  # each request is tried once: how often and when it is tried again is decided here alone
            given = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
            limits = {"connect_timeout": min(self.timeout_s, 20.0), "read_timeout": self.timeout_s}
            options["config_kwargs"] = limits | given | {"retries": {"total_max_attempts": 1}}
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.url, **options)
        except (ValueError, ImportError) as error:
            raise InputError(f"{self.url}: no such store ({error})") from None
        self.is_local = isinstance(self.fs, LocalFileSystem)
        if self.is_s3:
            self.fs.retries = 1

    def locate(self, path: str) -> dict[str, str]:
        """Bucket and key, of S3."""
        bucket, key, _ = self.fs.split_path(path)
        return {"Bucket": bucket, "Key": key}

    def once(self, url: str, method: str, *arguments: Any, **options: Any) -> Any:
        """One request; FileNotFoundError if what it asks for is not there, else a StoreError."""
        try:
            if isinstance(self.fs, AsyncFileSystem):
                call = getattr(self.fs, f"_{method}")
                return sync(self.fs.loop, call, *arguments, timeout=self.timeout_s, **options)
            return getattr(self.fs, method)(*arguments, **options)
        except Exception as error:
            raise translated(error, url) from error

    def ask(self, url: str, method: str, *arguments: Any, **options: Any) -> Any:
        """As :meth:`once`, tried again while it may pass."""
        return self.backoff.run(lambda: self.once(url, method, *arguments, **options))

    def entries(self, path: str, url: str) -> list[dict[str, Any]]:
        """What is in a folder; nothing if there is no such folder."""
        try:
            return list(self.ask(url, "ls", path, detail=True))
        except FileNotFoundError:
            return []

    def write(self, url: str, pieces: Iterable[bytes]) -> None:
        """Write a file once; it appears when all ``pieces`` have been taken, or not at all. Not for S3."""
        try:
            with storage.publish(url) as file:
                for data in pieces:
                    file.write(data)
        except QuernError:  # of the pieces
            raise
        except Exception as error:
            raise translated(error, url) from error
