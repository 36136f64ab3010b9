//! Checks a whole dataset before training: parses every row, reads the header of every medium and finds the longest prompts.
//!
//! The caller supplies the functions that read a header and count the tokens of a row. This module walks the rows in parallel,
//! caches the headers of files and collects the results. The results do not depend on the number of threads.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use omnigrpo_guard::cache::own_folder;
use omnigrpo_guard::inside;
use omnigrpo_guard::{Fault, WAITS, fault, retried};
use omnigrpo_text::{PerKind, RENDER_STACK_BYTES, render_on_this_thread};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::dataset::Dataset;
use crate::error::{DataError, PathProblem, RowError, RowProblem};
use crate::sample::{MediumRef, MediumSource, Sample};
use crate::{MediumKind, Origin};

/// Header of a medium. Fields that the kind does not have are `None`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MediumInfo {
    /// Width of the image or of each frame, pixels.
    pub width_px: Option<u32>,
    /// Height of the image or of each frame, pixels.
    pub height_px: Option<u32>,
    /// Value of the EXIF orientation tag, from 1 to 8, that turns the stored pixels upright; 0 without pixels. Width and height are
    /// those of the stored pixels.
    pub turn: u8,
    /// Number of frames of a clip.
    pub num_frames: Option<u64>,
    /// Frame rate of a clip, frames per second.
    pub fps: Option<f64>,
    /// Duration of a clip or sound, seconds.
    pub duration_secs: Option<f64>,
    /// Sample rate of a sound, Hz.
    pub sample_rate_hz: Option<u32>,
}

/// Error of a medium or a row. If [`omnigrpo_guard::fault`] blames the machine, the row itself may be fine.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;
/// Function that reads the header of a medium, or returns an error that describes the problem. The result must depend only on
/// the medium's source, not on its options.
pub type Probe<'a> = dyn Fn(&MediumRef) -> Result<MediumInfo, Cause> + Sync + 'a;
/// Function that measures a row. It receives the headers of the row's media in the order of [`Sample::media`]. The error gives
/// the reason why the row cannot be used, for example its length.
pub type Estimate<'a> = dyn Fn(&Sample, &[MediumInfo]) -> Result<Measure, Cause> + Sync + 'a;

/// Size of a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Measure {
    /// Length of the prompt, tokens.
    pub num_tokens: u64,
    /// Number of prompt tokens that stand for media.
    pub media_tokens: u64,
    /// Memory of the decoded media, bytes.
    pub media_bytes: u64,
}

/// Options of [`check`].
pub struct CheckOptions<'a> {
    /// Function that reads a medium's header.
    pub probe: &'a Probe<'a>,
    /// Function that counts a row's prompt tokens.
    pub estimate: &'a Estimate<'a>,
    /// Number of longest prompts to report.
    pub num_longest: usize,
    /// Number of worker threads, ≥ 1.
    pub num_threads: usize,
    /// Folder of the header cache, which is kept between runs and keyed by path, size and time of change. `None`: no cache.
    pub cache_dir: Option<&'a Path>,
    /// Callback for progress, called from any thread with (rows done, total rows).
    pub progress: &'a (dyn Fn(u64, u64) + Sync),
}

/// Problem of one row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// Index of the row in the dataset.
    pub row: u64,
    /// Annotation file.
    pub file: PathBuf,
    /// Line number, from 1.
    pub line: u64,
    /// Description of the problem.
    pub what: String,
    /// Kind of the missing medium, if the problem is a missing medium.
    #[serde(skip)]
    pub missing: Option<MediumKind>,
}

/// One of the longest prompts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LongPrompt {
    /// Length of the prompt, tokens.
    pub num_tokens: u64,
    /// Number of prompt tokens that stand for media.
    pub media_tokens: u64,
    /// Index of the row in the dataset.
    pub row: u64,
    /// Id of the row.
    pub id: String,
}

