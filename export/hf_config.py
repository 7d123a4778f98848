"""Reads config.json, and end tokens of generation_config.json: typed access, with errors that name the key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ortolan.errors import CheckpointError, UnsupportedModelError, finite_number
from ortolan.export.reading import is_file, reading
from ortolan.folders import CHECKPOINT_FILE as CONFIG_FILE
from ortolan.folders import GENERATION_FILE, not_a_checkpoint
from ortolan.graphs.config import Activation

Item = TypeVar("Item")

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The keys of one config.json; `file` is where token ids come from, for messages."""

    keys: Mapping[str, Any]
    file: str = CONFIG_FILE

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value; the default where it is absent or null."""
        value = self.keys.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer.

        Raises:
            CheckpointError: the key is absent without a default, or no positive integer.
        """
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"config.json: {key} is {value!r}; expected a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number.

        Raises:
            CheckpointError: the key is absent without a default, or no such number.
        """
        return _finite(key, self.get(key, default))

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0.

        Raises:
            CheckpointError: the key is absent without a default, or no such number.
        """
        return _above_zero(key, self.number(key, default))

    def positives(self, key: str) -> list[float]:
        """Return a list of finite numbers above 0, none where it is absent.

        Raises:
            CheckpointError: the value is not such a list.
        """
        return [_above_zero(key, _finite(key, value)) for value in self.sequence(key, object, [])]

    def section(self, key: str) -> HfConfig:
        """Return the keys of an object, none where it is absent.

        Raises:
            CheckpointError: the value is not an object.
        """
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {key} is {value!r}; expected an object")
        return HfConfig(value)

    def sequence(self, key: str, kind: type[Item], default: Sequence[Item]) -> list[Item]:
        """Return a list whose items are all of one kind.

        Raises:
            CheckpointError: the value is not such a list.
        """
        value = self.get(key, list(default))
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise CheckpointError(f"config.json: {key} is {value!r}; expected a list of {kind.__name__}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean.

        Raises:
            CheckpointError: the value is none.
        """
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} is {value!r}; expected true or false")
        return value

    def activation(self, key: str, default: str = "silu") -> Activation:
        """Return the activation of the gated MLP.

        Raises:
            UnsupportedModelError: Ortolan has no such activation.
        """
        name = self.get(key, default)
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise UnsupportedModelError(f"config.json: {key} is {name!r}; supported: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    @property
    def head_size(self) -> int:
        """`head_dim`, or the hidden size divided among the heads."""
        return self.integer("head_dim", self.integer("hidden_size") // self.integer("num_attention_heads"))

    @property
    def num_kv_heads(self) -> int:
        """`num_key_value_heads`, or as many as query heads."""
        return self.integer("num_key_value_heads", self.integer("num_attention_heads"))

    @property
    def bos_token_id(self) -> int | None:
        """`bos_token_id`, the first where it is a list."""
        ids = self._token_ids("bos_token_id")
        return ids[0] if ids else None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """`eos_token_id`, which may be one id or a list."""
        return self._token_ids("eos_token_id")

    def _token_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise CheckpointError(f"{self.file}: {key} is {value!r}; expected a token id, or a list of them")
        return tuple(ids)


def _finite(key: str, value: object) -> float:
    number = finite_number(value)
    if number is None:
        raise CheckpointError(f"config.json: {key} is {value!r}; expected a number")
    return number


def _above_zero(key: str, number: float) -> float:
    if number <= 0:
        raise CheckpointError(f"config.json: {key} is {number!r}; expected a number above 0")
    return number


def read_hf_config(folder: Path) -> HfConfig:
    """Read config.json of a checkpoint folder.

    A text ends at the end tokens of generation_config.json, where there is one, as well as at those of config.json:
    those of a chat's turns often stand in the former alone.

    Raises:
        CheckpointError: the folder has no config.json, or one of the two cannot be read or is not a JSON object.
    """
    path = folder / CONFIG_FILE
    if not is_file(path):
        raise CheckpointError(not_a_checkpoint(folder))
    config = HfConfig(_read_object(path))
    if not is_file(folder / GENERATION_FILE):
        return config
    generation = HfConfig(_read_object(folder / GENERATION_FILE), file=GENERATION_FILE)
    ids = dict.fromkeys((*config.eos_token_ids, *generation.eos_token_ids))
    return HfConfig({**config.keys, "eos_token_id": list(ids)})


def _read_object(path: Path) -> dict[str, Any]:
    try:
        with reading(path):
            keys = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(keys, dict):
        raise CheckpointError(f"{path} holds a {type(keys).__name__}, expected an object")
    return keys
