//! Handling of two signals about files: a mapped file was truncated, or a file reached its size limit (`ulimit -f`).

/// Prints a message before a bus error ends the process. Such an error means that a page of a mapped file no longer exists.
pub(crate) fn tell() {
    #[cfg(unix)]
    // SAFETY: the handler calls only functions that are allowed in a signal handler.
    unsafe {
        libc::signal(libc::SIGBUS, ended as *const () as libc::sighandler_t);
    }
}

/// Makes a write beyond the size limit fail, as on a full disk, instead of ending the process without a message.
pub(crate) fn write_to_the_limit() {
    #[cfg(unix)]
    // SAFETY: ignoring a signal runs no code.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

#[cfg(unix)]
extern "C" fn ended(_signal: libc::c_int) {
    const TOLD: &[u8] =
        b"\nerror: a file was truncated, or its disk went away, while the model read its weights from it\n  \
        expected: model files that stay unchanged until the command has ended\n      \
        help: restore the file and start the command again; a run resumes from its last checkpoint\n";
    // SAFETY: both functions may be called in a handler, and the buffer is constant.
    unsafe {
        libc::write(libc::STDERR_FILENO, TOLD.as_ptr().cast(), TOLD.len());
        libc::_exit(1);
    }
}
