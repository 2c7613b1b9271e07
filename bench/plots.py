"""Plots as SVG, the same bytes for the same numbers. Needs the extra ``bench``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: lines over places that are numbers (logarithmic), bars over words.

    ``up_values`` has one value per place for each name; ``spans``, where a name has some, the low
    and high end of each value.
    """

    up: str
    places: Sequence[float] | Sequence[str]
    up_values: Mapping[str, Sequence[float]]
    across: str = ""
    up_log: bool = False
    spans: Mapping[str, Sequence[tuple[float, float]]] | None = None

    def __post_init__(self) -> None:
        for name, values in self.up_values.items():
            if len(values) != len(self.places):
                raise ValueError(f"{name}: {len(values)} values for {len(self.places)} places")


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
    panel = Panel(up, across_values, up_values, across=across, up_log=up_log)
    return panels(path, [panel], title=title)


def panels(path: Path, shown: Sequence[Panel], *, title: str) -> Path:
    """Draw panels side by side, under one title. Raises ImportError without matplotlib."""
    import matplotlib as mpl  # noqa: PLC0415 - the figures need no plots
    from matplotlib.figure import Figure  # noqa: PLC0415 - the same
    from matplotlib.ticker import LogFormatter  # noqa: PLC0415 - the same

    mpl.rcParams |= {"svg.hashsalt": "kvferry", "svg.fonttype": "none", "font.size": 9}
    width = 6.4 if len(shown) == 1 else 3.6 * len(shown)
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    row = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, panel in zip(row, shown, strict=True):
        if panel.places and isinstance(panel.places[0], str):
            _bars(axes, panel)
        else:
            _lines(axes, panel)
        axes.set_yscale("log" if panel.up_log else "linear")
        if panel.up_log:
            axes.yaxis.set_major_formatter(LogFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
        if not panel.up_log and not panel.spans:
            axes.set_ylim(bottom=0)
        axes.set(xlabel=panel.across, ylabel=panel.up)
    if len(shown) == 1:
        row[0].set_title(title)
        row[0].legend(frameon=False)
    else:
        figure.suptitle(title)
        # The same name has the same colour everywhere: one legend is enough.
        longest = max(row, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
        told = longest.get_legend_handles_labels()
        figure.legend(*told, loc="outside lower center", ncols=len(told[1]), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    return path


def _lines(axes: Axes, panel: Panel) -> None:
    places = [float(place) for place in panel.places]
    for name, values in panel.up_values.items():
        axes.plot(places, list(values), marker="o", markersize=3, linewidth=1.4, label=name)
    axes.set_xscale("log")
    axes.grid(visible=True, alpha=0.3)


def _bars(axes: Axes, panel: Panel) -> None:
    wide = 0.8 / len(panel.up_values)
    for number, (name, values) in enumerate(panel.up_values.items()):
        offset = (number - (len(panel.up_values) - 1) / 2) * wide
        at = [place + offset for place in range(len(panel.places))]
        axes.bar(at, list(values), wide * 0.9, label=name)
        if panel.spans and name in panel.spans:
            low, high = zip(*panel.spans[name], strict=True)
            below = [value - end for value, end in zip(values, low, strict=True)]
            above = [end - value for value, end in zip(values, high, strict=True)]
            axes.errorbar(at, list(values), [below, above], fmt="none", ecolor="0.3", capsize=3)
    axes.set_xticks(range(len(panel.places)), [str(place) for place in panel.places])
    axes.grid(visible=True, axis="y", alpha=0.3)
