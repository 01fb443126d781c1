"""Every drafting method by its name in the configuration."""

from collections.abc import Callable

from drafter_workers.config import DrafterConfig
from drafter_workers.methods import small_model
from drafter_workers.proposer import Proposer

METHODS: dict[str, Callable[[DrafterConfig], Proposer]] = {"small_model": small_model.build}
