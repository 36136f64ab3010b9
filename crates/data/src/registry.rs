//! Selection of the files of a dataset: named entries of a registry file, lists of files with a sampling strategy, or plain
//! files.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use omnigrpo_guard::inside;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::DataError;
use crate::formats::Format;
use crate::roots::Roots;
use crate::sample::Think;
use crate::sampling::{Amount, Sampling, is_percent};

/// Maximum size of a registry or list file, bytes.
const MAX_REGISTRY_BYTES: u64 = 16 << 20;

/// One dataset of a run.
#[derive(Debug, Clone)]
pub struct DatasetSpec {
    /// Name of the dataset; by default the stem of the file.
    pub name: String,
    /// Annotation file: `.json`, `.jsonl` or `.parquet`.
    pub file: PathBuf,
    /// Folders of its media.
    pub roots: Roots,
    /// Selection of its rows.
    pub sampling: Sampling,
    /// Think mode of the completions. `None`: they are expected to think, unless the name contains `no_think`.
    pub think: Option<Think>,
    /// Format of the rows. `None`: detected for each row.
    pub format: Option<&'static Format>,
    /// Default columns for rows that lack them, such as `reward_method`.
    pub columns: Map<String, Value>,
}

impl DatasetSpec {
    /// Creates a spec for a whole file, named after its stem. Relative paths of media start in the file's folder.
    pub fn file(file: impl Into<PathBuf>) -> Self {
        let (file, roots) = (file.into(), Roots::default());
        let name = file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        Self { name, file, roots, sampling: Sampling::All, think: None, format: None, columns: Map::new() }
    }

    /// Sets the folders of the media.
    #[must_use]
    pub fn with_roots(self, roots: Roots) -> Self {
        Self { roots, ..self }
    }

    /// Returns the specs of individually named files. If there are as many roots as files, each file gets the root at its
    /// position; otherwise every root applies to every file. A `.yaml` file is a list `datasets: [{json_path, sampling_strategy,
    /// data_path}]` (VLM-R1), with paths relative to it.
    ///
    /// # Errors
    /// Returns an error if a list cannot be read or has unknown keys.
    pub fn from_files(files: &[PathBuf], roots: &Roots) -> Result<Vec<Self>, DataError> {
        Ok(Self::from_each(files, roots)?.into_iter().flatten().collect())
    }

    /// Returns the specs as [`DatasetSpec::from_files`] does, grouped by file.
    ///
    /// # Errors
    /// Returns an error if a list cannot be read or has unknown keys.
    pub fn from_each(files: &[PathBuf], roots: &Roots) -> Result<Vec<Vec<Self>>, DataError> {
        let specs = files.iter().enumerate().map(|(index, file)| {
            let roots = roots.of_file(index, files.len());
            if is_yaml(file) { from_list(file, &roots) } else { Ok(vec![Self::file(file).with_roots(roots)]) }
        });
        specs.collect()
    }

    /// Returns the explicit think mode, or the one that the name implies.
    pub(crate) fn think_mode(&self) -> Think {
        let by_name = if self.name.to_lowercase().contains("no_think") { Think::Off } else { Think::On };
        self.think.unwrap_or(by_name)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    datasets: Vec<ListEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListEntry {
    json_path: PathBuf,
    sampling_strategy: Option<String>,
    data_path: Option<PathBuf>,
}

fn from_list(path: &Path, roots: &Roots) -> Result<Vec<DatasetSpec>, DataError> {
    let list: List = read(path)?;
    let entries = list.datasets.into_iter().map(|entry| {
        let roots = entry.data_path.map_or_else(|| roots.clone(), |folder| Roots::all(beside(path, folder)));
        let sampling = entry.sampling_strategy.as_deref().map_or(Ok(Sampling::All), Sampling::parse)?;
        Ok(DatasetSpec { sampling, ..DatasetSpec::file(beside(path, entry.json_path)).with_roots(roots) })
    });
    entries.collect()
}

/// File of named datasets (YAML or JSON):
///
/// ```yaml
/// assembly_no_think:                   # contains no_think: completions are expected without <think>
///   annotation_path: assembly.json     # relative to this file
///   data_path: videos                  # root of media paths; default: the annotation's folder
///   sampling_strategy: random:50%      # all | first:N | end:N | random:N, N may be p%
///   think: true                        # overrides the mode implied by the name
///   format: conversations              # default: detected for each row
///   columns: { reward_method: mcq }    # for rows without such a column
/// ```
#[derive(Debug)]
pub struct Registry {
    path: PathBuf,
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    annotation_path: PathBuf,
    data_path: Option<PathBuf>,
    sampling_strategy: Option<String>,
    think: Option<bool>,
    format: Option<String>,
    #[serde(default)]
    columns: Map<String, Value>,
}

impl Registry {
    /// Reads a registry file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or has unknown keys or wrong values.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        Ok(Self { path: path.to_owned(), entries: read(path)? })
    }

    /// Returns all names.
    pub fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.entries.keys().map(String::as_str)
    }

