//! Downloader of tables from the hub: the parquet files of one split of a dataset, in the local cache.
//!
//! Many datasets are parquet tables in their main branch. For others the hub provides a converted copy in the branch
//! `refs/convert/parquet`. The name of a file determines its split and its part (the hub says configuration or subset), by the
//! rules of the `datasets` library: `data/train-00000-of-00002.parquet`, `PART/test-00000-of-00001.parquet`,
//! `PART/train/0000.parquet`. Patterns declared on a dataset's page are not read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::download::{Source, check, snapshot};
use super::{Entry, Hub, Kind, Step, stays_inside};
use crate::FetchError;
use crate::media::place as place_file;

/// Revisions that may contain the tables, in the order of the search.
const REVISIONS: [&str; 2] = ["main", "refs/convert/parquet"];

/// Returns the table files of a split from a cache shared with `huggingface_hub`, in order.
///
/// File names do not always show the number of files, and the cache does not show which other parts the hub has. The function
/// therefore accepts only files that [`Hub::dataset`] has recorded for the split. With `by_names`, for callers that cannot
/// contact the hub, it also accepts files of other programs if their names are unambiguous. The part must then be given or called
/// `default`, and none of the files that the names count may be missing.
pub fn cached_dataset(
    cache: &Path,
    name: &str,
    part: Option<&str>,
    split: &str,
    by_names: bool,
) -> Option<Vec<PathBuf>> {
    let repo = Kind::Dataset.folder(cache, name);
    let snapshots: Vec<PathBuf> = REVISIONS.iter().filter_map(|revision| snapshot(&repo, revision)).collect();
    let found = |dir: &PathBuf| {
        let files = recorded(&record_of(&repo, dir)).remove(&key(part, split))?;
        let files: Vec<PathBuf> =
            files.iter().filter(|file| stays_inside(file)).map(|file| dir.join(file)).collect();
        (!files.is_empty() && files.iter().all(|file| file.is_file())).then_some(files)
    };
    let named = |dir: &PathBuf| {
        let mut names = Vec::new();
        tables(dir, "", 0, &mut names);
        let part = part.unwrap_or("default");
        let files = choose(name, names.iter().map(String::as_str), Some(part), split).ok()?;
        is_whole(&files).then(|| files.iter().map(|file| dir.join(file)).collect())
    };
    snapshots.iter().find_map(found).or_else(|| snapshots.iter().filter(|_| by_names).find_map(named))
}

/// Returns the table files of a split in a folder on this machine, in order. File names determine parts and splits, as on the hub.
///
/// # Errors
/// Returns an error if the folder has no parquet tables, or lacks the split.
pub fn folder_tables(dir: &Path, part: Option<&str>, split: &str) -> Result<Vec<PathBuf>, FetchError> {
    let (name, mut names) = (dir.display().to_string(), Vec::new());
    tables(dir, "", 0, &mut names);
    if names.is_empty() {
        let files = std::fs::read_dir(dir).into_iter().flatten().flatten().take(20);
        let files: Vec<String> =
            files.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        return Err(FetchError::NoTables { name, files: files.join(", ") });
    }
    let files = choose(&name, names.iter().map(String::as_str), part, split)?;
    Ok(files.iter().map(|file| dir.join(file)).collect())
}

/// Returns the path of the record of requested splits and their files, by commit. `huggingface_hub` ignores this file.
fn record_of(repo: &Path, snapshot: &Path) -> PathBuf {
    repo.join("splits").join(snapshot.file_name().unwrap_or_default()).with_extension("json")
}

/// Returns the recorded files of each split by [`key`], or nothing without a record.
fn recorded(path: &Path) -> BTreeMap<String, Vec<String>> {
    std::fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

/// Returns the key of a request for a split. A request without a part has a different key from a request for the part that it
/// selects.
fn key(part: Option<&str>, split: &str) -> String {
    format!("{} {split}", part.unwrap_or_default())
}

/// Collects the names of the tables in a folder of the cache and its subfolders.
fn tables(dir: &Path, within: &str, depth: usize, into: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = entry.path();
        if path.is_dir() && depth < 8 {
            tables(&path, &format!("{within}{name}/"), depth + 1, into);
        } else if name.ends_with(".parquet") && path.is_file() {
            into.push(format!("{within}{name}"));
        }
    }
}

