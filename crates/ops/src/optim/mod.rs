//! The optimizer's update of a weight, and the state of that update.

mod cpu;
mod gpu;
mod outline;
mod state_file;
#[cfg(feature = "twin")]
mod twin;

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use omnigrpo_kernels::buffer;
use omnigrpo_kernels::moments::{Codes, Form};
use omnigrpo_kernels::optim::{self, AdamW, Rounding, Updated, adamw};

use self::state_file::StateFile;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::param::{Param, ParamDtype, ValuesMut};
use crate::rows::Rows;

/// The optimizer.
pub(crate) trait OptimOps {
    /// Returns the sum of squares of all elements.
    fn sum_of_squares(&self, x: &Rows) -> f64;
    /// Applies one AdamW step to a weight, using its gradient.
    fn adamw(&self, param: &Param, grad: &Rows, moments: &mut Moments, step: &Step) -> Result<()>;
}

/// Arrays of the optimizer's state for one weight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Numbers {
    /// First moment.
    pub m: Vec<f32>,
    /// Second moment.
    pub v: Vec<f32>,
    /// Master copy of a bf16 weight in f32. Empty for other weights, and for bf16 weights that are updated without a master.
    pub master: Vec<f32>,
}

/// The optimizer's state for one weight: in main memory, in a file, or on the GPU that updates the weight; see [`Step::offload`].
#[derive(Debug, Default)]
pub struct Moments {
    /// Number of updates applied to this weight.
    pub step: u64,
    /// Arrays that the CPU updates. They are empty while the state is on a GPU.
    host: OnHost,
    card: Option<gpu::State>,
    /// Folder of the file for the arrays that the CPU updates.
    folder: Option<Arc<Path>>,
}

/// Number of values of a master that are copied at a time.
const PIECE: usize = 1 << 20;

#[derive(Debug)]
enum OnHost {
    Memory(Numbers),
    /// Both moments in 8 bits, and the master.
    Codes([Codes; 2], Vec<f32>),
    File(StateFile),
}

/// Forms of first and second moment in 8 bits.
const FORMS: [Form; 2] = [Form::Signed, Form::Unsigned];

/// Weights with fewer values have moments in f32: they take little memory, and norms and biases are sensitive. Ranks cut weights at
/// multiples of this, so blocks of codes do not depend on their number.
pub const LEAST_CODED: usize = optim::SQUARES_BLOCK;

impl Default for OnHost {
    fn default() -> Self {
        Self::Memory(Numbers::default())
    }
}

impl OnHost {
    /// Returns the number of values.
    fn len(&self) -> usize {
        match self {
            Self::Memory(numbers) => numbers.m.len(),
            Self::Codes([m, _], _) => m.codes.len(),
            Self::File(file) => file.arrays()[0].len(),
        }
    }

    /// Returns first moment (0), second moment (1) or master (2).
    fn array(&self, array: usize) -> Cow<'_, [f32]> {
        match self {
            Self::Memory(Numbers { m, v, master }) => [m, v, master][array].into(),
            Self::Codes(_, master) if array == 2 => master.into(),
            Self::Codes(moments, _) => moments[array].decode(FORMS[array]).into(),
            Self::File(file) => file.arrays()[array].into(),
        }
    }

    /// Converts the moments to 8 bits or to f32. In files, they are in f32.
    fn in_form(self, coded: bool) -> Self {
        match (self, coded) {
            (Self::Memory(Numbers { m, v, master }), true) => {
                let m = Codes::encode(&m, FORMS[0]);
                Self::Codes([m, Codes::encode(&v, FORMS[1])], master)
            }
            (codes @ Self::Codes(..), false) => Self::Memory(codes.numbers()),
            (kept, _) => kept,
        }
    }

    /// Converts the state to the form for saving.
    fn numbers(self) -> Numbers {
        match self {
            Self::Memory(numbers) => numbers,
            other => {
                let [m, v, master] = [0, 1, 2].map(|array| other.array(array).into_owned());
                Numbers { m, v, master }
            }
        }
    }
}

