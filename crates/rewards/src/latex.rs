//! LaTeX around an answer: `\boxed{…}`, `\text{…}` and other fonts, `$…$`, `\(…\)` and `\[…\]`. Every rule compares answers without it.
//!
//! The time is linear in the text: every wrapper is read once per nesting level, and the number of levels is limited.

use std::borrow::Cow;

/// Commands whose argument is text, or an answer in another font.
const TEXT_COMMANDS: [&str; 11] = [
    "\\text",
    "\\textbf",
    "\\textit",
    "\\textrm",
    "\\mathrm",
    "\\mathbf",
    "\\mathit",
    "\\mathsf",
    "\\mathtt",
    "\\mbox",
    "\\operatorname",
];
/// Commands that mark an answer.
const BOXES: [&str; 2] = ["\\boxed", "\\fbox"];
/// Maximum number of wrappers around each other.
const MAX_LEVELS: usize = 16;
/// Maximum number of boxed parts of one answer.
const MAX_PARTS: usize = 64;
/// Characters that may separate the boxed parts of one answer, and words that may do so.
const SEPARATORS: [char; 6] = [',', ';', '/', '&', '$', '.'];
const SEPARATING_WORDS: [&str; 3] = ["and", "or", "và"];

/// Returns an answer without LaTeX around it. The last `\boxed{…}` of the text counts, or all of them if only separators stand
/// between them ("`\boxed{A}, \boxed{C}`" is "A, C"). `\text{…}` within the answer becomes plain text.
pub(crate) fn bare(text: &str) -> Cow<'_, str> {
    let text = text.trim();
    if !text.contains(['\\', '$']) {
        return Cow::Borrowed(text);
    }
    let mut text = match boxed_parts(text)[..] {
        [] => Cow::Borrowed(peeled(text)),
        [only] => Cow::Borrowed(peeled(only)),
        ref parts => Cow::Owned(parts.iter().map(|part| peeled(part)).collect::<Vec<_>>().join(", ")),
    };
    if TEXT_COMMANDS.iter().any(|command| text.contains(command)) {
        text = Cow::Owned(plain_text(&text).trim().to_owned());
    }
    text
}

/// Returns the content of the last `\boxed{…}` with balanced braces.
pub(crate) fn boxed(text: &str) -> Option<&str> {
    let starts = BOXES.iter().filter_map(|command| Some((text.rfind(&format!("{command}{{"))?, *command)));
    let (at, command) = starts.max()?;
    argument(&text[at..], command).map(|(inside, _)| inside)
}

/// Returns the content of the last `\boxed{…}`, after those before it that only separators part from it.
fn boxed_parts(text: &str) -> Vec<&str> {
    let mut parts: Vec<&str> = Vec::new();
    let mut rest = text;
    while let Some(last) = boxed(rest) {
        // The part starts before its content, at its command.
        let inside = last.as_ptr() as usize - text.as_ptr() as usize;
        let Some(start) = text[..inside].rfind('\\') else { break };
        let behind = &rest[(inside + last.len() + 1).min(rest.len())..];
        if !parts.is_empty() && !separates(behind) || parts.len() == MAX_PARTS {
            break;
        }
        parts.push(last);
        rest = &text[..start];
    }
    parts.reverse();
    parts
}

fn separates(text: &str) -> bool {
    text.split(|c: char| c.is_whitespace() || SEPARATORS.contains(&c))
        .all(|word| word.is_empty() || SEPARATING_WORDS.contains(&word))
}

/// Removes wrappers around the complete text, also if a full stop follows the outermost one.
fn peeled(text: &str) -> &str {
    let mut text = text.trim();
    for _ in 0..MAX_LEVELS {
        let stopped = text.trim_end_matches(['.', '。', ',']);
        match inside(text).or_else(|| inside(stopped)) {
            Some(inner) => text = inner.trim(),
            None => break,
        }
    }
    text
}

