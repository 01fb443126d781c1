"""What an Extend led to. Pure: by rule `match` a guess stands if it is the target's own token."""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.sampling import Score
from target_workers.acceptance import walk
from target_workers.rows import Block


@dataclass(frozen=True, slots=True)
class Drawn:
    """The nodes that stand and the target's own token after them, or why there is none.

    `scores` are of these tokens, `prompt` of the prompt's, where they are asked for.
    """

    walk: tuple[int, ...] = ()
    next_token: int = -1
    error: str = ""
    scores: tuple[Score, ...] = ()
    prompt: tuple[Score, ...] = ()


@dataclass(frozen=True, slots=True)
class Decided:
    """What each block of draws led to, and the scores of each prompt's tokens."""

    drawn: Sequence[Drawn]
    prompts: Sequence[tuple[Score, ...]] = ()


def by_match(block: Block, tokens: Sequence[int], is_sound: Sequence[bool]) -> Drawn:
    """Down the tree by the target's own tokens, one for each row of the block, -1 for none."""
    path, next_token = walk(block.extend.nodes, tokens)
    return checked(block, Drawn(path, next_token), tokens, is_sound)


def checked(block: Block, drawn: Drawn, tokens: Sequence[int], is_sound: Sequence[bool]) -> Drawn:
    """The same, or why there is none: `is_sound` says of which rows the model's logits are finite.

    Only what lies on the path counts: what a guess off it gives is nobody's token.
    """
    for depth, i in enumerate((-1, *drawn.walk)):
        position = block.end - 1 + depth
        if not is_sound[1 + i]:
            return Drawn(error=f"the logits at position {position} are not finite")
        if tokens[1 + i] < 0:
            return Drawn(
                error=f"no token can follow position {position}: what the request allows excludes "
                "all of them; allow more"
            )
    return drawn


PACKED = 2  # numbers of a packed result beside its walk


def packed(drawn: Drawn) -> tuple[int, ...]:
    """As numbers, for the other ranks: the length of the walk, or -1 for an error; and it."""
    if drawn.error:
        return (-1, -1)
    return (len(drawn.walk), *drawn.walk, drawn.next_token)


def unpacked(numbers: Sequence[int], count: int) -> list[Drawn]:
    """So many results from their numbers; an error is only known to be one."""
    drawn, at = list[Drawn](), 0
    for _ in range(count):
        length = numbers[at]
        end = at + 1 + max(0, length)
        failed = Drawn(error="the first rank says why")
        drawn.append(failed if length < 0 else Drawn(tuple(numbers[at + 1 : end]), numbers[end]))
        at = end + 1
    return drawn
