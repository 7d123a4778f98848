"""State: what is known of a sequence besides the contents of its caches."""
