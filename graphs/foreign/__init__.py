"""Rewrites decoder graphs that another exporter made: checks that tokens can be packed, then swaps the attention."""
