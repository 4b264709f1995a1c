#!/usr/bin/env python3
"""Writes tests/golden/llamacpp_blocks.bin: blocks of 32 values with the bytes of llama.cpp's formats.
With a path to libggml-base.so (llama.cpp built with BUILD_SHARED_LIBS=ON) also tests/golden/llamacpp_iq4_nl.bin.

The bytes come from the quantisers of the `gguf` package, which follow llama.cpp's reference row quantisers bit for bit.
Layout: records of 32 float32, 34 bytes q8_0, 18 q4_0, 20 q4_1, 22 q5_0, 24 q5_1; little-endian, no header. Seeded: the same file every time.
The `gguf` package has no quantiser for iq4_nl; its 18 bytes a block come from quantize_row_iq4_nl_ref of the library itself.
"""
import ctypes
import pathlib
import sys

import numpy as np
from gguf import GGMLQuantizationType, quants

rng = np.random.Generator(np.random.PCG64(20))
blocks = rng.standard_normal((192, 32)).astype(np.float32)
blocks[32:64] *= np.float32(2.0) ** rng.integers(-30, 12, (32, 1)).astype(np.float32)  # scales from subnormal fp16 to thousands
blocks[64:96] = np.round(blocks[64:96] * 4) / 4  # equal magnitudes of both signs, exact halves
blocks[96:112] = np.abs(blocks[96:112]) + 5  # one-sided
blocks[112:128] = -np.abs(blocks[112:128])
blocks[128:144] = rng.integers(-8, 8, (16, 32)).astype(np.float32) + np.float32(0.5)
blocks[144, :] = 0
blocks[145, :] = 3.25
blocks[146, :] = -3.25
blocks[147, :] = 0
blocks[147, 17] = -1e-3
blocks[148:152] *= np.float32(1e-9)  # scale rounds to zero

types = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
coded = [quants.quantize(blocks, GGMLQuantizationType[name]) for name in types]
out = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden" / "llamacpp_blocks.bin"
out.write_bytes(b"".join(b.astype("<f4").tobytes() + b"".join(c[i].tobytes() for c in coded) for i, b in enumerate(blocks)))
print(f"{out}: {len(blocks)} blocks, {out.stat().st_size} bytes")

if len(sys.argv) > 1:
    coded_iq4_nl = (ctypes.c_uint8 * (18 * len(blocks)))()
    ctypes.CDLL(sys.argv[1]).quantize_row_iq4_nl_ref(blocks.ctypes.data_as(ctypes.c_void_p), coded_iq4_nl, ctypes.c_int64(blocks.size))
    iq4_nl = out.with_name("llamacpp_iq4_nl.bin")
    iq4_nl.write_bytes(bytes(coded_iq4_nl))
    print(f"{iq4_nl}: {len(blocks)} blocks, {iq4_nl.stat().st_size} bytes")
