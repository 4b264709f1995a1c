#!/usr/bin/env python3
"""Compiles the CUDA kernels for every target and checks what ptxas and the PTX say of them, without a GPU.

Per kernel and target: no spills, no stack but what the baseline declares, registers and shared memory within the caps of the
baseline. Per kernel, in its PTX: opcode counts within 5 % of the baseline, no local memory, no fp64, no floating-point
division in decode. The baseline lists the kernels of every translation unit; one that it does not know, or knows and is gone, is an
error. Of the decode kernels of instances.txt the fixed set CHECKED is compiled, with --all every one (a quarter of an hour of two cores).
Exit 0 all hold, 1 otherwise, 77 without nvcc. --update rewrites the baseline of what was compiled.
"""

import argparse
import concurrent.futures
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

TARGETS = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]
COUNTED = "sm_90"
SOURCES = ["kernels/read/combine_cuda.cu", "kernels/read/stream_cuda.cu"]
# Translation units of instances.txt (instances.cmake) that every run compiles: a family of each kind of code, both head_dims, both passes.
CHECKED = ["fused_b16_b16_128_1", "fused_e8_e8_64_1", "fused_i8_i4_128_1", "fused_i4_i4_64_1", "fused_i4_i4_128_1", "fused_i3_i3_64_1", "fused_c4_c4_64_1",
           "fused_pre_i4_i4_64_1", "score_i2_128_0", "pv_c3_128_0"]
# Their results are bytes or rotations, the same on all backends: one rounding per written operation.
ROUNDED_SOURCES = ["kernels/core/control_cuda.cu", "kernels/core/device_cuda.cu", "kernels/page/copy_cuda.cu", "kernels/read/gather_cuda.cu",
                   "kernels/read/prepare_cuda.cu", "kernels/write/append_cuda.cu", "kernels/write/fake_quant_cuda.cu", "kernels/write/flush_cuda.cu"]
SOURCES += ROUNDED_SOURCES
FLAGS = ["-std=c++17", "-O3"]
SLACK = 0.05

# Opcode class -> what its instructions begin with.
OPCODES = {
    "mma": r"mma\.", "ld.global.v4": r"ld\.global\S*\.v4", "ld.global.v2": r"ld\.global\S*\.v2", "ld.global": r"ld\.global(?!\S*\.v\d)",
    "st.global": r"st\.global", "logic": r"(and|or|xor|lop3|not)\.", "shift": r"(shl|shr|shf)\.", "prmt": r"prmt\.", "cvt": r"cvt\.",
    "shfl": r"shfl\.", "movmatrix": r"movmatrix\.", "bar": r"(bar|barrier)\.", "ex2": r"ex2\.", "fma": r"fma\.", "div": r"(div|rem)\.",
}
FORBIDDEN = {"local memory": r"(ld|st)\.local", "double precision": r"\w+\.\S*f64"}
FORBIDDEN_IN_DECODE = {"floating-point division": r"div\.\S*f32"}


def flags_of(source: str) -> list[str]:
    return FLAGS + (["-fmad=false"] if source in ROUNDED_SOURCES else [])


def write_instances(root: pathlib.Path, folder: pathlib.Path, every: bool) -> list[str]:
    """Absolute paths of the translation units to compile."""
    subprocess.run(["cmake", f"-DKERNELS={root / 'kernels'}", "-DSET=all", f"-DFOLDER={folder}", "-P", str(pathlib.Path(__file__).parent / "list_instances.cmake")],
                   check=True)
    if every:
        return sorted(str(path) for path in folder.glob("*.cu"))
    return [str(folder / f"{name}.cu") for name in CHECKED]


def demangle(names: list[str]) -> dict[str, str]:
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    short = {}
    for name, readable in zip(names, text.splitlines()):
        readable = re.sub(r"kvrt::|\(anonymous namespace\)::|\(.*\)$|^void ", "", readable)
        short[name] = readable.replace("TokenKeys", "").replace("TokenValues", "").replace(" ", "")
    return short


