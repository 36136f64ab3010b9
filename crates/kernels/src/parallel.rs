//! Splits outputs over threads; small work stays on the calling thread.
//!
//! The size of the rayon pool sets the number of threads; the threads that kernels use belong to the module `team`.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::team;

/// Elementary operations (multiply-adds, element updates) below which a second thread costs more than it saves.
const MIN_PARALLEL: usize = 1 << 15;

/// Returns the number of threads that share the work of a kernel.
#[must_use]
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Calls `f` for every number below `count`, on several threads if `work` (elementary operations in total) is large.
///
/// A thread takes the next number when it finishes one, so that a slow or late thread does less.
pub(crate) fn tasks(count: usize, work: usize, f: impl Fn(usize) + Sync) {
    let threads = rayon::current_num_threads().min(count);
    if threads <= 1 || work < MIN_PARALLEL {
        (0..count).for_each(f);
        return;
    }
    let next = AtomicUsize::new(0);
    team::run(threads, &|| {
        loop {
            // `Relaxed` suffices: a task's result does not depend on the thread that runs it.
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                break;
            }
            f(i);
        }
    });
}

/// Applies `f` to every item and returns the results in order. Uses several threads if `work` (elementary operations in
/// total) is large.
pub fn map<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    work: usize,
    f: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let slots: Vec<Mutex<(Option<T>, Option<R>)>> =
        items.into_iter().map(|item| Mutex::new((Some(item), None))).collect();
    tasks(slots.len(), work, |i| {
        let mut slot = slots[i].lock().unwrap_or_else(PoisonError::into_inner);
        slot.1 = slot.0.take().map(&f);
    });
    slots.into_iter().filter_map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner).1).collect()
}

/// Calls `f` for consecutive ranges that cover `0..n`, on several threads if `work` (elementary operations in total) is
/// large. Range bounds are multiples of `align`. Results must not depend on the bounds.
pub(crate) fn ranges(n: usize, align: usize, work: usize, f: impl Fn(Range<usize>) + Sync) {
    if n == 0 {
        return;
    }
    let blocks = n.div_ceil(align);
    let pieces = if work < MIN_PARALLEL { 1 } else { (rayon::current_num_threads() * 4).min(blocks) };
    tasks(pieces, work, |i| {
        let range = part(blocks, pieces, i);
        let range = (range.start * align).min(n)..(range.end * align).min(n);
        if !range.is_empty() {
            f(range);
        }
    });
}

/// Returns part `i` of `0..n`, split into `parts` nearly equal parts.
pub(crate) fn part(n: usize, parts: usize, i: usize) -> Range<usize> {
    i * n / parts..(i + 1) * n / parts
}

/// Panels in a strip, the work of one task: enough to read the left operand rarely.
const STRIP_PANELS: usize = 6;
/// Minimum number of even strips per thread, so that no thread waits long for another.
#[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))]
const ROUNDS: usize = 2;
/// Number of rows below which a strip is not divided among threads.
const MIN_ROWS: usize = 96;

/// Division of `widths` (columns of several outputs) and of `m` rows into tasks.
pub(crate) struct Strips<'a> {
    pub widths: &'a [usize],
    /// Columns of a panel.
    pub panel: usize,
    /// Maximum number of panels in a strip.
    pub panels: usize,
    pub row_parts: usize,
}

impl<'a> Strips<'a> {
    pub(crate) fn new(widths: &'a [usize], m: usize, panel: usize) -> Self {
        let threads = rayon::current_num_threads();
        let total: usize = widths.iter().map(|n| n.div_ceil(panel)).sum();
        // Several strips per thread keep the wait for the last one short.
        let panels = total.div_ceil(threads * 6).clamp(1, STRIP_PANELS);
        Self { widths, panel, panels, row_parts: 1 }.divide_rows(m, 2 * threads)
    }

    /// Divides into the smallest number of strips, each of at most `most` panels, that keeps the threads equally busy.
    #[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))]
    pub(crate) fn even(widths: &'a [usize], m: usize, panel: usize, most: usize) -> Self {
        let threads = rayon::current_num_threads();
        let total: usize = widths.iter().map(|n| n.div_ceil(panel)).sum();
        let rounds = total.div_ceil(threads * most).max(ROUNDS);
        let panels = total.div_ceil(threads * rounds).max(1);
        Self { widths, panel, panels, row_parts: 1 }.divide_rows(m, threads)
    }

    /// Divides the rows too if there are fewer strips than `tasks`.
    fn divide_rows(mut self, m: usize, tasks: usize) -> Self {
        if rayon::current_num_threads() > 1 {
            self.row_parts = tasks.div_ceil(self.columns().max(1)).min(m / MIN_ROWS).max(1);
        }
        self
    }

    fn of(&self, width: usize) -> usize {
        width.div_ceil(self.panel).div_ceil(self.panels)
    }

    fn columns(&self) -> usize {
        self.widths.iter().map(|&n| self.of(n)).sum()
    }

    pub(crate) fn len(&self) -> usize {
        self.columns() * self.row_parts
    }

    /// Returns the output, its columns and the part of the rows of task `i`.
    pub(crate) fn get(&self, i: usize) -> (usize, Range<usize>, usize) {
        let (mut strip, row_part) = (i / self.row_parts, i % self.row_parts);
        for (at, &width) in self.widths.iter().enumerate() {
            let count = self.of(width);
            if strip < count {
                let panels = part(width.div_ceil(self.panel), count, strip);
                return (at, panels.start * self.panel..width.min(panels.end * self.panel), row_part);
            }
            strip -= count;
        }
        (0, 0..0, 0)
    }
}

/// A mutable slice whose disjoint parts several threads write.
#[derive(Clone, Copy, Debug)]
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

    /// Wraps uninitialised memory, which is written only through [`Self::ptr`] and [`Self::clear`].
    ///
    /// # Safety
    /// `len` elements are writable while the result is alive, and nothing else refers to them.
    pub(crate) unsafe fn raw(data: *mut f32, len: usize) -> Self {
        Self { data, len, life: PhantomData }
    }

    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// Skips the first `start` elements.
    pub(crate) fn from(self, start: usize) -> Self {
        assert!(start <= self.len);
        Self { data: self.ptr(start), len: self.len - start, life: PhantomData }
    }

    /// Zeroes elements `start..start + len`; one thread at a time may do so.
    pub(crate) fn clear(self, start: usize, len: usize) {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: in bounds; the creator of this value keeps the memory writable.
        unsafe { self.ptr(start).write_bytes(0, len) };
    }

    /// Returns elements `start..start + len`, bounds-checked.
    ///
    /// # Safety
    /// No other reference to these elements is alive.
    #[inline(always)]
    pub(crate) unsafe fn part(self, start: usize, len: usize) -> &'a mut [f32] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: in bounds by the assertion, exclusive by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }

    /// Returns a pointer to element `start`; the caller ensures bounds and exclusive access.
    #[inline(always)]
    pub(crate) fn ptr(self, start: usize) -> *mut f32 {
        self.data.wrapping_add(start)
    }
}
