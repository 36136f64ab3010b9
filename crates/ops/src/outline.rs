//! A device without values, which counts the memory that a pass would use.
//!
//! An outlined array has only a size. A complete step of an outlined model therefore runs in milliseconds, through the same code
//! as a real step. A [`Footprint`] reports the peak memory of the thread's rows. Values that are read back are zeros. The count
//! excludes the kernels' scratch memory of a few megabytes, except for the gradient of attention. With [`on_card`], values have
//! the dtypes that they have on a GPU, and its scratch memory counts too. [`crate::work`] lists the operations.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use omnigrpo_gpu::Dtype;

use crate::device::Device;
use crate::param::{Param, ParamDtype};
use crate::rows::{Data, Rows};

pub(crate) struct Outline;

/// Purpose of rows in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Held {
    /// Values that a pass works on or keeps for its backward pass.
    #[default]
    Activations,
    /// Outputs of towers and projectors, and values remembered from towers.
    Features,
    /// Keys and values of completions in flight.
    Cache,
    /// Gradients of weights.
    Gradients,
    /// Arena of the recorded decoding steps of a GPU.
    Recorded,
}

/// Peak bytes of rows by purpose, at four bytes per value, or at two for values that a GPU stores in bf16. Caches use separate memory, so their peak is counted separately. For
/// the other purposes, these are the bytes at the moment when their sum was largest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint([u64; 5]);

impl Footprint {
    /// Returns the bytes used for a purpose.
    pub fn of(&self, held: Held) -> u64 {
        self.0[held as usize]
    }

    /// Returns the total bytes of all purposes except caches.
    pub fn passes(&self) -> u64 {
        self.0.iter().sum::<u64>() - self.of(Held::Cache)
    }

    /// Returns the footprint with the larger [`Self::passes`], combined with the larger cache peak of the two.
    fn most(self, other: Self) -> Self {
        let mut most = if other.passes() > self.passes() { other } else { self };
        most.0[Held::Cache as usize] = self.of(Held::Cache).max(other.of(Held::Cache));
        most
    }
}

#[derive(Default)]
pub(crate) struct Count {
    held: Held,
    /// Dtype of keys and values if the passes are those of a GPU.
    card: Option<Dtype>,
    /// Number of free blocks of each size in the arena, while work in an arena runs.
    arena: Option<HashMap<u64, u64>>,
    now: Footprint,
    most: Footprint,
}

thread_local! {
    static COUNT: RefCell<Count> = RefCell::default();
}

/// Runs `f`, which works on rows of [`Device::Outline`], and returns the peak memory of rows. Rows that existed before the call
/// are included.
pub fn footprint<R>(f: impl FnOnce() -> R) -> (R, Footprint) {
    let before = COUNT.with_borrow_mut(|count| std::mem::replace(&mut count.most, count.now));
    let result = f();
    let most = COUNT.with_borrow_mut(|count| {
        let most = count.most;
        count.most = most.most(before);
        most
    });
    (result, most)
}

/// Runs `f` and counts its rows of [`Device::Outline`] for the purpose `held`.
pub fn holding<R>(held: Held, f: impl FnOnce() -> R) -> R {
    let before = COUNT.with_borrow_mut(|count| std::mem::replace(&mut count.held, held));
    let result = f();
    COUNT.with_borrow_mut(|count| count.held = before);
    result
}

/// Runs `f` and counts its rows of [`Device::Outline`] as a GPU stores them. `bf16` states whether its caches hold bf16.
pub fn on_card<R>(bf16: bool, f: impl FnOnce() -> R) -> R {
    let cache = if bf16 { Dtype::Bf16 } else { Dtype::F32 };
    let before = COUNT.with_borrow_mut(|count| count.card.replace(cache));
    let result = f();
    COUNT.with_borrow_mut(|count| count.card = before);
    result
}

/// Runs `f`, whose rows of [`Device::Outline`] are in an arena: a freed block serves only rows of the same size. The arena is
/// freed when `f` returns.
pub fn in_arena<R>(f: impl FnOnce() -> R) -> R {
    COUNT.with_borrow_mut(|count| count.arena = Some(HashMap::new()));
    let result = f();
    COUNT.with_borrow_mut(|count| {
        count.arena = None;
        count.now.0[Held::Recorded as usize] = 0;
    });
    result
}

/// Memory that is counted for as long as this value exists.
#[derive(Debug)]
pub(crate) struct Span {
    held: Held,
    bytes: u64,
    dtype: Dtype,
    in_arena: bool,
    /// The values in bf16, as a norm's gradient leaves them.
    rounded: Option<Arc<Span>>,
}

