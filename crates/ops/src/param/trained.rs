//! The gradient of a weight, and its adapter.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use omnigrpo_kernels::buffer;

use crate::adapter::Adapter;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::gpu::Sent;
use crate::optim::{LEAST_CODED, Squares};
use crate::outline::{Held, holding};
use crate::param::Param;
use crate::rows::{Narrow, Rows};

/// Where a gradient is while no pass adds to it: in bf16, or on the way from a GPU to main memory.
#[derive(Debug, Default)]
struct Travel {
    /// Gradient in bf16. The weight has no other gradient then.
    narrow: Option<Narrow>,
    /// True if the next gradient is the last of this step, so that it can be sent.
    is_last: bool,
    /// Gradient that was sent. The weight has no other gradient then.
    sent: Option<Sent>,
    /// Memory for the next gradient.
    spare: Vec<f32>,
}

/// State that training adds to a weight.
#[derive(Debug, Default)]
pub(super) struct Trained {
    trainable: AtomicBool,
    /// Gradient `[1, len]` in the device's compute dtype, whatever the dtype of the weight. It is `None` until a gradient reaches
    /// the weight.
    grad: Mutex<Option<Rows>>,
    /// True to keep the gradient in bf16 between two additions.
    in_bf16: AtomicBool,
    travel: Mutex<Travel>,
    linear: AtomicBool,
    experts: AtomicBool,
    adapter: OnceLock<Arc<Adapter>>,
}

impl Param {
    /// Returns whether backward passes compute this weight's gradient.
    pub fn trainable(&self) -> bool {
        self.trained.trainable.load(Ordering::Relaxed)
    }

    /// Makes the weight trainable, or freezes it.
    pub fn set_trainable(&self, on: bool) {
        self.trained.trainable.store(on, Ordering::Relaxed);
    }

    /// Keeps the gradient in bf16, rounded to nearest even after each addition, which computes in f32. Weights of few values keep f32.
    pub fn keep_grad_in_bf16(&self, on: bool) {
        self.trained.in_bf16.store(on && self.len() >= LEAST_CODED, Ordering::Relaxed);
    }

    /// Returns whether the gradient is kept in bf16.
    pub fn keeps_grad_in_bf16(&self) -> bool {
        self.trained.in_bf16.load(Ordering::Relaxed)
    }

    /// Returns whether this is the weight `[n, k]` of a linear layer, which can have an adapter.
    pub fn is_linear(&self) -> bool {
        self.trained.linear.load(Ordering::Relaxed)
    }

    pub(crate) fn mark_linear(&self) {
        self.trained.linear.store(true, Ordering::Relaxed);
    }

    /// Returns whether this is the weight `[e, k, n]` of a layer of experts, which can have one adapter per expert.
    pub fn is_experts(&self) -> bool {
        self.trained.experts.load(Ordering::Relaxed)
    }

    pub(crate) fn mark_experts(&self) {
        self.trained.experts.store(true, Ordering::Relaxed);
    }

    /// Returns the adapter whose output is added to this weight's product.
    pub fn adapter(&self) -> Option<&Arc<Adapter>> {
        self.trained.adapter.get()
    }

    /// Attaches an adapter to the frozen weight of a linear layer or of experts. Returns an error if the weight is of another
    /// kind, is trained, already has an adapter, or differs in shape from the adapter.
    pub fn attach(&self, adapter: Arc<Adapter>) -> Result<()> {
        let shape = adapter.shape();
        let refuse = |what: String| Err(Error::Weight { name: self.name.clone(), what });
        if !(self.is_linear() || self.is_experts()) || self.shape != shape {
            let size = shape.iter().map(ToString::to_string).collect::<Vec<_>>().join("×");
            return refuse(format!(
                "an adapter {size} on {:?}; expected the weight of a linear layer, or of experts, of that size",
                self.shape
            ));
        }
        if self.trainable() {
            return refuse("an adapter on a trained weight; train either the weight or the adapter".into());
        }
        if self.trained.adapter.set(adapter).is_err() {
            return refuse("a second adapter; a weight can have only one".into());
        }
        Ok(())
    }

