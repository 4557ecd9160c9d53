"""Classifies a store's errors, and decides when a request is tried again.

What may pass by itself (5xx, ``SlowDown``, timeouts, broken connections) is tried again with exponential delays and
full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
"""

from __future__ import annotations

import datetime as dt
import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from quern.errors import QuernError, one_line

__all__ = ["Backoff", "ChangedError", "StoreError", "translated"]

T = TypeVar("T")

#: S3 error codes (Amazon S3 API reference, "Error responses"), and statuses where an answer has no body.
_PASSING = {
    "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "ThrottlingException",
    "RequestLimitExceeded", "BandwidthLimitExceeded", "TooManyRequests", "OperationAborted", "IncompleteBody",
    "BadDigest", "XAmzContentSHA256Mismatch", "InvalidDigest", "ConditionalRequestConflict",
}  # fmt: skip
_CREDENTIALS = {
    "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired",
    "SignatureDoesNotMatch", "AccessDenied", "AllAccessDisabled", "AccountProblem", "RequestTimeTooSkewed",
    "InvalidClientTokenId",
}  # fmt: skip
_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_WRONG = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}
_RENEW = "renew the credentials, or allow reading, listing and writing below this address"
#: Errors of aiohttp, botocore and fsspec that are no OSError and mean that an answer did not come, or not whole.
_NETWORK = {
    "ClientConnectionError", "ClientPayloadError", "ServerDisconnectedError", "HTTPClientError",
    "ConnectionError", "IncompleteReadError", "IncompleteRead", "ReadTimeoutError", "ResponseStreamingError",
    "ResponseParserError", "TimeoutError", "FSTimeoutError", "HTTPException", "ContentLengthError",
    "TransferEncodingError", "FlexibleChecksumError",
}  # fmt: skip


class StoreError(QuernError):
    """The store did not carry out a request.

    ``transient``: it may pass by itself. Otherwise somebody has to act, as the message says.
    ``retry_after_s``: how long the store wants to be left alone first (its ``Retry-After``).
    ``credentials``: it does not take those it was shown.
    """

    def __init__(self, message: str, *, transient: bool, retry_after_s: float = 0.0, credentials: bool = False) -> None:
        super().__init__(message)
        self.transient = transient
        self.retry_after_s = retry_after_s
        self.credentials = credentials

    def __reduce__(self) -> Any:  # errors travel between processes
        return _restored, (type(self), str(self), dict(vars(self)))


def _restored(kind: type[StoreError], message: str, state: dict[str, Any]) -> StoreError:
    error = kind.__new__(kind, message)
    error.args = (message,)
    error.__dict__.update(state)
    return error


class ChangedError(StoreError):
    """A condition on the object failed: it differs from the expected one, or exists already."""

    def __init__(self, message: str) -> None:
        super().__init__(message, transient=False)


@dataclass(frozen=True)
class Backoff:
    """When to try again: after ``random() · min(cap_s, base_s · 2ⁿ)`` seconds, ``budget_s`` in all for one request.

    A store that says how long it wants to be left alone is left alone that long, and then half the delay more.
    """

    base_s: float = 0.5
    cap_s: float = 30.0
    budget_s: float = 300.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    random: Callable[[], float] = field(default_factory=lambda: random.Random().random)
    """Uniform in [0, 1); by default seeded by the system, so that machines differ."""

    def run(self, action: Callable[[], T], stopped: Callable[[], bool] = lambda: False) -> T:
        """The result of ``action`` at its first success.

        Raises:
            StoreError: a permanent one at once; a transient one when the next try would exceed the budget, or once
                ``stopped`` says so.
        """
        start, tries = self.clock(), 0
        while True:
            try:
                return action()
            except StoreError as error:
                tries += 1
                if not error.transient or stopped():
                    raise
                delay = self.random() * min(self.cap_s, self.base_s * 2.0 ** min(tries - 1, 60))
                if error.retry_after_s:
                    delay = error.retry_after_s + delay / 2
                spent = self.clock() - start
                if spent + delay > self.budget_s:
                    message = f"{error}; given up after {tries} tries in {spent:.0f} s"
                    raise StoreError(message, transient=True) from error
            self.sleep(delay)


def translated(error: Exception, url: str, fix: str = "correct the address") -> StoreError | FileNotFoundError:
    """Classify a store's error by the answer's code, else by its type; ``fix`` is the advice to add."""
    code, status, headers = "", 0, {}
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        response = getattr(link, "response", None)
        if isinstance(response, dict) and not code:
            code = str(response.get("Error", {}).get("Code", ""))
            status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    if not code:  # another store's, or none that answered
        said = (getattr(error, name, None) for name in ("status", "status_code", "code"))
        status = next((number for number in said if isinstance(number, int)), 0)
        headers = getattr(error, "headers", None) or {}
    text = one_line(error)
    what = f"{url}: {f'{code}: ' if code else ''}{text}"
    number = error.errno if isinstance(error, OSError) else None
    names = {cls.__name__ for cls in type(error).__mro__}
    if code == "NoSuchBucket":
        return StoreError(f"{what}; create the bucket or {fix}", transient=False)
    if code == "PreconditionFailed" or status == 412:
        return ChangedError(f"{what}; the object is another one than expected")
    if code == "InvalidRange" or status == 416:
        return ChangedError(f"{what}; the object has no such bytes")
    if code in _PASSING or status in (408, 425, 429) or status >= 500:
        pause = _retry_after(headers)
        return StoreError(f"{what}; the store is overloaded or failing", transient=True, retry_after_s=pause)
    if code in _CREDENTIALS or status in (401, 403) or isinstance(error, PermissionError) or number in _REFUSED:
        return StoreError(f"{what}; {_RENEW}", transient=False, credentials=True)
    if names & {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"}:
        return StoreError(f"{what}; {_RENEW}", transient=False, credentials=True)
    if isinstance(error, FileNotFoundError):
        return error
    if names & _NETWORK:
        return StoreError(f"{what}; the store cannot be reached", transient=True)
    if 400 <= status < 500:  # S3 answers an expired token with 400, to HEAD without saying so
        return StoreError(f"{what}; {_RENEW}, or {fix}", transient=False, credentials=True)
    if number in _WRONG or isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
        return StoreError(f"{what}; {fix}", transient=False)
    if number in _FULL:
        return StoreError(f"{what}; make room there", transient=False)
    if isinstance(error, OSError):
        return StoreError(f"{what}; the store cannot be reached", transient=True)
    return StoreError(f"{type(error).__name__}: {what}; {fix} or its options", transient=False)


def _retry_after(headers: Any) -> float:
    """Seconds of a ``Retry-After`` (RFC 9110, section 10.2.3: a number, or a date), at most two minutes; else 0."""
    value = next((str(text) for name, text in headers.items() if name.lower() == "retry-after"), "").strip()
    if value.isdecimal():
        return float(min(int(value[:9]), 120))
    try:
        until = parsedate_to_datetime(value) - dt.datetime.now(dt.UTC)
    except (TypeError, ValueError):
        return 0.0
    return min(max(until.total_seconds(), 0.0), 120.0)
