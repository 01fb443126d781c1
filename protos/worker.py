"""What a worker is behind its link: an engine that is only ever called from one thread."""

from typing import Protocol

from protos.messages import Hello, Message


class Engine(Protocol):
    """Takes messages in order and answers them; between messages it may have work of its own."""

    def hello(self) -> Hello: ...

    def handle(self, message: Message) -> list[Message]:
        """Take one message; the answers, in order. Raises ProtocolError for a wrong message."""

    def work(self) -> list[Message] | None:
        """One bounded piece of own work; None if there is none before the next message."""

    def reset(self) -> None:
        """The link ended: end every sequence and free what it held."""


# How the cause of a link's end begins if not this worker but its group failed.
GROUP_BROKEN = "the group broke: "


class GroupBroken(Exception):
    """The ranks of a target cannot go on together; the message names the rank and what it did."""


class ProtocolError(Exception):
    """A well-formed message that makes no sense here; the link is closed with this cause."""
