"""Caches: what each layer keeps between steps, where its bytes lie, and how many there are."""
