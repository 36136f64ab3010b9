//! Splitting outputs over the rayon pool, and staying on the calling thread when the work is small.

use std::marker::PhantomData;
use std::ops::Range;

use rayon::prelude::*;

/// Elementary operations (multiply-adds, element updates) below which waking a second thread costs more than it saves.
const MIN_PARALLEL: usize = 1 << 16;

/// Calls `f` for consecutive ranges that cover `0..n`, on several threads if `work` (elementary operations in total) is
/// large. Range bounds are multiples of `align`. Results must not depend on where ranges are cut.
pub(crate) fn ranges(n: usize, align: usize, work: usize, f: impl Fn(Range<usize>) + Sync) {
    if n == 0 {
        return;
    }
    let threads = rayon::current_num_threads();
    let blocks = n.div_ceil(align);
    let pieces = (threads * 4).min(blocks).min(work / (MIN_PARALLEL / 2));
    if threads == 1 || pieces <= 1 {
        f(0..n);
        return;
    }
    (0..pieces).into_par_iter().for_each(|i| {
        let cut = |i: usize| (i * blocks / pieces * align).min(n);
        let range = cut(i)..cut(i + 1);
        if !range.is_empty() {
            f(range);
        }
    });
}

/// A mutable slice whose disjoint parts are written by several threads.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a> {
    data: *mut f32,
    len: usize,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: the only access is through `part` and `ptr`, whose callers keep threads on disjoint elements.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub(crate) fn new(data: &'a mut [f32]) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), life: PhantomData }
    }

    /// Elements `start..start + len`, bounds checked.
    ///
    /// # Safety
    /// No other reference to these elements is alive.
    #[inline(always)]
    pub(crate) unsafe fn part(self, start: usize, len: usize) -> &'a mut [f32] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: in bounds by the assertion, exclusive by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }

    /// A pointer to element `start`; whoever uses it sees to bounds and exclusive access.
    #[inline(always)]
    pub(crate) fn ptr(self, start: usize) -> *mut f32 {
        self.data.wrapping_add(start)
    }
}
