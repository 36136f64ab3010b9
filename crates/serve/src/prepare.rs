//! Requests that wait for a thread that loads their media and builds their prompts.
//!
//! A slow medium takes one of these threads and delays nothing but other preparations. When the client of a request leaves, its errand
//! ends: downloads and decoders stop, and a request that waits leaves the queue.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use omnigrpo_guard::Errand;
use omnigrpo_http::Answer;
use tokio::sync::oneshot;

use crate::request::Plan;

/// Request that waits for its preparation.
pub(crate) struct Unprepared {
    pub(crate) plan: Plan,
    pub(crate) sender: oneshot::Sender<Answer>,
    /// Work of the preparation, which ends when the client leaves.
    pub(crate) errand: Errand,
    /// Random part of the response's id.
    pub(crate) id: String,
    /// Time of the request's arrival.
    pub(crate) since: Instant,
    /// True if the request takes much memory, with its media.
    pub(crate) is_large: bool,
    /// Room that its body takes among the waiting bytes.
    pub(crate) room: Room,
}

/// Bytes of a waiting request, which count until this value is dropped.
pub(crate) struct Room {
    waiting: Arc<AtomicU64>,
    bytes: u64,
}

impl Room {
    pub(crate) fn take(waiting: &Arc<AtomicU64>, bytes: u64) -> Self {
        waiting.fetch_add(bytes, Relaxed);
        Self { waiting: Arc::clone(waiting), bytes }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.waiting.fetch_sub(self.bytes, Relaxed);
    }
}

/// Requests in the order of their arrival.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    requests: VecDeque<Unprepared>,
    is_closed: bool,
}

impl Queue {
    fn locked(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, request: Unprepared) {
        self.locked().requests.push_back(request);
        self.changed.notify_one();
    }

    /// Waits for the next request; returns `None` if the queue is closed.
    pub(crate) fn pop(&self) -> Option<Unprepared> {
        let mut waiting = self.locked();
        while !waiting.is_closed {
            if let Some(next) = waiting.requests.pop_front() {
                return Some(next);
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Removes the requests whose client has left, and returns their number.
    pub(crate) fn remove_unwanted(&self) -> usize {
        let mut waiting = self.locked();
        let before = waiting.requests.len();
        waiting.requests.retain(|request| request.errand.check().is_ok());
        before - waiting.requests.len()
    }

    /// Returns all requests, and ends the threads that wait for more.
    pub(crate) fn close(&self) -> VecDeque<Unprepared> {
        let mut waiting = self.locked();
        waiting.is_closed = true;
        self.changed.notify_all();
        std::mem::take(&mut waiting.requests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiting_body_counts_until_its_request_is_gone() {
        let waiting = Arc::new(AtomicU64::new(5));
        let rooms = [Room::take(&waiting, 7), Room::take(&waiting, 11)];
        assert_eq!(waiting.load(Relaxed), 23);
        drop(rooms);
        assert_eq!(waiting.load(Relaxed), 5);
    }
}
