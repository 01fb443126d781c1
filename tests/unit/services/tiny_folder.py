"""Model folders of a few kilobytes: one byte-level tokenizer, one that works as SentencePiece's."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "the cat sat on the mat and the dog sat on the log END the end",
    "a b c a b c stop here ## stop there",
    "안녕하세요 세계 안녕 반갑습니다",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "👩‍👩‍👧 👍🏽 é ñ café",
]
VOCAB_SIZE = 385
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|stop|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('the system message comes first') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def id_of(library: tokenizers.Tokenizer, token: str) -> int:
    id = library.token_to_id(token)
    assert id is not None, f"{token!r} is no token"
    return id


def byte_level_folder(folder: Path) -> Path:
    """A folder whose tokenizer is byte-level BPE, with a chat template and two end tokens."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS * 4, trainer)
    library.add_tokens(["<plain added>"])
    end, stop = library.token_to_id("<|end|>"), library.token_to_id("<|stop|>")
    _write(folder, "generation_config.json", {"eos_token_id": [end, stop]})
    _write(folder, "tokenizer_config.json", {"eos_token": "<|end|>", "chat_template": TEMPLATE})
    library.save(str(folder / "tokenizer.json"))
    return folder


def sentencepiece_folder(folder: Path) -> Path:
    """A folder whose tokenizer marks spaces with U+2581 and falls back to bytes."""
    words = ["▁", "▁a", "▁b", "▁c", "▁the", "▁cat", "a", "b", "c", "t", "END", "é", "▁EN", "D"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = [(token, -float(len(tokens) - i)) for i, token in enumerate(tokens)]
    library = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    _write(folder, "config.json", {"eos_token_id": library.token_to_id("</s>")})
    library.save(str(folder / "tokenizer.json"))
    return folder


def _write(folder: Path, name: str, content: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
