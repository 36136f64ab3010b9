//! Text for a terminal: escaping of untrusted text, and lines cut and wrapped by their width in columns.

use std::borrow::Cow;
use std::time::Duration;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Escapes text from a row, a file name, a model or a server, so that it cannot control the terminal. Control characters and marks
/// that change the writing direction appear as in Rust source (`\u{1b}`). Newlines stay.
pub fn escape(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c != '\n' && obeyed(c))
}

/// Escapes as [`escape`] does, on one line: newlines are written as `\n`.
pub fn escape_line(text: &str) -> Cow<'_, str> {
    escaped(text, obeyed)
}

/// Returns the time in UTC to the second, as in logs.
pub fn now() -> String {
    jiff::Timestamp::now().round(jiff::Unit::Second).unwrap_or_default().to_string()
}

fn obeyed(c: char) -> bool {
    let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns || matches!(c, '\u{2028}' | '\u{2029}')
}

fn escaped(text: &str, is_bad: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_bad) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if is_bad(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// Returns the text if it fits in `width` columns, else its beginning and `…`.
pub fn fit(text: &str, width: usize) -> Cow<'_, str> {
    if text.width() <= width {
        return Cow::Borrowed(text);
    }
    let mut left = width.saturating_sub(1);
    let kept = text.chars().take_while(|c| {
        let columns = c.width().unwrap_or(0);
        let fits = columns <= left;
        left = left.saturating_sub(columns);
        fits
    });
    let mut out: String = kept.collect();
    out.push('…');
    Cow::Owned(out)
}

/// Wraps lines between words if they take more than `width` columns; continuation lines are indented. A word longer than a line,
/// such as a path, stays whole.
pub fn wrap(text: &str, width: usize) -> Cow<'_, str> {
    if text.lines().all(|line| line.width() <= width) {
        return Cow::Borrowed(text);
    }
    let mut lines = Vec::new();
    for line in text.lines() {
        if line.width() <= width {
            lines.push(Cow::Borrowed(line));
            continue;
        }
        let line = &glued(line, width);
        let indent = " ".repeat(line.len() - line.trim_start_matches(' ').len() + 2);
        let options = textwrap::Options::new(width)
            .subsequent_indent(&indent)
            .break_words(false)
            .word_separator(textwrap::WordSeparator::AsciiSpace)
            .word_splitter(textwrap::WordSplitter::NoHyphenation);
        let broken = textwrap::wrap(line, options);
        lines.extend(broken.into_iter().map(|line| Cow::Owned(line.replace(GLUE, " "))));
    }
    Cow::Owned(lines.join("\n"))
}

/// Space at which a line is never broken.
const GLUE: char = '\u{a0}';

/// Makes text with bars (`a 1 | b 2`) break only at the bars, if each part fits on a line.
fn glued(line: &str, width: usize) -> Cow<'_, str> {
    const BAR: &str = " | ";
    if !line.contains(BAR) || line.split(BAR).any(|part| part.width() + 4 > width) {
        return Cow::Borrowed(line);
    }
    let parts: Vec<String> = line.split(BAR).map(|part| part.replace(' ', &GLUE.to_string())).collect();
    Cow::Owned(parts.join(&format!("{GLUE}| ")))
}

/// Formats a count with a short suffix: `950`, `4.1 k`, `2.6 M`, `3.1 G`.
pub fn count(number: f64) -> String {
    match number {
        n if n < 999.5 => format!("{n:.0}"),
        n if n < 999_500.0 => format!("{:.1} k", n / 1e3),
        n if n < 999_500_000.0 => format!("{:.1} M", n / 1e6),
        n => format!("{:.1} G", n / 1e9),
    }
}

/// Formats a duration: `45 s`, `3 min 20 s`, `42 min`, `3 h 12 min`, `2 d 3 h`.
pub fn span(time: Duration) -> String {
    let secs = time.as_secs_f64().round() as u64;
    let (minutes, hours) = (secs.div_ceil(60), secs.div_ceil(60) / 60);
    match secs {
        0..60 => format!("{secs} s"),
        60..600 => format!("{} min {} s", secs / 60, secs % 60),
        600..3_541 => format!("{minutes} min"),
        3_541..172_800 => format!("{hours} h {} min", minutes % 60),
        _ => format!("{} d {} h", hours / 24, hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_a_terminal_obeys_comes_through() {
        let hostile = "a\u{1b}]0;x\u{7}b\r\u{e}c\td\u{9b}31m\u{202e}e\u{7f}\n";
        assert_eq!(escape(hostile), "a\\u{1b}]0;x\\u{7}b\\r\\u{e}c\\td\\u{9b}31m\\u{202e}e\\u{7f}\n");
        assert_eq!(escape_line("a\nb"), "a\\nb");
        for text in ["", "plain", "ngữ cảnh 図 👩‍👩‍👧", "two\nlines"] {
            assert!(matches!(escape(text), Cow::Borrowed(same) if same == text), "{text:?}");
        }
        // For every character, the escaped text is printable.
        let all: String = ('\0'..=char::MAX).collect();
        assert!(escape(&all).chars().all(|c| c == '\n' || !obeyed(c)));
    }

    #[test]
    fn text_is_cut_by_columns_and_not_by_characters() {
        assert_eq!(fit("square", 6), "square");
        assert_eq!(fit("squares", 6), "squar…");
        // Wide characters take two columns each.
        assert_eq!(fit("図図図", 6), "図図図");
        assert_eq!(fit("図図図図", 6), "図図…");
        // A combining mark takes no column.
        assert_eq!(fit("e\u{301}tage", 5), "e\u{301}tage");
        assert_eq!(fit("abc", 0), "…");
    }

    #[test]
    fn lines_break_between_words_and_what_follows_is_indented() {
        let text = "  at: one two three\nshort\na/path/longer/than/a/line";
        assert_eq!(wrap(text, 14), "  at: one two\n    three\nshort\na/path/longer/than/a/line");
        assert!(matches!(wrap("a  table   row\nb", 14), Cow::Borrowed(_)));
        assert_eq!(wrap("zero-variance groups", 10), "zero-variance\n  groups");
        assert_eq!(wrap("step 1/2 | reward 0.5 | kl 0.1", 23), "step 1/2 | reward 0.5 |\n  kl 0.1");
        assert_eq!(wrap("step 1/2 | reward 0.5 | kl 0.1", 22), "step 1/2 |\n  reward 0.5 | kl 0.1");
    }

    #[test]
    fn counts_and_spans_read_well() {
        let counts = [(0.0, "0"), (999.0, "999"), (999.6, "1.0 k"), (4_120.0, "4.1 k"), (2.6e6, "2.6 M")];
        counts.into_iter().for_each(|(number, text)| assert_eq!(count(number), text));
        let spans = [
            (0.4, "0 s"),
            (59.4, "59 s"),
            (59.6, "1 min 0 s"),
            (200.0, "3 min 20 s"),
            (2_500.0, "42 min"),
            (3_599.0, "1 h 0 min"),
            (11_520.0, "3 h 12 min"),
            (200_000.0, "2 d 7 h"),
        ];
        spans.into_iter().for_each(|(secs, text)| assert_eq!(span(Duration::from_secs_f64(secs)), text));
    }
}
