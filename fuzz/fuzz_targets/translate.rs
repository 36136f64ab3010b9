//! Checks that any script is settings or an error, and that it reads no file but those that it may name.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use omnigrpo::cli::translate::translate;

fuzz_target!(|input: &[u8]| {
    // The first byte chooses the kind of file; seeds are texts, so that a letter is a script for a shell.
    let name = match input.first() {
        Some(b'i' | b'f') => "x.py",
        Some(b'm' | b'o' | b'a'..=b'e') => "x.yaml",
        _ => "x.sh",
    };
    let text = String::from_utf8_lossy(input);
    let read = |path: &Path| {
        assert!(!path.as_os_str().is_empty());
        Some("learning_rate: 1e-6\nmodel_name_or_path: m\n".to_owned())
    };
    if let Ok(translation) = translate(&text, Path::new(name), "/h", read) {
        assert!(!translation.text.contains('\0') && !translation.text.contains('\x1b'), "{}", translation.text);
    }
});
