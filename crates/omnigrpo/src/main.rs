//! The `omnigrpo` program.
fn main() {}