/// Counts of rows and media.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Number of rows checked.
    pub rows: u64,
    /// Number of rows with a problem.
    pub bad_rows: u64,
    /// Number of rows without media.
    pub text_rows: u64,
    /// Number of media of each kind in all rows.
    #[serde(flatten)]
    pub media: PerKind<u64>,
    /// Number of media whose stored pixels are not upright.
    pub turned: PerKind<u64>,
    /// Number of rows without a solution.
    pub without_solution: u64,
}

/// Result of [`check`].
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// Problems of unusable rows, sorted by row.
    pub problems: Vec<Problem>,
    /// The longest prompts, longest first.
    pub longest: Vec<LongPrompt>,
    /// Counts of rows and media.
    pub counts: Counts,
    /// Sources of the ground truths ([`Sample::solution_from`]), with the number of rows for each.
    pub solutions_from: BTreeMap<String, u64>,
    /// Memory of the decoded media of all usable rows, bytes.
    pub media_bytes: u64,
    /// Memory that decoding the largest medium takes before it is resized, bytes: a picture and its copy that is turned upright, and as
    /// many frames of a folder as there are threads.
    pub decoding_bytes: u64,
}

impl Report {
    /// Returns the rows that must never be drawn.
    pub fn bad_rows(&self) -> impl Iterator<Item = u64> {
        self.problems.iter().map(|problem| problem.row)
    }

    fn merge(mut self, other: Self, num_longest: usize) -> Self {
        self.problems.extend(other.problems);
        self.longest.extend(other.longest);
        self.keep_longest(num_longest);
        let (a, b) = (&mut self.counts, other.counts);
        a.rows += b.rows;
        a.bad_rows += b.bad_rows;
        a.text_rows += b.text_rows;
        b.media.into_iter().for_each(|(kind, count)| a.media[kind] += count);
        b.turned.into_iter().for_each(|(kind, count)| a.turned[kind] += count);
        a.without_solution += b.without_solution;
        self.media_bytes += other.media_bytes;
        self.decoding_bytes = self.decoding_bytes.max(other.decoding_bytes);
        for (from, rows) in other.solutions_from {
            *self.solutions_from.entry(from).or_default() += rows;
        }
        self
    }

    fn keep_longest(&mut self, num_longest: usize) {
        self.longest.sort_by_key(|prompt| (std::cmp::Reverse(prompt.num_tokens), prompt.row));
        self.longest.truncate(num_longest);
    }
}

/// Checks every row of `dataset`. Problems of single rows go into the report.
///
/// # Errors
/// Returns an error if worker threads cannot be started, or if the machine fails at a row and retries fail too.
pub fn check(dataset: &Dataset, options: &CheckOptions) -> Result<Report, DataError> {
    let cache = Cache::open(options.cache_dir);
    dataset.remember_media(
        cache.known.lock().unwrap_or_else(PoisonError::into_inner).keys().map(|key| &*key.path),
    );
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(options.num_threads.max(1))
        .stack_size(RENDER_STACK_BYTES)
        .start_handler(|_| render_on_this_thread())
        .build()
        .map_err(|error| DataError::Io {
            action: "start threads for",
            path: "data check".into(),
            source: std::io::Error::other(error),
        })?;
    let total = dataset.len();
    let done = AtomicU64::new(0);
    let mut report = pool.install(|| {
        (0..total)
            .into_par_iter()
            .try_fold(Report::default, |mut report, row| {
                check_row(dataset, row, options, &cache, &mut report)?;
                let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                if done.is_multiple_of(64) || done == total {
                    (options.progress)(done, total);
                }
                Ok::<_, DataError>(report)
            })
            .try_reduce(Report::default, |a, b| Ok(a.merge(b, options.num_longest)))
    })?;
    report.problems.sort_by_key(|problem| problem.row);
    report.keep_longest(options.num_longest);
    Ok(report)
}

