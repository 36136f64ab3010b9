//! How a CPU multiplies with the weights of a model, where there is more than one way.

use crate::paths::{Cpu, Path, Unavailable};
use crate::quant;

/// How a CPU multiplies with the weights of a model. Each [`Weight`](crate::Weight) carries it, so models of one process do not
/// affect each other. It has no effect on f32 weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Arithmetic {
    /// Path of products with bf16 weights, and with 8-bit or 4-bit weights that are widened. With `None`, the CPU model decides.
    pub bf16_products: Option<Path>,
    /// True to keep the inputs of products with 8-bit or 4-bit weights in f32, both for many rows and for few, so that the two
    /// differ only in the order of sums. If false, products of few rows round inputs if [`Self::rounds_inputs`]. Products of many
    /// rows round them in the same way if [`Self::one_kernel`], else if [`Self::rounds_bf16`].
    pub keeps_inputs: bool,
}

impl Arithmetic {
    /// Returns an error if the CPU cannot use the given path.
    ///
    /// # Errors
    /// Returns [`Unavailable`], which says why.
    pub fn check(self) -> Result<(), Unavailable> {
        match self.bf16_products.filter(|path| !path.works()) {
            Some(path) => Err(Unavailable { path, why: path.why() }),
            None => Ok(()),
        }
    }

    /// Returns the path of products with bf16 weights. Products that widen 8-bit or 4-bit weights use it too. If the given path
    /// does not work ([`Self::check`]), the CPU model decides.
    #[must_use]
    pub fn path(self) -> Path {
        self.bf16_products.filter(|path| path.works()).unwrap_or_else(|| match Cpu::here() {
            Some(cpu) => cpu.path(Path::Amx.works(), Path::Dot.works()),
            None => Path::Widened,
        })
    }

    /// Returns true if products with a bf16 weight round the other factor to bf16, because their instructions multiply only bf16.
    #[must_use]
    pub fn rounds_bf16(self) -> bool {
        self.path() != Path::Widened
    }

    /// Returns true if products of few rows with 8-bit or 4-bit weights convert their inputs to bytes, because this CPU multiplies
    /// bytes faster.
    #[must_use]
    pub fn rounds_inputs(self) -> bool {
        !self.keeps_inputs && quant::multiplies_bytes()
    }

    /// Returns true if products of many rows with 8-bit or 4-bit weights use the kernel of decoding, so that a row has the same
    /// bits in both. This is the case if inputs are converted to bytes ([`Self::rounds_inputs`]) and the path has no matrix tiles,
    /// which multiply many rows several times as fast.
    #[must_use]
    pub fn one_kernel(self) -> bool {
        self.rounds_inputs() && self.path() != Path::Amx
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unavailable_path_is_refused() {
        for path in Path::ALL {
            let arithmetic = Arithmetic { bf16_products: Some(path), ..Arithmetic::default() };
            match arithmetic.check() {
                Ok(()) => assert_eq!(arithmetic.path(), path),
                Err(error) => {
                    assert!(!path.works() && error.to_string().contains(path.name()), "{error}");
                    assert_eq!(arithmetic.path(), Arithmetic::default().path());
                }
            }
        }
    }

    #[test]
    fn inputs_are_kept_by_choice_alone() {
        let kept = Arithmetic { keeps_inputs: true, ..Arithmetic::default() };
        assert!(!kept.rounds_inputs() && !kept.one_kernel());
        assert_eq!(Arithmetic::default().rounds_inputs(), quant::multiplies_bytes());
    }
}
