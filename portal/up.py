"""Start the supervisor by its module name from before version 0.2, for existing unit files. Remove in 0.3."""

import runpy

if __name__ == "__main__":
    runpy.run_module("console.up", run_name="__main__", alter_sys=True)
