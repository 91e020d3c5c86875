"""Bytes in a mebibyte and a gibibyte, the units of names that end in _mib and _gib; and sizes as readable text."""

MIB = 2**20
GIB = 2**30


def size_text(size: float) -> str:
    """Return a size as text: 17.5 GiB, 350 MiB."""
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / MIB:.0f} MiB" if size >= 10 * MIB else f"{size / MIB:.1f} MiB"