    /// Returns the datasets named in a text: names separated by commas. A name may be followed by `%p` for a random share of its
    /// rows. The share is a whole number of percent, rounded down to rows, and takes precedence over the entry's
    /// `sampling_strategy`. Entries without `data_path` use the `fallback` roots.
    ///
    /// # Errors
    /// Returns an error if a name is unknown (with a suggestion), a share is invalid, or an entry has wrong values.
    pub fn select(&self, dataset_use: &str, fallback: &Roots) -> Result<Vec<DatasetSpec>, DataError> {
        let parts: Vec<_> = dataset_use.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
        if parts.is_empty() {
            return Err(DataError::Setting {
                setting: "dataset_use",
                got: dataset_use.to_owned(),
                expected: "names of the registry, separated by commas",
            });
        }
        parts.into_iter().map(|part| self.select_one(part, fallback)).collect()
    }

    fn select_one(&self, part: &str, fallback: &Roots) -> Result<DatasetSpec, DataError> {
        // A name may contain a `%`. Only digits after the last `%` are a share.
        let share = part
            .rsplit_once('%')
            .filter(|(_, digits)| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()));
        let (name, percent) = match share {
            Some((name, digits)) => (name, digits.parse::<f64>().ok()),
            None => (part, None),
        };
        if percent.is_some_and(|percent| !is_percent(percent)) {
            return Err(DataError::Setting {
                setting: "dataset_use",
                got: part.to_owned(),
                expected: "name%p with 1 ≤ p ≤ 100",
            });
        }
        let entry = self
            .entries
            .get(name)
            .ok_or_else(|| DataError::unknown_name("dataset", name, self.names()))?
            .clone();
        let sampling = match (percent, entry.sampling_strategy.as_deref()) {
            (Some(percent), _) => Sampling::Random(Amount::PercentDown(percent)),
            (None, Some(text)) => Sampling::parse(text)?,
            (None, None) => Sampling::All,
        };
        Ok(DatasetSpec {
            name: name.to_owned(),
            file: beside(&self.path, entry.annotation_path),
            roots: entry
                .data_path
                .map_or_else(|| fallback.clone(), |folder| Roots::all(beside(&self.path, folder))),
            sampling,
            think: entry.think.map(|think| if think { Think::On } else { Think::Off }),
            format: entry.format.as_deref().map(Format::named).transpose()?,
            columns: entry.columns,
        })
    }
}

fn beside(file: &Path, path: PathBuf) -> PathBuf {
    match file.parent() {
        Some(folder) if path.is_relative() => folder.join(path),
        _ => path,
    }
}

