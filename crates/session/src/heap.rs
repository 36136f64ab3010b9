//! Returning freed memory to the system.

/// Returns freed memory to the system when it is dropped. As the last field of a struct, it is dropped after the others.
pub(crate) struct Trim;

impl Drop for Trim {
    fn drop(&mut self) {
        trim();
    }
}

/// Returns freed memory to the system.
pub fn trim() {
    // SAFETY: the call has no preconditions.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::malloc_trim(0);
    }
}
