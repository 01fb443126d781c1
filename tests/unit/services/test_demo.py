"""The demonstration's verdict: identical only if every answer is."""

from services.demo import Result, differing, report
from services.demo_prompts import PROMPTS
from services.measure import Sample


def result(mode, tokens: list[tuple[int, ...]]) -> Result:
    return Result(mode, tuple(Sample(t, 0.1, 1.0, len(t), 0, 0) for t in tokens))


SAME = [(i, i + 1) for i in range(len(PROMPTS))]


def test_equal_answers_are_identical() -> None:
    results = [result("off", SAME), result("sync", SAME), result("async", SAME)]
    assert differing(results) == []
    assert report(results, [])["identical"] is True


def test_one_token_that_differs_is_named_by_its_prompt() -> None:
    other = [*SAME[:2], (2, 99), *SAME[3:]]
    results = [result("off", SAME), result("sync", SAME), result("async", other)]
    assert differing(results) == [PROMPTS[2].kind]
    assert report(results, differing(results))["identical"] is False


def test_the_report_has_every_mode() -> None:
    modes = report([result("off", SAME), result("sync", SAME)], [])["modes"]
    assert set(modes) == {"plain", "synchronous"}
    assert modes["plain"]["tokens_per_s"] == 2.0
