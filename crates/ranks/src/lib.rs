//! Processes that train one model together.
//!
//! *Ranks* are the processes of a run, numbered from 0. They all call the same methods of [`Ranks`] in the same order. An
//! [`Engine`] moves the bytes: none in one process ([`Alone`]), memory between threads of a test ([`Threads`]), or MPI ([`Mpi`]).
//!
//! Engines move bytes, and this crate adds numbers, in an order that depends only on the number of summands ([`sum`]). The result
//! is then the same for every engine, library, network and, with a [`Cascade`], number of ranks. [`Ranks::sum_by_engine`] is the
//! faster sum whose order the engine chooses.
//!
//! [`Launch`] recognises how a process was started. A [`Lifeline`] ends the run on all ranks if one of them ends, and [`Starters`] if
//! a process that started them does. The crate does not know tensors.
//!
//! ```
//! use omnigrpo_ranks::{Launch, Ranks};
//!
//! let ranks: Ranks = Launch::read(|_| None)?.connect()?;
//! let mut gradient = [1.0, 2.0];
//! ranks.all_reduce(&mut gradient, &mut [0.0; 2])?;
//! assert_eq!((gradient, ranks.size()), ([1.0, 2.0], 1));
//! # Ok::<(), omnigrpo_ranks::Error>(())
//! ```

mod error;
mod launch;
mod lifeline;
#[cfg(unix)]
mod mpi;
mod queue;
#[cfg(unix)]
mod starter;
pub mod sum;
mod threads;

use std::sync::Arc;

use bytemuck::Pod;
use omnigrpo_guard::{Fault, plain, told};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use error::{Error, Result};
pub use launch::{Launch, Launcher, Mpirun};
pub use lifeline::{Lifeline, PATIENCE};
#[cfg(unix)]
pub use mpi::Mpi;
pub use queue::Queue;
#[cfg(unix)]
pub use starter::Starters;
pub use sum::{Cascade, GradientSum};
pub use threads::Threads;

/// Transport between ranks. Every rank makes the same calls in the same order, with buffers of the same sizes.
pub trait Engine: Send + Sync {
    /// Returns the number of this rank.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn size(&self) -> usize;

    /// Returns the name and version of the engine.
    fn name(&self) -> String;

    /// Exchanges blocks. Both buffers have a block for each rank; block `r` of `send` becomes block `self.rank()` of `recv` on
    /// rank `r`.
    ///
    /// # Errors
    /// Returns an error if the engine does.
    fn all_to_all(&self, send: &[u8], recv: &mut [u8]) -> Result<()>;

    /// Copies the `own` of every rank into its block of `all`, on all ranks.
    ///
    /// # Errors
    /// Returns an error if the engine does.
    fn all_gather(&self, own: &[u8], all: &mut [u8]) -> Result<()>;

    /// Copies the `bytes` of rank `root` to all ranks.
    ///
    /// # Errors
    /// Returns an error if the engine does.
    fn broadcast(&self, root: usize, bytes: &mut [u8]) -> Result<()>;

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// Returns an error if the engine does.
    fn barrier(&self) -> Result<()>;

    /// Replaces `data` by the sum over all ranks in the engine's order; returns `None` if the engine has no sums.
    fn sum(&self, data: &mut [f32]) -> Option<Result<()>> {
        let _ = data;
        None
    }
}

/// Engine of a single process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Engine for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn name(&self) -> String {
        "one process".to_owned()
    }

    fn all_to_all(&self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        recv.copy_from_slice(send);
        Ok(())
    }

    fn all_gather(&self, own: &[u8], all: &mut [u8]) -> Result<()> {
        all.copy_from_slice(own);
        Ok(())
    }

    fn broadcast(&self, _: usize, _: &mut [u8]) -> Result<()> {
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }
}

/// Engine of a planned run: every exchange is an error.
struct Planned(usize);

impl Planned {
    fn refuse(call: &'static str) -> Result<()> {
        Err(Error::Engine { call, what: "the run is only planned".to_owned() })
    }
}

