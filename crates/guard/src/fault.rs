//! Classifies errors by cause: a row, the machine or the run.

use std::error::Error;
use std::io;
use std::time::{Duration, Instant};

/// Cause of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A row that can never be used. The caller skips it.
    Row,
    /// The machine: the same work may succeed later. The caller skips no row.
    Machine,
    /// The run: its settings or its state.
    Run,
}

/// A system error that counts as a failure of the machine regardless of its kind: a missing program, a thread that
/// cannot be started, an unavailable folder. Other errors contain it as their source.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct MachineFailure(pub io::Error);

/// Pauses between attempts after a failure of the machine: 6.3 s in total.
pub const WAITS: [Duration; 6] = [
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
    Duration::from_millis(800),
    Duration::from_millis(1600),
    Duration::from_millis(3200),
];

/// Returns true if a system error is a failure of the machine: a shortage of threads, file descriptors, memory or storage,
/// or a failing disk or network drive. A missing or unreadable file is not.
#[must_use]
pub fn is_machine(error: &io::Error) -> bool {
    use io::ErrorKind as K;
    // Timeouts of this program also produce some kinds (`TimedOut`, `WouldBlock`), so those are recognised by the system's
    // error number only.
    let by_kind = matches!(error.kind(), K::OutOfMemory | K::StorageFull | K::StaleNetworkFileHandle);
    #[cfg(unix)]
    let by_number = matches!(
        error.raw_os_error(),
        Some(
            libc::EAGAIN
                | libc::ENOMEM
                | libc::EMFILE
                | libc::ENFILE
                | libc::EIO
                | libc::ESTALE
                | libc::ENOSPC
                | libc::EDQUOT
                | libc::ENODEV
                | libc::ENXIO
                | libc::ETIMEDOUT
        )
    );
    #[cfg(not(unix))]
    let by_number = false;
    by_kind || by_number
}

/// Returns [`Fault::Machine`] if the error or one of its causes is a failure of the machine, else `otherwise`.
#[must_use]
pub fn fault(error: &(dyn Error + 'static), otherwise: Fault) -> Fault {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<MachineFailure>() || error.downcast_ref::<io::Error>().is_some_and(is_machine) {
            return Fault::Machine;
        }
        next = error.source();
    }
    otherwise
}

/// Calls the function again after each of the `waits`, as long as it returns a failure of the machine. Starts no attempt later
/// than the sum of the waits after the first one, so that slow attempts are not repeated.
///
/// # Errors
/// Returns the error of the last attempt, or the first error that is not a failure of the machine.
pub fn retried<T, E: Error + 'static>(
    waits: &[Duration],
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let (started, longest) = (Instant::now(), waits.iter().sum::<Duration>());
    for (number, wait) in waits.iter().enumerate() {
        match attempt() {
            Err(error) if fault(&error, Fault::Row) == Fault::Machine && started.elapsed() < longest => {
                if number == 0 {
                    tracing::warn!("{}; this is a failure of the machine; trying again", crate::told(&error));
                }
                std::thread::sleep(*wait);
            }
            other => return other,
        }
    }
    attempt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("row 3")]
    struct Outer(#[source] io::Error);

    #[derive(Debug, thiserror::Error)]
    #[error("no program")]
    struct Missing(#[source] MachineFailure);

    #[cfg(unix)]
    #[test]
    fn errors_of_the_system_are_classified_by_number() {
        for number in [11, 12, 24, 23, 5, 28, 116, 110] {
            let error = Outer(io::Error::from_raw_os_error(number));
            let expected = if cfg!(target_os = "linux") { Fault::Machine } else { fault(&error, Fault::Row) };
            assert_eq!(fault(&error, Fault::Row), expected, "{number}");
        }
        // A missing file, no permission, a directory, a file that grew too large, a name that is too long.
        for number in [2, 13, 21, 27, 36] {
            assert_eq!(
                fault(&Outer(io::Error::from_raw_os_error(number)), Fault::Row),
                Fault::Row,
                "{number}"
            );
        }
    }

    #[test]
    fn timeouts_of_others_are_not_failures_of_the_machine() {
        for (kind, expected) in [
            (io::ErrorKind::TimedOut, Fault::Run),
            (io::ErrorKind::WouldBlock, Fault::Run),
            (io::ErrorKind::NotFound, Fault::Run),
            (io::ErrorKind::OutOfMemory, Fault::Machine),
        ] {
            assert_eq!(fault(&Outer(kind.into()), Fault::Run), expected, "{kind:?}");
        }
        let missing = Missing(MachineFailure(io::ErrorKind::NotFound.into()));
        assert_eq!(fault(&missing, Fault::Row), Fault::Machine, "the marker outweighs the kind");
    }

    #[test]
    fn only_failures_of_the_machine_are_tried_again() {
        let waits = [Duration::from_millis(1); 3];
        let tried = |number: i32, good_at: u32| {
            let mut attempts = 0;
            let result = retried(&waits, || {
                attempts += 1;
                if attempts == good_at { Ok(()) } else { Err(Outer(io::Error::from_raw_os_error(number))) }
            });
            (attempts, result.is_ok())
        };
        assert_eq!(tried(2, 2), (1, false), "no such file");
        assert!(!tried(12, 9).1);
        assert_eq!(retried(&[Duration::from_secs(60)], || Ok::<_, Outer>(7)).unwrap(), 7);
        let mut attempts = 0;
        let waits = [Duration::from_millis(1), Duration::from_secs(3600)];
        let result = retried(&waits, || {
            attempts += 1;
            if attempts == 2 { Ok(()) } else { Err(Outer(io::Error::from_raw_os_error(12))) }
        });
        assert_eq!((attempts, result.is_ok()), (2, true));
    }
}
