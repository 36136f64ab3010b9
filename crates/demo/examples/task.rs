//! Writes the demo's dataset: `cargo run -p omnigrpo-demo --example task -- DIR [SEED [SFT TRAIN EVAL]]`.

mod arguments;

use omnigrpo_demo::{Sizes, generate};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (dir, seed, sizes) = arguments::read(Sizes::default())?;
    generate(&dir, seed, sizes)?;
    Ok(())
}
