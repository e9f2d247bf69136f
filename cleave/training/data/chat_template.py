"""Rendering of conversations with the chat template of a model folder, by transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from cleave.errors import UsageError
from cleave.training.data.conversations import Marked, Message

# The tag with which chat templates mark the assistant's messages for training; see "Assistant
# masking" in the transformers docs.
_MARKS_ANSWERS: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE: Final = "PROBE-7f3a9c"


class ChatTemplate:
    """Renders conversations with the chat template of a model folder.

    The tokenizer of the folder is loaded on first use.

    Args:
        folder: a Hugging Face model folder with a tokenizer and a chat template.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: Any = None
        self._in_parts = False

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: messages with a `role` and a `content`. Each content is a string or None.
            tools: descriptions of the tools that the assistant may call, or None.
            prompt: whether to append the generation prompt, which opens the assistant's next
                message.

        Raises:
            UsageError: when the template cannot render the conversation.
        """
        return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=prompt))

    def marked(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Marked | None:
        """Return a conversation's token ids, and a mask of the tokens of the assistant's answers.

        Returns:
            Token ids and mask (1 for answer tokens, else 0), or None if the chat template does not
            mark answers with `{% generation %}`.

        Raises:
            UsageError: when the template cannot render the conversation.
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
        """Return True if the chat template accepts message contents only as lists of typed parts.

        This is the case for many vision models.
        """

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
                f"The chat template in {str(self._folder)!r} cannot render a conversation "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__}): "
                "check the roles of its messages and their order."
            ) from error


def _in_parts(message: Message) -> Message:
    if not isinstance(text := message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": text}]}
