//! Lists and registries over real files: which rows take part, where their media are found, and that none of it changes
//! from one opening to the next.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::io::Write as _;
use std::path::Path;

use omnigrpo_data::{Dataset, DatasetSpec, MediumSource, ReadOptions, Registry, Roots};
use serde_json::json;

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

fn open(specs: &[DatasetSpec], seed: u64) -> Dataset {
    Dataset::open(specs, &ReadOptions { seed, ..ReadOptions::default() }).unwrap()
}

fn questions(dataset: &Dataset) -> Vec<String> {
    (0..dataset.len()).map(|row| dataset.get(row).unwrap().question()).collect()
}

/// VLM-R1: a list of files, each with its strategy and its folder of images; JSON arrays and JSON lines.
#[test]
fn a_list_of_files_with_strategies_and_folders() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().canonicalize().unwrap().join(name);
    let rows = |name: &str, num: usize| -> Vec<serde_json::Value> {
        (0..num)
            .map(|i| {
                json!({
                    "id": i, "image": format!("{i}.jpg"),
                    "conversations": [
                        {"from": "human", "value": format!("<image>{name}{i}")},
                        {"from": "gpt", "value": [i, 0, 9, 9]},
                    ],
                })
            })
            .collect()
    };
    write(&place("rec.json"), &serde_json::to_string_pretty(&rows("rec", 10)).unwrap());
    let lines: Vec<String> = rows("od", 20).iter().map(ToString::to_string).collect();
    write(&place("od.jsonl"), &lines.join("\n"));
    for i in 0..20 {
        write(&place(&format!("coco/train2014/{i}.jpg")), "x");
        write(&place(&format!("pics/{i}.jpg")), "y");
    }
    write(
        &place("list.yaml"),
        "datasets:\n  - json_path: rec.json\n    sampling_strategy: first:3\n    data_path: coco/train2014\n  - json_path: od.jsonl\n    sampling_strategy: random:15%\n",
    );
    let roots = Roots { images: vec![place("pics")], ..Roots::default() };
    let specs = DatasetSpec::from_files(&[place("list.yaml")], &roots).unwrap();
    let dataset = open(&specs, 7);
    assert_eq!(dataset.parts().collect::<Vec<_>>(), [("rec", 3), ("od", 3)]);
    let got = questions(&dataset);
    assert_eq!(got[..3], ["rec0", "rec1", "rec2"]);
    assert!(got[3..].iter().all(|question| question.starts_with("od")));
    let numbers: Vec<u32> = got[3..].iter().map(|question| question[2..].parse().unwrap()).collect();
    assert!(numbers.is_sorted() && numbers[0] != numbers[2]);
    assert_eq!(questions(&open(&specs, 7)), got);
    assert_ne!((1..6).map(|seed| questions(&open(&specs, seed))).filter(|other| *other == got).count(), 5);
    let sources = |row| dataset.get(row).unwrap().media[0].source.clone();
    assert_eq!(sources(1), MediumSource::Path(place("coco/train2014/1.jpg")));
    assert_eq!(sources(3), MediumSource::Path(place(&format!("pics/{}.jpg", numbers[0]))));
    // A box that is a list stays what it was.
    assert_eq!(dataset.get(2).unwrap().solution.as_deref(), Some("[2,0,9,9]"));
}

/// VLM-R1's launch scripts pair files and image folders.
#[test]
fn files_and_folders_belong_together_pair_by_pair() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().canonicalize().unwrap().join(name);
    for name in ["a", "b"] {
        write(&place(&format!("{name}.jsonl")), r#"{"image": "1.jpg", "problem": "Q"}"#);
        write(&place(&format!("pics_{name}/1.jpg")), "x");
    }
    let roots = Roots { images: vec![place("pics_a"), place("pics_b")], ..Roots::default() };
    let specs = DatasetSpec::from_files(&[place("a.jsonl"), place("b.jsonl")], &roots).unwrap();
    let dataset = open(&specs, 0);
    let found: Vec<_> = (0..2).map(|row| dataset.get(row).unwrap().media[0].source.clone()).collect();
    assert_eq!(found, ["a", "b"].map(|name| MediumSource::Path(place(&format!("pics_{name}/1.jpg")))));
}

#[test]
fn a_share_of_a_name_takes_the_same_rows_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<_> = (0..101).map(|i| json!({"prompt": i.to_string()})).collect();
    write(&folder.path().join("a.json"), &json!(rows).to_string());
    write(
        &folder.path().join("registry.yaml"),
        "a: {annotation_path: a.json, sampling_strategy: 'first:3'}\n",
    );
    let registry = Registry::open(&folder.path().join("registry.yaml")).unwrap();
    let select = |text: &str| registry.select(text, &Roots::default()).unwrap();
    assert_eq!(questions(&open(&select("a"), 0)), ["0", "1", "2"]);
    // The share wins over the entry's strategy, and is rounded down.
    let half = questions(&open(&select("a%50"), 0));
    assert_eq!(half.len(), 50);
    assert_eq!(questions(&open(&select("a%50"), 0)), half);
    assert_ne!(questions(&open(&select("a%50"), 1)), half);
    assert_eq!(open(&select("a%50,a%1"), 0).len(), 51);
}

/// 64 MB of rows are opened by their offsets and read one by one, in any order.
#[test]
fn a_large_file_is_read_row_by_row() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.jsonl");
    let mut out = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
    let filler = "x".repeat(16 << 10);
    for i in 0..4000 {
        writeln!(out, r#"{{"prompt": "{i}", "filler": "{filler}"}}"#).unwrap();
    }
    out.into_inner().unwrap();
    let before = resident_bytes();
    let dataset = open(&[DatasetSpec::file(&path)], 0);
    for row in (0..4000u32).step_by(3).rev().map(u64::from) {
        assert_eq!(dataset.get(row).unwrap().question(), row.to_string());
    }
    if let (Some(before), Some(after)) = (before, resident_bytes()) {
        assert!(after < before + (24 << 20), "{before} → {after}");
    }
}

/// Returns the process's resident memory, if the system reports it.
fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(statm.split_whitespace().nth(1)?.parse::<u64>().ok()? * 4096)
}
