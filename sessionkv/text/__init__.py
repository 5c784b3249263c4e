"""Text to tokens and back, without drift: templates, tokenizing, detokenizing, stop strings."""
