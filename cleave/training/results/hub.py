"""Upload an exported folder to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cleave.errors import CleaveError


class HubRepository:
    """A model repository on the Hugging Face Hub.

    A new repository is private. Create this object before a long export, so that a missing token
    or network is reported first.

    Args:
        name: name of the repository, such as `org/model`.

    Raises:
        CleaveError: if the repository cannot be created or reached.
    """

    def __init__(self, name: str) -> None:
        from huggingface_hub import HfApi

        self._api: Any = HfApi(library_name="cleave")
        try:
            self._name = self._api.create_repo(name, private=True, exist_ok=True).repo_id
        except Exception as error:  # the library raises errors of any class
            raise _failed(f"--push-to-hub {name}", error) from error

    def push(self, folder: Path) -> str:
        """Upload the files of a folder as one commit. Return the address of the repository.

        Raises:
            CleaveError: if the upload fails. The folder is not changed.
        """
        try:
            commit = self._api.upload_folder(
                repo_id=self._name, folder_path=folder, commit_message="Upload a model from Cleave"
            )
        except Exception as error:
            raise _failed(f"the upload of {str(folder)!r}", error) from error
        return str(commit.repo_url)


def _failed(what: str, error: Exception) -> CleaveError:
    lines = str(error).strip().splitlines()
    why = lines[0].rstrip(".") if lines else type(error).__name__
    return CleaveError(
        f"{what} failed ({why}): check the name and the network, and log in with `hf auth login`, "
        f"or set HF_TOKEN"
    )
