//! `math`: equality of the values of two numbers or formulas. Range {0, 1}.
//!
//! Supported: integers, decimals, scientific notation, thousands separators, fractions, mixed numbers, percent, roots, powers,
//! factorials, absolute values, common functions, π and e, polynomials and other formulas in variables, tuples, intervals and
//! sets. They may be plain text or LaTeX, with `\boxed`, `$`, `\text` and trailing units. Formulas are compared by their values
//! at fixed points, so `x^2+2x+1` equals `(x+1)^2`.
//!
//! Unsupported, and compared as text: matrices, inequalities, equations with formulas on both sides, complex numbers, logarithms
//! with a base, number words, conversion of units ("1 m" and "100 cm").
//!
//! Source of the rules: the behaviour of math-verify 0.9, which R1-V and VLM-R1 use. Deliberate differences: different units are
//! different answers. "1 1/2" is 1.5. An answer in words counts only if it contains exactly one number. Numbers that agree to six
//! decimals must also agree to a hundredth of their size, so that 1e-7 is not 2e-7.

use std::sync::LazyLock;

use regex::Regex;

use crate::answer::Question;
use crate::latex::{boxed, plain_text};

/// Maximum number of characters of a formula. Longer texts are only compared as text.
const MAX_CHARS: usize = 512;
const MAX_DEPTH: u32 = 40;
/// Number of points at which equal formulas must agree.
const POINTS: u32 = 4;
/// Inverse of the precision for decimal and irrational numbers, as in math-verify: 0.166667 is 1/6.
const DECIMALS: f64 = 1e6;
/// Relative tolerance for small numbers, so that they do not become equal through rounding.
const SMALL_TOLERANCE: f64 = 1e-2;
/// Relative tolerance for the values of a formula at a point.
const RELATIVE_TOLERANCE: f64 = 1e-6;
/// Relative tolerance for integers. They must be equal as long as an f64 represents them exactly.
const INTEGER_TOLERANCE: f64 = 1e-14;

pub(crate) fn score(question: &Question<'_>) -> Option<f64> {
    (!question.gold.is_empty()).then(|| f64::from(same(&question.answer, &question.gold)))
}

/// Returns true if the text is a number, possibly with a unit, without variables. Ranges, dates and scores ("3-4", "1/2/2020")
/// are not numbers, since different texts would have equal values.
pub(crate) fn is_number(text: &str) -> bool {
    text.chars().any(|c| c.is_ascii_digit())
        && prepare(text).is_some_and(|Prepared { text, .. }| {
            let (number, _) = split_unit(&text);
            let sum = SUM.as_ref().is_some_and(|sum| sum.is_match(number));
            let literal = !sum && number.matches('/').count() <= 1;
            literal && value(number, 0).is_some_and(|value| !value.has_variables)
        })
}

/// Returns true for a number, or for a formula that has a command, a power or a definition.
pub(crate) fn is_formula(text: &str) -> bool {
    let marked = text.contains(['\\', '^', '=']);
    let formula = |Prepared { text, .. }: Prepared| items(&text).is_some() || value(&text, 0).is_some();
    is_number(text) || (marked && prepare(text).is_some_and(formula))
}

/// Returns true for a tuple, an interval or a set: brackets around numbers, formulas, names of variables, or other such brackets.
/// Brackets around words are no tuple.
pub(crate) fn is_tuple(text: &str) -> bool {
    /// Maximum number of tuples in each other.
    const MAX_NESTED: usize = 4;
    fn encloses(text: &str, nested: usize) -> bool {
        let scalar = |text: &str| value(split_unit(text).0, 0).is_some();
        nested < MAX_NESTED
            && items(text).is_some_and(|Items { brackets, items }| {
                brackets.0 != ' ' && items.iter().all(|item| scalar(item) || encloses(item, nested + 1))
            })
    }
    prepare(text).is_some_and(|Prepared { defines, text }| defines.is_none() && encloses(&text, 0))
}

