//! Helpers of the tests of pictures and of videos.

use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};

/// Returns the path of a file of the tests.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// Returns a table of `images.json`.
pub fn golden(table: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(data("images.json")).unwrap();
    let mut golden: Value = serde_json::from_str(&text).unwrap();
    golden[table].take().as_array().unwrap().clone()
}

/// Returns the SHA-256 of bytes, in hexadecimal digits.
pub fn sha(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Returns random bytes.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        })
        .collect()
}
