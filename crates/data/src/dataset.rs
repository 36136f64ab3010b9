//! Dataset: one list of rows over several annotation files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use omnigrpo_guard::Setting;
use omnigrpo_text::MediumKind;
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::error::{AUDIO, DataError, IMAGE, PROMPT, RowError, RowProblem, SOLUTION, VIDEO};
use crate::formats::outputs::{self, RECORDED};
use crate::formats::{self, Context, Format, Unread};
use crate::question::{QUESTION_TEMPLATES, QuestionTemplate};
use crate::registry::{DatasetSpec, is_yaml};
use crate::roots::Resolver;
use crate::rows::RowFile;
use crate::sample::{MediumSource, Sample, Think};
use crate::tables;

/// Maximum number of rows whose media go into [`Dataset::media_digest`].
const SAMPLED_ROWS: u64 = 4096;
/// Number of bytes read at each end of a medium for [`Dataset::media_digest`].
const SAMPLED_BYTES: u64 = 4096;

/// Options for reading rows, shared by all datasets of a run.
#[derive(Debug, Clone)]
pub struct ReadOptions {
    /// Template of the wording around the last question.
    pub template: &'static QuestionTemplate,
    /// Think mode for all datasets, instead of the mode of each dataset.
    pub think: Option<Think>,
    /// Function that fetches media named by an `http(s)` address. `None`: such media are not allowed.
    pub fetch: Option<Fetch>,
    /// Cache folder for unpacked tables with their media and for `data:` media embedded in rows. `None`: tables and `data:` media
    /// are errors.
    pub cache_dir: Option<PathBuf>,
    /// Flag that keeps a row readable if one of its media is not found or not fetched. It serves callers that only read the text.
    pub missing_media: bool,
    /// Seed of the random sampling strategies.
    pub seed: u64,
    /// Flag that adds the soundtrack of each video file as an audio medium after the video, in rows that name no sound.
    pub use_audio_in_video: bool,
    /// Flag that accepts a row without a question, for an environment that asks.
    pub empty_questions: bool,
    /// Flag that gives a `prompt` that is a text to the model as it stands ([`Sample::is_text`]).
    pub continue_text_prompts: bool,
    /// Column names that replace the ones the formats expect.
    pub columns: ColumnNames,
    /// Question of rows that have none, such as those of a table of pictures and labels.
    pub question: Option<String>,
}

/// Function that maps the address of a medium to a local file with its content, or returns an error. It is called repeatedly for
/// the same address, from several threads.
#[derive(Clone)]
pub struct Fetch(pub Arc<FetchFn>);

type FetchFn = dyn Fn(&str) -> Result<PathBuf, Box<dyn std::error::Error + Send + Sync>> + Send + Sync;

impl std::fmt::Debug for Fetch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fetch")
    }
}

/// Column names given by the user in place of those a format expects. A name with dots refers to a nested value, such as
/// `reward_model.ground_truth`.
#[derive(Debug, Clone, Default)]
pub struct ColumnNames {
    /// Column of the prompt: a text or a list of messages. Naming it also determines the row's format.
    pub prompt: Option<String>,
    /// Column of the ground truth. If it is set, no other column and no final turn serves as the ground truth.
    pub solution: Option<String>,
    /// Column of the images.
    pub image: Option<String>,
    /// Column of the videos. If it is also the column of another kind, the extension of each entry tells its kind.
    pub video: Option<String>,
    /// Column of the sounds.
    pub audio: Option<String>,
}

impl ColumnNames {
    /// Returns the setting and the column name of each column that is set.
    fn named(&self) -> impl Iterator<Item = (Setting, &str)> {
        let all = [
            (PROMPT, &self.prompt),
            (SOLUTION, &self.solution),
            (IMAGE, &self.image),
            (VIDEO, &self.video),
            (AUDIO, &self.audio),
        ];
        all.into_iter().filter_map(|(setting, name)| Some((setting, name.as_deref()?)))
    }

    /// Returns the column name of the media of a kind, if it is set.
    pub(crate) fn of(&self, kind: MediumKind) -> Option<&str> {
        match kind {
            MediumKind::Image => self.image.as_deref(),
            MediumKind::Video => self.video.as_deref(),
            MediumKind::Audio => self.audio.as_deref(),
        }
    }

