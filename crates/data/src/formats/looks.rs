//! Values that look like media: paths and addresses with a medium's extension, `data:` addresses, base64, bytes, lists and objects
//! of these, and messages with media.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use omnigrpo_text::MediumKind;
use serde_json::Value;

use crate::store::medium_extension;

/// Maximum depth of lists and objects that are searched.
const MAX_DEPTH: usize = 8;
/// Maximum number of entries of a list that are searched.
const MAX_ENTRIES: usize = 16;
/// Maximum length of a path or address, in bytes.
const MAX_PATH_BYTES: usize = 2048;
/// Minimum length of bytes in base64, in characters. The smallest pictures have about 90.
const MIN_BASE64: usize = 64;
/// Characters of base64 that are decoded to recognise a medium.
const START_OF_BASE64: usize = 32;

const PICTURES: [&str; 11] =
    ["png", "jpg", "jpeg", "webp", "bmp", "tif", "tiff", "heic", "heif", "avif", "jfif"];
const CLIPS: [&str; 12] =
    ["mp4", "mkv", "webm", "mov", "avi", "m4v", "mpg", "mpeg", "wmv", "flv", "3gp", "gif"];
const SOUNDS: [&str; 8] = ["wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "wma"];

/// A medium in a value of a column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Look {
    pub(crate) kind: MediumKind,
    /// Keys of objects that lead to it, for a setting that names a column.
    pub(crate) keys: Vec<String>,
    /// True if it is in a message.
    pub(crate) in_message: bool,
}

/// Returns the kind of a medium by the extension of its file.
pub(crate) fn kind_of_extension(extension: &str) -> Option<MediumKind> {
    let extension = extension.to_ascii_lowercase();
    let of = |names: &[&str]| names.contains(&extension.as_str());
    match () {
        () if of(&PICTURES) => Some(MediumKind::Image),
        () if of(&CLIPS) => Some(MediumKind::Video),
        () if of(&SOUNDS) => Some(MediumKind::Audio),
        () => None,
    }
}

/// Returns the kind of the medium that a text looks like.
pub(crate) fn kind_of_text(text: &str) -> Option<MediumKind> {
    if let Some(data) = text.strip_prefix("data:") {
        return MediumKind::ALL.into_iter().find(|kind| data.starts_with(kind.as_str()));
    }
    if let Some(kind) = start_of_base64(text).and_then(|start| kind_of_bytes(&start)) {
        return Some(kind);
    }
    if text.len() > MAX_PATH_BYTES || text.contains('\n') {
        return None;
    }
    // Addresses may have parameters.
    let path = match text.contains("://") {
        true => text.split(['?', '#']).next().unwrap_or(text),
        false => text,
    };
    let name = path.rsplit(['/', '\\']).next().unwrap_or(path);
    let (stem, extension) = name.rsplit_once('.')?;
    // A sentence may end with a file name.
    let is_sentence = name.len() == path.len() && name.split_whitespace().count() > 2;
    kind_of_extension(extension).filter(|_| !stem.is_empty() && !is_sentence)
}

/// Returns the kind of a medium by the first bytes of its file.
fn kind_of_bytes(bytes: &[u8]) -> Option<MediumKind> {
    match bytes {
        [b'R', b'I', b'F', b'F', _, _, _, _, b'A', b'V', b'I', ..] | [0x1a, 0x45, 0xdf, 0xa3, ..] => {
            Some(MediumKind::Video)
        }
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] | [b'G', b'I', b'F', b'8', ..] => {
            Some(MediumKind::Image)
        }
        [b'O', b'g', b'g', b'S', ..] | [b'I', b'D', b'3', 2..=4, ..] => Some(MediumKind::Audio),
        [b'B', b'M', _, _, _, _, 0, 0, 0, 0, ..] => Some(MediumKind::Image),
        [b'B', b'M', ..] => None,
        bytes => kind_of_extension(medium_extension(bytes, None)),
    }
}

/// Returns the first bytes of a text in base64.
fn start_of_base64(text: &str) -> Option<Vec<u8>> {
    let start = text.as_bytes().get(..START_OF_BASE64).filter(|_| text.len() >= MIN_BASE64)?;
    STANDARD.decode(start).ok()
}

/// Reports whether a text is a medium in base64, without `data:` before it.
pub(crate) fn is_base64(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=\r\n".contains(&byte);
    start_of_base64(text).is_some_and(|start| kind_of_bytes(&start).is_some()) && text.bytes().all(plain)
}