fn check_row(
    dataset: &Dataset,
    row: u64,
    options: &CheckOptions,
    cache: &Cache,
    report: &mut Report,
) -> Result<(), DataError> {
    let (sample, outcome) = retried(&WAITS, || checked(dataset, row, options, cache))?;
    report.counts.rows += 1;
    if let Some(sample) = &sample {
        count(sample, &mut report.counts);
        if let Some(from) = &sample.solution_from {
            match report.solutions_from.get_mut(&**from) {
                Some(rows) => *rows += 1,
                None => drop(report.solutions_from.insert(from.to_string(), 1)),
            }
        }
    }
    match outcome {
        Ok((prompt, Usable { measure, turned, decoding_bytes })) => {
            report.media_bytes += measure.media_bytes;
            report.decoding_bytes = report.decoding_bytes.max(decoding_bytes);
            turned.into_iter().for_each(|(kind, count)| report.counts.turned[kind] += count);
            report.longest.push(prompt);
            // Trimmed from time to time, so that memory does not grow with the dataset.
            if report.longest.len() > 2 * options.num_longest + 1024 {
                report.keep_longest(options.num_longest);
            }
        }
        Err((origin, what, missing)) => {
            report.counts.bad_rows += 1;
            let (file, line) = (origin.file.to_path_buf(), origin.line);
            report.problems.push(Problem { row, file, line, what, missing });
        }
    }
    Ok(())
}

/// Bad row: its origin, a description of the problem, and the kind of a missing medium.
type Bad = (Origin, String, Option<MediumKind>);

/// Numbers of a good row.
struct Usable {
    measure: Measure,
    /// Number of media whose stored pixels are not upright.
    turned: PerKind<u64>,
    /// [`Report::decoding_bytes`] of the row.
    decoding_bytes: u64,
}

/// Result of one row: the prompt and the numbers of a good row, or the bad row.
type Checked = Result<(LongPrompt, Usable), Bad>;

/// Checks one row and returns the parsed sample, if any, with the result. Returns an error only if the machine failed.
fn checked(
    dataset: &Dataset,
    row: u64,
    options: &CheckOptions,
    cache: &Cache,
) -> Result<(Option<Sample>, Checked), DataError> {
    let judged = |origin: &Origin, source: Cause| match fault(&*source, Fault::Row) {
        Fault::Machine => {
            Err(DataError::Machine { path: origin.file.to_path_buf(), line: origin.line, source })
        }
        _ => Ok(omnigrpo_guard::told(&*source)),
    };
    match dataset.get(row) {
        Ok(sample) => {
            let bad = match usable(&sample, options, cache) {
                Ok(usable) => {
                    let Measure { num_tokens, media_tokens, .. } = usable.measure;
                    let prompt = LongPrompt { num_tokens, media_tokens, row, id: sample.id.clone() };
                    return Ok((Some(sample), Ok((prompt, usable))));
                }
                Err(source) => {
                    let what = judged(&sample.origin, source)?;
                    // The folder may have disappeared in the meantime. Reading the row again detects that.
                    if let Err(gone) = dataset.get(row) {
                        judged(&sample.origin, gone.into())?;
                    }
                    (sample.origin.clone(), what, None)
                }
            };
            Ok((Some(sample), Err(bad)))
        }
        Err(RowError { file, line, problem, .. }) => {
            let missing = match &problem {
                RowProblem::Medium { kind, problem: PathProblem::NotFound { .. }, .. } => Some(*kind),
                _ => None,
            };
            let origin = Origin { file, line };
            let what = judged(&origin, problem.into())?;
            Ok((None, Err((origin, what, missing))))
        }
    }
}

fn count(sample: &Sample, counts: &mut Counts) {
    counts.text_rows += u64::from(sample.media.is_empty());
    counts.without_solution += u64::from(sample.solution.is_none());
    for medium in &sample.media {
        counts.media[medium.kind] += 1;
    }
}

