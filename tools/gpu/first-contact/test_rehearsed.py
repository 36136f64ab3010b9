"""Tests of the checks of a rehearsal: each part that is missing is found."""

import unittest

import rehearsed
import report
import run

TESTS = {"kernels": [*run.SMALL, "norms", "slow_norms"], "devices": ["swiglu"]}
DOCTOR = "check of cuda:0    Stand-in GPU\n  copy in its memory 1.0 GB/s\n  products, bf16     1.0 TFLOP/s\n" + " ".join(rehearsed.DOCTOR) + f"\nncu profiles regex:{run.PROFILED}"
REPORTS = [{"complaints": [], "kernels": {"norms/rms": 1}}]


def complete():
    """Returns the results of a complete run."""
    results = [{"stage": stage, "name": name, "ok": True} for stage, name in sorted(rehearsed.wanted(TESTS) - {("-", "end")})]
    for what in rehearsed.MEASURED:
        results.append({"stage": "E", "name": "measured", "ok": True, "model": "m", "sizes": [20, 2, 4], "what": what, "is": {"secs": 1.0}})
    results.append({"stage": "-", "name": "end", "ok": True})
    return [dict(result, output=DOCTOR) if result["name"].startswith("what") else result for result in results]


def problems(results, page=None, reports=REPORTS, sanitized=REPORTS):
    return list(rehearsed.problems(results, page or report.page(results), TESTS, reports, sanitized))


class RehearsedTest(unittest.TestCase):
    def test_a_complete_run_has_no_problem(self):
        self.assertEqual(problems(complete()), [])

    def test_each_missing_result_is_found(self):
        results = complete()
        for at, result in enumerate(results):
            found = problems(results[:at] + results[at + 1 :])
            self.assertTrue(found, f"nothing is said without {result}")

    def test_each_failed_result_is_found(self):
        results = complete()
        for at, result in enumerate(results):
            failed = dict(result, ok=False)
            self.assertTrue(problems([*results[:at], failed, *results[at + 1 :]]), result)

    def test_each_line_of_the_page_that_is_missing_is_found(self):
        results = complete()
        lines = report.page(results).splitlines()
        for at, line in enumerate(lines):
            if line.startswith(("Run on", "## ", "| m |")) or " passed; " in line:
                page = "\n".join(lines[:at] + lines[at + 1 :])
                self.assertTrue(problems(results, page), f"nothing is said without the line {line}")

    def test_complaints_and_kernels_that_no_sanitizer_sees_are_found(self):
        more = [{"complaints": [], "kernels": {"sums/mix": 1}}]
        self.assertEqual(problems(complete(), reports=more), ["no test under the sanitizer launches sums/mix"])
        self.assertIn("a free", problems(complete(), reports=[dict(REPORTS[0], complaints=["a free"])])[0])


if __name__ == "__main__":
    unittest.main()
