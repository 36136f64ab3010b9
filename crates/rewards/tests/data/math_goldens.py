"""What math-verify 0.9 says about the pairs of math.rs. Prints answer, ground truth, verdict. Usage: python math_goldens.py"""

from math_verify import parse, verify

PAIRS = [
    ("1/2", "0.5"), ("\\frac{1}{2}", "0.5"), ("50%", "0.5"), ("50%", "50"), ("1,234", "1234"),
    ("x^2+2x+1", "(x+1)^2"), ("\\sqrt{2}", "2^{1/2}"), ("1 1/2", "1.5"), ("1\\frac{1}{2}", "1.5"), ("3 cm", "3"),
    ("3 cm", "3 m"), ("$3$", "3"), ("The answer is 42.", "42"), ("x = 5", "5"), ("0.333333", "1/3"),
    ("0.333", "1/3"), ("(1,2)", "(2,1)"), ("{1,2}", "{2,1}"), ("1,2", "2,1"),
    ("6.02\\times 10^{23}", "6.02e23"), ("\\boxed{\\frac{1}{3}}", "\\frac{1}{3}"), ("2\\pi", "6.283185"),
    ("happy", "happy"), ("-3", "3"), ("90^\\circ", "90"), ("\\$5", "5"), ("y=2x+1", "2x+1"), ("[1,2)", "(1,2]"),
    ("\\frac12", "0.5"), ("\\text{5 apples}", "5"), ("12 apples", "12"), ("five", "5"), ("i^2", "-1"),
]


def dollars(text):
    return f"${text}$" if any(c in text for c in "\\^{}x=(") and "$" not in text else text


for answer, gold in PAIRS:
    print(repr(answer), repr(gold), verify(parse(dollars(gold)), parse(dollars(answer))))
