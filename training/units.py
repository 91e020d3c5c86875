"""Bytes in a mebibyte and a gibibyte: what names that end in _mib and _gib count. And sizes as people read them."""

MIB = 2**20
GIB = 2**30


def size_text(size: float) -> str:
    """A size for a person: 17.5 GiB, 350 MiB."""
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / MIB:.0f} MiB" if size >= 10 * MIB else f"{size / MIB:.1f} MiB"
