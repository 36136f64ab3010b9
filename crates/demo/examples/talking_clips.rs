//! Writes the talking clips: `cargo run -p omnigrpo-demo --example talking_clips -- DIR [SEED [SFT TRAIN EVAL]]`.

mod arguments;

use omnigrpo_demo::Sizes;
use omnigrpo_demo::talking::generate_talking;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (dir, seed, sizes) = arguments::read(Sizes::TALKING)?;
    Ok(generate_talking(&dir, seed, sizes)?)
}
