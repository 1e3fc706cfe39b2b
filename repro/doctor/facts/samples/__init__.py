"""How samples and prompts are measured: their numbers, their texts, and where templates and tools stand in them."""
