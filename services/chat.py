"""Conversations to prompts by a model folder's own template, run in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.errors import TokenizerError


class ChatError(Exception):
    """A conversation the model's template does not take; the message says why."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; the prompt is what is inside."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    template: jinja2.Template
    names: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to where the answer begins. Raises ChatError."""
        try:
            return self.template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self.names
            )
        except jinja2.TemplateError as error:
            raise ChatError(f"does not fit the model's chat template: {error}") from error


def chat_template(
    folder: Path, settings: Mapping[str, object], names: Mapping[str, str]
) -> ChatTemplate | None:
    """The folder's template, from its own file or `settings` (tokenizer_config.json), if any.

    Raises TokenizerError if it is none that works.
    """
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in source}
        source = named.get("default")
    if source is None:
        return None
    try:
        return ChatTemplate(_environment().from_string(str(source)), names)
    except jinja2.TemplateError as error:
        raise TokenizerError(f"the chat template of {folder} does not compile: {error}") from error


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
