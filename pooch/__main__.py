"""`python -m pooch`."""

import sys

from pooch.cli import main

sys.exit(main())