/// Returns true for the same value, or the same text apart from spacing. An empty ground truth equals nothing.
pub(crate) fn same(answer: &str, gold: &str) -> bool {
    if gold.trim().is_empty() {
        return false;
    }
    let (Some(gold_side), Some(answer_side)) = (prepare(gold), prepare(answer)) else {
        return squeezed(answer) == squeezed(gold);
    };
    if matches!((&gold_side.defines, &answer_side.defines), (Some(gold), Some(answer)) if gold != answer) {
        return false;
    }
    let (gold_text, answer_text) = (gold_side.text, answer_side.text);
    if squeezed(&answer_text) == squeezed(&gold_text) || same_formula(&answer_text, &gold_text) {
        return true;
    }
    let in_words = is_number(gold) && !is_number(answer);
    in_words && only_number(&answer_text).is_some_and(|number| same_formula(number, &gold_text))
}

/// Removes white space, but keeps one space between digits: "1 2" is not "12".
fn squeezed(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for word in text.split_whitespace() {
        let digits =
            out.ends_with(|c: char| c.is_ascii_digit()) && word.starts_with(|c: char| c.is_ascii_digit());
        if digits {
            out.push(' ');
        }
        out.push_str(word);
    }
    out
}

macro_rules! expression {
    ($name:ident, $pattern:literal) => {
        // The expression is constant. If it did not compile, the first test would fail.
        static $name: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new($pattern).ok());
    };
}

expression!(THOUSANDS, r"(?:^|[^\d.])(\d{1,3}(?:,\d{3})+)(?:[^\d]|$)");
expression!(SPACED_THOUSANDS, r"\A([-+]?\d{1,3}(?: \d{3})+)((?:\.\d+)?(?:\s*[^\d\s.,/].*)?)\z");
expression!(MIXED, r"\A([-+]?)(\d+)\s+(\d+)\s*/\s*(\d+)\z");
expression!(MIXED_LATEX, r"(^|[^\w.}])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}");
expression!(
    WITH_UNIT,
    r"\A([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?)(\s*)([\p{L}µ](?:[\p{L}µ²³/*. -]|\^-?\d)*)\z"
);
expression!(NUMBER, r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?%?");
expression!(SUM, r"[^eE^{(*/\s]\s*[-+]");
expression!(DEFINED, r"\A\s*((?:[A-Za-z]|\\[A-Za-z]+|[A-Za-z]\([A-Za-z]\))(?:_\{?\w+\}?)?)\s*=\s*([^=]+)\z");

fn captures<'t>(expression: &LazyLock<Option<Regex>>, text: &'t str) -> Option<regex::Captures<'t>> {
    expression.as_ref()?.captures(text)
}

/// The formula of a text, in normal form.
struct Prepared {
    /// Name on the left side of "x = 5".
    defines: Option<String>,
    text: String,
}

/// Commands and characters with the text that replaces them, in this order.
const PLAIN: [(&str, &str); 37] = [
    ("\\\\", "\\"),
    ("\\(", ""),
    ("\\)", ""),
    ("\\[", ""),
    ("\\]", ""),
    ("\\left", ""),
    ("\\right", ""),
    ("\\!", ""),
    ("\\,", " "),
    ("\\;", " "),
    ("\\:", " "),
    ("\\ ", " "),
    ("~", " "),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("°", ""),
    ("\\%", "%"),
    ("\\$", ""),
    ("$", ""),
    ("€", ""),
    ("£", ""),
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\cdot", "*"),
    ("\\times", "*"),
    ("\\div", "/"),
    ("×", "*"),
    ("·", "*"),
    ("÷", "/"),
    ("−", "-"),
    ("–", "-"),
    ("π", "\\pi "),
    ("√", "\\sqrt "),
    ("∞", "\\infty "),
    ("\\{", "⦃"),
    ("\\}", "⦄"),
    ("**", "^"),
];

