//! Names that users or files give: the known name that was probably meant, and the form of a name in a message.

use std::borrow::Cow;

/// Length of the longest name that is compared with known names, in characters.
const MAX_COMPARED: usize = 256;
/// Length of the longest name that a message quotes in full, in characters.
const MAX_SHOWN: usize = 100;

/// Returns the known name closest to `text`, if it differs by only a few keystrokes. Letter case is ignored, and `-` equals `_`.
///
/// The time does not grow with the product of the lengths of both names: most comparisons end at their lengths.
pub fn nearest<'n>(text: &str, names: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let length = |text: &str| text.chars().take(MAX_COMPARED + 1).count();
    let len = length(text);
    if len > MAX_COMPARED {
        return None;
    }
    let plain = |name: &str| name.replace('-', "_").to_ascii_lowercase();
    // At most three keystrokes may differ: with a higher limit, long names would match other words.
    let (text, most) = (plain(text), (len / 4).clamp(1, 3));
    names
        .into_iter()
        .filter(|name| length(name).abs_diff(len) <= most)
        .map(|name| (strsim::osa_distance(&text, &plain(name)), name))
        .filter(|(distance, _)| *distance <= most)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// Returns a name as a message quotes it: a long one by its start.
pub fn shown(name: &str) -> Cow<'_, str> {
    match name.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}…", &name[..end]).into(),
        None => name.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_keystrokes_may_differ() {
        let names = ["learning_rate", "lr", "odLength", "max_steps"];
        for (text, expected) in [
            ("learning-rat", Some("learning_rate")),
            ("LEARNING_RATE", Some("learning_rate")),
            ("odlenght", Some("odLength")),
            ("l", Some("lr")),
            ("max_step", Some("max_steps")),
            ("batch", None),
            ("", None),
        ] {
            assert_eq!(nearest(text, names), expected, "{text}");
        }
        assert_eq!(nearest("rate", []), None);
    }

    #[test]
    fn long_names_are_not_compared_and_are_shown_by_their_start() {
        let compared = std::cell::Cell::new(0);
        let long = "é".repeat(80_000);
        let names = || std::iter::repeat_n("max_steps", 1000).inspect(|_| compared.set(compared.get() + 1));
        assert_eq!(nearest(&long, names()), None);
        assert_eq!(compared.get(), 0);
        // Names of equal length have no bound of their own, so the bound is on the length.
        assert_eq!(nearest(&long, [long.as_str()]), None);
        assert_eq!(shown(&long), format!("{}…", "é".repeat(100)));
        assert_eq!(shown("max_steps"), "max_steps");
        let longest = "n".repeat(MAX_COMPARED);
        assert_eq!(nearest(&longest, ["max_steps", &longest]), Some(&*longest));
        assert_eq!(shown(&"n".repeat(100)), "n".repeat(100));
    }
}
