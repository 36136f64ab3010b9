//! Words of a shell: their quotes removed, and their variables, defaults, patterns and numbers filled in.

use std::path::{Component, Path, PathBuf};

use brush_parser::arithmetic;
use brush_parser::ast::{ArithmeticExpr, ArithmeticTarget, BinaryOperator, CompoundList, UnaryOperator};
use brush_parser::pattern::pattern_to_regex_str;
use brush_parser::word::{
    self, Parameter, ParameterExpr, ParameterTestType, SpecialParameter, SubstringMatchKind, TildeExpr,
    WordPiece, WordPieceWithSource,
};

use super::{Shell, check_brackets};

/// Stands for a space in text that stays as it is written, where no word ends.
pub(super) const SPACE: char = '\u{e000}';
/// Stands before text that stays as it is written, because its value is unknown.
pub(super) const MARK: char = '\u{e001}';
/// Maximum length of a value that a pattern cuts, bytes, and of a calculation.
const MAX_CUT: usize = 1024;

/// Returns text whose value is unknown, as one word.
pub(super) fn closed(text: &str) -> String {
    let spaces = |c: char| if c.is_whitespace() { SPACE } else { c };
    std::iter::once(MARK).chain(text.chars().map(spaces)).collect()
}

/// Returns a word as the user wrote it.
pub(super) fn plain(word: &str) -> String {
    word.chars().filter(|&c| c != MARK).map(|c| if c == SPACE { ' ' } else { c }).collect()
}

fn is_unknown(word: &str) -> bool {
    word.contains(MARK)
}

/// Words of a word, of which the last may go on.
#[derive(Default)]
pub(super) struct Words {
    words: Vec<String>,
    open: Option<String>,
}

impl Words {
    fn push(&mut self, text: &str) {
        self.open.get_or_insert_default().push_str(text);
    }

    /// Adds text whose spaces separate words.
    fn split(&mut self, text: &str) {
        for part in text.split_inclusive(|c: char| c.is_ascii_whitespace()) {
            let word = part.trim_ascii_end();
            if !word.is_empty() {
                self.push(word);
            }
            if word.len() < part.len() {
                self.words.extend(self.open.take());
            }
        }
    }

    /// Adds the elements of a quoted array: the first continues the word, and the last may go on.
    fn elements(&mut self, values: &[String]) {
        for (at, value) in values.iter().enumerate() {
            if at > 0 {
                self.words.extend(self.open.take());
            }
            self.push(value);
        }
    }

    fn end(mut self) -> Vec<String> {
        self.words.extend(self.open);
        self.words
    }
}

/// Part of a value that is cut where a pattern fits.
struct Cut {
    from_end: bool,
    largest: bool,
}

/// Effect of spaces in a value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Spaces {
    /// They separate words.
    Split,
    /// They are part of the word, which is assigned.
    Stay,
    /// They are part of the word, which is in quotes. An array is several words.
    Quoted,
}

impl Shell {
    /// Returns the words that a word of a command becomes.
    pub(super) fn words(&mut self, word: &str) -> Result<Vec<String>, String> {
        self.expand(word, Spaces::Split)
    }

    /// Returns the text that a word becomes where it is assigned.
    pub(super) fn assigned(&mut self, word: &str) -> Result<String, String> {
        Ok(self.expand(word, Spaces::Stay)?.join(" "))
    }

    /// Returns the text that a word becomes in a condition, or `None` if its value is unknown.
    pub(super) fn tested(&mut self, word: &str) -> Result<Option<String>, String> {
        let outer = std::mem::replace(&mut self.tests, true);
        let text = self.assigned(word);
        self.tests = outer;
        Ok(Some(text?).filter(|text| !is_unknown(text)))
    }

    fn expand(&mut self, word: &str, spaces: Spaces) -> Result<Vec<String>, String> {
        let pieces =
            word::parse(word, &self.options).map_err(|_| format!("`{}` is no word", shortened(word)))?;
        let mut words = Words::default();
        self.nested(|shell| shell.pieces(word, &pieces, &mut words, spaces))?;
        Ok(words.end())
    }

