"""An explanation in the terminal: the stages as a table, then scores, weights and outputs as text heat maps."""

from __future__ import annotations

import math

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attn_ext.explain import Explanation

__all__ = ["PANELS", "colour", "dims", "head_title", "print_text", "subtitle"]

# The three things a head makes, in the order they are made; every rendering labels them with these words.
PANELS = {
    "scores": "q·k / √D, masked",
    "weights": "softmax of the scores",
    "outputs": "value-weighted: Σ weight · v",
}
# The colours of their highest and of their lowest value: three pairs, so that none is taken for another.
COLOURS = {
    "scores": ((178, 24, 43), (33, 102, 172)),
    "weights": ((0, 109, 44), (0, 109, 44)),
    "outputs": ((179, 88, 6), (84, 39, 136)),
}
SHADES = " ·░▒▓█"  # by size, where there are no colours
CHANNEL_CELLS = 64


def dims(numbers: tuple[int, ...]) -> str:
    return "(" + ",".join(map(str, numbers)) + ")"


def subtitle(e: Explanation) -> str:
    heads = f"{e.n_heads} heads"
    if e.n_kv_heads != e.n_heads:
        heads = f"{e.n_heads} query heads on {e.n_kv_heads} K/V heads"
    return f"layer {e.layer}  ·  {len(e.tokens)} tokens  ·  {heads}  ·  head_dim D = {e.q.shape[-1]}"


def head_title(e: Explanation, head: int) -> str:
    return f"head {head}" + ("" if e.n_heads == e.n_kv_heads else f"  (K/V head {e.kv_head(head)})")


def colour(name: str, share: float) -> tuple[tuple[int, int, int], bool]:
    """-> the (r, g, b) of a value that is `share` of the panel's reach (-1 … 1), and whether it is a dark one."""
    share = max(-1.0, min(1.0, share))
    high, low = COLOURS[name]
    r, g, b = (round(247 + (c - 247) * abs(share)) for c in (high if share >= 0 else low))
    return (r, g, b), 0.3 * r + 0.6 * g + 0.1 * b < 128


def print_text(explanation: Explanation, labels: list[str], title: str, out: Console) -> None:
    """Numbers where they fit, shades where they do not; colours on a terminal."""
    out.print(Text(title, style="bold"))
    out.print(subtitle(explanation), style="dim")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("stage", "shape", "strides", "how", ""):
        table.add_column(name, no_wrap=name != "")
    for s in explanation.stages():
        note = Text(s.note, style="green" if s.note.startswith("view, no copy") else "")
        table.add_row(Text(s.name, style="bold"), dims(s.shape), dims(s.strides), s.formula, note)
    out.print(table)
    for head in explanation.heads:
        out.print()
        out.print(Text(head_title(explanation, head), style="bold"))
        for name in PANELS:
            _print_panel(explanation, name, head, labels, out)


def _print_panel(e: Explanation, name: str, head: int, labels: list[str], out: Console) -> None:
    values, legend, keys = e.panel(name, head), PANELS[name], name != "outputs"
    names = max(map(cell_len, labels)) + 2
    room = out.width - names - 2
    width = min(room // len(labels), 9)  # of a cell with a number
    with_numbers = keys and width >= 6
    if not keys:
        per_cell = math.ceil(values.shape[1] / min(CHANNEL_CELLS, room))
        values = _means_of(values, per_cell)
        legend += f"; a cell is {'a channel' if per_cell == 1 else f'the mean of {per_cell} channels'}"
    elif len(labels) > room:
        values = values[:, :room]
        legend += f"; the first {room} of {len(labels)} keys (a .png or .html shows all)"
    reach = e.reach(name, head)
    if not with_numbers:
        legend += f"; up to ±{reach:.2g}" if out.color_system else f"; '{SHADES}' by size, up to {reach:.2g}"
    out.print(Text.assemble("  ", (name, "bold"), f" = {legend}"))
    if with_numbers:
        header = "".join(_right(_cut(label, width - 1), width) for label in labels)
        out.print(Text(" " * (names + 2) + header, style="dim"))
    visible = e.visible(head).tolist()
    for i, row in enumerate(values.tolist()):
        line = Text(f"  {_right(labels[i], names - 2)}  ")
        for j, value in enumerate(row):
            masked = keys and not visible[i][j]
            cell = ("-" if masked else f"{value:.2f}").rjust(width) if with_numbers else None
            line.append(*_cell(name, value, reach, masked, cell, out.color_system is not None))
        out.print(line, no_wrap=True, crop=True)


def _cell(name: str, value: float, reach: float, masked: bool, cell: str | None, colours: bool) -> tuple[str, str]:
    """-> text and style: numbers with a background on a terminal, shades by size in plain text."""
    if masked:
        return cell or ("·" if colours else " "), "dim"
    if not math.isfinite(value):
        return cell or "?", "bold"
    if not colours:
        return cell or SHADES[math.ceil(abs(value / reach) * (len(SHADES) - 1) - 0.5)], ""
    (r, g, b), dark = colour(name, value / reach)
    return cell or " ", f"{'white' if dark else 'black'} on rgb({r},{g},{b})"


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def _right(text: str, width: int) -> str:
    """Right-aligned in `width` cells of the terminal: a Chinese character takes two."""
    return " " * (width - cell_len(text)) + text


def _means_of(values, n: int):
    """(T, D) -> (T, ceil(D / n)): the mean of every n neighbouring columns."""
    import torch

    return torch.stack([part.mean(1) for part in values.split(n, dim=1)], dim=1)
