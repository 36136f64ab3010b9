//! The extractor of `<tag>…</tag>` text. Case is ignored in tag names, and content may span lines. The time is linear in the
//! text, since every `<` is read once.
//!
//! Source: the rewards of R1-V, qwen-vl-finetune and VLM-R1, each of which has its own expression for the first or the last
//! match. Here the policy is an argument. With `Last`, the innermost opening tag counts, so that `<answer>a<answer>b</answer>` is
//! "b".

use crate::AnswerPolicy;

/// A tag in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag<'n> {
    /// Requested name.
    pub name: &'n str,
    /// True for `</name>`, false for `<name>`.
    pub close: bool,
    /// Position of the first byte of the tag.
    pub start: usize,
    /// Position after its last byte.
    pub end: usize,
}

/// Returns the tags with the given names (lower case, ASCII), in text order.
pub(crate) fn tags<'t, 'n>(text: &'t str, names: &'t [&'n str]) -> impl Iterator<Item = Tag<'n>> + 't
where
    'n: 't,
{
    let bytes = text.as_bytes();
    text.match_indices('<').filter_map(move |(start, _)| {
        let close = bytes.get(start + 1) == Some(&b'/');
        let from = start + 1 + usize::from(close);
        names.iter().find_map(|&name| {
            let to = from + name.len();
            let found = bytes.get(from..to).is_some_and(|got| got.eq_ignore_ascii_case(name.as_bytes()));
            (found && bytes.get(to) == Some(&b'>')).then_some(Tag { name, close, start, end: to + 1 })
        })
    })
}

/// Returns the untrimmed content of the tag that the policy selects, or `None` if no pair is complete.
pub(crate) fn content<'t>(text: &'t str, name: &str, policy: AnswerPolicy) -> Option<&'t str> {
    let mut open: Option<usize> = None;
    let mut found = None;
    let names = [name];
    for tag in tags(text, &names) {
        match (tag.close, open) {
            (false, None) => open = Some(tag.end),
            (false, Some(_)) if policy == AnswerPolicy::Last => open = Some(tag.end),
            (true, Some(from)) => {
                found = Some(&text[from..tag.start]);
                if policy == AnswerPolicy::First {
                    return found;
                }
                open = None;
            }
            _ => {}
        }
    }
    found
}

/// Returns the opening tag (think, answer or explain) at the end of a prompt, with the white space after it; empty if there is none.
pub fn opened_tag(prompt: &str) -> &str {
    let names = ["think", "answer", "explain"];
    let last = tags(prompt, &names).last().filter(|tag| !tag.close && prompt[tag.end..].trim().is_empty());
    last.map_or("", |tag| &prompt[tag.start..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_pick_first_or_last() {
        let text = "<answer>a</answer> <ANSWER>b\nc</Answer><answer>open";
        assert_eq!(content(text, "answer", AnswerPolicy::First), Some("a"));
        assert_eq!(content(text, "answer", AnswerPolicy::Last), Some("b\nc"));
        assert_eq!(content("<answer>a<answer>b</answer>", "answer", AnswerPolicy::Last), Some("b"));
        assert_eq!(content("<answer>a<answer>b</answer>", "answer", AnswerPolicy::First), Some("a<answer>b"));
        assert_eq!(content("</answer><answer>", "answer", AnswerPolicy::Last), None);
        assert_eq!(content("<answer ><answer/>x</answer>", "answer", AnswerPolicy::Last), None);
        assert_eq!(content("<think>é</think>", "answer", AnswerPolicy::Last), None);
    }

    #[test]
    fn time_is_linear_on_adversarial_text() {
        for unit in ["<", "<answer>", "</answer>", "<answer></", "<answer><think>"] {
            let text = unit.repeat(8_000_000 / unit.len());
            let start = std::time::Instant::now();
            let _ = content(&text, "answer", AnswerPolicy::Last);
            let _ = content(&text, "answer", AnswerPolicy::First);
            assert!(start.elapsed().as_secs() < 5, "{unit}: {:?}", start.elapsed());
        }
    }
}
