"""FedLDF, Wang et al. 2024."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedstrata.techniques.fedldf import least_of_top
from tests.techniques.worlds import FIRST, SKEWED, federation, flat, parties, run, trained, two_layers

PARTS = (slice(0, FIRST), slice(FIRST, None))


def of_layers(layers: list[int]) -> slice:
    """The entries of some of the two layers."""
    return slice(None) if len(layers) == 2 else PARTS[layers[0]] if layers else slice(0, 0)


def test_layers_are_sent_by_those_that_diverge_most() -> None:
    """Rounds 1 and 5: all, from everybody. Else client k sends layer l if its last ‖θ_k,l − θ_l‖ is the largest of all.

    A layer's mean is over those that sent it, by examples; what nobody sent keeps its last numbers.
    """
    clients, sizes = parties(), [3, 5, 2]
    fed = run("fedldf(share=0.3333, refresh=4)", clients, two_layers(), rounds=6)
    w, told = flat(two_layers()), np.zeros((3, 2))
    asked_for = []
    for number in range(6):
        due = number % 4 == 0
        asked = [[0, 1] if due else [i for i in range(2) if told[k, i] == told[:, i].max()] for k in range(3)]
        asked_for.append(asked)
        deltas = [trained(w, c, of_layers(layers)) for c, layers in zip(clients, asked, strict=True)]
        for i, part in enumerate(PARTS):
            senders = [k for k in range(3) if i in asked[k]]
            for k in senders:  # what a client tells travels and is kept in single precision
                told[k, i] = np.float32(np.linalg.norm(deltas[k][part]))
            w[part] += np.average([deltas[k][part] for k in senders], axis=0, weights=[sizes[k] for k in senders])
    np.testing.assert_allclose(flat(fed), w, atol=1e-9)
    assert len({str(asked) for asked in asked_for}) > 2
    sent = [record.bytes_up for record in fed.records]
    assert sent[1] < sent[0]


def test_a_newcomer_sends_everything() -> None:
    """Two of three clients took part in the first round; each layer is then sent by the one that diverged more."""
    fed = federation("fedldf(share=0.5, refresh=9)", parties(), two_layers(), rounds=2, participation=2)
    next(fed.rounds())
    (new,) = {0, 1, 2} - set(fed.records[0].clients)
    asked = fed._server.open(fed.state, range(3), fed._work(1))
    counts = [len(a.uploads) for a in asked]
    assert counts[new] == 4
    assert sum(counts) == 8


def test_what_comes_late_is_due_as_it_was_asked() -> None:
    """With updates as they arrive, one that is asked for some layers counts as that, however old it is when it comes.

    A client was never marked as having told of all layers in a later round than the last in which it trained them all.
    """
    fleet = "; ".join(f"d{client}(down={rate})" for client, rate in enumerate([1e9, 1e9, 1e9, 1e9, 1e9, 2e2]))
    clients = parties(*SKEWED, *SKEWED)
    fed = federation("fedbuff(buffer=2) + fedldf(share=0.3, refresh=3)", clients, two_layers(), rounds=12, fleet=fleet)
    whole = {}
    for record in fed.rounds():
        for part in record.trainings:
            whole |= dict.fromkeys(part.clients if len(part.strata) == 2 else [], record.round - 1)
        state = fed.state.techniques["fedldf"]
        told = dict(zip(state["clients"].tolist(), state["client/whole"].tolist(), strict=True))
        assert all(told[client] <= number for client, number in whole.items())
    assert any(len(part.strata) == 1 for record in fed.records for part in record.trainings)


@pytest.mark.parametrize(
    ("share", "least"), [(0.2, 5.0), (0.21, 4.0), (1.0, 1.0), (0.01, 5.0), (1e-12, 5.0), (0.6, 3.0)]
)
def test_the_share_of_the_largest(share: float, least: float) -> None:
    assert least_of_top(torch.tensor([3.0, 1.0, 5.0, 2.0, 4.0]), share) == least
