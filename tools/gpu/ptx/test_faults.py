"""Tests that every planted fault changes a text of the present kernels, and names a test that exists."""

import unittest
from pathlib import Path

from faults import CUDA, FAULTS, planted

TESTS = CUDA.parent / "tests" / "kernels"


class Faults(unittest.TestCase):
    def test_each_changes_a_text(self):
        for fault in FAULTS:
            text = (CUDA / f"{fault.file}.cu").read_text()
            planted(fault, text)
            self.assertIn('#include "prim.cuh"', text, fault.what)

    def test_each_names_tests_that_exist(self):
        for fault in FAULTS:
            for name in fault.tests.split():
                module, _, test = name.rpartition("::")
                text = (TESTS / f"{module or 'main'}.rs").read_text()
                self.assertIn(f"fn {test}()", text, fault.what)


if __name__ == "__main__":
    unittest.main()