/// Returns `None` if the text is too long or empty.
fn prepare(text: &str) -> Option<Prepared> {
    let text = boxed(text).unwrap_or(text).trim();
    if text.is_empty() || text.len() > MAX_CHARS {
        return None;
    }
    // If there is other text, the last formula between dollar signs counts.
    let text = match text.match_indices('$').map(|(at, _)| at).collect::<Vec<_>>()[..] {
        [.., from, to] if to > from + 1 && !text[..from].ends_with('\\') => &text[from + 1..to],
        _ => text,
    };
    let mut text = text.to_owned();
    for (from, to) in PLAIN {
        if text.contains(from) {
            text = text.replace(from, to);
        }
    }
    text = plain_text(&text);
    while let Some(group) = captures(&THOUSANDS, &text).and_then(|found| found.get(1).map(|g| g.range())) {
        let plain = text[group.clone()].replace(',', "");
        text.replace_range(group, &plain);
    }
    if let Some(found) = captures(&SPACED_THOUSANDS, text.trim()) {
        text = format!("{}{}", found[1].replace(' ', ""), &found[2]);
    }
    if let Some(found) = captures(&MIXED, text.trim()) {
        text = format!("{}({}+{}/{})", &found[1], &found[2], &found[3], &found[4]);
    }
    if let Some(expression) = MIXED_LATEX.as_ref() {
        text = expression.replace_all(&text, r"$1($2+\frac{$3}{$4})").into_owned();
    }
    let text = text.trim().trim_end_matches(['.', '。', ',', ';']).trim();
    let definition = captures(&DEFINED, text);
    let definition =
        definition.as_ref().and_then(|found| Some((found.get(1)?.as_str(), found.get(2)?.as_str())));
    let (defines, text) = definition.map_or((None, text), |(name, text)| (Some(squeezed(name)), text.trim()));
    (!text.is_empty()).then(|| Prepared { defines, text: text.to_owned() })
}

/// Splits a number from its unit. A single letter is a unit only after a space: "3 m", but not "3x".
fn split_unit(text: &str) -> (&str, &str) {
    let Some(found) = captures(&WITH_UNIT, text) else { return (text, "") };
    let (Some(number), Some(space), Some(unit)) = (found.get(1), found.get(2), found.get(3)) else {
        return (text, "");
    };
    let word: String = unit.as_str().chars().take_while(|c| c.is_alphabetic()).collect();
    let formula = FUNCTIONS.contains(&word.as_str()) || word == "pi" || word == "e";
    let long = word.chars().count() >= 2;
    let short = !space.is_empty()
        && ["m", "g", "s", "h", "l", "L", "A", "V", "W", "N", "J", "K", "C", "F"].contains(&word.as_str());
    if formula || !(long || short) { (text, "") } else { (number.as_str(), unit.as_str()) }
}

/// Returns the number of a text that contains exactly one.
fn only_number(text: &str) -> Option<&str> {
    let mut numbers = NUMBER.as_ref()?.find_iter(text);
    let only = numbers.next()?;
    numbers.next().is_none().then_some(only.as_str())
}

fn same_formula(answer: &str, gold: &str) -> bool {
    match (items(answer), items(gold)) {
        (Some(answer), Some(gold)) => same_items(&answer, &gold),
        (None, None) => same_scalar(answer, gold),
        _ => false,
    }
}

/// A tuple, interval, set or bare list.
struct Items<'t> {
    brackets: (char, char),
    items: Vec<&'t str>,
}