    fn pieces(
        &mut self,
        source: &str,
        pieces: &[WordPieceWithSource],
        words: &mut Words,
        spaces: Spaces,
    ) -> Result<(), String> {
        for part in pieces {
            let written = source.get(part.start_index..part.end_index).unwrap_or_default();
            let known = match &part.piece {
                WordPiece::Text(text) => {
                    match spaces {
                        Spaces::Split => words.split(text),
                        Spaces::Stay => words.push(text),
                        Spaces::Quoted => words.push(&text.replace("\\\n", "")),
                    }
                    continue;
                }
                WordPiece::SingleQuotedText(text) | WordPiece::AnsiCQuotedText(text) => {
                    words.push(text);
                    continue;
                }
                WordPiece::DoubleQuotedSequence(inner) | WordPiece::GettextDoubleQuotedSequence(inner) => {
                    // An empty text in quotes is a word; an array without elements is none.
                    if inner.is_empty() {
                        words.push("");
                    }
                    self.pieces(source, inner, words, Spaces::Quoted)?;
                    continue;
                }
                WordPiece::EscapeSequence(text) => {
                    let c = text.get(1..).unwrap_or_default();
                    if c != "\n" {
                        words.push(c);
                    }
                    continue;
                }
                WordPiece::TildeExpansion(TildeExpr::Home) => self.variables.get("HOME").cloned(),
                WordPiece::TildeExpansion(_) => None,
                WordPiece::ParameterExpansion(parameter) => self.parameter(parameter, spaces)?,
                WordPiece::CommandSubstitution(text) | WordPiece::BackquotedCommandSubstitution(text) => {
                    self.output(text)?.map(|text| vec![text])
                }
                WordPiece::ArithmeticExpression(expression) => {
                    self.number(&expression.value)?.map(|number| vec![number.to_string()])
                }
            };
            let Some(values) = known else {
                words.push(&closed(written));
                continue;
            };
            self.count(values.iter().map(|value| value.len() + 1).sum())?;
            match spaces {
                Spaces::Quoted => words.elements(&values),
                Spaces::Stay => words.push(&values.join(" ")),
                Spaces::Split => words.split(&values.join(" ")),
            }
        }
        Ok(())
    }

    /// Returns the values of a parameter; `None` if the script does not set it.
    fn value(&self, parameter: &Parameter) -> Option<Vec<String>> {
        let variable = |name: &str| self.variables.get(name);
        let one = |text: String| Some(vec![text]);
        match parameter {
            Parameter::Named(name) => one(variable(name)?.first().cloned().unwrap_or_default()),
            Parameter::NamedWithIndex { name, index } => {
                one(variable(name)?.get(index.parse::<usize>().ok()?)?.clone())
            }
            Parameter::NamedWithAllIndices { name, .. } => variable(name).cloned(),
            Parameter::Positional(n) => one(self.arguments.get((*n as usize).checked_sub(1)?).cloned()?),
            Parameter::Special(SpecialParameter::AllPositionalParameters { .. }) => {
                Some(self.arguments.clone())
            }
            Parameter::Special(SpecialParameter::PositionalParameterCount) => {
                one(self.arguments.len().to_string())
            }
            Parameter::Special(SpecialParameter::ShellName) => variable("BASH_SOURCE").cloned(),
            Parameter::Special(_) => None,
        }
    }

    fn parameter(
        &mut self,
        expression: &ParameterExpr,
        spaces: Spaces,
    ) -> Result<Option<Vec<String>>, String> {
        use ParameterExpr as E;
        match expression {
            E::Parameter { parameter, indirect: false }
            | E::IndicateErrorIfNullOrUnset { parameter, indirect: false, .. } => {
                let is_list = matches!(parameter, Parameter::NamedWithAllIndices { .. });
                let unset = || self.tests.then(|| if is_list { Vec::new() } else { vec![String::new()] });
                Ok(self.value(parameter).or_else(unset))
            }
            E::UseDefaultValues { parameter, indirect: false, test_type, default_value }
            | E::AssignDefaultValues { parameter, indirect: false, test_type, default_value } => {
                if let Some(values) = self.value(parameter).filter(|values| is_set(values, test_type)) {
                    return Ok(Some(values));
                }
                self.default(default_value.as_deref(), spaces).map(Some)
            }
            E::UseAlternativeValue { parameter, indirect: false, test_type, alternative_value } => {
                match self.value(parameter).filter(|values| is_set(values, test_type)) {
                    Some(_) => self.default(alternative_value.as_deref(), spaces).map(Some),
                    None => Ok(Some(Vec::new())),
                }
            }
            E::ParameterLength { parameter, indirect: false } => {
                let is_list = matches!(parameter, Parameter::NamedWithAllIndices { .. });
                let len = |values: Vec<String>| {
                    if is_list { values.len() } else { values.concat().chars().count() }
                };
                Ok(self.value(parameter).map(|values| vec![len(values).to_string()]))
            }
            E::RemoveSmallestSuffixPattern { parameter, indirect: false, pattern } => {
                self.cut(parameter, pattern.as_deref(), Cut { from_end: true, largest: false })
            }
            E::RemoveLargestSuffixPattern { parameter, indirect: false, pattern } => {
                self.cut(parameter, pattern.as_deref(), Cut { from_end: true, largest: true })
            }
            E::RemoveSmallestPrefixPattern { parameter, indirect: false, pattern } => {
                self.cut(parameter, pattern.as_deref(), Cut { from_end: false, largest: false })
            }
            E::RemoveLargestPrefixPattern { parameter, indirect: false, pattern } => {
                self.cut(parameter, pattern.as_deref(), Cut { from_end: false, largest: true })
            }
            E::ReplaceSubstring { parameter, indirect: false, pattern, replacement, match_kind } => {
                let Some(values) = self.value(parameter) else { return Ok(None) };
                let pattern = self.assigned(pattern)?;
                let with = self.assigned(replacement.as_deref().unwrap_or_default())?;
                let (limit, before, after) = match match_kind {
                    SubstringMatchKind::Prefix => (1, "^", ""),
                    SubstringMatchKind::Suffix => (1, "", "$"),
                    SubstringMatchKind::FirstOccurrence => (1, "", ""),
                    SubstringMatchKind::Anywhere => (0, "", ""),
                };
                let Some(regex) = regex_of(&pattern, before, after) else { return Ok(None) };
                let replaced =
                    |text: &String| regex.replacen(text, limit, regex::NoExpand(&with)).into_owned();
                self.count(values.iter().map(|value| value.len() * (1 + with.len())).sum())?;
                Ok(Some(values.iter().map(replaced).collect()))
            }
            E::UppercasePattern { parameter, indirect: false, pattern }
                if pattern.as_deref().unwrap_or_default().is_empty() =>
            {
                Ok(self
                    .value(parameter)
                    .map(|values| values.iter().map(|text| text.to_uppercase()).collect()))
            }
            E::LowercasePattern { parameter, indirect: false, pattern }
                if pattern.as_deref().unwrap_or_default().is_empty() =>
            {
                Ok(self
                    .value(parameter)
                    .map(|values| values.iter().map(|text| text.to_lowercase()).collect()))
            }
            _ => Ok(None),
        }
    }

