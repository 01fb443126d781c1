"""How the tokens of a request are chosen and what is told of them: the same at every worker."""

from dataclasses import dataclass

RULES = ("match", "rejection", "sampled", "typical")


@dataclass(frozen=True, slots=True)
class Bias:
    """Added to the score of a token."""

    token: int
    value: float


@dataclass(frozen=True, slots=True)
class Processors:
    """What is done to a row's logits before a token is chosen, in the order of the fields.

    The history of a row is all tokens before the one being chosen, guesses on the way included; its
    output is what follows the prompt. Every default leaves the logits alone.

    - repetition_penalty: divides positive logits of tokens in the history, multiplies others
    - presence_penalty: subtracted from the logits of tokens in the output
    - frequency_penalty: subtracted for every time a token is in the output
    - bias: added
    - allowed: no other token can be chosen (empty: all can)
    - withheld: tokens that cannot be chosen while the output has fewer than `min_tokens`
    - no_repeat_ngram: none can be chosen that would repeat so many tokens of the history (0: off)
    - grammar: none can be chosen after which the output cannot be completed (in llguidance's own
      format; empty: none)

    Then, on what is left, divided by the temperature; at temperature 0 they change nothing:

    - top_k: the so many best stay, of equals the lowest ids (0: all)
    - top_p: the fewest best stay whose share of what top_k left reaches it, of equals as before
    - min_p: those stay that are at least so likely as this times the likeliest
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[Bias, ...] = ()
    allowed: tuple[int, ...] = ()
    withheld: tuple[int, ...] = ()
    min_tokens: int = 0
    no_repeat_ngram: int = 0
    grammar: str = ""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


PLAIN = Processors()


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a worker needs to choose tokens. Temperature 0 is greedy, whatever the rule.

    The output begins after `prompt_tokens`.
    """

    temperature: float = 0.0
    seed: int = 0
    rule: str = "match"
    processors: Processors = PLAIN
    prompt_tokens: int = 0

    @property
    def needs_dists(self) -> bool:
        """True if a guess must come with what it was drawn from, in a chain no draw has cut."""
        return self.rule == "sampled" and self.temperature > 0


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Scoring:
    """Whose log-probabilities are told: with how many of the best tokens, -1 for none at all.

    `output`: of every token of the output, of the model's own distribution or, if `processed`, of
    the one that is chosen from. `prompt`: of every token of the prompt but the first.
    """

    output: int = -1
    prompt: int = -1
    processed: bool = False


UNSCORED = Scoring()


@dataclass(frozen=True, slots=True)
class Score:
    """The log-probability of a token, and the best tokens at its place with theirs."""

    logprob: float
    best: tuple[int, ...] = ()
    best_logprobs: tuple[float, ...] = ()