pub(crate) fn is_yaml(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T, DataError> {
    let text = inside::read_named(path, MAX_REGISTRY_BYTES).map_err(|source| match source.kind() {
        ErrorKind::FileTooLarge => DataError::RegistryTooLarge { path: path.to_owned(), source },
        _ => DataError::io("read", path)(source),
    })?;
    if is_yaml(path) {
        serde_saphyr::from_str(&text)
            .map_err(|error| DataError::Registry { path: path.to_owned(), source: error.into() })
    } else {
        serde_json::from_str(&text)
            .map_err(|error| DataError::Registry { path: path.to_owned(), source: error.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGISTRY: &str = "
assy07_grpo:
  annotation_path: ann/assy07.json
  data_path: videos
assy07_grpo_no_think:
  annotation_path: /abs/no_think.jsonl
  sampling_strategy: first:10
  format: conversations
  columns: {reward_method: mcq_iou}
forced_no_think:
  annotation_path: x.json
  think: true
";

    fn registry(text: &str, name: &str) -> Result<(tempfile::TempDir, Registry), DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        Registry::open(&path).map(|registry| (folder, registry))
    }

    #[test]
    fn names_shares_think_and_paths() {
        let (folder, registry) = registry(REGISTRY, "registry.yaml").unwrap();
        let fallback = Roots::all("media");
        let specs =
            registry.select("assy07_grpo%50, assy07_grpo_no_think,forced_no_think", &fallback).unwrap();
        assert_eq!(specs[0].sampling, Sampling::Random(Amount::PercentDown(50.0)));
        assert_eq!(specs[0].file, folder.path().join("ann/assy07.json"));
        assert_eq!(specs[0].roots, Roots::all(folder.path().join("videos")));
        assert_eq!(specs[1].file, PathBuf::from("/abs/no_think.jsonl"));
        assert_eq!(specs[1].roots, fallback);
        assert_eq!(specs[1].sampling, Sampling::First(Amount::Rows(10)));
        assert_eq!(specs[1].format.map(|format| format.name), Some("conversations"));
        assert_eq!(specs[1].columns["reward_method"], "mcq_iou");
        // The mode is decided for each entry, not for the whole list.
        let modes: Vec<_> = specs.iter().map(DatasetSpec::think_mode).collect();
        assert_eq!(modes, [Think::On, Think::Off, Think::On]);
    }

    #[test]
    fn wrong_names_and_shares_are_errors() {
        let (_folder, registry) = registry(REGISTRY, "registry.yaml").unwrap();
        let select = |text: &str| registry.select(text, &Roots::default()).unwrap_err().to_string();
        let message = select("assy07_grop");
        assert!(message.contains("did you mean `assy07_grpo`?"), "{message}");
        assert!(!select("something_else_entirely").contains("did you mean"));
        for text in ["assy07_grpo%0", "assy07_grpo%101", "", " , "] {
            assert!(select(text).starts_with("dataset_use"), "{text}");
        }
        // A `%` without digits is part of the name.
        assert!(select("assy07_grpo%x").contains("unknown dataset"));
    }

    #[test]
    fn json_registries_and_unknown_keys() {
        let (_folder, json) =
            registry(r#"{"a": {"annotation_path": "a.json", "think": false}}"#, "r.json").unwrap();
        assert_eq!(json.select("a", &Roots::default()).unwrap()[0].think_mode(), Think::Off);
        let error =
            omnigrpo_guard::told(&registry("a: {annotation_path: x, dat_path: y}", "r.yaml").unwrap_err());
        assert!(error.contains("dat_path"), "{error}");
        let (_folder, bad) = registry("a: {annotation_path: x, format: llava}", "r.yaml").unwrap();
        assert!(
            bad.select("a", &Roots::default())
                .unwrap_err()
                .to_string()
                .contains("unknown dataset format `llava`")
        );
    }

    #[test]
    fn lists_name_files_and_strategies() {
        let folder = tempfile::tempdir().unwrap();
        let list = folder.path().join("list.yaml");
        std::fs::write(&list, "datasets:\n  - json_path: a.json\n    sampling_strategy: random:20%\n  - json_path: b.jsonl\n    data_path: pics\n").unwrap();
        let roots = Roots { images: vec!["one".into(), "two".into()], ..Roots::default() };
        let specs = DatasetSpec::from_files(&["c.json".into(), list], &roots).unwrap();
        let names: Vec<_> = specs.iter().map(|spec| spec.name.as_str()).collect();
        assert_eq!(names, ["c", "a", "b"]);
        assert_eq!(specs[0].roots.images, [PathBuf::from("one")]);
        assert_eq!(specs[1].roots.images, [PathBuf::from("two")]);
        assert_eq!(specs[1].sampling, Sampling::Random(Amount::PercentUp(20.0)));
        assert_eq!(specs[2].roots, Roots::all(folder.path().join("pics")));
    }
}