impl Span {
    pub(crate) fn new(elements: usize, dtype: Dtype) -> Self {
        let bytes = (dtype.size() * elements) as u64;
        COUNT.with_borrow_mut(|count| {
            let free = count.arena.as_mut().map(|arena| arena.entry(bytes).or_default());
            let (in_arena, held) = (free.is_some(), if free.is_some() { Held::Recorded } else { count.held });
            match free {
                Some(free) if *free > 0 => *free -= 1,
                _ => count.now.0[held as usize] += bytes,
            }
            count.most = count.most.most(count.now);
            Self { held, bytes, dtype, in_arena, rounded: None }
        })
    }

    fn like(&self) -> Self {
        holding(self.held, || Self::new(self.bytes as usize / self.dtype.size(), self.dtype))
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.bytes as usize
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        // The count no longer exists if the thread is ending.
        let _ = COUNT.try_with(|count| {
            let mut count = count.borrow_mut();
            match &mut count.arena {
                Some(arena) if self.in_arena => *arena.entry(self.bytes).or_default() += 1,
                _ => {
                    let now = &mut count.now.0[self.held as usize];
                    *now = now.saturating_sub(self.bytes);
                }
            }
        });
    }
}

impl Rows {
    pub(crate) fn on_outline(dtype: Dtype, rows: usize, cols: usize) -> Self {
        Self::over(Data::Outline(Arc::new(Span::new(rows * cols, dtype))), rows, cols)
    }

    /// Counts a copy if the rows are shared, since a real device copies shared rows before it writes to them.
    pub(crate) fn touch(&mut self) {
        let Data::Outline(span) = &mut self.data else { return };
        match Arc::get_mut(span) {
            Some(own) => own.rounded = None,
            None => *span = Arc::new(span.like()),
        }
    }

    /// Counts the gradient of a stream in bf16, which a GPU leaves beside that in f32.
    pub(crate) fn round_stream(&mut self, weight: &Param) {
        if let Data::Outline(span) = &mut self.data
            && let Some(own) = Arc::get_mut(span)
            && (own.dtype, factor(weight)) == (Dtype::F32, Dtype::Bf16)
        {
            let len = own.bytes as usize / own.dtype.size();
            own.rounded = Some(Arc::new(Span::new(len, Dtype::Bf16)));
        }
    }
}

/// Returns rows in another dtype: those that a norm's gradient left, or a copy.
pub(crate) fn rounded(x: &Rows, dtype: Dtype) -> Rows {
    match &x.data {
        Data::Outline(span) if let Some(low) = span.rounded.as_ref().filter(|low| low.dtype == dtype) => {
            Rows::over(Data::Outline(Arc::clone(low)), x.rows(), x.cols())
        }
        _ => Rows::on_outline(dtype, x.rows(), x.cols()),
    }
}

pub(crate) fn same(x: &Rows) -> Rows {
    like(x, x.rows(), x.cols())
}

/// Returns rows of another shape in the dtype of `x`.
pub(crate) fn like(x: &Rows, rows: usize, cols: usize) -> Rows {
    Rows::on_outline(dtype(x), rows, cols)
}

pub(crate) fn in_f32(rows: usize, cols: usize) -> Rows {
    Rows::on_outline(Dtype::F32, rows, cols)
}

pub(crate) fn dtype(x: &Rows) -> Dtype {
    match &x.data {
        Data::Outline(span) => span.dtype,
        _ => Dtype::F32,
    }
}

/// Returns whether the passes are those of a GPU ([`on_card`]).
pub fn is_on_card() -> bool {
    card().is_some()
}

/// Returns the dtype of caches if the passes are those of a GPU.
pub(crate) fn card() -> Option<Dtype> {
    COUNT.with_borrow(|count| count.card)
}

/// Returns the dtype of the factors in a product with a weight.
pub(crate) fn factor(weight: &Param) -> Dtype {
    match weight.dtype() {
        ParamDtype::Bf16 | ParamDtype::Quantised(_) if card().is_some() => Dtype::Bf16,
        _ => Dtype::F32,
    }
}

/// Returns the dtype of products with weights: bf16 if all factors are.
pub(crate) fn product<'a>(x: &Rows, mut weights: impl Iterator<Item = &'a Arc<Param>>) -> Dtype {
    match dtype(x) == Dtype::Bf16 && weights.all(|weight| factor(weight) == Dtype::Bf16) {
        true => Dtype::Bf16,
        false => Dtype::F32,
    }
}

/// Counts a gradient of the weight if the weight is trained. One that is stored in bf16 is in f32 while something is added.
pub(crate) fn reach(param: &Param) {
    drop(param.gradient(Device::Outline));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_keeps_a_block_for_each_size() {
        let rows = |n| Rows::zeros(Device::Outline, 1, n);
        let (_, seen) = footprint(|| {
            let outside = rows(100);
            in_arena(|| {
                drop(rows(2));
                let again = rows(2);
                drop((rows(2), rows(5), again));
                drop(rows(5));
            });
            drop(outside);
            // The arena has been freed.
            drop(rows(101));
        });
        assert_eq!((seen.of(Held::Recorded), seen.of(Held::Activations)), (8 + 8 + 20, 400));
    }
}