fn items(text: &str) -> Option<Items<'_>> {
    let text = text.trim();
    let first = text.chars().next()?;
    let last = text.chars().next_back()?;
    let set = matches!((first, last), ('⦃', '⦄') | ('{', '}'));
    let enclosed = set || (matches!(first, '(' | '[') && matches!(last, ')' | ']'));
    if enclosed {
        let inside = text.get(first.len_utf8()..text.len() - last.len_utf8())?;
        let brackets = if set { ('{', '}') } else { (first, last) };
        if let Some(items) = split_list(inside) {
            return Some(Items { brackets, items });
        }
        if first == '⦃' {
            return Some(Items { brackets, items: vec![inside] });
        }
    }
    // "(a), (b)" also starts and ends with parentheses, but they are not one pair.
    split_list(text).map(|items| Items { brackets: (' ', ' '), items })
}

/// Splits a text at the commas outside all brackets. Returns `None` without such a comma, or if brackets do not match.
fn split_list(text: &str) -> Option<Vec<&str>> {
    let (mut depth, mut from) = (0i32, 0);
    let mut parts = Vec::new();
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' | '⦃' => depth += 1,
            ')' | ']' | '}' | '⦄' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
        if depth < 0 {
            return None;
        }
    }
    parts.push(text[from..].trim());
    (depth == 0 && parts.len() > 1 && parts.len() <= 64).then_some(parts)
}

fn same_items(answer: &Items<'_>, gold: &Items<'_>) -> bool {
    if answer.brackets != gold.brackets || answer.items.len() != gold.items.len() {
        return false;
    }
    if gold.brackets != ('{', '}') {
        return answer.items.iter().zip(&gold.items).all(|(a, g)| same_formula(a, g));
    }
    let mut left: Vec<&str> = answer.items.clone();
    gold.items.iter().all(|gold| match left.iter().position(|answer| same_formula(answer, gold)) {
        Some(at) => {
            left.swap_remove(at);
            true
        }
        None => false,
    })
}

fn same_scalar(answer: &str, gold: &str) -> bool {
    if squeezed(answer) == squeezed(gold) {
        return true;
    }
    let (answer, answer_unit) = split_unit(answer.trim());
    let (gold, gold_unit) = split_unit(gold.trim());
    let stem = |unit: &str| unit.trim().trim_end_matches('.').trim_end_matches('s').to_lowercase();
    if !answer_unit.is_empty() && !gold_unit.is_empty() && stem(answer_unit) != stem(gold_unit) {
        return false;
    }
    // If only one side has a percent sign, the other side may have omitted it, or may be the fraction.
    let bare = |text: &str| text.trim().strip_suffix('%').map(str::to_owned);
    let pairs = match (bare(answer), bare(gold)) {
        (Some(number), None) => vec![(answer.to_owned(), gold.to_owned()), (number, gold.to_owned())],
        (None, Some(number)) => vec![(answer.to_owned(), gold.to_owned()), (answer.to_owned(), number)],
        _ => vec![(answer.to_owned(), gold.to_owned())],
    };
    pairs.iter().any(|(answer, gold)| same_value(answer, gold))
}

fn same_value(answer: &str, gold: &str) -> bool {
    // Letters without mathematics are words, not products: "A B" is not "B A".
    if !is_mathematical(answer) && !is_mathematical(gold) {
        return false;
    }
    let mut agreed = 0;
    for point in 0..POINTS {
        let (Some(a), Some(g)) = (value(answer, point), value(gold, point)) else { return false };
        // A point outside the domain of a formula (a root of a negative number) does not distinguish formulas.
        if !a.number.is_finite() && !g.number.is_finite() {
            continue;
        }
        let variables = a.has_variables || g.has_variables;
        let (a, gold) = (a.number, g.number);
        let within = |tolerance: f64| (a - gold).abs() <= tolerance * gold.abs();
        let near = if variables {
            within(RELATIVE_TOLERANCE)
        } else {
            let whole = a.fract() == 0.0 && gold.fract() == 0.0;
            let decimals = || (a * DECIMALS).round() == (gold * DECIMALS).round() && within(SMALL_TOLERANCE);
            within(INTEGER_TOLERANCE) || (!whole && decimals())
        };
        if !near {
            return false;
        }
        if !variables {
            return true;
        }
        agreed += 1;
    }
    agreed >= 2
}

