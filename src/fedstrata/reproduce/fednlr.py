"""FedNLR: against other methods, over learning rates and ratios μ, and the drift of neurons.

Wang et al., "FedNLR: Federated Learning with Neuron-wise Learning Rates", KDD 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedstrata.compare import Comparison
from fedstrata.reproduce import fednlr_checks, fednlr_depth, fednlr_drift, fednlr_equal_loss, fednlr_temperatures
from fedstrata.reproduce.claims import GAINS, Check, above, always_above, best, cell
from fedstrata.reproduce.fednlr_layers import layers
from fedstrata.reproduce.fednlr_settings import (
    EQUAL_LOSS,
    FIXED,
    FORMULAS,
    OTHERS,
    REFITTED,
    SCALES,
    SHOWN,
    TABLE_1,
    TABLE_3,
    THEORY,
    FedNLRScale,
    PaperRow,
    skew_name,
)
from fedstrata.reproduce.parts import (
    Findings,
    FindingsTable,
    Grid,
    OwnWork,
    Part,
    accuracy_at_end,
    accuracy_before_epilogue,
    figures_by_label,
    figures_by_seed,
    gain_rows,
    label_methods,
    unfinished_note,
)
from fedstrata.reproduce.verdicts import Seeds, differences


def parts(scale: str) -> list[Part]:
    """The parts of the reproduction, in the order of the report."""
    chosen = SCALES[scale]
    usual: list[Part] = [_clients(chosen), _permuted(chosen), _lr(chosen), _mu(chosen), layers(chosen)]
    neurons: list[Part] = [_temperatures(chosen), _depth_drift(chosen), _equal_loss(chosen), _theory(chosen)]
    if scale != "evidence":
        return [_table(chosen), *usual, _drift(chosen), *neurons]
    others: list[Part] = [
        _table(chosen, "methods"),
        _table(chosen, "cifar-10", FOUR, dataset="cifar-10(examples=20000, test_examples=2000)"),
        *usual,
        *neurons,
    ]
    return [_table(chosen, "table", FOUR), _drift(chosen), *(replace(part, headline=False) for part in others)]


# --- the table of methods --------------------------------------------------------------------------------------------


OURS = ("FedNLR", "FedDyn + FedNLR")
FOUR = ("FedAvg", "FedDyn", *OURS)
"""The methods of the headline claims."""
WORSE, MILDER = "Dirichlet(0.05)", "Dirichlet(0.5)"
"""The kinds of skew between which the gain is said to grow."""


def _table(scale: FedNLRScale, name: str = "table", labels: Sequence[str] = (), **fields: Any) -> Grid:
    methods = {label: text for label, text in _methods(scale).items() if not labels or label in labels}
    return Grid(
        name,
        "FedNLR against other methods, under three kinds of label skew",
        scale.values(method=label_methods(methods), partition=list(scale.partitions), **fields),
        lambda comparison: _assess_table(scale, comparison),
        tuning=scale.tuning,
    )


def _methods(scale: FedNLRScale) -> dict[str, str]:
    return {**OTHERS, "FedNLR": scale.nlr, "FedDyn + FedNLR": f"{OTHERS['FedDyn']} + {scale.nlr}"}


def _clients(scale: FedNLRScale) -> Grid:
    """Table 3: many clients, of which a tenth takes part in a round."""
    many = replace(scale, partitions=scale.many_partitions, last=scale.many_last)
    methods = {label: text for label, text in _methods(scale).items() if label in FOUR}
    return Grid(
        "clients",
        "Table 3: many clients, few of them in a round",
        many.values(method=label_methods(methods), partition=list(many.partitions), **scale.many),
        lambda comparison: _assess_clients(many, comparison),
        tuning=many.tuning,
    )


def _assess_table(scale: FedNLRScale, comparison: Comparison) -> Findings:
    found = _by_skew(scale, comparison)
    checks: list[Check] = []
    for skew, column in found.items():
        checks += _pair_checks(skew, column, TABLE_1[skew])
        if column.keys() >= OTHERS.keys():
            name = f"FedNLR, alone or with FedDyn, is the best on {skew}"
            checks.append(best(name, OURS, column, paper=TABLE_1[skew].top))
    refits = _refit_checks(comparison)
    notes = (_mean_note(scale), *(REFIT_NOTE,) * bool(refits), *unfinished_note(comparison))
    return Findings((_skew_table(found),), (*checks, *_growth_checks(found), *refits), notes)


def _assess_clients(scale: FedNLRScale, comparison: Comparison) -> Findings:
    found = _by_skew(scale, comparison)
    checks: list[Check] = []
    for skew, column in found.items():
        paper = TABLE_3[skew]
        name = f"FedDyn + FedNLR is the best of the four on {skew}"
        checks += [*_pair_checks(skew, column, paper), best(name, OURS[1:], column, paper=paper.top)]
    note = f"{_mean_note(scale)}; the paper has the mean of the last 30 of 500 rounds here, and of 5 elsewhere"
    return Findings((_skew_table(found),), tuple(checks), (note, *unfinished_note(comparison)))


def _pair_checks(skew: str, column: Mapping[str, Seeds], paper: PaperRow) -> Iterator[Check]:
    """As the paper has it: FedNLR on top of FedDyn gains or, with the worst skew, loses."""
    yield above(f"FedNLR beats FedAvg on {skew}", column["FedNLR"], column["FedAvg"], paper=paper.alone)
    both, alone = column["FedDyn + FedNLR"], column["FedDyn"]
    if paper.loses:
        yield above(f"FedDyn beats FedDyn + FedNLR on {skew}", alone, both, paper=paper.together)
    else:
        yield above(f"FedDyn + FedNLR beats FedDyn on {skew}", both, alone, paper=paper.together)


def _growth_checks(found: Mapping[str, Mapping[str, Seeds]]) -> Iterator[Check]:
    """The gain over FedAvg grows with the skew, seed by seed."""
    if {WORSE, MILDER} <= found.keys():
        gains = [differences(found[skew]["FedNLR"], found[skew]["FedAvg"]) for skew in (WORSE, MILDER)]
        name = f"FedNLR gains more over FedAvg on {WORSE} than on {MILDER}"
        paper = "CIFAR-100: +3.96 against +1.15 points; on CIFAR-10 its own table has +0.69 against +1.52"
        yield above(name, gains[0], gains[1], unit=GAINS, paper=paper)


REFIT_NOTE = (
    "CCVR refits the classifier once, after the last round, so that its accuracy is that after the refit alone, not a "
    "mean over rounds; the claims on its refit compare it with the same run just before, which is FedAvg's last round"
)


def _refit_checks(comparison: Comparison) -> list[Check]:
    """CCVR against the run that it ends, where the paper's Table 2 has that kind of skew."""
    checks = []
    for row in comparison.rows:
        skew = skew_name(row.run.config.partition)
        if row.method == "CCVR" and skew in REFITTED:
            before, after = figures_by_seed(row, accuracy_before_epilogue), figures_by_seed(row, accuracy_at_end(1))
            checks.append(above(f"CCVR's refit costs accuracy on {skew}", before, after, paper=REFITTED[skew]))
    return checks


