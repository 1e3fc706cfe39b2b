"""``python -m repro_core.determinism``."""

import sys

from repro_core.determinism.control import main

sys.exit(main())
