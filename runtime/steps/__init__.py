"""Steps: one run of the decoder over rows of sequences, on the host or on a CUDA device."""
