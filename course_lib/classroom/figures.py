"""Figures that every reader can use: one palette, one style, a text for each picture.

A colour has one meaning in the whole course, and is never the only sign: each kind also has a
hatch (areas) or a marker and a line style (curves). The colours are those of Okabe and Ito, told
apart with any common form of colour blindness, and three of Tol's muted set.

A chapter draws like this:

    fig, ax = figures.subplots()
    ax.barh(..., **figures.style("compute"))
    ax.set(title="…", xlabel="time (ms)", ylabel="rank")
    figures.show(fig, alt="what the picture looks like", finding="what it shows, with numbers")

matplotlib is imported when a figure is made, not before.
"""

import base64
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Kind:
    """How one kind of thing looks everywhere: its colour, and a sign that needs no colour."""

    colour: str
    hatch: str
    marker: str
    line: str


KINDS: Mapping[str, Kind] = {
    # time
    "compute": Kind("#0072B2", "", "o", "-"),
    "communication": Kind("#D55E00", "///", "s", "--"),
    "idle": Kind("#DDDDDD", "..", "x", ":"),
    "recompute": Kind("#56B4E9", "\\\\\\", "^", "-."),
    # memory
    "parameters": Kind("#009E73", "", "o", "-"),
    "gradients": Kind("#E69F00", "///", "s", "--"),
    "optimizer": Kind("#CC79A7", "xxx", "D", "-."),
    "activations": Kind("#F0E442", "...", "^", ":"),
    "buffers": Kind("#4D4D4D", "---", "v", "-"),
    # parts of a model
    "embedding": Kind("#332288", "", "o", "-"),
    "attention": Kind("#44AA99", "///", "s", "--"),
    "mlp": Kind("#DDCC77", "xxx", "^", "-."),
    "head": Kind("#882255", "...", "D", ":"),
    "norms": Kind("#EEEEEE", "---", "v", "-"),
}

# For curves that are runs or models rather than kinds: always colour + line + marker.
SERIES: Sequence[Kind] = [
    Kind("#0072B2", "", "o", "-"),
    Kind("#D55E00", "///", "s", "--"),
    Kind("#009E73", "xxx", "^", "-."),
    Kind("#CC79A7", "...", "D", ":"),
    Kind("#E69F00", "\\\\\\", "v", (0, (6, 1, 1, 1, 1, 1))),
    Kind("#332288", "---", "P", (0, (1, 1))),
]

_STYLE = {
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "one-gpu-to-many",  # the same drawing gives the same file
}


def subplots(rows: int = 1, columns: int = 1, width: float = 7.0, height: float = 3.4, **options):
    """Return `(figure, axes)` in the course's style; sizes in inches.

    Arguments: rows, columns: how many axes; options: passed on to `matplotlib.pyplot.subplots`.
    """
    import matplotlib.pyplot as plt

    # For the whole session: titles and legends read the style when they are made, which is later.
    plt.rcParams.update(_STYLE)
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **options)


def style(kind: str) -> dict:
    """Return the keyword arguments that draw an area (bar, patch) of this kind.

    Raises KeyError that names the known kinds.
    """
    look = _look(kind)
    # The hatch is drawn in the edge's colour: dark on light areas, white on dark ones.
    red, green, blue = (int(look.colour[at : at + 2], 16) for at in (1, 3, 5))
    edge = "#404040" if 0.3 * red + 0.59 * green + 0.11 * blue > 160 else "white"
    return {"facecolor": look.colour, "hatch": look.hatch, "edgecolor": edge, "linewidth": 0.5}


def line_style(kind: str | int) -> dict:
    """Return the keyword arguments that draw a curve: a kind by name, or a series by number."""
    look = SERIES[kind % len(SERIES)] if isinstance(kind, int) else _look(kind)
    return {"color": look.colour, "linestyle": look.line, "marker": look.marker, "markersize": 4}


