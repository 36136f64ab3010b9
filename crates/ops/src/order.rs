//! Order of summation.

/// Order of summation in a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Blocked matrix product, for training, scoring, prefill and towers.
    #[default]
    Blocked,
    /// Product for decoding: the bits of a row depend only on that row and the weight, not on the rest of the batch.
    PerRow,
}
