"""The page of estimates: its formulas count what the kernels compute, and the committed page is the one that estimates.py writes."""

import pathlib
import re
import unittest

import estimates

ROOT = pathlib.Path(estimates.__file__).resolve().parents[2]


class Page(unittest.TestCase):
    def test_attention_has_the_products_of_the_kernels(self):
        """Tensor cores are used by `products` and `accumulate`, once each per call, in three kernels that training launches."""
        text = (ROOT / "crates/gpu/cuda/attention.cu").read_text()
        bodies = re.findall(r"DEVICE void (forward|backward_q|backward_kv)\((.*?)\n}\n", text, re.S)
        counts = [len(re.findall(r"\b(?:products|accumulate)<", body)) for _, body in bodies]
        self.assertEqual((counts, sum(counts)), ([2, 3, 4], estimates.ATTENTION_PRODUCTS))

    def test_the_committed_page_is_up_to_date(self):
        self.assertEqual((ROOT / "bench/gpu/estimates.md").read_text(), estimates.estimate_page())


if __name__ == "__main__":
    unittest.main()