def _mean_note(scale: FedNLRScale) -> str:
    over = "the last evaluation" if scale.last == 1 else f"the last {scale.last} evaluations"
    return f"an accuracy is the mean of {over}; ± is the sample standard deviation over the seeds"


# --- is it the neurons? ----------------------------------------------------------------------------------------------


PERMUTED = "FedNLR, permuted"


def _permuted(scale: FedNLRScale) -> Grid:
    """The control of the paper's mechanism: as many fast and slow neurons, but not those that the paper means."""
    shuffled = f"{scale.nlr[:-1]}, shuffle=True)" if scale.nlr.endswith(")") else f"{scale.nlr}(shuffle=True)"
    return Grid(
        "permuted",
        "FedNLR against the same rates permuted among a layer's neurons",
        scale.values(
            method=label_methods({"FedAvg": "fedavg", "FedNLR": scale.nlr, PERMUTED: shuffled}),
            partition=list(scale.partitions),
        ),
        lambda comparison: _assess_permuted(scale, comparison),
        tuning=scale.tuning,
    )


def _assess_permuted(scale: FedNLRScale, comparison: Comparison) -> Findings:
    found = _by_skew(scale, comparison)
    checks = []
    for skew, column in found.items():
        checks.append(above(f"FedNLR beats its own rates permuted on {skew}", column["FedNLR"], column[PERMUTED]))
        checks.append(above(f"permuted rates beat FedAvg on {skew}", column[PERMUTED], column["FedAvg"]))
    notes = (_mean_note(scale), *unfinished_note(comparison))
    return Findings((_skew_table(found),), tuple(checks), notes)


def _skew_table(found: Mapping[str, Mapping[str, Seeds]]) -> FindingsTable:
    labels = next(iter(found.values()))
    rows = [(label, *(cell(column[label]) for column in found.values())) for label in labels]
    return FindingsTable("Accuracy, %", ("method", *found), tuple(rows))


def _by_skew(scale: FedNLRScale, comparison: Comparison) -> dict[str, dict[str, Seeds]]:
    """Kind of skew → method → its figures."""
    found: dict[str, dict[str, Seeds]] = {skew_name(p): {} for p in scale.partitions}
    for row in comparison.rows:
        found[skew_name(row.run.config.partition)][row.method] = figures_by_seed(row, accuracy_at_end(scale.last))
    return found


# --- learning rates and μ --------------------------------------------------------------------------------------------


def _lr(scale: FedNLRScale) -> Grid:
    methods = label_methods({"FedAvg": "fedavg", "FedNLR": scale.sweep_nlr})
    return Grid(
        "lr",
        "FedNLR against FedAvg at several learning rates",
        scale.values(method=methods, lr=list(scale.lrs)),
        lambda comparison: _assess_lr(scale, comparison),
    )


