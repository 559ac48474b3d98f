"""The lab's report: one page with a verdict, figures and a finding for every station."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

from course_lib.classroom import figures

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Lab report</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
section {{ border-left: .4rem solid #009E73; padding: .1rem 1rem; margin: 1.5rem 0 }}
section.fail {{ border-color: #D55E00 }}
table {{ border-collapse: collapse }}
td, th {{ text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top }}
td:last-child {{ font-variant-numeric: tabular-nums }}
img {{ max-width: 100% }}
pre {{ background: #f4f4f4; padding: 1rem; white-space: pre-wrap }}
</style></head><body>
<h1>Lab report: {passed} of {total} stations passed</h1>
<p>Text: {corpus}. Time: {seconds:.0f} s. Every figure was measured on this machine in this run;
“-” marks what is not known here.</p>
{stations}
</body></html>
"""

# What can be drawn of a run, by metric: title, unit, and that unit in units of the stored figure.
PICTURES = {
    "loss": ("Training loss", "nats a token", 1.0),
    "tokens_per_s": ("Speed", "tokens / s", 1.0),
    "peak_memory_bytes": ("Peak memory of one process", "MB", 1e6),
}


def write_report(path: Path, stations: Sequence, summary: dict) -> None:
    """Write the page. stations: lab Stations; summary: what report.json holds."""
    page = PAGE.format(
        passed=sum(station.verdict == "pass" for station in stations),
        total=len(stations),
        corpus=html.escape(summary["corpus"]),
        seconds=summary["seconds"],
        stations="\n".join(_section(station) for station in stations),
    )
    path.write_text(page, encoding="utf-8")


def _section(station) -> str:
    rows = [
        f"<tr><td>{_label(key)}</td><td>{_shown(key, value)}</td></tr>"
        for key, value in station.figures.items()
        if key != "sample"
    ]
    parts = [
        f'<section class="{station.verdict}">',
        f"<h2>{html.escape(station.name)}: {station.verdict}</h2>",
        f"<p>{html.escape(station.finding)}</p>",
        f"<table>{''.join(rows)}</table>",
        _pictures(station.curves, station.drawn) if station.curves else "",
    ]
    if sample := station.figures.get("sample"):
        parts.append(
            f"<h3>A sample (it continues its first words)</h3><pre>{html.escape(sample)}</pre>"
        )
    return "\n".join([*parts, "</section>"])


def _label(key: str) -> str:
    """A key as words; the unit stands with the value."""
    words = key.removesuffix("_bytes").replace("_per_s", " per second, median of logged lines")
    return html.escape(words.replace("_", " "))


def _shown(key: str, value) -> str:
    """A figure as text for the table."""
    if isinstance(value, dict):
        return html.escape(", ".join(f"{k}: {_shown(key, v)}" for k, v in value.items()))
    if isinstance(value, list):
        return html.escape(", ".join(map(str, value)) or "none")
    if value is None:
        return "-"
    if key.endswith("_bytes"):
        return f"{value / 1e6:,.0f} MB"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return html.escape(f"{value:,}" if isinstance(value, int) else str(value))


def _pictures(curves: dict[str, list[dict]], drawn: Sequence[str]) -> str:
    """One picture a metric, a line a run: both colour and line style tell the runs apart."""
    fig, axes = figures.subplots(1, len(drawn), width=3.9 * len(drawn), height=3.2, squeeze=False)
    for ax, metric in zip(axes[0], drawn):
        title, unit, scale = PICTURES[metric]
        for number, (label, lines) in enumerate(curves.items()):
            points = [(l["step"], l[metric] / scale) for l in lines if l[metric] is not None]
            look = figures.line_style(number) | {"markevery": max(1, len(points) // 8)}
            ax.plot(*zip(*points), label=label, **look)
        ax.set(title=title, xlabel="step", ylabel=unit)
        if metric != "loss":
            ax.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=9)
    picture = io.BytesIO()
    fig.savefig(picture, format="png", dpi=130)
    titles = ", ".join(PICTURES[metric][0].lower() for metric in drawn)
    alt = f"Curves over steps of {titles}, for {', '.join(curves)}."
    encoded = base64.b64encode(picture.getvalue()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{encoded}">'
