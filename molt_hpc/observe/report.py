"""What a run did, for people: the reward's course as a picture, as text in a terminal, and as a few numbers.

Everything is read from <run>/metrics.jsonl, so it works while a run goes on and long after it.
"""

from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from molt_hpc.observe.metrics import read_metrics

PICTURE = "reward.png"
WINDOW = 5
"""Steps at each end over which the numbers are averaged."""
WIDTH, HEIGHT = 72, 12
"""Columns and rows of the terminal's curve, without its axes."""
BLOCKS = " ▁▂▃▄▅▆▇█"


def text(run: Path) -> str:
    """Curve and numbers, as shown at the end of a run: means over the first and last WINDOW steps (fewer in a short run).

    Raises ValueError without metrics.
    """
    records = _records(run)
    window, seconds = min(WINDOW, len(records)), records[-1].get("time", 0.0) - records[0].get("time", 0.0)
    lines = [draw([r["reward_mean"] for r in records], records[0]["step"], records[-1]["step"]), ""]
    for key in ("reward_mean", "pass_rate"):
        values = _series(records, key)[1]
        if len(values) == len(records):
            first, last = fmean(values[:window]), fmean(values[-window:])
            lines.append(f"{key:<11}  first {window} steps: {first:.3f}   last {window} steps: {last:.3f}   gain: {last - first:+.3f}")
    return "\n".join([*lines, f"{len(records)} steps in {seconds:.0f} s"])


def plot(run: Path) -> Path:
    """Write reward.png into the run folder: reward, pass rate, loss and entropy over the steps; returns its path.

    Raises ValueError if matplotlib is missing or there are no metrics.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the picture of a run needs the package matplotlib: pip install matplotlib") from None
    records = _records(run)
    figure = Figure(figsize=(8, 8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=[2, 1, 1])
    for axes, keys in zip(panels, (("reward_mean", "pass_rate"), ("loss",), ("entropy_mean",)), strict=True):
        for key in keys:
            axes.plot(*_series(records, key), alpha=0.6, linewidth=1, label=key)
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    steps, rewards = _series(records, "reward_mean")
    window = min(WINDOW, len(rewards))
    smooth = [fmean(rewards[i:i + window]) for i in range(len(rewards) - window + 1)]
    panels[0].plot(steps[window - 1:], smooth, color="tab:blue", linewidth=2)
    panels[0].set_title(Path(run).resolve().name)
    panels[-1].set_xlabel("step")
    path = Path(run) / PICTURE
    figure.savefig(path, dpi=120)
    return path


def _series(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    chosen = [r for r in records if r.get(key) is not None]
    return [r["step"] for r in chosen], [r[key] for r in chosen]


def draw(values: list[float], first: int, last: int, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Columns of blocks; more values than columns are averaged, fewer take several columns each."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        columns = [fmean(values[a:b]) for a, b in pairwise(edges)]
    else:
        columns = [v for v in values for _ in range(max(1, width // len(values)))]
    low, high = min(columns), max(columns)
    # the lowest column still shows one eighth of a row
    span = (high - low) or 1.0
    eighths = [1 + round((v - low) / span * (height * 8 - 1)) for v in columns]
    lines = []
    for row in reversed(range(height)):
        label = {height - 1: f"{high:8.3f}", 0: f"{low:8.3f}"}.get(row, " " * 8)
        lines.append(f"{label} |" + "".join(BLOCKS[min(8, max(0, e - 8 * row))] for e in eighths).rstrip())
    axis = f"step {first}".ljust(len(columns) - len(str(last))) + str(last)
    return "\n".join([*lines, " " * 8 + " +" + "-" * len(columns), " " * 10 + axis])


def _records(run: Path) -> list[dict[str, Any]]:
    records = [r for r in read_metrics(Path(run)) if r.get("reward_mean") is not None]
    if not records:
        raise ValueError(f"{run}: metrics.jsonl has no step with a reward yet")
    return records
