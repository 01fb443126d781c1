"""The least orchestrator that can drive a target and a drafter, step by step, for their tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protos.codec import row_hash
from protos.draft_tree import DraftTree, Ids, Node
from protos.messages import (
    Advance,
    Audit,
    AuditReply,
    Close,
    Extend,
    Grow,
    Message,
    Open,
    Step,
    StepClose,
    StepOpen,
    Stepped,
    TreeNode,
    Verdict,
)
from protos.sampling import GREEDY, Sampling
from protos.worker import Engine

SOURCE = "drafter"


def step(
    number: int,
    opens: Sequence[StepOpen] = (),
    extends: Sequence[Extend] = (),
    closes: Sequence[StepClose] = (),
    cores: int = 0,
) -> Step:
    """A Step with the hash of its parts."""
    parts = (tuple(opens), tuple(extends), tuple(closes))
    return Step(number, row_hash(*parts), *parts, cores)


def audit(engine: Engine) -> AuditReply:
    """What a worker holds; asserts that it is all accounted for."""
    (reply,) = engine.handle(Audit(7))
    assert isinstance(reply, AuditReply)
    assert reply.nonce == 7
    used = sum(held.pages for held in reply.held) - reply.shared_pages
    assert reply.free_pages + reply.cached_pages + used == reply.total_pages
    return reply


def counts(engine: Engine) -> dict[str, int]:
    """A worker's counters by name."""
    return {counter.name: counter.value for counter in audit(engine).counters}


@dataclass(slots=True)
class Line:
    """One sequence as the orchestrator sees it; `proposed` and `accepted` count by round."""

    seq: int
    tokens: list[int]
    sampling: Sampling
    tree: DraftTree
    prompt: int
    ids: Ids = field(default_factory=lambda: Ids(SOURCE, memory=1000))
    opened: bool = False
    cached: int = 0
    keep: tuple[int, ...] = ()
    nodes: tuple[TreeNode, ...] = ()
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


class Duo:
    """Sequences on one target and perhaps one drafter; `k` nodes a round, best chain or tree."""

    def __init__(
        self, target: Engine, drafter: Engine | None = None, k: int = 4, shape: str = "chain"
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.k = k
        self.shape = shape
        self.credit = 32
        self.lines: dict[int, Line] = {}
        self._step = 0

    def open(self, seq: int, prompt: Sequence[int], sampling: Sampling = GREEDY) -> Line:
        """A new sequence, at the drafter at once and at the target with its first round."""
        tokens = list(prompt)
        line = Line(seq, tokens, sampling, DraftTree(len(tokens)), len(tokens))
        self.lines[seq] = line
        if self.drafter is not None:
            self.drafter.handle(Open(seq, 1, tuple(prompt), sampling, self.credit))
        return line

    def close(self, seq: int) -> None:
        """End a sequence at both."""
        line = self.lines.pop(seq)
        if line.opened:
            self._send(step(self._next(), closes=[StepClose(seq, line.keep)]))
        if self.drafter is not None:
            self.drafter.handle(Close(seq, 1))

    def draft(self, forwards: int = 1000) -> int:
        """Let the drafter work until it has nothing to do; the forwards it took."""
        for done in range(forwards):
            answers = None if self.drafter is None else self.drafter.work()
            if answers is None:
                return done
            self.take(answers)
        return forwards

    def take(self, answers: Sequence[Message]) -> None:
        """Walk what the drafter grew into the mirrors."""
        for message in answers:
            if isinstance(message, Grow):
                line = self.lines[message.seq]
                for guess in message.nodes:
                    line.ids.place(line.tree, line.tokens, message.frontier, guess)

    def round(self, seqs: Sequence[int] | None = None, k: int | None = None) -> list[Verdict]:
        """One step over these sequences: what is not cached yet, and up to k nodes each."""
        lines = [self.lines[seq] for seq in (self.lines if seqs is None else seqs)]
        opens = [StepOpen(i.seq, tuple(i.tokens), i.sampling) for i in lines if not i.opened]
        for line in lines:
            line.opened = True
            line.nodes = self._select(line.tree, self.k if k is None else k)
        extends = [
            Extend(i.seq, i.cached, tuple(i.tokens[i.cached :]), i.nodes, i.keep) for i in lines
        ]
        stepped = self._send(step(self._next(), opens, extends))
        for verdict in stepped.verdicts:
            self._commit(self.lines[verdict.seq], verdict)
        return list(stepped.verdicts)

    def _commit(self, line: Line, verdict: Verdict) -> None:
        if verdict.error:
            line.errors.append(verdict.error)
            return
        start = len(line.tokens)
        assert verdict.start == start, "a verdict decides the next token"
        tokens = (*(line.nodes[i].token for i in verdict.walk), verdict.next_token)
        line.keep = verdict.walk
        line.cached = start + len(verdict.walk)
        line.proposed.append(len(line.nodes))
        line.accepted.append(len(verdict.walk))
        line.tokens.extend(tokens)
        line.tree.advance(tokens)
        line.ids.reconcile(line.tree)
        if self.drafter is not None:
            self.take(self.drafter.handle(Advance(line.seq, 1, start, tokens, self.credit)))

    def _select(self, tree: DraftTree, k: int) -> tuple[TreeNode, ...]:
        """Level by level, the likelier children first; of a chain the likeliest only."""
        found: list[TreeNode] = []
        level: list[tuple[int, Node]] = [(-1, child) for child in _best(tree.children)]
        while level:
            below: list[tuple[int, Node]] = []
            for parent, node in level[:1] if self.shape == "chain" else level:
                if len(found) == k:
                    return tuple(found)
                below.extend((len(found), child) for child in _best(node.children))
                found.append(TreeNode(parent, node.token))
            level = below
        return tuple(found)

    def _next(self) -> int:
        self._step += 1
        return self._step

    def _send(self, message: Step) -> Stepped:
        (stepped,) = self.target.handle(message)
        assert isinstance(stepped, Stepped)
        assert stepped.step == message.step
        return stepped


def _best(children: Mapping[int, Node]) -> list[Node]:
    return sorted(children.values(), key=lambda node: -node.scores[SOURCE])
