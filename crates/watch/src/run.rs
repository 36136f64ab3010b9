//! Data of a run directory for the page: name, settings, metrics and steps.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashSet};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use omnigrpo_guard::inside;
use omnigrpo_media::Orientation;
use omnigrpo_observe::{names, step_of};
use serde::Serialize;

use crate::Error;
use crate::stamp::Stamp;

const METRICS: &str = "metrics.jsonl";
const CONFIG: &str = "config.yaml";
/// Largest size of the rows in a response, in bytes, except for a single longer row.
const SLICE_BYTES: u64 = 4 << 20;
/// Longest row that is accepted, in bytes. A longer row is an error.
const MAX_ROW_BYTES: u64 = 32 << 20;
/// Largest number of bytes read from `config.yaml`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Largest number of runs in a directory. Older runs are left out.
pub(crate) const MAX_RUNS: usize = 256;
/// Largest number of steps of a run whose files are read. Earlier steps are ignored.
pub(crate) const MAX_STEPS: usize = 200_000;

/// A run directory.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// Path of the directory with all links resolved.
    pub(crate) dir: PathBuf,
}

/// A setting of `config.yaml`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Setting {
    pub(crate) name: String,
    /// Value as written.
    pub(crate) value: String,
    /// Source of the value: `flag`, `default`, or a file.
    pub(crate) origin: String,
}

/// Current state of the metrics file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Metrics {
    /// Identity of the file. If it changes, rows fetched before are invalid.
    pub(crate) id: u64,
    pub(crate) bytes: u64,
    /// Time since the last row, in seconds.
    pub(crate) age_secs: u64,
    /// True if the trained model has been written.
    pub(crate) done: bool,
    /// Size of the records of events in bytes.
    pub(crate) events: u64,
}

/// Rows of the metrics file from an offset.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    pub(crate) id: u64,
    /// Complete lines.
    pub(crate) rows: Vec<u8>,
    /// Offset of the remaining rows.
    pub(crate) next: u64,
}

impl Run {
    /// Finds the runs in `directories`, each once. A directory can be a run itself, possibly before its first step, or contain
    /// runs.
    pub(crate) fn find(directories: &[PathBuf]) -> Result<Vec<Self>, Error> {
        Ok(Self::newest(directories, MAX_RUNS)?.0)
    }

