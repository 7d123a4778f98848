"""Devices: where arrays live, which provider runs the graph, and what takes how much memory."""
