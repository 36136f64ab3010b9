//! Folders of the user's cache, which no other user may write to.
//!
//! The program trusts its cache: it runs compiled code from it and does not parse cached headers again. Therefore a folder is
//! used only if it is not a link, belongs to the user of this process, and no other account can write to it.

use std::io::{Error, Result};
use std::path::Path;

/// Creates a private folder for the user, or checks that the existing one is private.
///
/// # Errors
/// Returns an error if the folder cannot be created, is a link, or belongs to another user. Callers that can work without a cache
/// should then do so.
pub fn own_folder(path: &Path) -> Result<()> {
    let refused = |what: &str| {
        Error::other(format!("{} {what}; set XDG_CACHE_HOME to a folder of your own", path.display()))
    };
    if let Some(above) = path.parent() {
        std::fs::create_dir_all(above)?;
    }
    let mut builder = std::fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    match builder.create(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = std::fs::symlink_metadata(path)?;
    if !found.is_dir() {
        return Err(refused("is a link or a file, and a cache is a folder"));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
        if found.uid() != rustix::process::geteuid().as_raw() {
            return Err(refused("belongs to another user"));
        }
        if found.mode() & 0o022 != 0 {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))?;
        }
    }
    Ok(())
}

/// Returns true if the folder exists, is not a link and belongs to the user of this process.
#[must_use]
pub fn is_own(path: &Path) -> bool {
    let Ok(found) = std::fs::symlink_metadata(path) else { return false };
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        if found.uid() != rustix::process::geteuid().as_raw() {
            return false;
        }
    }
    found.is_dir()
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn a_folder_is_the_users_alone_or_refused() {
        let place = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let new = place.path().join("omnigrpo/kernels");
        own_folder(&new).unwrap();
        assert_eq!(mode(&new), 0o700);
        own_folder(&new).unwrap();
        assert!(is_own(&new) && !is_own(&place.path().join("absent")));
        fs::set_permissions(&new, fs::Permissions::from_mode(0o777)).unwrap();
        own_folder(&new).unwrap();
        assert_eq!(mode(&new), 0o700, "others could write to it");
        let (victim, link) = (place.path().join("victim"), place.path().join("link"));
        fs::create_dir(&victim).unwrap();
        symlink(&victim, &link).unwrap();
        let error = own_folder(&link).unwrap_err().to_string();
        assert!(error.contains("is a link or a file"), "{error}");
        assert!(is_own(&victim) && !is_own(&link));
        fs::write(place.path().join("file"), "").unwrap();
        assert!(own_folder(&place.path().join("file")).is_err());
        assert!(own_folder(&place.path().join("file/below")).is_err());
        // Only root can change a folder's owner; other users find folders that root owns.
        let foreign = match rustix::process::geteuid().is_root() {
            true => {
                std::os::unix::fs::chown(&victim, Some(65_534), None).unwrap();
                victim
            }
            false => Path::new("/usr").to_owned(),
        };
        assert!(!is_own(&foreign));
        let error = own_folder(&foreign).unwrap_err().to_string();
        assert!(error.contains("belongs to another user"), "{error}");
    }
}