/// Measures a row. The error names every broken medium of the row.
fn usable(sample: &Sample, options: &CheckOptions, cache: &Cache) -> Result<Usable, Cause> {
    let mut infos = Vec::with_capacity(sample.media.len());
    let mut broken = Vec::new();
    for medium in &sample.media {
        match cache.probe(medium, options.probe) {
            Ok(info) => {
                broken.extend(misfit(medium, &info).map(|what| of_medium(medium, &what)));
                infos.push(info);
            }
            Err(machine) if fault(&*machine, Fault::Row) == Fault::Machine => return Err(machine),
            Err(what) => {
                broken.push(of_medium(medium, &omnigrpo_guard::told(&*what)));
            }
        }
    }
    if !broken.is_empty() {
        return Err(broken.join("; ").into());
    }
    let (mut turned, mut decoding_bytes) = (PerKind::default(), 0);
    for (medium, info) in sample.media.iter().zip(&infos) {
        turned[medium.kind] += u64::from(info.turn > 1);
        decoding_bytes = decoding_bytes.max(decoding(medium, info, options.num_threads));
    }
    Ok(Usable { measure: (options.estimate)(sample, &infos)?, turned, decoding_bytes })
}

/// Returns a description of the row's options that the medium cannot satisfy.
fn misfit(medium: &MediumRef, info: &MediumInfo) -> Option<String> {
    if let (Some(segments), Some(num_frames)) = (&medium.options.segments, info.num_frames) {
        let expected: u64 = segments.frame_counts.iter().map(|&frames| u64::from(frames)).sum();
        if expected > num_frames {
            return Some(format!("got {num_frames} frames, expected {expected}, the sum of meta.frame_cnts"));
        }
    }
    match (medium.options.video_start, info.duration_secs) {
        (Some(start), Some(duration)) if start >= duration => {
            Some(format!("got a length of {duration} s, expected more than video_start = {start} s"))
        }
        _ => None,
    }
}

/// Returns the bytes that decoding a medium takes before it is resized. Clips in files are decoded frame by frame at their final size.
fn decoding(medium: &MediumRef, info: &MediumInfo, num_threads: usize) -> u64 {
    let together = match (&medium.source, medium.kind) {
        (MediumSource::Frames(frames), _) => frames.len().min(num_threads) as u64,
        (MediumSource::Path(_), MediumKind::Image) => 1,
        (MediumSource::Path(path), _) if path.is_dir() => num_threads as u64,
        (MediumSource::Path(_), _) => 0,
    };
    let pixels = u64::from(info.width_px.unwrap_or(0)) * u64::from(info.height_px.unwrap_or(0));
    let copies = 1 + u64::from(info.turn > 1);
    together * copies * 3 * pixels
}

/// Returns the problem of a medium with its kind and its path, which the problem may begin with.
fn of_medium(medium: &MediumRef, what: &str) -> String {
    let name = name(&medium.source);
    let what = what.strip_prefix(&name).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(what);
    format!("{} {name}: {what}", medium.kind)
}

fn name(source: &MediumSource) -> String {
    match source {
        MediumSource::Path(path) => path.display().to_string(),
        MediumSource::Frames(frames) => match frames.first() {
            Some(first) => format!("{} and {} more frames", first.display(), frames.len() - 1),
            None => "(no frames)".to_owned(),
        },
    }
}

/// Cache of file headers from earlier runs. It covers plain files only, because the modification time of a folder or a frame list
/// does not change when a frame does. New headers are written at once, so that a check that is killed can resume. An unusable
/// cache only costs time.
struct Cache {
    known: Mutex<HashMap<Key, MediumInfo>>,
    /// Cache file, opened for appending.
    out: Option<Mutex<File>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Key {
    kind: String,
    path: PathBuf,
    size_bytes: u64,
    modified_nanos: u64,
}

#[derive(Serialize, Deserialize)]
struct Line {
    #[serde(flatten)]
    key: Key,
    info: MediumInfo,
}

/// File name of the cache. Its number goes up when [`MediumInfo`] or the meaning of its fields changes.
const CACHE_NAME: &str = "media-headers-2.jsonl";
/// Largest size of the cache file, bytes: about a million entries. A larger file is replaced by an empty one.
const MAX_CACHE_BYTES: u64 = 256 << 20;

impl Cache {
    fn open(folder: Option<&Path>) -> Self {
        let opened = folder.and_then(|folder| Self::read(folder, MAX_CACHE_BYTES).ok());
        let (known, out) = opened.map_or_else(Default::default, |(known, file)| (known, Some(file)));
        Self { known: Mutex::new(known), out: out.map(Mutex::new) }
    }