    /// Returns the setting that names the column of the media of a kind.
    pub(crate) fn setting(kind: MediumKind) -> Setting {
        match kind {
            MediumKind::Image => IMAGE,
            MediumKind::Video => VIDEO,
            MediumKind::Audio => AUDIO,
        }
    }
}

impl Default for ReadOptions {
    /// Returns options that change no wording: think mode from the dataset, no URLs, seed 0, no sound from videos.
    fn default() -> Self {
        Self {
            template: &QUESTION_TEMPLATES[0],
            think: None,
            fetch: None,
            cache_dir: None,
            missing_media: false,
            seed: 0,
            use_audio_in_video: false,
            empty_questions: false,
            continue_text_prompts: false,
            columns: ColumnNames::default(),
            question: None,
        }
    }
}

/// A column that no reader uses and that looks like media.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnreadMedia {
    /// Name of the column, with dots into objects.
    pub column: String,
    /// Kind of the media.
    pub kind: MediumKind,
    /// Setting that reads the column if it has this name.
    pub setting: Setting,
    /// Number of sampled rows in which the column looks like media.
    pub rows: u64,
    /// Number of these rows without another medium of this kind; for pictures, also without a clip.
    pub lost: u64,
    /// Number of sampled rows.
    pub sampled: u64,
}

impl UnreadMedia {
    /// Returns true if at least one of ten sampled rows loses its media.
    pub fn is_usual(&self) -> bool {
        10 * self.lost >= self.sampled
    }
}

/// Maximum number of rows searched for columns that look like media.
const LOOKED_AT_FOR_MEDIA: u64 = 256;

/// Number of rows searched for column names.
const LOOKED_AT: u64 = 1000;

/// Rows of one or several datasets, read on demand. The index takes 24 bytes of memory per row.
///
/// Rows are numbered `0..len` in the order of the specs and files, after sampling. The same files, settings and seed give the
/// same numbers.
pub struct Dataset {
    parts: Vec<DatasetPart>,
    template: &'static QuestionTemplate,
    use_audio_in_video: bool,
    empty_questions: bool,
    continue_text_prompts: bool,
    names: ColumnNames,
    question: Option<String>,
}

struct DatasetPart {
    name: Arc<str>,
    file: RowFile,
    /// Selected rows of the file, ascending; `None` for all rows.
    chosen: Option<Vec<u64>>,
    /// Number of rows in all earlier parts.
    start: u64,
    resolver: Resolver,
    think: Think,
    format: Option<&'static Format>,
    columns: Map<String, Value>,
}

/// Returns the path of the unpacked rows if `path` is a table, and `None` if it is not.
fn unpacked(path: &Path, options: &ReadOptions) -> Result<Option<PathBuf>, DataError> {
    let mut start = [0; 4];
    // Peeking into a pipe would lose its first bytes. An error on opening is reported when the rows are read.
    let is_table = path.is_file()
        && File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok()
        && &start == b"PAR1";
    if !is_table {
        return Ok(None);
    }
    #[cfg(feature = "parquet")]
    if let Some(cache_dir) = &options.cache_dir {
        return crate::parquet::unpack(path, cache_dir).map(Some);
    }
    let why = if cfg!(feature = "parquet") && options.cache_dir.is_none() {
        "no cache folder to unpack it into"
    } else {
        "a program built without the feature parquet"
    };
    Err(DataError::UnknownFile { path: path.to_owned(), got: format!("a parquet table and {why}") })
}

/// Reader of rows that are in no file: JSON objects with the same columns as rows of files.
///
/// ```
/// use omnigrpo_data::RowReader;
/// use serde_json::json;
///
/// let sums = (0..100).map(|n| json!({ "prompt": format!("What is {n} + 1?"), "solution": format!("{}", n + 1) }));
/// let rows = RowReader::new("sums").dataset(sums)?;
/// assert_eq!(rows.len(), 100);
/// # Ok::<(), omnigrpo_data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct RowReader {
    name: String,
    folder: PathBuf,
    options: ReadOptions,
}

