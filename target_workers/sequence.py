"""One sequence as the target knows it: what is committed, what is cached, what was guessed last."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from protos.messages import Extend, TreeNode
from target_workers.acceptance import is_path
from target_workers.model.chooser import Chooser
from target_workers.prefix_cache import Prefix


@dataclass(slots=True)
class Sequence:
    """`tokens` are committed, the first `cached` of them in the cache.

    `nodes` are the guesses of the last Extend; node i is in row `cached + i` until some are kept.
    Without a `prefix` no page is shared with other sequences, but for those that name it as their
    parent; from one that is not `sound` nobody takes anything.
    """

    chooser: Chooser
    tokens: list[int]
    prefix: Prefix | None = None
    cached: int = 0
    nodes: tuple[TreeNode, ...] = ()
    sound: bool = True

    def wanted_keys(self) -> Iterator[bytes]:
        """The keys of pages to look for; the last committed token is always computed."""
        if self.prefix is not None:
            for page in range((len(self.tokens) - 1) // self.prefix.page_size):
                yield self.prefix.key(self.tokens, page)

    def common_rows(self, other: "Sequence") -> int:
        """How many rows of another hold what this one needs; the last token is always computed."""
        most = min(other.cached, len(self.tokens) - 1) if other.sound else 0
        return next((i for i in range(most) if self.tokens[i] != other.tokens[i]), most)

    def whole_keys(self) -> Items[bytes]:
        """The keys of all pages whose rows are committed, cached and in place."""
        if self.prefix is None or self.cached < self.prefix.page_size:
            return ()
        pages = self.cached // self.prefix.page_size
        self.prefix.key(self.tokens, pages - 1)
        return self.prefix.keys[:pages]

    def keep_error(self, keep: Items[int]) -> str:
        """Why these nodes cannot have become committed; nothing if they can."""
        if not is_path(self.nodes, keep):
            return f"keep {keep} is no path of the last nodes"
        committed = self.tokens[self.cached : self.cached + len(keep)]
        if [self.nodes[i].token for i in keep] != committed:
            return f"keep {keep} is not what became committed"
        return ""

    def tokens_error(self, extend: Extend) -> str:
        """Why an Extend does not go on from the cached rows with committed tokens."""
        start = self.cached + len(extend.keep)
        if extend.start != start:
            return f"the Extend starts at {extend.start}, {start} rows are cached"
        end = start + len(extend.tokens)
        if not extend.tokens or list(extend.tokens) != self.tokens[start:end]:
            return f"the tokens from {start} are not those committed"
        if extend.nodes and end < len(self.tokens):
            return f"nodes under position {end - 1} of {len(self.tokens)} committed ones"
        return ""

    def keep(self, count: int) -> None:
        """`count` of the last nodes are now in the rows of their positions, the others gone."""
        self.cached += count
        self.nodes = ()

    def extend(self, extend: Extend) -> bool:
        """The rows of an Extend are cached; True if it reaches the end of the committed tokens."""
        self.cached = extend.start + len(extend.tokens)
        self.nodes = extend.nodes
        return self.cached == len(self.tokens)

    def unscored(self, extend: Extend) -> tuple[int, ...]:
        """The prompt tokens after the rows of an Extend, if they are to be scored."""
        if self.chooser.scoring.prompt < 0:
            return ()
        end = extend.start + len(extend.tokens)
        last = min(end + 1, self.chooser.sampling.prompt_tokens)
        return tuple(self.tokens[extend.start + 1 : last])

    def commit(self, walk: Items[int], next_token: int) -> None:
        """Append what the last nodes led to."""
        tokens = [*(self.nodes[i].token for i in walk), next_token]
        self.tokens.extend(tokens)
        self.chooser.commit(tokens)
