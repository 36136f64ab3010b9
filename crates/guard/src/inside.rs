//! Opens files in directories from untrusted sources: a checkpoint, an adapter, a run directory, a cache.
//!
//! A link in such a directory may point to any file on this machine, and the program may copy, show or send what it
//! reads. Therefore a file is accepted only if its resolved path is inside the resolved directory. One known layout has
//! links that point outside: in a cache of `huggingface_hub`, `models--x/snapshots/REVISION/NAME` is a link to
//! `models--x/blobs/HASH`. Such links are followed into the `blobs` of the same entry and nowhere else.
//!
//! All other links out of the directory are refused. So is anything that is not a regular file (a pipe has no end, and opening a
//! device may trigger it). Hard links are not detected, because a hard link is the file itself. Only users who may already write
//! to the directory can create one.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result};
use std::path::{Path, PathBuf};

/// Error for a link that points outside its directory.
#[derive(Debug)]
struct LeadsOut {
    link: PathBuf,
    target: PathBuf,
    dir: PathBuf,
}

impl std::fmt::Display for LeadsOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { link, target, dir } = self;
        write!(
            f,
            "{} leads to {}, which is outside of {}; such a link is not followed: if you trust it, put a copy of the file in \
             its place",
            link.display(),
            target.display(),
            dir.display()
        )
    }
}

impl std::error::Error for LeadsOut {}

/// Returns true if a link that points outside its directory caused the error.
#[must_use]
pub fn leads_out(error: &Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<LeadsOut>())
}

/// Returns the real path of a file or folder in `dir`, given its relative path.
///
/// # Errors
/// Returns an error if the path does not exist, or a link points outside the directory.
pub fn resolve(dir: &Path, name: impl AsRef<Path>) -> Result<PathBuf> {
    let link = dir.join(name);
    let (home, target) = (dir.canonicalize()?, link.canonicalize()?);
    let within = target.starts_with(&home) || blobs_of(&home).is_some_and(|blobs| target.starts_with(blobs));
    match within {
        true => Ok(target),
        false => Err(Error::new(ErrorKind::PermissionDenied, LeadsOut { link, target, dir: dir.to_owned() })),
    }
}

/// Returns the `blobs` of the cache entry whose snapshot is the resolved directory. This path is not resolved again, so a
/// `blobs` that is itself a link counts as outside.
fn blobs_of(home: &Path) -> Option<PathBuf> {
    let snapshots =
        home.ancestors().find(|above| above.file_name().is_some_and(|name| name == "snapshots"))?;
    let entry = snapshots.parent()?;
    let name = entry.file_name()?.to_str()?;
    ["models--", "datasets--"].iter().any(|kind| name.starts_with(kind)).then(|| entry.join("blobs"))
}

/// Opens a file in `dir`, given its relative path.
///
/// # Errors
/// Returns the errors of [`resolve`], and an error if the path is not a regular file or is replaced during the call.
pub fn open(dir: &Path, name: impl AsRef<Path>) -> Result<File> {
    let real = resolve(dir, name)?;
    let expected = regular(std::fs::symlink_metadata(&real)?)?;
    let file = open_regular(&real)?;
    match same_file(&expected, &file.metadata()?) {
        true => Ok(file),
        false => Err(Error::other("the file was replaced while it was opened; try again")),
    }
}

/// Opens a file that a user named, such as a script or a file of settings. Links are followed.
///
/// # Errors
/// Returns an error if the path cannot be opened or is not a regular file: a pipe has no end, and a device may do anything.
pub fn open_named(path: &Path) -> Result<File> {
    regular(std::fs::metadata(path)?)?;
    open_regular(path)
}

/// Opens a regular file. A pipe may have replaced it since a check. With the flag, opening a pipe does not wait for a process at
/// the other end.
fn open_regular(path: &Path) -> Result<File> {
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        rustix::fs::OFlags::NONBLOCK.bits().cast_signed(),
    );
    let file = options.open(path)?;
    regular(file.metadata()?)?;
    Ok(file)
}

/// Opens a file of a run for writing, with the given options. The last component of `path` must not be a link, which
/// would redirect the output.
///
/// # Errors
/// Returns an error if the path cannot be opened, or is a link or anything else that is not a regular file.
pub fn open_to_write(path: &Path, options: &mut OpenOptions) -> Result<File> {
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()) {
        let message = format!("{} is a link, which is not followed; remove it", path.display());
        return Err(Error::new(ErrorKind::PermissionDenied, message));
    }
    // `NOFOLLOW` guards against a link that appears after the check, `NONBLOCK` against a pipe without a reader.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        options,
        (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits().cast_signed(),
    );
    let file = options.open(path)?;
    regular(file.metadata()?)?;
    Ok(file)
}

/// Opens a file like [`open`], in the directory of its path.
pub fn open_path(path: &Path) -> Result<File> {
    let (dir, name) = split(path);
    open(dir, name)
}