    /// Reads the known headers and opens the file to which new headers are appended.
    fn read(folder: &Path, max_bytes: u64) -> std::io::Result<(HashMap<Key, MediumInfo>, File)> {
        own_folder(folder)?;
        let path = folder.join(CACHE_NAME);
        match inside::open(folder, CACHE_NAME) {
            // Creating the file through a dangling link would create it at the link's target.
            Err(error) if error.kind() != ErrorKind::NotFound || path.is_symlink() => return Err(error),
            Ok(file) if file.metadata()?.len() > max_bytes => std::fs::remove_file(&path)?,
            _ => {}
        }
        let mut file = File::options().read(true).append(true).create(true).open(&path)?;
        let mut known = HashMap::new();
        let mut reader = BufReader::new(&file);
        let mut line = Vec::new();
        let mut whole = true;
        while reader.read_until(b'\n', &mut line)? > 0 {
            // An unreadable line only means that the header is read again.
            if let Ok(Line { key, info }) = serde_json::from_slice(&line) {
                known.insert(key, info);
            }
            whole = line.ends_with(b"\n");
            line.clear();
        }
        if !whole {
            file.write_all(b"\n")?;
        }
        Ok((known, file))
    }

    fn probe(&self, medium: &MediumRef, probe: &Probe) -> Result<MediumInfo, Cause> {
        let Some((out, key)) = self.out.as_ref().zip(Key::of(medium)) else { return probe(medium) };
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(info) = known {
            return Ok(info);
        }
        let info = probe(medium)?;
        let line = Line { key, info };
        if let Ok(text) = serde_json::to_string(&line) {
            // Written in one call, so that lines of two runs that append to the same file do not mix. A header that a full disk
            // rejects is read again by the next check.
            let _ =
                out.lock().unwrap_or_else(PoisonError::into_inner).write_all(format!("{text}\n").as_bytes());
        }
        self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(line.key, line.info.clone());
        Ok(line.info)
    }
}

impl Key {
    fn of(medium: &MediumRef) -> Option<Self> {
        let MediumSource::Path(path) = &medium.source else { return None };
        let metadata = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
        let modified = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(Self {
            kind: medium.kind.as_str().to_owned(),
            path: std::path::absolute(path).ok()?,
            size_bytes: metadata.len(),
            modified_nanos: u64::try_from(modified.as_nanos()).ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::{DatasetSpec, ReadOptions};

    /// Returns ten rows: 3 names a missing file, 5 an image that the probe rejects, 7 is not JSON, 8 is text only.
    fn dataset(folder: &Path) -> Dataset {
        let mut lines = Vec::new();
        for row in 0..10 {
            let name = format!("{row}.png");
            if row != 3 {
                std::fs::write(folder.join(&name), if row == 5 { "broken" } else { "fine" }).unwrap();
            }
            lines.push(match row {
                7 => "{".to_owned(),
                8 => r#"{"prompt": "text"}"#.to_owned(),
                _ => format!(r#"{{"id": "r{row}", "prompt": "Q", "image": "{name}", "answer": "x"}}"#),
            });
        }
        std::fs::write(folder.join("rows.jsonl"), lines.join("\n")).unwrap();
        let spec = DatasetSpec::file(folder.join("rows.jsonl"));
        Dataset::open(&[spec], &ReadOptions::default()).unwrap()
    }

    /// A problem that begins with the path of its medium has the path once.
    #[test]
    fn a_medium_is_named_once_and_its_pixels_are_counted() {
        let medium = |kind, source| MediumRef { kind, source, options: crate::MediumOptions::default() };
        let photo = medium(MediumKind::Image, MediumSource::Path("a.jpg".into()));
        assert_eq!(of_medium(&photo, "a.jpg: cannot decode"), "image a.jpg: cannot decode");
        assert_eq!(of_medium(&photo, "too large"), "image a.jpg: too large");
        let frames = medium(
            MediumKind::Video,
            MediumSource::Frames(vec!["0.png".into(), "1.png".into(), "2.png".into()]),
        );
        let clip = medium(MediumKind::Video, MediumSource::Path("a.mp4".into()));
        let info =
            |turn| MediumInfo { width_px: Some(40), height_px: Some(30), turn, ..MediumInfo::default() };
        assert_eq!([decoding(&photo, &info(1), 8), decoding(&photo, &info(6), 8)], [3600, 7200]);
        assert_eq!([decoding(&frames, &info(1), 2), decoding(&frames, &info(1), 8)], [7200, 10_800]);
        assert_eq!(decoding(&clip, &info(1), 8), 0);
    }

    fn estimate(sample: &Sample, infos: &[MediumInfo]) -> Result<Measure, Cause> {
        let width = u64::from(infos.iter().filter_map(|info| info.width_px).sum::<u32>());
        match 10 * sample.row + width {
            num_tokens @ ..=85 => Ok(Measure { num_tokens, media_tokens: width, media_bytes: 4 * width }),
            tokens => Err(format!("got {tokens} tokens, expected at most 85").into()),
        }
    }

    fn width(medium: &MediumRef) -> Result<MediumInfo, Cause> {
        let MediumSource::Path(path) = &medium.source else { return Err("no path".into()) };
        match std::fs::read_to_string(path).unwrap().as_str() {
            "fine" => Ok(MediumInfo { width_px: Some(3), ..Default::default() }),
            _ => Err("not an image".into()),
        }
    }

    fn run(dataset: &Dataset, num_threads: usize, cache_dir: Option<&Path>) -> (Report, usize, u64) {
        let (probes, last) = (AtomicUsize::new(0), AtomicU64::new(0));
        let probe = |medium: &MediumRef| {
            probes.fetch_add(1, Ordering::Relaxed);
            width(medium)
        };
        let options = CheckOptions {
            probe: &probe,
            estimate: &estimate,
            num_longest: 2,
            num_threads,
            cache_dir,
            progress: &|done, _| {
                last.fetch_max(done, Ordering::Relaxed);
            },
        };
        let report = check(dataset, &options).unwrap();
        (report, probes.into_inner(), last.into_inner())
    }

    #[test]
    fn reports_problems_longest_and_counts_whatever_the_threads() {
        let folder = tempfile::tempdir().unwrap();
        let dataset = dataset(folder.path());
        let (report, _, done) = run(&dataset, 1, None);
        assert_eq!(done, 10);
        let rows: Vec<_> = report.problems.iter().map(|problem| (problem.row, problem.line)).collect();
        assert_eq!(rows, [(3, 4), (5, 6), (7, 8), (9, 10)]);
        let missing: Vec<_> = report.problems.iter().map(|problem| problem.missing).collect();
        assert_eq!(missing, [Some(MediumKind::Image), None, None, None]);
        for (problem, expected) in report.problems.iter().zip([
            "the file does not exist",
            "not an image",
            "not a JSON row",
            "got 93 tokens, expected at most 85",
        ]) {
            assert!(problem.what.contains(expected), "{}", problem.what);
        }
        assert_eq!(report.bad_rows().collect::<Vec<_>>(), [3, 5, 7, 9]);
        let longest: Vec<_> =
            report.longest.iter().map(|prompt| (prompt.num_tokens, prompt.id.as_str())).collect();
        assert_eq!(longest, [(80, "rows:9"), (63, "r6")]);
        let counts = Counts {
            rows: 10,
            bad_rows: 4,
            text_rows: 1,
            media: [(MediumKind::Image, 7)].into(),
            turned: PerKind::default(),
            without_solution: 1,
        };
        assert_eq!(report.counts, counts);
        assert_eq!(run(&dataset, 4, None).0, report);
    }

    /// Either the first attempts at each header fail, as if descriptors had run out, or all of them fail. No row is to blame.
    #[test]
    fn a_failure_of_the_machine_is_waited_for_and_never_a_bad_row() {
        let folder = tempfile::tempdir().unwrap();
        let dataset = dataset(folder.path());
        let (expected, ..) = run(&dataset, 1, None);
        let checked = |well: &(dyn Fn(usize) -> bool + Sync)| {
            let attempts = AtomicUsize::new(0);
            let probe = |medium: &MediumRef| {
                if !well(attempts.fetch_add(1, Ordering::Relaxed)) {
                    return Err(std::io::Error::from_raw_os_error(24).into());
                }
                width(medium)
            };
            let options = CheckOptions {
                probe: &probe,
                estimate: &estimate,
                num_longest: 2,
                num_threads: 2,
                cache_dir: None,
                progress: &|_, _| {},
            };
            check(&dataset, &options)
        };
        assert_eq!(checked(&|attempt| attempt != 2 && attempt != 3).unwrap(), expected);
        let error = checked(&|_| false).unwrap_err();
        assert!(matches!(error, DataError::Machine { .. }), "{error}");
        assert!(omnigrpo_guard::told(&error).contains("the row may be fine"), "{error}");
    }

    #[test]
    fn options_that_a_clip_cannot_fulfil_are_problems() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("c.mp4"), "x").unwrap();
        let rows = [
            r#"{"prompt": "Q", "video": "c.mp4", "meta": {"frame_cnts": [15, 11]}}"#,
            r#"{"prompt": "Q", "video": "c.mp4", "meta": {"frame_cnts": [15, 12]}}"#,
            r#"{"prompt": "Q", "video": "c.mp4", "video_start": 2.5}"#,
            r#"{"prompt": "Q", "video": "c.mp4", "video_start": 2.6}"#,
        ];
        std::fs::write(folder.path().join("rows.jsonl"), rows.join("\n")).unwrap();
        let spec = DatasetSpec::file(folder.path().join("rows.jsonl"));
        let dataset = Dataset::open(&[spec], &ReadOptions::default()).unwrap();
        let options = CheckOptions {
            probe: &|_| {
                Ok(MediumInfo { num_frames: Some(26), duration_secs: Some(2.6), ..Default::default() })
            },
            estimate: &estimate,
            num_longest: 0,
            num_threads: 1,
            cache_dir: None,
            progress: &|_, _| {},
        };
        let report = check(&dataset, &options).unwrap();
        let got: Vec<_> =
            report.problems.iter().map(|problem| (problem.row, problem.what.as_str())).collect();
        let clip = folder.path().canonicalize().unwrap().join("c.mp4");
        let frames =
            format!("video {}: got 26 frames, expected 27, the sum of meta.frame_cnts", clip.display());
        let start = format!(
            "video {}: got a length of 2.6 s, expected more than video_start = 2.6 s",
            clip.display()
        );
        assert_eq!(got, [(1, frames.as_str()), (3, start.as_str())]);
        assert!(report.longest.is_empty());
    }

    /// A check that is killed has saved its headers, and the next check resumes from them.
    #[test]
    fn what_is_learnt_is_written_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let dataset = dataset(folder.path());
        let cache = folder.path().join("cache");
        let written = || std::fs::read_to_string(cache.join(CACHE_NAME)).unwrap().lines().count();
        let lines = Mutex::new(Vec::new());
        let options = CheckOptions {
            probe: &|_| {
                lines.lock().unwrap().push(written());
                Ok(MediumInfo { width_px: Some(3), ..Default::default() })
            },
            estimate: &estimate,
            num_longest: 2,
            num_threads: 1,
            cache_dir: Some(&cache),
            progress: &|_, _| {},
        };
        check(&dataset, &options).unwrap();
        assert_eq!(*lines.lock().unwrap(), [0, 1, 2, 3, 4, 5, 6]);
        // Killed while writing the fourth line: three headers are known, and the partial fourth line is not extended.
        let text = std::fs::read_to_string(cache.join(CACHE_NAME)).unwrap();
        let three: usize = text.lines().take(3).map(|line| line.len() + 1).sum();
        std::fs::write(cache.join(CACHE_NAME), &text[..three + 9]).unwrap();
        // The other four include the rejected image, which is probed again.
        assert_eq!(run(&dataset, 1, Some(&cache)).1, 4);
        assert_eq!(run(&dataset, 1, Some(&cache)).1, 1);
    }

    /// A relative path in another folder names another file. A cache file above the limit is started again.
    #[test]
    fn keys_are_absolute_and_the_file_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let dataset = dataset(folder.path());
        let cache = folder.path().join("cache");
        run(&dataset, 1, Some(&cache));
        let (known, _) = Cache::read(&cache, 1 << 20).unwrap();
        assert_eq!(known.len(), 6);
        assert!(known.keys().all(|key| key.path.is_absolute()), "{known:?}");
        let source = MediumSource::Path("Cargo.toml".into());
        let medium = MediumRef { source, ..dataset.get(0).unwrap().media[0].clone() };
        let here = std::path::absolute("Cargo.toml").unwrap();
        assert_eq!(Key::of(&medium).map(|key| key.path), Some(here));
        assert!(Cache::read(&cache, 10).unwrap().0.is_empty());
        assert_eq!(std::fs::metadata(cache.join(CACHE_NAME)).unwrap().len(), 0);
    }

