"""Training documents in which only the answers are learned: conversations and completions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from cleave.errors import UsageError

_ASSISTANT: Final = "assistant"  # the chat role whose messages are learned

# Fields of a record that contain a document. The first tuple whose fields are all present and not
# null is used.
FIELDS: Final = (("messages",), ("prompt", "completion"), ("text",), ("content",))
FIELDS_TEXT: Final = '"messages", "prompt" with "completion", "text" or "content"'

Message: TypeAlias = Mapping[str, Any]
Template: TypeAlias = Callable[[Sequence[Message], Sequence[Any] | None, bool], str]
"""A function that renders messages and tool descriptions as text.

If the third argument is True, the text ends with the generation prompt: the tokens that begin the
assistant's next message.
"""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat in which only the assistant's messages are learned.

    Attributes:
        messages: dicts with `role` and `content`, in the format of Hugging Face chat templates.
        tools: descriptions of the tools that the assistant may call, in the format of chat
            templates; None if it has no tools.
        where: place of the conversation in its source, for error messages.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    where: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """Return the messages and tools as JSON, with sorted keys."""
        return json.dumps([self.messages, self.tools], sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion. Only the completion and the end-of-text token are learned."""

    prompt: str
    completion: str

    @property
    def text(self) -> str:
        return self.prompt + self.completion


Document: TypeAlias = str | Conversation | Completion


def document_of(record: Mapping[str, Any], where: str = "") -> Document:
    """Convert a record of a file or data set to a document.

    `where` is the place of the record in its source, such as "line 3 of 'a.jsonl'".

    Raises:
        UsageError: if the record contains no valid document. The message has no subject: the caller
            must prepend `where`.
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
                'has a "prompt" and a "completion" of different or unsupported types; use strings '
                "or lists of messages for both"
            )
        case (name,) if isinstance(text := record[name], str):
            return str(clean(text))
        case (name,):
            raise UsageError(
                f'has a "{name}" of type {_kind(record[name])}, not a string; store the text as a '
                "string"
            )
    for names in FIELDS:
        if all(name in record for name in names):
            empty = next(name for name in names if record[name] is None)
            raise UsageError(f'has a "{empty}" that is null; set its value, or remove the record')
    listed = ", ".join(repr(name) for name in record) or "none"
    raise UsageError(
        f"has none of the fields {FIELDS_TEXT}; it has {listed}; rename the field with the text to "
        "one of the supported names"
    )


def clean(value: Any) -> Any:
    """Replace all surrogate code points in a JSON value with "?", because tokenizers reject them.

    Strings at any depth are cleaned, including the field names of objects.
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
    if not isinstance(messages, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages
    ):
        raise UsageError(
            'has invalid "messages", which must be a list of objects, each with a string "role", '
            'such as [{"role": "user", "content": ...}, ...]'
        )
    if not any(message["role"] == _ASSISTANT for message in messages):
        raise UsageError(
            f'has no message with the role "{_ASSISTANT}", so the model would learn nothing; add '
            "one, or remove the record"
        )
    held = (_message(message, number) for number, message in enumerate(messages, start=1))
    return Conversation(tuple(held), _tools(tools), where)


def _message(message: Mapping[str, Any], number: int) -> Message:
    """Clean a message and join the parts of its content into one string."""
    cleaned: dict[str, Any] = clean(message)
    content = cleaned.get("content")
    if isinstance(content, list):
        cleaned["content"] = "".join(_text_of_part(part, number) for part in content)
    elif content is None and not cleaned.get("tool_calls"):
        raise UsageError(f'has no "content" in message {number}; add a string')
    elif not isinstance(content, str | None):
        raise UsageError(
            f'has a "content" of type {_kind(content)} in message {number}; use a string, or a '
            'list of parts such as {"type": "text", "text": ...}'
        )
    return cleaned


