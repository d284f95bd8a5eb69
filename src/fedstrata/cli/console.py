"""What a run looks like in a terminal before and after its rounds: a header, and a table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table

from fedstrata.core.results import Fairness
from fedstrata.core.text import bytes_text, flops_text, metric_text, metric_title, plural, simulated_text
from fedstrata.progress.terminal import RoundsTable
from fedstrata.runs.records import History
from fedstrata.runs.round_text import milestones

if TYPE_CHECKING:
    from fedstrata.federation import Federation


def header(federation: Federation, rows: Mapping[str, str]) -> Panel:
    """What runs: shown before the first round."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    parameters = sum(p.numel() for p in federation.state.params.values())
    s = federation.settings
    local = plural(s.epochs, "epoch") if s.steps is None else plural(s.steps, "step")
    shown = {
        "method": f"{federation.method}   (buffers: {federation.method.buffers})",
        **rows,
        "training": f"{plural(s.rounds, 'round')}, {local} of {s.optimizer} at lr {s.lr:g}, batch {s.batch_size}, "
        f"seed {s.seed}",
        "size": f"{parameters:,} parameters in {len(federation.strata)} strata",
        "clients": f"{federation.sampler.per_round} of {len(federation.clients)} {_together(federation)}",
        "engine": f"{federation.engine}, {plural(federation.workers, 'worker')}" + (", compiled" if s.compile else ""),
        **({"because": federation.engine_reason} if federation.engine_reason else {}),
    }
    if federation.records:
        shown["resumed"] = f"after round {len(federation.records)}"
    for name, text in shown.items():
        table.add_row(name, text)
    for note in federation.notes:
        name, _, text = note.partition(": ")
        named = bool(text) and name.isalpha()  # else the colon is one within a sentence
        table.add_row(f"note ({name})" if named else "note", text if named else note)
    if federation.out is not None:
        table.add_row("files", str(federation.out))
    return Panel(table, title="fedstrata", title_align="left", expand=False)


def _together(federation: Federation) -> str:
    """When clients train, and whether they are judged by test examples of their own."""
    when = "in every round" if federation.method.arrivals is None else "at the same time"
    return when + _judged(federation)


def _judged(federation: Federation) -> str:
    """Whether clients are judged by test examples of their own, and how many are."""
    count = sum(examples is not None and len(examples) > 0 for examples in federation.client_tests or ())
    return f", {count} judged by test examples of their own" if count else ""


def fairness_text(found: Fairness, metric: str, names: Sequence[str] = ()) -> str:
    """The worst client, and how far clients are apart, in a line."""
    known = found.worst_client < len(names)
    who = names[found.worst_client] if known else f"client {found.worst_client}"
    jain = "" if found.jain is None else f", Jain {found.jain:.3f}"
    return (
        f"worst {metric_text(metric, found.worst)} ({who}), mean {metric_text(metric, found.mean)}, "
        f"spread {metric_text(metric, found.std)}{jain}"
    )


def clients_rows(history: History, metric: str, names: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """What there is to say of clients that are judged for themselves, line by line."""
    if history.fairness is not None:
        own = "" if history.global_fairness is None else "own models: "
        yield "clients", own + fairness_text(history.fairness, metric, names)
    if history.global_fairness is not None:
        yield "", f"the global model: {fairness_text(history.global_fairness, metric, names)}"
    if history.newcomers:
        kinds = {"global": "the global model", "own": "own models"}
        told = [f"{kinds[kind]} {metric_text(metric, score)}" for kind, score in history.newcomers.items()]
        yield "newcomers", ", ".join(reversed(told))


def summary(history: History, out: Path | None, report: bool = False, names: Sequence[str] = ()) -> Group:
    """The end of a run: a table of its course, its totals, and where its files are; `names` are the clients'."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    s, costs = history.summary, history.costs
    metric, best = s["metric"], metric_text(s["metric"], s["best_score"])
    facts.add_row(metric_title(metric), f"{metric_text(metric, s['score'])}  (best {best}, round {s['best_round']})")
    others = [f"{metric_title(n)} {metric_text(n, v)}" for n, v in s["metrics"].items() if n != metric]
    if others:
        facts.add_row("also", ", ".join(others))
    for title, told in clients_rows(history, metric, names):
        facts.add_row(title, told)
    if s["target"] is not None:
        facts.add_row("target", f"{metric_text(metric, s['target'])} {_reached_text(s)}")
    archs = next((r.arch_accuracy for r in reversed(history.records) if r.loss is not None), {})
    if archs:
        facts.add_row("by model", ", ".join(f"{arch} {metric_text(metric, score)}" for arch, score in archs.items()))
    facts.add_row("method", f"{s['method']}  (buffers: {s['buffers']})")
    beside = [f"{name}'s own {100 * size / costs.bytes_up:.1f} %" for name, size in costs.slots_up.items()]
    up = bytes_text(costs.bytes_up) + " up" + (f" ({', '.join(beside)})" if beside else "")
    facts.add_row("sent", f"{up}, {bytes_text(costs.bytes_down)} down")
    facts.add_row("computed", f"{flops_text(costs.flops)} in {costs.steps:,} steps, {costs.seconds:.1f} s")
    if "simulated_seconds" in s:
        facts.add_row("simulated", f"{simulated_text(s['simulated_seconds'])} on the fleet's devices")
    if probed := s.get("probes"):
        facts.add_row("probes", f"{probed['seconds']:.1f} s more, in {plural(probed['rounds'], 'round')}")
    step = f", {bytes_text(costs.training_memory)} in a client's step" if costs.training_memory else ""
    facts.add_row("memory", f"{bytes_text(costs.memory)} at most{step}")
    if s["refused"]:
        facts.add_row("refused", f"{s['refused']} updates; see metrics.jsonl")
    for note in s["notes"]:
        facts.add_row("note", note)
    if out is not None:
        shown = ", report.html" if report else ""
        facts.add_row("files", f"{out}/ (run.toml, metrics.jsonl, model.safetensors{shown})")
    return Group(RoundsTable(milestones(history.records)), facts)


def _reached_text(summary: Mapping[str, Any]) -> str:
    """When a run reached its target."""
    reached, seconds = summary["rounds_to_target"], summary.get("simulated_seconds_to_target")
    after = "" if seconds is None else f", after {simulated_text(seconds)} of simulated time"
    return f"reached in round {reached}{after}" if reached else "not reached"


def profile(main: Mapping[str, float], workers: Mapping[str, float], rounds: int) -> Table:
    """Where the time of a round went, by phase: in the main process, and in all workers together."""
    table = Table(title="milliseconds per round", title_justify="left", title_style="bold")
    table.add_column("phase")
    columns = {name: seconds for name, seconds in (("main process", main), ("workers", workers)) if seconds}
    for name in columns:
        table.add_column(name, justify="right")
        table.add_column("share", justify="right")
    order = sorted({*main, *workers}, key=lambda phase: -(workers.get(phase, 0.0) + main.get(phase, 0.0)))
    for phase in [*order, None]:
        cells = []
        for seconds in columns.values():
            total = sum(seconds.values())
            spent = total if phase is None else seconds.get(phase)
            each = 1000 / max(rounds, 1)
            cells += ["", ""] if spent is None else [f"{spent * each:.2f}", f"{spent / (total or 1):.0%}"]
        table.add_row(phase or "all", *cells, style=None if phase else "bold")
    return table
