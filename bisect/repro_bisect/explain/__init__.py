"""Why numbers moved: the operation, the source line and the size of the difference.

A step's operations are recorded in two versions (`repro_golden.recording.operations`), `align` says which of them
are the same, `cause` which of the others began it, `source` which lines asked for those, and `driver` joins all that.
"""