impl Hub {
    /// Fetches the missing files of a dataset's split into the cache and returns the split's table files, in order. Without
    /// `part`, it uses the part called `default`, or the only part.
    ///
    /// # Errors
    /// Returns an error in these cases: the connection fails, the dataset does not exist or is not accessible to this account,
    /// the dataset has no parquet tables or lacks the split, the content differs from what the hub announced, or the cache cannot
    /// be written.
    pub fn dataset(
        &self,
        name: &str,
        part: Option<&str>,
        split: &str,
        on: &mut dyn FnMut(Step),
    ) -> Result<Vec<PathBuf>, FetchError> {
        let mut listing = self.listing(Kind::Dataset, name, REVISIONS[0])?;
        let mut revision = REVISIONS[0];
        let is_table = |entry: &Entry| entry.rfilename.ends_with(".parquet");
        if !listing.siblings.iter().any(is_table) {
            revision = REVISIONS[1];
            listing = match self.listing(Kind::Dataset, name, revision) {
                Err(FetchError::NoRepo { .. }) => {
                    let files: Vec<_> =
                        listing.siblings.iter().take(20).map(|entry| entry.rfilename.as_str()).collect();
                    return Err(FetchError::NoTables { name: name.to_owned(), files: files.join(", ") });
                }
                other => other?,
            };
        }
        let source = Source::new(&self.options.cache, Kind::Dataset, name, &listing.sha);
        let names = listing.siblings.iter().map(|entry| entry.rfilename.as_str());
        let chosen: Vec<String> = choose(name, names, part, split)?.into_iter().map(str::to_owned).collect();
        let entries: BTreeMap<&str, &Entry> =
            listing.siblings.iter().map(|entry| (entry.rfilename.as_str(), entry)).collect();
        let entries: Vec<Entry> = chosen.iter().map(|name| entries[name.as_str()].clone()).collect();
        entries.iter().try_for_each(|entry| check(entry, u64::MAX))?;
        let missing = source.missing(entries);
        on(Step::Begin { num_files: missing.len(), num_bytes: source.bytes_left(&missing) });
        for entry in &missing {
            self.file(&source, entry, &mut |bytes| on(Step::Bytes(bytes)))?;
        }
        // A process that writes the record at the same time may overwrite this entry. The hub is then queried once more.
        let record = record_of(&Kind::Dataset.folder(&self.options.cache, name), &source.snapshot);
        let mut splits = recorded(&record);
        splits.insert(key(part, split), chosen.clone());
        place_file(&record, |file| Ok(serde_json::to_writer(file, &splits)?))?;
        source.refer(revision)?;
        Ok(chosen.iter().map(|file| source.snapshot.join(file)).collect())
    }
}

/// Selects the files of a split, in order.
fn choose<'a>(
    name: &str,
    files: impl Iterator<Item = &'a str>,
    part: Option<&str>,
    split: &str,
) -> Result<Vec<&'a str>, FetchError> {
    let mut splits: BTreeMap<(String, &str), Vec<&str>> = BTreeMap::new();
    for file in files.filter(|file| file.ends_with(".parquet")) {
        splits.entry(place(file)).or_default().push(file);
    }
    let parts: BTreeSet<&str> =
        splits.keys().filter(|(_, of)| *of == split).map(|(part, _)| part.as_str()).collect();
    let part = match part {
        Some(part) => Some(part),
        None if parts.contains("default") => Some("default"),
        None => parts.first().copied().filter(|_| parts.len() == 1),
    };
    let found = part.and_then(|part| splits.get(&(part.to_owned(), split)));
    let mut files = found.cloned().ok_or_else(|| FetchError::NoSplit {
        name: name.to_owned(),
        wanted: part.map_or_else(|| split.to_owned(), |part| format!("{part}/{split}")),
        found: splits.keys().map(|(part, split)| format!("{part}/{split}")).collect::<Vec<_>>().join(", "),
    })?;
    files.sort_unstable();
    Ok(files)
}

/// Returns the part and the split of a table file.
fn place(file: &str) -> (String, &str) {
    const SPLITS: [&str; 6] = ["train", "validation", "test", "val", "valid", "dev"];
    let stem = file.trim_end_matches(".parquet");
    let (folder, stem) = stem.rsplit_once('/').unwrap_or(("", stem));
    let all_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (folder, split) = match of_total(stem) {
        Some((split, _)) => (folder, split),
        None if all_digits(stem) && !folder.is_empty() => folder.rsplit_once('/').unwrap_or(("", folder)),
        None if SPLITS.contains(&stem) => (folder, stem),
        // A file without a split in its name belongs to `train`.
        None => (folder, "train"),
    };
    let part = if matches!(folder, "" | "data") { "default" } else { folder };
    (part.to_owned(), split)
}

