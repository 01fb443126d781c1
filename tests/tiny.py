"""Small random models in Hugging Face folders, for every test that needs a real decoder."""

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

MAX_CONTEXT = 2048


def make_tiny_llama(
    folder: Path, seed: int, *, vocab: int = 512, layers: int = 2, **overrides: object
) -> Path:
    """Write a Llama of 64 hidden units and 4 heads over 2; `overrides` are LlamaConfig fields."""
    return make_tiny(folder, seed, "Llama", vocab_size=vocab, num_hidden_layers=layers, **overrides)


def make_tiny(folder: Path, seed: int, family: str, **overrides: object) -> Path:
    """Write a tiny model of a transformers family ("Llama", "Qwen3", ...) with random weights."""
    fields = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    config: PreTrainedConfig = getattr(transformers, f"{family}Config")(**(fields | overrides))
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config)
    _randomise(model, seed)
    model.save_pretrained(folder)
    return Path(folder)


@torch.no_grad()
def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights that keep activations and logits of order 1, so that rows differ and choices vary."""
    generator = torch.Generator().manual_seed(seed)
    width = model.config.hidden_size
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            tensor.copy_(1 + 0.1 * noise)
        elif name.endswith("bias"):
            tensor.copy_(0.3 * noise)
        elif "embed_tokens" in name or "lm_head" in name:
            tensor.copy_(noise * 2 / width**0.5)
        else:
            tensor.copy_(noise * 1.5 / tensor.shape[1] ** 0.5)
