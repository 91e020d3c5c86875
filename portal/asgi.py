"""Provide the ASGI application under its name of before version 0.2, for servers set up by hand."""

from importlib import import_module

application = import_module("console.asgi").application
