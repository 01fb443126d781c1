"""Turns a llama GGUF file into a Hugging Face folder of bf16 weights; no torch, no network."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFReader, ReaderTensor, TokenType, dequantize
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# An instruction model may end a turn by any of these; the file names only one of them.
END_TOKENS = ("<|im_end|>", "<|endoftext|>")

Metadata = dict[str, object]


class GgufError(ValueError):
    """The GGUF file is damaged, or of a kind this conversion would get wrong."""


def convert(source: Path, folder: Path, report: Callable[[int, int], None]) -> None:
    """Writes FILES into the existing `folder`; `report` gets (done, total) tensors.

    Raises GgufError for a file it cannot convert exactly and OSError if writing fails.
    """
    reader, metadata = _read(source)
    _check(reader, metadata)
    weights: dict[str, NDArray[np.uint16]] = {}
    for done, tensor in enumerate(reader.tensors):
        report(done, len(reader.tensors))
        weights[hf_name(tensor.name)] = to_bf16(_rows(tensor, metadata))
    _write_weights(folder / "model.safetensors", weights)
    (folder / "tokenizer.json").write_text(_tokenizer(metadata).to_str(), encoding="utf-8")
    _write_json(folder / "config.json", _config(metadata, tied="lm_head.weight" not in weights))
    _write_json(folder / "generation_config.json", _generation_config(metadata))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))
    report(len(reader.tensors), len(reader.tensors))


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF weight; GgufError if it has none."""
    stem = name.removesuffix(".weight")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block and block[2] in BLOCK:
        return f"model.layers.{block[1]}.{BLOCK[block[2]]}.weight"
    if stem in TOP:
        return f"{TOP[stem]}.weight"
    raise GgufError(f"tensor {name} has no place in a plain llama model; use another file")


