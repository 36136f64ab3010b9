//! Helper threads that join the calling thread in a kernel, and wait for the next kernel without sleeping.
//!
//! A decoder runs thousands of kernels per second with little work between them. A sleeping thread wakes too late to help (after
//! tens of microseconds, or more on a virtual machine). Helpers therefore spin for a while before they sleep. The caller never
//! waits for a helper that has not begun: it closes the job when its own share is done, and waits only for the helpers that have
//! joined.
//!
//! Only one job runs at a time. A kernel that is called while another kernel runs, from inside it or from another thread, runs
//! without helpers.

use std::any::Any;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use crate::profile;

/// Time that a helper spins before it goes to sleep.
const PATIENCE: Duration = Duration::from_micros(300);
/// Number of polls between two readings of the clock.
const LOOKS: usize = 64;

/// Bit of [`STATE`] that marks a job that helpers can still join. The bits below count the helpers inside the job, and the bits
/// above hold the number of the job.
const OPEN: u64 = 1 << 16;
const NEXT: u64 = 1 << 17;
const INSIDE: u64 = OPEN - 1;

static STATE: AtomicU64 = AtomicU64::new(0);
/// The current job. The pointer is valid while the job is open or a helper is inside.
static JOB: AtomicPtr<Job> = AtomicPtr::new(std::ptr::null_mut());
/// True while a caller uses the team.
static TAKEN: AtomicBool = AtomicBool::new(false);
static ASLEEP: AtomicUsize = AtomicUsize::new(0);
static HELPERS: Mutex<Vec<Thread>> = Mutex::new(Vec::new());
/// Nanoseconds that helpers worked while profiling was on.
static HELPED: AtomicU64 = AtomicU64::new(0);

/// Returns the time that helpers worked while profiling was on, summed over the helpers. Time spent spinning does not count.
pub(crate) fn helped() -> Duration {
    Duration::from_nanos(HELPED.load(Ordering::Relaxed))
}

struct Job {
    /// Function that calls the closure behind `work`.
    call: unsafe fn(*const ()),
    work: *const (),
    /// Number of helpers that can still join.
    wanted: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Runs `work` on the calling thread and on up to `threads − 1` helpers, and returns when all of them have finished. It is not
/// certain that a helper joins, so `work` itself must distribute its tasks.
pub(crate) fn run<F: Fn() + Sync>(threads: usize, work: &F) {
    if threads <= 1 || TAKEN.swap(true, Ordering::Acquire) {
        return work();
    }
    let helpers = gather(threads - 1);
    /// Calls the closure behind a pointer.
    ///
    /// # Safety
    /// `work` must point to a living `F`.
    unsafe fn call<F: Fn()>(work: *const ()) {
        // SAFETY: guaranteed by this function's contract.
        unsafe { (*work.cast::<F>())() }
    }
    let job = Job {
        call: call::<F>,
        work: std::ptr::from_ref(work).cast(),
        wanted: AtomicUsize::new(helpers),
        panic: Mutex::new(None),
    };
    {
        let _closing = Closing;
        JOB.store((&raw const job).cast_mut(), Ordering::Relaxed);
        // The job is closed and has no helpers inside, so this addition sets a new number and opens the job.
        STATE.fetch_add(NEXT | OPEN, Ordering::SeqCst);
        if ASLEEP.load(Ordering::SeqCst) > 0 {
            let threads = HELPERS.lock().unwrap_or_else(PoisonError::into_inner);
            threads.iter().take(helpers).for_each(Thread::unpark);
        }
        work();
    }
    let panic = job.panic.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(panic) = panic {
        resume_unwind(panic);
    }
}

/// Guard that closes the job and releases the team when it is dropped, even if the caller's share panics.
struct Closing;

impl Drop for Closing {
    fn drop(&mut self) {
        STATE.fetch_and(!OPEN, Ordering::AcqRel);
        for looks in 0.. {
            if STATE.load(Ordering::Acquire) & INSIDE == 0 {
                break;
            }
            // Yield, because a helper that was preempted needs a core.
            if looks % LOOKS == LOOKS - 1 { thread::yield_now() } else { spin_loop() }
        }
        TAKEN.store(false, Ordering::Release);
    }
}

/// Starts helpers until there are `count`. Returns a smaller number if the system refuses more threads.
fn gather(count: usize) -> usize {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    if MADE.load(Ordering::Relaxed) < count {
        let mut helpers = HELPERS.lock().unwrap_or_else(PoisonError::into_inner);
        while helpers.len() < count.min(INSIDE as usize) {
            let name = format!("kernel-{}", helpers.len() + 1);
            let Ok(handle) = thread::Builder::new().name(name).spawn(help) else { break };
            helpers.push(handle.thread().clone());
        }
        MADE.store(helpers.len(), Ordering::Relaxed);
    }
    MADE.load(Ordering::Relaxed).min(count)
}

/// Runs the endless loop of a helper.
fn help() {
    // Kernels that a helper calls count as part of the kernel that it helps.
    let _inside = profile::inside();
    let mut last = 0;
    loop {
        let state = wait(last);
        last = state / NEXT;
        if STATE.compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            // Other helpers joined or the job closed in the meantime, so poll again.
            last = last.wrapping_sub(1);
            continue;
        }
        // SAFETY: the state counts this thread as inside, so the caller keeps the job and its data alive until this thread
        // leaves.
        let job = unsafe { &*JOB.load(Ordering::Relaxed) };
        let joins = job.wanted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        if joins.is_ok() {
            let since = profile::enabled().then(Instant::now);
            // SAFETY: as above.
            let done = catch_unwind(AssertUnwindSafe(|| unsafe { (job.call)(job.work) }));
            if let Err(panic) = done {
                *job.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
            }
            if let Some(since) = since {
                HELPED.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
            }
        }
        STATE.fetch_sub(1, Ordering::Release);
    }
}

