//! Lock that allows one process per run directory.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use omnigrpo_guard::inside;

use crate::Error;

const NAME: &str = ".lock";
/// Largest number of bytes read from the holder's description.
const HOLDER_BYTES: u64 = 1024;
/// Longest wait for a holder that is exiting. The system needs time to free the memory of a killed process, and it
/// releases the lock last.
const ENDING: Duration = Duration::from_secs(5);
/// Longest wait for any other holder. A process about to exit cannot be recognised from outside.
const GRACE: Duration = Duration::from_millis(200);

/// Exclusive write lock on a run directory. It is released when this value is dropped, and by the operating system if the process
/// ends in any other way. The lock file itself remains.
#[derive(Debug)]
pub struct RunLock {
    root: PathBuf,
    exclusive: bool,
    /// Open file that owns the lock; `None` if another rank of the run owns it.
    _file: Option<File>,
}

impl RunLock {
    /// Creates the directory if necessary and locks it. `holder` describes this process to others. If it begins with
    /// `process ID`, other processes wait a few seconds for a process that is exiting.
    ///
    /// # Errors
    /// Returns [`Error::Locked`] if another process keeps the lock, or an error if the directory cannot be written.
    pub fn acquire(root: &Path, holder: &str) -> Result<Self, Error> {
        let path = root.join(NAME);
        let open = || {
            fs::create_dir_all(root).map_err(|source| Error::io("create the directory", root, source))?;
            let options = &mut File::options();
            let options = options.read(true).write(true).create(true).truncate(false);
            inside::open_to_write(&path, options).map_err(|source| Error::io("open", &path, source))
        };
        let mut file = open()?;
        let started = Instant::now();
        let exclusive = loop {
            match file.try_lock() {
                Ok(()) if is_at(&file, &path) => break true,
                // Somebody deleted the directory in the meantime; another process may lock a new file.
                Ok(()) => file = open()?,
                Err(TryLockError::WouldBlock) => {
                    let holder = read_holder(&path);
                    let patience = if is_ending(&holder) { ENDING } else { GRACE };
                    if started.elapsed() >= patience {
                        let holder = if holder.is_empty() { "another process".to_owned() } else { holder };
                        return Err(Error::Locked { path: root.to_owned(), holder });
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(TryLockError::Error(source)) if source.kind() == io::ErrorKind::Unsupported => {
                    break false;
                }
                Err(TryLockError::Error(source)) => return Err(Error::io("lock", &path, source)),
            }
        };
        // A failure is ignored: the lock works without this text, and a full disk must not prevent a run from resuming.
        let _ = file.set_len(0).and_then(|()| file.write_all(holder.as_bytes()));
        Ok(Self { root: root.to_owned(), exclusive, _file: Some(file) })
    }

    /// Returns the access of a rank whose run is locked by its first rank.
    pub fn of_first_rank(root: &Path) -> Self {
        Self { root: root.to_owned(), exclusive: true, _file: None }
    }

    /// Returns true if a process holds the lock on a directory, and `None` if the file system has no locks.
    pub fn is_held(root: &Path) -> Option<bool> {
        let path = root.join(NAME);
        let Ok(file) = inside::open(root, &path) else { return Some(false) };
        // A run that starts at this moment tries again after a few milliseconds.
        match file.try_lock_shared() {
            Ok(()) => Some(false),
            Err(TryLockError::WouldBlock) => Some(true),
            Err(TryLockError::Error(_)) => None,
        }
    }

    /// Returns the directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns true if the lock keeps other processes out. Some network file systems do not support locks.
    pub fn is_exclusive(&self) -> bool {
        self.exclusive
    }
}

/// Returns true if `path` still names the open file.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |found: io::Result<fs::Metadata>| found.map(|m| (m.dev(), m.ino())).ok();
    id(file.metadata()).is_some_and(|own| Some(own) == id(fs::symlink_metadata(path)))
}

/// Returns true: the system does not delete an open file.
#[cfg(not(unix))]
fn is_at(_: &File, _: &Path) -> bool {
    true
}

/// Returns the holder's text. It is empty if the file cannot be read; the lock is refused either way.
fn read_holder(path: &Path) -> String {
    let mut text = Vec::new();
    let _ = File::open(path).and_then(|file| file.take(HOLDER_BYTES).read_to_end(&mut text));
    String::from_utf8_lossy(&text).chars().filter(|c| !c.is_control()).collect()
}

/// Returns true if the process named in the holder's text has exited, is exiting, or has a pending kill signal. Also returns true
/// for a process on another machine, which is not visible here; the only cost is a wait of a few seconds.
fn is_ending(holder: &str) -> bool {
    let id = holder.strip_prefix("process ").and_then(|rest| rest.split(' ').next()?.parse::<u32>().ok());
    let Some(id) = id.filter(|_| cfg!(target_os = "linux")) else { return false };
    let place = PathBuf::from(format!("/proc/{id}"));
    let (Ok(stat), Ok(status)) =
        (fs::read_to_string(place.join("stat")), fs::read_to_string(place.join("status")))
    else {
        return true;
    };
    // The name in parentheses may contain any character. After it come the state and, six fields later, the flags of
    // `linux/sched.h`.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    const PF_EXITING: u64 = 0x4;
    const SIGKILL: u64 = 1 << 8;
    let flags = fields.get(6).and_then(|flags| flags.parse().ok()).unwrap_or(0u64);
    let killed = status.lines().any(|line| {
        let pending = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"));
        pending.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).is_some_and(|set| set & SIGKILL != 0)
    });
    matches!(fields.first(), Some(&("Z" | "X"))) || flags & PF_EXITING != 0 || killed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_holder_at_a_time_and_names_it() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("run");
        let this = format!("process {} on host a since noon", std::process::id());
        assert_eq!(RunLock::is_held(&root), Some(false));
        let first = RunLock::acquire(&root, &this).unwrap();
        assert!(first.is_exclusive());
        assert_eq!(RunLock::is_held(&root), Some(true));
        let refused = RunLock::acquire(&root, "process 8").unwrap_err();
        assert!(matches!(&refused, Error::Locked { holder, .. } if *holder == this));
        assert!(refused.to_string().contains(&this), "{refused}");
        drop(first);
        assert_eq!(RunLock::is_held(&root), Some(false));
        let second = RunLock::acquire(&root, "process 9").unwrap();
        assert_eq!(fs::read_to_string(root.join(NAME)).unwrap(), "process 9", "the old name is gone");
        drop(second);
    }

    /// The second process waits for the lock while somebody deletes the directory.
    #[cfg(unix)]
    #[test]
    fn a_lock_on_a_deleted_file_is_not_taken() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("run");
        let first = RunLock::acquire(&root, "process").unwrap();
        let waiting = std::thread::spawn({
            let root = root.clone();
            move || RunLock::acquire(&root, "second")
        });
        std::thread::sleep(GRACE / 4);
        fs::remove_dir_all(&root).unwrap();
        drop(first);
        let second = waiting.join().unwrap().unwrap();
        assert!(matches!(RunLock::acquire(&root, "third"), Err(Error::Locked { .. })));
        drop(second);
    }

    /// The holder is killed. The system keeps its lock for a while, as it does when it has much memory to free.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_start_waits_for_a_holder_that_is_dead_and_for_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("run");
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let holder = format!("process {} on host a", child.id());
        assert!(!is_ending(&holder) && !is_ending("someone") && !is_ending(""));
        let held = RunLock::acquire(&root, &holder).unwrap();
        assert!(matches!(RunLock::acquire(&root, "process 9"), Err(Error::Locked { .. })));

        child.kill().unwrap();
        assert!(is_ending(&holder), "killed, and not waited for");
        let given_back = std::thread::spawn(move || {
            std::thread::sleep(2 * GRACE);
            drop(held);
        });
        drop(RunLock::acquire(&root, "process 9").unwrap());
        given_back.join().unwrap();
        child.wait().unwrap();
        assert!(is_ending(&holder), "gone");
    }
}
