"""Benchmark prompts: what a file may hold, which are taken, and that the shipped ones are sound."""

import json
from collections import Counter
from pathlib import Path

import pytest

from services.prompts import Prompt
from tests import prompts
from tests.prompts import OWN, load, spread

KINDS = {
    "chat", "code", "maths", "extraction",
    "summary", "translation", "rewriting", "question answering",
}  # fmt: skip


def written(folder: Path, *lines: str) -> Path:
    path = folder / "some.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_every_form_of_a_prompt_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '{"kind": "chat", "turns": ["one", "two"]}',
        '{"category": "maths", "prompt": "three"}',
        "",
        '{"prompt": "four", "id": 7}',
    )
    assert load(path) == (
        Prompt("chat", ("one", "two")),
        Prompt("maths", ("three",)),
        Prompt("all", ("four",)),
    )


def test_a_mark_of_byte_order_is_no_text(tmp_path: Path) -> None:
    assert load(written(tmp_path, '\ufeff{"prompt": "one"}')) == (Prompt("all", ("one",)),)


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    said = "before\u2028after\x85the end"
    path = written(tmp_path, json.dumps({"prompt": said}, ensure_ascii=False) + "\r", "")
    assert load(path) == (Prompt("all", (said,)),)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('{"prompt": "cut', "Unterminated string"),
        ('["prompt"]', "is no JSON object"),
        ('{"question": "a", "answer": "b"}', "it has question, answer"),
        ('{"turns": []}', "it has turns"),
        ('{"turns": "a text"}', "it has turns"),
        ('{"turns": ["a", 2]}', "it has turns"),
        ('{"prompt": 3}', "it has prompt"),
        ('{"turns": ["a", " "]}', "an empty turn"),
        ('{"messages": [{"role": "user", "content": null}]}', "that is no text"),
        ('{"messages": [{"role": "user", "content": [{"text": "a"}]}]}', "that is no text"),
        ('{"messages": [{"role": "user", "content": "a"}, 5]}', "it has messages"),
        ('{"prompt": "half a pair: \\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, wrong: str) -> None:
    path = written(tmp_path, '{"prompt": "fine"}', "", line)
    with pytest.raises(ValueError, match=wrong) as raised:
        load(path)
    assert f"{path}, line 3: " in str(raised.value)


@pytest.mark.parametrize("lines", [(), ("", " ")])
def test_a_file_without_prompts_is_refused(tmp_path: Path, lines: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="holds no prompt"):
        load(written(tmp_path, *lines))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*nowhere\.jsonl"):
        load(tmp_path / "nowhere.jsonl")


def test_the_default_is_spec_bench_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "SPEC_BENCH", tmp_path / "nowhere.jsonl")
    assert prompts.default_prompts() == load(OWN)
    there = written(tmp_path, '{"category": "qa", "turns": ["why?"]}')
    monkeypatch.setattr(prompts, "SPEC_BENCH", there)
    assert prompts.default_prompts() == (Prompt("qa", ("why?",)),)


UNEVEN = [
    Prompt(kind, (f"{kind}{i}",))
    for kind, size in (("a", 4), ("b", 1), ("c", 2))
    for i in range(size)
]


def names(count: int) -> list[str]:
    return [prompt.turns[0] for prompt in spread(UNEVEN, count)]


def test_a_spread_takes_kinds_in_turn() -> None:
    assert names(3) == ["a0", "b0", "c0"]
    assert names(5) == ["a0", "b0", "c0", "a1", "c1"]
    assert names(99) == ["a0", "b0", "c0", "a1", "c1", "a2", "a3"]
    assert names(0) == []


def test_a_spread_of_the_shipped_set_is_even() -> None:
    assert set(Counter(prompt.kind for prompt in spread(load(OWN), 24)).values()) == {3}


def test_the_shipped_set_has_ten_prompts_of_every_kind() -> None:
    assert Counter(prompt.kind for prompt in load(OWN)) == dict.fromkeys(KINDS, 10)


def test_the_shipped_lines_have_ids_of_their_own_and_one_or_two_turns() -> None:
    rows = [json.loads(line) for line in OWN.read_text(encoding="utf-8").split("\n") if line]
    assert all(list(row) == ["id", "kind", "turns"] for row in rows)
    assert [row["id"] for row in rows] == list(range(1, 81))
    assert {len(row["turns"]) for row in rows} == {1, 2}
    assert 24 <= sum(len(row["turns"]) == 2 for row in rows) <= 30


def test_no_shipped_turn_is_there_twice() -> None:
    turns = [" ".join(turn.lower().split()) for prompt in load(OWN) for turn in prompt.turns]
    assert [turn for turn, times in Counter(turns).items() if times > 1] == []


def test_shipped_tasks_about_a_text_bring_it_along() -> None:
    about = {"extraction", "summary", "question answering"}
    lengths = [len(p.turns[0].split()) for p in load(OWN) if p.kind in about]
    assert len(lengths) == 30
    assert 100 <= min(lengths) <= max(lengths) <= 300
