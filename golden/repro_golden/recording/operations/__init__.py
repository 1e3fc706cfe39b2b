"""The operations of one training step: what each read, what it made of it, and where in the source it was asked for.

`recorder` runs inside the trainer, which may be a foreign program, with torch and the standard library; `stream` is
what the instrument reads of it.
"""