/// Returns the first medium in a value.
pub(crate) fn medium(value: &Value) -> Option<Look> {
    search(value, 0)
}

fn search(value: &Value, depth: usize) -> Option<Look> {
    let found = |kind| Some(Look { kind, keys: Vec::new(), in_message: false });
    if depth > MAX_DEPTH {
        return None;
    }
    match value {
        Value::String(text) => kind_of_text(text).and_then(found).or_else(|| {
            let nested = text.starts_with(['[', '{']) && text.len() <= 1 << 20;
            let value: Value = nested.then(|| serde_json::from_str(text).ok())??;
            search(&value, depth + 1)
        }),
        Value::Array(list) if list.len() > 16 && list.iter().take(16).all(Value::is_u64) => {
            let bytes =
                list.iter().take(16).map(|byte| byte.as_u64().and_then(|byte| u8::try_from(byte).ok()));
            kind_of_bytes(&bytes.collect::<Option<Vec<_>>>()?).and_then(found)
        }
        Value::Array(list) => list.iter().take(MAX_ENTRIES).find_map(|value| search(value, depth + 1)),
        Value::Object(map) => {
            let in_message =
                ["role", "from"].iter().any(|key| map.contains_key(*key)) || map.contains_key("type");
            let named = map.get("type").and_then(Value::as_str).map(|name| name.trim_end_matches("_url"));
            if let Some(kind) = named.and_then(MediumKind::named) {
                return Some(Look { kind, keys: Vec::new(), in_message: true });
            }
            map.iter().find_map(|(key, value)| {
                let mut look = search(value, depth + 1)?;
                // An object of the `datasets` library or a part of a message is one value.
                if !in_message && !["bytes", "path", "url"].contains(&key.as_str()) {
                    look.keys.insert(0, key.clone());
                }
                look.in_message |= in_message;
                Some(look)
            })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn media_are_recognised_in_every_form() {
        use MediumKind::{Audio, Image, Video};
        let png = STANDARD.encode([&b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"[..], &[0; 60]].concat());
        let jpeg = STANDARD.encode([&b"\xff\xd8\xff\xe0\0\x10JFIF"[..], &[1; 60]].concat());
        let mp4 = STANDARD.encode([&b"\0\0\0\x20ftypisom"[..], &[1; 60]].concat());
        let look = |value: Value| medium(&value).map(|look| look.kind);
        for (value, kind) in [
            (json!("a.png"), Image),
            (json!("My photos/first day.JPG"), Image),
            (json!(r"C:\photos\a.webp"), Image),
            (json!("https://host/a.jpeg?size=2#x"), Image),
            (json!("s3://bucket/clip.mp4"), Video),
            (json!("clip.gif"), Video),
            (json!("sound.mp3"), Audio),
            (json!("data:image/png;base64,AAAA"), Image),
            (json!("data:video/jpeg;base64,AA,BB"), Video),
            (json!(png), Image),
            (json!(jpeg), Image),
            (json!(mp4), Video),
            (json!(["x", "b.tiff"]), Image),
            (json!({ "path": null, "bytes": png }), Image),
            (json!(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0".to_vec()), Image),
            (json!([{ "role": "user", "content": [{ "type": "video" }] }]), Video),
            (json!("[{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}]"), Image),
        ] {
            assert_eq!(look(value.clone()), Some(kind), "{value}");
        }
        for value in [
            json!("What is in photo.jpg"),
            json!(".png"),
            json!("v1.2"),
            json!("a.json"),
            json!("line\nb.png"),
            json!("data:text/plain,x"),
            json!(STANDARD.encode([7; 90])),
            json!([1, 2, 3]),
            json!(vec![300; 20]),
            json!([{ "role": "user", "content": "<image> What?" }]),
            json!({ "type": "question" }),
            json!("src/a.ts"),
            json!(3),
        ] {
            assert_eq!(look(value.clone()), None, "{value}");
        }
        let keys = |value: Value| medium(&value).map(|look| (look.keys.join("."), look.in_message));
        assert_eq!(keys(json!({ "n": 1, "front": { "path": "a.png" } })), Some(("front".into(), false)));
        assert_eq!(keys(json!({ "views": [{ "left": "a.png" }] })), Some(("views.left".into(), false)));
        assert_eq!(
            keys(json!([{ "from": "human", "value": "a.png" }])).map(|(_, in_message)| in_message),
            Some(true)
        );
    }
}
