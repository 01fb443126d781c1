"""Tokenizers from model folders: bytes of every token, end tokens, chat, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, processors

from services.chat import ChatError
from services.errors import TokenizerError
from services.tokenizer import Tokenizer, load_tokenizer
from tests.unit.services.tiny_folder import id_of


def changed(folder: Path, to: Path, name: str, content: object) -> Path:
    """A copy of a folder with one file written anew."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    (to / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return to


def test_every_tokens_bytes_are_what_the_library_decodes(tokenizer: Tokenizer) -> None:
    for id in range(tokenizer.vocab_size):
        assert tokenizer.decode([id]) == tokenizer.library.decode([id])


def test_every_byte_has_a_token(tokenizer: Tokenizer, sentencepiece: Tokenizer) -> None:
    for each in (tokenizer, sentencepiece):
        assert {bytes([byte]) for byte in range(256)} <= set(each.pieces)


def test_a_round_trip_gives_the_text_back(tokenizer: Tokenizer) -> None:
    for text in ("the cat", " two  spaces ", "안녕 👍🏽", "\x00\n\t", "<plain added> word"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_vocabulary_size_is_one_more_than_the_highest_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.library.id_to_token(tokenizer.vocab_size - 1) is not None
    assert tokenizer.library.id_to_token(tokenizer.vocab_size) is None


def test_end_tokens_come_from_the_generation_settings(folder: Path, tokenizer: Tokenizer) -> None:
    named = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.eos_ids == tuple(sorted(named))


def test_end_tokens_come_from_the_model_without_generation_settings(
    folder: Path, tmp_path: Path
) -> None:
    changed(folder, tmp_path, "config.json", {"eos_token_id": 7})
    (tmp_path / "generation_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_ids == tuple(sorted({7, id_of(tokenizer.library, "<|end|>")}))


def test_a_chat_is_rendered_up_to_the_answer(tokenizer: Tokenizer) -> None:
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    expected = "<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>"
    ids = tokenizer.library.encode(expected, add_special_tokens=False).ids
    assert tokenizer.encode_chat(chat) == tuple(ids)


def test_a_chat_the_template_refuses_says_why(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "system", "content": "late"}]
    with pytest.raises(ChatError, match="the system message comes first"):
        tokenizer.encode_chat(chat)


def test_a_chat_without_a_template_is_refused(sentencepiece: Tokenizer) -> None:
    with pytest.raises(ChatError, match="no chat template"):
        sentencepiece.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "x<y"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "x<y"}'),
        ("{% for m in messages %}\n  {% if true %}\n a{% break %}{% endif %}{% endfor %}", " a"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ tools is none }}{{ eos_token }}", "True<|end|>"),
    ],
)
def test_templates_find_what_they_need(
    folder: Path, tmp_path: Path, template: str, expected: str
) -> None:
    changed(folder, tmp_path, "chat_template.jinja", template)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.template is not None
    assert tokenizer.template.render([{"role": "user", "content": "x<y"}]) == expected


def test_a_template_cannot_reach_python(folder: Path, tmp_path: Path) -> None:
    changed(
        folder, tmp_path, "chat_template.jinja", "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    )
    with pytest.raises(ChatError, match="unsafe"):
        load_tokenizer(tmp_path).encode_chat([{"role": "user", "content": "hi"}])


def test_the_default_of_several_templates_is_used(folder: Path, tmp_path: Path) -> None:
    templates = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    changed(folder, tmp_path, "tokenizer_config.json", {"chat_template": templates})
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.template is not None
    assert tokenizer.template.render([]) == "d"


def test_the_vocabulary_hash_tells_equal_from_unequal(
    folder: Path, tokenizer: Tokenizer, sentencepiece: Tokenizer
) -> None:
    assert load_tokenizer(folder).vocab_hash == tokenizer.vocab_hash
    assert sentencepiece.vocab_hash != tokenizer.vocab_hash
    assert tokenizer.first_difference(load_tokenizer(folder)) is None


def test_permuted_ids_are_told_at_the_first_that_differs(tokenizer: Tokenizer) -> None:
    tokens = list(tokenizer.tokens)
    tokens[300], tokens[301] = tokens[301], tokens[300]
    other = replace(tokenizer, tokens=tuple(tokens))
    difference = tokenizer.first_difference(other)
    assert difference is not None and difference.startswith("id 300 is ")
    assert other.vocab_hash != tokenizer.vocab_hash


def test_a_special_token_is_not_an_ordinary_one(tokenizer: Tokenizer) -> None:
    other = replace(tokenizer, special_ids=tokenizer.special_ids - {2})
    difference = tokenizer.first_difference(other)
    assert difference == "id 2 is the special token '<|user|>' here and '<|user|>' there"
    assert other.vocab_hash != tokenizer.vocab_hash


def test_a_longer_vocabulary_and_another_start_token_differ(tokenizer: Tokenizer) -> None:
    longer = replace(tokenizer, tokens=(*tokenizer.tokens, "more"))
    difference = tokenizer.first_difference(longer)
    assert difference == f"id {tokenizer.vocab_size} is nothing here and 'more' there"
    assert "start token" in (tokenizer.first_difference(replace(tokenizer, bos_id=3)) or "")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_broken_files_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    broken = changed(folder, tmp_path / "a", "tokenizer.json", '{"model": 1}')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(broken)
    broken = changed(folder, tmp_path / "b", "generation_config.json", "{")
    with pytest.raises(TokenizerError, match=r"generation_config\.json is not JSON"):
        load_tokenizer(broken)
    broken = changed(folder, tmp_path / "c", "chat_template.jinja", "{% if %}")
    with pytest.raises(TokenizerError, match="does not compile"):
        load_tokenizer(broken)


def test_a_text_gets_the_start_token_and_a_chat_what_its_template_says(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    start = id_of(library, "<|system|>")
    library.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", start)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("the")[0] == start
    assert start not in tokenizer.encode_chat([{"role": "user", "content": "the"}])


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), None])
def test_a_decoder_whose_tokens_depend_on_each_other_is_refused(
    folder: Path, tmp_path: Path, decoder: decoders.Decoder | None
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.decoder = decoder
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="decoder"):
        load_tokenizer(tmp_path)


@pytest.mark.model
def test_the_small_models_tokens_and_chat(small_model: Tokenizer) -> None:
    assert small_model.vocab_size == 49152
    for id in range(0, small_model.vocab_size, 7):
        assert small_model.decode([id]) == small_model.library.decode([id])
    ids = small_model.encode_chat([{"role": "user", "content": "Hi"}])
    rendered = small_model.library.decode(list(ids), skip_special_tokens=False)
    assert rendered.startswith("<|im_start|>system\n")
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert id_of(small_model.library, "<|im_end|>") in small_model.eos_ids
