"""Changes what a checkpoint's files say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; `...` removes one."""
    path = folder / "config.json"
    keys = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in keys.items() if v is not ...}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite model.safetensors with what `edit` makes of its tensors, by name."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