    fn default(&mut self, word: Option<&str>, spaces: Spaces) -> Result<Vec<String>, String> {
        match word {
            None => Ok(vec![String::new()]),
            Some(word) if spaces == Spaces::Split => self.words(word),
            Some(word) => Ok(vec![self.assigned(word)?]),
        }
    }

    /// Cuts the part that a pattern fits from values.
    fn cut(
        &mut self,
        parameter: &Parameter,
        pattern: Option<&str>,
        Cut { from_end, largest }: Cut,
    ) -> Result<Option<Vec<String>>, String> {
        let Some(values) = self.value(parameter) else { return Ok(None) };
        let pattern = self.assigned(pattern.unwrap_or_default())?;
        let Some(regex) = regex_of(&pattern, "^", "$") else { return Ok(None) };
        if values.iter().any(|value| value.len() > MAX_CUT) {
            return Ok(None);
        }
        let cut = |text: &String| {
            let fits = |at: &usize| regex.is_match(if from_end { &text[*at..] } else { &text[..*at] });
            let place = |(at, c): (usize, char)| if from_end { at } else { at + c.len_utf8() };
            let mut places = text.char_indices().map(place);
            let found = if from_end == largest { places.find(fits) } else { places.rfind(fits) };
            match found {
                Some(at) if from_end => text[..at].to_owned(),
                Some(at) => text[at..].to_owned(),
                None => text.clone(),
            }
        };
        Ok(Some(values.iter().map(cut).collect()))
    }

    /// Returns true if a pattern fits a text.
    pub(super) fn fits(&self, pattern: &str, text: &str) -> Option<bool> {
        if is_unknown(pattern) || is_unknown(text) {
            return None;
        }
        regex_of(pattern, "^", "$").map(|regex| regex.is_match(text))
    }

    /// Returns the number that a calculation gives.
    pub(super) fn number(&mut self, text: &str) -> Result<Option<i64>, String> {
        if text.len() > MAX_CUT {
            return Ok(None);
        }
        let text = self.expand(&format!("\"{}\"", text.replace('"', "")), Spaces::Stay)?.join(" ");
        if is_unknown(&text) || text.len() > MAX_CUT || check_brackets(&text).is_err() {
            return Ok(None);
        }
        Ok(arithmetic::parse(&text).ok().and_then(|expression| self.calculate(&expression)))
    }

