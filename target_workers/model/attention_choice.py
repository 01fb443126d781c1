"""Which attention a decoder computes with: the fastest one that is there, fits, and proves right.

On CUDA that is FlashInfer's, else torch's. Which one it is and why is logged once for each kind of
cache. Not yet run on a GPU.
"""

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from target_workers.model.attention import Attention, Setting, TorchAttention
from target_workers.model.batch import RowBatch, build_batch
from target_workers.model.cuda_graphs import Compute, DecodeGraphs, Recorder
from target_workers.model.flashinfer import Kit, Library, PagedAttention
from target_workers.model.kv_cache import KVCache
from target_workers.model.layers import Attend
from target_workers.model.run import Run

log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
CAPABILITY = 8  # of a device: bfloat16, and tiles of 16 queries

PROOF_WINDOW = 24  # in place of a longer one: the kernel is the same
PROOF_LENGTH = 200
# Of a row's length: rounding to bf16 is a tenth of it, one key of a window too many ten times it.
PROOF_TOLERANCE = 0.05

Choose: TypeAlias = Callable[[Setting, torch.dtype], Attention]
"""From a decoder's setting and the type of a cache to the attention over it."""


class Unfit(Exception):
    """Why FlashInfer's attention is not used."""


def choose_attention(setting: Setting, kv_dtype: torch.dtype) -> Attention:
    """The Choose for whatever device a decoder is on."""
    if setting.device.type != "cuda":
        return TorchAttention(setting)
    return prefer_flashinfer(setting, kv_dtype, kit_of)


def prefer_flashinfer(
    setting: Setting, kv_dtype: torch.dtype, find: Callable[[torch.device], Kit]
) -> Attention:
    """FlashInfer's attention if there is one for this kind of rows and cache, and it is right."""
    plain = TorchAttention(setting)
    try:
        check_fit(setting, kv_dtype)
        kit = find(setting.device)
        prove(setting, kit)
        fast = PagedAttention(setting, kit)
    except Exception as error:  # also what an import, a compiler or a launch raises
        log.warning("attention on %s: %s, since %s", setting.device, plain.name, _reason(error))
        return plain
    log.info("attention on %s: %s", setting.device, fast.name)
    return Guarded(fast, plain)


def check_fit(setting: Setting, kv_dtype: torch.dtype) -> None:
    """Raises Unfit for a decoder or a cache of a kind that FlashInfer has no kernel for."""
    if setting.dtype not in DTYPES:
        raise Unfit(f"FlashInfer computes in bf16 or fp16, not in {setting.dtype}")
    if kv_dtype is not setting.dtype:
        raise Unfit(f"FlashInfer's cache must be {setting.dtype} as well, not {kv_dtype}")
    if setting.config.head_dim not in HEAD_DIMS:
        raise Unfit(f"FlashInfer takes heads of {HEAD_DIMS}, not of {setting.config.head_dim}")


def kit_of(device: torch.device) -> Kit:
    """What there is for a CUDA device. Raises Unfit, or whatever FlashInfer's import raises."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < CAPABILITY:
        raise Unfit(f"FlashInfer needs compute capability {CAPABILITY}.0, it is {major}.{minor}")
    return Kit(find_library(), Recorder())


def find_library() -> Library:
    """FlashInfer's wrapper. Raises Unfit where it is not installed, or what its import raises."""
    try:
        module = importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        raise Unfit("FlashInfer is not installed: pip install 'paceline[cuda]'") from error
    library: Library = module.BatchPrefillWithPagedKVCacheWrapper
    return library


@dataclass(frozen=True, slots=True)
class Guarded:
    """FlashInfer's Attention, and torch's for a forward that FlashInfer cannot plan."""

    fast: PagedAttention
    plain: TorchAttention

    @property
    def name(self) -> str:
        return self.fast.name

    def prepare(self, batch: RowBatch, cache: KVCache) -> tuple[RowBatch, Attend]:
        try:
            return self.fast.prepare(batch, cache)
        except Exception as error:  # such as too little workspace: nothing is computed yet
            rows = len(batch.tokens)
            log.warning("attention of %d rows: %s, since %s", rows, self.plain.name, _reason(error))
            return self.plain.prepare(batch, cache)

    def graphs(self, compute: Compute) -> DecodeGraphs | None:
        return self.fast.graphs(compute)


@torch.inference_mode()
def prove(setting: Setting, kit: Kit) -> None:
    """Raises Unfit if FlashInfer and torch differ on a prefill, a tree and a decode row."""
    windows = tuple(sorted({min(window, PROOF_WINDOW) for window in setting.config.windows}))
    config = replace(setting.config, num_layers=max(len(windows), 1), windows=windows)
    small = replace(setting, config=config)
    ways: tuple[Attention, ...] = (PagedAttention(small, kit), TorchAttention(small))
    caches = [KVCache(config, PROOF_LENGTH, small.dtype, str(small.device)) for _ in ways]
    generator = torch.Generator().manual_seed(0)
    for runs in _proof_forwards():
        batch = build_batch(runs)
        attends = [way.prepare(batch, held)[1] for way, held in zip(ways, caches, strict=True)]
        for layer in range(config.num_layers):
            qk, values = _random_heads(small, len(batch.tokens), generator)
            got, expected = (attend(layer, qk, values).float() for attend in attends)
            off = float(((got - expected).norm(dim=1) / expected.norm(dim=1)).max())
            if not off <= PROOF_TOLERANCE:  # NaN neither
                raise Unfit(f"FlashInfer's result is off by {off:.2g} in a self-test")


def _proof_forwards() -> Iterator[Sequence[Run]]:
    """A prompt of 150 tokens, 6 tokens with a side branch after the first two, one more token."""
    slots = np.random.default_rng(0).permutation(PROOF_LENGTH)

    def run(start: int, end: int) -> Run:
        return Run(np.zeros(end - start, np.int64), start, slots[start:end], slots[:start])

    yield [run(0, 150)]
    branch = Run(np.zeros(2, np.int64), 152, slots[-2:], slots[:152])
    yield [run(150, 156), branch]
    yield [run(156, 157)]


def _random_heads(setting: Setting, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Queries and keys [rows, heads + kv_heads, head_dim], and values."""
    config = setting.config
    heads = config.num_heads + 2 * config.num_kv_heads
    drawn = torch.randn(rows, heads, config.head_dim, generator=generator)
    qk, values = drawn.to(setting.device, setting.dtype).tensor_split([-config.num_kv_heads], 1)
    return qk.contiguous(), values


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}"
