//! Rotary position tables.

mod cpu;
mod gpu;
mod outline;
#[cfg(feature = "twin")]
mod twin;

use std::fmt;
use std::sync::{Arc, OnceLock};

use omnigrpo_kernels::parallel;

use crate::host::Host;
use crate::rows::Rows;

/// Rotary positions.
pub(crate) trait RopeOps {
    /// Applies rotary positions to the first heads of each row, in place. `heads` states their number and width.
    fn rotate(&self, x: &mut Rows, table: &RopeTable, heads: [usize; 2], inverse: bool);
}

type Fill = dyn Fn(usize, &mut [f32]) + Send + Sync;

/// Angles that a thread processes at a time; then the cost of one cosine in elementary operations.
const PART: usize = 512;
const OPERATIONS: usize = 16;

/// Rotary angles of every row of a stream. The angles, cosines and sines are computed when a device first reads them. An outlined
/// step never reads them; computing them would take most of its time.
///
/// One table serves all layers and heads. The rotation is the "rotate half" form, which pairs element `i` of a head with
/// `i + half`. The elements from `2 · half` on are not rotated.
#[derive(Clone)]
pub struct RopeTable {
    /// Number of pairs per head.
    pub half: usize,
    rows: usize,
    /// Function that writes the `half` angles of a row, in radians.
    fill: Arc<Fill>,
    factor: f32,
    /// Cosines and sines, `[rows, half]` each.
    waves: OnceLock<[Vec<f32>; 2]>,
    /// Copies of the table in the form that each device needs.
    pub(crate) copies: Host<()>,
}

impl fmt::Debug for RopeTable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("RopeTable")
            .field("rows", &self.rows)
            .field("half", &self.half)
            .finish_non_exhaustive()
    }
}

impl RopeTable {
    /// Creates the table from a function: `fill(row, angles)` writes the `half` angles of a row, in radians.
    pub fn from_angles(
        rows: usize,
        half: usize,
        fill: impl Fn(usize, &mut [f32]) + Send + Sync + 'static,
    ) -> Self {
        let fill: Arc<Fill> = Arc::new(fill);
        Self { half, rows, fill, factor: 1.0, waves: OnceLock::new(), copies: Host::default() }
    }

    /// Creates a table from cosines and sines, `[rows, half]` each. `copies` contains the copies that devices already have.
    pub(crate) fn of_waves(half: usize, waves: [Vec<f32>; 2], copies: Host<()>) -> Self {
        let rows = waves[0].len().checked_div(half).unwrap_or(0);
        Self { half, rows, fill: Arc::new(|_, _| ()), factor: 1.0, waves: waves.into(), copies }
    }

    /// Multiplies the result of the rotation by `factor`, and the result of the inverse rotation as well.
    #[must_use]
    pub fn scaled(self, factor: f32) -> Self {
        Self { factor: self.factor * factor, waves: OnceLock::new(), copies: Host::default(), ..self }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns cosines and sines, `[rows, half]` each, multiplied by the factor.
    pub fn waves(&self) -> &[Vec<f32>; 2] {
        let angles = || {
            let mut angles = vec![0.0f32; self.rows * self.half];
            let rows = angles.chunks_exact_mut(self.half.max(1)).enumerate();
            rows.for_each(|(row, out)| (self.fill)(row, out));
            angles
        };
        // The angle is rounded to f32 and its cosine is accurate to f32, as in PyTorch.
        let of_each = |angles: &[f32], f: fn(f64) -> f64| {
            let wave = |&a: &f32| f(f64::from(a)) as f32 * self.factor;
            let some = |part: &[f32]| part.iter().map(wave).collect::<Vec<_>>();
            parallel::map(angles.chunks(PART), OPERATIONS * angles.len(), some).concat()
        };
        self.waves.get_or_init(|| {
            let angles = angles();
            [of_each(&angles, f64::cos), of_each(&angles, f64::sin)]
        })
    }
}
