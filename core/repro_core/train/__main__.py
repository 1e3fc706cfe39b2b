"""``python -m repro_core.train``."""

import sys

from repro_core.train.command import main

sys.exit(main())