/// The state of a weight in main memory, for an update by the CPU.
pub(crate) struct HostState<'a> {
    pub moments: HostMoments<'a>,
    /// Empty without a master.
    pub master: &'a mut [f32],
}

pub(crate) enum HostMoments<'a> {
    F32([&'a mut [f32]; 2]),
    Codes(&'a mut [Codes; 2]),
}

impl HostMoments<'_> {
    /// Returns a range of both moments.
    fn part(&mut self, range: &Range<usize>) -> optim::Moments<'_> {
        match self {
            Self::F32(each) => each.each_mut().map(|x| &mut x[range.clone()]).into(),
            Self::Codes(each) => optim::Moments::Codes(each.each_mut().map(|x| x.get_mut(range.clone()))),
        }
    }
}

impl Moments {
    /// Restores the state after `step` updates, with moments in 8 bits if `coded`.
    pub fn new(step: u64, numbers: Numbers, coded: bool) -> Self {
        Self { step, host: OnHost::Memory(numbers).in_form(coded), ..Self::default() }
    }

    /// Stores the arrays that the CPU updates in a file of this folder, and not in main memory.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub fn in_file(mut self, folder: &Arc<Path>) -> Result<Self> {
        self.folder = Some(Arc::clone(folder));
        if !matches!(self.host, OnHost::File(_)) {
            let numbers = std::mem::take(&mut self.host).numbers();
            self.store(numbers)?;
        }
        Ok(self)
    }

    /// Reserves a file in this folder for the state of `len` values that were never updated.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub fn reserved(folder: &Arc<Path>, len: usize, with_master: bool) -> Result<Self> {
        let host = OnHost::File(StateFile::new(folder, len, with_master)?);
        Ok(Self { host, folder: Some(Arc::clone(folder)), ..Self::default() })
    }

    /// Allocates and touches main memory for the state of the values `range` that were never updated, with moments in 8 bits if `coded`.
    ///
    /// # Errors
    /// Returns an error as an update does.
    pub fn in_memory(param: &Param, range: Range<usize>, with_master: bool, coded: bool) -> Result<Self> {
        let mut own = Self::default();
        own.on_host(param, range, with_master, coded)?;
        Ok(own)
    }

    /// Stores arrays where the CPU updates them.
    fn store(&mut self, numbers: Numbers) -> Result<()> {
        self.host = match &self.folder {
            Some(folder) if !numbers.m.is_empty() => {
                let mut file = StateFile::new(folder, numbers.m.len(), !numbers.master.is_empty())?;
                let from = [&numbers.m, &numbers.v, &numbers.master];
                file.arrays_mut().into_iter().zip(from).for_each(|(to, from)| to.copy_from_slice(from));
                file.has_master = !numbers.master.is_empty();
                OnHost::File(file)
            }
            _ => OnHost::Memory(numbers),
        };
        Ok(())
    }

    /// Returns the first moment.
    pub fn m(&self) -> Cow<'_, [f32]> {
        self.moment(0)
    }

    /// Returns the second moment.
    pub fn v(&self) -> Cow<'_, [f32]> {
        self.moment(1)
    }

    fn moment(&self, which: usize) -> Cow<'_, [f32]> {
        match &self.card {
            Some(state) => state.moment(which).into(),
            None => self.host.array(which),
        }
    }

    /// Returns the f32 master copy of `param`, the weight of this state. The result is empty if there is no master.
    pub fn master(&self, param: &Param) -> Cow<'_, [f32]> {
        match &self.card {
            Some(state) => state.master(param).into(),
            None => self.host.array(2),
        }
    }

    pub fn has_master(&self) -> bool {
        match &self.card {
            Some(state) => state.rest.is_some(),
            None => !self.host.array(2).is_empty(),
        }
    }

    /// Returns the bytes of the arrays in main memory.
    pub fn host_bytes(&self) -> usize {
        match &self.host {
            OnHost::Memory(Numbers { m, v, master }) => 4 * (m.len() + v.len() + master.len()),
            OnHost::Codes(moments, master) => {
                moments.iter().map(Codes::num_bytes).sum::<usize>() + 4 * master.len()
            }
            OnHost::File(_) => 0,
        }
    }

    /// Returns the state for an update of the values `range` by the CPU, with moments in 8 bits if `coded`. Fetches it from the GPU if it
    /// is on one. New moments are zeros, and a new master is a copy of the weight. In files, moments are in f32.
    pub(crate) fn on_host(
        &mut self,
        param: &Param,
        range: Range<usize>,
        with_master: bool,
        coded: bool,
    ) -> Result<HostState<'_>> {
        if let Some(numbers) = self.card.as_ref().map(|state| state.numbers(param)) {
            self.store(numbers)?;
            self.card = None;
        }
        if let (Some(folder), 0) = (&self.folder, self.host.len()) {
            self.host = OnHost::File(StateFile::new(folder, range.len(), with_master)?);
        }
        self.host = std::mem::take(&mut self.host).in_form(coded);
        let begin = |master: &mut Vec<f32>| {
            if with_master && master.is_empty() {
                *master = param.f32_of(range.clone());
            }
        };
        Ok(match &mut self.host {
            OnHost::Memory(Numbers { m, v, master }) => {
                for moment in [&mut *m, &mut *v] {
                    if moment.len() != range.len() {
                        *moment = buffer::zeros(range.len());
                    }
                }
                begin(master);
                HostState { moments: HostMoments::F32([m, v]), master }
            }
            OnHost::Codes(moments, master) => {
                if moments[0].codes.is_empty() {
                    *moments = [(); 2].map(|()| Codes::zeros(range.len()));
                }
                begin(master);
                HostState { moments: HostMoments::Codes(moments), master }
            }
            OnHost::File(file) => {
                let is_new = with_master && !std::mem::replace(&mut file.has_master, with_master);
                let [m, v, master] = file.arrays_mut();
                for (at, part) in
                    (range.start..).step_by(PIECE).zip(master.chunks_mut(PIECE)).filter(|_| is_new)
                {
                    part.copy_from_slice(&param.f32_of(at..at + part.len()));
                }
                let master = if with_master { master } else { &mut [] };
                HostState { moments: HostMoments::F32([m, v]), master }
            }
        })
    }

    /// Removes and returns the state, for an update on a GPU.
    pub(crate) fn take(&mut self) -> (Option<gpu::State>, Numbers) {
        (self.card.take(), std::mem::take(&mut self.host).numbers())
    }

    /// Stores the state after an update on a GPU.
    pub(crate) fn put(&mut self, state: gpu::State) {
        self.card = Some(state);
    }
}

