"""Starts or joins Ray, and watches its ports, because Ray's own calls block when its control store is gone."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quern import storage
from quern.errors import InputError, QuernError, ended_by, first_line

__all__ = ["Pulse", "pulse_of", "start"]

#: Seconds, 60 if not set, after which Ray ends this process when it has lost a cluster's store.
_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
OBJECT_STORE_BYTES = 256 << 20
#: Seconds between two looks, and for which one waits for an answer.
_LOOK_S = 1.0


def start(workers: int | None, address: str | None) -> None:
    """Start a Ray on this machine, or connect to the one at ``address``; handlers of SIGTERM stay."""
    import ray
    from ray.exceptions import RayError

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"address": address, "logging_level": "error", "log_to_driver": False}
    if address is None:
        # "local": never a cluster that RAY_ADDRESS or an earlier `ray start` names. Without workers, Ray counts the
        # CPUs, and those of a container's share only.
        options |= {"address": "local", "num_cpus": workers, "object_store_memory": OBJECT_STORE_BYTES}
        options["include_dashboard"] = False
        _keep_token_private()
    heard, timer = signal.getsignal(signal.SIGTERM), signal.getitimer(signal.ITIMER_REAL)
    main = threading.current_thread() is threading.main_thread()
    try:
        with storage.needs_room(tempfile.gettempdir()):
            ray.init(job_config=_job(), **options)
    except (SystemExit, KeyboardInterrupt) as ended:
        if main:  # Ray's handler of a signal sets an alarm that aborts this process, and then calls the one before it
            signal.setitimer(signal.ITIMER_REAL, *timer)
        if isinstance(ended, SystemExit):  # Ray listens to it too, and has heard it first
            ended_by.append("SIGTERM")
        raise KeyboardInterrupt from None
    except storage.FullError:
        raise
    except Exception as error:  # Ray raises no class of its own when a machine is too busy for it to start
        why = first_line(error)
        if address is None:
            raise QuernError(f"no Ray could be started on this machine ({why})") from None
        if isinstance(error, ValueError):
            raise InputError(f'ray.address: expected "auto" or host:port, got {address!r} ({why})') from None
        if isinstance(error, ConnectionError | RuntimeError | RayError):
            raise QuernError(f"ray.address: no Ray cluster at {address!r} ({why})") from None
        raise
    finally:
        if callable(heard) and main:
            signal.signal(signal.SIGTERM, heard)


def _keep_token_private() -> None:
    """See that no other user can read the token that a Ray of this machine asks for; Ray leaves that to the umask."""
    if os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} or os.environ.get("RAY_AUTH_MODE") == "disabled":
        return
    # Ray says what is wrong with the folder, or that there is no home; of two starts at once one makes the file
    with suppress(OSError, RuntimeError):
        path = Path.home() / ".ray" / "auth_token"
        if os.path.lexists(path):
            if not path.is_symlink():
                path.chmod(0o600)
            return
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # of mode 0600
            file.write(secrets.token_hex(32))
            file.flush()
            os.link(file.name, path)


class _NoFolders(list[str]):
    """Ray puts the folders of the driver's script and its working folder here, for its workers to import from first."""

    def extend(self, folders: Iterable[str]) -> None:
        pass


def _job() -> Any:
    """A job whose workers import from where their Python does: anybody's files may lie in the working folder."""
    from ray.job_config import JobConfig

    job = JobConfig()
    job._py_driver_sys_path = _NoFolders()
    return job


class Pulse:
    """Checks, at most once a second, whether all ``addresses`` (``host:port``) accept connections.

    Where one has refused for ``patience_s`` seconds it has gone for good, which ``message`` says.
    """

    def __init__(self, addresses: Sequence[str], patience_s: float, message: str) -> None:
        self._addresses, self._patience_s, self._message = addresses, patience_s, message
        self._looked = float("-inf")
        self._refused_since = float("inf")
        self.beats = True

    def check(self, *, again: bool = False) -> bool:
        """Whether all addresses accept connections; ``again`` forces a new check within a second.

        Raises:
            QuernError: one has gone for good.
        """
        now = time.monotonic()
        if again or now - self._looked >= _LOOK_S:
            self._looked = now
            self.beats = not any(_refuses(address) for address in self._addresses)
            self._refused_since = float("inf") if self.beats else min(self._refused_since, now)
        if now - self._refused_since >= self._patience_s:
            raise QuernError(self._message)
        return self.beats


def _refuses(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_S).close()
    except OSError as error:  # that no answer comes proves nothing: a machine may be busy
        return isinstance(error, ConnectionRefusedError)
    return False


def pulse_of(local: bool) -> Pulse:
    """The check that Ray still lives: a local one, which nobody else would start again, or a cluster's control store,
    which may come back."""
    import ray

    store = str(ray.get_runtime_context().gcs_address)
    if local:
        raylets = [f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in ray.nodes()]
        return Pulse([store, *raylets], 0.0, "the Ray of this run has died on this machine; the same command goes on")
    patience = float(os.environ.get(_PATIENCE, "60")) / 2
    return Pulse([store], patience, f"the Ray cluster at {store} has gone; the same command goes on once there is one")