    /// Locks the gradient buffer on `device`. The first use creates zeros; a gradient on another device is moved. Returns `None`
    /// for a frozen weight.
    pub(crate) fn gradient(&self, device: Device) -> Option<GradGuard<'_>> {
        self.trainable().then(|| {
            let mut grad = self.lock_grad();
            let rows =
                grad.get_or_insert_with(|| holding(Held::Gradients, || Rows::zeros(device, 1, self.len())));
            if rows.device() != device {
                *rows = rows.to_device(device);
            }
            GradGuard { grad, param: self }
        })
    }

    /// Locks the gradient in f32. One that was sent to main memory arrives there first.
    fn lock_grad(&self) -> MutexGuard<'_, Option<Rows>> {
        let mut grad = self.trained.grad.lock().unwrap_or_else(PoisonError::into_inner);
        let (narrow, sent) = {
            let mut travel = self.travel();
            (travel.narrow.take(), travel.sent.take())
        };
        if let Some(narrow) = narrow {
            *grad = Some(holding(Held::Gradients, || narrow.wide()));
        }
        if let Some(sent) = sent {
            let arrived = match sent.wait(self.len()) {
                Some(values) => Rows::from_vec(values, 1, self.len()).ok(),
                None => Some(holding(Held::Gradients, || Rows::zeros(Device::Outline, 1, self.len()))),
            };
            *grad = arrived;
        }
        grad
    }

    /// Stores a gradient in bf16 if the weight keeps it so.
    fn narrow(&self, grad: &mut Option<Rows>) {
        if self.keeps_grad_in_bf16()
            && let Some(rows) = grad.take()
        {
            self.travel().narrow = Some(holding(Held::Gradients, || Narrow::of(rows)));
        }
    }

    fn travel(&self) -> MutexGuard<'_, Travel> {
        self.trained.travel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Announces that the next gradient is the last of this step. On a GPU, it is sent to main memory as soon as it is computed,
    /// and its memory on the GPU is freed. A further gradient in the same step brings it back.
    pub fn send_next_grad(&self) {
        self.travel().is_last = true;
    }

    /// Sends a gradient on a GPU to main memory. `squares` is the sum of its squares if it is known.
    pub(crate) fn send_grad(&self, squares: Option<f64>) {
        let is_sent = self.travel().sent.is_some();
        if !is_sent {
            self.send(&mut self.lock_grad(), squares);
        }
    }

    fn send(&self, grad: &mut Option<Rows>, squares: Option<f64>) {
        if let Some(rows) = grad.take() {
            let mut travel = self.travel();
            match Sent::start(rows, &mut travel.spare, squares) {
                Ok(sent) => travel.sent = Some(sent),
                Err(rows) => *grad = Some(rows),
            }
        }
    }

    /// Returns the sum of squares of a gradient that was sent. No further gradient is the last of this step.
    pub(crate) fn squares_if_sent(&self) -> Option<Squares> {
        let mut travel = self.travel();
        travel.is_last = false;
        travel.sent.as_mut().map(Sent::squares)
    }

    /// Returns the gradient for a sum: rows of its device, in bf16 if they are stored so there.
    pub(crate) fn grad_to_sum(&self) -> Option<Rows> {
        let narrow = self.travel().narrow.as_ref().map(Narrow::in_place);
        narrow.or_else(|| self.with_grad(|grad| grad.cloned()))
    }

    /// Returns the place of the gradient in the order in which gradients were sent to main memory, or 0 if it was not sent.
    pub fn sent(&self) -> u64 {
        self.travel().sent.as_ref().map_or(0, Sent::order)
    }

    /// Removes a gradient that was sent, and waits for its values. The inner value is `None` on [`Device::Outline`].
    pub(crate) fn take_sent(&self) -> Option<Option<Vec<f32>>> {
        let sent = self.travel().sent.take();
        sent.map(|sent| sent.wait(self.len()))
    }

    /// Allocates and touches main memory for the gradients that are sent from a GPU.
    pub fn reserve_grad(&self) {
        self.recycle(buffer::zeros(self.len()));
    }

    /// Keeps memory for the next gradient that is sent.
    pub(crate) fn recycle(&self, spare: Vec<f32>) {
        self.travel().spare = spare;
    }

    /// Creates a gradient of zeros if the weight has none. Does nothing for a frozen weight.
    pub fn reach(&self, device: Device) {
        let is_stored = {
            let travel = self.travel();
            travel.sent.is_some() || travel.narrow.is_some()
        };
        if !is_stored {
            drop(self.gradient(device));
        }
    }

    /// Runs `f` on the gradient `[1, len]`, or on `None` if no gradient has reached this weight since
    /// [`Self::clear_grad`].
    pub fn with_grad<R>(&self, f: impl FnOnce(Option<&mut Rows>) -> R) -> R {
        let mut grad = self.lock_grad();
        let result = f(grad.as_mut());
        self.narrow(&mut grad);
        result
    }

    /// Returns a copy of the gradient, or `None` if no gradient has reached this weight since [`Self::clear_grad`].
    pub fn grad(&self) -> Option<Vec<f32>> {
        self.with_grad(|grad| grad.map(|grad| grad.to_vec()))
    }

    /// Drops the gradient and frees its memory.
    pub fn clear_grad(&self) {
        *self.travel() = Travel::default();
        drop(self.take_grad());
    }

    /// Removes the gradient `[1, len]` and returns it, or `None` if no gradient has reached this weight since
    /// [`Self::clear_grad`].
    pub fn take_grad(&self) -> Option<Rows> {
        self.lock_grad().take()
    }

    /// Replaces the gradient `[1, len]`. Returns an error if its size differs.
    pub fn set_grad(&self, grad: Option<Rows>) -> Result<()> {
        if let Some(dims) = grad.as_ref().map(Rows::dims).filter(|dims| *dims != (1, self.len())) {
            let what = format!("got a gradient of {dims:?}, expected (1, {})", self.len());
            return Err(Error::Weight { name: self.name.clone(), what });
        }
        let mut own = self.lock_grad();
        *own = grad;
        self.narrow(&mut own);
        Ok(())
    }
}

