//! Public names of checkpoint directories.

use std::path::Path;

/// The name of a checkpoint for use on other machines. A local path would be meaningless there and would reveal details of this
/// machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// `ORG/NAME` for a model in the Hugging Face cache, else the name of the directory.
    pub name: String,
    /// Commit of a model in the cache.
    pub revision: Option<String>,
}

impl Origin {
    /// Derives the name from the path: the cache stores a model in `models--ORG--NAME/snapshots/COMMIT`.
    #[must_use]
    pub fn of(dir: &Path) -> Self {
        // The path is made absolute because `.` and `..` have no name.
        let path = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
        let path = if path.ends_with("..") { path.canonicalize().unwrap_or(path) } else { path };
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let repo = path.parent().filter(|folder| folder.ends_with("snapshots")).and_then(|folder| {
            name(folder.parent()?)?.strip_prefix("models--").map(|repo| repo.replacen("--", "/", 1))
        });
        match repo {
            Some(repo) => Self { name: repo, revision: name(&path) },
            None => Self { name: name(&path).unwrap_or_else(|| "model".to_owned()), revision: None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_the_cache_have_their_hub_name_and_others_no_path() {
        let of = |path: &str| {
            let Origin { name, revision } = Origin::of(Path::new(path));
            (name, revision)
        };
        let commit = Some("abc123".to_owned());
        assert_eq!(
            of("/x/hub/models--me--tiny--v2/snapshots/abc123"),
            ("me/tiny--v2".to_owned(), commit.clone())
        );
        assert_eq!(of("hub/models--gpt2/snapshots/abc123/"), ("gpt2".to_owned(), commit));
        assert_eq!(of("/x/somebody/runs/sft"), ("sft".to_owned(), None));
        assert_eq!(of("/x/snapshots/abc123"), ("abc123".to_owned(), None));
        assert_eq!(of("runs/sft/"), ("sft".to_owned(), None));
        assert!(!of(".").0.contains(['/', '.']), "{:?}", of("."));
        assert_eq!(of("/"), ("model".to_owned(), None));
    }
}