    fn calculate(&self, expression: &ArithmeticExpr) -> Option<i64> {
        match expression {
            ArithmeticExpr::Literal(number) => Some(*number),
            ArithmeticExpr::Reference(ArithmeticTarget::Variable(name)) => {
                self.variables.get(name)?.first()?.trim().parse().ok()
            }
            ArithmeticExpr::UnaryOp(operator, value) => {
                let value = self.calculate(value)?;
                match operator {
                    UnaryOperator::UnaryPlus => Some(value),
                    UnaryOperator::UnaryMinus => value.checked_neg(),
                    UnaryOperator::LogicalNot => Some(i64::from(value == 0)),
                    UnaryOperator::BitwiseNot => Some(!value),
                }
            }
            ArithmeticExpr::Conditional(condition, yes, no) => match self.calculate(condition)? {
                0 => self.calculate(no),
                _ => self.calculate(yes),
            },
            ArithmeticExpr::BinaryOp(operator, left, right) => {
                let (left, right) = (self.calculate(left)?, self.calculate(right)?);
                match operator {
                    BinaryOperator::Add => left.checked_add(right),
                    BinaryOperator::Subtract => left.checked_sub(right),
                    BinaryOperator::Multiply => left.checked_mul(right),
                    BinaryOperator::Divide => left.checked_div(right),
                    BinaryOperator::Modulo => left.checked_rem(right),
                    BinaryOperator::Power => left.checked_pow(u32::try_from(right).ok()?),
                    BinaryOperator::LessThan => Some(i64::from(left < right)),
                    BinaryOperator::LessThanOrEqualTo => Some(i64::from(left <= right)),
                    BinaryOperator::GreaterThan => Some(i64::from(left > right)),
                    BinaryOperator::GreaterThanOrEqualTo => Some(i64::from(left >= right)),
                    BinaryOperator::Equals => Some(i64::from(left == right)),
                    BinaryOperator::NotEquals => Some(i64::from(left != right)),
                    BinaryOperator::LogicalAnd => Some(i64::from(left != 0 && right != 0)),
                    BinaryOperator::LogicalOr => Some(i64::from(left != 0 || right != 0)),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Returns the output of commands that only take paths and texts apart: `cd FOLDER && pwd`, `dirname`, `basename`,
    /// `realpath`, `echo`.
    fn output(&mut self, text: &str) -> Result<Option<String>, String> {
        let Ok(program) = self.parse(text) else { return Ok(None) };
        let lists: Vec<&CompoundList> = program.complete_commands.iter().collect();
        let commands: Vec<_> = lists.into_iter().flat_map(super::commands).collect();
        let mut folder: Option<PathBuf> = None;
        let mut output = None;
        for command in commands {
            let super::Command::Simple(simple) = command else { return Ok(None) };
            let words = self.nested(|shell| shell.command_words(simple))?;
            if words.iter().any(|word| is_unknown(word)) {
                return Ok(None);
            }
            let words: Vec<&str> = words
                .iter()
                .map(String::as_str)
                .filter(|word| !matches!(*word, "-P" | "-L" | "-f" | "-m" | "--"))
                .collect();
            output = match words[..] {
                ["cd", path] if Path::new(path).is_absolute() => {
                    folder = Some(normal(Path::new(path)));
                    continue;
                }
                ["pwd"] => match &folder {
                    Some(folder) => Some(folder.display().to_string()),
                    None => return Ok(None),
                },
                ["dirname", path] => match Path::new(path).parent() {
                    Some(parent) if parent.as_os_str().is_empty() => Some(".".to_owned()),
                    parent => Some(parent.unwrap_or(Path::new(path)).display().to_string()),
                },
                ["basename", path, ref suffix @ ..] => {
                    let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or(path);
                    let suffix = suffix.first().copied().unwrap_or_default();
                    Some(name.strip_suffix(suffix).unwrap_or(name).to_owned())
                }
                ["realpath" | "readlink", path] if Path::new(path).is_absolute() => {
                    Some(normal(Path::new(path)).display().to_string())
                }
                ["echo", ref words @ ..] if words.first().is_none_or(|word| !word.starts_with('-')) => {
                    Some(words.join(" "))
                }
                _ => return Ok(None),
            };
        }
        Ok(output)
    }
}

/// Returns a path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut whole = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(whole.pop()),
            part => whole.push(part),
        }
    }
    whole
}

fn is_set(values: &[String], test: &ParameterTestType) -> bool {
    matches!(test, ParameterTestType::Unset) || values.iter().any(|value| !value.is_empty())
}

/// Returns the regular expression of a pattern with `*`, `?` and sets.
fn regex_of(pattern: &str, before: &str, after: &str) -> Option<regex::Regex> {
    if is_unknown(pattern) || pattern.len() > MAX_CUT || check_brackets(pattern).is_err() {
        return None;
    }
    let inner = pattern_to_regex_str(pattern, false).ok()?;
    regex::RegexBuilder::new(&format!("(?s){before}(?:{inner}){after}")).size_limit(1 << 20).build().ok()
}

fn shortened(word: &str) -> String {
    plain(&word.chars().take(40).collect::<String>())
}
