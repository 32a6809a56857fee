"""`python -m freetoken` is `ft`."""

import sys

from freetoken.cli.main import main

sys.exit(main())
