//! Where the expected numbers are.

use std::path::PathBuf;

/// Returns the path of a golden file.
pub fn golden(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden").join(path)
}
