"""The predictions: they reproduce what was measured and count what the kernels compute, and the committed page is theirs."""

import json
import pathlib
import re
import shutil
import tempfile
import unittest

import predict

ROOT = pathlib.Path(predict.__file__).resolve().parents[2]


class Page(unittest.TestCase):
    def test_measured_times_are_reproduced(self):
        ratios = predict.reproduced()
        self.assertGreater(len(ratios), 50)
        self.assertEqual({key: ratio for key, ratio in ratios.items() if not 0.9 <= ratio <= 1.1}, {})

    def test_attention_has_the_products_of_the_kernels(self):
        """Tensor cores are used by `products` and `accumulate`, and in two places of the forward pass."""
        text = (ROOT / "crates/gpu/cuda/attention.cu").read_text()
        bodies = re.findall(r"DEVICE void (forward|backward_q|backward_kv)\((.*?)\n}\n", text, re.S)
        counts = {name: len(re.findall(r"\b(?:products|accumulate)<|mma\(.*mma\(", body)) for name, body in bodies}
        self.assertEqual(counts, {"forward": predict.FORWARD, "backward_q": 3, "backward_kv": predict.BACKWARD - 3})

    def test_parts_are_those_of_the_kernels(self):
        """Tiles, width and parts of the products of 3B, of a key projection and of a tiny one."""
        for tiles, k, parts in ((40, 2048, 6), (32, 11008, 8), (344, 2048, 1), (4, 2048, 16), (1, 8, 1)):
            self.assertEqual(predict.parts_of(tiles, k), parts)

    def test_the_counted_instructions_are_those_of_the_kernels(self):
        """If this fails, count again: see predict.py."""
        counted = json.loads(predict.INSTRUCTIONS.read_text())
        self.assertEqual(counted["sources"], predict.fingerprint(ROOT / "crates/gpu/cuda"))

    def test_a_changed_kernel_has_another_fingerprint(self):
        with tempfile.TemporaryDirectory() as folder:
            cuda = pathlib.Path(shutil.copytree(ROOT / "crates/gpu/cuda", folder, dirs_exist_ok=True))
            text = (cuda / "linear.cu").read_text()
            for changed, same in ((text + "// A comment.\n", True), (text.replace("STAGES = 4", "STAGES = 5"), False)):
                (cuda / "linear.cu").write_text(changed)
                self.assertEqual(predict.fingerprint(cuda) == predict.fingerprint(ROOT / "crates/gpu/cuda"), same)

    def test_the_longest_loop_with_products_is_counted(self):
        """A loop without products, and one around it."""
        lines = ["f:", ".L_x_1:", "  /*0000*/  LDSM.16.M88.4 R4, [R2] ;", ".L_x_2:", "  /*0010*/  IADD3 R1, R1, 0x1, RZ ;"]
        lines += ["  /*0020*/  @P0 BRA `(.L_x_2) ;", "  /*0030*/  HMMA.16816.F32.BF16 R8, R4, R2, R8 ;", "  /*0040*/  @!P1 BRA `(.L_x_1) ;", "  /*0050*/  EXIT ;"]
        self.assertEqual(predict.main_loop("\n".join(lines)), {"all": 5, "HMMA": 1, "LDSM": 1})

    def test_the_committed_page_is_up_to_date(self):
        self.assertEqual((ROOT / "docs/generated/gpu-results.md").read_text(), predict.page())


if __name__ == "__main__":
    unittest.main()
