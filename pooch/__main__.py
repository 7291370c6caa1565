"""`python -m pooch`."""

import sys

from .cli import main

sys.exit(main())
