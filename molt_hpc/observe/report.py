"""What a run did, for people: the reward's course as a picture, as text in a terminal, and as a few numbers.

Everything is read from <run>/metrics.jsonl, so it works while a run goes on and long after it.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from molt_hpc.observe.metrics import read_metrics

PICTURE = "reward.png"
WINDOW = 5
"""Steps at each end over which the summary averages."""
WIDTH, HEIGHT = 72, 12
"""Columns and rows of the terminal's curve, without its axes."""
BLOCKS = " ▁▂▃▄▅▆▇█"


def summary(run: Path) -> dict[str, Any]:
    """{steps, first, last, gain, best, window, pass_rate_first, pass_rate_last, seconds}.

    first and last are means of reward_mean over the first and last `window` steps (fewer in a short
    run), gain their difference, best the highest mean of `window` steps in a row. seconds lie between the first
    and the last step; pass rates are absent if the run has none. Raises ValueError without metrics.
    """
    records = _records(run)
    rewards = [r["reward_mean"] for r in records]
    window = min(WINDOW, len(rewards))
    means = smooth(rewards, window)
    found = {"steps": len(rewards), "window": window, "first": means[0], "last": means[-1],
             "gain": means[-1] - means[0], "best": max(means)}
    passes = [r["pass_rate"] for r in records if r.get("pass_rate") is not None]
    if len(passes) == len(records):
        found |= {"pass_rate_first": fmean(passes[:window]), "pass_rate_last": fmean(passes[-window:])}
    times = [r["time"] for r in records if "time" in r]
    return found | {"seconds": times[-1] - times[0] if times else 0.0}


def smooth(values: list[float], window: int) -> list[float]:
    """Means of every `window` neighbours: len(values) - window + 1 of them."""
    return [fmean(values[i:i + window]) for i in range(len(values) - window + 1)]


def plot(run: Path) -> Path:
    """Write reward.png into the run folder: reward and pass rate above, loss and entropy below; returns its path.

    Raises ValueError if matplotlib is missing or there are no metrics.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the picture of a run needs the package matplotlib: pip install matplotlib") from None
    records = _records(run)
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    _reward_axes(above, records, Path(run).resolve().name)
    _loss_axes(below, records)
    path = Path(run) / PICTURE
    figure.savefig(path, dpi=120)
    return path


def _series(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    chosen = [r for r in records if r.get(key) is not None]
    return [r["step"] for r in chosen], [r[key] for r in chosen]


def _reward_axes(axes: Any, records: list[dict[str, Any]], title: str) -> None:
    steps, rewards = _series(records, "reward_mean")
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, linewidth=1, label="reward, mean of the step")
    window = min(WINDOW, len(rewards))
    axes.plot(steps[window - 1:], smooth(rewards, window), color="tab:blue", linewidth=2, label=f"reward, mean of {window} steps")
    steps, passes = _series(records, "pass_rate")
    if passes:
        axes.plot(steps, passes, color="tab:green", linewidth=1, linestyle="--", label="pass rate")
    axes.set(title=title, ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize="small")


def _loss_axes(axes: Any, records: list[dict[str, Any]]) -> None:
    for key, colour, axis in (("loss", "tab:red", axes), ("entropy_mean", "tab:purple", axes.twinx())):
        steps, values = _series(records, key)
        axis.plot(steps, values, color=colour, linewidth=1)
        axis.set_ylabel(key.removesuffix("_mean"), color=colour)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)


def terminal_curve(run: Path) -> str:
    """The reward over the steps as text of at most 84 columns, lowest and highest value at the axis."""
    records = _records(run)
    return draw([r["reward_mean"] for r in records], records[0]["step"], records[-1]["step"])


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


def text(run: Path) -> str:
    """Curve and numbers, as shown at the end of a run."""
    found = summary(run)
    ends = f"first {found['window']} steps: {{}}   last {found['window']} steps: {{}}"
    lines = [terminal_curve(run), "", "reward_mean, " + ends.format(f"{found['first']:.3f}", f"{found['last']:.3f}")
             + f"   gain: {found['gain']:+.3f}   ({found['steps']} steps in {found['seconds']:.0f} s)"]
    if "pass_rate_first" in found:
        lines.append("pass_rate,   " + ends.format(f"{found['pass_rate_first']:.3f}", f"{found['pass_rate_last']:.3f}"))
    return "\n".join(lines)


def _records(run: Path) -> list[dict[str, Any]]:
    records = [r for r in read_metrics(Path(run)) if r.get("reward_mean") is not None]
    if not records:
        raise ValueError(f"{run}: metrics.jsonl has no step with a reward yet")
    return records
