"""The byte-to-character table of byte-level BPE."""

from __future__ import annotations

__all__ = ["shown_bytes"]


def shown_bytes() -> dict[int, str]:
    """How byte-level BPE writes each byte as one printable character (GPT-2's ``bytes_to_unicode``)."""
    shown = {b: chr(b) for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
    hidden = [b for b in range(256) if b not in shown]
    return shown | {b: chr(256 + i) for i, b in enumerate(hidden)}
