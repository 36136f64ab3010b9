//! Backward through a model one segment at a time.
//!
//! A segment is a function from one `[t, h]` tensor to another, typically one transformer block. In training its
//! input is a fresh `Var`, so candle records the segment's ops and nothing before them. The backward pass walks the
//! segments in reverse, and each segment's activations are freed as soon as its gradient is known; with
//! `recompute` they are not even kept, and the segment runs a second time (Chen et al., arXiv 1604.06174).

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, Var, bail};

type Run<'a> = Box<dyn Fn(&Tensor) -> Result<Tensor> + 'a>;

/// A chain of segments that has run forward and waits for its backward pass.
#[derive(Default)]
pub struct Segments<'a> {
    recompute: bool,
    chain: Vec<Segment<'a>>,
}

struct Segment<'a> {
    input: Var,
    output: Option<Tensor>,
    run: Run<'a>,
}

impl<'a> Segments<'a> {
    /// An empty chain. With `recompute`, activations inside segments are computed again in the backward pass
    /// instead of being kept.
    #[must_use]
    pub fn new(recompute: bool) -> Self {
        Self { recompute, chain: Vec::new() }
    }

    /// Runs `run` on `x` and records it. The result is detached: it belongs to the next segment.
    ///
    /// # Errors
    /// Whatever `run` returns.
    pub fn push(&mut self, x: &Tensor, run: impl Fn(&Tensor) -> Result<Tensor> + 'a) -> Result<Tensor> {
        let input = Var::from_tensor(&x.detach())?;
        let output = if self.recompute { run(&input.as_detached_tensor())? } else { run(&input)? };
        let next = output.detach();
        self.chain.push(Segment { input, output: (!self.recompute).then_some(output), run: Box::new(run) });
        Ok(next)
    }

    /// Carries `dy`, the gradient of the last output, back to the first input, adding weight gradients on the way.
    ///
    /// # Errors
    /// A shape of `dy` that differs from the output's.
    pub fn backward(self, mut dy: Tensor) -> Result<Tensor> {
        for segment in self.chain.into_iter().rev() {
            let Segment { input, output, run } = segment;
            let output = match output {
                Some(output) => output,
                None => run(&input)?,
            };
            if output.shape() != dy.shape() {
                bail!("segment backward: output is {:?}, gradient is {:?}", output.shape(), dy.shape());
            }
            let mut grads = output.apply_op1(Seed(dy))?.backward()?;
            drop(output);
            dy = match grads.remove(&input) {
                Some(dx) => dx,
                None => bail!("segment backward: no gradient reached the input of shape {:?}", input.shape()),
            };
        }
        Ok(dy)
    }
}

/// A scalar whose gradient with respect to its input is the stored tensor: the start of a backward pass whose
/// upstream gradient is already known.
struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, _one: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}
