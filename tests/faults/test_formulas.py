"""What each fault sends, against the same worked out in NumPy."""

from __future__ import annotations

import math
from contextlib import closing
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.core.types import Absence, Update
from fedstrata.faults.alie import largest_z
from tests.engines.worlds import federation

Deltas = dict[int, dict[str, np.ndarray[Any, Any]]]


def sent(faults: str | None, rounds: int = 1, **settings: Any) -> list[dict[int, Any]]:
    """What every client sent in each round: an array of all its numbers, the round that it answers, or why nothing."""
    fed = federation(**{"participation": 1.0, "rounds": rounds, "lr": 0.3, "faults": faults, **settings})
    original, found = fed._engine.run, list[dict[int, Any]]()

    def overheard(assignments: Any, recall: Any) -> Any:
        found.append({})
        for answer, memory in original(assignments, recall):
            if isinstance(answer, Absence):
                found[-1][answer.client] = answer.why
            else:
                found[-1][answer.client] = (answer.round, numbers(answer))
            yield answer, memory

    fed._engine.run = overheard  # type: ignore[method-assign]
    fed.fit()
    return found


def numbers(update: Update) -> Any:
    return np.concatenate([t.double().numpy().ravel() for t in update.delta.values()])


def arrays(faults: str | None, **settings: Any) -> dict[int, Any]:
    return {client: what[1] for client, what in sent(faults, **settings)[0].items()}


def test_multiples() -> None:
    honest = arrays(None)
    for faults, factor in (("signflip(scale=4)", -4), ("scale(1000)", 1000), ("scale(0.0)", 0), ("signflip", -1)):
        hit = arrays(faults.replace(")", ", clients=(2,))") if "(" in faults else f"{faults}(clients=(2,))")
        np.testing.assert_allclose(hit[2], factor * honest[2], rtol=1e-6)
        np.testing.assert_array_equal(hit[3], honest[3])


def test_nan_is_sent_and_refused() -> None:
    fed = federation(participation=1.0, rounds=1, faults="nan(clients=(2,))")
    fed.fit()
    assert fed.records[0].refused == [{"client": 2, "why": "it holds NaN or infinite numbers"}]
    assert np.isnan(arrays("nan(clients=(2,))")[2]).all()


def test_gaussian_noise() -> None:
    """Of the deviation that is asked for, another one in every round and for every client."""
    first, second = sent("gaussian(sigma=3.0, clients=(1, 2))", rounds=2)
    drawn = [found[client][1] for found in (first, second) for client in (1, 2)]
    assert len({tuple(one) for one in drawn}) == 4
    everything = np.concatenate(drawn)
    assert abs(everything.mean()) < 4 * 3 / math.sqrt(len(everything))
    assert abs(everything.std() - 3) < 4 * 3 / math.sqrt(2 * len(everything))


def test_stuck() -> None:
    """From its second round on, the same again: what it sent in the round that the fault begins in."""
    honest, hit = (sent(faults, rounds=4) for faults in (None, "stuck(clients=(1,), begin=2)"))
    np.testing.assert_array_equal(hit[0][1][1], honest[0][1][1])
    np.testing.assert_array_equal(hit[1][1][1], honest[1][1][1])
    assert not np.array_equal(hit[1][1][1], hit[0][1][1])
    for number in (2, 3):
        np.testing.assert_array_equal(hit[number][1][1], hit[1][1][1])
        assert hit[number][1][0] == number  # it answers the round that it was asked in
        assert not np.array_equal(hit[number][2][1], hit[1][2][1])
    zeros = sent("stuck(sends='zeros', clients=(1,))", rounds=2)
    assert all(not found[1][1].any() and found[2][1].any() for found in zeros)


