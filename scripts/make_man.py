#!/usr/bin/env python3
"""Writes a program's manual page from its own --help, sub-commands included, so that the two cannot disagree.

Usage: make_man.py PROGRAM OUTPUT.1
"""

import pathlib
import re
import subprocess
import sys

SUMMARIES = {
    "kvcalib": "measure the KV cache statistics of a language model",
    "kvsens": "score what each layer's K and V lose under each storage scheme",
    "kvplan": "choose the storage scheme of every layer for a byte budget",
}
SEE_ALSO = sorted(SUMMARIES)


def help_text(*command: str) -> str:
    return subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout


def verbatim(text: str) -> list[str]:
    """Text as roff lines: nothing filled, nothing read as a request."""
    lines = [line.replace("\\", "\\e").replace("-", "\\-") for line in text.rstrip().splitlines()]
    return [".nf", *("\\&" + line if line[:1] in (".", "'") else line for line in lines), ".fi"]


def main() -> int:
    program, output = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    name = program.name
    own_help = help_text(str(program))
    page = [f'.TH {name.upper()} 1 "" "kvcalib"', ".SH NAME", f"{name} \\- {SUMMARIES[name]}", ".SH SYNOPSIS AND OPTIONS",
            *verbatim(own_help)]
    subcommands = own_help.partition("\nSubcommands:\n")[2]
    for subcommand in re.findall(r"^  ([a-z]+)\b", subcommands, re.MULTILINE):
        page += [f".SH {name.upper()} {subcommand.upper()}", *verbatim(help_text(str(program), subcommand))]
    page += [".SH EXIT STATUS",
             "0 done, 1 a gate failed, 2 usage, 3 not found or input/output, 4 format or version, 5 files that do not "
             "belong together, 6 infeasible, 7 unsupported, 8 numbers not finite, 70 internal error.",
             ".SH SEE ALSO", ", ".join(f"{other}(1)" for other in SEE_ALSO if other != name)]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(page) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
