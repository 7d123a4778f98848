"""Speculation: a drafter proposes tokens, one step of the model checks them all, and the right ones stay."""
