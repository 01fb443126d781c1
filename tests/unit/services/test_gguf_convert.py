"""The conversion of GGUF files: every weight in its place, the right bits, or a refusal."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.gguf_convert import FILES, GgufError, convert, to_bf16, unpermute
from services.pull import PullError, resolve
from tests.unit.services.tiny_gguf import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MERGES,
    TEMPLATE,
    TOKENS,
    TinyGguf,
    weights,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _convert(TinyGguf(), tmp_path_factory.mktemp("tiny"))


def _convert(gguf: TinyGguf, folder: Path) -> Path:
    made = folder / "model"
    made.mkdir()
    convert(gguf.write(folder / "tiny.gguf"), made, lambda done, total: None)
    return made


def _json(path: Path) -> dict[str, object]:
    value = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def _half_row(gguf_row: int) -> int:
    """Where a GGUF row belongs when a head's first halves come before its second halves."""
    head, inside = divmod(gguf_row, HEAD_DIM)
    pair, second = divmod(inside, 2)
    return head * HEAD_DIM + second * (HEAD_DIM // 2) + pair


def test_the_folder_holds_the_files_of_a_hugging_face_model_and_no_other(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_query_and_key_rows_are_moved_from_pairs_to_halves(folder: Path) -> None:
    found, given = load_file(folder / "model.safetensors"), weights()
    for layer in range(LAYERS):
        for stem, name, heads in (("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV_HEADS)):
            rows = found[f"model.layers.{layer}.self_attn.{name}.weight"].float().numpy()
            for row in range(heads * HEAD_DIM):
                expected = given[f"blk.{layer}.{stem}.weight"][row]
                assert np.array_equal(rows[_half_row(row)], expected)


def test_halves_after_the_move_score_as_pairs_did_before_it() -> None:
    random = np.random.default_rng(3)
    query, key = random.standard_normal((2, HEAD_DIM, 8))
    x, y = random.standard_normal((2, 8))
    pairs = _rotate_pairs(query @ x, 11) @ _rotate_pairs(key @ y, 4)
    moved_query, moved_key = unpermute(query, 1), unpermute(key, 1)
    halves = _rotate_halves(moved_query @ x, 11) @ _rotate_halves(moved_key @ y, 4)
    assert halves == pytest.approx(pairs, abs=1e-12)


def _angles(position: int) -> NDArray[np.float64]:
    return position * 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)


def _rotate_pairs(values: NDArray[np.float64], position: int) -> NDArray[np.float64]:
    turned = (values[0::2] + 1j * values[1::2]) * np.exp(1j * _angles(position))
    return np.concatenate([turned.real, turned.imag])


def _rotate_halves(values: NDArray[np.float64], position: int) -> NDArray[np.float64]:
    first, second = np.split(values, 2)
    turned = (first + 1j * second) * np.exp(1j * _angles(position))
    return np.concatenate([turned.real, turned.imag])


def test_all_other_weights_keep_their_rows_and_values(folder: Path) -> None:
    found, given = load_file(folder / "model.safetensors"), weights()
    expected = {
        "model.embed_tokens.weight": given["token_embd.weight"],
        "model.norm.weight": given["output_norm.weight"],
        "model.layers.1.input_layernorm.weight": given["blk.1.attn_norm.weight"],
        "model.layers.1.post_attention_layernorm.weight": given["blk.1.ffn_norm.weight"],
        "model.layers.1.self_attn.v_proj.weight": given["blk.1.attn_v.weight"],
        "model.layers.1.self_attn.o_proj.weight": given["blk.1.attn_output.weight"],
        "model.layers.1.mlp.gate_proj.weight": given["blk.1.ffn_gate.weight"],
        "model.layers.1.mlp.up_proj.weight": given["blk.1.ffn_up.weight"],
        "model.layers.1.mlp.down_proj.weight": given["blk.1.ffn_down.weight"],
    }
    for name, values in expected.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name].float(), torch.from_numpy(values)), name
    assert len(found) == len(given)


def test_rounding_to_bfloat16_agrees_with_torch_on_every_kind_of_number() -> None:
    random = np.random.default_rng(5)
    high = random.integers(0, 1 << 16, 200_000, dtype=np.uint32) << 16
    low = random.choice([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], 200_000).astype(np.uint32)
    values = (high | low).view(np.float32)
    ours = torch.from_numpy(to_bf16(values).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    nan = torch.isnan(theirs)
    assert nan.any()
    assert torch.isinf(theirs).any()
    assert torch.equal(torch.isnan(ours), nan)
    assert torch.equal(ours.view(torch.int16)[~nan], theirs.view(torch.int16)[~nan])


def test_digits_stay_single_although_a_merge_would_join_them(folder: Path) -> None:
    assert "1 2" in MERGES
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hell 12").tokens == ["hell", "Ġ", "1", "2"]
    assert tokenizer.encode(" hell").tokens == ["Ġhell"]


def test_control_tokens_are_one_id_each_and_left_out_of_decoded_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>é hell\n<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "é hell\n"
    assert tokenizer.get_vocab_size() == len(TOKENS)


def test_the_configuration_states_the_shape_and_round_numbers(folder: Path) -> None:
    config = _json(folder / "config.json")
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-05, 100000.0)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["head_dim"], config["num_hidden_layers"]) == (HEAD_DIM, LAYERS)
    assert config["vocab_size"] == len(TOKENS)
    assert config["tie_word_embeddings"] is True


