"""Who trained what: against shares and counts worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from fedstrata.diagnosis.coverage import rarely_trained
from fedstrata.report import training_figures
from fedstrata.report.run_groups import group_runs
from fedstrata.report.sections import figure_sections
from fedstrata.runs.reader import SavedRun
from fedstrata.runs.records import Record
from fedstrata.runs.trainings import trained_by, trained_rounds, trained_shares

from .synthetic import config, record, saved

FACTS = {"model": {"strata": [{"name": name} for name in ("low", "mid", "head")]}, "client_names": ["Basel", "Bern"]}


def split(at: int, *parts: tuple[list[str], list[int]]) -> Record:
    """A round in which some clients trained some strata, others others."""
    clients = sorted(client for _, members in parts for client in members)
    active = [name for name in ("low", "mid", "head") if any(name in strata for strata, _ in parts)]
    trained = [{"strata": strata, "clients": members} for strata, members in parts] if len(parts) > 1 else []
    return Record.read(record(at, clients=clients, active=active, trained=trained))


RUN = SavedRun(
    "run",
    config(),
    [
        split(1, (["low", "mid", "head"], [0, 1])),
        split(2, (["head"], [0]), (["mid", "head"], [1])),
        split(3, (["head"], [1])),
        Record.read(record(4, clients=[0, 1], active=[])),  # nobody trains: a technique finishes
    ],
    (),
    FACTS,
)


def test_shares_and_rounds() -> None:
    """In round 2 both train the head, and one of two the middle; client 1 trains the head thrice, client 0 twice."""
    assert [trained_shares(one) for one in RUN.records] == [
        {"low": 1, "mid": 1, "head": 1},
        {"mid": 0.5, "head": 1},
        {"head": 1},
        {},
    ]
    found = trained_rounds(RUN.records)
    assert dict(found[0]) == {"low": 1, "mid": 1, "head": 2}
    assert dict(found[1]) == {"low": 1, "mid": 2, "head": 3}


def test_clients_that_train_a_stratum() -> None:
    """Both clients trained the middle in the end, though not in the same rounds; then 1 of 4, not counting client 9."""
    assert trained_by(RUN.records) == {"low": (2, 2), "mid": (2, 2), "head": (2, 2)}
    first, second = (
        split(1, (["mid", "head"], [2]), (["head"], [0, 1])),
        split(2, (["mid", "head"], [2]), (["head"], [3])),
    )
    assert trained_by([first, second, split(3, (["head"], [9]))]) == {"mid": (1, 4), "head": (5, 5)}


def test_what_is_refused_or_comes_too_late_is_not_counted() -> None:
    """Of three clients, one of which alone trains the middle, it and another come too late in both rounds."""
    late = [{"client": client, "why": "it came too late"} for client in (0, 2)]
    rounds = [replace(split(at, (["mid", "head"], [2]), (["head"], [0, 1])), refused=late) for at in (1, 2)]
    assert trained_by(rounds) == {"mid": (0, 3), "head": (1, 3)}
    assert trained_shares(rounds[0]) == {"mid": 0, "head": 1 / 3}
    assert trained_rounds(rounds) == {0: {}, 1: {"head": 2}, 2: {}}
    whole = replace(split(1, (["mid", "head"], [0, 1])), refused=late[:1])
    assert len(training_figures.who_trained_what(group_runs([SavedRun("run", config(), [whole], (), FACTS)]))) == 2


def test_who_was_dropped_has_not_trained() -> None:
    """Client 1 was late for the middle, and its update was refused; client 0 was late and awaited."""
    late = {"late": [0, 1], "refused": [{"client": 1, "why": "it came too late"}]}
    trained = [{"strata": ["head"], "clients": [0]}, {"strata": ["mid", "head"], "clients": [1]}]
    one = Record.read(record(1, clients=[0, 1], active=["mid", "head"], trained=trained, **late))
    assert trained_shares(one) == {"mid": 0, "head": 0.5}
    assert {client: dict(counts) for client, counts in trained_rounds([one]).items()} == {0: {"head": 1}, 1: {}}
    assert trained_by([one]) == {"mid": (0, 2), "head": (1, 2)}
    evidence = rarely_trained(SavedRun("run", config(), [one], (), FACTS))
    assert evidence is not None
    assert evidence.sentence == "Stratum mid: trained by 0 of 2 clients, so it keeps its first values."


def test_what_no_device_can_train_is_found_and_shown() -> None:
    """All that take part train the head, and the fleet has no room for the rest: of that there is no record."""
    records = [split(1, (["head"], [0, 1])), split(2, (["head"], [1, 2]))]
    run = SavedRun("run", config(), records, (), {**FACTS, "unaffordable": ["low", "mid"]})
    assert trained_by(records, ["low", "mid"]) == {"low": (0, 3), "mid": (0, 3), "head": (3, 3)}
    assert trained_by([], ["low", "mid"]) == {}
    evidence = rarely_trained(run)
    assert evidence is not None
    assert evidence.sentence == "Strata low, mid: trained by 0 of 3 clients, so they keep their first values."
    (heat,) = training_figures.who_trained_what(group_runs([run]))[0].traces(0, 0)
    assert (heat["y"], heat["z"]) == (["low", "mid", "head"], [[0, 0], [0, 0], [1, 1]])


def test_figures() -> None:
    rounds, clients = training_figures.who_trained_what(group_runs([RUN]))
    (heat,) = rounds.traces(0, 0)
    assert (heat["x"], heat["y"]) == ([1, 2, 3], ["low", "mid", "head"])
    assert heat["z"] == [[1, 0, 0], [1, 0.5, 0], [1, 1, 1]]
    assert rounds.by[1].values == ("all", "Basel", "Bern")
    basel, bern = (rounds.traces(0, place)[0]["z"] for place in (1, 2))
    assert basel == [[1, 0, None], [1, 0, None], [1, 1, None]]  # it took no part in round 3
    assert bern == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    (heat,) = clients.traces(0)
    assert (heat["x"], heat["y"]) == (["low", "mid", "head"], ["Basel", "Bern"])
    assert heat["z"] == [[1, 1, 2], [1, 2, 3]]
    assert "training" in [section.name for section in figure_sections(group_runs([RUN]))]


def test_nothing_is_shown_where_all_train_everything() -> None:
    assert training_figures.who_trained_what(group_runs([saved([0.1, 0.2])])) == []
