"""A stand-in for NVIDIA's library, built from nvml.c, which real processes load by the library's real name."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml.c")
BUILT = Path(__file__).parents[2] / "var" / "nvml"
LIBRARY = "libnvidia-ml.so.1"
XID, MIG_CHANGED, RECOVERY = 0x8, 0x100, 0x8000
# What drivers learned late, and an old one lacks.
LEARNED_LATE = (
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetSramEccErrorStatus",
    "nvmlDeviceGetNumaNodeId",
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlGpmQueryDeviceSupport",
    "nvmlEventSetCreate",
)


class StandIn:
    """Eight stand-in GPUs, or those that `set_state` describes (in the syntax of nvml.c).

    Every process that is started with `environment` finds them; changes by `set_state` take effect immediately.
    """

    def __init__(self, folder: Path, *, without: Sequence[str] = ()) -> None:
        """Keep the description in `folder`; `without` names symbols that the library lacks, as an old driver's does."""
        self.library = _built(tuple(without))
        self._state = folder / "nvml-state"
        self._lines: list[str] = []
        self._events: list[str] = []
        self._write()

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self.library.parent), "NVML_STATE": str(self._state)}

    def set_state(self, *lines: str) -> None:
        """Replace the state: calls that hung continue, and lost GPUs are back, unless these lines say otherwise."""
        self._lines = list(lines)
        self._write()

    def event(self, gpu: int, data: int, *, kind: int = XID) -> None:
        """Send an event to current listeners."""
        self._events.append(f"{gpu} event {len(self._events) + 1} {kind} {data}")
        self._write()

    def _write(self) -> None:
        temporary = self._state.with_suffix(".new")
        temporary.write_text("\n".join([*self._lines, *self._events, ""]))
        temporary.rename(self._state)


def uuid(gpu: int) -> str:
    """Return the default UUID of a GPU."""
    return f"GPU-57a4d100-0000-4000-8000-{gpu:012d}"


def slice_uuid(gpu: int, instance: int) -> str:
    return f"MIG-57a4d100-{gpu:04d}-4000-8000-{instance:012d}"


def bus(gpu: int) -> str:
    return f"00000000:{5 + 16 * gpu:02X}:00.0"


def _built(without: tuple[str, ...]) -> Path:
    """Build the library once per version of its source: a compiler run costs a second of every test session."""
    if shutil.which("cc") is None:
        pytest.skip("there is no cc to build the stand-in of NVML with")
    digest = hashlib.sha256(SOURCE.read_bytes() + repr(without).encode()).hexdigest()[:16]
    folder = BUILT / digest
    if not (folder / LIBRARY).exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(folder, without)
    return folder / LIBRARY


def _compile(folder: Path, without: tuple[str, ...]) -> None:
    """Compile next to the target and rename: other workers may look for it at the same time."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        hidden = "".join(f"{name};" for name in without)
        script, path = Path(place) / "symbols", Path(place) / LIBRARY
        script.write_text(f"{{ global: nvml*; local: {hidden} *; }};")
        flags = [f"-Wl,-soname,{LIBRARY}", f"-Wl,--version-script,{script}"]
        subprocess.run(["cc", "-O1", "-Wall", "-shared", "-fPIC", *flags, "-o", str(path), str(SOURCE)], check=True)
        path.rename(folder / LIBRARY)
