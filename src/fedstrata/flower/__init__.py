"""How does a federation run across sites? As a Flower app: a ClientApp at every site, a ServerApp between them.

Flower carries the messages and knows who is who; what travels in them is ours (`fedstrata.wire`), and rounds are opened
and closed as everywhere else.
"""

from fedstrata.flower.client import client_app
from fedstrata.flower.server import server_app

__all__ = ["client_app", "server_app"]
