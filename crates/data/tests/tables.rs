//! Tables of text, and folders of media as `datasets` reads them.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use omnigrpo_data::{ColumnNames, Dataset, DatasetSpec, MediumSource, ReadOptions, Sample, media_folder};
use omnigrpo_guard::told;
use serde_json::{Value, json};

fn write(folder: &Path, name: &str, text: &[u8]) {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn options() -> ReadOptions {
    ReadOptions { question: Some("What is it?".into()), ..ReadOptions::default() }
}

/// Opens a table with this text beside a picture `a.png`.
fn table(name: &str, text: &[u8], options: &ReadOptions) -> Result<(tempfile::TempDir, Dataset), String> {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "a.png", b"x");
    write(folder.path(), name, text);
    let opened = Dataset::open(&[DatasetSpec::file(folder.path().join(name))], options);
    opened.map(|rows| (folder, rows)).map_err(|error| told(&error).to_string())
}

fn columns(rows: &Dataset) -> Vec<Value> {
    (0..rows.len()).map(|row| Value::Object(rows.get(row).unwrap().columns)).collect()
}

fn media(sample: &Sample, folder: &Path) -> Vec<String> {
    let within = |source: &MediumSource| match source {
        MediumSource::Path(path) => path.strip_prefix(folder).unwrap().display().to_string(),
        other => panic!("{other:?}"),
    };
    sample.media.iter().map(|own| within(&own.source)).collect()
}

/// `tests/data/make_folders.py` wrote the expected rows.
#[test]
fn folders_have_the_rows_of_datasets() {
    let text = include_str!("data/folders.json");
    let cases: BTreeMap<String, Value> = serde_json::from_str(text).unwrap();
    assert!(cases.len() >= 9);
    for (case, own) in cases {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for (name, text) in own["files"].as_object().unwrap() {
            write(&root, name, text.as_str().unwrap_or("x").as_bytes());
        }
        let splits = own["splits"].as_object().unwrap();
        for (split, expected) in splits {
            let files = media_folder(&root, split).unwrap().unwrap().files;
            let specs: Vec<DatasetSpec> = files.iter().map(DatasetSpec::file).collect();
            let rows = Dataset::open(&specs, &options()).unwrap();
            let mut found: Vec<Value> = Vec::new();
            for row in 0..rows.len() {
                let sample = rows.get(row).unwrap();
                let mut columns = sample.columns.clone();
                // The place of the picture serves as an id where a table has none.
                columns.remove("id");
                let media = media(&sample, &root);
                // Rows of pictures begin in the folder of their split, and those of a table in its folder.
                for name in ["image", "images", "photo"] {
                    match columns.get_mut(name) {
                        Some(Value::String(path)) if name != "photo" => *path = media[0].clone(),
                        Some(Value::Array(all)) => *all = media.iter().map(|path| json!(path)).collect(),
                        _ => {}
                    }
                }
                found.push(Value::Object(columns));
            }
            let number_as_text = |value: &Value| match value {
                Value::Number(number) => json!(number.to_string()),
                other => other.clone(),
            };
            let plain = |row: &Value| -> BTreeMap<String, Value> {
                let row = row.as_object().unwrap().iter();
                row.map(|(name, value)| (name.clone(), number_as_text(value))).collect()
            };
            let sorted = |rows: &[Value]| {
                let mut all: Vec<String> = rows.iter().map(|row| json!(plain(row)).to_string()).collect();
                all.sort();
                all
            };
            assert_eq!(sorted(&found), sorted(expected.as_array().unwrap()), "{case}, {split}");
        }
        let missing = ["train", "validation", "test"].into_iter().find(|name| !splits.contains_key(*name));
        let error = told(&media_folder(&root, missing.unwrap()).unwrap_err()).to_string();
        assert!(error.contains("unknown split"), "{case}: {error}");
    }
}

