"""Pictures of a storm and of a run of joins and leaves, drawn from their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {
    "kill": "tab:red",
    "stop": "tab:purple",
    "partition": "tab:orange",
    "slow link": "tab:olive",
    "coordinator": "black",
}


def draw_storm(record: dict[str, Any], path: Path) -> None:
    """Write the picture of a storm's record to ``path``: the three numbers, steps, and loss over time.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(14, 12), layout="constrained")
    FigureCanvasAgg(figure)
    counts, steps, losses = figure.subplots(3, 1, height_ratios=(2, 1, 2))
    storm = record["storm"]
    series = storm["counted"]
    at = [each["at"] for each in series]
    for name, colour, offset in (
        ("running", "0.6", 0.12),
        ("alive", "tab:blue", 0.04),
        ("ready", "tab:green", -0.04),
        ("participating", "tab:red", -0.12),
    ):
        # Apart by a little, or equal numbers would hide each other.
        values = [each[name] + offset for each in series]
        counts.step(at, values, where="post", label=name, color=colour, linewidth=1.2)
    for fault in storm["faults"]:
        end = fault["healed_at"] if fault["healed_at"] is not None else fault["struck_at"]
        shown = max(end, fault["struck_at"] + 0.7)
        counts.axvspan(fault["struck_at"], shown, color=COLOURS[fault["kind"]], alpha=0.25)
    first = counts.legend(loc="lower left", ncols=4, fontsize=8)
    counts.add_artist(first)
    marks = [Line2D([], [], color=colour, alpha=0.4, linewidth=6, label=kind) for kind, colour in COLOURS.items()]
    counts.legend(handles=marks, loc="lower right", ncols=5, fontsize=8)
    counts.set_ylim(-0.9, max((each["alive"] for each in series), default=4) + 0.6)
    counts.set_ylabel("workers")
    counts.set_title(f"{len(storm['faults'])} faults in {storm['seconds'] / 60:.1f} minutes; bands: from strike to end")
    for label, run, colour in (("storm", storm, "tab:red"), ("no faults", record["quiet"], "tab:blue")):
        times = [step["at"] for step in run["steps"]]
        steps.plot(times, range(1, len(times) + 1), label=label, color=colour, linewidth=1.2)
    steps.set_ylabel("committed steps")
    steps.set_xlabel("seconds")
    steps.legend(loc="upper left", fontsize=8)
    _losses(losses, record, "storm", storm["steps"])
    figure.savefig(path, dpi=110)


def draw_churn(record: dict[str, Any], path: Path) -> None:
    """Write the picture of a record with churn to ``path``: its loss curve, and those of undisturbed seeds.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    churn = record["churn"]
    _losses(axes, record, "joins and leaves", churn["steps"])
    for join in churn["joins"]:
        colour = "tab:green" if join["what"] == "joined" else "tab:orange"
        reached = sum(step["at"] <= join["at"] for step in churn["steps"])
        axes.axvline(reached, color=colour, linewidth=0.8, linestyle=":")
    axes.set_title("10 joins (green) and leaves (orange) against undisturbed seeds")
    figure.savefig(path, dpi=110)


def _losses(axes: Any, record: dict[str, Any], name: str, steps: list[dict[str, Any]]) -> None:
    for seed, curve in record["seeds"].items():
        label = f"no faults, seed {seed}"
        axes.plot(range(1, len(curve) + 1), curve, color="tab:blue", alpha=0.5, linewidth=0.9, label=label)
    axes.plot(range(1, len(steps) + 1), [s["held_out"] for s in steps], color="tab:red", linewidth=1.3, label=name)
    axes.set_xlabel("committed steps")
    axes.set_ylabel("loss on held-out text, nats a byte")
    axes.set_yscale("log")
    axes.legend(loc="upper right", fontsize=8)
