"""Text: tokenizers, chat templates, and text as it streams."""
