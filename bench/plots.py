"""Line plots as SVG, the same bytes for the same numbers. Needs the extra ``bench``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def lines(
    path: Path,
    across_values: Sequence[float],
    up_values: Mapping[str, Sequence[float]],
    *,
    title: str,
    across: str,
    up: str,
    up_log: bool = False,
) -> Path:
    """Draw one line per name over a logarithmic axis. Raises ImportError without matplotlib."""
    import matplotlib as mpl  # noqa: PLC0415 - the figures need no plots
    from matplotlib.figure import Figure  # noqa: PLC0415 - the same

    mpl.rcParams |= {"svg.hashsalt": "kvferry", "svg.fonttype": "none", "font.size": 9}
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, values in up_values.items():
        axes.plot(across_values, values, marker="o", markersize=3, linewidth=1.4, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log" if up_log else "linear")
    if not up_log:
        axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=across, ylabel=up)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    return path
