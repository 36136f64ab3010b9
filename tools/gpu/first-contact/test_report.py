"""Tests of the page about a run on a card."""

import json
import unittest

import report

RESULTS = [
    {"stage": "-", "name": "begin", "ok": True, "commit": "abc", "date": "2026-01-02"},
    {"stage": "A", "name": "what doctor says", "ok": True, "output": "check of cuda:0 Some Card\nfine"},
    {"stage": "B", "name": "kernels::norms", "ok": True},
    {"stage": "B", "name": "kernels::sums", "ok": False, "ended_with": 101, "output": "wrong sums"},
    {"stage": "B", "name": "stage", "ok": False, "ended_with": "the stage's time is over"},
    {"stage": "C", "name": "compute-sanitizer", "ok": False, "skipped": "not found"},
    {"stage": "E", "name": "measured", "ok": True, "model": "3b", "sizes": [1792, 8, 256], "what": "product",
     "is": {"name": "model.q", "rows": 64, "n": 2048, "k": 2048, "secs": 0.002, "flops": 843e9}},
    {"stage": "-", "name": "end", "ok": True},
]  # fmt: skip


class ReportTest(unittest.TestCase):
    def page(self, text):
        return report.page(report.read(text))

    def test_a_complete_run(self):
        page = self.page("".join(json.dumps(result) + "\n" for result in RESULTS))
        self.assertTrue(page.startswith("Run on Some Card, 2026-01-02, commit abc."), page)
        for part in (
            "1 of 3 passed; 0 were skipped.",
            "**kernels::sums failed** (101):\n\n```\nwrong sums\n```",
            "**stage failed** (the stage's time is over)",
            "Skipped: not found.",
            "at 843 TFLOP/s or of the bytes at 2945 GB/s, the rates of an H100.",
            # 843e9 FLOP take 1 ms at the rate of a product.
            "| 3b | product q | 64 | 2.000 | 421.5 TFLOP/s | 50% | 0.0",
        ):
            self.assertIn(part, page)
        self.assertNotIn("cut off", page)

    def test_the_rates_of_the_card(self):
        doctor = "check of cuda:0    Some Card\n  products in bf16 72 kinds\n  copy in its memory 1000.0 GB/s\n  products, bf16   1400 TFLOP/s\n"
        results = [dict(result, output=doctor) if result["stage"] == "A" else result for result in RESULTS]
        page = report.page(results)
        self.assertIn("at 1400 TFLOP/s or of the bytes at 1000 GB/s, the rates of this card.", page)
        self.assertIn("| 3b | product q | 64 | 2.000 | 421.5 TFLOP/s | 30% | 0.0", page)

    def test_rates_of_zero(self):
        doctor = "  copy in its memory 0.0 GB/s\n  products, bf16     0.0 TFLOP/s\n"
        results = [dict(result, output=doctor) if result["stage"] == "A" else result for result in RESULTS]
        self.assertIn("the rates of an H100.", report.page(results))

    def test_every_truncation_makes_a_page(self):
        text = "".join(json.dumps(result) + "\n" for result in RESULTS)
        for end in range(len(text) - 1):
            self.assertIn("The run was cut off", self.page(text[:end]))
        self.assertTrue(self.page(text[: text.index("\n") + 9]).startswith("Run on an unknown card, 2026-01-02, commit abc."))


if __name__ == "__main__":
    unittest.main()
