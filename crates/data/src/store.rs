//! Store of media that came as bytes. Each is written once into the cache, under the hash of its content.

use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::DataError;
use crate::output::Output;

/// Writes a medium into `folder`, unless it exists, and returns its file name. `name` is its original name.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn store(folder: &Path, bytes: &[u8], name: Option<&str>) -> Result<String, DataError> {
    let name = format!("{}.{}", short_hash(bytes), medium_extension(bytes, name));
    let file = folder.join(&name);
    if !file.exists() {
        let mut out = Output::create(&file)?;
        out.bytes(bytes)?;
        out.finish()?;
    }
    Ok(name)
}

/// Returns half of a SHA-256 in hexadecimal, which is long enough to rule out accidental collisions.
pub(crate) fn short_hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the extension of a medium's file name: the one of its original name if that is a plain one, else one derived from its
/// first bytes.
pub fn medium_extension<'a>(bytes: &[u8], name: Option<&'a str>) -> &'a str {
    let named = name.and_then(|name| Path::new(name).extension()?.to_str());
    let plain =
        |text: &&str| (1..=5).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if let Some(named) = named.filter(plain) {
        return named;
    }
    match bytes {
        [0x89, b'P', b'N', b'G', ..] => "png",
        [0xff, 0xd8, 0xff, ..] => "jpg",
        [b'G', b'I', b'F', b'8', ..] => "gif",
        [b'B', b'M', ..] => "bmp",
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => "webp",
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => "wav",
        [b'f', b'L', b'a', b'C', ..] => "flac",
        [_, _, _, _, b'f', b't', b'y', b'p', ..] => "mp4",
        _ => "bin",
    }
}
