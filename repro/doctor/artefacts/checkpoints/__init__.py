"""Folders that models and tokenizers are saved to, read within bounds."""
