"""What a client is told: the updates of its choices as the events of one response stream."""

import hashlib
from collections.abc import Iterable, Sequence

from orchestrator.request import (
    Delta,
    Finished,
    FinishReason,
    PromptScored,
    Refused,
    Request,
    Stats,
    Update,
)
from protos.paceline.v1 import generation_pb2 as pb
from protos.sampling import Sampling, Score
from services import errors
from services.text import open_text
from services.translate import Served

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_RULES = {
    "match": pb.RULE_MATCH,
    "rejection": pb.RULE_REJECTION,
    "sampled": pb.RULE_SAMPLED,
    "typical": pb.RULE_TYPICAL,
}


class Answers:
    """The events of one response stream: `started` before all others, then each choice's own."""

    def __init__(self, requests: Sequence[Request], served: Served, *, keep_stop: bool) -> None:
        self._requests = requests
        self._served = served
        self._choices = [
            _Answer(i, request, served, keep_stop=keep_stop) for i, request in enumerate(requests)
        ]
        self._begun = False

    def events(self, choice: int, update: Update) -> list[pb.GenerateStreamResponse]:
        """What a choice's update becomes. Raises RequestFailed if it ends the stream."""
        if isinstance(update, Refused):
            raise errors.of_refusal(update)
        first = [] if self._begun else [started(self._requests, self._served)]
        self._begun = True
        return [*first, *self._choices[choice].events(update)]


class _Answer:
    """One choice's events; text, ids and scores always go together."""

    def __init__(self, choice: int, request: Request, served: Served, *, keep_stop: bool) -> None:
        self._choice = choice
        self._request = request
        self._text = open_text(served.tokenizer, request, keep_stop=keep_stop)
        self._sent_tokens = 0

    def events(self, update: Delta | PromptScored | Finished) -> list[pb.GenerateStreamResponse]:
        match update:
            case Delta():
                return [self._more(update)]
            case PromptScored():
                return [_prompt_scores(update)]
            case Finished():
                return self._end(update)

    def _more(self, update: Delta) -> pb.GenerateStreamResponse:
        texts = []
        for token in update.tokens:
            self._text.push(token)
            texts.append(self._text.release())
        self._sent_tokens += len(update.tokens)
        return self._delta("".join(texts), update.tokens, update.scores)

    def _end(self, update: Finished) -> list[pb.GenerateStreamResponse]:
        failure = errors.of_finish(update)
        if failure is not None:
            raise failure
        rest = self._text.finish()
        last = finished(self._choice, update, len(self._request.prompt), self._sent_tokens)
        return [self._delta(rest), last] if rest else [last]

    def _delta(
        self, text: str, tokens: Sequence[int] = (), scores: Sequence[Score] = ()
    ) -> pb.GenerateStreamResponse:
        told = pb.Delta(
            text=text, token_ids=tokens, scores=map(_score, scores), choice=self._choice
        )
        return pb.GenerateStreamResponse(delta=told)


def started(requests: Sequence[Request], served: Served) -> pb.GenerateStreamResponse:
    """The first event: what applies, defaults filled in."""
    first = requests[0]
    return pb.GenerateStreamResponse(
        started=pb.Started(
            request_id=first.request_id,
            model=served.name,
            model_revision=served.revision,
            sampling=_sampling(first.sampling),
            rule=_rule(first.sampling),
            prompt_tokens=len(first.prompt),
            prompt_hash=prompt_hash(first.prompt),
            max_tokens=first.max_tokens,
            choice_seeds=[request.sampling.seed for request in requests],
        )
    )


def _rule(sampling: Sampling) -> pb.Rule:
    return _RULES[sampling.rule] if sampling.temperature > 0 else pb.RULE_GREEDY


def _sampling(sampling: Sampling) -> pb.Sampling:
    asked = sampling.processors
    return pb.Sampling(
        temperature=sampling.temperature,
        seed=sampling.seed,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias={bias.token: bias.value for bias in asked.bias},
        allowed_token_ids=asked.allowed,
        no_repeat_ngram=asked.no_repeat_ngram,
        rule=_rule(sampling),
    )


def _score(score: Score) -> pb.TokenScore:
    return pb.TokenScore(
        logprob=score.logprob, top_ids=score.best, top_logprobs=score.best_logprobs
    )


def _prompt_scores(update: PromptScored) -> pb.GenerateStreamResponse:
    told = pb.PromptScores(start=update.start, scores=map(_score, update.scores))
    return pb.GenerateStreamResponse(prompt_scores=told)


def finished(
    choice: int, update: Finished, prompt_tokens: int, sent_tokens: int
) -> pb.GenerateStreamResponse:
    """The last event of a choice that is complete."""
    return pb.GenerateStreamResponse(
        finished=pb.Finished(
            reason=_REASONS[update.reason],
            usage=pb.Usage(
                prompt_tokens=prompt_tokens,
                completion_tokens=sent_tokens,
                cached_tokens=update.stats.cached,
            ),
            speculation=_speculation_stats(update.stats),
            degraded=update.stats.degraded,
            queue_s=update.stats.wait_s,
            choice=choice,
        )
    )


def prompt_hash(prompt: Iterable[int]) -> str:
    """SHA-256 in hex over the ids as little-endian 32-bit integers."""
    return hashlib.sha256(b"".join(id.to_bytes(4, "little") for id in prompt)).hexdigest()


def _speculation_stats(stats: Stats) -> pb.SpeculationStats:
    message = pb.SpeculationStats(
        num_spec_steps=stats.rounds,
        num_draft_tokens=stats.drafted,
        num_accepted_draft_tokens=stats.accepted,
        acceptance_histogram=stats.histogram,
        num_hits=stats.hits,
    )
    if stats.rounds > 0:
        message.mean_acceptance_length = 1 + stats.accepted / stats.rounds
        message.hit_rate = stats.hits / stats.rounds
    if stats.drafted > 0:
        message.draft_acceptance_rate = stats.accepted / stats.drafted
    return message
