"""``python -m sessionkv``: the command line."""

import sys

from sessionkv.cli.main import main

sys.exit(main())
