//! `demo`: the embedded checkpoint on the generated task.

use anyhow::Result;

use super::Context;
use crate::values::Resolved;

/// Trains the embedded model and shows before and after.
pub fn demo(_resolved: &Resolved, _context: &Context) -> Result<()> {
    anyhow::bail!("not yet")
}
