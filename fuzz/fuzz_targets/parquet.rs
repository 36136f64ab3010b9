//! Checks that any bytes are a table of rows or an error, and that a failed conversion leaves no file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use omnigrpo_data::convert_parquet;

fuzz_target!(init: omnigrpo_fuzz::let_guarded_panics_pass(), |bytes: &[u8]| {
    let folder = tempfile::tempdir().expect("a folder");
    let (table, rows) = (folder.path().join("x.parquet"), folder.path().join("x.jsonl"));
    std::fs::write(&table, bytes).expect("a file");
    match convert_parquet(&table, &rows) {
        Ok(count) => {
            let text = std::fs::read_to_string(&rows).expect("rows");
            assert_eq!(text.lines().count() as u64, count);
        }
        Err(_) => assert!(!rows.exists(), "a failed conversion has left {}", rows.display()),
    }
});
