"""The README's figure: the path from one GPU to many, one panel for each way to use more GPUs.

    python -m course_lib.classroom.path_figure        # writes assets/path.svg

Each square is a GPU. The stripes inside are the layers of the model; a filled part is held there.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from . import figures
from .syllabus import repository_root

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAYERS = 4
GAP = 0.18
PANEL_WIDTH = 2.5
SPACE = 0.6

# Title, what it answers, and for each GPU (column, row) the part it holds:
# (first layer, layers, left edge, width), as shares of the model.
WHOLE = (0, LAYERS, 0.0, 1.0)
PANELS = (
    ("One GPU", "the whole model,\nall the data", {(0, 0): WHOLE}),
    (
        "Data parallelism",
        "copies of the model,\nother data on each",
        {(column, row): WHOLE for column in (0, 1) for row in (0, 1)},
    ),
    (
        "Tensor parallelism",
        "every layer divided\nbetween GPUs",
        {(column, 0): (0, LAYERS, 0.5 * column, 0.5) for column in (0, 1)},
    ),
    (
        "Pipeline parallelism",
        "some layers on\neach GPU",
        {(0, row): (2 * row, 2, 0.0, 1.0) for row in (0, 1)},
    ),
    (
        "The full trainer",
        "all of them at once,\nfor models too big for one GPU",
        {
            (column, row): (2 * (row % 2), 2, 0.5 * (column % 2), 0.5)
            for column in range(4)
            for row in range(2)
        },
    ),
)


def draw_path():
    """Return the figure of the path from one GPU to many."""
    fig, ax = figures.subplots(width=11, height=3.1)
    left = 0.0
    for number, (title, text, parts) in enumerate(PANELS, 1):
        columns = 1 + max(column for column, _ in parts)
        rows = 1 + max(row for _, row in parts)
        width = max(columns * (1 + GAP) - GAP, PANEL_WIDTH)  # texts need room beside one GPU
        start = left + (width - columns * (1 + GAP) + GAP) / 2
        for (column, row), part in parts.items():
            _draw_gpu(ax, start + column * (1 + GAP), (row + (2 - rows) / 2) * (1 + GAP), part)
        middle = left + width / 2
        ax.text(middle, 2.75, f"{number}  {title}", ha="center", fontsize=10.5, fontweight="bold")
        ax.text(middle, -0.3, text, ha="center", va="top", fontsize=9.5)
        left += width + SPACE
        if number < len(PANELS):
            ax.annotate(
                "",
                (left - 0.1, 1.1),
                (left - SPACE + 0.1, 1.1),
                arrowprops={"arrowstyle": "->", "color": "#404040"},
            )
    ax.set(xlim=(-0.1, left - SPACE + 0.1), ylim=(-1.1, 3.1))
    ax.set_aspect("equal")
    ax.set_axis_off()
    return fig


def write(path: Path) -> None:
    """Write the figure as SVG: the same bytes each time."""
    import matplotlib.pyplot as plt

    fig = draw_path()
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def _draw_gpu(ax: "Axes", x: float, y: float, part: tuple[int, int, float, float]) -> None:
    """Draw one GPU with the part of the model that it holds."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    ax.add_patch(
        FancyBboxPatch(
            (x, y), 1, 1, boxstyle="round,pad=0.03", facecolor="white", edgecolor="#404040"
        )
    )
    first, layers, left, width = part
    for layer in range(LAYERS):
        held = first <= layer < first + layers
        bottom = y + 0.08 + layer * 0.22
        ax.add_patch(
            Rectangle((x + 0.08, bottom), 0.84, 0.17, facecolor="none", edgecolor="#BBBBBB", lw=0.6)
        )
        if held:
            shape = (x + 0.08 + 0.84 * left, bottom), 0.84 * width, 0.17
            ax.add_patch(Rectangle(*shape, **figures.style("parameters")))


if __name__ == "__main__":
    target = repository_root() / "assets" / "path.svg"
    write(target)
    print(f"wrote assets/{target.name}")
