"""What a client is told: one request's updates as the events of its response stream."""

import hashlib
from collections.abc import Iterable, Sequence

from orchestrator.request import Delta, Finished, FinishReason, Refused, Request, Stats, Update
from protos.paceline.v1 import generation_pb2 as pb
from services import errors
from services.text import open_text
from services.translate import Served

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


class Answer:
    """One request's events, `started` before all others; text and ids always go together."""

    def __init__(self, request: Request, served: Served, *, keep_stop: bool) -> None:
        self._request = request
        self._served = served
        self._text = open_text(served.tokenizer, request, keep_stop=keep_stop)
        self._begun = False
        self._sent_tokens = 0

    def events(self, update: Update) -> list[pb.GenerateStreamResponse]:
        """What an update becomes. Raises RequestFailed if it ends the stream with an error."""
        if isinstance(update, Refused):
            raise errors.of_refusal(update)
        first = [] if self._begun else [started(self._request, self._served)]
        self._begun = True
        if isinstance(update, Delta):
            return [*first, self._more(update.tokens)]
        return [*first, *self._end(update)]

    def _more(self, tokens: Sequence[int]) -> pb.GenerateStreamResponse:
        texts = []
        for token in tokens:
            self._text.push(token)
            texts.append(self._text.release())
        self._sent_tokens += len(tokens)
        return delta("".join(texts), tokens)

    def _end(self, update: Finished) -> list[pb.GenerateStreamResponse]:
        failure = errors.of_finish(update)
        if failure is not None:
            raise failure
        rest = self._text.finish()
        last = finished(update, len(self._request.prompt), self._sent_tokens)
        return [delta(rest, ()), last] if rest else [last]


def started(request: Request, served: Served) -> pb.GenerateStreamResponse:
    """The first event: what applies, defaults filled in."""
    sampling = request.sampling
    return pb.GenerateStreamResponse(
        started=pb.Started(
            request_id=request.request_id,
            model=served.name,
            model_revision=served.revision,
            sampling=pb.Sampling(temperature=sampling.temperature, seed=sampling.seed),
            rule=pb.RULE_MATCH if sampling.temperature > 0 else pb.RULE_GREEDY,
            prompt_tokens=len(request.prompt),
            prompt_hash=prompt_hash(request.prompt),
            max_tokens=request.max_tokens,
        )
    )


def delta(text: str, tokens: Sequence[int]) -> pb.GenerateStreamResponse:
    """More output."""
    return pb.GenerateStreamResponse(delta=pb.Delta(text=text, token_ids=tokens))


def finished(update: Finished, prompt_tokens: int, sent_tokens: int) -> pb.GenerateStreamResponse:
    """The last event of a completion that is complete."""
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