#[test]
fn a_folder_for_each_class_gives_questions_pictures_and_labels() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    for name in ["cat/a.png", "dog/b.jpg", "dog/.hidden.png", "__MACOSX/a.png"] {
        write(&root, name, b"x");
    }
    let rows = Dataset::open(&[DatasetSpec::file(&root)], &options()).unwrap();
    let sample = rows.get(1).unwrap();
    assert_eq!((rows.len(), sample.id.as_str()), (2, "dog/b.jpg"));
    assert_eq!((sample.question().as_str(), sample.solution.as_deref()), ("What is it?", Some("dog")));
    assert_eq!(media(&sample, &root), ["dog/b.jpg"]);
    // Without a question, the error names what is missing.
    let error = told(
        &Dataset::open(&[DatasetSpec::file(&root)], &ReadOptions::default()).unwrap().get(0).unwrap_err(),
    );
    assert!(error.to_string().contains("ReadOptions::question asks one question"), "{error}");
    assert_eq!(
        media_folder(&tempfile::tempdir().unwrap().path().canonicalize().unwrap(), "train").unwrap(),
        None
    );
}

/// A folder that would be left out is an error, since its rows would be missing without a word.
#[test]
fn folders_that_are_not_searched_are_errors() {
    let refused = |prepare: &dyn Fn(&Path)| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "cat/1.jpg", b"x");
        write(folder.path(), "dog/1.jpg", b"x");
        prepare(folder.path());
        told(&media_folder(folder.path(), "train").unwrap_err()).to_string()
    };
    let error = refused(&|folder| write(folder, "1/2/3/4/5/6/7/8/9/a.jpg", b"x"));
    assert!(error.contains("1/2/3/4/5/6/7/8/9") && error.contains("more than 8 folders deep"), "{error}");
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt;
        let error = refused(&|folder| {
            std::os::unix::fs::symlink(folder.join("cat"), folder.join("lynx")).unwrap();
        });
        assert!(error.contains("lynx") && error.contains("links to folders are not followed"), "{error}");
        let error =
            refused(&|folder| fs::write(folder.join(std::ffi::OsStr::from_bytes(b"\xff.jpg")), "x").unwrap());
        assert!(error.contains("its name is no UTF-8"), "{error}");
    }
}

/// A class that is named as a split makes the other classes none of the rows.
#[test]
fn folders_beside_those_of_splits_are_named() {
    let left_out = |paths: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        paths.iter().for_each(|path| write(folder.path(), path, b"x"));
        media_folder(folder.path(), "train").unwrap().unwrap().left_out
    };
    assert_eq!(
        left_out(&["cat/1.jpg", "train/1.jpg", "dog/1.jpg", "0.jpg", "notes/a.txt"]),
        ["0.jpg", "cat", "dog"]
    );
    assert_eq!(left_out(&["metadata.csv", "train/1.jpg", "test/1.jpg"]), ["metadata.csv"]);
    assert_eq!(left_out(&["train/cat/1.jpg", "test/cat/1.jpg"]), [""; 0]);
    assert_eq!(left_out(&["cat/1.jpg", "dog/1.jpg"]), [""; 0]);
}

/// A table beside the media of a folder is not read, so it is named.
#[test]
fn a_table_in_a_folder_of_media_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["1.jpg", "labels.csv", "notes.txt", "cat/more.csv", "rows.JSONL"];
    names.iter().for_each(|name| write(folder.path(), name, b"x"));
    let found = media_folder(folder.path(), "train").unwrap().unwrap();
    assert_eq!(found.unread, ["labels.csv", "rows.JSONL"]);
    write(folder.path(), "metadata.csv", b"x");
    assert_eq!(
        media_folder(folder.path(), "train").unwrap().unwrap().files,
        [folder.path().join("metadata.csv")]
    );
}

#[test]
fn a_column_of_the_name_of_a_file_keeps_its_value() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "a.png", b"x");
    write(folder.path(), "b.png", b"x");
    write(folder.path(), "metadata.csv", b"file_name,image,answer\na.png,b.png,yes\n");
    let rows = Dataset::open(&[DatasetSpec::file(folder.path().join("metadata.csv"))], &options()).unwrap();
    assert_eq!(columns(&rows), [json!({"file_name": "a.png", "image": "b.png", "answer": "yes"})]);
    assert_eq!(media(&rows.get(0).unwrap(), folder.path()), ["b.png"]);
    let unread =
        |rows: &Dataset| -> Vec<String> { rows.unread_media().into_iter().map(|own| own.column).collect() };
    assert_eq!(unread(&rows), ["file_name"]);
    // The column that is the row's picture is read.
    write(folder.path(), "metadata.csv", b"file_name,answer\na.png,yes\n");
    let rows = Dataset::open(&[DatasetSpec::file(folder.path().join("metadata.csv"))], &options()).unwrap();
    assert_eq!(media(&rows.get(0).unwrap(), folder.path()), ["a.png"]);
    assert_eq!(unread(&rows), [""; 0]);
}

