#!/usr/bin/env python3
"""Every test that tests/TRAPS.md names exists; every trap names one."""

import pathlib
import re
import sys

TESTS = pathlib.Path(__file__).resolve().parent.parent


def main() -> int:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("*.cc"))
    existing = {f"{suite}.{name}" for suite, name in re.findall(r"\bTEST(?:_F|_P)?\((\w+),\s*(\w+)\)", sources)}
    faults, numbers = [], []
    for line in (TESTS / "TRAPS.md").read_text(encoding="utf-8").splitlines():
        if not (row := re.match(r"\| (\d+) \|", line)):
            continue
        numbers.append(int(row[1]))
        named = re.findall(r"\b[A-Z]\w+\.[A-Z]\w+", line.rsplit("|", 2)[1])
        faults += [f"trap {row[1]}: no test {name}" for name in named if name not in existing]
        faults += [] if named else [f"trap {row[1]} names no test"]
    if numbers != list(range(1, 31)):
        faults.append(f"rows are {numbers}, expected 1 to 30")
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
