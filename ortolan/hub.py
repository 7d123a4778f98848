"""Finds models by their id on the Hugging Face hub: files come from its cache, or are downloaded there."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ortolan.errors import ConfigError, ContractMismatchError, StorageError, file_path
from ortolan.folders import CHECKPOINT_FILE, GENAI_FILE, KIND_NAMES
from ortolan.manifest import MANIFEST_FILE, read_description

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # owner/name


def is_hub_id(given: object) -> bool:
    """Say whether a text is the id of a model on the hub; what lies there as a path, or is a Path, is not."""
    return isinstance(given, str) and _HUB_ID.fullmatch(given) is not None and not os.path.exists(given)


class HubModel:
    """The files of one model on the hub, all of one revision.

    Attributes:
        hub_id: "owner/name".
        folder: in the hub's cache; holds the files that were fetched, and maybe others.
    """

    def __init__(self, hub_id: str, first: str, *, is_reachable: bool | None = None) -> None:
        """Fetch the file that tells what the model is. Raises as `fetch`.

        Args:
            hub_id: "owner/name".
            first: the file's name.
            is_reachable: whether the hub can be asked; None finds out.
        """
        self.hub_id = hub_id
        self._is_reachable = _is_reachable(hub_id, first) if is_reachable is None else is_reachable
        self._revision: str | None = None
        self.folder = self._fetched(first).parent
        self._revision = self.folder.name  # its files have the names of their revision's folder before them

    def fetch(self, names: Sequence[str]) -> None:
        """Fetch files that must be there.

        Raises:
            ConfigError: the hub does not have one, or does not let us have it; or there is no way to the hub, and
                its cache does not have it.
            StorageError: the disk is full.
        """
        for name in names:
            self._fetched(name)

    def fetch_present(self, names: Sequence[str]) -> None:
        """Fetch those of some files that there are. Raises as `fetch`, but for a file that is not there."""
        from huggingface_hub.utils import EntryNotFoundError

        for name in names:
            try:
                self._fetched(name)
            except ConfigError as error:
                if not isinstance(error.__cause__, EntryNotFoundError):
                    raise

    def _fetched(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            local = not self._is_reachable
            return Path(hf_hub_download(self.hub_id, name, revision=self._revision, local_files_only=local))
        except Exception as error:  # also those of whatever client its version speaks HTTP with
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise StorageError(f"{self.hub_id} cannot be downloaded: {error}; free some of the disk") from error
            raise ConfigError(_reason(self.hub_id, name, error)) from error


def _is_reachable(hub_id: str, name: str) -> bool:
    """Ask the hub for a file once: a download would ask again and again for half a minute before it gives up."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import EntryNotFoundError, HfHubHTTPError, HFValidationError

    try:
        get_hf_file_metadata(hf_hub_url(hub_id, name))
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError):
        return True  # it answers; the download says what is wrong
    except Exception:  # of whatever client its version speaks HTTP with
        return False
    return True


def model_folder(given: object, *, weights: bool = True) -> Path:
    """Return the model folder that a path or a Hub id stands for.

    Args:
        given: a path, or the id of a model folder on the hub; a folder of that name wins.
        weights: fetch the weights too.

    Raises:
        ConfigError: it is neither a path nor a Hub id, or the hub's model cannot be had or is not a model folder.
        ContractMismatchError: the manifest is not one of this version.
        StorageError: the disk is full.
    """
    if not isinstance(given, str) or not is_hub_id(given):
        return file_path("folder", given)
    try:
        model = HubModel(given, MANIFEST_FILE)
    except ConfigError as error:
        raise _told_apart(given, error) from error
    names = [name for name in read_description(model.folder).files if weights or not name.endswith(".data")]
    for name in names:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ContractMismatchError(f"{given}: its manifest names {name!r}, which is not the name of a file")
    model.fetch(names)
    return model.folder


def _told_apart(hub_id: str, error: ConfigError) -> ConfigError:
    """Say what a model on the hub is that has no manifest, where it is there at all."""
    from huggingface_hub.utils import LocalEntryNotFoundError

    kinds = (
        (CHECKPOINT_FILE, "checkpoint", f"`ortolan export {hub_id} MODEL_DIR`"),
        (GENAI_FILE, "genai", f"`hf download {hub_id} --local-dir DIR` and `ortolan convert DIR MODEL_DIR`"),
    )
    is_reachable = not isinstance(error.__cause__, LocalEntryNotFoundError)
    for name, kind, commands in kinds:
        with contextlib.suppress(ConfigError):
            HubModel(hub_id, name, is_reachable=is_reachable)
            return ConfigError(
                f"{hub_id} on the Hugging Face hub is {KIND_NAMES[kind]}, not a model folder of Ortolan; run "
                f"{commands}, then give MODEL_DIR"
            )
    return error


def _reason(hub_id: str, name: str, error: Exception) -> str:
    """Say why a file of the hub cannot be had, and what to do."""
    from huggingface_hub import constants, utils

    if isinstance(error, utils.GatedRepoError):
        return (
            f"the Hugging Face hub does not let you read {hub_id}; ask for access at {constants.ENDPOINT}/{hub_id}, "
            "then run `hf auth login`"
        )
    if isinstance(error, utils.RepositoryNotFoundError):
        return (
            f"{hub_id} is neither a folder here nor a model on the Hugging Face hub; check its name (for a private "
            "one, run `hf auth login`)"
        )
    if isinstance(error, utils.LocalEntryNotFoundError | utils.OfflineModeIsEnabled):
        why = "is offline (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else "cannot be reached"
        return (
            f"{hub_id} is not a folder here, and as a Hub id it cannot be had: the Hugging Face hub {why}, and its "
            f"cache {constants.HF_HUB_CACHE} does not have the model's {name}; give a folder, or download the model "
            f"first: `hf download {hub_id}`"
        )
    if isinstance(error, utils.EntryNotFoundError):
        return f"{hub_id} on the Hugging Face hub has no file {name}"
    return f"{name} of {hub_id} cannot be fetched from the Hugging Face hub: {error}"
