"""How deeper models' settings are written: the paper's table, the three gaps beside each other, and what to know."""

from __future__ import annotations

from collections.abc import Mapping

from fedstrata.reproduce.claims import cell
from fedstrata.reproduce.deeper_figures import EQUAL_STEPS, REESTIMATED, steps_read
from fedstrata.reproduce.deeper_measures import GRADIENTS, NOTE
from fedstrata.reproduce.deeper_tables import FiguresByLabel
from fedstrata.reproduce.parts import FindingsTable
from fedstrata.reproduce.verdicts import differences

Found = Mapping[str, FiguresByLabel]
"""Dataset → the rows of its table."""


def main_table(found: Found) -> FindingsTable:
    """Accuracies, Gap, I_div and Div., as the paper has them."""
    rows = []
    for data, cells in found.items():
        first = next(iter(cells.values()))
        for label, one in cells.items():
            gained = "" if one is first else cell(differences(first.gap, one.gap))
            figures = [measure.unit.cell(one.div(measure)) for measure in GRADIENTS]
            rows.append((data, label, cell(one.cl), cell(one.fl), cell(one.gap), gained, *figures))
    divs = tuple(f"Div., {measure.column}" for measure in GRADIENTS)
    columns = ("dataset", "", "Acc. CL, %", "Acc. FL, %", "Gap, points", "I_div, points", *divs)
    return FindingsTable("Centralised and federated training", columns, tuple(rows), left=2)


def gaps_table(found: Found) -> FindingsTable:
    """The gap at equal sequential steps, and the one with running statistics that are estimated again."""
    rows = [
        (
            data,
            label,
            cell(one.gap),
            cell(one.cl_early),
            cell(one.gap_by(EQUAL_STEPS)),
            cell(one.cl_again),
            cell(one.fl_again),
            cell(one.gap_by(REESTIMATED)),
            cell(one.regained),
        )
        for data, cells in found.items()
        for label, one in cells.items()
    ]
    columns = (
        "dataset",
        "",
        "Gap, points",
        "CL at FL's sequential steps, %",
        "Gap there, points",
        "CL re-estimated, %",
        "FL re-estimated, %",
        "Gap re-estimated, points",
        "FL gains by it, points",
    )
    return FindingsTable("The gap in three ways", columns, tuple(rows), left=2)


NOTES = (
    "an accuracy is the best of a run, as in the paper; ± is the sample standard deviation over the seeds",
    "CL: one party with everybody's examples takes as many steps as all clients together; Gap: CL − FL; I_div: the "
    "first row's gap − this row's",
    "re-estimated: the last model's accuracy after its running statistics were estimated again, as means over all "
    "clients' training data without augmentation; where no layer has any, it is the last model's as it is. What FL "
    "gains by it is against its last model's accuracy",
)


def notes_on(found: Found) -> tuple[str, ...]:
    """What a reader of the tables must know."""
    known = {steps for cells in found.values() for one in cells.values() if (steps := steps_read(one)) is not None}
    pairs = ", ".join(f"after {read:g} steps for {asked:g}" for asked, read in sorted(known))
    told = (
        "at FL's sequential steps: clients train side by side, so that CL makes more steps one after the other. It is "
        f"read at its first evaluation after as many as a client of FL makes in all ({pairs or 'no run is finished'}), "
        "best so far, and FL's best accuracy is taken from it"
    )
    return (*NOTES, told, DIV)


DIV = f"Div.: at the end of the federated run, in the mean over the layers. {NOTE}"
