"""Provide the ASGI application under its name from before version 0.2, for servers that were set up with it."""

from importlib import import_module

application = import_module("console.asgi").application
