//! Rollout logs in the format of R1-V and VLM-R1. With `DEBUG_MODE=true`, their reward functions append each scored completion to
//! the file `LOG_PATH`.

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::{Error, Rollout};

/// Text logs of completions, one file per reward. The reward `accuracy` uses the given path; any other reward adds its name to the
/// file name (`debug.txt`, `debug_format.txt`).
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct DebugLog {
    path: PathBuf,
}

impl DebugLog {
    /// Creates a log at this path.
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Appends the completions of a step. Creates the directory of the file if it is missing.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be created or a file cannot be written.
    pub fn append(&self, rollouts: &[Rollout], now: &jiff::Zoned) -> Result<(), Error> {
        if let Some(folder) = self.path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(|source| Error::io("create", folder, source))?;
        }
        let time = now.strftime("%d-%H-%M-%S-%6f").to_string();
        for name in rollouts.first().into_iter().flat_map(|first| first.rewards.keys()) {
            let path = self.path_of(name);
            let mut text = String::new();
            for own in rollouts {
                let title = title(name);
                let reward = own.rewards.get(name).copied().flatten();
                let reward = reward.map_or_else(|| "None".to_owned(), |value| format!("{value:?}"));
                let solution = own.solution.as_ref().map_or_else(String::new, |value| {
                    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
                });
                // Writing to a string cannot fail.
                let _ = writeln!(text, "------------- {time} {title} reward: {reward} -------------");
                let _ = writeln!(text, "Media: {}", own.media.join(", "));
                let _ = writeln!(text, "Content: {}\nSolution: {solution}", own.completion);
            }
            let file = OpenOptions::new().create(true).append(true).open(&path);
            file.and_then(|mut file| file.write_all(text.as_bytes()))
                .map_err(|source| Error::io("append to", &path, source))?;
        }
        Ok(())
    }

    fn path_of(&self, reward: &str) -> PathBuf {
        if reward == "accuracy" {
            return self.path.clone();
        }
        let stem = self.path.file_stem().unwrap_or_default().to_string_lossy();
        // The name of a reward may come from the user.
        let reward: String = reward.chars().map(|c| if c.is_alphanumeric() { c } else { '_' }).collect();
        let ending = self.path.extension().map(|ending| format!(".{}", ending.to_string_lossy()));
        let name = format!("{stem}_{reward}{}", ending.unwrap_or_default());
        self.path.parent().unwrap_or(Path::new("")).join(name)
    }
}

/// Capitalises the first letter of a name.
fn title(name: &str) -> String {
    let mut chars = name.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::FinishReason;

    #[test]
    fn each_reward_has_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let rollout = Rollout {
            epoch: 0.0,
            id: "a".to_owned(),
            group: 0,
            sample: 0,
            prompt: String::new(),
            completion: "<answer>B</answer>".to_owned(),
            solution: Some("<answer>A</answer>".into()),
            rewards: BTreeMap::from([("accuracy".to_owned(), Some(0.0)), ("my/own".to_owned(), None)]),
            reward: Some(0.0),
            advantage: 0.0,
            length: 3,
            finish_reason: FinishReason::Stop,
            media: vec!["clip.mp4".to_owned()],
            frame_times_secs: Vec::new(),
            turns: Vec::new(),
            columns: BTreeMap::new(),
            row: None,
        };
        let now: jiff::Zoned = "2026-01-02T03:04:05.000006+00:00[UTC]".parse().unwrap();
        // The directory does not exist yet, as in the published scripts.
        let log = DebugLog::new(directory.path().join("logs/debug.txt"));
        log.append(&[rollout], &now).unwrap();
        let read = |name: &str| std::fs::read_to_string(directory.path().join("logs").join(name)).unwrap();
        let rest = "Media: clip.mp4\nContent: <answer>B</answer>\nSolution: <answer>A</answer>\n";
        let head = "------------- 02-03-04-05-000006 ";
        assert_eq!(read("debug.txt"), format!("{head}Accuracy reward: 0.0 -------------\n{rest}"));
        assert_eq!(read("debug_my_own.txt"), format!("{head}My/own reward: None -------------\n{rest}"));
    }
}