def unpermute(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows [heads * head_dim, in] from rotary pairs side by side to rotary halves."""
    paired = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of `values` rounded to bfloat16, nearest and ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _read(source: Path) -> tuple[GGUFReader, Metadata]:
    try:
        reader = GGUFReader(source)
        return reader, {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        raise GgufError(
            f"{source.name} is not a whole GGUF file ({error}); fetch it again"
        ) from error


def _check(reader: GGUFReader, metadata: Metadata) -> None:
    """Refuses what would convert into a model that runs and is wrong."""
    expected = {"general.architecture": "llama", "tokenizer.ggml.pre": "smollm"}
    for key, value in expected.items():
        if metadata.get(key) != value:
            raise GgufError(f"{key} is {metadata.get(key)!r}; only {value!r} can be converted")
    if metadata.get("tokenizer.ggml.add_bos_token"):
        raise GgufError("the tokenizer adds a first token to every text; use another file")
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise GgufError("the file scales its rotary positions; use one that does not")
    if metadata.get("llama.rope.dimension_count", head_dim := _head_dim(metadata)) != head_dim:
        raise GgufError("the file rotates a part of each head; use one that rotates all of it")
    layers = range(_integer(metadata, "llama.block_count"))
    needed = {f"blk.{layer}.{stem}.weight" for layer in layers for stem in BLOCK}
    needed |= {"token_embd.weight", "output_norm.weight"}
    if missing := needed - {tensor.name for tensor in reader.tensors}:
        raise GgufError(f"the file lacks {len(missing)} tensors, {min(missing)} among them")


def _rows(tensor: ReaderTensor, metadata: Metadata) -> NDArray[np.float32]:
    """The weight as float32 [out, in], rows in Hugging Face order."""
    try:
        rows = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise GgufError(f"{tensor.name} is stored as {kind}; use another file") from error
    if tensor.name.endswith("attn_q.weight"):
        return unpermute(rows, _integer(metadata, "llama.attention.head_count"))
    if tensor.name.endswith("attn_k.weight"):
        return unpermute(rows, _integer(metadata, "llama.attention.head_count_kv"))
    return rows


def _write_weights(path: Path, weights: dict[str, NDArray[np.uint16]]) -> None:
    specs = {
        name: TensorSpec(
            dtype="bfloat16",
            shape=bits.shape,
            data_ptr=bits.ctypes.data,
            data_len=bits.nbytes,
        )
        for name, bits in weights.items()
    }
    # Not serialize_file: it hides the error number, by which a full disk is told.
    path.write_bytes(serialize(specs, metadata={"format": "pt"}))


def _tokenizer(metadata: Metadata) -> Tokenizer:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    pairs = (merge.split(" ") for merge in _strings(metadata, "tokenizer.ggml.merges"))
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, [(left, right) for left, right in pairs]))
    split = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = Sequence(split)
    tokenizer.decoder = ByteLevelDecoder()
    control = [AddedToken(token, special=True, normalized=False) for token in _control(metadata)]
    tokenizer.add_special_tokens(control)
    return tokenizer


def _config(metadata: Metadata, *, tied: bool) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_strings(metadata, "tokenizer.ggml.tokens")),
        "hidden_size": _integer(metadata, "llama.embedding_length"),
        "intermediate_size": _integer(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _integer(metadata, "llama.block_count"),
        "num_attention_heads": _integer(metadata, "llama.attention.head_count"),
        "num_key_value_heads": _integer(metadata, "llama.attention.head_count_kv"),
        "head_dim": _head_dim(metadata),
        "max_position_embeddings": _integer(metadata, "llama.context_length"),
        "rms_norm_eps": _real(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _real(metadata, "llama.rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **_special_ids(metadata),
    }


def _head_dim(metadata: Metadata) -> int:
    if "llama.attention.key_length" in metadata:
        return _integer(metadata, "llama.attention.key_length")
    num_heads = _integer(metadata, "llama.attention.head_count")
    return _integer(metadata, "llama.embedding_length") // num_heads


def _generation_config(metadata: Metadata) -> dict[str, object]:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    control = set(_control(metadata))
    ends = [_integer(metadata, "tokenizer.ggml.eos_token_id")]
    ends += [tokens.index(token) for token in END_TOKENS if token in control]
    return {**_special_ids(metadata), "eos_token_id": list(dict.fromkeys(ends))}


def _tokenizer_config(metadata: Metadata) -> dict[str, object]:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    names = {key.replace("_id", ""): tokens[id] for key, id in _special_ids(metadata).items()}
    return {
        # Any other class rebuilds the tokenizer from its vocabulary and loses the Digits step.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _integer(metadata, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        **names,
        "chat_template": metadata.get("tokenizer.chat_template"),
    }


def _special_ids(metadata: Metadata) -> dict[str, int]:
    roles = {"bos": "bos", "eos": "eos", "pad": "padding"}
    keys = {f"{role}_token_id": f"tokenizer.ggml.{name}_token_id" for role, name in roles.items()}
    return {key: _integer(metadata, name) for key, name in keys.items() if name in metadata}


def _control(metadata: Metadata) -> list[str]:
    """The tokens that stand for themselves and never come from ordinary text."""
    kinds = metadata.get("tokenizer.ggml.token_type")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise GgufError("tokenizer.ggml.token_type does not match the tokens; use another file")
    return [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]


def _integer(metadata: Metadata, key: str) -> int:
    value = metadata.get(key)
    if not isinstance(value, int):
        raise GgufError(f"{key} is {value!r}, not a whole number; use another file")
    return value


def _real(metadata: Metadata, key: str) -> float:
    """The shortest decimal of the stored float32: 1e-05, not 9.999999747378752e-06."""
    value = metadata.get(key)
    if not isinstance(value, float):
        raise GgufError(f"{key} is {value!r}, not a number; use another file")
    return float(str(np.float32(value)))


def _strings(metadata: Metadata, key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list):
        raise GgufError(f"{key} is missing; use a file that carries its tokenizer")
    return value


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
