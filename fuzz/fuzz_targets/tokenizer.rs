//! Checks that any `tokenizer.json` is a tokenizer or an error, and that a tokenizer survives any text and any ids.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use omnigrpo_text::Tokenizer;

static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fuzz_target!(|json: &[u8]| {
    std::fs::write(FOLDER.path().join("tokenizer.json"), json).expect("a file");
    let Ok(tokenizer) = Tokenizer::from_dir(FOLDER.path()) else { return };
    // The file itself is the text, and its bytes are the ids.
    let text = &String::from_utf8_lossy(&json[..json.len().min(256)]);
    let ids: Vec<u32> = text.bytes().map(|byte| u32::from(byte) * u32::from(byte)).collect();
    if let Ok(encoded) = tokenizer.encode_text(text) {
        let known = tokenizer.vocab_size();
        assert!(encoded.iter().all(|&id| (id as usize) < known), "{encoded:?} of a vocabulary of {known}");
        let _ = tokenizer.decode(&encoded, false);
    }
    let _ = tokenizer.encode_control(text, &ids);
    let _ = tokenizer.decode(&ids, true);
    for id in ids {
        let _ = tokenizer.token_bytes(id);
    }
});
