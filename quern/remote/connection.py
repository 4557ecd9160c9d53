"""Makes fsspec requests with a time-out, translated errors, and retries by :mod:`.retry`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.implementations.local import LocalFileSystem

from quern.errors import InputError
from quern.remote.retry import Backoff, StoreError, translated

__all__ = ["Connection"]

_RENEW_AFTER_S = 60.0


class Connection:
    """The connection to the file system of ``url``. Threads may share one.

    Attributes:
        root: the path of ``url`` in it.
        is_s3, is_http, is_local: whether it is S3, a web server, or this machine's.

    Args:
        fix: what errors advise, where nothing better is known.
        width: requests under way at a time; the others wait.
        renews: whether credentials that the store does not take are read again, once a minute, before that is an error.

    Raises:
        InputError: there is no such kind of store.
    """

    def __init__(
        self,
        url: str,
        backoff: Backoff,
        timeout_s: float,
        fix: str = "correct the address",
        *,
        width: int | None = None,
        renews: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        if self.url.endswith(":") or not self.url:
            raise InputError(f"{url}: expected a store with a bucket or folder, such as s3://bucket/run")
        self.backoff, self.timeout_s, self.fix = backoff, timeout_s, fix
        scheme = self.url.split("://")[0]
        self.is_s3, self.is_http = scheme in ("s3", "s3a"), scheme in ("http", "https")
        self._slots = threading.BoundedSemaphore(width) if width else nullcontext()
        self._renewed_at = float("-inf") if renews else float("inf")
        self._renewing = threading.Lock()
        self._connect()

    def renew(self) -> None:
        """Open a new session; credentials are read again from their source."""
        type(self.fs).clear_instance_cache()  # those that write
        self._connect()

    def _connect(self) -> None:
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self.is_s3:  # each request is tried once: how often and when it is tried again is decided here alone
            given = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
            limits = {"connect_timeout": min(self.timeout_s, 20.0), "read_timeout": self.timeout_s}
            options["config_kwargs"] = limits | given | {"retries": {"total_max_attempts": 1}}
        elif self.is_http:  # read the stored bytes, without content decoding
            given = fsspec.config.conf.get("http", {}).get("client_kwargs", {})
            options["client_kwargs"] = {"trust_env": True} | given | {"auto_decompress": False}
        try:
            fs, root = fsspec.core.url_to_fs(self.url, **options)
        except (ValueError, ImportError) as error:
            raise InputError(f"{self.url}: no such store ({error})") from None
        if self.is_s3:
            fs.retries = 1
        self.is_local = isinstance(fs, LocalFileSystem)
        self.fs, self.root = fs, root

    def locate(self, path: str) -> dict[str, str]:
        """Bucket and key, of S3."""
        bucket, key, _ = self.fs.split_path(path)
        return {"Bucket": bucket, "Key": key}

    def once(self, url: str, method: str | Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """One request, by a method of the file system or a coroutine function that is given it.

        Raises:
            FileNotFoundError: what is asked for is not there.
            StoreError: anything else.
        """
        tried: list[Any] = []
        try:
            return self._once(tried, url, method, *arguments, **options)
        except StoreError as error:
            if not error.credentials or not self._renewed(tried[0]):
                raise
        return self._once(tried, url, method, *arguments, **options)

    def _renewed(self, refused: Any) -> bool:
        """Whether there is a newer session than ``refused``; several threads may have been refused at once."""
        with self._renewing:
            if self.fs is not refused:
                return True
            if time.monotonic() - self._renewed_at < _RENEW_AFTER_S:
                return False
            self._renewed_at = time.monotonic()
            self.renew()
            return True

    def _once(
        self, tried: list[Any], url: str, method: str | Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        with self._slots:
            fs = self.fs
            tried[:] = [fs]
            try:
                if callable(method):
                    return sync(fs.loop, method, fs, *arguments, timeout=self.timeout_s, **options)
                if isinstance(fs, AsyncFileSystem):
                    return sync(fs.loop, getattr(fs, f"_{method}"), *arguments, timeout=self.timeout_s, **options)
                return getattr(fs, method)(*arguments, **options)
            except StoreError:
                raise
            except Exception as error:
                raise self.translated(error, url) from error

    def translated(self, error: Exception, url: str) -> StoreError | FileNotFoundError:
        """The meaning of an error of this store."""
        return translated(error, url, self.fix)

    def ask(self, url: str, method: str | Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Like :meth:`once`, with retries of transient errors."""
        return self.backoff.run(lambda: self.once(url, method, *arguments, **options))

    def entries(self, path: str, url: str) -> list[dict[str, Any]]:
        """What is in a folder; nothing if there is no such folder."""
        try:
            return list(self.ask(url, "ls", path, detail=True))
        except FileNotFoundError:
            return []
