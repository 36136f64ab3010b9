//! Errors in the form shown to users: the problem, its place, the value found, the value expected, advice.

use std::error::Error;
use std::fmt;

use omnigrpo_guard::{Fault, fault};
use omnigrpo_train::{Refusal, TrainError};

use super::values::Origin;

/// Exit code for a command line or file of settings that cannot be used.
pub const EXIT_USAGE: u8 = 2;
/// Exit code for a run that failed.
pub const EXIT_FAILURE: u8 = 1;
/// Exit code for a run that was stopped and can be resumed, and for a command that failed because of the machine. It means a
/// temporary failure in `sysexits.h`.
pub const EXIT_STOPPED: u8 = 75;

/// Length of the longest text of a problem, in characters. It may contain a value of any length.
const MAX_CHARS: usize = 4_000;

/// One error in the form shown to users: the problem, its place, the value found, the value expected, advice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem(Box<Parts>);

// Parts of a problem, boxed so that results stay small.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Parts {
    what: String,
    place: Option<String>,
    got: Option<String>,
    expected: Option<String>,
    help: Option<String>,
    each: Vec<Problem>,
    exit_code: u8,
}

impl Problem {
    /// Returns a problem for a mistake in the settings.
    pub fn usage(what: impl Into<String>) -> Self {
        Self(Box::new(Parts { what: bounded(what.into()), exit_code: EXIT_USAGE, ..Parts::default() }))
    }

    /// Returns a problem for a failure of the run.
    pub fn failure(what: impl Into<String>) -> Self {
        Self(Box::new(Parts { what: bounded(what.into()), exit_code: EXIT_FAILURE, ..Parts::default() }))
    }

    /// Returns a problem for a run that was stopped and can be resumed.
    pub fn stopped(what: impl Into<String>) -> Self {
        Self(Box::new(Parts { what: what.into(), exit_code: EXIT_STOPPED, ..Parts::default() }))
    }

    /// Combines problems into one, so that the user can fix a command line in one go. Returns `Ok` if there are no problems.
    ///
    /// # Errors
    /// Returns the combined problem.
    pub fn all(problems: Vec<Self>) -> Result<(), Self> {
        if problems.is_empty() { Ok(()) } else { Err(Self::joined(problems)) }
    }

    /// Combines one or more problems into one.
    pub fn joined(mut problems: Vec<Self>) -> Self {
        if problems.len() == 1 {
            return problems.remove(0);
        }
        let mut one = Self::usage(format!("{} things are wrong with the settings", problems.len()));
        one.0.exit_code = problems.iter().map(Self::exit_code).max().unwrap_or(EXIT_USAGE);
        one.0.each = problems;
        one
    }

    /// Converts the error of a verb, which is a problem or any error with its chain of causes.
    pub fn from_error(error: &(dyn Error + 'static)) -> Self {
        if let Some(problem) = cause::<Self>(error) {
            return problem.clone();
        }
        let trained = cause::<TrainError>(error);
        if let Some(TrainError::Refused(refusal)) = trained {
            return Self::from((**refusal).clone());
        }
        let kept = match trained {
            Some(TrainError::UnscoredKept { rows, .. }) => Some(rows),
            _ => None,
        };
        let mut problem = Self::of(error);
        if trained.map_or_else(|| fault(error, Fault::Run), TrainError::fault) == Fault::Machine {
            problem.0.exit_code = EXIT_STOPPED;
            problem = problem.help("fix the machine and run the same command again");
        }
        match kept {
            Some(rows) => problem.help(format!(
                "`omnigrpo rewards run --input {} --output scored.jsonl --reward_funcs …` scores them; add the media \
                 folders of this run if a reward reads media",
                rows.display()
            )),
            None => problem,
        }
    }

    /// Converts a library's error with its chain of causes.
    pub fn of(error: &dyn Error) -> Self {
        let mut messages = omnigrpo_guard::messages(error);
        let causes = messages.split_off(1).join(": ");
        let problem = Self::failure(messages.remove(0));
        if causes.is_empty() { problem } else { problem.got(causes) }
    }

    /// Adds the place: a flag, or `file:line:column`.
    pub fn at(mut self, place: impl Into<String>) -> Self {
        self.0.place = Some(place.into());
        self
    }

    /// Adds the place where the source of a setting gave it, if that is a line or a variable.
    pub fn given_at(self, origin: &Origin) -> Self {
        match origin {
            Origin::Default | Origin::Recipe(_) | Origin::Flag | Origin::Caller => self,
            Origin::Environment(name) => self.at(format!("environment variable {name}")),
            Origin::Preset(name) => self.at(format!("preset {name}")),
            Origin::Config(place) => self.at(place.clone()),
        }
    }

    /// Adds the value that was found.
    pub fn got(mut self, got: impl Into<String>) -> Self {
        self.0.got = Some(bounded(got.into()));
        self
    }

    /// Adds a description of a correct value.
    pub fn expected(mut self, expected: impl Into<String>) -> Self {
        self.0.expected = Some(expected.into());
        self
    }

    /// Adds advice.
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.0.help = Some(help.into());
        self
    }

    /// Returns true for a mistake in the settings.
    pub fn is_usage(&self) -> bool {
        self.0.exit_code == EXIT_USAGE
    }

    /// Returns the problems that this one combines, or the problem itself.
    pub fn each(&self) -> impl Iterator<Item = &Self> {
        let single = self.0.each.is_empty().then_some(self);
        single.into_iter().chain(&self.0.each)
    }

    /// Returns the place.
    pub fn place(&self) -> Option<&str> {
        self.0.place.as_deref()
    }

