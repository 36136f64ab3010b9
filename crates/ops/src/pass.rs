//! Settings of one pass through a model, handed down by reference.

use std::sync::Arc;

use crate::device::Device;
use crate::experts::RouterLoss;
use crate::linear::Order;

/// One pass through a model.
#[derive(Clone, Debug, Default)]
pub struct Pass {
    /// Where it runs.
    pub device: Device,
    /// How products sum.
    pub order: Order,
    /// Dropout of adapters; `None` drops nothing.
    pub dropout: Option<Dropout>,
    /// Losses of routers of experts; `None` for none.
    pub router: Option<Arc<RouterLoss>>,
}

impl Pass {
    /// A pass without dropout in blocked products.
    #[must_use]
    pub fn on(device: Device) -> Self {
        Self { device, ..Self::default() }
    }

    /// Returns the pass with products whose rows do not depend on each other.
    #[must_use]
    pub fn per_row(self) -> Self {
        Self { order: Order::PerRow, ..self }
    }

    /// Returns the pass with dropout.
    #[must_use]
    pub fn dropping(self, dropout: Option<Dropout>) -> Self {
        Self { dropout, ..self }
    }
}

/// Key of the dropout masks of one pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Dropout {
    pub(crate) key: u64,
    pub(crate) rows: Option<Arc<[u64]>>,
}

impl Dropout {
    /// Masks for the update that `key` names. `rows` names each row of the pass; without, a row is named by its index.
    #[must_use]
    pub fn new(key: u64, rows: Option<Arc<[u64]>>) -> Self {
        Self { key: omnigrpo_kernels::dropout::mix(key), rows }
    }

    /// The masks of some of the rows, by index.
    pub(crate) fn of_rows(&self, rows: &[usize]) -> Self {
        let keys = rows.iter().map(|&row| self.rows.as_ref().map_or(row as u64, |keys| keys[row]));
        Self { key: self.key, rows: Some(keys.collect()) }
    }
}
