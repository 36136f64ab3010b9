//! Work for somebody who may leave.
//!
//! Downloads and decoders run deep below the code that knows whether anybody waits for the result. They look at the [`Errand`] of their
//! thread and end early with [`Unwanted`]. Outside of an errand, every result is wanted.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Error of work whose result nobody waits for any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nobody waits for the result any more")]
pub struct Unwanted;

/// Work whose result somebody waits for. A clone is the same work.
#[derive(Clone, Debug, Default)]
pub struct Errand(Arc<State>);

#[derive(Debug, Default)]
struct State {
    is_over: AtomicBool,
    waits: Mutex<Vec<Weak<Wait>>>,
}

/// Call that ends a wait of an errand, such as one for bytes of the network. It is made at most once, from another thread, and not
/// after this value was dropped.
pub struct Wait(Mutex<Option<Box<dyn FnOnce() + Send>>>);

thread_local! {
    static CURRENT: RefCell<Option<Errand>> = const { RefCell::new(None) };
}

impl Errand {
    /// Runs code of this work on this thread.
    pub fn run<T>(&self, run: impl FnOnce() -> T) -> T {
        struct Restore(Option<Errand>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.replace(self.0.take());
            }
        }
        let _restore = Restore(CURRENT.replace(Some(self.clone())));
        run()
    }

    /// Returns the work that this thread does.
    #[must_use]
    pub fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Tells the work that nobody waits for its result.
    pub fn end(&self) {
        let waits = {
            let mut waits = self.0.waits.lock().unwrap_or_else(PoisonError::into_inner);
            self.0.is_over.store(true, Relaxed);
            std::mem::take(&mut *waits)
        };
        waits.iter().filter_map(Weak::upgrade).for_each(|wait| wait.call());
    }

    /// Returns an error if nobody waits for the result.
    ///
    /// # Errors
    /// Returns [`Unwanted`] after [`Self::end`].
    pub fn check(&self) -> Result<(), Unwanted> {
        if self.0.is_over.load(Relaxed) { Err(Unwanted) } else { Ok(()) }
    }

    /// Makes a call when the work ends, to end a wait. If the work has ended, the call is made now.
    #[must_use = "dropping the wait forgets the call"]
    pub fn at_end(&self, call: impl FnOnce() + Send + 'static) -> Arc<Wait> {
        let wait = Arc::new(Wait(Mutex::new(Some(Box::new(call)))));
        let mut waits = self.0.waits.lock().unwrap_or_else(PoisonError::into_inner);
        if self.check().is_ok() {
            waits.retain(|wait| wait.strong_count() > 0);
            waits.push(Arc::downgrade(&wait));
        } else {
            drop(waits);
            wait.call();
        }
        wait
    }
}

impl Wait {
    fn call(&self) {
        let call = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        call.into_iter().for_each(|call| call());
    }
}

impl std::fmt::Debug for Wait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Wait")
    }
}

/// Returns an error if this thread does work whose result nobody waits for any more.
///
/// # Errors
/// Returns [`Unwanted`] in an [`Errand`] that has ended.
pub fn wanted() -> Result<(), Unwanted> {
    CURRENT.with_borrow(|current| current.as_ref().map_or(Ok(()), Errand::check))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn an_errand_ends_for_its_thread_and_its_waits() {
        let (errand, inner) = (Errand::default(), Errand::default());
        assert_eq!((wanted(), Errand::current().is_none()), (Ok(()), true));
        let (told, heard) = channel();
        errand.run(|| {
            let tell = |what| {
                let told = told.clone();
                move || told.send(what).unwrap()
            };
            let _kept = Errand::current().unwrap().at_end(tell("kept"));
            drop(errand.at_end(tell("dropped")));
            assert_eq!(wanted(), Ok(()));
            std::thread::scope(|scope| {
                scope.spawn(|| errand.end()).join().unwrap();
            });
            assert_eq!(wanted(), Err(Unwanted));
            assert_eq!(inner.run(wanted), Ok(()), "another errand on the same thread");
            assert_eq!(wanted(), Err(Unwanted));
            let _late = errand.at_end(tell("late"));
            errand.end();
        });
        assert_eq!(wanted(), Ok(()));
        drop(told);
        assert_eq!(heard.iter().collect::<Vec<_>>(), ["kept", "late"]);
    }
}
