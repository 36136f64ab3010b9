//! Division of outputs among threads. Small work stays on the calling thread.
//!
//! The size of the rayon pool sets the number of threads. The threads that run kernels are managed by the module `team`.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::team;

/// Number of elementary operations (multiply-adds, element updates) below which a second thread costs more than it saves.
/// The interpreter Miri looks for races between threads in small work.
const MIN_PARALLEL: usize = if cfg!(miri) { 1 } else { 1 << 15 };

/// Returns the number of threads that share the work of a kernel.
#[must_use]
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Calls `f` for every number below `count`. Uses several threads if `work` (elementary operations in total) is large.
///
/// A thread takes the next number when it finishes one, so that a slow or late thread does less of the work.
pub(crate) fn tasks(count: usize, work: usize, f: impl Fn(usize) + Sync) {
    let threads = rayon::current_num_threads().min(count);
    if threads <= 1 || work < MIN_PARALLEL {
        (0..count).for_each(f);
        return;
    }
    let next = AtomicUsize::new(0);
    team::run(threads, &|| {
        loop {
            // `Relaxed` is enough: the result of a task does not depend on the thread that runs it.
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

/// Calls `f` for consecutive ranges that cover `0..n`. Uses several threads if `work` (elementary operations in total) is large.
///
/// Range bounds are multiples of `align`. The results of `f` must not depend on the bounds.
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

/// Splits `0..n` into `parts` nearly equal parts and returns part `i`.
pub(crate) fn part(n: usize, parts: usize, i: usize) -> Range<usize> {
    i * n / parts..(i + 1) * n / parts
}

/// Maximum number of panels in a strip, which is the work of one task. With this number, the left operand is rarely read again.
const STRIP_PANELS: usize = 6;
/// Minimum number of equal strips per thread, so that no thread waits long for another.
#[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))]
const ROUNDS: usize = 2;
/// Minimum number of rows in each part when the rows of a strip are divided among threads.
const MIN_ROWS: usize = 96;

/// Division of the columns of several outputs (`widths`) and of `m` rows into tasks.
pub(crate) struct Strips<'a> {
    pub widths: &'a [usize],
    /// Number of columns in a panel.
    pub panel: usize,
    /// Maximum number of panels in a strip.
    pub panels: usize,
    pub row_parts: usize,
}

impl<'a> Strips<'a> {
    pub(crate) fn new(widths: &'a [usize], m: usize, panel: usize) -> Self {
        let threads = rayon::current_num_threads();
        let total: usize = widths.iter().map(|n| n.div_ceil(panel)).sum();
        // With several strips per thread, the wait for the last strip is short.
        let panels = total.div_ceil(threads * 6).clamp(1, STRIP_PANELS);
        Self { widths, panel, panels, row_parts: 1 }.divide_rows(m, 2 * threads)
    }

    /// Divides the columns into the smallest number of strips, each of at most `most` panels, that keeps all threads equally
    /// busy.
    #[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))]
    pub(crate) fn even(widths: &'a [usize], m: usize, panel: usize, most: usize) -> Self {
        let threads = rayon::current_num_threads();
        let total: usize = widths.iter().map(|n| n.div_ceil(panel)).sum();
        let rounds = total.div_ceil(threads * most).max(ROUNDS);
        let panels = total.div_ceil(threads * rounds).max(1);
        Self { widths, panel, panels, row_parts: 1 }.divide_rows(m, threads)
    }

    /// Divides the rows as well if there are fewer strips than `tasks`.
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

    /// Returns the index of the output, the columns and the part of the rows that belong to task `i`.
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

/// A mutable slice that several threads write in disjoint parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared<'a, T = f32> {
    data: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: `part` and `ptr` are the only access, and their callers ensure that threads use disjoint elements.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T: Copy> Shared<'a, T> {
    pub(crate) fn new(data: &'a mut [T]) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), life: PhantomData }
    }

    /// Wraps uninitialised memory, which is written only through [`Self::ptr`] and [`Self::clear`].
    ///
    /// # Safety
    /// While the result is alive, `len` elements must be writable, and nothing else may refer to them.
    pub(crate) unsafe fn raw(data: *mut T, len: usize) -> Self {
        Self { data, len, life: PhantomData }
    }

    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// Returns the slice without its first `start` elements.
    pub(crate) fn from(self, start: usize) -> Self {
        assert!(start <= self.len);
        Self { data: self.ptr(start), len: self.len - start, life: PhantomData }
    }

    /// Zeroes elements `start..start + len`. Two threads must not zero the same elements at the same time.
    pub(crate) fn clear(self, start: usize, len: usize) {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: the elements are in bounds, and the creator of this value keeps the memory writable.
        unsafe { self.ptr(start).write_bytes(0, len) };
    }

    /// Returns elements `start..start + len`, and panics if they are out of bounds.
    ///
    /// # Safety
    /// No other reference to these elements may be alive.
    #[inline(always)]
    pub(crate) unsafe fn part(self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: the assertion checks the bounds, and this function's contract guarantees exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }

    /// Returns a pointer to element `start`. The caller must ensure that it stays in bounds and has exclusive access.
    #[inline(always)]
    pub(crate) fn ptr(self, start: usize) -> *mut T {
        self.data.wrapping_add(start)
    }
}
