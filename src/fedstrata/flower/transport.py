"""Messages to and from SuperNodes, over Flower's grid."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstrata.errors import one_line

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

SHORTEST, LONGEST = 0.05, 1.0
"""Seconds between two looks for replies, at first and after a while without any."""
LOOKS = 16
"""Times that a few replies are asked for in one look; the others have their turn at the next one."""


@dataclass(frozen=True, eq=False)
class Reply:
    """What came back: records, or why there are none."""

    content: RecordDict | None
    why: str = ""


LATE = Reply(None, "it did not answer in time")
"""Stands for a reply that did not come."""


@dataclass(eq=False)
class Transport:
    """Sends messages and waits for their replies.

    Args:
        grid: Flower's.
        patience: seconds that a reply is worth waiting for.
    """

    grid: Grid
    patience: float

    def online(self) -> set[int]:
        """The nodes that are there now."""
        return set(self.grid.get_node_ids())

    def send(self, node: int, kind: str, content: RecordDict, group: str) -> str | None:
        """Send a message; its number, or None if it cannot be delivered."""
        from flwr.app import Message

        message = Message(content, node, kind, ttl=self.patience, group_id=group)
        return next(iter(self.grid.push_messages([message])), None) or None

    def replies(self, message_ids: Sequence[str], few: int) -> Iterator[tuple[str, Reply]]:
        """(number of the message, reply) for every message, as they come; a reply that says so for those that do not.

        Args:
            message_ids: numbers of messages; more may be added while these are being waited for.
            few: how many replies may be fetched at once.
        """
        deadline, pause = time.monotonic() + self.patience, SHORTEST
        waiting: deque[str] = deque()
        known = 0
        while known < len(message_ids) or waiting:
            waiting.extend(message_ids[known:])
            known = len(message_ids)
            late, anything = time.monotonic() >= deadline, False
            looks = math.ceil(len(waiting) / few)
            for _ in range(looks if late else min(looks, LOOKS)):
                some = [waiting.popleft() for _ in range(min(few, len(waiting)))]
                found = dict(self.fetch_replies(some))
                missing = [message_id for message_id in some if message_id not in found]
                found |= dict.fromkeys(missing, LATE) if late else {}
                waiting.extend(() if late else missing)
                for message_id, reply in found.items():
                    anything = True
                    yield message_id, reply
            pause = SHORTEST if anything else min(pause * 1.5, LONGEST)
            if not anything:
                time.sleep(min(pause, max(deadline - time.monotonic(), 0)))

    def fetch_replies(self, message_ids: list[str]) -> list[tuple[str, Reply]]:
        """What has come by now. Where one reply cannot be read, the others still can."""
        if not message_ids:
            return []
        try:
            return [(m.metadata.reply_to_message_id, _reply(m)) for m in self.grid.pull_messages(message_ids)]
        except (ValueError, TypeError, KeyError) as error:
            if len(message_ids) == 1:
                return [(message_ids[0], Reply(None, f"its reply cannot be read: {one_line(str(error), 200)}"))]
        return [pair for message_id in message_ids for pair in self.fetch_replies([message_id])]


def _reply(message: Message) -> Reply:
    from flwr.common.constant import ErrorCode

    if message.has_content():
        return Reply(message.content)
    error: Any = message.error
    if error.code in (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE):
        return LATE
    if error.code == ErrorCode.NODE_UNAVAILABLE:
        return Reply(None, "its SuperNode is not connected")
    reason = str(error.reason or "").strip()
    last = one_line(reason.splitlines()[-1] if reason else f"error {error.code}", 300)
    return Reply(None, f"its SuperNode says: {last}")
