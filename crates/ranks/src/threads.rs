//! Ranks that are threads of one process, for tests.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::queue::Work;
use crate::{Engine, Error, Queue, Result};

/// Maximum time that a thread waits for the others. It turns a test that would hang into one that fails.
const LIMIT: Duration = Duration::from_secs(120);

/// One of several threads that are ranks. If it is dropped while other ranks wait for it, they get an error.
pub struct Threads {
    rank: usize,
    shared: Arc<Shared>,
}

struct Shared {
    size: usize,
    slots: Vec<Mutex<Vec<u8>>>,
    turn: Mutex<Turn>,
    work: Arc<Mutex<Work>>,
    changed: Condvar,
}

#[derive(Default)]
struct Turn {
    number: u64,
    arrived: usize,
    gone: Option<usize>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Threads {
    /// Creates the given number of ranks, one for each thread.
    pub fn new(size: usize) -> Vec<Self> {
        let slots = (0..size).map(|_| Mutex::default()).collect();
        let shared = Arc::new(Shared {
            size,
            slots,
            turn: Mutex::default(),
            work: Arc::default(),
            changed: Condvar::new(),
        });
        (0..size).map(|rank| Self { rank, shared: Arc::clone(&shared) }).collect()
    }

    /// Returns the access of this rank to the work of all ranks.
    pub fn queue(&self) -> Queue {
        Queue::here(Arc::clone(&self.shared.work), self.rank)
    }

    /// Publishes `own`, then calls `take` with the data of each rank.
    fn meet(&self, own: &[u8], mut take: impl FnMut(usize, &[u8]) -> Result<()>) -> Result<()> {
        *lock(&self.shared.slots[self.rank]) = own.to_vec();
        self.barrier()?;
        let taken = (0..self.shared.size).try_for_each(|rank| take(rank, &lock(&self.shared.slots[rank])));
        self.barrier()?;
        taken
    }
}

fn copy(to: &mut [u8], from: Option<&[u8]>) -> Result<()> {
    match from {
        Some(from) if from.len() == to.len() => to.copy_from_slice(from),
        other => {
            let got = other.map_or(0, <[u8]>::len);
            return Err(Error::Size { call: "a collective", got, unit: "bytes", expected: to.len() });
        }
    }
    Ok(())
}

impl Engine for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.shared.size
    }

    fn name(&self) -> String {
        format!("{} threads", self.size())
    }

    fn all_to_all(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let len = recv.len() / self.size();
        self.meet(send, |rank, from| {
            copy(&mut recv[rank * len..][..len], from.get(self.rank * len..(self.rank + 1) * len))
        })
    }

    fn all_gather(&self, own: &[u8], all: &mut [u8]) -> Result<()> {
        let len = all.len() / self.size();
        self.meet(own, |rank, from| copy(&mut all[rank * len..][..len], Some(from)))
    }

    fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<()> {
        let own = if self.rank == root { bytes.to_vec() } else { Vec::new() };
        self.meet(&own, |rank, from| if rank == root { copy(bytes, Some(from)) } else { Ok(()) })
    }

    fn barrier(&self) -> Result<()> {
        let mut turn = lock(&self.shared.turn);
        let own = turn.number;
        turn.arrived += 1;
        if turn.arrived == self.shared.size {
            (turn.number, turn.arrived) = (own + 1, 0);
            self.shared.changed.notify_all();
            return Ok(());
        }
        let waits = |turn: &mut Turn| turn.number == own && turn.gone.is_none();
        let waited = self.shared.changed.wait_timeout_while(turn, LIMIT, waits);
        let (turn, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let failed = |what| Err(Error::Engine { call: "waiting for the other threads", what });
        match turn.gone {
            _ if turn.number != own => Ok(()),
            Some(rank) => failed(format!("rank {rank} has ended")),
            None => failed(format!("they did not arrive within {} s", LIMIT.as_secs())),
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        lock(&self.shared.turn).gone.get_or_insert(self.rank);
        self.shared.changed.notify_all();
    }
}
