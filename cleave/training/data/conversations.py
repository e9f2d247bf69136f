"""Examples with learned answers only: conversations, and prompts with completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from cleave.errors import UsageError

ASSISTANT: Final = "assistant"
"""The role whose messages are learned."""

FIELDS: Final = (("messages",), ("prompt", "completion"), ("text",), ("content",))
"""Fields that hold a record's document; the first tuple with all fields present counts."""

FIELDS_TEXT: Final = '"messages", "prompt" with "completion", "text" or "content"'
"""`FIELDS` in words."""

Message: TypeAlias = Mapping[str, Any]
Template: TypeAlias = Callable[[Sequence[Message], Sequence[Any] | None, bool], str]
"""Renders messages, given the tools. True ends the text where an answer begins."""

Marked: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Token ids of a rendered conversation, and a mask of answer tokens (1 or 0)."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a chat; those of the assistant are learned.

    Attributes:
        messages: messages with a `role` and a `content`, in the format of chat templates.
        tools: tools that the assistant may call, in the format of chat templates, or None.
        where: source file and line, for error messages.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    where: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """Return a text that identifies the conversation."""
        return json.dumps([self.messages, self.tools], sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion; the completion and the end of the text are learned."""

    prompt: str
    completion: str

    @property
    def text(self) -> str:
        """Return the prompt followed by the completion."""
        return self.prompt + self.completion


Document: TypeAlias = str | Conversation | Completion


def document_of(record: Mapping[str, Any], where: str = "") -> Document:
    """Return the document in a record of a file or data set.

    Args:
        record: fields by name.
        where: source file and line of the record.

    Raises:
        UsageError: when the record has no document. The message continues a sentence that begins
            with the record's place.
    """
    fields = next((f for f in FIELDS if all(record.get(name) is not None for name in f)), None)
    match fields:
        case ("messages",):
            return _conversation(record["messages"], record.get("tools"), where)
        case ("prompt", "completion"):
            prompt, completion = record["prompt"], record["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                return Completion(clean(prompt), clean(completion))
            if isinstance(prompt, list) and isinstance(completion, list):
                return _conversation([*prompt, *completion], record.get("tools"), where)
            raise UsageError(
                'has a "prompt" and a "completion" that are not both strings, or both lists of '
                "messages: write both in one way."
            )
        case (name,) if isinstance(text := record[name], str):
            return str(clean(text))
        case (name,):
            raise UsageError(
                f'has {_kind(record[name])} as "{name}", not a string: give one whose text is text.'
            )
    for names in FIELDS:
        if all(name in record for name in names):
            empty = next(name for name in names if record[name] is None)
            raise UsageError(
                f'has null as "{empty}": give it a value, or leave the whole record out.'
            )
    listed = ", ".join(repr(name) for name in record) or "no fields at all"
    raise UsageError(f"has no {FIELDS_TEXT} but {listed}: rename its fields.")


def clean(value: Any) -> Any:
    """Return a JSON value with "?" for each surrogate code point, which no tokenizer accepts.

    Strings in lists and objects are cleaned as well, and so are field names.
    """
    match value:
        case str():
            return value.encode("utf-8", "replace").decode("utf-8")
        case dict():
            return {clean(name): clean(each) for name, each in value.items()}
        case list() | tuple():
            return [clean(each) for each in value]
    return value


def _conversation(messages: Any, tools: Any, where: str) -> Conversation:
    if not isinstance(messages, list) or not all(map(_has_role, messages)):
        raise UsageError(
            'has "messages" that are not a list of objects with a "role" and a "content", both '
            'strings: write them as [{"role": "user", "content": ...}, ...].'
        )
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UsageError(f'has no message of the role "{ASSISTANT}", so nothing is to be learned.')
    held = tuple(_message(message, number) for number, message in enumerate(messages, start=1))
    return Conversation(held, _tools(tools), where)


def _has_role(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _message(message: Mapping[str, Any], number: int) -> Message:
    """Return a message whose content is a string, or None if it only calls tools.

    Args:
        message: a message whose content may also be a list of text parts.
        number: number of the message in its conversation, for error messages.

    Raises:
        UsageError: when the content is anything else.
    """
    cleaned: dict[str, Any] = clean(message)
    content = cleaned.get("content")
    if isinstance(content, list):
        cleaned["content"] = "".join(_text_of_part(part, number) for part in content)
    elif content is None and not cleaned.get("tool_calls"):
        raise UsageError(f'has no "content" in message {number}: give it a string.')
    elif not isinstance(content, str | None):
        raise UsageError(
            f'has {_kind(content)} as the "content" of message {number}: give it a string, or a '
            'list of parts as {"type": "text", "text": ...}.'
        )
    return cleaned


def _text_of_part(part: Any, number: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        found = _kind(part) if kind is None else f"a part of the type {kind!r}"
        raise UsageError(
            f"has {found} in message {number}, and only parts of the type 'text' can be learned: "
            "leave it out, or say in text what it shows."
        )
    if not isinstance(text := part.get("text"), str):
        raise UsageError(
            f'has {_kind(text)} as the "text" of a part of message {number}: give it a string.'
        )
    return text


def _tools(tools: Any) -> tuple[Any, ...] | None:
    """Return tool descriptions; a table column may hold them as JSON text."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise UsageError(f'has "tools" that are no JSON ({error}): give a list.') from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UsageError(
            'has "tools" that are not a list of objects: describe each tool as an object, as chat '
            "templates take it."
        )
    return tuple(clean(tools))


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def rendered(conversation: Conversation, template: Template) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and the ranges of its answers.

    An answer is what follows the generation prompt, so it includes the end-of-turn token.

    Args:
        conversation: the conversation.
        template: renders messages.

    Raises:
        UsageError: when an answer cannot be found in the text.
    """
    messages, tools = conversation.messages, conversation.tools
    text = template(messages, tools, False)
    answers = []
    for number, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            before = template(messages[:number], tools, True) if number else ""
            after = template(messages[: number + 1], tools, False)
            if number and after.startswith(before) and text.startswith(after):
                answers.append((len(before), len(after)))
            else:
                answers.append(_located(conversation, number, text, template))
    return text, answers


_MARK: Final = "ANSWER-7f3a9c"  # placeholder that shows where a template writes an answer


def _located(
    conversation: Conversation, number: int, text: str, template: Template
) -> tuple[int, int]:
    """Return the range of an answer that begins the chat, or that renders differently when last.

    Templates of reasoning models render thoughts, or an empty place for them, in the last answer
    only. So the answer is located by rendering a placeholder instead of it.

    Args:
        conversation: the whole conversation.
        number: index of the assistant's message.
        text: the rendered conversation.
        template: renders messages.

    Raises:
        UsageError: when the answer cannot be found.
    """
    messages, tools = conversation.messages, conversation.tools
    earlier, later = messages[:number], messages[number + 1 :]
    marked = {**messages[number], "content": _MARK}
    head, *tails = template((*earlier, marked, *later), tools, False).split(_MARK)
    _, *ends = template((*earlier, marked), tools, False).split(_MARK)
    # An answer that begins the chat has no prompt before it, so render the opening after it.
    given = earlier or (marked,)
    base, opened = template(given, tools, False), template(given, tools, True)
    if not (len(tails) == len(ends) == 1 and opened.startswith(base)):
        raise _not_found(number)
    (tail,), (end,), opening = tails, ends, opened[len(base) :]
    if earlier and head.startswith(base):
        first = len(base) + _shared(opening, head[len(base) :])
    elif not earlier:
        first = head.rindex(opening) + len(opening) if opening in head else len(head)
    else:
        raise _not_found(number)
    if not (text.startswith(head) and text.endswith(tail) and len(head + tail) <= len(text)):
        raise _not_found(number)
    return first, len(text) - len(tail) + _shared(end, tail)


def _shared(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _not_found(number: int) -> UsageError:
    return UsageError(
        f"the chat template renders message {number + 1} of a conversation in another way when it "
        f"is the last, so its answer cannot be found; give conversations with one answer, at their "
        f"end, or a template that marks answers by {{% generation %}}"
    )
