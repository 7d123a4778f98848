"""The rewrites that turn the plain decoder graph into the fused one, one pattern per file."""
