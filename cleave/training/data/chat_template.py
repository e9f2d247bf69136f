"""The chat template of a model folder, rendered by transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from cleave.errors import UsageError
from cleave.training.data.conversations import Marked, Message

# Templates for training mark answers so; see "Assistant masking" in the docs of transformers.
_MARKS_ANSWERS: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE: Final = "PROBE-7f3a9c"


class ChatTemplate:
    """Renders conversations as the tokenizer of a folder says.

    The tokenizer is loaded when the first conversation is rendered.

    Args:
        folder: of the model.
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
            messages: of the conversation; their contents are strings, or None.
            tools: that the assistant may call.
            prompt: whether the text ends where the assistant's next answer begins.

        Raises:
            UsageError: when the template cannot render it.
        """
        return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=prompt))

    def marked(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Marked | None:
        """Return the tokens of a conversation with those of answers, as the template marks them.

        Raises:
            UsageError: when the template cannot render it.
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
        """Return True where the template shows a text in a list of parts, and no plain string.

        Templates of models that see images are written so.
        """

        def shows(content: Any) -> bool:
            asked = [{"role": "user", "content": content}]
            try:
                return _PROBE in self._loaded.apply_chat_template(asked, tokenize=False)
            except Exception:  # noqa: BLE001  what templates raise is no closed list
                return False

        return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any] | None, **how: Any) -> Any:
        try:
            tokenizer = self._tokenizer
            given = [_in_parts(each) if self._in_parts else each for each in messages]
            listed = None if tools is None else list(tools)
            return tokenizer.apply_chat_template(given, tools=listed, **how)
        except Exception as error:  # what templates raise is no closed list
            raise UsageError(
                f"The chat template in {str(self._folder)!r} cannot render a conversation "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__}): "
                "check the roles of its messages and their order."
            ) from error


def _in_parts(message: Message) -> Message:
    if not isinstance(text := message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": text}]}
