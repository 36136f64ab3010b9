//! CIDEr-D.

/// In how many training items each n-gram occurs.
#[derive(Debug, Clone, Default)]
pub struct DocumentFrequencies {}
