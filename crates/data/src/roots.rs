//! Resolver from paths in rows to existing files inside their root.
//!
//! - A relative path is looked up in the roots of its kind ([`Roots`]), in order. Without such roots it is looked up in the
//!   folder of the annotation file.
//! - A path that leaves its root by `..` or through a link is an error. So is a folder with a link that leaves the root.
//! - An absolute path must be inside a root. If no root of its kind is given, it is used unchanged. Folders in which the program
//!   itself stores media count as roots if they belong to the user of this process: those of the cache, and `media` of the run
//!   whose `rollouts` are read.
//! - `http(s)` addresses are fetched if the run allows it. `data:` addresses and media in base64 are written to the cache. All
//!   become files.
//! - A missing path is a failure of the machine, not of the row, if its folder held media before and is now missing or empty.
//!   Otherwise the path is reported as not found.
//! - COCO file names imply the folder of their split: `COCO_train2014_….jpg` is also looked up in `train2014/`.

use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use omnigrpo_guard::cache::{is_own, own_folder};
use omnigrpo_guard::{MachineFailure, Setting};
use omnigrpo_text::{Form, MediumKind, PerKind};

use crate::dataset::{Fetch, ReadOptions};
use crate::error::{AUDIOS, DataError, IMAGES, PathProblem, VIDEOS};
use crate::formats::is_base64;
use crate::store::store;

/// Root folders of relative media paths, per kind. An empty list stands for the annotation file's folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Roots {
    /// Roots of images.
    pub images: Vec<PathBuf>,
    /// Roots of videos and frames.
    pub videos: Vec<PathBuf>,
    /// Roots of sounds.
    pub audios: Vec<PathBuf>,
}

impl Roots {
    /// Uses one folder for every kind.
    pub fn all(folder: impl Into<PathBuf>) -> Self {
        let folders = vec![folder.into()];
        Self { images: folders.clone(), videos: folders.clone(), audios: folders }
    }

    /// Returns the setting of the roots of a kind.
    pub fn setting(kind: MediumKind) -> Setting {
        Self::default().of(kind).1
    }

    /// Returns the roots of a kind, with their setting. Kinds of one form share their roots.
    fn of(&self, kind: MediumKind) -> (&[PathBuf], Setting) {
        match kind.form() {
            Form::Picture => (&self.images, IMAGES),
            Form::Clip => (&self.videos, VIDEOS),
            Form::Sound => (&self.audios, AUDIOS),
        }
    }

    /// Returns the roots of file `index` of `num_files`. If there are as many roots as files, the file gets the root at its
    /// position; otherwise every root applies to every file.
    pub(crate) fn of_file(&self, index: usize, num_files: usize) -> Self {
        let mut own = self.clone();
        for roots in [&mut own.images, &mut own.videos, &mut own.audios] {
            if roots.len() == num_files && index < num_files {
                *roots = vec![roots.swap_remove(index)];
            }
        }
        own
    }
}

/// Canonical form of [`Roots`] for the rows of one annotation file.
#[derive(Debug)]
pub(crate) struct Resolver {
    roots: PerKind<KindRoots>,
    fetch: Option<Fetch>,
    /// Cache folder of media that came as bytes.
    kept: Option<PathBuf>,
    /// Folders in which the program stores media. Rows of unpacked tables and records of completions name files in them.
    stored: Vec<PathBuf>,
    /// Flag that makes a path without a file count as found.
    missing: bool,
    /// Folders in which this process or an earlier check found media.
    seen: Mutex<HashSet<PathBuf>>,
}

/// Returns the cache folder of media that came as bytes.
pub(crate) fn media_folder(cache_dir: &Path) -> PathBuf {
    cache_dir.join("media")
}

/// Returns the cache folder of media that an environment adds to completions outside of a run.
pub fn turn_folder(cache_dir: &Path) -> PathBuf {
    cache_dir.join("turns")
}

/// Returns the folders in which the program stores media that rows in the folder `here` may name.
fn stored(here: &Path, cache_dir: Option<&Path>) -> Vec<PathBuf> {
    let cached = cache_dir.map(|dir| [media_folder(dir), turn_folder(dir)]).into_iter().flatten();
    let run = here.parent().filter(|_| here.ends_with("rollouts"));
    cached.chain(run.map(|run| run.join("media"))).collect()
}

