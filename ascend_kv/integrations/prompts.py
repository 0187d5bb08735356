"""From what a user gives as a prompt to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ascend_kv.errors import UsageError

Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]

_LEGAL = 'text, {"prompt": text} or {"prompt_token_ids": [integers]}'


class TokenizedPrompt(NamedTuple):
    """A prompt as the engine takes it."""

    text: str | None
    """None where only token ids were given."""
    token_ids: list[int]
    refusal: UsageError | None = None
    """Why the text has no token ids; for whoever queues the prompt to raise or to report."""


def tokenize(tokenizer: Any, prompt: Prompt) -> TokenizedPrompt:
    """Token ids of one prompt.

    Args:
        tokenizer: Hugging Face's, or None, then only token ids are taken.
        prompt: text, ``{"prompt": text}`` or ``{"prompt_token_ids": [integers]}``.

    Raises:
        UsageError: a prompt of another kind, or text without a tokenizer.
    """
    if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
        given = prompt["prompt_token_ids"]
        if not isinstance(given, Sequence) or not all(type(token) is int for token in given):
            raise UsageError("prompt_token_ids", given, "a list of integers")
        if not isinstance(prompt.get("prompt"), str | None):
            raise UsageError("prompt", prompt["prompt"], "text beside prompt_token_ids")
        return TokenizedPrompt(prompt.get("prompt"), list(given))
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    if not isinstance(text, str):
        raise UsageError("prompt", prompt, _LEGAL)
    if tokenizer is None:
        raise UsageError("prompt", text, "prompt_token_ids when skip_tokenizer_init=True")
    return _encode(tokenizer, text)


def apply_chat_template(tokenizer: Any, messages: Sequence[Message]) -> TokenizedPrompt:
    """The model's own rendering of a conversation, ready for the assistant's answer.

    Args:
        tokenizer: Hugging Face's, with a chat template.
        messages: ``{"role": "system" | "user" | "assistant", "content": text}``, in order.

    Raises:
        UsageError: no tokenizer, no template, or messages that the template refuses.
    """
    if tokenizer is None:
        raise UsageError("messages", "a conversation", "a tokenizer: skip_tokenizer_init=False")
    if getattr(tokenizer, "chat_template", None) is None:
        raise UsageError(
            "messages", "a conversation", "a model whose tokenizer has a chat template"
        )
    if not isinstance(messages, Sequence):
        raise UsageError("messages", messages, 'mappings with "role" and "content"')
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise UsageError("messages", message, 'mappings with "role" and "content"')
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # the template is code of the model's; it raises what it likes
        raise UsageError(
            "messages", list(messages), "what the model's chat template takes", str(error)
        ) from error
    # The template has written the special tokens already.
    return _encode(tokenizer, text, add_special_tokens=False)


def _encode(tokenizer: Any, text: str, **options: Any) -> TokenizedPrompt:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        legal = f"text that UTF-8 can encode, from character {error.start} on too"
        return TokenizedPrompt(text, [], UsageError("prompt", text[error.start], legal))
    return TokenizedPrompt(text, list(tokenizer(text, **options)["input_ids"]))
