"""What a store's errors mean, and when a request is tried again.

What may pass by itself (5xx, ``SlowDown``, timeouts, broken connections) is tried again with exponential delays and
full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from quern.errors import QuernError

__all__ = ["Backoff", "IncompleteError", "SourceError", "StoreError", "translated"]

T = TypeVar("T")

#: S3 error codes (Amazon S3 API reference, "Error responses"), and statuses where an answer has no body.
_PASSING = {
    "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "ThrottlingException",
    "RequestLimitExceeded", "BandwidthLimitExceeded", "TooManyRequests", "OperationAborted", "IncompleteBody",
    "BadDigest", "XAmzContentSHA256Mismatch", "InvalidDigest",
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
    """The store did not do what it was asked.

    ``transient``: it may pass by itself. Otherwise somebody has to act, as the message says.
    """

    def __init__(self, message: str, *, transient: bool) -> None:
        super().__init__(message)
        self.transient = transient


class IncompleteError(StoreError):
    """A manifest was to be put, and files that it names are not there yet: other nodes are still at it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, transient=True)


class SourceError(QuernError):
    """A local file that was to be put is missing, or no longer holds the bytes that were saved."""


@dataclass(frozen=True)
class Backoff:
    """When to try again: after ``random() · min(cap_s, base_s · 2ⁿ)`` seconds, ``budget_s`` in all for one request."""

    base_s: float = 0.5
    cap_s: float = 30.0
    budget_s: float = 300.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    random: Callable[[], float] = field(default_factory=lambda: random.Random().random)
    """Uniform in [0, 1); by default seeded by the system, so that machines differ."""

    def run(self, action: Callable[[], T], stopped: Callable[[], bool] = lambda: False) -> T:
        """What ``action`` returns, at its first success.

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
                spent = self.clock() - start
                if spent + delay > self.budget_s:
                    message = f"{error}; given up after {tries} tries in {spent:.0f} s"
                    raise StoreError(message, transient=True) from error
            self.sleep(delay)


def translated(error: Exception, url: str) -> StoreError | FileNotFoundError:
    """What a store's error means, told from the answer's code, else from its type."""
    code, status = "", 0
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        response = getattr(link, "response", None)
        if isinstance(response, dict) and not code:
            code = str(response.get("Error", {}).get("Code", ""))
            status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    if not code:  # another store's, or none that answered
        said = [getattr(error, name, None) for name in ("status", "code", "status_code")]
        status = next((number for number in said if isinstance(number, int)), 0)
    text = " ".join(str(error).split())[:300] or type(error).__name__
    what = f"{url}: {f'{code}: ' if code else ''}{text}"
    number = error.errno if isinstance(error, OSError) else None
    names = {cls.__name__ for cls in type(error).__mro__}
    if code == "NoSuchBucket":
        return StoreError(f"{what}; create the bucket or correct checkpoint.store", transient=False)
    if code in _PASSING or status in (408, 425, 429) or status >= 500:
        return StoreError(f"{what}; the store is overloaded or failing", transient=True)
    if code in _CREDENTIALS or status in (401, 403) or isinstance(error, PermissionError) or number in _REFUSED:
        return StoreError(f"{what}; {_RENEW}", transient=False)
    if names & {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"}:
        return StoreError(f"{what}; {_RENEW}", transient=False)
    if isinstance(error, FileNotFoundError):
        return error
    if names & _NETWORK:
        return StoreError(f"{what}; the store cannot be reached", transient=True)
    if 400 <= status < 500:  # S3 answers an expired token with 400, to HEAD without saying so
        return StoreError(f"{what}; {_RENEW}, or correct checkpoint.store", transient=False)
    if number in _WRONG or isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
        return StoreError(f"{what}; correct checkpoint.store", transient=False)
    if number in _FULL:
        return StoreError(f"{what}; make room there", transient=False)
    if isinstance(error, OSError):
        return StoreError(f"{what}; the store cannot be reached", transient=True)
    return StoreError(f"{type(error).__name__}: {what}; correct checkpoint.store or its options", transient=False)