    /// Like [`Self::find`], with at most `most` runs of a directory: the ones with the newest metrics. Also returns the number of
    /// runs that were left out.
    pub(crate) fn newest(directories: &[PathBuf], most: usize) -> Result<(Vec<Self>, usize), Error> {
        let (mut runs, mut left_out) = (Vec::new(), 0);
        for path in directories {
            let dir = fs::canonicalize(path).map_err(Error::io("open", path))?;
            if is_run(&dir) || dir.join(CONFIG).is_file() {
                runs.push(Self { dir });
                continue;
            }
            if !dir.is_dir() {
                return Err(Error::NoRun { path: path.clone() });
            }
            let entries = fs::read_dir(&dir).map_err(Error::io("read", path))?;
            let mut inside: Vec<PathBuf> =
                entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| is_run(path)).collect();
            if inside.len() > most {
                left_out += inside.len() - most;
                inside.sort_by_cached_key(|path| {
                    Reverse(fs::metadata(path.join(METRICS)).and_then(|meta| meta.modified()).ok())
                });
                inside.truncate(most);
            }
            inside.sort();
            if inside.is_empty() {
                return Err(Error::NoRun { path: path.clone() });
            }
            let inside = inside.iter().map(fs::canonicalize).collect::<Result<Vec<_>, _>>();
            let inside = inside.map_err(Error::io("open", path))?;
            runs.extend(inside.into_iter().map(|dir| Self { dir }));
        }
        let mut seen = HashSet::new();
        runs.retain(|run| seen.insert(run.dir.clone()));
        Ok((runs, left_out))
    }

    /// Returns the setting `run_name`, or the name of the directory if it is not set.
    pub(crate) fn name(&self) -> String {
        let named = self.settings().into_iter().find(|setting| setting.name == "run_name");
        let named = named.map(|setting| unquoted(&setting.value).to_owned()).filter(|name| !name.is_empty());
        named.unwrap_or_else(|| {
            self.dir.file_name().unwrap_or(self.dir.as_os_str()).to_string_lossy().into_owned()
        })
    }

    /// Returns the names of runs. Runs with the same name also get their directory in it.
    pub(crate) fn names(runs: &[Self]) -> Vec<String> {
        let names: Vec<String> = runs.iter().map(Self::name).collect();
        let common = runs.iter().filter_map(|run| run.dir.parent()).reduce(|common, other| {
            common.ancestors().find(|above| other.starts_with(above)).unwrap_or(Path::new(""))
        });
        let told = |(run, name): (&Self, &String)| {
            if names.iter().filter(|own| *own == name).count() == 1 {
                return name.clone();
            }
            let place = common.and_then(|common| run.dir.strip_prefix(common).ok()).unwrap_or(&run.dir);
            format!("{name} ({})", place.display())
        };
        runs.iter().zip(&names).map(told).collect()
    }

    /// Opens a file of the run.
    ///
    /// # Errors
    /// Returns an error if the path is a link that leads out of the run directory, is not a regular file, or cannot be opened.
    /// (Opening a pipe would block until the other end is opened.)
    pub(crate) fn open(&self, path: &Path) -> Result<File, Error> {
        inside::open(&self.dir, path).map_err(|error| match error.kind() {
            ErrorKind::PermissionDenied if inside::leads_out(&error) => Error::missing(error.to_string()),
            ErrorKind::InvalidInput => Error::missing(format!("{} is {error}", path.display())),
            _ => Error::io("open", path)(error),
        })
    }

    fn metrics_path(&self) -> PathBuf {
        self.dir.join(METRICS)
    }

    /// Returns the state of the metrics file. It is empty before the first step.
    pub(crate) fn metrics_now(&self) -> Metrics {
        let Ok(meta) = fs::metadata(self.metrics_path()) else { return Metrics::default() };
        let stamp = Stamp::of(&meta);
        let age = stamp.modified.and_then(|at| at.elapsed().ok()).unwrap_or_default();
        let done = fs::metadata(self.dir.join("README.md")).and_then(|card| card.modified());
        // A model card that is older than the last row belongs to an earlier run.
        let done = done.is_ok_and(|done| stamp.modified.is_some_and(|row| done >= row));
        let size = |name| fs::metadata(self.dir.join(name)).map_or(0, |meta| meta.len());
        let events = size(names::EVENTS) + size(names::WARNINGS);
        Metrics { id: stamp.id, bytes: stamp.bytes, age_secs: age.as_secs(), done, events }
    }

    /// Returns the day and the minute in UTC at which the last row was written; `None` before the first step.
    pub(crate) fn last_written(&self) -> Option<String> {
        let written = fs::metadata(self.metrics_path()).and_then(|meta| meta.modified()).ok()?;
        Some(jiff::Timestamp::try_from(written).ok()?.strftime("%Y-%m-%d %H:%M UTC").to_string())
    }

    /// Returns complete rows from an offset, unchanged.
    pub(crate) fn metrics(&self, from: u64) -> Result<Slice, Error> {
        let path = self.metrics_path();
        if !path.exists() {
            return Ok(Slice { id: 0, rows: Vec::new(), next: 0 });
        }
        let mut file = self.open(&path)?;
        let id = Stamp::of(&file.metadata().map_err(Error::io("look at", &path))?).id;
        file.seek(SeekFrom::Start(from)).map_err(Error::io("read", &path))?;
        let mut rows = Vec::new();
        let mut reader = BufReader::new(file);
        (&mut reader).take(SLICE_BYTES).read_to_end(&mut rows).map_err(Error::io("read", &path))?;
        let whole = rows.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        if whole == 0 && rows.len() as u64 == SLICE_BYTES {
            let rest = (&mut reader).take(MAX_ROW_BYTES).read_until(b'\n', &mut rows);
            rest.map_err(Error::io("read", &path))?;
            if rows.last() != Some(&b'\n') {
                let reason = format!("a row of more than {} MiB", MAX_ROW_BYTES >> 20);
                return Err(Error::Damaged { path, offset: from, source: reason.into() });
            }
        } else {
            rows.truncate(whole);
        }
        let next = from + rows.len() as u64;
        Ok(Slice { id, rows, next })
    }

    /// Returns every setting of `config.yaml`; empty without this file.
    pub(crate) fn settings(&self) -> Vec<Setting> {
        let mut text = Vec::new();
        let Ok(file) = self.open(&self.dir.join(CONFIG)) else { return Vec::new() };
        if file.take(MAX_CONFIG_BYTES).read_to_end(&mut text).is_err() {
            return Vec::new();
        }
        String::from_utf8_lossy(&text).lines().filter_map(setting).collect()
    }

    /// Returns the form in which the run reads pictures. Without the setting, it is that of programs that had no such setting.
    pub(crate) fn orientation(&self) -> Orientation {
        let settings = self.settings();
        match settings.iter().find(|setting| setting.name == "orientation") {
            Some(setting) if unquoted(&setting.value) == "upright" => Orientation::Upright,
            None if settings.is_empty() => Orientation::default(),
            _ => Orientation::Stored,
        }
    }

    /// Returns the last [`MAX_STEPS`] steps for which a directory of the run has files, in order.
    pub(crate) fn steps(&self, directory: &str) -> Result<Vec<u64>, Error> {
        Ok(self.last_steps(directory, MAX_STEPS)?.0)
    }

    /// Returns the last `most` steps for which a directory of the run has files, in order, and true if it has more.
    pub(crate) fn last_steps(&self, directory: &str, most: usize) -> Result<(Vec<u64>, bool), Error> {
        let path = self.dir.join(directory);
        if !path.is_dir() {
            return Ok((Vec::new(), false));
        }
        let (mut steps, mut has_more) = (BTreeSet::new(), false);
        for entry in fs::read_dir(&path).map_err(Error::io("read the directory", &path))? {
            let path = entry.map_err(Error::io("read the directory", &path))?.path();
            // A file whose name spells the step differently does not belong to the run.
            let is_ours = |step: &u64| path == self.step_file(directory, *step) && path.is_file();
            steps.extend(step_of(&path).filter(is_ours));
            if steps.len() > most {
                steps.pop_first();
                has_more = true;
            }
        }
        Ok((steps.into_iter().collect(), has_more))
    }

    /// Returns the path of the file of a step.
    pub(crate) fn step_file(&self, directory: &str, step: u64) -> PathBuf {
        self.dir.join(directory).join(format!("step-{step:06}.jsonl"))
    }
}

