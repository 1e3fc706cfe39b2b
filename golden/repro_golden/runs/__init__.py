"""Golden runs: captured, recorded with their proofs, verified."""
