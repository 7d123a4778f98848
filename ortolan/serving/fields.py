"""Reads the fields of a request's JSON object, each by its type, and knows which were never asked for."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from ortolan.errors import ConfigError, finite_number, whole_number


class FieldError(ConfigError):
    """A field of a request is missing or has a value that is not allowed; `param` is its name."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Fields:
    """A JSON object; null stands for a field that is left out."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in values.items() if value is not None}

    @classmethod
    def of_json(cls, body: bytes) -> Fields:
        """Parse a request's body. Raises FieldError where it is not a JSON object."""
        try:
            values = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise FieldError(f"the body is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise FieldError("the body must be a JSON object")
        return cls(values)

    def take(self, name: str) -> Any:
        """Return a field as it is, or None."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        """Return a text."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise FieldError(f"{name} must be a text", name)
        return value

    def flag(self, name: str) -> bool:
        """Return true or false; false where it is left out."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise FieldError(f"{name} must be true or false", name)
        return bool(value)

    def whole(self, name: str, least: int, most: int | None = None) -> int | None:
        """Return a whole number; JSON's 8.0 is one, too."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            return whole_number(name, value, least, most)
        except ConfigError as error:
            raise FieldError(str(error), name) from error

    def number(self, name: str) -> float | None:
        """Return a finite number."""
        value = self.take(name)
        if value is None:
            return None
        number = finite_number(value) if isinstance(value, int | float) else None
        if number is None:
            raise FieldError(f"{name} must be a finite number", name)
        return number

    def object(self, name: str) -> dict[str, Any]:
        """Return an object; an empty one where it is left out."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise FieldError(f"{name} must be an object", name)
        return value or {}

    def listed(self, name: str) -> Any:
        """Return a field as it is; an empty list where it is left out."""
        value = self.take(name)
        return [] if value is None else value

    def texts(self, name: str) -> list[str]:
        """Return a text or a list of texts as a list."""
        value = self.listed(name)
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise FieldError(f"{name} must be a text or a list of texts", name)
        return listed

    def only(self, name: str, allowed: Collection[Any]) -> None:
        """Refuse a field that has another value than those that change nothing."""
        value = self.take(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in allowed):
            raise FieldError(f"{name} is not supported here; leave it out", name)

    def end(self, ignored: Collection[str]) -> None:
        """Refuse fields that nobody has asked for, but for those that say nothing about the answer."""
        unknown = [name for name in self._left if name not in ignored]
        if unknown:
            raise FieldError(f"there is no field {unknown[0]!r}; leave it out", unknown[0])