/// Returns the content of one wrapper that encloses the complete text.
fn inside(text: &str) -> Option<&str> {
    for (open, close) in [("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")] {
        let inner = text.strip_prefix(open).and_then(|rest| rest.strip_suffix(close));
        // "$x$ and $y$" is not one formula, and "\$5\$" is an amount.
        if let Some(inner) = inner
            && !inner.is_empty()
            && !inner.contains(close)
            && !inner.ends_with('\\')
        {
            return Some(inner);
        }
    }
    BOXES.iter().chain(&TEXT_COMMANDS).find_map(|command| {
        let (inner, behind) = argument(text, command)?;
        behind.is_empty().then_some(inner)
    })
}

/// Returns the content of the braces after a command at the start of a text, and the text after them.
fn argument<'t>(text: &'t str, command: &str) -> Option<(&'t str, &'t str)> {
    let inside = text.strip_prefix(command)?.strip_prefix('{')?;
    let mut depth = 1;
    for (at, byte) in inside.bytes().enumerate() {
        depth += match byte {
            b'{' => 1,
            b'}' => -1,
            _ => 0,
        };
        if depth == 0 {
            return Some((&inside[..at], &inside[at + 1..]));
        }
    }
    None
}

/// Replaces every `\text{cm}` with ` cm `.
pub(crate) fn plain_text(text: &str) -> String {
    TEXT_COMMANDS.iter().fold(text.to_owned(), |text, command| unwrapped(text, command))
}

fn unwrapped(text: String, command: &str) -> String {
    let opening = format!("{command}{{");
    if !text.contains(&opening) {
        return text;
    }
    let mut out = String::new();
    let mut rest = text.as_str();
    while let Some(at) = rest.find(&opening) {
        let inside = &rest[at + opening.len()..];
        let Some(end) = inside.find('}') else { break };
        out.push_str(&rest[..at]);
        out.push(' ');
        out.push_str(&inside[..end]);
        out.push(' ');
        rest = &inside[end + 1..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrappers_are_removed() {
        for (text, expected) in [
            ("B", "B"),
            (" \\boxed{B} ", "B"),
            ("$\\boxed{B}$.", "B"),
            ("\\text{B}", "B"),
            ("\\(\\textbf{(B) red}\\)", "(B) red"),
            ("$$\\boxed{\\text{Yes}}$$", "Yes"),
            ("\\[\n\\boxed{\\frac{1}{2}}\n\\]", "\\frac{1}{2}"),
            ("So the answer is \\boxed{B}, since red is warm.", "B"),
            ("\\boxed{A} is wrong, so \\boxed{B}", "B"),
            ("\\boxed{A}, \\boxed{C} and $\\boxed{D}$", "A, C, D"),
            ("\\boxed{\\text{A}, \\text{C}}", "A ,  C"),
            ("\\fbox{12}", "12"),
            ("\\boxed{[1, 2, 30, 40]}", "[1, 2, 30, 40]"),
            // These are not around the complete answer, or not complete.
            ("$x$ and $y$", "$x$ and $y$"),
            ("costs $5", "costs $5"),
            ("\\$5\\$", "\\$5\\$"),
            ("\\boxed{B", "\\boxed{B"),
            ("\\boxed{}", ""),
            ("$", "$"),
            ("$$", "$$"),
        ] {
            assert_eq!(bare(text), expected, "{text}");
        }
    }

    #[test]
    fn time_is_linear_on_adversarial_text() {
        for unit in
            ["\\boxed{", "\\boxed{a}", "\\boxed{a},", "\\text{", "\\text{a}", "$", "$$", "\\(", "{", "}"]
        {
            let text = unit.repeat(1_000_000 / unit.len());
            let start = std::time::Instant::now();
            let _ = bare(&text);
            assert!(start.elapsed().as_secs() < 5, "{unit}: {:?}", start.elapsed());
        }
    }
}