#[derive(Debug, Default)]
struct KindRoots {
    folders: Vec<PathBuf>,
    /// False if the annotation file's folder is used instead of a given root.
    given: bool,
}

impl Resolver {
    /// # Errors
    /// Returns an error if a root is not a readable folder.
    pub(crate) fn new(roots: &Roots, here: &Path, options: &ReadOptions) -> Result<Self, DataError> {
        let canonical = |given: &[PathBuf]| -> Result<KindRoots, DataError> {
            let here = [here.to_path_buf()];
            let folders = if given.is_empty() { &here } else { given };
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
        let mut own = PerKind::default();
        for kind in MediumKind::ALL {
            own[kind] = canonical(roots.of(kind).0)?;
        }
        Ok(Self {
            roots: own,
            fetch: options.fetch.clone(),
            kept: options.cache_dir.as_deref().map(media_folder),
            stored: stored(here, options.cache_dir.as_deref()),
            missing: options.missing_media,
            seen: Mutex::default(),
        })
    }

    /// Creates a resolver for rows that do not come from a file.
    pub(crate) fn in_folder(folder: &Path, options: &ReadOptions) -> std::io::Result<Self> {
        let folder = folder.canonicalize()?;
        let roots = |_: &()| KindRoots { folders: vec![folder.clone()], given: false };
        Ok(Self {
            roots: PerKind::default().each(roots),
            fetch: options.fetch.clone(),
            kept: options.cache_dir.as_deref().map(media_folder),
            stored: stored(&folder, options.cache_dir.as_deref()),
            missing: options.missing_media,
            seen: Mutex::default(),
        })
    }

    /// Returns the file or folder that `text` names in a row.
    pub(crate) fn path(&self, kind: MediumKind, text: &str) -> Result<PathBuf, PathProblem> {
        if text.starts_with("http://") || text.starts_with("https://") {
            return match &self.fetch {
                Some(Fetch(fetch)) => fetch(text).map_err(PathProblem::Fetch),
                None if self.missing => Ok(PathBuf::from(text)),
                None => Err(PathProblem::UrlNotAllowed),
            };
        }
        let data = text.strip_prefix("data:");
        if let (Some(data), true) = (data, self.kept.is_some()) {
            return self.stored(data_bytes(data));
        }
        if is_base64(text) {
            return match self.kept.is_some() {
                true => self.stored(decoded(text)),
                false => Err(PathProblem::Unsupported { got: "a medium in base64".to_owned() }),
            };
        }
        let text = text.strip_prefix("file://").unwrap_or(text);
        if text.is_empty() || text.starts_with("data:") || text.contains("://") {
            let got = if text.is_empty() { "empty text" } else { text.split(':').next().unwrap_or_default() };
            return Err(PathProblem::Unsupported { got: crate::error::shorten(got) });
        }
        let roots = &self.roots[kind];
        let leaves = || PathProblem::LeavesRoot { kind, roots: roots.folders.clone() };
        let path = Path::new(text);
        if path.is_absolute() {
            let Some(canonical) = canonicalize(path)? else { return self.absent(vec![path.to_owned()]) };
            // A link would let another folder pass as one of the program.
            let stored = self.stored.iter().filter(|folder| is_own(folder));
            let stored: Vec<PathBuf> = stored.filter_map(|folder| folder.canonicalize().ok()).collect();
            return match roots.folders.iter().chain(&stored).find(|root| canonical.starts_with(root)) {
                Some(root) if roots.given => self.found(path, canonical, kind, root),
                None if roots.given => Err(leaves()),
                _ => {
                    self.remember(path);
                    Ok(canonical)
                }
            };
        }
        if climbs(path) {
            return Err(leaves());
        }
        let mut tried = Vec::new();
        for root in &roots.folders {
            let in_split = coco_split(path).map(|split| root.join(split).join(path));
            for candidate in std::iter::once(root.join(path)).chain(in_split) {
                match canonicalize(&candidate)? {
                    Some(canonical) if canonical.starts_with(root) => {
                        return self.found(&candidate, canonical, kind, root);
                    }
                    Some(_) => return Err(leaves()),
                    None => tried.push(candidate),
                }
            }
        }
        if let Some(root) = roots.folders.iter().find(|root| !self.missing && is_away(root)) {
            return Err(away(root));
        }
        self.absent(tried)
    }

    /// Returns the files of the frames in a `data:` address.
    pub(crate) fn frames(&self, text: &str) -> Result<Vec<PathBuf>, PathProblem> {
        let mut parts = text.split(',');
        let head = parts.next().unwrap_or_default();
        parts.map(|frame| self.path(MediumKind::Image, &format!("{head},{frame}"))).collect()
    }

    /// Writes a medium into the cache and returns its file.
    fn stored(&self, bytes: Result<Vec<u8>, String>) -> Result<PathBuf, PathProblem> {
        let bytes = bytes.map_err(|got| PathProblem::Unsupported { got })?;
        let Some(folder) = &self.kept else {
            return Err(PathProblem::Unsupported { got: "a medium as bytes".to_owned() });
        };
        own_folder(folder).map_err(|error| PathProblem::Fetch(error.into()))?;
        let name = store(folder, &bytes, None).map_err(|error| PathProblem::Fetch(error.into()))?;
        Ok(folder.join(name))
    }

    fn found(
        &self,
        path: &Path,
        canonical: PathBuf,
        kind: MediumKind,
        root: &Path,
    ) -> Result<PathBuf, PathProblem> {
        self.remember(path);
        folder_inside(canonical, kind, root)
    }

    /// Records that a medium was found at this path.
    pub(crate) fn remember(&self, path: &Path) {
        let Some(folder) = path.parent() else { return };
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if !seen.contains(folder) {
            seen.insert(folder.to_owned());
        }
    }

    /// Classifies a path that was not found.
    fn absent(&self, tried: Vec<PathBuf>) -> Result<PathBuf, PathProblem> {
        match tried.first() {
            Some(path) if self.missing => return Ok(path.clone()),
            _ => {}
        }
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let folders = tried.iter().filter_map(|path| path.parent());
        match folders.into_iter().find(|folder| seen.contains(*folder) && is_gone(folder)) {
            Some(folder) => Err(away(folder)),
            None => Err(PathProblem::NotFound { tried }),
        }
    }
}

/// Reports whether a known folder no longer exists.
fn is_away(folder: &Path) -> bool {
    matches!(folder.try_exists(), Ok(false))
}

/// Reports whether a folder that held media is missing or empty. An unmounted drive leaves an empty mount point.
fn is_gone(folder: &Path) -> bool {
    is_away(folder) || folder.read_dir().is_ok_and(|mut entries| entries.next().is_none())
}

fn away(folder: &Path) -> PathProblem {
    let source = MachineFailure(std::io::ErrorKind::NotFound.into());
    PathProblem::FolderAway { folder: folder.to_owned(), source }
}

/// Decodes the part of a `data:` address after the scheme: `image/png;base64,iVBO…`.
fn data_bytes(data: &str) -> Result<Vec<u8>, String> {
    let (head, body) = data.split_once(',').ok_or("`data:` without a comma")?;
    if !head.ends_with(";base64") {
        return Err(format!("`data:{}`, not in base64", crate::error::shorten(head)));
    }
    decoded(body)
}

/// Decodes base64, which may have line breaks.
fn decoded(text: &str) -> Result<Vec<u8>, String> {
    use base64::Engine as _;
    let plain: String = text.chars().filter(|char| !char.is_ascii_whitespace()).collect();
    let decoded = base64::engine::general_purpose::STANDARD.decode(plain);
    decoded.map_err(|error| format!("broken base64 ({error})"))
}

/// Returns the path unchanged. If it is a folder (of frames), none of its links may leave the root.
fn folder_inside(path: PathBuf, kind: MediumKind, root: &Path) -> Result<PathBuf, PathProblem> {
    if path.is_dir() {
        for entry in path.read_dir().map_err(PathProblem::Io)? {
            let entry = entry.map_err(PathProblem::Io)?;
            if !entry.file_type().map_err(PathProblem::Io)?.is_symlink() {
                continue;
            }
            let link = entry.path();
            if canonicalize(&link)?.is_some_and(|target| !target.starts_with(root)) {
                return Err(PathProblem::LinkLeavesRoot { kind, link, root: root.to_owned() });
            }
        }
    }
    Ok(path)
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

/// Reports whether some prefix of the path is above its start. The file system is not used, so a path that climbs is rejected
/// even if it does not exist.
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

/// Returns `train2014` for `COCO_train2014_000000000001.jpg`.
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
        Resolver::new(roots, &place.base.join("data"), &ReadOptions::default()).unwrap()
    }

