"""The scripted model over a real KV cache of int8: its rows are what the cache gives back.

A row is written as numbers that int8 holds exactly at the row's own scale, in two layers and as
keys and values, so that a move which leaves a part of a row behind changes the output.
"""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from target_workers.model.config import ModelConfig
from target_workers.model.kv_cache import KVCache
from target_workers.pages import Slots
from tests.script_lm import Row, ScriptForward, ScriptLM

LAYERS = 2
DIGITS = {"position": 2, "token": 2, "digest": 10}
BASE = 100
LARGEST = 127.0
CONFIG = ModelConfig.from_json(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 1,
        "head_dim": 16,
    }
)


class CachedForward(ScriptForward):
    """A ScriptForward whose rows live in a KV cache."""

    def __init__(self, lm: ScriptLM, num_slots: int, broken: Iterable[int] = ()) -> None:
        super().__init__(lm, 0, broken)
        self._cache = KVCache(CONFIG, num_slots, torch.int8)

    def move(self, source: Slots, target: Slots) -> None:
        self._cache.move(torch.from_numpy(source), torch.from_numpy(target))

    def _hold(self, slot: int, row: Row) -> None:
        keys, values = _encode(row)
        for layer in range(LAYERS):
            self._cache.write(layer, torch.tensor([slot]), keys, values)

    def _held(self, slots: list[int]) -> list[Row | None]:
        held = torch.empty((len(slots), 2, 1, CONFIG.head_dim))
        layers = []
        for layer in range(LAYERS):
            rows = self._cache.read(layer, torch.tensor(slots, dtype=torch.int64), held).numpy()
            layers.append([_decode(row.tobytes()) for row in rows])
        return [row if row == again else None for row, again in zip(*layers, strict=True)]


def _encode(row: Row) -> Tensor:
    """The largest number, a one, then digits, at scales that differ by position: keys and values.

    [2, 1, 1, head_dim]
    """
    numbers = [LARGEST, 1.0]
    for name, count in DIGITS.items():
        rest = getattr(row, name)
        for _ in range(count):
            rest, digit = divmod(rest, BASE)
            numbers.append(float(digit))
    scales = [2.0 ** (row.position % 4), -(2.0 ** (row.position // 4 % 4))]
    return torch.outer(torch.tensor(scales), torch.tensor(numbers)).view(2, 1, 1, -1)


@lru_cache(maxsize=1 << 16)
def _decode(held: bytes) -> Row | None:
    """The row that is held like this, if one is."""
    numbers = torch.frombuffer(bytearray(held), dtype=torch.float32)
    if not numbers[1]:
        return None
    digits = [round(value) for value in (numbers[: CONFIG.head_dim] / numbers[1]).tolist()[2:]]
    fields = {}
    for name, count in DIGITS.items():
        fields[name] = sum(digit * BASE**i for i, digit in enumerate(digits[:count]))
        del digits[:count]
    row = Row(**fields)
    return row if torch.equal(_encode(row).flatten(), numbers) else None