fn is_run(dir: &Path) -> bool {
    dir.join(METRICS).is_file()
}

/// Parses `name: value   # origin`, the format in which settings are printed.
fn setting(line: &str) -> Option<Setting> {
    let (name, rest) = line.split_once(": ")?;
    let is_name = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let (value, origin) = rest.rsplit_once(" # ").unwrap_or((rest, ""));
    is_name.then(|| Setting {
        name: name.to_owned(),
        value: value.trim().to_owned(),
        origin: origin.trim().to_owned(),
    })
}

/// Returns a YAML string without its quotes, if it is a simple one.
pub(crate) fn unquoted(value: &str) -> &str {
    let inside = |quote| value.strip_prefix(quote)?.strip_suffix(quote);
    inside('"').or_else(|| inside('\'')).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    fn run(metrics: &[u8]) -> (tempfile::TempDir, Run) {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(METRICS), metrics).unwrap();
        let run = Run::find(&[directory.path().to_owned()]).unwrap().remove(0);
        (directory, run)
    }

    #[test]
    fn rows_come_whole_and_go_on_where_they_ended() {
        let (_directory, run) = run(b"{\"step\":1}\n{\"step\":2}\n{\"st");
        let first = run.metrics(0).unwrap();
        assert_eq!((first.rows.as_slice(), first.next), (&b"{\"step\":1}\n{\"step\":2}\n"[..], 22));
        assert_eq!(run.metrics(22).unwrap().rows, b"");
        assert_eq!(run.metrics(11).unwrap().rows, b"{\"step\":2}\n");
        assert_eq!(run.metrics_now().bytes, 26);
        assert_eq!(run.metrics(1 << 40).unwrap().rows, b"", "beyond the end");
    }

    #[test]
    fn a_row_longer_than_a_slice_comes_by_itself() {
        let long = format!("{{\"x\":\"{}\"}}\n", "y".repeat(SLICE_BYTES as usize + 10));
        let (_directory, run) = run(format!("{long}{{}}\n").as_bytes());
        let first = run.metrics(0).unwrap();
        assert_eq!(first.next, long.len() as u64);
        assert_eq!(run.metrics(first.next).unwrap().rows, b"{}\n");
    }

    #[test]
    fn a_directory_of_runs_is_all_of_them() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["b", "a", "no-run"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        fs::write(directory.path().join("a/metrics.jsonl"), "").unwrap();
        fs::write(directory.path().join("b/metrics.jsonl"), "").unwrap();
        fs::write(directory.path().join("b/config.yaml"), "run_name: \"of mine\"   # flag\n").unwrap();
        let runs = Run::find(&[directory.path().to_owned()]).unwrap();
        assert_eq!(Run::names(&runs), ["a", "of mine"]);
        let again = Run::find(&[directory.path().to_owned(), directory.path().join("no-run/../a")]).unwrap();
        assert_eq!(again.len(), 2, "each once");
        let metrics = File::options().append(true).open(directory.path().join("a/metrics.jsonl")).unwrap();
        metrics.set_modified(SystemTime::now() - Duration::from_secs(60)).unwrap();
        let (newest, left_out) = Run::newest(&[directory.path().to_owned()], 1).unwrap();
        assert_eq!((Run::names(&newest), left_out), (vec!["of mine".to_owned()], 1));
        fs::write(directory.path().join("a/config.yaml"), "run_name: of mine   # flag\n").unwrap();
        assert_eq!(Run::names(&runs), ["of mine (a)", "of mine (b)"]);
        // Before its first step, a run is found only by its own directory.
        fs::remove_file(directory.path().join("b/metrics.jsonl")).unwrap();
        assert_eq!(Run::find(&[directory.path().to_owned()]).unwrap().len(), 1);
        assert_eq!(Run::find(&[directory.path().join("b")]).unwrap()[0].name(), "of mine");
        let file = Run::find(&[directory.path().join("b/config.yaml")]).unwrap_err().to_string();
        assert!(file.contains("config.yaml contains no run: expected a run directory"), "{file}");
        let error = Run::find(&[directory.path().join("no-run")]).unwrap_err().to_string();
        assert!(
            error.contains("no-run contains no run: expected a run directory with `metrics.jsonl`"),
            "{error}"
        );
        let error = Run::find(&[directory.path().join("x")]).unwrap_err().to_string();
        assert!(error.ends_with("x does not exist"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn only_files_of_the_run_directory_are_read() {
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("secret"), "{\"step\":1}\n").unwrap();
        let (directory, run) = run(b"");
        let rollouts = directory.path().join("rollouts");
        fs::create_dir(&rollouts).unwrap();
        let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, rollouts.join(name)).unwrap();
        link(&outside.path().join("secret"), "step-000001.jsonl");
        link(Path::new("/nowhere"), "step-000002.jsonl");
        fs::create_dir(rollouts.join("step-000003.jsonl")).unwrap();
        fs::write(rollouts.join("step-4.jsonl"), "").unwrap();
        let pipe = rollouts.join("step-000005.jsonl");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        fs::write(rollouts.join("step-000006.jsonl"), "").unwrap();
        assert_eq!(run.steps("rollouts").unwrap(), [1, 6]);
        assert_eq!(run.last_steps("rollouts", 2).unwrap(), (vec![1, 6], false));
        assert_eq!(run.last_steps("rollouts", 1).unwrap(), (vec![6], true));
        let told = |step| run.open(&run.step_file("rollouts", step)).unwrap_err().to_string();
        assert!(told(1).contains("secret, which is outside of"), "{}", told(1));
        assert!(told(3).ends_with("step-000003.jsonl is not a regular file"), "{}", told(3));
        assert!(told(5).ends_with("step-000005.jsonl is not a regular file"), "{}", told(5));
        assert!(run.open(&run.step_file("rollouts", 6)).is_ok());
    }

    #[test]
    fn settings_are_read_as_they_are_printed() {
        let line = "reward_funcs: [\"cmd:a # b\", format] # config r.yaml:3";
        let expected = Setting {
            name: "reward_funcs".into(),
            value: "[\"cmd:a # b\", format]".into(),
            origin: "config r.yaml:3".into(),
        };
        assert_eq!(setting(line), Some(expected));
        assert_eq!(setting("# delta:   # not set: off"), None);
        assert_eq!(setting("# Model"), None);
        assert_eq!(unquoted("'off'"), "off");
        assert_eq!(unquoted("\"off"), "\"off");
    }
}
