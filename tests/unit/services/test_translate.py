"""Every field a client can set is served or refused by name; what passes is a sound Request."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.request import Mode, Request
from protos.paceline.v1 import generation_pb2 as pb
from protos.sampling import PLAIN, Sampling, Scoring
from services.errors import InvalidRequest, RequestFailed, ResumeRefused, UnknownModel
from services.sampling_fields import RULES
from services.tokenizer import Tokenizer
from services.translate import Defaults, Served, requests_from
from tests.unit.services.tiny_folder import id_of

DEFAULTS = Defaults(request_id="given", seed=99)


def message(*, ids: tuple[int, ...] = (10, 11, 12), **fields: object) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(token_ids=pb.TokenIds(ids=ids), **fields)  # type: ignore[arg-type]


def translated(served: Served, request: pb.GenerateStreamRequest) -> Request:
    (only,) = requests_from(request, served, DEFAULTS)
    return only


def refusal(served: Served, request: pb.GenerateStreamRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        translated(served, request)
    return caught.value


def test_a_bare_request_gets_every_default(served: Served) -> None:
    assert translated(served, message()) == Request(
        request_id="given",
        prompt=(10, 11, 12),
        max_tokens=61,
        sampling=Sampling(temperature=0.0, seed=99, prompt_tokens=3),
        stop_token_ids=served.tokenizer.eos_ids,
    )


def test_everything_set_is_taken_over(served: Served) -> None:
    full = message(
        request_id="mine",
        model="tiny",
        model_revision="r1",
        sampling=pb.Sampling(temperature=0.8, seed=7),
        stopping=pb.Stopping(
            max_tokens=9, stop_strings=["END"], stop_token_ids=[20], ignore_eos=True
        ),
        resumed_tokens=[30, 31],
        speculation=pb.Speculation(mode=pb.SPECULATION_MODE_SYNC, k=5),
        prefix_cache=pb.PrefixCache(cache_salt="mine alone", bypass=True),
    )
    assert translated(served, full) == Request(
        request_id="mine",
        prompt=(10, 11, 12),
        max_tokens=9,
        sampling=Sampling(temperature=0.8, seed=7, prompt_tokens=3),
        stop_token_ids=(20,),
        stop_strings=("END",),
        resumed=(30, 31),
        mode=Mode.SYNC,
        k=5,
        cache_salt="mine alone",
        prefix_cache=False,
    )


def test_text_and_chat_become_tokens(served: Served) -> None:
    text = translated(served, pb.GenerateStreamRequest(text="the cat"))
    assert text.prompt == served.tokenizer.encode("the cat")
    turn = pb.ChatMessage(role="user", content="hi")
    chat = translated(served, pb.GenerateStreamRequest(chat=pb.Chat(messages=[turn])))
    assert chat.prompt == served.tokenizer.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("text", [" ", "\n\t", "\x00", "\ufeff"])
def test_odd_but_real_text_is_a_prompt(served: Served, text: str) -> None:
    prompt = translated(served, pb.GenerateStreamRequest(text=text)).prompt
    assert served.tokenizer.decode(prompt) == text


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateStreamRequest(), "prompt"),
        (pb.GenerateStreamRequest(text=""), "text"),
        (pb.GenerateStreamRequest(token_ids=pb.TokenIds()), "token_ids.ids"),
        (pb.GenerateStreamRequest(chat=pb.Chat()), "chat.messages"),
        (pb.GenerateStreamRequest(text="x" * 10_000), "text"),
        (message(ids=(5,) * 64), "token_ids.ids"),
        (message(ids=(5,) * 65), "token_ids.ids"),
        (message(request_id="x" * 129), "request_id"),
        (message(request_id="a\nb"), "request_id"),
        (message(sampling=pb.Sampling(temperature=-0.1)), "sampling.temperature"),
        (message(sampling=pb.Sampling(temperature=10.1)), "sampling.temperature"),
        (message(sampling=pb.Sampling(temperature=math.nan)), "sampling.temperature"),
        (message(sampling=pb.Sampling(temperature=math.inf)), "sampling.temperature"),
        (message(sampling=pb.Sampling(seed=-1)), "sampling.seed"),
        (message(stopping=pb.Stopping(max_tokens=-1)), "stopping.max_tokens"),
        (message(stopping=pb.Stopping(max_tokens=62)), "stopping.max_tokens"),
        (message(stopping=pb.Stopping(stop_strings=["a", ""])), "stopping.stop_strings[1]"),
        (message(stopping=pb.Stopping(stop_strings=["x" * 257])), "stopping.stop_strings[0]"),
        (message(stopping=pb.Stopping(stop_strings=["x"] * 17)), "stopping.stop_strings"),
        (message(stopping=pb.Stopping(stop_token_ids=[5] * 257)), "stopping.stop_token_ids"),
        (message(speculation=pb.Speculation(k=0)), "speculation.k"),
        (message(speculation=pb.Speculation(k=65)), "speculation.k"),
        (message(prefix_cache=pb.PrefixCache(cache_salt="x" * 257)), "prefix_cache.cache_salt"),
        (message(speculation=pb.Speculation(mode=9)), "speculation.mode"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_served_is_refused_by_its_field(
    served: Served, request_: pb.GenerateStreamRequest, field: str
) -> None:
    assert refusal(served, request_).field == field


@pytest.mark.parametrize("over", [-1, 0, 1, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused_in_every_field(served: Served, over: int) -> None:
    bad = over if over in (-1, 2**31 - 1) else served.tokenizer.vocab_size + over
    for request, field in (
        (message(ids=(5, bad)), "token_ids.ids[1]"),
        (message(stopping=pb.Stopping(stop_token_ids=[bad])), "stopping.stop_token_ids[0]"),
        (message(resumed_tokens=[bad]), "resumed_tokens[0]"),
    ):
        assert refusal(served, request).field == field


def test_the_last_id_of_the_vocabulary_is_taken(served: Served) -> None:
    last = served.tokenizer.vocab_size - 1
    assert translated(served, message(ids=(last,))).prompt == (last,)


def test_a_request_that_just_fits_the_context_is_taken(served: Served) -> None:
    exact = message(stopping=pb.Stopping(max_tokens=61))
    assert translated(served, exact).max_tokens == 61
    assert translated(served, message(ids=(5,) * 63)).max_tokens == 1
    problem = refusal(served, message(stopping=pb.Stopping(max_tokens=62))).problem
    assert all(number in problem for number in ("62", "61", "64"))


def test_a_prompt_too_long_is_refused_before_it_is_encoded(served: Served) -> None:
    class Untouchable(Tokenizer):
        def encode(self, text: str) -> tuple[int, ...]:
            raise AssertionError("encoding takes long")

    tokenizer = served.tokenizer
    guarded = Untouchable(
        tokenizer.library, tokenizer.tokens, tokenizer.special_ids, tokenizer.pieces, ()
    )
    size = served.max_context * tokenizer.max_piece_bytes + 1
    request = pb.GenerateStreamRequest(text="x" * size)
    assert refusal(replace(served, tokenizer=guarded), request).field == "text"


def test_an_unknown_role_is_refused_with_its_place(served: Served) -> None:
    turns = [
        pb.ChatMessage(role="user", content="hi"),
        pb.ChatMessage(role="wizard", content="hi"),
    ]
    error = refusal(served, pb.GenerateStreamRequest(chat=pb.Chat(messages=turns)))
    assert error.field == "chat.messages[1].role"


def test_what_the_template_refuses_is_the_clients_fault(served: Served) -> None:
    turns = [
        pb.ChatMessage(role="user", content="hi"),
        pb.ChatMessage(role="system", content="late"),
    ]
    error = refusal(served, pb.GenerateStreamRequest(chat=pb.Chat(messages=turns)))
    assert error.field == "chat.messages"
    assert "the system message comes first" in error.problem


def test_another_model_is_not_found(served: Served) -> None:
    with pytest.raises(UnknownModel, match="tiny"):
        translated(served, message(model="other"))


def test_another_revision_is_not_resumed(served: Served) -> None:
    with pytest.raises(ResumeRefused, match="r1"):
        translated(served, message(model_revision="r0"))


def test_a_tiny_temperature_is_greedy(served: Served) -> None:
    sampling = translated(served, message(sampling=pb.Sampling(temperature=1e-9))).sampling
    assert sampling.temperature == 0.0


def test_a_set_seed_of_zero_is_kept(served: Served) -> None:
    assert translated(served, message(sampling=pb.Sampling(seed=0))).sampling.seed == 0
    top = 2**63 - 1
    assert translated(served, message(sampling=pb.Sampling(seed=top))).sampling.seed == top


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (pb.SPECULATION_MODE_UNSPECIFIED, None),
        (pb.SPECULATION_MODE_OFF, Mode.OFF),
        (pb.SPECULATION_MODE_SYNC, Mode.SYNC),
        (pb.SPECULATION_MODE_ASYNC, Mode.ASYNC),
    ],
)
def test_modes_are_translated(
    served: Served, mode: pb.SpeculationMode, expected: Mode | None
) -> None:
    assert translated(served, message(speculation=pb.Speculation(mode=mode))).mode is expected


def test_resuming_needs_something_left_to_generate(served: Served) -> None:
    full = message(resumed_tokens=[30, 31], stopping=pb.Stopping(max_tokens=2))
    assert refusal(served, full).field == "resumed_tokens"
    one_left = message(resumed_tokens=[30, 31], stopping=pb.Stopping(max_tokens=3))
    assert translated(served, one_left).resumed == (30, 31)


def test_resuming_a_sampled_stream_needs_its_seed(served: Served) -> None:
    without = message(resumed_tokens=[30], sampling=pb.Sampling(temperature=1))
    assert refusal(served, without).field == "sampling.seed"
    translated(served, message(resumed_tokens=[30], sampling=pb.Sampling(temperature=1, seed=0)))


def test_an_ended_sequence_is_not_resumed(served: Served) -> None:
    end = served.tokenizer.eos_ids[0]
    assert refusal(served, message(resumed_tokens=[30, end])).field == "resumed_tokens[1]"
    going_on = message(resumed_tokens=[30, end], stopping=pb.Stopping(ignore_eos=True))
    assert translated(served, going_on).resumed == (30, end)
    letters = [id_of(served.tokenizer.library, letter) for letter in "xENDx"]
    stopped = message(resumed_tokens=letters, stopping=pb.Stopping(stop_strings=["END"]))
    assert refusal(served, stopped).field == "resumed_tokens[3]"


def test_neutral_values_cost_nothing(served: Served) -> None:
    neutral = pb.Sampling(
        top_k=-1,
        top_p=1.0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={5: 0.0},
        no_repeat_ngram=0,
    )
    request = message(sampling=neutral, stopping=pb.Stopping(min_tokens=0))
    assert translated(served, request) == translated(served, message())
    assert translated(served, request).sampling.processors == PLAIN


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (message(sampling=pb.Sampling(top_k=-2)), "sampling.top_k"),
        (message(sampling=pb.Sampling(top_p=0.0)), "sampling.top_p"),
        (message(sampling=pb.Sampling(top_p=1.1)), "sampling.top_p"),
        (message(sampling=pb.Sampling(top_p=math.nan)), "sampling.top_p"),
        (message(sampling=pb.Sampling(min_p=-0.1)), "sampling.min_p"),
        (message(sampling=pb.Sampling(min_p=math.nan)), "sampling.min_p"),
        (message(sampling=pb.Sampling(presence_penalty=2.1)), "sampling.presence_penalty"),
        (message(sampling=pb.Sampling(frequency_penalty=-2.1)), "sampling.frequency_penalty"),
        (message(sampling=pb.Sampling(repetition_penalty=0.0)), "sampling.repetition_penalty"),
        (message(sampling=pb.Sampling(repetition_penalty=math.inf)), "sampling.repetition_penalty"),
        (message(sampling=pb.Sampling(logit_bias={5: 100.5})), "sampling.logit_bias[5]"),
        (message(sampling=pb.Sampling(logit_bias={5: math.nan})), "sampling.logit_bias[5]"),
        (message(sampling=pb.Sampling(logit_bias={-1: 1.0})), "sampling.logit_bias[-1]"),
        (message(sampling=pb.Sampling(logit_bias={385: 1.0})), "sampling.logit_bias[385]"),
        (
            message(sampling=pb.Sampling(logit_bias=dict.fromkeys(range(1025), 1.0))),
            "sampling.logit_bias",
        ),
        (message(sampling=pb.Sampling(allowed_token_ids=[-1])), "sampling.allowed_token_ids[0]"),
        (message(sampling=pb.Sampling(no_repeat_ngram=1)), "sampling.no_repeat_ngram"),
        (message(sampling=pb.Sampling(no_repeat_ngram=65)), "sampling.no_repeat_ngram"),
        (message(sampling=pb.Sampling(rule=17)), "sampling.rule"),  # type: ignore[arg-type]
        (
            message(sampling=pb.Sampling(rule=pb.RULE_GREEDY, temperature=1)),
            "sampling.rule",
        ),
        (
            message(sampling=pb.Sampling(rule=pb.RULE_TYPICAL, temperature=1)),
            "sampling.rule",
        ),
        (message(stopping=pb.Stopping(min_tokens=-1)), "stopping.min_tokens"),
        (message(stopping=pb.Stopping(min_tokens=5, max_tokens=4)), "stopping.min_tokens"),
        (message(stopping=pb.Stopping(min_tokens=62)), "stopping.min_tokens"),
        (message(scoring=pb.Scoring(logprobs=21)), "scoring.logprobs"),
        (message(scoring=pb.Scoring(prompt_logprobs=-1)), "scoring.prompt_logprobs"),
        (message(scoring=pb.Scoring(processed=True)), "scoring.processed"),
        (message(n=0), "n"),
        (message(n=17), "n"),
        (message(n=2, resumed_tokens=[30]), "n"),
    ],
)
def test_how_tokens_cannot_be_chosen_is_named(
    served: Served, request_: pb.GenerateStreamRequest, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        requests_from(request_, served, DEFAULTS)
    assert caught.value.field == field


def test_ends_are_withheld_for_the_least_number_of_tokens(served: Served) -> None:
    asked = message(stopping=pb.Stopping(min_tokens=5, stop_token_ids=[30]))
    processors = translated(served, asked).sampling.processors
    assert (processors.min_tokens, processors.withheld) == (5, (*served.tokenizer.eos_ids, 30))
    only_ends = pb.Sampling(allowed_token_ids=[30])
    impossible = message(
        sampling=only_ends, stopping=pb.Stopping(min_tokens=5, stop_token_ids=[30])
    )
    assert refusal(served, impossible).field == "sampling.allowed_token_ids"


def test_nothing_is_withheld_where_nothing_ends(served: Served) -> None:
    endless = message(stopping=pb.Stopping(min_tokens=5, ignore_eos=True))
    assert translated(served, endless).sampling.processors == PLAIN


def test_every_rule_is_greedy_at_temperature_0(served: Served) -> None:
    for rule in (pb.RULE_REJECTION, pb.RULE_SAMPLED):
        cold = translated(served, message(sampling=pb.Sampling(rule=rule)))
        assert cold.sampling.rule == "match"
        warm = translated(served, message(sampling=pb.Sampling(rule=rule, temperature=1)))
        assert warm.sampling.rule == RULES[rule]


def test_a_lossy_rule_needs_the_servers_consent(served: Served) -> None:
    asked = message(sampling=pb.Sampling(rule=pb.RULE_TYPICAL, temperature=1))
    assert "allow_lossy" in refusal(served, asked).problem
    consenting = replace(served, allow_lossy=True)
    assert translated(consenting, asked).sampling.rule == "typical"


@pytest.mark.parametrize("rule", [pb.RULE_REJECTION, pb.RULE_SAMPLED])
def test_what_depends_on_guesses_is_not_resumed(served: Served, rule: pb.Rule) -> None:
    warm = pb.Sampling(rule=rule, temperature=1, seed=4)
    with pytest.raises(ResumeRefused, match="start anew"):
        translated(served, message(sampling=warm, resumed_tokens=[30]))
    cold = pb.Sampling(rule=rule)
    assert translated(served, message(sampling=cold, resumed_tokens=[30])).resumed == (30,)


def test_a_scored_prompt_is_computed_anew(served: Served) -> None:
    asked = translated(served, message(scoring=pb.Scoring(prompt_logprobs=0)))
    assert (asked.scoring, asked.prefix_cache) == (Scoring(-1, 0), False)
    nothing = translated(served, message(stopping=pb.Stopping(max_tokens=0)))
    assert nothing.max_tokens == 0


def test_choices_share_a_prompt_and_have_seeds_of_their_own(served: Served) -> None:
    asked = message(
        request_id="mine",
        n=3,
        sampling=pb.Sampling(temperature=1, seed=7),
        scoring=pb.Scoring(prompt_logprobs=1, logprobs=1),
    )
    first, second, third = requests_from(asked, served, DEFAULTS)
    assert (first.request_id, first.sampling.seed, first.parent) == ("mine", 7, "")
    assert [second.request_id, third.request_id] == ["mine#1", "mine#2"]
    assert second.parent == third.parent == "mine"
    assert len({7, second.sampling.seed, third.sampling.seed}) == 3
    assert (first.scoring.prompt, second.scoring.prompt, second.scoring.output) == (1, -1, 1)
    alone = translated(
        served, message(sampling=pb.Sampling(temperature=1, seed=second.sampling.seed))
    )
    assert alone.sampling == second.sampling


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda request, more: request.MergeFromString(more), ""),
        (lambda request, more: request.sampling.MergeFromString(more), "sampling"),
        (lambda request, more: request.stopping.MergeFromString(more), "stopping"),
        (lambda request, more: request.speculation.MergeFromString(more), "speculation"),
        (lambda request, more: request.prefix_cache.MergeFromString(more), "prefix_cache"),
        (lambda request, more: request.scoring.MergeFromString(more), "scoring"),
        (lambda request, more: request.token_ids.MergeFromString(more), "token_ids"),
    ],
)
def test_a_newer_clients_field_is_refused(
    served: Served, change: Callable[[pb.GenerateStreamRequest, bytes], object], field: str
) -> None:
    request = message()
    change(request, bytes([0x98, 0x06, 0x01]))  # field 99 as a varint
    error = refusal(served, request)
    assert error.field == field
    assert "99" in error.problem


scalars = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-3, 400))
numbers = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=300)
@given(
    prompt=st.one_of(st.text(max_size=80), st.lists(scalars, max_size=70)),
    temperature=st.none() | numbers,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | scalars,
    stops=st.lists(st.text(max_size=5), max_size=3),
    resumed=st.lists(st.integers(-1, 390), max_size=4),
    k=st.none() | scalars,
)
def test_any_request_is_sound_or_refused(
    served: Served,
    prompt: str | list[int],
    temperature: float | None,
    seed: int | None,
    max_tokens: int | None,
    stops: list[str],
    resumed: list[int],
    k: int | None,
) -> None:
    request = pb.GenerateStreamRequest(
        sampling=pb.Sampling(temperature=temperature, seed=seed),
        stopping=pb.Stopping(max_tokens=max_tokens, stop_strings=stops),
        resumed_tokens=resumed,
        speculation=pb.Speculation(k=k),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    try:
        made = translated(served, request)
    except RequestFailed:
        return
    vocab = range(served.tokenizer.vocab_size)
    assert all(id in vocab for id in (*made.prompt, *made.resumed, *made.stop_token_ids))
    assert made.prompt
    assert len(made.prompt) <= len(made.prompt) + made.max_tokens <= served.max_context
    assert not made.resumed or len(made.resumed) < made.max_tokens
    assert 0 <= made.sampling.temperature <= 10
    assert 0 <= made.sampling.seed < 2**63
    assert all(made.stop_strings)
    assert made.k is None or 1 <= made.k <= 64
