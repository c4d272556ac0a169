"""`python -m kvxfer.cli`: the same as `kvxfer`."""

import sys

from kvxfer.cli import main

sys.exit(main())
