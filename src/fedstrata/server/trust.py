"""The server's own update: what the clients' training changes on examples that the server trusts."""

from __future__ import annotations

from fedstrata.client.context import ClientContext
from fedstrata.client.train import train_unencoded
from fedstrata.core.types import Update, Work
from fedstrata.server.server import Server
from fedstrata.server.state import ServerState


def train_reference(server: Server, context: ClientContext, state: ServerState, work: Work) -> Update | None:
    """What a rule compares clients with; None where none asks for it.

    Seeds global generators, as a client's visit does; the caller restores them.
    """
    reducer = server.method.reducer
    if reducer is None or not reducer.trusts:
        return None
    assert server.trusted is not None
    return train_unencoded(context, server.open_reference(state, work), server.trusted, {})[0]