    /// A cache that belongs to another user, or that is a link or not a folder, is ignored, and the check runs without it.
    #[cfg(unix)]
    #[test]
    fn a_cache_that_cannot_be_used_is_no_error() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let dataset = dataset(folder.path());
        let (whole, ..) = run(&dataset, 1, None);
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("victim")).unwrap();
        symlink(at("victim"), at("link")).unwrap();
        std::fs::write(at("file"), "").unwrap();
        for name in ["leads out", "dangling"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        std::fs::write(at("notes"), "mine").unwrap();
        symlink(at("notes"), at("leads out").join(CACHE_NAME)).unwrap();
        symlink(at("new"), at("dangling").join(CACHE_NAME)).unwrap();
        for name in ["link", "file", "file/below", "leads out", "dangling"] {
            assert_eq!(run(&dataset, 1, Some(&at(name))).0, whole, "{name}");
        }
        assert_eq!(std::fs::read_dir(at("victim")).unwrap().count(), 0);
        assert_eq!(std::fs::read_to_string(at("notes")).unwrap(), "mine");
        assert!(!at("new").exists());
    }

    #[test]
    fn known_files_are_not_probed_again_until_they_change() {
        let folder = tempfile::tempdir().unwrap();
        let dataset = dataset(folder.path());
        let cache = folder.path().join("cache");
        let (first, probes, _) = run(&dataset, 2, Some(&cache));
        assert_eq!(probes, 7);
        // Only the rejected image is probed again.
        let (second, probes, _) = run(&dataset, 2, Some(&cache));
        assert_eq!((&second, probes), (&first, 1));
        std::fs::write(folder.path().join("0.png"), "broken now").unwrap();
        let (third, probes, _) = run(&dataset, 2, Some(&cache));
        assert_eq!(probes, 2);
        assert_eq!(third.problems[0].row, 0);
        // A damaged cache is treated as empty.
        std::fs::write(cache.join(CACHE_NAME), "{\"kind\":\n\u{0}garbage").unwrap();
        assert_eq!(run(&dataset, 2, Some(&cache)).0, third);
    }
}
