"""Who may ask a node's server for files, and for which: the token, paths, links, names."""

from __future__ import annotations

import os

import pytest

from quern.errors import InputError
from quern.train.checkpoint.mirror.peer_server import PeerServer
from quern.train.checkpoint.mirror.peers import new_token
from support.train.peer_case import FOLDER, NAME, PLACE, TOKEN, content, head, put, put_head, record_of, refused, tree

pytestmark = pytest.mark.slow


def test_without_the_token_nothing_is_served_or_taken(there):
    data = content(100)
    put(there.root, data)
    before = tree(there.root)
    requests = [("GET", f"/{FOLDER}/"), ("GET", f"/{PLACE}"), ("HEAD", f"/{PLACE}"),
                ("PUT", f"/{FOLDER}/new"), ("DELETE", f"/{PLACE}"), ("GET", "/../etc/passwd")]  # fmt: skip
    wrong = ["", TOKEN[:-1], TOKEN + "0", TOKEN.upper(), "0" * 64, "é" * 64]
    for method, target in requests:
        for token in wrong:
            answer = there.ask(head(method, target, token=token, Content_Length=5, X_SHA256="0" * 64))
            assert answer.status == 401, (method, target, token)
            assert data[:20] not in answer
        for line in ("", f"Authorization: Basic {TOKEN}\r\n", f"Authorization: {TOKEN}\r\n",
                     f"Authorization: Bearer {TOKEN}\r\nAuthorization: Bearer {TOKEN}\r\n"):  # fmt: skip
            assert there.ask(f"{method} {target} HTTP/1.1\r\n{line}\r\n".encode()).status == 401
    with refused(there.port, "answered 401"):
        there.fetch(data, token="0" * 64)
    with refused(there.port, "answered 401"):
        there.send(b"new", token="0" * 64)
    assert there.waits == []
    assert tree(there.root) == before
    assert TOKEN not in repr(there.peer())
    for token in ("", "x" * 64, TOKEN[1:]):
        with pytest.raises(InputError, match="token: expected 64 hex digits"):
            PeerServer(str(there.root), "127.0.0.1", 0, token)
    with pytest.raises(InputError, match="timeout: expected seconds > 0, got 0"):
        PeerServer(str(there.root), "127.0.0.1", 0, TOKEN, timeout_s=0)
    assert len({new_token() for _ in range(100)}) == 100


OUTSIDE = [
    "/", "/..", "/../", "/../secret", "/../../etc/passwd", "//etc/passwd", "/etc/passwd", "/secret", "/other/secret",
    f"/{FOLDER}/../secret", f"/{FOLDER}/../../secret", f"/{FOLDER}/..", f"/{FOLDER}/.", f"/{FOLDER}//{NAME}",
    f"/{FOLDER}/./{NAME}", f"//{PLACE}", f"/./{PLACE}", f"/{FOLDER}/sub/{NAME}", f"/{PLACE}/",
    f"/{FOLDER}/%2e%2e/secret", f"/{FOLDER}/..%2fsecret", f"/{FOLDER}/%2e%2e%2fsecret", f"/%2e%2e/{PLACE}",
    f"/{FOLDER}/%5f_0_0.distcp", f"/{FOLDER}/..\\secret", f"/{FOLDER}/x\0", f"/{PLACE}\0",
    f"/\0{PLACE}",
    f"/{FOLDER}/..secret", f"/{FOLDER}/" + "x" * 129, f"/{FOLDER}/" + "x" * 5000, "/" + "../" * 2000 + "etc/passwd",
    "/step_" + "1" * 21 + f"/{NAME}", f"/{FOLDER}", f"/.{FOLDER}.mirror/", f"/.{FOLDER}.mirror/{NAME}", "/step_1/x",
    f"/{FOLDER}/.{NAME}.{'0' * 32}.tmp", f"http://127.0.0.1/{PLACE}", f"file:///{PLACE}", "*", "",
    f"/{PLACE}?", f"/{PLACE}?partial=../../secret", f"/{PLACE}#x", f"/{FOLDER}/?x",
    f"/{FOLDER}/\xfcber", f"/step_0000100\xb2/{NAME}",
]  # fmt: skip


def test_no_path_leads_elsewhere(node, tmp_path):
    there = node(tmp_path / "served")
    data = content(100)
    put(there.root, data)
    for folder, name in ((FOLDER, f".{NAME}.{'0' * 32}.tmp"), (FOLDER, "..secret"), ("other", "secret"),
                         (f".{FOLDER}.mirror", NAME), ("step_1", NAME), (".", "secret"), ("..", "secret")):  # fmt: skip
        put(there.root, b"SECRET", name, folder)
    before = tree(tmp_path)
    for target in OUTSIDE:
        for method in ("GET", "HEAD", "PUT"):
            answer = there.ask(head(method, target, Content_Length=3, X_SHA256="0" * 64) + b"abc", end=True)
            assert answer.status in (400, 404), (method, target)
            assert b"SECRET" not in answer
            assert data[:20] not in answer
    for method, target in (("DELETE", f"/{PLACE}"), ("POST", "/"), ("BREW", "/"), ("PUT", f"/{FOLDER}/")):
        assert there.ask(head(method, target, Content_Length=0)).status == 405
    assert tree(tmp_path) == before


def test_links_are_not_followed(there, tmp_path):
    away = tmp_path / "away"
    data = content(1000)
    put(away, b"SECRET")
    put(there.root, data, "real")
    (there.root / FOLDER / "link").symlink_to(away / PLACE)
    (there.root / FOLDER / "up").symlink_to("..")
    (there.root / "step_00000009").symlink_to(away / FOLDER)
    (there.root / ".step_00000008.mirror").symlink_to(away)
    os.mkfifo(there.root / FOLDER / "pipe")
    (there.root / FOLDER / "folder").mkdir()
    before = tree(away)
    for target in (f"/{FOLDER}/link", f"/{FOLDER}/up", f"/step_00000009/{NAME}", "/step_00000009/", f"/{FOLDER}/pipe",
                   f"/{FOLDER}/folder"):  # fmt: skip
        answer = there.ask(head("GET", target))
        assert (answer.status, b"SECRET" in answer) == (404, False), target
    for target in (f"/step_00000009/{NAME}", f"/step_00000008/{NAME}", f"/{FOLDER}/folder"):
        assert there.ask(put_head(data, target) + data).status == 500
    assert there.ask(put_head(data, f"/{FOLDER}/link") + data).status == 201  # the link itself is replaced
    assert tree(away) == before
    assert not (there.root / FOLDER / "link").is_symlink()
    assert (there.root / FOLDER / "link").read_bytes() == data


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a b", "a\r\nX: y", "x\0", "..x", "ü", "x" * 129, "a?b=c"]
)
def test_names_are_checked_before_anything_is_asked(there, name):
    there.close()
    peer = there.peer()
    path = str(put(there.here, b"x"))
    with pytest.raises(InputError, match="expected a plain file name"):
        peer.fetch(FOLDER, name, record_of(b"x"), str(there.here))
    with pytest.raises(InputError, match="expected a plain file name"):
        peer.send(FOLDER, name, path, record_of(b"x"))
    with pytest.raises(InputError, match="folder: expected a checkpoint's"):
        peer.fetch(name, "x", record_of(b"x"), str(there.here))
    with pytest.raises(InputError, match="folder: expected a checkpoint's"):
        peer.files(name)
    assert there.waits == []