#[test]
fn cells_keep_their_texts_and_columns_of_numbers_are_numbers() {
    let text = "\u{feff}image,colour,how many,code,size\r\n\
                a.png,\"dark, \"\"red\"\"\",3,007,1.5\r\n\
                a.png,\"two\nlines\",12,010,2.50\r\n\
                a.png,NA,,1,3\r\n";
    let (folder, rows) = table("rows.csv", text.as_bytes(), &options()).unwrap();
    let expected = json!([
        {"image": "a.png", "colour": "dark, \"red\"", "how many": 3, "code": "007", "size": "1.5"},
        {"image": "a.png", "colour": "two\nlines", "how many": 12, "code": "010", "size": "2.50"},
        {"image": "a.png", "colour": "NA", "code": "1", "size": "3"},
    ]);
    assert_eq!(json!(columns(&rows)), expected);
    let sample = rows.get(2).unwrap();
    assert_eq!(sample.origin.line, 5, "lines of the file, not rows");
    assert_eq!(media(&sample, &folder.path().canonicalize().unwrap()), ["a.png"]);
    // A column is named as in other files.
    let columns = ColumnNames { solution: Some("colour".into()), ..ColumnNames::default() };
    let (_folder, rows) = table("rows.csv", text.as_bytes(), &ReadOptions { columns, ..options() }).unwrap();
    assert_eq!(rows.get(0).unwrap().solution.as_deref(), Some("dark, \"red\""));
}

#[test]
fn the_separator_is_that_of_the_first_line() {
    for (name, text) in [
        ("a.csv", "question;answer\n\"a;b\";1,5\n"),
        ("a.csv", "question\tanswer\na;b\t1,5\n"),
        ("a.tsv", "question\tanswer\na;b\t1,5\n"),
        ("A.CSV", "question,answer\na;b,\"1,5\"\n"),
        ("a.csv", "\"question\",answer\r\na;b,\"1,5\""),
    ] {
        let (_folder, rows) = table(name, text.as_bytes(), &ReadOptions::default()).unwrap();
        assert_eq!(columns(&rows), [json!({"question": "a;b", "answer": "1,5"})], "{text}");
    }
}

#[test]
fn damaged_tables_name_file_line_and_remedy() {
    for (text, parts) in [
        (&b"question,answer\nx,1\ny,2,3\n"[..], &["rows.csv:3", "got 3, expected 2", "put quotes"][..]),
        (b"question,question\nx,1\n", &["rows.csv:1", "two columns are called `question`"]),
        (b"question,,\nx,1,\n", &["two columns without a name"]),
        (b"question,answer\nx,\xe4\n", &["rows.csv:2", "no UTF-8", "iconv"]),
        (b"question,answer\n", &["0 rows"]),
        (b"", &["0 rows"]),
    ] {
        let error = table("rows.csv", text, &ReadOptions::default()).map(|_| ()).unwrap_err();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

/// A quote that is never closed would make one cell of the rest of the file.
#[test]
fn quotes_that_stay_open_and_endless_rows_are_errors() {
    let refused = |text: &str| match table("rows.csv", text.as_bytes(), &options()) {
        Ok((_, rows)) => panic!("{} rows", rows.len()),
        Err(error) => error,
    };
    let error = refused("image,answer\na.png,\"yes\na.png,no\na.png,no\n");
    assert!(
        error.contains("rows.csv:2:") && error.contains("a quote opens here and closes nowhere"),
        "{error}"
    );
    let error = refused(&format!("image,{}\na.png,x\n", "answer".repeat(200_000)));
    assert!(error.contains("more than 1048576 bytes"), "{error}");
    // Quotes that are part of a cell, doubled ones and line ends within them are none of this.
    let (_folder, rows) = table(
        "rows.csv",
        b"image,answer\na.png,6\" pipe\na.png,\"two\nlines, \"\"quoted\"\"\"\n",
        &options(),
    )
    .unwrap();
    let answers: Vec<Value> = columns(&rows).iter().map(|row| row["answer"].clone()).collect();
    assert_eq!(answers, [json!("6\" pipe"), json!("two\nlines, \"quoted\"")]);
}
