#!/usr/bin/env python3
"""Checks every #include of libcalib/, kernels/ and tools/ against the table in libcalib/ARCHITECTURE.md.

The words in backticks of the table's last column are the edges: a module's name, a library's name (LIBRARIES below), or
one header of another module. Usage: check_layers.py [--root FOLDER]; exit 0 when all edges are allowed, 1 otherwise.
"""

import argparse
import pathlib
import re
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SOURCE_SUFFIXES = {".h", ".cc", ".cu", ".cuh"}

# How a library's headers begin. A header of none of these is taken for the C or C++ standard library or POSIX if it has
# no folder or one of STANDARD_FOLDERS, and is an unknown library otherwise.
LIBRARIES = {
    "fmt": ("fmt/",),
    "openssl": ("openssl/",),
    "nlohmann": ("nlohmann/",),
    "eigen": ("Eigen/",),
    "pcre2": ("pcre2.h",),
    "utf8proc": ("utf8proc.h",),
    "yaml-cpp": ("yaml-cpp/",),
    "hdf5": ("hdf5.h", "H5"),
    "zlib": ("zlib.h",),
    "valijson": ("valijson/",),
    "cli11": ("CLI/",),
    "libtorch": ("ATen/", "c10/", "torch/"),
    "cuda": ("cuda",),
}
STANDARD_FOLDERS = {"sys", "linux", "netinet", "arpa"}

# Headers heavy or invasive enough that no public header may pass them on.
SOURCE_ONLY = {"hdf5", "zlib", "nlohmann", "yaml-cpp", "cli11", "libtorch"}
HEADER_EXCEPTIONS = {("libtorch", "libcalib/model/torch_block.h")}
HEADER_ALLOWED = {"nlohmann/json_fwd.hpp"}

# A bit layout exists once: a stored code is shifted and masked in kernels/ only.
CODE_BITS = re.compile(r"\b\w*codes?\w*(\[[^\]]*\])?\s*(>>|<<|&(?!&))\s*\w")


def read_table(architecture: pathlib.Path) -> dict[str, list[str]]:
    """Module -> edges, from the rows `| module | duty | may include |`."""
    edges: dict[str, list[str]] = {}
    for line in architecture.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[0] != "module" and not cells[0].startswith("-"):
            edges[cells[0].strip("`").split()[0]] = re.findall(r"`([^`]+)`", cells[2])
    return edges


def module_of(path: str) -> str | None:
    """The table's name for the module that holds a file, from its path below the repository root."""
    parts = path.split("/")
    if parts[0] == "libcalib" and len(parts) > 2:
        return parts[1]
    return parts[0] if parts[0] in ("kernels", "tools", "tests") else None


def library_of(header: str) -> str | None:
    for library, prefixes in LIBRARIES.items():
        if header.startswith(prefixes):
            return library
    return None


def check_own_include(module: str, header: str, allowed: list[str], edges: dict[str, list[str]]) -> str | None:
    target = module_of(header)
    if target is None:
        return f'"{header}" is no path from the repository root (write "libcalib/base/error.h", not "error.h")'
    if target == module or target in allowed or header in allowed:
        return None
    if target not in edges:
        return f'"{header}" belongs to {target}, which libcalib/ARCHITECTURE.md does not list as a module'
    return f'"{header}" belongs to {target}; {module} may include {", ".join(allowed) or "nothing"}'


def check_foreign_include(path: str, module: str, header: str, allowed: list[str]) -> str | None:
    library = library_of(header)
    if library is None:
        folder = header.split("/")[0] if "/" in header else None
        if folder is None or folder in STANDARD_FOLDERS:
            return None
        return f"<{header}> is of a library that scripts/check_layers.py does not know"
    if library not in allowed and header not in allowed:
        return f"<{header}> is {library}; {module} may include {', '.join(allowed) or 'nothing'}"
    is_header = path.endswith((".h", ".cuh"))
    if is_header and library in SOURCE_ONLY and header not in HEADER_ALLOWED and (library, path) not in HEADER_EXCEPTIONS:
        return f"<{header}> is {library}, which may stand in .cc files only"
    return None


def check_file(root: pathlib.Path, path: str, edges: dict[str, list[str]]) -> list[str]:
    module = module_of(path)
    if module is None:
        return []
    if module not in edges:
        return [f"{path}: module {module} has no row in libcalib/ARCHITECTURE.md"]
    allowed = edges[module]
    complaints = []
    for number, line in enumerate((root / path).read_text(encoding="utf-8").splitlines(), start=1):
        match = INCLUDE.match(line)
        complaint = None
        if match and match.group(1) == '"':
            complaint = check_own_include(module, match.group(2), allowed, edges)
        elif match:
            complaint = check_foreign_include(path, module, match.group(2), allowed)
        elif module != "kernels" and CODE_BITS.search(line.split("//")[0]):
            complaint = "shifts or masks a code; bit layouts live in kernels/codec/ alone"
        if complaint:
            complaints.append(f"{path}:{number}: {complaint}")
    return complaints


def main() -> int:
    parser = argparse.ArgumentParser(description="Check #includes against libcalib/ARCHITECTURE.md.")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    edges = read_table(root / "libcalib/ARCHITECTURE.md")
    if not edges:
        print("check_layers: libcalib/ARCHITECTURE.md has no table of modules", file=sys.stderr)
        return 1
    known = set(edges) | set(LIBRARIES)
    complaints = [
        f"libcalib/ARCHITECTURE.md: {module}: `{edge}` is no module, library or header"
        for module, row in edges.items()
        for edge in row
        if edge not in known and not (root / edge).is_file() and library_of(edge) is None
    ]
    files = sorted(
        file.relative_to(root).as_posix()
        for folder in ("libcalib", "kernels", "tools")
        for file in (root / folder).rglob("*")
        if file.suffix in SOURCE_SUFFIXES
    )
    for path in files:
        complaints += check_file(root, path, edges)
    print("\n".join(complaints + [f"check_layers: {len(files)} files, {len(complaints)} forbidden edges"]))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
