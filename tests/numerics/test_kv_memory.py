"""What a target keeps of a sequence is as good as computed anew, whatever it is kept as."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

import numpy as np
import pytest
import torch

from protos.messages import Extend, StepOpen, TreeNode
from protos.sampling import GREEDY, Sampling
from services.demo_prompts import PROMPTS
from services.tokenizer import load_tokenizer
from target_workers.config import TargetConfig
from target_workers.forward import load_target
from target_workers.model.decoder import Decoder
from target_workers.model.loading import load_decoder
from tests.driver import Driver
from tests.duo import audit
from tests.numerics.forward import Path, in_chunks
from tests.tiny import make_tiny
from tests.tiny_engines import Target, make_target

PROMPT = [5, 9, 200, 31, 7, 7, 118, 40, 41, 300, 12]
NOISY = Sampling(0.8, 21)
PAGE = 4

# Measured over these prompts and 60 tokens of each answer: 97% of the positions have the same best
# token, all of those at which the two best scores differ by more than 0.375.
SAME_SHARE = 0.93
CLEAR_MARGIN = 0.5


@dataclass(frozen=True)
class Subject:
    """A model in exact mode, and the type of its keys and values."""

    decoder: Decoder
    kv: torch.dtype

    def target(self, num_pages: int = 80, feature_size: int = 0) -> Target:
        return make_target(self.decoder, PAGE, num_pages, self.kv, feature_size)

    def plain(self, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
        """What it says alone, from nothing."""
        driver, tokens = Driver(self.target().engine), list(prompt)
        driver.open(1, prompt, sampling)
        return driver.decode(1, tokens, 0, count)


SUBJECTS = {
    "bf16": (torch.bfloat16, torch.bfloat16, {}),
    "float32 cache": (torch.bfloat16, torch.float32, {}),
    "int8 cache": (torch.bfloat16, torch.int8, {}),
    "window, int8 cache": (torch.bfloat16, torch.int8, {"sliding_window": 24}),
}


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    dtype, kv, overrides = SUBJECTS[request.param]
    folder = tmp_path_factory.mktemp("kept")
    make_tiny(folder, 2, "Mistral" if overrides else "Llama", **overrides)
    return Subject(load_decoder(folder, dtype=dtype), kv)


@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
def test_a_hit_goes_on_as_the_sequence_that_left_the_pages(
    subject: Subject, sampling: Sampling
) -> None:
    driver = Driver(subject.target().engine)
    tokens = list(PROMPT)
    driver.open(1, tokens, sampling)
    output = driver.decode(1, tokens, 0, 60)
    driver.close(1)
    for seq, said in ((2, 0), (3, 13), (4, 41)):
        again = [*PROMPT, *output[:said]]
        found = driver.open(seq, again, sampling)
        assert found == (len(again) - 1) // PAGE * PAGE
        assert driver.decode(seq, again, found, 60 - said) == output[said:]
        driver.close(seq)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, NOISY])
def test_a_paused_sequence_says_what_it_would_have_said(
    subject: Subject, sampling: Sampling, cached: bool
) -> None:
    expected = subject.plain(PROMPT, 60, sampling)
    driver, tokens = Driver(subject.target(num_pages=20).engine), list(PROMPT)
    for number in range(6):
        found = driver.open(1, tokens, sampling, prefix_cache=cached)
        assert (found > 0) == (cached and number > 0)
        driver.decode(1, tokens, found, 10)
        driver.close(1)
    assert tokens[len(PROMPT) :] == expected


@pytest.mark.parametrize("length", [8, 9, 11])
def test_children_say_what_they_would_have_said_alone(subject: Subject, length: int) -> None:
    prompt, samplings = PROMPT[:length], [Sampling(0.8, seed) for seed in range(4)]
    driver = Driver(subject.target().engine)
    lines = [list(prompt) for _ in samplings]
    driver.open(0, prompt, samplings[0])
    driver.decode(0, lines[0], 0, 5)
    opens = [StepOpen(i, tuple(prompt), samplings[i], parent=0) for i in (1, 2, 3)]
    assert driver.send(opens).cached == (length - 1,) * 3
    assert audit(driver.engine).shared_pages == 3 * ((length - 1) // PAGE)
    starts = [len(lines[0]) - 1, *[length - 1] * 3]
    for _ in range(20):
        for i, line in enumerate(lines):
            driver.decode(i, line, starts[i], 1)
            starts[i] = len(line) - 1
    for line, sampling in zip(lines, samplings, strict=True):
        assert line[length:] == subject.plain(prompt, len(line) - length, sampling)
    driver.close(0, 1, 2, 3)


def test_the_rows_of_a_fork_are_those_of_its_parent(subject: Subject) -> None:
    target = subject.target()
    driver, tokens = Driver(target.engine), list(PROMPT)
    driver.open(1, tokens)
    driver.decode(1, tokens, 0, 8)
    found = driver.open(2, tokens, parent=1)
    assert found == len(tokens) - 1
    assert torch.equal(target.rows(2, found), target.rows(1, found))


def test_features_go_where_their_rows_go(subject: Subject) -> None:
    target = subject.target(feature_size=3)
    driver, pages = Driver(target.engine), target.engine._pages
    right = subject.plain(PROMPT, 3)

    def write(seq: int, start: int, tokens: Sequence[int]) -> None:
        slots = torch.from_numpy(pages.slots(seq)[start : start + len(tokens)])
        target.cache.write_features(slots, torch.tensor(tokens)[:, None].expand(-1, 3))

    def held(seq: int, count: int) -> list[float]:
        features = target.cache.features(torch.from_numpy(pages.slots(seq)[:count]))
        assert torch.equal(features, features[:, :1].expand(-1, 3))
        return features[:, 0].tolist()

    def kept(tokens: Sequence[int]) -> list[float]:
        return torch.tensor(tokens).bfloat16().tolist()

    driver.open(1, PROMPT)
    wrong = TreeNode(-1, (right[0] + 1) % 512)
    nodes = (wrong, TreeNode(-1, right[0]), TreeNode(0, 3), TreeNode(1, right[1]))
    verdict = driver.extend(1, 0, PROMPT, nodes)
    assert verdict.walk == (1, 3)
    write(1, 0, [*PROMPT, *(node.token for node in nodes)])
    driver.send([], [Extend(1, 13, (right[2],), keep=verdict.walk)])
    tokens = [*PROMPT, *right]
    assert held(1, 13) == kept(tokens[:13])
    assert driver.open(2, tokens, prefix_cache=False, parent=1) == 13
    assert held(2, 13) == kept(tokens[:13])
    driver.close(1, 2)
    assert driver.open(3, tokens) == 12
    assert held(3, 12) == kept(tokens[:12])


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "kept"),
    [
        ("fp32", "", torch.float32),
        ("bf16", "int8", torch.int8),
        ("bf16", "fp32", torch.float32),
        ("fp32", "bf16", torch.bfloat16),
    ],
)
def test_a_target_keeps_what_it_is_configured_to(
    tiny_llama: FilePath, dtype: str, kv_dtype: str, kept: torch.dtype
) -> None:
    config = TargetConfig(str(tiny_llama), dtype=dtype, kv_dtype=kv_dtype, num_pages=8)
    driver = Driver(load_target(config, vocab_hash="", incarnation=1))
    driver.open(1, PROMPT)
    assert driver.extend(1, 0, PROMPT).error == ""
    assert driver.engine._forward._cache.dtype is kept


@pytest.mark.model
def test_int8_changes_few_of_the_small_models_tokens(small_model: FilePath) -> None:
    tokenizer = load_tokenizer(small_model)
    decoder = load_decoder(small_model, dtype=torch.bfloat16)
    margins, same = [], []
    for prompt in PROMPTS:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        path = Path(np.array(ids), 1)
        wide, narrow = (in_chunks(decoder, path, [], kv) for kv in (torch.bfloat16, torch.int8))
        best = wide.topk(2).values
        margins.append(best[:, 0] - best[:, 1])
        same.append(wide.argmax(-1) == narrow.argmax(-1))
    clear, agree = torch.cat(margins) > CLEAR_MARGIN, torch.cat(same)
    assert clear.float().mean() > 0.5
    assert agree[clear].all()
    assert agree.float().mean() > SAME_SHARE
