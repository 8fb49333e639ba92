"""``python -m yafsdp_cc`` is ``yafsdp-cc``."""

import sys

from yafsdp_cc.tools.cli import main

sys.exit(main())