/// Exclusive access to a gradient buffer; see [`Param::gradient`]. The last gradient of a step is sent when the guard is dropped.
pub(crate) struct GradGuard<'a> {
    grad: MutexGuard<'a, Option<Rows>>,
    param: &'a Param,
}

impl GradGuard<'_> {
    /// Returns the gradient on the CPU, in f32.
    pub(crate) fn cpu(&mut self) -> &mut [f32] {
        self.grad.as_mut().map(Rows::cpu_mut).unwrap_or_default()
    }

    /// Returns the gradient, whatever its device.
    pub(crate) fn rows(&mut self) -> Option<&mut Rows> {
        self.grad.as_mut()
    }

    /// Returns the gradient on the f64 twin.
    #[cfg(feature = "twin")]
    pub(crate) fn twin(&mut self) -> &mut [f64] {
        self.grad.as_mut().map(Rows::twin_mut).unwrap_or_default()
    }
}

impl Drop for GradGuard<'_> {
    fn drop(&mut self) {
        let is_last = self.param.travel().is_last;
        if is_last {
            // With the bits of a gradient that stays.
            let rounds = self.param.keeps_grad_in_bf16();
            *self.grad = self.grad.take().map(|rows| if rounds { Narrow::of(rows).wide() } else { rows });
            self.param.send(&mut self.grad, None);
        }
        self.param.narrow(&mut self.grad);
    }
}
