#!/usr/bin/env python
"""Run a management command in a checkout: `python manage.py check`."""

import sys

from console.manage import main

if __name__ == "__main__":
    main(sys.argv[1:])
