"""`fedstrata demo`: one skewed federation and three methods, where and why one of them fails, and what helps."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.options import Json, Open, Out, Report, open_screen
from fedstrata.cli.panels import OUTPUT
from fedstrata.cli.report import open_in_browser
from fedstrata.core.text import metric_text, plural
from fedstrata.errors import Stopped, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from fedstrata.compare import Comparison, ComparisonRow, Plan
    from fedstrata.diagnosis import Diagnosis
    from fedstrata.runs.reader import SavedRun
    from fedstrata.runs.tried import Tried

OnlyFindings = Annotated[bool, typer.Option("--quiet", help="print only what was learnt", rich_help_panel=OUTPUT)]
USUAL = "fedavg"
"""What the others are compared with, and what is diagnosed."""
DEMO: dict[str, Any] = {
    "dataset": "digits",
    "model": "cnn2(width=8)",
    "partition": "shards(classes=2)",
    "clients": 10,
    "rounds": 12,
    "epochs": 2,
    "lr": 0.1,
    "method": [USUAL, "fedimpro(split='layer1')", "fedpart(full_rounds=4, rounds_per_stratum=1)"],
    "seed": [0, 1, 2],
    "probe": "divergence,cosine,cka,gradnorm,calibration,drift",
    "probe_every": 6,
}
TITLE = "FedAvg and two layer-wise methods, ten clients with two digits each"
STORY = (
    "Ten clients want one model for pictures of digits, and each holds only two of the ten digits. fedavg averages "
    "whole models; fedimpro trains the layers above the first on everybody's features; fedpart trains and sends one "
    "layer at a time for a third of its rounds."
)


@dataclass(frozen=True)
class Findings:
    """All that the demo has found out.

    Args:
        compared: the methods, over the seeds.
        measured: method → its runs, seed by seed, whose layers were measured.
        diagnosis: of the usual method's first run.
        tried: its first remedy, beside the unchanged run.
    """

    compared: Comparison
    measured: Mapping[str, Sequence[SavedRun]]
    diagnosis: Diagnosis
    tried: Tried


def demo(
    out: Out = None, quiet: OnlyFindings = False, as_json: Json = False, report: Report = True, open_: Open = False
) -> None:
    """Compare three methods on skewed digits, find out where and why one fails, and try what helps, in a minute."""
    from fedstrata.runs.directory import fresh_directory

    out = out or fresh_directory(Path("runs"), "demo")
    if (out / "run.toml").exists() or (out.exists() and not out.is_dir()):
        what = "a run's directory" if out.is_dir() else "a file"
        raise UsageError(f"{out} is {what}: the demo makes several runs and needs a directory of its own")
    screen = open_screen(stderr=as_json, quiet=quiet)
    screen.print(STORY + "\n")
    try:
        found = find_out(out, screen, screen)
    except Stopped as stopped:
        raise Stopped(f"stopped; go on with: fedstrata demo --out {_quote(out)}") from stopped
    if report:
        _write_page(found, out, open_)
    if as_json:
        print(json.dumps(_as_dict(found, out)))
    else:
        show(found, out, open_screen(), report, quiet)


def find_out(out: Path, screen: Console, progress: Console) -> Findings:
    """Compare, diagnose, try; what is finished in the directory is not run again."""
    from fedstrata.compare import plan, tabulate
    from fedstrata.compare.show import RunsWatcher, SideBySide
    from fedstrata.diagnosis import diagnose
    from fedstrata.runs.reader import SavedRun
    from fedstrata.trials.choice import Budget
    from fedstrata.trials.runs import plan_trials, run_trials

    grid = plan(DEMO, out)
    _run(grid, progress)
    compared = tabulate(grid)
    screen.print()
    screen.print(SideBySide(compared), soft_wrap=True)
    measured = {row.method: [SavedRun.read(Path(result.directory)) for result in row.results] for row in compared.rows}
    usual, first = measured[USUAL][0], _first_directory(compared)
    screen.print(f"\nWhat is wrong with {USUAL}? {diagnose(usual).verdict}")
    screen.print("Trying its first remedy, beside the unchanged run as the control group:")
    trials = plan_trials(first, diagnose(usual), usual, Budget(1, DEMO["rounds"], len(DEMO["seed"])), None)
    with RunsWatcher(progress, trials.runs) as watcher:
        tried = run_trials(first, trials, usual, on_news=watcher.hear)
    return Findings(compared, measured, diagnose(SavedRun.read(first)), tried)


def _first_directory(compared: Comparison) -> Path:
    """Where the usual method's run with the first seed is."""
    return Path(next(row.results[0].directory for row in compared.rows if row.method == USUAL))


def show(found: Findings, out: Path, screen: Console, report: bool = True, quiet: bool = False) -> None:
    """The last lines: what was learnt, and three commands to go on with."""
    if not quiet:
        screen.print("\nWhat was learnt", style="bold")
    _print_list([*learnt(found), *([f"The page: {out / 'report.html'}"] if report else [])], screen)
    if quiet:
        return
    screen.print("\nGo on with", style="bold")
    for command, about in next_commands(found, out):
        screen.print(f"  {command}\n      {about}", soft_wrap=True)


def _print_list(lines: Sequence[str], screen: Console) -> None:
    """Items that a terminal breaks where it must; elsewhere a line each."""
    from rich.table import Table

    items = Table.grid(padding=(0, 1))
    for line in lines:
        items.add_row("-", line)
    screen.print(
        items if screen.is_terminal else "\n".join(f"- {line}" for line in lines), soft_wrap=not screen.is_terminal
    )


