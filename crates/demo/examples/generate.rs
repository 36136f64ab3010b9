//! Writes the demo's dataset: `cargo run -p omnigrpo-demo --example generate -- DIR [SEED]`.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("expected a directory to write to")?;
    let seed = args.next().map_or(Ok(1), |text| text.parse())?;
    omnigrpo_demo::generate(Path::new(&dir), seed, omnigrpo_demo::Sizes::default())?;
    Ok(())
}
