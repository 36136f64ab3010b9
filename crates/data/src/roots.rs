//! Paths in rows → files that exist, inside their root.
//!
//! - Relative paths belong to a root of their kind (`--image_folders`, …), tried in order; without such roots, to the
//!   folder of the annotation file.
//! - A path that leaves its root by `..` or through a link is refused.
//! - An absolute path must lie inside a root; where no root of its kind was given, it is taken as it is.
//! - COCO file names find their split's folder: `COCO_train2014_….jpg` is also looked for in `train2014/`.

use std::path::{Component, Path, PathBuf};

use omnigrpo_text::MediumKind;

use crate::error::{DataError, PathProblem};
use crate::sample::MediumSource;

/// Folders that relative media paths belong to, per kind. An empty list stands for the annotation file's folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Roots {
    /// For images.
    pub images: Vec<PathBuf>,
    /// For videos and frames.
    pub videos: Vec<PathBuf>,
    /// For sound.
    pub audios: Vec<PathBuf>,
}

impl Roots {
    /// One folder for every kind.
    pub fn all(folder: impl Into<PathBuf>) -> Self {
        let folders = vec![folder.into()];
        Self { images: folders.clone(), videos: folders.clone(), audios: folders }
    }

    /// The roots of file `index` of `num_files`: where as many roots as files are given they belong together pair by
    /// pair, else every root serves every file.
    pub(crate) fn of_file(&self, index: usize, num_files: usize) -> Self {
        let pick = |roots: &Vec<PathBuf>| match roots.get(index) {
            Some(root) if roots.len() == num_files => vec![root.clone()],
            _ => roots.clone(),
        };
        Self { images: pick(&self.images), videos: pick(&self.videos), audios: pick(&self.audios) }
    }
}

/// [`Roots`] made canonical, for the rows of one annotation file.
#[derive(Debug)]
pub(crate) struct Resolver {
    image: KindRoots,
    video: KindRoots,
    audio: KindRoots,
    allow_urls: bool,
}

#[derive(Debug)]
struct KindRoots {
    folders: Vec<PathBuf>,
    /// False where the annotation file's folder stands in.
    given: bool,
}

impl Resolver {
    /// # Errors
    /// When a root is no folder that can be read.
    pub(crate) fn new(roots: &Roots, annotation: &Path, allow_urls: bool) -> Result<Self, DataError> {
        let here = match annotation.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let canonical = |given: &Vec<PathBuf>| -> Result<KindRoots, DataError> {
            let folders = if given.is_empty() {
                std::slice::from_ref(&here).iter().map(|p| p.to_path_buf()).collect()
            } else {
                given.clone()
            };
            let folders = folders
                .iter()
                .map(|folder| {
                    let canonical =
                        folder.canonicalize().map_err(DataError::io("open the media folder", folder))?;
                    if canonical.is_dir() {
                        Ok(canonical)
                    } else {
                        Err(DataError::io("open the media folder", folder)(
                            std::io::ErrorKind::NotADirectory.into(),
                        ))
                    }
                })
                .collect::<Result<_, _>>()?;
            Ok(KindRoots { folders, given: !given.is_empty() })
        };
        Ok(Self {
            image: canonical(&roots.images)?,
            video: canonical(&roots.videos)?,
            audio: canonical(&roots.audios)?,
            allow_urls,
        })
    }

    /// For rows that stand in no file.
    pub(crate) fn in_folder(folder: &Path, allow_urls: bool) -> std::io::Result<Self> {
        let folder = folder.canonicalize()?;
        let roots = || KindRoots { folders: vec![folder.clone()], given: false };
        Ok(Self { image: roots(), video: roots(), audio: roots(), allow_urls })
    }

    /// The file or URL that `text` names in a row.
    pub(crate) fn source(&self, kind: MediumKind, text: &str) -> Result<MediumSource, PathProblem> {
        if text.starts_with("http://") || text.starts_with("https://") {
            return if self.allow_urls {
                Ok(MediumSource::Url(text.to_owned()))
            } else {
                Err(PathProblem::UrlNotAllowed)
            };
        }
        self.path(kind, text).map(MediumSource::Path)
    }

