//! Bodies of requests, in memory that goes back to the system when they are dropped.
//!
//! All bodies of a server together have a bound. A body takes its share as its bytes arrive, so a client that announces much and
//! sends little takes little. No body waits for the share of another one, so bodies cannot block each other: the body that does not
//! fit is refused. The allocator of the program has no part in this, because it may keep what it gets.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use memmap2::MmapMut;

/// Smallest memory of a body of unknown length, bytes.
const FIRST_BYTES: usize = 64 << 10;

/// Number of bytes that all bodies take together.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    taken: AtomicU64,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, taken: AtomicU64::new(0) })
    }

    fn take(&self, bytes: u64) -> bool {
        let fits = |taken: u64| taken.checked_add(bytes).filter(|taken| *taken <= self.limit);
        self.taken.fetch_update(Relaxed, Relaxed, fits).is_ok()
    }
}

/// Body of a request, or the part of it that has arrived.
#[derive(Debug)]
pub(crate) struct Body {
    memory: Option<MmapMut>,
    len: usize,
    budget: Arc<Budget>,
}

impl Body {
    /// Creates an empty body.
    pub(crate) fn new(budget: &Arc<Budget>) -> Self {
        Self { memory: None, len: 0, budget: Arc::clone(budget) }
    }

    /// Adds bytes. `announced` is the length of the whole body, if the client gave it.
    ///
    /// # Errors
    /// Returns an error if the bytes do not fit into the budget, or if the system has no memory.
    pub(crate) fn push(&mut self, bytes: &[u8], announced: usize) -> io::Result<()> {
        let full = || io::Error::new(io::ErrorKind::QuotaExceeded, "too many requests are being read");
        let end = self.len + bytes.len();
        if !self.budget.take(bytes.len() as u64) {
            return Err(full());
        }
        // From here on, dropping the body returns these bytes to the budget.
        let old = std::mem::replace(&mut self.len, end);
        let held = self.memory.as_ref().map_or(0, |memory| memory.len());
        if held < end {
            // The system provides pages only as they are written.
            let mut memory = MmapMut::map_anon(announced.max(end).max(2 * held).max(FIRST_BYTES))?;
            memory[..old].copy_from_slice(&self.memory.as_deref().unwrap_or_default()[..old]);
            self.memory = Some(memory);
        }
        if let Some(memory) = &mut self.memory {
            memory[old..end].copy_from_slice(bytes);
        }
        Ok(())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory.as_deref().unwrap_or_default()[..self.len]
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        self.budget.taken.fetch_sub(self.len as u64, Relaxed);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn bodies_share_a_budget_and_give_it_back() {
        let budget = Budget::new(200_000);
        let (mut one, mut two) = (Body::new(&budget), Body::new(&budget));
        let text: Vec<u8> = (0..150_000).map(|at| (at * 7 % 251) as u8).collect();
        // In pieces, without an announced length.
        text.chunks(9_999).for_each(|part| one.push(part, 0).unwrap());
        assert_eq!(one.bytes(), text);
        two.push(&text[..50_000], isize::MAX as usize).unwrap_err();
        assert_eq!(budget.taken.load(Relaxed), 200_000, "what the system refused counts until it is dropped");
        drop(two);
        let mut two = Body::new(&budget);
        two.push(&text[..50_000], 50_000).unwrap();
        let error = two.push(b"x", 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
        assert_eq!((two.bytes(), two.memory.as_ref().unwrap().len()), (&text[..50_000], FIRST_BYTES));
        drop(one);
        two.push(b"x", 0).unwrap();
        drop(two);
        assert_eq!(budget.taken.load(Relaxed), 0);
        assert!(Body::new(&budget).bytes().is_empty());
    }
}
