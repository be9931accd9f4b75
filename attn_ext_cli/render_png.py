"""An explanation as one picture: the stages as a table, then scores, weights and outputs of every head.

All positions are in inches, from the left and from the top.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from attn_ext.explain import Explanation, Stage
from attn_ext_cli.render_text import PANELS, dims, head_title, subtitle

__all__ = ["save_png"]

INK, FAINT, VIEW, MASKED = "#1f2430", "#6b7280", "#047857", "#e5e7eb"
COLOUR_MAPS = {"scores": "RdBu_r", "weights": "Greens", "outputs": "PuOr_r"}
MARGIN, BAR, TABLE_LINE = 0.45, 0.45, 0.225
MAX_TICKS = 50  # token labels that stay legible along a panel


def save_png(explanation: Explanation, labels: list[str], title: str, path: Path) -> bool:
    """Write the picture -> whether matplotlib's font has all characters; it draws a box for one it lacks."""
    heads, stages = explanation.heads, explanation.stages()
    groups = 2 if len(heads) > 1 else 1  # heads side by side
    square = min(max(1.6, 0.3 * len(labels)), 7.0)
    names = 0.085 * max(map(len, labels)) + 0.15  # room for the token labels, beside and below
    panel_widths = (square, square, min(max(1.6 * square, 2.4), 8.0))
    block_width = sum(panel_widths) + 3 * (names + BAR) + 0.35
    block_height = square + names + 1.15
    width = max(2 * MARGIN + groups * block_width, 10.5)
    table_top, blocks_top = 1.15, 1.15 + TABLE_LINE * (len(stages) + 1) + 0.45
    height = blocks_top + math.ceil(len(heads) / groups) * block_height + 0.2

    page = _Page(width, height)
    room = int(6.5 * width)  # letters of the title
    page.text(MARGIN, 0.42, title if len(title) <= room else title[: room - 1] + "…", size=17, weight="bold")
    page.text(MARGIN, 0.78, subtitle(explanation), size=10.5, color=FAINT)
    _stage_table(page, stages, table_top)
    for n, head in enumerate(heads):
        row, group = divmod(n, groups)
        left, top = MARGIN + group * block_width, blocks_top + row * block_height
        page.text(left, top, head_title(explanation, head), size=12, weight="bold")
        for name, panel_width in zip(PANELS, panel_widths, strict=True):
            page.text(left + names, top + 0.3, name, size=9.5, weight="bold")
            page.text(left + names, top + 0.47, PANELS[name], size=8, color=FAINT)
            ax = page.axes(left + names, top + 0.6, panel_width, square)
            _panel(page, ax, name, explanation, head, labels)
            left += panel_width + names + BAR
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        page.figure.savefig(path)
    return not any("missing from" in str(warning.message) for warning in caught)


class _Page:
    """A figure with its origin at the top left, in inches."""

    def __init__(self, width: float, height: float):
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), dpi=120, facecolor="white")
        FigureCanvasAgg(self.figure)

    def text(self, x: float, y: float, text: str, *, color: str = INK, **options) -> None:
        options |= {"color": color, "va": "center", "parse_math": False}  # a "$" in a token is a dollar
        self.figure.text(x / self.width, 1 - y / self.height, text, **options)

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        return self.figure.add_axes(
            (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        )


def _stage_table(page: _Page, stages: list[Stage], top: float) -> None:
    columns = {"stage": 0.0, "shape": 1.3, "strides": 2.7, "how": 4.5, "": 6.6}
    for name, x in columns.items():
        page.text(MARGIN + x, top, name, size=9, weight="bold", color=FAINT)
    for i, stage in enumerate(stages, 1):
        cells = (stage.name, dims(stage.shape), dims(stage.strides), stage.formula, stage.note)
        for (name, x), text in zip(columns.items(), cells, strict=True):
            style = {"stage": {"weight": "bold"}, "shape": {"family": "monospace"}, "strides": {"family": "monospace"}}
            color = VIEW if text.startswith("view, no copy") else INK
            page.text(MARGIN + x, top + i * TABLE_LINE, text, size=9, color=color, **style.get(name, {}))


def _panel(page: _Page, ax: Axes, name: str, e: Explanation, head: int, labels: list[str]) -> None:
    values = e.panel(name, head)
    high = e.reach(name, head)
    low = 0.0 if name == "weights" else -high
    picture = values.masked_fill(~e.visible(head), math.nan) if name != "outputs" else values
    ax.set_facecolor(MASKED)
    image = ax.imshow(
        picture.numpy(), cmap=COLOUR_MAPS[name], vmin=low, vmax=high, aspect="auto", interpolation="nearest"
    )
    ticks = range(0, len(labels), math.ceil(len(labels) / MAX_TICKS))
    names = [labels[i] for i in ticks]
    ax.set_yticks(ticks, names, size=8, color=INK, parse_math=False)
    if name == "outputs":
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.tick_params(axis="x", labelsize=8, labelcolor=INK)
        ax.set_xlabel("channel of the head", size=8, color=FAINT, labelpad=3)
    else:
        ax.set_xticks(ticks, names, size=8, color=INK, rotation=90, parse_math=False)
        ax.set_xlabel("key  (grey: masked)", size=8, color=FAINT, labelpad=3)
        if len(labels) <= 10:
            _numbers(ax, picture.tolist(), image)
    if name == "scores":
        ax.set_ylabel("query", size=8, color=FAINT, labelpad=3)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)

    box = ax.get_position()
    bar_ax = page.figure.add_axes((box.x1 + 0.06 / page.width, box.y0, 0.07 / page.width, box.height))
    bar = page.figure.colorbar(image, cax=bar_ax, ticks=[low, (low + high) / 2, high], format="%.2g")
    bar.ax.tick_params(labelsize=6.5, labelcolor=FAINT, length=0, pad=2)
    bar.outline.set_visible(False)


def _numbers(ax: Axes, rows: list[list[float]], image) -> None:
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if math.isfinite(value):
                r, g, b, _ = image.cmap(image.norm(value))
                dark = 0.3 * r + 0.6 * g + 0.1 * b < 0.5
                ax.text(j, i, f"{value:.2f}", ha="center", va="center", size=7, color="white" if dark else INK)