    /// The file or folder that `text` names in a row.
    pub(crate) fn path(&self, kind: MediumKind, text: &str) -> Result<PathBuf, PathProblem> {
        let text = text.strip_prefix("file://").unwrap_or(text);
        if text.is_empty() || text.starts_with("data:") || text.contains("://") {
            let got = if text.is_empty() { "empty text" } else { text.split(':').next().unwrap_or_default() };
            return Err(PathProblem::Unsupported { got: crate::error::shorten(got) });
        }
        let roots = match kind {
            MediumKind::Image => &self.image,
            MediumKind::Video => &self.video,
            MediumKind::Audio => &self.audio,
        };
        let leaves = || PathProblem::LeavesRoot { kind, roots: roots.folders.clone() };
        let path = Path::new(text);
        if path.is_absolute() {
            let canonical =
                canonicalize(path)?.ok_or_else(|| PathProblem::NotFound { tried: vec![path.to_owned()] })?;
            let inside = !roots.given || roots.folders.iter().any(|root| canonical.starts_with(root));
            return if inside { Ok(canonical) } else { Err(leaves()) };
        }
        if climbs(path) {
            return Err(leaves());
        }
        let mut tried = Vec::new();
        for root in &roots.folders {
            let in_split = coco_split(path).map(|split| root.join(split).join(path));
            for candidate in std::iter::once(root.join(path)).chain(in_split) {
                match canonicalize(&candidate)? {
                    Some(canonical) if canonical.starts_with(root) => return Ok(canonical),
                    Some(_) => return Err(leaves()),
                    None => tried.push(candidate),
                }
            }
        }
        Err(PathProblem::NotFound { tried })
    }
}

fn canonicalize(path: &Path) -> Result<Option<PathBuf>, PathProblem> {
    match path.canonicalize() {
        Ok(canonical) => Ok(Some(canonical)),
        Err(error)
            if matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) =>
        {
            Ok(None)
        }
        Err(error) => Err(PathProblem::Io(error)),
    }
}

