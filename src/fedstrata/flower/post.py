"""Letters to and from SuperNodes, over Flower's grid."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedstrata.errors import one_line

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

SHORTEST, LONGEST = 0.05, 1.0
"""Seconds between two looks into the letter box, at first and after a while without letters."""


@dataclass(frozen=True, eq=False)
class Reply:
    """What came back: records, or why there are none."""

    content: RecordDict | None
    why: str = ""


LATE = Reply(None, "it did not answer in time")
"""Stands for a reply that did not come."""


@dataclass(eq=False)
class Post:
    """Sends letters and waits for their replies.

    Args:
        grid: Flower's.
        patience: seconds that a letter is worth waiting for.
    """

    grid: Grid
    patience: float

    def online(self) -> set[int]:
        """The nodes that are there now."""
        return set(self.grid.get_node_ids())

    def send(self, node: int, kind: str, content: RecordDict, group: str) -> str | None:
        """Send a letter; its number, or None if it cannot be delivered.

        A SuperLink throws a reply away when its letter's time is over, also one that came in time and waits for its
        turn (`ahead`). So a letter has as long again as it is waited for.
        """
        from flwr.app import Message

        letter = Message(content, node, kind, ttl=2 * self.patience, group_id=group)
        return next(iter(self.grid.push_messages([letter])), None) or None

    def replies(self, letters: Mapping[str, int], ahead: int) -> Iterator[tuple[str, Reply]]:
        """(number of the letter, reply) for every letter, as they come; a reply that says so for those that do not.

        Args:
            letters: number of a letter → its place in the order in which replies are wanted. More may be put into it
                while it is being waited for.
            ahead: how far a reply may come before the first that is missing; the others wait in the post.
        """
        deadline, pause = time.monotonic() + self.patience, SHORTEST
        seen: set[str] = set()
        while missing := [letter for letter in letters if letter not in seen]:
            end = min(letters[letter] for letter in missing) + ahead
            waiting = [letter for letter in missing if letters[letter] < end]
            late = time.monotonic() >= deadline
            found = self.arrived(waiting)
            if late:
                found += [(letter, LATE) for letter in waiting if letter not in dict(found)]
            for letter, reply in found:
                seen.add(letter)
                yield letter, reply
            pause = SHORTEST if found else min(pause * 1.5, LONGEST)
            if not found:
                time.sleep(min(pause, max(deadline - time.monotonic(), 0)))

    def arrived(self, letters: list[str]) -> list[tuple[str, Reply]]:
        """What has come by now. Where one reply cannot be read, the others still can."""
        if not letters:
            return []
        try:
            return [(m.metadata.reply_to_message_id, _reply(m)) for m in self.grid.pull_messages(letters)]
        except (ValueError, TypeError, KeyError) as error:
            if len(letters) == 1:
                return [(letters[0], Reply(None, f"its reply cannot be read: {one_line(str(error), 200)}"))]
        return [pair for letter in letters for pair in self.arrived([letter])]


def _reply(message: Message) -> Reply:
    from flwr.common.constant import ErrorCode

    if message.has_content():
        return Reply(message.content)
    error: Any = message.error
    if error.code in (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE):
        return LATE
    if error.code == ErrorCode.NODE_UNAVAILABLE:
        return Reply(None, "its SuperNode is not there")
    reason = str(error.reason or "").strip()
    last = one_line(reason.splitlines()[-1] if reason else f"error {error.code}", 300)
    return Reply(None, f"its SuperNode says: {last}")
