//! Sums over ranks, where the numbers are.

use std::ops::Range;

use omnigrpo_gpu::Nccl;
use omnigrpo_ranks::{GradientSum, Ranks};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::gpu::Card;
use crate::rows::{Rows, Window};

/// Numbers that ranks sum: a block of equal length for each rank, on one device.
///
/// On the CPU, the engine of the ranks moves them. Between GPUs that are connected ([`Card::connect`]), they stay in GPU memory;
/// without a connection they go through main memory. The bits of an ordered sum are the same in all cases.
#[derive(Debug)]
pub struct Blocks {
    ranks: Ranks,
    device: Device,
    all: Rows,
    /// Received blocks.
    parts: Rows,
    /// Sum of this rank's block.
    own: Rows,
}

impl Blocks {
    /// Creates empty blocks.
    pub fn new(ranks: &Ranks, device: Device) -> Self {
        let [all, parts, own] = [(); 3].map(|()| Rows::zeros(device, 1, 0));
        Self { ranks: ranks.clone(), device, all, parts, own }
    }

    /// Returns an array of absent numbers ([`omnigrpo_ranks::sum::ABSENT`]) on the device of the blocks.
    pub fn absent(&self, len: usize) -> Rows {
        let mut rows = Rows::zeros(self.device, 1, len);
        // An absent number is −0.
        rows.scale(-1.0);
        rows
    }

    /// Begins blocks of `len` absent numbers.
    pub fn begin(&mut self, len: usize) {
        let count = len * self.ranks.size();
        // An absent number is −0.
        match self.device {
            Device::Cpu if self.all.len() == count => self.all.cpu_mut().fill(-0.0),
            Device::Gpu(card) if self.all.len() == count => {
                card.change(&mut self.all, |all| card.gpu().clear(all, 0..count));
                self.all.scale(-1.0);
            }
            _ => {
                self.all = self.absent(count);
                [self.parts, self.own] = [count, len].map(|len| Rows::zeros(self.device, 1, len));
            }
        }
    }

    /// Copies a range of an array's elements to the elements of the blocks that start at `at`.
    ///
    /// # Errors
    /// Returns an error if the range or its place is out of bounds.
    pub fn put(&mut self, at: usize, from: &Rows, range: Range<usize>) -> Result<()> {
        copy(&mut self.all, at, &from.to_device(self.device), range)
    }

    /// Copies elements of the blocks, from element `at` on, to a range of an array.
    ///
    /// # Errors
    /// Returns an error if the range or its place is out of bounds.
    pub fn get(&self, at: usize, to: &mut Rows, range: Range<usize>) -> Result<()> {
        copy(to, range.start, &self.all.to_device(to.device()), at..at + range.len())
    }

    /// Replaces the blocks by their sum over all ranks.
    ///
    /// # Errors
    /// Returns an error if the engine does. A GPU reports its failures later ([`Device::finish`]).
    pub fn sum(&mut self, order: GradientSum) -> Result<()> {
        let Some((card, nccl)) = self.connected() else {
            return self.in_main_memory(|ranks, all, parts| match order {
                GradientSum::Ordered => ranks.all_reduce(all, parts),
                GradientSum::Engine => ranks.sum_by_engine(all),
            });
        };
        if order == GradientSum::Ordered {
            self.fold(card, nccl);
        }
        card.change(&mut self.all, |all| match order {
            GradientSum::Ordered => nccl.all_gather(card.of(&self.own), all),
            GradientSum::Engine => nccl.sum(all),
        });
        Ok(())
    }

    /// Returns the sum of this rank's block over all ranks. The blocks are undefined afterwards.
    ///
    /// # Errors
    /// As for [`Self::sum`].
    pub fn sum_own(&mut self, order: GradientSum) -> Result<Vec<f32>> {
        if order == GradientSum::Engine {
            self.sum(order)?;
            let len = self.own.len();
            copy(&mut self.own, 0, &self.all, len * self.ranks.rank()..len * (self.ranks.rank() + 1))?;
        } else if let Some((card, nccl)) = self.connected() {
            self.fold(card, nccl);
        } else {
            return self.in_main_memory(|ranks, all, parts| Ok(ranks.reduce_scatter(all, parts)?.to_vec()));
        }
        Ok(self.own.to_vec())
    }

    /// Sums this rank's block over all ranks, on the GPU.
    fn fold(&mut self, card: Card, nccl: &Nccl) {
        card.change(&mut self.parts, |parts| {
            nccl.all_to_all(card.of(&self.all), parts);
            card.change(&mut self.own, |own| card.gpu().fold_blocks(own, parts));
        });
    }

    /// Returns the GPU of the blocks if it is connected.
    fn connected(&self) -> Option<(Card, &'static Nccl)> {
        let Device::Gpu(card) = self.device else { return None };
        Some((card, card.nccl()?))
    }

    /// Runs `f` in main memory, on the blocks and a buffer for received blocks.
    fn in_main_memory<R>(
        &mut self,
        f: impl FnOnce(&Ranks, &mut [f32], &mut [f32]) -> omnigrpo_ranks::Result<R>,
    ) -> Result<R> {
        if self.device == Device::Cpu {
            return Ok(f(&self.ranks, self.all.cpu_mut(), self.parts.cpu_mut())?);
        }
        let (mut all, mut parts) = (self.all.to_vec(), vec![0.0; self.parts.len()]);
        let done = f(&self.ranks, &mut all, &mut parts)?;
        self.all = Rows::upload(self.device, all, 1, parts.len())?;
        Ok(done)
    }
}

/// Copies a range of elements between arrays on the same device.
fn copy(to: &mut Rows, at: usize, from: &Rows, range: Range<usize>) -> Result<()> {
    let len = range.len();
    if range.end > from.len() || at + len > to.len() {
        let what = format!("elements {range:?} of {} to element {at} of {}", from.len(), to.len());
        return Err(Error::shape("blocks", what));
    }
    let device = to.device();
    if !matches!(device, Device::Cpu | Device::Gpu(_)) {
        return Err(Error::shape("blocks", format!("ranks exchange no numbers of {device}")));
    }
    device.check("blocks", from)?;
    device.backend().set_part(to, Window::at(0, at), from, Window::at(0, range.start), [1, len]);
    Ok(())
}