/// Whether some prefix of the path lies above its start. Told without the file system, so that a path which climbs
/// is refused even where nothing exists.
fn climbs(path: &Path) -> bool {
    let mut depth = 0i64;
    path.components().any(|component| {
        match component {
            Component::ParentDir => depth -= 1,
            Component::Normal(_) => depth += 1,
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
        depth < 0
    })
}

/// `train2014` of `COCO_train2014_000000000001.jpg`.
fn coco_split(path: &Path) -> Option<&str> {
    let split = path.file_name()?.to_str()?.strip_prefix("COCO_")?.split('_').next()?;
    ["train2014", "val2014", "test2014", "test2015"].contains(&split).then_some(split)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Place {
        _folder: tempfile::TempDir,
        base: PathBuf,
    }

    /// base/secret.png, base/data/{a.png, in/b.png, rows.jsonl, link -> in, out -> ..}, base/other/c.png
    fn place() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().canonicalize().unwrap();
        for name in ["data/in", "other", "data/train2014"] {
            std::fs::create_dir_all(base.join(name)).unwrap();
        }
        for name in [
            "secret.png",
            "data/a.png",
            "data/in/b.png",
            "other/c.png",
            "data/train2014/COCO_train2014_000000000001.jpg",
        ] {
            std::fs::write(base.join(name), "x").unwrap();
        }
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("in", base.join("data/link")).unwrap();
            std::os::unix::fs::symlink("..", base.join("data/out")).unwrap();
        }
        Place { _folder: folder, base }
    }

    fn resolver(place: &Place, roots: &Roots) -> Resolver {
        Resolver::new(roots, &place.base.join("data/rows.jsonl"), false).unwrap()
    }

    fn image(resolver: &Resolver, path: &str) -> Result<PathBuf, PathProblem> {
        resolver.path(MediumKind::Image, path)
    }

    #[test]
    fn relative_paths_belong_to_the_annotation_folder_without_roots() {
        let place = place();
        let resolver = resolver(&place, &Roots::default());
        for path in ["a.png", "./a.png", "in/../a.png", "file://a.png"] {
            assert_eq!(image(&resolver, path).unwrap(), place.base.join("data/a.png"), "{path}");
        }
        assert_eq!(image(&resolver, "in").unwrap(), place.base.join("data/in"));
        assert!(
            matches!(image(&resolver, "none.png"), Err(PathProblem::NotFound { tried }) if tried == [place.base.join("data/none.png")])
        );
        assert!(matches!(image(&resolver, "a.png/x"), Err(PathProblem::NotFound { .. })));
    }

    #[cfg(unix)]
    #[test]
    fn a_path_that_leaves_its_root_is_refused() {
        let place = place();
        let resolver = resolver(&place, &Roots::default());
        for path in [
            "../secret.png",
            "in/../../secret.png",
            "../data/a.png",
            "../none.png",
            "out/secret.png",
            "out/other/c.png",
        ] {
            assert!(matches!(image(&resolver, path), Err(PathProblem::LeavesRoot { .. })), "{path}");
        }
        assert_eq!(image(&resolver, "link/b.png").unwrap(), place.base.join("data/in/b.png"));
        let message = image(&resolver, "../secret.png").unwrap_err().to_string();
        assert!(message.contains("--image_folders") && message.contains("data"), "{message}");
    }

    #[test]
    fn an_absolute_path_needs_a_root_around_it_where_roots_are_given() {
        let place = place();
        let secret = place.base.join("secret.png");
        let secret = secret.to_str().unwrap();
        assert!(image(&resolver(&place, &Roots::default()), secret).is_ok());
        let roots =
            Roots { images: vec![place.base.join("other"), place.base.join("data")], ..Roots::default() };
        let resolver = resolver(&place, &roots);
        assert!(matches!(image(&resolver, secret), Err(PathProblem::LeavesRoot { .. })));
        let inside = place.base.join("data/a.png");
        assert_eq!(image(&resolver, inside.to_str().unwrap()).unwrap(), inside);
        // The roots of images say nothing about videos.
        assert!(resolver.path(MediumKind::Video, secret).is_ok());
    }

    #[test]
    fn roots_are_tried_in_order_and_coco_names_find_their_split() {
        let place = place();
        let roots =
            Roots { images: vec![place.base.join("other"), place.base.join("data")], ..Roots::default() };
        let resolver = resolver(&place, &roots);
        assert_eq!(image(&resolver, "c.png").unwrap(), place.base.join("other/c.png"));
        assert_eq!(image(&resolver, "a.png").unwrap(), place.base.join("data/a.png"));
        let coco = "COCO_train2014_000000000001.jpg";
        assert_eq!(image(&resolver, coco).unwrap(), place.base.join("data/train2014").join(coco));
        assert!(
            matches!(image(&resolver, "COCO_val2014_000000000001.jpg"), Err(PathProblem::NotFound { tried }) if tried.len() == 4)
        );
    }

    #[test]
    fn urls_are_opt_in_and_other_schemes_refused() {
        let place = place();
        let closed = resolver(&place, &Roots::default());
        let open = Resolver::new(&Roots::default(), &place.base.join("data/rows.jsonl"), true).unwrap();
        let url = "https://example.org/a.png";
        assert!(matches!(closed.source(MediumKind::Image, url), Err(PathProblem::UrlNotAllowed)));
        assert_eq!(open.source(MediumKind::Image, url).unwrap(), MediumSource::Url(url.to_owned()));
        for text in ["", "data:image/png;base64,AAAA", "s3://bucket/a.png"] {
            assert!(
                matches!(open.source(MediumKind::Image, text), Err(PathProblem::Unsupported { .. })),
                "{text}"
            );
        }
        assert!(matches!(open.source(MediumKind::Image, "a\0b"), Err(PathProblem::Io(_))));
    }

    #[test]
    fn roots_pair_with_files_when_numbers_agree() {
        let roots = Roots { images: vec!["a".into(), "b".into()], videos: vec!["v".into()], audios: vec![] };
        let second = roots.of_file(1, 2);
        assert_eq!((second.images, second.videos), (vec![PathBuf::from("b")], vec![PathBuf::from("v")]));
        assert_eq!(roots.of_file(0, 1).images.len(), 2);
    }

    #[test]
    fn a_missing_root_is_an_error() {
        let place = place();
        let roots = Roots::all(place.base.join("nowhere"));
        assert!(matches!(
            Resolver::new(&roots, &place.base.join("x.json"), false),
            Err(DataError::Io { .. })
        ));
    }
}
