#!/usr/bin/env python3
"""Each limit of check_gates.py turns red when it is broken."""

import copy
import json
import unittest

import check_gates

BASELINE = {"kernel": {"registers": 128, "shared": 4096, "opcodes": {"mma": 100, "bar": 6}}}
MEASURED = {"kernel": {"on": {"sm_90": {"registers": 120, "shared": 4096, "stack": 0, "spill": 0}},
                       "opcodes": {"mma": 102, "bar": 6, "div": 0}, "forbidden": []}}


class CheckGates(unittest.TestCase):
    def complaints(self, on=None, opcodes=None, forbidden=None, declared=None):
        got, baseline = copy.deepcopy(MEASURED), copy.deepcopy(BASELINE)
        got["kernel"]["on"]["sm_90"] |= on or {}
        got["kernel"]["opcodes"] |= opcodes or {}
        got["kernel"]["forbidden"] = forbidden or []
        baseline["kernel"] |= declared or {}
        return check_gates.check(got, baseline)

    def test_inside_all_limits(self):
        self.assertEqual(self.complaints(), [])

    def test_each_limit(self):
        self.assertEqual(self.complaints({"stack": 16}), ["kernel on sm_90: 16 stack, at most 0"])
        self.assertEqual(self.complaints({"registers": 129}), ["kernel on sm_90: 129 registers, at most 128"])
        self.assertEqual(self.complaints({"shared": 4097}), ["kernel on sm_90: 4097 shared, at most 4096"])
        self.assertEqual(self.complaints(opcodes={"mma": 106}), ["kernel: 106 mma instructions, 100 in the baseline"])
        self.assertEqual(self.complaints(opcodes={"bar": 7}), ["kernel: 7 bar instructions, 6 in the baseline"])
        self.assertEqual(self.complaints(opcodes={"div": 1}), ["kernel: 1 div instructions, 0 in the baseline"])
        self.assertEqual(self.complaints(forbidden=["local memory"]), ["kernel: local memory"])

    def test_declared_stack_is_a_limit(self):
        self.assertEqual(self.complaints({"stack": 16}, forbidden=["local memory"], declared={"stack": 16}), [])
        self.assertEqual(self.complaints({"stack": 24}, declared={"stack": 16}), ["kernel on sm_90: 24 stack, at most 16"])

    def test_no_kernel_may_spill(self):
        spilled = ["kernel on sm_90: 8 bytes spilled, no kernel may spill"]
        self.assertEqual(self.complaints({"spill": 8}), spilled)
        self.assertEqual(self.complaints({"spill": 8}, declared={"spill": 8}), spilled)
        self.assertEqual(check_gates.declared_spills({"unit": BASELINE}), [])
        self.assertEqual(check_gates.declared_spills({"unit": {"kernel": BASELINE["kernel"] | {"spill": 8}}}),
                         ["kernel: the baseline of unit declares a spill, which is no limit"])

    def test_an_update_declares_no_spill(self):
        measured = copy.deepcopy(MEASURED)
        measured["kernel"]["on"]["sm_90"]["spill"] = 8
        caps = check_gates.caps_of(measured)
        self.assertNotIn("spill", caps["kernel"])
        self.assertEqual(check_gates.check(measured, caps), ["kernel on sm_90: 8 bytes spilled, no kernel may spill"])

    def test_kernels_that_come_or_go(self):
        self.assertEqual(check_gates.check(MEASURED, {}), ["kernel: not in the baseline"])
        self.assertEqual(check_gates.check({}, BASELINE), ["kernel: in the baseline, but not built"])

    def test_a_measured_baseline_holds(self):
        caps = check_gates.caps_of(MEASURED)
        self.assertEqual(check_gates.check(MEASURED, caps), [])
        self.assertEqual(json.loads(check_gates.text_of({"unit": caps, "other": caps})), {"other": caps, "unit": caps})


if __name__ == "__main__":
    unittest.main()
