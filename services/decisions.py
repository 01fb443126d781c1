"""What a start decided that the configuration left open, in lines for people."""

from services.config import Config
from services.memory_plan import MemoryPlan
from services.plan import Plan


def decisions(config: Config, plan: Plan, memory: MemoryPlan) -> list[str]:
    """A line for each, the memory of every worker last."""
    lines = []
    max_context = memory.demand.max_context
    if max_context < config.limits.max_context:
        lines.append(f"context: {max_context} tokens, the most this model takes")
    later = {
        "source suffix": "suffix" in config.speculation.sources,
        "server.http": config.server.http,
        "server.metrics": config.server.metrics,
    }
    if any(later.values()):
        lines.append(
            f"not in this release yet: {', '.join(k for k, is_on in later.items() if is_on)}"
        )
    if config.speculation.k == "auto":
        lines.append(f"guesses per verification: {config.speculation.fixed_k}")
    if config.speculation.shape == "auto":
        lines.append("shape of drafts: chain")
    if config.target.is_exact and config.target.device == "cpu":
        lines.append("exact mode: the same bits with drafts or without; its price is a self-test")
    if any(seat.in_process for seat in plan.drafters):
        lines.append("one core for target and drafter: the drafter shares this process")
    return lines + memory.lines()
