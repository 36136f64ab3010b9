//! Check of the map of a `Precompiled` normaliser (SentencePiece's `precompiled_charsmap`). The map is base64 of the trie's
//! length in bytes, the trie, and the texts that it points to. The `tokenizers` crate allocates the declared length, up to 8.6
//! GB, before it reads the trie. The length is therefore compared with the number of bytes that follow before the crate sees the
//! file.

use std::borrow::Cow;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserializer;
use serde::de::{DeserializeSeed, MapAccess, SeqAccess, Visitor};

/// JSON key of a map.
const MAP: &str = "precompiled_charsmap";

/// Checks the maps of a `tokenizer.json`, under any key and at any depth.
///
/// # Errors
/// Returns an error if a map declares more bytes than follow, or if the file is not JSON.
pub(crate) fn check_charsmaps(tokenizer: &[u8]) -> Result<(), serde_json::Error> {
    Walk { is_map: false }.deserialize(&mut serde_json::Deserializer::from_slice(tokenizer))
}

/// Visitor that walks a JSON value without storing it.
struct Walk {
    /// True if the value is a map to check.
    is_map: bool,
}

impl<'de> DeserializeSeed<'de> for Walk {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<(), D::Error> {
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Walk {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        if !self.is_map {
            return Ok(());
        }
        let head = BASE64_STANDARD.decode(text.get(..8).unwrap_or_default()).unwrap_or_default();
        let Some(declared) = head.first_chunk().map(|bytes| u32::from_le_bytes(*bytes) as usize) else {
            // Too short for a length, or not base64: the crate rejects it.
            return Ok(());
        };
        let padding = text.len() - text.trim_end_matches('=').len();
        let had = (text.len() / 4 * 3).saturating_sub(4 + padding);
        match declared > had {
            true => Err(E::custom(format!(
                "{MAP} declares a trie of {declared} bytes, expected at most the {had} that follow"
            ))),
            false => Ok(()),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(Walk { is_map: false })?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            map.next_value_seed(Walk { is_map: key == MAP })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(tokenizer: &str) -> Option<String> {
        check_charsmaps(tokenizer.as_bytes()).err().map(|error| error.to_string())
    }

    #[test]
    fn a_map_has_what_it_declares() {
        let map = |declared: u32, len: usize| {
            BASE64_STANDARD.encode([&declared.to_le_bytes()[..], &vec![0; len]].concat())
        };
        let at = |map: String| said(&format!(r#"{{"a": [1, -1, 0.5, null, true, {{"{MAP}": "{map}"}}]}}"#));
        for (declared, len) in [(0, 0), (40, 40), (38, 40), (3, 40)] {
            assert_eq!(at(map(declared, len)), None, "{declared} of {len}");
        }
        for (declared, len) in [(u32::MAX, 40), (1 << 20, 1 << 10), (48, 40)] {
            let error = at(map(declared, len)).unwrap();
            assert!(error.contains(&format!("declares a trie of {declared} bytes")), "{error}");
        }
        let escaped = format!(r#"{{"precompiled\u005fcharsmap": "{}"}}"#, map(u32::MAX, 40));
        assert!(said(&escaped).is_some(), "a key may be spelled in several ways");
        assert_eq!(said(&format!(r#"{{"model": {{"vocab": {{"{MAP}": 7}}}}, "text": "/////w=="}}"#)), None);
        // The crate skips unknown values at any depth.
        let deep =
            format!(r#"{{"x": {}{}, "{MAP}": "{}"}}"#, "[".repeat(200), "]".repeat(200), map(u32::MAX, 40));
        assert!(said(&deep).is_some());
    }
}
