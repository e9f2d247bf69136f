"""Examples of which only the answers are learned: conversations, and prompts with completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from cleave.errors import UsageError

ASSISTANT: Final = "assistant"
"""The role whose messages are learned."""

FIELDS: Final = (("messages",), ("prompt", "completion"), ("text",), ("content",))
"""The fields that hold a document of a record; the first that are all there count."""

FIELDS_TEXT: Final = '"messages", "prompt" with "completion", "text" or "content"'
"""The same, in words."""

Message: TypeAlias = Mapping[str, Any]
Template: TypeAlias = Callable[[Sequence[Message], Sequence[Any] | None, bool], str]
"""Renders messages, with the tools that they may call; True: up to where an answer begins."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a chat; those of the assistant are learned.

    Attributes:
        messages: each with a `role` and a `content`, as chat templates take them.
        tools: that the assistant may call, as chat templates take them; None for none.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None

    @property
    def text(self) -> str:
        """Return what tells it from others."""
        return json.dumps([self.messages, self.tools], sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt, and the completion that is learned with the end of the text."""

    prompt: str
    completion: str

    @property
    def text(self) -> str:
        """Return both, one after the other."""
        return self.prompt + self.completion


Document: TypeAlias = str | Conversation | Completion


def document_of(record: Mapping[str, Any]) -> Document:
    """Return the document in a record of a file or data set.

    Raises:
        UsageError: when it has none; says what it has, as the end of a sentence.
    """
    fields = next((f for f in FIELDS if all(record.get(name) is not None for name in f)), None)
    match fields:
        case ("messages",):
            return _conversation(record["messages"], record.get("tools"))
        case ("prompt", "completion"):
            prompt, completion = record["prompt"], record["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                return Completion(clean(prompt), clean(completion))
            if isinstance(prompt, list) and isinstance(completion, list):
                return _conversation([*prompt, *completion], record.get("tools"))
            raise UsageError(
                'has a "prompt" and a "completion" that are not both strings, or both lists of '
                "messages: write both in one way."
            )
        case (name,) if isinstance(text := record[name], str):
            return clean(text)
        case (name,):
            raise UsageError(
                f'has {_kind(record[name])} as "{name}", not a string: give one whose text is text.'
            )
    listed = ", ".join(repr(name) for name in record) or "no fields at all"
    raise UsageError(f"has no {FIELDS_TEXT} but {listed}: rename its fields.")


def clean(text: str) -> str:
    """Return a text without halves of surrogate pairs, which JSON can spell."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _conversation(messages: Any, tools: Any) -> Conversation:
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise UsageError(
            'has "messages" that are not a list of objects with a "role" and a "content", both '
            'strings: write them as [{"role": "user", "content": ...}, ...].'
        )
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UsageError(f'has no message of the role "{ASSISTANT}", so nothing is to be learned.')
    return Conversation(tuple(messages), tuple(tools) if tools else None)


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    calls = value.get("content") is None and bool(value.get("tool_calls"))  # and says nothing
    return calls or isinstance(value.get("content"), str)


def _kind(value: object) -> str:
    return type(value).__name__


def rendered(conversation: Conversation, template: Template) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and where its answers are.

    An answer is what a template adds for a message of the assistant to what it ends a prompt with,
    so it has the token that ends a turn.

    Args:
        conversation: what is rendered.
        template: renders messages.

    Raises:
        UsageError: when a template renders earlier turns in another way once there are more.
    """
    messages, tools = conversation.messages, conversation.tools
    text = template(messages, tools, False)
    answers = []
    for number, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            before = template(messages[:number], tools, True)
            after = template(messages[: number + 1], tools, False)
            if not (after.startswith(before) and text.startswith(after)):
                raise UsageError(
                    f"the chat template renders message {number + 1} of a conversation in another "
                    f"way when it is the last, so its answer cannot be found; give conversations "
                    f"with one answer, at their end, or another template"
                )
            answers.append((len(before), len(after)))
    return text, answers
