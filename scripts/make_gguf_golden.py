#!/usr/bin/env python3
"""Writes tests/golden/gguf_dequant.json: blocks of every GGUF type that libcalib reads, with the values that the `gguf`
package gives them. Blocks are random bytes whose f16 scales are overwritten with numbers of a sane size.

  python scripts/make_gguf_golden.py            (needs the packages gguf and numpy)
  python scripts/make_gguf_golden.py --compare FILE.gguf DUMP
      compares a dump of `dump_tensors FILE.gguf DUMP` (fp32, tensors in name order) with the package, per type.
"""
import argparse
import collections
import json
import pathlib

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type

# type -> byte positions of the f16 fields inside a block
SCALES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0], Type.IQ4_NL: [0],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
    Type.F32: [], Type.F16: [], Type.BF16: [],
}


def blocks(kind, rng):
    elements, size = GGML_QUANT_SIZES[kind]
    count = max(2, 64 // elements)
    if kind in (Type.F32, Type.F16, Type.BF16):
        values = rng.standard_normal(count * elements).astype(np.float32)
        if kind == Type.F16:
            values = values.astype(np.float16)
        raw = values.view(np.uint8).reshape(count, -1)
        return raw[:, 2:].copy() if kind == Type.BF16 else raw
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = (rng.standard_normal(count) * 0.05).astype(np.float16)
        raw[:, at:at + 2] = scales.view(np.uint8).reshape(count, 2)
    return raw


def golden():
    rng = np.random.default_rng(7)
    out = {}
    for kind in SCALES:
        raw = blocks(kind, rng)
        values = gguf.quants.dequantize(raw.reshape(1, -1), kind).astype(np.float32).ravel()
        # fp32 bit patterns: exact, and short to read back
        out[kind.name] = {"blocks": raw.tobytes().hex(), "values": values.view(np.uint32).tolist()}
    return out


def compare(path, dump):
    reader = gguf.GGUFReader(path)
    data = np.fromfile(dump, dtype=np.float32)
    at, worst = 0, collections.defaultdict(lambda: [0, 0.0])
    for tensor in sorted(reader.tensors, key=lambda t: t.name.encode()):
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).ravel()
        got = data[at:at + want.size]
        at += want.size
        row = worst[tensor.tensor_type.name]
        row[0] += want.size
        row[1] = max(row[1], float(np.max(np.abs(want - got))))
    for name, (count, difference) in worst.items():
        print(f"{name}: {count} values, max |difference| {difference}")
    print(f"{at} of {data.size} dumped values compared")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", nargs=2, metavar=("GGUF", "DUMP"))
    args = parser.parse_args()
    if args.compare:
        compare(*args.compare)
        return
    path = pathlib.Path(__file__).resolve().parent.parent / "tests/golden/gguf_dequant.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f' {json.dumps(k)}: {json.dumps(v, separators=(",", ":"))}' for k, v in golden().items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(path, path.stat().st_size, "bytes")


main()