#[derive(Debug, Clone, Copy)]
struct Evaluated {
    number: f64,
    has_variables: bool,
}

fn is_mathematical(text: &str) -> bool {
    text.contains(|c: char| c.is_ascii_digit() || matches!(c, '^' | '+' | '*' | '/' | '\\' | '='))
}

/// Returns the value of a formula at one of the fixed points, or `None` if the text is not a formula.
fn value(text: &str, point: u32) -> Option<Evaluated> {
    // Words are products of letters only inside mathematics.
    let letters_are_variables = is_mathematical(text);
    let chars: Vec<char> = text.chars().collect();
    let mut parser =
        Parser { chars: &chars, at: 0, depth: 0, point, letters_are_variables, has_variables: false };
    let number = parser.sum()?;
    parser.spaces();
    (parser.at == chars.len()).then_some(Evaluated { number, has_variables: parser.has_variables })
}

const FUNCTIONS: [&str; 12] =
    ["sqrt", "sin", "cos", "tan", "arcsin", "arccos", "arctan", "ln", "log", "exp", "abs", "frac"];

/// Recursive-descent parser that evaluates while it reads.
struct Parser<'t> {
    chars: &'t [char],
    at: usize,
    depth: u32,
    point: u32,
    letters_are_variables: bool,
    has_variables: bool,
}