impl RowReader {
    /// Creates a reader for rows of a dataset with this name. Relative paths of media start in the working directory.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), folder: ".".into(), options: ReadOptions::default() }
    }

    /// Resolves relative paths of media against a folder; absolute ones are used unchanged.
    #[must_use]
    pub fn media_in(self, folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), ..self }
    }

    /// Sets the options for reading rows.
    #[must_use]
    pub fn options(self, options: ReadOptions) -> Self {
        Self { options, ..self }
    }

    fn spec(&self) -> DatasetSpec {
        DatasetSpec { name: self.name.clone(), ..DatasetSpec::file(self.folder.join(&self.name)) }
    }

    /// Parses one row. Its number is 0.
    ///
    /// # Errors
    /// Returns an error if the row cannot be used, as for a row of a file, or if the folder cannot be read.
    pub fn sample(&self, row: Value) -> Result<Sample, RowProblem> {
        let (spec, options) = (self.spec(), &self.options);
        let file: Arc<Path> = spec.file.as_path().into();
        let context = Context {
            dataset: &spec.name.as_str().into(),
            file: &file,
            resolver: &Resolver::in_folder(&self.folder, options)?,
            format: None,
            template: options.template,
            think: options.think.unwrap_or_else(|| spec.think_mode()),
            columns: &spec.columns,
            names: &options.columns,
            question: options.question.as_deref(),
            use_audio_in_video: options.use_audio_in_video,
            empty_questions: options.empty_questions,
            continue_text_prompts: options.continue_text_prompts,
        };
        formats::sample(row, 0, 1, &context)
    }

    /// Builds a dataset. The rows are stored in an unnamed file in the system's temporary folder, so they may exceed the size of
    /// memory.
    ///
    /// # Errors
    /// Returns an error if the folder or the temporary file cannot be used, or if there is no row.
    pub fn dataset(&self, rows: impl IntoIterator<Item = Value>) -> Result<Dataset, DataError> {
        let (spec, options) = (self.spec(), &self.options);
        let resolver =
            Resolver::in_folder(&self.folder, options).map_err(DataError::io("find", &self.folder))?;
        let part = DatasetPart {
            name: spec.name.as_str().into(),
            chosen: None,
            start: 0,
            resolver,
            think: options.think.unwrap_or_else(|| spec.think_mode()),
            format: None,
            columns: Map::new(),
            file: RowFile::of(rows, Path::new(&self.name))?,
        };
        Dataset::of_parts(vec![part], options)
    }
}

impl DatasetPart {
    /// Adds everything that determines the rows to a hash.
    fn feed(&self, hash: &mut Sha256) -> Result<(), DataError> {
        // The words of version 0.2.0, whose checkpoints store the digest.
        let think = match self.think {
            Think::On => "On",
            Think::Off => "Off",
        };
        let said = json!([&*self.name, self.file.len(), think, self.columns]);
        hash.update(said.to_string());
        self.file.feed(&mut |bytes| hash.update(bytes))?;
        self.chosen.iter().flatten().for_each(|&row| hash.update(row.to_le_bytes()));
        Ok(())
    }

    fn len(&self) -> u64 {
        self.chosen.as_ref().map_or(self.file.len(), |rows| rows.len() as u64)
    }

    fn columns_seen(&self) -> Vec<String> {
        let mut seen: Vec<String> = self.columns.keys().cloned().collect();
        for row in 0..self.file.len().min(LOOKED_AT) {
            // An unreadable row is reported when it is used.
            let Ok(Value::Object(columns)) = self.file.value(row) else { continue };
            let columns = outputs::unfold(columns);
            for name in columns.into_iter().map(|(name, _)| name) {
                if !seen.contains(&name) && seen.len() < 1000 {
                    seen.push(name);
                }
            }
        }
        seen
    }
}

impl Dataset {
    /// Indexes the files of all specs.
    ///
    /// # Errors
    /// Returns an error if a file or root cannot be read, if a file is not a dataset, or if all files together have no row.
    pub fn open(specs: &[DatasetSpec], options: &ReadOptions) -> Result<Self, DataError> {
        let mut parts = Vec::with_capacity(specs.len());
        let mut start = 0;
        for (number, spec) in specs.iter().enumerate() {
            if is_yaml(&spec.file) {
                let got = "a YAML file instead of an annotation file".to_owned();
                return Err(DataError::UnknownFile { path: spec.file.clone(), got });
            }
            let file = match unpacked(&spec.file, options)? {
                Some(rows) => RowFile::open(&rows)?.named(&spec.file),
                None if spec.file.is_dir() => tables::open_folder(&spec.file)?,
                None => tables::open(&spec.file)?.map_or_else(|| RowFile::open(&spec.file), Ok)?,
            };
            let part = DatasetPart {
                name: spec.name.as_str().into(),
                chosen: spec.sampling.rows(file.len(), options.seed, number as u64),
                start,
                resolver: Resolver::new(&spec.roots, file.folder(), options)?,
                think: options.think.unwrap_or_else(|| spec.think_mode()),
                format: spec.format,
                columns: spec.columns.clone(),
                file,
            };
            start += part.len();
            parts.push(part);
        }
        Self::of_parts(parts, options)
    }

