"""Tokenizers and a served model that every test of the edge shares."""

from pathlib import Path

import pytest
from hypothesis import settings

from services.tokenizer import Tokenizer, load_tokenizer
from services.translate import Served
from tests.unit.services.tiny_folder import byte_level_folder, sentencepiece_folder

settings.register_profile("patient", deadline=None)  # a busy machine is not a failure
settings.load_profile("patient")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(scope="session")
def served(tokenizer: Tokenizer) -> Served:
    return Served(name="tiny", revision="r1", max_context=64, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def small_model(small_model_folder: Path) -> Tokenizer:
    return load_tokenizer(small_model_folder)
