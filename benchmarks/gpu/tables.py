"""The results of ``precision.py`` as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SCALINGS = ("tensorwise", "rowwise", "blockwise")
BASE = "bf16"
PEER = "transformers"


def text_of(document: Mapping[str, Any]) -> str:
    """All there is, group by group."""
    rows, spec = document["rows"], document["spec"]
    blocks = [[document["machine"]]]
    if "ceilings" in rows and not rows["ceilings"]["error"]:
        blocks.append(ceilings(rows["ceilings"]))
    if "products" in rows and not rows["products"]["error"]:
        blocks.append(products(rows["products"]["rows"]))
    trained = [row for row in rows.values() if row["group"] in ("trainer", "peers") and not row["error"]]
    if trained:
        blocks.append(speeds(trained, rows, spec))
    if "parts" in rows and not rows["parts"]["error"]:
        blocks.append(parts(rows["parts"]["rows"], rows.get("ceilings", {})))
    blocks.append([
        *(f"{'passes' if bar['passes'] else 'FAILS':<7} {bar['bar']}: {bar['value']:.3f}"
          for bar in document["verdicts"]),
        *(f"failed: {row['name']}: {row['error']}" for row in rows.values() if row["error"]),
    ])  # fmt: skip
    return "\n\n".join("\n".join(block) for block in blocks if block)


def ceilings(row: Mapping[str, Any]) -> list[str]:
    lines = [("alone, TFLOP/s", "M×N×K", "BF16", *(f"FP8 {name}" for name in SCALINGS))]
    for found in row["products"]:
        speeds = [
            "no kernel" if found[name] is None else f"{digits(found[name] / 1e12)} ({found[name] / found['bf16']:.2f}×)"
            for name in SCALINGS
        ]
        size = f"{found['m']}×{found['n']}×{found['k']}"
        lines.append((found["matrix"], size, digits(found["bf16"] / 1e12), *speeds))
    best, copy = digits(row["best"] / 1e12), digits(row["copy"] / 1e9)
    return [*columns(lines, 1), f"best BF16 product {best} TFLOP/s, copy {copy} GB/s read and written"]


def products(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The worst size of each."""
    lines = [("relative error", "gradients", "product", "to emulation", "bound", "to float64", "bound", "")]
    named: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        named.setdefault((row["recipe"], row["gradients"], row["product"]), []).append(row)
    for (recipe, gradients, name), same in named.items():
        if name == "forward" and gradients == "e5m2":
            continue
        kernel = all(row["kernel"] for row in same)
        lines.append((
            recipe, gradients, name, f"{max(row['to_emulation'] for row in same):.1e}" if kernel else "no kernel",
            f"{same[0]['bounds'][0]:.0e}", f"{max(row['to_float64'] for row in same):.4f}", f"{same[0]['bounds'][1]:g}",
            "" if all(row["passes"] for row in same) else "ABOVE",
        ))  # fmt: skip
    return columns(lines, 3)


def speeds(
    trained: Sequence[Mapping[str, Any]], rows: Mapping[str, Mapping[str, Any]], spec: Mapping[str, Any]
) -> list[str]:
    base, peer = (rows.get(name, {}).get("tokens_per_s") for name in (BASE, PEER))
    lines = [("step", "tokens/s", "MFU", "causal", "no head", "causal", "GiB", "/ BF16", "/ transformers")]
    for row in trained:
        own = row["group"] == "trainer"
        lines.append((
            row["name"], f"{row['tokens_per_s']:,.0f}",
            *(percent(row[f"mfu_{kind}"]) for kind in ("full", "causal", "full_without_head", "causal_without_head")),
            f"{row['memory_gib']:.1f}", f"{row['tokens_per_s'] / base:.2f}" if base and own else "",
            f"{row['tokens_per_s'] / peer:.2f}" if peer else "",
        ))  # fmt: skip
    what = (
        f"{spec['model']['preset']} with {spec['model']['num_layers']} layers, {spec['vocab_size']:,} ids, seq "
        f"{spec['seq_len']}, {spec['accumulate']} micro-batches of {spec['micro_batch']}, checkpointing "
        f"{spec['checkpointing']}, compiled by {spec['backend']}; MFU of the BF16 peak"
    )
    return [what, *columns(lines, 1)]


def parts(rows: Sequence[Mapping[str, Any]], limits: Mapping[str, Any]) -> list[str]:
    lines = [("alone", "ms", "reached", "of the limit")]
    for row in rows:
        floating = "flops" in row
        speed = row["flops" if floating else "bytes"] / row["seconds"]
        limit = limits.get("best" if floating else "copy")
        lines.append((
            row["part"], f"{1e3 * row['seconds']:.3f}",
            f"{digits(speed / 1e12)} TFLOP/s" if floating else f"{digits(speed / 1e9)} GB/s",
            percent(speed / limit if limit else None),
        ))  # fmt: skip
    return columns(lines, 1)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def columns(lines: Sequence[Sequence[str]], names: int) -> list[str]:
    """``names`` columns to the left, the others to the right."""
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place < names else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
