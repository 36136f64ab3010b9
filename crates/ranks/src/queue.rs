//! Work that ranks take piece by piece.
//!
//! Pieces belong to ranks. A rank takes its own pieces first, in order. A rank that has none left takes the last piece of the rank
//! with the most. The first rank keeps the list, and answers the others over their [`Lifeline`](crate::Lifeline), on a thread,
//! while it computes itself.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Error, Result};

/// Byte before a request for a piece, and before the answer.
pub(crate) const TAKE: u8 = b'+';
/// Answer if no piece is left.
const NONE: u32 = u32::MAX;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Work of all ranks.
#[derive(Debug, Default)]
pub(crate) struct Work {
    /// Pieces that nobody has taken, by their rank.
    left: Vec<VecDeque<u32>>,
    /// Ranks that have taken the pieces, in order.
    takers: Vec<usize>,
}

impl Work {
    fn open(&mut self, owners: &[usize]) {
        let ranks = owners.iter().max().map_or(0, |last| last + 1);
        self.left = vec![VecDeque::new(); ranks];
        self.takers.clear();
        (0..).zip(owners).for_each(|(piece, &owner)| self.left[owner].push_back(piece));
    }

    fn take(&mut self, rank: usize) -> Option<u32> {
        let own = self.left.get_mut(rank).and_then(VecDeque::pop_front);
        let piece = own.or_else(|| self.left.iter_mut().rev().max_by_key(|left| left.len())?.pop_back());
        self.takers.extend(piece.map(|_| rank));
        piece
    }

    /// Answers a request of a rank.
    pub(crate) fn answer(&mut self, rank: usize, to: &mut TcpStream) -> std::io::Result<()> {
        let [a, b, c, d] = self.take(rank).unwrap_or(NONE).to_le_bytes();
        to.write_all(&[TAKE, a, b, c, d])
    }
}

/// Passes an answer of the first rank on to [`Queue::take`].
pub(crate) fn receive(from: &mut TcpStream, to: &Sender<u32>) -> std::io::Result<()> {
    let mut piece = [0; 4];
    from.read_exact(&mut piece)?;
    // A rank that no longer waits needs no answer.
    let _ = to.send(u32::from_le_bytes(piece));
    Ok(())
}

/// Access of a rank to the work of all ranks.
#[derive(Clone)]
pub struct Queue(Place);

#[derive(Clone)]
enum Place {
    Here { work: Arc<Mutex<Work>>, rank: usize },
    AtFirst { peer: Arc<Mutex<TcpStream>>, answers: Arc<Mutex<Receiver<u32>>> },
}

impl Queue {
    pub(crate) fn here(work: Arc<Mutex<Work>>, rank: usize) -> Self {
        Self(Place::Here { work, rank })
    }

    pub(crate) fn at_first(peer: Arc<Mutex<TcpStream>>, answers: Arc<Mutex<Receiver<u32>>>) -> Self {
        Self(Place::AtFirst { peer, answers })
    }

    /// Opens the queue for pieces with these owners. All ranks call it, then an exchange, and only then [`Self::take`].
    pub fn open(&self, owners: &[usize]) {
        if let Place::Here { work, rank: 0 } = &self.0 {
            lock(work).open(owners);
        }
    }

    /// Returns the ranks that have taken the pieces, in order. Only the process that keeps the list knows them.
    pub fn takers(&self) -> Vec<usize> {
        match &self.0 {
            Place::Here { work, .. } => lock(work).takers.clone(),
            Place::AtFirst { .. } => Vec::new(),
        }
    }

    /// Takes the next piece; `None` if no piece is left.
    ///
    /// # Errors
    /// Returns an error if the connection to the first rank has ended.
    pub fn take(&self) -> Result<Option<usize>> {
        let failed =
            |what: String| Error::Lifeline { what: format!("the first rank hands out no work: {what}") };
        let piece = match &self.0 {
            Place::Here { work, rank } => lock(work).take(*rank),
            Place::AtFirst { peer, answers } => {
                let answers = lock(answers);
                lock(peer).write_all(&[TAKE]).map_err(|error| failed(error.to_string()))?;
                // The lifeline ends the process if the first rank is lost.
                let piece = answers.recv().map_err(|error| failed(error.to_string()))?;
                Some(piece).filter(|&piece| piece != NONE)
            }
        };
        Ok(piece.map(|piece| piece as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_takes_its_own_pieces_before_those_of_the_rank_with_most() {
        let mut work = Work::default();
        work.open(&[0, 0, 1, 1, 1, 1, 2]);
        let mut take = |rank| work.take(rank);
        assert_eq!([take(0), take(0)], [Some(0), Some(1)]);
        // Ranks 1 and 2 have four pieces and one.
        assert_eq!([take(0), take(2), take(2)], [Some(5), Some(6), Some(4)]);
        assert_eq!([take(1), take(1), take(1)], [Some(2), Some(3), None]);
        assert_eq!(take(0), None);
        work.open(&[1]);
        assert_eq!([work.take(0), work.take(1)], [Some(0), None]);
    }
}
