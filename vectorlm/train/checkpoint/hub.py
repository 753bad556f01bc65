"""Upload the models of a run to the Hugging Face Hub."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vectorlm.train.settings import PushSettings

STALE = (".safetensors", ".safetensors.index.json", "adapter_config.json")
"""Endings of files that an upload replaces or deletes."""
MAX_PENDING = 2


class HubUploads:
    """Uploads to one repository, in a thread of rank 0, while training continues.

    A failed upload prints a warning; it ends neither a step nor the run.
    """

    def __init__(self, settings: PushSettings, say: Callable[[str], None] = print) -> None:
        self._settings, self._say = settings, say
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hub")
        self._pending: list[Future[None]] = []

    def push(self, folder: Path, revision: str = "main", *, deletes_folder: bool = False) -> None:
        """Queue the upload of a model's folder to a revision of the repository.

        With `deletes_folder` the folder is deleted afterwards, and not uploaded if `MAX_PENDING` uploads already wait.
        """
        self._pending = [future for future in self._pending if not future.done()]
        if deletes_folder and len(self._pending) >= MAX_PENDING:
            self._say(f"warning: revision {revision} is not uploaded: earlier uploads are still running")
            shutil.rmtree(folder, ignore_errors=True)
            return
        future = self._pool.submit(self._upload, folder, revision, deletes_folder)
        if deletes_folder:
            self._pending.append(future)

    def __enter__(self) -> HubUploads:
        return self

    def __exit__(self, kind: Any, *error: object) -> None:
        """Wait for the uploads; if the run failed, only for the current one. A resumed run uploads the other models."""
        self._pool.shutdown(cancel_futures=kind is not None)

    def wait(self) -> None:
        """Wait for all uploads; no further one can follow."""
        self._pool.shutdown()

    def _upload(self, folder: Path, revision: str, deletes_folder: bool) -> None:
        from huggingface_hub import HfApi

        repo_id = self._settings.repo_id
        try:
            api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
            api.create_repo(repo_id, private=self._settings.private, exist_ok=True)
            if revision != "main":
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            self._say(f"uploading {folder} to {repo_id}, revision {revision}")
            # An earlier model of the repository may have more shards, or be an adapter.
            files = api.list_repo_files(repo_id, revision=revision)
            stale = [name for name in files if "/" not in name and name.endswith(STALE)]
            message = f"Upload the model of {folder.parent.name}"
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=message,
                delete_patterns=stale,
            )
        # The errors of the network and of the Hub have no common base class.
        except Exception as error:
            private = " --private" if self._settings.private else ""
            fix = "" if deletes_folder else f" Retry with `hf upload {repo_id} {folder} .{private}`."
            self._say(
                f"warning: push_to_hub.repo_id={repo_id!r}: revision {revision} was not uploaded "
                f"({type(error).__name__}: {error}).{fix}"
            )
        if deletes_folder:
            shutil.rmtree(folder, ignore_errors=True)
