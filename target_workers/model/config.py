"""What a decoder is made of, read from a Hugging Face config.json; unknown things are refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
KV_DTYPES = ("fp32", "bf16", "int8")  # what keys and values may be kept as, whatever computes them
WEIGHT_DTYPES = ("", "int8")
KERNEL_DTYPES = ("bf16", "fp32")  # what our own CPU kernels compute with
KERNEL_LANES = 16
SCALE_BYTES = 4
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class ModelError(Exception):
    """A model that cannot be loaded or served: the message gives the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture name fixes without a key in config.json.

    `window` is the sliding window where the key is absent (0: the family has none), in all layers
    or, `chosen`, in those that the configuration chooses.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    reads_attention_bias: bool = True
    window: int = 0
    chosen: bool = True


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(reads_attention_bias=False, window=4096, chosen=False),
    "Qwen2ForCausalLM": Family(qkv_bias=True, reads_attention_bias=False, window=4096),
    "Qwen3ForCausalLM": Family(qk_norm=True, window=4096),
}
LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding; fields beyond `theta` belong to the scaled kinds."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and kind of a decoder-only transformer.

    In layer i a row sees the last `windows[i]` keys, its own included, or all (0). Empty `windows`:
    no layer has one.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_tokens: tuple[int, ...]
    windows: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def has_kernels(self, dtype: str) -> bool:
        """True if our own CPU kernels compute such a model."""
        is_whole = self.head_dim % KERNEL_LANES == 0 and self.hidden_size % 2 == 0
        return dtype in KERNEL_DTYPES and is_whole

    def window(self, layer: int) -> int:
        """How many keys a row sees in a layer, its own included; 0: all."""
        return self.windows[layer] if self.windows else 0

    def token_bytes(self, dtype: str) -> int:
        """Bytes of one token's keys and values over all layers; as "int8" with their scales."""
        heads = 2 * self.num_layers * self.num_kv_heads
        if dtype == "int8":
            return heads * (self.head_dim + SCALE_BYTES)
        return heads * self.head_dim * DTYPE_BYTES[dtype]

    @classmethod
    def from_folder(cls, folder: Path | str) -> Self:
        """Read `folder`/config.json. Raises ModelError."""
        return cls.from_json(read_config(Path(folder)))

    @classmethod
    def from_json(cls, raw: dict[str, Json]) -> Self:
        """Build from the parsed config.json of either spelling (transformers 4 and 5)."""
        fields = _Fields(raw)
        architecture = _architecture(raw)
        family = FAMILIES[architecture]
        activation = fields.text("hidden_act", "silu")
        if activation != "silu":
            raise ModelError(f"hidden_act {activation!r} is not supported; use a silu model")
        heads = fields.integer("num_attention_heads")
        hidden = fields.integer("hidden_size")
        bias = family.reads_attention_bias and fields.flag("attention_bias")
        config = cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", hidden // heads),
            max_context=fields.integer("max_position_embeddings", 2048),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope(fields),
            tied=fields.flag("tie_word_embeddings"),
            qkv_bias=family.qkv_bias or bias,
            output_bias=bias,
            mlp_bias=fields.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            eos_tokens=_eos(raw.get("eos_token_id")),
            windows=_windows(fields, family),
        )
        if config.num_heads % config.num_kv_heads or config.head_dim % 2:
            raise ModelError(
                f"config.json: {config.num_heads} heads cannot share {config.num_kv_heads} key "
                f"heads of {config.head_dim}; they must divide evenly and head_dim must be even"
            )
        return config


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed reads of one JSON object; null counts as absent, as in transformers."""

    raw: dict[str, Json]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"config.json: {key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"config.json: {key} must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {key} must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"config.json: {key} must be a string, not {value!r}")
        return value

    def table(self, key: str) -> "_Fields":
        value = self._get(key, None)
        if value is not None and not isinstance(value, dict):
            raise ModelError(f"config.json: {key} must be an object, not {value!r}")
        return _Fields(value or {})

    def _get(self, key: str, default: Json) -> Json:
        value = self.raw.get(key)
        return default if value is None else value


def read_config(folder: Path) -> dict[str, Json]:
    """The parsed config.json of a model folder. Raises ModelError."""
    if not folder.is_dir():
        raise ModelError(
            f"there is no model folder {folder}; check [model] path or fetch the model"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json; give a Hugging Face model folder")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the model again") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} must hold a JSON object; fetch the model again")
    return raw


def _architecture(raw: dict[str, Json]) -> str:
    names = raw.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in FAMILIES:
            return name
    raise ModelError(f"architecture {names!r} is not supported; supported: {', '.join(FAMILIES)}")


def _windows(fields: _Fields, family: Family) -> tuple[int, ...]:
    """The window of every layer; none if no layer has one, or none that hides anything."""
    layers = fields.integer("num_hidden_layers")
    if not family.window or fields.raw.get("sliding_window", family.window) is None:
        return ()
    window = fields.integer("sliding_window", family.window)
    if window >= fields.integer("max_position_embeddings", 2048):
        return ()
    slides = _sliding_layers(fields, layers) if family.chosen else [True] * layers
    return tuple(window * is_sliding for is_sliding in slides) if any(slides) else ()


def _sliding_layers(fields: _Fields, layers: int) -> list[bool]:
    """Which layers have a window, where the configuration chooses."""
    if not fields.flag("use_sliding_window"):
        return [False] * layers
    kinds = fields._get("layer_types", None)
    if kinds is None:
        first = fields._get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ModelError(f"config.json: max_window_layers must be a count, not {first!r}")
        return [layer >= first for layer in range(layers)]
    found = [LAYER_TYPES.get(str(kind)) for kind in kinds] if isinstance(kinds, list) else []
    if len(found) != layers or None in found:
        raise ModelError(
            f"config.json: layer_types must name {layers} layers, each one of {[*LAYER_TYPES]}"
        )
    return [bool(is_sliding) for is_sliding in found]


def _rope(fields: _Fields) -> RopeConfig:
    new = fields.table("rope_parameters")
    scaling = new if new.raw else fields.table("rope_scaling")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    if (
        max(fields.number("partial_rotary_factor", 1), scaling.number("partial_rotary_factor", 1))
        != 1
    ):
        raise ModelError("partial rotary embeddings are not supported; use a full-rotary model")
    explicit = scaling.number("attention_factor", -1.0)
    context = fields.integer("max_position_embeddings", 2048)
    return RopeConfig(
        kind=kind,
        theta=scaling.number("rope_theta", fields.number("rope_theta", 10000.0)),
        factor=scaling.number("factor", 1.0),
        low_freq_factor=scaling.number("low_freq_factor", 1.0),
        high_freq_factor=scaling.number("high_freq_factor", 4.0),
        original_context=scaling.integer("original_max_position_embeddings", context),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        attention_factor=None if explicit < 0 else explicit,
        mscale=scaling.number("mscale", 0.0),
        mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
    )


def _eos(value: Json) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    return tuple(token for token in ids if isinstance(token, int))
