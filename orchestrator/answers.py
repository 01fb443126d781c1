"""Whether what a target answers can be an answer to what it was asked."""

from collections.abc import Collection

from orchestrator.ledger import Ledger
from orchestrator.sequence import Flight
from protos.messages import StepOpen, Stepped, Verdict


def fault(opening: Collection[StepOpen], stepped: Stepped, ledger: Ledger) -> str:
    """Why a step cannot have ended like this, as far as pages go; ends it in the ledger."""
    size = ledger.page_size
    found = stepped.cached if opening else ()
    likely = all(
        0 <= n < len(opened.tokens) and (n % size == 0 or opened.parent >= 0)
        for n, opened in zip(found, opening, strict=False)
    )
    if len(found) != len(opening) or not likely:
        return f"its opens cannot have found {stepped.cached} tokens"
    wrong = ledger.land(stepped.free_pages, sum(map(ledger.pages, found)))
    # After an error nobody knows how far the target got.
    return "" if any(verdict.error for verdict in stepped.verdicts) else wrong


def fits(flight: Flight, verdict: Verdict) -> bool:
    """True if the verdict can be an answer to what was asked: a walk down the selected nodes."""
    if verdict.start != flight.frontier or verdict.next_token < 0:
        return False
    parent = None
    for i in verdict.walk:
        if not 0 <= i < len(flight.nodes) or flight.nodes[i].parent is not parent:
            return False
        parent = flight.nodes[i]
    return True
