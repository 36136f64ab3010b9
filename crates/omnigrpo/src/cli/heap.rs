//! Heap of the process. It keeps freed memory and uses large pages.
//!
//! A training step allocates and frees the same large buffers again and again. With glibc's defaults, each buffer is mapped and
//! returned each time, which costs more than the arithmetic of small models. Kernels access the buffers in strides of whole rows,
//! so nearly every row is on another page. With pages of 4 KiB, address translation took 3 to 7 % of a step. Many systems
//! use large pages only for memory that requests them (`madvise`). Memory that glibc maps for small allocations of other
//! threads is unchanged.

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod glibc {
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Smallest allocation that checks whether the heap has grown, bytes.
    const LARGE: usize = 1 << 20;

    /// End of the part of the heap for which large pages were requested, on a page boundary; 0 before [`keep`].
    static ASKED: AtomicUsize = AtomicUsize::new(0);

    pub(crate) fn keep() {
        // SAFETY: called before any thread is started; only sets tuning parameters.
        unsafe {
            libc::mallopt(libc::M_MMAP_MAX, 0);
            libc::mallopt(libc::M_TRIM_THRESHOLD, -1);
            libc::mallopt(libc::M_TOP_PAD, 64 << 20);
        }
        ASKED.store(end(), Ordering::Relaxed);
    }

    pub(crate) fn share() {
        // SAFETY: only sets a tuning parameter, which glibc reads when a thread allocates for the first time.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }

    /// Returns the end of the heap, rounded down to a page. The end only grows, because nothing is trimmed.
    fn end() -> usize {
        // SAFETY: both calls only read values.
        let (end, page) = unsafe { (libc::sbrk(0) as usize, libc::sysconf(libc::_SC_PAGESIZE)) };
        end - end % usize::try_from(page).unwrap_or(1).max(1)
    }

    /// Requests large pages for the new part of the heap.
    fn ask(size: usize) {
        let asked = ASKED.load(Ordering::Relaxed);
        if size < LARGE || asked == 0 {
            return;
        }
        let end = end();
        if end > asked && ASKED.compare_exchange(asked, end, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            // SAFETY: advice about memory of the heap does not change its content. If the system refuses it, pages stay small.
            unsafe { libc::madvise(asked as *mut _, end - asked, libc::MADV_HUGEPAGE) };
        }
    }

    struct Heap;

    #[global_allocator]
    static HEAP: Heap = Heap;

    // SAFETY: every method forwards to the system allocator.
    unsafe impl GlobalAlloc for Heap {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            // SAFETY: the caller fulfils the same contract.
            let memory = unsafe { System.alloc(layout) };
            ask(layout.size());
            memory
        }

        unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
            // SAFETY: the caller fulfils the same contract.
            let memory = unsafe { System.alloc_zeroed(layout) };
            ask(layout.size());
            memory
        }

        unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
            // SAFETY: the caller fulfils the same contract.
            let memory = unsafe { System.realloc(memory, layout, size) };
            ask(size);
            memory
        }

        unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
            // SAFETY: the caller fulfils the same contract.
            unsafe { System.dealloc(memory, layout) };
        }
    }
}

/// Configures the heap. Must be called before any thread is started.
pub(crate) fn keep() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    glibc::keep();
}

/// Lets all threads share one heap. Must be called before any thread is started. Otherwise glibc gives threads heaps of their own, and
/// [`trim`] cannot return the free memory at the end of these.
pub(crate) fn share() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    glibc::share();
}
