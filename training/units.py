"""Bytes in a mebibyte and a gibibyte: what names that end in _mib and _gib count."""

MIB = 2**20
GIB = 2**30
