//! Writes the embedded checkpoint's files with random weights, for `omnigrpo sft` to start from:
//! `cargo run -p omnigrpo-demo --example start -- DIR [SEED]`.

use std::path::Path;

use omnigrpo_models::{Model, WeightDtype};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("expected a directory to write to")?;
    let dir = Path::new(&dir);
    let seed = args.next().map_or(Ok(1), |text| text.parse())?;
    omnigrpo_demo::write_model(dir)?;
    Model::random(dir, seed, WeightDtype::Float32)?.save_weights(dir)?;
    Ok(())
}