def _text_of_part(part: Any, number: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        found = _kind(part) if kind is None else f"a part of type {kind!r}"
        raise UsageError(
            f"has {found} in message {number}, but only parts of type 'text' can be learned; "
            "remove it, or describe it in text"
        )
    if not isinstance(text := part.get("text"), str):
        raise UsageError(
            f"has a part of type 'text' in message {number} whose \"text\" is of type "
            f"{_kind(text)}; use a string"
        )
    return text


def _tools(tools: Any) -> tuple[Any, ...] | None:
    """Convert a record's "tools" (a list, a JSON string or None) to a tuple; None if empty."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise UsageError(f'has "tools" that are not valid JSON ({error}); use a list') from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UsageError(
            'has "tools" that are not a list of objects; describe each tool as an object, in the '
            "format of chat templates"
        )
    return tuple(clean(tools))


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def rendered(conversation: Conversation, template: Template) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation and locate the assistant's answers in the text.

    Returns:
        The text, and the character range [start, end) of each answer. An answer begins after the
        generation prompt and includes the end-of-turn token.

    Raises:
        UsageError: if an answer cannot be located in the text.
    """
    messages, tools = conversation.messages, conversation.tools
    text = template(messages, tools, False)
    answers = []
    for number, message in enumerate(messages):
        if message["role"] == _ASSISTANT:
            before = template(messages[:number], tools, True) if number else ""
            after = template(messages[: number + 1], tools, False)
            if number and after.startswith(before) and text.startswith(after):
                answers.append((len(before), len(after)))
            else:
                answers.append(_located(conversation, number, text, template))
    return text, answers


_MARK: Final = "ANSWER-7f3a9c"  # placeholder for locating an answer in the text


def _located(
    conversation: Conversation, number: int, text: str, template: Template
) -> tuple[int, int]:
    """Return the character range of an answer, found by rendering a placeholder in its place.

    The placeholder is needed if the answer begins the chat, or if the template renders the last
    message differently. For example, templates of reasoning models include only the last answer's
    reasoning.
    """
    messages, tools = conversation.messages, conversation.tools
    earlier, later = messages[:number], messages[number + 1 :]
    marked = {**messages[number], "content": _MARK}
    head, *tails = template((*earlier, marked, *later), tools, False).split(_MARK)
    _, *ends = template((*earlier, marked), tools, False).split(_MARK)
    # No generation prompt can be rendered before an answer that begins the chat. Render the
    # generation prompt after this answer instead.
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
    """Return the length of the longest common prefix of two strings."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _not_found(number: int) -> UsageError:
    return UsageError(
        f"the chat template renders message {number + 1} of a conversation differently when it "
        "comes last, so its answer cannot be located; use conversations with one answer, at the "
        "end, or a template that marks answers with {% generation %}"
    )


# Chat templates mark the assistant's messages with this tag; see "Assistant masking" in the
# transformers docs.
_MARKS_ANSWERS: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE: Final = "PROBE-7f3a9c"


class ChatTemplate:
    """The chat template of a model folder, callable as a `Template`.

    The folder's tokenizer is loaded on first use. All methods raise UsageError if the template
    cannot render the messages.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: Any = None
        self._in_parts = False

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool
    ) -> str:
        """Render messages, followed by the generation prompt if `prompt` is True."""
        return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=prompt))

    def marked(
        self, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[Sequence[int], Sequence[int]] | None:
        """Return a conversation's token IDs, and a mask: 1 for tokens of answers, 0 for others.

        Return None if the chat template does not mark answers with `{% generation %}`.
        """
        if not _MARKS_ANSWERS.search(str(self._tokenizer.get_chat_template(tools=tools))):
            return None
        found = self._apply(
            messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return found["input_ids"], found["assistant_masks"]

    @property
    def _tokenizer(self) -> Any:
        if self._loaded is None:
            from transformers import AutoTokenizer

            local = {"local_files_only": True, "trust_remote_code": False}
            self._loaded = AutoTokenizer.from_pretrained(self._folder, **local)
            self._in_parts = self._wants_parts()
        return self._loaded

    def _wants_parts(self) -> bool:
        """Return True if the template accepts content only as a list of typed parts."""

        def shows(content: Any) -> bool:
            asked = [{"role": "user", "content": content}]
            try:
                return _PROBE in self._loaded.apply_chat_template(asked, tokenize=False)
            except Exception:  # noqa: BLE001  templates raise errors of any kind
                return False

        return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any] | None, **how: Any) -> Any:
        try:
            tokenizer = self._tokenizer
            given = [_in_parts(each) if self._in_parts else each for each in messages]
            listed = None if tools is None else list(tools)
            return tokenizer.apply_chat_template(given, tools=listed, **how)
        except Exception as error:  # templates raise errors of any kind
            raise UsageError(
                f"the chat template in {str(self._folder)!r} cannot render a conversation "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__}); check "
                "the roles and order of the messages"
            ) from error


def _in_parts(message: Message) -> Message:
    if not isinstance(text := message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": text}]}