    /// Returns the problem without its place, in one line.
    pub fn in_one_line(&self) -> String {
        let Parts { what, got, expected, help, .. } = &*self.0;
        let part = |name: &str, text: &Option<String>| text.as_ref().map(|text| format!("{name}{text}"));
        let parts = [Some(what.clone()), part("got ", got), part("expected ", expected), part("", help)];
        parts.into_iter().flatten().collect::<Vec<_>>().join("; ").replace('\n', " ")
    }

    /// Returns the exit code of the process.
    pub fn exit_code(&self) -> u8 {
        self.0.exit_code
    }
}

impl Problem {
    fn details(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = [
            ("at", &self.0.place),
            ("got", &self.0.got),
            ("expected", &self.0.expected),
            ("help", &self.0.help),
        ];
        for (label, text) in lines {
            if let Some(text) = text {
                // Continuation lines are aligned with the text.
                write!(f, "\n{label:>10}: {}", text.replace('\n', "\n            "))?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.0.what)?;
        self.details(f)?;
        for (i, problem) in self.0.each.iter().enumerate() {
            write!(f, "\n{:>3}. {}", i + 1, problem.0.what)?;
            problem.details(f)?;
        }
        Ok(())
    }
}

impl Error for Problem {}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        let Refusal { what, at: place, got, expected, help, by_settings } = refusal;
        let exit_code = if by_settings { EXIT_USAGE } else { EXIT_FAILURE };
        Self(Box::new(Parts { what, place, got, expected, help, each: Vec::new(), exit_code }))
    }
}

/// Cuts a long text, which then ends with its length.
fn bounded(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(MAX_CHARS) {
        let length = text.chars().count();
        text.truncate(end);
        text.push_str(&format!("… ({length} characters)"));
    }
    text
}

/// Returns the first error of this type among an error and its causes.
fn cause<'e, T: Error + 'static>(error: &'e (dyn Error + 'static)) -> Option<&'e T> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use omnigrpo_data::{Dataset, DatasetSpec, MediumOptions, MediumRef, MediumSource, ReadOptions, Roots};
    use omnigrpo_models::{Checkpoint, Limits, ModelError, probe_medium};
    use omnigrpo_rewards::Corpus;
    use omnigrpo_rollout::RolloutError;
    use omnigrpo_text::MediumKind;

    use super::*;

    fn broken_row(folder: &Path, row: &str) -> Box<dyn Error> {
        let file = folder.join("rows.jsonl");
        std::fs::write(&file, row).unwrap();
        let rows = Dataset::open(
            &[DatasetSpec::file(&file).with_roots(Roots::all(folder))],
            &ReadOptions::default(),
        );
        Box::new(rows.unwrap().get(0).unwrap_err())
    }

    /// Returns one error of each kind that wraps another, and the number of its messages.
    fn wrapped(folder: &Path) -> Vec<(Box<dyn Error>, usize)> {
        let file = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
        let missing = folder.join("missing");
        let nowhere = DatasetSpec::file(missing.join("rows.jsonl"));
        file(Corpus::FILE, "[");
        file("config.json", "{");
        file("tokenizer.json", "[]");
        let not_there = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let io = ModelError::Io { path: missing.clone(), source: not_there() };
        let (source, options) = (MediumSource::Path(missing.join("a.png")), MediumOptions::default());
        let picture = MediumRef { kind: MediumKind::Image, source, options };
        let reward = omnigrpo_rewards::build(&["cmd:/no/such/program"], &Default::default());
        vec![
            (broken_row(folder, r#"{"problem": "?", "image": "a\u0000.png"}"#), 4),
            (broken_row(folder, "{1}"), 3),
            (Box::new(Dataset::open(&[nowhere], &ReadOptions::default()).map(drop).unwrap_err()), 2),
            (Box::new(Checkpoint::open(folder).map(drop).unwrap_err()), 2),
            (Box::new(TrainError::from(RolloutError::from(io))), 2),
            (Box::new(omnigrpo_text::Tokenizer::from_dir(folder).map(drop).unwrap_err()), 2),
            (Box::new(probe_medium(&picture, &Limits::default()).map(drop).unwrap_err()), 2),
            (Box::new(Corpus::default().or_kept(folder).map(drop).unwrap_err()), 2),
            (Box::new(reward.map(drop).unwrap_err()), 2),
            (Box::new(omnigrpo_observe::write_atomic(&missing.join("x\0"), |_| Ok(())).unwrap_err()), 2),
            (Box::new(omnigrpo_watch::Error::Serve { place: "x".into(), source: not_there() }), 2),
        ]
    }

    #[test]
    fn causes_are_sources_that_no_message_repeats_and_each_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        for (error, num_messages) in wrapped(folder.path()) {
            let told = Problem::of(error.as_ref()).to_string();
            let mut messages = vec![error.to_string()];
            let mut next = error.source();
            while let Some(cause) = next {
                let cause_says = cause.to_string();
                assert!(
                    !messages.iter().any(|said| said.contains(&cause_says)),
                    "{messages:?}: {cause_says}"
                );
                messages.push(cause_says);
                next = cause.source();
            }
            assert_eq!(messages.len(), num_messages, "{messages:?}");
            for message in messages {
                // The user sees messages of libraries without the names of their types.
                let message = omnigrpo_guard::plain(&message);
                assert_eq!(told.matches(&*message).count(), 1, "{message:?} in {told}");
            }
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_failure_of_the_machine_is_75_outside_of_training_too() {
        let io = |number| anyhow::Error::from(std::io::Error::from_raw_os_error(number));
        let code =
            |error: anyhow::Error| Problem::from_error(error.context("while it worked").as_ref()).exit_code();
        assert_eq!(code(io(libc::EAGAIN)), EXIT_STOPPED);
        assert_eq!(code(io(libc::ENOSPC)), EXIT_STOPPED);
        assert_eq!(code(io(libc::ENOENT)), EXIT_FAILURE);
    }
}
