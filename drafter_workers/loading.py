"""From a configuration to a drafter engine."""

from drafter_workers.config import DrafterConfig
from drafter_workers.engine import DraftEngine
from drafter_workers.methods import METHODS
from protos.messages import PROTOCOL, Hello
from target_workers.model.config import ModelConfig
from target_workers.model.files import model_hash


def load_drafter(config: DrafterConfig, *, vocab_hash: str, incarnation: int) -> DraftEngine:
    """Load a drafter's weights into an engine. Raises ModelError."""
    proposer = METHODS[config.method](config)
    own = ModelConfig.from_folder(config.path).vocab_size
    hello = Hello(
        PROTOCOL,
        "drafter",
        incarnation,
        model_hash(config.path),
        vocab_hash,
        min(config.vocab_size or own, own),
        proposer.max_context,
        page_size=1,
        num_pages=config.num_slots,
        max_rows=config.max_rows,
    )
    return DraftEngine(hello, proposer, config.growth)
