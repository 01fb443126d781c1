"""Short ways to set up a simulated deployment over the scripted model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from drafter_workers.config import GrowthConfig
from orchestrator.config import CoreConfig
from orchestrator.core import Core
from orchestrator.k_policy import FixedK, KPolicy
from orchestrator.request import Finished, FinishReason, Mode, Request, Stopper
from protos.sampling import GREEDY, Sampling
from target_workers.runner import Forward
from tests.faults import Plan, calm
from tests.script_drafter import CHAINS, SLOTS, Guesser, TokenProposer, script_drafter
from tests.script_lm import ScriptForward, ScriptLM, Shape, ref_decode, script_target
from tests.simulation.world import Served, World

STEP_S = 0.016
WIRE_S = 0.0003
TARGET = Shape(max_context=128, num_pages=512)
CONFIG = CoreConfig(lookup=False, max_context=128, patience_s=0.0)


class IdStopper:
    """Stops at token ids, as the edge's stopper does for a request without stop strings."""

    def __init__(self, request: Request) -> None:
        self._stops = set(request.stop_token_ids)

    def push(self, token: int) -> bool:
        return token in self._stops


def request(
    name: str, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 40, **fields
) -> Request:
    return Request(name, tuple(prompt), max_tokens, **fields)


def step_s(rows: int) -> float:
    """A step costs 1.15 times a row's at 8 rows."""
    return STEP_S * (1 + 0.0214 * (rows - 1))


@dataclass(slots=True)
class Scene:
    """A world with one scripted target, and what its model would say by itself."""

    world: World
    lm: ScriptLM

    def reference(self, asked: Request) -> list[int]:
        """What plain decoding gives: an independent loop of one token at a time."""
        room = self.world.core.config.max_context - len(asked.prompt)
        return ref_decode(
            self.lm,
            asked.prompt,
            min(asked.max_tokens, room),
            asked.sampling,
            asked.stop_token_ids,
        )

    def check(self, asked: Request) -> Served:
        """The client got the reference's tokens and a proper end; the counts add up."""
        served = self.world.served[asked.request_id]
        expected = self.reference(asked)
        assert served.tokens == expected
        assert isinstance(served.last, Finished), served.last
        stopped = expected[-1] in asked.stop_token_ids
        assert served.last.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        stats = served.last.stats
        assert len(expected) == stats.accepted + stats.rounds - stats.cut
        assert sum(stats.histogram) == stats.rounds
        assert sum(a * n for a, n in enumerate(stats.histogram)) == stats.accepted
        return served

    def check_nothing_left(self) -> None:
        """Law 4: once idle, no worker holds anything, and everything free is all there is."""
        self.world.settle()
        for name, account in self.world.audit().items():
            assert account.held == (), name
            assert account.free_pages + account.cached_pages == account.total_pages, name

    def check_replay(self, policy: KPolicy | None = None) -> None:
        """Law 10: the recorded events lead a fresh core to the same commands."""
        config = self.world.core.config
        fresh = Core(config, policy or FixedK(config.k), IdStopper)
        for event, commands in self.world.log:
            assert fresh.handle(event) == commands, f"{event} led to other commands"

    def add_drafter(
        self,
        guesser: Callable[[ScriptLM], Guesser],
        forward_s: float = 0.002,
        plan: Plan = calm,
        *,
        growth: GrowthConfig = CHAINS,
        shape: Shape = SLOTS,
    ) -> None:
        proposer = TokenProposer(guesser(self.lm), shape)
        engine = script_drafter(self.lm, proposer, growth, shape)
        self.world.add_drafter(engine, forward_s, plan)


def scene(
    config: CoreConfig = CONFIG,
    *,
    policy: KPolicy | None = None,
    seed: int = 0,
    target: Shape = TARGET,
    plan: Plan = calm,
    stopper: Callable[[Request], Stopper] = IdStopper,
    forward: Callable[..., Forward] = ScriptForward,
    **changes,
) -> Scene:
    """A world with a target; `changes` go over the configuration."""
    lm = ScriptLM(seed=seed)
    config = replace(config, **changes)
    world = World(config, stopper, policy)
    world.add_target(script_target(lm, target, forward=forward), step_s, plan)
    return Scene(world, lm)


SEEDED = Sampling(temperature=0.8, seed=7)
BOTH = (GREEDY, SEEDED)
MODES = (Mode.OFF, Mode.SYNC, Mode.ASYNC)
