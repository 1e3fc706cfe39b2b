"""The instrument: rollouts, fingerprints, traces, comparison, replay and the golden store."""
