"""kvxfer in the place of Mooncake's Python package: `mooncake.engine` is kvxfer's.

Other modules of the package (`mooncake.store`, `mooncake.ep` ...) are the real ones where Mooncake is installed, and
missing where it is not. Read next: `engine.py`.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
