"""One file per model family: all that differs between them, and all that reads Hugging Face keys."""