def test_alie() -> None:
    """μ − z·σ of each number over the others, σ the population's; all attackers send the same."""
    honest, hit = arrays(None), arrays("alie(z=1.5, clients=(1, 4))")
    others = np.stack([honest[c] for c in (0, 2, 3, 5)])
    expected = others.mean(0) - 1.5 * others.std(0)
    np.testing.assert_allclose(hit[1], expected, rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(hit[1], hit[4])
    mates = np.stack([honest[c] for c in (1, 4)])
    own = arrays("alie(z=1.5, sees='mates', clients=(1, 4))")
    np.testing.assert_allclose(own[1], mates.mean(0) - 1.5 * mates.std(0), rtol=1e-5, atol=1e-8)


def test_alie_goes_as_far_as_the_paper_says() -> None:
    """50 workers, 24 of them corrupted, is the paper's example: s = 26 − 24 = 2, φ(z) < 24/26, z = 1.43."""
    assert largest_z(50, 24) == pytest.approx(1.4260768, abs=1e-6)
    assert largest_z(20, 6) == pytest.approx(NormalDist().inv_cdf(9 / 14))
    assert largest_z(10, 1) == 0.0  # φ(z) < 4/9 would be on the other side of the mean
    assert largest_z(5, 4) == 0.0  # one honest client has no deviation
    assert largest_z(10, 7) == pytest.approx(NormalDist().inv_cdf(2 / 3))
    honest, hit = arrays(None), arrays("alie(clients=(1, 4))")
    others = np.stack([honest[c] for c in (0, 2, 3, 5)])
    z = max(0.0, NormalDist().inv_cdf((4 - (6 // 2 + 1 - 2)) / 4))
    np.testing.assert_allclose(hit[1], others.mean(0) - z * others.std(0), rtol=1e-5, atol=1e-8)


def test_ipm() -> None:
    honest, hit = arrays(None), arrays("ipm(epsilon=0.7, clients=(0, 5))")
    expected = -0.7 * np.mean([honest[c] for c in (1, 2, 3, 4)], 0)
    np.testing.assert_allclose(hit[0], expected, rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(hit[0], hit[5])


def test_attackers_see_what_others_send() -> None:
    """Faults act from left to right: what was flipped before is seen flipped, and what is lost or NaN is not seen."""
    honest = arrays(None)
    hit = arrays("signflip(clients=(1,)) + nan(clients=(2,)) + ipm(epsilon=1.0, clients=(0,))")
    np.testing.assert_allclose(hit[0], -np.mean([-honest[1], honest[3], honest[4], honest[5]], 0), rtol=1e-5, atol=1e-8)
    hit = arrays("ipm(epsilon=1.0, clients=(0,)) + signflip(clients=(1,))")
    np.testing.assert_allclose(hit[0], -np.mean([honest[c] for c in range(1, 6)], 0), rtol=1e-5, atol=1e-8)
    lost = sent("drop(1.0, clients=(1, 2, 3, 4)) + ipm(epsilon=1.0, clients=(0,))")[0]
    np.testing.assert_allclose(lost[0][1], -honest[5], rtol=1e-5, atol=1e-8)


def test_attackers_alone_in_a_round_send_what_they_have() -> None:
    alone = sent("drop(1.0, clients=(1, 2, 3, 4, 5)) + alie(clients=(0,))")[0]
    np.testing.assert_array_equal(alone[0][1], arrays(None)[0])


def test_lost_updates() -> None:
    """As often as is asked for, of those that are hit."""
    rounds = 40
    found = sent("drop(0.25, clients=(0, 1, 2))", rounds=rounds, steps=1)
    lost = sum(answer == "it did not come" for row in found for answer in row.values())
    assert all(row[c][1].any() for row in found for c in (3, 4, 5))
    mean, deviation = 3 * rounds * 0.25, math.sqrt(3 * rounds * 0.25 * 0.75)
    assert abs(lost - mean) < 4 * deviation
    assert len({row[0] == "it did not come" for row in found}) == 2  # not the same in every round


def test_late_updates() -> None:
    """They answer an earlier round, and the server refuses them by its own rules."""
    fed = federation(participation=1.0, rounds=4, faults="late(rounds=2, clients=(3,))")
    fed.fit()
    whys = [record.refused[0]["why"] for record in fed.records]
    assert whys == ["it did not come"] * 2 + [f"it answers round {n} in round {n + 2}" for n in range(2)]
    begun = federation(participation=1.0, rounds=4, faults="late(clients=(3,), begin=3)")
    begun.fit()
    assert [[r["why"] for r in record.refused] for record in begun.records] == [
        [],
        [],
        ["it did not come"],
        ["it answers round 2 in round 3"],
    ]


def test_what_techniques_send_along() -> None:
    """SCAFFOLD's control variates stay honest, unless they are to be multiplied as well."""
    slots = {}
    for faults in (None, "scale(10.0, clients=(1,))", "scale(10.0, slots=True, clients=(1,))"):
        fed = federation(participation=1.0, rounds=1, method="scaffold", faults=faults)
        fed.fit()
        slots[faults] = fed.state.techniques["scaffold"]
    honest, plain, both = slots.values()
    assert all(torch.equal(plain[n], honest[n]) for n in honest)
    assert not any(torch.allclose(both[n], honest[n]) for n in honest)


def test_model_replacement() -> None:
    """With the number of clients as boost, the mean is the backdoored client's change and a rest of the others'."""
    spoilt, boosted = (arrays(f"backdoor(size=2, boost={boost}, clients=(1,))") for boost in (1.0, 6.0))
    np.testing.assert_allclose(boosted[1], 6 * spoilt[1], rtol=1e-6)
    assert not np.allclose(spoilt[1], arrays(None)[1])


def test_every_engine_door_is_passed_on() -> None:
    with closing(federation(faults="signflip", engine="processes", workers=2, profile=True)) as fed:
        assert fed.workers == 2
        fed.fit()
        assert fed.spent[1]["batches"] > 0


def test_wrong_faults_get_one_sentence() -> None:
    wrong = {
        "signflp": "did you mean 'signflip'",
        "signflip(share=1.5)": "share must be from 0 to 1",
        "signflip(share=-0.1)": "share must be from 0 to 1",
        "signflip(scale=0)": "above 0",
        "signflip(clients=(1, 1))": "different numbers",
        "signflip(clients=(-1,))": "different numbers",
        "signflip(clients=(6,))": "clients are 0 to 5",
        "signflip(clients=(1,), share=0.5)": "leave one of the two out",
        "signflip(begin=0)": "begin must be 1 or more",
        "signflip(share=0.7) + nan(clients=(0, 1, 2))": "only 3 are left that no fault names",
        "signflip(begin=99)": "begins in round 99, and the run has",
        "backdoor(size=9)": "would cover inputs of",
        "alie(share=1.0)": "hits all clients",
        "ipm(clients=(0, 1, 2, 3, 4, 5))": "hits all clients",
        "alie(sees='nobody')": "others",
        "ipm(epsilon=0)": "above 0",
        "drop(1.1)": "rate must be from 0 to 1",
        "late(0)": "above 0",
        "stuck('last')": "first",
        "gaussian(-1.0)": "0 or more",
        "backdoor(target=4)": "classes are 0 to 3",
        "backdoor(poison=2)": "poison",
        "missing(2.0)": "rate must be from 0 to 1",
        "labelflip('sideways')": "mirror",
        "signflip nan": "cannot be read",
        "": "cannot be read",
    }
    for faults, why in wrong.items():
        with pytest.raises(fs.UsageError, match=why):
            federation(faults=faults)
