#!/usr/bin/env python3
"""Each limit of check_gates.py turns red when it is broken."""

import copy
import unittest

import check_gates

BASELINE = {"kernel": {"registers": 128, "shared": 4096, "opcodes": {"mma": 100, "bar": 6}}}
MEASURED = {"sm_90": {"kernel": {"registers": 120, "shared": 4096, "stack": 0, "spill": 0}}}
PTX = {"kernel": {"opcodes": {"mma": 102, "bar": 6, "div": 0}, "forbidden": []}}


class CheckGates(unittest.TestCase):
    def complaints(self, measured=None, opcodes=None, forbidden=None):
        got, ptx = copy.deepcopy(MEASURED), copy.deepcopy(PTX)
        got["sm_90"]["kernel"] |= measured or {}
        ptx["kernel"]["opcodes"] |= opcodes or {}
        ptx["kernel"]["forbidden"] = forbidden or []
        return check_gates.check(got, ptx, BASELINE)

    def test_inside_all_limits(self):
        self.assertEqual(self.complaints(), [])

    def test_each_limit(self):
        self.assertEqual(self.complaints({"spill": 8}), ["kernel on sm_90: 8 bytes of spill"])
        self.assertEqual(self.complaints({"stack": 16}), ["kernel on sm_90: 16 bytes of stack"])
        declared = copy.deepcopy(MEASURED)
        declared["sm_90"]["kernel"]["stack"] = 24
        allowed = {"kernel": BASELINE["kernel"] | {"stack": 16}}
        self.assertEqual(check_gates.check(declared, PTX, allowed), ["kernel on sm_90: 24 bytes of stack, at most 16"])
        spilling = copy.deepcopy(MEASURED)
        spilling["sm_90"]["kernel"]["spill"] = 8
        self.assertEqual(check_gates.check(spilling, PTX, {"kernel": BASELINE["kernel"] | {"spill": 8}}), [])
        self.assertEqual(check_gates.check(spilling, PTX, {"kernel": BASELINE["kernel"] | {"spill": 4}}), ["kernel on sm_90: 8 bytes of spill, at most 4"])
        declared["sm_90"]["kernel"]["stack"] = 16
        self.assertEqual(check_gates.check(declared, PTX, allowed), [])
        self.assertEqual(self.complaints({"registers": 129}), ["kernel on sm_90: 129 registers, at most 128"])
        self.assertEqual(self.complaints({"shared": 4097}), ["kernel on sm_90: 4097 shared, at most 4096"])
        self.assertEqual(self.complaints(opcodes={"mma": 106}), ["kernel: 106 mma instructions, 100 in the baseline"])
        self.assertEqual(self.complaints(opcodes={"bar": 7}), ["kernel: 7 bar instructions, 6 in the baseline"])
        self.assertEqual(self.complaints(opcodes={"div": 1}), ["kernel: 1 div instructions, 0 in the baseline"])
        self.assertEqual(self.complaints(forbidden=["local memory"]), ["kernel: local memory"])

    def test_kernels_that_come_or_go(self):
        self.assertEqual(check_gates.check(MEASURED, PTX, {}), ["kernel: not in the baseline"])
        self.assertEqual(check_gates.check({"sm_90": {}}, {}, BASELINE), ["kernel: in the baseline, but not built"])


if __name__ == "__main__":
    unittest.main()
