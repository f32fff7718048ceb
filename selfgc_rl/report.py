"""Figures of a run: one PNG with three panels and a small self-contained HTML page.

Pure over what a run wrote: ``metrics.jsonl`` (one object per training step) and ``results.json`` (evaluation before
and after). Either may be missing; a panel without data says so instead of being empty. Colours are Okabe-Ito's,
which stay apart for colour-blind readers, and before/after also differ in line style or hatching.
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfgc_envs.errors import UserError

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"
ACTIONS = ("folds", "drops", "expands")


@dataclass(frozen=True)
class PolicyFigures:
    """What one policy did on the held-out tasks.

    ``budget_by_turn[t]`` holds the budget used (share of the window) at turn t: 25 %, 50 % and 75 % quantile over the
    episodes still running at that turn, and the number of these episodes.
    """

    success: float
    penalty: float
    actions: Mapping[str, float] = field(default_factory=dict)
    budget_by_turn: Sequence[Mapping[str, float]] = ()

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> PolicyFigures:
        return cls(
            float(tree["success"]),
            float(tree["penalty"]),
            {name: float(tree.get(name, 0.0)) for name in ACTIONS},
            tuple(tree.get("budget_by_turn", ())),
        )


@dataclass(frozen=True)
class RunFigures:
    """Everything the figure shows. ``steps`` rows have ``step``, ``success`` and ``penalty``."""

    title: str
    window: int
    threshold: float = 0.6
    steps: Sequence[Mapping[str, float]] = ()
    base: PolicyFigures | None = None
    trained: PolicyFigures | None = None


@dataclass(frozen=True)
class _Drawn:
    """A policy and how it looks in every panel."""

    policy: PolicyFigures
    label: str
    colour: str
    line: str
    marker: str
    hatch: str
    offset: float


def _policies(figures: RunFigures) -> list[_Drawn]:
    drawn = []
    if figures.base:
        drawn.append(_Drawn(figures.base, "before (base)", ORANGE, "--", "s", "//", -0.2))
    if figures.trained:
        drawn.append(_Drawn(figures.trained, "after (trained)", BLUE, "-", "o", "", 0.2))
    return drawn


def plot_run(figures: RunFigures, path: Path) -> Path:
    """Draw the figure to ``path`` (PNG), written under a temporary name first."""
    data = _png(figures)
    tmp = path.with_name(f".{path.name}.tmp")
    tmp.write_bytes(data)
    tmp.replace(path)
    return path


def _png(figures: RunFigures) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 4.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    training, context, actions = figure.subplots(1, 3, width_ratios=(1.1, 1.1, 0.8))
    _plot_training(training, figures)
    _plot_context(context, figures)
    _plot_actions(actions, figures)
    for axes in (training, context, actions):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
    figure.suptitle(figures.title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _nothing(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
    axes.set_xticks([])
    axes.set_yticks([])


def _plot_training(axes: Any, figures: RunFigures) -> None:
    axes.set_title("Training: success and budget penalty", fontsize=10, loc="left")
    if not figures.steps:
        return _nothing(axes, "no training steps recorded")
    steps = [row["step"] for row in figures.steps]
    success, penalty = ([row[key] for row in figures.steps] for key in ("success", "penalty"))
    axes.plot(steps, success, color=BLUE, marker="o", label="success")
    axes.plot(steps, penalty, color=ORANGE, marker="s", ls="--", label="penalty (mean φ)")
    axes.set_xlabel("training step")
    axes.set_ylabel("mean over the step's episodes")
    axes.set_ylim(-0.03, 1.03)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=9, loc="best")


def _plot_context(axes: Any, figures: RunFigures) -> None:
    axes.set_title("Held-out tasks: context size over turns", fontsize=10, loc="left")
    drawn = [style for style in _policies(figures) if style.policy.budget_by_turn]
    if not drawn:
        return _nothing(axes, "no evaluation recorded")
    top = 110.0
    for style in drawn:
        rows = style.policy.budget_by_turn
        turns = range(1, len(rows) + 1)
        low, mid, high = ([100 * row[q] for row in rows] for q in ("q25", "median", "q75"))
        axes.plot(turns, mid, color=style.colour, ls=style.line, marker=style.marker, ms=4, label=style.label)
        axes.fill_between(turns, low, high, color=style.colour, alpha=0.15, linewidth=0)
        top = max(top, *high)
    axes.axhline(100, color="black", linewidth=1.2)
    axes.axhline(100 * figures.threshold, color=GREY, linewidth=1.2, ls=":")
    left, right = axes.get_xlim()
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1}
    charged = f"charged above {figures.threshold:.0%}"
    axes.text(right, 101, f"window ({figures.window} tokens)", ha="right", va="bottom", fontsize=8, bbox=box)
    axes.text(left, 100 * figures.threshold + 1, charged, ha="left", va="bottom", fontsize=8, color=GREY, bbox=box)
    axes.set_xlabel("turn (median and middle half of the running episodes)")
    axes.set_ylabel("budget used, % of the window")
    axes.set_ylim(0, top)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def _plot_actions(axes: Any, figures: RunFigures) -> None:
    axes.set_title("Held-out tasks: actions per episode", fontsize=10, loc="left")
    drawn = [style for style in _policies(figures) if style.policy.actions]
    if not drawn:
        return _nothing(axes, "no evaluation recorded")
    for style in drawn:
        places = [i + style.offset for i in range(len(ACTIONS))]
        heights = [style.policy.actions.get(action, 0.0) for action in ACTIONS]
        bars = axes.bar(
            places, heights, 0.38, color=style.colour, hatch=style.hatch, edgecolor="white", label=style.label
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.margins(y=0.12)
    axes.set_xticks(range(len(ACTIONS)), ACTIONS)
    axes.set_ylabel("mean per episode")
    axes.legend(frameon=False, fontsize=9, loc="best")


def table_rows(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The short table of an evaluation: (what, base, trained), ready to print."""
    base, trained = results["base"], results["trained"]
    rows = [
        ("success", f"{base['success']:.3f}", f"{trained['success']:.3f}"),
        ("budget penalty (mean φ)", f"{base['penalty']:.3f}", f"{trained['penalty']:.3f}"),
    ]
    rows += [(f"{name} per episode", f"{base[name]:.2f}", f"{trained[name]:.2f}") for name in ACTIONS if name in base]
    if "turns" in base:
        rows.append(("turns per episode", f"{base['turns']:.1f}", f"{trained['turns']:.1f}"))
    low, high = results["ci95"]
    difference = f"{results['paired_difference']:+.3f}  [{low:+.3f}, {high:+.3f}] 95 %"
    rows.append(("paired difference of success", "", difference))
    return rows


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
img {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .9rem; border-bottom: 1px solid #ddd; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
</style></head><body>
<h1>{title}</h1>
<p>{subtitle}</p>
<img alt="Success and penalty over training, context size over turns, folds, drops and expands per episode"
 src="data:image/png;base64,{png}">
{table}
</body></html>
"""


def _html_table(results: Mapping[str, Any]) -> str:
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table_rows(results)
    )
    return f"<table><tr><th></th><th>base</th><th>trained</th></tr>\n{cells}</table>"


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl`` that carry the plotted values; a half-written last line is left out."""
    if not path.is_file():
        return []
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if all(isinstance(row.get(key), (int, float)) for key in ("step", "success", "penalty")):
            rows[row["step"]] = row  # a resumed run may log a step again: the later one counts
    return [rows[step] for step in sorted(rows)]


def results_path(run_dir: Path) -> Path | None:
    """The evaluation a run folder holds: the demo's own, else that of ``selfgc-rl eval``."""
    return next((p for p in (run_dir / "results.json", run_dir / "eval" / "results.json") if p.is_file()), None)


def write_report(run_dir: Path) -> tuple[Path, Path]:
    """Write ``report.png`` and ``report.html`` into a run folder from what it holds.

    Returns:
        The paths of the PNG and of the page.

    Raises:
        UserError: no such folder, nothing to report in it, or a results file that is not ours.
    """
    from selfgc_rl.config import Config, load_config

    if not run_dir.is_dir():
        raise UserError(f"run folder '{run_dir}' does not exist", "give the folder of a train, eval or demo run")
    evaluation = results_path(run_dir)
    steps = read_steps(run_dir / "metrics.jsonl")
    if not steps and evaluation is None:
        raise UserError(f"'{run_dir}' holds neither metrics.jsonl nor results.json", "train or evaluate first")
    config_path = run_dir / "config.yaml"
    config = load_config(config_path) if config_path.is_file() else Config()
    base = trained = None
    table, subtitle = "", "Training only; 'selfgc-rl eval --run DIR' adds held-out figures."
    if evaluation is not None:
        try:
            results = json.loads(evaluation.read_text(encoding="utf-8"))
            base, trained = (PolicyFigures.from_json(results[name]) for name in ("base", "trained"))
            table = _html_table(results)
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f"'{evaluation}' is no evaluation's results ({e!r})", "evaluate again") from None
        subtitle = f"{results.get('tasks', '?')} held-out tasks, same tasks and seeds for both policies."
    figures = RunFigures(
        title=f"selfgc-rl · {run_dir.name} · {', '.join(config.env.families)} at pressure {config.env.pressure:g}",
        window=config.env.window,
        threshold=config.reward.threshold,
        steps=steps,
        base=base,
        trained=trained,
    )
    png = plot_run(figures, run_dir / "report.png")
    page = run_dir / "report.html"
    text = _PAGE.format(
        title=html.escape(figures.title),
        subtitle=html.escape(subtitle),
        png=base64.b64encode(png.read_bytes()).decode(),
        table=table,
    )
    tmp = page.with_name(".report.html.tmp")
    tmp.write_text(text, encoding="utf-8")
    tmp.replace(page)
    return png, page
