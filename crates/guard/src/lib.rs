//! What stands between this program and what others made: panics of their code as values, errors with their causes as one
//! text, files of their directories ([`inside`]), and caches that they cannot reach ([`cache`]).
//!
//! Decoders, tokenizers and rewards meet input that they were not made for. Where one panics, the caller tells it as an error
//! of that input. The process's panic hook would have told it before, in words for programmers; a program that asks
//! [`is_guarded`] in its hook can keep quiet there and nowhere else.
//!
//! An error belongs to a row, to the machine or to the run ([`Fault`]): a row that cannot be used costs that row, a failure of the
//! machine is retried ([`retried`]) and then stops the run, which loses nothing.

mod fault;

pub use fault::{Fault, MachineFailure, WAITS, fault, is_machine, retried};

pub mod cache;
pub mod inside;

use std::cell::Cell;
use std::error::Error;
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

/// What an error and its causes say, the outermost first. A cause that is repeated by what stands before it, as some libraries
/// do, is left out.
pub fn messages(error: &dyn Error) -> Vec<String> {
    let mut said = vec![error.to_string()];
    let mut next = error.source();
    while let Some(cause) = next {
        let message = cause.to_string();
        if !said.iter().any(|before| before.contains(&message)) {
            said.push(message);
        }
        next = cause.source();
    }
    said
}

/// [`messages`] as one text, for a place that has room for one: a cell, a line, a message that is sent.
pub fn told(error: &dyn Error) -> String {
    messages(error).join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An error that repeats its cause, or not.
    #[derive(Debug)]
    struct Failed(&'static str, Option<Box<Failed>>);

    impl std::fmt::Display for Failed {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Failed {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as _)
        }
    }

    #[test]
    fn an_error_is_told_with_its_causes_each_once() {
        let error = |outer, middle| {
            let inner = Failed("no such file", None);
            Failed(outer, Some(Box::new(Failed(middle, Some(Box::new(inner))))))
        };
        assert_eq!(told(&error("row 3", "a.png")), "row 3: a.png: no such file");
        assert_eq!(told(&error("row 3", "a.png: no such file")), "row 3: a.png: no such file");
        assert_eq!(messages(&error("row 3: a.png: no such file", "a.png")), ["row 3: a.png: no such file"]);
    }

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
