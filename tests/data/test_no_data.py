"""What is easily handed over in the place of data: each refused with what to give instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs

PAIR = torch.randn(6, 2), torch.tensor([0, 1] * 3)


@pytest.mark.parametrize(
    ("clients", "why"),
    [
        ({"Basel": PAIR}, "^clients is a list .* client_names=list"),
        ("patients.csv", "^clients is a list with one entry per client, not a path: .*load_dataset"),
        (Path("patients.csv"), "^clients is a list with one entry per client, not a path"),
        (3, "^clients is a list with one entry per client, not int$"),
        (["basel.csv", "bern.csv"], "^client 0 is a path or text, not data: read the file first$"),
        ([PAIR, ("x.npy", "y.npy")], "^client 1 is a path or text"),
    ],
)
def test_what_is_no_data(clients: Any, why: str) -> None:
    with pytest.raises(fs.UsageError, match=why):
        fs.Federation(torch.nn.Linear(2, 2), clients, PAIR)


class ByNumber:
    """Clients that are read when they are asked for."""

    def __getitem__(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        if client > 2:
            raise IndexError
        return PAIR


def test_clients_that_can_only_be_asked_for_by_number() -> None:
    assert len(fs.Federation(torch.nn.Linear(2, 2), ByNumber(), PAIR).clients) == 3  # type: ignore[arg-type]


def test_a_table_of_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"age": [0.1, 0.2], "pressure": [0.5, 0.6], "sick": [0, 1]})
    for given, name in ((table, "DataFrame"), ((table[["age", "pressure"]], table["sick"]), "DataFrame")):
        with pytest.raises(fs.UsageError, match=f"^client 0 is given as {name}: give a pair of arrays.*to_numpy"):
            fs.Federation(torch.nn.Linear(2, 2), [given], PAIR)
    arrays = table[["age", "pressure"]].to_numpy("float32"), table["sick"].to_numpy()
    assert fs.Federation(torch.nn.Linear(2, 2), [arrays], PAIR, rounds=1).fit(progress=False).records