/// Parses the split and the number of files from a name such as `train-00000-of-00002`, which may end in `-` and a hash.
fn of_total(stem: &str) -> Option<(&str, usize)> {
    let (before, after) = stem.rsplit_once("-of-")?;
    let (split, _) = before.rsplit_once('-').filter(|(_, at)| at.parse::<usize>().is_ok())?;
    let total = after.split('-').next()?.parse().ok()?;
    Some((split, total))
}

/// Reports whether the files of a split, sorted by name, are complete according to their names.
fn is_whole(files: &[&str]) -> bool {
    let stem = |file: &str| file.trim_end_matches(".parquet").rsplit('/').next().unwrap_or("").to_owned();
    let stems: Vec<String> = files.iter().map(|file| stem(file)).collect();
    let number =
        |stem: &str| stem.bytes().all(|byte| byte.is_ascii_digit()).then(|| stem.parse::<usize>().ok());
    !stems.is_empty()
        && stems.iter().enumerate().all(|(at, stem)| match (of_total(stem), number(stem)) {
            (Some((_, total)), _) => files.len() == total,
            // Names numbered from 0 do not show whether the last file is missing.
            (None, Some(number)) => number == Some(at),
            (None, None) => true,
        })
}

#[cfg(test)]
mod tests {
    use super::super::HubOptions;
    use super::*;
    use omnigrpo_testkit::hub::StandIn;

    #[test]
    fn names_of_files_tell_part_and_split() {
        for (file, part, split) in [
            ("data/train-00000-of-00002.parquet", "default", "train"),
            ("data/test-00000-of-00001-b21158d3bd5fb2ba.parquet", "default", "test"),
            ("hard/my-split-00001-of-00002.parquet", "hard", "my-split"),
            ("en/validation/0001.parquet", "en", "validation"),
            ("default/partial-train/0000.parquet", "default", "partial-train"),
            ("test.parquet", "default", "test"),
            ("0000.parquet", "default", "train"),
            ("rows.parquet", "default", "train"),
        ] {
            assert_eq!(place(file), (part.to_owned(), split), "{file}");
        }
    }

    #[test]
    fn a_split_is_one_part_of_it_or_an_error_that_lists_them() {
        let two = ["a/train-00000-of-00001.parquet", "b/train-00000-of-00001.parquet", "b/test/0000.parquet"];
        let chosen = |part, split| choose("me/set", two.into_iter(), part, split);
        assert_eq!(chosen(Some("b"), "train").unwrap(), [two[1]]);
        assert_eq!(chosen(None, "test").unwrap(), [two[2]]);
        for (part, split) in [(None, "train"), (Some("a"), "test"), (None, "dev")] {
            let error = chosen(part, split).unwrap_err().to_string();
            assert!(error.contains("a/train, b/test, b/train"), "{error}");
        }
        let default = ["x/train-00000-of-00001.parquet", "data/train-00000-of-00001.parquet"];
        assert_eq!(choose("me/set", default.into_iter(), None, "train").unwrap(), [default[1]]);
    }

    #[test]
    fn a_split_is_fetched_once_into_the_cache_of_datasets() {
        let folder = tempfile::tempdir().unwrap();
        let hub = StandIn::start();
        let table = |byte: u8| vec![byte; 1000];
        hub.hold(
            "datasets/me/set",
            &[
                ("data/train-00000-of-00002.parquet", &table(0)),
                ("data/train-00001-of-00002.parquet", &table(1)),
                ("data/test-00000-of-00001.parquet", &table(2)),
                ("README.md", b"x"),
            ],
        );
        let client = |token: Option<&str>| {
            let (endpoint, token) = (hub.endpoint(), token.map(str::to_owned));
            Hub::new(HubOptions { endpoint, token, cache: folder.path().to_owned() })
        };
        let mut steps = Vec::new();
        assert_eq!(cached_dataset(folder.path(), "me/set", None, "train", true), None);
        let files = client(Some(StandIn::TOKEN))
            .dataset("me/set", None, "train", &mut |step| steps.push(step))
            .unwrap();
        assert_eq!(steps[0], Step::Begin { num_files: 2, num_bytes: 2000 });
        let bytes: Vec<Vec<u8>> = files.iter().map(|file| std::fs::read(file).unwrap()).collect();
        assert_eq!(bytes, [table(0), table(1)]);
        assert!(files[0].starts_with(folder.path().join("datasets--me--set/snapshots")));
        assert_eq!(cached_dataset(folder.path(), "me/set", None, "train", false), Some(files.clone()));
        assert_eq!(cached_dataset(folder.path(), "me/set", None, "test", true), None, "it was not fetched");
        // A split with a missing file does not count as complete.
        std::fs::remove_file(&files[1]).unwrap();
        assert_eq!(cached_dataset(folder.path(), "me/set", None, "train", true), None);

        let error = |name: &str, split: &str| {
            client(Some(StandIn::TOKEN)).dataset(name, None, split, &mut |_| {}).unwrap_err().to_string()
        };
        assert!(error("me/set", "dev").contains("default/test, default/train"));
        assert!(error("me/none", "train").contains("has no dataset `me/none`"));
        hub.hold("datasets/me/lines", &[("rows.jsonl", b"{}")]);
        assert!(error("me/lines", "train").contains("no parquet tables (its files: rows.jsonl)"));
    }

