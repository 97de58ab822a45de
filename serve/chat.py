"""Rendering of conversations to prompts by the model's chat template. Knows no route."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from swiftkv_platform.data import chat as templates
from swiftkv_platform.data.chat import ChatRenderer
from swiftkv_platform.data.formats import Conversation
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.errors import ContextLengthError, InvalidInputError, ModelError
from swiftkv_platform.web.limiters import Sender

if TYPE_CHECKING:
    from swiftkv_platform.engine.frontend import EngineFrontend

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

_TEMPLATE_VARIABLES_FIELD = "chat_template_kwargs"
_TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, KeyError, RecursionError)
"""Errors that a chat template raises for an unsupported conversation."""


async def tokenize_chat(
    engine: EngineFrontend,
    messages: Sequence[Message],
    sender: Sender,
    *,
    tools: Tools | None = None,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> list[int]:
    """Return `render_chat(...)`, called in the engine's reader threads. `options`: of `render_chat`. Raises
    `InvalidInputError` as `render_chat` and for messages longer than the context, and `QueueFullError` if too many
    texts of the sender wait for tokenization."""
    tokenizer, texts = engine.model.tokenizer, [_to_text(part) for message in messages for part in message.values()]
    texts += [_to_text(part) for part in (*(tools or ()), *template_kwargs.values())]
    if tokenizer is not None:
        engine.input_processor.check_text(*texts, field="messages")
    return await engine.tokenizer_threads.run_unadmitted(
        lambda: render_chat(tokenizer, messages, tools=tools, template_kwargs=template_kwargs, **options),
        sum(map(len, texts)),
        sender,
    )


@contextmanager
def rename_prompt_errors() -> Iterator[None]:
    """Make errors about the length of a conversation name the field `messages` instead of `prompt`."""
    try:
        yield
    except ContextLengthError as error:
        raise error.with_field("messages") from error


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Tools | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """Return the token ids of a conversation up to the beginning of the assistant's next message, or to the end of an
    unfinished last one. Blocks while the template runs. Raises `InvalidInputError` for a model without tokenizer or
    template, or a conversation that the template does not support."""
    if get_chat_template(tokenizer, tools) is None:
        raise InvalidInputError(
            "messages need a chat template, which this model does not have; send a prompt", field="messages", value=None
        )
    reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages", "kwargs"}
    refused = next((name for name in template_kwargs if name in reserved), None)
    if refused is not None:
        raise InvalidInputError(
            f"{_TEMPLATE_VARIABLES_FIELD}.{refused} is reserved; use the request's own fields, or leave it out",
            field=f"{_TEMPLATE_VARIABLES_FIELD}.{refused}",
        )
    conversation = Conversation(list(map(dict, messages)), None if tools is None else list(map(dict, tools)))
    try:
        text = ChatRenderer(tokenizer, use_current_date=True).render_prompt(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=template_kwargs,
        )
    except RowError as error:
        raise InvalidInputError(
            f"messages do not fit the model's chat template: {error.__cause__ or error}", field="messages", value=None
        ) from error
    token_ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return token_ids


def find_unused_variables(tokenizer: Any, names: Iterable[str]) -> list[str]:
    """Return the names of the given variables that no template of the model mentions."""
    templates_text = str(getattr(tokenizer, "chat_template", None))
    return [f"{_TEMPLATE_VARIABLES_FIELD}.{name}" for name in names if name not in templates_text]


def get_chat_template(tokenizer: Any, tools: Tools | None = None) -> str | None:
    """Return the chat template for a conversation with or without tools; None if there is none. Raises
    `InvalidInputError` if the tokenizer has several templates without a default."""
    try:
        return templates.find_chat_template(tokenizer, tools)
    except ModelError as error:
        raise InvalidInputError(
            f"messages need a default chat template, which this model does not have: {error}",
            field="messages",
            value=None,
        ) from error


def set_chat_template(tokenizer: Any, template: str) -> None:
    """Set a tokenizer's chat template. Blocks while the template renders one message. Raises `ModelError` for a model
    without tokenizer, or a template with a syntax error."""
    if tokenizer is None:
        raise ModelError(
            "chat_template is given, but this model's directory has no tokenizer; leave it out",
            field="chat_template",
        )
    tokenizer.chat_template = template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ModelError(
            f"chat_template is not a valid Jinja template: line {error.lineno}: {error.message}", field="chat_template"
        ) from error
    except _TEMPLATE_ERRORS:  # it may need more than one message
        return


def _to_text(part: Any) -> str:
    return part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