impl Parser<'_> {
    fn spaces(&mut self) {
        while self.chars.get(self.at).is_some_and(|c| c.is_whitespace()) {
            self.at += 1;
        }
    }

    fn peek(&mut self) -> Option<char> {
        self.spaces();
        self.chars.get(self.at).copied()
    }

    fn eat(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        self.at += usize::from(found);
        found
    }

    fn sum(&mut self) -> Option<f64> {
        if self.depth > MAX_DEPTH {
            return None;
        }
        self.depth += 1;
        let mut total = self.product()?;
        loop {
            if self.eat('+') {
                total += self.product()?;
            } else if self.eat('-') {
                total -= self.product()?;
            } else {
                self.depth -= 1;
                return Some(total);
            }
        }
    }

    fn product(&mut self) -> Option<f64> {
        let mut total = self.signed()?;
        loop {
            if self.eat('*') {
                total *= self.signed()?;
            } else if self.eat('/') {
                total /= self.signed()?;
            } else {
                // Reads a factor without a multiplication sign: "2x", "3(x+1)", but not "3 4".
                let before = self.chars.get(self.at.wrapping_sub(1)).copied();
                match self.peek() {
                    Some(c) if c.is_alphabetic() || matches!(c, '(' | '\\' | '{') => total *= self.power()?,
                    Some(c) if c.is_ascii_digit() && before.is_some_and(|b| matches!(b, ')' | '}')) => {
                        total *= self.power()?;
                    }
                    _ => return Some(total),
                }
            }
        }
    }

    fn signed(&mut self) -> Option<f64> {
        let mut sign = 1.0;
        loop {
            if self.eat('-') {
                sign = -sign;
            } else if !self.eat('+') {
                return Some(sign * self.power()?);
            }
        }
    }

    fn power(&mut self) -> Option<f64> {
        if self.depth > MAX_DEPTH {
            return None;
        }
        self.depth += 1;
        let mut base = self.atom()?;
        loop {
            if self.eat('!') {
                base = factorial(base)?;
            } else if self.eat('%') {
                base /= 100.0;
            } else {
                break;
            }
        }
        if self.eat('^') {
            base = base.powf(self.signed()?);
        }
        self.depth -= 1;
        Some(base)
    }

    fn atom(&mut self) -> Option<f64> {
        match self.peek()? {
            '(' => self.enclosed('(', ')'),
            '{' => self.enclosed('{', '}'),
            '[' => self.enclosed('[', ']'),
            '|' => {
                self.at += 1;
                let inside = self.sum()?;
                self.eat('|').then_some(inside.abs())
            }
            '\\' => {
                self.at += 1;
                let name = self.word();
                self.named(&name)
            }
            c if c.is_ascii_digit() || c == '.' => self.number(),
            c if c.is_alphabetic() => {
                let word = self.word();
                self.named(&word)
            }
            _ => None,
        }
    }

    fn enclosed(&mut self, open: char, close: char) -> Option<f64> {
        if !self.eat(open) {
            return None;
        }
        let inside = self.sum()?;
        self.eat(close).then_some(inside)
    }

    fn word(&mut self) -> String {
        let from = self.at;
        while self.chars.get(self.at).is_some_and(|c| c.is_alphabetic()) {
            self.at += 1;
        }
        self.chars[from..self.at].iter().collect()
    }

    fn number(&mut self) -> Option<f64> {
        let from = self.at;
        let digits = |parser: &mut Self| {
            while parser.chars.get(parser.at).is_some_and(char::is_ascii_digit) {
                parser.at += 1;
            }
        };
        digits(self);
        if self.chars.get(self.at) == Some(&'.') {
            self.at += 1;
            digits(self);
        }
        let mantissa = self.at;
        if matches!(self.chars.get(self.at), Some('e' | 'E')) {
            self.at += 1;
            if matches!(self.chars.get(self.at), Some('+' | '-')) {
                self.at += 1;
            }
            let exponent = self.at;
            digits(self);
            if self.at == exponent {
                self.at = mantissa;
            }
        }
        self.chars[from..self.at].iter().collect::<String>().parse().ok()
    }

    fn named(&mut self, name: &str) -> Option<f64> {
        match name {
            "pi" => Some(std::f64::consts::PI),
            "e" => Some(std::f64::consts::E),
            "frac" => {
                let above = self.argument()?;
                Some(above / self.argument()?)
            }
            "sqrt" => {
                let degree = if self.peek() == Some('[') { self.enclosed('[', ']')? } else { 2.0 };
                let inside = self.argument()?;
                Some(if degree == 2.0 { inside.sqrt() } else { inside.powf(1.0 / degree) })
            }
            "sin" => self.applied(f64::sin, Some(f64::asin)),
            "cos" => self.applied(f64::cos, Some(f64::acos)),
            "tan" => self.applied(f64::tan, Some(f64::atan)),
            "arcsin" => self.power().map(f64::asin),
            "arccos" => self.power().map(f64::acos),
            "arctan" => self.power().map(f64::atan),
            "ln" | "log" if self.peek() != Some('_') => self.applied(f64::ln, None),
            "exp" => self.power().map(f64::exp),
            "abs" => self.power().map(f64::abs),
            _ => self.variables(name),
        }
    }

    /// Applies a function. A power may precede the argument: `\sin^2 x`. The power -1 means the inverse.
    fn applied(&mut self, function: fn(f64) -> f64, inverse: Option<fn(f64) -> f64>) -> Option<f64> {
        let exponent = if self.eat('^') { Some(self.argument()?) } else { None };
        let of = self.power()?;
        match (exponent, inverse) {
            (Some(-1.0), Some(inverse)) => Some(inverse(of)),
            (Some(exponent), _) => Some(function(of).powf(exponent)),
            (None, _) => Some(function(of)),
        }
    }

    /// Reads an argument. Without braces, LaTeX takes one digit: `\frac12`.
    fn argument(&mut self) -> Option<f64> {
        match self.peek()? {
            '{' => self.enclosed('{', '}'),
            c if c.is_ascii_digit() => {
                self.at += 1;
                c.to_digit(10).map(f64::from)
            }
            _ => self.atom(),
        }
    }

    /// Reads a product of at most three one-letter variables, or one name after a backslash.
    fn variables(&mut self, word: &str) -> Option<f64> {
        let greek = self.at > word.len() && self.chars.get(self.at - word.chars().count() - 1) == Some(&'\\');
        let letters: Vec<String> =
            if greek { vec![word.to_owned()] } else { word.chars().map(String::from).collect() };
        if letters.is_empty() || letters.len() > 3 || (letters.len() > 1 && !self.letters_are_variables) {
            return None;
        }
        let mut subscript = String::new();
        if self.chars.get(self.at) == Some(&'_') {
            self.at += 1;
            let braced = self.eat('{');
            while let Some(c) = self.chars.get(self.at).filter(|c| c.is_alphanumeric()) {
                subscript.push(*c);
                self.at += 1;
            }
            if braced && !self.eat('}') {
                return None;
            }
        }
        self.has_variables = true;
        Some(letters.iter().map(|letter| variable(&format!("{letter}_{subscript}"), self.point)).product())
    }
}

