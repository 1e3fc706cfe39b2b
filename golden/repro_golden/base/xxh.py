"""xxh3_128, where it is installed: a recorder in a foreign environment needs none, only those who compare do."""

from __future__ import annotations

from repro_golden.base.errors import ReproError

__all__ = ["xxh3_128_hexdigest"]

try:
    from xxhash import xxh3_128_hexdigest
except ImportError:

    def xxh3_128_hexdigest(input: bytes) -> str:  # type: ignore[misc]  # noqa: A002 - xxhash's own name for it
        """Raises ReproError."""
        del input
        raise ReproError("xxhash is not installed in this environment: pip install xxhash")
