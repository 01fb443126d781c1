"""A student's folder: planted, saved, loaded and served, beside the target it borrows from."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter_workers.config import DrafterConfig
from drafter_workers.methods.small_model import SmallModel, build
from drafter_workers.planting import plant, planted_config
from drafter_workers.proposer import Expand
from drafter_workers.student import Borrowed, read_borrowed, save_student
from protos.sampling import GREEDY, Sampling
from target_workers.model.config import ModelError, read_config
from target_workers.model.decoder import Decoder, TorchDecoder
from target_workers.model.files import ends_hash
from target_workers.model.loading import Part, load_decoder, load_reference
from target_workers.model.noise import gumbel
from tests.tiny import make_tiny
from tests.tiny_engines import prefill

IDS = tuple(range(3, 512, 5))
TOKENS = [5, 400, 31, 7, 7, 250, 13]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["Llama", "Qwen3", "Qwen2"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tied = request.param != "Qwen2"
    return make_tiny(folder, 3, request.param, num_hidden_layers=4, tie_word_embeddings=tied)


def planted(target: Path, folder: Path, layers: tuple[int, ...], ids: tuple[int, ...]) -> Path:
    plant(target, folder, layers, Borrowed(ends_hash(target), ids or None))
    return folder


def borrowing(target: Path, student: Path) -> Part:
    borrowed = read_borrowed(student)
    assert borrowed is not None
    return Part(loan=borrowed.loan(target))


def logits_of(decoder: Decoder) -> Tensor:
    return prefill(decoder, TOKENS)[1]


def trained(target: Path, student: Path) -> TorchDecoder:
    """The student with weights that are no longer the target's."""
    decoder = load_reference(student, dtype=torch.float32, part=borrowing(target, student))
    torch.manual_seed(0)
    with torch.no_grad():
        for block in decoder.blocks:
            for name, each in block.named_parameters():
                if "qk_norm" not in name:
                    each.mul_(1 + 0.1 * torch.randn_like(each))
        decoder.norm.weight.mul_(1.2)
    return decoder


def test_all_layers_of_a_target_are_the_target(target: Path, tmp_path: Path) -> None:
    student = planted(target, tmp_path, (0, 1, 2, 3), ())
    whole = load_decoder(target, dtype=torch.float32)
    same = load_decoder(student, dtype=torch.float32, part=borrowing(target, student))
    assert torch.equal(logits_of(whole), logits_of(same))


def test_a_reduced_vocabulary_has_the_logits_of_its_ids(target: Path, tmp_path: Path) -> None:
    whole = planted(target, tmp_path / "whole", (0, 3), ())
    reduced = planted(target, tmp_path / "reduced", (0, 3), IDS)
    every = load_decoder(whole, dtype=torch.float32, part=borrowing(target, whole))
    some = load_decoder(reduced, dtype=torch.float32, part=borrowing(target, reduced))
    assert torch.equal(logits_of(every)[:, list(IDS)], logits_of(some))


@pytest.mark.parametrize("int8", [False, True])
def test_what_was_trained_is_what_is_served(target: Path, tmp_path: Path, *, int8: bool) -> None:
    decoder = trained(target, planted(target, tmp_path / "planted", (0, 3), IDS))
    saved = tmp_path / "saved"
    config = planted_config(read_config(target), (0, 3))
    save_student(saved, decoder, config, Borrowed(ends_hash(target), IDS), int8=int8)
    served = load_decoder(saved, dtype=torch.float32, part=borrowing(target, saved))
    expected = logits_of(decoder)
    assert (logits_of(served) - expected).abs().max() < 0.05 * expected.abs().max()
    stored = load_file(saved / "model.safetensors")
    assert stored["t2d"].nonzero()[:, 0].tolist() == list(IDS)
    kinds = {stored[name].dtype for name in stored if name.endswith("proj.weight")}
    assert kinds == {torch.int8 if int8 else torch.bfloat16}


def proposer(target: Path, student: Path, rank: str = "noise") -> SmallModel:
    config = DrafterConfig(
        str(student), dtype="fp32", lender=str(target), rank=rank, max_context=64, num_slots=64
    )
    return build(config)


@pytest.mark.parametrize("rank", ["noise", "argmax"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, 21)])
def test_proposals_are_the_targets_ids(
    target: Path, tmp_path: Path, sampling: Sampling, rank: str
) -> None:
    student = planted(target, tmp_path, (0, 3), IDS)
    model = proposer(target, student, rank)
    model.open(1, TOKENS, sampling)
    ((first, second),) = model.propose([Expand(1, 0, ())], 2)
    decoder = load_decoder(student, dtype=torch.float32, part=borrowing(target, student))
    ids, row = torch.tensor(IDS), logits_of(decoder)[-1]
    scaled = row.double() / (sampling.temperature or 1.0)
    noise = gumbel(torch.tensor([sampling.seed]), torch.tensor([len(TOKENS)]), ids)
    by_noise = rank == "noise" and sampling.temperature > 0
    order = (scaled + noise if by_noise else scaled).argsort(descending=True)
    assert [first.token, second.token] == ids[order[:2]].tolist()
    assert first.logprob == pytest.approx(float(scaled.log_softmax(-1)[order[0]]), abs=TOLERANCE)


def test_ids_beyond_the_shared_vocabulary_are_not_proposed(target: Path, tmp_path: Path) -> None:
    student = planted(target, tmp_path, (0, 3), IDS)
    config = DrafterConfig(str(student), dtype="fp32", lender=str(target), num_slots=64)
    model = build(replace(config, max_context=64, vocab_size=100))
    model.open(1, TOKENS, Sampling(1.0, 3))
    (candidates,) = model.propose([Expand(1, 0, ())], 16)
    assert {candidate.token for candidate in candidates} <= {id for id in IDS if id < 100}


@pytest.mark.parametrize("fault", ["missing", "falling", "beyond", "count"])
def test_a_broken_vocabulary_is_refused(target: Path, tmp_path: Path, fault: str) -> None:
    student = planted(target, tmp_path, (0, 3), IDS)
    tensors = load_file(student / "model.safetensors")
    offsets = tensors.pop("d2t")
    broken = {
        "missing": {},
        "falling": {"d2t": offsets.flip(0)},
        "beyond": {"d2t": offsets + 1000},
        "count": {"d2t": offsets[:-1]},
    }
    save_file(tensors | broken[fault], student / "model.safetensors")
    with pytest.raises(ModelError, match="d2t"):
        read_borrowed(student)


def test_a_lender_of_another_shape_is_refused(target: Path, tmp_path: Path) -> None:
    student = planted(target, tmp_path / "student", (0, 3), IDS)
    other = make_tiny(tmp_path / "other", 3, "Llama", vocab_size=300)
    with pytest.raises(ModelError, match="different models"):
        load_decoder(student, dtype=torch.float32, part=borrowing(other, student))


@pytest.mark.parametrize("layers", [(), (0, 4), (1, 1), (-1,)])
def test_layers_that_are_not_the_targets_are_refused(
    target: Path, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    with pytest.raises(ModelError, match="layers"):
        planted(target, tmp_path, layers, IDS)


def test_the_ends_hash_is_of_the_ends_alone(target: Path, tmp_path: Path) -> None:
    tensors = load_file(target / "model.safetensors")
    inner = "model.layers.0.mlp.down_proj.weight"
    for name, same in ((inner, True), ("model.embed_tokens.weight", False)):
        changed = tensors | {name: tensors[name] + 1}
        save_file(changed, tmp_path / "model.safetensors")
        assert (ends_hash(tmp_path) == ends_hash(target)) == same
