"""An explanation as one self-contained web page: no script, nothing to download; point at a cell to read its value."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from attn_ext.explain import Explanation
from attn_ext_cli.render_text import PANELS, colour, dims, head_title, subtitle

__all__ = ["MAX_CELLS", "cells", "save_html"]

MAX_CELLS = 500_000  # a browser still shows so many

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2430; margin: 2rem; }
h1 { margin: 0; font-size: 1.6rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; } .faint { color: #6b7280; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { text-align: left; padding: .1rem 1.2rem .1rem 0; }
th { color: #6b7280; font-weight: 600; } td.n { font-family: ui-monospace, monospace; } .view { color: #047857; }
.head { display: flex; flex-wrap: wrap; gap: 1.5rem 2.5rem; } figure { margin: 0; }
figcaption b { margin-right: .4rem; } svg { display: block; margin-top: .3rem; }
svg text { font: 11px system-ui, sans-serif; fill: #1f2430; }
svg .dark { fill: #fff; } svg .axis { fill: #6b7280; }
"""


def cells(e: Explanation) -> int:
    """How many cells the page has."""
    tokens = len(e.tokens)
    return len(e.heads) * tokens * (2 * tokens + e.q.shape[-1])


def save_html(explanation: Explanation, labels: list[str], title: str, path: Path) -> None:
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>{escape(title)}: layer {explanation.layer}</title><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1><div class='faint'>{escape(subtitle(explanation))}</div>",
        _stage_table(explanation),
    ]
    for head in explanation.heads:
        panels = "".join(_panel(explanation, name, head, labels) for name in PANELS)
        parts.append(f"<h2>{escape(head_title(explanation, head))}</h2><div class='head'>{panels}</div>")
    path.write_text("\n".join(parts) + "</html>\n", encoding="utf-8")


def _stage_table(e: Explanation) -> str:
    rows = ["<tr><th>stage<th>shape<th>strides<th>how<th>"]
    for s in e.stages():
        view = " class='view'" if s.note.startswith("view, no copy") else ""
        rows.append(
            f"<tr><td><b>{escape(s.name)}</b><td class='n'>{dims(s.shape)}<td class='n'>{dims(s.strides)}"
            f"<td>{escape(s.formula)}<td{view}>{escape(s.note)}"
        )
    return f"<table>{''.join(rows)}</table>"


def _panel(e: Explanation, name: str, head: int, labels: list[str]) -> str:
    values, visible, reach = e.panel(name, head).tolist(), e.visible(head).tolist(), e.reach(name, head)
    keys = name != "outputs"
    tall = max(18, min(44, 320 // len(labels)))
    wide = tall if keys else max(4, min(12, 640 // len(values[0])))
    left, bottom = 7 * max(map(len, labels)) + 24, (7 * max(map(len, labels)) + 22) if keys else 36
    width, height = left + wide * len(values[0]), tall * len(values)
    parts = []
    for i, row in enumerate(values):
        y = i * tall
        parts.append(f"<text x='{left - 6}' y='{y + tall / 2 + 4:g}' text-anchor='end'>{escape(labels[i])}</text>")
        for j, value in enumerate(row):
            where = f"{labels[i]} → {labels[j]}" if keys else f"{labels[i]}, channel {j}"
            masked = keys and not visible[i][j]
            (r, g, b), dark = ((229, 231, 235), False) if masked else colour(name, value / reach)
            tip = f"{where}: " + ("masked" if masked else f"{value:.4g}")
            parts.append(
                f"<rect x='{left + j * wide}' y='{y}' width='{wide}' height='{tall}' fill='#{r:02x}{g:02x}{b:02x}'>"
                f"<title>{escape(tip)}</title></rect>"
            )
            if keys and not masked and wide >= 34 and math.isfinite(value):
                parts.append(
                    f"<text x='{left + (j + 0.5) * wide:g}' y='{y + tall / 2 + 4:g}' text-anchor='middle'"
                    f"{' class=dark' if dark else ''} pointer-events='none'>{value:.2f}</text>"
                )
    if keys:
        for j, label in enumerate(labels):
            x = left + (j + 0.5) * wide + 4
            turned = f"transform='translate({x:g},{height + 6}) rotate(-90)' text-anchor='end'"
            parts.append(f"<text {turned}>{escape(label)}</text>")
    else:
        parts += [f"<text x='{left + j * wide}' y='{height + 14}'>{j}</text>" for j in range(0, len(values[0]), 8)]
    axis = "key (grey: masked)" if keys else "channel of the head"
    parts.append(f"<text class='axis' x='{left}' y='{height + bottom - 4}'>{axis}</text>")
    scale = "0 … 1" if name == "weights" else f"±{reach:.3g}"
    return (
        f"<figure><figcaption><b>{name}</b><span class='faint'>{escape(PANELS[name])} (colours: {scale})</span>"
        f"</figcaption><svg width='{width + 8}' height='{height + bottom}' role='img' aria-label='{name}'>"
        f"{''.join(parts)}</svg></figure>"
    )
