"""A stand-in for NVIDIA's library, built from nvml.c, that real processes load by the library's own name."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class StandIn:
    """Two GPUs, as `state` describes them (nvml.c)."""

    folder: Path

    @classmethod
    def build(cls, folder: Path) -> StandIn:
        """With cc, under that soname: a process that is started with `environment` finds it."""
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", str(folder / LIBRARY), str(SOURCE)]
        subprocess.run(command, check=True)
        stand_in = cls(folder)
        stand_in.say("")
        return stand_in

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self.folder), "NVML_STATE": str(self.folder / "state")}

    def say(self, state: str) -> None:
        """At once: what hangs goes on, what was lost is back."""
        temporary = self.folder / ".state"
        temporary.write_text(state)
        temporary.rename(self.folder / "state")
