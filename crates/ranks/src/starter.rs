//! Watch over the processes that started a rank.
//!
//! A launcher that is killed leaves its ranks, and so does the process that waits for `mpirun`. Nobody would then see how the run
//! goes on or ends. Each rank therefore looks after both: its own parent, which changes when the launcher ends, and the process whose
//! number is in a variable ([`Launch::parent`](crate::Launch::parent)).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, getppid, test_kill_process};

use crate::{Error, Result};

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(500);

/// Watch over the processes that started this one. It ends when it is dropped.
pub struct Starters(Arc<AtomicBool>);

impl Starters {
    /// Calls `ended` once, on another thread, if the parent of this process ends, or the process with the number `parent`. The
    /// argument names the process.
    ///
    /// # Errors
    /// Returns an error if no thread can be started.
    pub fn watch(parent: Option<u32>, ended: impl FnOnce(&str) + Send + 'static) -> Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let launcher = getppid();
        let parent = parent.and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw).map(Process::open);
        let stop = Arc::clone(&over);
        let look = move || {
            while !stop.load(Ordering::SeqCst) {
                let lost = match &parent {
                    _ if getppid() != launcher => Some(("its launcher", launcher)),
                    Some(parent) if parent.has_ended() => {
                        Some(("the process that started mpirun", Some(parent.id)))
                    }
                    _ => None,
                };
                if let Some((what, id)) = lost {
                    return ended(&format!("{what} (process {}) has ended", Pid::as_raw(id)));
                }
                thread::sleep(PAUSE);
            }
        };
        let started = thread::Builder::new().name("starters".to_owned()).spawn(look);
        started.map_err(|e| Error::Lifeline { what: format!("the launcher cannot be watched: {e}") })?;
        Ok(Self(over))
    }
}

impl Drop for Starters {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A process that is not a child of this one.
struct Process {
    id: Pid,
    /// Handle of the process. A number may belong to a later process, and stays in use until somebody collects the status.
    #[cfg(target_os = "linux")]
    handle: Option<std::os::fd::OwnedFd>,
}

impl Process {
    fn open(id: Pid) -> Self {
        #[cfg(target_os = "linux")]
        let handle = rustix::process::pidfd_open(id, rustix::process::PidfdFlags::empty()).ok();
        Self {
            id,
            #[cfg(target_os = "linux")]
            handle,
        }
    }

    fn has_ended(&self) -> bool {
        #[cfg(target_os = "linux")]
        if let Some(handle) = &self.handle {
            use rustix::event::{PollFd, PollFlags, Timespec, poll};
            // The handle can be read when the process has ended.
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            return poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0);
        }
        test_kill_process(self.id) == Err(Errno::SRCH)
    }
}
