//! Parser of the placeholders `<image>`, `<video>` and `<audio>` in a dataset's text.
//!
//! The k-th placeholder of a kind stands for the k-th medium of that kind; the surrounding text stays verbatim. If no placeholder
//! mentions a kind, its media go before the text: images, then videos, then sound. Any other number of placeholders that differs
//! from the number of media is an error.

use crate::{MediumKind, Part, PerKind, Result, Role, TextError, Turn};

/// Splits one text into parts.
///
/// # Errors
/// Returns [`TextError::PlaceholderCount`] if a kind has some placeholders, but not one per medium.
pub fn split_placeholders(text: &str, media: PerKind<usize>) -> Result<Vec<Part>> {
    let turns = split_conversation(&[(Role::User, text.to_owned())], media)?;
    Ok(turns.into_iter().flat_map(|turn| turn.parts).collect())
}

/// Splits a conversation into turns of parts. Only turns of users and tools contain placeholders: in a system or assistant turn
/// the same literal is text. Media without placeholders go before the text of the first user turn.
///
/// # Errors
/// Returns [`TextError::PlaceholderCount`] as [`split_placeholders`] does, counted over all turns of users and tools. Returns
/// [`TextError::Conversation`] if there are media but no user turn.
pub fn split_conversation(turns: &[(Role, String)], media: PerKind<usize>) -> Result<Vec<Turn>> {
    let shows = |role| matches!(role, Role::User | Role::Tool);
    let shown = || turns.iter().filter(|(role, _)| shows(*role));
    let mut unmentioned = Vec::new();
    for (kind, &expected) in media.iter() {
        let placeholder = kind.placeholder();
        let got = shown().map(|(_, text)| text.matches(placeholder).count()).sum();
        if got == 0 {
            unmentioned.extend((0..expected).map(|index| Part::Medium { kind, index }));
        } else if got != expected {
            return Err(TextError::PlaceholderCount { kind, placeholder, got, expected });
        }
    }
    if !unmentioned.is_empty() && turns.iter().all(|(role, _)| *role != Role::User) {
        return Err(TextError::Conversation { problem: "has media but no user turn to put them in" });
    }

    let mut next = PerKind::<usize>::default();
    let mut out = Vec::with_capacity(turns.len());
    for (role, text) in turns {
        let mut parts = Vec::new();
        if *role == Role::User {
            parts.append(&mut unmentioned);
        }
        if shows(*role) {
            let of_kind = |kind: MediumKind| {
                text.match_indices(kind.placeholder()).map(move |(start, found)| (start, found.len(), kind))
            };
            let mut found: Vec<_> = MediumKind::ALL.into_iter().flat_map(of_kind).collect();
            found.sort_unstable_by_key(|(start, ..)| *start);
            let mut at = 0;
            for (start, len, kind) in found {
                if start > at {
                    parts.push(Part::Text(text[at..start].to_owned()));
                }
                parts.push(Part::Medium { kind, index: next[kind] });
                next[kind] += 1;
                at = start + len;
            }
            if at < text.len() {
                parts.push(Part::Text(text[at..].to_owned()));
            }
        } else {
            parts.push(Part::Text(text.clone()));
        }
        out.push(Turn { role: *role, parts });
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(index: usize) -> Part {
        Part::Medium { kind: MediumKind::Image, index }
    }

    fn text(text: &str) -> Part {
        Part::Text(text.to_owned())
    }

    #[test]
    fn placeholders_keep_order_and_text() {
        let counts = [(MediumKind::Image, 2), (MediumKind::Video, 1)].into();
        let parts = split_placeholders("<image>\nA <video> b<image>", counts).unwrap();
        let video = Part::Medium { kind: MediumKind::Video, index: 0 };
        assert_eq!(parts, [image(0), text("\nA "), video, text(" b"), image(1)]);
    }

    #[test]
    fn unmentioned_media_come_first() {
        let counts = PerKind::<usize>::default().each(|_| 1);
        let parts = split_placeholders("What? <audio>", counts).unwrap();
        let video = Part::Medium { kind: MediumKind::Video, index: 0 };
        let audio = Part::Medium { kind: MediumKind::Audio, index: 0 };
        assert_eq!(parts, [image(0), video, text("What? "), audio]);
        assert_eq!(split_placeholders("", PerKind::default()).unwrap(), []);
    }

    #[test]
    fn wrong_counts_are_errors() {
        for (got, expected) in [(1, 2), (2, 1), (1, 0)] {
            let counts = [(MediumKind::Image, expected)].into();
            match split_placeholders(&"<image>".repeat(got), counts) {
                Err(TextError::PlaceholderCount { kind: MediumKind::Image, got: g, expected: e, .. }) => {
                    assert_eq!((g, e), (got, expected));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn only_user_turns_hold_placeholders() {
        let turns = [
            (Role::System, "You see <image>.".to_owned()),
            (Role::User, "one <image>".to_owned()),
            (Role::Assistant, "<image> is a tag".to_owned()),
            (Role::User, "<image> two".to_owned()),
        ];
        let counts = [(MediumKind::Image, 2)].into();
        let parts: Vec<_> =
            split_conversation(&turns, counts).unwrap().into_iter().map(|t| t.parts).collect();
        assert_eq!(parts[0], [text("You see <image>.")]);
        assert_eq!(parts[1], [text("one "), image(0)]);
        assert_eq!(parts[2], [text("<image> is a tag")]);
        assert_eq!(parts[3], [image(1), text(" two")]);
        assert!(split_conversation(&turns[..1], counts).is_err());
    }
}