def ptx_targets(source: str, targets: list[str]) -> dict[str, list[str]]:
    """PTX target -> what is assembled from it, as kernels/CMakeLists.txt does; there sm_89 runs the code of sm_80 but for fp8."""
    parts = {"compute_80": ["sm_80", "sm_89", "sm_90"], "compute_100": ["sm_100", "sm_120"]}
    if "_e8_" in pathlib.Path(source).stem:
        parts = {"compute_80": ["sm_80"], "compute_89": ["sm_89", "sm_90"], "compute_100": ["sm_100", "sm_120"]}
    return {ptx: known for ptx, assembled in parts.items() if (known := [t for t in assembled if t in targets])}


def run(command: list[str], what: str) -> str:
    """Its stderr."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{what}: {pathlib.Path(command[0]).name} failed\n{done.stderr}")
    return done.stderr


def assemble(ptxas: str, ptx: pathlib.Path, target: str) -> dict:
    """Kernel -> registers, shared, stack, spill."""
    report = run([ptxas, "-O3", f"-arch={target}", "-v", str(ptx), "-o", str(ptx.with_suffix(f".{target}.cubin"))], f"{ptx.stem} for {target}")
    kernels: dict[str, dict] = {}
    name = ""
    for line in report.splitlines():
        if found := re.search(r"entry function '(\S+)'", line):
            name = found[1]
            kernels[name] = {}
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            if name:
                kernels[name].setdefault("stack", int(found[1]))
                kernels[name].setdefault("spill", int(found[2]) + int(found[3]))
        elif found := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[name] |= {"registers": int(found[1]), "shared": int(shared[1]) if shared else 0}
    return kernels


def count_opcodes(ptx: pathlib.Path) -> dict:
    """Kernel -> opcode class -> count, plus the forbidden ones found."""
    kernels = {}
    for name, body in re.findall(r"\.entry (\w+)\(.*?^\{(.*?)^\}", ptx.read_text(), re.S | re.M):
        code = [re.sub(r"^(@!?%p\d+ )", "", line.strip()) for line in body.splitlines()]
        counts = {kind: sum(bool(re.match(pattern, line)) for line in code) for kind, pattern in OPCODES.items()}
        forbidden = FORBIDDEN | (FORBIDDEN_IN_DECODE if "decode_kernel" in name else {})
        bad = [what for what, pattern in forbidden.items() if any(re.match(pattern, line) for line in code)]
        kernels[name] = {"opcodes": counts, "forbidden": bad}
    return kernels


def measure(nvcc: str, root: pathlib.Path, source: str, targets: list[str], folder: str) -> dict:
    """Of one translation unit, as of_unit(). Opcodes are those of the PTX for COUNTED."""
    compiled, counted = {}, {}
    for virtual, assembled in ptx_targets(source, targets).items():
        ptx = pathlib.Path(folder) / f"{pathlib.Path(source).stem}.{virtual}.ptx"
        run([nvcc, *flags_of(source), f"-arch={virtual}", f"-I{root}", "-ptx", str(root / source), "-o", str(ptx)], source)
        if COUNTED in assembled:
            counted = count_opcodes(ptx)
        compiled |= {target: assemble(str(pathlib.Path(nvcc).parent / "ptxas"), ptx, target) for target in assembled}
    return of_unit(compiled, counted)


def of_unit(compiled: dict, counted: dict) -> dict:
    """Kernel by readable name -> {"on": target -> what ptxas says, "opcodes", "forbidden"}."""
    return {short: {"on": {target: kernels[name] for target, kernels in compiled.items()}, **counted[name]}
            for name, short in demangle(sorted(counted)).items()}


def caps_of(kernels: dict) -> dict:
    """The baseline of a unit's kernels as measured."""
    caps = {}
    for name, kernel in sorted(kernels.items()):
        most = {what: max(on[what] for on in kernel["on"].values()) for what in ("registers", "shared", "stack")}
        caps[name] = {"registers": register_cap(most["registers"]), "shared": most["shared"],
                      **({"stack": most["stack"]} if most["stack"] else {}),
                      "opcodes": {kind: n for kind, n in kernel["opcodes"].items() if n}}
    return caps


