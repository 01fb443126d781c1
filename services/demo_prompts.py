"""The demonstration's prompts: six kinds of tasks, two of which repeat their own text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A kind of task, and a question of that kind."""

    kind: str
    text: str


PROMPTS = (
    Prompt("chat", "My cat wakes me at five every morning. What could I try so that we both rest?"),
    Prompt("code", "Write a Python function that returns the n-th Fibonacci number with a loop."),
    Prompt("maths", "A shop sells 12 rolls for 6 dollars. What do 30 cost? Explain each step."),
    Prompt(
        "extraction",
        "Copy every line of this list that names a fruit, word for word:\n"
        "1. a basket of ripe red apples\n2. a box of steel screws\n3. a bowl of green grapes\n"
        "4. a roll of grey tape\n5. a crate of sweet yellow pears\n",
    ),
    Prompt(
        "rewriting",
        "Repeat this text and change nothing but the name Anna, which becomes Mia: Anna walks to "
        "the river every evening. Anna sits down on the old wooden bridge and counts the boats "
        "that pass below. When the last boat is gone, Anna walks home along the same path.",
    ),
    Prompt("translation", "Translate into French: The library opens at nine and closes at six."),
)
