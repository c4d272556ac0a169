"""python -m kvxfer"""

import sys

from kvxfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
