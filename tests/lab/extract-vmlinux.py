#!/usr/bin/env python3
"""Write the uncompressed ELF kernel that lies in a bzImage: extract-vmlinux.py BZIMAGE OUTPUT.

Runs on the host's python3, standard library only; xz, zstd and lz4 are called as programs.
Source: the setup header, Documentation/arch/x86/boot.rst of Linux (setup_sects, payload_offset, payload_length).
"""

import struct
import subprocess
import sys
import zlib
from pathlib import Path

SECTOR_NBYTES = 512
PROGRAMS = {
    b"\xfd7zXZ\0": ["xz", "-dc", "--single-stream"],
    b"\x28\xb5\x2f\xfd": ["zstd", "-dcq"],
    b"\x02\x21\x4c\x18": ["lz4", "-dc"],
}


def find_payload(image: bytes) -> bytes:
    """Return the compressed kernel of a bzImage."""
    if image[0x202:0x206] != b"HdrS":
        sys.exit("lab: not a bzImage")
    setup_sectors = image[0x1F1] or 4
    offset, nbytes = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * SECTOR_NBYTES + offset
    return image[start : start + nbytes]


def decompress(payload: bytes) -> bytes:
    """Return the kernel; the trailing size word that the kernel's build adds is left to the programs to ignore."""
    if payload.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(31).decompress(payload)
    for magic, program in PROGRAMS.items():
        if payload.startswith(magic):
            return subprocess.run(
                program, input=payload, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
            ).stdout
    sys.exit(f"lab: the kernel is compressed in an unknown way: {payload[:6]!r}")


def main() -> None:
    """Convert the file of the first argument to that of the second."""
    kernel = decompress(find_payload(Path(sys.argv[1]).read_bytes()))
    if not kernel.startswith(b"\x7fELF"):
        sys.exit("lab: what the bzImage holds is no ELF file; is xz or zstd missing?")
    Path(sys.argv[2]).write_bytes(kernel)


if __name__ == "__main__":
    main()
