"""Run every benchmark, one after the other, each in its own process and with its own bar.

python -m bench [NAME …]
python -m bench NAME --option …      # with the options of that bench
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench import NOT_MEASURED


def main(names: list[str]) -> int:
    benches = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if len(names) > 1 and names[1].startswith("-") and names[0] in benches:
        return subprocess.run([sys.executable, "-m", f"bench.{names[0]}", *names[1:]], check=False).returncode
    names = names or [name for name in benches if _is_bench(name)]
    if unknown := [name for name in names if name not in benches]:
        print(f"There is no bench {unknown[0]}. There are: {', '.join(name for name in benches if _is_bench(name))}.")
        return 2
    missed, elsewhere = [], []
    for name in names:
        print(f"\n== {name}", flush=True)
        code = subprocess.run([sys.executable, "-m", f"bench.{name}"], check=False).returncode
        if code == NOT_MEASURED:
            elsewhere.append(name)
        elif code:
            missed.append(name)
    measured = len(names) - len(elsewhere)
    summary = [f"{measured - len(missed)} of {measured} met their bars"]
    summary += [f"{what}: {', '.join(which)}" for what, which in (("missed", missed), ("not here", elsewhere)) if which]
    print("\n" + "; ".join(summary))
    return 1 if missed else 0


def _is_bench(name: str) -> bool:
    """Return whether the module can be run by itself, rather than only imported by others."""
    return '__name__ == "__main__"' in (Path(__file__).parent / f"{name}.py").read_text()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
