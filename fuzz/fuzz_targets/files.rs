//! Checks that any file is a dataset, a registry or a list, or an error.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use omnigrpo_data::{Dataset, DatasetSpec, ReadOptions, Registry, Roots, convert_vivqa_x};

static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fuzz_target!(|input: (u8, &[u8])| {
    let (kind, bytes) = input;
    let name = ["x.json", "x.jsonl", "registry.yaml", "registry.json", "list.yaml", "vivqa.json"][usize::from(kind) % 6];
    let path = FOLDER.path().join(name);
    std::fs::write(&path, bytes).expect("a file");
    match name {
        "registry.yaml" | "registry.json" => {
            if let Ok(registry) = Registry::open(&path) {
                let names: Vec<String> = registry.names().map(str::to_owned).collect();
                let _ = registry.select(&names.join("%50,"), &Roots::default());
            }
        }
        "vivqa.json" => {
            let _ = convert_vivqa_x(&path, &FOLDER.path().join("out.jsonl"));
        }
        _ => {
            let Ok(specs) = DatasetSpec::from_files(&[path], &Roots::default()) else { return };
            if let Ok(dataset) = Dataset::open(&specs, &ReadOptions::default()) {
                for row in 0..dataset.len().min(100) {
                    let _ = dataset.get(row);
                }
            }
        }
    }
});
