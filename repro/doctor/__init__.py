"""The field's debugging guides, executed: artefacts of a run are recognised, and every rule that applies is tried."""
