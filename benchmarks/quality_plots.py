"""Draws the quality benchmark's outcomes: right answers over the share removed, and by depth and length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quality_report import answered, covered, policies_of, select, shares_removed, values_of
from quality_trials import FULL, Outcome

from ortolan.errors import ConfigError

COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")  # Okabe and Ito's
MARKERS = "osD^vP*X"
HEAT_REMOVED = 0.875
STREAMING = "streaming"
DOTS_PER_INCH = 100


def draw_plots(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Write quality_removed.png, and quality_depth_MODE.png for each mode; returns their paths.

    Raises:
        ConfigError: matplotlib is missing.
    """
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"quality_removed": removed_figure(pyplot, outcomes)}
    for mode in values_of(outcomes, "mode"):
        figures[f"quality_depth_{mode}"] = depth_figure(pyplot, select(outcomes, mode=mode), mode)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=DOTS_PER_INCH, facecolor="white")
        pyplot.close(figure)
    return paths


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError("plots need matplotlib; install ortolan[bench]") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def removed_figure(pyplot: Any, outcomes: Sequence[Outcome]) -> Any:
    """Draw right answers over the share removed: a row for each mode, a column for each kind."""
    modes, kinds = values_of(outcomes, "mode"), values_of(outcomes, "kind")
    size = (3.2 * len(kinds) + 1.9, 2.7 * len(modes) + 0.4)
    figure, axes = pyplot.subplots(len(modes), len(kinds), figsize=size, squeeze=False, sharex=True, sharey=True)
    for row, mode in enumerate(modes):
        for column, kind in enumerate(kinds):
            draw_policies(axes[row][column], select(outcomes, mode=mode, kind=kind))
            axes[row][column].set_title(f"{kind}, question {mode}", fontsize=10)
        axes[row][0].set_ylabel("right answers, %")
    for axis in axes[-1]:
        axis.set_xlabel("removed from the cache, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1 - 1.55 / size[0], 1))
    return figure


def draw_policies(axis: Any, outcomes: Sequence[Outcome]) -> None:
    """Draw one line with 95 % intervals for each policy, side by side, so that equal ones are seen."""
    shares, policies = shares_removed(outcomes), policies_of(outcomes)
    for order, policy in enumerate(policies):
        groups = [answered(select(outcomes, policy=policy, removed=share)) for share in shares]
        places = [place + 0.09 * (order - (len(policies) - 1) / 2) for place in range(len(shares))]
        percent = [group.percent for group in groups]
        errors = [
            [group.percent - group.interval[0] for group in groups],
            [group.interval[1] - group.percent for group in groups],
        ]
        style = {"color": COLOURS[order % len(COLOURS)], "marker": MARKERS[order % len(MARKERS)], "markersize": 4}
        axis.errorbar(places, percent, yerr=errors, label=policy, linewidth=1, capsize=1.5, **style)
    full = answered(select(outcomes, policy=FULL)).percent
    axis.axhline(full, color="grey", linewidth=1, linestyle="--", label="full caches")
    streaming = [select(outcomes, policy=STREAMING, removed=share) for share in shares]
    if all(streaming):
        predicted = [covered(group).percent for group in streaming]
        axis.plot(range(len(shares)), predicted, color="grey", linestyle=":", label="latest tokens hold it")
    axis.set(ylim=(-4, 104), xticks=range(len(shares)), xticklabels=[f"{100 * share:g}" for share in shares])
    axis.grid(axis="y", alpha=0.3)


def depth_figure(pyplot: Any, outcomes: Sequence[Outcome], mode: str) -> Any:
    """Draw a heat map of depth by length for full caches and each policy, at the share nearest to HEAT_REMOVED."""
    removed = min(shares_removed(outcomes), key=lambda share: abs(share - HEAT_REMOVED))
    panels = [(FULL, 0.0), *((policy, removed) for policy in policies_of(outcomes))]
    lengths = sorted(values_of(outcomes, "length"))
    size = (1.0 + len(panels) * (0.55 + 0.34 * len(lengths)), 4.2)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis, (policy, share) in zip(axes[0], panels, strict=True):
        cells = heat_cells(select(outcomes, policy=policy, removed=share), lengths)
        image = axis.imshow(cells, cmap="viridis", vmin=0, vmax=100, aspect="auto")
        for row, line in enumerate(cells):
            for column, percent in enumerate(line):
                ink = "black" if percent > 55 else "white"
                axis.text(column, row, f"{percent:.0f}", ha="center", va="center", fontsize=7, color=ink)
        axis.set_title(policy, fontsize=10)
        axis.set_xticks(range(len(lengths)), [f"{length / 1024:g}" for length in lengths])
    axes[0][0].set_yticks(range(11), [str(10 * step) for step in range(11)])
    axes[0][0].set_ylabel("depth of the value, % of the text")
    figure.supxlabel("prompt, KiB", fontsize=10)
    figure.suptitle(f"values that came back, %: question {mode}, {100 * removed:g} % removed", fontsize=11)
    figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01)
    return figure


def heat_cells(outcomes: Sequence[Outcome], lengths: Sequence[int]) -> list[list[float]]:
    """Return the percentage of values right, [11 depths][lengths]; NaN where none was asked for."""
    asked: dict[tuple[int, int], list[bool]] = {}
    for outcome in outcomes:
        for depth, right in zip(outcome.depths, outcome.right, strict=True):
            asked.setdefault((round(10 * depth), outcome.length), []).append(right)
    return [[_percent(asked.get((step, length), [])) for length in lengths] for step in range(11)]


def _percent(flags: Sequence[bool]) -> float:
    return 100 * sum(flags) / len(flags) if flags else float("nan")