    fn of_parts(parts: Vec<DatasetPart>, options: &ReadOptions) -> Result<Self, DataError> {
        if parts.iter().all(|part| part.len() == 0) {
            let files: Vec<_> = parts.iter().map(|part| part.file.path.display().to_string()).collect();
            let files = if files.is_empty() { "no file".to_owned() } else { files.join(", ") };
            return Err(DataError::Empty { files });
        }
        let dataset = Self {
            parts,
            template: options.template,
            use_audio_in_video: options.use_audio_in_video,
            empty_questions: options.empty_questions,
            continue_text_prompts: options.continue_text_prompts,
            names: options.columns.clone(),
            question: options.question.clone(),
        };
        dataset.check_names()?;
        Ok(dataset)
    }

    /// Checks that the columns named by the user exist; otherwise media or ground truths would be missing without notice. One of
    /// several datasets may lack such a column, except the prompt.
    fn check_names(&self) -> Result<(), DataError> {
        if self.names.named().next().is_none() {
            return Ok(());
        }
        let parts: Vec<_> = self.parts.iter().filter(|part| part.len() > 0).collect();
        let seen: Vec<_> = parts.iter().map(|part| part.columns_seen()).collect();
        for (column, name) in self.names.named() {
            let first = name.split('.').next().unwrap_or(name);
            let has = |seen: &Vec<String>| seen.iter().any(|column| column == name || column == first);
            let needed = self.names.prompt.as_deref() == Some(name) || !seen.iter().any(has);
            if let Some((part, seen)) = parts.iter().zip(&seen).find(|(_, seen)| needed && !has(seen)) {
                return Err(DataError::NoSuchColumn {
                    column,
                    name: name.to_owned(),
                    path: part.file.path.to_path_buf(),
                    seen: seen.join(", "),
                });
            }
        }
        Ok(())
    }

    /// Returns the columns of the first rows of each file, in order of appearance. Error messages list them when an expected
    /// column is missing.
    pub fn columns_seen(&self) -> Vec<String> {
        let mut seen = Vec::new();
        for name in self.parts.iter().flat_map(DatasetPart::columns_seen) {
            if !seen.contains(&name) {
                seen.push(name);
            }
        }
        seen
    }

    /// Returns the number of rows, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "an empty dataset is an error of `open`")]
    pub fn len(&self) -> u64 {
        self.parts.last().map_or(0, |part| part.start + part.len())
    }

    /// Returns the name and the number of rows of each dataset.
    pub fn parts(&self) -> impl Iterator<Item = (&str, u64)> {
        self.parts.iter().map(|part| (&*part.name, part.len()))
    }

