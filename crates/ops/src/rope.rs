//! Rotary position tables.

use crate::host::Host;

/// The angles of every row of a stream: `cos` and `sin` are `[rows, half]`, `half = head width / 2`.
///
/// One table serves all layers and heads. The rotation is the "rotate half" form: the pair of element `i` is
/// `i + half`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Pairs per head.
    pub half: usize,
    /// `[rows, half]`
    pub cos: Vec<f32>,
    /// `[rows, half]`
    pub sin: Vec<f32>,
    /// What devices have of the table.
    pub(crate) copies: Host<()>,
}

impl RopeTable {
    /// Builds the table from each row's angles; `fill(row, angles)` writes `half` angles in radians.
    pub fn from_angles(rows: usize, half: usize, mut fill: impl FnMut(usize, &mut [f32])) -> Self {
        let mut angles = vec![0.0f32; rows * half];
        for (row, out) in angles.chunks_exact_mut(half.max(1)).enumerate() {
            fill(row, out);
        }
        // As PyTorch: the angle is rounded to f32, its cosine is exact to f32.
        let cos = angles.iter().map(|&a| f64::from(a).cos() as f32).collect();
        let sin = angles.iter().map(|&a| f64::from(a).sin() as f32).collect();
        Self { half, cos, sin, copies: Host::default() }
    }

    /// The table of a rotation that stretches by `factor` besides; its transpose stretches as well.
    #[must_use]
    pub fn scaled(mut self, factor: f32) -> Self {
        if factor != 1.0 {
            self.cos.iter_mut().chain(&mut self.sin).for_each(|x| *x *= factor);
            self.copies = Host::default();
        }
        self
    }

    /// Rows of the stream.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.cos.len().checked_div(self.half).unwrap_or(0)
    }
}
