//! Means over a logging window.

use crate::Metric;

/// Mean of each metric over the steps since the last [`Window::drain`].
///
/// Values that are `None` or not finite are left out; a metric without any other value averages to `None`. A metric that is missing
/// in some steps is averaged over the others.
#[derive(Debug, Clone, Default)]
pub struct Window {
    // A scan of a few dozen names is as fast as a map, and it keeps the order of first occurrence.
    sums: Vec<(String, f64, u32)>,
}

impl Window {
    /// Adds the metrics of one step.
    pub fn push(&mut self, metrics: &[Metric]) {
        for (name, value) in metrics {
            let at = self.sums.iter().position(|(known, ..)| known == name).unwrap_or_else(|| {
                self.sums.push((name.clone(), 0.0, 0));
                self.sums.len() - 1
            });
            if let Some(value) = value.filter(|v| v.is_finite()) {
                let (_, sum, count) = &mut self.sums[at];
                *sum += value;
                *count += 1;
            }
        }
    }

    /// Returns the means in the order in which the names first occurred, and empties the window.
    pub fn drain(&mut self) -> Vec<Metric> {
        let mean = |sum: f64, count: u32| (count > 0).then(|| sum / f64::from(count));
        self.sums.drain(..).map(|(name, sum, count)| (name, mean(sum, count))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(values: &[(&str, Option<f64>)]) -> Vec<Metric> {
        values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn means_leave_out_what_was_not_measured_and_the_window_clears() {
        let mut window = Window::default();
        window.push(&row(&[("loss", Some(1.0)), ("kl", None), ("reward", Some(f64::NAN))]));
        window.push(&row(&[("loss", Some(2.0)), ("kl", None), ("reward", Some(0.5)), ("late", Some(4.0))]));
        let expected = row(&[("loss", Some(1.5)), ("kl", None), ("reward", Some(0.5)), ("late", Some(4.0))]);
        assert_eq!(window.drain(), expected);
        window.push(&row(&[("loss", Some(7.0))]));
        assert_eq!(window.drain(), row(&[("loss", Some(7.0))]));
        assert_eq!(window.drain(), []);
    }
}
