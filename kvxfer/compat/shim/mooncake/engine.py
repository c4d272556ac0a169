"""`mooncake.engine` on kvxfer: the names that Mooncake's own module has, and `last_error`.

Read next: `kvxfer/compat/mooncake/`.
"""

from kvxfer.compat.mooncake import *  # noqa: F403
from kvxfer.compat.mooncake import __all__  # noqa: F401
