"""Reads network interfaces and adapters from ``/sys``, and tries whether a Ray cluster can be reached."""

from __future__ import annotations

import os
import socket
from collections import Counter
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["interfaces", "ray_answers"]


def interfaces(root: str = "/sys") -> dict[str, Any]:
    """``facts``: InfiniBand's ports, as ``8 × 4: ACTIVE 400 Gb/sec (4X NDR)``; ``shown``: interfaces that are up, with
    those that have hardware behind them as ``2 × 100000 Mb/s, MTU 9000``. A machine may have one more for its own
    management."""
    found, names = Counter[str](), []
    folder = os.path.join(root, "class/net")
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        if _read(folder, name, "operstate") == "up":
            names.append(name)
            if os.path.exists(os.path.join(folder, name, "device")):
                speed = _read(folder, name, "speed")
                known = f"{speed} Mb/s" if speed.isdecimal() else "speed unknown"  # virtual ones say -1
                found[f"{known}, MTU {_read(folder, name, 'mtu')}"] += 1
    ports = Counter[str]()
    folder = os.path.join(root, "class/infiniband")
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        for port in sorted(os.listdir(os.path.join(folder, name, "ports"))):
            ports[f"{_read(folder, name, 'ports', port, 'state')} {_read(folder, name, 'ports', port, 'rate')}"] += 1
    facts = {"infiniband": _told(ports)} if ports else {}
    return {"facts": facts, "shown": {"interfaces": f"{', '.join(names) or 'none up'} ({_told(found)})"}}


def ray_answers(address: str | None) -> dict[str, Any]:
    """``facts``: Ray's version; ``problems``: nothing listens at ``host:port``. Ray itself is not imported."""
    try:
        facts = {"ray": version("ray")}
    except PackageNotFoundError:
        facts = {"ray": "not installed"}
    if address is None or address == "auto":
        return {"facts": facts}
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        return {"facts": facts, "problems": [{"code": "ray", "text": f"ray.address {address}: {error}"}]}
    return {"facts": facts}


def _read(*parts: str) -> str:
    with suppress(OSError, ValueError), open(os.path.join(*parts)) as file:
        return file.read(200).strip()
    return ""


def _told(found: Counter[str]) -> str:
    return "; ".join(f"{count} × {what}" for what, count in sorted(found.items())) or "none"
