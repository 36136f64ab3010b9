//! Compiled files of kernels, and threads that compile them ahead of their use.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::nvrtc::{ENDS, Nvrtc};
use crate::sources::FILES;

/// The code of all files for one architecture. A file is compiled once, by the thread that needs it first.
pub(crate) struct Images {
    nvrtc: Nvrtc,
    pub arch: String,
    cache: PathBuf,
    files: [Mutex<Option<Arc<[u8]>>>; FILES.len()],
    ahead: Once,
}

impl Images {
    pub(crate) fn new(nvrtc: Nvrtc, arch: String, cache: &Path) -> Self {
        let files = std::array::from_fn(|_| Mutex::default());
        Self { nvrtc, arch, cache: cache.into(), files, ahead: Once::new() }
    }

    /// Returns the code of a file. Waits if another thread compiles it, then also beyond `until`.
    ///
    /// # Errors
    /// Returns an error if the file does not compile, or not until `until`.
    pub(crate) fn of(&self, file: usize, until: Option<Instant>) -> Result<Arc<[u8]>> {
        let (name, text) = FILES[file];
        let mut image = self.files[file].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = &*image {
            return Ok(Arc::clone(image));
        }
        let made: Arc<[u8]> = self.nvrtc.compile_cached(name, text, &self.arch, &self.cache, until)?.into();
        Ok(Arc::clone(image.insert(made)))
    }

    /// Compiles all files on several threads, until `until` at most. Returns the result of each file.
    pub(crate) fn all(&self, until: Instant) -> Vec<Result<()>> {
        let next = AtomicUsize::new(0);
        let results = FILES.iter().map(|_| OnceLock::new()).collect::<Vec<_>>();
        let take = || {
            let at = next.fetch_add(1, Ordering::Relaxed);
            Some((at, results.get(at)?))
        };
        let work = || {
            while let Some((at, result)) = take() {
                let _ = result.set(self.of(at, Some(until)).map(drop));
            }
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads()).map(|_| scope.spawn(work)).collect();
            // A thread that ended early has left its file without a result.
            threads.into_iter().for_each(|thread| drop(thread.join()));
        });
        let lost = |file: &str| {
            let what = "the compiler's thread ended early".into();
            Err(Error::Launch { kernel: file.into(), what })
        };
        (results.into_iter().zip(FILES))
            .map(|(it, (file, _))| it.into_inner().unwrap_or_else(|| lost(file)))
            .collect()
    }

    /// Begins to compile all files on other threads, the longest first. An error is that of the first launch, which compiles again.
    pub(crate) fn begin(self: &Arc<Self>) {
        self.ahead.call_once(|| {
            let mut order: Vec<usize> = (0..FILES.len()).collect();
            order.sort_by_key(|&at| Reverse(FILES[at].1.len()));
            let order = Arc::new((order, AtomicUsize::new(0)));
            end_at_exit();
            for _ in 0..threads() {
                let (images, order) = (Arc::clone(self), Arc::clone(&order));
                let work = move || {
                    let (files, next) = &*order;
                    while let Some(&file) = files.get(next.fetch_add(1, Ordering::Relaxed))
                        && !ENDS.load(Ordering::Acquire)
                    {
                        let _ = images.of(file, None);
                    }
                };
                // Without threads, launches compile.
                let mut ahead = AHEAD.lock().unwrap_or_else(PoisonError::into_inner);
                if !ENDS.load(Ordering::Acquire)
                    && let Ok(thread) = std::thread::Builder::new().name("kernels".into()).spawn(work)
                {
                    ahead.push(thread);
                }
            }
        });
    }
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(FILES.len())
}

/// Threads that compile ahead.
static AHEAD: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());

/// Makes the end of the process end the compilations, and wait for those that NVRTC does not end. A thread inside the compiler's library
/// would crash when that library takes its data down.
///
/// The library registers functions for the end of the process while it compiles. They run before those that were registered earlier, so
/// a registered function of our own could come too late. Values of the main thread are dropped before all of these functions.
fn end_at_exit() {
    static PROCESS: OnceLock<u32> = OnceLock::new();
    extern "C" fn end() {
        // A fork of the process has no such threads.
        if PROCESS.get() != Some(&std::process::id()) {
            return;
        }
        let threads = {
            let mut ahead = AHEAD.lock().unwrap_or_else(PoisonError::into_inner);
            ENDS.store(true, Ordering::Release);
            std::mem::take(&mut *ahead)
        };
        for thread in threads {
            let _ = thread.join();
        }
    }
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            end();
        }
    }
    thread_local! { static END: End = const { End } }
    // Another thread cannot give the main one a value. It registers a function, which is too late if a compilation has just begun.
    PROCESS.get_or_init(|| {
        // SAFETY: the function does not unwind: neither lock nor join panics.
        unsafe { libc::atexit(end) };
        std::process::id()
    });
    if is_main_thread() {
        END.with(|_| ());
    }
}

/// Returns whether the end of this thread is that of the process.
fn is_main_thread() -> bool {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: the call has no preconditions.
        let own = unsafe { libc::gettid() };
        u32::try_from(own) == Ok(std::process::id())
    }
    #[cfg(not(target_os = "linux"))]
    false
}
