"""``python -m repro_core.determinism``."""

import sys

try:
    from repro_core.determinism.control import main
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    print("repro_core.determinism: error: no torch here: pip install 'repro-harness[trainer]'", file=sys.stderr)
    sys.exit(2)

sys.exit(main())
