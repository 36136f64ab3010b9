//! Settings of one pass through a model.

use std::sync::Arc;

use crate::device::Device;
use crate::error::Result;
use crate::experts::{RouterLoss, SameExperts};
use crate::order::Order;

/// Settings of one pass through a model, which are passed down by reference.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    pub device: Device,
    /// Order of summation in products.
    pub order: Order,
    /// Dropout of adapters, if any.
    pub dropout: Option<Dropout>,
    /// Losses of the experts' routers, if any.
    pub router: Option<Arc<RouterLoss>>,
    /// Comparison of the rows' experts with those of an earlier pass, if any.
    pub experts: Option<Arc<SameExperts>>,
    /// Source of the weights that are not in memory all the time, if any.
    pub lender: Option<Arc<dyn Lend>>,
}

/// Source of weights that are in memory only while a pass uses them.
pub trait Lend: std::fmt::Debug + Send + Sync {
    /// Completes the values of the weights of a layer. They stay until the next layer is requested.
    ///
    /// # Errors
    /// Returns an error if the values cannot be fetched.
    fn lend(&self, layer: usize) -> Result<()>;
}

impl Pass {
    /// Creates a pass with blocked products and without dropout.
    pub fn on(device: Device) -> Self {
        Self { device, ..Self::default() }
    }

    /// Uses products in which the bits of a row do not depend on other rows.
    #[must_use]
    pub fn per_row(self) -> Self {
        Self { order: Order::PerRow, ..self }
    }

    /// Uses this dropout.
    #[must_use]
    pub fn dropping(self, dropout: Option<Dropout>) -> Self {
        Self { dropout, ..self }
    }
}

/// Keys of the dropout masks of one pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Dropout {
    pub(crate) key: u64,
    pub(crate) rows: Option<Arc<[u64]>>,
}

impl Dropout {
    /// Creates masks for the update identified by `key`. `rows` contains the key of each row of the pass; `None` means that the
    /// key of a row is its index.
    pub fn new(key: u64, rows: Option<Arc<[u64]>>) -> Self {
        Self { key: omnigrpo_kernels::dropout::mix(key), rows }
    }

    /// Restricts the masks to the rows given by index.
    pub(crate) fn of_rows(&self, rows: &[usize]) -> Self {
        let keys = rows.iter().map(|&row| self.rows.as_ref().map_or(row as u64, |keys| keys[row]));
        Self { key: self.key, rows: Some(keys.collect()) }
    }
}
