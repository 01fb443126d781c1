"""What a decoder takes of memory, told from its shape before anything is loaded. Pure."""

from dataclasses import dataclass

from target_workers.model.config import DTYPE_BYTES, ModelConfig

TILE = 128  # rows of a prefill that have their own copy of keys, at least
ACTIVATIONS = 6  # values of a row's width that live at once
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Footprint:
    """One decoder, or one rank's part of it: `config` is the part's, its head `head_rows` rows.

    Keys and values are kept as `kv_dtype` (empty: as `dtype`), with `feature_size` features, and
    matrices as `weight_dtype`. Our own CPU kernels copy no keys or values; `on_cpu` False: torch.
    """

    config: ModelConfig
    dtype: str
    kv_dtype: str = ""
    head_rows: int = 0
    feature_size: int = 0
    weight_dtype: str = ""
    on_cpu: bool = True

    @property
    def has_kernels(self) -> bool:
        """True if it runs on our own CPU kernels."""
        return self.on_cpu and self.config.has_kernels(self.dtype)

    @property
    def weights_bytes(self) -> int:
        """The matrices and the angles; a tied head counts, since it is packed on its own."""
        shape = self.config
        heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        layer = 2 * shape.hidden_size * heads + 3 * shape.hidden_size * shape.intermediate_size
        head = (self.head_rows or shape.vocab_size) * shape.hidden_size
        size = DTYPE_BYTES[self.dtype]
        kept = 1 if self.weight_dtype == "int8" else size
        embedding = shape.vocab_size * shape.hidden_size * size
        angle = FLOAT_BYTES if self.has_kernels else size
        angles = 2 * shape.max_context * shape.head_dim * angle
        return embedding + angles + (shape.num_layers * layer + head) * kept

    @property
    def kv_bytes(self) -> int:
        """One token's keys and values."""
        return self.config.token_bytes(self.kv_dtype or self.dtype)

    @property
    def int8_bytes(self) -> int:
        """What they would take as int8."""
        return self.config.token_bytes("int8")

    @property
    def feature_bytes(self) -> int:
        """One token's features."""
        return self.feature_size * DTYPE_BYTES["bf16"]

    @property
    def copy_bytes(self) -> int:
        """One token's keys and values of one layer, as plain attention copies them together."""
        if self.has_kernels:
            return 0
        converted = FLOAT_BYTES if self.kv_dtype not in ("", self.dtype) else 0
        values = 2 * self.config.num_kv_heads * self.config.head_dim
        return values * (DTYPE_BYTES[self.dtype] + converted)

    def work_bytes(self, rows: int, context: int) -> int:
        """About the most that a forward of so many rows takes beside copies of the cache.

        One layer's activations, masks and further copies for a long prefill, logits of every row.
        """
        shape, size = self.config, DTYPE_BYTES[self.dtype]
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        width = ACTIVATIONS * (shape.hidden_size + heads) + 3 * shape.intermediate_size
        if self.has_kernels:
            logits = (self.head_rows or shape.vocab_size) * 2
            return rows * (width + logits) * FLOAT_BYTES
        mask = rows * shape.group * context * size
        copies = -(-rows // TILE) * context * self.copy_bytes
        logits = rows * (self.head_rows or shape.vocab_size) * (size + 2 * FLOAT_BYTES)
        return rows * width * size + mask + copies + logits
