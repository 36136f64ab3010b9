//! Protects this program from third-party code and files: panics as values, errors with their causes as one text, files in
//! untrusted directories ([`inside`]), and private caches ([`cache`]). Also writes the names of settings in messages ([`Setting`])
//! and finds the names that users meant ([`names`]).
//!
//! Decoders, tokenizers and rewards receive input that they were not written for. If one panics, the caller reports the panic as
//! an error of that input. The process's panic hook runs first and would print a message for programmers. A hook that checks
//! [`is_guarded`] can stay silent in these cases.
//!
//! An error belongs to a row, to the machine or to the run ([`Fault`]). An unusable row costs only that row. A failure
//! of the machine is retried ([`retried`]). If it persists, it stops the run, which can be resumed without loss.
//!
//! Work for a client that leaves ends early ([`Errand`]).

mod fault;
mod plain;
mod setting;
mod wanted;

pub use fault::{Fault, MachineFailure, WAITS, fault, is_machine, retried};
pub use plain::plain;
pub use setting::{Setting, name_settings_by};
pub use wanted::{Errand, Unwanted, Wait, wanted};

pub mod cache;
pub mod inside;
pub mod names;

use std::cell::Cell;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Runs code and returns its panic as a value, for the caller to report.
///
/// The caller must not reuse values that the code was changing when it panicked.
///
/// # Errors
/// Returns the payload of the panic.
pub fn guarded<T>(run: impl FnOnce() -> T) -> std::thread::Result<T> {
    DEPTH.set(DEPTH.get() + 1);
    let result = catch_unwind(AssertUnwindSafe(run));
    DEPTH.set(DEPTH.get() - 1);
    result
}

/// Returns true if this thread is inside [`guarded`].
#[must_use]
pub fn is_guarded() -> bool {
    DEPTH.get() > 0
}

/// Returns the messages of an error and its causes in [`plain`] words, the outermost first. Omits a cause whose text is part of the
/// previous message, because some libraries repeat their causes.
pub fn messages(error: &dyn Error) -> Vec<String> {
    let mut said = vec![plain(&error.to_string()).into_owned()];
    let mut next = error.source();
    while let Some(cause) = next {
        let message = plain(&cause.to_string()).into_owned();
        if !said.iter().any(|before| before.contains(&message)) {
            said.push(message);
        }
        next = cause.source();
    }
    said
}

/// Joins [`messages`] into one text, for a table cell, a line or a message over the network.
pub fn told(error: &dyn Error) -> String {
    messages(error).join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An error that may repeat its cause.
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
    fn an_error_lists_each_cause_once() {
        let error = |outer, middle| {
            let inner = Failed("no such file", None);
            Failed(outer, Some(Box::new(Failed(middle, Some(Box::new(inner))))))
        };
        assert_eq!(told(&error("row 3", "a.png")), "row 3: a.png: no such file");
        assert_eq!(told(&error("row 3", "a.png: no such file")), "row 3: a.png: no such file");
        assert_eq!(messages(&error("row 3: a.png: no such file", "a.png")), ["row 3: a.png: no such file"]);
    }

    #[test]
    fn the_guard_mark_ends_with_a_panic() {
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