/// Returns the real path like [`resolve`], in the directory of the path. Fails unless the path is a regular file.
pub fn resolve_path(path: &Path) -> Result<PathBuf> {
    let (dir, name) = split(path);
    let real = resolve(dir, name)?;
    regular(std::fs::symlink_metadata(&real)?)?;
    Ok(real)
}

/// Reads a file in `dir`, given its relative path, if it has at most `limit_bytes`.
///
/// # Errors
/// Returns the errors of [`open`], and an error if the file is longer.
pub fn read(dir: &Path, name: impl AsRef<Path>, limit_bytes: u64) -> Result<Vec<u8>> {
    read_all(open(dir, name)?, limit_bytes)
}

/// Reads the text of a file that a user named, like [`open_named`], if it has at most `limit_bytes`.
///
/// # Errors
/// Returns the errors of [`open_named`], and an error if the file is longer or not UTF-8.
pub fn read_named(path: &Path, limit_bytes: u64) -> Result<String> {
    let bytes = read_all(open_named(path)?, limit_bytes)?;
    String::from_utf8(bytes).map_err(|error| Error::new(ErrorKind::InvalidData, error.utf8_error()))
}

fn read_all(file: File, limit_bytes: u64) -> Result<Vec<u8>> {
    let (mut num_bytes, mut bytes) = (file.metadata()?.len(), Vec::new());
    if num_bytes <= limit_bytes {
        file.take(limit_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
        num_bytes = bytes.len() as u64;
    }
    match num_bytes > limit_bytes {
        true => Err(Error::new(
            ErrorKind::FileTooLarge,
            format!("the file has {num_bytes} bytes, expected at most {limit_bytes}"),
        )),
        false => Ok(bytes),
    }
}

/// Reads a file like [`read`], in the directory of its path.
pub fn read_path(path: &Path, limit_bytes: u64) -> Result<Vec<u8>> {
    let (dir, name) = split(path);
    read(dir, name, limit_bytes)
}

/// Returns true if two paths lead to the same file, through any links; false if either does not exist.
#[must_use]
pub fn is_same_file(a: &Path, b: &Path) -> bool {
    let (Ok(one), Ok(other)) = (std::fs::metadata(a), std::fs::metadata(b)) else { return false };
    if cfg!(unix) {
        return same_file(&one, &other);
    }
    a.canonicalize().ok().zip(b.canonicalize().ok()).is_some_and(|(a, b)| a == b)
}

fn split(path: &Path) -> (&Path, &Path) {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    (dir, path.file_name().map_or(path, Path::new))
}

fn regular(metadata: Metadata) -> Result<Metadata> {
    if metadata.is_file() {
        Ok(metadata)
    } else {
        Err(Error::new(ErrorKind::InvalidInput, "not a regular file"))
    }
}

#[cfg(unix)]
fn same_file(a: &Metadata, b: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(not(unix))]
fn same_file(_: &Metadata, _: &Metadata) -> bool {
    true
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::os::unix::fs::symlink;

    use super::*;

    fn tree() -> (tempfile::TempDir, PathBuf) {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("model/sub")).unwrap();
        fs::write(root.join("secret"), "key").unwrap();
        fs::write(root.join("model/own"), "own").unwrap();
        (place, root)
    }

    fn text(dir: &Path, name: &str) -> Result<String> {
        read(dir, name, 16).map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn a_link_that_leads_out_is_refused_and_named() {
        let (_place, root) = tree();
        let model = root.join("model");
        symlink("../secret", model.join("LICENSE")).unwrap();
        symlink("own", model.join("alias")).unwrap();
        symlink("..", model.join("up")).unwrap();
        symlink("nowhere", model.join("dangling")).unwrap();
        symlink(&model, root.join("name")).unwrap();
        let error = text(&model, "LICENSE").unwrap_err();
        assert!(leads_out(&error));
        let expected =
            format!("{0}/model/LICENSE leads to {0}/secret, which is outside of {0}/model", root.display());
        assert!(error.to_string().starts_with(&expected), "{error}");
        for name in ["up/secret", "../secret", "/etc/passwd"] {
            assert!(leads_out(&text(&model, name).unwrap_err()), "{name}");
        }
        assert!(leads_out(&open_path(&model.join("LICENSE")).unwrap_err()));
        assert!(leads_out(&resolve_path(&model.join("LICENSE")).unwrap_err()));
        assert_eq!(text(&model, "own").unwrap(), "own");
        assert_eq!(text(&model, "alias").unwrap(), "own", "a link that stays inside");
        assert_eq!(text(&root.join("name"), "own").unwrap(), "own", "the directory itself may be a link");
        assert_eq!(text(&model, "dangling").unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(read(&model, "own", 2).unwrap_err().kind(), ErrorKind::FileTooLarge);
    }

    #[test]
    fn links_of_a_hub_cache_lead_to_the_blobs_of_their_entry_alone() {
        let (_place, root) = tree();
        let entry = root.join("hub/models--org--name");
        let snapshot = entry.join("snapshots/0123/sub");
        let other = root.join("hub/models--org--other");
        for dir in [&snapshot, &entry.join("blobs"), &other.join("blobs")] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(entry.join("blobs/abc"), "mine").unwrap();
        fs::write(other.join("blobs/abc"), "theirs").unwrap();
        symlink("../../../blobs/abc", snapshot.join("config.json")).unwrap();
        symlink("../../../../models--org--other/blobs/abc", snapshot.join("other")).unwrap();
        symlink(root.join("secret"), entry.join("blobs/out")).unwrap();
        symlink("../../../blobs/out", snapshot.join("twice")).unwrap();
        assert_eq!(text(&snapshot, "config.json").unwrap(), "mine");
        assert_eq!(text(snapshot.parent().unwrap(), "sub/config.json").unwrap(), "mine");
        for name in ["other", "twice"] {
            assert!(leads_out(&text(&snapshot, name).unwrap_err()), "{name}");
        }
        // An entry whose blobs are a user's home.
        let forged = root.join("hub/models--org--forged");
        fs::create_dir_all(forged.join("snapshots/1")).unwrap();
        symlink(&root, forged.join("blobs")).unwrap();
        symlink("../../blobs/secret", forged.join("snapshots/1/LICENSE")).unwrap();
        assert!(leads_out(&text(&forged.join("snapshots/1"), "LICENSE").unwrap_err()));
        // Outside a cache, such links count as pointing outside.
        fs::create_dir_all(root.join("plain/snapshots/1")).unwrap();
        fs::create_dir_all(root.join("plain/blobs")).unwrap();
        fs::write(root.join("plain/blobs/abc"), "x").unwrap();
        symlink("../../blobs/abc", root.join("plain/snapshots/1/a")).unwrap();
        assert!(leads_out(&text(&root.join("plain/snapshots/1"), "a").unwrap_err()));
    }

    #[test]
    fn only_regular_files_are_opened() {
        let (_place, root) = tree();
        let model = root.join("model");
        let pipe = model.join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        symlink(&pipe, root.join("to pipe")).unwrap();
        for name in ["pipe", "sub"] {
            assert_eq!(open(&model, name).unwrap_err().to_string(), "not a regular file", "{name}");
        }
        let socket = std::os::unix::net::UnixListener::bind(model.join("socket")).unwrap();
        for path in [&*pipe, &root.join("to pipe"), &model, &model.join("socket"), Path::new("/dev/zero")] {
            assert_eq!(
                read_named(path, 16).unwrap_err().to_string(),
                "not a regular file",
                "{}",
                path.display()
            );
        }
        drop(socket);
    }

    #[test]
    fn a_named_file_is_read_through_links_up_to_its_limit() {
        let (_place, root) = tree();
        symlink("../secret", root.join("model/link")).unwrap();
        assert_eq!(read_named(&root.join("model/link"), 3).unwrap(), "key");
        let error = read_named(&root.join("secret"), 2).unwrap_err();
        assert_eq!(error.to_string(), "the file has 3 bytes, expected at most 2");
        fs::write(root.join("binary"), [0xff]).unwrap();
        assert_eq!(read_named(&root.join("binary"), 16).unwrap_err().kind(), ErrorKind::InvalidData);
        assert_eq!(read_named(&root.join("nowhere"), 16).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn nothing_is_written_through_a_link() {
        let (_place, root) = tree();
        let append = |path: &Path| open_to_write(path, File::options().create(true).append(true));
        let (log, link) = (root.join("log"), root.join("link"));
        append(&log).unwrap().write_all(b"one").unwrap();
        append(&log).unwrap().write_all(b"two").unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), "onetwo");
        for target in ["secret", "nowhere"] {
            symlink(target, &link).unwrap();
            let error = append(&link).unwrap_err().to_string();
            assert!(error.ends_with("link is a link, which is not followed; remove it"), "{error}");
            fs::remove_file(&link).unwrap();
        }
        assert!(!root.join("nowhere").exists());
        let pipe = root.join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        assert!(append(&pipe).is_err());
    }

    #[test]
    fn one_file_has_many_paths() {
        let (_place, root) = tree();
        let own = root.join("model/own");
        fs::hard_link(&own, root.join("hard")).unwrap();
        symlink(&own, root.join("soft")).unwrap();
        fs::write(root.join("equal"), "own").unwrap();
        for name in ["hard", "soft", "model/../model/own"] {
            assert!(is_same_file(&own, &root.join(name)), "{name}");
        }
        for name in ["equal", "nowhere"] {
            assert!(!is_same_file(&own, &root.join(name)), "{name}");
        }
    }
}
