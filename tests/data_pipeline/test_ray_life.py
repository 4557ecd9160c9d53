"""Whether Ray is there is told by who listens: gone at once, gone for good, back again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from quern.data_pipeline.execution import engine, ray_life
from quern.data_pipeline.execution.ray_life import Pulse
from quern.errors import QuernError


def listening(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def test_who_does_not_listen_is_gone_when_patience_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(ray_life, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with listening() as first, listening() as second:
        ports = [server.getsockname()[1] for server in (first, second)]
        pulse = Pulse([f"127.0.0.1:{port}" for port in ports], 30.0, "it has gone")
        assert pulse.check()
        second.close()
        assert pulse.check(), "it is not looked at again within a second"
        now[0] = 10.0
        assert not pulse.check()
        assert not pulse.beats
        now[0] = 39.0
        assert not pulse.check()
        with listening(ports[1]):
            now[0] = 41.0
            assert pulse.check(), "it is back"
        now[0] = 50.0
        assert not pulse.check()
        now[0] = 79.0
        assert not pulse.check(), "it was back in between"
        now[0] = 80.0
        with pytest.raises(QuernError, match="it has gone"):
            pulse.check()


def test_without_patience_it_is_gone_at_the_first_look_and_stays_so() -> None:
    with listening() as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    pulse = Pulse([address], 0.0, "it has gone")
    for _ in range(2):
        with pytest.raises(QuernError, match="it has gone"):
            pulse.check()
    assert not pulse.beats


def test_what_a_worker_died_of_is_not_asked_of_a_ray_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for an answer until Ray ends this process, a minute later; an earlier look says nothing."""
    monkeypatch.setattr(engine, "_is_loss", lambda *_: pytest.fail("Ray was asked"))
    pool = engine.RayPool(1)
    with listening() as server:
        pool.pulse = Pulse([f"127.0.0.1:{server.getsockname()[1]}"], 0.0, "it has gone")
        assert pool.pulse.check()
    with pytest.raises(QuernError, match="it has gone"):
        pool._lost(RuntimeError(), None)


def test_a_signal_that_ray_hears_while_it_starts_aborts_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """absl's handler sets an alarm of 3 s, whose handler aborts, and then calls the one before it."""

    def starting(**_: object) -> None:
        signal.alarm(3)
        raise KeyboardInterrupt

    before = signal.setitimer(signal.ITIMER_REAL, 1000)  # somebody's own stays, a limit of the tests for one
    try:
        monkeypatch.setattr(ray, "init", starting)
        with pytest.raises(KeyboardInterrupt):
            ray_life.start(1, None)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        monkeypatch.setattr(ray, "init", lambda **_: None)
        ray_life.start(1, None)
        still, _ = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
    assert min(left, still) > 100


@pytest.mark.parametrize("made", ["", "ab" * 32])
def test_nobody_else_can_read_the_token_of_a_local_ray(tmp_path: Path, made: str) -> None:
    (tmp_path / ".ray").mkdir()
    if made:
        (tmp_path / ".ray" / "auth_token").write_text(made)
    program = (
        "import os, ray; from quern.data_pipeline.execution import ray_life\n"
        "os.umask(0o022); ray.init = lambda **_: None; ray_life.start(1, None)"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH_")}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], env={**env, "HOME": str(tmp_path)}, check=True)
        (token,) = (tmp_path / ".ray").iterdir()
        assert (token.name, token.stat().st_mode & 0o777) == ("auth_token", 0o600)
        made = made or token.read_text()
        assert (token.read_text(), len(made)) == (made, 64)


def test_that_no_answer_comes_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", busy)
    assert Pulse(["127.0.0.1:1"], 0.0, "it has gone").check()
