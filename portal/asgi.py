"""Provide the ASGI application under its name from before version 0.2, for existing servers. Remove in 0.3."""

from importlib import import_module

application = import_module("console.asgi").application
