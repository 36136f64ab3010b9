//! Signals that the system sends for what happens to files: one that is cut off while it is read where it lies, and one that may not
//! grow any more (`ulimit -f`).

/// Ends the process with a message where the system ends it with a bus error: a page of a mapped file is not there any more.
pub(crate) fn tell() {
    #[cfg(unix)]
    // SAFETY: the handler calls only what a handler may call.
    unsafe {
        libc::signal(libc::SIGBUS, ended as *const () as libc::sighandler_t);
    }
}

/// Has a file over the limit of its size fail to be written, as on a full disk, instead of ending the process without a word.
pub(crate) fn write_to_the_limit() {
    #[cfg(unix)]
    // SAFETY: to ignore a signal runs nothing.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

#[cfg(unix)]
extern "C" fn ended(_signal: libc::c_int) {
    const TOLD: &[u8] = b"\nerror: a file was cut off, or its disk went away, while its weights were in use where they lie\n  \
        expected: files of the model that stay as they are until the command has ended\n      \
        help: put the file back as it was and start the command again; a run goes on from its last checkpoint\n";
    // SAFETY: both may be called in a handler; the buffer is constant.
    unsafe {
        libc::write(libc::STDERR_FILENO, TOLD.as_ptr().cast(), TOLD.len());
        libc::_exit(1);
    }
}
