"""The formats of linear weights."""
