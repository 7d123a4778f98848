"""Eviction: when it is due, and how it runs on one sequence's caches."""
