"""Conversations to prompts, by the model's own chat template. Knows no route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from swiftkv_platform.errors import InvalidInputError

if TYPE_CHECKING:
    from swiftkv_platform.engine.frontend import EngineFrontend


async def chat_prompt(engine: EngineFrontend, messages: Sequence[Mapping[str, str]], **options: Any) -> list[int]:
    """Token ids of a conversation, rendered beside the event loop and the engine's thread. `options`: `render_chat`'s.

    Raises:
        InvalidInputError: as `render_chat`, and for messages that are longer than the context.
        QueueFullError: too many texts wait to be read.
    """
    tokenizer, texts = engine.model.tokenizer, [text for message in messages for text in message.values()]
    if tokenizer is not None:
        engine.reader.check_text(*texts, field="messages")
    return await engine.readers.run_unadmitted(
        lambda: render_chat(tokenizer, messages, **options), sum(map(len, texts))
    )


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """Token ids of a conversation up to where the assistant begins to speak, or goes on with the last message. Blocks
    for as long as the template runs.

    Raises:
        InvalidInputError: a model without tokenizer or template, or a conversation its template refuses.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InvalidInputError(
            "messages need a chat template, which this model has not; send a prompt", field="messages", value=None
        )
    try:
        rendered: Any = tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=True,
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise InvalidInputError(
            f"messages do not fit the model's chat template: {error}", field="messages", value=None
        ) from error
    token_ids: list[int] = list(rendered["input_ids"] if isinstance(rendered, Mapping) else rendered)
    return token_ids
