"""Provide the `vigil` command under its old name: scripts installed before version 0.2 import `main` from here."""

from importlib import import_module

main = import_module("vigil_cli.main").main

if __name__ == "__main__":
    main()
