//! Difference between two computations of the same log-probabilities.

/// Maximum and sum of the differences between two computations of log-probabilities.
#[derive(Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Gap {
    max: f64,
    sum: f64,
    tokens: u64,
}

impl Gap {
    pub(crate) fn add(&mut self, rollout: &[f32], training: &[f32]) {
        for (a, b) in rollout.iter().zip(training) {
            let d = f64::from((a - b).abs());
            self.max = self.max.max(d);
            self.sum += d;
            self.tokens += 1;
        }
    }

    /// Adds the differences of another part.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.max = self.max.max(other.max);
        self.sum += other.sum;
        self.tokens += other.tokens;
    }

    /// Returns the largest and the mean difference; `None` without tokens.
    pub(crate) fn finish(&self) -> Option<(f64, f64)> {
        (self.tokens > 0).then(|| (self.max, self.sum / self.tokens as f64))
    }
}