impl Engine for Planned {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        self.0
    }

    fn name(&self) -> String {
        "a plan".to_owned()
    }

    fn all_to_all(&self, _: &[u8], _: &mut [u8]) -> Result<()> {
        Self::refuse("all_to_all")
    }

    fn all_gather(&self, _: &[u8], _: &mut [u8]) -> Result<()> {
        Self::refuse("all_gather")
    }

    fn broadcast(&self, _: usize, _: &mut [u8]) -> Result<()> {
        Self::refuse("broadcast")
    }

    fn barrier(&self) -> Result<()> {
        Self::refuse("barrier")
    }
}

/// All ranks of a run, as one of them sees them. A clone is the same rank.
#[derive(Clone)]
pub struct Ranks(Arc<dyn Engine>, Option<Queue>);

/// Ranks of one machine, as one of them sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// Number of this rank among those of its machine.
    pub rank: usize,
    /// Number of ranks on this machine.
    pub size: usize,
    /// Number of machines.
    pub machines: usize,
    /// Number of this machine among them.
    pub machine: usize,
}

/// Variable with the number of the process that started `mpirun` and waits for it.
const PARENT: &str = "OMNIGRPO_PARENT";

/// Default number of elements that are exchanged at once: 16 MiB of f32.
pub const BUCKET: usize = 4 << 20;

impl Default for Ranks {
    /// Returns the only rank of a single process.
    fn default() -> Self {
        Self::new(Alone)
    }
}

impl std::fmt::Debug for Ranks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}, {}", self.rank(), self.size(), self.engine())
    }
}

impl Ranks {
    /// Creates ranks that an engine connects.
    pub fn new(engine: impl Engine + 'static) -> Self {
        Self(Arc::new(engine), None)
    }

    /// Lets the ranks take work piece by piece.
    #[must_use]
    pub fn with_queue(self, queue: Queue) -> Self {
        Self(self.0, Some(queue))
    }

    /// Returns the work of all ranks, if they can take it piece by piece.
    pub fn queue(&self) -> Option<&Queue> {
        self.1.as_ref()
    }

    /// Returns the first of `size` ranks of a run that is only planned. Every exchange with the others is an error.
    pub fn planned(size: usize) -> Self {
        Self::new(Planned(size))
    }

    /// Returns the number of this rank.
    pub fn rank(&self) -> usize {
        self.0.rank()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.0.size()
    }