/// Returns a value in (0.5, 3) that depends only on the name and the point (FNV-1a).
fn variable(name: &str, point: u32) -> f64 {
    let start = 0xcbf2_9ce4_8422_2325 ^ u64::from(point).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let hash = name.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    0.5 + 2.5 * ((hash >> 11) as f64 / (1u64 << 53) as f64)
}

fn factorial(of: f64) -> Option<f64> {
    (of.fract() == 0.0 && (0.0..=170.0).contains(&of)).then(|| (1..=of as u32).map(f64::from).product())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answer, ground truth, result of math-verify 0.9 (formulas between dollar signs), our result. From
    /// `tests/data/math_goldens.py`.
    const TABLE: &[(&str, &str, bool, bool)] = &[
        ("1/2", "0.5", true, true),
        ("\\frac{1}{2}", "0.5", true, true),
        ("50%", "0.5", true, true),
        ("50%", "50", true, true),
        ("1,234", "1234", true, true),
        ("x^2+2x+1", "(x+1)^2", true, true),
        ("\\sqrt{2}", "2^{1/2}", true, true),
        ("1 1/2", "1.5", false, true),
        ("1\\frac{1}{2}", "1.5", true, true),
        ("3 cm", "3", true, true),
        ("3 cm", "3 m", true, false),
        ("$3$", "3", true, true),
        ("The answer is 42.", "42", true, true),
        ("x = 5", "5", true, true),
        ("0.333333", "1/3", true, true),
        ("0.333", "1/3", false, false),
        ("(1,2)", "(2,1)", false, false),
        ("{1,2}", "{2,1}", true, true),
        ("1,2", "2,1", false, false),
        ("6.02\\times 10^{23}", "6.02e23", false, true),
        ("\\boxed{\\frac{1}{3}}", "\\frac{1}{3}", true, true),
        ("2\\pi", "6.283185", true, true),
        ("happy", "happy", false, true),
        ("-3", "3", false, false),
        ("90^\\circ", "90", true, true),
        ("\\$5", "5", false, true),
        ("y=2x+1", "2x+1", true, true),
        ("[1,2)", "(1,2]", false, false),
        ("\\frac12", "0.5", true, true),
        ("\\text{5 apples}", "5", false, true),
        ("12 apples", "12", true, true),
        ("five", "5", false, false),
        ("i^2", "-1", false, false),
        ("0.166667", "1/6", true, true),
        ("0.083333", "1/12", true, true),
        ("0.000143", "1/7000", true, true),
        ("0.16666", "1/6", false, false),
        ("1234567.1", "1234567.2", false, false),
        ("33.3333", "100/3", false, false),
        ("333.33333", "1000/3", false, false),
        ("0.0000001", "0.0000002", true, false),
        ("y=5", "x=5", false, false),
        ("x_1=5", "x=5", false, false),
        ("5", "x=5", true, true),
        ("y=2x", "f(x)=2x", false, false),
        ("f(x)=2x", "2x", true, true),
        ("\\cos(2x)", "1-2\\sin^2 x", true, true),
        ("\\sin^{2}x+\\cos^2 x", "1", true, true),
        ("\\sin^{-1}(1)", "\\frac{\\pi}{2}", true, true),
        ("1 2", "12", false, false),
        ("12", "1 2", false, false),
        ("1 2 3", "123", false, false),
        ("1 234", "1234", true, true),
        ("1 234 567", "1234567", true, true),
    ];

    #[test]
    fn golden() {
        for &(answer, gold, _, ours) in TABLE {
            assert_eq!(same(answer, gold), ours, "{answer} = {gold}");
        }
    }

    #[test]
    fn more_forms() {
        for (answer, gold) in [
            ("3.0", "3"),
            ("1e3", "1000"),
            ("-\\frac{3}{4}", "-0.75"),
            ("2\\sqrt{3}", "\\sqrt{12}"),
            ("\\sqrt[3]{8}", "2"),
            ("5!", "120"),
            ("|-4|", "4"),
            ("\\left(1, \\frac{1}{2}\\right)", "(1, 0.5)"),
            ("\\{3, 1\\}", "\\{1, 3\\}"),
            ("\\sin(\\frac{\\pi}{6})", "\\frac{1}{2}"),
            ("\\frac{x^2-1}{x+1}", "x-1"),
            ("12,345,678", "12345678"),
            ("$\\frac{7}{2}$ is the result", "3.5"),
            ("5 km/h", "5km/h"),
            ("3 apples", "3 Apple"),
            ("x_1 + x_{2}", "x_2+x_1"),
            ("(x+1)(x-1)", "x^2-1"),
            ("2^-1", "0.5"),
            ("-x^2", "-(x*x)"),
            ("-12 345.5", "-12345.5"),
            ("1 234 cm", "1234"),
            ("sin^2(x)", "1-\\cos^2 x"),
        ] {
            assert!(same(answer, gold), "{answer} = {gold}");
        }
        for (answer, gold) in [
            ("no", "on"),
            ("cat", "act"),
            ("A B", "B A"),
            ("between 3 and 5", "5"),
            ("", ""),
            ("2", "3"),
            ("1000000", "1000001"),
            ("1e-8", "2e-8"),
            ("0", "1e-9"),
            ("1/0", "5"),
            ("x", "y"),
            ("(1, 2)", "[1, 2]"),
            ("(1, 2, 3)", "(1, 2)"),
            ("{1, 1}", "{1, 2}"),
            ("((((", "("),
            ("3 4", "12"),
            ("1 23", "123"),
            ("12 34", "1234"),
            ("1 234 5", "12345"),
            ("0.1 234", "0.1234"),
        ] {
            assert!(!same(answer, gold), "{answer} = {gold}");
        }
    }

    #[test]
    fn numbers_are_recognised() {
        for text in [
            "3",
            "-3.5",
            "1/2",
            "50%",
            "3 cm",
            "\\frac{1}{2}",
            "-\\frac{1}{-2}",
            "1,000",
            "2\\pi",
            "1e-3",
            "10^{-3}",
        ] {
            assert!(is_number(text), "{text}");
        }
        for text in
            ["x", "2x+1", "cat", "(B) 3", "A3", "3 or 4", "3-4", "2020-01-02", "1/2/2020", "12:30", ""]
        {
            assert!(!is_number(text), "{text}");
        }
    }

    #[test]
    fn formulas_are_recognised() {
        for text in ["3", "x^2+1", "y = 2x", "\\sqrt{x}", "(1, \\frac{1}{2})"] {
            assert!(is_formula(text), "{text}");
        }
        for text in ["cat", "x", "3-4", "a = b = c", "see \\foobarbaz here"] {
            assert!(!is_formula(text), "{text}");
        }
    }

    #[test]
    fn deep_nesting_is_refused() {
        for unit in ["(", "{", "-", "\\sqrt", "\\frac{", "2^", "|"] {
            let text = unit.repeat(500 / unit.len());
            assert!(value(&text, 0).is_none(), "{unit}");
        }
    }
}
