"""The target's side of a link: takes Steps, keeps page tables and committed tokens, gives Verdicts.

Invariant: between steps, `cached` rows of every sequence are those of its committed tokens and
every page is accounted for. A fault of one sequence never touches another.
"""

import time
import zlib
from collections import Counter as Tally
from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np

from protos.codec import row_hash
from protos.messages import (
    Audit,
    AuditReply,
    Counter,
    Extend,
    Held,
    Hello,
    Join,
    Joined,
    Message,
    PromptScores,
    Step,
    StepClose,
    StepOpen,
    Stepped,
    Verdict,
)
from protos.worker import ProtocolError
from target_workers.acceptance import depths, tree_error
from target_workers.drawn import Drawn
from target_workers.model.chooser import Choosers
from target_workers.pages import Pages, Slots
from target_workers.peers import ALONE, Peers
from target_workers.prefix_cache import Prefix
from target_workers.runner import Forward, Job, Runner
from target_workers.sequence import Sequence


class TargetEngine:
    """An Engine over one model; `hello` says what it is and bounds what it takes."""

    def __init__(
        self,
        hello: Hello,
        forward: Forward,
        choosers: Choosers,
        clock: Callable[[], float] = time.perf_counter,
        peers: Peers = ALONE,
    ) -> None:
        self._hello = hello
        self._forward = forward
        self._clock = clock
        self._peers = peers
        self._choosers = choosers
        self._counts: Tally[str] = Tally()
        self._runner = Runner(forward, self._counts)
        self._cores = 0
        self.reset()

    def hello(self) -> Hello:
        return self._hello

    def reset(self) -> None:
        self._peers.leave()
        self._pages = Pages(self._hello.num_pages, self._hello.page_size)
        self._sequences: dict[int, Sequence] = {}
        self._last_step = -1
        self._rested = self._clock()

    def work(self) -> list[Message] | None:
        return None

    def handle(self, message: Message) -> list[Message]:
        match message:
            case Step():
                stepped = self._step(message)
                self._peers.answered(stepped)
                return [stepped] if self._peers.is_first else []
            case Audit():
                return [self._audit(message)]
            case Join():
                self._peers.join(message)
                return [Joined(message.generation)]
        raise ProtocolError(f"a target takes no {type(message).__name__}")

    def _step(self, step: Step) -> Stepped:
        idle_s = self._clock() - self._rested
        self._check(step)
        for closed in step.closes:
            self._close(closed)
        extended = {extend.seq for extend in step.extends}
        found = tuple(self._open(o, is_alone=o.seq not in extended) for o in step.opens)
        errors = {extend.seq: self._error(extend) for extend in step.extends}
        sound = [extend for extend in step.extends if not errors[extend.seq]]
        self._keep([(extend.seq, extend.keep) for extend in sound])
        for extend in sound:
            errors[extend.seq] = self._allocate(extend)
        fitting = [extend for extend in sound if not errors[extend.seq]]
        started = self._clock()
        self._peers.agree(step.step, step.row_hash, len(fitting), self._pages.free)
        verdicts, prompts = self._compute(fitting)
        self._rested = self._clock()
        verdicts |= {e.seq: _failed(e, errors[e.seq]) for e in step.extends if errors[e.seq]}
        self._counts.update(steps=1, errors=sum(bool(v.error) for v in verdicts.values()))
        if not self._sequences:
            self._pages.check_idle()
        return Stepped(
            step.step,
            tuple(verdicts[e.seq] for e in step.extends if e.seq in verdicts),
            found,
            self._pages.free,
            forward_s=self._rested - started,
            idle_s=idle_s,
            prompts=prompts,
        )

    def _check(self, step: Step) -> None:
        """Refuse a step that this shard must not compute, before anything is changed."""
        if step.row_hash != row_hash(step.opens, step.extends, step.closes):
            raise ProtocolError(f"step {step.step}: its rows do not match their hash")
        if step.step <= self._last_step:
            raise ProtocolError(f"step {step.step} after step {self._last_step}")
        if len({e.seq for e in step.extends}) < len(step.extends):
            raise ProtocolError(f"step {step.step}: two Extends of one sequence")
        rows = sum(len(e.tokens) + len(e.nodes) for e in step.extends)
        if rows > self._hello.max_rows:
            raise ProtocolError(f"step {step.step}: {rows} rows, {self._hello.max_rows} allowed")
        self._last_step = step.step
        if step.cores > 0 and step.cores != self._cores:
            self._forward.set_cores(step.cores)
            self._cores = step.cores

    def _open(self, opened: StepOpen, *, is_alone: bool) -> int:
        """Know a sequence; how many of its tokens are cached. One that comes with an Extend takes
        nothing from the cache nor a parent: its Extend starts at 0."""
        if opened.seq in self._sequences:
            raise ProtocolError(f"sequence {opened.seq} is open already")
        size = self._hello.page_size
        prefix = Prefix(opened.cache_salt, size) if opened.prefix_cache else None
        chooser = self._choosers.open(opened.sampling, opened.tokens, opened.scoring)
        seq = Sequence(chooser, list(opened.tokens), prefix)
        self._sequences[opened.seq] = seq
        keys = seq.wanted_keys() if is_alone else ()
        seq.cached = self._pages.open(opened.seq, keys) * size
        if is_alone:
            self._fork(opened.seq, opened.parent)
        self._counts.update(opened=len(opened.tokens), found=seq.cached)
        return seq.cached

    def _fork(self, id_: int, parent: int) -> None:
        """Go on from the cached rows with those that a parent, if it is open, has in common."""
        seq, other = self._sequences[id_], self._sequences.get(parent)
        rows = 0 if other is None else seq.common_rows(other)
        if rows > seq.cached:
            seq.cached, source, target = self._pages.fork(id_, parent, rows)
            if len(source):
                self._forward.move(source, target)

    def _close(self, closed: StepClose) -> None:
        seq = self._sequences.get(closed.seq)
        if seq is None:
            raise ProtocolError(f"sequence {closed.seq} is not open")
        if error := seq.keep_error(closed.keep):
            raise ProtocolError(f"closing sequence {closed.seq}: {error}")
        self._keep([(closed.seq, closed.keep)])
        self._share(closed.seq)
        self._pages.close(closed.seq)
        del self._sequences[closed.seq]

    def _share(self, seq: int) -> None:
        """Let others find the whole pages of committed tokens of a sequence."""
        self._pages.enter(seq, self._sequences[seq].whole_keys())

    def _error(self, extend: Extend) -> str:
        """Why an Extend cannot be computed; nothing if it can. Changes nothing."""
        seq = self._sequences.get(extend.seq)
        if seq is None:
            return "the sequence is not open"
        return (
            seq.chooser.error
            or seq.keep_error(extend.keep)
            or seq.tokens_error(extend)
            or tree_error(extend.nodes)
            or self._limit_error(extend)
        )

    def _limit_error(self, extend: Extend) -> str:
        tokens = (*extend.tokens, *(node.token for node in extend.nodes))
        if not all(0 <= token < self._hello.vocab_size for token in tokens):
            return f"a token is outside the vocabulary of {self._hello.vocab_size}"
        end = extend.start + len(extend.tokens)
        reached = end + max(depths(extend.nodes), default=-1) + 1
        if reached > self._hello.max_context:
            return f"{reached} positions exceed the context of {self._hello.max_context}"
        return ""

    def _keep(self, kept: Items[tuple[int, Items[int]]]) -> None:
        """Move the rows of kept nodes to their positions and free what lies beyond them."""
        source: list[Slots] = []
        target: list[Slots] = []
        for id_, keep in kept:
            seq = self._sequences[id_]
            slots = self._pages.slots(id_)[seq.cached :]
            moved = [(i, to) for to, i in enumerate(keep) if i != to]
            if moved:
                source.append(slots[[i for i, _ in moved]])
                target.append(slots[[to for _, to in moved]])
            seq.keep(len(keep))
            self._pages.trim(id_, seq.cached)
        if source:
            self._forward.move(np.concatenate(source), np.concatenate(target))

    def _allocate(self, extend: Extend) -> str:
        """Make room for all rows of an Extend; why there is none."""
        rows = extend.start + len(extend.tokens) + len(extend.nodes)
        if self._pages.grow(extend.seq, rows):
            return ""
        return f"out of pages: {rows} rows do not fit, {self._pages.free} pages are free"

    def _compute(
        self, extends: Items[Extend]
    ) -> tuple[dict[int, Verdict], tuple[PromptScores, ...]]:
        """Verdicts of those Extends that reach the end of the committed tokens, or fail; scores."""
        jobs = []
        for extend in extends:
            seq = self._sequences[extend.seq]
            decides = seq.chooser if seq.extend(extend) else None
            slots, best = self._pages.slots(extend.seq), seq.chooser.scoring.prompt
            jobs.append(Job(extend, slots, decides, seq.unscored(extend), best))
        drawn = self._runner.run(jobs) if jobs else []
        verdicts = {
            job.extend.seq: self._decide(job.extend, result)
            for job, result in zip(jobs, drawn, strict=True)
            if job.decides is not None or result.error
        }
        for extend in extends:
            self._share(extend.seq)
        scored = zip(extends, drawn, strict=True)
        prompts = (PromptScores(e.seq, e.start + 1, d.prompt) for e, d in scored if d.prompt)
        return verdicts, tuple(prompts)

    def _decide(self, extend: Extend, drawn: Drawn) -> Verdict:
        """Commit what one Extend led to."""
        seq = self._sequences[extend.seq]
        if drawn.error:
            seq.prefix, seq.sound = None, False  # nobody else shall compute with these rows
            return _failed(extend, drawn.error)
        seq.commit(drawn.walk, drawn.next_token)
        self._counts.update(verdicts=1, nodes=len(extend.nodes), accepted=len(drawn.walk))
        end = extend.start + len(extend.tokens)
        return Verdict(extend.seq, end, drawn.walk, drawn.next_token, drawn.scores)

    def _audit(self, audit: Audit) -> AuditReply:
        self._pages.check()
        self._pages.check_rows({seq: state.cached for seq, state in self._sequences.items()})
        held = tuple(
            Held(seq, state.cached, self._pages.held(seq))
            for seq, state in sorted(self._sequences.items())
        )
        counts = {**self._counts, **self._peers.counts}
        counters = tuple(Counter(name, value) for name, value in sorted(counts.items()))
        pages = self._pages
        unused = pages.free - pages.cached
        return AuditReply(
            audit.nonce,
            pages.total,
            unused,
            pages.cached,
            held,
            counters,
            pages.shared,
            tables_hash=zlib.crc32(b"".join(pages.slots(seq.seq).tobytes() for seq in held)),
        )


def _failed(extend: Extend, error: str) -> Verdict:
    return Verdict(extend.seq, extend.start + len(extend.tokens), (), -1, error=error)