def _assess_lr(scale: FedNLRScale, comparison: Comparison) -> Findings:
    found: dict[str, dict[str, Seeds]] = {}
    for row in comparison.rows:
        found.setdefault(f"lr {row.run.config.lr:g}", {})[row.method] = figures_by_seed(
            row, accuracy_at_end(scale.last)
        )
    rows = [(lr, *(cell(seeds) for seeds in pair.values())) for lr, pair in found.items()]
    pairs = {lr: (pair["FedNLR"], pair["FedAvg"]) for lr, pair in found.items()}
    paper = "at every learning rate, CIFAR-100 with Dirichlet(0.05)"
    check = always_above("FedNLR gains at every learning rate", pairs, paper=paper)
    table = FindingsTable(f"Accuracy on {_skew(scale)}, %", ("", "FedAvg", "FedNLR"), tuple(rows))
    return Findings((table,), (check,), (_mean_note(scale), *unfinished_note(comparison)))


def _skew(scale: FedNLRScale) -> str:
    return skew_name(scale.partitions[0])


def _mu(scale: FedNLRScale) -> Grid:
    fixed = {f"μ = {mu:g}": f"fednlr(mu={mu})" for mu in FIXED}
    return Grid(
        "mu",
        "where μ comes from: fixed, or from depth and width",
        scale.values(method=label_methods({"FedAvg": "fedavg", **fixed, **FORMULAS})),
        lambda comparison: _assess_mu(scale, comparison),
    )


def _assess_mu(scale: FedNLRScale, comparison: Comparison) -> Findings:
    found = figures_by_label(comparison, accuracy_at_end(scale.last))
    base = found["FedAvg"]
    fixed = {label: seeds for label, seeds in found.items() if label in {f"μ = {mu:g}" for mu in FIXED}}
    formula = found["formula (1, 1)"]
    several = {label: (formula, seeds) for label, seeds in fixed.items()}
    halves = {label: (formula, found[label]) for label in ("depth only (1, 0)", "width only (0, 1)")}
    checks = (
        always_above("formula beats fixed μ", several),
        always_above("depth and width together beat each alone", halves),
        above("formula (1, 1) beats (0.45, 0.3)", formula, found["formula (0.45, 0.3)"]),
        above("μ = 1.75 beats FedAvg", fixed["μ = 1.75"], base),
        above("μ = 2 beats FedAvg", fixed["μ = 2"], base),
    )
    title = f"Accuracy on {_skew(scale)} by the ratio μ, %"
    table = FindingsTable(title, ("μ", "accuracy", "gain over FedAvg, points"), gain_rows(found, "FedAvg"))
    return Findings((table,), checks, (_mean_note(scale), *unfinished_note(comparison)))


# --- neurons ---------------------------------------------------------------------------------------------------------


VISITED, OTHER = 1, 2
"""The paper's pair of classes: that of the client, and that of the neurons."""


def _drift(scale: FedNLRScale) -> OwnWork:
    return OwnWork(
        "drift",
        "Appendix A: bound neurons of one class after a visit to a client of another",
        {"run": dict(scale.neurons), "even": fednlr_drift.EVEN},
        scale.watched_seeds,
        fednlr_drift.work,
        lambda found: fednlr_drift.assess(found, VISITED, OTHER),
    )


def _equal_loss(scale: FedNLRScale) -> OwnWork:
    return OwnWork(
        "equal-loss",
        "the control of `drift`: FedAvg that has learnt as much as FedNLR at the end of a visit",
        {"run": dict(scale.neurons), **EQUAL_LOSS, **scale.equal_loss},
        scale.watched_seeds,
        fednlr_equal_loss.work,
        lambda found: fednlr_equal_loss.assess(found, VISITED, OTHER),
    )


def _depth_drift(scale: FedNLRScale) -> OwnWork:
    return OwnWork(
        "depth-drift",
        "bound neurons of a deep network after visits to clients that lack their classes, layer by layer",
        {"run": {**scale.run, **scale.deep}, "methods": fednlr_drift.METHODS, "shown": SHOWN},
        scale.seeds,
        fednlr_depth.work,
        fednlr_depth.assess,
    )


def _temperatures(scale: FedNLRScale) -> OwnWork:
    return OwnWork(
        "temperatures",
        "Fig. 3: the temperature of every layer, round by round",
        {"run": {**scale.run, "partition": scale.partitions[0], "method": scale.nlr}},
        scale.seeds,
        fednlr_temperatures.work,
        lambda found: fednlr_temperatures.assess(found, scale.last),
        draws=True,
    )


def _theory(scale: FedNLRScale) -> OwnWork:
    """It needs no federation: what `run` says is where the images come from."""
    run = {name: value for name, value in scale.neurons.items() if "target" not in name}
    return OwnWork(
        "theory",
        "Example 1, Theorem 2, Lemma 4 and Eq. 16, checked with numbers",
        {"run": {**run, "rounds": 1}, **THEORY, **scale.theory},
        scale.watched_seeds,
        fednlr_checks.work,
        fednlr_checks.assess,
    )
