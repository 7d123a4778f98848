"""Chooses the next token of a sequence, says how likely it was, and decides when a generation ends."""