/// Waits for an open job whose number is not `last`, and returns the state that contains that number.
fn wait(last: u64) -> u64 {
    let open = |state: u64| state & OPEN > 0 && state / NEXT != last;
    let look = || Some(STATE.load(Ordering::Acquire)).filter(|&state| open(state));
    loop {
        let since = Instant::now();
        while since.elapsed() < PATIENCE {
            for _ in 0..LOOKS {
                if let Some(state) = look() {
                    return state;
                }
                spin_loop();
            }
        }
        ASLEEP.fetch_add(1, Ordering::SeqCst);
        // This load sees every job that was opened before this thread counted as asleep. A job that is opened later unparks this
        // thread.
        let state = Some(STATE.load(Ordering::SeqCst)).filter(|&state| open(state));
        if state.is_none() {
            thread::park();
        }
        ASLEEP.fetch_sub(1, Ordering::SeqCst);
        if let Some(state) = state {
            return state;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds up the numbers below `count`, one task per number.
    fn sum(threads: usize, count: usize) -> usize {
        let (next, total) = (AtomicUsize::new(0), AtomicUsize::new(0));
        run(threads, &|| {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= count {
                    break;
                }
                total.fetch_add(i, Ordering::Relaxed);
            }
        });
        total.into_inner()
    }

    #[test]
    fn every_task_is_done_once_however_many_threads_call() {
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for i in 0..2000 {
                        let threads = 1 + i % 5;
                        assert_eq!(sum(threads, 100), 4950);
                        if i % 500 == 0 {
                            // Wait until the helpers are asleep.
                            thread::sleep(4 * PATIENCE);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_kernel_inside_a_kernel_runs_alone() {
        let total = AtomicUsize::new(0);
        run(3, &|| {
            total.fetch_max(sum(3, 10), Ordering::Relaxed);
        });
        assert_eq!(total.into_inner(), 45);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_continues() {
        let caller = thread::current().id();
        for _ in 0..50 {
            let helped = AtomicBool::new(false);
            let result = catch_unwind(AssertUnwindSafe(|| {
                run(2, &|| {
                    if thread::current().id() != caller {
                        helped.store(true, Ordering::Relaxed);
                        resume_unwind(Box::new("helper"));
                    }
                    let since = Instant::now();
                    while !helped.load(Ordering::Relaxed) && since.elapsed() < Duration::from_millis(20) {
                        std::hint::spin_loop();
                    }
                });
            }));
            // If another test uses the team, there is no helper and nothing panics.
            assert_eq!(result.is_err(), helped.into_inner());
            assert_eq!(sum(2, 100), 4950);
        }
        let result = catch_unwind(|| run(2, &|| resume_unwind(Box::new("caller"))));
        assert!(result.is_err());
        assert_eq!(sum(2, 100), 4950);
    }
}
