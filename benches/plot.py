"""Draws the decode times that `gpu_report` measured, beside what moving their bytes takes at least.

`python benches/plot.py [CSV ...]` writes a PNG beside each CSV of benches/results that has decode rows, or beside those
given.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
# What an H200 was measured to read, in TB/s, as src/plan/print.rs has it.
CEILING = 4.55
MEASURES = ("end_to_end", "forward")

# (context, batch) to (milliseconds a step, least milliseconds).
Points = dict[tuple[int, int], tuple[float, float]]


def read(path: Path) -> tuple[str, dict[str, Points]]:
    """The title of a file, and its points by measure; none for another kind of file."""
    points: dict[str, Points] = defaultdict(dict)
    title = ""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row.get("measure") in MEASURES:
                title = f"{row['card']}, {row['format']}, {row['layers']} layers, {row['date']}"
                key = int(row["context"]), int(row["batch"])
                points[row["measure"]][key] = float(row["us"]) / 1e3, float(row["mb"]) / 1e3 / CEILING
    return title, points


def lines(axes: plt.Axes, points: Points, by: int, label: str) -> None:
    """One line for each value of axis `by` (0: context, 1: batch) over the other axis, and its floor dashed."""
    for color, value in enumerate(sorted({key[by] for key in points})):
        chosen = sorted((key[1 - by], times) for key, times in points.items() if key[by] == value)
        over = [x for x, _ in chosen]
        axes.plot(over, [ms for _, (ms, _) in chosen], "o-", ms=3, color=f"C{color}", label=label.format(f"{value:,}"))
        axes.plot(over, [floor for _, (_, floor) in chosen], "--", lw=1, color=f"C{color}")


def draw(path: Path) -> Path | None:
    """Draws one file."""
    title, measures = read(path)
    points = measures.get("end_to_end") or measures.get("forward")
    if not points:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained")
    lines(left, points, 1, "batch {}")
    lines(right, points, 0, "context {}")
    left.set_xlabel("context, tokens of each sequence")
    left.set_xscale("log", base=2)
    contexts = sorted({context for context, _ in points})
    left.set_xticks(contexts, [f"{round(context / 1024)}K" for context in contexts])
    right.set_xlabel("batch, sequences a step")
    right.set_xscale("log", base=2)
    batches = sorted({batch for _, batch in points})
    right.set_xticks(batches, [str(batch) for batch in batches])
    for axes in (left, right):
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.set_ylabel("ms a step")
        axes.grid(alpha=0.3)
        axes.legend(
            fontsize=8,
            title=f"dashed: bytes / {CEILING} TB/s",
            title_fontsize=8,
            loc="center left",
            bbox_to_anchor=(1, 0.5),
        )
    figure.suptitle(f"{title}: end to end")
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=80, pil_kwargs={"optimize": True})
    plt.close(figure)
    return target


def main() -> int:
    """Draws the files given, or all."""
    paths = [Path(name) for name in sys.argv[1:]] or sorted(RESULTS.glob("*.csv"))
    for path in paths:
        target = draw(path)
        print(f"{path.name}: {target.name if target else 'no decode rows'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