    /// Returns true for the rank that writes the files and messages of the run.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Returns the name of the engine.
    pub fn engine(&self) -> String {
        self.0.name()
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// Returns an error if the engine does.
    pub fn barrier(&self) -> Result<()> {
        self.0.barrier()
    }

    /// Copies the value of rank `root` to all ranks.
    ///
    /// # Errors
    /// Returns an error if the engine does.
    pub fn broadcast<T: Pod>(&self, root: usize, data: &mut [T]) -> Result<()> {
        self.0.broadcast(root, bytemuck::cast_slice_mut(data))
    }

    /// Returns the `own` of each rank, all of the same length, one after the other.
    ///
    /// # Errors
    /// Returns an error if the engine does.
    pub fn all_gather<T: Pod>(&self, own: &[T]) -> Result<Vec<T>> {
        let mut all = vec![T::zeroed(); own.len() * self.size()];
        self.all_gather_into(own, &mut all)?;
        Ok(all)
    }

    /// Copies the `own` of each rank, all of the same length, one after the other into `all`.
    ///
    /// # Errors
    /// Returns an error if the sizes differ, or if the engine fails.
    pub fn all_gather_into<T: Pod>(&self, own: &[T], all: &mut [T]) -> Result<()> {
        self.0.all_gather(bytemuck::cast_slice(own), bytemuck::cast_slice_mut(all))
    }

    /// Returns the bytes of each rank. Their lengths may differ.
    ///
    /// # Errors
    /// Returns an error if the engine does.
    pub fn gather_each(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let lengths = self.all_gather(&[own.len() as u64])?;
        let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
        let mut padded = own.to_vec();
        padded.resize(longest.max(1), 0);
        let all = self.all_gather(&padded)?;
        let each = all.chunks(padded.len()).zip(&lengths);
        Ok(each.map(|(block, &length)| block[..length as usize].to_vec()).collect())
    }

    /// Returns the value of each rank, in the order of the ranks. Floating-point numbers keep their bits.
    ///
    /// # Errors
    /// Returns an error if the engine does, or if a rank runs another program.
    pub fn share<T: Serialize + DeserializeOwned>(&self, own: T) -> Result<Vec<T>> {
        if self.size() == 1 {
            return Ok(vec![own]);
        }
        let unreadable = |rank: usize, what: String| Error::Unreadable { rank, what };
        let mut bytes = Vec::new();
        let written = ciborium::into_writer(&own, &mut bytes).map_err(|error| {
            use ciborium::ser::Error as E;
            let what = match error {
                E::Io(error) => error.to_string(),
                E::Value(what) => plain(&what).into_owned(),
            };
            unreadable(self.rank(), what)
        });
        // A rank that cannot write its value takes part all the same: the others wait for it.
        let each = self.gather_each(if written.is_ok() { &bytes } else { &[] })?;
        written?;
        let read = |(rank, bytes): (usize, &Vec<u8>)| {
            ciborium::from_reader(bytes.as_slice()).map_err(|error| {
                use ciborium::de::Error as E;
                let what = match error {
                    E::Io(error) => format!("its value ends early ({error})"),
                    E::Syntax(at) => format!("its value is damaged at byte {at}"),
                    E::Semantic(_, what) => plain(&what).into_owned(),
                    E::RecursionLimitExceeded => "its value is nested too deeply".to_owned(),
                };
                unreadable(rank, what)
            })
        };
        each.iter().enumerate().map(read).collect()
    }

    /// Returns true on all ranks if `own` is true on one of them.
    ///
    /// # Errors
    /// Returns an error if the engine does.
    pub fn any(&self, own: bool) -> Result<bool> {
        Ok(self.all_gather(&[u8::from(own)])?.contains(&1))
    }

    /// Returns the value of each rank if no rank has failed. Otherwise all ranks get the failure of the first rank that has one.
    /// All ranks then leave a phase together, and none waits for one that has failed. `cause` returns the cause of an error. A
    /// failure that all ranks know from an earlier call keeps its rank and its text.
    ///
    /// # Errors
    /// Returns the first failure: unchanged on its own rank, as [`Error::Other`] on the others.
    pub fn share_all<T, E, C>(&self, own: Result<T, E>, cause: impl FnOnce(&E) -> C) -> Result<Vec<T>, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error> + std::error::Error + 'static,
        C: Into<Cause>,
    {
        if self.size() == 1 {
            return own.map(|own| vec![own]);
        }
        let (sent, failure) = match own {
            Ok(own) => (Ok(own), None),
            Err(error) => {
                let Cause { fault, is_known } = cause(&error).into();
                (Err((code(fault), is_known, told(&error))), Some(error))
            }
        };
        let mut all = Vec::with_capacity(self.size());
        let mut failures = Vec::new();
        for (rank, value) in self.share::<Result<T, (u8, bool, String)>>(sent)?.into_iter().enumerate() {
            match value {
                Ok(value) => all.push(value),
                Err((fault, is_known, what)) => failures.push((is_known, rank, fault, what)),
            }
        }
        // The rank on which a known failure happened has it unmarked.
        match (failures.into_iter().min_by_key(|&(is_known, rank, ..)| (is_known, rank)), failure) {
            (None, _) => Ok(all),
            (Some((_, rank, ..)), Some(own)) if rank == self.rank() => Err(own),
            (Some((_, rank, fault, what)), _) => {
                Err(Error::Other { rank, what, fault: of_code(fault) }.into())
            }
        }
    }

    /// Returns the result of this rank if no rank has failed, else the first failure, as [`Self::share_all`].
    ///
    /// # Errors
    /// Returns the first failure.
    pub fn agree<T, E, C>(&self, own: Result<T, E>, cause: impl FnOnce(&E) -> C) -> Result<T, E>
    where
        E: From<Error> + std::error::Error + 'static,
        C: Into<Cause>,
    {
        let (value, done) = match own {
            Ok(value) => (Some(value), Ok(())),
            Err(error) => (None, Err(error)),
        };
        self.share_all(done, cause)?;
        // A rank without a value has left with its error.
        value.ok_or_else(|| Error::Engine { call: "agree", what: "no result".to_owned() }.into())
    }

    /// Sums over all ranks in the order of [`sum::fold`], and returns the sum of this rank's block. `blocks` has a block of equal
    /// size for each rank, and `parts` is a buffer of the same size. [`sum::ABSENT`] stands for a number that a rank does not have.
    ///
    /// Each rank sends and receives (n − 1) / n of the bytes.
    ///
    /// # Errors
    /// Returns an error if the sizes differ, or if the engine fails.
    pub fn reduce_scatter<'p>(&self, blocks: &[f32], parts: &'p mut [f32]) -> Result<&'p [f32]> {
        self.0.all_to_all(bytemuck::cast_slice(blocks), bytemuck::cast_slice_mut(parts))?;
        Ok(sum::fold(parts, blocks.len() / self.size()))
    }

    /// Replaces `blocks`, which has a block of equal size for each rank, by the sum over all ranks in the order of [`sum::fold`].
    /// `parts` is a buffer of the same size.
    ///
    /// Each rank sends and receives 2 (n − 1) / n of the bytes, as in a ring.
    ///
    /// # Errors
    /// Returns an error if the sizes differ, or if the engine fails.
    pub fn all_reduce(&self, blocks: &mut [f32], parts: &mut [f32]) -> Result<()> {
        let own = self.reduce_scatter(blocks, parts)?;
        self.all_gather_into(own, blocks)
    }

    /// Replaces `data` by the sum over all ranks in the order that the engine chooses. Its bits can change with the number of
    /// ranks, the library, the network and, on some networks, between two calls. The relative difference from
    /// [`Self::all_reduce`] is at most the number of ranks times 6·10⁻⁸ of the sum of the absolute values.
    ///
    /// # Errors
    /// Returns an error if the engine does.
    pub fn sum_by_engine(&self, data: &mut [f32]) -> Result<()> {
        self.0.sum(data).unwrap_or_else(|| {
            let mut blocks = data.to_vec();
            blocks.resize(data.len().next_multiple_of(self.size()), 0.0);
            let mut parts = vec![0.0; blocks.len()];
            self.all_reduce(&mut blocks, &mut parts)?;
            data.copy_from_slice(&blocks[..data.len()]);
            Ok(())
        })
    }

    /// Returns how the ranks are distributed over machines. Ranks with the same host name share a machine.
    ///
    /// # Errors
    /// Returns an error if the engine does.
    pub fn local(&self) -> Result<Local> {
        let hosts = self.gather_each(host_name().as_bytes())?;
        let own = &hosts[self.rank()];
        let mut names: Vec<_> = hosts.iter().collect();
        names.sort();
        names.dedup();
        Ok(Local {
            rank: hosts[..self.rank()].iter().filter(|host| *host == own).count(),
            size: hosts.iter().filter(|host| *host == own).count(),
            machines: names.len(),
            machine: names.iter().position(|name| *name == own).unwrap_or(0),
        })
    }
}

/// Cause of a failure of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cause {
    /// Cause of the error.
    pub fault: Fault,
    /// True if the error is [`Error::Other`], so that all ranks know the failure.
    pub is_known: bool,
}

impl From<Fault> for Cause {
    fn from(fault: Fault) -> Self {
        Self { fault, is_known: false }
    }
}

/// Returns the number that stands for a cause on its way between ranks.
fn code(fault: Fault) -> u8 {
    match fault {
        Fault::Row => 0,
        Fault::Machine => 1,
        Fault::Run => 2,
    }
}

fn of_code(code: u8) -> Fault {
    [Fault::Row, Fault::Machine].get(usize::from(code)).copied().unwrap_or(Fault::Run)
}

/// Returns the name of this machine.
fn host_name() -> String {
    #[cfg(unix)]
    return rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    return String::new();
}