def show(fig: "Figure", alt: str, finding: str) -> None:
    """Display a figure with its alt text and print its finding below it.

    Arguments:
        fig: a matplotlib figure; every axes needs a title (or the figure one) and axis labels.
        alt: one sentence for readers who cannot see the picture: what kind of chart, of what.
        finding: one line with the key numbers; it is validated with the notebook's outputs.
    Raises: ValueError that lists everything that is missing.
    """
    faults = [
        f"{name} is empty"
        for name, text in (("alt", alt), ("finding", finding))
        if not text.strip()
    ]
    faults += _unlabelled(fig)
    if faults:
        raise ValueError("the figure is not ready to be shown: " + "; ".join(faults))
    import matplotlib.pyplot as plt

    picture = io.BytesIO()
    fig.savefig(picture, format="png", dpi=110)
    plt.close(fig)  # otherwise the notebook shows it a second time, without its text
    _display(picture.getvalue(), alt.strip())
    print(textwrap.fill(f"Figure: {finding.strip()}", 100))


def stacked_shares(
    ax: "Axes", rows: Mapping[str, Mapping[str, float]], *, label_from=0.06, legend: bool = True
) -> None:
    """Draw one horizontal bar a row, cut into its parts' shares of 100 %.

    Arguments:
        rows: `{"GPT-2": {"embedding": 39e6, "attention": 28e6, …}, …}`; any unit, parts are kinds.
        label_from: parts smaller than this share get no number.
        legend: name the parts; one of several axes is enough.
    """
    drawn = set()
    for row, parts in rows.items():
        total, left = sum(parts.values()), 0.0
        for kind, amount in parts.items():
            share = amount / total
            ax.barh(
                row,
                share * 100,
                left=left * 100,
                height=0.6,
                **style(kind),
                label=kind if kind not in drawn else None,
            )
            if share >= label_from:
                ax.text(
                    (left + share / 2) * 100,
                    row,
                    f"{share:.0%}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                )
            drawn.add(kind)
            left += share
    if not ax.yaxis_inverted():  # the first row on top, as it is read; axes may share theirs
        ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set(xlim=(0, 100), xlabel="share (%)")
    if legend:
        ax.figure.legend(loc="outside lower center", ncols=min(len(drawn), 5), fontsize=9)


def loss_curves(ax: "Axes", curves: Mapping[str, Sequence[float]], *, marks: int = 8) -> None:
    """Draw one curve a run, each told apart by colour, line and marker.

    Arguments:
        curves: `{"run": [loss at step 0, 1, …], …}`.
        marks: about how many markers a curve gets.
    """
    for number, (name, values) in enumerate(curves.items()):
        every = max(1, len(values) // marks)
        ax.plot(range(len(values)), values, label=name, markevery=every, **line_style(number))
    ax.set(xlabel="step", ylabel="loss (nats a token)")
    ax.legend(fontsize=9)


def _look(kind: str) -> Kind:
    if kind not in KINDS:
        raise KeyError(f"no kind {kind!r} in the palette; known: {', '.join(KINDS)}")
    return KINDS[kind]


def _unlabelled(fig: "Figure") -> list[str]:
    """Say what a reader of this figure would miss."""
    faults = []
    axes = [ax for ax in fig.axes if ax.axison and not hasattr(ax, "_colorbar")]
    titled = bool(fig.get_suptitle()) or all(ax.get_title("left") or ax.get_title() for ax in axes)
    if not axes:
        faults.append("it has no axes")
    elif not titled:
        faults.append("an axes has no title")
    for name in ("x", "y"):
        for ax in axes:
            shared = getattr(ax, f"get_shared_{name}_axes")().get_siblings(ax)
            if not any(getattr(other, f"get_{name}label")() for other in shared):
                faults.append(f"an axes has no {name} label")
                break
    return faults


def _display(png: bytes, alt: str) -> None:
    """Send picture and alt text to the notebook; outside a notebook there is nowhere to show it."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        return
    if get_ipython() is None:
        return
    data = {"image/png": base64.b64encode(png).decode(), "text/plain": alt}
    display(data, raw=True, metadata={"image/png": {"alt": alt}})
