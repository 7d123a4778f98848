"""The engine: many sequences at once, driven by a scheduler."""
