"""Start the supervisor by the name that it had before version 0.2, for supervisors and unit files of then."""

import runpy

if __name__ == "__main__":
    runpy.run_module("console.up", run_name="__main__", alter_sys=True)
