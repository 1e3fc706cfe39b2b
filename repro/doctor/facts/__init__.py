"""What rules know and share: the field's numbers and names, and how artefacts are measured."""
