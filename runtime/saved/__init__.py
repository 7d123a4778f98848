"""Saved sequences: the file that holds one, how it is written, and how it is read back."""