    fn image(resolver: &Resolver, path: &str) -> Result<PathBuf, PathProblem> {
        resolver.path(MediumKind::Image, path)
    }

    #[test]
    fn a_folder_that_was_there_is_away_and_one_that_never_was_is_the_rows_mistake() {
        let place = place();
        let resolver = resolver(&place, &Roots::all(place.base.join("data")));
        let problem = |path: &str| image(&resolver, path).unwrap_err();
        assert!(matches!(problem("in/never.png"), PathProblem::NotFound { .. }));
        assert!(matches!(problem("nowhere/b.png"), PathProblem::NotFound { .. }));
        image(&resolver, "in/b.png").unwrap();
        let hide = |name: &str, to: &str| {
            std::fs::rename(place.base.join(name), place.base.join(to)).unwrap();
        };
        hide("data/in", "data/hidden");
        assert!(
            matches!(problem("in/b.png"), PathProblem::FolderAway { folder, .. } if folder.ends_with("in"))
        );
        assert!(matches!(problem("nowhere/b.png"), PathProblem::NotFound { .. }));
        // An empty mount point.
        std::fs::create_dir(place.base.join("data/in")).unwrap();
        assert!(matches!(problem("in/b.png"), PathProblem::FolderAway { .. }));
        std::fs::remove_dir(place.base.join("data/in")).unwrap();
        hide("data/hidden", "data/in");
        assert_eq!(image(&resolver, "in/b.png").unwrap(), place.base.join("data/in/b.png"));
        assert!(matches!(problem("in/never.png"), PathProblem::NotFound { .. }), "the folder is there");
        // The root itself is missing, and nothing was read from it yet.
        hide("data", "hidden");
        assert!(
            matches!(problem("a.png"), PathProblem::FolderAway { folder, .. } if folder.ends_with("data"))
        );
        assert!(matches!(problem("nowhere/b.png"), PathProblem::FolderAway { .. }));
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
        assert!(message.contains("Roots::images") && message.contains("data"), "{message}");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_in_a_folder_of_frames_stays_in_the_root() {
        let place = place();
        let frames = place.base.join("data/frames");
        std::fs::create_dir(&frames).unwrap();
        std::os::unix::fs::symlink("../a.png", frames.join("0.png")).unwrap();
        let near = resolver(&place, &Roots::default());
        let given = resolver(&place, &Roots::all(place.base.join("data")));
        let absolute = frames.to_str().unwrap();
        for resolver in [&near, &given] {
            assert_eq!(resolver.path(MediumKind::Video, "frames").unwrap(), frames);
        }
        std::os::unix::fs::symlink("../../secret.png", frames.join("1.png")).unwrap();
        for (resolver, path) in [(&near, "frames"), (&given, "frames"), (&given, absolute)] {
            let problem = resolver.path(MediumKind::Video, path).unwrap_err().to_string();
            assert!(
                problem.contains("frames/1.png leaves the root") && problem.contains("Roots::videos"),
                "{problem}"
            );
        }
        // Without roots, an absolute path is allowed, and so is the target of the link.
        assert_eq!(near.path(MediumKind::Video, absolute).unwrap(), frames);
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
        // The roots of images do not apply to videos.
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
    fn addresses_are_opt_in_and_other_schemes_refused() {
        let place = place();
        let closed = resolver(&place, &Roots::default());
        let fetched = place.base.join("fetched.png");
        let there = fetched.clone();
        let fetch = move |url: &str| match url {
            "https://example.org/a.png" => Ok(there.clone()),
            _ => Err("status 404".into()),
        };
        let options = ReadOptions {
            fetch: Some(Fetch(std::sync::Arc::new(fetch))),
            cache_dir: Some(place.base.join("cache")),
            ..ReadOptions::default()
        };
        let open = Resolver::new(&Roots::all(place.base.join("data")), &place.base, &options).unwrap();
        let url = "https://example.org/a.png";
        assert!(matches!(image(&closed, url), Err(PathProblem::UrlNotAllowed)));
        assert_eq!(image(&open, url).unwrap(), fetched);
        assert!(
            matches!(image(&open, "http://example.org/b"), Err(PathProblem::Fetch(what)) if what.to_string() == "status 404")
        );
        for text in
            ["", "data:image/png;base64,AA!A", "data:image/png,AAAA", "data:image/png", "s3://bucket/a.png"]
        {
            assert!(matches!(image(&open, text), Err(PathProblem::Unsupported { .. })), "{text}");
        }
        assert!(matches!(image(&closed, "data:image/png;base64,AAAA"), Err(PathProblem::Unsupported { .. })));
        assert!(matches!(image(&open, "a\0b"), Err(PathProblem::Io(_))));
    }

    #[test]
    fn bytes_in_an_address_become_one_file() {
        let place = place();
        let options = ReadOptions { cache_dir: Some(place.base.join("cache")), ..ReadOptions::default() };
        let resolver = Resolver::new(&Roots::all(place.base.join("data")), &place.base, &options).unwrap();
        let first = image(&resolver, "data:image/png;base64,iVBORw0KGgo=").unwrap();
        assert_eq!(std::fs::read(&first).unwrap(), b"\x89PNG\r\n\x1a\n");
        assert_eq!(first.extension().unwrap(), "png");
        assert_eq!(image(&resolver, "data:;base64,iVBORw0KGgo=").unwrap(), first);
        // A row may refer to the stored file by its path, as unpacked tables do.
        assert_eq!(image(&resolver, &first.display().to_string()).unwrap(), first);
    }

    /// Records of completions name pictures that the program stored. Links, and `media` beside other rows than those of a run,
    /// are no such folders.
    #[cfg(unix)]
    #[test]
    fn records_name_pictures_that_the_program_stored() {
        use std::os::unix::fs::symlink;
        let place = place();
        let cache = place.base.join("cache");
        let stored = |folder: &str| {
            let folder = place.base.join(folder);
            own_folder(&folder).unwrap();
            std::fs::write(folder.join("part.png"), "x").unwrap();
            folder.join("part.png")
        };
        let of_turns = stored("cache/turns");
        let (of_run, rollouts) = (stored("run/media"), place.base.join("run/rollouts"));
        std::fs::create_dir_all(&rollouts).unwrap();
        let roots = Roots::all(place.base.join("data"));
        let options = ReadOptions { cache_dir: Some(cache.clone()), ..ReadOptions::default() };
        let read = |here: &Path, path: &Path| {
            image(&Resolver::new(&roots, here, &options).unwrap(), &path.display().to_string())
        };
        assert_eq!(read(&place.base, &of_turns).unwrap(), of_turns);
        assert_eq!(read(&rollouts, &of_run).unwrap(), of_run);
        let leaves = |here: &Path, path: &Path| {
            assert!(matches!(read(here, path), Err(PathProblem::LeavesRoot { .. })), "{}", path.display());
        };
        leaves(&place.base.join("run"), &of_run);
        leaves(&place.base, &place.base.join("other/c.png"));
        leaves(&place.base, &place.base.join("cache/turns/../../secret.png"));
        symlink(place.base.join("secret.png"), cache.join("turns/link.png")).unwrap();
        leaves(&place.base, &cache.join("turns/link.png"));
        std::fs::remove_dir_all(cache.join("turns")).unwrap();
        symlink(place.base.join("other"), cache.join("turns")).unwrap();
        leaves(&place.base, &cache.join("turns/c.png"));
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
            Resolver::new(&roots, &place.base, &ReadOptions::default()),
            Err(DataError::Io { .. })
        ));
    }
}