/// Scalar parameters of one AdamW step (`torch.optim.AdamW`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Learning rate.
    pub lr: f32,
    /// Decay rates of the first and second moments.
    pub betas: [f32; 2],
    /// Term added to the square root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Factor applied to the gradient, for clipping.
    pub grad_scale: f32,
    /// True if bf16 weights are updated through an f32 master.
    pub master: bool,
    /// True to round bf16 weights without a master at random, so that small updates count in the mean. The random numbers follow from
    /// the name of the weight and the number of its update.
    pub random: bool,
    /// True to keep moments in 8 bits, for weights of at least [`LEAST_CODED`] values; see [`omnigrpo_kernels::moments`].
    pub eight_bits: bool,
    /// True if main memory stores the state of weights on a GPU. The CPU then updates them: the gradient is copied to main memory
    /// and the weight back.
    pub offload: bool,
}

impl Step {
    /// Converts to the kernels' structure, for update number `step` of a weight.
    pub(crate) fn kernel(&self, step: u64) -> AdamW {
        let Self { lr, betas, eps, weight_decay, grad_scale, .. } = *self;
        AdamW { lr, betas, eps, weight_decay, grad_scale, step }
    }

    /// Returns whether a weight has an f32 master.
    pub(crate) fn has_master(&self, param: &Param) -> bool {
        self.master && param.dtype() == ParamDtype::Bf16
    }

