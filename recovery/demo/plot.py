"""The picture of a demo: each worker's loss over time, with what happened to the run marked."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from recovery.demo.reports import Entry

SMOOTHING = 0.2
"""Weight of the newest loss in the drawn moving average."""


def matplotlib_present() -> bool:
    """Return whether the picture can be drawn: matplotlib is an extra of this package."""
    return importlib.util.find_spec("matplotlib") is not None


def loss_curves(entries: Sequence[Entry]) -> dict[str, tuple[list[float], list[float]]]:
    """Return each worker process's times and smoothed losses; a restarted process is a curve of its own."""
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for entry in entries:
        if entry.kind != "inner":
            continue
        name = entry.source if entry.launch == 1 else f"{entry.source} (start {entry.launch})"
        times, losses = curves.setdefault(name, ([], []))
        loss = entry.number("loss")
        times.append(entry.seconds)
        losses.append(loss if not losses else losses[-1] + SMOOTHING * (loss - losses[-1]))
    return curves


def marks(entries: Sequence[Entry]) -> list[tuple[float, str]]:
    """Return when something happened to the run, and what, in a few words."""
    found = []
    for entry in entries:
        match entry.kind:
            case "killed":
                found.append((entry.seconds, f"{entry.source} killed"))
            case "flipped":
                found.append((entry.seconds, f"{entry.source}: bits flipped"))
            case "resynced":
                found.append((entry.seconds, f"{entry.text('worker')} healed"))
            case "state":
                found.append((entry.seconds, f"{entry.source} from {entry.text('source')}"))
    return found


def draw(entries: Sequence[Entry], path: Path) -> None:
    """Write the picture to ``path``.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; ask ``matplotlib_present`` first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, (times, losses) in sorted(loss_curves(entries).items()):
        axes.plot(times, losses, label=name, linewidth=1.2)
    bottom, top = axes.get_ylim()
    for index, (seconds, what) in enumerate(marks(entries)):
        axes.axvline(seconds, color="0.6", linewidth=0.7, linestyle=":")
        height = top - (top - bottom) * (0.02 + 0.03 * (index % 12))
        axes.annotate(what, (seconds, height), xytext=(2, 0), textcoords="offset points", fontsize=7)
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss, nats a byte (moving average)")
    axes.set_title("DiLoCo with live recovery: a join, a kill, flipped bits, a resync, a resume from disk")
    axes.legend(loc="lower left", fontsize=8)
    figure.savefig(path, dpi=120)