def text_of(baseline: dict) -> str:
    """JSON, a line a kernel."""
    units = [f"  {json.dumps(unit)}: {{\n" + ",\n".join(f"    {json.dumps(name)}: {json.dumps(caps)}" for name, caps in kernels.items()) + "\n  }"
             for unit, kernels in sorted(baseline.items())]
    return "{\n" + ",\n".join(units) + "\n}\n"


def check(kernels: dict, baseline: dict) -> list[str]:
    """What breaks the baseline in a unit's kernels."""
    complaints = [f"{name}: {'not in the baseline' if name in kernels else 'in the baseline, but not built'}"
                  for name in sorted(baseline.keys() ^ kernels.keys())]
    for name in sorted(baseline.keys() & kernels.keys()):
        caps, kernel = baseline[name], kernels[name]
        for target, got in kernel["on"].items():
            if got["spill"] > 0:
                complaints.append(f"{name} on {target}: {got['spill']} bytes spilled, no kernel may spill")
            for what in ("stack", "registers", "shared"):
                if got[what] > caps.get(what, 0):
                    complaints.append(f"{name} on {target}: {got[what]} {what}, at most {caps.get(what, 0)}")
        complaints += [f"{name}: {what}" for what in kernel["forbidden"] if what != "local memory" or "stack" not in caps]
        for kind, count in kernel["opcodes"].items():
            expected = caps["opcodes"].get(kind, 0)
            if abs(count - expected) > SLACK * expected:
                complaints.append(f"{name}: {count} {kind} instructions, {expected} in the baseline")
    return complaints


def declared_spills(baseline: dict) -> list[str]:
    return [f"{name}: the baseline of {unit} declares a spill, which is no limit" for unit, kernels in sorted(baseline.items())
            for name, caps in sorted(kernels.items()) if "spill" in caps]


def register_cap(most: int) -> int:
    """The caps that the kernels are launched with: 4, 3 or 2 CTAs of 128 threads an SM (8 for the merge)."""
    return next(cap for cap in (64, 128, 168, 255) if most <= cap)


def main() -> int:
    here = pathlib.Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Check the compiled CUDA kernels against their baseline.")
    parser.add_argument("--root", type=pathlib.Path, default=here.parents[2])
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--baseline", type=pathlib.Path, default=here / "baseline.json")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--all", action="store_true", help="every instance of instances.txt")
    parser.add_argument("--units", metavar="PATTERN", help="of those, units whose name matches this regular expression")
    options = parser.parse_args()
    nvcc = shutil.which(options.nvcc) or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        print("SKIPPED: no nvcc")
        return 77
    supported = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    targets = [t for t in TARGETS if t in supported]
    for target in sorted(set(TARGETS) - set(targets)):
        print(f"not checked: {target}, which this nvcc does not know")
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        sources = SOURCES + write_instances(options.root, pathlib.Path(folder) / "instances", options.all)
        if options.units:
            sources = [s for s in sources if re.search(options.units, pathlib.Path(s).stem)]
        tasks = {s: pool.submit(measure, nvcc, options.root, s, targets, folder) for s in sources}
        measured = {}
        try:
            for n, (source, task) in enumerate(tasks.items(), 1):
                measured[pathlib.Path(source).stem] = task.result()
                print(f"[{n}/{len(sources)}] {pathlib.Path(source).stem}", file=sys.stderr, flush=True)
        except RuntimeError as error:
            print(error)
            pool.shutdown(cancel_futures=True)
            return 1
    baseline = json.loads(options.baseline.read_text())
    if options.update:
        baseline = {unit: caps for unit, caps in baseline.items() if unit in measured or not options.all or options.units}
        baseline |= {unit: caps_of(kernels) for unit, kernels in measured.items()}
        options.baseline.write_text(text_of(baseline))
    complaints = [line for unit, kernels in measured.items() for line in check(kernels, baseline.get(unit, {}))]
    complaints += declared_spills(baseline)
    if options.all and not options.units:
        complaints += [f"{unit}: in the baseline, but not built" for unit in sorted(baseline.keys() - measured.keys())]
    count = sum(len(kernels) for kernels in measured.values())
    print("\n".join(complaints) or f"{count} kernels on {', '.join(targets)}: within their limits")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
