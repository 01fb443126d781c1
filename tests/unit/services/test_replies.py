"""The events of a response stream: in order, text and ids together, figures that add up."""

import hashlib
import struct

import pytest

from orchestrator.request import (
    Delta,
    Finished,
    FinishReason,
    PromptScored,
    Refusal,
    Refused,
    Request,
    Stats,
)
from protos.paceline.v1 import generation_pb2 as pb
from protos.sampling import Bias, Processors, Sampling, Score
from services.errors import Overloaded, Unavailable
from services.replies import Answers, finished, prompt_hash, started
from services.translate import Served
from tests.unit.services.tiny_folder import id_of

STATS = Stats(
    rounds=4, drafted=10, accepted=6, hits=3, histogram=(1, 1, 1, 1), wait_s=0.5, cached=1
)


def letters(served: Served, text: str) -> tuple[int, ...]:
    return tuple(id_of(served.tokenizer.library, letter) for letter in text)


def request(served: Served, **changes: object) -> Request:
    return Request("r", (10, 11), 20, **changes)  # type: ignore[arg-type]


def test_the_first_event_says_what_applies(served: Served) -> None:
    processors = Processors(1.5, 1.0, -1.0, (Bias(7, 2.0),), (7, 8), (), 0, 3, "", 5, 0.5, 0.25)
    sampled = request(served, sampling=Sampling(0.5, 8, "rejection", processors))
    assert started([sampled], served).started == pb.Started(
        request_id="r",
        model="tiny",
        model_revision="r1",
        sampling=pb.Sampling(
            temperature=0.5,
            seed=8,
            top_k=5,
            top_p=0.5,
            min_p=0.25,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            repetition_penalty=1.5,
            logit_bias={7: 2.0},
            allowed_token_ids=[7, 8],
            no_repeat_ngram=3,
            rule=pb.RULE_REJECTION,
        ),
        rule=pb.RULE_REJECTION,
        prompt_tokens=2,
        prompt_hash=hashlib.sha256(struct.pack("<2i", 10, 11)).hexdigest(),
        max_tokens=20,
        choice_seeds=[8],
    )
    assert started([request(served)], served).started.rule == pb.RULE_GREEDY


def test_started_comes_once_and_first(served: Served) -> None:
    answer = Answers([request(served)], served, keep_stop=False)
    kinds = [
        event.WhichOneof("event")
        for update in (Delta((10,)), Delta((11,)), Finished(FinishReason.STOP, STATS))
        for event in answer.events(0, update)
    ]
    assert kinds == ["started", "delta", "delta", "finished"]


def test_scores_go_with_their_tokens(served: Served) -> None:
    answer = Answers([request(served)], served, keep_stop=False)
    told = Score(-0.5, (11, 10), (-0.25, -0.5))
    _, prompt = answer.events(0, PromptScored(1, (Score(-2.0),)))
    assert prompt.prompt_scores == pb.PromptScores(start=1, scores=[pb.TokenScore(logprob=-2.0)])
    (event,) = answer.events(0, Delta((10, 11), (told, Score(-1.0))))
    assert list(event.delta.scores) == [
        pb.TokenScore(logprob=-0.5, top_ids=[11, 10], top_logprobs=[-0.25, -0.5]),
        pb.TokenScore(logprob=-1.0),
    ]


def test_choices_are_told_apart(served: Served) -> None:
    answer = Answers([request(served), request(served)], served, keep_stop=False)
    first, one = answer.events(1, Delta(letters(served, "x")))
    assert first.started.choice_seeds == [0, 0]
    (two,) = answer.events(0, Delta(letters(served, "yz")))
    assert [(e.delta.choice, e.delta.text) for e in (one, two)] == [(1, "x"), (0, "yz")]
    ends = [answer.events(i, Finished(FinishReason.STOP, STATS))[-1].finished for i in (0, 1)]
    assert [(e.choice, e.usage.completion_tokens) for e in ends] == [(0, 2), (1, 1)]


def test_text_held_back_comes_before_the_end(served: Served) -> None:
    answer = Answers([request(served, stop_strings=("END",))], served, keep_stop=False)
    tokens = letters(served, "xEN")
    _, first = answer.events(0, Delta(tokens))
    assert (first.delta.text, tuple(first.delta.token_ids)) == ("x", tokens)
    rest, last = answer.events(0, Finished(FinishReason.LENGTH, STATS))
    assert (rest.delta.text, list(rest.delta.token_ids)) == ("EN", [])
    assert last.finished.reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize(("keep_stop", "text"), [(False, "x"), (True, "xEND")])
def test_the_stop_string_is_left_out_unless_asked_for(
    served: Served, keep_stop: bool, text: str
) -> None:
    answer = Answers([request(served, stop_strings=("END",))], served, keep_stop=keep_stop)
    tokens = letters(served, "xEND")
    events = answer.events(0, Delta(tokens)) + answer.events(0, Finished(FinishReason.STOP, STATS))
    assert "".join(event.delta.text for event in events) == text
    assert tuple(id for event in events for id in event.delta.token_ids) == tokens
    assert events[-1].finished.usage.completion_tokens == 4


def test_only_new_tokens_are_charged_for(served: Served) -> None:
    resumed = request(served, resumed=letters(served, "ab"))
    answer = Answers([resumed], served, keep_stop=False)
    events = answer.events(0, Delta(letters(served, "cde")))
    events += answer.events(0, Finished(FinishReason.STOP, STATS))
    assert events[1].delta.text == "cde"
    assert events[-1].finished.usage == pb.Usage(
        prompt_tokens=2, completion_tokens=3, cached_tokens=1
    )


def test_figures_are_ratios_of_sums(served: Served) -> None:
    last = finished(0, Finished(FinishReason.STOP, STATS), prompt_tokens=2, sent_tokens=10).finished
    assert last.speculation == pb.SpeculationStats(
        num_spec_steps=4,
        num_draft_tokens=10,
        num_accepted_draft_tokens=6,
        mean_acceptance_length=2.5,
        draft_acceptance_rate=0.6,
        acceptance_histogram=[1, 1, 1, 1],
        num_hits=3,
        hit_rate=0.75,
    )
    assert last.queue_s == 0.5
    assert not last.degraded


def test_ratios_of_nothing_are_unset(served: Served) -> None:
    degraded = Finished(FinishReason.LENGTH, Stats(degraded=True))
    last = finished(0, degraded, prompt_tokens=2, sent_tokens=0).finished
    for ratio in ("mean_acceptance_length", "draft_acceptance_rate", "hit_rate"):
        assert not last.speculation.HasField(ratio)
    assert last.degraded
    plain = Finished(FinishReason.LENGTH, Stats(rounds=3, histogram=(3,)))
    speculation = finished(0, plain, prompt_tokens=2, sent_tokens=3).finished.speculation
    assert speculation.mean_acceptance_length == 1
    assert not speculation.HasField("draft_acceptance_rate")


def test_a_refusal_and_a_fault_end_the_stream_with_an_error(served: Served) -> None:
    answer = Answers([request(served)], served, keep_stop=False)
    with pytest.raises(Overloaded):
        answer.events(0, Refused(Refusal.QUEUE_FULL, "64 requests wait"))
    with pytest.raises(Unavailable, match="rank 1 is gone"):
        answer.events(0, Finished(FinishReason.UNAVAILABLE, STATS, "rank 1 is gone"))


def test_the_hash_tells_prompts_apart() -> None:
    assert prompt_hash((1, 2)) != prompt_hash((2, 1))
    assert prompt_hash((258,)) != prompt_hash((2, 1))
