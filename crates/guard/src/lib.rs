//! Panics of other people's code as values.
//!
//! Decoders, tokenizers and rewards meet input that they were not made for. Where one panics, the caller tells it as an error
//! of that input. The process's panic hook would have told it before, in words for programmers; a program that asks
//! [`is_guarded`] in its hook can keep quiet there and nowhere else.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Runs code whose panics are told by the caller.
///
/// What the code was changing when it panicked is not to be used any more.
///
/// # Errors
/// The payload of a panic.
pub fn guarded<T>(run: impl FnOnce() -> T) -> std::thread::Result<T> {
    DEPTH.set(DEPTH.get() + 1);
    let result = catch_unwind(AssertUnwindSafe(run));
    DEPTH.set(DEPTH.get() - 1);
    result
}

/// Whether this thread is within [`guarded`].
#[must_use]
pub fn is_guarded() -> bool {
    DEPTH.get() > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_is_there_within_and_gone_after_a_panic() {
        assert!(!is_guarded());
        let payload = guarded(|| {
            assert!(is_guarded());
            assert!(guarded(is_guarded).unwrap());
            assert!(is_guarded(), "the inner one has ended");
            assert!(!std::thread::spawn(is_guarded).join().unwrap(), "another thread has its own");
            std::panic::resume_unwind(Box::new("mine"))
        })
        .map(|(): ()| ())
        .unwrap_err();
        assert_eq!(payload.downcast_ref::<&str>(), Some(&"mine"));
        assert!(!is_guarded());
    }
}
