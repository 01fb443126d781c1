"""How tokens are chosen, from protobuf: every field checked, every refusal named."""

import hashlib
from collections.abc import Iterable, Sequence

from protos.paceline.v1 import generation_pb2 as pb
from protos.sampling import Bias, Processors, Sampling, Scoring
from services.errors import InvalidRequest
from services.tokenizer import Tokenizer

MAX_TEMPERATURE = 10.0
GREEDY_BELOW = 1e-5  # a temperature below this divides scores past float32; it is taken as 0
MAX_PENALTY = 2.0
MAX_REPETITION = 10.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_ALLOWED = 65536
MAX_NGRAM = 64  # the worker remembers so many tokens at every position
MAX_LOGPROBS = 20
MAX_CHOICES = 16

RULES = {
    pb.RULE_UNSPECIFIED: "match",
    pb.RULE_GREEDY: "match",
    pb.RULE_MATCH: "match",
    pb.RULE_REJECTION: "rejection",
    pb.RULE_SAMPLED: "sampled",
    pb.RULE_TYPICAL: "typical",
}


def sampling_of(
    sampling: pb.Sampling, default_seed: int, prompt_tokens: int, processors: Processors
) -> Sampling:
    """What a worker is told. Raises InvalidRequest."""
    temperature = sampling.temperature
    _check_range("temperature", temperature, 0, MAX_TEMPERATURE)
    if sampling.seed < 0:
        raise InvalidRequest("sampling.seed", f"must be in [0, 2^63), is {sampling.seed}")
    if temperature < GREEDY_BELOW:
        temperature = 0.0
    if sampling.rule not in RULES:
        raise InvalidRequest("sampling.rule", f"is {sampling.rule}, which is no rule")
    if sampling.rule == pb.RULE_GREEDY and temperature > 0:
        raise InvalidRequest(
            "sampling.rule", f"is greedy, at temperature {temperature}; leave one of them out"
        )
    return Sampling(
        temperature=temperature,
        seed=sampling.seed if sampling.HasField("seed") else default_seed,
        rule=RULES[sampling.rule] if temperature > 0 else "match",
        processors=processors,
        prompt_tokens=prompt_tokens,
    )


def processors_of(
    sampling: pb.Sampling, min_tokens: int, ends: Sequence[int], tokenizer: Tokenizer
) -> Processors:
    """What is done to the scores; `ends` are withheld for `min_tokens`. Raises InvalidRequest.

    Whatever changes nothing is left out, so that such a request costs nothing.
    """
    processors = Processors(
        repetition_penalty=_repetition(sampling),
        presence_penalty=_penalty("presence_penalty", sampling.presence_penalty),
        frequency_penalty=_penalty("frequency_penalty", sampling.frequency_penalty),
        bias=_bias(sampling, tokenizer),
        allowed=_allowed(sampling, tokenizer),
        withheld=tuple(ends) if min_tokens else (),
        min_tokens=min_tokens if ends else 0,
        no_repeat_ngram=_ngram(sampling),
        top_k=_top_k(sampling),
        top_p=_share("top_p", sampling.top_p, above=0) if sampling.HasField("top_p") else 1.0,
        min_p=_share("min_p", sampling.min_p),
    )
    if min_tokens and processors.allowed and set(processors.allowed) <= set(ends):
        raise InvalidRequest(
            "sampling.allowed_token_ids",
            f"are all end tokens, which stopping.min_tokens of {min_tokens} withholds",
        )
    return processors


def scoring_of(scoring: pb.Scoring) -> Scoring:
    """Which log-probabilities are told. Raises InvalidRequest."""
    for name in ("logprobs", "prompt_logprobs"):
        if not 0 <= getattr(scoring, name) <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"scoring.{name}", f"must be in [0, {MAX_LOGPROBS}], is {getattr(scoring, name)}"
            )
    if scoring.processed and not scoring.HasField("logprobs"):
        raise InvalidRequest("scoring.processed", "is of logprobs, which are not asked for")
    return Scoring(
        scoring.logprobs if scoring.HasField("logprobs") else -1,
        scoring.prompt_logprobs if scoring.HasField("prompt_logprobs") else -1,
        scoring.processed,
    )