def test_a_turn_ends_at_every_end_token_and_the_template_is_kept(folder: Path) -> None:
    assert _json(folder / "generation_config.json")["eos_token_id"] == [2, 0]
    tokenizer = _json(folder / "tokenizer_config.json")
    assert (tokenizer["eos_token"], tokenizer["chat_template"]) == ("<|im_end|>", TEMPLATE)


def test_a_separate_output_matrix_unties_the_embeddings(tmp_path: Path) -> None:
    output = weights()["token_embd.weight"] % 16
    made = _convert(TinyGguf(weights=weights() | {"output.weight": output}), tmp_path)
    assert _json(made / "config.json")["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(made / "model.safetensors")


def _without(name: str) -> dict[str, NDArray[np.float32]]:
    return {key: value for key, value in weights().items() if key != name}


@pytest.mark.parametrize(
    ("gguf", "cause"),
    [
        (lambda: TinyGguf(pre="llama-bpe"), "tokenizer.ggml.pre is 'llama-bpe'"),
        (lambda: TinyGguf(weights=_without("blk.1.ffn_up.weight")), r"blk\.1\.ffn_up\.weight"),
        (
            lambda: TinyGguf(weights=weights() | {"rope_freqs.weight": np.ones((1, 32), "f4")}),
            "rope_freqs.weight has no place",
        ),
        (lambda: TinyGguf(extra=_scale_positions), "scales its rotary positions"),
        (lambda: TinyGguf(extra=lambda writer: writer.add_add_bos_token(True)), "first token"),
        (lambda: TinyGguf(extra=lambda writer: writer.add_rope_dimension_count(8)), "a part of"),
    ],
)
def test_a_file_that_would_convert_wrongly_is_refused(
    gguf: Callable[[], TinyGguf], cause: str, tmp_path: Path
) -> None:
    with pytest.raises(GgufError, match=cause):
        _convert(gguf(), tmp_path)


def _scale_positions(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)


@pytest.mark.parametrize("size_bytes", [0, 3, 100, 4000, -1])
def test_a_truncated_file_is_refused(size_bytes: int, tmp_path: Path) -> None:
    whole = TinyGguf().write(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:size_bytes])
    with pytest.raises(GgufError, match="not a whole GGUF file"):
        convert(cut, tmp_path, lambda done, total: None)


@pytest.mark.parametrize("file", FILES)
def test_a_full_disk_is_told_by_its_number_whichever_file_meets_it(
    file: str, tmp_path: Path
) -> None:
    (tmp_path / file).symlink_to("/dev/full")
    gguf = TinyGguf().write(tmp_path / "tiny.gguf")
    with pytest.raises(OSError, match=r".") as caught:
        convert(gguf, tmp_path, lambda done, total: None)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.model
def test_the_real_model_knows_the_capital_of_france() -> None:
    try:
        folder = resolve("smollm2-135m")
    except PullError as missing:
        pytest.skip(str(missing))
    model = AutoModelForCausalLM.from_pretrained(folder)
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    template = AutoTokenizer.from_pretrained(folder)
    prompt = template.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    output = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0].tolist()
    assert tokenizer.decode(output[len(ids) :]) == "The capital of France is Paris."
    assert tokenizer.encode(" 2024").tokens == ["Ġ", "2", "0", "2", "4"]