    #[test]
    fn tables_that_the_hub_made_are_found_where_it_keeps_them() {
        let folder = tempfile::tempdir().unwrap();
        let hub = StandIn::start();
        hub.hold("datasets/me/lines", &[("rows.jsonl", b"{}")]);
        hub.hold(
            "datasets/me/lines@refs/convert/parquet",
            &[("default/train/0000.parquet", b"one"), ("default/train/0001.parquet", b"two")],
        );
        let options = HubOptions { endpoint: hub.endpoint(), token: None, cache: folder.path().to_owned() };
        let files = Hub::new(options).dataset("me/lines", None, "train", &mut |_| {}).unwrap();
        assert_eq!(std::fs::read(&files[1]).unwrap(), b"two");
        assert_eq!(cached_dataset(folder.path(), "me/lines", None, "train", false), Some(files.clone()));
        std::fs::remove_file(&files[0]).unwrap();
        assert_eq!(cached_dataset(folder.path(), "me/lines", None, "train", true), None);
    }

    #[test]
    fn what_another_program_left_is_compared_with_the_hub() {
        let hub = StandIn::start();
        let held: [(&str, &[u8]); 4] = [
            ("en/train/0000.parquet", b"zero"),
            ("en/train/0001.parquet", b"one"),
            ("en/train/0002.parquet", b"two"),
            ("fr/train/0000.parquet", b"fr"),
        ];
        hub.hold("datasets/me/set", &held);
        let options =
            |cache: &Path| HubOptions { endpoint: hub.endpoint(), token: None, cache: cache.to_owned() };
        // Leaves only these files in the cache, without a record of requests.
        let left = |kept: &[usize]| {
            let folder = tempfile::tempdir().unwrap();
            let hub = Hub::new(options(folder.path()));
            let mut files = hub.dataset("me/set", Some("en"), "train", &mut |_| {}).unwrap();
            files.extend(hub.dataset("me/set", Some("fr"), "train", &mut |_| {}).unwrap());
            let repo = Kind::Dataset.folder(folder.path(), "me/set");
            std::fs::remove_dir_all(repo.join("splits")).unwrap();
            for (_, file) in files.iter().enumerate().filter(|(at, _)| !kept.contains(at)) {
                std::fs::remove_file(file).unwrap();
            }
            folder
        };
        let cached = |folder: &tempfile::TempDir, part, by_names| {
            cached_dataset(folder.path(), "me/set", part, "train", by_names).map(|files| files.len())
        };
        for (kept, by_names) in [(&[0][..], Some(1)), (&[0, 2], None), (&[1, 2], None), (&[0, 1, 2], Some(3))]
        {
            let folder = left(kept);
            assert_eq!(cached(&folder, Some("en"), true), by_names, "{kept:?}");
            // A caller that can contact the hub does so, and fetches the missing files.
            assert_eq!(cached(&folder, Some("en"), false), None, "{kept:?}");
            let mut steps = Vec::new();
            let files = Hub::new(options(folder.path()))
                .dataset("me/set", Some("en"), "train", &mut |step| steps.push(step))
                .unwrap();
            assert_eq!(files.len(), 3);
            assert!(matches!(steps[0], Step::Begin { num_files, .. } if num_files == 3 - kept.len()));
            assert_eq!(cached(&folder, Some("en"), false), Some(3));
            // The cache has one part, but the hub has two.
            assert_eq!((cached(&folder, None, true), cached(&folder, None, false)), (None, None));
            let error = Hub::new(options(folder.path())).dataset("me/set", None, "train", &mut |_| {});
            assert!(error.unwrap_err().to_string().contains("en/train, fr/train"));
        }
    }
}