def _run(grid: Plan, screen: Console) -> None:
    """Run what is missing, and leave a file by which `fedstrata compare` goes on."""
    from fedstrata.compare import run_missing
    from fedstrata.compare.show import RunsWatcher
    from fedstrata.config.toml import to_toml
    from fedstrata.runs.files import write_atomic

    with RunsWatcher(screen, grid) as watcher:
        failures = run_missing(grid, on_news=watcher.hear)
    for failure in failures.values():
        raise failure
    write_atomic(grid.out / "compare.toml", to_toml(DEMO, ["what `fedstrata demo` compares"]))


def _write_page(found: Findings, out: Path, in_browser: bool) -> None:
    """One page about all runs, which opens with what was learnt."""
    from fedstrata.report import write
    from fedstrata.runs.reader import SavedRun

    runs = [SavedRun.read(Path(result.directory)) for row in found.compared.rows for result in row.results]
    page = write(runs, out / "report.html", TITLE, list(learnt(found)))
    if in_browser:
        open_in_browser(page.resolve().as_uri())


def _as_dict(found: Findings, out: Path) -> dict[str, Any]:
    return {
        **found.compared.as_dict(),
        "diagnosis": found.diagnosis.as_dict(),
        "tried": found.tried.model_dump(mode="json"),
        "learnt": list(learnt(found)),
        "out": str(out),
    }


def learnt(found: Findings) -> Iterator[str]:
    """Who won at what cost, where in the network, why, and whether the first remedy helps: from these runs alone."""
    usual = next(row for row in found.compared.rows if row.method == USUAL)
    others = sorted((row for row in found.compared.rows if row is not usual), key=_score, reverse=True)
    yield from (_versus(row, usual) for row in others)
    yield _layers(found, others[0])
    yield f"What is wrong with {USUAL}: {_first_finding(found.diagnosis)}"
    yield _remedy(found.tried)


def _score(row: ComparisonRow) -> float:
    score = row.of("score")
    return score.mean if score else float("-inf")


def _versus(row: ComparisonRow, usual: ComparisonRow) -> str:
    """A method against the usual one: score, seed by seed, and costs."""
    own, base = row.by_seed(), usual.by_seed()
    sign = 1 if _score(row) >= _score(usual) else -1
    agree = sum(sign * (own[seed] - base[seed]) > 0 for seed in own.keys() & base.keys())
    sent, usually = (sum(_mean(one, name) for name in ("bytes_up", "bytes_down")) for one in (row, usual))
    return (
        f"{row.method}: {metric_text(row.metric, _score(row))} against {USUAL}'s "
        f"{metric_text(row.metric, _score(usual))}, {'better' if sign > 0 else 'worse'} with {agree} of "
        f"{plural(len(base), 'seed')}, for ×{sent / usually:.2f} the bytes and "
        f"×{_mean(row, 'flops') / _mean(usual, 'flops'):.2f} the computation."
    )


def _mean(row: ComparisonRow, name: str) -> float:
    found = row.of(name)
    return found.mean if found else float("nan")


def _layers(found: Findings, best: ComparisonRow) -> str:
    """Where clients' gradients part most under the usual method, and what the best other method makes of it."""
    usual, other = (_divergence(found.measured[name]) for name in (USUAL, best.method))
    worst, least = max(usual, key=lambda name: usual[name]), min(usual, key=lambda name: usual[name])
    return (
        f"Layer by layer: with {USUAL} clients' gradients are furthest apart in {worst}, "
        f"{usual[worst] / usual[least]:.1f} times as far as in {least}; with {best.method} they are "
        f"×{other[worst] / usual[worst]:.2f} as far apart there (last round, mean over the seeds)."
    )


def _divergence(runs: Sequence[SavedRun]) -> dict[str, float]:
    """How far clients' gradients are apart in each stratum after the last round, in the mean over the runs."""
    each = [run.latest("divergence") for run in runs]
    return {name: sum(one[name] for one in each) / len(each) for name in each[0]}


def _first_finding(diagnosis: Diagnosis) -> str:
    if not diagnosis.findings:
        return diagnosis.verdict
    first = diagnosis.findings[0]
    explained = [other.name for other in diagnosis.findings if first.name in other.explained_by]
    more = f", which explains {', '.join(explained)}" if explained else ""
    return f"{first.name} (severity {first.severity:.2f}){more}.".replace("-", " ")


def _remedy(tried: Tried) -> str:
    """What the first remedy brought against the control group."""
    from fedstrata.trials.show import interval_text, points_text

    one = tried.remedies[0]
    if one.gained is None or one.low is None or one.high is None:
        return f"Its first remedy, {one.change}, could not be judged: {'; '.join(tried.notes) or 'too few seeds'}."
    return (
        f"Its first remedy, {one.change}: {points_text(tried.metric, one.gained)} points over the control group, the "
        f"unchanged runs with the same {plural(len(tried.seeds), 'seed')} (90 % interval "
        f"{interval_text(tried.metric, one.low, one.high)}): {one.verdict}."
    )


def _quote(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


def next_commands(found: Findings, out: Path) -> Iterator[tuple[str, str]]:
    """Three commands to go on with, and what each is for."""
    usual = _first_directory(found.compared)
    seeds = " ".join(str(seed) for seed in range(2 * len(DEMO["seed"])))
    yield f"fedstrata diagnose {_quote(usual)} --try", "the whole diagnosis, and what its other remedies bring"
    compare = f"fedstrata compare {_quote(out / 'compare.toml')} --out {_quote(out)} --seeds {seeds}"
    yield compare, "more seeds; what is finished is not run again"
    own = "csv(path='FILE.csv', target='COLUMN', client='COLUMN')"
    yield (
        f'fedstrata run --dataset "{own}" --partition natural --clients 0 --model tablemlp',
        "your own table, one row per example; docs/howto/own-data.md has pictures, arrays and Python",
    )
