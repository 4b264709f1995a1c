#!/usr/bin/env python3
"""scripts/check_layers.py accepts the allowed edges and reports each kind of forbidden one, with file and line."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "check_layers.py"
TABLE = """# libcalib

| module | duty | may include |
|---|---|---|
| base | errors | `fmt`, `nlohmann` |
| kernels (`kvrt`) | layout | the standard library only |
| model | runs | `base`, `kernels/codec/half.h`, `libtorch` |
| io | files | `base`, `hdf5` |
| tools | wiring | everything above: `base`, `model`, `io`; `cli11` |
"""
ALLOWED = {
    "libcalib/base/error.h": "#include <string>\n#include <nlohmann/json_fwd.hpp>\n",
    "libcalib/base/json.cc": '#include "libcalib/base/error.h"\n#include <nlohmann/json.hpp>\n#include <sys/stat.h>\n',
    "libcalib/io/h5.cc": '#include <hdf5.h>\n#include "libcalib/base/error.h"\n',
    "libcalib/model/torch_block.h": "#include <ATen/ATen.h>\n",
    "libcalib/model/runner.cc": '#include "libcalib/model/torch_block.h"\n#include "kernels/codec/half.h"\n',
    "kernels/codec/half.h": "#include <cstdint>\nint low(int code) { return code & 0xF; }\n",
    "tools/kvcalib/main.cc": '#include <CLI/CLI.hpp>\n#include "libcalib/io/h5.h"\n',
}


class CheckLayersTest(unittest.TestCase):
    def check(self, path=None, text="", table=TABLE):
        """Exit code and output over ALLOWED with one file more."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            files = dict(ALLOWED, **{"libcalib/ARCHITECTURE.md": table}, **({path: text} if path else {}))
            for name, content in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(content, encoding="utf-8")
            done = subprocess.run(
                [sys.executable, SCRIPT, "--root", root], capture_output=True, text=True, check=False)
            return done.returncode, done.stdout + done.stderr

    def assert_reported(self, path, line, expected):
        code, output = self.check(path, line + "\n")
        self.assertEqual(code, 1, output)
        self.assertIn(f"{path}:1: ", output)
        self.assertIn(expected, output)
        self.assertIn("1 forbidden edges", output)

    def test_allowed_edges_pass(self):
        code, output = self.check()
        self.assertEqual((code, output), (0, f"check_layers: {len(ALLOWED)} files, 0 forbidden edges\n"))

    def test_upward_edge(self):
        self.assert_reported("libcalib/base/up.cc", '#include "libcalib/model/runner.h"', "belongs to model")

    def test_only_the_named_header_of_a_module(self):
        self.assert_reported("libcalib/model/k.cc", '#include "kernels/codec/pack.h"', "belongs to kernels")

    def test_kernels_depend_on_nothing_of_ours(self):
        self.assert_reported("kernels/codec/e.h", '#include "libcalib/base/error.h"', "kernels may include nothing")

    def test_nobody_includes_tests(self):
        self.assert_reported("libcalib/base/t.cc", '#include "tests/support/x.h"', "belongs to tests")

    def test_library_outside_its_modules(self):
        self.assert_reported("libcalib/io/t.cc", "#include <torch/torch.h>", "is libtorch; io may include")

    def test_library_in_a_public_header(self):
        self.assert_reported("libcalib/io/h5.h", "#include <hdf5.h>", "may stand in .cc files only")
        self.assert_reported("libcalib/base/json.h", "#include <nlohmann/json.hpp>", "may stand in .cc files only")
        self.assert_reported("libcalib/model/runner.h", "#include <ATen/ATen.h>", "may stand in .cc files only")

    def test_unknown_library(self):
        self.assert_reported("libcalib/base/b.cc", "#include <boost/any.hpp>", "does not know")

    def test_relative_include(self):
        self.assert_reported("libcalib/base/r.cc", '#include "error.h"', "no path from the repository root")

    def test_module_without_a_row(self):
        code, output = self.check("libcalib/export/e.cc", "")
        self.assertEqual(code, 1)
        self.assertIn("libcalib/export/e.cc: module export has no row", output)

    def test_shifted_code_outside_kernels(self):
        self.assert_reported("libcalib/io/c.cc", "auto low = codes[i] & 0xF;", "shifts or masks a code")

    def test_edge_that_names_nothing(self):
        code, output = self.check(table=TABLE.replace("`hdf5`", "`hdf6`"))
        self.assertEqual(code, 1)
        self.assertIn("io: `hdf6` is no module, library or header", output)

    def test_empty_table(self):
        code, output = self.check(table="# libcalib\n")
        self.assertEqual(code, 1)
        self.assertIn("has no table of modules", output)


if __name__ == "__main__":
    unittest.main()
