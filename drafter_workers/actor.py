"""The Ray actor around a drafter: starts it, says how it is, stops it. No step passes here."""

import asyncio

import ray

from protos.host import Health, Place, Recipe, WorkerHost


class DrafterActor:
    """Wrapped by `ray.remote` where it is placed. Its event loop carries the session alone."""

    def __init__(self, recipe: Recipe, place: Place) -> None:
        self._host = WorkerHost(recipe, place)

    async def start(self, secret: str) -> str:
        """Load and listen on this node; the address, at once when called again."""
        node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return await self._host.start(secret, node)

    async def describe(self) -> Health:
        """Its process and state; answers while it loads and computes."""
        return self._host.health()

    async def until_end(self) -> None:
        """For as long as its process lives: who awaits it learns of the end from Ray."""
        await asyncio.Event().wait()

    async def stop(self) -> bool:
        """End the session and the engine; False if a piece of work does not end in time."""
        return await self._host.stop()