    /// Returns whether a weight has moments in 8 bits.
    pub(crate) fn is_coded(&self, param: &Param) -> bool {
        self.eight_bits && param.len() >= LEAST_CODED
    }

    /// Returns how update number `step` of a weight without a master is rounded.
    pub(crate) fn rounding(&self, param: &Param, step: u64) -> Rounding {
        if self.random { Rounding::random(param.name(), step) } else { Rounding::Nearest }
    }
}

/// Sum of squares of a gradient.
#[derive(Clone, Copy, Debug)]
pub struct Squares {
    /// Device that computed the gradient. It reports why a sum is NaN ([`Device::finish`]).
    pub device: Device,
    /// Sum in f64.
    pub sum: f64,
}

/// Returns the sum of squares of each weight's gradient, or `None` for a weight without a gradient. Waits once for a GPU. With
/// `offload`, gradients on a GPU then start to travel to main memory.
pub fn squares(params: &[&Param], offload: bool) -> Vec<Option<Squares>> {
    let mut all: Vec<Option<Squares>> = params.iter().map(|param| param.squares_if_sent()).collect();
    let here: Vec<(usize, Rows)> = (params.iter().enumerate())
        .filter(|(at, _)| all[*at].is_none())
        .filter_map(|(at, param)| Some((at, param.grad_to_sum()?)))
        .collect();
    let sums = crate::gpu::sums_of_squares(&here.iter().map(|(_, rows)| rows).collect::<Vec<_>>());
    for ((at, rows), sum) in here.into_iter().zip(sums) {
        all[at] = Some(Squares { device: rows.device(), sum });
        drop(rows);
        if offload {
            params[at].send_grad(Some(sum));
        }
    }
    all
}

impl Param {
    /// Applies one AdamW step in place and consumes the weight's gradient. Returns `false` if the weight has no gradient. On a
    /// GPU the step is queued, and [`Device::finish`] reports its failure. Returns an error for a quantised weight.
    pub fn adamw(&self, moments: &mut Moments, step: &Step) -> Result<bool> {
        if step.offload {
            self.send_grad(None);
        }
        if let Some(grad) = self.take_sent() {
            moments.step += 1;
            // An outlined gradient has no values.
            if let Some(grad) = grad {
                self.adamw_range(0..self.len(), &grad, moments, step)?;
                self.recycle(grad);
            }
            return Ok(true);
        }
        let Some(grad) = self.take_grad() else { return Ok(false) };
        moments.step += 1;
        grad.device().backend().adamw(self, &grad, moments, step)?;
        Ok(true)
    }

    /// Applies one AdamW step to a range of the values, in main memory, with the gradient of this range. `moments` is the state of
    /// the range only, and its count of updates already includes this one. Returns an error for a quantised weight, or if the
    /// lengths differ.
    pub fn adamw_range(
        &self,
        range: Range<usize>,
        grad: &[f32],
        moments: &mut Moments,
        step: &Step,
    ) -> Result<()> {
        if range.end > self.len() || range.len() != grad.len() {
            let what = format!("{} gradients for elements {range:?} of {}", grad.len(), self.len());
            return Err(Error::Weight { name: self.name().to_owned(), what });
        }
        let by = step.kernel(moments.step);
        let (has_master, rounding) = (step.has_master(self), step.rounding(self, moments.step));
        let HostState { mut moments, master } =
            moments.on_host(self, range.clone(), has_master, step.is_coded(self))?;
        let first = range.start;
        self.rewrite(range, |whole, values| {
            let part = whole.start - first..whole.end - first;
            let weight = match values {
                ValuesMut::F32(weight) => Updated::F32(weight),
                ValuesMut::Bf16(weight) if has_master => Updated::Master(weight, &mut master[part.clone()]),
                ValuesMut::Bf16(weight) => Updated::Bf16(weight, rounding.after(whole.start)),
            };
            adamw(&grad[part.clone()], &by, weight, moments.part(&part));
        })
    }
}