    /// Returns the annotation file of each dataset.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().map(|part| &*part.file.path)
    }

    /// Reads and parses a row. Verifies that its media exist inside their roots, but does not open them.
    ///
    /// # Errors
    /// Returns an error if this row cannot be used. Other rows are not affected.
    pub fn get(&self, row: u64) -> Result<Sample, RowError> {
        let Some((part, in_file)) = self.locate(row) else {
            let problem = RowProblem::OutOfRange { len: self.len() };
            return Err(RowError { row, file: Path::new("").into(), line: 0, problem });
        };
        let line = part.file.line(in_file);
        part.file
            .value(in_file)
            .and_then(|value| formats::sample(value, row, line, &self.context(part)))
            .map_err(|problem| RowError { row, file: part.file.path.clone(), line, problem })
    }

    fn context<'a>(&'a self, part: &'a DatasetPart) -> Context<'a> {
        Context {
            dataset: &part.name,
            file: &part.file.path,
            resolver: &part.resolver,
            format: part.format,
            template: self.template,
            think: part.think,
            columns: &part.columns,
            names: &self.names,
            question: self.question.as_deref(),
            use_audio_in_video: self.use_audio_in_video,
            empty_questions: self.empty_questions,
            continue_text_prompts: self.continue_text_prompts,
        }
    }

    /// Returns the columns that no reader uses and that look like media, in up to 256 evenly spread rows. The names in
    /// [`ReadOptions::columns`] would read them.
    pub fn unread_media(&self) -> Vec<UnreadMedia> {
        let sampled = self.len().min(LOOKED_AT_FOR_MEDIA);
        let mut found: BTreeMap<(String, MediumKind), UnreadMedia> = BTreeMap::new();
        for row in (0..sampled).map(|at| at * self.len() / sampled) {
            let Some((part, in_file)) = self.locate(row) else { continue };
            // An unreadable row is reported when it is used.
            let Ok(row_value) = part.file.value(in_file) else { continue };
            let unread = formats::unread(row_value, &self.context(part));
            let read = if unread.is_empty() { None } else { self.get(row).ok() };
            for Unread { column, kind, setting } in unread {
                // A picture beside a clip is mostly a preview of it.
                let stands_in = |own| own == kind || (own, kind) == (MediumKind::Video, MediumKind::Image);
                let is_read =
                    read.iter().flat_map(|sample| &sample.media).any(|medium| stands_in(medium.kind));
                let new = || UnreadMedia { column: column.clone(), kind, setting, rows: 0, lost: 0, sampled };
                let one = found.entry((column.clone(), kind)).or_insert_with(new);
                one.rows += 1;
                one.lost += u64::from(!is_read);
            }
        }
        found.into_values().collect()
    }

    /// Returns true if there are usable rows and none of the rows has media, also not missing ones.
    pub fn is_text_only(&self) -> bool {
        let mut some = false;
        let is_text = |row| match self.get(row) {
            Ok(sample) => {
                some = true;
                sample.media.is_empty()
            }
            Err(error) => !matches!(error.problem, RowProblem::Medium { .. }),
        };
        (0..self.len()).all(is_text) && some
    }

    /// Records the folders of these media paths, so that a folder that disappears later is recognised as missing.
    pub(crate) fn remember_media<'a>(&self, paths: impl Iterator<Item = &'a Path>) {
        for path in paths {
            self.parts.iter().for_each(|part| part.resolver.remember(path));
        }
    }

    /// Checks that every row read so far, on any thread, had the same content as when its file was opened. A changed row is also
    /// reported as an error when it is read. This function reports that the dataset as a whole has changed.
    ///
    /// # Errors
    /// Returns [`DataError::Changed`] if a row differed.
    pub fn unchanged(&self) -> Result<(), DataError> {
        self.parts.iter().try_for_each(|part| part.file.unchanged())
    }

    /// Returns the id of a row: the row's own id, or `dataset:line`. It also works for unusable rows.
    pub fn id(&self, row: u64) -> String {
        let Some((part, in_file)) = self.locate(row) else { return format!("row {row}") };
        let value = part.file.value(in_file).ok();
        value
            .and_then(|value| formats::id(value.as_object()?))
            .unwrap_or_else(|| format!("{}:{}", part.name, part.file.line(in_file)))
    }

    /// Returns the columns of a sample of this dataset, ready for a file in any folder: media paths are absolute, and recorded
    /// completions and rewards are left out.
    pub fn portable_row(&self, sample: &Sample) -> Map<String, Value> {
        let mut columns = sample.columns.clone();
        if sample.completions.is_some() {
            RECORDED.iter().for_each(|name| drop(columns.shift_remove(*name)));
        }
        if let Some((part, _)) = self.locate(sample.row) {
            formats::make_absolute(&mut columns, &part.resolver, &self.names);
        }
        columns
    }

    /// Returns a digest that changes with the rows: the content of the files, the sampling, the order and the registry's entries.
    /// It does not depend on the location of the files. Checkpoints store it to detect a position that belongs to other data.
    ///
    /// # Errors
    /// Returns an error if a file can no longer be read.
    pub fn fingerprint(&self) -> Result<String, DataError> {
        let mut hash = Sha256::new();
        self.parts.iter().try_for_each(|part| part.feed(&mut hash))?;
        Ok(short(hash))
    }

    /// Returns the name, the number of rows and the digest of each of the datasets that make up this one.
    ///
    /// # Errors
    /// Returns an error if a file can no longer be read.
    pub fn fingerprints(&self) -> Result<Vec<(String, u64, String)>, DataError> {
        let of = |part: &DatasetPart| {
            let mut hash = Sha256::new();
            part.feed(&mut hash)?;
            Ok((part.name.to_string(), part.len(), short(hash)))
        };
        self.parts.iter().map(of).collect()
    }

    /// Returns a digest that changes with the media. For up to 4,096 evenly spread rows it covers the length of each medium and 4
    /// KiB at each end. Paths and times do not count, so a copy of the data has the same digest. Rows that contain an address are
    /// skipped, because their media would have to be fetched. It reads at most 32 MiB for rows with one medium each.
    pub fn media_digest(&self) -> String {
        let of_rows: Vec<Vec<u8>> = self.sampled_rows().map(|row| self.media_of(row)).collect();
        short(of_rows.into_iter().fold(Sha256::new(), |hash, media| hash.chain_update(media)))
    }

    /// Returns the columns beside the conversation that are part of prompts ([`Sample::joined`]) in up to 4,096 evenly spread rows.
    pub fn joined_columns(&self) -> BTreeSet<&'static str> {
        let of_rows = self.sampled_rows().filter_map(|row| self.get(row).ok());
        of_rows.flat_map_iter(|sample| sample.joined).collect()
    }

    /// Returns the numbers of up to 4,096 evenly spread rows.
    fn sampled_rows(&self) -> impl IndexedParallelIterator<Item = u64> {
        let (all, sampled) = (self.len(), self.len().min(SAMPLED_ROWS));
        let numbers: Vec<u64> =
            (0..sampled).map(|i| (u128::from(i) * u128::from(all) / u128::from(sampled)) as u64).collect();
        numbers.into_par_iter()
    }

    /// Returns the digest of a row's media, or nothing for a row that is skipped or cannot be used.
    fn media_of(&self, row: u64) -> Vec<u8> {
        let remote = |row: u64| {
            let (part, in_file) = self.locate(row)?;
            let text = part.file.read(in_file).ok()?;
            // JSON may escape the slashes.
            Some(
                [&b"://"[..], b":\\/\\/"]
                    .iter()
                    .any(|sign| text.windows(sign.len()).any(|part| part == *sign)),
            )
        };
        let Some(sample) = remote(row).filter(|remote| !remote).and_then(|_| self.get(row).ok()) else {
            return Vec::new();
        };
        let mut hash = Sha256::new();
        for medium in &sample.media {
            match &medium.source {
                MediumSource::Path(path) if path.is_dir() => {
                    let mut names: Vec<_> =
                        std::fs::read_dir(path).into_iter().flatten().flatten().map(|f| f.path()).collect();
                    names.sort();
                    hash.update((names.len() as u64).to_le_bytes());
                    names.first().into_iter().chain(names.last()).for_each(|path| ends(path, &mut hash));
                }
                MediumSource::Path(path) => ends(path, &mut hash),
                MediumSource::Frames(paths) => {
                    paths.first().into_iter().chain(paths.last()).for_each(|path| ends(path, &mut hash));
                }
            }
        }
        hash.finalize().to_vec()
    }

    fn locate(&self, row: u64) -> Option<(&DatasetPart, u64)> {
        let after = self.parts.partition_point(|part| part.start <= row);
        let part = self.parts.get(after.checked_sub(1)?)?;
        let in_part = row - part.start;
        let in_file = match &part.chosen {
            Some(rows) => *rows.get(in_part as usize)?,
            None => in_part,
        };
        (in_part < part.len()).then_some((part, in_file))
    }
}

/// Returns the first half of a hash in hexadecimal: enough to tell two datasets apart, and short enough to read.
fn short(hash: Sha256) -> String {
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Adds a file's length and both of its ends to the hash, or nothing if the file cannot be read.
fn ends(path: &Path, hash: &mut Sha256) {
    let read = |hash: &mut Sha256| -> std::io::Result<()> {
        // Opening a pipe blocks until another process writes to it.
        if !std::fs::metadata(path)?.is_file() {
            return Ok(());
        }
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        hash.update(len.to_le_bytes());
        for start in [0, len.saturating_sub(SAMPLED_BYTES)] {
            file.seek(SeekFrom::Start(start))?;
            let mut bytes = Vec::new();
            Read::by_ref(&mut file).take(SAMPLED_BYTES).read_to_end(&mut bytes)?;
            hash.update(bytes);
        }
        Ok(())
    };
    // The caller reports the file error when it uses the row.
    let _ = read(hash);
}
