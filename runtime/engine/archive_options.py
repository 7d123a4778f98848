"""How much of prefixes an engine keeps beyond its pages, and where."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ortolan.errors import ConfigError, file_path, whole_number
from ortolan.runtime.caches.page_archive import PageArchive
from ortolan.runtime.caches.page_files import PageFiles
from ortolan.runtime.caches.plan import CachePlan
from ortolan.runtime.model import Model

DISK_CACHE_BYTES = 16 * 2**30  # of the files of one model and plan, where nobody named a number
LAYOUT_VERSION = 1  # of what an entry's bytes are


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveOptions:
    """What was asked for: bytes in host memory, and a folder with the most bytes of its files."""

    host_bytes: int
    folder: Path | None
    disk_bytes: int

    @classmethod
    def of(cls, host_bytes: object, folder: object, disk_bytes: object) -> ArchiveOptions:
        """Check arguments. Raises ConfigError."""
        return cls(
            host_bytes=whole_number("host_cache_bytes", host_bytes, 0),
            folder=None if folder is None else file_path("disk_cache", folder),
            disk_bytes=whole_number("disk_cache_bytes", disk_bytes),
        )

    def open(self, plan: CachePlan, model: Model) -> PageArchive | None:
        """Open the archive of an engine; None where nothing is to be kept.

        Raises:
            ConfigError: the folder cannot be used, or sequences of the model share no prefixes.
        """
        if not self.host_bytes and self.folder is None:
            return None
        if not plan.shares_prefixes:
            raise ConfigError(
                "host_cache_bytes and disk_cache keep prefixes, and no layer of this model has full attention, so its "
                "sequences share none; leave them out"
            )
        files = None if self.folder is None else PageFiles(self.folder / _identity(plan, model), self.disk_bytes)
        return PageArchive(self.host_bytes, files)


def _identity(plan: CachePlan, model: Model) -> str:
    """Return a name for all that the bytes of entries depend on: the model, where it runs, and the layout of pages."""
    kinds = [(kind.name, kind.page_size, kind.table_pages if not kind.grows else 0) for kind in plan.kinds]
    device = "cpu" if model.device.cuda is None else "cuda"
    described = [LAYOUT_VERSION, model.fingerprint, device, model.batch_invariant, kinds]
    return hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=16).hexdigest()
