//! Names of checkpoint directories, by which other programs load them.

use std::path::Path;

/// The name of a checkpoint in an adapter and in a model card. `transformers` and `peft` load the checkpoint by it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// `ORG/NAME` for a model in the Hugging Face cache, else the absolute path of the directory.
    pub name: String,
    /// Commit of a model in the cache.
    pub revision: Option<String>,
}

impl Origin {
    /// Derives the name from the path: the cache stores a model in `models--ORG--NAME/snapshots/COMMIT`.
    pub fn of(dir: &Path) -> Self {
        // The path of a folder that was moved away has no canonical form.
        let path =
            dir.canonicalize().or_else(|_| std::path::absolute(dir)).unwrap_or_else(|_| dir.to_owned());
        let cached = [dir, &path].into_iter().find_map(|dir| {
            let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
            let folder = dir.parent().filter(|folder| folder.ends_with("snapshots"))?;
            let repo = name(folder.parent()?)?.strip_prefix("models--")?.replacen("--", "/", 1);
            Some((repo, name(dir)))
        });
        match cached {
            Some((name, revision)) => Self { name, revision },
            None => Self { name: path.display().to_string(), revision: None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_the_cache_have_their_hub_name_and_others_their_path() {
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
        assert_eq!(of("/x/somebody/runs/sft"), ("/x/somebody/runs/sft".to_owned(), None));
        assert_eq!(of("/x/snapshots/abc123"), ("/x/snapshots/abc123".to_owned(), None));
        let here = std::env::current_dir().unwrap().canonicalize().unwrap();
        for (relative, expected) in
            [("runs/none/", here.join("runs/none/")), (".", here.clone()), ("src/..", here)]
        {
            assert_eq!(of(relative), (expected.display().to_string(), None), "{relative}");
        }
    }
}