def choices_of(message: pb.GenerateStreamRequest) -> int:
    """How many completions are asked for. Raises InvalidRequest."""
    if not message.HasField("n"):
        return 1
    if not 1 <= message.n <= MAX_CHOICES:
        raise InvalidRequest("n", f"must be 1 to {MAX_CHOICES}, is {message.n}")
    if message.n > 1 and message.resumed_tokens:
        raise InvalidRequest(
            "n", "must be 1 to resume; ask for each choice by itself, with its seed"
        )
    return message.n


def choice_seed(seed: int, choice: int) -> int:
    """Choice 0 has the request's own seed, the others have seeds of their own: in [0, 2^63)."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def checked_ids(ids: Iterable[int], field: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Token ids of the vocabulary. Raises InvalidRequest naming the first that is none."""
    checked = tuple(ids)
    for i, id in enumerate(checked):
        if not 0 <= id < tokenizer.vocab_size:
            raise InvalidRequest(
                f"{field}[{i}]", f"is {id}; token ids go from 0 to {tokenizer.vocab_size - 1}"
            )
    return checked


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # NaN is in no range
        raise InvalidRequest(f"sampling.{name}", f"must be in [{least:g}, {most:g}], is {value}")


def _penalty(name: str, value: float) -> float:
    _check_range(name, value, -MAX_PENALTY, MAX_PENALTY)
    return value


def _repetition(sampling: pb.Sampling) -> float:
    if not sampling.HasField("repetition_penalty"):
        return 1.0
    if not 0 < sampling.repetition_penalty <= MAX_REPETITION:
        raise InvalidRequest(
            "sampling.repetition_penalty",
            f"must be in (0, {MAX_REPETITION:g}], is {sampling.repetition_penalty}",
        )
    return sampling.repetition_penalty


def _bias(sampling: pb.Sampling, tokenizer: Tokenizer) -> tuple[Bias, ...]:
    field = "sampling.logit_bias"
    if len(sampling.logit_bias) > MAX_BIASES:
        raise InvalidRequest(field, f"may have at most {MAX_BIASES} entries")
    for id, value in sampling.logit_bias.items():
        if not 0 <= id < tokenizer.vocab_size:
            raise InvalidRequest(
                f"{field}[{id}]", f"is of no token; ids go from 0 to {tokenizer.vocab_size - 1}"
            )
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise InvalidRequest(
                f"{field}[{id}]", f"must be in [{-MAX_BIAS:g}, {MAX_BIAS:g}], is {value}"
            )
    return tuple(Bias(id, value) for id, value in sorted(sampling.logit_bias.items()) if value)


def _allowed(sampling: pb.Sampling, tokenizer: Tokenizer) -> tuple[int, ...]:
    field = "sampling.allowed_token_ids"
    if len(sampling.allowed_token_ids) > MAX_ALLOWED:
        raise InvalidRequest(field, f"may have at most {MAX_ALLOWED} entries")
    return tuple(sorted(set(checked_ids(sampling.allowed_token_ids, field, tokenizer))))


def _ngram(sampling: pb.Sampling) -> int:
    size = sampling.no_repeat_ngram
    if size != 0 and not 2 <= size <= MAX_NGRAM:
        raise InvalidRequest(
            "sampling.no_repeat_ngram", f"must be 0 or 2 to {MAX_NGRAM}, is {size}"
        )
    return size


def _top_k(sampling: pb.Sampling) -> int:
    if sampling.top_k < -1:
        raise InvalidRequest(
            "sampling.top_k", f"must be 0 or -1 (off) or at least 1, is {sampling.top_k}"
        )
    return max(0, sampling.top_k)


def _share(name: str, value: float, above: float = -1.0) -> float:
    if not (0 <= value <= 1 and value > above):
        least = "(0" if above == 0 else "[0"
        raise InvalidRequest(f"sampling.{name}", f"must be in {least}, 1], is {value}")
    return value
